"""One learned site precision for all rows."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp.conditionals.base import ObservedRows, Parameter
from npgp.conditionals.precision import of_present, site_terms
from npgp.conditionals.tight import Tight
from npgp.likelihoods import Likelihood
from npgp.pytrees import pytree


@pytree
class Published(Tight):
    """
    λ_n = 1/β with one learned β, as Bui, Ashman & Turner (2025) ran, for comparison: a bound for log-concave
    likelihoods only (docs/theory.md, section 2, has the counterexample)::

        conditional = npgp.conditionals.Published()  # or "published"
        npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional)

    .. code-block:: python

        assert npgp.conditionals.Published().is_bound(npgp.Poisson())
        assert not npgp.conditionals.Published().is_bound(npgp.StudentT(df=4.0, scale=1.0))
    """

    parameter: ClassVar[Parameter] = Parameter("residual_precision", 1.0, constraints.softplus_positive)

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        assert parameter is not None
        shape = jnp.shape(parameter) if rows.likelihood.num_latents == 1 else rows.mean.shape
        return site_terms(rows, of_present(jnp.broadcast_to(parameter, shape), rows))

    def is_bound(self, likelihood: Likelihood) -> bool:
        return likelihood.proof in ("gaussian", "log-concave")
