"""Squared distances of rows: exact for rows that are close, wherever they are, as are their derivatives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from npgp.linalg import matmul

#: Up to so many columns, derivatives are sums of differences for all kernels.
FEW_COLUMNS = 2
#: Beyond so many columns, all is matrix products: differences would take most of a training step.
MANY_COLUMNS = 32
#: The largest distance, as a share of the largest number, so that small multiples are numbers too.
FARTHEST = 1e-3


@functools.partial(jax.jit, static_argnames="smooth")  # as one program where it runs eagerly, as when training starts
def squared_distances(
    X: jax.Array, X2: jax.Array | None = None, lengthscale: ArrayLike = 1.0, *, smooth: bool = True
) -> jax.Array:
    """
    ``Σ_d (x_nd − x'_md)² / ℓ_d²``.

    With u the unit roundoff (6e-8 in float32, 1e-16 in float64), c the mean of the rows of ``X``, and R the largest
    norm of ``(x − c)/ℓ`` and ``(x' − c)/ℓ``:

    - up to :data:`MANY_COLUMNS` columns, values are sums of squared differences: off by at most (D + 5) u of
      themselves, and 0 just where rows are equal;
    - beyond, they are ``‖x‖² + ‖x'‖² − 2 x·x'`` of the centered and scaled rows: off by at most (4D + 16) u R²;
    - derivatives are sums of differences, off by at most (D + 8) u of the sum of their terms' sizes, with up to
      :data:`FEW_COLUMNS` columns, and if not ``smooth`` up to :data:`MANY_COLUMNS`;
    - else they are matrix products, too: off by at most (2D + 16) u R times the size of the tangent of the scaled rows.
      A kernel multiplies this by the slope of its correlation in the squared distance. That of a smooth kernel is
      bounded; that of one with a kink, 1/(2r), is not, so that beyond :data:`MANY_COLUMNS` columns rows of squared
      distance below ``16 √D u (‖x‖² + ‖x'‖²)`` count as equal.

    The bounds hold for any order of summation (Higham 2002, section 3.1), for ``(D u)² ≪ D u``.

    No array of size N × M × D is made, forward or in reverse.

    :param X: shape (N, D).
    :param X2: shape (M, D), or ``None`` for ``X`` itself, with zeros on the diagonal.
    :param lengthscale: ℓ, shape (), (1,) or (D,).
    :param smooth: whether what is made of the squared distance has a bounded slope at 0.
    :return: shape (N, M), never negative.
    """
    dtype = jnp.result_type(X, X if X2 is None else X2, lengthscale, 0.0)
    columns = _as_columns(X, dtype)
    columns2 = columns if X2 is None else _as_columns(X2, dtype)
    scale = jnp.broadcast_to(_reciprocal(jnp.asarray(lengthscale, dtype)), columns.shape[:1])
    r2 = _squared_distances(smooth, columns, columns2, scale)
    many = X.shape[-1] > MANY_COLUMNS
    return r2 * (1.0 - jnp.eye(X.shape[0], dtype=dtype)) if X2 is None and many else r2


@jax.custom_jvp
def _reciprocal(x: jax.Array) -> jax.Array:
    return 1.0 / x


@_reciprocal.defjvp
def _(primals, tangents):
    # One after the other: the square of a tiny lengthscale's reciprocal overflows, and 0 times that is NaN.
    value = _reciprocal(*primals)
    return value, -(tangents[0] * value) * value


def _as_columns(X: ArrayLike, dtype) -> jax.Array:
    # Where X is computed in the same program, as a·b say, XLA compiles a difference as one fused multiplication and
    # addition of a and b, which is not 0 for equal rows; through a choice it cannot (a barrier it drops before).
    columns = jnp.asarray(X, dtype).T
    return jnp.where(jnp.isfinite(columns), columns, jnp.nan)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _squared_distances(smooth: bool, columns: jax.Array, columns2: jax.Array, scale: jax.Array) -> jax.Array:
    if len(columns) > MANY_COLUMNS:
        return _by_products(smooth, *_centered(columns, columns2, scale))
    # Written out, column by column: one pass over the result. A reduction over columns is ten times as slow on a CPU.
    total = sum(
        (jnp.square((x[:, None] - z) * s) for x, z, s in zip(columns, columns2, scale, strict=True)),
        jnp.zeros((columns.shape[1], columns2.shape[1]), columns.dtype),
    )
    # Finite, for kernels that are a polynomial times an exponential, where infinity times 0 would be NaN.
    return jnp.minimum(total, FARTHEST * float(jnp.finfo(total.dtype).max))


@_squared_distances.defjvp
def _(smooth, primals, tangents):
    by_differences = len(primals[0]) <= (FEW_COLUMNS if smooth else MANY_COLUMNS)
    slope = _slope_by_differences if by_differences else _slope_by_products
    return _squared_distances(smooth, *primals), slope(*primals, *tangents)


def _slope_by_differences(columns, columns2, scale, *tangents):
    """``Σ_d 2 s δ (s dδ + δ ds)``, column after column; in reverse, differences are taken anew, not stored."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add(total, column):
        x, z, s, dx, dz, ds = column
        difference = x[:, None] - z
        return total + 2.0 * s * difference * (s * (dx[:, None] - dz) + ds * difference), None

    total = jnp.zeros((columns.shape[1], columns2.shape[1]), columns.dtype)
    unroll = len(columns) <= FEW_COLUMNS
    return lax.scan(add, total, (columns, columns2, scale, *tangents), unroll=unroll)[0]


def _slope_by_products(columns, columns2, scale, *tangents):
    (A, B), (dA, dB) = jax.jvp(_centered, (columns, columns2, scale), tangents)
    ends = jnp.sum(A * dA, axis=0)[:, None] + jnp.sum(B * dB, axis=0)
    return 2.0 * (ends - matmul(dA.T, B) - matmul(A.T, dB))


def _by_products(smooth: bool, A: jax.Array, B: jax.Array) -> jax.Array:
    ends = jnp.sum(jnp.square(A), axis=0)[:, None] + jnp.sum(jnp.square(B), axis=0)
    r2 = ends - 2.0 * matmul(A.T, B)
    # Rounding of equal rows is far below the bound: about as the root of the number of terms (Higham & Mary 2019).
    least = 0.0 if smooth else 8.0 * len(A) ** 0.5 * jnp.finfo(A.dtype).eps * ends
    return jnp.where(r2 <= least, 0.0, r2)


def _centered(columns: jax.Array, columns2: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    center = lax.stop_gradient(jnp.mean(columns, axis=1, keepdims=True))
    return (columns - center) * scale[:, None], (columns2 - center) * scale[:, None]
