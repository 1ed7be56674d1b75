"""Amounts that are zero or positive: sums of a Poisson number of gamma variables."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from npgp.checks import is_traced, positive_fields
from npgp.likelihoods.base import Likelihood, check_nodes
from npgp.likelihoods.numerics import column_of, expected_excess, floats, log_gamma_density, log_poisson
from npgp.likelihoods.quadrature import NUM_NODES
from npgp.pytrees import pytree, static

#: Terms of the density's series, or nodes of the integral that stands for it; and standard deviations each way.
TERMS, WIDTH = 64, 8.0


@pytree
@dataclass(frozen=True, eq=False)
class Tweedie(Likelihood):
    """
    Amounts y ≥ 0, such as rain or claims, with mean μ = eᶠ and variance dispersion · μ^power; 0 has a probability.

    The compound Poisson-gamma distribution for 1 < power < 2 (Jørgensen 1987): Poisson-many gamma variables. log p is
    its value at μ = y, a series that f is not in (Dunn & Smyth 2005), less half the deviance over the dispersion.

    Log-concave: in f, log p is minus two exponentials with positive factors, for y = 0 minus one.

    .. code-block:: python

        rain = npgp.likelihoods.Tweedie(dispersion=1.0, power=1.6)
        assert rain.log_prob(np.zeros(2), np.array([0.0, 2.5])).shape == (2,)

    :param dispersion: positive.
    :param power: between 1 and 2: Poisson-like near 1, gamma-like near 2.
    :param num_nodes: nodes of :meth:`log_marginal`; the rest is in closed form.
    :raises ValueError: for a dispersion that is known to be non-positive, or a power outside (1, 2).
    """

    _: KW_ONLY
    dispersion: ArrayLike
    power: ArrayLike
    num_nodes: int = static(NUM_NODES)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self) -> None:
        positive_fields(self, "dispersion", "power")
        power = self.power
        if not is_traced(power) and not np.all((np.asarray(power) > 1) & (np.asarray(power) < 2)):
            raise ValueError(f"Tweedie power is {power}; it must be between 1 and 2, and neither of them.")
        check_nodes(self)

    def _support(self, y: Any) -> tuple[Any, str]:
        return (y >= 0) & (abs(y) < np.inf), "non-negative"

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        return self.expected_log_prob(y, f, 0.0)

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, dispersion, p = floats(y, mean, variance, self.dispersion, self.power)
        up, down = 2 - p, p - 1
        none = -jnp.exp(up * mean + 0.5 * up**2 * variance - jnp.log(up * dispersion))
        log_y = jnp.log(jnp.where(y > 0, y, 1.0))

        def excess(c: Any) -> Any:  # E[exp(c (f − log y))] − 1 − c E[f − log y]
            half = 0.5 * c**2 * variance
            return expected_excess(*jnp.broadcast_arrays(c * (mean - log_y), half))

        deviance = jnp.exp(up * log_y) / dispersion * (excess(up) / up + excess(-down) / down)
        return jnp.where(y > 0, _log_density_at_mean(log_y, dispersion, p) - deviance, none)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, dispersion, p = jnp.broadcast_arrays(*floats(f, self.dispersion, self.power))
        count_key, key = jax.random.split(rng_key)
        number = jax.random.poisson(count_key, jnp.exp((2 - p) * f) / ((2 - p) * dispersion)).astype(f.dtype)
        shape = jnp.maximum(number, 1) * (2 - p) / (p - 1)
        amount = dispersion * (p - 1) * jnp.exp((p - 1) * f) * jax.random.gamma(key, shape, f.shape, f.dtype)
        return jnp.where(number > 0, amount, 0.0)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, dispersion, p = floats(mean, variance, self.dispersion, self.power)
        average = jnp.exp(mean + 0.5 * variance)
        return average, dispersion * jnp.exp(p * mean + 0.5 * p**2 * variance) + average**2 * jnp.expm1(variance)


def _log_density_at_mean(log_y: jax.Array, dispersion: jax.Array, p: jax.Array) -> jax.Array:
    """
    The log-density of y where its mean is y: a sum over the number of gamma variables.

    That number is near its mean, with a standard deviation of √(mean (p − 1)). Where all that counts are more than
    ``TERMS`` numbers, the sum is a trapezoid rule with longer steps, which is as exact.
    """
    log_y, dispersion, p = jnp.broadcast_arrays(log_y, dispersion, p)
    log_number = (2 - p) * log_y - jnp.log((2 - p) * dispersion)
    number = lax.stop_gradient(jnp.exp(log_number))
    step = jnp.maximum(1, 2 * WIDTH * jnp.sqrt(number * lax.stop_gradient(p - 1)) / (TERMS - 1))
    i = column_of(jnp.arange(TERMS, dtype=log_y.dtype), log_y)
    first = jnp.maximum(1, jnp.floor(number - step * (TERMS - 1) / 2))
    j = first + step * i
    log_share = jnp.log(j) - log_number
    terms = log_poisson(j, log_number) + log_gamma_density(log_y, j * (2 - p) / (p - 1), log_share + log_y)
    return logsumexp(terms, axis=0) + jnp.log(step)
