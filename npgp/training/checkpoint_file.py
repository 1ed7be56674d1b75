"""
A checkpoint as one file: a header in JSON and the bytes of all arrays, each with a checksum.

The file's mark is at both ends, so that it is known for one of ours whichever of its bytes is damaged, or cut off.
"""

from __future__ import annotations

import json
import math
import os
import struct
import uuid
import zlib
from pathlib import Path
from typing import Any

import numpy as np

#: Changes with the format of checkpoints; only those of this version are read.
VERSION = 1
MARK = b"npgp checkpoint\n"
#: Between mark and header: the header's length, and the checksum of that and the header.
_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")


class Damaged(Exception):
    """A file is a checkpoint, and not as it was written."""


def is_ours(path: Path) -> bool:
    """Whether a file is a checkpoint, whole or damaged."""
    with open(path, "rb") as file:
        if file.read(len(MARK)) == MARK:
            return True
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(MARK)))
        return file.read() == MARK


def write(path: Path, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """
    Write a checkpoint. It appears when it is complete, or not at all.

    :param path: of the file, where nothing may be yet.
    :param header: what is to be known beside the arrays, for JSON.
    :param arrays: by name, contiguous.
    :raises OSError: if it cannot be written.
    """
    if path.exists():
        raise FileExistsError(f"{str(path)!r} is there already")
    parts: list[Any] = [np.ravel(x).view(np.uint8).data for x in arrays.values()]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    kinds = {name: [str(x.dtype), x.shape] for name, x in arrays.items()}
    text = json.dumps({"npgp": VERSION, **header, "arrays": kinds, "checksum": checksum}).encode()
    length = _LENGTH.pack(len(text))
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            file.write(MARK + length + _CHECKSUM.pack(zlib.crc32(length + text)) + text)
            for part in (*parts, MARK):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """A name for a file that is to become another."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """
    Header and arrays of a checkpoint.

    :raises ValueError: for another version of the format.
    :raises Damaged: if it is not as it was written.
    :raises OSError: if it cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(MARK) + _LENGTH.size + _CHECKSUM.size)
        left = size - len(start) - len(MARK)
        if left < 0 or not start.startswith(MARK):
            raise Damaged("its beginning is not that of a checkpoint")
        packed, checksum = start[len(MARK) : -_CHECKSUM.size], start[-_CHECKSUM.size :]
        (length,) = _LENGTH.unpack(packed)
        text = file.read(length) if length <= left else b""
        if _CHECKSUM.pack(zlib.crc32(packed + text)) != checksum:
            raise Damaged("its header is not the one that was written")
        header = json.loads(text)
        if header["npgp"] != VERSION:
            raise ValueError(f"{str(path)!r} has version {header['npgp']!r} of its format; this npgp reads {VERSION}.")
        kinds = {name: (np.dtype(dtype), shape) for name, (dtype, shape) in header["arrays"].items()}
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in kinds.values()]
        if left != length + sum(sizes):
            raise Damaged("the file has another length than the one that was written")
        content = np.fromfile(file, np.uint8, sum(sizes))
        if zlib.crc32(content.data) != header["checksum"] or file.read() != MARK:
            raise Damaged("the arrays are not those that were written")
    return header, taken_apart(content, kinds)


def taken_apart(content: np.ndarray, kinds: dict[str, tuple[Any, Any]]) -> dict[str, np.ndarray]:
    """Arrays by name from the bytes of all, and dtype and shape of each."""
    arrays, end = {}, 0
    for name, (dtype, shape) in kinds.items():
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        arrays[name] = content[start:end].view(dtype).reshape(shape).copy()
    return arrays
