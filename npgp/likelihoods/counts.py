"""Likelihoods of counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import softplus
from jax.scipy.special import gammaln
from jax.typing import ArrayLike

from npgp.checks import positive_fields
from npgp.likelihoods.base import Likelihood, check_choice, check_nodes
from npgp.likelihoods.continuous import Gamma
from npgp.likelihoods.logistic import expected_softplus
from npgp.likelihoods.numerics import floats, log_link_moments, log_softplus
from npgp.likelihoods.quadrature import NUM_NODES, hermite_moments
from npgp.pytrees import pytree, static


@pytree
@dataclass(frozen=True, eq=False)
class Poisson(Likelihood):
    """
    Counts with rate exposure · link(f).

    Log-concave: log p is ``y log link(f) − exposure · link(f)``, and either link is convex with a concave logarithm
    (softplus as the integral of the logistic function, whose logarithm is concave; Prékopa 1973).

    .. code-block:: python

        rate, _ = npgp.Poisson().moments(mean=0.0, variance=1.0)  # the mean of eᶠ
        np.testing.assert_allclose(rate, np.exp(0.5), rtol=1e-5)

    :param link: "exp" (expectation and moments in closed form) or "softplus".
    :param exposure: positive multiplier of the rate, such as time observed; None for 1.
    :param num_nodes: nodes of the quadrature.
    :raises ValueError: for another link, or a parameter that is known to be non-positive.
    """

    link: str = static("exp")
    exposure: ArrayLike | None = field(default=None, kw_only=True)
    num_nodes: int = static(NUM_NODES, kw_only=True)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self):
        check_choice(self, "link", ("exp", "softplus"))
        if self.exposure is not None:
            positive_fields(self, "exposure")
        check_nodes(self)

    def _support(self, y):
        return _is_count(y)

    def _rates(self, f):
        """Rate and log-rate."""
        f, exposure = floats(f, 1.0 if self.exposure is None else self.exposure)
        rate, log_rate = (jnp.exp(f), f) if self.link == "exp" else (softplus(f), log_softplus(f))
        return exposure * rate, jnp.log(exposure) + log_rate

    def log_prob(self, f, y):
        f, y = floats(f, y)
        rate, log_rate = self._rates(f)
        return y * log_rate - rate - gammaln(y + 1)

    def sample(self, rng_key, f):
        return jax.random.poisson(rng_key, self._rates(f)[0])

    def expected_log_prob(self, y, mean, variance):
        if self.link != "exp":
            return super().expected_log_prob(y, mean, variance)
        y, mean, variance = floats(y, mean, variance)
        expected_rate, _ = self._rates(mean + 0.5 * variance)
        return y * self._rates(mean)[1] - expected_rate - gammaln(y + 1)

    def moments(self, mean, variance):
        if self.link != "exp":
            return hermite_moments(lambda f: self._rates(f)[:1] * 2, mean, variance, self.num_nodes)
        mean, variance = floats(mean, variance)
        return log_link_moments(self._rates(mean)[1], variance, 1.0, 0.0)


@pytree
@dataclass(frozen=True, eq=False)
class NegativeBinomial(Likelihood):
    """
    Counts with mean eᶠ and variance eᶠ + e²ᶠ/concentration: Poisson with a gamma rate.

    Log-concave: log p is linear in f minus the convex ``(y + concentration) softplus(f − log concentration)``.

    .. code-block:: python

        counts = npgp.likelihoods.NegativeBinomial(concentration=2.0)
        assert counts.log_prob(0.0, 3.0) < 0.0

    :param concentration: positive; Poisson in the limit of large values.
    :param num_nodes: nodes of the quadrature; expectations, by a mixture of a third as many normals, are exact to
        rounding.
    :raises ValueError: for a parameter that is known to be non-positive.
    """

    concentration: ArrayLike = field(kw_only=True)
    num_nodes: int = static(NUM_NODES, kw_only=True)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self):
        positive_fields(self, "concentration")
        check_nodes(self)

    def _support(self, y):
        return _is_count(y)

    def log_prob(self, f, y):
        f, y, r = floats(f, y, self.concentration)
        logit = f - jnp.log(r)
        return self._log_choose(y, r) + y * logit - (y + r) * softplus(logit)

    def expected_log_prob(self, y, mean, variance):
        y, mean, variance, r = floats(y, mean, variance, self.concentration)
        logit = mean - jnp.log(r)
        return self._log_choose(y, r) + y * logit - (y + r) * expected_softplus(logit, variance, self.num_nodes)

    @staticmethod
    def _log_choose(y, r):
        return gammaln(y + r) - gammaln(r) - gammaln(y + 1)

    def sample(self, rng_key, f):
        rate_key, count_key = jax.random.split(rng_key)
        return jax.random.poisson(count_key, Gamma(concentration=self.concentration).sample(rate_key, f))

    def moments(self, mean, variance):
        mean, variance, r = floats(mean, variance, self.concentration)
        return log_link_moments(mean, variance, 1.0, 1 / r)


def _is_count(y: np.ndarray) -> tuple[Any, str]:
    return (y >= 0) & (y == y.round()) & (abs(y) < np.inf), "a count (0, 1, 2, …)"
