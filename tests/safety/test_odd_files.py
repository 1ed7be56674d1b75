"""Files: saved objects that are damaged, foreign or hostile; maps that shrink; Parquet."""

from __future__ import annotations

import io
import json
import os
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import problem as p
from judge import attempt, same, true

import npgp


def _saved(obj: Any = None) -> Path:
    """A file with a posterior, or with another object."""
    path = Path(tempfile.mkdtemp()) / "saved.npz"
    posterior = p.sparse_gp().posterior(p.as_params(p.optimum()))
    npgp.save(path, posterior if obj is None else obj)
    return path


def _entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def _rewritten(change: Callable[[dict[str, Any]], Any]) -> Path:
    """The file with another header."""
    path = _saved()
    arrays = dict(np.load(path))
    header = json.loads(arrays.pop("npgp").tobytes())
    changed = change(header)
    text = changed if isinstance(changed, str) else json.dumps(header if changed is None else changed)
    np.savez(path, npgp=np.frombuffer(text.encode(), np.uint8), **arrays)
    return path


def _nested(depth: int) -> str:
    content = '{"list": [' * depth + "1" + "]}" * depth
    return f'{{"format": "npgp", "version": 1, "content": {content}}}'


def _truncated(share: float) -> Path:
    path = _saved()
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    return path


def _flipped(place: float) -> Path:
    path = _saved()
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 0x10
    path.write_bytes(bytes(data))
    return path


def _written(content: bytes) -> Path:
    path = Path(tempfile.mkdtemp()) / "file.npz"
    path.write_bytes(content)
    return path


def _class_of(name: str) -> Callable[[dict[str, Any]], None]:
    def change(header):
        header["content"]["class"] = name

    return change


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update(values)


def _pickled() -> Path:
    path = Path(tempfile.mkdtemp()) / "pickled.npz"
    np.savez(path, npgp=np.array([{"a": 1}], dtype=object))
    return path


#: Bytes of an array that expands: far more than its file has.
EXPANDED = 2**26


def _bomb(named: bool = False) -> Path:
    """A small file of a large array of zeros, which the header names or not."""
    path = _saved() if not named else _rewritten(_set(content={"numpy": "999"}))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("999.npy", _npy(np.zeros(EXPANDED, np.uint8)))
    return path


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


DAMAGED: dict[str, Callable[[], Path]] = {
    "an empty file": lambda: _written(b""),
    "text": lambda: _written(b"hello"),
    "an empty archive": lambda: _written(b"PK\x05\x06" + bytes(18)),
    "another program's arrays": lambda: (np.savez(path := Path(tempfile.mkdtemp()) / "a.npz", a=np.ones(3)), path)[1],
    "pickled objects": _pickled,
    "a folder": lambda: Path(tempfile.mkdtemp()),
    "half of it": lambda: _truncated(0.5),
    "nine tenths of it": lambda: _truncated(0.9),
    "a bit flipped early": lambda: _flipped(0.3),
    "a bit flipped late": lambda: _flipped(0.7),
    "no header's content": lambda: _rewritten(lambda h: {"format": "npgp", "version": 1}),
    "content that is empty": lambda: _rewritten(_set(content={})),
    "content of an unknown kind": lambda: _rewritten(_set(content={"pickle": "0"})),
    "content that names no array": lambda: _rewritten(_set(content={"jax": "17"})),
    "an array's name that is a list": lambda: _rewritten(_set(content={"jax": [1]})),
    "a tuple of a number": lambda: _rewritten(_set(content={"tuple": 5})),
    "a class without fields": lambda: _rewritten(_set(content={"class": "npgp.kernels:RBF"})),
    "a class whose fields are a list": lambda: _rewritten(_set(content={"class": "npgp.kernels:RBF", "fields": []})),
    "a class that is a number": lambda: _rewritten(_class_of(3)),  # type: ignore[arg-type]
    "a function for a class": lambda: _rewritten(_class_of("npgp.kernels:as_kernel")),
    "a module of Python's": lambda: _rewritten(_class_of("os:system")),
    "a class of a private module": lambda: _rewritten(_class_of("npgp.io.saving:_Builder")),
    "fields that are missing": lambda: _rewritten(lambda h: h["content"]["fields"].pop("q") and None),
    "fields that are unknown": lambda: _rewritten(lambda h: h["content"]["fields"].update(evil=1)),
    "a header that is a list": lambda: _rewritten(lambda h: [1, 2]),
    "a header that is a number": lambda: _rewritten(lambda h: "17"),
    "a header that is no JSON": lambda: _rewritten(lambda h: "{"),
    "a header of 100,000 levels": lambda: _rewritten(lambda h: _nested(100_000)),
    "a header of 900 levels": lambda: _rewritten(lambda h: _nested(900)),
    "a later version": lambda: _rewritten(_set(version=99)),
    "version none": lambda: _rewritten(_set(version=None)),
    "a version that is a list": lambda: _rewritten(_set(version=[1])),
    "a key of an unknown kind": lambda: _rewritten(_set(content={"key": "0", "impl": "dice"})),
}


@attempt(
    "error",
    "damaged, npgp.save, version, class, objects, folder, directory, is a directory, differs",
    cases={k: v for k, v in DAMAGED.items() if k != "a header of 900 levels"},
)
def test_load(make: Callable[[], Path]) -> Any:
    return npgp.load(make())


@attempt("either", "damaged, levels, npgp.save")
def test_load_a_header_of_900_levels() -> Any:
    loaded = npgp.load(DAMAGED["a header of 900 levels"]())
    for _ in range(900):
        (loaded,) = loaded
    return same(loaded, 1)


@attempt("either", "larger, bytes, limit, size, memory, damaged")
def test_load_of_a_bomb() -> Any:
    """No more than a few times what the object takes, though the archive has a large array that no object names."""
    path = _bomb()
    tracemalloc.start()
    npgp.load(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return true(most < EXPANDED / 4, f"{most} bytes for {path.stat().st_size}")


@attempt("error", "larger, bytes, limit, size, memory, damaged")
def test_load_of_an_array_that_expands() -> Any:
    return npgp.load(_bomb(named=True)).shape


@attempt("error", "path, file, No such file, npgp.save, exist", cases=("missing", "a number", "None"))
def test_load_of_a_path(what: str) -> Any:
    return npgp.load({"missing": "/nowhere/at/all.npz", "a number": 3.5, "None": None}[what])  # type: ignore[arg-type]


UNSAVABLE: dict[str, Callable[[], Any]] = {
    "a function": lambda: {"f": lambda x: x},
    "a class": lambda: npgp.RBF,
    "objects": lambda: np.array([None]),
    "strings": lambda: np.array(["a"]),
    "a key of another kind": lambda: {3: 1.0},
    "a set": lambda: {1, 2},
    "itself": lambda: (lambda l: l.append(l) or l)([]),
    "complex numbers": lambda: 1j,
    "a draw": lambda: _function(),
}


def _function() -> Any:
    with numpyro.handlers.seed(rng_seed=0):
        return p.sparse_gp().draw()


@attempt("error", "saved, list, dict, set, array, class, function, complex", cases=UNSAVABLE)
def test_save(make: Callable[[], Any]) -> Any:
    return npgp.load(_saved(make()))


@attempt("answer", cases=("a posterior", "all sorts", "over another"))
def test_save_and_load(which: str) -> Any:
    if which == "all sorts":
        obj = {"a": [1, 2.5, None, "x", True], "b": (jnp.arange(3), np.float64(2.0)), "": {}}
        found = npgp.load(_saved(obj))
        return true(found["a"] == obj["a"] and found[""] == {} and isinstance(found["b"], tuple)), same(
            found["b"][0], [0, 1, 2]
        )
    path = _saved()
    if which == "over another":
        npgp.save(path, p.sparse_gp().posterior(p.as_params(p.optimum())))
    return same(npgp.load(path).mean(p.x(p.X_NEW)), p.exact_posterior()[0])


# ---------------------------------------------------------------------------------------------------------------
# Maps and Parquet


def batched(X, y):
    f = p.sparse_gp().draw()
    with npgp.plate("data", 1200, rows=X.shape[0]):
        npgp.observe("y", f(X), p.gaussian(), obs=y)


@attempt("error", "map, file, truncated, shorter, rows, args[0], args[1]")
def test_map_that_is_truncated_while_training() -> Any:
    folder = Path(tempfile.mkdtemp())
    np.save(folder / "X.npy", np.tile(p.X, (100, 1)).astype(np.float32))
    X, y = np.load(folder / "X.npy", mmap_mode="r"), np.tile(p.Y, 100).astype(np.float32)

    def metric(params):
        os.truncate(folder / "X.npy", 200)
        return 0.0

    monitor = npgp.training.Monitor(metric, every=2)
    return p.fit(batched, X, y, steps=6, batch_size=600, steps_per_call=1, monitor=monitor).losses


@attempt("either", "big-endian, byte order, dtype, X, args[0]", cases=(">f4", ">f8", ">i4"))
def test_big_endian_map(dtype: str) -> Any:
    folder = Path(tempfile.mkdtemp())
    X, y = np.tile(p.X, (100, 1)).astype(np.float32), np.round(np.tile(p.Y, 100) * 2)
    np.save(folder / "y.npy", y.astype(dtype))
    losses = [
        p.fit(batched, X, values, batch_size=600, steps=3).losses
        for values in (np.load(folder / "y.npy", mmap_mode="r"), y.astype(np.float32))
    ]
    return same(*losses)


PARQUET: dict[str, Callable[[Path], Any]] = {
    "no such column": lambda path: npgp.training.Parquet(path, X=["a"], y="z"),
    "strings": lambda path: npgp.training.Parquet(path, X=["s"], y="b"),
    "no columns": lambda path: npgp.training.Parquet(path),
    "a window of none": lambda path: npgp.training.Parquet(path, X=["a"], y="b", window=0),
    "nulls": lambda path: _parquet_fit(path, "n"),
    "no batch_size": lambda path: p.fit(batched, npgp.training.Parquet(path, X=["a"], y="b")).losses,
    "a plate that does not scale": lambda path: (
        p.fit(_unscaled, npgp.training.Parquet(path, X=["a"], y="b"), batch_size=100).losses
    ),
}


def _unscaled(X, y):
    f = p.sparse_gp().draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), p.gaussian(), obs=y)


def _parquet_fit(path: Path, y: str) -> Any:
    return p.fit(batched, npgp.training.Parquet(path, X=["a"], y=y), batch_size=100, steps=20).losses


@attempt("error", "column, columns, Parquet, batch_size, window, plate, null, nulls, NaN", cases=PARQUET)
def test_parquet(make: Callable[[Path], Any]) -> Any:
    import pyarrow
    import pyarrow.parquet

    path = Path(tempfile.mkdtemp()) / "data.parquet"
    a, b = np.tile(p.X[:, 0], 100), np.tile(p.Y, 100)
    columns = {"a": a, "b": b, "s": ["x"] * 1200, "n": [None if i == 777 else float(v) for i, v in enumerate(b)]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return make(path)
