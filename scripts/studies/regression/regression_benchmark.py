#!/usr/bin/env python
"""SVGP and SOLVE-GP with the prior's and the tight conditional on regression sets, as Bui, Ashman & Turner (2025) do.

Their figures 2, 3, 6 and 7 are the pattern: bound, test error and test log-likelihood against the number of inducing
points M, a line for each of SVGP, T-SVGP (``conditional="tight"``), SOLVE-GP and T-SOLVE-GP. Matérn-3/2 with a
lengthscale for each column, Gaussian noise, everything learned at once by Adam on minibatches; random splits with a
tenth of the rows for testing, inputs and target standardised by the training rows. Differences from the paper in
settings that we could not see are possible: what is checked are its claims, that the tight conditional is at least as
good everywhere, at the same cost.

M counts all inducing points: SOLVE-GP has M/2 + M/2 where SVGP has M. It is compared with SVGP of M and of M/2 points:
with the prior's conditional and at the same points, its bound lies between theirs. All four methods start at the same M
inputs, the centres of k-means (a random half of them in each of SOLVE-GP's blocks), so that no better start passes for
a better method. "Of best q" is the collapsed bound at the trained hyperparameters and inducing inputs: what more steps
on q alone could win.

    NPGP_DATA=... python scripts/studies/regression/regression_benchmark.py --json out/regression.json        half an hour on two cores
    NPGP_DATA=... python scripts/studies/regression/regression_benchmark.py --full --json out/regression.json     for an accelerator

With ``--json`` every fit is written when it ends, and a later run with the same file and settings does those that are
missing. A method with M points is compiled once for each set, not for each split: the splits of a set have equally many
rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.stats import norm

import npgp
from npgp import datasets
from npgp.sparse.conditionals import Conditional


class Method(NamedTuple):
    """Blocks of equally many inducing points, and whether q tightens what they leave."""

    blocks: int
    tight: bool


METHODS = {
    "SVGP": Method(1, False),
    "T-SVGP": Method(1, True),
    "SOLVE-GP": Method(2, False),
    "T-SOLVE-GP": Method(2, True),
}
SETS = ("kin40k", "protein", "keggdirected", "kin8nm", "power", "pumadyn32nm")
#: Start of the hyperparameters, for standardised data; lengthscales start at this share of √D.
LENGTHSCALE, VARIANCE, NOISE_VARIANCE = 0.7, 1.0, 0.1
#: Rows at a time where no gradient is taken.
CHUNK = 4096


class Metric(NamedTuple):
    """A figure of a fit: its title, digits, and the sign of what is better (0: it is not compared)."""

    title: str
    digits: int
    better: int


METRICS = {
    "elbo": Metric("ELBO per row", 4, 1),
    "best_elbo": Metric("of best q", 4, 1),
    "rmse": Metric("test RMSE", 4, -1),
    "log_likelihood": Metric("test log-likelihood", 4, 1),
    "step_ms": Metric("ms per step", 1, 0),
    "seconds": Metric("seconds", 0, 0),
}
PANELS = ("elbo", "rmse", "log_likelihood", "step_ms")
NOTE = (
    "Means over splits ± standard errors. ELBO per row: of all training rows; of best q: with the same hyperparameters "
    "and inducing inputs. Test figures: of the standardised target. Seconds: of training, without compilation."
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="+", choices=(*SETS, "simulated"))
    parser.add_argument("--splits", type=int, help="how many")
    common_options(parser)
    parser.set_defaults(batch_size=1024)
    args = parser.parse_args(argv)
    if args.quick:
        defaults = {
            "sets": ["simulated"],
            "splits": 2,
            "inducing": [8, 16],
            "steps": 60,
            "rows": 300,
            "learning_rate": 0.05,
        }
        args.batch_size = min(args.batch_size, 64)
    elif args.full:
        defaults = {
            "sets": list(SETS),
            "splits": 5,
            "inducing": [256, 512, 1024],
            "steps": 20_000,
            "learning_rate": 0.02,
        }
    else:
        defaults = {"sets": list(SETS[:3]), "splits": 2, "inducing": [128, 256], "steps": 1500, "learning_rate": 0.05}
    return with_defaults(parser, args, defaults)


def common_options(parser: argparse.ArgumentParser) -> None:
    """What the benchmarks of the four methods have in common; ``None`` where it depends on the setting."""
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--inducing", type=int, nargs="+", help="M of all blocks together, even")
    parser.add_argument("--rows", type=int, help="so many training rows at most, drawn at random")
    parser.add_argument("--steps", type=int, help="of Adam, whose rate decays along a cosine")
    parser.add_argument("--batch-size", type=int, help="rows per step")
    parser.add_argument("--learning-rate", type=float, help="of Adam at first")
    parser.add_argument("--float64", action="store_true", help="double precision")
    parser.add_argument("--seed", type=int, default=0, help="to which the split's or repetition's number is added")
    setting = parser.add_mutually_exclusive_group()
    setting.add_argument("--quick", action="store_true", help="few rows, points and steps: a check that it runs")
    setting.add_argument("--full", action="store_true", help="the paper's sizes, for an accelerator")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    parser.add_argument("--json", type=Path, help="write every fit to this file, and do not repeat those it has")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, below the line that marks them")
    parser.add_argument("--machine", default="", help="a line about the machine, for --markdown")


def with_defaults(parser: argparse.ArgumentParser, args: argparse.Namespace, defaults: Mapping[str, Any]):
    """The arguments with the setting's defaults where nothing was given; stops on what cannot be."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if any(M < 2 or M % 2 for M in args.inducing):
        parser.error("--inducing must be positive even numbers.")
    if args.steps < 2 or args.batch_size < 1:
        parser.error("--steps must be at least 2, and --batch-size positive.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Data


class Rows(NamedTuple):
    """Rows for training and for testing."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def load(name: str, split: int, most: int | None) -> Rows:
    """A random split, standardised by its training rows; with a limit on these."""
    if name == "simulated":
        rng = np.random.default_rng(0)
        X = rng.normal(size=(2000, 3))
        y = np.sin(2.0 * X[:, 0]) + 0.5 * np.abs(X[:, 1]) + 0.2 * rng.normal(size=len(X))
    else:
        data = datasets.uci(name, 0, standardize=False)
        X, y = np.concatenate([data.X_train, data.X_test]), np.concatenate([data.y_train, data.y_test])
    order = np.random.default_rng(split).permutation(len(y))
    test, train = np.split(order, [len(y) // 10])
    train = train[:most]
    y = (y - y[train].mean()) / y[train].std()
    spread = X[train].std(0)
    X = (X - X[train].mean(0)) / np.where(np.ptp(X[train], axis=0) > 0, spread, 1.0)
    dtype = jnp.result_type(float)
    return Rows(*(array.astype(dtype) for array in (X[train], y[train], X[test], y[test])))


def start_points(X: np.ndarray, M: int, seed: int) -> np.ndarray:
    """The centres of k-means in a random order, so that any part of them is spread like all."""
    return np.random.default_rng(seed).permutation(np.asarray(npgp.inducing.kmeans(X, M, seed)))


def in_chunks(size: int, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Arrays in chunks of equally many rows, (chunks, size, …), and the mask of rows that do not fill the last one."""
    rows = len(arrays[0])
    size = min(size, rows)
    missing = -rows % size
    mask = np.arange(rows + missing) < rows
    filled = [np.concatenate([array, array[:missing]]) for array in arrays]
    return tuple(array.reshape(-1, size, *array.shape[1:]) for array in (*filled, mask))


# ---------------------------------------------------------------------------------------------------------------
# One method with M points


class Program:
    """
    A method with M points on data of one shape, compiled once for all splits.

    What differs between splits, the start too, comes as an argument.

    :param model: a model ``(X, y, mask, *, size)`` whose parameters all have values in the start of :meth:`train`.
    :param rows: training rows, N.
    :param args: steps, batch_size and learning_rate.
    :param chunk: rows at a time for the ELBO of all.
    """

    def __init__(self, model: Callable, rows: int, args: argparse.Namespace, chunk: int = CHUNK):
        self.model, self.guide, self.chunk = model, npgp.AutoSparseGP(model), chunk
        self.steps, self.batch_size = args.steps, min(args.batch_size, rows)
        optimiser = npgp.adam(args.learning_rate, args.steps)
        self.svi = SVI(self.model, self.guide, optimiser, TraceMeanField_ELBO(), size=rows)
        self._init = jax.jit(self.svi.init)  # operation by operation this takes seconds
        self._losses = jax.jit(self._losses_of_chunks)

    def train(self, X: np.ndarray, y: np.ndarray, start: dict[str, Any], seed: int) -> tuple[dict[str, Any], dict]:
        """Trained parameters, and seconds: of what compiles, of all other steps."""
        key = jax.random.key(seed)
        fit = partial(npgp.fit, self.svi, key, batch_size=self.batch_size, progress=False)
        began = time.perf_counter()
        state = self._init(key, X[: self.batch_size], y[: self.batch_size], init_params=start)
        first = fit(1, X, y, init_state=state)
        compiled = time.perf_counter()
        result = fit(self.steps - 1, X, y, init_state=first.state)
        seconds = time.perf_counter() - compiled
        times = {"compile_seconds": compiled - began, "seconds": seconds, "step_ms": 1e3 * seconds / (self.steps - 1)}
        return result.params, times

    def elbo(self, params: dict[str, Any], X: np.ndarray, y: np.ndarray) -> float:
        """The ELBO of all rows, exactly: the mean over equal chunks, each scaled up to all of them."""
        return -float(np.mean(np.asarray(self._losses(params, in_chunks(self.chunk, X, y)), np.float64)))

    def _losses_of_chunks(self, params, chunks):
        loss = partial(TraceMeanField_ELBO().loss, jax.random.key(0), params, self.model, self.guide)
        return lax.map(lambda chunk: loss(*chunk, size=chunks[-1].size), chunks)


def inducing_params(blocks: int, M: int, columns: int) -> list[jax.Array]:
    """Inducing inputs of each block, as parameters of a model: their values come with the start."""
    return [numpyro.param(f"inducing{i}", jnp.zeros((M // blocks, columns))) for i in range(blocks)]


def with_points(start: dict[str, Any], Z: np.ndarray, blocks: int) -> dict[str, Any]:
    """The start of a fit: hyperparameters, and points divided among the blocks."""
    start = {name: jnp.asarray(value, Z.dtype) for name, value in start.items()}
    return start | {f"inducing{i}": jnp.asarray(block) for i, block in enumerate(np.split(Z, blocks))}


def make_model(method: Method, M: int, columns: int) -> Callable:
    positive = constraints.softplus_positive

    def model(X, y=None, mask=None, *, size):
        params: dict[str, Any] = {
            "lengthscale": numpyro.param("lengthscale", jnp.ones(columns), constraint=positive),
            "variance": numpyro.param("variance", VARIANCE, constraint=positive),
        }
        noise_variance = numpyro.param("noise_variance", NOISE_VARIANCE, constraint=positive)
        points = inducing_params(method.blocks, M, columns)
        f = component(params | {f"inducing{i}": Z for i, Z in enumerate(points)}, method.blocks).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(noise_variance), obs=y, conditional=conditional_of(method), mask=mask)

    return model


def conditional_of(method: Method) -> Conditional:
    return "tight" if method.tight else "prior"


def component(params: dict[str, Any], blocks: int) -> npgp.SparseGP:
    kernel = npgp.Matern32(params["lengthscale"], params["variance"])
    return npgp.SparseGP("f", kernel, [params[f"inducing{i}"] for i in range(blocks)])


@partial(jax.jit, static_argnames="method")
def best_elbo(params, X, y, method: Method):
    """The ELBO at these hyperparameters and inducing inputs if q(ε) were the best one."""
    gp = component(params, method.blocks)
    bound = npgp.CollapsedGP(
        gp.kernel,
        X,
        gp.inducing,
        params["noise_variance"],
        conditional=conditional_of(method),
        covariances=("dense",) * method.blocks,
    )
    return bound.log_prob(y)


@partial(jax.jit, static_argnames="method")
def predict(params, X, method: Method):
    """Mean and variance of y at the rows of X."""
    mean, variance = component(params, method.blocks).posterior(params).mean_and_variance(X, batch_size=CHUNK)
    return mean, variance + params["noise_variance"]


def scores(mean, variance, y) -> dict[str, float]:
    """RMSE and mean log-likelihood, in units of the standardised target."""
    mean, variance, y = (np.asarray(values, np.float64) for values in (mean, variance, y))
    return {
        "rmse": float(np.sqrt(np.mean((mean - y) ** 2))),
        "log_likelihood": float(np.mean(norm.logpdf(y, mean, np.sqrt(variance)))),
    }


def fit(program: Program, method: Method, data: Rows, Z: np.ndarray, seed: int) -> dict[str, Any]:
    """Train one method on one split; its figures."""
    columns = data.X.shape[1]
    hyper = {
        "lengthscale": np.full(columns, LENGTHSCALE * math.sqrt(columns)),
        "variance": VARIANCE,
        "noise_variance": NOISE_VARIANCE,
    }
    params, times = program.train(data.X, data.y, with_points(hyper, Z, method.blocks), seed)
    rows = len(data.y)
    return {
        "elbo": program.elbo(params, data.X, data.y) / rows,
        "best_elbo": float(best_elbo(params, data.X, data.y, method)) / rows,
        **scores(*predict(params, data.X_test, method), data.y_test),
        **times,
        "noise_variance": float(params["noise_variance"]),
        "rows": rows,
        "test_rows": len(data.y_test),
    }


# ---------------------------------------------------------------------------------------------------------------
# All fits, kept in a file


class Records:
    """
    Fits of one run's settings, in a file that may hold others too.

    :param path: JSON file, or none.
    :param settings: what fits must share to stand in one table.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self.path, self.settings = path, settings
        self._all: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []

    def find(self, **cell) -> list[dict[str, Any]]:
        """Fits of these settings with these values."""
        wanted = self.settings | cell
        return [r for r in self._all if all(key in r and r[key] == value for key, value in wanted.items())]

    def add(self, **record) -> None:
        """Add a fit, and write all to the file in one go. A figure that is not finite stops the run."""
        bad = [key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        if bad:
            raise FloatingPointError(f"{record}: not finite are {', '.join(bad)}.")
        self._all.append(self.settings | record)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self._all, indent=1) + "\n")
            os.replace(unfinished, self.path)


def keep_programs() -> None:
    """Keep compiled programs for later fits of this run, unless the user has a cache of their own."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp(prefix="npgp-programs-"))


def run(args: argparse.Namespace) -> Records:
    """Fit what the file does not have."""
    names = ("steps", "batch_size", "learning_rate", "float64", "seed")
    records = Records(args.json, {name: getattr(args, name) for name in names} | {"most_rows": args.rows})
    keep_programs()
    for name in args.sets:
        programs: dict[tuple[str, int], Program] = {}
        for split in range(args.splits):
            cells = [
                {"set": name, "split": split, "inducing": M, "method": method}
                for M, method in itertools.product(args.inducing, args.methods)
            ]
            missing = [cell for cell in cells if not records.find(**cell)]
            if not missing:
                continue
            data = load(name, args.seed + split, args.rows)
            starts: dict[int, np.ndarray] = {}
            for cell in missing:
                M, method = cell["inducing"], METHODS[cell["method"]]
                if M not in starts:
                    starts[M] = start_points(data.X, M, args.seed + split)
                if (cell["method"], M) not in programs:
                    model = make_model(method, M, data.X.shape[1])
                    programs[cell["method"], M] = Program(model, len(data.y), args)
                figures = fit(programs[cell["method"], M], method, data, starts[M], args.seed + split)
                records.add(**cell, **figures)
                print_fit(cell, figures, METRICS)
    return records


def print_fit(cell: Mapping[str, Any], figures: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
    parts = [f"{metric.title} {figures[key]:.{metric.digits}f}" for key, metric in metrics.items()]
    print(" ".join(map(str, cell.values())) + ": " + ", ".join(parts), flush=True)


# ---------------------------------------------------------------------------------------------------------------
# What people look at


def moments(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, NaN for a single value."""
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), float(error)


def spread(mean: float, error: float, digits: int) -> str:
    mean = round(mean, digits) + 0.0  # and no −0
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


Cells = dict[tuple[str, int], dict[str, dict[int, dict[str, Any]]]]


def by_cell(records: Records, args: argparse.Namespace, sets: Sequence[str]) -> Cells:
    """Fits by set and M, then by method and split: those that the arguments ask for."""
    cells: Cells = {}
    for name, M, method in itertools.product(sets, args.inducing, args.methods):
        for record in records.find(set=name, inducing=M, method=method):
            if record["split"] < args.splits:
                cells.setdefault((name, M), {}).setdefault(method, {})[record["split"]] = record
    return cells


def table(cells: Cells, metrics: Mapping[str, Metric]) -> str:
    rows = []
    for (name, M), methods in cells.items():
        for method, fits in methods.items():
            figures = [spread(*moments([r[key] for r in fits.values()]), m.digits) for key, m in metrics.items()]
            rows.append([name, str(M), method, *figures, str(len(fits))])
    return markdown(["set", "M", "method", *(metric.title for metric in metrics.values()), "fits"], rows)


#: What is compared, the first of each pair being the better one if the claim holds; and whether the second has but the
#: M/2 points of the first block.
PAIRS = (
    ("T-SVGP", "SVGP", False),
    ("T-SOLVE-GP", "SOLVE-GP", False),
    ("SOLVE-GP", "SVGP", True),
    ("T-SOLVE-GP", "T-SVGP", True),
    ("SOLVE-GP", "SVGP", False),
    ("T-SOLVE-GP", "T-SVGP", False),
)


def gains(cells: Cells, metrics: Mapping[str, Metric]) -> tuple[str, str]:
    """
    What the first method of each pair gains over the second, split by split; positive is better.

    :return: the table of gains; and that of the cells (set and M) in which the mean gain is positive.
    """
    compared = {key: metric for key, metric in metrics.items() if metric.better}
    titles = [metric.title for metric in compared.values()]
    rows, counts = [], []
    for first, second, halved in PAIRS:
        pair = f"{first} over {second}{' of M/2' if halved else ''}"
        found: list[dict[str, tuple[float, float]]] = []
        for (name, M), methods in cells.items():
            a, b = methods.get(first, {}), cells.get((name, M // 2 if halved else M), {}).get(second, {})
            splits = sorted(set(a) & set(b))
            if not splits:
                continue
            differences = {
                key: moments([metric.better * (a[i][key] - b[i][key]) for i in splits])
                for key, metric in compared.items()
            }
            texts = [spread(*differences[key], metric.digits) for key, metric in compared.items()]
            cost = moments([a[i]["step_ms"] / b[i]["step_ms"] for i in splits])
            rows.append([name, str(M), pair, *texts, spread(*cost, 2)])
            found.append(differences)
        if found:
            counts.append([pair, *(_count([gain[key] for gain in found]) for key in compared)])
    if not rows:
        return "", ""
    heads = ["set", "M", "gain of", *titles, "time per step, ratio"]
    return markdown(heads, rows), markdown(["gain of", *titles], counts)


def _count(values: Sequence[tuple[float, float]]) -> str:
    """How many gains are positive; and how many exceed two standard errors, either way."""
    text = f"{sum(mean > 0 for mean, _ in values)} of {len(values)}"
    clear = [sum(sign * mean > 2 * error for mean, error in values) for sign in (1, -1)]
    return text if any(math.isnan(error) for _, error in values) else f"{text} (clearly: {clear[0]}, worse: {clear[1]})"


def draw(cells: Cells, metrics: Mapping[str, Metric], panels: Sequence[str], path: Path) -> None:
    """The paper's layout: a row of panels for each set, one for each metric, against M; a line for each method."""
    from PIL import Image

    from npgp.plots import COLOURS, _subplots

    sets = list(dict.fromkeys(name for name, _ in cells))
    size = (3.1 * len(panels), 2.5 * len(sets) + 0.5)
    figure, axes = _subplots(len(sets), len(panels), figsize=size, squeeze=False)
    for row, name in zip(axes, sets, strict=True):
        for ax, key in zip(row, panels, strict=True):
            for i, (method, (blocks, tight)) in enumerate(METHODS.items()):
                sizes = [M for (other, M), methods in cells.items() if other == name and method in methods]
                if not sizes:
                    continue
                points = [moments([r[key] for r in cells[name, M][method].values()]) for M in sizes]
                mean, error = np.array(points).T
                ax.errorbar(
                    np.array(sizes) * 2 ** (0.03 * (i - 1.5)),  # side by side
                    mean,
                    yerr=None if np.isnan(error).any() else error,
                    fmt=("o" if blocks == 1 else "s") + ("-" if tight else "--"),
                    color=COLOURS[i],
                    markersize=4,
                    lw=1.3,
                    capsize=2,
                    label=method,
                )
            ticks = sorted({M for other, M in cells if other == name})
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, ticks)
            ax.margins(x=0.12, y=0.1)
            ax.tick_params(labelsize=8)
            ax.set_ylabel(metrics[key].title, fontsize=9)
            if len(sets) > 1 or ax is row[0]:
                ax.set_title(name if ax is row[0] else "", fontsize=10, loc="left")
    for ax in axes[-1]:
        ax.set_xlabel("inducing points M", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    Image.open(path).quantize(64).save(path, optimize=True)  # a third of the size


#: In a file of --markdown, what follows this line is written by the program, and what stands above it is kept.
MARK = "<!-- Written by the script from here on. -->"


def report(records: Records, cells: Cells, metrics: Mapping[str, Metric], note: str, args, title: str) -> None:
    """Print the tables, and write them to the Markdown file asked for."""
    compared, counts = gains(cells, metrics)
    parts = [table(cells, metrics), note]
    if compared:
        parts += ["Gains, split by split (positive: the first is better), and cost:", compared]
        parts += [
            "In how many cells the gain is positive; clearly so, or clearly worse: by more than two standard errors:",
            counts,
        ]
    print("\n" + "\n\n".join(parts) + "\n")
    if args.markdown is None:
        return
    settings = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in records.settings.items())
    devices = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    head = [
        f"    python {shlex.join([f'scripts/{Path(sys.argv[0]).name}', *sys.argv[1:]])}",
        f"Settings: {settings}. Device: {devices}." + (f" Machine: {args.machine}." if args.machine else ""),
    ]
    above = f"# {title}\n"
    if args.markdown.exists():
        above = args.markdown.read_text().partition(MARK)[0].rstrip() + "\n"
    args.markdown.parent.mkdir(parents=True, exist_ok=True)
    args.markdown.write_text("\n\n".join([above.rstrip(), MARK, *head, *parts]) + "\n")
    print(f"wrote {args.markdown}")


def main(argv: list[str] | None = None) -> Cells:
    args = parse(argv)
    jax.config.update("jax_enable_x64", args.float64)
    records = run(args)
    cells = by_cell(records, args, args.sets)
    report(records, cells, METRICS, NOTE, args, "Regression: SVGP, SOLVE-GP and the tight conditional")
    path = args.out / "regression.png"
    draw(cells, METRICS, PANELS, path)
    print(f"wrote {path}")
    return cells


if __name__ == "__main__":
    main()
