"""Scripts as modules, for tests of them."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import matplotlib.pyplot as plt

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # where scripts look for one another


def path(name: str, folder: str = "") -> Path:
    """Where ``NAME.py`` is among the scripts, or among those in folders of a name."""
    (found,) = (file for file in SCRIPTS.rglob(f"{name}.py") if folder in ("", file.parent.name))
    return found


def script(name: str, folder: str = "") -> ModuleType:
    """The script ``NAME.py``, run anew but for what it does as a program."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", path(name, folder))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it; tests have a module costs, too
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Puts JAX's precision back, which programs set for the process, and closes figures."""
    before = jax.config.jax_enable_x64
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
        plt.close("all")
