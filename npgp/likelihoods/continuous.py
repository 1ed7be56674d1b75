"""Likelihoods of real and of positive observations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import i0e, i1e, logsumexp
from jax.typing import ArrayLike
from numpyro import distributions as dist

from npgp import linalg
from npgp.checks import is_traced, positive_fields, require_positive
from npgp.likelihoods.base import Likelihood, check_nodes
from npgp.likelihoods.numerics import (
    LOG_2PI,
    SQRT_HALF,
    at_least,
    column_of,
    deviation,
    exp_excess,
    floats,
    hazard,
    log_excess,
    log_gamma_density,
    log_link_moments,
    log_normal,
    log_normal_cdf,
    log_scaled_bessel,
    stirling,
)
from npgp.likelihoods.quadrature import NUM_NODES, trapezoid
from npgp.programs.backend import maximum
from npgp.pytrees import pytree, static


@pytree
@dataclass(frozen=True, eq=False, init=False)
class Gaussian(Likelihood):
    """
    y = f + noise, noise ~ N(0, variance). All in closed form.

    Log-concave: log p is a quadratic in f, −½ (y − f)²/variance. Its proof gives more than that alone.

    .. code-block:: python

        np.testing.assert_allclose(
            npgp.Gaussian(scale=0.3).variance, npgp.Gaussian(variance=0.09).variance
        )

    :param variance: noise variance, positive; a number or one value per row.
    :param scale: the noise's standard deviation instead, likewise.
    :raises TypeError: unless one of the two is given, by its name.
    :raises ValueError: for one that is known to be non-positive.
    """

    variance: ArrayLike
    proof: ClassVar[str] = "gaussian"

    def __init__(self, *, variance: ArrayLike | None = None, scale: ArrayLike | None = None) -> None:
        if (variance is None) == (scale is None):
            given = "neither" if scale is None else "both"
            raise TypeError(f"Gaussian takes variance=… or scale=… (the standard deviation); {given} was given.")
        if scale is not None:
            variance = jnp.square(jnp.asarray(require_positive(scale, "Gaussian scale")))
        object.__setattr__(self, "variance", variance)
        positive_fields(self, "variance")

    @property
    def scale(self) -> jax.Array:
        """The noise's standard deviation."""
        return jnp.sqrt(jnp.asarray(self.variance))

    @property
    def precision(self) -> jax.Array:
        """One over the noise variance, which is the site precision."""
        return 1 / jnp.asarray(self.variance)

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        return self.log_marginal(y, f, 0.0)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, variance = jnp.broadcast_arrays(*floats(f, self.variance))
        return f + jnp.sqrt(variance) * jax.random.normal(rng_key, f.shape, f.dtype)

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, noise = floats(y, mean, variance, self.variance)
        return log_normal((y - mean) ** 2 + variance, noise)

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, noise = floats(y, mean, variance, self.variance)
        return log_normal((y - mean) ** 2, variance + noise)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, noise = floats(mean, variance, self.variance)
        return mean, variance + noise


def likelihood_or_noise(likelihood: Any, noise_variance: Any, *, only_gaussian: bool = True) -> Any:
    """
    Check the two ways to state the noise of a density of observations: a likelihood, or σ² by its name.

    :param likelihood: a likelihood, or ``None``. A bare number is refused: variance and scale look alike.
    :param noise_variance: σ², or ``None``.
    :param only_gaussian: whether no other likelihood than :class:`Gaussian` will do.
    :return: the likelihood.
    :raises TypeError: unless one of the two is given, and for a likelihood that is none, or of another kind.
    :raises ValueError: for a variance that is known to be non-positive.
    """
    accepted = "npgp.Gaussian(scale=…)" if only_gaussian else "a likelihood such as npgp.Gaussian(scale=…)"
    if (likelihood is None) == (noise_variance is None):
        given = "neither" if likelihood is None else "both"
        raise TypeError(f"likelihood must be {accepted}, or noise_variance=… in its stead (σ²); {given} was given.")
    if likelihood is None:
        return Gaussian(variance=require_positive(noise_variance, "noise_variance"))
    if not isinstance(likelihood, Gaussian if only_gaussian else Likelihood):
        raise TypeError(
            f"likelihood is {likelihood!r:.80}; it must be {accepted}, and a noise variance is spelled noise_variance=…"
        )
    return likelihood


def noise_variance_of(likelihood: Likelihood) -> ArrayLike:
    """
    σ² of Gaussian noise.

    :raises AttributeError: for another likelihood.
    """
    if not isinstance(likelihood, Gaussian):
        raise AttributeError(f"noise_variance: the likelihood is {type(likelihood).__name__}, not Gaussian.")
    return likelihood.variance


@pytree
@dataclass(frozen=True, eq=False)
class StudentT(Likelihood):
    """
    y = f + scale · noise with Student-t noise: robust to outliers.

    Not log-concave: log p curves upward where ``|y − f| > scale √df``. Its expected curvature is single-peaked instead.

    It is a mixture of Gaussians over their precision. The integrals over the logarithm of that precision have smooth
    integrands however narrow the likelihood is.

    .. code-block:: python

        far = np.array(10.0)  # an outlier costs less than with normal noise
        heavy, normal = npgp.StudentT(df=4.0, scale=1.0), npgp.Gaussian(scale=1.0)
        assert heavy.log_prob(0.0, far) > normal.log_prob(0.0, far)

    :param df: degrees of freedom, positive.
    :param scale: scale, positive.
    :param num_nodes: nodes of those integrals; half as many in float32.
    :raises ValueError: for a parameter that is known to be non-positive.
    """

    _: KW_ONLY
    df: ArrayLike
    scale: ArrayLike
    num_nodes: int = static(NUM_NODES)
    proof: ClassVar[str] = "single-peaked"

    def __post_init__(self) -> None:
        positive_fields(self, "df", "scale")
        check_nodes(self)

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        f, y, df, scale = floats(f, y, self.df, self.scale)
        return self._log_peak(df, scale) - 0.5 * (df + 1) * jnp.log1p(((y - f) / scale) ** 2 / df)

    @staticmethod
    def _log_peak(df: Any, scale: Any) -> Any:
        half = 0.5 * df
        # Log-gammas by Stirling's formula, of which nothing is left but a remainder where df is large.
        normalizer = stirling(half + 0.5) - stirling(half) - half * log_excess(1 / df)
        return normalizer - 0.5 * LOG_2PI - jnp.log(scale)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, df, scale = jnp.broadcast_arrays(*floats(f, self.df, self.scale))
        return f + scale * jax.random.t(rng_key, df, f.shape, f.dtype)

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        return self._expectations(y, mean, variance)(variance)

    def expected_log_probs(
        self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike, more: ArrayLike
    ) -> Callable[[jax.Array], jax.Array]:
        fixed, mean, most = jax.tree.map(lax.stop_gradient, (self, mean, variance + more))
        return fixed._expectations(y, mean, most)

    def _expectations(self, y: ArrayLike, mean: ArrayLike, most: ArrayLike) -> Callable[[ArrayLike], jax.Array]:
        """E[log p] as a function of the variance, from the nodes for the largest."""
        # Frullani: log(1 + a) = ∫ e⁻ˣ (1 − e⁻ᵃˣ) dx/x, with E e⁻ᵃˣ Gaussian; over u = log x.
        y, mean, most, df, scale = floats(y, mean, most, self.df, self.scale)
        unit, log_peak, double = df * scale**2, self._log_peak(df, scale), y.dtype == jnp.float64
        r = (y - mean) ** 2 / unit
        # To the right the integrand is below e⁻²⁴, and e⁻³⁸ in float64.
        low, high, nodes = (-11.0, 3.65, self.num_nodes) if double else (-6.0, 3.2, max(self.num_nodes // 2, 2))
        start = lax.stop_gradient(low - jnp.log1p(at_least(most, 0) / unit + r))
        u, step = trapezoid(start, jnp.full_like(start, high), nodes)
        x = jnp.exp(u)
        decay = step * jnp.exp(-x)
        # To the left it is s₁ x − s₂ x² + …, whose sums are geometric.
        least, ratio = x[0], jnp.exp(-step)
        first, second = (step * ratio**k / (1 - ratio**k) for k in (1, 2))

        def expected(variance: ArrayLike) -> jax.Array:
            s = at_least(floats(variance, y)[0], 0) / unit
            a, both = least * s, least * (s + r)
            below = first * both - second * (a * (2 * both - a) + 0.5 * both**2 + least * both)
            return log_peak - 0.5 * (df + 1) * (below + _complements(x, decay, *jnp.broadcast_arrays(s, r)))

        return expected

    @property
    def greatest_curvature(self) -> Any:
        return (self.df + 1.0) / (self.df * jnp.square(jnp.asarray(self.scale)))

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        # ∫ Gamma(τ; df/2, df/2) N(y; mean, variance + scale²/τ) dτ, over u = log τ.
        y, mean, variance, df, scale = floats(y, mean, variance, self.df, self.scale)
        squared, half = (y - mean) ** 2, 0.5 * df
        # The mode lies between that for no variance and u = 1/df; 20 nats of decay on either side.
        standardized = squared / scale**2
        mode = jnp.minimum(jnp.log1p((1 - standardized) / (df + standardized)), 0)
        decay = jnp.sqrt(40 / half)
        lower, upper = decay + 20 / half, 1 / df + jnp.minimum(decay, 1 + jnp.log1p(40 / half))
        # The left tail is long for small df: u = mode + unit (t - e⁻ᵗ) covers it in longer steps.
        unit = lax.stop_gradient(jnp.minimum(decay, 1))
        last = (upper - mode) / unit
        t, step = trapezoid(-jnp.log1p(lower / unit), last + jnp.exp(-last), self.num_nodes)
        u = lax.stop_gradient(mode) + unit * (t - jnp.exp(-t))
        log_step = jnp.log(step * unit * (1 + jnp.exp(-t)))
        log_mixing = 0.5 * (jnp.log(half) - LOG_2PI) - stirling(half) - half * exp_excess(u)
        # Where u is below −70 the integrand is below e⁻³⁵ of its peak, and for small df the variance would overflow.
        total = at_least(variance, 0) + scale**2 * jnp.exp(jnp.minimum(-u, 70))
        return logsumexp(log_step + log_mixing + log_normal(squared, total), axis=0)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """As always; the mean is NaN unless df > 1, and the variance infinite unless df > 2."""
        mean, variance, df, scale = floats(mean, variance, self.df, self.scale)
        noise = jnp.where(df > 2, scale**2 * df / jnp.where(df > 2, df - 2, 1), jnp.inf)
        return jnp.where(df > 1, mean, jnp.nan), jnp.where(df > 1, variance + noise, jnp.nan)


@jax.custom_jvp
def _complements(x: jax.Array, weights: jax.Array, s: jax.Array, r: jax.Array) -> jax.Array:
    """``Σ w (1 − E exp(−x z²))`` over x, z a normal variable with variance s and the square r of its mean."""
    return linalg.weighted_sum(jnp.ones(len(x)), weights * _complement(x, s, r)[0])


def _complement(x: Any, s: Any, r: Any) -> Any:
    inflation = 1 + 2 * x * s
    lost = -jnp.expm1(-x * r / inflation)
    complement = lost + (1 - lost) * (2 * x * s / (inflation + jnp.sqrt(inflation)))
    return complement, x / inflation


@_complements.defjvp
def _(primals: Any, tangents: Any) -> Any:
    # One pass, for which XLA would compute all terms anew for each sum.
    x, weights, s, r = primals
    complement, by_r = _complement(x, s, r)
    kept = (1 - complement) * by_r
    each = complement, kept * (1 - 2 * r * by_r), kept
    value, by_s, by_r = (linalg.weighted_sum(jnp.ones(len(x)), weights * terms) for terms in each)
    return value, by_s * tangents[2] + by_r * tangents[3]


@pytree
@dataclass(frozen=True, eq=False)
class AsymmetricLaplace(Likelihood):
    """
    f is a quantile of y: quantile regression (Koenker & Machado 1999; Yu & Moyeed 2001). All in closed form.

    The density is ``q (1 − q)/scale · exp(−ρ(y − f)/scale)`` for the quantile q, with ``ρ(u) = q u`` above 0 and
    ``(q − 1) u`` below.

    Log-concave: log p is minus the convex ρ, plus a constant.

    .. code-block:: python

        upper = npgp.likelihoods.AsymmetricLaplace(scale=0.1, quantile=0.9)
        assert upper.log_prob(1.0, 0.5) > upper.log_prob(0.0, 0.5)  # nine in ten are below f

    :param scale: scale, positive.
    :param quantile: q, between 0 and 1: the probability that y is below f.
    :raises ValueError: for a scale that is known to be non-positive, or a quantile outside (0, 1).
    """

    _: KW_ONLY
    scale: ArrayLike
    quantile: ArrayLike
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self) -> None:
        positive_fields(self, "scale", "quantile")
        if not is_traced(self.quantile) and np.any(np.asarray(self.quantile) >= 1):
            raise ValueError(f"{type(self).__name__} quantile is {self.quantile}; it must be between 0 and 1.")

    def _rates(self, *values: ArrayLike) -> tuple[jax.Array, ...]:
        """The values, and how fast log p falls above f and below."""
        *arrays, scale, quantile = floats(*values, self.scale, self.quantile)
        return *arrays, quantile / scale, (1 - quantile) / scale

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        f, y, above, below = self._rates(f, y)
        return _log_peak(above, below) - 0.5 * ((above - below) * (y - f) + (above + below) * jnp.abs(y - f))

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, above, below = jnp.broadcast_arrays(*self._rates(f))
        up, down = jax.random.exponential(rng_key, (2, *f.shape), f.dtype)
        return f + up / above - down / below

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, above, below = self._rates(y, mean, variance)
        sd = deviation(variance)
        # |y − mean| stands apart: no derivative in the variance as a difference of large numbers.
        z = jnp.abs(y - mean) / sd
        excess = math.sqrt(2 / math.pi) * jnp.exp(-0.5 * z**2) - z * lax.erfc(z * SQRT_HALF)
        loss = (above - below) * (y - mean) + (above + below) * (jnp.abs(y - mean) + sd * excess)
        return _log_peak(above, below) - 0.5 * loss

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, above, below = self._rates(y, mean, variance)
        sd = deviation(variance)
        z = (y - mean) / sd

        def side(z: Any, r: Any) -> Any:  # of y = f; no difference of two large numbers where r is large
            inner = r + z
            near = -0.5 * (z**2 + LOG_2PI) - jnp.log(hazard(-maximum(inner, 0.0)))
            far = r * (0.5 * r + z) + log_normal_cdf(jnp.where(inner > 0, 0, -inner))  # a maximum halves gradients at 0
            return jnp.where(inner > 0, near, far)

        return jnp.logaddexp(side(z, below * sd), side(-z, above * sd)) + _log_peak(above, below)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, above, below = self._rates(mean, variance)
        return mean + 1 / above - 1 / below, variance + 1 / above**2 + 1 / below**2


def _log_peak(above: jax.Array, below: jax.Array) -> jax.Array:
    return jnp.log(above) + jnp.log(below) - jnp.log(above + below)


@pytree
@dataclass(frozen=True, eq=False)
class Laplace(AsymmetricLaplace):
    """
    y = f + noise, noise with density ``e^(−|noise|/scale)/(2 scale)``. All in closed form.

    Log-concave: log p is −|y − f|/scale, minus a norm. It is :class:`AsymmetricLaplace` at the median.

    .. code-block:: python

        robust = npgp.likelihoods.Laplace(scale=0.5)
        assert robust.expected_log_prob(y, np.zeros(30), np.ones(30)).shape == (30,)

    :param scale: scale, positive.
    :raises ValueError: for a scale that is known to be non-positive.
    """

    _: KW_ONLY
    quantile: ArrayLike = field(default=0.5, init=False)

    def _rates(self, *values: ArrayLike) -> tuple[jax.Array, ...]:
        *arrays, scale = floats(*values, self.scale)
        return *arrays, 1 / scale, 1 / scale


@pytree
@dataclass(frozen=True, eq=False)
class Gamma(Likelihood):
    """
    Positive y with mean eᶠ and variance e²ᶠ/concentration.

    Log-concave: log p is linear in f minus the convex ``concentration · y e⁻ᶠ``.

    .. code-block:: python

        waiting = npgp.likelihoods.Gamma(concentration=2.0)
        assert waiting.log_prob(np.zeros(3), np.array([0.5, 1.0, 2.0])).shape == (3,)

    :param concentration: shape of the gamma distribution, positive.
    :param num_nodes: nodes of :meth:`log_marginal`; the rest is in closed form.
    :raises ValueError: for a parameter that is known to be non-positive.
    """

    concentration: ArrayLike = field(kw_only=True)
    num_nodes: int = static(NUM_NODES, kw_only=True)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self) -> None:
        positive_fields(self, "concentration")
        check_nodes(self)

    def _support(self, y: Any) -> tuple[Any, str]:
        return (y > 0) & (abs(y) < np.inf), "positive"

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        return self.expected_log_prob(y, f, 0.0)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, a = jnp.broadcast_arrays(*floats(f, self.concentration))
        return jnp.exp(f) / a * jax.random.gamma(rng_key, a, f.shape, f.dtype)

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, a = floats(y, mean, variance, self.concentration)
        return log_gamma_density(jnp.log(y), a, mean, 0.5 * variance)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, a = floats(mean, variance, self.concentration)
        return log_link_moments(mean, variance, 0.0, 1 / a)


@pytree
@dataclass(frozen=True, eq=False)
class Exponential(Gamma):
    """
    Exponentially distributed y with mean eᶠ: :class:`Gamma` with concentration 1, and log-concave for its reason.

    .. code-block:: python

        waiting = npgp.likelihoods.Exponential()
        assert waiting.log_prob(np.zeros(3), np.array([0.5, 1.0, 2.0])).shape == (3,)

    :param num_nodes: nodes of :meth:`log_marginal`; the rest is in closed form.
    """

    concentration: ArrayLike = field(default=1.0, init=False)

    def _support(self, y: Any) -> tuple[Any, str]:
        return (y >= 0) & (abs(y) < np.inf), "non-negative"

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance = floats(y, mean, variance)
        return -mean - y * jnp.exp(0.5 * variance - mean)


@pytree
@dataclass(frozen=True, eq=False)
class VonMises(Likelihood):
    """
    Angles y in radians around f, with density ``e^(concentration · cos(y − f))`` over its norm (Mardia & Jupp 2000).

    Not log-concave: the density is periodic. Its expected curvature, ``concentration · e^(−variance/2) cos(y − mean)``,
    is single-peaked, for it falls with the variance where it is positive.

    Averages over a wide f, of standard deviation 1 or more, are by the density's Fourier series: ``E cos n(y − f) =
    e^(−n² variance/2) cos n(y − mean)``. :meth:`moments` are the mean direction and the circular variance, one less the
    mean resultant length.

    .. code-block:: python

        headings = npgp.likelihoods.VonMises(concentration=4.0)
        np.testing.assert_allclose(
            headings.log_prob(0.1, 0.3), headings.log_prob(0.1, 0.3 + 2 * np.pi), rtol=1e-5
        )

    :param concentration: positive; one over the variance where that is small.
    :param num_nodes: nodes of :meth:`log_marginal` where f is narrow; the rest is in closed form.
    :raises ValueError: for a concentration that is known to be non-positive.
    """

    _: KW_ONLY
    concentration: ArrayLike
    num_nodes: int = static(NUM_NODES)
    proof: ClassVar[str] = "single-peaked"

    def __post_init__(self) -> None:
        positive_fields(self, "concentration")
        check_nodes(self)

    @property
    def greatest_curvature(self) -> jax.Array:
        return jnp.asarray(self.concentration)

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        return self.expected_log_prob(y, f, 0.0)

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, k = floats(y, mean, variance, self.concentration)
        loss = 2 * jnp.square(jnp.sin(0.5 * (y - mean))) - jnp.expm1(-0.5 * variance) * jnp.cos(y - mean)
        return -k * loss - LOG_2PI - log_scaled_bessel(k)

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, k = jnp.broadcast_arrays(*floats(y, mean, variance, self.concentration))
        narrow = variance < 1.0
        by_nodes = super().log_marginal(y, mean, jnp.where(narrow, variance, 1.0))
        terms = _bessel_shares(k, 9)  # the next is below e⁻⁵⁰
        n = column_of(jnp.arange(1, 10, dtype=mean.dtype), mean)
        waves = jnp.exp(-0.5 * n**2 * jnp.where(narrow, 1.0, variance)) * jnp.cos(n * (y - mean))
        series = jnp.log1p(2.0 * jnp.sum(jnp.stack(terms) * waves, axis=0)) - LOG_2PI
        return jnp.where(narrow, by_nodes, series)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, k = jnp.broadcast_arrays(*floats(f, self.concentration))
        return dist.VonMises(f, k).sample(rng_key).astype(f.dtype)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, k = jnp.broadcast_arrays(*floats(mean, variance, self.concentration))
        return mean, 1 - jnp.exp(-0.5 * variance) * i1e(k) / i0e(k)


def _bessel_shares(x: jax.Array, count: int) -> list[jax.Array]:
    """``I_n(x)/I_0(x)`` for n = 1, …, count, by the backward recurrence of their ratios (Amos 1974)."""
    first = 40  # with a start that is right for small and for large x
    ratio, ratios = x / (first + 0.5 + jnp.hypot(x, first + 1.5)), []
    for n in range(first, 0, -1):  # I_n/I_(n − 1) from I_(n + 1)/I_n
        ratio = x / (2.0 * n + x * ratio)
        ratios.append(ratio)
    shares = [ratios.pop()]
    for _ in range(count - 1):
        shares.append(shares[-1] * ratios.pop())
    return shares
