#!/usr/bin/env python
"""npgp on an accelerator in one command: is it right there, how fast is it, and what does it reach in how long?

In this order, each part within its share of the time; what a part leaves unused goes to the next:

    right       bounds and gradients of all conditionals and structures against the processor's in float64
    steps       SVGP by npgp, by hand in JAX and by GPyTorch; their share of the rate of matrix products; memory
    others      SOLVE-GP, grouped, collapsed bounds, GPLVM, VNNGP, and batches of several sizes
    factors     many small Cholesky factors, by each way to compute them
    kin40k      time to the test density that GPyTorch's recipe ends with
    oil         20,000 steps of a GPLVM of the oil-flow data, with the tight bound and the classical one

    python scripts/benchmarks/gpu.py --data shared/data      8 minutes at most, on a data-center GPU
    python scripts/benchmarks/gpu.py --quick                 small, and where there is no GPU: does everything run?

It needs what npgp needs, with JAX for the accelerator, and GPyTorch if that is to be compared. Results are written
after each step of the way, to ``scripts/benchmarks/results/gpu.md`` and ``.json`` on a GPU, and to ``out`` without one.
Compiled programs are kept, so a second run gets further. The exit status is 1 if something is not right.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE), str(HERE / "bench")]
import accelerator_report
import benchmark
from processes import Failed, Process

from common import Arguments, command, interleaved_steps, whole, write_json

#: Shares of the time.
SHARES = {"right": 14, "steps": 40, "others": 20, "factors": 7, "kin40k": 11, "oil": 8}
#: Of the problem on which npgp is compared with the processor.
RIGHT = dict(rows=240, inducing=64, group_size=16)
RIGHT_CASES = (
    "SVGP", "SOLVE-GP", "ODVGP", "three blocks", "diagonal", "collapsed", "StudentT", "Poisson", "Bernoulli"
)  # fmt: skip
#: Rows and columns of matrices that are factorized, and how many of them.
FACTOR_SIZES, FACTOR_BATCHES = (16, 32, 64), (100, 1000, 10_000)
ROUTES = ("npgp", "jax", "loop", "columns")
#: Rows of the steps, and of the batches whose sizes are compared.
ROWS, BATCH_SIZES = 20_000, (256, 1024, 4096, 16_384)
#: The oil-flow data's recipe: inducing points, steps; so many are taken before the clock is looked at.
OIL = dict(inducing=25, steps=20_000)
OIL_CHUNK = 1000
#: Of workers of one library, which share the device's memory.
MOST_WORKERS = 5
#: Seconds without which nothing more is begun, and those without which no training and evaluation of a GPLVM is.
RESERVE, OIL_RESERVE = 5.0, 15.0
QUICK = dict(
    sizes=[16], rows=300, batch_size=64, repetitions=2, seconds=0.01, minutes=10.0, cases=["SVGP", "collapsed"]
)
QUICK_RIGHT = dict(rows=60, inducing=18, group_size=8, conditionals=("prior", "grouped"))
#: Of the other kinds, those of ``--quick``.
QUICK_KINDS = ("grouped", "SOLVE-GP", "GPLVM")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--minutes", type=float, default=8.0, help="for everything (8)")
    add("--data", type=Path, metavar="FOLDER", help="of the data sets; NPGP_DATA says it too")
    add("--sizes", type=whole, nargs="+", default=[256, 512, 1024, 2048, 4096], help="M, inducing points")
    add("--seconds", type=float, default=0.1, help="about this long per turn; at least two steps")
    add("--cases", nargs="+", choices=RIGHT_CASES, default=list(RIGHT_CASES), help="of the part right")
    out = dict(default=None, help="folder of gpu.md and gpu.json (the results' on a GPU, else out)")
    parser.shared("quick", batch_size=1024, rows=ROWS, repetitions=7, out=out)
    args = parser.read(argv, QUICK)
    if args.data is not None:
        if not args.data.is_dir():
            parser.error(f"--data {args.data}: there is no such folder.")
        os.environ["NPGP_DATA"] = str(args.data.resolve())
    args.libraries, args.dtypes, args.new_rows = list(LIBRARIES), ["float32"], 100
    args.interpreters = dict.fromkeys(LIBRARIES, sys.executable)
    args.command = command(__file__, argv)
    return args


LIBRARIES = ("npgp", "bare", "gpytorch", "checks")


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
    """
    The workers, what was found so far, and the time that is left.

    :param args: from :func:`parse`.
    :param folder: for files that workers read.
    """

    def __init__(self, args: argparse.Namespace, folder: Path):
        super().__init__(args, folder, settings)
        self.began, self.until = time.monotonic(), 0.0
        self.found: dict[str, Any] = {"command": args.command, "machine": benchmark.machine(), "quick": args.quick}
        self.late, self.lock = threading.Event(), threading.RLock()
        self.found |= {"cases": args.cases if "right" in args.parts else []}
        self.found |= {"batch_size": args.batch_size, "rows": args.rows, "columns": benchmark.COLUMNS, "notes": []}

    def worker(self, library: str, name: str = "") -> Process | None:
        """A worker of a library, begun where there is none that lives; none where the library is not there."""
        process = self.workers.get((library, name))
        if (process is None or process.process.poll() is not None) and library not in self.missing:
            self.workers.pop((library, name), None)
            process = self.start(library)
            if process is None:
                self.note(f"{library}: {self.missing[library]}")
                return None
            self.workers[library, name] = self.stack.enter_context(process)
            with self.lock:
                self.found |= {"versions": self.versions, "missing": self.missing}
        return process

    def all(self) -> dict[tuple[str, str], Process]:
        with ThreadPoolExecutor(benchmark.at_once()) as threads:
            list(threads.map(self.worker, [library for library in LIBRARIES if library != "checks"]))
        return {key: process for key, process in self.workers.items() if key[0] != "checks" and not key[1]}

    def side_by_side(self, library: str, jobs: Iterable[str], do: Callable[[Process, str], None]) -> None:
        """
        Share out jobs of compiling, which takes most of the time, among workers on a processor of many cores.

        :param do: what a worker is to do, given the name of a job; its failure is noted.
        """
        count, idle = min(MOST_WORKERS, benchmark.at_once()), queue.LifoQueue[str]()
        for i in reversed(range(count)):
            idle.put(str(i) if i else "")

        def work(job: str) -> None:
            name = idle.get()
            try:
                process = self.worker(library, name) if self.time_for(job) else None
                if process is not None and not self.late.is_set():  # it may have begun when the time was up
                    with self.attempt(job):
                        do(process, job)
            finally:
                idle.put(name)

        with ThreadPoolExecutor(count) as threads:
            list(threads.map(work, jobs))

    @property
    def on_gpu(self) -> bool:
        return any(of.get("backend") in ("gpu", "cuda", "rocm") for of in self.versions.values())

    @property
    def left(self) -> float:
        """Seconds of this part."""
        return self.until - time.monotonic()

    def time_for(self, what: str, least: float = RESERVE) -> bool:
        """Whether so many seconds are left; if not, that is noted."""
        if self.left < least:
            self.note(f"{what}: left out, for want of time")
        return self.left >= least

    def note(self, line: str) -> None:
        print(f"  {line}", flush=True)
        with self.lock:
            self.found["notes"].append(line)

    def keep(self, part: str, value: Any) -> None:
        """Put it with what was found in this part, and write all that there is."""
        with self.lock:
            self.found.setdefault(part, []).append(value)
            self.write()

    def write(self) -> None:
        self.found["seconds"] = time.monotonic() - self.began
        self.found["on_gpu"] = self.on_gpu
        folder = self.args.out or (HERE / "results" if self.on_gpu else Path("out"))
        write_json(folder / "gpu.json", self.found, say=False)
        (folder / "gpu.md").write_text(accelerator_report.markdown(self.found))
        self.out = folder

    @contextlib.contextmanager
    def limit(self, part: str, seconds: float) -> Iterator[None]:
        """Ends the workers if a part takes longer."""
        began, self.late = time.monotonic(), threading.Event()
        self.until = began + seconds

        def stop() -> None:
            self.late.set()
            for process in list(self.workers.values()):
                process.process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            yield
        except Failed as failed:
            self.failed(part, failed)
        finally:
            timer.cancel()
            timer.join()
            if self.late.is_set():
                self.stack.close()
                self.workers.clear()
            self.found.setdefault("part_seconds", {})[part] = time.monotonic() - began

    def failed(self, what: str, failed: Failed) -> None:
        """Note why, in a line."""
        if self.late.is_set():
            return self.note(f"{what}: stopped, for its part's time was up")
        print(failed)
        self.note(f"{what} FAILED: {str(failed).strip().splitlines()[-1]}")

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Something whose failure is noted, and the next thing goes on."""
        try:
            yield
        except Failed as failed:
            self.failed(what, failed)


# ---------------------------------------------------------------------------------------------------------------
# Parts


def right(run: Run) -> None:
    options: dict[str, Any] = QUICK_RIGHT if run.args.quick else RIGHT

    cases = {f"right, {case}": case for case in run.args.cases}

    def compare(process: Process, name: str) -> None:
        case = cases[name]
        found: dict[str, Any] = {"case": case, "conditionals": {}, "wrong": ["it was not computed"]}
        try:
            found |= process.ask("call", function="compare", case=case, **options)
            found["wrong"] = accelerator_report.wrong(found)
        finally:
            if not run.late.is_set():
                run.keep("right", found)
                print(f"  {case}: {'; '.join(found['wrong']) or 'right'}", flush=True)

    run.side_by_side("checks", cases, compare)


def steps(run: Run) -> None:
    args = run.args
    sizes = [(size, "float32") for size in args.sizes] + [(size, "float64") for size in args.sizes if size == 1024]
    for size, dtype in sizes:
        what = f"steps, M = {size}, {dtype}"
        if run.time_for(what):
            with run.attempt(what):
                for row in benchmark.steps_of(run, size, dtype, predictions=False):
                    run.keep("steps", row)


def others(run: Run) -> None:
    args, given = run.args, run.args.sizes
    args.sizes = given[1:3] if len(given) > 1 else given  # the larger is that of SOLVE-GP's two blocks
    table, middle = benchmark.kinds(run), args.sizes[0]
    if args.quick:
        table = {name: options for name, options in table.items() if options["kind"] in QUICK_KINDS}
    for size in (32,) if args.quick else BATCH_SIZES:
        name = f"SVGP, prior, M = {middle}, batches of {size}"
        table[name] = dict(kind="svgp", file=run.problem(middle, size))
    args.sizes, compiled = given, {}

    def compile_one(process: Process, name: str) -> None:
        process.ask("setup", name=name, dtype="float32", **table[name])
        compiled[name] = process

    run.side_by_side("npgp", table, compile_one)
    for name in (name for name in table if name in compiled and run.time_for(name)):
        with run.attempt(name):
            turn = {name: lambda count, name=name: compiled[name].ask("steps", name=name, count=count)}
            seconds = interleaved_steps(turn, args.repetitions, args.seconds)[name].tolist()
            run.keep("others", {"program": name, "kind": table[name]["kind"], "seconds": seconds})
    for process in set(compiled.values()):
        with run.attempt("others, the end"):
            process.ask("drop")


def factors(run: Run) -> None:
    sizes, batches = ((8,), (10,)) if run.args.quick else (FACTOR_SIZES, FACTOR_BATCHES)
    for batch in batches:
        for size in sizes:
            what = f"factors, {batch} of {size} × {size}"
            if run.time_for(what) and (process := run.worker("checks")) is not None:
                with run.attempt(what):
                    run.keep("factors", _factors(run, process, size, batch))


def _factors(run: Run, process: Process, size: int, batch: int) -> dict[str, Any]:
    for route in ROUTES:
        options = dict(route=route, size=size, batch=batch)
        process.ask("setup", name=route, kind="cholesky", dtype="float32", **options)
    turns = {route: lambda count, route=route: process.ask("steps", name=route, count=count) for route in ROUTES}
    seconds = interleaved_steps(turns, 3, run.args.seconds / 4)
    errors = {route: process.ask("figures", name=route)["error"] for route in ROUTES}
    process.ask("drop")
    return {
        "size": size,
        "batch": batch,
        "seconds": {route: values.tolist() for route, values in seconds.items()},
        "errors": errors,
    }


def kin40k(run: Run) -> None:
    if not there("uci_kin40k"):
        return run.note("kin40k: left out, for uci_kin40k.npz is not in the folder of --data or NPGP_DATA")
    found = run.found["kin40k"] = {}
    with run.attempt("kin40k"):
        benchmark.kin40k(run, found)


def oil(run: Run) -> None:
    """In chunks, so that what was reached is known when the time is up."""
    quick = run.args.quick
    real = there("oil_flow")
    if not real and not quick:
        return run.note("oil: left out, for oil_flow.npz is not in the folder of --data or NPGP_DATA")
    options = OIL | (dict(inducing=5, steps=20) if quick else {})
    for conditional in ("tight",) if quick else ("tight", "prior"):
        if not run.time_for(f"oil, {conditional}", 2.0 * OIL_RESERVE) or (process := run.worker("checks")) is None:
            continue
        setup = dict(conditional=conditional, real=real and not quick, **options)
        first = process.ask("setup", name=conditional, kind="oil", dtype="float64", **setup)["first_step_seconds"]
        done, seconds, slowest = 1, 0.0, 0.0
        while done < options["steps"] and run.left > OIL_RESERVE + slowest:
            count = min(OIL_CHUNK, options["steps"] - done)
            took = count * process.ask("steps", name=conditional, count=count)
            done, seconds, slowest = done + count, seconds + took, max(slowest, took)
        row = {"conditional": conditional, "steps": done, "wanted": options["steps"], "inducing": options["inducing"]}
        row |= {"first_seconds": first, "seconds": seconds, "real": setup["real"]}
        if done < options["steps"]:
            run.note(f"oil, {conditional}: {done} of {options['steps']} steps, for want of time")
        run.keep("oil", row | process.ask("figures", name=conditional))


def there(name: str) -> bool:
    folder = os.environ.get("NPGP_DATA")
    return bool(folder) and Path(str(folder), f"{name}.npz").is_file()


PARTS: dict[str, Callable[[Run], Any]] = {
    "right": right,
    "steps": steps,
    "others": others,
    "factors": factors,
    "kin40k": kin40k,
    "oil": oil,
}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(args, Path(folder))
        shares = sum(SHARES[part] for part in args.parts)
        spent = 0
        with run.stack:
            for part in args.parts:
                spent += SHARES[part]
                until = run.began + 60.0 * args.minutes * spent / shares
                print(f"{part}, until minute {(until - run.began) / 60.0:.1f}", flush=True)
                with run.limit(part, max(until - time.monotonic(), 0.0)):
                    PARTS[part](run)
                run.write()
    print(f"\n{(run.out / 'gpu.md').read_text()}\nwrote {run.out}/gpu.md and .json")
    return run.found


if __name__ == "__main__":
    sys.exit(accelerator_report.is_wrong(main()))
