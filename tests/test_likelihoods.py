"""Every integral of every likelihood against dense sums over independent (SciPy) densities."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from scipy.integrate import quad

from npgp import likelihoods

CUTS = (-1.0, 0.2, 2.0)


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


def ordinal(cdf):
    edges = np.array([-np.inf, *CUTS, np.inf])

    def probability(f, k):  # from whichever tail is small
        left = cdf(edges[k + 1] - f) - cdf(edges[k] - f)
        right = cdf(f - edges[k]) - cdf(f - edges[k + 1])
        return np.where(edges[k] - f > 0, right, left)

    def conditional(f):
        p = np.stack([probability(f, k) for k in range(4)])
        k = np.arange(4)[:, None]
        return (k * p).sum(0), (k**2 * p).sum(0) - (k * p).sum(0) ** 2

    return lambda f, y: np.log(probability(f, int(y))), conditional


def counts(rate):
    return lambda f, y: stats.poisson.logpmf(y, rate(f)), lambda f: (rate(f), rate(f))


def nb_logpmf(f, y, r=1.7):
    return stats.nbinom.logpmf(y, r, r / (r + np.exp(f)))


CASES = {
    "Gaussian": Case(
        lambda: likelihoods.Gaussian(0.3),
        (-2.0, 0.5),
        lambda f, y: stats.norm.logpdf(y, f, np.sqrt(0.3)),
        lambda f: (f, 0.3 + 0 * f),
    ),
    "StudentT": Case(
        lambda: likelihoods.StudentT(4.0, 0.1),
        (-2.0, 0.5, 7.0),
        lambda f, y: stats.t.logpdf(y, 4.0, f, 0.1),
        lambda f: (f, 0.02 + 0 * f),
    ),
    "Cauchy": Case(  # no moments: see below
        lambda: likelihoods.StudentT(1.0, 2.0),
        (-2.0, 0.5, 30.0),
        lambda f, y: stats.cauchy.logpdf(y, f, 2.0),
        lambda f: (np.nan * f, np.nan * f),
    ),
    "Laplace": Case(
        lambda: likelihoods.Laplace(0.4),
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
        lambda: likelihoods.Poisson("softplus", 2.5),
        (0, 3, 40),
        *counts(lambda f: 2.5 * np.logaddexp(0, f)),
    ),
    "Gamma": Case(
        lambda: likelihoods.Gamma(2.5),
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
        lambda: likelihoods.NegativeBinomial(1.7),
        (0, 3, 40),
        nb_logpmf,
        lambda f: (np.exp(f), np.exp(f) + np.exp(2 * f) / 1.7),
    ),
    "Ordinal logit": Case(lambda: likelihoods.Ordinal(CUTS), (0, 1, 2, 3), *ordinal(special.expit)),
    "Ordinal probit": Case(lambda: likelihoods.Ordinal(CUTS, "probit"), (0, 2, 3), *ordinal(special.ndtr)),
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


every = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
log_concave = pytest.mark.parametrize(
    "case", [c for c in CASES.values() if c.make().certificate in ("gaussian", "log-concave")]
)


@jax.jit
def integrals(likelihood, y, mean, variance):
    return (
        likelihood.expected_log_prob(y, mean, variance),
        likelihood.log_marginal(y, mean, variance),
        likelihood.expected_curvature(y, mean, variance),
        *likelihood.moments(mean, variance),
    )


def dense(case, y, mean, variance):
    """The same five numbers by dense sums; the curvature by Stein's identity, E[(1 − z²) log p]/v."""
    sd = np.sqrt(variance)
    z = np.linspace(-14, 14, 20001)
    w = stats.norm.pdf(z) * (z[1] - z[0])
    lp = case.log_density(mean + sd * z, y)
    means, variances = case.conditional(mean + sd * z)
    average = (w * means).sum()
    # The average likelihood: a window around where the integrand is not negligible.
    coarse = np.linspace(-40, 40, 4001)
    value = case.log_density(mean + sd * coarse, y) - coarse**2 / 2
    inside = coarse[value > value.max() - 40]
    t = np.linspace(inside[0] - 0.02, inside[-1] + 0.02, 20001)
    terms = case.log_density(mean + sd * t, y) + stats.norm.logpdf(t)
    return (
        (w * lp).sum(),
        special.logsumexp(terms) + np.log(t[1] - t[0]),
        (w * (1 - z**2) * lp).sum() / variance,
        average,
        (w * (variances + (means - average) ** 2)).sum(),
    )


@every
@settings(max_examples=12, deadline=None)
@given(
    which=st.integers(0, 3),
    mean=st.floats(-3, 3),
    log_variance=st.floats(np.log(1e-3), np.log(9.0)),
)
def test_integrals_agree_with_dense_sums(case, which, mean, log_variance):
    y, variance = case.ys[which % len(case.ys)], np.exp(log_variance)
    with jax.enable_x64(True):
        got = [float(x) for x in integrals(case.make(), y, mean, variance)]
    if case is CASES["Factorized, none"]:
        np.testing.assert_allclose(got, dense(case, y, mean, variance), rtol=2e-3, atol=1e-4)
    else:
        np.testing.assert_allclose(got, dense(case, y, mean, variance), rtol=2e-5, atol=2e-5)


@every
def test_float32_agrees_with_float64(case):
    mean, variance = (a.ravel() for a in np.meshgrid([-3, -0.4, 0, 2.5], [1e-4, 0.05, 1, 6]))
    for y in case.ys:
        single = integrals(case.make(), y, np.float32(mean), np.float32(variance))
        with jax.enable_x64(True):
            # float32 stays float32 next to Python numbers and integers.
            parameters = jax.tree.map(np.float32, case.make())
            mixed = integrals(parameters, y, np.float32(mean), np.float32(variance))
            double = integrals(case.make(), y, mean, variance)
        for name, a, b, c in zip(
            ("E", "marginal", "curvature", "mean", "variance"), single, mixed, double, strict=True
        ):
            assert a.dtype == b.dtype == jnp.float32 and c.dtype == jnp.float64, name
            # A curvature is a difference quotient over a deviation of .01 at the smallest variance.
            rtol, atol = (2e-3, 2e-3) if name == "curvature" else (3e-5, 3e-5)
            np.testing.assert_allclose(a, c, rtol=rtol, atol=atol, err_msg=name)
            np.testing.assert_allclose(b, c, rtol=rtol, atol=atol, err_msg=name)


@log_concave
def test_log_concave_where_claimed(case):
    with jax.enable_x64(True):
        likelihood = case.make()
        f, h = np.linspace(-20, 20, 2001), 0.02  # second differences: kinks are no exception
        for y in case.ys:
            centre = likelihood.log_prob(f, y)
            bend = likelihood.log_prob(f + h, y) + likelihood.log_prob(f - h, y) - 2 * centre
            assert np.all(bend <= 1e-12 * (1 + np.abs(centre)))
            assert np.all(likelihood.expected_curvature(y, f[::50], 2.0) >= 0)


def test_student_t_is_not_log_concave_and_says_so():
    likelihood = likelihoods.StudentT(4.0, 0.1)
    assert likelihood.certificate == "student-t"
    assert likelihood.expected_curvature(3.0, 0.0, 0.1) < 0 < likelihood.expected_curvature(0.0, 0.0, 0.1)
    assert likelihoods.Factorized(student).certificate == "none"
    assert likelihoods.Factorized(student).expected_curvature(9.0, 0.0, 0.1) < 0
    assert likelihoods.Gaussian(1.0).certificate == "gaussian"


@every
@pytest.mark.parametrize("variance", [0.0, -1e-9, 1e-12, 1.0])
def test_gradients_are_finite(case, variance):
    def total(likelihood, mean, variance):
        y = jnp.asarray(case.ys, mean.dtype)
        return likelihood.expected_log_prob(y, mean, variance).sum() + likelihood.log_marginal(y, mean, variance).sum()

    gradients = jax.jit(jax.grad(total, (0, 1, 2)))(case.make(), jnp.asarray(0.3), jnp.asarray(variance))
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))


@every
def test_limit_of_no_variance(case):
    likelihood, f = case.make(), jnp.asarray(0.7)
    for y in case.ys:
        expected, marginal, curvature, *_ = integrals(likelihood, y, f, 0.0)
        np.testing.assert_allclose(expected, likelihood.log_prob(f, y), rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(marginal, likelihood.log_prob(f, y), rtol=1e-5, atol=1e-3)
        if case is not CASES["Laplace"]:
            bend = jax.grad(jax.grad(likelihood.log_prob))(f, y)
            np.testing.assert_allclose(curvature, -bend, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    "likelihood, y, peak",
    [
        (lambda: likelihoods.Poisson(), 10_000.0, np.log(1e4)),
        (lambda: likelihoods.Gamma(1e4), 5.0, np.log(5.0)),
        (lambda: likelihoods.NegativeBinomial(500.0), 300.0, np.log(300.0)),
        (lambda: likelihoods.Bernoulli(), 1.0, 0.0),
        (lambda: likelihoods.Laplace(1e-2), 2.0, 2.0),
        (lambda: likelihoods.StudentT(4.0, 1e-3), 2.0, 2.0),
        (lambda: likelihoods.StudentT(200.0, 1e-2), 2.0, 2.0),
    ],
)
@pytest.mark.parametrize("mean, variance", [(0.0, 9.0), (-2.0, 100.0), (1.0, 1e-3)])
def test_averaged_likelihood_far_narrower_than_the_gaussian(likelihood, y, peak, mean, variance):
    with jax.enable_x64(True):
        lik, sd = likelihood(), np.sqrt(variance)
        f = np.linspace(mean - 12 * sd, mean + 12 * sd, 2001)
        # Dense near both peaks, and between: the integrand of a distant pair lies between them.
        f = np.concatenate([f, np.linspace(min(peak, mean) - 0.1, max(peak, mean) + 0.1, 200_001)])
        f = np.unique(np.concatenate([f, peak + np.linspace(-0.1, 0.1, 200_001)]))
        integrand = np.asarray(lik.log_prob(f, y)) + stats.norm.logpdf(f, mean, sd)
        top = integrand.max()
        truth = top + np.log(np.trapezoid(np.exp(integrand - top), f))
        assert float(lik.log_marginal(y, mean, variance)) == pytest.approx(truth, abs=1e-4)
    single = integrals(likelihood(), y, mean, variance)[1]
    assert float(single) == pytest.approx(truth, rel=1e-4, abs=3e-3)


def test_narrow_student_t_where_twenty_nodes_are_off():
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    y, mean, variance = 0.4, 0.0, 1.0

    def log_density(f):
        return stats.t.logpdf(y, 4.0, f, 0.03)

    truth = quad(lambda f: log_density(f) * stats.norm.pdf(f), -10, 10, points=[y, y - 0.1, y + 0.1])[0]
    hermite = (weights * log_density(nodes)).sum() / weights.sum()
    with jax.enable_x64(True):
        likelihood = likelihoods.StudentT(4.0, 0.03)
        got = float(likelihood.expected_log_prob(y, mean, variance))
        error = float(likelihoods.quadrature_error(likelihood, y, mean, variance))
    assert abs(hermite - truth) > 0.1
    assert got == pytest.approx(truth, abs=1e-6) and error < 1e-6


def test_quadrature_error_finds_what_is_wrong():
    y, mean, variance = jnp.array([0.0, 1.0]), jnp.array([0.3, -0.4]), 1.0
    error = likelihoods.quadrature_error
    assert np.all(error(likelihoods.Gaussian(0.1), y, mean, variance) == 0)
    assert np.all(error(likelihoods.Laplace(0.1), y, mean, variance) == 0)
    good, narrow = (
        likelihoods.Bernoulli(),
        likelihoods.Factorized(lambda f: dist.StudentT(4, f, 0.03)),
    )
    assert error(good, y, mean, variance).shape == (2,)
    assert np.all(error(good, y, mean, variance) < 1e-5)
    assert np.all(error(narrow, y, mean, variance) > 0.05)
    coarse = dataclasses.replace(good, num_nodes=4)
    assert np.all(error(coarse, y, mean, variance) > 1e-4)


@pytest.mark.parametrize("variance", [1.0, 10.0, 16.0])
@every
def test_default_nodes_suffice(case, variance):
    if case is CASES["Factorized, none"]:
        pytest.skip("a default for any density there is cannot suffice")
    with jax.enable_x64(True):
        mean = np.linspace(-6, 6, 13)
        error = jax.jit(likelihoods.quadrature_error)
        for y in case.ys:
            assert float(error(case.make(), y, mean, variance).max()) < 1e-4


@pytest.mark.parametrize("certified", [True, False])
def test_factorized_repeats_bernoulli(certified):
    mean, variance = jnp.array([-1.0, 0.2, 3.0]), jnp.array([0.1, 1.0, 4.0])
    y = jnp.array([0, 1, 0])
    ours = integrals(likelihoods.Bernoulli(), y, mean, variance)
    theirs = integrals(likelihoods.Factorized(bernoulli_logits, certified), y, mean, variance)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make, y",
    [
        (likelihoods.Gaussian, 0.5),
        (lambda p: likelihoods.StudentT(3 + p, p), 0.5),
        (likelihoods.Laplace, 0.5),
        (likelihoods.Gamma, 0.5),
        (likelihoods.NegativeBinomial, 2),
        (lambda p: likelihoods.Poisson(exposure=p), 2),
        (lambda p: likelihoods.Poisson("softplus", p), 2),
        (lambda p: likelihoods.Factorized(lambda f: dist.Gamma(p, p * jnp.exp(-f))), 0.5),
    ],
)
def test_one_parameter_per_row(make, y):
    parameters = np.float32([0.3, 1.0, 2.0])
    # All rows may share mean and variance, or everything may have its own.
    for mean, variance in ((0.2, 0.5), (np.float32([0, 1, 2]), np.float32([0.5, 1, 1]))):
        together = integrals(make(parameters), y, mean, variance)
        for row, p in enumerate(parameters):
            m, v = np.broadcast_to(mean, 3)[row], np.broadcast_to(variance, 3)[row]
            for a, b in zip(together, integrals(make(p), y, m, v), strict=True):
                a = np.broadcast_to(a, 3)[row]
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert make(parameters).log_prob(jnp.zeros((4, 1)), y).shape == (4, 3)
        assert make(parameters).sample(jax.random.key(0), jnp.zeros(3)).shape == (3,)


@every
def test_broadcasting_and_vmap(case):
    likelihood = case.make()
    y, mean, variance = np.float32(case.ys[0]), jnp.linspace(-1, 1, 3)[:, None], jnp.ones(2)
    together = integrals(likelihood, y, mean, variance)
    assert all(x.shape == (3, 2) for x in together[:3])
    mapped = jax.vmap(lambda m: integrals(likelihood, y, m, 1.0))(mean[:, 0])
    for a, b in zip(together, mapped, strict=True):
        np.testing.assert_allclose(jnp.broadcast_to(a, (3, 2))[:, 0], b, rtol=1e-5, atol=1e-5)
    assert all(x.shape == () for x in integrals(likelihood, y, 0.1, 1.0))


def test_new_values_do_not_compile_again():
    traces = []

    @jax.jit
    def evaluate(likelihood, y, mean):
        traces.append(likelihood)
        return likelihood.log_marginal(y, mean, 1.0)

    for scale in (0.3, 0.7):
        evaluate(likelihoods.StudentT(4.0, scale), 1.0, 0.2 * scale)
    for cuts in ([0.0, 1.0], [-1.0, 1.0]):
        evaluate(likelihoods.Ordinal(cuts), 1, 0.2)
    for _ in range(2):
        evaluate(likelihoods.Factorized(bernoulli_logits), 1, 0.2)
    assert len(traces) == 3


def test_pytrees():
    likelihood = likelihoods.StudentT(4.0, 0.5)
    leaves, structure = jax.tree.flatten(likelihood)
    assert leaves == [4.0, 0.5] and not jax.tree.leaves(likelihoods.Exponential())
    assert dataclasses.asdict(structure.unflatten(leaves)) == dataclasses.asdict(likelihood)
    # A gradient is no likelihood: negative entries, and any object JAX may put in, are no errors.
    gradient = jax.grad(lambda lik: lik.expected_log_prob(0.0, 0.0, 1.0))(likelihoods.Gaussian(9.0))
    assert gradient.variance < 0
    jax.tree.map(lambda _: object(), likelihood)
    mapped = jax.vmap(lambda lik: lik.log_prob(0.0, 0.0))(likelihoods.Gaussian(jnp.arange(1.0, 4.0)))
    assert mapped.shape == (3,)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(likelihood)]
    assert paths == [".df", ".scale"]


@every
def test_samples_have_the_moments(case):
    if case is CASES["Cauchy"]:
        pytest.skip("it has none")
    likelihood, n, mean, variance = case.make(), 40_000, 0.3, 0.2
    keys = jax.random.split(jax.random.key(3), 2)
    f = mean + np.sqrt(variance) * jax.random.normal(keys[0], (n,))
    y = likelihood.sample(keys[1], f)
    assert y.shape == f.shape
    likelihood.check(y)
    whole = isinstance(case.ys[0], int)
    assert jnp.issubdtype(y.dtype, jnp.integer) == whole
    y, (m, v) = np.asarray(y, float), likelihood.moments(mean, variance)
    assert abs(y.mean() - m) < 5 * np.sqrt(v / n)
    spread = np.std((y - y.mean()) ** 2) / np.sqrt(n)
    assert abs(y.var() - v) < 5 * spread


def test_moments_that_do_not_exist():
    mean, variance = likelihoods.StudentT(jnp.array([0.9, 1.5, 2.5]), 1.0).moments(0.0, 1.0)
    assert np.isnan(mean[0]) and np.all(mean[1:] == 0)
    assert np.isnan(variance[0]) and np.isinf(variance[1]) and variance[2] == pytest.approx(6.0)


def test_float32_tails():
    for link, slope in (("logit", 1.0), ("probit", 1e4)):
        likelihood = likelihoods.Bernoulli(link)
        value, gradient = jax.value_and_grad(likelihood.log_prob)(-1e4, 1)
        assert gradient == pytest.approx(slope, rel=1e-5) and np.isfinite(value)
        assert likelihood.log_prob(1e4, 1) == 0 and jax.grad(likelihood.log_prob)(1e4, 1) == 0
    x = np.linspace(-12, 9, 400)
    probit = likelihoods.Bernoulli("probit")
    first, second = jax.grad(probit.log_prob), jax.grad(jax.grad(probit.log_prob))
    hazard = np.exp(stats.norm.logpdf(x) - stats.norm.logcdf(x))
    np.testing.assert_allclose(jax.vmap(lambda f: first(f, 1))(x), hazard, rtol=1e-5)
    bend = -hazard * (x + hazard)
    np.testing.assert_allclose(jax.vmap(lambda f: second(f, 1))(x), bend, rtol=1e-3, atol=1e-6)
    softplus = likelihoods.Poisson("softplus")
    assert softplus.log_prob(-500.0, 1) == pytest.approx(-500) and jax.grad(softplus.log_prob)(
        -500.0, 1
    ) == pytest.approx(1)
    for link in ("logit", "probit"):
        ordinal = likelihoods.Ordinal(CUTS, link)
        for f in (-50.0, 50.0):
            for y in range(4):
                assert np.isfinite(ordinal.log_prob(f, y))
                assert np.isfinite(jax.grad(ordinal.log_prob)(f, y))


def test_ordinal_probabilities_sum_to_one():
    for link in ("logit", "probit"):
        for cuts in ([0.3], CUTS):
            likelihood = likelihoods.Ordinal(cuts, link)
            y = jnp.arange(len(cuts) + 1)[:, None]
            total = jnp.exp(likelihood.log_prob(jnp.linspace(-6, 6, 25), y)).sum(0)
            np.testing.assert_allclose(total, 1, rtol=1e-5)


def test_exponential_is_gamma_with_concentration_one():
    ours = integrals(likelihoods.Exponential(), 0.7, 0.1, 0.8)
    np.testing.assert_allclose(ours, integrals(likelihoods.Gamma(1.0), 0.7, 0.1, 0.8), rtol=1e-6)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: likelihoods.Gaussian(-1.0), "Gaussian: variance must be positive, got -1.0"),
        (lambda: likelihoods.Gaussian(jnp.array([1.0, 0.0])), "variance must be positive"),
        (lambda: likelihoods.Gaussian(np.nan), "variance must be positive, got nan"),
        (lambda: likelihoods.StudentT(0, 1.0), "df must be positive, got 0"),
        (lambda: likelihoods.StudentT(3.0, [1.0, -1.0]), "scale must be positive"),
        (lambda: likelihoods.Laplace(-1), "scale must be positive"),
        (lambda: likelihoods.Gamma(0.0), "concentration must be positive"),
        (lambda: likelihoods.NegativeBinomial(-2.0), "concentration must be positive"),
        (lambda: likelihoods.Poisson(exposure=0.0), "exposure must be positive"),
        (lambda: likelihoods.Poisson("log"), "link must be 'exp' or 'softplus', got 'log'"),
        (lambda: likelihoods.Bernoulli("cloglog"), "link must be 'logit' or 'probit'"),
        (lambda: likelihoods.Bernoulli(num_nodes=0), "num_nodes must be positive, got 0"),
        (lambda: likelihoods.Ordinal([1.0, 0.0]), "cutpoints must increase"),
        (lambda: likelihoods.Ordinal(1.0), "cutpoints must be a vector"),
        (lambda: likelihoods.Ordinal([]), "cutpoints must be a vector"),
        (lambda: likelihoods.Factorized(3), "fn must be a function of f, got 3"),
    ],
)
def test_impossible_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_traced_parameters_are_not_checked():
    assert jax.jit(lambda v: likelihoods.Gaussian(v).variance)(-1.0) == -1
    assert jax.jit(lambda c: likelihoods.Ordinal(c).cutpoints)(jnp.array([1.0, 0.0])).shape == (2,)


@pytest.mark.parametrize(
    "likelihood, good, bad, message",
    [
        (likelihoods.Gaussian(1.0), [-1.0, np.nan], [np.inf], "Gaussian: y must be finite"),
        (likelihoods.Bernoulli(), [0, 1, np.nan], [1, -1], "y must be 0 or 1, got -1"),
        (likelihoods.Poisson(), [0, 7, np.nan], [0.5], r"y must be a count .*, got 0.5"),
        (likelihoods.NegativeBinomial(1.0), [0, 7], [-1], "y must be a count"),
        (likelihoods.Gamma(1.0), [0.1, np.nan], [0.0], "y must be positive, got 0"),
        (likelihoods.Exponential(), [0.0], [-0.1], "y must be non-negative"),
        (likelihoods.Ordinal([0.0, 1.0]), [0, 2, np.nan], [3], "a category from 0 to 2, got 3"),
        (likelihoods.Factorized(weibull), [0.1, np.nan], [-2.0], "y must be in the support"),
    ],
)
def test_impossible_observations(likelihood, good, bad, message):
    for convert in (list, np.asarray, jnp.asarray):
        likelihood.check(convert(good))
        with pytest.raises(ValueError, match=message):
            likelihood.check(convert(bad))
    jax.jit(likelihood.check)(jnp.asarray(bad))


def test_as_likelihood():
    bernoulli = likelihoods.Bernoulli()
    assert likelihoods.as_likelihood(bernoulli) is bernoulli
    made = likelihoods.as_likelihood(bernoulli_logits)
    assert isinstance(made, likelihoods.Factorized) and made.fn is bernoulli_logits
    for wrong in (3.0, None, likelihoods.Bernoulli, dist.Normal(0, 1), "gaussian"):
        with pytest.raises(TypeError, match="Expected a Likelihood or a function"):
            likelihoods.as_likelihood(wrong)


def test_factorized_says_what_its_function_does_wrong():
    with pytest.raises(TypeError, match="must return a NumPyro distribution"):
        likelihoods.Factorized(lambda f: f).log_prob(0.0, 1.0)
    with pytest.raises(ValueError, match=r"scalar events, got event shape \(2,\)"):
        vector = likelihoods.Factorized(lambda f: dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        vector.log_prob(0.0, jnp.zeros(2))
