"""Nearest-neighbor GPs: neighbor sets by brute force, a dense Vecchia approximation in NumPy, and the exact GP."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import oracles
import pytest
from models import compiled, worst_z_of_moments
from numpyro import handlers
from numpyro.infer.util import log_density
from programs import equations
from scipy import stats
from scipy.sparse import linalg

import npgp
from npgp.kernels import Matern32
from npgp.neighbors import (
    NNGP,
    NeighborPosterior,
    ResponseNNGP,
    WhitenNNGP,
    nearest,
    nearest_before,
    order_sites,
    search,
    vecchia,
)

ORDERINGS = ("given", "coordinate", "random", "maxmin")
LENGTHSCALE = np.array([0.9, 1.3])
VARIANCE, MEAN = 1.4, 0.3
KERNEL = functools.partial(oracles.stationary, "Matern32", lengthscale=LENGTHSCALE, variance=VARIANCE)

N = 24
RNG = np.random.default_rng(3)
X, NEW = RNG.uniform(-2, 2, size=(N, 2)), RNG.uniform(-2.5, 2.5, size=(5, 2))
F = RNG.normal(size=(2, N))
NOISE = RNG.uniform(0.05, 0.5, size=N)


def kernel(dtype=np.float64):
    return Matern32(jnp.asarray(LENGTHSCALE.astype(dtype)), variance=dtype(VARIANCE))


# ---------------------------------------------------------------- orders and neighbors


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("sites", ["scattered", "grid", "one", "two", "many columns"])
def test_neighbors_are_the_nearest_before(ordering, sites):
    rng = np.random.default_rng(0)
    points = {
        "scattered": rng.normal(size=(300, 2)),  # four trees
        "grid": np.round(rng.normal(size=(150, 2)), 1),  # ties and duplicates
        "one": np.ones((1, 2)),
        "two": np.array([[0.0], [1.0]]),
        "many columns": rng.normal(size=(70, 20)),
    }[sites]
    size = 70 if sites == "grid" else 4
    neighbors = nearest_before(points, size, ordering=ordering, rng_key=jax.random.key(0))
    assert neighbors.rows.shape == neighbors.mask.shape == (len(points), min(size, len(points) - 1))
    np.testing.assert_array_equal(np.sort(neighbors.order), np.arange(len(points)))
    np.testing.assert_array_equal(neighbors.order, order_sites(points, ordering, rng_key=jax.random.key(0)))
    distances = oracles.distances(points, points)
    for place, i in enumerate(neighbors.order):
        before, found = neighbors.order[:place], neighbors.rows[i][neighbors.mask[i]]
        assert np.all(neighbors.rows[i][~neighbors.mask[i]] == i)
        assert len(set(found)) == len(found) and set(found) <= set(before)
        np.testing.assert_allclose(distances[i, found], np.sort(distances[i, before])[:size], atol=1e-12)


def test_searches_in_small_pieces_find_the_same(monkeypatch):
    points = np.random.default_rng(0).normal(size=(300, 2))
    whole = nearest_before(points, 4)
    monkeypatch.setattr(search, "FOUND", 50)  # five sites at a time
    np.testing.assert_array_equal(nearest_before(points, 4).rows, whole.rows)


def test_orders_are_what_they_say():
    points = np.random.default_rng(0).normal(size=(200, 2)) * [1.0, 3.0]
    points[50:60] = points[40:50]  # duplicates come last
    np.testing.assert_array_equal(order_sites(points, "given"), np.arange(200))
    assert np.all(np.diff(points[order_sites(points, "coordinate"), 1]) >= 0)
    np.testing.assert_array_equal(
        order_sites(points, "random", rng_key=jax.random.key(1)),
        order_sites(points, "random", rng_key=jax.random.key(1)),
    )
    assert np.any(
        order_sites(points, "random", rng_key=jax.random.key(1))
        != order_sites(points, "random", rng_key=jax.random.key(2))
    )

    order = order_sites(points, "maxmin")
    assert order[0] == np.argmin(np.sum((points - points.mean(0)) ** 2, axis=1))
    distances = oracles.distances(points, points)
    for place in range(1, 200):
        to_set = distances[:, order[:place]].min(1)
        assert to_set[order[place]] == pytest.approx(to_set.max(), abs=1e-12)


def test_distances_are_in_units_of_the_scale():
    scale = np.array([0.1, 10.0])
    scaled, divided = nearest_before(X, 3, scale=scale), nearest_before(X / scale, 3)
    np.testing.assert_array_equal(scaled.order, divided.order)
    np.testing.assert_array_equal(scaled.rows, divided.rows)
    assert np.any(divided.rows != nearest_before(X, 3).rows)
    expected = np.argsort(oracles.distances(NEW, X, scale), axis=1)[:, :3]
    np.testing.assert_array_equal(nearest(NEW, X, 3, scale=scale), expected)


@pytest.mark.parametrize(
    "sites, ordering", [("square", "maxmin"), ("square", "random"), ("line", "given"), ("one", "given")]
)
def test_waves_have_neighbors_in_earlier_waves_alone(sites, ordering):
    rng = np.random.default_rng(0)
    points = {"square": rng.uniform(size=(900, 2)), "line": np.arange(50.0)[:, None], "one": np.zeros((1, 2))}[sites]
    neighbors = nearest_before(points, 6, ordering=ordering, rng_key=jax.random.key(0))
    waves, N = neighbors.waves, len(points)
    np.testing.assert_array_equal(np.sort(waves.sites), np.arange(N))
    parts = int(np.sum(waves.starts < N))
    assert waves.starts[0] == 0 and np.all(waves.starts[parts:] == N)
    lengths = np.diff(waves.starts[: parts + 1])
    assert np.all((lengths >= 1) & (lengths <= waves.size))
    done = np.zeros(N, bool)
    for start, length in zip(waves.starts, lengths, strict=False):
        part = waves.sites[start : start + length]
        assert np.all(done[neighbors.rows[part]] | ~neighbors.mask[part])
        done[part] = True
    # A chain has a wave for each site; in the plane there are far fewer.
    assert parts == N if sites != "square" else parts < N / 5 and waves.size > 4


def test_coloring_in_waves_of_many_sites(float64):
    """Against a sparse triangular solve, for several rows at once; also the gradient, which goes the other way."""
    points = np.random.default_rng(0).uniform(size=(900, 2))
    neighbors = nearest_before(points, 6)
    z, up = np.random.default_rng(1).normal(size=(2, 3, 900))

    @compiled
    def run(z, up, neighbors):
        factor = NNGP(Matern32(0.2, variance=VARIANCE), points, neighbors).factor()
        colored, back = jax.vjp(factor.color, z)
        return factor, colored, back(up)[0]

    factor, colored, slope = run(z, up, neighbors)
    R = factor.to_scipy().tocsc()
    np.testing.assert_allclose(colored, linalg.spsolve(R, z.T).T, atol=1e-9)
    np.testing.assert_allclose(slope, linalg.spsolve(R.T.tocsc(), up.T).T, atol=1e-9)


# ---------------------------------------------------------------- against dense algebra


def dense_vecchia(C, neighbors):
    """Weights (N, N) and variances of each value given its neighbors', row by row."""
    B, variance = np.zeros((len(C), len(C))), np.diag(C).copy()
    for i in range(len(C)):
        rows = neighbors.rows[i][neighbors.mask[i]]
        B[i, rows] = np.linalg.solve(C[np.ix_(rows, rows)], C[rows, i])
        variance[i] -= C[i, rows] @ B[i, rows]
    return B, variance


def dense_precision(B, variance):
    R = (np.eye(len(B)) - B) / np.sqrt(variance)[:, None]
    return R, R.T @ R


def dense_kriging(values, noise, rows):
    """Mean and variance of f at NEW, given values at the sites in ``rows``, (5, k)."""
    pairs = []
    for x, near in zip(NEW, rows, strict=True):
        C = KERNEL(X[near], X[near]) + np.diag(np.broadcast_to(noise, N)[near])
        gain = np.linalg.solve(C, KERNEL(X[near], x[None])[:, 0])
        pairs.append((values[:, near] @ gain, VARIANCE - gain @ KERNEL(X[near], x[None])[:, 0]))
    return np.stack([mean for mean, _ in pairs], -1), np.array([variance for _, variance in pairs])


@functools.cache
def everything():
    """One program for all that is computed, for the prior without jitter and for responses; it is jitted."""

    @compiled
    def run(X, values, noise, neighbors, near):
        results = []
        for gp in (
            NNGP(kernel(), X, neighbors, offset=MEAN, jitter=0.0),
            ResponseNNGP(kernel(), X, neighbors, noise_variance=noise, offset=np.full(N, MEAN)),
        ):
            factor = gp.factor()
            krige = gp.condition(values).mean_and_variance(NEW.copy(), neighbors=near)
            results.append((gp.log_prob(values), factor, factor.whiten(values), factor.color(values), krige))
        return results

    def numpy(*arguments):
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, run(*arguments))

    return numpy


@functools.cache
def evaluated(size, ordering):
    """What :func:`everything` gives, the neighbors, and those of new sites."""
    with jax.enable_x64(True):
        neighbors = nearest_before(X.copy(), size, ordering=ordering, rng_key=jax.random.key(0))
        near = nearest(NEW.copy(), X.copy(), size if size < N - 1 else N)
    return everything()(X.copy(), F.copy(), NOISE.copy(), neighbors, near), neighbors, near


@pytest.mark.parametrize("size, ordering", [(3, "maxmin"), (3, "given"), (5, "random"), (5, "coordinate")])
def test_dense_vecchia(size, ordering):
    results, neighbors, near = evaluated(size, ordering)
    for (density, factor, white, colored, krige), noise in zip(results, (0.0, NOISE), strict=True):
        B, variance = dense_vecchia(KERNEL(X, X) + np.diag(np.broadcast_to(noise, N)), neighbors)
        R, precision = dense_precision(B, variance)
        covariance = np.linalg.inv(precision)
        expected = [oracles.log_normal(f - MEAN, covariance) for f in F]
        np.testing.assert_allclose(density, expected, rtol=1e-9)
        np.testing.assert_allclose(factor.variance, variance, rtol=1e-9)
        np.testing.assert_allclose(factor.to_scipy().toarray(), R, atol=1e-8)
        lower = R[np.ix_(neighbors.order, neighbors.order)]
        np.testing.assert_array_equal(lower, np.tril(lower))
        np.testing.assert_allclose(white, F @ R.T, atol=1e-8)
        np.testing.assert_allclose(colored, np.linalg.solve(R, F.T).T, atol=1e-8)
        mean, spread = dense_kriging(F - MEAN, noise, near)
        np.testing.assert_allclose(krige[0], mean, atol=1e-9)
        np.testing.assert_allclose(krige[1], np.broadcast_to(spread, (2, 5)), atol=1e-9)
    assert np.any(results[0][0] != results[1][0])


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_all_sites_as_neighbors_is_the_exact_gp(ordering):
    results, *_ = evaluated(N - 1, ordering)
    for (density, factor, _, _, krige), noise in zip(results, (0.0, NOISE), strict=True):
        C = KERNEL(X, X) + np.diag(np.broadcast_to(noise, N))
        np.testing.assert_allclose(density, [oracles.log_normal(f - MEAN, C) for f in F], atol=1e-8)
        np.testing.assert_allclose(np.sum(np.log(factor.variance)), np.linalg.slogdet(C)[1], atol=1e-8)
        for i, f in enumerate(F):
            mean, covariance = oracles.gp_posterior(
                KERNEL(X, X),
                KERNEL(NEW, X),
                KERNEL(NEW, NEW),
                f - MEAN,
                np.full(N, noise) if np.ndim(noise) == 0 else noise,
            )
            np.testing.assert_allclose(krige[0][i], mean, atol=1e-8)
            np.testing.assert_allclose(krige[1][i], np.diag(covariance), atol=1e-8)


def test_order_of_rows_is_no_matter_with_all_as_neighbors():
    shuffled = np.random.default_rng(1).permutation(N)
    results, _, near = evaluated(N - 1, "given")
    place = np.argsort(shuffled).astype(near.dtype)
    neighbors = nearest_before(X[shuffled], N - 1, ordering="given")
    others = everything()(X[shuffled], F[:, shuffled], NOISE[shuffled], neighbors, place[near])
    for one, other in zip(results, others, strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=1e-8)
        np.testing.assert_allclose(one[4], other[4], atol=1e-8)


def test_nearer_to_the_gp_with_more_neighbors():
    # KL[GP ‖ NNGP] = ½ Σ log F_i − ½ log|K|, as every value's own variance is kept.
    variances = {size: evaluated(size, "maxmin")[0][0][1].variance for size in (3, 5, N - 1)}
    exact = np.linalg.slogdet(KERNEL(X, X))[1]
    gaps = [0.5 * (np.sum(np.log(evaluated_variance)) - exact) for evaluated_variance in variances.values()]
    assert gaps[0] > gaps[1] > gaps[2] - 1e-9 and abs(gaps[2]) < 1e-8 and gaps[0] < 1.0


def test_draws_have_the_implied_covariance(x64):
    neighbors = nearest_before(X[:8], 3)
    draw = compiled(lambda key: NNGP(kernel(x64), X[:8].astype(x64), neighbors, offset=2.0).sample(key, (20_000,)))
    draws = np.asarray(draw(jax.random.key(0)))
    assert draws.shape == (20_000, 8) and draws.dtype == x64
    _, precision = dense_precision(*dense_vecchia(KERNEL(X[:8], X[:8]), neighbors))
    covariance = np.linalg.inv(precision)
    assert np.abs(covariance - KERNEL(X[:8], X[:8])).max() > 0.01  # it is not the GP's
    assert worst_z_of_moments(draws, np.full(8, 2.0), covariance) < 5.0


def test_gradients_by_finite_differences(float64):
    # Of hyperparameters, noise and values, through densities, kriging and colored noise.
    neighbors = nearest_before(X.copy(), 4)
    near = nearest(NEW.copy(), X.copy(), 4)
    direction = np.random.default_rng(0).normal(size=(N + 4,))

    @compiled
    def both(points):
        def value(theta):
            k, f = Matern32(jnp.exp(theta[:2]), variance=jnp.exp(theta[2])), theta[4:]
            prior, response = (
                NNGP(k, X.copy(), neighbors),
                ResponseNNGP(k, X.copy(), neighbors, noise_variance=jnp.exp(theta[3])),
            )
            mean, variance = response.condition(f).mean_and_variance(NEW.copy(), neighbors=near)
            colored = jnp.sum(jnp.sin(prior.factor().color(f)))
            return prior.log_prob(f) + response.log_prob(f) + jnp.sum(mean * variance) + 10.0 * colored

        return jax.grad(value)(points[0]), jax.lax.map(value, points[1:])

    theta = np.concatenate([np.log([0.9, 1.3, 1.4, 0.2]), F[0]])
    steps = 1e-6 * np.concatenate([np.eye(N + 4)[:6], direction[None]])
    slope, values = both(np.concatenate([theta[None], theta + steps, theta - steps]))
    differences = (values[:7] - values[7:]) / 2e-6
    np.testing.assert_allclose(steps @ slope / 1e-6, differences, rtol=1e-5, atol=1e-5)


def test_all_sites_before_as_neighbors_take_one_factorization(float64):
    """Of N × N numbers, where each site's own would take N³; values and gradients are those of the dense Gaussian."""

    def log_prob(variance):
        return NNGP(Matern32(LENGTHSCALE, variance=variance), X, N - 1, jitter=0.0).log_prob(F[0])

    def dense(variance):
        return stats.multivariate_normal(cov=variance * KERNEL(X, X) / VARIANCE).logpdf(F[0])

    value, found = jax.jit(jax.value_and_grad(log_prob))(VARIANCE)
    np.testing.assert_allclose(value, dense(VARIANCE), rtol=1e-8)
    slope = (dense(VARIANCE + 1e-5) - dense(VARIANCE - 1e-5)) / 2e-5
    np.testing.assert_allclose(found, slope, rtol=1e-6)
    results = [v.aval.size for e in equations(jax.make_jaxpr(log_prob)(VARIANCE).jaxpr) for v in e.outvars]
    assert max(results) <= 2 * N * N


def test_chunks_change_nothing(float64, monkeypatch):
    neighbors = nearest_before(X.copy(), 4)

    def values_and_gradient(entries):
        monkeypatch.setattr(vecchia, "ENTRIES", entries)

        def value(scale):
            return NNGP(scale * kernel(), X.copy(), neighbors).log_prob(F.copy()).sum()

        return compiled(jax.value_and_grad(value))(1.1)

    whole, parts = values_and_gradient(2**20), values_and_gradient(7 * 25)
    np.testing.assert_allclose(parts, whole, rtol=1e-12)


def test_nothing_is_as_large_as_a_square_of_sites():
    sites, k = 500, 3
    x = np.random.default_rng(0).normal(size=(sites, 2)).astype(np.float32)
    neighbors = nearest_before(x, k)
    gp = NNGP(Matern32(), x, neighbors)

    whitened = lambda z: jnp.sum(jnp.square(gp.factor().color(z)))  # noqa: E731
    for f in (jax.grad(gp.log_prob), jax.grad(whitened)):
        seen = list(equations(jax.make_jaxpr(f)(x[:, 0]).jaxpr))
        assert max(v.aval.size for e in seen for v in e.outvars) <= 2 * sites * (k + 1) ** 2


def test_float32_is_near_float64():
    # At its default jitter, which is why sites are not all near one another.
    results, neighbors, _ = evaluated(5, "random")

    @compiled
    def run(values):
        gp = NNGP(kernel(np.float32), X.astype(np.float32), neighbors, offset=MEAN)
        return gp.log_prob(values), *gp.condition(values).mean_and_variance(
            NEW.astype(np.float32)
        )  # neighbors are found here

    density, mean, variance = run(F.astype(np.float32))
    assert density.dtype == mean.dtype == np.float32
    np.testing.assert_allclose(density, results[0][0], rtol=1e-3)
    np.testing.assert_allclose(mean, results[0][4][0], atol=2e-3)
    np.testing.assert_allclose(variance, results[0][4][1], atol=2e-3)


def test_duplicate_sites_have_equal_values(float64):
    twice = np.concatenate([X[:6], X[:6]])

    @compiled
    def run(key):
        gp = NNGP(kernel(), twice, nearest_before(twice, 4))
        f = gp.sample(key)
        return f, gp.log_prob(f), jax.grad(gp.log_prob)(f), gp.factor().jitter

    f, density, slope, jitter = run(jax.random.key(0))
    np.testing.assert_allclose(f[:6], f[6:], atol=1e-3)
    assert np.isfinite(density) and np.all(np.isfinite(slope)) and jitter <= 1e-7


def test_one_site(float64):
    @compiled
    def run(f):
        gp = NNGP(kernel(), X[:1], 3)
        return gp.log_prob(f), gp.condition(f).mean_and_variance(NEW[:1])

    log_prob, (mean, variance) = run(np.array([0.7]))
    np.testing.assert_allclose(log_prob, stats.norm.logpdf(0.7, scale=np.sqrt(VARIANCE)), rtol=1e-6)
    correlation = KERNEL(X[:1], NEW[:1])[0] / VARIANCE
    np.testing.assert_allclose(mean, 0.7 * correlation, rtol=1e-6)
    np.testing.assert_allclose(variance, VARIANCE * (1 - correlation**2), rtol=1e-6)


# ---------------------------------------------------------------- in a NumPyro program


COUNTS = np.random.default_rng(5).poisson(np.exp(np.sin(2 * X[:, 0])))


def count_model(neighbors, y):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", NNGP(Matern32(1.0, variance=variance), X.astype(np.float32), neighbors, offset=0.2))
    numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def test_densities_of_a_latent_site_and_of_its_whitened_values():
    neighbors = nearest_before(X, 4)
    f = 0.3 * F[0].astype(np.float32)
    whitened = handlers.reparam(count_model, config={"f": WhitenNNGP()})

    @compiled
    def run(f):
        factor = NNGP(Matern32(1.0, variance=0.8), X.astype(np.float32), neighbors, offset=0.2).factor()
        z = factor.whiten(f - 0.2)
        centered, _ = log_density(count_model, (neighbors, COUNTS), {}, {"variance": 0.8, "f": f})
        white, trace = log_density(whitened, (neighbors, COUNTS), {}, {"variance": 0.8, "f_white": z})
        return centered, white, trace["f"]["value"], factor.log_determinant()

    centered, white, value, log_det = run(f)
    np.testing.assert_allclose(value, f, atol=1e-4)
    C = oracles.stationary("Matern32", X, X, 1.0, 0.8) + 0.8e-5 * np.eye(N)
    covariance = np.linalg.inv(dense_precision(*dense_vecchia(C, neighbors))[1])
    expected = stats.lognorm.logpdf(0.8, 0.5) + stats.poisson.logpmf(COUNTS, np.exp(f)).sum()
    np.testing.assert_allclose(centered, expected + oracles.log_normal(f - 0.2, covariance), rtol=1e-4)
    np.testing.assert_allclose(centered - white, 0.5 * log_det, atol=1e-2)


def test_what_cannot_be_a_model_is_refused():
    def refused(words, function, *arguments, error=ValueError, **settings):
        with pytest.raises(error, match=words):
            function(*arguments, **settings)

    x = X.astype(np.float32)
    neighbors = nearest_before(x, 3)
    refused("ordering is 'maximin'; it must be one of 'given', 'coordinate'", nearest_before, x, 3, ordering="maximin")
    refused("rng_key is missing: the order 'random' needs one", nearest_before, x, 3, ordering="random")
    refused("rng_key is 0; it must be a random key", order_sites, x, "random", rng_key=0, error=TypeError)
    refused("size is 0; it must be at least 1", nearest_before, x, 0)
    refused("size is 2.5; it must be a whole number", nearest_before, x, 2.5, error=TypeError)
    refused("size is 25; it must be at most 24", nearest, x, x, 25)
    refused("X_new has 1 columns; the sites X have 2", nearest, x[:, :1], x, 2)
    refused(r"scale has shape \(3,\)", nearest_before, x, 3, scale=np.ones(3))
    refused("scale is .* must be positive", nearest_before, x, 3, scale=0.0)
    refused("X has NaN", nearest_before, x * np.nan, 3)
    refused("neighbors are those of 24 sites, but X has 8 rows", NNGP, Matern32(), x[:8], neighbors)
    refused(r"offset has shape \(3,\)", NNGP, Matern32(), x, neighbors, offset=np.ones(3))
    refused("noise_variance is .* must be positive", ResponseNNGP, Matern32(), x, neighbors, noise_variance=-1.0)
    refused(r"noise_variance has shape \(3,\)", ResponseNNGP, Matern32(), x, neighbors, noise_variance=np.ones(3))
    gp = NNGP(Matern32(), x, 3)
    assert gp.neighbors.size == 3
    refused("value has NaN", gp.condition, np.full(N, np.nan))
    refused(r"value has shape \(8,\); its last axis must be the 24 sites", gp.condition, np.ones(8))
    kriging = gp.condition(x[:, 0])
    assert isinstance(kriging, NeighborPosterior)
    refused("X has 1 columns; the points with values have 2", kriging.mean, x[:, :1])
    few = neighbors.rows[:2]
    refused(r"neighbors has shape \(2, 3\); it must be \(24, k\)", kriging.mean_and_variance, x, neighbors=few)
    refused("X is traced", jax.jit(lambda x: NNGP(Matern32(), x, 3).log_prob(x[:, 0])), x)
    refused("X is traced, so its neighbors cannot be found", jax.jit(kriging.mean), x, error=TypeError)

    model = handlers.reparam(lambda: numpyro.sample("f", dist.Normal()), config={"f": WhitenNNGP()})
    refused("site 'f' is a Normal; WhitenNNGP is for NNGP sites", handlers.seed(model, 0))


@pytest.mark.parametrize("Z", [None, 4])
def test_measurements_of_one_site_are_merged(float64, Z):
    """Of 56 rows at 12 sites, with all others for neighbors, it is the exact GP of all rows, noise row by row."""
    rng = np.random.default_rng(5)
    sites, new = rng.uniform(0.0, 1.0, (12, 2)), rng.uniform(0.0, 1.0, (7, 2))
    rows, y = np.concatenate([np.repeat(sites[:11], 4, axis=0), sites]), rng.normal(size=56)
    order = rng.permutation(56)
    rows, kernel, noise = rows[order], Matern32(0.3), rng.uniform(0.2, 0.9, 56)

    def k(A, B):
        r = np.sqrt(3.0) * np.linalg.norm(A[:, None] - B, axis=-1) / 0.3
        return (1.0 + r) * np.exp(-r)

    def gp(noise_variance):
        if Z is None:
            return ResponseNNGP(kernel, rows, 11, noise_variance=noise_variance)
        return npgp.ApproximateGP(
            kernel, rows, sites[:Z], noise_variance=noise_variance, method="vif", neighbors=11, jitter=0.0
        )

    assert gp(noise).neighbors.rows.shape == (12, 11)

    @jax.jit
    def computed(scale):
        made = gp(scale * noise)
        return made.log_prob(y), jax.grad(lambda scale: gp(scale * noise).log_prob(y))(scale), made.condition(y)

    def evidence(scale):
        return stats.multivariate_normal(np.zeros(56), k(rows, rows) + np.diag(scale * noise)).logpdf(y)

    density, slope, posterior = computed(1.0)
    np.testing.assert_allclose(density, evidence(1.0), rtol=1e-9)
    np.testing.assert_allclose(slope, (evidence(1.0 + 1e-5) - evidence(1.0 - 1e-5)) / 2e-5, rtol=1e-6)
    weights = np.linalg.solve(k(rows, rows) + np.diag(noise), k(rows, new)).T
    mean, variance = posterior.mean_and_variance(new, neighbors=np.tile(np.arange(12), (7, 1)))
    np.testing.assert_allclose(mean, weights @ y, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(variance, 1.0 - np.sum(weights * k(new, rows), axis=1), rtol=1e-7)
    if Z is None:  # draws are of the same covariance: colored, the identity is its root
        root = jax.jit(lambda: gp(noise).factor().color(jnp.eye(56)))()
        np.testing.assert_allclose(root.T @ root, k(rows, rows) + np.diag(noise), atol=1e-10)


def test_counts_at_one_site_are_merged(float64):
    """With all others for neighbors, merged or not, the estimate is that of one GP."""
    rng = np.random.default_rng(6)
    sites = rng.uniform(0.0, 1.0, (8, 2))
    rows, y = sites[np.arange(20) % 8], rng.poisson(2.0, 20).astype(float)

    def estimate(before):
        gp = npgp.ApproximateGP(Matern32(0.3), rows, sites[:3], npgp.Poisson(), method="vif", neighbors=before)
        return gp.log_prob(y)

    every = npgp.neighbors.nearest_before(rows, 19)
    with pytest.warns(UserWarning, match="merge=True"):
        merged, apart = jax.jit(lambda: (estimate(7), estimate(every)))()
    np.testing.assert_allclose(merged, apart, rtol=1e-6)


def test_measurements_that_are_not_merged_are_said(float64):
    rng = np.random.default_rng(5)
    sites = rng.uniform(0.0, 1.0, (12, 2))
    rows, kernel = np.repeat(sites, 5, axis=0), Matern32(0.3)
    with pytest.warns(UserWarning, match=r"48 of 60 rows of X repeat a site.*merge=True"):
        ResponseNNGP(kernel, rows, npgp.neighbors.nearest_before(rows, 5), noise_variance=0.5)
    merged = npgp.neighbors.nearest_before(rows, 5, merge=True)
    assert merged.num_rows == 60 and merged.num_sites == 12
    assert np.array_equal(rows[merged.repeats.first][merged.repeats.site], rows)
    with pytest.raises(ValueError, match="neighbors are of 12 sites, merged from 60 rows.*f.site."):
        NNGP(kernel, rows, merged)
    few = np.concatenate([sites, sites[:1]])  # one of 13 is no harm
    ResponseNNGP(kernel, few, npgp.neighbors.nearest_before(few, 3), noise_variance=0.5)
    with pytest.raises(ValueError, match="inducing has 1 rows that repeat another"):
        npgp.VNNGP("f", kernel, few, 3)
