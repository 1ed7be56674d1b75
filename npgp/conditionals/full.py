"""All rows in one group."""

from __future__ import annotations

from typing import ClassVar

import jax
from jax.typing import ArrayLike

from npgp.conditionals.base import ObservedRows
from npgp.conditionals.precision import best_precision, exact_terms
from npgp.conditionals.tight import Tight
from npgp.likelihoods import Likelihood
from npgp.pytrees import pytree
from npgp.sparse.groups import Groups, single


@pytree
class Full(Tight):
    """
    One group of all rows, at O(N³): the ELBO of a q, so a bound for whatever likelihood. All rows at once::

        conditional = npgp.conditionals.Full()  # or "full"
        npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional)

    .. code-block:: python

        def bound(conditional):
            gp = npgp.CollapsedGP(
                kernel, X, X[::10], npgp.Gaussian(scale=0.3), conditional=conditional
            )
            return gp.log_prob(y)


        assert bound(npgp.conditionals.Tight()) < bound(npgp.conditionals.Full())

    Source: Bui, Ashman & Turner 2025, appendix A.
    """

    needs_all_rows: ClassVar[bool] = True

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        return exact_terms(rows, best_precision(rows))

    def supposes_own_residuals(self, likelihood: Likelihood) -> bool:
        return likelihood.proof in ("none", "single-peaked")

    def partition(self, num_rows: int) -> Groups:
        return single(num_rows)
