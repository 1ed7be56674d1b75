"""
Where latents lie when a climb begins, in lengthscales: by principal components, or by distances along the data.

How wide they are decides how curved the functions are at first, and how they lie whether clusters have to pass.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any

import jax
import numpy as np
from scipy.linalg import eigh
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, shortest_path

from npgp.gplvm.start import Start
from npgp.inducing.selection import greedy_variance, kmeans
from npgp.kernels import RBF

#: By principal components: the standard deviation of the first in lengthscales, and the power of the components' shares
#: that gives those of the others.
COMPONENTS = (0.4, 1.0)
#: By distances along the data, in so many dimensions: the standard deviation of the first in lengthscales, the share of
#: it that principal components have in the other dimensions, and how many neighbors each row has.
SHEET = 2
GEODESIC = (0.3, 0.1, 8)
#: Of many rows; and of few, where there are wider ones, and one in which the first component is far ahead. It is quick
#: at first and may end lower, so that it is for a race to the end.
MANY = (COMPONENTS, GEODESIC, (0.3, 0.1, 11), (0.3, 0.1, 15))
FEW = (COMPONENTS, (0.7, 1.0), (0.7, 3.0), GEODESIC)
#: Standard deviation of q(x) at first, as a share of the widest latent dimension's.
POSTERIOR_SHARE = 0.15
#: Noise variance at first, as a share of the data's.
NOISE_SHARE = 0.1


def checked(given: Any) -> list[tuple[float, ...]]:
    """
    Layouts as tuples of numbers.

    :raises ValueError: for what is none.
    """
    try:
        layouts = [tuple(map(float, layout)) for layout in given]
    except (TypeError, ValueError):
        layouts = []
    right = [len(layout) in (2, 3) and 0.0 < min(layout) and max(layout) < np.inf for layout in layouts]
    if not layouts or not all(right) or any(not layout[2].is_integer() for layout in layouts if len(layout) == 3):
        raise ValueError(
            f"starts is {given!r}; it must hold pairs of positive numbers, a width and a power, or triples, a width, "
            "a share and a whole number of neighbors."
        )
    return layouts


class Sheets:
    """
    Latents of each layout, in lengthscales; distances along the data are taken once for each number of neighbors.

    :param components: principal components of variance 1, (N, Q).
    :param Y: the data, (N, D).
    :param present: which of their entries there are, (N, D); the others are filled in by the components.
    """

    def __init__(self, components: np.ndarray, Y: np.ndarray, present: np.ndarray):
        count = np.maximum(np.sum(present, axis=0), 1)
        centered = np.where(present, Y - np.sum(Y * present, axis=0) / count, 0.0)
        slopes = components.T @ centered / count
        lengths = np.sqrt(np.sum(np.square(slopes), axis=1))
        self.components, self.filled = components, np.where(present, centered, components @ slopes)
        self.shares = np.maximum(lengths / (np.max(lengths) or 1.0), 1e-3)
        self.along = cache(self._along)

    def _along(self, neighbors: int) -> np.ndarray:
        return geodesic_coordinates(self.filled, min(SHEET, self.components.shape[1]), neighbors)

    def __call__(self, layout: tuple[float, ...]) -> np.ndarray:
        """Latents, (N, Q)."""
        if len(layout) == 2:
            width, power = layout
            return width * self.shares**power * self.components
        width, rest, neighbors = layout
        sheet = self.along(int(neighbors))
        others = slice(self.components.shape[1] - sheet.shape[1])
        return width * np.concatenate([sheet, rest * (self.shares * self.components)[:, others]], axis=1)


def begin(
    first: Start,
    Y: np.ndarray,
    present: np.ndarray,
    layout: tuple[float, ...],
    sheets: Sheets,
    rng_key: jax.Array | None = None,
) -> Start:
    """
    The start of a layout, otherwise like another one. Its variance is such that the functions' linear parts have that
    of the data.

    :param first: the other one.
    :param Y: the data, (N, D).
    :param present: which of their entries there are, (N, D).
    :param rng_key: for inducing inputs by k-means; without one nothing is random.
    """
    width, scaled = layout[0], sheets(layout)
    centered, count = np.where(present, Y - first.offset, 0.0), np.maximum(np.sum(present, axis=0), 1)
    deviation = POSTERIOR_SHARE * width
    lengthscale = 1.0 / np.sqrt(np.mean(np.square(scaled), axis=0) + deviation**2)  # the best, given the rest
    variance = float(np.mean(np.sum(np.square(centered), axis=0) / count)) or 1.0
    inducing = _inducing(rng_key, scaled, len(first.blocks[0]))  # type: ignore[arg-type]
    return dataclasses.replace(
        first,
        latents=scaled * lengthscale,
        inducing=inducing * lengthscale,
        lengthscale=lengthscale,
        latent_scale=deviation * lengthscale,
        noise_variance=NOISE_SHARE * variance,
        variance=variance * max(1.0, 0.3 / width**2),
    )


def _inducing(rng_key: jax.Array | None, points: np.ndarray, count: int) -> np.ndarray:
    """
    Inducing inputs among latents in units of lengthscales: where f's variance is largest given those before, which no
    key has a part in; or, with a key, centers of k-means. Where there are fewer different points, close copies too.
    """
    different = points[np.sort(np.unique(points, axis=0, return_index=True)[1])]
    size = min(count, len(different))
    with jax.enable_x64(True):
        if rng_key is None:
            chosen = np.asarray(greedy_variance(RBF(1.0), different, size))
        else:
            chosen = np.asarray(kmeans(rng_key, different, size))
    copies = np.arange(count - size) % size
    return np.concatenate([chosen, chosen[copies] + 0.01 * (1.0 + np.arange(count - size))[:, None]])


# ---------------------------------------------------------------------------------------------------------------
# Isomap (Tenenbaum, de Silva & Langford 2000): distances along the data, as if these were a curved sheet in their space


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
