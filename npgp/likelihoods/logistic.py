"""
Normal averages of the softplus function, which is what the log-likelihoods with logistic functions are made of.

A logistic variable is 2 K Z, with Z standard normal and K of Kolmogorov's distribution (Andrews & Mallows 1974;
Stefanski 1991). So the logistic function is an average of normal distribution functions, ``σ(x) = E Φ(x / 2K)``, and
its integral one of theirs, for which averages over a normal f are known. Gauss's rule in log K needs few nodes,
whatever the variance of f is, where Gauss-Hermite needs more of them the wider f is (Monahan & Stefanski 1992 have
such mixtures, fitted). As the weights are positive, what stands for softplus is convex, as softplus is.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from npgp import linalg
from npgp.likelihoods.numerics import SQRT_HALF, deviation, floats
from npgp.likelihoods.quadrature import hermite
from npgp.programs.backend import maximum

#: Most nodes by dtype. Softplus, its slope and its curvature are off by at most 3e-9, 7e-9 and 2e-8 with the first, and
#: by 6e-14, 1e-13 and 4e-13 with the second; with 6, by 8e-7, 1e-6 and 3e-6. Less where f has a variance.
NODES = {"float32": 10, "float64": 20}
#: So many nodes of Gauss-Hermite are worth one here.
WORTH = 3
#: Standard deviation of f from which on the mixture is better than 16 nodes of Gauss-Hermite, by dtype.
SEAM = {"float32": 1.5, "float64": 0.5}
#: Where mean + 2 variance is below this, two terms of softplus' series in eᶠ are exact to rounding, by dtype.
LOW = {"float32": -8.0, "float64": -18.0}
#: Where log K is, but for less than 1e-16 of it, and points of the sum that Gauss's rule is made from.
SUPPORT, POINTS = (np.log(0.15), np.log(4.6)), 401


def expected_softplus(mean: jax.Array, variance: jax.Array, num_nodes: int) -> jax.Array:
    """
    E[log(1 + eᶠ)] when f ~ N(mean, variance), elementwise.

    Its second derivative in the mean is twice its first in the variance, exactly.

    :param num_nodes: a likelihood's; a third of it is the number of nodes here, up to what the dtype can tell.
    """
    mean, variance = jnp.broadcast_arrays(*floats(mean, variance))
    return _averages(_number(mean, num_nodes), mean, variance)[0]


def _number(mean: jax.Array, num_nodes: int) -> int:
    return max(1, min(num_nodes // WORTH, NODES.get(mean.dtype.name, NODES["float64"])))


def logistic_moments(mean: jax.Array, variance: jax.Array, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """E[σ(f)] and E[σ(f) σ(−f)]; the variance of σ(f) is p − p² less the second. Arguments as above."""
    mean, variance = jnp.broadcast_arrays(*floats(mean, variance))
    return _averages(_number(mean, num_nodes), mean, variance)[1:]


def softplus_gap(mean: jax.Array, variance: jax.Array, num_nodes: int) -> jax.Array:
    """
    ``E[log(1 + eᶠ)] − log(1 + e^mean)``, accurate relative to itself where f is narrow: large counts multiply it.

    There it is a sum over pairs of Gauss-Hermite nodes, mean ± h: ``½ log(1 + 4 σ(mean) σ(−mean) sinh²(h/2))``. Where f
    is wide but far below 0 it is that of ``eᶠ − ½ e²ᶠ``, which is below by at most ``⅓ e³ᶠ``; elsewhere the mixture's.

    :param num_nodes: a likelihood's; a quarter of it is the number of Gauss-Hermite nodes.
    """
    mean, variance = jnp.broadcast_arrays(*floats(mean, variance))
    sd = deviation(variance)
    seam = SEAM.get(mean.dtype.name, SEAM["float64"])
    narrow = sd < seam
    z, weights = hermite(max(2, min(num_nodes // 4, 16)) // 2 * 2)
    z, weights = (a[len(a) // 2 :].reshape((-1,) + (1,) * mean.ndim) for a in (z, weights))
    steepness = 4 * jax.nn.sigmoid(mean) * jax.nn.sigmoid(-mean)
    h = 0.5 * jnp.where(narrow, sd, seam) * jnp.asarray(z, mean.dtype)
    pairs = linalg.weighted_sum(jnp.asarray(weights, mean.dtype), jnp.log1p(steepness * jnp.square(jnp.sinh(h))))
    low = ~narrow & (mean + 2 * variance < LOW.get(mean.dtype.name, LOW["float64"]))
    m, v = jnp.where(low, mean, -20.0), jnp.where(low, variance, 1.0)
    series = jnp.exp(m + 0.5 * v) - jnp.exp(m) - 0.5 * (jnp.exp(2 * (m + v)) - jnp.exp(2 * m))
    m, v = jnp.where(low, 0.0, mean), jnp.where(narrow | low, 1.0, variance)
    wide = jnp.where(low, series, expected_softplus(m, v, num_nodes) - jax.nn.softplus(m))
    return jnp.where(narrow, pairs, wide)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _averages(nodes: int, mean: jax.Array, variance: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """
    E[log(1 + eᶠ)], E[σ(f)] and E[σ(f) σ(−f)], each but the first the slope of the one before; to absolute errors.

    In one pass over the mixture: XLA would compute its densities and tails anew for each sum.
    """
    squares, weights = (jnp.asarray(array, mean.dtype) for array in kolmogorov_rule(nodes))

    def add(sums: Any, component: Any) -> Any:
        square, weight = component
        scale = jnp.sqrt(4.0 * square + variance)
        z = mean / scale
        density, tail = weight * _density(z), weight * _upper_tail(jnp.abs(z))
        return jax.tree.map(jnp.add, sums, (scale * density - jnp.abs(mean) * tail, tail, density / scale)), None

    (excess, tail, curvature), _ = lax.scan(add, (jnp.zeros_like(mean),) * 3, (squares, weights))
    # max(f, 0) beyond max(mean, 0)
    return maximum(mean, 0.0) + excess, jnp.where(mean > 0.0, 1.0 - tail, tail), curvature


def _curvature(nodes: int, mean: jax.Array, variance: jax.Array) -> jax.Array:
    scale, z, weights = _mixture(nodes, mean, variance)
    return linalg.weighted_sum(weights, _density(z) / scale)


def _slope_by_variance(nodes: int, mean: jax.Array, variance: jax.Array) -> jax.Array:
    scale, z, weights = _mixture(nodes, mean, variance)
    return -0.5 * linalg.weighted_sum(weights, _density(z) * z / jnp.square(scale))


@_averages.defjvp
def _(nodes: Any, primals: Any, tangents: Any) -> Any:
    averages = _averages(nodes, *primals)
    _, slope, curvature = averages
    _, bend = jax.jvp(functools.partial(_curvature, nodes), primals, tangents)
    by_mean, by_variance = tangents
    return averages, (
        slope * by_mean + 0.5 * curvature * by_variance,
        curvature * by_mean + _slope_by_variance(nodes, *primals) * by_variance,
        bend,
    )


def _mixture(nodes: int, mean: jax.Array, variance: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scale of each normal of the mixture, the mean in units of it, and the weights; on a new leading axis."""
    squares, weights = kolmogorov_rule(nodes)
    each = (-1,) + (1,) * mean.ndim
    scale = jnp.sqrt(jnp.asarray(4.0 * squares, mean.dtype).reshape(each) + variance)
    return scale, mean / scale, jnp.asarray(weights, mean.dtype).reshape(each)


def _density(z: jax.Array) -> jax.Array:
    return float(1.0 / np.sqrt(2.0 * np.pi)) * jnp.exp(-0.5 * jnp.square(z))


def _upper_tail(z: jax.Array) -> jax.Array:
    return 0.5 * lax.erfc(SQRT_HALF * z)


@functools.lru_cache(maxsize=32)
def kolmogorov_rule(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """
    K² at the nodes of Gauss's rule for averages over Kolmogorov's distribution, as functions of log K; and its weights.

    By Lanczos' algorithm from a trapezoid rule, which for a density so smooth is exact (Gautschi 2004, section 2.2).
    """
    log_k = np.linspace(*SUPPORT, POINTS)
    mass = _kolmogorov_density(np.exp(log_k)) * np.exp(log_k)
    basis = np.sqrt(mass / mass.sum())[None]
    diagonal, beside = np.zeros(num_nodes), np.zeros(num_nodes)
    for j in range(num_nodes):
        diagonal[j] = basis[j] @ (log_k * basis[j])
        left = (log_k - diagonal[j]) * basis[j]
        for _ in range(2):  # once more, for what rounding leaves
            left = left - basis.T @ (basis @ left)
        beside[j] = np.linalg.norm(left)
        basis = np.vstack([basis, left / beside[j]])
    beside = beside[:-1]
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return np.exp(2.0 * nodes), vectors[0] ** 2


def _kolmogorov_density(k: np.ndarray) -> np.ndarray:
    """The derivative of ``1 − 2 Σ (−1)^(n+1) exp(−2 n² k²)``, by the series that converges fast at k."""
    n = np.arange(1, 40)[:, None]
    large = 8.0 * k * np.sum((-1.0) ** (n + 1) * n**2 * np.exp(-2.0 * (n * k) ** 2), axis=0)
    odd = (np.pi * (2 * n - 1)) ** 2
    small = np.sqrt(2.0 * np.pi) * np.sum(np.exp(-odd / (8.0 * k**2)) * (odd / (4.0 * k**4) - 1.0 / k**2), axis=0)
    return np.where(k < 1.0, small, large)
