"""Pictures of latent space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from npgp.gplvm.race import GPLVMFit
from npgp.gplvm.relevance import CanonicalLatents, canonical_latents, predictive_variance
from npgp.plots.figures import COLORS, MARKERS, shaped, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Points along each side of a background that is given as a function.
BACKGROUND_SIZE = 80


def plot_latents(
    mean: ArrayLike | GPLVMFit | CanonicalLatents | Mapping[str, ArrayLike],
    scale: ArrayLike | None = None,
    relevance: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    *,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    background: Callable[[np.ndarray], ArrayLike] | tuple[tuple[ArrayLike, ArrayLike], ArrayLike] | None = None,
    background_label: str = "predictive variance of f, mean over columns",
    dimension_names: Sequence[str] | None = None,
    units: str | None = None,
) -> Figure:
    """
    The two most relevant latent dimensions, colored by class, each point with bars of one standard deviation.

    Of a fit, with the variance of its functions behind the points, in lengthscales::

        plot_latents(npgp.gplvm.fit(key, Y, latent_dim=10, num_inducing=25), labels)
        plot_latents(npgp.fit(svi, key, 4000, Y), labels)  # of a BayesianGPLVM

    .. code-block:: python

        loc = np.random.default_rng(0).normal(size=(20, 3))
        figure = npgp.plots.plot_latents(
            loc, None, np.array([1.0, 0.5, 0.1]), np.repeat([0, 1], 10)
        )

    :param mean: what a fit returns, its parameters, or :func:`npgp.gplvm.canonical_latents` of them, with the labels as
        the only further array; or latent means, (N, Q), Q at least 2.
    :param scale: of means, their standard deviations, (N, Q); ``None`` for no bars.
    :param relevance: of means, that of each dimension, (Q,); the two largest are shown, the largest across.
    :param labels: classes 0, 1, …, (N,), and negative numbers for rows without one; one color if omitted.
    :param class_names: names of the classes 0, 1, ….
    :param title: of the figure.
    :param background: what is drawn in gray behind the points, the darker the larger (by its square root if nowhere
        negative): a function from points (G, 2) of the plane that is shown to values (G,), or increasing coordinates
        and the values there, ``((x, y), values)`` of shapes (X,), (Y,) and (Y, X).
    :param background_label: what these values are.
    :param dimension_names: what to call the Q dimensions.
    :param units: of the latents.
    :raises ValueError: for arrays of other shapes.
    """
    latents = _latents_of(mean)
    if latents is not None:
        if isinstance(mean, GPLVMFit) and background is None:
            background = predictive_variance(mean.posterior, latents)
        labels = scale if labels is None else labels
        mean, scale, relevance = latents.loc, latents.scale, latents.relevance
        dimension_names, units = dimension_names or latents.names, units or "lengthscales"
    if relevance is None:
        raise ValueError("relevance is missing: with latent means it must be (Q,).")
    mean = np.asarray(mean)
    if mean.ndim != 2 or mean.shape[1] < 2:
        raise ValueError(f"mean has shape {mean.shape}; it must be (N, Q), Q at least 2.")
    scale = None if scale is None else shaped("scale", scale, mean.shape)
    relevance = shaped("relevance", relevance, mean.shape[1:])
    labels = None if labels is None else shaped("labels", labels, mean.shape[:1])
    if class_names is not None and labels is not None and np.max(labels) >= len(class_names):
        raise ValueError(
            f"class_names has {len(class_names)} names, and labels the class {np.max(labels)}; classes count from 0."
        )
    across, up = np.argsort(-relevance, kind="stable")[:2]
    figure, ax = subplots(figsize=(6.4, 5.4))
    for name, rows, color, marker in _classes(labels, class_names, len(mean)):
        x, y = mean[rows, across], mean[rows, up]
        if scale is not None:
            bars = {"xerr": scale[rows, across], "yerr": scale[rows, up]}
            ax.errorbar(x, y, **bars, fmt="none", ecolor=color, alpha=0.25, lw=0.8)
        ax.scatter(x, y, s=11, color=color, label=name, marker=marker, edgecolor="w", linewidth=0.25, zorder=3)
    if background is not None:
        _draw_background(ax, background, background_label)
    names = dimension_names or [f"latent dimension {k + 1}" for k in range(mean.shape[1])]
    unit = "" if units is None else f", in {units}"
    ax.set_xlabel(f"{names[across]} (most relevant){unit}")
    ax.set_ylabel(f"{names[up]} (second most relevant){unit}")
    if labels is not None:
        # Below the panel: within, it would cover points.
        ax.legend(frameon=False, markerscale=2, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    if title:
        ax.set_title(title)
    return figure


def _latents_of(given: Any) -> CanonicalLatents | None:
    """Of a fit, its parameters or its latents, what is drawn; ``None`` for arrays."""
    if isinstance(given, CanonicalLatents):
        return given
    if isinstance(given, GPLVMFit):
        return given.latents
    params = given if isinstance(given, Mapping) else getattr(given, "params", None)
    return None if params is None else canonical_latents(params)


def _classes(
    labels: np.ndarray | None, class_names: Sequence[str] | None, count: int
) -> list[tuple[str | None, np.ndarray, str, str]]:
    """Name, rows, color and marker of each class, and of rows without a label."""
    if labels is None:
        return [(None, np.ones(count, bool), COLORS[0], MARKERS[0])]
    series: list[tuple[str | None, np.ndarray, str, str]] = []
    for i, label in enumerate(np.unique(labels[labels >= 0])):
        name = f"class {label}" if class_names is None else class_names[int(label)]
        marker = MARKERS[i // len(COLORS) % len(MARKERS)]
        series.append((name, labels == label, COLORS[i % len(COLORS)], marker))
    if np.any(labels < 0):
        series.append(("no label", labels < 0, "0.4", MARKERS[0]))
    return series


def _draw_background(ax: Any, background: Any, label: str) -> None:
    """Gray behind the points that are drawn already, as far as these and their bars reach."""
    if callable(background):
        limits = ax.get_xlim(), ax.get_ylim()
        x, y = (np.linspace(start, stop, BACKGROUND_SIZE) for start, stop in limits)
        grid = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
        values = shaped("background of the grid", background(grid), (len(grid),)).reshape(len(y), len(x))
    else:
        (x, y), values = background
        x, y = np.ravel(x), np.ravel(y)
        values = shaped("background", values, (*y.shape, *x.shape))
        limits = (x[0], x[-1]), (y[0], y[-1])
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    grays = LinearSegmentedColormap.from_list("light grays", ["1.0", "0.55"])  # points stand out against these
    # A variance is nearly 0 where the points are: its square root shows more.
    norm = PowerNorm(0.5, 0.0, np.max(values)) if np.min(values) >= 0 else None
    image = ax.pcolormesh(x, y, values, cmap=grays, norm=norm, shading="gouraud", rasterized=True, zorder=0)
    ax.set(xlim=limits[0], ylim=limits[1])
    ax.figure.colorbar(image, ax=ax, label=label, pad=0.02)


def plot_relevance(
    relevance: Mapping[str, ArrayLike],
    *,
    threshold: float | None = None,
    label: str = "relevance (largest = 1)",
    by_rank: bool = True,
) -> Figure:
    """
    Relevance of the latent dimensions, for one or several fits.

    .. code-block:: python

        figure = npgp.plots.plot_relevance({"tight": np.array([1.0, 0.4, 0.01])})

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
    figure, ax = subplots(figsize=(6.4, 3.6))
    width = 0.8 / len(fits)
    for i, (name, values) in enumerate(fits.items()):
        values = np.sort(values)[::-1] if by_rank else values
        left = np.arange(len(values)) + (i - (len(fits) - 1) / 2) * width
        if threshold is not None:
            name = f"{name} ({np.sum(values >= threshold)} of {len(values)})"
        ax.bar(left, values, width, color=COLORS[i % len(COLORS)], label=name)
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
