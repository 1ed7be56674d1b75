"""Checks of arguments, optional imports, and generators made of keys."""

import sys

import jax
import numpy as np
import pytest

from npgp import checks
from npgp.keys import host_generator, host_seed
from npgp.optional import optional


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


def test_packages_that_are_missing(monkeypatch):
    assert optional("numpy.linalg", extra="data", what="this") is np.linalg
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ModuleNotFoundError, match=r"^k-means needs scikit-learn: pip install npgp\[data\]. Or else.$"):
        optional("sklearn.cluster", extra="data", what="k-means", otherwise="Or else.")


def test_generators_on_the_host():
    draws = [
        host_generator(key).normal(size=4) for key in (jax.random.key(0), jax.random.PRNGKey(0), jax.random.key(1))
    ]
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_array_equal(draws[0], np.random.default_rng(0).normal(size=4))
    assert np.all(draws[0] != draws[2]) and 0 <= host_seed(jax.random.key(5)) < 2**32
    with pytest.raises(TypeError, match="rng_key is 0; it must be a JAX random key"):
        host_generator(0)
