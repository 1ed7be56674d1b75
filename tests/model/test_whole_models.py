"""
Complete models (cookbook.py), fitted to data simulated from known parameters: these are recovered, and the functions.

What the limits mean. The guide takes all sites for independent, so that posterior standard deviations are too small
where sites are correlated: hence four of them, not three. A level beside a GP is worse off, as the GP has a level of
its own: only their sum is checked. Functions are compared with the truth at 40 to 120 rows, and errors are in units of
the truth's own standard deviation: 1 is what a constant achieves. Neighboring rows share their error, so that bands
of 95% hold fewer of the rows by chance. All limits were met with 5 other seeds.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import cookbook
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cookbook import square
from models import adam, compiled, elbo_value, random_params, sparse_gp
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from numpyro.infer.initialization import init_to_uniform

import npgp

SEED = 0
DRAWS = 200  # from posteriors
GRID = np.linspace(0.2, 9.8, 60, dtype=np.float32)[:, None]
x_grid = GRID[:, 0]


class Fit(NamedTuple):
    """Draws, along the first axis: of the posterior of the model's sites, of what it simulates at new rows, and of
    functions."""

    posterior: dict[str, np.ndarray]
    predicted: dict[str, np.ndarray]
    functions: dict[str, np.ndarray]


def fitter(model, steps=800, rate=0.05, draws_of=(), **static):
    """``fit(data, new, at)``: train by SVI and draw, all in one compiled function."""
    model = partial(model, **static)
    guide = npgp.AutoSparseGP(model)  # with its own start, which suits all of these
    svi = SVI(model, guide, adam(optax.cosine_decay_schedule(rate, steps, 0.05)), TraceMeanField_ELBO())

    @compiled
    def run(data, new, at):
        start, *keys = jax.random.split(jax.random.key(1), 4)
        state = svi.init(start, **data)
        state, losses = jax.lax.scan(lambda state, _: svi.update(state, **data), state, length=steps)
        params = svi.get_params(state)
        posterior = guide.sample_posterior(keys[0], params, **data, sample_shape=(DRAWS,))
        predicted = Predictive(model, posterior, params=params, parallel=True)(keys[1], **new)

        def draw(name, key):
            return npgp.posterior(name, model, guide, params, rng_key=key, **data).sample(key, at[name])

        drawn = {name: jax.lax.map(partial(draw, name), jax.random.split(keys[2], DRAWS)) for name in draws_of}
        return Fit(posterior, predicted, drawn), losses

    def fit(data, new, at=None) -> Fit:
        result, losses = run(data, new, at or {})
        assert np.all(np.isfinite(losses))
        return jax.tree.map(np.asarray, result)

    return fit


def check_sites(draws, limit=4.0, **truth):
    """The true values lie within so many posterior standard deviations."""
    for name, value in truth.items():
        z = (draws[name].mean(0) - value) / draws[name].std(0)
        report(name, z=np.max(np.abs(z)), sd=np.max(draws[name].std(0)))
        assert np.all(np.abs(z) < limit), f"{name}: {z}"


def error(values, truth):
    """Root mean squared error, in units of the truth's standard deviation."""
    return np.sqrt(np.mean((values - truth) ** 2)) / np.std(truth)


def check_function(draws, truth, limit, name="f", coverage=0.7):
    """
    The posterior mean is as near to the truth as the limit says, bands of 95% hold the truth at a share of the rows,
    and they are no wider than the error's limit justifies.
    """
    found, spread = error(draws.mean(0), truth), np.mean(draws.std(0)) / np.std(truth)
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    share = np.mean((low < truth) & (truth < high))
    report(name, error=found, spread=spread, coverage=share)
    assert found < limit
    assert spread < limit
    assert share > coverage


def report(name, **values):
    """What ``pytest -s`` shows; to choose limits, with other seeds."""
    print(f"    {name}:", ", ".join(f"{key} {value:.2f}" for key, value in values.items()))


def centerd(values, axis=-1):
    """Without the mean, which a model may leave to another term."""
    return values - values.mean(axis, keepdims=True)


def float32(*arrays):
    return [np.asarray(array, np.float32) for array in arrays]


# ---------------------------------------------------------------------------------------------------------------
# A function beside other effects

fit_dose = fitter(cookbook.dose_effect)


def test_effects_that_are_confounded_with_a_trend():
    rng = np.random.default_rng(SEED)
    x, trend, effect = rng.uniform(0, 10, 100), lambda x: 1.5 * np.sin(x), np.array([-1.0, 0.5])
    dose = np.stack([np.sin(x) + 0.7 * rng.normal(size=100), rng.normal(size=100)], 1)
    y = trend(x) + dose @ effect + 0.3 * rng.normal(size=100)
    X, y, dose = float32(x[:, None], y, dose)
    fit = fit_dose({"X": X, "dose": dose, "y": y}, {"X": GRID, "dose": np.zeros((60, 2), np.float32)})

    check_sites(fit.posterior, effect=effect, noise=0.3)
    check_function(fit.predicted["y.latent"], trend(x_grid), 0.25)
    alone = np.linalg.lstsq(np.column_stack([dose, np.ones(100)]), y)[0]
    assert np.abs(alone - effect[0])[0] > 0.35 > 0.2 > np.max(np.abs(fit.posterior["effect"].mean(0) - effect))


fit_counts = fitter(cookbook.spatial_counts, groups=10, inducing=square(0, 3, 4))


def test_counts_in_space_and_groups():
    rng = np.random.default_rng(SEED)
    S, group, exposure = rng.uniform(0, 3, (150, 2)), np.arange(150) % 10, rng.uniform(1, 8, 150)
    effect = rng.normal(size=10)
    effect *= 0.5 / np.std(effect)

    def log_rate(S, group):
        return 0.3 + effect[group] + 0.8 * np.sin(2 * S[:, 0]) * np.cos(1.5 * S[:, 1])

    y = rng.poisson(exposure * np.exp(log_rate(S, group)))
    S, exposure = float32(S, exposure)
    S_new, group_new = square(0.2, 2.8, 8), np.arange(64) % 10
    fit = fit_counts(
        {"S": S, "group": group, "exposure": exposure, "y": y},
        {"S": S_new, "group": group_new, "exposure": np.ones(64, np.float32)},
    )

    check_sites(fit.posterior, spread=0.5)
    check_sites({"effect": centerd(fit.posterior["effect"])}, effect=centerd(effect), limit=5.0)  # the largest of ten
    check_function(fit.predicted["y.latent"], log_rate(S_new, group_new), 0.5)


fit_trend = fitter(cookbook.trend_and_season)


def test_trend_season_known_errors_weights_and_gaps():
    """The mean function goes on where there are no data."""
    rng = np.random.default_rng(SEED)
    x, sd, weight = np.sort(rng.uniform(0, 8, 90)), rng.uniform(0.1, 0.6, 90), rng.integers(1, 4, 90)

    def f(x):
        return 2.0 * np.exp(0.25 * (x - 4)) + 0.8 * np.sin(np.pi * x)

    # A weight is a number of repetitions.
    y = f(x) + sd / np.sqrt(weight) * rng.normal(size=90)
    mask = rng.uniform(size=90) > 0.2
    y[~mask] = np.nan
    X, sd, weight, y = float32(x[:, None], sd, weight, y)
    X_new, ones = np.linspace(8, 12, 40, dtype=np.float32)[:, None], np.ones(40, np.float32)
    fit = fit_trend(
        {"X": X, "sd": sd, "weight": weight, "y": y, "mask": mask}, {"X": X_new, "sd": ones, "weight": ones}
    )

    check_sites(fit.posterior, growth=0.25)
    check_function(fit.predicted["y.latent"], f(X_new[:, 0]), 0.3)


def test_a_weight_is_a_number_of_rows(float64):
    """Also in the terms of the residual."""
    weight, counts = np.array([1, 3, 2, 1, 1, 2, 1, 4]), np.array([0, 2, 1, 5, 3, 0, 1, 2])
    X = np.linspace(0.2, 3.8, 8)[:, None]

    def model(X, y, weight):
        f = sparse_gp().draw()
        with numpyro.plate("data", len(X)), numpyro.handlers.scale(scale=weight):
            npgp.observe("y", f(X), npgp.Poisson(), obs=y)

    weighted = elbo_value(model, random_params(), jnp.asarray(X), jnp.asarray(counts), jnp.asarray(weight))
    rows = np.repeat(np.arange(8), weight)
    repeated = elbo_value(model, random_params(), jnp.asarray(X[rows]), jnp.asarray(counts[rows]), jnp.ones(15))
    np.testing.assert_allclose(weighted, repeated, rtol=1e-12)


# ---------------------------------------------------------------------------------------------------------------
# Likelihoods


fit_survival = fitter(cookbook.survival, steps=300)


@pytest.mark.filterwarnings("ignore:The log-probabilities of RightCensoredDistribution stop")
def test_survival_with_censored_times():
    rng = np.random.default_rng(SEED)
    x, log_hazard, shape = rng.uniform(0, 10, 200), lambda x: np.sin(x) - 0.5, 1.5
    event, end = np.exp(-log_hazard(x) / shape) * rng.weibull(shape, 200), rng.uniform(0.3, 2.0, 200)
    X, time, censored = float32(x[:, None], np.minimum(event, end), event > end)
    new = {"X": GRID, "censored": np.zeros(60, np.float32)}
    fit = fit_survival({"X": X, "time": time, "censored": censored}, new)

    check_sites(fit.posterior, shape=shape)
    check_function(fit.predicted["time.latent"], log_hazard(x_grid), 0.75)

    # Who takes the end of observation for the event finds hazards that are too high.
    naive = fit_survival({"X": X, "time": time, "censored": np.zeros_like(censored)}, new)
    bias = [np.mean(f.predicted["time.latent"] - log_hazard(x_grid)) for f in (fit, naive)]
    report("bias", right=bias[0], naive=bias[1])
    assert abs(bias[0]) < 0.3 < 0.4 < bias[1]


# ---------------------------------------------------------------------------------------------------------------
# Time


fit_dynamics = fitter(
    cookbook.unknown_dynamics, draws_of=("f",), inducing=np.linspace(-2.5, 2.5, 10, dtype=np.float32)[:, None]
)


def test_unknown_dynamics():
    rng = np.random.default_rng(SEED)
    x, f = np.zeros(121), lambda x: 1.8 * np.cos(1.2 * x)
    for t, shock in enumerate(0.2 * rng.normal(size=120)):
        x[t + 1] = f(x[t]) + shock
    y, noise = float32(x + 0.1 * rng.normal(size=121), 0.1)
    at = np.linspace(*np.quantile(x, [0.05, 0.95]), 50, dtype=np.float32)[:, None]
    fit = fit_dynamics({"y": y, "noise": noise}, {"y": y, "noise": noise}, {"f": at})

    check_sites(fit.posterior, shock=0.2)
    check_function(fit.functions["f"], f(at[:, 0]), 0.15, coverage=0.6)
    check_function(fit.posterior["x"], x, 0.1, "x")
    assert np.mean((fit.posterior["x"].mean(0) - x) ** 2) < 0.9 * np.mean((y - x) ** 2)


# ---------------------------------------------------------------------------------------------------------------
# GP values in further expressions

fit_deep = fitter(cookbook.deep_gp, steps=600)


def test_deep_gp_of_a_step():
    rng = np.random.default_rng(SEED)
    x, f = rng.uniform(0, 10, 120), lambda x: np.tanh(3 * (x - 5)) + 0.3 * np.sin(x)
    X, y = float32(x[:, None], f(x) + 0.15 * rng.normal(size=120))
    fit = fit_deep({"X": X, "y": y}, {"X": GRID})

    check_sites(fit.posterior, noise=0.15)
    check_function(fit.predicted["y.latent"], f(x_grid), 0.2)


fit_mixture = fitter(cookbook.mixture_of_regressions)


def test_some_rows_follow_a_curve_others_a_line():
    rng = np.random.default_rng(SEED)
    x, f = rng.uniform(0, 10, 150), lambda x: 1 + np.sin(x)
    on_curve = rng.uniform(size=150) < 0.65
    y = np.where(on_curve, f(x), -1 - 0.5 * (x - 5) / 5) + 0.2 * rng.normal(size=150)
    X, y = float32(x[:, None], y)
    fit = fit_mixture({"X": X, "y": y}, {"X": GRID})

    check_sites(fit.posterior, share=0.65, line=np.array([-1.0, -0.5]), noise=0.2)
    check_function(fit.predicted["curve"], f(x_grid), 0.3)


def test_autoguides_start_at_medians_of_the_prior():
    """NumPyro's own start is uniform in unconstrained space, a scale of 1/7 to 7 whatever its prior."""

    def model():
        numpyro.sample("scale", dist.LogNormal(-3.0, 0.1).expand([50]).to_event(1))

    def start(guide):
        auto = npgp.AutoSparseGP(model, guide)
        svi = SVI(model, auto, optax.sgd(0.0), TraceMeanField_ELBO())
        return jnp.log(auto.median(svi.get_params(svi.init(jax.random.key(0))))["scale"])

    told = partial(AutoNormal, init_loc_fn=init_to_uniform)
    guides = AutoNormal, partial(AutoMultivariateNormal, init_scale=0.01), [AutoDelta], told
    *starts, uniform = jax.jit(lambda: list(map(start, guides)))()
    np.testing.assert_allclose(starts, -3.0, atol=0.2)
    assert np.ptp(uniform) > 2.0
