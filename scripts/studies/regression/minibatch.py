"""Minibatch SVI of sparse GPs with a Matérn-3/2 kernel: what the regression studies and MNIST have in common.

Models and their starts, programs that are compiled once, the ELBO of all rows, scores of test rows, and fits that are
kept in a file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro.infer import SVI, TraceMeanField_ELBO

import common
import npgp
from common import Arguments, write_json
from studies.shared import learned


class Method(NamedTuple):
    """Blocks of equally many inducing points, and whether q tightens what they leave."""

    blocks: int
    tight: bool

    @property
    def covariances(self) -> tuple[str, ...]:
        """Of q(ε) in each block."""
        return ("dense",) * self.blocks


METHODS = {
    "SVGP": Method(1, False),
    "T-SVGP": Method(1, True),
    "SOLVE-GP": Method(2, False),
    "T-SOLVE-GP": Method(2, True),
}
#: Start of the hyperparameters, for standardized data; lengthscales start at this share of √D.
LENGTHSCALE, VARIANCE, NOISE_VARIANCE = 0.7, 1.0, 0.1
#: Rows at a time where no gradient is taken.
CHUNK = 4096


class Rows(NamedTuple):
    """Rows for training and for testing."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


# ---------------------------------------------------------------------------------------------------------------
# Arguments


def shared_options(parser: Arguments) -> None:
    """What the benchmarks of the four methods have in common; ``None`` where it depends on the setting."""
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.shared(
        "rows",
        "batch-size",
        "float64",
        inducing=dict(nargs="+", help="M of all blocks together, even"),
        steps=dict(help="of Adam, whose rate decays along a cosine"),
        learning_rate=dict(help="of Adam at first"),
        seed=dict(default=0, help="to which the split's or repetition's number is added"),
        out=dict(help="folder of the picture (out)"),
        json=dict(help="write every fit to this file, and do not repeat those it has"),
    )
    parser.add_argument("--natural", type=float, help="rate of natural gradients for q(ε); 0 for Adam there too")
    setting = parser.add_mutually_exclusive_group()
    setting.add_argument("--quick", action="store_true", help="few rows, points and steps: a check that it runs")
    setting.add_argument("--full", action="store_true", help="the paper's sizes: hours, or for an accelerator")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, below the line that marks them")
    parser.add_argument("--machine", default="", help="a line about the machine, for --markdown")


def with_defaults(parser: Arguments, args: argparse.Namespace, defaults: Mapping[str, Any]) -> argparse.Namespace:
    """The arguments with the setting's defaults where nothing was given; stops on what cannot be."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if any(M % 2 for M in args.inducing):
        parser.error("--inducing must be positive even numbers.")
    if args.steps < 2:
        parser.error("--steps must be at least 2.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Rows and starts


def start_of_lengthscales(X: np.ndarray) -> np.ndarray:
    columns = X.shape[1]
    return np.full(columns, LENGTHSCALE * math.sqrt(columns), X.dtype)


def start_points(X: np.ndarray, M: int, seed: int) -> np.ndarray:
    """The centers of k-means in a random order, so that any part of them is spread like all."""
    return np.random.default_rng(seed).permutation(np.asarray(npgp.inducing.kmeans(jax.random.key(seed), X, M)))


def in_chunks(size: int, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Arrays in chunks of equally many rows, (chunks, size, …), and the mask of rows that do not fill the last one."""
    rows = len(arrays[0])
    size = min(size, rows)
    missing = -rows % size
    mask = np.arange(rows + missing) < rows
    filled = [np.concatenate([array, array[:missing]]) for array in arrays]
    return tuple(array.reshape(-1, size, *array.shape[1:]) for array in (*filled, mask))


def with_points(start: dict[str, Any], Z: np.ndarray, blocks: int) -> dict[str, Any]:
    """The start of a fit: hyperparameters, and points divided among the blocks."""
    start = {name: jnp.asarray(value, Z.dtype) for name, value in start.items()}
    return start | {f"inducing{i}": jnp.asarray(block) for i, block in enumerate(np.split(Z, blocks))}


# ---------------------------------------------------------------------------------------------------------------
# Models


def component(params: dict[str, Any], covariances: Sequence[str]) -> npgp.SparseGP:
    """The GP at these hyperparameters and inducing inputs; a covariance of q(ε) for each block."""
    kernel = npgp.Matern32(params["lengthscale"], variance=params["variance"])
    inducing = [params[f"inducing{i}"] for i in range(len(covariances))]
    return npgp.SparseGP("f", kernel, inducing, covariances)


def regression_model(
    start: dict[str, Any], covariances: Sequence[str], conditional: str, group_size: int = 1
) -> Callable:
    """A model ``(X, y, mask, *, size)`` with Gaussian noise whose parameters all start at these values."""
    kind = npgp.Grouped(group_size) if conditional == "grouped" else conditional

    def model(X, y=None, mask=None, *, size):
        params = learned(start)
        f = component(params, covariances).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            likelihood = npgp.Gaussian(variance=params["noise_variance"])
            npgp.observe("y", f(X), likelihood, obs=y, conditional=kind, mask=mask)

    return model


@partial(jax.jit, static_argnames=("covariances", "conditional"))
def best_elbo(
    params, X, y, covariances: tuple[str, ...], conditional: str, groups: npgp.sparse.Groups | None = None
) -> jax.Array:
    """The ELBO at these hyperparameters and inducing inputs if q(ε) were the best one: what steps on q could win."""
    gp = component(params, covariances)
    bound = npgp.CollapsedGP(
        gp.kernel,
        X,
        gp.inducing,
        noise_variance=params["noise_variance"],
        conditional=npgp.Grouped(groups) if conditional == "grouped" else conditional,
        covariances=covariances,
    )
    return bound.log_prob(y)


def elbo_of_chunks(model: Callable, guide: Callable) -> Callable[[Any, tuple[np.ndarray, ...]], float]:
    """The ELBO of all rows, exactly, of parameters and chunks: the mean over these, each scaled up to all rows."""

    @jax.jit
    def losses(params, chunks):
        loss = partial(TraceMeanField_ELBO().loss, jax.random.key(0), params, model, guide)
        return lax.map(lambda chunk: loss(*chunk, size=chunks[-1].size), chunks)

    return lambda params, chunks: -float(np.mean(np.asarray(losses(params, chunks), np.float64)))


def scores(mean, variance, y) -> dict[str, float]:
    """RMSE and mean log-likelihood of normal predictions of y, in its units."""
    rmse, nlpd = common.scores(mean, variance, np.asarray(y, np.float64))
    return {"rmse": rmse, "log_likelihood": -nlpd}


class Program:
    """
    A method with M points on data of one shape, compiled once for all splits.

    What differs between splits, the start too, comes as an argument.

    :param model: a model ``(X, y, mask, *, size)`` whose parameters all have values in the start of :meth:`train`.
    :param rows: training rows, N.
    :param args: steps, batch_size, learning_rate and natural.
    :param chunk: rows at a time for the ELBO of all.
    """

    def __init__(self, model: Callable, rows: int, args: argparse.Namespace, chunk: int = CHUNK):
        self.model, self.guide, self.chunk = model, npgp.AutoSparseGP(model), chunk
        self.steps, self.batch_size = args.steps, min(args.batch_size, rows)
        optimizer = npgp.adam(args.learning_rate, args.steps)
        if args.natural:
            optimizer = npgp.natural_gradient(args.natural, optimizer)
        self.svi = SVI(self.model, self.guide, optimizer, TraceMeanField_ELBO(), size=rows)
        self._init = jax.jit(self.svi.init)  # operation by operation this takes seconds
        self._elbo = elbo_of_chunks(self.model, self.guide)

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
        """The ELBO of all rows."""
        return self._elbo(params, in_chunks(self.chunk, X, y))


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
        write_json(self.path, self._all, say=False)


def fit_missing(
    records: Records,
    args: argparse.Namespace,
    name: str,
    load: Callable[[int], Rows],
    make_program: Callable[[Method, int, Rows], Program],
    fit: Callable[..., dict[str, Any]],
    say: Callable[[dict[str, Any], dict[str, Any]], None],
    start_rows: int | None = None,
) -> None:
    """
    Fit on one set what the file does not have.

    :param load: the rows of a split, by its number.
    :param make_program: of a method with M points, once for all splits.
    :param fit: figures, from the program, the method, the rows, where the points start, and a seed.
    :param say: what is printed of a fit, from its cell and figures.
    :param start_rows: so many rows at most for k-means.
    """
    programs: dict[tuple[str, int], Program] = {}
    for split in range(args.splits):
        cells = [
            {"set": name, "split": split, "inducing": M, "method": method}
            for M, method in itertools.product(args.inducing, args.methods)
        ]
        missing = [cell for cell in cells if not records.find(**cell)]
        if not missing:
            continue
        data = load(split)
        starts: dict[int, np.ndarray] = {}
        for cell in missing:
            M, method, key = cell["inducing"], METHODS[cell["method"]], (cell["method"], cell["inducing"])
            if M not in starts:
                starts[M] = start_points(data.X[:start_rows], M, args.seed + split)
            if key not in programs:
                programs[key] = make_program(method, M, data)
            figures = fit(programs[key], method, data, starts[M], args.seed + split)
            records.add(**cell, **figures)
            say(cell, figures)
