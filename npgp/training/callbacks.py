"""Callbacks between device calls of a training: the progress bar, evaluations, early stopping, and users' own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from tqdm.auto import tqdm

from npgp import checks
from npgp.training.run import Training

__all__ = ["Best", "Callback", "Monitor", "Progress"]


class Callback:
    """
    Base class of what takes part in a training between device calls, for ``npgp.fit(…, callbacks=[…])``. A subclass has
    those of the methods that it needs.

    .. code-block:: python

        class Plateau(npgp.training.Callback):  # ends a training whose loss no longer falls
            def until(self, step):
                return 20 - step % 20  # every twenty steps

            def __call__(self, training):
                before, after = training.losses[-40:-20], training.losses[-20:]
                return len(before) == 20 and after.mean() > before.mean()


        npgp.fit(svi, key, 400, X, y, callbacks=[Plateau()], progress=False)
    """

    def begin(self, training: Training) -> None:
        """Take notice of a training before its first step."""

    def until(self, step: int) -> int | None:
        """
        Number of steps after ``step`` at which it is next called.

        :param step: number of steps so far, over all continuations.
        :return: at least 1; ``None`` if it may be called whenever a device call ends, about once a second.
        """
        return None

    def __call__(self, training: Training) -> bool | None:
        """
        Look at a training where it is due, and at the state from which one goes on.

        :param training: with its ``step``, ``losses``, ``params`` and ``state``; where the latter is set, training goes
            on from that.
        :return: whether training should stop.
        """

    def end(self, training: Training, error: BaseException | None) -> None:
        """
        Take notice of the end.

        :param error: what ended the training before its last step, a ``KeyboardInterrupt`` for instance.
        """

    def snapshot(self) -> dict[str, np.ndarray]:
        """State that a continued training needs in another process, arrays by name: checkpoints save them."""
        return {}

    def restore(self, snapshot: dict[str, np.ndarray], params: dict[str, Any]) -> None:
        """
        Go on as after an earlier run.

        :param snapshot: what :meth:`snapshot` returned there; empty if that run did without.
        :param params: parameters of the same model, for their structure.
        """


class Progress(Callback):
    """A bar with the ELBO (mean of the last hundred steps), the rate and the time left, by tqdm."""

    def begin(self, training: Training) -> None:
        """Implement :meth:`Callback.begin`."""
        self._bar = tqdm(total=training.num_steps, initial=training.done, unit="step", desc="compiling")

    def __call__(self, training: Training) -> None:
        """Implement :meth:`Callback.__call__`."""
        if self._bar.desc:
            self._bar.set_description_str("", refresh=False)
            self._bar.unpause()  # so that the time left is that of steps
        elbo = -float(np.mean(training.losses[-100:]))
        per_row = f", per row {elbo / training.num_rows:.4g}" if training.num_rows else ""
        moving = f", {training.moving}" if training.moving else ""
        self._bar.set_postfix_str(f"ELBO {elbo:.6g}{per_row}{moving}", refresh=False)
        self._bar.update(training.done - self._bar.n)

    def end(self, training: Training, error: BaseException | None) -> None:
        """Implement :meth:`Callback.end`."""
        self._bar.set_description_str("", refresh=False)
        self._bar.close()


class Best(NamedTuple):
    """
    The best evaluation so far.
    """

    #: After how many steps.
    step: int
    #: What the metric returned.
    value: float
    #: The parameters then, constrained, by site name, as NumPy arrays.
    params: dict[str, Any]


class Monitor(Callback):
    """
    Evaluates a model every so many steps of :func:`npgp.fit`, remembers the best parameters, and stops the training
    when they no longer get better:

    .. code-block:: python

        def error(params):
            predicted = npgp.posterior("f", model, guide, params, X).mean(X)
            return float(jnp.mean(jnp.square(y - predicted)))  # of rows held out, in earnest


        monitor = npgp.training.Monitor(error, every=50, patience=10)
        result = npgp.fit(svi, key, 100, X, y, monitor=monitor)
        monitor.history, monitor.best.step, monitor.best.params

    Each fit starts it afresh, unless the fit goes on from a checkpoint or from ``init_state``.

    :param metric: function of the constrained parameters, ``{site name: value}``, that returns one number. It should
        depend on nothing else: then a run that was interrupted goes on as if it had not been.
    :param every: number of steps between evaluations, which take place after its multiples.
    :param patience: after how many evaluations in a row that are no better than the best before them training stops;
        ``None`` does not stop it.
    :param mode: whether less or more is better.
    :param min_delta: by how much, at least, an evaluation must be better than the best before it to count as such.
    """

    #: Number of steps and value of each evaluation, in order.
    history: list[tuple[int, float]]
    #: The best of them; ``None`` before the first that is a number.
    best: Best | None

    def __init__(
        self,
        metric: Callable[[dict[str, Any]], Any],
        *,
        every: int = 1000,
        patience: int | None = None,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ):
        every = checks.whole_number(every, "every")
        patience = None if patience is None else checks.whole_number(patience, "patience")
        checks.one_of(mode, "mode", ("min", "max"))
        if not min_delta >= 0:
            raise ValueError(f"min_delta is {min_delta}, not at least 0.")
        self.metric, self.every, self.patience, self.mode, self.min_delta = metric, every, patience, mode, min_delta
        self.history, self.best = [], None

    @property
    def stopped(self) -> bool:
        """True once ``patience`` is used up."""
        if self.patience is None:
            return False
        best = -1 if self.best is None else self.best.step
        return sum(step > best for step, _ in self.history) >= self.patience

    def until(self, step: int) -> int:
        """Number of steps after ``step`` to the next evaluation."""
        return self.every - step % self.every

    def due(self, step: int) -> bool:
        """True if the metric is to be evaluated after ``step`` steps."""
        return step > 0 and step % self.every == 0 and not (self.history and self.history[-1][0] >= step)

    def begin(self, training: Training) -> None:
        """Implement :meth:`Callback.begin`."""
        if training.step == 0:
            self.reset()

    def __call__(self, training: Training) -> bool:
        """Evaluate, if it is time; whether training should stop."""
        if self.due(training.step):
            self.record(training.step, training.params)
        return self.stopped

    def record(self, step: int, params: dict[str, Any]) -> bool:
        """
        Evaluate.

        :param step: the number of steps so far.
        :param params: constrained parameters by site name.
        :return: whether training should stop.
        :raises TypeError: if the metric returns something else than a number.
        """
        value = _number(self.metric(params))
        if math.isnan(value) and not any(math.isnan(old) for _, old in self.history):
            warnings.warn(
                f"The monitor's metric is NaN after {step} steps; that counts as no improvement.", stacklevel=3
            )
        if self._better(value):
            # Copies on the host: training goes on in the memory that these values are in.
            self.best = Best(step, value, jax.tree.map(np.array, params))
        self.history.append((step, value))
        return self.stopped

    def _better(self, value: float) -> bool:
        if self.best is None:
            return not math.isnan(value)
        gain = self.best.value - value if self.mode == "min" else value - self.best.value
        return gain > self.min_delta

    def reset(self) -> None:
        """Forget all evaluations."""
        self.history, self.best = [], None

    def snapshot(self) -> dict[str, np.ndarray]:
        """All evaluations and the best parameters, as arrays, for :meth:`restore`."""
        steps, values = zip(*self.history, strict=True) if self.history else ((), ())
        arrays = {"steps": np.array(steps, np.int64), "values": np.array(values, np.float64)}
        if self.best is not None:
            arrays |= {"best.step": np.array(self.best.step, np.int64), "best.value": np.array(self.best.value)}
            arrays |= {f"best.{i}": leaf for i, leaf in enumerate(jax.tree.leaves(self.best.params))}
        return arrays

    def restore(self, snapshot: dict[str, np.ndarray], params: dict[str, Any]) -> None:
        """
        Take up the evaluations of an earlier run.

        :param snapshot: what :meth:`snapshot` returned; if empty, there were no evaluations.
        :param params: parameters of the same model, for their structure.
        """
        self.reset()
        if snapshot:
            self.history = list(zip(snapshot["steps"].tolist(), snapshot["values"].tolist(), strict=True))
        if "best.step" in snapshot:
            like, structure = jax.tree.flatten(params)
            leaves = [np.array(snapshot[f"best.{i}"]) for i in range(len(like))]
            step, value = int(snapshot["best.step"]), float(snapshot["best.value"])
            self.best = Best(step, value, jax.tree.unflatten(structure, leaves))


def _number(value: Any) -> float:
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "biuf":
        kind = f"an array of shape {array.shape}" if array.ndim else f"{value!r}"
        raise TypeError(f"The monitor's metric returned {kind}, not one number.")
    return float(array)
