#!/usr/bin/env python
"""Which approximation? Fits the exact GP and its approximations to one data set, from one start and in equal time.

    python scripts/studies/approximations/compare_approximations.py spatial --rows 10000            simulated sites, short lengthscale
    python scripts/studies/approximations/compare_approximations.py my.csv --budget 60              the last column is the target
    NPGP_DATA=... python scripts/studies/approximations/compare_approximations.py kin8nm --json out/kin8nm.json

DATA is ``snelson``, ``spatial``, a name of ``npgp.datasets.UCI_NAMES``, or a file: CSV, or npz with ``X`` and ``y``.

All methods have the same kernel, with a lengthscale for each column, the same start, and ``--budget`` seconds of
optimisation after the first evaluation: L-BFGS on the bound or likelihood of all rows, or minibatches. Inputs and
target are standardised, and so are the errors. Every method runs in a process of its own, so that its memory can be
told.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from numpyro.contrib.hsgp.laplacian import eigenfunctions
from numpyro.contrib.hsgp.spectral_densities import (
    diag_spectral_density_matern,
    diag_spectral_density_squared_exponential,
)
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

import npgp
import npgp.inducing
from npgp import datasets
from npgp.neighbors import nearest

KERNELS = {"matern32": npgp.Matern32, "rbf": npgp.RBF}
#: Start, for standardised data: lengthscales at this share of √D, variance and noise variance.
LENGTHSCALE, VARIANCE, NOISE = 0.7, 1.0, 0.1
#: Logs of lengthscales, variance and noise variance stay within these.
LOG_BOUNDS = (-9.0, 7.0)
#: HSGP's box, in units of the largest input; and the most columns it is for.
BOX, HSGP_COLUMNS = 1.5, 3
#: Random cosines of which the simulated function is made.
COSINES = 4096

NOTE = (
    "RMSE and NLPD (negative log predictive density): of test rows, standardised target. Per row: a lower bound or a "
    "log density of the training rows. Bounds compare with one another and with the log evidence; the density of "
    "another model may lie above that. Fit: set-up and compilation included. Predict: all test rows, once compiled. "
    "MiB: the most that the method's own process held beyond what it did before, compilation included."
)

Params = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """
    What people are told of a method.

    :param title: its name.
    :param value: what is printed of the model: a lower bound on the log evidence, or a log density.
    :param advice: when to take it, in one line.
    """

    title: str
    value: str
    advice: str


BOUND, DENSITY = "lower bound", "density of its own model"
METHODS = {
    "exact": Method(
        "exact GP",
        "log evidence",
        "up to a few thousand rows: nothing to choose, and what the others approximate. O(N³) time, O(N²) memory.",
    ),
    "sgpr": Method(
        "SGPR",
        BOUND,
        "smooth functions: M points must cover the inputs at the distance of a lengthscale. A bound, so it is safe to "
        "optimise and to compare.",
    ),
    "solve": Method(
        "SOLVE-GP, tight",
        BOUND,
        "as SGPR, with the points in two blocks and the tighter conditional: a better bound as a rule, and "
        "cheaper from M = 256 on.",
    ),
    "fitc": Method(
        "FITC",
        DENSITY,
        "where noise differs between regions, or densities of test rows count most. No bound: it may be above the "
        "exact evidence, and its noise too small.",
    ),
    "nngp": Method(
        "NNGP, responses",
        DENSITY,
        "many rows, few columns, short lengthscales: maps. No inducing points to run out of; O(N k³) time, O(N k) "
        "memory. Gaussian noise; npgp.NNGP for others.",
    ),
    "svgp": Method(
        "SVGP, minibatches",
        BOUND,
        "any likelihood, more rows than fit in memory, or GPs within larger models. As smooth as SGPR; needs thousands "
        "of steps.",
    ),
    "vnngp": Method(
        "VNNGP, minibatches",
        "lower bound for the NNGP",
        "as NNGP, with any likelihood, in minibatches: every row is an inducing point. q is mean-field, so variances "
        "come out small where neighbours are strongly correlated.",
    ),
    "hsgp": Method(
        "HSGP (NumPyro)",
        DENSITY,
        "one or two columns, and lengthscales that are long beside the domain over the functions per column: the "
        "cheapest of all. Shorter ones it cannot see.",
    ),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", metavar="DATA", help="snelson, spatial, a UCI set of npgp.datasets, or a file")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="these alone; all that fit if omitted")
    parser.add_argument("--kernel", choices=KERNELS, default="matern32")
    parser.add_argument(
        "--budget", type=float, default=30.0, metavar="SECONDS", help="of optimisation, for each method"
    )
    parser.add_argument("--cpu-time", action="store_true", help="seconds are of the processor: for a busy machine")
    parser.add_argument("--steps", type=int, help="at most so many iterations; without minibatches 1000 if omitted")
    parser.add_argument("--inducing", type=int, default=128, help="M, an even number; HSGP has as many functions")
    parser.add_argument("--neighbours", type=int, default=15, help="k of nearest-neighbour methods")
    parser.add_argument("--batch-size", type=int, default=1024, help="rows per step of minibatches")
    parser.add_argument("--learning-rate", type=float, default=0.03, help="of Adam, which then decays")
    parser.add_argument("--exact-rows", type=int, default=2000, help="no exact GP for more rows than this")
    parser.add_argument("--rows", type=int, help="training rows: of spatial (10,000), or a random subset of others")
    parser.add_argument("--lengthscale", type=float, default=0.03, help="of the function on spatial's unit square")
    parser.add_argument("--split", type=int, default=0, help="train/test split of a UCI set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float32", action="store_true", help="single precision: faster, coarser optima")
    parser.add_argument("--here", action="store_true", help="all in this process: quicker, and memory is not told")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # the data of one method's own process
    parser.add_argument("--out", type=Path, default=Path("out/frontier.png"), help="the picture")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.inducing < 2 or args.inducing % 2:
        parser.error("--inducing must be a positive even number.")
    counts = (args.neighbours, args.batch_size, *(n for n in (args.rows, args.steps) if n is not None))
    if min(counts) < 1 or min(args.budget, args.lengthscale, args.learning_rate) <= 0.0:
        parser.error("counts, seconds, rates and lengthscales must be positive.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Data


class Data(NamedTuple):
    """Standardised rows."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def simulate(rows: int, lengthscale: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Sites of the unit square and noisy values of a function of variance 1 there, noise variance .1.

    The function is a sum of random cosines whose covariance is Matérn-3/2: no method's own prior is favoured.
    """
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(rows, 2))
    # The spectral density of Matérn-3/2 is that of a Student-t with three degrees of freedom.
    frequencies = rng.normal(size=(COSINES, 2)) * np.sqrt(3.0 / rng.chisquare(3, COSINES))[:, None] / lengthscale
    phases = rng.uniform(0.0, 2.0 * np.pi, COSINES)
    parts = np.array_split(X, -(-rows // 2000))
    f = np.concatenate([np.cos(part @ frequencies.T + phases).sum(1) for part in parts]) * math.sqrt(2.0 / COSINES)
    return X, f + math.sqrt(0.1) * rng.normal(size=rows)


def read(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {key: np.asarray(arrays[key], np.float64) for key in arrays.files if arrays[key].dtype.kind in "iuf"}
    with open(path, encoding="utf-8") as file:
        first = file.readline().strip().split(",")
    try:
        [float(v) for v in first]
    except ValueError:
        heading = 1
    else:
        heading = 0
    table = np.loadtxt(path, delimiter=",", skiprows=heading, ndmin=2)
    return {"X": table[:, :-1], "y": table[:, -1]}


def load(args: argparse.Namespace) -> Data:
    """The data set, a tenth of its rows kept for testing if there is no split, standardised by the training rows."""
    rng = np.random.default_rng(args.seed)
    if args.data in datasets.UCI_NAMES:
        data = datasets.uci(args.data, args.split)
        arrays = [data.X_train, data.y_train, data.X_test, data.y_test]
    else:
        if args.data == "snelson":
            X, y, _ = datasets.snelson()
        elif args.data == "spatial":
            rows = args.rows or 10_000
            X, y = simulate(rows + max(rows // 10, 1), args.lengthscale, args.seed)
        else:
            path = Path(args.data)
            if not path.is_file():
                names = "snelson, spatial, a name of npgp.datasets.UCI_NAMES or a file"
                raise SystemExit(f"DATA is {args.data!r}; it must be {names}.")
            found = read(path)
            if not {"X", "y"} <= set(found) or found["X"].ndim != 2 or found["y"].shape != found["X"].shape[:1]:
                raise SystemExit(f"{path} has no X of shape (rows, columns) and y of shape (rows,).")
            X, y = found["X"], found["y"]
        order = rng.permutation(len(y))
        test, train = np.split(order, [max(len(y) // 11 if args.data == "spatial" else len(y) // 10, 1)])
        arrays = [X[train], y[train], X[test], y[test]]
    if args.rows and len(arrays[1]) > args.rows:
        rows = np.sort(rng.choice(len(arrays[1]), args.rows, replace=False))
        arrays[:2] = [a[rows] for a in arrays[:2]]
    moments = [(a.mean(axis=0), np.where(a.std(axis=0) > 0.0, a.std(axis=0), 1.0)) for a in arrays[:2]]
    return Data(*((a - moments[i % 2][0]) / moments[i % 2][1] for i, a in enumerate(arrays)))


# ---------------------------------------------------------------------------------------------------------------
# The models at given parameters


@dataclass(frozen=True)
class ExactGP:
    """The GP itself, by a dense factor of K + σ² I."""

    kernel: Any
    X: jax.Array
    noise: jax.Array

    def log_prob(self, y):
        return npgp.exact_log_evidence(self.kernel, self.X, y, self.noise)

    def predict(self, y, X):
        L = jnp.linalg.cholesky(self.kernel(self.X) + self.noise * jnp.eye(len(y)))
        A, z = (solve_triangular(L, v, lower=True) for v in (self.kernel(self.X, X), y))
        return A.T @ z, self.kernel.diag(X) - jnp.sum(jnp.square(A), axis=0)


@dataclass(frozen=True)
class HilbertSpaceGP:
    """
    NumPyro's Hilbert-space approximation: fixed functions of x, whose weights are independent and integrated out.

    :param features: the functions at the training rows, (N, M).
    :param spectrum: the weights' prior variances, (M,).
    :param functions: per column.
    """

    features: jax.Array
    spectrum: jax.Array
    box: jax.Array
    functions: int
    noise: jax.Array

    def log_prob(self, y):
        factor, noise = self.features * jnp.sqrt(self.spectrum), jnp.broadcast_to(self.noise, y.shape)
        return dist.LowRankMultivariateNormal(jnp.zeros_like(y), factor, noise).log_prob(y)

    def predict(self, y, X):
        A, new = (
            (phi * jnp.sqrt(self.spectrum)).T for phi in (self.features, eigenfunctions(X, self.box, self.functions))
        )
        L = jnp.linalg.cholesky(A @ A.T + self.noise * jnp.eye(len(A)))
        B, z = (solve_triangular(L, v, lower=True) for v in (new, A @ y))
        return B.T @ z, self.noise * jnp.sum(jnp.square(B), axis=0)


def kernel_and_noise(params: Params, kernel: str) -> tuple[Any, jax.Array]:
    lengthscale, variance, noise = (jnp.exp(params[key]) for key in ("lengthscale", "variance", "noise"))
    return KERNELS[kernel](lengthscale, variance), noise


def model_of(name: str, params: Params, X: jax.Array, fixed: Params, kernel: str) -> Any:
    """
    A method's model of all rows.

    :param params: logs of lengthscales, variance and noise variance, and inducing inputs.
    :param fixed: what is not learned, as :func:`prepare` makes it.
    """
    k, noise = kernel_and_noise(params, kernel)
    if name == "exact":
        return ExactGP(k, X, noise)
    if name == "sgpr":
        return npgp.CollapsedGP(k, X, params["inducing"], noise, conditional="prior")
    if name == "solve":
        return npgp.CollapsedGP(k, X, params["inducing"], noise, conditional="tight")
    if name == "fitc":
        return npgp.ApproximateGP(k, X, params["inducing"], noise, method="fitc")
    if name == "nngp":
        return npgp.ResponseNNGP(k, X, noise, fixed["neighbors"])
    columns, functions = X.shape[1], round(fixed["features"].shape[1] ** (1 / X.shape[1]))
    lengthscale, variance = jnp.exp(params["lengthscale"]), jnp.exp(params["variance"])
    if kernel == "rbf":
        spectrum = diag_spectral_density_squared_exponential(variance, lengthscale, fixed["box"], functions, columns)
    else:
        spectrum = diag_spectral_density_matern(1.5, variance, lengthscale, fixed["box"], functions, columns)
    return HilbertSpaceGP(fixed["features"], spectrum, fixed["box"], functions, noise)


#: Methods that are trained in minibatches.
MINIBATCHES = ("svgp", "vnngp")


def component_of(name: str, kernel: Any, start: Params, fixed: Params, batch_size: int) -> Any:
    """A method's component of a model that is trained in minibatches."""
    if name == "svgp":
        return npgp.SparseGP("f", kernel, numpyro.param("inducing", start["inducing"]))
    return npgp.VNNGP("f", kernel, fixed["X"], fixed["neighbors"], batch_size, init_loc=fixed["y"], init_scale=0.5)


# ---------------------------------------------------------------------------------------------------------------
# Fits


class Fit(NamedTuple):
    """
    A fitted model.

    :param params: logs of lengthscales, variance and noise variance, and inducing inputs.
    :param value: the bound or log density, for each training row.
    :param predict: from test inputs to mean and variance of f.
    :param evaluations: of the gradient.
    :param aside: seconds that are no part of the fit.
    """

    params: Params
    value: float
    predict: Callable[[np.ndarray], tuple[jax.Array, jax.Array]]
    evaluations: int
    aside: float = 0.0


def start_of(name: str, data: Data, args: argparse.Namespace) -> Params:
    """The start: inducing inputs by k-means, and a second block greedily given the first."""
    dtype, columns = data.X.dtype, data.X.shape[1]
    params: Params = {
        "lengthscale": jnp.full(columns, math.log(LENGTHSCALE * math.sqrt(columns)), dtype),
        "variance": jnp.asarray(math.log(VARIANCE), dtype),
        "noise": jnp.asarray(math.log(NOISE), dtype),
    }
    size = min(args.inducing, len(data.y) // 2 * 2)
    if name in ("sgpr", "fitc", "svgp"):
        params["inducing"] = npgp.inducing.kmeans(data.X, size, args.seed)
    elif name == "solve":
        first = npgp.inducing.kmeans(data.X, size // 2, args.seed)
        kernel, _ = kernel_and_noise(params, args.kernel)
        params["inducing"] = [first, npgp.inducing.greedy_variance(kernel, data.X, size // 2, given=[first])]
    return params


def prepare(name: str, data: Data, params: Params, args: argparse.Namespace) -> Params:
    """What a method needs besides parameters: neighbours in units of the lengthscales, or features in a box."""
    if name in ("nngp", "vnngp"):
        scale = np.exp(params["lengthscale"])
        return {"X": data.X, "y": data.y, "neighbors": npgp.nearest_before(data.X, args.neighbours, scale=scale)}
    if name == "hsgp":
        columns = data.X.shape[1]
        box = BOX * np.max(np.abs(np.concatenate([data.X, data.X_test])), axis=0)[:, None]
        functions = max(round(args.inducing ** (1.0 / columns)), 1)
        return {"box": jnp.asarray(box), "features": eigenfunctions(data.X, jnp.asarray(box), functions)}
    return {}


def fit_all_rows(name: str, data: Data, args: argparse.Namespace) -> Fit:
    """By L-BFGS on the bound or likelihood of all rows. Neighbours are found twice, at the start and half-way."""

    @jax.jit
    @jax.value_and_grad
    def loss(params, X, y, fixed):
        return -model_of(name, params, X, fixed, args.kernel).log_prob(y) / len(y)

    params, evaluations = start_of(name, data, args), 0
    rounds = 2 if name == "nngp" else 1
    for _ in range(rounds):
        fixed = prepare(name, data, params, args)
        budget = args.budget / rounds, (args.steps or 1000) / rounds
        params, taken = lbfgs(
            lambda params, fixed=fixed: loss(params, data.X, data.y, fixed), params, *budget, clock(args)
        )
        evaluations += taken
    fixed = prepare(name, data, params, args)
    value = -float(loss(params, data.X, data.y, fixed)[0])

    @jax.jit
    def moments(params, X, y, fixed, new, near):
        model = model_of(name, params, X, fixed, args.kernel)
        if hasattr(model, "predict"):
            return model.predict(y, new)
        return model.condition(y).mean_and_variance(new, *near)

    def predict(new):
        near: tuple[np.ndarray, ...] = ()
        if name == "nngp":
            near = (nearest(new, data.X, min(args.neighbours, len(data.y)), scale=np.exp(params["lengthscale"])),)
        return moments(params, data.X, data.y, fixed, new, near)

    return Fit(params, value, predict, evaluations)


class OutOfTime(Exception):
    pass


def lbfgs(
    loss: Callable, start: Params, seconds: float, steps: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[Params, int]:
    """
    Minimise from a start, for so long; the best params seen, and how often the loss was evaluated.

    :param loss: from params to the value and its gradient; compiled before the clock starts.
    """
    flat, restore = ravel_pytree(start)
    is_log, _ = ravel_pytree(
        {key: jax.tree.map(jnp.zeros_like if key == "inducing" else jnp.ones_like, v) for key, v in start.items()}
    )
    best = [math.inf, np.asarray(flat)]
    count = 0

    def numpy_loss(theta):
        nonlocal count, best
        if count and clock() > end:
            raise OutOfTime
        value, slope = loss(restore(jnp.asarray(theta, flat.dtype)))
        count += 1
        if value < best[0]:
            best = [float(value), theta.copy()]
        return float(value), np.asarray(ravel_pytree(slope)[0], float)

    jax.block_until_ready(loss(start))
    end = clock() + seconds
    bounds = [LOG_BOUNDS if log else (None, None) for log in np.asarray(is_log)]
    options = {"maxiter": max(int(steps), 1), "maxfun": 2 * max(int(steps), 1), "ftol": 1e-9, "gtol": 1e-6}
    try:
        minimize(numpy_loss, np.asarray(flat, float), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    except OutOfTime:
        pass
    return restore(jnp.asarray(best[1], flat.dtype)), count


def fit_minibatches(name: str, data: Data, args: argparse.Namespace) -> Fit:
    """By Adam on random batches, as many steps as there is time for; SVGP's q(ε) by natural gradients."""
    start, rows, key, now = start_of(name, data, args), len(data.y), jax.random.key(args.seed), clock(args)
    fixed = prepare(name, data, start, args)
    batch = min(args.batch_size, rows)

    def model(X, near, y=None):
        positive = constraints.softplus_positive
        values = {
            key: numpyro.param(key, jnp.exp(start[key]), constraint=positive)
            for key in ("lengthscale", "variance", "noise")
        }
        kernel = KERNELS[args.kernel](values["lengthscale"], values["variance"])
        f = component_of(name, kernel, start, fixed, batch).draw()
        with npgp.plate("data", rows, rows=X.shape[0]):
            npgp.observe("y", f(X) if near is None else f(X, near), npgp.Gaussian(values["noise"]), obs=y)

    def trainer(steps):
        adam = npgp.adam(args.learning_rate, steps)
        optimiser = npgp.natural_gradient(0.1, adam) if name == "svgp" else adam
        return SVI(model, npgp.AutoSparseGP(model), optimiser, TraceMeanField_ELBO())

    # VNNGP's rows are its inducing points.
    arrays = (data.X, np.arange(rows, dtype=np.int32)[:, None] if name == "vnngp" else None, data.y)
    began = now()
    steps = args.steps or steps_in(trainer(None), [a if a is None else a[:batch] for a in arrays], args.budget, now)
    aside, svi = now() - began, trainer(steps)
    result = npgp.fit(svi, key, steps, *arrays, batch_size=batch, progress=False)
    # Batches of one epoch, which leave out fewer rows than there are in a batch.
    value, _ = npgp.evaluate(svi, key, result, *arrays, num_draws=max(rows // batch, 2), batch_size=batch)
    params = {key: jnp.log(result.params[key]) for key in ("lengthscale", "variance", "noise")}
    params |= {"inducing": result.params["inducing"]} if name == "svgp" else {}
    posterior = npgp.posterior(
        "f", model, svi.guide, result.params, *(a if a is None else a[:batch] for a in arrays[:2])
    )
    moments = jax.jit(lambda posterior, *new: posterior.mean_and_variance(*new))

    def predict(new):
        near = (
            ()
            if name == "svgp"
            else (nearest(new, data.X, min(args.neighbours, rows), scale=fixed["neighbors"].scale),)
        )
        return moments(posterior, new, *near)

    return Fit(params, value / rows, predict, steps, aside)


def steps_in(svi: SVI, arrays: Sequence[Any], seconds: float, now: Callable[[], float], some: int = 10) -> int:
    """How many steps there is time for, by the speed of a few."""
    state = svi.init(jax.random.key(0), *arrays)
    step = jax.jit(lambda state, arrays: svi.update(state, *arrays)[0])
    state = jax.block_until_ready(step(state, arrays))
    began = now()
    for _ in range(some):
        state = step(state, arrays)
    jax.block_until_ready(state)
    return max(int(seconds * some / (now() - began)), 1)


def fit_one(name: str, data: Data, args: argparse.Namespace) -> tuple[dict[str, Any], Fit]:
    """Fit and predict; the figures, and the fit."""
    before, now = peak_memory(), clock(args)
    began = now()
    fit = (fit_minibatches if name in MINIBATCHES else fit_all_rows)(name, data, args)
    fitted = now()
    jax.block_until_ready(fit.predict(data.X_test))  # compiles
    predicting = now()
    mean, variance = (np.asarray(v, float) for v in jax.block_until_ready(fit.predict(data.X_test)))
    done = now()
    noise = float(np.exp(fit.params["noise"]))
    total, error = variance + noise, data.y_test - mean
    return {
        "rmse": float(np.sqrt(np.mean(np.square(error)))),
        "nlpd": float(np.mean(0.5 * (np.log(2.0 * np.pi * total) + np.square(error) / total))),
        "value_per_row": fit.value,
        "value_is": METHODS[name].value,
        "fit_seconds": fitted - began - fit.aside,
        "predict_seconds": done - predicting,
        "memory_mib": None if args.here else peak_memory() - before,
        "evaluations": fit.evaluations,
        "lengthscale": np.exp(fit.params["lengthscale"]).tolist(),
        "variance": float(np.exp(fit.params["variance"])),
        "noise_variance": noise,
    }, fit


def clock(args: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if args.cpu_time else time.perf_counter


def peak_memory() -> float:
    """The most memory that this process has held so far, MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def in_its_own_process(name: str, data: Data, argv: Sequence[str]) -> dict[str, Any]:
    """The same figures from a fresh process, whose memory is that of one method."""
    with tempfile.TemporaryDirectory() as folder:
        rows, figures = Path(folder, "data.npz"), Path(folder, "figures.json")
        np.savez(rows, **data._asdict())
        command = [sys.executable, __file__, *argv, "--methods", name, "--json", str(figures), "--child", str(rows)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(figures.read_text())


def reason_against(name: str, data: Data, args: argparse.Namespace) -> str | None:
    """Why a method is left out, unless it is asked for by name."""
    rows, columns = data.X.shape
    if name == "hsgp" and columns > HSGP_COLUMNS:
        return f"{columns} columns; its functions are a grid of all columns, for {HSGP_COLUMNS} at most"
    if args.methods is not None:
        return None
    if name == "exact" and rows > args.exact_rows:
        return f"{rows} rows, more than --exact-rows {args.exact_rows}"
    if name in MINIBATCHES and rows < 2 * args.batch_size:
        return f"{rows} rows need no minibatches of {args.batch_size}"
    return None


# ---------------------------------------------------------------------------------------------------------------
# What people look at


def table(figures: Mapping[str, dict[str, Any]]) -> str:
    heads = ("", "RMSE", "NLPD", "per row", "which is", "fit s", "predict s", "MiB", "evaluations")
    lines = [heads]
    for name, f in figures.items():
        memory = "" if f["memory_mib"] is None else f"{f['memory_mib']:.0f}"
        numbers = (f"{f['rmse']:.4f}", f"{f['nlpd']:.4f}", f"{f['value_per_row']:.4f}", f["value_is"])
        times = (f"{f['fit_seconds']:.1f}", f"{f['predict_seconds']:.3f}", memory, str(f["evaluations"]))
        lines.append((METHODS[name].title, *numbers, *times))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for line in lines:
        cells = [
            cell.ljust(w) if i in (0, 4) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)


def frontier(figures: Mapping[str, dict[str, Any]], key: str) -> list[str]:
    """The methods that no other beats both in time and in this figure, fastest first."""
    best, names = math.inf, []
    for name in sorted(figures, key=lambda n: figures[n]["fit_seconds"]):
        if figures[name][key] < best:
            best = figures[name][key]
            names.append(name)
    return names


def draw(figures: Mapping[str, dict[str, Any]], title: str, unit: str = "seconds"):
    """NLPD and RMSE against the time of the fit, a point for each method, and a line through the best."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter

    from npgp.plots import COLOURS

    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.9), layout="constrained")
    labels = {"nlpd": "test NLPD, nats per row", "rmse": "test RMSE, standardised"}
    handles: list[Any] = []
    for ax, (key, label) in zip(axes, labels.items(), strict=True):
        handles = []
        for i, name in enumerate(METHODS):
            if name in figures:
                f = figures[name]
                style = {"color": (*COLOURS, "0.1", "0.5")[i], "marker": "oDs^vP*X"[i], "ms": 8, "ls": ""}
                handles += ax.plot(f["fit_seconds"], f[key], label=METHODS[name].title, zorder=3, **style)
        best = frontier(figures, key)
        times, values = ([figures[name][k] for name in best] for k in ("fit_seconds", key))
        ax.plot(
            [*times, max(f["fit_seconds"] for f in figures.values())],
            [*values, values[-1]],
            color="0.7",
            zorder=2,
            drawstyle="steps-post",
        )
        ax.set(xscale="log", xlabel=f"fit, {unit} (with set-up and compilation)", ylabel=label)
        ax.grid(color="0.93", lw=0.7)
        ax.set_axisbelow(True)
        ax.margins(0.12)
        for axis in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
            axis(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
    line = plt.Line2D([], [], color="0.7", label="best in the time")
    figure.legend(handles=[*handles, line], loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def report_on(data: Data, args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    figures, skipped = {}, {}
    for name in args.methods or METHODS:
        if reason := reason_against(name, data, args):
            skipped[name] = reason
            print(f"{METHODS[name].title} is left out: {reason}.", flush=True)
            continue
        if args.here or args.child:
            figures[name] = fit_one(name, data, args)[0]
        else:
            figures[name] = in_its_own_process(name, data, argv)["methods"][name]
        f = figures[name]
        print(f"{METHODS[name].title}: NLPD {f['nlpd']:.4f}, {f['fit_seconds']:.1f} s", flush=True)
    keys = ("kernel", "budget", "cpu_time", "steps", "inducing", "neighbours", "seed", "float32")
    settings = {key: getattr(args, key) for key in keys}
    shape = {"rows": len(data.y), "test_rows": len(data.y_test), "columns": data.X.shape[1]}
    return {"data": args.data, **shape, **settings, "methods": figures, "skipped": skipped}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    jax.config.update("jax_enable_x64", not args.float32)
    dtype = np.float32 if args.float32 else np.float64
    data = Data(*(np.asarray(a, dtype) for a in (np.load(args.child).values() if args.child else load(args))))
    if not args.child:
        budget = f"{args.budget:g} {'CPU ' * args.cpu_time}s" + (f" or {args.steps} steps" if args.steps else "")
        print(
            f"{args.data}: {len(data.y)} training and {len(data.y_test)} test rows, {data.X.shape[1]} columns; "
            f"{args.kernel}, M = {args.inducing}, k = {args.neighbours}, {dtype.__name__}; {budget} for each method\n"
        )
    with threadpool_limits(limits=1, user_api="blas"):
        report = report_on(data, args, argv)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.child or not report["methods"]:
        return report
    print(f"\n{table(report['methods'])}\n")
    print(textwrap.fill(NOTE, 118), end="\n\n")
    for name in report["methods"]:
        print(textwrap.fill(f"{METHODS[name].title}: {METHODS[name].advice}", 118, subsequent_indent="    "))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    title = f"{args.data}: {report['rows']} training rows, {report['columns']} columns"
    draw(report["methods"], title, "CPU seconds" if args.cpu_time else "seconds").savefig(args.out, dpi=130)
    print(f"\nwrote {args.out}" + (f" and {args.json}" if args.json else ""))
    return report


if __name__ == "__main__":
    main()
