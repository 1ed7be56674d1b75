"""Pictures of training, and of fits on one input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from npgp.plots.figures import COLOURS, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from npgp.posteriors import Decomposition, Posterior


def plot_elbo(traces: Mapping[str, ArrayLike], rows: int = 1, window: int = 100) -> Figure:
    """
    ELBO traces of one or several fits, averaged over a window of steps.

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
        ax.plot(steps, smooth, color=COLOURS[i], label=f"{name}: {smooth[-1]:.2f} at the end")
        lowest, highest = min(lowest, np.quantile(smooth, 0.1)), max(highest, smooth.max())
    margin = 0.08 * (highest - lowest)
    ax.set_ylim(lowest - margin, highest + margin)  # the first steps are far below and would hide the rest
    ax.set_xlabel("step")
    ax.set_ylabel("ELBO per row (nats)" if rows > 1 else "ELBO (nats)")
    ax.legend(frameon=False, loc="lower right")
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
    figure, axes = subplots(len(fits), 1, figsize=(7.0, 2.9 * len(fits)), squeeze=False, sharex=True, sharey=True)
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
    x, mean, variance = _column(X), np.asarray(decomposition.mean), np.asarray(decomposition.variance)
    if mean.shape != (len(decomposition.names), len(x)):
        raise ValueError(
            f"decomposition.mean has shape {mean.shape}; parts of one output at the {len(x)} rows of X can be drawn, "
            f"({len(decomposition.names)}, {len(x)})."
        )
    panels = [*zip(decomposition.names, mean, variance, strict=True), ("total", mean.sum(0), variance.sum(0))]
    figure, axes = subplots(1, len(panels), figsize=(2.7 * len(panels), 2.9), sharex=True, sharey=True)
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


def plot_variance(
    X: ArrayLike, posteriors: Mapping[str, Posterior], data: tuple[ArrayLike, ArrayLike] | None = None
) -> Figure:
    """
    Where the variance of f is, before and after the data: a column of three panels for each fit on one input.

    Above, the posterior: mean and two standard deviations, and the mean of each part. In the middle, the prior variance
    k(x, x) as a stack of what each block explains, ``‖A_i(x)‖²``, and what all of them leave out, d(x). Below, the
    posterior variance as a stack of the same parts: what q(ε) leaves of each block's, and d(x) again, of which
    predictions keep all; on a scale of its own for each fit. Large d(x) amid the data is variance that no data can
    take away from such features.

    The variance of blocks that move the mean only is in the residual.

    :param X: inputs, (N, 1) or (N,).
    :param posteriors: of one output, by name.
    :param data: inputs and targets, drawn with the posterior.
    :raises ValueError: for more than one input column or output, or no posteriors.

    Source: after figures 3 to 5 of Tiao, Dutordoir & Picheny 2023.
    """
    x = np.sort(_column(X))
    if not posteriors or any(p.batch_shape for p in posteriors.values()):
        batches = {name: p.batch_shape for name, p in posteriors.items()}
        raise ValueError(f"posteriors has batches {batches}; there must be at least one posterior, each of one output.")
    size = (max(3.6 * len(posteriors), 5.0), 7.0)
    figure, axes = subplots(3, len(posteriors), figsize=size, squeeze=False, sharex=True)
    handles: dict[str, Any] = {}
    for (fit, before, after), (name, posterior) in zip(axes.T, posteriors.items(), strict=True):
        parts, explained = _parts(posterior, x[:, None])
        means, variances = np.asarray(parts.mean), np.asarray(parts.variance)
        if data is not None:
            handles["data"] = fit.scatter(*map(np.ravel, data), s=5, color="0.6")
        colours = (*COLOURS[: len(parts.names) - 1], "0.75")
        centre, scale = np.sum(means, 0), np.sqrt(np.sum(variances, 0))
        handles["mean ± 2 standard deviations"] = fit.plot(x, centre, color="k", lw=1.0, zorder=3)[0]
        fit.fill_between(x, centre - 2 * scale, centre + 2 * scale, color="k", alpha=0.15, lw=0)
        for part, mean, colour in zip(parts.names[:-1], means, colours, strict=False):
            handles[part] = fit.plot(x, mean, color=colour, lw=1.2)[0]
        for ax, stack in ((before, [*explained, variances[-1]]), (after, variances)):
            handles["residual"] = ax.stackplot(x, *stack, colors=colours)[-1]
            ax.set_ylim(bottom=0.0)
        for ax, first in ((fit, axes[0, 0]), (before, axes[1, 0])):
            if ax is not first:
                ax.sharey(first)
                ax.tick_params(labelleft=False)
        fit.set_title(name, fontsize=10)
        after.set_xlabel("x")
    for ax, label in zip(axes[:, 0], ("f", "prior variance of f", "posterior variance of f"), strict=True):
        ax.set_ylabel(label)
    handles["residual"] = handles.pop("residual")  # after the blocks of every fit
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


@jax.jit
def _parts(posterior: Posterior, X: jax.Array) -> tuple[Decomposition, list[jax.Array]]:
    """A posterior's parts, and the prior variance that each block explains."""
    projection = posterior.projector(X)
    explained = [jnp.sum(jnp.square(A), 0) * q.learned for A, q in zip(projection.A, posterior.q, strict=True)]
    return posterior.decompose(X), explained


def _column(X: ArrayLike) -> np.ndarray:
    """Inputs of one column, (N,)."""
    x = np.asarray(X)
    if x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.ndim != 1:
        raise ValueError(f"X has shape {x.shape}; parts can be drawn for one input column, (N, 1).")
    return x
