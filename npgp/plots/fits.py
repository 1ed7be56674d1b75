"""Pictures of training, and of fits on one input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from npgp.plots.figures import COLORS, subplots
from npgp.variational.posterior import Decomposition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from npgp.training import Convergence


def plot_elbo(traces: Mapping[str, ArrayLike], *, rows: int = 1, window: int = 100) -> Figure:
    """
    ELBO traces of one or several fits, averaged over a window of steps.

    .. code-block:: python

        figure = npgp.plots.plot_elbo({"SVGP": np.linspace(-100.0, -10.0, 200)})
        figure.savefig("elbo.png")

    :param traces: for each fit, the ELBO at each step.
    :param rows: number of data rows: the ELBO is shown per row.
    :param window: steps averaged over.
    """
    figure, ax = subplots(figsize=(6.4, 4.2))
    lowest, highest = np.inf, -np.inf
    for i, (name, trace) in enumerate(traces.items()):
        trace = np.asarray(trace, float) / rows
        size = min(window, max(len(trace) // 10, 1))
        smooth = np.convolve(trace, np.full(size, 1.0 / size), mode="valid")
        steps = np.arange(len(smooth)) + size
        ax.plot(steps, smooth, color=COLORS[i], label=f"{name}: {smooth[-1]:.2f} at the end")
        lowest, highest = min(lowest, np.quantile(smooth, 0.1)), max(highest, smooth.max())
    margin = 0.08 * (highest - lowest)
    ax.set_ylim(lowest - margin, highest + margin)  # the first steps are far below and would hide the rest
    ax.set_xlabel("step")
    ax.set_ylabel("ELBO per row (nats)" if rows > 1 else "ELBO (nats)")
    ax.legend(frameon=False, loc="lower right")
    return figure


def plot_convergence(convergence: Convergence) -> Figure:
    """
    How far the posterior of each latent site moved between looks at a training, over its steps.

    .. code-block:: python

        looks = ((500, {"level": 2.0, "f.u": 1.0}), (1000, {"level": 0.4, "f.u": 0.2}))
        last = looks[-1][1]
        figure = npgp.plots.plot_convergence(
            npgp.training.Convergence(True, 1000, (), last, last, looks)
        )

    :param convergence: of what :func:`npgp.fit` returned, ``result.convergence``. Dotted lines are where the learning
        rate fell; the six sites that moved most at the end have colors.
    :raises ValueError: if the posterior was looked at less than twice.
    """
    looks = convergence.history
    if not looks:
        raise ValueError("convergence has no history: training ended before its posterior had been looked at twice.")
    figure, ax = subplots(figsize=(6.4, 4.2))
    steps = [step for step, _ in looks]
    ends = np.cumsum([taken for _, taken in convergence.rates])[:-1]
    for i, end in enumerate(ends):
        ax.axvline(end, color="0.6", lw=0.8, ls=":", label="the learning rate falls" if i == 0 else None)
    names = sorted(looks[-1][1], key=lambda name: -looks[-1][1][name])
    for i, name in enumerate(names):
        style = {"color": COLORS[i], "label": name} if i < len(COLORS) else {"color": "0.8", "zorder": 1}
        ax.plot(steps, [max(moved[name], 1e-3) for _, moved in looks], marker=".", ms=4, lw=1.2, **style)
    ax.axhline(0.1, color="0.3", lw=0.8, ls="--", label="a tenth")
    ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("moved since the look before (sds)")
    ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9, ncols=4)
    return figure


def plot_fit(
    x: ArrayLike,
    y: ArrayLike,
    grid: ArrayLike,
    fits: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike]],
    *,
    exact: tuple[ArrayLike, ArrayLike] | None = None,
) -> Figure:
    """
    Regression on one input: data, predictive mean, two standard deviations with noise, and inducing inputs.

    .. code-block:: python

        mean, variance = posterior.mean_and_variance(X)
        figure = npgp.plots.plot_fit(
            X[:, 0], y, X[:, 0], {"SVGP": (mean, np.sqrt(variance), Z)}
        )

    :param x: inputs, (N,).
    :param y: targets, (N,).
    :param grid: inputs of the predictions, (G,), increasing.
    :param fits: for each panel its name, with predictive mean and standard deviation at the grid, and inducing inputs.
    :param exact: mean and standard deviation of a reference, drawn in each panel.
    """
    figure, axes = subplots(len(fits), 1, figsize=(7.0, 2.9 * len(fits)), squeeze=False, sharex=True, sharey=True)
    grid = np.asarray(grid)
    for ax, (name, (mean, scale, inducing)), color in zip(axes[:, 0], fits.items(), COLORS, strict=False):
        mean, scale = np.asarray(mean), np.asarray(scale)
        ax.scatter(x, y, s=6, color="0.6", label="data")
        ax.plot(grid, mean, color=color, label="mean ± 2 standard deviations")
        ax.fill_between(grid, mean - 2 * scale, mean + 2 * scale, color=color, alpha=0.2, lw=0)
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
            color=color,
            label="inducing inputs",
        )
        ax.set_title(name, fontsize=10)
        ax.set_ylabel("y")
    axes[-1, 0].set_xlabel("x")
    # Above the first panel's title: within a panel it would cover data, wherever it were.
    axes[0, 0].legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.08))
    return figure


def plot_decomposition(
    X: ArrayLike, decomposition: Decomposition, *, data: tuple[ArrayLike, ArrayLike] | None = None
) -> Figure:
    """
    The parts of a posterior of f on one input and their total, a panel for each: mean and two standard deviations.

    .. code-block:: python

        figure = npgp.plots.plot_decomposition(X, posterior.decompose(X), data=(X, y))

    :param X: the inputs of the decomposition, (N, 1) or (N,).
    :param decomposition: from :meth:`npgp.variational.Posterior.decompose`, of one output.
    :param data: inputs and targets, drawn with the total.
    :raises ValueError: for more than one input column, or more than one output.
    """
    x = _column(X)
    mean, variance = _parts(decomposition, len(x))
    panels = [*zip(decomposition.names, mean, variance, strict=True), ("total", mean.sum(0), variance.sum(0))]
    figure, axes = subplots(1, len(panels), figsize=(2.7 * len(panels), 2.9), sharex=True, sharey=True)
    order = np.argsort(x)
    for i, (ax, (name, part, spread)) in enumerate(zip(axes, panels, strict=True)):
        total = i == len(panels) - 1
        color = "k" if total else COLORS[i % len(COLORS)]
        if total and data is not None:
            ax.scatter(*map(np.ravel, data), s=6, color="0.6", label="data")
        center, scale = part[order], np.sqrt(spread[order])
        ax.plot(x[order], center, color=color, label="mean ± 2 standard deviations")
        ax.fill_between(x[order], center - 2 * scale, center + 2 * scale, color=color, alpha=0.2, lw=0)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("x")
    axes[0].set_ylabel("f")
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def plot_variance(
    X: ArrayLike, decompositions: Mapping[str, Decomposition], *, data: tuple[ArrayLike, ArrayLike] | None = None
) -> Figure:
    """
    Where the variance that is left comes from: two panels for each fit on one input.

    Above, the posterior of f, mean and two standard deviations, with each block's part of the mean. Below, its variance
    as a stack: what q(ε) leaves of each block's, and the residual's, of which predictions keep all. A large residual
    amid the data is variance that no data can take away from these features.

    .. code-block:: python

        figure = npgp.plots.plot_variance(X, {"SVGP": posterior.decompose(X)}, data=(X, y))

    :param X: the inputs of the decompositions, (N, 1) or (N,).
    :param decompositions: from :meth:`npgp.variational.Posterior.decompose`, of one output each, by name.
    :param data: inputs and targets, drawn with the posterior.
    :raises ValueError: for no fits, and for more than one input column or output.

    Source: after figures 3 to 5 of Tiao, Dutordoir & Picheny 2023.
    """
    if not decompositions:
        raise ValueError("decompositions is empty; there must be at least one.")
    x = _column(X)
    order = np.argsort(x)
    size = (max(3.4 * len(decompositions), 5.0), 5.2)
    figure, axes = subplots(2, len(decompositions), figsize=size, squeeze=False, sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    for (above, below), (fit, parts) in zip(axes.T, decompositions.items(), strict=True):
        means, variances = _parts(parts, len(x))
        if data is not None:
            handles["data"] = above.scatter(*map(np.ravel, data), s=5, color="0.6")
        colors = (*COLORS[: len(means) - 1], "0.75")
        center, scale = np.sum(means, 0)[order], np.sqrt(np.sum(variances, 0))[order]
        handles["mean ± 2 standard deviations"] = above.plot(x[order], center, color="k", lw=1.0, zorder=3)[0]
        above.fill_between(x[order], center - 2 * scale, center + 2 * scale, color="k", alpha=0.15, lw=0)
        for name, mean, color in zip(parts.names[:-1], means, colors, strict=False):
            handles[name] = above.plot(x[order], mean[order], color=color, lw=1.2)[0]
        handles["residual"] = below.stackplot(x[order], variances[:, order], colors=colors)[-1]
        above.set_title(fit, fontsize=10)
        below.set_xlabel("x")
    axes[0, 0].set_ylabel("f")
    axes[1, 0].set_ylabel("posterior variance of f")
    axes[1, 0].set_ylim(bottom=0.0)
    handles["residual"] = handles.pop("residual")  # after the blocks of every fit
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _parts(decomposition: Decomposition, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances of the parts of one output, each (parts, rows)."""
    mean, variance = np.asarray(decomposition.mean), np.asarray(decomposition.variance)
    if mean.shape != (len(decomposition.names), rows):
        raise ValueError(
            f"decomposition.mean has shape {mean.shape}; parts of one output at the {rows} rows of X can be drawn, "
            f"({len(decomposition.names)}, {rows})."
        )
    return mean, variance


def _column(X: ArrayLike) -> np.ndarray:
    """Inputs of one column, (N,)."""
    x = np.asarray(X)
    if x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.ndim != 1:
        raise ValueError(f"X has shape {x.shape}; parts can be drawn for one input column, (N, 1).")
    return x
