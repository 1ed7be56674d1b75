#!/usr/bin/env python
"""What training and prediction cost: npgp, GPJax, GPyTorch, and the same step written by hand in JAX, side by side.

Every library works in a process of its own and does the same: whitened SVGP with Matérn-3/2, a lengthscale per column,
Gaussian noise, dense q; all parameters and inducing inputs learned by Adam on minibatches. They start from the same
parameters, where their ELBOs are compared. Processes take turns, in random order; each peer is measured at several
settings of its threads, and stands in the tables with the best. In the same turns matrix products of the same size are
timed: their rate gives the least time that a step's products would take (``scripts/benchmarks/bench/flops.py``).

    NPGP_DATA=... python scripts/benchmarks/benchmark.py --out scripts/benchmarks/results    15 minutes, two idle cores
    python scripts/benchmarks/benchmark.py --quick                          a minute or two: does everything run?

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

BENCH = Path(__file__).resolve().parent / "bench"
sys.path[:0] = [str(BENCH.parents[1]), str(BENCH)]
import flops
import report
from problems import synthetic
from processes import Failed, Missing, Process

from common import Arguments, command, interleaved_steps, whole, write_json

ROWS, NEW_ROWS, COLUMNS, BATCH_SIZE = 10_000, 10_000, 8, 1024
LIBRARIES = ("npgp", "bare", "gpytorch", "gpjax")
#: Programs that are compared, with the library whose process runs each.
PROGRAMS = {"npgp": "npgp", "bare": "bare", "plain": "bare", "gpytorch": "gpytorch", "gpjax": "gpjax"}
#: ELBOs at the same parameters may differ relatively by this.
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
#: The recipe on kin40k, where both libraries start from the same points and hyperparameters.
KIN40K = dict(inducing=512, batch_size=1024, epochs=30, lengthscale=0.7, variance=1.0, noise=0.1)
#: npgp's own: natural gradients for q, and Adam with a learning rate that decays along a cosine for the rest.
RECIPE = dict(epochs=6, conditional="tight", natural=0.1, learning_rate=0.05)
QUICK = dict(sizes=[16, 32], repetitions=2, rows=300, new_rows=200, batch_size=64, seconds=0.01)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    add("--sizes", type=whole, nargs="+", default=[256, 512, 1024], help="M, inducing points")
    add("--dtypes", nargs="+", choices=["float32", "float64"], default=["float32", "float64"])
    add("--new-rows", type=whole, default=NEW_ROWS, help="rows of a prediction")
    add("--seconds", type=float, default=0.4, help="about this long per turn; at least two steps")
    add("--python", nargs="+", default=[], metavar="LIBRARY=PATH", help="interpreters of single peers")
    rows, out = dict(default=ROWS, help="of the step times"), dict(help="folder of benchmark.json, .md and .png (out)")
    parser.shared("quick", batch_size=BATCH_SIZE, rows=rows, repetitions=9, out=out)
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


def at_once() -> int:
    """How many workers may compile at the same time: each is to have three cores."""
    return max(1, cores() // 3)


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
    n = cores()
    if library == "gpytorch" and n > 1:
        passive = {"OMP_WAIT_POLICY": "PASSIVE"}
        return {
            "1 thread": threads(1),
            f"{n} threads": threads(n),
            f"{n} threads that wait asleep": threads(n) | passive,
        }
    if library == "gpjax" and n > 1:
        return {"1 LAPACK thread": threads(1, library), f"{n} LAPACK threads": threads(n, library)}
    return {"1 LAPACK thread" if library != "gpytorch" else "1 thread": threads(1, library)}


class Bench:
    """
    The workers, and what they found.

    :param args: from :func:`parse`.
    :param folder: for files that workers read.
    :param settings: the environments of a library's workers, by name.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, settings: Callable[[str], dict] = settings):
        self.args, self.folder, self.settings = args, folder, settings
        self.stack = ExitStack()
        self.workers: dict[tuple[str, str], Process] = {}
        self.missing: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}

    def start(self, library: str, setting: str | None = None) -> Process | None:
        """A new worker, in the first setting if none is named; none where the library is not there."""
        found = self.settings(library)
        environment = found[next(iter(found)) if setting is None else setting]
        try:
            process = Process(library, self.args.interpreters[library], environment)
        except Missing as missing:
            self.missing[library] = f"not installed ({missing}): pip install npgp[bench]"
            return None
        except (Failed, OSError) as failed:
            self.missing[library] = f"does not start: {failed}"
            return None
        self.versions[library] = process.versions
        return process

    def all(self) -> dict[tuple[str, str], Process]:
        """The long-lived workers, by library and setting."""
        if not self.workers:
            for library in self.args.libraries:
                for setting in self.settings(library):
                    process = None if library in self.missing else self.start(library, setting)
                    if process is None:
                        if setting == next(iter(self.settings(library))):
                            print(f"{library}: {self.missing[library]}", flush=True)
                        continue
                    self.workers[library, setting] = self.stack.enter_context(process)
        return self.workers

    def one(self, library: str) -> Process | None:
        """The first long-lived worker of a library."""
        return next((process for (name, _), process in self.all().items() if name == library), None)

    def problem(self, inducing: int, batch_size: int | None = None) -> str:
        """File of the problem with so many inducing points, and the arguments' batch size if no other."""
        args, batch_size = self.args, batch_size or self.args.batch_size
        path = self.folder / f"problem{inducing}-{batch_size}.npz"
        if not path.exists():
            synthetic(args.rows, args.new_rows, COLUMNS, inducing, batch_size).save(path)
        return str(path)


# ---------------------------------------------------------------------------------------------------------------
# Parts


def steps(bench: Bench) -> list[dict[str, Any]]:
    """Training steps and predictions of all libraries, with matrix products of the same size."""
    sizes = [(size, dtype) for dtype in bench.args.dtypes for size in bench.args.sizes]
    return [row for size, dtype in sizes for row in steps_of(bench, size, dtype)]


def steps_of(bench: Bench, size: int, dtype: str, predictions: bool = True) -> list[dict[str, Any]]:
    """As :func:`steps`, for one number of inducing points and one dtype."""
    args, file = bench.args, bench.problem(size)
    programs = {
        (program, setting): process
        for (library, setting), process in bench.all().items()
        for program in PROGRAMS
        if PROGRAMS[program] == library
    }
    rows, elbos = {}, {}

    def set_up(process: Process) -> None:
        for program, setting in [key for key, of in programs.items() if of is process]:
            kind = "plain" if program == "plain" else "svgp"
            row = {"program": program, "setting": setting, "inducing": size, "dtype": dtype}
            try:
                if program not in elbos:
                    elbos[program] = process.ask("elbo", kind=kind, dtype=dtype, file=file)
                row |= process.ask("setup", name=program, kind=kind, dtype=dtype, file=file)
                rows[program, setting] = row | {"elbo": elbos[program]}
            except Failed as failed:
                print(f"M = {size}, {dtype}, {program} FAILED: {failed}", flush=True)

    with ThreadPoolExecutor(at_once()) as threads:
        list(threads.map(set_up, dict.fromkeys(programs.values())))
    programs = {key: process for key, process in programs.items() if key in rows}
    check_elbos(elbos, size, dtype)
    advance: dict[Any, Callable[[int], float]] = {
        key: lambda count, key=key: programs[key].ask("steps", name=key[0], count=count) for key in programs
    }
    products = bench.one("bare")
    if products is not None:
        shape = dict(size=size, columns=args.batch_size, dtype=dtype)
        products.ask("setup", name="products", kind="matmul", **shape)
        advance["products", ""] = lambda count: products.ask("steps", name="products", count=count)
        rows["products", ""] = {"program": "products", "setting": "", "inducing": size, "dtype": dtype}
    for key, seconds in interleaved_steps(advance, args.repetitions, args.seconds).items():
        rows[key]["seconds"] = seconds.tolist()
    for key, process in programs.items():
        rows[key]["device_bytes"] = process.ask("device_memory")  # the most so far, of this and what came before
    for _ in range(3 if predictions else 0):
        for key, process in programs.items():
            rows[key].setdefault("prediction_seconds", []).extend(process.ask("predict", name=key[0], repetitions=2))
    for process in bench.all().values():
        process.ask("drop")
    print(f"M = {size}, {dtype}: " + report.brief(list(rows.values())), flush=True)
    return list(rows.values())


def check_elbos(elbos: dict[str, float], size: int, dtype: str) -> None:
    """Say loudly where programs do not compute the same."""
    values = list(elbos.values())
    if len(values) > 1 and max(values) - min(values) > TOLERANCE[dtype] * abs(values[0]):
        found = ", ".join(f"{program} {value!r}" for program, value in elbos.items())
        print(f"!!! ELBOs DIFFER at the same parameters, M = {size}, {dtype}: {found}", flush=True)


def first_step(bench: Bench) -> list[dict[str, Any]]:
    """A process that has just begun: the time to its first step, compilation included, and its peak memory."""
    args, found = bench.args, []
    size = args.sizes[min(1, len(args.sizes) - 1)]
    for program in (p for p in PROGRAMS if PROGRAMS[p] in args.libraries):
        process = None if PROGRAMS[program] in bench.missing else bench.start(PROGRAMS[program])
        if process is None:
            continue
        with process:
            row: dict[str, Any] = {"program": program, "inducing": size, "dtype": args.dtypes[0]}
            row["import_seconds"], row["imported_bytes"] = process.import_seconds, process.ask("peak_memory")
            kind = "plain" if program == "plain" else "svgp"
            row |= process.ask("setup", name="a", kind=kind, dtype=args.dtypes[0], file=bench.problem(size))
            process.ask("steps", name="a", count=10)
            row |= {"peak_bytes": process.ask("peak_memory"), "device_bytes": process.ask("device_memory")}
            found.append(row)
    return found


def example(bench: Bench) -> list[dict[str, Any]]:
    """README's first example, and GPJax's like of it: a process from its start to its picture and its end, in turns."""
    args, found = bench.args, []
    programs = {"npgp": readme_example(), "gpjax": (BENCH / "gpjax_example.py").read_text()}
    present = [name for name in programs if name in args.libraries and name not in bench.missing]
    environment = os.environ | threads(1) | {"MPLBACKEND": "Agg"}
    for name in list(present):
        (bench.folder / f"{name}_example.py").write_text(programs[name] + "\nprint('drawn', flush=True)\n")
        check = [args.interpreters[name], "-c", f"import matplotlib, {name}"]
        if subprocess.run(check, env=environment, stderr=subprocess.DEVNULL).returncode:
            bench.missing.setdefault(name, "not installed, or no matplotlib: pip install npgp[bench]")
            present.remove(name)
    for turn in range(1 if args.quick else 3):
        for name in present:
            cache = bench.folder / f"cache-{name}-{turn}"
            for start in ("cold", "warm"):  # the second finds what the first has compiled
                # All programs are kept: on a fast machine none takes the second that JAX's default asks for.
                kept = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
                line = [args.interpreters[name], f"{name}_example.py"]
                row = time_of_example(line, bench.folder, environment | kept)
                found.append({"program": name, "start": start} | row)
    return found


def time_of_example(line: list[str], folder: Path, environment: dict[str, str]) -> dict[str, float]:
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
    return {"seconds": drawn[0], "end_seconds": end}


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


def alone(bench: Bench) -> list[dict[str, Any]]:
    """What else npgp trains, in one process and in turns; float32."""
    process, table = bench.one("npgp"), kinds(bench)
    if process is None:
        return []
    for name, options in table.items():
        process.ask("setup", name=name, dtype="float32", **options)
    turns = {name: lambda count, name=name: process.ask("steps", name=name, count=count) for name in table}
    seconds = interleaved_steps(turns, bench.args.repetitions, bench.args.seconds)
    process.ask("drop")
    return [
        {"program": name, "kind": table[name]["kind"], "seconds": values.tolist()} for name, values in seconds.items()
    ]


def kinds(bench: Bench) -> dict[str, dict[str, Any]]:
    """What :func:`alone` times: names, and the arguments of ``setup``."""
    args = bench.args
    middle, largest = args.sizes[min(1, len(args.sizes) - 1)], args.sizes[-1]
    return {
        f"SVGP, prior, M = {middle}": dict(kind="svgp", file=bench.problem(middle)),
        f"SVGP, tight, M = {middle}": dict(kind="tight", file=bench.problem(middle)),
        f"SVGP, grouped by 64, M = {middle}": dict(kind="grouped", file=bench.problem(middle)),
        f"SVGP, prior, M = {largest}": dict(kind="svgp", file=bench.problem(largest)),
        f"SOLVE-GP, prior, M = {largest // 2} + {largest // 2}": dict(kind="SOLVE-GP", file=bench.problem(largest)),
        f"collapsed bound and gradient, N = {args.rows}, M = {middle}": dict(
            kind="collapsed", file=bench.problem(middle)
        ),
        "GPLVM, N = 1000, 12 columns, Q = 10, M = 25, B = 100": dict(
            kind="GPLVM", rows=1000, columns=12, latent_dim=10, inducing=25, batch_size=100
        ),
        f"VNNGP, N = {args.rows}, 15 neighbors, B = {min(args.batch_size, 100)}": dict(
            kind="VNNGP", rows=args.rows, neighbors=15, batch_size=min(args.batch_size, 100)
        ),
    }


def kin40k(bench: Bench, found: dict[str, Any] | None = None) -> dict[str, Any]:
    """
    Time to the test NLPD that GPyTorch's usual recipe ends with, one library after the other.

    :param found: where what is found is put at once, which is what is returned.
    """
    from npgp import datasets

    args, options, found = bench.args, dict(KIN40K), {} if found is None else found
    inducing = options.pop("inducing")
    try:
        data = datasets.uci("kin40k", 0)
    except Exception as error:
        return {"missing": f"kin40k is not there: {error}"}
    few = slice(600 if args.quick else None)
    if args.quick:
        inducing, options["batch_size"], options["epochs"] = 16, 64, 2
    X, y, X_test, y_test = (
        np.asarray(a, np.float32)[few] for a in (data.X_train, data.y_train, data.X_test, data.y_test)
    )
    Z = X[np.random.default_rng(0).choice(len(X), inducing, replace=False)]
    options["lengthscale"] *= float(np.sqrt(X.shape[1]))
    file = str(bench.folder / "kin40k.npz")
    np.savez(file, X=X, y=y, X_test=X_test, y_test=y_test, Z=Z)
    found |= {"rows": len(X), "inducing": inducing, **options, "recipe": RECIPE}
    peers = {setting: process for (library, setting), process in bench.all().items() if library == "gpytorch"}
    if len(peers) > 1:
        # The threads that took its steps faster on this machine, by a few of them.
        trials = {name: peer.ask("train", file=file, **{**options, "epochs": 1}) for name, peer in peers.items()}
        found["trials"] = {name: trial["curve"][-1][0] for name, trial in trials.items()}
        peers = dict(sorted(peers.items(), key=lambda peer: found["trials"][peer[0]]))
    if peers:
        setting, peer = next(iter(peers.items()))
        found["gpytorch"] = {"setting": setting} | peer.ask("train", file=file, **options)
    process = bench.one("npgp")
    if process is not None:
        recipe = {**options, **RECIPE} | ({"epochs": 2} if args.quick else {})
        found["npgp"] = process.ask("train", file=file, **recipe)
    return found


#: What can be measured, in this order. (Rows in a file, N = 10⁷ against 10⁴: ``scripts/benchmarks/memmap_cost.py``.)
PARTS: dict[str, Callable[[Bench], Any]] = {
    "steps": steps,
    "first_step": first_step,
    "example": example,
    "npgp": alone,
    "kin40k": kin40k,
}


# ---------------------------------------------------------------------------------------------------------------
# The whole


def machine() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text())
        name = found[1] if found else name
    described: dict[str, Any] = {"cpu": name, "cores": cores(), "python": platform.python_version()}
    if hasattr(os, "getloadavg"):
        described["load_before"] = round(os.getloadavg()[0], 2)
    if os.environ.get("XLA_FLAGS"):
        described["XLA_FLAGS"] = os.environ["XLA_FLAGS"]
    return described


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    names = ("sizes", "dtypes", "batch_size", "rows", "new_rows", "repetitions")
    found: dict[str, Any] = {"command": args.command, "machine": machine()}
    found |= {name: getattr(args, name) for name in names} | {"columns": COLUMNS}
    found["flops"] = {str(M): flops.svgp_step(M, args.batch_size) for M in args.sizes}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        with bench.stack:  # ends the workers
            for part in args.parts:
                found[part] = PARTS[part](bench)
                found |= {"versions": bench.versions, "missing": bench.missing}
                write_json(args.out / "benchmark.json", found, say=False)
    text = report.markdown(found)
    (args.out / "benchmark.md").write_text(text)
    if found.get("steps"):
        report.draw(found, args.out / "benchmark.png")
    print(f"\n{text}\nwrote {args.out}/benchmark.json, .md and .png")
    return found


if __name__ == "__main__":
    main()
