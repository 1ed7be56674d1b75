"""The posterior of f against dense Gaussian algebra: moments, draws, sample paths, derivatives and parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from test_variational import (
    SIZES,
    assert_moments,
    cast,
    compute,
    covariance_of,
    kernel_and_formula,
    make,
    parameters,
    problem,
)

from npgp.features import Points
from npgp.posteriors import Posterior
from npgp.projection import Projector
from npgp.variational import DenseNormal, DiagonalNormal, MeanOnlyNormal


def projector_of(joint, inducing, dtype=np.float64):
    """What ``factorize`` makes (as its own tests say), from the dense factor: without jitter and quick to compile."""
    L, rows = joint.factor.astype(dtype), joint.slices
    return Projector(
        kernel_and_formula()[0],
        tuple(Points(Z.astype(dtype)) for Z in inducing),
        tuple(L[r, r] for r in rows),
        tuple(tuple(L[r, columns].T for columns in rows[:i]) for i, r in enumerate(rows)),
        (0.0,) * len(rows),
    )


@jax.jit
def predict_jitted(posterior, X):
    return posterior.mean_and_variance(X), posterior.covariance(X), posterior.kl()


def predict(posterior, X):
    return jax.tree.map(np.asarray, predict_jitted(posterior, X))


@pytest.mark.parametrize("kinds", [("dense", "dense"), ("dense", "diagonal", "prior"), ("prior",)], ids="+".join)
def test_posterior_is_dense_algebra(x64, kinds):
    inducing, X, joint = problem(len(kinds))
    values = [parameters(kind, size=size) for kind, size in zip(kinds, SIZES, strict=False)]
    q = tuple(make(kind, *cast(x64, value)) for kind, value in zip(kinds, values, strict=True))
    posterior = Posterior(projector_of(joint, inducing, x64), q)
    (mean, variance), covariance, kl = predict(posterior, X.astype(x64))
    assert mean.dtype == variance.dtype == covariance.dtype == x64
    S = [covariance_of(kind, *value) for kind, value in zip(kinds, values, strict=True)]
    expected_mean, expected_covariance = joint.predict([value[0] for value in values], S)
    close = functools.partial(np.testing.assert_allclose, atol=1e-9 if x64 == jnp.float64 else 2e-5)
    close(mean, expected_mean)
    close(covariance, expected_covariance)
    close(variance, np.diag(expected_covariance))
    expected_kl = sum(oracles.kl_normal(value[0], cov) for value, cov in zip(values, S, strict=True))
    np.testing.assert_allclose(kl, expected_kl, rtol=1e-5 if x64 == jnp.float32 else 1e-10)
    if kinds == ("prior",):
        alone = jax.jit(lambda p, X: (p.mean(X), p.variance(X)))(posterior, X.astype(x64))
        close(alone[0], mean)
        close(alone[1], variance)


def test_posterior_of_several_outputs_is_each_ones(float64):
    kinds = ("dense", "diagonal", "prior")
    inducing, X, joint = problem(3)
    values = [parameters(kind, batch=(2,), size=size) for kind, size in zip(kinds, SIZES, strict=True)]

    def posterior(values):
        q = tuple(make(kind, *value) for kind, value in zip(kinds, values, strict=True))
        return Posterior(projector_of(joint, inducing), q)

    together = predict(posterior(values), X)
    for i in range(2):
        alone = predict(posterior([[v[i] for v in value] for value in values]), X)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-9), together, alone)


def test_q_at_the_prior_is_the_gp_prior(float64):
    inducing, X, joint = problem(3)
    zeros = [np.zeros(size) for size in SIZES]
    q = (DenseNormal(zeros[0], np.eye(4)), DiagonalNormal(zeros[1], np.ones(3)), MeanOnlyNormal(zeros[2]))
    (mean, variance), covariance, kl = predict(Posterior(projector_of(joint, inducing), q), X)
    np.testing.assert_array_equal(mean, 0.0)
    np.testing.assert_allclose(covariance, joint.K_ff, atol=1e-12)
    np.testing.assert_allclose(variance, 1.7, rtol=1e-12)
    np.testing.assert_allclose(kl, 0.0, atol=1e-12)


def test_draws_are_joint(x64):
    # Two inputs nearly coincide: joint draws of f agree there, which draws from marginals would not.
    inducing, X, joint = problem(2, rows=5)
    X = np.concatenate([X, X[:1] + 1e-3])
    joint_at_X = oracles.Joint.of(kernel_and_formula()[1], inducing, X)
    values = [parameters(kind, size=size) for kind, size in zip(("dense", "prior"), SIZES, strict=False)]
    q = (DenseNormal(*cast(x64, values[0])), MeanOnlyNormal(*cast(x64, values[1])))
    posterior = Posterior(projector_of(joint, inducing, x64), q)
    draws = compute(lambda p, X: p.sample(jax.random.key(1), X, (20_000,)), posterior, X.astype(x64))
    assert draws.shape == (20_000, 6) and draws.dtype == x64
    S = [covariance_of("dense", *values[0]), np.eye(SIZES[1])]
    mean, covariance = joint_at_X.predict([value[0] for value in values], S)
    assert_moments(draws, mean, covariance)
    assert np.corrcoef(draws[:, 0], draws[:, -1])[0, 1] > 0.999


def test_bad_inputs_of_predictions_are_refused():
    inducing, X, joint = problem(1)
    q = (MeanOnlyNormal(np.zeros(SIZES[0], np.float32)),)
    posterior = Posterior(projector_of(joint, inducing, np.float32), q)
    for method in (posterior.mean, posterior.variance, posterior.covariance, posterior.mean_and_variance):
        with pytest.raises(ValueError, match=r"X has shape \(8,\)"):
            method(X[:, 0])
        with pytest.raises(TypeError, match="X has dtype int"):
            method(X.astype(int))
        with pytest.raises(ValueError, match="X has NaN"):
            method(X * np.nan)
    assert posterior.jitter is posterior.projector.jitter


def test_posteriors_may_be_mapped_and_differentiated(float64):
    inducing, X, joint = problem(1)
    projector = projector_of(joint, inducing)
    means = np.random.default_rng(0).normal(size=(3, SIZES[0]))

    @jax.jit
    @jax.vmap
    def gradients(mean):
        posterior = Posterior(projector, (MeanOnlyNormal(mean),))
        return posterior, jax.grad(lambda p: -jnp.sum(p.mean(X)))(posterior)

    # Rebuilt with a leading axis on every leaf; and a gradient is a posterior again, of slopes.
    batch, slopes = gradients(means)
    assert isinstance(batch, Posterior) and isinstance(slopes, Posterior)
    np.testing.assert_array_equal(batch.q[0].loc, means)
    np.testing.assert_allclose(slopes.q[0].loc, np.tile(-joint.A[0].sum(-1), (3, 1)), atol=1e-9)
