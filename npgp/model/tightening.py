"""``tighten``: what groups of neighbors add to the bound of rows that are observed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.typing import ArrayLike

from npgp.conditionals import Gain, Grouped
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.model.latent import Latent
from npgp.model.latents import as_latents
from npgp.model.observation import observe

__all__ = ["tighten"]


def tighten(
    name: str,
    latent: Latent | Sequence[Latent],
    likelihood: Likelihood | Any,
    obs: ArrayLike,
    conditional: Grouped,
    *,
    mask: ArrayLike | str | None = None,
) -> None:
    """
    What :class:`~npgp.conditionals.Grouped` gains over :class:`~npgp.conditionals.Tight`, estimated from a few groups
    of neighboring rows, beside an :func:`observe` with ``"tight"`` of other rows of the same data. Use it inside a
    plate of its own.

    In minibatches the sum is an unbiased estimate of the bound of ``Grouped``. A batch of whole groups is one too, but
    a noisier one: neighbors have errors in common, of which the gain knows little, and with Gaussian noise nothing. A
    quarter or an eighth as many rows in groups as rows by themselves suffice (docs/howto/large-data.md has the
    batches). Where there is no q, as under NUTS or ``Predictive``, it says nothing, and makes no site.

    .. code-block:: python

        # Of 30 rows in all; the second pair has groups of 5.
        def by_rows(X, y, X_groups, y_groups):
            f, likelihood = (
                npgp.SparseGP("f", npgp.RBF(1.0), Z).draw(),
                npgp.Gaussian(scale=0.1),
            )
            with npgp.plate("rows", 30, rows=len(X)):
                npgp.observe("y", f(X), likelihood, obs=y)
            with npgp.plate("groups", 30, rows=len(X_groups)):
                npgp.tighten(
                    "gain", f(X_groups), likelihood, y_groups, npgp.conditionals.Grouped(5)
                )

    :param name: name of the site.
    :param latent: GP values at the rows of the groups, as for :func:`observe`.
    :param likelihood: that of :func:`observe`.
    :param obs: observations of these rows, (N,) or (outputs, N).
    :param conditional: which rows are a group.
    :param mask: True where there is an observation, not an empty place of a group, as for :func:`observe`.
    :raises TypeError: for a conditional without groups, and as :func:`observe` does.
    :raises ValueError: as :func:`observe` does.
    """
    if not isinstance(conditional, Grouped):
        raise TypeError(
            f"conditional is {conditional!r:.80}; {name} takes groups alone, such as npgp.conditionals.Grouped(16)."
        )
    likelihood = as_likelihood(likelihood, len(latent) if isinstance(latent, (tuple, list)) else 1)
    if as_latents(latent, likelihood).variational:
        observe(name, latent, likelihood, obs, conditional=Gain(conditional.groups), mask=mask)
