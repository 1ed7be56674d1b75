"""
q(ε) that follows the kernel's hyperparameters: the posterior given pseudo-data, ``q(u | θ) ∝ p_θ(u) N(z; u, Σ)``.

What the data say about function values does not depend on the hyperparameters θ. So the parameters are a value z for
each inducing value u, and the precision ``Λ = Σ⁻¹ = R Rᵀ`` of their noise; and the prior given θ does the rest. With
``u = L ε``, L the factor of the block's residual covariance at θ, and ``H = Rᵀ L``,

    S = (I + Hᵀ H)⁻¹,        m = S Hᵀ Rᵀ z.

In natural parameters these are the sites ``exp(λᵀu − ½ uᵀ Λ u)``, ``λ = Λ z`` (the dual parameterization of Adam,
Chang, Khan & Solin 2021). Values are what training finds its way in: they have the scale of the data wherever these
are many, where λ ranges over orders of magnitude; and a factor of Λ, since the inverse of a triangular factor of Σ
grows like a power of M while training has it wrong.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from npgp import linalg
from npgp.variational.blocks import BlockNormal, DenseNormal, DiagonalNormal

#: Suffixes of the parameters of a block given by pseudo-data: of the values, which every such block has,
VALUES = "pseudo_loc"
#: of their noise's standard deviations, what the values are in units of,
SCALE, UNIT = "pseudo_scale", "unit"
#: and, of dense blocks, of the unit lower-triangular factor of its precision.
LOWER = "pseudo_lower"


def pseudo_posterior(L: jax.Array, values: jax.Array, root: jax.Array, diagonal: bool = False) -> BlockNormal:
    """
    q(ε) of one block given pseudo-data.

    :param L: the factor of the block's residual covariance, (M, M) or, with leading axes as z has, (..., M, M).
    :param values: z, (..., M).
    :param root: R, the lower factor of their precision, (..., M, M), or the roots of precisions (..., M).
    :param diagonal: whether L is the diagonal of a diagonal factor, (M,) or (..., M).
    """
    if root.ndim == values.ndim:
        if diagonal:
            precision = 1.0 + jnp.square(L * root)
            return DiagonalNormal(L * jnp.square(root) * values / precision, 1.0 / jnp.sqrt(precision))
        H, scaled = root[..., None] * L, root * values
    else:
        L = linalg.diagonal_matrix(L) if diagonal else L
        H = linalg.lower_matmul(root, L, transpose=True)
        scaled = linalg.matmul(jnp.swapaxes(root, -1, -2), values[..., None])[..., 0]
    transposed = jnp.swapaxes(H, -1, -2)
    factor = covariance_factor(linalg.gram(transposed))
    half = linalg.matmul(jnp.swapaxes(factor, -1, -2), linalg.matmul(transposed, scaled[..., None]))
    return DenseNormal(linalg.matmul(factor, half)[..., 0], factor)


def precision_root(scale: jax.Array, lower: jax.Array | None = None) -> jax.Array:
    """
    R, with rows ``(I + N)_i / σ_i``; its diagonal, without N.

    :param scale: σ, (..., M).
    :param lower: N in its strictly lower triangle, (..., M, M).
    """
    if lower is None:
        return 1.0 / scale
    return (jnp.tril(lower, -1) + jnp.eye(lower.shape[-1], dtype=lower.dtype)) * (1.0 / scale)[..., None]


@jax.custom_jvp
def covariance_factor(Omega: jax.Array) -> jax.Array:
    """The lower factor T of ``(I + Ω)⁻¹``, for positive semi-definite Ω (..., M, M)."""
    identity = jnp.eye(Omega.shape[-1], dtype=Omega.dtype)
    # I + Ω has a factor unless rounding is above 1.
    return linalg.inverse_of_reversed(linalg.cholesky(jnp.flip(Omega + identity, (-2, -1)), jitter=0.0)[0])


@covariance_factor.defjvp
def _(primals, tangents):
    # From dS = −S dΩ S: products only, where the gradient by way of F would take four more solves.
    T, dOmega = covariance_factor(*primals), tangents[0]
    dOmega = 0.5 * (dOmega + jnp.swapaxes(dOmega, -1, -2))
    inner = linalg.lower_matmul(T, linalg.matmul(dOmega, T), transpose=True)
    return T, -linalg.lower_matmul(T, linalg.lower_half(inner))
