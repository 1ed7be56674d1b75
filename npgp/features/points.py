"""Inducing points: function values u = f(Z)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import checks
from npgp.features.protocol import InducingBlock
from npgp.kernels import Kernel
from npgp.pytrees import pytree, static


@pytree
class Points:
    """
    The values of f at inducing inputs.

    .. code-block:: python

        block = npgp.features.Points(Z)  # what an array of inducing inputs is taken for
        assert block.size == 6

    :param inputs: Z, shape (M, D); numbers, a ``numpyro.param`` or a sampled value. M may be 0 beside other blocks. For
        functions drawn in a plate of Q members at dim −2 also (Q, M, D), each function's own.
    :param name: what error messages call them.
    :raises TypeError: for inputs that are not floating.
    :raises ValueError: for inputs of another shape, or with NaN.
    """

    inputs: jax.Array
    name: str = static("inducing", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", checks.inputs(self.inputs, self.name, allow_empty=True, members=True))

    @property
    def size(self) -> int:
        """Number of inducing points M."""
        return self.inputs.shape[-2]

    def gram(self, kernel: Kernel) -> jax.Array:
        """``k(Z, Z)``, (M, M)."""
        if self.inputs.ndim != 2:
            raise ValueError(
                f"{self.name} has shape {self.inputs.shape}; inducing inputs (Q, M, D) are for Q functions drawn in a "
                "plate, and elsewhere they are (M, D)."
            )
        return kernel(self._fixed_levels(kernel)) if self.size else jnp.zeros((0, 0), self.inputs.dtype)

    def cross(self, kernel: Kernel, X: ArrayLike) -> jax.Array:
        """``k(Z, X)``, (M, N)."""
        X = jnp.asarray(X)
        if not (self.size and X.shape[0]):
            return jnp.zeros((self.size, X.shape[0]), jnp.result_type(self.inputs, X))
        return kernel(self._fixed_levels(kernel), X)

    def cross_features(self, kernel: Kernel, other: InducingBlock) -> jax.Array:
        """Covariance with the features of any other block, (M, M of the other)."""
        return other.cross(kernel, self._fixed_levels(kernel)).T

    def _fixed_levels(self, kernel: Kernel) -> jax.Array:
        """The inputs; levels, which are labels, have no gradient, even where a kernel is told to read them."""
        levels = sorted(kernel.level_columns(self.inputs.shape[-1]))
        if not levels:
            return self.inputs
        columns = np.asarray(levels)
        return self.inputs.at[..., columns].set(lax.stop_gradient(self.inputs[..., columns]))


def as_block(block: object, name: str = "inducing") -> InducingBlock:
    """
    An inducing block from what a user gives: a block, or inputs Z of shape (M, D).

    .. code-block:: python

        assert npgp.features.as_block(Z).size == 6

    :raises TypeError: for inputs that are not floating.
    :raises ValueError: for inputs of another shape, without rows or with NaN.
    """
    return block if isinstance(block, InducingBlock) else Points(block, name=name)  # type: ignore[arg-type]
