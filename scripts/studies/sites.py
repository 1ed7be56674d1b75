"""Many sites in the plane, with a trend and detail: inducing points, neighbors, and both."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpyro
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.stats import norm

import npgp
from npgp.neighbors import nearest_before
from studies.approximations import matern_draw
from studies.fits import Rows, beside_neighbors, learned, with_neighbors
from studies.runner import Study

TREND, NOISE_VARIANCE = 0.5, 0.1
#: Log-rates are half of trend and detail together, plus this.
LEVEL = 0.5
START = {"trend": 0.3, "trend_variance": 0.5, "detail": 0.04, "detail_variance": 0.5, "noise_variance": 0.2}


def simulated(rows: int, lengthscale: float, counts: bool, seed: int) -> tuple[Rows, np.ndarray]:
    """Sites with observations, a tenth of them for tests, and f at the latter: a trend of variance 1, and detail."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(rows + rows // 10, 2))
    f = matern_draw(rng, X, TREND) + matern_draw(rng, X, lengthscale)
    if counts:
        f = 0.5 * f + LEVEL
        y = rng.poisson(np.exp(f)).astype(float)
    else:
        y = f + math.sqrt(NOISE_VARIANCE) * rng.normal(size=len(f))
    X, y = X.astype(np.float32), y.astype(np.float32)
    return Rows(X[:rows], y[:rows], X[rows:], y[rows:]), f[rows:]


def kernel_of(params: dict[str, Any]) -> npgp.kernels.Kernel:
    """Of trend and detail together."""
    trend, detail = (npgp.Matern32(params[name], variance=params[f"{name}_variance"]) for name in ("trend", "detail"))
    return trend + detail


def grid(points: int) -> np.ndarray:
    """About so many inducing points, on a grid over the square."""
    line = np.linspace(0.0, 1.0, round(math.sqrt(points)), dtype=np.float32)
    return np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)


def fitted(args: argparse.Namespace, rows: Rows, method: str, counts: bool) -> tuple[dict[str, Any], Callable]:
    """Hyperparameters, and what predicts f at sites."""
    start, Z = {k: v for k, v in START.items() if not (counts and k == "noise_variance")}, grid(args.inducing)
    start = {name: np.float32(value) for name, value in start.items()}
    key, level = jax.random.key(args.seed), LEVEL if counts else 0.0

    def likelihood(params: dict[str, Any]) -> npgp.likelihoods.Likelihood:
        return npgp.Poisson() if counts else npgp.Gaussian(variance=params["noise_variance"])

    size, batch = len(rows.y), min(args.batch_size, len(rows.y))
    inducing = np.float32([[1e3, 1e3]]) if method == "nngp" else Z

    def gp(params: dict[str, Any], near: npgp.neighbors.Neighbors) -> npgp.ApproximateGP:
        kernel, noise = kernel_of(params), likelihood(params)
        return npgp.ApproximateGP(kernel, rows.X, inducing, noise, method="vif", neighbors=near, offset=level)

    if method in ("nngp", "vif", "minibatches"):
        before = nearest_before(rows.X, args.neighbors, kernel=kernel_of(start), inducing=inducing)

        def collapsed(near, y):
            numpyro.sample("y", gp(learned(start), near), obs=y)

        if method == "minibatches":
            beside = beside_neighbors(start, lambda params: npgp.SparseGP("f", kernel_of(params), Z))
            optimizer = npgp.natural_gradient(0.1, npgp.adam(0.02, args.steps))
            svi = SVI(beside, npgp.AutoSparseGP(beside), optimizer, TraceMeanField_ELBO(), size=size)
            data = with_neighbors(rows.X, rows.y, before)
            params = npgp.fit(svi, key, args.steps, *data, batch_size=batch, progress=False).params
        else:
            fit = npgp.fit_collapsed(key, collapsed, before, rows.y, max_steps=args.searches, progress=False)
            params = fit.params
        return params, gp(params, before).condition(rows.y).mean_and_variance

    before = nearest_before(rows.X, args.neighbors)

    def parts(params: dict[str, Any]) -> list[Any]:
        kernel = kernel_of(params)
        if method == "svgp":
            return [npgp.SparseGP("f", kernel, Z)]
        if method == "vnngp":
            return [npgp.VNNGP("r", kernel, rows.X, before, batch_size=batch)]
        smooth, rough = npgp.sparse.split_kernel(kernel, Z)
        return [npgp.SparseGP("f", smooth, Z), npgp.VNNGP("r", rough, rows.X, before, batch_size=batch)]

    def model(X, at, y, *, size):
        params = learned(start)
        drawn = [part.draw() for part in parts(params)]
        values = sum(f(X, neighbors=at) if f.name == "r" else f(X) for f in drawn)
        with npgp.plate("data", size, rows=len(X)):
            npgp.observe("y", values + level, likelihood(params), obs=y)

    svi = SVI(
        model, npgp.AutoSparseGP(model, joint=False), npgp.adam(0.02, args.steps), TraceMeanField_ELBO(), size=size
    )
    tables = {} if method == "svgp" else {"row_optim": npgp.training.row_adam(0.05, args.steps)}
    at = np.arange(size, dtype=np.int32)[:, None]
    fit = npgp.fit(svi, key, args.steps, rows.X, at, rows.y, batch_size=batch, progress=False, **tables)
    posteriors = [part.posterior(fit.params) for part in parts(fit.params)]

    def predict(X: np.ndarray) -> tuple[jax.Array, jax.Array]:
        each = [posterior.mean_and_variance(X) for posterior in posteriors]
        return sum(mean for mean, _ in each), sum(variance for _, variance in each)

    return fit.params, predict


def of_sites(args: argparse.Namespace, noise: str, method: str) -> dict[str, float]:
    counts = noise == "poisson"
    rows, f = simulated(args.rows, args.lengthscale, counts, args.seed)
    began = time.process_time()
    params, predict = fitted(args, rows, method, counts)
    mean, variance = (np.asarray(x, float) for x in predict(rows.X_test))
    seconds = time.process_time() - began
    mean = mean + (LEVEL if counts else 0.0)
    likelihood = npgp.Poisson() if counts else npgp.Gaussian(variance=params["noise_variance"])
    inside = np.abs(f - mean) < norm.ppf(0.95) * np.sqrt(variance)
    return {
        "rmse": float(np.sqrt(np.mean((f - mean) ** 2))),
        "nlpd": -float(np.mean(np.asarray(likelihood.log_marginal(rows.y_test, mean, variance)))),
        "inside": float(np.mean(inside)),
        "noise_variance": float(params.get("noise_variance", 0.0)),
        "detail": float(params["detail"]),
        "seconds": seconds,
    }


STUDIES = {
    "sites": Study(
        """Sites with a trend over the whole square and detail of a short lengthscale, in numbers and in counts.

f is the sum of two random functions of variance 1 (of counts half of that is the log-rate), Matérn-3/2 of lengthscale
.5 and of ``--lengthscale``; both kernels' hyperparameters are learned. ``nngp`` and ``vif`` by L-BFGS on the density of
all rows (of counts the estimate of ``ApproximateGP``); ``minibatches`` is ``vif`` of numbers in minibatches, as are
``svgp``, ``vnngp`` and ``split``, a ``VNNGP`` of what inducing points leave. Inducing points are on a grid.""",
        of_sites,
        {"noise": ("gaussian", "poisson"), "method": ("svgp", "nngp", "vif", "minibatches", "vnngp", "split")},
        {"rmse": ("RMSE of f", 4), "nlpd": ("NLPD of y", 4), "inside": ("f inside 90%", 3)}
        | {"noise_variance": ("noise variance", 4), "detail": ("lengthscale", 4), "seconds": ("seconds", 0)},
        {"rows": 20_000, "lengthscale": 0.02, "inducing": 64, "neighbors": 15, "batch_size": 512, "steps": 3000}
        | {"searches": 20, "seed": 0},
        quick={"rows": 60, "inducing": 4, "neighbors": 3, "batch_size": 20, "steps": 3, "searches": 2}
        | {"method": ["split"], "noise": ["gaussian"]},
        note="Of f and y at new sites; counts have no noise variance. "
        "Seconds: of a processor, with compilation and the search of neighbors.",
        x64=False,
    ),
}
