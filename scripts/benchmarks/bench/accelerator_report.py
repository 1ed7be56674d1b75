"""What ``scripts/benchmarks/gpu.py`` found, in Markdown, and which of its limits are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import report
from report import cell, markdown_table, ratio

#: npgp's speed in GPyTorch's at the inducing points of the limits, and its share of the rate of products in float32.
SPEED, SHARE, AT = 3.0, 0.5, 1024


def wrong(found: dict[str, Any]) -> list[str]:
    """What differs from the processor's by more than it may, or is no number."""
    return [
        f"{name}, {dtype}: the {what} differs by {difference:.1e}, not at most {most:.1e}"
        for name, by_dtype in found["conditionals"].items()
        for dtype, differences in by_dtype.items()
        for what, difference, most in zip(("bound", "gradient"), differences, found["tolerance"][dtype], strict=True)
        if not difference <= most
    ]


def is_wrong(found: dict[str, Any]) -> bool:
    """Whether something is not right, or nothing was compared that was to be."""
    compared = found.get("right", [])
    return any(case["wrong"] for case in compared) or (bool(found["cases"]) and not compared)


def limits(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What is to be reached, by how much it was, and the least."""
    chosen = report.best(found.get("steps", []), AT, "float32")
    at_least, kept = report.limit(found, chosen, AT), []
    if "npgp" in chosen and "gpytorch" in chosen:
        speed = np.median(np.asarray(chosen["gpytorch"]["seconds"]) / np.asarray(chosen["npgp"]["seconds"]))
        kept.append((f"SVGP at M = {AT}: npgp's speed in GPyTorch's", float(speed), SPEED))
    if "npgp" in chosen and at_least is not None:
        share = np.median(at_least / np.asarray(chosen["npgp"]["seconds"]))
        kept.append((f"SVGP at M = {AT}: share of the float32 rate of products", float(share), SHARE))
    return kept


def markdown(found: dict[str, Any]) -> str:
    sections = [_head(found)]
    for part, write in PARTS.items():
        if found.get(part):
            sections.append(write(found))
    return "\n\n".join(sections) + "\n"


def _head(found: dict[str, Any]) -> str:
    machine, versions = found["machine"], {}
    for of in found.get("versions", {}).values():
        versions |= {name: value for name, value in of.items() if name not in ("threads", "backend", "device")}
    devices = sorted({of["device"] for of in found.get("versions", {}).values() if "device" in of} - {"cuda"})
    written = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    lines = [
        "# On an accelerator" if found["on_gpu"] else "# Without an accelerator: does everything run?",
        f"`{found['command']}`",
        f"{', '.join(devices)}; {machine['cores']} cores of {machine['cpu']}; Python {machine['python']}, {written}. "
        f"{found['seconds']:.0f} seconds in all: "
        + ", ".join(f"{part} {seconds:.0f}" for part, seconds in found.get("part_seconds", {}).items())
        + ".",
    ]
    if found["on_gpu"]:
        lines += [
            f"{'PASS' if value >= least else 'FAIL'}: {what}: {value:.2f}, at least {least:g} wanted"
            for what, value, least in limits(found)
        ]
    if found.get("right"):
        bad = [f"{case['case']}, {line}" for case in found["right"] for line in case["wrong"]]
        share = f"{len(found['right'])} of {len(found['cases'])} cases were compared with the processor"
        lines.append(f"{share}. Not right: {'; '.join(bad)}." if bad else f"{share}, and all is right.")
    elif found["cases"]:
        lines.append("Nothing was compared with the processor.")
    if found["notes"]:
        lines.append("\n".join(f"- {note}" for note in found["notes"]))
    return "\n\n".join(lines)


def _right(found: dict[str, Any]) -> str:
    lines = [
        [case["case"], name, *(f"{value:.0e}" for dtype in ("float64", "float32") for value in by_dtype[dtype])]
        for case in found["right"]
        for name, by_dtype in case["conditionals"].items()
    ]
    if not lines:
        return "## Is it right?\n\nNot known."
    first = next(case for case in found["right"] if "tolerance" in case)
    most = "; ".join(f"{dtype} {a:.0e} and {b:.0e}" for dtype, (a, b) in first["tolerance"].items())
    head = ["", "conditional", "float64: bound", "gradient", "float32: bound", "gradient"]
    return (
        "## Is it right?\n\nRelative differences of the device's bounds and gradients from those of a processor in "
        f"float64 (0 where that is the device). What a bound and a gradient may differ by: {most}, which are the "
        f"dtype's unit of rounding times the condition number of K_uu ({first['condition']:.0f} for one block), and "
        "twenty times that. With products in TF32 in the place of float32, gradients are beyond it.\n\n"
        + markdown_table(head, lines)
    )


def _steps(found: dict[str, Any]) -> str:
    rows = found["steps"]
    programs = [p for p in report.NAMES if any(row["program"] == p for row in rows)]
    lines, rates = [], []
    for inducing, dtype in report.problems(rows):
        chosen = report.best(rows, inducing, dtype)
        at_least = report.limit(found, chosen, inducing)
        times = [cell(chosen[p]["seconds"]) if p in chosen else "" for p in programs]
        lines.append([str(inducing), dtype, *times, "" if at_least is None else cell(at_least)])
        if at_least is None:
            continue
        rate = report.flops.product(inducing, found["batch_size"]) / np.asarray(chosen["products"]["seconds"])
        shares = [
            f"{100 * np.median(at_least / np.asarray(chosen[p]['seconds'])):.0f} %" if p in chosen else ""
            for p in programs
        ]
        speed = ratio(chosen["gpytorch"]["seconds"], chosen["npgp"]["seconds"]) if _both(chosen) else ""
        memory = [_mebibytes(chosen.get(p, {}).get("device_bytes")) for p in ("npgp", "gpytorch")]
        rates.append([str(inducing), dtype, cell(rate, 1e-12), *shares, speed, *memory])
    names = [report.NAMES[p] for p in programs]
    head = ["M", "", "Tflop/s", *names, "npgp's speed in GPyTorch's", "npgp (MiB)", "GPyTorch (MiB)"]
    return (
        f"## SVGP training step\n\nMilliseconds: medians, and quartiles in brackets, of rounds in turn. M inducing "
        f"points, {found['rows']} rows, batches of {found['batch_size']} with {found['columns']} columns, Matérn-3/2. "
        "The limit is the time of the step's matrix products alone at the rate of products in the same rounds, with "
        "the precision HIGHEST. On a GPU all JAX programs are compiled with `xla_gpu_enable_triton_gemm` off, as "
        "`npgp.fit` does it.\n\n"
        + markdown_table(["M", "", *names, "limit"], lines)
        + "\n\nThat rate, the limit's share of each step, and the most memory of the device so far.\n\n"
        + markdown_table(head, rates)
    )


def _both(chosen: dict[str, Any]) -> bool:
    return "npgp" in chosen and "gpytorch" in chosen


def _mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.0f}"


def _others(found: dict[str, Any]) -> str:
    lines = [[row["program"], cell(row["seconds"])] for row in found["others"]]
    return (
        "## What else npgp trains\n\nMilliseconds of a training step, or of a bound with its gradient; float32, "
        f"batches of {found['batch_size']} rows where not said otherwise.\n\n" + markdown_table(["", "ms"], lines)
    )


def _factors(found: dict[str, Any]) -> str:
    rows, routes = found["factors"], list(found["factors"][0]["seconds"])
    lines = [
        [
            f"{row['batch']} × {row['size']} × {row['size']}",
            *(cell(row["seconds"][route]) for route in routes),
            f"{max(row['errors'].values()):.0e}",
        ]
        for row in rows
    ]
    return (
        "## Many small Cholesky factors\n\nMilliseconds for all of a batch, float32: as `npgp.batches.one_by_one` does "
        "it here, by JAX's batched call, in a loop of single calls, and written out by columns with the batch along "
        "the last axis. The last column is the largest error of L Lᵀ by any, relative to the largest entry.\n\n"
        + markdown_table(["", *routes, "error"], lines)
    )


def _oil(found: dict[str, Any]) -> str:
    lines = [
        [
            row["conditional"],
            f"{row['steps']} of {row['wanted']}",
            f"{row['first_seconds']:.0f}",
            f"{row['seconds']:.0f}",
            f"{1e3 * row['seconds'] / max(row['steps'] - 1, 1):.2f}",
            f"{row['elbo_per_row']:.3f} ± {row['monte_carlo_error']:.3f}",
            f"{row['nn_errors']} of {row['rows']}",
        ]
        for row in found["oil"]
    ]
    what = "1000 rows of 12 columns" if found["oil"][0]["real"] else "simulated rows"
    head = ["bound", "steps", "first step (s)", "the others (s)", "ms a step", "ELBO per row", "neighbor errors"]
    return (
        f"## Oil flow: a Bayesian GPLVM\n\n{what}, Q = 10, M = {found['oil'][0]['inducing']}, all rows at each step, "
        "float64, Adam whose rate falls from .01 to 2 % along a cosine (the study `oil-bounds`).\n\n"
        + markdown_table(head, lines)
    )


PARTS = {
    "right": _right,
    "steps": _steps,
    "others": _others,
    "factors": _factors,
    "kin40k": report.kin40k,
    "oil": _oil,
}
