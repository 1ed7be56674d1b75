"""Inducing points and neighbors together (VIF): beside dense algebra in NumPy, and its three limits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import oracles
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.util import log_density
from scipy import special

import npgp
from npgp.neighbors import ResponseNNGP, nearest, nearest_before, vecchia

N, K = 40, 4
RNG = np.random.default_rng(7)
X, NEW = RNG.uniform(-2, 2, size=(N, 2)), RNG.uniform(-2, 2, size=(5, 2))
Z, T = X[:6] + 0.1, RNG.normal(size=N)
NOISE, Y = RNG.uniform(0.05, 0.3, size=N), RNG.normal(size=N)
NEAR = nearest_before(X, K)
MATERN = functools.partial(oracles.stationary, "Matern32", lengthscale=0.9, variance=1.3)
RBF = functools.partial(oracles.stationary, "RBF", lengthscale=1.5, variance=0.7)


def matern():
    return npgp.Matern32(0.9, variance=1.3)


def explained(kernel, Z, a, b):
    return kernel(a, Z) @ np.linalg.solve(kernel(Z, Z), kernel(Z, b))


def vecchia_of(C, near):
    """B and F of Vecchia's approximation of a covariance, by solves."""
    B, F = np.zeros_like(C), np.zeros(len(C))
    for i in range(len(C)):
        n = near.rows[i][near.mask[i]]
        B[i, n] = np.linalg.solve(C[np.ix_(n, n)], C[n, i])
        F[i] = C[i, i] - B[i, n] @ C[n, i]
    return np.eye(len(C)) - B, F


def covariance(near, parts=((MATERN, Z, 1.0),), noise=NOISE):
    """Of the observations under the VIF model, for a sum of components with factors."""
    Q = sum(a**2 * explained(kernel, Z, X, X) for kernel, Z, a in parts)
    C = sum(a**2 * kernel(X, X) for kernel, _, a in parts) - Q + np.diag(noise)
    R, F = vecchia_of(C, near)
    return Q + np.linalg.inv(R.T @ np.diag(1 / F) @ R)


def vif(neighbors=NEAR, X=X, **options):
    return npgp.ApproximateGP(
        matern(), X, Z, noise_variance=NOISE, method="vif", neighbors=neighbors, **dict(jitter=0.0) | options
    )


# ---------------------------------------------------------------- the density


@pytest.mark.parametrize("size", [1, K, N - 1])
def test_density_is_that_of_dense_algebra(float64, size):
    near = nearest_before(X, size)
    y = np.stack([Y, RNG.normal(size=N)])
    expected = [oracles.log_normal(each - 0.3 * T, covariance(near)) for each in y]
    found = jax.jit(lambda y: vif(near, offset=0.3 * T).log_prob(y))(y)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_limits_are_fitc_the_response_nngp_and_the_gp(float64):
    none, whole = dataclasses.replace(NEAR, mask=np.zeros_like(NEAR.mask)), nearest_before(X, N - 1)

    @jax.jit
    def found(y):
        fitc = npgp.ApproximateGP(matern(), X, Z, noise_variance=NOISE, jitter=0.0)
        far = npgp.ApproximateGP(matern(), X, Z + 1e4, noise_variance=NOISE, method="vif", neighbors=NEAR)
        nngp = ResponseNNGP(matern(), X, NEAR, noise_variance=NOISE)
        densities = [gp.log_prob(y) for gp in (vif(none), fitc, far, nngp, vif(whole))]
        every = np.tile(np.arange(N), (len(NEW), 1))
        return densities, vif(whole).condition(y).mean_and_variance(NEW, neighbors=every)

    (of_none, fitc, far, nngp, of_whole), moments = found(Y)
    np.testing.assert_allclose(of_none, fitc, rtol=1e-10)
    np.testing.assert_allclose(far, nngp, rtol=1e-10)
    C = MATERN(X, X)
    np.testing.assert_allclose(of_whole, oracles.log_normal(Y, C + np.diag(NOISE)), rtol=1e-10)
    mean, cov = oracles.gp_posterior(C, MATERN(NEW, X), MATERN(NEW, NEW), Y, NOISE)
    np.testing.assert_allclose(moments, (mean, np.diag(cov)), atol=1e-9)


def test_draws_have_its_covariance(float64):
    """What colors its noise is a root of its covariance, less what the inducing values explain."""

    @jax.jit
    def found():
        gp = vif()
        projector, projection = gp._projected()
        noise, _ = gp._noise(projector, projection, NOISE)
        return projection.A[0], noise.color(jnp.eye(N)), gp.sample(jax.random.key(0), (3,))

    A, root, draws = map(np.asarray, found())
    np.testing.assert_allclose(A.T @ A + root.T @ root, covariance(NEAR), atol=1e-9)
    assert draws.shape == (3, N)


def test_many_projections_are_whitened_neighbor_by_neighbor(float64, monkeypatch):
    def grad(Z):
        def density(Z):
            gp = npgp.ApproximateGP(matern(), X, Z, noise_variance=NOISE, method="vif", neighbors=NEAR)
            return gp.log_prob(Y)

        return jax.jit(jax.value_and_grad(density))(Z)

    expected = grad(jnp.asarray(Z))
    monkeypatch.setattr(vecchia, "entries_at_once", lambda: 1)
    monkeypatch.setattr(vecchia, "ENTRIES", 64)
    monkeypatch.setattr(vecchia, "GATHERED", 512)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), grad(jnp.asarray(Z)), expected)


def test_float32(float64):
    @jax.jit
    def both():
        X32, Z32, noise = (array.astype(np.float32) for array in (X, Z, NOISE))
        kernel = npgp.Matern32(np.float32(0.9), variance=np.float32(1.3))
        single = npgp.ApproximateGP(kernel, X32, Z32, noise_variance=noise, method="vif", neighbors=NEAR)
        return vif().log_prob(Y), single.log_prob(Y.astype(np.float32))

    expected, found = both()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_a_kernel_splits_into_what_inducing_inputs_explain_and_leave(float64):
    smooth, rough = npgp.sparse.split_kernel(matern(), Z, jitter=0.0)
    known = explained(MATERN, Z, X, NEW), MATERN(X, NEW) - explained(MATERN, Z, X, NEW)
    np.testing.assert_allclose((smooth(X, NEW), rough(X, NEW)), known, atol=1e-9)
    for kernel in (smooth, rough):
        np.testing.assert_allclose(kernel.diag(X), np.diag(kernel(X)), atol=1e-9)
    # Of the first its inducing inputs leave nothing.
    left = npgp.sparse.factorize(smooth, [npgp.features.Points(Z)], jitter=0.0)(X).residual_variance()
    np.testing.assert_allclose(left, 0.0, atol=1e-9)


# ---------------------------------------------------------------- any likelihood


COUNTS, EFFECT = np.random.default_rng(8).poisson(1.5, N), 0.3 * T


def counts(near, l=0.9, likelihood=None):
    kernel, likelihood = npgp.Matern32(l, variance=1.3), likelihood or npgp.Poisson()
    return npgp.ApproximateGP(kernel, X, Z, likelihood, method="vif", neighbors=near, offset=EFFECT)


def best_gaussian(lengthscale):
    """Of Poisson counts the ELBO at the best Gaussian q(f), and q(f) at new inputs, by dense algebra."""
    kernel = functools.partial(oracles.stationary, "Matern32", lengthscale=lengthscale, variance=1.3)
    K, mean, variance = kernel(X, X), np.zeros(N), np.full(N, 1.3)
    for _ in range(60):
        rate = np.exp(mean + EFFECT + variance / 2)
        y, noise = mean + (COUNTS - rate) / rate, 1 / rate
        mean, S = oracles.gp_posterior(K, K, K, y, noise)
        variance = np.diag(S)
    expected = COUNTS * (mean + EFFECT) - np.exp(mean + EFFECT + variance / 2) - special.gammaln(COUNTS + 1.0)
    solved = np.linalg.solve(K, np.stack([mean, *S], axis=1))
    kl = (np.trace(solved[:, 1:]) + mean @ solved[:, 0] - N + np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1]) / 2
    return np.sum(expected) - kl, oracles.gp_posterior(K, kernel(NEW, X), kernel(NEW, NEW), y, noise)


def test_counts_with_all_rows_as_neighbors_are_of_the_gp(float64):
    whole = nearest_before(X, N - 1)
    value, slope = jax.jit(jax.value_and_grad(lambda l: counts(whole, l).log_prob(COUNTS)))(0.9)
    np.testing.assert_allclose(value, best_gaussian(0.9)[0], rtol=1e-6)
    known = (best_gaussian(0.901)[0] - best_gaussian(0.899)[0]) / 0.002
    np.testing.assert_allclose(slope, known, atol=0.02)  # the search ends at 1e-4 nats, and this by the root of it


def test_counts_with_some_neighbors_are_near_the_gp(float64):
    gp = counts(nearest_before(X, 10))
    posterior, (_, (known, cov)) = gp.condition(COUNTS), best_gaussian(0.9)
    variance = np.diag(cov)
    mean, found = posterior.mean_and_variance(NEW)
    np.testing.assert_allclose((mean - known) / np.sqrt(variance), 0.0, atol=0.15)
    np.testing.assert_allclose(found, variance, rtol=0.1)
    # Where the search ends, pseudo-observations are those of its moments.
    mean, variance = jax.jit(lambda posterior: posterior.at_points())(posterior)
    rate = np.exp(mean + EFFECT + variance / 2)
    np.testing.assert_allclose(posterior.noise_variance, 1 / rate, rtol=1e-2)
    np.testing.assert_allclose(posterior.y, mean + (COUNTS - rate) / rate, atol=1e-2)
    with pytest.raises(ValueError, match="condition takes one of \\(40,\\)"):
        gp.condition(np.stack([COUNTS, COUNTS]))
    with pytest.raises(ValueError, match="y"):
        gp.condition(COUNTS - 9)


def test_other_likelihoods_are_for_vif_and_one_latent_value():
    with pytest.raises(TypeError, match="likelihood is .*Poisson.*noise variance is spelled"):
        npgp.ApproximateGP(matern(), X, Z, npgp.Poisson(), method="fitc")
    with pytest.raises(ValueError, match="2 latent values.*method 'vif' is for one"):
        counts(NEAR, likelihood=npgp.likelihoods.HeteroscedasticGaussian())


# ---------------------------------------------------------------- predictions


def dense_posterior(near_new):
    """Mean and covariance of f at NEW: ε given all observations by its joint Gaussian with y, then its neighbors."""
    L = np.linalg.cholesky(MATERN(Z, Z))
    A, A_new = np.linalg.solve(L, MATERN(Z, X)), np.linalg.solve(L, MATERN(Z, NEW))
    gain = np.linalg.solve(covariance(NEAR), A.T).T
    m, S = gain @ Y, np.eye(len(Z)) - gain @ A.T
    mean, slopes, variance = np.zeros(len(NEW)), np.zeros((len(Z), len(NEW))), np.zeros(len(NEW))
    C = MATERN(X, X) - A.T @ A + np.diag(NOISE)
    for i, n in enumerate(near_new):
        c = MATERN(X[n], NEW[i : i + 1])[:, 0] - A[:, n].T @ A_new[:, i]
        w = np.linalg.solve(C[np.ix_(n, n)], c)
        slopes[:, i] = A_new[:, i] - A[:, n] @ w
        mean[i] = w @ Y[n] + slopes[:, i] @ m
        variance[i] = 1.3 - A_new[:, i] @ A_new[:, i] - w @ c
    return mean, slopes.T @ S @ slopes + np.diag(variance)


def test_posterior_is_that_of_dense_algebra(float64):
    near = nearest(NEW, X, K)
    mean, cov = dense_posterior(near)

    @jax.jit
    def found(y):
        posterior, several = vif().condition(y), vif().condition(jnp.stack([y, 2.0 * y]))
        draws = posterior.sample(jax.random.key(0), NEW, (4000,), neighbors=near)
        of_one = posterior.mean_and_variance(NEW, neighbors=near), posterior.covariance(NEW, neighbors=near), draws
        return *of_one, several.mean(NEW, neighbors=near)

    moments, covariances, draws, means = found(Y)
    np.testing.assert_allclose(moments, (mean, np.diag(cov)), atol=1e-9)
    np.testing.assert_allclose(covariances, cov, atol=1e-9)
    np.testing.assert_allclose(np.cov(draws.T), cov, atol=6 * np.max(np.diag(cov)) / np.sqrt(4000))
    np.testing.assert_allclose(means, np.stack([mean, 2.0 * mean]), atol=1e-9)


@pytest.mark.parametrize("kind", ["vif", "nngp"])
def test_joint_draws_are_of_functions(float64, kind):
    """With all sites for neighbors those of the GP's posterior; of few neighbors, one place twice has one value."""

    def posterior(near):
        if kind == "vif":
            return vif(near).condition(Y)
        return ResponseNNGP(matern(), X, near, noise_variance=NOISE).condition(np.stack([Y, Y]))

    twice = np.concatenate([NEW, NEW[:2] + 0.05])
    mean, cov = oracles.gp_posterior(MATERN(X, X), MATERN(twice, X), MATERN(twice, twice), Y, NOISE)
    whole = posterior(nearest_before(X, N - 1))
    found = np.broadcast_to(whole.covariance(twice), (*whole.batch_shape, *cov.shape))
    np.testing.assert_allclose(found, np.broadcast_to(cov, found.shape), atol=1e-6)
    draws = whole.sample(jax.random.key(0), twice, (4000,)).reshape(-1, len(twice))
    np.testing.assert_allclose(draws.mean(0), mean, atol=5 * np.sqrt(np.max(np.diag(cov)) / 4000))
    np.testing.assert_allclose(np.cov(draws.T), cov, atol=6 * np.max(np.diag(cov)) / np.sqrt(4000))
    same = posterior(NEAR).sample(jax.random.key(0), np.concatenate([NEW, NEW]), (3,))
    np.testing.assert_allclose(same[..., :5], same[..., 5:], atol=1e-2)


def residual_correlation(rows, sites):
    D = MATERN(rows, sites) - explained(MATERN, Z, rows, sites)
    d, e = (1.3 - np.diag(explained(MATERN, Z, x, x)) for x in (rows, sites))
    return np.abs(D) / np.sqrt(d[:, None] * e)


def test_a_kernel_chooses_the_most_correlated_neighbors(float64, monkeypatch):
    monkeypatch.setattr(npgp.neighbors.search, "AMONG", N)  # all are candidates
    near = nearest_before(X, K, kernel=matern(), inducing=Z)
    C = residual_correlation(X, X)
    for place, i in enumerate(near.order):
        before = near.order[:place]
        expected = before[np.argsort(-C[i, before], kind="stable")[:K]]
        assert set(near.rows[i][near.mask[i]]) == set(expected)
    assert np.any(near.rows != NEAR.rows)
    # Without inducing inputs, and for one lengthscale, the nearest are the most correlated.
    np.testing.assert_array_equal(np.sort(nearest_before(X, K, kernel=matern()).rows), np.sort(NEAR.rows))
    # New rows have those of the residual, too.
    best = np.argsort(-residual_correlation(NEW, X), axis=1)[:, :K]
    np.testing.assert_array_equal(nearest(NEW, X, K, kernel=matern(), inducing=Z), best)
    posterior = vif().condition(Y)
    monkeypatch.setattr("npgp.collapsed.approximations.AMONG", N)
    np.testing.assert_allclose(
        posterior.mean_and_variance(NEW), posterior.mean_and_variance(NEW, neighbors=best), atol=1e-12
    )


def test_distances_are_in_units_of_the_kernels_lengthscales():
    kernel = npgp.Matern32(np.array([0.1, 10.0]))
    near = nearest_before(X, 3, kernel=kernel)
    np.testing.assert_array_equal(near.scale, kernel.lengthscale)
    np.testing.assert_array_equal(near.order, nearest_before(X / [0.1, 10.0], 3).order)


# ---------------------------------------------------------------- in a model


def model(X=X, y=Y, X_near=X[NEAR.rows], y_near=None, t=T, t_near=T[NEAR.rows], noise=NOISE, near_noise=None, size=N):
    """Two components, one with a factor, and an offset of the rows."""
    y_near = np.where(NEAR.mask, Y[NEAR.rows], np.nan) if y_near is None else y_near
    near_noise = NOISE[NEAR.rows] if near_noise is None else near_noise
    f = npgp.SparseGP("f", matern(), Z, jitter=0.0).draw()
    g = npgp.SparseGP("g", npgp.RBF(1.5, variance=0.7), Z[:3] + 1.0, jitter=0.0).draw()

    def values(X, t):
        return f(X) + 2.0 * g(X) + 0.5 * t

    with npgp.plate("rows", size, rows=len(X)):
        near = values(X_near.reshape(-1, 2), t_near.ravel()), y_near, npgp.Gaussian(variance=near_noise)
        npgp.observe("y", values(X, t), npgp.Gaussian(variance=noise), obs=y, neighbors=near)


PARTS = ((MATERN, Z, 1.0), (RBF, Z[:3] + 1.0, 2.0))


def test_elbo_at_its_optimum_is_the_evidence(float64):
    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())
    elbo = -jax.jit(lambda key: svi.evaluate(svi.init(key)))(jax.random.key(0))
    np.testing.assert_allclose(elbo, oracles.log_normal(Y - 0.5 * T, covariance(NEAR, PARTS)), rtol=1e-9)


def rows(which):
    x, y, t, noise, near, mask = (jnp.asarray(array) for array in (X, Y, T, NOISE, NEAR.rows, NEAR.mask))
    near = near[which]
    return dict(
        X=x[which], y=y[which], X_near=x[near], y_near=jnp.where(mask[which], y[near], jnp.nan), t=t[which],
        t_near=t[near], noise=noise[which], near_noise=noise[near], size=N,
    )  # fmt: skip


def test_batches_add_up_to_the_whole(float64):
    """The ELBO at one q, and its average over the batches of a partition."""
    guide = npgp.AutoSparseGP(model, joint=False)
    svi = SVI(model, guide, npgp.adam(0.01), TraceMeanField_ELBO())
    batches = np.arange(N).reshape(5, -1)

    @jax.jit
    def found(key):
        state = svi.init(key, **rows(batches[0]))
        each = jax.lax.map(lambda batch: svi.evaluate(state, **rows(batch)), batches)
        return each, svi.evaluate(state, **rows(np.arange(N)))

    each, whole = found(jax.random.key(0))
    np.testing.assert_allclose(np.mean(each), whole, rtol=1e-10)
    assert np.ptp(each) > 1.0


def test_without_a_guide_it_is_the_density_given_inducing_values(float64):
    e = {"f.u": RNG.normal(size=6), "g.u": RNG.normal(size=3)}
    density = jax.jit(lambda e: log_density(model, (), {}, e)[0])(e)
    mean = 0.5 * T
    for (kernel, Z, a), value in zip(PARTS, e.values(), strict=True):
        mean = mean + a * np.linalg.solve(np.linalg.cholesky(kernel(Z, Z)), kernel(Z, X)).T @ value
    Q = sum(a**2 * explained(kernel, Z, X, X) for kernel, Z, a in PARTS)
    C = covariance(NEAR, PARTS) - Q
    expected = oracles.log_normal(Y - mean, C) + sum(oracles.log_normal(v, np.eye(len(v))) for v in e.values())
    np.testing.assert_allclose(density, expected, rtol=1e-9)


def test_predictions_at_new_rows(float64):
    """Draws given q at its optimum, beside the posterior of the collapsed model."""

    def one(X=X, y=Y, X_near=X[NEAR.rows], y_near=None, noise=NOISE, near_noise=NOISE[NEAR.rows]):
        y_near = np.where(NEAR.mask, Y[NEAR.rows], np.nan) if y_near is None else y_near
        f = npgp.SparseGP("f", matern(), Z, jitter=0.0).draw()
        with numpyro.plate("rows", len(X)):
            near = f(X_near.reshape(-1, 2)), y_near, npgp.Gaussian(variance=near_noise)
            npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y, neighbors=near)

    near = nearest(NEW, X, K)
    posterior = vif().condition(Y)
    draws = {"f.u": posterior.q.sample(jax.random.key(0), (20_000,))}
    new = dict(X=NEW, y=None, X_near=X[near], y_near=Y[near], noise=0.1 * np.ones(5), near_noise=NOISE[near])
    found = Predictive(one, draws)(jax.random.key(1), **new)
    mean, variance = posterior.mean_and_variance(NEW, neighbors=near)
    for values, extra in ((found["y.latent"], 0.0), (found["y"], 0.1)):
        sd = np.sqrt(variance + extra)
        np.testing.assert_allclose(values.mean(0), mean, atol=5 * np.max(sd) / np.sqrt(20_000))
        np.testing.assert_allclose(values.std(0), sd, rtol=5 / np.sqrt(2 * 20_000))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(method="vif"), "neighbors is missing, but method is 'vif'"),
        (dict(neighbors=3), "neighbors is given, but method is 'fitc'"),
        (dict(method="vif", neighbors=0), "neighbors is 0; it must be at least 1"),
        (dict(method="vif", neighbors=nearest_before(X[:9], 2)), "neighbors are those of 9 sites, but X has 40 rows"),
    ],
)
def test_method_and_neighbors_go_together(options, words):
    with pytest.raises(ValueError, match=words):
        npgp.ApproximateGP(matern(), X, Z, noise_variance=0.1, **options)


def test_functionals_have_no_neighbors():
    with pytest.raises(ValueError, match="X has functionals; method 'vif' is for values of f at inputs"):
        npgp.ApproximateGP(
            matern(), npgp.functionals.derivative(X), Z, noise_variance=0.1, method="vif", neighbors=NEAR
        )


def test_inducing_inputs_need_a_kernel():
    with pytest.raises(ValueError, match="inducing is given without a kernel"):
        nearest_before(X, 3, inducing=Z)


REFUSED = {
    "pair": (lambda f, h, near: dict(neighbors=f(X)), TypeError, "neighbors is a Latent; it must be neighbors="),
    "likelihood": (
        lambda f, h, near: dict(likelihood=npgp.StudentT(df=4.0, scale=1.0), neighbors=near),
        ValueError,
        "for Gaussian noise, and the likelihood is StudentT",
    ),
    "shape": (
        lambda f, h, near: dict(neighbors=(near[0], np.zeros((N, 3)))),
        ValueError,
        r"values of shape \(160,\) and observations of shape \(40, 3\)",
    ),
    "other function": (
        lambda f, h, near: dict(neighbors=(h(X[NEAR.rows.ravel()]), near[1])), ValueError, "values of other functions"),
    "noise": (
        lambda f, h, near: dict(likelihood=npgp.Gaussian(variance=NOISE), neighbors=near),
        ValueError,
        "differs between rows, so neighbors need theirs",
    ),
    "groups": (
        lambda f, h, near: dict(
            conditional=npgp.conditionals.Grouped(npgp.sparse.median_split(X, 4)), neighbors=near),
        ValueError,
        "takes rows together",
    ),
    "slopes": (lambda f, h, near: dict(latent=f.derivative(X), neighbors=near), ValueError, "f has no neighbors"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_neighbors_is_refused(case):
    make, error, words = REFUSED[case]
    with handlers.seed(rng_seed=0):
        f, h = (npgp.SparseGP(name, matern(), Z).draw() for name in "fh")
        near = f(X[NEAR.rows.ravel()]), np.where(NEAR.mask, Y[NEAR.rows], np.nan)
        options = dict(latent=f(X), likelihood=npgp.Gaussian(variance=0.1)) | make(f, h, near)
        with pytest.raises(error, match=words):
            npgp.observe("y", options.pop("latent"), options.pop("likelihood"), obs=Y, **options)
