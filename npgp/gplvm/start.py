"""Where the training of a GPLVM starts from."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import jax
import numpy as np
from jax.typing import ArrayLike

from npgp import checks
from npgp.checks import host_generator
from npgp.features import InducingBlock

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
