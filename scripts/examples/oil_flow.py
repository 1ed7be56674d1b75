#!/usr/bin/env python
"""Bayesian GPLVM of oil-flow measurements: what the tight bound gains over the classical one, and what is learned.

The classical bound (Titsias & Lawrence 2010) is climbed to its optimum. There both bounds are taken, at the same
parameters, and from there each is climbed on. Pictures show the bounds, the gain of each row, the latent space, the
relevance of its dimensions, reconstructed measurements, and hidden entries of new rows with their intervals.

    python scripts/examples/oil_flow.py                        simulated data, one start: one to two minutes
    python scripts/examples/oil_flow.py --data real            the data of Bishop & James 1993, a race of starts: some
                                                               minutes; with --inducing 50 twice as many
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

print("loading JAX and npgp", flush=True) if __name__ == "__main__" else None
import jax
import numpy as np

import npgp
from npgp import datasets
from npgp.gplvm import CollapsedGPLVM, NewRows
from npgp.gplvm.relevance import RELEVANT
from npgp.gplvm.start import GEODESIC, Sheets, begin

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, table, whole, write_json, write_picture

CLASSICAL, TIGHT = "classical", "tight"
CLASS_NAMES = ("homogeneous", "annular", "stratified")
COLUMN_NAMES = [f"beam {beam}, {phase}" for beam in range(1, 7) for phase in ("water", "oil")]
#: Columns that depend on each other along bent curves.
PAIRS = ((6, 0), (2, 1), (5, 11))
#: New rows, and the share of their entries that is hidden.
NEW_ROWS, HIDDEN = 100, 1 / 3
#: Rows of an island that has a label in the picture, at least.
SHOWN = 4
#: Steps by which each bound is climbed on, at most.
ON = 400


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--data", choices=["simulated", "real"], default="simulated")
    parser.add_argument("--latent-dim", type=whole, help="6 if omitted, for real data 10")
    rows = dict(default=1000, help="rows to simulate (real data: the first so many)")
    steps = dict(default=3600, help="most steps of L-BFGS from one start")
    parser.shared("seed", "out", "json", rows=rows, inducing=25, steps=steps)
    args = parser.read(argv)
    args.latent_dim = args.latent_dim or (10 if args.data == "real" else 6)
    return args


def load(args: argparse.Namespace) -> tuple[datasets.OilFlow, np.ndarray]:
    """Data, and new rows."""
    if args.data == "real":
        data, new = datasets.oil_flow("train"), datasets.oil_flow("test")
        return datasets.OilFlow(data.Y[: args.rows], data.labels[: args.rows], None), new.Y[:NEW_ROWS]
    data = datasets.simulate_oil_flow(jax.random.key(args.seed), args.rows)
    return data, datasets.simulate_oil_flow(jax.random.key(args.seed + 1), NEW_ROWS).Y


class Bounds(NamedTuple):
    """Both bounds from one place."""

    models: dict[str, CollapsedGPLVM]
    there: dict[str, float]  # at the optimum of the classical bound, nats
    on: dict[str, Any]  # each climbed on from there
    climb: Any  # of the classical bound to its optimum
    seconds: dict[str, float]

    @property
    def gain(self) -> float:
        return self.there[TIGHT] - self.there[CLASSICAL]


def compare(data: datasets.OilFlow, args: argparse.Namespace) -> Bounds:
    """Climb the classical bound; take both there; climb each on."""
    key, Y, sizes = jax.random.key(args.seed), data.Y, (args.latent_dim, args.inducing)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has not converged", RuntimeWarning)  # the table says so
        first = npgp.gplvm.pca_start(key, Y, *sizes)
        present = np.ones(Y.shape, bool)
        start = begin(first, Y, present, GEODESIC, Sheets(first.latents, Y, present))
        print("climbing the classical bound to its optimum", flush=True)
        began = time.perf_counter()
        if args.data == "real":
            climb: Any = npgp.gplvm.fit(key, Y, *sizes, conditional="prior", max_steps=args.steps)
            start = climb.gplvm.start
        else:
            climb = CollapsedGPLVM(start, conditional="prior").fit(Y, args.steps)
        seconds, on = {"climb": time.perf_counter() - began}, {}
        models = {CLASSICAL: CollapsedGPLVM(start, conditional="prior"), TIGHT: CollapsedGPLVM(start)}
        place = {name: climb.params[name] for name in models[TIGHT].init_params()}
        there = {name: float(model.bound(place, Y)) for name, model in models.items()}
        for name, model in models.items():
            began = time.perf_counter()
            print(f"climbing the {name} bound on from there", flush=True)
            on[name] = model.fit(Y, min(ON, args.steps), params=place)
            seconds[name] = time.perf_counter() - began
    return Bounds(models, there, on, climb, seconds)


def row_gains(params: dict[str, Any], columns: int) -> np.ndarray:
    """
    Nats by which the tight bound is above the classical one, row by row, at the same parameters: ½D (v − log(1 + v)),
    where v is the variance of f that the inducing points leave, in units of the noise variance.
    """
    kernel = npgp.RBF(params["lengthscale"], variance=params["variance"])
    rows = npgp.collapsed.expected_projection(kernel, params["inducing"], params["x.loc"], params["x.scale"])
    left = np.asarray(rows.residual_variance, float) / float(params["noise_variance"])
    return 0.5 * columns * (left - np.log1p(left))


def layers(Y: np.ndarray) -> np.ndarray:
    """
    The phase that each horizontal beam is in, from the lowest to the highest: "WOG", say, of water, oil and gas. A
    homogeneous or annular row has no such layers.
    """
    chords = 2.0 * np.sqrt(1.0 - np.array([0.5, 0.0, 0.5]) ** 2)
    water, oil = Y[:, 6::2] > chords / 2, Y[:, 7::2] > chords / 2
    return np.array(["".join(row) for row in np.where(water, "W", np.where(oil, "O", "G"))])


class Imputed(NamedTuple):
    """Hidden entries of new rows."""

    present: np.ndarray
    mean: np.ndarray
    scale: np.ndarray
    rmse: float
    rmse_of_means: float
    inside: float


def impute(posterior: Any, noise: npgp.Gaussian, model: CollapsedGPLVM, params: Any, new: np.ndarray, data) -> Imputed:
    """Hide a third of the entries of rows that were not trained on, and fill them in."""
    present = np.random.default_rng(0).uniform(size=new.shape) > HIDDEN
    how = dict(offset=model.start.offset)
    print(f"hiding a third of the entries of {len(new)} new rows, and filling them in", flush=True)
    found = npgp.gplvm.infer_latents(posterior, noise, new, mask=present, candidates=params["x.loc"], **how)
    mean, variance = (np.asarray(moment) for moment in found.predict(posterior, noise, **how))
    error, scale = (mean - new)[~present], np.sqrt(variance)
    naive = (np.mean(data.Y, axis=0) - new)[~present]
    inside = float(np.mean(np.abs(error) <= 2.0 * scale[~present]))
    rmse, means = (float(np.sqrt(np.mean(e**2))) for e in (error, naive))
    return Imputed(present, mean, scale, rmse, means, inside)


# ---------------------------------------------------------------------------------------------------------------
# Pictures


def draw_bounds(bounds: Bounds, rows: int) -> Any:
    """The climb, and its end: from one place each bound is climbed on."""
    blue, red = npgp.plots.COLORS[:2]
    figure, (left, right) = npgp.plots.subplots(1, 2, figsize=(9.0, 3.4))
    climb = bounds.climb.bounds / rows
    end = len(climb) - 1
    left.plot(climb, color=blue)
    left.set(xlabel="step", ylabel="bound per row (nats)", title="the climb of the classical bound")
    if np.any(np.diff(climb) < 0):
        left.set_title("the climb, which falls where a dimension is narrowed")
    left.set_ylim(np.quantile(climb, 0.1), climb.max() + 0.1 * (climb.max() - np.quantile(climb, 0.1)))
    for (name, fit), color in zip(bounds.on.items(), (blue, red), strict=True):
        trace = fit.bounds / rows
        right.plot(end + np.arange(len(trace)), trace, color=color, label=f"{name}, climbed on")
    tail = slice(max(end - max(150, *(fit.steps for fit in bounds.on.values())), 0), None)
    right.plot(np.arange(end + 1)[tail], climb[tail], color=blue)
    low, high = (bounds.there[name] / rows for name in (CLASSICAL, TIGHT))
    right.plot([end, end], [low, high], "k:", lw=1.0)
    text = dict(textcoords="offset points", ha="right", va="center", fontsize=9)
    right.annotate(f"same parameters,\n+{high - low:.3f} nats per row", (end, 0.5 * (low + high)), (-8, 0), **text)
    right.plot([end, end], [low, high], "ko", ms=4)
    top = max(float(fit.bounds[-1]) / rows for fit in bounds.on.values())
    right.set_ylim(low - 0.6 * (top - low), top + 0.5 * (top - low))
    right.set(xlabel="step", title="its end: both bounds, then each climbed on")
    right.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def draw_gain(gains: np.ndarray, params: dict[str, Any], rows: int) -> Any:
    """Which rows gain how much, and where they are."""
    from matplotlib.colors import LogNorm

    latents = npgp.gplvm.canonical_latents(params)
    inducing = latents.apply(params["inducing"])
    figure, (left, right) = npgp.plots.subplots(1, 2, figsize=(9.0, 3.8), width_ratios=(1.0, 1.35))
    low, high = np.quantile(gains, [0.005, 1.0])
    bins = np.geomspace(max(low, 1e-4 * high), high, 30)
    left.hist(np.maximum(gains, bins[0]), bins=bins, color=npgp.plots.COLORS[1])
    left.axvline(gains.mean(), color="k", ls="--", lw=1.0, label=f"mean {gains.mean():.4f}")
    left.set(xscale="log", xlabel="gain of a row (nats)", ylabel="rows")
    left.set_title(f"all {rows} rows gain, {gains.sum():.1f} nats together", fontsize=10)
    left.legend(frameon=False)
    order = np.argsort(gains)
    points = right.scatter(
        *latents.loc[order, :2].T,
        c=gains[order],
        s=12,
        cmap="YlOrRd",
        norm=LogNorm(bins[0], high),
        edgecolor="0.6",
        lw=0.2,
    )
    limits = right.get_xlim(), right.get_ylim()
    right.plot(*inducing[:, :2].T, "x", color="k", ms=5, mew=1.0, label="inducing input")
    right.set(xlim=limits[0], ylim=limits[1], xlabel="latent dimension 1, in lengthscales", ylabel="latent dimension 2")
    right.set_title("where: most at the edges of the data", fontsize=10)
    right.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.colorbar(points, ax=right, label="gain (nats)")
    return figure


def draw_latents(params: dict[str, Any], posterior: Any, data: datasets.OilFlow) -> Any:
    """The latent space, with a word on its islands."""
    latents = npgp.gplvm.canonical_latents(params)
    names = [f"latent dimension {k + 1}" for k in range(latents.loc.shape[1])]
    figure = npgp.plots.plot_latents(
        latents,
        data.labels,
        class_names=CLASS_NAMES,
        background=npgp.gplvm.predictive_variance(posterior, latents),
        dimension_names=names,
    )
    (ax, *_), codes = figure.axes, layers(data.Y)
    size, islands = np.ptp(latents.loc[:, :2], axis=0), {}
    for code in np.unique(codes[data.labels == 2]):
        rows = latents.loc[(data.labels == 2) & (codes == code), :2]
        at = np.median(rows, axis=0)
        near = [other for other in islands if np.max(np.abs(islands[other] - at) / size) < 0.04]
        if near and len(rows) >= SHOWN:  # one label for both
            islands[f"{near[0]}, {code}"] = islands.pop(near[0])
        elif len(rows) >= SHOWN:
            islands[str(code)] = at
    for code, at in islands.items():
        where = dict(xytext=(-14, -3), ha="right") if "," in code else dict(xytext=(0, 9), ha="center")
        ax.annotate(code, at, textcoords="offset points", fontsize=8, color="0.15", zorder=4, **where)
    caption = (
        "An island: stratified rows whose three horizontal beams run in the same layers, such as WWG,\n"
        "in water, water and gas from below. Where a layer's edge passes a beam, what that beam\n"
        "measures jumps: there is nothing in between."
    )
    figure.supxlabel(caption, fontsize=8, x=0.02, ha="left")
    return figure


def draw_reconstruction(data: datasets.OilFlow, mean: np.ndarray, scale: np.ndarray) -> Any:
    """Measured and reconstructed values of columns that depend on each other along bent curves."""
    figure, axes = npgp.plots.subplots(1, len(PAIRS), figsize=(3.4 * len(PAIRS), 3.7))
    for ax, (i, j) in zip(axes, PAIRS, strict=True):
        for label, (name, color) in enumerate(zip(CLASS_NAMES, npgp.plots.COLORS, strict=False)):
            rows = np.flatnonzero(data.labels == label)[:60]
            bars = dict(xerr=2 * scale[rows, i], yerr=2 * scale[rows, j], fmt="none", ecolor=color, lw=0.8, alpha=0.5)
            ax.errorbar(mean[rows, i], mean[rows, j], **bars)
            ax.plot(data.Y[rows, i], data.Y[rows, j], ".", color=color, ms=4, zorder=3, label=f"{name}, measured")
        inside = np.mean(np.abs(data.Y[:, [i, j]] - mean[:, [i, j]]) <= 2 * scale[:, [i, j]])
        ax.set(xlabel=COLUMN_NAMES[i], ylabel=COLUMN_NAMES[j])
        ax.set_title(f"{inside:.0%} inside ± 2 standard deviations", fontsize=10)
    caption = "crosses: reconstructed, ± 2 standard deviations; 60 rows of each class, trained on"
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9, title=caption)
    return figure


def draw_imputed(new: np.ndarray, imputed: Imputed) -> Any:
    """Hidden entries, of the columns in which most are hidden."""
    shown = np.sort(np.argsort(np.sum(imputed.present, axis=0), kind="stable")[:4])
    tables = (table[:, shown] for table in (new, imputed.mean, imputed.scale, imputed.present))
    return npgp.plots.plot_imputation(*tables, column_names=[COLUMN_NAMES[d] for d in shown])


# ---------------------------------------------------------------------------------------------------------------


def print_table(bounds: Bounds, rows: int) -> None:
    """Both bounds at one place, and where each climbs on to."""
    base, climb = bounds.there[CLASSICAL], bounds.climb
    steps = len(climb.bounds) - 1
    ended = "to its optimum" if climb.converged else f"for {steps} steps"
    lines = [
        (f"classical, climbed {ended}", base, steps, f"{bounds.seconds['climb']:.0f}"),
        ("tight, at the same parameters", bounds.there[TIGHT], None, None),
    ]
    for name, fit in bounds.on.items():
        lines.append((f"{name}, climbed on", float(fit.bounds[-1]), fit.steps, f"{bounds.seconds[name]:.0f}"))
    cells = [(name, f"{value / rows:.3f}", f"{value - base:+.1f}", *rest) for name, value, *rest in lines]
    print(table(("bound on the log evidence", "nats per row", "nats above the first", "steps", "seconds"), cells))


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    data, new = load(args)
    rows, columns = data.Y.shape
    print(f"oil flow, {args.data}: {rows} rows of {columns} measurements; Q = {args.latent_dim}, M = {args.inducing}")
    bounds = compare(data, args)
    params, model = bounds.on[TIGHT].params, bounds.models[TIGHT]
    there = {name: bounds.climb.params[name] for name in params}
    gains = row_gains(there, columns)
    posterior, noise = model.posterior(params, data.Y), npgp.Gaussian(variance=params["noise_variance"])
    rows_found = NewRows(params["x.loc"], params["x.scale"])
    mean, variance = rows_found.predict(posterior, noise, offset=model.start.offset, num_nodes=16)
    imputed = impute(posterior, noise, model, params, new, data)
    relevance = {name: npgp.gplvm.relevance(fit.params) for name, fit in bounds.on.items()}
    figures = {
        "bounds.png": draw_bounds(bounds, rows),
        "gain.png": draw_gain(gains, there, rows),
        "latent.png": draw_latents(params, posterior, data),
        "relevance.png": npgp.plots.plot_relevance(relevance, threshold=RELEVANT),
        "reconstruction.png": draw_reconstruction(data, np.asarray(mean), np.sqrt(np.asarray(variance))),
        "imputed.png": draw_imputed(new, imputed),
    }
    for name, figure in figures.items():
        write_picture(args.out / name, figure)
    print_table(bounds, rows)

    errors = npgp.gplvm.nearest_neighbor_errors(np.asarray(params["x.loc"] / params["lengthscale"]), data.labels)
    relevant = npgp.gplvm.effective_dimensions(relevance[TIGHT])
    report = {
        "data": args.data,
        "n_rows": rows,
        "latent_dim": args.latent_dim,
        "inducing": args.inducing,
        "converged": bool(bounds.climb.converged),
        "there": {name: value / rows for name, value in bounds.there.items()},
        "on": {name: float(fit.bounds[-1]) / rows for name, fit in bounds.on.items()},
        "gain": bounds.gain,
        "gain_of_rows": float(gains.sum()),
        "nn_errors": errors,
        "relevant_dims": relevant,
        "imputed_rmse": imputed.rmse,
        "column_means_rmse": imputed.rmse_of_means,
        "imputed_inside": imputed.inside,
    }
    ahead = rows * (report["on"][TIGHT] - report["on"][CLASSICAL])
    print(
        f"At the same parameters the tight bound is {bounds.gain:.1f} nats above the classical one, and {ahead:.1f} "
        f"once both are climbed on. {relevant} of {args.latent_dim} latent dimensions are relevant, and {errors} of "
        f"{rows} rows have a nearest neighbor of another class. Hidden entries of new rows are filled in with RMSE "
        f"{imputed.rmse:.3f} (column means: {imputed.rmse_of_means:.3f}), {imputed.inside:.0%} of them within two "
        "standard deviations."
    )
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
