"""
A joint q(ε) of several components, which an observation is the sum of: one Gaussian, site by site.

Data about ``y = f(x) + g(x)`` say little about how y is split, so that f and g are far from independent given y.
Stacked over components, ε = (ε_1, …, ε_C) has the covariance T Tᵀ (row_posterior.py). With T lower triangular,
component k is drawn given those before: ``ε_k = m_k + Σ_{j<k} T_kj z_j + T_kk z_k``. Its rows of T alone are a root of
its own marginal covariance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from numpyro.distributions.kl import kl_divergence

from npgp import checks, linalg
from npgp.variational.blocks import BlockNormal, DenseNormal, WhitenedPrior


class JointBlock(BlockNormal):
    """
    One block of several that are jointly Gaussian; of functions in plates, these independent given the blocks before,
    or jointly Gaussian too.

    As a distribution it is the block's given the draws of those before, and of a plate's functions each one's given
    those before it. What else it says is of the block by itself: ``loc``, :meth:`factor_times` and :meth:`trace`.
    :meth:`kl` is the divergence of the former from the prior, averaged over draws of those before, so that the blocks'
    sum to the joint divergence.

    :param loc: the marginal mean m_k, (M,); or batch + (M,) of functions in plates.
    :param rows: the block's rows of T up to its diagonal block, (M, K); or batch + (M, K).
    :param before: draws of z for the blocks before, (K − M,), which functions in plates share; or batch + that.
        ``None`` where the block is asked for nothing but what it is by itself.
    :param coupled: whether the functions of a plate are jointly Gaussian: their rows, one function after the other, end
        with the diagonal block of all.
    """

    pytree_data_fields = ("loc", "rows", "before")
    pytree_aux_fields = ("coupled",)
    kind = "dense"
    joint = True

    def __init__(self, loc, rows, before, coupled=False, *, validate_args=None):
        self.loc, self.rows, self.before, self.coupled = loc, rows, before, coupled
        super().__init__(jnp.shape(loc)[:-1], jnp.shape(loc)[-1:], validate_args=validate_args)

    def _flat(self, array: jax.Array) -> jax.Array:
        """Batch + (M, ...), or of coupled functions (batch × M, ...)."""
        return array.reshape(-1, *array.shape[len(self.batch_shape) + 1 :]) if self.coupled else array

    @property
    def scale_tril(self) -> jax.Array:
        """T_kk, (..., M, M); of coupled functions that of all."""
        rows = self._flat(self.rows)
        return rows[..., rows.shape[-1] - rows.shape[-2] :]

    def at(self, z: jax.Array) -> jax.Array:
        """The value that is made of standard normal z, (..., M)."""
        rows, size = self._flat(self.rows), self._flat(self.loc).shape[-1]
        left = linalg.matmul(rows[..., : rows.shape[-1] - size], self.before[..., None])
        own = linalg.matmul(self.scale_tril, self._flat_values(z)[..., None])
        return self.loc + (left + own)[..., 0].reshape(z.shape)

    def _flat_values(self, values: jax.Array) -> jax.Array:
        own = len(self.batch_shape) + 1
        return values.reshape(*values.shape[: values.ndim - own], -1) if self.coupled else values

    @property
    def mean(self):
        return self.at(jnp.zeros_like(self.loc))

    def without_last_batch_dim(self):
        before = self.before if self.before is None or self.before.ndim == 1 else self.before[..., 0, :]
        return JointBlock(self.loc[..., 0, :], self.rows[..., 0, :, :], before, self.coupled)

    def take(self, members):
        return JointBlock(self.loc[members], self.rows[members], None)

    def noise(self, value: jax.Array) -> jax.Array:
        """The z_k that a value is made of."""
        left = self._flat_values(value - self.mean)
        return linalg.solve_lower(self.scale_tril, left[..., None])[..., 0].reshape(value.shape)

    def sample(self, key, sample_shape=()):
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        return self.at(jax.random.normal(key, sample_shape + self.batch_shape + self.event_shape, self.loc.dtype))

    def log_prob(self, value):
        z = self.noise(value)
        return -0.5 * (jnp.sum(jnp.square(z), -1) + self.log_det() + self.event_shape[0] * math.log(2.0 * math.pi))

    def log_det(self):
        diagonal = linalg.diagonal(self.scale_tril).reshape(self.loc.shape)
        return 2.0 * jnp.sum(jnp.log(diagonal), axis=-1)

    def trace(self):
        return jnp.sum(jnp.square(self.rows), (-2, -1))

    def factor_times(self, A):
        return linalg.matmul(jnp.swapaxes(self.rows, -1, -2), A)

    def marginal(self) -> BlockNormal:
        # Not by the factor of S_k, which would square the condition number.
        upper = jnp.linalg.qr(jnp.swapaxes(self._flat(self.rows), -1, -2), mode="r")
        signs = jnp.where(linalg.diagonal(upper) < 0, -1.0, 1.0)
        lower = jnp.swapaxes(upper * signs[..., None], -1, -2)
        if not self.coupled:
            return DenseNormal(self.loc, lower)
        rows = lower.reshape(*self.loc.shape, lower.shape[-1])
        return JointBlock(self.loc, rows, jnp.zeros(0, rows.dtype), coupled=True)


@kl_divergence.register(JointBlock, WhitenedPrior)  # type: ignore[attr-defined]
def _(q, p):
    return q.kl()


def sum_of_roots(roots: Sequence[jax.Array]) -> jax.Array:
    """
    The root of a sum, ``Σ_k T_kᵀ A_k``; (..., K, N).

    :param roots: ``T_kᵀ A_k`` of each block, (..., K_k, N): what a block drawn early lacks below is 0.
    """
    most = max(root.shape[-2] for root in roots)
    padded = [
        jnp.pad(root, [(0, 0)] * (root.ndim - 2) + [(0, most - root.shape[-2]), (0, 0)])
        if root.shape[-2] < most
        else root
        for root in roots
    ]
    return sum(padded[1:], padded[0])
