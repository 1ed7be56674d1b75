"""
The evidence under any likelihood of an approximation that has a density and moments for Gaussian noise: by one Gaussian
pseudo-observation for each row, found as those of the collapsed bounds are (npgp/variational/row_sites.py).

With pseudo-observations ỹ_n of noise variance τ_n the posterior q(f) of a GP has, whatever the GP,

    KL[q ‖ p] = Σ_n E_q[log N(ỹ_n; f_n, τ_n)] − log p(ỹ)

so that ``log p(ỹ) + Σ_n E_q[log p(y_n | f_n) − log N(ỹ_n; f_n, τ_n)]`` is the ELBO at q, and at the best q its gradient
in the hyperparameters is that of ``log p(ỹ)`` at these pseudo-observations, and of the expectations at these moments.
With the density and the moments of an approximation it is an estimate of the evidence, no bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from npgp.observations import Observations
from npgp.variational.row_sites import MIN_CURVATURE, Sites, search_sites, working_sites

#: Most steps of the search; it ends when a step has moved q(f) by no more nats than the tolerance.
MAX_STEPS, TOLERANCE = 30, 1e-4
#: Density and moments are not of one Gaussian, so a step of the search may lower the estimate by this share of it.
SLACK = 1e-4


class Estimate(NamedTuple):
    """
    :param log_density: the estimate.
    :param y: the pseudo-observations of f less the offset, (N,).
    :param noise_variance: their noise variances, (N,).
    :param kl_gap: nats by which one more step of the search would move q(f).
    """

    log_density: jax.Array
    y: jax.Array
    noise_variance: jax.Array
    kl_gap: jax.Array


def estimate(
    gaussian: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Callable[[], tuple[jax.Array, jax.Array]]]],
    arrays: Any,
    rows: Observations,
    prior_variance: jax.Array,
) -> Estimate:
    """
    :param gaussian: of arrays, observations (N,) and their noise variances (N,): their log density, and what computes
        f's means and variances at the rows.
    :param arrays: what hyperparameters decide of it.
    :param rows: what is observed, (N,), of one latent value.
    :param prior_variance: of f at the rows, (N,).
    """
    fixed, observed = lax.stop_gradient((arrays, rows))

    def observations(sites: Sites) -> tuple[jax.Array, jax.Array]:
        return sites.shift / sites.precision, 1.0 / sites.precision

    def solve(sites: Sites) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        y, noise = observations(sites)
        log_density, moments = gaussian(fixed, y, noise)
        mean, variance = moments()
        square = jnp.square(y - mean) + variance
        expected = -0.5 * jnp.sum(jnp.log(noise) + square / noise + math.log(2.0 * math.pi))
        return expected, (mean, variance, expected - log_density)

    def expected_log_prob(mean: jax.Array, variance: jax.Array, rows: Observations = observed) -> jax.Array:
        return jnp.sum(rows.likelihood.expected_log_prob(rows.y, mean + rows.offset, variance))

    prior = lax.stop_gradient(prior_variance)
    offset = jnp.broadcast_to(observed.offset, prior.shape)
    start = working_sites(observed.likelihood, observed.y, offset, prior, offset)
    least = MIN_CURVATURE / prior
    search = search_sites(solve, expected_log_prob, start, MAX_STEPS, TOLERANCE, slack=SLACK, least=least)
    found, kl_gap = lax.stop_gradient(search)
    y, noise = observations(found.sites)
    log_density, _ = gaussian(arrays, y, noise)
    value = log_density + expected_log_prob(found.mean, found.variance, rows) - found.solved
    return Estimate(value, y, noise, kl_gap)
