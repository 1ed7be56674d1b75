"""Variational nearest-neighbor GPs against dense algebra: the bound, both minibatches, the modes, what is refused."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads
from models import compiled, keys, make_elbo, over_keys, worst_z_of_moments
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.util import log_density
from scipy.stats import norm

import npgp
from npgp.kernels import Matern32

M, N, K = 14, 9, 3
LENGTHSCALE, VARIANCE, NOISE = np.array([0.8, 1.2]), 1.3, 0.2
RNG = np.random.default_rng(5)
Z, X = RNG.uniform(-2, 2, size=(M, 2)), RNG.uniform(-2, 2, size=(N, 2))
Y = np.sin(2 * X[:, 0]) + 0.3 * RNG.normal(size=N)
COUNTS = RNG.poisson(2.0, size=N)
JITTER = 1e-9
LOC, SCALE = RNG.normal(size=M), RNG.uniform(0.2, 0.9, size=M)

dense_kernel = functools.partial(oracles.stationary, "Matern32", variance=VARIANCE)


def neighbors(size=K):
    return npgp.neighbors.nearest_before(Z.copy(), size)


def component(batch_size=None, lengthscale=None, found=None, inducing=None, **options):
    kernel = Matern32(jnp.asarray(LENGTHSCALE) if lengthscale is None else lengthscale, variance=VARIANCE)
    inducing = Z.copy() if inducing is None else inducing
    return npgp.VNNGP("f", kernel, inducing, found or neighbors(), batch_size=batch_size, jitter=JITTER, **options)


def regression(batch_size=None, conditional="prior", likelihood=None, **options):
    def model(X, near, y=None, lengthscale=None, *, size=N):
        f = component(batch_size, lengthscale, **options).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            npgp.observe("y", f(X, near), likelihood or npgp.Gaussian(variance=NOISE), obs=y, conditional=conditional)

    return model


def params(loc=LOC, scale=SCALE):
    return {"f.u.loc": jnp.asarray(loc.copy()), "f.u.scale": jnp.asarray(scale.copy())}


def arguments(y=Y):
    return X.copy(), npgp.neighbors.nearest(X.copy(), Z.copy(), K), y.copy()


# ---------------------------------------------------------------- dense algebra


class Dense:
    """The model's joint Gaussian, matrix by matrix: u ~ N(0, C), f = W u + N(0, diag F)."""

    def __init__(self, lengthscale=LENGTHSCALE, found=None, near=None, inducing=Z, rows=X):
        found = found or neighbors()
        near = npgp.neighbors.nearest(rows, inducing, K) if near is None else near
        K_uu = dense_kernel(inducing, inducing, lengthscale) + JITTER * VARIANCE * np.eye(len(inducing))
        B, variance = np.zeros_like(K_uu), np.diag(K_uu).copy()
        for i in range(len(inducing)):
            before = found.rows[i][found.mask[i]]
            B[i, before] = np.linalg.solve(K_uu[np.ix_(before, before)], K_uu[before, i])
            variance[i] -= K_uu[i, before] @ B[i, before]
        R = (np.eye(len(inducing)) - B) / np.sqrt(variance)[:, None]
        self.precision = R.T @ R
        self.C = np.linalg.inv(self.precision)
        self.W, self.F = np.zeros((len(rows), len(inducing))), np.full(len(rows), VARIANCE * (1 + JITTER))
        for i, row in enumerate(near):
            c = dense_kernel(inducing[row], rows[i : i + 1], lengthscale)[:, 0]
            self.W[i, row] = np.linalg.solve(K_uu[np.ix_(row, row)], c)
            self.F[i] -= c @ self.W[i, row]

    def evidence(self, y, noise=NOISE):
        return oracles.log_normal(y, self.W @ self.C @ self.W.T + np.diag(self.F + noise))

    def kl(self, loc=LOC, scale=SCALE):
        whiten = np.linalg.cholesky(self.C)
        mean = np.linalg.solve(whiten, loc)
        half = np.linalg.solve(whiten, np.diag(scale))
        return oracles.kl_normal(mean, half @ half.T)

    def moments(self, loc=LOC, scale=SCALE):
        return self.W @ loc, (self.W**2) @ scale**2

    def elbo(self, conditional, loc=LOC, scale=SCALE, y=Y):
        mean, s = self.moments(loc, scale)
        fit = -0.5 * np.log(2 * np.pi * NOISE) - 0.5 * ((y - mean) ** 2 + s) / NOISE
        left = self.F / NOISE if conditional == "prior" else np.log1p(self.F / NOISE)
        return np.sum(fit - 0.5 * left) - self.kl(loc, scale)


@functools.cache
def elbos(batch_size=None, conditional="prior"):
    return compiled(make_elbo(regression(batch_size, conditional)))


@pytest.mark.parametrize("conditional", ["prior", "tight"])
def test_elbo_is_its_closed_form(conditional, float64):
    value = elbos(None, conditional)(jax.random.key(0), params(), *arguments())
    assert value == pytest.approx(Dense().elbo(conditional), rel=1e-9)


def test_elbo_of_counts(float64):
    elbo = make_elbo(regression(likelihood=npgp.Poisson()))
    dense = Dense()
    mean, s = dense.moments()
    fit = (
        COUNTS * mean
        - np.exp(mean + 0.5 * (s + dense.F))
        - np.array([np.sum(np.log(np.arange(1, n + 1))) for n in COUNTS])
    )
    value = compiled(elbo)(jax.random.key(0), params(), *arguments(COUNTS.astype(float)))
    assert value == pytest.approx(np.sum(fit) - dense.kl(), rel=1e-9)


@given(st.integers(0, 10**6), st.floats(0.2, 3.0), st.sampled_from(["prior", "tight"]))
def test_elbo_is_below_the_models_evidence(seed, stretch, conditional):
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        lengthscale = stretch * LENGTHSCALE
        dense = Dense(lengthscale)
        # Near the posterior, where a wrong bound would show.
        S = dense.C @ dense.W.T
        gain = np.linalg.solve(dense.W @ S + np.diag(dense.F + NOISE), Y)
        loc = S @ gain + 0.02 * rng.normal(size=M)
        scale = np.exp(0.1 * rng.normal(size=M)) / np.sqrt(np.diag(dense.precision) + (dense.W**2).sum(0) / NOISE)
        value = elbos(None, conditional)(jax.random.key(0), params(loc, scale), *arguments(), jnp.asarray(lengthscale))
        assert value == pytest.approx(dense.elbo(conditional, loc, scale), rel=1e-7)
        assert value <= dense.evidence(Y) + 1e-7


def test_tight_is_above_prior(float64):
    prior, tight = (float(elbos(None, c)(jax.random.key(0), params(), *arguments())) for c in ("prior", "tight"))
    assert tight > prior + 0.1


def test_all_points_with_all_neighbors_is_mean_field_inference_of_the_gp(float64):
    found = neighbors(M - 1)
    y = RNG.normal(size=M)
    rows = np.arange(M)[:, None]
    elbo = make_elbo(regression(found=found), size=M)
    C = dense_kernel(Z, Z, LENGTHSCALE) + JITTER * VARIANCE * np.eye(M)
    P = np.linalg.inv(C)
    # The best mean-field q of a Gaussian posterior: its mean, and the inverse diagonal of its precision.
    loc = np.linalg.solve(P + np.eye(M) / NOISE, y / NOISE)
    scale = 1 / np.sqrt(np.diag(P) + 1 / NOISE)
    value, gradient = compiled(jax.value_and_grad(elbo, 1))(
        jax.random.key(0), params(loc, scale), Z.copy(), rows, y.copy()
    )
    fit = -0.5 * M * np.log(2 * np.pi * NOISE) - 0.5 * np.sum((y - loc) ** 2 + scale**2) / NOISE
    half = np.linalg.solve(np.linalg.cholesky(C), np.diag(scale))
    kl = oracles.kl_normal(np.linalg.solve(np.linalg.cholesky(C), loc), half @ half.T)
    assert value == pytest.approx(fit - kl, abs=1e-6)
    for slope in gradient.values():
        np.testing.assert_allclose(slope, 0.0, atol=1e-5)


def test_gradients_are_finite_differences(float64):
    elbo = make_elbo(regression(conditional="tight"))

    def of(log_lengthscale, log_scale):
        return elbo(
            jax.random.key(0), params() | {"f.u.scale": jnp.exp(log_scale)}, *arguments(), jnp.exp(log_lengthscale)
        )

    at = jnp.log(jnp.asarray(LENGTHSCALE)), jnp.log(jnp.asarray(SCALE))
    check_grads(jax.jit(of), at, order=1, modes=("rev",), rtol=1e-4, eps=1e-5)


# ---------------------------------------------------------------- minibatches


def test_both_minibatches_are_unbiased(float64):
    x, near, y = arguments()
    elbo = make_elbo(regression(5))

    def one(key, params, x, near, y):
        rows_key, key = jax.random.split(key)
        rows = jax.random.choice(rows_key, N, (4,), replace=False)
        return elbo(key, params, x[rows], near[rows], y[rows])

    values = over_keys(one, 4000, params(), x, near, y)
    error = values.std() / np.sqrt(len(values))
    assert error > 0.01
    assert abs(values.mean() - Dense().elbo("prior")) < 4 * error


@pytest.mark.parametrize("batch_size", [1, 5, M])
def test_batches_of_inducing_points_stand_for_all(batch_size):
    """Every inducing point comes up as often as it should, weighted by what it stands for; none twice."""

    def chosen(key):
        with handlers.seed(rng_seed=key), handlers.trace() as sites:
            component(batch_size).guide()
        q = sites["f.u"]["fn"]
        return q.sites, q.counts

    sites, counts = compiled(jax.vmap(chosen))(keys(200))
    place = np.argsort(neighbors().order)[sites]
    assert np.all(np.diff(place, axis=1) > 0)  # one from each run of the order, and so none twice
    np.testing.assert_array_equal(np.sum(counts, 1), M)
    weights = np.zeros(M)
    np.add.at(weights, place, counts)
    # Each place is chosen once in as many times as its run is long.
    error = np.sqrt(np.repeat(counts[0] - 1, counts[0].astype(int)) / len(sites))
    assert np.all(np.abs(weights / len(sites) - 1) <= 4 * error)


def test_rows_are_trained_alone_and_well():
    """The lazy optimizer ends where the dense one does: at the best mean-field q."""
    near = npgp.neighbors.nearest(X, Z, K)
    model = regression(7)
    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.05, 600), TraceMeanField_ELBO())
    result = npgp.fit(
        svi,
        jax.random.key(0),
        600,
        X.astype(np.float32),
        near,
        Y.astype(np.float32),
        batch_size=4,
        row_optim=npgp.training.row_adam(0.05, 600),
        progress=False,
    )
    dense = Dense()
    precision = dense.precision + dense.W.T @ dense.W / NOISE
    loc, scale = np.linalg.solve(precision, dense.W.T @ Y / NOISE), 1 / np.sqrt(np.diag(precision))
    best, start = dense.elbo("prior", loc, scale), dense.elbo("prior", np.zeros(M), np.ones(M))
    found = dense.elbo("prior", *(np.asarray(result.params[f"f.u.{part}"], float) for part in ("loc", "scale")))
    assert best - found < 0.02 * (best - start)


def test_no_operation_of_a_step_is_as_long_as_the_inducing_points():
    """Beside the constants, and tables that are written over in place."""
    size, rows = 5003, 8
    rng = np.random.default_rng(0)
    inducing, x = rng.normal(size=(size, 2)).astype(np.float32), rng.normal(size=(64, 2)).astype(np.float32)
    found = npgp.neighbors.nearest_before(inducing, 2, ordering="random", rng_key=jax.random.key(0))
    near = npgp.neighbors.nearest(x, inducing, 2)

    def model(X, near, y):
        f = npgp.VNNGP(
            "f", npgp.Matern32(1.0), inducing, found, batch_size=rows, init_loc=np.zeros(size, np.float32)
        ).draw()
        with npgp.plate("data", 64, rows=X.shape[0]):
            npgp.observe("y", f(X, near), npgp.Gaussian(variance=0.1), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
    step = npgp.training.Step(svi, npgp.training.row_adam(0.01))
    batch = (jnp.asarray(x[:rows]), jnp.asarray(near[:rows]), jnp.zeros(rows))
    state = step.init(jax.random.key(0), *batch)
    program = jax.jit(step, donate_argnums=0).lower(state, *batch).compile()
    long = {
        op
        for shape, op in re.findall(r"= \w+\[([\d,]*)\]\S* ([\w-]+)\(", program.as_text())
        if str(size) in shape.split(",")
    }
    assert long <= {
        "parameter",
        "get-tuple-element",
        "bitcast",
        "fusion",
        "scatter",
        "constant",
        "dynamic-update-slice",
    }


# ---------------------------------------------------------------- modes


def test_without_a_guide_it_is_the_neighbor_model(float64):
    u = RNG.normal(size=M)
    density = compiled(lambda u: log_density(regression(5), arguments(), {}, {"f.u": u})[0])(u)
    dense = Dense()
    given_u = -0.5 * (np.log(2 * np.pi * (dense.F + NOISE)) + (Y - dense.W @ u) ** 2 / (dense.F + NOISE))
    assert density == pytest.approx(oracles.log_normal(u, dense.C) + np.sum(given_u), rel=1e-8)


def test_predictions_and_posterior(float64):
    x, near, _ = arguments()
    model, found = regression(5), params()
    guide = npgp.AutoSparseGP(model)
    dense = Dense()
    mean, s = dense.moments()
    covariance = (dense.W * SCALE**2) @ dense.W.T + np.diag(dense.F)

    for posterior in (
        npgp.posterior("f", model, guide, found, x, near),
        component(5).posterior(found),
        npgp.posterior("f", model, guide, found, x, near, draws=3),
    ):

        @jax.jit
        def all_of_it(key, posterior=posterior):
            density = posterior.log_density(x, mean + 0.3, npgp.Gaussian(scale=0.5))
            draws = posterior.sample(key, x, (4000,))
            return posterior.mean_and_variance(x), posterior.covariance(x), density, draws

        moments, across, density, draws = all_of_it(jax.random.key(0))
        np.testing.assert_allclose(moments, (mean, s + dense.F), atol=1e-9)
        np.testing.assert_allclose(across, covariance, atol=1e-9)
        right = norm.logpdf(0.3, scale=np.sqrt(s + dense.F + 0.25))
        np.testing.assert_allclose(density, right, atol=1e-9)
        assert worst_z_of_moments(draws, mean, covariance) < 5
    np.testing.assert_allclose(posterior.mean(x, neighbors=near), mean, atol=1e-9)
    given_u = npgp.posterior("f", model, {"f.u": RNG.normal(size=(2, M))}, {}, x, near)
    np.testing.assert_allclose(given_u[1].variance(x), dense.F, atol=1e-9)
    predictive = Predictive(npgp.joint(model), guide=guide, params=found, num_samples=4000, parallel=True)
    predicted = jax.jit(lambda key: predictive(key, x, near))(jax.random.key(1))
    assert predicted["y"].shape == (4000, N)
    assert worst_z_of_moments(predicted["y.latent"], mean, covariance) < 5


def test_sampled_values_come_from_q_and_agree_within_a_draw(float64):
    """In minibatches of the inducing points too: one value at an input, wherever it is asked for."""
    x, near, _ = arguments()

    def model(X, near):
        f = component(5).draw()
        with numpyro.plate("data", 2 * N):
            npgp.sample("value", f(jnp.concatenate([X, X]), jnp.concatenate([near, near])))

    guide = npgp.AutoSparseGP(model)

    def draw(key, params):
        guide_key, key = jax.random.split(key)
        start = handlers.trace(handlers.substitute(handlers.seed(guide, guide_key), params)).get_trace(x, near)
        sites = handlers.trace(handlers.replay(handlers.seed(model, key), start)).get_trace(x, near)
        return sites["value"]["value"]

    dense = Dense()
    given_u = (dense.W * SCALE**2) @ dense.W.T
    twice = np.tile(given_u + np.diag(dense.F), (2, 2))
    draws = over_keys(draw, 4000, params())
    assert worst_z_of_moments(draws, np.tile(dense.moments()[0], 2), twice) < 5


@pytest.mark.filterwarnings("ignore:q.ε. takes for independent:UserWarning")  # it is the ELBO at a known q
def test_sums_several_latents_and_hand_written_guides(float64):
    x, near, y = arguments()
    gp, other = component(5), npgp.SparseGP("g", npgp.RBF(1.0), Z[:3].copy())

    def model(x, near, y):
        f, g = gp.draw(), other.draw()
        with numpyro.plate("data", N):
            npgp.observe("y", 0.5 * f(x, near) + g(x) + 1.0, npgp.Gaussian(variance=NOISE), obs=y, conditional="prior")
            npgp.observe(
                "z", (f(x, near), g(x)), npgp.likelihoods.HeteroscedasticGaussian(), obs=y, conditional="prior"
            )

    def by_hand(x, near, y):
        gp.guide(), other.guide()

    elbos = [make_elbo(model, guide) for guide in (by_hand, None)]
    values = params() | {"g.u.loc": jnp.ones(3), "g.u.scale_tril": 0.5 * jnp.eye(3)}
    full = component()
    moments = [full.posterior(params()).mean_and_variance(x, neighbors=near)]
    moments.append(other.posterior(values).mean_and_variance(x))
    (m, v), (m2, v2) = ([np.asarray(part) for part in pair] for pair in moments)
    first = -0.5 * np.log(2 * np.pi * NOISE) - 0.5 * ((y - 0.5 * m - m2 - 1) ** 2 + 0.25 * v + v2) / NOISE
    second = -0.5 * np.log(2 * np.pi) - m2 - 0.5 * ((y - m) ** 2 + v) * np.exp(-2 * m2 + 2 * v2)
    expected = np.sum(first) + np.sum(second) - Dense().kl() - float(other.posterior(values).kl())
    averages = over_keys(lambda key, p: jnp.stack([elbo(key, p, x, near, y) for elbo in elbos]), 2000, values)
    error = averages.std(0) / np.sqrt(len(averages))
    assert np.all(np.abs(averages.mean(0) - expected) < 4 * error + 1e-6)


def test_scope(float64):
    def model(x, near, y):
        with handlers.scope(prefix="a"):
            f = component(5).draw()
            with numpyro.plate("data", N):
                npgp.observe("y", f(x, near), npgp.Gaussian(variance=NOISE), obs=y)

    def outside(x, near, y):
        with handlers.scope(prefix="a"):
            f = component(5).draw()
        with numpyro.plate("data", N):
            npgp.observe("y", f(x, near), npgp.Gaussian(variance=NOISE), obs=y)

    scoped = {f"a/{name}": value for name, value in params().items()}
    expected = elbos(5, "tight")(jax.random.key(0), params(), *arguments())
    assert compiled(make_elbo(model))(jax.random.key(0), scoped, *arguments()) == pytest.approx(float(expected))
    with pytest.raises(ValueError, match="inside the same handlers.scope"):
        jax.eval_shape(lambda: make_elbo(outside)(jax.random.key(0), scoped, *arguments()))


def test_start_of_q():
    """Data as means, and standard deviations that the prior has given neighbors."""
    gp = component(init_loc=LOC.copy(), init_scale=0.5)

    @compiled
    def start():
        with handlers.seed(rng_seed=0), handlers.trace() as sites:
            gp.guide()
        return sites["f.u.loc"]["value"], sites["f.u.scale"]["value"]

    loc, scale = start()
    assert loc.dtype == jnp.float32
    np.testing.assert_allclose(loc, LOC, rtol=1e-6)
    B = 0.25 / np.square(scale)
    np.testing.assert_allclose(np.sum(np.log(B)), np.linalg.slogdet(Dense().precision)[1], rtol=1e-4)


def test_neighbors_in_new_units_go_on_from_where_training_was(float64):
    """Their shapes are the same, and q means the same, so that training goes on."""
    x, near, y = arguments()
    stretched = np.array([0.2, 3.0])
    again = npgp.neighbors.nearest_before(Z, K, scale=stretched)
    assert np.any(again.rows != neighbors().rows)
    results = []
    for found in (neighbors(), again):
        model = regression(5, found=found)
        svi = SVI(model, npgp.AutoSparseGP(model), optax.adam(0.05), TraceMeanField_ELBO())
        state = results[-1].state if results else None
        results.append(
            npgp.fit(
                svi,
                jax.random.key(0),
                20,
                x,
                near,
                y,
                row_optim=npgp.training.row_adam(0.05),
                init_state=state,
                progress=False,
            )
        )
    assert not np.allclose(results[0].params["f.u.loc"], results[1].params["f.u.loc"])
    posterior = component(found=again).posterior(results[1].params)
    expected = npgp.neighbors.nearest(x, Z, K, scale=stretched)
    np.testing.assert_array_equal(posterior.mean(x), posterior.mean(x, neighbors=expected))


# ---------------------------------------------------------------- what is refused


def test_what_is_refused(float64):
    x, near, y = arguments()
    f = handlers.seed(component().draw, 0)()
    for error, match, call in [
        (ValueError, "batch_size is 15; it must be at most 14", lambda: component(15)),
        (ValueError, "neighbors are those of 14 sites", lambda: component(inducing=Z[:5].copy())),
        (ValueError, "init_loc", lambda: component(init_loc=np.zeros(3))),
        (TypeError, "inducing has dtype int64", lambda: component(inducing=Z.astype(int))),
        (TypeError, "name is ''", lambda: npgp.VNNGP("", npgp.RBF(), Z)),
        (TypeError, "is a component, and no function yet", lambda: component()(x)),
        (ValueError, r"neighbors has shape \(9,\); it must have 2 dim", lambda: f(x, near[:, 0])),
        (TypeError, "neighbors has dtype float64", lambda: f(x, near.astype(float))),
        (ValueError, "neighbors has row 14; there are 14 rows", lambda: f(x, np.array(near) * 0 + [5, 14, 6])),
        (ValueError, "X has 3 columns; the points with values have 2", lambda: f(np.zeros((4, 3)))),
        (TypeError, "X is traced", lambda: jax.eval_shape(lambda x: f(x).shape and x, x)),
        (KeyError, "f.u.scale", lambda: component().posterior({"f.u.loc": jnp.zeros(M)})),
        (ValueError, "has a value of shape", lambda: handlers.substitute(component().draw, {"f.u": jnp.zeros(3)})()),
        (ValueError, "no approximate posterior here", f.posterior),
    ]:
        with pytest.raises(error, match=match):
            call()
    with pytest.raises(ValueError, match="inside plate 'outputs'"), numpyro.plate("outputs", 2, dim=-2):
        handlers.seed(component().draw, 0)()
    with pytest.raises(ValueError, match="use TraceMeanField_ELBO"):
        make_elbo(regression(5), loss=Trace_ELBO())(jax.random.key(0), params(), x, near, y)
    for conditional in (npgp.conditionals.Grouped(3), "full"):
        with pytest.raises(ValueError, match="groups have nothing to add"):

            def model(x, near, y, conditional=conditional):
                latent = component().draw()(x, near)
                with numpyro.plate("data", N):
                    npgp.observe("y", latent, npgp.Gaussian(variance=NOISE), obs=y, conditional=conditional)

            make_elbo(lambda x, near, y, model=model: handlers.seed(model, 0)(x, near, y))(
                jax.random.key(0), params(), x, near, y
            )


def test_all_inducing_values_have_a_density(float64):
    """Without batches other ELBOs work: on average they are the same."""
    one = make_elbo(regression(), loss=Trace_ELBO())
    values = over_keys(one, 4000, params(), *arguments())
    assert abs(values.mean() - Dense().elbo("prior")) < 4 * values.std() / np.sqrt(len(values))


def test_kl_needs_no_other_distribution(float64):
    q = dist.Normal(jnp.zeros(M), 1.0).to_event(1)
    with pytest.raises(NotImplementedError):
        dist.kl_divergence(q, component().prior())
