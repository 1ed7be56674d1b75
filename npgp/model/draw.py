"""
A draw of f: what statements about its values at rows use of it, and what sampled values tell about its others.

Statements of one draw are of one function. One that samples f at rows makes its residual there ``r = L z`` of whitened
noise z. That is one inducing block more, whose whitened values are z: at other rows it explains ``A_sᵀ z`` of the
residual, with ``A_s = L⁻¹ D(X_s, X)``, and leaves the covariance ``D(X, X) − A_sᵀ A_s``. The factor grows by a block
with each statement.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from npgp import linalg
from npgp.functionals.rows import Functionals, Rows, as_functionals, as_rows
from npgp.programs.backend import maximum
from npgp.programs.tracing import current_trace
from npgp.sparse.groups import Groups
from npgp.sparse.ragged import MemberRows


class Moments(NamedTuple):
    """
    Row by row: mean, variance that comes from ε, and the residual's prior variance; (..., N), or (N,) for what is the
    same for all functions.
    """

    mean: jax.Array
    variance: jax.Array
    residual: jax.Array


class Given(NamedTuple):
    """
    f at rows, given its drawn inducing values.

    :param mean: the mean, (..., N).
    :param residual: what is left: variances (N,), or the covariance (N, N) if it is wanted jointly over rows; batch +
        that for functions with a kernel each.
    :param prior: f's own variance, (N,), likewise.
    :param weights: the rows' projections on values that were sampled before, (..., n, N), which mean and residual are
        given; ``None`` if there were none.
    """

    mean: jax.Array
    residual: jax.Array
    prior: jax.Array
    weights: jax.Array | None = None


class Points(NamedTuple):
    """
    Rows, with what the residual's covariances between them and others need.

    :param X: inputs, (..., n, D), or functionals.
    :param A: their projections on each block, (..., M_i, n).
    :param group: the function of a plate that each row is of, (n,); ``None`` for rows of all functions.
    """

    X: Rows
    A: tuple[jax.Array, ...] = ()
    group: jax.Array | None = None

    def and_then(self, other: Points) -> Points:
        """These rows, and others after them."""
        A = tuple(_side_by_side([a, b], -1) for a, b in zip(self.A, other.A, strict=True))
        group = None if self.group is None or other.group is None else jnp.concatenate([self.group, other.group])
        if isinstance(self.X, Functionals) or isinstance(other.X, Functionals):
            before, after = (as_functionals(as_rows(points.X)) for points in (self, other))
            return Points(before.followed_by(after), A, group)
        return Points(_side_by_side([self.X, other.X], -2), A, group)


class Sampled(NamedTuple):
    """
    The residual at rows where it has been sampled, ``L z``.

    :param points: the rows.
    :param factor: L, (..., n, n).
    :param z: whitened noise, (..., n).
    :param blocks: the blocks of inducing features that the residual does not contain.
    :param present: rows that have a value, (..., n); all if ``None``.
    """

    points: Points
    factor: jax.Array
    z: jax.Array
    blocks: tuple[bool, ...]
    present: jax.Array | None = None


class Draw:
    """
    A draw of f, whose values at rows are conditioned on those that :func:`npgp.sample` has sampled before.

    Rows are whatever the component makes of inputs X (N, D), something whose ``shape`` is that of X.

    :param name: what messages call f.
    :param q: of its inducing values, where a guide gave it.
    :param guided: whether this is a guide.
    """

    #: Shape of the plates that f was drawn in, less the dimension of rows.
    batch_shape: Any = ()
    #: Whether ``do`` or ``condition`` gave inducing values.
    fixed = False
    #: The site of inducing values that ``substitute`` gave, if it did.
    substituted: str | None = None
    #: Whether the inputs of rows are draws from their marginals, row by row.
    marginal_inputs = False
    #: Values sampled so far; those of the source where a draw is chosen from functions in a plate.
    sampled: Sampled | None = None
    _source: Any = None

    def __init__(self, name: str, q: Any, guided: bool):
        self.name, self.q, self.guided = name, q, guided
        #: Where it was drawn: values sampled inside a loop of JAX, beyond that, are unknown to later ones.
        self.here = current_trace()

    @property
    def source(self) -> Any:
        """The draw itself; of chosen rows of functions in a plate, the draw of these functions."""
        return self if self._source is None else self._source

    @property
    def variational(self) -> bool:
        """Whether a guide gave q."""
        return self.q is not None

    def chosen(self, rows: MemberRows) -> Draw:
        """Of functions in a plate, one function for each row: a draw with values (N,)."""
        return self

    def shared(self, rows: Any) -> jax.Array | None:
        """
        A root of f's covariance with others whose q is the same one, (K, N): products of its columns with those of
        another draw's are covariances. ``None`` if q is f's own.
        """
        return None

    def _moments(self, rows: Any, shared: bool) -> Moments:
        raise NotImplementedError

    def _given(self, rows: Any, joint: bool, mean_only_in_residual: bool) -> Given:
        raise NotImplementedError

    def _group_covariance(self, rows: Any, groups: Groups) -> jax.Array:
        raise NotImplementedError

    def residual_blocks(self, mean_only_in_residual: bool) -> tuple[bool, ...]:
        """The blocks that the residual does not contain."""
        raise NotImplementedError

    def points(self, rows: Any) -> Points:
        """Rows as :meth:`residual_between` takes them."""
        raise NotImplementedError

    def residual_between(self, before: Points, after: Points, blocks: tuple[bool, ...]) -> jax.Array:
        """The residual's covariance between rows, (..., n, N)."""
        raise NotImplementedError

    def apart(self, sampled: Sampled | None = None) -> Self:
        """The same function, conditioned on other values of it, or on none."""
        other = copy.copy(self)
        other.sampled = sampled
        return other

    def weights(self, rows: Any, blocks: tuple[bool, ...] | None = None) -> jax.Array | None:
        """
        ``A_s``, (..., n, N): the rows' projections on sampled values; ``None`` where there are none.

        :param blocks: the blocks that are not in the residual that is to be sampled.
        :raises ValueError: for another residual than the sampled one, or another choice of functions.
        """
        source = self.source
        sampled = source.sampled
        if sampled is None:
            return None
        if blocks is not None and blocks != sampled.blocks:
            raise ValueError(
                f"{source.name} has mean-only blocks and is sampled with different conditionals, of which one counts "
                "these blocks to the residual: give all npgp.sample statements of it the same conditional."
            )
        points = self.points(rows)
        if (points.group is None) != (sampled.points.group is None):
            raise ValueError(
                f"{source.name} is sampled at rows of all its functions, and used at chosen ones, f(X)[group, row], or "
                "the other way round: npgp.sample f(X) once and index that array, or write earlier=False."
            )
        D = self.residual_between(sampled.points, points, sampled.blocks)
        if sampled.present is not None:
            D = jnp.where(sampled.present[..., :, None], D, 0.0)
        L = sampled.factor
        return linalg.solve_lower(L, jnp.broadcast_to(D, (*L.shape[: max(L.ndim - D.ndim, 0)], *D.shape)))

    def _explained(self, weights: jax.Array) -> jax.Array:
        """What sampled values say of the residual at rows, (..., N)."""
        return linalg.matmul(self.source.sampled.z[..., None, :], weights)[..., 0, :]

    def moments(self, rows: Any, shared: bool = True) -> Moments:
        """
        Mean, variance from the inducing values, and residual variance at each row.

        :param shared: whether the variance includes that of :meth:`shared`.
        """
        moments, weights = self._moments(rows, shared), self.weights(rows)
        if weights is None:
            return moments
        left = maximum(moments.residual - jnp.sum(jnp.square(weights), axis=-2), 0.0)
        return Moments(moments.mean + self._explained(weights), moments.variance, left)

    def given(self, rows: Any, *, joint: bool, mean_only_in_residual: bool = False) -> Given:
        """
        f given the drawn inducing values.

        :param joint: whether the residual is wanted jointly over rows.
        :param mean_only_in_residual: take inducing features whose variance q leaves at the prior's at q's mean, and
            leave their variance to the residual.
        """
        given = self._given(rows, joint, mean_only_in_residual)
        weights = self.weights(rows, self.residual_blocks(mean_only_in_residual))
        if weights is None:
            return given
        mean, residual, prior, _ = given
        if joint:
            residual = residual - linalg.transposed_matmul(weights, weights)
        else:
            residual = maximum(residual - jnp.sum(jnp.square(weights), axis=-2), 0.0)
        return Given(mean + self._explained(weights), residual, prior, weights)

    def group_covariance(self, rows: Any, groups: Groups) -> jax.Array:
        """The residual's prior covariance within groups of rows, (G, g, g) or batch + that; where a guide gave q."""
        covariance, weights = self._group_covariance(rows, groups), self.weights(rows)
        if weights is None:
            return covariance
        gram = groups.gram
        for _ in weights.shape[:-2]:
            gram = jax.vmap(gram)
        return covariance - gram(weights)

    def remember(
        self, rows: Any, root: jax.Array, weights: jax.Array | None, z: jax.Array, blocks: tuple[bool, ...]
    ) -> None:
        """
        Condition later values on those sampled at rows.

        :param root: of the residual's covariance given what was sampled before, (..., N, N).
        :param weights: :meth:`weights` of the rows.
        :param z: whitened noise, (..., N).
        :param blocks: as of :class:`Sampled`.
        """
        before, points = self.source.sampled, self.points(rows)
        if before is None or weights is None:
            self.source.sampled = Sampled(points, root, z, blocks)
            return
        above = jnp.zeros((*before.factor.shape[:-1], root.shape[-1]), root.dtype)
        upper = _side_by_side([before.factor, above], -1)
        factor = _side_by_side([upper, _side_by_side([linalg.transposed(weights), root], -1)], -2)
        z = _side_by_side([before.z, z], -1, own=1)
        self.source.sampled = Sampled(before.points.and_then(points), factor, z, blocks)


def window(function: Draw, rows: Any, values: jax.Array, mean_only_in_residual: bool) -> Sampled:
    """
    The residual at rows from values of f there; where they are NaN there is none yet.

    :param function: the draw.
    :param rows: the rows, as it takes them.
    :param values: (..., W).
    :param mean_only_in_residual: as of :meth:`Draw.given`.
    """
    present = ~jnp.isnan(values)
    f = function.apart().given(rows, joint=True, mean_only_in_residual=mean_only_in_residual)
    both = present[..., :, None] & present[..., None, :]
    scale = jnp.broadcast_to(f.prior, both.shape[:-1])
    D = jnp.where(both, f.residual, scale[..., None] * jnp.eye(values.shape[-1], dtype=f.residual.dtype))
    L = linalg.cholesky(D, scale=scale)[0]
    r = jnp.where(present, jnp.where(present, values, 0.0) - f.mean, 0.0)
    z = linalg.solve_lower(L, r[..., None])[..., 0]
    return Sampled(function.points(rows), L, z, function.residual_blocks(mean_only_in_residual), present)


def _side_by_side(arrays: list[jax.Array], axis: int, own: int = 2) -> jax.Array:
    """Concatenate matrices, or vectors with ``own=1``, whose leading axes broadcast."""
    batch = np.broadcast_shapes(*(x.shape[: x.ndim - own] for x in arrays))
    return jnp.concatenate([jnp.broadcast_to(x, (*batch, *x.shape[x.ndim - own :])) for x in arrays], axis)
