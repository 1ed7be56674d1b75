"""Training that ends by itself: where it ends from several rates and keys, and how long it takes."""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO

import npgp
from common import clock, table
from studies import panel
from studies.fits import nuts_draws
from studies.runner import Records, Study


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


def count_map(rows: int):
    """Counts at places of a unit square, in batches of 500 where there are more than 5,000."""
    rng = np.random.default_rng(1)
    S = rng.uniform(size=(rows, 2))
    y = rng.poisson(np.exp(1.0 + np.sin(6.0 * S[:, 0]) * np.cos(4.0 * S[:, 1])))
    Z = np.stack(np.meshgrid(*2 * [np.linspace(0.05, 0.95, 8)]), -1).reshape(-1, 2)

    def model(S, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.5))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        f = npgp.SparseGP("f", npgp.Matern52(lengthscale, variance=scale**2), Z).draw()
        with npgp.plate("data", rows, rows=len(S)):
            npgp.observe("y", f(S) + level, npgp.Poisson(), obs=y)

    return model, (S, y), "level", {"batch_size": 500} if rows > 5000 else {}


def layers(rows: int):
    rng = np.random.default_rng(3)
    X = np.sort(rng.uniform(-1.0, 1.0, (rows, 1)), axis=0)
    y = np.sign(X[:, 0]) + 0.05 * rng.normal(size=rows)
    Z = np.linspace(-1.0, 1.0, 12)[:, None]

    def model(X, y=None):
        noise = numpyro.sample("noise", dist.HalfNormal(0.3))
        inner = npgp.RBF(numpyro.sample("inner", dist.LogNormal(-0.7, 0.5)), variance=0.3)
        outer = npgp.RBF(numpyro.sample("outer", dist.LogNormal(-0.7, 0.5)))
        f = npgp.DeepGP("f", [npgp.Layer(inner, Z), npgp.Layer(outer, Z)]).draw()
        with numpyro.plate("data", rows):
            npgp.observe("y", f(X), npgp.Gaussian(scale=noise), obs=y)

    return model, (X, y), "outer"


MODELS = {
    "regression": regression,
    "counts": counts,
    "panel": of_panel,
    "classes": classes,
    "areas": areas,
    "map": count_map,
    "layers": layers,
}
GUIDES: dict[str, dict[str, Any]] = {"default": {}, "pseudo-data": {"dependence": "pseudo-data"}}


def by_nuts(args: argparse.Namespace, model: Any, data: Any, site: str, seed: int) -> dict[str, Any]:
    now = clock(args.cpu_time)
    began = now()
    draws = nuts_draws(model, jax.random.key(seed), args.draws // 4, args.draws // 2, *data)
    sd = float(np.mean(np.std(draws[site], axis=0)))
    return {"elbo": None, "site_sd": sd, "steps": None, "seconds": now() - began, "arrived": None}


def arrive(args: argparse.Namespace, of: str, guide: str, rate: float, seed: int) -> dict[str, Any]:
    model, data, site, *others = MODELS[of](args.rows)
    if guide == "NUTS":
        return by_nuts(args, model, data, site, seed)
    options: dict[str, Any] = dict(*others)
    q, steps = npgp.AutoSparseGP(model, **GUIDES[guide]), args.given or None
    svi = SVI(model, q, npgp.adam(rate, steps), TraceMeanField_ELBO(num_particles=args.particles))
    if steps is None:
        options["callbacks"] = [npgp.training.Arrival(window=args.window, max_steps=args.most)]
    now = clock(args.cpu_time)
    began = now()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", npgp.training.TrainingWarning)  # the table says what has not arrived
        result = npgp.fit(svi, jax.random.key(seed), steps, *data, progress=False, **options)
    seconds = now() - began
    values = jax.lax.map(
        lambda key: svi.loss.loss(key, result.params, model, q, *data), jax.random.split(jax.random.key(9), args.draws)
    )
    draws = q.sample_posterior(jax.random.key(1), result.params, *data, sample_shape=(args.draws,))[site]
    convergence = result.convergence
    return {
        "elbo": -float(np.mean(values)),
        "site_sd": float(np.mean(np.std(draws, axis=0))),
        "steps": convergence.steps,
        "seconds": seconds,
        "arrived": int(convergence.arrived),
    }


KERNELS = (npgp.RBF, npgp.Matern32, npgp.Matern52)
LIKELIHOODS = {
    "Gaussian": lambda scale: npgp.Gaussian(scale=scale),
    "Student-t": lambda scale: npgp.StudentT(df=4.0, scale=scale),
    "Poisson": lambda scale: npgp.Poisson(),
    "Bernoulli": lambda scale: npgp.Bernoulli(),
}


def random_model(number: int):
    """
    A model of 50 to 500 rows, its data, drawn from its prior, its likelihood and a description: one to three functions
    with hyperparameters, of one column or two, shared or one for each of five groups, some times a covariate; and none
    to three of a level, a slope and effects of groups.
    """
    rng = np.random.default_rng(number)
    rows, likelihood = int(np.exp(rng.uniform(np.log(50), np.log(500)))), list(LIKELIHOODS)[rng.integers(4)]
    X, x, group = rng.uniform(0.0, 5.0, (rows, 2)), rng.normal(size=rows), rng.integers(0, 5, rows)
    effects = set(rng.permutation(["level", "slope", "of_group"])[: rng.integers(4)])
    functions = {
        f"f{i}": (KERNELS[rng.integers(3)], int(rng.integers(3)), rng.choice(["", " by group", " times x"]))
        for i in range(rng.integers(1, 4))
    }
    grid = np.stack(np.meshgrid(*2 * [np.linspace(0.0, 5.0, 6)]), -1).reshape(-1, 2)

    def model(X, x, group, y=None):
        total = numpyro.sample("level", dist.Normal(0.0, 1.0)) if "level" in effects else 0.0
        if "slope" in effects:
            total += numpyro.sample("slope", dist.Normal(0.0, 0.5)) * x
        if "of_group" in effects:
            spread = numpyro.sample("spread", dist.HalfNormal(0.5))
            with numpyro.plate("groups", 5):
                total += numpyro.sample("of_group", dist.Normal(0.0, spread))[group]
        for name, (kernel, column, form) in functions.items():
            lengthscale = numpyro.sample(f"{name}.lengthscale", dist.LogNormal(0.3, 0.4))
            scale = numpyro.sample(f"{name}.scale", dist.HalfNormal(1.0))
            columns, Z = ([0, 1], grid) if column == 2 else ([column], np.linspace(0.0, 5.0, 15)[:, None])
            gp = npgp.SparseGP(name, kernel(lengthscale, variance=scale**2), Z)
            if form == " by group":
                with numpyro.plate("groups_of_functions", 5, dim=-2):
                    total += gp.draw()(X[:, columns])[group, np.arange(rows)]
            else:
                total += gp.draw()(X[:, columns]) * (x if form else 1.0)
        noise = numpyro.sample("noise", dist.HalfNormal(0.5)) if likelihood in ("Gaussian", "Student-t") else 1.0
        with numpyro.plate("data", rows):
            npgp.observe("y", total, LIKELIHOODS[likelihood](noise), obs=y)

    prior = jax.jit(lambda key: Predictive(model, num_samples=1)(key, X, x, group)["y"][0])
    of = [f"{kernel.__name__}{' of both' if column == 2 else ''}{form}" for kernel, column, form in functions.values()]
    description = f"{rows} rows; {', '.join([*of, *sorted(effects)])}"
    return model, (X, x, group, np.asarray(prior(jax.random.key(number)))), likelihood, description


def arrive_at_random(args: argparse.Namespace, model: int) -> dict[str, Any]:
    """
    ELBO and standard deviations of all latent values where ``npgp.infer`` ends, against averages over the second half
    of further steps at three tenths of the last rate, by the same random numbers.
    """
    program, data, likelihood, description = random_model(model)
    key, now, guide = jax.random.key(model), clock(args.cpu_time), npgp.AutoSparseGP(program)
    svi = SVI(program, guide, npgp.adam(0.05), TraceMeanField_ELBO(num_particles=4))  # as in npgp.infer
    fit = partial(npgp.fit, svi, key, None, *data, progress=False)
    began = now()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(callbacks=[npgp.training.Arrival(window=args.window, max_steps=args.most)])
    seconds = now() - began
    messages = [str(w.message) for w in caught if issubclass(w.category, npgp.training.TrainingWarning)]
    of_points = [message for message in messages if "what inducing points leave" in message]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", npgp.training.TrainingWarning)
        further = npgp.training.Arrival(tolerance=1e-3, window=args.steps // 2, max_steps=args.steps)
        best = fit(callbacks=[further], init_state=_slower(result.state)).params

    @jax.jit
    def gains(found, best):
        loss = lambda key, params: svi.loss.loss(key, params, program, guide, *data)  # noqa: E731
        keys = jax.random.split(jax.random.key(9), args.draws // 8)
        return jax.lax.map(lambda key: loss(key, found) - loss(key, best), keys, batch_size=min(16, len(keys)))

    gain = np.asarray(gains(result.params, best))
    sample = jax.jit(lambda params: guide.sample_posterior(key, params, *data, sample_shape=(args.draws,)))
    found, at_best = sample(result.params), sample(best)
    off = {name: np.max(np.abs(np.std(found[name], 0) / np.std(at_best[name], 0) - 1.0)) for name in found}
    moved = {
        name: np.max(np.abs(np.mean(found[name], 0) - np.mean(at_best[name], 0)) / np.std(at_best[name], 0))
        for name in found
    }
    site = max(off, key=lambda name: off[name])
    return {
        "likelihood": likelihood,
        "description": description,
        "gain": float(np.mean(gain)),
        "gain_error": float(np.std(gain) / np.sqrt(len(gain))),
        "off": float(off[site]),
        "site": site,
        "off_all": {name: float(value) for name, value in off.items()},
        "moved": {name: float(value) for name, value in moved.items()},
        "within": int(np.mean(gain) <= max(0.5, 0.005 * len(data[0])) and off[site] <= 0.1),
        "warned": int(len(messages) > len(of_points)),
        "few_points": len(of_points),
        "warnings": messages,
        "rates": result.convergence.rates,
        "steps": result.convergence.steps,
        "seconds": seconds,
    }


def _slower(state: Any) -> Any:
    """The state of a training, at a lower rate."""
    is_leaf = lambda x: hasattr(x, "factor")  # noqa: E731
    return jax.tree.map(lambda x: x._replace(factor=0.3 * x.factor) if is_leaf(x) else x, state, is_leaf=is_leaf)


def outside(records: Records, markdown: bool) -> str:
    """The models that ended outside the limits, or with a warning that the posterior still moves."""
    lines = [
        [r["model"], f"{r['likelihood']}, {r['description']}", f"{r['gain']:.2f}", f"{100 * r['off']:.0f}%", r["site"]]
        + ["yes" if r["within"] else "no", "yes" if r["warned"] else "no"]
        for r in records
        if r["warned"] or not r["within"]
    ]
    heads = ["model", "", "ELBO below, nats", "sd off by", "of site", "within", "warned"]
    unwarned = sum(not (r["within"] or r["warned"]) for r in records)
    title = f"{sum(r['within'] for r in records)} of {len(records)} are within the limits; {unwarned} are outside"
    return f"{title} without a warning.\n\n{table(heads, lines, left=(0, 1, 4, 5, 6), markdown=markdown)}"


STUDIES = {
    "arrival": Study(
        """Training that ends by itself: where it ends from several rates and keys, and how long it takes.

Simulated models, trained with num_steps=None: a regression with a covariate, counts with covariates and groups, a panel
of functions and levels, two classes with two covariates, a hierarchy of areas, a map of counts (--rows 20000: in
minibatches) and a deep GP of two layers. The best ELBO is that of the best row of each.""",
        arrive,
        {"of": tuple(MODELS), "guide": tuple(GUIDES), "rate": (0.1, 0.03, 0.005), "seed": (0, 1, 2)},
        {
            "elbo": ("ELBO", 2),
            "site_sd": ("sd of effect or level", 3),
            "steps": ("steps", 0),
            "seconds": ("seconds", 0),
            "arrived": ("arrived", 2),
        },
        {"rows": 120, "particles": 4, "draws": 2000, "window": 100, "most": 200_000, "given": 0},
        quick={"rows": 24, "draws": 4, "window": 2, "most": 4, "of": ["regression"], "guide": ["default"]}
        | {"rate": [0.1], "seed": [0]},
        choices={"guide": (*GUIDES, "NUTS")},
        note="The sd is of the effect of the dose in the regression, of the outer layer's lengthscale, and "
        "of the level in the others.",
        x64=False,
    ),
    "random-models": Study(
        """How often training that ends by itself ends at the optimum: random models.

Within the limits is an ELBO at most half a nat, or .005 nats a row, below that after further steps, and standard
deviations of all latent values within a tenth of those. A better optimum elsewhere is not searched for.""",
        arrive_at_random,
        {"model": tuple(range(100))},
        {
            "within": ("within", 2),
            "warned": ("warned", 2),
            "few_points": ("of too few points", 2),
            "gain": ("ELBO below, nats", 2),
            "off": ("sd off by", 3),
            "steps": ("steps", 0),
            "seconds": ("seconds", 0),
        },
        {"draws": 2000, "window": 100, "most": 200_000, "steps": 6000},
        rows=("likelihood",),
        quick={"draws": 16, "window": 2, "most": 4, "steps": 4, "model": [2]},
        show=outside,
        note="The standard deviation is that of a latent value that is off by most.",
        x64=False,
    ),
}
