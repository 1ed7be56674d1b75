"""
Latents by distances along the data, as if these were a sheet that is curved in their space (Isomap; Tenenbaum, de Silva
& Langford 2000).
"""

from __future__ import annotations

import itertools

import numpy as np
from scipy.linalg import eigh
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, shortest_path


def geodesic_coordinates(Y: np.ndarray, dims: int, neighbors: int) -> np.ndarray:
    """
    Points whose distances are, as well as they can be, those of the rows along a graph of nearest neighbors.

    Parts of the graph that are not connected are joined, each to each, where they are closest. At O(N² log N).

    :param Y: data, (N, D).
    :param dims: of the points, at most N.
    :param neighbors: how many nearest rows each row is joined with; fewer where there are no more.
    :return: (N, dims), of mean 0, the widest dimension first, whose standard deviation is 1; 0 for rows that are all
        the same.
    """
    from scipy.spatial.distance import cdist  # a seventh of what npgp takes to import, for those who come here

    count = len(Y)
    apart = cdist(Y, Y)
    np.fill_diagonal(apart, np.inf)
    near = np.argsort(apart, axis=1, kind="stable")[:, : min(neighbors, count - 1)]
    ends = [np.stack([np.repeat(np.arange(count), near.shape[1]), near.ravel()], axis=1)]
    parts = connected_components(_graph(apart, ends), directed=False)[1]
    for i, j in itertools.combinations(range(np.max(parts) + 1), 2):
        one, other = np.flatnonzero(parts == i), np.flatnonzero(parts == j)
        closest = np.unravel_index(np.argmin(apart[np.ix_(one, other)]), (len(one), len(other)))
        ends.append(np.array([[one[closest[0]], other[closest[1]]]]))
    along = shortest_path(_graph(apart, ends), directed=False)
    # Classical scaling: the inner products of points with these distances.
    products = -0.5 * np.square(along)
    products -= np.mean(products, axis=0)
    products -= np.mean(products, axis=1, keepdims=True)
    values, vectors = eigh(products, subset_by_index=(count - dims, count - 1))
    points = (vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1]
    return points / (np.std(points[:, 0]) or 1.0)


def _graph(apart: np.ndarray, ends: list[np.ndarray]) -> csr_array:
    one, other = np.concatenate(ends).T
    # A distance of 0 would be none: rows that are the same are all but.
    lengths = np.maximum(apart[one, other], np.finfo(float).tiny)
    return csr_array((lengths, (one, other)), shape=apart.shape)
