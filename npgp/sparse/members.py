"""
Functions of a plate with a kernel each: the hyperparameters of all in one kernel, and one projector for each function.

The convention is that of NumPyro's plates. A function drawn in plates of shape ``(…, Q, 1)``, the last axis being that
of rows, may have hyperparameters that begin with these axes, as they have if they are sampled in the same plates: a
variance (Q, 1), a lengthscale (Q, 1) or, for D input columns, (Q, 1, D). Axes may be 1 where all members have the same,
and an array without these axes is everybody's. Inducing inputs of each function's own are (…, Q, M, D).

A kernel computes one function's covariances, whoever wrote it: it is mapped over the functions (``jax.vmap``), with
what they share computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from npgp.features import InducingBlock, Points
from npgp.kernels import Kernel
from npgp.sparse.projection import Members, Projector, Shape, factorize

#: Of an array of which functions have one each: the functions' shape, and that of one function's.
Parted = tuple[Shape, Shape]


def factorize_members(
    kernel: Kernel, blocks: Sequence[InducingBlock], plates: Shape, jitter: float | None = None
) -> Projector | Members:
    """
    As :func:`npgp.sparse.factorize`, for functions in plates, which may have a kernel or inducing inputs each.

    .. code-block:: python

        kernels = npgp.RBF(np.array([[0.5], [2.0]]))
        projectors = npgp.sparse.factorize_members(kernels, [npgp.features.Points(Z)], (2, 1))
        assert projectors(X).A[0].shape == (2, 6, 30)

    :param kernel: of all functions; hyperparameters that begin with the plates' axes differ between them.
    :param blocks: the inducing blocks; points of shape plates + (M, D), less the axis of rows, differ.
    :param plates: shape of the plates that the functions are in, the last axis being that of rows, 1; ``()`` for one
        function.
    :param jitter: relative jitter tried first (:func:`npgp.linalg.cholesky`).
    :return: a :class:`~npgp.sparse.Projector`, where all functions have the same.
    :raises ValueError: for hyperparameters or inducing inputs of another number of functions.
    """
    parts = _kernel_batches(kernel, plates) + [part for block in blocks for part in _block_batches(block, plates)]
    if not any(parts):
        return factorize(kernel, blocks, jitter)
    shape = np.broadcast_shapes(*(part[0] for part in parts if part is not None))
    leaves, structure = jax.tree.flatten((kernel, tuple(blocks)))
    together, varies = [], []
    for leaf, part in zip(leaves, parts, strict=True):
        varies.append(part is not None)
        if part is not None:
            batch, own = part
            leaf = jnp.broadcast_to(jnp.reshape(leaf, (*batch, *own)), (*shape, *own)).reshape(math.prod(shape), *own)
        together.append(leaf)
    merged: tuple[Kernel, tuple[InducingBlock, ...]] = jax.tree.unflatten(structure, together)
    unfactorized = Members(Projector(*merged, (), (), ()), tuple(varies), shape)

    def arrays(projector: Projector) -> Any:
        made = factorize(projector.kernel, projector.blocks, jitter)
        return made.cholesky, made.cross, made.jitter, made.rest

    flat = replace(unfactorized, batch_shape=(math.prod(shape),))
    made = flat.each(arrays)
    number = len(jax.tree.leaves(made))
    return Members(Projector(*merged, *made), (*varies, *(True,) * number), shape)


def _fits(shape: Shape, plates: Shape) -> bool:
    """Return whether an array of this shape begins with the axes of plates."""
    begin = shape[: len(plates)]
    return len(begin) == len(plates) and all(a in (1, b) for a, b in zip(begin, plates, strict=True))


def _kernel_batches(kernel: Kernel, plates: Shape) -> list[Parted | None]:
    """Split the shape of each of the kernel's arrays into batch and own; ``None`` where functions share it."""
    found: list[Parted | None] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(kernel)[0]:
        owner, name = _owner(kernel, path)
        shape, count = np.shape(leaf), len(plates)
        matrix = name in owner.matrix_fields
        if count < 2 or plates[-1] != 1 or len(shape) < count or (matrix and len(shape) <= 2):
            found.append(None)
        elif _fits(shape, plates):
            found.append((shape[: count - 1], shape[count:]))
        elif shape[count - 1] == 1 and not matrix:
            raise ValueError(
                f"{type(owner).__name__} {name} has shape {shape}, but the functions are in plates of shape {plates}: "
                f"what differs between them has {plates} in front, and an axis of 1 where it does not. (Fields that "
                "hold matrices are named in the kernel's matrix_fields.)"
            )
        else:
            found.append(None)
    return found


def _owner(kernel: Kernel, path: Sequence[Any]) -> tuple[Kernel, str]:
    """The kernel that has an array, which may be a part of another; and the name of its field."""
    owner, named = kernel, ""
    at: Any = kernel
    for key in path:
        name = getattr(key, "name", None)
        if isinstance(at, Kernel):
            owner, named = at, str(name)
        at = getattr(at, name, None) if name is not None else _entry(at, key)
    return owner, named


def _entry(container: Any, key: Any) -> Any:
    """An entry of a tuple, list or dictionary; of other pytrees, where no kernel is looked for, nothing."""
    place: Any = getattr(key, "idx", getattr(key, "key", None))
    return container[place] if isinstance(container, (tuple, list, dict)) else None


def _block_batches(block: InducingBlock, plates: Shape) -> list[Parted | None]:
    """Split the shapes of an inducing block's arrays as :func:`_kernel_batches` does a kernel's."""
    leaves = jax.tree.leaves(block)
    if not isinstance(block, Points) or np.ndim(block.inputs) == 2:
        return [None] * len(leaves)
    shape = np.shape(block.inputs)
    for axes in (shape[:-2], (*shape[:-2], 1)):  # with and without that of rows
        if len(plates) > 1 and len(axes) == len(plates) and _fits(axes, plates):
            return [(axes[:-1], shape[-2:])]
    what = f"the functions are in plates of shape {plates}" if plates else "there is one function"
    raise ValueError(
        f"{block.name} has shape {shape}, but {what}: inducing inputs are (M, D), or for functions drawn in a plate of "
        "Q members at dim=-2 (Q, M, D)."
    )
