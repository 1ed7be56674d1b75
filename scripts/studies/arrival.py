"""Training that ends by itself: where it ends from several rates and keys, and how long it takes."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from common import clock
from studies import panel
from studies.runner import Study


def regression(rows: int):
    rng = np.random.default_rng(0)
    X, dose = rng.uniform(0.0, 6.0, (rows, 1)), rng.uniform(size=rows)
    y = np.sin(2.0 * X[:, 0]) + 0.7 * dose + 0.2 * rng.normal(size=rows)
    Z = np.linspace(0.0, 6.0, 20)[:, None]

    def model(X, dose, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        f = npgp.SparseGP("f", npgp.RBF(lengthscale), Z).draw()
        with numpyro.plate("data", rows):
            npgp.observe("y", f(X) + effect * dose, npgp.Gaussian(scale=noise), obs=y)

    return model, (X, dose, y), "effect"


def counts(rows: int):
    rng = np.random.default_rng(0)
    place, x, group = rng.uniform(size=(rows, 2)), rng.normal(size=(rows, 2)), rng.integers(0, 6, rows)
    rate = 1.5 + x @ [0.5, -0.3] + 0.4 * rng.normal(size=6)[group] + 0.6 * np.sin(6.0 * place[:, 0])
    Z = np.stack(np.meshgrid(*2 * [np.linspace(0.05, 0.95, 5)]), -1).reshape(-1, 2)

    def model(place, x, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 6):
            of_group = numpyro.sample("of_group", dist.Normal(0.0, spread))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.5))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        f = npgp.SparseGP("f", npgp.Matern32(lengthscale, variance=scale**2), Z).draw()
        with numpyro.plate("data", rows):
            npgp.observe("y", f(place) + level + x @ effect + of_group[group], npgp.Poisson(), obs=y)

    return model, (place, x, rng.poisson(np.exp(rate))), "level"


def classes(rows: int):
    rng = np.random.default_rng(0)
    X, x = rng.uniform(0.0, 6.0, (rows, 1)), rng.normal(size=(rows, 2))
    y = rng.uniform(size=rows) < 1.0 / (1.0 + np.exp(-2.0 * np.sin(X[:, 0]) - x @ [1.0, -0.5]))
    Z = np.linspace(0.0, 6.0, 15)[:, None]

    def model(X, x, y=None):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=2.0), Z).draw()
        with numpyro.plate("data", rows):
            npgp.observe("y", f(X) + level + x @ effect, npgp.Bernoulli(), obs=y)

    return model, (X, x, y.astype(float)), "level"


def of_panel(rows: int):
    X, y, held_out = panel.simulate(rows // 12, 12, 0)
    Z, Z_own = (np.linspace(0.0, 10.0, m)[:, None] for m in (12, 6))

    def model(X, y=None):
        panel.model(X, y, groups=len(y_seen), Z=Z, Z_own=Z_own)

    y_seen = jnp.where(held_out, jnp.nan, y)
    return model, (X, y_seen), "level"


def areas(rows: int):
    """The hierarchy of notebooks/03-gp-in-a-hierarchical-model.py, on fewer areas of a unit square."""
    rng = np.random.default_rng(4)
    S, x = rng.uniform(size=(rows, 2)), rng.normal(size=(rows, 2))
    region = np.argmin(np.linalg.norm(S[:, None] - rng.uniform(size=(8, 2)), axis=-1), axis=1)
    exposure = np.exp(rng.normal(np.log(10.0), 0.6, rows))
    smooth = 0.6 * np.sin(7.0 * S[:, 0]) * np.cos(5.0 * S[:, 1])
    y = rng.poisson(exposure * np.exp(0.2 + x @ [0.25, -0.2] + 0.3 * rng.normal(size=8)[region] + smooth))
    Z = npgp.inducing.greedy_variance(npgp.Matern32(0.2), S, 60)

    def model(S, region, x, exposure, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.plate("covariate", 2):
            beta = numpyro.sample("beta", dist.Normal(0.0, 0.5))
        spread = numpyro.sample("spread", dist.HalfNormal(0.5))
        with numpyro.plate("region", 8):
            effect = numpyro.sample("effect", dist.Normal(0.0, spread))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(0.2), 0.5))
        amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
        f = npgp.SparseGP("f", npgp.Matern32(lengthscale, variance=amplitude**2), Z).draw()
        with numpyro.plate("area", rows):
            log_risk = f(S) + level + x @ beta + effect[region]
            npgp.observe("y", log_risk, npgp.Poisson(exposure=exposure), obs=y)

    return model, (S, region, x, exposure, y), "level"


MODELS = {"regression": regression, "counts": counts, "panel": of_panel, "classes": classes, "areas": areas}
GUIDES: dict[str, dict[str, Any]] = {"default": {}, "pseudo-data": {"dependence": "pseudo-data"}}


def arrive(args: argparse.Namespace, of: str, guide: str, rate: float, seed: int) -> dict[str, Any]:
    model, data, site = MODELS[of](args.rows)
    q = npgp.AutoSparseGP(model, **GUIDES[guide])
    svi = SVI(model, q, npgp.adam(rate), TraceMeanField_ELBO(num_particles=args.particles))
    arrival, now = npgp.training.Arrival(window=args.window, max_steps=args.most), clock(args.cpu_time)
    began = now()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", npgp.training.TrainingWarning)  # the table says what has not arrived
        result = npgp.fit(svi, jax.random.key(seed), None, *data, callbacks=[arrival], progress=False)
    seconds = now() - began
    values = jax.lax.map(
        lambda key: svi.loss.loss(key, result.params, model, q, *data), jax.random.split(jax.random.key(9), args.draws)
    )
    draws = q.sample_posterior(jax.random.key(1), result.params, *data, sample_shape=(args.draws,))[site]
    convergence = result.convergence
    return {
        "elbo": -float(np.mean(values)),
        "site_sd": float(np.std(draws)),
        "steps": convergence.steps,
        "seconds": seconds,
        "arrived": int(convergence.arrived),
    }


STUDIES = {
    "arrival": Study(
        """Training that ends by itself: where it ends from several rates and keys, and how long it takes.

Five simulated models, trained with num_steps=None: a regression with a covariate, counts with covariates and groups, a
panel of functions and levels, two classes with two covariates, and a hierarchy of areas. The best ELBO is that of the
best row of each.""",
        arrive,
        {"of": tuple(MODELS), "guide": tuple(GUIDES), "rate": (0.1, 0.03, 0.005), "seed": (0, 1, 2)},
        {
            "elbo": ("ELBO", 2),
            "site_sd": ("sd of effect or level", 3),
            "steps": ("steps", 0),
            "seconds": ("seconds", 0),
            "arrived": ("arrived", 2),
        },
        {"rows": 120, "particles": 4, "draws": 2000, "window": 500, "most": 200_000},
        quick={"rows": 24, "draws": 4, "window": 2, "most": 4, "of": ["regression"], "guide": ["default"]},
        note="The sd is of the effect of the dose in the regression, and of the level in the others.",
        x64=False,
    )
}
