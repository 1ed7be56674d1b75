"""Deep GPs of one to three layers on UCI sets."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
import npgp.inducing
from common import moments, plus_minus, table
from studies.fits import uci
from studies.runner import Records, Study

SETS = {"yacht": "yacht_raw", "energy": "energy", "concrete": "concrete", "kin8nm": "kin8nm", "power": "power"}
#: Widest inner layers, and draws of what is between layers for predictions.
WIDEST, DRAWS = 30, 100


def model(X, y=None, *, size: int, start: list[np.ndarray], conditional: str):
    """
    :param size: number of training rows.
    :param start: the first inducing inputs of each layer.
    :param conditional: of the last layer.
    """
    positive = constraints.positive
    noise = numpyro.param("noise", 0.1, constraint=positive)
    layers = []
    for i, Z in enumerate(start):
        inner = i + 1 < len(start)
        scale = numpyro.param(f"lengthscale_{i}", jnp.full(Z.shape[1], float(np.sqrt(Z.shape[1]))), constraint=positive)
        variance = numpyro.param(f"variance_{i}", 0.1 if inner else 1.0, constraint=positive)
        points = numpyro.param(f"Z_{i}", Z)
        width = start[i + 1].shape[1] if inner else 1
        mean = npgp.model.linear_mean(np.eye(Z.shape[1]), width) if inner else None
        layers.append(npgp.Layer(npgp.RBF(scale, variance=variance), points, width=width, mean=mean))
    deep = npgp.DeepGP("deep", layers).draw()
    with npgp.plate("data", size, rows=X.shape[0]):
        npgp.observe("y", deep(X), npgp.Gaussian(variance=noise), obs=y, conditional=conditional)


def fits(args: argparse.Namespace, set: str, split: int, layers: int) -> Records:
    """
    Train with the prior's conditional for the first half of the steps, go on from there with each conditional, and look
    at the test rows; densities are of y in its own units.
    """
    data, seed = uci(SETS.get(set, set), split, args.rows, split), args.seed + 10 * split
    X, y, X_test, y_test = (np.asarray(a, np.float32) for a in (data.X_train, data.y_train, data.X_test, data.y_test))
    Z = np.asarray(npgp.inducing.kmeans(jax.random.key(seed), X, min(args.inducing, len(X) // 2)))
    W = np.asarray(npgp.model.linear_mean(X, min(WIDEST, X.shape[1])))
    start = [Z, *[Z @ W] * (layers - 1)]
    batch = None if args.batch_size >= len(X) else args.batch_size

    def train(conditional: str, optim: Any, steps: int, key: int, params: Any = None):
        this = partial(model, size=len(X), start=start, conditional=conditional)
        guide = npgp.AutoSparseGP(this)
        svi = SVI(this, guide, optim, TraceMeanField_ELBO(num_particles=args.particles))
        how = dict(init_params=params, batch_size=batch, progress=False)
        return this, guide, svi, npgp.fit(svi, jax.random.key(seed + key), steps, X, y, **how)

    shared, found = args.steps // 2, []
    halfway = train("prior", npgp.adam(args.learning_rate), shared, 1)[-1].params
    for conditional in args.last:
        decaying = npgp.adam(args.learning_rate, args.steps - shared)
        this, guide, svi, result = train(conditional, decaying, args.steps - shared, 2, halfway)
        elbo, _ = npgp.evaluate(svi, jax.random.key(seed + 3), result, X, y, num_draws=20, batch_size=batch)
        f = npgp.posterior("deep", this, guide, result.params, X[:2])
        density = f.log_density(X_test, y_test, npgp.Gaussian(variance=result.params["noise"]))
        error = np.sqrt(np.mean((np.asarray(f.mean(X_test)) - y_test) ** 2))
        figures = {"elbo": elbo / len(X), "log_likelihood": float(np.mean(density) - np.log(data.y_scale))}
        found.append({"conditional": conditional} | figures | {"rmse": float(error * data.y_scale)})
    return found


def deeper(records: Records, markdown: bool) -> str:
    """What a layer more gains, on the same split."""
    found = {(r["set"], r["split"], r["layers"], r["conditional"]): r for r in records}
    gains: dict[tuple, list[float]] = {}
    for (name, split, layers, conditional), record in found.items():
        before = found.get((name, split, layers - 1, conditional))
        if before is not None:
            key = name, f"{layers} layers over {layers - 1}", conditional
            gains.setdefault(key, []).append(record["log_likelihood"] - before["log_likelihood"])
    lines = [(*key, plus_minus(*moments(values))) for key, values in gains.items()]
    heads = ("set", "gain of", "last layer", "test log-likelihood")
    return table(heads, lines, left=(0, 1, 2), markdown=markdown) if lines else ""


STUDIES = {
    "deep-uci": Study(
        """Deep GPs on UCI sets

One to three layers, with the prior's and the tight conditional in the last layer, after the regression experiments of
Salimbeni & Deisenroth (2017), of which ``--full`` has the sizes as we know them: layers as wide as the inputs (at most
30), RBF kernels with a lengthscale for each column, 100 inducing inputs in each layer that start at the centers of
k-means, identity mean functions between layers, marginal draws row by row, Adam at .01 for 20,000 steps on batches of
up to 10,000 rows. Splits are those of ``scripts/regression_sets.py``, not the paper's. Where training ends differs from
start to start by more than the conditionals do, so all conditionals of a split go on from the same parameters, those of
the first half of the steps, which are with the prior's.

For kin8nm the authors' demonstration (demos/demo_regression_UCI.ipynb of UCL-SML/Doubly-Stochastic-DGP; one split, not
ours; M = 100, 5000 steps of 1000 rows, five draws a step) prints .943, 1.291 and 1.304 for one to three layers by Adam,
.955, 1.292 and 1.315 with natural gradients for the last layer, and .976 for one layer's collapsed bound.""",
        fits,
        {
            "set": ("kin8nm", "power", "protein", "energy", "yacht", "concrete", "wine"),
            "layers": (1, 2, 3),
            "split": (0, 1, 2),
        },
        {"elbo": ("ELBO per row", 3), "log_likelihood": ("test log-likelihood", 3), "rmse": ("test RMSE", 3)},
        {
            "last": ("prior", "tight"),
            "inducing": 100,
            "steps": 5000,
            "batch_size": 500,
            "learning_rate": 0.02,
            "particles": 1,
            "rows": int,
            "seed": 0,
        },
        rows=("set", "layers", "conditional"),
        against=("conditional", "prior"),
        choices={"set": (*SETS, "protein", "wine", "simulated")},
        quick={
            "set": ["simulated"],
            "layers": [2],
            "split": [0],
            "last": ["tight"],
            "steps": 4,
            "inducing": 4,
            "rows": 30,
        }
        | {"batch_size": 10},
        full={"inducing": 100, "steps": 20_000, "batch_size": 10_000, "learning_rate": 0.01},
        show=deeper,
        note="The ELBO is of standardized outputs, test scores are in the outputs' units.",
        x64=False,
    )
}
