"""Pictures of rows that are images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from npgp.optional import optional
from npgp.plots.figures import shaped, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What was not seen of an image: no gray is taken for it.
BLANK = "#c6dbef"


def plot_images(
    images: Mapping[str, ArrayLike],
    shape: tuple[int, int],
    *,
    deviations: Mapping[str, ArrayLike] | None = None,
    label: str = "pixel value",
) -> Figure:
    """
    Images in rows of panels, one row for each name: originals above their reconstructions, say.

    .. code-block:: python

        images = np.random.default_rng(0).uniform(size=(3, 16))

        figure = npgp.plots.plot_images({"original": images, "blurred": 0.5 * images}, (4, 4))

    :param images: for each row of panels, K images, (K, height · width) or (K, height, width), all on one gray scale.
        NaN is left blank.
    :param shape: (height, width).
    :param deviations: further rows of panels, such as standard deviations, on a scale of their own from 0.
    :param label: what the numbers of ``images`` are.
    :raises ValueError: for no images, or of another shape.
    """
    tables = {name: _pixels(name, values, shape) for name, values in images.items()}
    spreads = {name: _pixels(name, values, shape) for name, values in (deviations or {}).items()}
    every = {**tables, **spreads}
    count = len(next(iter(tables.values()))) if tables else 0
    for name, values in every.items():
        shaped(name, values, (count, shape[0] * shape[1]))
    if not count or len(every) < len(tables) + len(spreads):
        raise ValueError("images and deviations must have images, and each row of panels a name of its own.")
    matplotlib = optional("matplotlib", extra="plots", what="a picture")

    height = 1.15 * min(shape[0] / shape[1], 2.0)
    size = (1.15 * count + 1.6, height * len(every) + 0.2)
    figure, axes = subplots(len(every), count, figsize=size, squeeze=False)
    scales = ((tables, "gray", label), (spreads, "magma", " and ".join(spreads)))
    start = 0
    for rows, colors, what in scales:
        if not rows:
            continue
        values = np.concatenate(list(rows.values()))
        limits = {"vmin": np.nanmin(values) if rows is tables else 0.0, "vmax": np.nanmax(values)}
        cmap = matplotlib.colormaps[colors].with_extremes(bad=BLANK)
        panels = axes[start : (start := start + len(rows))]
        for (name, pictures), line in zip(rows.items(), panels, strict=True):
            for ax, picture in zip(line, pictures, strict=True):
                image = ax.imshow(np.reshape(picture, shape), cmap=cmap, interpolation="nearest", **limits)
                ax.set(xticks=[], yticks=[])
            line[0].set_ylabel(name)
        figure.colorbar(image, ax=panels, label=what, pad=0.015, fraction=0.05, aspect=14 * len(rows))
    return figure


def _pixels(name: str, images: ArrayLike, shape: tuple[int, int]) -> np.ndarray:
    """Images as rows of pixels."""
    array = np.asarray(images, float)
    flat = array.reshape(len(array), -1) if array.ndim == 3 and array.shape[1:] == tuple(shape) else array
    if flat.ndim != 2 or flat.shape[1] != shape[0] * shape[1]:
        raise ValueError(f"{name} has shape {array.shape}; it must be (K, {shape[0] * shape[1]}) or (K, *{shape}).")
    return flat


def plot_imputed_images(
    images: ArrayLike,
    mean: ArrayLike,
    scale: ArrayLike,
    present: ArrayLike,
    shape: tuple[int, int],
    *,
    label: str = "pixel value",
) -> Figure:
    """
    Images of which pixels were missing: the original, what was seen, the imputed mean among what was seen, and the
    standard deviation of what was missing.

    .. code-block:: python

        images = np.random.default_rng(0).uniform(size=(3, 16))

        figure = npgp.plots.plot_imputed_images(
            images, images + 0.1, np.full((3, 16), 0.1), images > 0.5, (4, 4)
        )

    :param images: K images, one column of panels each, (K, height · width) or (K, height, width).
    :param mean: with the missing pixels imputed, of the same shape; of seen pixels the original is shown.
    :param scale: standard deviations of the missing pixels, of the same shape.
    :param present: True where a pixel was seen, of the same shape.
    :param shape: (height, width).
    :param label: what the numbers of ``images`` are.
    :raises ValueError: for arrays of other shapes.
    """
    original = _pixels("images", images, shape)
    mean, scale, seen = (
        shaped(name, _pixels(name, values, shape), original.shape)
        for name, values in (("mean", mean), ("scale", scale), ("present", present))
    )
    seen = seen.astype(bool)
    rows = {
        "original": original,
        "seen": np.where(seen, original, np.nan),
        "imputed": np.where(seen, original, mean),
    }
    deviations = {"standard deviation": np.where(seen, np.nan, scale)}
    return plot_images(rows, shape, deviations=deviations, label=label)
