"""What all pictures share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from npgp.checks import optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Distinguishable for color-blind readers (Okabe & Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
#: Dots per inch: sharp in print and on slides.
DPI = 150
#: Where there are more series than colors.
MARKERS = ("o", "^", "s", "D")


def subplots(*shape: int, **kwargs: Any) -> tuple[Figure, Any]:
    """
    A figure and its panels, as ``plt.subplots`` gives them, with 150 dots per inch where the settings say nothing.

    .. code-block:: python

        figure, axes = npgp.plots.subplots(1, 2)
    """
    plt = optional("matplotlib.pyplot", extra="plots", what="a picture")
    if plt.rcParams["figure.dpi"] == plt.rcParamsDefault["figure.dpi"]:
        kwargs.setdefault("dpi", DPI)
    return plt.subplots(*shape, layout="constrained", **kwargs)


def shaped(name: str, value: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """An array, which has to have a shape."""
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}.")
    return array
