"""The automatic guide next to NumPyro's autoguides: which guide has which sites, draws, medians, NUTS, and errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from models import (
    NOISE,
    VARIANCE,
    X_NEW,
    Dense,
    X,
    Y,
    compiled,
    keys,
    log_normal,
    make_elbo,
    random_params,
    regression,
    sparse_gp,
    traces,
)
from numpyro import handlers
from numpyro.infer import (
    SVI,
    Predictive,
    Trace_ELBO,
    TraceMeanField_ELBO,
    init_to_median,
    init_to_uniform,
    init_to_value,
    log_likelihood,
)
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoDAIS,
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.util import initialize_model
from scipy.stats import norm

import npgp

Z_LIMIT = 4.5
positive = dist.constraints.positive


def model(X, y=None, structure="odvgp", conditional="tight"):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    numpyro.deterministic("twice", 2 * slope)
    f = sparse_gp(structure, k=npgp.RBF(lengthscale, variance=VARIANCE), jitter=1e-12).draw()
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", X.shape[0]):
        mean = f(X) + slope[0] * X[:, 0]
        npgp.observe("y", mean, npgp.Gaussian(variance=noise), obs=y, conditional=conditional)


OTHER_SITES = ("lengthscale", "slope", "noise")


def by_hand(X, y=None):
    """A guide for one site."""
    loc = numpyro.param("slope.loc", jnp.array([0.3, -0.2]))
    numpyro.sample("slope", dist.Normal(loc, 0.1).to_event(1))


def start(model, guide, *args, **kwargs):
    """The parameters that SVI starts from."""
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    return svi.get_params(svi.init(jax.random.key(0), *args, **kwargs))


def initialize(model, guide, *args, **kwargs):
    return compiled(lambda *args: start(model, guide, *args, **kwargs))(*args)


def names(model, guide, *args, **kwargs):
    """Names of the parameters; nothing is computed."""
    return set(jax.eval_shape(lambda: start(model, guide, *args, **kwargs)))


@pytest.fixture(scope="module")
def normal():
    """The default guide, and parameters."""
    with jax.enable_x64(True):
        guide = npgp.AutoSparseGP(model, dependence="independent")
        return guide, initialize(model, guide, X, Y) | random_params("odvgp")


# ---------------------------------------------------------------------------------------------------------------
# Which guide has which sites


KINDS = {
    "bnaf": partial(AutoBNAFNormal, num_flows=1, hidden_factors=[2]),
    "by hand for some": [AutoDelta(handlers.block(model, expose=["lengthscale"])), by_hand, AutoNormal],
}


@pytest.mark.parametrize("kind", KINDS)
def test_guides_of_other_sites_reach_the_gp(kind, float64):
    """The ELBO's rows are those of dense algebra at what the guide drew, and all parameters have a gradient."""
    guide = npgp.AutoSparseGP(model, KINDS[kind], dependence="independent")
    params = initialize(model, guide, X, Y) | random_params("odvgp")

    def loss(params):
        guide_trace, trace = traces(model, guide, params, jnp.asarray(X), jnp.asarray(Y))
        drawn = {name: guide_trace[name]["value"] for name in OTHER_SITES}
        assert [n for n in trace if n in drawn or n == "f.u"] == ["lengthscale", "slope", "f.u", "noise"]
        value = -make_elbo(model, guide)(jax.random.key(0), params, jnp.asarray(X), jnp.asarray(Y))
        return value, (drawn, trace["y"]["fn"].log_prob(Y))

    (value, (drawn, rows)), gradient = compiled(jax.value_and_grad(loss, has_aux=True))(params)
    dense = Dense("odvgp", X, params, lengthscale=float(drawn["lengthscale"]))
    dense.mean = dense.mean + drawn["slope"][0] * X[:, 0]
    np.testing.assert_allclose(rows, dense.rows(Y, noise=float(drawn["noise"])), rtol=1e-6)
    assert np.isfinite(value)
    for name, tree in gradient.items():
        leaf = np.concatenate([np.ravel(part) for part in jax.tree.leaves(tree)])
        assert np.all(np.isfinite(leaf)) and np.any(leaf != 0), name


def test_a_list_gives_what_is_left_to_its_last_guide(float64):
    q = {"f.u.loc", "f.u.scale_tril", "f.v.loc"}
    delta = AutoDelta(handlers.block(model, expose=["lengthscale"]))
    normal = {"noise_auto_loc", "noise_auto_scale"}
    guide = npgp.AutoSparseGP(model, [delta, by_hand, AutoNormal], dependence="independent")
    assert names(model, guide, X, Y) == q | normal | {"slope.loc", "lengthscale_auto_loc"}
    # Nothing is left.
    guide = npgp.AutoSparseGP(
        model,
        [by_hand, AutoNormal(handlers.block(model, expose=["lengthscale", "noise"])), AutoNormal],
        dependence="independent",
    )
    hand = {"slope.loc", "lengthscale_auto_loc", "lengthscale_auto_scale"}
    assert names(model, guide, X, Y) == q | normal | hand


def test_autoguides_of_the_user(float64):
    """Instances for the GP's hidden sites, ``AutoGuideList`` among them, and the other classes."""
    hidden = handlers.block(model, hide=["f.u", "f.v", "y", "twice"])
    parts = AutoGuideList(hidden)
    parts.append(AutoDelta(handlers.block(hidden, expose=["lengthscale"])))
    parts.append(AutoDiagonalNormal(handlers.block(hidden, hide=["lengthscale"])))
    q = {"f.u.loc", "f.u.scale_tril", "f.v.loc"}
    for rest, own in (
        (parts, {"lengthscale_auto_loc", "auto_loc", "auto_scale"}),
        (AutoNormal(hidden), {f"{name}_auto_{part}" for name in OTHER_SITES for part in ("loc", "scale")}),
        (AutoMultivariateNormal, {"auto_loc", "auto_scale_tril"}),
        (AutoDelta, {f"{name}_auto_loc" for name in OTHER_SITES}),
    ):
        guide = npgp.AutoSparseGP(model, rest, dependence="independent")
        params = jax.eval_shape(lambda g=guide: start(model, g, X, Y))
        assert set(params) == q | own
        draws = jax.eval_shape(lambda p, g=guide: g.sample_posterior(jax.random.key(0), p, X, Y), params)
        assert set(draws) == {*OTHER_SITES, "f.u", "f.v", "twice"}


def test_initial_values_of_other_sites(float64):
    def first_loc(init_loc_fn):
        guide = npgp.AutoSparseGP(
            model, partial(AutoNormal, init_loc_fn=init_loc_fn, init_scale=0.05), dependence="independent"
        )
        params = start(model, guide, X, Y)
        return params["lengthscale_auto_loc"], params["noise_auto_scale"], params["f.u.loc"]

    fns = init_to_value(values={"lengthscale": 0.7}), init_to_median(num_samples=400), init_to_uniform(radius=0.01)
    for expected, within, (loc, scale, epsilon) in zip(
        (np.log(0.7), 0.0, 0.0), (1e-12, 0.3, 0.01), compiled(lambda: [first_loc(fn) for fn in fns])(), strict=True
    ):
        np.testing.assert_allclose(loc, expected, atol=within)
        np.testing.assert_allclose(scale, 0.05, rtol=1e-12)
        np.testing.assert_array_equal(epsilon, 0.0)


# ---------------------------------------------------------------------------------------------------------------
# Local latents

LOCAL = {"a.loc": jnp.arange(6.0), "a.scale": jnp.full(6, 0.3), "b_auto_loc": 10 + jnp.arange(6.0)}


def with_local_latents(X, y, size=None):
    """Two offsets for each row; a plate that draws rows."""
    X, y = jnp.asarray(X), jnp.asarray(y)
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = sparse_gp(k=npgp.RBF(lengthscale, variance=VARIANCE), jitter=1e-12).draw()
    with numpyro.plate("data", 6, subsample_size=size) as index:
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.deterministic("rows", index)
        numpyro.deterministic("sum", a + b)
        npgp.observe("y", f(X[index]) + a - b, npgp.Gaussian(variance=NOISE), obs=y[index])


def a_by_hand(X, y, size=None):
    with numpyro.plate("data", 6, subsample_size=size) as index:
        numpyro.sample("a", dist.Normal(LOCAL["a.loc"][index], LOCAL["a.scale"][index]))


@pytest.fixture(scope="module")
def local():
    with jax.enable_x64(True):
        guide = npgp.AutoSparseGP(with_local_latents, [a_by_hand, AutoNormal], dependence="independent")
        params = initialize(with_local_latents, guide, X, Y, size=2) | random_params()
        return guide, params | {"b_auto_loc": LOCAL["b_auto_loc"].astype(float), "b_auto_scale": jnp.full(6, 0.2)}


def test_same_elbo_in_expectation_as_by_hand(local, float64):
    """A hyperparameter, local latents of a subsampled plate, and the GP, in the model's order."""
    guide, params = local

    def all_by_hand(X, y, size):
        loc, scale = params["lengthscale_auto_loc"], params["lengthscale_auto_scale"]
        numpyro.sample("lengthscale", dist.LogNormal(loc, scale))
        sparse_gp().guide()
        with numpyro.plate("data", 6, subsample_size=size) as index:
            numpyro.sample("a", dist.Normal(LOCAL["a.loc"][index], LOCAL["a.scale"][index]))
            numpyro.sample("b", dist.Normal(params["b_auto_loc"][index], params["b_auto_scale"][index]))

    @compiled
    def run(keys):
        elbos = [make_elbo(with_local_latents, g, size=2) for g in (guide, all_by_hand)]
        return [
            jax.vmap(lambda key, elbo=elbo: elbo(key, params, X, Y))(k) for elbo, k in zip(elbos, keys, strict=True)
        ]

    automatic, written = map(np.asarray, run((keys(1500, 1), keys(1500, 2))))
    spread = (automatic.var() / 1500 + written.var() / 1500) ** 0.5
    assert abs(automatic.mean() - written.mean()) < Z_LIMIT * spread < 0.03 * abs(written.mean())


def test_local_latents_of_all_guides_have_the_same_rows(local, float64):
    guide, params = local
    sharp = params | {"b_auto_scale": jnp.full(6, 1e-9)}

    @compiled
    @jax.vmap
    def run(key):
        guide_key, model_key = jax.random.split(key)
        start = handlers.substitute(handlers.seed(guide, guide_key), sharp)
        given = handlers.trace(start).get_trace(X, Y, size=2)
        replayed = handlers.replay(handlers.seed(with_local_latents, model_key), given)
        trace = handlers.trace(replayed).get_trace(X, Y, size=2)
        return {name: trace[name]["value"] for name in ("data", "a", "b")}

    drawn = run(keys(200))
    assert len(np.unique(drawn["data"], axis=0)) > 10
    np.testing.assert_allclose(drawn["b"], 10.0 + drawn["data"], atol=1e-7)
    assert np.abs(drawn["a"] - drawn["data"]).max() < 0.3 * Z_LIMIT


def test_draws_of_local_latents_are_of_all_rows(local, float64):
    """As NumPyro's autoguides have it, and with what is deterministic given them."""
    guide, params = local
    draws = compiled(lambda key: guide.sample_posterior(key, params, X, Y, size=2, sample_shape=(300,)))(
        jax.random.key(0)
    )
    assert {name: v.shape for name, v in draws.items()} == {
        "lengthscale": (300,), "f.u": (300, 3), "a": (300, 6), "b": (300, 6), "rows": (300, 6), "sum": (300, 6)
    }  # fmt: skip
    np.testing.assert_array_equal(draws["rows"], np.broadcast_to(np.arange(6), (300, 6)))
    np.testing.assert_allclose(draws["sum"], draws["a"] + draws["b"], rtol=1e-12)
    z = (np.mean(draws["b"], 0) - params["b_auto_loc"]) / (0.2 / 300**0.5)
    assert np.abs(z).max() < Z_LIMIT


def test_draws_keep_rows_that_are_arguments(float64):
    def model(X, y, rows):
        f = sparse_gp().draw()
        with npgp.plate("data", 6, rows):
            a = numpyro.sample("a", dist.Normal(0.0, 1.0))
            npgp.observe("y", f(X) + a, npgp.Gaussian(variance=NOISE), obs=y)

    def rest(X, y, rows):
        with npgp.plate("data", 6, rows) as index:
            numpyro.sample("a", dist.Normal(1.0 * index, 1e-9))

    guide = npgp.AutoSparseGP(model, rest, dependence="independent")
    draw = compiled(lambda rows: guide.sample_posterior(jax.random.key(0), random_params(), X[:2], Y[:2], rows))
    np.testing.assert_allclose(draw(jnp.array([4, 1]))["a"], [4.0, 1.0], atol=1e-7)


# ---------------------------------------------------------------------------------------------------------------
# Draws, medians and quantiles


def test_draws_include_what_is_deterministic_and_no_data(normal, float64):
    guide, params = normal
    draws = compiled(lambda key: guide.sample_posterior(key, params, X, Y, sample_shape=(4, 3)))(jax.random.key(0))
    assert {name: v.shape for name, v in draws.items()} == {
        "lengthscale": (4, 3), "slope": (4, 3, 2), "twice": (4, 3, 2), "noise": (4, 3),
        "f.u": (4, 3, 3), "f.v": (4, 3, 2),
    }  # fmt: skip
    np.testing.assert_allclose(draws["twice"], 2 * draws["slope"], rtol=1e-12)

    def ordinary(X, y=None):
        value = npgp.sample("value", sparse_gp().draw()(X), joint=False)
        numpyro.sample("y", dist.Normal(value, 0.3), obs=y)

    shapes = jax.eval_shape(
        lambda: npgp.AutoSparseGP(ordinary).sample_posterior(jax.random.key(0), random_params(), X, Y)
    )
    assert set(shapes) == {"f.u", "value.residual", "value"}


def test_three_ways_to_predict_agree(normal, float64):
    guide, params = normal
    count = 3000

    @compiled
    def run(keys):
        own = Predictive(model, guide=guide, params=params, num_samples=count, parallel=True)(keys[0], X_NEW)
        drawn = Predictive(guide, params=params, num_samples=count, parallel=True)(keys[1], X, Y)
        samples = guide.sample_posterior(keys[2], params, X, Y, sample_shape=(count,))
        return own, *(
            Predictive(model, posterior_samples=s, parallel=True)(key, X_NEW) | s
            for s, key in ((drawn, keys[3]), (samples, keys[4]))
        )

    ways = run(keys(5))
    assert set(ways[1]) - {"twice"} >= {"lengthscale", "slope", "noise", "f.u", "f.v", "y"}
    logs = [np.log(way["noise"]) for way in ways[1:]]
    assert abs(logs[0].mean() - logs[1].mean()) < Z_LIMIT * (2 * logs[0].var() / count) ** 0.5
    for moment in (lambda y: y, lambda y: y[:, :1] * y):
        values = [moment(np.asarray(way["y"])) for way in ways]
        for value in values[1:]:
            spread = ((value.var(0) + values[0].var(0)) / count) ** 0.5
            assert np.abs((value.mean(0) - values[0].mean(0)) / spread).max() < Z_LIMIT


def test_quantiles_of_all_sites(normal, float64):
    """Gaussian marginals of ε; a block that moves the mean only keeps the prior's spread, as its draws have."""
    guide, params = normal
    levels = [0.1, 0.5, 0.975]
    quantiles, median = compiled(lambda p: (guide.quantiles(p, levels), guide.median(p)))(params)
    assert set(quantiles) == set(median) == {*OTHER_SITES, "f.u", "f.v"}
    factor = np.asarray(params["f.u.scale_tril"])
    sd = {"f.u": np.sqrt(np.diag(factor @ factor.T)), "f.v": np.ones(2)}
    sd |= {name: np.asarray(params[f"{name}_auto_scale"]) for name in OTHER_SITES}
    for name, values in quantiles.items():
        loc = np.asarray(params.get(f"{name}.loc", params.get(f"{name}_auto_loc")))
        expected = loc + sd[name] * norm.ppf(levels).reshape(-1, *[1] * loc.ndim)
        if name in ("lengthscale", "noise"):
            expected = np.exp(expected)
        np.testing.assert_allclose(values, expected, rtol=1e-8)
        np.testing.assert_allclose(values[1], median[name], rtol=1e-8)
    shapes = jax.eval_shape(lambda p: guide.quantiles(p, 0.5), params)
    assert shapes["f.u"].shape == (1, 3) and shapes["noise"].shape == (1,)


def test_quantiles_of_other_structures(float64):
    """Diagonal blocks, functions in a plate, and scopes."""

    def model(X, y):
        with numpyro.plate("outputs", 2, dim=-2), handlers.scope(prefix="s"):
            f = sparse_gp("mean-field").draw()
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    guide = npgp.AutoSparseGP(model, dependence="independent")
    assert names(model, guide, X, np.stack([Y, Y])) == {"s/f.u.loc", "s/f.u.scale"}
    loc, scale = np.arange(6.0).reshape(2, 1, 3), np.linspace(0.1, 0.6, 6).reshape(2, 1, 3)
    found = guide.quantiles({"s/f.u.loc": loc, "s/f.u.scale": scale}, [0.25, 0.5])
    np.testing.assert_allclose(found["s/f.u"][0], loc + scale * norm.ppf(0.25), rtol=1e-10)
    np.testing.assert_allclose(found["s/f.u"][1], loc, rtol=1e-10)
    with pytest.raises(KeyError, match=r"'s/f.u.loc'"):
        guide.median({"f.u.loc": loc})


def test_medians_are_of_latent_sites_alone(float64):
    """Also where an instance made by the user sees deterministic sites."""
    guide = npgp.AutoSparseGP(
        model, AutoNormal(handlers.block(model, hide=["f.u", "f.v", "y"])), dependence="independent"
    )
    median = jax.eval_shape(lambda: guide.median(start(model, guide, X, Y)))
    assert set(median) == {*OTHER_SITES, "f.u", "f.v"}


# ---------------------------------------------------------------------------------------------------------------
# Without q: log likelihoods, NUTS, other guides


@pytest.mark.parametrize("conditional", ["tight", "prior", "shared", "grouped", "full"])
def test_log_likelihood_is_of_each_row_given_epsilon(conditional, float64):
    """The data's and not the bound's, whatever the conditional; with groups, too, each row by itself."""
    rng = np.random.default_rng(0)
    samples = {"lengthscale": rng.uniform(0.5, 1.0, 3), "noise": rng.uniform(0.1, 1.0, 3)}
    samples |= {"slope": rng.normal(size=(3, 2)), "f.u": rng.normal(size=(3, 3)), "f.v": rng.normal(size=(3, 2))}
    if conditional == "grouped":
        conditional = npgp.conditionals.Grouped(npgp.sparse.median_split(X, 4))
    given = partial(model, conditional=conditional)
    rows = compiled(lambda s: log_likelihood(given, s, X, Y)["y"])(jax.tree.map(jnp.asarray, samples))
    assert rows.shape == (3, 8)
    for i in range(3):
        dense = Dense("odvgp", X, lengthscale=samples["lengthscale"][i])
        mean = dense.A.T @ np.concatenate([samples["f.u"][i], samples["f.v"][i]]) + samples["slope"][i, 0] * X[:, 0]
        np.testing.assert_allclose(rows[i], log_normal(Y, mean, np.diag(dense.D) + samples["noise"][i]), rtol=1e-6)


def minus_log_joint(values, lengthscale, offset=0.0, noise=NOISE):
    """Of ε and data, by dense algebra."""
    dense = Dense("odvgp", X, lengthscale=float(lengthscale))
    epsilon = np.concatenate([values["f.u"], values["f.v"]])
    rows = log_normal(Y, dense.A.T @ epsilon + offset, np.diag(dense.D) + noise)
    return -rows.sum() - log_normal(epsilon, 0.0, 1.0).sum()


def potential_at_the_start(model, values):
    """What NUTS starts from."""

    def run(X, y):
        key = jax.random.key(0)
        return initialize_model(key, model, init_strategy=init_to_value(values=values), model_args=(X, y)).param_info

    return compiled(run)(X, Y)


def test_nuts_starts_where_svi_ended(normal, float64):
    guide, params = normal
    values = guide.median(params)
    found = potential_at_the_start(model, values)
    for name, value in values.items():
        expected = np.log(value) if name in ("lengthscale", "noise") else value
        np.testing.assert_allclose(found.z[name], expected, rtol=1e-8)
    expected = minus_log_joint(values, values["lengthscale"], values["slope"][0] * X[:, 0], float(values["noise"]))
    expected -= log_normal(np.log(values["lengthscale"]), 0.0, 1.0) + log_normal(values["slope"], 0.0, 1.0).sum()
    expected -= log_normal(values["noise"], 0.0, 1.0) + np.log(2) + np.log(values["noise"])
    np.testing.assert_allclose(found.potential_energy, expected, rtol=1e-8)


def test_nuts_starts_at_trained_parameters_if_these_are_substituted(float64):
    def with_param(X, y):
        lengthscale = numpyro.param("lengthscale", 3.0, constraint=positive)
        f = sparse_gp("odvgp", k=npgp.RBF(lengthscale, variance=VARIANCE), jitter=1e-12).draw()
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    guide = npgp.AutoSparseGP(with_param, dependence="independent")
    names(with_param, guide, X, Y)
    params = random_params("odvgp") | {"lengthscale": jnp.asarray(0.8)}
    values = guide.median(params)
    found = potential_at_the_start(handlers.substitute(with_param, params), values)
    np.testing.assert_allclose(found.potential_energy, minus_log_joint(values, 0.8), rtol=1e-8)


def test_an_autoguide_by_itself_bounds_the_evidence_of_the_fitc_model(float64):
    """It takes ε for ordinary latent values: no term of a conditional, and the model is as NUTS has it."""
    model = regression("odvgp")
    guide = AutoNormal(model)
    params = initialize(model, guide, X, Y)

    @compiled
    def run(params):
        guide_trace, _ = traces(model, guide, params, jnp.asarray(X), jnp.asarray(Y), key=3)
        values = {name: guide_trace[name]["value"] for name in ("f.u", "f.v")}
        fixed = handlers.substitute(guide, values)
        return values, make_elbo(model, fixed, Trace_ELBO())(jax.random.key(0), params, X, Y)

    values, value = run(params)
    expected = -minus_log_joint(values, 0.7)
    for name, epsilon in values.items():
        expected -= log_normal(epsilon, params[f"{name}_auto_loc"], params[f"{name}_auto_scale"] ** 2).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-8)


# ---------------------------------------------------------------------------------------------------------------
# Errors


def other_model(X, y=None):
    numpyro.sample("elsewhere", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    "guide, message",
    [
        (by_hand, r"no guide covers the latent site 'lengthscale'.*AutoNormal"),
        ([], r"no guide covers the latent site 'lengthscale'"),
        ([by_hand, by_hand, AutoNormal], r"by_hand and by_hand both sample 'slope'"),
        (AutoNormal(model), r"f\.u is sampled by the guide for the other sites.*class"),
        (AutoNormal(other_model), r"AutoNormal.*samples 'elsewhere', which is not a latent site.*another"),
        ([other_model, AutoNormal], r"other_model.*samples 'elsewhere'"),
    ],
)  # fmt: skip
def test_sites_that_are_covered_wrongly(guide, message, float64):
    with pytest.raises(ValueError, match=message):
        names(model, npgp.AutoSparseGP(model, guide), X, Y)


@pytest.mark.parametrize(
    "guide, message",
    [
        ("AutoNormal", r"guide has 'AutoNormal'; it must be an autoguide class"),
        ([AutoNormal, by_hand], r"AutoNormal.*only the last|AutoNormal.*of which the last may be a class"),
        ([AutoNormal, AutoNormal], r"of which the last may be a class"),
        (AutoLaplaceApproximation, r"AutoLaplaceApproximation uses the model's density"),
        (partial(AutoDAIS, K=2), r"AutoDAIS uses the model's density"),
        (AutoDAIS(model), r"AutoDAIS uses the model's density"),
    ],
)  # fmt: skip
def test_guides_that_cannot_serve(guide, message):
    with pytest.raises(TypeError, match=message):
        npgp.AutoSparseGP(model, guide)


def test_what_a_guide_does_not_offer_is_named(float64):
    fresh = npgp.AutoSparseGP(model)
    with pytest.raises(RuntimeError, match="median.*svi.init"):
        fresh.median({})
    for rest, method, args in (
        (KINDS["bnaf"], "median", ()),
        (AutoDelta, "quantiles", ([0.5],)),
        ([by_hand, AutoNormal], "median", ()),
    ):
        guide = npgp.AutoSparseGP(model, rest, dependence="independent")
        names(model, guide, X, Y)
        with pytest.raises(NotImplementedError, match=rf"{method}: \w+, a guide for other sites.*sample_posterior"):
            getattr(guide, method)({}, *args)


def test_data_that_are_left_out_need_no_guide(float64):
    """With parameters from a file and a fresh guide, a likelihood of NumPyro's is not taken for a latent site."""

    def model(X, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        value = npgp.sample("value", sparse_gp(jitter=1e-12).draw()(X), joint=False)
        numpyro.sample("y", dist.Normal(value, scale), obs=y)

    def rest(X, y=None):
        numpyro.sample("scale", dist.Delta(0.3))

    params = random_params()
    guides = [npgp.AutoSparseGP(model, rest, dependence="independent") for _ in range(3)]
    predictive = Predictive(model, guide=guides[0], params=params, num_samples=2)
    shapes = jax.eval_shape(predictive, jax.random.key(0), X_NEW)
    assert shapes["y"].shape == (2, 8)
    assert jax.eval_shape(lambda: npgp.posterior("f", model, guides[1], params, X_NEW).mean(X)).shape == (8,)
    draws = jax.eval_shape(lambda: guides[2].sample_posterior(jax.random.key(0), params, X_NEW))
    assert set(draws) == {"scale", "f.u", "value.residual", "value"}


def test_to_look_at_a_model_needs_no_covariances():
    """What autoguides are made of, and which sites q(ε) follows, is known without a value of the GP or its density."""
    calls = []

    class Counting(npgp.RBF):
        def __call__(self, X, X2=None):
            calls.append(1)
            return super().__call__(X, X2)

    def summed(X, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = sparse_gp(k=Counting(lengthscale, variance=VARIANCE)).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), npgp.Poisson(), obs=y)

    guide = npgp.AutoSparseGP(summed)
    counts = []
    for _ in range(2):
        calls.clear()
        jax.eval_shape(lambda: handlers.seed(guide, 0)(X, np.ones(len(X))))
        counts.append(len(calls))
    assert counts[0] == counts[1] == 2  # q(ε) is given rows, under K(Z, Z) and K(Z, X)
