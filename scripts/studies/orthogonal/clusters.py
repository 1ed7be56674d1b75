"""Two clusters of data, and a set of points in each, or both sets in both."""

from __future__ import annotations

import argparse

import numpy as np
import scipy.linalg
from matplotlib import pyplot as plt

from common import heading, note, table
from npgp.plots import COLORS
from studies.orthogonal.structures import JITTER, Data, bound, evidence_and_slope, kl_to_sgpr

#: KL divergences below this are rounding error.
ROUNDING = 1e-6


def study(data: Data, args: argparse.Namespace) -> list[dict]:
    """The right half of the data moved away; a set in each half, or both sets in both halves."""
    h, ell = args.inducing // 2, data.lengthscale
    left, right = np.array_split(np.argsort(data.X[:, 0]), 2)
    levels = (np.arange(h) + 0.5) / h
    rows = []
    for shift in (0.0, 4.0) if args.quick else (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0):
        X = data.X.copy()
        X[right] += shift * ell
        moved = data._replace(X=X, evidence=evidence_and_slope(data.hyper, X, data.y)[0])
        places = [np.quantile(X[half, 0], levels) for half in (left, right)]
        even, odd = ([half[start::2] for half in places] for start in (0, 1))
        arrangements = {
            "apart": np.concatenate(places),
            # As many points in each set, also where a half has an odd number.
            "mixed": np.concatenate([even[0], odd[1], odd[0], even[1]]),
        }
        union = moved.evidence - bound(arrangements["apart"], moved, 0, "SGPR")
        row = {"shift_in_lengthscales": shift, "evidence": moved.evidence, "SGPR to exact": union}
        for name, points in arrangements.items():
            for structure in ("SOLVE-GP", "ODVGP"):
                row[f"{structure} to SGPR, {name}"] = kl_to_sgpr(points, moved, h, structure)
            row[f"correlation, {name}"] = largest_correlation(points[:h] / ell, points[h:] / ell)
        rows.append(row)
    return rows


def largest_correlation(Z: np.ndarray, O: np.ndarray) -> float:
    """The largest canonical correlation, a priori, of f at two sets of points in units of the lengthscale."""

    def K(a, b):
        return np.exp(-0.5 * np.square(a[:, None] - b))

    half = K(Z, O)
    for side in (Z, O):
        factor = np.linalg.cholesky(K(side, side) + JITTER * np.eye(len(side)))
        half = scipy.linalg.solve_triangular(factor, half, lower=True).T
    return float(np.linalg.norm(half, 2))


def show(rows: list[dict], data: Data) -> None:
    heading("4. Two clusters: what SOLVE-GP and ODVGP lose against SGPR on both sets (nats)")
    columns = ("correlation", "SOLVE-GP", "ODVGP")
    lines = []
    for row in rows:
        line = [f"{row['shift_in_lengthscales']:.1f}", f"{row['SGPR to exact']:.3f}"]
        for name in ("apart", "mixed"):
            line.append(f"{row[f'correlation, {name}']:.4f}")
            line += [f"{row[f'{structure} to SGPR, {name}']:.5f}" for structure in columns[1:]]
        lines.append(line)
    print(f"{'':21}{'a set in each half':^32}{'both sets in both halves':^32}")
    print(table(("shift", "SGPR to exact", *columns, *columns), lines, left=()))
    note(
        "The right half of the data is moved right by so many lengthscales. The points are the same in both "
        "arrangements; 'correlation' is the largest between the two sets a priori. Where sets are independent a priori "
        "and no row sees both, SOLVE-GP is SGPR on both sets. Mixed sets go on losing, however far apart the halves."
    )


def draw(rows: list[dict], data: Data):
    figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    shifts = [row["shift_in_lengthscales"] for row in rows]
    for structure, color in zip(("SOLVE-GP", "ODVGP"), COLORS, strict=False):
        for name, style in (("mixed", "o--"), ("apart", "o-")):
            losses = [max(row[f"{structure} to SGPR, {name}"], ROUNDING) for row in rows]
            where = "a set in each cluster" if name == "apart" else "both sets in both clusters"
            ax.plot(shifts, losses, style, color=color, ms=4, label=f"{structure}, {where}")
    ax.axhline(ROUNDING, color="0.6", lw=0.8, ls=":", label="rounding error: no less is shown")
    ax.set_yscale("log")
    ax.set_xlabel("right cluster moved by, in lengthscales")
    ax.set_ylabel("KL[q ‖ SGPR on both sets] (nats)")
    ax.legend(frameon=False, fontsize=9, loc="center right")
    return figure
