"""Collapsed bounds for Gaussian noise: q(ε) at its optimum, as a NumPyro distribution over all observations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.conditionals import Conditional
from npgp.functionals.rows import RowsLike, as_rows, covariance
from npgp.kernels import Kernel, as_kernel
from npgp.programs.backend import maximum
from npgp.programs.compiled import STEPS, one_program
from npgp.programs.double import in_double_if
from npgp.sparse.projection import Projection, as_blocks, factorize
from npgp.sparse.residuals import Residual
from npgp.variational.updates import ScaledProjection


def collapsed_bound(
    projection: Projection,
    residual: Residual,
    y: jax.Array,
    noise_variance: ArrayLike,
    covariances: Sequence[str],
    conditional: Conditional,
) -> jax.Array:
    """
    The ELBO for Gaussian noise at the optimal q(ε) (docs/theory.md, section 5).

    .. code-block:: python

        projector = npgp.sparse.factorize(kernel, [npgp.features.Points(Z)])
        projection = projector(X)
        residual = npgp.sparse.residual_of(projector, X, projection, [True], None)
        values = jnp.asarray(y)
        tight = npgp.conditionals.Tight()
        bound = npgp.collapsed.collapsed_bound(
            projection, residual, values, noise_variance, ["dense"], tight
        )
        assert np.isclose(
            bound,
            npgp.CollapsedGP(kernel, X, Z, noise_variance=noise_variance).log_prob(y),
            rtol=1e-3,
        )

    :param projection: of the training inputs.
    :param residual: what the blocks with a learned covariance leave at the training inputs.
    :param y: observations less the offset, shape (..., N).
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param covariances: ``"dense"``, ``"diagonal"`` or ``"mean-only"`` (moves the mean only) for each block.
    :param conditional: what q does to the residual.
    :return: shape (...).
    """
    scaled = ScaledProjection.of(projection, noise_variance)
    log_det = jnp.zeros((), y.dtype)
    for i, kind in enumerate(covariances):
        if kind == "dense":
            log_det = log_det + linalg.log_determinant(scaled.factor(i))
        elif kind == "diagonal":
            log_det = log_det + jnp.sum(jnp.log(scaled.diagonal(i)))
    penalty = conditional.penalty(residual, noise_variance)
    return _fit_term(scaled, y) + _normalizer(scaled, y) - 0.5 * log_det - penalty


def _fit_term(scaled: ScaledProjection, y: jax.Array) -> jax.Array:
    """``−½ yᵀ (Σ_i A_iᵀ A_i + σ²I)⁻¹ y``."""
    return -0.5 * (jnp.sum(jnp.square(y / scaled.scale), -1) - scaled.explained(y))


def _normalizer(scaled: ScaledProjection, y: jax.Array) -> jax.Array:
    """``−½ N log 2πσ²``."""
    log_scale = jnp.sum(jnp.log(jnp.broadcast_to(scaled.scale, y.shape[-1:])))
    return -0.5 * y.shape[-1] * math.log(2.0 * math.pi) - log_scale


def upper_bound(
    kernel: Kernel,
    X: RowsLike,
    y: ArrayLike,
    inducing: object,
    *,
    noise_variance: ArrayLike,
    residual_norm: ArrayLike | None = None,
    jitter: float | None = None,
) -> jax.Array:
    """
    Titsias' (2014) upper bound on the log evidence for Gaussian noise, at O(NM²):

    .. code-block:: python

        lower = npgp.CollapsedGP(kernel, X, Z, noise_variance=noise_variance).log_prob(y)
        upper = npgp.collapsed.upper_bound(kernel, X, y, Z, noise_variance=noise_variance)

    :param kernel: the kernel.
    :param X: training inputs, (N, D), or functionals.
    :param y: observations less the offset, (..., N).
    :param inducing: Z of shape (M, D), a block of features, or a list of these.
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param residual_norm: no less than the largest eigenvalue of the residual's covariance; its trace if omitted.
    :param jitter: relative jitter tried first.
    :return: shape (...).
    :raises ValueError: for arrays of the wrong shape or with NaN, and for a noise variance that is not positive.
    """
    X = as_rows(X)
    y = checks.observations(y, X.shape[0], X.dtype)
    noise_variance = checks.require_positive(noise_variance, "noise_variance")
    checks.require_per_row(noise_variance, "noise_variance", X.shape[0])
    kernel = as_kernel(kernel)

    def bound(kernel, X, blocks, y, noise_variance, residual_norm):
        return projected_upper_bound(factorize(kernel, blocks, jitter)(X), y, noise_variance, residual_norm)

    return in_double_if(kernel.wants_double, bound, kernel, X, as_blocks(inducing), y, noise_variance, residual_norm)


def projected_upper_bound(
    projection: Projection, y: jax.Array, noise_variance: ArrayLike, residual_norm: ArrayLike | None = None
) -> jax.Array:
    """
    :func:`upper_bound` from the projection.

    ``−½ log|2π(Q + σ²I)| − ½ yᵀ (Q + (σ² + c)I)⁻¹ y`` with Q what the blocks explain of the covariance, and c no less
    than the largest eigenvalue of the residual's covariance.

    Where a factorization of ``B = I + ÃÃᵀ`` takes Δ = diag(δ) on the diagonal, as in float32 where noise is small, the
    bound is made wide enough: as no eigenvalue of B is below 1, ``log|B| ≥ log|B + Δ| − Σ_m log(1 + δ_m)``, which is
    ``log|I + Δ^½ B⁻¹ Δ^½| ≤ log|I + Δ|``, and ``B⁻¹ ≼ (1 + max δ) (B + Δ)⁻¹``.

    :param projection: of the training inputs.
    :param y: observations less the offset, shape (..., N).
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param residual_norm: c; the trace ``Σ d_n`` if omitted.
    :return: shape (...).
    """
    c = jnp.sum(projection.residual_variance()) if residual_norm is None else residual_norm
    scaled = ScaledProjection.of(projection, noise_variance)
    log_det = sum((linalg.log_determinant(L) for L in scaled.cholesky), jnp.zeros((), y.dtype))
    log_det = log_det - jnp.sum(jnp.log1p(scaled.added))
    wide = ScaledProjection.of(projection, noise_variance + c)
    total = jnp.sum(jnp.square(y / wide.scale), axis=-1)
    fit = -0.5 * maximum(total - (1.0 + jnp.max(wide.added, initial=0.0)) * wide.explained(y), 0.0)
    return fit + _normalizer(scaled, y) - 0.5 * log_det


def exact_log_evidence(kernel: Kernel, X: RowsLike, y: ArrayLike, *, noise_variance: ArrayLike) -> jax.Array:
    """
    Log evidence of the exact GP with Gaussian noise, at O(N³): what every bound stays below.

    .. code-block:: python

        evidence = npgp.collapsed.exact_log_evidence(npgp.RBF(1.0), X, y, noise_variance=0.01)
        assert npgp.CollapsedGP(npgp.RBF(1.0), X, Z, noise_variance=0.01).log_prob(y) < evidence

    :param X: inputs (N, D), or functionals.
    :param y: observations less the offset, (..., N).
    :param noise_variance: σ², a scalar or (N,).
    :raises ValueError: for arrays of the wrong shape or with NaN, and for a noise variance that is not positive.
    :raises FloatingPointError: where the noise is below the covariance's rounding, so that there is no Cholesky factor;
        inside ``jit`` the result is NaN.
    """
    X, kernel = as_rows(X), as_kernel(kernel)
    y = checks.observations(y, X.shape[0], X.dtype)
    noise_variance = checks.require_positive(noise_variance, "noise_variance")
    checks.require_per_row(noise_variance, "noise_variance", X.shape[0])

    def evidence(kernel, X, y, noise_variance) -> jax.Array:
        K = covariance(kernel, X) + jnp.diag(jnp.broadcast_to(jnp.asarray(noise_variance, X.dtype), X.shape[:1]))
        L = linalg.plain_cholesky(K)
        half = linalg.solve_lower(L, y.reshape(-1, y.shape[-1]).T)
        square = jnp.sum(jnp.square(half), axis=0).reshape(y.shape[:-1])
        return -0.5 * (square + linalg.log_determinant(L) + y.shape[-1] * math.log(2.0 * math.pi))

    # What all bounds are compared with is worth twice the time.
    value = one_program(lambda: in_double_if(True, evidence, kernel, X, y, noise_variance), options=STEPS)
    if not checks.is_traced(value) and np.any(np.isnan(value)):
        raise FloatingPointError(
            "the covariance of the observations has no Cholesky factor, as noise_variance is below its rounding: give "
            "a larger one, or use float64 (jax_enable_x64)."
        )
    return value
