"""Numerics that all parts of the library share: the one Cholesky with its jitter policy, and exact products.

Accelerators may multiply float32 matrices in a shorter format by default. A projection ``L⁻¹ K`` loses all of
its digits that way, so matrix products of this library go through :func:`matmul`, which has full precision.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

from npgp import checks
from npgp.batches import one_by_one

#: First jitter tried, relative to the mean of the diagonal.
DEFAULT_JITTER = {"float32": 1e-5, "float64": 1e-8}
#: Each retry multiplies the jitter by this, until :data:`MAX_JITTER` has failed.
JITTER_GROWTH = 10.0
MAX_JITTER = 1e-1
#: Triangular systems are solved by halves, until these have at most so many rows.
SMALLEST_HALF = 32


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Matrix product in the full precision of its inputs, also on an accelerator."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _swap(A: jax.Array) -> jax.Array:
    return jnp.swapaxes(A, -1, -2)


@jax.custom_jvp
def transposed_matmul(A: jax.Array, B: jax.Array) -> jax.Array:
    """``Aᵀ B`` over the last two axes."""
    # Written out, since XLA on a CPU takes twice as long over a product that reads its left factor across.
    return matmul(lax.optimization_barrier(_swap(A)), B)


@transposed_matmul.defjvp
def _(primals, tangents):
    (A, B), (dA, dB) = primals, tangents
    return transposed_matmul(A, B), matmul(_swap(dA), B) + matmul(_swap(A), dB)


def safe_sqrt(x: ArrayLike) -> jax.Array:
    """
    √x, and all but 0, without a slope, where x is all but 0 or less.

    Not by ``where(x > 0, sqrt(where(x > 0, x, 1)), 0)``: XLA may compute x twice, rounded otherwise, and where it finds
    it above 0 once and below 0 once the root is 1.
    """
    x = jnp.asarray(x)
    return jnp.sqrt(jnp.maximum(x, least_square(x.dtype)))


def least_square(dtype) -> float:
    """What :func:`safe_sqrt` takes for 0; its root is far below the resolution of 1."""
    return 1e-30 if jnp.finfo(dtype).bits <= 32 else 1e-60


def weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
    """
    ``Σ_k w_k v_k`` over the first axis, as a product of matrices.

    Not by summing the products: XLA on a CPU gets ``sum(weights[:, None, None] * values, 0)`` wrong by many units in
    float32 where the values are (8, 10, 3277) or more (jaxlib 0.10.2).

    :param weights: shape (K, 1, …).
    :param values: shape (K, …), floating.
    """
    return jnp.tensordot(weights.reshape(-1).astype(values.dtype), values, 1, precision=lax.Precision.HIGHEST)


@jax.custom_jvp
def gram(A: jax.Array) -> jax.Array:
    """``A Aᵀ`` over the last two axes. Its gradient takes one product of that size, not two."""
    return matmul(A, _swap(A))


@gram.defjvp
def _(primals, tangents):
    (A,), (dA,) = primals, tangents
    half = matmul(dA, _swap(A))
    return gram(A), half + _swap(half)


def default_jitter(dtype) -> float:
    """The relative jitter tried first by default, for a floating dtype."""
    return DEFAULT_JITTER[jnp.dtype(dtype).name]


def _mean_diagonal(K: jax.Array) -> jax.Array:
    return jnp.mean(jnp.diagonal(K, axis1=-2, axis2=-1), axis=-1)


def _add_to_diagonal(K: jax.Array, value: jax.Array) -> jax.Array:
    return K + value[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)


#: The factor of matrices (..., M, M), of which the upper triangle is read; NaN where there is none.
#: Of the transpose: LAPACK reads by columns, for which XLA would lay out all that K is made of anew.
_factor = one_by_one(lambda K: lax.linalg.cholesky(_swap(K), symmetrize_input=False))


@jax.custom_jvp
@jax.jit  # run eagerly, it would be compiled anew at every call
def plain_cholesky(K: jax.Array) -> jax.Array:
    """
    Lower Cholesky factor of positive definite matrices (..., M, M), without jitter; the upper triangle is read.

    :return: the factor (..., M, M); its lower triangle is NaN for matrices that are not positive definite.
    """
    return _factor(K)


@plain_cholesky.defjvp
def _(primals, tangents):
    L = plain_cholesky(*primals)
    return L, factor_tangent(L, *tangents)


def factor_tangent(L: jax.Array, dK: jax.Array) -> jax.Array:
    """``dL = L Φ(L⁻¹ dK L⁻ᵀ)``, Φ the lower triangle with its diagonal halved."""
    dK = 0.5 * (dK + _swap(dK))
    inner = solve_lower(L, _swap(solve_lower(L, dK)))
    phi = jnp.tril(inner) - 0.5 * inner * jnp.eye(inner.shape[-1], dtype=inner.dtype)
    across = _swap(lax.optimization_barrier(_swap(L)))  # reverse mode multiplies by the transpose
    return matmul(across, phi)


@jax.custom_jvp
@jax.jit  # run eagerly, the loop would be compiled anew at every call
def _jittered_cholesky(K: jax.Array, scale: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    def attempt(relative):
        return _factor(_add_to_diagonal(K, relative * scale))

    def failed(state):
        relative, L = state
        diagonal = jnp.diagonal(L, axis1=-2, axis2=-1)  # a factor that failed is NaN throughout
        return ~jnp.all(jnp.isfinite(diagonal)) & (relative < 0.99 * MAX_JITTER)

    def retry(state):
        relative = jnp.clip(state[0] * JITTER_GROWTH, default_jitter(K.dtype), MAX_JITTER)  # 0 would stay 0
        return relative, attempt(relative)

    relative, L = lax.while_loop(failed, retry, (first, attempt(first)))
    return L, relative


@_jittered_cholesky.defjvp
def _(primals, tangents):
    L, relative = _jittered_cholesky(*primals)  # the retries are not differentiated
    dL = factor_tangent(L, _add_to_diagonal(tangents[0], relative * tangents[1]))
    return (L, relative), (dL, jnp.zeros_like(relative))


def cholesky(K: jax.Array, jitter: float | None = None, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """
    Lower Cholesky factor of a covariance matrix, and the jitter it took.

    ``K + ε · scale · I`` is factorized with ε starting at ``jitter``; while the factor has NaN, ε is multiplied by
    10 (inside ``jit``), up to 0.1. Gradients are those of the factor at the ε used.

    :param K: symmetric positive semi-definite matrices, shape (..., M, M); the upper triangle is read.
    :param jitter: relative jitter tried first; default by dtype, :data:`DEFAULT_JITTER`.
    :param scale: what the jitter is relative to, shape (...); the mean of K's diagonal if omitted.
    :return: the factor (..., M, M) and the relative jitter ε used, a scalar. If no ε up to 0.1 works the factor
        is NaN, which training loops report.
    """
    jitter = default_jitter(K.dtype) if jitter is None else checks.require_not_negative(jitter, "jitter")
    first = jnp.asarray(jitter, K.dtype)
    if not K.shape[-1]:
        return K, first  # an empty block
    return _jittered_cholesky(K, _mean_diagonal(K) if scale is None else scale, first)


@functools.partial(jax.jit, static_argnames="transpose")  # as one program where it runs eagerly, not some hundred
def solve_lower(L: jax.Array, B: jax.Array, *, transpose: bool = False) -> jax.Array:
    """
    ``L⁻¹ B``, or ``L⁻ᵀ B``, for lower-triangular ``L``, or for the diagonal of a diagonal one, (M,).

    Large systems are solved by halves, forward and reverse, so that nearly all of the work is matrix products, which
    all cores share; LAPACK's triangular solve has one thread on a CPU, and autodiff through it two more such solves.

    :param L: shape (..., M, M).
    :param B: shape (..., M, N); with leading axes of its own before those of L, if any.
    """
    if L.ndim == 1:
        return B / L[:, None]
    if B.ndim > L.ndim:
        return jax.vmap(functools.partial(solve_lower, transpose=transpose), (None, 0))(L, B)
    solve, adjoint = _solve, _solve_transposed
    product = matmul
    if transpose:
        solve, adjoint, product = _solve_transposed, _solve, transposed_matmul
    return lax.custom_linear_solve(
        lambda x: product(jnp.tril(L), x), B, lambda _, b: solve(L, b), lambda _, b: adjoint(L, b)
    )


def _forward(L: jax.Array, B: jax.Array) -> jax.Array:
    """``L⁻¹ B`` by halves."""
    if L.shape[-1] <= SMALLEST_HALF:
        return _solve_small(L, B, 0)
    half = L.shape[-1] // 2
    first = _forward(L[..., :half, :half], B[..., :half, :])
    rest = B[..., half:, :] - matmul(L[..., half:, :half], first)
    return jnp.concatenate([first, _forward(L[..., half:, half:], rest)], axis=-2)


def _backward(L: jax.Array, B: jax.Array) -> jax.Array:
    """``L⁻ᵀ B`` by halves."""
    if L.shape[-1] <= SMALLEST_HALF:
        return _solve_small(L, B, 1)
    half = L.shape[-1] // 2
    last = _backward(L[..., half:, half:], B[..., half:, :])
    rest = B[..., :half, :] - transposed_matmul(L[..., half:, :half], last)
    return jnp.concatenate([_backward(L[..., :half, :half], rest), last], axis=-2)


def _solve_small(L: jax.Array, B: jax.Array, trans: int) -> jax.Array:
    size = L.shape[-1]
    if B.shape[-1] <= size:
        return solve_triangular(L, B, lower=True, trans=trans)
    # Many columns: by the inverse, which is accurate as long as it is small. Of 1000 inputs on a line, far closer than
    # a lengthscale, d_n in float32 is off by 5e-6 on average with blocks of 32 and 5e-5 with blocks of 128, where
    # substitution is off by 9e-7. With the inverse of the whole factor and sorted inputs it is 2e-2.
    identity = jnp.broadcast_to(jnp.eye(size, dtype=L.dtype), L.shape)
    return matmul(solve_triangular(L, identity, lower=True, trans=trans), B)


@functools.partial(one_by_one, by_columns=True)
def _solve(L: jax.Array, B: jax.Array) -> jax.Array:
    return _forward(L, B) if L.shape[-1] > SMALLEST_HALF else solve_triangular(L, B, lower=True)


@functools.partial(one_by_one, by_columns=True)
def _solve_transposed(L: jax.Array, B: jax.Array) -> jax.Array:
    return _backward(L, B) if L.shape[-1] > SMALLEST_HALF else solve_triangular(L, B, lower=True, trans=1)


def block_row(
    cholesky: Sequence[jax.Array], cross: Sequence[Sequence[jax.Array]], column: Sequence[jax.Array], corner: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """
    What another row of blocks adds to a Cholesky factor that is held by blocks.

    The factor's blocks on the diagonal are L_i; those below it, ``L_ij = cross[i][j]ᵀ``.

    :param cholesky: L_i of the blocks so far.
    :param cross: for each of these, its blocks to the left, transposed.
    :param column: the matrix's blocks (M_i, M) above the new corner.
    :param corner: the matrix's new corner, (M, M).
    :return: the new row's blocks, transposed, and the corner's Schur complement, which is to be factorized.
    """
    before = block_solve(cholesky, cross, column)
    for block in before:
        corner = corner - gram(block.T)
    return before, corner


def block_solve(
    cholesky: Sequence[jax.Array], cross: Sequence[Sequence[jax.Array]], B: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """``L⁻¹ B`` for a factor held by blocks (:func:`block_row`) and B of as many blocks (M_i, N), or fewer."""
    solved: list[jax.Array] = []
    for L, before, b in zip(cholesky, cross, B, strict=False):
        for L_ji, s in zip(before, solved, strict=True):
            b = b - transposed_matmul(L_ji, s)
        solved.append(solve_lower(L, b))
    return tuple(solved)


def block_solve_transposed(
    cholesky: Sequence[jax.Array], cross: Sequence[Sequence[jax.Array]], B: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """``L⁻ᵀ B`` for a factor held by blocks (:func:`block_row`) and B of as many blocks (M_i, N)."""
    left = list(B)
    for i in reversed(range(len(left))):
        left[i] = solve_lower(cholesky[i], left[i], transpose=True)
        for j, L_ji in enumerate(cross[i]):
            left[j] = left[j] - matmul(L_ji, left[i])
    return tuple(left)


def inverse_factor(L: jax.Array) -> jax.Array:
    """
    Lower Cholesky factor of ``(L Lᵀ)⁻¹``.

    Factorizing the inverse would square its condition number; reversing the order of rows and columns turns
    the upper factor ``L⁻ᵀ`` into one without. With P the reversal, ``P (L Lᵀ) P = F Fᵀ`` gives
    ``(L Lᵀ)⁻¹ = (P F⁻ᵀ P)(P F⁻ᵀ P)ᵀ``, and ``P F⁻ᵀ P`` is lower triangular.
    """
    A = matmul(L, _swap(L))
    F = plain_cholesky(jnp.flip(A, (-2, -1)))
    identity = jnp.broadcast_to(jnp.eye(L.shape[-1], dtype=L.dtype), L.shape)
    return jnp.flip(_swap(solve_lower(F, identity)), (-2, -1))


def log_determinant(L: jax.Array) -> jax.Array:
    """``log |L Lᵀ|`` from the Cholesky factor."""
    return 2.0 * jnp.sum(jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)), axis=-1)
