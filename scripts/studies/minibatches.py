"""SVI in minibatches on tens of thousands of rows: SVGP, SOLVE-GP, and the same with the tight conditional; VIF."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
import npgp.inducing
from common import moments, plus_minus, table
from npgp.neighbors import nearest_before
from regression_sets import split_at, uci
from studies.fits import Rows, beside_neighbors, learned, scores, simulated, with_neighbors
from studies.runner import Records, Study

SETS = ("kin40k", "protein", "keggdirected")
#: Start of the hyperparameters, for standardized data; lengthscales start at this share of √D.
LENGTHSCALE, VARIANCE, NOISE_VARIANCE = 0.7, 1.0, 0.1
#: Rows at a time where no gradient is taken.
CHUNK = 4096


class Method(NamedTuple):
    """Blocks of equally many inducing points, and the conditional."""

    blocks: int
    conditional: str


METHODS = {
    "SVGP": Method(1, "prior"),
    "T-SVGP": Method(1, "tight"),
    "SOLVE-GP": Method(2, "prior"),
    "T-SOLVE-GP": Method(2, "tight"),
}


@lru_cache(maxsize=2)
def random_split(name: str, split: int, most: int | None) -> Rows:
    """A tenth of the rows for tests; standardized by the training rows, of which there may be a limit."""
    data = simulated(400) if name == "simulated" else uci(name, 0, standardize=False)
    X, y = np.concatenate([data.X_train, data.X_test]), np.concatenate([data.y_train, data.y_test])
    test, train = np.split(np.random.default_rng(split).permutation(len(y)), [len(y) // 10])
    data = split_at(X, y, train[:most], test)
    arrays = data.X_train, data.y_train, data.X_test, data.y_test
    return Rows(*(array.astype(jnp.result_type(float)) for array in arrays))


def start_of(data: Rows, M: int, blocks: int, seed: int) -> dict[str, Any]:
    """Hyperparameters, and the centers of k-means in a random order, so that any block of them is spread like all."""
    columns, dtype = data.X.shape[1], data.X.dtype
    Z = np.asarray(npgp.inducing.kmeans(jax.random.key(seed), data.X, M))
    Z = np.random.default_rng(seed).permutation(Z)
    start = {"lengthscale": np.full(columns, LENGTHSCALE * math.sqrt(columns))}
    start |= {"variance": np.array(VARIANCE), "noise_variance": np.array(NOISE_VARIANCE)}
    start |= {f"inducing{i}": block for i, block in enumerate(np.split(Z, blocks))}
    return {name: jnp.asarray(value, dtype) for name, value in start.items()}


def component(params: dict[str, Any], blocks: int) -> npgp.SparseGP:
    """The GP at these hyperparameters and inducing inputs."""
    kernel = npgp.Matern32(params["lengthscale"], variance=params["variance"])
    return npgp.SparseGP("f", kernel, [params[f"inducing{i}"] for i in range(blocks)])


def model_of(start: dict[str, Any], method: Method) -> Callable:
    """A model ``(X, y, *, size)`` with Gaussian noise whose parameters all start at these values."""

    def model(X, y=None, *, size):
        params = learned(start)
        f = component(params, method.blocks).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            likelihood = npgp.Gaussian(variance=params["noise_variance"])
            npgp.observe("y", f(X), likelihood, obs=y, conditional=method.conditional)

    return model


@partial(jax.jit, static_argnames="blocks")
def predict(params, X, blocks: int):
    """Mean and variance of y."""
    mean, variance = component(params, blocks).posterior(params).mean_and_variance(X, batch_size=CHUNK)
    return mean, variance + params["noise_variance"]


@partial(jax.jit, static_argnames="method")
def best_elbo(params, X, y, method: Method) -> jax.Array:
    """The ELBO at these hyperparameters and inducing inputs if q(ε) were the best one: what steps on q could win."""
    gp, noise = component(params, method.blocks), params["noise_variance"]
    options: dict[str, Any] = dict(conditional=method.conditional, covariances="dense")
    return npgp.CollapsedGP(gp.kernel, X, gp.inducing, noise_variance=noise, **options).log_prob(y)


def elbo(model: Callable, guide: Callable, params: dict[str, Any], X: np.ndarray, y: np.ndarray) -> float:
    """The ELBO of all rows at once, exactly."""
    loss = partial(TraceMeanField_ELBO().loss, jax.random.key(0), size=len(y))
    return -float(jax.jit(lambda params: loss(params, model, guide, X, y))(params))


def four_methods(args: argparse.Namespace, set: str, split: int, M: int, method: str) -> dict[str, Any]:
    data, how, seed = random_split(set, args.seed + split, args.rows), METHODS[method], args.seed + split
    X, y, rows = data.X, data.y, len(data.y)
    model = model_of(start_of(data, M, how.blocks, seed), how)
    guide, optimizer = npgp.AutoSparseGP(model), npgp.adam(args.learning_rate, args.steps)
    if args.natural:
        optimizer = npgp.natural_gradient(args.natural, optimizer)
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO(), size=rows)
    key, batch = jax.random.key(seed), min(args.batch_size, rows)
    result = npgp.fit(svi, key, args.steps, X, y, batch_size=batch, progress=False)
    params, seconds = result.params, result.seconds.steps
    return {
        "elbo": elbo(model, guide, params, X, y) / rows,
        "best_elbo": float(best_elbo(params, X, y, how)) / rows,
        **scores(*predict(params, data.X_test, how.blocks), data.y_test),
        "compile_seconds": result.seconds.compile,
        "seconds": seconds,
        "step_ms": 1e3 * seconds / args.steps,
        "noise_variance": float(params["noise_variance"]),
    }


def vif(args: argparse.Namespace, set: str, split: int, M: int) -> dict[str, Any]:
    data, seed, began = random_split(set, args.seed + split, args.rows), args.seed + split, time.process_time()
    X, y, params = data.X, data.y, start_of(data, M, 1, seed)
    batch, key = min(args.batch_size, len(y)), jax.random.key(seed)

    def which() -> dict[str, Any]:
        return {"kernel": component(params, 1).kernel, "inducing": params["inducing0"]}

    for round in range(args.rounds):
        neighbors = nearest_before(X, args.neighbors, **which())
        start = {name: params[name] for name in params if not name.startswith("f.")}
        model = beside_neighbors(start, partial(component, blocks=1))
        optimizer = npgp.natural_gradient(args.natural, npgp.adam(args.learning_rate / 2**round, args.steps))
        svi = SVI(model, npgp.AutoSparseGP(model), optimizer, TraceMeanField_ELBO(), size=len(y))
        q = {name: value for name, value in params.items() if name.startswith("f.")} or None
        rows = with_neighbors(X, y, neighbors)
        fit = npgp.fit(svi, key, args.steps, *rows, batch_size=batch, init_params=q, progress=False)
        params = fit.params
    known = nearest_before(X, args.neighbors, **which())
    gp, noise_variance = component(params, 1), params["noise_variance"]
    options: dict[str, Any] = dict(noise_variance=noise_variance, method="vif", neighbors=known)
    posterior = jax.jit(lambda y: npgp.ApproximateGP(gp.kernel, X, gp.inducing[0].inputs, **options).condition(y))(y)
    mean, variance = posterior.mean_and_variance(data.X_test)
    seconds = time.process_time() - began
    figures = {"seconds": seconds, "noise_variance": float(noise_variance)}
    return {**scores(mean, variance + noise_variance, data.y_test), **figures}


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


#: What is compared, with the sign of what is better.
SIGNS = {"elbo": 1, "best_elbo": 1, "rmse": -1, "log_likelihood": 1}


def pairs(records: Records, markdown: bool) -> str:
    """What the first method of each pair gains over the second, split by split; positive is better."""
    found = {(r["set"], r["M"], r["method"], r["split"]): r for r in records}
    lines = []
    for first, second, halved in PAIRS:
        cells = dict.fromkeys((name, M) for name, M, method, _ in found if method == first)
        for name, M in cells:
            both = [
                (a, b)
                for (set, size, method, split), a in found.items()
                if (set, size, method) == (name, M, first)
                and (b := found.get((set, M // 2 if halved else M, second, split)))
            ]
            if both:
                texts = [plus_minus(*moments(sign * (a[k] - b[k]) for a, b in both), 4) for k, sign in SIGNS.items()]
                cost = plus_minus(*moments(a["step_ms"] / b["step_ms"] for a, b in both), 2)
                pair = f"{first} over {second}{' of M/2' if halved else ''}"
                lines.append([name, M, pair, *texts, cost])
    heads = ("set", "M", "gain of", *SIGNS, "time per step, ratio")
    return table(heads, lines, left=(0, 2), markdown=markdown) if lines else ""


STUDIES = {
    "four-methods": Study(
        """Regression: SVGP, SOLVE-GP and the tight conditional, as Bui, Ashman & Turner (2025) compare them.

Their figures 2, 3, 6 and 7 are the pattern: bound, test error and test log-likelihood against the number of inducing
points M, for SVGP, T-SVGP (``conditional="tight"``), SOLVE-GP and T-SOLVE-GP. Matérn-3/2 with a lengthscale for each
column, Gaussian noise, everything learned at once on minibatches, q(ε) by natural gradients, the rest by Adam; random
splits with a tenth of the rows for testing. M counts all inducing points: SOLVE-GP has M/2 + M/2, and is compared with
SVGP of M and of M/2 points. All start at the same M inputs, the centers of k-means. "Of best q" is the collapsed bound
at the trained hyperparameters and inducing inputs: what more steps on q alone could win. ``--full``: six hours on one
core, one of them without M = 1024.""",
        four_methods,
        {"set": SETS, "split": (0, 1), "M": (128, 256), "method": tuple(METHODS)},
        {"elbo": ("ELBO per row", 4), "best_elbo": ("of best q", 4), "rmse": ("test RMSE", 4)}
        | {"log_likelihood": ("test log-likelihood", 4), "step_ms": ("ms per step", 1), "seconds": ("seconds", 0)},
        {"rows": int, "steps": 1500, "batch_size": 1024, "learning_rate": 0.05, "natural": 0.1, "seed": 0},
        choices={"set": (*SETS, "kin8nm", "power", "pumadyn32nm", "simulated")},
        quick={"set": ["simulated"], "split": [0], "M": [8], "method": ["T-SOLVE-GP"], "rows": 100, "steps": 4}
        | {"batch_size": 30},
        full={"split": [0, 1, 2], "M": [256, 512, 1024], "steps": 3000},
        picture=("M", ("elbo", "rmse", "log_likelihood", "step_ms")),
        show=pairs,
        note="Means over splits ± standard errors. ELBO per row: of all training rows. Test figures: of the standard"
        "ized target. Seconds: of training, without compilation.",
        x64=False,
    ),
    "large-vif": Study(
        """Regression on large sets by inducing points and neighbors (VIF), in minibatches.

The splits, kernel and start of ``four-methods``. Rows are observed beside their nearest neighbors by residual
correlation, found anew in each round; q(ε) by natural gradients, the rest by Adam. Predictions are of the collapsed
model at the hyperparameters and inducing inputs found. ``--full``: three splits.""",
        vif,
        {"set": ("kin40k", "protein"), "split": (0,), "M": (512,)},
        {"rmse": ("test RMSE", 4), "log_likelihood": ("test log-likelihood", 4)}
        | {"noise_variance": ("noise variance", 4), "seconds": ("seconds of a processor", 0)},
        {"rows": int, "steps": 1000, "rounds": 2, "batch_size": 256, "neighbors": 15, "learning_rate": 0.03}
        | {"natural": 0.1, "seed": 0},
        choices={"set": (*SETS, "kin8nm", "power", "pumadyn32nm", "simulated")},
        quick={"set": ["simulated"], "split": [0], "M": [8], "rows": 60, "steps": 3, "batch_size": 20, "neighbors": 3}
        | {"rounds": 1},
        full={"split": [0, 1, 2]},
        note="Of the standardized target. Seconds: with compilation, search of neighbors and predictions.",
        x64=False,
    ),
}
