"""
q(ε) at its optimum for Gaussian noise, and the factor that it and the collapsed bounds are computed with.

Updating by more rows with hyperparameters and inducing features as they are: q(ε) alone changes.

The present ``q(ε) = Π_i N(m_i, L_i L_iᵀ)`` is the prior of what follows, as in streaming variational Bayes (Broderick
et al. 2013; sparse GPs: Bui, Nguyen & Turner 2017, here with the inducing features kept). With ``ε_i = m_i + L_i η_i``

    f(x) = Σ_i A_iᵀ m_i + Σ_i (L_iᵀ A_i)ᵀ η_i + r(x),    η_i ~ N(0, I),

which is the standard problem with other projections and a mean function. For Gaussian noise its optimum is in closed
form; for other likelihoods it is the fixed point of natural-gradient steps (conjugate-computation variational
inference, Khan & Lin 2017), which :mod:`npgp.variational.natural` takes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.conditionals import Conditional, as_conditional
from npgp.conditionals.base import Observations
from npgp.functionals.rows import RowsLike, as_rows
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.pytrees import pytree
from npgp.sparse.projection import Members, Projection, Projector
from npgp.sparse.residuals import residual_of
from npgp.variational.blocks import (
    BlockNormal,
    DenseNormal,
    DiagonalNormal,
    MeanOnlyNormal,
    block_normal,
    learned_blocks,
    whitened_mean,
    whitened_variance,
)
from npgp.variational.row_sites import Scaled, search, working_sites


def gaussian_optimum(
    projection: Projection, y: jax.Array, noise_variance: ArrayLike, covariances: Sequence[str]
) -> tuple[BlockNormal, ...]:
    """
    The q(ε) that maximizes the ELBO for Gaussian noise, whatever the conditional (docs/theory.md, section 5).

    .. code-block:: python

        projection = npgp.sparse.factorize(kernel, [npgp.features.Points(Z)])(X)
        (q,) = npgp.variational.gaussian_optimum(projection, y, noise_variance, ["dense"])
        mean = npgp.variational.whitened_mean(projection, [q.loc])  # of f at X, (30,)

    :param projection: of the training inputs.
    :param y: observations less the mean function, shape (..., N), one row per output.
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param covariances: ``"dense"``, ``"diagonal"`` or ``"mean-only"`` for each block.
    :return: one distribution per block: ``S_i = B_i⁻¹`` if it is dense, the inverse of B_i's diagonal if diagonal, and
        means that solve with ``B = I + Ã Ãᵀ`` for all blocks stacked.
    """
    scaled = ScaledProjection.of(projection, noise_variance)
    q: list[BlockNormal] = []
    for i, (mean, kind) in enumerate(zip(scaled.solve(y), covariances, strict=True)):
        if kind == "mean-only":
            q.append(MeanOnlyNormal(mean))
        elif kind == "diagonal":
            q.append(DiagonalNormal(mean, 1.0 / jnp.sqrt(scaled.diagonal(i))))
        else:
            q.append(DenseNormal(mean, linalg.inverse_factor(scaled.factor(i))))
    return tuple(q)


@pytree
class ScaledProjection:
    """
    ``Ã_i = A_i / σ`` and the Cholesky factor of ``B = I + Ã Ãᵀ`` for all blocks stacked, by blocks.

    :param A: Ã_i, (M_i, N), for each block.
    :param cholesky: the factor's blocks on the diagonal, (M_i, M_i).
    :param cross: for each block, the factor's blocks to its left, transposed: (M_j, M_i) for j < i.
    :param gram: for each block its own ``B_i = I + Ã_i Ã_iᵀ``, (M_i, M_i).
    :param scale: σ, scalar or (N,).
    :param added: what the factorization took on B's diagonal where B has no factor in this precision, for all blocks
        stacked; 0 nearly always.
    """

    A: tuple[jax.Array, ...]
    gram: tuple[jax.Array, ...]
    cholesky: tuple[jax.Array, ...]
    cross: tuple[tuple[jax.Array, ...], ...]
    scale: jax.Array
    added: jax.Array

    @classmethod
    def of(cls, projection: Projection, noise_variance: ArrayLike) -> ScaledProjection:
        """Scale a projection by the noise's standard deviation and factorize B."""
        scale = jnp.sqrt(jnp.asarray(noise_variance, projection.prior_variance.dtype))
        A = tuple(A / scale for A in projection.A)
        cholesky: list[jax.Array] = []
        cross: list[tuple[jax.Array, ...]] = []
        added = [jnp.zeros(0, scale.dtype)]
        gram = tuple(linalg.gram(A_i) + jnp.eye(A_i.shape[0], dtype=A_i.dtype) for A_i in A)
        for i, A_i in enumerate(A):
            column = [linalg.matmul(A_j, A_i.T) for A_j in A[:i]]
            before, C = linalg.block_row(cholesky, cross, column, gram[i])
            L, jitter = linalg.cholesky(C, jitter=0.0)
            cholesky.append(L)
            cross.append(before)
            if C.shape[0]:
                added.append(jax.lax.stop_gradient(linalg.jitter_variance(jitter, linalg.diagonal(C))))
        return cls(A, gram, tuple(cholesky), tuple(cross), scale, jnp.concatenate(added))

    def factor(self, i: int) -> jax.Array:
        """Cholesky factor of block i's own ``B_i = I + Ã_i Ã_iᵀ``, (M_i, M_i)."""
        return linalg.cholesky(self.gram[i], jitter=0.0)[0] if i else self.cholesky[0]

    def diagonal(self, i: int) -> jax.Array:
        """Diagonal of ``B_i``, (M_i,)."""
        return linalg.diagonal(self.gram[i])

    def _project(self, y: jax.Array) -> list[jax.Array]:
        """``L_B⁻¹ Ã y/σ``, by blocks: (M_i, outputs) for y of shape (..., N)."""
        columns = jnp.reshape(y / self.scale, (-1, y.shape[-1])).T
        return list(linalg.block_solve(self.cholesky, self.cross, [linalg.matmul(A, columns) for A in self.A]))

    def explained(self, y: jax.Array) -> jax.Array:
        """``‖L_B⁻¹ Ã y/σ‖²`` for y of shape (..., N): (...)."""
        parts = [jnp.sum(jnp.square(half), axis=0) for half in self._project(y)]
        return jnp.reshape(sum(parts, jnp.zeros((), y.dtype)), y.shape[:-1])

    def solve(self, y: jax.Array) -> list[jax.Array]:
        """Optimal means ``B⁻¹ Ã y/σ``, split by block: each (..., M_i)."""
        means = linalg.block_solve_transposed(self.cholesky, self.cross, self._project(y))
        return [jnp.reshape(mean.T, (*y.shape[:-1], mean.shape[0])) for mean in means]


def update(
    projector: Projector | Members,
    q: Sequence[BlockNormal],
    X: RowsLike,
    y: ArrayLike,
    likelihood: Likelihood,
    *,
    offset: ArrayLike = 0.0,
    mask: ArrayLike | str | None = None,
    conditional: Conditional | str = "tight",
    max_iterations: int = 100,
    tolerance: float = 1e-6,
) -> tuple[BlockNormal, ...]:
    """
    q(ε) given further rows; :meth:`npgp.variational.Posterior.update` says what everything is.

    .. code-block:: python

        projector = npgp.sparse.factorize(kernel, [npgp.features.Points(Z)])
        before = npgp.variational.gaussian_optimum(
            projector(X[:20]), y[:20], noise_variance, ["dense"]
        )
        after = npgp.variational.update(
            projector, before, X[20:], y[20:], npgp.Gaussian(variance=noise_variance)
        )

    :param projector: the factorized inducing blocks.
    :param q: q(ε) so far, of each block.
    """
    X, likelihood = as_rows(X), as_likelihood(likelihood)
    for i, block in enumerate(q):
        if not block.learned:
            raise ValueError(
                f"block {i + 1} of q(ε) moves the mean only, so that nothing says how sure the earlier rows made it: "
                "condition on these and the new rows together, by CollapsedGP or SVI."
            )
    if likelihood.num_latents != 1:
        raise ValueError(
            f"likelihood is {type(likelihood).__name__}, of {likelihood.num_latents} latent values; condition takes "
            "likelihoods of one, and SVI with natural gradients the others."
        )
    for name, value in (("max_iterations", max_iterations), ("tolerance", tolerance)):
        checks.require_positive(value, name)
    conditional = as_conditional(conditional)
    if conditional.parameter is not None:
        raise ValueError(f"conditional is {conditional!r}, which learns a parameter; update takes one that does not.")
    conditional.partition(X.shape[0])  # which checks the groups
    batch: tuple[Any, ...] = jnp.broadcast_shapes(*(block.batch_shape for block in q)) or (...,)
    rows = Observations.of(y, likelihood, (*batch, X.shape[0]), mask=mask, offset=offset, dtype=X.dtype)
    if likelihood.proof == "gaussian":
        noise = jnp.asarray(1.0 / likelihood.precision, X.dtype)  # type: ignore[attr-defined]
        checks.require_broadcast(noise, rows.shape, "the noise variance")
        if rows.present is not None:  # a row of infinite noise says nothing
            noise = jnp.where(rows.present, noise, jnp.inf)
        arrays, moved = _gaussian(projector, tuple(q), X, rows.y - rows.offset, noise), jnp.zeros(())
    else:
        arrays, moved = _fixed_point(projector, tuple(q), X, rows, conditional, max_iterations, tolerance)
    _check_result(arrays, moved, max_iterations, tolerance)
    return tuple(block_normal(block.kind, *values) for block, values in zip(q, arrays, strict=True))


def _check_result(arrays: Sequence[Scaled], moved, max_iterations: int, tolerance: float) -> None:
    if any(checks.is_traced(value) for value in jax.tree.leaves(arrays)):
        return
    if not all(bool(jnp.all(jnp.isfinite(value))) for value in jax.tree.leaves((arrays, moved))):
        raise FloatingPointError(
            "conditioning gave a q(ε) that is not finite: the new rows may be far from what this posterior expects, or "
            "their noise too small for this precision; try float64."
        )
    if not float(moved) <= tolerance:
        warnings.warn(
            f"conditioning did not converge: after {max_iterations} iterations a step still moves q(ε) by "
            f"{float(moved):.2g} nats, and tolerance is {tolerance:g}. Raise max_iterations, or use float64.",
            RuntimeWarning,
            stacklevel=4,
        )


# ---------------------------------------------------------------------------------------------------------------
# Blocks as arrays


def _compose(block: BlockNormal, loc: jax.Array, scale: jax.Array) -> Scaled:
    """Mean and scale of ``ε = m + L η`` for η of these."""
    L = block.scale_array
    assert L is not None
    if block.kind == "diagonal":
        return block.loc + L * loc, L * scale
    return block.loc + linalg.matmul(L, loc[..., None])[..., 0], linalg.matmul(L, scale)


# ---------------------------------------------------------------------------------------------------------------
# Gaussian noise


@jax.jit
def _gaussian(projector, q, X, y, noise) -> tuple[Scaled, ...]:
    eta = _gaussian_optimum(projector(X), q, y, noise)
    return tuple(_compose(block, *values) for block, values in zip(q, eta, strict=True))


def _gaussian_optimum(projection: Projection, q: Sequence[BlockNormal], y, noise) -> tuple[Scaled, ...]:
    """Mean and scale of each block's η, for y of shape (..., N) and noise variances (..., N) or fewer."""
    kinds = [block.kind for block in q]
    y = y - whitened_mean(projection, [block.loc for block in q])
    A = tuple(block.factor_times(A_i) for block, A_i in zip(q, projection.A, strict=True))

    def optimum(A, y, noise):
        eta = gaussian_optimum(Projection(A, projection.prior_variance), y, noise, kinds)
        return tuple((block.loc, block.scale_array) for block in eta)

    if noise.ndim < 2 and all(A_i.ndim == 2 for A_i in A):
        return optimum(A, y, noise)
    # A system of equations for each function.
    batch, count = y.shape[:-1], math.prod(y.shape[:-1])
    A = tuple(jnp.broadcast_to(A_i, batch + A_i.shape[-2:]).reshape(count, *A_i.shape[-2:]) for A_i in A)
    noise = jnp.broadcast_to(noise, y.shape).reshape(count, -1)
    eta = jax.vmap(optimum)(A, y.reshape(count, -1), noise)
    return jax.tree.map(lambda value: value.reshape(batch + value.shape[1:]), eta)


# ---------------------------------------------------------------------------------------------------------------
# Other likelihoods


@jax.jit
def _fixed_point(
    projector, q, X, rows: Observations, conditional, max_iterations, tolerance
) -> tuple[tuple[Scaled, ...], jax.Array]:
    """Mean and scale of each block, and the nats by which one more step would move them."""
    projection = projector(X)
    residual = residual_of(projector, X, projection, learned_blocks(q), conditional.partition(X.shape[0]))
    before = jnp.broadcast_to(whitened_mean(projection, [block.loc for block in q]), rows.shape)
    known = jnp.broadcast_to(whitened_variance(projection, q) + residual.variance, rows.shape)

    def expected(mean: jax.Array, variance: jax.Array) -> jax.Array:
        return jnp.sum(rows.elbo(conditional, before + mean, variance, residual))

    expected_before = before + rows.offset
    init_sites = working_sites(rows.likelihood, rows.y, expected_before, known, expected_before)
    init_sites = jax.tree.map(rows.where_present, init_sites)
    A = tuple(block.factor_times(A_i) for block, A_i in zip(q, projection.A, strict=True))
    found = search(A, [block.kind for block in q], expected, init_sites, max_iterations, tolerance)
    return tuple(_compose(block, *values) for block, values in zip(q, found.q, strict=True)), found.kl_gap
