"""From SOLVE-GP to SGPR as the two sets of points move apart."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from common import heading, note, table
from npgp.plots import COLORS
from studies.orthogonal.structures import Data, bound, kl_to_sgpr


def study(data: Data, args: argparse.Namespace) -> dict:
    """O is Z moved right by s, at the exact GP's hyperparameters; for Z close together and Z all over the data."""
    h, ell = args.inducing // 2, data.lengthscale
    low, high = data.X.min(), data.X.max()
    # No multiples of the spacing but 0: where points of both sets coincide, the second adds less.
    shifts = np.concatenate([[0.0], np.arange(0.05, 8.0, 2.5 if args.quick else 0.1)])
    arrangements = {
        "Z close together": low + ell * (0.5 + 0.5 * np.arange(h)),
        "Z all over the data": low + (high - low) * (np.arange(h) + 0.25) / h,
    }
    report: dict[str, Any] = {"shift_in_lengthscales": shifts.tolist()}
    for name, Z in arrangements.items():
        curves: dict[str, list[float]] = {}
        for s in shifts:
            points = np.concatenate([Z, Z + s * ell])
            union = bound(points, data, 0, "SGPR")
            curves.setdefault("SGPR to exact", []).append(data.evidence - union)
            for structure in ("SOLVE-GP", "ODVGP"):
                curves.setdefault(f"{structure} to SGPR", []).append(kl_to_sgpr(points, data, h, structure))
                difference = union - bound(points, data, h, structure)
                curves.setdefault(f"{structure}: difference of bounds", []).append(difference)
        report[name] = {"spacing_in_lengthscales": float((Z[1] - Z[0]) / ell), **curves}
    return report


def show(report: dict, data: Data) -> None:
    heading("2. KL[SOLVE-GP ‖ SGPR] as the second set moves away from the first (nats)")
    shifts = np.array(report["shift_in_lengthscales"])
    shown = [
        int(np.argmin(abs(shifts - s)))
        for s in (0, 0.05, 0.25, 0.55, 1.05, 1.55, 2.05, 3.05, 4.05, 5.05, 6.05, 7.05, 8)
    ]
    rows = []
    for i in sorted(set(shown)):
        row = [f"{shifts[i]:.2f}"]
        for name in _arrangements(report):
            row += [f"{report[name][f'{structure} to SGPR'][i]:.4f}" for structure in ("SOLVE-GP", "ODVGP")]
            row.append(f"{report[name]['SGPR to exact'][i]:.2f}")
        rows.append(row)
    one, two = (name.removeprefix("Z ") for name in _arrangements(report))
    print(f"{'':8}{'Z ' + one:^42}{'Z ' + two:^42}")
    columns = ("SOLVE-GP", "ODVGP", "SGPR to exact")
    print(table(("s/lengthscale", *columns, *columns), rows, left=()))
    worst = 0.0
    for name, structure in itertools.product(_arrangements(report), ("SOLVE-GP", "ODVGP")):
        curves = report[name]
        pairs = zip(curves[f"{structure} to SGPR"], curves[f"{structure}: difference of bounds"], strict=True)
        worst = max(worst, *(abs(kl - difference) for kl, difference in pairs))
    note(
        "At s = 0 the second set repeats the first and adds nothing; at the smallest s it already adds the slope of f "
        "there. Far away the sets tell about different data. In between both see the same rows, and SOLVE-GP leaves "
        "out that their values are correlated a posteriori. ODVGP's KL is for the variance that the second set "
        "explains and q does not learn: it is large wherever that set is of use. KLs of the two Gaussians and "
        f"differences of the bounds agree to {worst:.0e}."
    )


def _arrangements(report: dict) -> list[str]:
    return [name for name in report if name.startswith("Z ")]


def draw(report: dict, data: Data):
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.8), sharex=True, layout="constrained")
    shifts = report["shift_in_lengthscales"]
    for ax, structure in zip(axes, ("SOLVE-GP", "ODVGP"), strict=True):
        for name, color in zip(_arrangements(report), COLORS, strict=False):
            curve = report[name][f"{structure} to SGPR"]
            label = f"{name}, {report[name]['spacing_in_lengthscales']:.2g} lengthscales apart"
            ax.plot(shifts[1:], curve[1:], color=color, label=label)
        # Not joined to the rest: there the second set is the first.
        ax.plot(shifts[:1], curve[:1], "o", color="k", mfc="none", ms=5, label="O the same as Z", clip_on=False)
        ax.set_title(f"KL[{structure} ‖ SGPR on both sets]", fontsize=10)
        ax.set_xlabel("shift of the second set O from the first Z, in lengthscales")
        ax.set_ylim(0.0, 1.25 * ax.get_ylim()[1])
    axes[0].set_ylabel("nats")
    axes[0].legend(frameon=False, fontsize=9, loc="upper right")
    return figure
