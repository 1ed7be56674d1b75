"""
Vecchia's approximation of a Gaussian (Vecchia 1988): a sparse Cholesky factor of the precision.

Sites are put in an order, and each value depends on those before it through k neighbors alone::

    p(f) = Π_i N(f_i; b_iᵀ f_N(i), F_i),    b_i = C_NN⁻¹ c_Ni,    F_i = C_ii − c_Niᵀ b_i

With B the rows b_i, which is triangular in the order, the precision is ``(I − B)ᵀ F⁻¹ (I − B)``.

The covariance is a kernel's, of sites X; or that of what inducing features leave of it (:func:`what_is_left`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.chunks import entries_at_once, map_chunks, num_rows, rows_within
from npgp.kernels import Kernel
from npgp.neighbors.search import Neighbors, Repeats
from npgp.pytrees import pytree

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: A covariance of n sites, (n, n): a kernel's, of inputs (n, D); or of several arrays with sites first.
Covariance: TypeAlias = Callable[[Any], jax.Array]

#: Entries of the neighbors' covariances that are held at a time. With more, gradients compute them again.
ENTRIES = 2**19
#: Entries of neighbors' inputs and projections that are held at a time.
GATHERED = 2**26


def what_is_left(kernel: Kernel) -> Covariance:
    """
    The covariance of the residual, of sites with their projections on inducing features: X (n, D) and Aᵀ (n, M).

    :param kernel: the kernel.
    """

    def covariance(sites: tuple[jax.Array, jax.Array]) -> jax.Array:
        X, A = sites
        return kernel(X) - linalg.gram(A)

    return covariance


def conditional_weights(
    kernel: Covariance,
    sites: tuple[Any, jax.Array],
    neighbors: tuple[Any, jax.Array],
    mask: jax.Array,
    jitter: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """
    Mean weights and variance of values given their neighbors', by one Cholesky factor for each site.

    :param kernel: the kernel, or another covariance.
    :param sites: inputs (N, D), or what the covariance is of; and what is added to their variance, (N,).
    :param neighbors: the neighbors' inputs (N, k, D), likewise; and what is added to theirs, (N, k).
    :param mask: False where there is no neighbor, (N, k).
    :param jitter: relative jitter tried first. It is added at sites and neighbors alike, relative to the variance of
        each, so that what is approximated is the covariance with jitter.
    :return: b (N, k), F (N,), and the relative jitter it took.
    """
    k = mask.shape[1]
    eye = jnp.eye(k + 1, dtype=sites[1].dtype)
    jitter = linalg.default_jitter(eye.dtype) if jitter is None else checks.require_not_negative(jitter, "jitter")
    first = jnp.asarray(jitter, eye.dtype)

    def compute(sites, neighbors, mask):
        X, noise = jax.tree.map(
            lambda here, there: jnp.concatenate([there, here[:, None]], axis=1), tuple(sites), tuple(neighbors)
        )
        present = jnp.pad(mask, ((0, 0), (0, 1)), constant_values=True)
        # Places without a neighbor have rows of a multiple of the identity, hence weights of 0.
        C = jax.vmap(kernel)(X) + noise[:, :, None] * eye
        C = jnp.where(present[:, :, None] & present[:, None, :], C, C[:, -1:, -1:] * eye)
        weights, variance, used = _regress(C, first)
        return weights, variance, jnp.broadcast_to(used, C.shape[:1])

    size = rows_within(ENTRIES, k + 1, max(k + 1, *(x.shape[-1] for x in jax.tree.leaves(sites[0]))))
    weights, variance, used = map_chunks(compute, size, sites, neighbors, mask)
    return weights, variance, jnp.max(used)


def site_weights(
    kernel: Covariance,
    X: Any,
    neighbors: Neighbors,
    noise_variance: ArrayLike = 0.0,
    jitter: float | None = None,
    sites: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """
    :func:`conditional_weights` of sites given those of their neighbors that come before them.

    :param kernel: the kernel, or another covariance.
    :param X: all sites, (N, D), or what the covariance is of.
    :param neighbors: their order and neighbors.
    :param noise_variance: what is added to the covariance's diagonal, a scalar or (N,).
    :param jitter: relative jitter tried first.
    :param sites: numbers of the sites wanted, (B,); all if omitted.
    """
    rows, mask = jnp.asarray(neighbors.rows), jnp.asarray(neighbors.mask)
    if sites is None:
        if 1 < num_rows(X) == rows.shape[1] + 1:
            return _all_before(kernel, X, neighbors, noise_variance, jitter)
        sites = jnp.arange(num_rows(X))
    else:
        rows, mask = rows[sites], mask[sites]

    def compute(sites: jax.Array, rows: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        here, there = (_at(X, at, noise_variance) for at in (sites, rows))
        weights, variance, used = conditional_weights(kernel, here, there, mask, jitter)
        return weights, variance, jnp.broadcast_to(used, variance.shape)

    size = rows_within(GATHERED, rows.shape[1] + 1, sum(x.shape[-1] for x in jax.tree.leaves(X)))
    weights, variance, used = map_chunks(compute, size, sites, rows, mask)
    return weights, variance, jnp.max(used)


def _at(X: Any, rows: jax.Array, noise_variance: ArrayLike) -> tuple[Any, jax.Array]:
    """Sites with given numbers, and what is added to their variance."""
    sites = jax.tree.map(lambda x: jnp.asarray(x)[rows], X)
    return sites, at_rows(noise_variance, rows, jax.tree.leaves(X)[0].dtype)


def _all_before(
    kernel: Covariance, X: Any, neighbors: Neighbors, noise_variance: ArrayLike, jitter: float | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`site_weights` given all sites before: with ``C = L Lᵀ`` in the order, ``F^−½ (I − B) = L⁻¹``."""
    order, rows, mask = (jnp.asarray(x) for x in (neighbors.order, neighbors.rows, neighbors.mask))
    sites, noise = _at(X, order, noise_variance)
    C = kernel(sites) + linalg.diagonal_matrix(noise)
    L, used = linalg.cholesky(C, jitter)  # type: ignore[arg-type]
    scale = linalg.diagonal(L)
    B = -scale[:, None] * linalg.solve_lower(L, jnp.eye(len(order), dtype=noise.dtype))
    position = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
    weights = jnp.where(mask, B[position[:, None], position[rows]], 0.0)
    return weights, jnp.square(scale)[position], used


def new_site_weights(
    kernel: Covariance,
    X_new: Any,
    X: Any,
    neighbors: jax.Array,
    noise_variance: ArrayLike = 0.0,
    jitter: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """
    Mean weights b (N*, k) and variance F (N*,) of f at new sites, given values at their neighbors among the sites.

    :param kernel: the kernel, or another covariance.
    :param X_new: new sites, (N*, D), or what the covariance is of.
    :param X: sites, (N, D), likewise.
    :param neighbors: numbers of each new site's neighbors, (N*, k).
    :param noise_variance: what is added to the sites' covariance, a scalar or (N,).
    :param jitter: relative jitter tried first.
    """
    there = _at(X, neighbors, noise_variance)
    here = X_new, jnp.zeros_like(there[1], shape=neighbors.shape[:1])
    return conditional_weights(kernel, here, there, jnp.ones(neighbors.shape, bool), jitter)[:2]


def at_rows(value: ArrayLike, rows: jax.Array, dtype: Any) -> jax.Array:
    """A scalar, or values of rows (N,), at the rows with given numbers; no array is as long as there are rows."""
    value = jnp.asarray(value, dtype)
    return value[rows] if value.ndim else jnp.broadcast_to(value, rows.shape)


def _factorize(C: jax.Array, first: jax.Array) -> tuple[jax.Array, ...]:
    """``L_NN⁻¹``, the last row of L, and the jitter used, for C with the neighbors first and the site last."""
    k = C.shape[-1] - 1
    L, used = linalg.cholesky(C, first)  # type: ignore[arg-type]
    identity = jnp.broadcast_to(jnp.eye(k, dtype=C.dtype), (C.shape[0], k, k))
    return linalg.solve_lower(L[:, :k, :k], identity), L[:, k], used


def _times(A: jax.Array, b: jax.Array) -> jax.Array:
    return linalg.matmul(A, b[..., None])[..., 0]


def _weights(inverse: jax.Array, c: jax.Array) -> jax.Array:
    return _times(jnp.swapaxes(inverse, -1, -2), c)


@jax.custom_jvp
def _regress(C: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """b (B, k), F (B,) and the jitter used, from the covariances C (B, k + 1, k + 1)."""
    inverse, row, used = _factorize(C, first)
    return _weights(inverse, row[:, :-1]), jnp.square(row[:, -1]), used


@_regress.defjvp
def _(primals, tangents):
    # db = C_NN⁻¹ (dc − dC_NN b) and dF = dC_ii − 2 bᵀ dc + bᵀ dC_NN b: products alone. Differentiating the factor would
    # take triangular solves side by side, which XLA may leave waiting for one another on CPUs with few threads.
    inverse, row, used = _factorize(*primals)
    weights, variance = _weights(inverse, row[:, :-1]), jnp.square(row[:, -1])
    dC = linalg.add_jitter(tangents[0], used, linalg.diagonal(tangents[0]))
    dc, moved = dC[:, -1, :-1], _times(dC[:, :-1, :-1], weights)
    d_weights = _weights(inverse, _times(inverse, dc - moved))
    d_variance = dC[:, -1, -1] + jnp.sum(weights * (moved - 2.0 * dc), axis=-1)
    return (weights, variance, used), (d_weights, d_variance, jnp.zeros_like(used))


def _padded(v: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(v, [(0, rows)] + [(0, 0)] * (v.ndim - 1))


@pytree
class VecchiaFactor:
    """
    The sparse Cholesky factor of an NNGP's precision: ``R = F^−½ (I − B)``, with ``Rᵀ R`` the precision. Its rows and
    columns are numbered as the sites; in the neighbors' order it is lower triangular.

    :param neighbors: the sites' order and neighbors.
    :param weights: b_i, (N, K), 0 where there is no neighbor.
    :param variance: F_i, (N,).
    :param jitter: the relative jitter that the covariances took, the largest.
    """

    neighbors: Neighbors
    weights: jax.Array
    variance: jax.Array
    jitter: jax.Array

    @classmethod
    def of(
        cls,
        kernel: Covariance,
        X: Any,
        neighbors: Neighbors,
        noise_variance: ArrayLike = 0.0,
        jitter: float | None = None,
    ) -> VecchiaFactor:
        """
        :param kernel: the kernel, or another covariance.
        :param X: sites, (N, D), or what the covariance is of.
        :param neighbors: their order and neighbors.
        :param noise_variance: what is added to the covariance's diagonal, a scalar or (N,).
        :param jitter: relative jitter tried first.
        """
        return cls(neighbors, *site_weights(kernel, X, neighbors, noise_variance, jitter))

    def _subtract(self, f: jax.Array) -> jax.Array:
        """``(I − B) f`` over the last axis."""
        rows, weights = jnp.asarray(self.neighbors.rows), self.weights
        if f.size * rows.shape[1] <= entries_at_once():
            return f - jnp.sum(weights * jnp.take(f, rows, axis=-1), axis=-1)
        # Of many at once, such as projections, neighbor after neighbor: no array has all neighbors of all of them.
        columns = jnp.reshape(f, (-1, f.shape[-1])).T

        @jax.checkpoint
        def subtract(left: jax.Array, each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            rows, weights = each
            return left - weights[:, None] * columns[rows], None

        left, _ = lax.scan(subtract, columns, (rows.T, weights.T))
        return jnp.reshape(left.T, f.shape)

    def whiten(self, f: jax.Array) -> jax.Array:
        """``R f`` over the last axis, (..., N): independent standard normal if f is from the prior."""
        return self._subtract(f) / jnp.sqrt(self.variance)

    def color(self, z: jax.Array) -> jax.Array:
        """
        ``R⁻¹ z`` over the last axis, (..., N): a draw from the prior if z is standard normal.

        Wave after wave of sites that have neighbors in earlier ones alone (:class:`~npgp.neighbors.Waves`): O(N k)
        work for each row of z, in some hundreds of steps for sites in the plane; its gradient as much.
        """
        e = jnp.reshape(z * jnp.sqrt(self.variance), (-1, z.shape[-1])).T
        waves, N = self.neighbors.waves, z.shape[-1]
        sites, starts, size = jnp.asarray(waves.sites), jnp.asarray(waves.starts), waves.size
        num_blocks = jnp.sum(starts < N)
        position = jnp.zeros(N, sites.dtype).at[sites].set(jnp.arange(N, dtype=sites.dtype))
        # From here on by place, padded for a part that begins at the last.
        rows = _padded(position[jnp.asarray(self.neighbors.rows)[sites]], size)
        weights = _padded(self.weights[sites], size)

        def block_at(v, start):
            return lax.dynamic_slice_in_dim(v, start, size)

        def forward(_, e):
            e = _padded(e[sites], size)

            def step(i, f):
                # Values beyond the part come too early, and again in a later step.
                start = starts[i]
                before = f[block_at(rows, start)]
                new = block_at(e, start) + jnp.sum(block_at(weights, start)[:, :, None] * before, axis=1)
                return lax.dynamic_update_slice_in_dim(f, new, start, 0)

            return lax.fori_loop(0, num_blocks, step, e)[position]

        def backward(_, g):
            def step(i, h):
                start, end = starts[num_blocks - 1 - i], starts[num_blocks - i]
                own = jnp.where(jnp.arange(size)[:, None] < end - start, block_at(h, start), 0.0)
                return h.at[block_at(rows, start)].add(block_at(weights, start)[:, :, None] * own[:, None, :])

            return lax.fori_loop(0, num_blocks, step, _padded(g[sites], size))[position]

        # Differentiated as the solution of (I − B) f = e, without what the steps leave behind.
        f = lax.custom_linear_solve(lambda f: self._subtract(f.T).T, e, forward, backward)
        return jnp.reshape(f.T, z.shape)

    def log_determinant(self) -> jax.Array:
        """``log |Rᵀ R|``, of the precision."""
        return -jnp.sum(jnp.log(self.variance))

    def to_scipy(self) -> csr_array:
        """R as a SciPy sparse matrix (N, N): ``R.T @ R`` is the precision, ``R[order][:, order]`` lower triangular."""
        from scipy.sparse import csr_array

        mask, rows = np.asarray(self.neighbors.mask), np.asarray(self.neighbors.rows)
        scale = 1.0 / np.sqrt(np.asarray(self.variance))
        sites = np.arange(len(scale))
        i = np.concatenate([sites, np.broadcast_to(sites[:, None], rows.shape)[mask]])
        j = np.concatenate([sites, rows[mask]])
        values = np.concatenate([scale, (-scale[:, None] * np.asarray(self.weights))[mask]])
        return csr_array((values, (i, j)), shape=(len(scale), len(scale)))


@pytree
class MergedFactor:
    """
    A factor R of the precision of noisy measurements, of which several may be at one site, ``Rᵀ R`` the precision:
    exact for the sites' means, weighted by precision, and for what measurements differ from them by, which the noise
    alone decides of. R has more rows than columns; it is a factor of quadratic forms.

    :param factor: of the means.
    :param repeats: which rows are at which sites.
    :param noise_variance: of the rows, (N,).
    """

    factor: VecchiaFactor
    repeats: Repeats
    noise_variance: jax.Array

    def _split(self, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sites' means of values (..., N), and what the rows of sites that have several differ from them by."""
        v, site, several = jnp.asarray(v), jnp.asarray(self.repeats.site), jnp.asarray(self.repeats.several)
        means = self.repeats.means(v, self.noise_variance)
        return means, v[..., several] - means[..., site[several]]

    def whiten(self, v: jax.Array) -> jax.Array:
        """``R v`` over the last axis, (..., N) to (..., S + R)."""
        means, differences = self._split(v)
        scale = jnp.sqrt(self.noise_variance[jnp.asarray(self.repeats.several)])
        return jnp.concatenate([self.factor.whiten(means), differences / scale], axis=-1)

    def color(self, z: jax.Array) -> jax.Array:
        """A draw of measurements, (..., N), if z is standard normal."""
        means, differences = self._split(z * jnp.sqrt(self.noise_variance))
        # A mean of noise alone is independent of the differences.
        means = self.factor.color(means / jnp.sqrt(self.repeats.variance(self.noise_variance)))
        several = jnp.asarray(self.repeats.several)
        return means[..., jnp.asarray(self.repeats.site)].at[..., several].add(differences)

    def log_determinant(self) -> jax.Array:
        """``log |Rᵀ R|``, of the precision."""
        merged, own = self.repeats.variance(self.noise_variance), self.noise_variance
        return self.factor.log_determinant() + jnp.sum(jnp.log(merged)) - jnp.sum(jnp.log(own))


def factor_of_rows(
    kernel: Covariance, X: Any, neighbors: Neighbors, noise_variance: ArrayLike, jitter: float | None
) -> VecchiaFactor | MergedFactor:
    """
    The factor of the precision of noisy measurements.

    :param kernel: the kernel, or another covariance.
    :param X: inputs of the rows, (N, D), or what the covariance is of.
    :param neighbors: the order and neighbors of the rows, or of their sites.
    :param noise_variance: a scalar or (N,).
    :param jitter: relative jitter tried first.
    """
    X, _, variance, sites = of_sites(X, None, noise_variance, neighbors)
    factor = VecchiaFactor.of(kernel, X, sites, variance, jitter)
    if neighbors.repeats is None:
        return factor
    rows = jnp.broadcast_to(jnp.asarray(noise_variance, factor.variance.dtype), (neighbors.num_rows,))
    return MergedFactor(factor, neighbors.repeats, rows)


def of_sites(
    X: Any, y: jax.Array | None, noise_variance: ArrayLike, neighbors: Neighbors
) -> tuple[Any, Any, ArrayLike, Neighbors]:
    """
    Noisy measurements with each site once: inputs (S, D), or several arrays with sites first; the sites' means (..., S)
    of measurements (..., N); the noise variances of these means; and the sites' neighbors. Where no site repeats,
    all as it was.
    """
    repeats = neighbors.repeats
    if repeats is None:
        return X, y, noise_variance, neighbors
    first, dtype = jnp.asarray(repeats.first), jax.tree.leaves(X)[0].dtype
    variance = jnp.broadcast_to(jnp.asarray(noise_variance, dtype), (neighbors.num_rows,))
    means = None if y is None else repeats.means(y, variance)
    X = jax.tree.map(lambda x: jnp.asarray(x)[first], X)
    return X, means, repeats.variance(variance), replace(neighbors, repeats=None)
