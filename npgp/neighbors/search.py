"""
Neighbors of sites, found once, outside ``jit``: for Vecchia's approximation each site's nearest among those before it
in an order, for kriging a new site's nearest among all.

Distances are Euclidean, in units of ``scale`` if that is given. Searches are scikit-learn's, by trees where columns are
few; memory is O(N k).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

from npgp import checks
from npgp.keys import host_generator
from npgp.optional import optional
from npgp.pytrees import pytree

__all__ = ["Neighbors", "Ordering", "nearest", "nearest_before", "order_sites"]

Ordering = Literal["given", "coordinate", "random", "maxmin"]

#: Sites in a run within which all pairs are looked at, and how many of these runs at a time.
RUN, RUNS = 64, 64
#: Sites whose surroundings are looked up together by the order "maxmin".
AHEAD = 256
#: Sites of a wave that are computed together, at most.
LONGEST = 1024
#: Neighbors that are Python numbers at a time.
ENTRIES = 2**20

Array = np.ndarray | jax.Array


@pytree
@dataclass(frozen=True)
class Waves:
    """
    Sites in waves: those of a wave have neighbors in earlier waves alone, and can be computed together.

    .. code-block:: python

        waves = npgp.neighbors.nearest_before(X, 3).waves
        assert waves.sites.shape == (30,)

    :param sites: numbers of the sites, wave after wave, (N,).
    :param starts: the places where parts of waves begin, and then N, as often as it takes, (N + 1,).
    :param size: the most sites in a part.
    """

    sites: Array
    starts: Array
    size: int = field(metadata={"static": True})


@pytree
@dataclass(frozen=True)
class Neighbors:
    """
    An order of N sites, and for each site its neighbors: the nearest k of the sites before it, fewer for the first
    k. Made by :func:`nearest_before`; all numbers are those of rows of X.

    .. code-block:: python

        neighbors = npgp.neighbors.nearest_before(X, 3)
        assert neighbors.rows.shape == (30, 3)

    :param order: the site at each place of the order, (N,) int32.
    :param rows: each site's neighbors, (N, K) int32, with K = min(k, N − 1); where there are fewer, the site itself.
    :param mask: False at those places, (N, K).
    :param waves: sites that can be computed together.
    :param size: k, as it was given.
    :param scale: the units of distances, () or (D,).
    """

    order: Array
    rows: Array
    mask: Array
    waves: Waves
    size: int = field(metadata={"static": True})
    scale: ArrayLike = 1.0

    @property
    def num_sites(self) -> int:
        """N."""
        return self.order.shape[0]


def nearest_before(
    X: ArrayLike,
    size: int,
    *,
    ordering: Ordering = "maxmin",
    scale: ArrayLike = 1.0,
    rng_key: jax.Array | None = None,
) -> Neighbors:
    """
    Order sites, and find for each the nearest of those before it.

    Exact for every order, at O(N log² N) distances where trees help. The approximation is the better the farther the
    first sites of the order are from one another (Guinness 2018), which is what ``"maxmin"`` is for.

    .. code-block:: python

        neighbors = npgp.neighbors.nearest_before(X, 5)  # for NNGP, ResponseNNGP and VNNGP

    :param X: sites, (N, D).
    :param size: k, the number of neighbors: 10 to 30 for most spatial data (Datta et al. 2016). N − 1 or more is the
        exact GP, but dearer than that itself, at O(N⁴) work: use :func:`npgp.exact_log_evidence`, or
        :class:`npgp.SparseGP` with inducing points at the sites.
    :param ordering: see :func:`order_sites`.
    :param scale: units of distances, such as the lengthscales expected: a scalar or one for each column.
    :param rng_key: a JAX random key, for the order ``"random"``, which needs one.
    :raises ImportError: without scikit-learn (``pip install npgp[data]``).
    :raises TypeError: for inputs that are not floating, or traced, and for a size that is no whole number.
    :raises ValueError: for inputs of another shape, without rows or with NaN, for a size below 1, an order unknown, and
        the order ``"random"`` without a key.
    """
    size = checks.whole_number(size, "size")
    points = _scaled(X, "X", scale)
    order = _order(points, ordering, rng_key)
    N, K = len(points), min(size, len(points) - 1)
    distance, places = np.full((N, K), np.inf), np.zeros((N, K), np.int64)
    if K:
        _within_runs(points[order], distance, places)
        # The sites before one are its run's and, for each binary digit 1 of the run's number, a block of 2^digit runs.
        length = RUN
        while length < N:
            for start in range(length, N, 2 * length):
                found = _query(points[order[start - length : start]], points[order[start : start + length]], K)
                _keep_nearest(distance, places, slice(start, start + length), found[0], found[1] + start - length)
            length *= 2
    rows, mask = np.empty((N, K), np.int32), np.empty((N, K), bool)
    mask[order] = np.isfinite(distance)
    rows[order] = np.where(np.isfinite(distance), order[places], order[:, None])
    waves = _waves(order, np.where(np.isfinite(distance), places, 0))
    return Neighbors(order.astype(np.int32), rows, mask, waves, size, np.asarray(scale))


def repeated_sites(X: ArrayLike, neighbors: Neighbors) -> int:
    """How many sites are where one before them is, which is then among their neighbors; 0 where that is traced."""
    if any(map(checks.is_traced, (X, neighbors.rows, neighbors.mask))):
        return 0
    sites, rows, mask = np.asarray(X), np.asarray(neighbors.rows), np.asarray(neighbors.mask)
    repeated = np.zeros(len(sites), bool)
    for k in range(rows.shape[1]):
        repeated |= mask[:, k] & np.all(sites[rows[:, k]] == sites, axis=1)
    return int(np.sum(repeated))


def nearest(X_new: ArrayLike, X: ArrayLike, size: int, *, scale: ArrayLike = 1.0) -> NDArray[np.int32]:
    """
    The nearest k of the sites X for each new site, nearest first.

    .. code-block:: python

        found = npgp.neighbors.nearest(X, Z, 3)  # of each row, the three nearest of Z
        assert found.shape == (30, 3)

    :param X_new: new sites, (N*, D).
    :param X: sites, (N, D).
    :param size: k, at most N.
    :param scale: units of distances, a scalar or one for each column.
    :return: row numbers of X, (N*, k).
    :raises ImportError: without scikit-learn (``pip install npgp[data]``).
    :raises TypeError: for inputs that are not floating, or traced, and for a size that is no whole number.
    :raises ValueError: for inputs of another shape, without rows or with NaN, and for a size above N.
    """
    points, new = _scaled(X, "X", scale), _scaled(X_new, "X_new", scale)
    size = checks.whole_number(size, "size")
    checks.whole_number(size, "size", most=len(points), must_be=f"at most {len(points)}, the number of sites")
    if new.shape[1] != points.shape[1]:
        raise ValueError(f"X_new has {new.shape[1]} columns; the sites X have {points.shape[1]}.")
    return _query(points, new, size)[1].astype(np.int32)


# ---------------------------------------------------------------------------------------------------------------
# Orders


def order_sites(
    X: ArrayLike, ordering: Ordering = "maxmin", *, scale: ArrayLike = 1.0, rng_key: jax.Array | None = None
) -> NDArray[np.int32]:
    """
    An order of sites.

    - ``"given"``: that of the rows.
    - ``"coordinate"``: by the column in which sites spread most, ties by the others.
    - ``"random"``.
    - ``"maxmin"``: first the site nearest to the mean, then always the one that is farthest from all before it
      (Guinness 2018), at O(N log² N).

    .. code-block:: python

        assert sorted(npgp.neighbors.order_sites(X)) == list(range(30))

    :param X: sites, (N, D).
    :param ordering: which.
    :param scale: units of distances, a scalar or one for each column.
    :param rng_key: a JAX random key, for the order ``"random"``, which needs one.
    :return: row numbers, (N,).
    :raises ImportError: for ``"maxmin"`` without scikit-learn (``pip install npgp[data]``).
    :raises TypeError: for inputs that are not floating, or traced.
    :raises ValueError: for inputs of another shape, without rows or with NaN, for an order unknown, and for
        ``"random"`` without a key.
    """
    return _order(_scaled(X, "X", scale), ordering, rng_key).astype(np.int32)


def _order(points: NDArray[Any], ordering: str, rng_key: jax.Array | None) -> NDArray[Any]:
    if ordering == "given":
        return np.arange(len(points))
    if ordering == "coordinate":
        return np.lexsort(points.T[np.argsort(points.std(axis=0), kind="stable")])
    if ordering == "random":
        if rng_key is None:
            raise ValueError("rng_key is missing: the order 'random' needs one, such as rng_key=jax.random.key(0).")
        return host_generator(rng_key).permutation(len(points))
    if ordering == "maxmin":
        return _maxmin(points)
    raise ValueError(f"ordering is {ordering!r}; it must be one of {', '.join(map(repr, get_args(Ordering)))}.")


def _maxmin(points: NDArray[Any]) -> NDArray[Any]:
    """
    Farthest-point order, by a heap of distances to the sites so far.

    A site taken at distance r changes those of sites within r alone, as no site is farther: N/i sites at step i or so.
    The heap's entries may be larger than the distances now; such a one goes back with what it is when it comes up. Most
    of a search's time is its call, so the sites that come next are looked up together, at radii that can only shrink.
    """
    tree = _sklearn().KDTree(points)
    first = int(np.argmin(np.sum(np.square(points - points.mean(axis=0)), axis=1)))
    distance = np.sqrt(np.sum(np.square(points - points[first]), axis=1))
    distance[first] = -1.0  # taken
    heap = [(-r, i) for i, r in enumerate(distance.tolist()) if i != first]
    heapq.heapify(heap)
    order = [first]
    found: dict[int, Any] = {}
    while heap:
        r, i = heap[0]
        now = distance[i]
        if -r > now:
            heapq.heapreplace(heap, (-now, i))
            continue
        if now > 0.0:  # the others may be duplicates
            if i not in found:
                batch = np.array([j for _, j in heap[: min(len(order), AHEAD)] if j not in found])
                within, reach = tree.query_radius(points[batch], distance[batch], return_distance=True)
                found.update(zip(batch.tolist(), zip(within, reach, strict=True), strict=True))
            within, reach = found.pop(i)
            distance[within] = np.minimum(distance[within], reach)
        heapq.heappop(heap)
        order.append(i)
        distance[i] = -1.0
    return np.array(order)


# ---------------------------------------------------------------------------------------------------------------
# Searches


def _query(points: NDArray[Any], new: NDArray[Any], size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Distances and row numbers of the nearest points, fewer than ``size`` where there are fewer."""
    return _sklearn().NearestNeighbors(n_neighbors=min(size, len(points))).fit(points).kneighbors(new)


def _within_runs(points: NDArray[Any], distance: NDArray[Any], places: NDArray[Any]) -> None:
    """Nearest sites among those before each in its run; points are in order."""
    for begin in range(0, len(points), RUN * RUNS):
        some = points[begin : begin + RUN * RUNS]
        runs = -(-len(some) // RUN)
        padded = np.concatenate([some, np.zeros((runs * RUN - len(some), points.shape[1]))]).reshape(runs, RUN, -1)
        squares = np.zeros((runs, RUN, RUN))
        for column in np.moveaxis(padded, -1, 0):
            squares += np.square(column[:, :, None] - column[:, None, :])
        squares[:, np.triu(np.ones((RUN, RUN), bool))] = np.inf
        numbers = begin + np.arange(runs * RUN)
        before = np.repeat(numbers.reshape(runs, RUN), RUN, axis=0)
        rows = slice(begin, begin + len(some))
        candidates = np.sqrt(squares).reshape(-1, RUN)[: len(some)]
        _keep_nearest(distance, places, rows, candidates, before[: len(some)])


def _keep_nearest(distance, places, rows: slice, new_distance, new_places) -> None:
    """Merge candidates with what rows have, in place: nearest first, ties by place."""
    both = np.concatenate([distance[rows], new_distance], axis=1)
    number = np.concatenate([places[rows], new_places], axis=1)
    kept = np.lexsort((number, both), axis=1)[:, : distance.shape[1]]
    distance[rows] = np.take_along_axis(both, kept, axis=1)
    places[rows] = np.take_along_axis(number, kept, axis=1)


def _waves(order: NDArray[Any], neighbors: NDArray[Any]) -> Waves:
    """
    Parts of the order that can be computed together.

    :param neighbors: the places of each place's neighbors, (N, K); 0 where there are fewer, as all come after that.
    """
    N, K = neighbors.shape
    number = [0] * N
    some = max(ENTRIES // max(K, 1), 1)
    for begin in range(0, N if K else 0, some):
        for place, row in enumerate(neighbors[begin : begin + some].tolist(), begin):
            number[place] = 1 + max([number[i] for i in row]) if place else 0
    lengths = np.bincount(number)
    # About the mean length, in few different sizes, as programs are compiled for each.
    size = min(2 ** round(np.log2(N / len(lengths))), LONGEST)
    begins = np.cumsum(lengths) - lengths
    starts = np.full(N + 1, N, np.int32)
    parts = np.concatenate([np.arange(a, a + length, size) for a, length in zip(begins, lengths, strict=True)])
    starts[: len(parts)] = parts
    return Waves(order[np.argsort(number, kind="stable")].astype(np.int32), starts, size)


def _sklearn() -> Any:
    return optional("sklearn.neighbors", extra="data", what="the search of neighbors")


def _scaled(X: ArrayLike, name: str, scale: ArrayLike) -> NDArray[Any]:
    if checks.is_traced(X) or checks.is_traced(scale):
        raise TypeError(f"{name} or scale is traced; neighbors are found outside jit, once, from concrete inputs.")
    checks.require_positive(scale, "scale")
    points, units = np.asarray(checks.concrete_inputs(X, name), np.float64), np.asarray(scale, np.float64)
    if units.shape not in ((), points.shape[1:]):
        raise ValueError(f"scale has shape {units.shape}; it must be a scalar or one for each column of {name}.")
    return points / units
