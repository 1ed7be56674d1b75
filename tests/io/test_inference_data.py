"""Draws as ArviZ's data: names, pointwise log likelihoods against dense algebra, and leave-one-out in closed form."""

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import NOISE, VARIANCE, Dense, X, Y, log_normal, rbf
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, init_to_value
from numpyro.infer.autoguide import AutoNormal
from scipy import stats

import npgp

OLD = int(az.__version__.split(".")[0]) < 1  # InferenceData, and other names of some functions
KEY = jax.random.key(0)
Z_LIMIT = 4.5
ROWS = len(X)


Z = np.array([[0.4], [2.1], [3.5]])


def gp():
    return npgp.SparseGP("f", models.kernel(), jnp.asarray(Z.copy()), jitter=1e-12)


def dense_gp():
    return Dense(([Z], ("dense",)), X)


def normals(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def groups_of(idata):
    return {name.strip("/") for name in (idata.groups() if OLD else idata.groups)} - {""}


# ---------------------------------------------------------------------------------------------------------------
# Leave-one-out. At fixed hyperparameters, with an inducing point at each row, the GP is exact.

X_LOO = np.linspace(0.0, 4.0, 12)[:, None]
LONG, NOISE_LOO = 4.0, 1.0
Y_LOO = np.sin(X_LOO[:, 0]) + np.sqrt(NOISE_LOO) * normals(12, seed=3)
DRAWS, BATCHES = 2000, 10


def exact_gp():
    return npgp.SparseGP("f", npgp.RBF(LONG, variance=VARIANCE), jnp.asarray(X_LOO.copy()), jitter=1e-12)


def collapsed_gp(lengthscale):
    inputs = jnp.asarray(X_LOO.copy())
    return npgp.CollapsedGP(
        npgp.RBF(lengthscale, variance=VARIANCE), inputs, inputs, noise_variance=NOISE_LOO, jitter=1e-12
    )


def observed(X, y=None):
    f = exact_gp().draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE_LOO), obs=y, conditional=npgp.conditionals.Grouped(4))


def collapsed(y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
    numpyro.sample("y", collapsed_gp(lengthscale), obs=y)


def draws_from_guide(y):
    params = exact_gp().params(collapsed_gp(LONG).condition(y).q)
    return npgp.AutoSparseGP(observed).sample_posterior(KEY, params, X_LOO, sample_shape=(DRAWS,))


@pytest.fixture(scope="module")
def exact():
    """The same posterior three ways: draws from q, from NUTS, and from a collapsed q(ε)."""
    with jax.enable_x64(True):
        start = init_to_value(values={"f.u": jnp.zeros(12)})
        mcmc = MCMC(
            NUTS(observed, init_strategy=start, step_size=0.3, adapt_step_size=False, adapt_mass_matrix=False),
            num_warmup=100,
            num_samples=DRAWS // 2,
            num_chains=2,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(KEY, X_LOO, Y_LOO, extra_fields=("diverging", "potential_energy", "num_steps"))
        guide = models.compiled(draws_from_guide)(Y_LOO)
        fixed = {"lengthscale": np.full((2, DRAWS // 2), LONG)}
        return {
            "svi": npgp.to_arviz(KEY, observed, guide, X_LOO, y=Y_LOO, posterior_predictive=False),
            "mcmc": npgp.to_arviz(KEY, observed, mcmc, X_LOO, Y_LOO, posterior_predictive=False),
            "collapsed": npgp.to_arviz(KEY, collapsed, fixed, Y_LOO, batch_ndims=2),
        }


def closed_form():
    """log p(y_n | all other y), Rasmussen & Williams (2006), equations 5.10 to 5.12."""
    inverse = np.linalg.inv(rbf(X_LOO, X_LOO, LONG) + NOISE_LOO * np.eye(12))
    variance = 1.0 / np.diag(inverse)
    return log_normal(Y_LOO, Y_LOO - variance * (inverse @ Y_LOO), variance)


def posterior_of_f():
    K = rbf(X_LOO, X_LOO, LONG)
    gain = np.linalg.solve(K + NOISE_LOO * np.eye(12), K).T
    return gain @ Y_LOO, np.diag(K - gain @ K)


@pytest.mark.parametrize("how", ["svi", "mcmc", "collapsed"])
def test_loo_is_that_of_the_exact_gp(exact, how):
    truth = closed_form()
    values = exact[how].log_likelihood["y"].values
    assert values.shape == ((1, DRAWS, 12) if how == "svi" else (2, DRAWS // 2, 12))
    loo = az.loo(exact[how], pointwise=True)
    estimate = loo.elpd_loo if OLD else loo.elpd
    # The Monte Carlo error, from batches of draws in a row and plain importance sampling.
    batches = -np.log(np.mean(np.exp(-values.reshape(BATCHES, -1, 12)), 1)).sum(1)
    error = batches.std(ddof=1) / np.sqrt(BATCHES)
    assert error < 0.12
    assert abs(estimate - truth.sum()) < Z_LIMIT * error
    np.testing.assert_allclose(loo.loo_i if OLD else loo.elpd_i, truth, atol=0.15)
    # The density of y under a posterior that has seen it is another thing.
    in_sample = log_normal(Y_LOO, posterior_of_f()[0], posterior_of_f()[1] + NOISE_LOO)
    assert in_sample.sum() > truth.sum() + 3 * Z_LIMIT * error


def test_a_collapsed_gp_is_completed_by_its_inducing_values(exact):
    mean, variance = posterior_of_f()
    total = variance + NOISE_LOO
    new = exact["collapsed"].posterior_predictive["y"].values.reshape(DRAWS, 12)
    assert np.all(abs(new.mean(0) - mean) < Z_LIMIT * np.sqrt(total / DRAWS))
    assert np.all(abs(new.var(0) / total - 1) < Z_LIMIT * np.sqrt(2 / DRAWS))
    # Averaged over ε the rows have the density under q.
    density = np.exp(exact["collapsed"].log_likelihood["y"].values.reshape(DRAWS, 12))
    under_q = np.exp(log_normal(Y_LOO, mean, total))
    assert np.all(abs(density.mean(0) - under_q) < Z_LIMIT * density.std(0) / np.sqrt(DRAWS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # between ArviZ, pandas and matplotlib
def test_compare_and_plots_work(exact):
    table = az.compare({how: exact[how] for how in ("svi", "collapsed")})
    assert set(table.index) == {"svi", "collapsed"}
    idata = exact["collapsed"]
    assert groups_of(idata) == {"posterior", "log_likelihood", "posterior_predictive", "observed_data"}
    np.testing.assert_array_equal(idata.observed_data["y"], Y_LOO)
    az.plot_ppc(idata, num_pp_samples=3) if OLD else az.plot_ppc_dist(idata, num_samples=3)
    idata = exact["mcmc"]
    assert groups_of(idata) == {"posterior", "sample_stats", "log_likelihood", "observed_data"}
    assert set(idata.sample_stats.data_vars) == {"diverging", "lp", "n_steps"}
    scores = -0.5 * np.sum(idata.posterior["f.u"].values ** 2 + np.log(2 * np.pi), -1)
    scores = scores + idata.log_likelihood["y"].values.sum(-1)
    np.testing.assert_allclose(idata.sample_stats["lp"], scores, rtol=1e-6)
    az.plot_trace(idata, var_names=["f.u"], coords={"f.u_inducing": [0]})
    plt.close("all")


# ---------------------------------------------------------------------------------------------------------------
# Values and names


def test_pointwise_values_are_the_datas_row_by_row(float64):
    def model(X, dose, y=None):
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        slope = numpyro.sample("slope", dist.Normal().expand([2]).to_event(1))
        f = handlers.scope(gp().draw, prefix="part")()
        with numpyro.plate("data", ROWS):
            effect = numpyro.deterministic("effect", dose @ slope)
            npgp.observe(
                "y", f(X) + effect, npgp.Gaussian(variance=noise), obs=y, conditional=npgp.conditionals.Grouped(4)
            )

    dose = normals(ROWS, 2)
    draws = {"noise": np.array([0.2, 0.4, 0.9]), "slope": normals(3, 2, seed=1), "part/f.u": normals(3, 3, seed=2)}
    draws["y.latent"] = np.zeros((3, ROWS))  # a guide that is run without y simulates it
    draws = {name: jnp.asarray(value) for name, value in draws.items()}
    labels = list("abcdefgh")
    x, d, y = (jnp.asarray(a.copy()) for a in (X, dose, Y))
    idata = npgp.to_arviz(KEY, model, draws, x, d, y, num_prior=5, coords={"data": labels}, dims={"slope": ["drug"]})
    assert idata.log_likelihood["y"].dims == ("chain", "draw", "data")
    assert idata.posterior["slope"].dims == ("chain", "draw", "drug")
    assert idata.posterior["part.f.u"].dims == ("chain", "draw", "part.f.u_inducing")
    assert idata.posterior["effect"].dims == idata.posterior["y.latent"].dims == ("chain", "draw", "data")
    for group in ("posterior", "log_likelihood", "posterior_predictive", "observed_data", "prior_predictive"):
        np.testing.assert_array_equal(idata[group]["data"], labels)
    assert set(idata.prior.data_vars) == {"noise", "slope", "part.f.u", "effect"}
    assert set(idata.posterior.data_vars) == {*idata.prior.data_vars, "y.latent"}
    for group in ("log_likelihood", "posterior_predictive", "observed_data", "prior_predictive"):
        assert set(idata[group].data_vars) == {"y"}
    assert idata.prior_predictive["y"].shape == (1, 5, ROWS)
    np.testing.assert_array_equal(idata.observed_data["y"], y)

    dense = dense_gp()
    noise, slope, u = (np.asarray(draws[name], float) for name in ("noise", "slope", "part/f.u"))
    mean = u @ dense.A + slope @ dose.T
    expected = log_normal(Y, mean, dense.residual + noise[:, None])
    np.testing.assert_allclose(idata.posterior["effect"][0], slope @ dose.T, rtol=1e-8)
    np.testing.assert_allclose(idata.log_likelihood["y"][0], expected, rtol=1e-8)


def test_masked_entries_are_no_observations(float64):
    y = np.stack([Y, -Y])
    present = np.ones((2, ROWS), bool)
    present[0, [1, 5]] = present[1, 2] = False
    y[~present] = np.nan
    seen = np.arange(ROWS) != 3

    def model(X, y, z):
        with numpyro.plate("outputs", 2, dim=-2):
            f = gp().draw()
            with numpyro.plate("data", ROWS, dim=-1):
                npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y, mask=present)
        with numpyro.plate("data", ROWS), handlers.mask(mask=jnp.asarray(seen)):
            numpyro.sample("z", dist.Normal(f.values[0][0, 0, 0], 1.0), obs=z)

    draws = {"f.u": normals(4, 2, 1, 3)}
    idata = npgp.to_arviz(KEY, model, draws, jnp.asarray(X.copy()), jnp.asarray(y), jnp.asarray(Y.copy()))
    assert idata.posterior["f.u"].dims == ("chain", "draw", "outputs", "f.u_inducing")
    np.testing.assert_array_equal(idata.posterior["f.u"][0], draws["f.u"][:, :, 0])
    for group in ("log_likelihood", "posterior_predictive", "observed_data"):
        entries = idata[group]["y"]
        assert entries.dims[-1] == "y_observed" and np.isfinite(entries.values).all()
        np.testing.assert_array_equal((entries["y_outputs"], entries["y_data"]), np.nonzero(present))
        np.testing.assert_array_equal(idata[group]["z"]["z_data"], np.nonzero(seen)[0])
    np.testing.assert_array_equal(idata.observed_data["y"], y[present])
    dense = dense_gp()
    expected = log_normal(y, draws["f.u"][:, :, 0] @ dense.A, dense.residual + NOISE)
    np.testing.assert_allclose(idata.log_likelihood["y"][0], expected[:, present], rtol=1e-8)
    expected = log_normal(Y, draws["f.u"][:, :1, 0, 0], 1.0)
    np.testing.assert_allclose(idata.log_likelihood["z"][0], expected[:, seen], rtol=1e-8)


def test_sampled_values_and_factors_in_float32():
    def model(X, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        f = gp().draw()
        numpyro.factor("penalty", -scale)
        with numpyro.plate("data", ROWS):
            value = npgp.sample("fx", f(X), joint=False)
            drawn = npgp.sample("gx", f(X), joint=False)
            numpyro.sample("y", dist.StudentT(4.0, value + drawn, scale), obs=y)

    scale, u, z = np.exp(0.2 * normals(500)), normals(500, 3, seed=1), normals(500, ROWS, seed=2)
    gx = normals(500, ROWS, seed=3)  # where a guide says the values too, these count
    draws = {"scale": scale, "f.u": u, "fx.residual": z, "gx.residual": z, "gx": gx}
    how = npgp.training.Convergence(True, 500, ((0.05, 500),), {"f.u": 0.05}, {"f.u": 0.02})
    idata = npgp.to_arviz(KEY, model, draws, jnp.asarray(X.copy()), jnp.asarray(Y.copy()), convergence=how)
    attributes = idata.posterior.attrs
    assert (attributes["arrived"], attributes["training_steps"]) == (1, 500)
    assert attributes["convergence"] == str(how)
    dense = dense_gp()
    fx = u @ dense.A + np.sqrt(dense.residual) * z  # at the posterior's residual, not a fresh one
    np.testing.assert_allclose(idata.posterior["fx"][0], fx, atol=2e-4)
    assert idata.posterior["fx"].dims == idata.posterior["fx.residual"].dims == ("chain", "draw", "data")
    assert set(idata.log_likelihood.data_vars) == set(idata.posterior_predictive.data_vars) == {"y"}
    np.testing.assert_array_equal(idata.posterior["gx"][0], gx)
    expected = stats.t(4.0, fx + gx, scale[:, None]).logpdf(Y)
    np.testing.assert_allclose(idata.log_likelihood["y"][0], expected, atol=1e-3)
    errors = (idata.posterior_predictive["y"].values[0] - fx - gx) / scale[:, None]
    assert stats.kstest(errors.ravel(), stats.t(4.0).cdf).pvalue > 1e-3


def test_several_outputs_of_a_collapsed_gp():
    y = np.stack([Y, -Y, 2 * Y])

    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal())
        with numpyro.plate("outputs", 3):
            gp = npgp.CollapsedGP(npgp.RBF(1.0, variance=variance), X, X[:3], noise_variance=NOISE)
            numpyro.sample("y", gp, obs=y, infer={"event_dims": ["rows"]})

    draws = {"variance": np.ones((2, 2))}
    arguments = jnp.asarray(X.copy()), jnp.asarray(y)
    idata = npgp.to_arviz(KEY, model, draws, *arguments, batch_ndims=2, posterior_predictive=False, num_prior=500)
    assert idata.log_likelihood["y"].dims == ("chain", "draw", "outputs", "rows")
    assert np.unique(idata.log_likelihood["y"]).size == 2 * 2 * 3 * ROWS  # each with ε of its own
    # Before the data there is no ε to take from a posterior.
    new, variance = idata.prior_predictive["y"].values[0], idata.prior["variance"].values[0] + NOISE
    scores = np.mean(new**2 / variance[:, None, None], 0) - 1
    assert np.all(abs(scores) < Z_LIMIT * np.sqrt(2 / 500))
    assert idata.observed_data["y"].dims == ("outputs", "rows")


# ---------------------------------------------------------------------------------------------------------------
# Errors


def simple(X, y=None, size=ROWS):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    lengthscale = numpyro.param("lengthscale", 1.0)
    f = npgp.SparseGP("f", npgp.RBF(lengthscale), jnp.asarray(Z.copy())).draw()
    with npgp.plate("data", size, rows=X.shape[0]):
        npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)


GOOD = {"noise": np.ones(4), "f.u": np.zeros((4, 3))}
PARAMS = {"lengthscale": jnp.ones(())}


@pytest.mark.parametrize(
    "draws, options, message",
    [
        (GOOD, dict(params=None), "params has no 'lengthscale'.*params=svi.get_params"),
        (GOOD, dict(size=100), "plate 'data' has 8 of its 100 rows: to_arviz needs the model with all rows"),
        (GOOD, dict(y=None), "no observed site with these arguments"),
        ({"noise": np.ones(4)}, {}, "no draws of 'f.u', a latent site"),
        (GOOD | {"y": np.zeros((4, ROWS))}, {}, "draws of 'y', which the model observes"),
        (GOOD | {"noise": np.ones(3)}, {}, "leading axes must be the same"),
        ({"noise": np.ones(())}, {}, "leading axes must be the same"),
        ({}, {}, "leading axes must be the same"),
        (GOOD, dict(batch_ndims=3), "batch_ndims is 3"),
    ],
)
def test_errors_say_what_is_missing(draws, options, message):
    options = dict(params=PARAMS, y=jnp.asarray(Y.copy())) | options
    with pytest.raises(ValueError, match=message):
        npgp.to_arviz(KEY, simple, draws, jnp.asarray(X.copy()), **options)


def test_names_and_labels_that_do_not_fit():
    arguments = (KEY, simple, GOOD, jnp.asarray(X.copy()), jnp.asarray(Y.copy()))
    options = dict(params=PARAMS, posterior_predictive=False)
    with pytest.raises(ValueError, match=r"dims names \['a', 'b'\] for 'f.u', which has 1"):
        npgp.to_arviz(*arguments, **options, dims={"f.u": ["a", "b"]})
    with pytest.raises(ValueError, match=r"labels of shape \(3,\) for 'data', which has 8 entries"):
        npgp.to_arviz(*arguments, **options, coords={"data": [1, 2, 3]})
    with pytest.raises(TypeError, match="samples is a list"):
        npgp.to_arviz(KEY, simple, [1.0], X, Y)


def test_names_with_a_stroke_and_the_sampler_s_log_density():
    """Groups take a stroke for a path; and NumPyro keeps energies, of which the density has the other sign."""

    class Done(MCMC):
        def __init__(self):
            pass

        def get_samples(self, group_by_chain=False):
            return {"group/level": np.zeros((1, 3))}

        def get_extra_fields(self, group_by_chain=False):
            return {"potential_energy": np.array([[1.0, 2.0, -3.0]])}

    def model():
        numpyro.sample("group/level", dist.Normal())
        numpyro.sample("y", dist.Normal(), obs=0.5)

    found = npgp.to_arviz(KEY, model, Done(), posterior_predictive=False)
    assert list(found.posterior.data_vars) == ["group.level"]
    np.testing.assert_array_equal(found.sample_stats["lp"], [[-1.0, -2.0, 3.0]])


# ---------------------------------------------------------------------------------------------------------------
# Values of functions, jointly with the other sites

PLACES = np.array([[0.5], [1.7], [6.0]])


def level_beside(X, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    f = exact_gp().draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X) + level, npgp.Gaussian(variance=NOISE_LOO), obs=y)


def level_collapsed(X, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    inputs = jnp.asarray(X_LOO.copy())
    gp = npgp.CollapsedGP(
        npgp.RBF(LONG, variance=VARIANCE), inputs, inputs, noise_variance=NOISE_LOO, offset=level, jitter=1e-12
    )
    numpyro.sample("y", gp, obs=y)


def joint_of_level_and_f():
    """Mean and covariance of (level, f at the places) given y, by dense algebra over function values."""
    at = np.concatenate([X_LOO, PLACES])
    K = rbf(at, at, LONG)
    prior = np.block([[np.full((1, 1), 9.0), np.zeros((1, 15))], [np.zeros((15, 1)), K]])
    design = np.concatenate([np.ones((12, 1)), np.eye(15)[:12]], axis=1)
    gain = np.linalg.solve(design @ prior @ design.T + NOISE_LOO * np.eye(12), design @ prior).T
    mean, covariance = gain @ Y_LOO, prior - gain @ design @ prior
    keep = [0, 13, 14, 15]
    return mean[keep], covariance[np.ix_(keep, keep)]


def level_and_values(idata, site):
    values = idata.posterior[f"{site}.values"]
    assert values.shape[2:] == (3,)
    return np.column_stack([np.ravel(idata.posterior["level"].values), values.values.reshape(-1, 3)])


def test_values_of_a_coupled_guides_function_belong_to_its_level(float64):
    """The exact joint posterior, in which q(ε) follows the level."""
    mean, covariance = joint_of_level_and_f()
    prior = {"f.u.loc": jnp.zeros(12), "f.u.scale_tril": jnp.eye(12)}
    L = np.asarray(exact_gp().posterior(prior).projector.factors[0])  # with the jitter that it took
    design = np.column_stack([L, np.ones(12)])
    precision = np.diag([*np.ones(12), 1 / 9.0]) + design.T @ design / NOISE_LOO
    center = np.linalg.solve(precision, design.T @ Y_LOO / NOISE_LOO)
    given_level = np.linalg.inv(precision[:-1, :-1])
    deviation = covariance[0, 0] ** 0.5
    params = {
        "f.u.loc": center[:-1],
        "f.u.scale_tril": np.linalg.cholesky(given_level),
        "f.u.coupling": -given_level @ precision[:-1, -1:] * deviation,
        "level_auto_loc": mean[0],
        "level_auto_scale": deviation,
    }
    params = jax.tree.map(jnp.asarray, params)
    guide = npgp.AutoSparseGP(level_beside, AutoNormal, dependence="coupled")
    draws = guide.sample_posterior(KEY, params, X_LOO, Y_LOO, sample_shape=(4000,))
    given = {"functions": {"f": PLACES}, "log_likelihood": False, "posterior_predictive": False}
    idata = npgp.to_arviz(KEY, level_beside, draws, X_LOO, Y_LOO, params=params, dims={"f.values": ["place"]}, **given)
    assert idata.posterior["f.values"].dims == ("chain", "draw", "place")
    assert models.worst_z_of_moments(level_and_values(idata, "f"), mean, covariance) < Z_LIMIT


def test_values_of_a_collapsed_function_belong_to_the_draw(float64):
    """Draws of the level from its exact posterior; f without the offset, and other groups as they are without it."""
    mean, covariance = joint_of_level_and_f()
    level = mean[0] + covariance[0, 0] ** 0.5 * normals(4000, seed=5)
    idata = npgp.to_arviz(KEY, level_collapsed, {"level": level}, X_LOO, Y_LOO, functions={"y": PLACES})
    assert models.worst_z_of_moments(level_and_values(idata, "y"), mean, covariance) < Z_LIMIT
    assert {"posterior", "log_likelihood", "posterior_predictive", "observed_data"} <= groups_of(idata)
    with pytest.raises(KeyError, match=r"no component named 'f'; it has \['y'\]"):
        npgp.to_arviz(KEY, level_collapsed, {"level": level[:3]}, X_LOO, Y_LOO, functions={"f": PLACES})
    with pytest.raises(ValueError, match=r"functions\['y'\]"):
        npgp.to_arviz(KEY, level_collapsed, {"level": level[:3]}, X_LOO, Y_LOO, functions={"y": PLACES[:, 0]})
