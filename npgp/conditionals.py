"""
What the approximate posterior does to the residual r that the inducing blocks leave (DESIGN section 2).

Within a row, q gives r the variance it would have after one Gaussian pseudo-observation of precision λ_n, the *site
precision*: ``ĉ_n = d_n / (1 + λ_n d_n)``. The row's share of the ELBO is then

    E_{N(μ_n, s_n + ĉ_n)}[log p(y_n | f_n)] + ½ λ_n ĉ_n − ½ log(1 + λ_n d_n).

=============  ==============================================================================================
``prior``      λ = 0: the residual keeps its prior (Titsias 2009; Hensman et al. 2013).
``tight``      λ_n = 1/σ_n² for Gaussian noise (Bui, Ashman & Turner 2025; Titsias 2025); the expected negative
               curvature of the log likelihood where that is log-concave; a Gaussian minorant for Student-t; for
               anything else the least value over the variances the residual can have. Always a bound.
``shared``     ``ĉ_n = m d_n`` with one learned m at the cost ½ (m − 1 − log m) a row. Always a bound (with the
               best m and Gaussian noise: Artemev, Burt & van der Wilk 2021).
``published``  λ_n = 1/β with one learned β, as Bui et al. ran: a bound for log-concave likelihoods only.
=============  ==============================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints

if TYPE_CHECKING:
    from npgp.likelihoods import Likelihood

Conditional = Literal["prior", "tight", "shared", "published"]

#: Fixed-point iterations for the curvature rule; damped, so that each halves the error or better.
CURVATURE_ITERATIONS = 6
#: Variances tried between 0 and ĉ_n where the likelihood promises nothing.
CERTIFICATE_GRID = 9

#: Name, initial value and constraint of the parameter that a conditional learns.
LEARNED_PARAMETER = {
    "shared": ("residual_scale", 0.5, constraints.unit_interval),
    "published": ("residual_precision", 1.0, constraints.softplus_positive),
}


def check(conditional: str, allowed: tuple[str, ...] = get_args(Conditional)) -> None:
    """Raise ``ValueError`` unless the conditional is one of those allowed."""
    if conditional not in allowed:
        raise ValueError(f"conditional is {conditional!r}; it must be one of {', '.join(map(repr, allowed))}.")


def is_certified(conditional: Conditional, likelihood: Likelihood) -> bool:
    """Whether the ELBO with this conditional is known to lie below the log evidence for this likelihood."""
    return conditional != "published" or likelihood.certificate in ("gaussian", "log-concave")


def row_elbo(
    conditional: Conditional,
    likelihood: Likelihood,
    y: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    residual: jax.Array,
    parameter: ArrayLike | None = None,
) -> jax.Array:
    """
    Each row's expected log likelihood with its conditional term.

    :param conditional: what q does to the residual.
    :param likelihood: p(y_n | f_n).
    :param y: observations, shape (..., N).
    :param mean: μ_n under q(ε), (..., N).
    :param variance: s_n, the variance that comes from the learned blocks, (..., N).
    :param residual: d_n, the residual's prior variance, (..., N).
    :param parameter: m for ``shared`` and λ for ``published``.
    :return: shape (..., N).
    """
    if conditional == "prior":
        return likelihood.expected_log_prob(y, mean, variance + residual)
    if conditional == "shared":
        assert parameter is not None
        cost = 0.5 * (parameter - 1.0 - jnp.log(parameter))
        return likelihood.expected_log_prob(y, mean, variance + parameter * residual) - cost
    if conditional == "published":
        assert parameter is not None
        return _site_elbo(likelihood.expected_log_prob, jnp.asarray(parameter), y, mean, variance, residual)
    if likelihood.certificate == "gaussian":
        # ½ λ ĉ cancels what ĉ adds to the expected square.
        precision = likelihood.precision  # type: ignore[attr-defined]
        return likelihood.expected_log_prob(y, mean, variance) - 0.5 * jnp.log1p(precision * residual)
    if likelihood.certificate == "student-t":
        precision = _fixed_point(lambda v: _student_t_precision(likelihood, y, mean, v), variance, residual)
        return _site_elbo(
            lambda y, m, v: _student_t_minorant(likelihood, y, m, v), precision, y, mean, variance, residual
        )
    precision = _fixed_point(lambda v: likelihood.expected_curvature(y, mean, v), variance, residual)
    if likelihood.certificate == "log-concave":
        return _site_elbo(likelihood.expected_log_prob, precision, y, mean, variance, residual)
    return _least_site_elbo(likelihood, precision, y, mean, variance, residual)


def _shrunk(residual: jax.Array, precision: jax.Array) -> jax.Array:
    return residual / (1.0 + precision * residual)


def _site_elbo(expected_log_prob, precision, y, mean, variance, residual) -> jax.Array:
    c = _shrunk(residual, precision)
    return expected_log_prob(y, mean, variance + c) + 0.5 * precision * c - 0.5 * jnp.log1p(precision * residual)


def _least_site_elbo(likelihood, precision, y, mean, variance, residual) -> jax.Array:
    # The residual's variance given the data lies in [0, ĉ]: take the worst case.
    c = _shrunk(residual, precision)
    tried = [c * i / (CERTIFICATE_GRID - 1) for i in range(CERTIFICATE_GRID)]
    terms = [likelihood.expected_log_prob(y, mean, variance + t) + 0.5 * precision * t for t in tried]
    return jnp.min(jnp.stack(jnp.broadcast_arrays(*terms)), axis=0) - 0.5 * jnp.log1p(precision * residual)


def _fixed_point(curvature, variance: jax.Array, residual: jax.Array) -> jax.Array:
    """
    λ_n = κ_n(s_n + ĉ_n(λ_n)), with no gradient: the ELBO is stationary in λ there.

    Stationary, that is, for log-concave and Student-t likelihoods. For others the value is a bound as well, but its
    gradient leaves out what passes through λ. Any λ ≥ 0 gives a bound, so the damped iteration (geometric means) may
    stop early without harm.
    """
    variance, residual = lax.stop_gradient((variance, residual))
    tiny = jnp.finfo(residual.dtype).tiny * 1e6

    def rule(precision):
        return jnp.maximum(lax.stop_gradient(curvature(variance + _shrunk(residual, precision))), tiny)

    precision = rule(jnp.zeros_like(residual))
    for _ in range(CURVATURE_ITERATIONS):
        precision = jnp.sqrt(precision * rule(precision))
    return precision


def _student_t_precision(likelihood, y, mean, variance) -> jax.Array:
    spread = likelihood.df * jnp.square(likelihood.scale) + jnp.square(y - mean) + variance
    return (likelihood.df + 1.0) / spread


def _student_t_minorant(likelihood, y, mean, variance) -> jax.Array:
    scaled = (jnp.square(y - mean) + variance) / (likelihood.df * jnp.square(likelihood.scale))
    return likelihood.log_prob(y, y) - 0.5 * (likelihood.df + 1.0) * jnp.log1p(scaled)


def collapsed_penalty(conditional: Conditional, residual: jax.Array, noise_variance: ArrayLike) -> jax.Array:
    """
    What the residual costs the collapsed bound for Gaussian noise (DESIGN section 5), a scalar.

    ``shared`` takes its best m, which gives Artemev et al.'s bound; ``published`` its best β, which gives ``tight``.

    :param residual: d_n, (N,).
    :param noise_variance: σ², a scalar or (N,).
    """
    ratio = residual / noise_variance
    if conditional == "prior":
        return 0.5 * jnp.sum(ratio)
    if conditional == "shared":
        return 0.5 * ratio.shape[-1] * jnp.log1p(jnp.mean(ratio))
    return 0.5 * jnp.sum(jnp.log1p(ratio))
