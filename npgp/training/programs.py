"""Compiled programs that go with an ``SVI``: a continuation does not compile again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from numpyro.infer import SVI

_NAME = "_npgp_programs"
T = TypeVar("T")


def kept(svi: SVI, key: Hashable, make: Callable[[], T]) -> T:
    """
    What ``make`` made for this SVI and key before, or makes now.

    It is kept with the SVI, and goes with it; and so with the model as it was when it was traced. Hence
    :func:`forget`, when training starts anew.
    """
    try:
        hash(key)
    except TypeError:  # an argument of the model that is no array and cannot be compared
        return make()
    programs = svi.__dict__.setdefault(_NAME, {})
    if key not in programs:
        programs[key] = make()
    return programs[key]


def forget(svi: SVI) -> None:
    """Drop what is kept for an SVI."""
    svi.__dict__.pop(_NAME, None)
