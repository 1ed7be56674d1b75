#!/usr/bin/env python
"""What a training step costs as a file of rows grows: time, and memory of the process, at a fixed batch size.

A sparse GP is trained by ``fit`` on maps of ``.npy`` files, whose rows are read ahead in random order. Files of all
sizes are trained on in turn; afterwards each size runs in a process of its own for its memory.

    python scripts/benchmarks/memmap_cost.py --json out/memmap_cost.json
    python scripts/benchmarks/memmap_cost.py --quick
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

COLUMNS = 8
KEY = jax.random.key(0)
QUICK = {"rows": [10_000, 100_000], "inducing": 16, "batch_size": 128, "repetitions": 2, "steps": 20, "long": 60}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--inducing", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60, help="per round")
    parser.add_argument("--repetitions", type=int, default=11, help="rounds in which the files take turns")
    parser.add_argument("--long", type=int, default=4000, help="steps in which memory is measured")
    parser.add_argument("--folder", type=Path, help="for the files, which are removed; a temporary one if omitted")
    parser.add_argument("--quick", action="store_true", help="two small files, few steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.quick:
        for name, value in QUICK.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    return args


def write(folder: Path, rows: int) -> Path:
    """Files of inputs and targets, written block by block."""
    folder.mkdir()
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float32, (rows, COLUMNS))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.float32, (rows,))
    rng = np.random.default_rng(0)
    for start in range(0, rows, 100_000):
        block = slice(start, min(start + 100_000, rows))
        X[block] = rng.uniform(-2, 2, size=X[block].shape)
        y[block] = np.sin(X[block, 0]) + 0.1 * rng.normal(size=len(y[block]))
    return folder


class Training:
    """A sparse GP and a pair of files; each call of ``advance`` goes on where the last one stopped."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.X, self.y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("X", "y"))
        Z = np.random.default_rng(1).uniform(-2, 2, size=(args.inducing, COLUMNS)).astype(np.float32)

        size = len(self.X)

        def model(X, y=None):
            positive = dict(constraint=dist.constraints.positive)
            kernel = npgp.Matern32(numpyro.param("lengthscale", jnp.full(COLUMNS, 2.0), **positive))
            f = npgp.SparseGP("f", kernel, npgp.Points(numpyro.param("Z", jnp.asarray(Z)))).draw()
            with npgp.plate("data", size, rows=X.shape[0]):
                npgp.observe("y", f(X), npgp.Gaussian(numpyro.param("noise", 0.1, **positive)), obs=y)

        self.svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())
        self.args, self.state = args, None
        self.advance(2)

    def advance(self, steps: int, **more) -> float:
        """Seconds per step, over whole calls of ``fit``."""
        began = time.perf_counter()
        settings: dict[str, Any] = dict(batch_size=self.args.batch_size, progress=False, steps_per_call=10, **more)
        result = npgp.fit(self.svi, KEY, steps, self.X, y=self.y, init_state=self.state, **settings)
        self.state = result.state
        return (time.perf_counter() - began) / steps


def resident() -> int:
    """Bytes of memory of this process, mapped files included."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024  # type: ignore[union-attr]


def memory_growth(args: argparse.Namespace) -> dict[str, float]:
    """Of this process, in the last quarter of the steps: by then what is allocated finds room that was freed."""
    training = Training(args.memory_of, args)
    monitor = npgp.Monitor(lambda params: resident(), every=args.long // 20)
    training.advance(args.long, monitor=monitor)
    history = [memory for _, memory in monitor.history]
    return {"resident": history[-1], "growth": history[-1] - history[14]}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.memory_of is not None:
        print(json.dumps(memory_growth(args)))
        return {}
    seconds: dict[int, list[float]] = {rows: [] for rows in args.rows}
    memory = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        files = {rows: write(Path(folder) / str(rows), rows) for rows in args.rows}
        trainings = {rows: Training(path, args) for rows, path in files.items()}
        for i in range(args.repetitions):
            for rows in args.rows[:: -1 if i % 2 else 1]:
                seconds[rows].append(trainings[rows].advance(args.steps))
        for rows, path in files.items():
            command = [sys.executable, __file__, "--memory-of", str(path), "--inducing", str(args.inducing)]
            command += ["--batch-size", str(args.batch_size), "--long", str(args.long)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            memory[rows] = json.loads(said.splitlines()[-1])

    batch = args.batch_size * (COLUMNS + 1) * 4
    base = np.array(seconds[args.rows[0]])
    print(f"M = {args.inducing}, B = {args.batch_size}; medians of {args.repetitions} rounds of {args.steps} steps.")
    print(f"Memory after {args.long} steps, and its growth in the last quarter of them.\n")
    print(f"{'rows':>12}  {'ms a step':>9}  {'of the first':>12}  {'memory, MB':>10}  growth, batches")
    report = []
    for rows in args.rows:
        ratios = np.array(seconds[rows]) / base
        row = {
            "rows": rows,
            "seconds": float(np.median(seconds[rows])),
            "ratio": float(np.median(ratios)),
            "resident": memory[rows]["resident"],
            "growth_in_batches": memory[rows]["growth"] / batch,
        }
        report.append(row)
        print(
            f"{rows:>12,}  {1e3 * row['seconds']:9.2f}  {row['ratio']:12.3f}  {row['resident'] / 1e6:10.0f}"
            f"  {row['growth_in_batches']:.1f}"
        )
    result = {"inducing": args.inducing, "batch_size": args.batch_size, "batch_bytes": batch, "files": report}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
