"""What programs of JAX consist of, and how many are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax import monitoring

_compiled = [0]


def _note(event: str, duration: float, **_) -> None:
    _compiled[0] += event.endswith("backend_compile_duration")


monitoring.register_event_duration_secs_listener(_note)


@contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """A function that tells how many programs have been compiled inside, or read from a cache on disk."""
    before = _compiled[0]
    yield lambda: _compiled[0] - before


def equations(jaxpr) -> Iterator:
    """All equations of a program, those of its inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
