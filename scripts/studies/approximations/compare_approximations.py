#!/usr/bin/env python
"""Which approximation? Fits the exact GP and its approximations to one data set, from one start and in equal time.

    python scripts/studies/approximations/compare_approximations.py spatial --rows 10000
    python scripts/studies/approximations/compare_approximations.py my.csv --budget 60
    NPGP_DATA=... python scripts/studies/approximations/compare_approximations.py kin8nm --json out/kin8nm.json

DATA is ``snelson``, ``spatial`` (simulated sites, short lengthscale), a name of ``npgp.datasets.UCI_NAMES``, or a file:
CSV, whose last column is the target, or npz with ``X`` and ``y``.

All methods have the same kernel, with a lengthscale for each column, the same start, and ``--budget`` seconds of
optimization after the first evaluation: L-BFGS on the bound or likelihood of all rows, or minibatches. Inputs and
target are standardized, and so are the errors. Every method runs in a process of its own, so that its memory can be
told.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, in_its_own_process, note, one_blas_thread, table, whole, write_json, write_picture
from studies.approximations.data import Data, load
from studies.approximations.fitting import fit_one
from studies.approximations.methods import METHODS, reason_against
from studies.approximations.models import KERNELS

NOTE = (
    "RMSE and NLPD (negative log predictive density): of test rows, standardized target. Per row: a lower bound or a "
    "log density of the training rows. Bounds compare with one another and with the log evidence; the density of "
    "another model may lie above that. Fit: set-up and compilation included. Predict: all test rows, once compiled. "
    "MiB: the most that the method's own process held beyond what it did before, compilation included."
)
HEADS = ("", "RMSE", "NLPD", "per row", "which is", "fit s", "predict s", "MiB", "evaluations")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("data", metavar="DATA", help="snelson, spatial, a UCI set of npgp.datasets, or a file")
    add("--methods", nargs="+", choices=list(METHODS), help="these alone; all that fit if omitted")
    add("--kernel", choices=KERNELS, default="matern32")
    add("--budget", type=float, default=30.0, metavar="SECONDS", help="of optimization, for each method")
    add("--neighbors", "--neighbours", type=whole, default=15, metavar="K", help="of nearest-neighbor methods")
    add("--exact-rows", type=int, default=2000, help="no exact GP for more rows than this")
    add("--lengthscale", type=float, default=0.03, help="of the function on spatial's unit square")
    add("--split", type=int, default=0, help="train/test split of a UCI set")
    add("--child", type=Path, help=argparse.SUPPRESS)  # the data of one method's own process
    add("--out", type=Path, default=Path("out/frontier.png"), help="the picture")
    parser.shared(
        "cpu-time",
        "seed",
        "float32",
        "here",
        "json",
        steps=dict(help="at most so many iterations; without minibatches 1000 if omitted"),
        inducing=dict(default=128, help="an even number; HSGP has as many functions"),
        batch_size=1024,
        learning_rate=dict(default=0.03, help="of Adam, which then decays"),
        rows=dict(type=int, help="training rows: of spatial (10,000), or a random subset of others"),
    )
    args = parser.read(argv)
    if args.inducing % 2:
        parser.error("--inducing must be a positive even number.")
    if min(args.budget, args.lengthscale, args.learning_rate) <= 0.0 or (args.rows is not None and args.rows < 1):
        parser.error("rows, seconds, rates and lengthscales must be positive.")
    return args


def lines_of(figures: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """The lines of the table."""
    lines = []
    for name, f in figures.items():
        memory = "" if f["memory_mib"] is None else f"{f['memory_mib']:.0f}"
        numbers = [f"{f[key]:.4f}" for key in ("rmse", "nlpd", "value_per_row")]
        times = [f"{f['fit_seconds']:.1f}", f"{f['predict_seconds']:.3f}", memory, str(f["evaluations"])]
        lines.append([METHODS[name].title, *numbers, f["value_is"], *times])
    return lines


def frontier(figures: Mapping[str, dict[str, Any]], key: str) -> list[str]:
    """The methods that no other beats both in time and in this figure, fastest first."""
    best, names = math.inf, []
    for name in sorted(figures, key=lambda n: figures[n]["fit_seconds"]):
        if figures[name][key] < best:
            best = figures[name][key]
            names.append(name)
    return names


def draw(figures: Mapping[str, dict[str, Any]], title: str, unit: str = "seconds"):
    """NLPD and RMSE against the time of the fit, a point for each method, and a line through the best."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter

    from npgp.plots import COLORS

    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.9), layout="constrained")
    labels = {"nlpd": "test NLPD, nats per row", "rmse": "test RMSE, standardized"}
    handles: list[Any] = []
    for ax, (key, label) in zip(axes, labels.items(), strict=True):
        handles = []
        for i, name in enumerate(METHODS):
            if name in figures:
                f = figures[name]
                style = {"color": (*COLORS, "0.1", "0.5")[i], "marker": "oDs^vP*X"[i], "ms": 8, "ls": ""}
                handles += ax.plot(f["fit_seconds"], f[key], label=METHODS[name].title, zorder=3, **style)
        best = frontier(figures, key)
        times, values = ([figures[name][k] for name in best] for k in ("fit_seconds", key))
        ax.plot(
            [*times, max(f["fit_seconds"] for f in figures.values())],
            [*values, values[-1]],
            color="0.7",
            zorder=2,
            drawstyle="steps-post",
        )
        ax.set(xscale="log", xlabel=f"fit, {unit} (with set-up and compilation)", ylabel=label)
        ax.grid(color="0.93", lw=0.7)
        ax.set_axisbelow(True)
        ax.margins(0.12)
        for axis in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
            axis(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
    line = plt.Line2D([], [], color="0.7", label="best in the time")
    figure.legend(handles=[*handles, line], loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def figures_of(name: str, data: Data, args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """A method's figures, from a fresh process unless they are wanted here: its memory is then that of one method."""
    if args.here or args.child:
        return fit_one(name, data, args)[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "data.npz")
        np.savez(rows, **data._asdict())
        return in_its_own_process(__file__, [*argv, "--methods", name, "--child", str(rows)])["methods"][name]


def report_on(data: Data, args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    figures, skipped = {}, {}
    for name in args.methods or METHODS:
        if reason := reason_against(name, data, args):
            skipped[name] = reason
            print(f"{METHODS[name].title} is left out: {reason}.", flush=True)
            continue
        f = figures[name] = figures_of(name, data, args, argv)
        print(f"{METHODS[name].title}: NLPD {f['nlpd']:.4f}, {f['fit_seconds']:.1f} s", flush=True)
    keys = ("kernel", "budget", "cpu_time", "steps", "inducing", "neighbors", "seed", "float32")
    settings = {key: getattr(args, key) for key in keys}
    shape = {"rows": len(data.y), "test_rows": len(data.y_test), "columns": data.X.shape[1]}
    return {"data": args.data, **shape, **settings, "methods": figures, "skipped": skipped}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    jax.config.update("jax_enable_x64", not args.float32)
    dtype = np.float32 if args.float32 else np.float64
    data = Data(*(np.asarray(a, dtype) for a in (np.load(args.child).values() if args.child else load(args))))
    if not args.child:
        budget = f"{args.budget:g} {'CPU ' * args.cpu_time}s" + (f" or {args.steps} steps" if args.steps else "")
        print(
            f"{args.data}: {len(data.y)} training and {len(data.y_test)} test rows, {data.X.shape[1]} columns; "
            f"{args.kernel}, M = {args.inducing}, k = {args.neighbors}, {dtype.__name__}; {budget} for each method\n"
        )
    with one_blas_thread():
        report = report_on(data, args, argv)
    write_json(args.json, report)
    if args.child or not report["methods"]:
        return report
    print(f"\n{table(HEADS, lines_of(report['methods']), left=(0, 4))}\n")
    note(NOTE)
    print()
    for name in report["methods"]:
        note(f"{METHODS[name].title}: {METHODS[name].advice}", indent="    ")
    title = f"{args.data}: {report['rows']} training rows, {report['columns']} columns"
    write_picture(args.out, draw(report["methods"], title, "CPU seconds" if args.cpu_time else "seconds"))
    return report


if __name__ == "__main__":
    main()
