"""A conditional of one's own, written with public names alone."""

import jax.numpy as jnp
from jax.typing import ArrayLike

import npgp


@npgp.pytree
class FixedShare(npgp.conditionals.Conditional):
    """q leaves the residual a given share of its prior's covariance: the ELBO of that q, whatever the likelihood."""

    share: ArrayLike = 0.5

    def _cost(self):
        return 0.5 * (self.share - 1.0 - jnp.log(self.share))

    def row_terms(self, rows, parameter=None):
        expected = rows.expected_log_prob(self.share * rows.residual.variance)
        return expected - rows.likelihood.num_latents * self._cost()

    def penalty(self, residual, noise_variance):
        return jnp.sum(0.5 * self.share * residual.variance / noise_variance + self._cost())

    def is_bound(self, likelihood):
        return True

    def residual_scale(self, parameter):
        return jnp.sqrt(self.share)
