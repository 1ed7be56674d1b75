"""Pareto k̂ of the whole model: of exact posteriors, of ones whose tail is known, and of ones too narrow."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import oracles
import pytest
from models import NOISE, STRUCTURES, Dense, X, Y, elbo_value, kernel, random_params, rbf, regression, sparse_gp
from numpyro import handlers
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from scipy import special, stats

import npgp
from npgp.training.trust import PosteriorCheck, _judged, _smoothed

KEY = jax.random.key(2)
LEVEL = 3.0  # prior standard deviation


# ---------------------------------------------------------------------------------------------------------------
# Exact posteriors


@pytest.mark.parametrize("structure, conditional", [("odvgp", "prior"), ("svgp", "tight")])
def test_at_the_optimum_for_gaussian_noise_all_weights_are_the_same(structure, conditional, float64):
    """Whatever the inducing points leave open: the density is that of the bound, whose value is the weights' mean."""
    blocks, kinds = STRUCTURES[structure]
    blocks = [jnp.asarray(block.copy()) for block in blocks]
    optimum = npgp.CollapsedGP(
        kernel(), jnp.asarray(X), blocks, noise_variance=NOISE, covariances=kinds, conditional=conditional, jitter=1e-12
    )
    best, bound = jax.jit(lambda: (optimum.condition(Y).q, optimum.log_prob(Y)))()
    params = sparse_gp(structure).params(best)
    model = regression(structure, conditional)
    found = npgp.check_posterior(KEY, model, npgp.AutoSparseGP(model), params, X, Y, draws=200)
    assert found.khat == -np.inf
    assert found.spread < 1e-6
    assert found.effective == 200
    assert found.elbo == pytest.approx(float(bound), abs=1e-6)
    assert found.trusted
    assert str(found).startswith("Pareto k̂ = −∞ (weighted, 200 draws are worth 200): good")
    # What is left of f costs ½ log(1 + d/σ²) a row, whatever the conditional.
    left = oracles.Joint.of(
        partial(rbf, lengthscale=kernel().lengthscale, variance=kernel().variance), blocks, X
    ).residual()
    cost = 0.5 * np.mean(np.log1p(np.diag(left) / NOISE))
    if structure == "svgp":
        assert found.points == pytest.approx(cost, rel=1e-4)
        assert ("costs" in str(found)) == (cost > 0.03)


@pytest.mark.parametrize(
    "structure, likelihood",
    [("mean-field", None), ("odvgp", None), ("solve", npgp.Poisson())],
    ids=["mean-field-gaussian", "odvgp-gaussian", "solve-poisson"],
)
def test_the_mean_of_log_weights_is_the_elbo(structure, likelihood, float64):
    """
    Away from the optimum, by the ELBO in closed form. That of ``tight`` is no mean over ε where noise is not Gaussian,
    nor where a block's variance is the residual's: there with ``prior``.
    """
    y = Y if likelihood is None else np.array([0.0, 1.0, 3.0, 0.0, 2.0, 1.0, 5.0, 0.0])
    model = regression(structure, "prior", likelihood)
    params = random_params(structure)
    draws = 4000
    found = npgp.check_posterior(KEY, model, npgp.AutoSparseGP(model), params, X, y, draws=draws)
    elbo = elbo_value(model, params, X, y)
    assert abs(found.elbo - elbo) < 4.5 * found.spread / np.sqrt(draws)
    assert found.spread > 0.1


def level_model(X, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, LEVEL))
    f = npgp.SparseGP("f", kernel(), jnp.asarray(X), jitter=1e-14).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X) + level, npgp.Gaussian(variance=NOISE), obs=y)


def level_params():
    """Parameters of the best guide of either kind, from the joint precision of (ε, level)."""
    L = np.linalg.cholesky(rbf(X, X))
    design = np.column_stack([L, np.ones(len(X))])  # y = design @ (ε, level) + noise
    precision = np.diag([*np.ones(len(X)), LEVEL**-2]) + design.T @ design / NOISE
    mean = np.linalg.solve(precision, design.T @ Y / NOISE)
    given_level = np.linalg.inv(precision[:-1, :-1])
    params = {"f.u.loc": mean[:-1], "f.u.scale_tril": np.linalg.cholesky(given_level), "level_auto_loc": mean[-1]}
    independent = params | {"level_auto_scale": precision[-1, -1] ** -0.5}
    deviation = np.linalg.inv(precision)[-1, -1] ** 0.5
    C = -given_level @ precision[:-1, -1:] * deviation
    coupled = params | {"level_auto_scale": deviation, "f.u.coupling": C}
    eigenvalues = np.linalg.eigvals(
        np.linalg.solve(
            np.block([[precision[:-1, :-1], np.zeros((8, 1))], [np.zeros((1, 8)), precision[-1:, -1:]]]), precision
        )
    )
    return jax.tree.map(jnp.asarray, (independent, coupled)), 1 - np.min(eigenvalues.real)


def test_a_level_beside_a_gp_is_right_if_q_follows_it_and_not_otherwise(float64):
    """The tail of a ratio of Gaussians has shape 1 − λ, λ the least eigenvalue of one precision against the other."""
    (independent, coupled), shape = level_params()
    guide = npgp.AutoSparseGP(level_model, AutoNormal, dependence="coupled")
    exact = npgp.check_posterior(KEY, level_model, guide, coupled, X, Y, draws=200)
    assert exact.spread < 1e-6
    assert exact.khat == -np.inf
    covariance = rbf(X, X) + NOISE * np.eye(8) + LEVEL**2
    assert exact.elbo == pytest.approx(stats.multivariate_normal.logpdf(Y, cov=covariance), abs=1e-6)

    guide = npgp.AutoSparseGP(level_model, AutoNormal, dependence="independent")
    found = npgp.check_posterior(KEY, level_model, guide, independent, X, Y, draws=4000)
    assert shape > 0.9
    assert found.khat > 0.7
    assert not found.trusted
    assert "as npgp.AutoSparseGP(model) does by default" in str(found)


def test_reweighted_draws_have_the_models_moments(float64):
    """A guide that is wider than the posterior in the level, and right given it: weights make both right."""
    (_, exact), _ = level_params()
    wide = exact | {name: 1.4 * exact[name] for name in ("level_auto_scale", "f.u.coupling")}
    guide = npgp.AutoSparseGP(level_model, AutoNormal, dependence="coupled")
    check = npgp.check_posterior(KEY, level_model, guide, wide, X, Y, draws=4000)
    assert check.khat < 0.5
    assert check.weights.sum() == pytest.approx(1.0)
    assert check.of_functions < 1e-5
    assert check.spread == pytest.approx((1.4**2 - 1) / np.sqrt(2), rel=0.1)
    draws = check.reweight(4000)
    assert draws["level"].shape == (4000,) and draws["f.u"].shape == (4000, 8)
    deviation, mean = float(exact["level_auto_scale"]), float(exact["level_auto_loc"])
    assert np.std(check.sites["level"]) > 1.3 * deviation
    assert abs(np.mean(draws["level"]) - mean) < 0.1 * deviation
    assert np.std(draws["level"]) == pytest.approx(deviation, rel=0.06)
    covariance = exact["f.u.scale_tril"] @ exact["f.u.scale_tril"].T + np.outer(*2 * [exact["f.u.coupling"][:, 0]])
    np.testing.assert_allclose(np.std(draws["f.u"], axis=0), np.sqrt(np.diag(covariance)), rtol=0.1)
    few = np.unique(check.reweight(100)["level"])
    assert len(few) > 60  # systematic: copies of the heaviest alone
    with pytest.raises(ValueError, match="this check has no draws"):
        PosteriorCheck(0.1, 100, 90.0, 1.0, -3.0).reweight()


def test_what_of_the_spread_is_of_functions(float64):
    """Where q(ε) has ρ times the right deviations in 8 directions, its log ratios vary by √(8/2) (1 − ρ²) nats."""
    (_, exact), _ = level_params()
    narrow = exact | {"f.u.scale_tril": 0.6 * exact["f.u.scale_tril"]}
    guide = npgp.AutoSparseGP(level_model, AutoNormal, dependence="coupled")
    check = npgp.check_posterior(KEY, level_model, guide, narrow, X, Y, draws=4000)
    assert check.of_functions == pytest.approx(2.0 * (1 - 0.6**2), rel=0.15)
    assert check.spread == pytest.approx(2.0 * (1 - 0.6**2), rel=0.1)
    words = str(PosteriorCheck(0.8, 2000, 100.0, 5.0, -5.0, of_functions=3.0))
    assert "4.0 nats are of the other sites, 3.0 of functions given these" in words


def test_advice_knows_the_guide():
    words = str(PosteriorCheck(0.9, 2000, 10.0, 3.0, -10.0, follows=True))
    assert "num_steps=None, if it has not; or run NUTS" in words and "by default" not in words
    assert "does by default; or run NUTS" in str(PosteriorCheck(0.9, 2000, 10.0, 3.0, -10.0))


def test_components_that_meet_and_share_no_posterior_are_said_whatever_the_tail_is(float64):
    """The functions of a plate, mixed; and not those of a sum that share one, or of which one is known."""

    def model(X, y=None, mixed=False, noise=10.0):
        f, g = (npgp.SparseGP(name, kernel(), X[:3]).draw() for name in "fg")
        with numpyro.plate("functions", 2, dim=-2):
            h = npgp.SparseGP("h", kernel(), X[:3]).draw()
        with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", len(X)):
            latent = np.array([[1.0, 0.5], [1.0, -0.5]]) @ h(X) if mixed else f(X) + g(X)
            npgp.observe("y", latent + jnp.zeros((2, 1)), npgp.Gaussian(variance=noise), obs=y)

    y = np.stack([Y, Y])

    def check(model, **options):
        guide = npgp.AutoSparseGP(model, **options)
        svi = numpyro.infer.SVI(model, guide, npgp.adam(0.05, 300), TraceMeanField_ELBO())
        params = npgp.fit(svi, KEY, 300, X, y, progress=False).params
        return npgp.check_posterior(KEY, model, guide, params, X, y, draws=200)

    found = check(partial(model, mixed=True), joint=False)
    assert found.independent == ("the functions of h, which meet in 'y'",)
    assert found.khat < 0.7 and not found.trusted
    assert "But q takes for independent the functions of h, which meet in 'y': " in str(found)
    for known in (model, handlers.condition(model, data={"g.u": jnp.zeros(3)})):
        found = check(known)
        assert found.trusted and found.independent == () and "independent" not in str(found)


def test_latent_inputs_that_are_drawn_row_by_row_are_said():
    Y = np.random.default_rng(0).normal(size=(12, 3))
    gplvm = npgp.BayesianGPLVM(npgp.gplvm.pca_start(KEY, Y, latent_dim=1, num_inducing=3))
    svi = numpyro.infer.SVI(gplvm.model, gplvm.guide, npgp.adam(0.01), TraceMeanField_ELBO())
    params = npgp.fit(svi, KEY, 1, Y, progress=False).params
    found = npgp.check_posterior(KEY, gplvm.model, gplvm.guide, params, Y, draws=100)
    assert found.independent == (
        "the x of each row, inputs of f, whose common shifts and warps the function would follow",
    )


# ---------------------------------------------------------------------------------------------------------------
# A tail that is known


def mean_model(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def mean_guide(y, narrow):
    precision = 1.0 + len(y)
    numpyro.sample("mean", dist.Normal(jnp.sum(y) / precision, narrow / jnp.sqrt(precision)))


def test_jitter_beside_the_noise_is_said():
    X, y = np.linspace(0, 1, 20, dtype=np.float32)[:, None], np.zeros(20, np.float32)

    def model(X, y=None):
        variance = numpyro.param("variance", 1.0)
        f = npgp.SparseGP("f", npgp.RBF(1.0, variance=variance), X[::4]).draw()
        with numpyro.plate("data", 20):
            npgp.observe("y", f(X), npgp.Gaussian(variance=1e-2), obs=y)

    guide = npgp.AutoSparseGP(model)
    params = {"f.u.loc": jnp.zeros(5), "f.u.scale_tril": 0.01 * jnp.eye(5)}
    for variance, share in ((1e3, 1.0), (10.0, 0.01)):  # the jitter is 1e-5 of the variance
        found = npgp.check_posterior(KEY, model, guide, {**params, "variance": variance}, X, y, draws=100)
        assert found.jitter == pytest.approx(share, rel=1e-2)
        assert ("a jitter of 1 times the noise variance" in str(found)) == (share > 0.1)
        assert ("use float64" in str(found)) == (share > 0.1)
        assert ("give a smaller jitter" in str(replace(found, dtype="float64"))) == (share > 0.1)  # in use already
        assert not (found.trusted and share > 0.1)


def test_too_few_nodes_are_said(float64):
    def checked(num_nodes):
        likelihood = npgp.likelihoods.Factorized(lambda f: dist.StudentT(3.0, f, 0.1), num_nodes=num_nodes)
        model = regression("svgp", "prior", likelihood)
        return npgp.check_posterior(KEY, model, npgp.AutoSparseGP(model), random_params("svgp"), X, Y, draws=100)

    few = checked(5)
    assert few.quadrature > 0.5 and "change by" in str(few) and "more num_nodes" in str(few) and not few.trusted


def test_the_effective_number_of_draws_is_kishs():
    """Which smoothing hardly changes where tails are light."""
    log_ratios = 0.3 * np.random.default_rng(0).normal(size=2000)
    w = np.exp(log_ratios)
    np.testing.assert_allclose(_judged(log_ratios).effective, np.sum(w) ** 2 / np.sum(w**2), rtol=0.01)


@pytest.mark.parametrize("narrow", [0.9, 0.3])
def test_khat_of_a_normal_that_is_too_narrow(narrow, float64):
    """
    A normal proposal with ρ times the standard deviation has ratios ``c exp((1 − ρ²) z²/2)`` with z ~ N(0, 1): their
    tail has shape 1 − ρ², but for a logarithm, by which estimates from 4000 draws are some .1 too small. Their average
    over 12 keys has a standard deviation of .05.
    """
    guide = partial(mean_guide, narrow=narrow)
    found = [
        npgp.check_posterior(key, mean_model, guide, {}, jnp.asarray(Y), draws=4000)
        for key in jax.random.split(KEY, 12)
    ]
    shape = 1 - narrow**2
    assert -0.25 < np.mean([f.khat for f in found]) - shape < 0.15
    np.testing.assert_allclose(np.mean([f.spread for f in found]), shape / np.sqrt(2), rtol=0.05)


def test_weights_say_by_how_much_a_guide_is_too_wide(float64):
    found = npgp.check_posterior(KEY, mean_model, partial(mean_guide, narrow=1.5), {}, jnp.asarray(Y))
    assert found.khat < 0.2 and not found.near and not found.trusted
    assert found.widened["mean"] == pytest.approx(-np.log(1.5), abs=0.04) and found.moved["mean"] < 0.1
    assert re.search(r"not the model's, by .* these by up to (4[4-9]|5\d)% \(mean, too wide\)\. These", str(found))


def checked(log_p, log_q, draws):
    """What is said of a density by draws from another one, (draws, entries)."""
    return replace(_judged(log_p(draws).sum(1) - log_q(draws).sum(1)), sites={"x": draws})


@pytest.mark.parametrize("narrow, shift", [(1.0, 0.05), (0.95, 0.0), (0.8, 0.0), (1.0, 0.5)])
def test_a_normal_is_near_another_of_its_mean_and_deviation(narrow, shift):
    z = np.random.default_rng(0).normal(size=(4000, 3))
    found = checked(stats.norm.logpdf, lambda x: stats.norm.logpdf(x, shift, narrow), narrow * z + shift)
    # Of three entries the one that is furthest off, where weights leave half of the draws by .03 and more.
    assert found.moved["x"] == pytest.approx(shift / narrow, abs=0.08)
    assert found.widened["x"] == pytest.approx(-np.log(narrow), abs=0.04)
    assert found.khat < 0.7 and found.near == (narrow > 0.9 and shift < 0.1)


def test_a_skewed_posterior_is_near_but_for_its_tail():
    """The logarithm of a gamma variable beside the normal of its mean and deviation."""
    mean, deviation = special.digamma(30), np.sqrt(special.polygamma(1, 30))
    z = np.random.default_rng(0).normal(size=(2000, 1))
    skewed = checked(
        lambda x: stats.loggamma.logpdf(x, 30), lambda x: stats.norm.logpdf(x, mean, deviation), mean + deviation * z
    )
    assert skewed.khat > 0.7 and skewed.near and skewed.trusted
    assert max(skewed.moved["x"], abs(skewed.widened["x"])) < 0.02
    assert "usable: all but the tails is near the model's posterior, by the weights means are off by" in str(skewed)
    # A Student-t of 4 degrees of freedom has 1.41 times the deviation of the normal of its center.
    heavy = checked(lambda x: stats.t.logpdf(x, 4), stats.norm.logpdf, z)
    assert not heavy.near and 0.1 < heavy.widened["x"] < np.log(np.sqrt(2))


def test_weights_that_leave_few_draws_are_not_trusted():
    """A normal in 50 dimensions, all of which are a tenth too narrow."""
    z = 0.9 * np.random.default_rng(0).normal(size=(2000, 50))
    found = checked(stats.norm.logpdf, lambda x: stats.norm.logpdf(x, scale=0.9), z)
    assert found.effective < 0.5 * found.draws and not found.near


def test_words():
    one = np.linspace(-1.0, 1.0, 2000)
    even = {"sites": {"x": one, "fixed": np.ones(2000)}, "weights": np.full(2000, 1 / 2000)}
    outer = {"sites": {"x": one}, "weights": one**2 / np.sum(one**2)}  # which is √(9/5) times as wide
    of_draws = {"even": even, "outer": outer}
    checks = {(k, n): PosteriorCheck(k, 2000, 1500.0, 1.0, -5.0, **w) for k in (0.6, 0.9) for n, w in of_draws.items()}
    words = {of: str(check) for of, check in checks.items()}
    assert {of for of, check in checks.items() if check.near} == {(0.6, "even"), (0.9, "even")}
    assert checks[0.6, "even"].moved == {"x": pytest.approx(0.0, abs=1e-12)}
    assert words[0.6, "even"].startswith("Pareto k̂ = 0.60 (weighted, 2000 draws are worth 1500): good: ")
    assert "usable: all but the tails" in words[0.9, "even"]
    assert checks[0.6, "outer"].widened["x"] == pytest.approx(0.5 * np.log(9 / 5), abs=1e-3)
    assert "by up to 34% (x, too narrow). These weights can be relied upon: check.reweight()" in words[0.6, "outer"]
    assert "see but a part of it" in words[0.9, "outer"] and "NUTS" in words[0.9, "outer"]
    assert not PosteriorCheck(0.6, 2000, 900.0, 1.0, -5.0, **even).near  # most draws hardly count
    # Of many entries the last one is off, and a site may have none.
    many = np.where(np.arange(4100) < 4099, np.sign(one)[:, None], one[:, None])
    odd = replace(checks[0.6, "outer"], sites={"many": many, "none": np.ones((2000, 0))})
    assert odd.widened == {"many": pytest.approx(0.5 * np.log(9 / 5), abs=1e-3)}
    # Without draws k̂ is all that is known.
    assert [PosteriorCheck(k, 2000, 1500.0, 1.0, -5.0).near for k in (0.6, 0.9)] == [True, False]


def test_impossible_draws_have_no_weight():
    ratios = np.random.default_rng(0).normal(size=1000)
    worse = np.where(np.arange(1000) < 300, -np.inf, ratios)
    found = _judged(worse)
    assert np.isfinite(found.khat)
    assert found.effective < 700 * 1.001
    for wrong in (np.nan, np.inf):
        with pytest.raises(FloatingPointError, match="1 of 1000 draws have a density that is not finite"):
            _judged(np.where(np.arange(1000) == 5, wrong, ratios))


@pytest.mark.parametrize("shape", [0.2, 0.9])
def test_khat_is_that_of_the_largest_ratios(shape):
    """
    Ratios at the quantiles of a Pareto distribution, whose other tail ends at 1: there k̂ would be −1. ArviZ 1.0 takes
    the negatives of what earlier versions take.
    """
    ratios = -shape * np.log1p(-(np.arange(4000) + 0.5) / 4000)
    smoothed, khat = _smoothed(ratios)
    assert khat == pytest.approx(shape, abs=0.05)
    assert np.all(np.diff(smoothed) >= 0)
    assert np.ptp(smoothed) == pytest.approx(np.ptp(ratios), rel=0.2)


# ---------------------------------------------------------------------------------------------------------------
# What models may have


def test_sampled_function_values_and_hyperparameters(float64):
    """``npgp.sample`` and sites beside it, with a guide that is new; and where a site has one value."""

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
        f = npgp.SparseGP("f", npgp.RBF(lengthscale), jnp.asarray(STRUCTURES["svgp"][0][0])).draw()
        with numpyro.plate("data", X.shape[0]):
            value = npgp.sample("value", f(X))
            numpyro.sample("y", dist.Normal(value, 0.5), obs=y)

    params = random_params() | {"lengthscale_auto_loc": jnp.ones(())}
    wide = params | {"lengthscale_auto_scale": jnp.full((), 0.3)}
    guide = npgp.AutoSparseGP(model, AutoNormal, dependence="independent")
    found = npgp.check_posterior(KEY, model, guide, wide, X, Y, draws=1000)
    loss = TraceMeanField_ELBO(num_particles=2000)
    elbo = -float(jax.jit(lambda: loss.loss(KEY, wide, model, guide, X, Y))())
    assert abs(found.elbo - elbo) < 4.5 * found.spread * np.sqrt(1 / 1000 + 1 / 2000)
    one = npgp.check_posterior(
        KEY, model, npgp.AutoSparseGP(model, AutoDelta, dependence="independent"), params, X, Y, draws=1000
    )
    assert np.isfinite(one.khat)


def test_collapsed_gps_have_no_inducing_values(float64):
    Z = jnp.asarray(STRUCTURES["svgp"][0][0])

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, LEVEL))
        numpyro.sample(
            "y", npgp.CollapsedGP(kernel(), X, Z, noise_variance=NOISE, offset=level, conditional="prior"), obs=y
        )

    dense = Dense("svgp", X)
    precision = np.linalg.inv(dense.Q + NOISE * np.eye(8))
    ones = np.ones(8)
    total = LEVEL**-2 + ones @ precision @ ones
    params = {"auto_loc": ones @ precision @ Y / total, "auto_scale": total**-0.5}
    params = {f"level_{name}": jnp.asarray(value) for name, value in params.items()}
    found = npgp.check_posterior(KEY, model, AutoNormal(model), params, jnp.asarray(X), jnp.asarray(Y), draws=200)
    assert found.spread < 1e-6


def test_numpyros_guides_by_themselves_are_checked_against_the_model_without_guide(float64):
    """``AutoNormal(model)`` takes ε for latent values: FITC's density, whose posterior of ε is Gaussian."""
    model = regression("svgp")
    dense = Dense("svgp", X)
    noise = NOISE + np.diag(dense.D)
    precision = np.eye(3) + dense.A / noise @ dense.A.T
    mean = np.linalg.solve(precision, dense.A @ (Y / noise))

    def guide(X, y=None):
        numpyro.sample("f.u", dist.MultivariateNormal(jnp.asarray(mean), precision_matrix=jnp.asarray(precision)))

    found = npgp.check_posterior(KEY, model, guide, {}, X, Y, draws=200)
    assert found.spread < 1e-6


def test_misuse(float64):
    model, params = regression("svgp"), random_params()
    guide = npgp.AutoSparseGP(model)
    check = partial(npgp.check_posterior, KEY)
    with pytest.raises(ValueError, match="draws is 50; it must be at least 100"):
        check(model, guide, params, X, Y, draws=50)
    with pytest.raises(ValueError, match="y is not observed: pass check_posterior the observations too"):
        check(model, guide, params, X)
    with pytest.raises(KeyError, match="params has no 'f.u.loc'"):
        check(model, npgp.AutoSparseGP(model), {}, X, Y)

    def batches(X, y=None):
        f = sparse_gp().draw()
        with npgp.plate("data", 80, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    with pytest.raises(ValueError, match="plate 'data' has 8 of its 80 rows: check_posterior needs the model with all"):
        check(batches, npgp.AutoSparseGP(batches), params, X, Y)

    def neighbors(X, y=None):
        f = npgp.VNNGP("f", kernel(), X, npgp.neighbors.nearest_before(X, 2)).draw()
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    of_neighbors = {"f.u.loc": jnp.zeros(8), "f.u.scale": jnp.ones(8)}
    with pytest.raises(NotImplementedError, match="f.u belongs to a VNNGP"):
        check(neighbors, npgp.AutoSparseGP(neighbors), of_neighbors, X, Y)

    def other(y):
        numpyro.sample("mean", dist.Normal(0.0, 1.0))
        numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y[0])

    with pytest.raises(ValueError, match="slope, a latent site of the model, is not drawn by the guide"):
        check(other, partial(mean_guide, narrow=1.0), {}, jnp.asarray(Y))
    with pytest.raises(ValueError, match="the model has no observed site"):
        check(handlers.block(other, hide=["y", "slope"]), partial(mean_guide, narrow=1.0), {}, jnp.asarray(Y))
