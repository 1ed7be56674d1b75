"""
What the approximate posterior does to the residual r that the inducing blocks leave (DESIGN section 2).

Within a group of rows, q gives r the covariance it would have after one Gaussian pseudo-observation per row of
precision λ_n, the *site precision*: ``ĉ_n = [(D⁻¹ + Λ)⁻¹]_nn``, or ``d_n / (1 + λ_n d_n)`` for a row by itself. The
group's share of the ELBO is then

    Σ_n { E_{N(μ_n, s_n + ĉ_n)}[log p(y_n | f_n)] + ½ λ_n ĉ_n } − ½ log|I + Λ^½ D Λ^½|.

=============  ==============================================================================================
``prior``      λ = 0: the residual keeps its prior (Titsias 2009; Hensman et al. 2013).
``tight``      Groups of one row. λ_n = 1/σ_n² for Gaussian noise (Bui, Ashman & Turner 2025; Titsias 2025); the
               expected negative curvature of the log likelihood where that is log-concave; a Gaussian minorant
               for Student-t; for anything else the least value over the variances the residual can have. Always a
               bound.
``grouped``    The same in groups of neighbouring rows: tighter, and nearly as cheap. Always a bound.
``full``       One group of all rows, at O(N³); the ELBO of a q, whatever the likelihood (Bui et al., appendix A).
``shared``     ``ĉ_n = m d_n`` with one learned m at the cost ½ (m − 1 − log m) a row. Always a bound (with the
               best m and Gaussian noise: Artemev, Burt & van der Wilk 2021).
``published``  λ_n = 1/β with one learned β, as Bui et al. ran: a bound for log-concave likelihoods only.
=============  ==============================================================================================

Where an observation depends on several latent values, each has a residual and a site precision of its own, and the
terms are summed over them. Latents in which the likelihood is jointly log-concave, whatever the others are
(:attr:`npgp.likelihoods.Likelihood.concave`), have the curvature rule, the others precision 0. That is a bound: given
the others' residuals, the row's factor is log-concave in the first, to which the proof for log-concave likelihoods
applies as it does to one (the Gaussian correlation inequality holds for groups); the average over the others' residuals
is then Jensen's inequality.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp.likelihoods.columns import Columns
from npgp.sparse.groups import Groups, consecutive, single
from npgp.sparse.residuals import GroupResidual, Residual, RowResidual

if TYPE_CHECKING:
    from npgp.likelihoods import Likelihood

Conditional = Literal["prior", "tight", "grouped", "full", "shared", "published"]

#: Fixed-point iterations for the curvature rule, rows one by one; damped, so that each halves the error or better.
CURVATURE_ITERATIONS = 6
#: Further iterations in groups, each with a factorisation of every group.
GROUP_ITERATIONS = 3
#: Quadrature nodes for the curvature. Any precision gives a bound, so an approximate one will do.
CURVATURE_NODES = 20
#: Shares ĉ/d among which the residual's variance is chosen where the likelihood promises nothing, beside 0.
CERTIFICATE_SHARES = tuple(2.0 ** (-i / 2) for i in reversed(range(16)))

#: Name, initial value and constraint of the parameter that a conditional learns.
LEARNED_PARAMETER = {
    "shared": ("residual_scale", 0.5, constraints.unit_interval),
    "published": ("residual_precision", 1.0, constraints.softplus_positive),
}


def check(conditional: str, allowed: tuple[str, ...] = get_args(Conditional)) -> None:
    """Raise ``ValueError`` unless the conditional is one of those allowed."""
    if conditional not in allowed:
        raise ValueError(f"conditional is {conditional!r}; it must be one of {', '.join(map(repr, allowed))}.")


def groups_for(conditional: str, groups: Groups | int | None, num_rows: int) -> Groups | None:
    """
    The groups of rows that a conditional needs; ``None`` for those that take rows one by one.

    :param conditional: what q does to the residual.
    :param groups: for ``grouped``, a partition, or the number g of rows in each group of consecutive rows.
    :param num_rows: number of rows N.
    :raises ValueError: for groups of other rows, or if ``grouped`` has none, or another conditional has them.
    """
    if conditional != "grouped":
        if groups is not None:
            raise ValueError(f"groups is given, but conditional is {conditional!r}; only 'grouped' has groups.")
        return single(num_rows) if conditional == "full" else None
    if groups is None:
        raise ValueError(
            "conditional='grouped' needs groups: a partition such as npgp.median_split(X, size), or the number of rows "
            "in each group of consecutive rows."
        )
    if not isinstance(groups, Groups):
        if not isinstance(groups, int) or groups < 1 or num_rows % groups:
            raise ValueError(
                f"groups is {groups!r}; it must be npgp Groups, or a whole number that divides the {num_rows} rows."
            )
        return consecutive(num_rows, groups)
    if groups.num_rows != num_rows:
        raise ValueError(f"groups is a partition of {groups.num_rows} rows, but there are {num_rows} rows.")
    return groups


def is_certified(conditional: Conditional, likelihood: Likelihood) -> bool:
    """
    Whether the ELBO with this conditional is known to lie below the log evidence for this likelihood.

    Expectations taken by quadrature are taken to be exact (:func:`npgp.likelihoods.quadrature_error` measures them).
    """
    return conditional != "published" or likelihood.certificate in ("gaussian", "log-concave")


def row_elbo(
    conditional: Conditional,
    likelihood: Likelihood,
    y: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    residual: jax.Array | Residual,
    parameter: ArrayLike | None = None,
    present: jax.Array | None = None,
) -> jax.Array:
    """
    Each row's expected log likelihood with its conditional term.

    :param conditional: what q does to the residual.
    :param likelihood: p(y_n | f_n).
    :param y: observations, shape (..., N).
    :param mean: μ_n under q(ε), (..., N); for C latent values an observation, (C, ..., N), here and below.
    :param variance: s_n, the variance that comes from the learned blocks, (..., N).
    :param residual: the residual's prior: d_n, (..., N), or for ``grouped`` and ``full`` its covariances
        (:class:`npgp.sparse.residuals.GroupResidual`).
    :param parameter: m for ``shared`` and λ for ``published``.
    :param present: False for rows without an observation, whose values are then of no meaning; (..., N).
    :return: shape (..., N). Rows of one group share its terms, so that only sums over whole groups are bounds.
    """
    if not isinstance(residual, Residual):
        residual = RowResidual(residual)
    if isinstance(likelihood, Columns):
        rule = functools.partial(row_elbo, conditional)
        return _by_part(rule, likelihood, y, mean, variance, residual, parameter, present)
    if conditional == "prior":
        return likelihood.expected_log_prob(y, mean, variance + residual.variance)
    if conditional == "shared":
        assert parameter is not None
        cost = 0.5 * likelihood.num_latents * (parameter - 1.0 - jnp.log(parameter))
        return likelihood.expected_log_prob(y, mean, variance + parameter * residual.variance) - cost

    if conditional == "published":
        assert parameter is not None
        shape = jnp.shape(parameter) if likelihood.num_latents == 1 else mean.shape
        precision = _seen(jnp.broadcast_to(parameter, shape), mean, present)
        return _site_elbo(likelihood, likelihood.expected_log_prob, precision, y, mean, variance, residual)
    precision = site_precision(conditional, likelihood, y, mean, variance, residual, present)
    if likelihood.certificate == "gaussian":
        # ½ λ ĉ cancels what ĉ adds to the expected square.
        return likelihood.expected_log_prob(y, mean, variance) - residual.cost(precision)
    if conditional == "full" or likelihood.certificate == "log-concave" or likelihood.num_latents > 1:
        return _site_elbo(likelihood, likelihood.expected_log_prob, precision, y, mean, variance, residual)
    if likelihood.certificate == "student-t":
        minorant = functools.partial(_student_t_minorant, likelihood)
        return _site_elbo(likelihood, minorant, precision, y, mean, variance, residual)
    return _least_site_elbo(likelihood.expected_log_prob, precision, y, mean, variance, residual)


def site_precision(
    conditional: Conditional,
    likelihood: Likelihood,
    y: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    residual: Residual,
    present: jax.Array | None = None,
) -> jax.Array:
    """
    λ_n of ``tight``, ``grouped`` and ``full``; parameters as for :func:`row_elbo`.

    :return: shape (..., N), or (N,) where it is the same for all outputs.
    """
    if isinstance(likelihood, Columns):
        own = functools.partial(site_precision, conditional)
        return _by_part(own, likelihood, y, mean, variance, residual, present)
    if likelihood.certificate == "gaussian":
        return _seen(likelihood.precision, mean, present)  # type: ignore[attr-defined]
    certified = conditional != "full"
    if likelihood.certificate == "none" and certified and likelihood.num_latents == 1:
        return _seen(_precision_of_least(likelihood, y, mean, variance, residual.variance), mean, present)
    felt = None
    if certified and len(likelihood.concave) < likelihood.num_latents and likelihood.num_latents > 1:
        felt = np.isin(np.arange(likelihood.num_latents), likelihood.concave)
        felt = felt.reshape((-1,) + (1,) * (mean.ndim - 1))
    quick = likelihood.site_curvature(y, mean, variance + residual.variance)
    if quick is not None:
        # With its gradient: it is near the best precision, where the ELBO would be stationary, and not there.
        left, _ = RowResidual(residual.variance).given(quick)
        quick = likelihood.site_curvature(y, mean, variance + left)
        assert quick is not None
        return _seen(quick if felt is None else jnp.where(felt, quick, 0.0), mean, present)
    if likelihood.certificate == "student-t" and certified:
        rule = functools.partial(_student_t_precision, likelihood, y, mean)
    else:
        rule = functools.partial(_coarse(likelihood).expected_curvature, y, mean)
    fixed = _fixed_point(lambda v: _seen(rule(v), mean, present), variance, residual, felt)
    return _seen(fixed, mean, present)


def _by_part(rule, likelihood: Columns, y, mean, variance, residual: Residual, *others) -> jax.Array:
    """A rule for one likelihood, for each part of several: outputs have residuals of their own."""

    def of_part(part, take):
        if isinstance(residual, GroupResidual):
            left: Residual = GroupResidual(take(residual.covariance, axis=-4), residual.groups)
        else:
            left = RowResidual(take(residual.variance))
        return rule(part, take(y), take(mean), take(variance), left, *map(take, others))

    return likelihood.by_part(of_part)


def _seen(precision: jax.Array, mean: jax.Array, present: jax.Array | None) -> jax.Array:
    """The precision of rows that have an observation; the others tell nothing about their group."""
    if present is not None:
        return jnp.where(present, precision, 0.0)
    # Not to all outputs: what is the same for them is factorised once.
    return jnp.broadcast_to(precision, jnp.broadcast_shapes(jnp.shape(precision), mean.shape[-1:]))


def _site_elbo(likelihood, expected_log_prob, precision, y, mean, variance, residual: Residual) -> jax.Array:
    left, cost = residual.given(precision)
    terms = 0.5 * precision * left - cost
    if likelihood.num_latents > 1:
        terms = jnp.sum(terms, axis=0)
    return expected_log_prob(y, mean, variance + left) + terms


def _least_site_elbo(expected_log_prob, precision, y, mean, variance, residual: Residual) -> jax.Array:
    """
    Where the likelihood promises nothing: the residual's variance given the data may be anything in [0, ĉ_n], and the
    row's term is its least value there, on a grid.
    """
    left, cost = residual.given(precision)

    def term(share):
        return expected_log_prob(y, mean, variance + share * left) + 0.5 * precision * share * left

    return jnp.min(lax.map(term, _shares(left.dtype)), axis=0) - cost


def _shares(dtype) -> jax.Array:
    return jnp.asarray((0.0, *CERTIFICATE_SHARES), dtype)


def _precision_of_least(likelihood, y, mean, variance, residual: jax.Array) -> jax.Array:
    """
    The precision, of as many as there are shares, at which a row by itself has the largest certified term.

    ``λ_n = (1/share − 1)/d_n`` depends on d_n, with a gradient: the term is not stationary in λ_n. Which share is best
    does not change in the neighbourhood.
    """
    variance, d, mean = lax.stop_gradient((variance, residual, mean))
    shares = _shares(d.dtype)
    values = lax.map(lambda share: likelihood.expected_log_prob(y, mean, variance + share * d), shares)  # (S, ..., N)
    wide = (-1,) + (1,) * (values.ndim - 1)

    def certified(i):
        # λ ĉ and λ c with ĉ and c shares of d: no division by d.
        terms = values + 0.5 * (1.0 / shares[i] - 1.0) * shares.reshape(wide)
        inside = jnp.arange(len(shares)).reshape(wide) <= i
        return jnp.min(jnp.where(inside, terms, jnp.inf), axis=0) + 0.5 * jnp.log(shares[i])

    best = jnp.argmax(lax.map(certified, jnp.arange(1, len(shares))), axis=0)
    left = residual > jnp.finfo(d.dtype).eps ** 2  # where it can be divided by, twice in the gradient
    return jnp.where(left, (1.0 / shares[1:][best] - 1.0) / jnp.where(left, residual, 1.0), 0.0)


def _coarse(likelihood: Likelihood) -> Likelihood:
    nodes = getattr(likelihood, "num_nodes", 0)
    if nodes <= CURVATURE_NODES or not dataclasses.is_dataclass(likelihood):
        return likelihood
    return dataclasses.replace(likelihood, num_nodes=CURVATURE_NODES)  # type: ignore[return-value]


def _fixed_point(curvature, variance: jax.Array, residual: Residual, felt: np.ndarray | None) -> jax.Array:
    """
    λ_n = κ_n(s_n + ĉ_n(λ)), with no gradient: the ELBO is stationary in λ there, or λ_n is at its limit 0. And 0 where
    ``felt`` is false.

    Any λ ≥ 0 gives a bound, so the damped iteration (geometric means) may stop early without harm.
    """
    variance, residual = lax.stop_gradient((variance, residual))
    rows = RowResidual(residual.variance)
    tiny = jnp.finfo(variance.dtype).tiny * 1e6

    def rule(precision, residual):
        raised = jnp.maximum(lax.stop_gradient(curvature(variance + residual.given(precision)[0])), tiny)
        return raised if felt is None else jnp.where(felt, raised, 0.0)

    precision = rule(jnp.zeros_like(rows.variance), rows)
    for _ in range(CURVATURE_ITERATIONS):
        precision = jnp.sqrt(precision) * jnp.sqrt(rule(precision, rows))
    if isinstance(residual, RowResidual):
        return precision
    for _ in range(GROUP_ITERATIONS):
        precision = jnp.sqrt(precision) * jnp.sqrt(rule(precision, residual))
    return precision


def _student_t_precision(likelihood, y, mean, variance) -> jax.Array:
    spread = likelihood.df * jnp.square(likelihood.scale) + jnp.square(y - mean) + variance
    return (likelihood.df + 1.0) / spread


def _student_t_minorant(likelihood, y, mean, variance) -> jax.Array:
    scaled = (jnp.square(y - mean) + variance) / (likelihood.df * jnp.square(likelihood.scale))
    return likelihood.log_prob(y, y) - 0.5 * (likelihood.df + 1.0) * jnp.log1p(scaled)


def collapsed_penalty(conditional: Conditional, residual: Residual, noise_variance: ArrayLike) -> jax.Array:
    """
    What the residual costs the collapsed bound for Gaussian noise (DESIGN section 5), a scalar.

    ``shared`` takes its best m, which gives Artemev et al.'s bound; ``published`` its best β, which gives ``tight``.

    :param residual: the residual's prior at the training rows; in groups for ``grouped`` and ``full``.
    :param noise_variance: σ², a scalar or (N,).
    """
    variance = residual.variance
    if conditional == "prior":
        return 0.5 * jnp.sum(variance / noise_variance)
    if conditional == "shared":
        return 0.5 * variance.shape[-1] * jnp.log1p(jnp.mean(variance / noise_variance))
    return jnp.sum(residual.cost(jnp.broadcast_to(1.0 / jnp.asarray(noise_variance), variance.shape)))
