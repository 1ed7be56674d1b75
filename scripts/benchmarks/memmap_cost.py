#!/usr/bin/env python
"""What a training step costs as a file of rows grows: time, and memory of the process, at a fixed batch size.

A sparse GP is trained by ``fit`` on maps of ``.npy`` files, whose rows are read ahead in random order. Files of all
sizes are trained on in turn; afterwards each size runs in a process of its own for its memory.

    python scripts/benchmarks/memmap_cost.py --json out/memmap_cost.json
    python scripts/benchmarks/memmap_cost.py --quick
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import small_svgp
from common import Arguments, in_its_own_process, interleaved, table, whole, write_json

COLUMNS = 8
KEY = jax.random.key(0)
QUICK = {"rows": [10_000, 100_000], "inducing": 16, "batch_size": 128, "repetitions": 1, "steps": 10, "long": 40}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.shared("json", "quick", inducing=256, batch_size=1024, steps=60, repetitions=11)
    parser.add_argument("--rows", type=whole, nargs="+", default=[10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--long", type=whole, default=4000, help="steps in which memory is measured")
    parser.add_argument("--folder", type=Path, help="for the files, which are removed; a temporary one if omitted")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    return parser.read(argv, QUICK)


def write(folder: Path, rows: int) -> Path:
    """Files of inputs and targets, written block by block."""
    folder.mkdir()
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float32, (rows, COLUMNS))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.float32, (rows,))
    rng = np.random.default_rng(0)
    for start in range(0, rows, 100_000):
        block = slice(start, min(start + 100_000, rows))
        X[block], y[block] = small_svgp.rows(rng, len(y[block]), COLUMNS)
    return folder


class Training:
    """A sparse GP and a pair of files; each call of ``advance`` goes on where the last one stopped."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.X, self.y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("X", "y"))
        Z = np.random.default_rng(1).uniform(-2, 2, size=(args.inducing, COLUMNS)).astype(np.float32)
        self.svi = small_svgp.small_svgp(len(self.X), Z)
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
    monitor = npgp.training.Monitor(lambda params: resident(), every=args.long // 20)
    training.advance(args.long, monitor=monitor)
    history = [memory for _, memory in monitor.history]
    return {"resident": history[-1], "growth": history[-1] - history[14]}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.memory_of is not None:
        report = memory_growth(args)
        write_json(args.json, report)
        return report
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        files = {rows: write(Path(folder) / str(rows), rows) for rows in args.rows}
        trainings = {rows: Training(path, args) for rows, path in files.items()}
        turns = {rows: partial(training.advance, args.steps) for rows, training in trainings.items()}
        seconds = interleaved(turns, args.repetitions, clock=None)
        same = ["--inducing", str(args.inducing), "--batch-size", str(args.batch_size), "--long", str(args.long)]
        memory = {rows: in_its_own_process(__file__, ["--memory-of", str(path), *same]) for rows, path in files.items()}

    batch = args.batch_size * (COLUMNS + 1) * 4
    print(f"M = {args.inducing}, B = {args.batch_size}; medians of {args.repetitions} rounds of {args.steps} steps.")
    print(f"Memory after {args.long} steps, and its growth in the last quarter of them.\n")
    figures = []
    for rows in args.rows:
        times = {
            "rows": rows,
            "seconds": float(np.median(seconds[rows])),
            "ratio": float(np.median(seconds[rows] / seconds[args.rows[0]])),
        }
        memories = {"resident": memory[rows]["resident"], "growth_in_batches": memory[rows]["growth"] / batch}
        figures.append(times | memories)
    cells = [
        (f"{r['rows']:,}", f"{1e3 * r['seconds']:.2f}", f"{r['ratio']:.3f}", f"{r['resident'] / 1e6:.0f}",
         f"{r['growth_in_batches']:.1f}") for r in figures
    ]  # fmt: skip
    print(table(("rows", "ms a step", "of the first", "memory, MB", "growth, batches"), cells, left=()))
    result = {"inducing": args.inducing, "batch_size": args.batch_size, "batch_bytes": batch, "files": figures}
    write_json(args.json, result)
    return result


if __name__ == "__main__":
    main()
