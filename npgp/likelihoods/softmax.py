"""Classes without an order, one latent value each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from npgp.likelihoods.base import Likelihood, aligned, check_positive
from npgp.likelihoods.numerics import deviation
from npgp.likelihoods.quadrature import hermite, trapezoid
from npgp.pytrees import pytree, static

#: Standard deviations and Gumbel scales below every class's mean that the integrals cover.
LOWER_REACH, LOWER_GUMBEL = 6.0, 3.0


@pytree
@dataclass(frozen=True, eq=False)
class Softmax(Likelihood):
    """
    Classes 0, …, C − 1, with ``P(y = c | f) ∝ exp(f_c)`` and C latent values per observation.

    Log-concave, jointly in all of them: f_y is linear, and log Σ_c exp(f_c) convex.

    All integrals are deterministic and linear in C. With independent standard Gumbel noise G_c,
    ``P(y = c | f) = P(f_c + G_c is the largest)`` and ``log Σ_c exp(f_c) = E[max_c (f_c + G_c)] − 0.5772…``; f_c + G_c
    has the distribution function ``φ_c(s) = E[exp(−exp(f_c − s))]``, by Gauss-Hermite, and that of the largest is their
    product. What is left is an integral over s, by the trapezoid rule. This is Gauss-Hermite with all
    num_nodes^C combinations of nodes.

    :param num_classes: number C of classes, at least 2.
    :param num_nodes: nodes for each latent value; the integral over s has three times as many.
    :raises ValueError: for fewer than two classes, or no nodes.
    """

    num_classes: int = static(None)
    num_nodes: int = static(20)
    certificate: ClassVar[str] = "log-concave"

    def __post_init__(self):
        check_positive(self, "num_nodes")
        if not isinstance(self.num_classes, (int, np.integer)) or self.num_classes < 2:
            raise ValueError(f"Softmax num_classes is {self.num_classes!r}; it must be a whole number, at least 2.")

    @property
    def num_latents(self) -> int:  # type: ignore[override]
        """One for each class."""
        return self.num_classes

    def _support(self, y):
        top = self.num_classes - 1
        return (y >= 0) & (y <= top) & (y == np.floor(y)), f"a class from 0 to {top}"

    def _of_class(self, y, values):
        """Of each row's class."""
        c = jnp.arange(self.num_classes).reshape((-1,) + (1,) * (values.ndim - 1))
        return jnp.sum(jnp.where(c == jnp.asarray(y).astype(int), values, 0), axis=0)

    def log_prob(self, f, y):
        (f,) = aligned(self, y, f)
        return self._of_class(y, f) - logsumexp(f, axis=0)

    def sample(self, rng_key, f):
        (f,) = aligned(self, 0.0, f)
        return jax.random.categorical(rng_key, f, axis=0)

    def expected_log_prob(self, y, mean, variance):
        mean, sd = self._gaussians(y, mean, variance)
        f, weights = self._nodes(mean, sd)
        # E[max] is that of one Gumbel variable at a, and the integral of the difference of distribution functions; with
        # this a the difference vanishes like exp(−2s).
        a = logsumexp(jnp.log(weights) + f, axis=(0, 1))
        upper = jnp.max(mean + jnp.minimum(sd**2 + 9, 6 * sd + 9), axis=0)
        s, step = trapezoid(self._lower(mean, sd), upper + np.log(self.num_classes), 3 * self.num_nodes)

        @jax.checkpoint
        def add(total, s):
            log_cdf = jnp.sum(_log_cdfs(f, weights, s), axis=0)
            return total + jnp.exp(-_exp(a - s)) - jnp.exp(log_cdf), None

        total, _ = lax.scan(add, jnp.zeros_like(a), s)
        return self._of_class(y, mean) - (a + step * total)

    def log_marginal(self, y, mean, variance):
        mean, sd = self._gaussians(y, mean, variance)
        f, weights = self._nodes(mean, sd)
        c = jnp.arange(self.num_classes).reshape((-1,) + (1,) * (mean.ndim - 1))
        chosen = c == jnp.asarray(y).astype(int)
        own = jnp.sum(jnp.where(chosen, f, 0), axis=1)
        s, step = self._places(mean, sd)

        @jax.checkpoint
        def term(s):
            others = jnp.sum(jnp.where(chosen, 0, _log_cdfs(f, weights, s)), axis=0)
            x = own - s
            return others + logsumexp(jnp.log(weights[:, 0]) + x - _exp(x), axis=0)

        return logsumexp(jnp.log(step) + lax.map(term, s), axis=0)

    def probabilities(self, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        """
        P(y = c) of all classes when f ~ N(mean, variance), shape (C, ..., N).

        :param mean: mean of f, (C, ..., N).
        :param variance: variance of f, likewise.
        """
        mean, sd = self._gaussians(0, mean, variance)
        f, weights = self._nodes(mean, sd)
        s, _ = self._places(mean, sd)

        @jax.checkpoint
        def add(total, s):
            x = f - s
            log_cdfs = _log_cdfs(f, weights, s)
            others = jnp.exp(jnp.sum(log_cdfs, axis=0) - log_cdfs)
            return total + others * jnp.sum(weights * jnp.exp(x - _exp(x)), axis=0), None

        total, _ = lax.scan(add, jnp.zeros_like(mean), s)
        return total / jnp.sum(total, axis=0)

    def moments(self, mean, variance):
        """Mean and variance of the class's number when f ~ N(mean, variance); :meth:`probabilities` says more."""
        probabilities = self.probabilities(mean, variance)
        c = jnp.arange(self.num_classes).reshape((-1,) + (1,) * (probabilities.ndim - 1))
        average = jnp.sum(c * probabilities, axis=0)
        return average, jnp.sum((c - average) ** 2 * probabilities, axis=0)

    def _gaussians(self, y, mean, variance):
        """Mean and deviation, each (C, ..., N)."""
        mean, variance = aligned(self, y, mean, variance)
        shape = jnp.broadcast_shapes(mean.shape, variance.shape, (self.num_classes, *(1,) * (mean.ndim - 1)))
        return jnp.broadcast_to(mean, shape), jnp.broadcast_to(deviation(variance), shape)

    def _nodes(self, mean, sd):
        """Values of f, (K, C, ..., N), and their weights."""
        nodes, weights = (jnp.asarray(a.reshape((-1,) + (1,) * mean.ndim), mean.dtype) for a in hermite(self.num_nodes))
        return mean + sd * nodes, weights

    def _lower(self, mean, sd):
        return jnp.max(mean - LOWER_REACH * sd, axis=0) - LOWER_GUMBEL

    def _places(self, mean, sd):
        upper = jnp.max(mean + jnp.minimum(sd**2, 6 * sd), axis=0) + 18
        return trapezoid(self._lower(mean, sd), upper, 3 * self.num_nodes)


def _exp(x):
    """An exponential that does not overflow; exp(−exp(x)) vanishes long before."""
    return jnp.exp(jnp.minimum(x, 60.0))


def _log_cdfs(f, weights, s):
    """log φ_c(s), (C, ..., N)."""
    cdfs = jnp.sum(weights * jnp.exp(-_exp(f - s)), axis=0)
    return jnp.log(jnp.maximum(cdfs, jnp.finfo(f.dtype).tiny))
