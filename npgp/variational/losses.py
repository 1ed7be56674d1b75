"""The loss as natural gradients need it: in two parts, with its gradients and the reports that blocks make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from npgp.context import under
from npgp.programs import Operations


def in_two(fn: Callable, q: dict[str, Any], slots: Any, others: dict[str, Any]) -> tuple[Callable, Callable]:
    """
    The loss in two, so that the loss of another q(ε) takes no more than q(ε) has a part in: the kernel's factors and
    the projections are at hand.

    :param fn: from parameters to the loss and its auxiliary output.
    :param q: parameters of q(ε) by name.
    :param slots: for reports, by site.
    :param others: all other parameters.
    :return: a function of parameters and slots, to the loss and (auxiliary output, what is kept); and one of what was
        kept and another q(ε), to its loss.
    """
    moving = len(jax.tree.leaves((q, slots)))
    leaves, structure = jax.tree.flatten((q, slots, others))

    def results(*leaves):
        q, slots, others = jax.tree.unflatten(structure, leaves)
        with under(slots=slots):
            loss, aux = fn({**others, **q})
        return {"loss": loss, "aux": aux}

    before, after = Operations(results, *leaves).divided(range(moving))

    def told(params, slots):
        leaves = jax.tree.leaves(({name: params[name] for name in q}, slots, {name: params[name] for name in others}))
        kept = before(*leaves)
        found = after(kept, *leaves)
        return found["loss"], (found["aux"], kept)

    def again(kept, new):
        return after(kept, *jax.tree.leaves((new, slots, others)))["loss"]

    return told, again


def value_and_grads(fn: Callable, forward_mode: bool) -> Callable:
    """A function of parameters and slots: the loss and its auxiliary output, gradients, and what slots are told."""

    def reverse(params, slots):
        output, (grads, reports) = jax.value_and_grad(fn, (0, 1), has_aux=True)(params, slots)
        return output, grads, reports

    def forward(params, slots):
        def repeated(params):
            output = fn(params, slots)
            return output[0], output

        grads, output = jax.jacfwd(repeated, has_aux=True)(params)
        return output, grads, slots

    return forward if forward_mode else reverse
