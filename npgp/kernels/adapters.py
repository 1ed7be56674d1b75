"""Kernels of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from npgp.kernels.base import Kernel
from npgp.pytrees import pytree


@pytree
class Tinygp(Kernel):
    """
    A kernel of tinygp (https://tinygp.readthedocs.io), whose ``k(X, X2)`` is a matrix and ``k(X)`` its diagonal.

    It counts as not differentiable whatever it is: JAX derivatives of tinygp's distances are not right at equal
    inputs.

    .. code-block:: python

        import tinygp

        assert npgp.kernels.Tinygp(tinygp.kernels.Matern32(2.0))(X, Z).shape == (30, 6)

    :param kernel: the tinygp kernel, a pytree.
    """

    kernel: Callable[..., jax.Array]

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        return self.kernel(X, X if X2 is None else X2)

    def diag(self, X: jax.Array) -> jax.Array:
        return self.kernel(X)

    @property
    def differentiable(self) -> bool:
        return False


def as_kernel(obj: Any, name: str = "kernel") -> Kernel:
    """
    A kernel of this library or of tinygp, as one of this library.

    .. code-block:: python

        assert npgp.kernels.as_kernel(kernel) is kernel

    :param obj: a :class:`Kernel`, returned as it is, or a tinygp kernel, which is wrapped.
    :param name: what the error calls it.
    :raises TypeError: for anything else.
    """
    if isinstance(obj, Kernel):
        return obj
    if callable(obj) and not isinstance(obj, type) and _is_from("tinygp", obj):
        return Tinygp(obj)
    raise TypeError(f"{name} is {obj!r:.80}; it must be a kernel of npgp.kernels, such as RBF(), or one of tinygp.")


def _is_from(library: str, obj: Any) -> bool:
    """By the modules of its classes, so that nothing is imported."""
    return any(cls.__module__.split(".")[0] == library for cls in type(obj).__mro__)
