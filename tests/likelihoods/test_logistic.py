"""Normal averages of softplus and of its derivatives, against dense sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special, stats

from npgp import likelihoods
from npgp.likelihoods.logistic import NODES, expected_softplus, kolmogorov_rule, softplus_gap

Z, STEP = np.linspace(-12.0, 12.0, 24001, retstep=True)
MASS = stats.norm.pdf(Z) * STEP


def softplus(mean, variance):
    return expected_softplus(mean, variance, 64)


slope = jax.grad(softplus)
ours = jax.jit(
    lambda mean, variance: (
        softplus(mean, variance),
        slope(mean, variance),
        2.0 * jax.grad(softplus, 1)(mean, variance),
        jax.grad(slope)(mean, variance),
        2.0 * jax.grad(slope, 1)(mean, variance),
        jax.grad(jax.grad(slope))(mean, variance),
    )
)


def dense(mean: float, variance: float) -> np.ndarray:
    """The same: softplus, its slope, its curvature twice, and its third derivative twice."""
    f = mean + np.sqrt(variance) * Z
    p, q = special.expit(f), special.expit(-f)
    softplus, slope, curvature, third = (MASS @ values for values in (np.logaddexp(0.0, f), p, p * q, p * q * (q - p)))
    return np.array([softplus, slope, curvature, curvature, third, third])


@settings(deadline=None, max_examples=100)
@example(0.0, 0.0)
@example(0.0, 1e-8)
@given(st.floats(-60.0, 60.0), st.floats(0.0, 400.0))
def test_averages_are_exact_whatever_the_variance(mean, variance):
    expected = dense(mean, variance)
    with jax.enable_x64(True):
        wide = ours(mean, variance)
    np.testing.assert_allclose(wide, expected, rtol=1e-14, atol=3e-12)
    narrow = np.array(ours(jnp.float32(mean), jnp.float32(variance)))
    # A derivative of the rule's error is larger than the error; that of the mean's rounding grows with it.
    bounds = 1e-6 + 2e-7 * abs(expected)
    assert narrow.dtype == np.float32 and np.all(np.abs(narrow - expected) < bounds)


@pytest.mark.parametrize("num_nodes", NODES.values())
def test_the_rule_is_gauss_for_kolmogorov(num_nodes):
    squares, weights = kolmogorov_rule(num_nodes)
    assert np.all(weights > 0.0)  # so that what stands for softplus is convex
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-13)
    # Marsaglia, Tsang & Wang 2003: E K = √(π/2) log 2, E K² = π²/12.
    np.testing.assert_allclose(weights @ squares, np.pi**2 / 12.0, rtol=1e-8)
    np.testing.assert_allclose(weights @ np.sqrt(squares), np.sqrt(np.pi / 2.0) * np.log(2.0), rtol=1e-8)


def test_far_tails_are_those_of_the_logistic_function():
    np.testing.assert_allclose(softplus(jnp.array([500.0, -500.0, 0.0]), 0.0), [500.0, 0.0, np.log(2.0)])


def test_few_nodes_are_enough_for_precisions(float64):
    mean, variance = np.linspace(-8.0, 8.0, 33), np.linspace(0.0, 3.0, 7)[:, None]
    for num_nodes, error in ((20, 4e-6), (12, 2e-4)):
        few = expected_softplus(mean, variance, num_nodes)
        np.testing.assert_allclose(few, softplus(mean, variance), atol=error)
        assert np.abs(few - softplus(mean, variance)).max() > 0.01 * error  # they are few


def test_gap_far_below_zero_is_accurate_relative_to_itself():
    """Negative binomial counts of a concentration of e⁶⁶ multiply it by that; the mixture knows it to 1e-9 or so."""
    mean, variance = np.array([-66.0, -30.0, -28.0, -60.0, -21.0]), np.array([4.0, 2.5, 4.0, 20.0, 0.3])
    truth = [
        MASS @ np.log1p(np.exp(m + np.sqrt(v) * Z)) - np.log1p(np.exp(m)) for m, v in zip(mean, variance, strict=True)
    ]
    gap = jax.jit(lambda mean, variance: softplus_gap(mean, variance, 64))
    np.testing.assert_allclose(
        gap(jnp.asarray(mean, jnp.float32), jnp.asarray(variance, jnp.float32)), truth, rtol=2e-5
    )
    with jax.enable_x64(True):
        np.testing.assert_allclose(gap(mean, variance), truth, rtol=1e-10)

    @jax.jit
    def expected(log_concentration):
        huge = likelihoods.NegativeBinomial(concentration=jnp.exp(log_concentration))
        return [of.expected_log_prob(7.0, 1.0, 4.0) for of in (huge, likelihoods.Poisson())]

    np.testing.assert_allclose(*expected(jnp.float32(66.0)), rtol=1e-4)
    # Its slope in the logarithm is the limit's, 0, also where the square of the concentration overflows.
    at = jnp.float32([30.0, 50.0, 80.0])
    by_log = jax.vmap(jax.grad(lambda r: likelihoods.NegativeBinomial(concentration=jnp.exp(r)).log_prob(3.0, 40.0)))
    np.testing.assert_allclose(jax.jit(by_log)(at), 0.0, atol=1e-4)
