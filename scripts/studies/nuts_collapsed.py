"""NUTS over hyperparameters with q(ε) collapsed, against NUTS over inducing values and hyperparameters."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

import npgp
from common import clock
from studies.runner import Records, Study

#: Nats by which the last step of the search may move q(ε): the bound is off by a tenth of that.
TOLERANCE = 1e-2

HYPERPARAMETERS = ("lengthscale", "variance", "level")


def banana(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, Callable]:
    data = npgp.datasets.load("banana_large")
    chosen = rng.permutation(len(data["y"]))[:rows]
    return data["X"][chosen], data["y"][chosen], npgp.Bernoulli


def counts(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, Callable]:
    X = rng.uniform(0.0, 1.0, (rows, 2))
    r = np.sqrt(3.0) * np.linalg.norm((X[:, None] - X) / [0.25, 0.5], axis=-1)
    f = 0.8 * np.linalg.cholesky((1.0 + r) * np.exp(-r) + 1e-8 * np.eye(rows)) @ rng.normal(size=rows)
    return X, rng.poisson(np.exp(0.7 + f)), npgp.Poisson


DATA = {"banana": banana, "counts": counts}


def kernel_and_level(X: jax.Array, counted: bool) -> tuple[npgp.kernels.Kernel, jax.Array | float]:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.full(X.shape[1], jnp.log(0.5)), 1.0).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0)) if counted else 0.0
    return npgp.Matern32(lengthscale, variance=variance), level


def whole_model(X, y, Z, likelihood):
    kernel, level = kernel_and_level(X, likelihood is npgp.Poisson)
    f = npgp.SparseGP("f", kernel, Z).draw()
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X) + level, likelihood(), obs=y)


def collapsed_model(X, y, Z, likelihood, start=None):
    kernel, level = kernel_and_level(X, likelihood is npgp.Poisson)
    options = {} if start is None else {"start": start, "tolerance": TOLERANCE}
    numpyro.sample("y", npgp.CollapsedGP(kernel, X, Z, likelihood=likelihood(), offset=level, **options), obs=y)


def sites_at_the_mode(X, y, Z, likelihood):
    """What the search for q(ε) begins with: pseudo-observations at the mode of the hyperparameters."""
    found = npgp.fit_collapsed(jax.random.key(0), collapsed_model, X, y, Z, likelihood, progress=False).params
    kernel = npgp.Matern32(found["lengthscale_auto_loc"], variance=found["variance_auto_loc"])
    level = found.get("level_auto_loc", 0.0)
    return npgp.CollapsedGP(kernel, X, Z, likelihood=likelihood(), offset=level).sites(y)


#: Each sampler's model, and what the hyperparameters' mass matrix is to be, given their names.
SAMPLERS: dict[str, tuple[Callable, Callable[[tuple[str, ...]], Any]]] = {
    "whole": (whole_model, lambda names: False),
    "blocks": (whole_model, lambda names: [names]),
    "collapsed": (collapsed_model, lambda names: True),
}


class Sampler:
    """NUTS of one model in two programs, warm-up and draws, so that the draws are timed alone."""

    def __init__(self, model: Callable, dense: Any, data: tuple, args: argparse.Namespace):
        self._clock = clock(args.cpu_time)
        kernel = NUTS(model, target_accept_prob=0.9, dense_mass=dense)
        options = dict(num_warmup=args.warmup, num_samples=args.draws, progress_bar=False)

        @jax.jit
        def warm_up(key):
            mcmc = MCMC(kernel, **options)
            mcmc.warmup(key, *data)
            return mcmc.last_state

        @jax.jit
        def draw(state):
            mcmc = MCMC(kernel, **{**options, "num_warmup": 0})
            mcmc.post_warmup_state = state
            mcmc.run(state.rng_key, *data, extra_fields=("diverging", "num_steps"))
            return mcmc.get_samples(), mcmc.get_extra_fields()

        self._warm_up, self._draw = warm_up, draw
        self.chains: list[np.ndarray] = []
        self.seconds: list[float] = []
        self.leapfrogs: list[float] = []
        self.divergences = 0

    def turn(self, key: jax.Array) -> None:
        """A chain more."""
        state = jax.block_until_ready(self._warm_up(key))
        compiled = self._draw.lower(state).compile()
        began = self._clock()
        samples, extra = jax.block_until_ready(compiled(state))
        self.seconds.append(self._clock() - began)
        values = [
            samples[name] if name == "level" else jnp.log(samples[name]) for name in HYPERPARAMETERS if name in samples
        ]
        self.chains.append(np.column_stack(values))
        self.leapfrogs.append(float(np.mean(extra["num_steps"])))
        self.divergences += int(np.sum(extra["diverging"]))

    def figures(self) -> dict[str, Any]:
        chains = np.stack(self.chains)
        ess = effective_sample_size(chains)
        flat = chains.reshape(-1, chains.shape[-1])
        return {
            "ess_per_second": float(np.min(ess)) / sum(self.seconds),
            "ess": float(np.min(ess)),
            "rhat": float(np.max(split_gelman_rubin(chains))),
            "leapfrogs": float(np.mean(self.leapfrogs)),
            "divergences": self.divergences,
            "seconds": sum(self.seconds),
            "mean": flat.mean(0).tolist(),
            "error": (flat.std(0) / np.sqrt(np.maximum(ess, 1.0))).tolist(),  # of very few draws ESS may be negative
            "sd": flat.std(0).tolist(),
        }


def compare(args: argparse.Namespace, data: str, M: int) -> Records:
    X, y, likelihood = DATA[data](args.rows, np.random.default_rng(args.seed))
    X, y = jnp.asarray(X, float), jnp.asarray(y)
    Z = npgp.inducing.kmeans(jax.random.key(args.seed), np.asarray(X), M)
    rows = (X, y, jnp.asarray(Z, X.dtype))
    names = HYPERPARAMETERS if likelihood is npgp.Poisson else HYPERPARAMETERS[:2]
    given: dict[str, dict[str, Any]] = {how: {} for how in SAMPLERS}
    given["collapsed"]["start"] = sites_at_the_mode(*rows, likelihood)
    samplers = {
        how: Sampler(partial(model, likelihood=likelihood, **given[how]), dense(names), rows, args)
        for how, (model, dense) in SAMPLERS.items()
        if how in args.samplers
    }
    for turn in range(args.turns):
        for sampler in samplers.values():
            sampler.turn(jax.random.fold_in(jax.random.key(args.seed), turn))
    figures = {how: sampler.figures() for how, sampler in samplers.items()}
    best = max(figures.keys() & {"whole", "blocks"}, key=lambda how: figures[how]["ess_per_second"])
    found = []
    for how, of in figures.items():
        gap = np.abs(np.subtract(of["mean"], figures[best]["mean"])) / figures[best]["sd"]
        ratio = of["ess_per_second"] / figures[best]["ess_per_second"]
        found.append({"sampler": how} | of | {"ratio": ratio, "difference": float(np.max(gap))})
    return found


STUDIES = {
    "nuts-collapsed": Study(
        """NUTS over hyperparameters with q(ε) collapsed, against NUTS over inducing values and hyperparameters.

Two data sets with likelihoods that are not Gaussian: banana (two classes), and counts of 500 rows simulated from a GP
with two columns. The model is the same both times: log-normal priors of two lengthscales and the variance, a level for
counts, M inducing points.

    whole       ``npgp.SparseGP`` and ``npgp.observe`` without a guide: NUTS samples ε too
    blocks      the same, with one dense mass matrix for all hyperparameters, and a diagonal one for ε
    collapsed   ``npgp.CollapsedGP(kernel, X, Z, likelihood=...)``: the bound at the best q(ε) stands for the evidence;
                a dense mass matrix. The search for q(ε) starts from the sites at the hyperparameters' mode, which
                ``npgp.fit_collapsed`` finds, and ends where a step would move q(ε) by a hundredth of a nat

All are compiled whole and run by turns; ratio and difference are to the better of the first two. They target different
densities: ``whole`` takes rows as independent given ε (FITC's density, no bound), ``collapsed`` a bound to the GP's.
With ``--M`` near the number of rows they meet, up to what the Gaussian q leaves.""",
        compare,
        {"data": tuple(DATA), "M": (30,)},
        {
            "ess_per_second": ("ESS/s", 1),
            "ratio": ("ratio", 2),
            "ess": ("ESS", 0),
            "rhat": ("R-hat", 3),
            "leapfrogs": ("leapfrogs", 1),
            "divergences": ("divergent", 0),
            "difference": ("means apart, SDs", 2),
        },
        {"warmup": 300, "draws": 500, "turns": 3, "seed": 0, "rows": 500, "samplers": tuple(SAMPLERS)},
        rows=("data", "M", "sampler"),
        quick={"data": ["counts"], "M": [4], "warmup": 5, "draws": 8, "turns": 1, "rows": 20} | {"samplers": ["whole"]},
        note="Of the hyperparameter that mixes worst, per second of the run, warm-up left out.",
        x64=False,
    )
}
