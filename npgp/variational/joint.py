"""
A joint q(ε) of several components, which an observation is the sum of: one Gaussian, site by site.

Data about ``y = f(x) + g(x)`` say little about how y is split, so that f and g are far from independent given y.
Stacked over components, ε = (ε_1, …, ε_C) has the prior N(0, I), and given pseudo-data about the stacked inducing
values ``u = blockdiag(L_1, …, L_C) ε``, of precision ``R Rᵀ``,

    S = T Tᵀ = (I + Hᵀ H)⁻¹,        m = S Hᵀ Rᵀ z,        H = Rᵀ blockdiag(L_1, …, L_C).

With T lower triangular, component k is drawn given those before: ``ε_k = m_k + Σ_{j<k} T_kj z_j + T_kk z_k``. Its rows
of T alone are a root of its own marginal covariance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from numpyro.distributions.kl import kl_divergence

from npgp import checks, linalg
from npgp.variational.blocks import BlockNormal, DenseNormal, WhitenedPrior
from npgp.variational.pseudo import covariance_factor

__all__ = ["JointBlock", "joint_posterior", "sum_of_squares"]


class JointBlock(BlockNormal):
    """
    One block of several that are jointly Gaussian.

    As a distribution it is the block's given the draws of those before. What else it says is of the block by itself:
    ``loc``, :meth:`factor_times` and :meth:`trace`. :meth:`kl` is the divergence of the former from the prior, averaged
    over draws of those before, so that the blocks' sum to the joint divergence.

    .. code-block:: python

        q = npgp.variational.JointBlock(np.zeros(2), 0.5 * np.eye(2, 3, 1), np.zeros(1))
        assert q.marginal().event_shape == (2,)

    :param loc: the marginal mean m_k, (M,).
    :param rows: the block's rows of T up to its diagonal block, (M, K).
    :param before: draws of z for the blocks before, (K − M,).
    """

    pytree_data_fields = ("loc", "rows", "before")
    kind = "dense"

    def __init__(self, loc, rows, before, *, validate_args=None):
        self.loc, self.rows, self.before = loc, rows, before
        super().__init__((), jnp.shape(loc), validate_args=validate_args)

    @property
    def scale_tril(self) -> jax.Array:
        """T_kk, (M, M)."""
        return self.rows[:, self.rows.shape[1] - self.event_shape[0] :]

    @property
    def mean(self):
        left = self.rows[:, : self.rows.shape[1] - self.event_shape[0]]
        return self.loc + linalg.matmul(left, self.before[:, None])[:, 0]

    def noise(self, value: jax.Array) -> jax.Array:
        """The z_k that a value is made of."""
        return linalg.solve_lower(self.scale_tril, (value - self.mean)[:, None])[:, 0]

    def sample(self, key, sample_shape=()):
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        z = jax.random.normal(key, sample_shape + self.event_shape, self.loc.dtype)
        return self.mean + linalg.matmul(self.scale_tril, z[..., None])[..., 0]

    def log_prob(self, value):
        z = linalg.solve_lower(self.scale_tril, (value - self.mean)[..., None])[..., 0]
        return -0.5 * (jnp.sum(jnp.square(z), -1) + self.log_det() + self.event_shape[0] * math.log(2.0 * math.pi))

    def log_det(self):
        return linalg.log_determinant(self.scale_tril)

    def trace(self):
        return jnp.sum(jnp.square(self.rows))

    def factor_times(self, A):
        return linalg.matmul(self.rows.T, A)

    def marginal(self) -> DenseNormal:
        # Not by the factor of S_k, which would square the condition number.
        upper = jnp.linalg.qr(self.rows.T, mode="r")
        return DenseNormal(self.loc, (upper * jnp.where(linalg.diagonal(upper) < 0, -1.0, 1.0)[:, None]).T)


@kl_divergence.register(JointBlock, WhitenedPrior)  # type: ignore[attr-defined]
def _(q, p):
    return q.kl()


def joint_posterior(
    factors: Sequence[jax.Array], values: Sequence[jax.Array], roots: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """
    The mean m and the factor T of q(ε) of several blocks, stacked in the order in which they are drawn.

    :param factors: of each block L, (M_k, M_k), or its diagonal (M_k,).
    :param values: of each block z_k, (M_k,).
    :param roots: of each block its rows of R, (M_k, P).
    """
    H = jnp.concatenate(
        [R.T * L if L.ndim == 1 else linalg.matmul(R.T, L) for R, L in zip(roots, factors, strict=True)], axis=1
    )
    scaled = linalg.matmul(jnp.concatenate(roots).T, jnp.concatenate(values)[:, None])
    T = covariance_factor(linalg.gram(H.T))
    half = linalg.matmul(T.T, linalg.matmul(H.T, scaled))
    return linalg.matmul(T, half)[:, 0], T


def sum_of_squares(halves: Sequence[jax.Array]) -> jax.Array:
    """
    The variance of a sum, ``‖Σ_k T_kᵀ A_k‖²`` over columns; (..., N).

    :param halves: ``T_kᵀ A_k`` of each block, (..., K_k, N): what a block drawn early lacks below is 0.
    """
    most = max(half.shape[-2] for half in halves)
    padded = [
        jnp.pad(half, [(0, 0)] * (half.ndim - 2) + [(0, most - half.shape[-2]), (0, 0)])
        if half.shape[-2] < most
        else half
        for half in halves
    ]
    return jnp.sum(jnp.square(sum(padded[1:], padded[0])), axis=-2)
