"""The residual shrinks row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp.conditionals.base import Conditional, ObservedRows
from npgp.conditionals.precision import certified_terms
from npgp.likelihoods import Likelihood
from npgp.pytrees import pytree
from npgp.sparse.residuals import Residual


@pytree
class Tight(Conditional):
    """
    A site precision for each row by itself. Always a bound, at no cost beyond that of
    :class:`~npgp.conditionals.Prior`, and the default::

        conditional = npgp.conditionals.Tight()  # or "tight"
        npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional)

    .. code-block:: python

        def bound(conditional):
            gp = npgp.CollapsedGP(
                kernel, X, X[::10], npgp.Gaussian(scale=0.3), conditional=conditional
            )
            return gp.log_prob(y)


        assert bound(npgp.conditionals.Prior()) < bound(npgp.conditionals.Tight())

    λ_n is 1/σ_n² for Gaussian noise, the expected negative curvature of the log likelihood where that is log-concave,
    and what certifies the bound for other likelihoods (:attr:`Likelihood.proof <npgp.likelihoods.Likelihood>`).

    Source: Gaussian noise: Bui, Ashman & Turner 2025; Titsias 2025. Other likelihoods: docs/theory.md, section 2.
    """

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        return certified_terms(rows)

    def penalty(self, residual: Residual, noise_variance: ArrayLike) -> jax.Array:
        variance = residual.variance
        return jnp.sum(residual.cost(jnp.broadcast_to(1.0 / jnp.asarray(noise_variance), variance.shape)))

    def is_bound(self, likelihood: Likelihood) -> bool:
        return True

    def supposes_own_residuals(self, likelihood: Likelihood) -> bool:
        # The least value over the residual's variance is found for one output by itself.
        parts = likelihood.parts
        if likelihood.proof == "single-peaked":
            return any(part.proof == "log-concave" for part in parts)
        return likelihood.proof == "none" and len(parts) > 1
