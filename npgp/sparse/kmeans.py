"""k-means on the host, with nothing but NumPy and SciPy: for the start of inducing points, and for groups of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

__all__ = ["kmeans_centers"]

#: Of more rows than this, and than :data:`ROWS_PER_CENTER` for each center, that many random ones are clustered.
FULL_KMEANS_ROWS, ROWS_PER_CENTER = 20_000, 64
#: Steps at most, and the share by which a step must lower the sum of squared distances for another to follow.
MAX_STEPS, TOLERANCE = 100, 1e-4
#: Distances that are computed at a time: few enough for a processor's cache.
DISTANCES = 2**16


def kmeans_centers(X: NDArray[Any], size: int, generator: np.random.Generator) -> NDArray[Any]:
    """
    The different centers of k-means, at most ``size``: fewer where X has fewer different rows.

    Steps of Lloyd (1982) from a start by k-means++ (Arthur & Vassilvitskii 2007), of which each center is the best of a
    few. Of very many rows a random part is clustered: with 64 rows or more to a center, centers of the part are hardly
    worse than centers of all.
    """
    rows = max(FULL_KMEANS_ROWS, ROWS_PER_CENTER * size)
    if len(X) > rows:
        X = X[generator.choice(len(X), rows, replace=False)]
    middle = X.mean(axis=0, dtype=np.float64)
    # Squared distances come as |x|² − 2 xᵀc + |c|², in double precision and around zero, where rounding is harmless.
    x = X.astype(np.float64) - middle
    centers = _spread_out(x, size, generator)
    before = np.inf
    for _ in range(MAX_STEPS):
        nearest, distance = _nearest(x, centers)
        counts = np.bincount(nearest, minlength=len(centers))
        members = csr_array((np.ones(len(x)), nearest, np.arange(len(x) + 1)), shape=(len(x), len(centers)))
        moved = members.T @ x / np.maximum(counts, 1)[:, None]
        empty = np.flatnonzero(counts == 0)
        moved[empty] = x[np.argsort(-distance, kind="stable")[: len(empty)]]  # to where a center is farthest
        centers, total = moved, float(np.sum(distance))
        if total >= (1.0 - TOLERANCE) * before:
            break
        before = total
    return np.unique((centers + middle).astype(X.dtype), axis=0)


def _spread_out(x: NDArray[Any], size: int, generator: np.random.Generator) -> NDArray[Any]:
    """Rows of x as first centers, each drawn with probability in proportion to its distance² from those before it."""
    square = np.sum(np.square(x), axis=1)
    negligible = 1e-12 * float(square.max(initial=0.0))  # the distance of a row from itself, rounded
    chosen = [int(generator.integers(len(x)))]
    distance = np.full(len(x), np.inf)
    tries = 2 + int(np.log(size))
    while True:
        closer = np.minimum(distance, _squared(x, square, x[chosen[-1:]])[:, 0])
        distance = np.where(closer <= negligible, 0.0, closer)
        total = np.cumsum(distance)
        if len(chosen) == size or total[-1] == 0.0:
            return x[chosen]
        drawn = np.searchsorted(total, total[-1] * generator.uniform(size=tries), side="right")
        drawn = np.minimum(drawn, np.flatnonzero(distance)[-1])
        left = np.minimum(distance[:, None], _squared(x, square, x[drawn])).sum(axis=0)
        chosen.append(int(drawn[np.argmin(left)]))


def _nearest(x: NDArray[Any], centers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """For each row its nearest center, and the squared distance from it."""
    nearest, distance = np.empty(len(x), int), np.empty(len(x))
    doubled, square = -2.0 * centers.T, np.sum(np.square(centers), axis=1)
    chunk = max(1, DISTANCES // len(centers))
    for i in range(0, len(x), chunk):
        relative = x[i : i + chunk] @ doubled  # to |x|², in which the centers agree
        relative += square
        nearest[i : i + chunk] = found = np.argmin(relative, axis=1)
        distance[i : i + chunk] = relative[np.arange(len(found)), found]
    return nearest, np.maximum(distance + np.sum(np.square(x), axis=1), 0.0)


def _squared(x: NDArray[Any], square: NDArray[Any], centers: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(np.maximum(square[:, None] - 2.0 * (x @ centers.T) + np.sum(np.square(centers), axis=1), 0.0))
