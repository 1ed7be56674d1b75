"""Runs every Python block of README.md and of the pages in docs/ as a test: what readers copy works as it stands."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

os.environ["MPLBACKEND"] = "Agg"


def _enter(namespace: dict[str, Any]) -> None:
    """Each page begins in an empty folder and ends there: what it saves is nobody else's."""
    namespace["__folder"] = tempfile.TemporaryDirectory()
    namespace["__before"] = Path.cwd(), jax.config.jax_enable_x64
    os.chdir(namespace["__folder"].name)


def _leave(namespace: dict[str, Any]) -> None:
    folder, double = namespace["__before"]
    os.chdir(folder)
    namespace["__folder"].cleanup()
    jax.config.update("jax_enable_x64", double)
    if "matplotlib" in vars(__import__("sys"))["modules"]:
        import matplotlib.pyplot

        matplotlib.pyplot.close("all")


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/howto/*.md"],
    setup=_enter,
    teardown=_leave,
).pytest()
