"""The residual keeps its prior."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from npgp.conditionals.base import Conditional
from npgp.pytrees import pytree


@pytree
@dataclass(frozen=True)
class Prior(Conditional):
    """
    λ = 0: the residual keeps its prior. Always a bound, for whatever likelihood, and the loosest::

        npgp.observe("y", f(X), likelihood, obs=y, conditional=npgp.conditionals.Prior())  # or "prior"

    .. code-block:: python

        def bound(conditional):
            gp = npgp.CollapsedGP(kernel, X, X[::10], npgp.Gaussian(scale=0.3), conditional=conditional)
            return gp.log_prob(y)

        assert bound(npgp.conditionals.Prior()) < bound(npgp.conditionals.Tight())

    Source: Titsias 2009; Hensman, Fusi & Lawrence 2013.
    """

    def row_terms(self, likelihood, y, mean, variance, residual, parameter=None, present=None):
        return likelihood.expected_log_prob(y, mean, variance + residual.variance)

    def penalty(self, residual, noise_variance):
        return 0.5 * jnp.sum(residual.variance / noise_variance)

    def is_bound(self, likelihood):
        return True

    def residual_scale(self, parameter):
        return 1.0
