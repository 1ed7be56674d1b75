"""
What the approximate posterior does to the residual that the inducing blocks leave: one conditional a file.

==================  ===========================================================================================
:class:`Prior`      the residual keeps its prior (Titsias 2009; Hensman, Fusi & Lawrence 2013)
:class:`Tight`      it shrinks row by row (Bui, Ashman & Turner 2025; Titsias 2025); the default
:class:`Grouped`    jointly within groups of neighboring rows: tighter, and nearly as cheap
:class:`Full`       jointly for all rows, at O(N³)
:class:`Shared`     by one learned factor (Artemev, Burt & van der Wilk 2021)
:class:`Published`  by one learned precision; a bound for log-concave likelihoods only
==================  ===========================================================================================

A word, such as ``"tight"``, stands for the object where that needs no arguments. One of one's own subclasses
:class:`Conditional`.
"""

from __future__ import annotations

from typing import Any

import jax

from npgp.conditionals.base import Conditional, ObservedRows, Parameter
from npgp.conditionals.full import Full
from npgp.conditionals.grouped import Consecutive, Gain, Grouped
from npgp.conditionals.prior import Prior
from npgp.conditionals.published import Published
from npgp.conditionals.shared import Shared
from npgp.conditionals.tight import Tight

__all__ = [
    "Conditional",
    "Consecutive",
    "Full",
    "Gain",
    "Grouped",
    "ObservedRows",
    "Parameter",
    "Prior",
    "Published",
    "Shared",
    "Tight",
]

_BY_WORD: dict[str, type[Conditional]] = {
    cls.__name__.lower(): cls for cls in (Prior, Tight, Grouped, Full, Shared, Published)
}


def as_conditional(conditional: Any) -> Conditional:
    """
    A conditional from what a user may pass as one: an object, or the word for one that needs no arguments.

    :raises TypeError: for what is neither.
    :raises ValueError: for a word that is unknown.
    """
    if isinstance(conditional, Conditional):
        if jax.tree_util.all_leaves([conditional]):
            raise TypeError(f"conditional is of class {type(conditional).__name__}, which must be under @npgp.pytree.")
        return conditional
    accepted = ", ".join(map(repr, _BY_WORD))
    if not isinstance(conditional, str):
        raise TypeError(
            f"conditional is {conditional!r:.80}; it must be an npgp.conditionals.Conditional such as "
            f"npgp.conditionals.Tight(), or one of {accepted}."
        )
    if conditional not in _BY_WORD:
        raise ValueError(
            f"conditional is {conditional!r}; it must be one of {accepted}, or an npgp.conditionals.Conditional."
        )
    return _BY_WORD[conditional]()
