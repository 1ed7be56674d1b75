"""f, the draw of a :class:`~npgp.SparseGP`, and what it computes once for all its uses."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp import checks
from npgp.features import InducingBlock
from npgp.kernels import Kernel
from npgp.model.latent import Given, Latent, Moments, NoArray, Term
from npgp.sparse.groups import Groups
from npgp.sparse.projection import Projection, Projector, factorize
from npgp.variational.blocks import BlockNormal, DiagonalNormal, learned_blocks, whitened_mean, whitened_variance
from npgp.variational.posterior import Posterior

__all__ = ["Function"]


class Cache:
    """
    Factorization and projections of one draw, each computed when first wanted.

    :param kernel: the kernel.
    :param inducing: the blocks of inducing features.
    :param jitter: relative jitter tried first.
    """

    def __init__(self, kernel: Kernel, inducing: Sequence[InducingBlock], jitter: float | None):
        self._prior = kernel, inducing, jitter
        self._projector: Projector | None = None
        self._projections: list[tuple[jax.Array, Projection]] = []

    @property
    def projector(self) -> Projector:
        """The factorized covariance of the inducing features."""
        if self._projector is None:
            self._projector = factorize(*self._prior)
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
        self.substituted: str | None = None

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
    def projector(self) -> Projector:
        """The factorized covariance of the inducing features."""
        return self.cache.projector

    def _rows(self, value: jax.Array, projection: Projection) -> jax.Array:
        # ε carries a dimension of size 1 where rows go.
        return value.reshape(self.batch_shape + projection.prior_variance.shape)

    def moments(self, X: jax.Array) -> Moments:
        """Mean, variance from ε, and residual variance at each row."""
        projection = self.cache.project(X)
        if self.q is None:
            mean = whitened_mean(projection, self.values)
            return Moments(
                self._rows(mean, projection), jnp.zeros_like(projection.prior_variance), projection.residual_variance()
            )
        mean = whitened_mean(projection, [block.loc for block in self.q])
        variance = whitened_variance(projection, self.q)
        if variance.ndim > 1:
            variance = self._rows(variance, projection)
        return Moments(self._rows(mean, projection), variance, projection.residual_variance(learned_blocks(self.q)))

    def group_covariance(self, X: jax.Array, groups: Groups) -> jax.Array:
        """The residual's prior covariance within groups of rows, (G, g, g); only where a guide gave q."""
        assert self.q is not None
        return self.projector.group_covariance(X, self.cache.project(X).A, groups, learned_blocks(self.q))

    def given(self, X: jax.Array, *, joint: bool, mean_only_in_residual: bool = False) -> Given:
        """``Σ_i A_iᵀ ε_i`` with the drawn ε, and what the blocks leave of the prior."""
        projection, blocks, values = self.cache.project(X), [True] * len(self.values), list(self.values)
        if mean_only_in_residual and self.q is not None:
            blocks = list(learned_blocks(self.q))
            values = [value if use else q.loc for value, use, q in zip(values, blocks, self.q, strict=True)]
        mean = self._rows(whitened_mean(projection, values), projection)
        if joint:
            residual = self.projector.residual_covariance(X, projection.A, blocks)
        else:
            residual = projection.residual_variance(blocks)
        return Given(mean, residual, projection.prior_variance)

    def posterior(self) -> Posterior:
        """The posterior object of this draw; only where a guide gave q."""
        if self.q is None:
            raise ValueError(f"{self.name} has no approximate posterior here: the model was run without a guide.")
        return Posterior(self.projector, tuple(without_row_dim(block) for block in self.q))

    def posterior_given_values(self) -> Posterior:
        """That of f given the drawn inducing values: q is at them."""
        q = (DiagonalNormal(jnp.asarray(value), jnp.zeros_like(value)) for value in self.values)
        return Posterior(self.projector, tuple(without_row_dim(block) for block in q))


def without_row_dim(block: BlockNormal) -> BlockNormal:
    """Drop the dimension of size 1 that holds the place of rows in a batch of functions."""
    return block.without_last_batch_dim() if block.batch_shape else block
