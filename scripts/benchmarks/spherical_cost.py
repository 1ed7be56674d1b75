#!/usr/bin/env python
"""What spherical features cost: a step of SVI and a collapsed bound with its gradient, beside those of points.

Harmonics, whose covariance is diagonal and which have nothing to learn, against the same number of points; and
activations with orthogonal points against SOLVE-GP of the same sizes. Arc-cosine kernel with a weight for each column,
float32; hyperparameters, inducing inputs and directions are all learned. Programs to compare take turns in random
order, and ratios are of runs of the same turn.

    python scripts/benchmarks/spherical_cost.py --json out/spherical_cost.json    a few minutes
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, interleaved, one_blas_thread, quartiles, whole, write_json
from studies.shared import learned

#: One block: its kind, its number of features, and for activations their levels.
Block = tuple[str, int, tuple[int, ...]]
#: Levels of activations: the first six, and what ``npgp.inducing.choose_levels`` tries at most.
LEVELS = {"": tuple(range(6)), ", 12 levels": tuple(range(13))}
NOISE_VARIANCE = 0.1


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--harmonics", type=whole, nargs="*", default=[128, 256, 512, 1024], help="most harmonics, of whole levels")
    add("--dimension", type=whole, default=5, help="d, of harmonics: one more than the columns")
    add("--orthogonal", type=whole, nargs="*", default=[256, 512], help="features in each of two blocks")
    add("--columns", type=whole, default=8, help="of the data, for activations")
    rows = dict(default=4096, help="of a collapsed bound")
    parser.shared("seed", "json", batch_size=1024, rows=rows, repetitions=25)
    return parser.read(argv)


def arc_cosine(params) -> npgp.kernels.ZonalArcCosine:
    return npgp.kernels.ZonalArcCosine(weight_variance=params["weights"], bias_variance=params["bias"])


def data(rows: int, columns: int, seed: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, columns))
    y = np.sin(2.0 * X[:, 0]) + X[:, 1] + np.sqrt(NOISE_VARIANCE) * rng.normal(size=rows)
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


def start(blocks: Sequence[Block], columns: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "weights": jnp.full(columns, 1.0 / columns),
        "bias": jnp.ones(()),
        "noise": jnp.asarray(NOISE_VARIANCE),
    }
    for i, (kind, size, _) in enumerate(blocks):
        Z = jnp.asarray(np.random.default_rng(i).normal(size=(size, columns)), jnp.float32)
        if kind == "points":
            params[f"inducing{i}"] = Z
        elif kind == "activations":
            params[f"inducing{i}"] = arc_cosine(params).polar(Z)[1]
    return params


def features(params, blocks: Sequence[Block], columns: int) -> list:
    make: dict[str, Callable] = {
        "points": lambda i, levels: npgp.features.Points(params[f"inducing{i}"]),
        "activations": lambda i, levels: npgp.features.Activations(params[f"inducing{i}"], levels=levels),
        "harmonics": lambda i, levels: npgp.features.SphericalHarmonics(levels, columns + 1),
    }
    return [make[kind](i, levels) for i, (kind, _, levels) in enumerate(blocks)]


def svi_step(blocks: Sequence[Block], X, y) -> Callable[[], Any]:
    """A step of Adam on the ELBO of a minibatch; it returns the new state and the loss."""
    columns = X.shape[1]
    initial = start(blocks, columns)

    def model(X, y):
        params = learned(initial)
        f = npgp.SparseGP("f", arc_cosine(params), features(params, blocks, columns)).draw()
        with npgp.plate("data", 100 * len(X), rows=len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(variance=params["noise"]), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(), TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), X, y)
    compiled = jax.jit(svi.update).lower(state, X, y).compile()
    return lambda: compiled(state, X, y)


def collapsed_bound(blocks: Sequence[Block], X, y) -> Callable[[], Any]:
    """The bound and its gradient with all that is learned."""
    columns = X.shape[1]

    def bound(params, X, y):
        return npgp.CollapsedGP(
            arc_cosine(params), X, features(params, blocks, columns), noise_variance=params["noise"]
        ).log_prob(y)

    params = start(blocks, columns)
    compiled = jax.jit(jax.value_and_grad(bound)).lower(params, X, y).compile()
    return lambda: compiled(params, X, y)


def compare(structures: Mapping[str, Sequence[Block]], columns: int, args: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of programs of structures of which the first is what others are compared with."""
    report: dict[str, Any] = {}
    kinds = {"step": (svi_step, args.batch_size), "collapsed": (collapsed_bound, args.rows)}
    for kind, (make, rows) in kinds.items():
        X, y = data(rows, columns, args.seed)
        programs = {name: make(blocks, X, y) for name, blocks in structures.items()}
        seconds = interleaved(programs, args.repetitions, seed=args.seed)
        base = seconds[next(iter(structures))]
        report[kind] = {
            name: {
                "seconds": quartiles(seconds[name]),
                "ratio": quartiles(seconds[name] / base),
                "fastest_ratio": float(seconds[name].min() / base.min()),
            }
            for name in structures
        }
        if kind == "collapsed":
            for name, program in programs.items():
                report[kind][name]["bound_per_row"] = float(program()[0]) / rows
    return report


def study_harmonics(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for most in args.harmonics:
        block = npgp.features.SphericalHarmonics.within(most, npgp.kernels.ZonalArcCosine(), args.dimension - 1)
        structures = {"points": [("points", block.size, ())], "harmonics": [("harmonics", block.size, block.levels)]}
        figures = compare(structures, args.dimension - 1, args)
        results.append({"features": str(block.size), "levels": list(block.levels), **figures})
        print_lines(results[-1])
    return results


def study_orthogonal(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for size in args.orthogonal:
        points: Block = ("points", size, ())
        structures = {"SOLVE-GP": [points, points]}
        for title, levels in LEVELS.items():
            structures[f"activated + points{title}"] = [("activations", size, levels), points]
        results.append({"features": f"{size} + {size}", **compare(structures, args.columns, args)})
        print_lines(results[-1])
    return results


HEADS = f"{'features':>12}  {'':<31}{'ms':>9} (quartiles)        {'ratio':>5} (quartiles)      fastest"


def print_lines(result: Mapping[str, Any]) -> None:
    for kind, title in (("step", "SVI"), ("collapsed", "collapsed")):
        for name, figures in result[kind].items():
            low, median, high = (1e3 * s for s in figures["seconds"])
            line = f"{result['features']:>12}  {title + ', ' + name:<38}{median:8.1f} ({low:.1f} to {high:.1f})"
            low, median, high = figures["ratio"]
            print(f"{line:<84}{median:6.2f} ({low:.2f} to {high:.2f}){figures['fastest_ratio']:9.2f}", flush=True)


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    settings = ("dimension", "columns", "batch_size", "rows", "repetitions")
    report: dict[str, Any] = {key: getattr(args, key) for key in settings}
    report |= {"load_average_before": os.getloadavg()[0], "cores": os.cpu_count()}
    print(f"float32, batches of {args.batch_size} rows, collapsed bounds of {args.rows} rows")
    with jax.enable_x64(False), one_blas_thread():
        print(f"\nHarmonics against points, d = {args.dimension}\n{HEADS}")
        report["harmonics"] = study_harmonics(args)
        print(f"\nActivations and orthogonal points against SOLVE-GP, {args.columns} columns\n{HEADS}")
        report["orthogonal"] = study_orthogonal(args)
    report["load_average_after"] = os.getloadavg()[0]
    print(f"\nload average {report['load_average_before']:.1f} before, {report['load_average_after']:.1f} after")
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
