"""
Stationary kernels: functions of the scaled distance of two inputs; and kernels of phases, periodic functions and single
waves.

Squared distances of rows: exact for rows that are close, wherever they are, as are their derivatives.
"""

from __future__ import annotations

import functools
import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial
from jax.typing import ArrayLike, DTypeLike

from npgp.checks import positive_fields
from npgp.kernels.base import (
    FeatureMap,
    Kernel,
    check_active_dims,
    check_ard,
    check_columns,
    columns_seen,
    filled,
    repeated,
    select,
    waves,
)
from npgp.linalg import matmul, safe_sqrt
from npgp.pytrees import pytree, static

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


@dataclass(frozen=True)
class Stationary(Kernel):
    """
    Kernels of the scaled distance ``r² = Σ_d (x_d − x'_d)² / ℓ_d²``; a subclass gives :meth:`correlation`, and
    :meth:`spectral_scale` for random features.

    .. code-block:: python

        assert isinstance(npgp.Matern32(2.0), npgp.kernels.Stationary)

    :param lengthscale: ℓ, in the inputs' units: a scalar, or one for each input column (ARD).
    :param variance: prior variance σ_f², in the squared units of f.
    :param active_dims: the input columns the kernel sees; all if omitted.
    :raises ValueError: for a hyperparameter that is known to be non-positive.
    """

    lengthscale: ArrayLike = 1.0
    _: KW_ONLY
    variance: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        positive_fields(self, "lengthscale", "variance")
        check_active_dims(self.active_dims)

    def correlation(self, r2: jax.Array) -> jax.Array:
        """The kernel at unit variance, as a function of the scaled squared distance."""
        raise NotImplementedError

    def spectral_scale(self, rng_key: jax.Array, count: int) -> ArrayLike:
        """
        Draws of √τ, shape (count,) or (), where the kernel is a mixture ``E_τ exp(−τ r²/2)`` of RBF kernels.

        Every kernel of r that is valid in any dimension is one (Schoenberg 1938). Frequencies are then ``√τ z``, z
        standard normal.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no random features; a stationary kernel of one's own defines spectral_scale "
            "for them."
        )

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        X = select(X, self.active_dims)
        check_ard(self.lengthscale, X.shape[-1], f"{type(self).__name__} lengthscale")
        X2 = None if X2 is None else select(X2, self.active_dims)
        if jnp.size(self.variance) != 1:
            raise ValueError(
                f"{type(self).__name__} variance has shape {jnp.shape(self.variance)}; it must be a "
                "scalar or, for functions drawn in a plate of Q members at dim=-2, (Q, 1)."
            )
        r2 = squared_distances(X, X2, self.lengthscale, smooth=self.differentiable)
        return self.correlation(r2) * self.variance

    def diag(self, X: jax.Array) -> jax.Array:
        return filled(self.variance, X, X.shape[0])

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        keys = jax.random.split(rng_key)
        z = jax.random.normal(keys[0], (count, columns_seen(columns, self.active_dims)))
        scale = jnp.asarray(self.spectral_scale(keys[1], count))
        return Partial(_fourier, self, z * scale[..., None])


def _fourier(kernel: Stationary, frequencies: jax.Array, X: jax.Array) -> jax.Array:
    scaled = select(X, kernel.active_dims) / kernel.lengthscale
    return jnp.sqrt(kernel.variance) * waves(scaled, frequencies)


@pytree
class RBF(Stationary):
    """
    Squared-exponential kernel, ``σ_f² exp(−r²/2)``; parameters as :class:`Stationary`.

    .. code-block:: python

        kernel = npgp.RBF([0.5, 2.0], variance=3.0)  # a lengthscale for each column
        assert kernel(np.zeros((4, 2))).shape == (4, 4)
    """

    def correlation(self, r2: jax.Array) -> jax.Array:
        return jnp.exp(-0.5 * r2)

    def spectral_scale(self, rng_key: jax.Array, count: int) -> ArrayLike:
        return 1.0


@pytree
class RationalQuadratic(Stationary):
    """
    Rational-quadratic kernel, ``σ_f² (1 + r²/(2α))^−α``: a gamma mixture of RBF kernels of many lengthscales.

    .. code-block:: python

        kernel = npgp.kernels.RationalQuadratic(1.0, alpha=2.0)
        assert kernel(X).shape == (30, 30)

    :param lengthscale: as :class:`Stationary`.
    :param variance: as :class:`Stationary`.
    :param alpha: shape α of the mixture, a scalar; RBF in the limit of large α.
    :param active_dims: as :class:`Stationary`.
    """

    _: KW_ONLY
    alpha: ArrayLike = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_fields(self, "alpha")

    def correlation(self, r2: jax.Array) -> jax.Array:
        return jnp.exp(-(self.alpha * jnp.log1p(0.5 * r2 / self.alpha)))

    def spectral_scale(self, rng_key: jax.Array, count: int) -> ArrayLike:
        # τ ~ Gamma(α, rate α), by its logarithm: a small α makes numbers that would be rounded to zero.
        return jnp.exp(0.5 * (jax.random.loggamma(rng_key, self.alpha, (count,)) - jnp.log(self.alpha)))


# The Matérn family in a² = 2ν r². Each derivative in a² is a multiple of the member below it, which is finite at
# zero; automatic differentiation through √(a²) would give NaN there.


@jax.custom_jvp
@jax.jit
def _matern12(a2: jax.Array) -> jax.Array:
    return jnp.exp(-safe_sqrt(a2))


@_matern12.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    # Not differentiable at zero distance; zero there is the mean of the one-sided slopes in x. Rows closer than the
    # resolution of 1, which have a correlation of 1, count as equal.
    (a2,), (da2,) = primals, tangents
    a = safe_sqrt(a2)
    apart = a2 > float(jnp.finfo(a2.dtype).eps) ** 2
    slope = jnp.where(apart, -0.5 * jnp.exp(-a) / jnp.where(apart, a, 1.0), 0.0)
    return _matern12(a2), slope * da2


@jax.custom_jvp
@jax.jit
def _matern32(a2: jax.Array) -> jax.Array:
    a = safe_sqrt(a2)
    return (1.0 + a) * jnp.exp(-a)


@_matern32.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (a2,), (da2,) = primals, tangents
    return _matern32(a2), -0.5 * _matern12(a2) * da2


@jax.custom_jvp
@jax.jit
def _matern52(a2: jax.Array) -> jax.Array:
    a = safe_sqrt(a2)
    return (1.0 + a + a2 / 3.0) * jnp.exp(-a)


@_matern52.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (a2,), (da2,) = primals, tangents
    return _matern52(a2), -_matern32(a2) * da2 / 6.0


class Matern(Stationary):
    """The Matérn kernels of half-integer order."""

    nu: ClassVar[float]

    def spectral_scale(self, rng_key: jax.Array, count: int) -> ArrayLike:
        # 1/τ ~ Gamma(ν, rate ν), so frequencies are Student-t with 2ν degrees of freedom.
        return jnp.exp(0.5 * (math.log(self.nu) - jax.random.loggamma(rng_key, self.nu, (count,))))


@pytree
class Matern12(Matern):
    """
    Matérn-1/2 (exponential) kernel, ``σ_f² exp(−r)``; parameters as :class:`Stationary`.

    .. code-block:: python

        assert npgp.kernels.Matern12(1.0)(X).shape == (30, 30)
    """

    nu: ClassVar[float] = 0.5

    def correlation(self, r2: jax.Array) -> jax.Array:
        return _matern12(r2)

    @property
    def differentiable(self) -> bool:
        return False


@pytree
class Matern32(Matern):
    """
    Matérn-3/2 kernel, ``σ_f² (1 + √3 r) exp(−√3 r)``; parameters as :class:`Stationary`.

    .. code-block:: python

        rough = npgp.Matern32(0.5, active_dims=(0,))  # sees the first column alone
        assert rough(X, Z).shape == (30, 6)
    """

    nu: ClassVar[float] = 1.5

    def correlation(self, r2: jax.Array) -> jax.Array:
        return _matern32(3.0 * r2)


@pytree
class Matern52(Matern):
    """
    Matérn-5/2 kernel, ``σ_f² (1 + √5 r + 5r²/3) exp(−√5 r)``; parameters as :class:`Stationary`.

    .. code-block:: python

        np.testing.assert_allclose(npgp.Matern52(1.0, variance=2.0).diag(X), 2.0)
    """

    nu: ClassVar[float] = 2.5

    def correlation(self, r2: jax.Array) -> jax.Array:
        return _matern52(5.0 * r2)


@pytree
class Periodic(Kernel):
    """
    Periodic kernel, ``σ_f² exp(−2 Σ_d sin²(π (x_d − x'_d)/p_d)/ℓ_d²)`` (MacKay 1998).

    It is an RBF kernel of the inputs' places on circles, ``(cos 2πx_d/p_d, sin 2πx_d/p_d)``.

    .. code-block:: python

        # Its shape changes slowly.
        season = npgp.kernels.Periodic(1.0, lengthscale=0.7) * npgp.RBF(10.0)

    :param period: p, in the inputs' units: a scalar, or one for each input column.
    :param lengthscale: ℓ, without units: a scalar, or one for each input column.
    :param variance: prior variance σ_f².
    :param active_dims: the input columns the kernel sees; all if omitted.
    :raises ValueError: for a hyperparameter that is known to be non-positive.
    """

    period: ArrayLike = 1.0
    _: KW_ONLY
    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        positive_fields(self, "period", "lengthscale", "variance")
        check_active_dims(self.active_dims)

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        X = select(X, self.active_dims)
        center = lax.stop_gradient(jnp.mean(X, axis=0))
        points = _on_circles(self, X - center)
        points2 = None if X2 is None else _on_circles(self, select(X2, self.active_dims) - center)
        return jnp.exp(-0.5 * squared_distances(points, points2)) * self.variance

    def diag(self, X: jax.Array) -> jax.Array:
        return filled(self.variance, X, X.shape[0])

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        z = jax.random.normal(rng_key, (count, 2 * columns_seen(columns, self.active_dims)))
        return Partial(_circle_waves, self, z)


def _on_circles(kernel: Periodic, X: jax.Array) -> jax.Array:
    """Places on circles of radius 1/ℓ, (N, 2 D)."""
    check_ard(kernel.period, X.shape[-1], "Periodic period")
    check_ard(kernel.lengthscale, X.shape[-1], "Periodic lengthscale")
    phase = 2.0 * math.pi * (X / kernel.period)
    return jnp.concatenate([jnp.cos(phase) / kernel.lengthscale, jnp.sin(phase) / kernel.lengthscale], axis=-1)


def _circle_waves(kernel: Periodic, frequencies: jax.Array, X: jax.Array) -> jax.Array:
    return jnp.sqrt(kernel.variance) * waves(_on_circles(kernel, select(X, kernel.active_dims)), frequencies)


@pytree
class Cosine(Kernel):
    """
    Cosine kernel, ``σ_f² cos(2π Σ_d (x_d − x'_d)/p_d)``: one plane wave of unknown amplitude and phase.

    .. code-block:: python

        wave = npgp.kernels.Cosine(2.0)
        np.testing.assert_allclose(wave(np.array([[0.0]]), np.array([[2.0]])), 1.0, rtol=1e-5)

    :param period: p, in the inputs' units: a scalar, or one for each input column.
    :param variance: prior variance σ_f².
    :param active_dims: the input columns the kernel sees; all if omitted.
    :raises ValueError: for a hyperparameter that is known to be non-positive.
    """

    period: ArrayLike = 1.0
    _: KW_ONLY
    variance: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        positive_fields(self, "period", "variance")
        check_active_dims(self.active_dims)

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        X = select(X, self.active_dims)
        center = lax.stop_gradient(jnp.mean(X, axis=0))
        wave = _wave(self, X - center)
        wave2 = wave if X2 is None else _wave(self, select(X2, self.active_dims) - center)
        return matmul(wave, wave2.T) * self.variance

    def diag(self, X: jax.Array) -> jax.Array:
        return filled(self.variance, X, X.shape[0])

    def random_features(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(_plane_wave, self)  # exact

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(repeated, Partial(_plane_wave, self), jnp.ones((count, 1)))


def _wave(kernel: Cosine, X: jax.Array) -> jax.Array:
    """Cosine and sine of the phase, (N, 2)."""
    check_ard(kernel.period, X.shape[-1], "Cosine period")
    phase = 2.0 * math.pi * jnp.sum(X / kernel.period, axis=-1)
    return jnp.stack([jnp.cos(phase), jnp.sin(phase)], axis=-1)


def _plane_wave(kernel: Cosine, X: jax.Array) -> jax.Array:
    return jnp.sqrt(kernel.variance) * _wave(kernel, select(X, kernel.active_dims))
