"""UCI sets, standardized, and one that is simulated."""

from __future__ import annotations

import numpy as np

from npgp import datasets

SETS = {"yacht": "yacht_raw", "energy": "energy", "concrete": "concrete", "kin8nm": "kin8nm", "power": "power"}
#: Sets of some 40,000 rows, which the tables do not have.
LARGER = ("kin40k", "protein", "keggdirected")


def load(name: str, repetition: int, rows: int | None) -> datasets.RegressionSplit:
    """A split, standardized; with a limit, that many training rows and a quarter as many test rows, at random."""
    if name == "simulated":
        return simulated(repetition, rows or 200)
    data = datasets.uci(SETS.get(name, name), repetition)
    rng, fields = np.random.default_rng(repetition), dict(data.__dict__)
    for kind, most in (("train", rows), ("test", rows and max(rows // 4, 1))):
        if most is not None and len(fields[f"y_{kind}"]) > most:
            kept = np.sort(rng.choice(len(fields[f"y_{kind}"]), most, replace=False))
            fields.update({key: fields[key][kept] for key in (f"X_{kind}", f"y_{kind}")})
    return datasets.RegressionSplit(**fields)


def simulated(seed: int, rows: int) -> datasets.RegressionSplit:
    """Three columns and a smooth function of two of them, in units of its own."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows + rows // 4, 3))
    y = np.sin(2.0 * X[:, 0]) + 0.5 * np.abs(X[:, 1]) + 0.1 * rng.normal(size=len(X))
    mean, scale = np.mean(y[:rows]), np.std(y[:rows])
    y = (y - mean) / scale
    return datasets.RegressionSplit(
        X[:rows], y[:rows], X[rows:], y[rows:], np.zeros(3), np.ones(3), 20.0 + 7.0 * float(mean), 7.0 * float(scale)
    )
