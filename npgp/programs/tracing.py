"""
What npgp relies on in JAX beyond what its documentation promises, as ``contract.py`` has it of NumPyro.

Each definition says what it relies on; the tests are in ``tests/ground/test_contract.py`` too.
"""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["calls_python", "current_trace", "default_device", "is_traced", "is_weakly_typed", "out_avals", "trace_of"]


def is_traced(x: object) -> bool:
    """
    Whether an array's values cannot be seen yet (it is traced by ``jit``, ``vmap`` or ``grad``).

    Relied on: such arrays are of the class ``jax.core.Tracer``, and others are not.
    """
    return isinstance(x, jax.core.Tracer)


def trace_of(x: object) -> Any:
    """
    The transformation that traces an array; ``None`` if it has values.

    Relied on: it is the array's ``_trace``, one object for all that one transformation traces.
    """
    return x._trace if isinstance(x, jax.core.Tracer) else None


def current_trace() -> Any:
    """
    The transformation around this whose arrays have no values; ``None`` outside ``jit``.

    Relied on: inside ``jit``, what ``jax.device_put`` returns is traced.
    """
    return trace_of(jax.device_put(0.0))


def out_avals(traced: Any) -> str:
    """
    Dtypes, shapes and weak types of what a traced program returns, as words.

    Relied on: ``jax.jit(f).trace(...)`` has a ``jaxpr`` with ``out_avals``.
    """
    return ", ".join(f"{aval}{' weak' * bool(getattr(aval, 'weak_type', False))}" for aval in traced.jaxpr.out_avals)


def calls_python(text: str) -> bool:
    """Whether a lowered program calls Python functions. Relied on: its text has the word ``callback`` then."""
    return "callback" in text


def is_weakly_typed(x: jax.Array) -> bool:
    """Whether an array lets another's precision win, as a Python number does. Relied on: ``Array.weak_type``."""
    return bool(x.weak_type)


def default_device() -> Any:
    """
    Where JAX computes with arrays that need not stay on a device: a device, or a platform's name.

    Relied on: inside ``jax.default_device``, ``jax.config`` has it as ``jax_default_device``, outside ``None``.
    """
    return jax.config.jax_default_device or jax.local_devices()[0]  # type: ignore[attr-defined]
