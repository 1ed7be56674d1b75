#!/usr/bin/env python
"""Snelson's data: what orthogonal points, further units and further levels add to the bound, and at what throughput.

After figure 6 of Tiao, Dutordoir & Picheny (2023), whose claim is checked: on top of M activation features, M
orthogonal points add more to the bound than M further units or further levels do, at a higher throughput. We have no
copy of the figure's numbers.

    NPGP_DATA=... python scripts/studies/spherical/snelson_levels.py --json out/snelson_levels.json

Inputs and target are standardized. Collapsed bounds in float64 are maximized by L-BFGS over hyperparameters, directions
and points, from the same starts for all: hyperparameters of the exact GP, multiplied by random factors but for the
first start, and random rows as points, or as where directions point. Of inputs with one column the sphere is a circle,
with one harmonic at level 0 and two at each level that kernel and activation have in common, of which there are few: no
number of units is better than these harmonics themselves, whose bound is printed too. Bounds with their gradients are
timed in turns, at the starts: throughput is relative to that with 2M points, a median of ratios of the same turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import npgp
from npgp import datasets
from npgp.kernels import gegenbauer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, clock, interleaved, one_blas_thread, quartiles, table, whole, write_json
from studies.shared import lbfgs
from studies.spherical.uci_fits import ABSENT, FEATURES, KERNELS, LOG_BOUNDS, Model, first_rows, loss_and_slope, sizes


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--kernel", choices=KERNELS, default="arccos")
    add("--units", choices=FEATURES[:2], default="relu", help="what activations are of")
    add("--levels", type=whole, nargs=2, default=[8, 16], help="of activations, the first so many, fewer and more")
    add("--sizes", type=whole, nargs="+", default=[4, 8, 16], help="M")
    add("--timed", type=whole, nargs="*", default=[128], help="M of further timings, with many rows")
    add("--starts", type=whole, default=8, help="of each fit, of which the best is kept")
    add("--iterations", type=whole, default=1000, help="of L-BFGS at most")
    add("--conditional", choices=("prior", "tight"), default="prior", help="the paper has 'prior'")
    rows = dict(default=10_000, help="of the timings with many: Snelson's, repeated and moved a little")
    parser.shared("quick", "cpu-time", "seed", "json", rows=rows, repetitions=40)
    return parser.read(argv, dict(sizes=[2], timed=[1], starts=1, iterations=5, rows=200, repetitions=2))


def maximum(loss, starts: Iterable[np.ndarray], num_logs: int, iterations: int) -> tuple[float, np.ndarray]:
    """The greatest bound that L-BFGS finds from these starts, and where it is."""
    optima = (lbfgs(loss, start, iterations, num_logs, LOG_BOUNDS, ftol=1e-12, maxcor=20) for start in starts)
    best = min(optima, key=lambda optimum: optimum.fun)
    return -float(best.fun), best.x


def start(model: Model, logs: np.ndarray, X: np.ndarray, seed: int) -> np.ndarray:
    """Random rows as points or directions: of the same seed, a larger model has those of a smaller one and others."""
    rng = np.random.default_rng(seed)
    rows = X[rng.permutation(len(X))[: sum(model.blocks)]]
    first, second = np.split(rows, [model.blocks[0]])
    logs = logs + (seed > 0) * rng.normal(size=len(logs))
    return np.concatenate([logs, first_rows(model, logs, first).ravel(), second.ravel()])


def in_common(model: Model, logs: np.ndarray, number: int) -> tuple[int, ...]:
    """Of the first so many levels those that kernel and activation have."""
    tried: Any = model._replace(blocks=(1,), levels=tuple(range(number)))
    units = tried.blocks_at(jnp.asarray([*logs, 1.0, 0.0]), 1)[0]
    profile = np.abs(np.asarray(units.profile(model.kernel_at(logs, 1))))
    return tuple(int(level) for level in np.flatnonzero(profile > ABSENT * np.max(profile)))


def throughputs(models: Iterable[Model], logs: np.ndarray, X, y, args: argparse.Namespace) -> dict[Model, np.ndarray]:
    """Evaluations per second of each bound with its gradient, in each turn."""
    theta = {model: start(model, logs, X, 0) for model in models}
    data = jnp.asarray(X), jnp.asarray(y)
    calls = {model: partial(loss_and_slope, theta[model], *data, model=model) for model in theta}
    return {m: 1.0 / s for m, s in interleaved(calls, args.repetitions, clock(args.cpu_time), args.seed).items()}


def study(X: np.ndarray, y: np.ndarray, args: argparse.Namespace) -> dict[str, Any]:
    points = Model(args.kernel, "points", (1,), conditional=args.conditional)
    num_logs = points.logs(1)

    def exact(theta):
        return -npgp.exact_log_evidence(points.kernel_at(theta, 1), X, y, noise_variance=jnp.exp(theta[2]))

    rng = np.random.default_rng(args.seed)
    evidence, logs = maximum(jax.jit(jax.value_and_grad(exact)), rng.normal(size=(4, num_logs)), num_logs, 1000)
    around = [start(points._replace(blocks=(0,)), logs, X, seed) for seed in range(args.starts)]
    kinds, harmonics = {"points": points}, {}
    for number in args.levels:
        units = points._replace(feature=args.units)
        units = units._replace(levels=in_common(units, logs, number))
        kinds[f"{number} levels"] = units
        block = npgp.features.SphericalHarmonics(units.levels, 2)

        @jax.jit
        @jax.value_and_grad
        def all_of_them(theta, block=block):
            kernel, noise = points.kernel_at(theta, 1), jnp.exp(theta[2])
            return -npgp.CollapsedGP(kernel, X, block, noise_variance=noise, conditional=args.conditional).log_prob(y)

        bound, _ = maximum(all_of_them, around, num_logs, args.iterations)
        count = int(np.sum(gegenbauer.multiplicities(2, units.levels)))
        harmonics[f"{number} levels"] = {"levels": list(units.levels), "harmonics": count, "bound": bound}

    cells = {
        (M, kind, column): model._replace(blocks=blocks)
        for M in (*args.sizes, *args.timed)
        for kind, model in kinds.items()
        for column, blocks in sizes(M).items()
    }
    fitted = dict.fromkeys(model for (M, *_), model in cells.items() if M in args.sizes)  # 2M may be another M
    bounds: dict[Model, float] = {}
    for model in fitted:
        starts = [start(model, logs, X, seed) for seed in range(args.starts)]
        per_row, _ = maximum(partial(loss_and_slope, X=X, y=y, model=model), starts, num_logs, args.iterations)
        bounds[model] = len(y) * per_row

    moved = 0.01 * np.random.default_rng(args.seed).normal(size=(args.rows, 1))
    rows = np.arange(args.rows) % len(y)
    many = throughputs(dict.fromkeys(cells.values()), logs, X[rows] + moved, y[rows], args)
    timings = {"few": throughputs(fitted, logs, X, y, args), "many": many}
    fits = []
    for (M, kind, column), model in cells.items():
        fit = {"M": M, "first": kind, "column": column, "bound": bounds.get(model)}
        base = cells[M, "points", str(2 * M)]
        for name, speed in timings.items():
            fit[name] = quartiles(speed[model] / speed[base]) if model in speed else None
        fits.append(fit)
    return {"exact": evidence, "hyperparameters": np.exp(logs).tolist(), "harmonics": harmonics, "fits": fits}


def show(report: dict[str, Any], args: argparse.Namespace) -> None:
    print(f"{args.kernel}, {args.units}, '{args.conditional}'; exact log evidence {report['exact']:.2f}\n")
    for kind, found in report["harmonics"].items():
        print(f"{kind}: {found['levels']} in common, {found['harmonics']} harmonics, bound {found['bound']:.2f}\n")
    tables = {"bound": "Bound, in nats", "few": "Relative throughput, Snelson's rows"}
    for figure, title in (tables | {"many": f"Relative throughput, {args.rows} rows"}).items():
        lines: dict[tuple, list] = {}
        for fit in report["fits"]:
            value = np.median(fit[figure] or np.nan)  # not fitted, but timed; and of quartiles, the median
            lines.setdefault((fit["M"], fit["first"]), []).append("" if np.isnan(value) else f"{value:.2f}")
        rows = [[*key, *values] for key, values in lines.items() if any(values)]
        print(f"{title}\n\n{table(['M', 'first block', 'M', 'M + M points', '2M'], rows, left=(1,), markdown=True)}\n")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    X, y, _ = datasets.snelson()
    with one_blas_thread():
        report = study((X - X.mean()) / X.std(), (y - y.mean()) / y.std(), args)
    show(report, args)
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
