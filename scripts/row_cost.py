#!/usr/bin/env python
"""What a training step of a Bayesian GPLVM costs as the data grow, at a fixed batch size.

The latents' parameters are tables with an entry per data row. NumPyro's SVI with Adam moves all of them, and their
moments, at each step, and looks through them for NaN; with ``row_optim`` a step touches the rows of its batch alone.
Both training loops are compiled for each number of rows, and timed in turn.

    python scripts/row_cost.py --json out/row_cost.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO
from threadpoolctl import threadpool_limits

import npgp
from npgp.gplvm import Start
from npgp.rows import LazySVI
from npgp.training import _device_loop, _Inputs, _row_loop, row_adam

ROWS = (1_000, 10_000, 100_000, 1_000_000)
LEAST_STEPS = 5
QUICK = {"rows": [1_000, 10_000], "repetitions": 5, "seconds": 0.05}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="numbers of data rows")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--columns", type=int, default=12, help="columns of the data")
    parser.add_argument("--latent-dim", type=int, default=10)
    parser.add_argument("--inducing", type=int, default=25)
    parser.add_argument("--repetitions", type=int, default=15, help="rounds in which the loops take turns")
    parser.add_argument("--seconds", type=float, default=1.0, help="about this long per loop and round")
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two sizes, few and short rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.quick:
        for name, value in QUICK.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    if min(args.rows) < args.batch_size:
        parser.error(f"--rows {min(args.rows)} is less than --batch-size {args.batch_size}")
    return args


class Loop:
    """A training loop, compiled once, that goes on where it was."""

    def __init__(self, rows: int, lazy: bool, args: argparse.Namespace):
        rng = np.random.default_rng(0)
        latents = rng.normal(size=(rows, args.latent_dim))
        Y = np.tanh(latents @ rng.normal(size=(args.latent_dim, args.columns))) + 0.1 * rng.normal(
            size=(rows, args.columns)
        )
        start = Start(latents, latents[: args.inducing], Y.mean(0))
        gplvm = npgp.BayesianGPLVM(start)
        svi: Any = SVI(gplvm.model, gplvm.guide, npgp.adam(1e-3), TraceMeanField_ELBO())
        self.inputs = _Inputs((Y,), {}, jax.random.key(0), args.batch_size, "rows")
        positional, named = self.inputs.first_call()
        if lazy:
            svi = LazySVI(svi, row_adam(1e-3))
        state = svi.init(jax.random.key(0), *positional, **named)
        good = svi.start(state, self.inputs.call, self.inputs.arrays, named["rows"]) if lazy else state
        self.state, self.good, self.taken, self.max_steps = state, good, 0, 1000
        self.first_loss = float("nan")
        self.run = (_row_loop if lazy else _device_loop)(svi, self.inputs, self.max_steps)

    def advance(self, steps: int) -> tuple[float, float]:
        """Take steps: seconds of each, and the last loss."""
        rows = np.pad(self.inputs.rows(self.taken, steps), ((0, self.max_steps - steps), (0, 0)))
        began = time.perf_counter()
        taken, self.state, self.good, losses, ok = self.run(self.state, self.good, self.inputs.arrays, rows, steps)
        jax.block_until_ready((self.state, losses))
        seconds = (time.perf_counter() - began) / steps
        if not ok:
            raise FloatingPointError(f"The loss became {losses[int(taken) - 1]}.")
        self.taken += steps
        return seconds, float(losses[steps - 1])


def interleaved(loops: dict[Any, Loop], args: argparse.Namespace) -> dict[Any, np.ndarray]:
    """Seconds per step of each loop, by rounds in which they take turns, in changing order."""
    steps = {}
    for name, loop in loops.items():
        loop.first_loss = loop.advance(1)[1]  # compiles
        steps[name] = LEAST_STEPS
        for _ in range(2):  # a call has a cost of its own
            steps[name] = int(np.clip(args.seconds / loop.advance(steps[name])[0], LEAST_STEPS, loop.max_steps))
    seconds: dict[Any, list[float]] = {name: [] for name in loops}
    for i in range(args.repetitions):
        for name in list(loops)[:: -1 if i % 2 else 1]:
            seconds[name].append(loops[name].advance(steps[name])[0])
    return {name: np.array(values) for name, values in seconds.items()}


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    kinds: dict[str, bool] = {"dense": False, "lazy": True}
    print(
        f"A step of a Bayesian GPLVM: batches of {args.batch_size}, {args.columns} columns, Q = {args.latent_dim}, "
        f"M = {args.inducing}, {'float64' if args.float64 else 'float32'}\n"
    )
    with jax.enable_x64(args.float64), threadpool_limits(1, user_api="blas"):
        loops = {(rows, kind): Loop(rows, lazy, args) for rows in args.rows for kind, lazy in kinds.items()}
        seconds = interleaved(loops, args)
    report: dict[str, Any] = {"float64": args.float64, "batch_size": args.batch_size, "rows": {}}
    report["first_losses"] = {str(rows): {kind: loops[rows, kind].first_loss for kind in kinds} for rows in args.rows}
    print("     rows    whole tables (quartiles)       rows of the batch (quartiles)")
    for rows in args.rows:
        report["rows"][str(rows)] = figures = {
            kind: [1e3 * float(q) for q in np.quantile(seconds[rows, kind], [0.5, 0.25, 0.75])] for kind in kinds
        }
        cells = [f"{m:9.3f} ms ({low:.3f} to {high:.3f})" for m, low, high in figures.values()]
        print(f"{rows:>9}{cells[0]:>30}{cells[1]:>32}")
    most, least = (float(np.median(seconds[rows, "lazy"])) for rows in (max(args.rows), min(args.rows)))
    report["growth"] = most / least
    print(f"\nThe last column at {max(args.rows)} rows over that at {min(args.rows)}: {most / least:.2f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
