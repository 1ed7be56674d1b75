"""What ``oil_bounds.py`` prints and draws of its runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import numpy as np

from common import spread, table
from studies.gplvm.bounds import COLLAPSED, CONDITIONALS

#: Points of a trace that are drawn.
DRAWN_POINTS = 100


def compare(title: str, fits: Mapping[str, Sequence[dict]]) -> None:
    """
    Print the bounds of each seed, their means, and gains over the first conditional paired by seed.

    :param fits: for each conditional the figures of each seed.
    """
    base, *others = fits
    bounds = {c: np.array([f["elbo_per_row"] for f in runs]) for c, runs in fits.items()}
    heads = ["seed", *fits, *(f"{c} gains" for c in others)]
    heads += ["noise variance", "mean d/σ²", "NN errors", "relevant dims"]
    rows = []
    for seed in range(len(bounds[base])):
        here = [runs[seed] for runs in fits.values()]
        rows.append(
            [
                str(seed),
                *(f"{f['elbo_per_row']:.3f}" for f in here),
                *(f"{bounds[c][seed] - bounds[base][seed]:+.3f}" for c in others),
                " ".join(f"{f['noise_variance']:.5f}" for f in here),
                " ".join(f"{f['residual_over_noise']:.3f}" for f in here),
                " ".join(str(f["nn_errors"]) for f in here),
                " ".join(str(f["relevant_dims"]) for f in here),
            ]
        )
    means = [spread(v) for v in bounds.values()] + [spread(bounds[c] - bounds[base], sign="+") for c in others]
    rest = []
    for key, digits in (("noise_variance", 5), ("residual_over_noise", 3), ("nn_errors", 1), ("relevant_dims", 1)):
        rest.append(" ".join(f"{np.mean([f[key] for f in runs]):.{digits}f}" for runs in fits.values()))
    print(f"\n{title}\n{table(heads, [*rows, ['mean', *means, *rest]], left=())}")


def compare_here(title: str, runs: Sequence[dict]) -> None:
    """Print all bounds at the parameters of one run of each seed."""
    bounds = {c: np.array([f["bounds_here"][c] for f in runs]) for c in runs[0]["bounds_here"]}
    base, *others = bounds
    rows = [
        [
            str(seed),
            *(f"{v[seed]:.3f}" for v in bounds.values()),
            *(f"{bounds[c][seed] - bounds[base][seed]:+.3f}" for c in others),
            f"{f['gain_here']:+.3f}",
        ]
        for seed, f in enumerate(runs)
    ]
    rows.append(
        [
            "mean",
            *(spread(v) for v in bounds.values()),
            *(spread(bounds[c] - bounds[base], sign="+") for c in others),
            spread([f["gain_here"] for f in runs], sign="+"),
        ]
    )
    heads = ["seed", *bounds, *(f"{c} gains" for c in others), "½D mean(d/σ² − log(1 + d/σ²))"]
    print(f"\n{title}\n{table(heads, rows, left=())}")


#: Stages that continue, and those that they continue from.
BEFORE = {"continued": "independent", "collapsed_continued": "collapsed"}


def stage_steps(stage: str, args: argparse.Namespace) -> int:
    return {
        "independent": args.steps,
        "continued": args.continue_steps,
        "collapsed": args.collapsed_steps,
        "collapsed_continued": args.collapsed_steps // 3,
    }[stage]


def how(stage: str) -> str:
    return "collapsed, by L-BFGS" if stage.startswith("collapsed") else "uncollapsed, by SVI"


def draw(fits: Mapping[str, Mapping[str, Sequence[dict]]], args: argparse.Namespace):
    """
    The traces of the trainings: their mean over seeds, with a band from the lowest to the highest. Those that continue
    are drawn from where they start, the bound of ``prior`` at its solution, as the seeds' solutions lie apart.
    """
    from matplotlib import pyplot as plt

    from npgp.plots import COLORS

    colors = dict(zip(dict.fromkeys((*CONDITIONALS, *COLLAPSED)), COLORS, strict=False))
    columns = 2 if len(fits) > 1 else 1
    down = -(-len(fits) // columns)
    size = (5.4 * columns, 4.0 * down + 0.2)
    figure, axes = plt.subplots(down, columns, figsize=size, layout="constrained", squeeze=False)
    for ax in axes.flat[len(fits) :]:
        ax.set_visible(False)
    for ax, (stage, runs) in zip(axes.flat, fits.items(), strict=False):
        zero, steps = np.zeros((len(next(iter(runs.values()))), 1)), stage_steps(stage, args)
        first = stage in BEFORE.values()
        if not first:
            zero = np.array([[f["elbo_per_row"]] for f in fits[BEFORE[stage]]["prior"]])
        limits = []
        for conditional, figures in runs.items():
            traces = np.array([f["trace"] for f in figures]) - zero
            parts = np.array_split(traces, min(DRAWN_POINTS, traces.shape[1]), axis=1)
            traces = np.stack([part.mean(1) for part in parts], 1)
            at = (np.arange(traces.shape[1]) + 0.5) * steps / traces.shape[1]
            final = np.array([f["elbo_per_row"] for f in figures]) - zero[:, 0]
            ax.plot(at, traces.mean(0), color=colors[conditional], label=f"{conditional}: {spread(final, 2)}")
            ax.fill_between(at, traces.min(0), traces.max(0), color=colors[conditional], alpha=0.18, lw=0)
            limits.append([np.quantile(traces.min(0), 0.15 if first else 0.0), traces.max()])
        low, high = np.min(limits, 0)[0], np.max(limits, 0)[1]
        margin = 0.05 * (high - low)
        ax.set_ylim(low - margin, high + margin)  # the first steps are far below
        ax.set_title(("" if first else "trained on from the solution of prior, ") + how(stage), fontsize=10)
        ax.set_xlabel("step")
        ax.set_ylabel("bound per row (nats)" if first else "bound per row, less prior's at its solution")
        error = " ± standard error" if len(zero) > 1 else ""
        place = "lower right" if first else "best"
        ax.legend(frameon=False, loc=place, title=f"at the end: mean{error}", alignment="left")
    seeds = "lines: mean over seeds, bands: lowest to highest" if args.seeds > 1 else "one seed"
    figure.suptitle(f"Oil flow ({args.data}), M = {args.inducing}; {seeds}", fontsize=11)
    return figure
