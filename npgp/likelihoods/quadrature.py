"""
Rules for integrals over one latent value, f ~ N(mean, variance).

- Expectations by Gauss-Hermite. Its nodes are symmetric about the mean, so that the curvature of a log-concave
  likelihood comes out non-negative.
- Averages of a log-concave likelihood by the trapezoid rule around the mode of ``p(y | f) N(f; mean, variance)``,
  stretched so that a likelihood a thousand times narrower than the Gaussian costs no accuracy (Gauss-Hermite misses
  such a peak by many nats).

No gradient flows through the places of the nodes, on which an integral does not depend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from numpy.polynomial.hermite_e import hermegauss

from npgp import linalg
from npgp.likelihoods.numerics import LOG_2PI, deviation, floats

#: Default number of quadrature nodes. Measured errors are below 1e-4 nats up to a standard deviation of f of 4 for
#: links and counts, and at any for Student-t with df up to about 100.
NUM_NODES = 64
#: The same for each of several latent values.
NUM_NODES_EACH = 24
#: Standard deviations that a trapezoid rule covers each way: e^-24.5 is left out.
REACH = 7.0
#: NumPy's Gauss-Hermite weights overflow beyond so many nodes.
MAX_HERMITE = 300


@functools.lru_cache(maxsize=32)
def hermite(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a standard normal expectation, in float64."""
    nodes, weights = hermegauss(min(num_nodes, MAX_HERMITE))
    return nodes, weights / weights.sum()


def hermite_rule(
    function: Callable[[jax.Array], jax.Array],
    mean: ArrayLike,
    variance: ArrayLike,
    num_nodes: int,
    num_latents: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """
    Mean and deviation in the shape of ``function(f)``; Gauss-Hermite nodes and weights on a new leading axis.

    Leading, because parameters and data with one value per row broadcast on the other side. With C ≥ 2 latent values
    the nodes are all combinations, num_nodes^C of them, and stand behind the axis of the latent values.
    """
    mean, variance = floats(mean, variance)
    result = jax.eval_shape(lambda m, v: function(m + v), mean, variance)
    sd = deviation(variance)
    nodes, weights = hermite(num_nodes)
    lead: tuple[int, ...] = ()
    if num_latents > 1:
        chosen = np.indices((len(nodes),) * num_latents).reshape(num_latents, -1)  # (C, K^C)
        nodes, weights = nodes[chosen], weights[chosen].prod(0)
        lead = (num_latents,)
    # A weight that underflows, times a log-density that overflows, would be NaN.
    kept = weights > jnp.finfo(result.dtype).tiny
    after = (-1,) + (1,) * result.ndim
    z, w = nodes[..., kept].reshape(lead + after), weights[kept].reshape(after)
    mean, sd = (jnp.broadcast_to(array, lead + result.shape) for array in (mean, sd))
    if num_latents > 1:
        mean, sd = mean[:, None], sd[:, None]
    dtype = result.dtype
    return jnp.asarray(mean, dtype), jnp.asarray(sd, dtype), jnp.asarray(z, dtype), jnp.asarray(w, dtype)


def hermite_moments(
    conditional: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    mean: ArrayLike,
    variance: ArrayLike,
    num_nodes: int,
    num_latents: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of y, from ``conditional(f)``: those given f."""
    mean, sd, nodes, weights = hermite_rule(lambda f: conditional(f)[0], mean, variance, num_nodes, num_latents)
    means, variances = conditional(mean + sd * nodes)
    average = linalg.weighted_sum(weights, means)
    return average, linalg.weighted_sum(weights, variances + (means - average) ** 2)


def trapezoid(lower: jax.Array, upper: jax.Array, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """Equidistant nodes on a new leading axis, and their distance; for integrands that vanish at the ends."""
    lower, upper = lax.stop_gradient(jnp.broadcast_arrays(lower, upper))
    fractions = jnp.linspace(0.0, 1.0, num_nodes, dtype=lower.dtype)
    nodes = lower + (upper - lower) * fractions.reshape((-1,) + (1,) * lower.ndim)
    return nodes, (upper - lower) / (num_nodes - 1)


def rule_at_mode(
    log_prob: Callable[[jax.Array], jax.Array], mean: jax.Array, sd: jax.Array, num_nodes: int
) -> tuple[jax.Array, jax.Array]:
    """
    Nodes and log-weights in ``z = (f − mean)/sd`` of the stretched trapezoid rule.

    It is ``z = z* + b sinh t`` with z* and b the mode and width of ``p(y | f) φ(z)``. The log of that product falls by
    at least (z − z*)²/2, so that |z − z*| ≤ 7 is enough for any log-concave likelihood, and z* lies between 0 and the
    slope at 0.

    :param log_prob: log p(y | f) as a function of f, concave; without gradients to be taken.
    :param mean: mean of f, in the shape of the result.
    :param sd: its standard deviation, likewise.
    """

    def slope(z):
        def log_integrand(z):
            return log_prob(mean + sd * z) - 0.5 * z**2

        return jax.jvp(log_integrand, (z,), (jnp.ones_like(z),))[1]

    def halve(_, bracket):
        near, far = bracket
        middle = 0.5 * (near + far)
        beyond = slope(jnp.sinh(middle)) * jnp.sign(far) > 0
        return jnp.where(beyond, middle, near), jnp.where(beyond, far, middle)

    # Bisection in arsinh z, as the bracket can be astronomically long (Poisson).
    zero = jnp.zeros_like(mean)
    far = jnp.clip(jnp.arcsinh(slope(zero)), -40.0, 40.0)
    mode = jnp.sinh(sum(lax.fori_loop(0, 24, halve, (zero, far))) / 2)
    curvature = -jax.jvp(slope, (mode,), (jnp.ones_like(mode),))[1]
    width = 1 / jnp.sqrt(jnp.clip(curvature, 1.0, 1e12))
    reach = jnp.arcsinh(REACH / width)
    t, step = trapezoid(-reach, reach, num_nodes)
    z = mode + width * jnp.sinh(t)
    log_weights = jnp.log(width * step * jnp.cosh(t)) - 0.5 * (z**2 + LOG_2PI)
    return lax.stop_gradient((z, log_weights))
