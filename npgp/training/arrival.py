"""
Training until the guide's posterior has arrived: what ``npgp.fit(svi, rng_key, None, ...)`` does.

The loss does not say so: its last ten nats, in which intervals widen threefold, are a small share of what it moved by.
So the posterior itself is watched. Parameters are averaged over windows of steps at one learning rate; draws from the
guide at two averages, by the same random numbers, say by how many of its standard deviations each latent value has
moved, and by how much these have changed. Where that is little, or no longer falls while the loss gains nothing, what
is left is the noise of that rate: the rate falls, windows grow, and when a lower rate no longer changes the posterior,
training has arrived (after Welandawe, Andersen, Vehtari & Huggins 2022, arXiv 2203.15945).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro import handlers

from npgp import checks
from npgp.contract import constrained, unconstrained
from npgp.model.rerun import is_latent
from npgp.programs.compiled import STEPS, Program, one_model_at_a_time
from npgp.training.callbacks import Callback
from npgp.training.convergence import TrainingWarning
from npgp.training.optimizers import Averaging
from npgp.training.run import Training

__all__ = ["Arrival", "Convergence"]

#: By what the learning rate falls.
FALL = 0.3
#: A lower rate may change the posterior by so many times the tolerance.
OF_RATE = 1.5
#: What is no longer less than so much of its median has stopped falling.
STALLED = 0.7
#: Windows at one rate.
MOST_WINDOWS = 60
#: Of what has one value and no standard deviation, such as a ``numpyro.param``, the share that counts as one.
OF_VALUE = 0.05


#: By site, by how many standard deviations means moved, and by how much their logarithms changed.
Drift: TypeAlias = tuple[dict[str, float], dict[str, float]]


class Summary(NamedTuple):
    """Means and standard deviations of the guide's draws, by site."""

    mean: dict[str, np.ndarray]
    deviation: dict[str, np.ndarray]


@dataclass(frozen=True)
class Convergence:
    """
    How a training arrived, ``result.convergence``: ``print`` it for a table of the latent sites.

    .. code-block:: python

        svi = SVI(model, guide, npgp.adam(0.05), TraceMeanField_ELBO())
        roughly = [npgp.training.Arrival(tolerance=0.3, window=100)]
        convergence = npgp.fit(svi, key, None, X, y, callbacks=roughly, progress=False).convergence
        assert convergence.arrived and convergence.slowest in convergence.moved

    :param arrived: whether the posterior stood still at the end.
    :param steps: number of steps taken.
    :param rates: learning rates, and the steps taken at each.
    :param moved: of each site, by how many of its standard deviations an entry's mean differs from that at the rate
        before, at most; where there was none, from that of the window before.
    :param widened: likewise, the change of the logarithm of a standard deviation.
    """

    arrived: bool
    steps: int
    rates: tuple[tuple[float, int], ...]
    moved: dict[str, float]
    widened: dict[str, float]

    @property
    def slowest(self) -> str:
        """The site that moved most."""
        return _slowest(self.moved, self.widened)

    def __str__(self) -> str:
        width = max(map(len, self.moved), default=4)
        lines = [f"{'site':{width}}  moved by (sds)  log sd changed by"]
        lines += [f"{n:{width}}  {self.moved[n]:14.3f}  {self.widened[n]:17.3f}" for n in self.moved]
        rates = ", ".join(f"{steps} at {rate:.3g}" for rate, steps in self.rates)
        ended = "the posterior stands still" if self.arrived else "the posterior still moves"
        return "\n".join([*lines, f"{self.steps} steps ({rates}): {ended}"])


class Arrival(Callback):
    """
    Ends a training when the guide's posterior has arrived; ``npgp.fit(svi, rng_key, None, …)`` has one by itself:

    .. code-block:: python

        svi = SVI(model, guide, npgp.adam(0.05), TraceMeanField_ELBO())
        arrival = npgp.training.Arrival(tolerance=0.3, window=100)  # if .1 is more than is needed
        result = npgp.fit(svi, key, None, X, y, callbacks=[arrival], progress=False)
        print(result.convergence)

    The optimizer is :func:`npgp.adam` without a number of steps, whose rate it lowers; so it does not matter much where
    that begins. ``result.params`` are averages of iterates, with less noise than any. Several draws a step,
    ``TraceMeanField_ELBO(num_particles=8)``, often take fewer steps.

    :param tolerance: by how many of its standard deviations, and by what in their logarithm, a latent value may move.
    :param window: number of steps at the first rate between two looks.
    :param max_steps: number of steps after which it ends with a warning.
    :param draws: number of draws from the guide at each look.
    :raises TypeError: for arguments that are no numbers, and in :func:`npgp.fit` for another optimizer.
    :raises ValueError: for numbers below 1, and a tolerance that is not positive.
    """

    def __init__(self, *, tolerance: float = 0.1, window: int = 500, max_steps: int = 200_000, draws: int = 128):
        checks.require_positive(tolerance, "tolerance")
        self.tolerance, self.window = float(tolerance), checks.whole_number(window, "window")
        self.max_steps = checks.whole_number(max_steps, "max_steps")
        self.draws = checks.whole_number(draws, "draws", least=2)

    def begin(self, training: Training) -> None:
        """As :meth:`Callback.begin`."""
        if len(_averagings(training.state)) != 1:
            raise TypeError(
                "num_steps is None, and the optimizer is not npgp.adam(learning_rate): that is what training until "
                "the posterior has arrived takes, alone or inside npgp.natural_gradient; it lowers the rate itself."
            )
        if not training.done:
            self._phase, self._looked = 0, training.step
            self._rates: list[tuple[float, int]] = []
            self._previous: tuple[Summary, float, float] | None = None
            self._before: Summary | None = None
            self._drifts: list[float] = []
        self._ended, self._last = False, training.first + self.max_steps
        self._program = Program(self._summary_of(training), options=STEPS)

    @property
    def _window(self) -> int:
        return math.ceil(self.window * FALL ** (-self._phase / 2))

    def until(self, step: int) -> int | None:
        """As :meth:`Callback.until`."""
        return max(min(self._looked + self._window, self._last) - step, 1)

    def __call__(self, training: Training) -> bool | None:
        """As :meth:`Callback.__call__`."""
        if training.step < self._looked + self._window and training.done < self.max_steps:
            return False
        window, self._looked = training.step - self._looked, training.step
        (averaging,) = _averagings(training.state)
        values = unconstrained(training.svi, training.state) | averaging.averages
        training.averages = values
        now = self._look(values)
        losses = training.losses[-window:] if window else training.losses[-1:]
        loss, variance = float(np.mean(losses)), float(np.var(losses))
        finished = False
        drift: Drift | None = None
        if self._previous is not None:
            earlier, loss_before, variance_before = self._previous
            drift = _drift(earlier, now)
            largest = _largest(drift)
            self._drifts.append(largest)
            gain, error = loss_before - loss, math.sqrt(5.0 * (variance + variance_before) / max(window, 1))
            stalled = len(self._drifts) > 1 and largest > STALLED * float(np.median(self._drifts[:-1])) and gain < error
            finished = largest < self.tolerance or stalled or len(self._drifts) >= MOST_WINDOWS
            training.moving = f"{_slowest(*drift)} moves by {largest:.2g} sd"
        self._previous = now, loss, variance
        self._count(float(averaging.rate), window)
        factor = averaging.factor
        arrived = False
        if finished:
            if self._before is not None:
                drift = _drift(self._before, now)
                arrived = _largest(drift) < OF_RATE * self.tolerance
            self._before, self._phase, factor = now, self._phase + 1, factor * FALL
            self._previous, self._drifts = None, []
        if drift is not None or training.convergence is None:
            moved, widened = drift or ({}, {})
            training.convergence = Convergence(arrived, training.step, tuple(self._rates), moved, widened)
        self._ended = arrived or training.done >= self.max_steps
        if not self._ended:
            training.state = _changed(
                training.state, averaging._replace(factor=factor, averaged=jnp.zeros_like(averaging.averaged))
            )
        return self._ended

    def end(self, training: Training, error: BaseException | None) -> None:
        """As :meth:`Callback.end`."""
        found = training.convergence
        if error is None and self._ended and found is not None and not found.arrived:
            what = f"npgp.fit: {training.step} steps are too few to see whether the posterior still moves"
            if found.moved:
                name = found.slowest
                what = (
                    f"npgp.fit: after {training.step} steps {name!r} still moves, by {found.moved[name]:.2g} of its "
                    f"standard deviations, which change by {100 * found.widened[name]:.0f}%"
                )
            advice = "give Arrival more max_steps, or look whether the data say what it is."
            warnings.warn(f"{what}: {advice}", TrainingWarning, stacklevel=4)

    def _count(self, rate: float, steps: int) -> None:
        if self._rates and self._rates[-1][0] == rate:
            steps += self._rates.pop()[1]
        self._rates.append((rate, steps))

    def _look(self, values: dict[str, Any]) -> Summary:
        with one_model_at_a_time:
            return Summary(*jax.tree.map(np.asarray, self._program(values)))

    def _summary_of(self, training: Training):
        """The function that draws from the guide, by the same random numbers at all values of its parameters."""
        svi = training.svi
        args, kwargs = training.data.first_call(training.first)
        kwargs = kwargs | svi.static_kwargs
        keys = jax.random.split(jax.random.key(0), self.draws)

        def summary(values):
            params = constrained(svi, values)
            stated: set[str] = set()

            def draw(key):
                guide = handlers.seed(handlers.substitute(svi.guide, data=params), key)
                sites = handlers.trace(guide).get_trace(*args, **kwargs)
                stated.update(name for name, site in sites.items() if site["type"] == "param")
                return {name: site["value"] for name, site in sites.items() if is_latent(site)}

            drawn = lax.map(draw, keys, batch_size=min(16, self.draws))
            means = {name: jnp.mean(value, axis=0) for name, value in drawn.items()}
            deviations = {name: jnp.std(value, axis=0) for name, value in drawn.items()}
            points = {n: v for n, v in params.items() if n not in stated and hasattr(v, "dtype")}
            return means | points, deviations | {name: jnp.zeros_like(value) for name, value in points.items()}

        return summary

    def snapshot(self) -> dict[str, np.ndarray]:
        """As :meth:`Callback.snapshot`."""
        found = {
            "numbers": np.asarray([self._phase, self._looked]),
            "rates": np.asarray(self._rates, float).reshape(-1, 2),
            "drifts": np.asarray(self._drifts, float),
        }
        if self._previous is not None:
            found["loss"] = np.asarray(self._previous[1:])
        for when, summary in (("previous", self._previous and self._previous[0]), ("before", self._before)):
            if summary is not None:
                found |= {f"{when}.mean.{name}": value for name, value in summary.mean.items()}
                found |= {f"{when}.sd.{name}": value for name, value in summary.deviation.items()}
        return found

    def restore(self, snapshot: dict[str, np.ndarray], params: dict[str, Any]) -> None:
        """As :meth:`Callback.restore`."""
        if not snapshot:
            return
        self._phase, self._looked = map(int, snapshot["numbers"])
        self._rates = [(float(rate), int(steps)) for rate, steps in snapshot["rates"]]
        self._drifts = list(map(float, snapshot["drifts"]))

        def summary(when: str) -> Summary | None:
            parts = [
                {name[len(start) :]: value for name, value in snapshot.items() if name.startswith(start)}
                for start in (f"{when}.mean.", f"{when}.sd.")
            ]
            return Summary(*parts) if parts[0] else None

        earlier = summary("previous")
        self._previous = None if earlier is None else (earlier, float(snapshot["loss"][0]), float(snapshot["loss"][1]))
        self._before = summary("before")


def _averagings(state: Any) -> list[Averaging]:
    """The states of :func:`npgp.adam` in a state."""
    leaves = jax.tree.leaves(state.optim_state, is_leaf=lambda x: isinstance(x, Averaging))
    return [leaf for leaf in leaves if isinstance(leaf, Averaging)]


def _changed(state: Any, averaging: Averaging) -> Any:
    """A state with another one of :func:`npgp.adam`."""
    is_leaf = lambda x: isinstance(x, Averaging)  # noqa: E731
    changed = jax.tree.map(lambda x: averaging if is_leaf(x) else x, state.optim_state, is_leaf=is_leaf)
    return state._replace(optim_state=changed)


def _drift(before: Summary, now: Summary) -> Drift:
    """By how many standard deviations the entries of each site have moved, at most; and their logarithms' change."""
    moved, widened = {}, {}
    for name, mean in now.mean.items():
        a, b = before.deviation[name], now.deviation[name]
        spread = (a > 0) & (b > 0)
        scale = np.where(spread, np.sqrt(a * b), OF_VALUE * np.abs(mean) + np.finfo(np.float32).eps)
        moved[name] = float(np.max(np.abs(mean - before.mean[name]) / scale, initial=0.0))
        logs = np.log(np.where(spread, b, 1.0)) - np.log(np.where(spread, a, 1.0))
        widened[name] = float(np.max(np.abs(logs), initial=0.0))
    return moved, widened


def _largest(drift: Drift) -> float:
    return max([*drift[0].values(), *drift[1].values()], default=0.0)


def _slowest(moved: dict[str, float], widened: dict[str, float]) -> str:
    return max(moved, key=lambda name: max(moved[name], widened[name]))
