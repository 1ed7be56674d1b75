"""How many points for which set."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jax
import numpy as np
from matplotlib import pyplot as plt

import npgp.inducing
from common import heading, note, table
from npgp.plots import COLORS
from studies.orthogonal.structures import Data, bound, fit_points

PLACEMENTS = {
    "greedy": "greedy variance, in the order chosen",
    "k-means": "k-means, the leftmost M1 in the first set",
    "optimized": "optimized for each structure",
}


def study(data: Data, args: argparse.Namespace) -> dict:
    """KL to the exact posterior for M1 + M2 = M, with points placed by rule and optimized."""
    M = args.inducing
    first = [M // 2] if args.quick else list(range(1, M))
    greedy = np.asarray(npgp.inducing.greedy_variance(data.kernel, data.X, M))[:, 0]
    means = np.sort(np.asarray(npgp.inducing.kmeans(jax.random.key(args.seed), data.X, M))[:, 0])
    best, places = fit_points(data, [greedy, means], 0, "SGPR")
    places = np.sort(places)
    # For two sets, k-means' and SGPR's points shared out apart and alternately.
    starts = [greedy, *(np.concatenate(parts) for x in (means, places) for parts in ([x], [x[::2], x[1::2]]))]

    def curves(union: float, bound_of: Callable[[int, str], float]) -> dict[str, list[float]]:
        by_structure = {
            "SGPR on both": [union] * len(first),
            "SOLVE-GP": [bound_of(m1, "SOLVE-GP") for m1 in first],
            "ODVGP": [bound_of(m1, "ODVGP") for m1 in first],
            "SGPR on the first": [bound_of(m1, "SGPR") for m1 in first],
        }
        return {name: [data.evidence - value for value in (*values, union)] for name, values in by_structure.items()}

    def placed(points: np.ndarray) -> dict[str, list[float]]:
        def bound_of(m1: int, structure: str) -> float:
            return bound(points[:m1] if structure == "SGPR" else points, data, m1, structure)

        return curves(bound(points, data, 0, "SGPR"), bound_of)

    def optimized(m1: int, structure: str) -> float:
        if structure != "SGPR":
            return fit_points(data, starts, m1, structure)[0]
        fewer = np.asarray(npgp.inducing.kmeans(jax.random.key(args.seed), data.X, m1))[:, 0]
        return fit_points(data, [greedy[:m1], fewer], 0, "SGPR")[0]

    report = {"greedy": placed(greedy), "k-means": placed(means), "optimized": curves(best, optimized)}
    return {"total": M, "first": [*first, M], **report}


def show(report: dict, data: Data) -> None:
    M = report["total"]
    heading(f"3. KL[q ‖ exact posterior] by allocation, M1 + M2 = {M} (nats)")
    methods = ("SGPR on both", "SOLVE-GP", "ODVGP", "SGPR on the first")
    for name, title in PLACEMENTS.items():
        rows = [
            (str(m1), str(M - m1), *(f"{report[name][method][i]:.3f}" for method in methods))
            for i, m1 in enumerate(report["first"])
        ]
        print(f"points: {title}")
        print(table(("M1", "M2", *methods), rows, left=()))
    note(
        "The last line, M2 = 0, is SGPR for all. At fixed points SGPR on both ≤ SOLVE-GP ≤ ODVGP ≤ SGPR on the first "
        "set alone; optimized points are the best of a few starts, and need not be the best there are."
    )


def draw(report: dict, data: Data):
    size = {"figsize": (11.4, 6.0), "height_ratios": (3, 2)}
    figure, axes = plt.subplots(2, len(PLACEMENTS), sharex=True, sharey="row", layout="constrained", **size)
    styles = {
        "SGPR on both": ("-", "k", "SGPR on both sets"),
        "SOLVE-GP": ("o-", COLORS[0], "SOLVE-GP"),
        "ODVGP": ("s-", COLORS[1], "ODVGP"),
        "SGPR on the first": (":", "0.5", "SGPR on the first set alone"),
    }
    for (top, bottom), (name, title) in zip(axes.T, PLACEMENTS.items(), strict=True):
        curves = {method: np.array(report[name][method]) for method in styles}
        for method, (style, color, label) in styles.items():
            top.plot(report["first"], curves[method], style, color=color, ms=4, label=label)
        excess = curves["SOLVE-GP"] - curves["SGPR on both"]
        bottom.plot(report["first"], excess, "o-", color=COLORS[0], ms=4, label="SOLVE-GP")
        bottom.axhline(0.0, color="k")
        top.set_yscale("log")
        top.set_title(title, fontsize=10)
        bottom.set_xlabel(f"points in the first set M1, of {report['total']}")
        bottom.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel("KL to the exact posterior (nats)")
    axes[1, 0].set_ylabel("above SGPR on both sets (nats)")
    axes[0, -1].legend(frameon=False, fontsize=9)
    axes[1, -1].legend(frameon=False, fontsize=9, loc="upper right")
    return figure
