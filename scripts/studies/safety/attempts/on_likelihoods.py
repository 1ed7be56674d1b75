"""Likelihoods: parameters that do not fit, observations that cannot be, functions that are none, and large numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import npgp
from npgp import likelihoods as lk
from studies.safety import problem as p
from studies.safety.attempt import attempt, finite, mistakes, same, true

# ---------------------------------------------------------------------------------------------------------------
# Item 3: shapes


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


@attempt(3, "error", "variance, scale, df, shape, fn, likelihood", cases=COLUMNS)
def parameters_of_another_shape(make: Callable[[], Any]) -> Any:
    likelihood = make()

    def program(X, y=None):
        f = p.sparse_gp().draw()
        latent = f(X)
        if not isinstance(likelihood, lk.Likelihood) and likelihood.__code__.co_argcount == 2:
            latent = (latent, p.sparse_gp("g").draw()(X))
        npgp.observe("y", latent, likelihood, obs=y)

    return p.first_loss(program, p.x(), p.x(p.Y))


@attempt(3, "error", "exposure, concentration, shape", cases=("Poisson exposure", "NegativeBinomial", "Gamma"))
def parameters_of_counts_of_another_shape(which: str) -> Any:
    likelihood = {
        "Poisson exposure": lambda: npgp.Poisson(exposure=_column()),
        "NegativeBinomial": lambda: lk.NegativeBinomial(concentration=_column()),
        "Gamma": lambda: lk.Gamma(concentration=_column()),
    }[which]()
    return p.first_loss(p.observed(likelihood), p.x(), p.x(1.0 + p.COUNTS))


@attempt(3, "answer", cases=("per row", "per output", "one"))
def parameters_that_fit(which: str) -> Any:
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
# Item 15 and parameters that are none

BARE: dict[str, Callable[[], Any]] = {
    "Gaussian": lambda: npgp.Gaussian(0.1),
    "Laplace": lambda: lk.Laplace(0.1),
    "StudentT": lambda: npgp.StudentT(4.0, 0.1),
}


@attempt(15, "error", "variance, scale, df", cases=BARE)
def bare_numbers(make: Callable[[], Any]) -> Any:
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
def wrong_parameter(make: Callable[[], Any]) -> Any:
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


@attempt("beyond", "error", "y, observations", cases=OUT_OF_SUPPORT)
def observation_out_of_support(case: tuple[Callable[[], Any], float]) -> Any:
    make, value = case
    y = np.ones(p.N, np.float32)
    y[7] = value
    return p.first_loss(p.observed(make()), p.x(), y)


@attempt("beyond", "error", "y", cases=("Softmax",))
def class_that_is_not_there(_: str) -> Any:
    import numpyro

    def program(X, y):
        with numpyro.plate("classes", 3, dim=-2):
            f = p.sparse_gp().draw()
        with numpyro.plate("data", p.N):
            npgp.observe("y", f(X), lk.Softmax(3), obs=y)

    return p.first_loss(program, p.x(), np.arange(p.N) % 4)


# ---------------------------------------------------------------------------------------------------------------
# Item 16: functions that are no likelihoods

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


@attempt(16, "error", "likelihood, fn, rate, probs, scale, latent, function", cases=FUNCTIONS)
def function_as_a_likelihood(make: Callable[[], Any]) -> Any:
    return p.fit(p.observed(make()), p.x(), p.x(p.COUNTS > 0)).losses


# ---------------------------------------------------------------------------------------------------------------
# Numbers that overflow where they need not

_hermite = np.polynomial.hermite_e.hermegauss(200)


def _expected(log_prob: Callable[[np.ndarray], np.ndarray], mean: float, variance: float) -> float:
    nodes, weights = _hermite
    return float(log_prob(mean + np.sqrt(variance) * nodes) @ weights / weights.sum())


EXPECTATIONS: dict[str, tuple[Callable[[], Any], float, Callable[[np.ndarray], np.ndarray]]] = {
    "Bernoulli": (npgp.Bernoulli, 1.0, lambda f: -np.logaddexp(0, -f)),
    "probit": (lambda: npgp.Bernoulli("probit"), 0.0, lambda f: _log_cdf(-f)),
    "Laplace": (lambda: lk.Laplace(scale=0.5), 0.3, lambda f: -np.abs(0.3 - f) / 0.5),
    "negative binomial": (
        lambda: lk.NegativeBinomial(concentration=1.0),
        3.0,
        lambda f: 3 * f - 4 * np.logaddexp(0, f),
    ),
}


def _log_cdf(z: np.ndarray) -> np.ndarray:
    from scipy.special import log_ndtr

    return log_ndtr(z)


@attempt("beyond", "answer", cases=EXPECTATIONS, x64=None)
def expectations(case: Any) -> Any:
    make, y, log_prob = case
    likelihood = make()
    answers = []
    for mean, variance in ((0.2, 0.5), (-3.0, 2.0), (30.0, 1.0)):
        found = likelihood.expected_log_prob(p.x(y), p.x(mean), p.x(variance))
        constant = -np.log(2 * 0.5) if isinstance(likelihood, lk.Laplace) else 0.0
        if isinstance(likelihood, lk.Laplace):
            grid = np.linspace(-12, 12, 200001)
            weights = np.exp(-(grid**2) / 2)
            expected = log_prob(mean + np.sqrt(variance) * grid) @ weights / weights.sum()
        else:
            expected = _expected(log_prob, mean, variance)
        answers.append(same(found, expected + constant, 2e-3, 2e-3))
    return answers


@attempt("beyond", "either", "", cases=("gradient", "value"))
def bernoulli_far_out(which: str) -> Any:
    def of(mean):
        return npgp.Bernoulli().log_marginal(1.0, mean, 4.0)

    found = (jax.grad(of) if which == "gradient" else of)(-200.0)
    # Far out log σ(f) = f: the marginal is E exp(f).
    return same(found, 1.0 if which == "gradient" else -198.0, 1e-3)


@attempt(19, "either", "variance, scale, latent, start", x64=None, cases={"1": 1.0, "50": 50.0, "200": 200.0})
def heteroscedastic_residual_variance(residual: float) -> Any:
    """The tight term is finite however large the log-scale's residual variance is."""
    from npgp.sparse.conditionals import Tight, row_elbo

    ones = jnp.ones((2, 3))
    found = row_elbo(Tight(), lk.HeteroscedasticGaussian(), p.x(p.Y[:3]), 0.0 * ones, 0.1 * ones, residual * ones)
    slope = jax.grad(
        lambda r: jnp.sum(row_elbo(Tight(), lk.HeteroscedasticGaussian(), p.x(p.Y[:3]), 0.0 * ones, 0.1 * ones, r))
    )
    return finite(found, "finite"), finite(slope(residual * ones), "slope")


@attempt("beyond", "answer", cases=("Gaussian", "Poisson", "Bernoulli", "StudentT"), x64=True)
def bound_is_below_the_evidence(which: str) -> Any:
    """Two rows, no noise of quadrature: the evidence by a fine grid."""
    X, y = p.X[[3, 8]], {"Gaussian": p.Y[:2], "StudentT": p.Y[:2]}.get(which, np.array([1.0, 0.0]))
    likelihood = {
        "Gaussian": p.gaussian(),
        "Poisson": npgp.Poisson(),
        "Bernoulli": npgp.Bernoulli(),
        "StudentT": npgp.StudentT(df=3.0, scale=0.4),
    }[which]
    L = np.linalg.cholesky(p.gram(X))
    grid = np.linspace(-7, 7, 301)
    z = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)
    log_weights = -0.5 * np.sum(z**2, -1)
    log_weights -= np.logaddexp.reduce(log_weights)
    log_p = np.sum(np.asarray(likelihood.log_prob(jnp.asarray(z @ L.T), jnp.asarray(y))), -1)
    evidence = np.logaddexp.reduce(log_weights + log_p)
    loss = p.fit(
        p.observed(likelihood),
        jnp.asarray(X),
        jnp.asarray(y),
        steps=300,
        svi=p.svi_of(p.observed(likelihood), rate=0.05),
    ).losses
    return true(-loss.min() <= evidence + 1e-6, f"bound {-loss.min():.6f}, evidence {evidence:.6f}")
