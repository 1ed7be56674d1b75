"""Nearest neighbors or inducing points? A VNNGP against SVGP at equal cost of a step, trained in minibatches."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
import npgp.inducing
from benchmarks.row_cost import Loop, in_turns
from common import scores
from npgp import datasets
from npgp.neighbors.vecchia import site_weights
from npgp.training import lbfgs
from studies.fits import Rows as Data
from studies.runner import Records, Study

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


#: Numbers of inducing points that SVGP is tried with.
INDUCING = (32, 64, 128, 256, 512)

#: Where that starts, for standardized data: lengthscales at this share of √D, and the noise variance.
LENGTHSCALE, NOISE = 0.7, 0.1

#: And its least outcome: fits that start with next to no noise hardly move.
LEAST_NOISE = 0.01

#: Rows, and steps, that the start of the hyperparameters is found with.
SUBSET, SUBSET_STEPS = 2000, 60

#: Of the simulated function, on the unit square.
SPATIAL_LENGTHSCALE = 0.02


class Start(NamedTuple):
    """Logs of the hyperparameters that fits start from."""

    lengthscale: Any
    variance: Any
    noise: Any

    def model(self) -> tuple[npgp.Matern32, Any]:
        """The kernel and the noise variance."""
        return npgp.Matern32(jnp.exp(self.lengthscale), variance=jnp.exp(self.variance)), jnp.exp(self.noise)


def find_start(data: Data, neighbors: npgp.neighbors.Neighbors, args: argparse.Namespace) -> Start:
    """By L-BFGS on the densities of some rows given their neighbors, of all of which a response NNGP is made."""
    some = np.random.default_rng(args.seed).permutation(len(data.X))[:SUBSET]
    columns = data.X.shape[1]
    lengthscale = np.full(columns, np.log(LENGTHSCALE * np.sqrt(columns)), np.float32)

    def loss(start, X, y, neighbors, some):
        kernel, noise = start.model()
        b, variance, _ = site_weights(kernel, X, neighbors, noise, 0.0, some)
        mean = jnp.sum(b * y[jnp.asarray(neighbors.rows)[some]], axis=-1)
        return -jnp.mean(dist.Normal(mean, jnp.sqrt(variance)).log_prob(y[some]))

    start = jax.tree.map(jnp.asarray, Start(lengthscale, *np.log(np.float32([1.0, NOISE]))))
    found = lbfgs.minimize(loss, start, data.X, data.y, neighbors, some, max_steps=SUBSET_STEPS, progress=False)
    params = jax.tree.map(np.asarray, found.params)
    return params._replace(noise=np.maximum(params.noise, np.log(np.float32(LEAST_NOISE))))


def hyperparameters(start: Start) -> tuple[npgp.Matern32, npgp.Gaussian]:
    """As parameters of the model."""
    values = [
        numpyro.param(name, np.exp(value), constraint=constraints.positive) for name, value in start._asdict().items()
    ]
    return npgp.Matern32(values[0], variance=values[1]), npgp.Gaussian(variance=values[2])


def trained(model, args: argparse.Namespace) -> SVI:
    optimizer = npgp.adam(args.learning_rate, args.steps, warmup=50)
    return SVI(model, npgp.AutoSparseGP(model), optimizer, TraceMeanField_ELBO())


def svgp(data: Data, start: Start, size: int, args: argparse.Namespace) -> SVI:
    Z = npgp.inducing.kmeans(jax.random.key(args.seed), data.X[:20_000], size)

    def model(X, y=None):
        kernel, likelihood = hyperparameters(start)
        f = npgp.SparseGP("f", kernel, numpyro.param("Z", Z), init_scale=0.3).draw()
        with npgp.plate("data", len(data.X), rows=X.shape[0]):
            npgp.observe("y", f(X), likelihood, obs=y)

    return trained(model, args)


def krige(data: Data, start: Start, neighbors: npgp.neighbors.Neighbors, X: np.ndarray, args: argparse.Namespace):
    """Mean and variance of f at X by a response NNGP."""

    @jax.jit
    def moments(start, data, neighbors, X, near):
        kernel, noise = start.model()
        return (
            npgp.neighbors.ResponseNNGP(kernel, data.X, neighbors, noise_variance=noise)
            .condition(data.y)
            .mean_and_variance(X, near)
        )

    return moments(start, data, neighbors, X, npgp.neighbors.nearest(X, data.X, args.neighbors, scale=neighbors.scale))


def vnngp(data: Data, start: Start, neighbors: npgp.neighbors.Neighbors, args: argparse.Namespace) -> SVI:
    init_loc = np.asarray(krige(data, start, neighbors, data.X, args)[0])
    batch = min(args.batch_size, len(data.X))

    def model(X, y=None, *, rows):
        kernel, likelihood = hyperparameters(start)
        f = npgp.VNNGP("f", kernel, data.X, neighbors, batch_size=batch, init_loc=init_loc, init_scale=0.5).draw()
        with npgp.plate("data", len(data.X), rows=rows):
            npgp.observe("y", f(X, rows[:, None]), likelihood, obs=y)

    return trained(model, args)


def row_rate(args: argparse.Namespace) -> npgp.training.RowOptimizer:
    return npgp.training.row_adam(args.row_rate, args.steps, warmup=50)


def judge(mean, variance, noise: float, data: Data) -> dict[str, float]:
    """Of predictions of y."""
    rmse, nlpd = scores(mean, np.asarray(variance) + noise, data.y_test)
    return {"rmse": rmse, "nlpd": nlpd}


def kernel_at(params: dict[str, Any]) -> npgp.Matern32:
    return npgp.Matern32(params["lengthscale"], variance=params["variance"])


def equal_cost(
    data: Data, start: Start, neighbors: npgp.neighbors.Neighbors, args: argparse.Namespace
) -> tuple[int, dict[str, float]]:
    """The number of inducing points with which a step of SVGP costs what the VNNGP's does; all milliseconds."""
    loops: dict[Any, Loop] = {
        "vnngp": Loop(
            vnngp(data, start, neighbors, args), data[:2], min(args.batch_size, len(data.X)), row_rate(args), "rows"
        )
    }
    for size in args.inducing:
        loops[size] = Loop(svgp(data, start, size, args), data[:2], min(args.svgp_batch_size, len(data.X)))
    seconds = {name: 1e3 * float(np.median(s)) for name, s in in_turns(loops, args).items()}
    size = min(args.inducing, key=lambda size: abs(np.log(seconds[size] / seconds["vnngp"])))
    return size, {str(name): value for name, value in seconds.items()}


def fit_vnngp(
    data: Data, start: Start, neighbors: npgp.neighbors.Neighbors, args: argparse.Namespace
) -> dict[str, Any]:
    key, began = jax.random.key(args.seed), time.perf_counter()
    common: dict[str, Any] = dict(
        batch_size=min(args.batch_size, len(data.X)), indices="rows", row_optim=row_rate(args), progress=False
    )
    first = npgp.fit(vnngp(data, start, neighbors, args), key, args.steps // 2, *data[:2], **common)
    neighbors = npgp.neighbors.nearest_before(
        data.X, args.neighbors, ordering="random", scale=np.asarray(first.params["lengthscale"]), rng_key=key
    )
    svi = vnngp(data, start, neighbors, args)
    result = npgp.fit(svi, key, args.steps - args.steps // 2, *data[:2], init_state=first.state, **common)
    seconds = time.perf_counter() - began
    params = result.params
    posterior = npgp.VNNGP("f", kernel_at(params), data.X, neighbors).posterior(params)
    near = npgp.neighbors.nearest(data.X_test, data.X, args.neighbors, scale=neighbors.scale)
    mean, variance = jax.jit(lambda p, X, near: p.mean_and_variance(X, near))(posterior, data.X_test, near)
    elbo = -float(np.mean(result.losses[-200:])) / len(data.X)
    return summary(params, seconds, elbo) | judge(mean, variance, float(params["noise"]), data)


def fit_svgp(data: Data, start: Start, size: int, args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    svi = svgp(data, start, size, args)
    batch = min(args.svgp_batch_size, len(data.X))
    result = npgp.fit(svi, jax.random.key(args.seed), args.steps, *data[:2], batch_size=batch, progress=False)
    seconds, params = time.perf_counter() - began, result.params
    posterior = npgp.SparseGP("f", kernel_at(params), params["Z"]).posterior(params)
    mean, variance = posterior.mean_and_variance(data.X_test, batch_size=4096)
    elbo = -float(np.mean(result.losses[-200:])) / len(data.X)
    return summary(params, seconds, elbo) | judge(mean, variance, float(params["noise"]), data)


def summary(params: dict[str, Any], seconds: float, elbo: float) -> dict[str, Any]:
    found = {name: np.asarray(params[name]).tolist() for name in ("lengthscale", "variance", "noise")}
    return found | {"seconds": seconds, "elbo_per_row": elbo}


def load(name: str, args: argparse.Namespace) -> Data:
    if name == "spatial":
        X, y = simulate(args.sites + args.sites // 10, SPATIAL_LENGTHSCALE, args.seed)
        X = (X - 0.5) * np.sqrt(12)
        arrays = (X[: args.sites], y[: args.sites], X[args.sites :], y[args.sites :])
    else:
        split = datasets.uci(name, 0)
        arrays = (split.X_train, split.y_train, split.X_test, split.y_test)
    return Data(*(np.asarray(x[: args.rows], np.float32) for x in arrays))


def neighbors_study(args: argparse.Namespace, set: str) -> Records:
    """Kriging by a response NNGP, from whose hyperparameters both others start; they; and their milliseconds a step."""
    data, key = load(set, args), jax.random.key(args.seed)
    how = dict(ordering="random", rng_key=key)
    first = npgp.neighbors.nearest_before(data.X, args.neighbors, **how)
    start = find_start(data, first, args)
    found = npgp.neighbors.nearest_before(data.X, args.neighbors, scale=np.exp(start.lengthscale), **how)
    before = judge(*krige(data, start, found, data.X_test, args), float(np.exp(start.noise)), data)
    size, cost = equal_cost(data, start, found, args)
    fits = {"VNNGP": fit_vnngp(data, start, found, args), f"SVGP {size}": fit_svgp(data, start, size, args)}
    for method, figures in fits.items():
        figures["ms"] = cost["vnngp" if method == "VNNGP" else str(size)]
    fits = {"response NNGP": before} | fits
    return [{"method": method, "rows": len(data.X)} | figures for method, figures in fits.items()]


STUDIES = {
    "neighbors": Study(
        """Nearest neighbors or inducing points? A VNNGP against SVGP at equal cost of a step, trained in minibatches.

The VNNGP has an inducing point at every training input, and batches of rows and of inducing points. SVGP has as many
inducing points as its step costs the same with, of those numbers that are tried; both are timed in turn before they
are trained. Matérn-3/2 with a lengthscale for each column, Gaussian noise, float32, Adam, equally many steps. Both
start from hyperparameters that make 2000 random rows likely given their neighbors, the VNNGP's inducing values from
kriging with these. After half of its steps the neighbors are found again, in units of the lengthscales then.
``spatial`` is simulated: 100,000 sites in the plane, short lengthscale.""",
        neighbors_study,
        {"set": ("spatial", "kin40k", "protein", "keggdirected")},
        {
            "rmse": ("RMSE", 3),
            "nlpd": ("NLPD", 3),
            "elbo_per_row": ("ELBO per row", 3),
            "noise": ("noise", 3),
            "ms": ("ms per step", 1),
            "seconds": ("seconds", 0),
        },
        {
            "sites": 100_000,
            "rows": int,
            "neighbors": 15,
            "steps": 2000,
            "batch_size": 512,
            "svgp_batch_size": 1024,
            "learning_rate": 0.02,
            "row_rate": 0.1,
            "inducing": INDUCING,
            "repetitions": 5,
            "seconds": 0.5,
            "seed": 0,
        },
        rows=("set", "rows", "method"),
        quick={"set": ["spatial"], "sites": 100, "steps": 60, "batch_size": 16, "svgp_batch_size": 16, "neighbors": 3}
        | {"inducing": [8], "repetitions": 1, "seconds": 0.001},
        note="Of test rows, standardized target. ELBOs are bounds on the evidence of two models, and do not compare.",
        x64=False,
    )
}
