"""
Runs every Python block of README.md, of the pages in docs/ and of docstrings as a test: what readers copy works as it
stands. The blocks of docstrings take those of docs/api/index.rst for granted, as readers are told there.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.rest import PythonCodeBlockParser as DocstringBlockParser
from sybil.sybil import SybilCollection

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
    if "matplotlib" in sys.modules:
        import matplotlib.pyplot

        matplotlib.pyplot.close("all")


@cache
def _granted() -> dict[str, Any]:
    page = (Path(__file__).parent / "docs" / "api" / "index.rst").read_text()
    block = re.search(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", page, re.MULTILINE)
    assert block is not None
    names: dict[str, Any] = {}
    exec(compile(textwrap.dedent(block[1]), "docs/api/index.rst", "exec"), names)
    return names


def _enter_docstrings(namespace: dict[str, Any]) -> None:
    _enter(namespace)
    namespace.update(_granted())


_pages = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/howto/*.md"],
    setup=_enter,
    teardown=_leave,
)
_docstrings = Sybil(
    parsers=[DocstringBlockParser()],
    patterns=["npgp/*.py", "npgp/*/*.py", "npgp/*/*/*.py"],
    setup=_enter_docstrings,
    teardown=_leave,
)
pytest_collect_file = SybilCollection([_pages, _docstrings]).pytest()
