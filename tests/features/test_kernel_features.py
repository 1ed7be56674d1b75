"""Random features of kernels, whose inner products average to the kernel; and kernels of tinygp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from npgp.kernels import (
    RBF,
    ArcCosine,
    Constant,
    Cosine,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    RationalQuadratic,
    Stationary,
    Tinygp,
    White,
    as_kernel,
)

ARD = (0.7, 1.5, 3.0)  # no array: JAX would keep it in the dtype in which it is first seen
COUNT = 3000
KEY = functools.partial(jax.random.key, impl="rbg")  # compiles much faster than the default
X = np.random.default_rng(0).normal(size=(5, 3))
X[1], X[2] = X[0], 0.0

#: From a hyperparameter that may be traced to a kernel.
CASES = {
    "RBF": lambda v: RBF(v * jnp.asarray(ARD), variance=1.3),
    "RationalQuadratic": lambda v: RationalQuadratic(1.2, variance=0.8, alpha=v),
    "Matern12": lambda v: Matern12(1.5, variance=v),
    "Matern32": lambda v: Matern32(v),
    "Matern52": lambda v: Matern52(v),
    "Periodic": lambda v: Periodic(jnp.asarray(ARD[:2]), lengthscale=v, variance=1.3, active_dims=(0, 2)),
    "Periodic in the period": lambda v: Periodic(3.0 * v, lengthscale=1.0),
    "Cosine": lambda v: Cosine(v * jnp.asarray(ARD), variance=1.3),
    "Linear": lambda v: Linear(variance=v * jnp.asarray(ARD)),
    "Constant": lambda v: Constant(variance=v),
    "Polynomial": lambda v: Polynomial(3, variance=v * jnp.asarray(ARD[:2]), offset=0.5, active_dims=(0, 2)),
    "Polynomial of many": lambda v: Polynomial(2, variance=v * jnp.ones(90), offset=0.7, active_dims=(0, 1, 2) * 30),
    "ArcCosine 0": lambda v: ArcCosine(0, variance=v),
    "ArcCosine 1": lambda v: ArcCosine(1, variance=1.3, weight_variance=v * jnp.asarray(ARD), bias_variance=0.5),
    "ArcCosine 2": lambda v: ArcCosine(2, variance=1.3, weight_variance=0.7, bias_variance=v),
    "sum": lambda v: RBF(v) + v * Linear() + Constant(variance=0.1),
    "scaled": lambda v: v * RBF(),
    "product of equals": lambda v: RBF(v) * RBF(v),
    "spectral mixture": lambda v: Cosine(2.0) * RBF(v) + 0.5 * (Cosine(3.0 * v) * RBF(2.0)),
    "product of many": lambda v: (
        RBF(2.0 * v) * (Linear(variance=0.5) + Constant(variance=0.3)) * Polynomial(1, variance=0.2)
    ),
}
#: Those that have finitely many features, and how many.
EXACT = {"Linear": 3, "Constant": 1, "Cosine": 2, "Polynomial": 10}


#: The others' features are the average of their draws.
OWN_FEATURES = (*EXACT, "sum", "scaled")


@jax.jit
def estimates(rng_key, X, v):
    """Kernel matrix, each draw's inner products and the features', with summaries; and their derivatives in v."""

    def at(v):
        result = {}
        for name, make in CASES.items():
            kernel = make(v)
            draws = kernel.feature_draws(rng_key, X.shape[1], COUNT)(X)
            result[name] = kernel(X), jnp.einsum("ncp,mcp->nmc", draws, draws)
            if name in OWN_FEATURES:
                features = kernel.random_features(rng_key, X.shape[1], COUNT)(X)
                result[name] += (features @ features.T,)
        return result

    def summary(exact, each, *features):
        return exact, jnp.std(each, -1) / jnp.sqrt(COUNT), jnp.mean(each, -1), *features

    return tuple({name: summary(*made[name]) for name in CASES} for made in jax.jvp(at, (v,), (jnp.ones_like(v),)))


@functools.cache
def estimated():
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, estimates(KEY(1), X, 0.9))


@pytest.mark.parametrize("name", CASES)
def test_inner_products_of_features_average_to_the_kernel(name):
    exact, error, *all_estimates = estimated()[0][name]
    # The standard error of the mean over draws is small enough for the test to mean something.
    assert np.max(error) < 0.15 * np.max(exact)
    for estimate in all_estimates:
        assert np.all(np.abs(estimate - exact) <= 5 * error + 1e-10)
    if name in EXACT:
        np.testing.assert_allclose(all_estimates[-1], exact, rtol=0, atol=1e-12 * np.max(exact))


@pytest.mark.parametrize("kernel", [RBF(), RationalQuadratic(alpha=0.4), Matern12(), Matern32(), Matern52()], ids=repr)
def test_stationary_kernels_are_mixtures_of_rbf_kernels(kernel, float64):
    r2 = np.array([1e-2, 0.3, 1.0, 4.0, 20.0])
    draws = np.exp(-0.5 * np.broadcast_to(kernel.spectral_scale(KEY(4), 40_000), 40_000)[:, None] ** 2 * r2)
    error = np.std(draws, 0) / 200
    assert np.max(error) < 2.5e-3
    assert np.all(np.abs(np.mean(draws, 0) - kernel.correlation(r2)) <= 5 * error + 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_so_do_their_derivatives_in_hyperparameters(name):
    exact, error, *all_estimates = estimated()[1][name]
    assert 0 < np.max(np.abs(exact)) and np.max(error) < 0.25 * np.max(np.abs(exact))
    for estimate in all_estimates:
        assert np.all(np.abs(estimate - exact) <= 5 * error + 1e-10)


#: One of each feature map.
MAPPED = ("Periodic", "Polynomial of many", "ArcCosine 1", "sum", "spectral mixture")


@functools.cache
def maps():
    """All kernels' feature maps as values: made in a compiled function and used in another, at four places."""

    @jax.jit
    def make_all(rng_key, v):
        return {name: CASES[name](v).random_features(rng_key, 3, 12) for name in MAPPED}

    @jax.jit
    def use_all(made, X, direction):
        def features(X):
            return {name: phi(X) for name, phi in made.items()}

        value, slope = jax.jvp(features, (X,), (direction,))
        both = features(jnp.concatenate([X + 1e-6 * direction, X - 1e-6 * direction]))
        return value, slope, {name: (f[: len(X)] - f[len(X) :]) / 2e-6 for name, f in both.items()}

    with jax.enable_x64(True):
        made = make_all(KEY(0), 0.9)
        direction = np.random.default_rng(1).normal(size=X.shape)
        return made, jax.tree.map(np.asarray, use_all(made, X, direction))


def test_feature_maps_are_values_that_compiled_functions_return(float64):
    made, (value, _, _) = maps()
    for name, width in {"ArcCosine 1": 24, "sum": 24 + 3 + 1, "spectral mixture": 96}.items():
        assert value[name].shape == (5, width), name
        np.testing.assert_allclose(made[name](X), value[name], rtol=1e-10, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(made[name](X[:2]), value[name][:2], rtol=1e-10, atol=1e-12)  # row by row


def test_features_are_differentiable_in_the_inputs():
    _, (_, slope, difference) = maps()
    for name in MAPPED:
        atol = 1e-6 * (1 + np.max(np.abs(slope[name])))
        np.testing.assert_allclose(slope[name], difference[name], atol=atol, err_msg=name)
        assert np.any(slope[name]), name


def test_features_are_the_average_of_the_draws(float64):
    kernel = Periodic() * Linear()
    features, draws = (f(KEY(0), 3, 4)(X) for f in (kernel.random_features, kernel.feature_draws))
    assert features.shape == (5, 8) and draws.shape == (5, 4, 2)
    np.testing.assert_allclose(features @ features.T, np.einsum("ncp,mcp->nm", draws, draws) / 4, rtol=1e-12)


def test_features_in_single_precision():
    single = X.astype(np.float32)
    arccos = ArcCosine(1, variance=1.3, weight_variance=0.7)
    kernel = 0.8 * RBF(0.7) * Cosine(2.0) + Polynomial(3, variance=np.array(ARD)) + arccos
    made = kernel.random_features(KEY(0), 3, 50)
    computed = jax.jit(lambda phi, X: phi(X))(made, single)
    assert computed.dtype == np.float32
    with jax.enable_x64(True):
        expected = made(single.astype(float))
    np.testing.assert_allclose(computed, expected, atol=1e-5 * np.max(np.abs(expected)))


def test_features_take_the_dtype_of_the_inputs(float64):
    single = X.astype(np.float32)
    for name in ("RationalQuadratic", "Matern32", "Periodic in the period", "Constant", "ArcCosine 0", "ArcCosine 2"):
        kernel = CASES[name](0.9)
        for make in (kernel.random_features, kernel.feature_draws):
            made = jax.eval_shape(lambda X, make=make: make(KEY(0), 3, 4)(X), single)
            assert made.dtype == np.float32, name


def test_prior_paths_of_batches_of_kernels(float64):
    # Kernel hyperparameters and keys may be mapped over; a variance only scales the path.
    kernels = RBF(jnp.ones(2), variance=jnp.asarray([1.0, 4.0]))
    keys = jnp.stack([jax.random.key(3)] * 2)
    w = np.random.default_rng(2).normal(size=20)
    paths = jax.jit(jax.vmap(lambda k, key: k.random_features(key, 3, 10)(X) @ w))(kernels, keys)
    np.testing.assert_allclose(paths[1], 2.0 * paths[0], rtol=1e-12)
    assert np.ptp(paths[0]) > 0.1


# ---------------------------------------------------------------- kernels without, kernels of one's own


def test_kernels_without_features_say_so():
    key = KEY(0)
    for kernel in (White(), RBF() + White(), RBF() * White(), 2.0 * White()):
        with pytest.raises(NotImplementedError, match="White has no random features: .* no continuous paths"):
            kernel.random_features(key, 2, 10)

    class Own(Kernel):
        pass

    class OwnStationary(Stationary):
        pass

    with pytest.raises(NotImplementedError, match="Own has no random features; .* defines feature_draws"):
        (Own() + RBF()).random_features(key, 2, 10)
    with pytest.raises(NotImplementedError, match="OwnStationary has no random features; .* defines spectral_scale"):
        OwnStationary().random_features(key, 2, 10)


def test_a_kernel_of_ones_own_takes_part_through_its_draws(float64):
    class FirstColumn(Kernel):
        def __call__(self, X, X2=None):
            return X[:, :1] @ (X if X2 is None else X2)[:, :1].T

        def feature_draws(self, rng_key, columns, count):
            return lambda X: jnp.repeat(X[:, None, :1], count, axis=1)

    kernel = FirstColumn() * Cosine(2.0) + FirstColumn()
    features = kernel.random_features(KEY(0), 3, 7)(X)
    np.testing.assert_allclose(features @ features.T, kernel(X), atol=1e-12)


def test_wrong_counts_and_columns_are_refused():
    key, inputs = KEY(0), X.astype(np.float32)
    for kernel in (RBF(), ArcCosine(), RBF() * Periodic()):
        with pytest.raises(ValueError, match="count is 0; it must be at least 1"):
            kernel.random_features(key, 3, 0)
        with pytest.raises(ValueError, match="columns must be the number of columns of X"):
            kernel.random_features(key, 2, 4)(inputs)
    with pytest.raises(ValueError, match="active_dims"):
        RBF(active_dims=(3,)).random_features(key, 3, 4)(inputs)


# ---------------------------------------------------------------- tinygp


class FakeTinygp:
    """What tinygp's kernels do: a matrix of two arguments, the diagonal of one."""

    def __call__(self, X, X2=None):
        return jnp.sum(X * X, -1) if X2 is None else X @ X2.T


FakeTinygp.__module__ = "tinygp.fake"


def test_kernels_are_known_by_the_library_they_come_from(float64):
    class Derived(FakeTinygp):
        pass

    for foreign in (FakeTinygp(), Derived()):
        kernel = as_kernel(foreign)
        assert isinstance(kernel, Tinygp)
        np.testing.assert_allclose(kernel(X), X @ X.T)
        np.testing.assert_allclose(kernel(X, X[:2]), X @ X[:2].T)
        np.testing.assert_allclose(kernel.diag(X), np.sum(X**2, 1))
        np.testing.assert_allclose((2.0 * kernel + Constant())(X), 2.0 * X @ X.T + 1.0)
        assert not kernel.differentiable
        with pytest.raises(NotImplementedError, match="Tinygp has no random features"):
            kernel.random_features(KEY(0), 3, 4)
    own = RBF() + White()
    assert as_kernel(own) is own


def test_what_is_no_kernel_is_refused():
    class NotCallable:
        pass

    NotCallable.__module__ = "tinygp.fake"
    for wrong in (1.0, None, "RBF", RBF, FakeTinygp, NotCallable(), lambda X, X2: X @ X2.T, np.eye(2)):
        with pytest.raises(TypeError, match=r"(?s)^prior is .*; it must be a kernel of npgp.kernels, such as RBF\(\)"):
            as_kernel(wrong, name="prior")


def test_tinygp_itself(float64):
    tinygp = pytest.importorskip("tinygp")
    theirs = 1.3 * tinygp.transforms.Linear(1 / 0.7, tinygp.kernels.ExpSquared()) + tinygp.kernels.Constant(0.2)
    ours = 1.3 * RBF(0.7) + Constant(variance=0.2)
    kernel = as_kernel(theirs)
    made = jax.jit(lambda k: (k(X), k(X, X[:2]), k.diag(X)))(kernel)
    for a, b in zip(made, (ours(X), ours(X, X[:2]), ours.diag(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    gradient = jax.jit(jax.grad(lambda k: jnp.sum(k(X))))(kernel)
    assert jax.tree.structure(gradient) == jax.tree.structure(kernel)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
