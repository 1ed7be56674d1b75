"""A kernel of one's own, written with public names alone."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import ArrayLike

import npgp


@npgp.pytree
@dataclass(frozen=True)
class Wendland(npgp.kernels.Kernel):
    """Compact support: ``variance (1 − r)⁴₊ (4r + 1)``, with r the distance over ``reach``; for up to three columns."""

    reach: ArrayLike = 1.0
    variance: ArrayLike = 1.0

    def __call__(self, X, X2=None):
        X2 = X if X2 is None else X2
        square = jnp.sum(jnp.square((X[:, None, :] - X2[None, :, :]) / self.reach), -1)
        apart = square > 0
        r = jnp.where(apart, jnp.sqrt(jnp.where(apart, square, 1.0)), 0.0)
        return self.variance * jnp.maximum(1.0 - r, 0.0) ** 4 * (4.0 * r + 1.0)

    def diag(self, X):
        return jnp.full(X.shape[0], self.variance, X.dtype)
