"""Batches of columns of Parquet files, read window by window."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike, NDArray

from npgp import checks
from npgp.optional import optional
from npgp.training.sources import is_float

__all__ = ["Parquet"]


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
    before that batch's. Files are read by ``pyarrow.dataset``; leave them as they are during training.

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
        self.columns = {name: c if isinstance(c, str) else list(c) for name, c in columns.items()}
        self.dtype, self.window, self.allow_nan = dtype, window, allow_nan
        self._functions: dict[str, tuple[Callable, ...]] = {}
        #: A fragment of the data set for each row group.
        self._groups: list[Any] = []
        files = [os.fspath(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
        for file in _pyarrow("dataset").dataset(files, format="parquet").get_fragments():
            self._check(file.path, file.physical_schema)
            self._groups += [group for group in file.split_by_row_group() if group.row_groups[0].num_rows]
        self._sizes = [group.row_groups[0].num_rows for group in self._groups]

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(self._sizes)

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
        dtype = {name: self._dtypes()[name]}
        return (self._read(group, dtype)[name] for group in range(len(self._groups)))

    def fingerprint(self) -> str:
        """Rows, and a checksum of what the files' metadata say of the columns in each row group."""
        words = [
            [(column, known[column]) for column in self._used(self.columns) if column in known]
            for known in (group.row_groups[0].statistics or {} for group in self._groups)
        ]
        return f"{self.num_rows} rows {zlib.crc32(repr((self.columns, self._sizes, words)).encode()):08x}"

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
            if left < self._sizes[group]:
                together.append([])
                left = max(self.window, self._sizes[group])
            together[-1].append(group)
            left -= self._sizes[group]
        left_out = np.sort(rng.choice(self.num_rows, num_left_out, replace=False, shuffle=False))

        stop = 0
        for number, groups in enumerate(together, start=1):
            rows = sum(self._sizes[group] for group in groups)
            start, stop = stop, stop + rows
            gaps = left_out[slice(*np.searchsorted(left_out, [start, stop]))] - start
            if skip < rows - len(gaps):
                # Numbers from 1: seeds that differ by a trailing zero are the same to NumPy.
                order = np.random.default_rng([*seed, number]).permutation(np.arange(rows, dtype=np.int32))
                yield sorted(groups), np.delete(order, gaps)[skip:]
            skip = max(0, skip - (rows - len(gaps)))

    def _load(self, groups: list[int], dtypes: dict[str, np.dtype]) -> dict[str, NDArray[Any]]:
        """The rows of some row groups, in the dtypes of batches."""
        arrays: dict[str, NDArray[Any]] = {}
        stop = 0
        for group in groups:
            start, stop = stop, stop + self._sizes[group]
            for name, x in self._read(group, dtypes).items():
                if name not in arrays:
                    num_rows = sum(self._sizes[group] for group in groups)
                    arrays[name] = np.empty((num_rows, *x.shape[1:]), dtypes[name])
                with np.errstate(over="ignore", invalid="ignore"):
                    arrays[name][start:stop] = cast = x.astype(dtypes[name])
                bad = ~np.isfinite(cast) & (not self.allow_nan) if is_float(cast.dtype) else cast != x
                if number := np.count_nonzero(bad):
                    what = f"{number} of {x.size} values of argument {name} in {self._where(group)}"
                    if not is_float(cast.dtype):
                        raise ValueError(f"{what} are not of the dtype {cast.dtype}.")
                    raise ValueError(
                        f"{what}, as {cast.dtype}, are NaN or infinite. Remove those rows, or pass allow_nan=True if "
                        "the model masks them."
                    )
        return arrays

    def _read(self, group: int, dtypes: dict[str, np.dtype]) -> dict[str, NDArray[Any]]:
        """Arrays of a row group, after :meth:`map`, not yet of the dtypes they will have."""
        used = self._used(dtypes)
        table = _table(self._groups[group], used)
        numbers = {column: self._numbers(table.column(column), column, group) for column in used}
        arrays = {}
        for name, dtype in dtypes.items():
            columns = self.columns[name]
            several = [numbers[column] for column in ([columns] if isinstance(columns, str) else columns)]
            kind = np.float64 if is_float(dtype) else np.result_type(*several)
            x = np.stack(several, axis=1, dtype=kind, casting="unsafe")
            x = x[:, 0] if isinstance(columns, str) else x
            for function in self._functions.get(name, ()):
                x = np.asarray(function(x))
                if x.shape[:1] != (table.num_rows,):
                    raise ValueError(f"The function of {name} made shape {x.shape} of {table.num_rows} rows.")
            arrays[name] = x
        return arrays

    def _numbers(self, column: Any, name: str, group: int) -> NDArray[Any]:
        """A column of a row group as NumPy array."""
        types = _pyarrow("types")
        if column.null_count and not self.allow_nan:
            raise ValueError(
                f"{column.null_count} of {len(column)} values of column {name!r} in {self._where(group)} are null. "
                "Remove those rows, or pass allow_nan=True to read them as NaN if the model masks them."
            )
        if types.is_boolean(column.type):
            column = column.cast("uint8")
        if column.null_count or types.is_decimal(column.type):
            column = column.cast("float64", safe=False)
        return np.asarray(column.to_numpy())  # nulls of floats are NaN

    def _dtypes(self) -> dict[str, np.dtype]:
        def given(name: str) -> Any:
            return self.dtype.get(name) if isinstance(self.dtype, Mapping) else self.dtype

        return {name: np.dtype(given(name) or jnp.result_type(float)) for name in self.columns}

    def _used(self, names: Iterable[str]) -> list[str]:
        """The columns that some arguments need."""
        several = (self.columns[name] for name in names)
        return sorted({c for cs in several for c in ([cs] if isinstance(cs, str) else cs)})

    def _where(self, group: int) -> str:
        fragment = self._groups[group]
        return f"{fragment.path!r} (row group {fragment.row_groups[0].id})"

    def _check(self, path: str, schema: Any) -> None:
        """Raise for a column that is not there or has no numbers."""
        types = _pyarrow("types")
        for name in self.columns:
            for column in self._used([name]):
                if column not in schema.names:
                    names = ", ".join(schema.names[:20]) + (", ..." if len(schema.names) > 20 else "")
                    raise ValueError(f"{path!r} has no column {column!r} (for {name}); it has {names}.")
                kind = schema.field(column).type
                if not any(f(kind) for f in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)):
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


def _table(group: Any, columns: list[str]) -> Any:
    """A row group as a table."""
    try:
        return group.to_table(columns=columns)
    except (OSError, ValueError) as error:  # Arrow's own are among these
        raise ValueError(
            f"Row group {group.row_groups[0].id} of {group.path!r} cannot be read: the file is damaged, or has changed "
            f"since Parquet opened it. ({error})"
        ) from error
