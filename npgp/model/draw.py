"""f, the draw of a :class:`~npgp.SparseGP`, and what it computes once for all its uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp import checks
from npgp.features import InducingBlock
from npgp.kernels import Kernel
from npgp.model.latent import Given, Latent, Moments, NoArray, Term
from npgp.sparse.groups import Groups
from npgp.sparse.members import Members, factorize_members
from npgp.sparse.projection import Projection, Projector
from npgp.variational.blocks import BlockNormal, DiagonalNormal, learned_blocks, whitened_mean, whitened_variance
from npgp.variational.joint import JointBlock
from npgp.variational.posterior import Posterior

__all__ = ["Function"]


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
        self._prior = kernel, inducing, plates, jitter
        self._projector: Projector | Members | None = None
        self._projections: list[tuple[jax.Array, Projection]] = []

    @property
    def projector(self) -> Projector | Members:
        """The factorized covariance of the inducing features."""
        if self._projector is None:
            self._projector = factorize_members(*self._prior)
        return self._projector

    def prepare(self) -> None:
        """Factorize now, and not where the projector is first used."""
        _ = self.projector

    def project(self, X: jax.Array) -> Projection:
        """The projection of inputs; that of the very same array is computed once."""
        for seen, projection in self._projections:
            if seen is X:
                return projection
        self._projections.append((X, self.projector(X)))
        return self._projections[-1][1]


class Function(NoArray):
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
        self.name, self.values, self.q, self.guided, self.cache = name, values, q, guided, cache
        self.fixed = False
        #: The component; not of its draws in guides written by hand.
        self.component: Any = None
        self.substituted: str | None = None
        #: The deep GP whose last layer this is.
        self.whole: Any = None
        #: Whether its inputs are draws from their marginals, row by row.
        self.marginal_inputs = False

    def __repr__(self):
        return f"<draw of SparseGP {self.name!r}>"

    def __call__(self, X: ArrayLike) -> Latent:
        """
        f at inputs X of shape (N, D): shape (N,), or (outputs, N) if f was drawn in a plate at dim −2.

        :raises TypeError: for inputs that are not floating.
        :raises ValueError: for inputs of another shape, without rows or with NaN.
        """
        X = checks.inputs(X)
        return Latent((Term(jnp.ones((), X.dtype), self, X),), jnp.zeros((), X.dtype))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the plates that f was drawn in, less the dimension of rows."""
        return jnp.shape(self.values[0])[:-2]

    @property
    def variational(self) -> bool:
        """Whether a guide gave q."""
        return self.q is not None

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

    def shared(self, X: jax.Array) -> jax.Array | None:
        """See :meth:`npgp.model.latent.Draw.shared`."""
        q = self._q
        block = None if q is None else q[0]
        return block.factor_times(self.cache.project(X).A[0]) if isinstance(block, JointBlock) else None

    def moments(self, X: jax.Array, shared: bool = True) -> Moments:
        """Mean, variance from ε, and residual variance at each row."""
        projection, q = self.cache.project(X), self._q
        if q is None:
            mean, none = whitened_mean(projection, self._values), jnp.zeros_like(projection.prior_variance)
            return Moments(mean, none, projection.residual_variance())
        mean = whitened_mean(projection, [block.loc for block in q])
        own = [i for i, block in enumerate(q) if shared or not isinstance(block, JointBlock)]
        parts = Projection(tuple(projection.A[i] for i in own), projection.prior_variance)
        variance = whitened_variance(parts, [q[i] for i in own])
        return Moments(mean, variance, projection.residual_variance(learned_blocks(q)))

    def group_covariance(self, X: jax.Array, groups: Groups) -> jax.Array:
        """The residual's prior covariance within groups of rows, (G, g, g) or batch + that; where a guide gave q."""
        assert self.q is not None
        return self.projector.group_covariance(X, self.cache.project(X).A, groups, learned_blocks(self.q))

    def given(self, X: jax.Array, *, joint: bool, mean_only_in_residual: bool = False) -> Given:
        """``Σ_i A_iᵀ ε_i`` with the drawn ε, and what the blocks leave of the prior."""
        projection, blocks, values = self.cache.project(X), [True] * len(self.values), self._values
        if mean_only_in_residual and (q := self._q) is not None:
            blocks = list(learned_blocks(q))
            values = [value if use else block.loc for value, use, block in zip(values, blocks, q, strict=True)]
        mean = whitened_mean(projection, values)
        if joint:
            residual = self.projector.residual_covariance(X, projection.A, blocks)
        else:
            residual = projection.residual_variance(blocks)
        return Given(mean, residual, projection.prior_variance)

    def posterior(self) -> Posterior:
        """The posterior object of this draw; only where a guide gave q."""
        if self.q is None:
            raise ValueError(f"{self.name} has no approximate posterior here: the model was run without a guide.")
        return Posterior(self.projector, tuple(block.marginal() for block in self._q or ()))

    def posterior_given_values(self) -> Posterior:
        """That of f given the drawn inducing values: q is at them."""
        return Posterior(self.projector, tuple(DiagonalNormal(value, jnp.zeros_like(value)) for value in self._values))


def without_row_dim(block: BlockNormal) -> BlockNormal:
    """Drop the dimension of size 1 that holds the place of rows in a batch of functions."""
    return block.without_last_batch_dim() if block.batch_shape else block
