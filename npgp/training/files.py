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


class Rows:
    """
    Rows of an array on the host, of any of which copies can be had.

    Those of a map of a file (``numpy.memmap``) are read from the file. Pages of a map that have been looked at would
    count as the process's memory, up to the whole file; and the first look at a page costs more than a read.

    :param x: the array, (N, …).
    """

    def __init__(self, x: np.ndarray):
        self.x = np.asarray(x)
        self._file: int | None = None
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
            if self.read(ends).tobytes() != self.x[ends].tobytes():  # replaced since
                self._file = None

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Copies of rows, by their numbers of any shape: (*rows.shape, …)."""
        if self._file is None:
            return self.x[rows]
        size = self.x.itemsize * int(np.prod(self.x.shape[1:]))
        file, pread = self._file, os.pread
        offsets = (self._first + rows.ravel().astype(np.int64) * self.x.strides[0]).tolist()
        data = b"".join([pread(file, size, offset) for offset in offsets])
        return np.frombuffer(data, self.x.dtype).reshape(*rows.shape, *self.x.shape[1:])
