"""The attempts, a file for each theme."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from studies.safety.attempt import REGISTRY, Attempt


def load() -> dict[str, Attempt]:
    """All attempts by name."""
    for path in sorted(Path(__file__).parent.glob("on_*.py")):
        import_module(f"studies.safety.attempts.{path.stem}")
    return REGISTRY
