"""Times until an event, some of them censored."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jax.typing import ArrayLike

from npgp.checks import positive_fields
from npgp.likelihoods.base import Likelihood, check_nodes
from npgp.likelihoods.numerics import floats, log_link_moments
from npgp.likelihoods.quadrature import NUM_NODES
from npgp.pytrees import pytree, static


@pytree
@dataclass(frozen=True, eq=False)
class Weibull(Likelihood):
    """
    Times y > 0 with survival function ``P(time > t | f) = exp(−(t e⁻ᶠ)^concentration)``, of which some are censored.

    Log-concave: log p is linear in f, or absent if censored, minus the convex ``y^concentration e^(−concentration f)``.

    :meth:`moments` and :meth:`sample` are of the uncensored times.

    .. code-block:: python

        times = npgp.likelihoods.Weibull(concentration=1.5, censored=np.array([False, True]))
        assert times.log_prob(np.zeros(2), np.array([1.0, 2.0])).shape == (2,)

    :param concentration: shape of the Weibull distribution, positive; 1 for exponential times.
    :param censored: True for each row whose event came after y, by an unknown time (right censoring); None for no row.
    :param num_nodes: nodes of :meth:`log_marginal`; the rest is in closed form.
    :raises ValueError: for a parameter that is known to be non-positive.
    """

    _: KW_ONLY
    concentration: ArrayLike
    censored: ArrayLike | None = None
    num_nodes: int = static(NUM_NODES)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self) -> None:
        positive_fields(self, "concentration")
        check_nodes(self)

    def _support(self, y: Any) -> tuple[Any, str]:
        return (y > 0) & (abs(y) < np.inf), "positive"

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        return self.expected_log_prob(y, f, 0.0)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, k = jnp.broadcast_arrays(*floats(f, self.concentration))
        return jnp.exp(f) * jax.random.exponential(rng_key, f.shape, f.dtype) ** (1 / k)

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, k = floats(y, mean, variance, self.concentration)
        power = k * (jnp.log(y) - mean)
        log_hazard = jnp.log(k) + power - jnp.log(y)
        if self.censored is not None:
            log_hazard = jnp.where(jnp.asarray(self.censored).astype(bool), 0, log_hazard)
        return log_hazard - jnp.exp(power + 0.5 * k**2 * variance)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, k = floats(mean, variance, self.concentration)
        log_mean = gammaln(1 + 1 / k)
        return log_link_moments(mean + log_mean, variance, 0.0, jnp.expm1(gammaln(1 + 2 / k) - 2 * log_mean))
