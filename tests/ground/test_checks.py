"""Checks of arguments, optional imports, and generators made of keys."""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from npgp import checks
from npgp.checks import host_generator, optional
from npgp.collapsed import CollapsedGP, exact_log_evidence, upper_bound
from npgp.kernels import RBF, Coregion, Linear, Polynomial


def test_whole_numbers():
    assert checks.whole_number(np.int32(3), "size") == 3 and type(checks.whole_number(np.int64(3), "size")) is int
    assert checks.whole_number(-2, "column", least=None) == -2 and checks.whole_number(0, "n", least=0, most=0) == 0
    for wrong in (True, np.bool_(True), 2.0, "2", None):
        with pytest.raises(TypeError, match="size is .*; it must be a whole number"):
            checks.whole_number(wrong, "size")
    for wrong, bounds, words in (
        (0, {}, "size is 0; it must be at least 1"),
        (1, dict(least=2), "size is 1; it must be at least 2"),
        (5, dict(most=4), "size is 5; it must be at most 4"),
        (5, dict(most=4, must_be="at most 4, the number of rows"), "it must be at most 4, the number of rows"),
    ):
        with pytest.raises(ValueError, match=words):
            checks.whole_number(wrong, "size", **bounds)


def test_choices():
    checks.one_of("rows", "scale", ("network", "rows"))
    for wrong in (True, 2, "1"):
        with pytest.raises(ValueError, match="order is .*; it must be 0 or 1"):
            checks.one_of(wrong, "order", (0, 1))


MASKED = np.ma.masked_equal([[1.0], [-999.0]], -999.0)


def test_arrays_of_real_numbers():
    for given in ([[1, 2.0]], ((1.0, 2.0),), np.ma.array([[1.0, 2.0]]), np.array([[1.0, 2.0]], ">f8")):
        found = checks.inputs(given)
        assert isinstance(found, jax.Array) and found.tolist() == [[1.0, 2.0]]
    assert jax.jit(lambda a: checks.inputs([[a, 2.0]]))(1.0).tolist() == [[1.0, 2.0]]  # a list with traced numbers

    real = "it must be an array of real numbers"
    for wrong, error, words in (
        (MASKED, ValueError, "a NumPy masked array with 1 of 2 entries masked"),
        (np.array([[1j]]), TypeError, f"has dtype complex128; {real}"),
        (jnp.array([[1j]]), TypeError, f"has dtype complex64; {real}"),
        ("wind", TypeError, f"has dtype <U4; {real}"),
        ([["a"]], TypeError, f"has dtype <U1; {real}"),
        (None, TypeError, f"has dtype object; {real}"),
        (np.array([["2020-01-01"]], "datetime64[D]"), TypeError, r"has dtype datetime64\[D\]; " + real),
        ([[1.0], [1.0, 2.0]], TypeError, "no array can be made"),
    ):
        for check in (checks.inputs, checks.require_finite):
            with pytest.raises(error, match=f"^X .*{words}"):
                check(wrong, "X")
    with pytest.raises(ValueError, match="^y is a NumPy masked array"):
        checks.observations(MASKED[:, 0], 2)
    with pytest.raises(TypeError, match="^y has dtype complex64"):
        jax.jit(lambda y: checks.observations(y, 2))(jnp.ones(2, jnp.complex64))
    with pytest.raises(TypeError, match=r"^X has dtype int64; .* as X.astype\(float\)"):
        checks.inputs([[1, 2]])
    with pytest.raises(ValueError, match=r"^y has the value 8589934592, above JAX's 2147483647: pass y.astype"):
        checks.observations(np.array([1, 2**33]), 2)


def test_masks_are_boolean():
    assert checks.mask_of([True, False]).tolist() == [True, False] and checks.mask_of(jnp.ones(2, bool)).all()
    for wrong in ([1, 0], np.array([1.0, 0.0]), jnp.array([1, 0])):
        with pytest.raises(TypeError, match="^mask has dtype .*; it must be boolean, True where"):
            checks.mask_of(wrong)
    with pytest.raises(TypeError, match="^mask has dtype float32; it must be boolean"):
        jax.jit(checks.mask_of)(jnp.ones(2))


def test_hyperparameters():
    X = jnp.asarray([[0.0, 1.0], [2.0, -1.0]])
    for make in (RBF, lambda v: Linear(variance=v)):
        np.testing.assert_array_equal(make([0.5, 2])(X), make(np.array([0.5, 2.0], np.float32))(X))
    assert jax.jit(lambda a: RBF([a, 2.0])(X))(0.5).tolist() == RBF([0.5, 2.0])(X).tolist()
    assert RBF(0.5).lengthscale == 0.5  # a number stays one, whose precision is that of the inputs
    np.testing.assert_array_equal(Coregion(RBF(), [[1.0], [2.0]]).W, [[1.0], [2.0]])
    for wrong in ("short", None, True, 1j, np.array(["a"]), np.array([True])):
        with pytest.raises(
            TypeError, match="^RBF lengthscale is .*; it must be a positive number, or an array or a list"
        ):
            RBF(wrong)
    for wrong, words in (([1.0, -1.0], r"is \[ 1. -1.\]; it must be positive"), ([], "is an empty list")):
        with pytest.raises(ValueError, match=f"^RBF lengthscale {words}"):
            RBF(wrong)
    for make in (lambda: RBF(1.0, 2.0), lambda: Linear(2.0), lambda: Polynomial(2, 1.0)):
        with pytest.raises(TypeError, match="without a name, .* must be named, as in"):
            make()


def test_lists_are_arrays_in_collapsed_bounds():
    X, y, Z, noise = np.linspace(0, 3, 4)[:, None], np.array([0.0, 1.0, 0.5, -1.0]), np.array([[0.0], [2.0]]), 0.1
    arrays, lists = (X, Z, np.full(4, noise), np.zeros(4)), (X.tolist(), Z.tolist(), [noise] * 4, [0.0] * 4)
    values = []
    for X_, Z_, noise_, offset in (arrays, lists):
        y_ = y if X_ is X else y.tolist()
        gp = CollapsedGP(RBF(), X_, Z_, noise_variance=noise_, offset=offset)
        bounds = (
            gp.log_prob(y_),
            upper_bound(RBF(), X_, y_, Z_, noise_variance=noise_),
            exact_log_evidence(RBF(), X_, y_, noise_variance=noise_),
        )
        values.append([*bounds, *gp.condition(y_).mean(X_)])
    np.testing.assert_array_equal(*values)

    gp = CollapsedGP(RBF(), X, Z, noise_variance=noise)
    for of in (gp.log_prob, gp.condition, lambda y: exact_log_evidence(RBF(), X, y, noise_variance=noise)):
        with pytest.raises(ValueError, match="^y has NaN"):
            of(y * np.nan)
        with pytest.raises(TypeError, match="^y has dtype complex"):
            of(y * 1j)
        with pytest.raises(ValueError, match="^y is a NumPy masked array"):
            of(np.ma.masked_equal(y, 1.0))
    with pytest.raises(TypeError, match="^offset is 'a'; it must be a real number"):
        CollapsedGP(RBF(), X, Z, noise_variance=noise, offset="a")
    with pytest.raises(ValueError, match=r"^inducing has shape \(2,\); .* inducing\[:, None\]"):
        CollapsedGP(RBF(), X, [0.0, 2.0], noise_variance=noise)


MINUTES = 1.7e9 + 60.0 * np.arange(200)


@pytest.mark.parametrize(
    "x, column, left",
    [
        (MINUTES[:, None], "", 94),
        (np.stack([np.arange(200.0), MINUTES], 1), ", column 1", 94),
        (np.append(1e9 + np.linspace(0, 1, 99), [0.0])[:, None], "", 2),  # 100 values, of which one is far off
    ],
)
def test_numbers_that_merge_are_said_to(x, column, left):
    count = len(np.unique(x[:, -1]))
    with pytest.warns(UserWarning, match=rf"^X{column}: {count} different values become {left} in float32.*Standard"):
        assert checks.inputs(x).dtype == jnp.float32
    with pytest.warns(UserWarning, match="^y"):
        checks.observations(np.stack([x[:, -1]] * 2), len(x))
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(checks.inputs(x), x)


def test_numbers_that_do_not_matter_are_not_said_to_merge():
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (
            np.concatenate([np.arange(0, 1, 0.1), np.linspace(0, 1, 11)]),  # 0.1 + 0.2 and 0.3
            rng.uniform(size=10**6),  # more values than float32 has there
            np.append(rng.normal(size=99), 1e12),
            np.arange(1900.0, 2025.0),
            np.ones(9),
            np.full(9, np.nan),
            np.zeros(0),
            MINUTES.astype(np.float32),
            MINUTES.astype(np.int64),
            jnp.asarray(MINUTES),
        ):
            checks.warn_if_merged(x, "x")


def test_packages_that_are_missing(monkeypatch):
    assert optional("numpy.linalg", extra="data", what="this") is np.linalg
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"^Parquet needs pyarrow: pip install npgp\[parquet\]. Or else.$"):
        optional("pyarrow.dataset", extra="parquet", what="Parquet", otherwise="Or else.")


def test_generators_on_the_host():
    draws = [
        host_generator(key).normal(size=4) for key in (jax.random.key(0), jax.random.PRNGKey(0), jax.random.key(1))
    ]
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_array_equal(draws[0], np.random.default_rng(0).normal(size=4))
    assert np.all(draws[0] != draws[2])
    with pytest.raises(TypeError, match="rng_key is 0; it must be a random key"):
        host_generator(0)


def test_row_numbers_are_looked_at_inside_jit_too():
    rows = jnp.arange(3)
    assert jax.jit(lambda: checks.row_numbers(rows, "rows", 3) + 0)().shape == (3,)
    with pytest.raises(ValueError, match="rows has row 2; there are 2 rows"):
        jax.jit(lambda: checks.row_numbers(rows, "rows", 2) + 0)()
