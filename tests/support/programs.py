"""What programs of JAX consist of."""

from __future__ import annotations

from collections.abc import Iterator

import jax


def equations(jaxpr) -> Iterator:
    """All equations of a program, those of its inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
