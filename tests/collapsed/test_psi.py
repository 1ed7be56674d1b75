"""ψ-statistics: quadrature and Monte Carlo of the kernel itself, limits that are exact, and what they take."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from models import compiled

from npgp.collapsed.psi import KEPT_ENTRIES, expected_projection, psi_statistics
from npgp.features import Points
from npgp.kernels import RBF, Constant, Linear, Matern32

ROWS, COLUMNS, SIZE = 7, 2, 4
_rng = np.random.default_rng(0)
LOC = 1.3 * _rng.normal(size=(ROWS, COLUMNS))
SCALE = _rng.uniform(0.05, 0.9, (ROWS, COLUMNS))
Z = np.array([[-1.0, 0.3], [0.2, -0.5], [1.1, 0.8], [0.0, 1.2]])
WEIGHTS = _rng.uniform(0.3, 2.0, ROWS)
ARD, SLOPES = (0.8, 1.5), (0.4, 0.2)


def rbf(X, X2, lengthscale=ARD, variance=1.3, columns=slice(None)):
    return oracles.stationary("RBF", X[:, columns], X2[:, columns], np.array(lengthscale), variance)


def linear(X, X2, slopes=SLOPES):
    return (X * np.array(slopes)) @ X2.T


def two_rbf(X, X2):
    return rbf(X, X2, 0.6, 0.9, [0]) + rbf(X, X2, 1.1, 0.5, [1])


def of_all_kinds(X, X2):
    inner = rbf(X, X2, ARD, 0.4) + 0.5 * rbf(X, X2, 0.7, 1.0, [1]) + linear(X, X2, (0.3, 0.0))
    return 2.0 * inner + 0.6 + linear(X, X2, 0.1)


def ard(variance):
    return RBF(jnp.array(ARD), variance=variance)


#: Kernels, and the same functions in NumPy.
KERNELS = {
    "ard": (lambda: ard(1.3), rbf),
    "one lengthscale": (lambda: RBF(0.9, variance=0.7), lambda X, X2: rbf(X, X2, 0.9, 0.7)),
    "linear": (lambda: Linear(variance=jnp.array(SLOPES)), linear),
    "rbf + linear": (lambda: ard(1.3) + Linear(variance=jnp.array(SLOPES)), lambda X, X2: rbf(X, X2) + linear(X, X2)),
    "two rbf": (lambda: RBF(0.6, variance=0.9, active_dims=(0,)) + RBF(1.1, variance=0.5, active_dims=(-1,)), two_rbf),
    "of all kinds": (
        lambda: (
            2.0 * (ard(0.4) + 0.5 * RBF(0.7, active_dims=(1,)) + Linear(variance=0.3, active_dims=(0,)))
            + (Constant(variance=0.6) + Linear(variance=0.1))
        ),
        of_all_kinds,
    ),
}


def gauss_hermite(count):
    """Nodes (count², 2) and weights of a product rule for two standard normal variables."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    points = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    return points, np.outer(weights, weights).ravel() / (2.0 * np.pi)


@functools.cache
def by_quadrature(name):
    """ψ0 (N,), Ψ1 (N, M) and each row's E k(Z, x) k(x, Z), (N, M, M)."""
    formula = KERNELS[name][1]
    (nodes, weights), (few, few_weights) = gauss_hermite(60), gauss_hermite(4)
    psi0, psi1, psi2 = [], [], []
    for m, s in zip(LOC, SCALE, strict=True):
        psi0.append(few_weights @ np.diag(formula(m + s * few, m + s * few)))
        cross = formula(m + s * nodes, Z)
        psi1.append(weights @ cross)
        psi2.append(cross.T * weights @ cross)
    return np.array(psi0), np.array(psi1), np.array(psi2)


@compiled
def _all_kernels(Z, loc, scale, weights):
    return {
        name: (psi_statistics(make(), Z, loc, scale, weights), expected_projection(make(), Z, loc, scale, weights))
        for name, (make, _) in KERNELS.items()
    }


@functools.cache
def computed(dtype):
    with jax.enable_x64(dtype == "float64"):
        return jax.tree.map(np.asarray, _all_kernels(*(jnp.array(a, dtype) for a in (Z, LOC, SCALE, WEIGHTS))))


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-10), ("float32", 2e-6)])
@pytest.mark.parametrize("name", KERNELS)
def test_statistics_are_those_of_quadrature(name, dtype, tolerance):
    psi, _ = computed(dtype)[name]
    psi0, psi1, psi2 = by_quadrature(name)
    assert psi.psi0.dtype == psi.psi1.dtype == psi.psi2.dtype == dtype
    np.testing.assert_allclose(psi.psi0, psi0, rtol=tolerance)
    np.testing.assert_allclose(psi.psi1, psi1, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(psi.psi2, np.tensordot(WEIGHTS, psi2, 1), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "linear"])  # whose K_uu has rank 2
def test_projections_are_those_of_quadrature(name):
    _, projection = computed("float64")[name]
    psi0, psi1, psi2 = by_quadrature(name)
    K = KERNELS[name][1](Z, Z)
    L = np.linalg.cholesky(K + 1e-8 * np.diag(np.diag(K)))  # the jitter is of each row's own size
    np.testing.assert_allclose(projection.A, np.linalg.solve(L, psi1.T), rtol=1e-8, atol=1e-9)
    covariance = np.tensordot(WEIGHTS, psi2 - psi1[:, :, None] * psi1[:, None, :], 1)
    expected = np.linalg.solve(L, np.linalg.solve(L, covariance).T)
    np.testing.assert_allclose(projection.covariance, expected, rtol=1e-8, atol=1e-9)
    left = psi0 - np.einsum("ab,nba->n", np.linalg.inv(L @ L.T), psi2)
    np.testing.assert_allclose(projection.residual_variance, left, rtol=1e-8, atol=1e-9)
    assert np.all(left > 1e-3)


def test_known_inputs_have_no_covariance_and_small_scales_that_of_a_line(float64):
    """To first order, Cov[k(Z, x)] = J diag(s²) Jᵀ; what the difference of ψ2 and ψ1² would lose, is there."""
    kernel = KERNELS["of all kinds"][0]()
    scale = 1e-6 * SCALE

    @compiled
    def run(loc):
        known = psi_statistics(kernel, Z.copy(), loc, 0.0, WEIGHTS.copy())
        L = jnp.linalg.cholesky(kernel(jnp.array(Z)) + 1e-8 * jnp.mean(kernel.diag(jnp.array(Z))) * jnp.eye(SIZE))
        slopes = jax.vmap(jax.jacfwd(lambda x: kernel(x[None], jnp.array(Z))[0]))(loc)
        projections = [expected_projection(kernel, Z.copy(), loc, s, WEIGHTS.copy()) for s in (0.0, scale)]
        return known, L, slopes, projections

    known, L, slopes, (at_point, near) = jax.tree.map(np.asarray, run(jnp.array(LOC)))
    cross = KERNELS["of all kinds"][1](LOC, Z)
    np.testing.assert_allclose(known.psi1, cross, rtol=1e-12)
    np.testing.assert_allclose(known.psi2, (cross.T * WEIGHTS) @ cross, rtol=1e-12)
    assert np.all(at_point.covariance == 0.0)
    half = np.linalg.solve(
        L, (slopes * scale[:, None] * np.sqrt(WEIGHTS)[:, None, None]).transpose(1, 0, 2).reshape(SIZE, -1)
    )
    np.testing.assert_allclose(near.covariance, half @ half.T, rtol=1e-4, atol=1e-6 * np.max(half) ** 2)
    np.testing.assert_allclose(near.residual_variance, at_point.residual_variance, rtol=1e-9)


def test_many_columns_against_draws(float64):
    """Where no product rule reaches: z-scores of plain Monte Carlo."""
    rng = np.random.default_rng(3)
    columns, draws = 6, 40_000
    loc, scale, points = (
        rng.normal(size=(2, columns)),
        rng.uniform(0.1, 1.0, (2, columns)),
        rng.normal(size=(3, columns)),
    )
    lengthscale = rng.uniform(1.0, 3.0, columns)
    kernel = RBF(jnp.array(lengthscale), variance=1.1) + Linear(variance=0.05)
    psi = compiled(lambda *a: psi_statistics(kernel, *a))(points, loc, scale)
    x = loc + scale * rng.normal(size=(draws, 2, columns))
    cross = np.stack([rbf(x[:, n], points, lengthscale, 1.1) + linear(x[:, n], points, 0.05) for n in range(2)], 1)
    outer = np.sum(cross[..., :, None] * cross[..., None, :], 1)
    for estimates, value in ((cross, psi.psi1), (outer, psi.psi2)):
        z = (estimates.mean(0) - value) / (estimates.std(0) / draws**0.5)
        assert np.max(np.abs(z)) < 4.5
        assert np.max(estimates.std(0) / draws**0.5) < 0.02 * np.max(np.abs(value))


def test_far_and_wide_inputs_are_finite(x64):
    """No overflow times underflow, in values or gradients."""
    loc = np.array([[300.0, -200.0], [0.0, 0.0], [1e-3, 30.0]])
    scale = np.array([[1e-3, 20.0], [0.0, 500.0], [50.0, 1e-6]])

    def total(loc, scale, Z):
        projection = expected_projection(RBF(0.5), Z, loc, scale)
        return jnp.sum(projection.covariance) + jnp.sum(projection.A) + jnp.sum(projection.residual_variance)

    arguments = [jnp.array(a, x64) for a in (loc, scale, Z)]
    value, gradients = compiled(jax.value_and_grad(total, (0, 1, 2)))(*arguments)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(g)) for g in gradients)


# ---------------------------------------------------------------------------------------------------------------
# Gradients, chunks and memory


def scalar(lengthscale, slopes, Z, loc, scale, weights, chunk_size=None):
    """A number that depends on everything."""
    kernel = (
        RBF(lengthscale, variance=1.3)
        + 0.5 * RBF(0.7, active_dims=(1,))
        + Linear(variance=slopes)
        + Constant(variance=0.3)
    )
    projection = expected_projection(kernel, Z, loc, scale, weights, chunk_size=chunk_size)
    mixed = jnp.cos(jnp.arange(Z.shape[0] ** 2.0)).reshape(Z.shape[0], Z.shape[0])
    parts = jnp.sum(mixed * projection.covariance), jnp.sum(jnp.sin(projection.A)), projection.residual_variance
    return parts[0] + parts[1] + jnp.sum(jnp.log1p(parts[2] * weights))


def arguments():
    return [jnp.array(a) for a in (ARD, SLOPES, Z, LOC, SCALE, WEIGHTS)]


def test_gradients_are_those_of_finite_differences(float64):
    run, at = compiled(jax.value_and_grad(scalar, range(6))), arguments()
    rng = np.random.default_rng(1)
    _, gradients = run(*at)
    for i, gradient in enumerate(gradients):
        step = 1e-5 * rng.normal(size=gradient.shape)
        ends = [run(*at[:i], at[i] + sign * step, *at[i + 1 :])[0] for sign in (1.0, -1.0)]
        np.testing.assert_allclose(np.sum(gradient * step), (ends[0] - ends[1]) / 2, rtol=1e-6, atol=1e-12)


def test_chunks_do_not_matter(float64):
    """Rows one by one, in chunks of which the last is filled up, and all at once."""

    def total(slopes, Z, loc, scale, weights, chunk_size):
        kernel = RBF(0.9) + Linear(variance=slopes)
        projection = expected_projection(kernel, Z, loc, scale, weights, chunk_size=chunk_size)
        parts = projection.A, projection.covariance, projection.residual_variance
        return sum(jnp.sum(jnp.sin(part)) for part in parts)

    gradient = jax.value_and_grad(total, range(5))
    results = compiled(lambda *a: [gradient(*a, chunk_size=size) for size in (1, 3, 100)])(*arguments()[1:])
    for result in results[:-1]:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11), result, results[-1])


def test_single_precision_stays(float64):
    kernel = RBF(np.float32(0.9)) + RBF(np.float32(0.4))
    given = [np.asarray(a, np.float32) for a in (Z, LOC, SCALE, WEIGHTS)]
    moments = jax.eval_shape(lambda *a: expected_projection(kernel, *a), *given)
    for part in (moments.A, moments.covariance, moments.residual_variance):
        assert part.dtype == np.float32


@pytest.mark.parametrize("gradient", [False, True])
def test_no_array_has_rows_and_pairs_of_inducing_points(gradient):
    """What a program needs grows as N (M + Q), not as N M²."""
    size, columns = 40, 3

    def total(loc, Z):
        projection = expected_projection(RBF(0.7), Z, loc, 0.3)
        return jnp.sum(projection.covariance) + jnp.sum(projection.A) + jnp.sum(projection.residual_variance)

    def bytes_needed(rows):
        loc, Z = (jnp.zeros((n, columns), jnp.float32) for n in (rows, size))
        program = compiled(jax.grad(total, (0, 1)) if gradient else total).lower(loc, Z).compile()
        return program.memory_analysis().temp_size_in_bytes

    few, many = 3000, 15000  # of fewer all is kept
    assert few * size * (size + 1) // 2 > KEPT_ENTRIES
    for_each_row = (bytes_needed(many) - bytes_needed(few)) / (many - few)
    assert for_each_row < 4 * 8 * (size + columns)
    assert for_each_row < 0.25 * 4 * size**2
    assert bytes_needed(many) < 0.2 * many * 4 * size**2


# ---------------------------------------------------------------------------------------------------------------
# Errors


class Features:
    """A block that is not made of points."""

    size = 3

    def gram(self, kernel):
        return jnp.eye(3)

    def cross(self, kernel, X):
        return jnp.ones((3, X.shape[0]))


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(kernel=Matern32()), NotImplementedError, "Matern32 .* no closed form .* RBF, Linear and Constant"),
        (dict(kernel=RBF() + RBF() * Linear()), NotImplementedError, "Product"),
        (dict(kernel=RBF(jnp.ones(3))), ValueError, "RBF lengthscale has shape .3,. but the kernel sees 2"),
        (dict(inducing=Features()), TypeError, "inducing is a block of Features; .*Points"),
        (dict(inducing=[Z, Z]), ValueError, "inducing is a list of 2 blocks"),
        (dict(inducing=np.zeros((3, 1))), ValueError, "inducing has 1 columns and loc has 2"),
        (dict(inducing=np.zeros((0, 2))), ValueError, "inducing has no points"),
        (dict(loc=LOC[:, 0]), ValueError, r"loc has shape \(7,\)"),
        (dict(loc=np.ones((7, 2), int)), TypeError, "loc has dtype int"),
        (dict(loc=np.full((7, 2), np.nan)), ValueError, "loc has NaN"),
        (dict(scale=np.ones(3)), ValueError, r"scale has shape \(3,\)"),
        (dict(scale=-SCALE), ValueError, "scale has entries that are negative"),
        (dict(weights=np.ones(3)), ValueError, r"weights has shape \(3,\)"),
        (dict(chunk_size=0), ValueError, "chunk_size is 0"),
    ],
)
def test_refusals(change, error, words):
    given = dict(kernel=RBF(), inducing=Z, loc=LOC, scale=SCALE) | change
    with pytest.raises(error, match=words):
        psi_statistics(**given)


def test_points_are_a_block(float64):
    block = psi_statistics(RBF(), [Points(jnp.array(Z))], LOC.copy(), SCALE.copy())
    np.testing.assert_allclose(block.psi1, psi_statistics(RBF(), Z.copy(), LOC.copy(), SCALE.copy()).psi1)
