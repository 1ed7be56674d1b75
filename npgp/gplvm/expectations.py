"""Expectations under Gaussians over latent points, and at how many points functions fit in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from npgp import linalg
from npgp.chunks import rows_within
from npgp.variational.posterior import Posterior

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
    # Golub & Welsch 1969: the eigenvalues of the polynomials' recurrence.
    k, alpha = np.arange(radii), 0.5 * latent_dim - 1.0
    beside = np.sqrt(k[1:] * (k[1:] + alpha))
    halves, vectors = np.linalg.eigh(np.diag(2 * k + 1 + alpha) + np.diag(beside, 1) + np.diag(beside, -1))
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(repeats, radii, latent_dim, latent_dim)))[0]
    rays = np.sqrt(2.0 * halves)[:, None, None] * axes
    nodes = np.stack([rays, -rays])
    weights = np.broadcast_to(vectors[0][:, None] ** 2 / (repeats * ends), nodes.shape[:-1])
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
