#!/usr/bin/env python
"""How good ``npgp.gplvm.fit`` ends where the collapsed bound is not all: many rows, counts, labels.

Simulated: rows of three clusters in two dimensions, and twelve smooth functions of these. With Gaussian noise (the
collapsed bound is climbed for a part of the rows, and SVI goes on with all, in minibatches), as Poisson counts and as
0s and 1s (SVI goes on from the climb of the data's normal scores). Beside it SVI alone, as one would write it by hand:
from principal components, natural gradients for q(ε), Adam of two rates for the rest. ELBO per row, of 40 draws of x.

    python scripts/studies/gplvm/one_call.py
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import gplvm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, table, whole

KINDS = ("rows", "counts", "labels")
COLUMNS, LATENT_DIM = 12, 5
RATES = (0.01, 0.03)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=whole, default=4000, help="of SVI alone; half as many after the climb")
    parser.add_argument("--climb", type=whole, default=3600, help="most steps of L-BFGS")
    parser.shared(
        "quick",
        inducing=20,
        repetitions=dict(default=2, help="simulations"),
        rows=dict(default=400, help="rows; five times as many with Gaussian noise, of which these are climbed"),
    )
    return parser.read(argv, dict(rows=40, inducing=6, repetitions=1, steps=20, climb=30))


def simulate(kind: str, seed: int, rows: int) -> tuple[np.ndarray, np.ndarray, npgp.likelihoods.Likelihood | None]:
    """Data, the rows' clusters, and the likelihood."""
    rng = np.random.default_rng(seed)
    clusters = rng.integers(3, size=rows)
    X = np.array([[-1.5, 0.0], [1.5, 0.5], [0.0, 1.8]])[clusters] + 0.45 * rng.normal(size=(rows, 2))
    features = np.cos(X @ rng.normal(size=(2, 60)) / 1.2 + rng.uniform(0.0, 2.0 * np.pi, 60)) / np.sqrt(30.0)
    F = features @ rng.normal(size=(60, COLUMNS))
    if kind == "rows":
        return F + 0.1 * rng.normal(size=F.shape), clusters, None
    if kind == "counts":
        return rng.poisson(np.exp(F + 1.0)).astype(float), clusters, npgp.Poisson()
    return (rng.uniform(size=F.shape) < 1.0 / (1.0 + np.exp(-2.0 * F))).astype(float), clusters, npgp.Bernoulli()


def elbo(model: npgp.BayesianGPLVM, params: dict[str, jax.Array], Y: np.ndarray) -> float:
    """Per row, in nats and float64."""
    svi = SVI(model.model, model.guide, npgp.adam(RATES[0], 1), TraceMeanField_ELBO())
    with jax.enable_x64(True):
        params = {name: jnp.asarray(value, float) for name, value in params.items()}
        state = svi.init(jax.random.key(0), Y, init_params=params)
        return npgp.evaluate(svi, jax.random.key(99), state, Y, num_draws=40)[0] / len(Y)


def by_hand(Y, likelihood, inducing: int, steps: int, rate: float, **options):
    """SVI alone."""
    offset = None if likelihood is None else 0.0
    start = gplvm.pca_start(jax.random.key(1), Y, LATENT_DIM, inducing, offset=offset)
    model = npgp.BayesianGPLVM(start, likelihood=likelihood)
    optimizer = npgp.natural_gradient(0.1, npgp.adam(rate, steps))
    svi = SVI(model.model, model.guide, optimizer, TraceMeanField_ELBO())
    fitted = npgp.fit(svi, jax.random.key(0), steps, Y, indices="rows", progress=False, **options)
    return model, fitted.params


def main(argv: list[str] | None = None) -> list[dict]:
    args = parse(argv)
    warnings.filterwarnings("ignore", ".*(has not converged|was still falling)")
    records = []
    for kind in args.kinds:
        rows = 5 * args.rows if kind == "rows" else args.rows
        batches = {"batch_size": args.rows // 2} if kind == "rows" else {}
        for seed in range(args.repetitions):
            Y, clusters, likelihood = simulate(kind, seed, rows)
            ways = {f"SVI alone, rate {rate}": rate for rate in RATES}
            for name, rate in {"one call": None, **ways}.items():
                began = time.perf_counter()
                if rate is None:
                    options = dict(max_steps=args.climb, max_rows=args.rows, svi_steps=args.steps // 2, progress=False)
                    found = gplvm.fit(
                        jax.random.key(1), Y, LATENT_DIM, args.inducing, likelihood=likelihood, **options, **batches
                    )
                    model, params = found.gplvm, found.params
                else:
                    model, params = by_hand(Y, likelihood, args.inducing, args.steps, rate, **batches)
                seconds = time.perf_counter() - began
                errors = gplvm.nearest_neighbor_errors(params["x.loc"] / params["lengthscale"], clusters)
                record = dict(kind=kind, seed=seed, way=name, elbo=elbo(model, params, Y), errors=errors)
                records.append(record | {"seconds": seconds})
                print(records[-1], flush=True)
    lines = [(r["kind"], r["seed"], r["way"], f"{r['elbo']:.3f}", r["errors"], f"{r['seconds']:.0f}") for r in records]
    print(table(("data", "simulation", "trained by", "ELBO per row", "NN errors", "seconds"), lines))
    return records


if __name__ == "__main__":
    main()
