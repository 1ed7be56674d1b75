"""
MCMC over hyperparameters with the collapsed bound, and over (ε, hyperparameters), against integrals on grids; and
predictions at new inputs from the prior, MCMC and SVI.
"""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import VARIANCE, Dense, X, Y, compiled, log_normal, rbf, train
from numpy.polynomial.hermite_e import hermegauss
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, Predictive, init_to_value
from numpyro.infer.util import initialize_model, potential_energy
from scipy import stats
from scipy.special import gammaln, logsumexp

import npgp

#: Of a z-score: tests with fixed seeds and up to a hundred of them.
Z_LIMIT = 4.5
Z = models.Z[[0, 2]]
BLOCKS = ([Z], ("dense",))
X_NEW = np.array([[-0.3], [1.2], [2.9]])
#: Mean and standard deviation of the logarithm.
LENGTHSCALE, NOISE = (np.log(0.7), 0.3), (np.log(0.2), 0.5)
COUNTS = np.floor(2.5 * np.exp(0.8 * Y))
LIKELIHOODS = {"poisson": (npgp.Poisson(), COUNTS), "bernoulli": (npgp.Bernoulli(), (Y > 0).astype(float))}


def latent_model(likelihood):
    """ε and a hyperparameter; the GP is observed row by row."""

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(*LENGTHSCALE))
        f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=VARIANCE), jnp.asarray(Z.copy()), jitter=1e-12).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), likelihood, obs=y)

    return model


def log_marginals(name, y, A, d, eps):
    """log ∫ p(y_n | f_n) N(f_n; A_nᵀε, d_n) df_n, in all: for each ε of a list (S, M)."""
    nodes, weights = hermegauss(40)
    f = (eps @ A)[:, :, None] + np.sqrt(d)[:, None] * nodes
    y = y[:, None]
    if name == "bernoulli":
        log_p = -np.logaddexp(0.0, -(2 * y - 1) * f)
    else:
        log_p = y * f - np.exp(f) - gammaln(y + 1)
    return logsumexp(log_p, b=weights / weights.sum(), axis=-1).sum(-1)


def log_density(name, y, log_lengthscale, eps):
    """Of the unconstrained values: log prior and log marginal, for each ε of a list."""
    dense = Dense(BLOCKS, X, lengthscale=np.exp(log_lengthscale))
    prior = log_normal(log_lengthscale, LENGTHSCALE[0], LENGTHSCALE[1] ** 2) + log_normal(eps, 0.0, 1.0).sum(-1)
    return prior + log_marginals(name, y, dense.A, np.diag(dense.D), eps)


def grid_of(mean_sd, points=33, reach=4.2):
    return mean_sd[0] + mean_sd[1] * np.linspace(-reach, reach, points)


def worst_z(chain, weights, values) -> float:
    """
    The largest z-score of a chain's means and variances.

    :param chain: draws (S, Q).
    :param weights: of the grid's points, not normalized, (G,).
    :param values: of the quantities there, (G, Q).
    """
    weights = weights / weights.sum()
    mean = weights @ values
    centerd, reference = chain - mean, values - mean
    z = []
    for draws, expected in ((centerd, np.zeros_like(mean)), (centerd**2, weights @ reference**2)):
        ess = effective_sample_size(draws[None])
        assert np.all(ess > 150)
        z.append(np.abs(draws.mean(0) - expected) / (draws.std(0) / np.sqrt(ess)))
    return float(np.max(z))


# ---------------------------------------------------------------------------------------------------------------
# Hyperparameters alone, with the collapsed bound


def collapsed(sample, X):
    kernel = npgp.RBF(sample["lengthscale"], variance=VARIANCE)
    return npgp.CollapsedGP(kernel, X, jnp.asarray(Z.copy()), noise_variance=sample["noise"], jitter=1e-12)


def test_nuts_over_hyperparameters_with_the_collapsed_bound(float64):
    def model(X, y):
        sample = {
            "lengthscale": numpyro.sample("lengthscale", dist.LogNormal(*LENGTHSCALE)),
            "noise": numpyro.sample("noise", dist.LogNormal(*NOISE)),
        }
        numpyro.sample("y", collapsed(sample, X), obs=y)

    def run(X, y):
        mcmc = MCMC(NUTS(model), num_warmup=150, num_samples=2000, progress_bar=False)
        mcmc.run(jax.random.key(0), X, y)
        samples = mcmc.get_samples()
        mean = jax.vmap(lambda sample: collapsed(sample, X).condition(y).mean(X_NEW))(samples)
        return samples, mean

    samples, predicted = compiled(run)(X, Y)
    chain = np.log(np.column_stack([samples["lengthscale"], samples["noise"]]))

    points, tight, prior, means = [], [], [], []
    for log_lengthscale in grid_of(LENGTHSCALE):
        dense = Dense(BLOCKS, X, lengthscale=np.exp(log_lengthscale))
        cross = rbf(X_NEW, Z, lengthscale=np.exp(log_lengthscale)) @ np.linalg.solve(
            rbf(Z, Z, lengthscale=np.exp(log_lengthscale)), rbf(Z, X, lengthscale=np.exp(log_lengthscale))
        )
        for log_noise in grid_of(NOISE):
            noise, d = np.exp(log_noise), np.diag(dense.D)
            covariance = dense.Q + noise * np.eye(len(X))
            weights = np.linalg.solve(covariance, Y)
            evidence = -0.5 * (Y @ weights + np.linalg.slogdet(2 * np.pi * covariance)[1])
            log_prior = log_normal(log_lengthscale, LENGTHSCALE[0], LENGTHSCALE[1] ** 2)
            log_prior += log_normal(log_noise, NOISE[0], NOISE[1] ** 2)
            points.append((log_lengthscale, log_noise))
            tight.append(log_prior + evidence - 0.5 * np.log1p(d / noise).sum())
            prior.append(log_prior + evidence - 0.5 * np.sum(d / noise))
            means.append(cross @ weights)
    points, density = np.array(points), np.exp(np.array(tight) - np.max(tight))
    assert worst_z(chain, density, points) < Z_LIMIT
    assert worst_z(np.asarray(predicted), density, np.array(means)) < Z_LIMIT
    # The classical bound's posterior would be told apart.
    assert worst_z(chain, np.exp(np.array(prior) - np.max(prior)), points) > 8


# ---------------------------------------------------------------------------------------------------------------
# ε and hyperparameters


@pytest.fixture(scope="module")
def fit():
    """The model of counts, its guide and parameters after a little SVI, and a chain that starts where SVI ended."""
    with jax.enable_x64(True):
        model = latent_model(LIKELIHOODS["poisson"][0])
        guide = npgp.AutoSparseGP(model, dependence="independent")
        params, _ = train(model, guide, 300, jnp.asarray(X), jnp.asarray(COUNTS))
        start = guide.median(params, jnp.asarray(X), jnp.asarray(COUNTS))

        def run(X, y):
            kernel = NUTS(model, init_strategy=init_to_value(values=start))
            mcmc = MCMC(kernel, num_warmup=150, num_samples=2000, progress_bar=False)
            mcmc.run(jax.random.key(0), X, y)
            return mcmc.get_samples()

        samples = jax.tree.map(np.asarray, compiled(run)(X, COUNTS))
    return model, guide, params, samples


def test_nuts_over_epsilon_and_hyperparameters(fit):
    samples = fit[-1]
    chain = np.column_stack([np.log(samples["lengthscale"]), samples["f.u"]])
    axis = np.linspace(-4.5, 4.5, 37)
    eps = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    points, density = [], []
    for log_lengthscale in grid_of(LENGTHSCALE, 25):
        points.append(np.column_stack([np.full(len(eps), log_lengthscale), eps]))
        density.append(log_density("poisson", COUNTS, log_lengthscale, eps))
    points, density = np.concatenate(points), np.concatenate(density)
    density = np.exp(density - density.max())
    assert worst_z(chain, density, points) < Z_LIMIT
    # Were the data counted twice, it would show.
    prior = log_normal(points[:, 0], LENGTHSCALE[0], LENGTHSCALE[1] ** 2) + log_normal(points[:, 1:], 0.0, 1.0).sum(-1)
    assert worst_z(chain, density**2 / np.exp(prior), points) > 8


def sites_of(program, X, y) -> dict[str, tuple[str, bool]]:
    """Kind of each site, and whether it is observed."""
    sites = {}

    def run():
        trace = handlers.trace(handlers.seed(program, jax.random.key(0))).get_trace(X, y)
        sites.update({name: (site["type"], site.get("is_observed", False)) for name, site in trace.items()})

    jax.eval_shape(run)
    return sites


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_model_alone_is_prior_and_marginal_likelihood(name, float64):
    """Nothing else is in the potential that NUTS follows, also where a guide of the model is about."""
    likelihood, y = LIKELIHOODS[name]
    model = latent_model(likelihood)
    sites = sites_of(npgp.AutoSparseGP(model), X, y)
    assert ("param", False) in sites.values()
    latent, observed = ("sample", False), ("sample", True)
    found = {"lengthscale": latent, "f.u": latent, "data": ("plate", False), "y": observed}
    assert sites_of(model, X, y) == found

    rng = np.random.default_rng(0)
    log_lengthscale, eps = rng.normal(-0.4, 0.4, 4), rng.normal(size=(4, 2))
    potential = jax.vmap(lambda unconstrained: potential_energy(model, (X, y), {}, unconstrained))
    values = compiled(potential)({"lengthscale": jnp.asarray(log_lengthscale), "f.u": jnp.asarray(eps)})
    expected = [-log_density(name, y, a, e[None])[0] for a, e in zip(log_lengthscale, eps, strict=True)]
    np.testing.assert_allclose(values, expected, rtol=1e-7)


def test_nuts_starts_where_svi_ended(fit, float64):
    model, guide, params, _ = fit
    strategy = init_to_value(values=guide.median(params, X, COUNTS))
    info = compiled(lambda key: initialize_model(key, model, init_strategy=strategy, model_args=(X, COUNTS)).param_info)
    start = info(jax.random.key(5)).z
    assert set(start) == {"lengthscale", "f.u"}  # nothing is left to chance
    np.testing.assert_allclose(start["lengthscale"], params["lengthscale_auto_loc"], rtol=1e-12)
    np.testing.assert_allclose(start["f.u"], params["f.u.loc"], rtol=1e-12)
    # A better place than the prior's center, to which a chain would start near otherwise.
    log_lengthscale = float(start["lengthscale"])
    there = log_density("poisson", COUNTS, log_lengthscale, np.asarray(start["f.u"])[None])[0]
    assert there > log_density("poisson", COUNTS, LENGTHSCALE[0], np.zeros((1, 2)))[0] + 3.0


def test_the_density_with_a_likelihood_of_three_latent_values(float64):
    """What NUTS follows where location, scale and tails are functions of x: rows with a residual and without."""
    X, y, K = np.array([[0.0], [0.8]]), np.array([1.5, -0.4]), np.array([1.0, np.exp(-0.32)])
    student = npgp.likelihoods.Factorized(lambda f, g, h: dist.StudentT(1.0 + jnp.exp(h), f, jnp.exp(g)), num_latents=3)

    def model(y):
        f, g, h = (npgp.SparseGP(name, npgp.RBF(1.0), np.zeros((1, 1)), jitter=1e-12).draw() for name in "fgh")
        with numpyro.plate("data", 2):
            npgp.observe("y", (f(X), g(X) - 1.0, h(X)), student, obs=y)

    eps = np.array([[1.0, -0.3, 0.5], [-0.5, 0.4, 1.2]])
    unconstrained = {f"{name}.u": jnp.asarray(eps[:, i : i + 1]) for i, name in enumerate("fgh")}
    got = compiled(jax.vmap(lambda point: potential_energy(model, (y,), {}, point)))(unconstrained)
    axes = [np.linspace(-8.0, 8.0, count) for count in (601, 33, 33)]
    z = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    w = np.exp(-0.5 * np.sum(z**2, axis=1))
    w /= w.sum()
    for point, energy in zip(eps, got, strict=True):
        right = np.sum(log_normal(point, 0.0, 1.0))
        for n in range(2):
            f, g, h = (K[n] * point + np.sqrt(1.0 - K[n] ** 2) * z).T
            right += np.log(stats.t.pdf(y[n], 1.0 + np.exp(h), f, np.exp(g - 1.0)) @ w)
        assert -energy == pytest.approx(right, abs=2e-4)  # the change that is allowed, squared, of each row


# ---------------------------------------------------------------------------------------------------------------
# Predictions at new inputs


@pytest.fixture(scope="module")
def predictions(fit):
    """One line each: from the prior, MCMC and SVI; f and y; with rows drawn one by one, and jointly."""
    model, guide, params, samples = fit
    joint = npgp.joint(model)
    count, sites = 4000, ["lengthscale", "f.u", "y.latent", "y"]

    def predict(key, X_new):
        return {
            ("prior", "marginal"): Predictive(model, num_samples=count)(key, X_new),
            ("prior", "joint"): Predictive(joint, num_samples=count)(key, X_new),
            ("mcmc", "marginal"): Predictive(model, samples)(key, X_new),
            ("mcmc", "joint"): Predictive(joint, samples)(key, X_new),
            ("svi", "marginal"): Predictive(
                model, guide=guide, params=params, num_samples=count, return_sites=sites
            )(key, X_new),
            ("svi", "joint"): Predictive(
                joint, guide=guide, params=params, num_samples=count, return_sites=sites
            )(key, X_new),
        }  # fmt: skip

    with jax.enable_x64(True):
        drawn = compiled(predict)(jax.random.key(1), jnp.asarray(X_NEW))
    drawn = jax.tree.map(np.asarray, drawn)
    for draws in (drawn["mcmc", "marginal"], drawn["mcmc", "joint"]):
        assert set(draws) == {"y", "y.latent"}
        draws |= samples
    return drawn


def moments_z(draws) -> float:
    """The largest z-score of means and covariances of what should be independent standard normals (S, N)."""
    return models.worst_z_of_moments(draws, np.zeros(draws.shape[1]), np.eye(draws.shape[1]))


def whiten(draws, joint: bool) -> np.ndarray:
    """f at the new inputs, standardized by its mean and covariance given ε and the lengthscale."""
    white = []
    for lengthscale, eps, f in zip(draws["lengthscale"], draws["f.u"], draws["y.latent"], strict=True):
        dense = Dense(BLOCKS, X_NEW, lengthscale=lengthscale)
        D = dense.D if joint else np.diag(np.diag(dense.D))
        white.append(np.linalg.solve(np.linalg.cholesky(D), f - eps @ dense.A))
    return np.array(white)


@pytest.mark.parametrize("how", ["marginal", "joint"])
@pytest.mark.parametrize("source", ["prior", "mcmc", "svi"])
def test_predictions_at_new_inputs(predictions, source, how):
    draws = predictions[source, how]
    f = draws["y.latent"]
    assert moments_z(whiten(draws, how == "joint")) < Z_LIMIT
    # The test sees which of the two it is.
    assert moments_z(whiten(draws, how != "joint")) > 8
    rate = np.exp(f)
    scores = (draws["y"] - rate) / np.sqrt(rate)
    assert np.all(draws["y"] == np.round(draws["y"]))
    assert np.abs(scores.mean(0) * np.sqrt(len(f))).max() < Z_LIMIT
    # Given f, rows are independent, and the variance of squared scores is 2 + 1/rate.
    spread = np.sqrt(np.mean(2 + 1 / rate, 0) / len(f))
    assert np.abs((np.mean(scores**2, 0) - 1) / spread).max() < Z_LIMIT


def test_predictions_use_the_guide_of_all_latent_values(fit, predictions):
    """Draws of ε and of the hyperparameter are those of q, and of the prior where there is none."""
    _, _, params, _ = fit
    factor = params["f.u.scale_tril"]
    for how in ("marginal", "joint"):
        draws = predictions["svi", how]
        assert moments_z(np.linalg.solve(factor, (draws["f.u"] - params["f.u.loc"]).T).T) < Z_LIMIT
        scaled = (np.log(draws["lengthscale"]) - params["lengthscale_auto_loc"]) / params["lengthscale_auto_scale"]
        assert moments_z(scaled[:, None]) < Z_LIMIT
        draws = predictions["prior", how]
        assert moments_z(draws["f.u"]) < Z_LIMIT
        assert moments_z((np.log(draws["lengthscale"])[:, None] - LENGTHSCALE[0]) / LENGTHSCALE[1]) < Z_LIMIT
