"""Sources of batches: epochs of distinct rows, the same from wherever one begins, read piece by piece."""

import itertools
import pickle
import sys
import tracemalloc
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpyro.infer import SVI, Trace_ELBO

from npgp.io.standardize import Standardizer
from npgp.training import adam, fit, sources
from npgp.training.sources import Parquet, Source, Stream


def take(batches, number: int) -> list:
    return list(itertools.islice(batches, number))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y) is np.ndarray and x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def write(folder, sizes) -> list[str]:
    """A file for each list of row groups' sizes; a row's values follow from its number, ``id``."""
    paths, start = [], 0
    for i, groups in enumerate(sizes):
        ids = np.arange(start, start + sum(groups))
        start += len(ids)
        table = pa.table({"id": ids, "twice": 2.0 * ids, "unused": ids.astype(str)})
        paths.append(f"{folder}/{i}.parquet")
        with pq.ParquetWriter(paths[-1], table.schema) as writer:
            for rows in np.split(np.arange(len(ids)), np.cumsum(groups)[:-1]):
                writer.write_table(table.slice(rows[0], len(rows)), row_group_size=len(rows))
    return paths


@pytest.fixture
def read(monkeypatch):
    """The row groups that were read, one after the other."""
    groups = []
    original = sources._table

    def counted(group, columns):
        groups.append(((group.path, group.row_groups[0].id), tuple(columns)))
        return original(group, columns)

    monkeypatch.setattr(sources, "_table", counted)
    return groups


# ---------------------------------------------------------------- Parquet: which rows, and when


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=2),
    batch=st.integers(1, 100),
    window=st.integers(1, 30),
    first=st.integers(0, 100),
    seed=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=2),
)
def test_epochs_have_distinct_rows_and_begin_anywhere(tmp_path_factory, sizes, batch, window, first, seed):
    source = Parquet(write(tmp_path_factory.mktemp("data"), sizes), X=["twice", "id"], y="id", window=window)
    n = sum(map(sum, sizes))
    assert source.num_rows == n
    batch = 1 + batch % n
    per_epoch = n // batch
    batches = take(source.batches(seed, batch, 0), 3 * per_epoch)
    epochs = []
    for epoch in range(3):
        of_epoch = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        for b in of_epoch:
            assert list(b) == ["X", "y"] and b["X"].shape == (batch, 2) and b["y"].shape == (batch,)
            np.testing.assert_array_equal(b["X"], np.stack([2 * b["y"], b["y"]], axis=1))  # in the order asked for
        ids = np.concatenate([b["y"] for b in of_epoch]).astype(int)
        assert len(set(ids)) == len(ids) == n - n % batch and set(ids) <= set(range(n))
        epochs.append(ids.tolist())
    if n > 12:
        assert epochs[0] != epochs[1] != epochs[2]
        others = take(source.batches([seed[0] ^ 1, *seed[1:]], batch, 0), per_epoch)
        assert np.concatenate([b["y"] for b in others]).astype(int).tolist() != epochs[0]

    first %= 2 * per_epoch
    number = min(per_epoch + 1, len(batches) - first)
    assert_same(take(source.batches(seed, batch, first), number), batches[first : first + number])


def test_windows_are_shuffled_throughout_and_batches_span_them(tmp_path):
    source = Parquet(write(tmp_path, [[10] * 6]), y="id", window=20)
    ids = np.stack([b["y"] for b in take(source.batches([0], 15, 0), 4)]).astype(int)
    windows = ids.ravel().reshape(3, 20)
    for rows in windows:
        groups = set(rows // 10)
        assert len(groups) == 2
        # Rows of both row groups from the start; in sorted order, the first ten would be of one.
        assert {*(rows[:10] // 10)} == groups
    assert len(set(ids[1] // 10)) > 2  # the second batch has 5 rows of the first window and 10 of the second


def test_all_rows_are_left_out_equally_often(tmp_path):
    source = Parquet(write(tmp_path, [[1, 99]]), y="id", window=1)
    kept, epochs = np.zeros(2), 3000
    for epoch in range(epochs):
        used = 0
        for groups, order in source._windows([7, epoch], 10, 0):
            kept[groups[0]] += len(order)
            used += len(order)
        assert used == 90
    # The only row of the small row group; dropping what is last in an epoch would leave it out every other time.
    assert abs(kept[0] / epochs - 0.9) < 5 * np.sqrt(0.09 / epochs)
    assert kept.sum() == 90 * epochs


def test_no_more_is_read_than_batches_need(tmp_path, read):
    source = Parquet(write(tmp_path, [[10] * 8, [10] * 12]), X=["twice"], window=40)
    assert not read  # row counts are in the files' metadata
    batches = source.batches([0], 8, 0)
    take(batches, 5)
    assert len(read) == 4 and {columns for _, columns in read} == {("twice",)}
    take(batches, 1)
    assert len(read) == 8
    take(batches, 19)
    assert len({group for group, _ in read}) == len(read) == 20  # an epoch

    read.clear()
    take(source.batches([0], 8, 3 * 25 + 12), 1)  # rows 96 to 103 of epoch 3
    assert len(read) == 4
    read.clear()
    take(source.batches([0], 8, 3 * 25 + 14), 1)  # rows 112 to 119, the last of a window
    assert len(read) == 4
    read.clear()
    take(source.batches([0], 30, 1), 1)  # rows 30 to 59, of two windows
    assert len(read) == 8


def test_memory_is_that_of_a_window(tmp_path):
    n, window, columns = 200_000, 20_000, list("abcdefgh")
    table = pa.table({c: np.random.default_rng(0).normal(size=n) for c in columns})
    pq.write_table(table, tmp_path / "x", row_group_size=2000)
    source = Parquet(tmp_path / "x", X=columns, window=window)
    tracemalloc.start()  # of NumPy's arrays; Arrow's are those of one row group
    try:
        for _ in itertools.islice(source.batches([0], 1000, 0), 250):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert window * 8 * 4 < peak < 2 * window * 8 * 4


def test_it_can_be_sent_to_other_processes(tmp_path):
    source = Parquet(write(tmp_path, [[5, 5]]), y="id").map(y=np.sqrt)
    assert isinstance(source, Source)
    copied = pickle.loads(pickle.dumps(source))
    assert_same(take(copied.batches([3], 4, 1), 3), take(source.batches([3], 4, 1), 3))


# ---------------------------------------------------------------- Parquet: values


COLUMNS = {
    "bool": pa.array([True, False, True]),
    "int8": pa.array([-1, 0, 7], pa.int8()),
    "uint64": pa.array([1, 2**53, 3], pa.uint64()),
    "half": pa.array(np.array([0.5, 1.5, 2.5], np.float16)),
    "double": pa.array([0.1, 0.2, 16777217.0]),
    "decimal": pa.array([Decimal("1.25"), Decimal("-3.50"), Decimal("0.00")]),
}


def test_columns_of_numbers_are_read(tmp_path, x64):
    pq.write_table(pa.table(COLUMNS), tmp_path / "x")
    expected = [np.array([float(v) for v in column.to_pylist()]) for column in COLUMNS.values()]
    source = Parquet(tmp_path / "x", X=list(COLUMNS), **{f"one_{name}": name for name in COLUMNS})
    (batch,) = take(source.batches([0], 3, 0), 1)
    order = np.lexsort(batch["one_half"][None])
    for i, name in enumerate(COLUMNS):
        assert batch[f"one_{name}"].dtype == x64
        np.testing.assert_array_equal(batch[f"one_{name}"][order], expected[i].astype(x64))
        np.testing.assert_array_equal(batch["X"][order, i], expected[i].astype(x64))
    (block,) = source.blocks("X")
    assert block.dtype == np.float64  # where float32 would have lost the last digit
    np.testing.assert_array_equal(block, np.stack(expected, axis=1))


def test_dtypes_can_be_chosen(tmp_path):
    pq.write_table(pa.table(COLUMNS | {"big": pa.array([2**62 + 1, 2**62 + 3, 5])}), tmp_path / "x")
    source = Parquet(tmp_path / "x", a="int8", b="big", c="bool", d="half", dtype={"a": np.int32, "b": "i8", "c": bool})
    (batch,) = take(source.batches([0], 3, 0), 1)
    assert [x.dtype for x in batch.values()] == [np.int32, np.int64, np.bool_, np.float32]
    assert sorted(batch["b"].tolist()) == [5, 2**62 + 1, 2**62 + 3]
    (batch,) = take(Parquet(tmp_path / "x", a="double", dtype=np.float16, allow_nan=True).batches([0], 3, 0), 1)
    assert batch["a"].dtype == np.float16
    for column, dtype in (("half", np.int32), ("int8", np.uint8), ("int8", bool)):
        with pytest.raises(
            ValueError, match=rf"[123] of 3 values of argument y in .*are not of the dtype {np.dtype(dtype)}"
        ):
            take(Parquet(tmp_path / "x", y=column, dtype=dtype).batches([0], 3, 0), 1)


def test_functions_of_arguments(tmp_path):
    paths = write(tmp_path, [[40, 30], [50]])
    source = Parquet(paths, X=["id", "twice"], y="id", window=50)
    blocks = list(source.blocks("X"))
    assert [len(x) for x in blocks] == [40, 30, 50]
    np.testing.assert_array_equal(np.concatenate(blocks)[:, 0], np.arange(120))  # in the files' order
    sx, sy = Standardizer.of(source.blocks("X")), Standardizer.of(source.blocks("y"))
    np.testing.assert_allclose(sx.mean, [59.5, 119.0], rtol=1e-14)

    mapped = source.map(X=sx).map(X=lambda X: np.hstack([X, X[:, :1] ** 2]), y=sy)
    for raw, batch in zip(*(take(s.batches([1], 11, 3), 12) for s in (source, mapped)), strict=True):
        assert batch["X"].dtype == np.float32 and batch["X"].shape == (11, 3)
        np.testing.assert_allclose(batch["y"], sy(raw["y"]), rtol=1e-6)
        np.testing.assert_allclose(batch["X"][:, :2], sx(raw["X"]), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(batch["X"][:, 2], batch["X"][:, 0] ** 2, rtol=1e-6)
    assert next(source.blocks("y"))[1] == 1.0  # the first source is as it was
    np.testing.assert_allclose(Standardizer.of(mapped.blocks("y")).scale, 1.0, rtol=1e-12)
    with pytest.raises(ValueError, match=r"function of y made shape \(\) of 40 rows"):
        next(source.map(y=np.sum).blocks("y"))
    with pytest.raises(ValueError, match=r"argument 'Y'; there are \['X', 'y'\]"):
        source.map(Y=sy)
    logarithms = source.map(y=np.log).batches([0], 120, 0)
    with np.errstate(divide="ignore"), pytest.raises(ValueError, match=r"1 of 40 values of argument y in .*0.parquet'"):
        next(logarithms)


def test_nulls_and_nan_are_refused_or_asked_for(tmp_path):
    table = pa.table(
        {"a": pa.array([1, None, 3]), "b": [0.5, float("nan"), None], "c": [1e300, 0.0, 0.0], "d": [1.0, 2.0, 3.0]}
    )
    pq.write_table(table, tmp_path / "x", row_group_size=2)

    def first(**options):
        return take(Parquet(tmp_path / "x", **options).batches([0], 3, 0), 1)[0]

    with pytest.raises(ValueError, match=r"1 of 2 values of column 'a' in '.*x' \(row group 0\) are null. Remove"):
        first(y="a")
    with pytest.raises(ValueError, match="column 'b' in .* are null|argument X in .* are NaN or infinite"):
        first(X=["d", "b"])
    with pytest.raises(ValueError, match=r"1 of 4 values of argument X in .*\(row group 0\), as float32, are NaN or"):
        first(X=["d", "c"])
    assert first(X=["d", "c"], dtype=np.float64)["X"].max() == 1e300
    X = first(X=["a", "b", "d"], allow_nan=True)["X"]
    np.testing.assert_array_equal(X[np.argsort(X[:, 2])], [[1, 0.5, 1], [np.nan, np.nan, 2], [3, np.nan, 3]])
    with pytest.raises(ValueError, match="not of the dtype"):
        first(y="a", allow_nan=True, dtype=np.int32)


def test_errors_name_file_and_column(tmp_path, monkeypatch):
    one, other = write(tmp_path, [[3], [4]])
    pq.write_table(pa.table({"id": pa.array(["a", "b"]).dictionary_encode()}), tmp_path / "strings")
    with pytest.raises(ValueError, match=r"0.parquet' has no column 'idd' \(for y\); it has id, twice, unused"):
        Parquet(one, y="idd")
    with pytest.raises(ValueError, match=r"Column 'unused' \(for X\) of '.*0.parquet' has type (large_)?string"):
        Parquet([one, other], X=["id", "unused"])
    with pytest.raises(ValueError, match=r"Column 'id' \(for y\) of '.*strings' has type dictionary"):
        Parquet([one, tmp_path / "strings"], y="id")
    with pytest.raises(FileNotFoundError):
        Parquet(tmp_path / "none", y="id")
    with pytest.raises(ValueError, match="needs columns"):
        Parquet(one)
    with pytest.raises(ValueError, match="window is 0"):
        Parquet(one, y="id", window=0)
    with pytest.raises(ValueError, match=r"dtype names \['z'\]"):
        Parquet(one, y="id", dtype={"z": np.int32})
    source = Parquet([one, other], y="id")
    for size in (None, 0, 8):
        with pytest.raises(ValueError, match=f"batch_size is {size}, not in 1 to 7"):
            source.batches([0], size, 0)
    with pytest.raises(ValueError, match="first is -1"):
        source.batches([0], 2, -1)
    write(tmp_path, [[3], [2]])
    with pytest.raises(
        ValueError, match=r"Row group 0 of '.*1.parquet' cannot be read: the file is damaged, or has changed"
    ):
        take(source.batches([0], 7, 0), 1)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install npgp\[parquet\]"):
        Parquet(one, y="id")


# ---------------------------------------------------------------- iterables


def numbered(count: int, rows: int = 3, start: int = 0) -> list[tuple]:
    return [(np.full((rows, 2), start + i), np.full(rows, float(start + i))) for i in range(count)]


@given(
    count=st.integers(1, 5), last=st.integers(0, 2), first=st.integers(0, 17), kind=st.sampled_from(["list", "epochs"])
)
def test_streams_begin_anywhere(count, last, first, kind):
    drawn = []

    def epoch_of(epoch):
        order = np.random.default_rng([5, epoch]).permutation(count) if kind == "epochs" else range(count)
        yield from (
            drawn.append(i) or (np.full((3, 2), 10 * epoch * (kind == "epochs") + i), np.zeros(3)) for i in order
        )
        if last:
            yield np.zeros((last, 2), int), np.zeros(last)  # fills no batch

    stream = Stream(epoch_of if kind == "epochs" else list(epoch_of(0)), num_rows=3 * count + last)
    assert isinstance(stream, Source) and stream.num_rows == 3 * count + last
    batches = take(stream.batches([1, 2], 3, 0), 25)
    assert len(batches) == 25 and all(b[0].shape == (3, 2) for b in batches)
    assert sorted(b[0][0, 0] % 10 for b in batches[:count]) == list(range(count))
    drawn.clear()
    assert_same(take(stream.batches([1, 2], None, first), 8), batches[first : first + 8])
    assert len(drawn) <= count + count + 7  # the first epoch, and those from the start of the one that is continued


def test_batches_become_arguments():
    kwargs = {"y": np.arange(3), "rest": {"a": jnp.ones((3, 2)), "b": [1.0, 2.0]}}
    for given_, expected in (
        ((np.ones(3), 2.0), (np.ones(3), np.array(2.0))),
        ([jnp.ones(3), np.ones(4, np.float16)], (np.ones(3, np.float32), np.ones(4, np.float16))),
        (np.ones((3, 2)), (np.ones((3, 2)),)),
        (kwargs, {"y": np.arange(3), "rest": {"a": np.ones((3, 2), np.float32), "b": [np.array(1.0), np.array(2.0)]}}),
    ):
        batches = take(Stream([given_]).batches([0], None, 0), 2)
        assert_same(batches, [expected, expected])


def test_iterators_are_gone_through_once():
    stream = Stream(iter(numbered(4)))
    for _ in range(2):
        assert_same(take(stream.batches([0], 3, 0), 1), numbered(1))  # one may look at the first batch
    batches = stream.batches([0], 3, 0)
    assert_same(take(batches, 4), numbered(4))
    with pytest.raises(ValueError, match=r"has ended after 4 batches. For training that .*callable epoch"):
        next(batches)
    with pytest.raises(ValueError, match=r"cannot go to batch 0: it can only go on from batch 4"):
        stream.batches([0], 3, 0)
    with pytest.raises(ValueError, match=r"cannot go to batch 2: it can only go on from batch 0"):
        Stream(iter(numbered(4))).batches([0], 3, 2)
    endless = Stream(numbered(1, start=i)[0] for i in itertools.count())
    assert take(endless.batches([0], None, 0), 50)[-1][1][0] == 49.0


def test_errors_of_streams():
    good = numbered(3)

    def raises(data, message, error=ValueError, size=None, number=9):
        with pytest.raises(error, match=message) as info:
            take(Stream(data).batches([0], size, 0), number)
        return getattr(info.value, "__notes__", [])

    short = (np.zeros((1, 2), int), np.zeros(1))
    raises(
        [*good, short, *good], r"Batch 3 has \[0\]: int64\[1, 2\], \[1\]: float64\[1\], and the first batch .*\[3, 2\]"
    )
    raises([*good, short, short], r"Only the last batch of an epoch may have fewer rows")
    raises(
        [*good, (np.zeros((4, 2), int), np.zeros(4))], r"Batch 3 has \[0\]: int64\[4, 2\].*first batch has .*\[3, 2\]"
    )
    raises([*good, (np.zeros((3, 1), int), np.zeros(3))], r"Batch 3 has \[0\]: int64\[3, 1\]")
    raises([*good, (np.zeros((1, 2), int), np.zeros(2))], r"Batch 3 has")
    raises([*good, (np.zeros((3, 2)), np.zeros(3))], r"Batch 3 has \[0\]: float64")
    raises([*good, good[0][:1]], r"Batch 3 has \[0\]: int64\[3, 2\], and")
    raises([*good, {"X": good[0][0], "y": good[0][1]}], r"Batch 3 has \['X'\]")
    raises(good, r"batch_size is 2, and batch 0 has 3 rows", size=2)
    raises([(1.0, 2.0)], "Batch 0 has no rows")
    raises([(np.array(["a"]),)], "Batch 0 has an array of <U1")
    raises([], r"no batch in epoch 0")
    once = iter(good)
    raises(lambda epoch: once, r"no batch in epoch 1")
    raises(lambda epoch: good[: 3 - epoch], r"Epoch 1 of .* has 2 batches, and epoch 0 had 3")
    raises(3, "not a int", TypeError)

    def broken(epoch):
        yield from good
        raise OSError("disk")

    assert raises(broken, "disk", OSError) == ["Stream was at batch 3, in epoch 0."]
    assert raises(lambda: good, "positional argument", TypeError) == ["Stream was at batch 0, in epoch 0."]


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("x64", [False, True])
def test_training_from_files_is_continued_exactly(tmp_path, x64):
    with jax.enable_x64(x64):  # of this thread alone, and another reads ahead
        check_continuation(tmp_path)


def check_continuation(tmp_path):
    """Lines through y = id/100; three batches an epoch, continued in mid-epoch."""
    n = 100
    source = Parquet(write(tmp_path, [[30, 25], [45]]), x="id", y="twice", window=40)
    source = source.map(x=lambda x: x / n, y=lambda y: y / n)

    def model(x, y):
        slope = numpyro.param("slope", 0.0)
        with numpyro.plate("rows", n, subsample_size=len(y)):
            numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)

    svi = SVI(model, lambda x, y: None, adam(0.1), Trace_ELBO())
    key = jax.random.key(0)
    options = dict(batch_size=32, progress=False)
    whole = fit(svi, key, 100, source, **options)
    half = fit(svi, key, 50, source, **options)
    rest = fit(svi, key, 50, source, init_state=half.state, **options)
    np.testing.assert_array_equal(np.concatenate([half.losses, rest.losses]), whole.losses)
    assert rest.params["slope"] == whole.params["slope"]
    np.testing.assert_allclose(whole.params["slope"], 2.0, atol=0.02)

    # The same batches as a stream give the same.
    batches = take(source.batches(np.asarray(jax.random.key_data(key)).tolist(), 32, 0), 100)
    assert_same(fit(svi, key, 100, Stream(iter(batches)), progress=False).losses, whole.losses)
