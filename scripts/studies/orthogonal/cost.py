"""The measured cost of a training step in float32: SVGP with M points against two sets of M/2."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot as plt

from common import heading, interleaved, note, one_blas_thread, quartiles, table
from npgp.plots import COLORS
from studies.orthogonal import programs
from studies.orthogonal.programs import COLUMNS, METHODS, Program

KINDS = {"uncollapsed": programs.uncollapsed_step, "collapsed": programs.collapsed_step}
FIGURES = ("M", "method", "ms", "quartiles", "ms/SVGP", "quartiles", "fastest", "/SVGP", "flops/SVGP")
FIGURES += ("GF products", "GF LAPACK")


def measured(steps: Mapping[str, Program], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds and operations of each program, all timed in turn."""
    seconds = interleaved(steps, args.repetitions, seed=args.seed)
    return {
        name: {
            "seconds": quartiles(seconds[name]),
            "fastest": float(seconds[name].min()),
            "product_flops": step.product_flops,
            "lapack_flops": step.lapack_flops,
            "each": seconds[name],
        }
        for name, step in steps.items()
    }


def study(args: argparse.Namespace) -> dict:
    """Time and operations of a training step: of minibatches, and of the collapsed bound."""
    batch, rows = (64, 128) if args.quick else (1024, 4096)
    rng = np.random.default_rng(args.seed)
    X = jnp.asarray(rng.normal(size=(rows, COLUMNS)), jnp.float32)
    y = jnp.sin(X[:, 0]) + 0.3 * jnp.asarray(rng.normal(size=rows), jnp.float32)
    report: dict[str, Any] = {"batch": batch, "rows": rows, "columns": COLUMNS, "repetitions": args.repetitions}
    report |= {"load_average_before": os.getloadavg()[0], "cores": os.cpu_count()}
    with one_blas_thread():
        for kind, make in KINDS.items():
            report[kind] = {}
            used = batch if kind == "uncollapsed" else rows
            for M in args.sizes:
                steps = {method: make(M, method, X[:used], y[:used]) for method in METHODS}
                report[kind][str(M)] = figures = measured(steps, args)
                base, flops = figures["SVGP"]["each"], steps["SVGP"].flops
                for method, found in figures.items():
                    each = found.pop("each")
                    found["time_ratio"] = quartiles(each / base)
                    found["fastest_ratio"] = float(each.min() / base.min())
                    found["flop_ratio"] = steps[method].flops / flops
        report["breakdown"] = {"inducing": max(args.sizes), "stages": breakdown(max(args.sizes), X[:batch], args)}
    report["load_average_after"] = os.getloadavg()[0]
    return report


def breakdown(M: int, X, args: argparse.Namespace) -> dict:
    """Each stage by itself, its values, and values with derivatives: by stage, method, and which."""
    stages: dict[str, dict[tuple[str, str], Program]] = {}
    for method in METHODS:
        for stage, (function, arguments) in programs.stages(M, method, X).items():
            both = {"values": function, "with_gradient": programs.with_gradient(function)}
            made = {(method, key): programs.program(f, *arguments) for key, f in both.items()}
            stages.setdefault(stage, {}).update(made)
    report: dict[str, dict] = {}
    for stage, made in stages.items():
        report[stage] = {method: {} for method in METHODS}
        for (method, key), found in measured(made, args).items():
            del found["each"]
            report[stage][method][key] = found
    return report


def titles(report: dict) -> dict[str, str]:
    return {
        "uncollapsed": f"uncollapsed, batch of {report['batch']} rows",
        "collapsed": f"collapsed, {report['rows']} rows",
    }


def show(report: dict) -> None:
    for kind, title in titles(report).items():
        heading(f"5. Cost of a value and gradient: {title}, {report['columns']} columns, float32")
        rows = []
        for M, methods in report[kind].items():
            for method, found in methods.items():
                low, median, high = (1e3 * s for s in found["seconds"])
                ratio = found["time_ratio"]
                row = [M, method + ("" if method == "SVGP" else f" ({int(M) // 2}+{int(M) // 2})")]
                row += [f"{median:.2f}", f"{low:.2f} to {high:.2f}", f"{ratio[1]:.2f}"]
                row += [f"{ratio[0]:.2f} to {ratio[2]:.2f}", f"{1e3 * found['fastest']:.2f}"]
                row += [f"{found[key]:.2f}" for key in ("fastest_ratio", "flop_ratio")]
                rows.append(row + [f"{found[key] / 1e9:.3f}" for key in ("product_flops", "lapack_flops")])
        print(table(FIGURES, rows, left=()))
    show_stages(report["breakdown"], report["uncollapsed"])
    note(
        "By multiply-adds for each row: whitening costs ½M² for the union and for any blocks alike, as the blocks' "
        "factor is the union's; products with S cost M² for SVGP, ½M² for SOLVE-GP and ¼M² for ODVGP, and their "
        "derivatives twice that again; kernel matrices are the same for all. Cholesky factors cost a multiple of M³, "
        "of which two halves save most. So the saving grows with M. The collapsed bound has no S: its means couple "
        "the blocks, so that all structures form and factorize the union's B, and blocks save what symmetry does (the "
        "off-diagonal product is formed once) but, for SOLVE-GP, need the second block's own factor besides."
    )
    note(
        "Times of medians and quartiles include whatever else the machine was doing; ratios are of runs next to each "
        "other. The fastest runs are the least disturbed."
    )
    print(f"load average {report['load_average_before']:.2f} before, {report['load_average_after']:.2f} after")


def show_stages(parts: dict, steps: dict) -> None:
    heading(f"5. Stages of an uncollapsed step, M = {parts['inducing']}: ms for values + derivatives, fastest runs")
    rows, totals = [], dict.fromkeys(METHODS, 0.0)
    for stage, methods in parts["stages"].items():
        row, base = [stage], methods["SVGP"]["with_gradient"]["fastest"]
        for method, pair in methods.items():
            values, total = (1e3 * pair[key]["fastest"] for key in ("values", "with_gradient"))
            flops = pair["with_gradient"]["product_flops"] + pair["with_gradient"]["lapack_flops"]
            totals[method] += total
            row += [f"{values:.2f} + {max(total - values, 0.0):.2f}", f"{1e-6 * flops / max(total, 1e-9):.0f}"]
            row += [] if method == "SVGP" else [f"{total / (1e3 * base):.2f}"]
        rows.append(row)
    whole = {method: 1e3 * found["fastest"] for method, found in steps[str(parts["inducing"])].items()}
    for name, of in {"sum": totals, "whole step": whole}.items():
        cells = [[f"{ms:.2f}", "", f"{ms / of['SVGP']:.2f}"] for ms in of.values()]
        rows.append([name, *cells[0][:2], *cells[1], *cells[2]])
    print(table(("", "SVGP", "GF/s", "SOLVE-GP", "GF/s", "ratio", "ODVGP", "GF/s", "ratio"), rows))


def draw(report: dict):
    figure, axes = plt.subplots(1, 3, figsize=(12.6, 3.9), layout="constrained")
    for ax, (kind, title) in zip(axes, titles(report).items(), strict=False):
        sizes = list(report[kind])
        for i, method in enumerate(list(METHODS)[1:]):
            figures = [report[kind][M][method] for M in sizes]
            low, median, high = np.array([f["time_ratio"] for f in figures]).T
            at, bars = np.arange(len(sizes)) + 0.16 * (i - 0.5), np.abs([median - low, high - median])
            style = {"color": COLORS[i]}
            ax.errorbar(at, median, bars, fmt="o", capsize=3, label=f"{method}, median and quartiles", **style)
            fastest, counted = ([f[key] for f in figures] for key in ("fastest_ratio", "flop_ratio"))
            ax.plot(at, fastest, "x", ms=6, label=f"{method}, fastest runs", **style)
            ax.plot(at, counted, "_", ms=16, mew=2, alpha=0.6, label=f"{method}, operations counted", **style)
        ax.axhline(1.0, color="0.4", lw=0.8)
        ax.set_xticks(np.arange(len(sizes)), sizes)
        ax.set_xlim(-0.6, len(sizes) - 0.4)
        ax.set_xlabel("inducing points M of both sets together")
        ax.set_title(title, fontsize=10)
    top = max(1.3, *(ax.get_ylim()[1] for ax in axes[:2]))
    for ax in axes[:2]:
        ax.set_ylim(0.0, top)
    axes[0].set_ylabel("cost of a step, SVGP with M points = 1")
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    draw_stages(axes[2], report["breakdown"], report["uncollapsed"])
    return figure


def draw_stages(ax, parts: dict, steps: dict) -> None:
    below = np.zeros(len(METHODS))
    for (stage, methods), color in zip(parts["stages"].items(), COLORS, strict=False):
        height = np.array([1e3 * methods[method]["with_gradient"]["fastest"] for method in METHODS])
        ax.bar(list(METHODS), height, 0.6, bottom=below, color=color, label=stage)
        below += height
    whole = [1e3 * f["fastest"] for f in steps[str(parts["inducing"])].values()]
    ax.hlines(whole, np.arange(3) - 0.36, np.arange(3) + 0.36, color="k", label="whole step")
    ax.set_ylim(0.0, 1.45 * max(*whole, *below))
    ax.set_ylabel("ms")
    ax.set_title(f"fastest runs of stages, uncollapsed, M = {parts['inducing']}", fontsize=10)
    ax.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
