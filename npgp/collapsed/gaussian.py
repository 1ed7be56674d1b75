"""Collapsed bounds for Gaussian noise: q(ε) at its optimum, as a NumPyro distribution over all observations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks, linalg
from npgp.contract import is_prng_key
from npgp.kernels import Kernel, as_kernel
from npgp.sparse.conditionals import Conditional, as_conditional
from npgp.sparse.projection import Projection, Projector, as_blocks, factorize
from npgp.sparse.residuals import Residual, residual_of
from npgp.variational.blocks import ScaledProjection, gaussian_optimum
from npgp.variational.posterior import Posterior
from npgp.variational.structure import check_covariances

__all__ = ["CollapsedGP", "collapsed_bound", "exact_log_evidence", "upper_bound"]


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
    X: ArrayLike,
    y: ArrayLike,
    inducing: object,
    noise_variance: ArrayLike,
    *,
    residual_norm: ArrayLike | None = None,
    jitter: float | None = None,
) -> jax.Array:
    """
    Titsias' (2014) upper bound on the log evidence for Gaussian noise, at O(NM²)::

        lower = npgp.CollapsedGP(kernel, X, Z, noise_variance).log_prob(y)
        upper = npgp.upper_bound(kernel, X, y, Z, noise_variance)

    :param kernel: the kernel.
    :param X: training inputs, (N, D).
    :param y: observations less the offset, (..., N).
    :param inducing: Z of shape (M, D), a block of features, or a list of these.
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param residual_norm: no less than the largest eigenvalue of the residual's covariance; its trace if omitted.
    :param jitter: relative jitter tried first.
    :return: shape (...).
    :raises ValueError: for arrays of the wrong shape or with NaN, and for a noise variance that is not positive.
    """
    X = checks.inputs(X)
    checks.require_finite(y, "y")
    y = jnp.asarray(y, X.dtype)
    if y.shape[-1:] != X.shape[:1]:
        raise ValueError(f"y has shape {y.shape}; its last axis must match the {X.shape[0]} rows of X.")
    checks.require_positive(noise_variance, "noise_variance")
    checks.require_per_row(noise_variance, "noise_variance", X.shape[0])
    projection = factorize(as_kernel(kernel), as_blocks(inducing), jitter)(X)
    return projected_upper_bound(projection, y, noise_variance, residual_norm)


def projected_upper_bound(
    projection: Projection, y: jax.Array, noise_variance: ArrayLike, residual_norm: ArrayLike | None = None
) -> jax.Array:
    """
    :func:`upper_bound` from the projection.

    ``−½ log|2π(Q + σ²I)| − ½ yᵀ (Q + (σ² + c)I)⁻¹ y`` with Q what the blocks explain of the covariance, and c no less
    than the largest eigenvalue of the residual's covariance.

    :param projection: of the training inputs.
    :param y: observations less the offset, shape (..., N).
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param residual_norm: c; the trace ``Σ d_n`` if omitted.
    :return: shape (...).
    """
    c = jnp.sum(projection.residual_variance()) if residual_norm is None else residual_norm
    scaled = ScaledProjection.of(projection, noise_variance)
    log_det = sum((linalg.log_determinant(L) for L in scaled.cholesky), jnp.zeros((), y.dtype))
    return _fit_term(ScaledProjection.of(projection, noise_variance + c), y) + _normalizer(scaled, y) - 0.5 * log_det


class CollapsedGP(dist.Distribution):
    """
    Gaussian-noise observations of a sparse GP, with q(ε) collapsed: ``log_prob(y)`` is a lower bound on the log
    evidence. For NUTS, L-BFGS or SVI over hyperparameters::

        numpyro.sample("y", npgp.CollapsedGP(kernel, X, Z, noise_variance), obs=y)

    Several outputs that share the GP's hyperparameters are rows of y: ``log_prob`` maps (..., N) to (...).

    :param kernel: the kernel.
    :param X: training inputs, shape (N, D).
    :param inducing: Z of shape (M, D), a block of features, or a list of these.
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param offset: what is added to f, such as a mean function's values at X; a scalar or (N,). Add its values at new
        inputs to predictions.
    :param conditional: what q does to the residual: :class:`npgp.Tight` (Bui et al. 2025), :class:`npgp.Grouped`
        (tighter, at a little more than its cost; neighbors are found in X if it has no groups), :class:`npgp.Full` (at
        O(N³)), :class:`npgp.Prior` (SGPR, Titsias 2009), :class:`npgp.Shared` (Artemev et al. 2021), or a word for one.
    :param covariances: for each block ``"dense"``, ``"diagonal"`` (mean field) or ``"mean-only"`` (the block moves the
        mean only; such blocks come last). Dense throughout if omitted.
    :param jitter: relative jitter tried first.
    :raises ValueError: for inputs of the wrong shape and for a noise variance known not to be positive.
    """

    support = constraints.real_vector
    reparametrized_params: list[str] = []
    pytree_data_fields = ("kernel", "X", "blocks", "noise_variance", "offset", "conditional")
    pytree_aux_fields = ("covariances", "jitter")

    def __init__(
        self,
        kernel: Kernel,
        X: ArrayLike,
        inducing: object,
        noise_variance: ArrayLike,
        *,
        offset: ArrayLike = 0.0,
        conditional: Conditional | str = "tight",
        covariances: Sequence[str] | str | None = None,
        jitter: float | None = None,
        validate_args=None,
    ):
        conditional = as_conditional(conditional)
        checks.require_positive(noise_variance, "noise_variance")
        self.kernel = as_kernel(kernel)
        self.X = checks.inputs(X)
        self.blocks = as_blocks(inducing)
        self.covariances = check_covariances(covariances, len(self.blocks))
        rows = self.X.shape[0]
        self.conditional = conditional.for_inputs(X, sum(block.size for block in self.blocks))
        self.conditional.partition(rows)  # which checks the groups
        checks.require_per_row(noise_variance, "noise_variance", rows)
        checks.require_per_row(offset, "offset", rows)
        self.noise_variance = noise_variance
        self.offset = offset
        self.jitter = jitter
        super().__init__((), (rows,), validate_args=validate_args)

    def log_prob(self, value):
        """The bound for observations y of shape (..., N): (...)."""
        projector, projection = self._project()
        learned = [kind != "mean-only" for kind in self.covariances]
        residual = residual_of(projector, self.X, projection, learned, self.conditional.partition(self.X.shape[0]))
        return collapsed_bound(
            projection, residual, value - self.offset, self.noise_variance, self.covariances, self.conditional
        )

    def _project(self) -> tuple[Projector, Projection]:
        projector = factorize(self.kernel, self.blocks, self.jitter)
        return projector, projector(self.X)

    def sample(self, key, sample_shape=()):
        """Joint draws from the prior with noise, at O(N³)."""
        assert is_prng_key(key)
        L, _ = linalg.cholesky(self.kernel(self.X), self.jitter)
        f_key, noise_key = jax.random.split(key)
        shape = sample_shape + self.batch_shape + self.event_shape
        f = linalg.matmul(L, jax.random.normal(f_key, shape, L.dtype)[..., None])[..., 0]
        noise = jnp.sqrt(self.noise_variance) * jax.random.normal(noise_key, shape, L.dtype)
        return self.offset + f + noise

    def condition(self, y: ArrayLike) -> Posterior:
        """
        The posterior of f, without the offset, given observations y of shape (..., N).

        :raises ValueError: if y has NaN or another number of rows.
        """
        checks.require_finite(y, "y")
        y = jnp.asarray(y, self.X.dtype)
        if y.shape[-1:] != self.event_shape:
            raise ValueError(f"y has shape {y.shape}; its last axis must match the {self.event_shape[0]} rows of X.")
        projector, projection = self._project()
        q = gaussian_optimum(projection, y - self.offset, self.noise_variance, self.covariances)
        return Posterior(projector, q)

    def log_likelihood(self, y: ArrayLike) -> jax.Array:
        """
        Log likelihood row by row given the posterior, ``log ∫ p(y_n | f_n) q(f_n) df_n``: (..., N).

        How well the posterior fits the data it has seen; not for LOO, which :func:`npgp.to_arviz` serves.
        """
        posterior = self.condition(y)
        mean, variance = posterior.mean_and_variance(self.X)
        return dist.Normal(mean + self.offset, jnp.sqrt(variance + self.noise_variance)).log_prob(jnp.asarray(y))


def exact_log_evidence(kernel: Kernel, X: ArrayLike, y: ArrayLike, noise_variance: ArrayLike) -> jax.Array:
    """
    Log evidence of the exact GP with Gaussian noise, at O(N³): what every bound stays below.

    :param X: inputs (N, D).
    :param y: observations less the offset, (..., N).
    :param noise_variance: σ², a scalar or (N,).
    """
    X, kernel = checks.inputs(X), as_kernel(kernel)
    K = kernel(X) + jnp.diag(jnp.broadcast_to(jnp.asarray(noise_variance, X.dtype), X.shape[:1]))
    return dist.MultivariateNormal(jnp.zeros(X.shape[0], X.dtype), scale_tril=jnp.linalg.cholesky(K)).log_prob(y)
