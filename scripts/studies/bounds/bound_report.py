#!/usr/bin/env python
"""Every collapsed bound on the log evidence of a GP with Gaussian noise, at given hyperparameters, side by side.

    python scripts/studies/bounds/bound_report.py problem.npz --json report.json --group-size 16

The problem is a file written by numpy.savez with

    X (N, D), y (N,)           training inputs and observations; the prior mean is zero
    Z (M, D)                   inducing inputs
    O, O2, O3, … (K, D)        further blocks of inducing inputs, optional
    kernel                     rbf, matern12, matern32, matern52, rationalquadratic or periodic
    lengthscale, variance      of the kernel: a number or (D,), and a number (also alpha or period, where it has one)
    noise                      noise variance: a number, or (N,), one for each row
    jitter                     added to the inducing values' covariance, relative to the prior variance; optional
    Xs (N*, D)                 inputs for predictions, optional

Structures that need further blocks are left out where there is none. Everything is in float64. In the JSON file,
"exact" is null for more than 2000 rows; "upper" is the smallest upper bound that any of the structures gives; the
variance of predictions is that of f, without noise; and without Xs "predictions" is empty.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import npgp
from npgp import kernels
from npgp.collapsed.certificates import EXACT_ROWS, evidence_bounds
from npgp.sparse.conditionals import Conditional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, table, whole, write_json

STRUCTURES = {
    "sgpr": "Z alone, its covariance learned",
    "union": "Z and the further blocks fused in one: never below solve, and dearer",
    "solve": "SOLVE-GP: block after block, the covariance of each learned",
    "odvgp": "ODVGP: Z's covariance learned, further blocks only move the mean: cheaper than solve",
}
#: What the approximate posterior does to the residual, from loosest to tightest.
MEANINGS = {
    "prior": "what the inducing inputs leave unexplained is left as it is a priori (Titsias 2009)",
    "artemev": "it shrinks by one factor for all rows (Artemev, Burt & van der Wilk 2021)",
    "tight": "it shrinks row by row (Bui, Ashman & Turner 2025; Titsias 2025)",
    "grouped": "it shrinks jointly within groups of neighboring rows",
    "full": "it shrinks jointly for all rows, as dear as the exact evidence",
}


class ProblemError(Exception):
    """What is wrong with a problem's file, in a sentence."""


class Problem(NamedTuple):
    """A GP with its data and blocks of inducing inputs, checked; in float64."""

    X: jax.Array
    y: jax.Array
    blocks: tuple[npgp.features.Points, ...]
    kernel: kernels.Kernel
    noise: np.ndarray
    jitter: float | None
    Xs: jax.Array | None

    def structures(self) -> dict[str, tuple[tuple[npgp.features.Points, ...], tuple[str, ...]]]:
        """Blocks, and the covariance of each, by the structure's name."""
        first, *further = self.blocks
        structures: dict[str, tuple[tuple[npgp.features.Points, ...], tuple[str, ...]]] = {
            "sgpr": ((first,), ("dense",))
        }
        if further:
            together = npgp.features.Points(jnp.concatenate([block.inputs for block in self.blocks]))
            structures["union"] = ((together,), ("dense",))
            structures["solve"] = (self.blocks, ("dense",) * len(self.blocks))
            structures["odvgp"] = (self.blocks, ("dense", *["mean-only"] * len(further)))
        return structures


def parser() -> Arguments:
    parser = Arguments(__doc__)
    parser.add_argument("problem", type=Path, metavar="PROBLEM.npz", help="the problem, described below")
    parser.add_argument(
        "--group-size", type=whole, metavar="g", help="also the 'grouped' bounds, in groups of at most g rows"
    )
    parser.shared(json=dict(required=True))
    return parser


def read(path: Path) -> tuple[Problem, list[str]]:
    """The problem in a file, and the names of entries that are not read."""
    try:
        with np.load(path) as file:
            data = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise ProblemError(f"{path} does not exist.") from None
    except Exception as error:  # zipfile's, pickle's, numpy's: whatever a broken file makes
        raise ProblemError(f"{path} is not a file of arrays by numpy.savez: {error}") from None
    missing = [name for name in ("X", "y", "Z", "kernel", "lengthscale", "variance", "noise") if name not in data]
    if missing:
        raise ProblemError(f"{path} has no {', '.join(missing)}; it has {', '.join(data) or 'nothing'}.")

    X = matrix(data, "X")
    N, D = X.shape
    y = vector(data, "y", N)
    names = ["Z", *further_blocks(data)]
    blocks = tuple(npgp.features.Points(matrix(data, name, D)) for name in names)
    kernel, used = kernel_of(data, D)
    noise = positive(data, "noise", N)
    jitter = None
    if "jitter" in data:
        jitter = float(numbers(data, "jitter", [()]))
        if not 0.0 <= jitter <= 0.1:
            raise ProblemError(f"jitter is {jitter}; it is relative to the prior variance and between 0 and 0.1.")
    Xs = matrix(data, "Xs", D) if "Xs" in data else None
    known = {"X", "y", "kernel", "noise", "jitter", "Xs", *names, *used}
    return Problem(X, y, blocks, kernel, noise, jitter, Xs), [name for name in data if name not in known]


def further_blocks(data: dict[str, np.ndarray]) -> list[str]:
    """O, O2, O3, …, of which none may be left out."""
    there = [name for name in data if name == "O" or (name[:1] == "O" and name[1:].isdecimal())]
    names = ["O", *(f"O{i}" for i in range(2, len(there) + 1))][: len(there)]
    for name in there:
        if name not in names:
            raise ProblemError(f"{name} is given, but not the blocks before it; they are named O, O2, O3 and so on.")
    return names


def numbers(data: dict[str, np.ndarray], name: str, shapes: list[tuple[int, ...]]) -> np.ndarray:
    """A finite float64 array of one of these shapes; one number in an array stands for the number."""
    value = data[name]
    if value.dtype.kind not in "fiu":
        raise ProblemError(f"{name} has dtype {value.dtype}; it must be real numbers.")
    if value.shape not in shapes and value.shape == (1,) and () in shapes:
        value = value.reshape(())
    if value.shape not in shapes:
        raise ProblemError(f"{name} has shape {value.shape}; it must be {' or '.join(map(str, shapes))}.")
    value = value.astype(float)
    if not np.all(np.isfinite(value)):
        raise ProblemError(f"{name} has NaN or infinite entries.")
    return value


def positive(data: dict[str, np.ndarray], name: str, entries: int | None = None) -> np.ndarray:
    """A hyperparameter: a number or, where that may be, one for each column or row."""
    value = numbers(data, name, [()] if entries is None else [(), (entries,)])
    if not np.all(value > 0):
        raise ProblemError(f"{name} is {value}; it must be positive.")
    return value


def vector(data: dict[str, np.ndarray], name: str, length: int) -> jax.Array:
    return jnp.asarray(numbers(data, name, [(length,)]))


def matrix(data: dict[str, np.ndarray], name: str, columns: int | None = None) -> jax.Array:
    """Inputs, (rows, columns), with at least one row and one column."""
    shape = data[name].shape
    if len(shape) != 2 or 0 in shape or columns not in (None, shape[1]):
        wanted = "(rows, columns)" if columns is None else f"(rows, {columns}), as X has {columns} columns"
        raise ProblemError(f"{name} has shape {shape}; it must be {wanted}, with at least one row and one column.")
    return jnp.asarray(numbers(data, name, [shape]))


def kernel_of(data: dict[str, np.ndarray], columns: int) -> tuple[kernels.Kernel, set[str]]:
    """The kernel, and the names of the hyperparameters that it has."""
    hyperparameters: dict[str, tuple[Any, set[str]]] = {}
    for name in kernels.__all__:
        cls = getattr(kernels, name)
        fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
        if {"lengthscale", "variance"} <= fields:
            hyperparameters[name.lower()] = cls, fields - {"active_dims"}
    word = str(data["kernel"].item() if data["kernel"].size == 1 else data["kernel"])
    if word.lower() not in hyperparameters:
        raise ProblemError(f"kernel is {word!r}; it must be one of {', '.join(hyperparameters)}.")
    cls, fields = hyperparameters[word.lower()]
    by_column = {"lengthscale", "period"}
    settings = {
        name: positive(data, name, columns if name in by_column else None) for name in sorted(fields & set(data))
    }
    return cls(**settings), set(settings)


def report_on(problem: Problem, grouped: npgp.Grouped | None) -> dict:
    """What is written to the JSON file."""
    whole = problem.X.shape[0] <= EXACT_ROWS
    conditionals: dict[str, Conditional] = {"prior": npgp.Prior(), "artemev": npgp.Shared(), "tight": npgp.Tight()}
    if grouped is not None:
        conditionals["grouped"] = grouped
    if whole:
        conditionals["full"] = npgp.Full()
    exact, uppers, bounds, predictions = None, [], {}, {}
    for structure, (blocks, covariances) in problem.structures().items():
        given = (problem.kernel, problem.X, problem.y, problem.noise, problem.jitter)
        found = evidence_bounds(*given, blocks, covariances, conditionals, whole)
        bounds[structure] = {
            word: figure(f"the {word} bound of {structure}", found["bounds"][word]) for word in conditionals
        }
        uppers.append(figure(f"the upper bound of {structure}", found["upper"]))
        if whole:
            exact = figure("the exact evidence", found["exact"])
        if problem.Xs is not None:
            mean, variance = predict(problem, blocks, covariances)
            predictions[structure] = {
                "mean": [figure(f"a predicted mean of {structure}", value) for value in mean],
                "variance": [figure(f"a predicted variance of {structure}", value) for value in variance],
            }
    return {"exact": exact, "upper": min(uppers), "bounds": bounds, "predictions": predictions}


def predict(problem: Problem, blocks: tuple[npgp.features.Points, ...], covariances: tuple[str, ...]):
    """Mean and variance of f at Xs under the best q of a structure; it is the same with every conditional."""

    @partial(jax.jit, static_argnames="covariances")
    def moments(X, y, Xs, kernel, blocks, noise, covariances):
        gp = npgp.CollapsedGP(kernel, X, blocks, noise_variance=noise, covariances=covariances, jitter=problem.jitter)
        return gp.condition(y).mean_and_variance(Xs)

    found = moments(problem.X, problem.y, problem.Xs, problem.kernel, blocks, problem.noise, covariances)
    return map(np.asarray, found)


def figure(what: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ProblemError(
            f"{what} cannot be computed in float64: it came out as {number}. Inputs that nearly coincide or a noise "
            "that is tiny beside the variance can be why: increase jitter or noise."
        )
    return number


def text(problem: Problem, report: dict) -> str:
    N, D = problem.X.shape
    sizes = " + ".join(str(block.size) for block in problem.blocks)
    lines = [
        f"{N} rows of {D} columns, {type(problem.kernel).__name__} kernel, {sizes} inducing inputs.",
        "All figures are in nats (natural logarithms).",
        "",
    ]
    if report["exact"] is None:
        lines.append(f"The log evidence itself is not computed for more than {EXACT_ROWS} rows.")
    else:
        lines.append(f"Log evidence, how well the model explains y:  {report['exact']:.4f}")
    lines += [
        f"Upper bound, it cannot be above (Titsias 2014):  {report['upper']:.4f}",
        "Lower bounds, it cannot be below; the larger, the better the approximation:",
        "",
    ]
    words = list(report["bounds"]["sgpr"])
    rows = [(name, *(f"{bounds[word]:.4f}" for word in words)) for name, bounds in report["bounds"].items()]
    lines.append(table(("", *words), rows))
    lines += ["", "Rows: which inducing inputs there are, and what is learned of them."]
    lines += [f"  {structure:8}{STRUCTURES[structure]}" for structure in report["bounds"]]
    lines += ["Columns: what the approximate posterior does to what they leave unexplained at the data."]
    return "\n".join(lines + [f"  {word:8}{MEANINGS[word]}" for word in words])


def main(argv: list[str] | None = None) -> dict:
    arguments = parser()
    args = arguments.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    try:
        problem, ignored = read(args.problem)
        size = args.group_size
        grouped = None if size is None else npgp.Grouped(npgp.median_split(problem.X, size))
        report = report_on(problem, grouped)
    except ProblemError as error:
        arguments.error(str(error))
    print(text(problem, report))
    if ignored:
        print(f"not read: {', '.join(ignored)}")
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
