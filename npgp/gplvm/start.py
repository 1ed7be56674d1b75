"""
Where the training of a GPLVM starts from, and where latents lie when a climb begins, in lengthscales: by principal
components, or by distances along the data.

How wide they are decides how curved the functions are at first, and how they lie whether clusters have to pass.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from scipy.linalg import eigh
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, shortest_path

from npgp import checks
from npgp.checks import host_generator
from npgp.features import InducingBlock
from npgp.inducing.selection import greedy_variance, kmeans
from npgp.kernels import RBF

#: Rounds of filling in missing entries by the principal components found so far.
IMPUTATION_ROUNDS = 20


@dataclass(frozen=True)
class Start:
    """
    Where training of a GPLVM starts from. Made by :func:`pca_start` or :func:`random_start`, changed by
    ``dataclasses.replace``, or given.

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(10, 4))
        start = npgp.gplvm.pca_start(key, Y, 2, 4)

        import dataclasses

        start = dataclasses.replace(start, noise_variance=0.1)

    :param latents: μ_n, (N, Q).
    :param inducing: inducing inputs, (M, Q), or a block of features (:mod:`npgp.features`); or a tuple of these, the
        blocks of the orthogonal decomposition.
    :param offset: constant mean of the latent functions, one per column of Y, (D,).
    :param latent_scale: initial standard deviation of every latent coordinate, or one for each dimension, (Q,).
    :param noise_variance: initial σ², in the squared units of Y: a number for all columns together, or one for each,
        (D,).
    :param variance: initial prior variance of the functions, or one for each column of Y, (D, 1).
    :param lengthscale: initial lengthscale of every latent dimension, or one for each, (Q,); or each column's of each,
        (D, 1, Q), for functions with a kernel each (:class:`BayesianGPLVM`).
    :param projection: matrix (D, Q) by which ``(Y − offset) @ projection`` are the latents, where encoders start.
    :param data_scale: typical deviation of each column from the offset, (D,), by which encoders divide.
    :raises ValueError: for arrays whose shapes do not fit together, and for scales that are not positive.
    """

    latents: np.ndarray
    inducing: np.ndarray | InducingBlock | tuple[np.ndarray | InducingBlock, ...]
    offset: np.ndarray
    _: KW_ONLY
    latent_scale: float | np.ndarray = 0.3
    noise_variance: float | np.ndarray = 0.2
    variance: float | np.ndarray = 1.0
    lengthscale: float | np.ndarray = 1.0
    projection: np.ndarray | None = None
    data_scale: float | np.ndarray = 1.0

    def __post_init__(self):
        for name in ("latents", "offset"):
            value, meant = checks.array(getattr(self, name), name), "(N, Q)" if name == "latents" else "(D,)"
            if value.ndim != (2 if name == "latents" else 1):
                raise ValueError(f"{name} has shape {value.shape}; it must be {meant}.")
            object.__setattr__(self, name, value)
        (_, dim), columns = np.shape(self.latents), len(self.offset)
        for Z in self.blocks:
            if isinstance(Z, InducingBlock):
                continue  # the kernel says what inputs it is for
            if np.ndim(Z) != 2 or np.shape(Z)[1] != dim:
                raise ValueError(f"inducing has shape {np.shape(Z)}; with these latents it must be (M, {dim}).")
        for name, shapes in {
            "noise_variance": [(), (columns,)],
            "data_scale": [(), (columns,)],
            "lengthscale": [(), (dim,), (columns, 1, dim)],
            "variance": [(), (columns, 1)],
            "latent_scale": [(), (dim,)],
        }.items():
            value = checks.real(getattr(self, name), name)
            if np.shape(value) not in shapes:
                accepted = " or ".join("a number" if shape == () else str(shape) for shape in shapes)
                raise ValueError(f"{name} has shape {np.shape(value)}; it must be {accepted}.")
            object.__setattr__(self, name, checks.require_positive(value, name))
        if self.projection is not None and np.shape(self.projection) != (columns, dim):
            raise ValueError(f"projection has shape {np.shape(self.projection)}; it must be {(columns, dim)}.")

    @property
    def blocks(self) -> tuple[np.ndarray | InducingBlock, ...]:
        """Inducing inputs or features of each block."""
        return self.inducing if isinstance(self.inducing, tuple) else (self.inducing,)


def pca_start(
    rng_key: jax.Array,
    Y: ArrayLike,
    latent_dim: int,
    num_inducing: int | tuple[int, ...],
    *,
    mask: ArrayLike | str | None = None,
    offset: ArrayLike | None = None,
) -> Start:
    """
    Start from principal components: latent means of unit variance, inducing inputs at a random subset of them.

    Missing entries are filled in by the components themselves, in rounds.

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(20, 4))
        start = npgp.gplvm.pca_start(key, Y, latent_dim=2, num_inducing=5)
        assert start.latents.shape == (20, 2)

    :param rng_key: a JAX random key, for the subset.
    :param Y: data, (N, D).
    :param latent_dim: Q, at most min(N, D).
    :param num_inducing: M, at most N; or the sizes of orthogonal blocks.
    :param mask: True where an entry of Y is present, (N, D); the others may be NaN. Or ``"nan"``:
        those that are NaN are missing.
    :param offset: constant mean of the latent functions, (D,); the columns' means if omitted. Where f enters through a
        link function it is on f's scale: zero, say.
    :raises ValueError: for data that is not a finite (N, D) array, for Q or M out of range, and for a column without
        any entry.
    """
    data, present, offset = _check(Y, num_inducing, mask, offset)
    rows, columns = data.shape
    most = min(rows, columns)
    accepted = f"1{f' to {most}' * (most > 1)}, for principal components of {data.shape} data"
    checks.whole_number(latent_dim, "latent_dim", most=most, must_be=accepted)
    means = np.sum(data * present, axis=0) / np.sum(present, axis=0)
    centered = np.where(present, data - means, 0.0)
    for _ in range(1 if present.all() else IMPUTATION_ROUNDS):
        left, singular, right = np.linalg.svd(centered, full_matrices=False)
        filled = (left[:, :latent_dim] * singular[:latent_dim]) @ right[:latent_dim]
        centered = np.where(present, data - means, filled)
    latents = left[:, :latent_dim] * np.sqrt(rows)
    # Directions without variance have arbitrary coordinates: start them at the prior mean.
    flat = singular[:latent_dim] <= 1e-10 * singular[0]
    latents[:, flat] = 0.0
    lengths = np.where(flat, np.inf, singular[:latent_dim])
    return Start(
        latents,
        _subset(host_generator(rng_key), latents, num_inducing),
        offset,
        projection=right[:latent_dim].T * (np.sqrt(rows) / lengths),
        data_scale=_spread(data, present),
    )


def random_start(
    rng_key: jax.Array,
    Y: ArrayLike,
    latent_dim: int,
    num_inducing: int | tuple[int, ...],
    *,
    mask: ArrayLike | str | None = None,
    offset: ArrayLike | None = None,
) -> Start:
    """
    Start from latent means drawn from N(0, I), inducing inputs at a random subset of them.

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(20, 4))
        start = npgp.gplvm.random_start(key, Y, latent_dim=2, num_inducing=5)

    :param rng_key: key of the draw.
    :param Y: data, (N, D); the other arguments are those of :func:`pca_start`.
    :raises ValueError: as for :func:`pca_start`, but Q may be larger than D.
    """
    data, present, offset = _check(Y, num_inducing, mask, offset)
    rng = host_generator(rng_key)
    latents = rng.normal(size=(len(data), checks.whole_number(latent_dim, "latent_dim")))
    chosen = np.random.default_rng(int(rng.integers(2**31)))
    return Start(latents, _subset(chosen, latents, num_inducing), offset, data_scale=_spread(data, present))


def _check(Y, num_inducing, mask, offset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Y with zeros where nothing is present, the mask, and the offset."""
    Y, mask = checks.observed(Y, np.shape(Y), mask, name="Y")
    Y, present = np.asarray(Y), np.asarray(np.ones(Y.shape, bool) if mask is None else mask)
    data = np.where(present, Y, np.zeros((), Y.dtype))
    checks.inputs(data, "Y")
    data = data.astype(float)  # not of what JAX makes of it, which may be in half the precision
    rows, columns = data.shape
    if not present.any(axis=0).all():
        empty = np.flatnonzero(~present.any(axis=0)).tolist()
        raise ValueError(f"mask leaves no entry in columns {empty} of Y; every column needs at least one.")
    sizes = num_inducing if isinstance(num_inducing, tuple) else (num_inducing,)
    sizes = tuple(checks.whole_number(size, "num_inducing", least=0) for size in sizes)
    if not sizes or min(sizes) < 1 or sum(sizes) > rows:
        raise ValueError(f"num_inducing is {num_inducing}; it must be between 1 and the {rows} rows of Y.")
    if offset is None:
        offset = np.sum(data, axis=0) / np.sum(present, axis=0)
    offset = np.asarray(offset, float)
    if offset.shape not in ((), (columns,)):
        raise ValueError(f"offset has shape {offset.shape}; it must be a number or ({columns},), one per column of Y.")
    return data, present, np.broadcast_to(offset, (columns,)).copy()


def _subset(
    rng: np.random.Generator, latents: np.ndarray, num_inducing: int | tuple[int, ...]
) -> np.ndarray | tuple[np.ndarray, ...]:
    sizes = num_inducing if isinstance(num_inducing, tuple) else (num_inducing,)
    chosen = rng.choice(len(latents), sum(sizes), replace=False)
    blocks = tuple(latents[part] for part in np.split(chosen, np.cumsum(sizes)[:-1]))
    return blocks if isinstance(num_inducing, tuple) else blocks[0]


def _spread(data: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Standard deviation of the entries of each column, 1 for constant ones."""
    count = np.sum(present, axis=0)
    means = np.sum(data, axis=0) / count
    spread = np.sqrt(np.sum(np.square(data - means) * present, axis=0) / count)
    return np.where(spread > 1e-10 * (np.abs(means) + 1e-300), spread, 1.0)


# ---------------------------------------------------------------------------------------------------------------
# Layouts

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
