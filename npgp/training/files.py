"""Rows of arrays that are maps of files."""

from __future__ import annotations

import mmap

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
        raise ValueError(
            f"The file {str(getattr(x, 'filename', None) or 'of a map')!r} has been cut short since it was mapped: it "
            f"has {source.size()} bytes, and {skipped + len(source)} are needed. Leave files of data as they are "
            "during training, or write new ones beside them."
        )


def read_rows(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """
    Copy rows of an array on the host, in this machine's byte order.

    Of a map of a file (``numpy.memmap``) nothing stays in memory: pages that have been looked at would count as the
    process's memory, up to the whole file.

    :param x: the array, (N, …).
    :param rows: numbers of rows, of any shape.
    :return: (*rows.shape, …).
    :raises ValueError: if it is a map of a file that has been cut short.
    """
    require_whole(x)
    source = map_of(x)
    # A private map ("c") may hold what the file does not.
    if source is None or getattr(x, "mode", None) not in ("r", "r+", "w+"):
        return native(np.asarray(x)[rows])
    source.madvise(mmap.MADV_RANDOM)  # single pages, and not those after them
    try:
        return native(np.asarray(x)[rows])
    finally:
        source.madvise(mmap.MADV_NORMAL)
        source.madvise(mmap.MADV_DONTNEED)
