"""
Runs every Python block of README.md, of the pages in docs/ and of docstrings as a test: what readers copy works as it
stands. The blocks of docstrings take those of docs/api/index.rst for granted, as readers are told there.

What the blocks of pages print and draw is kept in the folder that NPGP_PAGES names, for the site (docs/conf.py).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import tempfile
import textwrap
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import jax
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser
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


def _enter_pages(namespace: dict[str, Any]) -> None:
    """
    Where programs are not optimized (scripts/_pytest.sh), those of training are, a little: pages train until posteriors
    stand still, for thousands of steps. (Five of them took 75 s of a processor in place of 117.)
    """
    from npgp.programs.compiled import STEPS

    _enter(namespace)
    if "--xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", ""):
        STEPS["xla_backend_optimization_level"] = 1


def _leave_pages(namespace: dict[str, Any]) -> None:
    from npgp.programs.compiled import STEPS

    _leave(namespace)
    STEPS.pop("xla_backend_optimization_level", None)


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


#: Dots per inch of the site's pictures.
_DPI = 110
_evaluate = PythonEvaluator()


def _evaluate_and_keep(example: Example) -> None:
    """Run a block; what it prints and the figures that it makes go into the folder, by the block's text."""
    folder = os.environ.get("NPGP_PAGES")
    if not folder:
        return _evaluate(example)
    plt = __import__("matplotlib.pyplot").pyplot
    before, printed = set(plt.get_fignums()), io.StringIO()
    with redirect_stdout(printed):
        _evaluate(example)
    page = Path(example.path).relative_to(Path(__file__).parent).with_suffix("")
    name = "--".join(part for part in page.parts if part != "docs")
    digest = hashlib.sha256(example.parsed.strip().encode()).hexdigest()[:12]
    kept = Path(folder)
    kept.mkdir(parents=True, exist_ok=True)
    pictures = []
    for number in sorted(set(plt.get_fignums()) - before):
        pictures.append(f"{name}-{digest}-{number}.png")
        plt.figure(number).savefig(kept / pictures[-1], dpi=_DPI, bbox_inches="tight")
    (kept / f"{name}-{digest}.json").write_text(json.dumps({"printed": printed.getvalue(), "pictures": pictures}))


_pages = Sybil(
    parsers=[CodeBlockParser("python", _evaluate_and_keep), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/howto/*.md"],
    setup=_enter_pages,
    teardown=_leave_pages,
)
_docstrings = Sybil(
    parsers=[DocstringBlockParser()],
    patterns=["npgp/*.py", "npgp/*/*.py", "npgp/*/*/*.py"],
    setup=_enter_docstrings,
    teardown=_leave,
)
pytest_collect_file = SybilCollection([_pages, _docstrings]).pytest()
