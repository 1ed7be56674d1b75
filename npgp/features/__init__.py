"""
Inducing blocks: sets of linear functionals of f.

:class:`InducingBlock` says what a block is, and how to write one. Nothing else in the library knows what its features
are.
"""

from __future__ import annotations

from npgp.features.activations import Activations, LeakyReLU, Probit, ReLU, Softplus, SphericalHarmonics
from npgp.features.points import InducingBlock, Points, as_block, covariance

__all__ = [
    "Activations",
    "InducingBlock",
    "LeakyReLU",
    "Points",
    "Probit",
    "ReLU",
    "Softplus",
    "SphericalHarmonics",
    "as_block",
    "covariance",
]
