"""The automatic guide, composition of GPs in models, minibatches and missing entries."""

import itertools
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from models import (
    LENGTHSCALE,
    NOISE,
    RESIDUAL_SCALE,
    VARIANCE,
    X_NEW,
    Dense,
    X,
    Y,
    Z,
    compiled,
    elbo_value,
    kernel,
    keys,
    log_normal,
    make_elbo,
    over_keys,
    params_of,
    random_params,
    regression,
    sparse_gp,
    traces,
)
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import (
    AutoLowRankMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.util import log_density
from scipy.linalg import block_diag

import npgp

Z_LIMIT = 4.5
positive = dist.constraints.positive


def latent_sites(trace):
    return [n for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]]


def initialize(model, guide, *args, **kwargs):
    """What an SVI run starts from; autoguides find their sites here."""
    return compiled(lambda *args: start(model, guide, *args, **kwargs))(*args)


def start(model, guide, *args, **kwargs):
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    return svi.get_params(svi.init(jax.random.key(0), *args, **kwargs))


def sampled_hyperparameters(X, y=None, statement="observe"):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = sparse_gp(k=npgp.RBF(lengthscale, variance=VARIANCE), jitter=1e-12).draw()
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", X.shape[0]):
        if statement == "observe":
            npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)
        else:
            value = npgp.sample("value", f(X), joint=False)
            numpyro.deterministic("twice", 2 * value)
            numpyro.sample("y", dist.Normal(value, noise**0.5), obs=y)


# ---------------------------------------------------------------------------------------------------------------
# The same as a guide written by hand


@pytest.mark.parametrize("structure", ["svgp", "mean-field", "odvgp"])
def test_same_elbo_as_a_guide_written_by_hand_for_observe(structure, float64):
    def by_hand(X, y):
        sparse_gp(structure, k=npgp.RBF(123.0)).guide()  # the kernel is not looked at

    params, model = random_params(structure), regression(structure)
    values = compiled(
        lambda p: [make_elbo(model, g)(jax.random.key(0), p, X, Y) for g in (by_hand, npgp.AutoSparseGP(model))]
    )(params)
    np.testing.assert_allclose(*values, rtol=1e-12)
    np.testing.assert_allclose(values[0], Dense(structure, X, params).elbo(Y), rtol=1e-8)


@pytest.mark.parametrize("loss", [TraceMeanField_ELBO, Trace_ELBO])
@pytest.mark.parametrize("joint", [True, False])
def test_same_elbo_as_a_guide_written_by_hand_for_sample(joint, loss, float64):
    """With the same noise the two guides agree draw by draw."""

    def statement(f, X):
        return npgp.sample("value", f(X), joint=joint, conditional="shared")

    def model(X, y):
        numpyro.sample("y", dist.Normal(statement(sparse_gp("odvgp").draw(), X), NOISE**0.5), obs=y)

    def by_hand(X, y):
        statement(sparse_gp("odvgp").guide(), X)

    params = random_params("odvgp") | {"value.residual_scale": jnp.asarray(RESIDUAL_SCALE)}
    rng = np.random.default_rng(0)
    noise = {"f.u": rng.normal(size=3), "f.v": rng.normal(size=2), "value.residual": rng.normal(size=8)}

    def value(guide):
        fixed = handlers.substitute(guide, jax.tree.map(jnp.asarray, noise))
        return make_elbo(model, fixed, loss())(jax.random.key(0), params, jnp.asarray(X), Y)

    values = compiled(lambda: [value(guide) for guide in (by_hand, npgp.AutoSparseGP(model))])()
    np.testing.assert_allclose(*values, rtol=1e-10)


def test_parameters_are_declared_as_by_hand(float64):
    guide = npgp.AutoSparseGP(regression("odvgp", "shared"))
    half = npgp.SparseGP("f", kernel(), Z, "diagonal", init_scale=0.5)

    @compiled
    def declared():
        runs = (lambda: guide(X, Y)), half.guide
        found = [handlers.trace(handlers.seed(run, jax.random.key(0))).get_trace() for run in runs]
        return [{n: s["value"] for n, s in trace.items() if s["type"] == "param"} for trace in found]

    params, diagonal = declared()
    shapes = {"f.u.loc": (3,), "f.u.scale_tril": (3, 3), "f.v.loc": (2,), "y.residual_scale": ()}
    assert {n: np.shape(v) for n, v in params.items()} == shapes
    np.testing.assert_array_equal(params["f.u.scale_tril"], 0.1 * np.eye(3))
    np.testing.assert_array_equal(params["f.u.loc"], 0.0)
    np.testing.assert_array_equal(diagonal["f.u.scale"], np.full(3, 0.5))


# ---------------------------------------------------------------------------------------------------------------
# Other latent sites


@pytest.mark.parametrize("rest", [AutoLowRankMultivariateNormal])
def test_other_sites_have_the_guide_asked_for(rest, float64):
    """At the hyperparameters that the guide drew, the ELBO is theirs plus the GP's."""
    model = sampled_hyperparameters
    guide = npgp.AutoSparseGP(model, guide=rest, dependence="independent")
    params = initialize(model, guide, jnp.asarray(X), jnp.asarray(Y))
    assert {"f.u.loc", "f.u.scale_tril"} < set(params)
    params |= random_params()

    @compiled
    def run(params):
        guide_trace, model_trace = traces(model, guide, params, jnp.asarray(X), Y)
        drawn = {n: guide_trace[n]["value"] for n in ("lengthscale", "noise")}
        assert latent_sites(model_trace) == ["lengthscale", "f.u", "noise"]
        assert [n for n in latent_sites(guide_trace) if n in model_trace] == latent_sites(model_trace)
        rows = model_trace["y"]["fn"].log_prob(Y)
        losses = [make_elbo(model, guide, loss())(jax.random.key(1), params, X, Y) for loss in (Trace_ELBO,)]
        return drawn, rows, jax.value_and_grad(make_elbo(model, guide), 1)(jax.random.key(1), params, X, Y), losses

    drawn, rows, (value, gradient), losses = run(params)
    dense = Dense("svgp", X, params, lengthscale=float(drawn["lengthscale"]))
    np.testing.assert_allclose(rows, dense.rows(Y, noise=float(drawn["noise"])), rtol=1e-7)
    assert np.isfinite(value) and np.isfinite(losses[0])
    for name, leaf in gradient.items():
        assert np.all(np.isfinite(leaf)) and np.any(leaf != 0), name


def test_the_rest_may_be_written_by_hand(float64):
    model = sampled_hyperparameters

    def rest(X, y=None):
        numpyro.sample("lengthscale", dist.Delta(numpyro.param("lengthscale.value", 0.1)))
        numpyro.sample("noise", dist.Delta(NOISE))

    guide = npgp.AutoSparseGP(model, guide=rest, dependence="independent")
    params = random_params() | {"lengthscale.value": jnp.asarray(LENGTHSCALE)}
    elbo = make_elbo(model, guide)
    value, gradient = compiled(jax.value_and_grad(elbo, 1))(jax.random.key(0), params, X, Y)
    priors = log_normal(np.log(LENGTHSCALE), 0.0, 1.0) - np.log(LENGTHSCALE) + log_normal(NOISE, 0.0, 1.0) + np.log(2)
    np.testing.assert_allclose(value, Dense("svgp", X, params).elbo(Y) + priors, rtol=1e-8)
    assert gradient["lengthscale.value"] != 0
    with pytest.raises(NotImplementedError, match="hand-written"):
        guide.median(params)


def test_density_of_the_guide_at_given_values(float64):
    """Substituting values in the guide, as importance weighting does, gives their density under q."""
    guide = npgp.AutoSparseGP(sampled_hyperparameters, dependence="independent")
    params = initialize(sampled_hyperparameters, guide, jnp.asarray(X), jnp.asarray(Y))
    params |= random_params()
    values = {"f.u": jnp.array([0.5, -1.0, 0.2]), "lengthscale": jnp.asarray(0.8), "noise": jnp.asarray(0.3)}
    seeded = handlers.seed(guide, jax.random.key(0))
    density = compiled(lambda: log_density(seeded, (jnp.asarray(X), Y), {}, params | values)[0])()
    expected = 0.0
    for name in ("lengthscale", "noise"):  # log-normal, both
        loc, scale = params[f"{name}_auto_loc"], params[f"{name}_auto_scale"]
        expected += log_normal(np.log(values[name]), loc, scale**2) - np.log(values[name])
    factor = np.asarray(params["f.u.scale_tril"])
    z = np.linalg.solve(factor, values["f.u"] - params["f.u.loc"])
    expected += log_normal(z, 0.0, 1.0).sum() - np.log(np.diag(factor)).sum()
    np.testing.assert_allclose(density, expected, rtol=1e-8)


@pytest.mark.parametrize("statement", ["observe"])
def test_param_hyperparameters_are_the_current_ones(statement, float64):
    """Neither the guide nor the model may use the value that ``numpyro.param`` starts with."""

    def model(X, y):
        lengthscale = numpyro.param("lengthscale", 5.0, constraint=positive)
        inducing = numpyro.param("inducing", jnp.asarray(Z) + 9.0)
        f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=VARIANCE), inducing, jitter=1e-12).draw()
        if statement == "observe":
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y, conditional="prior")
        else:
            value = npgp.sample("value", f(X), joint=False)
            numpyro.sample("y", dist.Normal(value, NOISE**0.5), obs=y)

    params = random_params() | {"lengthscale": jnp.asarray(LENGTHSCALE), "inducing": jnp.asarray(Z)}
    elbo = make_elbo(model)

    @compiled
    def run(params):
        def mean_elbo(params):
            count = 1 if statement == "observe" else 4000
            values = jax.vmap(lambda key: elbo(key, params, jnp.asarray(X), Y))(keys(count))
            return jnp.mean(values), jnp.std(values)

        return jax.value_and_grad(mean_elbo, has_aux=True)(params)

    (value, std), gradient = run(params)
    expected = Dense("svgp", X, params).elbo(Y, "prior")
    if statement == "observe":
        np.testing.assert_allclose(value, expected, rtol=1e-8)
    else:
        assert abs(value - expected) < Z_LIMIT * std / 4000**0.5 < 0.6
    for name in ("lengthscale", "inducing"):
        step = 1e-5
        for index in np.ndindex(np.shape(params[name])):
            shifted = [np.array(params[name]) for _ in range(2)]
            shifted[0][index] += step
            shifted[1][index] -= step
            ends = [run(params | {name: jnp.asarray(end)})[0][0] for end in shifted]
            np.testing.assert_allclose(gradient[name][index], (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-5)


def test_sites_come_in_the_models_order(float64):
    """NumPyro warns otherwise, which is an error here; local latents and scopes included."""

    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with handlers.scope(prefix="s"):
            f = sparse_gp("odvgp").draw()
        b = numpyro.sample("b", dist.LogNormal(0.0, 1.0))
        g = sparse_gp(name="g", k=npgp.RBF(b)).draw()
        with numpyro.plate("data", X.shape[0]):
            value = npgp.sample("value", f(X))
            c = numpyro.sample("c", dist.Normal(value, 1.0))
            npgp.observe("y", g(X) + a + c, npgp.Gaussian(variance=NOISE), obs=y)

    guide = npgp.AutoSparseGP(model, dependence="independent")
    params = initialize(model, guide, jnp.asarray(X), jnp.asarray(Y))
    names = {}

    @compiled
    def run(params):
        names["guide"], names["model"] = map(latent_sites, traces(model, guide, params, jnp.asarray(X), Y))
        return make_elbo(model, guide)(jax.random.key(0), params, jnp.asarray(X), Y)

    assert np.isfinite(run(params))
    assert names["guide"] == names["model"]
    assert names["model"] == ["a", "s/f.u", "s/f.v", "b", "g.u", "value.residual", "c"]


# ---------------------------------------------------------------------------------------------------------------
# Composition


def test_two_gps_in_a_sum(float64):
    def model(X, y):
        f, g = sparse_gp("odvgp", jitter=1e-12).draw(), sparse_gp(name="g", jitter=1e-12).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X) + 0.5 * g(2.0 * X), npgp.Gaussian(variance=NOISE), obs=y)

    params = random_params("odvgp") | random_params("svgp", 1, "g")
    f, g = Dense("odvgp", X, params), Dense("svgp", 2.0 * X, params, "g")
    explained, residual = f.explained + 0.25 * g.explained, f.residual + 0.25 * g.residual
    rows = log_normal(Y, f.mean + 0.5 * g.mean, NOISE) - 0.5 * explained / NOISE - 0.5 * np.log1p(residual / NOISE)
    value = elbo_value(model, params, X, Y, guide=npgp.AutoSparseGP(model, joint=False))
    np.testing.assert_allclose(value, rows.sum() - f.kl - g.kl, rtol=1e-8)


def test_two_observations_of_one_draw(float64):
    """One q(ε), hence one KL, and the rows of both."""

    def model(X, X2, y, counts):
        f = sparse_gp(jitter=1e-12).draw()
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)
        npgp.observe("counts", f(X2), npgp.Poisson(), obs=counts, conditional="prior")

    params, counts = random_params(), np.arange(5.0)
    one, two = Dense("svgp", X, params), Dense("svgp", X_NEW[:5], params)
    factorials = np.log([1, 1, 2, 6, 24])
    poisson = counts * two.mean - np.exp(two.mean + two.variance / 2) - factorials
    value = elbo_value(model, params, X, X_NEW[:5], Y, counts)
    np.testing.assert_allclose(value, one.elbo(Y) + poisson.sum(), rtol=1e-8)


def test_a_gp_of_a_gps_output(float64):
    """A deep GP: given the inner values that the guide drew, the rest is the outer GP's ELBO."""

    def model(X, y):
        f, g = sparse_gp("odvgp", jitter=1e-12).draw(), sparse_gp(name="g", jitter=1e-12).draw()
        with numpyro.plate("data", X.shape[0]):
            inner = npgp.sample("inner", f(X))
            npgp.observe("y", g(inner[:, None] + 2.0), npgp.Gaussian(variance=NOISE), obs=y)

    guide = npgp.AutoSparseGP(model)
    params = random_params("odvgp") | random_params("svgp", 1, "g")

    @compiled
    def run(params):
        _, trace = traces(model, guide, params, jnp.asarray(X), Y)
        gradient = jax.grad(make_elbo(model, guide), 1)(jax.random.key(0), params, jnp.asarray(X), Y)
        return trace["inner"]["value"], trace["y"]["fn"].log_prob(Y), gradient

    inner, rows, gradient = run(params)
    assert np.std(inner) > 0.1
    dense = Dense("svgp", np.asarray(inner)[:, None] + 2.0, params, "g")
    np.testing.assert_allclose(rows, dense.rows(Y), rtol=1e-7)
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf != 0) for leaf in gradient.values())


def test_a_gp_of_states_from_a_scan(float64):
    """The guide evaluates f at the states it has drawn, not at others."""

    def model(y=None):
        f = sparse_gp(jitter=1e-12).draw()

        def step(state, _):
            state = numpyro.sample("state", dist.Normal(state, 0.5))
            return state, state

        _, states = scan(step, 0.0, jnp.arange(8))
        value = npgp.sample("value", f(states[:, None]), joint=False)
        numpyro.sample("y", dist.Normal(value, NOISE**0.5), obs=y)

    guide = npgp.AutoSparseGP(model, dependence="independent")
    params = initialize(model, guide, jnp.asarray(Y))
    params |= random_params() | {"state_auto_loc": jnp.linspace(0.0, 4.0, 8), "state_auto_scale": jnp.full(8, 1e-9)}

    @compiled
    def run(params):
        return traces(model, guide, params, Y, values={"value.residual": jnp.zeros(8)})[1]["value"]["value"]

    dense = Dense("svgp", np.linspace(0.0, 4.0, 8)[:, None], params)
    np.testing.assert_allclose(run(params), dense.mean, atol=1e-6)


def test_a_gp_as_the_transition_of_a_scan(float64):
    """f is drawn outside the scan, and first evaluated inside."""

    def model(y):
        f = sparse_gp(jitter=1e-12).draw()

        def step(state, y):
            mean = npgp.sample("mean", f(state[None, None]), joint=False)
            state = numpyro.sample("state", dist.Normal(mean[0], 0.3))
            numpyro.sample("y", dist.Normal(state, NOISE**0.5), obs=y)
            return state, state

        scan(step, jnp.asarray(0.5), y)

    guide = npgp.AutoSparseGP(model, dependence="independent")
    params = initialize(model, guide, jnp.asarray(Y))
    value, gradient = compiled(jax.value_and_grad(make_elbo(model, guide), 1))(
        jax.random.key(0), params, jnp.asarray(Y)
    )
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(leaf)) for leaf in gradient.values())
    assert np.any(gradient["f.u.loc"] != 0)


def test_names_are_stable_under_scopes(float64):
    """The same component twice in nested scopes; parameters, posterior and ELBO by the scoped names."""
    gp = sparse_gp(jitter=1e-12)

    def model(X, y):
        with handlers.scope(prefix="a"):
            f = gp.draw()
            with handlers.scope(prefix="b"):
                g = gp.draw()
        npgp.observe("y", f(X) - g(X), npgp.Gaussian(variance=NOISE), obs=y, conditional="shared")

    first, second = random_params(seed=0), random_params(seed=1)
    params = {f"a/{n}": v for n, v in first.items()} | {f"a/b/{n}": v for n, v in second.items()}
    params["y.residual_scale"] = jnp.asarray(RESIDUAL_SCALE)
    f, g = Dense("svgp", X, first), Dense("svgp", X, second)
    explained, m = f.explained + g.explained, RESIDUAL_SCALE
    rows = log_normal(Y, f.mean - g.mean, NOISE) - 0.5 * (explained + m * (f.residual + g.residual)) / NOISE
    expected = rows.sum() - 4 * (m - 1 - np.log(m)) - f.kl - g.kl
    guide = npgp.AutoSparseGP(model, joint=False)
    np.testing.assert_allclose(elbo_value(model, params, X, Y, guide=guide), expected, rtol=1e-8)

    @compiled
    def means(params):
        of_model = [npgp.posterior(name, model, guide, params, X, Y) for name in ("a/f", "a/b/f")]
        of_gp = [gp.posterior(params, prefix=prefix) for prefix in ("a/", "a/b/")]
        return [posterior.mean(X) for posterior in of_model + of_gp]

    for got, want in zip(means(params), (f.mean, g.mean) * 2, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-7)
    with pytest.raises(KeyError, match=r"no component named 'f'.*a/b/f"):
        npgp.posterior("f", model, guide, params, X, Y)


def outputs_params(structure="odvgp", count=3):
    """Parameters of a batch of functions, and of each by itself."""
    single = [random_params(structure, seed) for seed in range(count)]
    batch = {n: jnp.stack([p[n] for p in single])[:, None] for n in single[0]}
    return batch, single


OUTPUTS = np.stack([Y, np.cos(X[:, 0]), -Y])


@pytest.mark.parametrize("statement", ["sample"])
def test_outputs_in_a_plate_are_separate_functions(statement, float64):
    """One ε for each output at dim −2; what they share is kernel and inducing features."""
    shapes = {}

    def model(X, y=None):
        outputs = numpyro.plate("outputs", 3, dim=-2)
        with outputs:
            f = sparse_gp("odvgp", jitter=1e-12).draw()
        with outputs, numpyro.plate("data", X.shape[0]):
            if statement == "observe":
                npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)
            else:
                value = npgp.sample("value", f(X), conditional="shared")
                shapes["value"] = value.shape
                numpyro.sample("y", dist.Normal(value, NOISE**0.5), obs=y)

    batch, single = outputs_params()
    guide = npgp.AutoSparseGP(model, dependence="independent")
    declared = jax.eval_shape(lambda: start(model, guide, jnp.asarray(X), OUTPUTS))
    assert {n: v.shape for n, v in declared.items() if n in batch} == {n: v.shape for n, v in batch.items()}
    dense = [Dense("odvgp", X, params) for params in single]
    conditional = "tight" if statement == "observe" else "shared"
    expected = sum(d.elbo(y, conditional) for d, y in zip(dense, OUTPUTS, strict=True))
    batch["value.residual_scale"] = jnp.asarray(RESIDUAL_SCALE)
    count = 1 if statement == "observe" else 6000
    values = over_keys(make_elbo(model, guide), count, batch, X, OUTPUTS)
    if statement == "observe":
        np.testing.assert_allclose(values, expected, rtol=1e-8)
    else:
        assert abs(values.mean() - expected) < Z_LIMIT * values.std() / count**0.5 < 1.2
        assert shapes["value"] == (3, 8)

    @compiled
    def predictions(params):
        posterior = npgp.posterior("f", model, guide, params, X, OUTPUTS)
        return posterior.mean(X_NEW), posterior.covariance(X_NEW)

    mean, cov = predictions(batch)
    for i, params in enumerate(single):
        one = Dense("odvgp", X_NEW, params)
        np.testing.assert_allclose(mean[i], one.mean, atol=1e-7)
        np.testing.assert_allclose(cov[i], one.cov, atol=1e-7)


def test_predictions_of_outputs(float64):
    """Outputs are independent functions; each joint over rows where that was asked for."""

    def model(X, y=None):
        outputs = numpyro.plate("outputs", 3, dim=-2)
        with outputs:
            f = sparse_gp("odvgp", jitter=1e-12).draw()
        with numpyro.plate("data", X.shape[0]), outputs:
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y, joint=True)
            npgp.sample("value", f(X))

    batch, single = outputs_params()
    guide = npgp.AutoSparseGP(model)
    jax.eval_shape(handlers.seed(guide, jax.random.key(0)), X, OUTPUTS)
    predictive = Predictive(model, guide=guide, params=batch, num_samples=6000)
    draws = compiled(predictive)(jax.random.key(0), X_NEW[:3])
    dense = [Dense("odvgp", X_NEW[:3], params) for params in single]
    mean, cov = np.concatenate([d.mean for d in dense]), block_diag(*(d.cov for d in dense))
    assert draws["value"].shape == (6000, 3, 3)
    assert models.worst_z_of_moments(draws["value"].reshape(-1, 9), mean, cov) < Z_LIMIT
    noisy = cov + NOISE * np.eye(9)
    assert models.worst_z_of_moments(draws["y"].reshape(-1, 9), mean, noisy) < Z_LIMIT


def test_plates_of_functions_at_two_levels(float64):
    def model(X, y):
        outer, inner = numpyro.plate("outer", 2, dim=-3), numpyro.plate("inner", 3, dim=-2)
        with outer, inner:
            f = sparse_gp(jitter=1e-12).draw()
        with outer:
            g = sparse_gp(name="g", jitter=1e-12).draw()
        with outer, inner, numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X) + g(X), npgp.Gaussian(variance=NOISE), obs=y)

    f_params = [[random_params(seed=3 * i + j) for j in range(3)] for i in range(2)]
    g_params = [random_params(seed=10 + i, name="g") for i in range(2)]
    params = {n: jnp.stack([jnp.stack([p[n] for p in row])[:, None] for row in f_params]) for n in f_params[0][0]}
    params |= {n: jnp.stack([p[n] for p in g_params])[:, None, None] for n in g_params[0]}
    y = np.stack([OUTPUTS, OUTPUTS[::-1] + 0.3])
    expected = 0.0
    for i, j in np.ndindex(2, 3):
        f, g = Dense("svgp", X, f_params[i][j]), Dense("svgp", X, g_params[i], "g")
        rows = log_normal(y[i, j], f.mean + g.mean, NOISE) - 0.5 * (f.explained + g.explained) / NOISE
        expected += (rows - 0.5 * np.log1p((f.residual + g.residual) / NOISE)).sum() - f.kl - (g.kl if j == 0 else 0)
    guide = npgp.AutoSparseGP(model, joint=False)
    np.testing.assert_allclose(elbo_value(model, params, X, y, guide=guide), expected, rtol=1e-8)


def test_a_model_without_other_sites_may_be_conditioned_from_outside(float64):
    """``handlers.condition`` in place of ``obs``."""

    def model(X):
        npgp.observe("y", sparse_gp(jitter=1e-12).draw()(X), npgp.Gaussian(variance=NOISE))

    conditioned = handlers.condition(model, {"y": jnp.asarray(Y)})
    params = random_params()
    value = elbo_value(conditioned, params, X)
    np.testing.assert_allclose(value, Dense("svgp", X, params).elbo(Y), rtol=1e-8)


# ---------------------------------------------------------------------------------------------------------------
# Minibatches

SUBSETS = np.array(list(itertools.combinations(range(6), 2)))
FEW_X, FEW_Y = X[:6], Y[:6]


def over_subsets(elbo, params, *args):
    """The ELBO of every minibatch of 2 of 6 rows, whose mean an unbiased estimate has."""
    fn = jax.vmap(lambda rows: elbo(jax.random.key(0), params, rows, *args))
    return np.asarray(compiled(fn)(jnp.asarray(SUBSETS)))


def test_minibatches_are_unbiased(float64):
    def model(X, y, rows=None):
        f = sparse_gp("odvgp", jitter=1e-12).draw()
        with npgp.plate("data", 6, rows):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    def own_rows(X, y):
        f = sparse_gp("odvgp", jitter=1e-12).draw()
        with numpyro.plate("data", 6, subsample_size=2) as index:
            npgp.observe("y", f(X[index]), npgp.Gaussian(variance=NOISE), obs=y[index])

    params = random_params("odvgp")
    elbo = make_elbo(model)
    x, y = jnp.asarray(FEW_X), jnp.asarray(FEW_Y)

    def chosen(key, params, rows):
        pair = [handlers.substitute(fn, {"data": rows}) for fn in (own_rows, npgp.AutoSparseGP(own_rows))]
        return jnp.stack([elbo(key, params, x[rows], y[rows], rows), make_elbo(*pair)(key, params, x, y)])

    values, by_numpyro = over_subsets(chosen, params).T
    np.testing.assert_allclose(by_numpyro, values, rtol=1e-10)
    full = Dense("odvgp", FEW_X, params)
    np.testing.assert_allclose(values.mean(), full.elbo(FEW_Y), rtol=1e-8)
    rows = full.rows(FEW_Y)
    np.testing.assert_allclose(values, 3.0 * rows[SUBSETS].sum(1) - full.kl, rtol=1e-8)
    assert values.std() > 0.5
    # The number of rows says enough where no row numbers are needed.
    counted = compiled(lambda: elbo(jax.random.key(0), params, x[:2], y[:2], 2))()
    np.testing.assert_allclose(counted, values[0], rtol=1e-12)
    whole = compiled(lambda: elbo(jax.random.key(0), params, x, y))()
    np.testing.assert_allclose(whole, full.elbo(FEW_Y), rtol=1e-8)


def local_latent_model(X, y, rows=None, own_rows=False):
    """A Gaussian offset for every row, besides f: ``own_rows`` if NumPyro's plate draws the rows."""
    f = sparse_gp(jitter=1e-12).draw()
    if own_rows:
        plate = numpyro.plate("data", 6, subsample_size=2)
    else:
        plate = npgp.plate("data", 6, rows)
    with plate as index:
        offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
        if own_rows:
            X, y = X[index], y[index]
        npgp.observe("y", f(X) + offset, npgp.Gaussian(variance=NOISE), obs=y)


LOCAL = {
    "offset_auto_loc": jnp.linspace(-2.0, 3.0, 6),
    "offset_auto_scale": jnp.full(6, 1e-6),
}


def local_elbo(subset, params):
    """Of a minibatch, with the offsets known."""
    dense = Dense("svgp", FEW_X[subset], params)
    offset = np.asarray(LOCAL["offset_auto_loc"], float)[subset]
    kl = 0.5 * (1e-12 + offset**2 - 1 - np.log(1e-12))
    dense.mean = dense.mean + offset
    return 3.0 * np.sum(dense.rows(FEW_Y[subset]) - kl) - dense.kl


def test_local_latents_share_the_rows_that_numpyro_draws(float64):
    guide = npgp.AutoSparseGP(local_latent_model)
    x, y = jnp.asarray(FEW_X), jnp.asarray(FEW_Y)
    initialize(local_latent_model, guide, x, y, own_rows=True)
    params = random_params() | {n: jnp.asarray(v, float) for n, v in LOCAL.items()}

    def run(key):
        guide_trace, trace = traces(
            lambda: local_latent_model(x, y, own_rows=True), lambda: guide(x, y, own_rows=True), params, key=key
        )
        rows = trace["y"]["fn"].log_prob(trace["y"]["value"])
        return trace["data"]["value"], guide_trace["data"]["value"], rows, trace["offset"]["value"]

    for drawn, in_guide, rows, offset in [jax.tree.map(np.asarray, compiled(run, static_argnums=0)(k)) for k in (0, 1)]:
        np.testing.assert_array_equal(drawn, in_guide)
        np.testing.assert_allclose(offset, np.asarray(LOCAL["offset_auto_loc"])[drawn], atol=1e-4)
        dense = Dense("svgp", FEW_X[drawn], params)
        dense.mean = dense.mean + offset
        np.testing.assert_allclose(rows, dense.rows(FEW_Y[drawn]), rtol=1e-8)


def test_local_latents_share_the_rows_given(float64):
    x, y = jnp.asarray(FEW_X), jnp.asarray(FEW_Y)

    def plates(X, y, rows):
        return npgp.plate("data", 6, rows)

    guide = npgp.AutoSparseGP(local_latent_model, guide=partial(AutoNormal, create_plates=plates))
    initialize(local_latent_model, guide, x[:2], y[:2], jnp.array([0, 1]))
    params = random_params() | {n: jnp.asarray(v, float) for n, v in LOCAL.items()}
    elbo = make_elbo(local_latent_model, guide)
    values = over_subsets(lambda key, params, rows: elbo(key, params, x[rows], y[rows], rows), params)
    expected = [local_elbo(subset, params) for subset in SUBSETS]
    np.testing.assert_allclose(values, expected, rtol=1e-4)


def test_local_latents_share_rows_substituted_from_outside(float64):
    """NumPyro's own way to choose a minibatch: ``handlers.substitute`` with the plate's name."""
    x, y = jnp.asarray(FEW_X), jnp.asarray(FEW_Y)
    guide = npgp.AutoSparseGP(local_latent_model)
    initialize(local_latent_model, guide, x, y, own_rows=True)
    params = random_params() | {n: jnp.asarray(v, float) for n, v in LOCAL.items()}

    def elbo(key, params, rows):
        chosen = [handlers.substitute(fn, {"data": rows}) for fn in (local_latent_model, guide)]
        return make_elbo(*chosen, own_rows=True)(key, params, x, y)

    values = over_subsets(elbo, params)
    expected = [local_elbo(subset, params) for subset in SUBSETS]
    np.testing.assert_allclose(values, expected, rtol=1e-4)


def test_local_latents_with_other_rows_are_an_error(float64):
    guide = npgp.AutoSparseGP(local_latent_model)
    with pytest.raises(ValueError, match="create_plates"):
        initialize(local_latent_model, guide, FEW_X[:2], FEW_Y[:2], jnp.array([4, 1]))


def test_batches_of_one_shape_compile_once(float64):
    count = 0

    def model(X, y, rows):
        nonlocal count
        count += 1
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=positive)
        f = sparse_gp(k=npgp.RBF(lengthscale)).draw()
        with npgp.plate("data", 6, rows):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO())
    update = compiled(svi.update)
    x, y = jnp.asarray(FEW_X), jnp.asarray(FEW_Y)
    state = jax.tree.map(jnp.asarray, compiled(svi.init)(jax.random.key(0), x[:2], y[:2], jnp.arange(2)))
    losses, traced = [], []
    for subset in SUBSETS[:4]:
        rows = jnp.asarray(subset)
        state, loss = update(state, x[rows], y[rows], rows)
        losses.append(float(loss))
        traced.append(count)
    assert traced[0] > 0 and len(set(traced)) == 1
    assert len(set(losses)) == 4


# ---------------------------------------------------------------------------------------------------------------
# Cost


def loss_jaxpr(model, params, *args):
    """The loss at steps after the first, in which the guide looks at the model's sites."""
    elbo = make_elbo(model)
    jax.eval_shape(elbo, jax.random.key(0), params, *args)
    return jax.make_jaxpr(lambda *a: elbo(*a))(jax.random.key(0), params, *args).jaxpr  # traced anew


def count_primitives(jaxpr, named: str) -> int:
    """How often a primitive, or a jitted function, of this name occurs, sub-programs included."""
    total = 0
    for eqn in jaxpr.eqns:
        is_named = named in (eqn.primitive.name, eqn.params.get("name"))
        total += is_named
        for value in [] if is_named else eqn.params.values():
            for part in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    total += count_primitives(inner, named)
    return total


@pytest.mark.parametrize(
    "statements, inputs",
    [
        (["observe"], 1),
        (["rows"], 1),
        (["rows", "observe"], 1),
        (["observe", "observe2"], 2),
        (["rows", "observe2"], 2),
    ],
)
def test_one_factorization_and_one_projection_per_input_set(statements, inputs, float64):
    """In guide and model together; a projection is one triangular solve."""

    def model(X, X2, y):
        f = sparse_gp().draw()
        with numpyro.plate("data", 8):
            if "rows" in statements:
                value = npgp.sample("value", f(X), joint=False)
                numpyro.sample("z", dist.Normal(value, 1.0), obs=y)
            if "observe" in statements:
                npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)
            if "observe2" in statements:
                npgp.observe("y2", f(X2), npgp.Gaussian(variance=NOISE), obs=y)

    jaxpr = loss_jaxpr(model, random_params(), X, X_NEW, Y)
    assert count_primitives(jaxpr, "_jittered_cholesky") == 1
    assert count_primitives(jaxpr, "solve_lower") == inputs


def test_a_joint_draw_factorizes_its_residual_once(float64):
    def model(X, y):
        value = npgp.sample("value", sparse_gp().draw()(X))
        numpyro.sample("z", dist.Normal(value, 1.0), obs=y)

    jaxpr = loss_jaxpr(model, random_params(), X, Y)
    assert count_primitives(jaxpr, "_jittered_cholesky") == 2  # of the inducing points and of the rows
    assert count_primitives(jaxpr, "solve_lower") == 1


def test_outputs_share_factorization_and_projection(float64):
    def model(X, y):
        with numpyro.plate("outputs", 3, dim=-2):
            f = sparse_gp().draw()
            with numpyro.plate("data", 8):
                npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    params, _ = outputs_params("svgp")
    jaxpr = loss_jaxpr(model, params, X, OUTPUTS)
    assert count_primitives(jaxpr, "_jittered_cholesky") == 1
    assert count_primitives(jaxpr, "solve_lower") == 1


# ---------------------------------------------------------------------------------------------------------------
# Missing entries


@pytest.mark.parametrize("likelihood", [npgp.Gaussian(variance=NOISE), npgp.Poisson()])
def test_masked_rows_count_as_left_out(likelihood, float64):
    """The same ELBO and gradients as without these rows, though they hold NaN."""

    def model(X, y, mask=None):
        f = sparse_gp("odvgp").draw()
        npgp.observe("y", f(X), likelihood, obs=y, mask=mask)

    mask = np.arange(8) % 3 != 1
    y = np.floor(3 * np.abs(Y))
    params = random_params("odvgp")
    value_and_grad = jax.value_and_grad(make_elbo(model), 1)

    @compiled
    def run(params):
        key = jax.random.key(0)
        masked = value_and_grad(key, params, X, np.where(mask, y, np.nan), mask)
        return masked, value_and_grad(key, params, X[mask], y[mask]), value_and_grad(key, params, X, y)

    masked, dropped, full = run(params)
    assert abs(masked[0] - full[0]) > 0.1
    for got, want in zip(jax.tree.leaves(masked), jax.tree.leaves(dropped), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_masked_entries_of_outputs_count_as_left_out(float64):
    def model(X, y, mask=None):
        outputs = numpyro.plate("outputs", 3, dim=-2)
        with outputs:
            f = sparse_gp("odvgp", jitter=1e-12).draw()
        with outputs, numpyro.plate("data", 8):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y, mask=mask)

    mask = np.random.default_rng(0).random((3, 8)) < 0.7
    batch, single = outputs_params()
    elbo = jax.value_and_grad(make_elbo(model), 1)
    value, gradient = compiled(elbo)(jax.random.key(0), batch, X, np.where(mask, OUTPUTS, np.nan), mask)
    dense = [Dense("odvgp", X[seen], params) for seen, params in zip(mask, single, strict=True)]
    expected = sum(d.elbo(y[seen]) for d, y, seen in zip(dense, OUTPUTS, mask, strict=True))
    np.testing.assert_allclose(value, expected, rtol=1e-8)
    assert all(np.all(np.isfinite(leaf)) for leaf in gradient.values())


# ---------------------------------------------------------------------------------------------------------------
# What the guide offers after training


def test_posterior_is_that_of_the_parameters(float64):
    """From the model, from the component, and (at the optimum) from ``CollapsedGP``."""
    gp, model = sparse_gp("odvgp"), regression("odvgp")

    @compiled
    def run():
        blocks, kinds = gp.inducing, gp.covariances
        collapsed = npgp.CollapsedGP(kernel(), X, list(blocks), noise_variance=NOISE, covariances=kinds, jitter=1e-12)
        conditioned = collapsed.condition(Y)
        params = params_of(conditioned, "odvgp")
        # Observations may be left out.
        of_model = npgp.posterior("f", model, npgp.AutoSparseGP(model), params, X)
        by_hand = npgp.posterior("f", model, lambda X, y=None: gp.guide(), params, X)
        of_gp = sparse_gp("odvgp", jitter=1e-12).posterior(params)
        return [
            (p.mean(X_NEW), p.variance(X_NEW), p.covariance(X_NEW)) for p in (conditioned, of_model, by_hand, of_gp)
        ]

    conditioned, *others = run()
    for other in others:
        for got, want in zip(other, conditioned, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_allclose(np.diag(conditioned[2]), conditioned[1], atol=1e-10)


def test_posterior_at_sampled_hyperparameters(float64):
    model = sampled_hyperparameters
    guide = npgp.AutoSparseGP(model, dependence="independent")
    params = initialize(model, guide, jnp.asarray(X), jnp.asarray(Y))
    params |= random_params()

    @compiled
    def run(key):
        posterior = npgp.posterior("f", model, guide, params, X, rng_key=key)
        return posterior.mean(X_NEW), posterior.projector.kernel.lengthscale

    drawn = [run(key) for key in keys(2)]
    assert drawn[0][1] != drawn[1][1]
    for mean, lengthscale in drawn:
        np.testing.assert_allclose(mean, Dense("svgp", X_NEW, params, lengthscale=float(lengthscale)).mean, atol=1e-7)


def test_sample_posterior_draws_from_the_guide(float64):
    model = sampled_hyperparameters
    guide = npgp.AutoSparseGP(model, dependence="independent")
    params = initialize(model, guide, jnp.asarray(X), jnp.asarray(Y))
    params |= random_params()
    draw = compiled(lambda key: guide.sample_posterior(key, params, X, Y, sample_shape=(5, 400)))
    draws = draw(jax.random.key(1))
    assert set(draws) == {"f.u", "lengthscale", "noise"}
    assert draws["f.u"].shape == (5, 400, 3) and draws["noise"].shape == (5, 400)
    factor = np.asarray(params["f.u.scale_tril"])
    flat = np.asarray(draws["f.u"]).reshape(-1, 3)
    assert models.worst_z_of_moments(flat, np.asarray(params["f.u.loc"]), factor @ factor.T) < Z_LIMIT
    log_lengthscale = np.log(draws["lengthscale"]).ravel()
    z = (log_lengthscale.mean() - params["lengthscale_auto_loc"]) / (log_lengthscale.std() / 2000**0.5)
    assert abs(z) < Z_LIMIT
    single = guide.sample_posterior(jax.random.key(1), params, X, Y)
    assert single["f.u"].shape == (3,)


@pytest.mark.parametrize("statement", ["observe", "sample"])
def test_median_and_quantiles_are_of_latent_sites(statement, float64):
    """Nothing that depends on a draw of f is among them."""
    model = lambda X, y=None: sampled_hyperparameters(X, y, statement)  # noqa: E731
    guide = npgp.AutoSparseGP(model, dependence="independent")
    params = initialize(model, guide, jnp.asarray(X), jnp.asarray(Y))
    median, quantiles = guide.median(params), guide.quantiles(params, [0.1, 0.5])
    np.testing.assert_allclose(median["lengthscale"], np.exp(params["lengthscale_auto_loc"]), rtol=1e-10)
    np.testing.assert_allclose(quantiles["lengthscale"][1], median["lengthscale"], rtol=1e-8)
    np.testing.assert_array_equal(median["f.u"], params["f.u.loc"])
    assert set(median) == set(quantiles) == {"lengthscale", "noise", "f.u"}


def test_a_fresh_guide_predicts_without_data(float64):
    """Parameters loaded from a file: the guide's first call has no observations, which are no latent sites."""
    model, params = regression(), random_params()
    guide = npgp.AutoSparseGP(model)
    draws = compiled(Predictive(model, guide=guide, params=params, num_samples=4000))(jax.random.key(0), X_NEW)
    dense = Dense("svgp", X_NEW, params)
    assert set(draws) == {"y", "y.latent"}
    within = dense.A.T @ dense.S @ dense.A + np.diag(np.diag(dense.D)) + NOISE * np.eye(8)
    assert models.worst_z_of_moments(draws["y"], dense.mean, within) < Z_LIMIT


# ---------------------------------------------------------------------------------------------------------------
# New rows of models with latent sites in the plate over rows

ERROR = 0.3


def measured_model(measured, y=None, *, batch=None):
    """Inputs that were measured with an error; in batches if wanted, which NumPyro draws."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = sparse_gp("svgp").draw()
    with numpyro.plate("data", len(measured), subsample_size=batch) as rows:
        x = numpyro.sample("x", dist.Normal(jnp.asarray(measured)[rows], ERROR).to_event(1))
        npgp.observe("y", f(x) + level, npgp.Gaussian(variance=NOISE), obs=None if y is None else y[rows])


@pytest.fixture(scope="module", params=[None])
def measured(request):
    """The model, a guide that knows the rows trained on, and parameters; these rows' latent inputs are far away."""
    with jax.enable_x64(True):
        model = partial(measured_model, batch=request.param)
        guide = npgp.AutoSparseGP(model)
        svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
        params = compiled(lambda: svi.get_params(svi.init(jax.random.key(0), X, jnp.asarray(Y))))()
        if request.param is None:  # q(ε) follows x, and is given the rows
            params["joint_loc"] = jnp.concatenate([jnp.array([0.7]), X[:, 0] + 2.0])
            params["joint_scale_tril"] = 1e-3 * jnp.eye(9)
            return model, guide, guide.with_rows(params, X, jnp.asarray(Y))
        params |= {"joint_loc": jnp.array([0.7]), "joint_scale_tril": jnp.array([[0.2]])}
        params |= {"x_auto_loc": jnp.asarray(X + 2.0), "x_auto_scale": jnp.full(X.shape, 1e-3)}
        params["f.u.pseudo_loc"] = jnp.asarray([1.5, -1.0, 2.0])
        return model, guide, params


def mean_at(model, guide, params, x):
    """Mean of y at known inputs, level and all; f's is the same at each level."""
    f = npgp.posterior("f", model, guide, params, X, jnp.asarray(Y))
    return np.asarray(compiled(f.mean)(x)) + 0.7


@pytest.mark.parametrize(("measured", "count"), [(None, 5), (4, 8)], indirect=["measured"])
def test_new_rows_have_their_latent_sites_from_the_prior(measured, count, float64):
    """As many rows as those trained on, or not: y's mean is that over the prior of x, by quadrature."""
    model, guide, params = measured
    new = np.linspace(-1.0, 1.5, count)[:, None]
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    points = (new + ERROR * nodes).reshape(-1, 1)
    mean = mean_at(model, guide, params, points)
    expected = mean.reshape(count, -1) @ (weights / weights.sum())
    draws = Predictive(model, guide=guide, params=params, num_samples=4000, parallel=True)
    y = np.asarray(compiled(lambda key: draws(key, jnp.asarray(new))["y"])(jax.random.key(1)))
    if y.shape[1] < count:  # some of the rows in each draw
        assert y.shape == (4000, 4)
        y, expected = y.mean(1), np.mean(expected)
    error = y.std(0) / np.sqrt(4000)
    assert np.abs((y.mean(0) - expected) / error).max() < 4.5
    elsewhere = mean_at(model, guide, params, X + 2.0)[:count]
    assert np.max(np.abs(elsewhere - expected)) > 10 * np.max(error)  # where the rows trained on are
    # What is not asked for a row's input needs none.
    f = npgp.posterior("f", model, guide, params, jnp.asarray(new))
    assert np.all(np.isfinite(compiled(f.mean)(new)))
    drawn = jax.eval_shape(lambda key: guide.sample_posterior(key, params, jnp.asarray(new)), jax.random.key(2))
    assert "x" not in drawn


def test_predictions_of_the_rows_trained_on_take_their_latent_sites(measured, float64):
    model, guide, params = measured
    given = jnp.asarray(X), jnp.asarray(Y)

    @compiled
    def both(keys):
        draws = guide.sample_posterior(keys[0], params, *given, sample_shape=(2000,))
        return draws["x"], Predictive(model, draws, params=params, parallel=True)(keys[1], given[0])["y"]

    x, y = map(np.asarray, both(keys(2)))
    np.testing.assert_allclose(np.mean(x, 0), X + 2.0, atol=1e-3)
    expected = mean_at(model, guide, params, X + 2.0)
    assert np.abs((y.mean(0) - expected) / (y.std(0) / np.sqrt(2000))).max() < 4.5


def with_a_reading(reading, y=None, *, plate="data"):
    """Inputs of which a reading is an observation as well; in a plate over rows of their own if wanted."""
    f = sparse_gp("svgp").draw()
    with numpyro.plate(plate, len(reading)):
        x = numpyro.sample("x", dist.Normal(0.0, 2.0).expand([1]).to_event(1))
        numpyro.sample("reading", dist.Normal(x, ERROR).to_event(1), obs=reading)
    with numpyro.plate("data", len(reading)):
        npgp.observe("y", f(x), npgp.Gaussian(variance=NOISE), obs=y)


def started(model, *args):
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params = compiled(lambda: svi.get_params(svi.init(jax.random.key(0), *args)))()
    return guide, guide.with_rows(params, *args)


@pytest.mark.parametrize("count", [5])
def test_rows_of_which_some_is_observed_may_be_new(count, float64):
    """Neither the rows trained on nor the prior: the error names the site; f needs none of these values."""
    given = jnp.asarray(X), jnp.asarray(Y)
    guide, params = started(with_a_reading, *given)
    params["joint_loc"] = given[0][:, 0] + 2.0
    new = jnp.linspace(-1.0, 1.5, count)[:, None]
    message = r"'x' is local.*'data', of which \['reading'\] is observed and \['y'\] is not.*'x' by hand"
    with pytest.raises(ValueError, match=message):
        Predictive(with_a_reading, guide=guide, params=params, num_samples=2)(jax.random.key(1), new)
    f = npgp.posterior("f", with_a_reading, guide, params, new)
    np.testing.assert_array_equal(f.mean(X), npgp.posterior("f", with_a_reading, guide, params, *given).mean(X))
    # What the message says of the rows trained on.

    @compiled
    def both(keys):
        draws = guide.sample_posterior(keys[0], params, *given, sample_shape=(400,))
        predictive = Predictive(with_a_reading, draws, params=params, parallel=True)
        return draws["x"], predictive(keys[1], given[0])["y.latent"]

    x, y = map(np.asarray, both(keys(2)))
    expected = np.stack([f.mean(x[:, n]) for n in range(8)], 1)
    error = np.std(y - expected, axis=0) / 20.0
    assert np.all(np.abs(np.mean(y - expected, axis=0)) < 4.5 * error)

    def encoder(reading, y=None):
        with numpyro.plate("data", len(reading)):
            numpyro.sample("x", dist.Normal(reading, 1e-3).to_event(1))

    guide = npgp.AutoSparseGP(with_a_reading, [encoder, AutoNormal])
    draws = Predictive(guide, params=params, num_samples=2)(jax.random.key(1), new)
    np.testing.assert_allclose(draws["x"], np.broadcast_to(new, (2, count, 1)), atol=0.01)


def test_other_observations_are_not_taken_for_those_trained_on(float64):
    """Of as many rows, whose latent inputs nobody knows: the posterior of f needs none."""
    given, other = (jnp.asarray(X), jnp.asarray(Y)), (jnp.asarray(X) + 0.5, jnp.asarray(Y) + 0.1)
    guide, params = started(measured_model, *given)
    draw = Predictive(measured_model, guide=guide, params=params, num_samples=2)
    for rows, wrong in ((given, False), (other, True)):
        calls = (
            lambda: guide.sample_posterior(jax.random.key(0), params, *rows, sample_shape=(2,)),  # noqa: B023
            lambda: draw(jax.random.key(0), *rows),  # noqa: B023
        )
        for call in calls:
            with (
                pytest.raises(ValueError, match="'x' is local to rows, and y has other observations")
                if wrong
                else nullcontext()
            ):
                jax.eval_shape(call)
    means = [npgp.posterior("f", measured_model, guide, params, *rows).mean(X) for rows in (given, other)]
    np.testing.assert_array_equal(*means)


def test_a_site_with_as_many_members_as_rows_may_be_of_old_ones(float64):
    """In a plate of its own, of as many: nothing says that these are rows, and its trained values are kept."""
    model = partial(with_a_reading, plate="inputs")
    guide, params = started(model, jnp.asarray(X), jnp.asarray(Y))
    predict = Predictive(model, guide=guide, params=params, num_samples=2)
    with pytest.warns(UserWarning, match="'x' has as many members as there are rows.*plate around the observations"):
        jax.eval_shape(lambda: predict(jax.random.key(1), jnp.asarray(X) + 5.0))
    jax.eval_shape(lambda: predict(jax.random.key(1), jnp.asarray(X), jnp.asarray(Y)))  # without a warning

    def global_weights(measured, y=None):
        f, weights = sparse_gp("svgp").draw(), numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
        with numpyro.plate("data", len(measured)):
            npgp.observe("y", f(measured) + weights[0], npgp.Gaussian(variance=NOISE), obs=y)

    guide, params = started(global_weights, jnp.asarray(X), jnp.asarray(Y))
    predict = Predictive(global_weights, guide=guide, params=params, num_samples=2)
    jax.eval_shape(lambda: predict(jax.random.key(1), jnp.asarray(X[:5])))


def shaped(model, guide):
    """Parameters of a guide by their shapes alone: all ones, where values do not matter."""
    params = jax.eval_shape(lambda: start(model, guide, jnp.asarray(X), jnp.asarray(Y)))
    return {name: jnp.ones(param.shape) for name, param in params.items()}


def test_what_cannot_be_said_of_new_rows(float64):
    guide = npgp.AutoSparseGP(measured_model)
    params = shaped(measured_model, guide)
    five = jnp.asarray(X[:5])
    # With observations rows are those trained on.
    with pytest.raises(
        ValueError, match=r"x has shape \(8, 1\) in the automatic guide, but \(5, 1\).*leave out observations of new"
    ):
        guide.sample_posterior(jax.random.key(0), params, five, jnp.asarray(Y[:5]))
    for other in (None, AutoNormal):
        fresh = npgp.AutoSparseGP(measured_model, other)
        with pytest.raises(ValueError, match="'x' is local to the rows of plate 'data'.*call guide.sample_posterior"):
            npgp.posterior("f", measured_model, fresh, params, five)
    assert npgp.posterior("f", measured_model, npgp.AutoSparseGP(measured_model), params, X, jnp.asarray(Y))

    def without_plate(measured, y=None):
        x = numpyro.sample("x", dist.Normal(jnp.asarray(measured), ERROR).to_event(2))
        npgp.observe("y", sparse_gp("svgp").draw()(x), npgp.Gaussian(variance=NOISE), obs=y)

    guide = npgp.AutoSparseGP(without_plate)
    params = shaped(without_plate, guide)
    with pytest.raises(
        ValueError, match=r"x has shape \(8, 1\) in the automatic guide, but \(5, 1\).*in the plate over rows"
    ):
        Predictive(without_plate, guide=guide, params=params, num_samples=2)(jax.random.key(0), five)

    def by_hand(measured, y=None):
        with numpyro.plate("data", len(measured)):
            numpyro.sample("x", dist.Normal(jnp.asarray(measured) + 1.0, 0.1).to_event(1))

    # A guide written by hand takes its rows from the arguments, as an encoder does.
    guide = npgp.AutoSparseGP(measured_model, [by_hand, AutoNormal])
    params = guide.with_rows(shaped(measured_model, guide), X, jnp.asarray(Y))
    x = compiled(lambda: guide.sample_posterior(jax.random.key(0), params, five)["x"])()
    np.testing.assert_allclose(x, five + 1.0, atol=0.5)
