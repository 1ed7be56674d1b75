"""Initial inducing points: greedy choices against dense algebra step by step, k-means, random rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import oracles
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO
from sklearn.cluster import KMeans

import npgp
from npgp.features import Points
from npgp.inducing.selection import CHUNK, greedy_fit, greedy_variance, kmeans, random_subset
from npgp.kernels import RBF, Linear, Matern32, White
from npgp.sparse.groups import kmeans_centers
from npgp.sparse.projection import factorize

JITTER = {jnp.float32: 1e-6, jnp.float64: 1e-12}
N, M = 30, 6


def data(dtype=np.float64, seed=0):
    return np.random.default_rng(seed).uniform(0.0, 4.0, (N, 2)).astype(dtype)


def formula(X, X2):
    return oracles.stationary("Matern32", X, X2, 0.8, 1.7)


def kernel():
    return Matern32(0.8, variance=1.7)


def conditional_variances(kernel, Z, X):
    """Var[f(X) | f(Z)], by dense algebra."""
    prior = np.array([kernel(x[None], x[None])[0, 0] for x in X])
    if len(Z) == 0:
        return prior
    K = kernel(Z, X)
    return prior - np.sum(K * np.linalg.solve(kernel(Z, Z), K), axis=0)


def brute_force(kernel, X, size, given=()):
    """At each step the row whose exact conditional variance is largest, and the sum that is left."""
    Z = np.concatenate([np.empty((0, X.shape[1])), *given])
    variances = conditional_variances(kernel, Z, X)
    rows, traces = [], [variances.sum()]
    for _ in range(size):
        rows.append(int(np.argmax(variances)))
        variances = conditional_variances(kernel, np.concatenate([Z, X[rows]]), X)
        traces.append(variances.sum())
    return rows, traces


# ---------------------------------------------------------------- greedy


@pytest.mark.parametrize("sizes", [(), (3,), (2, 2)], ids=["alone", "given", "given two"])
def test_greedy_takes_the_largest_exact_conditional_variance(x64, sizes):
    X = data(x64)
    given = [np.random.default_rng(5 + i).uniform(0.0, 4.0, (m, 2)).astype(x64) for i, m in enumerate(sizes)]
    rows, traces = brute_force(formula, X.astype(float), M, [Z.astype(float) for Z in given])
    Z, made = greedy_variance(kernel(), X, M, given=given, jitter=JITTER[x64], return_trace=True)
    assert isinstance(Z, jax.Array) and Z.dtype == made.dtype == x64 and made.shape == (M + 1,)
    np.testing.assert_array_equal(Z, X[rows])
    np.testing.assert_allclose(made, traces, rtol=1e-4 if x64 == jnp.float32 else 1e-9)
    assert np.all(np.diff(made) < 0.0)


def test_given_is_a_block_an_array_or_several():
    X, Z = data(np.float32), data(np.float32, seed=1)[:3]
    expected = greedy_variance(kernel(), X, M, given=[Z])
    assert not np.array_equal(expected, greedy_variance(kernel(), X, M))
    for given in (Z, Points(Z), [Points(Z)], (jnp.asarray(Z),)):
        np.testing.assert_array_equal(greedy_variance(kernel(), X, M, given=given), expected)


def test_trace_is_that_of_the_projection_and_falls_to_nothing(x64):
    X = data(x64)
    Z, trace = greedy_variance(RBF(1.5), X, N, return_trace=True)

    @jax.jit
    def residual(Z):
        return factorize(RBF(1.5), [Points(Z)])(X).residual_variance().sum()

    np.testing.assert_allclose(trace[0], N, rtol=1e-6)
    np.testing.assert_allclose(trace[M], residual(Z[:M]), rtol=1e-2 if x64 == jnp.float32 else 1e-4)
    # A smooth function leaves less than the jitter, where all is rounding: still no trace rises, and no row repeats.
    assert np.all(np.diff(trace) <= 0.0) and 0.0 <= trace[-1] < N * (1e-4 if x64 == jnp.float32 else 1e-7)
    assert len(np.unique(Z, axis=0)) == N


def test_white_noise_is_never_explained(float64):
    """Each value has noise of its own, the inducing values too."""
    X = data()
    Z, trace = greedy_variance(kernel() + White(variance=0.5), X, M, jitter=1e-12, return_trace=True)
    K = formula(Z, Z) + 0.5 * np.eye(M)
    left = N * 2.2 - np.sum(formula(Z, X) * np.linalg.solve(K, formula(Z, X)))
    np.testing.assert_allclose(trace[-1], left, rtol=1e-8)
    assert trace[-1] > N * 0.5


def test_few_points_suffice_for_a_kernel_of_few_dimensions():
    _, trace = greedy_variance(Linear(variance=1.0), data(np.float32), 4, return_trace=True)
    assert trace[1] > 0.05 * trace[0] and np.all(np.asarray(trace[2:]) < 1e-3 * trace[0])


def test_duplicates_are_chosen_once_and_then_refused():
    X = np.repeat(data(np.float32)[:5], 4, axis=0)
    with pytest.raises(ValueError, match="size is 7, but X has only 5 different rows"):
        greedy_variance(kernel(), X, 7)
    traced = jax.jit(lambda X: greedy_variance(kernel(), X, 7))(X)
    np.testing.assert_array_equal(np.unique(traced[:5], axis=0), np.unique(X, axis=0))
    assert np.all(np.isnan(traced[5:]))


def test_many_rows_take_no_square_matrix():
    X = np.random.default_rng(0).normal(size=(60_000, 2)).astype(np.float32)
    lowered = jax.jit(lambda X: greedy_variance(RBF(), X, 4)).lower(X)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 60_000 * 4 * 100


# ---------------------------------------------------------------- greedy fit


def quadratic_form(kernel, Z, X, y, noise):
    """``yᵀ (Q + Λ)⁻¹ y``, summed over outputs, by dense algebra."""
    Q = np.zeros((len(X), len(X)))
    if len(Z):
        K = kernel(Z, X)
        Q = K.T @ np.linalg.solve(kernel(Z, Z), K)
    return np.sum(y * np.linalg.solve(Q + np.diag(np.broadcast_to(noise, len(X))), y.T).T)


FITS = {
    "one output": (lambda rng, X: np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=len(X)), lambda rng, X: 0.1),
    "two outputs, noise by row": (
        lambda rng, X: rng.normal(size=(2, len(X))),
        lambda rng, X: rng.uniform(0.1, 1, len(X)),
    ),
}


@pytest.mark.parametrize("make_y, make_noise", FITS.values(), ids=FITS)
def test_greedy_fit_takes_the_best_of_all_rows(x64, make_y, make_noise):
    rng = np.random.default_rng(2)
    X = rng.uniform(0.0, 4.0, (CHUNK + 6, 2)).astype(x64)  # more than are looked at together
    X[-3:] = X[:3]
    y, noise = make_y(rng, X).astype(x64), make_noise(rng, X)
    Z, trace = greedy_fit(
        jax.random.key(0),
        kernel(),
        X,
        y,
        4,
        noise_variance=noise,
        candidates=None,
        jitter=JITTER[x64],
        return_trace=True,
    )
    assert isinstance(Z, jax.Array) and Z.dtype == trace.dtype == x64 and trace.shape == (5,)

    exact, chosen = (X.astype(float), y.astype(float), noise), np.empty((0, 2))
    values = [quadratic_form(formula, chosen, *exact)]
    for _ in range(4):
        new = [x for x in exact[0] if not np.any(np.all(x == chosen, axis=1))]
        reached = [quadratic_form(formula, np.vstack([chosen, x]), *exact) for x in new]
        values.append(min(reached))
        chosen = np.vstack([chosen, new[int(np.argmin(reached))]])
    np.testing.assert_array_equal(Z, chosen)
    np.testing.assert_allclose(trace, values, rtol=1e-4 if x64 == jnp.float32 else 1e-8)
    assert np.all(np.diff(values) < 0.0)


def test_greedy_fit_of_random_candidates():
    X = data(np.float32)
    y = np.sin(2.0 * X[:, 0])

    def choose(candidates, keys):
        return jax.lax.map(
            lambda key: greedy_fit(
                key, kernel(), X, y, M, noise_variance=0.1, candidates=candidates, return_trace=True
            ),
            keys,
        )

    keys = jax.random.split(jax.random.key(0), 20)
    one, some, everyone = (choose(candidates, keys) for candidates in (1, 8, 10 * N))
    np.testing.assert_array_equal(everyone[0], np.broadcast_to(everyone[0][0], (20, M, 2)))
    for Z, _ in (one, some):
        assert len({tuple(np.ravel(z)) for z in np.asarray(Z)}) == 20  # other keys, other rows
        for z in np.asarray(Z):
            assert len(np.unique(z, axis=0)) == M and {*map(tuple, z)} <= {*map(tuple, X)}
    for _, trace in (one, some, everyone):
        assert np.all(np.diff(trace, axis=1) <= 1e-3)
    last = [np.mean(trace[:, -1]) for _, trace in (one, some, everyone)]
    assert last[0] > 1.5 * last[1] and last[1] > last[2]
    # A single candidate is any row with equal probability: each is the first with probability 1/30.
    firsts = jax.vmap(lambda key: greedy_fit(key, kernel(), X, y, 1, noise_variance=0.1, candidates=1)[0])(
        jax.random.split(jax.random.key(1), 3000)
    )
    counts = np.sum(np.all(np.asarray(firsts)[:, None] == X, axis=-1), axis=0)
    np.testing.assert_allclose(counts, 100, atol=5 * np.sqrt(100))


def test_greedy_fit_goes_where_the_function_varies():
    """Most rows are where the function does not, which random rows do not know."""
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.uniform(0.0, 20.0, 270), rng.uniform(20.0, 24.0, 30)])[:, None]
    truth = np.where(X[:, 0] > 20.0, np.sin(3.0 * X[:, 0]), 0.0)
    y = truth + 0.1 * rng.normal(size=300)

    @jax.jit
    def choose(key):
        return greedy_fit(key, Matern32(0.8, variance=1.7), X, y, 8, noise_variance=0.01), random_subset(key, X, 8)

    errors = []
    for key in jax.random.split(jax.random.key(0), 5):
        for Z in choose(key):
            K, noise = formula(np.asarray(Z, float), X), 0.01
            mean = K.T @ np.linalg.solve(noise * formula(Z, Z) + K @ K.T, K @ y)
            errors.append(np.sqrt(np.mean((mean - truth) ** 2)))
    greedy, random = np.reshape(errors, (5, 2)).T
    assert greedy.max() < 0.5 * random.min()


def test_greedy_fit_refuses_what_it_cannot_fit():
    X, key = data(np.float32), jax.random.key(0)
    y = X[:, 0]
    for error, words, (values, noise) in [
        (ValueError, r"y has shape \(29,\); it must be \(\.\.\., 30\)", (y[1:], 0.1)),
        (ValueError, "y has NaN", (np.where(y == y[2], np.nan, y), 0.1)),
        (ValueError, "noise_variance is 0.0; it must be positive", (y, 0.0)),
        (ValueError, r"noise_variance has shape \(3,\)", (y, np.ones(3))),
    ]:
        with pytest.raises(error, match=words):
            greedy_fit(key, kernel(), X, values, 2, noise_variance=noise)
    for error, words, candidates in [
        (ValueError, "candidates is 0; it must be at least 1", 0),
        (TypeError, "candidates is 2.5; it must be a whole number", 2.5),
    ]:
        with pytest.raises(error, match=words):
            greedy_fit(key, kernel(), X, y, 2, noise_variance=0.1, candidates=candidates)
    with pytest.raises(TypeError, match="kernel is None"):
        greedy_fit(key, None, X, y, 2, noise_variance=0.1)


def test_greedy_fit_refuses_more_points_than_there_are():
    X = np.repeat(data(np.float32)[:5], 4, axis=0)
    y = np.sin(X[:, 0])
    with pytest.raises(ValueError, match="size is 7, but X has only 5 different rows"):
        greedy_fit(jax.random.key(0), kernel(), X, y, 7, noise_variance=0.1)
    traced = jax.jit(lambda X: greedy_fit(jax.random.key(0), kernel(), X, y, 7, noise_variance=0.1))(X)
    np.testing.assert_array_equal(np.unique(traced[:5], axis=0), np.unique(X, axis=0))
    assert np.all(np.isnan(traced[5:]))


# ---------------------------------------------------------------- k-means and random rows


def distortion(Z, X):
    return np.mean(np.min(np.sum((X[:, None] - np.asarray(Z)) ** 2, -1), axis=1))


@pytest.mark.parametrize("part", [False, True], ids=["all rows", "a part"])
def test_kmeans_comes_nearer_than_random_rows(x64, part, monkeypatch):
    X = np.random.default_rng(0).normal(size=(500, 2)).astype(x64)
    if part:
        monkeypatch.setattr("npgp.sparse.groups.FULL_KMEANS_ROWS", 100)
        monkeypatch.setattr("npgp.sparse.groups.ROWS_PER_CENTER", 8)
    Z = kmeans(jax.random.key(0), X, 12)
    assert isinstance(Z, jax.Array) and Z.shape == (12, 2) and Z.dtype == x64
    random = [distortion(random_subset(key, X, 12), X) for key in jax.random.split(jax.random.key(0), 5)]
    assert distortion(Z, X) < 0.8 * min(random)
    np.testing.assert_array_equal(Z, kmeans(jax.random.key(0), X, 12))
    assert not np.array_equal(Z, kmeans(jax.random.key(1), X, 12))


def test_kmeans_finds_the_clusters(x64):
    centers = np.array([[-5.0, 0.0], [0.0, 7.0], [5.0, 0.0]])
    X = (centers[:, None] + 0.1 * np.random.default_rng(0).normal(size=(3, 40, 2))).astype(x64)
    np.testing.assert_allclose(
        np.sort(kmeans(jax.random.key(0), X.reshape(-1, 2), 3), 0), np.sort(X.mean(1), 0), rtol=1e-4, atol=1e-4
    )


def test_kmeans_is_as_good_as_another(x64):
    X = np.random.default_rng(3).normal(size=(600, 3)).astype(x64) + 1e3  # far from zero, where distances round
    Z = kmeans(jax.random.key(0), X, 20)
    other = KMeans(20, n_init=5, random_state=0).fit(X.astype(np.float64)).inertia_ / len(X)
    assert distortion(Z, X.astype(np.float64)) < 1.05 * other  # local optima differ by about 2%
    nearest = np.argmin(np.sum((X[:, None].astype(np.float64) - np.asarray(Z)) ** 2, -1), axis=1)
    means = np.array([X[nearest == k].mean(axis=0, dtype=np.float64) for k in range(20)])
    np.testing.assert_allclose(Z, means, atol=0.02)  # it stops when centers move little


def test_kmeans_keeps_a_center_that_loses_its_rows():
    X = np.random.default_rng(2836).normal(size=(12, 2))  # from this start one of six centers ends without a row
    generator = np.random.default_rng(2836)
    assert kmeans_centers(X, 6, generator).shape == (6, 2)


def test_kmeans_refuses_more_points_than_there_are_and_tracing():
    X = np.repeat(data()[:5], 4, axis=0)
    assert kmeans(jax.random.key(0), X, 5).shape == (5, 2)
    with pytest.raises(ValueError, match="size is 7, but k-means found only 5 different clusters"):
        kmeans(jax.random.key(0), X, 7)
    with pytest.raises(TypeError, match="X is traced; k-means runs outside jit"):
        jax.jit(lambda X: kmeans(jax.random.key(0), X, 2))(X)


def test_random_rows_are_different_and_equally_likely(x64):
    X = np.arange(6.0).astype(x64)[:, None]
    draws = jax.jit(jax.vmap(lambda key: random_subset(key, X, 2)))(jax.random.split(jax.random.key(0), 3000))
    assert draws.shape == (3000, 2, 1) and draws.dtype == x64
    assert np.all(draws[:, 0] != draws[:, 1])
    counts = np.bincount(np.asarray(draws, int).ravel(), minlength=6)
    np.testing.assert_allclose(counts, 1000, atol=5 * np.sqrt(3000 * 1 / 3 * 2 / 3))


# ---------------------------------------------------------------- in a model, and what is refused


STARTS = {
    "random": lambda key, X: npgp.inducing.random_subset(key, X, 4),
    "greedy": lambda key, X: npgp.inducing.greedy_variance(kernel(), X, 4),
    "greedy fit": lambda key, X: npgp.inducing.greedy_fit(
        key, kernel(), X, np.sin(data(np.float32)[:, 0]), 4, noise_variance=0.1
    ),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_initial_values_in_a_model(start):
    X = data(np.float32)
    y = np.sin(X[:, 0])

    def model(X):
        f = npgp.SparseGP("f", kernel(), inducing=numpyro.param("Z", lambda key: start(key, X))).draw()
        with numpyro.plate("data", N):
            npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), numpyro.optim.Adam(0.05), TraceMeanField_ELBO())

    @jax.jit
    def init_and_step(key, X):
        state = svi.init(key, X)
        after, loss = svi.update(state, X)
        return svi.get_params(state)["Z"], svi.get_params(after)["Z"], loss

    first, moved, loss = init_and_step(jax.random.key(0), X)
    rows = np.argmin(np.sum((X - first[:, None]) ** 2, -1), axis=1)
    np.testing.assert_array_equal(first, X[rows])
    assert len(set(rows.tolist())) == 4
    assert np.isfinite(loss) and np.all(np.isfinite(moved)) and not np.array_equal(moved, first)


CHOICES = {
    "random_subset": lambda X, size: random_subset(jax.random.key(0), X, size),
    "kmeans": lambda X, size: kmeans(jax.random.key(0), X, size),
    "greedy_variance": lambda X, size: greedy_variance(RBF(), X, size),
    "greedy_fit": lambda X, size: greedy_fit(jax.random.key(0), RBF(), X, np.ones(N), size, noise_variance=0.1),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_bad_inputs_are_refused(choose):
    X = data()
    for error, words, inputs, size in [
        (ValueError, "X has NaN or infinite", np.where(X == X[3], np.nan, X), 2),
        (ValueError, r"X has shape \(30,\)", X[:, 0], 2),
        (TypeError, "X has dtype int64", X.astype(int), 2),
        (ValueError, "size is 31; it must be between 1 and the 30 rows of X", X, 31),
        (ValueError, "size is 0", X, 0),
        (TypeError, "size is 2.0; it must be a whole number", X, 2.0),
    ]:
        with pytest.raises(error, match=words):
            choose(inputs, size)


def test_lists_are_arrays_and_what_is_no_key_or_kernel_is_named():
    X = data()
    for choose in CHOICES.values():
        np.testing.assert_array_equal(choose(X.tolist(), 3), choose(X, 3))
    for call in (lambda: random_subset(0, X, 2), lambda: greedy_fit(0, RBF(), X, np.ones(N), 2, noise_variance=0.1)):
        with pytest.raises(TypeError, match="^rng_key is 0; it must be a random key"):
            call()
    with pytest.raises(TypeError, match="^kernel is 'rbf'; it must be a kernel"):
        greedy_variance("rbf", X, 2)


def test_bad_given_blocks_are_named():
    with pytest.raises(ValueError, match=r"given\[1\] has shape \(2,\)"):
        greedy_variance(RBF(), data(), 3, given=[np.zeros((2, 2)), np.zeros(2)])
