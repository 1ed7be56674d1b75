"""
The collapsed bound for any likelihood: the ELBO at the best q(ε), which a search finds for each value of the rest.

The ELBO is stationary in q(ε) there, so that its gradient in all else is the partial derivative at that q: nothing is
differentiated through the search (the envelope theorem). What the search leaves undone lowers the bound by about
:attr:`npgp.variational.row_sites.Found.kl_gap`, which is of second order in how far q is off.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from npgp import checks
from npgp.conditionals import Conditional
from npgp.observations import Observations
from npgp.sparse.projection import Projection
from npgp.sparse.residuals import Residual
from npgp.variational.blocks import BlockNormal, block_normal, whitened_mean
from npgp.variational.row_sites import Expected, Found, Sites, search, working_sites

#: Most steps of the search; five to ten are usual from the start that it has, three to five from sites found before.
MAX_STEPS = 50
#: It ends when a step has moved q(ε) by no more nats than this. Each moves it by a tenth of the one before or less, so
#: that much less is left; the bound is off by that, but its gradient by as much as the root of it.
#: In float32 the bound itself is off by about 1e-7 of its own size, and its gradient by as much of its terms.
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


#: Warn if a further step of the search would move the posterior by more nats than this.
WARN_KL_GAP = 1e-2


def warn_unless_arrived(kl_gap: jax.Array, sentence: str) -> None:
    """
    Warn, of the caller's caller, where a search has not arrived, and that can be seen.

    :param kl_gap: nats by which a further step would move the posterior.
    :param sentence: what to say, with ``{gap}`` for these.
    """
    if not checks.is_traced(kl_gap) and not float(kl_gap) < WARN_KL_GAP:
        warnings.warn(sentence.format(gap=f"{float(kl_gap):.2g} nats"), RuntimeWarning, stacklevel=3)


class Searched(NamedTuple):
    """
    The bound, and what it was reached with.

    :param bound: the ELBO, one for each output: (...).
    :param q: the best q(ε), a constant for derivatives.
    :param sites: the pseudo-observations that make it, of f less the offset.
    :param kl_gap: nats by which one more step of the search would move q(ε), all outputs together.
    """

    bound: jax.Array
    q: tuple[BlockNormal, ...]
    sites: Sites
    kl_gap: jax.Array


def searched_bound(
    projection: Projection,
    residual: Residual,
    rows: Observations,
    covariances: Sequence[str],
    conditional: Conditional,
    *,
    start: Sites | None = None,
    max_steps: int = MAX_STEPS,
    tolerance: float | None = None,
) -> Searched:
    """
    The ELBO at the best q(ε), with the gradient that is right there.

    :param projection: of the training inputs.
    :param residual: what the blocks with a learned covariance leave at the training inputs.
    :param rows: what is observed of them.
    :param covariances: ``"dense"``, ``"diagonal"`` or ``"mean-only"`` for each block.
    :param conditional: what q does to the residual; one without a parameter to learn.
    :param start: sites of f less the offset to begin with, as a search nearby has found them.
    :param max_steps: most steps of the search.
    :param tolerance: nats at which it ends; :data:`TOLERANCE` if ``None``.
    """
    if tolerance is None:
        tolerance = TOLERANCE[projection.prior_variance.dtype.name]
    arguments = lax.stop_gradient((projection, residual, rows, conditional, start))
    found = lax.stop_gradient(_best(*arguments, tuple(covariances), max_steps, tolerance))
    q = tuple(block_normal(kind, *values) for kind, values in zip(covariances, found.q, strict=True))
    mean, variance = (
        whitened_mean(projection, [block.loc for block in q]),
        _variance(projection, found.cross_covariances),
    )
    kl = found.kl if rows.likelihood.num_latents == 1 else jnp.sum(found.kl, axis=0)
    terms = rows.elbo(conditional, mean, variance, residual)
    return Searched(jnp.sum(terms, axis=-1) - kl, q, found.sites, found.kl_gap)


def _best(projection, residual, rows: Observations, conditional, start, covariances, max_steps, tolerance) -> Found:
    def expected(mean: jax.Array, variance: jax.Array) -> jax.Array:
        return jnp.sum(rows.elbo(conditional, mean, variance, residual))

    init_sites = _first_sites(projection, rows, expected) if start is None else start
    init_sites = jax.tree.map(partial(jnp.broadcast_to, shape=rows.shape), init_sites)
    return search(projection.A, covariances, expected, init_sites, max_steps, tolerance)


def _variance(projection: Projection, cross_covariances: Sequence[jax.Array | None]) -> jax.Array:
    """
    The variance a_nᵀ S a_n that ε gives row n, with its first derivative 2 (S a_n)ᵀ da_n.

    From S A, which is at hand: half the work of the variance and its gradient from a factor of S.
    """
    total = jnp.zeros((), projection.prior_variance.dtype)
    for A, SA in zip(projection.A, cross_covariances, strict=True):
        if SA is not None:
            inner = jnp.sum(A * SA, axis=-2)
            total = total + 2.0 * inner - lax.stop_gradient(inner)
    return total


def _first_sites(projection: Projection, rows: Observations, expected: Expected) -> Sites:
    """Initial sites without a warm start."""
    zero = jnp.zeros(rows.shape, projection.prior_variance.dtype)
    if rows.likelihood.num_latents > 1 or len(rows.likelihood.parts) > 1:
        slope, by_variance = jax.grad(expected, argnums=(0, 1))(zero, zero)
        return Sites(-2.0 * by_variance, slope)
    prior = jnp.broadcast_to(projection.prior_variance, rows.shape)
    sites = working_sites(rows.likelihood, rows.y, zero + rows.offset, prior, rows.offset)
    sites = Sites(*map(rows.where_present, sites))
    if rows.weights is not None:
        sites = Sites(*(rows.weights * value for value in sites))
    return sites
