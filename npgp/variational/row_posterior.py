"""
The joint posterior of several functions given pseudo-observations of what rows see of them.

A row's predictor is ``s_n = o_n + Ã_nᵀ ε``, with ε the whitened inducing values of all functions, stacked. Given a
pseudo-observation of each, of mean ỹ_n and precision β_n,

    q(ε) ∝ N(ε; 0, I) Π_n N(ỹ_n; o_n + Ã_nᵀ ε, 1/β_n) = N(m, Λ⁻¹),
    Λ = I + Σ_n β_n Ã_n Ã_nᵀ,        m = Λ⁻¹ Σ_n β_n Ã_n (ỹ_n − o_n).

For Gaussian noise of variance 1/β_n about s_n, ỹ = y makes it the exact posterior of ε. Whatever sums, mixes and plates
a program's statements are made of, they are in Ã.

Functions of a plate, of which each row sees one, are independent of each other given those that rows of several see.
So Λ has the shape of an arrow, whose branches are eliminated one by one: for the member's own ε_j, ``D_j = I + Σ_n β_n
C_n C_nᵀ`` over the rows that see it, of which ``B_j = Σ_n β_n C_n Ã_nᵀ`` and ``h_j = Σ_n β_n C_n (ỹ_n − o_n)``,

    ε_j | ε ~ N(D_j⁻¹ (h_j − B_j ε), D_j⁻¹),        Λ less Σ_j B_jᵀ D_j⁻¹ B_j for the shared ε.

The cost grows linearly with the number of members.

Blocks of a structured q are independent of all else: the best such q has the same mean, and for each of them the
inverse of its own block of Λ, or of that block's diagonal, as its covariance (Opper & Archambeau 2009).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from npgp import linalg
from npgp.variational.parameterizations import covariance_factor


class Rows(NamedTuple):
    """
    Pseudo-observations of rows that are stated together, in S sets of N rows.

    :param shared: what they see of the shared ε, (S, K, N); or (1, K, N) if all sets see the same.
    :param own: what they see of the functions of their member, (S, M, N), or (1, M, N); ``None`` if nothing.
    :param members: the member that each set is of, (S,); ``None`` where set and member are the same.
    :param precision: β, (S, N), 0 of rows that tell nothing.
    :param shift: β (ỹ − o), (S, N).
    """

    shared: jax.Array
    own: jax.Array | None
    members: jax.Array | None
    precision: jax.Array
    shift: jax.Array


class Independent(NamedTuple):
    """
    A block of the shared ε whose q is independent of all else.

    :param start: its first entry.
    :param end: the entry after its last.
    :param kind: ``"dense"``, ``"diagonal"`` or ``"mean-only"``.
    """

    start: int
    end: int
    kind: str


class StackedNormal(NamedTuple):
    """
    q(ε), as means and rows of a lower-triangular factor: ``ε = mean + factor z`` without the independent blocks, and
    ``ε_j = mean_j + factor_j (z, z_j)``, with z and z_j standard normal.

    :param mean: of the shared ε, (K,), independent blocks among them.
    :param factor: of the others, (J, J).
    :param of_members: of the members, (G, M); ``None`` if there are none.
    :param factors: (G, M, J + M).
    :param scales: of each independent block, (M, M) or (M,); ``None`` of one that moves the mean only.
    """

    mean: jax.Array
    factor: jax.Array
    of_members: jax.Array | None = None
    factors: jax.Array | None = None
    scales: tuple[jax.Array | None, ...] = ()


def posterior_given(rows: Sequence[Rows], members: int = 0, independent: Sequence[Independent] = ()) -> StackedNormal:
    """
    The posterior of ε, given pseudo-observations, or the best q(ε) of which some blocks are independent.

    :param rows: these, of which each has the same K and M.
    :param members: G, the number of members, 0 if there are no functions in a plate beside the shared ones.
    :param independent: these blocks.
    """
    Lambda = _total(_products(r.shared, r.shared, r.precision) for r in rows)
    h = _total(_sums(r.shared, r.shift) for r in rows)
    scales = tuple(_scale(Lambda[b.start : b.end, b.start : b.end], b.kind) for b in independent)
    alone = {i for block in independent for i in range(block.start, block.end)}
    joint = np.array([i for i in range(h.shape[0]) if i not in alone], int) if independent else None
    if not members:
        return StackedNormal(*_mean_and_factor(Lambda, h, joint), scales=scales)
    of_members = [(r.own, r) for r in rows if r.own is not None]
    D = _total(_of_members(_weighted(own, r.precision), own, r.members, members) for own, r in of_members)
    B = _total(_of_members(_weighted(own, r.precision), r.shared, r.members, members) for own, r in of_members)
    h_own = _total(_of_members(_weighted(own, r.shift), None, r.members, members) for own, r in of_members)
    own = covariance_factor(D)
    transposed = jnp.swapaxes(own, -1, -2)
    V, v = linalg.matmul(transposed, B), linalg.matmul(transposed, h_own[..., None])[..., 0]
    said = V.reshape(v.size, V.shape[-1])
    h = h - linalg.matmul(v.reshape(1, -1), said)[0]
    mean, factor = _mean_and_factor(Lambda - linalg.gram(said.T), h, joint)
    left = v - linalg.matmul(V, mean[:, None])[..., 0]
    means = linalg.matmul(own, left[..., None])[..., 0]
    across = -linalg.matmul(own, linalg.matmul(V if joint is None else V[..., joint], factor))
    return StackedNormal(mean, factor, means, jnp.concatenate([across, own], axis=-1), scales)


def _total(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _mean_and_factor(Omega: jax.Array, h: jax.Array, joint: np.ndarray | None) -> tuple[jax.Array, jax.Array]:
    """The mean ``(I + Ω)⁻¹ h``, and the factor of ``(I + Ω)⁻¹``, of Ω's rows and columns ``joint`` if given."""
    if not h.shape[-1]:
        return h, Omega
    T = covariance_factor(Omega)
    mean = linalg.matmul(T, linalg.matmul(T.T, h[:, None]))[:, 0]
    if joint is None:
        return mean, T
    Omega = Omega[joint[:, None], joint]
    return mean, covariance_factor(Omega) if joint.size else Omega


def _scale(Omega: jax.Array, kind: str) -> jax.Array | None:
    """The factor of ``(I + Ω)⁻¹``, or standard deviations by the diagonal of Ω."""
    if kind == "mean-only":
        return None
    return covariance_factor(Omega) if kind == "dense" else 1.0 / jnp.sqrt(1.0 + linalg.diagonal(Omega))


def _weighted(A: jax.Array, weights: jax.Array) -> jax.Array:
    return A * weights[:, None, :]


def _products(A: jax.Array, B: jax.Array, precision: jax.Array) -> jax.Array:
    """``Σ_sn β_sn A_sn B_snᵀ``, (K, K')."""
    if A.shape[0] == B.shape[0] == 1:  # the same for all sets
        precision = jnp.sum(precision, axis=0, keepdims=True)

    def flat(X):
        return jnp.moveaxis(X, 1, 0).reshape(X.shape[1], X.shape[0] * X.shape[2])

    A, B = A * precision[:, None], jnp.broadcast_to(B, (len(precision), *B.shape[1:]))
    return linalg.matmul(flat(A), flat(B).T)


def _sums(A: jax.Array, shift: jax.Array) -> jax.Array:
    """``Σ_sn A_sn shift_sn``, (K,)."""
    if A.shape[0] == 1:
        shift = jnp.sum(shift, axis=0, keepdims=True)
    return jnp.sum(linalg.matmul(A, shift[..., None]), axis=0)[..., 0]


def _of_members(A: jax.Array, B: jax.Array | None, members: jax.Array | None, count: int) -> jax.Array:
    """``Σ_n A_sn B_snᵀ``, or ``Σ_n A_sn``, of each member: the sum over its sets."""
    sums = jnp.sum(A, axis=-1) if B is None else linalg.matmul(A, jnp.swapaxes(B, -1, -2))
    return sums if members is None else jax.ops.segment_sum(sums, members, count)
