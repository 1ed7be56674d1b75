"""Inducing points by their number: the same posterior as with these points given, at any rows, or an error."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

import npgp
from npgp.inducing.selection import choose

KEY, RNG = jax.random.key(0), np.random.default_rng(0)
X = np.sort(RNG.uniform(0.0, 6.0, (40, 1)), axis=0).astype(np.float32)
Y = np.sin(X[:, 0]).astype(np.float32)
FAR = X + 20.0
POINTS = "f.u.inducing"


def model(X, y=None, inducing=7):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    f = npgp.SparseGP("f", npgp.RBF(lengthscale), inducing).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y)


def by_hand(X, y=None, inducing=7):
    numpyro.sample("lengthscale", dist.LogNormal(numpyro.param("at", 0.0), 0.1))
    npgp.SparseGP("f", npgp.RBF(1.0), inducing).guide()


def guide_of(dependence):
    return by_hand if dependence is None else npgp.AutoSparseGP(model, dependence=dependence)


def trained(guide, **options):
    svi = SVI(model, guide, npgp.adam(0.05), TraceMeanField_ELBO())
    return svi, npgp.fit(svi, KEY, 20, X, y=Y, progress=False, **options).params


# ---------------------------------------------------------------------------------------------------------------
# Which points


def test_points_are_centers_of_clusters():
    centers = np.array([[0.0, 0.0], [1.0, 500.0], [2.0, -500.0]])
    rows = np.concatenate([center + np.array([0.01, 1.0]) * [[1, 1], [-1, -1]] for center in centers])
    found = choose(npgp.RBF(1.0), jnp.asarray(rows), 3)
    np.testing.assert_allclose(found[np.argsort(found[:, 0])], centers, atol=1e-4)


def test_the_unit_of_a_column_does_not_matter():
    rows = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
    units = np.array([1.0, 1024.0], np.float32)
    found = [np.asarray(choose(npgp.RBF(1.0), jnp.asarray(rows * unit), 5)) / unit for unit in (1.0, units)]
    np.testing.assert_allclose(*(points[np.argsort(points[:, 0])] for points in found), rtol=1e-5)


def test_traced_rows_have_the_same_points():
    kernel = npgp.RBF(1.0)
    np.testing.assert_array_equal(jax.jit(lambda x: choose(kernel, x, 5))(X), choose(kernel, jnp.asarray(X), 5))


# ---------------------------------------------------------------------------------------------------------------
# The same as with these points given


@pytest.mark.parametrize("dependence", ["sites", None])
def test_as_with_these_points_given(dependence):
    guide = guide_of(dependence)
    svi, params = trained(guide)
    points = params[POINTS]
    # Training leaves them where k-means put them.
    np.testing.assert_array_equal(points, choose(npgp.RBF(1.0), jnp.asarray(X), 7))

    with_points = partial(model, inducing=points)
    other_guide = by_hand if dependence is None else npgp.AutoSparseGP(with_points, dependence=dependence)
    other = SVI(with_points, other_guide, npgp.adam(0.05), TraceMeanField_ELBO())
    losses = jax.jit(lambda: [s.loss.loss(KEY, params, s.model, s.guide, X, y=Y) for s in (svi, other)])
    np.testing.assert_allclose(*losses(), rtol=1e-5)

    draws = 3
    f, g = (npgp.posterior("f", s.model, s.guide, params, X, y=Y, draws=draws) for s in (svi, other))
    np.testing.assert_allclose(f.mean(X), g.mean(X), rtol=1e-4, atol=1e-5)
    # At other rows, with these as the model's arguments.
    at_new = npgp.posterior("f", model, guide, params, FAR, y=None, draws=draws)
    np.testing.assert_allclose(f.mean(X), at_new.mean(X), rtol=1e-5, atol=1e-6)
    new = [Predictive(s.model, guide=s.guide, params=params, num_samples=5)(KEY, FAR)["y.latent"] for s in (svi, other)]
    np.testing.assert_allclose(*new, rtol=1e-4, atol=1e-5)


def test_a_component_knows_its_points_from_parameters():
    _, params = trained(npgp.AutoSparseGP(model, dependence="independent"))
    gp = npgp.SparseGP("f", npgp.RBF(0.8), 7)
    given = npgp.SparseGP("f", npgp.RBF(0.8), params[POINTS])
    np.testing.assert_array_equal(gp.posterior(params).mean(FAR), given.posterior(params).mean(FAR))


def test_a_start_may_have_more_points_than_the_number():
    guide = npgp.AutoSparseGP(model, dependence="independent")
    points = np.linspace(0.0, 6.0, 11, dtype=np.float32)[:, None]
    _, params = trained(guide, init_params={POINTS: points})
    np.testing.assert_array_equal(params[POINTS], points)
    assert params["f.u.loc"].shape == (11,)


def test_the_prior_needs_no_parameters():
    assert Predictive(model, num_samples=3)(KEY, X)["y"].shape == (3, 40)


def test_densities_and_draws_with_the_parameter():
    """NUTS takes the density of the model with the parameter substituted: that with these points given."""
    draws = {"lengthscale": np.float32([0.8, 1.1, 1.5]), "f.u": RNG.normal(size=(3, 5)).astype(np.float32)}
    models = handlers.substitute(model, data={POINTS: X[::8]}), partial(model, inducing=X[::8])

    @jax.jit
    def both(draws):
        sites = {name: values[0] for name, values in draws.items()}
        new = Predictive(model, draws, params={POINTS: X[::8]})(KEY, FAR), Predictive(models[1], draws)(KEY, FAR)
        return [log_density(m, (X, Y), {}, sites)[0] for m in models], [drawn["y"] for drawn in new]

    densities, new = both(draws)
    np.testing.assert_allclose(*densities, rtol=1e-6)
    assert new[0].shape == (3, 40)
    np.testing.assert_allclose(*new, rtol=1e-5)


def test_functions_of_a_plate_share_them():
    def several(X, y=None):
        with numpyro.plate("functions", 3, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(1.0), 5).draw()
            with numpyro.plate("data", X.shape[0]):
                npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y)

    svi = SVI(several, npgp.AutoSparseGP(several), npgp.adam(0.05), TraceMeanField_ELBO())
    result = npgp.fit(svi, KEY, 5, X, y=np.stack([Y, -Y, 2 * Y]), progress=False)
    assert result.params[POINTS].shape == (5, 1) and np.isfinite(result.losses).all()


def test_minibatches():
    def batches(X, y=None, size=40):
        f = npgp.SparseGP("f", npgp.RBF(1.0), 5).draw()
        with numpyro.plate("data", size, subsample_size=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y)

    svi = SVI(batches, npgp.AutoSparseGP(batches), npgp.adam(0.05), TraceMeanField_ELBO())
    result = npgp.fit(svi, KEY, 9, X, y=Y, batch_size=10, progress=False)
    points = result.params[POINTS]
    assert points.shape == (5, 1) and np.all((points > 0.0) & (points < 6.0))


def test_rows_that_are_functionals():
    def differences(X, y=None):
        f = npgp.SparseGP("f", npgp.RBF(1.0), 6).draw()
        with numpyro.plate("data", X.shape[0] - 1):
            npgp.observe("y", f(X[1:]) - f(X[:-1]), npgp.Gaussian(variance=0.1), obs=y)

    def averages(X, y=None):
        f = npgp.SparseGP("f", npgp.RBF(1.0), 6).draw()
        with numpyro.plate("data", X.shape[0] // 2):
            npgp.observe("y", f.average(X.reshape(-1, 2, 1)), npgp.Gaussian(variance=0.1), obs=y)

    for stated, rows in ((differences, X[1:]), (averages, X)):
        svi = SVI(stated, npgp.AutoSparseGP(stated), npgp.adam(0.05), TraceMeanField_ELBO())
        points = jax.jit(lambda svi=svi: svi.get_params(svi.init(KEY, X))[POINTS])()
        np.testing.assert_array_equal(points, choose(npgp.RBF(1.0), jnp.asarray(rows), 6))


def test_a_collapsed_gp_has_the_same_points_at_each_evaluation():
    kernel = npgp.RBF(0.7)
    by_number = npgp.CollapsedGP(kernel, X, 7, noise_variance=0.1)
    given = npgp.CollapsedGP(kernel, X, choose(kernel, jnp.asarray(X), 7), noise_variance=0.1)
    np.testing.assert_array_equal(by_number.log_prob(Y), given.log_prob(Y))
    traced = jax.jit(lambda x: npgp.CollapsedGP(kernel, x, 7, noise_variance=0.1).log_prob(Y))(X)
    np.testing.assert_allclose(traced, given.log_prob(Y), rtol=1e-5)
    slope = jax.grad(lambda s: npgp.CollapsedGP(npgp.RBF(s), X, 7, noise_variance=0.1).log_prob(Y))
    assert np.isfinite(jax.jit(slope)(0.7))


# ---------------------------------------------------------------------------------------------------------------
# Errors


def test_values_from_elsewhere_need_the_points_that_they_are_of():
    with pytest.raises(ValueError, match=r"f\.u has a value of its own, as under NUTS"):
        MCMC(NUTS(model), num_warmup=2, num_samples=2, progress_bar=False).run(KEY, X, y=Y)
    with pytest.raises(ValueError, match=r"f\.u has a value of its own"):
        SVI(model, AutoNormal(model), npgp.adam(0.05), TraceMeanField_ELBO()).init(KEY, X, y=Y)
    guide = npgp.AutoSparseGP(model)
    _, params = trained(guide)
    draws = guide.sample_posterior(KEY, params, X, y=Y, sample_shape=(4,))
    with pytest.raises(ValueError, match=r"'f\.u\.inducing' has them"):
        Predictive(model, draws)(KEY, FAR)
    assert Predictive(model, draws, params=params)(KEY, FAR)["y"].shape == (4, 40)
    del params[POINTS]
    with pytest.raises(KeyError, match=r"f\.u\.inducing"):
        npgp.posterior("f", model, guide, params, X, y=Y)


def test_too_few_rows():
    with pytest.raises(ValueError, match="inducing is 41; it must be at most the 40 rows"):
        handlers.seed(model, 0)(X, inducing=41)
    with pytest.raises(ValueError, match="inducing is 5, but X has only 2 different rows"):
        handlers.seed(model, 0)(jnp.repeat(X[:2], 5, axis=0), inducing=5)


def test_labels_have_no_centers():
    kernel = npgp.kernels.Coregion(npgp.RBF(1.0), np.ones((2, 1)), kappa=np.full(2, 0.1))
    labelled = np.stack([X[:, 0], np.arange(40) % 2], axis=1).astype(np.float32)
    with pytest.raises(ValueError, match=r"inducing is 5, a number of points, but columns \[1\] of X are labels"):
        choose(kernel, jnp.asarray(labelled), 5)


def test_layers_have_no_rows_to_choose_from():
    with pytest.raises(TypeError, match="inducing is 5, a number of points, but a layer's rows"):
        npgp.Layer(npgp.RBF(1.0), 5)


@pytest.mark.parametrize("number", [0, -3, True])
def test_what_is_no_number_of_points(number):
    with pytest.raises((TypeError, ValueError), match="inducing is"):
        npgp.SparseGP("f", npgp.RBF(1.0), number)


def test_no_points_before_any_rows():
    gp = npgp.SparseGP("f", npgp.RBF(1.0), 5)
    with pytest.raises(ValueError, match="inducing is 5, a number of points, which"):
        gp.posterior({"f.u.loc": jnp.zeros(5), "f.u.scale_tril": jnp.eye(5)})
    with pytest.raises(ValueError, match="inducing is 5, a number of points, which"), handlers.seed(rng_seed=0):
        npgp.SparseGP("f", npgp.RBF(1.0), 5, whitened=False).guide()
