"""
Student-t noise: bounds of random problems against their evidence, and against the formulas that were there before.

Three rows with a covariance of rank two, so that the evidence is a sum over a plane, and that rows depend strongly on
each other, which is where a bound that treats them one by one could fail. Each bound is the best over a grid of q(ε),
of one inducing feature or none. Beside npgp's conditionals, for single rows and in closed form:

- one tangent: the Gaussian minorant with one tangent for all ε, which was ``tight`` up to version 0.1;
- each node: with a tangent and a precision for each ε, by quadrature.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

import npgp
from npgp.conditionals import as_conditional
from npgp.conditionals.base import row_elbo
from npgp.sparse.groups import consecutive, single
from npgp.sparse.residuals import GroupResidual

ROWS, RANK, CHUNK = 3, 2, 50
#: Points of the grids of the evidence and of q(ε); nodes over ε.
PLANE, MEANS, SCALES, NODES = 321, np.linspace(-2.5, 2.5, 11), (0.2, 0.5, 0.9), 401
NAMES = ("prior", "one tangent", "each node", "tight", "grouped", "one group", "full")


def problems(rng: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    """Roots (count, 3, 2), what a feature explains (count, 3), y (count, 3), degrees of freedom and scales (count,)."""
    roots = rng.normal(size=(count, ROWS, RANK)) * np.exp(rng.uniform(-3.0, 0.7, (count, 1, 1)))
    direction = rng.normal(size=(count, RANK))
    a = np.einsum("bnr,br->bn", roots, direction / np.linalg.norm(direction, axis=-1, keepdims=True))
    df = np.exp(rng.uniform(np.log(1.5), np.log(15.0), count))
    # Not so narrow that the evidence's grid would miss it.
    scale = np.exp(rng.uniform(np.log(0.1), 0.0, count))
    scale = np.maximum(scale, 0.15 * np.linalg.norm(roots, axis=-1).max(-1) / np.sqrt(df))
    f = np.einsum("bnr,br->bn", roots, rng.normal(size=(count, RANK)))
    return roots, a, f + scale[:, None] * rng.standard_t(df[:, None], f.shape), df, scale


def evidence(root, y, likelihood) -> jax.Array:
    """By the trapezoid rule over a plane."""
    z = jnp.linspace(-8.0, 8.0, PLANE)
    weight = -0.5 * z**2 - 0.5 * jnp.log(2.0 * jnp.pi) + jnp.log(z[1] - z[0])
    f = z[:, None, None] * root[:, 0] + z[None, :, None] * root[:, 1]
    return logsumexp(weight[:, None] + weight + jnp.sum(likelihood.log_prob(f, y), -1))


def one_tangent(likelihood, y, mean, variance, d) -> jax.Array:
    return _minorant(likelihood, y, jnp.square(y - mean) + variance, d)


def each_node(likelihood, y, mean, variance, d) -> jax.Array:
    z = jnp.linspace(-8.0, 8.0, NODES)
    weights = jnp.exp(-0.5 * z**2) / jnp.sum(jnp.exp(-0.5 * z**2))
    g = mean[..., None] + jnp.sqrt(variance)[..., None] * z
    return _minorant(likelihood, y[..., None], jnp.square(y[..., None] - g), d[..., None]) @ weights


def _minorant(likelihood, y, squared, d) -> jax.Array:
    """Certified by the tangent at ``squared + ĉ``, at the best precision λ, the root of λ (b + ĉ) = ν + 1."""
    n, b = likelihood.df + 1.0, likelihood.df * likelihood.scale**2 + squared
    p = b + d - n * d
    root = jnp.sqrt(p**2 + 4.0 * b * d * n)
    precision = jnp.where(p > 0.0, 2.0 * n / (p + root), (root - p) / (2.0 * b * jnp.where(d > 0.0, d, 1.0)))
    left = d / (1.0 + precision * d)
    spread = jnp.log1p((squared + left) / (likelihood.df * likelihood.scale**2))
    return likelihood.log_prob(y, y) - 0.5 * (n * spread - precision * left + jnp.log1p(precision * d))


@jax.jit
@partial(jax.vmap, in_axes=(0, 0, 0, 0, 0))
def bounds(root, a, y, df, scale) -> tuple[jax.Array, jax.Array]:
    """The log evidence, and the best bound by each of :data:`NAMES`."""
    likelihood = npgp.StudentT(df=df, scale=scale)
    m, s = (jnp.asarray(axis.ravel()) for axis in np.meshgrid(MEANS, SCALES))
    # All q(ε) side by side: those of a feature, and none.
    mean = jnp.concatenate([m[:, None] * a, jnp.zeros((1, ROWS))])
    variance = jnp.concatenate([s[:, None] ** 2 * a**2, jnp.zeros((1, ROWS))])
    kl = jnp.concatenate([0.5 * (s**2 + m**2 - 1.0 - jnp.log(s**2)), jnp.zeros(1)])
    whole_of, count = root @ root.T, len(m)
    D = jnp.concatenate([jnp.broadcast_to(whole_of - jnp.outer(a, a), (count, ROWS, ROWS)), whole_of[None]])
    d = jnp.maximum(jnp.diagonal(D, axis1=-2, axis2=-1), 0.0)
    y = jnp.broadcast_to(y, mean.shape)

    def rows(conditional, groups=None):
        residual = d
        if groups is not None:
            residual = GroupResidual(D[..., groups.rows[:, :, None], groups.rows[:, None, :]], groups)
        return row_elbo(as_conditional(conditional), likelihood, y, mean, variance, residual)

    found = {
        "prior": rows("prior"),
        "one tangent": one_tangent(likelihood, y, mean, variance, d),
        "each node": each_node(likelihood, y, mean, variance, d),
        "tight": rows("tight"),
        "grouped": rows("grouped", consecutive(ROWS, 2)),
        "one group": rows("grouped", single(ROWS)),
        "full": rows("full", single(ROWS)),
    }
    return evidence(root, y[0], likelihood), jnp.stack([jnp.sum(found[name], -1) - kl for name in NAMES])


def study(count: int, seed: int) -> dict[str, dict[str, float]]:
    """
    Figures of each of :data:`NAMES` over random problems: gaps to the log evidence at each problem's best q(ε), the
    least over all q(ε), the mean gain over ``prior``, and the most that a bound is below one with tangents, at any q.
    """
    rng = np.random.default_rng(seed)
    chunks = []
    with jax.enable_x64(True):
        for first in range(0, count, CHUNK):
            found = jax.tree.map(np.asarray, bounds(*problems(rng, CHUNK)))
            chunks.append([values[: count - first] for values in found])
    log, found = (np.concatenate(parts) for parts in zip(*chunks, strict=True))  # (problems,), (problems, names, q)
    best = dict(zip(NAMES, found.max(-1).T, strict=True))
    at_each_q = dict(zip(NAMES, np.moveaxis(found, 1, 0), strict=True))
    return {
        name: {
            "mean_gap": float(np.mean(log - best[name])),
            "least_gap": float(np.min(log[:, None] - at_each_q[name])),
            "gain_over_prior": float(np.mean(best[name] - best["prior"])),
            "below one tangent": float(np.max(at_each_q["one tangent"] - at_each_q[name])),
            "below each node": float(np.max(at_each_q["each node"] - at_each_q[name])),
        }
        for name in NAMES
    }
