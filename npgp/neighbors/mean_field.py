"""Independent normal approximations of values with a nearest-neighbor prior (Wu, Pleiss & Cunningham 2022)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from npgp import checks
from npgp.neighbors.nngp import NNGP
from npgp.neighbors.vecchia import at_rows, site_weights


class MeanFieldNormal(dist.Distribution):
    """
    ``q(u) = Π_j N(m_j, s_j²)`` at all inducing points, or at a batch of them that stands for all.

    :param loc: m, (B,).
    :param scale: s, (B,).
    :param neighbor_loc: means of each one's neighbors, (B, K).
    :param neighbor_scale: their standard deviations, (B, K).
    :param sites: which inducing points these are, (B,); all M in order if omitted.
    :param counts: how many inducing points each stands for, (B,); one if omitted.
    :param size: M.
    """

    support = constraints.real_vector
    pytree_data_fields = ("loc", "scale", "neighbor_loc", "neighbor_scale", "sites", "counts")
    pytree_aux_fields = ("size",)

    def __init__(self, loc, scale, neighbor_loc, neighbor_scale, size, *, sites=None, counts=None, validate_args=None):
        self.loc, self.scale, self.neighbor_loc, self.neighbor_scale = loc, scale, neighbor_loc, neighbor_scale
        self.size, self.sites, self.counts = size, sites, counts
        super().__init__((), (size,), validate_args=validate_args)

    def sample(self, key, sample_shape=()):
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        if self.sites is not None:
            return jnp.full((*sample_shape, 1), jnp.nan, self.loc.dtype)
        return self.loc + self.scale * jax.random.normal(key, sample_shape + self.event_shape, self.loc.dtype)

    def log_prob(self, value):
        if self.sites is not None:
            raise ValueError(
                "a batch of the inducing values has no joint density: use TraceMeanField_ELBO, which takes their KL "
                "divergence in closed form, or a VNNGP without batch_size."
            )
        return jnp.sum(dist.Normal(self.loc, self.scale).log_prob(value), -1)

    @property
    def mean(self):
        return self.loc

    @property
    def variance(self):
        return jnp.square(self.scale)


@kl_divergence.register(MeanFieldNormal, NNGP)  # type: ignore[attr-defined]
def _(q: MeanFieldNormal, p: NNGP):
    # Wu, Pleiss & Cunningham 2022, eq. 9. All that depends on hyperparameters is the model's.
    b, F, _ = site_weights(p.kernel, p.X, p.neighbors, p.noise_variance, p.jitter, q.sites)
    sites, rows = jnp.arange(q.size) if q.sites is None else q.sites, jnp.asarray(p.neighbors.rows)
    neighbors = rows if q.sites is None else rows[q.sites]
    mean, neighbor_mean = (at_rows(p.offset, at, q.loc.dtype) for at in (sites, neighbors))
    error = q.loc - mean - jnp.sum(b * (q.neighbor_loc - neighbor_mean), axis=-1)
    square = jnp.square(error) + jnp.sum(jnp.square(b * q.neighbor_scale), axis=-1)
    variance = jnp.square(q.scale)
    terms = 0.5 * ((variance + square) / F - 1.0 - jnp.log(variance / F))
    return jnp.sum(terms if q.counts is None else q.counts * terms)
