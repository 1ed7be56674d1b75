"""Of sites that are near those that are most correlated, by a kernel or by what inducing features leave of it."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from numpy.typing import NDArray

from npgp.chunks import entries_at_once, map_chunks, rows_within
from npgp.kernels import Kernel
from npgp.sparse.projection import as_blocks, factorize

#: Inputs (N, D), and their projections on inducing features, (N, M).
Sites: TypeAlias = tuple[jax.Array, jax.Array]


def with_projections(kernel: Kernel, X: jax.Array, inducing: ArrayLike | None) -> Sites:
    """Inputs with their projections on inducing inputs, on none if there are none."""
    if inducing is None:
        return X, jnp.zeros((len(X), 0), X.dtype)
    return X, jnp.concatenate(jax.jit(lambda kernel, X: factorize(kernel, as_blocks(inducing))(X).A)(kernel, X)).T


def most_correlated(
    kernel: Kernel,
    rows: Sites,
    sites: Sites,
    candidates: NDArray[Any],
    size: int,
    before: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """
    Of each row's candidates those whose values are most correlated with its own given the inducing values, in absolute
    value; most first, (N*, size).

    :param kernel: the kernel.
    :param rows: the rows.
    :param sites: those that the candidates are among.
    :param candidates: numbers of sites, (N*, C).
    :param size: how many are wanted.
    :param before: how many of its candidates a row has, the first ones, (N*,); all if omitted.
    """
    own = np.full(len(candidates), candidates.shape[1]) if before is None else before

    @jax.jit
    def chosen(kernel: Kernel, rows: Sites, sites: Sites, candidates: jax.Array, own: jax.Array) -> jax.Array:
        X, A = sites
        scale = jnp.sqrt(jnp.maximum(kernel.diag(X) - jnp.sum(jnp.square(A), axis=1), jnp.finfo(X.dtype).tiny))

        def choose(x: jax.Array, a: jax.Array, near: jax.Array, own: jax.Array) -> jax.Array:
            c = jax.vmap(lambda x, X: kernel(x[None], X)[0])(x, X[near]) - jnp.einsum("nm,nkm->nk", a, A[near])
            c = jnp.where(jnp.arange(near.shape[1]) < own[:, None], jnp.abs(c) / scale[near], -1.0)
            return jnp.take_along_axis(near, lax.top_k(c, size)[1], axis=1)

        each = candidates.shape[1] * max(X.shape[1], A.shape[1])
        return map_chunks(choose, rows_within(2 * entries_at_once(), each), *rows, candidates, own)

    return np.asarray(chosen(kernel, rows, sites, jnp.asarray(candidates), jnp.asarray(own)))
