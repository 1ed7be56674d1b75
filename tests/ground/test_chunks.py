"""Functions of many rows, some at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import compiled

from npgp.chunks import join, map_chunks, rows_within, split


def test_functions_in_parts(float64):
    X = jnp.asarray(np.random.default_rng(0).normal(size=(10, 2)))

    def total(X, size):
        double, sums = map_chunks(lambda x: (2 * x, jnp.sum(x**3, 1)), size, X)
        assert double.shape == X.shape and sums.shape == (10,)
        return jnp.sum(double[:, 0] * sums)

    value, slope = compiled(jax.value_and_grad(lambda X: total(X, 3)))(X)
    expected, expected_slope = compiled(jax.value_and_grad(lambda X: total(X, 10)))(X)
    np.testing.assert_allclose(value, expected)
    np.testing.assert_allclose(slope, expected_slope)


@pytest.mark.parametrize("size", [1, 3, 4, 10, 99])
def test_rows_may_be_last_in_results_and_arguments_pytrees(size):
    X, names = jnp.arange(20.0).reshape(10, 2), {"a": jnp.arange(10.0), "b": jnp.ones((10, 1, 3))}
    made = map_chunks(lambda x, n: (x.T * n["a"], x.T[None] + n["b"].sum((1, 2))), size, X, names, axis=-1)
    np.testing.assert_array_equal(made[0], X.T * names["a"])
    np.testing.assert_array_equal(made[1], X.T[None] + 3.0)


def test_chunks_are_as_equal_as_they_can_be_and_filled_with_rows_or_zeros():
    X = jnp.arange(1.0, 11.0)
    assert split(X, 9).shape == (2, 5) and split(X, 4).shape == (3, 4)
    np.testing.assert_array_equal(split(X, 4)[-1], [9, 10, 10, 10])
    np.testing.assert_array_equal(split((X, X), 4, pad_zeros=True)[1][-1], [9, 10, 0, 0])
    np.testing.assert_array_equal(join(split(X, 4), 10), X)
    assert (rows_within(100, 3, 4), rows_within(10, 100), rows_within(7, 0)) == (8, 1, 7)
