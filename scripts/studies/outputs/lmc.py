#!/usr/bin/env python
"""Several outputs as mixtures of functions with a kernel each: are the kernels found, and what do they cost?

Outputs ``h = W g(x) + noise`` of two functions whose lengthscales are a factor of 10 apart. The functions are drawn in
a plate, with a lengthscale each; mixing matrix, lengthscales and noise are learned. Beside it are the same with one
lengthscale for both, and the time of a training step: of Q functions in a plate against one function, and against Q
components, by turns.

    python scripts/studies/outputs/lmc.py --json out/lmc.json
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, command, interleaved, note, table, whole, write_json

LENGTHSCALES = np.array([0.04, 0.4])
NOISE = 0.1


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--seeds", type=whole, default=3)
    parser.add_argument("--outputs", type=whole, default=4)
    parser.add_argument("--functions", type=whole, default=8, help="Q, of what is timed")
    parser.shared("quick", "json", rows=200, inducing=50, steps=1500, learning_rate=0.03, repetitions=20)
    return parser.read(argv, quick={"seeds": 1, "rows": 20, "inducing": 6, "steps": 3, "repetitions": 1})


def simulate(seed: int, rows: int, outputs: int) -> dict[str, np.ndarray]:
    """Inputs, observations of all outputs, and as many new ones without noise."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(2 * rows, 1))
    kernels = [np.asarray(npgp.RBF(float(length))(X)) for length in LENGTHSCALES]
    g = np.stack([np.linalg.cholesky(K + 1e-5 * np.eye(len(X))) @ rng.normal(size=len(X)) for K in kernels])
    h = rng.normal(size=(outputs, 2)) @ g
    Y = h + NOISE * rng.normal(size=h.shape)
    return {"X": X[:rows], "Y": Y[:, :rows], "X_new": X[rows:], "Y_new": Y[:, rows:]}


def lmc(own: bool, inducing: int, outputs: int):
    """The model, with a lengthscale for each function or one for both."""
    Z = jnp.linspace(0.0, 1.0, inducing)[:, None]

    def model(X, Y=None):
        W = numpyro.param("W", lambda key: jax.random.normal(key, (outputs, 2)))
        start = jnp.array([[0.1], [0.2]]) if own else jnp.array(0.15)
        lengthscale = numpyro.param("lengthscale", start, constraint=constraints.positive)
        noise = numpyro.param("noise", 0.3, constraint=constraints.positive)
        with numpyro.plate("functions", 2, dim=-2):
            g = npgp.SparseGP("g", npgp.RBF(lengthscale), Z).draw()
        with numpyro.plate("outputs", outputs, dim=-2), numpyro.plate("rows", len(X)):
            npgp.observe("Y", W @ g(X), npgp.Gaussian(scale=noise), obs=Y)

    return model


def fitted(own: bool, seed: int, args: argparse.Namespace) -> dict[str, object]:
    """Lengthscales, bound, and log density of new observations."""
    data = simulate(seed, args.rows, args.outputs)
    model = lmc(own, args.inducing, args.outputs)
    guide = npgp.AutoSparseGP(model, joint=False)
    svi = SVI(model, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    result = npgp.fit(svi, jax.random.key(seed), args.steps, data["X"], data["Y"])
    params = result.params
    h = npgp.posterior("g", model, guide, params, data["X"]).mixed(params["W"])
    mean, variance = h.mean_and_variance(data["X_new"])
    variance = variance + params["noise"] ** 2
    density = -0.5 * (jnp.log(2.0 * jnp.pi * variance) + (data["Y_new"] - mean) ** 2 / variance)
    loss = svi.loss.loss(jax.random.key(0), params, model, guide, data["X"], data["Y"])
    return {
        "own": own,
        "seed": seed,
        "lengthscales": sorted(np.ravel(params["lengthscale"]).tolist()),
        "noise": float(params["noise"]),
        "elbo": -float(loss),
        "log_density": float(jnp.mean(density)),
    }


def steps(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of the ELBO with its gradient, of which only ratios mean anything."""
    Q, Z = args.functions, jnp.linspace(0.0, 1.0, args.inducing)[:, None]
    rng = np.random.default_rng(0)
    X, Y = jnp.asarray(rng.uniform(size=(args.rows, 1))), jnp.asarray(rng.normal(size=(Q, args.rows)))
    lengthscales = jnp.linspace(0.1, 0.5, Q)[:, None]

    def observed(name, f, y):
        with numpyro.plate(f"rows of {name}", args.rows):
            npgp.observe(name, f(X), npgp.Gaussian(variance=0.1), obs=y)

    def plate(lengthscale, y):
        def model():
            value = numpyro.param("lengthscale", lengthscale)
            with numpyro.plate("functions", Q, dim=-2):
                f = npgp.SparseGP("f", npgp.RBF(value), Z).draw()
            with numpyro.plate("functions", Q, dim=-2):
                observed("y", f, y)

        return model

    def components(names):
        def model():
            value = numpyro.param("lengthscale", lengthscales)
            for q in names:
                f = npgp.SparseGP(f"f{q}", npgp.RBF(value[q, 0]), Z).draw()
                observed(f"y{q}", f, Y[q])

        return model

    models = {
        "one function": components(range(1)),
        "a plate, one kernel": plate(lengthscales[0, 0], Y),
        "a plate, a kernel each": plate(lengthscales, Y),
        "components": components(range(Q)),
    }
    jobs = {}
    for name, model in models.items():
        svi = SVI(model, npgp.AutoSparseGP(model, joint=False), npgp.adam(0.01, 10), TraceMeanField_ELBO())
        state = svi.init(jax.random.key(0))
        step = jax.jit(svi.update)
        jobs[name] = functools.partial(step, state)
    times = interleaved(jobs, args.repetitions)
    return {name: 1e3 * float(np.median(seconds)) for name, seconds in times.items()}


def main(argv: list[str] | None = None) -> dict[str, object]:
    args = parse(argv)
    fits = [fitted(own, seed, args) for seed in range(args.seeds) for own in (True, False)]
    rows = [
        (
            "each" if fit["own"] else "one",
            fit["seed"],
            ", ".join(f"{length:.3f}" for length in fit["lengthscales"]),
            f"{fit['noise']:.3f}",
            f"{fit['elbo']:.1f}",
            f"{fit['log_density']:.3f}",
        )
        for fit in fits
    ]
    print(table(["lengthscales", "seed", "found", "noise", "ELBO", "log density"], rows))
    note(f"True: lengthscales {LENGTHSCALES.tolist()}, noise {NOISE}. Log density of a new observation, in nats.")
    times = steps(args)
    one = times["one function"]
    print(
        table([f"step, Q = {args.functions}", "times one function"], [(n, f"{t / one:.2f}") for n, t in times.items()])
    )
    report = {
        "command": command(__file__, argv),
        "fits": fits,
        "times_one_function": {n: t / one for n, t in times.items()},
    }
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
