"""Start SciPy's k-means well: for inducing points, and for groups of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.cluster import vq
from scipy.spatial.distance import cdist

#: Of more rows than this, and than :data:`ROWS_PER_CENTER` for each center, that many random ones are clustered.
FULL_KMEANS_ROWS, ROWS_PER_CENTER = 20_000, 64
#: Most distances between those rows and the centers, all of which SciPy holds at a time (8 bytes each).
MAX_DISTANCES = 2**26
#: It ends when a step lowers the mean distance from the nearest center by less than this share of the data's scale.
TOLERANCE = 3e-5


def kmeans_centers(X: NDArray[Any], size: int, generator: np.random.Generator) -> NDArray[Any]:
    """
    Compute the different centers of k-means, at most ``size``: fewer where X has fewer different rows.

    Lloyd's (1982) steps are ``scipy.cluster.vq.kmeans``'s. The start is k-means++ (Arthur & Vassilvitskii 2007) in
    O(N size), for SciPy's own is O(N size²).
    """
    rows = max(FULL_KMEANS_ROWS, min(ROWS_PER_CENTER * size, MAX_DISTANCES // size))
    if len(X) > rows:
        X = X[generator.choice(len(X), rows, replace=False)]
    middle = X.mean(axis=0, dtype=np.float64)
    x = X.astype(np.float64) - middle  # around zero, where distances hardly round
    chosen, nearest = [int(generator.integers(len(x)))], np.full(len(x), np.inf)
    while len(chosen) < size:
        nearest = np.minimum(nearest, cdist(x, x[chosen[-1:]], "sqeuclidean")[:, 0])
        if not nearest.any():
            break
        chosen.append(int(generator.choice(len(x), p=nearest / nearest.sum())))
    centers, wanted = x[chosen], len(chosen)
    if wanted == 1:  # which SciPy takes for a number of centers
        return middle.astype(X.dtype)[None]
    while True:  # SciPy drops centers without rows: each goes on from the row farthest from those left
        centers = vq.kmeans(x, centers, thresh=TOLERANCE * x.std(), check_finite=False)[0]
        if len(centers) == wanted:
            return np.unique((centers + middle).astype(X.dtype), axis=0)
        distance = vq.vq(x, centers, check_finite=False)[1]
        centers = np.concatenate([centers, x[np.argsort(-distance, kind="stable")[: wanted - len(centers)]]])
