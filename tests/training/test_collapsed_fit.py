"""L-BFGS for models whose GPs are collapsed."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints
from numpyro.infer.util import log_density
from programs import compilations
from scipy.optimize import minimize
from scipy.stats import multivariate_normal

import npgp
from npgp.training import TrainingWarning

KEY = jax.random.key(0)
N = 40
RNG = np.random.default_rng(3)
X = np.sort(RNG.uniform(0, 6, (N, 1)), axis=0)
Y = np.sin(2 * X[:, 0]) + 0.2 * RNG.normal(size=N)
Z = np.linspace(0, 6, 8)[:, None]


def by_params(X, y=None):
    positive = dict(constraint=constraints.positive)
    lengthscale = numpyro.param("lengthscale", 1.0, **positive)
    variance = numpyro.param("variance", 1.0, **positive)
    noise = numpyro.param("noise", 0.5, **positive)
    kernel = npgp.Matern52(lengthscale, variance=variance)
    numpyro.sample("y", npgp.CollapsedGP(kernel, X, Z, noise_variance=noise), obs=y)


def by_sites(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    numpyro.sample("y", npgp.CollapsedGP(npgp.RBF(lengthscale), X, Z, noise_variance=noise, offset=level), obs=y)


def fit(model, *args, **options):
    return npgp.fit_collapsed(KEY, model, *(args or (X, Y)), progress=False, **options)


def test_it_is_at_the_maximum(float64):
    @jax.jit
    def loss(logs):
        lengthscale, variance, noise = jnp.exp(logs)
        return -npgp.CollapsedGP(npgp.Matern52(lengthscale, variance=variance), X, Z, noise_variance=noise).log_prob(Y)

    expected = minimize(loss, np.zeros(3), jac=jax.jit(jax.grad(loss)), method="BFGS", options={"gtol": 1e-7})
    result = fit(by_params, tolerance=1e-10)
    assert result.converged and set(result.params) == {"lengthscale", "variance", "noise"}
    np.testing.assert_allclose(result.losses[-1], expected.fun, rtol=1e-9)
    found = [result.params[name] for name in ("lengthscale", "variance", "noise")]
    np.testing.assert_allclose(np.log(found), expected.x, atol=1e-4)
    assert result.losses[0] > result.losses[-1] and list(result.ends) == [result.losses[-1]]


def test_latent_sites_are_at_their_mode(float64):
    result = fit(by_sites, tolerance=1e-12)
    names = ("lengthscale", "level", "noise")
    values = {name: result.params[f"{name}_auto_loc"] for name in names}

    def joint(values):
        return log_density(by_sites, (X, Y), {}, values)[0]

    density, slopes = jax.jit(jax.value_and_grad(joint))(values)
    for name in names:
        assert abs(slopes[name] * max(1.0, abs(values[name]))) < 1e-3, name
    np.testing.assert_allclose(result.losses[-1], -density, rtol=1e-10)


def test_the_best_of_several_starts(float64):
    far = {"lengthscale": 50.0, "variance": 1e-3, "noise": 5.0}  # where all is noise
    alone = fit(by_params, init_params=far)
    several = fit(by_params, init_params=[far, {}], restarts=2)
    assert several.ends.shape == (4,) and several.losses[-1] == several.ends.min()
    assert several.ends.min() < alone.ends[0] - 5.0
    np.testing.assert_allclose(several.ends[0], alone.ends[0], rtol=1e-6)
    again = fit(by_params, init_params=[far, {}], restarts=2)
    np.testing.assert_array_equal(again.ends, several.ends)


def test_random_starts_move_what_has_a_constraint(float64):
    def model(X, y):
        numpyro.param("positive", jnp.ones(3), constraint=constraints.positive)
        inputs = numpyro.param("Z", jnp.asarray(Z))
        numpyro.sample("y", npgp.CollapsedGP(npgp.RBF(1.0), X, inputs, noise_variance=0.1), obs=y)

    from npgp.training.collapsed_fit import _random_starts

    svi = numpyro.infer.SVI(model, lambda X, y: None, npgp.adam(0.1), numpyro.infer.Trace_ELBO())
    state = npgp.training.Step(svi).init(KEY, X, Y)
    first = svi.optim.get_params(state.optim_state)
    for other in _random_starts(KEY, svi, first, 2):
        np.testing.assert_array_equal(other["Z"], first["Z"])
        assert np.all(other["positive"] != first["positive"]) and len(set(np.asarray(other["positive"]))) == 3


def test_other_likelihoods(float64):
    counts = RNG.poisson(np.exp(0.5 * np.sin(2 * X[:, 0]))).astype(float)

    def model(X, y):
        lengthscale = numpyro.param("lengthscale", 2.0, constraint=constraints.positive)
        numpyro.sample("y", npgp.CollapsedGP(npgp.RBF(lengthscale), X, Z, npgp.Poisson()), obs=y)

    result = fit(model, X, counts, tolerance=1e-5)
    bound = jax.jit(lambda l: npgp.CollapsedGP(npgp.RBF(l), X, Z, npgp.Poisson()).log_prob(counts))
    best = result.params["lengthscale"]
    np.testing.assert_allclose(-result.losses[-1], bound(best), rtol=1e-8)
    assert bound(best) >= max(bound(0.9 * best), bound(1.1 * best))


@pytest.mark.parametrize("method", ["nngp", "vif"])
def test_neighbors_by_number_are_found_at_the_scales_that_are_learned(float64, method):
    """A function 30 times as rough along one column: by plain distance its neighbors are the wrong ones."""
    rng, true = np.random.default_rng(0), npgp.Matern32(np.array([0.03, 1.0]))
    S = rng.uniform(size=(400, 2))
    K = np.asarray(true(S)) + 0.09 * np.eye(400)
    y = np.linalg.cholesky(K) @ rng.normal(size=400)
    evidence = multivariate_normal(np.zeros(400), K).logpdf(y)

    def density(kernel, S, noise, near):
        if method == "nngp":
            return npgp.neighbors.ResponseNNGP(kernel, S, near, noise_variance=noise)
        return npgp.ApproximateGP(kernel, S, S0, noise_variance=noise, method="vif", neighbors=near)

    S0 = S[:5]

    def model(S, y, near=6):
        if method == "nngp":
            lengthscale = numpyro.param("lengthscale", jnp.full(2, 0.3), constraint=constraints.positive)
        else:
            lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 2.0).expand([2]).to_event(1))
        noise = numpyro.param("noise", 0.2, constraint=constraints.positive)
        numpyro.sample("y", density(npgp.Matern32(lengthscale), S, noise, near), obs=y)

    found = fit(model, S, y)
    lengthscale = found.params.get("lengthscale", found.params.get("lengthscale_auto_loc"))
    assert found.converged and 0.6 < lengthscale[1] < 4.0
    kernel, options = npgp.Matern32(lengthscale), {} if method == "nngp" else {"inducing": S0}
    near = npgp.neighbors.nearest_before(S, 6, kernel=kernel, **options)
    at_end = jax.jit(lambda noise: density(kernel, S, noise, near).log_prob(y))(found.params["noise"])
    assert at_end > evidence - 5.0
    if method == "vif":  # the prior's density beside it
        at_end += np.sum(dist.LogNormal(-1.0, 2.0).log_prob(lengthscale))
    np.testing.assert_allclose(at_end, -found.losses[-1], atol=3.0)  # neighbors there, and a tenth before
    if method == "nngp":
        fixed = fit(model, S, y, npgp.neighbors.nearest_before(S, 6))
        assert -fixed.losses[-1] < -found.losses[-1] - 20.0


def test_what_does_not_converge_says_so(float64):
    with pytest.warns(TrainingWarning, match="stopped after max_steps steps.*give more max_steps"):
        result = fit(by_params, max_steps=2)
    assert not result.converged and len(result.losses) == 3


def test_a_second_call_compiles_nothing(float64):
    first = fit(by_params)
    with compilations() as count:
        again = fit(by_params)
    assert count() == 0
    np.testing.assert_array_equal(first.losses, again.losses)


def test_misuse(float64):
    def with_gp(X, y):
        f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
        with npgp.plate("data", N, rows=N):
            npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y)

    def noisy(X, y):
        key = numpyro.prng_key()
        noise = numpyro.param("noise", 0.5, constraint=constraints.positive)
        shift = 0.0 if key is None else 0.3 * jax.random.normal(key)
        numpyro.sample("y", npgp.CollapsedGP(npgp.RBF(1.0), X, Z, noise_variance=noise, offset=shift), obs=y)

    def fixed(X, y):
        numpyro.sample("y", npgp.CollapsedGP(npgp.RBF(1.0), X, Z, noise_variance=0.1), obs=y)

    with pytest.raises(ValueError, match=r"draws the GP 'f'.*npgp\.fit does that"):
        fit(with_gp)
    with pytest.raises(ValueError, match="the bound has noise"):
        fit(noisy)
    with pytest.raises(ValueError, match="nothing to fit"):
        fit(fixed)
    with pytest.raises(ValueError, match="restarts is -1; it must be at least 0"):
        fit(by_params, restarts=-1)
    with pytest.raises(TypeError, match="init_params is 3.0; it must be a dict"):
        fit(by_params, init_params=3.0)
    with pytest.raises(ValueError, match="NaN"):
        fit(by_params, X, np.where(Y > 0, Y, np.nan))
    with pytest.raises(TypeError, match=r"npgp\.fit_collapsed looks at values"):
        jax.jit(lambda y: fit(by_params, X, y).losses)(Y)
    with pytest.raises((ValueError, FloatingPointError), match="noise|not finite|nan"):
        fit(by_params, init_params={"noise": -1.0})
