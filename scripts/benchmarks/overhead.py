#!/usr/bin/env python
"""What a step of NumPyro's SVI with the automatic guide costs beyond the bare ELBO.

The same step twice: as a model with ``SparseGP`` and ``observe`` under ``SVI`` and ``AutoSparseGP``, and as one
function of unconstrained parameters that calls the projection and the rows' terms itself, knows nothing of sites, and
is differentiated and updated by the same optimizer. Both are compiled and timed in turn. Their losses agree where no
hyperparameter is sampled.

    python scripts/benchmarks/overhead.py --json out/overhead.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import npgp
from npgp.sparse.conditionals import row_elbo
from npgp.sparse.projection import factorize
from npgp.variational import DenseNormal, square_tril, whitened_mean, whitened_variance

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, interleaved, one_blas_thread, quartiles, table, write_json

COLUMNS, ROWS = 8, 100_000


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--hyperparameters", nargs="+", choices=KINDS, default=list(KINDS), help="parameters, or sites with priors"
    )
    parser.shared("json", inducing=256, batch_size=1024, repetitions=100)
    return parser.read(argv)


def data(args: argparse.Namespace):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1.7, 1.7, (args.batch_size, COLUMNS))
    y = np.sin(2.0 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * rng.normal(size=len(X))
    Z = rng.uniform(-1.7, 1.7, (args.inducing, COLUMNS))
    return tuple(jnp.asarray(a, jnp.float32) for a in (X, y, Z))


class Learned:
    """Hyperparameters are parameters."""

    def hyperparameters(self):
        positive = constraints.softplus_positive
        lengthscale = numpyro.param("lengthscale", jnp.full(COLUMNS, 2.0), constraint=positive)
        return lengthscale, numpyro.param("noise", 0.1, constraint=positive)

    def bare(self, params, key):
        positive = dist.biject_to(constraints.softplus_positive)
        return positive(params["lengthscale"]), positive(params["noise"]), 0.0


class Sampled:
    """Hyperparameters have priors, and the automatic guide's mean field."""

    def hyperparameters(self):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.zeros(COLUMNS), 1.0).to_event(1))
        return lengthscale, numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))

    def bare(self, params, key):
        values, divergence = [], jnp.zeros(())
        sizes = {"lengthscale": (0.0, (COLUMNS,)), "noise": (-2.0, ())}
        for (name, (mean, shape)), k in zip(sizes.items(), jax.random.split(key), strict=True):
            loc = params[f"{name}_auto_loc"]
            scale = dist.biject_to(constraints.softplus_positive)(params[f"{name}_auto_scale"])
            values.append(jnp.exp(loc + scale * jax.random.normal(k, shape)))
            divergence += jnp.sum(0.5 * (scale**2 + (loc - mean) ** 2 - 1.0) - jnp.log(scale))
        return *values, divergence


KINDS = {"learned": Learned(), "sampled": Sampled()}


def steps(hyperparameters: Learned | Sampled, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The two steps, from the same parameters."""
    X, y, Z = data(args)

    def model(X, y):
        lengthscale, noise = hyperparameters.hyperparameters()
        f = npgp.SparseGP("f", npgp.Matern32(lengthscale), numpyro.param("Z", Z)).draw()
        with npgp.plate("data", ROWS, rows=args.batch_size):
            npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)

    def negative_elbo(params, key, X, y):
        lengthscale, noise, divergence = hyperparameters.bare(params, key)
        q = DenseNormal(params["f.u.loc"], dist.biject_to(square_tril)(params["f.u.scale_tril"]))
        projection = factorize(npgp.Matern32(lengthscale), (npgp.features.Points(params["Z"]),))(X)
        mean, variance = whitened_mean(projection, [q.loc]), whitened_variance(projection, [q])
        rows = row_elbo(npgp.Tight(), npgp.Gaussian(variance=noise), y, mean, variance, projection.residual_variance())
        return q.kl() + divergence - ROWS / args.batch_size * jnp.sum(rows)

    adam = optax.adam(0.01)
    svi = SVI(model, npgp.AutoSparseGP(model, AutoNormal), adam, TraceMeanField_ELBO())
    state = jax.jit(svi.init)(jax.random.key(0), X, y)
    params = svi.optim.get_params(state.optim_state)
    key = jax.random.key(1)

    @jax.jit
    def sites(state):
        return svi.update(state, X, y)

    @jax.jit
    def bare(params, moments, key):
        key, step_key = jax.random.split(key)
        value, gradient = jax.value_and_grad(negative_elbo)(params, step_key, X, y)
        updates, moments = adam.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, key, value

    moments = adam.init(params)
    return {"bare": lambda: bare(params, moments, key)[-1], "sites": lambda: sites(state)[-1]}


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    report: dict[str, Any] = {"inducing": args.inducing, "batch_size": args.batch_size}
    print(f"A step of SVI, M = {args.inducing}, {args.batch_size} rows of {COLUMNS} columns, Matérn-3/2, float32\n")
    lines = []
    with jax.enable_x64(False), one_blas_thread():
        for name in args.hyperparameters:
            calls = steps(KINDS[name], args)
            losses = {which: float(call()) for which, call in calls.items()}
            seconds = interleaved(calls, args.repetitions)
            low, median, high = quartiles(seconds["sites"] / seconds["bare"])
            bare, sites = (1e3 * float(np.median(seconds[which])) for which in ("bare", "sites"))
            report[name] = {"bare_ms": bare, "sites_ms": sites, "ratio": [median, low, high], "losses": losses}
            lines.append((name, f"{bare:.1f} ms", f"{sites:.1f} ms", f"{median:.2f} ({low:.2f} to {high:.2f})"))
    print(table(("hyperparameters", "bare ELBO", "with sites", "ratio (quartiles)"), lines))
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
