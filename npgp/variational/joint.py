"""
A joint q(ε) of several components, which an observation is the sum of: one Gaussian, site by site.

Data about ``y = f(x) + g(x)`` say little about how y is split, so that f and g are far from independent given y.
Stacked over components, ε = (ε_1, …, ε_C) has the prior N(0, I), and given pseudo-data about the stacked inducing
values ``u = blockdiag(L_1, …, L_C) ε``, of precision ``R Rᵀ``,

    S = T Tᵀ = (I + Hᵀ H)⁻¹,        m = S Hᵀ Rᵀ z,        H = Rᵀ blockdiag(L_1, …, L_C).

With T lower triangular, component k is drawn given those before: ``ε_k = m_k + Σ_{j<k} T_kj z_j + T_kk z_k``. Its rows
of T alone are a root of its own marginal covariance.

Functions of a plate beside these (``f(x) + g_j(x)``, one g for each member of a panel) are independent of each other
given what they share, ε, so that the precision of all has the shape of an arrow, and its branches are factorized by
themselves (:class:`Branches`). Member j's pseudo-data about ``B_j ε + C_j ε_j + noise`` give

    ε_j | ε ~ N(D_j⁻¹ C_jᵀ (R_jᵀ z_j − B_j ε), D_j⁻¹),        D_j = I + C_jᵀ C_j,

and add to the shared components what they say of them, ``B_jᵀ (I + C_j C_jᵀ)⁻¹ B_j`` to Hᵀ H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from numpyro.distributions.kl import kl_divergence

from npgp import checks, linalg
from npgp.variational.blocks import BlockNormal, DenseNormal, WhitenedPrior
from npgp.variational.pseudo import covariance_factor

__all__ = ["Branches", "JointBlock", "joint_posterior", "sum_of_roots"]


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


class Branches(NamedTuple):
    """
    Functions of a plate, each beside components that all share: what their pseudo-data say, and their q given these.

    :param C: ``R_jᵀ L_j``, (G, M, M).
    :param B: what the pseudo-data see of the shared ε, (G, M, K).
    :param scaled: what they are, ``R_jᵀ z_j`` and what goes with B_j of the shared components' z, (G, M).
    """

    C: jax.Array
    B: jax.Array
    scaled: jax.Array

    def said(self) -> tuple[jax.Array, jax.Array]:
        """What the members' pseudo-data say of the shared ε: rows of H, (G M, K), and what goes with Rᵀ z, (G M,)."""
        # E = I + C Cᵀ has a factor unless rounding is above 1.
        E = linalg.gram(self.C) + jnp.eye(self.C.shape[-1], dtype=self.C.dtype)
        F = linalg.cholesky(E, jitter=0.0)[0]
        both = linalg.solve_lower(F, jnp.concatenate([self.B, self.scaled[..., None]], axis=-1))
        both = both.reshape(-1, both.shape[-1])
        return both[:, :-1], both[:, -1]

    def given(self, mean: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        """
        The members' means (G, M) and rows of T (G, M, K + M).

        :param mean: of the shared ε, (K,).
        :param factor: T of the shared ε, (K, K).
        """
        Ct = jnp.swapaxes(self.C, -1, -2)
        own = covariance_factor(linalg.gram(Ct))
        # D⁻¹ Cᵀ (…): of the columns R z − B m and −B T at once.
        left = self.scaled - linalg.matmul(self.B, mean[:, None])[..., 0]
        columns = jnp.concatenate([left[..., None], -linalg.matmul(self.B, factor)], axis=-1)
        found = linalg.matmul(own, linalg.matmul(jnp.swapaxes(own, -1, -2), linalg.matmul(Ct, columns)))
        return found[..., 0], jnp.concatenate([found[..., 1:], own], axis=-1)


def joint_posterior(H: jax.Array, scaled: jax.Array, branches: Branches | None = None) -> tuple[jax.Array, jax.Array]:
    """
    The mean m and the factor T of q(ε) of several blocks, stacked in the order in which they are drawn.

    :param H: ``Rᵀ blockdiag(L)``, (P, K).
    :param scaled: ``Rᵀ z``, (P,).
    :param branches: functions of a plate whose pseudo-data are about these blocks, too.
    """
    if branches is not None:
        more, with_more = branches.said()
        H, scaled = jnp.concatenate([H, more]), jnp.concatenate([scaled, with_more])
    T = covariance_factor(linalg.gram(H.T))
    half = linalg.matmul(T.T, linalg.matmul(H.T, scaled[:, None]))
    return linalg.matmul(T, half)[:, 0], T


def times_factor(A: jax.Array, L: jax.Array, diagonal: bool | None = None) -> jax.Array:
    """
    ``A L``, for L a matrix, or the diagonal of a diagonal one.

    :param diagonal: which of the two, where L may have leading axes.
    """
    return A * L[..., None, :] if (L.ndim == 1 if diagonal is None else diagonal) else linalg.matmul(A, L)


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
