"""Coupled means, q(ε | t) = N(m + C t, S): exactness, bounds, every structure, draws, and which sites t is made of."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import (
    NOISE,
    STRUCTURES,
    VARIANCE,
    Dense,
    X,
    Y,
    compiled,
    kernel,
    keys,
    make_elbo,
    over_keys,
    random_params,
    rbf,
    sites,
    sparse_gp,
    traces,
)
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from oracles import log_normal

import npgp
from npgp.model.coupling import spreads

Z_LIMIT = 4.5
POINTS = X.copy()
#: Sites of :func:`model` beside the GP's, and the order of t.
T = {"lengthscale": 1, "slope": 2, "noise": 1}
SIZE = sum(T.values())


def model(X, y=None, structure="odvgp", conditional="tight", whitened=True):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    k = npgp.RBF(lengthscale, variance=VARIANCE)
    blocks, kinds = STRUCTURES[structure]
    f = npgp.SparseGP("f", k, [jnp.asarray(b.copy()) for b in blocks], kinds, jitter=1e-12, whitened=whitened).draw()
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", X.shape[0]):
        mean = f(X) + slope[0] * X[:, 0] + slope[1]
        npgp.observe("y", mean, npgp.Gaussian(variance=noise), obs=y, conditional=conditional)


def coupled(model, guide=AutoNormal, **more):
    return npgp.AutoSparseGP(model, guide, dependence="coupled", **more)


def start(model, guide, *args, **kwargs):
    """The parameters that SVI starts from."""
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    return compiled(lambda *args: svi.get_params(svi.init(jax.random.key(0), *args, **kwargs)))(*args)


def shapes(model, guide, *args, **kwargs):
    """Shapes of the parameters; nothing is computed."""
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    found = jax.eval_shape(lambda: svi.get_params(svi.init(jax.random.key(0), *args, **kwargs)))
    return {name: value.shape for name, value in found.items()}


def random_couplings(structure, size=SIZE, seed=1, name="f"):
    rng = np.random.default_rng(seed)
    blocks = zip(sites(structure, name), STRUCTURES[structure][0], strict=True)
    return {f"{site}.coupling": jnp.asarray(0.3 * rng.normal(size=(len(block), size))) for site, block in blocks}


def moved(params, t):
    """Parameters of the independent guide with the mean that the coupled one has at t."""
    found = {name: np.asarray(value) for name, value in params.items() if name.endswith(("loc", "scale", "tril"))}
    for name, C in params.items():
        if name.endswith(".coupling"):
            loc = name.replace("coupling", "loc")
            found[loc] = found[loc] + np.asarray(C) @ t
    return found


def standardized(values, params):
    """t under ``AutoNormal``: site by site, unconstrained, centered and scaled."""
    logs = {name: np.log(values[name]) if name in ("lengthscale", "noise") else values[name] for name in T}
    parts = [(logs[name] - params[f"{name}_auto_loc"]) / params[f"{name}_auto_scale"] for name in T]
    return np.concatenate([np.ravel(part) for part in parts])


# ---------------------------------------------------------------------------------------------------------------
# The exact posterior is in the family


def trend(X, y=None):
    """Two linear effects and f, with inducing points at all inputs."""
    beta = numpyro.sample("beta", dist.Normal(jnp.zeros(2), jnp.array([1.5, 0.7])).to_event(1))
    f = npgp.SparseGP("f", kernel(), X, jitter=1e-14).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X) + beta[0] + beta[1] * X[:, 0], npgp.Gaussian(variance=NOISE), obs=y)


def test_exact_joint_posterior_and_evidence(float64):
    """Gaussian noise, Z = X: moments of (β, f) are those of dense algebra over function values, ELBOs the evidence."""
    inputs, y = jnp.asarray(X), jnp.asarray(Y)
    # The optimum, by the posterior of the weights (β, ε) of y = H β + L ε + noise.
    K, H, prior = rbf(X, X), np.column_stack([np.ones(8), X[:, 0]]), np.diag([1.5**2, 0.7**2])
    L = np.linalg.cholesky(K)
    G = np.hstack([H, L])
    V = np.linalg.inv(
        np.linalg.inv(np.block([[prior, np.zeros((2, 8))], [np.zeros((8, 2)), np.eye(8)]])) + G.T @ G / NOISE
    )
    mean = V @ G.T @ Y / NOISE
    V_bb, V_eb = V[:2, :2], V[2:, :2]
    slope = V_eb @ np.linalg.inv(V_bb)
    params = {
        "auto_loc": mean[:2],
        "auto_scale_tril": np.linalg.cholesky(V_bb),
        "f.u.loc": mean[2:],
        "f.u.coupling": slope * np.sqrt(np.diag(V_bb)),
        "f.u.scale_tril": np.linalg.cholesky(V[2:, 2:] - slope @ V_eb.T),
    }
    params = jax.tree.map(jnp.asarray, params)
    guide = coupled(trend, AutoMultivariateNormal)
    assert set(shapes(trend, guide, inputs, y)) == set(params)

    # The bound is the evidence whatever is drawn.
    covariance = K + H @ prior @ H.T + NOISE * np.eye(8)
    evidence = log_normal(Y, covariance)
    elbos = over_keys(make_elbo(trend, guide), 5, params, inputs, y)
    np.testing.assert_allclose(elbos, evidence, rtol=0, atol=1e-6)

    # q(f | β) is affine in β: its moments from three values.
    def mean_of_f(latent):
        given = handlers.substitute(guide, data={"_auto_latent": latent})
        trace = handlers.trace(handlers.substitute(handlers.seed(given, 0), data=params)).get_trace(inputs, y)
        return jnp.asarray(L) @ trace["f.u"]["fn"].loc

    f0, J = compiled(lambda z: (mean_of_f(z), jax.jacfwd(mean_of_f)(z)))(params["auto_loc"])
    f0, J, S = np.asarray(f0), np.asarray(J), L @ np.asarray(params["f.u.scale_tril"])
    q_mean = np.concatenate([mean[:2], f0])
    q_cov = np.block([[V_bb, V_bb @ J.T], [J @ V_bb, S @ S.T + J @ V_bb @ J.T]])
    # Exactly: (β, f) and y are jointly Gaussian.
    both = np.block([[prior, np.zeros((2, 8))], [np.zeros((8, 2)), K]])
    cross = both @ np.hstack([H, np.eye(8)]).T
    np.testing.assert_allclose(q_mean, cross @ np.linalg.solve(covariance, Y), atol=1e-6)
    np.testing.assert_allclose(q_cov, both - cross @ np.linalg.solve(covariance, cross.T), atol=1e-6)


@pytest.fixture(scope="module")
def bound():
    """The ELBO of random problems: an intercept and f, with inducing points at all inputs, so that it is reached."""

    def with_intercept(X, Z, y):
        level = numpyro.sample("level", dist.Normal(0.0, 1.3))
        f = npgp.SparseGP("f", kernel(), Z).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X) + level, npgp.Gaussian(variance=NOISE), obs=y)

    guide = coupled(with_intercept)
    # The ELBO is a polynomial of degree 2 in t: quadrature is exact.
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)
    weights = weights / weights.sum()

    def elbo(params, *args):
        level = params["level_auto_loc"] + params["level_auto_scale"] * nodes

        def at(value):
            return make_elbo(with_intercept, handlers.substitute(guide, data={"level": value}))(
                jax.random.key(0), params, *args
            )

        return jnp.sum(weights * jax.vmap(at)(level))

    with jax.enable_x64(True):
        return compiled(elbo)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), width=st.just(1.0) | st.floats(0.01, 2.0), strength=st.floats(0.0, 3.0))
@example(seed=0, width=1.0, strength=0.0)
@example(seed=1, width=1.0, strength=0.0)
def test_never_above_the_evidence(bound, seed, width, strength):
    rng = np.random.default_rng(seed)
    X, y = rng.uniform(0, 3, (5, 1)), rng.normal(size=5)
    covariance = rbf(X, X) + 1.3**2 + NOISE * np.eye(5)
    # The optimum, and away from it.
    A = np.linalg.cholesky(rbf(X, X) + 1e-10 * np.eye(5)).T
    S = np.linalg.inv(np.eye(5) + A @ A.T / NOISE)
    level = 1.3**2 * np.sum(np.linalg.solve(covariance, y))
    deviation = np.sqrt(1.3**2 - 1.3**4 * np.sum(np.linalg.inv(covariance)))
    params = {
        "level_auto_loc": level + strength * deviation * rng.normal(),
        "level_auto_scale": width * deviation,
        "f.u.loc": S @ A @ (y - level) / NOISE + 0.1 * strength * rng.normal(size=5),
        "f.u.scale_tril": np.linalg.cholesky(S),
        "f.u.coupling": -(S @ A @ np.ones((5, 1)) / NOISE) * deviation + 0.1 * strength * rng.normal(size=(5, 1)),
    }
    with jax.enable_x64(True):
        value = float(bound(jax.tree.map(jnp.asarray, params), *map(jnp.asarray, (X, X, y))))
    evidence = log_normal(y, covariance)
    assert value <= evidence + 1e-6
    if strength == 0.0 and width == 1.0:
        assert value >= evidence - 1e-4  # what jitter costs


# ---------------------------------------------------------------------------------------------------------------
# The ELBO


def test_without_coupling_it_is_the_independent_guide(float64):
    """Draw by draw, to rounding (two programs, which some versions of XLA sum in other orders); with coupling not."""
    one, other = npgp.AutoSparseGP(model, AutoNormal, dependence="independent"), coupled(model)
    shapes(model, one, X, Y)  # an autoguide's first call takes a random key for itself
    params = start(model, other, X, Y) | random_params("odvgp")
    assert np.all(params["f.u.coupling"] == 0) and params["f.u.coupling"].shape == (3, SIZE)
    assert np.all(params["f.v.coupling"] == 0) and params["f.v.coupling"].shape == (2, SIZE)
    elbos = [make_elbo(model, guide, Trace_ELBO()) for guide in (one, other)]
    both = over_keys(lambda *args: [elbo(*args) for elbo in elbos], 4, params, X, Y)
    np.testing.assert_allclose(both[0], both[1], rtol=1e-14)
    other_elbo = over_keys(elbos[1], 4, params | random_couplings("odvgp"), X, Y)
    assert np.all(np.abs(other_elbo - both[0]) > 1e-3)


@pytest.mark.parametrize("structure", ["odvgp"])
def test_rows_and_divergence_are_those_of_the_moved_mean(structure, float64):
    """By dense algebra, at what the other guide has drawn."""
    structured = partial(model, structure=structure)
    guide = coupled(structured)
    params = start(structured, guide, X, Y) | random_params(structure) | random_couplings(structure)

    def run(params):
        guide_trace, trace = traces(structured, guide, params, jnp.asarray(X), jnp.asarray(Y))
        drawn = {name: guide_trace[name]["value"] for name in T}
        names = sites(structure)
        kl = sum(jnp.sum(dist.kl_divergence(guide_trace[name]["fn"], trace[name]["fn"])) for name in names)
        return drawn, trace["y"]["fn"].log_prob(Y), kl

    drawn, rows, kl = compiled(run)(params)
    t = standardized(drawn, params)
    assert np.min(np.abs(t)) > 1e-3
    dense = Dense(structure, X, moved(params, t), lengthscale=float(drawn["lengthscale"]))
    dense.mean = dense.mean + drawn["slope"][0] * X[:, 0] + drawn["slope"][1]
    np.testing.assert_allclose(rows, dense.rows(Y, noise=float(drawn["noise"])), rtol=1e-6)
    np.testing.assert_allclose(kl, dense.kl, rtol=1e-6)


def test_unwhitened_parameters(float64):
    """m_u + C t are inducing values."""
    unwhitened = partial(model, structure="svgp", whitened=False)
    guide = coupled(unwhitened)
    params = start(unwhitened, guide, X, Y) | random_couplings("svgp")
    drawn, u = compiled(
        lambda p: (lambda g: ({n: g[n]["value"] for n in T}, g["f.u"]["fn"].loc))(
            traces(unwhitened, guide, p, jnp.asarray(X), jnp.asarray(Y))[0]
        )
    )(params)
    Z = STRUCTURES["svgp"][0][0]
    L = np.linalg.cholesky(rbf(Z, Z, float(drawn["lengthscale"])))
    np.testing.assert_allclose(L @ u, params["f.u.coupling"] @ standardized(drawn, params), rtol=1e-6)


@pytest.mark.parametrize("guide", [AutoMultivariateNormal])
def test_gradients_are_those_of_the_loss(guide, float64):
    """Of centers and scales too: by central differences, all parameters at once and one by one."""
    coupled_guide = coupled(model, guide)
    params = start(model, coupled_guide, X, Y) | random_params("odvgp") | random_couplings("odvgp")
    elbo = make_elbo(model, coupled_guide)
    gradient = compiled(jax.grad(lambda p: elbo(jax.random.key(0), p, X, Y)))(params)
    value = compiled(lambda p: elbo(jax.random.key(0), p, X, Y))
    rng = np.random.default_rng(0)
    for name in params:
        direction = (
            np.tril(rng.normal(size=params[name].shape)) if "tril" in name else rng.normal(size=params[name].shape)
        )
        h = 1e-5
        ends = [value(params | {name: params[name] + sign * h * direction}) for sign in (1, -1)]
        slope = np.sum(np.asarray(gradient[name]) * direction)
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * h), rtol=1e-5, atol=1e-6, err_msg=name)
        assert np.any(np.asarray(gradient[name]) != 0), name


def test_minibatches_are_unbiased(float64):
    """The mean over all batches is the ELBO of all rows, for the same draws of the other sites."""

    def batched(X, y, rows):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        f = sparse_gp("solve").draw()
        with npgp.plate("data", 8, rows):
            npgp.observe("y", f(X) + slope, npgp.Gaussian(variance=NOISE), obs=y)

    guide = coupled(batched)
    args = jnp.asarray(X), jnp.asarray(Y), jnp.arange(8)
    params = start(batched, guide, *args) | random_params("solve") | random_couplings("solve", 1)
    assert params["f.u.coupling"].shape == (3, 1)
    elbo = compiled(make_elbo(batched, guide))
    whole = elbo(jax.random.key(3), params, *args)
    parts = [elbo(jax.random.key(3), params, *(a[2 * i : 2 * i + 2] for a in args)) for i in range(4)]
    assert np.std(parts) > 0.1
    np.testing.assert_allclose(np.mean(parts), whole, rtol=1e-10)


def test_functions_in_a_plate(float64):
    """C has the plate's batch, and each output its own."""

    def two(X, y):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("outputs", 2, dim=-2):
            f = sparse_gp("mean-field", jitter=1e-12).draw()
            with numpyro.plate("data", X.shape[0]):
                npgp.observe("y", f(X) + slope, npgp.Gaussian(variance=NOISE), obs=y)

    guide = coupled(two)
    y = np.stack([Y, Y[::-1]])
    rng = np.random.default_rng(2)
    params = start(two, guide, X, y)
    assert params["f.u.coupling"].shape == (2, 1, 3, 1)
    params |= {name: jnp.asarray(rng.uniform(0.2, 0.6, params[name].shape)) for name in params if name[0] == "f"}

    def run(params):
        guide_trace, trace = traces(two, guide, params, jnp.asarray(X), jnp.asarray(y))
        return guide_trace["slope"]["value"], trace["y"]["fn"].log_prob(y)

    slope, rows = compiled(run)(params)
    t = (slope - params["slope_auto_loc"]) / params["slope_auto_scale"]
    for i in range(2):
        own = {name: np.asarray(params[name])[i, 0] for name in params if name[0] == "f"}
        dense = Dense("mean-field", X, moved(own, np.atleast_1d(t)))
        dense.mean = dense.mean + slope
        np.testing.assert_allclose(rows[i], dense.rows(y[i]), rtol=1e-6)


def test_natural_gradients_and_training(float64):
    """C is trained by the other optimizer, and training finds what the independent guide cannot."""

    def found(dependence):
        guide = npgp.AutoSparseGP(trend, AutoMultivariateNormal, dependence=dependence)
        svi = SVI(trend, guide, npgp.natural_gradient(0.5, npgp.adam(0.03, 1500)), TraceMeanField_ELBO())

        @compiled
        def run():
            state = svi.init(jax.random.key(0), X, Y)
            state, losses = jax.lax.scan(lambda state, _: svi.update(state, X, Y), state, length=1500)
            return svi.get_params(state), losses

        params, losses = run()
        assert ("f.u.coupling" in params) == (dependence == "coupled")
        return -float(np.mean(losses[-50:])), params

    K, H = rbf(X, X), np.column_stack([np.ones(8), X[:, 0]])
    evidence = log_normal(Y, K + H @ np.diag([1.5**2, 0.7**2]) @ H.T + NOISE * np.eye(8))
    (independent, _), (following, _) = found("independent"), found("coupled")
    assert independent < evidence - 0.5
    assert abs(following - evidence) < 0.05


# ---------------------------------------------------------------------------------------------------------------
# Draws, medians, quantiles, posteriors


def make_params(guide_class, seed=5):
    guide = coupled(model, guide_class)
    params = start(model, guide, X, Y) | random_params("odvgp") | random_couplings("odvgp")
    rng = np.random.default_rng(seed)
    if "auto_scale_tril" in params:
        factor = np.tril(0.2 * rng.normal(size=(SIZE, SIZE)), -1) + np.diag(rng.uniform(0.1, 0.3, SIZE))
        params |= {"auto_scale_tril": jnp.asarray(factor), "auto_loc": jnp.asarray(rng.normal(size=SIZE))}
    return guide, params


def test_quantiles_are_those_of_draws(float64):
    """Of ε over all values of t; and ε and t are correlated as C says."""
    guide, params = make_params(AutoLowRankMultivariateNormal)
    count, levels = 20_000, [0.1, 0.5, 0.9]
    draws, quantiles, median = compiled(
        lambda p: (
            guide.sample_posterior(jax.random.key(0), p, X, Y, sample_shape=(count,)),
            guide.quantiles(p, levels),
            guide.median(p),
        )
    )(params)
    assert set(quantiles) == set(median) == {*T, "f.u", "f.v"}
    for name, values in quantiles.items():
        below = np.mean(np.asarray(draws[name]) < np.asarray(values)[:, None], axis=1)  # (3, entries)
        z = (below.T - levels) / np.sqrt(np.multiply(levels, np.subtract(1, levels)) / count)
        assert np.abs(z).max() < Z_LIMIT, name
        np.testing.assert_allclose(values[1], median[name], rtol=1e-8)
    np.testing.assert_array_equal(median["f.u"], params["f.u.loc"])
    logs = [np.log(draws["lengthscale"])[:, None], draws["slope"], np.log(draws["noise"])[:, None]]
    t = np.concatenate([(v - v.mean(0)) / v.std(0) for v in map(np.asarray, logs)], axis=1)
    for site in ("f.u", "f.v"):
        expected = np.asarray(params[f"{site}.coupling"]) @ (t.T @ t / count)
        epsilon = np.asarray(draws[site])
        found = (epsilon - epsilon.mean(0)).T @ t / count
        assert np.abs(found - expected).max() < Z_LIMIT * epsilon.std(0).max() * np.sqrt(2 / count)


def test_posteriors_follow_the_draw_and_can_be_saved(tmp_path, float64):
    guide, params = make_params(AutoNormal)

    @compiled
    def run(key):
        posterior = npgp.posterior("f", model, guide, params, X, Y, rng_key=key)
        trace = handlers.trace(handlers.substitute(handlers.seed(guide, jax.random.split(key)[1]), params))
        return posterior, {name: site["value"] for name, site in trace.get_trace(X, Y).items() if name in T}

    means = []
    for key in keys(2):
        posterior, drawn = run(key)
        expected = moved(params, standardized(drawn, params))
        for site, block in zip(("f.u", "f.v"), posterior.q, strict=True):
            np.testing.assert_allclose(block.loc, expected[f"{site}.loc"], rtol=1e-9)
        npgp.save(tmp_path / "posterior.npz", posterior)
        again = npgp.load(tmp_path / "posterior.npz")
        means.append(np.asarray(posterior.mean_and_variance(X)[0]))
        np.testing.assert_array_equal(again.mean_and_variance(X)[0], means[-1])
    assert np.abs(means[0] - means[1]).min() > 1e-3


def test_posterior_of_a_component_at_given_values(float64):
    gp, t = sparse_gp("odvgp"), np.array([0.3, -1.0, 0.5, 2.0])
    params = random_params("odvgp") | random_couplings("odvgp")
    expected = gp.posterior(moved(params, t))
    found = gp.posterior(params, t=t)
    for one, other in zip(found.q, expected.q, strict=True):
        np.testing.assert_allclose(one.loc, other.loc, rtol=1e-12)
    np.testing.assert_array_equal(gp.posterior(params).q[0].loc, params["f.u.loc"])
    with pytest.raises(ValueError, match=r"f.u.coupling has shape \(3, 4\), but t has 2 values"):
        gp.posterior(params, t=t[:2])
    with pytest.raises(KeyError, match=r"'f.u.coupling'"):
        gp.posterior(random_params("odvgp"), t=t)
    with pytest.raises(ValueError, match=r"t has shape \(2, 2\); it must be a vector"):
        gp.posterior(params, t=t.reshape(2, 2))


def test_a_value_given_from_outside_is_followed(float64):
    """``substitute`` around the guide: q(ε) is that given the value, and not that given what the guide drew."""
    guide, params = make_params(AutoMultivariateNormal)
    value = jnp.array([1.3, -0.4])

    def run(params):
        given = handlers.substitute(handlers.seed(guide, 1), params | {"slope": value})
        trace = handlers.trace(given).get_trace(X, Y)
        return {n: trace[n]["value"] for n in T}, trace["f.u"]["fn"].loc

    drawn, loc = compiled(run)(params)
    np.testing.assert_array_equal(drawn["slope"], value)
    z = np.concatenate([[np.log(drawn["lengthscale"])], value, [np.log(drawn["noise"])]])
    deviation = np.linalg.norm(np.asarray(params["auto_scale_tril"]), axis=1)
    # The latent vector's order is not the model's: found by name.
    vector = guide._auto._unpack_latent(params["auto_loc"]), guide._auto._unpack_latent(deviation)
    center, scale = (np.concatenate([np.ravel(v[name]) for name in T]) for v in vector)
    np.testing.assert_allclose(loc, moved(params, (z - center) / scale)["f.u.loc"], rtol=1e-9)


def test_flows_and_their_medians(float64):
    """Unconstrained values as they are; the median is not known."""
    guide = coupled(model, partial(AutoIAFNormal, num_flows=1, hidden_dims=[4]))
    params = start(model, guide, X, Y) | random_params("odvgp") | random_couplings("odvgp")

    def run(params):
        trace = handlers.trace(handlers.substitute(handlers.seed(guide, 1), params)).get_trace(X, Y)
        return {name: trace[name]["value"] for name in T}, trace["f.u"]["fn"].loc

    drawn, loc = compiled(run)(params)
    t = np.concatenate([[np.log(drawn["lengthscale"])], drawn["slope"], [np.log(drawn["noise"])]])
    np.testing.assert_allclose(loc, moved(params, t)["f.u.loc"], rtol=1e-9)
    with pytest.raises(NotImplementedError, match="'lengthscale', which is not Gaussian in unconstrained space"):
        guide.median(params)


# ---------------------------------------------------------------------------------------------------------------
# Which sites


def by_hand(X, y=None, **_):
    """A guide with a log-normal and a gamma distribution."""
    numpyro.sample("lengthscale", dist.LogNormal(numpyro.param("a", 0.2), 0.3))
    numpyro.sample("noise", dist.Gamma(5.0, numpyro.param("b", 10.0)))


def couplings_of(model, *args, guide=AutoNormal, **more):
    found = coupled(model, guide, **more)
    widths = {name: shape[-1] for name, shape in shapes(model, found, *args).items() if name.endswith("coupling")}
    return widths, found._coupling.sizes


def test_sites_by_name_and_by_guide(float64):
    def sizes(guide=AutoNormal, **more):
        widths, found = couplings_of(model, X, Y, guide=guide, **more)
        assert set(widths.values()) <= {sum(found.values())}
        return found

    assert list(sizes().items()) == list(T.items())  # in the model's order
    assert sizes(couple=["noise", "slope"]) == {"slope": 2, "noise": 1}
    hidden = handlers.block(model, hide=["f.u", "f.v", "y"])
    delta = AutoDelta(handlers.block(model, expose=["slope"]))
    assert sizes([delta, AutoNormal]) == {"lengthscale": 1, "noise": 1}
    assert sizes(AutoDelta) == {}
    parts = AutoGuideList(hidden)
    parts.append(AutoMultivariateNormal(handlers.block(hidden, hide=["slope"])))
    parts.append(AutoDelta(handlers.block(hidden, expose=["slope"])))
    assert sizes(parts) == {"lengthscale": 1, "noise": 1}
    assert sizes([by_hand, AutoNormal]) == T
    with pytest.raises(ValueError, match="couple has 'slope', to which AutoDelta gives one value"):
        sizes([delta, AutoNormal], couple=["slope"])


def test_a_guide_by_hand_for_the_others(float64):
    """Normal distributions in unconstrained space are centered and scaled, others taken as they are."""
    guide = coupled(model, [by_hand, AutoNormal])
    params = start(model, guide, X, Y) | random_couplings("odvgp")

    def run(params):
        trace = handlers.trace(handlers.substitute(handlers.seed(guide, 1), params)).get_trace(X, Y)
        return {name: trace[name]["value"] for name in T}, trace["f.v"]["fn"].loc

    drawn, loc = compiled(run)(params)
    slope = (drawn["slope"] - params["slope_auto_loc"]) / params["slope_auto_scale"]
    t = np.concatenate([[(np.log(drawn["lengthscale"]) - 0.2) / 0.3], slope, [np.log(drawn["noise"])]])
    np.testing.assert_allclose(loc, moved(params, t)["f.v.loc"], rtol=1e-9)


def hierarchy(X, y, groups=5, size=None, rows_elsewhere=False):
    """Levels of groups, and latent values for each row."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("group", groups):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    kind = numpyro.sample("kind", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
    f = sparse_gp().draw()
    above = numpyro.sample("above", dist.Normal(npgp.sample("value", f(X[:2])).sum(), 1.0))
    if rows_elsewhere:
        with numpyro.plate("rows", 8):
            numpyro.sample("other", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", 8, subsample_size=size) as index:
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        mean = f(X[index]) + level + effect[0] + kind + above + a
        npgp.observe("y", mean, npgp.Gaussian(variance=NOISE), obs=y[index])


def candidates(model, **more):
    """What q(ε) may follow, without a guide for the rest."""
    guide = coupled(model, **more)
    guide._setup(jnp.asarray(X), jnp.asarray(Y))
    return guide._coupling._candidates


def test_sites_of_rows_are_left_out(float64):
    assert candidates(hierarchy) == {"level": 1, "effect": 5}
    assert candidates(partial(hierarchy, size=2)) == {"level": 1, "effect": 5}
    # As many members as rows: of rows, unless named.
    twice = partial(hierarchy, rows_elsewhere=True)
    assert candidates(twice) == {"level": 1, "effect": 5}
    assert "other" in candidates(twice, couple=["other", "level"])


SENTENCES = {
    "f.u": "belongs to a GP; it may have",
    "levle": r"is no latent site of the model; it may have \['level', 'effect'\]",
    "y": "is no latent site of the model",
    "a": "is local to the rows of plate 'data': q",
    "kind": "is discrete: q",
    "above": "has a prior that depends on f.u: q",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sites_that_cannot_be_followed_by_name(name, float64):
    with pytest.raises(ValueError, match=f"couple has '{name}', which {SENTENCES[name]}"):
        candidates(hierarchy, couple=["level", name])


def test_thousands_of_effects_stay_affordable(float64):
    """Above 200 entries sites of more than 50 are left out, unless named."""

    def grouped(X, y, groups):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.plate("group", groups):
            effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        f = sparse_gp().draw()
        npgp.observe("y", f(X) + level + effect[0], npgp.Gaussian(variance=NOISE), obs=y)

    assert couplings_of(partial(grouped, groups=199), X, Y)[0] == {"f.u.coupling": 200}
    with pytest.warns(UserWarning, match=r"q\(ε\) does not follow \['effect'\], of more than 50 entries"):
        assert couplings_of(partial(grouped, groups=200), X, Y)[0] == {"f.u.coupling": 1}
    named = couplings_of(partial(grouped, groups=3000), X, Y, couple=["effect"])
    assert named == ({"f.u.coupling": 3000}, {"effect": 3000})


def test_discrete_sites_are_not_followed():
    def by_hand():
        numpyro.sample("level", dist.Normal(0.0, 2.0))
        numpyro.sample("class", dist.Poisson(2.0))

    assert set(spreads(by_hand, handlers.trace(handlers.seed(by_hand, 0)).get_trace())) == {"level"}


def test_arguments(float64):
    with pytest.raises(
        ValueError, match="dependence is 'copula'; it must be 'pseudo-data', 'sites', 'coupled' or 'independent'"
    ):
        npgp.AutoSparseGP(model, dependence="copula")
    with pytest.raises(ValueError, match='dependence="independent" says that it is to none'):
        npgp.AutoSparseGP(model, couple=["slope"], dependence="independent")
    with pytest.raises(TypeError, match="couple is 'slope'; it must be a list"):
        coupled(model, couple="slope")
    with pytest.raises(ValueError, match="couple is empty"):
        coupled(model, couple=[])


# ---------------------------------------------------------------------------------------------------------------
# Hand-written guides, and nearest neighbors


def test_a_hand_written_guide_is_the_automatic_one(float64):
    def written(X, y=None):
        loc, scale = numpyro.param("beta_auto_loc", jnp.zeros(2)), numpyro.param("beta_auto_scale", jnp.ones(2))
        beta = numpyro.sample("beta", dist.Normal(loc, scale).to_event(1))
        npgp.SparseGP("f", kernel(), X, jitter=1e-14).guide(t=(beta - loc) / scale)

    automatic = coupled(trend)
    params = start(trend, automatic, X, Y)
    rng = np.random.default_rng(0)
    params |= {"f.u.coupling": jnp.asarray(rng.normal(size=(8, 2))), "f.u.loc": jnp.asarray(rng.normal(size=8))}
    assert shapes(trend, written, X, Y) == {name: value.shape for name, value in params.items()}

    @compiled
    def run(params):
        values = {"beta": jnp.array([0.7, -0.2])}
        return [
            -TraceMeanField_ELBO().loss(jax.random.key(0), params, trend, handlers.substitute(g, values), X, Y)
            for g in (automatic, written)
        ]

    found = run(params)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-10)
    with pytest.raises(ValueError, match=r"t has shape \(\); it must be a vector"):
        sparse_gp().guide(t=0.3)
    with pytest.raises(TypeError, match="t has dtype complex128"):
        sparse_gp().guide(t=np.array([1j]))


def test_nearest_neighbors(float64):
    def neighbors(X, near, y):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = npgp.VNNGP("f", kernel(), POINTS, 3, batch_size=4).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X, near) + level, npgp.Gaussian(variance=NOISE), obs=y)

    one, other = npgp.AutoSparseGP(neighbors, dependence="independent"), coupled(neighbors)
    args = X, np.arange(8)[:, None], Y
    shapes(neighbors, one, *args)
    params = start(neighbors, other, *args)
    assert params["f.u.coupling"].shape == (8, 1)
    C = jnp.asarray(np.random.default_rng(0).normal(size=(8, 1)))

    @compiled
    def run(params):
        def elbo(guide, params):
            value = handlers.substitute(guide, {"level": params["level_auto_loc"] + 0.7 * params["level_auto_scale"]})
            return make_elbo(neighbors, value)(jax.random.key(0), params, *args)

        at = {"f.u.loc": params["f.u.loc"] + 0.7 * C[:, 0]}
        return elbo(one, params), elbo(other, params), elbo(one, params | at), elbo(other, params | {"f.u.coupling": C})

    first, zero, shifted, following = run(params)
    assert first == zero and abs(shifted - first) > 0.1
    np.testing.assert_allclose(following, shifted, rtol=1e-10)
    gp = npgp.VNNGP("f", kernel(), POINTS, 3)
    params = params | {"f.u.coupling": C}
    means = [gp.posterior(params, t=t).mean_and_variance(X)[0] for t in ([0.0], [1.0])]
    assert np.abs(means[0] - means[1]).max() > 0.1
    np.testing.assert_array_equal(gp.posterior(params).mean_and_variance(X)[0], means[0])
