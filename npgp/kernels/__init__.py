"""Covariance functions: frozen dataclasses that are pytrees of arrays.

A hyperparameter is a number, an array, a ``numpyro.param`` or a ``numpyro.sample`` value; the kernel is built
inside the model from whatever is at hand. ``k(X, X2)`` makes no (N, M, D) array.

Sources: Rasmussen & Williams 2006, chapter 4; Cho & Saul 2009 (arc-cosine); Rahimi & Recht 2007 (random features).
"""

from npgp.kernels.base import Kernel, Product, Scaled, Sum, Tinygp, as_kernel
from npgp.kernels.coregion import Coregion, at_outputs
from npgp.kernels.linear import Constant, Linear, Polynomial, White
from npgp.kernels.stationary import (
    RBF,
    Cosine,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    Stationary,
    squared_distances,
)
from npgp.kernels.zonal import (
    ArcCosine,
    Zonal,
    ZonalArcCosine,
    ZonalMatern12,
    ZonalMatern32,
    ZonalMatern52,
    ZonalRBF,
)

__all__ = [
    "RBF",
    "ArcCosine",
    "Constant",
    "Coregion",
    "Cosine",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "Scaled",
    "Stationary",
    "Sum",
    "Tinygp",
    "White",
    "Zonal",
    "ZonalArcCosine",
    "ZonalMatern12",
    "ZonalMatern32",
    "ZonalMatern52",
    "ZonalRBF",
    "as_kernel",
    "at_outputs",
    "squared_distances",
]
