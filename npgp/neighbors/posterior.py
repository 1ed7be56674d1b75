"""Functions given their values at inducing points, each value through the nearest of these alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.kernels import Kernel
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.neighbors.search import Neighbors, nearest
from npgp.neighbors.vecchia import new_site_weights
from npgp.pytrees import pytree

__all__ = ["NeighborPosterior", "NeighborRows", "with_neighbors"]


@dataclass(frozen=True, eq=False)
class NeighborRows:
    """
    Rows with their neighbors among the inducing points.

    :param X: inputs, (N, D).
    :param neighbors: numbers of the inducing points, (N, k).
    """

    X: jax.Array
    neighbors: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the inputs."""
        return self.X.shape

    def __getitem__(self, rows: jax.Array) -> NeighborRows:
        return NeighborRows(self.X[rows], self.neighbors[rows])

    def regression(self, kernel: Kernel, inducing: jax.Array, jitter: float | None) -> tuple[jax.Array, jax.Array]:
        """Weights b (N, k) and residual variance F (N,) of f at the rows given the inducing values."""
        return new_site_weights(kernel, self.X, inducing, self.neighbors, jitter=jitter)


def with_neighbors(
    X: ArrayLike, neighbors: ArrayLike | None, inducing: jax.Array, inducing_neighbors: Neighbors
) -> NeighborRows:
    """
    Rows, checked, with their neighbors among the inducing points, which are found if they are not given.

    :param X: inputs, (N, D).
    :param neighbors: numbers of inducing points, (N, k).
    :param inducing: Z, (M, D).
    :param inducing_neighbors: as the prior has them: they say how many neighbors to find, and in which units.
    """
    if neighbors is None and checks.is_traced(X):
        raise TypeError(
            "X is traced, so its neighbors cannot be found: pass those of npgp.neighbors.nearest(X, Z, k) beside X, "
            "f(X, neighbors)."
        )
    X = checks.concrete_inputs(X)
    rows, points = X.shape[0], inducing.shape[0]
    if X.shape[1] != inducing.shape[1]:
        raise ValueError(f"X has {X.shape[1]} columns; the inducing points have {inducing.shape[1]}.")
    if neighbors is None:
        neighbors = nearest(X, inducing, min(inducing_neighbors.size, points), scale=inducing_neighbors.scale)
    shape, dtype = jnp.shape(neighbors), jnp.result_type(neighbors)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"neighbors has dtype {dtype}; it must hold numbers of inducing points, which are integers.")
    if len(shape) != 2 or shape[0] != rows or not shape[1]:
        raise ValueError(f"neighbors has shape {shape}; it must be ({rows}, k), k inducing points for each row.")
    if not checks.is_traced(neighbors):
        low, high = np.min(np.asarray(neighbors)), np.max(np.asarray(neighbors))
        if low < 0 or high >= points:
            raise ValueError(f"neighbors has numbers {low} to {high}; there are {points} inducing points, from 0.")
    return NeighborRows(X, jnp.asarray(neighbors))


@pytree
@dataclass(frozen=True)
class NeighborPosterior:
    """
    The approximate posterior of f: what q(u) says about the function, each value through its nearest inducing points.

    Neighbors of new inputs must be found outside ``jit``, where inputs have numbers (:func:`npgp.neighbors.nearest`).

    :param kernel: the kernel.
    :param inducing: Z, (M, D).
    :param neighbors: as the prior had them: they say how many neighbors are used, and in which units of distance.
    :param loc: means of the inducing values, (M,).
    :param scale: their standard deviations, (M,).
    :param jitter: relative jitter tried first.
    """

    kernel: Kernel
    inducing: jax.Array
    neighbors: Neighbors
    loc: jax.Array
    scale: jax.Array
    jitter: float | None = None

    def _rows(self, X: ArrayLike, neighbors: ArrayLike | None) -> tuple[NeighborRows, jax.Array, jax.Array]:
        rows = with_neighbors(X, neighbors, self.inducing, self.neighbors)
        return (rows, *rows.regression(self.kernel, self.inducing, self.jitter))

    def mean_and_variance(self, X: ArrayLike, neighbors: ArrayLike | None = None) -> tuple[jax.Array, jax.Array]:
        """
        Posterior mean and variance of f.

        :param X: inputs, (N, D).
        :param neighbors: numbers of their nearest inducing points, (N, k), if they have been found before.
        :return: each (N,).
        """
        rows, b, F = self._rows(X, neighbors)
        variance = F + jnp.sum(jnp.square(b * self.scale[rows.neighbors]), axis=-1)
        return jnp.sum(b * self.loc[rows.neighbors], axis=-1), variance

    def mean(self, X: ArrayLike, neighbors: ArrayLike | None = None) -> jax.Array:
        """Posterior mean of f at inputs X (N, D): (N,)."""
        return self.mean_and_variance(X, neighbors)[0]

    def variance(self, X: ArrayLike, neighbors: ArrayLike | None = None) -> jax.Array:
        """Posterior variance of f at inputs X (N, D): (N,)."""
        return self.mean_and_variance(X, neighbors)[1]

    def log_density(
        self,
        X: ArrayLike,
        y: ArrayLike,
        likelihood: Likelihood | Callable[..., Any],
        neighbors: ArrayLike | None = None,
    ) -> jax.Array:
        """
        Log predictive density of observations, row by row: ``log ∫ p(y_n | f_n) N(f_n; mean, variance) df_n``.

        :param X: inputs, (N, D).
        :param y: observations, (N,).
        :param likelihood: p(y_n | f_n), an ``npgp`` likelihood or a function from f to a NumPyro distribution.
        :param neighbors: as in :meth:`mean_and_variance`.
        :return: (N,).
        :raises ValueError: for observations of another number of rows, or with NaN.
        """
        mean, variance = self.mean_and_variance(X, neighbors)
        return as_likelihood(likelihood).log_marginal(checks.observed(y, mean.shape[0]), mean, variance)

    def covariance(self, X: ArrayLike, neighbors: ArrayLike | None = None) -> jax.Array:
        """Joint posterior covariance of f at inputs X (N, D), at O(N² M): (N, N)."""
        rows, b, F = self._rows(X, neighbors)
        half = jnp.zeros((rows.shape[0], self.loc.shape[0]), b.dtype)
        half = half.at[jnp.arange(rows.shape[0])[:, None], rows.neighbors].add(b) * self.scale
        return linalg.matmul(half, half.T) + jnp.diag(F)

    def sample(
        self,
        rng_key: jax.Array,
        X: ArrayLike,
        sample_shape: tuple[int, ...] = (),
        *,
        neighbors: ArrayLike | None = None,
    ) -> jax.Array:
        """Joint draws of f at inputs X (N, D), at O(M + N k) for each: sample_shape + (N,)."""
        rows, b, F = self._rows(X, neighbors)
        u_key, key = jax.random.split(rng_key)
        u = self.loc + self.scale * jax.random.normal(u_key, sample_shape + self.loc.shape, self.loc.dtype)
        mean = jnp.sum(b * jnp.take(u, rows.neighbors, axis=-1), axis=-1)
        return mean + jnp.sqrt(F) * jax.random.normal(key, mean.shape, mean.dtype)
