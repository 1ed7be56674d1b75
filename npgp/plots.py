"""Pictures of fitted models, with matplotlib (``pip install npgp[plots]``). Each function draws one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from npgp.posteriors import Decomposition

# Distinguishable for colour-blind readers (Okabe & Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def _subplots(*shape: int, **kwargs) -> tuple[Figure, Any]:
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install npgp[plots].") from error
    return plt.subplots(*shape, layout="constrained", **kwargs)


def plot_latents(
    mean: ArrayLike,
    scale: ArrayLike,
    relevance: ArrayLike,
    labels: ArrayLike,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """
    The two most relevant latent dimensions, coloured by class, each point with bars of one standard deviation.

    :param mean: latent means, (N, Q), Q at least 2.
    :param scale: their standard deviations, (N, Q).
    :param relevance: of each dimension, (Q,); the two largest are shown, the largest across.
    :param labels: classes 0, 1, …, (N,).
    :param class_names: what to call them.
    :param title: of the figure.
    """
    mean, scale, labels = np.asarray(mean), np.asarray(scale), np.asarray(labels)
    across, up = np.argsort(-np.asarray(relevance))[:2]
    figure, ax = _subplots(figsize=(6.4, 5.4))
    for i, label in enumerate(np.unique(labels)):
        rows, colour = labels == label, COLOURS[i % len(COLOURS)]
        name = f"class {label}" if class_names is None else class_names[int(label)]
        x, y = mean[rows, across], mean[rows, up]
        ax.errorbar(x, y, xerr=scale[rows, across], yerr=scale[rows, up], fmt="none", ecolor=colour, alpha=0.25, lw=0.8)
        ax.scatter(x, y, s=9, color=colour, label=name)
    ax.set_xlabel(f"latent dimension {across + 1} (most relevant)")
    ax.set_ylabel(f"latent dimension {up + 1}")
    ax.legend(frameon=False, markerscale=2)
    if title:
        ax.set_title(title)
    return figure


def plot_relevance(relevance: Mapping[str, ArrayLike], threshold: float | None = None) -> Figure:
    """
    Relevance of the latent dimensions, sorted, for one or several fits.

    :param relevance: for each fit, relevances (Q,), the largest being 1.
    :param threshold: where a dimension begins to count, drawn as a line.
    """
    figure, ax = _subplots(figsize=(6.4, 3.6))
    width = 0.8 / len(relevance)
    for i, (name, values) in enumerate(relevance.items()):
        values = np.sort(np.asarray(values))[::-1]
        ax.bar(
            np.arange(len(values)) + (i - (len(relevance) - 1) / 2) * width, values, width, color=COLOURS[i], label=name
        )
        ax.set_xticks(np.arange(len(values)), [str(k + 1) for k in range(len(values))])
    if threshold is not None:
        ax.axhline(threshold, color="0.4", lw=0.8, ls="--", label=f"counts as relevant above {threshold:g}")
    ax.set_xlabel("latent dimension, by rank")
    ax.set_ylabel("relevance (largest = 1)")
    ax.legend(frameon=False)
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
    measured: ArrayLike, mean: ArrayLike, scale: ArrayLike, column_names: Sequence[str] | None = None
) -> Figure:
    """
    Measured against reconstructed values, one panel per column, with bars of two standard deviations.

    :param measured: (N, D).
    :param mean: reconstruction, (N, D).
    :param scale: its standard deviation with noise, (N, D).
    :param column_names: titles of the panels.
    """
    measured, mean, scale = np.asarray(measured), np.asarray(mean), np.asarray(scale)
    columns = measured.shape[1]
    across = min(4, columns)
    down = -(-columns // across)
    figure, axes = _subplots(down, across, figsize=(2.5 * across, 2.4 * down), squeeze=False, sharex=True, sharey=True)
    for d, ax in enumerate(axes.flat):
        if d >= columns:
            ax.set_visible(False)
            continue
        ax.errorbar(measured[:, d], mean[:, d], yerr=2 * scale[:, d], fmt="none", ecolor=COLOURS[0], alpha=0.15, lw=0.8)
        ax.scatter(measured[:, d], mean[:, d], s=3, color=COLOURS[0])
        ends = [min(measured.min(), mean.min()), max(measured.max(), mean.max())]
        ax.plot(ends, ends, color="0.3", lw=0.8)
        rmse = np.sqrt(np.mean((measured[:, d] - mean[:, d]) ** 2))
        name = f"column {d + 1}" if column_names is None else column_names[d]
        ax.set_title(f"{name}, RMSE {rmse:.3f}", fontsize=9)
    figure.supxlabel("measured")
    figure.supylabel("reconstructed, ± 2 standard deviations")
    return figure


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
