"""SGPR, ODVGP and SOLVE-GP on one-dimensional data: their bounds, fits, posteriors and divergences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

import npgp
from npgp import datasets
from npgp.variational import DenseNormal
from studies.shared import lbfgs

#: S of each block of q: one block for the union, two for the orthogonal structures.
STRUCTURES: dict[str, tuple[str, ...]] = {
    "SGPR": ("dense",),
    "ODVGP": ("dense", "mean-only"),
    "SOLVE-GP": ("dense", "dense"),
}
#: Relative to the prior variance, in float64.
JITTER = 1e-8
#: Logs of lengthscale, variance and noise stay within these.
LOG_BOUNDS = (-7.0, 6.0)


class Data(NamedTuple):
    """Rows, and the exact GP's hyperparameters (logs of lengthscale, variance, noise) and log evidence there."""

    X: np.ndarray
    y: np.ndarray
    hyper: np.ndarray
    evidence: float

    @property
    def lengthscale(self) -> float:
        return float(np.exp(self.hyper[0]))

    @property
    def kernel(self) -> npgp.RBF:
        return npgp.RBF(np.exp(self.hyper[0]), variance=np.exp(self.hyper[1]))


def collapsed(hyper, points, X, split: int, structure: str, conditional: str) -> npgp.CollapsedGP:
    """The first ``split`` of the points are the first set; SGPR has them all in one."""
    lengthscale, variance, noise = jnp.exp(hyper)
    points = points[:, None]
    return npgp.CollapsedGP(
        npgp.RBF(lengthscale, variance=variance),
        X,
        points if structure == "SGPR" else [points[:split], points[split:]],
        noise_variance=noise,
        conditional=conditional,
        covariances=STRUCTURES[structure],
        jitter=JITTER,
    )


@partial(jax.jit, static_argnames=("split", "structure", "conditional"))
def _bound_and_slopes(hyper, points, X, y, split: int, structure: str, conditional: str):
    def bound(hyper, points):
        return collapsed(hyper, points, X, split, structure, conditional).log_prob(y)

    return jax.value_and_grad(bound, (0, 1))(hyper, points)


def bound_and_slopes(hyper, points, data: Data, split: int, structure: str, conditional: str = "prior"):
    """The collapsed bound, and its slopes with hyperparameters and points. Compiled once for each structure."""
    split = 0 if structure == "SGPR" else split
    value, slopes = _bound_and_slopes(hyper, points, data.X, data.y, split, structure, conditional)
    return float(value), np.asarray(slopes[0]), np.asarray(slopes[1])


def bound(points, data: Data, split: int, structure: str) -> float:
    """With ``prior``, at the exact GP's hyperparameters: log evidence less this is the KL to the exact posterior."""
    return bound_and_slopes(data.hyper, points, data, split, structure)[0]


@jax.jit
def _evidence_and_slope(hyper, X, y):
    def evidence(hyper):
        lengthscale, variance, noise = jnp.exp(hyper)
        return npgp.exact_log_evidence(npgp.RBF(lengthscale, variance=variance), X, y, noise_variance=noise)

    return jax.value_and_grad(evidence)(hyper)


def evidence_and_slope(hyper, X, y):
    value, slope = _evidence_and_slope(hyper, X, y)
    return float(value), np.asarray(slope)


def maximize(objective, start: np.ndarray, num_logs: int) -> tuple[float, np.ndarray]:
    """The most from a start, whose first so many entries are logs, and where it is taken."""

    def loss(theta):
        value, slope = objective(theta)
        return -value, -slope

    optimum = lbfgs(loss, start, 1000, num_logs, LOG_BOUNDS, ftol=1e-13, gtol=1e-7)
    return -float(optimum.fun), optimum.x


def fit_all(data: Data, starts, split: int, structure: str, conditional: str) -> tuple[float, np.ndarray, np.ndarray]:
    """Maximize the bound over hyperparameters and points; the best of starts (hyper, points)."""

    def objective(theta):
        value, hyper, points = bound_and_slopes(theta[:3], theta[3:], data, split, structure, conditional)
        return value, np.concatenate([hyper, points])

    best, theta = max((maximize(objective, np.concatenate(start), 3) for start in starts), key=lambda fit: fit[0])
    return best, theta[:3], theta[3:]


def fit_points(data: Data, starts: Sequence[np.ndarray], split: int, structure: str) -> tuple[float, np.ndarray]:
    """Maximize the ``prior`` bound over the points alone; the best of starts."""

    def objective(points):
        value, _, slope = bound_and_slopes(data.hyper, points, data, split, structure)
        return value, slope

    return max((maximize(objective, np.asarray(start), 0) for start in starts), key=lambda fit: fit[0])


@partial(jax.jit, static_argnames=("split", "structure"))
def predict(hyper, points, X, y, grid, split: int, structure: str):
    """Mean and variance of y at the grid; the conditional has no part in it."""
    mean, variance = collapsed(hyper, points, X, split, structure, "prior").condition(y).mean_and_variance(grid)
    return mean, variance + jnp.exp(hyper[2])


@partial(jax.jit, static_argnames=("split", "structure"))
def whitened_posterior(hyper, points, X, y, split: int, structure: str):
    """
    Mean and Cholesky factor of q(ε) for all blocks stacked.

    The coordinates are the same for all structures: factorizing K_uu by blocks gives the Cholesky factor of the whole.
    """
    q = collapsed(hyper, points, X, split, structure, "prior").condition(y).q
    factors = [block.scale_tril if isinstance(block, DenseNormal) else jnp.eye(block.event_shape[0]) for block in q]
    return jnp.concatenate([block.loc for block in q]), jax.scipy.linalg.block_diag(*factors)


def gaussian_kl(mean, factor, mean1, factor1) -> float:
    """``KL[N(mean, L Lᵀ) ‖ N(mean1, L1 L1ᵀ)]`` of lower Cholesky factors."""
    ratio = scipy.linalg.solve_triangular(factor1, factor, lower=True)
    shift = scipy.linalg.solve_triangular(factor1, mean1 - mean, lower=True)
    log_det = np.sum(np.log(np.diag(ratio)))
    return float(0.5 * (np.sum(np.square(ratio)) + shift @ shift - len(shift)) - log_det)


def kl_to_sgpr(points, data: Data, split: int, structure: str) -> float:
    """From the posterior of a structure to SGPR's on both sets, at the exact GP's hyperparameters."""
    q = whitened_posterior(data.hyper, points, data.X, data.y, split, structure)
    sgpr = whitened_posterior(data.hyper, points, data.X, data.y, 0, "SGPR")
    return gaussian_kl(*map(np.asarray, (*q, *sgpr)))


def load_data(seed: int) -> tuple[str, np.ndarray, np.ndarray]:
    """Snelson's data, or 200 rows simulated to resemble them."""
    try:
        X, y, _ = datasets.snelson()
        return "Snelson's data", X, y
    except FileNotFoundError:
        rng = np.random.default_rng(seed)
        X = np.sort(rng.uniform(0.0, 6.0, 200))[:, None]
        K = 0.7 * np.exp(-0.5 * ((X - X.T) / 0.6) ** 2) + 0.08 * np.eye(200)
        return "simulated data, as Snelson's were not found", X, np.linalg.cholesky(K) @ rng.normal(size=200)


def exact_fit(X: np.ndarray, y: np.ndarray) -> Data:
    """Hyperparameters of maximum evidence."""
    evidence, hyper = maximize(lambda h: evidence_and_slope(h, X, y), np.zeros(3), 3)
    return Data(X, y, hyper, evidence)
