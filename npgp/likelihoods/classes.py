"""Likelihoods of classes: two, or several in an order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import softplus
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.likelihoods.base import Likelihood, check_choice, check_nodes
from npgp.likelihoods.logistic import expected_softplus
from npgp.likelihoods.numerics import LOG_CDF, floats, log_normal_mass
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
    smooth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice(self, "link", tuple(LOG_CDF))
        check_nodes(self)

    def _support(self, y: Any) -> tuple[Any, str]:
        return (y == 0) | (y == 1), "0 or 1"

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        f, y = floats(f, y)
        return LOG_CDF[self.link]((2 * y - 1) * f)

    @property
    def by_quadrature(self) -> bool:
        return self.link != "logit"

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        if self.by_quadrature:
            return super().expected_log_prob(y, mean, variance)
        y, mean, variance = floats(y, mean, variance)
        return -expected_softplus((1 - 2 * y) * mean, variance, self.num_nodes)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        return jax.random.bernoulli(rng_key, jnp.exp(self.log_prob(f, 1))).astype(int)

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        if self.link != "probit":
            return super().log_marginal(y, mean, variance)
        mean, variance = floats(mean, variance)
        return self.log_prob(mean / jnp.sqrt(1 + variance), y)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
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

        raters = np.array([[-1.0, 0.5], [-0.2, 0.9]])  # of two raters
        npgp.likelihoods.Ordinal(cutpoints=raters[np.array([0, 1, 1, 0])])  # four rows

    :param cutpoints: increasing numbers, shape (K − 1,), or (N, K − 1) for rows with cutpoints of their own, such as
        those of their raters.
    :param link: "logit" (F logistic; expectations by a mixture of normals, as Bernoulli's) or "probit" (F normal).
    :param num_nodes: nodes of the quadrature.
    :raises ValueError: for cutpoints that are a number or known not to increase, another link, or no nodes.
    """

    cutpoints: Any  # stored as an array
    link: str = static("logit")
    num_nodes: int = static(NUM_NODES, kw_only=True)
    proof: ClassVar[str] = "log-concave"
    smooth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice(self, "link", tuple(LOG_CDF))
        check_nodes(self)
        object.__setattr__(self, "cutpoints", floats(checks.array(self.cutpoints, "Ordinal cutpoints"))[0])
        if not self.cutpoints.ndim or not self.cutpoints.size:
            raise ValueError(
                f"Ordinal cutpoints has shape {self.cutpoints.shape}; it must be a vector of K − 1 numbers, or one for "
                "each row."
            )
        _require_increasing(self.cutpoints)

    @property
    def _last(self) -> int:
        return self.cutpoints.shape[-1]

    def _support(self, y: Any) -> tuple[Any, str]:
        return (y >= 0) & (y <= self._last) & (y == y.round()), f"a category from 0 to {self._last}"

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        f, cutpoints = floats(f, self.cutpoints)
        if self.link == "logit":
            return self._by_softplus(y, cutpoints, lambda end, sign: softplus(sign * (f - end)))
        lower, upper, width, first, last = self._interval(y, cutpoints)
        ends = jnp.where(first, -jnp.inf, lower - f), jnp.where(last, jnp.inf, upper - f)
        return log_normal_mass(*jnp.broadcast_arrays(*ends, jnp.where(first | last, jnp.inf, width)))

    @property
    def by_quadrature(self) -> bool:
        return self.link != "logit"

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        if self.by_quadrature:
            return super().expected_log_prob(y, mean, variance)
        mean, variance, cutpoints = floats(mean, variance, self.cutpoints)

        def expected(end: Any, sign: Any) -> Any:
            return expected_softplus(sign * (mean - end), variance, self.num_nodes)

        return self._by_softplus(y, cutpoints, expected)

    def _by_softplus(self, y: ArrayLike, cutpoints: Any, function: Any) -> Any:
        """F(u) − F(l) = F(u) (1 − F(l)) (1 − e^(l − u)), of which only softplus functions depend on f."""
        lower, upper, width, first, last = self._interval(y, cutpoints)
        above = jnp.where(last, 0.0, function(upper, 1.0))
        return (
            jnp.where(first | last, 0.0, jnp.log(-jnp.expm1(-width)))
            - above
            - jnp.where(first, 0.0, function(lower, -1.0))
        )

    def _interval(self, y: ArrayLike, cutpoints: Any) -> Any:
        """Cutpoints on both sides of each category and their distance, and whether it is the first or the last."""
        k, top = jnp.asarray(y).astype(int), self._last

        def cutpoint(k: Any) -> Any:
            k = jnp.clip(k, 0, top - 1)
            if cutpoints.ndim == 1:
                return cutpoints[k]
            shape = jnp.broadcast_shapes(k.shape, cutpoints.shape[:-1])
            rows = jnp.broadcast_to(cutpoints, (*shape, top))
            return jnp.take_along_axis(rows, jnp.broadcast_to(k, shape)[..., None], -1)[..., 0]

        lower, upper, first, last = cutpoint(k - 1), cutpoint(k), k <= 0, k >= top
        return lower, upper, jnp.where(first | last, 1.0, upper - lower), first, last

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        (f,) = floats(f)
        noise = jax.random.logistic if self.link == "logit" else jax.random.normal
        latent = f + noise(rng_key, f.shape, f.dtype)
        return jnp.sum(latent[..., None] > self.cutpoints, axis=-1)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of the category's number when f ~ N(mean, variance)."""
        mean, variance, _ = jnp.broadcast_arrays(*floats(mean, variance, self.cutpoints[..., 0]))
        k = jnp.arange(self._last + 1).reshape((-1,) + (1,) * mean.ndim)
        probabilities = jnp.exp(self.log_marginal(k, mean, variance))
        average = linalg.weighted_sum(k, probabilities)
        return average, jnp.sum((k - average) ** 2 * probabilities, axis=0)


def _require_increasing(cutpoints: jax.Array) -> None:
    if checks.is_traced(cutpoints):
        see_later(_require_increasing, cutpoints)
    elif not np.all(np.diff(cutpoints, axis=-1) > 0):
        raise ValueError(f"Ordinal cutpoints is {cutpoints}; it must increase.")
