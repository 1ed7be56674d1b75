"""The residual shrinks by one factor for all rows."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp.conditionals.base import Conditional, ObservedRows, Parameter
from npgp.likelihoods import Likelihood
from npgp.pytrees import pytree
from npgp.sparse.residuals import Residual


@pytree
class Shared(Conditional):
    """
    ``ĉ_n = m d_n`` with one learned m at the cost ½ (m − 1 − log m) a row. Always a bound, whatever the likelihood, so
    that :func:`npgp.sample` takes it too::

        conditional = npgp.conditionals.Shared()  # or "shared"
        npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional)

    .. code-block:: python

        def bound(conditional):
            gp = npgp.CollapsedGP(
                kernel, X, X[::10], npgp.Gaussian(scale=0.3), conditional=conditional
            )
            return gp.log_prob(y)


        shared = bound(npgp.conditionals.Shared())
        assert (
            bound(npgp.conditionals.Prior()) < shared < bound(npgp.conditionals.Tight()) + 1e-3
        )

    Source: with Gaussian noise and the best m, Artemev, Burt & van der Wilk 2021.
    """

    parameter: ClassVar[Parameter] = Parameter("residual_scale", 0.5, constraints.unit_interval)

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        assert parameter is not None
        cost = 0.5 * rows.likelihood.num_latents * (parameter - 1.0 - jnp.log(parameter))
        return rows.expected_log_prob(parameter * rows.residual.variance) - cost

    def penalty(self, residual: Residual, noise_variance: ArrayLike) -> jax.Array:
        variance = residual.variance
        return 0.5 * variance.shape[-1] * jnp.log1p(jnp.mean(variance / noise_variance))

    def is_bound(self, likelihood: Likelihood) -> bool:
        return True

    def residual_scale(self, parameter: ArrayLike | None) -> ArrayLike:
        assert parameter is not None
        return jnp.sqrt(parameter)
