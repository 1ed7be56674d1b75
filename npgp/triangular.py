"""Triangular matrices: products with them, and systems, which are solved by products where that is quicker."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from npgp.batches import one_by_one
from npgp.products import matmul, transposed, transposed_matmul
from npgp.programs.backend import on_cpu

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
    half = _half(size, block)
    if W is not None and _is_looped(size, half):
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


def _is_looped(size: int, half: int) -> bool:
    """Whether both halves of a system are solved in a loop."""
    return 2 * half == size >= LOOPED and on_cpu()


def _half(size: int, block: int) -> int:
    """Where a system of so many rows is halved: between blocks of so many."""
    return -(-size // block) // 2 * block
