"""
Block projection: kernel + inducing blocks → (A_1, …, A_K, d). Every method of the library starts from these.

With C⁽¹⁾ = K and, for each block in turn, ``C⁽ⁱ⁾_ab = K_ab − Σ_{j<i} A_j(a)ᵀ A_j(b)``, ``L_i L_iᵀ = C⁽ⁱ⁾_{u_i u_i}``
and ``A_i(x) = L_i⁻¹ C⁽ⁱ⁾_{u_i x}``, the prior is exactly

    f(x) = Σ_i A_i(x)ᵀ ε_i + r(x),   ε_i ~ N(0, I) independent,   r ⟂ ε,   Var r(x_n) = d_n = k_nn − Σ_i ‖A_i(x_n)‖².

This is the block Cholesky factor of the joint covariance of all blocks. One block is the whitened SVGP (Hensman et
al. 2015); two are the orthogonal decomposition of Salimbeni et al. 2018 and Shi, Titsias & Mnih 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from npgp import linalg
from npgp.features import InducingBlock, Points, as_block, covariance
from npgp.functionals import rows as functionals
from npgp.functionals.rows import Functionals, Rows
from npgp.kernels import Kernel
from npgp.programs.backend import maximum
from npgp.programs.double import in_double, is_worth_it
from npgp.pytrees import pytree
from npgp.sparse.groups import Groups

#: Shape of a batch of functions.
Shape: TypeAlias = tuple[int, ...]
#: Rows, such as inputs (N, D), and their projections on each block.
Projected: TypeAlias = tuple[Rows, Sequence[jax.Array]]


def _projected_out(A: Sequence[jax.Array], blocks: Sequence[bool] | None) -> list[jax.Array]:
    """The projections on the blocks in use; on all if that is not said."""
    return [A_i for A_i, use in zip(A, [True] * len(A) if blocks is None else blocks, strict=True) if use]


@pytree
class Projection:
    """
    Whitened projections of N inputs.

    .. code-block:: python

        projection = npgp.sparse.factorize(kernel, [npgp.features.Points(Z)])(X)
        d = projection.residual_variance()  # what Z leaves of the prior variance, (30,)

    :param A: for each block, A_i, (M_i, N); batch + (M_i, N) for functions with a kernel each.
    :param prior_variance: k(x_n, x_n), (N,), or batch + (N,).
    :param left: for each block, the variance left over once it and those before it are projected out, where that was
        computed more exactly than these arrays can tell.
    """

    A: tuple[jax.Array, ...]
    prior_variance: jax.Array
    left: tuple[jax.Array, ...] | None = None

    def with_variances_left(self) -> Projection:
        """The same, with ``left``."""
        left = [self.residual_variance([j <= i for j in range(len(self.A))]) for i in range(len(self.A))]
        return replace(self, left=tuple(left))

    def residual_variance(self, blocks: Sequence[bool] | None = None) -> jax.Array:
        """
        d_n, the variance left over once blocks are projected out, clipped at 0; of the shape of
        the prior variance.

        :param blocks: which blocks to project out; all if omitted.
        """
        kept = _projected_out(self.A, blocks)
        if self.left is not None and kept:
            assert blocks is None or all(blocks[: len(kept)])  # blocks that are kept in the residual come last
            return self.left[len(kept) - 1]
        explained = sum((jnp.sum(jnp.square(A), axis=-2) for A in kept), jnp.zeros_like(self.prior_variance))
        return maximum(self.prior_variance - explained, 0.0)


@pytree
class Projector:
    """
    The factorized inducing blocks of one kernel; made by :func:`factorize`.

    .. code-block:: python

        projector = npgp.sparse.factorize(kernel, [npgp.features.Points(Z)])
        projection = projector(X)

    :param kernel: the kernel.
    :param blocks: the inducing blocks.
    :param cholesky: L_i, (M_i, M_i), for each block; its diagonal, (M_1,), for a first block that says it has no more.
    :param cross: for each block i, the projections A_j(u_i), (M_j, M_i), on the blocks j < i.
    :param jitter: for each block, the relative jitter that its factorization took.
    :param rest: ``(cholesky, cross)`` less their roundings to float32, where they were computed in float64.
    """

    kernel: Kernel
    blocks: tuple[InducingBlock, ...]
    cholesky: tuple[jax.Array, ...]
    cross: tuple[tuple[jax.Array, ...], ...]
    jitter: tuple[jax.Array, ...]
    rest: tuple[tuple[jax.Array, ...], tuple[tuple[jax.Array, ...], ...]] | None = None

    def _exactly(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(self, *arguments)``; in float64 where the factors were computed so."""
        if self.rest is None:
            return function(self, *arguments)

        def of_whole(projector: Any, *arguments: Any) -> Any:
            L, cross = jax.tree.map(jnp.add, (projector.cholesky, projector.cross), projector.rest)
            return function(replace(projector, cholesky=L, cross=cross, rest=None), *arguments)

        return in_double(of_whole, self, *arguments)

    def each(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """A function of this projector and arrays: the one kernel's share of :meth:`npgp.sparse.Members.each`."""
        return function(self, *arrays)

    @property
    def batch_shape(self) -> Shape:
        """Shape of the batch of functions: ``()``, one kernel."""
        return ()

    def expand(self, batch_shape: Shape) -> Any:
        """The same for each function of a batch."""
        return Members(self, (False,) * len(jax.tree.leaves(self)), ()).expand(batch_shape) if batch_shape else self

    def most_jitter(self) -> jax.Array:
        """Largest variance that jitter has added to an inducing value, a scalar."""
        most = jnp.zeros((), self.jitter[0].dtype)
        for L, before, used in zip(self.factors, self.cross, self.jitter, strict=True):
            if L.shape[0]:
                variance = sum((jnp.sum(jnp.square(A), 0) for A in before), jnp.sum(jnp.square(L), 1))
                most = jnp.maximum(most, jnp.max(linalg.jitter_variance(used, variance)))
        return most

    @property
    def factors(self) -> tuple[jax.Array, ...]:
        """L_i as matrices, (M_i, M_i)."""
        return tuple(jnp.diag(L) if L.ndim == 1 else L for L in self.cholesky)

    def __call__(self, X: Rows) -> Projection:
        """
        Project rows on every block: inputs (N, D), or batch + (N, D) of each of several functions; or functionals.
        """
        if not isinstance(X, Functionals) and X.ndim > 2:  # all rows in one
            own = X.shape[:-1]
            together = self(X.reshape(-1, X.shape[-1]))
            A = tuple(jnp.moveaxis(A_i.reshape(-1, *own), 0, -2) for A_i in together.A)
            return Projection(A, together.prior_variance.reshape(own))
        if self.rest is None:
            return self._projection(X)
        return self._exactly(lambda projector, X: projector._projection(X).with_variances_left(), X)

    def _projection(self, X: Rows) -> Projection:
        crosses = [functionals.cross(block, self.kernel, X) for block in self.blocks]
        return Projection(self.whiten(crosses), functionals.variance(self.kernel, X))

    def whiten(self, covariances: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """
        ``A_i = L_i⁻¹ C⁽ⁱ⁾_{u_i ·}`` of anything, from its covariances with the blocks.

        :param covariances: K_{u_i ·}, (M_i, N), for the leading blocks or for all.
        """
        return self._exactly(lambda p, B: linalg.block_solve(p.cholesky, p.cross, B), tuple(covariances))

    def unwhiten(self, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """``L⁻ᵀ`` times values (M_i, N) of every block: the weights of inducing values that they are of."""
        return self._exactly(lambda p, B: linalg.block_solve_transposed(p.cholesky, p.cross, B), tuple(values))

    def residual_covariance(
        self, X: Rows, A: Sequence[jax.Array], blocks: Sequence[bool] | None = None, other: Projected | None = None
    ) -> jax.Array:
        """
        D(X, X), the covariance that is left once blocks are projected out, (N, N); or D(X, X'), (N, N').

        :param X: inputs (N, D) or functionals; or batch + (N, D), for batch + (N, N).
        :param A: their projections, as :meth:`__call__` gives them.
        :param blocks: which blocks to project out; all if omitted.
        :param other: the rows X' and their projections.
        """
        batch = X.shape[:-2] if other is None else np.broadcast_shapes(X.shape[:-2], other[0].shape[:-2])
        if batch:
            return self.expand(batch).residual_covariance(X, A, blocks, other)
        if self.rest is not None:  # rounded projections do not tell a small covariance from a large one's rounding
            return self._exactly(lambda p, X, other: p._residual_covariance(X, blocks, other), X, other and other[0])
        if other is not None:
            D = functionals.covariance(self.kernel, X, other[0])
            for A_i, B_i in zip(_projected_out(A, blocks), _projected_out(other[1], blocks), strict=True):
                D = D - linalg.transposed_matmul(A_i, B_i)
            return D
        D = functionals.covariance(self.kernel, X)
        for A_i in _projected_out(A, blocks):
            D = D - linalg.gram(jnp.swapaxes(A_i, -1, -2))
        return D

    def _residual_covariance(self, X: Rows, blocks: Sequence[bool] | None, other: Rows | None) -> jax.Array:
        between = None if other is None else (other, self(other).A)
        return self.residual_covariance(X, self(X).A, blocks, between)

    def group_covariance(
        self, X: Rows, A: Sequence[jax.Array], groups: Groups, blocks: Sequence[bool] | None = None
    ) -> jax.Array:
        """
        D within groups of rows, (G, g, g); arguments as for :meth:`residual_covariance`.

        :param groups: a partition of the rows.
        """
        if X.shape[:-2]:
            return self.expand(X.shape[:-2]).group_covariance(X, A, groups, blocks)
        if self.rest is not None:
            return self._exactly(lambda p, X, groups: p.group_covariance(X, p(X).A, groups, blocks), X, groups)
        D = functionals.within_groups(self.kernel, X, groups)
        for A_i in _projected_out(A, blocks):
            D = D - groups.gram(A_i)
        return D


@pytree
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

    def _mapped(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """
        A function of each one's projector and rows.

        :param arrays: trees of arrays of rows, such as inputs (N, D) and projections (M, N), or batch + that.
        """
        # Functionals are those of all functions.
        leaves, structure = jax.tree.flatten(arrays, is_leaf=lambda x: isinstance(x, Functionals))
        batch = np.broadcast_shapes(self.batch_shape, *(x.shape[:-2] for x in leaves))
        own = [jnp.broadcast_to(x, batch + x.shape[-2:]) for x in leaves if x.ndim > 2]

        def of_one(projector: Projector, own: Any) -> Any:
            own = iter(own)  # what all have is not mapped, and what is made of it alone is made once
            return function(projector, *jax.tree.unflatten(structure, [next(own) if x.ndim > 2 else x for x in leaves]))

        return self.expand(batch).each(of_one, own)

    def __call__(self, X: Rows) -> Projection:
        """Project rows on every block: functionals or inputs (N, D), for all functions, or batch + (N, D)."""
        return self._mapped(Projector.__call__, X)

    def residual_covariance(
        self, X: Rows, A: Sequence[jax.Array], blocks: Sequence[bool] | None = None, other: Projected | None = None
    ) -> jax.Array:
        """Residual covariance, batch + (N, N) or (N, N'); see :meth:`npgp.sparse.Projector.residual_covariance`."""
        return self._mapped(lambda p, X, A, other: p.residual_covariance(X, A, blocks, other), X, A, other)

    def group_covariance(
        self, X: Rows, A: Sequence[jax.Array], groups: Groups, blocks: Sequence[bool] | None = None
    ) -> jax.Array:
        """Residual covariance within groups, batch + (G, g, g); see :meth:`npgp.sparse.Projector.group_covariance`."""
        return self._mapped(lambda p, X, A: p.group_covariance(X, A, groups, blocks), X, A)


def factorize(
    kernel: Kernel, blocks: Sequence[InducingBlock], jitter: float | None = None, double: bool = True
) -> Projector:
    """
    Factorize inducing blocks, in their order: one Cholesky of each block's residual covariance, none of a first block
    whose features are independent.

    .. code-block:: python

        projector = npgp.sparse.factorize(npgp.RBF(1.0), [npgp.features.Points(Z)])
        projection = projector(X)
        np.testing.assert_array_less(-1e-5, projection.residual_variance())

    :param kernel: the kernel.
    :param blocks: the inducing blocks u_1, …, u_K.
    :param jitter: relative jitter tried first (:func:`npgp.linalg.cholesky`).
    :param double: whether to compute in float64 for a kernel that :attr:`~npgp.kernels.Kernel.wants_double`, on a CPU.
    """
    if double and kernel.wants_double and is_worth_it():
        arrays = in_double(lambda kernel, blocks: _parted(_factorize(kernel, blocks, jitter)), kernel, tuple(blocks))
        return Projector(kernel, tuple(blocks), *arrays)
    return _factorize(kernel, blocks, jitter)


def _parted(projector: Projector) -> tuple[Any, ...]:
    """A projector's arrays: the factors' roundings to float32, the jitter, and what is left of the factors."""
    factors = projector.cholesky, projector.cross
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), factors)
    rest = jax.tree.map(lambda x, r: jax.lax.stop_gradient(x - r), factors, rounded)
    return *rounded, projector.jitter, rest


def _factorize(kernel: Kernel, blocks: Sequence[InducingBlock], jitter: float | None) -> Projector:
    projector = Projector(kernel, (), (), (), ())
    for block in blocks:
        if not projector.blocks and hasattr(block, "gram_diagonal"):
            L = jnp.sqrt(block.gram_diagonal(kernel))
            before: tuple[jax.Array, ...] = ()
            used = jnp.zeros((), L.dtype)
        else:
            column = [covariance(kernel, b, block) for b in projector.blocks]
            gram = block.gram(kernel)
            before, C = linalg.block_row(projector.cholesky, projector.cross, column, gram)
            # Relative to prior variances: the residual of a block that repeats an earlier one is rounding error.
            L, used = linalg.cholesky(C, jitter, scale=linalg.diagonal(gram))
        projector = Projector(
            kernel,
            (*projector.blocks, block),
            (*projector.cholesky, L),
            (*projector.cross, before),
            (*projector.jitter, used),
        )
    return projector


def _is_row(entry: object) -> bool:
    """Return whether an entry of a list is a number or a list of numbers, as in an array written as a list."""
    entries = entry if isinstance(entry, (list, tuple)) else [entry]
    return all(isinstance(value, (int, float)) for value in entries)


def as_blocks(inducing: object) -> tuple[InducingBlock, ...]:
    """Inducing blocks from one block or array (or the rows of one, as lists), or from a list of these."""
    if isinstance(inducing, (list, tuple)) and not inducing:
        raise ValueError("inducing is an empty list; it needs at least one block of inducing features.")
    if isinstance(inducing, (list, tuple)) and not all(map(_is_row, inducing)):
        blocks = tuple(as_block(block, f"inducing[{i}]") for i, block in enumerate(inducing))
    else:
        blocks = (as_block(inducing),)
    if not any(block.size for block in blocks):
        raise ValueError("inducing has no features; at least one block needs at least one.")
    return blocks


# ---------------------------------------------------------------------------------------------------------------
# Functions of a plate with a kernel each: the hyperparameters of all in one kernel, and one projector for each
# function.
#
# The convention is that of NumPyro's plates. A function drawn in plates of shape ``(…, Q, 1)``, the last axis being
# that of rows, may have hyperparameters that begin with these axes, as they have if they are sampled in the same
# plates: a variance (Q, 1), a lengthscale (Q, 1) or, for D input columns, (Q, 1, D). Axes may be 1 where all members
# have the same, and an array without these axes is everybody's. Inducing inputs of each function's own are (…, Q, M,
# D).
#
# A kernel computes one function's covariances, whoever wrote it: it is mapped over the functions (``jax.vmap``), with
# what they share computed once.

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
