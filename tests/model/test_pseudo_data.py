"""q(ε) given pseudo-data: exactness at every hyperparameter, bounds, every structure, draws; the guide's defaults."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    CONDITIONALS,
    NOISE,
    STRUCTURES,
    VARIANCE,
    Dense,
    X,
    Y,
    compiled,
    make_elbo,
    rbf,
    sites,
    traces,
)
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoNormal
from oracles import log_normal

import npgp
from npgp.sparse.projection import factorize
from npgp.variational.parameterizations import pseudo_posterior

Z_LIMIT = 4.5


def start(model, guide, *args):
    """The parameters that SVI starts from."""
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    return compiled(lambda *args: svi.get_params(svi.init(jax.random.key(0), *args)))(*args)


def random_data(structure, size, seed=1, name="f"):
    """Parameters of pseudo-data, and of mean-only blocks, that are neither the start nor the optimum."""
    rng, params = np.random.default_rng(seed), {}
    for site, block, kind in zip(sites(structure, name), *STRUCTURES[structure], strict=True):
        count = len(block)
        params[f"{site}.coupling"] = 0.3 * rng.normal(size=(count, size))
        if kind == "mean-only":
            params[f"{site}.loc"] = rng.normal(size=count)
            continue
        params[f"{site}.pseudo_loc"] = rng.normal(size=count)
        params[f"{site}.pseudo_scale"] = rng.uniform(0.1, 1.0, count)
        params[f"{site}.unit"] = np.array([1.3])
        params[f"{site}.noise_coupling"] = 0.3 * rng.normal(size=size)
        if kind == "dense":
            params[f"{site}.pseudo_lower"] = rng.normal(size=(count, count))
    return jax.tree.map(jnp.asarray, params)


def independent_params(structure, params, t, name="f", **hyperparameters):
    """What the independent guide's parameters are where it has the same q(ε): from dense matrices, inverted."""
    blocks, kinds = STRUCTURES[structure]
    inducing = np.concatenate(blocks)
    factor = np.linalg.cholesky(rbf(inducing, inducing, **hyperparameters))
    found, begin = {}, 0
    for site, block, kind in zip(sites(structure, name), blocks, kinds, strict=True):
        rows = slice(begin, begin := begin + len(block))
        L, C = factor[rows, rows], np.asarray(params[f"{site}.coupling"])
        if kind == "mean-only":
            found[f"{site}.loc"] = np.asarray(params[f"{site}.loc"]) + C @ t
            continue
        values = np.asarray(params[f"{site}.unit"]) * np.asarray(params[f"{site}.pseudo_loc"]) + C @ t
        R = np.eye(len(block))
        if kind == "dense":
            R = R + np.tril(np.asarray(params[f"{site}.pseudo_lower"]), -1)
        noise = np.asarray(params[f"{site}.pseudo_scale"]) * np.exp(np.asarray(params[f"{site}.noise_coupling"]) @ t)
        R = R / noise[:, None]
        of_u = np.linalg.inv(np.linalg.inv(L @ L.T) + R @ R.T)
        found[f"{site}.loc"] = np.linalg.solve(L, of_u @ R @ R.T @ values)
        found[f"{site}.scale_tril"] = np.linalg.solve(L, np.linalg.cholesky(of_u))
    return found


# ---------------------------------------------------------------------------------------------------------------
# The exact posterior is in the family, whatever the hyperparameters


def trend(X, y=None, covariances="dense"):
    """Two linear effects and f, with inducing points at all inputs, and all hyperparameters sampled."""
    beta = numpyro.sample("beta", dist.Normal(jnp.zeros(2), jnp.array([1.5, 0.7])).to_event(1))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.3, 0.4))
    scale = numpyro.sample("scale", dist.LogNormal(0.2, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    k = npgp.RBF(lengthscale, variance=scale**2)
    f = npgp.SparseGP("f", k, X, covariances, jitter=1e-14).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X) + beta[0] + beta[1] * X[:, 0], npgp.Gaussian(scale=noise), obs=y)


H = np.column_stack([np.ones(8), X[:, 0]])


T = ("beta", "lengthscale", "scale", "noise")


@pytest.mark.parametrize("covariances", ["diagonal"])
def test_the_evidence_at_every_hyperparameter(covariances, float64):
    """At every θ the ELBO is log p(y | θ) + log p(θ) − log q(θ): what it lacks is KL[q(θ) ‖ p(θ | y)] alone."""
    structured = partial(trend, covariances=covariances)
    guide = npgp.AutoSparseGP(structured, dependence="pseudo-data")
    params, rng = start(structured, guide, X, Y), np.random.default_rng(0)
    factor = np.tril(0.2 * rng.normal(size=(5, 5)), -1) + np.diag(rng.uniform(0.1, 0.5, 5))
    loc, latent = rng.normal(size=5), rng.normal(size=(6, 5))
    # Λ = I/σ², values y − H β; t is β, log lengthscale, log scale and log σ less their centers.
    exact = {
        "joint_loc": loc,
        "joint_scale_tril": factor,
        "f.u.unit": np.ones(1),
        "f.u.pseudo_loc": Y - H @ loc[:2],
        "f.u.pseudo_scale": np.full(8, np.exp(loc[4])),
        "f.u.coupling": np.hstack([-H, np.zeros((8, 3))]),
        "f.u.noise_coupling": np.eye(5)[4],
    } | ({"f.u.pseudo_lower": np.zeros((8, 8))} if covariances == "dense" else {})
    assert set(params) == set(exact)

    def elbo(z, params):
        given = handlers.substitute(guide, data={"_auto_latent": z})
        return make_elbo(structured, given)(jax.random.key(0), params, X, Y)

    values = compiled(jax.vmap(elbo, (0, None)))(jnp.asarray(latent), jax.tree.map(jnp.asarray, exact))
    prior_mean, prior = np.array([0, 0, -0.3, 0.2, -1]), np.diag(np.square([1.5, 0.7, 0.4, 0.5, 0.3]))
    gaps = []
    for value, z in zip(values, latent, strict=True):
        own = log_normal(z - loc, factor @ factor.T)
        lengthscale, scale, noise = np.exp(z[2:])
        evidence = log_normal(Y - H @ z[:2], rbf(X, X, lengthscale, scale**2) + noise**2 * np.eye(8))
        np.testing.assert_allclose(value, evidence + log_normal(z - prior_mean, prior) - own, rtol=0, atol=1e-8)
        gaps.append(evidence)
    assert np.ptp(gaps) > 1.0


def sampled(X, y=None, structure="svgp", conditional="tight"):
    """A slope, and hyperparameters of kernel and noise."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    blocks, kinds = STRUCTURES[structure]
    k = npgp.RBF(lengthscale, variance=VARIANCE)
    f = npgp.SparseGP("f", k, [jnp.asarray(b.copy()) for b in blocks], kinds, jitter=1e-12).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X) + slope * X[:, 0], npgp.Gaussian(variance=noise), obs=y, conditional=conditional)


ORDER = ("lengthscale", "slope", "noise")


def centered(drawn, params):
    """t under ``AutoNormal``, in the model's order."""
    z = {"lengthscale": np.log(drawn["lengthscale"]), "slope": drawn["slope"], "noise": np.log(drawn["noise"])}
    return np.array([z[name] - params[f"{name}_auto_loc"] for name in ORDER])


@pytest.mark.parametrize("structure", ["mean-field", "solve"])
def test_rows_and_divergence_are_those_of_dense_algebra(structure, float64):
    model = partial(sampled, structure=structure)
    guide = npgp.AutoSparseGP(model, AutoNormal, dependence="pseudo-data")
    params = start(model, guide, X, Y)
    assert set(random_data(structure, 3)) == {name for name in params if name.startswith("f.")}
    params = params | random_data(structure, 3)

    def run(params):
        guide_trace, trace = traces(model, guide, params, jnp.asarray(X), jnp.asarray(Y))
        kl = sum(jnp.sum(dist.kl_divergence(guide_trace[n]["fn"], trace[n]["fn"])) for n in sites(structure))
        return {n: guide_trace[n]["value"] for n in ORDER}, trace["y"]["fn"].log_prob(Y), kl

    drawn, rows, kl = compiled(run)(params)
    t, lengthscale = centered(drawn, params), float(drawn["lengthscale"])
    same = independent_params(structure, params, t, lengthscale=lengthscale)
    if structure == "mean-field":  # whose S is dense given pseudo-data
        oracle = Dense((STRUCTURES[structure][0], ("dense",)), X, same, lengthscale=lengthscale)
    else:
        oracle = Dense(structure, X, same, lengthscale=lengthscale)
    oracle.mean = oracle.mean + float(drawn["slope"]) * X[:, 0]
    np.testing.assert_allclose(rows, oracle.rows(Y, noise=float(drawn["noise"])), rtol=1e-6)
    np.testing.assert_allclose(kl, oracle.kl, rtol=1e-6)


#: Each kind of block and of conditional: what rows and divergence are is above, of every structure.
TRIED = [("solve", "grouped"), ("odvgp", "tight"), ("mean-field", "prior")]


@pytest.fixture(scope="module")
def bounds():
    """For each structure and conditional: the bound at given other sites, less what these have to do with it."""

    def made(structure, conditional):
        model = partial(sampled, structure=structure, conditional=CONDITIONALS[conditional])
        guide = npgp.AutoSparseGP(model, AutoNormal, dependence="pseudo-data")

        def bound(params, values):
            guide_trace, trace = traces(model, guide, params, jnp.asarray(X), jnp.asarray(Y), values=values)
            kl = sum(jnp.sum(dist.kl_divergence(guide_trace[n]["fn"], trace[n]["fn"])) for n in sites(structure))
            return jnp.sum(trace["y"]["fn"].log_prob(Y)) - kl

        return compiled(bound), start(model, guide, X, Y)

    with jax.enable_x64(True):
        return {pair: made(*pair) for pair in TRIED}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    pair=st.sampled_from(TRIED),
    width=st.floats(0.01, 3.0),
)
def test_never_above_the_evidence(bounds, seed, pair, width):
    bound, begin = bounds[pair]
    rng = np.random.default_rng(seed)
    params = begin | random_data(pair[0], 3, seed)
    for name in params:
        if name.endswith("pseudo_scale"):
            params[name] = width * params[name]
        if name.endswith("pseudo_loc"):
            params[name] = (
                np.interp((0.5, 2.0, 3.5)[: len(params[name])], *np.sort([X[:, 0], Y], axis=1)) * rng.uniform()
            )
    lengthscale, noise = np.exp(rng.normal(0.0, 0.7)), np.exp(rng.normal(-1.0, 1.0))
    values = {"lengthscale": lengthscale, "slope": 0.3 * rng.normal(), "noise": noise}
    with jax.enable_x64(True):
        value = float(bound(params, jax.tree.map(jnp.asarray, values)))
    evidence = log_normal(Y - values["slope"] * X[:, 0], rbf(X, X, lengthscale) + noise * np.eye(8))
    assert value <= evidence + 1e-8


def test_gradients_are_those_of_the_loss(float64):
    model = partial(sampled, structure="solve")
    guide = npgp.AutoSparseGP(model, dependence="pseudo-data")
    params = start(model, guide, X, Y) | random_data("solve", 3)
    elbo = make_elbo(model, guide)
    gradient = compiled(jax.grad(lambda p: elbo(jax.random.key(0), p, X, Y)))(params)
    value, rng, h = compiled(lambda p: elbo(jax.random.key(0), p, X, Y)), np.random.default_rng(0), 1e-5
    for name in params.keys() - {"joint_loc", "joint_scale_tril"}:  # whose gradients are the loss's on average
        direction = (
            np.tril(rng.normal(size=params[name].shape))
            if params[name].ndim == 2
            else rng.normal(size=params[name].shape)
        )
        ends = [value(params | {name: params[name] + sign * h * direction}) for sign in (1, -1)]
        slope = np.sum(np.asarray(gradient[name]) * direction)
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * h), rtol=1e-5, atol=1e-6, err_msg=name)
        assert np.any(np.asarray(gradient[name]) != 0), name
    # What training ignores.
    lower = params["f.u.pseudo_lower"] + np.triu(rng.normal(size=(3, 3)))
    assert value(params | {"f.u.pseudo_lower": lower}) == value(params)


# ---------------------------------------------------------------------------------------------------------------
# One block


@pytest.mark.parametrize("diagonal_factor", [False, True])
@pytest.mark.parametrize("diagonal_noise", [False, True])
def test_posterior_given_data(diagonal_factor, diagonal_noise, float64):
    """Of each function of a batch, by inverses."""
    rng = np.random.default_rng(3)
    L = np.diag(rng.uniform(0.5, 2, 4)) if diagonal_factor else np.linalg.cholesky(np.cov(rng.normal(size=(4, 9))))
    z = rng.normal(size=(2, 1, 4))
    R = rng.uniform(0.3, 2, (2, 1, 4))
    full = R[..., None] * np.eye(4) if diagonal_noise else np.tril(rng.normal(size=(2, 1, 4, 4))) + 2 * np.eye(4)
    given_L = jnp.asarray(np.diag(L) if diagonal_factor else L)
    q = pseudo_posterior(given_L, jnp.asarray(z), jnp.asarray(R if diagonal_noise else full), diagonal_factor)
    assert q.batch_shape == (2, 1)
    assert (q.kind == "diagonal") == (diagonal_factor and diagonal_noise)
    for b in range(2):
        H = full[b, 0].T @ L
        S = np.linalg.inv(np.eye(4) + H.T @ H)
        factor = np.diag(q.scale[b, 0]) if q.kind == "diagonal" else q.scale_tril[b, 0]
        np.testing.assert_allclose(np.asarray(factor) @ np.asarray(factor).T, S, atol=1e-12)
        np.testing.assert_allclose(q.loc[b, 0], S @ H.T @ full[b, 0].T @ z[b, 0], atol=1e-12)
        np.testing.assert_array_equal(factor, np.tril(factor))


def test_single_precision_far_from_the_data():
    """Precise data and a kernel of nearly no rank: no NaN, and the bound is that of double precision to .1 nats."""
    X, rng = np.linspace(0, 3, 60)[:, None], np.random.default_rng(0)
    y = np.sin(X[:, 0]) + 0.01 * rng.normal(size=60)

    def bound(dtype, lengthscale, scale):
        inputs = jnp.asarray(X, dtype)
        p = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=scale**2), inputs[::4], jitter=1e-5)
        projector = factorize(p.kernel, p.inducing, p.jitter)
        q = pseudo_posterior(projector.cholesky[0], jnp.asarray(y[::4], dtype), jnp.eye(15, dtype=dtype) / 0.005)
        mean, variance = npgp.variational.Posterior(projector, (q,)).mean_and_variance(inputs)
        return [np.asarray(x) for x in (q.kl(), mean, variance)]

    for lengthscale, scale in ((1.0, 1.0), (0.1, 1.0), (5.0, 1.0), (1.0, 30.0), (1.0, 0.03)):
        single = bound(jnp.float32, lengthscale, scale)
        with jax.enable_x64(True):
            double = bound(jnp.float64, lengthscale, scale)
        # Measured: at most .04 nats, where an amplitude of 30 is known to .005; .0004 of the mean's scale.
        assert abs(single[0] - double[0]) < 0.1
        for one, other in zip(single[1:], double[1:], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-3 * min(scale, 1.0))


# ---------------------------------------------------------------------------------------------------------------
# In use


def test_nothing_to_follow_is_the_independent_guide(float64):
    """To the last bit: no other sites, or no spread."""

    def alone(X, y=None):
        ell = numpyro.param("ell", 0.8, constraint=dist.constraints.positive)
        f = npgp.SparseGP("f", npgp.RBF(ell), X[:3]).draw()
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    for model, guide in ((alone, AutoNormal), (sampled, AutoDelta)):
        one, other = (npgp.AutoSparseGP(model, guide, dependence=d) for d in ("pseudo-data", "independent"))
        params = start(model, one, X, Y)
        assert set(params) == set(start(model, other, X, Y)) and "f.u.scale_tril" in params
        elbos = [compiled(make_elbo(model, g))(jax.random.key(0), params, jnp.asarray(X), Y) for g in (one, other)]
        assert elbos[0] == elbos[1]


def test_one_gaussian_for_few_entries(float64):
    """The smallest sites share one, as long as they have 50 entries together; rows and the rest have their own."""

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.plate("small", 40):
            small = numpyro.sample("small_effect", dist.Normal(0.0, 1.0))
        with numpyro.plate("large", 60):
            large = numpyro.sample("large_effect", dist.Normal(0.0, 1.0))
        f = npgp.SparseGP("f", npgp.RBF(0.7), X[:3]).draw()
        with numpyro.plate("data", 8):
            shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
            npgp.observe("y", f(X) + level + small[0] + large[0] + shift, npgp.Gaussian(variance=NOISE), obs=y)

    params = start(model, npgp.AutoSparseGP(model, dependence="pseudo-data"), X, Y)
    others = {name: value.shape for name, value in params.items() if not name.startswith("f.")}
    ends = ("loc", "scale")
    assert others == {"joint_loc": (41,), "joint_scale_tril": (41, 41)} | {
        f"{name}_auto_{end}": (size,) for name, size in (("large_effect", 60), ("shift", 8)) for end in ends
    }
    assert params["f.u.coupling"].shape == (3, 101)  # all but those of rows
    independent = start(model, npgp.AutoSparseGP(model, dependence="independent"), X, Y)
    assert "joint_loc" not in independent and "f.u.coupling" not in independent


def test_a_scan_over_rows_is_left_out(float64):
    """Its site has as many members as there are rows, and no plate says so."""

    def model(X, y=None):
        def advance(level, _):
            level = numpyro.sample("walk", dist.Normal(level, 0.3))
            return level, level

        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        _, walk = scan(advance, 0.0, None, length=60)
        f = npgp.SparseGP("f", npgp.RBF(0.7), X[:3]).draw()
        with numpyro.plate("data", 60):
            npgp.observe("y", f(X) + walk, npgp.Gaussian(scale=noise), obs=y)

    X = jnp.linspace(0.0, 4.0, 60)[:, None]
    params = start(model, npgp.AutoSparseGP(model, dependence="pseudo-data"), X, jnp.sin(X[:, 0]))
    assert params["f.u.coupling"].shape == (3, 1)
    assert params["joint_loc"].shape == (1,) and params["walk_auto_loc"].shape == (60,)


def test_medians_quantiles_posterior_and_saving(tmp_path, float64):
    model = partial(sampled, structure="odvgp")
    guide = npgp.AutoSparseGP(model, dependence="pseudo-data")
    params = start(model, guide, X, Y) | random_data("odvgp", 3)
    factor = np.tril(0.1 * np.random.default_rng(0).normal(size=(3, 3)), -1) + np.diag([0.3, 0.2, 0.25])
    params["joint_scale_tril"] = jnp.asarray(factor)
    levels = [0.1, 0.5, 0.9]
    both = compiled(lambda params: (guide.median(params, X, Y), guide.quantiles(params, levels, X, Y)))
    median, quantiles = both(params)
    # Where the others have their medians, t is 0.
    same = independent_params("odvgp", params, np.zeros(3), lengthscale=float(median["lengthscale"]))
    for site in ("f.u", "f.v"):
        np.testing.assert_allclose(median[site], same[f"{site}.loc"], rtol=1e-8)
    count = 4000
    draws = guide.sample_posterior(jax.random.key(1), params, X, Y, sample_shape=(count,))
    assert set(median) == set(quantiles) == {"lengthscale", "slope", "noise", "f.u", "f.v"}
    for name, values in quantiles.items():
        below = np.mean(np.asarray(draws[name])[:, None] < np.asarray(values), axis=0).reshape(3, -1)
        error = np.sqrt(np.multiply(levels, np.subtract(1, levels)) * (1 / count + 1 / 1000))
        assert np.abs((below.T - levels) / error).max() < Z_LIMIT, name
    for call in (lambda: guide.median(params), lambda: guide.quantiles(params, 0.5)):
        with pytest.raises(TypeError, match="lacks the model's arguments: q.* is given by pseudo-data"):
            call()
    posterior = npgp.posterior("f", model, guide, params, X, Y)
    npgp.save(tmp_path / "posterior.npz", posterior)
    again = npgp.load(tmp_path / "posterior.npz")
    np.testing.assert_array_equal(again.mean_and_variance(X)[0], posterior.mean_and_variance(X)[0])
    # The component's own, at its own kernel.
    blocks, kinds = STRUCTURES["odvgp"]
    gp = npgp.SparseGP("f", npgp.RBF(0.9, variance=VARIANCE), [jnp.asarray(b) for b in blocks], kinds, jitter=1e-12)
    t = np.array([0.2, -0.4, 0.3])
    expected = independent_params("odvgp", params, t, lengthscale=0.9)
    for block, site in zip(gp.posterior(params, t=t).q, ("f.u", "f.v"), strict=True):
        np.testing.assert_allclose(block.loc, expected[f"{site}.loc"], rtol=1e-8)
    with pytest.raises(KeyError, match="'f.u.pseudo_lower'"):
        gp.posterior({name: value for name, value in params.items() if "lower" not in name}, t=t)
    with pytest.raises(ValueError, match="f.u.pseudo_loc has shape"):
        guide.sample_posterior(jax.random.key(0), params | {"f.u.pseudo_loc": jnp.zeros(5)}, X, Y)


def test_flows_have_medians(float64):
    """t is what it is where the other sites have their medians; here, with no median of a flow, an error."""
    guide = npgp.AutoSparseGP(sampled, partial(AutoIAFNormal, num_flows=1, hidden_dims=[3]), dependence="pseudo-data")
    params = start(sampled, guide, X, Y)
    with pytest.raises(NotImplementedError, match="median: AutoIAFNormal"):
        guide.median(params, X, Y)


def test_a_hand_written_guide_is_the_automatic_one(float64):
    def written(X, y=None):
        values = {}
        for name, of in (("lengthscale", dist.LogNormal), ("slope", dist.Normal), ("noise", dist.LogNormal)):
            loc, scale = numpyro.param(f"{name}_auto_loc", 0.0), numpyro.param(f"{name}_auto_scale", 0.1)
            values[name] = numpyro.sample(name, of(loc, scale))
        t = [
            jnp.log(values["lengthscale"]) - numpyro.param("lengthscale_auto_loc"),
            values["slope"] - numpyro.param("slope_auto_loc"),
            jnp.log(values["noise"]) - numpyro.param("noise_auto_loc"),
        ]
        k = npgp.RBF(values["lengthscale"], variance=VARIANCE)
        gp = npgp.SparseGP("f", k, jnp.asarray(STRUCTURES["svgp"][0][0].copy()), jitter=1e-12)
        gp.guide(t=jnp.stack(t), pseudo_data=True)

    automatic = npgp.AutoSparseGP(sampled, AutoNormal, dependence="pseudo-data")
    params = start(sampled, automatic, X, Y) | random_data("svgp", 3)
    drawn = {"lengthscale": jnp.array(0.8), "slope": jnp.array(0.3), "noise": jnp.array(0.4)}
    elbos = [
        compiled(make_elbo(sampled, handlers.substitute(g, drawn)))(jax.random.key(0), params, jnp.asarray(X), Y)
        for g in (automatic, written)
    ]
    np.testing.assert_allclose(elbos[0], elbos[1], rtol=1e-10)


def test_functions_in_a_plate_and_minibatches(float64):
    """Each function has data of its own; the mean over batches is the ELBO of all rows."""

    def two(X, y, rows):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("outputs", 2, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(lengthscale), X_ALL[:3], jitter=1e-12).draw()
            with npgp.plate("data", 8, rows):
                npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    X_ALL, both = jnp.asarray(X), jnp.asarray(np.stack([Y, -Y]))
    guide = npgp.AutoSparseGP(two, dependence="pseudo-data")
    args = X_ALL, both, jnp.arange(8)
    params = start(two, guide, *args)
    assert params["f.u.pseudo_lower"].shape == (2, 1, 3, 3) and params["f.u.unit"].shape == (2, 1, 1)
    rng = np.random.default_rng(0)
    params |= {n: v + 0.3 * np.abs(rng.normal(size=v.shape)) for n, v in params.items() if n.startswith("f.u")}
    elbo = compiled(make_elbo(two, guide))
    whole = elbo(jax.random.key(3), params, *args)
    parts = [
        elbo(jax.random.key(3), params, X_ALL[i : i + 2], both[:, i : i + 2], jnp.arange(i, i + 2))
        for i in (0, 2, 4, 6)
    ]
    assert np.std(parts) > 0.1
    np.testing.assert_allclose(np.mean(parts), whole, rtol=1e-10)
