"""Posteriors averaged over draws of the other sites: mixtures, against loops over the posteriors of single draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import NOISE, STRUCTURES, VARIANCE, X_NEW, Dense, X, Y, compiled, keys, random_params, worst_z_of_moments
from numpyro import handlers
from numpyro.infer.autoguide import AutoNormal
from scipy import stats

import npgp
from npgp.variational import PosteriorMixture
from npgp.variational.averages import _in_turn

Z_LIMIT = 4.5
DRAWS = 6
KEY = jax.random.key(3)


def model(X, y=None, structure="solve"):
    """Hyperparameters and a level beside a GP: sites that q(ε) can follow."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.3, 0.3))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    blocks, kinds = STRUCTURES[structure]
    inducing = [jnp.asarray(block.copy()) for block in blocks]
    f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=VARIANCE), inducing, kinds, jitter=1e-12).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X) + level, npgp.Gaussian(variance=NOISE), obs=y)


def trained(dependence, structure="solve"):
    rng = np.random.default_rng(4)
    sites = {
        "lengthscale_auto_loc": -0.2,
        "lengthscale_auto_scale": 0.2,
        "level_auto_loc": 0.1,
        "level_auto_scale": 0.3,
    }
    params = random_params(structure) | {name: jnp.asarray(value) for name, value in sites.items()}
    if dependence == "coupled":
        for site in [name.removesuffix(".loc") for name in params if name.startswith("f.") and name.endswith(".loc")]:
            params[f"{site}.coupling"] = jnp.asarray(0.3 * rng.normal(size=(*params[f"{site}.loc"].shape, 2)))
    return npgp.AutoSparseGP(model, AutoNormal, dependence=dependence), params


#: What follows from the parts, which are right for both.
independent_alone = pytest.mark.parametrize("both", ["independent"], indirect=True)


@pytest.fixture(params=["independent", "coupled"])
def both(request, float64):
    """The average, and the posterior of each draw by itself."""
    return average_and_alone(request.param)


@functools.cache
def average_and_alone(dependence):
    guide, params = trained(dependence)
    args = jnp.asarray(X), jnp.asarray(Y)
    average = npgp.posterior("f", model, guide, params, *args, draws=DRAWS, rng_key=KEY)
    alone = [npgp.posterior("f", model, guide, params, *args, rng_key=k) for k in jax.random.split(KEY, DRAWS)]
    return average, alone


def test_moments_are_those_of_a_loop(both):
    average, alone = both

    def of_one(posterior):
        return posterior.mean_and_variance(X_NEW), posterior.covariance(X_NEW), posterior.derivative(X_NEW)

    @compiled
    def of_average(average):
        in_parts = average.mean_and_variance(X_NEW, batch_size=3)
        return of_one(average), in_parts, average.mean(X_NEW), average.variance(X_NEW)

    moments, covariances, slopes = zip(*map(compiled(of_one), alone), strict=True)
    means, variances = map(np.array, zip(*moments, strict=True))
    assert means.std(0).min() > 1e-3  # the draws differ
    mean, variance = means.mean(0), variances.mean(0) + means.var(0)
    (found, found_covariance, found_slopes), in_parts, found_mean, found_variance = of_average(average)
    np.testing.assert_allclose(found_mean, mean, rtol=1e-10)
    for pair in (found, in_parts):
        np.testing.assert_allclose(pair, (mean, variance), rtol=1e-10)
    np.testing.assert_allclose(found_variance, variance, rtol=1e-10)
    covariance = np.mean(covariances, 0) + np.cov(means.T, bias=True)
    np.testing.assert_allclose(found_covariance, covariance, atol=1e-10)
    np.testing.assert_allclose(np.diag(covariance), variance, rtol=1e-9)
    slopes, spreads = map(np.array, zip(*slopes, strict=True))
    expected = slopes.mean(0), spreads.mean(0) + slopes.var(0)
    np.testing.assert_allclose(found_slopes, expected, rtol=1e-9)


@independent_alone
def test_the_parts_are_the_posteriors_of_single_draws(both):
    average, alone = both
    assert len(average) == DRAWS
    assert average.batch_shape == ()
    for part, expected in zip(average, alone, strict=True):
        assert jax.tree.structure(part) == jax.tree.structure(expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), part, expected)
    kernels = [p.projector.kernel.lengthscale for p in alone]
    np.testing.assert_array_equal(average.sites["lengthscale"], kernels)
    assert set(average.sites) == {"lengthscale", "level"}
    with pytest.raises(IndexError):
        average[DRAWS]


@independent_alone
def test_draws_have_the_mixtures_moments(both):
    """Single draws of f, and whole functions at the inducing points, where their covariance is exact."""
    average, _ = both
    points = np.concatenate(STRUCTURES["solve"][0])
    count = 6000

    @compiled
    def found(average):
        drawn = average.sample(jax.random.key(5), points, (2, count // 2))
        paths = average.draw_functions(jax.random.key(6), count, 64)
        return average.mean(points), average.covariance(points), drawn, paths(points), paths(X_NEW[:3])

    mean, covariance, drawn, at_points, elsewhere = map(np.asarray, found(average))
    assert drawn.shape == (2, count // 2, len(points))
    assert worst_z_of_moments(np.reshape(drawn, (count, -1)), mean, covariance) < Z_LIMIT
    assert worst_z_of_moments(at_points, mean, covariance) < Z_LIMIT
    assert elsewhere.shape == (count, 3)


@independent_alone
def test_few_draws_come_from_different_parts(both):
    """Fewer draws than parts, and a number that is no multiple: each part serves as many, or one more."""
    average, _ = both
    shapes = [(), (1,), (3,), (DRAWS + 2,)]
    draws = compiled(lambda average: [average.sample(jax.random.key(7), X_NEW, shape) for shape in shapes])(average)
    assert [values.shape for values in draws] == [(*shape, len(X_NEW)) for shape in shapes]
    allocated = jax.jit(jax.vmap(lambda key: average._allocate(key, 3)[0]))(jax.random.split(jax.random.key(0), 300))
    served = [np.bincount(parts, minlength=DRAWS) for parts in np.asarray(allocated)]
    assert np.max(served) == 1
    share = np.mean(served, 0)
    assert np.abs(share - 0.5).max() < Z_LIMIT * np.sqrt(0.25 / 300)  # every part as often


def test_parts_serve_by_turns():
    np.testing.assert_array_equal(_in_turn(jnp.arange(6).reshape(2, 3), 5), [0, 3, 1, 4, 2])


def test_of_hyperparameters_that_are_fixed_it_is_the_posterior(float64):
    """Nothing differs between the draws, so nothing is kept or computed twice."""

    def fixed(X, y=None):
        f = npgp.SparseGP("f", npgp.RBF(0.7, variance=VARIANCE), jnp.asarray(STRUCTURES["svgp"][0][0]), jitter=1e-12)
        npgp.observe("y", f.draw()(X), npgp.Gaussian(variance=NOISE), obs=y)

    guide, params = npgp.AutoSparseGP(fixed), random_params()
    average = npgp.posterior("f", fixed, guide, params, X, Y, draws=7)
    assert len(average) == 7
    assert not any(average.varies)
    dense = Dense("svgp", X_NEW, params)
    mean, variance = average.mean_and_variance(X_NEW)
    np.testing.assert_allclose(mean, dense.mean, atol=1e-9)
    np.testing.assert_allclose(variance, dense.variance, atol=1e-9)
    np.testing.assert_allclose(average.covariance(X_NEW), dense.cov, atol=1e-9)
    draws = average.sample(jax.random.key(0), X_NEW, (4000,))
    assert worst_z_of_moments(np.asarray(draws), dense.mean, dense.cov) < Z_LIMIT


@independent_alone
def test_what_does_not_differ_is_kept_once(both):
    average, alone = both
    one = alone[0]
    for leaf, expected, differs in zip(
        jax.tree.leaves(average.posterior), jax.tree.leaves(one), average.varies, strict=True
    ):
        assert np.shape(leaf) == ((DRAWS, *np.shape(expected)) if differs else np.shape(expected))
    for block in average.posterior.q:
        assert block.scale_tril.ndim == 2


def test_outputs_in_a_plate(float64):
    """A batch of functions, and gradients through the average."""

    def outputs(X):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
        with numpyro.plate("outputs", 3, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(lengthscale), jnp.asarray(STRUCTURES["svgp"][0][0])).draw()
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE))

    guide = npgp.AutoSparseGP(outputs, AutoNormal, dependence="independent")
    rng = np.random.default_rng(1)
    params = {"f.u.loc": rng.normal(size=(3, 1, 3)), "f.u.scale_tril": np.broadcast_to(0.3 * np.eye(3), (3, 1, 3, 3))}
    params |= {"lengthscale_auto_loc": np.zeros(()), "lengthscale_auto_scale": np.full((), 0.3)}
    params = jax.tree.map(jnp.asarray, params)
    jax.eval_shape(handlers.seed(guide, 0), X)  # looks at the model
    average = npgp.posterior("f", outputs, guide, params, X, draws=4, rng_key=KEY)
    assert average.batch_shape == (3,)

    @compiled
    def everything(average, x):
        draws = average.sample(KEY, x, (5,)), average.draw_functions(KEY, 5, 16)(x)
        slopes = jax.grad(lambda x: jnp.sum(average.mean(x)[0]))(x)[:, 0], average.derivative(x)[0][0]
        alone = [part.mean_and_variance(x) for part in average]
        return alone, average.mean_and_variance(x), average.covariance(x), draws, slopes

    alone, found, covariance, draws, slopes = everything(average, jnp.asarray(X_NEW))
    means, variances = map(np.array, zip(*alone, strict=True))
    expected = means.mean(0), variances.mean(0) + means.var(0)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert covariance.shape == (3, 8, 8)
    np.testing.assert_allclose(np.diagonal(covariance, axis1=1, axis2=2), expected[1], rtol=1e-9)
    assert [values.shape for values in draws] == [(5, 3, 8)] * 2
    np.testing.assert_allclose(*slopes, rtol=1e-7)


# ---------------------------------------------------------------------------------------------------------------
# Draws by MCMC


def whitened_draws(count=5):
    rng = np.random.default_rng(2)
    return {
        "lengthscale": np.exp(0.2 * rng.normal(size=count)),
        "level": rng.normal(size=count),
        "f.u": rng.normal(size=(count, 3)),
        "f.v": rng.normal(size=(count, 2)),
        "y.latent": rng.normal(size=(count, 99)),  # a deterministic site, at other rows
    }


def test_draws_of_whitened_values_are_the_prior_given_these(float64):
    draws = whitened_draws()
    found = npgp.posterior("f", model, draws, {}, jnp.asarray(X), jnp.asarray(Y))
    assert isinstance(found, PosteriorMixture)
    assert len(found) == 5
    assert set(found.sites) == {"lengthscale", "level"}
    means, variances = [], []
    for i, lengthscale in enumerate(draws["lengthscale"]):
        dense = Dense("solve", X_NEW, lengthscale=lengthscale)
        means.append(dense.A.T @ np.concatenate([draws["f.u"][i], draws["f.v"][i]]))
        variances.append(np.diag(dense.D))
        np.testing.assert_allclose(found[i].mean_and_variance(X_NEW), (means[-1], variances[-1]), atol=1e-9)
    expected = np.mean(means, 0), np.mean(variances, 0) + np.var(means, 0)
    np.testing.assert_allclose(found.mean_and_variance(X_NEW), expected, atol=1e-9)
    some = npgp.posterior("f", model, draws, {}, jnp.asarray(X), draws=2)
    np.testing.assert_array_equal(some.sites["level"], draws["level"][[0, 2]])


def test_draws_of_the_guide_are_draws_too(float64):
    """From a guide's joint draws of all sites: the average's moments agree with the mixture's of q(ε)."""
    guide, params = trained("coupled")
    args = jnp.asarray(X), jnp.asarray(Y)
    draws = guide.sample_posterior(KEY, params, *args, sample_shape=(4000,))
    of_draws = npgp.posterior("f", model, draws, params, *args)
    average = npgp.posterior("f", model, guide, params, *args, draws=4000, rng_key=jax.random.key(8))
    found, expected = compiled(lambda *both: [p.mean_and_variance(X_NEW) for p in both])(of_draws, average)
    error = np.abs(found[0] - expected[0]) / np.sqrt(expected[1])
    assert error.max() < Z_LIMIT * np.sqrt(2 / 4000)
    assert np.abs(found[1] / expected[1] - 1).max() < 0.15


def test_collapsed_gps_are_conditioned_at_each_draw(float64):
    inputs, y, Z = jnp.asarray(X), jnp.asarray(Y), jnp.asarray(STRUCTURES["svgp"][0][0])

    def collapsed(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        numpyro.sample("y", npgp.CollapsedGP(npgp.RBF(lengthscale), X, Z, noise_variance=NOISE, offset=level), obs=y)

    draws = {name: value for name, value in whitened_draws().items() if name in ("lengthscale", "level")}
    found = npgp.posterior("y", collapsed, draws, {}, inputs, y)
    pairs = zip(draws["lengthscale"], draws["level"], strict=True)
    alone = [
        npgp.CollapsedGP(npgp.RBF(ell), inputs, Z, noise_variance=NOISE, offset=level).condition(y)
        for ell, level in pairs
    ]
    means, variances = map(np.array, zip(*(p.mean_and_variance(X_NEW) for p in alone), strict=True))
    expected = means.mean(0), variances.mean(0) + means.var(0)
    np.testing.assert_allclose(found.mean_and_variance(X_NEW), expected, rtol=1e-9)
    with pytest.raises(ValueError, match="y is a collapsed GP, whose posterior needs its observations"):
        npgp.posterior("y", collapsed, draws, {}, inputs)
    with pytest.raises(KeyError, match=r"no component named 'f'; it has \['y'\]"):
        npgp.posterior("f", collapsed, draws, {}, inputs, y)


def test_a_collapsed_gp_under_a_guide_for_the_rest(float64):
    """By SVI over the other sites alone: each draw's posterior is conditioned at that draw."""
    inputs, y, Z = jnp.asarray(X), jnp.asarray(Y), jnp.asarray(STRUCTURES["svgp"][0][0])

    def gp(lengthscale):
        return npgp.CollapsedGP(npgp.RBF(lengthscale), inputs, Z, noise_variance=NOISE)

    def collapsed(X, y=None):
        numpyro.sample("y", gp(numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))), obs=y)

    params = {"lengthscale_auto_loc": jnp.zeros(()), "lengthscale_auto_scale": jnp.full((), 0.3)}
    guide = npgp.AutoSparseGP(collapsed, AutoNormal)  # new: its first call is inside
    average = npgp.posterior("y", collapsed, guide, params, inputs, y, draws=4, rng_key=KEY)
    lengthscales = average.sites["lengthscale"]
    assert np.std(lengthscales) > 0.01

    @compiled
    def both(average, lengthscales):
        alone = jax.lax.map(lambda one: gp(one).condition(y).mean_and_variance(X_NEW), lengthscales)
        return [part.mean_and_variance(X_NEW) for part in average], average.mean(X_NEW), alone

    parts, mean, alone = both(average, lengthscales)
    np.testing.assert_allclose(np.swapaxes(parts, 0, 1), alone, rtol=1e-8)
    np.testing.assert_allclose(mean, np.mean(alone[0], 0), rtol=1e-8)


@independent_alone
def test_saved_and_loaded(tmp_path, both):
    average, _ = both
    npgp.save(tmp_path / "average.npz", average)
    again = npgp.load(tmp_path / "average.npz")
    np.testing.assert_array_equal(again.mean_and_variance(X_NEW), average.mean_and_variance(X_NEW))
    np.testing.assert_array_equal(again.sites["level"], average.sites["level"])


@independent_alone
def test_densities_are_averages_over_draws(both):
    """Of a likelihood without parameters, and of one that is different in each draw, against SciPy's formulas."""
    average, alone = both
    y = np.linspace(-1.0, 1.0, len(X_NEW))
    by_draw = average.log_density(X_NEW, y, lambda sites: npgp.Gaussian(scale=jnp.exp(sites["level"])))
    fixed = average.log_density(X_NEW, y > 0, npgp.Bernoulli(link="probit"))
    densities, chances = [], []
    for posterior, level in zip(alone, average.sites["level"], strict=True):
        mean, variance = map(np.asarray, posterior.mean_and_variance(X_NEW))
        densities.append(stats.norm(mean, np.sqrt(variance + np.exp(2.0 * level))).pdf(y))
        yes = stats.norm.cdf(mean / np.sqrt(1.0 + variance))
        chances.append(np.where(y > 0, yes, 1.0 - yes))
        alone_says = posterior.log_density(X_NEW, y, npgp.Gaussian(scale=0.5))
        np.testing.assert_allclose(alone_says, stats.norm(mean, np.sqrt(variance + 0.25)).logpdf(y), rtol=1e-10)
    np.testing.assert_allclose(by_draw, np.log(np.mean(densities, 0)), rtol=1e-9)
    np.testing.assert_allclose(fixed, np.log(np.mean(chances, 0)), rtol=1e-6)
    for wrong, match in [(y[:-1], r"y has shape \(7,\); it must be \(\.\.\., 8\)"), (y * np.nan, "NaN")]:
        with pytest.raises(ValueError, match=match):
            average.log_density(X_NEW, wrong, npgp.Gaussian(scale=0.5))
    with pytest.raises(TypeError, match="likelihood gives Laplace for a draw's sites; .* lambda sites"):
        average.log_density(X_NEW, y, lambda f: dist.Laplace(f["level"], 1.0))


def test_misuse(float64):
    draws, args = whitened_draws(), (jnp.asarray(X), jnp.asarray(Y))
    guide, params = trained("independent")
    for wrong, error, match in [
        (0, ValueError, "draws is 0; it must be at least 1"),
        (2.5, TypeError, "draws is 2.5; it must be a whole number"),
    ]:
        with pytest.raises(error, match=match):
            npgp.posterior("f", model, guide, params, *args, draws=wrong)
    with pytest.raises(ValueError, match="draws is 6; it must be at most the 5 draws that are given"):
        npgp.posterior("f", model, draws, {}, *args, draws=6)
    with pytest.raises(ValueError, match=r"no \['f.v'\], latent sites on which f depends"):
        npgp.posterior("f", model, {name: value for name, value in draws.items() if name != "f.v"}, {}, *args)
    with pytest.raises(ValueError, match="their leading axes, over draws, must be the same"):
        npgp.posterior("f", model, draws | {"level": np.zeros(4)}, {}, *args)
    # What f does not depend on may be missing.
    assert len(npgp.posterior("f", model, {n: v for n, v in draws.items() if n != "level"}, {}, *args)) == 5
    average = npgp.posterior("f", model, draws, {}, *args)
    with pytest.raises(TypeError, match=r"posteriors has an average over draws.*its own mixed\(W\)"):
        npgp.variational.MixedPosterior((average,), np.ones((2, 1)))
    with pytest.raises(TypeError, match="neighbors is for the posterior of a VNNGP"):
        average.mean(X_NEW, neighbors=np.zeros((8, 1), int))


def test_keys_choose_the_draws(float64):
    guide, params = trained("independent")
    averages = [npgp.posterior("f", model, guide, params, X, Y, draws=3, rng_key=k) for k in (*keys(2), keys(2)[0])]
    assert np.abs(averages[0].mean(X_NEW) - averages[1].mean(X_NEW)).max() > 1e-4
    np.testing.assert_array_equal(averages[0].mean(X_NEW), averages[2].mean(X_NEW))
