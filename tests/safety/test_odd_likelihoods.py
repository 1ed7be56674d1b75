"""Likelihoods: parameters that do not fit, observations that cannot be, functions that are none, and large numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import problem as p
from judge import attempt, finite, mistakes, same

import npgp
from npgp import likelihoods as lk

# ---------------------------------------------------------------------------------------------------------------
# Shapes


def _column() -> np.ndarray:
    return np.linspace(0.1, 0.4, p.N, dtype=np.float32)[:, None]


COLUMNS: dict[str, Callable[[], Any]] = {
    "Gaussian variance": lambda: npgp.Gaussian(variance=_column()),
    "Gaussian scale": lambda: npgp.Gaussian(scale=_column()),
    "StudentT scale": lambda: npgp.StudentT(df=4.0, scale=_column()),
    "StudentT df": lambda: npgp.StudentT(df=4.0 + _column(), scale=0.3),
    "Laplace scale": lambda: lk.Laplace(scale=_column()),
    "Gaussian of other rows": lambda: npgp.Gaussian(variance=_column()[:5, 0]),
    "a function": lambda: lambda f: dist.Normal(f, jnp.asarray(_column())),
    "a function of other rows": lambda: lambda f: dist.Normal(f, jnp.asarray(_column()[:5, 0])),
    "a function of two values": lambda: lambda f, g: dist.Normal(f, jnp.exp(g) + jnp.asarray(_column())),
    "a function that sums": lambda: lambda f: dist.Normal(jnp.sum(f, -1), 1.0),
}


@attempt("error", "variance, scale, df, shape, fn, likelihood", cases=COLUMNS)
def test_parameters_of_another_shape(make: Callable[[], Any]) -> Any:
    likelihood = make()

    def program(X, y=None):
        f = p.sparse_gp().draw()
        latent = f(X)
        if not isinstance(likelihood, lk.Likelihood) and likelihood.__code__.co_argcount == 2:
            latent = (latent, p.sparse_gp("g").draw()(X))
        npgp.observe("y", latent, likelihood, obs=y)

    return p.first_loss(program, p.x(), p.x(p.Y))


@attempt("error", "exposure, concentration, shape", cases=("Poisson exposure", "NegativeBinomial", "Gamma"))
def test_parameters_of_counts_of_another_shape(which: str) -> Any:
    likelihood = {
        "Poisson exposure": lambda: npgp.Poisson(exposure=_column()),
        "NegativeBinomial": lambda: lk.NegativeBinomial(concentration=_column()),
        "Gamma": lambda: lk.Gamma(concentration=_column()),
    }[which]()
    return p.first_loss(p.observed(likelihood), p.x(), p.x(1.0 + p.COUNTS))


@attempt("answer", cases=("per row", "per output", "one"))
def test_parameters_that_fit(which: str) -> Any:
    rows = np.linspace(0.1, 0.4, p.N)
    if which == "per row":
        found = npgp.CollapsedGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=p.x(rows)).log_prob(p.x(p.Y))
        return same(found, p.bound(noise=rows))
    values = np.array([0.1, 0.5]) if which == "per output" else np.array([p.NOISE] * 2)

    def program(X, y):
        import numpyro

        with numpyro.plate("outputs", 2, dim=-2):
            f = p.sparse_gp().draw()
        with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", p.N):
            npgp.observe("y", f(X), npgp.Gaussian(variance=p.x(values)[:, None]), obs=y)

    params: dict[str, Any] = {name: [] for name in p.optimum()}
    for value in values:
        for name, array in p.optimum(noise=value).items():
            params[name].append(array[None])
    found = p.first_loss(program, p.x(), p.x([p.Y, p.Y]), params={name: p.x(v) for name, v in params.items()})
    return same(found, -sum(p.bound(noise=v) for v in values))


# ---------------------------------------------------------------------------------------------------------------
# Parameters that are none

BARE: dict[str, Callable[[], Any]] = {
    "Gaussian": lambda: npgp.Gaussian(0.1),
    "Laplace": lambda: lk.Laplace(0.1),
    "StudentT": lambda: npgp.StudentT(4.0, 0.1),
}


@attempt("error", "variance, scale, df", cases=BARE)
def test_bare_numbers(make: Callable[[], Any]) -> Any:
    return make()


WRONG: dict[str, tuple[str, Callable[[], Any]]] = {
    "Gaussian without noise": ("variance, scale", lambda: npgp.Gaussian()),
    "Gaussian with both": ("variance, scale", lambda: npgp.Gaussian(variance=1.0, scale=1.0)),
    "Gaussian of negative scale": ("scale", lambda: npgp.Gaussian(scale=-0.1)),
    "Gaussian of zero variance": ("variance", lambda: npgp.Gaussian(variance=0.0)),
    "Gaussian of NaN": ("variance", lambda: npgp.Gaussian(variance=np.nan)),
    "Gaussian of a string": ("variance", lambda: npgp.Gaussian(variance="0.1")),
    "Gaussian of a list": ("variance", lambda: npgp.Gaussian(variance=[0.1, -0.2])),
    "Gaussian of a distribution": ("scale", lambda: npgp.Gaussian(scale=dist.HalfNormal(1.0))),
    "Gaussian of GP values": (
        "scale, npgp.sample",
        lambda: npgp.Gaussian(scale=jnp.exp(0.0) * _latent()),
    ),
    "Student of no degrees": ("df", lambda: npgp.StudentT(df=0.0, scale=1.0)),
    "Laplace of complex scale": ("scale", lambda: lk.Laplace(scale=1j)),
    "Poisson of another link": ("link", lambda: npgp.Poisson("identity")),
    "Poisson of negative exposure": ("exposure", lambda: npgp.Poisson(exposure=-1.0)),
    "Bernoulli of another link": ("link", lambda: npgp.Bernoulli(link="sigmoid")),
    "no quadrature nodes": ("num_nodes", lambda: npgp.Bernoulli(num_nodes=0)),
    "cutpoints out of order": ("cutpoints", lambda: lk.Ordinal(np.array([1.0, 0.0], np.float32))),
    "no cutpoints": ("cutpoints", lambda: lk.Ordinal(np.zeros(0, np.float32))),
    "one class": ("num_classes", lambda: lk.Softmax(1)),
    "a negative concentration": ("concentration", lambda: lk.NegativeBinomial(concentration=-1.0)),
    "a distribution's class": ("likelihood", lambda: lk.as_likelihood(dist.Normal(0.0, 1.0))),
    "a likelihood's class": ("likelihood", lambda: lk.as_likelihood(npgp.Bernoulli)),
    "a string": ("likelihood", lambda: lk.as_likelihood("gaussian")),
    "concave in what is not there": ("log_concave", lambda: lk.Factorized(lambda f: dist.Normal(f, 1.0), (3,))),
}


def _latent() -> Any:
    import numpyro

    with numpyro.handlers.seed(rng_seed=0):
        return p.sparse_gp().draw()(p.x())


@mistakes(WRONG)
def test_wrong_parameter(make: Callable[[], Any]) -> Any:
    return make()


# ---------------------------------------------------------------------------------------------------------------
# Observations out of support

OUT_OF_SUPPORT: dict[str, tuple[Callable[[], Any], float]] = {
    "Poisson, negative": (lambda: npgp.Poisson(), -1.0),
    "Poisson, one half": (lambda: npgp.Poisson(), 0.5),
    "Bernoulli, 2": (lambda: npgp.Bernoulli(), 2.0),
    "Bernoulli, −1": (lambda: npgp.Bernoulli(), -1.0),
    "Gamma, 0": (lambda: lk.Gamma(concentration=2.0), 0.0),
    "Exponential, negative": (lambda: lk.Exponential(), -0.1),
    "negative binomial, 1.5": (lambda: lk.NegativeBinomial(concentration=2.0), 1.5),
    "ordinal, a fourth level": (lambda: lk.Ordinal(np.array([-1.0, 1.0], np.float32)), 3.0),
    "Weibull, negative": (lambda: lk.Weibull(concentration=1.5), -2.0),
    "Gaussian, infinite": (lambda: p.gaussian(), np.inf),
    "Gaussian, NaN": (lambda: p.gaussian(), np.nan),
    "a function to Beta, 2": (lambda: lambda f: dist.Beta(jnp.exp(f), 1.0), 2.0),
    "a function to Poisson, negative": (lambda: lambda f: dist.Poisson(jnp.exp(f)), -1.0),
}


@attempt("error", "y, observations", cases=OUT_OF_SUPPORT)
def test_observation_out_of_support(case: tuple[Callable[[], Any], float]) -> Any:
    make, value = case
    y = np.ones(p.N, np.float32)
    y[7] = value
    return p.first_loss(p.observed(make()), p.x(), y)


@attempt("error", "y")
def test_class_that_is_not_there() -> Any:
    import numpyro

    def program(X, y):
        with numpyro.plate("classes", 3, dim=-2):
            f = p.sparse_gp().draw()
        with numpyro.plate("data", p.N):
            npgp.observe("y", f(X), lk.Softmax(3), obs=y)

    return p.first_loss(program, p.x(), np.arange(p.N) % 4)


# ---------------------------------------------------------------------------------------------------------------
# Functions that are no likelihoods

FUNCTIONS: dict[str, Callable[[], Any]] = {
    "rates that are negative": lambda: lambda f: dist.Poisson(f),
    "the class Poisson": lambda: dist.Poisson,
    "a probability above 1": lambda: lambda f: dist.Bernoulli(probs=f),
    "a scale that is negative": lambda: lambda f: dist.Normal(0.0, f),
    "no distribution": lambda: lambda f: f,
    "an array": lambda: lambda f: jnp.exp(f),
    "vector events": lambda: lambda f: dist.MultivariateNormal(f, jnp.eye(p.N)),
    "no arguments": lambda: lambda: dist.Normal(0.0, 1.0),
    "two arguments for one latent value": lambda: lambda f, g: dist.Normal(f, jnp.exp(g)),
}


@attempt("error", "likelihood, fn, rate, probs, scale, latent, function", cases=FUNCTIONS)
def test_function_as_a_likelihood(make: Callable[[], Any]) -> Any:
    return p.fit(p.observed(make()), p.x(), p.x(p.COUNTS > 0)).losses


# ---------------------------------------------------------------------------------------------------------------
# Numbers that overflow where they need not


@attempt("either", "", cases=("gradient", "value"))
def test_bernoulli_far_out(which: str) -> Any:
    def of(mean):
        return npgp.Bernoulli().log_marginal(1.0, mean, 4.0)

    found = (jax.grad(of) if which == "gradient" else of)(-200.0)
    # Far out log σ(f) = f: the marginal is E exp(f).
    return same(found, 1.0 if which == "gradient" else -198.0, 1e-3)


@attempt("either", "variance, scale, latent, start", x64=None, cases={"1": 1.0, "50": 50.0, "200": 200.0})
def test_heteroscedastic_residual_variance(residual: float) -> Any:
    """The tight term is finite however large the log-scale's residual variance is."""
    from npgp.conditionals import Tight
    from npgp.conditionals.base import row_elbo

    ones = jnp.ones((2, 3))
    found = row_elbo(Tight(), lk.HeteroscedasticGaussian(), p.x(p.Y[:3]), 0.0 * ones, 0.1 * ones, residual * ones)
    slope = jax.grad(
        lambda r: jnp.sum(row_elbo(Tight(), lk.HeteroscedasticGaussian(), p.x(p.Y[:3]), 0.0 * ones, 0.1 * ones, r))
    )
    return finite(found, "finite"), finite(slope(residual * ones), "slope")
