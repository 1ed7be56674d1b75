"""The site's pages: every public object is on exactly one page of the API reference, and every page is reached."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import npgp

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDERS = sorted(f"npgp.{path.parent.name}" for path in Path(npgp.__file__).parent.glob("*/__init__.py"))
#: Folders of docs/ that conf.py fills.
GENERATED = ("gallery", "results", "_build", "_outputs")
DIRECTIVE = re.compile(r"^\.\. (?:autoclass|autofunction|autoexception|py:data):: ([\w.]+)$", re.MULTILINE)


def named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def identity(value: Any, name: str) -> Any:
    """One object has one page, by whatever of its names; values such as numbers are known by name."""
    return id(value) if callable(value) else name.rpartition(".")[2]


def test_every_public_object_is_on_one_page():
    pages = sorted((DOCS / "api").glob("*.rst"))
    documented = [name for page in pages for name in DIRECTIVE.findall(page.read_text())]
    assert len(documented) > 200
    found = Counter(identity(named(name), name) for name in documented)
    assert [name for name in documented if found[identity(named(name), name)] > 1] == []
    public = {}
    for folder in ["npgp", *FOLDERS]:
        module = importlib.import_module(folder)
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, ModuleType):
                public.setdefault(identity(value, name), f"{folder}.{name}")
    assert sorted(name for key, name in public.items() if key not in found) == [], "add them to a page of docs/api"
    assert [name for name in documented if identity(named(name), name) not in public] == []


def test_pages_name_objects_by_their_shortest_public_name():
    for page in (DOCS / "api").glob("*.rst"):
        for name in DIRECTIVE.findall(page.read_text()):
            last = name.rpartition(".")[2]
            assert name == f"npgp.{last}" or named(name) is not getattr(npgp, last, None), name


def test_every_page_of_the_reference_is_in_its_table_of_contents():
    contents = (DOCS / "api" / "index.rst").read_text().split()
    assert [page.stem for page in (DOCS / "api").glob("*.rst") if page.stem not in [*contents, "index"]] == []


def test_every_block_of_pages_and_docstrings_is_collected():
    """By Sybil, whose patterns would leave out a folder that is one deeper without a word."""
    root = DOCS.parent
    pages = [root / "README.md", *(page for page in DOCS.rglob("*.md") if page.parent.name not in GENERATED)]
    blocks = {page: len(re.findall(r"^```python$", page.read_text(), re.MULTILINE)) for page in pages}
    files = (root / "npgp").rglob("*.py")
    blocks |= {file: len(re.findall(r"^ *\.\. code-block:: python$", file.read_text(), re.MULTILINE)) for file in files}
    listed = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "README.md",
        "docs",
        "npgp",
    ]
    own = {**os.environ, "PYTEST_ADDOPTS": ""}  # whatever the run around was asked for
    lines = subprocess.run(listed, cwd=root, env=own, check=True, capture_output=True, text=True).stdout.splitlines()
    found = Counter(root / line.split("::")[0] for line in lines if "::line:" in line)
    assert sum(blocks.values()) > 150
    assert {path: count for path, count in blocks.items() if count} == dict(found)


#: What functions return: nobody makes one, and the functions' examples have them.
RETURNED = {
    "npgp.collapsed": """Advice DegeneratePosterior EnoughPoints ExpectedProjection GroupNoise PsiStatistics RowNoise
        ShorterLengthscales VecchiaNoise VIFPosterior""",
    "npgp.conditionals": "Gain",
    "npgp.functionals": "Piece",
    "npgp.gplvm": "CanonicalLatents RowNormal",
    "npgp.inducing": "LevelChoice",
    "npgp.neighbors": "MeanFieldNormal MergedFactor NearPosterior NeighborPosterior Repeats VecchiaFactor Waves",
    "npgp.sparse": "GroupResidual LowRankKernel ResidualKernel RowResidual Tree",
    "npgp.training": "Best CollapsedFit Info LBFGSResult PosteriorCheck",
    "npgp.variational": """BlockNormal CorrectedPosterior Decomposition FunctionPosterior JointBlock MixedPaths
        MixedPosterior Mixture Paths ScaledProjection""",
}
#: Other public objects without an example of their own, and where there is one. The list may get shorter.
WITHOUT_EXAMPLE = {
    # Need files of NPGP_DATA, or a download.
    "npgp.datasets": "load oil_flow snelson",
    # Type aliases, which have no docstring; and what only a trained GPLVM has: docs/howto/gplvm.md, latent-missing.md.
    "npgp.gplvm": """LatentGuide LatentPrior CollapsedFit GPLVMFit Modes infer_latents predictive_variance""",
    # The optimizer's state where tables are apart: made by fit, and given back to it with FitResult.state.
    "npgp.training": "RowState",
    # Made by npgp.posterior(..., draws=...), whose example has them.
    "npgp.variational": "PathMixture PosteriorMixture",
    # Needs ArviZ: docs/howto/arviz.md.
    "npgp": "to_arviz",
}


def test_every_public_object_has_an_example_that_runs():
    names = [name for page in (DOCS / "api").glob("*.rst") for name in DIRECTIVE.findall(page.read_text())]
    objects = {name: named(name) for name in names}
    without = [
        name
        for name, value in objects.items()
        if callable(value) and ".. code-block:: python" not in (inspect.getdoc(value) or "")
    ]
    listed = [
        f"{folder}.{name}"
        for some in (RETURNED, WITHOUT_EXAMPLE)
        for folder, names in some.items()
        for name in names.split()
    ]
    assert sorted(without) == sorted(listed)


def test_signatures_show_types_as_the_source_has_them():
    """``ArrayLike``, and not the ten types that it stands for: annotations are not evaluated."""
    files = (path for path in Path(npgp.__file__).parent.rglob("*.py") if path.name != "__init__.py")
    assert [path.name for path in files if "\nfrom __future__ import annotations\n" not in path.read_text()] == []


def test_links_between_pages_lead_to_files():
    """Also where the repository is read without the site."""
    pages = [*DOCS.parent.glob("*.md"), *(p for p in DOCS.rglob("*.md") if p.parent.name not in GENERATED)]
    code = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", code.sub("", page.read_text()))]
    files = [(page, link.partition("#")[0]) for page, link in links if not re.match(r"\w+:|#", link)]
    assert len(files) > 50
    assert [(page.name, file) for page, file in files if not (page.parent / file).exists()] == []


#: Columns of code that fit the site's pages.
COLUMNS = 88


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block of code of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_code_of_pages_and_docstrings_fits_their_width():
    pages = [DOCS.parent / "README.md", *(p for p in DOCS.rglob("*.md") if p.parent.name not in GENERATED)]
    code = [
        (page.name, text) for page in pages for language, text in blocks(page) if language in ("python", "py", "sh")
    ]
    example = re.compile(r"^( *)\.\. code-block:: python\n((?:\1 .*\n|\n)+)", re.MULTILINE)
    for file in (DOCS.parent / "npgp").rglob("*.py"):
        code += [(file.name, dedent(text)) for _, text in example.findall(file.read_text())]
    lines = [(name, line) for name, text in code for line in text.splitlines()]
    assert len(lines) > 3000
    assert [(name, line) for name, line in lines if len(line) > COLUMNS] == []


def test_how_to_pages_print_or_draw():
    """Each has a picture; the site's build shows it, and fails where a page has shown nothing."""
    for page in (DOCS / "howto").glob("*.md"):
        code = "".join(text for language, text in blocks(page) if language == "python")
        assert page.stem == "index" or re.search(r"^ *figure\b", code, re.MULTILINE), page.name


#: CSS pixels of a phone that are left for a table, of a letter there on average, and around the text of a cell.
PHONE, LETTER, AROUND = 321, 6.5, 12
#: A cell of a table that is read, and not looked up, is longer.
LONG = 40


def narrowest(table: str) -> float:
    """Width of a table in CSS pixels where each column is as wide as its longest word."""
    conf = (DOCS / "conf.py").read_text()
    breaks = re.compile(re.search(r'^_BREAK = re\.compile\(r"(.*)"\)$', conf, re.MULTILINE)[1])
    words = [
        [re.split(r"\s+|(?<=[-–])", re.sub(r"`([^`]*)`", lambda name: breaks.sub(" ", name[1]), cell)) for cell in row]
        for row in cells(table)
    ]
    columns = [max(len(word.strip("*")) for row in words for word in row[k]) for k in range(len(words[0]))]
    return LETTER * sum(columns) + AROUND * len(columns)


def cells(table: str) -> list[list[str]]:
    header, _, *rows = table.splitlines()
    texts = (re.sub(r"`[^`]*`|\$[^$]*\$", lambda code: code[0].replace("|", "/"), row) for row in (header, *rows))
    return [[re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).strip() for cell in row.split("|")[1:-1]] for row in texts]


def test_tables_fit_a_phone():
    """But for those of numbers and formulas, which scroll by themselves, under their first column."""
    pages = [DOCS.parent / "README.md", *(p for p in DOCS.rglob("*.md") if p.parent.name not in GENERATED)]
    tables = [(p.name, table) for p in pages for table in re.findall(r"(?:^\|.*\n)+", p.read_text(), re.MULTILINE)]
    assert len(tables) > 50
    read = [
        (name, table)
        for name, table in tables
        if "$" not in table and any(len(cell) > LONG for row in cells(table) for cell in row[1:])
    ]
    assert len(read) > 15
    assert [(name, table.splitlines()[0]) for name, table in read if narrowest(table) > PHONE] == []
    assert all(len(cells(table)[0]) <= 7 for _, table in tables), "more columns than one scrolls through"


def test_usual_words_for_tasks_are_in_the_first_words_of_their_pages():
    """Where a search looks first: the title and the paragraphs above the program."""
    words = {
        "kriging": "map",
        "Cox process": "counts",
        "categorical inputs": "categories",
        "impute": "latent-missing",
        "Imputation": "latent-missing",
        "Preferences": "preference",
        "forecast": "time-series",
    }
    for word, page in words.items():
        assert word in (DOCS / "howto" / f"{page}.md").read_text().partition("```")[0], word
