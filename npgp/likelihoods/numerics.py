"""What likelihoods compute with: special functions whose derivatives hold in float32 too, and care with dtypes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import log_sigmoid, softplus
from jax.scipy.special import i0e
from jax.typing import ArrayLike
from numpy import polynomial
from scipy.special import erfcx

from npgp.programs.backend import maximum

LOG_2PI, SQRT_HALF = math.log(2 * math.pi), math.sqrt(0.5)


def floats(*values: ArrayLike) -> list[jax.Array]:
    """Arrays of one floating dtype, which integers and Python numbers do not widen."""
    floating = [v for v in values if jnp.issubdtype(jnp.result_type(v), jnp.floating)]
    dtype = jnp.result_type(1.0, *floating)
    return [jnp.asarray(v, dtype) for v in values]


def column_of(array: Any, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """A vector on a new leading axis of an array, of its type."""
    return jnp.asarray(array, like.dtype).reshape((-1,) + (1,) * like.ndim)


def horner(coefficients: Any, x: jax.Array) -> jax.Array:
    """The polynomial with these coefficients, that of the lowest power first."""
    total = jnp.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = total * x + c
    return total


def at_least(variance: jax.Array, floor: float) -> jax.Array:
    """The variance raised to a floor; the gradient passes as if it had not been."""
    raised = lax.stop_gradient(jnp.maximum(variance, floor))
    return raised + (variance - lax.stop_gradient(variance))


def deviation(variance: jax.Array) -> jax.Array:
    """√variance. Derivatives in a variance below machine epsilon would be lost to rounding."""
    return jnp.sqrt(at_least(variance, float(jnp.finfo(variance.dtype).eps)))


def bounded_exp(x: jax.Array) -> jax.Array:
    """eˣ, which is large but no infinity: from some e²⁸ below that on it goes on as its tangent, which is less."""
    top = math.log(float(jnp.finfo(x.dtype).max)) - 28.0
    beyond = maximum(x - top, 0.0)
    return jnp.exp(x - beyond) * (1.0 + beyond)


def log_normal(squared: jax.Array, variance: jax.Array) -> jax.Array:
    """Log-density of N(0, variance) at the root of ``squared``."""
    return -0.5 * (LOG_2PI + jnp.log(variance) + squared / variance)


def log_link_moments(
    mean: jax.Array, variance: jax.Array, linear: float | jax.Array, quadratic: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Moments of y when ``E[y|f] = eᶠ``, ``Var[y|f] = linear · eᶠ + quadratic · e²ᶠ`` and f ~ N(mean, variance)."""
    rate = jnp.exp(mean + 0.5 * variance)
    spread = quadratic * jnp.exp(variance) + jnp.expm1(variance)
    return rate, linear * rate + rate**2 * spread


def log_softplus(f: jax.Array) -> jax.Array:
    """``log log(1 + eᶠ)``, which is f − eᶠ/2 + … where eᶠ underflows."""
    low = f < -15
    return jnp.where(low, f - 0.5 * jnp.exp(f), jnp.log(softplus(jnp.where(low, 0.0, f))))


@functools.lru_cache(maxsize=2)
def _erfcx_polynomial(degree: int) -> np.ndarray:
    """
    Coefficients of ``log(erfcx(z)/t)`` in ``2 t − 1``, with ``t = 2/(2 + z)``: Chebyshev interpolation on 0 ≤ z < ∞, as
    for erfc by Press et al. 2007, section 6.2.2.
    """

    def target(u: Any) -> Any:
        t = 0.5 * (u + 1.0)
        return np.log(erfcx(2.0 / t - 2.0) / t)

    return polynomial.chebyshev.cheb2poly(polynomial.chebyshev.chebinterpolate(target, degree))


def _erfcx_factors(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """t and p with ``e^(z²) erfc z = t eᵖ``, for z ≥ 0, to rounding."""
    t, total = 1 / (1 + 0.5 * z), jnp.zeros_like(z)
    for c in _erfcx_polynomial(28 if z.dtype == jnp.float64 else 11)[::-1]:
        total = total * (2 * t - 1) + float(c)
    return t, total


def _log_tails(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``log Φ(−|x|) + ½ x²`` and Φ(|x|)."""
    t, exponent = _erfcx_factors(SQRT_HALF * jnp.abs(x))
    scaled = jnp.log(t) + exponent - math.log(2)
    return scaled, 1 - jnp.exp(scaled - 0.5 * x**2)


@jax.custom_jvp
def hazard(x: jax.Array) -> jax.Array:
    """φ(x)/Φ(x), the derivative of log Φ."""
    scaled, upper = _log_tails(x)
    return jnp.exp(-0.5 * LOG_2PI - jnp.where(x < 0, scaled, 0.5 * x**2)) / jnp.where(x < 0, 1.0, upper)


@jax.custom_jvp
def log_normal_cdf(x: jax.Array) -> jax.Array:
    """log Φ(x). JAX's own has a float32 gradient that is a third of the truth at x = −10⁴."""
    scaled, _ = _log_tails(x)
    lower = scaled - 0.5 * x**2
    return jnp.where(x < 0, lower, jnp.log1p(-jnp.exp(lower)))


hazard.defjvps(lambda t, hazard, x: -hazard * (x + hazard) * t)
log_normal_cdf.defjvps(lambda t, _, x: hazard(x) * t)


def _exp_series(x: jax.Array) -> jax.Array:
    """``eˣ − 1 − x`` of x between −1 and 1."""
    return x**2 * horner([1.0 / math.factorial(k) for k in range(2, 12 if x.dtype == jnp.float32 else 20)], x)


@jax.custom_jvp
def exp_excess(x: jax.Array) -> jax.Array:
    """``eˣ − 1 − x``, which is x²/2 + … near 0: half the deviance of a Poisson or gamma variable, per unit."""
    near = jnp.abs(x) < 0.5
    return jnp.where(near, _exp_series(jnp.where(near, x, 0.0)), jnp.expm1(x) - x)


exp_excess.defjvps(lambda t, _, x: jnp.expm1(x) * t)


@jax.custom_jvp
def expected_excess(mean: jax.Array, half_variance: jax.Array) -> jax.Array:
    """``E[eˣ − 1 − x]`` of a normal variable x."""
    return exp_excess(mean + half_variance) + half_variance


expected_excess.defjvps(lambda t, _, m, h: jnp.expm1(m + h) * t, lambda t, _, m, h: jnp.exp(m + h) * t)


def log_excess(x: jax.Array) -> jax.Array:
    """``x − log(1 + x)``, which is x²/2 + … near 0."""
    return exp_excess(jnp.log1p(x))


def stirling(x: jax.Array, log_x: jax.Array | None = None) -> jax.Array:
    """
    ``log Γ(x) − (x − ½) log x + x − ½ log 2π``, about 1/(12x): what Stirling's formula leaves.

    Log-densities of counts are deviances plus such remainders (Loader 2000, "Fast and accurate computation of binomial
    probabilities"), where log-gammas of large arguments would cancel.

    :param x: positive; it may underflow to 0 where its logarithm is there.
    :param log_x: its logarithm, if that is known more precisely.
    """
    return _stirling(x, jnp.log(x) if log_x is None else log_x)


#: Coefficients of Stirling's series, in x⁻¹, x⁻³, …; and how far arguments below that are shifted.
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400, 43867 / 244188)
SHIFT = 8


def _shifted(x: jax.Array) -> tuple[jax.Array, ...]:
    """Which x are small; x, or 1 where it is large; x + 8, or x; and x (x + 1) … (x + 7)/x with its derivative."""
    small = x < SHIFT
    low = jnp.where(small, x, 1.0)
    product, slope = low + 1.0, jnp.ones_like(x)
    for k in range(2, SHIFT):
        product, slope = product * (low + k), slope * (low + k) + product
    return small, low, jnp.where(small, x + SHIFT, x), product, slope


@jax.custom_jvp
def _stirling(x: jax.Array, log_x: jax.Array) -> jax.Array:
    small, low, above, product, _ = _shifted(x)
    series = horner(STIRLING, above**-2) / above
    shift = (above - 0.5) * jnp.log(above) - SHIFT - jnp.log(product) - (low + 0.5) * jnp.where(small, log_x, 0.0)
    return series + jnp.where(small, shift, 0.0)


@_stirling.defjvp
def _(primals: Any, tangents: Any) -> Any:
    x, log_x = primals
    small, low, above, product, slope = _shifted(x)
    series = horner([-(2 * k + 1) * c for k, c in enumerate(STIRLING)], above**-2) / above**2
    shift = jnp.log(above) + 1.0 - 0.5 / above - slope / product - jnp.where(small, log_x, 0.0)
    by_log = jnp.where(small, -(low + 0.5), 0.0)
    return _stirling(x, log_x), (series + jnp.where(small, shift, 0.0)) * tangents[0] + by_log * tangents[1]


@jax.custom_jvp
def log_sigmoids(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log σ(x) and log σ(−x), from one exponential and one logarithm."""
    near = -jnp.log(1.0 + jnp.exp(-jnp.abs(x)))
    return near + jnp.minimum(x, 0.0), near - jnp.maximum(x, 0.0)


@log_sigmoids.defjvp
def _(primals: Any, tangents: Any) -> Any:
    up, down = sigmoids(*primals)
    return log_sigmoids(*primals), (down * tangents[0], -up * tangents[0])


@jax.custom_jvp
def sigmoids(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """σ(x) and σ(−x), each accurate relative to itself."""
    e = jnp.exp(-jnp.abs(x))
    large, small = 1.0 / (1.0 + e), e / (1.0 + e)
    return jnp.where(x > 0, large, small), jnp.where(x > 0, small, large)


@sigmoids.defjvp
def _(primals: Any, tangents: Any) -> Any:
    up, down = sigmoids(*primals)
    return (up, down), (up * down * tangents[0], -up * down * tangents[0])


@jax.custom_jvp
def _share(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a/(a + b)``, with derivatives that do not square the sum: it overflows in float32 from 2e19 on."""
    return a / (a + b)


@_share.defjvp
def _(primals: Any, tangents: Any) -> Any:
    a, b = primals
    return _share(a, b), (_share(b, a) * tangents[0] - _share(a, b) * tangents[1]) / (a + b)


@jax.custom_jvp
def bernoulli_deviance(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
    """
    ``log(v + w eˣ) − w x``, the divergence of Bernoulli(w) from Bernoulli(p) with logit p = logit w + x; v = 1 − w.

    Non-negative, convex, and w v x²/2 + … near 0; accurate relative to itself, however small w or v is.
    """
    w, v, x = _rarer(w, v, x)
    near, high = jnp.abs(x) < 1, x > 30
    small, low = jnp.where(near, x, 0.0), jnp.where(high, 30.0, x)
    u = w * jnp.expm1(low)
    logarithm = jnp.log1p(u)
    close = w * _exp_series(small) - _exp_series(jnp.where(near, logarithm, 0.0))
    far = v * x + jnp.log(w + v * jnp.exp(-jnp.where(high, x, 30.0)))
    return jnp.where(near, close, jnp.where(high, far, logarithm - w * x))


@bernoulli_deviance.defjvp
def _(primals: Any, tangents: Any) -> Any:
    w, v, x = _rarer(*primals)
    flip = primals[0] > primals[1]
    near = jnp.abs(x) < 1
    small, below = jnp.where(near, x, 0.0), jnp.exp(-maximum(x, 0.0))
    rise = jnp.where(x > 0, -jnp.expm1(-maximum(x, 0.0)), jnp.expm1(-maximum(-x, 0.0)))
    total = jnp.where(x > 0, w + v * below, 1.0 + w * rise)
    steep = rise / maximum(total, jnp.finfo(x.dtype).tiny)  # of log(v + w eˣ) in w
    by_w = jnp.where(near, (below * _exp_series(small) - small * w * rise) / total, steep - x)
    by_w, by_x = (jnp.where(flip, -d, d) for d in (by_w, w * v * steep))
    return bernoulli_deviance(*primals), by_w * tangents[0] + by_x * tangents[2]


def _rarer(w: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    """The same of the rarer of the two outcomes: no exponential of x times a share that is nearly 1."""
    flip = w > v
    return jnp.where(flip, v, w), jnp.where(flip, w, v), jnp.where(flip, -x, x)


def log_binomial(
    y: jax.Array, r: jax.Array, log_mean: jax.Array, log_r: jax.Array | None = None, gap: ArrayLike = 0.0
) -> jax.Array:
    """
    Log-density of a negative binomial count, also where y and r are large: ``log Γ(y + r)/(Γ(r) y!) + y log p +
    r log(1 − p)`` with ``log p/(1 − p) = log_mean − log r``. A binomial one lacks ``log (y + r)/r``.

    :param y: successes, at least 0.
    :param r: failures, positive; it may underflow to 0 where its logarithm is there.
    :param log_mean: logarithm of the mean.
    :param log_r: log r, if that is known more precisely.
    :param gap: ``E log(1 + eˣ) − log(1 + e^E[x])``, if the expectation is meant over log_mean with this mean.
    """
    log_r = jnp.log(r) if log_r is None else log_r
    some = jnp.where(y > 0, y, 1.0)
    log_some, total = jnp.log(some), some + r
    remainders = stirling(total) - stirling(r, log_r) - stirling(some)
    constant = remainders - 0.5 * (LOG_2PI + log_some + jnp.log(total) - log_r)
    deviance = bernoulli_deviance(_share(some, r), _share(r, some), log_mean - log_some)
    return jnp.where(y > 0, constant - total * (deviance + gap), -r * (softplus(log_mean - log_r) + gap))


def log_poisson(y: jax.Array, log_rate: jax.Array, half_variance: ArrayLike = 0.0) -> jax.Array:
    """
    E[log Poisson(y; rate)] where log rate ~ N(log_rate, 2 half_variance); accurate for large counts.

    :param y: counts, at least 0.
    """
    some = jnp.where(y > 0, y, 1.0)
    excess = expected_excess(*jnp.broadcast_arrays(log_rate - jnp.log(some), half_variance))
    positive = -0.5 * (LOG_2PI + jnp.log(some)) - stirling(some) - some * excess
    return jnp.where(y > 0, positive, -jnp.exp(log_rate + half_variance))


def log_gamma_density(
    log_y: jax.Array, concentration: jax.Array, log_mean: jax.Array, half_variance: ArrayLike = 0.0
) -> jax.Array:
    """E[log Gamma(y; concentration, mean)] where log mean ~ N(log_mean, 2 half_variance)."""
    a = concentration
    log_a = jnp.log(a)
    excess = expected_excess(*jnp.broadcast_arrays(log_y - log_mean, half_variance))
    return 0.5 * (log_a - LOG_2PI) - stirling(a, log_a) - log_y - a * excess


def log_scaled_bessel(x: jax.Array) -> jax.Array:
    """``log(e⁻ˣ I₀(x))``; from 30 on by the asymptotic series, whose derivative does not cancel."""
    large = x > 30
    series, inverse = jnp.zeros_like(x), 1 / (8 * jnp.where(large, x, 30.0))
    for k in range(9, 0, -1):
        series = (2 * k - 1) ** 2 / k * inverse * (1 + series)
    far = jnp.log1p(series) - 0.5 * (LOG_2PI + jnp.log(jnp.where(large, x, 30.0)))
    return jnp.where(large, far, jnp.log(i0e(jnp.where(large, 30.0, x))))


#: Number of points of Gauss's rule for the normal mass of narrow intervals, exact to 7e-9 and 2e-15.
LEGENDRE = {"float32": 6, "float64": 10}


@jax.custom_jvp
def log_normal_mass(lower: jax.Array, upper: jax.Array, width: jax.Array) -> jax.Array:
    """
    ``log(Φ(upper) − Φ(lower))``, accurate in both tails and for narrow intervals; with slopes that are, too.

    :param lower: lower end, or −∞; of the shape of the others.
    :param upper: upper end, or ∞.
    :param width: ``upper − lower``, which may be known more precisely than the two.
    """
    return _mass_and_slopes(lower, upper, width)[0]


@log_normal_mass.defjvp
def _(primals: Any, tangents: Any) -> Any:
    value, *slopes = _mass_and_slopes(*primals)
    return value, sum(slope * tangent for slope, tangent in zip(slopes, tangents, strict=True))


def _mass_and_slopes(lower: jax.Array, upper: jax.Array, width: jax.Array) -> tuple[jax.Array, ...]:
    """The value of :func:`log_normal_mass` and its slopes in the three arguments."""
    flip = lower + upper > 0  # to the left tail, where nothing cancels
    near, far = jnp.where(flip, -lower, upper), jnp.where(flip, -upper, lower)
    one_sided = jnp.isinf(far)
    middle = jnp.where(one_sided, 0.0, 0.5 * (near + far))
    half = jnp.where(one_sided, 0.1, 0.5 * width)
    narrow = ~one_sided & (half * (1 + jnp.abs(middle)) < 1)
    # e^(−½ m²) ∫ e^(−m t − ½ t²) dt
    m, h = jnp.where(narrow, middle, 0.0), jnp.where(narrow, half, 0.1)
    body = jnp.zeros_like(m)
    for x, weight in zip(*polynomial.legendre.leggauss(LEGENDRE.get(m.dtype.name, 10)), strict=True):
        body = body + float(weight) * jnp.exp(-h * float(x) * (m + 0.5 * h * float(x)))
    small = jnp.log(h * body) - 0.5 * (m**2 + LOG_2PI)
    rise = jnp.expm1(m * h)
    fall, ends = rise / (1 + rise), jnp.exp(-0.5 * h**2) / (h * body)
    by_middle, by_half = -(rise + fall) * ends, (2 + rise - fall) * ends

    # Φ(−|x|) = ½ t exp(p − ½ x²) at both ends; the near one may be on the right.
    n, f = jnp.where(narrow, 0.0, jnp.where(jnp.isinf(near), 40.0, near)), jnp.where(narrow | one_sided, -1.0, far)
    left = n < 0
    t_near, p_near = _erfcx_factors(SQRT_HALF * jnp.abs(n))
    t_far, p_far = _erfcx_factors(SQRT_HALF * jnp.abs(f))
    apart = 0.5 * (f - n) * (f + n)
    lost = jnp.exp(jnp.where(left, p_far - p_near - apart, p_far - 0.5 * f**2))
    lost = jnp.where(one_sided, 0.0, t_far * lost / jnp.where(left, t_near, 2.0))
    scaled = jnp.log(0.5 * t_near * (1 - jnp.where(left, lost, 0.0))) + p_near
    above = jnp.log1p(-jnp.where(left, 0.5, lost + 0.5 * t_near * jnp.exp(p_near - 0.5 * n**2)))
    value = jnp.where(narrow, small, jnp.where(left, scaled - 0.5 * n**2, above))

    at_near = jnp.where(left, -scaled, -0.5 * n**2 - above)
    at_far = jnp.where(left, -scaled - apart, -0.5 * f**2 - above)
    by_near, by_far = jnp.exp(at_near - 0.5 * LOG_2PI), jnp.where(one_sided, 0.0, -jnp.exp(at_far - 0.5 * LOG_2PI))
    by_near, by_far = (jnp.where(narrow, 0.5 * by_middle, slope) for slope in (by_near, by_far))
    by_width = jnp.where(narrow, 0.5 * by_half, 0.0)
    return value, jnp.where(flip, -by_near, by_far), jnp.where(flip, -by_far, by_near), by_width


def standardized(end: jax.Array, mean: jax.Array, scale: jax.Array) -> jax.Array:
    """``(end − mean)/scale``; ends that are infinite stay so, without a gradient that is NaN."""
    finite = jnp.isfinite(end)
    return jnp.where(finite, (jnp.where(finite, end, 0.0) - mean) / scale, end)


#: log F of each link, F a distribution function with a log-concave density: then log F is concave too, and so is
#: ``log(F(b + x) − F(a + x))`` (Prékopa 1973; Pratt 1981).
LOG_CDF: dict[str, Callable[[jax.Array], jax.Array]] = {"logit": log_sigmoid, "probit": log_normal_cdf}
