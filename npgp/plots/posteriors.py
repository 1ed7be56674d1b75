"""Pictures of posteriors of a model's sites, method by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from npgp.plots.figures import COLORS, MARKERS, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Sites of more entries are left out where none are named.
MANY = 30


def compare_posteriors(
    posteriors: Mapping[str, Any],
    *,
    names: Sequence[str] | Sequence[Sequence[str]] | None = None,
    truth: Mapping[str, ArrayLike] | None = None,
    labels: Mapping[str, str | Sequence[str]] | None = None,
    level: float = 0.9,
    units: str | Sequence[str] = "value",
) -> Figure:
    """
    Intervals and medians of a model's quantities by several methods, one below the other::

        draws = guide.sample_posterior(key, params, X, y, sample_shape=(1000,))
        plots.compare_posteriors(
            {"SVI": draws, "NUTS": mcmc.get_samples()}, truth={"level": 0.2}
        )
        plots.compare_posteriors(
            {"SVI": draws, "NUTS": samples}, names=[["level", "effect"], ["lengthscale"]]
        )

    Where the truth is known, the legend says how many intervals of each method hold it.

    .. code-block:: python

        draws = {
            how: {"effect": np.random.default_rng(0).normal(size=100)}
            for how in ("SVI", "NUTS")
        }
        figure = npgp.plots.compare_posteriors(draws, truth={"effect": 0.2})

    :param posteriors: for each method its draws: a dict by site, draws first, or what :func:`npgp.to_arviz` returns.
    :param names: sites to show, in order; or a list of such for each of several panels, side by side with an axis of
        their own. If omitted, in one panel, those that all methods have with at most 30 entries.
    :param truth: true values by site; of some sites only, if no more are known.
    :param labels: what rows are called, by site: a word, or one for each entry; ``name`` or ``name[i]`` if omitted.
    :param level: share of the draws that an interval holds, between its quantiles ``(1 ∓ level) / 2``.
    :param units: name of the axis; of each panel's, if there are several.
    :raises TypeError: for draws that are neither a dict nor ArviZ's.
    :raises ValueError: for no methods, a level that is no share, and sites that a method lacks or has in another shape.
    """
    if not posteriors:
        raise ValueError("posteriors is empty; there must be at least one.")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level}; it must be between 0 and 1.")
    draws = {method: _draws(method, given) for method, given in posteriors.items()}
    panels = _panels(draws, names)
    truths = {name: np.ravel(np.asarray(value, float)) for name, value in (truth or {}).items()}
    rows = [_rows(draws, panel, labels or {}, truths) for panel in panels]
    axes_names = [units] * len(panels) if isinstance(units, str) else list(units)
    if len(axes_names) != len(panels):
        raise ValueError(f"units has {len(axes_names)} names; there are {len(panels)} panels.")

    height = max(1.6 + max(len(row) for row in rows) * max(0.26, 0.13 * len(draws)), 2.4)
    shape = {"figsize": (4.6 * len(panels) + 1.2, height), "squeeze": False}
    figure, axes = subplots(1, len(panels), **shape)
    handles, known = {}, [row for panel in rows for row in panel if row.truth is not None]
    shifts = (np.arange(len(draws)) - (len(draws) - 1) / 2) * min(0.34, 0.8 / len(draws))
    for i, (method, shift) in enumerate(zip(draws, shifts, strict=True)):
        color, marker = COLORS[i % len(COLORS)], MARKERS[(i // len(COLORS)) % len(MARKERS)]
        inside = 0
        for ax, panel in zip(axes[0], rows, strict=True):
            at = np.arange(len(panel)) + shift
            shares = [(1 - level) / 2, 0.5, (1 + level) / 2]
            low, middle, high = np.transpose([np.quantile(row.draws[method], shares) for row in panel])
            lines = ax.hlines(at, low, high, color=color, lw=2)
            ax.plot(middle, at, marker, ms=4, color=color)
            inside += sum(
                row.truth is not None and a < row.truth < b for row, a, b in zip(panel, low, high, strict=True)
            )
        count = f", {inside} of {len(known)} hold the truth" if known else ""
        handles[f"{method}: intervals of {100 * level:g}%{count}"] = lines
    for ax, panel, name in zip(axes[0], rows, axes_names, strict=True):
        marked = [(row.truth, at) for at, row in enumerate(panel) if row.truth is not None]
        if marked:
            handles["truth"] = ax.plot(*np.transpose(marked), "k|", ms=14, mew=1.2)[0]
        ax.set_yticks(np.arange(len(panel)), [row.label for row in panel])
        ax.set_ylim(max(map(len, rows)) - 0.5, -0.5)  # rows are of one height in all panels
        ax.set_xlabel(name)
    axes[0, 0].set_ylabel("quantity")
    for ax in axes[0, 1:]:
        ax.set_ylabel(" ")
    figure.legend([*handles.values()], [*handles], loc="outside upper center", ncols=1, frameon=False, fontsize=8)
    return figure


class _Row:
    """One number of a model: its draws by method, its name and its true value."""

    def __init__(self, label: str, draws: dict[str, np.ndarray], truth: float | None):
        self.label, self.draws, self.truth = label, draws, truth


def _draws(method: str, given: Any) -> dict[str, np.ndarray]:
    """Draws by site, (draws, …)."""
    if isinstance(given, Mapping) and "posterior" not in given:
        return {name: np.asarray(value) for name, value in given.items()}
    try:
        group = given["posterior"]
        sites = {str(name): np.asarray(group[name].values) for name in group.data_vars}
    except (AttributeError, KeyError, TypeError, IndexError):
        raise TypeError(
            f"posteriors has a {type(given).__name__} for {method!r}; it must be a dict of draws by site, or what "
            "npgp.to_arviz returns."
        ) from None
    return {name: value.reshape(-1, *value.shape[2:]) for name, value in sites.items()}  # of chains and draws


def _panels(draws: dict[str, dict[str, np.ndarray]], names: Any) -> list[list[str]]:
    if names is None:
        first, *others = draws.values()
        shapes = {name: np.shape(value)[1:] for name, value in first.items()}
        common = [
            name
            for name, shape in shapes.items()
            if np.prod(shape, dtype=int) <= MANY
            and all(np.shape(o.get(name, 0))[1:] == shape for o in others)
            and all(name in o for o in others)
        ]
        if not common:
            raise ValueError(f"posteriors have no site of at most {MANY} entries in common: name sites.")
        return [common]
    if isinstance(names, str) or not len(names):
        raise ValueError(f"names is {names!r}; it must be a list of sites, or of lists of sites.")
    return [list(names)] if isinstance(names[0], str) else [list(panel) for panel in names]


def _rows(
    draws: dict[str, dict[str, np.ndarray]], names: list[str], labels: Mapping[str, Any], truth: dict[str, np.ndarray]
) -> list[_Row]:
    rows = []
    for name in names:
        for method, sites in draws.items():
            if name not in sites:
                raise ValueError(f"the draws of {method!r} have no {name!r}; they have {sorted(sites)}.")
        shapes = {method: np.shape(sites[name])[1:] for method, sites in draws.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"{name} has different shapes: {shapes}.")
        shape = next(iter(shapes.values()))
        size = int(np.prod(shape, dtype=int))
        flat = {method: np.reshape(sites[name], (-1, size)) for method, sites in draws.items()}
        given = labels.get(name, name)
        if isinstance(given, str):
            found = [given + ("" if not shape else str(list(map(int, i)))) for i in np.ndindex(*shape)]
        else:
            found = [str(label) for label in given]
        true = truth.get(name)
        for what, length in (("labels", len(found)), ("truth", size if true is None else len(true))):
            if length != size:
                raise ValueError(f"{what} has {length} entries for {name!r}, which has {size}.")
        for i, label in enumerate(found):
            values = {method: value[:, i] for method, value in flat.items()}
            rows.append(_Row(label, values, None if true is None else float(true[i])))
    return rows
