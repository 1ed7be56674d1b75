"""A deep GP in use: trained on batches in single precision, with hyperparameters that are learned; and its errors."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.polynomial.hermite_e import hermegauss
from numpyro import handlers
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO

import npgp
from npgp.model import linear_mean

RNG = np.random.default_rng(2)
X = RNG.uniform(-1.0, 1.0, (40, 2)).astype(np.float32)
Y = np.where(X[:, 0] > 0, 1.0, -1.0).astype(np.float32)
Z = X[:8]
W = np.array([[1.0], [0.5]], np.float32)


def model(X, y=None, *, size=40):
    """Two layers; the first has an orthogonal block, the second X beside, and a sampled lengthscale."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
    noise = numpyro.param("noise", 0.3, constraint=dist.constraints.positive)
    first = npgp.Layer(npgp.RBF(1.0), [Z, Z[:3] + 0.1], mean=W, covariances=["dense", "mean-only"])
    last = npgp.Layer(npgp.RBF(lengthscale), numpyro.param("Z", np.hstack([Z @ W, Z])), skip=True)
    deep = npgp.DeepGP("deep", [first, last]).draw()
    with npgp.plate("data", size, rows=len(X)):
        npgp.observe("y", deep(X), npgp.Gaussian(scale=noise), obs=y)


@pytest.fixture(scope="module")
def trained():
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.03), TraceMeanField_ELBO(num_particles=2))
    result = npgp.fit(svi, jax.random.key(0), 150, X, Y, batch_size=20, progress=False)
    return guide, result


def test_it_trains(trained):
    guide, result = trained
    assert np.mean(result.losses[-10:]) < np.mean(result.losses[:10]) - 5.0
    assert guide.components == ["deep.1", "deep.2"]
    # q(ε) of both layers follows the lengthscale that is sampled, and is independent between layers.
    assert {"deep.1.v.loc", "deep.2.u.coupling"} <= set(result.params)


def test_predictions_are_mixtures(trained):
    """Against quadrature over the one value between layers."""
    guide, result = trained
    whole = npgp.posterior("deep", model, guide, result.params, X)
    first, last = whole.layers
    inputs = X[:5]
    mean, variance = first.mean_and_variance(inputs)
    z, w = hermegauss(30)
    w = w / w.sum()
    between = np.asarray(inputs @ W).T + mean + np.sqrt(variance) * z[:, None]  # (nodes, rows)
    of_each = [last.mean_and_variance(np.column_stack([h, inputs]).astype(np.float32)) for h in between]
    means, variances = (np.asarray([each[i] for each in of_each], np.float64) for i in (0, 1))
    expected_mean = w @ means
    expected_variance = w @ (variances + means**2) - expected_mean**2
    noise = float(result.params["noise"])

    @jax.jit
    def found(whole):
        many = replace(whole, draws=4000)
        density = many.log_density(inputs, Y[:5], npgp.Gaussian(scale=noise))
        parts = whole.mean_and_variance(X)[0][:5], whole.mean_and_variance(inputs, 2)[0]
        joint = whole.sample(jax.random.key(1), inputs, (400,))
        return *many.mean_and_variance(inputs), density, parts, whole.mean_and_variance(inputs)[0], joint

    found_mean, found_variance, density, parts, at_inputs, joint = found(whole)
    np.testing.assert_allclose(found_mean, expected_mean, atol=0.05)
    np.testing.assert_allclose(found_variance, expected_variance, atol=0.05)
    densities = np.exp(-0.5 * (Y[:5] - means) ** 2 / (variances + noise**2)) / np.sqrt(variances + noise**2)
    expected = np.log(w @ densities) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(density, expected, atol=0.05)
    # A row's draws are the same whatever rows are beside it, and however many are taken at a time.
    for part in parts:
        np.testing.assert_allclose(part, at_inputs, atol=1e-4)
    np.testing.assert_allclose(joint.mean(0), expected_mean, atol=5 * np.sqrt(expected_variance / 400).max())


def test_whole_functions(trained):
    """They are functions, drawn from what the mixture has the moments of; and a pytree, for programs and gradients."""
    guide, result = trained
    whole = npgp.posterior("deep", model, guide, result.params, X)

    @jax.jit
    def drawn(whole):
        paths = whole.draw_functions(jax.random.key(5), 500, 2000)
        moments = replace(whole, draws=2000).mean_and_variance(X[:6])
        return paths, paths(X[:6]), paths(X[4:6]), *moments, whole.sample(jax.random.key(6), X[:2], (2000,))

    paths, values, again, mean, variance, joint = drawn(whole)
    assert values.shape == (500, 6)
    np.testing.assert_allclose(again, values[:, 4:], atol=1e-4)
    # Five standard errors of the mean of 500; of the variance, and for 2000 random features, twice as many.
    np.testing.assert_allclose(values.mean(0), mean, atol=5 * np.sqrt(variance.max() / 500) + 0.01)
    np.testing.assert_allclose(values.var(0), variance, rtol=10 * np.sqrt(2 / 500))
    found, expected = (np.corrcoef(np.asarray(draws).T)[0, 1] for draws in (values[:, :2], joint))
    assert abs(found - expected) < 0.25
    slope = jax.jit(jax.grad(lambda x, paths: paths(x)[0, 0]))(jnp.asarray(X[:1]), paths)
    assert slope.shape == (1, 2) and np.all(np.isfinite(slope))
    with pytest.raises(TypeError, match="num_draws"):
        whole.draw_functions(jax.random.key(5), 0.5)


def test_what_else_is_made_of_it(trained, tmp_path):
    guide, result = trained
    whole = npgp.posterior("deep", model, guide, result.params, X)
    npgp.save(tmp_path / "deep.npz", whole)
    np.testing.assert_array_equal(npgp.load(tmp_path / "deep.npz").mean(X[:3]), whole.mean(X[:3]))
    mixture = npgp.posterior("deep", model, guide, result.params, X, draws=3)
    mean, variance = jax.eval_shape(lambda: mixture.mean_and_variance(X[:4]))
    assert mixture.sites["lengthscale"].shape == (3,) and mean.shape == variance.shape == (4,)

    @jax.jit
    def predicted(whole):
        predictive = Predictive(model, guide=guide, params=result.params, num_samples=200)
        return predictive(jax.random.key(2), X[:4], size=4), *whole.mean_and_variance(X[:4])

    draws, mean, variance = predicted(whole)
    assert draws["deep.1"].shape == (200, 1, 4)
    error = np.sqrt(draws["y"].var(0) / 200 + variance / whole.draws)
    assert np.all(np.abs(draws["y"].mean(0) - mean) < 4.5 * error)
    samples = guide.sample_posterior(jax.random.key(3), result.params, X, sample_shape=(5,))
    data = npgp.to_arviz(jax.random.key(4), model, samples, X, Y, params=result.params)
    assert data.posterior["deep.1"].shape == (1, 5, 1, 40)


def test_a_layer_whose_functions_have_a_kernel_each(float64):
    """The layer's posterior is that of each function with its own kernel; and all lengthscales are learned."""

    def own(X, y=None):
        lengthscale = numpyro.param("own", np.array([[[0.3]], [[3.0]]]), constraint=dist.constraints.positive)
        layers = [npgp.Layer(npgp.RBF(lengthscale), Z, width=2), npgp.Layer(npgp.RBF(1.0), Z)]
        deep = npgp.DeepGP("deep", layers).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", deep(X), npgp.Gaussian(scale=0.3), obs=y)

    guide = npgp.AutoSparseGP(own)
    svi = SVI(own, guide, npgp.adam(0.02), TraceMeanField_ELBO())
    params = npgp.fit(svi, jax.random.key(0), 20, X, Y, progress=False).params
    learned = params["own"][:, 0, 0]
    assert np.all(np.abs(learned - np.array([0.3, 3.0])) > 1e-3)
    first = npgp.posterior("deep", own, guide, params, X).layers[0]
    mean, variance = first.mean_and_variance(X[:5] + 0.1)
    for i, lengthscale in enumerate(learned):
        kernel = npgp.RBF(lengthscale)
        root = np.linalg.cholesky(kernel(Z) + 1e-8 * np.eye(len(Z)))
        A = np.linalg.solve(root, kernel(Z, X[:5] + 0.1))
        spread = params["deep.1.u.scale_tril"][i, 0].T @ A
        np.testing.assert_allclose(mean[i], A.T @ params["deep.1.u.loc"][i, 0], atol=1e-5)
        np.testing.assert_allclose(variance[i], 1.0 - np.sum(A**2, 0) + np.sum(spread**2, 0), atol=1e-5)


def test_natural_gradients_for_the_last_layer():
    def fixed(X, y=None):
        layers = [npgp.Layer(npgp.RBF(1.0), Z, mean=W), npgp.Layer(npgp.RBF(0.5), Z @ W)]
        deep = npgp.DeepGP("deep", layers).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", deep(X), npgp.Gaussian(scale=0.3), obs=y)

    optim = npgp.natural_gradient(0.5, npgp.adam(0.02), sites=["deep.2.u"])
    svi = SVI(fixed, npgp.AutoSparseGP(fixed), optim, TraceMeanField_ELBO())
    natural = npgp.fit(svi, jax.random.key(0), 15, X, Y, progress=False).losses
    svi = SVI(fixed, npgp.AutoSparseGP(fixed), npgp.adam(0.02), TraceMeanField_ELBO())
    adam = npgp.fit(svi, jax.random.key(0), 15, X, Y, progress=False).losses
    assert natural[-1] < adam[-1] - 5.0


def test_classes_and_a_model_without_a_guide():
    """Three functions at the end; without a guide it is a model for NUTS, here with four rows."""
    labels = np.array([0, 1, 2, 1])

    def classes(X, y=None):
        layers = [npgp.Layer(npgp.RBF(1.0), Z[:2], width=2), npgp.Layer(npgp.RBF(1.0), Z[:2], width=3, mean=0.5)]
        deep = npgp.DeepGP("deep", layers).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", deep(X), npgp.likelihoods.Softmax(3), obs=y)

    guide = npgp.AutoSparseGP(classes)
    svi = SVI(classes, guide, npgp.adam(0.02), TraceMeanField_ELBO())
    params = npgp.fit(svi, jax.random.key(0), 5, X[:4], labels, progress=False).params
    whole = npgp.posterior("deep", classes, guide, params, X[:4])
    components = jax.eval_shape(lambda: whole.components(X[:4])[0])
    assert whole.batch_shape == (3,) and components.shape == (100, 3, 4)
    density = whole.log_density(X[:4], labels, npgp.likelihoods.Softmax(3))
    assert density.shape == (4,) and np.all(density < 0)

    @jax.jit
    def unguided():
        with handlers.trace() as sites, handlers.seed(rng_seed=0):
            classes(X[:4], labels)
        latent = {name: sites[name]["value"] for name in ("deep.1.u", "deep.1.residual", "deep.2.u")}
        return latent, sites["y"]["fn"].log_prob(labels)

    latent, density = unguided()
    assert latent["deep.1.residual"].shape == (2, 4)  # latent, as all that NUTS would draw
    assert np.isfinite(density).all()
    draws = {name: value[None] for name, value in latent.items()}
    mean, _ = jax.eval_shape(lambda: npgp.posterior("deep", classes, draws, {}, X[:4]).mean_and_variance(X[:4]))
    assert mean.shape == (3, 4)


def test_linear_means_of_traced_inputs_are_refused_in_words():
    with pytest.raises(TypeError, match="X is traced; linear_mean.* is computed before the model"):
        jax.jit(lambda X: linear_mean(X, 1))(X)
    np.testing.assert_array_equal(jax.jit(lambda X: linear_mean(X, 2))(X), np.eye(2))


def test_linear_means():
    centered = X - X.mean(0)
    component = linear_mean(centered, 1)
    direction = np.linalg.eigh(centered.T @ centered)[1][:, -1]
    np.testing.assert_allclose(abs(component[:, 0] @ direction), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(linear_mean(X, 2), np.eye(2))
    np.testing.assert_array_equal(linear_mean(X, 3), np.eye(2, 3))


def evaluated(*layers, times=1, **more):
    def run():
        deep = npgp.DeepGP("deep", list(layers), **more).draw()
        for _ in range(times):
            deep(X)

    jax.eval_shape(handlers.seed(run, 0))


def test_what_is_refused():
    layer = npgp.Layer(npgp.RBF(), Z)
    with pytest.raises(TypeError, match="name is ''; it must be a non-empty string"):
        npgp.DeepGP("", [layer])
    with pytest.raises(TypeError, match=r"it must be a list of npgp.Layer\(kernel, inducing\)"):
        npgp.DeepGP("deep", [npgp.SparseGP("f", npgp.RBF(), Z)])
    with pytest.raises(ValueError, match="layers is empty"):
        npgp.DeepGP("deep", [])
    with pytest.raises(TypeError, match="width is 1.5"):
        npgp.Layer(npgp.RBF(), Z, width=1.5)
    with pytest.raises(TypeError, match="mean is 'identity'; it must be a number, a matrix, a function or None"):
        npgp.Layer(npgp.RBF(), Z, mean="identity")
    with pytest.raises(TypeError, match="deep is a component, and no function yet"):
        npgp.DeepGP("deep", [layer])(X)
    with pytest.raises(ValueError, match=r"the mean function of a layer of width 2 has values of shape \(40, 3\)"):
        evaluated(replace(layer, width=2, mean=lambda H: jnp.ones((40, 3))), layer)
    with pytest.raises(ValueError, match=r"mean has shape \(3, 2\), but the layer's inputs have 2 columns"):
        evaluated(replace(layer, width=2, mean=np.ones((3, 2))), layer)
    with pytest.raises(ValueError, match="deep is evaluated twice"):
        evaluated(replace(layer, width=2), layer, times=2)
    with pytest.raises(ValueError, match="npgp.sample takes 'prior' and 'shared': bounds whatever follows"):
        evaluated(replace(layer, width=2, conditional="tight"), layer)
    with pytest.raises(TypeError, match="a function, whose values at rows are f"):
        jnp.sin(handlers.seed(npgp.DeepGP("deep", [layer]).draw, 0)())
