"""
Row tables: parameters with an entry for each data row, of which a step of training touches only the rows it asks for.

:func:`row_param` is a statement for models and guides. To NumPyro it is ``numpyro.param(name, init)[rows]``: the site
holds the whole table. Under :func:`npgp.fit` with ``row_optim`` the tables leave the parameters that the optimiser
moves as wholes: a handler around model and guide answers the statement with the rows it asks for, the loss is
differentiated in these, and they and their share of the optimiser's state are written back in place. The cost of a
step does not grow with the table.

How the gradient in the rows is taken: to the rows that each statement asks for the handler adds an array of zeros, and
the loss is differentiated in the zeros. So a statement may ask for any rows, known only when it is reached, and
several statements may ask for rows of one table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from numpyro.optim import Minimize, _NumPyroOptim
from numpyro.primitives import Messenger

from npgp import checks
from npgp.pytrees import pytree

__all__ = ["RowOptimizer", "row_param"]

# Keys of a param message: the rows that its statement asks for, and whether its value is these rows alone.
ROWS = "npgp.model.row_params"
GATHERED = "npgp.gathered"


# ---------------------------------------------------------------------------------------------------------------
# The statement


def row_param(
    name: str,
    init: ArrayLike | Callable[[jax.Array], jax.Array] | None = None,
    rows: ArrayLike | None = None,
    constraint: constraints.Constraint = constraints.real,
) -> jax.Array:
    """
    Rows of a parameter that has an entry for each data row, or for each of something else::

        def guide(Y, rows):
            loc = npgp.row_param("x.loc", np.zeros((N, Q)), rows)
            scale = npgp.row_param("x.scale", lambda key: jnp.ones((N, Q)), rows, constraints.positive)
            with npgp.plate("data", N, rows):
                numpyro.sample("x", dist.Normal(loc, scale).to_event(1))

    It is ``numpyro.param(name, init, constraint=constraint)[rows]``, whatever handler or algorithm it runs under; and
    :func:`npgp.fit` with ``row_optim`` moves, at each step, only the rows that the step asks for. There, an array
    ``init`` is looked at only when training starts: give it as it is, a NumPy array or a function, and do not compute
    with it.

    :param name: name of the ``param`` site, which holds the whole table.
    :param init: the whole table (N, …), constrained, floating; or a function of a random key that makes it.
    :param rows: numbers of the rows wanted, integers in 0 to N − 1 of any shape (B, …); a row may be there twice. All
        rows, in order, if omitted.
    :param constraint: of each entry, or of trailing axes of each row.
    :return: the rows, (B, …, …).
    :raises TypeError: for a table that is not floating, or rows that are not integers.
    :raises ValueError: for a table without rows, a constraint that couples rows, and row numbers out of range, where
        they have values. Inside jit, the rows that such numbers ask for are NaN, which :func:`npgp.fit` refuses.
    """
    if rows is not None:
        shape, dtype = jnp.shape(rows), jnp.result_type(rows)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(f"rows of {name!r} has dtype {dtype}; it must hold row numbers, which are integers.")
        if 0 in shape:
            raise ValueError(f"rows of {name!r} has shape {shape}; it must hold at least one row number.")
    with (statement := _Statement(rows)):
        values = numpyro.param(name, init, constraint=constraint)
    if statement.message.get(GATHERED):
        return values
    if values is None:
        raise ValueError(f"row_param {name!r} has no init, and no handler gives it a value.")
    table = jnp.asarray(values)
    _check_table(name, table, constraint)
    return _take(name, table, rows)


class _Statement(Messenger):
    """Puts the rows on the message of the statement that it encloses, and keeps the message."""

    message: dict[str, Any]

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def process_message(self, msg):
        if msg["type"] == "param":
            msg[ROWS] = self.rows
            self.message = msg


def _check_table(name: str, table: jax.Array, constraint: constraints.Constraint) -> None:
    if not jnp.issubdtype(table.dtype, jnp.floating):
        raise TypeError(f"row_param {name!r} has dtype {table.dtype}; its table must be floating.")
    if not table.ndim or not table.shape[0]:
        raise ValueError(f"row_param {name!r} has shape {table.shape}; its table must have rows, (N, …).")
    within = constraint.event_dim < table.ndim
    if not within or any(jnp.ndim(bound) >= table.ndim for bound in jax.tree.leaves(constraint)):
        raise ValueError(
            f"row_param {name!r} of shape {table.shape} has the constraint {constraint}, which is not the same for "
            "each row by itself; constraints of single entries or of a row's own axes are accepted."
        )


def _take(name: str, table: jax.Array, rows: ArrayLike | None) -> jax.Array:
    if rows is None:
        return table
    if not checks.is_traced(rows):
        low, high = np.min(rows), np.max(rows)
        if low < 0 or high >= table.shape[0]:
            number = low if low < 0 else high
            raise ValueError(f"rows of {name!r} has {number}; row numbers must be in 0 to {len(table) - 1}.")
    return table.at[jnp.asarray(rows)].get(mode="fill", wrap_negative_indices=False)


# ---------------------------------------------------------------------------------------------------------------
# Handlers


class _FindTables(Messenger):
    """Notes the names of tables, and of params that are stated both as a table and as a whole."""

    def __init__(self):
        super().__init__()
        self.tables: dict[str, None] = {}  # in order
        self.others: set[str] = set()

    def postprocess_message(self, msg):
        if msg["type"] == "param":
            if ROWS in msg:
                self.tables[msg["name"]] = None
            else:
                self.others.add(msg["name"])


class _Supply(Messenger):
    """
    Answers statements of row tables with the rows they ask for.

    :param tables: the tables by name, unconstrained.
    :param constrain: from unconstrained to constrained values by name (``svi.constrain_fn``).
    :param offsets: what to add to the unconstrained rows of each statement, by table; statements that ask for the very
        same array of row numbers share one.
    """

    def __init__(self, tables: dict[str, jax.Array], constrain: Callable, offsets: dict[str, list] | None = None):
        super().__init__()
        self.tables, self.constrain, self.offsets = tables, constrain, offsets
        #: Row numbers that were asked for, by table; and their shapes, which outlive tracing.
        self.rows: dict[str, list[Any]] = {name: [] for name in tables}
        self.shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in tables}

    def process_message(self, msg):
        name = msg["name"] if msg["type"] == "param" else None
        if name not in self.tables:
            return
        if ROWS not in msg:
            raise ValueError(_stated_twice(name))
        rows, asked = msg[ROWS], self.rows[name]
        slot = next((i for i, known in enumerate(asked) if known is rows), len(asked))
        if slot == len(asked):
            asked.append(rows)
            self.shapes[name].append((len(self.tables[name]),) if rows is None else jnp.shape(rows))
        values = _take(name, self.tables[name], rows)
        if self.offsets is not None:
            values = values + self.offsets[name][slot]
        msg["value"], msg[GATHERED] = self.constrain({name: values})[name], True


def _stated_twice(name: str) -> str:
    return (
        f"{name!r} is a row table (npgp.row_param), and is stated by numpyro.param as well, which needs all rows at "
        "every step: state it by row_param alone, or train without row_optim."
    )


# ---------------------------------------------------------------------------------------------------------------
# The optimiser


@dataclass(frozen=True)
class RowOptimizer:
    """
    How rows are moved (:func:`npgp.row_adam`): each row as if it were alone, at the steps that ask for it.

    :param transform: an optax transformation without a learning rate, such as ``optax.scale_by_adam()``. Each row has a
        state of its own, with its own count, which only the steps that ask for the row advance.
    :param learning_rate: a schedule: from the number of the step, counted for all rows alike, to the learning rate.
    """

    transform: optax.GradientTransformation
    learning_rate: Callable[[ArrayLike], ArrayLike]


@pytree
@dataclass(frozen=True, eq=False)
class RowState:
    """
    State of the optimiser where tables are apart; the ``optim_state`` of ``FitResult.state``.

    :param dense: state of the optimiser of all other parameters.
    :param tables: the tables by name, unconstrained.
    :param moments: state of each table's row optimiser, (N, …) in every array.
    """

    dense: Any
    tables: dict[str, jax.Array]
    moments: dict[str, Any]

    @property
    def count(self) -> jax.Array:
        """Number of steps taken."""
        return self.dense[0]

    def __getitem__(self, _):
        # Where an optimiser of optax or NumPyro would take its own state apart.
        raise TypeError(
            "this state was trained with row_optim, and svi's own optimiser cannot read it: take result.params, "
            "npgp.evaluate(svi, key, result, …), and npgp.fit(…, init_state=result.state, row_optim=…) to continue."
        )


#: What takes back the last step: for each table, rows (out of range where there is nothing to take back), the
#: values they had, and their share of the optimiser's state.
Undo = dict[str, tuple[jax.Array, jax.Array, Any]]


class Good(NamedTuple):
    """What leads from a state back to the last one that was seen to be good."""

    #: That state, without its tables.
    small: SVIState
    #: From the tables at hand to that state's, if the loss at the tables at hand is not finite.
    undo: Undo
    #: Whether a table's rows became NaN at the last step; they were not written.
    nan: dict[str, jax.Array]


class _Step(NamedTuple):
    state: RowState
    undo: Undo
    nan: dict[str, jax.Array]
    ok: jax.Array


def has_nan(tree) -> jax.Array:
    """Whether there is a NaN in any array of a tree."""
    return jnp.any(jnp.stack([jnp.any(jnp.isnan(x)) for x in jax.tree.leaves(tree)] or [False]))


class _LazyRows(_NumPyroOptim):
    """
    Another optimiser for what is no table, and a row optimiser for the rows of tables that a step asks for.

    :param dense: optimiser of all other parameters.
    :param rows: optimiser of the rows.
    :param constrain: from unconstrained to constrained values by name.
    """

    def __init__(self, dense: _NumPyroOptim, rows: Any, constrain: Callable):
        self.dense, self.rows, self.constrain = dense, rows, constrain
        self.found = _FindTables()
        #: Shapes of the row numbers that the loss asks for, by table.
        self.slots: dict[str, list[tuple[int, ...]]] = {}

    def init(self, params):
        tables = {name: params[name] for name in self.found.tables if name in params}
        if not tables:
            raise ValueError("row_optim is given, but neither model nor guide has a row table (npgp.row_param).")
        for name in tables:
            if name in self.found.others:
                raise ValueError(_stated_twice(name))
        dense = {name: value for name, value in params.items() if name not in tables}
        moments = {name: jax.jit(jax.vmap(self.rows.transform.init))(table) for name, table in tables.items()}
        return RowState(self.dense.init(dense), tables, moments)

    def get_params(self, state):
        return {**self.dense.get_params(state.dense), **state.tables}

    def eval_and_update(self, fn, state, forward_mode_differentiation=False):
        params = self.dense.get_params(state.dense)
        offsets = {
            name: [jnp.zeros((*shape, *state.tables[name].shape[1:]), state.tables[name].dtype) for shape in shapes]
            for name, shapes in self.slots.items()
        }

        def loss(params, offsets):
            with (supply := _Supply(state.tables, self.constrain, offsets)):
                value, aux = fn(params)
            return value, (aux, _outside(supply.rows))

        def dense_loss(params):
            value, (aux, _) = loss(params, offsets)
            return value, aux

        if type(self.dense).eval_and_update is _NumPyroOptim.eval_and_update:
            (value, (aux, rows)), (grads, row_grads) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, offsets)
            dense = self.dense.update(grads, state.dense, value=value)
        else:  # one that evaluates the loss as it likes, such as natural_gradient
            (value, aux), dense = self.dense.eval_and_update(dense_loss, state.dense)
            (_, (_, rows)), row_grads = jax.value_and_grad(loss, 1, has_aux=True)(params, offsets)

        rate = jnp.asarray(self.rows.learning_rate(state.dense[0]))
        old, new = {}, {}
        for name, table in state.tables.items():
            if not rows[name]:  # stated when training started, but not by the loss
                continue
            numbers, grad = _sum_by_row(rows[name], row_grads[name], table)
            values, moments = jax.tree.map(
                lambda x, numbers=numbers: x.at[numbers].get(mode="clip", wrap_negative_indices=False),
                (table, state.moments[name]),
            )
            updates, new_moments = jax.vmap(self.rows.transform.update)(grad, moments, values)
            old[name] = (numbers, values, moments)
            new[name] = (numbers, values + (-rate).astype(table.dtype) * updates, new_moments)
        nan = {name: has_nan(values) for name, (_, values, _) in new.items()}
        ok = jnp.isfinite(value) & ~has_nan(self.dense.get_params(dense)) & ~jnp.any(jnp.stack([*nan.values(), False]))
        # A bad step leaves the rows as they are, also in what the row optimiser keeps of them.
        kept = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
        tables, all_moments = _write(state.tables, state.moments, kept)
        return (value, aux), _Step(RowState(dense, tables, all_moments), old, nan, ok)


def _outside(rows: dict[str, list]) -> dict[str, list]:
    """Row numbers that a statement asked for, usable where the loss is."""
    try:
        return jax.tree.map(lambda numbers: jnp.asarray(numbers) + 0, rows)
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(
            "with row_optim, the row numbers that row_param asks for must be the same for all particles of the loss, "
            "and known outside scan and vmap: take them from the arguments of model and guide."
        ) from error


def _sum_by_row(rows: list[Any], grads: list[jax.Array], table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """
    Row numbers, each once, in order, and the sums of the gradients of all their occurrences.

    There are as many as were asked for: those left over by repetition are beyond the end of the table.
    """
    size = len(table)
    if len(rows) == 1 and rows[0] is None:
        return jnp.arange(size), grads[0]
    every = jnp.arange(size)
    numbers = jnp.concatenate([every if r is None else jnp.ravel(r).astype(every.dtype) for r in rows])
    grad = jnp.concatenate([g.reshape(-1, *table.shape[1:]) for g in grads])
    unique, inverse = jnp.unique(numbers, size=len(numbers), fill_value=size, return_inverse=True)
    beyond = size + jnp.arange(len(unique))
    return jnp.where(unique >= size, beyond, unique), jnp.zeros_like(grad).at[inverse].add(grad)


def _write(tables: dict[str, jax.Array], moments: dict[str, Any], rows: Undo) -> tuple[dict, dict]:
    """The tables and their moments with some rows written over."""
    tables, moments = dict(tables), dict(moments)
    for name, (numbers, *new) in rows.items():

        def scatter(x, values, numbers=numbers):
            at = x.at[numbers]
            options = {"indices_are_sorted": True, "unique_indices": True, "wrap_negative_indices": False}
            return at.set(values, mode="drop", **options)

        tables[name], moments[name] = jax.tree.map(scatter, (tables[name], moments[name]), tuple(new))
    return tables, moments


# ---------------------------------------------------------------------------------------------------------------
# SVI


class LazySVI:
    """
    What the training loop asks of an ``SVI``, with tables apart from the other parameters.

    :param svi: the ``SVI`` of model and guide; its optimiser is that of the other parameters.
    :param optim: optimiser of the rows; may be left out where nothing is trained.
    :raises TypeError: for a row optimiser of another type, or a dense one that is no optimiser of single steps.
    """

    def __init__(self, svi: SVI, optim: RowOptimizer | None = None):
        if not (optim is None or isinstance(optim, RowOptimizer)):
            raise TypeError(
                f"row_optim is a {type(optim).__name__}; it must be made by npgp.row_adam, or be an npgp.RowOptimizer, "
                "whose learning rate follows the number of the step and not of the row's visits."
            )
        if isinstance(svi.optim, Minimize):
            raise TypeError("row_optim works beside an optimiser of single steps, not beside Minimize.")
        self.svi, self.inner = svi, copy.copy(svi)
        self.optim: Any = _LazyRows(svi.optim, optim, lambda values: self.svi.constrain_fn(values))
        self.inner.optim = self.optim

    def init(self, *args, **kwargs) -> SVIState:
        """As ``svi.init``; the other parameters alone have a state in svi's own optimiser."""
        with self.optim.found:
            state = self.inner.init(*args, **kwargs)
        self.svi.constrain_fn = self.inner.constrain_fn
        return state

    def get_params(self, state: SVIState) -> dict[str, Any]:
        """Constrained values of all parameters, whole tables among them."""
        return self.svi.constrain_fn(self.optim.get_params(state.optim_state))

    def evaluate(self, state: SVIState, *args, **kwargs) -> jax.Array:
        """The loss; of the tables, only rows are looked at."""
        dense, tables = state.optim_state.dense, state.optim_state.tables
        with _Supply(tables, self.optim.constrain):
            return self.svi.evaluate(state._replace(optim_state=dense), *args, **kwargs)

    def start(self, state: SVIState, arguments: Callable[..., tuple], *operands) -> Good:
        """
        Find what rows the loss asks for, without computing anything; what to go back to at the start.

        :param state: the first state.
        :param arguments: positional and keyword arguments of model and guide as a function of ``operands``.
        """
        supply = _Supply(state.optim_state.tables, self.optim.constrain)
        looking = copy.copy(self.svi)
        looking.optim = _Look(self.svi.optim, supply)

        def look(small, *operands):
            args, kwargs = arguments(*operands)
            return looking.update(small, *args, **kwargs)[1]

        small, (tables, moments) = split(state)
        jax.eval_shape(look, small, *operands)
        self.optim.slots = supply.shapes
        undo = {}
        for name, shapes in self.optim.slots.items():
            if shapes:
                count = sum(int(np.prod(shape)) for shape in shapes)
                beyond = len(tables[name]) + jnp.arange(count)
                nothing = jax.tree.map(
                    lambda x, count=count: jnp.zeros((count, *x.shape[1:]), x.dtype), (tables[name], moments[name])
                )
                undo[name] = (beyond, *nothing)
        return Good(small, undo, {name: jnp.asarray(False) for name in undo})

    def step(self, state: SVIState, good: Good, args, kwargs) -> tuple[SVIState, Good, jax.Array, jax.Array]:
        """
        One step, to be traced with tables that may be written over.

        :return: the new state, what leads back to a good one, the loss, and whether all is well.
        """
        self.inner.constrain_fn = self.svi.constrain_fn
        new, loss = self.inner.update(state, *args, **kwargs)
        step: _Step = new.optim_state
        finite = jnp.isfinite(loss)
        small, undo = jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), (split(state)[0], step.undo), (good.small, good.undo)
        )
        return new._replace(optim_state=step.state), Good(small, undo, step.nan), loss, step.ok

    def nan_names(self, state: SVIState, good: Good) -> list[str]:
        """The parameters that became NaN at the last step, which led to ``state``."""
        dense = self.svi.optim.get_params(state.optim_state.dense)
        return [*(n for n, value in dense.items() if has_nan(value)), *(n for n, bad in good.nan.items() if bad)]

    def last_good(self, state: SVIState, good: Good, finite: bool) -> SVIState:
        """
        The last state whose loss was seen to be finite.

        :param state: what the last step, a bad one, led to: it left the tables as it found them.
        :param good: what leads back.
        :param finite: whether the loss of the bad step was finite, and its gradient bad.
        """
        _, (tables, moments) = split(state)
        if not finite:
            tables, moments = jax.jit(_write)(tables, moments, good.undo)
        return join(good.small, (tables, moments))


class _Look(_NumPyroOptim):
    """Runs the loss, and moves nothing."""

    def __init__(self, dense: _NumPyroOptim, supply: _Supply):
        self.dense, self.supply = dense, supply

    def eval_and_update(self, fn, state, forward_mode_differentiation=False):
        with self.supply:
            return fn(self.dense.get_params(state)), state


def split(state: SVIState) -> tuple[SVIState, tuple[dict, dict]]:
    """A state without its tables, with the dense optimiser's state in it; and the tables with their moments."""
    optim = state.optim_state
    return state._replace(optim_state=optim.dense), (optim.tables, optim.moments)


def join(small: SVIState, tables: tuple[dict, dict]) -> SVIState:
    """What :func:`split` took apart."""
    return small._replace(optim_state=RowState(small.optim_state, *tables))
