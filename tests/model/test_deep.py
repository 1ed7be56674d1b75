"""Deep GPs: identities with shallow ones, bounds against evidence by brute force, and predictions by quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpy.polynomial.hermite_e import hermegauss
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.special import logsumexp

import npgp
from npgp.kernels import Cosine

RNG = np.random.default_rng(5)
X = RNG.uniform(-2.0, 2.0, (6, 2))
Y = RNG.normal(size=6)
Z = RNG.uniform(-2.0, 2.0, (3, 2))
NOISE = 0.3


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def model_of(layers, conditional="tight", likelihood=None, joint=False, size=None):
    def model(X, y=None):
        deep = npgp.DeepGP("deep", layers(), joint=joint).draw()
        with npgp.plate("data", size or len(X), rows=len(X)):
            npgp.observe("y", deep(X), likelihood or npgp.Gaussian(variance=NOISE), obs=y, conditional=conditional)

    return model


def some_params(model, *args, scale=0.5):
    """Parameters of the guide's, at random."""
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.1), TraceMeanField_ELBO())
    params = jax.jit(lambda: svi.get_params(svi.init(jax.random.key(0), *args)))()
    rng = np.random.default_rng(1)
    for name, value in params.items():
        if name.endswith(".loc"):
            params[name] = scale * rng.normal(size=value.shape)
        elif name.endswith("scale_tril"):
            factor = np.tril(0.2 * rng.normal(size=value.shape)) + 0.7 * np.eye(value.shape[-1])
            params[name] = np.tril(factor, -1) + np.abs(factor) * np.eye(value.shape[-1])
    return guide, params


def elbos(model, guide, params, args, draws, seed=0):
    """So many one-draw estimates of the ELBO."""
    loss = TraceMeanField_ELBO()
    keys = jax.random.split(jax.random.key(seed), draws)
    return -np.asarray(jax.jit(lambda: jax.lax.map(lambda k: loss.loss(k, params, model, guide, *args), keys))())


def test_one_layer_is_the_shallow_gp():
    model = model_of(lambda: [npgp.Layer(npgp.RBF(1.1), [Z, Z + 0.7], covariances=["dense", "mean-only"])])

    def shallow(X, y=None):
        f = npgp.SparseGP("deep.1", npgp.RBF(1.1), [Z, Z + 0.7], ["dense", "mean-only"]).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    guide, params = some_params(model, X, Y)
    (deep,) = elbos(model, guide, params, (X, Y), 1)
    np.testing.assert_allclose(elbos(shallow, npgp.AutoSparseGP(shallow), params, (X, Y), 1), deep, rtol=1e-12)
    whole = npgp.posterior("deep", model, guide, params, X)
    alone = npgp.posterior("deep.1", model, guide, params, X)
    for of_whole, of_layer in zip(whole.mean_and_variance(X), alone.mean_and_variance(X), strict=True):
        np.testing.assert_allclose(of_whole, of_layer, rtol=1e-12)


@pytest.mark.parametrize("skip", [False, True], ids=["", "skip"])
def test_a_linear_layer_without_noise_projects(skip):
    """The GP of the second layer sees ``X W``, and X beside it if it has a skip connection."""
    W = RNG.normal(size=(2, 1))
    inputs = np.hstack([X @ W, X]) if skip else X @ W
    points = np.hstack([Z @ W, Z]) if skip else Z @ W

    def layers():
        return [npgp.Layer(npgp.RBF(variance=1e-18), Z, mean=W), npgp.Layer(npgp.RBF(0.8), points, skip=skip)]

    def shallow(X, y=None):
        f = npgp.SparseGP("deep.2", npgp.RBF(0.8), points).draw()
        with numpyro.plate("data", len(inputs)):
            npgp.observe("y", f(jnp.asarray(inputs)), npgp.Gaussian(variance=NOISE), obs=y)

    model = model_of(layers)
    guide, params = some_params(model, X, Y)
    params["deep.1.u.loc"] = np.zeros((1, 1, 3))  # q is the prior there: no divergence
    params["deep.1.u.scale_tril"] = np.eye(3).reshape(1, 1, 3, 3)
    expected = elbos(shallow, npgp.AutoSparseGP(shallow), params, (X, Y), 1)
    np.testing.assert_allclose(elbos(model, guide, params, (X, Y), 1), expected, rtol=1e-7)


# ---------------------------------------------------------------------------------------------------------------
# Bounds

ROWS = np.array([[-1.0], [0.1], [0.8]])
OUTCOMES = {"Gaussian": np.array([0.4, -0.8, 1.1]), "Poisson": np.array([0.0, 2.0, 1.0])}
LIKELIHOODS = {"Gaussian": npgp.Gaussian(variance=NOISE), "Poisson": npgp.Poisson(link="exp")}
POINTS = np.array([[-1.1], [0.0], [0.9]])


def two_layers(inner="prior"):
    first = npgp.Layer(npgp.Matern32(1.0, variance=0.2), POINTS, conditional=inner, init_scale=0.5)
    return [first, npgp.Layer(npgp.RBF(0.9, variance=1.5), POINTS, init_scale=0.5)]


def grid(dimension, nodes):
    """Nodes of a standard normal in so many dimensions, and log weights."""
    z, w = hermegauss(nodes)
    mesh = np.stack(np.meshgrid(*[z] * dimension, indexing="ij"), -1).reshape(-1, dimension)
    weights = np.stack(np.meshgrid(*[np.log(w / w.sum())] * dimension, indexing="ij"), -1)
    return mesh, weights.reshape(-1, dimension).sum(-1)


def log_evidence(likelihood, X, y, layers):
    """``log ∫ p(y | h) p(h) dh`` over the values between two layers, those of the second integrated out for each."""
    first, last = layers
    z, log_w = grid(len(X), 16)
    H = X[:, 0] + z @ np.linalg.cholesky(np.asarray(first.kernel(X)) + 1e-12 * np.eye(len(X))).T
    K = jax.jit(jax.vmap(lambda h: last.kernel(h[:, None])))(H)
    if isinstance(likelihood, npgp.Gaussian):
        C = K + NOISE * jnp.eye(len(X))
        log_p = jax.jit(jax.vmap(lambda C: jax.scipy.stats.multivariate_normal.logpdf(y, jnp.zeros(len(X)), C)))(C)
    else:
        z2, log_w2 = grid(len(X), 12)

        def given(K):
            f = z2 @ jnp.linalg.cholesky(K + 1e-10 * jnp.eye(len(X))).T
            return jax.scipy.special.logsumexp(jnp.sum(likelihood.log_prob(f, y), axis=-1) + log_w2)

        log_p = jax.jit(lambda: jax.lax.map(given, K))()
    return logsumexp(np.asarray(log_p) + log_w)


@pytest.fixture(scope="module")
def evidence():
    with jax.enable_x64(True):
        return {name: log_evidence(LIKELIHOODS[name], ROWS, OUTCOMES[name], two_layers()) for name in LIKELIHOODS}


@pytest.mark.parametrize(
    ("inner", "last", "joint", "likelihood"),
    [
        ("prior", "tight", False, "Poisson"),
        ("shared", npgp.conditionals.Grouped(3), True, "Gaussian"),
    ],
    ids=str,
)
def test_bounds_are_below_the_evidence(inner, last, joint, likelihood, evidence):
    """At the best q that training finds, where a bound that is none would be above first."""
    y = OUTCOMES[likelihood]
    model = model_of(lambda: two_layers(inner), last, LIKELIHOODS[likelihood], joint)
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.1, 200), TraceMeanField_ELBO(num_particles=4))

    @jax.jit
    def trained():
        state = svi.init(jax.random.key(1), ROWS, y)
        state, _ = jax.lax.scan(lambda state, _: svi.update(state, ROWS, y), state, length=200)
        return svi.get_params(state)

    params = trained()
    found = elbos(model, guide, params, (ROWS, y), 2000)
    mean, error = found.mean(), found.std() / np.sqrt(len(found))
    assert error < 0.05
    assert evidence[likelihood] - 1.0 < mean < evidence[likelihood] - 4 * error


#: Two rows where the values between layers are each other's opposite, a layer before whose features say nothing of
#: them, and one after whose do not either: nothing is learned, and q is the prior.
APART = np.array([[0.0], [0.5]])


def opposite():
    first = npgp.Layer(Cosine(1.0, variance=0.16), np.array([[0.25]]), mean=0.0)
    return [first, npgp.Layer(npgp.RBF(1.0), np.array([[50.0]]))]


def test_groups_with_marginal_draws_would_be_no_bound():
    """Section 12's example: above the evidence by marginal draws, which are refused, and below it by joint ones."""
    y, (_first, _last) = np.zeros(2), opposite()
    z, w = hermegauss(40)
    w = w / w.sum()

    def log_p(h1, h2):
        K = np.exp(-0.5 * (h1 - h2) ** 2)
        return -0.5 * np.log((1 + NOISE) ** 2 - K**2) - np.log(2 * np.pi)

    h = 0.4 * z
    exact = np.log(np.sum(w * np.exp(log_p(h, -h))))
    by_joint = np.sum(w * log_p(h, -h))
    by_marginal = np.sum(w[:, None] * w * log_p(h[:, None], h))
    assert by_joint < exact < by_marginal - 0.02
    with pytest.raises(ValueError, match=r"conditional is Grouped\(2\), which takes rows together"):
        refused = handlers.seed(npgp.AutoSparseGP(model_of(opposite, npgp.conditionals.Grouped(2))), 0)
        jax.eval_shape(lambda: refused(APART, y))
    model = model_of(opposite, npgp.conditionals.Grouped(2), joint=True)
    guide, params = some_params(model, APART, y)
    for layer in "12":
        params[f"deep.{layer}.u.loc"] = np.zeros_like(params[f"deep.{layer}.u.loc"])
        params[f"deep.{layer}.u.scale_tril"] = np.ones_like(params[f"deep.{layer}.u.scale_tril"])
    found = elbos(model, guide, params, (APART, y), 1000)
    np.testing.assert_allclose(found.mean(), by_joint, atol=4 * found.std() / np.sqrt(1000) + 1e-4)


def test_minibatches_are_unbiased():
    """The mean over all batches is the ELBO of all rows; ``shared`` between layers has a divergence in each row."""

    def layers():
        return [npgp.Layer(npgp.RBF(1.0), Z, width=2, conditional="shared"), npgp.Layer(npgp.RBF(0.8), Z)]

    model = model_of(layers, likelihood=npgp.Gaussian(variance=2.0), size=6)
    guide, params = some_params(model, X, Y)
    assert params["deep.1.residual_scale"] == 0.5
    whole = elbos(model, guide, params, (X, Y), 2000)
    parts = [elbos(model, guide, params, (X[i : i + 2], Y[i : i + 2]), 2000, seed=i) for i in (0, 2, 4)]
    errors = [np.var(found) / len(found) for found in (whole, *parts)]
    error = np.sqrt(errors[0] + sum(errors[1:]) / 9)
    assert error < 0.1
    np.testing.assert_allclose(np.mean([part.mean() for part in parts]), whole.mean(), atol=4 * error)


def test_inner_layers_start_near_their_mean_functions():
    deep = npgp.DeepGP("deep", [npgp.Layer(npgp.Matern32(), POINTS), npgp.Layer(npgp.RBF(), POINTS)])
    assert [gp.init_scale for gp in deep.components] == [0.01, 0.1]
