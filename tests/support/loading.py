"""Scripts as modules, for tests of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # where scripts look for one another


def path(name: str) -> Path:
    """Where ``NAME.py`` is among the scripts."""
    (found,) = SCRIPTS.rglob(f"{name}.py")
    return found


def script(name: str) -> ModuleType:
    """The script ``NAME.py``, run anew but for what it does as a program."""
    spec = importlib.util.spec_from_file_location(name, path(name))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
