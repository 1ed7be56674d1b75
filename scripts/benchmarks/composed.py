#!/usr/bin/env python
"""Deep GPs, and mixtures of functions with a kernel each: what a step costs beside GPyTorch's of the same sizes.

    deep        a step of a deep GP of two layers: an inner layer with a linear mean function, RBF kernels with a
                lengthscale for each input, dense q, one or several draws of what is between the layers for each row
    mixtures    a step of the linear model of coregionalization: outputs that mix Q functions, each with lengthscales
                and inducing inputs of its own (GPyTorch: LMCVariationalStrategy with batched kernels)
    fits        such mixtures after the same steps of Adam from the same parameters: log density of new rows
    functions   what Q functions with a kernel each cost npgp beside one

Each library works in a process of its own, with one thread; all start from the same parameters, at which their ELBOs
are compared, and take turns in random order. For one core run it under taskset:

    taskset -c 1 python scripts/benchmarks/composed.py --python gpytorch=.venv-gpytorch/bin/python
    python scripts/benchmarks/composed.py --quick          does everything run? Without GPyTorch: npgp's part alone
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "bench")]
import benchmark
import composed_problems
import numpy as np
from report import cell, markdown_table, ratio

from common import Arguments, command, interleaved_steps, quartiles, whole, write_json

#: Programs: the library whose process runs each, and its options.
DEEP: dict[str, tuple[str, dict[str, Any]]] = {
    "npgp": ("npgp", {}),
    "npgp, tight": ("npgp", {"conditional": "tight"}),
    "GPyTorch": ("gpytorch", {}),
    "GPyTorch, a kernel for each function": ("gpytorch", {"own": True}),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "npgp": ("npgp", {}),
    "npgp, tight": ("npgp", {"conditional": "tight"}),
    "GPyTorch": ("gpytorch", {}),
}
#: The same when trained, and with natural gradients for q(ε), which only npgp has for such models.
TRAINED = MIXTURES | {"npgp, tight, natural": ("npgp", {"conditional": "tight", "natural": 0.1})}
#: Width of the inner layer, M of both layers, rows of a step, draws: of 8 inputs.
DEEP_CASES = (
    *((8, M, 256, draws) for M in (50, 100, 200) for draws in (1, 5)),
    *((8, 100, 500, draws) for draws in (1, 5)),
    *((2, 100, 256, draws) for draws in (1, 5)),
)
#: Functions Q, M of each, rows of a step: of 2 inputs and 8 outputs.
MIXTURE_CASES = ((2, 50, 256), (2, 100, 256), (4, 50, 256), (4, 100, 256), (4, 100, 500), (8, 100, 256), (4, 200, 256))
#: The same of what is trained, and of the functions whose number is varied.
FIT, FUNCTIONS, FUNCTIONS_AT = (4, 100, 256), (1, 2, 4, 8), ((50, 256), (100, 256), (200, 256))
DEEP_COLUMNS, COLUMNS, OUTPUTS = 8, 2, 8
LEARNING_RATES = (0.01, 0.03)
#: What a step may take of GPyTorch's.
LIMITS = {"deep": 0.6, "mixtures": 0.5}
QUICK = dict(repetitions=2, rows=60, steps=4, seconds=0.001, seeds=1, learning_rates=[0.01])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--python", metavar="gpytorch=PATH", help="interpreter of GPyTorch, if it is not this one")
    add("--seconds", type=float, default=0.4, help="about this long per turn; at least two steps")
    add("--seeds", type=whole, default=3, help="data sets of the fits")
    add("--learning-rates", type=float, nargs="+", default=list(LEARNING_RATES), help="of the fits")
    add("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    parser.shared("quick", "json", repetitions=11, rows=2000, steps=1500)
    args = parser.read(argv, QUICK)
    args.interpreters = {"npgp": sys.executable, "gpytorch": sys.executable}
    if args.python is not None:
        library, _, path = args.python.partition("=")
        if library != "gpytorch" or not path:
            parser.error(f"--python {args.python}: expected gpytorch=PATH.")
        args.interpreters["gpytorch"] = path
    args.libraries, args.command = list(args.interpreters), command(__file__, argv)
    return args


def cases(args: argparse.Namespace, all_of_them: tuple[tuple[int, ...], ...], small: tuple[int, ...]) -> Any:
    return (small,) if args.quick else all_of_them


# ---------------------------------------------------------------------------------------------------------------
# Parts


def deep(bench: benchmark.Bench) -> list[dict[str, Any]]:
    """Steps of deep GPs."""
    found = []
    for width, inducing, rows, draws in cases(bench.args, DEEP_CASES, (2, 6, 20, 2)):
        problem = composed_problems.deep(bench.args.rows, DEEP_COLUMNS, width, inducing)
        sizes = {"width": width, "inducing": inducing, "batch_size": rows, "draws": draws}
        found.append(timed(bench, "deep", DEEP, sizes, problem, batch_size=rows, draws=draws))
    return found


def mixtures(bench: benchmark.Bench) -> list[dict[str, Any]]:
    """Steps of mixtures."""
    found = []
    for functions, inducing, rows in cases(bench.args, MIXTURE_CASES, (2, 6, 20)):
        sizes = {"functions": functions, "inducing": inducing, "batch_size": rows}
        found.append(timed(bench, "mixture", MIXTURES, sizes, mixed(bench, functions, inducing), batch_size=rows))
    return found


def mixed(bench: benchmark.Bench, functions: int, inducing: int, seed: int = 0) -> dict[str, np.ndarray]:
    rows = bench.args.rows
    return composed_problems.mixture(rows, rows // 2, COLUMNS, OUTPUTS, functions, inducing, seed)


def timed(
    bench: benchmark.Bench,
    kind: str,
    programs: Mapping[str, tuple[str, dict[str, Any]]],
    sizes: dict[str, int],
    problem: dict[str, np.ndarray],
    **common: Any,
) -> dict[str, Any]:
    """One case: its sizes, ELBOs per row at the start, and seconds of a step in each round."""
    file = composed_problems.save(bench.folder / "problem.npz", problem)
    found: dict[str, Any] = {**sizes, "elbo": {}, "seconds": {}}
    advance: dict[str, Callable[[int], float]] = {}
    for name, (library, options) in programs.items():
        process = bench.one(library)
        if process is None:
            continue
        asked = {"kind": kind, "dtype": "float32", "arrays": file, **common, **options}
        found["elbo"][name] = process.ask("elbo", **asked) / bench.args.rows
        process.ask("setup", name=name, **asked)
        advance[name] = lambda count, name=name, process=process: process.ask("steps", name=name, count=count)
    seconds = interleaved_steps(advance, bench.args.repetitions, bench.args.seconds)
    found["seconds"] = {name: values.tolist() for name, values in seconds.items()}
    for process in bench.all().values():
        process.ask("drop")
    times = ", ".join(f"{name} {1e3 * np.median(values):.2f} ms" for name, values in seconds.items())
    elbos = ", ".join(f"{value:.4f}" for value in found["elbo"].values())
    print(f"{kind}, {', '.join(f'{k} {v}' for k, v in sizes.items())}: {times}; ELBOs per row {elbos}", flush=True)
    return found


def fits(bench: benchmark.Bench) -> list[dict[str, Any]]:
    """Mixtures trained, one program after the other; log densities of new rows."""
    (functions, inducing, rows), args, found = cases(bench.args, (FIT,), (2, 6, 20))[0], bench.args, []
    for seed in range(args.seeds):
        file = composed_problems.save(bench.folder / "fit.npz", mixed(bench, functions, inducing, seed))
        for rate in args.learning_rates:
            row: dict[str, Any] = {"seed": seed, "learning_rate": rate, "log_density": {}, "seconds": {}}
            for name, (library, options) in TRAINED.items():
                process = bench.one(library)
                if process is None:
                    continue
                asked = {"kind": "mixture", "dtype": "float32", "arrays": file, "batch_size": rows, **options}
                process.ask("setup", name=name, learning_rate=rate, **asked)
                row["seconds"][name] = process.ask("steps", name=name, count=args.steps - 1)  # the first is taken
                row["log_density"][name] = process.ask("figures", name=name)["log_density"]
                process.ask("drop")
            found.append(row)
            print(row, flush=True)
    return found


def functions(bench: benchmark.Bench) -> list[dict[str, Any]]:
    """Steps of npgp's mixtures of more and more functions, in turns."""
    found, process = [], bench.one("npgp")
    assert process is not None
    for inducing, rows in cases(bench.args, FUNCTIONS_AT, (6, 20)):
        advance: dict[int, Callable[[int], float]] = {}
        for count in FUNCTIONS[:2] if bench.args.quick else FUNCTIONS:
            file = composed_problems.save(bench.folder / "functions.npz", mixed(bench, count, inducing))
            asked = {"kind": "mixture", "dtype": "float32", "arrays": file, "batch_size": rows}
            process.ask("setup", name=str(count), **asked)
            advance[count] = lambda steps, name=str(count): process.ask("steps", name=name, count=steps)
        seconds = interleaved_steps(advance, bench.args.repetitions, bench.args.seconds)
        process.ask("drop")
        times = {str(count): values.tolist() for count, values in seconds.items()}
        found.append({"inducing": inducing, "batch_size": rows, "seconds": times})
        print(f"functions, M = {inducing}: { {q: 1e3 * np.median(s) for q, s in seconds.items()} }", flush=True)
    return found


PARTS: dict[str, Callable[[benchmark.Bench], list[dict[str, Any]]]] = {
    "deep": deep,
    "mixtures": mixtures,
    "fits": fits,
    "functions": functions,
}

# ---------------------------------------------------------------------------------------------------------------
# What people look at


def markdown(found: dict[str, Any]) -> str:
    machine, versions = found["machine"], {}
    for of in found["versions"].values():
        versions |= {name: version for name, version in of.items() if name not in ("threads", "backend", "device")}
    parts = [
        f"`{found['command']}`",
        f"One thread; {machine['cpu']}; Python {machine['python']}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + f"; float32. Load average before the run: {machine.get('load_before', '?')}. Medians, and quartiles in "
        "brackets, of rounds in which all took turns; ratios are of the same rounds.",
    ]
    parts += [f"GPyTorch is not compared here: {why}." for why in found["missing"].values()]
    if found.get("deep"):
        parts += [
            f"## Deep GPs of two layers\n\nMilliseconds per step; {DEEP_COLUMNS} inputs. The ratio is npgp's time over "
            f"the faster of GPyTorch's two; asked for: {LIMITS['deep']} at most.",
            steps_table(found["deep"], {"width": "width", "inducing": "M", "batch_size": "rows", "draws": "draws"}),
            apart(found["deep"]),
        ]
    if found.get("mixtures"):
        parts += [
            f"## Mixtures of functions with a kernel each\n\nMilliseconds per step; {OUTPUTS} outputs, {COLUMNS} "
            f"inputs. Asked for: {LIMITS['mixtures']} at most.",
            steps_table(found["mixtures"], {"functions": "Q", "inducing": "M", "batch_size": "rows"}),
            apart(found["mixtures"]),
        ]
    if found.get("fits"):
        parts.append(fits_table(found))
    if found.get("functions"):
        parts.append(functions_table(found["functions"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def steps_table(rows: list[dict[str, Any]], sizes: dict[str, str]) -> str:
    programs, lines = list(rows[0]["seconds"]), []
    peers = [name for name in programs if not name.startswith("npgp")]
    for row in rows:
        cells = [str(row[key]) for key in sizes] + [cell(row["seconds"][name]) for name in programs]
        if peers:
            cells.append(ratio(row["seconds"]["npgp"], faster(row["seconds"], peers)))
        lines.append(cells)
    return markdown_table([*sizes.values(), *programs, *(["npgp / GPyTorch"] if peers else [])], lines)


def faster(seconds: dict[str, list[float]], names: list[str]) -> list[float]:
    """Those of the program with the least median."""
    return min((seconds[name] for name in names), key=lambda values: float(np.median(values)))


def apart(rows: list[dict[str, Any]]) -> str:
    """How far ELBOs of the same bound are apart at the start."""
    same = [[value for name, value in row["elbo"].items() if "tight" not in name] for row in rows]
    if min(map(len, same)) < 2:
        return ""
    most = max(max(values) - min(values) for values in same)
    size = max(abs(value) for values in same for value in values)
    return (
        f"At the start ELBOs per row of the same bound, of up to {size:.1f} nats, are within {most:.4f} of each other."
    )


def fits_table(found: dict[str, Any]) -> str:
    rows, (functions, inducing, batch_size) = found["fits"], found["fit"]
    programs = list(rows[0]["log_density"])
    lines = []
    for row in rows:
        densities = [f"{row['log_density'][name]:.4f}" for name in programs]
        times = [f"{1e3 * row['seconds'][name]:.2f}" for name in programs]
        lines.append([str(row["learning_rate"]), str(row["seed"]), *densities, *times])
    head = ["learning rate", "seed", *programs, *(f"ms, {name}" for name in programs)]
    return (
        f"## Mixtures, trained\n\nLog density of an observation in {found['rows'] // 2} new rows, in nats, after "
        f"{found['steps']} steps of {batch_size} of {found['rows']} rows; Q = {functions}, M = {inducing}. The last "
        "columns are milliseconds per step of these trainings, one after the other.\n\n" + markdown_table(head, lines)
    )


def functions_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        one = np.asarray(row["seconds"]["1"])
        for count, seconds in row["seconds"].items():
            times = np.asarray(seconds) / one
            shown = [cell(seconds), cell(times, 1.0), f"{quartiles(times / int(count))[1]:.2f}"]
            lines.append([str(row["inducing"]), str(row["batch_size"]), count, *shown])
    return (
        "## What a function more costs npgp\n\nA step of a mixture of Q functions with a kernel each; the same "
        f"{OUTPUTS} outputs.\n\n" + markdown_table(["M", "rows", "Q", "ms", "times one function", "that over Q"], lines)
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    found: dict[str, Any] = {"command": args.command, "machine": benchmark.machine()}
    found |= {name: getattr(args, name) for name in ("rows", "steps", "repetitions")}
    found["fit"] = list(cases(args, (FIT,), (2, 6, 20))[0])
    with tempfile.TemporaryDirectory() as folder:
        bench = benchmark.Bench(args, Path(folder), lambda library: {"1 thread": benchmark.threads(1)})
        with bench.stack:  # ends the workers
            bench.all()
            for part in args.parts:
                found[part] = PARTS[part](bench)
                found |= {"versions": bench.versions, "missing": bench.missing}
                write_json(args.json, found, say=False)
    text = markdown(found)
    print(f"\n{text}")
    if args.markdown is not None:
        args.markdown.write_text(text)
    return found


if __name__ == "__main__":
    main()
