"""The site's pages: every public object is on exactly one page of the API reference, and every page is reached."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import npgp

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDERS = sorted(f"npgp.{path.parent.name}" for path in Path(npgp.__file__).parent.glob("*/__init__.py"))
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
