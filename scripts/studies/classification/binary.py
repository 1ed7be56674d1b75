"""Binary data and their scores, for ``classification.py``: splits, starts, probit probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from numpyro.infer import SVI
from scipy import special

import npgp
from npgp import datasets
from npgp.training import FitResult

LIKELIHOOD = npgp.Bernoulli(link="probit")  # GPyTorch's link


def banana() -> tuple[np.ndarray, np.ndarray, int]:
    data = datasets.load("banana_large")
    return data["X"], data["y"], 400


def cancer() -> tuple[np.ndarray, np.ndarray, int]:
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    return X, y, 400


def recurrence() -> tuple[np.ndarray, np.ndarray, int]:
    data = datasets.load("uci_breastcancer")
    # Columns: a number, whether it recurred (centered), and measurements; the set's own target is the time until then.
    return data["X"][:, 2:], (data["X"][:, 1] > 0).astype(int), 150


SETS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray, int]]] = {
    "banana": banana,
    "cancer": cancer,
    "recurrence": recurrence,
}


@dataclass(frozen=True)
class Split:
    """Rows of a split; inputs standardized by the training rows."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray

    @classmethod
    def load(cls, name: str, seed: int, rows: int | None = None) -> Split:
        X, y, train = SETS[name]()
        order = np.random.default_rng(seed).permutation(len(y))
        train_rows, test_rows = order[: min(train, rows or train)], order[train:]
        mean, scale = X[train_rows].mean(0), X[train_rows].std(0)
        X = (X - mean) / np.where(scale > 0, scale, 1.0)
        y = y.astype(float)
        return cls(X[train_rows], y[train_rows], X[test_rows], y[test_rows])

    def inducing(self, shares: tuple[float, ...], M: int, lengthscale: float, seed: int) -> list[np.ndarray]:
        """Starts of the blocks: centers of k-means, and greedily given these."""
        blocks = [np.asarray(npgp.inducing.kmeans(jax.random.key(seed), self.X, int(shares[0] * M)))]
        for share in shares[1:]:
            kernel = npgp.RBF(lengthscale)
            blocks.append(np.asarray(npgp.inducing.greedy_variance(kernel, self.X, int(share * M), given=blocks)))
        return blocks


def scores(log_p: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Error and mean log-likelihood, from log P(y = 0), log P(y = 1) of shape (2, N)."""
    log_p = np.asarray(log_p)
    likelihood = log_p[y.astype(int), np.arange(len(y))]
    return {"error": float(np.mean((log_p[1] > log_p[0]) != y)), "log_likelihood": float(np.mean(likelihood))}


def log_probabilities(mean, variance) -> np.ndarray:
    """log P(y = 0) and log P(y = 1) where f ~ N(mean, variance)."""
    ratio = np.asarray(mean) / np.sqrt(1 + np.asarray(variance))
    return special.log_ndtr(np.stack([-ratio, ratio]))


def train(svi: SVI, key: jax.Array, steps: int, split: Split) -> FitResult:
    start = jax.jit(svi.init)(key, split.X, split.y)  # op by op this takes seconds
    return npgp.fit(svi, key, steps, split.X, split.y, init_state=start, progress=False)
