"""
Inducing blocks: sets of inducing features, and those of function values u = f(Z).

A feature is a linear functional of f, such as its value at a point, its mean over a region or its inner product with
another function; u is the vector of M of them. The library needs their covariances and nothing else.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import checks
from npgp.kernels import Kernel
from npgp.pytrees import pytree, static


@runtime_checkable
class InducingBlock(Protocol):
    """
    A set of inducing features. Any object with these three members is one, wherever inducing inputs are accepted::

        @npgp.pytrees.pytree
        class Means:
            \"\"\"The means of f over M sets of K points each, (M, K, D).\"\"\"

            points: jax.Array

            @property
            def size(self):
                return self.points.shape[0]

            def gram(self, kernel):
                return jnp.mean(jax.vmap(lambda Z: self.cross(kernel, Z))(self.points), axis=-1)

            def cross(self, kernel, X):
                return jnp.mean(jax.vmap(lambda Z: kernel(Z, X))(self.points), axis=1)

            def cross_features(self, kernel, other):
                return jnp.mean(jax.vmap(lambda Z: other.cross(kernel, Z))(self.points), axis=-1)

    It should be registered with :func:`npgp.pytrees.pytree`, which makes it a frozen dataclass: then its arrays may be
    parameters or sampled values, and it crosses ``jit``. Covariances that it does not have for a kernel are an error of
    its own.

    Two more methods are looked for, by their names:

    ``gram_diagonal(kernel)``, (M,), says that the features are independent: the diagonal of ``gram``, which has nothing
    else. It saves the Cholesky factor.

    ``cross_features(kernel, other)`` is the covariance with the features of another block, (M, M of the other), or
    ``NotImplemented`` for a block of a kind that it does not know. The orthogonal decomposition needs it between every
    two blocks, from one of the two: the later block's method is called first, then the earlier one's. Points have it
    for any other block, so a block that is combined with points alone need not define it. The later block's may
    raise ``ValueError`` where its features follow from those of the earlier block, and nothing would be left of them.

    .. code-block:: python

        assert isinstance(npgp.features.Points(Z), npgp.features.InducingBlock)
    """

    @property
    def size(self) -> int:
        """Number of features M."""
        ...

    def gram(self, kernel: Kernel) -> jax.Array:
        """Covariance among the features, (M, M)."""
        ...

    def cross(self, kernel: Kernel, X: jax.Array) -> jax.Array:
        """Covariance of the features with f(X), for inputs X (N, D): (M, N)."""
        ...


def covariance(kernel: Kernel, a: InducingBlock, b: InducingBlock) -> jax.Array:
    """
    Covariance between the features of two different blocks, (M_a, M_b), block ``a`` being the earlier one.

    .. code-block:: python

        first, second = npgp.features.Points(Z), npgp.features.Points(Z[:2] + 0.5)
        assert npgp.features.covariance(kernel, first, second).shape == (6, 2)

    :raises NotImplementedError: if neither block has ``cross_features`` for the other.
    :raises ValueError: if the second block adds nothing to the first.
    """
    found = _cross_features(kernel, b, a)
    if found is not NotImplemented:
        return found.T
    found = _cross_features(kernel, a, b)
    if found is not NotImplemented:
        return found
    raise NotImplementedError(
        f"no covariance is known between {type(a).__name__} and {type(b).__name__} features; one of them must define "
        "cross_features for the other."
    )


def _cross_features(kernel: Kernel, block: Any, other: InducingBlock) -> Any:
    own = getattr(block, "cross_features", None)
    return NotImplemented if own is None else own(kernel, other)


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
