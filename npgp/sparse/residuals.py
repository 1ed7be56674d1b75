"""
The residual r at the rows of the data: what its prior is, and what Gaussian pseudo-observations make of it.

Given one pseudo-observation of precision λ_n in each row, Λ = diag(λ), a group of rows with prior covariance D has the
covariance ``C = (D⁻¹ + Λ)⁻¹`` and its share of the ELBO the cost ``½ log|I + Λ^½ D Λ^½|`` (docs/theory.md, section 2).
Rows are groups of one, of neighbors, or all together; nothing else of the library depends on which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from npgp import linalg
from npgp.functionals.rows import Rows
from npgp.kernels import Kernel, as_kernel
from npgp.programs.backend import maximum
from npgp.pytrees import pytree
from npgp.sparse.groups import Groups
from npgp.sparse.projection import Members, Projection, Projector, as_blocks, factorize


@runtime_checkable
class Residual(Protocol):
    """
    The residual's prior at N rows.

    .. code-block:: python

        projector = npgp.sparse.factorize(kernel, [npgp.features.Points(Z)])
        # A RowResidual.
        residual = npgp.sparse.residual_of(projector, X, projector(X), [True], None)
        # Given a pseudo-observation of precision 1 in each row.
        left, cost = residual.given(jnp.ones(30))
    """

    @property
    def variance(self) -> jax.Array:
        """d_n, (..., N)."""
        ...

    def cost(self, precision: jax.Array) -> jax.Array:
        """
        ``½ log|I + Λ^½ D Λ^½|``, as a sum over rows.

        :param precision: λ_n ≥ 0, (..., N).
        :return: each row's share, (..., N); where all rows of a group have λ = 0, the share is 0.
        """
        ...

    def given(self, precision: jax.Array) -> tuple[jax.Array, jax.Array]:
        """
        The variance that is left given pseudo-observations, and their cost.

        :param precision: λ_n ≥ 0, (..., N).
        :return: ``ĉ_n = [(D⁻¹ + Λ)⁻¹]_nn`` and :meth:`cost`, each (..., N).
        """
        ...

    def part(self, take: Callable[..., Any]) -> Residual:
        """
        That of some of the outputs.

        :param take: ``take(array, axis)`` is their share of an array with outputs along this axis.
        """
        ...

    def only(self, present: jax.Array) -> Residual:
        """
        Without that of other rows, which is then 0.

        :param present: True for the rows that keep it, (..., N).
        """
        ...


def residual_of(
    projector: Projector | Members, X: Rows, projection: Projection, learned: Sequence[bool], groups: Groups | None
) -> Residual:
    """
    The residual at rows X (N, D) that the learned blocks leave: row by row, or within groups.

    .. code-block:: python

        projector = npgp.sparse.factorize(kernel, [npgp.features.Points(Z)])
        # A RowResidual.
        residual = npgp.sparse.residual_of(projector, X, projector(X), [True], None)
        # Given a pseudo-observation of precision 1 in each row.
        left, cost = residual.given(jnp.ones(30))

    :param projector: the factorized inducing blocks.
    :param X: the rows: inputs, or functionals.
    :param projection: the rows' projection.
    :param learned: which blocks q has learned the covariances of.
    :param groups: a partition of the rows, if not row by row.
    """
    if groups is None:
        return RowResidual(projection.residual_variance(learned))
    return GroupResidual(projector.group_covariance(X, projection.A, groups, learned), groups)


@pytree
class RowResidual:
    """
    Rows one by one: ``ĉ_n = d_n / (1 + λ_n d_n)``.

    :param variance: d_n, (..., N).
    """

    variance: jax.Array

    def cost(self, precision: jax.Array) -> jax.Array:
        return 0.5 * jnp.log1p(precision * self.variance)

    def part(self, take: Callable[..., Any]) -> RowResidual:
        return RowResidual(take(self.variance))

    def only(self, present: jax.Array) -> RowResidual:
        return RowResidual(jnp.where(present, self.variance, 0.0))

    def given(self, precision: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.variance / (1.0 + precision * self.variance), self.cost(precision)


@pytree
class GroupResidual:
    """
    Rows in groups of neighbors.

    :param covariance: D_gg for each group, (..., G, g, g).
    :param groups: which rows these are.
    """

    covariance: jax.Array
    groups: Groups

    @property
    def variance(self) -> jax.Array:
        return self.groups.scatter(self._variance)

    def part(self, take: Callable[..., Any]) -> GroupResidual:
        return GroupResidual(take(self.covariance, axis=-4), self.groups)

    def only(self, present: jax.Array) -> GroupResidual:
        present = self.groups.gather(present)
        both = present[..., :, None] & present[..., None, :]
        return GroupResidual(jnp.where(both, self.covariance, 0.0), self.groups)

    @property
    def _variance(self) -> jax.Array:
        return maximum(linalg.diagonal(self.covariance), 0.0)

    def roots(self, precision: jax.Array) -> jax.Array:
        """``λ_n^½`` in the layout of groups, 0 in places that are empty; (..., G, g)."""
        precision = self.groups.gather(precision)
        positive = self.groups.mask & (precision > 0.0)
        return jnp.where(positive, jnp.sqrt(jnp.where(positive, precision, 1.0)), 0.0)

    def _scaled(self, root: jax.Array) -> jax.Array:
        """``I + Λ^½ D Λ^½`` for each group, (..., G, g, g)."""
        scaled = root[..., :, None] * self.covariance * root[..., None, :]
        return scaled + jnp.eye(scaled.shape[-1], dtype=scaled.dtype)

    def factor(self, root: jax.Array) -> jax.Array:
        """Its Cholesky factor."""
        return linalg.cholesky(self._scaled(root), jitter=0.0)[0]

    def _shared_out(self, cost: jax.Array, root: jax.Array) -> jax.Array:
        """Each group's cost (..., G) in equal parts for the rows that have a precision; the others may be masked."""
        positive = (root > 0.0).astype(root.dtype)
        part = positive / jnp.maximum(jnp.sum(positive, axis=-1, keepdims=True), 1.0)
        return self.groups.scatter(cost[..., None] * part)

    def cost(self, precision: jax.Array) -> jax.Array:
        root = self.roots(precision)
        return self._shared_out(_half_log_det(self._scaled(root)), root)

    def given(self, precision: jax.Array) -> tuple[jax.Array, jax.Array]:
        root = self.roots(precision)
        factor, together = _factor_or_diagonal(self._scaled(root))
        kept = jnp.maximum(together[..., None, None], jnp.eye(root.shape[-1], dtype=root.dtype))
        half = linalg.solve_lower(factor, root[..., :, None] * kept * self.covariance)
        left = self._variance - jnp.sum(jnp.square(half), axis=-2)
        # The factor's derivative is wanted for what is left anyway.
        cost = self._shared_out(0.5 * linalg.log_determinant(factor), root)
        return self.groups.scatter(maximum(left, 0.0)), cost


@jax.custom_jvp
def _factor_or_diagonal(B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """
    The Cholesky factor of ``I + Λ^½ D Λ^½`` (..., g, g), and 1 for each group (...). Where rounding of D outweighs the
    identity it is one with jitter; or, if that costs more, the diagonal's, which is what rows have one by one, and 0.

    Either costs no less than B would: ``log|B| ≤ Σ_n log B_nn`` (Hadamard).
    """
    L = linalg.plain_cholesky(B)
    found = jnp.isfinite(L[..., -1, -1])  # a factor that failed is NaN throughout

    def mended() -> tuple[jax.Array, jax.Array]:
        identity = jnp.eye(B.shape[-1], dtype=B.dtype)
        jittered, _ = linalg.cholesky(jnp.where(found[..., None, None], identity, B))
        diagonal = maximum(linalg.diagonal(B), 1.0)
        lower = linalg.log_determinant(jittered) <= jnp.sum(jnp.log(diagonal), axis=-1)  # which no NaN is
        chosen = jnp.where(lower[..., None, None], jittered, jnp.sqrt(diagonal)[..., None] * identity)
        return jnp.where(found[..., None, None], L, chosen), (found | lower).astype(B.dtype)

    return lax.cond(jnp.all(found), lambda: (L, jnp.ones_like(found, B.dtype)), mended)


@_factor_or_diagonal.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    L, together = _factor_or_diagonal(*primals)
    return (L, together), (linalg.factor_tangent(L, tangents[0]), jnp.zeros_like(together))


@jax.custom_jvp
def _half_log_det(B: jax.Array) -> jax.Array:
    """``½ log|B|`` of positive definite matrices (..., g, g)."""
    return 0.5 * linalg.log_determinant(_factor_or_diagonal(B)[0])


@_half_log_det.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    # ½ tr(B⁻¹ dB): one inverse, where differentiating the factor takes several solves.
    (B,), (dB,) = primals, tangents
    L, _ = _factor_or_diagonal(B)
    inverse_factor = linalg.solve_lower(L, jnp.broadcast_to(jnp.eye(B.shape[-1], dtype=B.dtype), B.shape))
    inverse = linalg.matmul(jnp.swapaxes(inverse_factor, -1, -2), inverse_factor)
    return 0.5 * linalg.log_determinant(L), 0.5 * jnp.sum(inverse * dB, axis=(-2, -1))


@pytree
class LowRankKernel(Kernel):
    """
    The covariance of what inducing features explain, ``Σ_i A_i(x)ᵀ A_i(x')``; made by :func:`split_kernel`.

    :param projector: the factorized inducing features.
    """

    projector: Projector

    matrix_fields: ClassVar[tuple[str, ...]] = ("projector",)

    def _projections(self, X: jax.Array) -> jax.Array:
        return jnp.concatenate(self.projector(X).A)

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        A = self._projections(X)
        return linalg.gram(A.T) if X2 is None else linalg.matmul(A.T, self._projections(X2))

    def diag(self, X: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(self._projections(X)), axis=0)

    @property
    def differentiable(self) -> bool:
        return self.projector.kernel.differentiable

    @property
    def wants_double(self) -> bool:
        return self.projector.kernel.wants_double

    def level_columns(self, columns: int) -> frozenset[int]:
        return self.projector.kernel.level_columns(columns)


@pytree
class ResidualKernel(LowRankKernel):
    """
    The covariance of what inducing features leave, ``k(x, x') − Σ_i A_i(x)ᵀ A_i(x')``; made by :func:`split_kernel`.

    :param projector: the factorized inducing features.
    """

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        return self.projector.kernel(X, X2) - super().__call__(X, X2)

    def diag(self, X: jax.Array) -> jax.Array:
        return maximum(self.projector.kernel.diag(X) - super().diag(X), 0.0)


def split_kernel(kernel: Kernel, inducing: Any, *, jitter: float | None = None) -> tuple[LowRankKernel, ResidualKernel]:
    """
    Split a GP into two independent ones whose sum it is: of what inducing features explain, and of what they leave. So
    each may have an approximation of its own, such as neighbors for what is left (VIF; Gyger, Furrer & Sigrist 2025)
    under any likelihood:

    .. code-block:: python

        smooth, rough = npgp.sparse.split_kernel(kernel, Z)
        before = npgp.neighbors.nearest_before(X, 5, kernel=kernel, inducing=Z)


        def counts(X, y=None):
            f = npgp.SparseGP("f", smooth, Z).draw()
            r = npgp.VNNGP("r", rough, X, before).draw()
            values = f(X) + r(X, neighbors=np.arange(len(X))[:, None])
            with numpyro.plate("data", len(X)):
                npgp.observe("y", values, npgp.Poisson(), obs=y)

    :param kernel: the kernel.
    :param inducing: Z of shape (M, D), a block of features, or a list of these.
    :param jitter: relative jitter tried first.
    :return: the kernel of low rank, and that of the residual.
    """
    projector = factorize(as_kernel(kernel), as_blocks(inducing), jitter)
    return LowRankKernel(projector), ResidualKernel(projector)
