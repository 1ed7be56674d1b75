"""
Functions of single matrices for batches of them: one matrix after the other on a CPU, all at once elsewhere.

LAPACK's batched calls in jaxlib 0.10 share out their work among the threads that run the program, and wait for these.
Where as many of them run side by side as there are threads, each waits for the others for ever. A call for one matrix
does its work where it is and waits for nobody. A loop of them takes the time of the batched call on one thread, and
programs nearly as small; algorithms by matrix products that take all of a batch at once took one and a half to four
times as long, for matrices of 11 to 200 rows (``scripts/benchmarks/results/batches.md``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap


def one_by_one(function: Callable[..., jax.Array], *, by_columns: bool = False) -> Callable[..., jax.Array]:
    """
    A function of matrices for arrays of shape (..., rows, columns) with the same leading axes, under ``vmap`` too.

    It has no derivatives: its callers have their own.

    :param function: of matrices, or of batches of them with one leading axis; its value is one.
    :param by_columns: whether it treats each column of its last argument alike, by its first. Then what ``vmap`` maps
        in the last alone becomes more columns.
    """

    @custom_vmap
    @functools.wraps(function)
    def mapped(*arrays: jax.Array) -> jax.Array:
        batch = arrays[0].shape[:-2]
        if not batch:
            return function(*arrays)
        flat = [a.reshape(math.prod(batch), *a.shape[-2:]) for a in arrays]
        result = lax.platform_dependent(
            *flat, cpu=lambda *matrices: lax.map(lambda each: function(*each), matrices), default=function
        )
        return result.reshape(*batch, *result.shape[-2:])

    @mapped.def_vmap
    def _(size, is_mapped, *arrays):
        if by_columns and not any(is_mapped[:-1]):
            *rest, B = arrays
            columns = jnp.moveaxis(B, 0, -2)  # (..., rows, size, columns)
            result = mapped(*rest, columns.reshape(*columns.shape[:-2], -1))
            return jnp.moveaxis(result.reshape(*result.shape[:-1], *columns.shape[-2:]), -2, 0), True
        full = [a if m else jnp.broadcast_to(a, (size, *a.shape)) for a, m in zip(arrays, is_mapped, strict=True)]
        return mapped(*full), True

    return mapped
