"""Collapsed GPs of outputs with a kernel each: as many collapsed GPs."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import strategies as st
from models import compiled
from numpyro import handlers

import npgp

RNG = np.random.default_rng(0)
N, Q = 8, 2
X, Z, OWN = RNG.uniform(size=(N, 2)), RNG.uniform(size=(3, 2)), RNG.uniform(size=(Q, 2, 2))
Y, COUNTS = RNG.normal(size=(Q, N)), RNG.poisson(2.0, size=(Q, N))
LENGTHSCALE, VARIANCE = np.array([[[0.3, 0.9]], [[1.2, 0.5]]]), np.array([[1.5], [0.4]])
KERNEL = npgp.Matern32(LENGTHSCALE, variance=VARIANCE)
NOISE = np.array([[0.1], [0.3]])


def of(q: int) -> npgp.Matern32:
    return npgp.Matern32(LENGTHSCALE[q, 0], variance=VARIANCE[q, 0])


def test_gaussian_outputs_are_as_many_collapsed_gps(float64):
    groups = npgp.sparse.median_split(X, 4)

    def found(gp, y):
        posterior = gp.condition(y)
        corrected = npgp.local_correction(posterior, X, y, npgp.Gaussian(variance=0.2), groups)
        return gp.log_prob(np.stack([y, -2.0 * y])), posterior.covariance(X), corrected.mean_and_variance(X)

    @compiled
    def all_of_them():
        gp = npgp.CollapsedGP(KERNEL, X, [Z, OWN], noise_variance=NOISE, outputs=Q, conditional="grouped")
        alone = [
            npgp.CollapsedGP(of(q), X, [Z, OWN[q]], noise_variance=NOISE[q, 0], conditional="grouped") for q in range(Q)
        ]
        return found(gp, Y), [found(one, Y[q]) for q, one in enumerate(alone)], gp.sample(jax.random.key(0), (3,))

    (bound, covariance, corrected), alone, draws = all_of_them()
    assert bound.shape == (2, Q) and draws.shape == (3, Q, N)
    for q, (expected, of_one, near) in enumerate(alone):
        np.testing.assert_allclose(bound[:, q], expected, rtol=1e-9)
        np.testing.assert_allclose(covariance[q], of_one, rtol=1e-7, atol=1e-10)
        for value, wanted in zip(corrected, near, strict=True):
            np.testing.assert_allclose(value[q], wanted, rtol=1e-7, atol=1e-10)


def test_counts_are_as_many_collapsed_gps_and_are_updated_likewise(float64):
    offset, mask = np.array([[0.0], [1.0]]), RNG.uniform(size=(Q, N)) > 0.2
    y = np.where(mask, COUNTS, 0.0)

    def found(gp, y, counts):
        posterior = gp.condition(y)
        return gp.log_prob(y), posterior.mean(X), posterior.update(X, counts, npgp.Poisson()).mean(X)

    @compiled
    def all_of_them():
        gp = npgp.CollapsedGP(KERNEL, X, Z, npgp.Poisson(), outputs=Q, offset=offset, mask=mask)
        alone = [
            npgp.CollapsedGP(of(q), X, Z, npgp.Poisson(), offset=float(offset[q, 0]), mask=mask[q]) for q in range(Q)
        ]
        return found(gp, y, COUNTS), [found(one, y[q], COUNTS[q]) for q, one in enumerate(alone)]

    (value, mean, later), alone = all_of_them()
    for q, (expected, of_one, updated) in enumerate(alone):
        np.testing.assert_allclose(value[q], expected, rtol=1e-8)
        np.testing.assert_allclose(mean[q], of_one, rtol=1e-4, atol=1e-6)
        # The search ends for all together, so that one may go further than it would alone.
        np.testing.assert_allclose(later[q], updated, rtol=1e-2, atol=1e-3)


@compiled
def bounds_and_evidence(lengthscales, noise, y):
    bound = npgp.CollapsedGP(npgp.RBF(lengthscales), X, Z, noise_variance=noise, outputs=Q).log_prob(y)
    exact = npgp.collapsed.exact_log_evidence
    return bound, [exact(npgp.RBF(lengthscales[q, 0]), X, y[q], noise_variance=noise) for q in range(Q)]


@hypothesis.settings(max_examples=8)
@hypothesis.given(st.integers(0, 10**6), st.floats(0.05, 2.0), st.floats(0.01, 1.0))
def test_bounds_are_below_the_evidence_of_each(seed, lengthscale, noise):
    rng = np.random.default_rng(seed)
    lengthscales = lengthscale * np.array([[1.0], [5.0]])
    y = rng.normal(size=(Q, N))
    for bound, evidence in zip(*bounds_and_evidence(lengthscales, noise, y), strict=True):
        assert bound <= evidence + 1e-3 * abs(evidence)  # float32


def test_in_a_model_with_kernels_sampled_in_a_plate():
    def model(y):
        with numpyro.plate("functions", Q, dim=-2):
            lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("outputs", Q):
            numpyro.sample("Y", npgp.CollapsedGP(npgp.RBF(lengthscale), X, Z, noise_variance=0.1, outputs=Q), obs=y)

    @compiled
    def run():
        with handlers.trace() as trace, handlers.seed(rng_seed=0):
            model(jnp.asarray(Y))
        lengthscale = trace["lengthscale"]["value"]
        one_by_one = [npgp.CollapsedGP(npgp.RBF(l), X, Z, noise_variance=0.1) for l in lengthscale[:, 0]]
        return trace["Y"]["fn"].log_prob(Y), [gp.log_prob(y) for gp, y in zip(one_by_one, Y, strict=True)]

    found, expected = run()
    assert found.shape == (Q,) and abs(found[0] - found[1]) > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_wrong_shapes_are_errors_by_name():
    with pytest.raises(ValueError, match=r"RBF lengthscale has shape \(3, 1\).*plates of shape \(2, 1\)"):
        npgp.CollapsedGP(npgp.RBF(np.ones((3, 1))), X, Z, noise_variance=0.1, outputs=Q)
    with pytest.raises(ValueError, match=r"noise_variance has shape \(3, 1\); it must be"):
        npgp.CollapsedGP(KERNEL, X, Z, noise_variance=np.ones((3, 1)), outputs=Q)
    with pytest.raises(ValueError, match=r"y has shape \(8,\); it must be \(\.\.\., 2, 8\)"):
        npgp.CollapsedGP(KERNEL, X, Z, noise_variance=0.1, outputs=Q).log_prob(Y[0])
    with pytest.raises(ValueError, match="outputs is 2, but Softmax mixes"):
        npgp.CollapsedGP(KERNEL, X, Z, npgp.likelihoods.Softmax(Q), outputs=Q)


def test_outputs_that_share_all_are_as_without_saying_how_many(float64):
    together, each = (
        npgp.CollapsedGP(npgp.RBF(0.8), X, Z, noise_variance=0.1, outputs=outputs) for outputs in (None, Q)
    )
    np.testing.assert_allclose(each.condition(Y).mean(X), together.condition(Y).mean(X), rtol=1e-9)
