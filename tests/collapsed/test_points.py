"""Enough inducing points: gains are dense algebra, and too few are said to be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from scipy import optimize

import npgp
from npgp.collapsed import enough_points, lengthscales, points
from npgp.collapsed.lengthscales import DIVISORS, NOISES, VARIANCES
from npgp.features import Points
from npgp.kernels import RBF, Linear, Matern32
from npgp.sparse.projection import factorize
from npgp.variational import MeanOnlyNormal
from npgp.variational.averages import PosteriorMixture
from npgp.variational.posterior import Posterior

SIDE = 14
AXIS = (np.arange(SIDE) + 0.5) / SIDE
CELLS = np.stack(np.meshgrid(AXIS, AXIS), -1).reshape(-1, 2).astype(np.float32)


def spread(side):
    """Inducing points, side by side."""
    axis = (np.arange(side) + 0.5) / side
    return np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2).astype(np.float32)


def counts(lengthscale):
    """Like the pines: counts of cells, of a log-Gaussian intensity."""
    rng = np.random.default_rng(1)
    K = 1.5 * oracles.stationary("Matern32", CELLS.astype(float), CELLS.astype(float), lengthscale)
    f = np.linalg.cholesky(K + 1e-9 * np.eye(len(CELLS))) @ rng.normal(size=len(CELLS))
    return rng.poisson(np.exp(f - 0.5)).astype(np.float32)


def untrained(kernel, Z):
    """A posterior that is its prior's mean."""
    return Posterior(factorize(kernel, (Points(Z),)), (MeanOnlyNormal(jnp.zeros(len(Z))),))


@functools.cache
def report(truth, given, side):
    """Of counts with one lengthscale, and the best q(ε) at another."""
    y, kernel = counts(truth), Matern32(given, variance=1.5)
    start = npgp.CollapsedGP(kernel, CELLS, spread(side), noise_variance=1e6).condition(np.zeros(len(y), np.float32))
    level = np.log(y.mean())
    posterior = start.update(CELLS, y, npgp.Poisson(), offset=level)
    return enough_points(posterior, CELLS, y, npgp.Poisson(), offset=level)


def test_too_few_points_are_said_to_be():
    all_found = report(0.08, 1.0, 5)
    assert not all_found.enough and all_found.approximate and all_found.rows == 196 and all_found.points_needed > 25
    assert all_found.lengthscale < 0.5 and all_found.gain_trained > 1.96
    found = all_found.shorter
    assert found.divisor in (4.0, 8.0, 16.0) and found.gain > 10 and found.too_few and found.approximate
    assert found.features == 25 and found.unexplained > 0.5
    # So many are enough: the greedy points leave a tenth, and one fewer leave more.
    kernel = Matern32(1.0 / found.divisor, variance=1.5)
    for size, enough in ((found.points_needed, True), (found.points_needed - 1, False)):
        Z = npgp.inducing.greedy_variance(kernel, CELLS, size)
        A = oracles.Joint.of(
            functools.partial(oracles.stationary, "Matern32", lengthscale=1.0 / found.divisor),
            [np.asarray(Z, float)],
            CELLS.astype(float),
            1e-5,
        )
        assert (np.mean(np.diag(A.residual())) < 0.1) == enough
    assert 25 < found.points_needed < len(CELLS)
    words = str(found)
    assert words.startswith(f"Lengthscales of 1/{found.divisor:.0f} of those at hand explain 196 rows better, by ")
    assert "by Gaussian pseudo-observations" in words and "does not find them: they are too few, and some" in words


def test_enough_points_are_said_to_be():
    assert report(1.0, 1.0, 5).enough and str(report(1.0, 1.0, 5)).endswith("\nThey are enough.")
    found = report(1.0, 1.0, 5).shorter  # as few, of counts that need no more
    assert found.divisor == 1.0 and found.gain < 5 and not found.too_few and found.points_needed is None
    assert str(found).startswith("No shorter lengthscales explain 196 rows clearly better")
    assert "At the lengthscales at hand the 25 inducing features leave" in str(found) and "too few" not in str(found)


def test_points_that_are_too_few_at_the_lengthscale_at_hand():
    assert not report(0.08, 0.08, 5).enough
    found = report(0.08, 0.08, 5).shorter
    assert found.divisor == 1.0 and found.too_few and found.points_needed > 25
    assert "At the lengthscales at hand the 25 inducing features leave" in str(found) and "too few" in str(found)


def test_points_that_could_follow():
    found = dataclasses.replace(report(0.08, 1.0, 5).shorter, unexplained=0.05, points_needed=None)
    assert "leave 5% of the prior variance unexplained, so that it is training that has not found them" in str(found)


@pytest.mark.parametrize("rows", [60, 30])  # all rows, and groups of them
def test_gains_are_dense_algebra(rows, x64, monkeypatch):
    monkeypatch.setattr(lengthscales, "GROUP_ROWS", rows)
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0, 10, size=(60, 1)), axis=0).astype(x64)
    noise = np.exp(rng.normal(-2, 0.5, size=60))
    y = (np.sin(4 * X[:, 0]) + np.sqrt(noise) * rng.normal(size=60) + 2.0).astype(x64)
    y[7] = np.nan
    kernel = RBF(3.0, variance=0.4) + Linear(variance=1e-9)
    posterior = untrained(kernel, X[::10])
    likelihood = npgp.Gaussian(variance=jnp.asarray(noise, x64))
    found = enough_points(posterior, X, y, likelihood, offset=2.0, mask=~np.isnan(y)).shorter

    groups = [np.arange(60)] if rows == 60 else [np.arange(30), np.arange(30, 60)]

    def evidence(divisor, factor, noise_factor):
        total = 0.0
        for group in groups:
            kept = group[group != 7]
            K = oracles.stationary("RBF", X[kept].astype(float), X[kept].astype(float), 3.0 / divisor, 0.4 * factor)
            total += oracles.log_normal(y[kept].astype(float) - 2.0, K + noise_factor * np.diag(noise[kept]))
        return total

    best = np.array([max(evidence(divisor, v, n) for v in VARIANCES for n in NOISES) for divisor in DIVISORS])
    gains = best[1:] - best[0]
    chosen = np.flatnonzero(gains >= gains.max() - 2.0)[0]
    assert found.divisor == DIVISORS[1 + chosen] > 1 and found.rows == 60 and not found.approximate
    assert found.gain == pytest.approx(gains[chosen], abs=1e-2 if x64 == jnp.float32 else 1e-5)


def test_certificates_say_so_too(float64):
    rng = np.random.default_rng(0)
    X, noise = np.linspace(0, 10, 80)[:, None], 0.1 * rng.normal(size=80)
    # Trained on too few points, a long lengthscale leaves everything to the noise.
    few = npgp.certificate(RBF(5.0), X, np.sin(6 * X[:, 0]) + noise, X[::10], noise_variance=0.6)
    assert few.lengthscales.too_few and few.lengthscales.points_needed > 10
    assert str(few).endswith(str(few.lengthscales))
    enough = npgp.certificate(RBF(2.0), X, np.sin(X[:, 0]) + noise, X[::10], noise_variance=0.01)
    assert enough.lengthscales.divisor == 1 and "shorter" not in str(enough)


# ---------------------------------------------------------------------------------------------------------------
# Bounds


def bound(Z, X, y, noise, lengthscale, variance):
    """The tight collapsed bound of one dense block."""
    kernel = functools.partial(oracles.stationary, "Matern32", lengthscale=lengthscale, variance=variance)
    return oracles.Joint.of(kernel, [Z], X, 1e-10).bound(y, noise, [True], "tight")


def test_gains_are_those_of_dense_bounds(float64):
    rng = np.random.default_rng(1)
    X = np.sort(rng.uniform(0, 6, size=(18, 1)), axis=0)
    noise = np.exp(rng.normal(-2, 0.3, size=18))
    y = np.sin(3 * X[:, 0]) + np.sqrt(noise) * rng.normal(size=18)
    y[5] = np.nan
    kept, Z = np.arange(18) != 5, np.linspace(0, 6, 17)[:, None] / 3  # of which but a third has points
    posterior = npgp.CollapsedGP(Matern32(0.5), X[kept], Z, noise_variance=noise[kept]).condition(y[kept])
    found = enough_points(posterior, X, y + 2.0, npgp.Gaussian(variance=noise), offset=2.0, mask="nan")

    def evidence(lengthscale, variance, share):
        K = oracles.stationary("Matern32", X[kept], X[kept], lengthscale, variance)
        return oracles.log_normal(y[kept], K + share * np.diag(noise[kept]))

    def of_points(lengthscale, variance, share):
        return bound(Z, X[kept], y[kept], share * noise[kept], lengthscale, variance)

    def highest(value):
        loss = lambda logs: -value(*np.exp(logs))  # noqa: E731
        options = {"maxiter": 2000, "xatol": 1e-7, "fatol": 1e-10}
        return optimize.minimize(loss, np.zeros(3), method="Nelder-Mead", options=options)

    # As many points as there are different rows: with all of them the bound is the evidence.
    assert found.more == found.features == found.rows == 17
    assert found.gain == pytest.approx(evidence(0.5, 1, 1) - of_points(0.5, 1, 1), abs=1e-5)
    best = highest(evidence)
    assert found.gain_trained == pytest.approx(highest(of_points).fun - best.fun, abs=1e-3)
    assert found.lengthscale == found.counted_at == pytest.approx(2 * np.exp(best.x[0]), rel=1e-2)
    assert found.shorter.divisor == 1
    kernel = functools.partial(oracles.stationary, "Matern32", lengthscale=np.exp(best.x[0]))
    left = np.diag(oracles.Joint.of(kernel, [Z], X[kept], 1e-10).residual())
    assert found.unexplained == pytest.approx(left.mean(), rel=1e-2)
    ratio = np.exp(best.x[1] - best.x[2]) * left / noise[kept]
    assert found.of_noise == pytest.approx(ratio.mean(), rel=2e-2)
    assert not found.enough and found.points_needed <= 17


@functools.cache
def grid(spacing, lengthscale, **options):
    """What is said of a function of lengthscale 1, and points in a grid."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0, 20, size=(240, 1)), axis=0)
    K = oracles.stationary("Matern32", X, X)
    y = np.linalg.cholesky(K + 0.1 * np.eye(240)) @ rng.normal(size=240)
    gp = npgp.CollapsedGP(Matern32(lengthscale), X, np.arange(0, 20.1, spacing)[:, None], noise_variance=0.1)
    return enough_points(gp.condition(y), X, y, npgp.Gaussian(variance=0.1), **options)


def test_points_further_apart_than_a_lengthscale(float64):
    few, many = grid(2.0, 2.7), grid(0.25, 1.0)
    assert not few.enough and min(few.gain, few.gain_trained) > 2.4 and few.of_noise > 0.5
    assert str(few.points_needed) in str(few).splitlines()[-1] and "too few" in str(few)
    assert many.enough and many.gain < 2.4 and many.points_needed is None and many.of_noise < 0.1
    assert not grid(0.25, 1.0, tolerance=1e-6).enough


def test_points_are_counted_where_neighbors_say_and_not_where_far_too_few_of_them_do(float64):
    """Twice as many are too few, too: training anew gives all to a lengthscale or a noise of no meaning."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 10.0, (60, 1)), axis=0)
    y = np.sin(8.0 * X[:, 0]) + 0.05 * rng.normal(size=60)
    gp = npgp.CollapsedGP(RBF(0.2), X, np.linspace(0.0, 10.0, 5)[:, None], noise_variance=0.01)
    found = enough_points(gp.condition(y), X, y, npgp.Gaussian(variance=0.01))
    assert not found.enough and found.counted_at == 1.0 and 20 < found.points_needed <= 60


def test_a_part_of_the_rows_stands_for_all(float64, monkeypatch):
    whole = grid(2.0, 2.7)
    monkeypatch.setattr(points, "MOST_ROWS", 120)
    part = grid.__wrapped__(2.0, 2.7)
    assert part.rows == whole.rows == 240 and not part.enough
    # Half of the rows, twice each: as much noise again is between the two.
    assert part.gain_trained == pytest.approx(whole.gain_trained, rel=0.5)


def test_what_is_refused():
    X, y = np.linspace(0, 1, 5, dtype=np.float32)[:, None], np.zeros(5, np.float32)
    posterior, noise = untrained(RBF(), X[:2]), npgp.Gaussian(variance=1.0)
    mixture = PosteriorMixture(posterior, {}, 1, (False,) * len(jax.tree.leaves(posterior)))
    for error, words, arguments in (
        (ValueError, r"y has shape \(4,\); it must be \(5,\)", (posterior, X, y[:4], noise)),
        (ValueError, "2 latent values", (posterior, X, y, npgp.likelihoods.HeteroscedasticGaussian())),
        (ValueError, "y has NaN", (posterior, X, y * np.nan, noise)),
        (ValueError, "0 or 1", (posterior, X, y + 2, npgp.Bernoulli())),
        (TypeError, r"posterior is a PosteriorMixture; .* such as npgp.posterior\(", (mixture, X, y, noise)),
    ):
        with pytest.raises(error, match=words):
            enough_points(*arguments)
    with pytest.raises(ValueError, match="tolerance is 0"):
        enough_points(posterior, X, y, noise, tolerance=0)
    with pytest.raises(TypeError, match="traced values"):
        jax.jit(lambda y: enough_points(posterior, X, y, noise).gain)(y)
