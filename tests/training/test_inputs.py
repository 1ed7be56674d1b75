"""Where the rows of batches come from makes no difference to training."""

import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Trace_ELBO

from npgp.training import adam, evaluate, fit
from npgp.training.data import Data, read_rows

KEY = jax.random.key(0)
N, B, D = 60, 16, 2
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
Y = X @ np.array([1.0, -2.0], np.float32)


def make_svi():
    def model(X, y=None, rows=None, size=N):
        w = numpyro.param("w", jnp.zeros(D))
        table = numpyro.param("table", jnp.zeros(N))
        mean = X @ w + (0.0 if rows is None else table[rows])
        with numpyro.plate("data", size, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 0.3), obs=y)

    return SVI(model, lambda *args, **kwargs: None, adam(0.05), Trace_ELBO())


def run(*args, num_steps=25, **kwargs):
    return fit(make_svi(), KEY, num_steps, *args, progress=False, **kwargs)


def assert_same(a, b):
    np.testing.assert_array_equal(a.losses, b.losses)
    for name, value in a.params.items():
        np.testing.assert_array_equal(value, b.params[name])


@pytest.fixture
def files(tmp_path):
    """The data as maps of files."""
    for name, x in (("X", X), ("y", Y)):
        np.save(tmp_path / f"{name}.npy", x)
    return [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("X", "y")]


@pytest.fixture(scope="module")
def resident():
    return run(X, y=Y, batch_size=B, indices="rows")


def test_files_and_host_give_the_same_bits(files, resident):
    settings = dict(batch_size=B, indices="rows", steps_per_call=4)
    assert_same(run(files[0], y=files[1], **settings), resident)
    assert_same(run(files[0], y=Y, **settings), resident)  # on disk and on the device
    assert_same(run(X, y=Y, on_host=True, **settings), resident)


def test_continuation_from_files(files, resident):
    settings = dict(batch_size=B, indices="rows", steps_per_call=4)
    svi = make_svi()
    part = fit(svi, KEY, 10, files[0], y=files[1], progress=False, **settings)
    rest = fit(svi, KEY, 15, files[0], y=files[1], progress=False, init_state=part.state, **settings)
    np.testing.assert_array_equal(np.concatenate([part.losses, rest.losses]), resident.losses)


def test_evaluation_from_files(files):
    svi = make_svi()
    result = fit(svi, KEY, 10, X, y=Y, batch_size=B, progress=False)
    there = evaluate(svi, KEY, result, files[0], y=files[1], batch_size=B)
    # Two programs, which XLA may fuse otherwise: to rounding.
    np.testing.assert_allclose(there, evaluate(svi, KEY, result, X, y=Y, batch_size=B), rtol=2e-6)


def test_what_stays_where(files):
    inputs = Data((files[0], np.zeros((5, 2))), {"y": Y}, KEY, B, None)
    assert inputs.layout.host == (True, False, False) and inputs.reads
    rows, x = inputs.read(3, 2, 7)
    assert rows.shape == (7, B) and x.shape == (7, B, D)  # filled up, so that all calls share a program
    np.testing.assert_array_equal(x[:2], X[rows[:2]])
    args, kwargs = inputs.layout.call(inputs.arrays, [rows[1], x[1]])
    np.testing.assert_array_equal(kwargs["y"], Y[rows[1]])
    assert args[1].shape == (5, 2)
    # All rows at every step: everything on the device.
    assert not Data((files[0],), {}, KEY, None, None).reads


def test_read_pages_do_not_stay_in_memory(tmp_path):
    if not Path("/proc/self/smaps").exists():
        pytest.skip("this system does not tell how much of a map is in memory")
    path = tmp_path / "large.npy"
    np.save(path, np.ones((2**20, 4), np.float32))  # 16 MiB

    def resident_kilobytes():
        entries = Path("/proc/self/smaps").read_text().split(str(path))[1:]
        return sum(int(re.search(r"Rss:\s+(\d+)", entry).group(1)) for entry in entries)

    looked_at = np.load(path, mmap_mode="r")
    assert np.asarray(looked_at).sum() == 2**22 and resident_kilobytes() > 16_000  # the measure sees pages
    del looked_at
    inputs = Data((np.load(path, mmap_mode="r"),), {}, KEY, 1024, None)
    for step in range(0, 400, 100):
        assert (inputs.read(step, 100)[1] == 1).all()
    assert resident_kilobytes() < 200


def test_rows_of_maps_are_those_of_the_arrays(tmp_path):
    """Maps of all kinds, views among them, and maps that differ from their files."""
    whole = np.random.default_rng(0).normal(size=(5000, 6))
    np.save(tmp_path / "a.npy", whole)
    whole.astype(np.float32).tofile(tmp_path / "raw")
    rows = np.random.default_rng(1).integers(700, size=(3, 40))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    raw = np.memmap(tmp_path / "raw", np.float32, "r", offset=9000 * 4, shape=(700, 6))
    read = {
        "whole": mapped,
        "rows": mapped[2100:4000:2],
        "column": mapped[:, 3],
        "columns": mapped[:, 1:4],
        "backwards": mapped[4000::-1],
        "offset": raw,
        "reshaped": raw.reshape(700, 2, 3),
    }
    for name, x in read.items():
        np.testing.assert_array_equal(read_rows(x, rows), np.asarray(x)[rows], err_msg=name)

    private = np.load(tmp_path / "a.npy", mmap_mode="c")
    private[rows] = 7.0  # not in the file
    assert (read_rows(private, rows) == 7.0).all()
    np.save(tmp_path / "other.npy", whole + 1)
    (tmp_path / "other.npy").replace(tmp_path / "a.npy")  # the map still is of the old file
    np.testing.assert_array_equal(read_rows(mapped, rows), whole[rows])
    (tmp_path / "a.npy").unlink()
    np.testing.assert_array_equal(read_rows(mapped, rows), whole[rows])
    np.testing.assert_array_equal(read_rows(mapped.T, np.array([2, 0])), whole.T[[2, 0]])


class Counting:
    """A source of numbered batches that remembers who asked for what."""

    num_rows = 40

    def __init__(self):
        self.given = []

    def batches(self, seed, batch_size, first):
        number = first
        while True:
            self.given.append((number, threading.current_thread().name))
            yield np.full((8, D), number, np.float64), np.full(8, float(number))
            number += 1


def test_a_source_stands_for_the_first_arguments():
    source = Counting()
    seen = []

    def model(X, y, scale, flag):
        assert X.shape == (8, D) and y.shape == (8,) and scale.shape == (3,) and flag == "text"
        assert X.dtype == jnp.result_type(float)
        jax.debug.callback(lambda x, y: seen.append((float(x[0, 0]), float(y[0]))), X, y)
        numpyro.factor("f", -jnp.sum((y - numpyro.param("m", 0.0)) ** 2))

    svi = SVI(model, lambda *args, **kwargs: None, adam(0.05), Trace_ELBO())
    part = fit(svi, KEY, 7, source, np.ones(3), flag="text", steps_per_call=3, progress=False)
    fit(svi, KEY, 5, source, np.ones(3), flag="text", steps_per_call=3, progress=False, init_state=part.state)
    jax.effects_barrier()
    # The start of the parameters computes nothing else of the model.
    assert seen == [(i, i) for i in range(12)]
    # Each is asked for once, even to learn the shapes; and the next ones while the device is busy with others.
    assert [number for number, _ in source.given] == [*range(7), *range(7, 12)]
    assert all(name.startswith("npgp-batches") for number, name in source.given if number in (3, 4, 5, 6))


def test_batches_of_keywords():
    class Named(Counting):
        num_rows = N

        def batches(self, seed, batch_size, first):
            return ({"X": x, "y": y} for x, y in Counting.batches(self, seed, batch_size, first))

    result = run(Named(), num_steps=3)
    assert result.losses.shape == (3,)
    with pytest.raises(ValueError, match="batches hold y, which is given as well"):
        run(Named(), y=Y)
    with pytest.raises(ValueError, match="a source has an order of its own"):
        run(Named(), indices="rows")


def test_nan_in_rows_that_are_read(tmp_path):
    bad = X.copy()
    bad[17, 1] = np.nan
    np.save(tmp_path / "X.npy", bad)
    X_file = np.load(tmp_path / "X.npy", mmap_mode="r")
    with pytest.raises(ValueError, match=r"1 values in the rows of steps \d to \d are NaN or infinite"):
        run(X_file, y=Y, batch_size=B, steps_per_call=3)
    with pytest.raises(ValueError, match="1 of 120 values in args.0. are NaN"):
        run(X_file, y=Y)
    Data((X_file,), {}, KEY, B, None, allow_nan=True).read(0, 6)


def test_masks_of_numpy_and_numbers_that_merge_are_not_lost_in_silence():
    masked = np.ma.masked_greater(Y, 0.0)
    for options in (dict(batch_size=None), dict(batch_size=B), dict(batch_size=B, on_host=True)):
        size = options.pop("batch_size")
        with pytest.raises(ValueError, match="^argument 'y' is a NumPy masked array with"):
            Data((X,), {"y": masked}, KEY, size, None, **options)
        with pytest.raises(ValueError, match=r"^args\[0\] is a NumPy masked array with"):
            Data((np.ma.masked_equal(X, X[0, 0]),), {"y": Y}, KEY, size, None, **options)
    minutes = 1.7e9 + 60.0 * np.arange(len(X))[:, None]
    with pytest.warns(UserWarning, match=rf"^args\[0\]: {len(X)} different values become \d+ in float32"):
        Data((minutes,), {"y": Y}, KEY, B, None)
