"""What people look at of the four methods' fits: tables, gains split by split, and a figure."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from common import command, moments, plus_minus, spread, write_picture
from common import table as aligned_table
from studies.regression.minibatch import METHODS, Records


class Metric(NamedTuple):
    """A figure of a fit: its title, digits, and the sign of what is better (0: it is not compared)."""

    title: str
    digits: int
    better: int


Cells = dict[tuple[str, int], dict[str, dict[int, dict[str, Any]]]]


def by_cell(records: Records, args: argparse.Namespace, sets: Sequence[str]) -> Cells:
    """Fits by set and M, then by method and split: those that the arguments ask for."""
    cells: Cells = {}
    for name, M, method in itertools.product(sets, args.inducing, args.methods):
        for record in records.find(set=name, inducing=M, method=method):
            if record["split"] < args.splits:
                cells.setdefault((name, M), {}).setdefault(method, {})[record["split"]] = record
    return cells


def print_fit(cell: Mapping[str, Any], figures: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
    parts = [f"{metric.title} {figures[key]:.{metric.digits}f}" for key, metric in metrics.items()]
    print(" ".join(map(str, cell.values())) + ": " + ", ".join(parts), flush=True)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return aligned_table(header, rows, left=range(len(header)), markdown=True)


def table(cells: Cells, metrics: Mapping[str, Metric]) -> str:
    rows = []
    for (name, M), methods in cells.items():
        for method, fits in methods.items():
            figures = [spread([r[key] for r in fits.values()], m.digits) for key, m in metrics.items()]
            rows.append([name, str(M), method, *figures, str(len(fits))])
    return markdown(["set", "M", "method", *(m.title for m in metrics.values()), "fits"], rows)


#: What is compared, the first of each pair being the better one if the claim holds; and whether the second has but the
#: M/2 points of the first block.
PAIRS = (
    ("T-SVGP", "SVGP", False),
    ("T-SOLVE-GP", "SOLVE-GP", False),
    ("SOLVE-GP", "SVGP", True),
    ("T-SOLVE-GP", "T-SVGP", True),
    ("SOLVE-GP", "SVGP", False),
    ("T-SOLVE-GP", "T-SVGP", False),
)


def gains(cells: Cells, metrics: Mapping[str, Metric]) -> tuple[str, str]:
    """
    What the first method of each pair gains over the second, split by split; positive is better.

    :return: the table of gains; and that of the cells (set and M) in which the mean gain is positive.
    """
    compared = {key: metric for key, metric in metrics.items() if metric.better}
    titles = [metric.title for metric in compared.values()]
    rows, counts = [], []
    for first, second, halved in PAIRS:
        pair = f"{first} over {second}{' of M/2' if halved else ''}"
        found: list[dict[str, tuple[float, float | None]]] = []
        for (name, M), methods in cells.items():
            a, b = methods.get(first, {}), cells.get((name, M // 2 if halved else M), {}).get(second, {})
            splits = sorted(set(a) & set(b))
            if not splits:
                continue
            differences = {
                key: moments([metric.better * (a[i][key] - b[i][key]) for i in splits])
                for key, metric in compared.items()
            }
            texts = [plus_minus(*differences[key], metric.digits) for key, metric in compared.items()]
            cost = spread([a[i]["step_ms"] / b[i]["step_ms"] for i in splits], 2)
            rows.append([name, str(M), pair, *texts, cost])
            found.append(differences)
        if found:
            counts.append([pair, *(_count([gain[key] for gain in found]) for key in compared)])
    if not rows:
        return "", ""
    heads = ["set", "M", "gain of", *titles, "time per step, ratio"]
    return markdown(heads, rows), markdown(["gain of", *titles], counts)


def _count(values: Sequence[tuple[float, float | None]]) -> str:
    """How many gains are positive; and how many exceed two standard errors, either way."""
    text = f"{sum(mean > 0 for mean, _ in values)} of {len(values)}"
    clear = [sum(sign * mean > 2 * error for mean, error in values if error is not None) for sign in (1, -1)]
    return text if any(error is None for _, error in values) else f"{text} (clearly: {clear[0]}, worse: {clear[1]})"


def draw(cells: Cells, metrics: Mapping[str, Metric], panels: Sequence[str], path: Path) -> None:
    """The paper's layout: a row of panels for each set, one for each metric, against M; a line for each method."""
    from PIL import Image

    from npgp.plots import COLORS, subplots

    sets = list(dict.fromkeys(name for name, _ in cells))
    size = (3.1 * len(panels), 2.5 * len(sets) + 0.5)
    figure, axes = subplots(len(sets), len(panels), figsize=size, squeeze=False)
    for row, name in zip(axes, sets, strict=True):
        for ax, key in zip(row, panels, strict=True):
            for i, (method, (blocks, tight)) in enumerate(METHODS.items()):
                sizes = [M for (other, M), methods in cells.items() if other == name and method in methods]
                if not sizes:
                    continue
                points = [moments([r[key] for r in cells[name, M][method].values()]) for M in sizes]
                mean, error = np.array(points, float).T
                ax.errorbar(
                    np.array(sizes) * 2 ** (0.03 * (i - 1.5)),  # side by side
                    mean,
                    yerr=None if np.isnan(error).any() else error,
                    fmt=("o" if blocks == 1 else "s") + ("-" if tight else "--"),
                    color=COLORS[i],
                    markersize=4,
                    lw=1.3,
                    capsize=2,
                    label=method,
                )
            ticks = sorted({M for other, M in cells if other == name})
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, ticks)
            ax.margins(x=0.12, y=0.1)
            ax.tick_params(labelsize=8)
            ax.set_ylabel(metrics[key].title, fontsize=9)
            if len(sets) > 1 or ax is row[0]:
                ax.set_title(name if ax is row[0] else "", fontsize=10, loc="left")
    for ax in axes[-1]:
        ax.set_xlabel("inducing points M", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    write_picture(path, figure, dpi=100)
    Image.open(path).quantize(64).save(path, optimize=True)  # a third of the size


#: In a file of --markdown, what follows this line is written by the program, and what stands above it is kept.
MARK = "<!-- Written by the script from here on. -->"


def report(
    records: Records, cells: Cells, metrics: Mapping[str, Metric], note: str, args: argparse.Namespace, title: str,
    script: str,
) -> None:  # fmt: skip
    """Print the tables, and write them to the Markdown file asked for; with the command line of the script."""
    compared, counts = gains(cells, metrics)
    parts = [table(cells, metrics), note]
    if compared:
        parts += ["Gains, split by split (positive: the first is better), and cost:", compared]
        parts += [
            "In how many cells the gain is positive; clearly so, or clearly worse: by more than two standard errors:",
            counts,
        ]
    print("\n" + "\n\n".join(parts) + "\n")
    if args.markdown is None:
        return
    settings = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in records.settings.items())
    devices = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    head = [
        f"    {command(script)}",
        f"Settings: {settings}. Device: {devices}." + (f" Machine: {args.machine}." if args.machine else ""),
    ]
    above = f"# {title}\n"
    if args.markdown.exists():
        above = args.markdown.read_text().partition(MARK)[0].rstrip() + "\n"
    args.markdown.parent.mkdir(parents=True, exist_ok=True)
    args.markdown.write_text("\n\n".join([above.rstrip(), MARK, *head, *parts]) + "\n")
    print(f"wrote {args.markdown}")
