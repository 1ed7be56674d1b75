#!/usr/bin/env python
"""SVGP and SOLVE-GP with the prior's and the tight conditional on regression sets, as Bui, Ashman & Turner (2025) do.

Their figures 2, 3, 6 and 7 are the pattern: bound, test error and test log-likelihood against the number of inducing
points M, a line for each of SVGP, T-SVGP (``conditional="tight"``), SOLVE-GP and T-SOLVE-GP. Matérn-3/2 with a
lengthscale for each column, Gaussian noise, everything learned at once on minibatches, q(ε) by natural gradients and
the rest by Adam; random splits with a tenth of the rows for testing, inputs and target standardized by the training
rows. Differences from the paper in settings that we could not see are possible: what is checked are its claims, that
the tight conditional is at least as good everywhere, at the same cost.

M counts all inducing points: SOLVE-GP has M/2 + M/2 where SVGP has M. It is compared with SVGP of M and of M/2 points:
with the prior's conditional and at the same points, its bound lies between theirs. All four methods start at the same M
inputs, the centers of k-means (a random half of them in each of SOLVE-GP's blocks), so that no better start passes for
a better method. "Of best q" is the collapsed bound at the trained hyperparameters and inducing inputs: what more steps
on q alone could win.

    NPGP_DATA=... python scripts/studies/regression/regression_benchmark.py --json out/regression.json
    NPGP_DATA=... python scripts/studies/regression/regression_benchmark.py --full --json out/regression.json

The first takes ten minutes on one core; the second six hours, one of them without M = 1024. What stands in
scripts/benchmarks/results was written with ``--json``, ``--out`` and ``--markdown`` there.

``--data FILE.npz`` is for a set of your own, arrays X (N, D) and y (N,).

With ``--json`` every fit is written when it ends, and a later run with the same file and settings does those that are
missing. A method with M points is compiled once for each set, not for each split: the splits of a set have equally many
rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from npgp import datasets

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, whole
from studies import own_file
from studies.regression.four_methods import Cells, Metric, by_cell, draw, print_fit, report
from studies.regression.minibatch import (
    CHUNK,
    NOISE_VARIANCE,
    VARIANCE,
    Method,
    Program,
    Records,
    Rows,
    best_elbo,
    component,
    fit_missing,
    regression_model,
    scores,
    shared_options,
    start_of_lengthscales,
    with_defaults,
    with_points,
)

SETS = ("kin40k", "protein", "keggdirected", "kin8nm", "power", "pumadyn32nm")
METRICS = {
    "elbo": Metric("ELBO per row", 4, 1),
    "best_elbo": Metric("of best q", 4, 1),
    "rmse": Metric("test RMSE", 4, -1),
    "log_likelihood": Metric("test log-likelihood", 4, 1),
    "step_ms": Metric("ms per step", 1, 0),
    "seconds": Metric("seconds", 0, 0),
}
PANELS = ("elbo", "rmse", "log_likelihood", "step_ms")
NOTE = (
    "Means over splits ± standard errors. ELBO per row: of all training rows; of best q: with the same hyperparameters "
    "and inducing inputs. Test figures: of the standardized target. Seconds: of training, without compilation."
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--sets", nargs="+", choices=(*SETS, "simulated"))
    parser.add_argument("--data", type=Path, help="a file of your own, in place of the sets")
    parser.add_argument("--splits", type=whole, help="how many")
    shared_options(parser)
    parser.set_defaults(batch_size=1024)
    args = parser.parse_args(argv)
    defaults: dict[str, Any] = {"sets": list(SETS[:3]), "splits": 2, "learning_rate": 0.05, "natural": 0.1}
    if args.quick:
        defaults |= {"sets": ["simulated"], "inducing": [8, 16], "steps": 60, "rows": 300}
        args.batch_size = min(args.batch_size, 64)
    elif args.full:
        defaults |= {"splits": 3, "inducing": [256, 512, 1024], "steps": 3000}
    else:
        defaults |= {"inducing": [128, 256], "steps": 1500}
    if args.data is not None:
        args.sets = [args.data.stem]
    return with_defaults(parser, args, defaults)


def load(name: str, split: int, most: int | None, file: Path | None = None) -> Rows:
    """A random split, standardized by its training rows; with a limit on these."""
    if file is not None:
        X, y = own_file.rows(file)
    elif name == "simulated":
        rng = np.random.default_rng(0)
        X = rng.normal(size=(2000, 3))
        y = np.sin(2.0 * X[:, 0]) + 0.5 * np.abs(X[:, 1]) + 0.2 * rng.normal(size=len(X))
    else:
        data = datasets.uci(name, 0, standardize=False)
        X, y = np.concatenate([data.X_train, data.X_test]), np.concatenate([data.y_train, data.y_test])
    order = np.random.default_rng(split).permutation(len(y))
    test, train = np.split(order, [len(y) // 10])
    train = train[:most]
    y = (y - y[train].mean()) / y[train].std()
    spread = X[train].std(0)
    X = (X - X[train].mean(0)) / np.where(np.ptp(X[train], axis=0) > 0, spread, 1.0)
    dtype = jnp.result_type(float)
    return Rows(*(array.astype(dtype) for array in (X[train], y[train], X[test], y[test])))


def conditional_of(method: Method) -> str:
    return "tight" if method.tight else "prior"


def make_model(method: Method, M: int, columns: int) -> Callable:
    """Its parameters get their values with the start of a fit."""
    start: dict[str, Any] = {"lengthscale": jnp.ones(columns), "variance": VARIANCE, "noise_variance": NOISE_VARIANCE}
    start |= {f"inducing{i}": jnp.zeros((M // method.blocks, columns)) for i in range(method.blocks)}
    return regression_model(start, method.covariances, conditional_of(method))


@partial(jax.jit, static_argnames="method")
def predict(params, X, method: Method):
    """Mean and variance of y at the rows of X."""
    mean, variance = component(params, method.covariances).posterior(params).mean_and_variance(X, batch_size=CHUNK)
    return mean, variance + params["noise_variance"]


def fit(program: Program, method: Method, data: Rows, Z: np.ndarray, seed: int) -> dict[str, Any]:
    """Train one method on one split; its figures."""
    hyper = {"lengthscale": start_of_lengthscales(data.X), "variance": VARIANCE, "noise_variance": NOISE_VARIANCE}
    params, times = program.train(data.X, data.y, with_points(hyper, Z, method.blocks), seed)
    rows = len(data.y)
    return {
        "elbo": program.elbo(params, data.X, data.y) / rows,
        "best_elbo": float(best_elbo(params, data.X, data.y, method.covariances, conditional_of(method))) / rows,
        **scores(*predict(params, data.X_test, method), data.y_test),
        **times,
        "noise_variance": float(params["noise_variance"]),
        "rows": rows,
        "test_rows": len(data.y_test),
    }


def run(args: argparse.Namespace) -> Records:
    """Fit what the file does not have."""
    names = ("steps", "batch_size", "learning_rate", "natural", "float64", "seed")
    records = Records(args.json, {name: getattr(args, name) for name in names} | {"most_rows": args.rows})
    for name in args.sets:
        fit_missing(
            records,
            args,
            name,
            load=lambda split, name=name: load(name, args.seed + split, args.rows, args.data),
            make_program=lambda method, M, data: Program(make_model(method, M, data.X.shape[1]), len(data.y), args),
            fit=fit,
            say=lambda cell, figures: print_fit(cell, figures, METRICS),
        )
    return records


def main(argv: list[str] | None = None) -> Cells:
    args = parse(argv)
    jax.config.update("jax_enable_x64", args.float64)
    records = run(args)
    cells = by_cell(records, args, args.sets)
    report(records, cells, METRICS, NOTE, args, "Regression: SVGP, SOLVE-GP and the tight conditional", __file__)
    draw(cells, METRICS, PANELS, args.out / "regression.png")
    return cells


if __name__ == "__main__":
    main()
