"""Inducing points of which only the number is known, until a function is evaluated at rows to choose them from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from npgp import checks
from npgp.features import InducingBlock
from npgp.functionals.rows import Functionals, RowsLike
from npgp.kernels import Kernel
from npgp.sparse.kmeans import kmeans_centers
from npgp.sparse.projection import as_blocks


@dataclass(frozen=True)
class Unchosen:
    """
    A number of inducing points that are to be chosen: a block that has a size and no covariances yet.

    :param size: the number.
    """

    size: int

    def gram(self, kernel: Kernel) -> NoReturn:
        """Raise ``ValueError``: there are no points yet."""
        raise ValueError(
            f"inducing is {self.size}, a number of points, which f(X) chooses from the rows of X when it is first "
            "called: no rows are known here, so give the points themselves, npgp.inducing.kmeans(key, X, "
            f"{self.size}) say, or the parameters of a training that chose them."
        )

    def cross(self, kernel: Kernel, X: jax.Array) -> NoReturn:
        """Raise ``ValueError``, as :meth:`gram` does."""
        self.gram(kernel)


def blocks_or_number(inducing: object) -> tuple[InducingBlock, ...]:
    """Inducing blocks as :func:`npgp.sparse.projection.as_blocks` takes them; or a number of points to be chosen."""
    if isinstance(inducing, (int, np.integer)):
        return (Unchosen(checks.whole_number(inducing, "inducing")),)
    return as_blocks(inducing)


def choose(kernel: Kernel, rows: RowsLike, size: int) -> jax.Array:
    """
    Centers of k-means clusters of rows, columns in units of their standard deviations. The same rows have the same
    centers: nothing is random.

    :param kernel: the kernel, which says whether columns are labels, of which there are no means.
    :param rows: inputs, (…, N, D), or functionals; in a traced program the centers are computed when that runs.
    :param size: the number of centers.
    :raises ValueError: for labels, and where there are fewer different rows.
    """
    if isinstance(rows, Functionals):
        X = jnp.concatenate([piece.points.reshape(-1, rows.shape[1]) for piece in rows.pieces])
    else:
        X = jnp.reshape(rows, (-1, jnp.shape(rows)[-1]))
    if labels := sorted(kernel.level_columns(X.shape[1])):
        raise ValueError(
            f"inducing is {size}, a number of points, but columns {labels} of X are labels, of which k-means has no "
            "centers: give the points themselves, as npgp.inducing.greedy_variance(kernel, X, M) chooses them."
        )
    if X.shape[0] < size:
        raise ValueError(f"inducing is {size}; it must be at most the {X.shape[0]} rows that points are chosen from.")
    if checks.is_traced(X):
        return jax.pure_callback(
            lambda X: _centers_of(X, size),
            jax.ShapeDtypeStruct((size, X.shape[1]), X.dtype),
            lax.stop_gradient(X),
            vmap_method="sequential",
        )
    return jnp.asarray(_centers_of(X, size))


def _centers_of(X: Any, size: int) -> np.ndarray:
    X = np.asarray(X)
    return _centers(X.tobytes(), X.shape, X.dtype.str, size)


@lru_cache(maxsize=4)
def _centers(data: bytes, shape: tuple[int, int], dtype: str, size: int) -> np.ndarray:
    """The centers; once for the many runs of a model that a training begins with."""
    X = np.frombuffer(data, dtype).reshape(shape)
    scale = X.std(axis=0)
    scale = np.where(scale > 0, scale, np.ones_like(scale))
    centers = kmeans_centers(X / scale, size, np.random.default_rng(0))
    if len(centers) < size:
        raise ValueError(f"inducing is {size}, but X has only {len(centers)} different rows to choose points from.")
    return (centers * scale).astype(X.dtype)
