"""Fits side by side, over hyperparameters and points."""

from __future__ import annotations

import argparse

import numpy as np
from matplotlib import pyplot as plt

from common import heading, note, table
from npgp.plots import COLORS
from studies.orthogonal.structures import Data, bound_and_slopes, evidence_and_slope, fit_all, predict

CONDITIONALS = ("prior", "tight")


def study(data: Data, args: argparse.Namespace) -> dict:
    """Every structure at as many points, over hyperparameters and points, with each conditional."""
    M, h = args.inducing, args.inducing // 2
    rng = np.random.default_rng(args.seed)
    x = data.X[:, 0]

    def random_starts(size: int):
        for i in range(args.starts):
            yield np.zeros(3) if i % 2 else data.hyper, x[rng.choice(len(x), size, replace=False)]

    fits: dict[str, dict] = {}
    for conditional in CONDITIONALS[:1] if args.quick else CONDITIONALS:
        found: dict[str, tuple[float, np.ndarray, np.ndarray]] = {}
        found[f"SGPR({h})"] = fit_all(data, random_starts(h), 0, "SGPR", conditional)
        union = fit_all(data, random_starts(M), 0, "SGPR", conditional)
        # SGPR's points, shared out apart and alternately, are good starts for two sets.
        places = np.sort(union[2])
        shared = [(union[1], places), (union[1], np.concatenate([places[::2], places[1::2]]))]
        for structure in ("ODVGP", "SOLVE-GP"):
            starts = [*random_starts(M), *shared]
            found[f"{structure}({h}+{h})"] = fit_all(data, starts, h, structure, conditional)
        again = [fit[1:] for fit in (union, found[f"ODVGP({h}+{h})"], found[f"SOLVE-GP({h}+{h})"])]
        found[f"SGPR({M})"] = fit_all(data, again, 0, "SGPR", conditional)
        for name in (f"SGPR({h})", f"ODVGP({h}+{h})", f"SOLVE-GP({h}+{h})", f"SGPR({M})"):
            value, hyper, points = found[name]
            lengthscale, variance, noise = map(float, np.exp(hyper))
            first = points[:h] if "+" in name else points
            fits[f"{name}, {conditional}"] = {
                "conditional": conditional,
                "bound": value,
                "union_there": bound_and_slopes(hyper, points, data, 0, "SGPR", conditional)[0],
                "evidence_there": evidence_and_slope(hyper, data.X, data.y)[0],
                "lengthscale": lengthscale,
                "variance": variance,
                "noise_variance": noise,
                "Z": sorted(first.tolist()),
                "O": sorted(points[len(first) :].tolist()),
            }
    return fits


def show(fits: dict, data: Data) -> None:
    evidence = f"{data.evidence:.3f}"
    rows = [["exact GP", "", evidence, "", evidence, *map("{:.3f}".format, np.exp(data.hyper))]]
    for name, fit in fits.items():
        figures = [fit[key] for key in ("bound", "union_there", "evidence_there", "lengthscale", "variance")]
        rows.append([*name.split(", "), *map("{:.3f}".format, figures), f"{fit['noise_variance']:.4f}"])
    heading("1. Fits over hyperparameters and points (natural logs)")
    header = ("", "conditional", "bound", "union there", "evidence there", "lengthscale", "variance", "noise")
    print(table(header, rows, left=(0, 1)))
    note(
        "'bound' is each structure's own. 'union there' is SGPR's bound at the same hyperparameters with both sets in "
        "one; less the bound, it is what the structure costs. 'evidence there' is the exact log evidence at the same "
        "hyperparameters; less the bound, it is the KL to the exact posterior (with ODVGP and 'tight', at least that)."
    )


def draw(fits: dict, data: Data):
    columns = len({fit["conditional"] for fit in fits.values()})
    shape = (len(fits) // columns, columns)
    size = (5.2 * shape[1], 2.3 * shape[0] + 0.4)
    figure, axes = plt.subplots(*shape, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained")
    x, y = data.X[:, 0], data.y
    grid = np.linspace(x.min() - 1.0, x.max() + 1.0, 301)
    reference = predict(data.hyper, x, data.X, y, grid[:, None], 0, "SGPR")
    reference_mean, reference_scale = np.asarray(reference[0]), np.sqrt(np.asarray(reference[1]))
    span = y.max() - y.min()
    for ax, (name, fit) in zip(axes.T.flat, fits.items(), strict=True):
        points = np.array(fit["Z"] + fit["O"])
        hyper = np.log([fit["lengthscale"], fit["variance"], fit["noise_variance"]])
        structure = name.split("(")[0]
        split = len(fit["Z"]) if structure != "SGPR" else 0
        mean, variance = predict(hyper, points, data.X, y, grid[:, None], split, structure)
        mean, scale = np.asarray(mean), np.sqrt(np.asarray(variance))
        ax.scatter(x, y, s=5, color="0.65", label="data")
        ax.plot(grid, mean, color=COLORS[0], label="mean ± 2 sd, with noise")
        ax.fill_between(grid, mean - 2 * scale, mean + 2 * scale, color=COLORS[0], alpha=0.2, lw=0)
        for sign in (-2, 0, 2):
            style = {"lw": 0.8, "ls": ":" if sign else "-", "label": None if sign else "exact GP"}
            ax.plot(grid, reference_mean + sign * reference_scale, color="k", **style)
        places = {"first set Z": (fit["Z"], COLORS[2], 0.13), "second set O": (fit["O"], COLORS[1], 0.24)}
        for label, (set_, color, depth) in places.items():
            height = np.full(len(set_), y.min() - depth * span)
            ax.plot(set_, height, "|", ms=11, mew=2, color=color, label=label)
        ax.set_title(f"{name}: bound {fit['bound']:.2f}", fontsize=10)
    axes[0, 0].set_ylim(bottom=y.min() - 0.36 * span)
    for ax in axes[:, 0]:
        ax.set_ylabel("y")
    for ax in axes[-1]:
        ax.set_xlabel("x")
    two_sets = axes[1, 0]
    handles, labels = two_sets.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    return figure
