"""A training loop around NumPyro's ``SVI``, not instead of it: many steps per device call,
minibatches, and a refusal to train on NaN.

:func:`fit` relies on ``svi.init``, ``svi.update`` and ``svi.get_params``, so every model, guide,
loss and optimiser that ``SVI`` accepts can be trained with it. The optimiser's own step count says
how far a state has been trained, so a state is all that is needed to continue.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from threadpoolctl import threadpool_limits
from tqdm.auto import tqdm

from npgp.rows import LazySVI, RowOptimizer, RowState, has_nan, join, split

#: The longest device call when ``steps_per_call`` is not given, in steps and in rows.
MAX_STEPS_PER_CALL = 1000
MAX_ROWS_PER_CALL = 4_000_000
#: Aimed-for seconds per device call: how often the progress bar moves.
SECONDS_PER_CALL = 1.0

ADVICE = (
    "Try a smaller learning rate, standardised inputs and outputs, a larger jitter or float64 "
    "(jax.config.update('jax_enable_x64', True)), and check the data for NaN and extreme values; "
    "the last good state is in this exception's .result."
)


class FitResult(NamedTuple):
    """What :func:`fit` returns; the fields are those of NumPyro's ``SVIRunResult``."""

    #: Constrained values of all parameters, by site name.
    params: dict[str, Any]
    #: The ``SVIState`` to continue from.
    state: SVIState
    #: The negative ELBO of every step that led from the first state of this call to ``state``.
    losses: np.ndarray


class NonFiniteLossError(FloatingPointError):
    """Training met an ELBO or a gradient that is NaN or infinite, and stopped there."""

    #: The step at which this happened, counted from zero over all continuations.
    step: int
    #: The last state whose ELBO was seen to be finite (the first state, if none was), and the
    #: losses of the steps that led there.
    result: FitResult

    def __init__(self, message: str, step: int, result: FitResult):
        super().__init__(message)
        self.step = step
        self.result = result


def _is_array(x) -> bool:
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind in "biufc")


class _Inputs:
    """The arguments of model and guide, arrays apart from the rest, and batches of their rows."""

    def __init__(
        self,
        args,
        kwargs,
        rng_key,
        batch_size: int | None,
        indices: str | None,
        group_size: int = 1,
        steps: str | None = None,
    ):
        for option, name in (("indices", indices), ("steps", steps)):
            if name in kwargs or (name is not None and option == "steps" and name == indices):
                raise ValueError(f"{option}={name!r} names an argument that is given as well.")
        self.num_args, self.keywords, self.indices, self.steps = len(args), list(kwargs), indices, steps
        # Values in call order: a dictionary would be flattened in alphabetical order.
        leaves, self.treedef = jax.tree.flatten([*args, *kwargs.values()])
        self.arrays = [jnp.asarray(x) for x in leaves if _is_array(x)]
        self.static = [None if _is_array(x) else x for x in leaves]  # no leaf is None otherwise
        self.num_rows = next((len(x) for x in self.arrays if x.ndim), 0)
        if (batch_size is not None or indices is not None) and not self.num_rows:
            raise ValueError("batch_size and indices need an array among the arguments.")
        if batch_size is not None and not 1 <= batch_size <= self.num_rows:
            raise ValueError(f"batch_size is {batch_size}, not in 1 to {self.num_rows} (the rows).")
        for what, number in (("rows", self.num_rows), ("batch_size", batch_size)):
            if group_size < 1 or (number is not None and number % group_size):
                raise ValueError(f"group_size is {group_size}, which does not divide {what}, {number}.")
        self.batch_size, self.group_size = batch_size, group_size
        self._seed = np.asarray(jax.random.key_data(rng_key)).ravel().tolist()
        self._epoch, self._order = -1, np.empty(0, np.int32)

    def rows(self, step: int, num_steps: int) -> np.ndarray | None:
        """Row numbers of ``num_steps`` batches, each a function of the key and its step alone."""
        if self.batch_size is None:
            return None
        groups, chosen = self.num_rows // self.group_size, self.batch_size // self.group_size
        numbers = np.empty((num_steps, chosen), np.int32)
        for i in range(num_steps):
            epoch, batch = divmod(step + i, groups // chosen)
            if epoch != self._epoch:
                rng = np.random.default_rng([*self._seed, epoch])
                self._order = rng.permutation(np.arange(groups, dtype=np.int32))
                self._epoch = epoch
            numbers[i] = self._order[batch * chosen : (batch + 1) * chosen]
        if self.group_size == 1:
            return numbers
        rows = numbers[:, :, None] * self.group_size + np.arange(self.group_size, dtype=np.int32)
        return rows.reshape(num_steps, self.batch_size)

    def call(self, arrays, rows, step=0) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments of the rows ``rows``, or of all of them for ``None``, at a step."""

        def cut(x):
            if rows is None or x.shape[:1] != (self.num_rows,):
                return x
            return x.at[rows].get(mode="promise_in_bounds")

        remaining = map(cut, arrays)
        leaves = [next(remaining) if x is None else x for x in self.static]
        values = jax.tree.unflatten(self.treedef, leaves)
        kwargs = dict(zip(self.keywords, values[self.num_args :], strict=True))
        if self.indices is not None:
            all_rows = np.arange(self.num_rows, dtype=np.int32)
            kwargs[self.indices] = jnp.asarray(all_rows if rows is None else rows)
        if self.steps is not None:
            kwargs[self.steps] = jnp.asarray(step)
        return tuple(values[: self.num_args]), kwargs

    def first_call(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments of the first step, concrete."""
        rows = self.rows(0, 1)
        return self.call(self.arrays, None if rows is None else rows[0])


def _refuse_nan(args, kwargs) -> None:
    """Raise for the first argument that holds NaN or an infinity."""
    named = [(f"args[{i}]", value) for i, value in enumerate(args)]
    for name, value in named + [(f"argument {key!r}", value) for key, value in kwargs.items()]:
        for x in jax.tree.leaves(value):
            if isinstance(x, float) or (_is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)):
                xp = jnp if isinstance(x, jax.Array) else np
                bad = int(xp.sum(~xp.isfinite(x)))
                if bad:
                    raise ValueError(
                        f"{bad} of {np.size(x)} values in {name} are NaN or infinite. "
                        "Remove them, or pass allow_nan=True if the model masks them."
                    )


def _one_blas_thread() -> threadpool_limits:
    """On a CPU, JAX factorises in LAPACK, whose idle threads spin and take the cores from XLA's own.

    With one BLAS thread a training step of a sparse GP took a third of the time (M = 50, 2 cores).
    """
    return threadpool_limits(limits=1, user_api="blas")


def _steps_taken(state: SVIState) -> int:
    optim_state = state.optim_state
    return int(optim_state.count if isinstance(optim_state, RowState) else optim_state[0])


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """An interrupt from the keyboard waits for the end of the block: what is donated to a call is gone without it."""
    handler = signal.getsignal(signal.SIGINT)
    # Python hands interrupts to the main thread alone.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])


def _device_loop(svi: SVI, inputs: _Inputs, max_steps: int) -> Callable:
    """Compile-once function of up to ``max_steps`` steps that stops after the first bad one.

    The number of steps is traced: calls of every length share one program, and a run gives the same
    numbers however it is cut into calls.
    """

    @jax.jit
    def run(state, good, arrays, rows, num_steps):
        def body(carry):
            i, state, good, losses, _ = carry
            args, kwargs = inputs.call(arrays, None if rows is None else rows[i], state.optim_state[0])
            new, loss = svi.update(state, *args, **kwargs)
            finite = jnp.isfinite(loss)
            good = jax.tree.map(lambda a, b: jnp.where(finite, a, b), state, good)
            ok = finite & ~has_nan(svi.optim.get_params(new.optim_state))
            return i + 1, new, good, losses.at[i].set(loss.astype(losses.dtype)), ok

        start = (0, state, good, jnp.zeros(max_steps), jnp.asarray(True))
        return lax.while_loop(lambda carry: (carry[0] < num_steps) & carry[4], body, start)

    return run


def _row_loop(svi: LazySVI, inputs: _Inputs, max_steps: int) -> Callable:
    """
    The same with row tables, which are written over in place: no step copies or looks through one.

    The tables of a state that is passed to the function are used up. Its ``good`` is what leads back to the last good
    state, :class:`npgp.rows.Good`.
    """

    @partial(jax.jit, donate_argnums=0)
    def run(tables, small, good, arrays, rows, num_steps):
        def body(carry):
            i, tables, small, good, losses, _ = carry
            args, kwargs = inputs.call(arrays, None if rows is None else rows[i], small.optim_state[0])
            new, good, loss, ok = svi.step(join(small, tables), good, args, kwargs)
            small, tables = split(new)
            return i + 1, tables, small, good, losses.at[i].set(loss.astype(losses.dtype)), ok

        start = (0, tables, small, good, jnp.zeros(max_steps), jnp.asarray(True))
        return lax.while_loop(lambda carry: (carry[0] < num_steps) & carry[5], body, start)

    def call(state, good, *rest):
        small, tables = split(state)
        taken, tables, small, good, losses, ok = run(tables, small, good, *rest)
        return taken, join(small, tables), good, losses, ok

    call.jitted = run  # type: ignore[attr-defined]
    return call


def fit(
    svi: SVI,
    rng_key: jax.Array,
    num_steps: int,
    *args,
    batch_size: int | None = None,
    group_size: int = 1,
    indices: str | None = None,
    steps: str | None = None,
    init_state: SVIState | None = None,
    init_params: dict[str, Any] | None = None,
    row_optim: RowOptimizer | None = None,
    progress: bool = True,
    steps_per_call: int | None = None,
    allow_nan: bool = False,
    **kwargs,
) -> FitResult:
    """Train for ``num_steps`` steps of ``svi.update``.

    With ``batch_size=B``, every array among the arguments whose leading axis is as long as that of
    the first array (``N``) is cut to ``B`` rows per step. The model scales the batch up, as with
    NumPyro's ``plate(..., N, subsample_size=B)``; say ``N`` for instance by ``SVI(..., size=N)``.
    The data stay on the device. Each epoch cuts a fresh random permutation into ``N // B`` batches
    and leaves out what remains of it: no batch repeats a row, every batch is a uniformly random
    subset of exactly ``B`` rows, and the estimate of the ELBO is unbiased.

    Training stops with :class:`NonFiniteLossError` at the first ELBO or gradient that is not
    finite. After an interrupt from the keyboard, it returns what was trained so far and warns.

    To continue, pass ``init_state=result.state`` and the same ``rng_key``: noise, batches and
    learning-rate schedule go on where they were, and 60 + 40 steps give the same numbers as 100.

    :param svi: NumPyro's ``SVI`` of model, guide, optimiser, loss and static arguments.
    :param rng_key: key for the initial values, the noise and the order of the batches.
    :param num_steps: number of steps to take in this call.
    :param args: positional arguments of model and guide.
    :param batch_size: rows per step; all of them at every step if ``None``.
    :param group_size: each so many consecutive rows stay together, in one batch and in their order: for the ``grouped``
        conditional, whose data :meth:`npgp.Groups.arrange` puts in order.
    :param indices: keyword under which model and guide receive the row numbers of the batch, for
        models with parameters per row.
    :param steps: keyword under which model and guide receive the number of the step, counted from zero over all
        continuations, for whatever follows a schedule. :func:`evaluate` does not pass it.
    :param init_state: state to continue from.
    :param init_params: initial values of parameters by site name, as for ``svi.init``.
    :param row_optim: how to move the rows of row tables (:func:`npgp.row_param`), :func:`row_adam`. A step then costs
        the same however many rows there are; rows that it does not ask for stay as they are, and so does their state of
        the optimiser. ``svi``'s own optimiser moves all other parameters; if omitted, it moves the tables as wholes.
        Afterwards ``result.params`` has the whole tables, and ``result.state`` is for :func:`fit` and
        :func:`evaluate`; ``svi.get_params`` refuses it.
    :param progress: show a progress bar with the ELBO, averaged over the last hundred steps.
    :param steps_per_call: steps per device call; by default as many as take about a second.
    :param allow_nan: accept NaN and infinities in the arguments, for models that mask them.
    :param kwargs: keyword arguments of model and guide.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}, not at least 1.")
    if steps_per_call is not None and steps_per_call < 1:
        raise ValueError(f"steps_per_call is {steps_per_call}, not at least 1.")
    inputs = _Inputs(args, kwargs, rng_key, batch_size, indices, group_size, steps)
    if not allow_nan:
        _refuse_nan(args, kwargs)
    lazy = None if row_optim is None else LazySVI(svi, row_optim)
    if init_state is not None:
        _check_state(init_state, lazy)

    if init_state is None or svi.constrain_fn is None:
        # Not under jit, so that checks inside the model see values. A restored state needs this
        # too: `SVI` learns the constraints of its parameters here.
        first_args, first_kwargs = inputs.first_call()
        state = (lazy or svi).init(rng_key, *first_args, init_params=init_params, **first_kwargs)
    state = good = jax.tree.map(jnp.asarray, state if init_state is None else init_state)
    first = _steps_taken(state)

    # Independent of num_steps: the buffers' length is part of the compiled program.
    affordable = max(1, MAX_ROWS_PER_CALL // (batch_size or 1))
    max_steps = steps_per_call or min(MAX_STEPS_PER_CALL, affordable)
    if lazy is None:
        run = _device_loop(svi, inputs, max_steps)
    else:
        run = _row_loop(lazy, inputs, max_steps)
        small, tables = split(state)
        state = join(small, jax.tree.map(jnp.copy, tables))  # the caller's are not used up
        one = inputs.rows(first, 1)
        good = lazy.start(state, inputs.call, inputs.arrays, None if one is None else one[0])
    losses = np.zeros(num_steps, jnp.result_type(float))

    def result(state: SVIState) -> FitResult:
        return FitResult((lazy or svi).get_params(state), state, losses[: _steps_taken(state) - first])

    done, calls, size = 0, 0, steps_per_call or 1
    with _one_blas_thread(), tqdm(total=num_steps, disable=not progress, unit="step") as bar:
        try:
            while done < num_steps:
                began = time.perf_counter()
                n = min(size, num_steps - done)
                rows = inputs.rows(first + done, n)
                if rows is not None:
                    rows = np.pad(rows, ((0, max_steps - n), (0, 0)))
                with nullcontext() if lazy is None else _interrupts_held():
                    taken, new, new_good, trace, ok = run(state, good, inputs.arrays, rows, n)
                    taken, ok = int(taken), bool(ok)  # waits for the device
                    losses[done : done + taken] = np.asarray(trace)[:taken]
                    if ok:
                        state, good, done, calls = new, new_good, done + taken, calls + 1
                if not ok:
                    step = first + done + taken - 1
                    if lazy is None:
                        bad = _nan_names(svi.optim.get_params(new.optim_state))
                    else:
                        bad = lazy.nan_names(new, new_good)
                        new_good = lazy.last_good(new, new_good, bool(np.isfinite(losses[done + taken - 1])))
                    message = _explain(bad, step, losses[: done + taken])
                    raise NonFiniteLossError(message, step, result(new_good))

                bar.set_postfix_str(_running_elbo(losses[:done], inputs.num_rows), refresh=False)
                bar.update(taken)
                # The first call compiles and is no measure of speed.
                if steps_per_call is None and calls > 1:
                    speed = n / (time.perf_counter() - began)
                    size = max(1, min(int(speed * SECONDS_PER_CALL), 10 * size, max_steps))
        except KeyboardInterrupt:
            if _steps_taken(state) == first:
                raise
            warnings.warn(f"Interrupted: {done} of {num_steps} steps were taken.", stacklevel=2)
    return result(state)


def _running_elbo(losses: np.ndarray, num_rows: int) -> str:
    elbo = -float(np.mean(losses[-100:]))
    return f"ELBO {elbo:.6g}" + (f", per row {elbo / num_rows:.4g}" if num_rows else "")


def _check_state(state: SVIState, lazy: LazySVI | None) -> None:
    trained = isinstance(state.optim_state, RowState)
    if trained and lazy is None:
        raise ValueError("init_state was trained with row_optim; give row_optim to continue.")
    if lazy is not None and not trained:
        raise ValueError(
            "init_state was trained without row_optim, and has no state for single rows: continue without, or "
            "start from its values with init_params=result.params."
        )


def _nan_names(params: dict[str, Any]) -> list[str]:
    return [name for name, value in params.items() if has_nan(value)]


def _explain(bad: list[str], step: int, losses: np.ndarray) -> str:
    """Message for the bad step ``step``, the last of ``losses``, at which the parameters ``bad`` became NaN."""
    elbo = -losses[-1]
    if np.isfinite(elbo):
        names = ", ".join(bad)
        what = f"The gradient of the ELBO ({elbo:.6g}) is bad at step {step}: {names} became NaN."
    elif len(losses) > 1:
        what = f"The ELBO is {elbo} at step {step}; the last finite one was {-losses[-2]:.6g}."
    else:
        what = f"The ELBO is {elbo} at step {step}, the first of this call."
    return f"{what} {ADVICE}"


def evaluate(
    svi: SVI,
    rng_key: jax.Array,
    result: Any,
    *args,
    num_draws: int = 100,
    batch_size: int | None = None,
    group_size: int = 1,
    indices: str | None = None,
    **kwargs,
) -> tuple[float, float]:
    """Estimate the ELBO of a trained model: mean and standard error of ``num_draws`` evaluations.

    With ``batch_size``, every evaluation takes a fresh batch, as in :func:`fit`, and the standard
    error includes the choice of rows.

    :param svi: the ``SVI`` that was trained.
    :param rng_key: key for the noise and the batches.
    :param result: a :class:`FitResult`, NumPyro's ``SVIRunResult``, or an ``SVIState``.
    :param args: positional arguments of model and guide.
    :param num_draws: number of evaluations, at least two.
    :param batch_size: rows per evaluation; all of them if ``None``.
    :param group_size: as in :func:`fit`.
    :param indices: keyword under which model and guide receive the row numbers, as in :func:`fit`.
    :param kwargs: keyword arguments of model and guide.
    """
    if num_draws < 2:
        raise ValueError(f"num_draws is {num_draws}, not at least 2.")
    inputs = _Inputs(args, kwargs, rng_key, batch_size, indices, group_size)
    if svi.constrain_fn is None:  # a restored state
        first_args, first_kwargs = inputs.first_call()
        svi.init(rng_key, *first_args, **first_kwargs)

    state = result if isinstance(result, SVIState) else result.state
    evaluated = LazySVI(svi) if isinstance(state.optim_state, RowState) else svi

    @jax.jit
    def evaluations(state, arrays, keys, rows):
        def one(draw):
            args, kwargs = inputs.call(arrays, draw[1])
            return evaluated.evaluate(state._replace(rng_key=draw[0]), *args, **kwargs)

        return lax.map(one, (keys, rows))

    keys = jax.random.split(rng_key, num_draws)
    with _one_blas_thread():
        losses = evaluations(state, inputs.arrays, keys, inputs.rows(0, num_draws))
        elbos = -np.asarray(losses, np.float64)
    return float(np.mean(elbos)), float(np.std(elbos, ddof=1) / np.sqrt(num_draws))


def adam(
    learning_rate: float = 0.01,
    num_steps: int | None = None,
    *,
    final: float = 0.02,
    warmup: int = 0,
) -> optax.GradientTransformation:
    """Adam whose learning rate decays along a cosine, for the ``optim`` of NumPyro's ``SVI``.

    :param learning_rate: the highest learning rate.
    :param num_steps: steps, warm-up included, after which the decay ends; no decay if ``None``.
    :param final: the last learning rate as a fraction of the highest.
    :param warmup: steps in which the learning rate first rises linearly.
    """
    return optax.adam(_schedule(learning_rate, num_steps, final, warmup))


def row_adam(
    learning_rate: float | Callable[[Any], Any] = 0.01,
    num_steps: int | None = None,
    *,
    final: float = 0.02,
    warmup: int = 0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> RowOptimizer:
    """Adam for row tables, lazily: the ``row_optim`` of :func:`fit`.

    A row moves at the steps that ask for it, as if it were alone: in between, neither the row nor its moments change,
    and the correction of their bias counts the row's own visits. The learning rate follows the number of the step,
    which is the same for all rows. A row that is asked for twice in a step moves once, along the sum of its gradients.

    The loss weighs the rows of a batch by N / B. Adam does not see this factor, which is the same at every visit: a row
    moves by about the learning rate at a visit, which is once in N / B steps. Adam on the whole table goes on moving a
    row between its visits, by √(N / B) times that in all (for N / B well below 1 / (1 − b2)). So with many more rows
    than in a batch, a higher learning rate is in place for the rows than for the other parameters.

    :param learning_rate: the highest learning rate, or a schedule, and then none of the next three.
    :param num_steps: steps, not visits, and otherwise as in :func:`adam`.
    :param final: as in :func:`adam`.
    :param warmup: as in :func:`adam`.
    :param b1: decay per visit of the mean of gradients.
    :param b2: decay per visit of the mean of squared gradients.
    :param eps: added to the root of the latter.
    """
    if callable(learning_rate):
        if num_steps is not None or warmup:
            raise ValueError("learning_rate is a schedule; num_steps and warmup make one of a number.")
        schedule = learning_rate
    else:
        schedule = _schedule(learning_rate, num_steps, final, warmup)
    return RowOptimizer(optax.scale_by_adam(b1, b2, eps), schedule)


def _schedule(learning_rate: float, num_steps: int | None, final: float, warmup: int) -> Callable:
    if num_steps is None:
        schedule = optax.constant_schedule(learning_rate)
    elif num_steps > warmup:
        schedule = optax.cosine_decay_schedule(learning_rate, num_steps - warmup, alpha=final)
    else:
        raise ValueError(f"num_steps is {num_steps}, not more than the {warmup} steps of warmup.")
    if warmup:
        rise = optax.linear_schedule(learning_rate / (warmup + 1), learning_rate, warmup)
        schedule = optax.join_schedules([rise, schedule], [warmup])
    return schedule
