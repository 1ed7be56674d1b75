"""
The arc-cosine kernel, infinitely wide networks of one hidden layer; and zonal kernels: inputs get a bias, are projected
on the sphere, and the kernel there is a function of their angle.

    x̃ = (√w_1 x_1, …, √w_D x_D, √b) ∈ R^d, d = D + 1,      k(x, x') = σ² ‖x̃‖ ‖x̃'‖ κ(cos θ),   κ(1) = 1

with θ the angle of x̃ and x̃'. Their eigenfunctions are spherical harmonics, ``κ(t) = Σ_ℓ λ_ℓ N_ℓ P_ℓ(t)``
(:mod:`npgp.kernels.gegenbauer`), on which spherical inducing features rest (:mod:`npgp.features`).

Sources: Dutordoir, Durrande & Hensman 2020; Dutordoir et al. 2021; Cho & Saul 2009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jax.tree_util import Partial
from jax.typing import ArrayLike, DTypeLike

from npgp.checks import one_of, positive_fields
from npgp.kernels import gegenbauer
from npgp.kernels.base import (
    FeatureMap,
    Kernel,
    Scaled,
    check_active_dims,
    check_ard,
    check_columns,
    columns_seen,
    filled,
    project,
    select,
)
from npgp.kernels.stationary import RBF, Matern, Matern12, Matern32, Matern52, Stationary, squared_distances
from npgp.linalg import safe_sqrt
from npgp.programs.backend import maximum
from npgp.pytrees import pytree, static


@pytree
class ArcCosine(Kernel):
    """
    Arc-cosine kernel, ``σ² ‖x̃‖ⁿ ‖x̃'‖ⁿ J_n(θ)/π``, with θ the angle of the weighted inputs ``x̃ = (√w_d x_d, √b)``.

    It is ``2σ² E[h(w·x̃) h(w·x̃')]`` with w standard normal and ``h(a) = aⁿ`` for positive a, else 0: the prior of a
    network of one wide hidden layer of steps (n = 0), rectified linear (1) or rectified quadratic units (2).

    .. code-block:: python

        kernel = npgp.kernels.ArcCosine(1, weight_variance=[1.0])
        assert kernel(X, Z).shape == (30, 6)

    :param order: n.
    :param variance: σ².
    :param weight_variance: w, a scalar or one for each input column (ARD).
    :param bias_variance: b > 0.
    :param active_dims: the input columns the kernel sees; all if omitted.
    :raises ValueError: for another order, or a hyperparameter that is known to be non-positive.

    Source: Cho & Saul 2009, eqs. 1–8.
    """

    order: int = static(1)
    _: KW_ONLY
    variance: ArrayLike = 1.0
    weight_variance: ArrayLike = 1.0
    bias_variance: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        one_of(self.order, "ArcCosine order", (0, 1, 2))
        positive_fields(self, "variance", "weight_variance", "bias_variance")
        check_active_dims(self.active_dims)

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        norm, unit = _polar(_weighted(self, X))
        norm2, unit2 = (norm, None) if X2 is None else _polar(_weighted(self, X2))
        chord2 = squared_distances(unit, unit2, smooth=self.differentiable)
        scale = self.variance / math.pi * norm[:, None] ** self.order * norm2**self.order
        return ANGULAR[self.order](chord2) * scale

    def diag(self, X: jax.Array) -> jax.Array:
        square = jnp.sum(jnp.square(_weighted(self, X)), axis=-1)
        return square**self.order * (self.variance * (1.0, 1.0, 3.0)[self.order])

    @property
    def differentiable(self) -> bool:
        return self.order > 0

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        normals = jax.random.normal(rng_key, (count, columns_seen(columns, self.active_dims) + 1))
        return Partial(_half_spaces, self, normals)


def _weighted(kernel: ArcCosine, X: jax.Array) -> jax.Array:
    X = select(X, kernel.active_dims)
    check_ard(kernel.weight_variance, X.shape[-1], "ArcCosine weight_variance")
    bias = filled(jnp.sqrt(kernel.bias_variance), X, X.shape[0], 1)
    return jnp.concatenate([X * jnp.sqrt(kernel.weight_variance), bias], axis=-1)


def _polar(X: jax.Array) -> tuple[jax.Array, jax.Array]:
    norm = jnp.sqrt(jnp.sum(jnp.square(X), axis=-1))
    return norm, X / norm[:, None]


def _half_spaces(kernel: ArcCosine, normals: jax.Array, X: jax.Array) -> jax.Array:
    """The unit of a random half-space and that of the opposite one."""
    return jnp.sqrt(kernel.variance) * half_spaces(kernel.order, normals, _weighted(kernel, X))


def half_spaces(order: int, normals: jax.Array, X: jax.Array) -> jax.Array:
    """The units ``h(w·x)`` and ``h(−w·x)`` of random normals w, (N, count, 2), whose mean inner product is J_n/π."""
    height = project(X, normals)
    heights = jnp.stack([height, -height], axis=-1)
    return (heights > 0).astype(heights.dtype) if order == 0 else maximum(heights, 0.0) ** order


# The angular part J_n as a function of the squared chord c² = ‖u − u'‖² = 2 − 2 cos θ of unit vectors, from which
# even float32 finds small angles to all digits; from cos θ it would lose half of them. Each derivative in cos θ is a
# multiple of the member below (J_2' = 4 J_1, J_1' = J_0), which is finite at θ = 0; that of arccos is not.


def _angle(chord2: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """π − θ, and cosine and sine of θ."""
    rest2 = maximum(4.0 - chord2, 0.0)
    chord, rest = safe_sqrt(chord2), safe_sqrt(rest2)
    return 2.0 * jnp.arctan2(rest, chord), 1.0 - 0.5 * chord2, 0.5 * chord * rest


@jax.custom_jvp
def _angular0(chord2: jax.Array) -> jax.Array:
    return _angle(chord2)[0]


@_angular0.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    # dJ_0/dcos θ = 1/sin θ. As for Matérn-1/2, zero at θ = 0 is the mean of the one-sided slopes in x. Points that are
    # closer than the resolution of 1 count as equal: second derivatives of J_1 divide rounding errors by their chord.
    (chord2,), (dchord2,) = primals, tangents
    sine = _angle(chord2)[2]
    between = (chord2 > float(jnp.finfo(chord2.dtype).eps) ** 2) & (chord2 < 4.0)
    slope = jnp.where(between, -0.5 / jnp.where(between, sine, 1.0), 0.0)
    return _angular0(chord2), slope * dchord2


@jax.custom_jvp
def _angular1(chord2: jax.Array) -> jax.Array:
    supplement, cosine, sine = _angle(chord2)
    return sine + supplement * cosine


@_angular1.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (chord2,), (dchord2,) = primals, tangents
    return _angular1(chord2), -0.5 * _angular0(chord2) * dchord2


@jax.custom_jvp
def _angular2(chord2: jax.Array) -> jax.Array:
    supplement, cosine, sine = _angle(chord2)
    return 3.0 * sine * cosine + supplement * (1.0 + 2.0 * jnp.square(cosine))


@_angular2.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (chord2,), (dchord2,) = primals, tangents
    return _angular2(chord2), -2.0 * _angular1(chord2) * dchord2


#: J_n(θ) by order.
ANGULAR = (_angular0, _angular1, _angular2)


class Zonal(Kernel):
    """
    Kernels ``σ² ‖x̃‖ⁿ ‖x̃'‖ⁿ κ(cos θ)`` of bias-augmented inputs.

    One of one's own has the fields below, as a frozen dataclass registered with :func:`npgp.pytrees.pytree`, and
    defines :meth:`correlation`; :meth:`level_variances` too if a closed form is known, and :meth:`angular_draws` if
    random features are wanted.

    .. code-block:: python

        assert isinstance(npgp.kernels.ZonalRBF(), npgp.kernels.Zonal)

    :param variance: σ².
    :param weight_variance: w, a scalar or one for each input column (ARD).
    :param bias_variance: b > 0.
    :param degree: n; the spherical features' literature has 1, and with 0 the kernel is one of angles alone.
    :param active_dims: the input columns the kernel sees; all if omitted.
    """

    _: KW_ONLY
    variance: ArrayLike
    weight_variance: ArrayLike
    bias_variance: ArrayLike
    degree: int
    active_dims: tuple[int, ...] | None

    def __post_init__(self) -> None:
        positive_fields(self, "variance", "weight_variance", "bias_variance")
        one_of(self.degree, f"{type(self).__name__} degree", (0, 1, 2))
        check_active_dims(self.active_dims)

    def correlation(self, chord2: jax.Array) -> jax.Array:
        """κ, with κ = 1 at 0, as a function of the squared chord ``2 − 2 cos θ``: accurate at small angles too."""
        raise NotImplementedError

    def level_variances(self, levels: Sequence[int], dimension: int) -> jax.Array:
        """
        ``a_ℓ = λ_ℓ N_ℓ``, the share of κ(1) = 1 that each level of spherical harmonics has; (levels,).

        By quadrature here (:func:`npgp.kernels.gegenbauer.coefficients`); what may be rounding is zero.

        :param levels: increasing.
        :param dimension: d, one more than the input columns.
        """
        a = gegenbauer.coefficients(self.correlation, dimension, levels, of="chord2")
        return jnp.where(a > gegenbauer.rounding(dimension, levels, a.dtype), a, 0.0)

    def eigenvalues(self, levels: Sequence[int], dimension: int) -> jax.Array:
        """λ_ℓ, the Funk-Hecke coefficients of κ; (levels,). Arguments as for :meth:`level_variances`."""
        return self.level_variances(levels, dimension) / gegenbauer.multiplicities(dimension, levels)

    def polar(self, X: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``‖x̃‖ⁿ`` (N,) and ``x̃/‖x̃‖`` (N, d)."""
        X = select(X, self.active_dims)
        check_ard(self.weight_variance, X.shape[-1], f"{type(self).__name__} weight_variance")
        bias = filled(jnp.sqrt(self.bias_variance), X, X.shape[0], 1)
        weighted = jnp.concatenate([X * jnp.sqrt(self.weight_variance), bias], axis=-1)
        norm = jnp.sqrt(jnp.sum(jnp.square(weighted), axis=-1))
        return norm**self.degree, weighted / norm[:, None]

    @property
    def dtype(self) -> np.dtype:
        """The floating dtype of the hyperparameters."""
        return jnp.result_type(*map(_dtype, (self.variance, self.weight_variance, self.bias_variance)))

    def dimension(self, columns: int) -> int:
        """d for inputs of so many columns."""
        return columns_seen(columns, self.active_dims) + 1

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        radius, unit = self.polar(X)
        radius2, unit2 = (radius, None) if X2 is None else self.polar(X2)
        chord2 = squared_distances(unit, unit2, smooth=self.differentiable)
        return self.correlation(chord2) * (self.variance * radius[:, None] * radius2)

    def diag(self, X: jax.Array) -> jax.Array:
        return jnp.square(self.polar(X)[0]) * self.variance

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(_with_norms, self, self.angular_draws(rng_key, self.dimension(columns), count))

    def angular_draws(self, rng_key: jax.Array, dimension: int, count: int) -> FeatureMap:
        """
        Random features of κ, as :meth:`npgp.kernels.Kernel.feature_draws` has them of the kernel.

        :param dimension: d.
        :return: ψ from points of the sphere (N, d) to (N, count, P), with ``E[Σ_p ψ_cp(u) ψ_cp(u')] = κ``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no random features; a zonal kernel of one's own defines angular_draws for them."
        )


def _with_norms(kernel: Zonal, draws: FeatureMap, X: jax.Array) -> jax.Array:
    radius, unit = kernel.polar(jnp.asarray(X))
    return (jnp.sqrt(kernel.variance) * radius)[:, None, None] * draws(unit)


def as_zonal(kernel: Kernel, what: str) -> tuple[Zonal, ArrayLike]:
    """
    A zonal kernel, and the factor around it.

    :param what: whose need it is, for the error.
    :raises TypeError: for other kernels.
    """
    if isinstance(kernel, Scaled):
        zonal, scale = as_zonal(kernel.kernel, what)
        return zonal, scale * kernel.scale  # type: ignore[operator]
    if not isinstance(kernel, Zonal):
        raise TypeError(
            f"the kernel is {type(kernel).__name__}, but {what} features need a zonal kernel, such as ZonalArcCosine "
            "or ZonalMatern52, or a number times one."
        )
    return kernel, 1.0


@pytree
class ZonalArcCosine(Zonal):
    """
    Arc-cosine kernel with the norms of degree 1: ``σ² ‖x̃‖ ‖x̃'‖ J_n(θ)/π``.

    With order 1 it is :class:`npgp.kernels.ArcCosine`, the prior of a wide layer of rectified linear units; with order
    0 and degree 0 too, of steps. Levels ℓ > n with ℓ − n even are absent from it.

    .. code-block:: python

        kernel = npgp.kernels.ZonalArcCosine(weight_variance=1.0, bias_variance=1.0)
        assert kernel(X).shape == (30, 30)

    :param order: n, 0 or 1.
    :param variance: as :class:`Zonal`.
    :param weight_variance: as :class:`Zonal`.
    :param bias_variance: as :class:`Zonal`.
    :param degree: as :class:`Zonal`.
    :param active_dims: as :class:`Zonal`.
    :raises ValueError: for another order, or a hyperparameter that is known to be non-positive.

    Source: Cho & Saul 2009, eqs. 1-8.
    """

    order: int = static(1)
    _: KW_ONLY
    variance: ArrayLike = 1.0
    weight_variance: ArrayLike = 1.0
    bias_variance: ArrayLike = 1.0
    degree: int = static(1, kw_only=True)
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.order, "ZonalArcCosine order", (0, 1))

    def correlation(self, chord2: jax.Array) -> jax.Array:
        return ANGULAR[self.order](chord2) / math.pi

    @property
    def differentiable(self) -> bool:
        return self.order > 0

    def level_variances(self, levels: Sequence[int], dimension: int) -> jax.Array:
        """Implement :meth:`Zonal.level_variances`; in closed form."""
        # κ(u·v) = E[h(w·u) h(w·v)] / E[h(w·u)²] with w uniform on the sphere, so that λ_ℓ is a multiple of h's ς_ℓ².
        factor = 2.0 if self.order == 0 else 2.0 * dimension
        s = np.array([gegenbauer.half_power(dimension, level, self.order) for level in levels])
        return jnp.asarray(factor * np.square(s) * gegenbauer.multiplicities(dimension, levels), _dtype(self.variance))

    def angular_draws(self, rng_key: jax.Array, dimension: int, count: int) -> FeatureMap:
        """Implement :meth:`Zonal.angular_draws`: the units of random half-spaces."""
        return Partial(_zonal_half_spaces, self, jax.random.normal(rng_key, (count, dimension)))


def _zonal_half_spaces(kernel: ZonalArcCosine, normals: jax.Array, unit: jax.Array) -> jax.Array:
    return half_spaces(kernel.order, normals, unit)


@dataclass(frozen=True)
class ZonalStationary(Zonal):
    """
    A stationary kernel of the chord between points of the sphere, ``κ = k(‖u − u'‖ / ℓ)``.

    :param lengthscale: ℓ, a scalar, in units of the sphere's radius; :attr:`weight_variance` is for ARD.
    :param variance: as :class:`Zonal`.
    :param weight_variance: as :class:`Zonal`.
    :param bias_variance: as :class:`Zonal`.
    :param degree: as :class:`Zonal`.
    :param active_dims: as :class:`Zonal`.
    :raises ValueError: for a hyperparameter that is known to be non-positive, and a lengthscale that is no scalar.
    """

    lengthscale: ArrayLike = 1.0
    _: KW_ONLY
    variance: ArrayLike = 1.0
    weight_variance: ArrayLike = 1.0
    bias_variance: ArrayLike = 1.0
    degree: int = static(1, kw_only=True)
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_fields(self, "lengthscale")
        if jnp.ndim(self.lengthscale) == 1 or jnp.shape(self.lengthscale)[-1:] not in ((), (1,)):
            raise ValueError(
                f"{type(self).__name__} lengthscale has shape {jnp.shape(self.lengthscale)}; it must be a scalar: a "
                "zonal kernel's ARD is by weight_variance."
            )

    #: The stationary kernel whose restriction to the sphere this is.
    space: ClassVar[type[Stationary]]

    def correlation(self, chord2: jax.Array) -> jax.Array:
        return self.space().correlation(chord2 / jnp.square(self.lengthscale))

    @property
    def differentiable(self) -> bool:
        return self.space().differentiable

    def angular_draws(self, rng_key: jax.Array, dimension: int, count: int) -> FeatureMap:
        """Implement :meth:`Zonal.angular_draws`: those of the stationary kernel in space, on the sphere."""
        return self.space(self.lengthscale).feature_draws(rng_key, dimension, count)


# Coefficients by Rodrigues' formula. All derivatives of these kernels in t are positive, and so is every term below:
# nothing cancels, and however small a coefficient, it has all its digits (of float32 too).


@pytree
class ZonalRBF(ZonalStationary):
    """
    Squared-exponential kernel of the chord, ``exp(−‖u − u'‖²/(2ℓ²))``; parameters as :class:`ZonalStationary`.

    .. code-block:: python

        assert npgp.kernels.ZonalRBF(0.5)(X, Z).shape == (30, 6)
    """

    space: ClassVar[type[RBF]] = RBF

    def level_variances(self, levels: Sequence[int], dimension: int) -> jax.Array:
        """Implement :meth:`Zonal.level_variances`; ``λ_ℓ = Γ(α+1) (2/z)^α I_{ℓ+α}(z) e^{−z}``, z = 1/ℓ²."""
        dtype = _dtype(self.lengthscale)
        z = 1.0 / jnp.square(jnp.asarray(self.lengthscale, dtype))
        exponents = [2 * level + dimension - 2 for level in levels]
        log_w = np.stack([gegenbauer.log_weights(p, p) for p in exponents])
        return _from_logs(levels, dimension, z, levels, log_w, -z * _one_minus_cosine(dtype))


class _ZonalMatern(ZonalStationary):
    """Half-integer Matérn kernels, whose derivatives are Matérn functions of lower, then of negative order."""

    space: ClassVar[type[Matern]]

    def level_variances(self, levels: Sequence[int], dimension: int) -> jax.Array:
        """Implement :meth:`Zonal.level_variances`; positive quadrature of the kernel's ℓ-th derivative."""
        dtype, nu = _dtype(self.lengthscale), self.space.nu
        y = 2.0 * nu / jnp.square(jnp.asarray(self.lengthscale, dtype))
        a2 = 2.0 * y * _one_minus_cosine(dtype)
        a = jnp.sqrt(a2)
        # Reverse Bessel polynomials over (2n − 1)!!, for which K_{n+½}(a) is exp(−a) times one and a power of a.
        orders = [int(abs(level - nu) - 0.5) for level in levels]
        bessel = [jnp.ones_like(a), 1.0 + a]
        for n in range(2, max(orders) + 1):
            bessel.append(bessel[-1] + a2 * bessel[-2] / ((2 * n - 1) * (2 * n - 3)))
        alpha, powers = 0.5 * (dimension - 2), [min(level, nu) for level in levels]
        log_w, constants = [], []
        for level, n, m in zip(levels, orders, powers, strict=True):
            log_w.append(gegenbauer.log_weights(2 * m + dimension - 2, 2 * level + dimension - 2))
            constants.append(
                (1.0 - nu) * math.log(2.0)
                - math.lgamma(nu)
                + 0.5 * math.log(math.pi / 2.0)
                + (math.lgamma(2 * n + 1) - math.lgamma(n + 1) - n * math.log(2.0))
                + (2 * m + 2 * alpha) * math.log(2.0)
                + gegenbauer.log_beta(m + alpha + 0.5, level + alpha + 0.5)
                - gegenbauer.log_beta(level + alpha + 0.5, 0.5)
            )
        log_f = jnp.stack([jnp.log(bessel[n]) - a for n in orders])
        return _from_logs(levels, dimension, y, powers, np.stack(log_w), log_f, constants)


@pytree
class ZonalMatern12(_ZonalMatern):
    """
    Matérn-1/2 kernel of the chord, ``κ = exp(−‖u − u'‖/ℓ)``; parameters as :class:`ZonalStationary`.

    .. code-block:: python

        assert npgp.kernels.ZonalMatern12(0.5)(X, Z).shape == (30, 6)
    """

    space: ClassVar[type[Matern12]] = Matern12


@pytree
class ZonalMatern32(_ZonalMatern):
    """
    Matérn-3/2 kernel of the chord; parameters as :class:`ZonalStationary`.

    .. code-block:: python

        assert npgp.kernels.ZonalMatern32(0.5)(X, Z).shape == (30, 6)
    """

    space: ClassVar[type[Matern32]] = Matern32


@pytree
class ZonalMatern52(_ZonalMatern):
    """
    Matérn-5/2 kernel of the chord; parameters as :class:`ZonalStationary`.

    .. code-block:: python

        kernel = npgp.kernels.ZonalMatern52(1.0, weight_variance=1.0, bias_variance=1.0)
        assert kernel(X).shape == (30, 30)
    """

    space: ClassVar[type[Matern52]] = Matern52


def _dtype(hyperparameter: ArrayLike) -> np.dtype:
    dtype = jnp.result_type(hyperparameter)
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)


def _one_minus_cosine(dtype: DTypeLike) -> jax.Array:
    return jnp.asarray(2.0 * np.square(np.sin(gegenbauer.angles()[0] / 2)), dtype)


def _from_logs(
    levels: Sequence[int],
    dimension: int,
    scale: ArrayLike,
    powers: Any,
    log_w: Any,
    log_f: Any,
    constants: Any = 0.0,
) -> jax.Array:
    """``N_ℓ exp(c_ℓ) scale^{m_ℓ} Σ_q w_ℓq f_ℓq / (2^ℓ (α + 1)_ℓ)`` by logarithms, as the factors may overflow."""
    fixed = np.array([gegenbauer.log_rodrigues(dimension, level) for level in levels])
    fixed = fixed + np.log(gegenbauer.multiplicities(dimension, levels)) + constants
    dtype = log_f.dtype
    powers = jnp.asarray(np.array(powers, float), dtype)
    integral = logsumexp(jnp.asarray(log_w, dtype) + log_f, axis=-1)
    return jnp.exp(jnp.asarray(fixed, dtype) + powers * jnp.log(scale) + integral)
