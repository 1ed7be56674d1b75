"""Gaussian noise whose scale is a latent value too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from npgp.likelihoods.base import Likelihood, aligned, check_nodes
from npgp.likelihoods.numerics import LOG_2PI, at_least, bounded_exp, deviation, floats, log_normal
from npgp.likelihoods.quadrature import NUM_NODES, REACH, trapezoid
from npgp.pytrees import pytree, static


@pytree
@dataclass(frozen=True, eq=False)
class HeteroscedasticGaussian(Likelihood):
    """
    ``y ~ N(f_0, exp(f_1)²)``: two latent values per observation, the mean and the log-scale.

    In closed form but for :meth:`log_marginal` (Lázaro-Gredilla & Titsias 2011, with f_1 half of theirs). An expected
    precision that is no number any more (in float32 from a variance of f_1 of 44) is taken for less: the expected
    log-likelihood is then some -1e26, finite and far below any evidence, and has a gradient.

    Log-concave in the mean, whatever the log-scale is: there log p is a quadratic. It is not so jointly.

    .. code-block:: python

        def changing(X, y=None):
            f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
            g = npgp.SparseGP("g", npgp.RBF(3.0), Z).draw()  # of the log standard deviation
            with numpyro.plate("data", len(X)):
                npgp.observe(
                    "y", (f(X), g(X)), npgp.likelihoods.HeteroscedasticGaussian(), obs=y
                )

    :param num_nodes: nodes of :meth:`log_marginal`.
    :raises ValueError: for no nodes.
    """

    num_nodes: int = static(NUM_NODES, kw_only=True)
    num_latents: ClassVar[int] = 2

    @property
    def concave(self) -> tuple[int, ...]:
        """The mean."""
        return (0,)

    def __post_init__(self) -> None:
        check_nodes(self)

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        return self.expected_log_prob(y, f, 0.0)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        mean, log_scale = jnp.broadcast_arrays(*aligned(self, 0.0, f)[0])
        return mean + jnp.exp(log_scale) * jax.random.normal(rng_key, mean.shape, mean.dtype)

    def _split(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> list[jax.Array]:
        (m, g), (v, s) = aligned(self, y, mean, variance)
        return floats(y, m, g, v, s)

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, m, g, v, s = self._split(y, mean, variance)
        return -0.5 * (LOG_2PI + ((y - m) ** 2 + v) * bounded_exp(2 * (s - g))) - g

    def expected_curvature(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, m, g, v, s = self._split(y, mean, variance)
        precision = bounded_exp(2 * (s - g))
        return jnp.stack(jnp.broadcast_arrays(precision, 2 * ((y - m) ** 2 + v) * precision))

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        y, m, g, v, s = self._split(y, mean, variance)
        # The mean in closed form; then over z = (f_1 − g)/sd, between that of the prior and that of a scale |y − m|:
        # either may be the mode. First coarsely, then where the integrand is within 40 nats of its largest value.
        squared, sd = (y - m) ** 2, deviation(s)

        def log_integrand(z: Any) -> Any:
            return log_normal(squared, at_least(v, 0) + jnp.exp(2 * (g + sd * z))) + log_normal(z**2, jnp.ones_like(z))

        furthest = jnp.maximum((0.5 * jnp.log(squared + jnp.finfo(squared.dtype).tiny) - g) / sd, 0)
        z, step = trapezoid(-REACH - sd, REACH + furthest, self.num_nodes)
        values = log_integrand(z)
        inside = values > jnp.max(values, axis=0) - 40
        lower = jnp.min(jnp.where(inside, z, jnp.inf), axis=0) - step
        upper = jnp.max(jnp.where(inside, z, -jnp.inf), axis=0) + step
        z, step = trapezoid(lower, upper, self.num_nodes)
        return logsumexp(jnp.log(step) + log_integrand(z), axis=0)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        _, m, g, v, s = jnp.broadcast_arrays(*self._split(0, mean, variance))
        return m, v + jnp.exp(2 * (g + s))
