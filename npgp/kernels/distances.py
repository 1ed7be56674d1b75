"""Squared distances of rows: exact for rows that are close, wherever they are, as are their derivatives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from npgp.linalg import matmul

#: Up to so many columns, derivatives are sums of differences for all kernels.
FEW_COLUMNS = 2
#: And up to so many for kernels with a kink: steps take up to 12% longer than with products, and with more far longer.
SHARP_COLUMNS = 10
#: Beyond so many columns, all is matrix products: differences would take most of a training step.
MANY_COLUMNS = 20
#: The largest distance, as a share of the largest number, so that small multiples are numbers too.
FARTHEST = 1e-3
#: So many columns are written out at a time.
COLUMNS_AT_ONCE = 8


@functools.partial(jax.jit, static_argnames="smooth")  # as one program where it runs eagerly, as when training starts
def squared_distances(
    X: jax.Array, X2: jax.Array | None = None, lengthscale: ArrayLike = 1.0, *, smooth: bool = True
) -> jax.Array:
    """
    ``Σ_d (x_nd − x'_md)² / ℓ_d²``.

    With u the unit roundoff (6e-8 in float32, 1e-16 in float64), c the mean of the rows of ``X``, and R the largest
    norm of the rows ``(x − c)/ℓ`` and ``(x' − c)/ℓ``, T that of their tangents (docs/theory.md, section 8, has proofs):

    - up to :data:`MANY_COLUMNS` columns, values are sums of squared differences: off by at most (D + 5) u of
      themselves, and 0 just where rows are equal;
    - beyond, they are ``‖a‖² + ‖b‖² − 2 a·b`` of the centered and scaled rows: off by at most 4 (D + 8) u R²;
    - derivatives are sums of differences, off by at most (D + 8) u of the sum of their terms' sizes, with up to
      :data:`FEW_COLUMNS` columns, and if not ``smooth`` up to :data:`SHARP_COLUMNS`;
    - else they are matrix products, too: off by at most 8 (D + 9) u R T; in reverse, the gradient of ``Σ G_nm r²_nm``
      in row n, scaled, by at most ``4 (M + 8) u R Σ_m |G_nm|``.

    A kernel multiplies a derivative by the slope of its correlation in the squared distance. That of a smooth kernel is
    bounded; that of one with a kink, 1/(2r), is not. So where derivatives of these are products, pairs so close that
    the direction from one row to the other is lost in them, ``r² ≤ (32 u)² D (‖a‖² + ‖b‖²)``, have none; and where
    values are products, pairs with ``r² ≤ 16 √D u (‖a‖² + ‖b‖²)`` count as equal.

    No array of size N × M × D is made, forward or in reverse.

    .. code-block:: python

        np.testing.assert_allclose(
            npgp.kernels.squared_distances(X, Z), (X - Z.T) ** 2, atol=1e-4
        )

    :param X: shape (N, D).
    :param X2: shape (M, D), or ``None`` for ``X`` itself, with zeros on the diagonal.
    :param lengthscale: ℓ, shape (), (1,) or (D,).
    :param smooth: whether what is made of the squared distance has a bounded slope at 0.
    :return: shape (N, M), never negative.
    """
    dtype = jnp.result_type(X, X if X2 is None else X2, lengthscale, 0.0)
    columns = _as_columns(X, dtype)
    columns2 = columns if X2 is None else _as_columns(X2, dtype)
    # One scale for all columns stays one: its derivative is then no sum over columns.
    scale = jnp.reshape(_reciprocal(jnp.asarray(lengthscale, dtype)), -1)
    r2 = _squared_distances(smooth, columns, columns2, scale)
    many = X.shape[-1] > MANY_COLUMNS
    return r2 * (1.0 - jnp.eye(X.shape[0], dtype=dtype)) if X2 is None and many else r2


@jax.custom_jvp
def _reciprocal(x: jax.Array) -> jax.Array:
    return 1.0 / x


@_reciprocal.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    # One after the other: the square of a tiny lengthscale's reciprocal overflows, and 0 times that is NaN.
    value = _reciprocal(*primals)
    return value, -(tangents[0] * value) * value


def _as_columns(X: ArrayLike, dtype: DTypeLike) -> jax.Array:
    # Where X is computed in the same program, as a·b say, XLA compiles a difference as one fused multiplication and
    # addition of a and b, which is not 0 for equal rows; through a choice it cannot (a barrier it drops before).
    columns = jnp.asarray(X, dtype).T
    return jnp.where(jnp.isfinite(columns), columns, jnp.nan)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _squared_distances(smooth: bool, columns: jax.Array, columns2: jax.Array, scale: jax.Array) -> jax.Array:
    if len(columns) > MANY_COLUMNS:
        return _by_products(smooth, *_centered(columns, columns2, scale))

    def add(total: jax.Array, column: tuple[Any, ...]) -> tuple[jax.Array, None]:
        x, z, s = column
        return total + jnp.square((x[:, None] - z) * s), None

    # Column by column: one pass over the result, where a reduction over columns is ten times as slow on a CPU. Some
    # columns are written out; with more a loop, as else XLA computes all of them anew for each use of the result.
    total = jnp.zeros((columns.shape[1], columns2.shape[1]), columns.dtype)
    operands = (columns, columns2, jnp.broadcast_to(scale, columns.shape[:1]))
    total = lax.scan(add, total, operands, unroll=min(len(columns), COLUMNS_AT_ONCE))[0]
    # Finite, for kernels that are a polynomial times an exponential, where infinity times 0 would be NaN.
    return jnp.minimum(total, FARTHEST * float(jnp.finfo(total.dtype).max))


@functools.partial(_squared_distances.defjvp, symbolic_zeros=True)
def _(smooth: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    columns, columns2, scale = primals
    r2 = _squared_distances(smooth, *primals)
    # Of data that are given there are no derivatives, and nothing is computed for them.
    dx, dz, ds = (None if isinstance(t, SymbolicZero) else t for t in tangents)
    whole = jnp.zeros_like(r2)
    if ds is not None and len(scale) == 1:
        whole, ds = r2 * (2.0 * (ds / scale)), None
    if all(t is None for t in (dx, dz, ds)):
        return r2, whole
    if len(columns) <= (FEW_COLUMNS if smooth else SHARP_COLUMNS):
        return r2, whole + _slope_by_differences(columns, columns2, scale, dx, dz, ds)
    slope = _slope_by_products(columns, columns2, scale, dx, dz, ds)
    if not smooth:
        A, B = lax.stop_gradient(_centered(*primals))
        lost = (16.0 * jnp.finfo(A.dtype).eps) ** 2 * len(A) * _ends(A, B)
        slope = jnp.where(r2 <= lost, 0.0, slope)
    return r2, whole + slope


def _slope_by_differences(
    columns: jax.Array,
    columns2: jax.Array,
    scale: jax.Array,
    dx: jax.Array | None,
    dz: jax.Array | None,
    ds: jax.Array | None,
) -> jax.Array:
    """``Σ_d 2 s δ (s dδ + δ ds)``, column after column; in reverse, differences are taken anew, not stored."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add(total: jax.Array, column: tuple[Any, ...]) -> tuple[jax.Array, None]:
        x, z, s, dx, dz, ds = column
        difference = x[:, None] - z
        moved = 0.0
        if dx is not None:
            moved += s * dx[:, None]
        if dz is not None:
            moved -= s * dz
        if ds is not None:
            moved += ds[:, None] * difference
        return total + 2.0 * s * difference * moved, None

    total = jnp.zeros((columns.shape[1], columns2.shape[1]), columns.dtype)
    if ds is not None:
        ds = jnp.broadcast_to(ds[:, None], columns.shape)  # by rows, as in reverse a sum over all pairs takes longer
    operands = (columns, columns2, jnp.broadcast_to(scale, columns.shape[:1]), dx, dz, ds)
    return lax.scan(add, total, operands, unroll=len(columns) <= FEW_COLUMNS)[0]


def _slope_by_products(
    columns: jax.Array,
    columns2: jax.Array,
    scale: jax.Array,
    dx: jax.Array | None,
    dz: jax.Array | None,
    ds: jax.Array | None,
) -> jax.Array:
    """``2 (da·a + db·b − da·b − a·db)`` of the centered and scaled rows a and b, without terms that are 0."""
    A, B = _centered(columns, columns2, scale)
    center = _center(columns)

    def moved(rows: jax.Array, by: jax.Array | None) -> Any:
        terms = [] if by is None else [scale[:, None] * by]
        terms += [] if ds is None else [ds[:, None] * (rows - center)]
        return sum(terms) if terms else None

    dA, dB = moved(columns, dx), moved(columns2, dz)
    slope = jnp.zeros((), A.dtype)
    if dA is not None:
        slope = slope + jnp.sum(A * dA, axis=0)[:, None] - matmul(dA.T, B)
    if dB is not None:
        slope = slope + jnp.sum(B * dB, axis=0) - matmul(A.T, dB)
    return 2.0 * slope


def _by_products(smooth: bool, A: jax.Array, B: jax.Array) -> jax.Array:
    ends = _ends(A, B)
    r2 = ends - 2.0 * matmul(A.T, B)
    # Rounding of equal rows is far below the bound: about as the root of the number of terms (Higham & Mary 2019).
    least = 0.0 if smooth else 8.0 * len(A) ** 0.5 * jnp.finfo(A.dtype).eps * ends
    return jnp.where(r2 <= least, 0.0, r2)


def _ends(A: jax.Array, B: jax.Array) -> jax.Array:
    """``‖a‖² + ‖b‖²``."""
    return jnp.sum(jnp.square(A), axis=0)[:, None] + jnp.sum(jnp.square(B), axis=0)


def _centered(columns: jax.Array, columns2: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    center = _center(columns)
    return (columns - center) * scale[:, None], (columns2 - center) * scale[:, None]


def _center(columns: jax.Array) -> jax.Array:
    return lax.stop_gradient(jnp.mean(columns, axis=1, keepdims=True))
