"""
Numerics that all parts of the library share: the one Cholesky with its jitter policy, and what is made of its factors,
in one piece or by blocks. Exact products (products.py) and triangular systems (triangular.py) have names here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from npgp import checks
from npgp.batches import one_by_one
from npgp.products import (
    diagonal,
    diagonal_matrix,
    gram,
    least_square,
    matmul,
    safe_sqrt,
    transposed,
    transposed_matmul,
    weighted_sum,
)
from npgp.programs.backend import on_cpu
from npgp.triangular import lower_matmul, solve_lower

__all__ = [
    "DEFAULT_JITTER",
    "MAX_JITTER",
    "add_jitter",
    "block_row",
    "block_solve",
    "block_solve_transposed",
    "cholesky",
    "default_jitter",
    "diagonal",
    "diagonal_matrix",
    "factor_tangent",
    "gram",
    "inverse_factor",
    "inverse_of_reversed",
    "jitter_beside_noise",
    "jitter_variance",
    "least_square",
    "log_determinant",
    "lower_half",
    "lower_matmul",
    "matmul",
    "plain_cholesky",
    "safe_sqrt",
    "solve_lower",
    "transposed",
    "transposed_matmul",
    "weighted_sum",
]

#: First jitter tried, relative to each row's variance. In float32 less is no better: with 1e-6, for 100 points of an
#: RBF within some lengthscales, rounding of triangular systems takes 1e-3 from the variances that are left, with 1e-5
#: less than the jitter adds.
DEFAULT_JITTER = {"float32": 1e-5, "float64": 1e-8}
#: Each retry multiplies the jitter by this, until :data:`MAX_JITTER` has failed.
JITTER_GROWTH = 10.0
MAX_JITTER = 1e-1
#: Jitter from this share of the noise variance on is worth a word: intervals are then a twentieth too wide, or more.
JITTER_SHARE = 0.1


def default_jitter(dtype) -> float:
    """The relative jitter tried first by default, for a floating dtype."""
    return DEFAULT_JITTER[jnp.dtype(dtype).name]


def jitter_beside_noise(share: float, dtype) -> str | None:
    """
    A warning of jitter that is not small beside the noise; ``None`` if it is.

    :param share: what was added to a variance, over the noise variance.
    :param dtype: of the covariance.
    """
    if share < JITTER_SHARE:
        return None
    advice = "give a smaller jitter" if jnp.dtype(dtype) == jnp.float64 else "use float64 (jax_enable_x64)"
    return (
        f"the inducing values' covariance took a jitter of {share:.2g} times the noise variance, so bounds are too low "
        f"and intervals too wide; {advice}."
    )


def jitter_variance(relative: jax.Array | float, scale: jax.Array) -> jax.Array:
    """
    Variance that a relative jitter ε adds to each row: ``ε s_m + ε² mean(s)``, (..., M), linear in s. Each row's own
    variance counts, as rows may be of unlike size; the mean, that rows without any have a pivot.

    :param relative: ε.
    :param scale: s, the rows' variances, (..., M).
    """
    return relative * (scale + relative * jnp.mean(scale, axis=-1, keepdims=True))


def add_jitter(K: jax.Array, relative: jax.Array | float, scale: jax.Array) -> jax.Array:
    """K (..., M, M) with :func:`jitter_variance` on its diagonal."""
    added = jitter_variance(relative, scale)
    return K + jnp.where(jnp.eye(K.shape[-1], dtype=bool), added[..., None], 0.0)


#: The factor of matrices (..., M, M), of which the upper triangle is read; NaN where there is none.
#: Of the transpose: LAPACK reads by columns, for which XLA would lay out all that K is made of anew.
_factor = one_by_one(lambda K: lax.linalg.cholesky(transposed(K), symmetrize_input=False))


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


def lower_half(A: jax.Array) -> jax.Array:
    """Φ(A): the lower triangle of A with its diagonal halved."""
    size = A.shape[-1]
    return A * (jnp.tri(size, dtype=A.dtype) - 0.5 * jnp.eye(size, dtype=A.dtype))


def factor_tangent(L: jax.Array, dK: jax.Array) -> jax.Array:
    """``dL = L Φ(L⁻¹ dK L⁻ᵀ)``, Φ as in :func:`lower_half`."""
    dK = 0.5 * (dK + transposed(dK))
    # A loop of two on a CPU, as programs are half as large as with both solves written out; a GPU waits at each turn.
    inner = lax.scan(lambda X, _: (transposed(solve_lower(L, X)), None), dK, length=2, unroll=1 if on_cpu() else 2)[0]
    across = transposed(lax.optimization_barrier(transposed(L)))  # reverse mode multiplies by the transpose
    return lower_matmul(across, lower_half(inner))


@jax.custom_jvp
@jax.jit  # run eagerly, the loop would be compiled anew at every call
def _jittered_cholesky(K: jax.Array, scale: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    def attempt(relative):
        return _factor(add_jitter(K, relative, scale))

    def failed(state):
        relative, L = state
        found = jnp.all(jnp.isfinite(L[..., -1, -1]))  # a factor that failed is NaN throughout
        return ~found & (relative < 0.99 * MAX_JITTER)

    def retry(state):
        relative = jnp.clip(state[0] * JITTER_GROWTH, default_jitter(K.dtype), MAX_JITTER)  # 0 would stay 0
        return relative, attempt(relative)

    relative, L = lax.while_loop(failed, retry, (first, attempt(first)))
    return L, relative


@_jittered_cholesky.defjvp
def _(primals, tangents):
    L, relative = _jittered_cholesky(*primals)  # the retries are not differentiated
    dL = factor_tangent(L, add_jitter(tangents[0], relative, tangents[1]))
    return (L, relative), (dL, jnp.zeros_like(relative))


def cholesky(K: jax.Array, jitter: float | None = None, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """
    Lower Cholesky factor of a covariance matrix, and the jitter it took.

    ``K + diag(ε s + ε² mean(s))`` is factorized, s being the rows' variances and ε at first ``jitter``; while the
    factor has NaN, ε is multiplied by 10 (inside ``jit``), up to 0.1. So rows may be of unlike size. Gradients are
    those of the factor at the ε used.

    :param K: symmetric positive semi-definite matrices, shape (..., M, M); the upper triangle is read.
    :param jitter: relative jitter tried first; default by dtype, :data:`DEFAULT_JITTER`.
    :param scale: s, what the jitter is relative to, shape (..., M); K's diagonal if omitted.
    :return: the factor (..., M, M) and the relative jitter ε used, a scalar. If no ε up to 0.1 works the factor
        is NaN, which training loops report.
    """
    jitter = default_jitter(K.dtype) if jitter is None else checks.require_not_negative(jitter, "jitter")
    first = jnp.asarray(jitter, K.dtype)
    if not K.shape[-1]:
        return K, first  # an empty block
    return _jittered_cholesky(K, diagonal(K) if scale is None else scale, first)


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
    ``(L Lᵀ)⁻¹ = (P F⁻ᵀ P)(P F⁻ᵀ P)ᵀ``, and ``P F⁻ᵀ P`` is lower triangular. Jitter is added where rounding of the
    product leaves it no factor.
    """
    return inverse_of_reversed(cholesky(jnp.flip(matmul(L, transposed(L)), (-2, -1)), jitter=0.0)[0])


def inverse_of_reversed(F: jax.Array) -> jax.Array:
    """Lower Cholesky factor of A⁻¹, ``P F⁻ᵀ P``, from that of ``P A P``, P the reversal: see :func:`inverse_factor`."""
    identity = jnp.broadcast_to(jnp.eye(F.shape[-1], dtype=F.dtype), F.shape)
    return jnp.flip(transposed(solve_lower(F, identity)), (-2, -1))


def log_determinant(L: jax.Array) -> jax.Array:
    """``log |L Lᵀ|`` from the Cholesky factor."""
    return 2.0 * jnp.sum(jnp.log(diagonal(L)), axis=-1)
