"""
Rules for integrals over latent values, f ~ N(mean, variance).

- Expectations of what is smooth in f by the trapezoid rule in t, ``f = mean + sd sinh t``: for integrands that decay it
  converges exponentially, and its nodes are four times as close about the mean as those of a Gauss-Hermite rule of as
  many nodes, which reach no further. They are symmetric, so that the curvature of a log-concave likelihood comes out
  non-negative.
- Averages of a likelihood, ``∫ p(y | f) N(f; mean, variance) df``, by a rule that looks at the integrand: it finds its
  peaks and their widths row by row, and is Gauss-Legendre's in t on each side of a peak, ``f = peak ± width sinh t``. A
  likelihood a thousand times narrower than the Gaussian, or with a kink at its peak, costs no accuracy.

No gradient flows through the places of the nodes, on which an integral does not depend.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from numpy.polynomial.hermite_e import hermegauss, hermevander
from numpy.polynomial.legendre import leggauss, legroots, legvander

from npgp import linalg
from npgp.likelihoods.numerics import LOG_2PI, column_of, deviation, floats
from npgp.programs.tracing import is_traced

#: Default number of quadrature nodes.
NUM_NODES = 64
#: The same for each of several latent values, by their number; and how many times as many the first has, a location
#: beside which the density may be narrow.
NUM_NODES_EACH, FIRST = {1: NUM_NODES, 2: 24, 3: 10}, {2: 2, 3: 4}
#: Standard deviations that a trapezoid rule covers each way: e^-24.5 is left out.
REACH = 7.0
#: And that of expectations, whose integrands may grow with f like eᶠ, and in float64 without overflow.
MOST_REACH = {"float32": 12.0, "float64": 18.0}
#: What is known to be smooth grows like f at most, and what is in several latent values exponentially at most.
SMOOTH_REACH = {"float32": 7.0, "float64": 8.0}
#: Fewer nodes are Gauss-Hermite's.
LEAST_TRAPEZOID = 48
#: Values at nodes of so small weight count if they are more than so many nats, all the same.
FELT = 1e-5
#: Change of an expectation with fewer nodes from which on it is computed anew, beside the bends of log p; and halvings
#: of the distance to these.
ROUGH, BEND_HALVINGS = {"float32": 4e-6, "float64": 1e-10}, {"float32": 14, "float64": 26}
#: Nodes each way of a bend in whose place there are closer ones; and next ones whose weights change for it.
PANEL, STENCIL = {"float32": 5, "float64": 10}, {"float32": 8, "float64": 14}
#: Change of a slope with Gauss-Legendre's nodes beside a bend, as a share of the slopes there, from which on it has
#: panels; how many of these there are, how often one is cut in two at most, and the nodes of each, two more near its
#: ends.
UNLIKE_SLOPE = {"float32": 2e-4, "float64": 1e-7}
EDGE = {"float32": 1e-3, "float64": 1e-6}
PANELS, PANEL_NODES = {"float32": (16, 24), "float64": (24, 48)}, 8
#: NumPy's Gauss-Hermite weights overflow beyond so many nodes.
MAX_HERMITE = 300
#: Nodes of the grid on which peaks are looked for; of a log-concave integrand, which has one.
GRID_NODES, GRID_NODES_CONCAVE = 96, 32
#: Distances from a peak at which the integrand is looked at, each way, down to this share of the longest.
PROFILE_NODES, LEAST_DISTANCE = 16, 1e-6
#: Nodes of each latent value, of C, on the grids on which a box is looked for; how many times; and arsinh of the most
#: standard deviations it may reach.
BOX_NODES, BOX_ROUNDS, BOX_END = {2: 20, 3: 10}, 4, 7.0
#: Change of a log-average over C latent values with half of the nodes of one from which on it is computed anew. The
#: error is about the change's square, but beside a kink a third of it.
UNLIKE = {2: 3e-4, 3: 0.01}
#: Standard deviations within which a bend of log p is looked for in the first of several latent values, and the
#: distance from it within which nodes are equidistant.
BEND_REACH, BEND_WIDTH = 5.0, 0.1
#: Change of an expectation over several latent values with half of the nodes of one, relative or absolute, from which
#: on there are twice as many. The error is far less than it: at most 1e-4, also of gradients.
UNLIKE_EXPECTATION = 0.005
#: The share of an interval that golden section cuts off.
GOLDEN = 0.5 * (3.0 - math.sqrt(5.0))


@functools.lru_cache(maxsize=32)
def hermite(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Hermite nodes and weights of a standard normal expectation, in float64."""
    nodes, weights = hermegauss(min(num_nodes, MAX_HERMITE))
    return nodes, weights / weights.sum()


@functools.lru_cache(maxsize=32)
def standard_normal(num_nodes: int, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the trapezoid rule for a standard normal expectation, in float64."""
    end = np.arcsinh(reach)
    t = np.linspace(-end, end, num_nodes)
    weights = np.cosh(t) * np.exp(-0.5 * np.sinh(t) ** 2)
    return np.sinh(t), weights / weights.sum()


@functools.lru_cache(maxsize=32)
def _sorted_nodes(num_nodes: int, num_latents: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Nodes (C, K), weights (K,), those of small weight first, and which of the rule's they are, (K,).

    A trapezoid rule in float64 has twice as many. A weight that underflows, times a log-density that overflows, would
    be NaN; it is left out.
    """
    if num_latents > 1:
        first = standard_normal(FIRST.get(num_latents, 1) * num_nodes, REACH)
        rules = [first, *[hermite(num_nodes)] * (num_latents - 1)]
    elif num_nodes < LEAST_TRAPEZOID:
        rules = [hermite(num_nodes)]
    else:
        rules = [standard_normal(2 * num_nodes if dtype == "float64" else num_nodes, MOST_REACH[dtype])]
    nodes, weights = (
        np.stack([array.ravel() for array in np.meshgrid(*each, indexing="ij")]) for each in zip(*rules, strict=True)
    )  # (C, K)
    weights = weights.prod(0)
    order = np.argsort(weights, kind="stable")
    order = order[weights[order] > np.finfo(dtype).tiny]
    return nodes[:, order], weights[order], order


def smooth_rule(mean: ArrayLike, variance: ArrayLike, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """
    Nodes of f on a new leading axis, and weights, for functions that are smooth on a scale of 1, and finite everywhere.

    Half of the nodes do, and all in float64: up to standard deviations of f of 5, errors beside log-gammas of logistic
    functions are below 1e-7 and 1e-12; up to 10, below 4e-5 and 1e-9.
    """
    mean, variance = jnp.broadcast_arrays(*floats(mean, variance))
    dtype = mean.dtype.name
    if num_nodes < LEAST_TRAPEZOID:
        rule = hermite(num_nodes)
    else:
        rule = standard_normal(num_nodes if dtype == "float64" else num_nodes // 2, SMOOTH_REACH[dtype])
    f = _scaled(mean[None], deviation(variance)[None], rule[0][None])[0]
    return f, column_of(rule[1], mean)


def _scaled(mean: jax.Array, sd: jax.Array, z: np.ndarray) -> jax.Array:
    """
    ``mean + sd z``, (C, K, ...), of means (C, ...) and nodes (C, K), as a product of matrices.

    So the slopes in mean and deviation are one too: for two sums over nodes XLA on a CPU computes log p's twice.
    """
    columns = jnp.asarray(np.stack([np.ones_like(z), z], axis=-1), mean.dtype)
    both = jnp.stack([mean, sd], axis=1)
    return jnp.einsum("ckj,cj...->ck...", columns, both, precision=lax.Precision.HIGHEST)


def normal_rule(
    function: Callable[[jax.Array], jax.Array],
    mean: ArrayLike,
    variance: ArrayLike,
    num_nodes: int,
    num_latents: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """
    Nodes, values of f, and weights of an expectation, on a new leading axis.

    Leading, because parameters and data with one value per row broadcast on the other side. With C ≥ 2 latent values
    the nodes are all combinations, of :data:`FIRST` times as many of the first, and stand behind the axis of the latent
    values. A trapezoid rule of one in float64 has twice as many.

    Where function is not finite, nor has a slope, at a node so far out that its weight is below rounding, the node is
    moved to the mean; but not where function grows so fast before that it would have counted.
    """
    mean, variance = floats(mean, variance)
    result = jax.eval_shape(lambda m, v: function(m + v), mean, variance)
    sd = deviation(variance)
    nodes, weights, _ = _sorted_nodes(num_nodes, num_latents, result.dtype.name)
    mean, sd = (jnp.broadcast_to(x, (num_latents, *result.shape)).astype(result.dtype) for x in (mean, sd))
    f = _scaled(mean, sd, nodes)

    def shaped(f: jax.Array) -> jax.Array:
        return f[0] if num_latents == 1 else f

    w = column_of(weights, result)
    outer = int(np.sum(weights < jnp.finfo(result.dtype).eps))
    if outer:
        # A branch, which XLA does not merge with what follows: on a CPU that would cost several times as much.
        used = _is_used(function, shaped(f[:, :outer]), w[:outer])

        def moved() -> jax.Array:
            return jnp.concatenate([jnp.where(used, f[:, :outer], mean[:, None]), f[:, outer:]], axis=1)

        f = if_any(~used, moved, lambda: f)
    return shaped(f), w


def if_any(needed: jax.Array, first: Callable[[], jax.Array], second: Callable[[], jax.Array]) -> jax.Array:
    """
    The first value if any element needs it; it is right for the others too.

    Outside programs by Python, where ``lax.cond`` would compile both anew at each call. Under ``jax.vmap`` a branch
    still, for all that is mapped over: a condition for each element would have both computed for all.
    """
    if is_traced(needed):
        return lax.cond(_any(needed), first, second)
    return first() if jnp.any(needed) else second()


@custom_vmap
def _any(needed: jax.Array) -> jax.Array:
    return jnp.any(needed)


@_any.def_vmap
def _(axis_size: int, mapped: Any, needed: jax.Array) -> tuple[jax.Array, bool]:
    return _any(needed), False


def expectation(
    log_prob: Callable[[jax.Array], jax.Array],
    fixed: Callable[[jax.Array], jax.Array],
    mean: ArrayLike,
    variance: ArrayLike,
    num_nodes: int,
) -> jax.Array:
    """
    ``E[log p(y | f)]`` by the trapezoid rule, where fewer of its nodes would do; else by :func:`beside_bend`.

    Row by row it is compared with the rules of every second node and of every third, which are wrong by other amounts,
    wherever log p has a kink. If no row needs them, other nodes are not looked at.

    :param log_prob: log p(y | f) as a function of f.
    :param fixed: the same, without gradients to be taken.
    :param mean: mean of f.
    :param variance: its variance.
    :param num_nodes: number of nodes, twice as many in float64; and half of it at a bend, five quarters in float64.
    """
    f, weights = normal_rule(log_prob, mean, variance, num_nodes)
    values = log_prob(f)
    smooth = linalg.weighted_sum(weights, values)
    if num_nodes < LEAST_TRAPEZOID:
        return smooth
    at = lax.stop_gradient(values)
    fewer = jnp.asarray(_changes(num_nodes, smooth.dtype.name), smooth.dtype)
    changes = jnp.abs(linalg.matmul(fewer, at.reshape(len(fewer[0]), -1)))
    limit = ROUGH[smooth.dtype.name] * jnp.maximum(1.0, jnp.abs(lax.stop_gradient(smooth)))
    rough = jnp.max(changes, axis=0).reshape(smooth.shape) > limit  # not where there is no number

    def at_bends() -> jax.Array:
        m, v = (jnp.broadcast_to(array, smooth.shape).astype(smooth.dtype) for array in (mean, variance))
        most = jnp.where(rough, limit, jnp.inf)
        return beside_bend(log_prob, fixed, m, deviation(v), f, values, most, num_nodes)

    return if_any(rough, at_bends, lambda: smooth)


@functools.lru_cache(maxsize=32)
def _changes(num_nodes: int, dtype: str) -> np.ndarray:
    """
    The weights of every second node, and of every third, less those of all; (2, K), in float64.

    Scaled by 1 and z², so that the three integrate quadratics alike.
    """
    z, w, index = _sorted_nodes(num_nodes, 1, dtype)
    powers, fewer = np.stack([np.ones_like(z[0]), z[0] ** 2]), []
    for every in (2, 3):
        some = every * w * (index % every == 0)
        scale = np.linalg.solve((powers * some) @ powers.T, powers @ w)
        fewer.append(some * (scale @ powers) - w)
    return np.stack(fewer)


@functools.lru_cache(maxsize=8)
def _beyond(num_nodes: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """
    Nodes of the trapezoid rule, ascending, (K,), and weights of expectations over what is more than :data:`PANEL` nodes
    from each, (K, K).

    Those of the rule, changed at the :data:`STENCIL` last nodes so that powers of f are integrated exactly. In float64.
    """
    (z,), w, _ = _sorted_nodes(num_nodes, 1, dtype)
    z, w = z[np.argsort(z)], w[np.argsort(z)]
    t, (fractions, gauss) = np.arcsinh(z), _legendre(MAX_HERMITE)
    below = np.zeros((len(z), len(z)))
    for last, row in enumerate(below[1:], 1):
        row[:last], row[last] = w[:last], 0.5 * w[last]
        at = t[0] + (t[last] - t[0]) * fractions
        density = (t[last] - t[0]) * gauss * np.cosh(at) * np.exp(-0.5 * np.sinh(at) ** 2) / math.sqrt(2.0 * math.pi)
        near = np.arange(max(last + 1 - STENCIL[dtype], 0), last + 1)
        scale, powers = z[last] - z[near[0]], np.arange(len(near))[:, None]
        missed = ((np.sinh(at) - z[last]) / scale) ** powers @ density - ((z - z[last]) / scale) ** powers @ row
        row[near] += np.linalg.solve(((z[near] - z[last]) / scale) ** powers, missed)
    panel = PANEL[dtype]  # nodes nearer to an end than that, whose weights mean nothing, are no bends
    return z, np.roll(below, panel, axis=0) + np.roll(below[::-1, ::-1], -panel, axis=0)


def expectation_over_several(
    log_prob: Callable[[jax.Array], jax.Array],
    fixed: Callable[[jax.Array], jax.Array],
    mean: jax.Array,
    variance: jax.Array,
    num_nodes: int,
) -> jax.Array:
    """
    ``E[log p(y | f)]`` over C ≥ 2 latent values, of which the first is a location, beside which log p may be narrow.

    Along the first by Gauss-Legendre's rule on both sides of the peak of p at the means of the others, along these by
    Gauss-Hermite's. If the change with half of the nodes is large in any row, there are twice as many of the latter.

    :param log_prob: log p(y | f) as a function of f, (C, ...).
    :param fixed: the same, without gradients to be taken.
    :param mean: mean of f, (C, ...).
    :param variance: its variance, likewise.
    :param num_nodes: number of nodes of each latent value but the first, which has at least :data:`NUM_NODES`.
    """
    C, of = len(mean), jax.eval_shape(lambda m, v: log_prob(m + v), mean, variance)
    mean, variance = (jnp.broadcast_to(array, (C, *of.shape)).astype(of.dtype) for array in (mean, variance))
    sd, axes = deviation(variance), (1,) * len(of.shape)
    m, s = lax.stop_gradient((mean, sd))

    def along_first(z: jax.Array) -> jax.Array:
        f = jnp.broadcast_to(m[:, None], (C, *z.shape)).at[0].add(s[0] * z)
        return jnp.nan_to_num(fixed(f), nan=-jnp.inf, posinf=-jnp.inf, neginf=-jnp.inf)

    grid = column_of(jnp.linspace(-BEND_REACH, BEND_REACH, GRID_NODES_CONCAVE + 1, dtype=of.dtype), of)
    grid = jnp.broadcast_to(grid, (len(grid), *of.shape))
    values = along_first(grid)
    best = jnp.argmax(values, axis=0)[None]
    low, middle, high = (jnp.take_along_axis(grid, best + i, axis=0, mode="clip") for i in (-1, 0, 1))
    peak, _ = golden_section(along_first, low, middle, high, jnp.max(values, axis=0)[None])
    peak = jnp.where((best > 0) & (best < len(grid) - 1), peak, 0.0)
    signs = column_of([-1.0, 1.0], of)
    count = num_nodes * NUM_NODES // NUM_NODES_EACH.get(C, num_nodes) * (3 if of.dtype == jnp.float64 else 2) // 4
    ends = SMOOTH_REACH[of.dtype.name] - signs * peak
    z, log_weights = on_sides(peak, signs, BEND_WIDTH, ends, _legendre(max(count, 1)))
    z, weights = lax.stop_gradient((z, jax.nn.softmax(log_weights - 0.5 * z**2, axis=0)))

    def product(count: int) -> tuple[jax.Array, jax.Array]:
        """The expectation, and the largest change with half of the nodes."""
        nodes, other_weights, fewer = _others(count, C - 1)

        def inner(node: tuple[jax.Array, jax.Array]) -> jax.Array:
            at, weight = node
            at = jnp.broadcast_to(at.reshape((-1, 1, *axes)), (C - 1, *z.shape))
            f = mean[:, None] + sd[:, None] * jnp.concatenate([z[None], at])
            # Far out, where it may be no number, a node counts for nothing.
            unused = ~jnp.isfinite(fixed(lax.stop_gradient(f))) & (weight * weights < jnp.finfo(of.dtype).eps)
            f = if_any(unused, lambda: jnp.where(unused, mean[:, None], f), lambda: f)
            return jnp.sum(weights * log_prob(f), axis=0)

        table = jnp.asarray(nodes, of.dtype), jnp.asarray(other_weights, of.dtype)
        averages = lax.map(jax.checkpoint(inner), table, batch_size=num_nodes)
        changes = linalg.matmul(jnp.asarray(fewer, of.dtype), lax.stop_gradient(averages).reshape(len(nodes), -1))
        value = linalg.weighted_sum(column_of(table[1], of), averages)
        return value, jnp.max(jnp.abs(changes), axis=0).reshape(value.shape)

    value, change = product(num_nodes)
    rough = change > UNLIKE_EXPECTATION * jnp.maximum(1.0, jnp.abs(lax.stop_gradient(value)))
    return if_any(rough, lambda: jnp.where(rough, product(2 * num_nodes)[0], value), lambda: value)


@functools.lru_cache(maxsize=32)
def _others(num_nodes: int, num_latents: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Gauss-Hermite nodes of several latent values, (K, C), weights, (K,), and those with half of the nodes of each less
    these, (C, K), in float64.
    """
    nodes, weights = hermite(num_nodes)
    index = np.arange(len(nodes))
    half = np.flatnonzero(np.minimum(index, index[::-1]) % 2 == 0)
    fewer = -weights
    # Interpolatory: the means of Hermite polynomials are 0 but for the first.
    fewer[half] += np.linalg.solve(hermevander(nodes[half], len(half) - 1).T, np.eye(len(half))[0])
    each = np.stack(np.meshgrid(*[nodes] * num_latents, indexing="ij"), axis=-1).reshape(-1, num_latents)
    factors = [[fewer if axis == changed else weights for axis in range(num_latents)] for changed in range(num_latents)]
    products = [functools.reduce(np.multiply.outer, each).ravel() for each in ([weights] * num_latents, *factors)]
    return each, products[0], np.stack(products[1:])


def find_bend(log_p: jax.Array, limit: jax.Array, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """
    The ascending rule's node nearest the sharpest bend of log p, and whether there is none, or others too.

    Bends are where second differences of log p change within little of f.

    :param log_p: at the ascending nodes, on a leading axis; NaN is looked over.
    :param limit: nats that may be left, in the shape of the result.
    :param num_nodes: number of the rule's nodes.
    """
    dtype, column = log_p.dtype, functools.partial(column_of, like=limit)
    z, _ = _beyond(num_nodes, dtype.name)
    panel, steps = PANEL[dtype.name], np.diff(z)
    curvature = jnp.diff(jnp.diff(log_p, axis=0) / column(steps), axis=0) / column(steps[1:] + steps[:-1])
    # Of a kink between two nodes both have half.
    unlike = jnp.abs(2.0 * curvature[2:-2] - curvature[:-4] - curvature[4:]) * column(steps[2:-3])
    unlike = jnp.where(jnp.isfinite(unlike), unlike, 0.0)
    inside = np.arange(panel + 1, len(z) - 1 - panel)  # where unlike[i] is of node i + 3
    around = [unlike[inside[0] - 3 + i : inside[-1] - 2 + i] for i in range(-2, 3)]
    felt, index = column(steps[inside - 1] ** 2 * np.exp(-0.5 * z[inside] ** 2)), column(inside)
    score = jnp.where(around[2] == functools.reduce(jnp.maximum, around), around[2] * felt, 0.0)
    most = jnp.max(score, axis=0)
    first = jnp.max(jnp.where(score == most, index, 0.0), axis=0)  # XLA on a CPU takes twice as long over argmax
    others = jnp.where(jnp.abs(index - first) > 3, score, 0.0)
    several = jnp.max(others, axis=0) > jnp.maximum(0.01 * most, limit)
    return jnp.where(most > limit, first.astype(int), len(z) // 2), (most <= limit) | several


def refine_bend(
    value: Callable[[jax.Array], jax.Array], center: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """
    Where a bend is, and its width, by halving; 1 for the width of a kink, beside which log p is smooth.

    :param value: log p as a function of z, without gradients to be taken.
    :param center: a node near the bend, in z.
    :param step: distance within which it is.
    """
    dtype = center.dtype

    def change(before: jax.Array, middle: jax.Array, after: jax.Array) -> jax.Array:
        difference = jnp.abs(before - 2.0 * middle + after)
        return jnp.where(jnp.isfinite(difference), difference, 0.0)

    def halve(_: Any, state: Any) -> Any:
        center, step, three, last, width, least = state
        between = value(jnp.stack([center - 0.5 * step, center + 0.5 * step]))
        five = jnp.stack([three[0], between[0], three[1], between[1], three[2]])
        middle_first = column_of([1.0, 1.001, 1.0], center)
        changes = change(five[:-2], five[1:-1], five[2:]) * middle_first
        best = jnp.argmax(changes, axis=0)
        step, largest = 0.5 * step, jnp.max(changes, axis=0)
        three = jnp.where(best == 0, five[:3], jnp.where(best == 1, five[1:4], five[2:]))
        certain = largest > 64.0 * jnp.finfo(dtype).eps * jnp.max(jnp.abs(three), axis=0)
        # It is as much of a bend as before: it is no wider than this.
        width = jnp.where(certain & (largest / step > 0.7 * last), step, width)
        return center + (best - 1) * step, step, three, largest / step, width, jnp.where(certain, step, least)

    three = value(jnp.stack([center - step, center, center + step]))
    state = center, step, three, change(*three) / step, step, step
    center, _, _, _, width, least = lax.fori_loop(0, BEND_HALVINGS[dtype.name], halve, state)
    return center, jnp.where(width > 2.0 * least, 0.5 * width, 1.0)


def beside_bend(
    log_prob: Callable[[jax.Array], jax.Array],
    fixed: Callable[[jax.Array], jax.Array],
    mean: jax.Array,
    sd: jax.Array,
    f: jax.Array,
    values: jax.Array,
    limit: jax.Array,
    num_nodes: int,
) -> jax.Array:
    """
    ``E[log p(y | f)]`` by the trapezoid rule, but for nodes near a bend of log p, in whose place there are closer ones.

    The bend is looked for without derivatives. Kronrod's nodes, in arsinh of the distance in units of its width, are on
    both its sides, :data:`PANEL` of the rule's nodes each way; beyond them log p is as smooth as the rule supposes, but
    ends. Where Gauss-Legendre's among them do not do, log p jumps, or there are other bends or none, the rule is that
    of :func:`expectation_by_panels`.

    :param log_prob: log p(y | f) as a function of f.
    :param fixed: the same, without gradients to be taken.
    :param mean: mean of f, in the shape of the result.
    :param sd: its standard deviation, likewise.
    :param f: nodes of :func:`normal_rule`, on a leading axis.
    :param values: log p there.
    :param limit: nats that may be left; infinite where the rule itself does.
    :param num_nodes: number of the rule's nodes.
    """
    dtype, m, s = mean.dtype, *lax.stop_gradient((mean, sd))
    panel, column = PANEL[dtype.name], functools.partial(column_of, like=mean)
    (at,), all_weights, _ = _sorted_nodes(num_nodes, 1, dtype.name)
    z, beyond = _beyond(num_nodes, dtype.name)
    order, rough = np.argsort(at), jnp.isfinite(limit)
    moved = lax.stop_gradient(f) == m
    log_p = jnp.where(moved, jnp.nan, lax.stop_gradient(values))[order]
    bend, several = find_bend(log_p, limit, num_nodes)

    used = jnp.abs(column(np.arange(len(z))) - bend) <= panel + STENCIL[dtype.name]
    looked = rough & ~jnp.any(moved[order] & used, axis=0)
    weights = jnp.where(looked, jnp.asarray(beyond[:, order.argsort()].T, dtype)[:, bend], column(all_weights))

    steps = np.diff(z)
    start, step = (jnp.asarray(array, dtype)[bend] for array in (z, np.maximum(steps, np.roll(steps, 1))))
    center, width = refine_bend(lambda z: fixed(m + s * z), start, step)
    left, right = (jnp.asarray(z, dtype)[bend + to] for to in (-panel, panel))
    center = jnp.clip(center, left, right)
    *side, gauss = _kronrod(num_nodes * (5 if dtype == jnp.float64 else 2) // 16)
    ends = jnp.stack([center - left, right - center])
    nodes, log_weights = on_sides(center, column([-1.0, 1.0]), width, ends, side)
    density = jnp.where(looked, jnp.exp(log_weights - 0.5 * (nodes**2 + LOG_2PI)), 0.0)
    nodes, density = lax.stop_gradient((jnp.where(looked, nodes, 0.0), density))
    # Computed anew for gradients: else a branch that is not taken writes zeros for all that they need of this one.
    terms = jax.checkpoint(log_prob)(mean + sd * nodes)
    rule = jnp.sum(weights * values, axis=0) + jnp.sum(density * terms, axis=0)

    # Another bend between these nodes shows in slopes: log p's has jumps there.
    at, fewer = m + s * nodes, column(np.repeat(gauss / side[1], 2))
    slopes = density * jnp.nan_to_num(jax.jvp(fixed, (at,), (jnp.ones_like(at),))[1])
    change, slope = jnp.abs(jnp.sum(fewer * slopes, axis=0)), jnp.sum(jnp.abs(slopes), axis=0)
    # A jump is as large between the nearest nodes as beyond.
    under, over = lax.stop_gradient((terms[:4:2], terms[1:4:2]))
    near, far = jnp.abs(over[0] - under[0]), jnp.maximum(jnp.abs(over[1] - over[0]), jnp.abs(under[1] - under[0]))
    jumps = (near > 0.5 * far) & (near > limit)
    several = several | jumps | (change > UNLIKE_SLOPE[dtype.name] * jnp.maximum(1.0, slope))
    several = several & rough & ~jnp.any(moved, axis=0)

    def by_panels() -> jax.Array:
        most = jnp.where(several, limit, jnp.inf)
        return jnp.where(several, expectation_by_panels(log_prob, fixed, mean, sd, most), rule)

    return if_any(several, by_panels, lambda: rule)


def expectation_by_panels(
    log_prob: Callable[[jax.Array], jax.Array],
    fixed: Callable[[jax.Array], jax.Array],
    mean: jax.Array,
    sd: jax.Array,
    limit: jax.Array,
) -> jax.Array:
    """
    ``E[log p(y | f)]`` of any log p, which may have several bends or jumps, or turn up and down.

    By Gauss-Legendre's rule on panels in t, ``f = mean + sd sinh t``. Row by row the panel that changes most with half
    of its nodes is cut in two, at its sharpest bend or jump if it has one, until the changes add up to less than the
    limit, but :data:`PANELS` times at most. Gradients are of the weights (:func:`at_fixed_nodes`): slopes of log p,
    which jump at bends, are integrated for parameters of its own alone.

    :param log_prob: log p(y | f) as a function of f.
    :param fixed: the same, without gradients to be taken.
    :param mean: mean of f, in the shape of the result.
    :param sd: its standard deviation, likewise.
    :param limit: nats that may be left; infinite for rows of which nothing is wanted.
    """
    dtype, m, s = mean.dtype, *lax.stop_gradient((mean, sd))
    column, (panels, cuts) = functools.partial(column_of, like=mean), PANELS[dtype.name]

    unit, weights = map(column, _legendre(PANEL_NODES))
    nodes, fewer = _every_second(PANEL_NODES, EDGE[dtype.name])
    points, even, odd = map(column, (nodes, *fewer))
    slots = column(np.arange(panels + cuts))
    center = jnp.nan_to_num(fixed(m), neginf=0.0, posinf=0.0)

    def value(t: jax.Array) -> jax.Array:
        return fixed(m + s * jnp.sinh(t))

    def unused(z: jax.Array, weight: jax.Array, log_p: jax.Array) -> jax.Array:
        """Where it does not matter what log p is."""
        return jnp.isinf(limit) | (~jnp.isfinite(log_p) & (weight * jnp.exp(-0.5 * z**2) < jnp.finfo(dtype).eps))

    def change(panel: tuple[jax.Array, jax.Array]) -> jax.Array:
        t = panel[0] + panel[1] * points
        z, weight, log_p = jnp.sinh(t), panel[1] * jnp.cosh(t), value(t)
        terms = weight * jnp.exp(-0.5 * (z**2 + LOG_2PI)) * (log_p - center)
        terms = jnp.where(unused(z, weight, log_p), 0.0, terms)
        return jnp.maximum(jnp.abs(jnp.sum(even * terms, axis=0)), jnp.abs(jnp.sum(odd * terms, axis=0)))

    def cut(state: Any) -> Any:
        i, left, width, changes = state
        worst = jnp.argmax(changes, axis=0)
        begin, length = (jnp.take_along_axis(x, worst[None], axis=0)[0] for x in (left, width))
        bend, sharp = refine_bend(value, begin + 0.5 * length, 0.5 * length)
        share = (bend - begin) / length
        share = jnp.where((sharp == 1.0) & (share > 0.02) & (share < 0.98), share, 0.5)
        own, new, first = slots == worst, slots == panels + i, share * length
        two = jnp.stack([begin, begin + first]), jnp.stack([first, length - first])
        left, width = jnp.where(new, two[0][1], left), jnp.where(own, two[1][0], jnp.where(new, two[1][1], width))
        both = jax.vmap(change)(two)
        return i + 1, left, width, jnp.where(own, both[0], jnp.where(new, both[1], changes))

    def rough(state: Any) -> jax.Array:
        i, _, _, changes = state
        return (i < cuts) & jnp.any(jnp.sum(changes, axis=0) > limit)

    end = math.asinh(MOST_REACH[dtype.name])
    left, width = (jnp.full((panels + cuts, *m.shape), x, dtype) for x in (-end, 2.0 * end / panels))
    left, width = left + slots * width, jnp.where(slots < panels, width, 0.0)
    changes = lax.map(change, (left[:panels], width[:panels]))
    changes = jnp.concatenate([changes, jnp.zeros_like(left[panels:])])
    _, left, width, _ = lax.while_loop(rough, cut, (0, left, width, changes))

    def term(panel: tuple[jax.Array, jax.Array]) -> jax.Array:
        t = panel[0] + panel[1] * unit
        z, weight = jnp.sinh(t), panel[1] * weights * jnp.cosh(t)
        none = unused(z, weight, value(t))
        z, weight = lax.stop_gradient((jnp.where(none, 0.0, z), jnp.where(none, 0.0, weight)))
        f, log_normal = at_fixed_nodes(mean, sd, z, jnp.finfo(dtype).eps)
        return jnp.sum(weight * jnp.exp(log_normal) * (log_prob(f) - center), axis=0)

    def there(panel: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.cond(jnp.any(panel[1] > 0.0), jax.checkpoint(term), lambda _: jnp.zeros_like(mean), panel)

    return center + jnp.sum(lax.map(there, (left, width)), axis=0)


def expectations(
    log_prob: Callable[[jax.Array], jax.Array], mean: jax.Array, variance: jax.Array, more: jax.Array, num_nodes: int
) -> Callable[[jax.Array], jax.Array]:
    """
    ``E[log p(y | f)]`` as a function of the variance of f, from one set of values of log p, without other gradients.

    By the trapezoid rule in t, ``f = mean ± sd sinh t`` with the least standard deviation; for variances between
    ``variance`` and ``variance + more``, of which the least counts as a millionth of the largest at least.

    :param log_prob: log p(y | f) as a function of f.
    :param mean: mean of f, in the shape of the result.
    :param variance: the least variance, likewise.
    :param more: how much more it may be, likewise.
    :param num_nodes: number of nodes.
    """
    largest = deviation(variance + more)
    scale = jnp.maximum(deviation(variance), 1e-3 * largest)
    half = max(num_nodes // 2, 1)
    step = jnp.arcsinh(MOST_REACH[scale.dtype.name] * largest / scale) / half
    t = step * column_of(0.5 + jnp.arange(half, dtype=mean.dtype), mean)
    z = scale * jnp.sinh(t)
    far = jnp.square(z / largest) > -2.0 * math.log(float(jnp.finfo(mean.dtype).eps))

    def side(sign: Any) -> jax.Array:
        values = log_prob(mean + sign * z)
        return jnp.where(far & ~jnp.isfinite(values), 0.0, values)

    if is_traced(mean):
        # A loop, whose results XLA does not compute anew for each of their uses.
        both = jnp.sum(lax.map(side, jnp.asarray([1.0, -1.0], mean.dtype)), axis=0)
    else:
        both = side(1.0) + side(-1.0)
    # Relative to the value at the mean, so that the sum of weights need not be taken: it is 1 but for what is left out.
    center = jnp.where(jnp.isfinite(both[0]), 0.5 * both[0], 0.0)
    factors = step * scale * jnp.cosh(t) * (both - 2.0 * center) / math.sqrt(2.0 * math.pi)
    factors, exponents, center = lax.stop_gradient((factors, -0.5 * z**2, center))

    def expected(v: jax.Array) -> jax.Array:
        least = lax.stop_gradient(jnp.square(scale))
        inverse = 1.0 / (v + lax.stop_gradient(jnp.maximum(least - v, 0.0)))
        return center + _weighted(inverse, factors, exponents)

    return expected


@jax.custom_jvp
def _weighted(inverse: jax.Array, factors: jax.Array, exponents: jax.Array) -> jax.Array:
    """``√inverse Σ_k factors_k exp(exponents_k inverse)``, with its derivative in the first argument alone."""
    return jnp.sqrt(inverse) * jnp.sum(factors * jnp.exp(exponents * inverse), axis=0)


@_weighted.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # One sum: XLA on a CPU takes ten times as long over two of the same terms.
    inverse, factors, exponents = primals
    slopes = jnp.sum(factors * jnp.exp(exponents * inverse) * (0.5 + exponents * inverse), axis=0)
    return _weighted(*primals), slopes * lax.rsqrt(inverse) * tangents[0]


def _is_used(function: Callable[[jax.Array], jax.Array], f: jax.Array, weights: jax.Array) -> jax.Array:
    """Where function and its slope are finite, or what is so far out that it is not would have counted."""
    at = lax.stop_gradient(f)
    value, slope = lax.stop_gradient(jax.jvp(function, (at,), (jnp.ones_like(at),)))
    finite = jnp.isfinite(value) & jnp.isfinite(slope)
    return finite | (jnp.max(jnp.where(finite, weights * jnp.abs(value), 0.0), axis=0) > FELT)


def normal_moments(
    conditional: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    mean: ArrayLike,
    variance: ArrayLike,
    num_nodes: int,
    num_latents: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of y, from ``conditional(f)``: those given f."""
    f, weights = normal_rule(lambda f: conditional(f)[0], mean, variance, num_nodes, num_latents)
    means, variances = conditional(f)
    average = linalg.weighted_sum(weights, means)
    return average, linalg.weighted_sum(weights, variances + (means - average) ** 2)


def trapezoid(lower: jax.Array, upper: jax.Array, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """Equidistant nodes on a new leading axis, and their distance; for integrands that vanish at the ends."""
    lower, upper = lax.stop_gradient(jnp.broadcast_arrays(lower, upper))
    nodes = lower + (upper - lower) * column_of(jnp.linspace(0.0, 1.0, num_nodes, dtype=lower.dtype), lower)
    return nodes, (upper - lower) / (num_nodes - 1)


# ---------------------------------------------------------------------------------------------------------------
# Averages of a likelihood.


def log_average(
    log_prob: Callable[[jax.Array], jax.Array],
    fixed: Callable[[jax.Array], jax.Array],
    mean: jax.Array,
    variance: jax.Array,
    num_nodes: int,
    num_latents: int,
    concave: bool,
    finer: Callable[[], jax.Array] | None = None,
) -> jax.Array:
    """
    ``log ∫ p(y | f) N(f; mean, variance) df``.

    Derivatives are right of any order where log p has kinks or jumps (:func:`at_fixed_nodes`).

    :param log_prob: log p(y | f) as a function of f.
    :param fixed: the same, without gradients to be taken.
    :param mean: mean of f, in the shape of the result, behind an axis for the latent values if these are several.
    :param variance: its variance, likewise.
    :param num_nodes: number of nodes of each latent value.
    :param num_latents: number C of latent values.
    :param concave: whether log p is.
    :param finer: for several latent values, the same for rows in which half of the nodes of one of them do not do.
    """
    sd = deviation(variance)
    m, s = lax.stop_gradient((mean, sd))
    if num_latents == 1:
        z, log_weights = rule_at_peaks(fixed, m, s, num_nodes, concave)
    else:
        z, log_weights = rule_in_box(fixed, m, s, num_nodes)
        mean, sd = mean[:, None], sd[:, None]  # nodes stand behind the latent values
    f, log_normal = at_fixed_nodes(mean, sd, z, jnp.sqrt(jnp.finfo(sd.dtype).eps))
    terms = log_weights + (log_normal if num_latents == 1 else jnp.sum(log_normal, axis=0))
    if concave and num_latents == 1:
        return logsumexp(terms + log_prob(f), axis=0)
    # The gradient in the likelihood's parameters of what is left out would be 0 times no number.
    possible = jnp.isfinite(fixed(lax.stop_gradient(f)))
    nearby = jnp.take_along_axis(
        f, jnp.argmax(possible, axis=0, keepdims=True)[(None,) * (num_latents > 1)], axis=-possible.ndim
    )
    values = jnp.where(possible, terms + log_prob(jnp.where(possible, f, nearby)), -jnp.inf)
    average = logsumexp(values, axis=0)
    if finer is None or num_latents == 1:
        return average
    axes = tuple(range(num_latents))
    grid = lax.stop_gradient(values).reshape(*box_counts(num_latents, num_nodes), *average.shape)
    # Thirds where nodes are many enough, of two latent values: a kink may be where halving changes nothing.
    shares = [*((axis, 2) for axis in axes), (0, 3)][:3]
    parts = [(slice(None),) * axis + (slice(None, None, every),) for axis, every in shares]
    fewer = [logsumexp(grid[part], axis=axes) + math.log(part[-1].step) for part in parts]
    rough = jnp.max(jnp.abs(jnp.stack(fewer) - average), axis=0) > UNLIKE[num_latents]
    return if_any(rough, lambda: jnp.where(rough, finer(), average), lambda: average)


def at_fixed_nodes(mean: jax.Array, sd: jax.Array, z: jax.Array, least: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """
    ``f = mean + sd z``, which stays where it is as mean and sd change, and its log normal density, which changes.

    So derivatives of an integral are right of any order where log p has kinks or jumps.

    :param least: variance below which it would be divided by too small a number; there the nodes move along.
    """
    along = jnp.square(lax.stop_gradient(sd)) < least
    to_mean, to_sd = (jnp.where(along, x, lax.stop_gradient(x)) for x in (mean, sd))
    f, z = to_mean + to_sd * z, ((to_mean - mean) + to_sd * z) / sd
    return f, jnp.log(to_sd / sd) - 0.5 * (z**2 + LOG_2PI)


def box_counts(num_latents: int, num_nodes: int) -> tuple[int, ...]:
    """How many nodes of each of several latent values :func:`rule_in_box` has."""
    return FIRST[num_latents] * num_nodes, *[2 * num_nodes] * (num_latents - 1)


def rule_in_box(
    log_prob: Callable[[jax.Array], jax.Array], mean: jax.Array, sd: jax.Array, num_nodes: int
) -> tuple[jax.Array, jax.Array]:
    """
    Nodes in ``z = (f − mean)/sd``, (C, K, ...), and the logarithms of their weights, (K, ...), for C latent values.

    All combinations of the trapezoid rule's in arsinh z, in the box in which the integrand is not negligible. It is
    looked for on grids, each in the box that the last has found.

    :param log_prob: log p(y | f) as a function of f (C, ...), without gradients to be taken.
    :param mean: mean of f, (C, ...).
    :param sd: its standard deviation, likewise.
    :param num_nodes: nodes of each latent value: twice as many, and of the first :data:`FIRST` times as many.
    """
    C, rows, dtype = mean.shape[0], mean.shape[1:], mean.dtype
    negligible = 40.0 if dtype == jnp.float64 else 25.0

    def grid(box: Any, counts: Any) -> tuple[jax.Array, jax.Array]:
        """All combinations of so many of each, (C, K, ...); and their distances, (C, ...)."""
        each = [trapezoid(low, high, count) for low, high, count in zip(*box, counts, strict=True)]
        chosen = np.indices(counts).reshape(C, -1)
        nodes = jnp.stack([nodes[index] for (nodes, _), index in zip(each, chosen, strict=True)])
        return nodes, jnp.stack([step for _, step in each])

    def look(_: Any, box: Any) -> Any:
        u, step = grid(box, (BOX_NODES[C],) * C)
        z = jnp.sinh(u)
        values = log_prob(mean[:, None] + sd[:, None] * z) - 0.5 * jnp.sum(z**2, axis=0)
        values = jnp.where(values < jnp.inf, values, -jnp.inf)
        inside = values >= jnp.max(values, axis=0) - negligible
        low = jnp.min(jnp.where(inside, u, jnp.inf), axis=1) - step
        high = jnp.max(jnp.where(inside, u, -jnp.inf), axis=1) + step
        return jnp.maximum(low, box[0]), jnp.minimum(high, box[1])

    end = jnp.full((C, *rows), BOX_END, dtype)
    u, step = grid(lax.fori_loop(0, BOX_ROUNDS, look, (-end, end)), box_counts(C, num_nodes))
    log_weights = jnp.sum(jnp.log(step)[:, None] + jnp.log(jnp.cosh(u)), axis=0)
    return lax.stop_gradient((jnp.sinh(u), log_weights))


def rule_at_peaks(
    log_prob: Callable[[jax.Array], jax.Array], mean: jax.Array, sd: jax.Array, num_nodes: int, concave: bool
) -> tuple[jax.Array, jax.Array]:
    """
    Nodes in ``z = (f − mean)/sd``, on a new leading axis, and the logarithms of their weights of ``∫ dz``.

    The integrand's logarithm g is looked at on a grid, whose local maxima are refined by golden section, without
    derivatives: these may be wrong where NumPyro clips, or no numbers. Each side of a peak has nodes of its own,
    as far as g is not negligible there, or half way to the next peak. What has only one peak has a second set of sides
    at the peak of p itself, where that may have a kink. A log-concave g has one peak, and two sides.

    :param log_prob: log p(y | f) as a function of f, without gradients to be taken.
    :param mean: mean of f, in the shape of the result.
    :param sd: its standard deviation, likewise.
    :param num_nodes: number of nodes; half as many more where not concave, and two to three times as many in float64.
    :param concave: whether log p is.
    """
    dtype, double = mean.dtype, mean.dtype == jnp.float64
    negligible = 45.0 if double else 25.0
    axes = (1,) * mean.ndim

    def value(z: jax.Array, prior: Any = 1.0) -> jax.Array:
        values = log_prob(mean + sd * z) - prior * 0.5 * z**2
        return jnp.where(values < jnp.inf, values, -jnp.inf)  # no number is not to be found either

    def at(array: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(array, index[None], axis=0)[0]

    # Far out there may be a peak too, such as that of 10⁴ counts, or of little noise and a prior of less variance.
    t = np.linspace(-1.0, 1.0, (GRID_NODES_CONCAVE if concave else GRID_NODES) + 1)
    grid = jnp.broadcast_to(column_of(np.sinh(6.0 * t + 13.0 * t**3), mean), (len(t), *mean.shape))
    log_p = value(grid, 0.0)
    on_grid = log_p - 0.5 * grid**2
    inner = on_grid[1:-1]
    peaks = jnp.where((inner >= on_grid[:-2]) & (inner > on_grid[2:]), inner, -jnp.inf)
    best = jnp.argmax(jnp.where(jnp.any(peaks > -jnp.inf, axis=0), peaks, inner), axis=0)
    starts, priors = [best + 1], [1.0]
    if not concave:
        others = jnp.where(jnp.arange(len(t) - 2).reshape((-1,) + axes) == best, -jnp.inf, peaks)
        starts += [jnp.argmax(others, axis=0) + 1, jnp.argmax(log_p[1:-1], axis=0) + 1]
        priors += [1.0, 0.0]
    start, prior = jnp.stack(starts), column_of(priors, mean)

    low, middle, high = (jnp.take_along_axis(grid, start + i, axis=0) for i in (-1, 0, 1))
    most = jnp.take_along_axis(log_p, start, axis=0) - prior * 0.5 * middle**2
    found, heights = golden_section(lambda z: value(z, prior), low, middle, high, most)
    if concave:
        centers, top, signs = jnp.stack([found[0]] * 2), heights[0], [-1.0, 1.0]
        lengths = jnp.full_like(centers, REACH + 2.0)
    else:
        top, higher = jnp.maximum(heights[0], heights[1]), heights[1] > heights[0]
        first, second = jnp.where(higher, found[1], found[0]), jnp.where(higher, found[0], found[1])
        several = jnp.any(others > -jnp.inf, axis=0) & (jnp.minimum(heights[0], heights[1]) > top - negligible)
        least, most = jnp.minimum(first, 0.0) - REACH - 2.0, jnp.maximum(first, 0.0) + REACH + 2.0
        # The peak of p, where it is another and is felt; else the shoulder, where g bends most on the grid.
        own, index = start[2], jnp.where(higher, start[1], start[0])
        beside = column_of([-1e-3, -5e-4, 0.0, 5e-4, 1e-3], mean)
        five = value(found[2] + beside, 0.0)
        wide, close = jnp.abs(five[0] - 2.0 * five[2] + five[4]), jnp.abs(five[1] - 2.0 * five[2] + five[3])
        sharp = (close > 0.35 * wide) & (wide > 64.0 * jnp.finfo(dtype).eps * jnp.abs(five[2])) | ~jnp.isfinite(wide)
        apart = (jnp.abs(own - index) > 1) | sharp & (jnp.abs(found[2] - first) > 1e-4)
        kink = apart & (value(found[2]) > top - negligible)
        away = jnp.abs(jnp.arange(1, len(t) - 1).reshape((-1,) + axes) - index) > 1
        bend = jnp.where(away & (inner > top - 10.0), 2.0 * inner - on_grid[:-2] - on_grid[2:], -jnp.inf)
        shoulder = at(grid, jnp.argmax(bend, axis=0) + 1)
        other = jnp.where(~kink & jnp.any(bend > -jnp.inf, axis=0), shoulder, found[2])
        second = jnp.where(several, second, jnp.clip(other, least, most))
        left, right = jnp.minimum(first, second), jnp.maximum(first, second)
        half = 0.5 * (right - left)
        centers, signs = jnp.stack([left, left, right, right]), [-1.0, 1.0, -1.0, 1.0]
        ends = jnp.minimum(least, left - REACH), jnp.maximum(most, right + REACH)
        lengths = jnp.stack([left - ends[0], half, half, ends[1] - right])
    sign = column_of(signs, mean)
    lengths = jnp.maximum(lengths, jnp.finfo(dtype).tiny ** 0.5)

    # How g falls with the distance from a peak: its width is where it has changed by half a nat.
    shares = jnp.asarray(np.geomspace(LEAST_DISTANCE, 1.0, PROFILE_NODES), dtype).reshape((-1, 1) + axes)
    there = value(centers + sign * shares * lengths)
    fall = jnp.maximum(value(centers), top - negligible) - there  # a shoulder may be beside a jump to −∞
    changed = jnp.abs(fall) >= 0.5
    index = jnp.where(jnp.any(changed, axis=0), jnp.argmax(changed, axis=0), PROFILE_NODES - 1)
    by = jnp.clip(jnp.abs(at(fall, index)), 0.5, negligible)
    width = lengths * shares.reshape(-1)[index] * jnp.sqrt(0.5 / by)
    felt = there > top - negligible
    last = jnp.where(jnp.any(felt, axis=0), PROFILE_NODES - 1 - jnp.argmax(felt[::-1], axis=0), 0)
    end = lengths * shares.reshape(-1)[jnp.minimum(last + 1, PROFILE_NODES - 1)]

    count = num_nodes * ((14 if double else 8) if concave else (16 if double else 6)) // 16
    z, log_weights = on_sides(centers, sign, width, end, _legendre(max(count, 1)))
    if not concave:  # where there are more peaks than two: equidistant ones
        many = jnp.sum(peaks > top - 10.0, axis=0) > 2
        wide = inner > top - (34.0 if double else 16.0)
        lower = at(grid, jnp.argmax(wide, axis=0))
        upper = at(grid, len(t) - 1 - jnp.argmax(wide[::-1], axis=0))
        equidistant, step = trapezoid(lower, upper, len(z))
        z, log_weights = jnp.where(many, equidistant, z), jnp.where(many, jnp.log(step), log_weights)
    return lax.stop_gradient((z, log_weights))


def golden_section(
    value: Callable[[jax.Array], jax.Array], low: jax.Array, middle: jax.Array, high: jax.Array, most: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The maximum between low and high, and the value there, from a larger value ``most`` at a point between them."""

    def shorten(_: Any, state: Any) -> Any:
        low, high, best, most = state
        left = best - low > high - best
        new = jnp.where(left, best - GOLDEN * (best - low), best + GOLDEN * (high - best))
        there = value(new)
        better = there > most
        best, end = jnp.where(better, new, best), jnp.where(better, best, new)
        return jnp.where(end < best, end, low), jnp.where(end < best, high, end), best, jnp.maximum(there, most)

    steps = 42 if low.dtype == jnp.float64 else 30
    return lax.fori_loop(0, steps, shorten, (low, high, middle, most))[2:]


def on_sides(
    centers: jax.Array, signs: jax.Array, width: ArrayLike, ends: jax.Array, rule: Sequence[np.ndarray]
) -> tuple[jax.Array, jax.Array]:
    """
    Nodes in arsinh of the distance from centers, on a leading axis, and logarithms of their weights.

    :param centers: (S, ...), or the same for all sides.
    :param signs: 1 for what is above a center, and −1 below, (S, ...).
    :param width: distance within which nodes are equidistant, likewise.
    :param ends: distance that the nodes reach, likewise.
    :param rule: nodes on [0, 1] and weights, of each side.
    """
    u, weights = (column_of(array, ends) for array in rule)
    reach = jnp.arcsinh(ends / width)
    z = centers + signs * width * jnp.sinh(reach * u)
    log_weights = jnp.log(width * reach * jnp.cosh(reach * u) * weights)
    return z.reshape((-1, *ends.shape[1:])), log_weights.reshape((-1, *ends.shape[1:]))


@functools.lru_cache(maxsize=32)
def _legendre(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes and weights on [0, 1], in float64."""
    nodes, weights = leggauss(num_nodes)
    return 0.5 * (nodes + 1.0), 0.5 * weights


@functools.lru_cache(maxsize=32)
def _kronrod(num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Kronrod's 2n + 1 nodes on [0, 1] and weights, and those of the n Gauss-Legendre nodes among them less these.

    The n + 1 others are the roots of the polynomial whose product with Legendre's of degree n is orthogonal to all of
    degree n. In float64.
    """
    at, weights = leggauss(2 * num_nodes + 2)
    powers = legvander(at, num_nodes + 1)
    products = powers[:, :-1].T @ ((weights * powers[:, -2])[:, None] * powers)
    others = legroots(np.append(np.linalg.lstsq(products[:, :-1], -products[:, -1], rcond=None)[0], 1.0))
    nodes, gauss = leggauss(num_nodes)
    nodes = np.sort(np.concatenate([nodes, others]))
    weights = np.linalg.solve(legvander(nodes, 2 * num_nodes).T, 2.0 * np.eye(2 * num_nodes + 1)[0])
    fewer = -weights
    fewer[1::2] += gauss
    return 0.5 * (nodes + 1.0), 0.5 * weights, 0.5 * fewer


@functools.lru_cache(maxsize=32)
def _every_second(num_nodes: int, edge: float) -> tuple[np.ndarray, np.ndarray]:
    """
    Gauss-Legendre nodes on [0, 1], and weights of the rules with every second of them less the rule's, (2, K).

    With nodes of weight 0 at so small a distance from the ends, of which each rule has one: what is between an end and
    the first node would not be seen. In float64.
    """
    nodes, weights = _legendre(num_nodes)
    nodes, weights = np.concatenate([[edge], nodes, [1.0 - edge]]), np.pad(weights, 1)
    fewer = np.stack([-weights, -weights])
    for first, row in enumerate(fewer):
        some = slice(first, None, 2)
        powers = legvander(2.0 * nodes[some] - 1.0, len(nodes[some]) - 1).T
        row[some] += np.linalg.solve(powers, np.eye(len(powers))[0])
    return nodes, fewer
