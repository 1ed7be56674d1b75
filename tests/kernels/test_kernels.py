"""Covariance functions against their formulas in NumPy, and what float32 and automatic differentiation make of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import equations
from sklearn.gaussian_process import kernels as sklearn

import npgp
from npgp import kernels
from npgp.kernels import (
    RBF,
    ArcCosine,
    Constant,
    Cosine,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    RationalQuadratic,
    White,
)
from npgp.sparse.projection import factorize

STATIONARY = {k.__name__: k for k in (RBF, Matern12, Matern32, Matern52, RationalQuadratic)}
ARD = (0.5, 1.5, 3.0)  # no array: JAX would keep it in the dtype in which it is first seen
TOLERANCE = {np.float32: 5e-6, np.float64: 1e-13}
#: Kernels with a cusp at equal inputs, which magnifies rounding of the squared distance.
CUSP = ("Matern12", "ArcCosine 0")


#: How a kernel is written, given a scalar hyperparameter that may be traced, and its formula.
CASES = {
    **{
        name: (
            lambda v, k=kernel: k(lengthscale=0.7, variance=v),
            lambda X, Z, v, n=name: oracles.stationary(n, X, Z, 0.7, v),
        )
        for name, kernel in STATIONARY.items()
    },
    "ARD": (
        lambda v: Matern52(lengthscale=v * jnp.asarray(ARD)),
        lambda X, Z, v: oracles.stationary("Matern52", X, Z, v * np.array(ARD)),
    ),
    "active": (
        lambda v: RBF(lengthscale=jnp.stack([v, 2.0 * v]), active_dims=(2, 0)),
        lambda X, Z, v: oracles.stationary("RBF", X[:, [2, 0]], Z[:, [2, 0]], np.array([v, 2 * v])),
    ),
    "Linear": (lambda v: Linear(variance=v), lambda X, Z, v: v * X @ Z.T),
    "Linear ARD": (
        lambda v: Linear(variance=v * jnp.asarray(ARD[:2]), active_dims=(0, 2)),
        lambda X, Z, v: X[:, [0, 2]] * (v * np.array(ARD[:2])) @ Z[:, [0, 2]].T,
    ),
    "RationalQuadratic α": (
        lambda v: RationalQuadratic(0.7, variance=1.3, alpha=v),
        lambda X, Z, v: oracles.rational_quadratic(X, Z, 0.7, 1.3, v),
    ),
    "Periodic": (
        lambda v: Periodic(1.7, lengthscale=v, variance=1.3),
        lambda X, Z, v: oracles.periodic(X, Z, 1.7, v, 1.3),
    ),
    "Periodic ARD": (
        lambda v: Periodic(jnp.stack([v, 2.0 * v]), lengthscale=jnp.asarray(ARD[:2]), active_dims=(2, 0)),
        lambda X, Z, v: oracles.periodic(X[:, [2, 0]], Z[:, [2, 0]], np.array([v, 2 * v]), np.array(ARD[:2]), 1.0),
    ),
    "Cosine": (
        lambda v: Cosine(v * jnp.asarray(ARD), variance=1.3),
        lambda X, Z, v: oracles.cosine(X, Z, v * np.array(ARD), 1.3),
    ),
    "Polynomial": (
        lambda v: Polynomial(3, variance=v, offset=0.5),
        lambda X, Z, v: oracles.polynomial(X, Z, 3, v, 0.5),
    ),
    "Polynomial ARD": (
        lambda v: Polynomial(2, variance=v * jnp.asarray(ARD[:2]), offset=v, active_dims=(0, 2)),
        lambda X, Z, v: oracles.polynomial(X[:, [0, 2]], Z[:, [0, 2]], 2, v * np.array(ARD[:2]), v),
    ),
    "ArcCosine 0": (
        lambda v: ArcCosine(0, variance=1.3, weight_variance=v, bias_variance=0.3),
        lambda X, Z, v: oracles.arc_cosine(X, Z, 0, 1.3, v, 0.3),
    ),
    "ArcCosine 1": (
        lambda v: ArcCosine(1, variance=1.3, weight_variance=0.7, bias_variance=v),
        lambda X, Z, v: oracles.arc_cosine(X, Z, 1, 1.3, 0.7, v),
    ),
    "ArcCosine 2 ARD": (
        lambda v: ArcCosine(
            2, variance=1.3, weight_variance=v * jnp.asarray(ARD[:2]), bias_variance=0.3, active_dims=(0, 2)
        ),
        lambda X, Z, v: oracles.arc_cosine(X[:, [0, 2]], Z[:, [0, 2]], 2, 1.3, v * np.array(ARD[:2]), 0.3),
    ),
    "Constant": (lambda v: Constant(variance=v), lambda X, Z, v: np.full((len(X), len(Z)), v)),
    "White": (
        lambda v: White(variance=v),
        lambda X, Z, v: v * np.eye(len(X)) if X is Z else np.zeros((len(X), len(Z))),
    ),
    "sum": (
        lambda v: RBF(0.4) + Linear(variance=v) + White(variance=0.1),
        lambda X, Z, v: oracles.stationary("RBF", X, Z, 0.4) + v * X @ Z.T + 0.1 * (X is Z) * np.eye(len(X), len(Z)),
    ),
    "product": (
        lambda v: RBF(v, active_dims=(0,)) * Matern32(0.5, active_dims=(1, 2)) * Linear(),
        lambda X, Z, v: (
            oracles.stationary("RBF", X[:, :1], Z[:, :1], v)
            * oracles.stationary("Matern32", X[:, 1:], Z[:, 1:], 0.5)
            * (X @ Z.T)
        ),
    ),
    "scaled": (
        lambda v: v * (2.0 * RBF() + Constant(variance=0.5) * v),
        lambda X, Z, v: v * (2.0 * oracles.stationary("RBF", X, Z) + 0.5 * v),
    ),
}


@jax.jit
def evaluate_all(X, Z, v):
    """Every case's cross-covariance, covariance and diagonal, with a traced hyperparameter: compiled once."""
    made = {name: make(v) for name, (make, _) in CASES.items()}
    return {name: (k(X, Z), k(X), k.diag(X)) for name, k in made.items()}


def some_inputs(seed, dtype, rows=(9, 6), offset=0.0, spread=1.0):
    """X with a repeated row and a near one, and Z with a row of X."""
    rng = np.random.default_rng(seed)
    X, Z = (offset + spread * rng.normal(size=(n, 3)) for n in rows)
    X[1], X[2], Z[0] = X[0], X[0] + 1e-4 * spread, X[3]
    return X.astype(dtype), Z.astype(dtype)


@functools.cache
def evaluated(dtype):
    X, Z = some_inputs(0, dtype)
    with jax.enable_x64(dtype == np.float64):
        return jax.tree.map(np.asarray, evaluate_all(X, Z, dtype(0.8)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CASES)
def test_kernel_is_its_formula(name, dtype):
    X, Z = (A.astype(float) for A in some_inputs(0, dtype))
    formula = functools.partial(CASES[name][1], v=float(dtype(0.8)))
    cross, square, diagonal = evaluated(dtype)[name]
    assert cross.dtype == square.dtype == diagonal.dtype == dtype
    atol = {np.float32: 1e-3, np.float64: 1e-6}[dtype] if name in CUSP else 10 * TOLERANCE[dtype]
    atol = atol * max(1.0, np.max(formula(X, X)))
    np.testing.assert_allclose(cross, formula(X, Z), atol=atol)
    np.testing.assert_allclose(square, formula(X, X), atol=atol)
    np.testing.assert_allclose(diagonal, np.diag(formula(X, X)), rtol=TOLERANCE[dtype])


def test_one_column_agrees_with_scikit_learn(float64):
    X, Z = (A[:, :1] for A in some_inputs(0, float64))
    pairs = [
        (RationalQuadratic(0.7, alpha=0.4), sklearn.RationalQuadratic(0.7, 0.4)),
        (Periodic(1.7, lengthscale=0.6), sklearn.ExpSineSquared(0.6, 1.7)),
        (Polynomial(3, variance=1.0, offset=0.5), sklearn.DotProduct(np.sqrt(0.5)) ** 3),
    ]
    ours = jax.jit(lambda X, Z: [ours(X, Z) for ours, _ in pairs])(X, Z)
    for made, (_, theirs) in zip(ours, pairs, strict=True):
        np.testing.assert_allclose(made, theirs(X, Z), rtol=1e-10)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    offset=st.sampled_from([0.0, -3.0, 50.0]),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
    v=st.floats(0.5, 2.0),
)
def test_covariances_are_symmetric_and_psd_and_the_diagonal_is_theirs(x64, seed, offset, spread, v):
    X, Z = some_inputs(seed, x64, offset=offset, spread=spread)
    eps = np.finfo(x64).eps
    # Rounding of the squared distance at the shortest lengthscale; in float32 most of it is avoided.
    distance_error = 4 * eps * (np.max(np.ptp(X, axis=0)) / 0.25) ** 2 * (2.0**-10 if x64 == jnp.float32 else 1.0)
    for name, (cross, square, diagonal) in jax.tree.map(np.asarray, evaluate_all(X, Z, x64(v))).items():
        error = distance_error if name not in CUSP else np.sqrt(distance_error)  # k = 1 − √r² + …
        tolerance = (20 * eps + error) * np.max(diagonal)
        np.testing.assert_allclose(square, square.T, rtol=0, atol=tolerance, err_msg=name)
        np.testing.assert_allclose(np.diag(square), diagonal, rtol=1e-5, err_msg=name)
        assert np.linalg.eigvalsh(square.astype(float))[0] > -len(X) * tolerance, name
        cauchy_schwarz = np.sqrt(np.outer(diagonal, evaluate_diag(Z, name, v)))
        assert np.all(np.abs(cross) <= cauchy_schwarz * (1 + 1e-5) + tolerance), name


def evaluate_diag(Z, name, v):
    Z = Z.astype(float)
    return np.diag(CASES[name][1](Z, Z, v))


# ---------------------------------------------------------------- near points, far from the origin


@pytest.mark.parametrize("name", STATIONARY)
@pytest.mark.parametrize(
    "offset, spacing",
    [(0.0, 1e-3), (1e4, 1e-3), (1e4, 0.1), (-2e5, 0.1)],
    ids=["origin", "rounded inputs", "far", "farther"],
)
def test_float32_is_accurate_for_near_points_wherever_they_are(name, offset, spacing):
    # Against float64 of the same rounded inputs: no digit may be lost but those the inputs lack.
    rng = np.random.default_rng(0)
    X, Z = ((offset + 50 * spacing * rng.uniform(size=(30, 2))).astype(np.float32) for _ in range(2))
    Z[:10] = X[:10] + np.float32(spacing) * (np.arange(10) % 3)[:, None].astype(np.float32)
    lengthscale = 10 * spacing
    computed = _single(name)(X, Z, np.float32(lengthscale))
    expected = oracles.stationary(name, X, Z, float(np.float32(lengthscale)))
    assert np.ptp(expected) > 0.8  # near and far pairs
    np.testing.assert_allclose(computed, expected, atol=3e-4 if name == "Matern12" else 1e-6)


@functools.cache
def _single(name):
    return jax.jit(lambda X, Z, lengthscale: STATIONARY[name](lengthscale)(X, Z))


@pytest.mark.parametrize(
    "make, formula, spread",
    [
        (
            lambda: Periodic(1.0, lengthscale=1e-3),
            lambda X, Z: oracles.periodic(X, Z, 1.0, float(np.float32(1e-3)), 1.0),
            2e-4,
        ),
        (lambda: ArcCosine(0), lambda X, Z: oracles.arc_cosine(X, Z, 0, 1.0, 1.0, 1.0), 1e-3),
    ],
    ids=["Periodic", "ArcCosine 0"],
)
def test_float32_is_accurate_for_near_points_on_circles_and_spheres(make, formula, spread):
    rng = np.random.default_rng(0)
    X, Z = ((3.0 + spread * rng.uniform(size=(30, 2))).astype(np.float32) for _ in range(2))
    Z[:10] = X[:10]
    expected = formula(X.astype(float), Z.astype(float))
    np.testing.assert_allclose(np.diag(expected)[:10], 1.0, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(make())(X, Z), expected, atol=2e-6)


def test_float32_distances_within_clusters_that_are_far_apart():
    # A thousand lengthscales apart, where ‖x‖² + ‖z‖² − 2 x·z would have errors of about 0.1.
    rng = np.random.default_rng(1)
    X = (np.repeat([[0.0], [1000.0]], 15, 0) + rng.uniform(size=(30, 3))).astype(np.float32)
    r2 = oracles.distances(X, X) ** 2
    near = r2 < 5
    computed = np.asarray(jax.jit(RBF())(X[:, :], X[::-1]))[:, ::-1]
    np.testing.assert_allclose(computed, np.exp(-0.5 * r2), atol=1e-3)
    assert near.sum() == 2 * 15**2 and np.all(computed[~near] < 1e-30)


def test_float32_gradients_of_near_points_far_from_the_origin():
    rng = np.random.default_rng(2)
    X, Z = ((1e4 + 0.1 * rng.uniform(size=(20, 2))).astype(np.float32) for _ in range(2))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradient(X, Z, lengthscale):
        return jnp.sum(jnp.square(RBF(lengthscale)(X, Z)))

    single = gradient(X, Z, np.float32(0.05))
    with jax.enable_x64(True):
        double = gradient(X.astype(float), Z.astype(float), float(np.float32(0.05)))
    for a, b in zip(single, double, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.max(np.abs(b)))


# ---------------------------------------------------------------- derivatives

#: −k''(0) at unit lengthscale and variance.
CURVATURE = {"RBF": 1.0, "Matern52": 5 / 3, "Matern32": 3.0, "RationalQuadratic": 1.0}


@jax.jit
def derivatives(x, z, lengthscale):
    """Gradient in (x, z, ℓ) and the mixed second derivative in (x, z) of every stationary kernel at one pair."""

    def of(kernel):
        def k(x, z, lengthscale):
            return kernel(lengthscale, variance=2.0)(x[None], z[None])[0, 0]

        return jax.grad(k, argnums=(0, 1, 2))(x, z, lengthscale), jax.jacfwd(jax.grad(k), argnums=1)(x, z, lengthscale)

    return {name: of(kernel) for name, kernel in STATIONARY.items()}


def test_derivatives_at_zero_distance():
    x = np.array([0.3, -2.0, 7.0], np.float32)
    lengthscale = np.array([0.5, 1.0, 4.0], np.float32)
    for name, (first, mixed) in derivatives(x, x, lengthscale).items():
        for slope in first:
            np.testing.assert_array_equal(slope, 0.0, err_msg=name)
        if name in CURVATURE:
            expected = np.diag(2 * CURVATURE[name] / lengthscale**2)
            np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-5, err_msg=name)
        else:  # Matérn-1/2 has no derivative there; a finite number keeps optimizers alive
            assert np.all(np.isfinite(mixed))


def test_derivatives_elsewhere_by_finite_differences_of_the_formula(float64):
    rng = np.random.default_rng(0)
    x, z, lengthscale = rng.normal(size=3), rng.normal(size=3), rng.uniform(0.5, 2.0, size=3)

    def difference(f, at, h):
        return np.stack([(f(at + e) - f(at - e)) / (2 * h) for e in h * np.eye(3)], axis=-1)

    for name, (first, mixed) in derivatives(x, z, lengthscale).items():

        def k(x, z, lengthscale, name=name):
            return oracles.stationary(name, x[None], z[None], lengthscale, 2.0)[0, 0]

        slopes = [
            difference(lambda t: k(t, z, lengthscale), x, 1e-5),
            difference(lambda t: k(x, t, lengthscale), z, 1e-5),
            difference(lambda t: k(x, z, t), lengthscale, 1e-5),
        ]
        for ours, theirs in zip(first, slopes, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8, err_msg=name)

        def slope(x, z):
            return difference(lambda t: k(t, z, lengthscale), x, 1e-4)

        np.testing.assert_allclose(mixed, difference(lambda t: slope(x, t), z, 1e-4), atol=1e-6, err_msg=name)


#: ∂²k/∂x∂x' at x = x' with v = 0.8: by formula, x of shape (3,).
MIXED = {
    "RationalQuadratic α": lambda x: 1.3 / 0.7**2 * np.eye(3),
    "Periodic ARD": lambda x: np.diag((2 * np.pi / np.array([1.6, np.inf, 0.8]) / np.array([1.5, 1.0, 0.5])) ** 2),
    "Cosine": lambda x: 1.3 * (2 * np.pi / 0.8) ** 2 / np.outer(ARD, ARD),
    "Linear": lambda x: 0.8 * np.eye(3),
    "Polynomial": lambda x: (
        3 * 0.8 * (0.8 * x @ x + 0.5) ** 2 * np.eye(3) + 6 * 0.8**2 * (0.8 * x @ x + 0.5) * np.outer(x, x)
    ),
    "ArcCosine 1": lambda x: 1.3 * 0.7 * np.eye(3),
    "ArcCosine 2 ARD": lambda x: _mixed_of_rectified_quadratic(x, 0.8 * np.array([0.5, 0.0, 1.5]), 1.3, 0.3),
}


def _mixed_of_rectified_quadratic(x, weights, variance, bias):
    """4σ² E[(w·x)² w wᵀ] = 4σ² (‖x‖² I + 2 x xᵀ), for the weighted inputs."""
    root, weighted = np.sqrt(weights), np.sqrt(weights) * x
    return (
        4
        * variance
        * ((weighted @ weighted + bias) * np.diag(weights) + 2 * np.outer(root * weighted, root * weighted))
    )


#: The stationary kernels have tests of their own above.
PAIRED = {
    np.dtype(np.float64): (*MIXED, "ArcCosine 0", "product"),
    np.dtype(np.float32): ("Periodic ARD", "Cosine", "Polynomial", "ArcCosine 0", "ArcCosine 1", "ArcCosine 2 ARD"),
}


def pair_derivatives(x, z, v):
    """Of these cases at one pair: gradient in (x, z, v) and mixed second derivative in (x, z)."""
    result = {}
    for name in PAIRED[x.dtype]:

        def k(x, z, v, make=CASES[name][0]):
            return make(v)(x[None], z[None])[0, 0]

        def slopes(x, z, v, k=k):
            all_three = jax.jacrev(k, argnums=(0, 1, 2))(x, z, v)
            return all_three[0], all_three

        mixed, first = jax.jacfwd(slopes, argnums=1, has_aux=True)(x, z, v)
        result[name] = first, mixed
    return result


@functools.cache
def derivatives_at_pairs(dtype):
    """Pairs of equal inputs, of opposite ones, of any."""
    x, z = np.array([0.3, -1.0, 0.6]), np.array([-0.5, 0.4, 1.1])
    pairs = [(x, x), (0 * x, 0 * x), (0 * x, x), (x, -x), (30 * x, -30 * x), (x, z)]
    xs, zs = (np.stack(side).astype(dtype) for side in zip(*pairs, strict=True))
    with jax.enable_x64(dtype == np.float64):
        made = jax.jit(jax.vmap(pair_derivatives, (0, 0, None)))(xs, zs, dtype(0.8))
        return xs, zs, jax.tree.map(np.asarray, made)


@pytest.mark.parametrize("name, dtype", [(name, dtype.type) for dtype, names in PAIRED.items() for name in names])
def test_derivatives_at_any_pair(name, dtype):
    xs, zs, made = derivatives_at_pairs(dtype)
    (dx, dz, dv), mixed = made[name]
    for leaf in (dx, dz, dv, mixed):
        assert np.all(np.isfinite(leaf)) and leaf.dtype == dtype
    if name in MIXED:  # the first two are of equal inputs
        for x, computed in zip(xs[:2].astype(float), mixed[:2], strict=True):
            expected = MIXED[name](x)
            np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=1e-5 * (1 + np.max(np.abs(expected))))

    # Finite differences of the formula, where it has derivatives.
    def k(x, z, v):
        return CASES[name][1](x[None], z[None], v)[0, 0]

    pairs = [5] if name in CUSP else [0, 1, 2, 3, 4, 5] if name.startswith("ArcCosine") else [0, 1, 2, 3, 5]
    for i in pairs:
        x, z = xs[i].astype(float), zs[i].astype(float)
        h = 1e-5 * np.eye(3)
        scale = 1 + np.sqrt(k(x, x, 0.8) * k(z, z, 0.8)) + np.max(np.abs(dx[i]))
        tolerance = (2e-5 if dtype == np.float32 else 1e-7) * scale
        slopes_x = [(k(x + e, z, 0.8) - k(x - e, z, 0.8)) / 2e-5 for e in h]
        slopes_z = [(k(x, z + e, 0.8) - k(x, z - e, 0.8)) / 2e-5 for e in h]
        slope_v = (k(x, z, 0.8 + 1e-5) - k(x, z, 0.8 - 1e-5)) / 2e-5
        np.testing.assert_allclose(dx[i], slopes_x, atol=tolerance, err_msg=f"pair {i}")
        np.testing.assert_allclose(dz[i], slopes_z, atol=tolerance, err_msg=f"pair {i}")
        np.testing.assert_allclose(dv[i], slope_v, atol=tolerance, err_msg=f"pair {i}")
        if kernel_is_differentiable(name) and dtype == np.float64:
            H = 1e-4 * np.eye(3)
            second = [
                [
                    (k(x + a, z + b, 0.8) - k(x + a, z - b, 0.8) - k(x - a, z + b, 0.8) + k(x - a, z - b, 0.8)) / 4e-8
                    for b in H
                ]
                for a in H
            ]
            # Kernels with a third derivative that jumps at equal inputs have an error linear in the step.
            np.testing.assert_allclose(mixed[i], second, atol=2e-3 * (1 + np.max(np.abs(second))), err_msg=f"pair {i}")


def kernel_is_differentiable(name):
    return CASES[name][0](0.8).differentiable


def test_which_sample_paths_are_differentiable():
    rough = {name for name in CASES if not kernel_is_differentiable(name)}
    assert rough == {"Matern12", "White", "ArcCosine 0", "sum"}
    assert not (RBF() * Matern12()).differentiable
    assert not (2.0 * Matern12()).differentiable


def test_gradients_are_finite_with_repeated_rows():
    X, _ = some_inputs(0, np.float32)
    X[4] = 0.0

    @jax.jit
    def gradients(X, v):
        return {
            name: jax.grad(lambda X, v, make=CASES[name][0]: jnp.sum(make(v)(X)), argnums=(0, 1))(X, v)
            for name in (*CUSP, "ArcCosine 1", "product")
        }

    made = jax.tree.map(np.asarray, gradients(X, np.float32(0.8)))
    X = X.astype(float)
    for name, (dX, dv) in made.items():
        assert np.all(np.isfinite(dX)) and np.all(np.isfinite(dv)), name
        assert np.any(dX), name

        def total(v, name=name):
            return np.sum(CASES[name][1](X, X, v))

        slope = (total(0.8 + 1e-5) - total(0.8 - 1e-5)) / 2e-5
        np.testing.assert_allclose(dv, slope, rtol=5e-3 if name in CUSP else 2e-4, err_msg=name)


#: Kernels that take a hyperparameter for each column.
BY_COLUMN = {
    **STATIONARY,
    "Periodic": lambda h: Periodic(h, lengthscale=h),
    "Cosine": Cosine,
    "Linear": lambda h: Linear(variance=h),
    "Polynomial": lambda h: Polynomial(3, variance=h),
    "ArcCosine": lambda h: ArcCosine(1, variance=1.0, weight_variance=h),
}


@pytest.mark.parametrize("D", [16, 40])  # differences, products
@pytest.mark.parametrize("name", BY_COLUMN)
def test_no_array_of_rows_times_rows_times_columns(name, D):
    N, M = 40, 30

    def loss(X, Z, hyperparameter):
        return jnp.sum(jnp.square(BY_COLUMN[name](hyperparameter)(X, Z)))

    for f in (loss, jax.grad(loss, argnums=(0, 1, 2))):
        program = jax.make_jaxpr(f)(jnp.ones((N, D)), jnp.ones((M, D)), jnp.ones(D))
        made = [(variable.aval.size, str(e)) for e in equations(program.jaxpr) for variable in e.outvars]
        size, where = max(made)
        assert size <= 2 * max(N * M, 2 * N * D), where
        assert size >= N * M  # the matrix itself has been seen: inner programs are searched
        products = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
        assert products or D == 16
        for product in products:
            assert str(product.params["precision"]).count("HIGHEST") == 2, str(product)


# ---------------------------------------------------------------- kernels as values


def test_kernels_may_be_mapped_over(float64):
    X, Z = some_inputs(0, float64)
    lengthscales = np.array([0.3, 1.0, 2.0])
    kernel = jnp.full(3, 2.0) * RBF(jnp.asarray(lengthscales), variance=jnp.ones(3)) * jnp.full(3, 1.5)
    mapped = jax.jit(jax.vmap(lambda k: k(X, Z)))(kernel)
    for K, lengthscale in zip(mapped, lengthscales, strict=True):
        np.testing.assert_allclose(K, 3.0 * oracles.stationary("RBF", X, Z, lengthscale), rtol=1e-10)


def test_new_values_do_not_compile_again(float64):
    X, _ = some_inputs(0, float64)
    traces = []

    @jax.jit
    def f(kernel, X):
        traces.append(None)
        return kernel.diag(X)

    for value in (0.5, 1.0, 2.0):
        f(value * RBF(value, variance=value) + Linear(variance=value), X)
        f(jnp.asarray(value) * RBF(jnp.full(3, value), variance=value) + Linear(variance=value), X)
    assert len(traces) == 2  # one for each structure
    f(value * RBF(value, variance=value, active_dims=(0,)) + Linear(variance=value), X)
    assert len(traces) == 3  # another kernel


@pytest.mark.parametrize("name", CASES)
def test_kernels_survive_the_round_trip_through_leaves(name):
    kernel = CASES[name][0](0.5)
    leaves, structure = jax.tree.flatten(kernel)
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert type(rebuilt) is type(kernel) and len(leaves) >= 1
    assert jax.tree.structure(rebuilt) == structure
    # Rebuilding is not making: leaves may be anything, such as placeholders, gradients or batches.
    for replace in (lambda leaf: -1.0, lambda leaf: np.nan, lambda leaf: object(), lambda leaf: np.ones((5, 4))):
        jax.tree.map(replace, kernel)


def test_gradients_with_respect_to_a_kernel_are_kernels():
    # A gradient has the kernel's structure but not its constraints: it may well be negative.
    X = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    kernel = RBF(0.7, variance=1.3) + Linear(variance=0.5) * White(variance=0.1)
    gradient = jax.jit(jax.grad(lambda k: -jnp.sum(k(X))))(kernel)
    assert jax.tree.structure(gradient) == jax.tree.structure(kernel)
    assert gradient.kernels[0].variance < 0
    np.testing.assert_allclose(gradient.kernels[0].variance, -np.sum(oracles.stationary("RBF", X, X, 0.7)), rtol=1e-5)


def test_numbers_take_the_dtype_of_the_inputs():
    with jax.enable_x64(True):
        X = np.ones((2, 3), np.float32)
        scalars = [
            name for name in CASES if name not in ("ARD", "active", "Linear ARD", "Cosine") and "ARD" not in name
        ]
        assert len(scalars) > 12
        for name in scalars:
            kernel = CASES[name][0](0.5)
            for made in jax.eval_shape(lambda X, k=kernel: (k(X), k(X, X), k.diag(X)), X):
                assert made.dtype == np.float32, name


def test_numpy_inputs_in_double_precision_are_rounded_without_a_warning():
    X = np.ones((2, 3))
    for made in (RBF().diag(X), Constant()(X), Constant().diag(X), White()(X), White()(X, X), White().diag(X)):
        assert made.dtype == np.float32


def test_a_kernel_is_scaled_from_either_side():
    X = np.ones((1, 1), np.float32)
    for scale in (3.0, np.float32(3.0), np.array(3.0, np.float32), jnp.asarray(3.0)):
        for kernel in (scale * Constant(), Constant() * scale):
            assert isinstance(kernel, kernels.Scaled)
            np.testing.assert_array_equal(kernel.diag(X), [3.0])
    with pytest.raises(TypeError):
        RBF() + 1.0


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: RBF(lengthscale=0.0), "RBF lengthscale is 0.0"),
        (lambda: Matern12(lengthscale=np.array([1.0, -1.0])), "Matern12 lengthscale is"),
        (lambda: Matern32(variance=-1), "Matern32 variance is -1"),
        (lambda: Matern52(variance=jnp.asarray(np.nan)), "Matern52 variance is nan"),
        (lambda: Linear(variance=np.inf), "Linear variance is inf"),
        (lambda: Constant(variance=-0.1), "Constant variance is -0.1"),
        (lambda: White(variance=0.0), "White variance is 0.0"),
        (lambda: -1.0 * RBF(), "kernel scale is -1.0"),
        (lambda: RationalQuadratic(alpha=0.0), "RationalQuadratic alpha is 0.0"),
        (lambda: RationalQuadratic(lengthscale=-1.0), "RationalQuadratic lengthscale is -1.0"),
        (lambda: Periodic(period=0.0), "Periodic period is 0.0"),
        (lambda: Periodic(1.0, lengthscale=-2.0), "Periodic lengthscale is -2.0"),
        (lambda: Cosine(np.zeros(2)), "Cosine period is"),
        (lambda: Polynomial(2, variance=0.0), "Polynomial variance is 0.0"),
        (lambda: Polynomial(offset=-1.0), "Polynomial offset is -1.0"),
        (lambda: ArcCosine(1, variance=-1.0), "ArcCosine variance is -1.0"),
        (lambda: ArcCosine(1, variance=1.0, weight_variance=np.array([1.0, 0.0])), "ArcCosine weight_variance is"),
        (lambda: ArcCosine(bias_variance=0.0), "ArcCosine bias_variance is 0.0"),
    ],
)
def test_hyperparameters_that_make_no_covariance_are_refused(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert str(caught.value).endswith("it must be positive and finite.")


def test_orders_and_degrees_that_do_not_exist_are_refused():
    for wrong in (3, -1, 0.5, None):
        with pytest.raises(ValueError, match=f"ArcCosine order is {wrong}; it must be 0, 1 or 2"):
            ArcCosine(wrong)
    for wrong in (0, -1, 2.0, None):
        with pytest.raises(ValueError, match=f"Polynomial degree is {wrong}; it must be a whole number"):
            Polynomial(wrong)


@pytest.mark.parametrize("kernel", [RBF, Matern12, Matern32, Matern52, Linear, RationalQuadratic, Periodic, Cosine])
def test_inputs_that_do_not_fit_the_kernel_are_refused(kernel):
    X = np.ones((4, 3), np.float32)
    by_column = "variance" if kernel is Linear else "period" if kernel in (Periodic, Cosine) else "lengthscale"
    with pytest.raises(ValueError, match=rf"{kernel.__name__} \w+ has shape \(2,\) .* 3 input columns"):
        kernel(**{by_column: np.ones(2)})(X)
    with pytest.raises(ValueError, match=r"has shape \(3,\) .* 1 input columns"):
        kernel(**{by_column: np.ones(3)}, active_dims=(1,))(X)
    for wrong in ([0, 1], 0, ("a",), ()):
        with pytest.raises(TypeError, match="active_dims is .* tuple of column numbers"):
            kernel(active_dims=wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda v: Polynomial(2, variance=v),
        lambda v: ArcCosine(1, variance=1.0, weight_variance=v),
        lambda v: Periodic(1.0, lengthscale=v),
    ],
)
def test_other_hyperparameters_of_columns_are_checked(make):
    with pytest.raises(ValueError, match=r"\w+ \w+ has shape \(2,\) .* 3 input columns"):
        make(np.ones(2))(np.ones((4, 3), np.float32))


@pytest.mark.parametrize("kernel", [RBF, Matern32, Linear, RationalQuadratic, Periodic, Cosine, Polynomial, ArcCosine])
@pytest.mark.parametrize("columns", [(3, 1), (1, 3), (2, 3)])
def test_inputs_of_different_width_are_refused(kernel, columns):
    # A single column would broadcast against the other inputs' center.
    X, Z = (np.ones((4, n), np.float32) for n in columns)
    with pytest.raises(ValueError, match="columns"):
        kernel()(X, Z)


@pytest.mark.parametrize("kernel", [RBF, Linear])
def test_columns_that_do_not_exist_are_refused(kernel):
    # JAX would clamp the index and use another column instead.
    for wrong in ((3,), (0, 5), (-4,)):
        k = kernel(active_dims=wrong)
        for use in (k, k.diag) if kernel is Linear else (k,):
            with pytest.raises(ValueError, match="active_dims"):
                use(np.ones((4, 3), np.float32))


@pytest.mark.parametrize("columns", [1, 2])
def test_single_precision_where_an_input_is_the_mean(columns):
    """A compiled product of JAX 0.10 was off by 1e-3 there."""
    rng = np.random.default_rng(1)
    Z = np.linspace(1.0, 3.0, 5, dtype=np.float32)[:, None] * np.ones(columns, np.float32)
    X = rng.uniform(0.0, 4.0, (8, columns)).astype(np.float32)
    with jax.enable_x64(False):
        value = jax.jit(kernels.RBF(0.7, variance=1.3))(Z, X)
    distances = np.sum((Z.astype(float)[:, None] - X.astype(float)) ** 2, -1)
    np.testing.assert_allclose(value, 1.3 * np.exp(-0.5 * distances / 0.49), atol=1e-6)


@pytest.mark.parametrize(
    "name, x64",
    [("Matern12", True), ("Matern32", False)],
    indirect=["x64"],
)
def test_gradients_where_inputs_are_within_rounding_of_each_other(name, x64):
    """
    The variance that points on a line leave of rows, some of which are but for rounding at a point, is proportional to
    the prior variance: its gradient in log standard deviation is twice its value, whatever the lengthscale.
    """
    X = jnp.asarray(np.round(np.linspace(2.4, 57.6, 93), 1)[:, None], x64)
    Z = jnp.linspace(X.min(), X.max(), 25)[:, None]

    @jax.jit
    def left(log_sd, lengthscale):
        kernel = getattr(npgp.kernels, name)(lengthscale, variance=jnp.exp(2.0 * log_sd))
        return jnp.sum(factorize(kernel, [npgp.features.Points(Z)])(X).residual_variance())

    both = jax.jit(jax.value_and_grad(left))
    off = []
    for lengthscale in 5.0 + 5e-3 * np.linspace(-1.0, 1.0, 300):
        value, slope = both(jnp.asarray(3.5, x64), jnp.asarray(lengthscale, x64))
        off.append(abs(slope - 2.0 * value))
    # Each row's is a difference of numbers of the size of the prior variance, whose rounding K_uu's condition
    # multiplies by some tens: .4% of the value for Matern52 in float32, which processors round differently. (With
    # roots that are computed twice the slope was off by several times the value.)
    rounding = 64.0 * jnp.finfo(x64).eps * len(X) * np.exp(7.0)
    assert np.max(off) < rounding < 0.01 * value
