"""
Training that moves the rows of row tables alone (:func:`npgp.model.row_param`).

Under :func:`npgp.fit` with ``row_optim`` the tables leave the parameters that the optimizer moves as wholes: a handler
around model and guide answers each statement with the rows it needs, the loss is differentiated in these, and they and
their share of the optimizer's state are written back in place. The cost of a step does not grow with the table; each
device call makes one copy of it, to go back to.

How the gradient in the rows is taken: to the rows of each statement the handler adds an array of zeros, and the loss is
differentiated in the zeros. So a statement may want any rows, known only when it is reached, and several statements may
want rows of one table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from numpyro.optim import Minimize

from npgp.contract import Optimizer, constrained, copy_constraints, follows_gradient, step_count, with_optimizer
from npgp.model.row_params import FindTables, SupplyRows, stated_twice
from npgp.pytrees import pytree

__all__ = ["RowOptimizer"]


# ---------------------------------------------------------------------------------------------------------------
# The optimizer


@dataclass(frozen=True)
class RowOptimizer:
    """
    Optimizer of single rows of tables (:func:`npgp.training.row_adam`): each row moves as if it were alone, at the
    steps that need it.

    .. code-block:: python

        optimizer = npgp.training.row_adam(0.01)
        assert isinstance(optimizer, npgp.training.RowOptimizer)

    :param transform: an optax transformation without a learning rate, such as ``optax.scale_by_adam()``. Each row has a
        state of its own, with its own count, which only the steps that need the row advance.
    :param learning_rate: a schedule: from the number of the step, counted for all rows alike, to the learning rate.
    """

    transform: optax.GradientTransformation
    learning_rate: Callable[[ArrayLike], ArrayLike]


@pytree
@dataclass(frozen=True, eq=False)
class RowState:
    """
    State of the optimizer where tables are apart; the ``optim_state`` of ``FitResult.state``.

    :param dense: state of the optimizer of all other parameters.
    :param tables: the tables by name, unconstrained.
    :param moments: state of each table's row optimizer, (N, …) in every array.
    :param nan: whether the rows that the last step wrote have NaN, by table: so that no step looks through a table.
    """

    dense: Any
    tables: dict[str, jax.Array]
    moments: dict[str, Any]
    nan: dict[str, jax.Array]

    @property
    def count(self) -> jax.Array:
        """Number of steps taken."""
        return step_count(self.dense)

    def __getitem__(self, _: Any) -> Any:
        # Where an optimizer of optax or NumPyro would take its own state apart.
        raise TypeError(
            "this state was trained with row_optim, and svi's own optimizer cannot read it: take result.params, "
            "npgp.evaluate(svi, key, result, …), and npgp.fit(…, init_state=result.state, row_optim=…) to continue."
        )


def has_nan(tree: Any) -> jax.Array:
    """True if any array of a tree has a NaN."""
    return jnp.any(jnp.stack([jnp.any(jnp.isnan(x)) for x in jax.tree.leaves(tree)] or [False]))


class _LazyRows(Optimizer):
    """
    Another optimizer for what is no table, and a row optimizer for the rows of tables that a step needs.

    :param dense: optimizer of all other parameters.
    :param rows: optimizer of the rows.
    :param constrain: from unconstrained to constrained values by name.
    """

    def __init__(self, dense: Optimizer, rows: Any, constrain: Callable):
        self.dense, self.rows, self.constrain = dense, rows, constrain
        self.found = FindTables()

    def init(self, params: dict[str, jax.Array]) -> RowState:
        tables = {name: params[name] for name in self.found.tables if name in params}
        if not tables:
            raise ValueError("row_optim is given, but neither model nor guide has a row table (npgp.model.row_param).")
        for name in tables:
            if name in self.found.others:
                raise ValueError(stated_twice(name))
        dense = {name: value for name, value in params.items() if name not in tables}
        moments = {name: jax.jit(jax.vmap(self.rows.transform.init))(table) for name, table in tables.items()}
        return RowState(self.dense.init(dense), tables, moments, {name: jnp.asarray(False) for name in tables})

    def get_params(self, state: RowState) -> dict[str, jax.Array]:
        return {**self.dense.get_params(state.dense), **state.tables}

    def eval_and_update(
        self, fn: Callable, state: RowState, forward_mode_differentiation: bool = False
    ) -> tuple[Any, RowState]:
        params = self.dense.get_params(state.dense)
        looking = SupplyRows(state.tables, self.constrain)

        def look(params: Any) -> jax.Array:
            with looking:
                return fn(params)[0]

        jax.eval_shape(look, params)  # which rows are wanted, without computing anything
        offsets = {
            name: [jnp.zeros((*shape, *state.tables[name].shape[1:]), state.tables[name].dtype) for shape in shapes]
            for name, shapes in looking.shapes.items()
        }

        def loss(params: Any, offsets: Any) -> tuple[jax.Array, Any]:
            with (supply := SupplyRows(state.tables, self.constrain, offsets)):
                value, aux = fn(params)
            return value, (aux, _outside(supply.rows))

        def dense_loss(params: Any) -> tuple[jax.Array, Any]:
            value, (aux, _) = loss(params, offsets)
            return value, aux

        if follows_gradient(self.dense):
            (value, (aux, rows)), (grads, row_grads) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, offsets)
            dense = self.dense.update(grads, state.dense, value=value)
        else:  # one that evaluates the loss as it likes, such as natural_gradient
            (value, aux), dense = self.dense.eval_and_update(dense_loss, state.dense)
            (_, (_, rows)), row_grads = jax.value_and_grad(loss, 1, has_aux=True)(params, offsets)

        rate = jnp.asarray(self.rows.learning_rate(step_count(state.dense)))
        tables, moments, nan = dict(state.tables), dict(state.moments), dict(state.nan)
        for name, table in state.tables.items():
            if not rows[name]:  # stated when training started, but not by the loss
                continue
            numbers, grad = _sum_by_row(rows[name], row_grads[name], table)
            values, old = jax.tree.map(
                lambda x, numbers=numbers: x.at[numbers].get(mode="clip", wrap_negative_indices=False),
                (table, state.moments[name]),
            )
            updates, new = jax.vmap(self.rows.transform.update)(grad, old, values)
            values = values + (-rate).astype(table.dtype) * updates
            nan[name] = has_nan(values)
            tables[name], moments[name] = jax.tree.map(
                lambda x, rows, numbers=numbers: _write(x, numbers, rows), (table, state.moments[name]), (values, new)
            )
        return (value, aux), RowState(dense, tables, moments, nan)


def _outside(rows: dict[str, list]) -> dict[str, list]:
    """Row numbers of the statements, usable where the loss is."""
    try:
        return jax.tree.map(lambda numbers: jnp.asarray(numbers) + 0, rows)
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(
            "with row_optim, the row numbers given to row_param must be the same for all particles of the loss, "
            "and known outside scan and vmap: take them from the arguments of model and guide."
        ) from error


def _sum_by_row(rows: list[Any], grads: list[jax.Array], table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """
    Row numbers, each once, in order, and the sums of the gradients of all their occurrences.

    There are as many as were wanted: those left over by repetition are beyond the end of the table.
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


def _write(x: jax.Array, numbers: jax.Array, rows: jax.Array) -> jax.Array:
    """An array with some rows written over: in order, each once, and none where the number is beyond its end."""
    return x.at[numbers].set(
        rows, mode="drop", indices_are_sorted=True, unique_indices=True, wrap_negative_indices=False
    )


# ---------------------------------------------------------------------------------------------------------------
# SVI


class RowSVI:
    """
    ``SVI`` for the training loop, with tables apart from the other parameters.

    :param svi: the ``SVI`` of model and guide; its optimizer is that of the other parameters.
    :param optim: optimizer of the rows; may be left out where nothing is trained.
    :raises TypeError: for a row optimizer of another type, or a dense one that is no optimizer of single steps.
    """

    def __init__(self, svi: SVI, optim: RowOptimizer | None = None):
        if not (optim is None or isinstance(optim, RowOptimizer)):
            raise TypeError(
                f"row_optim is a {type(optim).__name__}; it must be made by npgp.training.row_adam, or "
                "be a RowOptimizer, whose learning rate follows the number of the step and not of the row's visits."
            )
        if isinstance(svi.optim, Minimize):
            raise TypeError("row_optim works beside an optimizer of single steps, not beside Minimize.")
        self.svi = svi
        self.optim: Any = _LazyRows(svi.optim, optim, lambda values: constrained(self.svi, values))
        self._inner = with_optimizer(svi, self.optim)

    def init(self, *args: Any, **kwargs: Any) -> SVIState:
        """Like ``svi.init``, but the other parameters alone have a state in svi's own optimizer."""
        with self.optim.found:
            state = self._inner.init(*args, **kwargs)
        copy_constraints(self._inner, self.svi)
        return state

    def get_params(self, state: SVIState) -> dict[str, Any]:
        """Constrained values of all parameters, whole tables among them."""
        return constrained(self.svi, self.optim.get_params(state.optim_state))

    def evaluate(self, state: SVIState, *args: Any, **kwargs: Any) -> jax.Array:
        """The loss; of the tables, only rows are looked at."""
        dense, tables = state.optim_state.dense, state.optim_state.tables
        with SupplyRows(tables, self.optim.constrain):
            return self.svi.evaluate(state._replace(optim_state=dense), *args, **kwargs)

    def update(self, state: SVIState, *args: Any, **kwargs: Any) -> tuple[SVIState, jax.Array]:
        """Like ``svi.update``."""
        copy_constraints(self.svi, self._inner)
        return self._inner.update(state, *args, **kwargs)
