"""
Batches of data that are no arrays: what a source of them is, one of whatever Python can iterate over, and one of
Parquet files, read window by window.

What a source gives is a function of seed and batch number alone, so training that starts anew at a batch gets what the
uninterrupted training got.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike, NDArray

from npgp import checks
from npgp.checks import optional

__all__ = ["Parquet", "Source", "Stream"]

Batch = tuple[Any, ...] | dict[str, Any]


@runtime_checkable
class Source(Protocol):
    """
    Interface of sources that :func:`npgp.fit` draws batches from.

    .. code-block:: python

        import itertools


        class Halves:  # the first and the last fifteen rows in turn
            num_rows = 30

            def batches(self, seed, batch_size, first):
                for i in itertools.count(first):
                    rows = slice(15) if i % 2 == 0 else slice(15, None)
                    yield {"X": X[rows], "y": y[rows]}


        # For npgp.fit(svi, key, 100, Halves()).
        assert isinstance(Halves(), npgp.training.Source)
    """

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch; ``None`` if that is not known."""

    def batches(self, seed: Sequence[int], batch_size: int | None, first: int) -> Iterator[Batch]:
        """
        Batches without end: tuples of positional or dictionaries of keyword arguments, NumPy arrays or pytrees of them.

        All have the same structure, shapes and dtypes. What fills no batch at the end of an epoch is left out.

        :param seed: whole numbers, not negative.
        :param batch_size: rows of a batch; ``None`` if the source itself decides.
        :param first: number of the first batch, counted from zero over all epochs.
        """


def is_float(dtype: np.dtype) -> bool:
    """True for dtypes of floats, JAX's own such as bfloat16 included."""
    return jnp.issubdtype(dtype, jnp.floating)


class Stream:
    """
    Batches from anything that Python iterates over: a list, a data loader, a generator.

    A batch is a tuple or list of positional arguments, a dictionary of keyword arguments, or a single array. All have
    the shapes and dtypes of the first; the last of an epoch may have fewer rows, and is left out then.

    Where training continues at a later batch, the batches before it are drawn and thrown away: those of the first
    epoch, which say how many batches an epoch has, and those of the epoch that it continues in.

    .. code-block:: python

        batches = [{"X": X[:10], "y": y[:10]}, {"X": X[10:20], "y": y[10:20]}]
        stream = npgp.training.Stream(batches, num_rows=20)  # npgp.fit(svi, key, 100, stream)

    :param data: an iterable that gives the same batches each time; a callable ``epoch -> iterable``, for epochs that
        differ, such as shuffles by ``np.random.default_rng([seed, epoch])``, with equally many batches in each; or an
        iterator, which can be gone through once: training ends with an error where it ends, and cannot be continued.
        The random key given to :func:`npgp.fit` has no say in what these give.
    :param num_rows: rows of an epoch, if known.
    """

    def __init__(self, data: Iterable | Callable[[int], Iterable], *, num_rows: int | None = None):
        if not isinstance(data, Iterable) and not callable(data):
            raise TypeError(f"Stream takes an iterable or a callable epoch -> iterable, not a {type(data).__name__}.")
        self.data = _Once(data) if isinstance(data, Iterator) else data
        self._num_rows = num_rows

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch, if given."""
        return self._num_rows

    def batches(self, seed: Sequence[int], batch_size: int | None, first: int = 0) -> Iterator[Batch]:
        """Tuples or dictionaries; see :class:`Source`. ``batch_size`` is ``None`` or that of the data."""
        if isinstance(self.data, _Once) and (first or self.data.drawn > 1):
            raise ValueError(
                f"The iterator given to Stream cannot go to batch {first}: it can only go on from batch "
                f"{self.data.drawn}, which is where it has come to. {_REPEATABLE}"
            )
        return self._batches(batch_size, checks.whole_number(first, "first", least=0))

    def _batches(self, batch_size: int | None, first: int) -> Iterator[Batch]:
        shapes = _Shapes(batch_size)
        per_epoch = epoch = number = 0
        while True:
            if per_epoch:
                epochs = max(0, first - number) // per_epoch
                epoch, number = epoch + epochs, number + epochs * per_epoch
            start = number
            for batch in self._epoch(epoch, start, shapes):
                if number >= first:
                    yield batch
                number += 1
            if isinstance(self.data, _Once):
                raise ValueError(f"The iterator given to Stream has ended after {number} batches. {_REPEATABLE}")
            if number == start:
                raise ValueError(f"The data given to Stream have no batch in epoch {epoch}. {_REPEATABLE}")
            if per_epoch and number - start != per_epoch:
                raise ValueError(
                    f"Epoch {epoch} of the data given to Stream has {number - start} batches, and epoch 0 had "
                    f"{per_epoch}; all must have equally many."
                )
            per_epoch, epoch = number - start, epoch + 1

    def _epoch(self, epoch: int, number: int, shapes: _Shapes) -> Iterator[Batch]:
        """The whole batches of an epoch, of which the first has this number."""
        try:
            data: Any = self.data
            batches = iter(data if isinstance(data, Iterable) else data(epoch))
            shorter = None
            for batch in batches:
                if shorter is not None:
                    raise ValueError(f"{shorter} Only the last batch of an epoch may have fewer rows.")
                batch, shorter = shapes.check(batch, number)
                if shorter is None:
                    yield batch
                    number += 1
        except Exception as error:
            error.add_note(f"Stream was at batch {number}, in epoch {epoch}.")
            raise


_REPEATABLE = (
    "For training that repeats or continues, give Stream an iterable that can be gone through again, or a callable "
    "epoch -> iterable."
)


class _Once:
    """An iterator that can be begun anew as long as only its first item has been drawn: one may look at that."""

    def __init__(self, iterator: Iterator):
        self.iterator, self.drawn = iterator, 0
        self._first: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield from self._first
        for item in self.iterator:
            self.drawn += 1
            self._first = [item] if self.drawn == 1 else []
            yield item


class _Shapes:
    """The shapes and dtypes that all batches must have: those of the first one."""

    def __init__(self, batch_size: int | None):
        self.batch_size = batch_size
        self.first: Any = None

    def check(self, batch: Any, number: int) -> tuple[Batch, str | None]:
        """
        A batch with NumPy arrays for leaves, and a sentence if it has fewer rows than others.

        :raises ValueError: if it is unlike the first in any other way.
        """
        if isinstance(batch, list):
            batch = tuple(batch)
        elif not isinstance(batch, tuple | dict):
            batch = (batch,)
        batch = jax.tree.map(np.asarray, batch)
        leaves = jax.tree.leaves(batch)
        structure: Any = jax.tree.structure(batch)
        for x in leaves:
            if x.dtype.kind not in "biufc" and not is_float(x.dtype):
                raise ValueError(f"Batch {number} has an array of {x.dtype}; arrays of numbers are needed.")
        rows = next((len(x) for x in leaves if x.ndim), 0)
        if self.first is None:
            if not rows:
                raise ValueError(f"Batch {number} has no rows.")
            if self.batch_size not in (None, rows):
                raise ValueError(
                    f"batch_size is {self.batch_size}, and batch {number} has {rows} rows: leave batch_size out, or "
                    "make batches of that size."
                )
            self.first, self.rows = batch, rows
            return batch, None
        firsts = jax.tree.leaves(self.first)
        differs = f"Batch {number} has {_describe(batch)}, and the first batch has {_describe(self.first)}."
        if structure != jax.tree.structure(self.first) or [x.dtype for x in leaves] != [x.dtype for x in firsts]:
            raise ValueError(differs)
        if [x.shape for x in leaves] == [x.shape for x in firsts]:
            return batch, None
        expected = [(rows, *x.shape[1:]) if x.shape[:1] == (self.rows,) else x.shape for x in firsts]
        if rows > self.rows or [x.shape for x in leaves] != expected:
            raise ValueError(differs)
        return batch, differs


def _describe(batch: Batch) -> str:
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    return ", ".join(f"{jax.tree_util.keystr(path)}: {x.dtype}{list(x.shape)}" for path, x in leaves)


# ---------------------------------------------------------------------------------------------------------------
# Parquet


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

    def batches(self, seed: Sequence[int], batch_size: int | None, first: int = 0) -> Iterator[dict[str, NDArray[Any]]]:
        """Dictionaries of arrays; see :class:`npgp.training.Source`."""
        if batch_size is None or not 1 <= batch_size <= self.num_rows:
            raise ValueError(f"batch_size is {batch_size}, not in 1 to {self.num_rows} (the rows of the files).")
        # Not a generator: JAX's default float is that of the caller's thread, now.
        return self._batches(
            [int(word) for word in seed], batch_size, checks.whole_number(first, "first", least=0), self._dtypes()
        )

    def _batches(
        self, seed: Sequence[int], batch_size: int, first: int, dtypes: dict[str, np.dtype[Any]]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        per_epoch = self.num_rows // batch_size
        while True:
            epoch, number = divmod(first, per_epoch)
            pieces: list[dict[str, NDArray[Any]]] = []
            count = 0
            for window, order in self._windows([*seed, epoch], self.num_rows % batch_size, number * batch_size):
                arrays = self._load(window, dtypes)
                while len(order):
                    rows, order = np.split(order, [batch_size - count])
                    pieces.append({name: x[rows] for name, x in arrays.items()})
                    count += len(rows)
                    if count == batch_size:
                        yield {name: np.concatenate([piece[name] for piece in pieces]) for name in dtypes}
                        pieces, count = [], 0
                del arrays  # before the next window is read
            first = (epoch + 1) * per_epoch

    def _windows(self, seed: list[int], num_left_out: int, skip: int) -> Iterator[tuple[list[int], NDArray[Any]]]:
        """
        Windows of an epoch: row groups, in the files' order, and the order in which their rows are used.

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
        def dtype_of(name: str) -> Any:
            return self.dtype.get(name) if isinstance(self.dtype, Mapping) else self.dtype

        return {name: np.dtype(dtype_of(name) or jnp.result_type(float)) for name in self.columns}

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
