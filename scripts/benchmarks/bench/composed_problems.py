"""Problems for GPs that are put together, deep or mixed: data, and parameters to start from. Needs NumPy alone.

Both libraries read the same file. Arrays of q are stacked over the functions of a layer, or of a mixture.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

#: Absolute jitter on the diagonal of K_uu, single precision.
JITTER = 1e-4
#: Of what is between layers, for ELBOs at the start.
DRAWS = 100
#: Of inner layers: the kernel's variance, and q's standard deviations. They start as their mean functions.
INNER_VARIANCE, INNER_SCALE = 0.1, 0.01


def save(path: Path, arrays: dict[str, np.ndarray]) -> str:
    np.savez(path, **arrays)
    return str(path)


def load(path: str, dtype: np.dtype) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name].astype(dtype) for name in file.files}


def deep(rows: int, columns: int, width: int, inducing: int, seed: int = 0) -> dict[str, np.ndarray]:
    """
    Two layers: ``width`` functions of the inputs with a linear mean function, and one function of these. Names of a
    layer's arrays end in its number.
    """
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1.7, 1.7, (rows, columns))
    y = np.sin(4.0 * np.tanh(X[:, 0] + 0.5 * X[:, 1])) + X[:, -1] * X[:, columns // 2] + 0.3 * rng.normal(size=rows)
    mean = (
        np.linalg.qr(rng.normal(size=(columns, columns)))[0][:, :width] if width < columns else np.eye(columns, width)
    )
    Z = X[rng.choice(rows, inducing, replace=False)]
    return {
        "X": X,
        "y": y / y.std(),
        "mean": mean,
        "lengthscale1": np.full(columns, columns**0.5),
        "lengthscale2": np.full(width, width**0.5),
        "variance1": np.array(INNER_VARIANCE),
        "variance2": np.array(1.0),
        "Z1": Z,
        "Z2": Z @ mean,
        "loc1": 0.1 * rng.normal(size=(width, inducing)),
        "loc2": 0.3 * rng.normal(size=(1, inducing)),
        "tril1": INNER_SCALE * np.broadcast_to(np.eye(inducing), (width, inducing, inducing)),
        "tril2": _factors(rng, 1, inducing),
        "noise": np.array(0.1),
    }


def mixture(
    rows: int, new: int, columns: int, outputs: int, functions: int, inducing: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """
    Outputs that mix four functions, of which the smoothest has a lengthscale four times that of the roughest; the model
    has so many ``functions``, each with lengthscales and inducing inputs of its own. Names of new rows end in ``_new``.
    """
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.0, 1.0, (rows + new, columns))
    g = [_draw(rng, X / lengthscale) for lengthscale in np.geomspace(0.2, 0.8, 4)]
    Y = rng.normal(size=(outputs, 4)) @ np.stack(g)
    Y = Y / Y.std(axis=1, keepdims=True) + 0.1 * rng.normal(size=Y.shape)
    Z = np.stack([X[rng.choice(rows, inducing, replace=False)] for _ in range(functions)])
    return {
        "X": X[:rows],
        "Y": Y[:, :rows],
        "X_new": X[rows:],
        "Y_new": Y[:, rows:],
        "Z": Z,
        "W": rng.normal(size=(outputs, functions)) / functions**0.5,
        "lengthscale": np.broadcast_to(np.geomspace(0.3, 0.6, functions)[:, None], (functions, columns)),
        "noise": np.full(outputs, 0.1),
        "loc": 0.1 * rng.normal(size=(functions, inducing)),
        "tril": _factors(rng, functions, inducing),
    }


def _draw(rng: np.random.Generator, X: np.ndarray, waves: int = 500) -> np.ndarray:
    """A function of a GP with an RBF kernel of lengthscale 1, by random Fourier features."""
    frequencies, phases = rng.normal(size=(X.shape[1], waves)), rng.uniform(0.0, 2.0 * np.pi, waves)
    return (2.0 / waves) ** 0.5 * np.cos(X @ frequencies + phases) @ rng.normal(size=waves)


def _factors(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Neither the prior's nor diagonal, so that ELBOs tell."""
    return np.tril(rng.normal(size=(count, size, size)), -1) * 0.1 / size**0.5 + 0.5 * np.eye(size)
