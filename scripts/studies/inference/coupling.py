#!/usr/bin/env python
"""A q(ε) that follows the other sites against an independent one: ELBO, intervals, widths, seconds per step.

The model of notebook 03: counts of a disease in areas of a map, with a level, two covariates, effects of eight regions
and a Matérn-3/2 GP. It is trained six times: with q(ε) independent of the other sites, with coupled means, and given
pseudo-data, each with AutoNormal and AutoMultivariateNormal for the other sites.

- ELBO: over draws of the guide, with its standard error.
- Intervals: how many of 13 quantities (two covariates, level, spread and amplitude, eight regions) have their true
  value in the 90% interval of the guide's draws. With 13 quantities of one data set this is no measure of coverage.
- sd: standard deviations of level, covariates and regions' effects (least and greatest), spread, amplitude and
  lengthscale; with --nuts they are divided by those of NUTS, whose own Monte Carlo error is some 3% to 5%.
- Time: seconds per step relative to the first dependence (independent) with the same autoguide, by turns: median and
  quartiles.

    python scripts/studies/inference/coupling.py                  a simulated map of 60 areas, 500 steps
    python scripts/studies/inference/coupling.py --full           the map of notebook 03, 300 areas, 4000 steps
    python scripts/studies/inference/coupling.py --full --nuts 1200   with so many draws of NUTS to compare with
    python scripts/studies/inference/coupling.py --quick          a check that it runs
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro.infer import NUTS, SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, clock, command, interleaved_steps, plus_minus, quartiles, table, whole, write_json
from studies.shared import mcmc_draws

REGIONS = 8
TRUTH = {"level": 0.2, "beta": np.array([0.25, -0.2]), "spread": 0.3, "lengthscale": 20.0, "amplitude": 0.6}
#: In the order of the notebook's picture.
QUANTITIES = ("beta", "level", "spread", "amplitude", "effect")
GUIDES = {"AutoNormal": AutoNormal, "AutoMultivariateNormal": AutoMultivariateNormal}
DEPENDENCES = ("independent", "coupled", "pseudo-data")
#: Sites whose standard deviations are shown.
SHOWN = ("level", "beta", "effect", "spread", "amplitude", "lengthscale")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--areas", type=whole, default=60)
    parser.add_argument("--guides", nargs="+", choices=list(GUIDES), default=list(GUIDES), help="of the other sites")
    parser.add_argument("--dependences", nargs="+", choices=DEPENDENCES, default=list(DEPENDENCES), help="of q(ε)")
    parser.add_argument("--draws", type=whole, default=1000, help="of each guide, for ELBO and intervals")
    parser.add_argument("--nuts", type=whole, default=0, help="draws of NUTS, after a third as many to warm up")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn of timing")
    parser.shared(
        "quick", "full", "cpu-time", "json", inducing=12, steps=500, learning_rate=0.02, repetitions=5, seed=1
    )
    quick = {"areas": 20, "draws": 20, "steps": 5, "repetitions": 1, "seconds": 0.01}
    few = {"guides": ["AutoMultivariateNormal"], "dependences": ["independent", "pseudo-data"]}
    args = parser.read(argv, quick=quick | few)
    if args.full:
        args.areas, args.inducing, args.steps, args.draws, args.repetitions = 300, 80, 4000, 4000, 15
    return args


def simulate(areas: int) -> tuple[tuple, np.ndarray, dict]:
    """Inputs, counts and true values; those of notebook 03 for 300 areas."""
    rng = np.random.default_rng(4)
    S = rng.uniform(0, 100, (areas, 2))  # km
    town = [70.0, 62.0] + rng.uniform(0, 5, (20, 2))
    axis = np.linspace(1, 99, 40 if areas == 300 else 15)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    # The notebook draws f at places for its later parts too, by which the numbers after depend on them.
    places = np.concatenate([S, town, grid])
    r = np.sqrt(3) * np.linalg.norm(places[:, None] - places, axis=-1) / TRUTH["lengthscale"]
    covariance = TRUTH["amplitude"] ** 2 * (1 + r) * np.exp(-r) + 1e-8 * np.eye(len(places))
    f = (np.linalg.cholesky(covariance) @ rng.normal(size=len(places)))[:areas]
    centers = rng.uniform(0, 100, (REGIONS, 2))
    region = np.argmin(np.linalg.norm(S[:, None] - centers, axis=-1), axis=1)
    truth = TRUTH | {"effect": TRUTH["spread"] * rng.normal(size=REGIONS)}
    deprivation = 0.6 * f / TRUTH["amplitude"] + 0.8 * rng.normal(size=areas)
    x = np.column_stack([deprivation, rng.normal(size=areas)])
    exposure = np.exp(rng.normal(np.log(10), 0.6, areas))
    y = rng.poisson(exposure * np.exp(truth["level"] + x @ truth["beta"] + truth["effect"][region] + f))
    return (S, region, x, exposure), y, truth


def model(S, region, x, exposure, y=None, *, Z):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("covariate", x.shape[1]):
        beta = numpyro.sample("beta", dist.Normal(0.0, 0.5))
    spread = numpyro.sample("spread", dist.HalfNormal(0.5))
    with numpyro.plate("region", REGIONS):
        effect = numpyro.sample("effect", dist.Normal(0.0, spread))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(20.0), 0.5))  # km
    amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
    f = npgp.SparseGP("f", npgp.Matern32(lengthscale, variance=amplitude**2), Z).draw()
    with numpyro.plate("area", S.shape[0]):
        npgp.observe("y", f(S) + level + x @ beta + effect[region], npgp.Poisson(exposure=exposure), obs=y)


def flat(values: dict, *draws: int) -> np.ndarray:
    """The 13 quantities, or draws of them as rows."""
    return np.concatenate([np.asarray(values[name]).reshape(*draws, -1) for name in QUANTITIES], axis=-1)


def said(draws: dict, truth: dict) -> dict:
    """How many intervals hold the truth, and standard deviations."""
    drawn, true = flat(draws, len(draws["level"])), flat(truth)
    low, high = np.quantile(drawn, [0.05, 0.95], axis=0)
    return {
        "inside": int(np.sum((low < true) & (true < high))),
        "sd": {name: np.atleast_1d(np.asarray(draws[name], np.float64).std(axis=0)).tolist() for name in SHOWN},
    }


def by_nuts(data: tuple, Z: np.ndarray, draws: int, truth: dict) -> dict:
    """The same of NUTS, which samples the whitened inducing values, too."""
    kernel = NUTS(partial(model, Z=jnp.asarray(Z)))
    return said(mcmc_draws(kernel, jax.random.key(6), draws // 3, draws, *data), truth)


class Fit:
    """One guide: its training, what it says, and steps for timing."""

    def __init__(self, autoguide: str, dependence: str, data: tuple, Z: np.ndarray, args: argparse.Namespace):
        self.data, self.args = data, args
        of_map = partial(model, Z=jnp.asarray(Z))
        self.guide = npgp.AutoSparseGP(of_map, partial(GUIDES[autoguide], init_scale=0.1), dependence=dependence)
        self.svi = SVI(of_map, self.guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
        self.key = jax.random.key(args.seed)

    def figures(self, truth: dict) -> dict:
        """Trains, and measures."""
        args = self.args
        result = npgp.fit(self.svi, self.key, args.steps, *self.data, progress=False)
        self.state = result.state
        guide, params = self.guide, result.params

        @jax.jit
        def measure(params, key):
            keys = jax.random.split(key, args.draws)
            losses = lax.map(
                lambda k: self.svi.loss.loss(k, params, self.svi.model, guide, *self.data), keys, batch_size=50
            )
            return losses, guide.sample_posterior(key, params, *self.data, sample_shape=(args.draws,))

        losses, draws = measure(params, jax.random.key(2))
        elbos = -np.asarray(losses, np.float64)
        return {
            "elbo": float(elbos.mean()),
            "error": float(elbos.std(ddof=1) / np.sqrt(len(elbos))),
            **said(draws, truth),
        }

    def advance(self):
        """A function from a number of steps to seconds per step."""

        @jax.jit
        def run(state, steps):
            return lax.fori_loop(0, steps, lambda _, s: self.svi.update(s, *self.data)[0], state)

        now = clock(self.args.cpu_time)

        def timed(steps: int) -> float:
            began = now()
            jax.block_until_ready(run(self.state, steps))
            return (now() - began) / steps

        return timed


def span(values: np.ndarray) -> str:
    """A number, or the least and the greatest of several."""
    ends = [f"{value:.2f}" for value in (values.min(), values.max())]
    return ends[0] if values.size == 1 else "–".join(ends)


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    inputs, y, truth = simulate(args.areas)
    Z = npgp.inducing.greedy_variance(npgp.Matern32(20.0), inputs[0], args.inducing)
    data = tuple(map(jnp.asarray, (*inputs, y)))
    fits = {(g, d): Fit(g, d, data, Z, args) for g in args.guides for d in args.dependences}
    figures = {}
    for (g, d), fit in fits.items():
        figures[g, d] = fit.figures(truth)
        print(f"{g}, {d}: ELBO {figures[g, d]['elbo']:.1f}", flush=True)
    nuts = by_nuts(data, Z, args.nuts, truth) if args.nuts else None
    if nuts:
        print(f"NUTS: {nuts['inside']} of 13 inside")
    seconds = interleaved_steps({name: fit.advance() for name, fit in fits.items()}, args.repetitions, args.seconds)
    rows = []
    for g, d in fits:
        own = figures[g, d]
        own["seconds"] = quartiles(seconds[g, d])
        own["ratio"] = quartiles(seconds[g, d] / seconds[g, args.dependences[0]])
        low, middle, high = own["ratio"]
        ratio = "1" if d == args.dependences[0] else f"{middle:.2f} ({low:.2f}–{high:.2f})"
        elbo = plus_minus(own["elbo"], own["error"], 1)
        inside = f"{own['inside']} of 13"
        widths = [np.divide(own["sd"][name], nuts["sd"][name] if nuts else 1.0) for name in SHOWN]
        rows.append([g, d, elbo, inside, *map(span, widths), ratio])
    print(table(["other sites", "q(ε)", "ELBO", "inside", *SHOWN, "time"], rows, (0, 1), markdown=True))
    report = {
        "command": command(__file__, argv),
        "areas": args.areas,
        "inducing": args.inducing,
        "steps": args.steps,
        "nuts": nuts,
        "fits": [{"guide": g, "dependence": d} | own for (g, d), own in figures.items()],
    }
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
