"""Tables of the fits of UCI sets: figures, the paper's claim, and levels of activations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from common import moments, plus_minus, table
from studies.spherical.uci_data import SETS
from studies.spherical.uci_fits import FEATURES, KERNELS, sizes

#: What the published figures, of two decimals, may be off by rounding.
ROUNDING = 0.005


def worse(ours: tuple[float, float | None], theirs: Sequence[float]) -> bool:
    """Whether ours, of a figure that should be small, is larger by more than two standard errors of the difference."""
    error = 0.0 if ours[1] is None or math.isnan(ours[1]) else ours[1]
    return ours[0] - theirs[0] > 2.0 * math.hypot(error, theirs[1]) + ROUNDING


def show(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(table(heads, rows, left=range(len(heads)), markdown=True), end="\n\n")


Cells = dict[tuple[str, str, str], dict[str, dict[int, dict]]]


def by_cell(records: Sequence[dict]) -> Cells:
    """Records by set, kernel and feature, in the tables' order, then by column and repetition."""
    cells: Cells = {}
    own = dict.fromkeys(r["set"] for r in records if r["set"] not in SETS)
    for key in itertools.product((*SETS, *own), KERNELS, FEATURES):
        for r in records:
            if (r["set"], r["kernel"], r["feature"]) == key:
                cells.setdefault(key, {}).setdefault(r["column"], {})[r["repetition"]] = r
    return cells


def compared(cells: Cells, size: int, metric: str, reference: Mapping, digits: int) -> None:
    """Print a table of a metric, with the reference's numbers in brackets, and marks where ours are worse."""
    rows, count = [], [0, 0]
    for (name, kernel, feature), columns in cells.items():
        row = []
        for column in sizes(size):
            ours = moments([r[metric] for r in columns[column].values()])
            text = plus_minus(*ours, digits)
            theirs = reference.get(name, {}).get(kernel, {}).get(feature, {}).get(column, {}).get(metric)
            if theirs is not None:
                behind = worse(ours, theirs)
                text += f" ({plus_minus(*theirs, digits)}){' worse' if behind else ''}"
                count[0], count[1] = count[0] + 1, count[1] + behind
            row.append(text)
        rows.append([name, kernel, feature, *row, str(len(columns[column]))])
    show(["set", "kernel", "features", *sizes(size), "repetitions"], rows)
    if count[0]:
        print(f"{count[1]} of {count[0]} cells are worse than the reference by more than two standard errors.\n")


def claim(cells: Cells, size: int) -> dict[str, dict]:
    """
    What M orthogonal points gain over M more features: 2M's figure less that of M + M, by repetition.

    Positive is in favor of orthogonal points. The verdict is on NLPD, for activations; of points, those in one block
    have at least the bound of the same in two.
    """
    _, both, double = sizes(size)
    report, rows = {}, []
    for (name, kernel, feature), columns in cells.items():
        gains = {
            metric: moments([sign * (columns[double][i][metric] - columns[both][i][metric]) for i in columns[both]])
            for metric, sign in (("rmse", 1), ("nlpd", 1), ("bound", -1))
        }
        mean, error = gains["nlpd"]
        verdict = ("holds" if mean > 0 else "fails") + (
            ", clearly" if error is not None and abs(mean) > 2.0 * error else ""
        )
        if feature == "points":
            verdict = ""
        report[f"{name}/{kernel}/{feature}"] = {**gains, "verdict": verdict}
        rows.append([name, kernel, feature, *(plus_minus(*gains[m], 4) for m in gains), verdict])
    show(["set", "kernel", "features", "RMSE", "NLPD", "bound per row", "verdict (NLPD)"], rows)
    for name in dict.fromkeys(name for name, _, _ in cells):
        verdicts = [r["verdict"] for key, r in report.items() if key.startswith(f"{name}/") and r["verdict"]]
        if verdicts:
            held = sum(verdict.startswith("holds") for verdict in verdicts)
            print(f"{name}: the claim holds in {held} of {len(verdicts)} cells with activations.")
    print()
    return report


def levels_and_shares(cells: Cells, size: int) -> None:
    rows = []
    for (name, kernel, feature), columns in cells.items():
        texts = []
        for column in sizes(size):
            reports = list(columns[column].values())
            levels = f"{reports[0]['levels'][-1]}: " if reports[0]["levels"] else ""
            texts.append(f"{levels}{100 * np.mean([r['left_out'] for r in reports]):.2f}%")
        steps = [f"{np.mean([r['iterations'] for r in c.values()]):.0f}" for c in columns.values()]
        rows.append([name, kernel, feature, *texts, " / ".join(steps)])
    show(["set", "kernel", "features", *sizes(size), "iterations"], rows)
