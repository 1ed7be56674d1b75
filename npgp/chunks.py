"""
Functions of many rows, evaluated for some of them at a time: memory is that of one chunk.

:func:`map_chunks` is for results that belong to rows. Where a loop also sums over rows, :func:`split` and :func:`join`
are its two ends, around a ``lax.scan``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from npgp.programs.backend import on_cpu

T = TypeVar("T")

#: Predictions take at least so many rows at a time.
FEWEST_ROWS = 256


def entries_at_once() -> int:
    """
    How many entries the arrays of a chunk have that are fast to compute with.

    A CPU's caches hold them: predictions at 10,000 rows from 512 inducing points then take half the time. Elsewhere
    memory is the limit.
    """
    return 2**19 if on_cpu() else 2**26


def rows_within(budget: int, *per_row: int) -> int:
    """
    How many rows a chunk may have, at least one.

    :param budget: entries that the largest arrays of a chunk may have.
    :param per_row: of which each row has the product of these.
    """
    return max(1, budget // max(1, math.prod(per_row)))


def rows_at_once(*per_row: int) -> int:
    """How many rows predictions take at a time; arguments as for :func:`rows_within`."""
    return max(FEWEST_ROWS, rows_within(entries_at_once(), *per_row))


def map_chunks(function: Callable[..., T], size: int, *arrays: Any, axis: int = 0) -> T:
    """
    ``function(*arrays)``, for no more than ``size`` rows at a time. Its gradient computes each chunk again.

    :param function: of arrays of fewer rows, each row's result depending on that row alone.
    :param size: the most rows of a chunk; the chunks are as equal as they can be.
    :param arrays: arrays, or pytrees of them, that all have rows as their first axis.
    :param axis: the axis of rows of the function's results, 0 for the first or −1 for the last.
    :return: a pytree of arrays, with the function's results for all rows.
    """
    rows = num_rows(arrays)
    if rows <= size:
        return function(*arrays)
    results = lax.map(jax.checkpoint(lambda chunk: function(*chunk)), split(arrays, size))
    return join(results, rows, axis)


def split(arrays: T, size: int, *, pad_zeros: bool = False) -> T:
    """
    Arrays by chunks of rows: (rows, …) to (chunks, rows of a chunk, …).

    The last chunk is filled up by repeating the last row; or by zeros, for rows whose weight is among the arrays.

    :param arrays: a pytree of arrays with rows first.
    :param size: the most rows of a chunk.
    :param pad_zeros: whether to fill up by zeros.
    """
    rows = num_rows(arrays)
    chunks = -(-rows // size)
    size = -(-rows // chunks)

    def cut(array: jax.Array) -> jax.Array:
        missing = [(0, chunks * size - rows)] + [(0, 0)] * (array.ndim - 1)
        padded = jnp.pad(array, missing) if pad_zeros else jnp.pad(array, missing, mode="edge")
        return padded.reshape(chunks, size, *array.shape[1:])

    return jax.tree.map(cut, arrays)


def join(results: T, rows: int, axis: int = 0) -> T:
    """
    Results of chunks, as results of all rows.

    :param results: a pytree of arrays with chunks first, and then those of one chunk's result.
    :param rows: the number of rows; what a filled-up chunk has beyond them is dropped.
    :param axis: as for :func:`map_chunks`.
    """

    def glue(array: jax.Array) -> jax.Array:
        if axis == 0:
            return array.reshape(-1, *array.shape[2:])[:rows]
        moved = jnp.moveaxis(array, 0, -2)
        return moved.reshape(*moved.shape[:-2], -1)[..., :rows]

    return jax.tree.map(glue, results)


def num_rows(arrays: Any) -> int:
    """The length of the first axis of the arrays of a pytree."""
    return jax.tree.leaves(arrays)[0].shape[0]
