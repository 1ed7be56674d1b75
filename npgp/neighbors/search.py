"""
Neighbors of sites, found once, outside ``jit``: for Vecchia's approximation each site's nearest among those before it
in an order, for kriging a new site's nearest among all.

Distances are Euclidean, in units of ``scale`` if that is given. Searches are those of SciPy's ``cKDTree``; memory is
O(N k). Among more than are wanted, found so, a kernel, or what inducing features leave
of it, chooses those that are most correlated.
"""

from __future__ import annotations

import heapq
import warnings
from dataclasses import field, replace
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # whose folders are imported where they are used
from jax import lax
from jax.typing import ArrayLike
from numpy.typing import NDArray

from npgp import checks
from npgp.checks import host_generator
from npgp.chunks import entries_at_once, map_chunks, rows_within
from npgp.kernels import Kernel, as_kernel
from npgp.pytrees import pytree
from npgp.sparse.projection import as_blocks, factorize

Ordering = Literal["given", "coordinate", "random", "maxmin"]

#: Sites of the first tree for :func:`nearest_before`, and found neighbors in memory at a time.
FIRST_TREE, FOUND = 64, 2**22
#: Sites of the order "maxmin" whose distances from all are computed; later ones that the tree is asked for together.
FIRST_SITES, AHEAD = 512, 64
#: Sites of a wave that are computed together, at most.
LONGEST = 1024
#: Neighbors that are Python numbers at a time.
ENTRIES = 2**20
#: Sites, as a multiple of the neighbors, among which a kernel chooses them.
AMONG = 10
#: Where a larger share of rows repeats a site, neighbors are few other sites.
MANY_REPEATED = 0.1

TRACED = "X is traced, so its neighbors cannot be found: pass neighbors=npgp.neighbors.nearest_before(X, k)."

Array = np.ndarray | jax.Array


@pytree
class Waves:
    """
    Sites in waves: those of a wave have neighbors in earlier waves alone, and can be computed together.

    :param sites: numbers of the sites, wave after wave, (N,).
    :param starts: the places where parts of waves begin, and then N, as often as it takes, (N + 1,).
    :param size: the most sites in a part.
    """

    sites: Array
    starts: Array
    size: int = field(metadata={"static": True})


@pytree
class Repeats:
    """
    Rows of which several are at one site.

    :param site: the site of each row, (N,) int32.
    :param first: the first row of each site, (S,) int32.
    :param several: the rows of sites that have several, (R,) int32.
    """

    site: Array
    first: Array
    several: Array

    def variance(self, noise_variance: jax.Array) -> jax.Array:
        """Noise variances of the sites' means, (S,), for those of rows, (N,): each row counts by its precision."""
        return 1.0 / self._sums(1.0 / noise_variance)

    def means(self, v: jax.Array, noise_variance: jax.Array) -> jax.Array:
        """Means of the sites' rows by precision, (..., S), of values (..., N)."""
        return self._sums(v / noise_variance) * self.variance(noise_variance)

    def _sums(self, v: jax.Array) -> jax.Array:
        return jnp.zeros((*v.shape[:-1], len(self.first)), v.dtype).at[..., self.site].add(v)


@pytree
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
    :param around: of each site the nearest of all, itself among them, (N, K + 1) int32; of all sites but new ones.
    :param repeats: where rows of X that repeat a site were merged, which these are: all other numbers are of the sites.
    """

    order: Array
    rows: Array
    mask: Array
    waves: Waves
    size: int = field(metadata={"static": True})
    scale: ArrayLike = 1.0
    around: Array | None = None
    repeats: Repeats | None = None

    @property
    def num_sites(self) -> int:
        """N."""
        return self.order.shape[0]

    @property
    def num_rows(self) -> int:
        """How many rows X has: N, or more where several are at one site."""
        return self.num_sites if self.repeats is None else self.repeats.site.shape[0]

    @property
    def size_at_new(self) -> int:
        """How many neighbors new sites have: k, or all sites where the last site had all before it."""
        return self.size if self.size < self.num_sites - 1 else self.num_sites


def nearest_before(
    X: ArrayLike,
    size: int,
    *,
    ordering: Ordering = "maxmin",
    scale: ArrayLike | None = None,
    kernel: Kernel | None = None,
    inducing: ArrayLike | None = None,
    merge: bool = False,
    rng_key: jax.Array | None = None,
) -> Neighbors:
    """
    Order sites, and find for each the nearest of those before it.

    Exact for every order, at O(N log N) distances where trees help. The approximation is the better the farther the
    first sites of the order are from one another (Guinness 2018), which is what ``"maxmin"`` is for.

    .. code-block:: python

        neighbors = npgp.neighbors.nearest_before(X, 5)  # for NNGP, ResponseNNGP and VNNGP
        # Those that are most correlated, at lengthscales of their own.
        kernel = npgp.Matern32(np.array([0.5, 2.0]))
        near = npgp.neighbors.nearest_before(np.c_[X, X], 5, kernel=kernel)

    :param X: sites, (N, D).
    :param size: k, the number of neighbors: 10 to 30 for most spatial data (Datta et al. 2016). N − 1 or more is the
        exact GP, by one factorization of O(N³) work.
    :param ordering: see :func:`order_sites`.
    :param scale: units of distances, such as the lengthscales expected: a scalar or one for each column. If omitted the
        kernel's lengthscales, if it has any, or else 1.
    :param kernel: nearest are those whose values are most correlated under this kernel, in absolute value, among the
        nearest ten times as many by distance. Its hyperparameters must be numbers, such as those trained so far.
    :param inducing: with a kernel, Z of shape (M, D): what counts is the correlation that these inducing inputs leave,
        for ``npgp.ApproximateGP(method="vif")``.
    :param merge: whether rows that repeat a site are one site, for :class:`ResponseNNGP` and ``"vif"``, which take the
        mean of their measurements then. Otherwise they are neighbors of each other, in the place of other sites.
    :param rng_key: a JAX random key, for the order ``"random"``, which needs one.
    :raises TypeError: for inputs that are not floating, or traced, and for a size that is no whole number.
    :raises ValueError: for inputs of another shape, without rows or with NaN, for a size below 1, an order unknown, and
        the order ``"random"`` without a key; for inducing inputs without a kernel.
    """
    size = checks.whole_number(size, "size")
    scale = _units(kernel, inducing, np.shape(X)) if scale is None else scale
    points = _scaled(X, "X", scale)
    repeats = _repeats(points) if merge else None
    if repeats is not None:
        X, points = np.asarray(X)[repeats.first], points[repeats.first]
    order = _order(points, ordering, rng_key)
    N, K = len(points), min(size, len(points) - 1)
    positions, number = _earlier(points[order], K if kernel is None else min(AMONG * K, N - 1)), np.arange(N)
    if kernel is not None:
        kernel = as_kernel(kernel)
        sites = with_projections(kernel, checks.concrete_inputs(X)[order], inducing)
        positions = most_correlated(kernel, sites, sites, positions, K, before=number)
    neighbors = _in_order(order, positions, np.arange(K) < number[:, None], size, scale)
    around = _nearest(points, points, K + 1).astype(np.int32)
    itself = np.arange(N, dtype=np.int32)
    absent = ~np.any(around == itself[:, None], axis=1)  # where more sites than that are the same
    around[absent, -1] = itself[absent]
    return replace(neighbors, around=around, repeats=repeats)


def _repeats(points: NDArray[Any]) -> Repeats | None:
    """Which rows are at one site, sites by their first rows; ``None`` if none are."""
    _, first, site, count = np.unique(points, axis=0, return_index=True, return_inverse=True, return_counts=True)
    if len(first) == len(points):
        return None
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    site = site.ravel()
    rows = number[site], first[order], np.flatnonzero(count[site] > 1)
    return Repeats(*(x.astype(np.int32) for x in rows))


def _in_order(
    order: NDArray[Any], positions: NDArray[Any], there: NDArray[Any], size: int, scale: ArrayLike
) -> Neighbors:
    """
    Neighbors, by the order.

    :param positions: of each place in the order, the places of its neighbors, (N, K).
    :param there: which of these there are.
    """
    positions = np.where(there, positions, 0)
    rows, mask = np.empty(positions.shape, np.int32), np.empty(positions.shape, bool)
    mask[order] = there
    rows[order] = np.where(there, order[positions], order[:, None])
    waves = _waves(order, positions)
    return Neighbors(order.astype(np.int32), rows, mask, waves, size, np.asarray(scale))


def nearest_jointly(
    X_new: jax.Array, X: jax.Array, size: int, scale: ArrayLike
) -> tuple[NDArray[np.int32], NDArray[Any], Neighbors]:
    """
    For new sites in max–min order, the nearest among the sites X and the new sites before.

    :param X_new: new sites, (N*, D).
    :param X: sites, (N, D).
    :param size: how many.
    :param scale: the units of distances.
    :return: numbers among X and X_new after them, (N*, K); which of these there are; and the new ones of these, as
        neighbors of new sites alone.
    """
    points, new = _scaled(X, "X", scale), _scaled(X_new, "X_new", scale)
    order = _order(new, "maxmin", None)
    new, N, count = new[order], len(points), len(new)
    old = _nearest(points, new, min(size, N))
    before = _earlier(new, min(size, count - 1))
    distances = np.concatenate(
        [
            np.linalg.norm(new[:, None] - points[old], axis=-1),
            np.where(
                np.arange(before.shape[1]) < np.arange(count)[:, None],
                np.linalg.norm(new[:, None] - new[before], axis=-1),
                np.inf,
            ),
        ],
        axis=1,
    )
    chosen = np.argsort(distances, axis=1, kind="stable")[:, :size]
    there = np.isfinite(np.take_along_axis(distances, chosen, axis=1))
    found = np.take_along_axis(np.concatenate([old, N + before], axis=1), chosen, axis=1)
    is_new = there & (found >= N)
    places = np.where(is_new, found - N, 0)
    neighbors = _in_order(order, places, is_new, size, scale)
    near, mask = np.zeros(found.shape, np.int32), np.zeros(found.shape, bool)
    near[order] = np.where(found >= N, N + order[places], found)
    mask[order] = there
    return near, mask, neighbors


def needed(neighbors: Neighbors | None) -> Neighbors:
    """
    Neighbors that a distribution has.

    :raises ValueError: if it could not find them when it was made.
    """
    if neighbors is None:
        raise ValueError(TRACED)
    return neighbors


def neighbors_of(
    X: ArrayLike,
    neighbors: Neighbors | int,
    *,
    kernel: Kernel | None = None,
    inducing: Any = None,
    merge: bool = False,
) -> Neighbors | None:
    """
    Neighbors of X as they are given, or found if their number is.

    :param kernel: found are those that are most correlated under it, where its hyperparameters are numbers.
    :param inducing: features; what counts is the correlation that they leave then.
    :param merge: whether rows that repeat a site may be merged, and a number wait where X is traced: ``None`` then.
    :raises ValueError: for those of another number of rows, for merged ones that may not be, and for a number where X
        is traced.
    """
    if not isinstance(neighbors, Neighbors):
        if checks.is_traced(X):
            return None if merge else needed(None)
        neighbors = checks.whole_number(neighbors, "neighbors")
        if any(map(checks.is_traced, jax.tree.leaves((kernel, inducing)))):
            kernel = inducing = None
        scale = getattr(kernel, "lengthscale", None)
        if inducing is None and scale is not None:
            kernel = None  # whose correlations fall with distances in these units
        return nearest_before(X, neighbors, scale=scale, kernel=kernel, inducing=inducing, merge=merge)
    rows = jnp.shape(X)[0]
    if neighbors.num_rows != rows:
        raise ValueError(f"neighbors are those of {neighbors.num_rows} sites, but X has {rows} rows.")
    if neighbors.repeats is not None and not merge:
        raise ValueError(
            f"neighbors are of {neighbors.num_sites} sites, merged from {rows} rows, which is for noisy measurements; "
            "values of f need each site once: X, site = numpy.unique(X, axis=0, return_inverse=True), and f[site]."
        )
    if merge and (repeated := repeated_sites(X, neighbors)) > MANY_REPEATED * rows:
        warnings.warn(
            f"{repeated} of {rows} rows of X repeat a site, and stand for other sites among the neighbors. Give the "
            "number of neighbors, or find them by npgp.neighbors.nearest_before(X, k, merge=True).",
            UserWarning,
            stacklevel=4,
        )
    return neighbors


def _units(kernel: Kernel | None, inducing: ArrayLike | None, shape: tuple[int, ...]) -> ArrayLike:
    """Units of distances: a kernel's lengthscales, if it has any that are numbers, one or one for each column."""
    if kernel is None and inducing is not None:
        raise ValueError("inducing is given without a kernel, which says what these inputs leave: pass kernel=, too.")
    lengthscale = getattr(kernel, "lengthscale", None)
    if lengthscale is None or checks.is_traced(lengthscale) or np.shape(lengthscale) not in ((), shape[1:]):
        return 1.0
    return lengthscale


def repeated_sites(X: ArrayLike, neighbors: Neighbors) -> int:
    """Count sites that repeat an earlier one, which is then among their neighbors; 0 for traced sites."""
    if neighbors.repeats is not None or any(map(checks.is_traced, (X, neighbors.rows, neighbors.mask))):
        return 0
    sites, rows, mask = np.asarray(X), np.asarray(neighbors.rows), np.asarray(neighbors.mask)
    repeated = np.zeros(len(sites), bool)
    for k in range(rows.shape[1]):
        repeated |= mask[:, k] & np.all(sites[rows[:, k]] == sites, axis=1)
    return int(np.sum(repeated))


def nearest(
    X_new: ArrayLike,
    X: ArrayLike,
    size: int,
    *,
    scale: ArrayLike | None = None,
    kernel: Kernel | None = None,
    inducing: ArrayLike | None = None,
) -> NDArray[np.int32]:
    """
    The nearest k of the sites X for each new site, nearest first.

    .. code-block:: python

        found = npgp.neighbors.nearest(X, Z, 3)  # of each row, the three nearest of Z
        assert found.shape == (30, 3)

    :param X_new: new sites, (N*, D).
    :param X: sites, (N, D).
    :param size: k, at most N.
    :param scale: units of distances, a scalar or one for each column. If omitted the kernel's lengthscales, if it has
        any, or else 1.
    :param kernel: nearest are the most correlated, as for :func:`nearest_before`.
    :param inducing: likewise.
    :return: row numbers of X, (N*, k).
    :raises TypeError: for inputs that are not floating, or traced, and for a size that is no whole number.
    :raises ValueError: for inputs of another shape, without rows or with NaN, for a size above N, and for inducing
        inputs without a kernel.
    """
    scale = _units(kernel, inducing, np.shape(X)) if scale is None else scale
    points, new = _scaled(X, "X", scale), _scaled(X_new, "X_new", scale)
    size = checks.whole_number(size, "size")
    checks.whole_number(size, "size", most=len(points), must_be=f"at most {len(points)}, the number of sites")
    if new.shape[1] != points.shape[1]:
        raise ValueError(f"X_new has {new.shape[1]} columns; the sites X have {points.shape[1]}.")
    if kernel is None:
        return _nearest(points, new, size).astype(np.int32)
    kernel, near = as_kernel(kernel), _nearest(points, new, min(AMONG * size, len(points)))
    rows, sites = (with_projections(kernel, checks.concrete_inputs(x), inducing) for x in (X_new, X))
    return most_correlated(kernel, rows, sites, near, size).astype(np.int32)


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
    The heap's entries may be larger than the distances now; such a one goes back with what it is when it comes up. The
    tree is asked for the sites that come next together, at radii that can only shrink.
    """
    tree = scipy.spatial.cKDTree(points)

    def from_site(i: int, rows: Any) -> NDArray[Any]:
        return np.asarray(np.sqrt(np.sum(np.square(points[rows] - points[i]), axis=1)))

    first = int(np.argmin(np.sum(np.square(points - points.mean(axis=0)), axis=1)))
    distance = from_site(first, slice(None))
    distance[first] = -1.0  # taken
    heap = [(-r, i) for i, r in enumerate(distance.tolist()) if i != first]
    heapq.heapify(heap)
    order = [first]
    found: dict[int, list[int]] = {}
    while heap:
        r, i = heap[0]
        now = distance[i]
        if -r > now:
            heapq.heapreplace(heap, (-now, i))
            continue
        if now > 0.0:  # the others may be duplicates
            within: Any = slice(None)
            if len(order) >= FIRST_SITES:
                if i not in found:
                    batch = [j for _, j in heap[:AHEAD] if j not in found]
                    found.update(zip(batch, tree.query_ball_point(points[batch], distance[batch]), strict=True))
                within = np.array(found.pop(i))
            distance[within] = np.minimum(distance[within], from_site(i, within))
        heapq.heappop(heap)
        order.append(i)
        distance[i] = -1.0
    return np.array(order)


# ---------------------------------------------------------------------------------------------------------------
# Searches


def _nearest(tree: scipy.spatial.cKDTree | NDArray[Any], new: NDArray[Any], size: int) -> NDArray[Any]:
    """Row numbers of the nearest points, nearest first, (len(new), size)."""
    tree = tree if isinstance(tree, scipy.spatial.cKDTree) else scipy.spatial.cKDTree(tree)
    return np.asarray(tree.query(new, range(1, size + 1))[1])


def _earlier(points: NDArray[Any], size: int) -> NDArray[Any]:
    """
    The nearest of the points before each, nearest first, (N, size); 0 where there are fewer.

    Trees are of the first points, ever twice as many, so that half of what they hold is earlier than a point of their
    second half: about twice ``size`` are asked for, and twice as many again where too few of those are earlier.
    """
    N = len(points)
    nearest = np.zeros((N, size), np.int64)
    start, stop = 0, min(N, FIRST_TREE)
    while start < stop:
        tree, rows, asked = scipy.spatial.cKDTree(points[:stop]), np.arange(start, stop), min(2 * size + 2, stop)
        while len(rows):
            short = []
            for some in np.array_split(rows, -(-len(rows) * asked // FOUND)):
                found = _nearest(tree, points[some], asked)
                earlier = found < some[:, None]
                enough = (np.count_nonzero(earlier, axis=1) >= size) | (asked == stop)
                short.append(some[~enough])
                first = np.argsort(~earlier[enough], axis=1, kind="stable")[:, :size]
                nearest[some[enough], : first.shape[1]] = np.take_along_axis(found[enough], first, axis=1)
            rows, asked = np.concatenate(short), min(2 * asked, stop)
        start, stop = stop, min(2 * stop, N)
    nearest[np.arange(size) >= np.arange(N)[:, None]] = 0
    return nearest


def _waves(order: NDArray[Any], neighbors: NDArray[Any]) -> Waves:
    """
    Parts of the order that can be computed together.

    :param neighbors: the places of each place's neighbors, (N, K); 0 where there are fewer, as all come after that.
    """
    N, K = neighbors.shape
    number = [0] * N
    some = max(ENTRIES // max(K, 1), 1)
    for begin in range(0, N if K else 0, some):
        for position, row in enumerate(neighbors[begin : begin + some].tolist(), begin):
            number[position] = 1 + max([number[i] for i in row]) if position else 0
    lengths = np.bincount(number)
    # About the mean length, in few different sizes, as programs are compiled for each.
    size = min(2 ** round(np.log2(N / len(lengths))), LONGEST)
    begins = np.cumsum(lengths) - lengths
    starts = np.full(N + 1, N, np.int32)
    blocks = np.concatenate([np.arange(a, a + length, size) for a, length in zip(begins, lengths, strict=True)])
    starts[: len(blocks)] = blocks
    return Waves(order[np.argsort(number, kind="stable")].astype(np.int32), starts, size)


def _scaled(X: ArrayLike, name: str, scale: ArrayLike) -> NDArray[Any]:
    if checks.is_traced(X) or checks.is_traced(scale):
        raise TypeError(f"{name} or scale is traced; neighbors are found outside jit, once, from concrete inputs.")
    checks.require_positive(scale, "scale")
    points, units = np.asarray(checks.concrete_inputs(X, name), np.float64), np.asarray(scale, np.float64)
    if units.shape not in ((), points.shape[1:]):
        raise ValueError(f"scale has shape {units.shape}; it must be a scalar or one for each column of {name}.")
    return points / units


#: Inputs (N, D), and their projections on inducing features, (N, M).
Sites: TypeAlias = tuple[jax.Array, jax.Array]


def with_projections(kernel: Kernel, X: jax.Array, inducing: ArrayLike | None) -> Sites:
    """Inputs with their projections on inducing inputs, on none if there are none."""
    if inducing is None:
        return X, jnp.zeros((len(X), 0), X.dtype)
    return X, jnp.concatenate(jax.jit(lambda kernel, X: factorize(kernel, as_blocks(inducing))(X).A)(kernel, X)).T


def most_correlated(
    kernel: Kernel,
    rows: Sites,
    sites: Sites,
    candidates: NDArray[Any],
    size: int,
    before: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """
    Of each row's candidates those whose values are most correlated with its own given the inducing values, in absolute
    value; most first, (N*, size).

    :param kernel: the kernel.
    :param rows: the rows.
    :param sites: those that the candidates are among.
    :param candidates: numbers of sites, (N*, C).
    :param size: how many are wanted.
    :param before: how many of its candidates a row has, the first ones, (N*,); all if omitted.
    """
    own = np.full(len(candidates), candidates.shape[1]) if before is None else before

    @jax.jit
    def chosen(kernel: Kernel, rows: Sites, sites: Sites, candidates: jax.Array, own: jax.Array) -> jax.Array:
        X, A = sites
        scale = jnp.sqrt(jnp.maximum(kernel.diag(X) - jnp.sum(jnp.square(A), axis=1), jnp.finfo(X.dtype).tiny))

        def choose(x: jax.Array, a: jax.Array, near: jax.Array, own: jax.Array) -> jax.Array:
            c = jax.vmap(lambda x, X: kernel(x[None], X)[0])(x, X[near]) - jnp.einsum("nm,nkm->nk", a, A[near])
            c = jnp.where(jnp.arange(near.shape[1]) < own[:, None], jnp.abs(c) / scale[near], -1.0)
            return jnp.take_along_axis(near, lax.top_k(c, size)[1], axis=1)

        each = candidates.shape[1] * max(X.shape[1], A.shape[1])
        return map_chunks(choose, rows_within(2 * entries_at_once(), each), *rows, candidates, own)

    return np.asarray(chosen(kernel, rows, sites, jnp.asarray(candidates), jnp.asarray(own)))
