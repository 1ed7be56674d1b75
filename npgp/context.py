"""
What statements run under, where NumPyro has no word for it: one context variable with a field for each.

A context variable and no handler: it is each thread's own, passes through ``handlers.block``, and needs no message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Context:
    """
    :param followed: in the automatic guide, what q(ε) follows (:class:`npgp.model.sites.Followed`); ``None`` elsewhere.
    :param shared: in the automatic guide, of components that share one q(ε), their parts of it by site.
    :param unseen: nobody looks at densities of observed GP values: these and what they take need not be computed.
    :param joint: y is simulated with f drawn jointly over rows.
    :param slots: where blocks report to an optimizer, by site (:class:`npgp.variational.parameterizations.Slot`).
    :param later: who makes checks of traced values later, the outermost first (:mod:`npgp.programs.later`).
    """

    followed: Any = None
    shared: Mapping[str, Any] = field(default_factory=dict)
    unseen: bool = False
    joint: bool = False
    slots: Mapping[str, Any] = field(default_factory=dict)
    later: tuple[Any, ...] = ()


_context: ContextVar[Context] = ContextVar("npgp", default=Context())  # noqa: B039 (frozen, and its dicts are replaced as wholes)


def context() -> Context:
    """The context here."""
    return _context.get()


@contextmanager
def under(**changes: Any) -> Iterator[None]:
    """
    Change some fields of the context within a ``with``, or in calls of a function that this decorates.

    :param changes: new values by field.
    """
    token = _context.set(replace(_context.get(), **changes))
    try:
        yield
    finally:
        _context.reset(token)
