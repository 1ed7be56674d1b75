"""The data that approximations are compared on: simulated sites, UCI sets and people's own files."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npgp import datasets

#: Random cosines of which the simulated function is made.
COSINES = 4096


class Data(NamedTuple):
    """Standardized rows."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def simulate(rows: int, lengthscale: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Sites of the unit square and noisy values of a function of variance 1 there, noise variance .1.

    The function is a sum of random cosines whose covariance is Matérn-3/2: no method's own prior is favoured.
    """
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(rows, 2))
    # The spectral density of Matérn-3/2 is that of a Student-t with three degrees of freedom.
    frequencies = rng.normal(size=(COSINES, 2)) * np.sqrt(3.0 / rng.chisquare(3, COSINES))[:, None] / lengthscale
    phases = rng.uniform(0.0, 2.0 * np.pi, COSINES)
    parts = np.array_split(X, -(-rows // 2000))
    f = np.concatenate([np.cos(part @ frequencies.T + phases).sum(1) for part in parts]) * math.sqrt(2.0 / COSINES)
    return X, f + math.sqrt(0.1) * rng.normal(size=rows)


def read(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {key: np.asarray(arrays[key], np.float64) for key in arrays.files if arrays[key].dtype.kind in "iuf"}
    with open(path, encoding="utf-8") as file:
        first = file.readline().strip().split(",")
    try:
        [float(v) for v in first]
    except ValueError:
        heading = 1
    else:
        heading = 0
    table = np.loadtxt(path, delimiter=",", skiprows=heading, ndmin=2)
    return {"X": table[:, :-1], "y": table[:, -1]}


def load(args: argparse.Namespace) -> Data:
    """The data set, a tenth of its rows kept for testing if there is no split, standardized by the training rows."""
    rng = np.random.default_rng(args.seed)
    if args.data in datasets.UCI_NAMES:
        data = datasets.uci(args.data, args.split)
        arrays = [data.X_train, data.y_train, data.X_test, data.y_test]
    else:
        if args.data == "snelson":
            X, y, _ = datasets.snelson()
        elif args.data == "spatial":
            rows = args.rows or 10_000
            X, y = simulate(rows + max(rows // 10, 1), args.lengthscale, args.seed)
        else:
            path = Path(args.data)
            if not path.is_file():
                names = "snelson, spatial, a name of npgp.datasets.UCI_NAMES or a file"
                raise SystemExit(f"DATA is {args.data!r}; it must be {names}.")
            found = read(path)
            if not {"X", "y"} <= set(found) or found["X"].ndim != 2 or found["y"].shape != found["X"].shape[:1]:
                raise SystemExit(f"{path} has no X of shape (rows, columns) and y of shape (rows,).")
            X, y = found["X"], found["y"]
        order = rng.permutation(len(y))
        test, train = np.split(order, [max(len(y) // 11 if args.data == "spatial" else len(y) // 10, 1)])
        arrays = [X[train], y[train], X[test], y[test]]
    if args.rows and len(arrays[1]) > args.rows:
        rows = np.sort(rng.choice(len(arrays[1]), args.rows, replace=False))
        arrays[:2] = [a[rows] for a in arrays[:2]]
    moments = [(a.mean(axis=0), np.where(a.std(axis=0) > 0.0, a.std(axis=0), 1.0)) for a in arrays[:2]]
    return Data(*((a - moments[i % 2][0]) / moments[i % 2][1] for i, a in enumerate(arrays)))
