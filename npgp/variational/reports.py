"""
What an optimizer wants to know of a q(ε) given pseudo-data at a step's draws: kernels, and gradients in covariances.

A loss returns a number, and may have drawn its hyperparameters inside ``vmap`` over particles, or ``scan``, from which
nothing else gets out. So the optimizer holds out slots of zeros, in the context around the loss; a block takes its
slot as an argument that changes nothing, and says in the backward pass, where the slot's gradient would be, what it has
to say. Autodiff sums that over draws, whatever these are made in, and counts them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from npgp import linalg
from npgp.context import context
from npgp.contract import name_here
from npgp.variational.blocks import BlockNormal, block_normal


class Slot(NamedTuple):
    """
    Zeros, to be differentiated in; their gradient is the report, summed over draws.

    :param precision: the gradient in W, for pseudo-data of precision ``R W Rᵀ``, at ``W = I``, by way of the covariance
        of q(ε) alone: its mean is held. (..., M, M); or (..., M) where R and W are diagonal.
    :param covariance: of the inducing values under the prior, (..., M, M), with the axes of the parameters' batch.
    :param draws: their number, ().
    """

    precision: jax.Array
    covariance: jax.Array
    draws: jax.Array


def reported(site: str, q: BlockNormal, L: jax.Array, root: jax.Array, diagonal: bool) -> BlockNormal:
    """
    A block's q(ε) as it is; where an optimizer asks for it, a report is made.

    :param site: the whitened site.
    :param q: given pseudo-data.
    :param L: the factor of the block's residual covariance, (..., M, M); or its diagonal, (..., M).
    :param root: R, the factor of the pseudo-data's precision, (..., M, M); or its diagonal, (..., M).
    :param diagonal: whether L is a diagonal.
    """
    slot = context().slots.get(name_here(site))
    if slot is None:
        return q
    loc, scale = q.arrays(q.batch_shape)
    factor = linalg.diagonal_matrix(L) if diagonal else L
    H = linalg.lower_matmul(root, factor, transpose=True) if root.ndim > loc.ndim else root[..., None] * factor
    return block_normal(q.kind, *_with_report((loc, scale), (H, linalg.gram(factor)), slot))


@jax.custom_vjp
def _with_report(q: tuple, seen: tuple, slot: Slot) -> tuple:
    return q


def _forward(q: tuple, seen: tuple, slot: Slot) -> tuple[tuple, tuple]:
    return q, (q, seen, slot)


def _backward(kept: tuple, gradient: tuple) -> tuple[tuple, tuple, Slot]:
    (loc, scale), (H, covariance), slot = kept
    in_scale = gradient[1]
    if scale.ndim == loc.ndim:
        scale, in_scale = (linalg.diagonal_matrix(each) for each in (scale, in_scale))
    # With S = F Fᵀ, S ∂ℓ/∂S S is F Φ Fᵀ, Φ symmetric with half of Fᵀ ∂ℓ/∂F below its diagonal. And ∂S/∂W is what makes
    # ∂ℓ/∂W of it: −H F Φ Fᵀ Hᵀ.
    Phi = linalg.lower_half(linalg.lower_matmul(scale, in_scale, transpose=True))
    HF = linalg.matmul(H, scale)
    half = -0.5 * linalg.matmul(HF, Phi + jnp.swapaxes(Phi, -1, -2))
    dense = slot.precision.ndim > loc.ndim
    precision = linalg.matmul(half, jnp.swapaxes(HF, -1, -2)) if dense else jnp.sum(half * HF, axis=-1)
    # One in each member of a ``vmap`` that has a covariance of its own: what has no axis there is not summed over it.
    draws = jnp.where(jnp.any(jnp.isnan(covariance)), 1.0, 1.0)
    sums = Slot(precision, jnp.broadcast_to(covariance, slot.covariance.shape), draws)
    sums = jax.tree.map(lambda value, zeros: value.astype(zeros.dtype), sums, slot)
    return gradient, (jnp.zeros_like(H), jnp.zeros_like(covariance)), sums


_with_report.defvjp(_forward, _backward)
