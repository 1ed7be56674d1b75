"""
The search for the optima of ``q(x*)`` for new rows of a GPLVM, for all rows side by side: :mod:`npgp.gplvm.new_rows`
says what they maximize.

From many points to maxima of ``p(y, x)``, which costs one evaluation a step; and from those of the largest mass to the
optima of q(x), which costs as many as there are nodes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax

from npgp import linalg
from npgp.chunks import map_chunks
from npgp.gplvm.expectations import affordable, normal_rule, spread
from npgp.likelihoods import Likelihood
from npgp.training.minimize import minimize
from npgp.variational.posterior import Posterior

__all__ = ["Modes", "Problem", "find_modes"]

#: Candidates are one place to start from if their predicted data differ by less than this share of the data's variance.
SEPARATION = 0.02
#: Nats to which the maxima of p(y, x) are found, around which q(x) then starts.
MAXIMUM_TOLERANCE = 1e-2
#: Least precision of a row's prior that the first guess of q(x) supposes.
MIN_PRECISION = 1e-2
#: Most that a step changes the logarithm of a scale.
LARGEST_STEP = 2.0


class Modes(NamedTuple):
    """The optima of q(x*) that :func:`infer_latents` found, best first, along the first axis."""

    #: Means, (S,) + batch + (Q,).
    loc: jax.Array
    #: As :class:`NewRows` has it, with the axis of the starts in front.
    scale: jax.Array
    #: The bound at each, (S,) + batch; −∞ where a search failed.
    elbo: jax.Array
    #: ``∝ exp(elbo)``, which is best for a mixture of components far from one another, (S,) + batch. Those
    #: less than a standard deviation from a better one repeat it, and have weight 0.
    weight: jax.Array


class Problem(NamedTuple):
    """Everything about the rows and the model that stays fixed; y, offset and present are (D, B)."""

    posterior: Posterior
    likelihood: Likelihood
    prior: dist.Distribution
    y: jax.Array
    offset: jax.Array
    present: jax.Array

    def in_parts(self, function: Callable, X: jax.Array, size: int = 1) -> Any:
        """
        ``function(points, y, offset, present)`` at points X (..., B, Q), as many at a time as memory allows.

        :param function: of points (P, Q) and their rows' data (D, P); its results have points first.
        :param size: multiple of the memory that moments at a point need.
        """

        def part(points, rows):
            return function(points, *(array[:, rows] for array in (self.y, self.offset, self.present)))

        rows = jnp.broadcast_to(jnp.arange(X.shape[-2]), X.shape[:-1])
        results = map_chunks(part, affordable(self.posterior, size), X.reshape(-1, X.shape[-1]), rows.ravel())
        return jax.tree.map(lambda r: r.reshape(*X.shape[:-1], *r.shape[1:]), results)

    def log_joint(self, X: jax.Array) -> jax.Array:
        """``log p(y, x)`` of the entries present, at points (..., B, Q)."""

        def predictive(points, y, offset, present):
            mean, variance = self.posterior.mean_and_variance(points)
            terms = self.likelihood.log_marginal(y, mean + offset, variance)
            return jnp.sum(jnp.where(present, terms, 0.0), axis=0)

        return self.in_parts(predictive, X) + self.prior.log_prob(X)

    def best_candidates(self, candidates: jax.Array, number: int) -> jax.Array:
        """For each row, candidates (C, Q) of large ``log p(y, x)``, whose predicted data differ: (number, B, Q)."""
        rows = self.y.shape[1]

        def part(points):
            mean, variance = self.posterior.mean_and_variance(points)
            y, offset, present = (jnp.tile(array, len(points)) for array in (self.y, self.offset, self.present))
            terms = self.likelihood.log_marginal(y, jnp.repeat(mean, rows, 1) + offset, jnp.repeat(variance, rows, 1))
            return jnp.sum(jnp.where(present, terms, 0.0), axis=0).reshape(-1, rows), mean.T

        scores, means = map_chunks(part, affordable(self.posterior, rows), candidates)
        scores = scores + self.prior.log_prob(candidates[:, None])
        means = means - jnp.mean(means, axis=0)
        squares = jnp.sum(jnp.square(means), axis=1)

        def choose(scores, _):
            best = jnp.argmax(scores, axis=0)
            apart = squares[:, None] + squares[best] - 2.0 * linalg.matmul(means, means[best].T)
            return jnp.where(apart < SEPARATION * jnp.mean(squares), -jnp.inf, scores), candidates[best]

        scores = jnp.where(jnp.isfinite(scores), scores, -jnp.inf)
        return lax.scan(choose, scores, length=number)[1]

    def maxima(self, origin: jax.Array, number: int, num_steps: int) -> tuple[jax.Array, jax.Array]:
        """
        Different maxima of ``p(y, x)`` uphill from points (S, B, Q), those of the largest mass: (number, B, Q), and the
        precisions there.
        """
        root = linalg.inverse_factor(linalg.cholesky(self.precision(origin))[0])

        def place(values):
            return origin + linalg.matmul(root, values[..., None])[..., 0]

        values, losses, _ = minimize(
            lambda values: -self.log_joint(place(values)),
            jnp.zeros_like(origin),
            np.ones(origin.shape[-1]),
            np.full(origin.shape[-1], np.inf),
            num_steps,
            MAXIMUM_TOLERANCE,
        )
        points = jnp.where(jnp.isfinite(losses)[..., None], place(values), origin)
        precision = self.precision(points)
        mass = -losses - 0.5 * linalg.log_determinant(linalg.cholesky(precision)[0])  # Laplace's, but for a constant
        deviations = _deviations(precision)

        def at(array, index):
            return jnp.take_along_axis(array, index.reshape(index.shape + (1,) * (array.ndim - 2)), axis=0)

        def choose(mass, _):
            best = jnp.argmax(mass, axis=0)[None]
            same = jnp.all(jnp.abs(points - at(points, best)) < at(deviations, best), axis=-1)
            return jnp.where(same, -jnp.inf, mass), best[0]

        mass = jnp.where(jnp.isfinite(mass), mass, -jnp.inf)
        _, chosen = lax.scan(choose, mass, length=number)
        return at(points, chosen), at(precision, chosen)

    def precision(self, X: jax.Array) -> jax.Array:
        """A first guess of the precision of q(x) around points (..., B, Q), by Gauss and Newton: (..., B, Q, Q)."""
        directions = jnp.eye(X.shape[-1], dtype=X.dtype)

        def along(function, X):
            """Derivatives of ``function`` in each direction, on a new leading axis."""
            return jax.vmap(lambda e: jax.jvp(function, (X,), (jnp.broadcast_to(e, X.shape),))[1])(directions)

        def part(points, y, offset, present):
            mean, variance = self.posterior.mean_and_variance(points)
            curvature = jnp.maximum(self.likelihood.expected_curvature(y, mean + offset, variance), 0.0)
            weight = jnp.where(present, curvature / (1.0 + curvature * variance), 0.0)  # 1/(σ² + v) for Gaussian noise
            slopes = along(self.posterior.mean, points).T * jnp.sqrt(weight.T)[..., None]  # (P, D, Q)
            return linalg.gram(jnp.swapaxes(slopes, -1, -2))

        of_data = self.in_parts(part, X, X.shape[-1])
        slope = jax.grad(lambda X: jnp.sum(self.prior.log_prob(X)))
        of_prior = -jnp.einsum("q...q->...q", along(slope, X))
        return of_data + jnp.maximum(of_prior, MIN_PRECISION)[..., None] * directions


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def find_modes(
    problem: Problem,
    candidates: jax.Array,
    start: jax.Array | None,
    tolerance: jax.Array,
    num_starts: int,
    num_modes: int,
    full: bool,
    num_nodes: int,
    num_steps: int,
) -> tuple[Modes, jax.Array]:
    """The optima of q(x), best first, (S, B); and whether the best is one, (B,)."""
    rows, Q, dtype = problem.y.shape[1], candidates.shape[1], candidates.dtype
    try:
        center = problem.prior.mean
    except NotImplementedError:
        center = 0.0
    center = jnp.where(jnp.isfinite(center), center, 0.0)  # Cauchy's is not
    starts = [jnp.broadcast_to(center, (rows, Q)).astype(dtype)[None]]
    if start is not None:
        starts.append(start[None])
    if number := min(num_starts, len(candidates)):
        starts.append(problem.best_candidates(candidates, number))
    origin = jnp.concatenate(starts)
    origin, precision = problem.maxima(origin, min(num_modes, len(origin)), num_steps)
    nodes, weights = normal_rule(Q, num_nodes, dtype)

    # In units of the first guess the bound's curvature is about 1 in the means, and 2 in the logarithms of scales.
    root = linalg.inverse_factor(linalg.cholesky(precision)[0])
    deviations = _deviations(precision)
    below = np.tril_indices(Q, -1)

    def unpack(values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Means, scales and the logarithm of the scale's determinant."""
        loc = origin + linalg.matmul(root, values[..., :Q, None])[..., 0]
        stretch = values[..., Q : 2 * Q]
        if not full:
            return loc, deviations * jnp.exp(stretch), jnp.sum(jnp.log(deviations) + stretch, axis=-1)
        inner = linalg.diagonal_matrix(jnp.exp(stretch))
        inner = inner.at[..., below[0], below[1]].set(values[..., 2 * Q :])
        diagonal = linalg.diagonal(root)
        return loc, linalg.matmul(root, inner), jnp.sum(jnp.log(diagonal) + stretch, axis=-1)

    def loss(values: jax.Array) -> jax.Array:
        loc, scale, log_det = unpack(values)
        expected = jnp.tensordot(weights, problem.log_joint(spread(loc, scale, nodes[:, None, None])), 1)
        return -(expected + log_det + 0.5 * Q * (1.0 + math.log(2.0 * math.pi)))

    curvature = np.repeat([1.0, 2.0, 1.0], [Q, Q, len(below[0]) if full else 0])
    largest = np.where(curvature == 2.0, LARGEST_STEP, np.inf)
    zeros = jnp.zeros((*origin.shape[:-1], len(curvature)), dtype)
    values, losses, done = minimize(loss, zeros, 1.0 / curvature, largest, num_steps, tolerance)
    loc, scale, _ = unpack(values)
    order = jnp.argsort(losses, axis=0)
    loc, scale, elbo, done = (
        jnp.take_along_axis(a, order.reshape(order.shape + (1,) * (a.ndim - 2)), 0) for a in (loc, scale, -losses, done)
    )
    # Where a search failed, its q(x) may be NaN: the best stands there, with no weight.
    loc, scale = (
        jnp.where(jnp.isfinite(elbo).reshape(elbo.shape + (1,) * (a.ndim - 2)), a, a[0]) for a in (loc, scale)
    )
    return Modes(loc, scale, elbo, _weights(loc, scale, elbo)), done[0]


def _deviations(precision: jax.Array) -> jax.Array:
    """Standard deviations of the independent coordinates that are nearest to a Gaussian of this precision."""
    return 1.0 / jnp.sqrt(linalg.diagonal(precision))


def _weights(loc: jax.Array, scale: jax.Array, elbo: jax.Array) -> jax.Array:
    """The weights of modes, which are sorted by their bounds."""
    if scale.ndim > loc.ndim:
        scale = jnp.sqrt(jnp.sum(jnp.square(scale), axis=-1))
    same = jnp.all(jnp.abs(loc[:, None] - loc) < scale, axis=-1)  # the first axis within a deviation of the second
    better = np.tril(np.ones(same.shape[:2], bool), -1)[..., None]
    return jax.nn.softmax(jnp.where(jnp.any(same & better, axis=1), -jnp.inf, elbo), axis=0)
