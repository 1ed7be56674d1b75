#!/usr/bin/env python
"""Spherical features and orthogonal points on UCI regression sets, as in tables 3 and 4 of Tiao et al. (2023).

Test RMSE and negative log predictive density (NLPD) with the zonal arc-cosine (order 1) and Matérn-5/2 kernels. The
first block is activations (ReLU, softplus) or inducing points, in three sizes: M features, M with M orthogonal points
as second block (both with a dense covariance), and 2M features. M is 128.

    NPGP_DATA=... python scripts/studies/spherical/spherical_uci.py --sets yacht energy concrete --iterations 300 --json out/uci.json
    NPGP_DATA=... python scripts/studies/spherical/spherical_uci.py --sets kin8nm power --iterations 60 --json out/uci.json
    python scripts/studies/spherical/spherical_uci.py --sets simulated --quick

A run takes hours; with ``--json`` every fit is written when it ends, and a later run with the same file does those that
are missing and prints all of them (``--report``: prints only).

The paper's own numbers are not in this script: we could not find its tables, and invent none. Who has them may
write them to a file for ``--reference``,

    {"concrete": {"arccos": {"relu": {"128+128": {"rmse": [mean, standard error], "nlpd": [...]}}}}}

and they are printed beside ours; cells of ours that are worse by more than two standard errors (of the difference) are
marked. Without it, what is tested is the paper's claim: M orthogonal points beside M activations do better than 2M
activations.

What is done: inputs and target standardised on the training rows, errors and densities in the target's own units. The
repetitions are the first of the sets' own random splits with a tenth of the rows for testing. Fits are collapsed
bounds, by L-BFGS in float64 over ARD weights, bias, lengthscale, noise variance and the directions or points; the
kernel's variance is 1, as its norms, of degree 1, have the scale already. The kernel starts at the best of a few
hyperparameters, points at k-means centres and directions at theirs. M + M and 2M continue from M's solution
for as many iterations again, with the same M new rows, of greatest variance given the features there are: as points, or
as directions. Both kernels are of bias-augmented inputs on the sphere, for points too: the prior is the same for all
features (which Matérn kernel the paper's points have, we could not see).

Activations have levels 0 to L, less those that the kernel lacks. L is chosen on the first repetition: by default it is
the one with the best bound after a quarter of the iterations; with ``--levels left-out`` the one that leaves least
variance out at the start (``npgp.inducing.levels.choose_levels``); ``--levels 6`` is the paper's choice, levels 0 to 5.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from scipy.stats import norm
from threadpoolctl import threadpool_limits

import npgp
import npgp.inducing
from npgp import datasets
from npgp.features import Activations, Points, ReLU, Softplus
from npgp.inducing.levels import choose_levels, left_out
from npgp.kernels import Kernel, ZonalArcCosine, ZonalMatern52

SETS = {"yacht": "yacht_raw", "energy": "energy", "concrete": "concrete", "kin8nm": "kin8nm", "power": "power"}
KERNELS = ("arccos", "matern52")
FEATURES = ("relu", "softplus", "points")
METRICS = ("rmse", "nlpd")
#: Logs of weights, bias, noise variance and lengthscale stay within these.
LOG_BOUNDS = (-12.0, 8.0)
#: The highest level that is tried; and rows that variance is left out of.
HIGHEST, LEVEL_ROWS = 6, 500
#: Coefficients of activations below this, relative to the largest, are rounding error.
ABSENT = 1e-6


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="+", choices=(*SETS, "simulated"), default=list(SETS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=list(FEATURES), help="of the first block")
    parser.add_argument("--size", type=int, default=128, help="M")
    parser.add_argument("--repetitions", type=int, default=5, help="train/test splits, the sets' first")
    parser.add_argument("--iterations", type=int, default=200, help="of L-BFGS at most, for M; and as many again")
    parser.add_argument("--levels", default="bound", help="'bound', 'left-out', or a number of levels, such as 6")
    parser.add_argument("--conditional", choices=("prior", "tight"), default="prior", help="the paper has 'prior'")
    parser.add_argument("--rows", type=int, help="of larger training sets, as many at random; of 'simulated', as many")
    parser.add_argument("--quick", action="store_true", help="few rows, features and iterations: a check that it runs")
    parser.add_argument("--json", type=Path, help="write every fit to this file, and do not repeat those it has")
    parser.add_argument("--report", action="store_true", help="fit nothing: print what the file of --json has")
    parser.add_argument("--reference", type=Path, help="JSON file of the paper's numbers, printed beside ours")
    args = parser.parse_args(argv)
    if args.quick:
        args.size, args.repetitions, args.iterations, args.rows = 8, 2, 10, min(args.rows or 100, 100)
    if min(args.size, args.repetitions, args.iterations, args.rows or 1) < 1:
        parser.error("counts must be positive.")
    if args.levels not in ("bound", "left-out") and not (args.levels.isdigit() and int(args.levels) > 0):
        parser.error("--levels must be 'bound', 'left-out' or a positive number.")
    if args.report and args.json is None:
        parser.error("--report needs --json.")
    return args


def sizes(size: int) -> dict[str, tuple[int, ...]]:
    """The blocks of each column of the tables, by its name."""
    return {str(size): (size,), f"{size}+{size}": (size, size), str(2 * size): (2 * size,)}


# ---------------------------------------------------------------------------------------------------------------
# Data


def load(name: str, repetition: int, rows: int | None) -> datasets.RegressionSplit:
    """A split, standardised; with a limit, that many training rows and a quarter as many test rows, at random."""
    if name == "simulated":
        return simulated(repetition, rows or 200)
    data = datasets.uci(SETS[name], repetition)
    rng, fields = np.random.default_rng(repetition), dict(data.__dict__)
    for kind, most in (("train", rows), ("test", rows and max(rows // 4, 1))):
        if most is not None and len(fields[f"y_{kind}"]) > most:
            kept = np.sort(rng.choice(len(fields[f"y_{kind}"]), most, replace=False))
            fields.update({key: fields[key][kept] for key in (f"X_{kind}", f"y_{kind}")})
    return datasets.RegressionSplit(**fields)


def simulated(seed: int, rows: int) -> datasets.RegressionSplit:
    """Three columns and a smooth function of two of them, in units of its own."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows + rows // 4, 3))
    y = np.sin(2.0 * X[:, 0]) + 0.5 * np.abs(X[:, 1]) + 0.1 * rng.normal(size=len(X))
    mean, scale = np.mean(y[:rows]), np.std(y[:rows])
    y = (y - mean) / scale
    return datasets.RegressionSplit(
        X[:rows], y[:rows], X[rows:], y[rows:], np.zeros(3), np.ones(3), 20.0 + 7.0 * float(mean), 7.0 * float(scale)
    )


# ---------------------------------------------------------------------------------------------------------------
# The model, at a vector: logs of D weights, bias, noise variance (and lengthscale), then blocks row by row


class Model(NamedTuple):
    """What a compiled bound depends on, other than arrays."""

    kernel: str
    feature: str
    blocks: tuple[int, ...]
    levels: tuple[int, ...] = ()
    conditional: str = "prior"

    def logs(self, columns: int) -> int:
        """How many logs of hyperparameters there are."""
        return columns + 2 + (self.kernel == "matern52")

    def kernel_at(self, theta, columns: int) -> Kernel:
        hyper = jnp.exp(theta[: self.logs(columns)])
        weights, bias = hyper[:columns], hyper[columns]
        if self.kernel == "arccos":
            return ZonalArcCosine(weight_variance=weights, bias_variance=bias)
        return ZonalMatern52(hyper[-1], weight_variance=weights, bias_variance=bias)

    def blocks_at(self, theta, columns: int) -> list[Points | Activations]:
        width = columns + (self.feature != "points")
        end = self.logs(columns) + self.blocks[0] * width
        first = theta[self.logs(columns) : end].reshape(-1, width)
        if self.feature == "points":
            blocks: list[Points | Activations] = [Points(first)]
        else:
            blocks = [Activations(first, ReLU() if self.feature == "relu" else Softplus(), self.levels)]
        return blocks + [Points(theta[end:].reshape(-1, columns))][: len(self.blocks) - 1]

    def gp(self, theta, X) -> npgp.CollapsedGP:
        columns = X.shape[1]
        return npgp.CollapsedGP(
            self.kernel_at(theta, columns),
            X,
            self.blocks_at(theta, columns),
            jnp.exp(theta[columns + 1]),
            conditional=self.conditional,  # type: ignore[arg-type]
            covariances=("dense",) * len(self.blocks),
        )


@partial(jax.jit, static_argnames="model")
def loss_and_slope(theta, X, y, model: Model):
    """The negative bound for each row, and its gradient."""
    return jax.value_and_grad(lambda t: -model.gp(t, X).log_prob(y) / len(y))(theta)


@partial(jax.jit, static_argnames="model")
def bound(theta, X, y, model: Model):
    """The bound for each row."""
    return model.gp(theta, X).log_prob(y) / len(y)


@partial(jax.jit, static_argnames="model")
def predict(theta, X, y, X_test, model: Model):
    """Mean and variance of y at test inputs; and the share of f's variance that the features leave out of rows of X."""
    gp = model.gp(theta, X)
    mean, variance = gp.condition(y).mean_and_variance(X_test)
    return mean, variance + gp.noise_variance, left_out(gp.kernel, gp.blocks, X)


def scores(data: datasets.RegressionSplit, mean, variance) -> dict[str, float]:
    """RMSE and NLPD of test rows in the target's own units, from standardised predictions of y."""
    density = norm.logpdf(data.y_test, np.asarray(mean), np.sqrt(np.asarray(variance)))
    rmse = np.sqrt(np.mean(np.square(data.y_test - np.asarray(mean))))
    return {"rmse": float(data.y_scale * rmse), "nlpd": float(math.log(data.y_scale) - np.mean(density))}


# ---------------------------------------------------------------------------------------------------------------
# Fits


def fit(data: datasets.RegressionSplit, model: Model, start: np.ndarray, iterations: int) -> tuple[np.ndarray, dict]:
    """The vector at the optimum, and what is reported of it."""
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    began = time.perf_counter()

    def numpy_loss(theta):
        value, slope = loss_and_slope(theta, X, y, model)
        if not np.isfinite(value):
            return 1e10, np.zeros_like(theta)  # the line search goes back
        return float(value), np.asarray(slope, float)

    num_logs = model.logs(X.shape[1])
    limits = [LOG_BOUNDS] * num_logs + [(None, None)] * (len(start) - num_logs)
    options = {"maxiter": iterations, "maxfun": 2 * iterations, "ftol": 1e-11, "gtol": 1e-8, "maxcor": 20}
    optimum = minimize(numpy_loss, start, jac=True, method="L-BFGS-B", bounds=limits, options=options)
    mean, variance, share = predict(optimum.x, X, y, jnp.asarray(data.X_test), model)
    return optimum.x, {
        **scores(data, mean, variance),
        "bound": -float(optimum.fun),
        "bound_start": -numpy_loss(start)[0],
        "left_out": float(share),
        "levels": list(model.levels),
        "noise_variance": float(np.exp(optimum.x[X.shape[1] + 1])),
        "iterations": int(optimum.nit),
        "converged": bool(optimum.success),
        "rows": len(y),
        "test_rows": len(data.y_test),
        "seconds": time.perf_counter() - began,
    }


def first_rows(model: Model, theta, points: np.ndarray) -> np.ndarray:
    """Points as rows of the model's first block: themselves, or as directions."""
    if model.feature == "points":
        return points
    return np.asarray(model.kernel_at(theta, points.shape[1]).polar(points)[1])  # type: ignore[attr-defined]


def first_start(data: datasets.RegressionSplit, model: Model, Z: np.ndarray) -> np.ndarray:
    """The vector with a first block at Z, and of a few hyperparameters those with the best bound."""
    columns = Z.shape[1]
    lengthscales = [()] if model.kernel == "arccos" else [(math.log(0.5),), (math.log(1.5),)]
    tried = []
    for weight, noise, scale in itertools.product((0.1, 0.3, 1.0, 3.0), (0.01, 0.1, 0.5), lengthscales):
        logs = np.concatenate([np.full(columns, math.log(weight / columns)), [0.0, math.log(noise), *scale]])
        tried.append(np.concatenate([logs, first_rows(model, logs, Z).ravel()]))
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    return tried[int(np.nanargmax([float(bound(theta, X, y, model)) for theta in tried]))]


def candidates(model: Model, theta: np.ndarray, data: datasets.RegressionSplit, rule: str) -> list[Model]:
    """The model with the levels that the rule allows its activations; the kernel and directions are those of theta."""
    if model.feature == "points":
        return [model]
    columns = data.X_train.shape[1]
    kernel: Any = model.kernel_at(theta, columns)
    if rule.isdigit():
        tried = tuple(range(int(rule)))
        present = np.asarray(kernel.level_variances(tried, columns + 1)) > 0
        return [model._replace(levels=tuple(level for level in tried if present[level]))]
    units: Any = model._replace(levels=tuple(range(HIGHEST + 1))).blocks_at(theta, columns)[0]
    if rule == "left-out":
        rows = np.random.default_rng(0).permutation(len(data.y_train))[:LEVEL_ROWS]
        choice = choose_levels(kernel, units, jnp.asarray(data.X_train[rows]), HIGHEST)
        return [model._replace(levels=choice.block.levels)]
    profile = np.abs(np.asarray(units.profile(kernel)))
    has = [level for level in units.levels if profile[level] > ABSENT * np.max(profile)]
    return [model._replace(levels=tuple(has[: i + 1])) for i in range(1, len(has))]


def best(models: Sequence[Model], starts: Sequence[np.ndarray], data, iterations: int) -> int:
    """Which of several models has the best bound after a quarter of the iterations."""
    if len(models) == 1:
        return 0
    quarter = max(iterations // 4, 1)
    return int(np.argmax([fit(data, *pair, quarter)[1]["bound"] for pair in zip(models, starts, strict=True)]))


Levels = dict[str, tuple[int, ...]]


def three_sizes(data, kernel: str, feature: str, args: argparse.Namespace, levels: Levels) -> dict[str, dict]:
    """
    Fit M features, M with M orthogonal points, and 2M features.

    :param levels: of the activations in each column, where they are known; filled in where they are not.
    """
    (alone, both, double), columns = sizes(args.size), data.X_train.shape[1]
    Z = np.asarray(npgp.inducing.kmeans(jnp.asarray(data.X_train), args.size))
    model = Model(kernel, feature, (args.size,), levels.get(alone, ()), args.conditional)
    if feature == "points" or alone in levels:
        start = first_start(data, model, Z)
    else:
        points = model._replace(feature="points")
        logs = first_start(data, points, Z)[: model.logs(columns)]
        models = candidates(model, np.concatenate([logs, first_rows(model, logs, Z).ravel()]), data, args.levels)
        starts = [first_start(data, model, Z) for model in models]
        chosen = best(models, starts, data, args.iterations)
        model, start = models[chosen], starts[chosen]
    theta, report = fit(data, model, start, args.iterations)
    levels.setdefault(alone, model.levels)
    reports = {alone: report}

    fitted, first = model.kernel_at(theta, columns), model.blocks_at(theta, columns)
    new = np.asarray(npgp.inducing.greedy_variance(fitted, jnp.asarray(data.X_train), args.size, first))
    logs, units = theta[: model.logs(columns)], theta[model.logs(columns) :].reshape(args.size, -1)
    if feature != "points":  # as long as the new ones
        units = units / np.linalg.norm(units, axis=1, keepdims=True)
    theta = np.concatenate([logs, units.ravel()])

    second = model._replace(blocks=(args.size, args.size))
    levels.setdefault(both, second.levels)
    _, reports[both] = fit(data, second, np.concatenate([theta, new.ravel()]), args.iterations)

    start = np.concatenate([theta, first_rows(model, theta, new).ravel()])
    model = model._replace(blocks=(2 * args.size,))
    if double in levels:
        model = model._replace(levels=levels[double])
    else:
        models = candidates(model, start, data, args.levels)
        model = models[best(models, [start] * len(models), data, args.iterations)]
    levels.setdefault(double, model.levels)
    _, reports[double] = fit(data, model, start, args.iterations)
    return reports


# ---------------------------------------------------------------------------------------------------------------
# All fits, kept in a file


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Fit what the file does not have; all records of these settings."""
    saved = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    same = {"size": args.size, "levels_rule": args.levels, "conditional": args.conditional, "most_rows": args.rows}
    records = [r for r in saved if all(r[key] == value for key, value in same.items())]
    jobs = itertools.product(range(args.repetitions), args.sets, args.kernels, args.features)
    for repetition, name, kernel, feature in () if args.report else jobs:
        cell = {"set": name, "kernel": kernel, "feature": feature}
        mine = [r for r in records if all(r[key] == value for key, value in cell.items())]
        if any(r["repetition"] == repetition for r in mine):
            continue
        levels = {r["column"]: tuple(r["levels"]) for r in mine}
        with threadpool_limits(limits=1, user_api="blas"):
            reports = three_sizes(load(name, repetition, args.rows), kernel, feature, args, levels)
        for column, report in reports.items():
            records.append({**cell, "column": column, "repetition": repetition, **same, **report})
            saved.append(records[-1])
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(saved, indent=1) + "\n")
        print(
            f"{name} {kernel} {feature}, repetition {repetition}: "
            + "; ".join(
                f"{column} RMSE {r['rmse']:.4g} NLPD {r['nlpd']:.3f} bound {r['bound']:.3f} ({r['seconds']:.0f} s)"
                for column, r in reports.items()
            ),
            flush=True,
        )
    return records


# ---------------------------------------------------------------------------------------------------------------
# Tables


def moments(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, NaN for a single value."""
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), float(error)


def spread(mean: float, error: float, digits: int = 3) -> str:
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def worse(ours: tuple[float, float], theirs: Sequence[float]) -> bool:
    """Whether ours, of a figure that should be small, is larger by more than two standard errors of the difference."""
    return ours[0] - theirs[0] > 2.0 * math.hypot(0.0 if math.isnan(ours[1]) else ours[1], theirs[1])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, in Markdown."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, ["-" * w for w in widths], *rows):
        print("| " + " | ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)) + " |")
    print()


Cells = dict[tuple[str, str, str], dict[str, dict[int, dict]]]


def by_cell(records: Sequence[dict]) -> Cells:
    """Records by set, kernel and feature, in the tables' order, then by column and repetition."""
    cells: Cells = {}
    for key in itertools.product((*SETS, "simulated"), KERNELS, FEATURES):
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
            text = spread(*ours, digits)
            theirs = reference.get(name, {}).get(kernel, {}).get(feature, {}).get(column, {}).get(metric)
            if theirs is not None:
                behind = worse(ours, theirs)
                text += f" ({spread(*theirs, digits)}){' worse' if behind else ''}"
                count[0], count[1] = count[0] + 1, count[1] + behind
            row.append(text)
        rows.append([name, kernel, feature, *row, str(len(columns[column]))])
    table(["set", "kernel", "features", *sizes(size), "repetitions"], rows)
    if count[0]:
        print(f"{count[1]} of {count[0]} cells are worse than the reference by more than two standard errors.\n")


def claim(cells: Cells, size: int) -> dict[str, dict]:
    """
    What M orthogonal points gain over M more features: 2M's figure less that of M + M, by repetition.

    Positive is in favour of orthogonal points. The verdict is on NLPD, for activations; of points, those in one block
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
        verdict = ("holds" if mean > 0 else "fails") + (", clearly" if abs(mean) > 2.0 * error else "")
        if feature == "points":
            verdict = ""
        report[f"{name}/{kernel}/{feature}"] = {**gains, "verdict": verdict}
        rows.append([name, kernel, feature, *(spread(*gains[m], 4) for m in gains), verdict])
    table(["set", "kernel", "features", "RMSE", "NLPD", "bound per row", "verdict (NLPD)"], rows)
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
    table(["set", "kernel", "features", *sizes(size), "iterations"], rows)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    records = run(args)
    reference = json.loads(args.reference.read_text()) if args.reference else {}
    cells = by_cell(records)
    if not cells:
        print("Nothing is there of these settings.")
        return records
    print(
        f"\nConditional '{args.conditional}'; levels of activations: {args.levels}. Means over repetitions ± standard "
        f"errors{'; in brackets, those of the reference' if reference else ''}.\n"
    )
    print("Test RMSE, in the target's units\n")
    compared(cells, args.size, "rmse", reference, 3)
    print("Negative log predictive density of test rows, in the target's units\n")
    compared(cells, args.size, "nlpd", reference, 3)
    print("Bound for each training row, of the standardised target\n")
    compared(cells, args.size, "bound", {}, 3)
    print("Gain of orthogonal points over as many more features of the first block's kind; positive is a gain\n")
    claim(cells, args.size)
    print("Highest level of activations, and share of f's variance left out by all blocks (mean of d_n/k_nn)\n")
    levels_and_shares(cells, args.size)
    return records


if __name__ == "__main__":
    main()
