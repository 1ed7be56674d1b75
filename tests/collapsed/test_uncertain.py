"""Collapsed bounds for Gaussian inputs: GPflow's numbers, the published formula, limits, and the evidence."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import compiled
from numpyro.infer.util import log_density
from scipy import special
from test_psi import KERNELS, LOC, ROWS, SCALE, SIZE, Features, Z, ard, by_quadrature, gauss_hermite

from npgp import Gaussian
from npgp.collapsed import CollapsedGP
from npgp.collapsed.psi import expected_projection
from npgp.collapsed.uncertain import UncertainInputGP, penalty_nodes
from npgp.features import Points
from npgp.kernels import RBF, Linear, Matern32
from npgp.sparse.projection import factorize

_rng = np.random.default_rng(1)
Y = np.sin(2.0 * LOC[:, 0]) * np.array([[1.0], [-0.5], [0.2]]) + 0.3 * _rng.normal(size=(3, ROWS))
NOISES = _rng.uniform(0.05, 0.4, ROWS)
NODES, NODE_WEIGHTS = gauss_hermite(24)
NODES = NODES[:, None, :]


# ---------------------------------------------------------------------------------------------------------------
# Values


def gpflow_problem():
    """
    7 rows of 3 columns, 2 latent dimensions, 4 inducing inputs; deterministic, so that it can be given to others.

    GPflow 2.11.2's ``BayesianGPLVM(Y, loc, scale**2, kernel, inducing_variable=Z)`` with likelihood variance 0.15 and
    ``gpflow.config.set_default_jitter(1e-9)`` has the ``elbo()`` and ``predict_f`` at NEW_INPUTS below.
    """
    i = np.arange(7.0)[:, None]
    Y = np.sin(1.0 + i * np.array([0.7, 1.1, 1.9]))
    loc = 1.3 * np.cos(i * np.array([0.9, 1.7]))
    scale = 0.3 + 0.2 * np.sin(i + np.array([0.0, 1.0])) ** 2
    return Y, loc, scale, np.array([[-1.0, 0.3], [0.2, -0.5], [1.1, 0.8], [0.0, 1.2]])


NEW_INPUTS = np.array([[0.1, 0.2], [1.0, -1.0]])
#: Kernel, ELBO, and the predictions' means and variance.
GPFLOW = {
    "rbf": (
        lambda: ard(1.3),
        -70.2891678213264,
        [
            [-0.047201609612348, 0.304191759756139, -0.07276461959086],
            [0.156273346266986, 0.716438752891639, -0.237467080094394],
        ],
        [0.214381594747816, 0.726328440535164],
    ),
    "rbf + linear": (
        lambda: ard(1.3) + Linear(variance=jnp.array([0.4, 0.2])),
        -77.52517201404646,
        [
            [-0.077820194015585, 0.257046737963541, 0.001638121559861],
            [0.174198087365624, 0.830116665849126, -0.342228181211483],
        ],
        [0.212540572858627, 0.84372890199677],
    ),
}


@pytest.mark.parametrize("name", GPFLOW)
def test_the_bound_is_that_of_gpflow(name, float64):
    make, elbo, means, variances = GPFLOW[name]
    Y, loc, scale, Z = gpflow_problem()

    @compiled
    def run(Y, loc, scale, Z):
        gp = UncertainInputGP(make(), loc, scale, Z, noise_variance=0.15, conditional="prior", jitter=1e-9)
        return gp.log_prob(Y.T), gp.condition(Y.T).mean_and_variance(jnp.array(NEW_INPUTS))

    bounds, (mean, variance) = run(Y, loc, scale, Z)
    kl = 0.5 * np.sum(scale**2 + loc**2 - 1.0 - 2.0 * np.log(scale))
    assert bounds.shape == (3,)
    np.testing.assert_allclose(np.sum(bounds) - kl, elbo, rtol=1e-7)
    np.testing.assert_allclose(mean.T, means, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(variance, [variances] * 3, rtol=1e-6)


def dense_bound(name, noise, conditional):
    """Titsias & Lawrence (2010), eqs. 25 and 26 for a noise variance per row, with statistics by quadrature."""
    psi0, psi1, psi2 = by_quadrature(name)
    K = KERNELS[name][1](Z, Z)
    K = K + 1e-8 * np.mean(np.diag(K)) * np.eye(SIZE)
    noise = np.broadcast_to(noise, ROWS)
    C = K + np.tensordot(1.0 / noise, psi2, 1)
    d = psi0 - np.einsum("ab,nba->n", np.linalg.inv(K), psi2)
    if conditional == "prior":
        penalty = 0.5 * np.sum(d / noise)
    elif conditional == "tight":
        penalty = 0.5 * np.sum(np.log1p(d / noise))
    else:
        penalty = 0.0
        for m, s, v in zip(LOC, SCALE, noise, strict=True):
            x = m + s * NODES[:, 0]
            cross = KERNELS[name][1](x, Z)
            prior = np.diag(KERNELS[name][1](x, x))
            at_nodes = prior - np.sum(cross * np.linalg.solve(K, cross.T).T, -1)
            penalty += 0.5 * NODE_WEIGHTS @ np.log1p(at_nodes / v)
    log_det = np.linalg.slogdet(C)[1] - np.linalg.slogdet(K)[1]
    b = psi1.T @ (Y / noise).T
    fit = np.sum(b * np.linalg.solve(C, b), 0) - np.sum(Y**2 / noise + np.log(2.0 * np.pi * noise), 1)
    return 0.5 * (fit - log_det) - penalty


def three_bounds(kernel, loc, scale, Z, noise, y, mean=0.0):
    """By conditional; ``nodes`` is ``tight`` with m_n(x_n), its penalty by a product rule that is as good as exact."""
    settings = {
        "prior": dict(conditional="prior"),
        "tight": {},
        "nodes": dict(penalty_draws=jnp.array(NODES), penalty_weights=jnp.array(NODE_WEIGHTS)),
    }
    return {
        name: UncertainInputGP(kernel, loc, scale, Z, noise_variance=noise, offset=mean, **options).log_prob(y)
        for name, options in settings.items()
    }


@pytest.mark.parametrize("name", ["ard", "of all kinds"])
def test_bounds_are_the_published_formula(name, float64):
    run = compiled(lambda *a: three_bounds(KERNELS[name][0](), *a))
    mean = np.linspace(-0.3, 0.3, ROWS)
    for noise in (0.15 * np.ones(ROWS), NOISES):
        bounds = run(LOC, SCALE, Z, noise, Y + mean, mean)
        for conditional, bound in bounds.items():
            np.testing.assert_allclose(bound, dense_bound(name, noise, conditional), rtol=1e-8, err_msg=conditional)


def test_known_inputs_are_sgpr(x64):
    """With s = 0 the bounds, posterior and all, are those of CollapsedGP at the means."""
    kernel, new = RBF(jnp.array([0.8, 1.5], x64), variance=1.3), jnp.array(NEW_INPUTS, x64)

    @compiled
    def run(loc, Z, noise, y):
        bounds = three_bounds(kernel, loc, 0.0, Z, noise, y)
        gps = [CollapsedGP(kernel, loc, Z, noise_variance=noise, conditional=c) for c in ("prior", "tight")]
        gps.append(UncertainInputGP(kernel, loc, 1e-9, Z, noise_variance=noise))
        moments = [gp.condition(y).mean_and_variance(new) for gp in (gps[0], gps[-1])]
        return bounds, [gp.log_prob(y) for gp in gps], moments

    bounds, (prior, tight, near), (moments, expected) = run(*(jnp.array(a, x64) for a in (LOC, Z, NOISES, Y)))
    tolerance = dict(rtol=1e-8 if x64 == jnp.float64 else 2e-4)
    assert bounds["prior"].dtype == x64
    np.testing.assert_allclose(bounds["prior"], prior, **tolerance)
    np.testing.assert_allclose(bounds["tight"], tight, **tolerance)
    np.testing.assert_allclose(bounds["nodes"], tight, **tolerance)
    np.testing.assert_allclose(near, tight, **tolerance)
    assert np.all(tight - prior > 0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=10 * tolerance["rtol"]), moments, expected)


# ---------------------------------------------------------------------------------------------------------------
# Order


def random_problem(seed):
    rng = np.random.default_rng(seed)
    lengthscale, variance, size = np.exp(rng.normal(size=2)), np.exp(rng.normal()), np.exp(rng.normal())
    loc = rng.normal(size=(ROWS, 2))
    scale = size * rng.uniform(0.0, 1.0, (ROWS, 2))
    noise = np.exp(rng.normal(-1.5, 1.0, ROWS))
    return lengthscale, variance, loc, scale, rng.normal(size=(3, 2)), noise, rng.normal(size=(2, ROWS))


@compiled
def _bounds_of_problem(lengthscale, variance, loc, scale, Z, noise, y):
    """The bounds; and ``tight`` with the mean of d_n over the nodes, for which Jensen's inequality is exact."""
    kernel = RBF(lengthscale, variance=variance)
    bounds = three_bounds(kernel, loc, scale, Z, noise, y)
    d = expected_projection(kernel, Z, loc, scale).residual_variance
    at_nodes = jax.vmap(lambda x: factorize(kernel, [Points(Z)])(x).residual_variance())(loc + scale * NODES)
    over_nodes = jnp.array(NODE_WEIGHTS) @ at_nodes
    bounds["over nodes"] = bounds["tight"] + 0.5 * jnp.sum(jnp.log1p(d / noise) - jnp.log1p(over_nodes / noise))
    return bounds, jnp.max(jnp.abs(over_nodes - d)) / variance


@given(st.integers(0, 10**6))
def test_tight_is_above_prior_and_m_of_x_above_one_m(float64, seed):
    problem = random_problem(seed)
    bounds, error = _bounds_of_problem(*problem)
    assert np.all(bounds["tight"] >= bounds["prior"])
    assert np.all(bounds["nodes"] >= bounds["over nodes"] - 1e-9)
    if np.max(problem[3] / problem[0]) < 1.0:  # where the rule is as good as exact
        assert error < 1e-6
        assert np.all(bounds["nodes"] >= bounds["tight"] - 1e-4)


def test_bounds_stay_below_the_evidence(float64):
    """Three rows of one uncertain input and two outputs: log ∫ p(y | x) p(x) dx by a product rule."""
    rng = np.random.default_rng(5)
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    x = np.array(list(itertools.product(nodes, repeat=3)))
    log_weights = np.sum(np.log(list(itertools.product(weights, repeat=3))), -1) - 1.5 * np.log(2.0 * np.pi)

    @compiled
    def run(lengthscale, loc, scale, Z, noise, y):
        options = dict(
            penalty_draws=jnp.array(nodes)[:, None, None], penalty_weights=jnp.array(weights / weights.sum())
        )
        return [
            UncertainInputGP(RBF(lengthscale), loc, scale, Z, noise_variance=noise, **kwargs).log_prob(y).sum()
            for kwargs in (dict(conditional="prior"), {}, options)
        ]

    gaps = []
    for scale in (1e-3, 0.1, 0.3, 0.6):
        loc, lengthscale, noise = rng.normal(size=(3, 1)), np.exp(0.3 * rng.normal()), np.exp(rng.normal(-1.5))
        at = loc.T + scale * x  # (nodes, 3)
        K = np.exp(-0.5 * (at[:, :, None] - at[:, None, :]) ** 2 / lengthscale**2) + noise * np.eye(3)
        y = np.linalg.cholesky(K[0]) @ rng.normal(size=(3, 2))
        fit = np.sum(y * np.linalg.solve(K, y[None]), (1, 2))
        log_likelihood = -0.5 * (fit + 2.0 * np.linalg.slogdet(K)[1] + 6.0 * np.log(2.0 * np.pi))
        evidence = special.logsumexp(log_weights + log_likelihood)
        for inducing in (loc[[0, 1, 1]], loc):
            prior, tight, nodes_bound = run(lengthscale, loc, scale, inducing, noise, y.T)
            assert prior <= tight + 1e-9 <= nodes_bound + 2e-9 <= evidence + 1e-6
        gaps.append(evidence - nodes_bound)
    assert abs(gaps[0]) < 1e-4  # nothing is lost where inputs are known and inducing
    assert gaps[-1] > 1e-3


# ---------------------------------------------------------------------------------------------------------------
# Draws for the penalty


def test_draws_estimate_the_expectation(float64):
    """Over seeds, the estimates with few draws have the mean that the product rule says."""
    problem = (ard(1.3), LOC.copy(), SCALE.copy(), Z.copy(), 0.1)
    y = jnp.array(Y[0])

    @compiled
    def run(draws):
        by_draws = jax.vmap(lambda d: UncertainInputGP(*problem[:4], noise_variance=0.1, penalty_draws=d).log_prob(y))(
            draws
        )
        number = UncertainInputGP(*problem[:4], noise_variance=0.1, penalty_draws=4).log_prob(y)
        return by_draws, number, three_bounds(*problem, y)

    draws = np.stack([penalty_nodes(jax.random.key(seed), 4, ROWS, 2) for seed in range(400)])
    by_draws, number, bounds = run(draws)
    error = np.std(by_draws) / len(by_draws) ** 0.5
    assert abs(np.mean(by_draws) - bounds["nodes"]) < 4 * error < 0.2 * (bounds["nodes"] - bounds["tight"])
    np.testing.assert_allclose(number, by_draws[0], rtol=1e-12)


def test_penalty_nodes_are_standard_normal_pairs():
    nodes = penalty_nodes(jax.random.key(0), 200, 50, 3)
    np.testing.assert_array_equal(nodes[:100], -nodes[100:])
    half = nodes[:100].reshape(-1, 3)
    assert np.all(np.abs(half.mean(0)) < 4 / len(half) ** 0.5)
    assert np.max(np.abs(np.cov(half.T) - np.eye(3))) < 5 * (2 / len(half)) ** 0.5
    assert np.any(nodes != penalty_nodes(jax.random.key(1), 200, 50, 3))
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"penalty draws is {count}; it must be even"):
            penalty_nodes(jax.random.key(0), count, 5, 2)


# ---------------------------------------------------------------------------------------------------------------
# Gradients, chunks, and use as a distribution


def test_gradients_and_chunks(float64):
    def bound(lengthscale, loc, scale, Z, noise, chunk_size=None):
        gp = UncertainInputGP(
            RBF(lengthscale, variance=1.3), loc, scale, Z, noise_variance=noise, penalty_draws=2, chunk_size=chunk_size
        )
        return jnp.sum(gp.log_prob(jnp.array(Y)))

    @compiled
    def run(*a):
        return [jax.value_and_grad(bound, range(5))(*a, chunk_size=size) for size in (None, 3)]

    at = [jnp.array(a) for a in ([0.8, 1.5], LOC, SCALE, Z, NOISES)]
    whole, chunked = run(*at)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), whole, chunked)
    rng = np.random.default_rng(1)
    for i, gradient in enumerate(whole[1]):
        step = 1e-5 * rng.normal(size=gradient.shape)
        ends = [run(*at[:i], at[i] + sign * step, *at[i + 1 :])[0][0] for sign in (1.0, -1.0)]
        np.testing.assert_allclose(np.sum(gradient * step), (ends[0] - ends[1]) / 2, rtol=1e-6, atol=1e-11)


def test_in_a_numpyro_model_and_as_a_pytree(float64):
    def model(y):
        lengthscale = numpyro.param("lengthscale", jnp.array(0.8))
        with numpyro.plate("outputs", 3):
            gp = UncertainInputGP(
                RBF(lengthscale), LOC.copy(), SCALE.copy(), Z.copy(), noise_variance=0.1, penalty_draws=2
            )
            numpyro.sample("y", gp, obs=y)

    gp = UncertainInputGP(RBF(0.8), LOC.copy(), SCALE.copy(), Z.copy(), noise_variance=0.1, penalty_draws=2)

    @compiled
    def run(gp, y):
        return log_density(model, (y,), {}, {})[0], gp.log_prob(y)

    value, bounds = run(gp, jnp.array(Y))
    np.testing.assert_allclose(value, np.sum(bounds), rtol=1e-10)


def test_draws_have_the_covariance_of_the_model(float64):
    rows = 3
    gp = UncertainInputGP(
        ard(1.3), LOC[:rows].copy(), SCALE[:rows].copy(), Z.copy(), noise_variance=NOISES[:rows].copy(), offset=0.7
    )
    draws = np.asarray(compiled(lambda key: gp.sample(key, (2, 4000)))(jax.random.key(0)))
    assert draws.shape == (2, 4000, rows)
    draws = draws.reshape(-1, rows) - 0.7
    x = np.random.default_rng(0).normal(size=(100_000, rows, 2)) * SCALE[:rows] + LOC[:rows]
    covariance = np.diag(1.3 + NOISES[:rows])
    for a, b in itertools.combinations(range(rows), 2):
        covariance[a, b] = covariance[b, a] = np.mean(
            1.3 * np.exp(-0.5 * np.sum(((x[:, a] - x[:, b]) / np.array([0.8, 1.5])) ** 2, -1))
        )
    products = draws[:, :, None] * draws[:, None, :]
    z = (products.mean(0) - covariance) / (products.std(0) / len(draws) ** 0.5)
    assert np.max(np.abs(z)) < 4.0
    assert np.max(np.abs(draws.mean(0) / (draws.std(0) / len(draws) ** 0.5))) < 4.0


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(kernel=Matern32()), NotImplementedError, "Matern32 .* no closed form"),
        (dict(inducing=[Z, Z]), ValueError, "inducing is a list of 2 blocks"),
        (dict(inducing=Features()), TypeError, "inducing is a block of Features"),
        (dict(scale=-SCALE), ValueError, "scale has entries that are negative"),
        (dict(noise_variance=0.0), ValueError, "noise_variance is 0.0"),
        (dict(noise_variance=np.ones(3)), ValueError, r"noise_variance has shape \(3,\)"),
        (dict(offset=np.ones(3)), ValueError, r"offset has shape \(3,\)"),
        (dict(conditional="grouped"), ValueError, r"conditional is Grouped\(.*'tight' or 'prior'"),
        (
            dict(conditional="prior", penalty_draws=2),
            ValueError,
            r"penalty_draws is given, but conditional is Prior\(\)",
        ),
        (dict(penalty_draws=3), ValueError, "penalty draws is 3"),
        (dict(penalty_draws=np.ones((4, 2))), ValueError, r"penalty_draws has shape \(4, 2\)"),
        (dict(penalty_draws=np.ones((4, 3, 2))), ValueError, r"\(S, 7, 2\) or \(S, 1, 2\)"),
        (dict(penalty_draws=4, penalty_weights=np.ones(3)), ValueError, r"penalty_weights has shape \(3,\)"),
        (dict(penalty_weights=np.ones(3)), ValueError, "penalty_weights"),
    ],
)
def test_refusals(change, error, words):
    given = dict(kernel=RBF(), loc=LOC, scale=SCALE, inducing=Z, noise_variance=0.1) | change
    with pytest.raises(error, match=words):
        UncertainInputGP(**given).log_prob(Y)


@pytest.mark.parametrize(
    "y, words", [(Y[:, :3], r"y has shape .*; it must be \(\.\.\., 7\)"), (np.where(Y > 0, np.nan, Y), "y has NaN")]
)
def test_condition_refuses(y, words):
    with pytest.raises(ValueError, match=words):
        UncertainInputGP(RBF(), LOC, SCALE, Z, noise_variance=0.1).condition(y)


# ---------------------------------------------------------------------------------------------------------------
# Missing observations


@pytest.mark.parametrize("options", [{"conditional": "prior"}, {"penalty_draws": 4}], ids=str)
def test_an_output_with_missing_entries_is_the_one_without_these_rows(options, float64):
    """Its bound, the bound's gradient, and what follows from it, whatever the other outputs lack."""
    mask = np.random.default_rng(4).uniform(size=Y.shape) < 0.7
    mask[2] = True
    draws = options.get("penalty_draws")
    nodes = None if draws is None else penalty_nodes(jax.random.key(0), draws, *LOC.shape)
    rest = {name: value for name, value in options.items() if name != "penalty_draws"}

    def gp(noise, rows=slice(None), mask=None):
        own = rest if nodes is None else rest | {"penalty_draws": jnp.asarray(nodes[:, rows])}
        arrays = jnp.asarray(LOC[rows]), jnp.asarray(SCALE[rows]), jnp.asarray(Z.copy())
        return UncertainInputGP(ard(1.3), *arrays, noise_variance=noise * NOISES[rows], offset=0.2, mask=mask, **own)

    def found(make, y):
        value, slope = jax.value_and_grad(lambda noise: jnp.sum(make(noise).log_prob(y)))(1.0)
        return make(1.0).log_prob(y), value, slope, make(1.0).condition(y).mean_and_variance(NEW_INPUTS)

    @compiled
    def run(y):
        whole = found(lambda noise: gp(noise, mask=mask), y)
        return whole, [
            found(lambda noise, m=m: gp(noise, np.flatnonzero(m)), row[m]) for row, m in zip(y, mask, strict=True)
        ]

    (bounds, _, slope, moments), parts = run(np.where(mask, Y, 0.0))
    np.testing.assert_allclose(bounds, [part[0] for part in parts], rtol=1e-10)
    np.testing.assert_allclose(slope, sum(part[2] for part in parts), rtol=1e-9)
    for i, part in enumerate(parts):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-8, atol=1e-10), moments, part[3])
    missing = np.where(mask, Y, np.nan)
    np.testing.assert_allclose(compiled(lambda y: gp(1.0, mask=mask).log_prob(y))(missing), bounds, rtol=1e-12)


def test_masks_of_another_shape_or_type_are_refused(float64):
    arguments = ard(1.3), LOC, SCALE, Z, Gaussian(variance=0.1)
    with pytest.raises(ValueError, match=r"mask has shape \(3, 4\); it must be"):
        UncertainInputGP(*arguments, mask=np.ones((3, 4), bool))
    with pytest.raises(TypeError, match="mask has dtype float64; it must be boolean"):
        UncertainInputGP(*arguments, mask=np.ones(ROWS))
    with pytest.raises(ValueError, match=r"y has shape \(7,\); it must be \(3, 7\)"):
        UncertainInputGP(*arguments, mask=np.ones((3, ROWS), bool)).log_prob(Y[0])
