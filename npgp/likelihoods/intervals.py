"""Gaussian observations of which some are known to an interval only, or that exist in an interval only."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import checks
from npgp.checks import positive_fields
from npgp.likelihoods.base import Likelihood, check_nodes
from npgp.likelihoods.numerics import floats, log_normal, log_normal_cdf, log_normal_mass, standardized
from npgp.likelihoods.quadrature import NUM_NODES, REACH, if_any, normal_moments
from npgp.programs.backend import maximum
from npgp.pytrees import pytree, static

#: Deviations of f, in units of the noise's, up to which log p is smooth beside f: then half of the nodes do.
SMOOTH = 5.0


class _Interval(Likelihood):
    """Has a log p that is analytic in f on the scale of the noise, and grows like its square at most."""

    scale: ArrayLike
    by_quadrature: ClassVar[bool] = True  # type: ignore[misc]

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, scale = floats(y, mean, variance, self.scale)
        return if_any(
            variance > (SMOOTH * scale) ** 2,
            lambda: super(_Interval, self).expected_log_prob(y, mean, variance),
            lambda: self._smooth_expectation(y, mean, variance),
        )


@pytree
@dataclass(frozen=True, eq=False)
class CensoredGaussian(_Interval):
    """
    y = f + noise, noise ~ N(0, scale²), where some rows are known to lie between y and another end only (Tobin 1958).

    Log-concave: p is a normal density, or its integral over an interval, in f (Prékopa 1973). The tails are exact: a
    row that contradicts f costs as much as a normal variable so far out.

    :meth:`moments` and :meth:`sample` are of values that are not censored.

    .. code-block:: python

        until = [np.nan, np.inf, -np.inf, 2.0]  # observed; above y; below y; between y and 2
        times = npgp.likelihoods.CensoredGaussian(scale=0.5, until=until)
        assert times.log_prob(np.zeros(4), np.array([0.3, 1.0, -1.0, 1.0])).shape == (4,)

    :param scale: the noise's standard deviation, positive.
    :param until: the other end of each row's interval, which begins or ends at y: ∞ for a value above y (right
        censoring), −∞ for one below (left censoring); NaN or y itself where the value is y.
    :param num_nodes: nodes of the quadrature, which the expectation of censored rows takes.
    :raises ValueError: for a scale that is known to be non-positive.
    """

    _: KW_ONLY
    scale: ArrayLike
    until: ArrayLike
    num_nodes: int = static(NUM_NODES)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self) -> None:
        positive_fields(self, "scale")
        object.__setattr__(self, "until", checks.real(self.until, "CensoredGaussian until"))
        check_nodes(self)

    def stand_in(self, y: jax.Array) -> ArrayLike:  # observed, where there is such a value
        return jnp.where(jnp.isfinite(self.until), self.until, 1.0)

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        return self.log_marginal(y, f, 0.0)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, scale = jnp.broadcast_arrays(*floats(f, self.scale))
        return f + scale * jax.random.normal(rng_key, f.shape, f.dtype)

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, scale, until = floats(y, mean, variance, self.scale, self.until)
        observed = log_normal((y - mean) ** 2 + variance, scale**2)
        return jnp.where(_exact(y, until), observed, super().expected_log_prob(y, mean, variance))

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, scale, until = floats(y, mean, variance, self.scale, self.until)
        exact, total = _exact(y, until), scale**2 + variance
        sd, known = jnp.sqrt(total), not checks.is_traced(self.until)
        if known and not np.any(np.isfinite(np.asarray(self.until))):
            mass = log_normal_cdf(jnp.where(until < 0.0, y - mean, mean - y) / sd)
        else:
            end = jnp.where(exact, jnp.inf, until)
            mass = _log_mass(jnp.minimum(y, end), jnp.maximum(y, end), mean, sd)
        return jnp.where(exact, log_normal((y - mean) ** 2, total), mass)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, scale = floats(mean, variance, self.scale)
        return mean, variance + scale**2


@pytree
@dataclass(frozen=True, eq=False)
class TruncatedGaussian(_Interval):
    """
    y ~ N(f, scale²) given that y lies between two bounds: values outside are not recorded at all.

    Log-concave: log p is linear in f minus the cumulant function of a family whose natural parameter is f/scale², which
    is convex. For values outside that are recorded as such see :class:`CensoredGaussian`.

    .. code-block:: python

        lifetimes = npgp.likelihoods.TruncatedGaussian(scale=1.0, lower=0.0)
        assert lifetimes.log_prob(0.0, 0.5) > npgp.Gaussian(scale=1.0).log_prob(0.0, 0.5)

    :param scale: standard deviation without truncation, positive.
    :param lower: lower bound, or −∞; one for all rows or one per row.
    :param upper: upper bound, or ∞.
    :param num_nodes: nodes of the quadrature.
    :raises ValueError: for a scale that is known to be non-positive, or an upper bound that is not above the lower.
    """

    _: KW_ONLY
    scale: ArrayLike
    lower: ArrayLike = -np.inf
    upper: ArrayLike = np.inf
    num_nodes: int = static(NUM_NODES)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self) -> None:
        positive_fields(self, "scale")
        for name in ("lower", "upper"):
            object.__setattr__(self, name, checks.real(getattr(self, name), f"TruncatedGaussian {name}"))
        known = not (checks.is_traced(self.lower) or checks.is_traced(self.upper))
        if known and not np.all(np.asarray(self.lower) < np.asarray(self.upper)):
            raise ValueError(f"TruncatedGaussian upper is {self.upper}; it must be above lower, {self.lower}.")
        check_nodes(self)

    def _support(self, y: Any) -> tuple[Any, str]:
        return (y >= self.lower) & (y <= self.upper) & (abs(y) < np.inf), "between the bounds"

    def stand_in(self, y: jax.Array) -> ArrayLike:
        return jnp.clip(1.0, self.lower, self.upper)

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        f, y, scale, lower, upper = floats(f, y, self.scale, self.lower, self.upper)
        return log_normal((y - f) ** 2, scale**2) - _log_mass(lower, upper, f, scale)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, scale, lower, upper = jnp.broadcast_arrays(*floats(f, self.scale, self.lower, self.upper))
        low, high = standardized(lower, f, scale), standardized(upper, f, scale)
        ends = jnp.maximum(low, jnp.minimum(high, 0) - REACH - 3), jnp.minimum(high, jnp.maximum(low, 0) + REACH + 3)

        def log_mass(z: Any) -> Any:
            return log_normal_mass(low, z, z - low)

        target = log_mass(high) + jnp.log1p(-jax.random.uniform(rng_key, f.shape, f.dtype))

        def halve(_: Any, bracket: Any) -> Any:
            left, right = bracket
            middle = 0.5 * (left + right)
            below = log_mass(middle) < target
            return jnp.where(below, middle, left), jnp.where(below, right, middle)

        left, right = lax.fori_loop(0, 50, halve, ends)
        return jnp.clip(f + scale * 0.5 * (left + right), lower, upper)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, scale, lower, upper = floats(mean, variance, self.scale, self.lower, self.upper)

        def slope(f: Any) -> Any:
            return jax.jvp(lambda f: _log_mass(lower, upper, f, scale), (f,), (jnp.ones_like(f),))[1]

        def conditional(f: Any) -> Any:  # of an exponential family, by its cumulant function
            first, second = jax.jvp(slope, (f,), (jnp.ones_like(f),))
            return f + scale**2 * first, maximum(scale**2 * (1 + scale**2 * second), 0.0)

        return normal_moments(conditional, mean, variance, self.num_nodes)


def _exact(y: jax.Array, until: jax.Array) -> jax.Array:
    return jnp.isnan(until) | (until == y)


def _log_mass(lower: jax.Array, upper: jax.Array, mean: jax.Array, scale: jax.Array) -> jax.Array:
    """Log-probability of an interval under N(mean, scale²)."""
    finite = jnp.isfinite(upper) & jnp.isfinite(lower)
    width = jnp.where(finite, jnp.where(finite, upper - lower, 1) / scale, jnp.inf)
    return log_normal_mass(
        *jnp.broadcast_arrays(standardized(lower, mean, scale), standardized(upper, mean, scale), width)
    )
