"""Pictures of tables: each column's entries, reconstructed or imputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

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
