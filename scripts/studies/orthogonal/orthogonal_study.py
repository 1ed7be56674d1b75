#!/usr/bin/env python
"""SGPR, ODVGP and SOLVE-GP side by side on one-dimensional data: what orthogonal inducing points lose, and save.

The studies of Fernlund 2022, chapter 6, with corrected bounds: fits at an equal number of inducing points, the KL
divergence from SOLVE-GP to SGPR as the two sets of points move apart, allocation of points to the two sets, two
clusters, and (with ``--cost``, by itself) the measured cost of a training step.

    NPGP_DATA=... python scripts/studies/orthogonal/orthogonal_study.py --json out/orthogonal.json        a few minutes
    python scripts/studies/orthogonal/orthogonal_study.py --cost --json out/orthogonal_cost.json          on a quiet machine

Without Snelson's data in the folder named by ``NPGP_DATA``, the data are simulated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import scipy.linalg
from matplotlib import pyplot as plt
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

import npgp
import npgp.inducing
from npgp import datasets, linalg
from npgp.features import covariance
from npgp.plots import COLOURS
from npgp.variational import DenseNormal, SquareTrilTransform

#: S of each block of q: one block for the union, two for the orthogonal structures.
STRUCTURES: dict[str, tuple[str, ...]] = {
    "SGPR": ("dense",),
    "ODVGP": ("dense", "prior"),
    "SOLVE-GP": ("dense", "dense"),
}
CONDITIONALS = ("prior", "tight")
#: Relative to the prior variance, in float64.
JITTER = 1e-8
#: Logs of lengthscale, variance and noise stay within these.
LOG_BOUNDS = (-7.0, 6.0)
#: KL divergences below this are rounding error.
ROUNDING = 1e-6

DIFFERENCES = (
    "The bound. Eq. 5.33 (and algorithm 3) is given as the collapsed bound of ODVGP and SOLVE-GP, but is SGPR's on the "
    "union of both sets: reversing Jensen's inequality frees q(u, v) from its structure. Here each structure has its "
    "own bound: the fit term is the union's for all, the log-determinant is taken block by block (SOLVE-GP: both; "
    "ODVGP: the first alone, and the second set's variance stays in the residual). The columns 'union there' are "
    "what eq. 5.33 would say at the same places.",
    "So the structures are no longer equal by construction: union ≥ SOLVE-GP ≥ ODVGP ≥ SGPR on the first set alone "
    "(with the conditional 'prior'), and the differences are what this study measures.",
    "KL[SOLVE-GP ‖ SGPR] is exact, in whitened coordinates: both are Gaussians N(m, ·) with the same mean, and it "
    "equals the difference of the two bounds, which is the mutual information of the two sets in SGPR's posterior.",
    "KL to the exact posterior is log evidence less ELBO, an identity for the conditional 'prior'; no quadrature.",
    "Eq. 5.33 also lacks a log, eq. 3.15 a square, and line 20 of algorithm 3 must read C_v* = K_v* − δ_vᵀ δ_*.",
    "The conditional 'tight' (Bui, Ashman & Turner 2025; Titsias 2025) is later than the thesis; with a mean-only "
    "second set, as in ODVGP, it is npgp's.",
    "Collapsed and uncollapsed training are timed apart. The collapsed means couple both sets, so that a correct "
    "collapsed bound factorises the union's matrix whatever the structure.",
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inducing", type=int, default=10, help="inducing points of both sets together, even")
    parser.add_argument("--starts", type=int, default=16, help="random starts of each fit")
    parser.add_argument(
        "--quick", action="store_true", help="few points, starts and sizes, one conditional: a check that it runs"
    )
    parser.add_argument("--cost", action="store_true", help="measure the cost of training steps, and nothing else")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512], help="for --cost: M, even")
    parser.add_argument("--repetitions", type=int, default=25, help="for --cost: of each measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the pictures")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.quick:
        args.inducing, args.starts, args.sizes, args.repetitions = 4, 1, [16], 3
    if args.inducing < 4 or args.inducing % 2 or any(M < 2 or M % 2 for M in args.sizes):
        parser.error("--inducing must be an even number of at least 4, and --sizes even numbers.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Bounds, fits and posteriors of one-dimensional data


class Data(NamedTuple):
    """Rows, and the exact GP's hyperparameters (logs of lengthscale, variance, noise) and log evidence there."""

    X: np.ndarray
    y: np.ndarray
    hyper: np.ndarray
    evidence: float

    @property
    def lengthscale(self) -> float:
        return float(np.exp(self.hyper[0]))

    @property
    def kernel(self) -> npgp.RBF:
        return npgp.RBF(*np.exp(self.hyper[:2]))


def collapsed(hyper, points, X, split: int, structure: str, conditional: str) -> npgp.CollapsedGP:
    """The first ``split`` of the points are the first set; SGPR has them all in one."""
    lengthscale, variance, noise = jnp.exp(hyper)
    points = points[:, None]
    return npgp.CollapsedGP(
        npgp.RBF(lengthscale, variance),
        X,
        points if structure == "SGPR" else [points[:split], points[split:]],
        noise,
        conditional=conditional,  # type: ignore[arg-type]
        covariances=STRUCTURES[structure],
        jitter=JITTER,
    )


@partial(jax.jit, static_argnames=("split", "structure", "conditional"))
def _bound_and_slopes(hyper, points, X, y, split: int, structure: str, conditional: str):
    def bound(hyper, points):
        return collapsed(hyper, points, X, split, structure, conditional).log_prob(y)

    return jax.value_and_grad(bound, (0, 1))(hyper, points)


def bound_and_slopes(hyper, points, data: Data, split: int, structure: str, conditional: str = "prior"):
    """The collapsed bound, and its slopes with hyperparameters and points. Compiled once for each structure."""
    split = 0 if structure == "SGPR" else split
    value, slopes = _bound_and_slopes(hyper, points, data.X, data.y, split, structure, conditional)
    return float(value), np.asarray(slopes[0]), np.asarray(slopes[1])


def bound(points, data: Data, split: int, structure: str) -> float:
    """With ``prior``, at the exact GP's hyperparameters: log evidence less this is the KL to the exact posterior."""
    return bound_and_slopes(data.hyper, points, data, split, structure)[0]


@jax.jit
def _evidence_and_slope(hyper, X, y):
    def evidence(hyper):
        lengthscale, variance, noise = jnp.exp(hyper)
        return npgp.exact_log_evidence(npgp.RBF(lengthscale, variance), X, y, noise)

    return jax.value_and_grad(evidence)(hyper)


def evidence_and_slope(hyper, X, y):
    value, slope = _evidence_and_slope(hyper, X, y)
    return float(value), np.asarray(slope)


def lbfgs(objective, start: np.ndarray, num_logs: int) -> tuple[float, np.ndarray]:
    """Maximise from a start, whose first so many entries are logs."""

    def loss(theta):
        value, slope = objective(theta)
        return -value, -slope

    limits = [LOG_BOUNDS] * num_logs + [(None, None)] * (len(start) - num_logs)
    options = {"maxiter": 1000, "maxfun": 2000, "ftol": 1e-13, "gtol": 1e-7}
    optimum = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=limits, options=options)
    return -float(optimum.fun), optimum.x


def fit_all(data: Data, starts, split: int, structure: str, conditional: str) -> tuple[float, np.ndarray, np.ndarray]:
    """Maximise the bound over hyperparameters and points; the best of starts (hyper, points)."""

    def objective(theta):
        value, hyper, points = bound_and_slopes(theta[:3], theta[3:], data, split, structure, conditional)
        return value, np.concatenate([hyper, points])

    best, theta = max((lbfgs(objective, np.concatenate(start), 3) for start in starts), key=lambda fit: fit[0])
    return best, theta[:3], theta[3:]


def fit_points(data: Data, starts: Sequence[np.ndarray], split: int, structure: str) -> tuple[float, np.ndarray]:
    """Maximise the ``prior`` bound over the points alone; the best of starts."""

    def objective(points):
        value, _, slope = bound_and_slopes(data.hyper, points, data, split, structure)
        return value, slope

    return max((lbfgs(objective, np.asarray(start), 0) for start in starts), key=lambda fit: fit[0])


@partial(jax.jit, static_argnames=("split", "structure"))
def predict(hyper, points, X, y, grid, split: int, structure: str):
    """Mean and variance of y at the grid; the conditional has no part in it."""
    mean, variance = collapsed(hyper, points, X, split, structure, "prior").condition(y).mean_and_variance(grid)
    return mean, variance + jnp.exp(hyper[2])


@partial(jax.jit, static_argnames=("split", "structure"))
def whitened_posterior(hyper, points, X, y, split: int, structure: str):
    """
    Mean and Cholesky factor of q(ε) for all blocks stacked.

    The coordinates are the same for all structures: factorising K_uu by blocks gives the Cholesky factor of the whole.
    """
    q = collapsed(hyper, points, X, split, structure, "prior").condition(y).q
    factors = [block.scale_tril if isinstance(block, DenseNormal) else jnp.eye(block.event_shape[0]) for block in q]
    return jnp.concatenate([block.loc for block in q]), jax.scipy.linalg.block_diag(*factors)


def gaussian_kl(mean, factor, mean1, factor1) -> float:
    """``KL[N(mean, L Lᵀ) ‖ N(mean1, L1 L1ᵀ)]`` of lower Cholesky factors."""
    ratio = scipy.linalg.solve_triangular(factor1, factor, lower=True)
    shift = scipy.linalg.solve_triangular(factor1, mean1 - mean, lower=True)
    log_det = np.sum(np.log(np.diag(ratio)))
    return float(0.5 * (np.sum(np.square(ratio)) + shift @ shift - len(shift)) - log_det)


def kl_to_sgpr(points, data: Data, split: int, structure: str) -> float:
    """From the posterior of a structure to SGPR's on both sets, at the exact GP's hyperparameters."""
    q = whitened_posterior(data.hyper, points, data.X, data.y, split, structure)
    sgpr = whitened_posterior(data.hyper, points, data.X, data.y, 0, "SGPR")
    return gaussian_kl(*map(np.asarray, (*q, *sgpr)))


def load_data(seed: int) -> tuple[str, np.ndarray, np.ndarray]:
    """Snelson's data, or 200 rows simulated to resemble them."""
    try:
        X, y, _ = datasets.snelson()
        return "Snelson's data", X, y
    except FileNotFoundError:
        rng = np.random.default_rng(seed)
        X = np.sort(rng.uniform(0.0, 6.0, 200))[:, None]
        K = 0.7 * np.exp(-0.5 * ((X - X.T) / 0.6) ** 2) + 0.08 * np.eye(200)
        return "simulated data, as Snelson's were not found", X, np.linalg.cholesky(K) @ rng.normal(size=200)


def exact_fit(X: np.ndarray, y: np.ndarray) -> Data:
    """Hyperparameters of maximum evidence."""
    evidence, hyper = lbfgs(lambda h: evidence_and_slope(h, X, y), np.zeros(3), 3)
    return Data(X, y, hyper, evidence)


# ---------------------------------------------------------------------------------------------------------------
# 1. Fits side by side


def study_fits(data: Data, args: argparse.Namespace) -> dict:
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


def print_fits(fits: dict, data: Data) -> None:
    exact = (
        "exact GP",
        "",
        f"{data.evidence:.3f}",
        "",
        f"{data.evidence:.3f}",
        *map("{:.3f}".format, np.exp(data.hyper)),
    )
    rows: list[Sequence[str]] = [exact]
    for name, fit in fits.items():
        figures = [fit[key] for key in ("bound", "union_there", "evidence_there", "lengthscale", "variance")]
        rows.append((*name.split(", "), *map("{:.3f}".format, figures), f"{fit['noise_variance']:.4f}"))
    heading("1. Fits over hyperparameters and points (natural logs)")
    header = ("", "conditional", "bound", "union there", "evidence there", "lengthscale", "variance", "noise")
    print(table(header, rows))
    note(
        "'bound' is each structure's own. 'union there' is SGPR's bound at the same hyperparameters with both sets in "
        "one; less the bound, it is what the structure costs. 'evidence there' is the exact log evidence at the same "
        "hyperparameters; less the bound, it is the KL to the exact posterior (with ODVGP and 'tight', at least that)."
    )


def draw_fits(fits: dict, data: Data):
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
        ax.plot(grid, mean, color=COLOURS[0], label="mean ± 2 sd, with noise")
        ax.fill_between(grid, mean - 2 * scale, mean + 2 * scale, color=COLOURS[0], alpha=0.2, lw=0)
        for sign in (-2, 0, 2):
            style = {"lw": 0.8, "ls": ":" if sign else "-", "label": None if sign else "exact GP"}
            ax.plot(grid, reference_mean + sign * reference_scale, color="k", **style)
        places = {"first set Z": (fit["Z"], COLOURS[2], 0.13), "second set O": (fit["O"], COLOURS[1], 0.24)}
        for label, (set_, colour, depth) in places.items():
            height = np.full(len(set_), y.min() - depth * span)
            ax.plot(set_, height, "|", ms=11, mew=2, color=colour, label=label)
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


# ---------------------------------------------------------------------------------------------------------------
# 2. From SOLVE-GP to SGPR as the sets move apart


def study_separation(data: Data, args: argparse.Namespace) -> dict:
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


def print_separation(report: dict) -> None:
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
    print(table(("s/lengthscale", *columns, *columns), rows))
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


def draw_separation(report: dict):
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.8), sharex=True, layout="constrained")
    shifts = report["shift_in_lengthscales"]
    for ax, structure in zip(axes, ("SOLVE-GP", "ODVGP"), strict=True):
        for name, colour in zip(_arrangements(report), COLOURS, strict=False):
            curve = report[name][f"{structure} to SGPR"]
            label = f"{name}, {report[name]['spacing_in_lengthscales']:.2g} lengthscales apart"
            ax.plot(shifts[1:], curve[1:], color=colour, label=label)
        # Not joined to the rest: there the second set is the first.
        ax.plot(shifts[:1], curve[:1], "o", color="k", mfc="none", ms=5, label="O the same as Z", clip_on=False)
        ax.set_title(f"KL[{structure} ‖ SGPR on both sets]", fontsize=10)
        ax.set_xlabel("shift of the second set O from the first Z, in lengthscales")
        ax.set_ylim(0.0, 1.25 * ax.get_ylim()[1])
    axes[0].set_ylabel("nats")
    axes[0].legend(frameon=False, fontsize=9, loc="upper right")
    return figure


# ---------------------------------------------------------------------------------------------------------------
# 3. How many points for which set


def study_allocation(data: Data, args: argparse.Namespace) -> dict:
    """KL to the exact posterior for M1 + M2 = M, with points placed by rule and optimised."""
    M = args.inducing
    first = [M // 2] if args.quick else list(range(1, M))
    greedy = np.asarray(npgp.inducing.greedy_variance(data.kernel, data.X, M))[:, 0]
    means = np.sort(np.asarray(npgp.inducing.kmeans(data.X, M, args.seed))[:, 0])
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

    def optimised(m1: int, structure: str) -> float:
        if structure != "SGPR":
            return fit_points(data, starts, m1, structure)[0]
        fewer = np.asarray(npgp.inducing.kmeans(data.X, m1, args.seed))[:, 0]
        return fit_points(data, [greedy[:m1], fewer], 0, "SGPR")[0]

    report = {"greedy": placed(greedy), "k-means": placed(means), "optimised": curves(best, optimised)}
    return {"total": M, "first": [*first, M], **report}


PLACEMENTS = {
    "greedy": "greedy variance, in the order chosen",
    "k-means": "k-means, the leftmost M1 in the first set",
    "optimised": "optimised for each structure",
}


def print_allocation(report: dict) -> None:
    M = report["total"]
    heading(f"3. KL[q ‖ exact posterior] by allocation, M1 + M2 = {M} (nats)")
    methods = ("SGPR on both", "SOLVE-GP", "ODVGP", "SGPR on the first")
    for name, title in PLACEMENTS.items():
        rows = [
            (str(m1), str(M - m1), *(f"{report[name][method][i]:.3f}" for method in methods))
            for i, m1 in enumerate(report["first"])
        ]
        print(f"points: {title}")
        print(table(("M1", "M2", *methods), rows))
    note(
        "The last line, M2 = 0, is SGPR for all. At fixed points SGPR on both ≤ SOLVE-GP ≤ ODVGP ≤ SGPR on the first "
        "set alone; optimised points are the best of a few starts, and need not be the best there are."
    )


def draw_allocation(report: dict):
    size = {"figsize": (11.4, 6.0), "height_ratios": (3, 2)}
    figure, axes = plt.subplots(2, len(PLACEMENTS), sharex=True, sharey="row", layout="constrained", **size)
    styles = {
        "SGPR on both": ("-", "k", "SGPR on both sets"),
        "SOLVE-GP": ("o-", COLOURS[0], "SOLVE-GP"),
        "ODVGP": ("s-", COLOURS[1], "ODVGP"),
        "SGPR on the first": (":", "0.5", "SGPR on the first set alone"),
    }
    for (top, bottom), (name, title) in zip(axes.T, PLACEMENTS.items(), strict=True):
        curves = {method: np.array(report[name][method]) for method in styles}
        for method, (style, colour, label) in styles.items():
            top.plot(report["first"], curves[method], style, color=colour, ms=4, label=label)
        excess = curves["SOLVE-GP"] - curves["SGPR on both"]
        bottom.plot(report["first"], excess, "o-", color=COLOURS[0], ms=4, label="SOLVE-GP")
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


# ---------------------------------------------------------------------------------------------------------------
# 4. Two clusters


def study_clusters(data: Data, args: argparse.Namespace) -> list[dict]:
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


def print_clusters(rows: list[dict]) -> None:
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
    print(table(("shift", "SGPR to exact", *columns, *columns), lines))
    note(
        "The right half of the data is moved right by so many lengthscales. The points are the same in both "
        "arrangements; 'correlation' is the largest between the two sets a priori. Where sets are independent a priori "
        "and no row sees both, SOLVE-GP is SGPR on both sets. Mixed sets go on losing, however far apart the halves."
    )


def draw_clusters(rows: list[dict]):
    figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    shifts = [row["shift_in_lengthscales"] for row in rows]
    for structure, colour in zip(("SOLVE-GP", "ODVGP"), COLOURS, strict=False):
        for name, style in (("mixed", "o--"), ("apart", "o-")):
            losses = [max(row[f"{structure} to SGPR, {name}"], ROUNDING) for row in rows]
            where = "a set in each cluster" if name == "apart" else "both sets in both clusters"
            ax.plot(shifts, losses, style, color=colour, ms=4, label=f"{structure}, {where}")
    ax.axhline(ROUNDING, color="0.6", lw=0.8, ls=":", label="rounding error: no less is shown")
    ax.set_yscale("log")
    ax.set_xlabel("right cluster moved by, in lengthscales")
    ax.set_ylabel("KL[q ‖ SGPR on both sets] (nats)")
    ax.legend(frameon=False, fontsize=9, loc="center right")
    return figure


# ---------------------------------------------------------------------------------------------------------------
# 5. The cost of a step

#: How the M points are shared out to blocks, and S of each block.
COST_METHODS = {"SVGP": (1, "SGPR"), "SOLVE-GP": (2, "SOLVE-GP"), "ODVGP": (2, "ODVGP")}
COLUMNS = 8


class Program(NamedTuple):
    """A compiled function with its arguments."""

    compiled: Any
    args: tuple

    def __call__(self):
        return jax.block_until_ready(self.compiled(*self.args))

    @property
    def product_flops(self) -> float:
        """Matrix products and elementwise work, by XLA's count, which knows nothing of LAPACK."""
        return float(self.compiled.cost_analysis()["flops"])

    @property
    def lapack_flops(self) -> float:
        """
        Calls of LAPACK in the compiled program (CPU): n³/3 for a Cholesky factor, n² m to solve for m columns.

        Only those of the main computation: retries with more jitter stand in loops that are not entered.
        """
        entry = self.compiled.as_text().split("\nENTRY ")[1]
        shape, target = r"f\d\d\[(\d+),(\d+)\]", r'custom_call_target="lapack_.(potrf|trsm)'
        calls = re.findall(rf"= \(?{shape}.*{target}", entry)
        return sum(int(n) ** 2 * int(m) / (3 if name == "potrf" else 1) for n, m, name in calls)

    @property
    def flops(self) -> float:
        return self.product_flops + self.lapack_flops


def program(function: Callable, *args) -> Program:
    return Program(jax.jit(function).lower(*args).compile(), args)


def with_gradient(function: Callable) -> Callable:
    """The function's values and, with these as cotangents, the derivatives with all arguments."""

    def both(*args):
        values, pull = jax.vjp(function, *args)
        return values, pull(values)

    return both


def uncollapsed_step(M: int, method: str, X, y) -> Program:
    """Value and gradient of the ELBO of a minibatch, with all of its parameters."""
    blocks, structure = COST_METHODS[method]
    Z = starting_points(M, X.dtype)

    def positive(name, value):
        return numpyro.param(name, value, constraint=constraints.softplus_positive)

    def model(X, y):
        kernel = npgp.Matern32(positive("lengthscale", jnp.full(COLUMNS, 2.0, X.dtype)), positive("variance", 1.0))
        inducing = [numpyro.param(f"Z{i}", part) for i, part in enumerate(jnp.split(Z, blocks))]
        f = npgp.SparseGP("f", kernel, inducing, covariances=STRUCTURES[structure]).draw()
        with npgp.plate("data", 100 * len(X), rows=len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(positive("noise", 0.1)), obs=y, conditional="tight")

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(), TraceMeanField_ELBO())
    key = jax.random.key(0)
    params = svi.optim.get_params(jax.jit(svi.init)(key, X, y).optim_state)

    def step(params, X, y):
        def loss(params):
            return svi.loss.loss(key, svi.constrain_fn(params), svi.model, svi.guide, X, y)

        return jax.value_and_grad(loss)(params)

    return program(step, params, X, y)


def collapsed_step(M: int, method: str, X, y) -> Program:
    """Value and gradient of the collapsed bound, with hyperparameters and inducing inputs."""
    blocks, structure = COST_METHODS[method]
    start = (jnp.full(COLUMNS, 2.0, X.dtype), jnp.ones(2, X.dtype), starting_points(M, X.dtype))

    def step(parameters, X, y):
        def bound(parameters):
            lengthscale, (variance, noise), Z = parameters
            inducing, kernel = jnp.split(Z, blocks), npgp.Matern32(lengthscale, variance)
            gp = npgp.CollapsedGP(kernel, X, inducing, noise, covariances=STRUCTURES[structure])
            return gp.log_prob(y)

        return jax.value_and_grad(bound)(parameters)

    return program(step, start, X, y)


def starting_points(M: int, dtype) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(M, COLUMNS)), dtype)


def stages(M: int, method: str, X) -> dict[str, tuple[Callable, tuple]]:
    """The parts of an uncollapsed step, one by one, with arguments such as they meet there."""
    blocks, structure = COST_METHODS[method]
    kernel = npgp.Matern32(jnp.full(COLUMNS, 2.0, X.dtype), jnp.ones((), X.dtype))
    Z = list(jnp.split(starting_points(M, X.dtype), blocks))
    learned = sum(kind == "dense" for kind in STRUCTURES[structure])
    h = M // blocks
    raw = [0.1 * jax.random.normal(jax.random.key(i), (h, h), X.dtype) for i in range(learned)]

    def kernels(kernel, Z):
        points = [npgp.Points(z) for z in Z]
        columns = [[covariance(kernel, b, block) for b in points[:i]] for i, block in enumerate(points)]
        return columns, [b.gram(kernel) for b in points], [b.cross(kernel, X) for b in points]

    def factors(columns, grams):
        L, cross = [], []
        for column, gram in zip(columns, grams, strict=True):
            before, C = linalg.block_row(L, cross, column, gram)
            L.append(linalg.cholesky(C)[0])
            cross.append(before)
        return L, cross

    def variances(S, A):
        return sum(
            jnp.sum(jnp.square(DenseNormal(a[:, 0], s).factor_times(a)), axis=0) for s, a in zip(S, A, strict=False)
        )

    def triangles(raw):
        S = [SquareTrilTransform()(r) for r in raw]
        return S, [DenseNormal(s[0], s).kl() for s in S]

    columns, grams, K = jax.jit(kernels)(kernel, Z)
    L, cross = jax.jit(factors)(columns, grams)
    A = jax.jit(linalg.block_solve)(L, cross, K)
    return {
        "kernel matrices": (kernels, (kernel, Z)),
        "Cholesky factors": (factors, (columns, grams)),
        "whitening solves": (linalg.block_solve, (L, cross, K)),
        "products with S": (variances, (jax.jit(triangles)(raw)[0], A)),
        "triangles and KL of q": (triangles, (raw,)),
    }


def interleave(programs: Mapping[str, Program], repetitions: int, seed: int) -> dict[str, np.ndarray]:
    """Seconds of each run of each program: one after the other, in an order drawn anew for each repetition."""
    names = list(programs)
    rng = np.random.default_rng(seed)
    seconds = {name: np.empty(repetitions) for name in names}
    for _ in range(2):
        for name in names:
            programs[name]()
    for i in range(repetitions):
        for name in rng.permutation(names):
            began = time.perf_counter()
            programs[name]()
            seconds[name][i] = time.perf_counter() - began
    return seconds


def quartiles(values: np.ndarray) -> list[float]:
    return [float(q) for q in np.quantile(values, (0.25, 0.5, 0.75))]


def study_cost(args: argparse.Namespace) -> dict:
    """Time and operations of a training step in float32: SVGP with M points against two sets of M/2."""
    batch, rows = (64, 128) if args.quick else (1024, 4096)
    rng = np.random.default_rng(args.seed)
    X = jnp.asarray(rng.normal(size=(rows, COLUMNS)), jnp.float32)
    y = jnp.sin(X[:, 0]) + 0.3 * jnp.asarray(rng.normal(size=rows), jnp.float32)
    report: dict[str, Any] = {"batch": batch, "rows": rows, "columns": COLUMNS, "repetitions": args.repetitions}
    report |= {"load_average_before": os.getloadavg()[0], "cores": os.cpu_count()}
    kinds = {
        "uncollapsed": lambda M, method: uncollapsed_step(M, method, X[:batch], y[:batch]),
        "collapsed": lambda M, method: collapsed_step(M, method, X, y),
    }
    with threadpool_limits(limits=1, user_api="blas"):
        for kind, make in kinds.items():
            report[kind] = {}
            for M in args.sizes:
                programs = {method: make(M, method) for method in COST_METHODS}
                seconds = interleave(programs, args.repetitions, args.seed)
                report[kind][str(M)] = {
                    method: {
                        "seconds": quartiles(seconds[method]),
                        "fastest": float(seconds[method].min()),
                        "time_ratio": quartiles(seconds[method] / seconds["SVGP"]),
                        "fastest_ratio": float(seconds[method].min() / seconds["SVGP"].min()),
                        "product_flops": programs[method].product_flops,
                        "lapack_flops": programs[method].lapack_flops,
                        "flop_ratio": programs[method].flops / programs["SVGP"].flops,
                    }
                    for method in COST_METHODS
                }
        report["breakdown"] = {"inducing": max(args.sizes), "stages": breakdown(max(args.sizes), X[:batch], args)}
    report["load_average_after"] = os.getloadavg()[0]
    return report


def breakdown(M: int, X, args: argparse.Namespace) -> dict:
    """Seconds of each stage by itself: its values, and values with derivatives."""
    report: dict[str, dict] = {}
    for method in COST_METHODS:
        for stage, (function, arguments) in stages(M, method, X).items():
            both = {"values": function, "with_gradient": with_gradient(function)}
            report.setdefault(stage, {})[method] = {key: program(f, *arguments) for key, f in both.items()}
    for methods in report.values():
        programs = {f"{method} {key}": p for method, pair in methods.items() for key, p in pair.items()}
        seconds = interleave(programs, args.repetitions, args.seed)
        for method, pair in methods.items():
            methods[method] = {
                key: {
                    "seconds": quartiles(seconds[f"{method} {key}"]),
                    "fastest": float(seconds[f"{method} {key}"].min()),
                    "product_flops": p.product_flops,
                    "lapack_flops": p.lapack_flops,
                }
                for key, p in pair.items()
            }
    return report


def print_cost(report: dict) -> None:
    kinds = {
        "uncollapsed": f"uncollapsed ELBO (SVI, batch of {report['batch']} rows)",
        "collapsed": f"collapsed bound ({report['rows']} rows)",
    }
    for kind, title in kinds.items():
        heading(f"5. Cost of a value and gradient: {title}, {report['columns']} columns, float32")
        rows = []
        for M, methods in report[kind].items():
            for method, figures in methods.items():
                low, median, high = (1e3 * s for s in figures["seconds"])
                ratio = figures["time_ratio"]
                rows.append(
                    (
                        M,
                        method + ("" if method == "SVGP" else f" ({int(M) // 2}+{int(M) // 2})"),
                        f"{median:.2f}",
                        f"{low:.2f} to {high:.2f}",
                        f"{ratio[1]:.2f}",
                        f"{ratio[0]:.2f} to {ratio[2]:.2f}",
                        f"{1e3 * figures['fastest']:.2f}",
                        f"{figures['fastest_ratio']:.2f}",
                        f"{figures['flop_ratio']:.2f}",
                        f"{figures['product_flops'] / 1e9:.3f}",
                        f"{figures['lapack_flops'] / 1e9:.3f}",
                    )
                )
        header = (
            "M",
            "method",
            "ms",
            "quartiles",
            "ms/SVGP",
            "quartiles",
            "fastest",
            "/SVGP",
            "flops/SVGP",
            "GF products",
            "GF LAPACK",
        )
        print(table(header, rows))
    parts = report["breakdown"]
    heading(f"5. Stages of an uncollapsed step, M = {parts['inducing']}: ms for values + derivatives, fastest runs")
    rows, totals = [], dict.fromkeys(COST_METHODS, 0.0)
    for stage, methods in parts["stages"].items():
        row, base = [stage], methods["SVGP"]["with_gradient"]["fastest"]
        for method, pair in methods.items():
            values, total = (1e3 * pair[key]["fastest"] for key in ("values", "with_gradient"))
            flops = pair["with_gradient"]["product_flops"] + pair["with_gradient"]["lapack_flops"]
            totals[method] += total
            row += [f"{values:.2f} + {max(total - values, 0.0):.2f}", f"{1e-6 * flops / max(total, 1e-9):.0f}"]
            row += [] if method == "SVGP" else [f"{total / (1e3 * base):.2f}"]
        rows.append(row)
    sums = [f"{total:.2f}" for total in totals.values()]
    ratios = [f"{total / totals['SVGP']:.2f}" for total in totals.values()]
    rows.append(["sum", sums[0], "", sums[1], "", ratios[1], sums[2], "", ratios[2]])
    step = report["uncollapsed"][str(parts["inducing"])]
    whole = [f"{1e3 * figures['fastest']:.2f}" for figures in step.values()]
    ratios = [f"{figures['fastest_ratio']:.2f}" for figures in step.values()]
    rows.append(["whole step", whole[0], "", whole[1], "", ratios[1], whole[2], "", ratios[2]])
    print(table(("", "SVGP", "GF/s", "SOLVE-GP", "GF/s", "ratio", "ODVGP", "GF/s", "ratio"), rows))
    note(
        "By multiply-adds for each row: whitening costs ½M² for the union and for any blocks alike, as the blocks' "
        "factor is the union's; products with S cost M² for SVGP, ½M² for SOLVE-GP and ¼M² for ODVGP, and their "
        "derivatives twice that again; kernel matrices are the same for all. Cholesky factors cost a multiple of M³, "
        "of which two halves save most. So the saving grows with M. The collapsed bound has no S: its means couple "
        "the blocks, so that all structures form and factorise the union's B, and blocks save what symmetry does (the "
        "off-diagonal product is formed once) but, for SOLVE-GP, need the second block's own factor besides."
    )
    note(
        "Times of medians and quartiles include whatever else the machine was doing; ratios are of runs next to each "
        "other. The fastest runs are the least disturbed."
    )
    print(f"load average {report['load_average_before']:.2f} before, {report['load_average_after']:.2f} after")


def draw_cost(report: dict):
    figure, axes = plt.subplots(1, 3, figsize=(12.6, 3.9), layout="constrained")
    titles = {
        "uncollapsed": f"uncollapsed, batch of {report['batch']} rows",
        "collapsed": f"collapsed, {report['rows']} rows",
    }
    for ax, (kind, title) in zip(axes, titles.items(), strict=False):
        sizes = list(report[kind])
        for i, method in enumerate(list(COST_METHODS)[1:]):
            figures = [report[kind][M][method] for M in sizes]
            low, median, high = np.array([f["time_ratio"] for f in figures]).T
            at = np.arange(len(sizes)) + 0.16 * (i - 0.5)
            spread = np.abs([median - low, high - median])
            ax.errorbar(
                at, median, yerr=spread, fmt="o", color=COLOURS[i], capsize=3, label=f"{method}, median and quartiles"
            )
            fastest = [f["fastest_ratio"] for f in figures]
            ax.plot(at, fastest, "x", ms=6, color=COLOURS[i], label=f"{method}, fastest runs")
            counted = [f["flop_ratio"] for f in figures]
            ax.plot(at, counted, "_", ms=16, mew=2, color=COLOURS[i], alpha=0.6, label=f"{method}, operations counted")
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
    parts = report["breakdown"]
    below = np.zeros(len(COST_METHODS))
    for (stage, methods), colour in zip(parts["stages"].items(), COLOURS, strict=False):
        height = np.array([1e3 * methods[method]["with_gradient"]["fastest"] for method in COST_METHODS])
        axes[2].bar(list(COST_METHODS), height, 0.6, bottom=below, color=colour, label=stage)
        below += height
    whole = [1e3 * f["fastest"] for f in report["uncollapsed"][str(parts["inducing"])].values()]
    axes[2].hlines(whole, np.arange(3) - 0.36, np.arange(3) + 0.36, color="k", label="whole step")
    axes[2].set_ylim(0.0, 1.45 * max(*whole, *below))
    axes[2].set_ylabel("ms")
    axes[2].set_title(f"fastest runs of stages, uncollapsed, M = {parts['inducing']}", fontsize=10)
    axes[2].legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    return figure


# ---------------------------------------------------------------------------------------------------------------


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def note(text: str) -> None:
    print(textwrap.fill(text, 110))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def write(figures: Mapping[str, Any], report: dict, args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(args.out / name, dpi=130)
        plt.close(figure)
        print(f"wrote {args.out / name}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {args.json}")


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", not args.cost)
    if args.cost:
        report = study_cost(args)
        print_cost(report)
        write({"orthogonal_cost.png": draw_cost(report)}, report, args)
        return report

    title, X, y = load_data(args.seed)
    data = exact_fit(X, y)
    h = args.inducing // 2
    print(f"{title}: {len(X)} rows, log evidence {data.evidence:.4f}. {args.inducing} inducing points, {h} + {h}.")
    print("What differs from Fernlund 2022, chapter 6, and why:")
    for difference in DIFFERENCES:
        print(textwrap.fill(difference, 110, initial_indent="- ", subsequent_indent="  "))

    fits = study_fits(data, args)
    print_fits(fits, data)
    separation = study_separation(data, args)
    print_separation(separation)
    allocation = study_allocation(data, args)
    print_allocation(allocation)
    clusters = study_clusters(data, args)
    print_clusters(clusters)
    lengthscale, variance, noise = map(float, np.exp(data.hyper))
    exact = {"log_evidence": data.evidence, "lengthscale": lengthscale, "variance": variance, "noise_variance": noise}
    report = {
        "data": title,
        "n_rows": len(X),
        "inducing": args.inducing,
        "exact": exact,
        "fits": fits,
        "separation": separation,
        "allocation": allocation,
        "clusters": clusters,
    }
    figures = {
        "orthogonal_fits.png": draw_fits(fits, data),
        "orthogonal_separation.png": draw_separation(separation),
        "orthogonal_allocation.png": draw_allocation(allocation),
        "orthogonal_clusters.png": draw_clusters(clusters),
    }
    write(figures, report, args)
    return report


if __name__ == "__main__":
    main()
