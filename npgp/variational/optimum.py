"""q(ε) at its optimum for Gaussian noise, and the factor that it and the collapsed bounds are computed with."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp import linalg
from npgp.pytrees import pytree
from npgp.sparse.projection import Projection
from npgp.variational.blocks import BlockNormal, DenseNormal, DiagonalNormal, MeanOnlyNormal


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
