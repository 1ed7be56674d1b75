"""Dense references in plain float64 NumPy, written from the textbook formulas: no JAX and nothing of npgp."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import linalg, special, stats

# ---------------------------------------------------------------- kernels


def distances(X, X2, lengthscale=1.0):
    """Scaled distances by differences, which lose nothing for near points."""
    difference = (np.asarray(X, float)[:, None] - np.asarray(X2, float)[None]) / lengthscale
    return np.sqrt(np.sum(difference**2, axis=-1))


#: Correlation as a function of the scaled distance r (Rasmussen & Williams 2006, chapter 4).
CORRELATION: dict[str, Callable] = {
    "RBF": lambda r: np.exp(-(r**2) / 2),
    "Matern12": lambda r: np.exp(-r),
    "Matern32": lambda r: (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
    "Matern52": lambda r: (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r),
    "RationalQuadratic": lambda r: 1 / (1 + r**2 / 2),  # at α = 1
}


def stationary(name, X, X2, lengthscale=1.0, variance=1.0):
    return variance * CORRELATION[name](distances(X, X2, lengthscale))


def rational_quadratic(X, X2, lengthscale, variance, alpha):
    return variance * (1 + distances(X, X2, lengthscale) ** 2 / (2 * alpha)) ** -alpha


def periodic(X, X2, period, lengthscale, variance):
    """MacKay's: a Gaussian of the sines of half the phase differences."""
    sines = np.sin(np.pi * (np.asarray(X, float)[:, None] - np.asarray(X2, float)[None]) / period)
    return variance * np.exp(-2 * np.sum((sines / lengthscale) ** 2, axis=-1))


def cosine(X, X2, period, variance):
    difference = np.asarray(X, float)[:, None] - np.asarray(X2, float)[None]
    return variance * np.cos(2 * np.pi * np.sum(difference / period, axis=-1))


def polynomial(X, X2, degree, variance, offset):
    return ((X * variance) @ X2.T + offset) ** degree


def arc_cosine(X, X2, order, variance, weight_variance, bias_variance):
    """
    2σ² E[h(w·x) h(w·x')], h(a) = aⁿ for a > 0, by quadrature in the plane of x and x'.

    In polar coordinates (ρ, φ) of w there, x at angle 0 and x' at θ, both units are on for φ in (θ − π/2, π/2).
    """
    X, X2 = (np.hstack([A * np.sqrt(weight_variance), np.full((len(A), 1), np.sqrt(bias_variance))]) for A in (X, X2))
    norms = np.outer(np.linalg.norm(X, axis=1), np.linalg.norm(X2, axis=1))
    U, V = (A / np.linalg.norm(A, axis=1, keepdims=True) for A in (X, X2))
    theta = 2 * np.arctan2(distances(U, V), distances(U, -V))[..., None]
    nodes, weights = np.polynomial.legendre.leggauss(40)
    angle = theta / 2 + (np.pi - theta) / 2 * nodes
    integral = (np.pi - theta[..., 0]) / 2 * ((np.cos(angle) * np.cos(angle - theta)) ** order @ weights)
    return variance / np.pi * 2**order * special.factorial(order) * norms**order * integral


# ---------------------------------------------------------------- Gaussian algebra


def log_normal(y, covariance):
    """log N(y; 0, covariance), through eigenvalues so that no Cholesky factor is shared with the library."""
    values, vectors = np.linalg.eigh(covariance)
    z = vectors.T @ y
    return -0.5 * (np.sum(z**2 / values) + np.sum(np.log(values)) + y.size * np.log(2 * np.pi))


def gp_posterior(K, K_star, K_star_star, y, noise):
    """Mean and covariance of the exact GP at new inputs; ``K_star`` is (new, training)."""
    C = K + np.diag(np.broadcast_to(noise, y.shape))
    gain = np.linalg.solve(C, K_star.T).T
    return gain @ y, K_star_star - gain @ K_star.T


def kl_normal(mean, covariance):
    """KL[N(mean, covariance) ‖ N(0, I)]."""
    return 0.5 * (np.trace(covariance) + mean @ mean - mean.size - np.linalg.slogdet(covariance)[1])


# ---------------------------------------------------------------- sparse GPs


@dataclass(frozen=True)
class Joint:
    """
    The joint prior covariance of inducing values and function values.

    :param sizes: M_i, in order.
    :param K_uu: (M, M) of all inducing values stacked.
    :param K_uf: (M, N).
    :param K_ff: (N, N).
    """

    sizes: tuple[int, ...]
    K_uu: np.ndarray
    K_uf: np.ndarray
    K_ff: np.ndarray

    @classmethod
    def of(cls, kernel: Callable, inducing: Sequence[np.ndarray], X: np.ndarray, jitter: float = 0.0) -> Joint:
        """For points; ``jitter`` is relative to each inducing value's variance, its square to their mean."""
        Z = np.concatenate(inducing)
        K_uu = kernel(Z, Z)
        K_uu = K_uu + jitter * np.diag(np.diag(K_uu) + jitter * np.mean(np.diag(K_uu)))
        return cls(tuple(len(z) for z in inducing), K_uu, kernel(Z, X), kernel(X, X))

    @property
    def factor(self) -> np.ndarray:
        """One Cholesky factor of everything: its block columns are the blocks' whitened values."""
        return np.linalg.cholesky(self.K_uu)

    @property
    def slices(self) -> list[slice]:
        ends = list(itertools.accumulate(self.sizes, initial=0))
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    @property
    def A(self) -> list[np.ndarray]:
        """Whitened projections, block by block: rows of L⁻¹ K_uf."""
        everything = linalg.solve_triangular(self.factor, self.K_uf, lower=True)
        return [everything[rows] for rows in self.slices]

    def residual(self, use: Sequence[bool] | None = None) -> np.ndarray:
        """K_ff less what the blocks in use explain."""
        A = self.A
        return self.K_ff - sum((a.T @ a for a, u in zip(A, use or [True] * len(A), strict=True) if u), 0.0)

    def predict(self, means, covariances):
        """Mean and covariance of f when q(u) has these whitened moments, by the formulas for q(u) itself."""
        L = self.factor
        mean, S = L @ np.concatenate(means), L @ linalg.block_diag(*covariances) @ L.T
        gain = np.linalg.solve(self.K_uu, self.K_uf).T
        return gain @ mean, self.K_ff - gain @ (self.K_uu - S) @ gain.T

    def bound(self, y, noise, learned: Sequence[bool], conditional: str = "prior", groups=(), diagonal=False) -> float:
        """docs/theory.md, section 5 with N × N determinants; ``diagonal`` for mean-field covariances."""
        noise = np.broadcast_to(noise, y.shape)
        A, root = self.A, np.sqrt(noise)
        C = self.K_ff - self.residual() + np.diag(noise)
        fit = -0.5 * y @ np.linalg.solve(C, y)
        log_det = sum(
            np.sum(np.log(1 + np.sum(np.square(a / root), -1)))
            if diagonal
            else np.linalg.slogdet(np.eye(y.size) + a.T @ a / np.outer(root, root))[1]
            for a, u in zip(A, learned, strict=True)
            if u
        )
        penalty = self.penalty(learned, noise, conditional, groups)
        return fit - 0.5 * (log_det + np.sum(np.log(2 * np.pi * noise))) - penalty

    def penalty(self, learned, noise, conditional, groups=()):
        """:param groups: for each group, the numbers of its rows."""
        D = self.residual(learned)
        ratio = np.diag(D) / noise
        if conditional in ("grouped", "full"):
            whole = np.eye(ratio.size) + D / np.sqrt(np.outer(noise, noise))
            groups = [np.arange(ratio.size)] if conditional == "full" else groups
            return 0.5 * sum(np.linalg.slogdet(whole[np.ix_(rows, rows)])[1] for rows in groups)
        return {
            "prior": 0.5 * np.sum(ratio),
            "tight": 0.5 * np.sum(np.log1p(ratio)),
            "shared": 0.5 * ratio.size * np.log1p(np.mean(ratio)),
        }[conditional]


def titsias(K_uu, K_uf, K_ff, y, noise):
    """SGPR's bound as Titsias (2009) wrote it."""
    Q = K_uf.T @ np.linalg.solve(K_uu, K_uf)
    noise = np.broadcast_to(noise, y.shape)
    return log_normal(y, Q + np.diag(noise)) - 0.5 * np.sum(np.diag(K_ff - Q) / noise)


def titsias_upper(Q, norm, y, noise):
    """Titsias' (2014) upper bound, ``norm`` bounding the residual covariance's eigenvalues."""
    noise = np.broadcast_to(noise, y.shape)
    inflated = Q + np.diag(noise + norm)
    log_det = np.linalg.slogdet(Q + np.diag(noise))[1]
    return -0.5 * (y @ np.linalg.solve(inflated, y) + log_det + y.size * np.log(2 * np.pi))


def fernlund(K, Z, O, X, y, noise):
    """Fernlund (2022), eq. 5.33 (with the log it lacks): two-step conditional covariances, one marginal."""
    gain = np.linalg.solve(K(Z, Z), K(Z, O)).T
    C_oo, C_of = K(O, O) - gain @ K(Z, O), K(O, X) - gain @ K(Z, X)
    Q = K(Z, X).T @ np.linalg.solve(K(Z, Z), K(Z, X)) + C_of.T @ np.linalg.solve(C_oo, C_of)
    return log_normal(y, Q + noise * np.eye(len(y))) - 0.5 * np.trace(K(X, X) - Q) / noise


# ---------------------------------------------------------------- evidence of other likelihoods

LOG_DENSITY: dict[str, Callable] = {
    "logit": lambda f, y: special.log_expit(np.where(y > 0, f, -f)),
    "probit": lambda f, y: special.log_ndtr(np.where(y > 0, f, -f)),
    "poisson": lambda f, y: y * f - np.exp(f) - special.gammaln(y + 1),
    "laplace": lambda f, y: stats.laplace.logpdf(y, f, 0.5),
    "student": lambda f, y: stats.t.logpdf(y, 3.0, f, 0.3),
    # Not log-concave and not even unimodal: the sign of f is lost.
    "bimodal": lambda f, y: stats.norm.logpdf(y, f**2 - 1.0, 0.5),
}


def log_evidence(root, log_likelihood: Callable, nodes: int, reach: float = 8.0) -> float:
    """
    log ∫ Π_n p(y_n | f_n) N(f; 0, root rootᵀ) df, by the trapezoid rule in every direction of z, f = root z.

    :param root: (N, R); few columns make strongly dependent rows, and a cheap sum.
    :param log_likelihood: from f (..., N) to (..., N).
    """
    z = np.linspace(-reach, reach, nodes)
    log_weight = -0.5 * z**2 - 0.5 * np.log(2 * np.pi) + np.log(z[1] - z[0])
    grids = np.meshgrid(*[z] * root.shape[1], indexing="ij")
    f = np.stack(grids, -1) @ root.T
    total = sum(np.meshgrid(*[log_weight] * root.shape[1], indexing="ij"))
    return special.logsumexp(total + np.sum(log_likelihood(f), -1))
