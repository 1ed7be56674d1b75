"""
Stationary kernels: functions of the scaled distance of two inputs; and kernels of phases, periodic functions and single
waves.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jax.typing import ArrayLike

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
from npgp.kernels.distances import squared_distances
from npgp.linalg import matmul, safe_sqrt
from npgp.pytrees import pytree, static


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
