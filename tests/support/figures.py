"""What is asked of the figures and reports that scripts make."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image


def assert_picture(path: Path, least: int = 0) -> None:
    """There is something to be seen, on so many pixels at least in each direction."""
    with Image.open(path) as picture:
        assert min(picture.size) > least, path
        assert picture.getcolors(20) is None, path  # it has more colors


def assert_pictures(folder: Path, *names: str, least: int = 0) -> None:
    """The folder's pictures are these, and none is empty."""
    assert {path.name for path in folder.glob("*.png")} == set(names)
    for name in names:
        assert_picture(folder / name, least)


def assert_finite(value) -> None:
    """All numbers of a report, however deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            assert_finite(item)
    elif isinstance(value, float):
        assert math.isfinite(value)
