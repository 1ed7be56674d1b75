"""Pictures of tables: each column's entries, reconstructed or imputed; and of rows that are images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from npgp.checks import optional
from npgp.plots.figures import COLORS, shaped, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Share of the bars that may be cut at either end, so that a few long ones do not set the axis.
LONGEST = 0.05


def plot_reconstruction(
    measured: ArrayLike,
    mean: ArrayLike,
    scale: ArrayLike,
    *,
    column_names: Sequence[str] | None = None,
    units: str | None = None,
) -> Figure:
    """
    Measured against reconstructed values, one panel per column, with bars of two standard deviations. Where fewer than
    one in twenty are much longer than all others, these end in a triangle at the edge.

    .. code-block:: python

        table = np.random.default_rng(0).normal(size=(20, 3))

        figure = npgp.plots.plot_reconstruction(table, table + 0.1, np.full((20, 3), 0.1))

    :param measured: (N, D); NaN, where nothing was measured, is left out.
    :param mean: reconstruction, (N, D).
    :param scale: its standard deviation with noise, (N, D).
    :param column_names: titles of the panels.
    :param units: of the measurements.
    :raises ValueError: for arrays of other shapes.
    """
    measured, mean, scale = _tables(measured, mean, scale, "measured")
    panels = [(d, np.isfinite(measured[:, d])) for d in range(measured.shape[1])]
    figure, _ = _scatter_panels(panels, measured, mean, scale, column_names)
    unit = "" if units is None else f" ({units})"
    figure.supxlabel(f"measured{unit}", fontsize=9)
    figure.supylabel(f"reconstructed{unit}, ± 2 standard deviations", fontsize=9)
    return figure


def plot_imputation(
    truth: ArrayLike,
    mean: ArrayLike,
    scale: ArrayLike,
    present: ArrayLike,
    *,
    column_names: Sequence[str] | None = None,
    units: str | None = None,
) -> Figure:
    """
    True against imputed values of the missing entries, one panel per column that has any, with bars of two standard
    deviations, and the mean of the column's present values for comparison. Where fewer than one in twenty bars are much
    longer than all others, as of rows whose latent input may be in either of two places, these end in a triangle at the
    edge.

    .. code-block:: python

        table = np.random.default_rng(0).normal(size=(20, 3))

        figure = npgp.plots.plot_imputation(
            table, table + 0.1, np.full((20, 3), 0.1), table > 0.0
        )

    :param truth: all values, (N, D); NaN, where the truth is not known, is left out.
    :param mean: the imputed ones, (N, D); what it holds for present entries is not shown.
    :param scale: their standard deviation with noise, (N, D).
    :param present: True where an entry was seen, (N, D).
    :param column_names: of the D columns.
    :param units: of the measurements.
    :raises ValueError: for arrays of other shapes, or if no entry with a known truth is missing.
    """
    truth, mean, scale = _tables(truth, mean, scale, "truth")
    present = shaped("present", present, truth.shape).astype(bool)
    missing = ~present & np.isfinite(truth)
    panels = [(d, missing[:, d]) for d in range(truth.shape[1]) if np.any(missing[:, d])]
    if not panels:
        raise ValueError("present has no missing entry whose true value is known.")
    figure, axes = _scatter_panels(panels, truth, mean, scale, column_names, coverage=True)
    for ax, (d, _) in zip(axes, panels, strict=True):
        if np.any(present[:, d]):
            level = np.mean(truth[present[:, d], d])
            ax.axhline(level, color=COLORS[1], lw=0.9, ls="--", label="mean of the column's present values")
    unit = "" if units is None else f" ({units})"
    figure.supxlabel(f"true value{unit}", fontsize=9)
    figure.supylabel(f"imputed{unit}, ± 2 standard deviations", fontsize=9)
    handles = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def _tables(values: ArrayLike, mean: ArrayLike, scale: ArrayLike, name: str) -> list[np.ndarray]:
    values = np.asarray(values)
    if values.ndim != 2:
        raise ValueError(f"{name} has shape {values.shape}; it must be (N, D).")
    return [values, shaped("mean", mean, values.shape), shaped("scale", scale, values.shape)]


def _scatter_panels(
    panels: Sequence[tuple[int, Any]],
    x: np.ndarray,
    y: np.ndarray,
    scale: np.ndarray,
    column_names: Sequence[str] | None,
    coverage: bool = False,
) -> tuple[Figure, list[Any]]:
    """
    A panel for each (column, rows) of tables (N, D), all with the same limits.

    :param coverage: whether the titles say how many values there are, and the share that the bars cover.
    """
    if column_names is not None and len(column_names) != x.shape[1]:
        raise ValueError(f"column_names has {len(column_names)} names for {x.shape[1]} columns.")
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    size = (max(2.5 * across, 3.4), 2.4 * down + 0.3 + 0.2 * coverage)
    figure, axes = subplots(down, across, figsize=size, squeeze=False, sharex=True, sharey=True)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax in axes.flat[max(len(panels) - across, 0) : len(panels)]:
        ax.tick_params(labelbottom=True)  # also above a place without a panel
    shown = np.concatenate([values[rows, d] for d, rows in panels for values in (x, y)])
    ends = [np.min(shown), np.max(shown)]
    bars = np.concatenate([y[rows, d] + 2 * sign * scale[rows, d] for sign in (-1, 1) for d, rows in panels])
    below, above = np.split(bars, 2)
    low = min(ends[0], np.nanquantile(below, LONGEST, method="lower"))
    high = max(ends[1], np.nanquantile(above, 1 - LONGEST, method="higher"))
    for ax, (d, rows) in zip(axes.flat, panels, strict=False):
        a, b, spread = x[rows, d], y[rows, d], scale[rows, d]
        bar = np.clip([b - 2 * spread, b + 2 * spread], low, high)
        style: dict[str, Any] = dict(fmt="none", ecolor=COLORS[0], alpha=0.25, lw=0.8, rasterized=len(a) > 500)
        ax.errorbar(a, b, yerr=np.abs(bar - b), **style)
        for marker, end, cut in (("v", low, b - 2 * spread < low), ("^", high, b + 2 * spread > high)):
            if np.any(cut):
                at = np.full(np.sum(cut), end)
                ax.plot(a[cut], at, marker, ms=5, color=COLORS[0], alpha=0.6, label="the bar is longer")
        ax.scatter(a, b, s=4, color=COLORS[0], label="entry, ± 2 standard deviations", zorder=3)
        ax.plot(ends, ends, color="0.3", lw=0.8, label="equal")
        error = f"RMSE {np.sqrt(np.mean((a - b) ** 2)):.3f}"
        name = f"column {d + 1}" if column_names is None else column_names[d]
        if coverage:
            inside = np.mean(np.abs(a - b) <= 2 * spread)
            error = f"{error}\n{len(a)} missing, {inside:.0%} inside the bars"
        ax.set_title(f"{name}, {error}", fontsize=9)
    return figure, list(axes.flat[: len(panels)])


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
