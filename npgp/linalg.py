"""
Numerics that all parts of the library share: single calls of LAPACK in batches, exact products, triangular systems,
and the one Cholesky with its jitter policy, and what is made of its factors, in one piece or by blocks.

Accelerators may multiply float32 matrices in a shorter format by default. A projection ``L⁻¹ K`` loses all of
its digits that way, so matrix products of this library go through :func:`matmul`, which has full precision.

LAPACK's batched calls in jaxlib 0.10 share out their work among the threads that run the program, and wait for these.
Where as many of them run side by side as there are threads, each waits for the others for ever. A call for one matrix
does its work where it is and waits for nobody. A loop of them takes the time of the batched call on one thread, and
programs nearly as small; algorithms by matrix products that take all of a batch at once took one and a half to four
times as long, for matrices of 11 to 200 rows (``scripts/benchmarks/results/batches.md``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

from npgp import checks
from npgp.programs.backend import maximum, on_cpu


def one_by_one(function: Callable[..., jax.Array], *, by_columns: bool = False) -> Callable[..., jax.Array]:
    """
    A function of matrices for arrays of shape (..., rows, columns) with the same leading axes, under ``vmap`` too: one
    matrix after the other on a CPU, all at once elsewhere.

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


# ---------------------------------------------------------------------------------------------------------------
# Exact products, and numerics beside them


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
    # The root of what counts as 0 is far below the resolution of 1.
    return jnp.sqrt(maximum(x, 1e-30 if jnp.finfo(x.dtype).bits <= 32 else 1e-60))


# ---------------------------------------------------------------------------------------------------------------
# Triangular matrices: products, and systems, which are solved by products where that is quicker

#: Triangular systems are solved by halves, down to blocks of the diagonal of at most so many rows.
LARGEST_BLOCK = 64
#: On a CPU, halves of equal size are solved in a loop in systems of at least so many rows: what solves a half is in the
#: program once then. Programs of 512 inducing points are a tenth smaller, and no slower. A GPU waits at each turn of a
#: loop, as long as for a product of small matrices.
LOOPED = 512
#: Systems of at most so many rows, and on a CPU those of so few columns, are solved by substitution.
SUBSTITUTED = 32


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


@functools.partial(jax.jit, static_argnames="transpose")  # as one program where it runs eagerly, not some hundred
def solve_lower(L: jax.Array, B: jax.Array, *, transpose: bool = False) -> jax.Array:
    """
    ``L⁻¹ B``, or ``L⁻ᵀ B``, for lower-triangular ``L``, or for the diagonal of a diagonal one, (M,).

    Systems of many columns are solved by halves, forward and reverse, down to blocks of the diagonal whose inverses
    are at hand, so that nearly all of the work is matrix products, which all cores share; LAPACK's triangular solve has
    one thread on a CPU, and autodiff through it two more such solves. It is quicker, on a CPU, for few columns.

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
    if columns <= SUBSTITUTED:
        return functools.partial(_solve_few, L), functools.partial(_solve_few_transposed, L)
    return _halved(L)


def _halved(L: jax.Array) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """
    Both solves by halves.

    A GPU takes as long to begin a small product as to do it. With D the blocks of the diagonal and ``L = D (I − N)``,
    the products with their inverses are one, of batches, and the halves of ``I − N`` have nothing to solve at the end:
    of 1024 rows half as many products. (A step on an H200 takes 1.53 ms for 1.78; solves on a CPU 1.06 to 1.45 times as
    long, of 1024 and 128 rows.)
    """
    W = _inverse_blocks(L)
    if on_cpu():
        return functools.partial(_solve, -L, W), functools.partial(_solve_transposed, -L, W)
    block = jnp.arange(L.shape[-1]) // W.shape[-1]
    N = _by_blocks(W, jnp.where(block[:, None] > block, -L, 0.0))
    return functools.partial(_solve_unit, N, W), functools.partial(_solve_unit_transposed, N, W)


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
def _solve(N: jax.Array, W: jax.Array, B: jax.Array) -> jax.Array:
    """``L⁻¹ B``, N being −L, of which blocks of the diagonal are not looked at."""
    return _by_halves(N, W, B, W.shape[-1])


@functools.partial(one_by_one, by_columns=True)
def _solve_transposed(N: jax.Array, W: jax.Array, B: jax.Array) -> jax.Array:
    """``L⁻ᵀ B``, N being −L."""
    # Written out, since XLA on a CPU takes twice as long over a product that reads its left factor across.
    NT, WT = lax.optimization_barrier((transposed(N), _transposed_blocks(W)))
    return _by_halves(NT, WT, B, W.shape[-1], upward=True)


@functools.partial(one_by_one, by_columns=True)
def _solve_unit(N: jax.Array, W: jax.Array, B: jax.Array) -> jax.Array:
    """``(I − N)⁻¹ D⁻¹ B``, W being the blocks of D⁻¹."""
    return _by_halves(N, None, _by_blocks(W, B), W.shape[-1])


@functools.partial(one_by_one, by_columns=True)
def _solve_unit_transposed(N: jax.Array, W: jax.Array, B: jax.Array) -> jax.Array:
    """``D⁻ᵀ (I − N)⁻ᵀ B``."""
    return _by_blocks(_transposed_blocks(W), _by_halves(transposed(N), None, B, W.shape[-1], upward=True))


def _by_blocks(W: jax.Array, B: jax.Array) -> jax.Array:
    """Each block of W, (..., K b, b), times its rows of B."""
    (*batch, rows, b), size = W.shape, B.shape[-2]
    padded = jnp.pad(B, [(0, 0)] * (B.ndim - 2) + [(0, rows - size), (0, 0)])
    product = matmul(W.reshape(*batch, -1, b, b), padded.reshape(*batch, -1, b, B.shape[-1]))
    return product.reshape(*batch, rows, -1)[..., :size, :]


def _transposed_blocks(W: jax.Array) -> jax.Array:
    """The transposes of W's blocks, one below the other as they are."""
    return transposed(W.reshape(*W.shape[:-2], -1, W.shape[-1], W.shape[-1])).reshape(W.shape)


def _by_halves(N: jax.Array, W: jax.Array | None, B: jax.Array, block: int, upward: bool = False) -> jax.Array:
    """
    ``T⁻¹ B`` for triangular T.

    :param N: −T, of which blocks of the diagonal, of so many rows, are not looked at.
    :param W: their inverses, one below the other; ``None`` where they are identities.
    :param upward: T is upper triangular.
    """
    size = N.shape[-1]
    if size <= block:
        return B if W is None else matmul(W[..., :size, :size], B)
    half = -(-size // block) // 2 * block
    if W is not None and 2 * half == size >= LOOPED and on_cpu():
        return _in_turn(N, W, B, block, upward)
    low, high = slice(half), slice(half, None)
    first, second = (high, low) if upward else (low, high)

    def solved(part: slice, B: jax.Array) -> jax.Array:
        return _by_halves(N[..., part, part], None if W is None else W[..., part, :], B, block, upward)

    begun = solved(first, B[..., first, :])
    ended = solved(second, B[..., second, :] + matmul(N[..., second, first], begun))
    return jnp.concatenate([ended, begun] if upward else [begun, ended], axis=-2)


def _in_turn(N: jax.Array, W: jax.Array, B: jax.Array, block: int, upward: bool) -> jax.Array:
    """Both halves of a large system in a loop, so that the program has what solves one of them once."""
    half = N.shape[-1] // 2
    between = N[..., :half, half:] if upward else N[..., half:, :half]

    def halves(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:-2], 2, half, x.shape[-1]), -3, 0)

    def step(before: jax.Array, one: tuple[jax.Array, ...]):
        first, N, W, B = one
        rest = lax.cond(first, lambda: B, lambda: B + matmul(between, before))
        solved = _by_halves(N, W, rest, block, upward)
        return solved, solved

    first = jnp.array([False, True]) if upward else jnp.array([True, False])
    given = first, jnp.stack([N[..., :half, :half], N[..., half:, half:]]), halves(W), halves(B)
    solved = lax.scan(step, jnp.zeros_like(given[-1][0]), given, reverse=upward)[1]
    return jnp.moveaxis(solved, 0, -3).reshape(B.shape)


def _few(transpose: bool, L: jax.Array, B: jax.Array) -> jax.Array:
    """
    By substitution on a CPU, unless ``vmap`` has made the columns many: for a column and 512 rows in a quarter to half
    of the time by halves, for 2048 rows in a seventh to a quarter.
    """

    def halved(L, B):
        return _halved(L)[transpose](B)

    if B.shape[-1] > SUBSTITUTED:
        return halved(L, B)
    return lax.platform_dependent(L, B, cpu=_substitute_transposed if transpose else _substitute, default=halved)


_solve_few = one_by_one(functools.partial(_few, False), by_columns=True)
_solve_few_transposed = one_by_one(functools.partial(_few, True), by_columns=True)


# ---------------------------------------------------------------------------------------------------------------
# Cholesky factors, and their jitter

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
