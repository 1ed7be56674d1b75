"""Held-out rows in ``regression_study.py``: conditionals with and without local correction, and the exact variance."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import npgp
from common import clock, note, spread, table
from studies.regression.collapsed_fits import (
    CONDITIONALS,
    condition,
    fit,
    in_turn,
    load,
    loss_and_slope,
    predict,
    start_at,
)
from studies.regression.minibatch import scores

#: Inducing points and the largest group of each set of the first part.
SIZES = {"concrete": (64, 64), "kin8nm": (128, 64), "power": (64, 64), "kin40k": (128, 64), "protein": (128, 64)}
TABLE1 = ("wine", "solar", "pumadyn32nm")


def held_out(prediction: tuple, noise: float, y: np.ndarray) -> dict[str, float]:
    """Scores of predictions (mean and variance of f) of standardized targets; the noise is added."""
    mean, variance = map(np.asarray, prediction)
    return scores(mean, variance + noise, y)


def grouped(args: argparse.Namespace) -> dict:
    """Each conditional on each set, with and without the local correction."""
    print("PRIOR, TIGHT AND GROUPED CONDITIONALS, with and without the local correction\n")
    note(
        "The bound is per training row. RMSE and mean log-likelihood are of test rows, standardized; '+' is with the "
        "local correction, from the training rows of the same group. Times are of the bound with its gradient, all at "
        "one place, and the ratio is to that of tight."
    )
    print()
    report = {}
    for name in [name for name in SIZES if args.sets is None or name in args.sets]:
        inducing, size = (10, 16) if args.quick else SIZES[name]
        results: dict[str, dict[str, list[float]]] = {c: {} for c in CONDITIONALS}
        for split in range(args.splits):
            data = load(name, split, args)
            for conditional, figures in grouped_split(data, inducing, size, args, timed=split == 0).items():
                for key, value in figures.items():
                    results[conditional].setdefault(key, []).append(value)
        shape = {"rows": len(data.y_train), "test_rows": len(data.y_test), "columns": data.X_train.shape[1]}
        report[name] = {**shape, "inducing": inducing, "group_size": size, "splits": args.splits, "methods": results}
        subset = ", random subsets" if len(data.y_train) == args.rows else ""
        print(
            f"{name}: {shape['rows']} training and {shape['test_rows']} test rows{subset}, {shape['columns']} columns; "
            f"M = {inducing}, groups of at most {size}; "
            + ("split 0" if args.splits == 1 else f"splits 0 to {args.splits - 1}, mean ± standard error")
        )
        heads = ("", "bound", "RMSE", "RMSE +", "log-lik.", "log-lik. +", "iterations", "ms", "ratio")
        keys = ("bound", "rmse", "rmse_local", "log_likelihood", "log_likelihood_local")
        print(
            table(
                heads,
                [
                    (
                        conditional,
                        *(spread(r[key]) for key in keys),
                        spread(r["iterations"], 0),
                        f"{r['gradient_ms'][0]:.1f}",
                        f"{r['gradient_ratio'][0]:.2f}",
                    )
                    for conditional, r in results.items()
                ],
            ),
            end="\n\n",
        )
    return report


def grouped_split(data, inducing: int, size: int, args: argparse.Namespace, timed: bool) -> dict[str, dict]:
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    groups = npgp.median_split(data.X_train, size)
    start = start_at(data.X_train, inducing, args.seed)
    figures, thetas = {}, {}
    for conditional in CONDITIONALS:
        fitted = fit(data, groups, conditional, start, args)
        thetas[conditional] = fitted.theta
        noise = float(np.exp(fitted.theta[X.shape[1] + 1]))
        posterior = condition(fitted.theta, X, y, groups, conditional, args.kernel)
        corrected = npgp.local_correction(posterior, X, y, npgp.Gaussian(variance=noise), groups)
        plain = held_out(predict(posterior, data.X_test), noise, data.y_test)
        local = held_out(predict(corrected, data.X_test), noise, data.y_test)
        figures[conditional] = {
            "bound": fitted.bound,
            **plain,
            **{f"{key}_local": value for key, value in local.items()},
            "noise_variance": noise,
            "iterations": fitted.iterations,
        }
    if timed:
        calls = {c: partial(loss_and_slope, thetas["tight"], X, y, groups, c, args.kernel) for c in CONDITIONALS}
        for conditional, (ms, ratio) in in_turn(calls, "tight", args.repetitions, clock(args.cpu_time)).items():
            figures[conditional].update(gradient_ms=ms, gradient_ratio=ratio)
    return figures


def table1(args: argparse.Namespace) -> dict:
    """The training-point term of the predictive variance: accuracy with and without it, and what it costs."""
    print("THE TRAINING-POINT TERM OF THE PREDICTIVE VARIANCE (Bui, Ashman & Turner 2025, table 1)\n")
    ard = "" if args.kernel.endswith("isotropic") else " with ARD"
    note(
        f"tight fits with M = {args.inducing} inducing points, {args.kernel} kernel{ard}, "
        + (f"splits 0 to {args.splits - 1}, mean ± standard error. " if args.splits > 1 else "split 0. ")
        + "The term makes the variance smaller and leaves the mean, so the RMSE, as it is. 'std' is the median "
        "predictive standard deviation, noise included. Cost: seconds for all test rows of split 0, with everything "
        "prepared, and the ratio."
    )
    print()
    report, rows = {}, []
    for name in [name for name in TABLE1 if args.sets is None or name in args.sets]:
        found: dict[str, list[float]] = {
            key: [] for key in ("rmse", "log_likelihood", "rmse_exact", "log_likelihood_exact", "std", "std_exact")
        }
        cost: dict[str, tuple[float, float]] = {}
        for split in range(args.splits):
            data = load(name, split, args)
            X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
            fitted = fit(data, None, "tight", start_at(data.X_train, args.inducing, args.seed), args)
            noise = float(np.exp(fitted.theta[X.shape[1] + 1]))
            plain = condition(fitted.theta, X, y, None, "tight", args.kernel)
            exact = npgp.variational.exact_variance(plain, X, y, npgp.Gaussian(variance=noise))
            moments = predict(plain, data.X_test), predict(exact, data.X_test)
            for suffix, prediction in zip(("", "_exact"), moments, strict=True):
                for key, value in held_out(prediction, noise, data.y_test).items():
                    found[f"{key}{suffix}"].append(value)
                found[f"std{suffix}"].append(float(np.sqrt(np.median(prediction[1]) + noise)))
            if split == 0:
                calls = {"without": partial(predict, plain, data.X_test), "with": partial(predict, exact, data.X_test)}
                repetitions = min(args.repetitions, max(2, int(2e4 / len(y))))
                cost = in_turn(calls, "without", repetitions, clock(args.cpu_time))
            del exact, moments
        report[name] = {
            "rows": len(y),
            "test_rows": len(data.y_test),
            "inducing": args.inducing,
            "splits": args.splits,
            **found,
            "seconds": cost["without"][0] / 1e3,
            "seconds_exact": cost["with"][0] / 1e3,
            "cost_ratio": cost["with"][1],
        }
        figures = report[name]
        for label, suffix in (("without", ""), ("with", "_exact")):
            rows.append(
                (
                    name if not suffix else "",
                    str(len(y)) if not suffix else "",
                    label,
                    spread(found[f"rmse{suffix}"]),
                    spread(found[f"log_likelihood{suffix}"], 4),
                    f"{np.mean(found[f'std{suffix}']):.4f}",
                    f"{figures[f'seconds{suffix}']:.4f}",
                    f"{figures['cost_ratio']:.0f}" if suffix else "1",
                )
            )
    print(table(("", "rows", "term", "RMSE", "log-likelihood", "std", "seconds", "ratio"), rows), end="\n\n")
    return report


def plot_log_likelihoods(report: Mapping[str, Any]):
    """A panel for each set: test log-likelihood of each conditional, without and with the local correction."""
    from matplotlib import pyplot as plt

    from npgp.plots import COLORS

    size = (max(6.4, 1.4 + 2.5 * len(report)), 2.7)
    figure, axes = plt.subplots(1, len(report), figsize=size, sharey=True, squeeze=False, layout="constrained")
    places = np.arange(len(CONDITIONALS))[::-1]
    for ax, (name, result) in zip(axes[0], report.items(), strict=True):
        for place, conditional, color in zip(places, CONDITIONALS, COLORS, strict=False):
            method = result["methods"][conditional]
            plain, local = (np.mean(method[key]) for key in ("log_likelihood", "log_likelihood_local"))
            ax.plot([plain, local], [place, place], color=color, lw=1.2, zorder=1)
            ax.plot(plain, place, "o", ms=7, mec=color, mfc="white", mew=1.5)
            ax.plot(local, place, "o", ms=7, color=color)
        ax.set_title(f"{name}, M = {result['inducing']}", fontsize=10)
        ax.set_ylim(-0.6, len(CONDITIONALS) - 0.4)
        ax.margins(x=0.15)
        ax.locator_params(axis="x", nbins=4)
        ax.grid(axis="x", color="0.9", lw=0.7)
        ax.set_axisbelow(True)
    axes[0, 0].set_yticks(places, CONDITIONALS)
    figure.supxlabel("mean test log-likelihood per row, nats (higher is better)", fontsize=10)
    empty = plt.Line2D([], [], ls="", marker="o", ms=7, mec="0.3", mfc="white", mew=1.5)
    full = plt.Line2D([], [], ls="", marker="o", ms=7, color="0.3")
    labels = ["from the inducing points alone", "with the local correction"]
    figure.legend([empty, full], labels, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure
