"""
Batches of data that are no arrays: what a source of them is, and one of whatever Python can iterate over.

What a source gives is a function of seed and batch number alone, so training that starts anew at a batch gets what the
uninterrupted training got.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from npgp import checks

__all__ = ["Source", "Stream"]

Batch = tuple[Any, ...] | dict[str, Any]


@runtime_checkable
class Source(Protocol):
    """
    What :func:`npgp.fit` can draw batches from.

    A source may have a method ``fingerprint()`` as well, which returns a string that other data have not: checkpoints
    keep it, to go on with the same data only. Of sources without one they know the first batch.

    .. code-block:: python

        import itertools


        class Halves:  # the first and the last fifteen rows in turn
            num_rows = 30

            def batches(self, seed, batch_size, first):
                for i in itertools.count(first):
                    rows = slice(15) if i % 2 == 0 else slice(15, None)
                    yield {"X": X[rows], "y": y[rows]}


        assert isinstance(Halves(), npgp.training.Source)  # for npgp.fit(svi, key, 100, Halves())
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
    """Whether a dtype is one of floats, JAX's own such as bfloat16 included."""
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

    def __iter__(self):
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
