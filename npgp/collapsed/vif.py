"""
Inducing points and neighbors together: Vecchia's approximation of what inducing points leave, "VIF" (Gyger, Furrer &
Sigrist 2025), the method ``"vif"`` of :class:`npgp.ApproximateGP`.

With c the covariance that the inducing features leave and N(n) neighbors of row n among the rows before it in an order

    C_n = c(X_N(n), X_N(n)) + σ² I,    w_n = C_n⁻¹ c(X_N(n), x_n),    F_n = c(x_n, x_n) + σ² − w_nᵀ c(X_N(n), x_n)

observations are a linear regression on the whitened inducing values whose rows are transformed (docs/theory.md, section
5.7)::

    p(y | ε) = Π_n N(y_n − Σ_j w_nj y_j; ãᵀ_n ε, F_n),    ã_n = a_n − Σ_j w_nj a_j

Without inducing features it is the response NNGP, without neighbors FITC, with all rows before for neighbors the GP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.neighbors.posterior import NearPosterior, with_neighbors
from npgp.neighbors.search import AMONG, Neighbors, most_correlated, nearest
from npgp.neighbors.vecchia import MergedFactor, VecchiaFactor, factor_of_rows, new_site_weights, what_is_left
from npgp.pytrees import pytree
from npgp.sparse.projection import Projection, Projector
from npgp.variational.blocks import BlockNormal


@pytree
class VecchiaNoise:
    """
    What the inducing features leave and the noise together, by Vecchia's approximation: the Λ of the method.

    :param factor: of Λ's precision.
    """

    factor: VecchiaFactor | MergedFactor

    @classmethod
    def of(
        cls, projector: Projector, X: jax.Array, projection: Projection, neighbors: Neighbors, variance: jax.Array
    ) -> VecchiaNoise:
        """
        :param projector: the factorized inducing features, in one block.
        :param X: inputs, (N, D).
        :param projection: of these.
        :param neighbors: their order and neighbors.
        :param variance: σ², (N,).
        """
        sites, covariance = (X, projection.A[0].T), what_is_left(projector.kernel)
        return cls(factor_of_rows(covariance, sites, neighbors, variance, jitter=0.0))

    def whiten(self, v: jax.Array) -> jax.Array:
        """``Λ^−½ v`` over the last axis, (..., N)."""
        return self.factor.whiten(v)

    def color(self, z: jax.Array) -> jax.Array:
        """``Λ^½ z`` over the last axis, (..., N)."""
        return self.factor.color(z)

    def log_determinant(self) -> jax.Array:
        """``log |Λ|``."""
        return -self.factor.log_determinant()


@pytree
class VIFPosterior(NearPosterior):
    """
    The posterior of f by inducing points and neighbors, of :meth:`npgp.ApproximateGP.condition`: at new inputs f is
    regressed on the observations of its nearest rows, beside the inducing values, and independent between inputs given
    these values, but in joint draws (:class:`npgp.neighbors.NearPosterior`).

    :param projector: the factorized inducing features.
    :param q: the posterior of the whitened inducing values; a batch of several outputs is allowed.
    :param X: training inputs, (N, D).
    :param A: their projections, (M, N).
    :param y: observations less the offset, batch + (N,).
    :param neighbors: as the method had them: they say how many neighbors are used, and in which units of distance.
    :param noise_variance: σ², a scalar or (N,).
    """

    projector: Projector
    q: BlockNormal
    X: jax.Array
    A: jax.Array
    y: jax.Array
    neighbors: Neighbors
    noise_variance: ArrayLike

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of outputs."""
        return self.y.shape[:-1]

    def at_points(self) -> tuple[jax.Array, jax.Array]:
        """Means and variances of f at the training inputs."""
        assert self.neighbors.around is not None
        return self._moments((self.X, jnp.asarray(self.neighbors.around)))

    def _points(self) -> tuple[jax.Array, Neighbors]:
        return self.X, self.neighbors

    def _explained(self, rng_key: jax.Array, sample_shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        epsilon = self.q.sample(rng_key, sample_shape)
        return lambda A: linalg.matmul(epsilon, A)

    def _at_points(self, X: jax.Array, times: Callable[[jax.Array], jax.Array] | None) -> tuple[Any, ...]:
        (A,), covariance = self.projector(X).A, what_is_left(self.projector.kernel)
        known, times = (0.0, self.q.factor_times) if times is None else (self.y, times)
        return covariance, (X, A.T), (self.X, self.A.T), self.noise_variance, known - times(self.A), times(A)

    def _rows(self, X: Any, neighbors: ArrayLike | None, batch_shape: tuple[int, ...]) -> Any:
        if neighbors is not None or checks.is_traced(X):
            rows = with_neighbors(X, neighbors, self.X, self.neighbors)
            return rows.X, rows.neighbors
        X, size = checks.inputs(X), self.neighbors.size_at_new
        near = nearest(X, self.X, min(AMONG * size, len(self.X)), scale=self.neighbors.scale)
        sites = X, jax.jit(Projector.__call__)(self.projector, X).A[0].T
        return X, jnp.asarray(most_correlated(self.projector.kernel, sites, (self.X, self.A.T), near, size))

    def _regression(self, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """f at rows given ε: its mean at ε = 0, batch + (N*,), its slopes in ε, (M, N*), and its variance, (N*,)."""
        X, near = rows
        (A,) = self.projector(X).A
        sites, covariance = (self.X, self.A.T), what_is_left(self.projector.kernel)
        w, variance = new_site_weights(covariance, (X, A.T), sites, near, self.noise_variance, 0.0)
        mean = jnp.sum(w * jnp.take(self.y, near, axis=-1), axis=-1)
        return mean, A - jnp.einsum("nk,nkm->mn", w, self.A.T[near]), variance

    def _moments(self, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        mean, slopes, variance = self._regression(rows)
        mean = mean + linalg.matmul(self.q.loc, slopes)
        variance = variance + jnp.sum(jnp.square(self.q.factor_times(slopes)), axis=-2)
        return mean, jnp.broadcast_to(variance, mean.shape)

    def _covariance(self, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        _, slopes, variance = self._regression(rows)
        covariance = linalg.gram(jnp.swapaxes(self.q.factor_times(slopes), -1, -2)) + jnp.diag(variance)
        return jnp.broadcast_to(covariance, self.batch_shape + covariance.shape[-2:])

    def _sample(
        self, rng_key: jax.Array, rows: tuple[jax.Array, jax.Array], sample_shape: tuple[int, ...]
    ) -> jax.Array:
        mean, slopes, variance = self._regression(rows)
        q_key, key = jax.random.split(rng_key)
        mean = mean + linalg.matmul(self.q.sample(q_key, sample_shape), slopes)
        return mean + jnp.sqrt(variance) * jax.random.normal(key, mean.shape, mean.dtype)
