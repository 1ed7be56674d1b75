"""
Row tables: parameters with an entry for each data row, of which a step of training touches only the rows it needs.

:func:`row_param` is a statement for models and guides. To NumPyro it is ``numpyro.param(name, init)[rows]``: the site
holds the whole table. In training that moves rows alone (:mod:`npgp.training.row_tables`) a handler around model and
guide answers the statement with its rows, :class:`SupplyRows`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks
from npgp.contract import Handler, bounds_of
from npgp.model.sites import GATHERED, ROWS, Catch
from npgp.programs.later import see_later

# ---------------------------------------------------------------------------------------------------------------
# The statement


def row_param(
    name: str,
    init: ArrayLike | Callable[[jax.Array], jax.Array] | None = None,
    rows: ArrayLike | None = None,
    constraint: constraints.Constraint = constraints.real,
) -> jax.Array:
    """
    Rows of a parameter that has an entry for each data row, or for each of something else:

    .. code-block:: python

        def guide(Y, rows):
            loc = npgp.model.row_param("x.loc", np.zeros((N, Q)), rows)
            scale = npgp.model.row_param(
                "x.scale", lambda key: jnp.ones((N, Q)), rows, constraints.positive
            )
            with npgp.plate("data", N, rows):
                numpyro.sample("x", dist.Normal(loc, scale).to_event(1))

    It is ``numpyro.param(name, init, constraint=constraint)[rows]``, whatever handler or algorithm it runs under; and
    :func:`npgp.fit` with ``row_optim`` moves, at each step, only the rows that the step needs. There, an array
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
        they have values. Inside jit, the rows of such numbers are NaN, which :func:`npgp.fit` refuses.
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


class _Statement(Catch):
    """Puts the rows on the message of the statement that it encloses, and keeps the message."""

    def __init__(self, rows):
        super().__init__("param")
        self.rows = rows

    def process_message(self, msg):
        super().process_message(msg)
        if msg["type"] == self.type:
            msg[ROWS] = self.rows


def _check_table(name: str, table: jax.Array, constraint: constraints.Constraint) -> None:
    if not jnp.issubdtype(table.dtype, jnp.floating):
        raise TypeError(f"row_param {name!r} has dtype {table.dtype}; its table must be floating.")
    if not table.ndim or not table.shape[0]:
        raise ValueError(f"row_param {name!r} has shape {table.shape}; its table must have rows, (N, …).")
    within = constraint.event_dim < table.ndim
    if not within or any(jnp.ndim(bound) >= table.ndim for bound in bounds_of(constraint)):
        raise ValueError(
            f"row_param {name!r} of shape {table.shape} has the constraint {constraint}, which is not the same for "
            "each row by itself; constraints of single entries or of a row's own axes are accepted."
        )


def _require_rows(rows: ArrayLike, name: str, size: int) -> None:
    if checks.is_traced(rows):
        see_later(partial(_require_rows, name=name, size=size), rows)
        return
    numbers = np.asarray(rows)
    low, high = np.min(numbers), np.max(numbers)
    if low < 0 or high >= size:
        raise ValueError(f"rows of {name!r} has {low if low < 0 else high}; row numbers must be in 0 to {size - 1}.")


def _take(name: str, table: jax.Array, rows: ArrayLike | None) -> jax.Array:
    if rows is None:
        return table
    _require_rows(rows, name, len(table))
    return table.at[jnp.asarray(rows)].get(mode="fill", wrap_negative_indices=False)


# ---------------------------------------------------------------------------------------------------------------
# Handlers


class FindTables(Handler):
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


class SupplyRows(Handler):
    """
    Answers statements of row tables with the rows they want.

    :param tables: the tables by name, unconstrained.
    :param constrain: from unconstrained to constrained values by name (``svi.constrain_fn``).
    :param offsets: what to add to the unconstrained rows of each statement, by table; statements with the very
        same array of row numbers share one.
    """

    def __init__(self, tables: dict[str, jax.Array], constrain: Callable, offsets: dict[str, list] | None = None):
        super().__init__()
        self.tables, self.constrain, self.offsets = tables, constrain, offsets
        #: Row numbers of the statements, by table; and their shapes, which outlive tracing.
        self.rows: dict[str, list[Any]] = {name: [] for name in tables}
        self.shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in tables}

    def process_message(self, msg):
        name = msg["name"] if msg["type"] == "param" else None
        if name not in self.tables:
            return
        if ROWS not in msg:
            raise ValueError(stated_twice(name))
        rows, known = msg[ROWS], self.rows[name]
        slot = next((i for i, seen in enumerate(known) if seen is rows), len(known))
        if slot == len(known):
            known.append(rows)
            self.shapes[name].append((len(self.tables[name]),) if rows is None else jnp.shape(rows))
        values = _take(name, self.tables[name], rows)
        if self.offsets is not None:
            values = values + self.offsets[name][slot]
        msg["value"], msg[GATHERED] = self.constrain({name: values})[name], True


def stated_twice(name: str) -> str:
    """The error of a table that is stated as a whole too."""
    return (
        f"{name!r} is a row table (npgp.model.row_param), and is stated by numpyro.param as well, which needs all rows "
        "at every step: state it by row_param alone, or train without row_optim."
    )
