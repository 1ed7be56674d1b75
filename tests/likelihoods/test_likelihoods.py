"""Every integral of every likelihood against dense sums over independent (SciPy) densities."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import compilations
from scipy import special, stats
from scipy.integrate import quad

import npgp
from npgp import likelihoods
from npgp.io import load, save
from npgp.likelihoods import numerics
from npgp.likelihoods.numerics import bernoulli_deviance, hazard, log_normal_cdf, sigmoids, stirling
from npgp.likelihoods.quadrature import _changes, _sorted_nodes, smooth_rule
from npgp.model.draw import Moments
from npgp.model.observation import LatentObservation
from npgp.programs import one_program
from npgp.pytrees import pytree

CUTS = (-1.0, 0.2, 2.0)
POINTS = (0.25, 0.5, 0.75)


@dataclasses.dataclass(frozen=True)
class Case:
    """A likelihood, some observations, its log-density and the moments of y given f."""

    make: Callable
    ys: tuple
    log_density: Callable
    conditional: Callable


def bernoulli(cdf, log_cdf):
    return (
        lambda f, y: log_cdf(f if y else -f),
        lambda f: (cdf(f), cdf(f) * cdf(-f)),
    )


def ordinal(cdf, log_cdf, cuts=CUTS):
    edges = np.array([-np.inf, *cuts, np.inf])

    def log_density(f, k):  # of the difference, from whichever tail is small
        a, b = edges[k] - f, edges[k + 1] - f
        a, b = np.where(a + b > 0, -b, a), np.where(a + b > 0, -a, b)
        return log_cdf(b) + np.log1p(-np.exp(log_cdf(a) - log_cdf(b)))

    def conditional(f):
        above = np.stack([cdf(f - c) for c in cuts])  # P(y > k)
        odd = np.array([1, 3, 5])[:, None]
        return above.sum(0), (odd * above).sum(0) - above.sum(0) ** 2

    return lambda f, y: log_density(f, int(y)), conditional


def counts(rate):
    return lambda f, y: stats.poisson.logpmf(y, rate(f)), lambda f: (rate(f), rate(f))


def negative_binomial(f, y, r=1.7):  # SciPy's underflows
    choose = special.gammaln(y + r) - special.gammaln(r) - special.gammaln(y + 1)
    return choose - y * np.log1p(r * np.exp(-f)) - r * np.log1p(np.exp(f) / r)


def binomial(f, y, n=12):
    return (
        special.gammaln(n + 1)
        - special.gammaln(y + 1)
        - special.gammaln(n - y + 1)
        + (y * special.log_expit(f) + (n - y) * special.log_expit(-f))
    )


def beta_binomial(f, y, n=7, total=3.0):
    a, b = total * special.expit(f), total * special.expit(-f)
    choose = special.gammaln(n + 1) - special.gammaln(y + 1) - special.gammaln(n - y + 1)
    return choose + special.betaln(y + a, n - y + b) - special.betaln(a, b)


def asymmetric_laplace(f, y, scale=0.4, q=0.8):
    u = (y - f) / scale
    return np.log(q * (1 - q) / scale) - u * (q - (u < 0))


def log_normal_mass(lower, upper):
    """From whichever tail is small."""
    a, b = np.where(lower + upper > 0, -upper, lower), np.where(lower + upper > 0, -lower, upper)
    return special.log_ndtr(b) + np.log1p(-np.exp(special.log_ndtr(a) - special.log_ndtr(b)))


def truncated_moments(f, scale=1.0, lower=-1.0, upper=2.0):
    x, w = np.polynomial.legendre.leggauss(60)
    y = lower + (upper - lower) * (x[:, None] + 1) / 2
    density = w[:, None] * np.exp(-((y - f) ** 2) / (2 * scale**2) + np.min((y - f) ** 2, axis=0) / (2 * scale**2))
    density /= density.sum(0)
    mean = (density * y).sum(0)
    return mean, (density * (y - mean) ** 2).sum(0)


def tweedie(f, y, dispersion=1.2, p=1.4):
    """θ y − κ(θ) over the dispersion, and a series in which f does not appear, taken from the mixture at f = 0."""

    def exponent(f):
        return (y * np.exp((1 - p) * f) / (1 - p) - np.exp((2 - p) * f) / (2 - p)) / dispersion

    if y == 0:
        return exponent(f)
    j, rate = np.arange(1, 400), 1 / ((2 - p) * dispersion)
    jumps = stats.gamma.logpdf(y, j * (2 - p) / (p - 1), scale=dispersion * (p - 1))
    return exponent(f) - exponent(0.0) + special.logsumexp(stats.poisson.logpmf(j, rate) + jumps)


def logits(n, variance_factor=1.0):
    return lambda f: (n * special.expit(f), n * variance_factor * special.expit(f) * special.expit(-f))


CASES = {
    "Binomial": Case(lambda: likelihoods.Binomial(trials=12.0), (0, 3, 12), binomial, logits(12)),
    "BetaBinomial": Case(
        lambda: likelihoods.BetaBinomial(trials=7.0, concentration=3.0),
        (0, 3, 7),
        beta_binomial,
        logits(7, 10 / 4),
    ),
    "Beta": Case(
        lambda: likelihoods.Beta(concentration=5.0),
        (0.02, 0.5, 0.9),
        lambda f, y: (
            (5 * special.expit(f) - 1) * np.log(y)
            + (5 * special.expit(-f) - 1) * np.log1p(-y)
            - special.betaln(5 * special.expit(f), 5 * special.expit(-f))
        ),
        logits(1, 1 / 6),
    ),
    "AsymmetricLaplace": Case(
        lambda: likelihoods.AsymmetricLaplace(scale=0.4, quantile=0.8),
        (-2.0, 0.5),
        asymmetric_laplace,
        lambda f: (f + 0.5 - 2.0, 4.25 + 0 * f),
    ),
    "Censored, right": Case(
        lambda: likelihoods.CensoredGaussian(scale=1.0, until=np.inf),
        (-2.0, 0.5),
        lambda f, y: special.log_ndtr(f - y),
        lambda f: (f, 1 + 0 * f),
    ),
    "Censored to an interval": Case(
        lambda: likelihoods.CensoredGaussian(scale=1.0, until=0.7),
        (-2.0, 0.5, 0.7, 0.701),
        lambda f, y: (
            stats.norm.logpdf(y, f, 1.0)
            if y == 0.7
            else np.log(0.001) + stats.norm.logpdf(0.7005, f, 1.0)
            if y > 0.7
            else log_normal_mass((y - f), (0.7 - f))
        ),
        lambda f: (f, 1 + 0 * f),
    ),
    "TruncatedGaussian": Case(
        lambda: likelihoods.TruncatedGaussian(scale=1.0, lower=-1.0, upper=2.0),
        (-0.9, 0.5, 2.0),
        lambda f, y: stats.norm.logpdf(y, f, 1.0) - log_normal_mass((-1 - f), (2 - f)),
        truncated_moments,
    ),
    "Tweedie": Case(
        lambda: likelihoods.Tweedie(dispersion=1.2, power=1.4),
        (0.0, 0.5, 9.0),
        tweedie,
        lambda f: (np.exp(f), 1.2 * np.exp(1.4 * f)),
    ),
    "Ordinal logit": Case(
        lambda: likelihoods.Ordinal(CUTS),
        (0, 1, 2, 3),
        *ordinal(special.expit, special.log_expit),
    ),
    "Gaussian": Case(
        lambda: likelihoods.Gaussian(variance=0.3),
        (-2.0, 0.5),
        lambda f, y: stats.norm.logpdf(y, f, np.sqrt(0.3)),
        lambda f: (f, 0.3 + 0 * f),
    ),
    "StudentT": Case(
        lambda: likelihoods.StudentT(df=4.0, scale=0.1),
        (-2.0, 0.5, 7.0),
        lambda f, y: stats.t.logpdf(y, 4.0, f, 0.1),
        lambda f: (f, 0.02 + 0 * f),
    ),
    "Cauchy": Case(  # no moments: see below
        lambda: likelihoods.StudentT(df=1.0, scale=2.0),
        (-2.0, 0.5, 30.0),
        lambda f, y: stats.cauchy.logpdf(y, f, 2.0),
        lambda f: (np.nan * f, np.nan * f),
    ),
    "Laplace": Case(
        lambda: likelihoods.Laplace(scale=0.4),
        (-2.0, 0.5),
        lambda f, y: stats.laplace.logpdf(y, f, 0.4),
        lambda f: (f, 0.32 + 0 * f),
    ),
    "Bernoulli logit": Case(likelihoods.Bernoulli, (0, 1), *bernoulli(special.expit, special.log_expit)),
    "Bernoulli probit": Case(
        lambda: likelihoods.Bernoulli("probit"),
        (0, 1),
        *bernoulli(special.ndtr, special.log_ndtr),
    ),
    "Poisson exp": Case(lambda: likelihoods.Poisson(exposure=2.5), (0, 3, 40), *counts(lambda f: 2.5 * np.exp(f))),
    "Poisson softplus": Case(
        lambda: likelihoods.Poisson("softplus", exposure=2.5),
        (0, 3, 40),
        *counts(lambda f: 2.5 * np.logaddexp(0, f)),
    ),
    "Gamma": Case(
        lambda: likelihoods.Gamma(concentration=2.5),
        (0.1, 3.0),
        lambda f, y: stats.gamma.logpdf(y, 2.5, scale=np.exp(f) / 2.5),
        lambda f: (np.exp(f), np.exp(2 * f) / 2.5),
    ),
    "Exponential": Case(
        likelihoods.Exponential,
        (0.0, 3.0),
        lambda f, y: stats.expon.logpdf(y, scale=np.exp(f)),
        lambda f: (np.exp(f), np.exp(2 * f)),
    ),
    "NegativeBinomial": Case(
        lambda: likelihoods.NegativeBinomial(concentration=1.7, exposure=2.5),
        (0, 3, 40),
        lambda f, y: negative_binomial(f + np.log(2.5), y),
        lambda f: (2.5 * np.exp(f), 2.5 * np.exp(f) + (2.5 * np.exp(f)) ** 2 / 1.7),
    ),
    "Ordinal": Case(
        lambda: likelihoods.Ordinal(CUTS, "probit"),
        (0, 1, 2, 3),
        *ordinal(special.ndtr, special.log_ndtr),
    ),
    "Weibull": Case(
        lambda: likelihoods.Weibull(concentration=1.5),
        (0.1, 3.0),
        lambda f, y: stats.weibull_min.logpdf(y, 1.5, scale=np.exp(f)),
        lambda f: (
            np.exp(f) * special.gamma(1 + 1 / 1.5),
            np.exp(2 * f) * (special.gamma(1 + 2 / 1.5) - special.gamma(1 + 1 / 1.5) ** 2),
        ),
    ),
    "Factorized": Case(
        lambda: likelihoods.Factorized(weibull, log_concave=True),
        (0.1, 3.0),
        lambda f, y: stats.weibull_min.logpdf(y, 1.5, scale=np.exp(f)),
        lambda f: (
            np.exp(f) * special.gamma(1 + 1 / 1.5),
            np.exp(2 * f) * (special.gamma(1 + 2 / 1.5) - special.gamma(1 + 1 / 1.5) ** 2),
        ),
    ),
    "Factorized, none": Case(
        lambda: likelihoods.Factorized(student),
        (-2.0, 0.5),
        lambda f, y: stats.t.logpdf(y, 5.0, f, 1.5),
        lambda f: (f, 3.75 + 0 * f),
    ),
}


def weibull(f):
    return dist.Weibull(jnp.exp(f), 1.5)


def student(f):
    return dist.StudentT(5.0, f, 1.5)


def bernoulli_logits(f):
    return dist.Bernoulli(logits=f)


every = pytest.mark.parametrize("name", CASES)
#: Of two with the same rule or function of intervals, one; Ordinal by rows with cutpoints of their own, below.
INTEGRATED = sorted(CASES.keys() - {"Censored, right", "Factorized, none", "Cauchy", "Ordinal", "Ordinal logit"})


INTERVALS = (likelihoods.CensoredGaussian, likelihoods.TruncatedGaussian)


@jax.jit
def integrals(likelihood, y, mean, variance):
    if isinstance(likelihood, INTERVALS):  # whose expectations are the largest programs: once, for both
        expected, slope = jax.jvp(
            lambda v: likelihood.expected_log_prob(y, mean, v), (variance,), (jnp.ones_like(variance),)
        )
        curvature = jnp.maximum(-2 * slope, 0.0)  # as `expected_curvature` has it of all that have none of their own
    else:
        expected = likelihood.expected_log_prob(y, mean, variance)
        curvature = likelihood.expected_curvature(y, mean, variance)
    return expected, likelihood.log_marginal(y, mean, variance), curvature, *likelihood.moments(mean, variance)


def test_intervals_have_the_curvature_that_their_expectations_say():
    """Else :func:`integrals` would not look at theirs."""
    for kind in INTERVALS:
        assert kind.expected_curvature is likelihoods.Likelihood.expected_curvature


@jax.jit
def values_and_gradients(likelihood, y, mean, variance):
    """Expected and averaged likelihood per row, and the gradients of their sums in all the rest."""

    def pull(method):
        value, vjp = jax.vjp(lambda *a: getattr(a[0], method)(y, *a[1:]), likelihood, mean, variance)
        return value, vjp(jnp.ones_like(value))

    return pull("expected_log_prob"), pull("log_marginal")


def dense(case, y, mean, variance):
    """The same five numbers by dense sums; the curvature is E[(1 − z²) log p]/v (Stein)."""
    sd = np.sqrt(variance)
    z = np.linspace(-18, 18, 8001)
    w = stats.norm.pdf(z) * (z[1] - z[0])
    lp = case.log_density(mean + sd * z, y)
    means, variances = case.conditional(mean + sd * z)
    average = (w * means).sum()
    # The averaged likelihood: over a window outside which the integrand is negligible.
    coarse = np.linspace(-40, 40, 4001)
    value = case.log_density(mean + sd * coarse, y) - coarse**2 / 2
    inside = coarse[value > value.max() - 40]
    t = np.linspace(inside[0] - 0.02, inside[-1] + 0.02, 8001)
    terms = case.log_density(mean + sd * t, y) + stats.norm.logpdf(t)
    return (
        (w * lp).sum(),
        special.logsumexp(terms) + np.log(t[1] - t[0]),
        (w * (1 - z**2) * lp).sum() / variance,
        average,
        (w * (variances + (means - average) ** 2)).sum(),
    )


ROWS = 24  # everywhere, as every other shape compiles again


def log_gamma(x):
    """In 80 bits, by the recurrence up to 30 and Stirling's series."""
    x = np.asarray(x, np.longdouble)
    steps = np.arange(30, dtype=np.longdouble).reshape((-1,) + (1,) * x.ndim)
    below, x = np.log(x + steps).sum(0), x + 30
    series = 1 / (12 * x) - 1 / (360 * x**3) + 1 / (1260 * x**5) - 1 / (1680 * x**7) + 1 / (1188 * x**9)
    return (x - 0.5) * np.log(x) - x + np.log(2 * np.longdouble(np.pi)) / 2 + series - below


def log_choose(n, k):
    return log_gamma(n + 1) - log_gamma(k + 1) - log_gamma(n - k + 1)


def log_student_t(f, y, p):
    norm = log_gamma((p + 1) / 2) - log_gamma(p / 2) - np.log(p * np.longdouble(np.pi)) / 2
    return norm - (p + 1) / 2 * np.log1p((y - f) ** 2 / p)


def log_beta(f, y, p):
    a, b = p / (1 + np.exp(-f)), p / (1 + np.exp(f))
    return log_gamma(p) - log_gamma(a) - log_gamma(b) + (a - 1) * np.log(y) + (b - 1) * np.log1p(-y)


def log_beta_binomial(f, y, p, n=50):
    a, b = p / (1 + np.exp(-f)), p / (1 + np.exp(f))
    ratio = log_gamma(y + a) - log_gamma(a) + log_gamma(n - y + b) - log_gamma(b) - log_gamma(n + p)
    return log_choose(n, y) + ratio + log_gamma(p)


#: By likelihood, made of one parameter: its log-density in 80 bits, and rows of y, parameter, mean and variance of f.
LIMITS = {
    "Poisson": (
        lambda p: likelihoods.Poisson(exposure=p),
        lambda f, y, p: y * (f + np.log(p)) - p * np.exp(f) - log_gamma(y + 1),
        [(y, 1, np.log(y) + 1 / np.sqrt(y), max(v / y, 1e-6)) for y in (1, 50, 1e4, 1e7) for v in (0.01, 9)]
        + [(0, 1, -3, 1)],
    ),
    "NegativeBinomial": (
        lambda p: likelihoods.NegativeBinomial(concentration=p),
        lambda f, y, p: (
            log_gamma(y + p)
            - log_gamma(p)
            - log_gamma(y + 1)
            - y * np.log1p(p * np.exp(-f))
            - p * np.log1p(np.exp(f) / p)
        ),
        [
            (y, p, np.log(y + 1) + 0.3 / np.sqrt(y + 1), v)
            for y, v in ((0, 0.5), (50, 0.01), (1e4, 1e-4))
            for p in (0.1, 1e2, 1e5, 1e8)
        ],
    ),
    "Binomial": (
        lambda p: likelihoods.Binomial(trials=p),
        lambda f, y, p: log_choose(p, y) - y * np.log1p(np.exp(-f)) - (p - y) * np.log1p(np.exp(f)),
        [
            (0, 10, -1, 1),
            (10, 10, 2, 0.1),
            (30, 100, -1, 0.1),
            (2e4, 1e5, -1.38, 1e-4),
            (99990, 1e5, 9.3, 0.1),
            (5e6, 1e7, 0.001, 1e-6),
        ],
    ),
    "StudentT": (
        lambda p: likelihoods.StudentT(df=p, scale=1.0),
        log_student_t,
        [(y, p, 0.25, v) for y, v in ((0.5, 0.1), (3, 1.0)) for p in (0.5, 4, 1e3, 1e6, 1e9)],
    ),
    "Gamma": (
        lambda p: likelihoods.Gamma(concentration=p),
        lambda f, y, p: p * np.log(p) - log_gamma(p) + (p - 1) * np.log(y) - p * (f + y * np.exp(-f)),
        [
            (y, p, np.log(y) + 0.5 / np.sqrt(p + 1), max(0.5 / (p + 1), 1e-6))
            for y in (1e-3, 20)
            for p in (1e-2, 3, 1e4, 1e7)
        ],
    ),
    "Beta": (
        lambda p: likelihoods.Beta(concentration=p),
        log_beta,
        [
            (y, p, np.log(y / (1 - y)) + 0.5 / np.sqrt(p + 1), max(0.1 / (p + 1), 1e-6))
            for y in (0.01, 0.5, 0.9)
            for p in (0.1, 5, 1e4, 1e7)
        ],
    ),
    "BetaBinomial": (
        lambda p: likelihoods.BetaBinomial(trials=50.0, concentration=p),
        log_beta_binomial,
        [(y, p, -0.5, 0.1) for y in (0, 10, 50) for p in (0.1, 5, 1e4, 1e8)],
    ),
}


@pytest.mark.parametrize(
    "name, x64",  # the last are dear, and in double precision what Beta's are
    [(name, double) for name in LIMITS for double in (False, True) if name != "BetaBinomial" or not double],
    ids=lambda value: {True: "float64", False: "float32"}.get(value, value),
    indirect=["x64"],
)
def test_limits_of_parameters_and_of_counts(name, x64):
    """In float32 too, where differences of log-gammas would be off by hundreds; and gradients."""
    make, log_density, rows = LIMITS[name]
    eps = float(jnp.finfo(x64).eps)
    y, p, mean, variance = (np.asarray(column, x64) for column in np.array(rows, float).T)

    @jax.jit
    def ours(y, p, mean, variance):
        def expected(mean, log_p):
            return make(p * jnp.exp(log_p)).expected_log_prob(y, mean, variance)

        value, pull = jax.vjp(expected, mean, 0 * p)
        average = [make(p).log_marginal(y, mean, variance)] if averaged else []
        return [make(p).log_prob(mean, y), value, *pull(jnp.ones_like(y)), *average]

    # The averages of shares are dear, and other tests have them in double precision; of counts Poisson's are enough.
    averaged = name != "BetaBinomial" and (x64 == jnp.float32 or name in ("Poisson", "StudentT", "Gamma"))
    found = ours(y, p, mean, variance)
    assert all(a.dtype == x64 for a in found)
    got = np.stack([np.asarray(a, float) for a in found])
    z, w = np.polynomial.hermite_e.hermegauss(80)
    w, h = w / w.sum(), np.longdouble(1e-3)  # relative to what is moved
    exact = np.array([a.astype(np.longdouble) for a in (y, p, mean, variance)]).T
    for row, (y, p, m, v) in enumerate(exact):
        density = partial(log_density, y=y)
        sd = np.sqrt(v)

        def expected(m, p):
            return w @ density(m + sd * z, p=p)  # noqa: B023

        def joint(t):
            return density(m + sd * t, p=p) - t**2 / 2  # noqa: B023

        t = np.linspace(-9, 9, 4001)
        inside = t[joint(t) > np.max(joint(t)) - 45]
        t = np.linspace(inside[0] - 0.01, inside[-1] + 0.01, 4001)
        marginal = special.logsumexp(joint(t).astype(float)) + np.log((t[1] - t[0]) / np.sqrt(2 * np.pi))
        by_mean = (expected(m + h * sd, p) - expected(m - h * sd, p)) / (2 * h * sd)
        data = name in ("Binomial", "Poisson")  # the parameter, trials or exposure
        by_p = np.nan if data else (expected(m, p * (1 + h)) - expected(m, p * (1 - h))) / (2 * h)
        truth = np.array([density(m, p=p), expected(m, p), by_mean, by_p, marginal], float)
        # Rounding f, or log y, moves log p by the slope it has there, and the slope by the curvature.
        at = density(m + np.array([-0.01, 0, 0.01]) * sd, p=p)
        curvature = float(abs(at[0] + at[2] - 2 * at[1]) / (0.01 * sd) ** 2)
        noise = 4 * eps * (1 + abs(float(m)))
        slope = abs(float(by_mean)) + 3 * np.sqrt(curvature)
        tolerance = noise * np.array([slope, slope, curvature, slope + curvature * float(sd), slope])
        value, derivative = (2e-5, 2e-4) if x64 == jnp.float32 else (1e-8, 3e-6)
        tolerance += np.array([value, value, derivative, derivative, value]) * (1 + np.abs(truth))
        truth, tolerance = truth[: len(got)], tolerance[: len(got)]
        wrong = np.abs(got[:, row] - truth) > tolerance
        assert not np.any(wrong), [
            *map(float, (y, p, m, v)),
            *zip(got[:, row].tolist(), truth.tolist(), tolerance.tolist(), strict=True),
        ]


@pytest.mark.parametrize("name", INTEGRATED)
@settings(max_examples=4, deadline=None)
@given(
    mean=st.lists(st.floats(-3, 3), min_size=6, max_size=6),
    deviation=st.lists(st.floats(0.03, 4), min_size=6, max_size=6),
)
def test_integrals_agree_with_dense_sums(name, mean, deviation):
    case, mean, variance = CASES[name], np.repeat(mean, 4), np.repeat(np.square(deviation), 4)
    if case.make().proof == "none":  # Gauss-Hermite knows nothing of where its peak is
        variance = np.minimum(variance, 4)
    y = np.resize(np.array(case.ys, float), ROWS)
    with jax.enable_x64(True):
        got = np.stack(np.broadcast_arrays(*integrals(case.make(), y, mean, variance)))
    truth = np.stack([dense(case, *row) for row in zip(y, mean, variance, strict=True)], axis=1)
    np.testing.assert_allclose(got, truth, rtol=2e-5, atol=1e-4)
    if case.make().proof in ("gaussian", "log-concave"):
        assert np.all(got[2] >= 0)


def narrow_student_t(f, y):
    return stats.t.logpdf(y, 4.0, f, 0.1)


@jax.jit
def average_and_slopes(likelihood, y, mean, variance):
    """The average of each row, and its first two derivatives in the mean."""

    def slope(mean):
        value, pull = jax.vjp(lambda m: likelihood.log_marginal(y, m, variance), mean)
        return pull(jnp.ones_like(mean))[0], value

    return jax.jvp(slope, (mean,), (jnp.ones_like(mean),), has_aux=True)


@pytest.mark.parametrize(
    "likelihood, ys, log_density",
    [
        (likelihoods.StudentT(df=4.0, scale=0.1), (-2.0, 7.0), narrow_student_t),
        (likelihoods.VonMises(concentration=40.0), (-2.0, 3.0), lambda f, y: stats.vonmises.logpdf(y - f, 40.0)),
        (likelihoods.VonMises(concentration=0.5), (-2.0, 3.0), lambda f, y: stats.vonmises.logpdf(y - f, 0.5)),
        (CASES["Weibull"].make(), CASES["Weibull"].ys[:2], CASES["Weibull"].log_density),
        *[(CASES[name].make(), CASES[name].ys[1:], CASES[name].log_density) for name in ("Beta", "BetaBinomial")],
        (CASES["TruncatedGaussian"].make(), (-0.9, 2.0), CASES["TruncatedGaussian"].log_density),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, likelihoods.Likelihood) else "",
)
def test_float64_is_exact_to_eight_digits(likelihood, ys, log_density, float64):
    """Expectation and average, with slopes in the mean and the second derivative of the latter: narrow to wide f."""
    grid = np.meshgrid(ys[:2], [-3.0, 0.5, 4.0], [0.01, 1.0, 25.0])
    y, mean, variance = (np.resize(a.ravel(), ROWS).astype(float) for a in grid)  # as above: the same programs
    expected, average, *_ = integrals(likelihood, y, mean, variance)
    got, truth = [expected, average], []
    if not isinstance(likelihood, likelihoods.BetaBinomial):  # whose slopes are those of Beta in kind, and dearer
        first, second, average = average_and_slopes(likelihood, y, mean, variance)
        got = [expected, average, first, second]
    z = np.linspace(-40, 40, 80_001)
    log_w = stats.norm.logpdf(z) + np.log(z[1] - z[0])
    for row, m, v in zip(y, mean, variance, strict=True):
        sd, log_p = np.sqrt(v), log_density(m + np.sqrt(v) * z, row)
        average = special.logsumexp(log_p + log_w)
        posterior = np.exp(log_p + log_w - average)
        first = posterior @ z
        second = posterior @ (z - first) ** 2 - 1
        truth.append([np.exp(log_w) @ log_p, average, first / sd, second / v])
    truth = np.transpose(truth)[: len(got)]
    error = np.abs(np.stack(got) - truth) / np.maximum(1, np.abs(truth))
    np.testing.assert_array_less(error, np.array([1e-8, 1e-8, 1e-7, 1e-7])[: len(got), None] * np.ones_like(error))


#: Of counts and shares the limits of parameters have values and gradients in float32, of all variances but the least;
#: of two of the same function of intervals, one.
IN_LIMITS = {"Beta", "BetaBinomial", "Binomial", "NegativeBinomial"}
SINGLE_LIKE_ANOTHER = {"Cauchy", "Factorized", "Factorized, none", "Censored, right", "Ordinal"}
SINGLE_LIKE_ANOTHER |= {"Censored to an interval", "TruncatedGaussian"}  # expectations of intervals, and tails, below


@pytest.mark.parametrize("name", sorted(CASES.keys() - SINGLE_LIKE_ANOTHER - IN_LIMITS))
def test_float32_and_its_gradients(name):
    case = CASES[name]
    variance = np.resize([-1e-9, 0, 1e-12, 1e-4, 0.05, 1, 6], ROWS)
    mean, y = np.resize([-3.0, 0.4], ROWS), np.resize(np.repeat(np.array(case.ys, float), 2), ROWS)
    likelihood = case.make()
    arguments = [jnp.asarray(a, jnp.float32) for a in (y, mean, variance)]
    single = values_and_gradients(likelihood, *arguments)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(single))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(single))
    with jax.enable_x64(True):
        double = integrals(case.make(), y, mean, np.maximum(variance, 1e-9))
    (expected, (_, _, slope)), (marginal, _) = single
    # Tiny variances are raised to machine epsilon; the curvature is 40 there for |y − f|/0.4.
    np.testing.assert_allclose(expected, double[0], rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(marginal, double[1], rtol=1e-4, atol=2e-3)
    large = variance > 1e-6
    np.testing.assert_allclose(expected[large], double[0][large], rtol=3e-5, atol=3e-5)
    np.testing.assert_allclose(marginal[large], double[1][large], rtol=3e-5, atol=3e-5)
    # A derivative in the variance is a difference quotient over the deviation.
    np.testing.assert_allclose(-2 * slope, double[2], rtol=5e-3, atol=5e-3)


@every
def test_numbers_widen_nothing(name):
    """Python's numbers and integers, with 64-bit numbers allowed (NumPyro's moments are its own affair)."""
    likelihood, label = CASES[name].make(), CASES[name].ys[0]
    moments = jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.float32)
    label = jnp.asarray(label, jnp.int32 if isinstance(label, int) else jnp.float32)
    with jax.enable_x64(True):
        mixed = [jax.eval_shape(likelihood.expected_log_prob, label, *moments)]
        if not name.startswith("Factorized"):
            mixed += jax.eval_shape(likelihood.moments, *moments)
    assert all(leaf.dtype == jnp.float32 for leaf in mixed)


@pytest.mark.parametrize("name", INTEGRATED)
def test_limit_of_no_variance(name):
    case, h = CASES[name], 1e-3
    f, y = np.full(ROWS, 0.7), np.resize(np.array(case.ys, float), ROWS)
    with jax.enable_x64(True):
        expected, marginal, curvature, *_ = integrals(case.make(), y, f, np.zeros(ROWS))
    rows = zip(y, f, strict=True)
    lp, up, down = np.array([[case.log_density(b + d, a) for d in (0, h, -h)] for a, b in rows]).T.reshape(3, ROWS)
    np.testing.assert_allclose(expected, lp, atol=1e-6)
    np.testing.assert_allclose(marginal, lp, atol=1e-6)
    np.testing.assert_allclose(curvature, (2 * lp - up - down) / h**2, rtol=1e-3, atol=1e-3)


@partial(jax.jit, static_argnames="ways")
def second_derivatives(likelihood, y, mean, variance, ways):
    """∂²E/∂mean² of each row in these ways, and 2 ∂E/∂variance."""

    def expected(mean, variance):
        return likelihood.expected_log_prob(y, mean, variance)

    def slope(mean):
        return jax.grad(lambda m: jnp.sum(expected(m, variance)))(mean)

    def forward(mean):
        return jax.jvp(lambda m: expected(m, variance), (mean,), (ones,))[1]

    ones = jnp.ones_like(mean)
    seconds = {
        "linearize": lambda: jax.linearize(slope, mean)[1](ones),
        "grad": lambda: jax.grad(lambda m: jnp.sum(slope(m)))(mean),
        "jvp": lambda: jax.jvp(forward, (mean,), (ones,))[1],
    }
    return [seconds[way]() for way in ways], 2 * jax.grad(lambda v: jnp.sum(expected(mean, v)))(variance)


SECOND_LIKE_ANOTHER = ("Factorized, none", "TruncatedGaussian", "BetaBinomial", "Ordinal", "Cauchy")
SECOND_LIKE_ANOTHER += ("Censored, right", "Censored to an interval")  # log p's own: slopes and curvatures of intervals
#: One of each rule of derivatives: in all ways.
IN_ALL_WAYS = ("Gaussian", "StudentT", "Laplace", "AsymmetricLaplace", "Bernoulli probit", "Poisson exp", "Factorized")


@pytest.mark.parametrize(
    "name, x64",
    [
        # Of two that are integrated by the same rule, or of the same function of intervals, one.
        *((name, True) for name in CASES if name not in SECOND_LIKE_ANOTHER),
        ("Poisson exp", False),
        ("StudentT", False),
        ("Bernoulli probit", False),
    ],
    indirect=["x64"],
    ids=lambda value: {True: "float64", False: "float32"}.get(value, value),
)
def test_second_derivatives_in_the_mean(name, x64):
    """Price's theorem, on which natural gradients rest; at y = mean too, where |y − mean| has none."""
    case, double = CASES[name], x64 == jnp.float64
    y = np.resize(np.array(case.ys, float), ROWS)
    mean, variance = np.repeat([-2.0, -1.0, 0.0, 0.5, 1.3, 3.0], 4), np.square(np.tile([0.2, 0.2, 1.0, 1.0], 6))
    arguments = [jnp.asarray(a, x64) for a in (y, mean, variance)]
    ways = ("linearize", "grad", "jvp") if double and name in IN_ALL_WAYS else ("linearize",)
    seconds, first = second_derivatives(case.make(), *arguments, ways)
    tolerance = 1e-9 if double else 1e-4
    for second in seconds:
        assert second.dtype == x64
        np.testing.assert_allclose(second, first, rtol=tolerance, atol=tolerance)
    if double:
        truth = [-dense(case, *row)[2] for row in zip(y, mean, variance, strict=True)]
        np.testing.assert_allclose(first, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "likelihood, ys",
    [
        *((case.make(), case.ys) for case in CASES.values()),
        (likelihoods.Ordinal([0.0, 1e-3]), (0, 1, 2)),
        (likelihoods.VonMises(concentration=0.5), (0.0, 1.0)),
    ],
    ids=[*CASES, "Ordinal, near cutpoints", "VonMises"],
)
def test_log_concave_where_claimed_and_nowhere_else(likelihood, ys):
    f, y, h = np.linspace(-20, 20, 2001), np.array(ys)[:, None], 0.02
    with jax.enable_x64(True):  # second differences, so that kinks are no exception
        up, center, down = jax.jit(likelihood.log_prob)(f + h * np.array([1, 0, -1])[:, None, None], y)
        concave = np.all(up + down - 2 * center <= 1e-12 * (1 + np.abs(center)))
    assert concave == (likelihood.proof in ("gaussian", "log-concave"))


def test_every_likelihood_is_tested():
    exported = [getattr(likelihoods, name) for name in likelihoods.__all__]
    classes = {a for a in exported if isinstance(a, type) and issubclass(a, likelihoods.Likelihood)}
    elsewhere = {likelihoods.HeteroscedasticGaussian, likelihoods.Softmax}  # in test_several_latents
    elsewhere |= {likelihoods.ZeroInflated, likelihoods.Hurdle}
    elsewhere |= {likelihoods.Columns}  # in test_columns
    elsewhere |= {likelihoods.VonMises}  # whose moments are circular: below
    assert classes - elsewhere - {likelihoods.Likelihood} == {type(case.make()) for case in CASES.values()}
    for cls in classes - {likelihoods.Likelihood, likelihoods.Factorized, likelihoods.Columns}:
        assert "log-concave" in cls.__doc__.lower(), cls


def test_certificates():
    t, factorized = likelihoods.StudentT(df=4.0, scale=0.1), likelihoods.Factorized(student)
    assert likelihoods.Gaussian(variance=1.0).proof == "gaussian"
    assert t.proof == "single-peaked" and factorized.proof == "none"
    assert likelihoods.Factorized(weibull, log_concave=True).proof == "log-concave"
    # Where there is no formula, one set of nodes serves all variances that the curvature rule tries.
    assert CASES["TruncatedGaussian"].make().by_quadrature and not npgp.Poisson().by_quadrature
    # The curvature of what is not log-concave keeps its sign.
    assert jax.jit(t.expected_curvature)(3.0, 0.0, 0.1) < 0
    assert jax.jit(factorized.expected_curvature)(9.0, 0.0, 0.1) < 0


@pytest.mark.parametrize(
    "make, y, peak",
    [
        (lambda: likelihoods.Poisson(exposure=1.0), 10_000.0, np.log(1e4)),
        (lambda: likelihoods.NegativeBinomial(concentration=500.0), 300.0, np.log(300.0)),
        (lambda: likelihoods.Laplace(scale=1e-2), 2.0, 2.0),
        (lambda: likelihoods.StudentT(df=4.0, scale=1e-3), 2.0, 2.0),
    ],
)
def test_averaged_likelihood_far_narrower_than_the_gaussian(make, y, peak):
    means, variances = np.array([0.0, -2.0, 1.0]), np.array([9.0, 100.0, 1e-3])
    with jax.enable_x64(True):
        rows = np.stack([np.resize(a, ROWS) for a in (y, means, variances)])
        double, log_prob = integrals(make(), *rows)[1][:3], jax.jit(make().log_prob)
        truth = []
        for mean, variance in zip(means, variances, strict=True):
            # Dense around and between both peaks.
            sd, low, high = np.sqrt(variance), min(peak, mean) - 1, max(peak, mean) + 1
            wide = np.linspace(mean - 12 * sd, mean + 12 * sd, 2001)
            fine = np.linspace(low, high, 200_001)
            finer = peak + np.linspace(-0.1, 0.1, 100_001)
            f = np.unique(np.concatenate([wide, fine, finer]))
            integrand = np.asarray(log_prob(f, y)) + stats.norm.logpdf(f, mean, sd)
            top = integrand.max()
            truth.append(top + np.log(np.trapezoid(np.exp(integrand - top), f)))
    np.testing.assert_allclose(double, truth, atol=1e-4)
    with jax.disable_jit():
        single = make().log_marginal(*rows.astype(np.float32))[:3]
    np.testing.assert_allclose(single, truth, rtol=1e-4, atol=2e-3)


def test_narrow_student_t_where_twenty_nodes_are_off():
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    y, peak = 0.4, [0.3, 0.4, 0.5]

    def log_density(f):
        return stats.t.logpdf(y, 4.0, f, 0.03)

    truth = quad(lambda f: log_density(f) * stats.norm.pdf(f), -10, 10, points=peak)[0]
    with jax.enable_x64(True):
        rows = np.full((3, ROWS), [[y], [0.0], [1.0]])
        expected, *_ = integrals(likelihoods.StudentT(df=4.0, scale=0.03), *rows)
    assert float(expected[0]) == pytest.approx(truth, abs=1e-6)
    assert abs((weights * log_density(nodes)).sum() / weights.sum() - truth) > 0.1


def test_quadrature_error_finds_what_is_wrong():
    error = jax.jit(likelihoods.quadrature_error)
    y, mean, variance = jnp.array([0.0, 1.0]), jnp.array([0.3, -0.4]), 1.0
    assert np.all(error(likelihoods.Gaussian(variance=0.1), y, mean, variance) == 0)
    narrow = likelihoods.Factorized(lambda f: dist.StudentT(4, f, 0.001), num_nodes=20)
    assert np.all(error(narrow, y, mean, variance) > 0.01)
    coarse, fine = (likelihoods.Factorized(bernoulli_logits, num_nodes=n) for n in (5, 64))
    assert np.all(error(coarse, y, mean, variance) > 10 * error(fine, y, mean, variance))
    assert np.all(error(fine, y, mean, variance) < 1e-5)


@pytest.mark.parametrize(
    "make, log_density",
    [
        (lambda p: likelihoods.Gaussian(variance=p), lambda f, y, p: stats.norm.logpdf(y, f, np.sqrt(p))),
        (lambda p: likelihoods.Laplace(scale=p), lambda f, y, p: stats.laplace.logpdf(y, f, p)),
        (lambda p: likelihoods.StudentT(df=3 + p, scale=p), lambda f, y, p: stats.t.logpdf(y, 3 + p, f, p)),
        (
            lambda p: likelihoods.Factorized(lambda f: dist.Gamma(p, p * jnp.exp(-f))),
            lambda f, y, p: stats.gamma.logpdf(y, p, scale=np.exp(f) / p),
        ),
    ],
)
def test_one_parameter_per_row(make, log_density):
    parameters = np.resize([0.3, 1.0, 2.0], ROWS)
    # Rows may share y, mean and variance, which then have fewer axes than the parameters.
    y, *moments = shared = np.array([0.5, 0.2, 0.5], np.float32)

    @jax.jit
    def both(parameters):
        likelihood = make(parameters)
        return likelihood.expected_log_prob(*shared), likelihood.log_marginal(*shared)

    together = both(parameters.astype(np.float32))
    for row in (0, 1, 2):
        alone = Case(make, (), partial(log_density, p=parameters[row]), lambda f: (f, f))
        got = [values[row::3] for values in together]
        truth = np.array(dense(alone, y, *moments)[:2])[:, None]
        np.testing.assert_allclose(got, np.broadcast_to(truth, np.shape(got)), rtol=1e-5, atol=1e-5)
    likelihood = make(jnp.asarray(parameters, jnp.float32))
    assert jax.eval_shape(likelihood.log_prob, jnp.zeros((4, 1)), y).shape == (4, ROWS)
    assert jax.eval_shape(likelihood.sample, jax.random.key(0), jnp.zeros(ROWS)).shape == (ROWS,)


@pytest.mark.parametrize(  # each kind of integral
    "name", ["Bernoulli logit", "Exponential", "Gaussian", "Laplace", "StudentT", "Weibull"]
)
def test_shapes(name):
    likelihood, y = CASES[name].make(), np.float32(CASES[name].ys[0])
    together = jax.eval_shape(integrals, likelihood, y, jnp.ones((3, 1)), jnp.ones(2))
    assert all(x.shape == (3, 2) for x in together[:3])
    assert all(jnp.broadcast_shapes(x.shape, (3, 2)) == (3, 2) for x in together[3:])
    assert all(x.shape == () for x in jax.eval_shape(integrals, likelihood, y, 0.1, 1.0))
    assert all(x.shape == (3,) for x in jax.eval_shape(integrals, likelihood, np.full(3, y), 0.1, 1.0)[:3])


def test_new_values_do_not_compile_again():
    traces = []

    @jax.jit
    def evaluate(likelihood, y, mean):
        traces.append(likelihood)
        return likelihood.log_prob(mean, y)

    for scale in (0.3, 0.7):
        evaluate(likelihoods.StudentT(df=4.0, scale=scale), 1.0, 0.2 * scale)
    for cuts in ([0.0, 1.0], [-1.0, 1.0]):
        evaluate(likelihoods.Ordinal(cuts), 1, 0.2)
    for _ in range(2):
        evaluate(likelihoods.Factorized(bernoulli_logits), 1, 0.2)
    assert len(traces) == 3


def test_pytrees():
    likelihood = likelihoods.StudentT(df=4.0, scale=0.5)
    leaves, structure = jax.tree.flatten(likelihood)
    assert leaves == [4.0, 0.5] and not jax.tree.leaves(likelihoods.Exponential())
    assert dataclasses.asdict(jax.tree.unflatten(structure, leaves)) == dataclasses.asdict(likelihood)
    # A gradient is no likelihood: negative entries, and any object JAX may put in, are no errors.
    gradient = jax.grad(lambda lik: lik.expected_log_prob(0.0, 0.0, 1.0))(likelihoods.Gaussian(variance=9.0))
    assert gradient.variance < 0
    jax.tree.map(lambda _: object(), likelihood)
    rows = likelihoods.Gaussian(variance=jnp.arange(1.0, 4.0))
    assert jax.vmap(lambda lik: lik.log_prob(0.0, 0.0))(rows).shape == (3,)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(likelihood)]
    assert paths == [".df", ".scale"]
    assert rows.precision[1] == 0.5


def test_gaussian_by_variance_or_by_scale(tmp_path):
    for named, words in (({}, "neither"), ({"variance": 1.0, "scale": 1.0}, "both")):
        with pytest.raises(TypeError, match=rf"takes variance=… or scale=… .*; {words} was given\.$"):
            likelihoods.Gaussian(**named)
    s = np.array([0.3, 2.0])
    by_scale, by_variance = likelihoods.Gaussian(scale=s), likelihoods.Gaussian(variance=s**2)
    np.testing.assert_allclose(by_scale.log_prob(0.1, 0.7), by_variance.log_prob(0.1, 0.7), rtol=1e-6)
    np.testing.assert_allclose(by_variance.scale, s, rtol=1e-6)

    # Where objects are rebuilt, copied and differentiated.
    slope = jax.jit(jax.grad(lambda s: likelihoods.Gaussian(scale=s).log_prob(0.0, 1.0)))(2.0)
    assert slope == pytest.approx(1 / 8 - 1 / 2)  # y²/s³ − 1/s
    assert jax.tree.map(lambda v: 2 * v, by_variance).variance[0] == pytest.approx(0.18)
    assert dataclasses.replace(by_variance, variance=3.0).variance == 3.0
    save(tmp_path / "gaussian.npz", by_scale)
    np.testing.assert_array_equal(load(tmp_path / "gaussian.npz").variance, by_scale.variance)


def test_a_field_that_rebuilding_would_lose_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Lost:
        made: float = dataclasses.field(init=False)

    with pytest.raises(TypeError, match=r"^Lost.made has init=False; in a pytree it must have a default\.$"):
        pytree(Lost)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"Cauchy", "Factorized, none"}))
def test_samples_have_the_moments(name):
    case, n, mean, variance = CASES[name], 10_000, 0.3, 0.2
    keys = jax.random.split(jax.random.key(3), 2)
    f = mean + np.sqrt(variance) * jax.random.normal(keys[0], (n,))
    likelihood = case.make()
    y = likelihood.sample(keys[1], f)
    likelihood.check(y)
    assert y.shape == f.shape
    assert jnp.issubdtype(y.dtype, jnp.integer) == isinstance(case.ys[0], int)
    y, (*_, m, v) = np.asarray(y, float), dense(case, case.ys[0], mean, variance)
    assert abs(y.mean() - m) < 5 * np.sqrt(v / n)
    assert abs(y.var() - v) < 5 * np.std((y - y.mean()) ** 2) / np.sqrt(n)


def test_angles(x64):
    """Von Mises: expectations in closed form, against sums; the whole circle has probability 1."""
    likelihood = likelihoods.VonMises(concentration=jnp.asarray(6.0, x64))
    y, mean, variance = (jnp.asarray(a, x64) for a in ([0.3, 3.0, -9.0], [0.1, 0.0, 1.0], [0.04, 0.2, 0.3]))
    expected = jax.jit(likelihood.expected_log_prob)(y, mean, variance)
    marginal = jax.jit(likelihood.log_marginal)(y, mean, variance)
    z = np.linspace(-12, 12, 20001)
    w = stats.norm.pdf(z) * (z[1] - z[0])
    f = np.asarray(mean, float)[:, None] + np.sqrt(np.asarray(variance, float))[:, None] * z
    log_p = stats.vonmises.logpdf(np.asarray(y, float)[:, None], 6.0, loc=f)
    np.testing.assert_allclose(expected, log_p @ w, rtol=2e-5)
    np.testing.assert_allclose(marginal, np.log(np.exp(log_p) @ w), rtol=2e-4, atol=1e-4)
    direction, spread = jax.jit(likelihood.moments)(mean, variance)
    np.testing.assert_allclose(direction, mean)
    resultant = np.cos(f - np.asarray(mean)[:, None]) @ w * special.ive(1, 6.0) / special.ive(0, 6.0)
    np.testing.assert_allclose(spread, 1 - resultant, rtol=1e-5)
    draws = likelihood.sample(jax.random.key(0), jnp.full(20_000, 2.0, x64))
    assert abs(np.cos(np.asarray(draws) - 2.0).mean() - special.ive(1, 6.0) / special.ive(0, 6.0)) < 0.005
    by_concentration = jax.jit(jax.grad(lambda k: likelihoods.VonMises(concentration=k).log_prob(0.0, 0.1)))
    for k in (1e-3, 29.0, 31.0, 1e6):  # both sides of the seam of its norm
        slope = by_concentration(jnp.asarray(k, x64))
        truth = np.cos(0.1) - 1 - (np.longdouble(special.ive(1, k)) / special.ive(0, k) - 1)
        np.testing.assert_allclose(slope, float(truth), rtol=1e-4)


def test_cutpoints_of_each_row(float64):
    cuts = np.array([[-1.0, 0.2, 2.0], [0.0, 1e-3, 4.0], [-3.0, 0.0, 0.5]])
    y, mean, variance = np.array([1, 1, 3]), np.array([0.3, 5.0, -1.0]), np.array([0.1, 1.0, 2.0])
    links = {"logit": (special.expit, special.log_expit), "probit": (special.ndtr, special.log_ndtr)}
    for link, functions in links.items():
        together = integrals(likelihoods.Ordinal(cuts, link), y, mean, variance)
        alone = [Case(None, (), *ordinal(*functions, row_cuts)) for row_cuts in cuts]
        truth = [dense(case, *row) for case, row in zip(alone, zip(y, mean, variance, strict=True), strict=True)]
        np.testing.assert_allclose(np.stack(together, axis=1), truth, rtol=1e-5, atol=1e-6)
    drawn = likelihoods.Ordinal(cuts).sample(jax.random.key(0), jnp.zeros((4000, 3)))
    np.testing.assert_allclose(np.mean(drawn == 0, axis=0), special.expit(np.asarray(cuts[:, 0])), atol=0.03)


def test_tails_of_intervals_in_float32():
    """Values and slopes far out, where distribution functions are 0 or 1 to rounding, and in narrow intervals."""
    until = np.array([np.inf, np.inf, -np.inf, 1.0, 50.0, 1e-3])
    y, f = np.array([60.0, -60.0, -60.0, 0.0, 49.0, 0.0]), np.array([0.0, 0.0, 0.0, 40.0, 0.0, -20.0])
    likelihood = likelihoods.CensoredGaussian(scale=jnp.float32(1.0), until=until)
    y_, f_ = (jnp.asarray(a, jnp.float32) for a in (y, f))
    value, slope = jax.jit(lambda f: jax.jvp(lambda f: likelihood.log_prob(f, y_), (f,), (jnp.ones_like(f),)))(f_)
    lower, upper = np.minimum(y, until) - f, np.maximum(y, until) - f
    with np.errstate(all="ignore"):
        truth = np.where(np.isinf(upper), special.log_ndtr(-lower), special.log_ndtr(upper))
        truth[3:5] = log_normal_mass(lower[3:5], upper[3:5])
    truth[5] = np.log(1e-3) + stats.norm.logpdf(20.0005)
    np.testing.assert_allclose(value, truth, rtol=1e-5, atol=1e-5)
    hazards = np.exp(stats.norm.logpdf([60.0, -39.0, 49.0]) - special.log_ndtr([-60.0, -39.0, -49.0]))
    np.testing.assert_allclose(slope[np.array([0, 1, 3, 4])], [hazards[0], 0, -hazards[1], hazards[2]], rtol=1e-4)
    np.testing.assert_allclose(slope[5], 20.0005, rtol=1e-5)
    by_scale = jax.grad(lambda s: jnp.sum(likelihoods.CensoredGaussian(scale=s, until=until).log_prob(f_, y_)))
    assert np.isfinite(jax.jit(by_scale)(1.0))
    # Values that a truncated variable can hardly take are drawn where it lies.
    far = likelihoods.TruncatedGaussian(scale=1.0, lower=0.0).sample(jax.random.key(0), jnp.full(20_000, -30.0))
    assert np.all(far > 0) and np.mean(far) == pytest.approx(1 / 30.07, rel=0.03)


def test_slopes_and_curvatures_of_intervals_are_moments(x64):
    """Those of log(Φ(b − f) − Φ(a − f)) in f are the mean, and the variance less 1, of a normal variable in (a, b)."""
    ends = [(-150.25, -150.125), (-0.5, 0.25), (-4.0, -3.0), (1.0, 1.0078125), (58.0, 61.0), (-1.0, 6.0), (-9.0, 9.0)]
    lower, upper = (jnp.asarray(end, x64) for end in zip(*ends, strict=True))
    u, w = np.polynomial.legendre.leggauss(200)
    a, b = (np.asarray(end, float)[:, None] for end in (lower, upper))
    t, peak = 0.5 * (a + b) + 0.5 * (b - a) * u, np.clip(0.0, a, b)
    w = w * np.exp(-0.5 * (t - peak) * (t + peak))
    w /= w.sum(1, keepdims=True)
    mean = (w * t).sum(1)

    def slope(f):
        def value(f):
            return numerics.log_normal_mass(lower - f, upper - f, upper - lower)

        return jax.jvp(value, (f,), (jnp.ones_like(f),))[1]

    got = jax.jit(lambda f: jax.jvp(slope, (f,), (jnp.ones_like(f),)))(jnp.zeros_like(lower))
    tolerance = 3e-6 if x64 == jnp.float32 else 1e-12
    np.testing.assert_allclose(got[0], mean, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got[1], (w * (t - mean[:, None]) ** 2).sum(1) - 1.0, rtol=tolerance, atol=tolerance)


def test_expectations_of_intervals_beside_any_deviation(x64):
    """By few nodes up to five deviations of the noise, by all and a second look beyond; with slopes in the variance."""
    sd = np.array([0.1, 2.4, 2.6, 10.0])
    likelihood = likelihoods.CensoredGaussian(scale=0.5, until=np.inf)

    @jax.jit
    def expected(variance):
        def value(variance):
            return likelihood.expected_log_prob(x64(0.5), x64(1.0), variance)

        return jax.jvp(value, (variance,), (jnp.ones_like(variance),))

    z = np.linspace(-12, 12, 24_001)[:, None]
    terms = stats.norm.pdf(z) * special.log_ndtr((1.0 + sd * z - 0.5) / 0.5) * 1e-3
    truth, slopes = np.sum(terms, axis=0), np.sum((z**2 - 1.0) * terms, axis=0) / (2.0 * sd**2)
    tolerance = 1e-5 if x64 == jnp.float32 else 1e-10
    for chosen in ([0, 1, 0, 1], [0, 1, 2, 3]):
        value, slope = expected(x64(sd[chosen] ** 2))
        np.testing.assert_allclose(value, truth[chosen], rtol=tolerance)
        # A derivative in the variance is a difference quotient over the deviation.
        np.testing.assert_allclose(slope, slopes[chosen], rtol=10 * tolerance)
    assert np.all(np.isfinite(expected(x64([-1e-9, 0.0, 1e-12, 1e-4]))))


def test_averaged_laplace_at_the_seam_of_its_formulas(x64):
    at = jnp.asarray([1.0, 1.0 - 1e-3, 1.0 + 1e-3], x64)  # r + z = 0 at the first
    average = jax.jit(jax.grad(lambda mean: jnp.sum(likelihoods.Laplace(scale=1.0).log_marginal(0.0, mean, 1.0))))
    seam, before, after = average(at)
    np.testing.assert_allclose(seam, (before + after) / 2, rtol=1e-6)


def test_moments_that_do_not_exist():
    mean, variance = likelihoods.StudentT(df=jnp.array([0.9, 1.5, 2.5]), scale=1.0).moments(0.0, 1.0)
    assert np.isnan(mean[0]) and np.all(mean[1:] == 0)
    assert np.isnan(variance[0]) and np.isinf(variance[1]) and variance[2] == pytest.approx(6.0)


def test_float32_tails():
    def value_and_slope(likelihood, f, y):
        f, y = (jnp.asarray(np.resize(a, ROWS), jnp.float32) for a in (f, y))
        return jax.jvp(lambda f: likelihood.log_prob(f, y), (f,), (jnp.ones(ROWS),))

    with jax.disable_jit():
        for link, steepest in (("logit", 1.0), ("probit", 1e4)):
            value, slope = value_and_slope(likelihoods.Bernoulli(link), [-1e4, 1e4], 1)
            np.testing.assert_allclose(slope[:2], [steepest, 0], rtol=1e-5)
            assert np.isfinite(value[0]) and value[1] == 0
            ends = likelihoods.Ordinal(CUTS, link), np.repeat([-50.0, 50.0], 4), np.arange(4)
            assert np.all(np.isfinite(value_and_slope(*ends)))
        value, slope = value_and_slope(likelihoods.Poisson("softplus"), -500.0, 1)
        np.testing.assert_allclose([value[0], slope[0]], [-500, 1])
        x = np.linspace(-12, 9, ROWS)
        truth = np.exp(stats.norm.logpdf(x) - stats.norm.logcdf(x))
        _, slope = value_and_slope(likelihoods.Bernoulli("probit"), x, 1)
        np.testing.assert_allclose(slope, truth, rtol=1e-5)
        _, bend = jax.jvp(hazard, (jnp.asarray(x, jnp.float32),), (jnp.ones(ROWS),))
        np.testing.assert_allclose(bend, -truth * (x + truth), rtol=1e-3, atol=1e-6)


def test_normal_tails_to_rounding(x64):
    x = np.concatenate([-np.geomspace(1e-6, 1e4, 500), [0.0], np.geomspace(1e-6, 6, 300)]).astype(x64)
    exact = x.astype(np.longdouble)
    scaled = special.erfcx(np.abs(x.astype(float)) / np.sqrt(2)).astype(np.longdouble)
    tail, density = np.exp(-(exact**2) / 2) * scaled / 2, np.exp(-(exact**2) / 2) / np.sqrt(2 * np.longdouble(np.pi))
    log_cdf = np.where(x < 0, np.log(scaled / 2) - exact**2 / 2, np.log1p(-tail))
    slope = np.where(x < 0, np.sqrt(2 / np.longdouble(np.pi)) / scaled, density / (1 - tail))
    tolerance = 2.5e-6 if x64 == jnp.float32 else 1e-13
    np.testing.assert_allclose(log_normal_cdf(x), log_cdf.astype(float), rtol=tolerance)
    np.testing.assert_allclose(hazard(x), slope.astype(float), rtol=tolerance)


def test_ordinal_links():
    f, y = np.linspace(-30, 30, ROWS), np.arange(4)[:, None]
    log_density, _ = ordinal(special.expit, special.log_expit)
    with jax.enable_x64(True):
        got = jax.jit(likelihoods.Ordinal(CUTS).log_prob)(f, y)
        two = jax.jit(likelihoods.Ordinal([0.3]).log_prob)(f, y[:2])
    np.testing.assert_allclose(got, [log_density(f, k) for k in range(4)], rtol=1e-10)
    np.testing.assert_allclose(two, [special.log_expit(0.3 - f), special.log_expit(f - 0.3)])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: likelihoods.Gaussian(variance=-1.0), "Gaussian variance is -1.0; it must be positive and finite."),
        (
            lambda: likelihoods.Gaussian(variance=jnp.array([1.0, 0.0])),
            "Gaussian variance is [1. 0.]; it must be positive",
        ),
        (lambda: likelihoods.Gaussian(variance=np.nan), "Gaussian variance is nan; it must be positive"),
        (lambda: likelihoods.StudentT(df=0, scale=1.0), "StudentT df is 0; it must be positive"),
        (
            lambda: likelihoods.StudentT(df=3.0, scale=np.array([1.0, -1.0])),
            "StudentT scale is [ 1. -1.]; it must be positive",
        ),
        (lambda: likelihoods.StudentT(df=3.0, scale=1.0, num_nodes=0), "StudentT num_nodes is 0; it must be positive"),
        (lambda: likelihoods.Laplace(scale=-1), "Laplace scale is -1; it must be positive"),
        (lambda: likelihoods.Gamma(concentration=0.0), "Gamma concentration is 0.0; it must be positive"),
        (lambda: likelihoods.Exponential(num_nodes=0), "Exponential num_nodes is 0; it must be positive"),
        (
            lambda: likelihoods.NegativeBinomial(concentration=-2.0),
            "NegativeBinomial concentration is -2.0; it must be positive",
        ),
        (lambda: likelihoods.Poisson(exposure=0.0), "Poisson exposure is 0.0; it must be positive"),
        (lambda: likelihoods.Poisson("log"), "Poisson link is 'log'; it must be 'exp' or 'softplus'."),
        (lambda: likelihoods.Bernoulli("cloglog"), "Bernoulli link is 'cloglog'; it must be 'logit' or 'probit'."),
        (lambda: likelihoods.Bernoulli(num_nodes=0), "Bernoulli num_nodes is 0; it must be positive"),
        (lambda: likelihoods.Ordinal([0.0], "log"), "Ordinal link is 'log'; it must be 'logit' or 'probit'."),
        (lambda: likelihoods.Ordinal([0.0], num_nodes=-1), "Ordinal num_nodes is -1; it must be positive"),
        (lambda: likelihoods.Ordinal([1.0, 0.0]), "Ordinal cutpoints is [1. 0.]; it must increase."),
        (lambda: likelihoods.Ordinal(1.0), "Ordinal cutpoints has shape (); it must be a vector of K"),
        (lambda: likelihoods.Ordinal([]), "Ordinal cutpoints has shape (0,); it must be a vector"),
        (lambda: likelihoods.Ordinal(np.array([[0.0, 1.0], [1.0, 0.0]])), "Ordinal cutpoints is [[0. 1.]"),
        (
            lambda: likelihoods.AsymmetricLaplace(scale=1.0, quantile=1.0),
            "AsymmetricLaplace quantile is 1.0; it must be between 0 and 1.",
        ),
        (lambda: likelihoods.Tweedie(dispersion=1.0, power=2.0), "Tweedie power is 2.0; it must be between 1 and 2"),
        (
            lambda: likelihoods.TruncatedGaussian(scale=1.0, lower=1.0, upper=0.0),
            "TruncatedGaussian upper is 0.0; it must be above lower, 1.0.",
        ),
        (lambda: likelihoods.Factorized(3), "Factorized fn is 3; it must be a function of f."),  # type: ignore[arg-type]
        (lambda: likelihoods.Factorized(weibull, num_nodes=0), "Factorized num_nodes is 0; it must be positive"),
    ],
)
def test_impossible_parameters(make, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: likelihoods.Gaussian(0.1),
        lambda: likelihoods.Laplace(0.1),
        lambda: likelihoods.StudentT(4.0, 0.1),
        lambda: likelihoods.Gamma(2.0),
        lambda: likelihoods.Exponential(2),
        lambda: likelihoods.NegativeBinomial(2.0),
        lambda: likelihoods.Weibull(2.0),
        lambda: likelihoods.Poisson("exp", 2.0),
        lambda: likelihoods.Bernoulli("probit", 20),
        lambda: likelihoods.Ordinal([0.0], "probit", 20),
        lambda: likelihoods.Softmax(3, 20),
        lambda: likelihoods.HeteroscedasticGaussian(20),
        lambda: likelihoods.Factorized(weibull, True),
        lambda: likelihoods.Columns([likelihoods.Bernoulli()], [(0,)], 20),
    ],
)
def test_no_bare_number_has_a_meaning_to_be_guessed(make):
    with pytest.raises(TypeError, match=r"^(\w+) got \d arguments without a name, .* must be named, as in \1"):
        make()


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda x: likelihoods.Gaussian(variance=x), "Gaussian variance"),
        (lambda x: likelihoods.Gaussian(scale=x), "Gaussian scale"),
        (lambda x: likelihoods.StudentT(df=3.0, scale=x), "StudentT scale"),
        (lambda x: likelihoods.Gamma(concentration=x), "Gamma concentration"),
        (lambda x: likelihoods.Poisson(exposure=x), "Poisson exposure"),
    ],
)
def test_lists_of_parameters_are_arrays_and_no_number_is_refused(make, name):
    field = "variance" if "Gaussian" in name else name.split()[1]
    as_list, as_array = (getattr(make(x), field) for x in ([0.5, 2], np.array([0.5, 2.0])))
    assert isinstance(as_list, jax.Array)
    np.testing.assert_array_equal(as_list, as_array)
    for wrong in ("0.5", 1j, True, np.array([1 + 1j]), np.array(["a"]), dist.LogNormal(), {}):
        with pytest.raises(TypeError, match=f"^{name} is .*; it must be a positive number, or an array or a list of"):
            make(wrong)
    with pytest.raises(TypeError, match=f"^{name} is .*, of which no array can be made"):
        make([[1.0], [1.0, 2.0]])


def test_nodes_are_whole_numbers():
    for wrong in (2.5, "20", True):
        with pytest.raises(TypeError, match="^Bernoulli num_nodes is .*; it must be a whole number"):
            likelihoods.Bernoulli(num_nodes=wrong)


def test_traced_parameters_are_not_checked():
    assert jax.jit(lambda v: likelihoods.Gaussian(variance=v).variance)(-1.0) == -1
    assert jax.jit(lambda c: likelihoods.Ordinal(c).cutpoints)(jnp.array([1.0, 0.0])).shape == (2,)


@pytest.mark.parametrize(
    "likelihood, good, bad, message",
    [
        (
            likelihoods.Gaussian(variance=1.0),
            [-1.0, np.nan],
            [np.inf],
            "y has the value inf; for Gaussian it must be finite.",
        ),
        (likelihoods.Bernoulli(), [0, 1, np.nan], [1, -1], "y has the value -1; for Bernoulli it must be 0 or 1."),
        (
            likelihoods.Poisson(),
            [0, 7, np.nan],
            [0.5],
            "y has the value 0.5; for Poisson it must be a count (0, 1, 2, …).",
        ),
        (
            likelihoods.NegativeBinomial(concentration=1.0),
            [0, 7],
            [-1],
            "y has the value -1; for NegativeBinomial it must be a count",
        ),
        (
            likelihoods.Gamma(concentration=1.0),
            [0.1, np.nan],
            [0.0],
            "y has the value 0; for Gamma it must be positive.",
        ),
        (
            likelihoods.Binomial(trials=5),
            [0, 5, np.nan],
            [6],
            "y has the value 6; for Binomial it must be a count from 0 to the number of trials.",
        ),
        (likelihoods.Beta(concentration=5.0), [0.5], [1.0], "y has the value 1; for Beta it must be between 0 and 1"),
        (
            likelihoods.TruncatedGaussian(scale=1.0, lower=0.0),
            [0.5],
            [-1.0],
            "y has the value -1; for TruncatedGaussian it must be between the bounds.",
        ),
        (likelihoods.Weibull(concentration=1.0), [0.1], [0.0], "y has the value 0; for Weibull it must be positive."),
        (likelihoods.Exponential(), [0.0], [-0.1], "y has the value -0.1; for Exponential it must be non-negative."),
        (
            likelihoods.Ordinal([0.0, 1.0]),
            [0, 2, np.nan],
            [3],
            "y has the value 3; for Ordinal it must be a category from 0 to 2.",
        ),
        (
            likelihoods.Factorized(weibull),
            [0.1, np.nan],
            [-2.0],
            "y has the value -2; for Factorized it must be in the support",
        ),
        (  # whose support in NumPyro has its ends
            likelihoods.Factorized(lambda f: dist.BetaProportion(jax.nn.sigmoid(f), 5.0)),
            [0.1, np.nan],
            [0.0],
            "y has the value 0; for Factorized it must be between 0 and 1, and neither of them, as of BetaProportion.",
        ),
    ],
)
def test_impossible_observations(likelihood, good, bad, message):
    for convert in (list, np.asarray, jnp.asarray):
        likelihood.check(convert(good))
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            likelihood.check(convert(bad))
    jax.jit(likelihood.check)(jnp.asarray(bad))


def test_observations_that_are_no_real_numbers():
    likelihood = likelihoods.Gaussian(variance=1.0)
    with pytest.raises(TypeError, match="^y has dtype complex128; it must be an array of real numbers"):
        likelihood.check(np.array([1j]))
    with pytest.raises(ValueError, match="^y is a NumPy masked array with 1 of 2 entries masked"):
        likelihood.check(np.ma.masked_equal([1.0, -999.0], -999.0))


#: Functions of f and of a parameter, of every kind of support, the cheapest of each.
FUNCTIONS = {
    "gamma": lambda f, c: dist.Gamma(c, c * jnp.exp(-f)),
    "uniform": lambda f, c: dist.Uniform(2.0 * c, 3.0 * c).expand(f.shape),
    "angles": lambda f, c: dist.VonMises(f, c),
    "heavy tails": lambda f, c: dist.StudentT(c, f, 0.1),
    "from e^f on": lambda f, c: dist.Pareto(c, jnp.exp(f)),
    "between 0 and 1": lambda f, c: dist.Kumaraswamy(jnp.exp(f), c),
    "from c on": lambda f, c: dist.Levy(c, jnp.exp(f)),
    "inflated counts": lambda f, c: dist.ZeroInflatedPoisson(c / (1 + c), jnp.exp(f)),
    "shares": lambda f, c: dist.Binomial(7, logits=c * f),
    "one trial": lambda f, c: dist.Bernoulli(logits=c * f),
    "classes": lambda f, c: dist.Categorical(logits=jnp.stack([f, c * f, 0 * f], -1)),
}


def of_parameters(name):
    """Parameters, three values of each, and the likelihood as a function of one of each."""
    factors = jnp.array([0.1, 1.0, 100.0])
    if name in FUNCTIONS:
        return [factors], lambda given: likelihoods.Factorized(lambda f: FUNCTIONS[name](f, *given))
    leaves, tree = jax.tree.flatten(CASES[name].make())
    fixed = name == "Tweedie"  # its power is between 1 and 2
    given = [jnp.multiply.outer(factors, jnp.asarray(x, float)) for x in leaves[: -1 if fixed else None]]
    return given, lambda given: jax.tree.unflatten(tree, [*given, *leaves[len(given) :]])


#: Integrated by a rule that another case has too: of these, what is integrated.
INTEGRATED_ALIKE = ["Beta", "BetaBinomial", "NegativeBinomial", "Ordinal", "TruncatedGaussian", *list(FUNCTIONS)[1:]]
INTEGRATED_ALIKE += ["Cauchy", "Factorized", "Factorized, none", "Censored, right"]


@pytest.mark.parametrize("name", [name for name in (*CASES, *FUNCTIONS) if name not in INTEGRATED_ALIKE])
def test_masked_rows_contribute_nothing_whatever_the_parameter(name):
    """Exactly 0 to the value, to gradients in parameters, and in moments that are NaN there."""
    given, of = of_parameters(name)
    nothing, absent = jnp.full(2, jnp.nan), jnp.zeros(2, bool)
    # Both take mean and variance from the same place, and `Prior` is what the other conditionals begin with.
    conditionals = (None, npgp.conditionals.Prior()) if name == "Poisson exp" else (None,)

    def total(given, mean, variance):
        likelihood, residual = of(given), jnp.full(2, 9.0)
        moments = Moments(mean, variance, residual)
        return [
            jnp.sum(LatentObservation(likelihood, moments, conditional, mask=absent).log_prob(nothing))
            for conditional in conditionals
        ]

    def pulled(given):
        value, pull = jax.vjp(total, given, nothing, nothing)
        return value, pull([jnp.ones(())] * len(value))

    evaluate = jax.jit(jax.vmap(pulled) if given else pulled)
    for result in jax.tree.leaves(evaluate(given)):
        np.testing.assert_array_equal(result, 0.0)


@pytest.mark.parametrize("name", INTEGRATED_ALIKE)
def test_what_takes_the_place_of_missing_rows_has_slopes(name):
    """At f = 0, in whatever parameter: so that these, times 0, are 0."""
    given, of = of_parameters(name)

    def log_prob(given, f):
        likelihood = of(given)
        return likelihood.log_prob(f, likelihood.stand_in(jnp.nan))

    for result in jax.tree.leaves(jax.jit(jax.vmap(jax.value_and_grad(log_prob, (0, 1))))(given, jnp.zeros(3))):
        assert np.all(np.isfinite(result))


def test_as_likelihood():
    bernoulli = likelihoods.Bernoulli()
    assert likelihoods.as_likelihood(bernoulli) is bernoulli
    made = likelihoods.as_likelihood(bernoulli_logits)
    assert isinstance(made, likelihoods.Factorized) and made.fn is bernoulli_logits
    for wrong in (3.0, None, likelihoods.Bernoulli, dist.Normal(0, 1), "gaussian"):
        with pytest.raises(TypeError, match="^likelihood is .*; it must be a Likelihood, such as"):
            likelihoods.as_likelihood(wrong)  # type: ignore[arg-type]


def test_factorized_says_what_its_function_does_wrong():
    with pytest.raises(TypeError, match="^Factorized fn returned .*; it must return a NumPyro distribution"):
        likelihoods.Factorized(lambda f: f).log_prob(0.0, 1.0)
    with pytest.raises(ValueError, match=r"^Factorized fn returned events of shape \(2,\); they must be scalar"):
        vector = likelihoods.Factorized(lambda f: dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        vector.log_prob(0.0, jnp.zeros(2))


def mixture(f):
    return dist.MixtureSameFamily(
        dist.Categorical(probs=jnp.asarray(PAIR_WEIGHTS)), dist.Normal(f[..., None] + PAIR, 0.05)
    )


PAIR, PAIR_WEIGHTS = np.array([-1.0, 1.0], np.float32), (0.25, 0.75)
PAIR_OF_NORMALS = list(zip(PAIR_WEIGHTS, PAIR, strict=True))


def test_claims_of_concavity_that_are_wrong_are_refused():
    """Also where a parameter is traced; log p of a normal is concave in its mean, and in the logarithm of its scale."""

    def heavy(scale):
        claimed = likelihoods.Factorized(lambda f: dist.StudentT(4.0, f, scale), log_concave=True)
        claimed.check(np.array([0.5, np.nan]))
        return scale

    message = "log_concave is True, but log p of the function's StudentT curves upward in f near -3, for y = 0.5"
    for run in (heavy, lambda scale: one_program(partial(heavy, scale))):
        with pytest.raises(ValueError, match=message):
            run(jnp.float32(1.0))
    normal = likelihoods.Factorized(lambda f, g: dist.Normal(g, jnp.exp(f)), log_concave=(0,), num_latents=2)
    for claimed in (normal, dataclasses.replace(normal, log_concave=(1,))):
        claimed.check(np.array([0.5, -3.0]))


@pytest.mark.parametrize(
    "fn, log_density",
    [
        (lambda f: dist.Normal(f, 0.02), lambda f, y: stats.norm.logpdf(y, f, 0.02)),
        (lambda f: dist.StudentT(4.0, f, 0.03), lambda f, y: stats.t.logpdf(y, 4.0, f, 0.03)),
        (lambda f: dist.AsymmetricLaplace(f, 0.3, 1.0), lambda f, y: stats.laplace.logpdf(y, f, 0.3)),
        (
            mixture,
            lambda f, y: np.logaddexp(*(np.log(w) + stats.norm.logpdf(y, f + a, 0.05) for w, a in PAIR_OF_NORMALS)),
        ),
        (
            lambda f: dist.Uniform(0.0, jnp.exp(f)),
            lambda f, y: np.where(np.abs(y) <= np.exp(f), -f, -np.inf),
        ),
        (
            lambda f: dist.Kumaraswamy(jnp.exp(f), 2.0),
            lambda f, y: np.log(2) + f + np.expm1(f) * np.log(y) + np.log(-np.expm1(np.exp(f) * np.log(y))),
        ),
    ],
    ids=["narrow", "heavy", "kink", "two peaks", "jump", "exponential"],
)
def test_integrals_of_functions_look_at_the_integrand(fn, log_density, float64):
    mean, variance = (a.ravel() for a in np.meshgrid([-1.0, 0.2, 0.5], [0.01, 1.0, 25.0]))
    y = np.full(mean.shape, 0.5)
    likelihood, possible = likelihoods.Factorized(fn), bool(np.isfinite(log_density(-60.0, 0.5)))

    @jax.jit
    def values_and_gradients(mean, variance):
        integrals = [likelihood.log_marginal, *[likelihood.expected_log_prob] * possible]
        both = [jax.vjp(lambda m, v, of=of: of(y, m, v), mean, variance) for of in integrals]
        return jnp.stack([array for value, pull in both for array in (value, *pull(jnp.ones_like(value)))])

    got = values_and_gradients(mean, variance)
    breaks = np.array([-60.0, -0.5, np.log(0.5), 0.5, 1.5, 60.0])  # peaks, kinks and jumps of all of these
    distances = np.concatenate([np.geomspace(1e-4, 60.0, 400)])
    edges = np.unique(np.concatenate([breaks, *(b + s * distances for b in breaks[1:-1] for s in (-1, 1))]))
    nodes, weights = np.polynomial.legendre.leggauss(10)
    half = 0.5 * np.diff(edges)[:, None]
    f, area = (0.5 * (edges[1:] + edges[:-1])[:, None] + half * nodes).ravel(), (half * weights).ravel()
    truth = []
    for m, v in zip(mean, variance, strict=True):
        normal = stats.norm.pdf(f, m, np.sqrt(v)) * area
        value = special.logsumexp(log_density(f, 0.5), b=normal)
        posterior = np.exp(log_density(f, 0.5) - value) * normal
        by_mean, by_variance = (f - m) / v, ((f - m) ** 2 / v - 1) / (2 * v)
        truth.append([value, posterior @ by_mean, posterior @ by_variance])
        if possible:  # elsewhere the expectation is −∞
            change = (log_density(f, 0.5) - log_density(m, 0.5)) * normal
            truth[-1] += [log_density(m, 0.5) + change.sum(), change @ by_mean, change @ by_variance]
    np.testing.assert_allclose(got[:3], np.transpose(truth)[:3], rtol=1e-6, atol=1e-7)
    error = np.abs(got[3:] - np.transpose(truth)[3:]) / np.maximum(1.0, np.abs(np.transpose(truth)[3:]))
    np.testing.assert_array_less(error, 2e-8)


@pytest.mark.parametrize(
    "fn, own",
    [
        (lambda f: dist.AsymmetricLaplace(f, 0.125, 1.0), likelihoods.Laplace(scale=0.125)),
        (lambda f: dist.StudentT(4.0, f, 0.0125), likelihoods.StudentT(df=4.0, scale=0.0125)),
    ],
)
def test_expectations_of_functions_in_float32(fn, own):
    """Beside what npgp has its own rules for, wherever y is; at the mean of f too, about which log p is symmetric."""
    z, variance = (np.float32(a.ravel()) for a in np.meshgrid(np.linspace(-3.0, 3.0, 25), [0.01, 1.0, 25.0]))
    mean = 0.5 - np.sqrt(variance) * z

    def value_and_gradients(likelihood, mean, variance):
        value, pull = jax.vjp(lambda m, v: likelihood.expected_log_prob(0.5, m, v), mean, variance)
        return jnp.stack([value, *pull(jnp.ones_like(value))])

    got = jax.jit(value_and_gradients)(likelihoods.Factorized(fn), mean, variance)
    with jax.enable_x64(True):
        truth = jax.jit(value_and_gradients)(own, mean.astype(float), variance.astype(float))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, truth, rtol=1e-4, atol=3e-5)


#: Two close bends, a jump, two bends that log p turns beside, and three narrow peaks: locations of three normals, and
#: their standard deviation.
BENT = (
    (lambda f, np=np: np.clip(f, -0.1, 0.1) + 0 * np.asarray(POINTS), 0.1),
    (lambda f, np=np: np.where(f > 0.3, 1.0, 0.0) + 0 * np.asarray(POINTS), 1.0),
    (lambda f, np=np: np.maximum(f, 0.0) + np.maximum(f - 0.05, 0.0) + 0 * np.asarray(POINTS), 0.2),
    (lambda f, np=np: f + np.asarray(POINTS), 0.02),
)


@pytest.mark.parametrize("x64", [False], ids=["float32"], indirect=True)  # in float64 one by one, above
def test_expectations_of_log_p_with_several_bends_jumps_or_peaks(x64):
    """Values, and slopes in mean and standard deviation, wherever the mean is."""
    mean, row = (a.ravel() for a in np.meshgrid(np.linspace(-1.9, 2.0, 14), range(len(BENT))))
    scale = np.array([scale for _, scale in BENT])[row, None]

    def fn(f):
        points = jnp.select([row[:, None] == i for i in range(len(BENT))], [of(f[..., None], jnp) for of, _ in BENT])
        normals = dist.Normal(points.astype(f.dtype), x64(scale))
        return dist.MixtureSameFamily(dist.Categorical(probs=jnp.full(3, 1 / 3, f.dtype)), normals)

    @jax.jit
    def values_and_slopes(mean, sd):
        value, pull = jax.vjp(
            lambda m, s: likelihoods.Factorized(fn).expected_log_prob(jnp.full_like(m, 0.3), m, s**2), mean, sd
        )
        return jnp.stack([value, *pull(jnp.ones_like(value))])

    got = values_and_slopes(x64(mean), x64(np.ones_like(mean)))
    edges = np.unique(np.r_[np.linspace(-12.0, 12.0, 6001), 0.3, 0.3 - np.array(POINTS)])
    nodes, weights = np.polynomial.legendre.leggauss(5)
    half = 0.5 * np.diff(edges)[:, None]
    f, area = (edges[:-1, None] + half * (1.0 + nodes)).ravel(), (half * weights).ravel()
    log_ps = [special.logsumexp(stats.norm.logpdf(0.3, of(f[:, None]), sd), axis=1) - np.log(3) for of, sd in BENT]
    z = f - mean[:, None]
    terms = stats.norm.pdf(z) * area * np.array(log_ps)[row]
    truth = np.stack([(terms * of).sum(1) for of in (1.0, z, z**2 - 1.0)])
    error = np.abs(got - truth) / np.maximum(1.0, np.abs(truth))
    # In 32 bits a change of 4e-6 nats with fewer nodes is not looked at, nor the change of slopes that goes with it.
    assert np.max(error) < 2e-4


@pytest.mark.parametrize(
    "fn, ys",
    [
        (lambda f: dist.Beta(5 * jax.nn.sigmoid(f), 5 * jax.nn.sigmoid(-f)), (0.03, 0.9)),
        (lambda f: dist.BetaProportion(jax.nn.sigmoid(f), 5.0), (0.03, 0.9)),
        (lambda f: dist.BetaBinomial(5 * jax.nn.sigmoid(f), 5 * jax.nn.sigmoid(-f), 40), (0, 3, 40)),
        (lambda f: dist.Binomial(40, logits=f), (0, 3, 40)),
        (lambda f: dist.NegativeBinomial2(jnp.exp(f), 1.75), (0, 3)),
        (lambda f: dist.NegativeBinomialLogits(1.75, f), (0, 3)),
        (lambda f: dist.Poisson(jnp.exp(f)), (0, 3)),
        (lambda f: dist.VonMises(f, 4.0), (-3.0, 0.5)),
        (lambda f: dist.OrderedLogistic(f, jnp.asarray([-1.0, 0.5], f.dtype)), (0, 1, 2)),
        (lambda f: dist.OrderedLogistic(f, jnp.asarray([[-1.0, 0.5], [0.0, 2.0], [-2.0, 3.0]], f.dtype)), (2, 1, 0)),
    ],
)
def test_densities_that_npgp_has_are_taken_for_numpyros(fn, ys, float64):
    """Values and slopes are those of NumPyro's formulas, where these are right: not at exactly 0."""
    f, y = np.linspace(-3.0, 3.1, 7)[:, None] + np.zeros(len(ys)), np.asarray(ys)
    likelihood = likelihoods.Factorized(fn)

    @jax.jit
    def values_and_slopes(f):
        with numpyro.validation_enabled(False):
            both = [jax.vjp(of, f) for of in (lambda f: likelihood.log_prob(f, y), lambda f: fn(f).log_prob(y))]
        return [(value, pull(jnp.ones_like(f))[0]) for value, pull in both]

    ours, numpyros = values_and_slopes(f)
    np.testing.assert_allclose(ours, numpyros, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    "fn, own, moved, y, x64",  # by turns in either precision; programs alone in one
    [
        (
            lambda f, c: dist.Laplace(2.0 - c * f, 0.3 * c),
            lambda c: likelihoods.Laplace(scale=0.3 * c),
            (2.0, -1.0),
            POINTS,
            False,
        ),
        (
            lambda f, c: dist.AsymmetricLaplaceQuantile(c * f, c * np.array([0.3, 0.4, 0.5]), 0.75),
            lambda c: likelihoods.AsymmetricLaplace(scale=c * np.array([0.3, 0.4, 0.5]), quantile=0.75),
            (0.0, 1.0),
            POINTS,
            True,
        ),
        (
            lambda f, c: dist.Poisson(3.0 * jnp.exp(0.5 * c * f - 1.0)),
            lambda c: npgp.Poisson(),
            (np.log(3.0) - 1.0, 0.5),
            [0, 2, 9],
            False,
        ),
        (
            lambda f, c: dist.BetaProportion(jax.nn.sigmoid(c * f), 5.0 * c),
            lambda c: likelihoods.Beta(concentration=5.0 * c),
            (0.0, 1.0),
            POINTS,
            True,
        ),
        (lambda f, c: dist.Poisson(c * jnp.exp(jnp.clip(f, -20.0, 20.0))), None, (), [0, 2, 9], False),
        (lambda f, c: dist.Laplace(f, c * jnp.exp(f)), None, (), POINTS, False),
        (lambda f, c: dist.Laplace(jnp.abs(f), 0.3 * c), None, (), POINTS, False),
        # Flat where none of the places is that are compared.
        (lambda f, c: dist.Laplace(jnp.where(jnp.abs(f - 0.5) < 0.3, 0.5, f), 0.3 * c), None, (), POINTS, False),
        # Linear at some parameters alone.
        (lambda f, c: dist.Laplace(f + (c - 1.0) * f**2, 0.3), None, (), POINTS, False),
        (lambda f, c: dist.Laplace(f + jnp.maximum(c - 1.1, 0.0) * f**2, 0.3), None, (), POINTS, False),
        (lambda f, c: dist.Laplace(f + c.astype(int) * f**2, 0.3), None, (), POINTS, False),
        (lambda f, c: dist.Normal(f, 0.3 * c), None, (), POINTS, False),
    ],
    indirect=["x64"],
)
def test_functions_that_make_a_likelihood_of_npgp_have_its_integrals(fn, own, moved, y, x64):
    """Where the latent value is linear in f and nothing else depends on it; without the branch of other functions."""
    y, mean, variance = x64(y), x64([-1.0, 0.0, 2.0]), x64(1.5)

    def expected(c):  # traced, as a parameter that is learned
        return likelihoods.Factorized(lambda f: fn(f, c)).expected_log_prob(y, mean, variance)

    def right(c):
        return own(c).expected_log_prob(y, moved[0] + moved[1] * c * mean, (moved[1] * c) ** 2 * variance)

    if own is not None:
        both = jax.jit(lambda c: [jax.jvp(function, (c,), (x64(1.0),)) for function in (expected, right)])(x64(1.25))
        np.testing.assert_allclose(*both, rtol=4e-6 if x64 is jnp.float32 else 1e-12)
    branches = str(jax.make_jaxpr(expected)(x64(1.0))).count("cond[")
    assert (branches == 0) == (own is not None)


def test_a_branch_not_taken_keeps_little_for_gradients():
    """It writes zeros for what the other would need: nodes and weights, and not all that log p is computed from."""
    mean = jnp.zeros(7)

    def expected(mean, total):
        made = likelihoods.Factorized(lambda f: dist.Kumaraswamy(jnp.exp(f), total))
        return jnp.sum(made.expected_log_prob(0.3, mean, 1.0))

    program = jax.make_jaxpr(jax.grad(expected, (0, 1)))(mean, 5.0)
    sizes = [
        sum(np.prod(out.aval.shape) for out in equation.outvars)
        for equation in program.eqns
        if equation.primitive.name == "cond"
    ]
    assert sizes and max(sizes) < 6 * 288 * 7  # nodes at bends of 7 rows


def test_rows_that_are_mapped_are_looked_at_again_in_a_branch(float64):
    """Not all of them, whatever they need; and values and slopes are those of rows by themselves."""
    y, mean = np.linspace(-1.0, 1.0, 6).reshape(2, 3), np.zeros((2, 3))
    laplace = likelihoods.Factorized(lambda f: dist.AsymmetricLaplace(f, 0.5, 1.0))
    normal = likelihoods.Factorized(lambda f: dist.Normal(f, 0.5))

    def slopes(likelihood, y, mean):
        def value(y, mean):
            return likelihood.expected_log_prob(y, mean, 1.0)

        return jax.vmap(jax.vmap(jax.value_and_grad(value, 1)))(y, mean)

    for likelihood, own in ((laplace, likelihoods.Laplace(scale=0.5)), (normal, npgp.Gaussian(scale=0.5))):
        program = jax.jit(partial(slopes, likelihood)).trace(y, mean)
        assert sum(equation.primitive.name == "cond" for equation in program.jaxpr.eqns) >= 2
        found, truth = program.lower().compile()(y, mean), jax.jit(slopes)(own, y, mean)
        np.testing.assert_allclose(found, truth, atol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_quadratics_need_no_second_look(dtype):
    """All rules integrate them, but for what is left of symmetry; a kink between nodes is noticed."""
    z, changes = _sorted_nodes(64, 1, dtype)[0][0], _changes(64, dtype)
    assert np.max(np.abs(changes @ np.stack([np.ones_like(z), z, z**2], axis=1))) < 1e-9
    assert np.max(np.abs(changes @ np.abs(z - 0.3))) > 1e-4


@pytest.mark.parametrize("width", [0.1, 1.0, 5.0, 10.0])
def test_few_nodes_do_for_what_is_smooth(width, x64):
    z = np.linspace(-12, 12, 4001)
    dense = stats.norm.pdf(z) * (z[1] - z[0])
    single, wide = x64 == jnp.float32, width == 10.0
    for function in (special.log_expit, special.log_ndtr, lambda f: special.gammaln(5 * special.expit(f)), np.square):
        f, weights = smooth_rule(x64([-3.0, 0.5, 4.0]), x64(width**2), 64)
        assert len(f) == (32 if single else 64)
        got = np.sum(np.asarray(weights, float) * function(np.asarray(f, float)), axis=0)
        truth = np.sum(dense * function(np.array([-3.0, 0.5, 4.0])[:, None] + width * z), axis=1)
        tolerance = (4e-5 if wide else 2e-6) if single else (1e-9 if wide else 1e-12)
        np.testing.assert_allclose(got, truth, rtol=tolerance, atol=tolerance)


def test_slopes_of_large_counts_far_below_them(x64):
    """∂E/∂mean = y − e^(m + v/2) and ∂E/∂v = −½ e^(m + v/2), which is lost where it is a difference from y."""
    y, mean, variance = x64(10_000.0), x64(0.5), x64([0.01, 1.0])
    slopes = jax.jit(jax.grad(lambda m, v: jnp.sum(npgp.Poisson().expected_log_prob(y, m, v)), (0, 1)))(mean, variance)
    rate = np.exp(0.5 + np.array([0.01, 1.0]) / 2)
    np.testing.assert_allclose(slopes[0], 2 * 10_000.0 - np.sum(rate), rtol=1e-6)
    np.testing.assert_allclose(slopes[1], -0.5 * rate, rtol=1e-6)


class Angles(dist.VonMises):
    """Which npgp does not know."""


def test_averages_over_many_peaks(x64):
    """A von Mises distribution beside a wide f, by its Fourier series; another class, for npgp's own has that too."""
    y, mean, variance = x64([-2.0, 0.5, 3.0]), x64([-3.0, 0.5, 4.0]), x64(25.0)
    by_function = likelihoods.Factorized(lambda f: Angles(f, 4.0))
    n = np.arange(1, 40)[:, None]
    waves = special.ive(n, 4.0) / special.ive(0, 4.0) * np.exp(-12.5 * n**2) * np.cos(n * np.subtract(y, mean))
    truth = np.log1p(2 * np.sum(waves, axis=0)) - np.log(2 * np.pi)
    got = jax.jit(by_function.log_marginal)(y, mean, variance)
    np.testing.assert_allclose(got, truth, atol=1e-4 if x64 == jnp.float32 else 1e-10)


def test_averages_over_two_latent_values_leave_nothing_out(float64):
    """y = f + e with a second latent value that does nothing: the average is N(y; m, v + 1)."""
    noise = likelihoods.Factorized(lambda f, g: dist.Normal(f, 1.0 + 0.0 * g), num_latents=2, log_concave=(0,))
    mean, variance = np.array([[0.1, -2.0], [0.2, 0.0]]), np.array([[1.0, 4.0], [1.0, 9.0]])
    got = jax.jit(noise.log_marginal)(np.array([0.5, 0.5]), mean, variance)
    np.testing.assert_allclose(got, stats.norm.logpdf(0.5, mean[0], np.sqrt(1.0 + variance[0])), atol=1e-9)


def test_slopes_that_numpyro_clips_are_not_used(float64):
    # Of a binomial in logits it has a wrong slope at exactly 0.
    n, y = 100_000, 7586.0
    f = np.linspace(-2.6, -2.4, 20_001)
    choose = special.gammaln(n + 1) - special.gammaln(y + 1) - special.gammaln(n - y + 1)
    right = special.logsumexp(choose + y * f - n * np.logaddexp(0, f) + stats.norm.logpdf(f)) + np.log(f[1] - f[0])
    for concave in (True, False):
        binomial = likelihoods.Factorized(lambda f: dist.Binomial(n, logits=f), log_concave=concave)
        assert jax.jit(binomial.log_marginal)(y, 0.0, 1.0) == pytest.approx(right, rel=1e-8)


def test_what_is_not_finite_far_out_counts_for_nothing():
    # In float32 the sigmoid is 1 there, and the density of a beta distribution no number.
    likelihood = likelihoods.Factorized(lambda f: dist.BetaProportion(jax.nn.sigmoid(f), 10.0))
    expected = jax.jit(jax.value_and_grad(lambda m, v: likelihood.expected_log_prob(0.3, m, v), (0, 1)))
    value, slopes = expected(jnp.float32(0.5), jnp.float32(9.0))
    z = np.linspace(-9, 9, 20_001)
    mu = special.expit(0.5 + 3 * z)
    terms = stats.beta.logpdf(0.3, 10 * mu, 10 * special.expit(-0.5 - 3 * z))
    assert float(value) == pytest.approx((terms * stats.norm.pdf(z)).sum() * (z[1] - z[0]), rel=1e-4)
    assert np.all(np.isfinite(slopes))


@pytest.mark.parametrize("fn, y", [(lambda f: dist.Gumbel(f, 0.5), 0.5), (lambda f: dist.HalfNormal(jnp.exp(f)), 2.0)])
def test_what_overflows_where_it_counts_is_no_number(fn, y, x64):
    """log p falls like e²ᶠ: the expectation is −e⁵⁰ or so, from ten standard deviations out, where float32 ends."""
    likelihood, mean = likelihoods.Factorized(fn), -3.0 if y == 0.5 else 1.0
    expected = jax.jit(likelihood.expected_log_prob)
    got = expected(x64(y), x64(mean), x64(25.0))
    if x64 == jnp.float32:
        assert got == -np.inf
    elif y == 0.5:  # E exp((f - y)/s) is that of a log-normal
        assert got == pytest.approx(-np.exp((mean - y) / 0.5 + 0.5 * 25.0 / 0.25), rel=1e-8)
    else:
        assert got == pytest.approx(-0.5 * y**2 * np.exp(-2 * mean + 2 * 25.0), rel=1e-8)
    narrower = expected(x64(y), x64(mean), x64(1.0))
    z = np.linspace(-15, 15, 20_001)
    density = {0.5: lambda f: stats.gumbel_r.logpdf(y, f, 0.5), 2.0: lambda f: stats.halfnorm.logpdf(y, 0, np.exp(f))}
    terms = density[y](mean + z) * stats.norm.pdf(z) * (z[1] - z[0])
    assert narrower == pytest.approx(terms.sum(), rel=1e-5)


def test_slopes_that_overflow_where_they_count_are_no_numbers():
    """Of E (y e⁻ᶠ)^1.5 in float32, up to 12 deviations out, log p is finite and its slope is not."""
    likelihood = likelihoods.Factorized(lambda f: dist.Weibull(jnp.exp(f), 1.5))
    value, slope = jax.jit(jax.value_and_grad(partial(likelihood.expected_log_prob, 0.125)))(4.0, 25.0)
    truth = np.log(1.5) + 0.5 * np.log(0.125) - 6.0 - np.exp(1.5 * (np.log(0.125) - 4.0) + 0.5 * 1.5**2 * 25.0)
    assert value == pytest.approx(truth, rel=1e-4) and not np.isfinite(slope)


def test_counts_whose_digits_numpyro_loses(x64):
    """Of a hundred thousand trials, in float32; npgp's own are deviances, in which nothing cancels."""
    n, y, f = 100_000, np.array([7586.0, 0.0]), np.array([-2.5, -2.5])
    truth = stats.binom.logpmf(y, n, special.expit(f))
    function = likelihoods.Factorized(lambda f: dist.Binomial(n, probs=jax.nn.sigmoid(f)))
    if x64 == jnp.float64:
        function.check(y)
        np.testing.assert_allclose(jax.jit(function.log_prob)(x64(f), y), truth, rtol=1e-9)
    else:
        with pytest.warns(UserWarning, match="BinomialProbs are rounded to 0.06 nats.*or take npgp.likelihoods.Binom"):
            function.check(y)
        assert np.max(np.abs(jax.jit(function.log_prob)(x64(f), y) - truth)) > 1e-3
    same = likelihoods.Factorized(lambda f: dist.Binomial(n, logits=f))
    same.check(y)
    for exact in (likelihoods.Binomial(trials=n), same):
        np.testing.assert_allclose(jax.jit(exact.log_prob)(x64(f), y), truth, rtol=1e-5)
    likelihoods.Factorized(lambda f: dist.Binomial(100, logits=f)).check(np.array([3.0, np.nan]))


def test_whole_numbers_stay_whole_numbers():
    ordered = likelihoods.Factorized(lambda f: dist.OrderedLogistic(f, jnp.array([-0.5, 0.5])))
    f = np.zeros(3)
    np.testing.assert_array_equal(ordered.log_prob(f, np.arange(3.0)), ordered.log_prob(f, np.arange(3)))


def test_softmax_and_its_slopes_by_product_quadrature(float64):
    """E log p and its slopes in means and variances, narrow, wide and both, beside 60³ Gauss-Hermite nodes."""
    z, w = np.polynomial.hermite_e.hermegauss(60)
    w /= w.sum()
    weights, mean = np.einsum("i,j,k->ijk", w, w, w), np.array([0.5, -1.0, 2.0])

    @jax.jit
    def ours(mean, variance):
        return jax.value_and_grad(lambda m, v: likelihoods.Softmax(3).expected_log_prob(0, m, v), (0, 1))(
            mean, variance
        )

    for variance in np.array([[1e-4] * 3, [1.0] * 3, [0.01, 9.0, 1.0]]):
        f = np.stack(np.meshgrid(*(mean[:, None] + np.sqrt(variance)[:, None] * z), indexing="ij"))
        log_total = special.logsumexp(f, axis=0)
        p = np.exp(f - log_total)
        value, slopes = ours(mean, variance)
        np.testing.assert_allclose(value, np.sum(weights * (f[0] - log_total)), atol=1e-6)
        np.testing.assert_allclose(slopes[0], np.eye(3)[0] - np.sum(weights * p, axis=(1, 2, 3)), atol=2e-6)
        np.testing.assert_allclose(slopes[1], -0.5 * np.sum(weights * p * (1 - p), axis=(1, 2, 3)), atol=2e-6)
    # MacKay's approximation of probabilities, at the widest: nearer than those at the mean, by which .11 are off.
    average, plain = np.sum(weights * p, axis=(1, 2, 3)), special.softmax(mean)
    found = likelihoods.Softmax(3).site_curvature(0, mean, variance)
    errors = [np.max(np.abs(curvature - average * (1 - average))) for curvature in (found, plain * (1 - plain))]
    assert errors[0] < 0.7 * errors[1], errors


def test_slopes_of_remainders_and_deviances(x64):
    """Of Stirling's formula by digamma, and of the divergence of Bernoulli variables by its formula."""
    eps = float(jnp.finfo(x64).eps)
    x = np.geomspace(1e-3, 50.0, 25).astype(x64)
    slope = jax.jit(jax.vmap(jax.grad(stirling)))(x)
    x = x.astype(float)
    np.testing.assert_allclose(slope, special.digamma(x) - np.log(x) + 0.5 / x, rtol=50 * eps, atol=50 * eps)
    logit, x = (
        a.ravel().astype(x64) for a in np.meshgrid([-20.0, -1.0, 0.5, 3.0], [-40.0, -3.0, -0.5, 1e-3, 2.0, 50.0])
    )
    slopes = jax.jit(jax.vmap(jax.grad(lambda a, x: bernoulli_deviance(*sigmoids(a), x), (0, 1))))(logit, x)
    w, x = special.expit(logit.astype(float)), x.astype(float)
    steep = np.expm1(x) / (1 + w * np.expm1(x))
    truth = w * (1 - w) * (steep - x), w * (1 - w) * steep
    np.testing.assert_allclose(slopes, truth, rtol=50 * eps, atol=eps)


def test_a_second_call_outside_programs_compiles_its_search_alone():
    """Branches would be compiled anew by each call, as the loop that looks for the bends of log p is."""
    likelihood, y = npgp.likelihoods.as_likelihood(lambda f: dist.Laplace(f, 0.5)), jnp.float32([0.3, 0.6])

    likelihood.expected_log_prob(y, jnp.zeros(2, jnp.float32), 4.0)
    with compilations() as count:
        likelihood.expected_log_prob(y, jnp.ones(2, jnp.float32), 4.0)
    assert count() <= 1
