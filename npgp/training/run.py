"""A training under way: its state and losses, steps that can be taken or not, and what it comes to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from npgp.contract import constrained
from npgp.programs.compiled import one_model_at_a_time, one_program
from npgp.training.data import Data
from npgp.training.interrupts import interrupts_held
from npgp.training.observed import likelihood_not_finite
from npgp.training.results import DataError, FitResult, NonFiniteLossError, Seconds, explain
from npgp.training.row_tables import RowState
from npgp.training.step import Steps, steps_taken

__all__ = ["Training"]


class Training:
    """
    A training under way, as a :class:`Callback` finds it between device calls.

    .. code-block:: python

        class Printed(npgp.training.Callback):
            def __call__(self, training):
                print(training.step, training.losses[-1], training.params["noise"])


        npgp.fit(svi, key, 20, X, y, callbacks=[Printed()], progress=False)
    """

    #: The ``SVI`` that is trained.
    svi: SVI
    #: How many steps this call is to take; ``None`` for as many as callbacks let it.
    num_steps: int | None

    def __init__(
        self,
        steps: Steps,
        data: Data,
        check: Callable | None,
        first: int,
        num_steps: int | None,
        max_steps: int,
        seconds: float,
    ):
        self.svi, self.num_steps, self.steps, self.data = steps.step.svi, num_steps, steps, data
        self.first, self._check, self._max_steps = first, check, max_steps
        self._losses: list[np.ndarray] = []
        #: Steps that this call has taken, or a call that it goes on from by a checkpoint.
        self.done = 0
        #: Unconstrained values that ``params`` are of, in place of the state's: averages of states.
        self.averages: dict[str, Any] | None = None
        #: How it arrived, and what still moves, in words; of a training that lasts until it has.
        self.convergence: Any = None
        self.moving = ""
        #: What takes part between device calls, in order.
        self.callbacks: Sequence[Any] = ()
        self._seconds, self._since = Seconds(seconds), time.perf_counter()

    @property
    def step(self) -> int:
        """Number of steps taken, over all continuations."""
        return self.first + self.done

    def left(self, done: int) -> int:
        """Number of steps to take after ``done``."""
        return (np.iinfo(np.int32).max if self.num_steps is None else self.num_steps) - done

    @property
    def num_rows(self) -> int:
        """Rows of the data; 0 if they are not known."""
        return self.data.num_rows

    @property
    def is_whole(self) -> bool:
        """Whether all parameters are the state's and rows can be read again: no row tables, no source of batches."""
        return not isinstance(self.state.optim_state, RowState) and self.data.source is None

    @property
    def losses(self) -> np.ndarray:
        """The negative ELBO of every step of this call."""
        return np.concatenate([np.empty(0, jnp.result_type(float)), *self._losses])

    @property
    def state(self) -> SVIState:
        """The state that all steps so far have led to; training goes on from another one if it is set."""
        return self._whole(self.steps.state)

    @state.setter
    def state(self, state: SVIState) -> None:
        self.steps.go_on_from(state)

    @property
    def params(self) -> dict[str, Any]:
        """Constrained values of all parameters, by site name."""
        return self._params(self.state)

    def resume(self, state: SVIState, losses: np.ndarray) -> None:
        """Go on from where another call had come to, with the losses that led there."""
        self.state, self._losses, self.done = state, [losses], len(losses)

    def prepare(self, chunk: Any, num_steps: int) -> None:
        """Compile the steps."""
        began = time.perf_counter()
        with one_model_at_a_time:
            self.steps.prepare(self.data.place(chunk), num_steps)
        self._seconds = self._seconds._replace(compile=time.perf_counter() - began)

    def read(self, done: int, num_steps: int) -> tuple[int, Any]:
        """The rows of so many steps after ``done`` of them, and how many these are."""
        return num_steps, self.data.read(self.first + done, num_steps, self._max_steps)

    @contextmanager
    def data_errors(self) -> Iterator[None]:
        """Around what may fail for the data's sake: so that what was trained is not lost then."""
        try:
            yield
        except Exception as error:
            if not self.done:
                raise
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}."
            raise DataError(message, self.step, self.result()) from error

    def advance(self, chunk: Any, num_steps: int) -> None:
        """Take steps, if the rows can be."""
        placed = self.data.place(chunk)
        if self._check is not None:
            with self.data_errors():
                self._check(chunk, placed, num_steps, self.step)
        losses, bad = self.steps.advance(placed, num_steps)
        if bad is not None:
            step, finite = self.step + len(losses) - 1, bool(np.isfinite(losses[-1]))
            result = self._result(self.steps.last_good(finite), np.concatenate([self.losses, losses]))
            cause = likelihood_not_finite(self.svi, result.params, *self.data.first_call(step))
            message = explain(bad, step, np.concatenate([self.losses, losses]), cause)
            raise NonFiniteLossError(message, step, result)
        with interrupts_held():  # so that state, losses and their number belong together
            self._losses.append(losses)
            self.steps.commit()
            self.done += num_steps

    def result(self) -> FitResult:
        """The result of :func:`fit`."""
        return self._result(self.steps.state, self.losses)

    def _result(self, state: SVIState, losses: np.ndarray) -> FitResult:
        spent = time.perf_counter() - self._since - self._seconds.compile
        state = self._whole(state)
        result = FitResult(self._params(state), state, losses[: int(steps_taken(state)) - self.first])
        result.convergence = self.convergence
        result.seconds = self._seconds._replace(steps=spent)
        return result

    def _params(self, state: SVIState) -> dict[str, Any]:
        averages = self.averages
        params = one_program(
            lambda: self.steps.step.get_params(state) if averages is None else constrained(self.svi, averages)
        )
        if getattr(self.svi.guide, "given_rows", False):
            args, kwargs = self.data.first_call(self.first)
            params = self.svi.guide.with_rows(params, *args, **kwargs, **self.svi.static_kwargs)
        return params

    def _whole(self, state: SVIState) -> SVIState:
        """A state on this process's default device."""
        return state if self.data.sharding is None else self.data.sharding.fetch(state)
