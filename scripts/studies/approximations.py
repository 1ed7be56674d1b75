"""Which approximation? The exact GP and its approximations, fitted to one set, from one start and in equal time."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
import npgp.inducing
from common import clock
from npgp import datasets
from npgp.neighbors import nearest, nearest_before
from regression_sets import RegressionSplit, split_at, uci
from studies.fits import KERNELS, Kind, condition, fit_collapsed, learned, scores
from studies.runner import Study

#: What is maximized on all rows, and its power; the rest goes by minibatches.
ALL_ROWS: dict[str, tuple[Kind, float]] = {
    "exact": (Kind("prior"), 1.0),
    "sgpr": (Kind("prior"), 1.0),
    "solve": (Kind("tight", blocks=2), 1.0),
    "fitc": (Kind("pep"), 1.0),
    "pep": (Kind("structured-pep"), 0.8),
    "nngp": (Kind("nngp"), 1.0),
    "vif": (Kind("vif"), 1.0),
}
#: Random cosines of which the simulated function is made; lengthscales start at this share of √D.
COSINES, LENGTHSCALE = 4096, 0.7


def matern_draw(rng: np.random.Generator, X: np.ndarray, lengthscale: float) -> np.ndarray:
    """A sum of random cosines, whose covariance is Matérn-3/2 of variance 1, at sites (N, 2)."""
    # The spectral density of Matérn-3/2 is that of a Student-t with three degrees of freedom.
    frequencies = rng.normal(size=(COSINES, 2)) * np.sqrt(3.0 / rng.chisquare(3, COSINES))[:, None] / lengthscale
    phases = rng.uniform(0.0, 2.0 * np.pi, COSINES)
    parts = np.array_split(X, -(-len(X) // 2000))
    return np.concatenate([np.cos(part @ frequencies.T + phases).sum(1) for part in parts]) * math.sqrt(2.0 / COSINES)


def simulate(rows: int, lengthscale: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Sites of the unit square and noisy values of a function of variance 1 there, noise variance .1. That is no draw from
    a GP, though nearly one: no method's own prior is favored.
    """
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(rows, 2))
    f = matern_draw(rng, X, lengthscale)
    return X, f + math.sqrt(0.1) * rng.normal(size=rows)


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """X and y of a file: npz, or CSV whose last column is y, with or without a heading."""
    if not path.is_file():
        raise SystemExit(f"A set is {path}; it must be snelson, spatial, one of NPGP_DATA or a file.")
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            X, y = (np.asarray(arrays[name], float) if name in arrays else np.zeros(()) for name in ("X", "y"))
    else:
        table = np.genfromtxt(path, delimiter=",", ndmin=2)
        table = table[~np.isnan(table).all(axis=1)]  # a heading
        X, y = table[:, :-1], table[:, -1]
    if X.ndim != 2 or y.shape != X.shape[:1] or not np.all(np.isfinite(X)) or not np.all(np.isfinite(y)):
        raise SystemExit(f"{path} has no X of shape (rows, columns) and y of shape (rows,), all finite numbers.")
    return X, y


@lru_cache(maxsize=1)
def load(name: str, split: int, most: int | None, lengthscale: float) -> RegressionSplit:
    """A tenth of the rows kept for testing if the set has no splits of its own; standardized by the training rows."""
    rng = np.random.default_rng(split)
    if name not in ("snelson", "spatial") and not Path(name).suffix:
        data = uci(name, split, standardize=False)
        X, y = np.concatenate([data.X_train, data.X_test]), np.concatenate([data.y_train, data.y_test])
        train, test = np.split(np.arange(len(y)), [len(data.y_train)])
        train = rng.permutation(train)
    else:
        if name == "spatial":
            X, y = simulate(11 * (most or 10_000) // 10, lengthscale, split)
        else:
            X, y = datasets.snelson()[:2] if name == "snelson" else read(Path(name))
        share = 11 if name == "spatial" else 10
        test, train = np.split(rng.permutation(len(y)), [max(len(y) // share, 1)])
    return split_at(X, y, train[:most], test)


def starting_points(X: np.ndarray, method: str, args: argparse.Namespace) -> np.ndarray:
    """By k-means, and a second block greedily given the first; none for those that have none."""
    if method in ("exact", "nngp", "vnngp"):
        return np.zeros((0, X.shape[1]))
    size, key = min(args.inducing, len(X) // 2 * 2), jax.random.key(args.seed)
    if method != "solve":
        return np.asarray(npgp.inducing.kmeans(key, X, size))
    first = npgp.inducing.kmeans(key, X, size // 2)
    kernel = KERNELS[args.kernel](np.full(X.shape[1], LENGTHSCALE * math.sqrt(X.shape[1])))
    return np.concatenate([first, npgp.inducing.greedy_variance(kernel, X, size // 2, given=[first])])


def _predicted(posterior: Any, X: jax.Array, neighbors: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    return posterior.mean_and_variance(X, neighbors=neighbors)


def by_all_rows(data: RegressionSplit, method: str, args: argparse.Namespace) -> tuple:
    """By L-BFGS. Neighbors are found at the start, half-way and at the end, in units of the lengthscales."""
    (kind, power), X, y, now = ALL_ROWS[method], data.X_train, data.y_train, clock(args.cpu_time)
    kind, D, evaluations = kind._replace(kernel=args.kernel), X.shape[1], 0
    logs = np.array([math.log(LENGTHSCALE * math.sqrt(D))] * D + [0.0, math.log(0.1)])
    theta = np.concatenate([logs, starting_points(X, method, args).ravel()])
    rounds = 2 if method in ("nngp", "vif") else 1

    def deadline() -> Callable[[], bool]:
        end = now() + args.budget / rounds
        return lambda: now() > end

    def which() -> dict[str, Any]:
        if method == "nngp":
            return {"scale": np.exp(theta[:D])}
        kernel = KERNELS[args.kernel](np.exp(theta[:D]), variance=np.exp(theta[D]))
        return {"kernel": kernel, "inducing": theta[D + 2 :].reshape(-1, D)}

    def neighbors():
        return nearest_before(X, args.neighbors, **which()) if rounds == 2 else None

    for _ in range(rounds):
        fit = fit_collapsed(data, neighbors(), kind, args, power, theta, deadline)
        theta, evaluations = fit.theta, evaluations + fit.evaluations
    known = neighbors()
    near = () if known is None else (nearest(data.X_test, X, min(known.size, len(X)), **which()),)
    posterior, predict = condition(theta, X, y, known, power, kind), jax.jit(_predicted)
    return fit.value, evaluations, fit.noise, lambda: predict(posterior, data.X_test, *near), 0.0


def by_minibatches(data: RegressionSplit, method: str, args: argparse.Namespace) -> tuple:
    """By Adam on random batches, as many steps as there is time for; SVGP's q(ε) by natural gradients."""
    X, y, key, now = data.X_train, data.y_train, jax.random.key(args.seed), clock(args.cpu_time)
    (rows, D), batch, neighbors = X.shape, min(args.batch_size, len(X)), None
    start: dict[str, Any] = {"lengthscale": np.full(D, LENGTHSCALE * math.sqrt(D)), "variance": 1.0, "noise": 0.1}
    if method == "svgp":
        start["inducing"] = starting_points(X, method, args)
    else:
        neighbors = nearest_before(X, args.neighbors, scale=start["lengthscale"])

    def model(X_batch, near, y=None):
        p = learned(start)
        kernel = KERNELS[args.kernel](p["lengthscale"], variance=p["variance"])
        if neighbors is None:
            f = npgp.SparseGP("f", kernel, p["inducing"]).draw()(X_batch)
        else:
            options: dict[str, Any] = dict(batch_size=batch, init_loc=data.y_train, init_scale=0.5)
            f = npgp.VNNGP("f", kernel, X, neighbors, **options).draw()(X_batch, near)
        with npgp.plate("data", rows, rows=len(X_batch)):
            npgp.observe("y", f, npgp.Gaussian(variance=p["noise"]), obs=y)

    def train(steps: int) -> tuple:
        adam = npgp.adam(args.learning_rate, steps)
        optimizer = npgp.natural_gradient(0.1, adam) if method == "svgp" else adam
        svi = SVI(model, npgp.AutoSparseGP(model), optimizer, TraceMeanField_ELBO())
        return svi, npgp.fit(svi, key, steps, *arrays, batch_size=batch, progress=False)

    # VNNGP's rows are its inducing points.
    arrays = (X, None if neighbors is None else np.arange(rows, dtype=np.int32)[:, None], y)
    began, few = now(), 20
    steps = max(int(args.budget * few / train(few)[1].seconds.steps), 1)
    aside = now() - began
    svi, result = train(min(steps, args.iterations) if args.quick else steps)
    # Batches of one epoch, which leave out fewer rows than there are in a batch.
    value, _ = npgp.evaluate(svi, key, result, *arrays, num_draws=max(rows // batch, 2), batch_size=batch)
    first = [None if a is None else a[:batch] for a in arrays[:2]]
    posterior = npgp.posterior("f", model, svi.guide, result.params, *first)
    near = () if neighbors is None else (nearest(data.X_test, X, min(neighbors.size, rows), scale=neighbors.scale),)
    predict = jax.jit(_predicted)
    noise = float(result.params["noise"])
    return value / rows, steps, noise, lambda: predict(posterior, data.X_test, *near), aside


def by_gpboost(data: RegressionSplit, method: str, args: argparse.Namespace) -> tuple:
    """Inducing points and neighbors by GPBoost (dependency group ``bench``), as it is set: it has no budget."""
    import gpboost

    options: dict[str, Any] = dict(cov_function="matern_ard", cov_fct_shape=1.5, gp_approx="vif")
    options |= dict(num_neighbors=args.neighbors, num_ind_points=args.inducing, likelihood="gaussian")
    model = gpboost.GPModel(gp_coords=data.X_train, **options)
    model.fit(y=data.y_train)
    value, noise = -model.get_current_neg_log_likelihood() / len(data.y_train), np.ravel(model.get_cov_pars())[0]

    def predict() -> tuple[np.ndarray, np.ndarray]:
        found = model.predict(gp_coords_pred=data.X_test, predict_var=True, predict_response=False)
        return found["mu"], found["var"]

    return float(value), None, float(noise), predict, 0.0


def approximation(args: argparse.Namespace, set: str, split: int, method: str) -> dict[str, Any] | list:
    data, now = load(set, split, args.rows, args.lengthscale), clock(args.cpu_time)
    rows = len(data.y_train)
    if method == "exact" and rows > args.exact_rows:
        print(f"exact is left out: {rows} rows, more than --exact-rows {args.exact_rows}", flush=True)
        return []
    if method in ("svgp", "vnngp") and rows < 2 * args.batch_size:
        print(f"{method} is left out: {rows} rows need no minibatches of {args.batch_size}", flush=True)
        return []
    began = now()
    by = by_all_rows if method in ALL_ROWS else by_gpboost if method == "gpboost" else by_minibatches
    value, evaluations, noise, predict, aside = by(data, method, args)
    seconds = now() - began - aside
    jax.block_until_ready(predict())  # compiles
    began = time.perf_counter()
    mean, variance = jax.block_until_ready(predict())
    predict_seconds = time.perf_counter() - began
    figures = scores(mean, np.asarray(variance) + noise, data.y_test)
    found: dict[str, Any] = {"rmse": figures["rmse"], "nlpd": -figures["log_likelihood"], "value": value}
    found |= {"noise": noise, "seconds": seconds, "predict_seconds": predict_seconds}
    return found | {"evaluations": evaluations}


STUDIES = {
    "approximations": Study(
        """Which approximation? The exact GP and its approximations, fitted to one set, from one start, in equal time.

    python scripts/study.py approximations --sets my.csv --budget 60

A set is a file, CSV whose last column is the target, or npz with ``X`` and ``y``; ``snelson``, ``spatial`` (simulated
sites, short lengthscale), or one of ``scripts/regression_sets.py``. All methods have the same kernel, with a
lengthscale for each column, the same start, and ``--budget`` seconds of optimization after the first evaluation: L-BFGS
on the bound or density of all rows (``exact``; ``sgpr``; ``solve``: the tight conditional with two blocks; ``fitc``;
``pep``: structured power EP with α = .8; ``nngp``: an NNGP of the responses;
``vif``: inducing points and neighbors), or minibatches (``svgp``, ``vnngp``). ``gpboost`` is GPBoost's VIF.""",
        approximation,
        {"set": ("spatial", "kin8nm", "concrete"), "split": (0,), "method": (*ALL_ROWS, "svgp", "vnngp")},
        {"rmse": ("RMSE", 3), "nlpd": ("NLPD", 3), "value": ("per row", 3), "noise": ("noise variance", 3)}
        | {"seconds": ("fit, s", 1), "predict_seconds": ("prediction, s", 3), "evaluations": ("evaluations", 0)},
        {"budget": 30.0, "inducing": 128, "neighbors": 15, "kernel": "matern32", "rows": int, "exact_rows": 2000}
        | {"lengthscale": 0.03, "batch_size": 1024, "learning_rate": 0.03, "iterations": 1000, "seed": 0},
        choices={"set": (), "method": (*ALL_ROWS, "svgp", "vnngp", "gpboost")},
        quick={"set": ["spatial"], "rows": 60, "inducing": 6, "neighbors": 5, "batch_size": 20, "iterations": 12}
        | {"budget": 1e-3, "method": ["sgpr", "vnngp"]},
        picture=("seconds", ("nlpd", "rmse")),
        note="RMSE and NLPD (negative log predictive density): of test rows, standardized target. Per row: of exact, "
        "sgpr, solve and svgp the evidence or a lower bound, which compare with one another; of fitc, pep, nngp, vif "
        "a density of their own model, of vnngp a bound on that. Fit: with set-up and compilation.",
    )
}
