"""
Inducing blocks: sets of linear functionals of f.

A block is a pytree with a ``size`` and two covariances, ``gram(kernel)`` among its own features, (M, M), and
``cross(kernel, X)`` with function values, (M, N). Nothing else in the library knows what a feature is. A block whose
features are independent says so by ``gram_diagonal(kernel)``, (M,), which saves its Cholesky factor.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax

from npgp.features.activations import (
    Activations,
    LeakyReLU,
    Probit,
    ReLU,
    Softplus,
    spherical_covariance,
)
from npgp.features.harmonics import SphericalHarmonics
from npgp.features.points import Points
from npgp.kernels import Kernel

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

_SPHERICAL = (Activations, SphericalHarmonics)


@runtime_checkable
class InducingBlock(Protocol):
    """What a set of inducing features has to offer."""

    @property
    def size(self) -> int:
        """Number of features M."""
        ...

    def gram(self, kernel: Kernel) -> jax.Array:
        """Covariance among the features, (M, M)."""
        ...

    def cross(self, kernel: Kernel, X: jax.Array) -> jax.Array:
        """Covariance of the features with f(X), (M, N)."""
        ...


def as_block(block: object, name: str = "inducing") -> InducingBlock:
    """
    An inducing block from what a user gives: a block, or inputs Z of shape (M, D).

    :raises TypeError: for inputs that are not floating.
    :raises ValueError: for inputs of another shape, without rows or with NaN.
    """
    return block if isinstance(block, InducingBlock) else Points(block, name)  # type: ignore[arg-type]


def covariance(kernel: Kernel, a: InducingBlock, b: InducingBlock) -> jax.Array:
    """
    Covariance between the features of two different blocks, (M_a, M_b), block ``a`` being the earlier one.

    :raises NotImplementedError: if neither block is made of points, nor both of spherical features.
    :raises ValueError: if the second block adds nothing to the first.
    """
    if isinstance(b, Points):
        return a.cross(kernel, b.inputs)
    if isinstance(a, Points):
        return b.cross(kernel, a.inputs).T
    if isinstance(a, _SPHERICAL) and isinstance(b, _SPHERICAL):
        return spherical_covariance(kernel, a, b)
    raise NotImplementedError(f"no covariance is known between {type(a).__name__} and {type(b).__name__} features.")
