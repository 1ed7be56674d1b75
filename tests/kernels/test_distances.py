"""Distances of rows and what kernels make of them, in programs compiled as users compile them (see scripts/test)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hyperdual import STATIONARY

from npgp import kernels
from npgp.collapsed import exact_log_evidence
from npgp.kernels.stationary import MANY_COLUMNS, squared_distances


def inputs(dtype, columns, offset):
    """Rows of which some are at points, or 1e-16 to 1e-3 from them, as far as ``dtype`` tells these apart."""
    rng = np.random.default_rng(columns)
    Z = offset + rng.normal(size=(6, columns))
    if not offset:
        Z[0] = 0.0  # where rows can be 1e-16 apart
    steps = np.array([0.0, *10.0 ** np.arange(-16, -2)])
    near = Z[np.arange(len(steps)) % 2] + steps[:, None] * rng.choice([-1.0, 1.0], (len(steps), columns))
    return np.vstack([near, offset + rng.normal(size=(5, columns))]).astype(dtype), Z.astype(dtype)


@functools.cache
def program(columns):
    """Of every kernel: the matrix, the gradient of a weighted sum of it, and how that moves along a direction."""

    def one(name, weights, primals, tangents):
        def loss(X, Z, lengthscale, variance):
            K = getattr(kernels, name)(lengthscale, variance=variance)(X, Z)
            return jnp.sum(weights * K), K

        gradient = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
        first, second, K = jax.jvp(gradient, primals, tangents, has_aux=True)
        return K, first, second

    names = STATIONARY if columns in (1, 3) else ("RBF", "Matern12", "Matern32")
    return lambda *a: {name: one(name, *a) for name in names}


def check(made, name, weights, primals, tangents, eps, products):
    """Every number against 80 bits, with an allowance in multiples of eps times the sizes of the terms summed."""
    C, X, Z, ell, v, dX, dZ, dell, dv = (np.asarray(a, np.longdouble) for a in (weights, *primals, *tangents))
    delta = (X[:, None] - Z) / ell  # (N, M, D)
    moved = (dX[:, None] - dZ) / ell - delta * dell / ell
    q = np.sum(delta**2, -1)
    f, f1, f2 = STATIONARY[name](q)
    equal = q <= np.longdouble(eps) ** 2  # with a kink, these count as equal: see Matern12
    if name == "Matern12":
        f1, f2 = np.where(equal, 0, f1), np.where(equal, 0, f2)
    dq = np.sum(2 * delta * moved, -1)
    # How far products of the scaled, centered rows may be off, where they are used instead of differences.
    R = np.max(np.abs(np.concatenate([X, Z]) - X.mean(0)) / ell) * np.sqrt(X.shape[1])
    off = R if products else 0

    K, first, second = made
    np.testing.assert_array_less(np.abs(K - v * f), 20 * eps * v, err_msg=name)

    def near(computed, terms, slack, axis, what):
        tolerance = 60 * eps * np.sum(slack, axis)
        error = np.abs(computed - np.sum(terms, axis))
        assert np.all(error <= tolerance + 1e-35), (name, what, float(np.max(error - tolerance)))

    def both(part, part_moved, sign, axis, what, i):
        """Of a gradient with slope 2·part of q: first derivative, and its change along the direction."""
        g, size = C[..., None] * v * f1[..., None], np.abs(part) + off / ell
        near(first[i], sign * 2 * g * part, 2 * np.abs(g) * size, axis, what)
        bend = C[..., None] * v * (f2 * dq)[..., None]
        held = C[..., None] * v * f1[..., None]
        change = 2 * (bend + C[..., None] * dv * f1[..., None]) * part + 2 * held * part_moved
        sizes = np.sum(np.abs(2 * delta * moved), -1) + off * np.max(np.abs(moved))
        slack = 2 * np.abs(C[..., None] * v * (np.abs(f2) * sizes)[..., None]) * size
        slack = slack + 2 * np.abs(held) * (np.abs(part_moved) + off / ell) + 2 * np.abs(C * dv * f1)[..., None] * size
        near(second[i], sign * change, slack, axis, what + ", second")

    part, part_moved = delta / ell, moved / ell - delta * dell / ell**2
    both(part, part_moved, 1, 1, "X", 0)
    both(part, part_moved, -1, 0, "Z", 1)
    off = R**2 if products else 0
    part, part_moved = delta**2 / ell, 2 * delta * moved / ell - delta**2 * dell / ell**2
    both(part, part_moved, -1, (0, 1), "lengthscale", 2)
    near(first[3], C * f, np.abs(C), (0, 1), "variance")


#: Each number of columns in single precision, of which rounding hides most; in double precision the ends.
@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize(
    "columns, x64",
    [
        pytest.param(columns, double, id=f"float{64 if double else 32}-{columns}")
        for columns, double in [*((c, False) for c in (1, 3, 10)), (1, True), (10, True)]
    ],
    indirect=["x64"],
)
def test_values_and_derivatives_of_close_rows(columns, offset, x64):
    rng = np.random.default_rng(0)
    X, Z = inputs(x64, columns, offset)
    weights = rng.normal(size=(len(X), len(Z))).astype(x64)
    primals = X, Z, rng.uniform(0.5, 2.0, columns).astype(x64), np.asarray(1.3, x64)
    tangents = tuple(rng.normal(size=np.shape(a)).astype(x64) for a in primals)
    made = jax.tree.map(np.asarray, jax.jit(program(columns))(weights, primals, tangents))
    for name, computed in made.items():
        products = columns > 2 and name != "Matern12"
        check(computed, name, weights, primals, tangents, float(jnp.finfo(x64).eps), products)


def test_eagerly_as_compiled():
    rng, x64 = np.random.default_rng(0), np.float32
    X, Z = inputs(x64, 1, 0.0)
    weights = rng.normal(size=(len(X), len(Z))).astype(x64)
    primals = X, Z, np.asarray([0.7], x64), np.asarray(1.3, x64)
    tangents = tuple(rng.normal(size=np.shape(a)).astype(x64) for a in primals)
    made = jax.tree.map(np.asarray, program(1)(weights, primals, tangents))
    for name, computed in made.items():
        check(computed, name, weights, primals, tangents, float(jnp.finfo(x64).eps), False)


@pytest.mark.parametrize("columns, x64", [(MANY_COLUMNS + 8, True), (100, False)], indirect=["x64"])
def test_products_of_many_columns_are_off_by_no_more_than_is_proved(columns, x64):
    # docs/theory.md, section 8. And the bounds are of use: what is found is within a few hundred of them.
    rng, u = np.random.default_rng(columns), np.longdouble(jnp.finfo(x64).eps) / 2
    Z = 30.0 + rng.normal(size=(7, columns))
    steps = np.array([0.0, *10.0 ** np.arange(-16, -2)])
    X = np.vstack([Z[np.arange(15) % 7] + steps[:, None] * rng.normal(size=(15, columns)), Z[:5] + 0.5])
    primals = (X.astype(x64), Z.astype(x64), rng.uniform(0.5, 2.0, columns).astype(x64))
    tangents = tuple(rng.normal(size=np.shape(a)).astype(x64) for a in primals)
    weights = rng.normal(size=(len(X), len(Z))).astype(x64)

    @jax.jit
    def computed(primals, tangents):
        r2, moved = jax.jvp(squared_distances, primals, tangents)
        return r2, moved, jax.grad(lambda *a: jnp.sum(weights * squared_distances(*a)), (0, 1))(*primals)

    r2, moved, gradients = jax.tree.map(lambda a: np.asarray(a, np.longdouble), computed(primals, tangents))
    X, Z, ell, dX, dZ, dell = (np.asarray(a, np.longdouble) for a in (*primals, *tangents))
    G, c = weights.astype(np.longdouble), X.mean(0)
    A, B = (X - c) / ell, (Z - c) / ell
    dA, dB = dX / ell - A * dell / ell, dZ / ell - B * dell / ell
    delta = A[:, None] - B

    def size(*rows):
        return max(np.max(np.linalg.norm(a.astype(float), axis=1)) for a in rows)

    R, T = size(A, B), size(dA, dB)
    in_rows = 2 * np.einsum("nm,nmd->nd", G, delta), -2 * np.einsum("nm,nmd->md", G, delta)
    errors = [
        np.max(np.abs(r2 - np.sum(delta**2, -1))) / (4 * (columns + 8) * u * R**2),
        np.max(np.abs(moved - 2 * np.sum(delta * (dA[:, None] - dB), -1))) / (8 * (columns + 9) * u * R * T),
    ]
    for axis, (found, expected) in enumerate(zip(gradients, in_rows, strict=True)):
        allowed = 4 * (G.shape[1 - axis] + 8) * u * R * np.sum(np.abs(G), 1 - axis)
        errors.append(np.max(np.linalg.norm((found * ell - expected).astype(float), axis=1) / allowed))
    assert 2e-3 < min(errors) and max(errors) < 1, errors


def test_directions_that_products_lose_are_left_out_of_kinks(x64):
    # Beyond ten columns: rows that are apart but so close that rounding is more than their difference have no slope,
    # and others a slope that is right to a quarter of its size.
    eps = float(jnp.finfo(x64).eps)
    rng = np.random.default_rng(0)
    Z = rng.normal(size=(6, 20)).astype(x64)
    steps = 10.0 ** np.arange(-15.0, 0.0)
    X = (Z[np.arange(15) % 6] + steps[:, None] * rng.normal(size=(15, 20))).astype(x64)
    kernel = kernels.Matern12(3.0)
    slopes = jax.jit(jax.vmap(jax.jacobian(lambda x, z: kernel(jnp.stack([x, X[0]]), z[None])[0, 0]), (0, 0)))
    found = np.asarray(slopes(X, Z[np.arange(15) % 6]), np.longdouble)
    delta = (X.astype(np.longdouble) - Z[np.arange(15) % 6]) / 3
    r = np.sqrt(np.sum(delta**2, -1))
    expected = -np.exp(-r)[:, None] * delta / np.where(r > 0, r, 1)[:, None] / 3
    error = np.linalg.norm((found - expected).astype(float), axis=1)
    lost = ~np.any(found, axis=1)
    assert np.all(r[lost] < 16 * eps * np.sqrt(20.0) * 4) and np.any(lost & (r > 0)) and not np.all(lost)
    assert np.all(error[~lost] < 0.25 / 3)


KINKS = {
    "Matern12": lambda: kernels.Matern12(0.3),
    "ArcCosine 0": lambda: kernels.ArcCosine(0),
    "ZonalMatern12": lambda: kernels.ZonalMatern12(0.3, degree=0),
    "ZonalArcCosine 0": lambda: kernels.ZonalArcCosine(0, degree=0),
}


@pytest.mark.parametrize("columns, x64", [(1, False), (3, True), (MANY_COLUMNS + 8, False)], indirect=["x64"])
def test_equal_rows_are_perfectly_correlated_though_there_is_a_kink(columns, x64):
    X = np.random.default_rng(0).normal(size=(12, columns)).astype(x64)
    X[6:] = X[:6]

    @jax.jit
    def correlations(X):
        return {name: (make()(X), make()(X, X[:6])) for name, make in KINKS.items()}

    for name, (square, cross) in correlations(X).items():
        for pairs in (np.diag(square), np.diag(square, 6), np.diag(cross), np.diag(cross[6:])):
            np.testing.assert_allclose(pairs, 1.0, rtol=0, atol=20 * float(jnp.finfo(x64).eps), err_msg=name)


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_equal_rows_are_at_zero_where_they_are_computed_in_the_same_program(columns, x64):
    X = (1e3 + np.random.default_rng(0).normal(size=(30, columns))).astype(x64)
    made = jax.jit(lambda X, s: (squared_distances(X * s), squared_distances(X * s, (X * s)[:7])))(X, x64(0.37))
    for r2 in made:
        np.testing.assert_array_equal(np.diag(r2), 0.0)


def test_infinite_rows_are_not_passed_over():
    X = np.array([[0.0], [np.inf], [1.0]], np.float32)
    K = np.asarray(jax.jit(kernels.RBF())(X))
    assert np.all(np.isnan(K[1])) and np.all(np.isfinite(K[::2, ::2]))


def test_evidence_with_equal_rows_is_that_of_differences(float64):
    # Expanded squares leave 4.8e-7 in the correlation of equal rows, seven times the relative noise here.
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(15, 3))
    X[8:13] = X[:5]
    lengthscale, variance, noise = np.array([0.6, 0.026, 0.07]), 39.3, 7e-6
    distance = np.sqrt(np.sum(((X[:, None] - X) / lengthscale) ** 2, -1))
    C = variance * np.exp(-distance) + noise * np.eye(15)
    y = np.linalg.cholesky(C) @ rng.normal(size=15)
    values, vectors = np.linalg.eigh(C)
    expected = -0.5 * (np.sum((vectors.T @ y) ** 2 / values) + np.sum(np.log(values)) + 15 * np.log(2 * np.pi))
    kernel = kernels.Matern12(lengthscale, variance=variance)
    np.testing.assert_allclose(exact_log_evidence(kernel, X, y, noise_variance=noise), expected, atol=1e-4)


@pytest.mark.parametrize(
    "columns, ard, smooth, some",  # pairs of each, and in turn all choices of arguments for either kind of lengthscale
    [
        (1, True, False, [(0,), (0, 1, 2)]),
        (5, True, True, [(2,), (0, 1)]),
        (5, False, False, [(1,), (1, 2)]),
        (MANY_COLUMNS + 1, False, True, [(2,), (0, 2)]),
    ],
)
def test_derivatives_in_some_arguments_are_those_of_plain_autodiff(columns, ard, smooth, some, float64):
    # What is not differentiated is left out of the computation, and one lengthscale has a derivative of its own.
    rng = np.random.default_rng(0)
    primals = rng.normal(size=(4, columns)), rng.normal(size=(3, columns)), rng.uniform(1, 2, columns if ard else ())
    tangents = tuple(rng.normal(size=np.shape(a)) for a in primals)
    weights = rng.normal(size=(4, 3))

    def plain(X, Z, lengthscale):
        return jnp.sum(jnp.square((X[:, None] - Z) / lengthscale), axis=-1)

    def derivatives(of, chosen):
        def loss(*given):
            every = [given[chosen.index(i)] if i in chosen else primals[i] for i in range(3)]
            return jnp.sum(weights * jnp.sqrt(of(*every)))

        where = tuple(range(len(chosen)))
        return jax.jvp(jax.grad(loss, where), [primals[i] for i in chosen], [tangents[i] for i in chosen])

    @jax.jit
    def both():
        own = functools.partial(squared_distances, smooth=smooth)
        return [[derivatives(of, chosen) for chosen in some] for of in (own, plain)]

    ours, expected = both()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), ours, expected)


@pytest.mark.parametrize("columns", [5, MANY_COLUMNS + 1])
def test_the_derivative_in_one_lengthscale_takes_no_more_products(columns):
    X = np.zeros((4, columns), np.float32)
    value = str(jax.make_jaxpr(lambda s: squared_distances(X, X, s))(1.0))
    slope = str(jax.make_jaxpr(lambda s: jax.jvp(lambda s: squared_distances(X, X, s), (s,), (1.0,)))(1.0))
    assert slope.count("dot_general") == value.count("dot_general")
    assert slope.count("scan[") == value.count("scan[")
