"""What training rows add to predictions: against the exact GP given the inducing values, and dense algebra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import npgp
from npgp import likelihoods
from npgp.kernels import Matern32
from npgp.sparse.groups import consecutive, median_split, single
from npgp.sparse.projection import factorize
from npgp.variational import DenseNormal, MeanOnlyNormal
from npgp.variational.posterior import Posterior, exact_variance, local_correction

FORMULA = functools.partial(oracles.stationary, "Matern32", lengthscale=0.8, variance=1.5)
KERNEL = Matern32(0.8, variance=1.5)
NOISE = 0.1


def problem(N=14):
    rng = np.random.default_rng(3)
    X = rng.uniform(-3, 3, size=(N, 1))
    new = np.linspace(-3.3, 3.3, 9)[:, None]
    return X, np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=N), np.array([[-2.0], [0.1], [1.5]]), new


def posterior_of(inducing, q):
    return Posterior(factorize(KERNEL, [npgp.features.Points(Z) for Z in inducing], 1e-12), q)


def members(groups):
    return [rows[mask] for rows, mask in zip(groups.rows, groups.mask, strict=True)]


@pytest.mark.parametrize("size", [14, 4])
def test_given_the_inducing_values_it_is_the_exact_gp_of_the_group(float64, size):
    # With q(ε) a point, the only uncertainty is the residual's, and the group's rows are observed with noise.
    X, y, Z, new = problem()
    groups = median_split(X, size)
    m = np.array([0.4, -0.7, 1.1])
    u = np.linalg.cholesky(FORMULA(Z, Z)) @ m

    @jax.jit
    def predict(y):
        posterior = posterior_of([Z], (DenseNormal(jnp.asarray(m), 1e-9 * jnp.eye(3)),))
        corrected = local_correction(posterior, X, y, likelihoods.Gaussian(variance=NOISE), groups, offset=0.5)
        return corrected.mean_and_variance(new), groups.assign(new)

    (mean, variance), assigned = predict(y)
    assert len(set(np.asarray(assigned).tolist())) == groups.count
    for i, g in enumerate(assigned):
        rows = members(groups)[g]
        seen, values = np.concatenate([Z, X[rows]]), np.concatenate([u, y[rows] - 0.5])
        noise = np.concatenate([np.full(3, 1e-14), np.full(len(rows), NOISE)])
        at = new[i : i + 1]
        expected = oracles.gp_posterior(FORMULA(seen, seen), FORMULA(at, seen), FORMULA(at, at), values, noise)
        np.testing.assert_allclose(mean[i], expected[0][0], atol=1e-6)
        np.testing.assert_allclose(variance[i], expected[1][0, 0], atol=1e-6)


@pytest.mark.parametrize("name", ["gaussian", "beta"])
def test_rows_that_are_not_observed_correct_nothing(name, float64):
    """Whatever the support: 1 is no value of a Beta distribution."""
    X, y, Z, new = problem()
    likelihood = likelihoods.Gaussian(variance=NOISE) if name == "gaussian" else likelihoods.Beta(concentration=4.0)
    y = y if name == "gaussian" else 1.0 / (1.0 + np.exp(-y))
    present = np.arange(len(y)) % 3 != 1
    q = (DenseNormal(jnp.array([0.4, -0.7, 1.1]), 0.3 * jnp.eye(3)),)

    def predict(X, y, groups, mask):
        return local_correction(posterior_of([Z], q), X, y, likelihood, groups, mask=mask).mean_and_variance(new)

    found = predict(X, np.where(present, y, 7.0), single(len(y)), present)
    expected = predict(X[present], y[present], single(int(present.sum())), None)
    np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("kind", ["dense", "mean-only"])
def test_exact_variance_is_that_of_the_q_with_a_full_residual(float64, kind):
    # q(f*, f) = ∫ q(ε) p(f* | f, ε) N(r; 0, (D⁻¹ + Λ)⁻¹): written out with all rows.
    X, y, Z, new = problem()
    O = np.array([[-1.0], [2.4]])

    def predict(y):
        gp = npgp.CollapsedGP(KERNEL, X, [Z, O], noise_variance=NOISE, covariances=("dense", kind), jitter=1e-12)
        posterior = gp.condition(y)
        corrected = exact_variance(posterior, X, y, likelihoods.Gaussian(variance=NOISE))
        return corrected.mean_and_variance(new), posterior.mean_and_variance(new)

    (mean, variance), plain = jax.jit(predict)(y)
    joint = oracles.Joint.of(FORMULA, [Z, O], np.concatenate([X, new]))
    learned = [True, kind == "dense"]
    D = joint.residual(learned)
    train, test = slice(0, len(X)), slice(len(X), None)
    less = D[test, train] @ np.linalg.solve(D[train, train] + NOISE * np.eye(len(X)), D[train, test])
    np.testing.assert_allclose(mean, plain[0], rtol=1e-12)
    np.testing.assert_allclose(variance, plain[1] - np.diag(less), rtol=1e-6, atol=1e-8)
    assert np.max(np.diag(less)) > 0.05


def test_mean_only_blocks_and_several_outputs(float64):
    # The mean's correction is of what all blocks leave, the variance's of what the learned ones do.
    X, y, Z, new = problem()
    O = np.array([[-1.0], [2.4]])
    Y = np.stack([y, np.cos(X[:, 0])])

    @jax.jit
    def predict(Y):
        gp = npgp.CollapsedGP(KERNEL, X, [Z, O], noise_variance=NOISE, covariances=("dense", "mean-only"), jitter=1e-12)
        posterior = gp.condition(Y)
        return (
            local_correction(posterior, X, Y, likelihoods.Gaussian(variance=NOISE), single(len(X))).mean_and_variance(
                new
            ),
            posterior.mean_and_variance(new),
            posterior.mean(X),
        )

    (mean, variance), plain, fitted = predict(Y)
    joint = oracles.Joint.of(FORMULA, [Z, O], np.concatenate([X, new]))
    train, test = slice(0, len(X)), slice(len(X), None)
    left, first = joint.residual(), joint.residual([True, False])
    noise = NOISE * np.eye(len(X))
    for i in range(2):
        more = left[test, train] @ np.linalg.solve(left[train, train] + noise, Y[i] - fitted[i])
        np.testing.assert_allclose(mean[i], plain[0][i] + more, atol=1e-7)
        less = first[test, train] @ np.linalg.solve(first[train, train] + noise, first[train, test])
        np.testing.assert_allclose(variance[i], plain[1][i] - np.diag(less), atol=1e-7)


def test_heavy_tails_by_dense_algebra_at_their_precisions(float64):
    X, y, Z, new = problem()
    likelihood = npgp.StudentT(df=4.0, scale=0.3)
    mask = np.arange(len(y)) % 5 != 0
    groups = median_split(X, 7)

    @jax.jit
    def predict(y):
        q = (DenseNormal(jnp.array([0.4, -0.7, 1.1]), 0.3 * jnp.eye(3)),)
        corrected = local_correction(posterior_of([Z], q), X, y, likelihood, groups, mask=mask)
        return corrected.mean_and_variance(new), corrected.posterior.mean_and_variance(new), corrected

    (mean, variance), plain, corrected = predict(np.where(mask, y, -1))
    assigned = groups.assign(new)
    D = oracles.Joint.of(FORMULA, [Z], np.concatenate([X, new])).residual()
    felt_in_all = 0
    for i, g in enumerate(assigned):
        rows, at = members(groups)[g], len(X) + i
        precision = np.square(np.asarray(corrected.root[g])[groups.mask[g]])
        felt = precision > 0
        assert np.all(felt <= mask[rows])  # an outlier has none
        felt_in_all += np.sum(felt)
        inverse = np.linalg.inv(D[np.ix_(rows, rows)][np.ix_(felt, felt)] + np.diag(1 / precision[felt]))
        c = D[at, rows][felt]
        np.testing.assert_allclose(variance[i], plain[1][i] - c @ inverse @ c, rtol=1e-8)
    assert felt_in_all > 0 and np.max(np.abs(mean - plain[0])) > 0.05
    # Towards the data: a corrected fit explains the rows that it was corrected by better.
    at_data = jax.jit(lambda: (corrected.mean(X), corrected.posterior.mean(X)))()
    error = [np.mean(np.abs(fit - y)[mask]) for fit in at_data]
    assert error[0] < 0.9 * error[1]


def test_bad_input():
    X, y, Z, _ = (np.asarray(v, np.float32) for v in problem())
    posterior = Posterior(factorize(KERNEL, [npgp.features.Points(Z)]), (MeanOnlyNormal(jnp.zeros(3)),))
    noise = likelihoods.Gaussian(variance=NOISE)
    for arguments, words in [
        ((X, y[:5], noise, single(14)), r"y has shape \(5,\)"),
        ((X, y, noise, single(13)), "partition of 13 rows, but X has 14"),
        ((X, y, noise, consecutive(14, 7)), "made without inputs"),
        ((X, np.where(y > 0, np.nan, y), noise, single(14)), "y has NaN"),
        ((X[:, 0], y, noise, single(14)), "X has shape"),
    ]:
        with pytest.raises(ValueError, match=words):
            local_correction(posterior, *arguments)
