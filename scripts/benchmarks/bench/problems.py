"""The problem that all libraries are given: data, and parameters to start from. Needs NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Adam's learning rate in all step times.
LEARNING_RATE = 0.01
#: Absolute jitter on the diagonal of K_uu, the same for all; prior variances start at 1.
JITTER = {"float32": 1e-5, "float64": 1e-8}


@dataclass
class Problem:
    """
    A sparse GP regression at its start.

    :param X: inputs, (N, D).
    :param y: targets, (N,).
    :param X_new: inputs at which to predict.
    :param Z: inducing inputs, (M, D).
    :param loc: mean of the whitened inducing values, (M,).
    :param scale_tril: factor of their covariance, (M, M), lower triangular with a positive diagonal.
    :param lengthscale: one for each column, (D,).
    :param variance: of the kernel.
    :param noise: variance of the noise.
    :param batch_size: B.
    """

    X: np.ndarray
    y: np.ndarray
    X_new: np.ndarray
    Z: np.ndarray
    loc: np.ndarray
    scale_tril: np.ndarray
    lengthscale: np.ndarray
    variance: float
    noise: float
    batch_size: int

    @property
    def dtype(self) -> str:
        return self.X.dtype.name

    @property
    def jitter(self) -> float:
        return JITTER[self.dtype]

    @property
    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows at which libraries compare their ELBOs."""
        return self.X[: self.batch_size], self.y[: self.batch_size]

    @property
    def jitter_of_rows(self) -> float:
        """By how much an ELBO is less for a library that adds the jitter to the variance of f at rows, too."""
        return 0.5 * len(self.y) * self.jitter / self.noise

    def save(self, path: Path) -> None:
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: str, dtype: str) -> Problem:
        with np.load(path) as file:
            values = {name: file[name] for name in file.files}
        arrays = {name: value.astype(dtype) for name, value in values.items() if value.ndim}
        numbers = {name: value.item() for name, value in values.items() if not value.ndim}
        return cls(**arrays, **numbers)


def synthetic(rows: int, new: int, columns: int, inducing: int, batch_size: int, seed: int = 0) -> Problem:
    """Smooth functions of a few columns, with noise; q is neither the prior nor diagonal, so that ELBOs tell."""
    rng = np.random.default_rng(seed)
    X, X_new = (rng.uniform(-1.7, 1.7, (n, columns)) for n in (rows, new))
    y = np.sin(2.0 * X[:, 0]) + X[:, -1] * X[:, columns // 2] + 0.3 * rng.normal(size=rows)
    return Problem(
        X=X,
        y=y / y.std(),
        X_new=X_new,
        Z=rng.uniform(-1.7, 1.7, (inducing, columns)),
        loc=0.1 * rng.normal(size=inducing),
        scale_tril=np.tril(rng.normal(size=(inducing, inducing)), -1) * 0.1 / np.sqrt(inducing)
        + 0.5 * np.eye(inducing),
        lengthscale=np.full(columns, 2.0),
        variance=1.0,
        noise=0.1,
        batch_size=batch_size,
    )
