"""Pictures of fitted models, with matplotlib (``pip install npgp[plots]``). Each function draws one figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from npgp.posteriors import Decomposition

# Distinguishable for colour-blind readers (Okabe & Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
#: Where there are more classes than colours.
MARKERS = ("o", "^", "s", "D")
#: Points along each side of a background that is given as a function.
BACKGROUND_SIZE = 80
#: What was not seen of an image: no grey is taken for it.
BLANK = "#c6dbef"


def _subplots(*shape: int, **kwargs) -> tuple[Figure, Any]:
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install npgp[plots].") from error
    return plt.subplots(*shape, layout="constrained", **kwargs)


def _shaped(name: str, value: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}.")
    return array


def plot_latents(
    mean: ArrayLike,
    scale: ArrayLike | None,
    relevance: ArrayLike,
    labels: ArrayLike | None = None,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    *,
    background: Callable[[np.ndarray], ArrayLike] | tuple[tuple[ArrayLike, ArrayLike], ArrayLike] | None = None,
    background_label: str = "predictive variance of f, mean over columns",
    dimension_names: Sequence[str] | None = None,
    units: str | None = None,
) -> Figure:
    """
    The two most relevant latent dimensions, coloured by class, each point with bars of one standard deviation.

    With :func:`npgp.gplvm.canonical_latents`, and the variance of the functions behind the points::

        c = canonical_latents(loc, scale, lengthscale)
        plot_latents(c.loc, c.scale, c.relevance, labels, units="lengthscales", dimension_names=c.names,
                     background=predictive_variance(posterior, c))

    :param mean: latent means, (N, Q), Q at least 2.
    :param scale: their standard deviations, (N, Q); ``None`` for no bars.
    :param relevance: of each dimension, (Q,); the two largest are shown, the largest across.
    :param labels: classes 0, 1, …, (N,), and negative numbers for rows without one; one colour if omitted.
    :param class_names: what to call them.
    :param title: of the figure.
    :param background: what is drawn in grey behind the points, the darker the larger (by its square root if nowhere
        negative): a function from points (G, 2) of the plane that is shown to values (G,), or increasing coordinates
        and the values there, ``((x, y), values)`` of shapes (X,), (Y,) and (Y, X).
    :param background_label: what these values are.
    :param dimension_names: what to call the Q dimensions.
    :param units: of the latents.
    :raises ValueError: for arrays of other shapes.
    """
    mean = np.asarray(mean)
    if mean.ndim != 2 or mean.shape[1] < 2:
        raise ValueError(f"mean has shape {mean.shape}; it must be (N, Q), Q at least 2.")
    scale = None if scale is None else _shaped("scale", scale, mean.shape)
    relevance = _shaped("relevance", relevance, mean.shape[1:])
    labels = None if labels is None else _shaped("labels", labels, mean.shape[:1])
    across, up = np.argsort(-relevance, kind="stable")[:2]
    figure, ax = _subplots(figsize=(6.4, 5.4))
    for name, rows, colour, marker in _classes(labels, class_names, len(mean)):
        x, y = mean[rows, across], mean[rows, up]
        if scale is not None:
            bars = {"xerr": scale[rows, across], "yerr": scale[rows, up]}
            ax.errorbar(x, y, **bars, fmt="none", ecolor=colour, alpha=0.25, lw=0.8)
        ax.scatter(x, y, s=11, color=colour, label=name, marker=marker, edgecolor="w", linewidth=0.25, zorder=3)
    if background is not None:
        _draw_background(ax, background, background_label)
    names = dimension_names or [f"latent dimension {k + 1}" for k in range(mean.shape[1])]
    unit = "" if units is None else f", in {units}"
    ax.set_xlabel(f"{names[across]} (most relevant){unit}")
    ax.set_ylabel(f"{names[up]}{unit}")
    if labels is not None:
        ax.legend(frameon=background is not None, markerscale=2, framealpha=0.8)
    if title:
        ax.set_title(title)
    return figure


def _classes(labels, class_names, count: int) -> list[tuple[str | None, np.ndarray, str, str]]:
    """Name, rows, colour and marker of each class, and of rows without a label."""
    if labels is None:
        return [(None, np.ones(count, bool), COLOURS[0], MARKERS[0])]
    series = []
    for i, label in enumerate(np.unique(labels[labels >= 0])):
        name = f"class {label}" if class_names is None else class_names[int(label)]
        marker = MARKERS[i // len(COLOURS) % len(MARKERS)]
        series.append((name, labels == label, COLOURS[i % len(COLOURS)], marker))
    if np.any(labels < 0):
        series.append(("no label", labels < 0, "0.4", MARKERS[0]))
    return series


def _draw_background(ax, background, label: str) -> None:
    """Grey behind the points that are drawn already, as far as these and their bars reach."""
    if callable(background):
        limits = ax.get_xlim(), ax.get_ylim()
        x, y = (np.linspace(start, stop, BACKGROUND_SIZE) for start, stop in limits)
        grid = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
        values = _shaped("background of the grid", background(grid), (len(grid),)).reshape(len(y), len(x))
    else:
        (x, y), values = background
        x, y = np.ravel(x), np.ravel(y)
        values = _shaped("background", values, (*y.shape, *x.shape))
        limits = (x[0], x[-1]), (y[0], y[-1])
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    greys = LinearSegmentedColormap.from_list("light greys", ["1.0", "0.55"])  # points stand out against these
    # A variance is nearly 0 where the points are: its square root shows more.
    norm = PowerNorm(0.5, 0.0, np.max(values)) if np.min(values) >= 0 else None
    image = ax.pcolormesh(x, y, values, cmap=greys, norm=norm, shading="gouraud", rasterized=True, zorder=0)
    ax.set(xlim=limits[0], ylim=limits[1])
    ax.figure.colorbar(image, ax=ax, label=label, pad=0.02)


def plot_relevance(
    relevance: Mapping[str, ArrayLike],
    threshold: float | None = None,
    label: str = "relevance (largest = 1)",
    *,
    by_rank: bool = True,
) -> Figure:
    """
    Relevance of the latent dimensions, for one or several fits.

    :param relevance: for each fit, relevances (Q,), the largest being 1.
    :param threshold: where a dimension begins to count, drawn as a line; and then how many count of each fit.
    :param label: what the numbers are.
    :param by_rank: whether each fit's dimensions are sorted; if not, as where fits share their dimensions, they are in
        their own order.
    :raises ValueError: for no fits, or arrays of another shape.
    """
    fits = {name: np.asarray(values, float) for name, values in relevance.items()}
    if not fits or any(values.ndim != 1 for values in fits.values()):
        shapes = {name: values.shape for name, values in fits.items()}
        raise ValueError(f"relevance has arrays of shapes {shapes}; there must be one (Q,) for each fit.")
    most = max(map(len, fits.values()))
    figure, ax = _subplots(figsize=(6.4, 3.6))
    width = 0.8 / len(fits)
    for i, (name, values) in enumerate(fits.items()):
        values = np.sort(values)[::-1] if by_rank else values
        left = np.arange(len(values)) + (i - (len(fits) - 1) / 2) * width
        if threshold is not None:
            name = f"{name} ({np.sum(values >= threshold)} of {len(values)})"
        ax.bar(left, values, width, color=COLOURS[i % len(COLOURS)], label=name)
    ax.set_xticks(np.arange(most), [str(k + 1) for k in range(most)])
    if threshold is not None:
        ax.axhline(threshold, color="0.4", lw=0.8, ls="--", label=f"counts as relevant above {threshold:g}")
    ax.set_xlabel("latent dimension, by rank" if by_rank else "latent dimension")
    ax.set_ylabel(label)
    if by_rank:
        ax.legend(frameon=False)
    else:  # a bar may be anywhere
        ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(fits) + 1)
    return figure


def plot_elbo(traces: Mapping[str, ArrayLike], rows: int = 1, window: int = 100) -> Figure:
    """
    ELBO traces of one or several fits, averaged over a window of steps.

    :param traces: for each fit, the ELBO at each step.
    :param rows: number of data rows: the ELBO is shown per row.
    :param window: steps averaged over.
    """
    figure, ax = _subplots(figsize=(6.4, 4.2))
    lowest, highest = np.inf, -np.inf
    for i, (name, trace) in enumerate(traces.items()):
        trace = np.asarray(trace, float) / rows
        size = min(window, max(len(trace) // 10, 1))
        smooth = np.convolve(trace, np.full(size, 1.0 / size), mode="valid")
        steps = np.arange(len(smooth)) + size
        ax.plot(steps, smooth, color=COLOURS[i], label=f"{name}: {smooth[-1]:.2f} at the end")
        lowest, highest = min(lowest, np.quantile(smooth, 0.1)), max(highest, smooth.max())
    margin = 0.08 * (highest - lowest)
    ax.set_ylim(lowest - margin, highest + margin)  # the first steps are far below and would hide the rest
    ax.set_xlabel("step")
    ax.set_ylabel("ELBO per row (nats)" if rows > 1 else "ELBO (nats)")
    ax.legend(frameon=False, loc="lower right")
    return figure


def plot_reconstruction(
    measured: ArrayLike,
    mean: ArrayLike,
    scale: ArrayLike,
    column_names: Sequence[str] | None = None,
    units: str | None = None,
) -> Figure:
    """
    Measured against reconstructed values, one panel per column, with bars of two standard deviations.

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
    figure.supxlabel(f"measured{unit}")
    figure.supylabel(f"reconstructed{unit}, ± 2 standard deviations")
    return figure


def plot_imputation(
    truth: ArrayLike,
    mean: ArrayLike,
    scale: ArrayLike,
    present: ArrayLike,
    column_names: Sequence[str] | None = None,
    units: str | None = None,
) -> Figure:
    """
    True against imputed values of the missing entries, one panel per column that has any, with bars of two standard
    deviations, and the mean of the column's present values for comparison.

    :param truth: all values, (N, D); NaN, where the truth is not known, is left out.
    :param mean: the imputed ones, (N, D); what it holds for present entries is not shown.
    :param scale: their standard deviation with noise, (N, D).
    :param present: True where an entry was seen, (N, D).
    :param column_names: of the D columns.
    :param units: of the measurements.
    :raises ValueError: for arrays of other shapes, or if no entry with a known truth is missing.
    """
    truth, mean, scale = _tables(truth, mean, scale, "truth")
    present = _shaped("present", present, truth.shape).astype(bool)
    missing = ~present & np.isfinite(truth)
    panels = [(d, missing[:, d]) for d in range(truth.shape[1]) if np.any(missing[:, d])]
    if not panels:
        raise ValueError("present has no missing entry whose true value is known.")
    figure, axes = _scatter_panels(panels, truth, mean, scale, column_names, coverage=True)
    for ax, (d, _) in zip(axes, panels, strict=True):
        if np.any(present[:, d]):
            level = np.mean(truth[present[:, d], d])
            ax.axhline(level, color=COLOURS[1], lw=0.9, ls="--", label="mean of the column's present values")
    unit = "" if units is None else f" ({units})"
    figure.supxlabel(f"true value{unit}")
    figure.supylabel(f"imputed{unit}, ± 2 standard deviations")
    handles = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def _tables(values, mean, scale, name: str) -> list[np.ndarray]:
    values = np.asarray(values)
    if values.ndim != 2:
        raise ValueError(f"{name} has shape {values.shape}; it must be (N, D).")
    return [values, _shaped("mean", mean, values.shape), _shaped("scale", scale, values.shape)]


def _scatter_panels(panels, x, y, scale, column_names, coverage: bool = False) -> tuple[Figure, list[Any]]:
    """
    A panel for each (column, rows) of tables (N, D), all with the same limits.

    :param coverage: whether the titles say how many values there are, and the share that the bars cover.
    """
    if column_names is not None and len(column_names) != x.shape[1]:
        raise ValueError(f"column_names has {len(column_names)} names for {x.shape[1]} columns.")
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    size = (max(2.5 * across, 3.4), 2.4 * down + 0.3 + 0.2 * coverage)
    figure, axes = _subplots(down, across, figsize=size, squeeze=False, sharex=True, sharey=True)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax in axes.flat[max(len(panels) - across, 0) : len(panels)]:
        ax.tick_params(labelbottom=True)  # also above a place without a panel
    shown = np.concatenate([values[rows, d] for d, rows in panels for values in (x, y)])
    ends = [np.min(shown), np.max(shown)]
    for ax, (d, rows) in zip(axes.flat, panels, strict=False):
        a, b, spread = x[rows, d], y[rows, d], scale[rows, d]
        ax.errorbar(a, b, yerr=2 * spread, fmt="none", ecolor=COLOURS[0], alpha=0.25, lw=0.8, rasterized=len(a) > 500)
        ax.scatter(a, b, s=4, color=COLOURS[0], label="entry, ± 2 standard deviations", zorder=3)
        ax.plot(ends, ends, color="0.3", lw=0.8, label="equal")
        error = f"RMSE {np.sqrt(np.mean((a - b) ** 2)):.3f}"
        name = f"column {d + 1}" if column_names is None else column_names[d]
        if coverage:
            inside = np.mean(np.abs(a - b) <= 2 * spread)
            error = f"{error}\n{len(a)} missing, {inside:.0%} inside the bars"
        ax.set_title(f"{name}, {error}", fontsize=9)
    return figure, list(axes.flat[: len(panels)])


def plot_images(
    images: Mapping[str, ArrayLike],
    shape: tuple[int, int],
    deviations: Mapping[str, ArrayLike] | None = None,
    label: str = "pixel value",
) -> Figure:
    """
    Images in rows of panels, one row for each name: originals above their reconstructions, say.

    :param images: for each row of panels, K images, (K, height · width) or (K, height, width), all on one grey scale.
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
        _shaped(name, values, (count, shape[0] * shape[1]))
    if not count or len(every) < len(tables) + len(spreads):
        raise ValueError("images and deviations must have images, and each row of panels a name of its own.")
    import matplotlib

    height = 1.15 * min(shape[0] / shape[1], 2.0)
    size = (1.15 * count + 1.6, height * len(every) + 0.2)
    figure, axes = _subplots(len(every), count, figsize=size, squeeze=False)
    scales = ((tables, "gray", label), (spreads, "magma", " and ".join(spreads)))
    start = 0
    for rows, colours, what in scales:
        if not rows:
            continue
        values = np.concatenate(list(rows.values()))
        limits = {"vmin": np.nanmin(values) if rows is tables else 0.0, "vmax": np.nanmax(values)}
        cmap = matplotlib.colormaps[colours].with_extremes(bad=BLANK)
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
    label: str = "pixel value",
) -> Figure:
    """
    Images of which pixels were missing: the original, what was seen, the imputed mean among what was seen, and the
    standard deviation of what was missing.

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
        _shaped(name, _pixels(name, values, shape), original.shape)
        for name, values in (("mean", mean), ("scale", scale), ("present", present))
    )
    seen = seen.astype(bool)
    rows = {
        "original": original,
        "seen": np.where(seen, original, np.nan),
        "imputed": np.where(seen, original, mean),
    }
    return plot_images(rows, shape, {"standard deviation": np.where(seen, np.nan, scale)}, label)


def plot_fit(
    x: ArrayLike,
    y: ArrayLike,
    grid: ArrayLike,
    fits: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike]],
    exact: tuple[ArrayLike, ArrayLike] | None = None,
) -> Figure:
    """
    Regression on one input: data, predictive mean, two standard deviations with noise, and inducing inputs.

    :param x: inputs, (N,).
    :param y: targets, (N,).
    :param grid: inputs of the predictions, (G,), increasing.
    :param fits: for each panel its name, with predictive mean and standard deviation at the grid, and inducing inputs.
    :param exact: mean and standard deviation of a reference, drawn in each panel.
    """
    figure, axes = _subplots(len(fits), 1, figsize=(7.0, 2.9 * len(fits)), squeeze=False, sharex=True, sharey=True)
    grid = np.asarray(grid)
    for ax, (name, (mean, scale, inducing)), colour in zip(axes[:, 0], fits.items(), COLOURS, strict=False):
        mean, scale = np.asarray(mean), np.asarray(scale)
        ax.scatter(x, y, s=6, color="0.6", label="data")
        ax.plot(grid, mean, color=colour, label="mean ± 2 standard deviations")
        ax.fill_between(grid, mean - 2 * scale, mean + 2 * scale, color=colour, alpha=0.2, lw=0)
        if exact is not None:
            ref_mean, ref_scale = map(np.asarray, exact)
            ax.plot(grid, ref_mean, color="k", lw=0.8, label="exact GP")
            for sign in (-2, 2):
                ax.plot(grid, ref_mean + sign * ref_scale, color="k", lw=0.8, ls=":")
        bottom = np.min(np.asarray(y)) - 0.6
        ax.plot(
            np.ravel(inducing),
            np.full(np.size(inducing), bottom),
            "|",
            ms=12,
            mew=2,
            color=colour,
            label="inducing inputs",
        )
        ax.set_title(name, fontsize=10)
        ax.set_ylabel("y")
    axes[-1, 0].set_xlabel("x")
    axes[0, 0].legend(frameon=False, fontsize=8, ncols=2)
    return figure


def plot_decomposition(
    X: ArrayLike, decomposition: Decomposition, data: tuple[ArrayLike, ArrayLike] | None = None
) -> Figure:
    """
    The parts of a posterior of f on one input and their total, a panel for each: mean and two standard deviations.

    :param X: the inputs of the decomposition, (N, 1) or (N,).
    :param decomposition: from :meth:`npgp.Posterior.decompose`, of one output.
    :param data: inputs and targets, drawn with the total.
    :raises ValueError: for more than one input column, or more than one output.
    """
    x, mean, variance = np.asarray(X), np.asarray(decomposition.mean), np.asarray(decomposition.variance)
    if x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.ndim != 1:
        raise ValueError(f"X has shape {x.shape}; parts can be drawn for one input column, (N, 1).")
    if mean.shape != (len(decomposition.names), len(x)):
        raise ValueError(
            f"decomposition.mean has shape {mean.shape}; parts of one output at the {len(x)} rows of X can be drawn, "
            f"({len(decomposition.names)}, {len(x)})."
        )
    panels = [*zip(decomposition.names, mean, variance, strict=True), ("total", mean.sum(0), variance.sum(0))]
    figure, axes = _subplots(1, len(panels), figsize=(2.7 * len(panels), 2.9), sharex=True, sharey=True)
    order = np.argsort(x)
    for i, (ax, (name, part, spread)) in enumerate(zip(axes, panels, strict=True)):
        total = i == len(panels) - 1
        colour = "k" if total else COLOURS[i % len(COLOURS)]
        if total and data is not None:
            ax.scatter(*map(np.ravel, data), s=6, color="0.6", label="data")
        centre, scale = part[order], np.sqrt(spread[order])
        ax.plot(x[order], centre, color=colour, label="mean ± 2 standard deviations")
        ax.fill_between(x[order], centre - 2 * scale, centre + 2 * scale, color=colour, alpha=0.2, lw=0)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("x")
    axes[0].set_ylabel("f")
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
