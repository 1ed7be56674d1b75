"""The residual keeps its prior."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp.conditionals.base import Conditional, ObservedRows
from npgp.likelihoods import Likelihood
from npgp.pytrees import pytree
from npgp.sparse.residuals import Residual


@pytree
class Prior(Conditional):
    """
    λ = 0: the residual keeps its prior. Always a bound, for whatever likelihood, and the loosest::

        conditional = npgp.conditionals.Prior()  # or "prior"
        npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional)

    .. code-block:: python

        def bound(conditional):
            gp = npgp.CollapsedGP(
                kernel, X, X[::10], npgp.Gaussian(scale=0.3), conditional=conditional
            )
            return gp.log_prob(y)


        assert bound(npgp.conditionals.Prior()) < bound(npgp.conditionals.Tight())

    Source: Titsias 2009; Hensman, Fusi & Lawrence 2013.
    """

    is_prior: ClassVar[bool] = True

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        return rows.expected_log_prob(rows.residual.variance)

    def penalty(self, residual: Residual, noise_variance: ArrayLike) -> jax.Array:
        return 0.5 * jnp.sum(residual.variance / noise_variance)

    def is_bound(self, likelihood: Likelihood) -> bool:
        return True

    def residual_scale(self, parameter: ArrayLike | None) -> ArrayLike:
        return 1.0
