"""Inducing patches: values of the function of patches that a convolutional GP is a sum of."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp import checks
from npgp.kernels import Kernel
from npgp.kernels.convolutional import Convolutional, convolutional_parts
from npgp.pytrees import pytree


@pytree
@dataclass(frozen=True)
class Patches:
    """
    The values of g at inducing patches, where the kernel is :class:`npgp.kernels.Convolutional`,
    ``f(x) = Σ_p w_p g(x^[p])``, a multiple of one, or a sum with one in it.

    Their covariances, ``K_uu = k_g(Z, Z)`` and ``K_uf = Σ_p w_p k_g(Z, x^[p])``, are exact, so that all bounds are
    bounds. Beside them other blocks may be points, which are images, or patches of another term of the sum. Initial
    values are patches of the data: ``npgp.inducing.kmeans(key, kernel.patches(X[:500]).reshape(-1, columns), M)``.

    .. code-block:: python

        kernel = npgp.kernels.Convolutional(
            npgp.RBF(1.0), image_shape=(4, 4), patch_shape=(3, 3)
        )
        block = npgp.features.Patches(np.random.default_rng(0).normal(size=(5, 9)))
        assert block.cross(kernel, np.zeros((2, 16))).shape == (5, 2)

    :param inputs: Z, shape (M, numbers of a patch); numbers, a ``numpyro.param`` or a sampled value.
    :raises TypeError: for patches that are not floating; and, where they are used, for another kernel.
    :raises ValueError: for patches of another shape, or with NaN; where they are used, if the kernel's patches have
        another number of columns, or a sum has several terms with patches of this size.

    Source: van der Wilk, Rasmussen & Hensman 2017.
    """

    inputs: jax.Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", checks.inputs(self.inputs, "inducing patches"))

    @property
    def size(self) -> int:
        """Number of inducing patches M."""
        return self.inputs.shape[0]

    def gram(self, kernel: Kernel) -> jax.Array:
        """``k_g(Z, Z)``, (M, M)."""
        return self._term(kernel)[1].base(self.inputs)

    def cross(self, kernel: Kernel, X: ArrayLike) -> jax.Array:
        """``√s Σ_p w_p k_g(Z, x^[p])`` for the term ``s`` times the convolutional kernel, (M, N)."""
        _, term, scale = self._term(kernel)
        return jnp.sqrt(scale) * term.from_patches(self.inputs, X)

    def cross_features(self, kernel: Kernel, other: object) -> jax.Array:
        """Covariance with the patches of another block, (M, M'): 0 where they are of another term of the sum."""
        if not isinstance(other, Patches):
            return NotImplemented
        (mine, term, _), (theirs, _, _) = self._term(kernel), other._term(kernel)
        if mine != theirs:
            return jnp.zeros((self.size, other.size), jnp.result_type(self.inputs, other.inputs))
        return term.base(self.inputs, other.inputs)

    def _term(self, kernel: Kernel) -> tuple[int, Convolutional, ArrayLike]:
        """The term of the kernel that these are patches for: its number, itself, and the factor around it."""
        pairs = convolutional_parts(kernel)
        if not pairs:
            raise TypeError(
                f"the kernel is {type(kernel).__name__}, but Patches features need a Convolutional kernel, a number "
                "times one, or a sum with one."
            )
        columns = self.inputs.shape[1]
        fitting = [(i, *pair) for i, pair in enumerate(pairs) if pair[0].patch_columns == columns]
        if len(fitting) != 1:
            found = [inner.patch_columns for inner, _ in pairs]
            raise ValueError(
                f"the inducing patches have {columns} columns, and the kernel's terms patches of {found}: exactly one "
                "term must have patches of this size."
            )
        return fitting[0]
