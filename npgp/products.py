"""
Exact products of matrices, and numerics beside them.

Accelerators may multiply float32 matrices in a shorter format by default. A projection ``L⁻¹ K`` loses all of
its digits that way, so matrix products of this library go through :func:`matmul`, which has full precision.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from npgp.programs.backend import maximum


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Matrix product in the full precision of its inputs, also on an accelerator."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def transposed(A: jax.Array) -> jax.Array:
    """Aᵀ over the last two axes."""
    return jnp.swapaxes(A, -1, -2)


@jax.custom_jvp
def transposed_matmul(A: jax.Array, B: jax.Array) -> jax.Array:
    """``Aᵀ B`` over the last two axes."""
    # Written out, since XLA on a CPU takes twice as long over a product that reads its left factor across.
    return matmul(lax.optimization_barrier(transposed(A)), B)


@transposed_matmul.defjvp
def _(primals, tangents):
    (A, B), (dA, dB) = primals, tangents
    return transposed_matmul(A, B), matmul(transposed(dA), B) + matmul(transposed(A), dB)


@jax.custom_jvp
def gram(A: jax.Array) -> jax.Array:
    """``A Aᵀ`` over the last two axes. Its gradient takes one product of that size, not two."""
    return matmul(A, transposed(A))


@gram.defjvp
def _(primals, tangents):
    (A,), (dA,) = primals, tangents
    half = matmul(dA, transposed(A))
    return gram(A), half + transposed(half)


def gram_of_columns(A: jax.Array, size: int) -> jax.Array:
    """
    ``A_gᵀ A_g`` for each so many columns A_g of a matrix, (M, G size) to (G, size, size).

    The columns are moved in pieces as long as a group, and their gradients too: on a CPU it takes a sixth of the time
    in which XLA turns a matrix around, and two thirds with the product.
    """
    groups = jnp.swapaxes(jnp.reshape(A, (A.shape[0], -1, size)), 0, 1)
    return gram(transposed(lax.optimization_barrier(groups)))


def weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
    """
    ``Σ_k w_k v_k`` over the first axis, as a product of matrices.

    Not by summing the products: XLA on a CPU gets ``sum(weights[:, None, None] * values, 0)`` wrong by many units in
    float32 where the values are (8, 10, 3277) or more (jaxlib 0.10.2).

    :param weights: shape (K, 1, …).
    :param values: shape (K, …), floating.
    """
    return jnp.tensordot(weights.reshape(-1).astype(values.dtype), values, 1, precision=lax.Precision.HIGHEST)


def diagonal(K: jax.Array) -> jax.Array:
    """
    The diagonal of matrices (..., M, M); (..., M).

    Not by ``jnp.diagonal``, which takes entries one by one, and puts its gradient together one by one.
    """
    return jnp.sum(jnp.where(jnp.eye(K.shape[-1], dtype=bool), K, 0.0), axis=-1)


def diagonal_matrix(d: jax.Array) -> jax.Array:
    """
    Matrices (..., M, M) with diagonals (..., M), and zeros beside.

    Not by a product with the identity, whose gradient XLA takes ten times as long to sum on a CPU.
    """
    return jnp.where(jnp.eye(d.shape[-1], dtype=bool), d[..., None, :], 0.0)


def safe_sqrt(x: ArrayLike) -> jax.Array:
    """
    √x, and all but 0, without a slope, where x is all but 0 or less.

    Not by ``where(x > 0, sqrt(where(x > 0, x, 1)), 0)``: XLA may compute x twice, rounded otherwise, and where it finds
    it above 0 once and below 0 once the root is 1.
    """
    x = jnp.asarray(x)
    return jnp.sqrt(maximum(x, least_square(x.dtype)))


def least_square(dtype) -> float:
    """What :func:`safe_sqrt` takes for 0; its root is far below the resolution of 1."""
    return 1e-30 if jnp.finfo(dtype).bits <= 32 else 1e-60
