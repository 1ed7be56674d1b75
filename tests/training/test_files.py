"""Files of data that change or are of another machine: right numbers, or a sentence, and never the process's end."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO

import npgp
from npgp.training.data import Data, native, read_rows, require_whole

N, D = 600, 4
WHOLE = np.random.default_rng(0).normal(size=(N, D))
CUT_SHORT = r"The file '.*x' has been cut short since it was mapped: it has 4096 bytes, and \d+ are needed"


def mapped(path, mode="r", offset=0, dtype=np.float64):
    path.write_bytes(bytes(offset) + WHOLE.astype(dtype).tobytes())
    return np.memmap(path, dtype, mode, offset, (N, D))


@pytest.mark.parametrize(
    "view",
    [
        lambda path: mapped(path),
        lambda path: mapped(path)[100:],
        lambda path: mapped(path)[::-1],
        lambda path: mapped(path)[:, ::2],
        lambda path: mapped(path).T,
        lambda path: np.asarray(mapped(path)),
        lambda path: mapped(path, "c"),
        lambda path: mapped(path, offset=5000),
    ],
    ids=["whole", "rows", "backwards", "columns", "transposed", "array", "private", "offset"],
)
def test_a_map_that_is_cut_short_is_an_error(tmp_path, view):
    """Where looking at it would be a bus error, for all kinds of maps: those that exist, and new ones."""
    x = view(tmp_path / "x")
    last = np.array([len(x) // 2, len(x) - 1, 0])
    np.testing.assert_array_equal(read_rows(x, last), np.asarray(x)[last])
    require_whole(x)
    os.truncate(tmp_path / "x", 4096)
    for look in (lambda: read_rows(x, last), lambda: require_whole(x)):
        with pytest.raises(ValueError, match=CUT_SHORT if isinstance(x, np.memmap) else "has been cut short"):
            look()


def test_a_map_that_is_moved_or_replaced_is_whole(tmp_path):
    x = mapped(tmp_path / "x")
    (tmp_path / "y").write_bytes(b"short")
    (tmp_path / "y").replace(tmp_path / "x")
    require_whole(x)
    np.testing.assert_array_equal(read_rows(x, np.arange(N)), WHOLE)


def model(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def guide(X, y):
    numpyro.sample("w", dist.Normal(numpyro.param("loc", jnp.zeros(D)), 0.1).to_event(1))


def train(X, y, **options):
    svi = SVI(model, guide, optax.sgd(1e-4), Trace_ELBO())
    return npgp.fit(svi, jax.random.key(0), 20, X, y, progress=False, **options).losses


def test_a_file_that_is_cut_short_stops_training_with_a_sentence(tmp_path):
    X, y = mapped(tmp_path / "x", dtype=np.float32), WHOLE[:, 0].astype(np.float32)
    monitor = npgp.training.Monitor(lambda params: os.truncate(tmp_path / "x", 4096) or 0.0, every=10)
    with pytest.raises(ValueError, match=CUT_SHORT):
        train(X, y, batch_size=50, steps_per_call=5, monitor=monitor)
    assert monitor.history == [(10, 0.0)]
    for batch_size in (None, 50):  # before training, and with all rows
        with pytest.raises(ValueError, match=CUT_SHORT):
            train(X, y, batch_size=batch_size)


def test_other_byte_orders_are_the_same_numbers(tmp_path):
    for dtype in (">f4", "<f4", ">i2", "float32", "bool"):
        assert native(np.arange(3).astype(dtype)).dtype.isnative
        np.testing.assert_array_equal(native(np.arange(3).astype(dtype)), np.arange(3).astype(dtype))
    X, y = WHOLE.astype(np.float32), WHOLE[:, 0].astype(np.float32)
    Xs, ys = X.astype(">f4"), y.astype(">f4")
    np.save(tmp_path / "x", Xs)
    X_map = np.load(tmp_path / "x.npy", mmap_mode="r")

    def stream(X, y):
        return npgp.training.Stream([(X[i : i + 50], y[i : i + 50]) for i in range(0, N, 50)])

    def arguments(*args, batch_size=50, **options):
        """Of a step of training."""
        inputs = Data(args, {}, jax.random.key(0), batch_size, None, **options)
        return inputs.layout.call(inputs.arrays, jax.tree.map(lambda x: x[0], inputs.place(inputs.read(3, 1))))[0]

    for expected, *others in (
        (arguments(X, y), arguments(Xs, ys), arguments(Xs, ys, on_host=True), arguments(X_map, ys)),
        (arguments(X, y, batch_size=None), arguments(X_map, ys, batch_size=None)),
        (arguments(stream(X, y)), arguments(stream(Xs, ys))),
    ):
        for found in others:
            jax.tree.map(np.testing.assert_array_equal, found, expected)
