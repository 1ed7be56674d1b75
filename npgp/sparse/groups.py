"""
Groups of neighboring rows: a partition of N rows, made once, outside ``jit``, before training.

A conditional that knows the residual's covariance within groups of rows (docs/theory.md, section 2) needs rows
that are close in input space to be in one group, and minibatches made of whole groups. The partition is the classic
k-d tree's: halve the rows at the median of the column in which they spread most, until groups are small enough
(Bentley 1975). New inputs find the group they belong to by the same splits.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # whose folders are imported where they are used
from jax import lax
from jax.typing import ArrayLike
from numpy.typing import NDArray

from npgp import checks, linalg
from npgp.checks import host_generator
from npgp.functionals.rows import RowsLike, as_rows, mean_points
from npgp.pytrees import pytree

#: Sizes that :func:`default_size` chooses from, and the number of inducing features for which the largest is chosen.
SIZES, LARGE = range(4, 65, 4), 512

#: :func:`kmeans_groups` makes at most this many cells, as each costs time for every row; median splits do the rest.
MAX_CELLS = 256

Array = np.ndarray | jax.Array


def default_size(num_inducing: int) -> int:
    """
    A size of groups that costs little: 64 for 512 inducing features or more, and less with the square of fewer.

    In multiply-adds for each row, with M features in all, ``tight`` costs ``2 M²`` (whitening K_uf, and L_Sᵀ times
    that), and groups of g rows add ``g M`` for the Gram matrix of their projections and about ``2 g²`` for the Cholesky
    factor and its uses; but products of small matrices run at a third of the speed of large ones, and there is a part
    that hardly depends on g. Training steps of ``grouped``, in units of those of ``tight`` (2 CPU cores, float32,
    batches of 1024): 1.05 to 1.15 for M = 512 and g = 64. Larger groups give tighter bounds: where time is no concern
    take 64.

    .. code-block:: python

        assert npgp.sparse.default_size(512) == 64

    :param num_inducing: M, the number of inducing features of all blocks together.
    :raises ValueError: if it is not a positive whole number.
    """
    M = checks.whole_number(num_inducing, "num_inducing")
    return max((g for g in SIZES if g * LARGE**2 <= SIZES[-1] * M**2), default=SIZES[0])


# ---------------------------------------------------------------------------------------------------------------
# The partition


@pytree
class Tree:
    """
    The splits by which inputs find their group: nearest center first, then a binary tree for each center.

    A node sends an input left if it comes before or at the pivot in the order by the node's column, ties resolved by
    the other columns in a fixed order.

    :param centers: (C, D), or ``None`` for one tree.
    :param roots: the node where each center's tree begins, (C,). A group g stands in the place of a node as −1 − g.
    :param columns: the order of columns that resolves ties, (D,).
    :param column: the column of each node's split, (T,).
    :param children: nodes on the left and on the right, (T, 2).
    :param pivot: (T, D).
    """

    centers: Array | None
    roots: Array
    columns: Array
    column: Array
    children: Array
    pivot: Array


@pytree
class Groups:
    """
    A partition of N rows in G groups of at most g; made by :func:`median_split`, :func:`kmeans_groups`,
    :func:`consecutive` or :func:`single`.

    A minibatch is made of whole groups: ``groups.rows[b]`` and ``groups.mask[b]``, for group numbers b. To spare the
    lookup, lay the data out once, ``groups.arrange(X)``, ``groups.arrange(y)`` and ``groups.mask.ravel()``, and take
    g consecutive rows for each group.

    .. code-block:: python

        groups = npgp.sparse.median_split(X, 8)
        assert groups.gather(y).shape == (groups.count, groups.size)

    :param rows: row numbers, (G, g) int32, ascending in each group; places beyond a group's length repeat its first.
    :param mask: False at those places, (G, g).
    :param inverse: the place of each row in ``rows.ravel()``, (N,) int32.
    :param num_rows: N.
    :param tree: how inputs find their group; ``None`` for groups that do not depend on inputs.
    """

    rows: Array
    mask: Array
    inverse: Array
    num_rows: int = field(metadata={"static": True})
    tree: Tree | None = None

    @property
    def count(self) -> int:
        """Number of groups G."""
        return self.rows.shape[0]

    @property
    def size(self) -> int:
        """Places in each group g, the length of the longest."""
        return self.rows.shape[1]

    def __str__(self) -> str:
        return f"{self.count} groups of {self.num_rows} rows"

    def of_rows(self, num_rows: int, what: str = "there are") -> Groups:
        """The groups, if they are of so many rows."""
        if self.num_rows != num_rows:
            raise ValueError(f"groups is a partition of {self.num_rows} rows, but {what} {num_rows} rows.")
        return self

    @property
    def _in_order(self) -> bool:
        """
        Whether rows lie group after group, without empty places, so that nothing need be moved.

        It counts in training: on a CPU the gradient of looking rows up adds them one after the other.
        """
        return isinstance(self.rows, np.ndarray) and np.array_equal(self.rows.ravel(), np.arange(self.num_rows))

    def gather(self, v: ArrayLike) -> jax.Array:
        """
        Values by group, from values by row.

        :param v: (..., N).
        :return: (..., G, g); places beyond a group's length have its first row's value.
        :raises ValueError: if the last axis is not N.
        """
        if jnp.shape(v)[-1:] != (self.num_rows,):
            raise ValueError(f"v has shape {jnp.shape(v)}; its last axis must be the {self.num_rows} rows.")
        if self._in_order:
            return jnp.reshape(v, (*jnp.shape(v)[:-1], *self.rows.shape))
        return jnp.take(jnp.asarray(v), jnp.asarray(self.rows), axis=-1, mode="clip")

    def gather_rows(self, X: jax.Array) -> jax.Array:
        """
        Rows by group; whole rows are moved, or none if they are in this order already.

        :param X: (N, C).
        :return: (G, g, C), otherwise as of :meth:`gather`.
        :raises ValueError: if there are not N rows.
        """
        if jnp.shape(X)[0] != self.num_rows:
            raise ValueError(f"X has shape {jnp.shape(X)}; its first axis must be the {self.num_rows} rows.")
        if self._in_order:
            return jnp.reshape(X, (*self.rows.shape, X.shape[1]))
        return jnp.take(X, jnp.asarray(self.rows), axis=0, mode="clip")

    def gram(self, A: jax.Array) -> jax.Array:
        """``A_gᵀ A_g`` for each group, of the columns A_g of its rows in A (M, N); (G, g, g), as of :meth:`gather`."""
        if self._in_order:
            return linalg.gram_of_columns(A, self.size)
        return linalg.gram(self.gather_rows(A.T))

    def scatter(self, w: ArrayLike) -> jax.Array:
        """
        Values by row, from values by group: the inverse of :meth:`gather`. Places beyond a group's length are left out.

        :param w: (..., G, g).
        :return: (..., N).
        :raises ValueError: if the last two axes are not (G, g).
        """
        shape = jnp.shape(w)
        if shape[-2:] != self.rows.shape:
            raise ValueError(f"w has shape {shape}; its last axes must be {self.rows.shape}, groups and their places.")
        flat = jnp.reshape(w, (*shape[:-2], self.count * self.size))
        if self._in_order:
            return flat
        return jnp.take(flat, jnp.asarray(self.inverse), axis=-1, mode="clip")

    def arrange(self, array: ArrayLike) -> Any:
        """
        Data laid out group after group, NumPy's as NumPy and JAX's as JAX.

        :param array: rows along its first axis, (N, ...).
        :return: (G g, ...); places beyond a group's length repeat its first row, so mask them.
        :raises ValueError: if the first axis is not N.
        """
        if np.shape(array)[:1] != (self.num_rows,):
            raise ValueError(f"array has shape {np.shape(array)}; its first axis must be the {self.num_rows} rows.")
        if isinstance(array, jax.Array) or checks.is_traced(self.rows):
            return jnp.take(jnp.asarray(array), jnp.ravel(self.rows), axis=0, mode="clip")
        return np.asarray(array)[np.ravel(self.rows)]

    def assign(self, X_new: RowsLike) -> jax.Array:
        """
        The groups that inputs belong to, by the splits that made the groups.

        A row of the training inputs is given its own group. Where rows are duplicates in all columns and a split parts
        them, that is the group of one of them; and a row that two centers of k-means are equally far from, to
        rounding, may be given the other's.

        :param X_new: inputs (N*, D), in the units of those that were split, or functionals.
        :return: group numbers, (N*,) int32.
        :raises ValueError: for inputs of the wrong shape, and for groups that were not made from inputs.
        """
        X_new = mean_points(as_rows(X_new, "X_new"))
        if self.tree is None:
            if self.count > 1:
                raise ValueError("these groups were made without inputs, so new inputs belong to none of them.")
            return jnp.zeros(X_new.shape[:1], jnp.int32)
        columns = self.tree.columns.shape[0]
        if X_new.shape[1] != columns:
            raise ValueError(f"X_new has {X_new.shape[1]} columns; the inputs that were split have {columns}.")
        return _assign(self.tree, X_new)


def _partition(labels: NDArray[Any], tree: Tree | None = None) -> Groups:
    """Groups from the group number of each row, every number from 0 up having rows."""
    lengths = np.bincount(labels)
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(labels, kind="stable")
    place = np.arange(lengths.max())
    mask = place < lengths[:, None]
    rows = order[starts[:, None] + np.where(mask, place, 0)]
    inverse = np.empty(labels.size, np.int32)
    inverse[order] = np.flatnonzero(mask)
    return Groups(rows.astype(np.int32), mask, inverse, labels.size, tree)


# ---------------------------------------------------------------------------------------------------------------
# Constructors


def single(num_rows: int) -> Groups:
    """
    One group of all rows.

    .. code-block:: python

        assert npgp.sparse.single(30).count == 1

    :param num_rows: N.
    """
    return _partition(np.zeros(checks.whole_number(num_rows, "num_rows"), int))


def consecutive(num_rows: int, size: int) -> Groups:
    """
    Groups of consecutive rows, for data in an order of their own such as time. The last may be shorter.

    .. code-block:: python

        groups = npgp.sparse.consecutive(30, 10)  # rows 0 to 9, 10 to 19, 20 to 29

    :param num_rows: N.
    :param size: rows in a group.
    """
    return _partition(np.arange(checks.whole_number(num_rows, "num_rows")) // checks.whole_number(size, "size"))


def median_split(X: RowsLike, size: int) -> Groups:
    """
    Groups of at most ``size`` rows, by halving at medians.

    Whatever has more than ``size`` rows is halved at the median of the column in which its rows have the largest
    standard deviation: scale columns alike, or by the lengthscales expected. So no group is shorter than half of
    ``size``. Rows that tie at the median are parted by the other columns, those of larger standard deviation over all
    rows first, and duplicates by row number.

    .. code-block:: python

        # For conditional=npgp.conditionals.Grouped(groups).
        groups = npgp.sparse.median_split(X, 8)

    :param X: inputs, (N, D), or functionals, which are where their points are on average.
    :param size: the largest number of rows in a group. 1 gives one row to each group, N or more a single group.
    :raises TypeError: for inputs that are not floating.
    :raises ValueError: for inputs of another shape, without rows or with NaN, and for a size below 1.
    """
    X = _concrete_inputs(X)
    return _split_cells(X, np.zeros(len(X), int), None, checks.whole_number(size, "size"))


def kmeans_groups(rng_key: jax.Array, X: RowsLike, size: int) -> Groups:
    """
    Groups of at most ``size`` rows: the cells of k-means, and median splits of cells that are larger.

    Cells follow the clusters of the data, but are of unequal lengths: there are more places to pad than with
    :func:`median_split`. There are N / size cells, but at most 256.

    .. code-block:: python

        # For conditional=npgp.conditionals.Grouped(groups).
        groups = npgp.sparse.kmeans_groups(key, X, 8)

    :param rng_key: a JAX random key, for the start of k-means.
    :param X: inputs, (N, D), or functionals, which are where their points are on average.
    :param size: the largest number of rows in a group.
    :raises TypeError: for inputs that are not floating.
    :raises ValueError: for inputs of another shape, without rows or with NaN, and for a size below 1.
    """
    X = _concrete_inputs(X)
    size = checks.whole_number(size, "size")
    centers = kmeans_centers(X, min(-(-len(X) // size), MAX_CELLS), host_generator(rng_key))
    # By the function that ``assign`` uses, as k-means may round near ties otherwise.
    used, cells = np.unique(np.asarray(_nearest(centers, X)), return_inverse=True)
    return _split_cells(X, cells, centers[used], size)


def _concrete_inputs(X: RowsLike) -> NDArray[Any]:
    # As JAX will hold them: float64 values rounded to float32 only later might change sides.
    if any(map(checks.is_traced, jax.tree.leaves(X))):
        raise TypeError("X is traced; groups are made outside jit, once, from concrete inputs.")
    with jax.ensure_compile_time_eval():  # inside jit, where X may be concrete
        return np.asarray(mean_points(as_rows(X)))


def _split_cells(X: NDArray[Any], cells: NDArray[Any], centers: NDArray[Any] | None, size: int) -> Groups:
    """
    Split cells at medians, all cells of one level at a time.

    :param X: inputs, (N, D).
    :param cells: the cell of each row, (N,), every number from 0 up having rows.
    """
    N = len(X)
    columns = np.argsort(-_variances(X.T, np.arange(N), np.zeros(1, int))[0], kind="stable")
    # With rows in lexicographic order from here on, a stable sort by one column resolves ties by the others.
    lexicographic = np.lexsort(X.T[columns[::-1]])
    XT = np.ascontiguousarray(X.T[:, lexicographic])
    cells = cells[lexicographic]
    counts = np.bincount(cells)
    # Each cell is linked from a root or from a node's left or right; ``target`` is the link's place among them.
    roots = counts.size
    links, target = np.empty(roots, int), np.arange(roots)
    splits: list[tuple[NDArray[Any], NDArray[Any]]] = []
    order = np.argsort(cells, kind="stable")
    while np.any(split := counts > size):
        starts = np.cumsum(counts) - counts
        column = np.argmax(_variances(XT, order, starts), axis=1)
        order = np.lexsort((XT[column[cells], np.arange(N)], cells))
        half = (counts + 1) // 2
        splits.append(_pivots(XT, order, (starts + half - 1)[split], column[split]))

        # The halves of a cell take its place, so that neighboring groups have neighboring numbers.
        position = np.empty(N, int)
        position[order] = np.arange(N) - np.repeat(starts, counts)
        first = np.cumsum(1 + split) - 1 - split
        cells = first[cells] + (split[cells] & (position >= half[cells]))

        node = (links.size - roots) // 2 + np.arange(np.count_nonzero(split))
        links[target[split]] = node
        target = np.repeat(target, 1 + split)
        target[first[split]] = roots + 2 * node
        target[first[split] + 1] = roots + 2 * node + 1
        links = np.concatenate([links, np.empty(2 * node.size, int)])
        counts = np.bincount(cells)
    links[target] = -1 - np.arange(counts.size)

    labels = np.empty(N, int)
    labels[lexicographic] = cells
    column, pivot = (np.concatenate(part) for part in zip((np.empty(0, int), X[:0]), *splits, strict=True))
    tree = Tree(
        centers,
        roots=links[:roots].astype(np.int32),
        columns=columns.astype(np.int32),
        column=column.astype(np.int32),
        children=links[roots:].reshape(-1, 2).astype(np.int32),
        pivot=pivot,
    )
    return _partition(labels, tree)


def _variances(XT: NDArray[Any], order: NDArray[Any], starts: NDArray[Any]) -> NDArray[Any]:
    """
    Variance of each column within each cell, (cells, D).

    :param XT: inputs, columns first, (D, N).
    :param order: rows sorted by cell.
    :param starts: where each cell starts in that order.
    """
    counts = np.diff(starts, append=order.size)
    variances = np.empty((starts.size, len(XT)))
    with np.errstate(over="ignore", invalid="ignore"):  # any column will do, and inputs of 1e200 have one
        for d, column in enumerate(XT):
            x = column[order].astype(float)
            x -= np.repeat(np.add.reduceat(x, starts) / counts, counts)
            variances[:, d] = np.add.reduceat(np.square(x, out=x), starts) / counts
    return variances


def _pivots(
    XT: NDArray[Any], order: NDArray[Any], last: NDArray[Any], column: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """
    Column and pivot of each split: the last row on its left, moved half-way to the first on its right in the column.

    :param last: place in ``order`` of the last row on the left of each split.
    :param column: the column of each split.
    """
    rows = np.arange(last.size)
    left, right = XT[column, order[last]], XT[column, order[last + 1]]
    middle = 0.5 * left + 0.5 * right
    pivot = XT[:, order[last]].T.copy()
    # Compiled programs take numbers below the smallest normal one for zero.
    normal = (np.abs(middle) >= np.finfo(middle.dtype).tiny) | (middle == 0.0)
    pivot[rows, column] = np.where((left <= middle) & (middle < right) & normal, middle, left)
    return column, pivot


# ---------------------------------------------------------------------------------------------------------------
# Finding the group of an input


@jax.jit
def _nearest(centers: ArrayLike, X: ArrayLike) -> jax.Array:
    """The nearest center of each row, (N,), by differences, which are the same in whatever batch a row comes."""
    Z = jnp.asarray(centers)
    return lax.map(lambda x: jnp.argmin(jnp.sum(jnp.square(Z - x), -1)), jnp.asarray(X), batch_size=1024)


@jax.jit
def _assign(tree: Tree, X: jax.Array) -> jax.Array:
    columns, column, pivot, roots, children = map(
        jnp.asarray, (tree.columns, tree.column, tree.pivot, tree.roots, tree.children)
    )
    if tree.centers is None:
        node = jnp.broadcast_to(roots[0], X.shape[:1])
    else:
        node = roots[_nearest(tree.centers, X)]
    if column.size == 0:
        return -1 - node

    def descend(node: jax.Array) -> jax.Array:
        at = jnp.maximum(node, 0)
        p = pivot[at]
        side = (X > p).astype(jnp.int8) - (X < p).astype(jnp.int8)
        # The node's column decides, then the others in their order: the first in which the two differ.
        side = jnp.concatenate([jnp.take_along_axis(side, column[at, None], 1), side[:, columns]], axis=1)
        decisive = jnp.take_along_axis(side, jnp.argmax(side != 0, axis=1)[:, None], 1)[:, 0]
        return jnp.where(node < 0, node, children[at, (decisive > 0).astype(jnp.int32)])

    return -1 - lax.while_loop(lambda node: jnp.any(node >= 0), descend, node)


# ---------------------------------------------------------------------------------------------------------------
# K-means: for inducing points, and for groups of rows

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
        nearest = np.minimum(nearest, scipy.spatial.distance.cdist(x, x[chosen[-1:]], "sqeuclidean")[:, 0])
        if not nearest.any():
            break
        chosen.append(int(generator.choice(len(x), p=nearest / nearest.sum())))
    centers, wanted = x[chosen], len(chosen)
    if wanted == 1:  # which SciPy takes for a number of centers
        return middle.astype(X.dtype)[None]
    while True:  # SciPy drops centers without rows: each goes on from the row farthest from those left
        centers = scipy.cluster.vq.kmeans(x, centers, thresh=TOLERANCE * x.std(), check_finite=False)[0]
        if len(centers) == wanted:
            return np.unique((centers + middle).astype(X.dtype), axis=0)
        distance = scipy.cluster.vq.vq(x, centers, check_finite=False)[1]
        centers = np.concatenate([centers, x[np.argsort(-distance, kind="stable")[: wanted - len(centers)]]])
