"""
What an optimizer wants to know of the kernel at a step's draws: prior covariances of inducing values.

A loss returns a number, and may have drawn its hyperparameters inside ``vmap`` over particles, or ``scan``, from which
nothing else gets out. So the optimizer holds out a slot of zeros, through a handler around the loss; the block takes it
as an argument that changes nothing, and says in the backward pass, where the slot's gradient would be, what the
covariance is. Autodiff sums that over draws, whatever these are made in, and counts them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from npgp import linalg
from npgp.contract import Handler, answer

__all__ = ["Slot", "Slots", "reported"]

#: Type of the message by which a block asks whether to report.
REPORT = "npgp.report"


class Slot(NamedTuple):
    """
    Zeros, to be differentiated in; their gradient is the report.

    :param covariance: of the inducing values, summed over draws, (..., M, M) with the axes of the parameters' batch.
    :param count: of the draws, ().
    """

    covariance: jax.Array
    count: jax.Array

    def mean(self, otherwise: jax.Array) -> jax.Array:
        """The mean covariance; if nobody has reported, or a number is not finite, something else."""
        mean = self.covariance / jnp.maximum(self.count, 1.0)
        return jnp.where((self.count > 0.0) & jnp.all(jnp.isfinite(mean)), mean, otherwise)


class Slots(Handler):
    """
    Holds slots out to blocks, by site.

    :param slots: by the site's name.
    """

    def __init__(self, slots: dict[str, Slot]):
        super().__init__()
        self.slots = slots

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == REPORT and msg["name"] in self.slots:
            msg["value"] = self.slots[msg["name"]]


def reported(site: str, L: jax.Array, diagonal: bool) -> jax.Array:
    """
    The factor L as it is; where a handler asks for it, its covariance is reported.

    :param site: the whitened site.
    :param L: the factor of the block's residual covariance, (..., M, M); or its diagonal, (..., M).
    :param diagonal: which of the two.
    """
    slot = answer(REPORT, site)
    if slot is None:
        return L
    factor = L[..., None] * jnp.eye(L.shape[-1], dtype=L.dtype) if diagonal else L
    return _with_report(L, factor, slot)


@jax.custom_vjp
def _with_report(L: jax.Array, factor: jax.Array, slot: Slot) -> jax.Array:
    return L


def _forward(L: jax.Array, factor: jax.Array, slot: Slot) -> tuple[jax.Array, tuple[jax.Array, Slot]]:
    return L, (factor, slot)


def _backward(kept: tuple[jax.Array, Slot], gradient: jax.Array) -> tuple[jax.Array, jax.Array, Slot]:
    factor, slot = kept
    covariance = jnp.broadcast_to(linalg.gram(factor), slot.covariance.shape).astype(slot.covariance.dtype)
    return gradient, jnp.zeros_like(factor), Slot(covariance, jnp.ones_like(slot.count))


_with_report.defvjp(_forward, _backward)
