"""Likelihoods of several latent values against dense sums, Monte Carlo and each other; and more kinds of data."""

import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import compiled
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from scipy import integrate, special, stats

import npgp
from npgp import likelihoods
from npgp.likelihoods import Factorized, HeteroscedasticGaussian, Softmax
from npgp.likelihoods.gumbel import gumbel


def normal(f, g):
    return dist.Normal(f, jnp.exp(g))


def swapped(g, f):
    return dist.Normal(f, jnp.exp(g))


def bernoulli(f, g):
    return dist.Bernoulli(logits=g - f)


def zero_inflated(gate, f):
    return dist.ZeroInflatedDistribution(dist.Poisson(jnp.exp(f)), gate_logits=gate)


def zero_inflated_at_rate(f):
    return dist.ZeroInflatedPoisson(0.3, jnp.exp(f))


def overdispersed(f, g):
    return dist.NegativeBinomial2(jnp.exp(f), jnp.exp(g))


@jax.jit
def integrals(likelihood, y, mean, variance):
    """Expected and averaged likelihood, each with its gradients in mean and variance."""

    def pull(method):
        value, vjp = jax.vjp(lambda m, v: getattr(likelihood, method)(y, m, v), mean, variance)
        return value, *vjp(jnp.ones_like(value))

    return *pull("expected_log_prob"), *pull("log_marginal")


@jax.jit
def curvature_and_moments(likelihood, y, mean, variance):
    return likelihood.expected_curvature(y, mean, variance), *likelihood.moments(mean, variance)


@jax.jit
def averages(likelihood, y, mean, variance):
    return likelihood.expected_log_prob(y, mean, variance), likelihood.log_marginal(y, mean, variance)


ROWS = 12


def rows(seed, num_latents, sd, spread=1.0):
    rng = np.random.default_rng(seed)
    mean = spread * rng.normal(size=(num_latents, ROWS))
    return mean, np.square(sd * rng.uniform(0.3, 1.3, size=(num_latents, ROWS)))


def dense(mean, variance, nodes=33, reach=6.5):
    """Nodes (C, J, N) and weights (J,) of an independent rule: equidistant, on the product of all axes."""
    z = np.linspace(-reach, reach, nodes)
    w = np.exp(-(z**2) / 2) / np.exp(-(z**2) / 2).sum()
    axes = np.meshgrid(*[z] * len(mean), indexing="ij")
    weights = np.prod(np.meshgrid(*[w] * len(mean), indexing="ij"), axis=0).ravel()
    z = np.stack([a.ravel() for a in axes])
    return mean[:, None] + np.sqrt(variance)[:, None] * z[:, :, None], weights


@jax.jit
def classes(likelihood, mean, variance):
    return likelihood.probabilities(mean, variance), *likelihood.moments(mean, variance)


def test_softmax_agrees_with_dense_sums(float64):
    mean, variance = rows(0, 3, 2.0, 2.0)
    y = np.arange(ROWS) % 3
    f, w = dense(mean, variance)
    p = special.softmax(f, axis=0)
    own = np.take_along_axis(p, np.broadcast_to(y, (1, *p.shape[1:])), axis=0)[0]
    probabilities, is_y = np.einsum("j,cjn->cn", w, p), np.arange(3)[:, None] == y
    curvature = np.einsum("j,cjn->cn", w, p * (1 - p))
    log_p = np.take_along_axis(mean, y[None], axis=0)[0] - w @ special.logsumexp(f, axis=0)
    # Of log E[p_y]: E[p_y (1{c = y} − p_c)] / E[p_y], and half the second derivative.
    slope = np.einsum("j,jn,cjn->cn", w, own, is_y[:, None] - p) / (w @ own)
    bend = np.einsum("j,jn,cjn->cn", w, own, (is_y[:, None] - p) ** 2 - p * (1 - p)) / (2 * (w @ own))
    number = np.arange(3) @ probabilities
    truth = (log_p, is_y - probabilities, -curvature / 2, np.log(w @ own), slope, bend)
    got = integrals(Softmax(3), y, mean, variance)
    for ours, theirs in zip(got, truth, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(got[0], log_p, atol=1e-5)
    ours, average, spread = classes(Softmax(3), mean, variance)
    np.testing.assert_allclose(ours, probabilities, atol=5e-6)
    np.testing.assert_allclose(average, number, atol=1e-5)
    np.testing.assert_allclose(spread, np.arange(3) ** 2 @ probabilities - number**2, atol=1e-5)


def test_softmax_of_two_classes_is_bernoulli(float64):
    mean, variance = rows(1, 2, 3.0, 3.0)
    y = np.arange(ROWS) % 2
    value, marginal = averages(Softmax(2), y, mean, variance)
    z = np.linspace(-12, 12, 4001)
    f = mean[1] - mean[0] + np.sqrt(variance.sum(0)) * z[:, None]
    w, p = stats.norm.pdf(z) * (z[1] - z[0]), special.expit(f)
    np.testing.assert_allclose(value, w @ special.log_expit((2 * y - 1) * f), atol=1e-5)
    np.testing.assert_allclose(np.exp(marginal), w @ np.where(y, p, 1 - p), rtol=2e-5)
    # And so it is as a function of two latent values, to which no rule of its own belongs.
    generic = averages(Factorized(bernoulli, log_concave=True, num_nodes=48, num_latents=2), y, mean, variance)
    np.testing.assert_allclose(generic, (value, marginal), atol=2e-4)


def test_softmax_of_many_classes_agrees_with_monte_carlo(float64):
    """Narrow and wide latent values together; and one class far below the others."""
    C, draws = 12, 40_000
    rng = np.random.default_rng(2)
    mean, sd = rng.normal(size=(C, ROWS)), np.resize([0.01, 0.5, 1.1, 1.2, 2.5, 6.0], (C, ROWS))
    y = np.arange(ROWS)
    mean[3] -= 4.0
    value, marginal = averages(Softmax(C), y, mean, sd**2)
    for row in range(ROWS):
        log_p = special.log_softmax(mean[:, row] + sd[:, row] * rng.normal(size=(draws, C)), axis=1)[:, y[row]]
        z = (value[row] - log_p.mean()) / (log_p.std() / np.sqrt(draws))
        p = np.exp(log_p)
        z_marginal = (np.exp(marginal[row]) - p.mean()) / (p.std() / np.sqrt(draws))
        assert abs(z) < 4.5 and abs(z_marginal) < 4.5
    total = sum(jnp.exp(averages(Softmax(C), np.full(ROWS, c), mean, sd**2)[1]) for c in range(C))
    np.testing.assert_allclose(total, 1, atol=2e-5)


def test_softmax_in_float32_at_extremes():
    means = np.array(
        [[-30.0, 30, 0, 0, 5, 30, -30, 0, 1, 2, 3, 4], [30.0, -30, 0, 0, 5, 29, 30, 0, 3, 2, 1, 0], [0.0] * 12]
    )
    sds = np.array([[5, 0.1, 5, 0, 1e-6, 5, 1, 20, 1, 1, 2, 3], [5, 5, 5, 0, 1, 0.1, 1, 20, 0, 1, 2, 3], [3.0] * 12])
    y, likelihood = np.arange(12) % 3, Softmax(3)
    arguments = y, means.astype(np.float32), np.square(sds, dtype=np.float32)
    single = *integrals(likelihood, *arguments), *classes(likelihood, *arguments[1:])
    assert all(a.dtype == jnp.float32 and np.all(np.isfinite(a)) for a in single)
    with jax.enable_x64(True):
        double = integrals(likelihood, y, means, np.maximum(sds**2, 1e-12))
    np.testing.assert_allclose(single[0], double[0], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(single[3], double[3], rtol=2e-4, atol=5e-5)
    np.testing.assert_allclose(single[1], double[1], atol=2e-4)
    np.testing.assert_allclose(single[2], double[2], rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(np.sum(single[6], axis=0), 1, atol=1e-6)


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 16, 40])
def test_gumbel_rule_is_exact_for_polynomials(num_nodes):
    g, w = gumbel(num_nodes)
    assert np.all(np.diff(g) > 0) and np.all(w >= 0)
    for power in range(min(2 * num_nodes, 8)):
        moment = integrate.quad(lambda x: x**power * np.exp(-x - np.exp(-x)), -5, 45, epsabs=1e-11, limit=200)[0]  # noqa: B023
        assert w @ g**power == pytest.approx(moment, rel=1e-8)


def dense_normal(y, mean, variance):
    """Expectation, log-average, curvatures and moments of y ~ N(f, exp(g)²) by dense sums over both."""
    (f, g), w = dense(mean, variance, 301, 9.0)
    log_p = stats.norm.logpdf(y, f, np.exp(g))
    average = w @ f
    curvature = np.stack([w @ np.exp(-2 * g), w @ (2 * (y - f) ** 2 * np.exp(-2 * g))])
    spread = w @ (np.exp(2 * g) + f**2) - average**2
    return w @ log_p, special.logsumexp(log_p + np.log(w)[:, None], axis=0), curvature, average, spread


@pytest.mark.parametrize(
    "likelihood, at",
    [
        (HeteroscedasticGaussian(), (0, 1)),
        (Factorized(swapped, log_concave=(1,), num_latents=2), (1, 0)),
    ],
    ids=["closed form", "quadrature"],
)
def test_mean_and_scale_agree_with_dense_sums(likelihood, at, float64):
    mean, variance = rows(3, 2, 0.7)
    mean[1] -= 0.5
    y = np.random.default_rng(4).normal(size=ROWS) * 3
    arguments = likelihood, y, mean[list(at)], variance[list(at)]
    got = *integrals(*arguments), *curvature_and_moments(*arguments)
    value, marginal, curvature, average, spread = dense_normal(y, mean, variance)
    np.testing.assert_allclose(got[0], value, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(got[3], marginal, atol=1e-5)
    np.testing.assert_allclose(got[6], curvature[list(at)], rtol=1e-6)
    np.testing.assert_allclose(got[1][at[0]], (y - mean[0]) * curvature[0], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(got[7], average, atol=1e-9)
    np.testing.assert_allclose(got[8], spread, rtol=1e-8)
    # Gradients of the averaged likelihood by differences.
    h = 1e-5
    for latent in range(2):
        step = np.zeros_like(mean)
        step[at[latent]] = h
        ends = [integrals(likelihood, y, (mean + s * step)[list(at)], variance[list(at)])[3] for s in (1, -1)]
        np.testing.assert_allclose(got[4][latent], (ends[0] - ends[1]) / (2 * h), rtol=1e-4, atol=1e-5)


def test_mean_and_scale_far_from_the_data():
    """An outlier is explained by f, or by the noise: two modes, of which either may be the larger."""
    y = np.resize([0.0, 8.0, 30.0, 1e4], ROWS)
    mean = np.stack([np.zeros(ROWS), np.repeat([-6.0, -1.0, 0.0], 4)])
    variance = np.stack([np.repeat([1.0, 0.01, 16.0], 4), np.repeat([0.25, 4.0, 1.0], 4)])
    truth = []
    for row in range(ROWS):
        g = np.linspace(-30, 30, 60_001)
        terms = stats.norm.logpdf(y[row], 0, np.sqrt(variance[0, row] + np.exp(2 * g)))
        truth.append(
            special.logsumexp(terms + stats.norm.logpdf(g, mean[1, row], np.sqrt(variance[1, row]))) + np.log(1e-3)
        )
    with jax.enable_x64(True):
        double = integrals(HeteroscedasticGaussian(), y, mean, variance)
    np.testing.assert_allclose(double[3], truth, rtol=2e-4, atol=2e-4)
    single = integrals(HeteroscedasticGaussian(), *(a.astype(np.float32) for a in (y, mean, variance)))
    assert all(np.all(np.isfinite(a)) for a in single)
    np.testing.assert_allclose(single[3], double[3], rtol=1e-4, atol=1e-4)


TIMES, CENSORED = np.array([0.4, 1.5, 1.5, 3.0]), np.array([False, False, True, True])


def censored_weibull(f):
    return dist.RightCensoredDistribution(dist.Weibull(jnp.exp(f), 1.5), censored=CENSORED)


def log_censored(f, y, row):
    made = stats.weibull_min(1.5, scale=np.exp(f))
    return made.logsf(y) if CENSORED[row] else made.logpdf(y)


def log_zero_inflated(f, y, row):
    return np.log(0.3 * (y == 0) + 0.7 * stats.poisson.pmf(y, np.exp(f)))


@pytest.mark.parametrize(
    "likelihood, y, log_density, tolerance",
    [
        (likelihoods.Weibull(concentration=1.5, censored=CENSORED), TIMES, log_censored, 1e-6),
        # NumPyro's log-survival stops at the log of machine epsilon, −36, and is not concave for that reason.
        (Factorized(censored_weibull), TIMES, log_censored, 1e-2),
        (Factorized(zero_inflated_at_rate), np.array([0, 1, 2, 7]), log_zero_inflated, 1e-5),
    ],
    ids=["survival", "survival, by NumPyro", "zero-inflated"],
)
def test_more_kinds_of_data(likelihood, y, log_density, tolerance, float64):
    mean, variance = np.array([0.3, -0.5, 1.0, 0.6]), np.array([0.2, 0.6, 0.4, 0.3])
    with (
        pytest.warns(UserWarning, match="tail")
        if isinstance(likelihood, Factorized) and log_density is log_censored
        else nullcontext()
    ):
        likelihood.check(y)
    got = averages(likelihood, y, mean, variance)
    if log_density is log_censored:  # E[(y e⁻ᶠ)^k]
        curvature = jax.jit(likelihood.expected_curvature)(y, mean, variance)
        power = np.exp(1.5 * (np.log(y) - mean) + 1.5**2 * variance / 2)
        # NumPyro's clip takes 2% of the last row's curvature, 6.53 of 6.66, and its kink some more of the quadrature.
        np.testing.assert_allclose(curvature, 1.5**2 * power, rtol=3 * tolerance)
    for row in range(4):
        at = stats.norm(mean[row], np.sqrt(variance[row]))
        ends = at.ppf(1e-15), at.isf(1e-15)
        value = integrate.quad(lambda f: at.pdf(f) * log_density(f, y[row], row), *ends, epsabs=1e-9)[0]  # noqa: B023
        average = integrate.quad(lambda f: at.pdf(f) * np.exp(log_density(f, y[row], row)), *ends, epsabs=1e-12)[0]  # noqa: B023
        assert got[0][row] == pytest.approx(value, abs=tolerance)
        assert got[1][row] == pytest.approx(np.log(average), abs=tolerance)


@pytest.mark.parametrize(
    "fn, density",
    [
        (
            zero_inflated,
            lambda f, g, y: special.expit(f) * (y == 0) + special.expit(-f) * stats.poisson.pmf(y, np.exp(g)),
        ),
        (
            overdispersed,
            lambda f, g, y: stats.nbinom.pmf(y, np.exp(g), 1 / (1 + np.exp(f - g))),
        ),
    ],
    ids=["zero-inflated", "overdispersed"],
)
def test_counts_of_two_latent_values(fn, density, float64):
    mean, variance = rows(5, 2, 0.6)
    y = np.array([0, 1, 2, 7] * 3)
    likelihood = likelihoods.as_likelihood(fn, 2)
    assert likelihood.num_latents == 2 and likelihood.concave == () and likelihood.proof == "none"
    (f, g), w = dense(mean, variance, 81, 8.0)
    p = density(f, g, y)
    value, marginal = averages(likelihood, y, mean, variance)
    np.testing.assert_allclose(value, w @ np.log(p), atol=1e-5)
    np.testing.assert_allclose(marginal, np.log(w @ p), atol=1e-4)


def heavy_tailed(f, g, h):
    return dist.StudentT(1.0 + jnp.exp(h), f, jnp.exp(g))


def dense_of_three(y, mean, variance):
    """Expectation and log-average of :func:`heavy_tailed` in one row, and their slopes in means and deviations."""
    z = np.linspace(-8, 8, 101)
    w = stats.norm.pdf(z) * (z[1] - z[0])
    w, s = w[:, None, None] * w[:, None] * w, np.sqrt(variance)
    f, g, h = mean[:, None] + s[:, None] * z
    f, scale, df = f[:, None, None], np.exp(g)[:, None], 1 + np.exp(h)
    # Student's t, whose parameters vary along an axis each.
    log_p = special.gammaln((df + 1) / 2) - special.gammaln(df / 2) - np.log(np.pi * df) / 2 - np.log(scale)
    log_p = log_p - (df + 1) / 2 * np.log1p(np.square((y - f) / scale) / df)
    average = np.log(np.sum(w * np.exp(log_p)))
    slopes = [
        np.array([np.sum(a, axis=others) @ b for others in ((1, 2), (0, 2), (0, 1))]) / s
        for a in (w * log_p, w * np.exp(log_p - average))
        for b in (z, z**2 - 1)
    ]
    return np.sum(w * log_p), average, *slopes


@pytest.mark.parametrize("sd", [0.15, 0.5])
def test_three_latent_values_agree_with_dense_sums(sd, float64):
    mean, variance = rows(11, 3, sd, 0.6)
    y = np.random.default_rng(12).normal(size=ROWS) * 2
    got = integrals(likelihoods.as_likelihood(heavy_tailed, 3), y, mean, variance)
    for n in range(0, ROWS, 3):
        truth = dense_of_three(y[n], mean[:, n], variance[:, n])
        by_sd = 2 * np.sqrt(variance[:, n])
        np.testing.assert_allclose([got[0][n], got[3][n]], truth[:2], atol=1e-4)
        ours = got[1][:, n], by_sd * got[2][:, n], got[4][:, n], by_sd * got[5][:, n]
        np.testing.assert_allclose(ours, truth[2:], atol=1e-3)


@pytest.mark.parametrize("sd", [1.0, 2.0])
def test_a_location_whose_density_may_be_narrow(sd):
    """A Student-t with functions for location, log scale and log df, beside a million nodes, close about y."""
    likelihood = Factorized(lambda f, g, h: dist.StudentT(jnp.exp(h), f, jnp.exp(g)), num_latents=3)
    mean, y = np.array([0.0, -0.5, 1.0]), np.array([0.5, 3.0])
    t, u = np.linspace(-2.9, 2.9, 41), np.linspace(-22.0, 22.0, 661)
    z, w = np.sinh(t), np.cosh(t) * stats.norm.pdf(np.sinh(t))
    w, scale, df = w / w.sum(), np.exp(mean[1] + sd * z)[:, None, None], np.exp(mean[2] + sd * z)[:, None]
    apart = np.minimum(scale, 0.3) * np.sinh(u)  # of f and y: no further than either density is smooth
    log_w = np.log(w)[:, None, None] + np.log(w)[:, None] + np.log(np.minimum(scale, 0.3) * np.cosh(u) * (u[1] - u[0]))
    log_p = stats.t.logpdf(apart / scale, df) - np.log(scale)
    log_w = [log_w + stats.norm.logpdf(at + apart, 0, sd) for at in y]
    moments = np.tile(mean[:, None], 2).astype("f"), np.full((3, 2), sd**2, "f")
    expected, averaged = jax.jit(averages, static_argnums=0)(likelihood, y.astype("f"), *moments)
    np.testing.assert_allclose(averaged, [special.logsumexp(each + log_p) for each in log_w], atol=1e-4)
    np.testing.assert_allclose(expected, [np.sum(np.exp(each) * log_p) for each in log_w], atol=3e-5)


def test_a_kink_in_the_first_of_two():
    """A Laplace distribution of location and log scale, in float32: E|y − f| E[1/scale], and slopes."""
    mean, y = np.array([[0.0, 1.0, -2.0], [-1.0, 0.5, 0.0]]), np.array([0.5, 1.0, 3.0])
    sd = np.array([[2.0, 1.0, 0.05], [2.0, 0.1, 1.0]])
    likelihood = Factorized(lambda f, g: dist.Laplace(f, jnp.exp(g)), num_latents=2)

    @jax.jit
    def ours(y, mean, variance):
        value, pull = jax.vjp(lambda m, v: likelihood.expected_log_prob(y, m, v), mean, variance)
        return value, *pull(jnp.ones_like(value)), likelihood.log_marginal(y, mean, variance)

    got = ours(y.astype("f"), mean.astype("f"), np.square(sd).astype("f"))
    d, rate = y - mean[0], np.exp(0.5 * sd[1] ** 2 - mean[1])
    bell, side = np.sqrt(2 / np.pi) * np.exp(-0.5 * (d / sd[0]) ** 2), 1 - 2 * stats.norm.cdf(-d / sd[0])
    both = (sd[0] * bell + d * side) * rate
    np.testing.assert_allclose(got[0], -np.log(2) - mean[1] - both, rtol=1e-5)
    np.testing.assert_allclose(got[1], [rate * side, both - 1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(2 * sd * got[2], [-rate * bell, -both * sd[1]], rtol=1e-4, atol=1e-4)
    # The average over f in closed form, over g by a sum.
    z = np.linspace(-9, 9, 601)[:, None]
    g, r = np.exp(mean[1] + sd[1] * z), sd[0] / np.exp(mean[1] + sd[1] * z)
    terms = [special.log_ndtr(-x) + 0.5 * x**2 for x in (r + d / sd[0], r - d / sd[0])]
    averages = np.logaddexp(*terms) - 0.5 * (d / sd[0]) ** 2 - np.log(2 * g) + stats.norm.logpdf(z)
    np.testing.assert_allclose(got[3], special.logsumexp(averages, axis=0) + np.log(0.03), atol=1e-4)


def test_three_functions_are_trained_and_predict(float64):
    """Location, scale and tails of y are functions of x; what is trained is the sum of dense sums at q's moments."""
    rng = np.random.default_rng(0)
    X = np.linspace(0.0, 6.0, 8)[:, None]
    y = np.sin(X[:, 0]) + 0.2 * rng.standard_t(3, size=8)

    def model(X, y=None):
        f, g, h = (npgp.SparseGP(name, npgp.RBF(2.0, variance=0.3), X[::4]).draw() for name in "fgh")
        with numpyro.plate("data", 8):
            npgp.observe("y", (f(X), g(X) - 1.0, h(X)), heavy_tailed, obs=y, conditional="prior")

    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.05, 40), TraceMeanField_ELBO())

    @compiled
    def run():
        state = svi.init(jax.random.key(0), X, y)
        state, losses = jax.lax.scan(lambda state, _: svi.update(state, X, y), state, length=40)
        params = svi.get_params(state)
        posteriors = [npgp.posterior(name, model, guide, params, X, y) for name in "fgh"]
        drawn = Predictive(model, guide=guide, params=params, num_samples=3)(jax.random.key(1), X)["y"]
        found = [(p.mean_and_variance(X), p.kl()) for p in posteriors]
        return losses[0], svi.evaluate(state, X, y), found, drawn

    first, loss, found, drawn = run()
    assert loss < first
    moments, divergences = (np.array(each) for each in zip(*found, strict=True))  # (3, 2, N) and (3,)
    mean, variance = moments[:, 0] - np.array([0.0, 1.0, 0.0])[:, None], moments[:, 1]
    expected = sum(dense_of_three(y[n], mean[:, n], variance[:, n])[0] for n in range(8))
    np.testing.assert_allclose(-loss, expected - sum(divergences), atol=1e-3)
    assert drawn.shape == (3, 8) and np.all(np.isfinite(drawn))


def hurdle_density(p):
    def density(g, y):
        zero = p(0)
        return np.where(y == 0, special.expit(g), special.expit(-g) * p(y) / (1 - zero))

    return density


@pytest.mark.parametrize(
    "make, density, moments, concave",
    [
        (
            lambda: likelihoods.ZeroInflated(likelihoods.Poisson()),
            lambda f, g, y: special.expit(g) * (y == 0) + special.expit(-g) * stats.poisson.pmf(y, np.exp(f)),
            lambda f, g: (special.expit(-g) * np.exp(f), special.expit(-g) * (np.exp(f) + np.exp(2 * f))),
            (),
        ),
        (
            lambda: likelihoods.Hurdle(likelihoods.Poisson()),
            lambda f, g, y: hurdle_density(lambda k: stats.poisson.pmf(k, np.exp(f)))(g, y),
            lambda f, g: tuple(
                special.expit(-g) * a / -np.expm1(-np.exp(f)) for a in (np.exp(f), np.exp(f) + np.exp(2 * f))
            ),
            (0, 1),
        ),
    ],
    ids=["zero-inflated", "hurdle"],
)
def test_zeros_of_their_own(make, density, moments, concave, float64):
    mean, variance = rows(5, 2, 0.6)
    y, likelihood = np.array([0, 1, 2, 7] * 3), make()
    (f, g), w = dense(mean, variance, 81, 8.0)
    p = density(f, g, y)
    value, marginal = averages(likelihood, y, mean, variance)
    np.testing.assert_allclose(value, w @ np.log(p), atol=1e-5)
    np.testing.assert_allclose(marginal, np.log(w @ p), atol=1e-4)
    assert likelihood.concave == concave and likelihood.proof == ("log-concave" if concave == (0, 1) else "none")
    log_prob = jax.jit(likelihood.log_prob)
    np.testing.assert_allclose(np.exp(log_prob(np.stack([f, g]), y)), p, rtol=1e-9)
    counts = np.arange(300)[:, None]
    total = np.exp(log_prob(np.tile(mean[:, None], (1, 300, 1)), np.tile(counts, ROWS))).sum(0)
    np.testing.assert_allclose(total, 1, rtol=1e-6)
    first, second = (w @ a for a in moments(f, g))
    np.testing.assert_allclose(jax.jit(likelihood.moments)(mean, variance), [first, second - first**2], rtol=1e-6)
    # Draws given f: counts and zeros, as often as their probability says.
    at = np.stack([np.full(20_000, -1.0), np.full(20_000, 0.3)])
    drawn = np.asarray(jax.jit(likelihood.sample)(jax.random.key(0), at))
    for k in range(3):
        assert abs(np.mean(drawn == k) - density(-1.0, 0.3, np.array(k))) < 0.015
    if concave:  # jointly
        assert_concave(log_prob, y)


def assert_concave(log_prob, y, directions=((1.0,), (1.0,))):
    """No second difference along a random direction is positive."""
    rng = np.random.default_rng(0)
    at, step = 4 * rng.normal(size=(2, 2000)), 0.02 * rng.normal(size=(2, 2000)) * np.array(directions)
    up, center, down = (log_prob(at + s * step, np.resize(y, 2000)) for s in (1, 0, -1))
    assert np.all(up + down - 2 * center <= 1e-9)


def test_a_hurdle_of_counts_that_promise_less(float64):
    """Log-concave in what says whether there is a zero."""
    likelihood, y = likelihoods.Hurdle(likelihoods.NegativeBinomial(concentration=0.5)), np.array([0, 1, 2, 7] * 3)
    assert likelihood.concave == (1,) and likelihood.proof == "none"
    log_prob, (f, g) = jax.jit(likelihood.log_prob), 2.0 * np.random.default_rng(1).normal(size=(2, 12))
    density = hurdle_density(lambda k: stats.nbinom.pmf(k, 0.5, 1 / (1 + 2 * np.exp(f))))
    np.testing.assert_allclose(np.exp(log_prob(np.stack([f, g]), y)), density(g, y), rtol=1e-9)
    assert_concave(log_prob, y, ((0.0,), (1.0,)))


def test_zeros_are_of_counts():
    with pytest.raises(
        TypeError, match=r"^Hurdle counts is Gaussian.*; it must be one of Poisson, NegativeBinomial, Bi"
    ):
        likelihoods.Hurdle(likelihoods.Gaussian(variance=1.0))


def test_quadrature_error_of_two_latent_values():
    mean, variance = rows(5, 2, 0.6)
    errors = [
        jax.jit(likelihoods.quadrature_error)(Factorized(bernoulli, num_nodes=n, num_latents=2), 1, mean, variance)
        for n in (2, 24)
    ]
    assert np.all(errors[0] > 1e-5) and np.all(errors[1] < 1e-5)


@pytest.mark.parametrize(
    "likelihood, y, concave",
    [
        (Softmax(4), 2, (0, 1, 2, 3)),
        (HeteroscedasticGaussian(), 0.7, (0,)),
        (Factorized(swapped, log_concave=(1,), num_latents=2), 0.7, (1,)),
        (Factorized(bernoulli, log_concave=True, num_latents=2), 1, (0, 1)),
    ],
)
def test_concave_where_claimed(likelihood, y, concave, float64):
    C, rng = likelihood.num_latents, np.random.default_rng(6)
    assert likelihood.concave == concave
    assert likelihood.proof == ("log-concave" if len(concave) == C else "none")
    a, b = rng.normal(size=(2, C, 2000)) * 3
    for latents, expected in ((concave, True), (range(C), len(concave) == C)):
        others = np.setdiff1d(np.arange(C), latents)
        end = b.copy()
        end[others] = a[others]
        low, middle, high = jax.jit(likelihood.log_prob)(np.stack([a, (a + end) / 2, end], axis=1), y)
        assert np.all(2 * middle >= low + high - 1e-9 * (1 + abs(middle))) == expected


@pytest.mark.parametrize("likelihood", [Softmax(3), Factorized(normal, num_latents=2)])
def test_shapes(likelihood):
    C = likelihood.num_latents

    def shapes(y, mean, variance):
        arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (y, mean, variance)]
        value, marginal = jax.eval_shape(averages, likelihood, *arguments)
        curvature = jax.eval_shape(likelihood.expected_curvature, *arguments)
        assert value.shape == marginal.shape and curvature.shape == (C, *value.shape)
        return value.shape, {m.shape for m in jax.eval_shape(likelihood.moments, *arguments[1:])}

    assert shapes((5,), (C, 5), (C, 5)) == ((5,), {(5,)})
    assert shapes((), (C,), (C,)) == ((), {()})
    assert shapes((2, 5), (C, 2, 5), (C, 2, 5)) == ((2, 5), {(2, 5)})
    assert shapes((2, 5), (C, 5), ()) == ((2, 5), {(5,)})
    assert shapes((5,), (C, 2, 1), (C, 5)) == ((2, 5), {(2, 5)})
    assert jax.eval_shape(likelihood.log_prob, jnp.zeros((C, 7, 5)), jnp.ones(5)).shape == (7, 5)
    assert jax.eval_shape(likelihood.sample, jax.random.key(0), jnp.zeros((C, 2, 5))).shape == (2, 5)
    if C == 3:
        assert jax.eval_shape(likelihood.probabilities, jnp.zeros((3, 2, 5)), 1.0).shape == (3, 2, 5)


def test_one_parameter_per_row_of_two_latent_values(float64):
    scale = np.array([0.5, 1.0, 2.0])
    likelihood = Factorized(lambda f, g: dist.Normal(f, jnp.exp(g) * scale), log_concave=(0,), num_latents=2)
    mean, variance, y = np.array([0.1, -0.4]), np.array([0.5, 0.3]), 0.7
    pair = np.repeat(mean[:, None], 3, 1), np.repeat(variance[:, None], 3, 1)
    value, marginal, *_ = dense_normal(y, np.stack([pair[0][0], pair[0][1] + np.log(scale)]), pair[1])
    # Mean and variance may be shared by the rows.
    for arguments in (pair, (mean[:, None], variance[:, None])):
        got = averages(likelihood, y, *arguments)
        np.testing.assert_allclose(got, (value, marginal), rtol=1e-6, atol=1e-5)


def test_samples():
    n, f = 20_000, np.array([0.5, -1.0, 0.2], np.float32)

    @jax.jit
    def draw(key):
        latents = jnp.repeat(f[:, None], n, 1)
        two = HeteroscedasticGaussian(), Factorized(normal, num_latents=2)
        return Softmax(3).sample(key, latents), *(likelihood.sample(key, latents[:2]) for likelihood in two)

    label, y, same = draw(jax.random.key(1))
    assert jnp.issubdtype(label.dtype, jnp.integer)
    assert stats.chisquare(np.bincount(label), n * special.softmax(f.astype(float))).pvalue > 1e-3
    assert stats.kstest(y, stats.norm(0.5, np.exp(-1)).cdf).pvalue > 1e-3
    np.testing.assert_allclose(y, same, rtol=1e-5)


SEVERAL = "npgp.sample gives GP values as arrays, to be used in numpyro.sample with any distribution."


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: Softmax(), "Softmax num_classes is None; it must be a whole number, 2 or more."),
        (lambda: Softmax(1), "Softmax num_classes is 1; it must be a whole number, 2 or more."),
        (lambda: Softmax(2.5), "Softmax num_classes is 2.5; it must be a whole number"),
        (lambda: Softmax(3, num_nodes=0), "Softmax num_nodes is 0; it must be positive"),
        (lambda: HeteroscedasticGaussian(num_nodes=0), "HeteroscedasticGaussian num_nodes is 0; it must be positive"),
        (lambda: likelihoods.Weibull(concentration=0.0), "Weibull concentration is 0.0; it must be positive"),
        (
            lambda: likelihoods.as_likelihood(lambda *f: dist.Normal(f[0], 1.0), 4),
            f"Factorized takes 4 latent values per observation; quadrature serves up to 3. {SEVERAL}",
        ),
        (
            lambda: Factorized(normal, log_concave=(2,), num_latents=2),
            "Factorized log_concave is (2,); it must be True, False or indices of the 2 latent values.",
        ),
        (
            lambda: jax.eval_shape(
                Factorized(lambda f: dist.MultivariateNormal(f, jnp.eye(4))).log_prob, jnp.zeros(4), jnp.zeros(4)
            ),
            "Factorized fn returned events of shape (4,); they must be scalar, one for each row. Where the likelihood "
            f"does not factorize over rows, {SEVERAL}",
        ),
        (
            lambda: Softmax(3).expected_log_prob(np.zeros(4), np.zeros((2, 4)), np.ones((2, 4))),
            "Softmax takes 3 latent values per observation, on the first axis; an array of shape (2, 4) was given.",
        ),
        (lambda: Softmax(3).check([0, 1, 3]), "y has the value 3; for Softmax it must be a class from 0 to 2."),
        (lambda: Softmax(3).check([0.5]), "y has the value 0.5; for Softmax it must be a class from 0 to 2."),
        (
            lambda: HeteroscedasticGaussian().check([np.inf]),
            "y has the value inf; for HeteroscedasticGaussian it must be",
        ),
        (
            lambda: Factorized(overdispersed, num_latents=2).check([-1]),
            "y has the value -1; for Factorized it must be a count (0, 1, 2, …), as of NegativeBinomial2.",
        ),
    ],
)
def test_errors(wrong, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        wrong()


def test_unknown_moments():
    with pytest.raises(NotImplementedError, match="^the moments of y are not known: RightCensoredDistribution has no"):
        Factorized(censored_weibull).moments(jnp.zeros(4), 1.0)


def test_masked_rows_and_pytrees():
    for likelihood in (Softmax(2), HeteroscedasticGaussian(), Factorized(zero_inflated, num_latents=2)):
        likelihood.check([1, 1, np.nan])  # 1 stands for what is masked
    assert not jax.tree.leaves(Softmax(3)) and jax.tree.structure(Softmax(3)) == jax.tree.structure(Softmax(3))
    leaves, structure = jax.tree.flatten(likelihoods.Weibull(concentration=1.5, censored=CENSORED))
    assert len(leaves) == 2 and jax.tree.unflatten(structure, leaves).num_nodes == likelihoods.NUM_NODES


def test_moments_of_noise_whose_log_is_gaussian(float64):
    """``E y = E f`` and ``Var y = Var f + E exp(2 g)``, by quadrature."""
    z, w = np.polynomial.hermite_e.hermegauss(40)
    mean, variance = np.array([[0.3], [-0.5]]), np.array([[0.7], [0.4]])
    average, spread = HeteroscedasticGaussian().moments(mean, variance)
    noise = np.sum(w * np.exp(2 * (mean[1] + np.sqrt(variance[1]) * z))) / w.sum()
    np.testing.assert_allclose([average[0], spread[0]], [0.3, 0.7 + noise], rtol=1e-10)


def test_averages_over_noise_reach_far_enough(float64):
    """To eight digits where the log of the noise is nearly known: five deviations would leave out 6e-7."""
    z, w = np.polynomial.hermite_e.hermegauss(40)
    mean, variance, y = np.array([[0.3], [-0.5]]), np.array([[0.7], [0.01]]), np.array([0.7])
    noise = np.exp(2 * (mean[1] + np.sqrt(variance[1]) * z))
    density = np.sum(w / w.sum() * stats.norm.pdf(y, mean[0], np.sqrt(variance[0] + noise)))
    found = HeteroscedasticGaussian().log_marginal(y, mean, variance)
    np.testing.assert_allclose(found, np.log(density), rtol=0, atol=2e-9)
