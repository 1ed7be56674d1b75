#!/usr/bin/env python
"""What training and prediction cost: npgp, GPJax, GPyTorch, and the same step written by hand in JAX, side by side.

    steps       whitened SVGP, Matérn-3/2, a lengthscale per column, Gaussian noise, dense q, all learned by Adam on
                minibatches; and predictions. Products of matrices of the same size are timed in the same turns: at
                their rate ``bench/flops.py`` gives the least time that a step's products would take, "limit"
    first_step  a process that has just begun: import, time to the end of the first step, memory
    example     README's first example and GPJax's like of it, from a process's start to its picture and its end
    npgp        other structures and bounds that npgp trains
    kin40k      time to the test density that GPyTorch's usual recipe ends with

Every library works in a process of its own; all start from the same parameters, where their ELBOs are compared, and
take turns in random order. Peers of ``steps`` are measured at several settings of their threads, of which the best
stands in the tables.

    NPGP_DATA=... python scripts/benchmarks/benchmark.py        25 minutes, two idle cores
    python scripts/benchmarks/benchmark.py --quick              a few minutes: does everything run?

Libraries that do not go together with npgp's versions of JAX can be installed apart from it:

    python scripts/benchmarks/benchmark.py --python gpytorch=.venv-gpytorch/bin/python gpjax=.venv-gpjax/bin/python
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

BENCH = Path(__file__).resolve().parent / "bench"
sys.path[:0] = [str(BENCH.parents[1]), str(BENCH)]
import flops
from problems import synthetic
from processes import Failed, Missing, Process

from common import Arguments, command, interleaved_steps, quartiles, table, whole, write_json

Records = list[dict[str, Any]]
COLUMNS = 8
LIBRARIES = ("npgp", "bare", "gpytorch", "gpjax")
#: Programs that are compared, with the library whose process runs each and its kind there.
PROGRAMS = {
    "npgp": ("npgp", "svgp"),
    "JAX by hand": ("bare", "svgp"),
    "JAX by hand, plain": ("bare", "plain"),  # by JAX's own gradients of the factor and of the triangular solve
    "GPyTorch": ("gpytorch", "svgp"),
    "GPJax": ("gpjax", "svgp"),
}
#: ELBOs at the same parameters may differ relatively by this.
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
#: The recipe on kin40k, where both libraries start from the same points and hyperparameters.
KIN40K = dict(inducing=512, batch_size=1024, epochs=30, lengthscale=0.7, variance=1.0, noise=0.1)
#: npgp's own: natural gradients for q, and Adam with a learning rate that decays along a cosine for the rest.
RECIPE = dict(epochs=6, natural=0.1, learning_rate=0.05)
QUICK = dict(sizes=[16, 32], repetitions=2, rows=300, new_rows=200, batch_size=64, seconds=0.01)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    add("--sizes", type=whole, nargs="+", default=[256, 512, 1024], help="M, inducing points")
    add("--dtypes", nargs="+", choices=["float32", "float64"], default=["float32", "float64"])
    add("--new-rows", type=whole, default=10_000, help="rows of a prediction")
    add("--seconds", type=float, default=0.4, help="about this long per turn; at least two steps")
    add("--python", nargs="+", default=[], metavar="LIBRARY=PATH", help="interpreters of single peers")
    rows, out = dict(default=10_000, help="of the step times"), dict(help="folder of benchmark.json and .md (out)")
    parser.shared("quick", batch_size=1024, rows=rows, repetitions=9, out=out)
    args = parser.read(argv, QUICK)
    args.interpreters = dict.fromkeys(LIBRARIES, sys.executable)
    for given in args.python:
        library, _, path = given.partition("=")
        if library not in LIBRARIES or not path:
            parser.error(f"--python {given}: expected LIBRARY=PATH with LIBRARY one of {', '.join(LIBRARIES)}.")
        args.interpreters[library] = os.path.abspath(path)  # the example runs elsewhere
    args.command = command(__file__, argv)
    return args


# ---------------------------------------------------------------------------------------------------------------
# Processes


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(count: int, library: str = "npgp") -> dict[str, str]:
    """
    Of linear algebra and OpenMP; and XLA's, as many as users have, for npgp. Programs of other libraries may wait in a
    circle with few, and get 16, which cost nothing where a program has no batched products. And bytecode is kept, as
    pip keeps that of what it installs: an import of this repository is no longer than that of an installed library.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    found = dict.fromkeys(names, str(count)) | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # an accelerator is shared
    found |= {"PYTHONDONTWRITEBYTECODE": ""}  # to Python as if it were not set
    return found if library == "npgp" else found | {"NPROC": os.environ.get("NPROC", "16")}


def settings(library: str) -> dict[str, dict[str, str]]:
    """Environments in which a library is measured, by name. ``npgp.fit`` itself sees to one thread in LAPACK."""
    found, n = {"1 thread": threads(1, "npgp" if library == "gpytorch" else library)}, cores()
    if library == "gpytorch" and n > 1:
        found |= {f"{n} threads": threads(n)}
        found |= {f"{n} threads that wait asleep": threads(n) | {"OMP_WAIT_POLICY": "PASSIVE"}}
    if library == "gpjax" and n > 1:
        found |= {f"{n} LAPACK threads": threads(n, library)}
    return found


class Bench:
    """
    The workers, by library and setting, and what they found.

    :param args: from :func:`parse`.
    :param folder: for files that workers read.
    :param settings: the environments of a library's workers, by name.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, settings: Callable[[str], dict] = settings):
        self.args, self.folder, self.settings, self.stack = args, folder, settings, ExitStack()
        self.workers: dict[tuple[str, str], Process] = {}
        self.missing: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}

    def start(self, library: str, setting: str = "") -> Process | None:
        """A new worker, in the first setting if none is named; none where the library is not there."""
        found = self.settings(library)
        try:
            process = Process(library, self.args.interpreters[library], found[setting or next(iter(found))])
        except Missing as missing:
            self.missing[library] = f"not installed ({missing}): pip install --group bench"
        except (Failed, OSError) as failed:
            self.missing[library] = f"does not start: {failed}"
        else:
            self.versions[library] = process.versions
            return process
        print(f"{library}: {self.missing[library]}", flush=True)
        return None

    def all(self, library: str) -> dict[str, Process]:
        """The long-lived workers of a library, by setting."""
        if library in self.args.libraries and library not in self.missing:
            for setting in self.settings(library):
                if (library, setting) not in self.workers and (process := self.start(library, setting)) is not None:
                    self.workers[library, setting] = self.stack.enter_context(closing(process))
        return {setting: process for (name, setting), process in self.workers.items() if name == library}

    def one(self, library: str) -> Process | None:
        """The first of them."""
        return next(iter(self.all(library).values()), None)

    def problem(self, inducing: int) -> str:
        """File of the problem with so many inducing points."""
        args, path = self.args, self.folder / f"problem{inducing}.npz"
        if not path.exists():
            synthetic(args.rows, args.new_rows, COLUMNS, inducing, args.batch_size).save(path)
        return str(path)

    def in_turns(self, programs: dict[Any, tuple[Process, dict[str, Any]]], compare: bool = False) -> dict[Any, dict]:
        """
        Seconds of a step of each program in each round, its worker's memory and, if asked for, the ELBO at its start.

        :param programs: by name, the worker and what ``setup`` is to know.
        """
        found: dict[Any, dict[str, Any]] = {}
        for name, (process, asked) in programs.items():
            try:
                elbo = {"elbo": process.ask("elbo", **asked)} if compare and asked["kind"] != "matmul" else {}
                found[name] = process.ask("setup", name=str(name), **asked) | elbo
            except Failed as failed:
                print(f"{name} FAILED: {failed}", flush=True)
        turns = {
            name: lambda count, name=name: programs[name][0].ask("steps", name=str(name), count=count) for name in found
        }
        for name, seconds in interleaved_steps(turns, self.args.repetitions, self.args.seconds).items():
            found[name] |= {"seconds": seconds.tolist(), "device_bytes": programs[name][0].ask("device_memory")}
            print(f"  {name}: {1e3 * np.median(seconds):.2f} ms a step", flush=True)
        return found

    def drop(self) -> None:
        for process in self.workers.values():
            process.ask("drop")


# ---------------------------------------------------------------------------------------------------------------
# Parts: records, each with what it is of and what was measured


def steps(bench: Bench) -> Records:
    """Training steps and predictions of all libraries, with matrix products of the same size."""
    sizes = [(size, dtype) for dtype in bench.args.dtypes for size in bench.args.sizes]
    return [row for size, dtype in sizes for row in steps_of(bench, size, dtype)]


def steps_of(bench: Bench, size: int, dtype: str, predictions: bool = True) -> Records:
    """As :func:`steps`, for one number of inducing points and one dtype, each program at its best setting."""
    print(f"M = {size}, {dtype}", flush=True)
    asked, programs = {"dtype": dtype, "file": bench.problem(size)}, {}
    for name, (library, kind) in PROGRAMS.items():
        for setting, process in bench.all(library).items():
            programs[name, setting] = process, {"kind": kind, **asked}
    if products := bench.one("bare"):
        shape = {"kind": "matmul", "size": size, "columns": bench.args.batch_size}
        programs["limit", ""] = products, {"dtype": dtype, **shape}
    found = bench.in_turns(programs, compare=True)
    for _ in range(3 if predictions else 0):
        for key in (key for key in found if key[0] != "limit"):
            again = programs[key][0].ask("predict", name=str(key), repetitions=2)
            found[key].setdefault("prediction", []).extend(again)
    bench.drop()
    if of_products := found.get(("limit", "")):
        B = bench.args.batch_size
        share = flops.svgp_step(size, B) / flops.product(size, B)
        of_products["gflops"] = 1e-9 * flops.product(size, B) / float(np.median(of_products["seconds"]))
        of_products["seconds"] = [share * seconds for seconds in of_products["seconds"]]
    check_elbos({name: row["elbo"] for (name, _), row in found.items() if "elbo" in row}, size, dtype)
    rows = [{"program": name, "setting": setting, "M": size, "dtype": dtype, **row} for (name, setting), row in
            found.items()]  # fmt: skip
    return best(rows)


def best(rows: Records) -> Records:
    """Of each program the row of the least median."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -np.median(row["seconds"])):
        found[row["program"]] = row
    return [found[name] for name in dict.fromkeys(row["program"] for row in rows)]


def check_elbos(elbos: dict[str, float], size: int, dtype: str) -> None:
    """Say loudly where programs do not compute the same."""
    values = list(elbos.values())
    if len(values) > 1 and max(values) - min(values) > TOLERANCE[dtype] * abs(values[0]):
        found = ", ".join(f"{program} {value!r}" for program, value in elbos.items())
        print(f"!!! ELBOs DIFFER at the same parameters, M = {size}, {dtype}: {found}", flush=True)


def first_step(bench: Bench) -> Records:
    """A process that has just begun: the time to its first step, compilation included, and its peak memory."""
    args, found, mebibyte = bench.args, [], 2.0**20
    size = args.sizes[min(1, len(args.sizes) - 1)]
    for name, (library, kind) in PROGRAMS.items():
        process = bench.start(library) if library in args.libraries and library not in bench.missing else None
        if process is None:
            continue
        with closing(process):
            row = {"program": name, "import (s)": process.import_seconds}
            imported = process.ask("peak_memory")
            asked = {"name": "a", "kind": kind, "dtype": args.dtypes[0], "file": bench.problem(size)}
            row["first step (s)"] = process.ask("setup", **asked)["first_step_seconds"]
            process.ask("steps", name="a", count=10)
            row |= {"imported (MiB)": imported / mebibyte, "peak (MiB)": process.ask("peak_memory") / mebibyte}
            found.append(row)
    return found


def example(bench: Bench) -> Records:
    """Seconds of README's first example, without JAX's cache of programs (cold) and with it (warm), in turns."""
    args, found = bench.args, []
    programs = {"npgp": readme_example(), "gpjax": (BENCH / "gpjax_example.py").read_text()}
    environment = os.environ | threads(1) | {"MPLBACKEND": "Agg"}
    for name in [name for name in programs if name in args.libraries]:
        (bench.folder / f"{name}_example.py").write_text(programs[name] + "\nprint('drawn', flush=True)\n")
        check = [args.interpreters[name], "-c", f"import matplotlib, {name}"]
        if subprocess.run(check, env=environment, stderr=subprocess.DEVNULL).returncode:
            bench.missing.setdefault(name, "not installed, or no matplotlib: pip install --group bench")
            continue
        times: dict[str, list[float]] = {}
        for turn in range(1 if args.quick else 3):
            cache = str(bench.folder / f"cache-{name}-{turn}")
            for start in ("cold", "warm"):  # the second finds what the first has compiled
                # All programs are kept: on a fast machine none takes the second that JAX's default asks for.
                kept = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
                line = [args.interpreters[name], f"{name}_example.py"]
                picture, end = time_of_example(line, bench.folder, environment | kept)
                times.setdefault(f"{start} (s)", []).append(picture)
                times.setdefault(f"{start}, to the end (s)", []).append(end)
        found.append({"program": name} | {key: float(np.median(values)) for key, values in times.items()})
    return found


def time_of_example(line: list[str], folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds until the process says that it has drawn its picture, and until its end."""
    errors = folder / "example.log"
    with errors.open("w") as log:
        began = time.perf_counter()
        child = subprocess.Popen(line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        with child:
            assert child.stdout is not None
            drawn = [time.perf_counter() - began for text in child.stdout if text == "drawn\n"]
        end = time.perf_counter() - began
    if child.returncode or not drawn:
        raise Failed(f"{line[-1]}: {errors.read_text()[-2000:]}")
    return drawn[0], end


def readme_example() -> str:
    """The first block of Python in README, and a picture of its prediction."""
    text = (BENCH.parents[2] / "README.md").read_text(encoding="utf-8")
    picture = """
import matplotlib.pyplot as plt
plt.plot(X_new[:, 0], np.asarray(mean))
plt.fill_between(X_new[:, 0], lower, upper, alpha=0.3)
plt.savefig("first.png")
"""
    return text.split("```python\n", 1)[1].split("\n```", 1)[0] + picture


def alone(bench: Bench) -> Records:
    """What else npgp trains, in one process and in turns; float32. A collapsed bound is one of all rows."""
    args, process = bench.args, bench.one("npgp")
    if process is None:
        return []
    middle, largest = args.sizes[min(1, len(args.sizes) - 1)], args.sizes[-1]
    few, half = min(args.batch_size, 100), largest // 2
    kinds: dict[str, dict[str, Any]] = {
        f"{name}, M = {middle}": dict(kind=kind, file=bench.problem(middle))
        for name, kind in {
            "SVGP": "svgp",
            "tight": "tight",
            "grouped by 64": "grouped",
            "collapsed": "collapsed",
        }.items()
    }
    kinds[f"SVGP, M = {largest}"] = dict(kind="svgp", file=bench.problem(largest))
    kinds[f"SOLVE-GP, M = {half} + {half}"] = dict(kind="SOLVE-GP", file=bench.problem(largest))
    GPLVM = dict(kind="GPLVM", rows=1000, inducing=25, batch_size=100)
    kinds["GPLVM, N = 1000, 12 columns, Q = 10, M = 25, B = 100"] = GPLVM
    VNNGP = dict(kind="VNNGP", rows=args.rows, batch_size=few)
    kinds[f"VNNGP, N = {args.rows}, 15 neighbors, B = {few}"] = VNNGP
    found = bench.in_turns({name: (process, {"dtype": "float32", **asked}) for name, asked in kinds.items()})
    bench.drop()
    first = np.asarray(found[f"SVGP, M = {middle}"]["seconds"])
    times = {name: np.asarray(row["seconds"]) for name, row in found.items()}
    return [{"program": name, "ms": 1e3 * np.median(t), f"of SVGP's, M = {middle}": np.median(t / first),
             f"of SVGP's, M = {largest}": np.median(t / times[f"SVGP, M = {largest}"])}
            for name, t in times.items()]  # fmt: skip


def kin40k(bench: Bench) -> Records:
    """Time to the test NLPD that GPyTorch's usual recipe ends with, one library after the other; float32."""
    from regression_sets import uci

    args, options = bench.args, dict(KIN40K)
    try:
        data = uci("kin40k", 0)
    except Exception as error:
        bench.missing["kin40k"] = str(error)
        return []
    inducing, few = int(options.pop("inducing")), slice(600 if args.quick else None)
    if args.quick:
        inducing, options["batch_size"], options["epochs"] = 16, 64, 2
    given = {name: np.asarray(getattr(data, f"{name}_train"), np.float32)[few] for name in ("X", "y")}
    given |= {f"{name}_test": np.asarray(getattr(data, f"{name}_test"), np.float32)[few] for name in ("X", "y")}
    given["Z"] = given["X"][np.random.default_rng(0).choice(len(given["X"]), inducing, replace=False)]
    options["lengthscale"] *= float(np.sqrt(given["X"].shape[1]))
    file, found, target = str(bench.folder / "kin40k.npz"), [], None
    np.savez(file, **given)
    if peers := bench.all("gpytorch"):
        # The threads that took its steps faster on this machine, by an epoch of them.
        trials = {name: peer.ask("train", file=file, **{**options, "epochs": 1}) for name, peer in peers.items()}
        setting = min(trials, key=lambda name: trials[name]["curve"][-1][0])
        seconds, target = peers[setting].ask("train", file=file, **options)["curve"][-1]
        found.append({"program": f"GPyTorch, {setting}", "seconds": seconds, "NLPD": target})
    if process := bench.one("npgp"):
        run = process.ask("train", file=file, **{**options, **RECIPE} | ({"epochs": 2} if args.quick else {}))
        (seconds, last), first = run["curve"][-1], run["compile_seconds"]
        found.append({"program": "npgp, to its end", "seconds": seconds, "of which first step": first, "NLPD": last})
        if target is not None:
            row = {"program": "npgp, to GPyTorch's last NLPD", "NLPD": target, "of which first step": first}
            found.append(row | {"seconds": reached(run["curve"], target)})
    return found


def reached(curve: list[list[float]], target: float) -> float | None:
    """Seconds after which a curve is first at the target or below."""
    return next((seconds for seconds, value in curve if value <= target), None)


#: What can be measured, in this order. (Rows in a file, N = 10⁷ against 10⁴: ``costs.py files``.)
PARTS: dict[str, Callable[[Bench], Records]] = {
    "steps": steps, "first_step": first_step, "example": example, "npgp": alone, "kin40k": kin40k,
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------
# Tables


def cell(value: Any, scale: float = 1.0) -> str | None:
    """A number to three digits; of several the median and quartiles."""
    if value is None or isinstance(value, str | int):
        return value if value is None else str(value)
    if isinstance(value, float | np.floating):
        return f"{scale * value:.4g}"
    low, middle, high = quartiles(value, scale)
    digits = 2 if middle < 10 else 1 if middle < 100 else 0
    return f"{middle:.{digits}f}" + (f" ({low:.{digits}f}–{high:.{digits}f})" if len(value) > 1 else "")


def by_program(rows: Records, figure: str, scale: float = 1.0, over: str | None = None) -> str:
    """
    A line for each of the sizes, a column for each program.

    :param over: the program whose seconds are divided by the others'.
    """
    measured = {"program", "setting", "seconds", "prediction", "elbo", "gflops"}
    keys = [k for k in rows[0] if k not in measured and not k.endswith(("bytes", "_seconds"))]
    rows = [row for row in rows if figure in row]
    programs = list(dict.fromkeys(row["program"] for row in rows if row["program"] != over))
    lines: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        lines.setdefault(tuple(row[k] for k in keys), {})[row["program"]] = row[figure]
    if over is not None:
        lines = {key: {name: np.asarray(line[over]) / np.asarray(t) for name, t in line.items()}
                 for key, line in lines.items() if over in line}  # fmt: skip
    shown = [[*map(str, key), *(cell(line.get(name), scale) for name in programs)] for key, line in lines.items()]
    return table([*keys, *programs], shown, markdown=True)


def markdown(found: dict[str, Any], title: str = "Benchmark", said: Sequence[str] = ()) -> str:
    """All that was found: who ran where, what else is ``said``, and tables."""
    machine, versions = found["machine"], {}
    for of in found["versions"].values():
        versions |= {name: version for name, version in of.items() if name != "threads"}
    parts = [
        f"# {title}\n\n`{found['command']}`",
        f"{machine['cores']} cores of {machine['cpu']}; Python {machine['python']}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + f"; load before the run {machine.get('load_before', '?')}. Milliseconds: medians, and quartiles in brackets, "
        "of rounds in which programs took turns; ratios are of the same rounds.",
        *(f"{name}: {why}" for name, why in found["missing"].items()),
        *said,
    ]
    for part, rows in ((part, found[part]) for part in ("right", *PARTS) if found.get(part)):
        rows = [row | ({"elbo": f"{row['elbo']:.9g}"} if "elbo" in row else {}) for row in rows]
        parts.append(f"## {part}")
        if "seconds" not in rows[0] or part == "kin40k":
            names = list(dict.fromkeys(name for row in rows for name in row))
            lines = [[cell(row.get(name)) for name in names] for row in rows]
            parts.append(table(["", *names[1:]], lines, markdown=True))
            continue
        parts.append(by_program(rows, "seconds", 1e3))
        if part == "steps":
            parts += ["npgp's step over the others':", by_program(rows, "seconds", over="npgp")]
        more = {"prediction": 1e3, "elbo": 1.0, "setting": 1.0, "gflops": 1.0, "device_bytes": 1.0}
        measured = {key for row in rows for key, value in row.items() if value is not None}
        parts += [f"{name}:\n\n{by_program(rows, name, scale)}" for name, scale in more.items() if name in measured]
    return "\n\n".join(parts) + "\n"


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    name = found[1] if found else platform.processor() or platform.machine()
    described: dict[str, Any] = {"cpu": name, "cores": cores(), "python": platform.python_version()}
    if hasattr(os, "getloadavg"):
        described["load_before"] = round(os.getloadavg()[0], 2)
    return described


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    found: dict[str, Any] = {"command": args.command, "machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        with bench.stack:  # ends the workers
            for part in args.parts:
                found[part] = PARTS[part](bench)
                found |= {"versions": bench.versions, "missing": bench.missing}
                write_json(args.out / "benchmark.json", found, say=False)
                (args.out / "benchmark.md").write_text(markdown(found))
    print(f"\n{markdown(found)}\nwrote {args.out}/benchmark.json and .md")
    return found


if __name__ == "__main__":
    main()
