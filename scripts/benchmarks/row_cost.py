#!/usr/bin/env python
"""What a training step costs as row tables grow, at a fixed batch size: of a Bayesian GPLVM, or of a VNNGP.

The parameters of the GPLVM's latents, and of a VNNGP's inducing values, are tables with an entry per row. NumPyro's
SVI with Adam moves all of them, and their moments, at each step, and looks through them for NaN; with ``row_optim`` a
step touches the rows of its batch alone. Both training loops are compiled for each number of rows, and timed in turn.

    python scripts/benchmarks/row_cost.py --json out/row_cost.json
    python scripts/benchmarks/row_cost.py --model vnngp --rows 10000 100000 1000000
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp.gplvm import Start
from npgp.training import row_adam
from npgp.training.inputs import Inputs
from npgp.training.row_tables import LazySVI
from npgp.training.steps import RowSteps, Steps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, interleaved_steps, one_blas_thread, quartiles, table, whole, write_json

ROWS = (1_000, 10_000, 100_000, 1_000_000)
#: Of a turn; the latter is what a device call has room for.
LEAST_STEPS, MOST_STEPS = 5, 1000
QUICK = {"rows": [1_000, 10_000], "repetitions": 5, "seconds": 0.05}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--model", choices=["gplvm", "vnngp"], default="gplvm")
    parser.add_argument("--rows", type=whole, nargs="+", default=list(ROWS), help="numbers of data rows")
    parser.add_argument("--columns", type=whole, default=12, help="columns of the data")
    parser.add_argument("--latent-dim", type=whole, default=10)
    parser.add_argument("--neighbors", "--neighbours", type=whole, default=15, help="of the nearest-neighbor GP")
    parser.add_argument("--seconds", type=float, default=1.0, help="about this long per loop and round")
    inducing = dict(default=25, help="inducing points of the GPLVM")
    parser.shared("float64", "quick", "json", batch_size=100, inducing=inducing, repetitions=15)
    args = parser.read(argv, QUICK)
    if min(args.rows) < args.batch_size:
        parser.error(f"--rows {min(args.rows)} is less than --batch-size {args.batch_size}")
    return args


class Loop:
    """
    A training loop, compiled once, that goes on where it was.

    :param svi: model, guide, optimizer and loss.
    :param arrays: the data.
    :param batch_size: rows per step.
    :param row_optim: moves row tables lazily; they are moved as wholes if omitted.
    :param indices: keyword under which the model receives row numbers.
    """

    def __init__(self, svi: SVI, arrays, batch_size: int, row_optim=None, indices: str | None = None):
        self.inputs = Inputs(arrays, {}, jax.random.key(0), batch_size, indices)
        positional, named = self.inputs.first_call()
        lazy = None if row_optim is None else LazySVI(svi, row_optim)
        state = (lazy or svi).init(jax.random.key(0), *positional, **named)
        self.taken, self.first_loss = 0, float("nan")
        if lazy is None:
            self.steps: Any = Steps(svi, self.inputs, state, MOST_STEPS)
        else:
            self.steps = RowSteps(lazy, self.inputs, state, MOST_STEPS, 0)

    def advance(self, steps: int) -> tuple[float, float]:
        """Take steps: seconds of each, and the last loss."""
        chunk = self.inputs.read(self.taken, steps, MOST_STEPS)
        began = time.perf_counter()
        _, losses, ok = self.steps.advance(chunk, steps)
        seconds = (time.perf_counter() - began) / steps
        if not ok:
            raise FloatingPointError(f"The loss became {losses[-1]}.")
        self.taken += steps
        return seconds, float(losses[-1])


def gplvm_loop(rows: int, lazy: bool, args: argparse.Namespace) -> Loop:
    """A Bayesian GPLVM of so many rows."""
    rng = np.random.default_rng(0)
    latents = rng.normal(size=(rows, args.latent_dim))
    Y = np.tanh(latents @ rng.normal(size=(args.latent_dim, args.columns))) + 0.1 * rng.normal(
        size=(rows, args.columns)
    )
    gplvm = npgp.BayesianGPLVM(Start(latents, latents[: args.inducing], Y.mean(0)))
    svi = SVI(gplvm.model, gplvm.guide, npgp.adam(1e-3), TraceMeanField_ELBO())
    return Loop(svi, (Y,), args.batch_size, row_adam(1e-3) if lazy else None, "rows")


def vnngp_loop(rows: int, lazy: bool, args: argparse.Namespace) -> Loop:
    """A variational nearest-neighbor GP with an inducing point at each of so many sites in the plane."""
    rng = np.random.default_rng(0)
    sites = rng.uniform(size=(rows, 2)).astype(np.float32)
    y = np.sin(20 * sites[:, 0]) * np.cos(20 * sites[:, 1])
    neighbors = npgp.neighbors.nearest_before(sites, args.neighbors, ordering="random", rng_key=jax.random.key(0))

    def model(y, rows):
        gp = npgp.VNNGP("f", npgp.Matern32(0.1), sites, neighbors, batch_size=args.batch_size, init_scale=0.5)
        f = gp.draw()
        with npgp.plate("data", len(sites), rows=rows):
            npgp.observe("y", f(gp.inducing[rows], rows[:, None]), npgp.Gaussian(variance=0.1), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(1e-3), TraceMeanField_ELBO())
    return Loop(svi, (y,), args.batch_size, row_adam(1e-3) if lazy else None, "rows")


MODELS = {"gplvm": gplvm_loop, "vnngp": vnngp_loop}


def in_turns(loops: dict[Any, Loop], args: argparse.Namespace) -> dict[Any, np.ndarray]:
    """Seconds per step of each loop, by rounds in which they take turns."""
    for loop in loops.values():
        loop.first_loss = loop.advance(1)[1]  # compiles
    advance = {name: lambda steps, loop=loop: loop.advance(steps)[0] for name, loop in loops.items()}
    return interleaved_steps(advance, args.repetitions, args.seconds, LEAST_STEPS, MOST_STEPS)


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    kinds: dict[str, bool] = {"dense": False, "lazy": True}
    what = {
        "gplvm": f"a Bayesian GPLVM: batches of {args.batch_size}, {args.columns} columns, Q = {args.latent_dim}, "
        f"M = {args.inducing}",
        "vnngp": f"a variational nearest-neighbor GP: batches of {args.batch_size} rows and {args.batch_size} "
        f"inducing points, of which there is one at each row; {args.neighbors} neighbors",
    }
    print(f"A step of {what[args.model]}; {'float64' if args.float64 else 'float32'}\n")
    with jax.enable_x64(args.float64), one_blas_thread():
        make = MODELS[args.model]
        loops = {(rows, kind): make(rows, lazy, args) for rows in args.rows for kind, lazy in kinds.items()}
        seconds = in_turns(loops, args)
    report: dict[str, Any] = {"model": args.model, "float64": args.float64, "batch_size": args.batch_size, "rows": {}}
    report["first_losses"] = {str(rows): {kind: loops[rows, kind].first_loss for kind in kinds} for rows in args.rows}
    lines = []
    for rows in args.rows:
        found = {kind: quartiles(seconds[rows, kind], 1e3) for kind in kinds}
        report["rows"][str(rows)] = {kind: [median, low, high] for kind, (low, median, high) in found.items()}
        lines.append((rows, *(f"{median:.3f} ms ({low:.3f} to {high:.3f})" for low, median, high in found.values())))
    print(table(("data rows", "whole tables (quartiles)", "rows of the batch (quartiles)"), lines, left=()))
    most, least = (float(np.median(seconds[rows, "lazy"])) for rows in (max(args.rows), min(args.rows)))
    report["growth"] = most / least
    print(f"\nThe last column at {max(args.rows)} rows over that at {min(args.rows)}: {most / least:.2f}")
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
