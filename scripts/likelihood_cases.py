"""The likelihoods that programs measure: npgp's own, and NumPyro's distributions by a function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from npgp import likelihoods as L

CUTS = np.array([-1.0, 0.25, 2.0])
S = jax.nn.sigmoid

BUILT_IN: dict[str, Any] = {
    "Gaussian": L.Gaussian(variance=0.25),
    "StudentT": L.StudentT(df=4.0, scale=0.125),
    "Laplace": L.Laplace(scale=0.5),
    "AsymmetricLaplace": L.AsymmetricLaplace(scale=0.5, quantile=0.75),
    "CensoredGaussian, above": L.CensoredGaussian(scale=0.5, until=np.inf),
    "CensoredGaussian, between": L.CensoredGaussian(scale=0.5, until=1.0),
    "TruncatedGaussian": L.TruncatedGaussian(scale=1.0, lower=-1.0, upper=2.0),
    "VonMises": L.VonMises(concentration=4.0),
    "Gamma": L.Gamma(concentration=2.5),
    "Exponential": L.Exponential(),
    "Weibull": L.Weibull(concentration=1.5),
    "Tweedie": L.Tweedie(dispersion=1.25, power=1.5),
    "Bernoulli": L.Bernoulli(),
    "Bernoulli, probit": L.Bernoulli("probit"),
    "Ordinal": L.Ordinal(CUTS),
    "Ordinal, probit": L.Ordinal(CUTS, "probit"),
    "Poisson": L.Poisson(exposure=2.5),
    "Poisson, softplus": L.Poisson("softplus"),
    "NegativeBinomial": L.NegativeBinomial(concentration=1.75),
    "Binomial": L.Binomial(trials=40),
    "Binomial, 100,000 trials": L.Binomial(trials=100_000),
    "BetaBinomial": L.BetaBinomial(trials=40, concentration=5.0),
    "Beta": L.Beta(concentration=5.0),
}


def pair_of_normals(f):
    pair = jnp.asarray([-1.0, 1.0], f.dtype)
    weights = dist.Categorical(probs=jnp.array([0.25, 0.75]))
    return dist.MixtureSameFamily(weights, dist.Normal(f[..., None] + pair, 0.0625))


BY_FUNCTION: dict[str, Any] = {
    "Normal": lambda f: dist.Normal(f, 1 / 64),
    "StudentT": lambda f: dist.StudentT(4.0, f, 0.125),
    "Cauchy": lambda f: dist.Cauchy(f, 0.5),
    "Laplace": lambda f: dist.Laplace(f, 0.5),
    "AsymmetricLaplaceQuantile": lambda f: dist.AsymmetricLaplaceQuantile(f, 0.5, 0.75),
    "Logistic": lambda f: dist.Logistic(f, 0.5),
    "Gumbel": lambda f: dist.Gumbel(f, 0.5),
    "MixtureSameFamily": pair_of_normals,
    "LogNormal": lambda f: dist.LogNormal(f, 0.5),
    "Gamma": lambda f: dist.Gamma(2.5, 2.5 * jnp.exp(-f)),
    "InverseGamma": lambda f: dist.InverseGamma(2.5, jnp.exp(f)),
    "HalfNormal": lambda f: dist.HalfNormal(jnp.exp(f)),
    "Weibull": lambda f: dist.Weibull(jnp.exp(f), 1.5),
    "Pareto": lambda f: dist.Pareto(0.0625, jnp.exp(f)),
    "Kumaraswamy": lambda f: dist.Kumaraswamy(jnp.exp(f), 2.0),
    "Beta": lambda f: dist.Beta(5 * S(f), 5 * S(-f)),
    "BetaProportion": lambda f: dist.BetaProportion(S(f), 5.0),
    "VonMises": lambda f: dist.VonMises(f, 4.0),
    "Bernoulli": lambda f: dist.Bernoulli(logits=f),
    "Geometric": lambda f: dist.Geometric(logits=f),
    "Poisson": lambda f: dist.Poisson(jnp.exp(f)),
    "ZeroInflatedPoisson": lambda f: dist.ZeroInflatedPoisson(0.25, rate=jnp.exp(f)),
    "NegativeBinomial2": lambda f: dist.NegativeBinomial2(jnp.exp(f), 1.75),
    "Binomial": lambda f: dist.Binomial(40, logits=f),
    "Binomial, 100,000 trials": lambda f: dist.Binomial(100_000, logits=f),
    "BetaBinomial": lambda f: dist.BetaBinomial(5 * S(f), 5 * S(-f), 40),
    "OrderedLogistic": lambda f: dist.OrderedLogistic(f, jnp.asarray(CUTS, f.dtype)),
}


def every_likelihood() -> dict[str, Any]:
    """All of them, by name."""
    return {**BUILT_IN, **{f"function: {name}": fn for name, fn in BY_FUNCTION.items()}}
