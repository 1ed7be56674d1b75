"""
A cookbook: complete Bayesian models with Gaussian processes in them, as a user of NumPyro would write them.

Each is an ordinary NumPyro model. X has shape (N, 1) unless said otherwise; without y it simulates. The tests in
test_whole_models.py fit most of them to data simulated from known parameters.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan

import npgp
from npgp.likelihoods import Ordinal

Z = np.linspace(0.0, 10.0, 12, dtype=np.float32)[:, None]


def square(low, high, count):
    """A grid of count² points of the plane."""
    axis = np.linspace(low, high, count, dtype=np.float32)
    return np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)


def gp(name, inducing=Z, lengthscale=1.5, scale=1.0):
    """A GP with an RBF kernel, and priors on its hyperparameters."""
    ell = numpyro.sample(f"{name}.lengthscale", dist.LogNormal(np.log(lengthscale), 0.4))
    sd = numpyro.sample(f"{name}.scale", dist.LogNormal(np.log(scale), 0.5))
    return npgp.SparseGP(name, npgp.RBF(ell, variance=sd**2), inducing).draw()


# ---------------------------------------------------------------------------------------------------------------
# A function beside other effects


def dose_effect(X, dose, y=None):
    """Regression coefficients, and a trend that is confounded with them. dose: (N, 2)."""
    f = gp("f")
    effect = numpyro.sample("effect", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X) + dose @ effect, npgp.Gaussian(scale=noise), obs=y)


def spatial_counts(S, group, exposure, y=None, *, groups, inducing):
    """Hierarchical group effects, a spatial GP and an exposure. S: (N, 2)."""
    f = gp("f", inducing, scale=0.7)
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("groups", groups):
        effect = numpyro.sample("effect", dist.Normal(0.0, spread))
    with numpyro.plate("data", len(S)):
        npgp.observe("y", f(S) + level + effect[group] + jnp.log(exposure), npgp.Poisson(), obs=y)


def main_effects_and_interaction(X, y=None, *, inducing):
    """f1(x1) + f2(x2) + f12(x1, x2), the interaction with a product kernel. X: (N, 2); inducing (M, 2)."""
    f1, f2 = gp("f1", Z), gp("f2", Z)
    ell = numpyro.sample("f12.lengthscale", dist.LogNormal(np.log(2.0), 0.4).expand([2]).to_event(1))
    sd = numpyro.sample("f12.scale", dist.HalfNormal(1.0))
    kernel = npgp.RBF(ell[0], variance=sd**2, active_dims=(0,)) * npgp.RBF(ell[1], active_dims=(1,))
    f12 = npgp.SparseGP("f12", kernel, inducing).draw()
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f1(X[:, :1]) + f2(X[:, 1:]) + f12(X), npgp.Gaussian(scale=noise), obs=y)


def trend_and_season(X, sd, weight, y=None, mask=None):
    """
    A mean function with sites of its own, a seasonal GP, measurement errors known row by row, weights, missing y.

    :param sd: standard deviation of each row's error.
    :param weight: what each row's log-likelihood is multiplied by.
    :param mask: True where y is present; it may be NaN elsewhere.
    """
    middle = numpyro.sample("middle", dist.LogNormal(0.0, 1.0))
    growth = numpyro.sample("growth", dist.Normal(0.0, 0.5))
    scale = numpyro.sample("f.scale", dist.LogNormal(0.0, 0.5).expand([2]).to_event(1))
    # Waves of a year and half a year, unlike the periodic kernel's functions, have no level of their own.
    kernel = npgp.kernels.Cosine(2.0, variance=scale[0] ** 2) + npgp.kernels.Cosine(1.0, variance=scale[1] ** 2)
    f = npgp.SparseGP("f", kernel, np.array([[0.0], [0.3], [0.8], [1.4]], np.float32)).draw()
    with numpyro.plate("data", len(X)), numpyro.handlers.scale(scale=weight):
        npgp.observe("y", f(X) + middle * jnp.exp(growth * (X[:, 0] - 4.0)), npgp.Gaussian(scale=sd), obs=y, mask=mask)


# ---------------------------------------------------------------------------------------------------------------
# Likelihoods


def changing_noise(X, y=None):
    """Heteroscedastic regression: GPs of the mean and of the log standard deviation."""
    f, g = gp("f"), gp("g", lengthscale=3.0)
    level = numpyro.sample("level", dist.Normal(-1.0, 1.0))
    with numpyro.plate("data", len(X)):
        npgp.observe("y", (f(X), g(X) + level), npgp.likelihoods.HeteroscedasticGaussian(), obs=y)


def classification(X, dose, y=None):
    """Two classes, and a covariate. dose: (N,)."""
    f = gp("f", scale=1.5)
    effect = numpyro.sample("effect", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X) + effect * dose, npgp.Bernoulli(), obs=y)


def ratings(X, y=None, *, categories):
    """Ordered categories, their cutpoints learned; the first is 0, as f has a level of its own."""
    f = gp("f", scale=1.5)
    with numpyro.plate("gaps", categories - 2):
        gap = numpyro.sample("gap", dist.LogNormal(0.0, 1.0))
    cutpoints = jnp.concatenate([jnp.zeros(1), jnp.cumsum(gap)])
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X), Ordinal(cutpoints), obs=y)


def outliers(X, y=None):
    """Errors with heavy tails."""
    f = gp("f")
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    df = numpyro.sample("df", dist.LogNormal(1.0, 0.7))
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X), npgp.StudentT(df=df, scale=scale), obs=y)


def survival(X, censored, time=None):
    """Weibull times with a GP of the log hazard. Where censored is 1, the event is known to be later than time."""
    f = gp("f", scale=0.7)
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))

    def times(log_hazard):
        return dist.RightCensoredDistribution(dist.Weibull(jnp.exp(-log_hazard / shape), shape), censored)

    with numpyro.plate("data", len(X)):
        npgp.observe("time", f(X) + level, times, obs=time)  # NumPyro's tail ends at a constant: not log-concave


def excess_zeros(X, y=None):
    """Counts with two causes of zeros: GPs of the log rate and of the gate's log odds."""
    f, g = gp("f"), gp("g", lengthscale=3.0)
    level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", len(X)):
        npgp.observe(
            "y",
            (f(X) + level[0], g(X) + level[1]),
            # By log odds: a gate that is 1 in single precision has no gradient.
            lambda f, g: dist.ZeroInflatedDistribution(dist.Poisson(jnp.exp(f)), gate_logits=g),
            obs=y,
        )


# ---------------------------------------------------------------------------------------------------------------
# Time


def drifting_sensor(X, y=None):
    """The response to X on top of a level that drifts from row to row, an autoregression."""
    f = gp("f")
    step = numpyro.sample("step", dist.HalfNormal(0.3))
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))

    def advance(level, _):
        level = numpyro.sample("level", dist.Normal(0.97 * level, step))
        return level, level

    _, level = scan(advance, 0.0, None, length=len(X))
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X) + level, npgp.Gaussian(scale=noise), obs=y)


def unknown_dynamics(y, noise, *, inducing):
    """State-space model whose transition is a GP, x' = f(x) + shock; y = x + error, (T,), with known noise."""
    f = gp("f", inducing, lengthscale=1.0)
    shock = numpyro.sample("shock", dist.HalfNormal(0.5))
    with numpyro.plate("times", len(y)):
        error = numpyro.sample("error", dist.Normal(0.0, noise))
    x = numpyro.deterministic("x", y - error)
    with numpyro.plate("transitions", len(y) - 1):
        npgp.observe("transition", f(x[:-1, None]), npgp.Gaussian(scale=shock), obs=x[1:])


# ---------------------------------------------------------------------------------------------------------------
# GP values in further expressions


def deep_gp(X, y=None):
    """Two layers: y = g(h) + noise, h = x + f(x)."""
    f = gp("f", lengthscale=2.0)
    g = gp("g", lengthscale=2.0)
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))
    with numpyro.plate("data", len(X)):
        h = npgp.sample("h", f(X) + X[:, 0], joint=False)  # what follows factorizes over rows
        npgp.observe("y", g(h[:, None]), npgp.Gaussian(scale=noise), obs=y)


def mixture_of_regressions(X, y=None):
    """Some rows follow a curve, others a line."""
    f = gp("f")
    line = numpyro.sample("line", dist.Normal(jnp.array([-1.0, 0.0]), 0.5).to_event(1))
    share = numpyro.sample("share", dist.Uniform(0.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))
    with numpyro.plate("data", len(X)):
        curve = npgp.sample("curve", f(X), joint=False)
        means = jnp.stack([curve, line[0] + line[1] * (X[:, 0] - 5.0) / 5.0], -1)
        parts = dist.Normal(means, noise)
        weights = dist.Categorical(probs=jnp.stack([share, 1.0 - share]))
        numpyro.sample("y", dist.MixtureSameFamily(weights, parts), obs=y)
