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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from npgp.features import InducingBlock, Points
from npgp.kernels import Kernel
from npgp.pytrees import pytree
from npgp.sparse.groups import Groups
from npgp.sparse.projection import Projected, Projection, Projector, factorize

Shape = tuple[int, ...]
#: Of an array of which functions have one each: the functions' shape, and that of one function's.
Parted = tuple[Shape, Shape]


@pytree
@dataclass(frozen=True)
class Members:
    """
    The factorized inducing blocks of several functions, each with a kernel, or inducing inputs, of its own; made by
    :func:`factorize_members`. It is used as a :class:`~npgp.sparse.Projector` is, and what it returns has the
    functions' axes in front.

    .. code-block:: python

        kernels = npgp.RBF(np.array([[0.5], [2.0]]))
        members = npgp.sparse.factorize_members(kernels, [npgp.features.Points(Z)], (2, 1))
        assert members.batch_shape == (2,) and members.cholesky[0].shape == (2, 6, 6)

    :param projectors: those of all functions in one. Arrays that differ between functions have a leading axis.
    :param varies: which of its arrays do.
    :param batch_shape: shape of the functions; their leading axis is all of these.
    """

    projectors: Projector
    varies: tuple[bool, ...] = field(metadata={"static": True})
    batch_shape: Shape = field(metadata={"static": True})

    @classmethod
    def of(cls, projector: Projector | Members, batch_shape: Shape) -> Members:
        """The same for each function of a batch, be it one projector or several."""
        if not isinstance(projector, Members):
            projector = cls(projector, (False,) * len(jax.tree.leaves(projector)), ())
        return projector.expand(batch_shape)

    def each(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """
        A function of each one's projector.

        :param function: of a :class:`~npgp.sparse.Projector`, and of each one's share of the arrays.
        :param arrays: trees of arrays of shape batch + (...).
        :return: what it returns, batch + (...).
        """
        leaves, structure = jax.tree.flatten(self.projectors)
        count = math.prod(self.batch_shape)

        def of_one(own: Any, arrays: Any) -> Any:
            own = iter(own)
            merged = [next(own) if varies else leaf for varies, leaf in zip(self.varies, leaves, strict=True)]
            return function(jax.tree.unflatten(structure, merged), *arrays)

        own = [leaf for varies, leaf in zip(self.varies, leaves, strict=True) if varies]
        first = len(self.batch_shape)
        flat = jax.tree.map(lambda x: jnp.reshape(x, (count, *jnp.shape(x)[first:])), arrays)
        return jax.tree.map(self._unflat, jax.vmap(of_one, axis_size=count)(own, flat))

    def expand(self, batch_shape: Shape) -> Members:
        """The same for a larger batch of functions, to whose shape this one's broadcasts."""
        if batch_shape == self.batch_shape:
            return self
        leaves, structure = jax.tree.flatten(self.projectors)
        count = math.prod(batch_shape)

        def wider(x: Any) -> jax.Array:
            x = self._unflat(x)
            own = x.shape[len(self.batch_shape) :]
            return jnp.broadcast_to(x, (*batch_shape, *own)).reshape(count, *own)

        leaves = [wider(x) if varies else x for varies, x in zip(self.varies, leaves, strict=True)]
        return replace(self, projectors=jax.tree.unflatten(structure, leaves), batch_shape=batch_shape)

    def take(self, members: jax.Array) -> Members:
        """Some of the functions, by their numbers, of any shape; they may be repeated. Of those of one plate."""
        leaves, structure = jax.tree.flatten(self.projectors)
        index = jnp.ravel(members)
        leaves = [x[index] if varies else x for varies, x in zip(self.varies, leaves, strict=True)]
        return replace(self, projectors=jax.tree.unflatten(structure, leaves), batch_shape=members.shape)

    def _unflat(self, x: jax.Array) -> jax.Array:
        return x.reshape(*self.batch_shape, *x.shape[1:])

    @property
    def kernel(self) -> Kernel:
        """The kernel of all functions, with hyperparameters batch + (1, ...) where they differ."""
        kernel, structure = jax.tree.flatten(self.projectors.kernel)
        own = self.varies[: len(kernel)]
        shape = (*self.batch_shape, 1)
        leaves = [x.reshape(*shape, *x.shape[1:]) if v else x for x, v in zip(kernel, own, strict=True)]
        return jax.tree.unflatten(structure, leaves)

    @property
    def blocks(self) -> tuple[InducingBlock, ...]:
        """The inducing blocks, with inputs batch + (M, D) where they differ."""
        blocks, structure = jax.tree.flatten(self.projectors.blocks)
        before = len(jax.tree.leaves(self.projectors.kernel))
        own = self.varies[before : before + len(blocks)]
        return jax.tree.unflatten(structure, [self._unflat(x) if v else x for x, v in zip(blocks, own, strict=True)])

    @property
    def cholesky(self) -> tuple[jax.Array, ...]:
        """L_i, batch + (M_i, M_i), or their diagonals."""
        return tuple(map(self._unflat, self.projectors.cholesky))

    @property
    def factors(self) -> tuple[jax.Array, ...]:
        """L_i as matrices, batch + (M_i, M_i)."""
        return self.each(lambda projector: projector.factors)

    @property
    def jitter(self) -> tuple[jax.Array, ...]:
        """For each block, the relative jitter that each function's factorization took; batch shape."""
        return tuple(map(self._unflat, self.projectors.jitter))

    def __call__(self, X: jax.Array) -> Projection:
        """Project inputs on every block: (N, D), the same for all functions, or batch + (N, D)."""
        if X.ndim > 2:
            return self.expand(X.shape[:-2]).each(lambda projector, X: projector(X), X)
        return self.each(lambda projector: projector(X))

    def residual_covariance(
        self, X: jax.Array, A: Sequence[jax.Array], blocks: Sequence[bool] | None = None, other: Projected | None = None
    ) -> jax.Array:
        """As of :class:`~npgp.sparse.Projector`: batch + (N, N), or batch + (N, N')."""
        if other is not None:
            batch = np.broadcast_shapes(X.shape[:-2], other[0].shape[:-2], self.batch_shape)
            arrays = (X, tuple(A), (other[0], tuple(other[1])))
            arrays = jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *x.shape[-2:])), arrays)
            return self.expand(batch).each(lambda p, X, A, other: p.residual_covariance(X, A, blocks, other), *arrays)
        if X.ndim > 2:
            members = self.expand(X.shape[:-2])
            return members.each(lambda p, X, A: p.residual_covariance(X, A, blocks), X, tuple(A))
        return self.each(lambda projector, A: projector.residual_covariance(X, A, blocks), tuple(A))

    def group_covariance(
        self, X: jax.Array, A: Sequence[jax.Array], groups: Groups, blocks: Sequence[bool] | None = None
    ) -> jax.Array:
        """As of :class:`~npgp.sparse.Projector`: batch + (G, g, g)."""
        if X.ndim > 2:
            members = self.expand(X.shape[:-2])
            return members.each(lambda p, X, A: p.group_covariance(X, A, groups, blocks), X, tuple(A))
        return self.each(lambda projector, A: projector.group_covariance(X, A, groups, blocks), tuple(A))


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
    """Whether an array of this shape begins with the axes of plates."""
    begin = shape[: len(plates)]
    return len(begin) == len(plates) and all(a in (1, b) for a, b in zip(begin, plates, strict=True))


def _kernel_batches(kernel: Kernel, plates: Shape) -> list[Parted | None]:
    """How each of the kernel's arrays is parted among the functions; ``None`` where they share it."""
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
    """As :func:`_kernel_batches`, of inducing blocks."""
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
