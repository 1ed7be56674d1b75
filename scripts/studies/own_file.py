"""Rows of a file of the user's own, for studies of regression: ``--data FILE.npz`` with X (N, D) and y (N,)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from npgp import datasets
from npgp.datasets._uci import SEEDED_FOLDS, seeded_folds, split_at


def rows(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """X and y of a file, as float64."""
    try:
        with np.load(path) as file:
            X, y = (np.asarray(file[name], float) for name in ("X", "y"))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise SystemExit(f"--data {path}: {error}; it must be an .npz file of numbers X (N, D) and y (N,).") from None
    if X.ndim != 2 or y.shape != X.shape[:1] or len(y) < SEEDED_FOLDS:
        raise SystemExit(f"--data {path}: X has shape {X.shape} and y {y.shape}; they must be (N, D) and (N,), N ≥ 10.")
    if not (np.isfinite(X).all() and np.isfinite(y).all()):
        raise SystemExit(f"--data {path}: X or y has NaN or infinite entries; leave these rows out.")
    return X, y


def split(path: Path, number: int) -> datasets.RegressionSplit:
    """One of ten splits at random, standardized by its training rows."""
    X, y = rows(path)
    test = seeded_folds(len(y)) == number % SEEDED_FOLDS
    return split_at(X, y, np.flatnonzero(~test), np.flatnonzero(test))
