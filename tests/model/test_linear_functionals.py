"""Statements about linear functionals of a draw: differences, sums by a matrix, averages and slopes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import oracles
import pytest
from models import compiled, keys, train
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp.functionals import at, derivative

RNG = np.random.default_rng(0)
X, X2 = np.sort(RNG.uniform(0.0, 4.0, (2, 8, 1)), axis=1)
Z = np.linspace(-0.2, 4.2, 6)[:, None]
WEIGHT, B = RNG.normal(size=8), RNG.normal(size=(5, 8))
Y = np.sin(X[:, 0]) - WEIGHT * np.sin(X2[:, 0]) + 0.1 * RNG.normal(size=8)
KERNEL = npgp.RBF(1.1)


def draw(name="f", kernel=KERNEL):
    return npgp.SparseGP(name, kernel, Z, jitter=1e-9).draw()


def rbf(a, b):
    return np.exp(-0.5 * np.square((a - b.T) / 1.1))


def optimum(model, *args, rate=0.01, **kwargs):
    """The best ELBO with Gaussian noise, after natural steps of rate 1; and q's parameters."""
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.natural_gradient(1.0, npgp.adam(rate)), TraceMeanField_ELBO())

    @compiled
    def run():
        state = svi.init(jax.random.key(0), *args, **kwargs)
        state, _ = jax.lax.scan(lambda state, _: svi.update(state, *args, **kwargs), state, length=3)
        return svi.get_params(state), -svi.evaluate(state, *args, **kwargs)

    params, elbo = run()
    return guide, params, float(elbo)


def test_terms_of_one_draw_are_one_functional(float64):
    def model(y=None):
        f = draw()
        npgp.observe("y", f(X) - WEIGHT * f(X2) + 0.3, npgp.Gaussian(variance=0.01), obs=y)

    *_, found = optimum(model, y=Y + 0.3)
    matrix = np.concatenate([np.eye(8), -np.diag(WEIGHT)], 1)
    both = np.concatenate([X, X2])
    dense = oracles.Joint(
        (6,), rbf(Z, Z) + 1e-9 * np.eye(6), rbf(Z, both) @ matrix.T, matrix @ rbf(both, both) @ matrix.T
    )
    np.testing.assert_allclose(found, dense.bound(Y, 0.01, [True], "tight"), atol=1e-5)


def test_values_and_slopes_in_one_model_are_the_exact_joint_posterior(float64):
    inducing = np.linspace(0.0, 4.0, 15)[:, None]
    y, slope = np.sin(X[:, 0]), np.cos(X2[:, 0])

    def model(y=None, slope=None):
        f = npgp.SparseGP("f", KERNEL, inducing, jitter=1e-10).draw()
        npgp.observe("y", f(X), npgp.Gaussian(scale=0.02), obs=y)
        npgp.observe("slope", f.derivative(X2), npgp.Gaussian(scale=0.05), obs=slope)

    guide, params, found = optimum(model, y=y, slope=slope)

    def value_slope(a, b):
        return rbf(a, b) * (a - b.T) / 1.21

    def slope_slope(a, b):
        return rbf(a, b) * (1.0 / 1.21 - np.square((a - b.T) / 1.21))

    K = np.block([[rbf(X, X), value_slope(X, X2)], [value_slope(X, X2).T, slope_slope(X2, X2)]])
    K += np.diag(np.repeat([0.02**2, 0.05**2], 8))
    observed = np.concatenate([y, slope])
    assert found == pytest.approx(oracles.log_normal(observed, K), abs=1e-3)
    posterior = npgp.posterior("f", model, guide, params, y=y, slope=slope)
    new = np.linspace(0.3, 3.7, 4)[:, None]
    crosses = {
        at: (np.concatenate([rbf(new, X), value_slope(new, X2)], 1), np.ones(4)),
        derivative: (np.concatenate([value_slope(X, new).T, slope_slope(new, X2)], 1), np.full(4, 1 / 1.21)),
    }
    for make, (C, prior) in crosses.items():
        mean, variance = compiled(lambda make=make: posterior.mean_and_variance(make(new)))()
        np.testing.assert_allclose(mean, C @ np.linalg.solve(K, observed), atol=1e-5)
        exact = prior - np.sum(C * np.linalg.solve(K, C.T).T, 1)
        np.testing.assert_allclose(np.sqrt(variance), np.sqrt(exact), rtol=1e-4)


def test_sums_by_a_matrix_beside_another_function_are_dense_algebra(float64):
    def model(y=None):
        f, g = draw(), draw("g", npgp.Matern32(0.7))
        npgp.observe("y", B @ (2.0 * f(X)) + g.average(jnp.stack([X[:5], X2[:5]], 1)), npgp.Gaussian(scale=0.2), obs=y)

    y = np.random.default_rng(1).normal(size=5)
    _, _, found = optimum(model, y=y)
    matern = lambda a, b: oracles.stationary("Matern32", a, b, 0.7)  # noqa: E731
    halves, both = 0.5 * np.concatenate([np.eye(5), np.eye(5)], 1), np.concatenate([X[:5], X2[:5]])
    jitter, none = 1e-9 * np.eye(6), np.zeros((6, 6))
    K_uu = np.block([[rbf(Z, Z) + jitter, none], [none, matern(Z, Z) + jitter]])
    K_uf = np.concatenate([2.0 * rbf(Z, X) @ B.T, matern(Z, both) @ halves.T])
    K_ff = 4.0 * B @ rbf(X, X) @ B.T + halves @ matern(both, both) @ halves.T
    # One q(ε) for both functions: one block.
    expected = oracles.Joint((12,), K_uu, K_uf, K_ff).bound(y, 0.04, [True], "tight")
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_values_sampled_later_agree_with_sampled_functionals(float64):
    def program():
        f = draw()
        d = npgp.sample("d", f(X) - WEIGHT * f(X2))
        s = npgp.sample("s", f.derivative(X[:2]))
        return d, s, npgp.sample("a", f(X)), npgp.sample("b", f(X2)), npgp.sample("t", f.derivative(X[:2]))

    d, s, a, b, t = jax.jit(lambda: handlers.seed(program, 0)())()
    np.testing.assert_allclose(a - WEIGHT * b, d, atol=1e-3)  # to the jitter's noise
    np.testing.assert_allclose(t, s, atol=3e-3)
    assert np.std(d) > 0.1 and np.min(np.abs(s)) > 0.1  # neither is 0


def test_functions_of_a_plate_each_have_their_functionals(float64):
    lengthscale = np.array([[0.7], [1.4]])

    def model(y=None):
        with numpyro.plate("functions", 2, dim=-2):
            f = draw(kernel=npgp.RBF(lengthscale))
            with numpyro.plate("rows", 8):
                npgp.observe("y", f(X) - f(X2), npgp.Gaussian(variance=0.1), obs=y)

    y = np.random.default_rng(2).normal(size=(2, 8))
    guide, params, found = optimum(model, y=y)
    apart = [
        npgp.CollapsedGP(npgp.RBF(scale), at(X) - at(X2), Z, noise_variance=0.1, jitter=1e-9) for scale in (0.7, 1.4)
    ]

    @compiled
    def expected(y):
        return [(gp.log_prob(y[i]), gp.condition(y[i]).derivative(X2)) for i, gp in enumerate(apart)]

    slopes = compiled(lambda: npgp.posterior("f", model, guide, params, y=y).derivative(X2))()
    bounds, own = zip(*expected(y), strict=True)
    np.testing.assert_allclose(found, sum(bounds), atol=1e-6)
    for i, each in enumerate(own):
        for a, b in zip(slopes, each, strict=True):
            np.testing.assert_allclose(a[i], b, atol=1e-6)


def test_images_are_averages_of_patches(float64):
    """Classes share patches and weights of places; with Gaussian noise dense algebra knows the ELBO."""
    places = np.lib.stride_tricks.sliding_window_view(np.arange(20).reshape(4, 5), (2, 3)).reshape(9, 6)
    images, labels = np.random.default_rng(3).normal(size=(8, 20)), np.arange(8) % 3
    patches, start = images[:3, places].reshape(-1, 6)[::4], np.linspace(0.5, 1.5, 9) / 9

    def values(images):
        kernel = npgp.RBF(numpyro.param("lengthscale", 2.0), variance=9.0)
        f = npgp.SparseGP("f", kernel, numpyro.param("Z", patches), jitter=1e-9).draw()
        return f.average(images[:, places], numpyro.param("weights", start))

    def model(images, y=None):
        with numpyro.plate("classes", 3, dim=-2):
            f = values(images)
        with npgp.plate("data", 8, rows=len(images)):
            npgp.observe("y", f, npgp.likelihoods.Softmax(3), obs=y)

    params, losses = train(model, npgp.AutoSparseGP(model), 30, images, labels)
    assert losses[-1] < losses[0]
    assert np.ptp(params["weights"] - start) > 1e-3  # the weights are learned

    def squared(a, b):
        return 9.0 * np.exp(-np.sum(np.square(a[:, None] - b), -1) / 8.0)

    sums, cut = np.kron(np.eye(8), start), images[:, places].reshape(-1, 6)
    K_uu = squared(patches, patches) + 9e-9 * np.eye(len(patches))
    dense = oracles.Joint((len(patches),), K_uu, squared(patches, cut) @ sums.T, sums @ squared(cut, cut) @ sums.T)
    y = np.random.default_rng(1).normal(size=(3, 8))

    def gaussian(images, y=None):
        with numpyro.plate("classes", 3, dim=-2):
            f = values(images)
            with numpyro.plate("data", 8):
                npgp.observe("y", f, npgp.Gaussian(scale=0.3), obs=y)

    _, _, found = optimum(gaussian, images, y, rate=0.0)
    np.testing.assert_allclose(found, sum(dense.bound(row, 0.09, [True], "tight") for row in y), atol=1e-4)


def test_latent_inputs_have_differences_and_averages(float64):
    first, second = np.array([0, 1, 2, 0]), np.array([3, 2, 0, 1])

    def rows(x, y=None):
        f = draw()
        npgp.observe("y", f(x[first]) - f(x[second]), npgp.Gaussian(scale=0.3), obs=y)
        z = None if y is None else y[:2]
        npgp.observe("z", f.average(jnp.stack([x[:2], x[2:]])), npgp.Gaussian(scale=0.3), obs=z)

    def latent(y=None):
        rows(numpyro.sample("x", dist.Normal(0.0, 2.0).expand([4, 1]).to_event(2)), y)

    y, x = [0.3, -0.2, 0.5, 0.1], X[:4]
    params = {"f.u.loc": jnp.linspace(-1.0, 1.0, 6), "f.u.scale_tril": 0.5 * jnp.eye(6)}

    plain = lambda y=None: rows(jnp.asarray(x), y)  # noqa: E731
    guide = npgp.AutoSparseGP(plain)

    @jax.jit
    @jax.value_and_grad
    def loss(x):
        bare = handlers.substitute(latent, {"x": x})
        return TraceMeanField_ELBO().loss(keys(1)[0], params, handlers.block(bare, hide=["x"]), guide, y=y)

    expected = jax.jit(lambda: TraceMeanField_ELBO().loss(keys(1)[0], params, plain, guide, y=y))()
    value, gradient = loss(x)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    step, direction = 1e-5, np.array([[1.0], [-0.5], [0.3], [0.8]])
    slope = (loss(x + step * direction)[0] - loss(x - step * direction)[0]) / (2 * step)
    np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-6)
    # The guide of the whole model trains with latent inputs.
    _, losses = train(latent, npgp.AutoSparseGP(latent), 100, np.array(y))
    assert np.mean(losses[-20:]) < np.mean(losses[:20])


def test_a_fitted_model_of_functionals_is_saved_and_checked(float64, tmp_path):
    def model(y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.3))
        npgp.observe("y", draw().average(jnp.stack([X, X2], 1)), npgp.Gaussian(scale=noise), obs=y)

    y = 0.5 * (np.sin(X) + np.sin(X2))[:, 0] + 0.4 * np.random.default_rng(1).normal(size=8)
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.05), TraceMeanField_ELBO())
    params = npgp.fit(svi, jax.random.key(0), 20, y=y, progress=False).params
    npgp.save(tmp_path / "params.npz", params)
    again = npgp.load(tmp_path / "params.npz")

    @jax.jit
    def moments(params):
        return npgp.posterior("f", model, guide, params, draws=3, y=y).mean_and_variance(at(X) - at(X2))

    np.testing.assert_allclose(moments(params), moments(again), rtol=1e-10)
    fitted = npgp.inference.Inference(model, guide, params, (), {"y": y})
    data = fitted.to_arviz(num_draws=20, posterior_predictive=False)
    assert np.asarray(data["posterior"]["noise"]).size == 20 and np.asarray(data["log_likelihood"]["y"]).size == 160


def test_preferences_by_rows_and_by_items_are_one_model(float64):
    first, second = np.array([0, 1, 2, 0]), np.array([3, 2, 0, 1])
    wins = np.array([1.0, 0.0, 1.0, 1.0])

    def by_rows(wins=None):
        f = draw()
        npgp.observe("wins", f(X[first]) - f(X[second]), npgp.Bernoulli(), obs=wins)

    def by_matrix(wins=None):
        f = draw()
        pairs = np.eye(8)[first] - np.eye(8)[second]
        npgp.observe("wins", pairs @ f(X), npgp.Bernoulli(), obs=wins)

    params = {"f.u.loc": jnp.linspace(-1.0, 1.0, 6), "f.u.scale_tril": 0.5 * jnp.eye(6)}

    @jax.jit
    def losses():
        both = [(model, npgp.AutoSparseGP(model)) for model in (by_rows, by_matrix)]
        return [TraceMeanField_ELBO().loss(keys(1)[0], params, *each, wins=wins) for each in both]

    a, b = losses()
    np.testing.assert_allclose(a, b, rtol=1e-10)


def refused(statement, error, kind=ValueError):
    return statement, kind, error


@pytest.mark.parametrize(
    ("statement", "kind", "error"),
    [
        refused(lambda f: f(X) * f(X2), "a product of GP values is not Gaussian", TypeError),
        refused(lambda f: np.ones((3, 5)) @ f(X), r"the matrix has shape \(3, 5\) and the GP values \(8,\)"),
        refused(lambda f: f(X) - f(X2[:3]), "cannot add functionals of shapes"),
        refused(lambda f: f(X) - np.ones(4) * f(X2), r"GP values of shape \(8,\) are multiplied by an array of shape"),
        refused(lambda f: np.full((3, 8), np.nan) @ f(X), "the matrix before functionals has NaN"),
        refused(lambda f: f.derivative(X, 1), "dim is 1; it must be the number of one of the 1 columns"),
        refused(lambda f: f.average(X), "points has shape"),
        refused(lambda f: (f(X) - f(X2))[np.array([0]), np.array([0])], "is indexed by|chooses among functions"),
    ],
)
def test_what_is_refused(statement, kind, error):
    with handlers.seed(rng_seed=0), pytest.raises(kind, match=error):
        statement(draw())
