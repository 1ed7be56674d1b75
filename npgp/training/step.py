"""One step of training as a pure function of a state and a batch, and many of them in one device call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from npgp.contract import is_initialized, set_transforms, step_count, transforms_of, unconstrained
from npgp.model.guides import set_up
from npgp.programs.compiled import STEPS, Program, one_program
from npgp.training.data import Data, Layout
from npgp.training.row_tables import RowOptimizer, RowState, RowSVI, has_nan

__all__ = ["Info", "Step", "Steps", "cached", "steps_taken"]

_NAME = "_npgp_programs"
T = TypeVar("T")


class Info(NamedTuple):
    """
    Arrays about a step, the second value that :class:`Step` returns.
    """

    #: The negative ELBO of the batch, at the state that the step began from.
    loss: jax.Array
    #: Whether the loss is finite and no parameter became NaN.
    ok: jax.Array
    #: Whether a parameter became NaN, by its name.
    nan: dict[str, jax.Array]


class Step:
    """
    One step of training, a pure function of a state and a batch: :func:`npgp.fit` takes it in a loop, and it works in
    loops of your own, under ``jit``, ``scan`` and ``vmap``:

    .. code-block:: python

        step = npgp.training.Step(svi)
        state = step.init(key, X, y)
        state, info = jax.lax.scan(lambda state, _: step(state, X, y), state, length=20)
        params, losses = step.get_params(state), info.loss

    :param svi: NumPyro's ``SVI`` of model, guide, optimizer, loss and static arguments.
    :param row_optim: how to move the rows of row tables, as for :func:`npgp.fit`.
    """

    def __init__(self, svi: SVI, row_optim: RowOptimizer | None = None):
        self.svi = svi
        self._svi = svi if row_optim is None else RowSVI(svi, row_optim)

    def init(self, rng_key: jax.Array, *args: Any, init_params: Any = None, **kwargs: Any) -> SVIState:
        """
        The first state: what ``svi.init`` returns, computed by one program where NumPyro would have each operation of
        model and guide compiled by itself.

        :param rng_key: as for ``svi.init``.
        :param args: positional arguments of a step, whose values the model sees.
        :param init_params: initial values of parameters by site name, as for ``svi.init``.
        :param kwargs: keyword arguments of a step.
        """
        set_up(self.svi.guide, args, kwargs | self.svi.static_kwargs)

        def first() -> tuple[SVIState, Any]:
            return self._svi.init(rng_key, *args, init_params=init_params, **kwargs), transforms_of(self.svi)

        state, transforms = one_program(first)
        set_transforms(self.svi, transforms)  # whose bounds the model may have computed
        return state

    def __call__(self, state: SVIState, *args: Any, **kwargs: Any) -> tuple[SVIState, Info]:
        """
        The next state.

        :param state: of :meth:`init`, of a step, or ``result.state`` of :func:`npgp.fit`.
        :param args: positional arguments of model and guide: the batch.
        :param kwargs: keyword arguments of model and guide.
        :raises ValueError: before anything has initialized the ``SVI``, which learns of constraints there.
        """
        if not is_initialized(self.svi):
            raise ValueError("this SVI has not seen its model yet: call step.init, or svi.init, before the first step.")
        new, loss = self._svi.update(state, *args, **kwargs)
        # Of row tables the state knows; no step looks through one.
        nan = new.optim_state.nan if isinstance(new.optim_state, RowState) else {}
        values = {name: x for name, x in unconstrained(self._svi, new).items() if name not in nan}
        nan = {name: has_nan(x) for name, x in values.items()} | nan
        return new, Info(loss, jnp.isfinite(loss) & ~jnp.any(jnp.asarray([*nan.values()], bool)), nan)

    def get_params(self, state: SVIState) -> dict[str, Any]:
        """Constrained values of all parameters, by site name."""
        return self._svi.get_params(state)


def steps_taken(state: SVIState) -> Any:
    """Number of steps that led to a state."""
    optim_state = state.optim_state
    return optim_state.count if isinstance(optim_state, RowState) else step_count(optim_state)


def steps_program(step: Step, layout: Layout, max_steps: int, state_sharding: Any = None) -> Program:
    """
    Compile-once function of up to ``max_steps`` steps, which stops after the first bad one.

    The number of steps is traced: calls of every length share one program, and a run gives the same numbers however it
    is cut into calls. The state that is passed in is kept, to go back to: one copy for each call, not for each step;
    row tables are written over in place from step to step.

    :return: a function of state, arrays, chunk and number of steps, to steps taken, state, losses, and which parameters
        became NaN.
    """

    def run(state: SVIState, arrays: Any, chunk: Any, num_steps: jax.Array) -> tuple:
        def advance(i: jax.Array, state: SVIState) -> tuple[SVIState, Any]:
            item = jax.tree.map(lambda x: x[i], chunk)
            args, kwargs = layout.call(arrays, item, steps_taken(state))
            return step(state, *args, **kwargs)

        def body(carry: tuple) -> tuple:
            i, state, losses, *_ = carry
            state, info = advance(i, state)
            return i + 1, state, losses.at[i].set(info.loss.astype(losses.dtype)), info.nan, info.ok

        nan = {name: jnp.asarray(False) for name in unconstrained(step._svi, state)}
        start = (0, state, jnp.zeros(max_steps), nan, jnp.asarray(True))
        return lax.while_loop(lambda carry: (carry[0] < num_steps) & carry[-1], body, start)[:-1]

    if state_sharding is None:
        return Program(run, options=STEPS)
    whole, states = state_sharding
    return Program(run, options=STEPS, out_shardings=(whole, states, whole, whole))


class Steps:
    """
    Steps of a training, many in a device call.

    :param step: one of them.
    :param data: the arguments.
    :param state: the first state.
    :param max_steps: length of a chunk.
    """

    def __init__(self, step: Step, data: Data, state: SVIState, max_steps: int):
        self.step, self.data, sharding = step, data, data.sharding
        out = None
        if sharding is not None:
            sharding.check_names(unconstrained(step.svi, state))
            out = sharding.replicated, sharding.of_state(state)
        self.go_on_from(state)

        def make() -> Program:
            return steps_program(step, data.layout, max_steps, out)

        by_rows = isinstance(state.optim_state, RowState)  # whose optimizer cannot be compared
        self._run = make() if by_rows else cached(step.svi, ("steps", data.layout, max_steps, sharding), make)

    def go_on_from(self, state: SVIState) -> None:
        """Take the next steps from this state."""
        sharding = self.data.sharding
        #: The state that all steps so far have led to.
        self.state = jax.tree.map(jnp.asarray, state) if sharding is None else sharding.place_state(state)
        self._before: tuple[SVIState, Any, int] | None = None  # what the last call started from

    def prepare(self, chunk: Any, num_steps: int) -> jax.stages.Compiled:
        """Compile what :meth:`advance` runs; JAX's object."""
        return self._run.prepare(self.state, self.data.arrays, chunk, num_steps)

    def advance(self, chunk: Any, num_steps: int) -> tuple[np.ndarray, list[str] | None]:
        """
        Take steps, which :meth:`commit` makes those of ``state``.

        :return: losses of the steps that were taken; and the parameters that became NaN at the last of these, if that
            was a bad one: its loss is not finite otherwise.
        """
        taken, new, losses, nan = self._run(self.state, self.data.arrays, chunk, num_steps)
        self._last = chunk, int(taken), new  # waits for the device
        values = np.asarray(losses)[: int(taken)]
        names = [name for name, bad in nan.items() if bad]
        return values, names if names or not np.isfinite(values[-1:]).all() else None

    def commit(self) -> None:
        """Go on from what the last call led to."""
        chunk, taken, new = self._last
        self._before, self.state = (self.state, chunk, taken), new

    def last_good(self, finite: bool) -> SVIState:
        """
        The last state whose loss was seen to be finite, or the first one; found by taking its steps once more.

        :param finite: whether the loss of the bad step was finite, and its gradient bad.
        """
        chunk, taken, _ = self._last
        again = taken - 1 if finite else taken - 2
        if again >= 0:
            return self._run(self.state, self.data.arrays, chunk, again)[1]
        if self._before is None:
            return self.state
        state, chunk, num_steps = self._before
        return self._run(state, self.data.arrays, chunk, num_steps - 1)[1]


def cached(svi: SVI, key: Hashable, make: Callable[[], T]) -> T:
    """
    Return what ``make`` made for this SVI and key before, or makes now.

    It is kept with the SVI, and goes with it; and so with the model as it was when it was traced. Hence
    :func:`clear_cache`, when training starts anew.
    """
    try:
        hash(key)
    except TypeError:  # an argument of the model that is no array and cannot be compared
        return make()
    programs = svi.__dict__.setdefault(_NAME, {})
    if key not in programs:
        programs[key] = make()
    return programs[key]


def clear_cache(svi: SVI) -> None:
    """Drop what is kept for an SVI."""
    svi.__dict__.pop(_NAME, None)
