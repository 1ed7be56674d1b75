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
from jax.typing import ArrayLike
from scipy.special import roots_genlaguerre

from npgp import linalg
from npgp.chunks import entries_at_once, map_chunks, rows_within
from npgp.likelihoods import Likelihood
from npgp.variational.posterior import Posterior

# ---------------------------------------------------------------------------------------------------------------
# BFGS for many small problems side by side

#: After so many evaluations without a decrease, a search ends: what is left is rounding.
PATIENCE = 12


class _Search(NamedTuple):
    """What is at work in each slot: the function's number, and where its search has come to."""

    number: jax.Array
    steps: jax.Array
    x: jax.Array
    f: jax.Array
    g: jax.Array
    H: jax.Array
    direction: jax.Array
    length: jax.Array
    idle: jax.Array


def minimize(
    function: Callable[[jax.Array, jax.Array], jax.Array],
    start: jax.Array,
    inverse: np.ndarray,
    largest: np.ndarray,
    num_steps: ArrayLike,
    tolerance: ArrayLike,
    *,
    slots: int,
    wanted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """
    Minimize many functions side by side, by BFGS with backtracking: ``slots`` of them at a time, and where one is done
    the next begins. Each has its own step size, and each step evaluates all once: while one goes back along its line,
    others go on.

    :param function: from arguments (S, P) and the numbers (S,) of the functions they are of, to (S,), each value of its
        own P arguments alone.
    :param start: of all functions, (N, P).
    :param inverse: a first guess of the inverse Hessians' diagonal, (P,).
    :param largest: the most that a step changes each argument by, (P,); infinity where there is no limit.
    :param num_steps: most evaluations of each function.
    :param tolerance: the decrease that is not worth another step.
    :param slots: S, or N if that is less. Many for the speed of large arrays; few, and fewer idle while the last are
        finished.
    :param wanted: which functions to minimize, (N,); all if omitted. The others are not evaluated.
    :return: arguments (N, P), values (infinite where none was finite, or not wanted), and whether these are minima.
    """
    dtype, (total, size) = start.dtype, start.shape
    slots = min(slots, total)
    eps = float(jnp.finfo(dtype).eps)
    inverse_largest = jnp.asarray(1.0 / largest, dtype)
    wanted = jnp.ones(total, bool) if wanted is None else wanted
    queue, waiting = jnp.argsort(~wanted, stable=True), jnp.sum(wanted)

    def dot(a, b):
        return jnp.sum(a * b, axis=-1)

    def begin(place: jax.Array) -> _Search:
        """Searches from these places of the queue on; beyond its end there is no function, and its number is N."""
        number = jnp.where(place < waiting, queue[jnp.minimum(place, total - 1)], total)
        x = start[jnp.minimum(number, total - 1)]
        H = jnp.broadcast_to(jnp.diag(jnp.asarray(inverse, dtype)), (*x.shape, size))
        infinite, ones, zeros = jnp.full(slots, jnp.inf, dtype), jnp.ones(slots, dtype), jnp.zeros_like(x)
        none = jnp.zeros(slots, int)
        return _Search(number, none, x, infinite, zeros, H, zeros, ones, none)

    def evaluate(x, number):
        values = function(x, jnp.minimum(number, total - 1))
        return jnp.sum(values), values

    def step(carry):
        begun, search, found = carry
        number, steps, x, f, g, H, direction, length, idle = search
        trial = x + length[..., None] * direction
        (_, f_new), g_new = jax.value_and_grad(evaluate, has_aux=True)(trial, number)
        finite = jnp.isfinite(f_new) & jnp.all(jnp.isfinite(g_new), axis=-1)
        accept = finite & (f_new <= f + 1e-4 * length * dot(g, direction))
        enough = jnp.maximum(tolerance, 10.0 * eps * jnp.abs(f_new))
        idle = jnp.where(accept & (f - f_new > enough), 0, idle + 1)

        H = jnp.where(accept[..., None, None], _updated(H, trial - x, g_new - g), H)
        x, g = (jnp.where(accept[..., None], new, old) for new, old in ((trial, x), (g_new, g)))
        f = jnp.where(accept, f_new, f)
        ahead = -linalg.matmul(H, g[..., None])[..., 0]
        to_gain = -0.5 * dot(g, ahead)
        ahead = ahead / jnp.maximum(1.0, jnp.max(jnp.abs(ahead) * inverse_largest, axis=-1))[..., None]
        direction = jnp.where(accept[..., None], ahead, direction)
        length = jnp.where(accept, 1.0, 0.5 * length)
        done = (accept & (to_gain <= enough)) | (idle >= PATIENCE)
        search = _Search(number, steps + 1, x, f, g, H, direction, length, idle)

        found = tuple(a.at[number].set(b, mode="drop") for a, b in zip(found, (x, f, done), strict=True))
        ended = done | (search.steps >= num_steps)
        after = begin(begun + jnp.cumsum(ended) - 1)
        search = jax.tree.map(lambda a, b: jnp.where(ended.reshape(slots, *(1,) * (a.ndim - 1)), b, a), search, after)
        return begun + jnp.sum(ended), search, found

    def unfinished(carry):
        return jnp.any(carry[1].number < total)

    found = start, jnp.full(total, jnp.inf, dtype), jnp.zeros(total, bool)
    return lax.while_loop(unfinished, step, (jnp.asarray(slots), begin(jnp.arange(slots)), found))[2]


def _updated(H: jax.Array, s: jax.Array, d: jax.Array) -> jax.Array:
    """
    BFGS's inverse Hessian after a step s that changed the gradient by d; H as it is if the function curves down there.

    ``(I − ρ s dᵀ) H (I − ρ d sᵀ) + ρ s sᵀ`` with ``ρ = 1/sᵀd`` (Nocedal & Wright 2006, eq. 6.17).
    """
    sd, lengths = jnp.sum(s * d, axis=-1), jnp.sum(s * s, axis=-1) * jnp.sum(d * d, axis=-1)
    curved = sd > jnp.sqrt(jnp.finfo(s.dtype).eps * lengths)
    rho = (1.0 / jnp.where(curved, sd, 1.0))[..., None, None]
    Hd = linalg.matmul(H, d[..., None])  # (..., P, 1)
    cross = s[..., :, None] * jnp.swapaxes(Hd, -1, -2)
    along = rho * (1.0 + rho * jnp.sum(d[..., None] * Hd, axis=-2, keepdims=True))
    new = H - rho * (cross + jnp.swapaxes(cross, -1, -2)) + along * s[..., :, None] * s[..., None, :]
    return jnp.where(curved[..., None, None], new, H)


# ---------------------------------------------------------------------------------------------------------------
# The search

#: Candidates are one place to start from if their predicted data differ by less than this share of the data's variance.
SEPARATION = 0.02
#: Nats to which the maxima of p(y, x) are found, around which q(x) then starts.
MAXIMUM_TOLERANCE = 1e-2
#: Least precision of a row's prior that the first guess of q(x) supposes.
MIN_PRECISION = 1e-2
#: Most that a step changes the logarithm of a scale.
LARGEST_STEP = 2.0
#: One of so many searches is at work at least, so that the number of steps does not grow with that of rows.
SHARE = 32


class Modes(NamedTuple):
    """The optima of q(x*) that :func:`infer_latents` found, best first, along the first axis."""

    #: Means, (S,) + batch + (Q,).
    loc: jax.Array
    #: As :class:`NewRows` has it, with the axis of the starts in front.
    scale: jax.Array
    #: The bound at each, (S,) + batch; −∞ where a row has no further one, or a search failed.
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

    def in_parts(self, function: Callable, X: jax.Array, rows: jax.Array, size: int = 1) -> Any:
        """
        ``function(points, y, offset, present)`` at points X (..., N, Q), as many at a time as memory allows.

        :param function: of points (P, Q) and their rows' data (D, P); its results have points first.
        :param rows: the points' rows, (N,).
        :param size: multiple of the memory that moments at a point need.
        """

        def part(points, rows):
            return function(points, *(array[:, rows] for array in (self.y, self.offset, self.present)))

        rows = jnp.broadcast_to(rows, X.shape[:-1])
        results = map_chunks(part, affordable(self.posterior, size), X.reshape(-1, X.shape[-1]), rows.ravel())
        return jax.tree.map(lambda r: r.reshape(*X.shape[:-1], *r.shape[1:]), results)

    def log_joint(self, X: jax.Array, number: jax.Array, total: int) -> jax.Array:
        """
        ``log p(y, x)`` of the entries present, at points (..., S, Q).

        :param number: of each point among all searches, which are so many for each row in turn: (S,).
        :param total: number of all searches.
        """
        rows = self.y.shape[1]

        def predictive(points, y, offset, present):
            mean, variance = self.posterior.mean_and_variance(points)
            terms = self.likelihood.log_marginal(y, mean + offset, variance)
            return jnp.sum(jnp.where(present, terms, 0.0), axis=0)

        of_data = self.in_parts(predictive, X, number % rows)
        if self.prior.batch_shape != (rows,):
            return of_data + self.prior.log_prob(X)
        # A prior of each row takes points of all rows at once.
        points = jnp.zeros((*X.shape[:-2], total, X.shape[-1]), X.dtype).at[..., number, :].set(X)
        of_all = self.prior.log_prob(points.reshape(*X.shape[:-2], -1, rows, X.shape[-1]))
        return of_data + of_all.reshape(*X.shape[:-2], total)[..., number]

    def slots(self, nodes: int, total: int) -> int:
        """How many searches are at work side by side, each of which evaluates the functions at so many points."""
        features = sum(block.size for block in self.posterior.projector.blocks)
        return max(
            rows_within(entries_at_once(), *self.posterior.batch_shape, max(features, 64), nodes), total // SHARE
        )

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

    def maxima(self, origin: jax.Array, number: int, num_steps: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """
        Different maxima of ``p(y, x)`` uphill from points (S, B, Q), those of the largest mass: (number, B, Q); the
        precisions there; and which are there, (number, B), as a row may have fewer.
        """
        Q, shape = origin.shape[-1], origin.shape[:-1]
        total = math.prod(shape)
        root = linalg.inverse_factor(linalg.cholesky(self.precision(origin))[0]).reshape(total, Q, Q)
        origin = origin.reshape(total, Q)

        def at_values(values, which):
            return origin[which] + linalg.matmul(root[which], values[..., None])[..., 0]

        values, losses, _ = minimize(
            lambda values, which: -self.log_joint(at_values(values, which), which, total),
            jnp.zeros_like(origin),
            np.ones(Q),
            np.full(Q, np.inf),
            num_steps,
            MAXIMUM_TOLERANCE,
            slots=self.slots(1, total),
        )
        points = jnp.where(jnp.isfinite(losses)[:, None], at_values(values, jnp.arange(total)), origin)
        points, losses = points.reshape(*shape, Q), losses.reshape(shape)
        precision = self.precision(points)
        mass = -losses - 0.5 * linalg.log_determinant(linalg.cholesky(precision)[0])  # Laplace's, but for a constant
        deviations = _deviations(precision)

        def at(array, index):
            return jnp.take_along_axis(array, index.reshape(index.shape + (1,) * (array.ndim - 2)), axis=0)

        def choose(mass, _):
            best = jnp.argmax(mass, axis=0)[None]
            same = jnp.all(jnp.abs(points - at(points, best)) < at(deviations, best), axis=-1)
            return jnp.where(same, -jnp.inf, mass), (best[0], jnp.max(mass, axis=0) > -jnp.inf)

        mass = jnp.where(jnp.isfinite(mass), mass, -jnp.inf)
        _, (chosen, there) = lax.scan(choose, mass, length=number)
        return at(points, chosen), at(precision, chosen), there.at[0].set(True)

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

        of_data = self.in_parts(part, X, jnp.arange(X.shape[-2]), X.shape[-1])
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
    origin, precision, there = problem.maxima(origin, min(num_modes, len(origin)), num_steps)
    shape, total = there.shape, there.size
    origin, precision = origin.reshape(total, Q), precision.reshape(total, Q, Q)
    nodes, weights = normal_rule(Q, num_nodes, dtype)

    # In units of the first guess the bound's curvature is about 1 in the means, and 2 in the logarithms of scales.
    root = linalg.inverse_factor(linalg.cholesky(precision)[0])
    deviations = _deviations(precision)
    below = np.tril_indices(Q, -1)

    def unpack(values: jax.Array, which: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Means, scales and the logarithm of the scale's determinant."""
        loc = origin[which] + linalg.matmul(root[which], values[..., :Q, None])[..., 0]
        stretch = values[..., Q : 2 * Q]
        if not full:
            scale = deviations[which] * jnp.exp(stretch)
            return loc, scale, jnp.sum(jnp.log(deviations[which]) + stretch, axis=-1)
        inner = linalg.diagonal_matrix(jnp.exp(stretch))
        inner = inner.at[..., below[0], below[1]].set(values[..., 2 * Q :])
        diagonal = linalg.diagonal(root[which])
        return loc, linalg.matmul(root[which], inner), jnp.sum(jnp.log(diagonal) + stretch, axis=-1)

    def loss(values: jax.Array, which: jax.Array) -> jax.Array:
        loc, scale, log_det = unpack(values, which)
        log_joint = problem.log_joint(spread(loc, scale, nodes[:, None]), which, total)
        expected = jnp.tensordot(weights, log_joint, 1)
        return -(expected + log_det + 0.5 * Q * (1.0 + math.log(2.0 * math.pi)))

    curvature = np.repeat([1.0, 2.0, 1.0], [Q, Q, len(below[0]) if full else 0])
    largest = np.where(curvature == 2.0, LARGEST_STEP, np.inf)
    zeros, slots = jnp.zeros((total, len(curvature)), dtype), problem.slots(len(nodes), total)
    values, losses, done = minimize(
        loss, zeros, 1.0 / curvature, largest, num_steps, tolerance, slots=slots, wanted=there.ravel()
    )
    loc, scale, _ = unpack(values, jnp.arange(total))
    loc, scale, losses, done = (a.reshape(*shape, *a.shape[1:]) for a in (loc, scale, losses, done))
    order = jnp.argsort(losses, axis=0)
    loc, scale, elbo, done = (
        jnp.take_along_axis(a, order.reshape(order.shape + (1,) * (a.ndim - 2)), 0) for a in (loc, scale, -losses, done)
    )
    # Where there is no optimum, or a search failed, the best stands, with no weight.
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


# ---------------------------------------------------------------------------------------------------------------
# Expectations under Gaussians over latent points, and at how many points functions fit in memory

#: Elements of the largest arrays, beyond which points are taken in parts.
BUDGET = 2**24
#: Most radii of the rule, in one dimension and in several.
RADII = (16, 3)


def normal_rule(latent_dim: int, num_nodes: int, dtype) -> tuple[jax.Array, jax.Array]:
    """
    Nodes (K, Q) and weights (K,) for an expectation under N(0, I), at least ``num_nodes`` of them.

    On spheres whose radii are those of Gauss-Laguerre quadrature for half their squares, which have a gamma
    distribution, the 2Q ends of axes in random directions. In one dimension this is Gauss-Hermite.
    """
    ends = 2 * latent_dim
    frames = -(-num_nodes // ends)
    radii = min(frames, RADII[latent_dim > 1])
    repeats = -(-frames // radii) if latent_dim > 1 else 1
    halves, shares = roots_genlaguerre(radii, 0.5 * latent_dim - 1.0)
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(repeats, radii, latent_dim, latent_dim)))[0]
    rays = np.sqrt(2.0 * halves)[:, None, None] * axes
    nodes = np.stack([rays, -rays])
    weights = np.broadcast_to(shares[:, None] / (shares.sum() * repeats * ends), nodes.shape[:-1])
    return jnp.asarray(nodes.reshape(-1, latent_dim), dtype), jnp.asarray(weights.ravel(), dtype)


def spread(loc: jax.Array, scale: jax.Array, z: jax.Array) -> jax.Array:
    """``loc + scale z`` for z (..., Q), and a scale of standard deviations or, with an axis more than loc, factors."""
    return loc + (scale * z if scale.ndim == loc.ndim else linalg.matmul(scale, z[..., None])[..., 0])


def affordable(posterior: Posterior, multiple: int = 1) -> int:
    """
    At how many points the functions can be evaluated at a time; likelihoods may need 64 nodes for each.

    :param multiple: how many times the memory is needed at each point.
    """
    features = sum(block.size for block in posterior.projector.blocks)
    return rows_within(BUDGET, *posterior.batch_shape, max(features, 64), multiple)
