"""Functions of a plate with a kernel each are as many components: bounds, gradients, draws and posteriors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import compiled, train
from numpyro import handlers
from numpyro.infer import Predictive, TraceMeanField_ELBO

import npgp

RNG = np.random.default_rng(1)
N, Q = 8, 2
X, Z = RNG.uniform(size=(N, 2)), RNG.uniform(size=(3, 2))
OWN = RNG.uniform(size=(Q, 2, 2))  # inducing inputs of each function's own
Y = RNG.normal(size=(3, N))
W = RNG.normal(size=(3, Q))
KERNELS = {"l": np.array([[[0.3, 0.9]], [[1.2, 0.5]]]), "v": np.array([[1.5], [0.4]])}


def learned():
    return {name: numpyro.param(name, jnp.asarray(value)) for name, value in KERNELS.items()}


def together(conditional="tight", covariances=None, mixed=False, likelihood=None):
    def model(X, y=None):
        k = learned()
        with numpyro.plate("functions", Q, dim=-2):
            kernel = npgp.Matern32(k["l"], variance=k["v"])
            g = npgp.SparseGP("g", kernel, [Z, OWN], covariances).draw()
        rows = numpyro.plate("rows", N)
        if likelihood is not None:
            with rows:
                return npgp.observe("y", g(X), likelihood, obs=y, conditional=conditional)
        f = W @ g(X) if mixed else g(X) + 0.5
        with numpyro.plate("outputs", f.shape[0], dim=-2), rows:
            npgp.observe("y", f, npgp.Gaussian(variance=0.3), obs=y, conditional=conditional)

    return model


def apart(conditional="tight", covariances=None, mixed=False, likelihood=None):
    def model(X, y=None):
        k = learned()
        g = [
            npgp.SparseGP(f"g{q}", npgp.Matern32(k["l"][q, 0], variance=k["v"][q, 0]), [Z, OWN[q]], covariances).draw()
            for q in range(Q)
        ]
        rows = numpyro.plate("rows", N)
        if likelihood is not None:
            with rows:
                return npgp.observe("y", tuple(f(X) for f in g), likelihood, obs=y, conditional=conditional)
        if mixed:
            f = W[:, :1] * g[0](X) + W[:, 1:] * g[1](X)
            with numpyro.plate("outputs", len(W), dim=-2), rows:
                npgp.observe("y", f, npgp.Gaussian(variance=0.3), obs=y, conditional=conditional)
        else:
            with rows:
                for q in range(Q):
                    noise = npgp.Gaussian(variance=0.3)
                    npgp.observe(f"y{q}", g[q](X) + 0.5, noise, obs=y[q], conditional=conditional)

    return model


def split(params: dict) -> dict:
    """Parameters of the functions together as those of components."""
    found = {}
    for name, value in params.items():
        if name.startswith("g."):
            found |= {f"g{q}{name[1:]}": value[q, 0] for q in range(Q)}
        else:
            found[name] = value
    return found


def value_and_gradient(model, dependence, params, y):
    # Components that meet in one sum share a q by default; functions of a plate have one each.
    guide = npgp.AutoSparseGP(model, dependence=dependence, joint=False)

    def loss(params):
        return TraceMeanField_ELBO().loss(jax.random.key(0), params, model, guide, X, y)

    return compiled(jax.value_and_grad(loss))(params)


def some_params(model, dependence, y):
    """Parameters of the guide, away from where it starts."""
    guide = npgp.AutoSparseGP(model, dependence=dependence, joint=False)

    @compiled
    def start():
        with handlers.trace() as trace, handlers.seed(rng_seed=0):
            guide(X, y)
        return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}

    rng = np.random.default_rng(2)

    def moved(name, value):
        noise = 0.1 * rng.normal(size=np.shape(value))
        return value + (np.tril(noise) if name.endswith("scale_tril") else np.abs(noise))

    return {name: moved(name, value) for name, value in start().items()}


CASES = [
    {"conditional": "prior", "covariances": ["dense", "mean-only"]},
    {"conditional": "shared", "covariances": "diagonal"},
    {"conditional": npgp.conditionals.Grouped(4), "covariances": ["dense", "diagonal"], "mixed": True},
    {"conditional": "full", "likelihood": npgp.likelihoods.HeteroscedasticGaussian()},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bound_and_gradient_are_those_of_components(case, float64):
    y = jnp.asarray(Y[0] if "likelihood" in case else Y if case.get("mixed") else Y[:Q])
    dependence = "independent" if case.get("conditional") == "prior" else "pseudo-data"
    params = some_params(together(**case), dependence, y)
    one, gradient = value_and_gradient(together(**case), dependence, params, y)
    components = split(params)
    if case.get("conditional") == "shared":  # one parameter for each statement
        components |= {f"y{q}.residual_scale": components["y.residual_scale"] for q in range(Q)}
    other, expected = value_and_gradient(apart(**case), dependence, components, y)
    np.testing.assert_allclose(one, other, rtol=1e-10)
    if case.get("conditional") == "shared":
        expected["y.residual_scale"] = sum(expected.pop(f"y{q}.residual_scale") for q in range(Q))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), split(gradient), expected)


def sampled(X, y=None):
    """A model that samples its kernels, and GP values."""
    with numpyro.plate("functions", Q, dim=-2):
        lengthscale = numpyro.sample("l", dist.LogNormal(jnp.zeros(2), 0.1).to_event(1))
        g = npgp.SparseGP("g", npgp.RBF(lengthscale), Z).draw()
    with numpyro.plate("functions", Q, dim=-2), numpyro.plate("rows", N):
        value = npgp.sample("value", g(X))
        numpyro.sample("y", dist.Normal(value, 0.3), obs=y)


@pytest.mark.parametrize("dependence", ["pseudo-data", "coupled"])
def test_equal_kernels_are_one_kernel(dependence, float64):
    def model(lengthscale):
        def of_plate(X, y=None):
            with numpyro.plate("functions", Q, dim=-2):
                t = numpyro.sample("t", dist.Normal(0.0, 1.0))  # something to follow
                g = npgp.SparseGP("g", npgp.RBF(lengthscale), Z, whitened=dependence != "coupled").draw()
            with numpyro.plate("functions", Q, dim=-2), numpyro.plate("rows", N):
                npgp.observe("y", g(X) + t, npgp.Gaussian(variance=0.3), obs=y)

        return of_plate

    y = jnp.asarray(Y[:Q])
    own, shared = (model(of_each) for of_each in (0.5 * np.ones((Q, 1)), 0.5))
    params = some_params(own, dependence, y)
    values = [value_and_gradient(m, dependence, params, y) for m in (own, shared)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9), *values)


def test_draws_and_posteriors_are_those_of_components(float64, tmp_path):
    model, y = together(), jnp.asarray(Y[:Q])
    params = some_params(model, "pseudo-data", y)
    posterior = npgp.posterior("g", model, npgp.AutoSparseGP(model, dependence="pseudo-data"), params, X, y)
    npgp.save(tmp_path / "g.npz", posterior)
    components = apart()
    other = npgp.AutoSparseGP(components, dependence="pseudo-data")
    X_new = RNG.uniform(size=(5, 2))
    gp = npgp.SparseGP("g", npgp.Matern32(KERNELS["l"], variance=KERNELS["v"]), [Z, OWN], whitened=False)

    @compiled
    def numbers(f):
        moments = {name: getattr(f, name)(X_new) for name in ("mean", "variance", "covariance")}
        return moments | {"derivative": f.derivative(X_new), "decompose": f.decompose(X_new).mean, "kl": f.kl()}

    @compiled
    def of_mixed_and_unwhitened(posterior):
        h, unwhitened = posterior.mixed(W), gp.posterior(gp.params(posterior.q))
        at_start = npgp.sparse.factorize_members(gp.kernel, gp.inducing, (Q, 1))
        means = unwhitened.mean(X_new), npgp.variational.Posterior(at_start, posterior.q).mean(X_new)
        return h.mean(X_new), h.covariance(X_new), *means

    found = numbers(npgp.load(tmp_path / "g.npz"))
    for q in range(Q):
        expected = numbers(npgp.posterior(f"g{q}", components, other, split(params), X, y))
        for name in ("mean", "variance", "covariance"):
            np.testing.assert_allclose(found[name][q], expected[name], rtol=1e-8, atol=1e-10)
        for one, all_of_them in zip(expected["derivative"], found["derivative"], strict=True):
            np.testing.assert_allclose(all_of_them[q], one, rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(found["decompose"][:, q], expected["decompose"], atol=1e-9)
        np.testing.assert_allclose(found["kl"][q], expected["kl"], rtol=1e-9)
    mean, covariance, unwhitened, whitened = of_mixed_and_unwhitened(posterior)
    np.testing.assert_allclose(mean, W @ found["mean"], rtol=1e-9)
    np.testing.assert_allclose(np.einsum("pnpn->pn", covariance), np.square(W) @ found["variance"], rtol=1e-7)
    np.testing.assert_allclose(unwhitened, whitened, rtol=1e-8, atol=1e-10)


def test_whole_functions_have_the_posteriors_moments(float64):
    # The linear kernel's features are exact, so that what is left is Monte Carlo error.
    kernel = npgp.kernels.Linear(variance=KERNELS["l"]) + npgp.kernels.Constant(variance=KERNELS["v"])

    @compiled
    def drawn(y):
        posterior = npgp.CollapsedGP(kernel, X, Z, noise_variance=0.3, outputs=Q).condition(y)
        paths = posterior.draw_functions(jax.random.key(0), 4000, 8)(X)
        return paths, posterior.mean(X), posterior.variance(X), posterior.covariance(X)

    paths, mean, variance, covariance = map(np.asarray, drawn(Y[:Q]))
    assert paths.shape == (4000, Q, N)
    error = (paths.mean(0) - mean) / np.sqrt(variance / 4000)
    assert np.max(np.abs(error)) < 4.5
    for q in range(Q):
        assert np.max(np.abs(np.cov(paths[:, q].T) - covariance[q])) < 0.1 * np.max(covariance[q])


def test_kernels_sampled_in_the_plate_by_svi_and_predictive():
    model, y = sampled, jnp.asarray(Y[:Q], jnp.float32)
    guide = npgp.AutoSparseGP(model, dependence="pseudo-data")
    params, _ = train(model, guide, 2, X, y)
    f = npgp.posterior("g", model, guide, params, X, y, draws=3)
    assert f.sites["l"].shape == (3, Q, 1, 2) and jax.eval_shape(lambda: f.mean(X)).shape == (Q, N)
    draws = compiled(Predictive(model, guide=guide, params=params, num_samples=3))(jax.random.key(1), X)
    assert draws["y"].shape == (3, Q, N)


def test_a_plate_of_another_size_is_an_error_by_name():
    def model():
        with numpyro.plate("functions", 3, dim=-2):
            npgp.SparseGP("g", npgp.RBF(np.ones((Q, 1))), Z).draw()

    with pytest.raises(ValueError, match=r"RBF lengthscale has shape \(2, 1\).*plates of shape \(3, 1\)"):
        handlers.seed(model, 0)()
