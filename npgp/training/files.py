"""Rows of arrays that are maps of files, read without mapping."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np


def map_of(x) -> mmap.mmap | None:
    """The map of a file that an array looks into, if it does."""
    while isinstance(x, np.ndarray):
        x = x.base
    return x if isinstance(x, mmap.mmap) else None


def native(x):
    """An array in this machine's byte order, which JAX wants; those of JAX are."""
    return x.astype(x.dtype.newbyteorder("=")) if isinstance(x, np.ndarray) and not x.dtype.isnative else x


def require_whole(x) -> None:
    """
    Raise if an array is a map of a file that has been cut short since: to look at what is missing kills the process.

    :raises ValueError: if so; other values pass.
    """
    source = map_of(x)
    if source is None:
        return
    while not isinstance(x, np.memmap) and isinstance(x.base, np.ndarray):
        x = x.base
    skipped = x.offset - x.offset % mmap.ALLOCATIONGRANULARITY if isinstance(x, np.memmap) else 0
    if source.size() < skipped + len(source):
        raise _cut_short(x, source.size(), skipped + len(source))


def _cut_short(x: np.ndarray, size: int, wanted: int) -> ValueError:
    return ValueError(
        f"The file {str(getattr(x, 'filename', None) or 'of a map')!r} has been cut short since it was mapped: it has "
        f"{size} bytes, and {wanted} are needed. Leave files of data as they are during training, or write new ones "
        "beside them."
    )


class Rows:
    """
    Rows of an array on the host, of any of which copies can be had, in this machine's byte order.

    Those of a map of a file (``numpy.memmap``) are read from the file. Pages of a map that have been looked at would
    count as the process's memory, up to the whole file; and the first look at a page costs more than a read.

    :param x: the array, (N, …).
    :raises ValueError: if it is a map of a file that has been cut short.
    """

    def __init__(self, x: np.ndarray):
        self.x = np.asarray(x)
        self._map = x
        self._row_size = self.x.itemsize * int(np.prod(self.x.shape[1:]))
        self._file: int | None = None
        require_whole(x)
        source, mode = map_of(x), getattr(x, "mode", None)
        row = self.x[:1]
        # A private map ("c") may hold what the file does not.
        if source is not None and isinstance(x, np.memmap) and mode in ("r", "r+", "w+") and row.flags.c_contiguous:
            begin = np.frombuffer(source, np.uint8).ctypes.data  # of the map, in memory
            skipped = x.offset - x.offset % mmap.ALLOCATIONGRANULARITY  # ahead of the map, in the file
            self._first = self.x.ctypes.data - begin + skipped
            try:
                self._file = os.open(str(x.filename), os.O_RDONLY)
            except OSError:  # moved since; the map still has it
                return
            weakref.finalize(self, os.close, self._file)
            ends = np.unique([0, len(self.x) - 1])
            if self._bytes(ends) != self.x[ends].tobytes():  # replaced since
                self._file = None

    def read(self, rows: np.ndarray) -> np.ndarray:
        """
        Copies of rows, by their numbers of any shape: (*rows.shape, …).

        :raises ValueError: if the file has been cut short.
        """
        if self._file is None:
            require_whole(self._map)
            return native(self.x[rows])
        data = self._bytes(rows)
        if len(data) != rows.size * self._row_size:
            wanted = self._first + max(0, self.x.strides[0] * (len(self.x) - 1)) + self._row_size
            raise _cut_short(self._map, os.fstat(self._file).st_size, wanted)
        return native(np.frombuffer(data, self.x.dtype).reshape(*rows.shape, *self.x.shape[1:]))

    def _bytes(self, rows: np.ndarray) -> bytes:
        """Rows as they are in the file, as far as it goes."""
        file, size, pread = self._file, self._row_size, os.pread
        assert file is not None
        offsets = (self._first + rows.ravel().astype(np.int64) * self.x.strides[0]).tolist()
        return b"".join([pread(file, size, offset) for offset in offsets])
