"""
Site precisions λ_n, and the terms of the ELBO that they give (docs/theory.md, section 2).

Which precisions give a bound, and with which terms, depends on what the likelihood proves of itself
(:attr:`npgp.likelihoods.Likelihood.proof`). Where an observation depends on several latent values, each has a residual
and a site precision of its own, and the terms are summed over them. Latent values in which the likelihood is jointly
log-concave, whatever the others are (:attr:`npgp.likelihoods.Likelihood.concave`), have the curvature rule, the others
precision 0. That is a bound: given the others' residuals, the row's factor is log-concave in the first, to which the
proof for log-concave likelihoods applies as it does to one (the Gaussian correlation inequality holds for groups); the
average over the others' residuals is then Jensen's inequality.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from npgp.conditionals.base import ObservedRows
from npgp.likelihoods import Likelihood
from npgp.programs.backend import maximum
from npgp.sparse.residuals import Residual, RowResidual

#: Evaluations of the curvature rule, rows one by one, all but the first two of which give a secant step.
EVALUATIONS = 5
#: Largest slope of the curvature rule that its fixed point is extrapolated with.
STEEPEST = 0.9
#: Further iterations in groups, each with a factorization of every group; damped: each halves the error or better.
GROUP_ITERATIONS = 3
#: Quadrature nodes for the curvature. Any precision gives a bound, so an approximate one will do.
CURVATURE_NODES = 20
#: And of trapezoid rules: for all variances that the curvature rule tries, and for the limits of likelihoods that are
#: single-peaked, where the term is not stationary in λ: with 20 nodes it lost .0045 nats in some rows.
LIMIT_NODES = 32
#: And for the least value over the residual's variance, of log p with several peaks: with 32 nodes it was off by .09.
SHARE_NODES = 48
#: Halvings of a bracket of e²⁰ for the precision of likelihoods that are single-peaked; two Newton steps follow. Terms
#: then lose at most 6e-4 nats.
HALVINGS, LOG_BRACKET = 7, 20.0
#: Shares ĉ/d among which the residual's variance is chosen where the likelihood proves nothing, beside 0.
CERTIFICATE_SHARES = tuple(2.0 ** (-i / 2) for i in reversed(range(16)))

# ---------------------------------------------------------------------------------------------------------------
# Terms, as of Conditional.row_terms.


def certified_terms(rows: ObservedRows) -> jax.Array:
    """Each row's term at the best site precisions for which the likelihood's proof makes a bound."""
    by_proof = {"none": _least_terms, "single-peaked": _lesser_terms}
    if rows.likelihood.num_latents == 1 and rows.likelihood.proof in by_proof:
        return by_proof[rows.likelihood.proof](rows)
    return exact_terms(rows, certified_precision(rows))


def exact_terms(rows: ObservedRows, precision: jax.Array) -> jax.Array:
    """Each row's term of the ELBO itself."""
    if rows.likelihood.proof == "gaussian":
        # ½ λ ĉ cancels what ĉ adds to the expected square.
        return rows.expected_log_prob() - rows.residual.cost(precision)
    return site_terms(rows, precision)


def site_terms(rows: ObservedRows, precision: jax.Array) -> jax.Array:
    """``E[log p] + ½ λ ĉ − cost``."""
    left, cost = rows.residual.given(precision)
    terms = 0.5 * precision * left - cost
    if rows.likelihood.num_latents > 1:
        terms = jnp.sum(terms, axis=0)
    return rows.expected_log_prob(left) + terms


def _least_terms(rows: ObservedRows) -> jax.Array:
    """
    Where the residual's variance given the data may be anything in [0, ĉ_n]: the row's term is its least value there,
    on a grid. Which that is, is found without gradient.
    """
    precision, expected = _searched(rows)
    left, cost = rows.residual.given(precision)
    s, left_, precision_ = lax.stop_gradient((rows.variance, left, precision))
    shares = _shares(left.dtype)
    values = lax.map(lambda share: expected(s + share * left_) + 0.5 * precision_ * share * left_, shares)
    left = shares[jnp.argmin(values, axis=0)] * left
    return rows.expected_log_prob(left) + 0.5 * precision * left - cost


def _lesser_terms(rows: ObservedRows) -> jax.Array:
    """
    The same where the least value is at 0 or at ĉ_n.

    The best precision of a row by itself makes both equal where neither is stationary in it. The gradient is then the
    mean of theirs by those weights for which it is 0 in the precision (Danskin's theorem); that of the lesser one would
    depend on rounding.
    """
    precision, alone = certified_precision(rows), isinstance(rows.residual, RowResidual)
    if alone:
        precision = lax.stop_gradient(precision)
    left, cost = rows.residual.given(precision)
    without, within = rows.expected_log_prob(), rows.expected_log_prob(left) + 0.5 * precision * left
    weight = (without < within).astype(left.dtype)
    if alone:
        likelihood, y, mean, variance, fixed = lax.stop_gradient((*rows[:4], left))
        excess = fixed * maximum(likelihood.expected_curvature(y, mean, variance + fixed) - precision, 0.0)
        weight = jnp.where(precision > 0.0, excess / (1.0 + excess), weight)
    both = weight * without + (1.0 - weight) * within
    return both + lax.stop_gradient(jnp.minimum(without, within) - both) - cost


# ---------------------------------------------------------------------------------------------------------------
# Precisions of likelihoods of one part. Results are (..., N), or (N,) where it is the same for all outputs.


def certified_precision(rows: ObservedRows) -> jax.Array:
    """λ_n of the conditionals that are bounds by the likelihood's proof."""
    likelihood = rows.likelihood
    if likelihood.proof == "gaussian":
        return of_present(likelihood.precision, rows)
    if likelihood.num_latents == 1:
        if likelihood.proof == "none":
            return _searched(rows)[0]
        if likelihood.proof == "single-peaked":
            return of_present(_precision_at_ends(rows), rows)
    certified = None
    if len(likelihood.concave) < likelihood.num_latents:
        certified = np.isin(np.arange(likelihood.num_latents), likelihood.concave)
        certified = certified.reshape((-1,) + (1,) * (rows.mean.ndim - 1))
    return _curvature_precision(rows, certified)


def best_precision(rows: ObservedRows) -> jax.Array:
    """λ_n for one group of all rows, where any are a bound."""
    if rows.likelihood.proof == "gaussian":
        return of_present(rows.likelihood.precision, rows)
    return _curvature_precision(rows)


def _curvature_precision(rows: ObservedRows, certified: Any = None) -> jax.Array:
    """
    The expected negative curvature of the log likelihood.

    :param certified: if not all of them, the latent values that may have a positive precision.
    """
    likelihood, y, mean, variance, residual, _ = rows
    quick = likelihood.site_curvature(y, mean, variance + residual.variance)
    if quick is not None:
        # With its gradient: it is near the best precision, where the ELBO would be stationary, and not there.
        left, _ = RowResidual(residual.variance).given(quick)
        quick = likelihood.site_curvature(y, mean, variance + left)
        assert quick is not None
        return of_present(quick if certified is None else jnp.where(certified, quick, 0.0), rows)
    coarse, y, mean = jax.tree.map(lax.stop_gradient, (_coarse(likelihood), y, mean))
    rule: Any = partial(coarse.expected_curvature, y, mean)
    if likelihood.by_quadrature and likelihood.num_latents == 1:
        expected = _coarse(likelihood, LIMIT_NODES).expected_log_probs(y, mean, variance, residual.variance)

        def at_nodes(variance: jax.Array) -> jax.Array:  # log p is evaluated there once, for all variances
            return -2.0 * jax.jvp(expected, (variance,), (jnp.ones_like(variance),))[1]

        rule = at_nodes

    return _fixed_point(rule, rows, certified)


def of_present(precision: jax.Array, rows: ObservedRows) -> jax.Array:
    """The precision of rows that have an observation; the others tell nothing about their group."""
    if rows.present is not None:
        return jnp.where(rows.present, precision, 0.0)
    # Not to all outputs: what is the same for them is factorized once.
    return jnp.broadcast_to(precision, jnp.broadcast_shapes(jnp.shape(precision), rows.mean.shape[-1:]))


def _searched(rows: ObservedRows) -> tuple[jax.Array, Callable[..., jax.Array]]:
    """The certified precision, and E[log p(y | f)] as a function of the variance of f, by which it was found."""
    likelihood, y, mean, variance, residual, _ = rows
    expected = _coarse(likelihood, SHARE_NODES).expected_log_probs(y, mean, variance, residual.variance)
    return of_present(_precision_of_least(rows, expected), rows), expected


def _shares(dtype: Any) -> jax.Array:
    return jnp.asarray((0.0, *CERTIFICATE_SHARES), dtype)


def _precision_of_least(rows: ObservedRows, expected: Callable[..., jax.Array]) -> jax.Array:
    """
    The precision, of as many as there are shares, at which a row by itself has the largest certified term.

    ``λ_n = (1/share − 1)/d_n`` depends on d_n, with a gradient: the term is not stationary in λ_n. Which share is best
    does not change in the neighborhood.

    :param expected: E[log p(y | f)] as a function of the variance of f.
    """
    residual = rows.residual.variance
    variance, d = lax.stop_gradient((rows.variance, residual))
    shares = _shares(d.dtype)
    values = lax.map(lambda share: expected(variance + share * d), shares)  # (S, ..., N)
    wide = (-1,) + (1,) * (values.ndim - 1)

    def certified(i: Any) -> jax.Array:
        # λ ĉ and λ c with ĉ and c shares of d: no division by d.
        terms = values + 0.5 * (1.0 / shares[i] - 1.0) * shares.reshape(wide)
        inside = jnp.arange(len(shares)).reshape(wide) <= i
        return jnp.min(jnp.where(inside, terms, jnp.inf), axis=0) + 0.5 * jnp.log(shares[i])

    best = jnp.argmax(lax.map(certified, jnp.arange(1, len(shares))), axis=0)
    left = residual > jnp.finfo(d.dtype).eps ** 2  # where it can be divided by, twice in the gradient
    return jnp.where(left, (1.0 / shares[1:][best] - 1.0) / jnp.where(left, residual, 1.0), 0.0)


def _precision_at_ends(rows: ObservedRows) -> jax.Array:
    """
    The precision at which a row by itself has the largest certified term, where the curvature κ is single-peaked.

    It is the largest λ that is neither above κ(ĉ) nor above the mean of κ on [0, ĉ]: up to the first, the term's value
    at ĉ grows with λ, and the least value is at an end; up to the second, that end is ĉ. Beyond either the term falls.
    0 where there is no such λ > 0. With its gradient, by the implicit function theorem, for the term is not stationary
    where the second binds.
    """

    def limits(
        precision: jax.Array, at_least: jax.Array, expected: Callable[..., jax.Array], variance: jax.Array, d: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """How far λ is below each, the second as an integral over [0, ĉ]; and ĉ."""
        left = d / (1.0 + precision * d)
        there, slope = jax.jvp(expected, (variance + left,), (jnp.ones_like(left),))
        return -2.0 * slope - precision, 2.0 * (at_least - there) - precision * left, left

    # Not in the loop: the expectation without residual is the same for all precisions.
    likelihood, y, mean, variance, *_ = rows
    residual, coarse = rows.residual.variance, _coarse(likelihood, LIMIT_NODES)
    expected = coarse.expected_log_probs(y, mean, variance, residual)
    s, d = lax.stop_gradient((variance, residual))
    fixed = expected(s), expected, s, d
    most = lax.stop_gradient(likelihood.greatest_curvature)
    most = jnp.broadcast_to(most, jnp.broadcast_shapes(jnp.shape(y), mean.shape, residual.shape))

    def halve(_: Any, bracket: Any) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        at_peak, below_mean, _ = limits(most * jnp.exp(-middle), *fixed)
        within = (at_peak >= 0.0) & (below_mean >= 0.0)
        return jnp.where(within, low, middle), jnp.where(within, middle, high)

    none = jnp.full_like(most, LOG_BRACKET)
    _, small = lax.fori_loop(0, HALVINGS, halve, (jnp.zeros_like(most), none))
    precision = jnp.where(small < none, most * jnp.exp(-small), 0.0)

    def newton(precision: jax.Array, *given: Any) -> jax.Array:
        """
        A step upward, to the nearer limit. In −λ the derivative of the second is ĉ (1 + ĉ (κ − λ)); that of the first
        is about 1, where the term is stationary. Where nothing is left λ does not matter.
        """
        at_peak, below_mean, left = limits(precision, *given)
        slope = lax.stop_gradient(left * (1.0 + left * at_peak))
        felt = slope > jnp.finfo(precision.dtype).eps
        move = jnp.minimum(below_mean / jnp.where(felt, slope, 1.0), at_peak)
        return precision + jnp.where(felt & (precision > 0.0), move, 0.0)

    # What halving has left, and the gradient.
    precision = lax.stop_gradient(newton(precision, *fixed))
    of = partial(coarse.expected_log_prob, y, mean)
    return newton(precision, of(variance), of, variance, residual)


def _coarse(likelihood: Likelihood, at_most: int = CURVATURE_NODES) -> Likelihood:
    return likelihood if getattr(likelihood, "num_nodes", 0) <= at_most else likelihood.with_nodes(at_most)


def _fixed_point(curvature: Callable[..., jax.Array], rows: ObservedRows, certified: Any = None) -> jax.Array:
    """
    λ_n = κ_n(s_n + ĉ_n(λ)), with no gradient: the ELBO is stationary in λ there, or λ_n is at its limit 0. And 0 for
    latent values that are not ``certified``.

    Row by row that is solved for log λ by secants. After five evaluations of the rule its error is below 1e-4 in nine
    rows of ten, over all that means and variances may be. In groups a damped iteration follows, of geometric means.
    Any λ ≥ 0 gives a bound, so either may stop early without harm.
    """
    variance, residual = lax.stop_gradient((rows.variance, rows.residual))
    alone = RowResidual(residual.variance)
    tiny = jnp.finfo(variance.dtype).tiny * 1e6
    least, most = jnp.log(tiny), -jnp.log(tiny)

    def kept(precision: jax.Array) -> jax.Array:
        raised = jnp.clip(precision, tiny, 1.0 / tiny)  # infinite times 0 would be NaN
        return raised if certified is None else jnp.where(certified, raised, 0.0)

    def rule(precision: jax.Array, residual: Residual) -> jax.Array:
        return kept(of_present(curvature(variance + residual.given(precision)[0]), rows))

    def logarithm(at: jax.Array) -> jax.Array:
        """What the rule makes of log λ."""
        return jnp.log(maximum(rule(kept(jnp.exp(at)), alone), tiny))

    def secant(old: Any, new: Any) -> jax.Array:
        """The next iterate, from the last two points."""
        moved, slope = new[0] - old[0], new[1] - old[1]
        slope = jnp.minimum(slope / jnp.where(moved == 0.0, 1.0, moved), STEEPEST)
        return jnp.clip(new[0] + (new[1] - new[0]) / (1.0 - slope), least, most)

    def step(i: Any, state: Any) -> Any:
        # A loop, for the rule is most of what the program of a step has to compile.
        at, before = state
        latest = at, logarithm(at)
        start = jnp.where(i == 0, latest[1], 0.5 * (latest[0] + latest[1]))
        return jnp.where(i < 2, start, secant(before, latest)), latest

    start = jnp.full_like(jax.eval_shape(logarithm, jnp.full_like(alone.variance, least)), least)  # λ = 0, all but
    at, _ = lax.fori_loop(0, EVALUATIONS, step, (start, (start, start)))
    precision = kept(jnp.exp(at))
    if not isinstance(residual, RowResidual):
        precision = lax.fori_loop(
            0, GROUP_ITERATIONS, lambda _, p: jnp.sqrt(p) * jnp.sqrt(rule(p, residual)), precision
        )
    return of_present(precision, rows)
