"""Batches of columns of Parquet files, read window by window."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike, NDArray

from npgp import checks
from npgp.optional import optional
from npgp.training.sources import is_float

__all__ = ["Parquet"]


class _RowGroup(NamedTuple):
    path: str
    number: int
    rows: int


class Parquet:
    """
    Batches of columns of Parquet files, read piece by piece.

    ``Parquet("flights.parquet", X=["Month", "AirTime"], y="ArrDelay")`` has batches ``{"X": (B, 2), "y": (B,)}``. To
    transform columns, for instance by a :class:`npgp.Standardizer` of :meth:`blocks`, see :meth:`map`.

    Each epoch reads the files' row groups in a random order, as many at a time as have ``window`` rows together, and
    shuffles their rows; a batch may begin in one window and end in the next. N mod B rows, chosen at random, are left
    out: all rows have the same chance of being in an epoch, no row is in it twice, and the mean over an epoch's batches
    is an unbiased estimate. A single batch has rows of one window only, though, or of two. Where neighboring rows are
    alike, as in a file sorted by date, that calls for windows of many row groups: a larger window, or row groups of
    some ten thousand rows (``row_group_size`` of ``pyarrow.parquet.write_table``, a million if not given).

    Memory: one window and one row group, of the columns that are used. Starting at a later batch reads no window
    before that batch's.

    .. code-block:: python

        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"x": X[:, 0], "y": y}), "rows.parquet")
        rows = npgp.training.Parquet("rows.parquet", X=["x"], y="y")

    :param paths: one file or several.
    :param dtype: of the arrays, or of some of them by name, such as ``{"y": np.int32}``; JAX's default float if not
        given.
    :param window: rows that are shuffled together; a window has at least one row group.
    :param allow_nan: accept NaN and infinities, and read nulls as NaN.
    :param columns: for each argument of the model, the name of a column, or of several that become the columns of a
        matrix. Columns of numbers, truth values and decimals can be read.
    :raises ImportError: without pyarrow (``pip install npgp[parquet]``).
    :raises ValueError: for a column that is missing or has no numbers; in reading, for nulls, NaN and infinities.
    """

    def __init__(
        self,
        paths: str | os.PathLike | Iterable[str | os.PathLike],
        /,
        *,
        dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
        window: int = 2**20,
        allow_nan: bool = False,
        **columns: str | Sequence[str],
    ):
        if not columns:
            raise ValueError('Parquet needs columns by the name of an argument, such as X=["a", "b"], y="c".')
        window = checks.whole_number(window, "window")
        if isinstance(dtype, Mapping) and (unknown := set(dtype) - set(columns)):
            raise ValueError(f"dtype names {sorted(unknown)}, which are not among the arguments {list(columns)}.")
        self.paths = [os.fspath(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
        self.columns = {name: c if isinstance(c, str) else list(c) for name, c in columns.items()}
        self.dtype, self.window, self.allow_nan = dtype, window, allow_nan
        self._functions: dict[str, tuple[Callable, ...]] = {}
        self._groups: list[_RowGroup] = []
        parquet = _pyarrow("parquet")
        for path in self.paths:
            with parquet.ParquetFile(path) as file:
                self._check(path, file.schema_arrow)
                sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            self._groups += [_RowGroup(path, i, rows) for i, rows in enumerate(sizes) if rows]
        self._num_rows = sum(group.rows for group in self._groups)

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return self._num_rows

    def map(self, **functions: Callable[[NDArray[Any]], Any]) -> Parquet:
        """
        The same source with functions applied to its arrays, after those of earlier calls.

        :param functions: for some of the arguments, a function of that argument's array for any number of rows, which
            works row by row: (R, D) or (R,) to R rows of whatever shape. It gets float64 (or what the file has, for an
            argument with a ``dtype`` of whole numbers), and its result is cast to ``dtype``.
        """
        self._known(*functions)
        new = copy.copy(self)
        new._functions = self._functions | {n: (*self._functions.get(n, ()), f) for n, f in functions.items()}
        return new

    def blocks(self, name: str) -> Iterator[NDArray[Any]]:
        """
        The array of an argument in the order of the files, a row group at a time, in float64.

        :param name: of the argument.
        """
        self._known(name)
        return (values[name] for values in self._read(range(len(self._groups)), {name: self._dtypes()[name]}))

    def fingerprint(self) -> str:
        """
        Rows, and a checksum: of the first and the last row group's arrays, and of what the files' metadata say of the
        values in the others' columns.
        """
        parquet, used = (
            _pyarrow("parquet"),
            {c for cs in self.columns.values() for c in ([cs] if isinstance(cs, str) else cs)},
        )
        words: list[Any] = [list(self.columns.items())]
        for path in self.paths:
            with parquet.ParquetFile(path) as file:
                places = [j for j in range(len(file.schema)) if file.schema.column(j).path in used]
                for group in map(file.metadata.row_group, range(file.num_row_groups)):
                    known = [x for j in places if (x := group.column(j).statistics) is not None and x.has_min_max]
                    words.append((group.num_rows, [(x.min, x.max, x.null_count) for x in known]))
        checksum = zlib.crc32(repr(words).encode())
        for arrays in self._read(sorted({0, len(self._groups) - 1}), self._dtypes()):
            for x in arrays.values():
                checksum = zlib.crc32(np.ascontiguousarray(x).tobytes(), checksum)
        return f"{self.num_rows} rows {checksum:08x}"

    def batches(self, seed: Sequence[int], batch_size: int | None, first: int = 0) -> Iterator[dict[str, NDArray[Any]]]:
        """Dictionaries of arrays; see :class:`npgp.training.Source`."""
        if batch_size is None or not 1 <= batch_size <= self.num_rows:
            raise ValueError(f"batch_size is {batch_size}, not in 1 to {self.num_rows} (the rows of the files).")
        # Not a generator: JAX's default float is that of the caller's thread, now.
        return self._batches(
            [int(word) for word in seed], batch_size, checks.whole_number(first, "first", least=0), self._dtypes()
        )

    def _batches(self, seed, batch_size, first, dtypes) -> Iterator[dict[str, NDArray[Any]]]:
        per_epoch = self.num_rows // batch_size
        while True:
            epoch, number = divmod(first, per_epoch)
            parts: list[dict[str, NDArray[Any]]] = []
            held = 0
            for window, order in self._windows([*seed, epoch], self.num_rows % batch_size, number * batch_size):
                arrays = self._load(window, dtypes)
                while len(order):
                    rows, order = np.split(order, [batch_size - held])
                    parts.append({name: x[rows] for name, x in arrays.items()})
                    held += len(rows)
                    if held == batch_size:
                        yield {name: np.concatenate([part[name] for part in parts]) for name in dtypes}
                        parts, held = [], 0
                del arrays  # before the next window is read
            first = (epoch + 1) * per_epoch

    def _windows(self, seed: list[int], num_left_out: int, skip: int) -> Iterator[tuple[list[int], NDArray[Any]]]:
        """
        What an epoch reads: row groups, in the files' order, and the order in which their rows are used.

        :param num_left_out: how many rows the epoch does without.
        :param skip: how many rows of the others are not wanted; windows that have no other rows are left out.
        """
        rng = np.random.default_rng(seed)
        together: list[list[int]] = []
        left = 0
        for group in rng.permutation(len(self._groups)).tolist():
            if left < self._groups[group].rows:
                together.append([])
                left = max(self.window, self._groups[group].rows)
            together[-1].append(group)
            left -= self._groups[group].rows
        left_out = np.sort(rng.choice(self.num_rows, num_left_out, replace=False, shuffle=False))

        stop = 0
        for number, groups in enumerate(together, start=1):
            rows = sum(self._groups[group].rows for group in groups)
            start, stop = stop, stop + rows
            gaps = left_out[slice(*np.searchsorted(left_out, [start, stop]))] - start
            if skip < rows - len(gaps):
                # Numbers from 1: seeds that differ by a trailing zero are the same to NumPy.
                order = np.random.default_rng([*seed, number]).permutation(np.arange(rows, dtype=np.int32))
                yield sorted(groups), np.delete(order, gaps)[skip:]
            skip = max(0, skip - (rows - len(gaps)))

    def _load(self, groups: list[int], dtypes: dict[str, np.dtype]) -> dict[str, NDArray[Any]]:
        """The rows of some row groups."""
        num_rows = sum(self._groups[group].rows for group in groups)
        arrays: dict[str, NDArray[Any]] = {}
        stop = 0
        for group, values in zip(groups, self._read(groups, dtypes), strict=True):
            start, stop = stop, stop + self._groups[group].rows
            for name, x in values.items():
                if name not in arrays:
                    arrays[name] = np.empty((num_rows, *x.shape[1:]), dtypes[name])
                arrays[name][start:stop] = self._cast(
                    x, dtypes[name], f"argument {name} in {_where(self._groups[group])}"
                )
        return arrays

    def _read(self, groups: Iterable[int], dtypes: dict[str, np.dtype]) -> Iterator[dict[str, NDArray[Any]]]:
        """Arrays of each of some row groups, after :meth:`map`, not yet of the dtypes they will have."""
        parquet = _pyarrow("parquet")
        names = {name: [c] if isinstance(c := self.columns[name], str) else c for name in dtypes}
        used = sorted({column for several in names.values() for column in several})
        file, opened = None, ""
        try:
            for group in (self._groups[i] for i in groups):
                if group.path != opened:
                    if file is not None:
                        file.close()
                    file, opened = parquet.ParquetFile(group.path, pre_buffer=False), group.path
                table = _read_group(file, group, used)
                numbers = {column: self._numbers(table.column(column), column, group) for column in used}
                del table
                arrays = {}
                for name, several in names.items():
                    kind = np.float64 if is_float(dtypes[name]) else np.result_type(*(numbers[c] for c in several))
                    x = np.empty((group.rows, len(several)), kind)
                    for i, column in enumerate(several):
                        x[:, i] = numbers[column]
                    if isinstance(self.columns[name], str):
                        x = x[:, 0]
                    for function in self._functions.get(name, ()):
                        x = np.asarray(function(x))
                        if x.shape[:1] != (group.rows,):
                            raise ValueError(f"The function of {name} made shape {x.shape} of {group.rows} rows.")
                    arrays[name] = x
                yield arrays
        finally:
            if file is not None:
                file.close()

    def _numbers(self, column, name: str, group: _RowGroup) -> NDArray[Any]:
        """A column of a row group as NumPy array."""
        types, what = _pyarrow("types"), f"column {name!r} in {_where(group)}"
        if column.null_count and not self.allow_nan:
            raise ValueError(
                f"{column.null_count} of {group.rows} values of {what} are null. Remove those rows, or pass "
                "allow_nan=True to read them as NaN if the model masks them."
            )
        if types.is_boolean(column.type):
            column = column.cast("uint8")
        if column.null_count or types.is_decimal(column.type):
            column = column.cast("float64", safe=False)
        values = column.to_numpy()  # nulls of floats are NaN
        self._refuse_nan(values, what)
        return values

    def _refuse_nan(self, values: NDArray[Any], what: str) -> None:
        if not self.allow_nan and is_float(values.dtype) and (bad := np.count_nonzero(~np.isfinite(values))):
            raise ValueError(
                f"{bad} of {values.size} values of {what} are NaN or infinite. Remove those rows, or pass "
                "allow_nan=True if the model masks them."
            )

    def _cast(self, x: NDArray[Any], dtype: np.dtype, what: str) -> NDArray[Any]:
        with np.errstate(over="ignore", invalid="ignore"):
            cast = x.astype(dtype)
        if is_float(dtype):
            self._refuse_nan(cast, f"{what}, as {dtype},")
        elif bad := np.count_nonzero(cast != x):
            raise ValueError(f"{bad} of {x.size} values of {what} are not of the dtype {dtype}.")
        return cast

    def _dtypes(self) -> dict[str, np.dtype]:
        def given(name: str) -> Any:
            return self.dtype.get(name) if isinstance(self.dtype, Mapping) else self.dtype

        return {name: np.dtype(given(name) or jnp.result_type(float)) for name in self.columns}

    def _check(self, path: str, schema) -> None:
        """Raise for a column that is not there or has no numbers."""
        for name, given in self.columns.items():
            for column in [given] if isinstance(given, str) else given:
                if column not in schema.names:
                    raise ValueError(f"{path!r} has no column {column!r} (for {name}); it has {_list(schema.names)}.")
                if not _is_number(kind := schema.field(column).type):
                    raise ValueError(
                        f"Column {column!r} (for {name}) of {path!r} has type {kind}; columns of numbers can be read. "
                        "Write it as numbers first."
                    )

    def _known(self, *names: str) -> None:
        for name in names:
            if name not in self.columns:
                raise ValueError(f"There is no argument {name!r}; there are {list(self.columns)}.")


def _pyarrow(module: str) -> Any:
    return optional(f"pyarrow.{module}", extra="parquet", what="the reading of Parquet files")


def _read_group(file, group: _RowGroup, columns: list[str]):
    """A row group as a table."""
    table = file.read_row_group(group.number, columns=columns) if group.number < file.num_row_groups else None
    if table is None or table.num_rows != group.rows:
        raise ValueError(f"{group.path!r} has changed: it had {group.rows} rows in row group {group.number}.")
    return table


def _where(group: _RowGroup) -> str:
    return f"{group.path!r} (row group {group.number})"


def _is_number(kind) -> bool:
    types = _pyarrow("types")
    return any(test(kind) for test in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal))


def _list(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
