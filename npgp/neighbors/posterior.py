"""Functions given their values at some points, each value through the nearest of these alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.functionals.rows import Functionals, RowsLike
from npgp.kernels import Kernel
from npgp.neighbors.search import Neighbors, nearest, nearest_jointly
from npgp.neighbors.vecchia import VecchiaFactor, conditional_weights, new_site_weights
from npgp.predictions import FunctionPosterior
from npgp.programs.compiled import one_program
from npgp.pytrees import pytree

#: Inputs (N, D), and numbers of their neighbors (N, k).
Rows = tuple[jax.Array, jax.Array]


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
        """Shape of the inputs."""
        return self.X.shape

    def __getitem__(self, rows: jax.Array) -> NeighborRows:
        return NeighborRows(self.X[rows], self.neighbors[rows])

    def regression(
        self, kernel: Kernel, inducing: jax.Array, jitter: float | None, noise_variance: ArrayLike = 0.0
    ) -> tuple[jax.Array, jax.Array]:
        """Weights b (N, k) and residual variance F (N,) of f at the rows given the inducing values."""
        return new_site_weights(kernel, self.X, inducing, self.neighbors, noise_variance, jitter)


def _like(points: jax.Array, X: ArrayLike) -> jax.Array:
    """Inputs, checked, with as many columns as the points with values have."""
    X = checks.concrete_inputs(X)
    if X.shape[1] != points.shape[1]:
        raise ValueError(f"X has {X.shape[1]} columns; the points with values have {points.shape[1]}.")
    return X


def with_neighbors(
    X: ArrayLike, neighbors: ArrayLike | None, inducing: jax.Array, inducing_neighbors: Neighbors
) -> NeighborRows:
    """
    Rows, checked, with their neighbors among the points with values, which are found if they are not given.

    :param X: inputs, (N, D).
    :param neighbors: numbers of points, (N, k).
    :param inducing: the points, (M, D).
    :param inducing_neighbors: as the prior has them: they say how many neighbors to find, and in which units.
    """
    if neighbors is None and checks.is_traced(X):
        raise TypeError(
            "X is traced, so its neighbors cannot be found: pass those of npgp.neighbors.nearest(X, Z, k) beside X, "
            "f(X, neighbors)."
        )
    X = _like(inducing, X)
    if neighbors is None:
        neighbors = nearest(X, inducing, inducing_neighbors.size_at_new, scale=inducing_neighbors.scale)
    neighbors = jnp.asarray(checks.row_numbers(neighbors, "neighbors", inducing.shape[0], ndim=2))
    if neighbors.shape[0] != X.shape[0] or not neighbors.shape[1]:
        raise ValueError(f"neighbors has shape {neighbors.shape}; it must be ({X.shape[0]}, k), k for each row of X.")
    return NeighborRows(X, neighbors)


class NearPosterior(FunctionPosterior):
    """
    A posterior in which each value of f depends on the nearest of some points. Moments are those of rows one by one;
    joint draws and covariances are by Vecchia's approximation, too: of new inputs in max–min order each depends on the
    nearest points and new inputs before it, at O(N k³) for N new inputs, so that draws are of functions. Where numbers
    of neighbors are given, and where inputs are traced, values are independent given those at the points.

    Neighbors of new inputs must be found outside ``jit``, where inputs have numbers (:func:`npgp.neighbors.nearest`).
    """

    def _points(self) -> tuple[jax.Array, Neighbors]:
        """The points, (M, D), and the neighbors that they had."""
        raise NotImplementedError

    def _at_points(self, X: jax.Array, times: Callable[[jax.Array], jax.Array] | None) -> tuple[Any, ...]:
        """
        What joint values at X are regressed on.

        :param X: new inputs.
        :param times: of projections (M, N), draws of what they explain; ``None`` for a root of its covariance.
        :return: the covariance of the regression, what it is of at new inputs and at points, the noise's variance at
            points, values there, and what is added to the regression. Of roots, those of values known are 0.
        """
        raise NotImplementedError

    def _found(self, X: Any, neighbors: ArrayLike | None) -> tuple[jax.Array, Any] | None:
        """New inputs with the nearest points and new inputs before them; ``None`` where values are independent."""
        if neighbors is not None or isinstance(X, Functionals) or checks.is_traced(X):
            return None
        points, before = self._points()
        X, size = _like(points, X), before.size_at_new
        size += len(X) - 1 if size == before.num_sites else 0
        return X, nearest_jointly(X, points, size, before.scale)

    def covariance(self, X: RowsLike, *, neighbors: ArrayLike | None = None) -> jax.Array:
        """Joint posterior covariance of f, batch + (N, N); see :class:`NearPosterior`."""
        found = self._found(X, neighbors)
        if found is None:
            return super().covariance(X, neighbors=neighbors)

        def compute() -> jax.Array:
            color, shift, mean = self._jointly(found, None)
            values, own = mean + color(shift), color(jnp.eye(len(found[0]), dtype=found[0].dtype))
            return linalg.gram(own.T) + linalg.gram(values.T)

        covariance = one_program(compute, options=self._options)
        return jnp.broadcast_to(covariance, self.batch_shape + covariance.shape)

    def sample(
        self,
        rng_key: jax.Array,
        X: RowsLike,
        sample_shape: tuple[int, ...] = (),
        *,
        neighbors: ArrayLike | None = None,
    ) -> jax.Array:
        """Joint draws of f at inputs, sample_shape + batch + (N,); see :class:`NearPosterior`."""
        checks.random_key(rng_key)
        found = self._found(X, neighbors)
        if found is None:
            return super().sample(rng_key, X, sample_shape, neighbors=neighbors)

        def compute() -> jax.Array:
            keys = jax.random.split(rng_key)
            color, shift, mean = self._jointly(found, self._explained(keys[0], sample_shape))
            shape = (*sample_shape, *self.batch_shape, len(found[0]))
            return mean + color(shift + jax.random.normal(keys[1], shape, shift.dtype))

        return one_program(compute, options=self._options)

    def _explained(self, rng_key: jax.Array, sample_shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        """Of projections (M, N), draws of what they explain; not asked for by those that have none."""
        return lambda A: A

    def _jointly(self, found: tuple[jax.Array, Any], times: Any) -> tuple[Callable[[jax.Array], jax.Array], Any, Any]:
        """What makes values of standard normal noise, what values at points add to that noise, and what is added."""
        X, (near, mask, neighbors) = found
        covariance, new, points, noise, values, mean = self._at_points(X, times)
        M, none = values.shape[-1], jnp.zeros(X.shape[:1], X.dtype)
        old = mask & (near < M)
        noise = jnp.concatenate([jnp.broadcast_to(jnp.asarray(noise, X.dtype), (M,)), none])
        there = jax.tree.map(lambda x, y: jnp.concatenate([x, y])[near], points, new), noise[near]
        weights, variance, used = conditional_weights(covariance, (new, none), there, jnp.asarray(mask), None)
        shift = jnp.sum(jnp.where(old, weights, 0.0) * jnp.take(values, np.where(old, near, 0), axis=-1), axis=-1)
        factor = VecchiaFactor(neighbors, jnp.where(old, 0.0, weights), variance, used)
        return factor.color, shift / jnp.sqrt(variance), mean


@pytree
class NeighborPosterior(NearPosterior):
    """
    The posterior of f given its values at some points, or an approximate posterior of these: each value of f depends on
    its nearest points alone (Datta et al. 2016, section 2.3). Made by :meth:`NNGP.condition` and, of a
    :class:`npgp.VNNGP`, in whose model values are independent given q(u), by :func:`npgp.posterior`.

    Neighbors of new inputs must be found outside ``jit``, where inputs have numbers (:func:`npgp.neighbors.nearest`).

    :param kernel: the kernel.
    :param inducing: the points, (M, D).
    :param neighbors: as the prior had them: they say how many neighbors are used, and in which units of distance.
        Where all points were neighbors of the last, all are used.
    :param loc: means of the values at the points, batch + (M,).
    :param scale: their standard deviations, (M,); ``None`` for values that are known.
    :param jitter: relative jitter tried first.
    :param noise_variance: what is added to the diagonal of the values' covariance, a scalar or (M,).
    """

    kernel: Kernel
    inducing: jax.Array
    neighbors: Neighbors
    loc: jax.Array
    scale: jax.Array | None = None
    jitter: float | None = None
    noise_variance: ArrayLike = 0.0

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of functions."""
        return self.loc.shape[:-1]

    def _points(self) -> tuple[jax.Array, Neighbors]:
        return self.inducing, self.neighbors

    def _values(self, rng_key: jax.Array, sample_shape: tuple[int, ...]) -> jax.Array:
        """Drawn values at the points."""
        u = jnp.broadcast_to(self.loc, sample_shape + self.loc.shape)
        return u if self.scale is None else u + self.scale * jax.random.normal(rng_key, u.shape, u.dtype)

    def _found(self, X: Any, neighbors: ArrayLike | None) -> tuple[jax.Array, Any] | None:
        # A VNNGP's values are independent given q(u): they are so in its model.
        return None if self.scale is not None else super()._found(X, neighbors)

    def _at_points(self, X: jax.Array, times: Callable[[jax.Array], jax.Array] | None) -> tuple[Any, ...]:
        known = self.loc if times is not None else jnp.zeros((1, len(self.inducing)), self.loc.dtype)
        return self.kernel, X, self.inducing, self.noise_variance, known, 0.0

    def _rows(self, X: Any, neighbors: ArrayLike | None, batch_shape: tuple[int, ...]) -> Rows:
        rows = with_neighbors(X, neighbors, self.inducing, self.neighbors)
        return rows.X, rows.neighbors

    def _regression(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
        return NeighborRows(*rows).regression(self.kernel, self.inducing, self.jitter, self.noise_variance)

    def _moments(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
        (_, near), (b, variance) = rows, self._regression(rows)
        mean = jnp.sum(b * jnp.take(self.loc, near, axis=-1), axis=-1)
        if self.scale is not None:
            variance = variance + jnp.sum(jnp.square(b * self.scale[near]), axis=-1)
        return mean, jnp.broadcast_to(variance, mean.shape)

    def _covariance(self, rows: Rows) -> jax.Array:
        """At O(N² M)."""
        (_, near), (b, F) = rows, self._regression(rows)
        covariance = jnp.diag(F)
        if self.scale is not None:
            half = jnp.zeros((len(near), self.loc.shape[-1]), b.dtype)
            half = half.at[jnp.arange(len(near))[:, None], near].add(b) * self.scale
            covariance = linalg.matmul(half, half.T) + covariance
        return jnp.broadcast_to(covariance, self.batch_shape + covariance.shape)

    def _sample(self, rng_key: jax.Array, rows: Rows, sample_shape: tuple[int, ...]) -> jax.Array:
        """At O(M + N k) for each draw."""
        (_, near), (b, F) = rows, self._regression(rows)
        u_key, key = jax.random.split(rng_key)
        mean = jnp.sum(b * jnp.take(self._values(u_key, sample_shape), near, axis=-1), axis=-1)
        return mean + jnp.sqrt(F) * jax.random.normal(key, mean.shape, mean.dtype)
