"""f, the draw of a :class:`~npgp.SparseGP`, and what it computes once for all its uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import checks, functionals, linalg
from npgp.features import InducingBlock
from npgp.functionals.rows import Functionals, Rows, RowsLike, apart, covariance, some, variance
from npgp.kernels import Kernel
from npgp.model.draw import Draw, Given, Moments, Points, Sampled
from npgp.model.latent import Latent, NoArray, Term
from npgp.programs.tracing import current_trace, is_traced
from npgp.sparse.groups import Groups, single
from npgp.sparse.projection import Members, Projection, Projector, factorize_members
from npgp.sparse.ragged import MemberRows
from npgp.variational.blocks import BlockNormal, DiagonalNormal, learned_blocks, whitened_mean, whitened_variance
from npgp.variational.posterior import Posterior


class Cache:
    """
    Factorization and projections of one draw, each computed when first wanted.

    :param kernel: the kernel.
    :param inducing: the blocks of inducing features.
    :param plates: shape of the plates that f is drawn in, with that of rows.
    :param jitter: relative jitter tried first.
    """

    def __init__(
        self, kernel: Kernel, inducing: Sequence[InducingBlock], plates: tuple[int, ...], jitter: float | None
    ):
        self.kernel, self.inducing, self.plates, self.jitter = kernel, inducing, plates, jitter
        self._here = current_trace()
        self._projector: Projector | Members | None = None
        self._projections: list[tuple[Rows, Projection]] = []

    @property
    def projector(self) -> Projector | Members:
        """The factorized covariance of the inducing features."""
        if self._projector is not None:
            return self._projector
        projector = factorize_members(self.kernel, self.inducing, self.plates, self.jitter)
        if current_trace() is self._here:  # nothing may be kept from inside a scan
            self._projector = projector
        return projector

    def prepare(self) -> None:
        """Factorize now, and not where the projector is first used."""
        _ = self.projector

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed yet."""
        return self._projector is None and not self._projections

    def fill(self, rows: Sequence[Rows], projector: Projector | Members, projections: Sequence[Projection]) -> None:
        """Take what was computed elsewhere."""
        self._projector, self._projections = projector, list(zip(rows, projections, strict=True))

    def project(self, X: Rows) -> Projection:
        """The projection of rows; that of the very same ones is computed once."""
        for seen, projection in self._projections:
            if seen is X:
                return projection
        self._projections.append((X, self.projector(X)))
        return self._projections[-1][1]


def compute_together(wanted: Iterable[tuple[Cache, Sequence[Rows]]]) -> None:
    """
    Factorize, and project rows: caches that differ in numbers alone are computed at once, so that a program for many
    draws has this once.

    :param wanted: of each draw, its cache and the rows.
    """
    alike: dict[Any, list[tuple[Cache, list[Rows], list[Any]]]] = {}
    for cache, rows in wanted:
        if not cache.is_empty:
            continue
        rows = [X for i, X in enumerate(rows) if not any(X is before for before in rows[:i])]
        leaves, structure = jax.tree.flatten((cache.kernel, tuple(cache.inducing), rows))
        shapes = tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
        alike.setdefault((structure, shapes, cache.plates, cache.jitter), []).append((cache, rows, leaves))
    for (structure, _, plates, jitter), draws in alike.items():
        if len(draws) > 1:
            arrays = list(zip(*(leaves for *_, leaves in draws), strict=True))
            for (cache, rows, _), made in zip(draws, _computed(structure, arrays, plates, jitter), strict=True):
                cache.fill(rows, *made)


def _computed(
    structure: Any, arrays: Sequence[Sequence[Any]], plates: tuple[int, ...], jitter: float | None
) -> list[tuple[Projector | Members, list[Projection]]]:
    """
    The factorizations and projections of several draws.

    :param structure: of kernel, inducing blocks and rows.
    :param arrays: their leaves; of each, one for each draw.
    """
    one = [all(x is a[0] for x in a) or not (any(map(is_traced, a)) or np.ptp(a, axis=0).any()) for a in arrays]

    def of_draw(own: Sequence[jax.Array]) -> tuple[Projector | Members, list[Projection]]:
        left = iter(own)
        merged = [array[0] if same else next(left) for same, array in zip(one, arrays, strict=True)]
        kernel, inducing, rows = jax.tree.unflatten(structure, merged)
        cache = Cache(kernel, inducing, plates, jitter)
        return cache.projector, [cache.project(X) for X in rows]

    count = len(arrays[0])
    own = [jnp.stack(array) for same, array in zip(one, arrays, strict=True) if not same]
    made, returned = jax.tree.flatten(jax.vmap(of_draw, axis_size=count)(own))
    # Split: of slices each would have a gradient as large as the whole.
    each = zip(*(lax.split(x, (1,) * count) for x in made), strict=True)
    return [jax.tree.unflatten(returned, [x[0] for x in leaves]) for leaves in each]


class Function(Draw, NoArray):
    """
    A draw of a sparse GP: a function of inputs. Made by :meth:`SparseGP.draw`.

    ``f(X)`` is a :class:`~npgp.model.latent.Latent`, which :func:`~npgp.observe` and
    :func:`~npgp.sample` take.

    .. code-block:: python

        with numpyro.handlers.seed(rng_seed=0):
            f = npgp.SparseGP("f", kernel, Z).draw()
        assert isinstance(f, npgp.model.Function)
    """

    meant = "a function, whose values at rows are f(X)"

    def __init__(
        self,
        name: str,
        values: Sequence[jax.Array],
        q: tuple[BlockNormal, ...] | None,
        guided: bool,
        cache: Cache,
    ):
        super().__init__(name, q, guided)
        self.values, self.cache = values, cache
        #: The component; not of its draws in guides written by hand.
        self.component: Any = None
        #: Chooses its inducing points from the first rows, where only their number is known.
        self.choose: Callable[[Function, RowsLike], None] | None = None
        #: The deep GP whose last layer this is.
        self.whole: Any = None

    def __repr__(self):
        return f"<draw of SparseGP {self.name!r}>"

    def __call__(self, X: RowsLike) -> Latent:
        """
        f at inputs X of shape (N, D): shape (N,), or (outputs, N) if f was drawn in a plate at dim −2. Functions of a
        plate may have inputs each, X of shape (outputs, N, D). Or f under linear functionals
        (:class:`npgp.functionals.Functionals`).

        :raises TypeError: for inputs that are not floating.
        :raises ValueError: for inputs of another shape, without rows or with NaN.
        """
        if not isinstance(X, Functionals):
            X = checks.inputs_of(self.name, X, self.batch_shape)
        if self.choose is not None:
            choose, self.choose = self.choose, None
            choose(self, X)
        return Latent((Term(jnp.ones((), X.dtype), self, X),), np.zeros((), X.dtype))

    def average(self, points: ArrayLike, weights: ArrayLike | None = None) -> Latent:
        """
        Averages of f over points, or other weighted sums: areas, bins, integrals by the caller's quadrature.

        .. code-block:: python

            bins = jnp.linspace(0.0, 1.0, 12).reshape(3, 4, 1)  # three bins, four points each
            with numpyro.handlers.seed(rng_seed=0):
                f = npgp.SparseGP("f", kernel, bins[:, 0]).draw()
                means = npgp.sample("means", f.average(bins))  # (3,)

        :param points: as for :func:`npgp.functionals.average`.
        :param weights: likewise.
        """
        return self(functionals.average(points, weights))

    def derivative(self, X: ArrayLike, dim: int = 0) -> Latent:
        """
        Slopes of f, ``∂f/∂x_dim``, at inputs.

        .. code-block:: python

            with numpyro.handlers.seed(rng_seed=0):
                f = npgp.SparseGP("f", kernel, Z).draw()
                slopes = npgp.sample("slopes", f.derivative(X))  # (30,)

        :param X: inputs, (N, D).
        :param dim: the input column.
        :raises ValueError: for a column that X does not have; where slopes are used, for a kernel whose functions have
            none.
        """
        return self(functionals.derivative(X, dim))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return jnp.shape(self.values[0])[:-2]

    @property
    def projector(self) -> Projector | Members:
        """The factorized covariance of the inducing features."""
        return self.cache.projector

    @property
    def _values(self) -> list[jax.Array]:
        """ε of each block; batch + (M_i,), without the dimension of size 1 where rows go."""
        return [jnp.reshape(value, (*self.batch_shape, jnp.shape(value)[-1])) for value in self.values]

    @property
    def _q(self) -> tuple[BlockNormal, ...] | None:
        """q(ε), likewise."""
        return None if self.q is None else tuple(without_row_dim(block) for block in self.q)

    def chosen(self, rows: MemberRows) -> Function:
        return ChosenFunction(self, rows) if self.batch_shape else self

    def project(self, X: Any) -> Projection:
        """The projection of rows on the inducing features."""
        return self.cache.project(X)

    def shared(self, X: Any) -> jax.Array | None:
        q = self._q
        block = None if q is None else q[0]
        return block.factor_times(self.project(X).A[0]) if block is not None and block.joint else None

    def _moments(self, X: Any, shared: bool) -> Moments:
        projection, q = self.project(X), self._q
        if q is None:
            mean, none = whitened_mean(projection, self._values), jnp.zeros_like(projection.prior_variance)
            return Moments(mean, none, projection.residual_variance())
        mean = whitened_mean(projection, [block.loc for block in q])
        own = [i for i, block in enumerate(q) if shared or not block.joint]
        parts = Projection(tuple(projection.A[i] for i in own), projection.prior_variance)
        variance = whitened_variance(parts, [q[i] for i in own])
        return Moments(mean, variance, projection.residual_variance(learned_blocks(q)))

    def _group_covariance(self, X: Any, groups: Groups) -> jax.Array:
        assert self.q is not None
        return self.projector.group_covariance(X, self.cache.project(X).A, groups, learned_blocks(self.q))

    def residual_blocks(self, mean_only_in_residual: bool) -> tuple[bool, ...]:
        if mean_only_in_residual and self.q is not None:
            return tuple(learned_blocks(self.q))
        return (True,) * len(self.values)

    def points(self, X: Any) -> Points:
        return Points(X, tuple(self.project(X).A))

    def residual_between(self, before: Points, after: Points, blocks: tuple[bool, ...]) -> jax.Array:
        return self.projector.residual_covariance(before.X, before.A, blocks, (after.X, after.A))

    def _given(self, X: Any, joint: bool, mean_only_in_residual: bool) -> Given:
        # ``Σ_i A_iᵀ ε_i`` with the drawn ε, and what blocks leave of the prior.
        projection, values = self.project(X), self._values
        blocks = self.residual_blocks(mean_only_in_residual)
        if mean_only_in_residual and (q := self._q) is not None:
            values = [value if use else block.loc for value, use, block in zip(values, blocks, q, strict=True)]
        mean = whitened_mean(projection, values)
        if joint:
            residual = self._residual_covariance(X, projection, blocks)
        else:
            residual = projection.residual_variance(blocks)
        return Given(mean, residual, projection.prior_variance)

    def _residual_covariance(self, X: Any, projection: Projection, blocks: Sequence[bool]) -> jax.Array:
        return self.projector.residual_covariance(X, projection.A, blocks)

    def posterior(self) -> Posterior:
        """The posterior object of this draw; only where a guide gave q."""
        if self.q is None:
            raise ValueError(f"{self.name} has no approximate posterior here: the model was run without a guide.")
        return Posterior(self.projector, tuple(block.marginal() for block in self._q or ()))

    def posterior_given_values(self) -> Posterior:
        """That of f given the drawn inducing values: q is at them."""
        return Posterior(self.projector, tuple(DiagonalNormal(value, jnp.zeros_like(value)) for value in self._values))


class ChosenFunction(Function):
    """
    Of functions in a plate, one for each row: what ``f(X)[group, row]`` is of. Means, variances and what else is
    computed with a member's own matrices, is computed by parts of the rows (:class:`~npgp.sparse.ragged.MemberRows`).

    :param source: the functions.
    :param rows: the only rows that it has values at.
    """

    def __init__(self, source: Function, rows: MemberRows):
        vars(self).update(vars(source))
        self._source, self._rows = source, rows

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return ()

    @property
    def _values(self) -> list[jax.Array]:
        """ε of each block, of each part's function; (C, M_i)."""
        return [value[self._rows.places.members] for value in self._source._values]

    @property
    def _q(self) -> tuple[BlockNormal, ...] | None:
        q = self._source._q
        return None if q is None else tuple(block.take(self._rows.places.members) for block in q)

    def project(self, X: Any) -> Projection:
        """By parts: A_i is (C, M_i, B)."""
        return self._projection

    @cached_property
    def _projection(self) -> Projection:
        rows, projector = self._rows, self.projector
        if projector.batch_shape:
            return self._members(rows.places.members).each(lambda p, X: p(X), some(rows.inputs, rows.places.parts.rows))
        # One kernel for all: at the rows of X, or at those that are chosen, if these are fewer.
        few = rows.X.ndim == 2 and rows.X.shape[0] <= rows.shape[0]
        projection = self.cache.project(rows.X) if few else projector(rows.inputs)

        def by_part(x):
            return rows.places.parts.gather(x[..., rows.places.row] if few else x)

        A = tuple(jnp.moveaxis(by_part(A_i), 0, -2) for A_i in projection.A)
        return Projection(A, *jax.tree.map(by_part, (projection.prior_variance, projection.left)))

    def _members(self, members: jax.Array) -> Members:
        """The functions of rows, by their numbers."""
        return self.projector.expand(self._source.batch_shape).take(members)

    def _by_row(self, values: jax.Array) -> jax.Array:
        """(…, N), from (C, …, B)."""
        return self._rows.places.parts.scatter(jnp.moveaxis(values, 0, -2))

    def shared(self, X: Any) -> jax.Array | None:
        root = super().shared(X)
        return None if root is None else self._by_row(root)

    def _moments(self, X: Any, shared: bool) -> Moments:
        return Moments(*map(self._by_row, super()._moments(X, shared)))

    def apart(self, sampled: Sampled | None = None) -> ChosenFunction:
        other = copy.copy(self)
        other._source = self._source.apart(sampled)
        return other

    def points(self, X: Any) -> Points:
        return Points(self._rows.inputs, tuple(map(self._by_row, self._projection.A)), self._rows.places.group)

    def residual_between(self, before: Points, after: Points, blocks: tuple[bool, ...]) -> jax.Array:
        """The residual's covariance between rows, (n, N): none between different functions."""
        assert before.group is not None
        # Row by row with its function's kernel; what is another function's is dropped below.
        X = apart(before.X)
        D = self._members(before.group).each(lambda p, x: covariance(p.kernel, some(x, None), after.X)[0], X)
        for A, B, use in zip(before.A, after.A, blocks, strict=True):
            D = D - linalg.transposed_matmul(A, B) if use else D
        return jnp.where(before.group[:, None] == after.group, D, 0.0)

    def _given(self, X: Any, joint: bool, mean_only_in_residual: bool) -> Given:
        mean, residual, prior, _ = super()._given(X, joint, mean_only_in_residual)
        return Given(self._by_row(mean), residual if joint else self._by_row(residual), self._by_row(prior))

    def _residual_covariance(self, X: Any, projection: Projection, blocks: Sequence[bool]) -> jax.Array:
        return self._within(single(X.shape[0]), blocks)[0]

    def _group_covariance(self, X: Any, groups: Groups) -> jax.Array:
        assert self.q is not None
        return self._within(groups, learned_blocks(self.q))

    def _within(self, groups: Groups, blocks: Sequence[bool]) -> jax.Array:
        X, member = some(self._rows.inputs, groups.rows), groups.gather(self._rows.places.group)
        # Row by row with its function's kernel; what is another function's is dropped below.
        members, number = self._members(member), jnp.broadcast_to(jnp.arange(groups.count)[:, None], member.shape)

        def with_group(p: Projector, x: Rows, group: jax.Array) -> jax.Array:
            return covariance(p.kernel, some(x, None), some(X, 0 if groups.count == 1 else group))[0]

        own = members.each(lambda p, x: variance(p.kernel, some(x, None)), X)
        D = jnp.where(jnp.eye(groups.size, dtype=bool), own, members.each(with_group, X, number))
        for A, use in zip(self._projection.A, blocks, strict=True):
            D = D - groups.gram(self._by_row(A)) if use else D
        return jnp.where(member[:, :, None] == member[:, None, :], D, 0.0)


def without_row_dim(block: BlockNormal) -> BlockNormal:
    """Drop the dimension of size 1 that holds the place of rows in a batch of functions."""
    return block.without_last_batch_dim() if block.batch_shape else block
