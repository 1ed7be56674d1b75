"""Observation models p(y | f) of one latent value each, and their expectations under a Gaussian.

A likelihood knows four things about f ~ N(mean, variance): the expected log-likelihood, its
curvature in the variance (the site precision of a certified conditional), the log of the averaged
likelihood, and the moments of y. Some have closed forms for some likelihoods; otherwise:

- expectations by Gauss-Hermite. Its nodes are symmetric about the mean, so that the curvature of a
  log-concave likelihood comes out non-negative;
- averages of a log-concave likelihood by the trapezoid rule around the mode of
  p(y | f) N(f; mean, variance), stretched so that a likelihood a thousand times narrower than the
  Gaussian costs no accuracy (Gauss-Hermite misses such a peak by many nats);
- Student-t by one-dimensional integrals over the precision of which it is a mixture.

No gradient flows through the places of the nodes, on which an integral does not depend.
:func:`quadrature_error` measures what a rule leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import log_sigmoid, softplus
from jax.scipy.special import gammaln, logsumexp, xlogy
from jax.typing import ArrayLike
from numpy.polynomial.hermite_e import hermegauss
from numpyro.distributions import Distribution

LOG_2PI, SQRT_HALF = math.log(2 * math.pi), math.sqrt(0.5)
#: Default number of quadrature nodes. Measured errors are below 1e-4 nats up to a standard deviation
#: of f of 4 for links and counts, and at any for Student-t with df up to about 100.
NUM_NODES = 64
REACH = 7.0  # standard deviations that a trapezoid rule covers each way: e^-24.5 is left out
MAX_HERMITE = 300  # NumPy's Gauss-Hermite weights overflow beyond
POSITIVE = ("variance", "df", "scale", "exposure", "concentration", "num_nodes")


# ---------------------------------------------------------------- numerics


@functools.lru_cache(maxsize=32)
def _hermite(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a standard normal expectation, in float64."""
    nodes, weights = hermegauss(min(num_nodes, MAX_HERMITE))
    return nodes, weights / weights.sum()


def _trapezoid(lower: jax.Array, upper: jax.Array, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """Equidistant nodes on a new leading axis, and their distance; for integrands that vanish."""
    lower, upper = lax.stop_gradient(jnp.broadcast_arrays(lower, upper))
    fractions = jnp.linspace(0.0, 1.0, num_nodes, dtype=lower.dtype)
    nodes = lower + (upper - lower) * fractions.reshape((-1,) + (1,) * lower.ndim)
    return nodes, (upper - lower) / (num_nodes - 1)


def _floats(*values: ArrayLike) -> list[jax.Array]:
    """Arrays of one floating dtype, which integers and Python numbers do not widen."""
    floating = [v for v in values if jnp.issubdtype(jnp.result_type(v), jnp.floating)]
    dtype = jnp.result_type(1.0, *floating)
    return [jnp.asarray(v, dtype) for v in values]


def _at_least(variance: jax.Array, floor: float) -> jax.Array:
    """The variance raised to a floor; the gradient passes as if it had not been."""
    raised = lax.stop_gradient(jnp.maximum(variance, floor))
    return raised + (variance - lax.stop_gradient(variance))


def _deviation(variance: jax.Array) -> jax.Array:
    """√variance. Derivatives in a variance below machine epsilon would be lost to rounding."""
    return jnp.sqrt(_at_least(variance, float(jnp.finfo(variance.dtype).eps)))


def _log_normal(squared: jax.Array, variance: jax.Array) -> jax.Array:
    """Log-density of N(0, variance) at the root of ``squared``."""
    return -0.5 * (LOG_2PI + jnp.log(variance) + squared / variance)


def _log_link_moments(mean, variance, linear, quadratic):
    """Moments of y when E[y|f] = eᶠ and Var[y|f] = linear · eᶠ + quadratic · e²ᶠ."""
    rate = jnp.exp(mean + 0.5 * variance)
    spread = quadratic * jnp.exp(variance) + jnp.expm1(variance)
    return rate, linear * rate + rate**2 * spread


def _log_softplus(f: jax.Array) -> jax.Array:
    """log log(1 + eᶠ), which is f − eᶠ/2 + … where eᶠ underflows."""
    low = f < -15
    return jnp.where(low, f - 0.5 * jnp.exp(f), jnp.log(softplus(jnp.where(low, 0.0, f))))


@jax.custom_jvp
def _hazard(x: jax.Array) -> jax.Array:
    """φ(x)/Φ(x), the derivative of log Φ; Laplace's continued fraction in the left tail."""
    left, right = jnp.maximum(-x, 8.0), jnp.maximum(x, -8.0)
    tail = left
    for k in range(9, 0, -1):
        tail = left + k / tail
    body = jnp.exp(-0.5 * (right**2 + LOG_2PI)) / (0.5 * lax.erfc(-right * SQRT_HALF))
    return jnp.where(x < -8, tail, body)


@jax.custom_jvp
def _log_normal_cdf(x: jax.Array) -> jax.Array:
    """log Φ(x). JAX's own has a float32 gradient that is a third of the truth at x = −10⁴."""
    left, right = jnp.minimum(x, -8.0), jnp.maximum(x, -8.0)
    tail = -0.5 * (left**2 + LOG_2PI) - jnp.log(_hazard(left))
    return jnp.where(x < -8, tail, jnp.log(0.5 * lax.erfc(-right * SQRT_HALF)))


_hazard.defjvps(lambda t, hazard, x: -hazard * (x + hazard) * t)
_log_normal_cdf.defjvps(lambda t, _, x: _hazard(x) * t)
_LOG_CDF: dict[str, Callable[[jax.Array], jax.Array]] = {
    "logit": log_sigmoid,
    "probit": _log_normal_cdf,
}


# ---------------------------------------------------------------- what all likelihoods share


def _is_concrete(value: Any) -> bool:
    numbers = (int, float, list, tuple, np.ndarray, np.generic, jax.Array)
    return isinstance(value, numbers) and not isinstance(value, jax.core.Tracer)


def _static(default: Any = dataclasses.MISSING, accepted: tuple = ()) -> Any:
    """A field that is no array; if ``accepted``, one of these values."""
    return dataclasses.field(default=default, metadata={"static": True, "accepted": accepted})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field, _static))
def _likelihood(cls):
    """A frozen dataclass and pytree: static fields are metadata, the rest are children.

    Rebuilding skips ``__init__`` and its checks: gradients have this structure too, for example.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    children = tuple(field.name for field in fields if field.name not in static)

    def flatten(self):
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in children]
        return keyed, tuple(getattr(self, name) for name in static)

    def unflatten(metadata, values):
        self = object.__new__(cls)
        for name, value in zip((*static, *children), (*metadata, *values), strict=True):
            object.__setattr__(self, name, value)
        return self

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


class Likelihood:
    """p(y | f) for one latent value per observation; the elements of all array arguments broadcast.

    Parameters may be traced, and may have one value per row. A subclass gives :meth:`log_prob`,
    :meth:`sample` and :meth:`moments`; the other methods have defaults, which need ``num_nodes``.
    """

    #: What makes a site precision safe: "gaussian", "log-concave" (in f), "student-t" or "none".
    certificate: ClassVar[str] = "none"
    num_nodes: int

    def __post_init__(self):
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = field.name, getattr(self, field.name)
            accepted = field.metadata.get("accepted")
            if accepted and value not in accepted:
                choices = " or ".join(map(repr, accepted))
                raise ValueError(f"{type(self).__name__}: {name} must be {choices}, got {value!r}.")
            if name in POSITIVE and _is_concrete(value) and not np.all(np.asarray(value) > 0):
                raise ValueError(f"{type(self).__name__}: {name} must be positive, got {value}.")

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        """log p(y | f).

        :param f: latent values.
        :param y: observations.
        """
        raise NotImplementedError

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        """y ~ p(y | f), one for each latent value; counts and labels are integers.

        :param rng_key: a JAX random key.
        :param f: latent values.
        """
        raise NotImplementedError

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of y when f ~ N(mean, variance).

        :param mean: mean of f.
        :param variance: variance of f.
        """
        raise NotImplementedError

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        """E[log p(y | f)] when f ~ N(mean, variance).

        :param y: observations.
        :param mean: mean of f.
        :param variance: variance of f.
        """
        mean, sd, nodes, weights = self._prepare(lambda f: self.log_prob(f, y), mean, variance)
        return jnp.sum(weights * self.log_prob(mean + sd * nodes, y), axis=0)

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        """log ∫ p(y | f) N(f; mean, variance) df; arguments as above."""
        mean, sd, nodes, weights = self._prepare(lambda f: self.log_prob(f, y), mean, variance)
        log_weights = jnp.log(weights)
        if self.certificate == "log-concave":
            nodes, log_weights = self._nodes_at_mode(y, mean, sd)
        return logsumexp(log_weights + self.log_prob(mean + sd * nodes, y), axis=0)

    def expected_curvature(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        """κ = −2 ∂E[log p(y | f)]/∂variance, the expectation of −∂²log p/∂f²; arguments as above.

        Non-negative if the likelihood is log-concave, of either sign otherwise.
        """
        mean, variance = _floats(mean, variance)
        # One derivative per element needs one variance per element.
        shape = jax.eval_shape(self.expected_log_prob, y, mean, variance).shape
        variance = jnp.broadcast_to(variance, shape)
        tangent = jnp.ones_like(variance)
        _, slope = jax.jvp(lambda v: self.expected_log_prob(y, mean, v), (variance,), (tangent,))
        # Below 0 is rounding if the likelihood is log-concave; otherwise the sign is information.
        concave = self.certificate in ("gaussian", "log-concave")
        return jnp.maximum(-2 * slope, 0) if concave else -2 * slope

    def check(self, y: ArrayLike) -> None:
        """Raise ``ValueError`` if y has an impossible value; NaN (a masked row) and tracers pass.

        :param y: observations.
        """
        if _is_concrete(y):
            values = np.asarray(y, float)
            possible, meaning = self._support(values)
            if _is_concrete(possible) and not np.all(possible | np.isnan(values)):
                wrong = np.extract(~(possible | np.isnan(values)), values)[0]
                raise ValueError(f"{type(self).__name__}: y must be {meaning}, got {wrong:g}.")

    def _support(self, y: np.ndarray) -> tuple[Any, str]:
        """Which of these values are possible, and in words."""
        return np.isfinite(y), "finite"

    def _prepare(self, function, mean, variance):
        """Mean and deviation in the shape of ``function(f)``; Gauss-Hermite on a new leading axis.

        Leading, because parameters and data with one value per row broadcast on the other side.
        """
        mean, variance = _floats(mean, variance)
        result = jax.eval_shape(lambda m, v: function(m + v), mean, variance)
        sd = _deviation(variance)
        rule = [array.reshape((-1,) + (1,) * result.ndim) for array in _hermite(self.num_nodes)]
        mean, sd = (jnp.broadcast_to(array, result.shape) for array in (mean, sd))
        return tuple(jnp.asarray(array, result.dtype) for array in (mean, sd, *rule))

    def _hermite_moments(self, conditional, mean, variance):
        """Moments of y from ``conditional(f)``, its mean and variance given f."""
        mean, sd, nodes, weights = self._prepare(lambda f: conditional(f)[0], mean, variance)
        means, variances = conditional(mean + sd * nodes)
        average = jnp.sum(weights * means, axis=0)
        return average, jnp.sum(weights * (variances + (means - average) ** 2), axis=0)

    def _nodes_at_mode(self, y, mean, sd):
        """Nodes and log-weights in z = (f − mean)/sd of the stretched trapezoid rule.

        It is z = z* + b sinh t with z* and b the mode and width of p(y | f) φ(z). The log of that
        product falls by at least (z − z*)²/2, so that |z − z*| ≤ 7 is enough for any log-concave
        likelihood, and z* lies between 0 and the slope at 0.
        """
        likelihood, mean, sd = jax.tree.map(lax.stop_gradient, (self, mean, sd))

        def slope(z):
            def log_integrand(z):
                return likelihood.log_prob(mean + sd * z, y) - 0.5 * z**2

            return jax.jvp(log_integrand, (z,), (jnp.ones_like(z),))[1]

        def halve(_, bracket):
            near, far = bracket
            middle = 0.5 * (near + far)
            beyond = slope(jnp.sinh(middle)) * jnp.sign(far) > 0
            return jnp.where(beyond, middle, near), jnp.where(beyond, far, middle)

        # Bisection in arsinh z, as the bracket can be astronomically long (Poisson).
        zero = jnp.zeros_like(mean)
        far = jnp.clip(jnp.arcsinh(slope(zero)), -40.0, 40.0)
        mode = jnp.sinh(sum(lax.fori_loop(0, 24, halve, (zero, far))) / 2)
        curvature = -jax.jvp(slope, (mode,), (jnp.ones_like(mode),))[1]
        width = 1 / jnp.sqrt(jnp.clip(curvature, 1.0, 1e12))
        reach = jnp.arcsinh(REACH / width)
        t, step = _trapezoid(-reach, reach, self.num_nodes)
        z = mode + width * jnp.sinh(t)
        log_weights = jnp.log(width * step * jnp.cosh(t)) - 0.5 * (z**2 + LOG_2PI)
        return lax.stop_gradient((z, log_weights))


# ---------------------------------------------------------------- real observations


@_likelihood
class Gaussian(Likelihood):
    """y = f + noise, noise ~ N(0, variance). All in closed form.

    :param variance: noise variance, positive; a number or one value per row.
    """

    variance: ArrayLike
    certificate: ClassVar[str] = "gaussian"

    @property
    def precision(self) -> jax.Array:
        """One over the noise variance, which is the site precision."""
        return 1 / jnp.asarray(self.variance)

    def log_prob(self, f, y):
        return self.log_marginal(y, f, 0.0)

    def sample(self, rng_key, f):
        f, variance = jnp.broadcast_arrays(*_floats(f, self.variance))
        return f + jnp.sqrt(variance) * jax.random.normal(rng_key, f.shape, f.dtype)

    def expected_log_prob(self, y, mean, variance):
        y, mean, variance, noise = _floats(y, mean, variance, self.variance)
        return _log_normal((y - mean) ** 2 + variance, noise)

    def log_marginal(self, y, mean, variance):
        y, mean, variance, noise = _floats(y, mean, variance, self.variance)
        return _log_normal((y - mean) ** 2, variance + noise)

    def moments(self, mean, variance):
        mean, variance, noise = _floats(mean, variance, self.variance)
        return mean, variance + noise


@_likelihood
class StudentT(Likelihood):
    """y = f + scale · noise with Student-t noise: robust to outliers, not log-concave.

    It is a mixture of Gaussians over their precision. The integrals over the logarithm of that
    precision have smooth integrands however narrow the likelihood is.

    :param df: degrees of freedom, positive.
    :param scale: scale, positive.
    :param num_nodes: nodes of those integrals.
    """

    df: ArrayLike
    scale: ArrayLike
    num_nodes: int = _static(default=NUM_NODES)
    certificate: ClassVar[str] = "student-t"

    def log_prob(self, f, y):
        f, y, df, scale = _floats(f, y, self.df, self.scale)
        return self._log_density(df, scale, jnp.log1p(((y - f) / scale) ** 2 / df))

    def _log_density(self, df, scale, log1p):
        normaliser = gammaln(0.5 * (df + 1)) - gammaln(0.5 * df) - 0.5 * jnp.log(math.pi * df)
        return normaliser - jnp.log(scale) - 0.5 * (df + 1) * log1p

    def sample(self, rng_key, f):
        f, df, scale = jnp.broadcast_arrays(*_floats(f, self.df, self.scale))
        return f + scale * jax.random.t(rng_key, df, f.shape, f.dtype)

    def expected_log_prob(self, y, mean, variance):
        # Frullani: log(1 + a) = ∫ e⁻ˣ (1 − e⁻ᵃˣ) dx/x, with E e⁻ᵃˣ Gaussian; over u = log x.
        y, mean, variance, df, scale = _floats(y, mean, variance, self.df, self.scale)
        spread, residual = (s / (df * scale**2) for s in (_at_least(variance, 0), (y - mean) ** 2))
        # The integrand is below e⁻²⁰ to the left, and below e⁻²⁷ to the right.
        u, step = _trapezoid(-20 - jnp.log1p(spread + residual), jnp.full_like(y, 3.3), self.num_nodes)
        x = jnp.exp(u)
        inflation = 1 + 2 * x * spread
        complement = -jnp.expm1(-0.5 * jnp.log(inflation) - x * residual / inflation)
        return self._log_density(df, scale, step * jnp.sum(jnp.exp(-x) * complement, axis=0))

    def log_marginal(self, y, mean, variance):
        # ∫ Gamma(τ; df/2, df/2) N(y; mean, variance + scale²/τ) dτ, over u = log τ.
        y, mean, variance, df, scale = _floats(y, mean, variance, self.df, self.scale)
        squared, half = (y - mean) ** 2, 0.5 * df
        # The mode lies between that for no variance and u = 1/df; 20 nats of decay on either side.
        mode = jnp.minimum(jnp.log((df + 1) / (df + squared / scale**2)), 0)
        decay = jnp.sqrt(40 / half)
        lower, upper = decay + 20 / half, 1 / df + jnp.minimum(decay, 1 + jnp.log1p(40 / half))
        # The left tail is long for small df: u = mode + unit (t - e⁻ᵗ) covers it in longer steps.
        unit = lax.stop_gradient(jnp.minimum(decay, 1))
        last = (upper - mode) / unit
        t, step = _trapezoid(-jnp.log1p(lower / unit), last + jnp.exp(-last), self.num_nodes)
        u = lax.stop_gradient(mode) + unit * (t - jnp.exp(-t))
        log_step = jnp.log(step * unit * (1 + jnp.exp(-t)))
        log_mixing = half * (jnp.log(half) + u - jnp.exp(u)) - gammaln(half)
        total = _at_least(variance, 0) + scale**2 * jnp.exp(-u)
        return logsumexp(log_step + log_mixing + _log_normal(squared, total), axis=0)

    def moments(self, mean, variance):
        """As always; the mean is NaN unless df > 1, and the variance infinite unless df > 2."""
        mean, variance, df, scale = _floats(mean, variance, self.df, self.scale)
        noise = jnp.where(df > 2, scale**2 * df / jnp.where(df > 2, df - 2, 1), jnp.inf)
        return jnp.where(df > 1, mean, jnp.nan), jnp.where(df > 1, variance + noise, jnp.nan)


@_likelihood
class Laplace(Likelihood):
    """y = f + noise, noise with density e^(−|noise|/scale)/(2 scale). All in closed form.

    :param scale: scale, positive.
    """

    scale: ArrayLike
    certificate: ClassVar[str] = "log-concave"

    def log_prob(self, f, y):
        f, y, scale = _floats(f, y, self.scale)
        return -jnp.abs(y - f) / scale - jnp.log(2 * scale)

    def sample(self, rng_key, f):
        f, scale = jnp.broadcast_arrays(*_floats(f, self.scale))
        return f + scale * jax.random.laplace(rng_key, f.shape, f.dtype)

    def expected_log_prob(self, y, mean, variance):
        y, mean, variance, scale = _floats(y, mean, variance, self.scale)
        sd = _deviation(variance)
        # |y − mean| stands apart: no derivative in the variance as a difference of large numbers.
        z = jnp.abs(y - mean) / sd
        excess = math.sqrt(2 / math.pi) * jnp.exp(-0.5 * z**2) - z * lax.erfc(z * SQRT_HALF)
        return -(jnp.abs(y - mean) + sd * excess) / scale - jnp.log(2 * scale)

    def log_marginal(self, y, mean, variance):
        y, mean, variance, scale = _floats(y, mean, variance, self.scale)
        sd = _deviation(variance)
        z, r = (y - mean) / sd, sd / scale

        def side(z):  # of y = f; no difference of two large numbers where r is large
            inner = r + z
            near = -0.5 * (z**2 + LOG_2PI) - jnp.log(_hazard(-jnp.maximum(inner, 0)))
            far = r * (0.5 * r + z) + _log_normal_cdf(jnp.maximum(-inner, 0))
            return jnp.where(inner > 0, near, far)

        return jnp.logaddexp(side(z), side(-z)) - jnp.log(2 * scale)

    def moments(self, mean, variance):
        mean, variance, scale = _floats(mean, variance, self.scale)
        return mean, variance + 2 * scale**2


# ---------------------------------------------------------------- positive and whole numbers


@_likelihood
class Poisson(Likelihood):
    """Counts with rate exposure · link(f).

    :param link: "exp" (expectation and moments in closed form) or "softplus".
    :param exposure: positive multiplier of the rate, such as time observed; None for 1.
    :param num_nodes: nodes of the quadrature.
    """

    link: str = _static(default="exp", accepted=("exp", "softplus"))
    exposure: ArrayLike | None = None
    num_nodes: int = _static(default=NUM_NODES)
    certificate: ClassVar[str] = "log-concave"

    def _support(self, y):
        return (y >= 0) & (y == np.floor(y)) & np.isfinite(y), "a count (0, 1, 2, …)"

    def _rates(self, f):
        """Rate and log-rate."""
        f, exposure = _floats(f, 1.0 if self.exposure is None else self.exposure)
        rate, log_rate = (jnp.exp(f), f) if self.link == "exp" else (softplus(f), _log_softplus(f))
        return exposure * rate, jnp.log(exposure) + log_rate

    def log_prob(self, f, y):
        f, y = _floats(f, y)
        rate, log_rate = self._rates(f)
        return y * log_rate - rate - gammaln(y + 1)

    def sample(self, rng_key, f):
        return jax.random.poisson(rng_key, self._rates(f)[0])

    def expected_log_prob(self, y, mean, variance):
        if self.link != "exp":
            return super().expected_log_prob(y, mean, variance)
        y, mean, variance = _floats(y, mean, variance)
        expected_rate, _ = self._rates(mean + 0.5 * variance)
        return y * self._rates(mean)[1] - expected_rate - gammaln(y + 1)

    def moments(self, mean, variance):
        if self.link != "exp":
            return self._hermite_moments(lambda f: self._rates(f)[:1] * 2, mean, variance)
        mean, variance = _floats(mean, variance)
        return _log_link_moments(self._rates(mean)[1], variance, 1.0, 0.0)


@_likelihood
class Gamma(Likelihood):
    """Positive y with mean eᶠ and variance e²ᶠ/concentration.

    :param concentration: shape of the gamma distribution, positive.
    :param num_nodes: nodes of :meth:`log_marginal`; the rest is in closed form.
    """

    concentration: ArrayLike
    num_nodes: int = _static(default=NUM_NODES)
    certificate: ClassVar[str] = "log-concave"

    def _support(self, y):
        return (y > 0) & np.isfinite(y), "positive"

    def log_prob(self, f, y):
        return self.expected_log_prob(y, f, 0.0)

    def sample(self, rng_key, f):
        f, a = jnp.broadcast_arrays(*_floats(f, self.concentration))
        return jnp.exp(f) / a * jax.random.gamma(rng_key, a, f.shape, f.dtype)

    def expected_log_prob(self, y, mean, variance):
        y, mean, variance, a = _floats(y, mean, variance, self.concentration)
        normaliser = xlogy(a, a) - gammaln(a) + xlogy(a - 1, y)
        return normaliser - a * (mean + y * jnp.exp(0.5 * variance - mean))

    def moments(self, mean, variance):
        mean, variance, a = _floats(mean, variance, self.concentration)
        return _log_link_moments(mean, variance, 0.0, 1 / a)


@_likelihood
class Exponential(Gamma):
    """Exponentially distributed y with mean eᶠ: :class:`Gamma` with concentration 1.

    :param num_nodes: nodes of :meth:`log_marginal`; the rest is in closed form.
    """

    concentration: ArrayLike = dataclasses.field(default=1.0, init=False)

    def _support(self, y):
        return (y >= 0) & np.isfinite(y), "non-negative"


@_likelihood
class NegativeBinomial(Likelihood):
    """Counts with mean eᶠ and variance eᶠ + e²ᶠ/concentration: Poisson with a gamma rate.

    :param concentration: positive; Poisson in the limit of large values.
    :param num_nodes: nodes of the quadrature.
    """

    concentration: ArrayLike
    num_nodes: int = _static(default=NUM_NODES)
    certificate: ClassVar[str] = "log-concave"
    _support = Poisson._support

    def log_prob(self, f, y):
        f, y, r = _floats(f, y, self.concentration)
        logit = f - jnp.log(r)
        log_choose = gammaln(y + r) - gammaln(r) - gammaln(y + 1)
        return log_choose + y * logit - (y + r) * softplus(logit)

    def sample(self, rng_key, f):
        rate_key, count_key = jax.random.split(rng_key)
        return jax.random.poisson(count_key, Gamma(self.concentration).sample(rate_key, f))

    def moments(self, mean, variance):
        mean, variance, r = _floats(mean, variance, self.concentration)
        return _log_link_moments(mean, variance, 1.0, 1 / r)


# ---------------------------------------------------------------- classes


@_likelihood
class Bernoulli(Likelihood):
    """y in {0, 1}; P(y = 1 | f) is the logistic or the normal distribution function at f.

    :param link: "logit" or "probit" (averages and moments in closed form).
    :param num_nodes: nodes of the quadrature.
    """

    link: str = _static(default="logit", accepted=("logit", "probit"))
    num_nodes: int = _static(default=NUM_NODES)
    certificate: ClassVar[str] = "log-concave"

    def _support(self, y):
        return (y == 0) | (y == 1), "0 or 1"

    def log_prob(self, f, y):
        f, y = _floats(f, y)
        return _LOG_CDF[self.link]((2 * y - 1) * f)

    def sample(self, rng_key, f):
        return jax.random.bernoulli(rng_key, jnp.exp(self.log_prob(f, 1))).astype(int)

    def log_marginal(self, y, mean, variance):
        if self.link != "probit":
            return super().log_marginal(y, mean, variance)
        mean, variance = _floats(mean, variance)
        return self.log_prob(mean / jnp.sqrt(1 + variance), y)

    def moments(self, mean, variance):
        probability = jnp.exp(self.log_marginal(1, mean, variance))
        return probability, probability * (1 - probability)


@_likelihood
class Ordinal(Likelihood):
    """Ordered categories 0, …, K − 1 with P(y ≤ k | f) = F(cutpoints_k − f) (McCullagh, 1980).

    :param cutpoints: increasing numbers, shape (K − 1,).
    :param link: "logit" (F logistic) or "probit" (F normal).
    :param num_nodes: nodes of the quadrature.
    """

    cutpoints: Any  # stored as an array
    link: str = _static(default="logit", accepted=("logit", "probit"))
    num_nodes: int = _static(default=NUM_NODES)
    certificate: ClassVar[str] = "log-concave"

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "cutpoints", _floats(jnp.asarray(self.cutpoints))[0])
        if self.cutpoints.ndim != 1 or not self.cutpoints.size:
            raise ValueError(f"Ordinal: cutpoints must be a vector, got {self.cutpoints}.")
        if _is_concrete(self.cutpoints) and not np.all(np.diff(self.cutpoints) > 0):
            raise ValueError(f"Ordinal: cutpoints must increase, got {self.cutpoints}.")

    def _support(self, y):
        top = self.cutpoints.size
        return (y >= 0) & (y <= top) & (y == np.floor(y)), f"a category from 0 to {top}"

    def log_prob(self, f, y):
        f, cutpoints = _floats(f, self.cutpoints)
        y, last = jnp.asarray(y).astype(int), cutpoints.size
        one_sided = (y == 0) | (y == last)
        upper = cutpoints[jnp.clip(y, 0, last - 1)] - f
        lower = cutpoints[jnp.clip(y - 1, 0, last - 1)] - f
        # F(upper) − F(lower) = F(−lower) − F(−upper); nothing cancels on the side where F is small.
        mirror = jnp.where(one_sided, y == last, upper + lower > 0)
        ends = jnp.where(mirror, jnp.stack([-lower, -upper]), jnp.stack([upper, lower]))
        log_upper, log_lower = _LOG_CDF[self.link](ends)
        log_ratio = jnp.where(one_sided, -1.0, log_lower - log_upper)
        return log_upper + jnp.where(one_sided, 0.0, jnp.log(-jnp.expm1(log_ratio)))

    def sample(self, rng_key, f):
        (f,) = _floats(f)
        noise = jax.random.logistic if self.link == "logit" else jax.random.normal
        latent = f + noise(rng_key, f.shape, f.dtype)
        return jnp.sum(latent[..., None] > self.cutpoints, axis=-1)

    def moments(self, mean, variance):
        """Mean and variance of the category's number when f ~ N(mean, variance)."""
        mean, variance = jnp.broadcast_arrays(*_floats(mean, variance))
        k = jnp.arange(self.cutpoints.size + 1).reshape((-1,) + (1,) * mean.ndim)
        probabilities = jnp.exp(self.log_marginal(k, mean, variance))
        average = jnp.sum(k * probabilities, axis=0)
        return average, jnp.sum((k - average) ** 2 * probabilities, axis=0)


# ---------------------------------------------------------------- any NumPyro likelihood


@_likelihood
class Factorized(Likelihood):
    """What a function makes of f: ``Factorized(lambda f: dist.Weibull(jnp.exp(f), 2.0))``.

    The function is called with an extra leading axis on f. It is compared by identity: make it
    once, or jitted functions that take this object compile again.

    :param fn: from latent values to a NumPyro distribution of their shape, with scalar events.
    :param log_concave: whether log p(y | f) is concave in f for every y: the caller vouches.
    :param num_nodes: nodes of the quadrature.
    """

    fn: Callable[[jax.Array], Distribution] = _static()
    log_concave: bool = _static(default=False)
    num_nodes: int = _static(default=NUM_NODES)

    def __post_init__(self):
        super().__post_init__()
        if not callable(self.fn):
            raise ValueError(f"Factorized: fn must be a function of f, got {self.fn!r}.")

    @property
    def certificate(self) -> str:  # type: ignore[override]
        """ "log-concave" if the caller vouches for it, else "none"."""
        return "log-concave" if self.log_concave else "none"

    def _distribution(self, f) -> Distribution:
        made = self.fn(*_floats(f))
        if not isinstance(made, Distribution):
            raise TypeError(f"Factorized: fn must return a NumPyro distribution, got {made!r}.")
        if made.event_shape:
            shape = made.event_shape
            raise ValueError(f"Factorized: fn must give scalar events, got event shape {shape}.")
        return made

    def _support(self, y):
        support = self._distribution(jnp.zeros(y.shape)).support
        return support(y), f"in the support, {support}"

    def log_prob(self, f, y):
        # NumPyro may promote Python numbers to float64 where that is enabled.
        return self._distribution(f).log_prob(y).astype(_floats(f, y)[0].dtype)

    def sample(self, rng_key, f):
        return self._distribution(f).sample(rng_key)

    def moments(self, mean, variance):
        def conditional(f):
            made = self._distribution(f)
            return made.mean, made.variance

        return self._hermite_moments(conditional, mean, variance)


def as_likelihood(obj: Likelihood | Callable[[jax.Array], Distribution]) -> Likelihood:
    """A likelihood from what a user may pass as one.

    :param obj: a :class:`Likelihood`, or a function from latent values to a NumPyro distribution.
    """
    if isinstance(obj, Likelihood):
        return obj
    is_class = isinstance(obj, type) and issubclass(obj, Likelihood)
    if callable(obj) and not is_class and not isinstance(obj, Distribution):
        return Factorized(obj)
    raise TypeError(f"Expected a Likelihood or a function from f to a NumPyro distribution, got {obj!r}.")


def quadrature_error(likelihood: Likelihood, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
    """The larger of the changes of ``expected_log_prob`` and ``log_marginal`` with twice the nodes.

    Elementwise, and 0 for closed forms. An estimate: make it where your data and posterior are.

    :param likelihood: the likelihood whose ``num_nodes`` is in question.
    :param y: observations.
    :param mean: mean of f.
    :param variance: variance of f.
    """

    def integrals(likelihood):
        arguments = y, mean, variance
        return likelihood.expected_log_prob(*arguments), likelihood.log_marginal(*arguments)

    finer: Any = likelihood
    if hasattr(finer, "num_nodes"):
        finer = dataclasses.replace(finer, num_nodes=2 * finer.num_nodes)
    changes = jax.tree.map(lambda a, b: jnp.abs(a - b), integrals(finer), integrals(likelihood))
    return jnp.maximum(*changes)
