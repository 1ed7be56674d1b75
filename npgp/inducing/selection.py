"""
Initial inducing points: a random subset, k-means, greedy conditional variance, or greedy fit to y.

Optimizing the bound moves them from there, and gets stuck in local optima that depend on the start; with a good one
they may as well stay (Burt, Rasmussen & van der Wilk 2020).

Spherical harmonics take whole levels, the largest eigenvalues first, as many as fit
(:meth:`npgp.features.SphericalHarmonics.within`); activations take those that leave least out (:func:`choose_levels`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.checks import host_generator
from npgp.chunks import map_chunks
from npgp.features import Activations, InducingBlock, as_block
from npgp.functionals.rows import Functionals, RowsLike
from npgp.kernels import Kernel, as_kernel
from npgp.kernels.zonal import as_zonal
from npgp.sparse.groups import kmeans_centers
from npgp.sparse.projection import as_blocks, factorize

#: Candidates of the greedy fit that are looked at together, which holds as many rows of the covariance.
CHUNK = 64


def _check_size(size: int, rows: int) -> int:
    return checks.whole_number(size, "size", most=rows, must_be=f"between 1 and the {rows} rows of X")


def random_subset(rng_key: jax.Array, X: ArrayLike, size: int) -> jax.Array:
    """
    Different rows of X, all sets of them equally likely. An initial value in a model:

    .. code-block:: python

        def function(X):
            points = numpyro.param("Z", lambda key: npgp.inducing.random_subset(key, X, 20))
            return npgp.SparseGP("f", kernel, points).draw()


        assert npgp.inducing.random_subset(key, X, 20).shape == (20, 1)

    :param rng_key: a JAX random key.
    :param X: inputs, (N, D).
    :param size: how many, M.
    :return: (M, D); values may coincide where rows of X do.
    :raises TypeError: for inputs that are not floating.
    :raises ValueError: for inputs of another shape, without rows or with NaN, and for a size above N.
    """
    checks.random_key(rng_key)
    X = checks.inputs(X)
    return jax.random.choice(rng_key, X, (_check_size(size, X.shape[0]),), replace=False)


# ---------------------------------------------------------------------------------------------------------------
# k-means


def kmeans(rng_key: jax.Array, X: ArrayLike, size: int) -> jax.Array:
    """
    The centers of k-means clusters of X, from a k-means++ start. Not for use inside ``jit``.

    Of more than 20,000 rows, or 64 for each center if that is more, a random part of that size is clustered.
    Distances are Euclidean: scale columns alike, or by the lengthscales expected.

    .. code-block:: python

        assert npgp.inducing.kmeans(key, X, 5).shape == (5, 1)

    :param rng_key: a JAX random key, for the start and, with many rows, the part.
    :param X: inputs, (N, D).
    :param size: how many, M.
    :return: (M, D).
    :raises TypeError: for inputs that are not floating, or traced.
    :raises ValueError: for inputs of another shape, without rows or with NaN, and for a size above the number of
        different rows.
    """
    if checks.is_traced(X):
        raise TypeError("X is traced; k-means runs outside jit: compute the centers before the model, not in it.")
    X = checks.inputs(X)
    centers = kmeans_centers(np.asarray(X), _check_size(size, X.shape[0]), host_generator(rng_key))
    if len(centers) < size:
        raise ValueError(f"size is {size}, but k-means found only {len(centers)} different clusters among the rows.")
    return jnp.asarray(centers)


# ---------------------------------------------------------------------------------------------------------------
# Greedy conditional variance


def greedy_variance(
    kernel: Kernel,
    X: ArrayLike,
    size: int,
    *,
    given: object = (),
    jitter: float | None = None,
    return_trace: bool = False,
) -> Any:
    """
    Rows of X chosen one by one, each where f's variance given the points before it is largest.

    That is a Cholesky factorization of K_ff with complete pivoting, stopped early (Burt, Rasmussen & van der Wilk
    2020, section 4.2.2; Fine & Scheinberg 2001), at O(N M²) time and O(N M) memory. It depends on the kernel's
    hyperparameters, lengthscales above all. A row whose values have been chosen is not chosen again. Nothing is random:
    of equal variances, as all are at first for a stationary kernel, the first row is taken.

    .. code-block:: python

        points = npgp.inducing.greedy_variance(npgp.RBF(1.0), X, 5)
        assert points.shape == (5, 1)

    :param kernel: the kernel.
    :param X: inputs, (N, D).
    :param size: how many, M.
    :param given: inducing blocks, arrays or features, that are there already and conditioned on first: the first block
        of an orthogonal decomposition, when choosing the second.
    :param jitter: relative jitter of the inducing values, as in :func:`npgp.linalg.cholesky`; default by dtype.
    :param return_trace: whether to return also Σ_n Var[f_n | i points], (M + 1,), for i = 0 to M: twice SGPR's penalty
        times the noise variance, it says how much more points would help.
    :return: Z (M, D), or this and the traces.
    :raises TypeError: for inputs that are not floating.
    :raises ValueError: for inputs of another shape, without rows or with NaN, for a size above N, and if X has fewer
        different rows. Where X is traced and that cannot be seen, the points that do not exist are NaN.
    """
    X = checks.inputs(X)
    size = _check_size(size, X.shape[0])
    blocks = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    blocks = tuple(as_block(block, f"given[{i}]") for i, block in enumerate(blocks))
    Z, trace, found = greedy_rows(as_kernel(kernel), X, size, blocks, jitter)
    _check_found(found, size)
    return (Z, trace) if return_trace else Z


def _check_found(found: jax.Array, size: int) -> None:
    if not checks.is_traced(found) and found < size:
        raise ValueError(f"size is {size}, but X has only {found} different rows.")


def _nugget(prior: jax.Array, jitter: float | None) -> jax.Array:
    return linalg.jitter_variance(linalg.default_jitter(prior.dtype) if jitter is None else jitter, prior)


@partial(jax.jit, static_argnames="size")
def greedy_rows(
    kernel: Kernel,
    X: jax.Array,
    size: int,
    given: Sequence[InducingBlock],
    jitter: float | None = None,
    weights: ArrayLike = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """
    The points, (size, D), the traces, (size + 1,), and how many points there were to be found.

    :param weights: what variances are multiplied by, to be compared and summed; a scalar or (N,).
    """
    projection = factorize(kernel, given, jitter)(X)
    prior = projection.prior_variance
    nugget = _nugget(prior, jitter)
    before = sum(A.shape[0] for A in projection.A)
    d = projection.residual_variance()

    def pick(i: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        A, d, free, rows, trace = state
        row = jnp.argmax(jnp.where(free, weights * d, -1.0))
        x = lax.dynamic_slice_in_dim(X, row, 1)
        # The next row of the whitened projections: what the point explains of what is left.
        covariance = kernel(x, X)[0] - linalg.matmul(A[:, row], A)
        a = (covariance / jnp.sqrt(d[row] + nugget[row])).astype(d.dtype)
        d = jnp.maximum(d - jnp.square(a), 0.0)
        rows = rows.at[i].set(jnp.where(free[row], row, -1).astype(jnp.int32))
        trace = trace.at[i + 1].set(jnp.sum(weights * d))
        return A.at[before + i].set(a), d, free & jnp.any(X != x, axis=1), rows, trace

    start = (
        jnp.concatenate([*projection.A, jnp.zeros((size, X.shape[0]), prior.dtype)]),
        d,
        jnp.ones(X.shape[0], bool),
        jnp.zeros(size, jnp.int32),
        jnp.zeros(size + 1, prior.dtype).at[0].set(jnp.sum(weights * d)),
    )
    rows, trace = lax.fori_loop(0, size, pick, start)[-2:]
    Z = jnp.where(rows[:, None] < 0, jnp.nan, X[rows])
    return Z, trace, jnp.sum(rows >= 0)


# ---------------------------------------------------------------------------------------------------------------
# Greedy fit


def greedy_fit(
    rng_key: jax.Array,
    kernel: Kernel,
    X: ArrayLike,
    y: ArrayLike,
    size: int,
    *,
    noise_variance: ArrayLike,
    candidates: int | None = 59,
    jitter: float | None = None,
    return_trace: bool = False,
) -> Any:
    """
    Rows of X chosen one by one, each the one of some random candidates with which SoR fits y best (Smola & Bartlett
    2001, "Sparse greedy Gaussian process regression").

    What is lowered is ``yᵀ (Q + σ² I)⁻¹ y``, Q what the points explain of the covariance: up to a factor and a
    constant, the least value of the log posterior's quadratic form, and −2 times the fit term in the log density of
    ``npgp.ApproximateGP(method="sor")``. Unlike :func:`greedy_variance` it looks at y: points go where f varies, not
    only where rows are. Of 59 candidates the best is among the best 5% of all rows with probability .95. The cost is
    O(candidates N M²) time and O(N M) memory, by rank-one updates. A row whose values have been chosen is not chosen
    again.

    .. code-block:: python

        assert npgp.inducing.greedy_fit(
            key, npgp.RBF(1.0), X, y, 5, noise_variance=0.01
        ).shape == (5, 1)

    :param rng_key: a JAX random key, for the candidates.
    :param kernel: the kernel.
    :param X: inputs, (N, D).
    :param y: observations less the mean function, (..., N); of several outputs the sum is lowered.
    :param size: how many, M.
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param candidates: how many rows are looked at for each point; ``None`` for all, at O(N² M²) time.
    :param jitter: relative jitter of the inducing values, as in :func:`npgp.linalg.cholesky`; default by dtype.
    :param return_trace: whether to return also ``yᵀ (Q + σ² I)⁻¹ y``, (M + 1,), for 0 to M points.
    :return: Z (M, D), or this and the trace.
    :raises TypeError: for inputs that are not floating, and for a number of candidates that is not whole.
    :raises ValueError: for inputs or observations of another shape, without rows or with NaN, for a noise variance
        known not to be positive, for a size above N, for fewer than one candidate, and if X has fewer different rows.
        Where X is traced and that cannot be seen, the points that do not exist are NaN.
    """
    checks.random_key(rng_key)
    X = checks.inputs(X)
    N = X.shape[0]
    size = _check_size(size, N)
    candidates = N if candidates is None else min(checks.whole_number(candidates, "candidates"), N)
    noise_variance = checks.require_positive(noise_variance, "noise_variance")
    checks.require_per_row(noise_variance, "noise_variance", N)
    y, noise = checks.observations(y, N, X.dtype), jnp.asarray(noise_variance, X.dtype)
    Z, trace, found = _greedy_fit(rng_key, as_kernel(kernel), X, y, noise, size, candidates, jitter)
    _check_found(found, size)
    return (Z, trace) if return_trace else Z


@partial(jax.jit, static_argnames=("size", "candidates"))
def _greedy_fit(
    rng_key: jax.Array,
    kernel: Kernel,
    X: jax.Array,
    y: jax.Array,
    noise_variance: jax.Array,
    size: int,
    candidates: int,
    jitter: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The points, (size, D), the trace, (size + 1,), and how many points there were to be found."""
    N = X.shape[0]
    prior = kernel.diag(X)
    nugget = _nugget(prior, jitter)
    scale = jnp.sqrt(jnp.broadcast_to(noise_variance, (N,)))
    target = jnp.reshape(y / scale, (-1, N))

    # With A the points' whitened projections, Q = AᵀA, and V such that (Q + σ²I)⁻¹ = (I − VᵀV) / σ². Another point
    # adds a row a to A, and (I − VᵀV) a / √(1 + s), in which s = aᵀ (I − VᵀV) a, to V; a is in units of σ there.
    def candidates_at(rows: jax.Array, A: jax.Array, V: jax.Array, d: jax.Array, rest: Any) -> Any:
        """Candidates' rows of A and V, and by how much each lowers the quadratic form."""
        a = (kernel(X[rows], X) - linalg.matmul(A[:, rows].T, A)) / jnp.sqrt(d[rows] + nugget[rows])[:, None]
        v = a / scale
        v = v - linalg.matmul(linalg.matmul(v, V.T), V)
        root = jnp.sqrt(1.0 + jnp.maximum(jnp.sum(a / scale * v, axis=1), 0.0))
        gain = jnp.sum(jnp.square(linalg.matmul(a / scale, rest.T)), axis=1) / jnp.square(root)
        return a, v / root[:, None], gain

    def pick(i: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        A, V, d, rest, free, chosen, trace = state
        # The free rows come first, in random order.
        order = jax.random.uniform(jax.random.fold_in(rng_key, i), (N,))
        rows = lax.top_k(jnp.where(free, order, -1.0), candidates)[1]
        gains = map_chunks(lambda rows: candidates_at(rows, A, V, d, rest)[2], CHUNK, rows)
        row = rows[jnp.argmax(jnp.where(free[rows], gains, -1.0))]
        (a,), (v,), _ = candidates_at(row[None], A, V, d, rest)
        rest = rest - linalg.matmul(target, v)[:, None] * v
        return (
            A.at[i].set(a),
            V.at[i].set(v),
            jnp.maximum(d - jnp.square(a), 0.0),
            rest,
            free & jnp.any(X[row] != X, axis=1),
            chosen.at[i].set(jnp.where(free[row], row, -1).astype(jnp.int32)),
            trace.at[i + 1].set(jnp.sum(target * rest)),
        )

    nothing = jnp.zeros((size, N), prior.dtype)
    trace = jnp.zeros(size + 1, prior.dtype).at[0].set(jnp.sum(jnp.square(target)))
    start = (nothing, nothing, prior, target, jnp.ones(N, bool), jnp.zeros(size, jnp.int32), trace)
    chosen, trace = lax.fori_loop(0, size, pick, start)[-2:]
    Z = jnp.where(chosen[:, None] < 0, jnp.nan, X[chosen])
    return Z, trace, jnp.sum(chosen >= 0)


# ---------------------------------------------------------------------------------------------------------------
# Levels of the sphere's harmonics


@dataclasses.dataclass(frozen=True)
class LevelChoice:
    """
    Result of :func:`choose_levels`.

    :param block: the activations, with the levels chosen.
    :param left_out: for each highest level L that was tried, the share of variance that features of levels 0 to L leave
        out, the mean of d_n/k_nn.
    """

    block: Activations
    left_out: dict[int, float]


def left_out(kernel: Kernel, inducing: object, X: ArrayLike, *, jitter: float | None = None) -> jax.Array:
    """
    The share of f's prior variance that inducing features leave out, the mean over inputs of d_n/k_nn; a scalar.

    .. code-block:: python

        assert 0.0 < npgp.inducing.left_out(kernel, Z, X) < 1.0

    :param kernel: the kernel.
    :param inducing: Z of shape (M, D), a block of features, or a list of these.
    :param X: inputs, (N, D).
    :param jitter: relative jitter tried first (:func:`npgp.linalg.cholesky`).
    """
    blocks = inducing if isinstance(inducing, (list, tuple)) else (inducing,)
    blocks = [as_block(block, f"inducing[{i}]") for i, block in enumerate(blocks)]
    projection = factorize(kernel, blocks, jitter)(checks.inputs(X))
    return jnp.mean(projection.residual_variance() / projection.prior_variance)


_left_out = jax.jit(left_out)


def choose_levels(
    kernel: Kernel, activations: Activations, X: ArrayLike, *, most: int = 12, before: Sequence[object] = ()
) -> LevelChoice:
    """
    The number of levels at which activations explain most of f's variance at given inputs.

    Levels 0 to L are tried for every L up to ``most`` that the kernel has, and the one with the least mean of d_n/k_nn
    is taken. It depends on the kernel's hyperparameters, the number of units and their directions: more units can carry
    more levels. For choosing before a fit, outside ``jit``. A fit may adapt the kernel to few levels, at the expense of
    the data: compare bounds of fits with neighboring levels too.

    .. code-block:: python

        units = npgp.features.Activations(np.eye(2), shape=npgp.features.ReLU())

        choice = npgp.inducing.choose_levels(npgp.kernels.ZonalMatern52(), units, X, most=3)

    :param kernel: the zonal kernel.
    :param activations: the units; their own levels do not matter.
    :param X: inputs, (N, D); a few hundred rows will do.
    :param most: the highest level tried.
    :param before: inducing blocks that come before these.
    """
    zonal, _ = as_zonal(kernel, type(activations).__name__)
    tried = range(checks.whole_number(most, "most", least=0) + 1)
    present = np.asarray(zonal.level_variances(tried, activations.dimension)) > 0
    shares: dict[int, float] = {}
    for level in tried:
        if present[level]:
            candidate = dataclasses.replace(activations, levels=_up_to(level, present))
            shares[level] = float(_left_out(kernel, (*before, candidate), jnp.asarray(X)))
    best = min(shares, key=lambda level: (not np.isfinite(shares[level]), shares[level]))
    return LevelChoice(dataclasses.replace(activations, levels=_up_to(best, present)), shares)


def _up_to(level: int, present: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.flatnonzero(present[: level + 1]))


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
