"""
Where to put inducing points at the start: a random subset, k-means, or greedy conditional variance.

Optimising the bound moves them from there, and gets stuck in local optima that depend on the start; with a good one
they may as well stay (Burt, Rasmussen & van der Wilk 2020).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import linalg
from npgp.features import InducingBlock, as_block
from npgp.groups import kmeans_centres
from npgp.kernels import Kernel
from npgp.projection import factorize

__all__ = ["greedy_variance", "kmeans", "random_subset"]


def _check_size(size: int, rows: int) -> int:
    try:
        number = operator.index(size)
    except TypeError:
        raise TypeError(f"size is {size!r}; it must be a whole number of inducing points.") from None
    if not 1 <= number <= rows:
        raise ValueError(f"size is {size}; it must be between 1 and the {rows} rows of X.")
    return number


def random_subset(rng_key: jax.Array, X: ArrayLike, size: int) -> jax.Array:
    """
    Different rows of X, all sets of them equally likely. An initial value in a model::

        Z = numpyro.param("Z", lambda key: npgp.inducing.random_subset(key, X, 20))

    :param rng_key: a JAX random key.
    :param X: inputs, (N, D).
    :param size: how many, M.
    :return: (M, D); values may coincide where rows of X do.
    :raises TypeError: for inputs that are not floating.
    :raises ValueError: for inputs of another shape, without rows or with NaN, and for a size above N.
    """
    X = linalg.inputs(X)
    return jax.random.choice(rng_key, X, (_check_size(size, X.shape[0]),), replace=False)


# ---------------------------------------------------------------------------------------------------------------
# k-means


def kmeans(X: ArrayLike, size: int, seed: int = 0) -> jax.Array:
    """
    The centres of k-means clusters of X, from a k-means++ start. Not for use inside ``jit``.

    With more than 100,000 rows it is the mini-batch algorithm (Sculley 2010), which is faster and a little worse.
    Distances are Euclidean: scale columns alike, or by the lengthscales expected.

    :param X: inputs, (N, D).
    :param size: how many, M.
    :param seed: of the start and, with many rows, of the batches.
    :return: (M, D).
    :raises ImportError: without scikit-learn (``pip install npgp[data]``).
    :raises TypeError: for inputs that are not floating, or traced.
    :raises ValueError: for inputs of another shape, without rows or with NaN, and for a size above the number of
        different rows.
    """
    if linalg.is_traced(X):
        raise TypeError("X is traced; k-means runs outside jit: compute the centres before the model, not in it.")
    X = linalg.inputs(X)
    centres = kmeans_centres(np.asarray(X), _check_size(size, X.shape[0]), seed)
    if len(centres) < size:
        raise ValueError(f"size is {size}, but k-means found only {len(centres)} different clusters among the rows.")
    return jnp.asarray(centres)


# ---------------------------------------------------------------------------------------------------------------
# Greedy conditional variance


@overload
def greedy_variance(
    kernel: Kernel,
    X: ArrayLike,
    size: int,
    given: object = (),
    *,
    jitter: float | None = None,
    return_trace: Literal[False] = False,
) -> jax.Array: ...
@overload
def greedy_variance(
    kernel: Kernel,
    X: ArrayLike,
    size: int,
    given: object = (),
    *,
    jitter: float | None = None,
    return_trace: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...
def greedy_variance(
    kernel: Kernel,
    X: ArrayLike,
    size: int,
    given: object = (),
    *,
    jitter: float | None = None,
    return_trace: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """
    Rows of X chosen one by one, each where f's variance given the points before it is largest.

    That is a Cholesky factorisation of K_ff with complete pivoting, stopped early (Burt, Rasmussen & van der Wilk
    2020, section 4.2.2; Fine & Scheinberg 2001), at O(N M²) time and O(N M) memory. It depends on the kernel's
    hyperparameters, lengthscales above all. A row whose values have been chosen is not chosen again. Nothing is random:
    of equal variances, as all are at first for a stationary kernel, the first row is taken.

    :param kernel: the kernel.
    :param X: inputs, (N, D).
    :param size: how many, M.
    :param given: inducing blocks, arrays or features, that are there already and conditioned on first: the first block
        of an orthogonal decomposition, when choosing the second.
    :param jitter: relative jitter of the inducing values, as in :func:`npgp.linalg.cholesky`; default by dtype.
    :param return_trace: whether to return also Σ_n Var[f_n | i points], (M + 1,), for i = 0 to M: twice SGPR's penalty
        times the noise variance, it says how much more points would help.
    :return: Z (M, D), and the traces if asked for.
    :raises TypeError: for inputs that are not floating.
    :raises ValueError: for inputs of another shape, without rows or with NaN, for a size above N, and if X has fewer
        different rows. Where X is traced and that cannot be seen, the points that do not exist are NaN.
    """
    X = linalg.inputs(X)
    size = _check_size(size, X.shape[0])
    blocks = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    blocks = tuple(as_block(block, f"given[{i}]") for i, block in enumerate(blocks))
    Z, trace, found = _greedy(kernel, X, size, blocks, jitter)
    if not linalg.is_traced(found) and found < size:
        raise ValueError(f"size is {size}, but X has only {found} different rows.")
    return (Z, trace) if return_trace else Z


@partial(jax.jit, static_argnames="size")
def _greedy(
    kernel: Kernel, X: jax.Array, size: int, given: Sequence[InducingBlock], jitter: float | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The points, (size, D), the traces, (size + 1,), and how many points there were to be found."""
    projection = factorize(kernel, given, jitter)(X)
    prior = projection.prior_variance
    nugget = (linalg.default_jitter(X.dtype) if jitter is None else jitter) * jnp.mean(prior)
    before = sum(A.shape[0] for A in projection.A)
    d = projection.residual_variance()

    def pick(i, state):
        A, d, free, rows, trace = state
        row = jnp.argmax(jnp.where(free, d, -1.0))
        x = lax.dynamic_slice_in_dim(X, row, 1)
        # The next row of the whitened projections: what the point explains of what is left.
        covariance = kernel(x, X)[0] - linalg.matmul(A[:, row], A)
        a = (covariance / jnp.sqrt(d[row] + nugget)).astype(d.dtype)
        d = jnp.maximum(d - jnp.square(a), 0.0)
        rows = rows.at[i].set(jnp.where(free[row], row, -1).astype(jnp.int32))
        return A.at[before + i].set(a), d, free & jnp.any(X != x, axis=1), rows, trace.at[i + 1].set(jnp.sum(d))

    start = (
        jnp.concatenate([*projection.A, jnp.zeros((size, X.shape[0]), prior.dtype)]),
        d,
        jnp.ones(X.shape[0], bool),
        jnp.zeros(size, jnp.int32),
        jnp.zeros(size + 1, prior.dtype).at[0].set(jnp.sum(d)),
    )
    rows, trace = lax.fori_loop(0, size, pick, start)[-2:]
    Z = jnp.where(rows[:, None] < 0, jnp.nan, X[rows])
    return Z, trace, jnp.sum(rows >= 0)
