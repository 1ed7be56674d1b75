"""The approximate posterior of f: what q(ε) says about the function, at any inputs."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from npgp import linalg
from npgp.projection import Projector
from npgp.variational import BlockNormal, learned_blocks, whitened_mean, whitened_variance

__all__ = ["Posterior"]


@register_dataclass
@dataclass(frozen=True)
class Posterior:
    """
    The approximate posterior of f: everything q(ε) says about the function, at any inputs.

    Predictions use ε alone (Bui, Ashman & Turner 2025): whatever the conditional did to the residual at the
    training rows, the residual at new inputs keeps its prior.

    :param projector: the factorised inducing blocks.
    :param q: the approximate posterior of each block; a batch of several outputs is allowed.
    """

    projector: Projector
    q: tuple[BlockNormal, ...]

    @property
    def jitter(self) -> tuple[jax.Array, ...]:
        """For each block, the relative jitter that its factorisation took."""
        return self.projector.jitter

    def kl(self) -> jax.Array:
        """``KL[q(ε) ‖ p(ε)]``, summed over blocks; batch shape."""
        return sum(block.kl() for block in self.q)  # type: ignore[return-value]

    def mean(self, X: ArrayLike) -> jax.Array:
        """Posterior mean of f at inputs X (N, D): batch + (N,)."""
        return whitened_mean(self.projector(linalg.inputs(X)), [block.loc for block in self.q])

    def variance(self, X: ArrayLike) -> jax.Array:
        """Posterior variance of f at inputs X (N, D): batch + (N,)."""
        return self.mean_and_variance(X)[1]

    def mean_and_variance(self, X: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Posterior mean and variance of f at inputs X (N, D), with one projection; each batch + (N,)."""
        projection = self.projector(linalg.inputs(X))
        mean = whitened_mean(projection, [block.loc for block in self.q])
        variance = whitened_variance(projection, self.q) + projection.residual_variance(learned_blocks(self.q))
        return mean, variance

    def covariance(self, X: ArrayLike) -> jax.Array:
        """Joint posterior covariance of f at inputs X (N, D): batch + (N, N)."""
        X = linalg.inputs(X)
        A = self.projector(X).A
        cov = self.projector.residual_covariance(X, A, learned_blocks(self.q))
        for block, A_i in zip(self.q, A, strict=True):
            if block.learned:
                half = block.factor_times(A_i)
                cov = cov + linalg.matmul(jnp.swapaxes(half, -1, -2), half)
        return cov

    def sample(self, rng_key: jax.Array, X: ArrayLike, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """
        Joint draws of f at inputs X (N, D), with O(N³) work.

        :return: sample_shape + batch + (N,).
        """
        mean, cov = self.mean(X), self.covariance(X)
        L, _ = linalg.cholesky(cov)
        z = jax.random.normal(rng_key, sample_shape + mean.shape, mean.dtype)
        return mean + linalg.matmul(L, z[..., None])[..., 0]
