"""The house as docs/architecture.md draws it: imports run one way."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import npgp

ROOT = Path(npgp.__file__).parent

#: Floors from the ground up: what is on one may import what is below it, not beside it and not above it. A folder's own
#: files may import each other, without circles.
FLOORS = [
    {"context", "contract", "pytrees"},
    {"programs"},
    {"checks", "densities"},
    {"linalg", "chunks"},
    {"kernels"},
    {"likelihoods", "features"},
    {"functionals"},
    {"sparse", "predictions"},
    {"conditionals", "inducing", "neighbors"},
    {"variational"},
    {"collapsed"},
    {"model"},
    {"training"},
    {"io"},
    {"gplvm", "inference"},
    {"plots", "datasets"},
]
LEVEL = {room: level for level, floor in enumerate(FLOORS) for room in floor}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a folder's ``__init__`` has the folder's."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["npgp", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(name: str) -> set[str]:
    """The package's modules that a module imports, anywhere in it, those for type checkers included."""
    targets = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "npgp"}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            if node.module and node.module.partition(".")[0] == "npgp":
                # ``from folder import name``: the name is a module, or something that the folder's __init__ offers.
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= {target if target in MODULES else node.module for target in inner}
    return targets


def room(name: str) -> str:
    return name.split(".")[1]


@cache
def arrows() -> dict[str, set[str]]:
    return {name: imported(name) for name in MODULES}


def test_every_module_has_a_floor():
    rooms = {room(name) for name in MODULES if name != "npgp"}
    assert rooms == set(LEVEL), "put new files and folders on a floor, and in docs/architecture.md"


def is_below(target: str, name: str) -> bool:
    return target != "npgp" and (room(target) == room(name) or LEVEL[room(target)] < LEVEL[room(name)])


def test_imports_run_down():
    wrong = [
        f"{name} -> {target}"
        for name, targets in arrows().items()
        for target in targets
        if name != "npgp" and not is_below(target, name)
    ]
    assert not wrong, f"imports that run up or across: {wrong}"


def test_there_is_no_circle():
    # A folder's __init__ imports the folder's files, which therefore must not import from it.
    try:
        list(TopologicalSorter(arrows()).static_order())
    except CycleError as error:
        pytest.fail(f"imports run in a circle: {' -> '.join(error.args[1])}")


def test_a_wrong_import_is_seen():
    with pytest.raises(CycleError):
        list(TopologicalSorter({**arrows(), "npgp.checks": {"npgp.io.saving"}}).static_order())


def test_numpyros_messages_are_seen_in_one_folder():
    """Who else needs them imports what ``npgp.contract`` or ``npgp.model`` wraps."""
    names = ("_PYRO_STACK", "apply_stack", "Messenger", "_NumPyroOptim", "_SingletonConstraint")
    for name, path in MODULES.items():
        if name == "npgp.contract" or room_or_none(name) == "model":
            continue
        text = path.read_text()
        assert not [word for word in names if word in text], name


def room_or_none(name: str) -> str | None:
    return None if name == "npgp" else room(name)


def test_the_workflow_tests_every_folder_once():
    workflow = ROOT.parent / ".github" / "workflows" / "test.yml"
    if not workflow.exists():
        pytest.skip("no workflows in what is published")
    shards = re.findall(r"^          - ([a-z ]+)$", workflow.read_text(), re.MULTILINE)
    folders = {path.name for path in (ROOT.parent / "tests").iterdir() if any(path.glob("test_*.py"))}
    assert sorted(" ".join(shards).split()) == sorted(folders - {"notebooks"})  # those scripts/docs runs
