"""
Zonal functions on the sphere S^{d−1} ⊂ R^d: Gegenbauer series, quadrature, and how many harmonics a level has.

Everything is in Legendre polynomials of dimension d, ``P_ℓ(t) = C_ℓ^(α)(t) / C_ℓ^(α)(1)`` with ``α = (d − 2)/2``, and
in N(d, ℓ), the number of harmonics of level ℓ, so that the addition theorem is ``Σ_j Y_ℓj(u) Y_ℓj(v) = N P_ℓ(u·v)``
for harmonics that are orthonormal under the uniform *probability* measure of the sphere. That is the usual
``(ℓ + α)/α C_ℓ^(α)``, and it holds in d = 2 too, where α = 0 and ``N P_ℓ = 2 cos ℓθ`` (1 at ℓ = 0).

Constants are computed on the host in float64.

Source: Efthimiou & Frye 2014, Spherical Harmonics in p Dimensions, chapter 4; Dai & Xu 2013, chapter 1.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from npgp.checks import whole_number

#: Ends of the panels of the angle's quadrature. Kernels are sharp at 0, activations have a kink at π/2.
_PANELS = (0.0, 0.02, 0.1, 0.5, 0.5 * math.pi, math.pi)
_NODES = 32


def check_dimension(dimension: int) -> int:
    """The dimension d of the space around the sphere, a whole number from 2."""
    return whole_number(
        dimension, "dimension", least=2, must_be="at least 2, as the sphere's space has one input and the bias"
    )


def check_levels(levels: Sequence[int]) -> tuple[int, ...]:
    """Levels as a tuple: whole numbers from 0, increasing, at least one."""
    if isinstance(levels, (int, str)) or not isinstance(levels, Sequence):
        raise TypeError(f"levels is {levels!r}; it must list the levels, such as (0, 1, 2) or range(6).")
    checked = tuple(whole_number(level, "a level", least=None) for level in levels)
    if not checked or checked[0] < 0 or any(b <= a for a, b in itertools.pairwise(checked)):
        raise ValueError(f"levels is {tuple(levels)}; it must list at least one level, from 0 and increasing.")
    return checked


def multiplicity(dimension: int, level: int) -> int:
    """N(d, ℓ), the number of spherical harmonics of a level: 1, d, (d − 1)(d + 2)/2, …"""
    d = dimension
    return math.comb(level + d - 1, d - 1) - (math.comb(level + d - 3, d - 1) if level > 1 else 0)


def multiplicities(dimension: int, levels: Sequence[int]) -> np.ndarray:
    """N(d, ℓ) of several levels, in floating point."""
    return np.array([float(multiplicity(dimension, level)) for level in levels])


# ---------------------------------------------------------------------------------------------------------------
# Polynomials


def _next(d: int, level: int, t: Any, P: Any, before: Any) -> Any:
    """P_{ℓ+1} from P_ℓ and P_{ℓ−1}."""
    if level == 0:
        return t
    return ((2 * level + d - 2) / (level + d - 2) * t) * P - level / (level + d - 2) * before


def polynomials(dimension: int, levels: Sequence[int], t: np.ndarray) -> np.ndarray:
    """P_ℓ(t) on the host: (levels,) + shape of t."""
    rows, before, P = {}, np.zeros_like(t), np.ones_like(t)
    for level in range(max(levels) + 1):
        rows[level] = P
        P, before = _next(dimension, level, t, P, before), P
    return np.stack([rows[level] for level in levels])


def series(coefficients: jax.Array, dimension: int, levels: Sequence[int], t: jax.Array) -> jax.Array:
    """
    ``Σ_ℓ c_ℓ P_ℓ(t)``.

    :param coefficients: c, one for each level.
    :param dimension: d.
    :param levels: increasing.
    :param t: cosines, any shape.
    """
    total, before, P = jnp.zeros_like(t), jnp.zeros_like(t), jnp.ones_like(t)
    index = {level: i for i, level in enumerate(levels)}
    for level in range(levels[-1] + 1):
        if level in index:
            total = total + coefficients[index[level]] * P
        if level < levels[-1]:
            P, before = _next(dimension, level, t, P, before), P
    return total


# ---------------------------------------------------------------------------------------------------------------
# Quadrature
#
# In the angle θ, t = cos θ, the Gegenbauer weight (1 − t²)^{(d−3)/2} dt is sin^{d−2}θ dθ, analytic for every d, and so
# are kernels of the chord 2 sin(θ/2), Matérn's included, which have a singularity in t. Gauss–Legendre panels in θ
# therefore converge geometrically where Gauss–Gegenbauer nodes in t would not.


@functools.cache
def angles() -> tuple[np.ndarray, np.ndarray]:
    """Nodes θ in [0, π] and weights of the quadrature in the angle."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    ends = list(itertools.pairwise(_PANELS))
    theta = [0.5 * (b - a) * nodes + 0.5 * (a + b) for a, b in ends]
    return np.concatenate(theta), np.concatenate([0.5 * (b - a) * weights for a, b in ends])


def log_weights(p: float, q: float) -> np.ndarray:
    """Logarithms of quadrature weights that sum to one, for the density ``∝ sin(θ/2)^p cos(θ/2)^q``."""
    theta, weights = angles()
    log = np.log(weights) + p * np.log(np.sin(theta / 2)) + q * np.log(np.cos(theta / 2))
    log = log - np.max(log)
    return log - np.log(np.sum(np.exp(log)))


@functools.cache
def _transform(dimension: int, levels: tuple[int, ...]) -> np.ndarray:
    """Rows that take a zonal function's values at :func:`angles` to its coefficients."""
    weights = np.exp(log_weights(dimension - 2, dimension - 2))
    P = polynomials(dimension, levels, np.cos(angles()[0]))
    return multiplicities(dimension, levels)[:, None] * P * weights


def coefficients(
    function: Callable[[jax.Array], ArrayLike], dimension: int, levels: Sequence[int], of: str = "cosine"
) -> jax.Array:
    """
    The coefficients s_ℓ of a zonal function ``Σ_ℓ s_ℓ P_ℓ(t)``, by quadrature; (levels,).

    By Funk and Hecke, ``s_ℓ = N(d, ℓ) E[f(t) P_ℓ(t)]`` where t is distributed as the cosine of a uniform point. It is
    exact to rounding, which is about ``ε √N`` of the function's size, for functions that are analytic in the angle, but
    for a kink at t = 0; and differentiable in what the function depends on.

    :param function: f, from an array to an array.
    :param dimension: d.
    :param levels: increasing.
    :param of: what f takes: ``"cosine"`` t, or ``"chord2"``, ``2 − 2t`` to full precision at small angles.
    """
    theta = angles()[0]
    at = np.cos(theta) if of == "cosine" else 4.0 * np.square(np.sin(theta / 2))
    values = jnp.asarray(function(jnp.asarray(at)))
    if values.shape != theta.shape:
        raise ValueError(
            f"{getattr(function, '__name__', type(function).__name__)} gave shape {values.shape} for an array of shape "
            f"{theta.shape}; it must work elementwise."
        )
    if not jnp.issubdtype(values.dtype, jnp.floating):
        values = values.astype(float)  # a step, say
    return jnp.sum(_transform(dimension, tuple(levels)).astype(values.dtype) * values, axis=-1)


def rounding(dimension: int, levels: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Bound on the rounding error of :func:`coefficients`, for a function of size one."""
    return 16.0 * np.finfo(dtype).eps * np.sqrt(multiplicities(dimension, levels))


# ---------------------------------------------------------------------------------------------------------------
# Constants


def log_beta(a: float, b: float) -> float:
    """log B(a, b)."""
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def log_rodrigues(dimension: int, level: int) -> float:
    """
    log 1/(2^ℓ (α + 1)_ℓ), the factor of Rodrigues' formula ``E[f P_ℓ] = E_ℓ[f^(ℓ)] / (2^ℓ (α + 1)_ℓ)``.

    E_ℓ is the mean under the density ``∝ (1 − t²)^{ℓ+α−1/2}``. Where derivatives are positive nothing cancels, so that
    small coefficients keep all their digits.
    """
    alpha = 0.5 * (dimension - 2)
    return -level * math.log(2.0) - math.lgamma(alpha + 1 + level) + math.lgamma(alpha + 1)


def half_power(dimension: int, level: int, order: int) -> float:
    """
    ``E[t₊ⁿ P_ℓ(t)]`` for n = 0 (the step) or 1 (the rectified linear unit), in closed form.

    From Rodrigues' formula: the ℓ-th derivative of t₊ⁿ is the (ℓ − n − 1)-th of a delta at 0. Zero where ℓ > n and
    ℓ − n is even.

    Source: Bach 2017, appendix D.2.
    """
    d, k2 = dimension, level - order - 1
    if level <= order:
        if order == 0:
            return 0.5
        return 0.5 / d if level == 1 else math.exp(-log_beta(0.5 * (d - 1), 0.5)) / (d - 1)
    if k2 % 2:
        return 0.0
    k, beta = k2 // 2, level + 0.5 * (d - 3)
    log = math.lgamma(k2 + 1) + math.lgamma(beta + 1) - math.lgamma(k + 1) - math.lgamma(beta - k + 1)
    return (-1.0) ** k * math.exp(log - log_beta(beta + 1, 0.5) + log_rodrigues(d, level))
