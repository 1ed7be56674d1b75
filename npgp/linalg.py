"""Numerics that every other room relies on: the one Cholesky with its jitter policy, and exact products.

Accelerators may multiply float32 matrices in a shorter format by default. A projection ``L⁻¹ K`` loses all of
its digits that way, so matrix products of this library go through :func:`matmul`, which asks for full precision.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

#: First jitter tried, relative to the mean of the diagonal.
DEFAULT_JITTER = {"float32": 1e-5, "float64": 1e-8}
#: Each retry multiplies the jitter by this, until :data:`MAX_JITTER` has failed.
JITTER_GROWTH = 10.0
MAX_JITTER = 1e-1


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Matrix product in the full precision of its inputs, also on an accelerator."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


@jax.custom_jvp
def gram(A: jax.Array) -> jax.Array:
    """``A Aᵀ`` over the last two axes. Its gradient takes one product of that size, not two."""
    return matmul(A, jnp.swapaxes(A, -1, -2))


@gram.defjvp
def _(primals, tangents):
    (A,), (dA,) = primals, tangents
    half = matmul(dA, jnp.swapaxes(A, -1, -2))
    return gram(A), half + jnp.swapaxes(half, -1, -2)


def default_jitter(dtype) -> float:
    """The relative jitter used when none is given, for a floating dtype."""
    return DEFAULT_JITTER[jnp.dtype(dtype).name]


def _mean_diagonal(K: jax.Array) -> jax.Array:
    return jnp.mean(jnp.diagonal(K, axis1=-2, axis2=-1), axis=-1)


def _add_to_diagonal(K: jax.Array, value: jax.Array) -> jax.Array:
    return K + value[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)


@jax.custom_jvp
@jax.jit  # run eagerly, the loop would be compiled anew at every call
def _jittered_cholesky(K: jax.Array, scale: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    def attempt(relative):
        return lax.linalg.cholesky(_add_to_diagonal(K, relative * scale), symmetrize_input=False)

    def failed(state):
        relative, L = state
        return ~jnp.all(jnp.isfinite(L)) & (relative < 0.99 * MAX_JITTER)

    def retry(state):
        relative = jnp.clip(state[0] * JITTER_GROWTH, default_jitter(K.dtype), MAX_JITTER)  # 0 would stay 0
        return relative, attempt(relative)

    relative, L = lax.while_loop(failed, retry, (first, attempt(first)))
    return L, relative


@_jittered_cholesky.defjvp
def _(primals, tangents):
    # dL = L Φ(L⁻¹ dK L⁻ᵀ), Φ the lower triangle with its diagonal halved; the retries are not differentiated.
    K, scale, first = primals
    L, relative = _jittered_cholesky(K, scale, first)
    dK = _add_to_diagonal(tangents[0], relative * tangents[1])
    dK = 0.5 * (dK + jnp.swapaxes(dK, -1, -2))
    inner = solve_triangular(L, dK, lower=True)
    inner = solve_triangular(L, jnp.swapaxes(inner, -1, -2), lower=True)
    phi = jnp.tril(inner) - 0.5 * inner * jnp.eye(inner.shape[-1], dtype=inner.dtype)
    return (L, relative), (matmul(L, phi), jnp.zeros_like(relative))


def cholesky(K: jax.Array, jitter: float | None = None, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """
    Lower Cholesky factor of a covariance matrix, and the jitter it took.

    ``K + ε · scale · I`` is factorised with ε starting at ``jitter``; while the factor has NaN, ε is multiplied by
    10 (inside ``jit``), up to 0.1. Gradients are those of the factor at the ε used.

    :param K: symmetric positive semi-definite matrices, shape (..., M, M); the lower triangle is read.
    :param jitter: relative jitter tried first; default by dtype, :data:`DEFAULT_JITTER`.
    :param scale: what the jitter is relative to, shape (...); the mean of K's diagonal if omitted.
    :return: the factor (..., M, M) and the relative jitter ε used, a scalar. If no ε up to 0.1 works the factor
        is NaN, which training loops report.
    """
    first = jnp.asarray(default_jitter(K.dtype) if jitter is None else jitter, K.dtype)
    if not K.shape[-1]:
        return K, first  # an empty block
    return _jittered_cholesky(K, _mean_diagonal(K) if scale is None else scale, first)


def solve_lower(L: jax.Array, B: jax.Array, *, transpose: bool = False) -> jax.Array:
    """``L⁻¹ B``, or ``L⁻ᵀ B``, for lower-triangular ``L``, or for the diagonal of a diagonal one, (M,)."""
    if L.ndim == 1:
        return B / L[:, None]
    return solve_triangular(L, B, lower=True, trans=1 if transpose else 0)


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
    :return: the new row's blocks, transposed, and the corner's Schur complement, which is to be factorised.
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
            b = b - matmul(L_ji.T, s)
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

    Factorising the inverse would square its condition number; reversing the order of rows and columns turns
    the upper factor ``L⁻ᵀ`` into one without. With P the reversal, ``P (L Lᵀ) P = F Fᵀ`` gives
    ``(L Lᵀ)⁻¹ = (P F⁻ᵀ P)(P F⁻ᵀ P)ᵀ``, and ``P F⁻ᵀ P`` is lower triangular.
    """
    A = matmul(L, jnp.swapaxes(L, -1, -2))
    F = lax.linalg.cholesky(jnp.flip(A, (-2, -1)))
    identity = jnp.broadcast_to(jnp.eye(L.shape[-1], dtype=L.dtype), L.shape)
    return jnp.flip(jnp.swapaxes(solve_lower(F, identity), -1, -2), (-2, -1))


def log_determinant(L: jax.Array) -> jax.Array:
    """``log |L Lᵀ|`` from the Cholesky factor."""
    return 2.0 * jnp.sum(jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)), axis=-1)


def inputs(x: ArrayLike, name: str = "X", allow_empty: bool = False) -> jax.Array:
    """
    Check an input array: floating, shape (N, D), at least one row and one column, finite where that can be seen.

    :param x: inputs of shape (N, D); a vector (N,) is refused rather than guessed at.
    :param name: what the error calls the array.
    :param allow_empty: accept arrays without rows.
    :raises TypeError: if the array is not floating.
    :raises ValueError: if its shape is wrong, it has no rows, or (when concrete) has NaN or infinities.
    """
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {dtype}; GP inputs must be floating point, as {name}.astype(float).")
    if np.ndim(x) != 2:
        hint = f"; a single input column is {name}[:, None]" if np.ndim(x) == 1 else ""
        raise ValueError(f"{name} has shape {np.shape(x)}; inputs are (rows, input dimensions){hint}.")
    if 0 in np.shape(x)[allow_empty:]:
        raise ValueError(f"{name} has shape {np.shape(x)}; it needs at least one row and one column.")
    require_finite(x, name)
    return jnp.asarray(x)


def require_finite(x: ArrayLike, name: str) -> None:
    """Raise ``ValueError`` if a concrete array has NaN or infinities; traced arrays pass."""
    if not is_traced(x) and not np.all(np.isfinite(np.asarray(x))):
        raise ValueError(f"{name} has NaN or infinite entries; remove these rows or, for observations, mask them.")


def positive_int(value: int, name: str) -> int:
    """A count as an ``int``; ``TypeError`` unless it is a whole number, ``ValueError`` below 1."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be a whole number.") from None
    if number < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1.")
    return number


def require_per_row(value: ArrayLike, name: str, rows: int) -> None:
    """Raise ``ValueError`` unless a value is a scalar or has one entry for each row."""
    if jnp.shape(value) not in ((), (rows,)):
        raise ValueError(f"{name} has shape {jnp.shape(value)}; it must be a scalar or ({rows},), one per row.")


def require_positive(value: object, name: str) -> None:
    """Raise ``ValueError`` if a concrete hyperparameter is not positive and finite; traced ones pass."""
    if isinstance(value, (int, float, np.ndarray, np.generic)) or (
        isinstance(value, jax.Array) and not is_traced(value)
    ):
        array = np.asarray(value)
        if not (np.all(array > 0) and np.all(np.isfinite(array))):
            raise ValueError(f"{name} is {value}; it must be positive and finite.")


def is_traced(x: object) -> bool:
    """Whether an array's values cannot be seen yet (it is traced by ``jit``, ``vmap`` or ``grad``)."""
    return isinstance(x, jax.core.Tracer)
