"""The collapsed GPLVM: GPflow's number, the uncollapsed ELBO in expectation, and training."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import compiled, make_elbo, over_keys
from numpyro.infer import Trace_ELBO
from test_uncertain import GPFLOW, NODE_WEIGHTS, NODES, gpflow_problem

from npgp.collapsed.uncertain import UncertainInputGP
from npgp.gplvm import BayesianGPLVM, Start, pca_start
from npgp.gplvm.collapsed import CollapsedGPLVM
from npgp.kernels import RBF, Linear, Matern32

Y, LOC, SCALE, Z = gpflow_problem()
START = Start(LOC, Z, np.zeros(3), noise_variance=0.15)


def make_params(dtype=float):
    params = {
        "lengthscale": [0.8, 1.5],
        "variance": 1.3,
        "inducing": Z,
        "noise_variance": 0.15,
        "x.loc": LOC,
        "x.scale": SCALE,
    }
    return {name: jnp.array(value, dtype) for name, value in params.items()}


def test_the_bound_is_that_of_gpflow(x64):
    gplvm = CollapsedGPLVM(START, conditional="prior")
    # GPflow's jitter is 1e-9, absolute.
    bound = compiled(gplvm.bound)(make_params(x64), jnp.array(Y, x64))
    assert bound.dtype == x64
    np.testing.assert_allclose(bound, GPFLOW["rbf"][1], rtol=1e-6 if x64 == jnp.float64 else 1e-3)


def test_missing_entries_count_for_nothing(float64):
    """The bound is that of the outputs with their masks (tests/collapsed/test_uncertain.py), less the latents' KL."""
    missing = np.where(np.random.default_rng(0).uniform(size=Y.shape) < 0.3, np.nan, Y)
    gplvm, params = CollapsedGPLVM(START), make_params()

    @compiled
    def run(params, present, y):
        kernel = RBF(params["lengthscale"], variance=params["variance"])
        arrays = params["x.loc"], params["x.scale"], params["inducing"]
        return jnp.sum(
            UncertainInputGP(kernel, *arrays, noise_variance=params["noise_variance"], mask=present.T).log_prob(y.T)
        )

    kl = 0.5 * np.sum(SCALE**2 + LOC**2 - 1 - 2 * np.log(SCALE))
    expected = run(params, ~np.isnan(missing), missing) - kl
    bound = compiled(lambda params: gplvm.bound(params, missing, mask="nan"))(params)
    np.testing.assert_allclose(bound, expected, rtol=1e-10)
    with pytest.warns(RuntimeWarning, match="has not converged"):
        trained = gplvm.fit(missing, 5, mask="nan", params=params, progress=False)
    assert trained.bounds[0] == pytest.approx(float(expected), rel=1e-10) and trained.bounds[-1] > expected
    assert gplvm.posterior(trained.params, missing, mask="nan").batch_shape == (3,)
    with pytest.raises(ValueError, match=r"mask has shape \(3, 7\); it must be that of Y, \(7, 3\)"):
        gplvm.bound(params, Y, mask=np.ones((3, 7), bool))


def test_another_kernel_and_the_bound_as_an_elbo(float64):
    gplvm = CollapsedGPLVM(
        START,
        conditional="prior",
        kernel=lambda lengthscale, variance: (
            RBF(lengthscale, variance=variance) + Linear(variance=jnp.array([0.4, 0.2]))
        ),
    )

    @compiled
    def run(params, Y):
        return gplvm.bound(params, Y), make_elbo(gplvm.model, lambda Y: None, Trace_ELBO())(
            jax.random.key(0), params, Y
        )

    bound, elbo = run(make_params(), Y.copy())
    np.testing.assert_allclose(bound, GPFLOW["rbf + linear"][1], rtol=1e-6)
    np.testing.assert_allclose(elbo, bound, rtol=1e-12)


@pytest.mark.parametrize("conditional", ["prior", "tight"])
def test_the_uncollapsed_elbo_at_the_best_q_is_the_bound_in_expectation(conditional, float64):
    """Over draws of x; ``tight`` there has m_n(x_n), here by a product rule."""
    offset = np.array([0.3, -0.2, 0.1])
    start = dataclasses.replace(START, offset=offset)
    collapsed, uncollapsed = (cls(start, conditional=conditional) for cls in (CollapsedGPLVM, BayesianGPLVM))
    data, params = jnp.array(Y + offset), make_params()

    @compiled
    def run(params, data):
        options = dict(penalty_draws=jnp.array(NODES), penalty_weights=jnp.array(NODE_WEIGHTS))
        noise = params["noise_variance"]
        gp = UncertainInputGP(
            RBF(params["lengthscale"], variance=params["variance"]),
            LOC.copy(),
            SCALE.copy(),
            Z.copy(),
            noise_variance=noise,
            **options,
        )
        one_m = collapsed.bound(params, data)
        by_rule = jnp.sum(gp.log_prob(jnp.array(Y.T))) - 0.5 * np.sum(SCALE**2 + LOC**2 - 1.0 - 2.0 * np.log(SCALE))
        return one_m, by_rule, collapsed.svi_params(params, data)

    one_m, by_rule, at_best = run(params, data)
    assert at_best["f.u.loc"].shape == (3, 1, 4) and at_best["f.u.scale_tril"].shape == (3, 1, 4, 4)
    expected = one_m if conditional == "prior" else by_rule
    elbos = over_keys(make_elbo(uncollapsed.model, uncollapsed.guide), 6000, at_best, data)
    error = elbos.std() / len(elbos) ** 0.5
    assert abs(elbos.mean() - expected) < 4 * error < 0.5
    if conditional == "tight":
        assert by_rule - one_m > 8 * error  # so that the one is told from the other
    # And no other q(ε) is better.
    other = at_best | {"f.u.loc": at_best["f.u.loc"] + 0.1, "f.u.scale_tril": 0.9 * at_best["f.u.scale_tril"]}
    assert np.mean(over_keys(make_elbo(uncollapsed.model, uncollapsed.guide), 6000, other, data) - elbos) < 0.0


# ---------------------------------------------------------------------------------------------------------------
# Training


def simulated():
    """Rows of five smooth functions of one latent coordinate, with noise of standard deviation 0.05."""
    rng = np.random.default_rng(5)
    x = rng.uniform(-2.0, 2.0, (40, 1))
    functions = [np.sin(2 * x), np.cos(1.5 * x), x, np.tanh(2 * x), 0.5 * x**2]
    return x[:, 0], np.concatenate(functions, 1) + 0.05 * rng.normal(size=(40, 5)) + 1.0


@pytest.fixture(scope="module")
def trained():
    with jax.enable_x64(True):
        x, Y = simulated()
        start = pca_start(jax.random.key(0), Y, latent_dim=3, num_inducing=8)
        gplvm = CollapsedGPLVM(dataclasses.replace(start, lengthscale=2.5))  # with 1, all dimensions stay in use
        return gplvm, x, Y, gplvm.fit(Y, 3000, tolerance=1e-6, progress=False)


def test_training_climbs_to_an_optimum(trained, float64):
    gplvm, _, Y, result = trained
    assert result.converged, result.message
    assert np.all(np.diff(result.bounds) > 0)
    value, gradient = compiled(jax.value_and_grad(gplvm.bound))(result.params, Y.copy())
    np.testing.assert_allclose(value, result.bounds[-1], rtol=1e-9)
    assert value > result.bounds[0] + 100
    # Slopes in the logarithms of positive parameters.
    logs = [gradient[name] * result.params[name] for name in ("variance", "noise_variance", "lengthscale", "x.scale")]
    assert max(np.max(np.abs(slope)) for slope in logs) < 0.1
    assert 0.04**2 < result.params["noise_variance"] < 0.07**2


def test_it_finds_the_one_dimension(trained, float64):
    gplvm, x, Y, result = trained
    params = jax.tree.map(np.asarray, result.params)
    relevance = params["x.loc"].std(0) / params["lengthscale"]
    best = relevance.argmax()
    assert np.sort(relevance)[-2] < 0.1 * relevance[best]
    order = np.argsort(np.argsort(x))
    found = np.argsort(np.argsort(params["x.loc"][:, best]))
    assert abs(np.corrcoef(order, found)[0, 1]) > 0.99
    mean = compiled(lambda p: gplvm.posterior(p, Y.copy()).mean(p["x.loc"]))(result.params)
    assert np.sqrt(np.mean((mean.T + gplvm.start.offset - Y) ** 2)) < 0.06


def test_training_goes_on_from_given_params(trained, float64):
    gplvm, _, Y, result = trained
    given = {name: value for name, value in result.params.items() if name != "noise_variance"}
    with pytest.warns(RuntimeWarning, match="not converged after 2 steps"):
        again = gplvm.fit(Y, 2, params=given, progress=False)
    start = given | {"noise_variance": jnp.array(gplvm.start.noise_variance)}
    np.testing.assert_allclose(again.bounds[0], compiled(gplvm.bound)(start, Y.copy()), rtol=1e-9)
    assert not again.converged and len(again.bounds) == 3
    with pytest.raises(KeyError, match="params has .'noise'., but the parameters are"):
        gplvm.fit(Y, 1, params={"noise": 0.5})


def test_training_and_bounds_are_in_double_precision_by_themselves(trained):
    gplvm, _, Y, result = trained
    with pytest.warns(RuntimeWarning, match=r"not converged after 2 steps: stopped after max_steps .* params="):
        again = gplvm.fit(Y.astype(np.float32), 2, params=result.params, progress=False)
    assert again.bounds.dtype == np.float64
    assert {value.dtype for value in again.params.values()} == {jnp.dtype("float32")}
    # Of parameters and data that were rounded: near an optimum, they change the bound by little.
    np.testing.assert_allclose(again.bounds, result.bounds[-1], rtol=1e-4)
    assert not np.array_equal(again.bounds, again.bounds.astype(np.float32))
    bound, posterior = gplvm.bound(again.params, Y), gplvm.posterior(again.params, Y)
    assert {leaf.dtype for leaf in jax.tree.leaves((bound, posterior))} == {jnp.dtype("float32")}
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: jnp.array(np.asarray(p), float), again.params)
        exact = compiled(gplvm.bound)(params, Y.copy())
    assert bound == np.float32(exact)


# ---------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(inducing=(Z, Z)), "start.inducing has 2 blocks"),
        (dict(noise_variance=np.ones(3)), r"start.noise_variance has shape \(3,\)"),
    ],
)
def test_refused_starts(change, words):
    with pytest.raises(ValueError, match=words):
        CollapsedGPLVM(dataclasses.replace(START, **change))


@pytest.mark.parametrize(
    "data, words",
    [(Y[:, :2], r"Y has shape \(7, 2\); .* must be \(7, 3\)"), (np.where(Y > 0.9, np.nan, Y), "Y has NaN .* mask")],
)
def test_refused_data(data, words):
    gplvm = CollapsedGPLVM(START)
    for run in (gplvm.fit, lambda Y: gplvm.bound(make_params(), Y), lambda Y: gplvm.posterior(make_params(), Y)):
        with pytest.raises(ValueError, match=words):
            run(data)


def test_other_refusals():
    params = make_params()
    del params["x.scale"]
    with pytest.raises(KeyError, match="params has no 'x.scale'"):
        CollapsedGPLVM(START).bound(params, Y)
    with pytest.raises(NotImplementedError, match="Matern32 .* no closed form"):
        CollapsedGPLVM(START, kernel=Matern32).fit(Y, progress=False)
    with pytest.raises(ValueError, match=r"conditional is Grouped\(\)"):
        CollapsedGPLVM(START, conditional="grouped").fit(Y, progress=False)
