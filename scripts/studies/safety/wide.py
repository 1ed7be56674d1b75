"""GP algebra in NumPy's 80-bit numbers, for batches of problems: what float64 is judged by. Nothing here is npgp's."""

from __future__ import annotations

from collections.abc import Callable

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
    """``L⁻ᵀ b`` for b of shape (P, N)."""
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


def weights(
    kernel: str,
    X: np.ndarray,
    y: np.ndarray,
    Z: np.ndarray,
    lengthscale: np.ndarray,
    variance: np.ndarray,
    noise: np.ndarray,
    jitter: np.ndarray,
) -> np.ndarray:
    """``(Q + σ²I)⁻¹ y`` (P, N), with Q what the inducing points explain at a relative jitter (P, blocks)."""
    M = Z.shape[1]
    nugget = (jitter.max(-1).astype(Wide) * variance)[:, None, None] * np.eye(M, dtype=Wide)
    A = solve(cholesky(gram(kernel, Z, Z, lengthscale, variance) + nugget), gram(kernel, Z, X, lengthscale, variance))
    s2 = noise[:, None, None]
    B = cholesky(np.eye(M, dtype=Wide) + np.einsum("pmn,pkn->pmk", A, A) / s2)
    inner = solve_transposed(B, solve(B, np.einsum("pmn,pn->pm", A, y.astype(Wide)) / noise[:, None]))
    return (y - np.einsum("pmn,pm->pn", A, inner)) / noise[:, None]


def allowances(
    y: np.ndarray, variance: np.ndarray, noise: np.ndarray, jitter: np.ndarray, alpha: np.ndarray, eps: float
) -> dict[str, np.ndarray]:
    """What rounding does to a bound at best, and what it may do, each (P,), in nats; see ``stress.py``."""
    k, s2 = variance[:, None], noise[:, None]
    rounding = eps * np.sum(1 + (k + y.astype(Wide) ** 2) / s2, -1)
    return {"rounding": rounding, "allowance": rounding + eps / jitter * np.sum(k / s2 + k * alpha**2, -1) / 2}
