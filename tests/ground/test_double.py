"""Functions computed in float64 inside float32 programs, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from npgp import linalg
from npgp.programs.double import in_double

X = np.linspace(0.0, 2.0, 10, dtype=np.float32)
#: Of so smooth a kernel that float32 has no factor of its Gram matrix.
VARIANCE, LENGTHSCALE, NUGGET = np.float32(1e3), np.float32(0.9), 1e-8


def log_determinant(x, lengthscale):
    K = VARIANCE * jnp.exp(-0.5 * jnp.square((x[:, None] - x[None]) / lengthscale)) + NUGGET * jnp.eye(len(x))
    return linalg.log_determinant(linalg.plain_cholesky(K))


def here(x, lengthscale):
    return in_double(log_determinant, x, lengthscale)


def dense(x, lengthscale):
    """Value and gradient by formulas."""
    x, lengthscale = np.asarray(x, float), float(lengthscale)
    square = np.square((x[:, None] - x[None]) / lengthscale)
    k = float(VARIANCE) * np.exp(-0.5 * square)
    K = k + NUGGET * np.eye(len(x))
    by_lengthscale = np.trace(np.linalg.solve(K, k * square / lengthscale))
    by_x = 2.0 * np.sum(np.linalg.inv(K) * k * (x[None] - x[:, None]) / lengthscale**2, axis=1)
    return np.linalg.slogdet(K)[1], by_x, by_lengthscale


@pytest.fixture(autouse=True)
def float32():
    with jax.enable_x64(False):
        yield


def test_what_float32_has_no_digits_for():
    assert not np.isfinite(log_determinant(X, LENGTHSCALE))
    value, by_x, by_lengthscale = dense(X, LENGTHSCALE)
    for compiled in (lambda f: f, jax.jit):
        found = compiled(here)(X, LENGTHSCALE)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, value, rtol=1e-6)
        found = compiled(jax.grad(here, (0, 1)))(X, LENGTHSCALE)
        np.testing.assert_allclose(found[0], by_x, rtol=1e-4, atol=1e-4 * np.abs(by_x).max())
        np.testing.assert_allclose(found[1], by_lengthscale, rtol=1e-5)
        tangent = compiled(lambda l: jax.jvp(lambda l: here(X, l), (l,), (jnp.float32(2.0),))[1])(LENGTHSCALE)
        np.testing.assert_allclose(tangent, 2.0 * by_lengthscale, rtol=1e-5)


def test_second_derivatives():
    step = 1e-4
    slopes = [dense(X, LENGTHSCALE + s)[2] for s in (step, -step)]
    second = jax.jit(jax.hessian(here, 1))(X, LENGTHSCALE)
    steps = float(LENGTHSCALE + step) - float(LENGTHSCALE - step)
    np.testing.assert_allclose(second, (slopes[0] - slopes[1]) / steps, rtol=1e-3)


def test_mapped_scanned_and_checkpointed():
    lengthscales = np.array([0.8, 0.9], np.float32)
    values = [dense(X, l)[0] for l in lengthscales]
    by_x = sum(dense(X, l)[1] for l in lengthscales)
    together = jax.vmap(here, (None, 0))
    np.testing.assert_allclose(jax.jit(together)(X, lengthscales), values, rtol=1e-6)

    def scanned(x):
        return lax.scan(lambda total, l: (total + jax.checkpoint(here)(x, l), None), 0.0, lengthscales)[0]

    for total in (lambda x: jnp.sum(together(x, lengthscales)), scanned):
        gradient = jax.jit(jax.grad(total))(X)
        np.testing.assert_allclose(gradient, by_x, rtol=1e-4, atol=1e-4 * np.abs(by_x).max())
    both = jax.vmap(jax.grad(lambda x: jnp.sum(together(x, lengthscales))))(jnp.stack([X, 1.01 * X]))
    np.testing.assert_allclose(both[0], by_x, rtol=1e-4, atol=1e-4 * np.abs(by_x).max())


def test_whole_numbers_trees_and_float64():
    def of_tree(tree):
        return {"sum": tree["x"] + tree["count"]}

    tree = {"x": jnp.float32(1.0), "count": jnp.int32(3)}
    assert in_double(of_tree, tree)["sum"] == 4.0
    assert jax.grad(lambda x: in_double(of_tree, {**tree, "x": x})["sum"])(1.0) == 1.0
    with jax.enable_x64(True):
        assert in_double(of_tree, {"x": jnp.asarray(1.0), "count": 3})["sum"].dtype == jnp.float64
