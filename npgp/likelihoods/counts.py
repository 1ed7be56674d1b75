"""Likelihoods of counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import sigmoid, softplus
from jax.typing import ArrayLike

from npgp.checks import positive_fields
from npgp.likelihoods.base import Likelihood, check_choice, check_nodes
from npgp.likelihoods.continuous import Gamma
from npgp.likelihoods.logistic import logistic_moments, softplus_gap
from npgp.likelihoods.numerics import floats, log_binomial, log_link_moments, log_poisson, log_softplus
from npgp.likelihoods.quadrature import NUM_NODES, normal_moments
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
    smooth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice(self, "link", ("exp", "softplus"))
        if self.exposure is not None:
            positive_fields(self, "exposure")
        check_nodes(self)

    def _support(self, y: Any) -> tuple[Any, str]:
        return _is_count(y)

    def _rates(self, f: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Rate and log-rate."""
        f, exposure = floats(f, 1.0 if self.exposure is None else self.exposure)
        rate, log_rate = (jnp.exp(f), f) if self.link == "exp" else (softplus(f), log_softplus(f))
        return exposure * rate, jnp.log(exposure) + log_rate

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        f, y = floats(f, y)
        return log_poisson(y, self._rates(f)[1])

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        return jax.random.poisson(rng_key, self._rates(f)[0])

    @property
    def by_quadrature(self) -> bool:
        return self.link != "exp"

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        if self.by_quadrature:
            return super().expected_log_prob(y, mean, variance)
        y, mean, variance = floats(y, mean, variance)
        return log_poisson(y, self._rates(mean)[1], 0.5 * variance)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        if self.link != "exp":
            return normal_moments(lambda f: self._rates(f)[:1] * 2, mean, variance, self.num_nodes)
        mean, variance = floats(mean, variance)
        return log_link_moments(self._rates(mean)[1], variance, 1.0, 0.0)


@pytree
@dataclass(frozen=True, eq=False)
class NegativeBinomial(Likelihood):
    """
    Counts with mean μ = exposure · eᶠ and variance μ + μ²/concentration: Poisson with a gamma rate.

    Log-concave: log p is linear in f minus the convex ``(y + concentration) softplus(log μ − log concentration)``.

    .. code-block:: python

        counts = npgp.likelihoods.NegativeBinomial(concentration=2.0)
        assert counts.log_prob(0.0, 3.0) < 0.0

    :param concentration: positive; Poisson in the limit of large values.
    :param exposure: positive multiplier of the mean, such as time observed; None for 1.
    :param num_nodes: nodes of the quadrature; expectations, by pairs of fewer nodes or a mixture of a third as many
        normals, are exact to rounding.
    :raises ValueError: for a parameter that is known to be non-positive.
    """

    concentration: ArrayLike = field(kw_only=True)
    exposure: ArrayLike | None = field(default=None, kw_only=True)
    num_nodes: int = static(NUM_NODES, kw_only=True)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self) -> None:
        positive_fields(self, "concentration", *([] if self.exposure is None else ["exposure"]))
        check_nodes(self)

    def _support(self, y: Any) -> tuple[Any, str]:
        return _is_count(y)

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        f, y, r, e = self._floats(f, y)
        return log_binomial(y, r, f + jnp.log(e))

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, r, e = self._floats(y, mean, variance)
        log_mean = mean + jnp.log(e)
        gap = softplus_gap(log_mean - jnp.log(r), variance, self.num_nodes)
        return log_binomial(y, r, log_mean, gap=gap)

    def _floats(self, *values: ArrayLike) -> list[jax.Array]:
        return floats(*values, self.concentration, 1.0 if self.exposure is None else self.exposure)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        rate_key, count_key = jax.random.split(rng_key)
        f, _, e = self._floats(f)
        return jax.random.poisson(count_key, Gamma(concentration=self.concentration).sample(rate_key, f + jnp.log(e)))

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, r, e = self._floats(mean, variance)
        return log_link_moments(mean + jnp.log(e), variance, 1.0, 1 / r)


@pytree
@dataclass(frozen=True, eq=False)
class Binomial(Likelihood):
    """
    Successes y among trials, each with probability 1/(1 + e⁻ᶠ).

    Log-concave: log p is linear in f minus the convex ``trials · softplus(f)``.

    .. code-block:: python

        successes = npgp.likelihoods.Binomial(trials=np.array([10, 20]))
        assert successes.log_prob(np.zeros(2), np.array([4, 20])).shape == (2,)

    :param trials: positive whole numbers; one for all rows or one per row.
    :param num_nodes: nodes of the quadrature, as for :class:`NegativeBinomial`.
    :raises ValueError: for trials that are known to be non-positive.
    """

    trials: ArrayLike = field(kw_only=True)
    num_nodes: int = static(NUM_NODES, kw_only=True)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self) -> None:
        positive_fields(self, "trials")
        check_nodes(self)

    def _support(self, y: Any) -> tuple[Any, str]:
        return _is_count(y)[0] & (y <= self.trials), "a count from 0 to the number of trials"

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        y, f, n = floats(y, f, self.trials)
        return self._log_prob(y, f, n, 0.0)

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, mean, variance, n = floats(y, mean, variance, self.trials)
        return self._log_prob(y, mean, n, softplus_gap(mean, variance, self.num_nodes))

    @staticmethod
    def _log_prob(y: ArrayLike, logit: Any, n: Any, gap: Any) -> Any:
        most = 2 * y > n  # count what is rarer: the other number is positive
        y, logit = jnp.where(most, n - y, y), jnp.where(most, -logit, logit)
        return log_binomial(y, n - y, logit + jnp.log(n - y), gap=gap) - jnp.log1p(-y / n)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        f, n = jnp.broadcast_arrays(*floats(f, self.trials))
        return jax.random.binomial(rng_key, n, sigmoid(f)).astype(int)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        mean, variance, n = floats(mean, variance, self.trials)
        probability, inside = logistic_moments(mean, variance, self.num_nodes)
        return n * probability, n * inside + n**2 * (probability * (1 - probability) - inside)


def _is_count(y: np.ndarray) -> tuple[Any, str]:
    return (y >= 0) & (y == y.round()) & (abs(y) < np.inf), "a count (0, 1, 2, …)"
