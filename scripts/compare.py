#!/usr/bin/env python
"""Which approximation? Fits the exact GP and its approximations to one data set, from one start and in equal time.

    python scripts/compare.py my.csv --budget 60
    python scripts/compare.py spatial --rows 10000
    NPGP_DATA=... python scripts/compare.py kin8nm --json out/kin8nm.json

DATA is a file, CSV, whose last column is the target, or npz with ``X`` and ``y``; ``snelson``, ``spatial`` (simulated
sites, short lengthscale), or a name of ``npgp.datasets.UCI_NAMES``. All methods have the same kernel, with a
lengthscale for each column, the same start, and ``--budget`` seconds of optimization after the first evaluation: L-BFGS
on the bound or likelihood of all rows, or minibatches. Inputs and target are standardized, and so are the errors.
"""

from __future__ import annotations

import argparse
import math
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

import npgp
import npgp.inducing
from common import Arguments, clock, note, one_blas_thread, scores, table, whole, write_json, write_picture
from npgp import datasets
from npgp.neighbors import nearest

# ---------------------------------------------------------------------------------------------------------------
# Data


#: Random cosines of which the simulated function is made.
COSINES = 4096


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


class Data(NamedTuple):
    """Standardized rows."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


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
    """The data set, a tenth of its rows kept for testing if there is no split, standardized by the training rows."""
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
# Methods


#: The most columns that HSGP is for.
HSGP_COLUMNS = 3

#: Methods that are trained in minibatches.
MINIBATCHES = ("svgp", "vnngp")


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
        "optimize and to compare.",
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
        "memory. Gaussian noise; npgp.neighbors.NNGP for others.",
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
        "come out small where neighbors are strongly correlated.",
    ),
    "hsgp": Method(
        "HSGP (NumPyro)",
        DENSITY,
        "one or two columns, and lengthscales that are long beside the domain over the functions per column: the "
        "cheapest of all. Shorter ones it cannot see.",
    ),
}


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


KERNELS = {"matern32": npgp.Matern32, "rbf": npgp.RBF}

#: Start, for standardized data: lengthscales at this share of √D, variance and noise variance.
LENGTHSCALE, VARIANCE, NOISE = 0.7, 1.0, 0.1

#: HSGP's box, in units of the largest input.
BOX = 1.5

Params = dict[str, Any]


@dataclass(frozen=True)
class ExactGP:
    """The GP itself, by a dense factor of K + σ² I."""

    kernel: Any
    X: jax.Array
    noise: jax.Array

    def log_prob(self, y):
        return npgp.exact_log_evidence(self.kernel, self.X, y, noise_variance=self.noise)

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
    return KERNELS[kernel](lengthscale, variance=variance), noise


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
        return npgp.CollapsedGP(k, X, params["inducing"], noise_variance=noise, conditional="prior")
    if name == "solve":
        return npgp.CollapsedGP(k, X, params["inducing"], noise_variance=noise, conditional="tight")
    if name == "fitc":
        return npgp.ApproximateGP(k, X, params["inducing"], noise_variance=noise, method="fitc")
    if name == "nngp":
        return npgp.neighbors.ResponseNNGP(k, X, fixed["neighbors"], noise_variance=noise)
    columns, functions = X.shape[1], round(fixed["features"].shape[1] ** (1 / X.shape[1]))
    lengthscale, variance = jnp.exp(params["lengthscale"]), jnp.exp(params["variance"])
    if kernel == "rbf":
        spectrum = diag_spectral_density_squared_exponential(variance, lengthscale, fixed["box"], functions, columns)
    else:
        spectrum = diag_spectral_density_matern(1.5, variance, lengthscale, fixed["box"], functions, columns)
    return HilbertSpaceGP(fixed["features"], spectrum, fixed["box"], functions, noise)


def component_of(name: str, kernel: Any, start: Params, fixed: Params, batch_size: int) -> Any:
    """A method's component of a model that is trained in minibatches."""
    if name == "svgp":
        return npgp.SparseGP("f", kernel, numpyro.param("inducing", start["inducing"]))
    options = dict(batch_size=batch_size, init_loc=fixed["y"], init_scale=0.5)
    return npgp.VNNGP("f", kernel, fixed["X"], fixed["neighbors"], **options)


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
        params["inducing"] = npgp.inducing.kmeans(jax.random.key(args.seed), data.X, size)
    elif name == "solve":
        first = npgp.inducing.kmeans(jax.random.key(args.seed), data.X, size // 2)
        kernel, _ = kernel_and_noise(params, args.kernel)
        params["inducing"] = [first, npgp.inducing.greedy_variance(kernel, data.X, size // 2, given=[first])]
    return params


def prepare(name: str, data: Data, params: Params, args: argparse.Namespace) -> Params:
    """What a method needs besides parameters: neighbors in units of the lengthscales, or features in a box."""
    if name in ("nngp", "vnngp"):
        scale = np.exp(params["lengthscale"])
        return {
            "X": data.X,
            "y": data.y,
            "neighbors": npgp.neighbors.nearest_before(data.X, args.neighbors, scale=scale),
        }
    if name == "hsgp":
        columns = data.X.shape[1]
        box = BOX * np.max(np.abs(np.concatenate([data.X, data.X_test])), axis=0)[:, None]
        functions = max(round(args.inducing ** (1.0 / columns)), 1)
        return {"box": jnp.asarray(box), "features": eigenfunctions(data.X, jnp.asarray(box), functions)}
    return {}


# ---------------------------------------------------------------------------------------------------------------
# Fits


#: Logs of lengthscales, variance and noise variance stay within these.
LOG_BOUNDS = (-9.0, 7.0)


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


def neighbors_of(new: np.ndarray, name: str, data: Data, fixed: Params) -> tuple[np.ndarray, ...]:
    """What a method's predictions at new inputs need besides: the nearest of the training rows, or nothing."""
    if name not in ("nngp", "vnngp"):
        return ()
    known = fixed["neighbors"]
    return (nearest(new, data.X, min(known.size, len(data.y)), scale=known.scale),)


def fit_all_rows(name: str, data: Data, args: argparse.Namespace) -> Fit:
    """By L-BFGS on the bound or likelihood of all rows. Neighbors are found twice, at the start and half-way."""

    @jax.jit
    @jax.value_and_grad
    def loss(params, X, y, fixed):
        return -model_of(name, params, X, fixed, args.kernel).log_prob(y) / len(y)

    params, evaluations = start_of(name, data, args), 0
    rounds = 2 if name == "nngp" else 1
    for _ in range(rounds):
        fixed = prepare(name, data, params, args)
        budget = args.budget / rounds, (args.steps or 1000) / rounds
        here = lambda params, fixed=fixed: loss(params, data.X, data.y, fixed)  # noqa: E731
        params, taken = lbfgs(here, params, *budget, clock(args.cpu_time))
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
        return moments(params, data.X, data.y, fixed, new, neighbors_of(new, name, data, fixed))

    return Fit(params, value, predict, evaluations)


class OutOfTime(Exception):
    pass


def lbfgs(
    loss: Callable, start: Params, seconds: float, steps: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[Params, int]:
    """
    Minimize from a start, for so long; the best params seen, and how often the loss was evaluated.

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
    start, rows, key, now = start_of(name, data, args), len(data.y), jax.random.key(args.seed), clock(args.cpu_time)
    fixed = prepare(name, data, start, args)
    batch = min(args.batch_size, rows)

    def model(X, near, y=None):
        positive = constraints.softplus_positive
        values = {
            key: numpyro.param(key, jnp.exp(start[key]), constraint=positive)
            for key in ("lengthscale", "variance", "noise")
        }
        kernel = KERNELS[args.kernel](values["lengthscale"], variance=values["variance"])
        f = component_of(name, kernel, start, fixed, batch).draw()
        with npgp.plate("data", rows, rows=X.shape[0]):
            npgp.observe("y", f(X) if near is None else f(X, near), npgp.Gaussian(variance=values["noise"]), obs=y)

    def trainer(steps):
        adam = npgp.adam(args.learning_rate, steps)
        optimizer = npgp.natural_gradient(0.1, adam) if name == "svgp" else adam
        return SVI(model, npgp.AutoSparseGP(model), optimizer, TraceMeanField_ELBO())

    # VNNGP's rows are its inducing points.
    arrays = (data.X, np.arange(rows, dtype=np.int32)[:, None] if name == "vnngp" else None, data.y)
    began = now()
    some = [a if a is None else a[:batch] for a in arrays]
    steps = args.steps or steps_in(trainer(None), some, args.budget, now)
    aside, svi = now() - began, trainer(steps)
    result = npgp.fit(svi, key, steps, *arrays, batch_size=batch, progress=False)
    # Batches of one epoch, which leave out fewer rows than there are in a batch.
    value, _ = npgp.evaluate(svi, key, result, *arrays, num_draws=max(rows // batch, 2), batch_size=batch)
    params = {key: jnp.log(result.params[key]) for key in ("lengthscale", "variance", "noise")}
    params |= {"inducing": result.params["inducing"]} if name == "svgp" else {}
    posterior = npgp.posterior("f", model, svi.guide, result.params, *some[:2])
    moments = jax.jit(lambda posterior, *new: posterior.mean_and_variance(*new))

    def predict(new):
        return moments(posterior, new, *neighbors_of(new, name, data, fixed))

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
    now = clock(args.cpu_time)
    began = now()
    fit = (fit_minibatches if name in MINIBATCHES else fit_all_rows)(name, data, args)
    seconds = now() - began - fit.aside
    jax.block_until_ready(fit.predict(data.X_test))  # compiles
    began = now()
    mean, variance = jax.block_until_ready(fit.predict(data.X_test))
    predict_seconds, noise = now() - began, float(np.exp(fit.params["noise"]))
    rmse, nlpd = scores(mean, np.asarray(variance, float) + noise, data.y_test)
    return {
        "rmse": rmse,
        "nlpd": nlpd,
        "value_per_row": fit.value,
        "fit_seconds": seconds,
        "predict_seconds": predict_seconds,
        "evaluations": fit.evaluations,
        "lengthscale": np.exp(fit.params["lengthscale"]).tolist(),
        "variance": float(np.exp(fit.params["variance"])),
        "noise_variance": noise,
    }, fit


# ---------------------------------------------------------------------------------------------------------------
# What people look at


def frontier(figures: Mapping[str, dict[str, Any]], key: str) -> list[str]:
    """The methods that no other beats both in time and in this figure, fastest first."""
    best, names = math.inf, []
    for name in sorted(figures, key=lambda n: figures[n]["fit_seconds"]):
        if figures[name][key] < best:
            best = figures[name][key]
            names.append(name)
    return names


def draw(figures: Mapping[str, dict[str, Any]], title: str):
    """NLPD and RMSE against the time of the fit, a point for each method, and a line through the best."""
    from npgp.plots.figures import COLORS, MARKERS, subplots

    figure, axes = subplots(1, 2, figsize=(9.6, 3.9))
    for ax, key in zip(axes, ("nlpd", "rmse"), strict=True):
        for i, (name, f) in enumerate(figures.items()):
            style = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "ms": 8, "ls": ""}
            ax.plot(f["fit_seconds"], f[key], label=METHODS[name].title, zorder=3, **style)
        points = [(figures[name]["fit_seconds"], figures[name][key]) for name in frontier(figures, key)]
        ax.plot(*zip(*points, strict=True), color="0.7", zorder=2, drawstyle="steps-post", label="best in the time")
        ax.set(xscale="log", xlabel="seconds of the fit, with compilation", ylabel=f"test {key.upper()}, standardized")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("data", metavar="DATA", help="a file, snelson, spatial, or a UCI set of npgp.datasets")
    add("--methods", nargs="+", choices=list(METHODS), help="these alone; all that fit if omitted")
    add("--kernel", choices=KERNELS, default="matern32")
    add("--budget", type=float, default=30.0, metavar="SECONDS", help="of optimization, for each method")
    add("--neighbors", type=whole, default=15, metavar="K", help="of nearest-neighbor methods")
    add("--exact-rows", type=int, default=2000, help="no exact GP for more rows than this")
    add("--lengthscale", type=float, default=0.03, help="of the function on spatial's unit square")
    add("--split", type=int, default=0, help="train/test split of a UCI set")
    add("--out", type=Path, default=Path("out/compare.png"), help="the picture")
    parser.shared(
        "cpu-time",
        "seed",
        "float32",
        "json",
        steps=dict(help="at most so many iterations; without minibatches 1000 if omitted"),
        inducing=dict(default=128, help="an even number; HSGP has as many functions"),
        batch_size=1024,
        learning_rate=dict(default=0.03, help="of Adam, which then decays"),
        rows=dict(help="training rows: of spatial (10,000), or a random subset of others"),
    )
    args = parser.read(argv)
    if args.inducing % 2 or min(args.budget, args.lengthscale, args.learning_rate) <= 0.0:
        parser.error("--inducing must be even; seconds, rates and lengthscales must be positive.")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    jax.config.update("jax_enable_x64", not args.float32)
    data = Data(*(np.asarray(a, np.float32 if args.float32 else np.float64) for a in load(args)))
    title = f"{args.data}: {len(data.y)} training rows, {data.X.shape[1]} columns"
    print(f"{title}, {len(data.y_test)} test rows; {args.kernel}, M = {args.inducing}, k = {args.neighbors}\n")
    figures, skipped = {}, {}
    with one_blas_thread():
        for name in args.methods or METHODS:
            if reason := reason_against(name, data, args):
                skipped[name] = reason
                print(f"{METHODS[name].title} is left out: {reason}.", flush=True)
                continue
            figures[name] = fit_one(name, data, args)[0]
            print(f"{METHODS[name].title}: NLPD {figures[name]['nlpd']:.4f}", flush=True)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "out", "methods")}
    report = {"settings": settings, "rows": len(data.y), "methods": figures, "skipped": skipped}
    write_json(args.json, report)
    if figures:
        lines = [
            (METHODS[name].title, *(f"{f[key]:.4f}" for key in ("rmse", "nlpd", "value_per_row")), METHODS[name].value)
            + (f"{f['fit_seconds']:.1f}", f"{f['predict_seconds']:.3f}", f["evaluations"])
            for name, f in figures.items()
        ]
        heads = ("", "RMSE", "NLPD", "per row", "which is", "fit s", "predict s", "evaluations")
        print(f"\n{table(heads, lines, left=(0, 4))}\n")
        note(
            "RMSE and NLPD (negative log predictive density): of test rows, standardized target. Per row: a lower "
            "bound or a log density of the training rows. Bounds compare with one another and with the evidence; the "
            "density of another model may lie above that. Fit: set-up and compilation included."
        )
        for name in figures:
            note(f"{METHODS[name].title}: {METHODS[name].advice}", indent="    ")
        write_picture(args.out, draw(figures, title))
    return report


if __name__ == "__main__":
    main()
