"""New rows of a GPLVM: where they lie and what they miss, against closed forms and brute force on a grid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from models import compiled, log_normal, rbf
from numpy.polynomial.hermite_e import hermegauss
from scipy import stats

import npgp
from npgp.gplvm import latent_search
from npgp.gplvm.latent_search import minimize, normal_rule
from npgp.gplvm.new_rows import NewRows, infer_latents
from npgp.likelihoods import Columns

NOISE = 0.01


def condition(kernel, X, Y, inducing, noise, dtype=float):
    """The posterior of the columns' functions at known latents."""
    arrays = [jnp.asarray(np.array(array), dtype) for array in (X, Y.T, inducing)]
    return compiled(lambda X, Y, Z: npgp.CollapsedGP(kernel, X, Z, noise_variance=noise, jitter=1e-6).condition(Y))(
        *arrays
    )


# ---------------------------------------------------------------------------------------------------------------
# Linear functions, known all but exactly: factor analysis, whose posterior is Gaussian


class Factors:
    """Five rows of six columns, the last row without any entry, in three latent dimensions."""

    rows, columns, latent_dim = 5, 6, 3

    def __init__(self):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(40, self.latent_dim))
        self.loadings = rng.normal(size=(self.latent_dim, self.columns))
        self.training = X, X @ self.loadings, np.eye(self.latent_dim)
        self.noise = rng.uniform(0.2, 0.6, self.columns)
        self.offset = rng.normal(size=self.columns)
        self.mask = rng.uniform(size=(self.rows, self.columns)) < 0.6
        self.mask[0], self.mask[-1] = True, False
        latents = rng.normal(size=(self.rows, self.latent_dim))
        noise = np.sqrt(self.noise) * rng.normal(size=(self.rows, self.columns))
        self.Y = np.where(self.mask, latents @ self.loadings + self.offset + noise, np.nan)
        self.prior = rng.normal(size=(self.rows, self.latent_dim)), rng.uniform(0.5, 2.0, (self.rows, self.latent_dim))

    def posterior(self, dtype=float):
        return condition(npgp.kernels.Linear(), *self.training, 1e-6, dtype)

    def exact(self, row, loc=0.0, scale=1.0):
        """Mean and precision of p(x | y), and log p(y)."""
        present = self.mask[row]
        W, noise = self.loadings[:, present], np.diag(self.noise[present])
        scale = np.broadcast_to(scale, self.latent_dim)
        loc = np.broadcast_to(loc, self.latent_dim)
        precision = np.diag(scale**-2.0) + W @ np.linalg.inv(noise) @ W.T
        y = (self.Y[row] - self.offset)[present]
        mean = np.linalg.solve(precision, loc / scale**2 + W @ (y / self.noise[present]))
        evidence = 0.0
        if present.any():
            evidence = stats.multivariate_normal.logpdf(y, loc @ W, W.T @ np.diag(scale**2) @ W + noise)
        return mean, precision, evidence


FACTORS = Factors()


def infer_factors(dtype, **options):
    likelihood = npgp.Gaussian(variance=jnp.asarray(FACTORS.noise[:, None], dtype))
    model = dict(mask=FACTORS.mask, offset=FACTORS.offset)
    posterior = FACTORS.posterior(dtype)
    rows = infer_latents(posterior, likelihood, FACTORS.Y, **model, **options, num_starts=2, num_modes=2, num_nodes=6)
    return posterior, likelihood, rows


@pytest.mark.parametrize("full, x64", [(False, True), (True, False)], indirect=["x64"])
def test_linear_functions_have_the_posterior_of_factor_analysis(full, x64):
    tolerance = 2e-3 if x64 == jnp.float32 else 1e-4
    posterior, likelihood, rows = infer_factors(x64, full=full, tolerance=1e-9)
    assert rows.loc.dtype == rows.elbo.dtype == x64
    assert np.all(np.isneginf(rows.modes.elbo[1]))  # the one optimum is not looked for twice
    mean, variance = rows.predict(posterior, likelihood, offset=FACTORS.offset)
    for row in range(FACTORS.rows):
        loc, precision, evidence = FACTORS.exact(row)
        np.testing.assert_allclose(rows.loc[row], loc, atol=tolerance)
        if full:
            factor = np.asarray(rows.scale[row], float)
            np.testing.assert_allclose(factor, np.tril(factor))
            covariance, elbo = np.linalg.inv(precision), evidence
        else:  # mean field: the precision's diagonal
            factor = np.diag(np.asarray(rows.scale[row], float))
            covariance = np.diag(1.0 / np.diag(precision))
            elbo = evidence - 0.5 * (np.sum(np.log(np.diag(precision))) - np.linalg.slogdet(precision)[1])
        np.testing.assert_allclose(factor @ factor.T, covariance, atol=tolerance)
        np.testing.assert_allclose(rows.elbo[row], elbo, atol=10 * tolerance)
        W = FACTORS.loadings
        np.testing.assert_allclose(mean[row], loc @ W + FACTORS.offset, atol=10 * tolerance)
        expected = np.sum(W * (covariance @ W), 0) + FACTORS.noise
        np.testing.assert_allclose(variance[row], expected, rtol=10 * tolerance)


def test_each_row_may_have_its_own_prior(float64):
    loc, scale = FACTORS.prior
    _, _, rows = infer_factors(float64, prior=dist.Normal(loc, scale).to_event(1), tolerance=1e-9)
    for row in range(FACTORS.rows):
        mean, precision, evidence = FACTORS.exact(row, loc[row], scale[row])
        np.testing.assert_allclose(rows.loc[row], mean, atol=1e-4)
        covariance = rows.scale[row] @ rows.scale[row].T
        np.testing.assert_allclose(covariance, np.linalg.inv(precision), atol=1e-4)
        np.testing.assert_allclose(rows.elbo[row], evidence, atol=1e-4)


def test_without_entries_the_modes_are_those_of_the_prior(float64):
    means, scales, weights = np.array([[-6.0, 0, 1], [5.0, 2, 0]]), np.array([[0.5, 1, 2], [1, 0.3, 1]]), [0.3, 0.7]
    parts = dist.Normal(means, scales).to_event(1)
    prior = dist.MixtureSameFamily(dist.Categorical(jnp.array(weights)), parts)
    _, _, rows = infer_factors(float64, prior=prior, candidates=means + 0.1, tolerance=1e-8)
    found = np.asarray(rows.modes.weight[:, -1])
    np.testing.assert_allclose(found[found > 0], [0.7, 0.3], atol=1e-4)
    for i, part in zip(np.flatnonzero(found), [1, 0], strict=True):
        np.testing.assert_allclose(rows.modes.loc[i, -1], means[part], atol=1e-3)
        np.testing.assert_allclose(rows.modes.scale[i, -1], np.diag(scales[part]), atol=1e-3)
        np.testing.assert_allclose(rows.modes.elbo[i, -1], np.log(weights[part]), atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------
# One latent dimension, where all integrals are sums over a grid

GRID = np.linspace(-7.0, 7.0, 2001)
CURVES = np.linspace(-3.0, 3.0, 60)[:, None]


@functools.cache
def curves():
    """cos(2x), sin(x) and x/2, known well in [−3, 3] and hardly beyond."""
    x = CURVES[:, 0]
    Y = np.stack([np.cos(2 * x), np.sin(x), 0.5 * x], 1)
    return condition(npgp.RBF(0.8), CURVES, Y, CURVES[::4], 1e-3)


class Grid:
    """p(x | y) of one row, whose columns have these log p(y | f)."""

    def __init__(self, posterior, log_probs, present, prior=(0.0, 1.0)):
        points = jnp.asarray(GRID[:, None])
        self.mean, self.variance = (np.asarray(a) for a in jax.jit(posterior.mean_and_variance)(points))
        z, weights = hermegauss(100)
        f = self.mean[..., None] + np.sqrt(self.variance)[..., None] * z
        terms = [np.log(np.exp(log_prob(f[d])) @ (weights / weights.sum())) for d, log_prob in enumerate(log_probs)]
        self.log_joint = np.sum(np.array(terms)[present], 0) + log_normal(GRID, prior[0], prior[1] ** 2)
        self.step = GRID[1] - GRID[0]
        weight = np.exp(self.log_joint - self.log_joint.max())
        self.evidence = self.log_joint.max() + np.log(weight.sum() * self.step)
        self.weight = weight / weight.sum()

    def elbo(self, loc, scale):
        loc, scale = np.atleast_1d(loc)[:, None], np.atleast_1d(scale)[:, None]
        z = np.linspace(-5.5, 5.5, 400)
        weight = np.exp(-0.5 * z**2)
        values = np.interp(loc + scale * z, GRID, self.log_joint) @ (weight / weight.sum())
        return values + np.log(scale[:, 0]) + 0.5 * (1 + np.log(2 * np.pi))

    def best_elbo(self):
        loc, scale = np.meshgrid(np.linspace(-3.2, 3.2, 321), np.geomspace(0.02, 1.5, 60))
        return self.elbo(loc.ravel(), scale.ravel()).max()

    def moments(self, column):
        """Of f."""
        mean = self.mean[column] @ self.weight
        return mean, (self.variance[column] + (self.mean[column] - mean) ** 2) @ self.weight


def test_the_best_of_all_gaussians_is_found(float64):
    posterior, noise = curves(), np.array([0.05, 0.1, 0.02])
    rng = np.random.default_rng(1)
    x = np.array([-2.0, 0.4, 1.3, 2.5])
    Y = np.stack([np.cos(2 * x), np.sin(x), 0.5 * x], 1) + np.sqrt(noise) * rng.normal(size=(4, 3))
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 1, 0], [1, 1, 0]], bool)
    likelihood = npgp.Gaussian(variance=jnp.asarray(noise[:, None]))
    rows = infer_latents(
        posterior, likelihood, Y, mask=mask, candidates=CURVES, num_starts=16, num_modes=4, tolerance=1e-7
    )
    mean, variance = rows.predict(posterior, offset=0.0)
    for row in range(4):
        log_probs = [lambda f, y=y, s=s: log_normal(y, f, s) for y, s in zip(Y[row], noise, strict=True)]
        grid = Grid(posterior, log_probs, mask[row])
        np.testing.assert_allclose(rows.elbo[row], grid.elbo(rows.loc[row], rows.scale[row, 0]), atol=2e-3)
        assert grid.best_elbo() - 2e-3 < rows.elbo[row] < grid.evidence
        for column in range(3):
            exact, spread = grid.moments(column)
            # A mixture of Gaussians is no exact posterior, but near: by .042, and by .033 where a variance is .14.
            np.testing.assert_allclose(mean[row, column], exact, atol=0.045)
            np.testing.assert_allclose(variance[row, column], spread, rtol=0.2, atol=0.012)


def test_two_places_that_explain_a_row_are_both_kept(float64):
    """cos(2x) = 0.5 has four solutions in [−3, 3]: with sin(x) > 0, x = π/6 and 5π/6."""
    posterior = curves()
    Y, mask = np.array([0.5, 0.5, 0.0]), np.array([True, True, False])
    likelihood = npgp.Gaussian(variance=0.003)
    rows = infer_latents(posterior, likelihood, Y, mask=mask, candidates=CURVES, num_starts=16, num_modes=4)
    assert rows.loc.shape == (1,) and rows.scale.shape == (1, 1) and rows.elbo.shape == ()
    log_probs = [lambda f, y=y: log_normal(y, f, 0.003) for y in Y]
    grid = Grid(posterior, log_probs, mask)
    left = grid.weight[np.pi / 2 > GRID].sum()
    weights, places = np.asarray(rows.modes.weight), np.asarray(rows.modes.loc[:, 0])
    np.testing.assert_allclose(places[weights > 1e-2], [np.pi / 6, 5 * np.pi / 6], atol=0.1)
    np.testing.assert_allclose(weights[weights > 1e-2], [left, 1 - left], atol=0.02)
    exact, spread = grid.moments(2)
    mean, variance = rows.predict(posterior)
    np.testing.assert_allclose([mean[2], variance[2]], [exact, spread], atol=0.02)
    assert NewRows(rows.loc, rows.scale).predict(posterior)[1][2] < 0.1 * spread  # the best alone

    filled, deviation = rows.impute(posterior, likelihood, Y, mask=mask)
    np.testing.assert_array_equal(filled[:2], Y[:2])
    np.testing.assert_array_equal(deviation[:2], 0.0)
    np.testing.assert_allclose([filled[2], deviation[2]], [mean[2], np.sqrt(variance[2] + 0.003)])
    draws = np.asarray(rows.sample(jax.random.key(0), posterior, likelihood, sample_shape=(4000,)))
    z = (draws.mean(0) - mean) / (draws.std(0) / np.sqrt(len(draws)))
    assert draws.shape == (4000, 3) and np.abs(z).max() < 4.0
    np.testing.assert_allclose(np.mean(draws[:, 2] < np.pi / 4), left, atol=0.04)


def test_a_start_of_ones_own_inside_jit(float64):
    posterior, likelihood = curves(), npgp.Gaussian(variance=0.003)
    Y, mask = np.array([[0.5, 0.5, 0.0]] * 2), np.array([[True, True, False]] * 2)
    start = np.array([[0.4], [2.7]])
    options = dict(mask=mask, start=start, prior=dist.Cauchy(jnp.zeros(1), 1.0).to_event(1), num_starts=0)
    run = compiled(lambda Y: infer_latents(posterior, likelihood, Y, **options))
    rows = run(jnp.asarray(Y))
    assert rows.modes.loc.shape == (2, 2, 1)  # from the prior's middle, as it has no mean, and from this
    np.testing.assert_allclose(rows.modes.loc[:, 0].min(), np.pi / 6, atol=0.1)
    np.testing.assert_allclose(rows.modes.loc[:, 1].max(), 5 * np.pi / 6, atol=0.1)


def test_draws_have_the_functions_own_uncertainty(float64):
    """Far from the data, where functions are not known; at latent points that are."""
    posterior, far = curves(), np.array([[4.5]])
    mean, variance = (np.asarray(a)[:, 0] for a in posterior.mean_and_variance(jnp.asarray(far)))
    rows = NewRows(jnp.asarray(far), jnp.full((1, 1), 1e-9))
    draws = np.asarray(rows.sample(jax.random.key(0), posterior, None, sample_shape=(4000,)))[:, 0]
    assert np.all(variance > 0.1)
    np.testing.assert_allclose(draws.mean(0), mean, atol=4 * np.sqrt(np.max(variance) / 4000))
    np.testing.assert_allclose(draws.var(0), variance, rtol=4 * np.sqrt(2 / 4000))


def test_columns_of_several_kinds(float64):
    posterior = curves()
    likelihood = Columns([npgp.Bernoulli("probit"), npgp.Gaussian(variance=0.05), npgp.Poisson(num_nodes=24)])
    Y = np.array([[1.0, 0.9, 3.0], [0.0, -0.3, np.nan], [np.nan, np.nan, 0.0]])
    offset = np.array([0.2, 0.1, 0.5])
    options = dict(mask=~np.isnan(Y), offset=offset, candidates=CURVES, num_starts=6, num_modes=3)
    rows = infer_latents(posterior, likelihood, Y, **options, num_nodes=16, tolerance=1e-6)
    mean, variance = rows.predict(posterior, likelihood, offset=offset)
    draws = np.asarray(rows.sample(jax.random.key(1), posterior, likelihood, sample_shape=(3000,), offset=offset))
    assert draws.shape == (3000, 3, 3)
    assert set(np.unique(draws[..., 0])) == {0.0, 1.0} and np.all(draws[..., 2] == np.round(draws[..., 2]))
    z = (draws.mean(0) - mean) / np.sqrt(np.asarray(variance) / len(draws))
    assert np.abs(z).max() < 4.0
    for row, (a, b, c) in enumerate(Y):
        log_probs = [
            lambda f, y=a: stats.norm.logcdf((2 * y - 1) * (f + offset[0])),
            lambda f, y=b: log_normal(y, f + offset[1], 0.05),
            lambda f, y=c: stats.poisson.logpmf(y, np.exp(f + offset[2])),
        ]
        grid = Grid(posterior, log_probs, ~np.isnan(Y[row]))
        np.testing.assert_allclose(rows.elbo[row], grid.elbo(rows.loc[row], rows.scale[row, 0]), atol=3e-3)
        assert grid.best_elbo() - 3e-3 < rows.elbo[row] < grid.evidence


# ---------------------------------------------------------------------------------------------------------------
# Data from the model


# Rounding differs with where a row stands among the others, and searches end when they would gain less than 1e-4 nats:
# what the bound is flat in agrees less well than the bound.
END = {"loc": 1e-4, "scale": 1e-4, "elbo": 1e-6}


class Simulated:
    """Functions drawn from the GP itself, in two latent dimensions: 150 rows to learn from, and 60 new ones."""

    def __init__(self):
        rng = np.random.default_rng(5)
        self.X = rng.normal(size=(210, 2))
        L = np.linalg.cholesky(rbf(self.X, self.X, 1.0, 1.0) + 1e-9 * np.eye(210))
        self.Y = L @ rng.normal(size=(210, 8)) + np.sqrt(NOISE) * rng.normal(size=(210, 8))
        self.new = self.Y[150:]
        self.mask = rng.uniform(size=(60, 8)) < 0.6
        with jax.enable_x64(True):
            self.posterior = condition(npgp.RBF(1.0), self.X[:150], self.Y[:150], self.X[:40], NOISE)
            self.rows = self.infer(self.new, self.mask)

    def infer(self, Y, mask):
        options = dict(candidates=self.X[:150], num_starts=16, num_modes=4, num_nodes=16)
        return infer_latents(self.posterior, npgp.Gaussian(variance=NOISE), Y, mask=mask, **options)


@pytest.fixture(scope="module")
def simulated():
    return Simulated()


def test_missing_entries_are_predicted_and_their_deviations_are_right(simulated, float64):
    s = simulated
    missing = ~s.mask
    filled, deviation = s.rows.impute(s.posterior, npgp.Gaussian(variance=NOISE), s.new, mask=s.mask)
    errors = (s.new - np.asarray(filled))[missing]
    z = errors / np.asarray(deviation)[missing]
    means = (s.new - s.Y[:150].mean(0))[missing]
    assert np.sqrt(np.mean(errors**2)) < 0.6 * np.sqrt(np.mean(means**2))
    # Of 190 entries, those of a row dependent. Gaussians are somewhat narrower than what they stand for.
    assert 0.9 < np.mean(np.abs(z) < 1.96) < 0.99
    assert 0.7 < np.mean(z**2) < 1.3


def test_complete_rows_are_where_they_came_from(simulated, float64):
    s = simulated
    Y = np.concatenate([s.Y[:30], s.new[:30]])  # rows of the training set, and others
    rows = s.infer(Y, np.ones(Y.shape, bool))
    scale = np.sqrt(np.sum(np.square(rows.scale), axis=-1))
    z = (np.concatenate([s.X[:30], s.X[150:180]]) - rows.loc) / scale
    for part in (z[:30], z[30:]):
        assert 0.6 < np.mean(np.square(part)) < 1.6
        assert np.mean(np.abs(part) < 3.0) > 0.97
    assert np.mean(scale) < 0.2


def test_rows_are_independent_problems(simulated, float64):
    s = simulated
    order = np.random.default_rng(0).permutation(60)
    permuted = s.infer(s.new[order], s.mask[order])
    for name, atol in END.items():
        np.testing.assert_allclose(getattr(permuted, name), getattr(s.rows, name)[order], atol=atol)
    np.testing.assert_allclose(permuted.modes.weight, s.rows.modes.weight[:, order], atol=1e-6)
    for row in (0, 7):
        single = s.infer(s.new[row], s.mask[row])
        for name, atol in END.items():
            np.testing.assert_allclose(getattr(single, name), getattr(s.rows, name)[row], atol=atol)
        for alone, among in zip(single.predict(s.posterior), s.rows.predict(s.posterior), strict=True):
            np.testing.assert_allclose(alone, among[row], atol=END["loc"])


def test_results_do_not_depend_on_how_many_points_are_taken_at_a_time(float64, monkeypatch):
    posterior, likelihood, rows = infer_factors(float64)
    mean, variance = rows.predict(posterior, likelihood, num_nodes=6)
    points = 64 * FACTORS.columns  # memory that one takes
    monkeypatch.setattr(latent_search, "BUDGET", 7 * points)
    # With another number that is part of the compiled program.
    posterior, likelihood, parts = infer_factors(float64, num_steps=501)
    for name, atol in END.items():
        np.testing.assert_allclose(getattr(parts.modes, name), getattr(rows.modes, name), atol=atol)
    for a, b in zip(parts.predict(posterior, likelihood, num_nodes=5), (mean, variance), strict=True):
        np.testing.assert_allclose(a, b, rtol=END["loc"], atol=END["loc"])


# ---------------------------------------------------------------------------------------------------------------
# Parts


def test_a_known_latent_point_predicts_what_the_functions_are_there(float64):
    posterior = curves()
    points = np.array([[0.3], [-1.0]])
    rows = NewRows(points, np.full((2, 1), 1e-6))
    f_mean, f_variance = compiled(posterior.mean_and_variance)(jnp.asarray(points))
    mean, variance = rows.predict(posterior, offset=2.0)
    np.testing.assert_allclose(mean, f_mean.T + 2.0, atol=1e-5)
    np.testing.assert_allclose(variance, f_variance.T, atol=1e-8)
    np.testing.assert_allclose(rows.predict(posterior, npgp.Gaussian(variance=0.3), offset=2.0)[1], variance + 0.3)


@pytest.mark.parametrize("latent_dim, num_nodes", [(1, 2), (1, 32), (2, 1), (2, 32), (5, 40), (10, 32)])
def test_nodes_are_exact_for_cubics(latent_dim, num_nodes, float64):
    z, weights = (np.asarray(a) for a in normal_rule(latent_dim, num_nodes, float64))
    assert len(z) >= num_nodes and z.shape == (len(weights), latent_dim)
    np.testing.assert_allclose(weights.sum(), 1.0)
    np.testing.assert_allclose(weights @ z, 0.0, atol=1e-12)
    np.testing.assert_allclose((z.T * weights) @ z, np.eye(latent_dim), atol=1e-12)
    np.testing.assert_allclose(np.einsum("k,ki,kj,kl", weights, z, z, z), 0.0, atol=1e-12)
    if num_nodes > 4 * latent_dim:  # two radii or more
        np.testing.assert_allclose(weights @ np.sum(z**2, 1) ** 2, latent_dim * (latent_dim + 2))
    if latent_dim == 1:
        expected, _ = hermegauss(num_nodes)
        np.testing.assert_allclose(np.sort(z[:, 0]), expected, atol=1e-10)


@pytest.mark.parametrize("slots", [2, 5])
def test_minimize_solves_each_problem_by_itself(slots, float64):
    weights = jnp.array([0.0, 1.0, 10.0, 100.0, jnp.nan])

    def function(x, number):
        """Rosenbrock's function and others that it becomes with another weight; the last is NaN."""
        a, b = x[:, 0], x[:, 1]
        return (1 - a) ** 2 + weights[number] * (b - a**2) ** 2 + 1e-3 * (b - 1) ** 2

    start, limits = jnp.array([[-1.2, 1.0]] * 5), np.array([np.inf, 0.7])
    run = compiled(lambda start, steps: minimize(function, start, np.ones(2), limits, steps, 1e-12, slots=slots))
    x, values, done = run(start, 200)
    np.testing.assert_allclose(x[:4], 1.0, atol=1e-4)
    np.testing.assert_allclose(values[:4], 0.0, atol=1e-10)
    assert np.all(done) and np.isposinf(values[4])
    np.testing.assert_array_equal(x[4], start[4])
    assert not run(start, 3)[2][1:4].any()


def test_minimize_evaluates_what_is_not_done_and_wanted(float64):
    """One search of 40 takes many steps, and half are not wanted: that costs little more than those that are."""
    weights, evaluated = jnp.where(jnp.arange(40) == 0, 100.0, 0.0), []

    def function(x, number):
        jax.debug.callback(lambda number: evaluated.append(len(number)), number)
        a, b = x[:, 0], x[:, 1]
        return (1 - a) ** 2 + weights[number] * (b - a**2) ** 2 + (1 - weights[number] / 100) * (b - 1) ** 2

    def run(slots, wanted):
        evaluated.clear()
        options = dict(slots=slots, wanted=wanted)
        results = minimize(function, start, np.ones(2), np.full(2, np.inf), 200, 1e-12, **options)
        jax.block_until_ready(results)
        jax.effects_barrier()
        return sum(evaluated), results

    start, wanted = jnp.array([[-1.2, 1.0]] * 40), jnp.arange(40) < 20
    all_at_once, (x, _, _) = run(40, None)
    few, (found, values, done) = run(4, wanted)
    np.testing.assert_allclose(found[:20], x[:20], atol=1e-9)
    assert done[:20].all() and not done[20:].any() and np.isposinf(values[20:]).all()
    np.testing.assert_array_equal(found[20:], start[20:])
    assert few < all_at_once / 5


# ---------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.fixture(scope="module")
def factors():
    return FACTORS.posterior(jnp.float32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"Y": np.zeros((2, 5))}, r"Y has shape \(2, 5\); it must be \(\.\.\., 6\)"),
        ({"Y": np.zeros((2, 2, 6))}, "Y has shape"),
        ({"Y": np.zeros((0, 6))}, "Y has shape"),
        ({"Y": np.full((2, 6), np.nan)}, "Y has NaN"),
        ({"mask": np.ones(6, bool)}, "mask has shape"),
        ({"Y": np.ma.masked_equal(np.zeros((2, 6)), 0.0)}, "Y is a NumPy masked array with 12 of 12 entries masked"),
        ({"offset": np.zeros(5)}, r"offset has shape \(5,\)"),
        ({"offset": np.full(6, np.nan)}, "offset has NaN"),
        ({"candidates": np.zeros((3, 2))}, "candidates has 2 latent dimensions, but the inducing points 3"),
        ({"candidates": np.zeros(3)}, "candidates has shape"),
        ({"start": np.zeros(2)}, "start has 2 latent dimensions"),
        ({"start": np.zeros((3, 3))}, "start has shape"),
        ({"start": np.full(3, np.nan)}, "start has NaN"),
        ({"prior": dist.Normal(0.0, 1.0)}, "prior is .* distribution over vectors"),
        ({"prior": dist.Normal(np.zeros(2), 1.0).to_event(1)}, "prior has 2 latent dimensions"),
        ({"prior": dist.Normal(np.zeros((3, 3)), 1.0).to_event(1)}, r"prior has batch shape \(3,\)"),
        ({"likelihood": npgp.likelihoods.HeteroscedasticGaussian()}, "HeteroscedasticGaussian, of 2 latent values"),
        ({"likelihood": npgp.Bernoulli(), "Y": np.full((2, 6), 0.5)}, "must be 0 or 1"),
        ({"num_starts": -1}, "num_starts is -1"),
        ({"num_modes": 0}, "num_modes is 0"),
        ({"num_nodes": 0}, "num_nodes is 0"),
        ({"num_steps": 1.5}, "num_steps is 1.5"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
    ],
)
def test_bad_arguments(factors, change, message):
    arguments = {"likelihood": npgp.Gaussian(variance=1.0), "Y": np.zeros((2, 6))} | change
    with pytest.raises((ValueError, TypeError), match=message):
        infer_latents(factors, arguments.pop("likelihood"), arguments.pop("Y"), **arguments)


def test_a_posterior_of_one_function_is_refused():
    posterior = condition(npgp.RBF(1.0), CURVES, CURVES[:, 0], CURVES[:3], 0.1, jnp.float32)
    with pytest.raises(ValueError, match=r"batch shape \(\)"):
        infer_latents(posterior, npgp.Gaussian(variance=1.0), np.zeros(6))


def test_shapes_of_rows(factors):
    with pytest.raises(ValueError, match=r"scale has shape \(3,\); with loc of shape \(2, 3\)"):
        NewRows(np.zeros((2, 3)), np.ones(3))
    rows = NewRows(np.zeros((2, 3), "f"), np.ones((2, 3), "f"))
    with pytest.raises(ValueError, match="num_nodes"):
        rows.predict(factors, num_nodes=0)
    with pytest.raises(ValueError, match=r"mask has shape \(6,\)"):
        rows.impute(factors, npgp.Gaussian(variance=1.0), np.zeros((2, 6)), mask=np.ones(6, bool))


def test_what_did_not_work_is_said(factors):
    Y = np.full((5, 6), 3.0)
    with pytest.warns(RuntimeWarning, match="did not converge for 5 of 5 rows in 1 steps"):
        infer_latents(factors, npgp.Gaussian(variance=0.1), Y, num_starts=0, num_steps=1)
    broken = jax.tree.map(lambda a: a * np.nan, factors)
    with pytest.raises(FloatingPointError, match="bound of 5 of 5 rows is not finite"):
        infer_latents(broken, npgp.Gaussian(variance=0.1), Y, num_starts=0, num_steps=1)
