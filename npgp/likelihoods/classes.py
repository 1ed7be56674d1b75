"""Likelihoods of classes: two, or several in an order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from npgp import checks, linalg
from npgp.likelihoods.base import Likelihood, check_choice, check_nodes
from npgp.likelihoods.logistic import expected_softplus
from npgp.likelihoods.numerics import LOG_CDF, floats
from npgp.likelihoods.quadrature import NUM_NODES
from npgp.programs.later import see_later
from npgp.pytrees import pytree, static


@pytree
@dataclass(frozen=True, eq=False)
class Bernoulli(Likelihood):
    """
    y in {0, 1}; P(y = 1 | f) is the logistic or the normal distribution function at f.

    Log-concave: p is F(f) or F(−f), distribution functions of a log-concave density, which are log-concave themselves
    (Prékopa 1973).

    .. code-block:: python

        probability, _ = npgp.Bernoulli().moments(mean=0.0, variance=4.0)
        np.testing.assert_allclose(probability, 0.5, rtol=1e-5)

    :param link: "logit" (expectations exact to rounding, by a mixture of normals) or "probit" (averages and moments in
        closed form).
    :param num_nodes: nodes of the quadrature; a mixture of a third as many normals is the same work.
    :raises ValueError: for another link, or no nodes.
    """

    link: str = static("logit")
    num_nodes: int = static(NUM_NODES, kw_only=True)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self):
        check_choice(self, "link", tuple(LOG_CDF))
        check_nodes(self)

    def _support(self, y):
        return (y == 0) | (y == 1), "0 or 1"

    def log_prob(self, f, y):
        f, y = floats(f, y)
        return LOG_CDF[self.link]((2 * y - 1) * f)

    def expected_log_prob(self, y, mean, variance):
        if self.link != "logit":
            return super().expected_log_prob(y, mean, variance)
        y, mean, variance = floats(y, mean, variance)
        return -expected_softplus((1 - 2 * y) * mean, variance, self.num_nodes)

    def sample(self, rng_key, f):
        return jax.random.bernoulli(rng_key, jnp.exp(self.log_prob(f, 1))).astype(int)

    def log_marginal(self, y, mean, variance):
        if self.link != "probit":
            return super().log_marginal(y, mean, variance)
        mean, variance = floats(mean, variance)
        return self.log_prob(mean / jnp.sqrt(1 + variance), y)

    def moments(self, mean, variance):
        probability = jnp.exp(self.log_marginal(1, mean, variance))
        return probability, probability * (1 - probability)


@pytree
@dataclass(frozen=True, eq=False)
class Ordinal(Likelihood):
    """
    Ordered categories 0, …, K − 1 with ``P(y ≤ k | f) = F(cutpoints_k − f)`` (McCullagh 1980).

    Log-concave: p is the integral of a log-concave density over an interval that f shifts (Pratt 1981).

    .. code-block:: python

        npgp.likelihoods.Ordinal(cutpoints=[-1.0, 0.5])  # three categories, 0, 1 and 2

    :param cutpoints: increasing numbers, shape (K − 1,).
    :param link: "logit" (F logistic) or "probit" (F normal).
    :param num_nodes: nodes of the quadrature.
    :raises ValueError: for cutpoints of another shape or known not to increase, another link, or no nodes.
    """

    cutpoints: Any  # stored as an array
    link: str = static("logit")
    num_nodes: int = static(NUM_NODES, kw_only=True)
    proof: ClassVar[str] = "log-concave"

    def __post_init__(self):
        check_choice(self, "link", tuple(LOG_CDF))
        check_nodes(self)
        object.__setattr__(self, "cutpoints", floats(checks.array(self.cutpoints, "Ordinal cutpoints"))[0])
        if self.cutpoints.ndim != 1 or not self.cutpoints.size:
            raise ValueError(
                f"Ordinal cutpoints has shape {self.cutpoints.shape}; it must be a vector of K − 1 numbers."
            )
        _require_increasing(self.cutpoints)

    def _support(self, y):
        top = self.cutpoints.size
        return (y >= 0) & (y <= top) & (y == y.round()), f"a category from 0 to {top}"

    def log_prob(self, f, y):
        f, cutpoints = floats(f, self.cutpoints)
        y, last = jnp.asarray(y).astype(int), cutpoints.size
        one_sided = (y == 0) | (y == last)
        upper = cutpoints[jnp.clip(y, 0, last - 1)] - f
        lower = cutpoints[jnp.clip(y - 1, 0, last - 1)] - f
        # F(upper) − F(lower) = F(−lower) − F(−upper); nothing cancels on the side where F is small.
        mirror = jnp.where(one_sided, y == last, upper + lower > 0)
        ends = jnp.where(mirror, jnp.stack([-lower, -upper]), jnp.stack([upper, lower]))
        log_upper, log_lower = LOG_CDF[self.link](ends)
        log_ratio = jnp.where(one_sided, -1.0, log_lower - log_upper)
        return log_upper + jnp.where(one_sided, 0.0, jnp.log(-jnp.expm1(log_ratio)))

    def sample(self, rng_key, f):
        (f,) = floats(f)
        noise = jax.random.logistic if self.link == "logit" else jax.random.normal
        latent = f + noise(rng_key, f.shape, f.dtype)
        return jnp.sum(latent[..., None] > self.cutpoints, axis=-1)

    def moments(self, mean, variance):
        """Mean and variance of the category's number when f ~ N(mean, variance)."""
        mean, variance = jnp.broadcast_arrays(*floats(mean, variance))
        k = jnp.arange(self.cutpoints.size + 1).reshape((-1,) + (1,) * mean.ndim)
        probabilities = jnp.exp(self.log_marginal(k, mean, variance))
        average = linalg.weighted_sum(k, probabilities)
        return average, jnp.sum((k - average) ** 2 * probabilities, axis=0)


def _require_increasing(cutpoints: jax.Array) -> None:
    if checks.is_traced(cutpoints):
        see_later(_require_increasing, cutpoints)
    elif not np.all(np.diff(cutpoints) > 0):
        raise ValueError(f"Ordinal cutpoints is {cutpoints}; it must increase.")
