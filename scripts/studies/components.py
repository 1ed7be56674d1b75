"""Three components that share a signal, by SVI, against one GP with the summed kernel."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal
from numpyro.infer.initialization import init_to_value
from scipy.optimize import minimize

import npgp
from npgp.kernels import Matern32, Periodic
from studies.runner import Records, Study

#: Medians, and standard deviations of logarithms, of the hyperparameters' priors; values are standardized.
PRIORS = {
    "trend": (30.0, 0.5),
    "trend_scale": (3.0, 0.7),
    "season": (1.0, 0.4),
    "season_scale": (0.3, 0.7),
    "decay": (60.0, 0.5),
    "short": (1.0, 0.5),
    "short_scale": (0.1, 0.7),
    "noise": (0.05, 0.7),
}

GUIDES = {
    "joint": {},
    "each by itself": {"joint": False},
    "independent": {"dependence": "independent"},
}


def simulate(months: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Years (N, 1), and values."""
    rng = np.random.default_rng(seed)
    years = np.arange(months) / 12.0
    near = np.asarray(Matern32(1.0)(years[:, None])) + 1e-5 * np.eye(months)
    season = 2.8 * np.sin(2 * np.pi * years) + 0.8 * (1 + 0.01 * years) * np.cos(4 * np.pi * years)
    short = 0.4 * np.linalg.cholesky(near) @ rng.normal(size=months)
    values = 340 + 0.96 * years + 0.012 * years**2 + season + short + 0.25 * rng.normal(size=months)
    return years[:, None], values


def kernels(v) -> tuple:
    """Of trend, season and short scale."""
    return (
        npgp.RBF(v["trend"], variance=v["trend_scale"] ** 2),
        Periodic(1.0, lengthscale=v["season"], variance=v["season_scale"] ** 2) * npgp.RBF(v["decay"]),
        Matern32(v["short"], variance=v["short_scale"] ** 2),
    )


def exact(X: np.ndarray, y: np.ndarray, X_new: np.ndarray, draws: int) -> Iterator[tuple[str, np.ndarray, float]]:
    """
    By one GP with the summed kernel: a name, draws of the values to be forecast, and the log evidence; at
    the best hyperparameters, and at draws of these.
    """
    middle, width = np.log(np.transpose(list(PRIORS.values()))[0]), np.transpose(list(PRIORS.values()))[1]

    def covariance(z, a, b):
        return sum(k(a, b) for k in kernels(dict(zip(PRIORS, jnp.exp(z), strict=True))))

    def of_data(z):
        return covariance(z, X, X) + (jnp.exp(2 * z[-1]) + 1e-8) * jnp.eye(len(X))

    def evidence(z):
        return dist.MultivariateNormal(jnp.zeros(len(X)), of_data(z)).log_prob(y)

    def loss(z):
        return 0.5 * jnp.sum(jnp.square((z - middle) / width)) - evidence(z)

    def forecast(z, key):
        across = covariance(z, X_new, X)
        solved = jnp.linalg.solve(of_data(z), jnp.column_stack([y, across.T]))
        variance = jnp.diag(covariance(z, X_new, X_new)) - jnp.sum(across * solved[:, 1:].T, 1) + jnp.exp(2 * z[-1])
        return across @ solved[:, 0] + jnp.sqrt(variance) * jax.random.normal(key, variance.shape), evidence(z)

    value = jax.jit(jax.value_and_grad(loss))
    best = minimize(lambda z: [np.asarray(a, float) for a in value(z)], middle, jac=True, method="L-BFGS-B").x
    keys = jax.random.split(jax.random.key(3), 500)
    at_best, bound = jax.jit(lambda: lax.map(lambda key: forecast(best, key), keys))()
    yield "exact GP", np.asarray(at_best), float(bound[0])

    @jax.jit
    def sampled(key):
        kernel = NUTS(potential_fn=loss, dense_mass=True)
        mcmc = MCMC(kernel, num_warmup=draws // 2, num_samples=draws, progress_bar=False)
        mcmc.run(key, init_params=jnp.asarray(best))
        return lax.map(lambda a: forecast(*a), (mcmc.get_samples(), jax.random.split(key, draws)))

    averaged, bounds = sampled(jax.random.key(4))
    yield "exact GP, NUTS", np.asarray(averaged), float(np.mean(bounds))


def train(model, options: dict, X: np.ndarray, y: np.ndarray, args: argparse.Namespace) -> tuple:
    """A guide, and its fit."""

    def fit(guide, optim, steps, start=None):
        svi = SVI(model, guide, optim, TraceMeanField_ELBO())
        return npgp.fit(svi, jax.random.key(args.seed), steps, X, y, init_params=start, progress=False)

    if args.adam:
        guide = npgp.AutoSparseGP(model, **options)
        return guide, fit(guide, npgp.adam(args.learning_rate, args.steps), args.steps)
    point = npgp.AutoSparseGP(model, AutoDelta, **options)
    # Adam's averages would keep the gradients of the time when q knew nothing of the data for a thousand steps.
    params = fit(point, npgp.natural_gradient(0.7, optax.set_to_zero()), 20).params
    params = fit(point, npgp.natural_gradient(0.7, npgp.adam(0.05, args.before)), args.before, params).params
    values = {name: params[f"{name}_auto_loc"] for name in PRIORS}
    others = partial(AutoMultivariateNormal, init_loc_fn=init_to_value(values=values))
    guide = npgp.AutoSparseGP(model, others, **options)
    first = SVI(model, guide, npgp.adam(0.1), TraceMeanField_ELBO())
    start = {n: params.get(n, v) for n, v in first.get_params(first.init(jax.random.key(0), X, y)).items()}
    # The scale of the noise of pseudo-data is proportional to that of data, the last of the hyperparameters.
    start |= {n: v.at[-1].set(1.0) for n, v in start.items() if n.endswith(".noise_coupling")}

    def held(params):
        return {name: "held" if name.endswith(".coupling") else "trained" for name in params}

    # Where the noise is small, steps of all couplings at once are far too large, whatever their sign.
    rest = {"held": optax.set_to_zero(), "trained": npgp.adam(args.learning_rate, args.steps)}
    rate = optax.cosine_decay_schedule(0.3, args.steps)
    optim = npgp.natural_gradient(rate, optax.multi_transform(rest, held))
    return guide, fit(guide, optim, args.steps, start)


def forecasts(args: argparse.Namespace, q: str) -> dict[str, Any] | Records:
    """Trained on all but the last months, which are forecast."""
    years, values = simulate(args.months, args.seed)
    count = args.months - args.held_out
    level, scale = values[:count].mean(), values[:count].std()
    X, y = years[:count], (values[:count] - level) / scale
    test, y_test = years[count:], (values[count:] - level) / scale
    rng, end = np.random.default_rng(args.seed), float(X[-1, 0])
    # The season's are spread at random: evenly, they would see one month of the year alone.
    places = [np.linspace(0, end, m) if i != 1 else np.sort(rng.uniform(0, end, m)) for i, m in enumerate(args.points)]
    inducing = [Z[:, None] for Z in places]

    def model(X, y=None):
        v = {name: numpyro.sample(name, dist.LogNormal(np.log(m), s)) for name, (m, s) in PRIORS.items()}
        names = ("f.trend", "f.season", "f.short")
        drawn = [npgp.SparseGP(n, k, Z).draw() for n, k, Z in zip(names, kernels(v), inducing, strict=True)]
        with numpyro.plate("data", len(X)):
            npgp.observe("y", drawn[0](X) + drawn[1](X) + drawn[2](X), npgp.Gaussian(scale=v["noise"]), obs=y)

    def report(draws, bound, **more):
        lower, upper = np.quantile(draws, [0.025, 0.975], axis=0)
        rmse = float(np.sqrt(np.mean((draws.mean(0) - y_test) ** 2)) * scale)
        inside = float(np.mean((lower < y_test) & (y_test < upper)))
        return {"rmse": rmse, "inside": inside, "width": float(np.mean(upper - lower) * scale), "bound": bound} | more

    if q == "exact":
        return [{"by": name} | report(draws, bound) for name, draws, bound in exact(X, y, test, args.draws)]
    guide, result = train(model, GUIDES[q], X, y, args)
    forecast = Predictive(model, guide=guide, params=result.params, num_samples=args.draws)
    draws = np.asarray(forecast(jax.random.key(1), test)["y"])
    here = np.asarray(forecast(jax.random.key(2), X)["y.latent"])
    of_trend = npgp.posterior("f.trend", model, guide, result.params, X, y, draws=20)
    spread = float(np.mean(np.sqrt(of_trend.mean_and_variance(X)[1])) * scale)
    elbo = -float(np.mean(np.asarray(result.losses)[-max(args.steps // 20, 1) :]))
    return {"by": q} | report(draws, elbo, sum=float(here.std(0).mean() * scale), trend=spread)


STUDIES = {
    "components": Study(
        """Three components that share a signal, by SVI, against one GP with the summed kernel.

Monthly values like those of CO2 at Mauna Loa, simulated: growth that accelerates, a season that changes slowly,
deviations over some months, noise. The model has three SparseGPs, trend + season + short, hyperparameters with priors,
and is trained on all but the last ten years. Compared are the components' q(ε) jointly Gaussian (the default), each by
itself (joint=False), and independent of everything (dependence="independent"); and exact GP regression with the summed
kernel, at the maximum of the posterior of the same hyperparameters and, by NUTS, averaged over that posterior. Training
is by natural gradients for q(ε) and Adam for the rest, in three steps: q(ε) by itself; with a point for the
hyperparameters; and with their posterior, which starts at that point. How values follow hyperparameters beyond the
kernel (the coupling) is held at nothing, and their noise follows the noise's scale. Or all is by Adam: ``--adam --steps
30000``.""",
        forecasts,
        {"q": ("exact", *GUIDES)},
        {
            "rmse": ("RMSE", 2),
            "inside": ("in 95% intervals", 2),
            "width": ("their width", 2),
            "bound": ("ELBO", 1),
            "sum": ("sd of the sum", 3),
            "trend": ("sd of trend", 3),
        },
        {
            "months": 500,
            "held_out": 120,
            "draws": 1000,
            "adam": False,
            "points": (12, 40, 70),
            "before": 300,
            "steps": 1500,
            "learning_rate": 0.02,
            "seed": 0,
        },
        rows=("by",),
        quick={"months": 30, "held_out": 10, "draws": 10, "before": 2, "steps": 2, "points": [3, 4, 4], "q": ["joint"]},
        note="Of the forecast. ELBO: mean of the last steps; of the exact GP, the log evidence at its hyperparameters; "
        "by NUTS, its average. Sum and parts: means over the training months of standard deviations.",
    )
}
