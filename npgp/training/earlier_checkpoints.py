"""Checkpoints of version 1, which Orbax wrote, each as a folder that is called by its number of steps. Nothing in them
is changed or removed."""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from npgp.optional import optional
from npgp.training.checkpoint_file import Damaged, taken_apart

VERSION = 1


def find(directory: Path) -> dict[int, Path]:
    """The checkpoints of version 1 in a folder, whole and damaged, by their numbers of steps."""
    numbered = (path for path in directory.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name))
    headers = {int(path.name): path / "header" / "metadata" for path in numbered}
    return {step: directory / str(step) for step, x in headers.items() if x.is_file() and b'"npgp"' in x.read_bytes()}


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """
    Header and arrays.

    :raises Damaged: if it is not as it was written, or of something else.
    :raises ModuleNotFoundError: without orbax.
    """
    ocp = optional("orbax.checkpoint", extra="checkpoint", what="the reading of checkpoints of an earlier npgp")
    try:
        header = json.loads((path / "header" / "metadata").read_text())
        if header["npgp"] != VERSION:
            raise ValueError("its version is another one")
        with _quiet(), ocp.StandardCheckpointer() as checkpointer:
            content = np.asarray(checkpointer.restore(path / "arrays")["content"])
        if zlib.crc32(content.data) != header["checksum"]:
            raise ValueError("the arrays are not those that were written")
        return header, taken_apart(content, header["arrays"])
    except Exception as error:  # of whichever library met the damage
        if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError):
            raise
        raise Damaged(f"{type(error).__name__}: {str(error)[:100]}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Orbax's log; what matters becomes a warning of ours."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("absl", "asyncio"))}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
