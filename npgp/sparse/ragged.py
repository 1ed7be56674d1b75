"""
Rows that are of one function of a plate each: long format, ``f(X)[group, row]``.

Members have as many rows as they have, and nothing is padded to the longest or computed for all members at all rows.
What is done with matrices of a member (its factor of q(ε), its kernel's projector) is done for *parts*: rows in the
order of their members, cut wherever the member changes and after so many rows. N rows of G members make at most
``N / size + G`` parts, whoever they are of, so that the members may be traced.
"""

from __future__ import annotations

import math
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import checks
from npgp.functionals.rows import Rows, apart, some
from npgp.programs.tracing import is_traced
from npgp.sparse.groups import Groups

#: To look up a member's matrix once for a part costs as much as to multiply it by so many of the part's rows.
LOOKUP = 16


def part_size(rows: int, members: int) -> int:
    """
    Rows of a part: with s of them, lookups cost ``(N / s + G)`` times :data:`LOOKUP`, and products ``N + G s`` for the
    places in the last part of each member that may be empty. The sum is least at ``s² = LOOKUP N / G``.
    """
    average = rows / members
    return math.ceil(min(average, math.sqrt(LOOKUP * average)))


class Places:
    """
    N places among the values of G functions at T rows each.

    :param group: the function that each is of, (N,) whole numbers.
    :param row: its row, (N,).
    :param within: (G, T).
    :raises TypeError: unless ``group`` and ``row`` are whole numbers.
    :raises ValueError: for arrays of another number of dimensions, of different lengths or without entries, and for
        functions, or rows, that there are not.
    """

    def __init__(self, group: ArrayLike, row: ArrayLike, within: tuple[int, ...]):
        functions, rows = within
        group = checks.row_numbers(group, "group", functions, what="function")
        row = checks.row_numbers(row, "row", rows)
        if group.shape != row.shape or not group.size:
            raise ValueError(
                f"group has shape {group.shape} and row {row.shape}: both are to have the same length, one entry for "
                "each value, and at least one."
            )
        self._given = group  # an array of NumPy, if it was one: JAX's are traced inside programs
        self.group, self.row = jnp.asarray(group), jnp.asarray(row)
        #: G.
        self.functions = functions

    def of(self, values: jax.Array) -> jax.Array:
        """What broadcasts with all values, (G, T): the share of each place, (N,) or ()."""
        if not values.ndim:
            return values
        # An axis of 1 is everybody's.
        own = (self.group, self.row)[-values.ndim :]
        index = tuple(i if length > 1 else 0 for i, length in zip(own, values.shape, strict=True))
        return jnp.broadcast_to(values[index], self.group.shape)

    def same_functions(self, other: Places) -> bool:
        """Whether others are of the same functions, one by one, as far as can be seen."""
        both = self._given, other._given
        return both[0] is both[1] or (not any(map(is_traced, both)) and np.array_equal(*both))

    def with_rows_in_order(self) -> Places:
        """Places of the same functions at rows 0, 1, …"""
        N = self.group.size
        return Places(self._given, np.arange(N), within=(self.functions, N))

    @property
    def parts(self) -> Groups:
        """The places by parts, each of one function."""
        return self._partition[0]

    @property
    def members(self) -> jax.Array:
        """The function of each part."""
        return self._partition[1]

    @cached_property
    def _partition(self) -> tuple[Groups, jax.Array]:
        N, G = self.group.size, self.functions
        size = part_size(N, G)
        order = jnp.argsort(self.group, stable=True)
        sizes = jnp.zeros(G, jnp.int32).at[self.group].add(1)
        before, parts = jnp.cumsum(sizes) - sizes, -(-sizes // size)
        of = self.group[order]
        rank = jnp.arange(N) - before[of]  # among those of the function
        part = (jnp.cumsum(parts) - parts)[of] + rank // size
        place = part * size + rank % size
        shape = min(N, N // size + G), size
        # Parts that are not needed are the last ones; nothing is wanted of them, and they repeat the first place.
        mask = jnp.zeros(shape, bool).ravel().at[place].set(True).reshape(shape)
        rows = jnp.zeros(shape, jnp.int32).ravel().at[place].set(order.astype(jnp.int32)).reshape(shape)
        rows = jnp.where(mask, rows, rows[:, :1])
        inverse = jnp.zeros(N, jnp.int32).at[order].set(place.astype(jnp.int32))
        return Groups(rows, mask, inverse, N), self.group[rows[:, 0]]


class MemberRows:
    """
    Rows of inputs, or functionals, each for one of the functions of a plate.

    :param X: inputs, (T, D), or (G, T, D) of functions with inputs each; or T functionals.
    :param places: which function, and which row of X.
    """

    def __init__(self, X: Rows, places: Places):
        self.X, self.places = X, places

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, D)."""
        return (*self.places.group.shape, self.X.shape[-1])

    @cached_property
    def inputs(self) -> Rows:
        """Each row's inputs, (N, D), or functionals, whose arrays all have N rows."""
        places = self.places
        return some(apart(self.X), places.row if self.X.ndim == 2 else (places.group, places.row))
