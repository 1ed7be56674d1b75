"""Numerics that all parts of the library share: the one Cholesky with its jitter policy, and exact products.

Accelerators may multiply float32 matrices in a shorter format by default. A projection ``L⁻¹ K`` loses all of
its digits that way, so matrix products of this library go through :func:`matmul`, which has full precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

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
#: Triangular systems are solved by halves, down to blocks of the diagonal of at most so many rows.
LARGEST_BLOCK = 64
#: Halves of equal size are solved in a loop in systems of at least so many rows: what solves a half is in the
#: program once then. Programs of 512 inducing points are a tenth smaller, and no slower.
LOOPED = 512
#: Systems of at most so many rows are solved by substitution.
SUBSTITUTED = 32


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


def lower_matmul(L: jax.Array, B: jax.Array, *, transpose: bool = False) -> jax.Array:
    """
    ``L B``, or ``Lᵀ B``, over the last two axes, for a lower-triangular L.

    Of a large L one quarter is known to be zero, and left out, in derivatives too. A batch of transposes times one
    matrix is one product for them all.
    """
    size = L.shape[-1]
    together = transpose and L.ndim > B.ndim == 2
    product = _transposes_matmul if together else transposed_matmul if transpose else matmul
    if size < (SUBSTITUTED if together else 2 * LARGEST_BLOCK):
        return product(L, B)
    half = size // 2
    if transpose:
        parts = [product(L[..., :half], B), product(L[..., half:, half:], B[..., half:, :])]
    else:
        parts = [product(L[..., :half, :half], B[..., :half, :]), product(L[..., half:, :], B)]
    return jnp.concatenate(parts, axis=-2)


def _transposes_matmul(A: jax.Array, B: jax.Array) -> jax.Array:
    """``Aᵀ B`` for matrices A (..., M, K), side by side, and one matrix B (M, N); (..., K, N)."""
    side_by_side = jnp.moveaxis(A, -2, 0).reshape(A.shape[-2], -1)
    return transposed_matmul(side_by_side, B).reshape(*A.shape[:-2], A.shape[-1], B.shape[-1])


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


def _mean_diagonal(K: jax.Array) -> jax.Array:
    return jnp.mean(diagonal(K), axis=-1)


def _add_to_diagonal(K: jax.Array, value: jax.Array) -> jax.Array:
    return K + jnp.where(jnp.eye(K.shape[-1], dtype=bool), value[..., None, None], 0.0)


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


def lower_half(A: jax.Array) -> jax.Array:
    """Φ(A): the lower triangle of A with its diagonal halved."""
    size = A.shape[-1]
    return A * (jnp.tri(size, dtype=A.dtype) - 0.5 * jnp.eye(size, dtype=A.dtype))


def factor_tangent(L: jax.Array, dK: jax.Array) -> jax.Array:
    """``dL = L Φ(L⁻¹ dK L⁻ᵀ)``, Φ as in :func:`lower_half`."""
    dK = 0.5 * (dK + _swap(dK))
    # A loop of two, as programs are half as large as with both solves written out.
    inner = lax.scan(lambda X, _: (_swap(solve_lower(L, X)), None), dK, length=2)[0]
    across = _swap(lax.optimization_barrier(_swap(L)))  # reverse mode multiplies by the transpose
    return lower_matmul(across, lower_half(inner))


@jax.custom_jvp
@jax.jit  # run eagerly, the loop would be compiled anew at every call
def _jittered_cholesky(K: jax.Array, scale: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    def attempt(relative):
        return _factor(_add_to_diagonal(K, relative * scale))

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

    Systems of many columns are solved by halves, forward and reverse, down to blocks of the diagonal whose inverses
    are at hand, so that nearly all of the work is matrix products, which all cores share; LAPACK's triangular solve has
    one thread on a CPU, and autodiff through it two more such solves.

    :param L: shape (..., M, M).
    :param B: shape (..., M, N); with leading axes of its own before those of L, if any.
    """
    if L.ndim == 1:
        return B / L[:, None]
    if not L.shape[-1]:
        return B  # an empty block
    if B.ndim > L.ndim:
        return jax.vmap(functools.partial(solve_lower, transpose=transpose), (None, 0))(L, B)
    solve, adjoint = _solvers(lax.stop_gradient(L), B.shape[-1])
    if transpose:
        solve, adjoint = adjoint, solve
    product = functools.partial(lower_matmul, jnp.tril(L), transpose=transpose)
    return lax.custom_linear_solve(product, B, lambda _, b: solve(b), lambda _, b: adjoint(b))


def _solvers(L: jax.Array, columns: int) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """``B → L⁻¹ B`` and ``B → L⁻ᵀ B`` for B of so many columns, which share the inverses of blocks of the diagonal."""
    size = L.shape[-1]
    if size <= SUBSTITUTED or (size <= LARGEST_BLOCK and columns <= size):  # as fast, and more accurate
        return functools.partial(_substitute, L), functools.partial(_substitute_transposed, L)
    W = _inverse_blocks(L)
    return functools.partial(_solve, L, W), functools.partial(_solve_transposed, L, W)


@functools.partial(one_by_one, by_columns=True)
def _substitute(L: jax.Array, B: jax.Array) -> jax.Array:
    return solve_triangular(L, B, lower=True)


@functools.partial(one_by_one, by_columns=True)
def _substitute_transposed(L: jax.Array, B: jax.Array) -> jax.Array:
    return solve_triangular(L, B, lower=True, trans=1)


def _inverse_blocks(L: jax.Array) -> jax.Array:
    """
    The inverses of L's blocks on the diagonal, one below the other: (..., K b, b) for (..., M, M), K b ≥ M. What the
    last one lacks is filled up with an identity.

    Blocks have at most :data:`LARGEST_BLOCK` rows, since a product with an inverse is accurate as long as that is
    small. Of 512 inputs on a line, far closer than a lengthscale, d_n in float32 is off by 6e-6 on average with blocks
    of 64, by 1e-4 with blocks of 128, and by 1e-3 with the inverse of the whole factor; and by 1e-5 for the jitter.
    """
    size = L.shape[-1]
    count = -(-size // LARGEST_BLOCK)
    b = -(-size // count)
    more = count * b - size
    padded = jnp.pad(L, [(0, 0)] * (L.ndim - 2) + [(0, more)] * 2)
    if more:
        padded = padded + jnp.diag(jnp.arange(count * b) >= size).astype(L.dtype)
    blocks = padded.reshape(*L.shape[:-2], count, b, count, b)
    # A masked sum: XLA takes the diagonal of blocks apart one by one.
    blocks = jnp.sum(blocks * jnp.eye(count, dtype=L.dtype)[:, None, :, None], axis=-2)
    return _inverse(blocks).reshape(*L.shape[:-2], count * b, b)


@one_by_one
def _inverse(L: jax.Array) -> jax.Array:
    return solve_triangular(L, jnp.broadcast_to(jnp.eye(L.shape[-1], dtype=L.dtype), L.shape), lower=True)


@functools.partial(one_by_one, by_columns=True)
def _solve(L: jax.Array, W: jax.Array, B: jax.Array) -> jax.Array:
    """``L⁻¹ B`` by halves."""
    size, block = L.shape[-1], W.shape[-1]
    if size <= block:
        return matmul(W[..., :size, :size], B)
    half = _half(size, block)
    if 2 * half == size >= LOOPED:
        return _in_turn(_solve, L, W, B, L[..., half:, :half])
    top = _solve(L[..., :half, :half], W[..., :half, :], B[..., :half, :])
    rest = B[..., half:, :] - matmul(L[..., half:, :half], top)
    return jnp.concatenate([top, _solve(L[..., half:, half:], W[..., half:, :], rest)], axis=-2)


@functools.partial(one_by_one, by_columns=True)
def _solve_transposed(L: jax.Array, W: jax.Array, B: jax.Array) -> jax.Array:
    """``L⁻ᵀ B`` by halves."""
    # Written out, since XLA on a CPU takes twice as long over a product that reads its left factor across.
    LT, WT = lax.optimization_barrier((_swap(L), _swap(W)))
    return _solve_upper(LT, WT, B)


def _solve_upper(U: jax.Array, W: jax.Array, B: jax.Array) -> jax.Array:
    """``U⁻¹ B`` by halves, W the inverses of U's blocks side by side."""
    size, block = U.shape[-1], W.shape[-2]
    if size <= block:
        return matmul(W[..., :size, :size], B)
    half = _half(size, block)
    if 2 * half == size >= LOOPED:
        return _in_turn(_solve_upper, U, W, B, U[..., :half, half:], upward=True)
    low = _solve_upper(U[..., half:, half:], W[..., :, half:], B[..., half:, :])
    rest = B[..., :half, :] - matmul(U[..., :half, half:], low)
    return jnp.concatenate([_solve_upper(U[..., :half, :half], W[..., :, :half], rest), low], axis=-2)


def _in_turn(
    solve: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    T: jax.Array,
    W: jax.Array,
    B: jax.Array,
    between: jax.Array,
    upward: bool = False,
) -> jax.Array:
    """
    Both halves of a large system in a loop, so that the program has what solves one of them once.

    :param solve: solves a half, given its part of T, W and the right side.
    :param between: T's block that takes the half solved first to the other one's right side.
    :param upward: the second half is solved first.
    """
    half = T.shape[-1] // 2

    def parts(x: jax.Array, axis: int) -> jax.Array:
        return jnp.stack(jnp.split(x, 2, axis))

    diagonal = jnp.stack([T[..., :half, :half], T[..., half:, half:]])

    def step(before: jax.Array, one: tuple[jax.Array, ...]):
        first, T, W, B = one
        rest = lax.cond(first, lambda: B, lambda: B - matmul(between, before))
        solved = solve(T, W, rest)
        return solved, solved

    first = jnp.array([False, True]) if upward else jnp.array([True, False])
    given = first, diagonal, parts(W, -1 if upward else -2), parts(B, -2)
    solved = lax.scan(step, jnp.zeros_like(given[-1][0]), given, reverse=upward)[1]
    return jnp.concatenate([solved[0], solved[1]], axis=-2)


def _half(size: int, block: int) -> int:
    """Where a system of so many rows is halved: between blocks of so many."""
    return -(-size // block) // 2 * block


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
    return inverse_of_reversed(plain_cholesky(jnp.flip(matmul(L, _swap(L)), (-2, -1))))


def inverse_of_reversed(F: jax.Array) -> jax.Array:
    """Lower Cholesky factor of A⁻¹, ``P F⁻ᵀ P``, from that of ``P A P``, P the reversal: see :func:`inverse_factor`."""
    identity = jnp.broadcast_to(jnp.eye(F.shape[-1], dtype=F.dtype), F.shape)
    return jnp.flip(_swap(solve_lower(F, identity)), (-2, -1))


def log_determinant(L: jax.Array) -> jax.Array:
    """``log |L Lᵀ|`` from the Cholesky factor."""
    return 2.0 * jnp.sum(jnp.log(diagonal(L)), axis=-1)
