"""Student-t: its bounds against evidence and tangents, and what they rest on, a curvature with a single peak."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import random_heavy_tails as heavy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpyro import distributions as dist
from scipy import stats

import npgp
from npgp.conditionals import as_conditional
from npgp.conditionals.base import row_elbo
from npgp.likelihoods import Likelihood


def unit(low, high):
    return st.floats(low, high, allow_subnormal=False)


row = st.tuples(unit(-3, 3), unit(-4, 1.5), unit(-5, 1.5), unit(0.2, 3.0), unit(-2.5, 0.5))


@functools.cache
def compiled():
    @jax.jit
    def terms(y, variance, residual, df, scale):
        likelihood = npgp.StudentT(df=df, scale=scale)
        rows = [row_elbo(as_conditional(c), likelihood, y, 0.0 * y, variance, residual) for c in ("tight", "prior")]
        tangents = [fn(likelihood, y, 0.0 * y, variance, residual) for fn in (heavy.one_tangent, heavy.each_node)]
        return [*rows, *tangents, likelihood.expected_log_prob(y, 0.0 * y, variance)]

    return terms


def expected(y, variance, df, scale):
    """E log p for each variance, by many nodes, which are close together beside the likelihood's width."""
    z = np.linspace(-9.0, 9.0, 6001)
    weights = stats.norm.pdf(z) / np.sum(stats.norm.pdf(z))
    return stats.t.logpdf(y, df, np.sqrt(variance)[:, None] * z, scale) @ weights


@settings(max_examples=10, deadline=None)
@given(row)
# Both limits bind in nearly one place, which a coarse rule for the precision misses by .004.
@example((1.74, -3.07, -0.157, 2.72, -1.004)).via("found by search")
@example((2.0, -1.0, 0.0, 1.0, 0.0)).via("found by hypothesis")
def test_a_row_by_itself_has_the_largest_term_that_section_2_5_certifies(drawn):
    y, log_s, log_d, log_df, log_scale = drawn
    s, d, df, scale = (float(np.exp(x)) for x in (log_s, log_d, log_df, log_scale))
    with jax.enable_x64(True):
        arrays = [jnp.asarray([x]) for x in (y, s, d, df, scale)]
        tight, prior, one, each, none_left = (float(t[0]) for t in compiled()(*arrays))
    assert tight >= max(one, each) - 2e-5  # the node count's and the quadrature's errors
    shares = np.linspace(0.0, 1.0, 81)
    values = expected(y, s + shares * d, df, scale)
    assert (prior, none_left) == (pytest.approx(values[-1], abs=2e-5), pytest.approx(values[0], abs=2e-5))
    # For the precisions at which ĉ is one of these shares of d, the least values over those up to it.
    least = [
        np.min(values[: i + 1] + 0.5 * (1.0 / shares[i] - 1.0) * shares[: i + 1]) + 0.5 * np.log(shares[i])
        for i in range(1, 81)
    ]
    # Which is the largest is found up to the grid's coarseness: of a term whose slope in a share m is 1/(2m) at most.
    best = int(np.argmax(least))
    assert max(least) - 1e-4 <= tight <= max(least) + 0.5 * np.log((best + 2) / max(best, 0.5))


def test_no_residual_is_prior():
    rng = np.random.default_rng(0)
    y, mean, zero = 3.0 * rng.normal(size=40), rng.normal(size=40), np.zeros(40)
    likelihood, variance = npgp.StudentT(df=3.0, scale=0.3), rng.exponential(size=40)

    @jax.jit
    def both():
        return [row_elbo(as_conditional(c), likelihood, y, mean, variance, zero) for c in ("tight", "prior")]

    with jax.enable_x64(True):
        np.testing.assert_allclose(*both(), rtol=1e-14)  # XLA sums in one order or another


def test_the_curvature_has_a_single_peak_and_a_greatest_value():
    # As a function of the variance, where it is positive; of (y − μ)² and that variance in units of νσ², whatever ν is.
    likelihood = npgp.StudentT(df=3.0, scale=float(np.sqrt(1 / 3)), num_nodes=128)
    variance = np.geomspace(1e-4, 1e6, 301)
    y = np.concatenate([[0.0], np.geomspace(0.05, 100.0, 60)])[:, None]
    with jax.enable_x64(True):
        kappa = np.asarray(jax.jit(lambda: likelihood.expected_curvature(y, 0.0, variance))())
        greatest = float(likelihood.greatest_curvature)
        at_zero = -jax.grad(jax.grad(likelihood.log_prob))(0.0, 0.0)
    assert np.max(kappa) <= greatest == pytest.approx(float(at_zero))
    peaks = 0
    for values in kappa:
        positive = np.flatnonzero(values > 1e-9)
        assert np.all(np.diff(positive) == 1)  # in one interval
        slopes = np.sign(np.diff(values[positive]))
        turns = np.flatnonzero(np.diff(slopes))
        assert len(turns) <= 1 and slopes[-1] < 0, values[positive]
        peaks += len(turns)
    assert peaks > 20  # outliers' curvatures rise first


def test_random_problems_are_below_their_evidence():
    found = heavy.study(50, 3)
    for name, of in found.items():
        assert of["least_gap"] > -1e-6, name
    assert min(of["least_gap"] for of in found.values()) < 0.05  # sharp enough to be refuted
    assert found["tight"]["gain_over_prior"] > 0.4
    assert found["tight"]["below one tangent"] < 1e-4 > found["tight"]["below each node"]
    gaps = [found[name]["mean_gap"] for name in ("prior", "one tangent", "each node", "tight", "grouped", "one group")]
    assert np.all(np.diff(gaps) < 0), gaps


def test_the_evidence_of_random_problems_is_the_oracles():
    roots, _, y, df, scale = heavy.problems(np.random.default_rng(1), 5)
    with jax.enable_x64(True):
        found = jax.jit(jax.vmap(lambda r, y, d, s: heavy.evidence(r, y, npgp.StudentT(df=d, scale=s))))(
            roots, y, df, scale
        )
    for i in range(5):
        log = oracles.log_evidence(roots[i], lambda f, i=i: stats.t.logpdf(y[i], df[i], f, scale[i]), 401)
        assert found[i] == pytest.approx(log, abs=1e-6)


def test_outliers_cost_tight_no_more_than_prior():
    # Inducing inputs at 20 of 40 rows, t noise of three degrees of freedom: it was 1 to 2 nats below prior.
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-3, 3, (40, 1)), 0)
    y = np.sin(2 * X[:, 0]) + 0.2 * rng.standard_t(3, 40)

    @jax.jit
    def bounds():
        return [
            npgp.CollapsedGP(npgp.Matern32(1.0), X, X[::2], likelihood, conditional=c).log_prob(y)
            for c in ("prior", "tight")
        ]

    likelihood = npgp.StudentT(df=4.0, scale=0.37)
    with jax.enable_x64(True):
        prior, tight = map(float, bounds())
    assert prior < tight < prior + 2.0


def test_where_it_is_no_bound_it_is_refused():
    student = npgp.StudentT(df=3.0, scale=0.3)
    assert as_conditional("full").supposes_own_residuals(student)
    for others, refused in ((npgp.Gaussian(variance=1.0), False), (npgp.Poisson(), True)):
        columns = npgp.likelihoods.Columns([student, others])
        assert as_conditional("tight").supposes_own_residuals(columns) == refused


def test_an_unknown_proof_is_an_error():
    with pytest.raises(ValueError, match="Mine has the proof 'minorant'; it must be one of none, single-peaked"):

        class Mine(Likelihood):
            proof = "minorant"

            def log_prob(self, f, y):
                return dist.Normal(f, 1.0).log_prob(y)
