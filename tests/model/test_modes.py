"""
What ``observe``, ``sample`` and ``CollapsedGP`` mean in each mode (docs/theory.md, section 4), against dense algebra.

One section for each cell of the table: SVI, NUTS or no guide, and ``Predictive``.
"""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import (
    NOISE,
    PRECISION,
    RESIDUAL_SCALE,
    STRUCTURES,
    X_NEW,
    Dense,
    X,
    Y,
    affine,
    compiled,
    elbo_value,
    kernel,
    log_normal,
    make_elbo,
    over_keys,
    params_of,
    random_params,
    regression,
    sites,
    sparse_gp,
    traces,
    train,
    worst_z_of_moments,
)
from numpy.polynomial.hermite_e import hermegauss
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import (
    MCMC,
    NUTS,
    Predictive,
    Trace_ELBO,
    TraceMeanField_ELBO,
    log_likelihood,
)
from numpyro.infer.util import log_density

import npgp
from npgp.conditionals.base import row_elbo

#: Of a z-score: a test with a fixed seed and up to a hundred of them.
Z_LIMIT = 4.5
LIKELIHOODS = {
    "bernoulli": (npgp.Bernoulli(), (Y > 0).astype(float)),
    "poisson": (npgp.Poisson(), np.floor(2 * np.abs(Y))),
}


def hermite(function, mean, variance):
    """E[function(f)] for f ~ N(mean, variance), elementwise."""
    nodes, weights = hermegauss(60)
    values = function(mean[:, None] + np.sqrt(variance)[:, None] * nodes)
    return values @ (weights / weights.sum())


def numpy_log_prob(name, y):
    """log p(y | f) for f of shape (N, nodes)."""
    y = y[:, None]
    if name == "bernoulli":
        return lambda f: -np.log1p(np.exp(-(2 * y - 1) * f))
    factorial = np.array([[np.prod(np.arange(1, k + 1))] for k in y[:, 0]])
    return lambda f: y * f - np.exp(f) - np.log(factorial)


def collapsed(structure="svgp", conditional="tight", **kwargs):
    blocks, kinds = STRUCTURES[structure]
    blocks = [jnp.asarray(block) for block in blocks]
    return npgp.CollapsedGP(
        kernel(), jnp.asarray(X), blocks, noise_variance=NOISE, conditional=conditional, covariances=kinds, **kwargs
    )


# ---------------------------------------------------------------------------------------------------------------
# observe × SVI


def test_observe_svi_at_the_optimum_is_the_collapsed_bound_in_float32():
    """To its digits; to those of float64, with slopes and for all structures: tests/collapsed/test_equivalence.py."""
    structure = "solve"
    gp = sparse_gp(structure)

    def make(conditional):
        def model(X, y):
            f = gp.draw()
            with numpyro.plate("data", X.shape[0]):
                npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y, conditional=conditional)

        return make_elbo(model)

    elbos = {conditional: make(conditional) for conditional in ("prior", "tight", "shared")}
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    params = params_of(compiled(lambda: collapsed(structure).condition(Y))(), structure)
    # The best m (Artemev et al. 2021).
    best = 1.0 / (1.0 + Dense(structure, X).residual.mean() / NOISE)
    params["y.residual_scale"] = jnp.asarray(best, jnp.float32)
    values = over_keys(lambda *a: {c: e(*a) for c, e in elbos.items()}, 5, params, x, y)
    with jax.enable_x64(True):
        bounds = compiled(lambda: {c: collapsed(structure, c).log_prob(Y) for c in elbos})()
    for conditional, value in values.items():
        assert value.dtype == jnp.float32
        assert np.ptp(value) == 0.0  # no Monte Carlo noise at all
        np.testing.assert_allclose(value[0], bounds[conditional], rtol=1e-3)
    assert values["tight"][0] > values["shared"][0] + 1e-3 > values["prior"][0] + 2e-3


@pytest.mark.parametrize("structure", STRUCTURES)
def test_observe_svi_at_any_q(structure, float64):
    params = random_params(structure)
    dense = Dense(structure, X, params)
    choices = ("prior", "tight", "shared", "published")
    elbos = {c: make_elbo(regression(structure, c)) for c in choices}
    params |= {"y.residual_scale": jnp.asarray(RESIDUAL_SCALE), "y.residual_precision": jnp.asarray(PRECISION)}
    values = over_keys(lambda *a: {c: e(*a) for c, e in elbos.items()}, 3, params, X, Y)
    for conditional in choices:
        assert np.ptp(values[conditional]) == 0.0
        np.testing.assert_allclose(values[conditional][0], dense.elbo(Y, conditional), rtol=1e-8)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_observe_svi_with_other_likelihoods(name, float64):
    likelihood, y = LIKELIHOODS[name]
    params = random_params("odvgp")
    dense = Dense("odvgp", X, params)
    elbos = {c: make_elbo(regression("odvgp", c, likelihood)) for c in ("prior", "tight")}
    values = over_keys(lambda *a: {c: e(*a) for c, e in elbos.items()}, 2, params, X, y)
    by_hand = hermite(numpy_log_prob(name, y), dense.mean, dense.variance)
    np.testing.assert_allclose(values["prior"], by_hand.sum() - dense.kl, rtol=1e-8)
    rows = compiled(row_elbo)(npgp.conditionals.Tight(), likelihood, y, dense.mean, dense.explained, dense.residual)
    np.testing.assert_allclose(values["tight"], rows.sum() - dense.kl, rtol=1e-8)
    assert values["tight"][0] > values["prior"][0] + 1e-3


def test_observe_svi_with_trace_elbo_has_the_same_expectation(float64):
    params = random_params("odvgp")
    model = regression("odvgp")
    values = over_keys(make_elbo(model, loss=Trace_ELBO()), 4000, params, X, Y)
    z = (values.mean() - Dense("odvgp", X, params).elbo(Y)) / (values.std() / 4000**0.5)
    assert 1.0 < values.std() < 10.0
    assert abs(z) < Z_LIMIT


def test_joint_has_no_part_in_observing(float64):
    def model(X, y):
        npgp.observe("y", sparse_gp(jitter=1e-12).draw()(X), npgp.Gaussian(variance=NOISE), obs=y, joint=True)

    params = random_params()
    np.testing.assert_allclose(elbo_value(model, params, X, Y), Dense("svgp", X, params).elbo(Y), rtol=1e-8)


# ---------------------------------------------------------------------------------------------------------------
# observe × no guide


@pytest.mark.parametrize("structure", ["svgp", "odvgp"])
def test_observe_without_guide_is_the_density_given_epsilon(structure, float64):
    rng = np.random.default_rng(1)
    draws = {s: rng.normal(size=(5, len(b))) for s, b in zip(sites(structure), STRUCTURES[structure][0], strict=True)}
    dense = Dense(structure, X)
    stacked = np.concatenate(list(draws.values()), axis=1)
    # Without q every block is given, the mean-only one too: the residual is what all of them leave.
    rows = log_normal(Y, stacked @ dense.A, np.diag(dense.D) + NOISE)
    model = regression(structure)
    pointwise = log_likelihood(model, jax.tree.map(jnp.asarray, draws), jnp.asarray(X), jnp.asarray(Y))
    assert set(pointwise) == {"y"}
    np.testing.assert_allclose(pointwise["y"], rows, rtol=1e-8, atol=1e-8)
    total = compiled(jax.vmap(lambda eps: log_density(model, (X, Y), {}, eps)[0]))(draws)
    np.testing.assert_allclose(total, rows.sum(1) + log_normal(stacked, 0.0, 1.0).sum(1), rtol=1e-8)


def test_observe_without_guide_integrates_other_likelihoods(float64):
    y = (Y > 0).astype(float)
    eps = np.random.default_rng(2).normal(size=3)
    dense = Dense("svgp", X)
    log_prob = numpy_log_prob("bernoulli", y)
    rows = np.log(hermite(lambda f: np.exp(log_prob(f)), eps @ dense.A, np.diag(dense.D)))
    model = regression(likelihood=npgp.Bernoulli())
    value = compiled(lambda e: log_density(model, (X, y), {}, {"f.u": e})[0])(eps)
    np.testing.assert_allclose(value, rows.sum() + log_normal(eps, 0.0, 1.0).sum(), rtol=1e-7)


def test_observe_nuts_targets_the_fitc_posterior(float64):
    def run(X, Y):
        mcmc = MCMC(NUTS(regression()), num_warmup=150, num_samples=1500, progress_bar=False)
        mcmc.run(jax.random.key(0), X, Y)
        return mcmc.get_samples()

    draws = np.asarray(compiled(run)(X, Y)["f.u"])
    dense = Dense("svgp", X)
    scaled = dense.A / (np.diag(dense.D) + NOISE)
    cov = np.linalg.inv(np.eye(3) + scaled @ dense.A.T)
    mean = cov @ scaled @ Y
    ess = effective_sample_size(draws[None])
    assert np.all(ess > 400)
    z_mean = (draws.mean(0) - mean) / np.sqrt(np.diag(cov) / ess)
    # Squares mix faster than half as well as the draws themselves.
    z_variance = (np.mean((draws - mean) ** 2, 0) / np.diag(cov) - 1) / np.sqrt(4 / ess)
    assert np.abs(z_mean).max() < 4
    assert np.abs(z_variance).max() < 4
    # The posterior of another model, with prior variance but no residual (DTC), would be told apart.
    other = np.linalg.solve(np.eye(3) + dense.A @ dense.A.T / NOISE, dense.A @ Y / NOISE)
    assert np.abs((draws.mean(0) - other) / np.sqrt(np.diag(cov) / ess)).max() > 8


# ---------------------------------------------------------------------------------------------------------------
# Both statements × Predictive


def statements(structure):
    """A model with all that can be predicted, at whatever rows it is given."""

    def model(X, y=None):
        f = sparse_gp(structure, jitter=1e-12).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)
            npgp.observe("joint", f(X), npgp.Gaussian(variance=NOISE), obs=y, joint=True)
            npgp.sample("f_joint", f(X))
            npgp.sample("f_rows", f(X), joint=False)

    return model


def check_predictions(draws, dense):
    noise, diagonal = NOISE * np.eye(len(dense.K)), np.diag(np.diag(dense.D))
    within = dense.A.T @ dense.S @ dense.A  # rows share ε, also where they do not share the residual
    expected = {
        "y": within + diagonal + noise,
        "joint": dense.cov + noise,
        "f_joint": dense.cov,
        "f_rows": within + diagonal,
    }
    for name, cov in expected.items():
        assert worst_z_of_moments(draws[name], dense.mean, cov) < Z_LIMIT, name


@pytest.mark.parametrize("structure", ["odvgp"])
def test_predictive_with_a_guide(structure, float64):
    params, model = random_params(structure), statements(structure)
    guide = npgp.AutoSparseGP(model)
    jax.eval_shape(handlers.seed(guide, jax.random.key(0)), X, Y)  # as training does
    predictive = Predictive(model, guide=guide, params=params, num_samples=6000)
    draws = compiled(predictive)(jax.random.key(1), jnp.asarray(X_NEW))
    dense = Dense(structure, X_NEW, params)
    check_predictions(draws, dense)
    # The test sees the difference between joint and marginal draws.
    assert worst_z_of_moments(draws["f_joint"], dense.mean, np.diag(np.diag(dense.cov))) > 20


def test_predictive_with_posterior_samples_does_not_replay_the_training_rows(float64):
    """New inputs of the same number as the training rows: NumPyro would take the latter's residual for theirs."""
    count, model = 6000, statements("svgp")
    rng = np.random.default_rng(3)
    factor = np.asarray(random_params()["f.u.scale_tril"])
    mean = np.asarray(random_params()["f.u.loc"])
    samples = {
        "f.u": jnp.asarray(mean + rng.normal(size=(count, 3)) @ factor.T),
        "f_joint.residual": jnp.full((count, 8), 50.0),
        "f_rows.residual": jnp.full((count, 8), 50.0),
        "f_joint": jnp.full((count, 8), 50.0),
        "f_rows": jnp.full((count, 8), 50.0),
    }
    draws = compiled(Predictive(model, samples))(jax.random.key(1), jnp.asarray(X_NEW))
    check_predictions(draws, Dense("svgp", X_NEW, random_params()))


def test_prior_predictive_draws_the_exact_gp(float64):
    model = statements("odvgp")
    draws = compiled(Predictive(model, num_samples=6000))(jax.random.key(2), jnp.asarray(X_NEW))
    check_predictions(draws, Dense("odvgp", X_NEW))
    assert worst_z_of_moments(draws["f_joint"], 0.0, Dense("odvgp", X_NEW).K) < Z_LIMIT


# ---------------------------------------------------------------------------------------------------------------
# sample × SVI

SAMPLES: dict[str, dict] = {
    "joint": dict(joint=True, earlier=False),
    "rows": dict(joint=False),
    "joint_shared": dict(joint=True, conditional="shared", earlier=False),
    "rows_shared": dict(joint=False, conditional="shared"),
}


@pytest.mark.parametrize("structure", ["odvgp", "solve"])
def test_sample_svi_has_the_distribution_of_q(structure, float64):
    """f is affine in ε and the residual's noise, so that its covariance follows exactly from the Jacobian."""

    def model(X):
        f = sparse_gp(structure, jitter=1e-12).draw()
        with numpyro.plate("data", X.shape[0]):
            for name, options in SAMPLES.items():
                npgp.sample(name, f(X), **options)

    guide, params = npgp.AutoSparseGP(model), random_params(structure)
    dense = Dense(structure, X, params)
    params |= {f"{name}.residual_scale": jnp.asarray(RESIDUAL_SCALE) for name in SAMPLES}
    offsets = {site: params[f"{site}.loc"] for site in sites(structure)}

    def draw(noise):
        values = {s: v + offsets[s] if s in offsets else v for s, v in noise.items()}
        guide_trace, model_trace = traces(model, guide, params, jnp.asarray(X), values=values)
        variance = {name: guide_trace[f"{name}.residual"]["fn"].variance[0] for name in SAMPLES}
        return {name: model_trace[name]["value"] for name in SAMPLES}, variance

    sizes = {s: len(b) for s, b in zip(offsets, STRUCTURES[structure][0], strict=True)}
    sizes |= {f"{name}.residual": 8 for name in SAMPLES}
    (mean, residual_variance), (jacobian, _) = affine(draw, sizes)
    for name, options in SAMPLES.items():
        shared = options.get("conditional") == "shared"
        assert residual_variance[name] == pytest.approx(RESIDUAL_SCALE if shared else 1.0)
        epsilon = np.concatenate([jacobian[name][site] for site in offsets], axis=1)
        residual = jacobian[name][f"{name}.residual"] * residual_variance[name] ** 0.5
        cov = epsilon @ dense.S @ epsilon.T + residual @ residual.T
        expected = dense.cov
        if shared:  # all of the residual shrinks, a mean-only block's share included
            A, S = dense.A[dense.learned], dense.S[np.ix_(dense.learned, dense.learned)]
            expected = A.T @ S @ A + RESIDUAL_SCALE * (dense.K - A.T @ A)
        np.testing.assert_allclose(mean[name], dense.mean, atol=1e-8)
        expected = expected if options["joint"] else np.diag(np.diag(expected))
        np.testing.assert_allclose(cov, expected, atol=2e-7)


@pytest.mark.parametrize("structure", ["solve"])
def test_sample_svi_has_the_dense_elbo_on_average(structure, float64):
    def make(options):
        def model(X, y):
            f = sparse_gp(structure, jitter=1e-12).draw()
            with numpyro.plate("data", X.shape[0]):
                value = npgp.sample("f", f(X), **options)
                numpyro.sample("y", dist.Normal(value, NOISE**0.5), obs=y)

        return make_elbo(model)

    elbos = {name: make(options) for name, options in SAMPLES.items()}
    params = random_params(structure)
    dense = Dense(structure, X, params)
    params["f.residual_scale"] = jnp.asarray(RESIDUAL_SCALE)
    values = over_keys(lambda *a: {n: e(*a) for n, e in elbos.items()}, 16000, params, X, Y)
    for name, value in values.items():
        error = value.std() / 16000**0.5
        conditional = SAMPLES[name].get("conditional", "prior")
        assert abs(value.mean() - dense.elbo(Y, conditional)) < Z_LIMIT * error, name
        assert Z_LIMIT * error < 0.6  # nats that would be noticed
    assert values["rows"].std() < values["joint"].std()  # what marginal draws are for


@pytest.mark.parametrize("joint", [True])
def test_sample_svi_with_trace_elbo_has_the_same_expectation(joint, float64):
    def model(X, y):
        f = sparse_gp("odvgp", jitter=1e-12).draw()
        with numpyro.plate("rows", X.shape[0]):
            value = npgp.sample("f", f(X), joint=joint, conditional="shared")
            numpyro.sample("y", dist.Normal(value, NOISE**0.5), obs=y)

    params = random_params("odvgp")
    expected = Dense("odvgp", X, params).elbo(Y, "shared")
    params["f.residual_scale"] = jnp.asarray(RESIDUAL_SCALE)
    values = over_keys(make_elbo(model, loss=Trace_ELBO()), 4000, params, X, Y)
    assert abs(values.mean() - expected) < Z_LIMIT * values.std() / 4000**0.5
    assert Z_LIMIT * values.std() / 4000**0.5 < 0.8


# ---------------------------------------------------------------------------------------------------------------
# sample × no guide


@pytest.mark.parametrize("structure", ["svgp", "odvgp"])
def test_sample_without_guide_is_the_prior(structure, float64):
    def model(X):
        f = sparse_gp(structure, jitter=1e-12).draw()
        with numpyro.plate("data", X.shape[0]):
            for name, options in SAMPLES.items():
                npgp.sample(name, f(X), **options)

    def draw(noise):
        trace = handlers.trace(handlers.substitute(model, noise)).get_trace(jnp.asarray(X))
        return {name: trace[name]["value"] for name in SAMPLES}

    dense = Dense(structure, X)
    blocks = {s: len(b) for s, b in zip(sites(structure), STRUCTURES[structure][0], strict=True)}
    mean, jacobian = affine(draw, blocks | {f"{name}.residual": 8 for name in SAMPLES})
    for name, options in SAMPLES.items():
        epsilon = np.concatenate([jacobian[name][site] for site in blocks], axis=1)
        residual = jacobian[name][f"{name}.residual"]
        np.testing.assert_array_equal(mean[name], 0.0)
        np.testing.assert_allclose(epsilon, dense.A.T, atol=1e-8)
        given = dense.D if options["joint"] else np.diag(np.diag(dense.D))
        np.testing.assert_allclose(residual @ residual.T, given, atol=2e-7)
        prior = dense.K if options["joint"] else dense.Q + np.diag(np.diag(dense.D))
        np.testing.assert_allclose(epsilon @ epsilon.T + residual @ residual.T, prior, atol=2e-7)


def test_sample_without_guide_has_the_density_of_a_non_centred_model(float64):
    """What NUTS targets: independent standard normals, and the data's density at f."""

    def model(X, y):
        f = sparse_gp(jitter=1e-12).draw()
        with numpyro.plate("data", X.shape[0]):
            value = npgp.sample("f", f(X))
            numpyro.sample("y", dist.Normal(value, NOISE**0.5), obs=y)

    rng = np.random.default_rng(4)
    eps, z = rng.normal(size=3), rng.normal(size=8)
    dense = Dense("svgp", X)
    f = eps @ dense.A + np.linalg.cholesky(dense.D + 1e-8 * models.VARIANCE * np.eye(8)) @ z
    expected = log_normal(Y, f, NOISE).sum() + log_normal(eps, 0, 1).sum() + log_normal(z, 0, 1).sum()
    latents = {"f.u": eps, "f.residual": z}
    value = compiled(lambda v: log_density(model, (jnp.asarray(X), Y), {}, v)[0])(latents)
    np.testing.assert_allclose(value, expected, rtol=1e-7)


# ---------------------------------------------------------------------------------------------------------------
# CollapsedGP


def test_collapsed_log_prob_is_the_dense_bound(float64):
    dense = Dense("svgp", X)
    cov = dense.Q + NOISE * np.eye(8)
    evidence = -0.5 * (Y @ np.linalg.solve(cov, Y) + np.linalg.slogdet(2 * np.pi * cov)[1])
    d = np.diag(dense.D)
    penalties = {
        "prior": 0.5 * d.sum() / NOISE,
        "tight": 0.5 * np.log1p(d / NOISE).sum(),
        "shared": 0.5 * 8 * np.log1p(d.mean() / NOISE),
    }
    bounds = compiled(lambda y: {c: collapsed("svgp", c, jitter=1e-12).log_prob(y) for c in penalties})(Y)
    for conditional, penalty in penalties.items():
        np.testing.assert_allclose(bounds[conditional], evidence - penalty, rtol=1e-8)


def test_collapsed_without_guide_and_under_svi_is_the_bound(float64):
    def model(x, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        noise = numpyro.param("noise", 0.1, constraint=dist.constraints.positive)
        k = npgp.RBF(lengthscale, variance=models.VARIANCE)
        numpyro.sample("y", npgp.CollapsedGP(k, x, jnp.asarray(models.Z), noise_variance=noise), obs=y)

    x, y = jnp.asarray(X), jnp.asarray(Y)
    latents = {"lengthscale": jnp.asarray(models.LENGTHSCALE), "noise": jnp.asarray(NOISE)}
    prior = dist.LogNormal(0.0, 1.0).log_prob(models.LENGTHSCALE)
    bound = compiled(collapsed().log_prob)(y)
    density, gradient = compiled(jax.value_and_grad(lambda v: log_density(model, (x, y), {}, v)[0]))(latents)
    np.testing.assert_allclose(density, prior + bound, rtol=1e-10)
    assert all(np.isfinite(g) and g != 0 for g in gradient.values())

    def guide(x, y):
        numpyro.sample("lengthscale", dist.Delta(models.LENGTHSCALE))

    loss = TraceMeanField_ELBO().loss
    value = compiled(lambda p: -loss(jax.random.key(0), p, model, guide, x, y))({"noise": jnp.asarray(NOISE)})
    np.testing.assert_allclose(value, prior + bound, rtol=1e-10)


def test_collapsed_condition_is_the_sgpr_posterior(float64):
    k_zz, k_zx, k_zn = (models.rbf(models.Z, points) for points in (models.Z, X, X_NEW))
    sigma = k_zz + k_zx @ k_zx.T / NOISE
    mean = k_zn.T @ np.linalg.solve(sigma, k_zx @ Y) / NOISE
    cov = models.rbf(X_NEW, X_NEW) - k_zn.T @ (np.linalg.inv(k_zz) - np.linalg.inv(sigma)) @ k_zn

    @compiled
    def condition(y):
        posterior = collapsed(jitter=1e-12).condition(y)
        return posterior, posterior.mean(X_NEW), posterior.covariance(X_NEW), posterior.variance(X_NEW)

    posterior, *predictions = condition(Y)
    for got, want in zip(predictions, (mean, cov, np.diag(cov)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-7)
    pointwise = compiled(collapsed(jitter=1e-12).log_likelihood)(Y)
    dense = Dense("svgp", X, params_of(posterior))
    np.testing.assert_allclose(pointwise, log_normal(Y, dense.mean, dense.variance + NOISE), atol=1e-7)


def test_collapsed_draws_data_from_the_exact_gp(float64):
    draws = compiled(lambda: collapsed().sample(jax.random.key(0), (6000,)))()
    cov = models.rbf(X, X) + NOISE * np.eye(8)
    assert worst_z_of_moments(draws, 0.0, cov) < Z_LIMIT


# ---------------------------------------------------------------------------------------------------------------
# The three agree


@pytest.mark.parametrize("structure", ["solve"])
def test_statements_agree_on_posterior_and_elbo(structure, float64):
    """One q(ε) at the optimum: the same posterior whichever statement the model has."""
    conditioned = compiled(lambda: collapsed(structure).condition(Y))()
    params = params_of(conditioned, structure)
    gp = sparse_gp(structure)

    def observing(X, y=None):
        npgp.observe("y", gp.draw()(X), npgp.Gaussian(variance=NOISE), obs=y, conditional="prior")

    def sampling(X, y=None):
        numpyro.sample("y", dist.Normal(npgp.sample("f", gp.draw()(X)), NOISE**0.5), obs=y)

    def predictions(params):
        made = [npgp.posterior("f", m, npgp.AutoSparseGP(m), params, X, Y) for m in (observing, sampling)]
        return [(p.mean(X_NEW), p.covariance(X_NEW), p.kl()) for p in [conditioned, *made]]

    expected, *others = compiled(predictions)(params)
    for other in others:
        for got, want in zip(other, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12)
    bound = float(compiled(collapsed(structure, "prior").log_prob)(Y))
    elbos = {"observe": make_elbo(observing), "sample": make_elbo(sampling)}
    values = over_keys(lambda *a: {n: e(*a) for n, e in elbos.items()}, 4000, params, X, Y)
    np.testing.assert_allclose(values["observe"], bound, rtol=1e-9)
    error = values["sample"].std() / 4000**0.5
    assert abs(values["sample"].mean() - bound) < Z_LIMIT * error < 0.1 * abs(bound)


@pytest.mark.parametrize("structure", ["solve"])
def test_training_by_svi_reaches_the_collapsed_bound(structure, float64):
    model = regression(structure)
    _, losses = train(model, npgp.AutoSparseGP(model), 1000, X, Y)
    bound = float(compiled(collapsed(structure).log_prob)(Y))
    assert -0.02 < -losses[-1] - bound < 1e-6
    assert -losses[0] < bound - 1.0
