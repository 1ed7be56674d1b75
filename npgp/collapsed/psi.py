"""
ψ-statistics: a kernel's expectations over Gaussian inputs, in closed form (Titsias & Lawrence 2010).

For ``x_n ~ N(μ_n, diag s_n²)``, inducing inputs Z and weights w_n,

    ψ0_n = E k(x_n, x_n),    Ψ1_nm = E k(x_n, z_m),    Ψ2 = Σ_n w_n E k(Z, x_n) k(x_n, Z).

What is computed is not Ψ2 but the covariance part of it, ``Ψ2 − Ψ1ᵀ diag(w) Ψ1 = Σ_n w_n Cov[k(Z, x_n)]``: it is exact
in the limit of known inputs, where rounding in Ψ2 itself would be multiplied by the condition of K_uu. A kernel is
written as ``Σ_i σ_i² exp(−½ Σ_q α_iq (x_q − x'_q)²) + Σ_q v_q x_q x'_q + c``. For two of its exponential terms k_i and
k_j and one row, with ``a = μ − z_m``, ``b = μ − z_m'``, ``t = s² α_i``, ``u = s² α_j`` (sums over q are understood),

    log E k_i = log σ_i² − ½ log(1 + t) − ½ α_i a² / (1 + t)
    log E k_i k_j − log E k_i − log E k_j = ½ log(1 + tu/(1 + t + u))
        − ½ tu/(1 + t + u) · (α_i a²/(1 + t) + α_j b²/(1 + u)) + s² α_i α_j ab/(1 + t + u),

all of whose terms vanish with s. Only they need a number for each row and pair of inducing inputs, of one term i = j
for each pair once: for all rows at once where these are few, and else for some rows at a time.

Quadratic functions of a point are written out as products of matrices, (B, K) of rows and (K, P) of points or pairs, so
that no array has rows, pairs and columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import checks, chunks, linalg
from npgp.features import Points, as_block
from npgp.kernels import RBF, Constant, Kernel, Linear, Scaled, Sum
from npgp.kernels.base import check_ard, columns_seen
from npgp.programs.backend import maximum
from npgp.programs.later import see_later
from npgp.pytrees import pytree
from npgp.sparse.projection import Projector, factorize

#: Below this, exp(x) − 1 is taken by its series, whose coefficients after the first of them, x, these are, over x.
SERIES_LIMIT, SERIES = 0.25, [1.0 / math.factorial(k) for k in range(1, 12)]


class Pairs(NamedTuple):
    """Pairs of M inducing inputs: each once, in the order that two terms of a kernel see them or, of one, in any."""

    one: np.ndarray  # (P,)
    other: np.ndarray
    #: Which pair each entry of a matrix is of, (M, M).
    of_entry: np.ndarray
    #: Whether the two terms are one.
    same: bool

    @classmethod
    def of(cls, size: int, same: bool) -> Pairs:
        one, other = np.tril_indices(size) if same else np.indices((size, size)).reshape(2, -1)
        of_entry = np.zeros((size, size), int)
        if same:
            of_entry[other, one] = np.arange(len(one))
        of_entry[one, other] = np.arange(len(one))
        return cls(one, other, of_entry, same)

    def matrix(self, values: jax.Array) -> jax.Array:
        """The symmetric matrix that values of pairs, (P,), contribute, (M, M)."""
        half = values[self.of_entry]
        return half if self.same else half + half.T

    def weighted(self, form: jax.Array) -> jax.Array:
        """Coefficients of values of pairs in their trace with a symmetric matrix (M, M); (P,)."""
        once = self.same & (self.one == self.other)
        return form[self.one, self.other] * jnp.where(once, 1.0, 2.0)


def negative_square(constant: jax.Array, precision: jax.Array, at: jax.Array, tilt: ArrayLike = 0.0) -> jax.Array:
    """
    ``constant − ½ Σ_q precision (at − z)² − Σ_q tilt at (z − ½ at)`` of each row as coefficients of :func:`powers`,
    (B, 2Q + 1).

    Terms are added before they are columns of one array: of two arrays of 1, 6 and 6 columns jaxlib 0.10.1 computes the
    sum wrongly in float64 on CPUs.
    """
    shift = precision - tilt
    constant = constant - 0.5 * jnp.sum(shift * jnp.square(at), axis=-1)
    return jnp.concatenate([constant[:, None], shift * at, -0.5 * precision], axis=-1)


def powers(z: jax.Array) -> jax.Array:
    """1, z and z² of points (P, Q): (2Q + 1, P)."""
    z = z.T  # before they are one array, as in negative_square
    return jnp.concatenate([jnp.ones_like(z[:1]), z, jnp.square(z)])


def at_pairs(
    first: jax.Array, second: jax.Array, one: jax.Array, other: jax.Array, cross: jax.Array | None = None
) -> jax.Array:
    """
    The sum of two functions of :func:`negative_square`, the one at one point of each pair, and of ``Σ_q cross one
    other``: (B, P).

    It is one product, whose time, and that of its gradients, grows with the number of columns.
    """
    if first is second:
        rows, points = [first], [powers(one) + powers(other)]
    else:
        rows, points = [first, second], [powers(one), powers(other)]
    if cross is not None:
        rows, points = [*rows, cross], [*points, (one * other).T]
    return linalg.matmul(jnp.concatenate(rows, axis=-1), jnp.concatenate(points))


def log_excess(alpha: jax.Array, beta: jax.Array, variance: jax.Array, m, one, other) -> jax.Array:
    """``log E k_i(x, one) k_j(x, other) − log E k_i(x, one) − log E k_j(x, other)``, (B, P)."""
    t, u = variance * alpha, variance * beta
    both = 1.0 + t + u
    share = t * u / both
    half = 0.25 * jnp.sum(jnp.log1p(share), axis=-1)
    # w (m − one)(m − other), of which each point has a half but for the product of both.
    w = t * beta / both
    first = negative_square(half, share * alpha / (1.0 + t), m, w)
    second = first if alpha is beta else negative_square(half, share * beta / (1.0 + u), m, w)
    return at_pairs(first, second, one, other, w)


@jax.custom_jvp
def exp_difference(log: jax.Array, excess: jax.Array) -> jax.Array:
    """``exp(log + excess) − exp(log)`` without loss for a small excess and overflow for a large one."""
    series = jnp.full_like(excess, SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        series = coefficient + excess * series
    start = jnp.exp(log)
    small = jnp.abs(excess) < SERIES_LIMIT
    return jnp.where(small, start * excess * series, jnp.exp(log + excess) - start)


@exp_difference.defjvp
def _(primals, tangents):
    log, _ = primals
    value = exp_difference(*primals)
    return value, value * tangents[0] + (value + jnp.exp(log)) * tangents[1]


#: Entries of arrays with a number for each row and pair of inducing inputs: as many as are made and kept for all rows
#: at once, and else those of a chunk of rows.
KEPT_ENTRIES, CHUNK_ENTRIES = 2**21, 2**18


@pytree
class PsiStatistics:
    """
    A kernel's expectations over N Gaussian inputs.

    :param psi0: ``E k(x_n, x_n)``, (N,).
    :param psi1: ``E k(x_n, z_m)``, (N, M).
    :param psi2: ``Σ_n w_n E k(Z, x_n) k(x_n, Z)``, (M, M).
    """

    psi0: jax.Array
    psi1: jax.Array
    psi2: jax.Array


def psi_statistics(
    kernel: Kernel,
    inducing: object,
    loc: ArrayLike,
    scale: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    chunk_size: int | None = None,
) -> PsiStatistics:
    """
    ψ0, Ψ1 and Ψ2 of a kernel made of ``RBF``, ``Linear`` and ``Constant`` by sums and scalings.

    .. code-block:: python

        psi = npgp.collapsed.psi_statistics(kernel, Z, loc=X, scale=np.full(X.shape, 0.1))
        assert psi.psi1.shape == (30, 6)

    :param kernel: the kernel.
    :param inducing: Z, (M, Q), or :class:`npgp.features.Points`.
    :param loc: means of the inputs, (N, Q).
    :param scale: their standard deviations, (N, Q), (Q,) or a scalar; 0 for inputs that are known.
    :param weights: w_n, (N,); 1 if omitted.
    :param chunk_size: rows for which a number for each pair of inducing inputs is held at a time; if omitted all, or
        where that is too many as many as fit a cache.
    :raises NotImplementedError: for kernels without a closed form.
    :raises TypeError: for inducing features that are not points, and for inputs that are not floating.
    :raises ValueError: for arrays of the wrong shape, and for a standard deviation known to be negative.

    Source: Titsias & Lawrence 2010, section 3.2; Damianou, Titsias & Lawrence 2016, appendix (cross terms of sums).
    """
    given = _checked(inducing, loc, scale, weights)
    terms = _terms(kernel, given.loc.shape[1], given.loc.dtype)
    nothing = jnp.zeros((given.Z.shape[0],) * 2, given.loc.dtype)
    psi1, covariance, _ = _moments(terms, given, nothing, chunk_size)
    psi2 = linalg.matmul(psi1.T * given.weights, psi1) + covariance
    return PsiStatistics(_psi0(terms, given), psi1, psi2)


@pytree
class ExpectedProjection:
    """
    Moments of the whitened projections ``A(x_n) = L⁻¹ k(Z, x_n)`` of N Gaussian inputs, and of what they leave.

    :param projector: the factorized inducing points.
    :param A: ``E A(x_n)``, (M, N).
    :param covariance: ``Σ_n w_n Cov[A(x_n)]``, (M, M); (D, M, M) with weights for each of D outputs.
    :param residual_variance: ``⟨d_n⟩ = ψ0_n − tr(K_uu⁻¹ Ψ2_n)``, clipped at 0, (N,).
    """

    projector: Projector
    A: jax.Array
    covariance: jax.Array
    residual_variance: jax.Array


def expected_projection(
    kernel: Kernel,
    inducing: object,
    loc: ArrayLike,
    scale: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    jitter: float | None = None,
    chunk_size: int | None = None,
) -> ExpectedProjection:
    """
    The moments of the projections of Gaussian inputs, for a kernel as in :func:`psi_statistics`.

    .. code-block:: python

        moments = npgp.collapsed.expected_projection(
            kernel, Z, loc=X, scale=np.full(X.shape, 0.1)
        )
        assert moments.covariance.shape[-1] == 6

    :param kernel: the kernel.
    :param inducing: Z, (M, Q), or :class:`npgp.features.Points`.
    :param loc: means of the inputs, (N, Q).
    :param scale: their standard deviations, (N, Q), (Q,) or a scalar.
    :param weights: w_n, (N,), or those of each of D outputs, (D, N); 1 if omitted.
    :param jitter: relative jitter tried first (:func:`npgp.linalg.cholesky`).
    :param chunk_size: as for :func:`psi_statistics`; so are the errors.
    """
    given = _checked(inducing, loc, scale, weights, outputs=True)
    terms = _terms(kernel, given.loc.shape[1], given.loc.dtype)
    projector = factorize(kernel, (Points(given.Z),), jitter, double=False)  # solves with rounded moments follow
    (L,) = projector.cholesky
    inverse = linalg.gram(linalg.solve_lower(L, jnp.eye(L.shape[0], dtype=L.dtype)).T)

    def moments(weights):
        return _moments(terms, given._replace(weights=weights), inverse, chunk_size)

    # Of several outputs' weights the sums differ, and nothing else is computed again.
    mapped = jax.vmap(moments, out_axes=(None, 0, None)) if given.weights.ndim == 2 else moments
    psi1, covariance, spread = mapped(given.weights)
    A = linalg.solve_lower(L, psi1.T)
    covariance = linalg.solve_lower(L, jnp.swapaxes(linalg.solve_lower(L, covariance), -1, -2))
    d = _psi0(terms, given) - jnp.sum(jnp.square(A), axis=0) - spread
    return ExpectedProjection(projector, A, covariance, maximum(d, 0.0))


# ---------------------------------------------------------------------------------------------------------------
# What is given


def points(inducing: object) -> Points:
    """One block of inducing points, from what a user gives."""
    if isinstance(inducing, (list, tuple)):
        if len(inducing) != 1:
            raise ValueError(f"inducing is a list of {len(inducing)} blocks; with Gaussian inputs there is one block.")
        (inducing,) = inducing
    block = as_block(inducing)
    if not isinstance(block, Points):
        raise TypeError(
            f"inducing is a block of {type(block).__name__}; expectations are known for npgp.features.Points alone."
        )
    if not block.size:
        raise ValueError("inducing has no points; at least one is needed.")
    return block


def gaussian_inputs(loc: ArrayLike, scale: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Means and standard deviations of inputs, checked, each (N, Q)."""
    loc = checks.inputs(loc, "loc")
    rows, columns = loc.shape
    if jnp.shape(scale) not in ((), (columns,), (rows, columns)):
        raise ValueError(
            f"scale has shape {jnp.shape(scale)}; standard deviations of inputs {loc.shape} are a scalar, ({columns},) "
            f"or ({rows}, {columns})."
        )
    _require_deviations(scale)
    return loc, jnp.broadcast_to(jnp.asarray(scale, loc.dtype), loc.shape)


def _require_deviations(scale: ArrayLike) -> None:
    if checks.is_traced(scale):
        see_later(_require_deviations, scale)
    elif not (np.all(np.isfinite(scale)) and np.all(np.asarray(scale) >= 0)):
        raise ValueError("scale has entries that are negative, NaN or infinite; it holds standard deviations.")


class _Given(NamedTuple):
    Z: jax.Array
    loc: jax.Array
    scale: jax.Array
    weights: jax.Array


def _checked(
    inducing: object, loc: ArrayLike, scale: ArrayLike, weights: ArrayLike | None, outputs: bool = False
) -> _Given:
    loc, scale = gaussian_inputs(loc, scale)
    Z = points(inducing).inputs
    if Z.shape[1] != loc.shape[1]:
        raise ValueError(
            f"inducing has {Z.shape[1]} columns and loc has {loc.shape[1]}; inducing inputs and inputs must have the "
            "same."
        )
    weights = 1.0 if weights is None else weights
    if jnp.shape(weights) not in ((), loc.shape[:1]) and not (outputs and jnp.shape(weights)[1:] == loc.shape[:1]):
        raise ValueError(f"weights has shape {jnp.shape(weights)}; there must be one for each row, ({loc.shape[0]},).")
    weights = jnp.asarray(weights, loc.dtype)
    weights = weights if weights.ndim == 2 else jnp.broadcast_to(weights, loc.shape[:1])
    return _Given(Z.astype(loc.dtype), loc, scale, weights)


@pytree
class _Terms:
    """
    A kernel as ``Σ_i σ_i² exp(−½ Σ_q α_iq (x_q − x'_q)²) + Σ_q v_q x_q x'_q + c``.

    :param precisions: α_i, each (Q,); 0 for columns that a term does not see.
    :param variances: σ_i².
    :param slopes: v, (Q,), if there is a linear term.
    :param constant: c.
    """

    precisions: tuple[jax.Array, ...]
    variances: tuple[jax.Array, ...]
    slopes: jax.Array | None
    constant: jax.Array


def _terms(kernel: Kernel, columns: int, dtype) -> _Terms:
    # Not their subclasses, which may be other functions.
    if type(kernel) is Sum:
        parts = [_terms(part, columns, dtype) for part in kernel.kernels]
        slopes = [part.slopes for part in parts if part.slopes is not None]
        return _Terms(
            sum((part.precisions for part in parts), ()),
            sum((part.variances for part in parts), ()),
            sum(slopes[1:], slopes[0]) if slopes else None,
            sum((part.constant for part in parts), jnp.zeros((), dtype)),
        )
    if type(kernel) is Scaled:
        part, factor = _terms(kernel.kernel, columns, dtype), jnp.asarray(kernel.scale, dtype)
        scaled = None if part.slopes is None else factor * part.slopes
        return _Terms(part.precisions, tuple(factor * v for v in part.variances), scaled, factor * part.constant)
    zero = jnp.zeros((), dtype)
    if type(kernel) is RBF:
        precision = _seen(1.0 / jnp.square(jnp.asarray(kernel.lengthscale, dtype)), kernel, columns, "lengthscale")
        return _Terms((precision,), (jnp.asarray(kernel.variance, dtype),), None, zero)
    if type(kernel) is Linear:
        return _Terms((), (), _seen(jnp.asarray(kernel.variance, dtype), kernel, columns, "variance"), zero)
    if type(kernel) is Constant:
        return _Terms((), (), None, jnp.asarray(kernel.variance, dtype))
    raise NotImplementedError(
        f"the expectations of {type(kernel).__name__} over Gaussian inputs have no closed form here; those of RBF, "
        "Linear and Constant have, and of their sums and multiples by numbers."
    )


def _seen(values: jax.Array, kernel: RBF | Linear, columns: int, name: str) -> jax.Array:
    """One value for each column: 0 for those that the kernel does not see."""
    seen = columns_seen(columns, kernel.active_dims)
    check_ard(values, seen, f"{type(kernel).__name__} {name}")
    values = jnp.broadcast_to(values, (seen,))
    if kernel.active_dims is None:
        return values
    return jnp.zeros(columns, values.dtype).at[np.asarray(kernel.active_dims)].add(values)


# ---------------------------------------------------------------------------------------------------------------
# Expectations


def _psi0(terms: _Terms, given: _Given) -> jax.Array:
    psi0 = jnp.broadcast_to(sum(terms.variances, terms.constant), given.loc.shape[:1])
    if terms.slopes is not None:
        psi0 = psi0 + jnp.sum(terms.slopes * (jnp.square(given.loc) + jnp.square(given.scale)), axis=-1)
    return psi0


def _moments(
    terms: _Terms, given: _Given, form: jax.Array, chunk_size: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """
    Ψ1 (N, M), ``Σ_n w_n Cov[k(Z, x_n)]`` (M, M), and for each row ``tr(form · Cov[k(Z, x_n)])`` (N,), for a symmetric
    form.

    Of several chunks of rows, the gradient computes each again rather than keep anything of it.
    """
    Z, loc, scale, weights = given
    rows, size = loc.shape[0], Z.shape[0]
    if chunk_size is None:
        pairs = size * (size + 1) // 2
        chunk_size = rows if rows * pairs <= KEPT_ENTRIES else chunks.rows_within(CHUNK_ENTRIES, pairs)
    else:
        chunk_size = checks.whole_number(chunk_size, "chunk_size")
    if chunk_size >= rows:
        return _chunk_moments(terms, Z, form, loc, scale, weights)

    one_chunk = jax.checkpoint(_chunk_moments)

    def body(total, chunk):
        psi1, covariance, spread = one_chunk(terms, Z, form, *chunk)
        return total + covariance, (psi1, spread)

    # Rows that fill the last chunk have weight 0.
    covariance, by_row = lax.scan(
        body, jnp.zeros_like(form), chunks.split((loc, scale, weights), chunk_size, pad_zeros=True)
    )
    psi1, spread = chunks.join(by_row, rows)
    return psi1, covariance, spread


def _chunk_moments(terms: _Terms, Z, form, loc, scale, weights):
    size, variance = Z.shape[0], jnp.square(scale)
    # Quadratic functions of a point are written out around the middle of Z: rounding grows with the square of how many
    # lengthscales the inputs span.
    middle = lax.stop_gradient(jnp.mean(Z, axis=0))
    m, z = loc - middle, Z - middle
    shrunk = [variance * precision for precision in terms.precisions]  # t, (B, Q)
    logs = [  # log E k_i
        negative_square(jnp.log(v) - 0.5 * jnp.sum(jnp.log1p(t), axis=-1), alpha / (1.0 + t), m)
        for alpha, v, t in zip(terms.precisions, terms.variances, shrunk, strict=True)
    ]
    means = [jnp.exp(linalg.matmul(log, powers(z))) for log in logs]  # (B, M)
    psi1 = sum(means, jnp.broadcast_to(terms.constant, (loc.shape[0], size)))
    total, spread = jnp.zeros_like(form), jnp.zeros_like(weights)

    for i in range(len(means)):
        for j in range(i + 1):
            pairs = Pairs.of(size, same=i == j)
            one, other = z[pairs.one], z[pairs.other]  # (P, Q)
            excess = log_excess(terms.precisions[i], terms.precisions[j], variance, m, one, other)
            flat = exp_difference(at_pairs(logs[i], logs[j], one, other), excess)  # (B, P)
            total = total + pairs.matrix(linalg.matmul(weights, flat))
            spread = spread + linalg.matmul(flat, pairs.weighted(form))

    if terms.slopes is not None:
        psi1 = psi1 + linalg.matmul(loc * terms.slopes, Z.T)
        half = Z * terms.slopes  # (M, Q)
        formed = linalg.matmul(form, half)
        total = total + linalg.matmul(half * linalg.matmul(weights, variance), half.T)
        spread = spread + linalg.matmul(variance, jnp.sum(half * formed, axis=0))
        apart = m[:, None, :] - z  # (B, M, Q)
        for mean, t in zip(means, shrunk, strict=True):
            # Under the density that k_i(x, z_m) tilts, x_q moves by −t a / (1 + t).
            moved = -mean[:, :, None] * (t / (1.0 + t))[:, None, :] * apart
            part = linalg.matmul(jnp.tensordot(weights, moved, 1, precision=lax.Precision.HIGHEST), half.T)
            total = total + part + part.T
            spread = spread + 2.0 * jnp.sum(moved * formed, axis=(-2, -1))
    return psi1, total, spread
