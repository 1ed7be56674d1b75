"""A training loop around NumPyro's ``SVI``, not instead of it: many steps per device call,
minibatches, and a refusal to train on NaN.

:func:`fit` relies on ``svi.init``, ``svi.update`` and ``svi.get_params``, so every model, guide,
loss and optimizer that ``SVI`` accepts can be trained with it. The optimizer's own step count says
how far a state has been trained, so a state is all that is needed to continue.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from threadpoolctl import threadpool_limits

from npgp import checks
from npgp.contract import is_initialized
from npgp.model.guides import AutoSparseGP
from npgp.model.sites import ROWS_TRAINED_ON
from npgp.programs.compiled import one_model_at_a_time, one_program
from npgp.training.arrival import Arrival, Fifths, sentence
from npgp.training.callbacks import Callback, Monitor, Progress
from npgp.training.checkpoints import Checkpoints
from npgp.training.convergence import TrainingWarning, verdict
from npgp.training.data import Data, refuse_traced
from npgp.training.devices import Sharding
from npgp.training.interrupts import Interrupts, interrupts_held
from npgp.training.observed import check_of_rows
from npgp.training.results import FitResult
from npgp.training.row_tables import RowOptimizer, RowState
from npgp.training.run import Training
from npgp.training.step import Step, Steps, clear_cache, steps_taken
from npgp.training.trust import too_few_points

#: The longest device call when ``steps_per_call`` is not given, in steps and in rows.
MAX_STEPS_PER_CALL = 1000
MAX_ROWS_PER_CALL = 4_000_000
#: Aimed-for seconds per device call: how often the progress bar moves.
SECONDS_PER_CALL = 1.0


def one_blas_thread() -> threadpool_limits:
    """On a CPU, JAX factorizes in LAPACK, whose idle threads spin and take the cores from XLA's own.

    With one BLAS thread a training step of a sparse GP took a third of the time (M = 50, 2 cores).
    """
    return threadpool_limits(limits=1, user_api="blas")


def fit(
    svi: SVI,
    rng_key: jax.Array,
    num_steps: int | None,
    *args: Any,
    batch_size: int | None = None,
    group_size: int = 1,
    indices: str | None = None,
    steps: str | None = None,
    init_state: SVIState | None = None,
    init_params: dict[str, Any] | None = None,
    row_optim: RowOptimizer | None = None,
    on_host: bool = False,
    sharding: Sharding | None = None,
    monitor: Monitor | None = None,
    checkpoints: Checkpoints | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    steps_per_call: int | None = None,
    allow_nan: bool | None = None,
    **kwargs: Any,
) -> FitResult:
    """Train for ``num_steps`` steps of ``svi.update``, or until the posterior has arrived.

    With ``batch_size=B``, every array among the arguments whose leading axis is as long as that of
    the first array (``N``) is cut to ``B`` rows per step. The model scales the batch up, as with
    NumPyro's ``plate(..., N, subsample_size=B)``; say ``N`` for instance by ``SVI(..., size=N)``.
    Each epoch cuts a fresh random permutation into ``N // B`` batches and leaves out what remains of
    it: no batch repeats a row, every batch is a uniformly random subset of exactly ``B`` rows, and
    the estimate of the ELBO is unbiased.

    Arrays go onto the device as wholes. Those that are maps of files (``numpy.load(..., mmap_mode="r")``,
    ``numpy.memmap``) stay on disk, and with ``on_host=True`` all others with ``N`` rows in the host's
    memory: their batches are read ahead while the device computes. Batches can come from other files
    and iterables too: give a source as the first argument after ``num_steps``, :mod:`npgp.training.sources`.

    Training stops with :class:`NonFiniteLossError` at the first ELBO or gradient that is not
    finite. After an interrupt from the keyboard, it returns what was trained so far and warns. After 400 steps of
    :func:`npgp.adam` or more, a :class:`TrainingWarning` says so if the posterior has not arrived, by the ELBO at
    averages of its parameters, and ``result.convergence`` has what moved; after 500 of any optimizer, if the loss ended
    above where it had been, was falling fast or noise. Not with ``steps``, where the loss may follow a schedule. Where
    the posterior has arrived, or ``num_steps`` is ``None``, one says so if inducing points are clearly too few: what
    they leave of functions costs .03 nats a row or more.

    The observed statements of the model are looked at once: each that is about the rows of a step must scale them up to
    all rows, by its plate or by ``handlers.scale``. What is given to ``numpyro.factor`` outside plates is taken as it
    is. All rows are looked at for values that the likelihood of an ``observe`` cannot have: those in memory before the
    training begins, others as they are read, in which case :class:`DataError` holds what was trained before.

    Neither ``jit`` nor other transformations can be around it. Several threads may train, with one ``SVI`` too: they
    take turns where a model runs or is compiled, as NumPyro's handlers are those of all threads.

    To continue, pass ``init_state=result.state`` and the same ``rng_key``: noise, batches and
    learning-rate schedule go on where they were, and 60 + 40 steps give the same numbers as 100.
    To continue after the process was killed, give ``checkpoints``, and run the same program again.

    .. code-block:: python

        result = npgp.fit(svi, key, 60, X, y, progress=False)
        # A hundred steps in all.
        more = npgp.fit(svi, key, 40, X, y, init_state=result.state, progress=False)

    :param svi: NumPyro's ``SVI`` of model, guide, optimizer, loss and static arguments.
    :param rng_key: key for the initial values, the noise and the order of the batches.
    :param num_steps: number of steps to take in this call; ``None`` for as many as it takes until the guide's posterior
        has arrived (:class:`npgp.training.Arrival`), or until one of ``callbacks``, or the monitor, ends the training.
    :param args: positional arguments of model and guide; a source of batches stands for the first ones.
    :param batch_size: rows per step; all of them at every step if ``None``.
    :param group_size: each so many consecutive rows stay together, in one batch and in their order: for the ``grouped``
        conditional, whose data :meth:`npgp.sparse.Groups.arrange` puts in order.
    :param indices: keyword under which model and guide receive the row numbers of the batch, for
        models with parameters per row.
    :param steps: keyword under which model and guide receive the number of the step, counted from zero over all
        continuations, for whatever follows a schedule. :func:`evaluate` does not pass it.
    :param init_state: state to continue from.
    :param init_params: initial values of parameters by site name, as for ``svi.init``.
    :param row_optim: how to move the rows of row tables (:func:`npgp.model.row_param`), :func:`row_adam`. A step then
        costs the same however many rows there are, but for one copy of the tables in each device call, of which three
        are in memory; rows that it does not look up stay as they are, and so does their state of the optimizer.
        ``svi``'s own optimizer moves all other parameters; if omitted, it moves the tables as wholes. Afterwards
        ``result.params`` has the whole tables, and ``result.state`` is for :func:`fit` and :func:`evaluate`;
        ``svi.get_params`` refuses it.
    :param on_host: leave the rows in the host's memory, for data that do not fit in the device's memory.
    :param sharding: share the rows of each step among devices, :class:`npgp.training.Sharding`.
    :param monitor: what to evaluate now and then, and when to stop early, :class:`npgp.training.Monitor`.
    :param checkpoints: where to save all that it takes to go on, :class:`npgp.training.Checkpoints`. If its folder
        holds a checkpoint of this training, it is gone on from there, up to ``num_steps`` steps in all, and the result
        is that of a call that was never interrupted, bit for bit.
    :param callbacks: what else takes part between device calls, :class:`npgp.training.Callback`.
    :param progress: show a progress bar with the ELBO (mean of the last hundred steps), the rate and the time left.
    :param steps_per_call: steps per device call; by default as many as take about a second.
    :param allow_nan: accept NaN and infinities in the arguments: all, none, or, if omitted, those of observations that
        ``npgp.observe`` or :class:`npgp.CollapsedGP` is given a mask for.
    :param kwargs: keyword arguments of model and guide.
    :raises TypeError: inside ``jit`` and other transformations, for options of another type, and for tables and lists
        that batches are to be cut from.
    :raises ValueError: for options and data as said above, a batch that does not stand for all rows among them.
    :raises NonFiniteLossError: if the ELBO or its gradient is not finite.
    :raises DataError: if rows cannot be read, or are not possible, after training has begun.
    """
    called = time.perf_counter()
    refuse_traced("fit", (rng_key, args, kwargs, init_state))
    if num_steps is not None:
        num_steps = checks.whole_number(num_steps, "num_steps")
    elif not callbacks and (monitor is None or monitor.patience is None):
        callbacks = [Arrival()]
    steps_per_call = None if steps_per_call is None else checks.whole_number(steps_per_call, "steps_per_call")
    for name, value, wanted in (
        ("sharding", sharding, Sharding),
        ("monitor", monitor, Monitor),
        ("checkpoints", checkpoints, Checkpoints),
    ):
        if not (value is None or isinstance(value, wanted)):
            raise TypeError(f"{name} is {value!r}; it must be an npgp.training.{wanted.__name__}.")
    if isinstance(callbacks, Callback):
        raise TypeError(f"callbacks is {checks.shown(callbacks)}; it must be a list, also of one.")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(f"callbacks has {callback!r}; each must be an npgp.training.Callback.")
    if sharding is not None and row_optim is not None:
        raise ValueError("sharding and row_optim do not go together: rows of tables are moved on one device.")
    checks.random_key(rng_key)
    if not all(callable(getattr(svi, method, None)) for method in ("init", "update", "get_params")):
        raise TypeError(
            f"svi is {checks.shown(svi)}; it must be NumPyro's SVI(model, guide, optimizer, TraceMeanField_ELBO())."
        )
    init_params = dict(init_params) if init_params else init_params
    stored = init_params.pop(ROWS_TRAINED_ON, None) if init_params else None
    step = Step(svi, row_optim)
    if init_state is None:
        clear_cache(svi)
    else:
        _check_state(init_state, row_optim is not None)
    first = 0 if init_state is None else int(steps_taken(init_state))
    data = Data(args, kwargs, rng_key, batch_size, indices, group_size, steps, on_host, sharding, allow_nan, first)

    if init_state is None or not is_initialized(svi):
        # A restored state needs this too: `SVI` learns the constraints of its parameters here.
        first_args, first_kwargs = data.first_call(first)
        try:
            if isinstance(svi.guide, AutoSparseGP):
                in_parts = data.batch_size is not None or data.source is not None
                svi.guide.choose_rows(data.first_rows if in_parts else None, stored, svi.static_kwargs)
            state = step.init(rng_key, *first_args, init_params=init_params, **first_kwargs)
        except Exception as error:
            data.refuse_nan()  # which says where they came from
            if isinstance(error, (TypeError, ValueError)) and (uncut := data.uncut()):
                raise ValueError(" ".join([str(error), *uncut.values()])) from error
            if init_params:
                shapes = {name: jnp.shape(value) for name, value in init_params.items()}
                error.add_note(f"init_params has the shapes {shapes}; they must be those of the model's parameters.")
            raise
        names = jax.eval_shape(lambda: step.get_params(state))
        _check_names(names, init_params, "init_params")
        if init_state is not None:
            present = jax.eval_shape(lambda: step.get_params(init_state))
            _check_names(names, present, "init_state")
            _check_names(present, names, "the model")
    state = jax.tree.map(jnp.asarray, state if init_state is None else init_state)
    check = None
    if data.reads or data.num_rows:
        params = one_program(lambda: step.get_params(state))
        with one_model_at_a_time:
            check = check_of_rows(svi, params, data, first)
    else:
        data.refuse_nan()

    # Independent of num_steps: the length of a chunk is part of the compiled program.
    affordable = min(max(1, MAX_ROWS_PER_CALL // (batch_size or 1)), data.max_steps(first))
    max_steps = steps_per_call or min(MAX_STEPS_PER_CALL, affordable)
    seconds = time.perf_counter() - called
    training = Training(Steps(step, data, state, max_steps), data, check, first, num_steps, max_steps, seconds)
    bar = [Progress()] if progress and jax.process_index() == 0 else []
    if steps is None and Fifths.can_look(training):  # where the loss follows a schedule, its values are not of one kind
        callbacks = [*callbacks, Fifths()]
    training.callbacks = [*([monitor] if monitor else []), *callbacks, *([checkpoints] if checkpoints else []), *bar]

    ended: BaseException | None = None
    begun: list[Callback] = []
    with one_blas_thread(), Interrupts(saving=checkpoints is not None) as interrupts:
        try:
            for callback in training.callbacks:
                callback.begin(training)
                begun.append(callback)
            _train(training, interrupts, steps_per_call, max_steps)
        except BaseException as error:
            ended = error
        try:
            with interrupts_held():
                for callback in begun:
                    callback.end(training, ended)
        except KeyboardInterrupt as error:
            ended = ended or error
    if isinstance(ended, KeyboardInterrupt) and training.done:
        is_saved = checkpoints is not None and checkpoints.newest == training.step
        saved = " They are saved: the same call goes on from there." if is_saved else ""
        of_all = "" if num_steps is None else f" of {num_steps}"
        warnings.warn(f"Interrupted: {training.done}{of_all} steps were taken.{saved}", stacklevel=2)
    elif ended is not None:
        raise ended
    elif steps is None and num_steps is not None and jax.process_index() == 0:
        if words := verdict(training.losses, data.num_rows) or sentence(training.convergence):
            warnings.warn(f"npgp.fit: {words}", TrainingWarning, stacklevel=2)
    result = training.result()
    # Of hyperparameters that a given number of steps has not learned, what points leave of functions says nothing.
    learned = training.convergence is not None and (num_steps is None or training.convergence.arrived)
    if learned and ended is None and training.is_whole and jax.process_index() == 0:
        if words := too_few_points(svi, result.params, *data.first_call(training.step)):
            warnings.warn(f"npgp.fit: {words}", TrainingWarning, stacklevel=2)
    return result


def _train(training: Training, interrupts: Interrupts, steps_per_call: int | None, max_steps: int) -> None:
    """Take steps, and do what is due between device calls, to the end."""

    def next_due(done: int) -> list[int | None]:
        """Number of steps after ``done`` at which each callback is due; ``None`` for one that always is."""
        due = (callback.until(training.first + done) for callback in training.callbacks)
        return [None if steps is None else max(1, steps) for steps in due]

    def length(done: int, size: int) -> int:
        """Number of steps of the device call after ``done`` steps; it ends where a callback is due."""
        return min([size, training.left(done), *(steps for steps in next_due(done) if steps is not None)])

    def call(callbacks: Sequence[Callback]) -> bool:
        with one_model_at_a_time:
            wishes = [callback(training) for callback in callbacks]
        return any(wishes)

    size, calls, ahead = steps_per_call or 1, 0, None
    with ThreadPoolExecutor(1, "npgp-batches") as reader:
        # After a resumption: an evaluation that an interrupt broke off, of the state that was saved then.
        stop = training.done > 0 and call(training.callbacks)
        while training.left(training.done) > 0 and not stop:
            began = time.perf_counter()
            with training.data_errors():
                ahead = ahead or reader.submit(training.read, training.done, length(training.done, size))
                n, chunk = ahead.result()
            ahead = None
            if training.data.reads and training.left(training.done + n) > 0:
                ahead = reader.submit(training.read, training.done + n, length(training.done + n, size))
            if calls == 0:
                training.prepare(chunk, n)
                began = time.perf_counter()
            waits = next_due(training.done)
            training.advance(chunk, n)
            calls += 1
            # A program's first call is no measure of speed.
            if steps_per_call is None and calls > 1:
                speed = n / (time.perf_counter() - began)
                size = max(1, min(int(speed * SECONDS_PER_CALL), 10 * size, max_steps))
            stop = call([c for c, wait in zip(training.callbacks, waits, strict=True) if wait is None or wait <= n])
            size = interrupts.agree(size)


def _check_names(params: dict[str, Any], present: dict[str, Any] | None, name: str) -> None:
    unknown = sorted(set(present or {}) - set(params))
    if unknown:
        other = "init_state" if name == "the model" else "the model"
        raise ValueError(
            f"{name} has {unknown[0]!r}, but {other} only {sorted(params)!s:.200}; their names must match."
        )


def _check_state(state: SVIState, by_rows: bool) -> None:
    if not isinstance(state, SVIState):
        raise TypeError(
            f"init_state is {checks.shown(state)}; it must be the state of a training, result.state; to start from "
            "values of parameters give init_params."
        )
    trained = isinstance(state.optim_state, RowState)
    if trained and not by_rows:
        raise ValueError("init_state was trained with row_optim; give row_optim to continue.")
    if by_rows and not trained:
        raise ValueError(
            "init_state was trained without row_optim, and has no state for single rows: continue without, or "
            "start from its values with init_params=result.params."
        )
