"""Many steps of SVI in one device call, which stops after the first bad one and can go back to the last good state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from npgp.contract import step_count, unconstrained
from npgp.programs.compiled import STEPS, Program
from npgp.training.inputs import Inputs, Layout
from npgp.training.programs import kept
from npgp.training.row_tables import LazySVI, has_nan, join, split


def step_program(svi: SVI, layout: Layout, max_steps: int, state_sharding: Any = None) -> Program:
    """
    Compile-once function of up to ``max_steps`` steps.

    The number of steps is traced: calls of every length share one program, and a run gives the same numbers however it
    is cut into calls. The state that is passed in is kept, to go back to: one copy for each call, not for each step.

    :return: a function of state, arrays, chunk and number of steps, to steps taken, state, losses, whether all is well.
    """

    def run(state, arrays, chunk, num_steps):
        def body(carry):
            i, state, losses, _ = carry
            item = jax.tree.map(lambda x: x[i], chunk)
            args, kwargs = layout.call(arrays, item, step_count(state.optim_state))
            new, loss = svi.update(state, *args, **kwargs)
            ok = jnp.isfinite(loss) & ~has_nan(unconstrained(svi, new))
            return i + 1, new, losses.at[i].set(loss.astype(losses.dtype)), ok

        start = (0, state, jnp.zeros(max_steps), jnp.asarray(True))
        return lax.while_loop(lambda carry: (carry[0] < num_steps) & carry[3], body, start)

    if state_sharding is None:
        return Program(run, options=STEPS)
    whole, states = state_sharding
    return Program(run, options=STEPS, out_shardings=(whole, states, whole, whole))


def row_program(svi: LazySVI, layout: Layout, max_steps: int) -> Program:
    """
    The same with row tables, which are written over in place: no step copies or looks through one.

    The tables that are passed in are used up. ``good`` is what leads back to the last good state,
    :class:`npgp.training.row_tables.Fallback`.
    """

    def run(tables, small, good, arrays, chunk, num_steps):
        def body(carry):
            i, tables, small, good, losses, _ = carry
            item = jax.tree.map(lambda x: x[i], chunk)
            args, kwargs = layout.call(arrays, item, step_count(small.optim_state))
            new, good, loss, ok = svi.step(join(small, tables), good, args, kwargs)
            small, tables = split(new)
            return i + 1, tables, small, good, losses.at[i].set(loss.astype(losses.dtype)), ok

        start = (0, tables, small, good, jnp.zeros(max_steps), jnp.asarray(True))
        return lax.while_loop(lambda carry: (carry[0] < num_steps) & carry[5], body, start)

    return Program(run, options=STEPS, donate=True)


class Steps:
    """
    Steps of ``svi.update``.

    :param svi: model, guide, optimizer and loss.
    :param inputs: the arguments.
    :param state: the first state.
    :param max_steps: length of a chunk.
    """

    def __init__(self, svi: SVI, inputs: Inputs, state: SVIState, max_steps: int):
        self.svi, self.inputs, sharding = svi, inputs, inputs.sharding
        out = None
        if sharding is not None:
            sharding.check_names(unconstrained(svi, state))
            out, state = (sharding.replicated, sharding.of_state(state)), sharding.place_state(state)
        #: The state that all steps so far have led to.
        self.state = state
        self._run = kept(
            svi,
            ("steps", inputs.layout, max_steps, sharding),
            lambda: step_program(svi, inputs.layout, max_steps, out),
        )
        self._before: tuple[SVIState, Any, int] | None = None  # what the last call started from

    def prepare(self, chunk: Any, num_steps: int) -> jax.stages.Compiled:
        """Compile what :meth:`advance` runs; JAX's object."""
        return self._run.prepare(self.state, self.inputs.arrays, chunk, num_steps)

    def advance(self, chunk: Any, num_steps: int) -> tuple[int, np.ndarray, bool]:
        """
        Take steps, which :meth:`commit` makes those of ``state``.

        :return: how many were taken, their losses, and whether all is well; otherwise the last one was bad.
        """
        taken, new, losses, ok = self._run(self.state, self.inputs.arrays, chunk, num_steps)
        result = int(taken), np.asarray(losses)[: int(taken)], bool(ok)  # waits for the device
        self._last = chunk, int(taken), new
        return result

    def commit(self) -> None:
        """Go on from what the last call led to."""
        chunk, taken, new = self._last
        self._before, self.state = (self.state, chunk, taken), new

    def nan_names(self) -> list[str]:
        """The parameters that became NaN at the bad step."""
        params = unconstrained(self.svi, self._last[2])
        return [name for name, value in params.items() if has_nan(value)]

    def last_good(self, finite: bool) -> SVIState:
        """
        The last state whose loss was seen to be finite, or the first one; found by taking its steps once more.

        :param finite: whether the loss of the bad step was finite, and its gradient bad.
        """
        chunk, taken, _ = self._last
        again = taken - 1 if finite else taken - 2
        if again >= 0:
            return self._run(self.state, self.inputs.arrays, chunk, again)[1]
        if self._before is None:
            return self.state
        state, chunk, num_steps = self._before
        return self._run(state, self.inputs.arrays, chunk, num_steps - 1)[1]


class RowSteps:
    """
    Steps that move the rows of row tables lazily; otherwise as :class:`Steps`.

    :param svi: of model and guide, with the optimizer of rows.
    :param inputs: the arguments.
    :param state: the first state, which is not used up.
    :param max_steps: length of a chunk.
    :param first: number of the first step.
    """

    def __init__(self, svi: LazySVI, inputs: Inputs, state: SVIState, max_steps: int, first: int):
        self.svi, self.inputs = svi, inputs
        small, tables = split(state)
        self.state = join(small, jax.tree.map(jnp.copy, tables))
        item = jax.tree.map(lambda x: x[0], inputs.read(first, 1))
        self._good = svi.start(self.state, inputs.layout.call, inputs.arrays, item)
        self._run = row_program(svi, inputs.layout, max_steps)

    def prepare(self, chunk: Any, num_steps: int) -> jax.stages.Compiled:
        """As :meth:`Steps.prepare`."""
        small, tables = split(self.state)
        return self._run.prepare(tables, small, self._good, self.inputs.arrays, chunk, num_steps)

    def advance(self, chunk: Any, num_steps: int) -> tuple[int, np.ndarray, bool]:
        """As :meth:`Steps.advance`, but ``state`` is used up at once: no interrupt may come before its successor."""
        small, tables = split(self.state)
        taken, tables, small, good, losses, ok = self._run(
            tables, small, self._good, self.inputs.arrays, chunk, num_steps
        )
        self.state, self._good = join(small, tables), good
        return int(taken), np.asarray(losses)[: int(taken)], bool(ok)  # waits for the device

    def commit(self) -> None:
        """Done already."""

    def nan_names(self) -> list[str]:
        """As :meth:`Steps.nan_names`."""
        return self.svi.nan_names(self.state, self._good)

    def last_good(self, finite: bool) -> SVIState:
        """As :meth:`Steps.last_good`."""
        return self.svi.last_good(self.state, self._good, finite)
