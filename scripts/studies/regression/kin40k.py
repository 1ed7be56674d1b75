#!/usr/bin/env python
"""Minibatch SVI on tens of thousands of rows in float32: SVGP and SOLVE-GP, with three conditionals.

For each number of inducing points M: SVGP with M points that start at the centers of k-means; SOLVE-GP with M/2 + M/2,
the first at the centers of k-means and the second chosen greedily given the first; and SVGP that starts at the union of
these, without which a better start passes for a better structure. Each with the conditionals ``prior``, ``tight`` and
``grouped``: Matérn-3/2 with a lengthscale for each column, Gaussian noise, everything learned at once by Adam, in
equally many steps for all, which are too few to reach the optimum. Every fit is judged by its ELBO on all training
rows, and on the test rows by predictions from the inducing values alone and with the local correction.

    NPGP_DATA=... python scripts/studies/regression/kin40k.py --json out/kin40k.json    an hour or less on one core
    NPGP_DATA=... python scripts/studies/regression/kin40k.py --all-structures          a few steps of every structure

Other sets: ``--data protein`` or ``keggdirected``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, table, whole, write_json, write_picture
from studies.regression.layouts import STRUCTURES, Layout, Split
from studies.regression.minibatch import (
    NOISE_VARIANCE,
    VARIANCE,
    best_elbo,
    component,
    elbo_of_chunks,
    regression_model,
    scores,
    start_of_lengthscales,
)
from studies.shared import summarize, summary_table

CONDITIONALS: tuple[str, ...] = ("prior", "tight", "grouped")
#: Points of the ELBO curves in the report.
CURVE_POINTS = 100

NOTE = (
    "ELBO per row: on all training rows; of best q: with the same hyperparameters and inducing inputs, and the trained "
    "conditional or 'grouped'. RMSE and mean log-likelihood: of test rows, standardized target; +: with the local "
    "correction. Seconds: of training, compilation included. ±: standard error over splits."
)

#: What fits of several splits share, and the columns' titles.
KEYS = {"inducing": "M", "structure": "structure", "conditional": "conditional"}
#: Titles and digits; "+" is with the local correction.
FIGURES = {
    "elbo_per_row": ("ELBO per row", 4),
    "best_elbo_per_row": ("of best q", 4),
    "best_grouped_elbo_per_row": ("grouped, of best q", 4),
    "rmse": ("RMSE", 4),
    "log_likelihood": ("log lik.", 4),
    "rmse_local": ("RMSE +", 4),
    "log_likelihood_local": ("log lik. +", 4),
    "seconds": ("seconds", 0),
    "cpu_seconds": ("of CPU", 0),
}
BOUNDS = ("elbo_per_row", "best_elbo_per_row", "best_grouped_elbo_per_row")
METRICS = ("rmse", "log_likelihood", "rmse_local", "log_likelihood_local")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--data", choices=["kin40k", "protein", "keggdirected"], default="kin40k")
    add("--structures", choices=list(STRUCTURES), nargs="+", default=["SVGP", "union", "SOLVE-GP"])
    add("--conditionals", choices=CONDITIONALS, nargs="+", default=list(CONDITIONALS))
    add("--splits", type=int, nargs="+", default=[0, 1], help="which of the ten test folds")
    add("--group-size", type=whole, default=16, help="rows in a group, at most, for 'grouped'")
    add("--neighbors", "--neighbours", type=whole, default=64, help="the same for the local correction")
    add("--all-structures", action="store_true", help="few steps of every structure: are all finite?")
    parser.shared(
        "out",
        "json",
        "quick",
        inducing=dict(nargs="+", default=[256, 512], help="M, divisible by 4"),
        rows=dict(help="the first so many training rows, and test rows, of a split"),
        steps=1000,
        batch_size=dict(default=1024, help="rows of a step; for 'grouped' the nearest number"),
        learning_rate=0.05,
        seed=dict(default=0, help="to which the split's number is added"),
    )
    args = parser.read(argv)
    if args.all_structures:
        args.inducing, args.splits, args.steps = args.inducing[:1], args.splits[:1], min(args.steps, 50)
        args.structures = list(STRUCTURES)
    if args.quick:
        args.structures, args.conditionals = ["union"], ["grouped"]
        args.inducing, args.splits, args.rows, args.steps = [16], [0], 600, 60
        args.batch_size, args.group_size, args.neighbors = 128, 8, 16
    if any(M % 4 for M in args.inducing):
        parser.error("--inducing must be positive multiples of 4.")
    return args


@partial(jax.jit, static_argnames="covariances")
def predict(params, covariances: tuple[str, ...], X, y, X_test, groups: npgp.sparse.Groups):
    """Mean and variance of y at test inputs, by the inducing values alone and with the local correction; jitter."""
    noise = params["noise_variance"]
    posterior = component(params, covariances).posterior(params)
    local = npgp.local_correction(posterior, X, y, npgp.Gaussian(variance=noise), groups)
    predictions = (posterior.mean_and_variance(X_test), local.mean_and_variance(X_test))
    return [(mean, variance + noise) for mean, variance in predictions], jnp.stack(posterior.jitter)


def train(split: Split, M: int, name: str, conditional: str, args: argparse.Namespace) -> dict[str, Any]:
    """Fit one GP; its figures. Stops with an error at the first number that is not finite."""
    structure = STRUCTURES[name]
    rows, seed = len(split.y), args.seed + split.number
    groups, neighbors = (npgp.median_split(split.X, size) for size in (args.group_size, args.neighbors))
    layout = Layout.of(split, conditional, groups, args.batch_size)
    start: dict[str, Any] = {
        "lengthscale": jnp.asarray(start_of_lengthscales(split.X)),
        "variance": VARIANCE,
        "noise_variance": NOISE_VARIANCE,
    }
    inducing = split.inducing(structure, M, seed)
    start |= {f"inducing{i}": jnp.asarray(Z) for i, Z in enumerate(inducing)}
    model = regression_model(start, structure.covariances, conditional, layout.group_size)
    guide = npgp.AutoSparseGP(model)
    optimizer = npgp.adam(args.learning_rate, args.steps)
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO(), size=layout.places)

    began, cpu_began = time.perf_counter(), time.process_time()
    key, batch = jax.random.key(seed), [a[: layout.batch_size] for a in layout.arrays]
    result = npgp.fit(
        svi,
        key,
        args.steps,
        *layout.arrays,
        batch_size=layout.batch_size,
        group_size=layout.group_size,
        init_state=jax.jit(svi.init)(key, *batch),  # operation by operation this takes seconds
        progress=False,
    )
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    params = result.params
    (plain, local), jitter = predict(params, structure.covariances, split.X, split.y, split.X_test, neighbors)
    best, grouped = (
        float(best_elbo(params, split.X, split.y, structure.covariances, kind, groups if kind == "grouped" else None))
        for kind in (conditional, "grouped")
    )
    local_scores = {f"{name}_local": value for name, value in scores(*local, split.y_test).items()}
    fit = {
        "split": split.number,
        "inducing": M,
        "blocks": [len(Z) for Z in inducing],
        "structure": name,
        "conditional": conditional,
        "group_size": layout.group_size,
        "batch_size": layout.batch_size,
        "elbo_per_row": elbo_of_chunks(model, guide)(params, layout.chunks()) / rows,
        "best_elbo_per_row": best / rows,
        "best_grouped_elbo_per_row": grouped / rows,
        **scores(*plain, split.y_test),
        **local_scores,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "lengthscale": np.asarray(params["lengthscale"]).tolist(),
        "variance": float(params["variance"]),
        "noise_variance": float(params["noise_variance"]),
        "jitter": np.asarray(jitter).tolist(),
        "curve": curve(-result.losses / rows),
    }
    require_finite(fit, params)
    return fit


def curve(trace: np.ndarray) -> dict[str, list]:
    """An ELBO trace as means over equally many steps: the last step of each mean, and its value."""
    ends = np.unique(np.linspace(0, len(trace), CURVE_POINTS + 1).round().astype(int))
    sums = np.add.reduceat(np.asarray(trace, np.float64), ends[:-1])
    return {"step": ends[1:].tolist(), "elbo_per_row": (sums / np.diff(ends)).tolist()}


def require_finite(fit: dict[str, Any], params: dict[str, Any]) -> None:
    values = {**params, "curve": fit["curve"]["elbo_per_row"]}
    values |= {name: fit[name] for name in (*BOUNDS, *METRICS, "jitter")}
    bad = [name for name, value in values.items() if not np.all(np.isfinite(value))]
    if bad:
        raise FloatingPointError(f"{fit['structure']}, {fit['conditional']}: not finite are {', '.join(bad)}.")


def by_method(fits: list[dict]) -> dict[tuple, list[dict]]:
    """The fits of all splits, by M, structure and conditional."""
    methods: dict[tuple, list[dict]] = {}
    for fit in fits:
        methods.setdefault((fit["inducing"], fit["structure"], fit["conditional"]), []).append(fit)
    return methods


def draw(fits: list[dict], title: str, path: Path) -> None:
    """ELBO curves, means over splits; a panel for each M."""
    from npgp.plots import COLORS, subplots

    methods = by_method(fits)
    sizes = list(dict.fromkeys(M for M, _, _ in methods))
    structures = list(dict.fromkeys(structure for _, structure, _ in methods))
    styles = dict(zip(structures, ["-", "--", ":", "-."] * len(structures), strict=False))
    figure, axes = subplots(1, len(sizes), figsize=(1.4 + 5.2 * len(sizes), 4.4), squeeze=False, sharey=True)
    lowest, highest = np.inf, -np.inf
    for ax, M in zip(axes[0], sizes, strict=True):
        for (size, structure, conditional), same in methods.items():
            if size != M:
                continue
            values = np.mean([fit["curve"]["elbo_per_row"] for fit in same], axis=0)
            color = COLORS[CONDITIONALS.index(conditional)]
            label = f"{structure}, {conditional}"
            ax.plot(same[0]["curve"]["step"], values, styles[structure], color=color, lw=1.4, label=label)
            # The first steps are far below and would hide the rest.
            lowest, highest = min(lowest, np.quantile(values, 0.15)), max(highest, values.max())
        ax.set_title(f"M = {M}", fontsize=10)
        ax.set_xlabel("step")
        ax.legend(frameon=False, fontsize=9, loc="lower right", handlelength=2.8)
    margin = 0.05 * (highest - lowest)
    axes[0, 0].set_ylim(lowest - margin, highest + margin)
    axes[0, 0].set_ylabel("ELBO per row, of minibatches (nats)")
    figure.suptitle(title, fontsize=11)
    write_picture(path, figure)


def finite_table(fits: list[dict]) -> str:
    """For ``--all-structures``: the ELBO per row at first and at last, all of which are finite."""
    lines = []
    for fit in fits:
        values = fit["curve"]["elbo_per_row"]
        blocks = " + ".join(str(size) for size in fit["blocks"])
        cells = (f"{values[0]:.3f}", f"{fit['elbo_per_row']:.3f}", f"{max(fit['jitter']):.0e}")
        lines.append((fit["structure"], fit["conditional"], blocks, *cells))
    return table(("structure", "conditional", "blocks", "first ELBO", "last ELBO", "jitter"), lines, left=(0, 1))


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", False)
    settings = ("data", "steps", "batch_size", "learning_rate", "seed", "splits")
    report: dict[str, Any] = {key: getattr(args, key) for key in settings} | {"fits": [], "summary": []}
    for number in args.splits:
        split = Split.load(args.data, number, args.rows)
        print(f"{args.data}, split {number}: {len(split.y)} training rows, {len(split.y_test)} test rows", flush=True)
        for M, structure, conditional in itertools.product(args.inducing, args.structures, args.conditionals):
            fit = train(split, M, structure, conditional, args)
            report["fits"].append(fit)
            report["summary"] = summarize(report["fits"], tuple(KEYS), tuple(FIGURES))
            print(
                f"M = {M}, {structure}, {conditional}: ELBO per row {fit['elbo_per_row']:.4f}, RMSE "
                f"{fit['rmse']:.4f}, {fit['seconds']:.0f} s",
                flush=True,
            )
            write_json(args.json, report, say=False)
    if args.all_structures:
        print(finite_table(report["fits"]))
        print(f"all {len(report['fits'])} fits are finite in float32")
    else:
        print(summary_table(report["summary"], KEYS | {"fits": "fits"}, FIGURES))
        print(NOTE)
        path = args.out / f"{args.data}_elbo.png"
        draw(report["fits"], f"{args.data}, batches of {args.batch_size} rows, float32", path)
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
