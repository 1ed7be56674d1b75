"""Proportions that vary: beta-distributed ones, and counts of successes with such probabilities."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import ArrayLike

from npgp.checks import positive_fields
from npgp.likelihoods.base import Likelihood, check_nodes
from npgp.likelihoods.counts import Binomial
from npgp.likelihoods.logistic import logistic_moments
from npgp.likelihoods.numerics import (
    LOG_2PI,
    bernoulli_deviance,
    floats,
    log_binomial,
    log_sigmoids,
    sigmoids,
    stirling,
)
from npgp.likelihoods.quadrature import NUM_NODES
from npgp.pytrees import pytree, static


@pytree
@dataclass(frozen=True, eq=False)
class Beta(Likelihood):
    """
    Proportions 0 < y < 1 with mean μ = 1/(1 + e⁻ᶠ) and variance μ (1 − μ)/(1 + concentration).

    Its shapes are concentration · μ and concentration · (1 − μ) (Ferrari & Cribari-Neto 2004). Not log-concave: where f
    is small, log p curves upward for y near 1.

    .. code-block:: python

        shares = npgp.likelihoods.Beta(concentration=20.0)
        assert shares.log_prob(np.zeros(2), np.array([0.4, 0.9])).shape == (2,)

    :param concentration: positive; the sum of the beta distribution's two shapes.
    :param num_nodes: nodes of the quadrature.
    :raises ValueError: for a concentration that is known to be non-positive.
    """

    smooth: ClassVar[bool] = True
    _: KW_ONLY
    concentration: ArrayLike
    num_nodes: int = static(NUM_NODES)

    def __post_init__(self) -> None:
        positive_fields(self, "concentration")
        check_nodes(self)

    def _support(self, y: Any) -> tuple[Any, str]:
        return (y > 0) & (y < 1), "between 0 and 1, and neither of them"

    def stand_in(self, y: jax.Array) -> ArrayLike:
        return 0.5

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        f, y, total = floats(f, y, self.concentration)
        w, v = sigmoids(f)
        log_a, log_b = (jnp.log(total) + share for share in log_sigmoids(f))
        log_y, log_rest = jnp.log(y), jnp.log1p(-y)
        remainders = stirling(total) - stirling(total * w, log_a) - stirling(total * v, log_b)
        constant = 0.5 * (log_a + log_b - jnp.log(total) - LOG_2PI) - log_y - log_rest
        deviance = bernoulli_deviance(w, v, log_y - log_rest - f)
        return remainders + constant - total * deviance

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        (f,) = floats(f)
        return _draw(rng_key, f, self.concentration)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, total = floats(mean, variance, self.concentration)
        share, inside = logistic_moments(mean, variance, self.num_nodes)
        return share, share * (1 - share) - inside * total / (1 + total)


@pytree
@dataclass(frozen=True, eq=False)
class BetaBinomial(Likelihood):
    """
    Successes among trials whose probability is drawn from :class:`Beta` for each row: binomial, with more variance.

    With μ = 1/(1 + e⁻ᶠ) the variance is ``n μ (1 − μ) (concentration + n)/(concentration + 1)``. Not log-concave: for
    y = n, log p curves upward where f is small.

    .. code-block:: python

        successes = npgp.likelihoods.BetaBinomial(trials=10, concentration=5.0)
        assert successes.log_prob(0.0, 7.0) < 0.0

    :param trials: positive whole numbers n; one for all rows or one per row.
    :param concentration: positive; binomial in the limit of large values.
    :param num_nodes: nodes of the quadrature.
    :raises ValueError: for a parameter that is known to be non-positive.
    """

    smooth: ClassVar[bool] = True
    _: KW_ONLY
    trials: ArrayLike
    concentration: ArrayLike
    num_nodes: int = static(NUM_NODES)

    def __post_init__(self) -> None:
        positive_fields(self, "trials", "concentration")
        check_nodes(self)

    _support = Binomial._support

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        f, y, n, total = floats(f, y, self.trials, self.concentration)
        # Negative binomial counts of successes and of failures, given their sum.
        (w, v), (log_w, log_v), log_n, log_total = sigmoids(f), log_sigmoids(f), jnp.log(n), jnp.log(total)
        successes = log_binomial(y, total * w, log_n + log_w, log_total + log_w)
        failures = log_binomial(n - y, total * v, log_n + log_v, log_total + log_v)
        return successes + failures - log_binomial(n, total, log_n)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, n = jnp.broadcast_arrays(*floats(f, self.trials))
        key, count_key = jax.random.split(rng_key)
        return jax.random.binomial(count_key, n, _draw(key, f, self.concentration)).astype(int)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, n, total = floats(mean, variance, self.trials, self.concentration)
        share, inside = logistic_moments(mean, variance, self.num_nodes)
        given_f = n * inside * (total + n) / (total + 1)
        return n * share, given_f + n**2 * (share * (1 - share) - inside)


def _draw(rng_key: jax.Array, f: jax.Array, concentration: ArrayLike) -> jax.Array:
    """Proportions, which rounding makes neither 0 nor 1."""
    f, total = jnp.broadcast_arrays(*floats(f, concentration))
    limits = jnp.finfo(f.dtype)
    a, b = (jnp.maximum(total * sigmoid(x), limits.tiny) for x in (f, -f))
    return jnp.clip(jax.random.beta(rng_key, a, b, f.shape, f.dtype), limits.tiny, 1 - limits.epsneg)
