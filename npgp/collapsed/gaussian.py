"""Collapsed bounds for Gaussian noise: q(ε) at its optimum, as a NumPyro distribution over all observations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.util import is_prng_key

from npgp import checks, linalg
from npgp.features import InducingBlock, as_block
from npgp.kernels import Kernel, as_kernel
from npgp.sparse import conditionals
from npgp.sparse.groups import Groups, default_size, median_split
from npgp.sparse.projection import Projection, Projector, factorize
from npgp.sparse.residuals import Residual, residual_of
from npgp.variational.blocks import ScaledProjection, gaussian_optimum
from npgp.variational.posterior import Posterior

__all__ = ["CollapsedGP", "collapsed_bound", "exact_log_evidence", "upper_bound"]


def collapsed_bound(
    projection: Projection,
    residual: Residual,
    y: jax.Array,
    noise_variance: ArrayLike,
    covariances: Sequence[str],
    conditional: conditionals.Conditional = "tight",
) -> jax.Array:
    """
    The ELBO for Gaussian noise at the optimal q(ε) (DESIGN section 5).

    :param projection: of the training inputs.
    :param residual: what the blocks with a learned covariance leave at the training inputs.
    :param y: observations less the mean function, shape (..., N).
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param covariances: ``"dense"``, ``"diagonal"`` or ``"prior"`` (moves the mean only) for each block.
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
    penalty = conditionals.collapsed_penalty(conditional, residual, noise_variance)
    return _fit_term(scaled, y) + _normaliser(scaled, y) - 0.5 * log_det - penalty


def _fit_term(scaled: ScaledProjection, y: jax.Array) -> jax.Array:
    """``−½ yᵀ (Σ_i A_iᵀ A_i + σ²I)⁻¹ y``."""
    return -0.5 * (jnp.sum(jnp.square(y / scaled.scale), -1) - scaled.explained(y))


def _normaliser(scaled: ScaledProjection, y: jax.Array) -> jax.Array:
    """``−½ N log 2πσ²``."""
    log_scale = jnp.sum(jnp.log(jnp.broadcast_to(scaled.scale, y.shape[-1:])))
    return -0.5 * y.shape[-1] * math.log(2.0 * math.pi) - log_scale


def upper_bound(
    projection: Projection, y: jax.Array, noise_variance: ArrayLike, residual_norm: ArrayLike | None = None
) -> jax.Array:
    """
    Titsias' (2014) upper bound on the log evidence for Gaussian noise, at O(NM²).

    ``−½ log|2π(Q + σ²I)| − ½ yᵀ (Q + (σ² + c)I)⁻¹ y`` with Q what the blocks explain of the covariance, and c no less
    than the largest eigenvalue of the residual's covariance.

    :param projection: of the training inputs.
    :param y: observations less the mean function, shape (..., N).
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param residual_norm: c; the trace ``Σ d_n`` if omitted.
    :return: shape (...).
    """
    c = jnp.sum(projection.residual_variance()) if residual_norm is None else residual_norm
    scaled = ScaledProjection.of(projection, noise_variance)
    log_det = sum((linalg.log_determinant(L) for L in scaled.cholesky), jnp.zeros((), y.dtype))
    return _fit_term(ScaledProjection.of(projection, noise_variance + c), y) + _normaliser(scaled, y) - 0.5 * log_det


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
    :param mean: the mean function's values at X, a scalar or (N,). Add its values at new inputs to predictions.
    :param conditional: ``"tight"`` (Bui et al. 2025), ``"grouped"`` (tighter, at a little more than its cost),
        ``"full"`` (at O(N³)), ``"prior"`` (SGPR, Titsias 2009), or ``"shared"`` (Artemev et al. 2021).
    :param covariances: for each block ``"dense"``, ``"diagonal"`` (mean field) or ``"prior"`` (the block moves the mean
        only; such blocks come last). Dense throughout if omitted.
    :param jitter: relative jitter tried first.
    :param groups: for ``"grouped"``, a partition of the rows (:func:`npgp.median_split`). If omitted, one is made of X,
        with groups of the size that :func:`npgp.sparse.default_size` says.
    :raises ValueError: for inputs of the wrong shape and for a noise variance known not to be positive.
    """

    support = constraints.real_vector
    reparametrized_params: list[str] = []
    pytree_data_fields = ("kernel", "X", "blocks", "noise_variance", "mean_value", "groups")
    pytree_aux_fields = ("conditional", "covariances", "jitter")

    def __init__(
        self,
        kernel: Kernel,
        X: ArrayLike,
        inducing: object,
        noise_variance: ArrayLike,
        mean: ArrayLike = 0.0,
        conditional: conditionals.Conditional = "tight",
        covariances: Sequence[str] | None = None,
        jitter: float | None = None,
        groups: Groups | int | None = None,
        *,
        validate_args=None,
    ):
        conditionals.check(conditional)
        checks.require_positive(noise_variance, "noise_variance")
        self.kernel = as_kernel(kernel)
        self.X = checks.inputs(X)
        self.blocks = as_blocks(inducing)
        self.covariances = check_covariances(covariances, len(self.blocks), allowed=("dense", "diagonal", "prior"))
        rows = self.X.shape[0]
        if conditional == "grouped" and groups is None:
            if checks.is_traced(X):
                raise ValueError("X is traced, so no groups can be made of it: pass groups=npgp.median_split(X, size).")
            groups = median_split(X, default_size(sum(block.size for block in self.blocks)))
        self.groups = conditionals.groups_for(conditional, groups, rows)
        checks.require_per_row(noise_variance, "noise_variance", rows)
        checks.require_per_row(mean, "mean", rows)
        self.noise_variance = noise_variance
        self.mean_value = mean
        self.conditional = conditional
        self.jitter = jitter
        super().__init__((), (rows,), validate_args=validate_args)

    def log_prob(self, value):
        """The bound for observations y of shape (..., N): (...)."""
        projector, projection = self._project()
        learned = [kind != "prior" for kind in self.covariances]
        residual = residual_of(projector, self.X, projection, learned, self.groups)
        return collapsed_bound(
            projection, residual, value - self.mean_value, self.noise_variance, self.covariances, self.conditional
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
        return self.mean_value + f + noise

    def condition(self, y: ArrayLike) -> Posterior:
        """
        The posterior of f, less the mean function, given observations y of shape (..., N).

        :raises ValueError: if y has NaN or another number of rows.
        """
        checks.require_finite(y, "y")
        y = jnp.asarray(y, self.X.dtype)
        if y.shape[-1:] != self.event_shape:
            raise ValueError(f"y has shape {y.shape}; its last axis must match the {self.event_shape[0]} rows of X.")
        projector, projection = self._project()
        q = gaussian_optimum(projection, y - self.mean_value, self.noise_variance, self.covariances)
        return Posterior(projector, q)

    def log_likelihood(self, y: ArrayLike) -> jax.Array:
        """
        Log likelihood row by row given the posterior, ``log ∫ p(y_n | f_n) q(f_n) df_n``: (..., N).

        How well the posterior fits the data it has seen; not for LOO, which :func:`npgp.to_arviz` serves.
        """
        posterior = self.condition(y)
        mean, variance = posterior.mean_and_variance(self.X)
        return dist.Normal(mean + self.mean_value, jnp.sqrt(variance + self.noise_variance)).log_prob(jnp.asarray(y))


def as_blocks(inducing: object) -> tuple[InducingBlock, ...]:
    """Inducing blocks from one block or array, or from a list of these."""
    if isinstance(inducing, (list, tuple)):
        if not inducing:
            raise ValueError("inducing is an empty list; it needs at least one block of inducing features.")
        blocks = tuple(as_block(block, f"inducing[{i}]") for i, block in enumerate(inducing))
    else:
        blocks = (as_block(inducing),)
    if not any(block.size for block in blocks):
        raise ValueError("inducing has no features; at least one block needs at least one.")
    return blocks


def check_covariances(
    covariances: Sequence[str] | str | None, blocks: int, allowed: tuple[str, ...]
) -> tuple[str, ...]:
    """One covariance structure per block, mean-only blocks last; dense throughout if omitted."""
    if covariances is None:
        return ("dense",) * blocks
    kinds = (covariances,) * blocks if isinstance(covariances, str) else tuple(covariances)
    if len(kinds) != blocks or any(kind not in allowed for kind in kinds):
        raise ValueError(f"covariances is {covariances!r}; it must give one of {allowed} for each of {blocks} blocks.")
    if any(kind == "prior" and later != "prior" for kind, later in itertools.pairwise(kinds)):
        raise ValueError(f"covariances is {covariances!r}; blocks left at the prior ('prior') must come last.")
    return kinds


def exact_log_evidence(kernel: Kernel, X: ArrayLike, y: ArrayLike, noise_variance: ArrayLike) -> jax.Array:
    """
    Log evidence of the exact GP with Gaussian noise, at O(N³): what every bound stays below.

    :param X: inputs (N, D).
    :param y: observations less the mean function, (..., N).
    :param noise_variance: σ², a scalar or (N,).
    """
    X, kernel = checks.inputs(X), as_kernel(kernel)
    K = kernel(X) + jnp.diag(jnp.broadcast_to(jnp.asarray(noise_variance, X.dtype), X.shape[:1]))
    return dist.MultivariateNormal(jnp.zeros(X.shape[0], X.dtype), scale_tril=jnp.linalg.cholesky(K)).log_prob(y)
