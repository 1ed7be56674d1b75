"""GP algebra in NumPy's 80-bit numbers, for batches of problems: what float64 is judged by. Nothing here is npgp's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Wide = np.longdouble
_ROOT3, _ROOT5 = np.sqrt(Wide(3)), np.sqrt(Wide(5))

CORRELATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "RBF": lambda r: np.exp(-r * r / 2),
    "Matern12": lambda r: np.exp(-r),
    "Matern32": lambda r: (1 + _ROOT3 * r) * np.exp(-_ROOT3 * r),
    "Matern52": lambda r: (1 + _ROOT5 * r + 5 * r * r / 3) * np.exp(-_ROOT5 * r),
    "RationalQuadratic": lambda r: 1 / (1 + r * r / 2),
}


def gram(kernel: str, A: np.ndarray, B: np.ndarray, lengthscale: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Covariances (P, N, M) of rows (P, N, D) and (P, M, D), with hyperparameters (P,), from differences."""
    square = np.zeros((A.shape[0], A.shape[1], B.shape[1]), Wide)
    for d in range(A.shape[2]):
        square += ((A[:, :, None, d].astype(Wide) - B[:, None, :, d].astype(Wide)) / lengthscale[:, None, None]) ** 2
    return variance[:, None, None] * CORRELATIONS[kernel](np.sqrt(square))


def cholesky(K: np.ndarray) -> np.ndarray:
    """Lower factors of (P, N, N), column by column."""
    L = np.zeros_like(K)
    for j in range(K.shape[-1]):
        column = K[:, j:, j] - np.einsum("pik,pk->pi", L[:, j:, :j], L[:, j, :j])
        L[:, j:, j] = column / np.sqrt(column[:, :1])
    return L


def solve(L: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``L⁻¹ b`` for b of shape (P, N) or (P, N, M)."""
    x = np.array(b, Wide)
    columns = x if x.ndim == 3 else x[..., None]
    for i in range(L.shape[-1]):
        columns[:, i] -= np.einsum("pk,pkm->pm", L[:, i, :i], columns[:, :i])
        columns[:, i] /= L[:, i, i, None]
    return x


def solve_transposed(L: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``L⁻ᵀ b`` for b of shape (P, N) or (P, N, M)."""
    flipped = np.swapaxes(L, -1, -2)[:, ::-1, ::-1]
    return solve(flipped, b[:, ::-1])[:, ::-1]


def log_evidence(
    kernel: str, X: np.ndarray, y: np.ndarray, lengthscale: np.ndarray, variance: np.ndarray, noise: np.ndarray
) -> np.ndarray:
    """``log N(y; 0, K + σ²I)``, (P,)."""
    N = X.shape[1]
    L = cholesky(gram(kernel, X, X, lengthscale, variance) + noise[:, None, None] * np.eye(N, dtype=Wide))
    log_det = 2 * np.sum(np.log(np.diagonal(L, axis1=1, axis2=2)), -1)
    return -(np.sum(solve(L, y) ** 2, -1) + log_det + N * np.log(2 * Wide(np.pi))) / 2


class Influence(NamedTuple):
    """
    What a bound's terms hang on, of a batch of problems: how much a change of covariances moves them.

    :param alpha: ``(Q + σ²I)⁻¹ y`` (P, N), with Q what the inducing points explain, jitter added.
    :param points: ``w = (K_uu + jitter)⁻¹ K_uf α`` (P, M): the same of the inducing points.
    :param rows: ``V = (K_uu + jitter)⁻¹ K_uf`` (P, M, N).
    :param mean: the optimal mean of ε, (P, M).
    :param scale: square roots of the diagonal of ``B = I + A Aᵀ/σ²``, (P, M).
    :param inverse: ``B⁻¹``, (P, M, M).
    """

    alpha: np.ndarray
    points: np.ndarray
    rows: np.ndarray
    mean: np.ndarray
    scale: np.ndarray
    inverse: np.ndarray


def influence(
    kernel: str,
    X: np.ndarray,
    y: np.ndarray,
    Z: np.ndarray,
    lengthscale: np.ndarray,
    variance: np.ndarray,
    noise: np.ndarray,
    jitter: np.ndarray,
) -> Influence:
    """
    At the relative jitter of every inducing point, (P, M). Blocks have one each: theirs is the factor of all points
    with these jitters on the diagonal.
    """
    M, s2 = Z.shape[1], noise[:, None]
    nugget = (jitter.astype(Wide) * variance[:, None])[:, :, None] * np.eye(M, dtype=Wide)
    L = cholesky(gram(kernel, Z, Z, lengthscale, variance) + nugget)
    A = solve(L, gram(kernel, Z, X, lengthscale, variance))
    B = np.eye(M, dtype=Wide) + np.einsum("pmn,pkn->pmk", A, A) / s2[..., None]
    factor = cholesky(B)
    mean = solve_transposed(factor, solve(factor, np.einsum("pmn,pn->pm", A, y.astype(Wide)) / s2))
    alpha = (y - np.einsum("pmn,pm->pn", A, mean)) / s2
    rows = solve_transposed(L, A)
    half = solve(factor, np.broadcast_to(np.eye(M, dtype=Wide), B.shape))
    inverse, scale = np.swapaxes(half, 1, 2) @ half, np.sqrt(np.diagonal(B, axis1=1, axis2=2))
    return Influence(alpha, solve_transposed(L, mean), rows, mean, scale, inverse)


def allowances(
    y: np.ndarray, variance: np.ndarray, noise: np.ndarray, of: Influence, evidence: np.ndarray, eps: float, jitter: Any
) -> dict[str, np.ndarray]:
    """What rounding does to a bound at best, and what it may do, each (P,), in nats; see ``test_stress``."""
    (M, N), k, s2 = of.rows.shape[1:], variance[:, None], noise[:, None]

    def total(array, axis=-1):
        return np.sum(np.abs(array), axis)

    at_best = eps * np.sum(1 + (k + y.astype(Wide) ** 2) / s2, -1)
    covariances = eps * (1 + (M + 1) / 2)
    points, rows = total(of.points), total(of.rows, 1)
    fit = covariances * variance / 2 * points * (points + 2 * total(of.alpha))
    penalty = covariances / 2 * np.sum(k * np.square(rows + 1) / s2, -1)
    forming = eps * (N + M + 1) / 2  # B, relative to its diagonal's roots
    inner = forming / 2 * np.square(total(of.mean * of.scale))
    trace = forming * total(of.inverse * of.scale[:, :, None] * of.scale[:, None, :], (1, 2))
    every = at_best + fit + penalty + inner + M / 2 * np.log1p(trace / M)
    return {"rounding": at_best, "allowance": np.minimum(every, at_best + eps / jitter * (np.abs(evidence) + N))}
