"""A likelihood per output column: the same as each part by itself on its own columns; and noise per column."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import Dense, X, Z, compiled
from numpyro import handlers
from numpyro.infer.util import log_density

import npgp
from npgp.conditionals import ObservedRows, as_conditional
from npgp.conditionals.base import row_elbo
from npgp.conditionals.precision import certified_precision
from npgp.likelihoods import (
    Bernoulli,
    Columns,
    Factorized,
    Gaussian,
    HeteroscedasticGaussian,
    Ordinal,
    Poisson,
    StudentT,
    quadrature_error,
)
from npgp.sparse.groups import median_split
from npgp.sparse.residuals import GroupResidual, RowResidual

#: Columns of all kinds, in no order; the Gaussian's noise is its columns' own.
COLUMNS = ((3, 0), (1,), (5, 4), (2,), (6,))
KINDS = ("gaussian", "bernoulli", "poisson", "student", "bimodal")
D, N = 7, 8
NOISE = np.array([[0.3], [0.1]])

_rng = np.random.default_rng(5)
MEAN, VARIANCE, RESIDUAL = _rng.normal(size=(D, N)), _rng.uniform(0.1, 0.6, (D, N)), _rng.uniform(0.2, 1.0, (D, N))
OBSERVED = _rng.normal(size=(D, N))
OBSERVED[1] = _rng.integers(2, size=N)
OBSERVED[4:6] = _rng.integers(4, size=(2, N))
PRESENT = _rng.uniform(size=(D, N)) < 0.7
ROOTS = _rng.normal(size=(D, N, 3))


def bimodal(f):
    return dist.Normal(jnp.square(f) - 1.0, 0.5)


def parts(noise=NOISE):
    # Few nodes: whole and parts have the same.
    return [
        Gaussian(variance=jnp.asarray(noise)),
        Bernoulli(num_nodes=12),
        Poisson("softplus", num_nodes=10),
        StudentT(df=4.0, scale=0.5, num_nodes=16),
        Factorized(bimodal, num_nodes=12),
    ]


def mixed(noise=NOISE):
    return Columns(parts(noise), COLUMNS)


def arrays(dtype, *values):
    return [jnp.asarray(np.array(value), dtype) for value in values]


def assert_parts(whole, separate, rtol=1e-6):
    """Each part's columns of the whole are what the part says of them."""
    for columns, kind, value in zip(COLUMNS, KINDS, separate, strict=True):
        value = np.broadcast_to(value, (*whole.shape[:-2], len(columns), whole.shape[-1]))
        np.testing.assert_allclose(whole[..., columns, :], value, rtol=rtol, atol=rtol, err_msg=kind)


# ---------------------------------------------------------------- the methods


def test_every_method_is_each_parts_on_its_columns():
    """In float32, from which nothing is to be widened; sums of them in float64 are below."""

    @compiled
    def evaluate(y, mean, variance):
        def methods(likelihood, y, mean, variance):
            integrals = y, mean, variance
            first, second = likelihood.moments(mean, variance)
            return {
                "log_prob": likelihood.log_prob(jnp.stack([mean, 2 * mean]), y),
                "moments": jnp.stack([first, second]),
                "expected": likelihood.expected_log_prob(*integrals),
                "marginal": likelihood.log_marginal(*integrals),
                "curvature": likelihood.expected_curvature(*integrals),
            }

        whole = methods(mixed(), y, mean, variance)
        own = [
            methods(part, *(v[np.array(columns)] for v in (y, mean, variance)))
            for part, columns in zip(parts(), COLUMNS, strict=True)
        ]
        return whole, own

    whole, own = evaluate(*arrays(jnp.float32, OBSERVED, MEAN, VARIANCE))
    for name, value in whole.items():
        assert value.dtype == jnp.float32 and value.shape[-2:] == (D, N)
        assert_parts(value, [part[name] for part in own], 1e-5)


def test_what_is_the_same_for_all_columns_broadcasts(float64):
    (variance,) = arrays(float64, VARIANCE[0])

    @compiled
    def evaluate(y, mean, variance):
        rows = mixed().expected_log_prob(y, mean, variance)
        return rows, mixed().expected_log_prob(y, mean, variance[None]), mixed().log_prob(mean[:1], y)

    narrow, wide, first = evaluate(*arrays(float64, OBSERVED, MEAN), variance)
    np.testing.assert_array_equal(narrow, wide)
    assert first.shape == (D, N)


def test_samples_have_the_parts_distributions():
    f, draws = jnp.asarray(MEAN.copy(), jnp.float32), 4000
    likelihood = Columns(
        [Gaussian(variance=NOISE), Bernoulli(), Poisson(), StudentT(df=8.0, scale=0.5)], [(3, 0), (1, 2), (5, 4), (6,)]
    )

    @compiled
    def simulate(key):
        y = likelihood.sample(key, jnp.broadcast_to(f, (draws, D, N)))
        return y, *likelihood.moments(f, jnp.zeros_like(f)), likelihood.sample(key, f)

    y, mean, variance, one = simulate(jax.random.key(0))
    assert y.dtype == jnp.float32 and one.shape == (D, N)
    z = (np.mean(y, 0, dtype=float) - mean) / np.sqrt(np.asarray(variance) / draws)
    assert np.max(np.abs(z)) < 4.5 and np.std(z) > 0.5
    np.testing.assert_allclose(np.mean(np.var(y, 0, dtype=float) / variance, -1), 1.0, atol=0.15)
    assert set(np.unique(y[:, 1:3])) == {0.0, 1.0}
    assert np.all(y[:, 4:6] == np.round(y[:, 4:6]))
    # Columns of one part, and parts, have noise of their own.
    noise = (np.asarray(y) - np.asarray(mean)).transpose(1, 2, 0).reshape(D * N, draws)
    correlation = np.corrcoef(noise) - np.eye(D * N)
    assert np.max(np.abs(correlation)) < 5.5 / np.sqrt(draws)


def test_quadrature_error_is_that_of_the_parts(float64):
    def errors(y, mean, variance):
        own = [
            quadrature_error(part, *(v[np.array(columns)] for v in (y, mean, variance)))
            for part, columns in zip(parts(), COLUMNS, strict=True)
        ]
        return quadrature_error(mixed(), y, mean, variance), own

    whole, own = compiled(errors)(*arrays(float64, OBSERVED, MEAN, 9 * VARIANCE))
    assert np.max(whole[0]) == 0.0  # Gaussian
    # All parts with twice the nodes of the part that has most: at least what each finds by itself, nearly.
    for i, columns in enumerate(COLUMNS[1:], start=1):
        assert np.max(whole[list(columns), :]) > 0.2 * np.max(own[i])


# ---------------------------------------------------------------- each row's share of the ELBO

GROUPS = median_split(_rng.normal(size=(N, 2)), 3)


@functools.cache
def shares(conditional, groups, own):
    """Of the whole and of the parts, in float64; the residual is the columns' own, or the same for all."""
    covariance = np.einsum("dnr,dmr->dnm", ROOTS, ROOTS)
    left = covariance[:, GROUPS.rows[:, :, None], GROUPS.rows[:, None, :]]

    @compiled
    def evaluate(y, mean, variance, d, left):
        y = jnp.where(PRESENT, y, 1.0)  # as observe does

        def residual(columns):
            if groups:
                return GroupResidual(left[columns] if own else left[0], GROUPS)
            return RowResidual(d[columns] if own else d[0])

        def share(rule, likelihood, columns):
            values = (v[columns] for v in (y, mean, variance))
            mask = jnp.asarray(PRESENT)[columns]
            if rule is certified_precision:
                return ObservedRows(likelihood, *values, residual(columns), mask).by_part(rule)
            return rule(likelihood, *values, residual(columns), 0.4, present=mask)

        elbo_of = functools.partial(row_elbo, as_conditional(conditional))
        rules = [elbo_of, certified_precision] if conditional == "tight" and own else [elbo_of]
        every = np.arange(D)
        return [
            (share(rule, mixed(), every), [share(rule, p, np.array(c)) for p, c in zip(parts(), COLUMNS, strict=True)])
            for rule in rules
        ]

    with jax.enable_x64(True):
        found = evaluate(*arrays(jnp.float64, OBSERVED, MEAN, VARIANCE, RESIDUAL, left))
        return jax.tree.map(np.asarray, found)


def test_rows_are_those_of_each_part():
    for whole, separate in shares("grouped", True, True):
        assert whole.shape == (D, N) and np.all(np.isfinite(whole))
        assert_parts(whole, separate, 1e-12)


@pytest.mark.parametrize("conditional", ["prior", "shared", "published"])
def test_rows_without_site_precisions_are_those_of_each_part(conditional):
    ((whole, separate),) = shares(conditional, False, conditional != "prior")
    assert_parts(whole, separate, 1e-12)


def test_a_gaussian_column_keeps_its_closed_form():
    """By the general rule for log-concave likelihoods its noise would be a fixed point's, and iterated for."""
    precision = shares("tight", False, True)[1][0]
    np.testing.assert_array_equal(precision[[3, 0]], np.where(PRESENT[[3, 0]], 1 / NOISE, 0.0))
    # All of the others feel something; the last promises nothing, and may be better off without.
    assert np.all((precision > 0)[:6] == PRESENT[:6]) and np.all(precision[~PRESENT] == 0)


def test_the_certificate_is_the_weakest():
    every = {"gaussian": Gaussian(variance=1.0), "log-concave": Poisson(), "single-peaked": StudentT(df=3.0, scale=1.0)}
    every["none"] = Factorized(bimodal)
    order = list(every)
    for i, first in enumerate(order):
        for j, second in enumerate(order):
            found = Columns([every[first], every[second]])
            assert found.proof == order[max(i, j)]
            assert found.concave == ((0,) if max(i, j) < 2 else ())
            assert as_conditional("tight").is_bound(found)
            assert as_conditional("published").is_bound(found) == (max(i, j) < 2)


# ---------------------------------------------------------------- in models

OUTPUTS = 4
Y = np.stack([np.sin(X[:, 0]), _rng.integers(2, size=8), _rng.poisson(2.0, 8), np.cos(X[:, 0])])
SEEN = _rng.uniform(size=Y.shape) < 0.7
MODEL_NOISE = np.array([[0.2], [0.5]])


def model_parts():
    return [(Gaussian(variance=jnp.asarray(MODEL_NOISE)), [0, 3]), (Bernoulli(), [1]), (Poisson(), [2])]


def mixed_model():
    return Columns(*zip(*model_parts(), strict=True))


def model(X, y, likelihood, conditional, mask=None):
    with numpyro.plate("outputs", y.shape[0], dim=-2):
        f = models.sparse_gp(jitter=1e-12).draw()
        with numpyro.plate("rows", X.shape[0], dim=-1):
            npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional, mask=mask)


def parameters(outputs=OUTPUTS, seed=3):
    one = [models.random_params(seed=seed + i) for i in range(outputs)]
    return {name: jnp.stack([params[name] for params in one])[:, None] for name in one[0]}


def whole_and_parts(fn):
    """``fn(likelihood, columns)`` of the mixed model, and the sum over models of the parts."""
    return fn(mixed_model(), list(range(OUTPUTS))), sum(fn(likelihood, own) for likelihood, own in model_parts())


def test_the_elbo_is_the_sum_of_the_parts(float64):
    chosen = npgp.conditionals.Grouped(median_split(X, 3))

    @compiled
    def evaluate(params, y):
        def elbo(likelihood, columns, params):
            own = {name: value[np.array(columns)] for name, value in params.items()}
            static = {"likelihood": likelihood, "conditional": chosen, "mask": SEEN[columns]}
            return models.make_elbo(model, **static)(jax.random.key(0), own, jnp.asarray(X), y[np.array(columns)])

        whole, slope = jax.value_and_grad(lambda params: elbo(mixed_model(), list(range(OUTPUTS)), params))(params)
        return whole, sum(elbo(likelihood, own, params) for likelihood, own in model_parts()), slope

    whole, separate, slope = evaluate(parameters(), jnp.asarray(np.where(SEEN, Y, np.nan)))
    assert np.isfinite(whole) and all(np.all(np.isfinite(value)) for value in slope.values())
    np.testing.assert_allclose(whole, separate, rtol=1e-12)


def test_the_density_without_a_guide_is_the_product_of_the_parts(float64):
    values = {"f.u": jnp.asarray(np.random.default_rng(1).normal(size=(OUTPUTS, 1, len(Z))))}

    @compiled
    def evaluate(values):
        def density(likelihood, columns):
            own = {name: value[np.array(columns)] for name, value in values.items()}
            arguments = jnp.asarray(X), jnp.asarray(Y[columns]), likelihood, "tight"
            return log_density(model, arguments, {}, own)[0]

        return whole_and_parts(density)

    np.testing.assert_allclose(*evaluate(values), rtol=1e-12)


def test_simulated_observations_are_of_the_columns_kinds(float64):
    def simulate(key):
        def without_data(X):
            with numpyro.plate("outputs", OUTPUTS, dim=-2):
                f = models.sparse_gp().draw()
                with numpyro.plate("rows", 8, dim=-1):
                    npgp.observe("y", f(X), mixed_model())

        trace = handlers.trace(handlers.seed(without_data, key)).get_trace(jnp.asarray(X))
        return trace["y"]["value"]

    y = compiled(simulate)(jax.random.key(2))
    assert y.shape == (OUTPUTS, 8) and y.dtype == float64
    assert np.all(np.isin(y[1], [0, 1])) and np.all((y[2] >= 0) & (y[2] == jnp.round(y[2])))
    assert np.all(y[::3] != jnp.round(y[::3]))


@pytest.mark.parametrize("conditional", ["prior", "tight", "grouped"])
def test_gaussian_noise_per_column_is_dense_algebra(conditional, float64):
    """As a variance (D, 1), and as a likelihood for each column."""
    noise, y = np.array([[0.2], [0.05], [1.0]]), np.random.default_rng(2).normal(size=(3, 8))
    groups, params = median_split(X, 3) if conditional == "grouped" else None, parameters(3)
    chosen = npgp.conditionals.Grouped(groups) if groups else conditional

    @compiled
    def evaluate(params):
        one, several = Gaussian(variance=jnp.asarray(noise)), Columns([Gaussian(variance=v) for v in noise[:, 0]])
        return [
            models.make_elbo(model, likelihood=likelihood, conditional=chosen)(
                jax.random.key(0), params, jnp.asarray(X), jnp.asarray(y)
            )
            for likelihood in (one, several)
        ]

    expected = 0.0
    for d in range(3):
        own = {name: np.asarray(value[d, 0]) for name, value in params.items()}
        dense, v = Dense("svgp", X, own), noise[d, 0]
        if conditional != "grouped":
            expected += dense.elbo(y[d], conditional, v)
            continue
        # Fit and spread as without a residual; then half a log-determinant for each group.
        expected += dense.elbo(y[d], "tight", v) + 0.5 * np.sum(np.log1p(dense.residual / v))
        for rows, inside in zip(groups.rows, groups.mask, strict=True):
            block = dense.D[np.ix_(rows[inside], rows[inside])]
            expected -= 0.5 * np.linalg.slogdet(np.eye(len(block)) + block / v)[1]
    np.testing.assert_allclose(evaluate(params), [expected, expected], rtol=1e-9)


def test_conditioning_a_posterior_on_noise_of_its_own_for_each_column(float64):
    noise, y = np.array([0.2, 0.05]), jnp.asarray(Y[[0, 3]])
    posterior = models.sparse_gp(jitter=1e-12).posterior(parameters(2))

    def mean(likelihood):
        return posterior.update(jnp.asarray(X), y, likelihood).mean(jnp.asarray(models.X_NEW))

    several = mean(Columns([Gaussian(variance=v) for v in noise]))
    np.testing.assert_allclose(several, mean(Gaussian(variance=jnp.asarray(noise[:, None]))), rtol=1e-8)


# ---------------------------------------------------------------- as an object


def test_it_is_a_pytree_and_can_be_saved(tmp_path, float64):
    y, mean = arrays(float64, OBSERVED, MEAN)

    def total(noise):
        return jnp.sum(Columns([Gaussian(variance=noise), Poisson()], [(2, 0), (1,)]).log_prob(mean[3:6], y[3:6]))

    step = 1e-6
    slope, above, below = compiled(lambda v: (jax.grad(total)(v), total(v + step), total(v - step)))(0.4)
    np.testing.assert_allclose(slope, (above - below) / (2 * step), rtol=1e-6)
    likelihood = Columns([Gaussian(variance=0.4), Poisson()], [(2, 0), (1,)])
    rebuilt = jax.tree.unflatten(*reversed(jax.tree.flatten(likelihood)))
    npgp.save(tmp_path / "likelihood.npz", likelihood)
    for again in (rebuilt, npgp.load(tmp_path / "likelihood.npz")):
        assert again.columns == ((2, 0), (1,)) and again.num_columns == 3
        assert [type(part) for part in again.likelihoods] == [Gaussian, Poisson]
    assert jax.tree.structure(rebuilt) == jax.tree.structure(likelihood)


def test_functions_become_likelihoods_and_nodes_can_be_set_for_all():
    likelihood = Columns([bimodal, Gaussian(variance=1.0), Bernoulli(num_nodes=30)])
    assert likelihood.columns == ((0,), (1,), (2,)) and likelihood.num_nodes == 64
    assert isinstance(likelihood.likelihoods[0], Factorized)
    finer = dataclasses.replace(likelihood, num_nodes=40)
    assert [getattr(part, "num_nodes", None) for part in finer.likelihoods] == [40, None, 40]
    assert Columns([Gaussian(variance=1.0)]).num_nodes == 0


def test_observations_are_checked_by_column():
    likelihood = Columns([Gaussian(variance=1.0), Bernoulli(), Poisson()], [(0,), (2, 1), (3,)])
    y = np.array([[0.5, -3.0], [0, 1], [1, np.nan], [7, 0]])
    likelihood.check(y)
    likelihood.check(np.stack([y, y]))
    wrong = y.copy()
    wrong[1, 0] = 2
    with pytest.raises(ValueError, match="columns 2, 1: y has the value 2; for Bernoulli it must be 0 or 1"):
        likelihood.check(wrong)
    with pytest.raises(ValueError, match=r"likelihoods for 4 columns.*shape \(2, 4\)"):
        likelihood.check(y.T)
    # Without columns, as what a mask leaves: what no column can have.
    counts = Columns([Bernoulli(), Poisson()])
    counts.check(np.array([0.0, 7.0, np.nan]))
    with pytest.raises(ValueError, match=r"the value 0.5; in some column it must be 0 or 1 or a count"):
        counts.check(np.array([0.5, 1.0]))


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (([],), ValueError, "0 likelihoods and 0 groups"),
        ((Gaussian(variance=1.0),), TypeError, "must be a list of likelihoods"),
        (([1.0],), TypeError, "must be a Likelihood"),
        (([Gaussian(variance=1.0), Bernoulli()], [[0]]), ValueError, "2 likelihoods and 1 groups"),
        (([Gaussian(variance=1.0), Bernoulli()], [[0, 1], [1]]), ValueError, "each of 0, …, D − 1 once"),
        (([Gaussian(variance=1.0), Bernoulli()], [[0, 1], [3]]), ValueError, r"columns is \[\[0, 1\], \[3\]\]"),
        (([Gaussian(variance=1.0), Bernoulli()], [[0, 1], []]), ValueError, "no group that is empty"),
        (([HeteroscedasticGaussian()],), ValueError, "HeteroscedasticGaussian has 2"),
    ],
)
def test_what_cannot_be_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        Columns(*arguments)


def test_values_of_another_number_of_columns_are_refused():
    likelihood = Columns([Gaussian(variance=1.0), Ordinal([0.0, 1.0])])
    with pytest.raises(ValueError, match=r"likelihoods for 2 columns.*shape \(3, 5\)"):
        likelihood.log_prob(np.zeros((3, 5)), np.zeros((3, 5)))
    # One function for all columns would else be counted twice.
    with pytest.raises(ValueError, match="likelihoods for 2 columns"):
        likelihood.log_prob(np.zeros(5), np.zeros(5))


def test_masked_values_are_checked_in_their_own_column():
    """A count where a label belongs, beside a missing entry, is refused; one beside what is missing is not."""
    likelihood = Columns([npgp.Bernoulli(), npgp.Poisson()])
    X = np.linspace(0.0, 1.0, 3)[:, None]
    mask = np.array([[True, True, False], [True, False, True]])

    def observe(y, latent=lambda f: f(X), conditional="tight"):
        with handlers.seed(rng_seed=0):
            with numpyro.plate("outputs", 2, dim=-2):
                f = npgp.SparseGP("f", npgp.RBF(1.0), X[:2].copy()).draw()
            npgp.observe("y", latent(f), likelihood, obs=y, mask=mask, conditional=conditional)

    with pytest.raises(ValueError, match=r"columns 0: y has the value 5"):
        observe(np.array([[0.0, 5.0, np.nan], [3.0, np.nan, 2.0]]))
    observe(np.array([[0.0, 1.0, 5.0], [3.0, -2.0, 2.0]]))


def test_columns_of_one_draw_without_a_certificate():
    """A proof for each column alone is none for columns that share a residual."""
    likelihood = Columns([npgp.Gaussian(variance=0.1), npgp.StudentT(df=3.0, scale=0.5)], num_nodes=20)
    no_promise = Columns([npgp.Gaussian(variance=0.1), lambda f: dist.Cauchy(f, 1.0)])
    X = np.linspace(0.0, 1.0, 3)[:, None]

    def observe(likelihood, conditional):
        with handlers.seed(rng_seed=0):
            f = npgp.SparseGP("f", npgp.RBF(1.0), X[:2].copy()).draw()
            W = np.array([[1.0], [0.5]])
            npgp.observe("y", f(X) * W, likelihood, obs=np.zeros((2, 3)), conditional=conditional)

    assert no_promise.proof == "none" != likelihood.proof
    observe(no_promise, "prior")
    with pytest.raises(ValueError, match="f is spread over several outputs"):
        observe(no_promise, "tight")
