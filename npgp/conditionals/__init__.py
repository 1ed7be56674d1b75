"""
What the approximate posterior does to the residual that the inducing blocks leave: one conditional a class.

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

from npgp.conditionals.base import Conditional, Observations, ObservedRows, Parameter
from npgp.conditionals.standard import (
    Consecutive,
    Full,
    Gain,
    Grouped,
    Prior,
    Published,
    Shared,
    Tight,
)
from npgp.conditionals.standard import (
    as_conditional as as_conditional,
)

__all__ = [
    "Conditional",
    "Consecutive",
    "Full",
    "Gain",
    "Grouped",
    "Observations",
    "ObservedRows",
    "Parameter",
    "Prior",
    "Published",
    "Shared",
    "Tight",
]
