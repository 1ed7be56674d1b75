"""What people look at: tables in Markdown, and a figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import flops
import numpy as np

from common import quartiles, table

#: Names of the compared programs.
NAMES = {
    "npgp": "npgp",
    "bare": "JAX by hand",
    "plain": "JAX by hand, plain",
    "gpytorch": "GPyTorch",
    "gpjax": "GPJax",
}


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return table(head, rows, markdown=True)


def cell(values: Iterable[float], scale: float = 1e3) -> str:
    low, middle, high = quartiles(values, scale)
    digits = 2 if middle < 10 else 1 if middle < 100 else 0
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def ratio(a: Sequence[float], b: Sequence[float]) -> str:
    """Of times of the same rounds."""
    return cell(np.asarray(a) / np.asarray(b), 1.0)


def best(rows: list[dict[str, Any]], inducing: int, dtype: str, key: str = "seconds") -> dict[str, dict[str, Any]]:
    """Each program's row at the best setting of its threads."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if (row["inducing"], row["dtype"]) == (inducing, dtype) and key in row:
            kept = found.get(row["program"])
            if kept is None or np.median(row[key]) < np.median(kept[key]):
                found[row["program"]] = row
    return found


def problems(rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((row["inducing"], row["dtype"]) for row in rows))


def brief(rows: list[dict[str, Any]]) -> str:
    """One line about one problem."""
    cells = [f"{row['program']} {row['setting']} {1e3 * np.median(row['seconds']):.1f} ms" for row in rows]
    return ", ".join(cells)


def limit(found: dict[str, Any], chosen: dict[str, dict[str, Any]], inducing: int) -> np.ndarray | None:
    """Seconds that a step's products would take at the rate measured in the same rounds."""
    if "products" not in chosen:
        return None
    share = flops.svgp_step(inducing, found["batch_size"]) / flops.product(inducing, found["batch_size"])
    return share * np.asarray(chosen["products"]["seconds"])


def markdown(found: dict[str, Any]) -> str:
    sections = [_head(found)]
    for part, write in {
        "steps": _steps,
        "first_step": _first_step,
        "example": _example,
        "npgp": _alone,
        "kin40k": kin40k,
    }.items():
        if found.get(part):
            sections.append(write(found))
    return "\n\n".join(sections) + "\n"


def where(found: dict[str, Any]) -> str:
    """The processor, and the accelerator if there is one."""
    machine = found["machine"]
    name = f"{machine['cores']} cores of {machine['cpu']}"
    devices = {of.get("device") for of in found.get("versions", {}).values()} - {None, "cpu", "cuda"}
    return ", ".join([*sorted(devices), name])


def _head(found: dict[str, Any]) -> str:
    machine = found["machine"]
    versions: dict[str, str] = {}
    for of in found.get("versions", {}).values():
        versions |= {name: version for name, version in of.items() if name not in ("threads", "backend", "device")}
    lines = [
        "# Benchmark",
        f"`{found['command']}`",
        f"{where(found)}; Python {machine['python']}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + f". Load average before the run: {machine.get('load_before', '?')}."
        + (f" XLA_FLAGS: `{machine['XLA_FLAGS']}`." if "XLA_FLAGS" in machine else ""),
        "Milliseconds: medians, and quartiles in brackets, of rounds in which programs took turns; ratios are of the "
        "same rounds.",
    ]
    lines += [f"{NAMES[library]}: {why}" for library, why in found.get("missing", {}).items()]
    return "\n\n".join(lines)


def _steps(found: dict[str, Any]) -> str:
    rows, programs = found["steps"], [p for p in NAMES if any(row["program"] == p for row in found["steps"])]
    step_lines, ratio_lines, prediction_lines, elbo_lines, rate_lines = [], [], [], [], []
    for inducing, dtype in problems(rows):
        chosen = best(rows, inducing, dtype)
        head = [f"{inducing}", dtype]
        at_least = limit(found, chosen, inducing)
        least = "" if at_least is None else cell(at_least)
        step_lines.append(head + [cell(chosen[p]["seconds"]) if p in chosen else "" for p in programs] + [least])
        own = chosen.get("npgp")
        if own is not None:
            against = [ratio(own["seconds"], chosen[p]["seconds"]) if p in chosen else "" for p in programs[1:]]
            ratio_lines.append(head + against + ["" if at_least is None else ratio(own["seconds"], at_least)])
        if at_least is not None:
            rate = flops.product(inducing, found["batch_size"]) / np.asarray(chosen["products"]["seconds"])
            shares = [
                f"{100 * np.median(at_least / np.asarray(chosen[p]['seconds'])):.0f} %" if p in chosen else ""
                for p in programs
            ]
            rate_lines.append([*head, cell(rate, 1e-9), *shares])
        predicted = best(rows, inducing, dtype, "prediction_seconds")
        prediction_lines.append(
            head + [cell(predicted[p]["prediction_seconds"]) if p in predicted else "" for p in programs]
        )
        digits = 3 if dtype == "float32" else 8
        elbos = [chosen[p]["elbo"] for p in programs if p in chosen]
        spread = (max(elbos) - min(elbos)) / abs(elbos[0]) if elbos else 0.0
        elbo_lines.append(
            head + [f"{chosen[p]['elbo']:.{digits}f}" if p in chosen else "" for p in programs] + [f"{spread:.0e}"]
        )
    names = [NAMES[p] for p in programs]
    used = sorted(
        {f"{NAMES[row['program']]}: {row['setting']}" for i, d in problems(rows) for row in best(rows, i, d).values()
         if row["program"] != "products"}
    )  # fmt: skip
    batch, columns = found["batch_size"], found["columns"]
    text = [
        f"## SVGP training step\n\nM inducing points, {batch} rows of {columns} columns per step, Matérn-3/2. "
        f'"{NAMES["bare"]}" is for this model alone, its gradients written out; "plain" by JAX\'s own gradients of '
        "the Cholesky factor and of the triangular solve. The limit is the time of the step's matrix products alone, "
        "by the rate of products in the same rounds (`scripts/benchmarks/bench/flops.py`). Best setting of threads: "
        + "; ".join(used)
        + ".",
        markdown_table(["M", "", *names, "limit"], step_lines),
        "npgp's step over the others':",
        markdown_table(["M", "", *names[1:], "limit"], ratio_lines) if ratio_lines else "",
        f"Rate of products of (M, M) and (M, {batch}) matrices in Gflop/s, and the limit's share of each step:",
        markdown_table(["M", "", "Gflop/s", *names], rate_lines) if rate_lines else "",
        f"## Prediction\n\nMean and variance at {found['new_rows']} rows, from a posterior that is at hand.",
        markdown_table(["M", "", *names], prediction_lines),
        "## The same ELBO\n\nAt the same parameters, on the same rows. GPyTorch and GPJax also add the jitter of K_uu "
        "to the variance of f at rows, which is taken out here.",
        markdown_table(["M", "", *names, "relative spread"], elbo_lines),
    ]
    return "\n\n".join(t for t in text if t)


def _first_step(found: dict[str, Any]) -> str:
    rows = found["first_step"]
    lines = [
        [
            NAMES[row["program"]],
            f"{row['import_seconds']:.1f}",
            f"{row['first_step_seconds']:.1f}",
            f"{row['imported_bytes'] / 2**20:.0f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            *([f"{row['device_bytes'] / 2**20:.0f}"] if row["device_bytes"] else []),
        ]
        for row in rows
    ]
    head = ["", "import (s)", "first step (s)", "imported (MiB)", "peak (MiB)"]
    head += ["peak on the device (MiB)"] if any(row["device_bytes"] for row in rows) else []
    return (
        f"## From a cold start\n\nM = {rows[0]['inducing']}, {rows[0]['dtype']}; one process each, without a cache of "
        "compiled programs. The first step includes the model's construction and compilation; memory is the most "
        "resident at any time, after imports and after training.\n\n" + markdown_table(head, lines)
    )


def _example(found: dict[str, Any]) -> str:
    def seconds(name: str, start: str, until: str) -> list[float]:
        return [row[until] for row in found["example"] if (row["program"], row["start"]) == (name, start)]

    names = dict.fromkeys(row["program"] for row in found["example"])
    columns = [("cold", "seconds"), ("warm", "seconds"), ("cold", "end_seconds"), ("warm", "end_seconds")]
    lines = [[NAMES[name], *(cell(seconds(name, *column), 1.0) for column in columns)] for name in names]
    return (
        "## The first example\n\nREADME's first example, and GPJax's like of it: 120 rows, 20 inducing points, 400 "
        "steps, a prediction and its picture (npgp's also draws of new observations and of an effect). Seconds of a "
        "process to its picture, and to its end, without JAX's cache of programs (cold) and with it (warm).\n\n"
        + markdown_table(["", "cold", "warm", "cold, to the end", "warm, to the end"], lines)
    )


def _alone(found: dict[str, Any]) -> str:
    rows = found["npgp"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    base = {"tight": 0, "grouped": 0, "SOLVE-GP": -1}
    lines = []
    for row in rows:
        against = ""
        if row["kind"] in base:
            other = kinds["svgp"][base[row["kind"]]]
            against = f"{ratio(row['seconds'], other['seconds'])} of {other['program']}"
        lines.append([row["program"], cell(row["seconds"]), against])
    return (
        "## npgp alone\n\nA training step, or a bound with its gradient; float32, batches of "
        f"{found['batch_size']} rows where not said otherwise.\n\n" + markdown_table(["", "ms", "ratio"], lines)
    )


def reached(curve: list[list[float]], target: float) -> float | None:
    """Seconds after which a curve is first at the target or below."""
    return next((seconds for seconds, value in curve if value <= target), None)


def kin40k(found: dict[str, Any]) -> str:
    run = found["kin40k"]
    if "missing" in run:
        return f"## Time to a test NLPD on kin40k\n\n{run['missing']}"
    text = [
        f"## Time to a test NLPD on kin40k\n\n{run['rows']} training rows, M = {run['inducing']}, batches of "
        f"{run['batch_size']}, float32; NLPD of the test rows, standardized target. Both start at the same "
        "points and hyperparameters; evaluations are not timed. GPyTorch: Adam, learning rate 0.01, "
        f"{run['epochs']} epochs; npgp: {run['recipe']['epochs']} epochs, natural gradients for q (rate "
        f"{run['recipe']['natural']}) and Adam for the rest (learning rate {run['recipe']['learning_rate']}, cosine "
        f"decay), the bound {run['recipe']['conditional']!r}."
    ]
    other, own = run.get("gpytorch"), run.get("npgp")
    lines = []
    if other is not None:
        seconds, target = other["curve"][-1]
        name = ", ".join(filter(None, ["GPyTorch", other["setting"]]))
        lines.append([name, f"{seconds:.1f}", "", f"{target:.4f}", ""])
    if own is not None:
        seconds, last = own["curve"][-1]
        compiled = own["compile_seconds"]
        time = None if other is None else reached(own["curve"], other["curve"][-1][1])
        share = "" if time is None else f"{time / other['curve'][-1][0]:.2f}"
        lines.append(["npgp, to its end", f"{seconds:.1f}", f"{seconds - compiled:.1f}", f"{last:.4f}", ""])
        if other is not None:
            cells = ["not reached", ""] if time is None else [f"{time:.1f}", f"{time - compiled:.1f}"]
            lines.append(["npgp, to GPyTorch's last NLPD", *cells, f"{other['curve'][-1][1]:.4f}", share])
    text.append(markdown_table(["", "seconds", "without the first step", "NLPD", "of GPyTorch's time"], lines))
    return "\n\n".join(text)


def draw(found: dict[str, Any], path: Path) -> None:
    """Step time by M, a panel for each dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    from npgp.plots.figures import COLORS, MARKERS, subplots

    rows = found["steps"]
    programs = [p for p in NAMES if any(row["program"] == p for row in rows)]
    figure, axes = subplots(
        1, len(found["dtypes"]), figsize=(1.4 + 4.2 * len(found["dtypes"]), 4.9), squeeze=False, sharey=True
    )
    for ax, dtype in zip(axes[0], found["dtypes"], strict=True):
        sizes = [M for M, d in problems(rows) if d == dtype]
        for i, program in enumerate(programs):
            have = [(M, quartiles(chosen[program]["seconds"], 1e3)) for M in sizes
                    if program in (chosen := best(rows, M, dtype))]  # fmt: skip
            low, middle, high = np.array([q for _, q in have]).T
            errors = [middle - low, high - middle]
            style = dict(color=COLORS[i % len(COLORS)], lw=2.2 if program == "npgp" else 1.3, ms=5)
            style["marker"] = MARKERS[i % len(MARKERS)]
            ax.errorbar([M for M, _ in have], middle, errors, label=NAMES[program], capsize=2, **style)
        least = [(M, limit(found, best(rows, M, dtype), M)) for M in sizes]
        if all(seconds is not None for _, seconds in least):
            ax.plot(sizes, [1e3 * np.median(s) for _, s in least], "k:", lw=1.3, label="limit: matrix products alone")
        ax.set(xscale="log", yscale="log", title=dtype, xlabel="inducing points M")
        ax.set_xticks(sizes, [str(M) for M in sizes])
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.grid(alpha=0.3)
        ax.tick_params(labelleft=True)
    axes[0, 0].set_ylabel("milliseconds per training step")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=3
    )
    figure.suptitle(f"SVGP, {found['batch_size']} rows a step: {where(found)}", fontsize=11)
    figure.savefig(path, dpi=130)
