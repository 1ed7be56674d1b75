#!/usr/bin/env python
"""npgp on an accelerator in one command: is it right there, and how fast is it?

    right       bounds and gradients of all conditionals and structures against the processor's in float64
    steps       SVGP by npgp, by hand in JAX and by GPyTorch, beside products of matrices; memory

    python scripts/benchmarks/gpu.py                         8 minutes at most, on a data-center GPU
    python scripts/benchmarks/gpu.py --quick                 small, and where there is no GPU: does everything run?

Nothing is begun in the last minute, and results are written after each step of the way, to ``scripts/benchmarks/
results/gpu.md`` and ``.json`` on a GPU, and to ``out`` without one. Compiled programs are kept, so a second run gets
further. The exit status is 1 if something is not right.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE), str(HERE / "bench")]
import benchmark
from processes import Failed, Process

from common import Arguments, command, whole, write_json

#: Of the problem on which npgp is compared with the processor.
RIGHT: dict[str, Any] = dict(rows=240, inducing=64, group_size=16)
QUICK_RIGHT: dict[str, Any] = dict(rows=60, inducing=18, group_size=8, conditionals=("grouped",))
CASES = ("SVGP", "SOLVE-GP", "ODVGP", "three blocks", "diagonal", "collapsed", "StudentT", "Poisson", "Bernoulli")
LIBRARIES = ("npgp", "bare", "gpytorch", "checks")
#: Seconds at the end in which nothing more is begun.
RESERVE = 60.0
QUICK = dict(sizes=[16], rows=300, batch_size=64, repetitions=2, seconds=0.01, cases=["SVGP", "collapsed"])
Found = Iterator[dict[str, Any]]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--minutes", type=float, default=8.0, help="for everything (8)")
    add("--sizes", type=whole, nargs="+", default=[256, 512, 1024, 2048, 4096], help="M, inducing points")
    add("--seconds", type=float, default=0.1, help="about this long per turn; at least two steps")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="of the part right")
    out = dict(default=None, help="folder of gpu.md and gpu.json (the results' on a GPU, else out)")
    parser.shared("quick", batch_size=1024, rows=20_000, repetitions=7, out=out)
    args = parser.read(argv, QUICK)
    args.libraries, args.new_rows, args.command = list(LIBRARIES), 100, command(__file__, argv)
    args.interpreters = dict.fromkeys(LIBRARIES, sys.executable)
    return args


def settings(library: str) -> dict[str, dict[str, str]]:
    """The environment of the workers: they share the device and the compiled programs, and find the repository."""
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(HERE.parents[1] / ".jax_cache")
    cached = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    # As npgp's own programs have it: XLA tries out dozens of kernels for each shape of products otherwise.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false".strip()
    threads = benchmark.cores() if library == "gpytorch" else 1
    return {"": benchmark.threads(threads) | cached | {"PYTHONPATH": path, "XLA_FLAGS": flags}}


class Run(benchmark.Bench):
    """The workers, and the time that is left."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        super().__init__(args, folder, settings)
        self.until = time.monotonic() + 60.0 * args.minutes

    @property
    def time(self) -> bool:
        """Whether something more may be begun."""
        return self.until - time.monotonic() > RESERVE

    @property
    def on_gpu(self) -> bool:
        return any(of.get("backend") in ("gpu", "cuda", "rocm") for of in self.versions.values())

    @property
    def checks(self) -> Process:
        process = self.one("checks")
        assert process is not None  # it needs what npgp needs
        return process


# ---------------------------------------------------------------------------------------------------------------
# Parts


def right(run: Run) -> Found:
    """The largest differences of each case and conditional, and which are more than they may be."""
    options = QUICK_RIGHT if run.args.quick else RIGHT
    for case in run.args.cases:
        if run.time:
            found = run.checks.ask("call", function="compare", case=case, **options)
            for name, by_dtype in found["conditionals"].items():
                row: dict[str, Any] = {"case": case, "conditional": name}
                for dtype, differences in by_dtype.items():
                    for what, value, most in zip(
                        ("bound", "gradient"), differences, found["tolerance"][dtype], strict=True
                    ):
                        row |= {f"{dtype}: {what}": f"{value:.0e}"} | ({} if value <= most else {"wrong": True})
                yield row


def steps(run: Run) -> Found:
    for size in run.args.sizes:
        if run.time:
            yield from benchmark.steps_of(run, size, "float32", predictions=False)


PARTS = {"right": right, "steps": steps}


def markdown(found: dict[str, Any]) -> str:
    """Who ran where, and tables."""
    title = "On an accelerator" if found["on_gpu"] else "Without an accelerator: does everything run?"
    wrong = [f"{row['case']}, {row['conditional']}" for row in found.get("right", []) if "wrong" in row]
    said = [f"{found['seconds']:.0f} seconds."]
    said += [f"Left out or cut short, if anything was: {', '.join(found['left_out'])}."] if found["left_out"] else []
    if "right" in found:
        said.append(
            f"Beyond what rounding explains: {'; '.join(wrong)}." if wrong else "All that was compared is right."
        )
    return benchmark.markdown(found, title, said)


def is_wrong(found: dict[str, Any]) -> bool:
    """Whether something is not right, or nothing was compared that was to be."""
    return "right" in found and (not found["right"] or any("wrong" in row for row in found["right"]))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    found: dict[str, Any] = {"command": args.command, "machine": benchmark.machine(), "left_out": []}
    found |= {"versions": {}, "missing": {}}
    began = time.monotonic()

    def write() -> Path:
        found.update(seconds=time.monotonic() - began, on_gpu=run.on_gpu, versions=run.versions, missing=run.missing)
        folder = args.out or (HERE / "results" if run.on_gpu else Path("out"))
        write_json(folder / "gpu.json", found, say=False)
        (folder / "gpu.md").write_text(markdown(found))
        return folder

    with tempfile.TemporaryDirectory() as temporary:
        run = Run(args, Path(temporary))
        with run.stack:  # ends the workers
            for part in args.parts:
                print(part, flush=True)
                found[part] = []
                try:
                    for row in PARTS[part](run):
                        found[part].append(row)
                        write()
                except Failed as failed:
                    print(failed, flush=True)
                    found["left_out"].append(f"{part}, which failed")
                if not run.time:
                    found["left_out"].append(f"{part}, for want of time")
            folder = write()
            print(f"\n{markdown(found)}\nwrote {folder}/gpu.md and .json")
    return found


if __name__ == "__main__":
    sys.exit(is_wrong(main()))
