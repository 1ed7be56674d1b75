"""Standardization: statistics of a pass in pieces are those of the whole, and units come back."""

import pickle
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import npgp
from npgp.features import Points
from npgp.io import standardize
from npgp.io.standardize import Standardizer
from npgp.sparse.projection import factorize
from npgp.variational import MeanOnlyNormal
from npgp.variational.posterior import Posterior


def table(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Columns of unlike means and scales."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, columns)) * 10.0 ** np.arange(columns) + 3.0


@given(
    rows=st.integers(1, 40),
    columns=st.integers(0, 3),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    at_once=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_pieces_have_the_statistics_of_the_whole(rows, columns, cuts, at_once, seed):
    x = table(rows, columns, seed) if columns else table(rows, 1, seed)[:, 0]
    whole = x.std(axis=0) if rows > 1 else np.ones(x.shape[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standardize, "_VALUES_PER_BLOCK", at_once)
        for data in (x, np.split(x, sorted(min(cut, rows) for cut in cuts)), iter([x])):
            s = Standardizer.of(data)
            assert s.mean.shape == s.scale.shape == x.shape[1:]
            np.testing.assert_allclose(s.mean, x.mean(axis=0), rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(s.scale, whole, rtol=1e-12)


@pytest.mark.parametrize("offset", [1e8, -1e12])
def test_a_large_offset_costs_no_digits(monkeypatch, offset):
    monkeypatch.setattr(standardize, "_VALUES_PER_BLOCK", 1000)
    noise = np.random.default_rng(1).integers(-1000, 1000, size=50_000) / 256.0  # sums with the offset are exact
    s = Standardizer.of(offset + noise)
    np.testing.assert_allclose(s.scale, noise.std(), rtol=1e-12)
    np.testing.assert_allclose(s.mean - offset, noise.mean(), rtol=0, atol=2 * np.spacing(abs(offset)))
    # The textbook formula has nothing left.
    x = offset + noise
    assert abs(np.mean(x**2) - np.mean(x) ** 2 - noise.var()) > 0.01 * noise.var()


def test_constant_columns_are_only_shifted():
    x = np.stack([np.full(1000, 0.1), np.linspace(0, 1, 1000), np.zeros(1000)], axis=1)
    assert np.full(1000, 0.1).std() > 0  # rounding makes the constant vary
    s = Standardizer.of([x[:300], x[300:]])
    np.testing.assert_array_equal(s.scale[[0, 2]], 1.0)
    np.testing.assert_array_equal(s(x)[:, [0, 2]], 0.0)
    np.testing.assert_allclose(s.mean, [0.1, 0.5, 0.0], rtol=1e-12)
    np.testing.assert_allclose(s.scale[1], np.sqrt(1001 / 999 / 12), rtol=1e-12)  # of 1000 equal steps


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.float16, np.float32, jnp.bfloat16])
def test_other_dtypes(dtype):
    x = np.random.default_rng(0).integers(0, 2, size=(500, 2)).astype(dtype)
    s = Standardizer.of(x)
    np.testing.assert_allclose(s.mean, x.astype(float).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(s.scale, x.astype(float).std(axis=0), rtol=1e-12)
    assert s(x).dtype == (x.dtype if jnp.issubdtype(dtype, jnp.floating) else np.float64)


@given(seed=st.integers(0, 99), share=st.sampled_from([0.1, 0.9]))
@example(seed=0, share=0.0)
def test_missing_values_are_left_out(seed, share):
    x = table(40, 2, seed)
    hole = np.random.default_rng(seed).random(x.shape) < share
    hole[[3, 7]] = False
    x[hole] = np.random.default_rng(seed).choice([np.nan, np.inf, -np.inf], size=hole.sum())
    s = Standardizer.of(np.split(x, [1, 5, 30]), allow_nan=True)
    for j in range(2):
        column = x[~hole[:, j], j]
        np.testing.assert_allclose(s.mean[j], column.mean(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(s.scale[j], column.std(), rtol=1e-12)


def test_masks_are_honored():
    x = table(40, 2)
    masked = np.ma.array(np.where(np.eye(40, 2) > 0, -999.0, x), mask=np.eye(40, 2) > 0)
    with pytest.raises(ValueError, match=r"^2 values in the rows 0 to 39 .* are NaN, infinite or masked\. .*allow_nan"):
        Standardizer.of(masked)
    s = Standardizer.of(masked, allow_nan=True)
    np.testing.assert_allclose(s.mean, [x[1:, 0].mean(), np.delete(x[:, 1], 1).mean()], rtol=1e-12)
    z = s(masked)
    np.testing.assert_array_equal(np.ma.getmaskarray(z), np.eye(40, 2) > 0)
    np.testing.assert_allclose(z[2:], s(x)[2:])
    np.testing.assert_array_equal(Standardizer.of(np.ma.array(x)).mean, Standardizer.of(x).mean)  # with no entry masked


def test_numbers_far_from_zero_are_standardized_before_jax_rounds_them():
    x = 1.7e9 + 60.0 * np.arange(200)  # minutes, which float32 makes 94 values of
    s = Standardizer.of(x)
    for standardizer in (s, jax.tree.map(jnp.float32, s)):
        z = jnp.asarray(standardizer(x))
        assert z.dtype == jnp.float32 and len(np.unique(z)) == 200
        np.testing.assert_allclose(np.diff(z), 60 / x.std(), rtol=1e-4)


def test_errors_say_what_and_where(monkeypatch):
    monkeypatch.setattr(standardize, "_VALUES_PER_BLOCK", 20)
    x = table(30, 2)
    x[17, 1] = np.nan
    with pytest.raises(ValueError, match=r"^1 values in the rows 10 to 19 of data, in column 1 are NaN"):
        Standardizer.of(x)
    with pytest.raises(ValueError, match=r"rows 17 to 26 of data, in column 1 are"):
        Standardizer.of([x[:17], x[17:]])
    with pytest.raises(ValueError, match=r"rows 0 to 19 of data are NaN"):
        Standardizer.of(x[:, 1])
    with pytest.raises(ValueError, match=r"Columns \[1\] of data have no finite value"):
        Standardizer.of(np.where([True, False], x, np.inf), allow_nan=True)
    for nothing in (x[:0], [], [x[:0]]):
        with pytest.raises(ValueError, match="no rows"):
            Standardizer.of(nothing)
    with pytest.raises(ValueError, match=r"rows 17 to 29 of data have shape \(\) each, and those before have \(2,\)"):
        Standardizer.of([x[:17], x[17:, 0]])
    with pytest.raises(ValueError, match="real numbers"):
        Standardizer.of(np.array(["1", "2"]))
    with pytest.raises(ValueError, match=r"Part 0 of data is a single value, of type float"):
        Standardizer.of([1.0, 2.0])
    with pytest.raises(ValueError, match=r"Part 0 of data is no array, of type list"):
        Standardizer.of([[1.0, 2.0]])


def test_a_file_is_not_loaded(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, table(100_000, 4).astype(np.float32))
    mapped = np.load(path, mmap_mode="r")
    tracemalloc.start()
    try:
        s = Standardizer.of(mapped)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 8 * standardize._VALUES_PER_BLOCK < 8 * mapped.size * 2
    np.testing.assert_allclose(s.scale, np.load(path).astype(float).std(axis=0), rtol=1e-12)


def test_values_and_units_come_back(x64):
    x = table(50, 3)
    s = Standardizer.of(x)
    z = s(x)
    assert type(z) is np.ndarray and z.dtype == np.float64
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=1e-14)
    np.testing.assert_allclose(z.std(axis=0), 1, rtol=1e-13)
    np.testing.assert_allclose(s.inverse(z), x, rtol=1e-13)
    assert s(x.astype(np.float32)).dtype == np.float32

    on_device = jnp.asarray(x)
    inside = jax.jit(lambda s, x: (s(x), s.inverse(s(x)), s.log_scale))(s, on_device)  # as part of a model
    for a, b in zip(inside, (z, x, s.log_scale), strict=True):
        assert isinstance(a, jax.Array) and a.dtype == x64
        np.testing.assert_allclose(a, b, rtol=1e-12 if x64 == jnp.float64 else 1e-4, atol=1e-6)
    single = jnp.asarray(x, jnp.float32)
    assert s(single).dtype == s.inverse(single).dtype == jnp.float32
    np.testing.assert_allclose(s(single[4]), z[4], rtol=1e-4)  # a row


def test_densities_and_spreads_in_units_of_the_data():
    y = table(60, 2)[:, 1]
    s = Standardizer.of(y)
    assert s.mean.shape == ()
    standardized, own = dist.Normal(0.3, 0.7), dist.Normal(s.inverse(0.3), s.inverse_std(0.7))
    np.testing.assert_allclose(own.log_prob(y), standardized.log_prob(s(y)) - s.log_scale, rtol=1e-5)
    np.testing.assert_allclose(s.inverse_variance(0.49), s.inverse_std(0.7) ** 2, rtol=1e-12)

    Y = table(60, 3)
    t = Standardizer.of(Y)
    own = dist.Normal(t.mean, t.scale).to_event(1)
    standardized = dist.Normal(0, jnp.ones(3)).to_event(1)
    np.testing.assert_allclose(own.log_prob(Y), standardized.log_prob(t(Y)) - t.log_scale, rtol=1e-5)


SCRIPT = """
import sys
import jax
import npgp
parts, x = npgp.load(sys.argv[1])
mean, variance = parts["posterior"].mean_and_variance(parts["inputs"](x))
npgp.save(sys.argv[2], (parts["targets"].inverse(mean), parts["targets"].inverse_variance(variance)))
"""


def test_a_fresh_process_predicts_in_units_of_the_data(tmp_path):
    X, y = table(200, 2).astype(np.float32), table(200, 3)[:, 2]
    inputs, targets = Standardizer.of(X), Standardizer.of(y)
    projector = factorize(npgp.RBF(0.9, variance=1.1), (Points(jnp.asarray(inputs(X[:5]))),))
    posterior = Posterior(projector, (MeanOnlyNormal(jnp.linspace(-1.0, 1.0, 5)),))
    files = [tmp_path / "model.npz", tmp_path / "predictions.npz"]
    npgp.save(files[0], ({"posterior": posterior, "inputs": inputs, "targets": targets}, X[:20]))
    subprocess.run([sys.executable, "-c", SCRIPT, *files], check=True, timeout=300)
    mean, variance = posterior.mean_and_variance(inputs(X[:20]))
    loaded = npgp.load(files[1])
    np.testing.assert_array_equal(loaded[0], mean * targets.scale.astype(np.float32) + targets.mean.astype(np.float32))
    np.testing.assert_array_equal(loaded[1], targets.inverse_variance(variance))
    assert np.abs(loaded[0]).max() > 10  # not standardized any more


def test_it_can_be_sent_to_other_processes():
    s = Standardizer.of(table(9, 2))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(s)).scale, s.scale)
