"""What q does to the residual: each row's share of the ELBO, and that the certified ones never exceed the evidence."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import oracles
import pytest
from scipy import stats
from scipy.special import logsumexp

from npgp import likelihoods
from npgp.collapsed import CollapsedGP
from npgp.conditionals import Grouped, ObservedRows, Tight, as_conditional, base, precision
from npgp.kernels import RBF
from npgp.pytrees import pytree
from npgp.sparse.groups import consecutive, median_split, single
from npgp.sparse.residuals import GroupResidual, RowResidual


def row_elbo(conditional, *args, **kwargs):
    return base.row_elbo(as_conditional(conditional), *args, **kwargs)


def bimodal(f):
    """The sign of f is lost: nothing is known about this likelihood."""
    return dist.Normal(jnp.square(f) - 1.0, 0.5)


LIKELIHOODS = {
    "logit": likelihoods.Bernoulli("logit"),
    "probit": likelihoods.Bernoulli("probit"),
    "poisson": likelihoods.Poisson(),
    "softplus": likelihoods.Poisson("softplus"),
    "laplace": likelihoods.Laplace(scale=0.5),
    "gamma": likelihoods.Gamma(concentration=2.0),
    "student": likelihoods.StudentT(df=3.0, scale=0.3),
    "bimodal": likelihoods.Factorized(bimodal),
}
LOG_CONCAVE = ("logit", "probit", "poisson", "softplus", "laplace", "gamma")
OBSERVATIONS = {"logit": (0, 1), "probit": (0, 1), "poisson": (0, 4), "softplus": (0, 4), "gamma": (0.2, 3.0)}


def grid_of_rows(name):
    """Rows (y, μ, s, d) of all kinds."""
    ys = OBSERVATIONS.get(name, (0.0, 1.5))
    axes = np.meshgrid(ys, [-2.0, 0.1, 1.3], [0.0, 0.4], [0.0, 1e-3, 0.3, 3.0])
    y, mean, variance, residual = (axis.ravel() for axis in axes)
    return (y.astype(int) if isinstance(ys[0], int) else y), mean, variance, residual


# ---------------------------------------------------------------- the formulas


@functools.cache
def rows_of(name):
    """Every conditional of every row, and ``tight``'s gradient, in float64."""
    likelihood, (y, *moments) = LIKELIHOODS[name], grid_of_rows(name)

    @jax.jit
    def evaluate(moments):
        def tight(moments):
            return row_elbo("tight", likelihood, y, *moments)

        def best_site(moments):
            precisions = jnp.exp(jnp.linspace(-7.0, 7.0, 281))
            return jnp.max(jax.lax.map(lambda p: row_elbo("published", likelihood, y, *moments, p), precisions), axis=0)

        gradient = jax.grad(lambda moments: jnp.sum(tight(moments)))(moments)
        shifts = 1e-4 * jnp.concatenate([jnp.eye(3), -jnp.eye(3)])
        mean, variance, residual = moments
        # At the fixed point ∂ELBO/∂d = −½ λ/(1 + λd), from which λ can be read.
        precision = -2 * gradient[2] / (1 + 2 * gradient[2] * residual)
        return {
            "prior": row_elbo("prior", likelihood, y, *moments),
            "tight": tight(moments),
            "best site": best_site(moments) if name in LOG_CONCAVE else None,
            "gradient": gradient,
            "near": jax.lax.map(lambda shift: tight(moments + shift[:, None]), shifts),
            "precision": precision,
            "curvature": likelihood.expected_curvature(y, mean, variance + residual / (1 + precision * residual)),
        }

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, evaluate(np.stack(moments)))


@pytest.mark.parametrize("name", oracles.LOG_DENSITY)
def test_prior_is_the_expected_log_likelihood(name):
    """Of variance and residual together, by sums over 20,001 values of f."""
    y, mean, variance, residual = grid_of_rows(name)
    z = np.linspace(-10.0, 10.0, 20_001)[:, None]
    terms = oracles.LOG_DENSITY[name](mean + np.sqrt(variance + residual) * z, y)
    expected = np.sum(stats.norm.pdf(z) * terms, axis=0) * (z[1, 0] - z[0, 0])
    np.testing.assert_allclose(rows_of(name)["prior"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LOG_CONCAVE)
def test_tight_takes_the_best_site_precision(name):
    rows = rows_of(name)
    # A grid's best, half a step of which is a fortieth of λ, is hardly worse; after a few iterations nor is it better.
    gained = rows["tight"] - rows["best site"]
    assert np.all(gained > -1e-3) and np.all(gained < 2e-4), (np.min(gained), np.max(gained))
    assert np.all(rows["tight"] >= rows["prior"] - 1e-10)
    assert np.max(rows["tight"] - rows["prior"]) > 0.04
    *_, residual = grid_of_rows(name)
    nothing_left = residual == 0.0
    np.testing.assert_allclose(rows["tight"][nothing_left], rows["prior"][nothing_left], rtol=1e-10)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_gradients_are_those_of_the_value(name):
    # No gradient flows through the site precision where the value is stationary in it: true of the exact fixed
    # point alone, so that this also says how near to it a few iterations come.
    rows, (*_, variance, residual) = rows_of(name), grid_of_rows(name)
    inside = (variance > 0) & (residual > 1e-2)  # where finite differences can be taken
    for i, slope in enumerate(rows["gradient"]):
        assert np.all(np.isfinite(slope))
        difference = (rows["near"][i] - rows["near"][3 + i])[inside] / 2e-4
        np.testing.assert_allclose(slope[inside], difference, rtol=0.03, atol=0.03)
    assert np.max(np.abs(rows["gradient"])) > 0.5


@pytest.mark.parametrize("name", LOG_CONCAVE)
def test_site_precision_is_the_expected_curvature(name):
    # λ = κ(s + ĉ(λ)), with λ as the gradient says.
    rows, residual = rows_of(name), grid_of_rows(name)[-1]
    felt = residual > 1e-2
    np.testing.assert_allclose(rows["precision"][felt], rows["curvature"][felt], rtol=0.05)


def test_precisions_of_rows_and_groups_are_those_of_their_own_variances(float64):
    """λ = E[−∂²log p] = exp(m + ½ (s + ĉ(λ))) of counts: solved to 1e-4 in rows by themselves, to 5e-2 in a group."""
    mean, variance = np.linspace(-1.0, 3.0, 6), np.full(6, 0.3)
    X = np.linspace(0.0, 2.0, 6)
    D = 4.0 * np.exp(-0.5 * (X[:, None] - X) ** 2) + 0.01 * np.eye(6)
    poisson, groups = likelihoods.Poisson("exp"), consecutive(6, 6)
    coupled = GroupResidual(D[None], groups)
    for residual, tolerance in ((RowResidual(np.diag(D)), 1e-4), (coupled, 5e-2)):
        best = jax.jit(precision.best_precision)(ObservedRows(poisson, np.ones(6), mean, variance, residual))
        covariance = np.diag(np.diag(D)) if residual is not coupled else D
        left = np.diag(np.linalg.inv(np.linalg.inv(covariance) + np.diag(best)))
        np.testing.assert_allclose(np.log(best), mean + 0.5 * (variance + left), atol=tolerance)


def test_precision_of_a_heavy_tail_is_the_largest_that_is_certified(float64):
    """Beside a search of 2,000 values, of the conditions themselves: λ ≤ κ(ĉ), and λ ĉ ≤ ∫ κ over [0, ĉ]."""
    y, mean, variance, d = np.array([0.0, 0.2, 0.5, 1.0, 2.0]), np.zeros(5), np.full(5, 0.05), np.full(5, 0.5)
    student = likelihoods.StudentT(df=4.0, scale=0.3)
    got = jax.jit(precision.certified_precision)(ObservedRows(student, y, mean, variance, RowResidual(d)))
    log_ends = np.log([1e-2, float(student.greatest_curvature)])
    tried = np.exp(np.linspace(*log_ends, 2000))[:, None]
    z, w = np.polynomial.hermite_e.hermegauss(80)
    w = w[:, None, None] / w.sum()

    def expected(v):
        return np.sum(w * stats.t.logpdf(y, 4.0, np.sqrt(v) * z[:, None, None], 0.3), axis=0)

    left, h = d / (1.0 + tried * d), 1e-4
    curvature = (expected(variance + left - h) - expected(variance + left + h)) / h
    certified = (curvature >= tried) & (2.0 * (expected(variance) - expected(variance + left)) >= tried * left)
    largest = np.max(np.where(certified, tried, 0.0), axis=0)
    np.testing.assert_allclose(got, largest, rtol=9e-3, atol=1e-6)


def test_gaussian_tight_is_the_site_formula_at_the_noise_precision(x64):
    rng = np.random.default_rng(0)
    y, mean = rng.normal(size=(2, 3, 20)).astype(x64)
    variance, residual = rng.exponential(size=(2, 20)).astype(x64)
    noise = rng.uniform(0.1, 2.0, size=20).astype(x64)
    likelihood = likelihoods.Gaussian(variance=noise)

    @jax.jit
    def evaluate(conditional_free):
        tight = row_elbo("tight", likelihood, y, mean, variance, residual)
        site = row_elbo("published", likelihood, y, mean, variance, residual, 1 / conditional_free)
        return tight, site

    tight, site = evaluate(noise)
    assert tight.shape == (3, 20) and tight.dtype == x64
    np.testing.assert_allclose(tight, site, rtol={jnp.float32: 2e-4, jnp.float64: 1e-10}[x64], atol=1e-6)
    expected = -0.5 * (((y - mean) ** 2 + variance) / noise + np.log(2 * np.pi * noise) + np.log1p(residual / noise))
    np.testing.assert_allclose(tight, expected, rtol=1e-4)


def test_shared_scales_the_residual_at_its_price(float64):
    likelihood, (y, mean, variance, residual) = LIKELIHOODS["probit"], grid_of_rows("probit")

    @jax.jit
    def evaluate(m):
        expected = likelihood.expected_log_prob(y, mean, variance + m * residual) - 0.5 * (m - 1 - jnp.log(m))
        return row_elbo("shared", likelihood, y, mean, variance, residual, m), expected

    for m in (1e-3, 0.4, 1.0):
        value, expected = evaluate(m)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(value, rows_of("probit")["prior"], rtol=1e-12)  # m = 1 is the prior


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_float32_values_and_gradients(name):
    # Everything finite where float32 is hardest: nothing left of the residual, or all but one draw of it.
    likelihood, (y, mean, variance, residual) = LIKELIHOODS[name], grid_of_rows(name)
    moments = [array.astype(np.float32) for array in (mean, variance, residual)]

    @jax.jit
    def evaluate(y, *moments):
        def tight(*moments):
            return row_elbo("tight", likelihood, y, *moments)

        return tight(*moments), jax.grad(lambda *m: jnp.sum(tight(*m)), argnums=(0, 1, 2))(*moments)

    value, gradient = evaluate(np.asarray(y, np.float32 if y.dtype == float else np.int32), *moments)
    assert value.dtype == np.float32
    np.testing.assert_allclose(value, rows_of(name)["tight"], rtol=2e-3, atol=2e-3)
    # Rules for several variances have other nodes in float32, of which the precisions of these two are.
    slack = {"probit": 0.03, "softplus": 0.03}.get(name, 5e-5)
    np.testing.assert_allclose(np.stack(gradient), rows_of(name)["gradient"], rtol=slack, atol=0.01 * slack)


def test_names_and_certificates():
    for name, likelihood in {**LIKELIHOODS, "gaussian": likelihoods.Gaussian(variance=1.0)}.items():
        for conditional in ("prior", "tight", "grouped", "full", "shared"):
            assert as_conditional(conditional).is_bound(likelihood)
        assert as_conditional("published").is_bound(likelihood) == (name in (*LOG_CONCAVE, "gaussian"))
    assert as_conditional("tight") == Tight()
    with pytest.raises(ValueError, match="conditional is 'tigth'; it must be one of 'prior', 'tight'"):
        as_conditional("tigth")
    with pytest.raises(
        TypeError, match="conditional is 3; it must be an npgp.conditionals.Conditional such as npgp.conditionals.Tight"
    ):
        as_conditional(3)


# ---------------------------------------------------------------- never above the evidence

SITES = np.exp(np.linspace(-4.0, 5.0, 13))
SHARES = np.exp(np.linspace(-5.0, 0.0, 11))
PROBLEMS, ROWS, RANK = 24, 4, 2


def random_problems(name, seed=0):
    """
    Roots of the covariance of four rows, observations, and one inducing feature's projection.

    Covariances have rank two, so that rows depend strongly on each other, which is where a bound that treats them
    one by one could fail; and the evidence is a sum over a plane.
    """
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(PROBLEMS, ROWS, RANK)) * np.exp(rng.uniform(-3.0, 0.7, size=(PROBLEMS, 1, 1)))
    f = np.einsum("bnr,br->bn", roots, rng.normal(size=(PROBLEMS, RANK)))
    sample = {
        "logit": lambda: rng.uniform(size=f.shape) < 1 / (1 + np.exp(-f)),
        "probit": lambda: rng.normal(size=f.shape) < f,
        "poisson": lambda: rng.poisson(np.exp(f)),
        "laplace": lambda: f + rng.laplace(scale=0.5, size=f.shape),
        "student": lambda: f + 0.3 * rng.standard_t(3, size=f.shape),
        "bimodal": lambda: f**2 - 1 + 0.5 * rng.normal(size=f.shape),
    }
    y = sample[name]()
    y = y.astype(int) if name in ("logit", "probit", "poisson") else y
    # A linear functional of f, whitened: what it explains of f is a aᵀ.
    a = np.einsum("bnr,br->bn", roots, unit(rng.normal(size=(PROBLEMS, RANK))))
    if name == "bimodal":  # a function's integrals are dear
        return roots[::3], y[::3], a[::3]
    return roots, y, a


def unit(v):
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


@functools.cache
def evidence_of(name):
    # The kinks of the Laplace density make the sum converge slowly.
    nodes = 601 if name == "laplace" else 241
    roots, y, _ = random_problems(name)
    log_density = oracles.LOG_DENSITY[name]
    return np.array(
        [oracles.log_evidence(r, lambda f, y=y_n: log_density(f, y), nodes) for r, y_n in zip(roots, y, strict=True)]
    )


GROUPS = {"grouped": consecutive(ROWS, 3), "full": single(ROWS)}  # of 3 and 1


def diagonal(D):
    return jnp.diagonal(D, axis1=-2, axis2=-1)


def residual_in_groups(D, groups):
    """From the residual's whole covariance, (..., N, N)."""
    return GroupResidual(D[..., groups.rows[:, :, None], groups.rows[:, None, :]], groups)


def test_probit_evidence_is_an_orthant_probability():
    # Σ_n log Φ(± f_n) integrated over f is P(± (f_n + e_n) > 0 for all n), e ~ N(0, I).
    roots, y, _ = random_problems("probit")
    for i in range(6):
        signs = np.where(y[i], 1.0, -1.0)
        covariance = np.outer(signs, signs) * (roots[i] @ roots[i].T + np.eye(ROWS))
        orthant = stats.multivariate_normal.cdf(np.zeros(ROWS), cov=covariance, abseps=1e-7, releps=1e-7, rng=0)
        np.testing.assert_allclose(evidence_of("probit")[i], np.log(orthant), atol=2e-4)


def best_bounds(name):
    """For each conditional and setting, the best bound over a grid of q(ε) and of the conditional's parameter."""
    likelihood = LIKELIHOODS[name]
    roots, y, a = random_problems(name)
    D, a = np.einsum("bnr,bmr->bnm", roots, roots)[:, None], a[:, None]
    left = D - a[..., :, None] * a[..., None, :]
    means = np.linspace(-2.5, 2.5, 5 if name == "bimodal" else 13)  # a function's integrals are dear
    m, s = (axis.ravel() for axis in np.meshgrid(means, [0.2, 0.5, 0.9]))
    # Mean, variance and residual of each row, and the KL divergence, for each problem and q(ε).
    settings = {
        "no feature": (0 * a, 0 * a, D, 0.0),
        "one feature": (m[:, None] * a, s[:, None] ** 2 * a**2, left, 0.5 * (s**2 + m**2 - 1 - np.log(s**2))),
        "mean-only feature": (m[::3, None] * a, 0 * a, D, 0.5 * m[::3] ** 2),
    }
    nothing = np.zeros(1)
    shares = SHARES[::5] if name == "bimodal" else SHARES  # a function's integrals are dear
    chosen = {"prior": nothing, "tight": nothing, "grouped": nothing, "full": nothing, "shared": shares}
    if likelihood.proof == "log-concave":
        chosen["published"] = SITES

    # All settings side by side, each a part of the q(ε): a third of the program.
    sizes = [mean.shape[1] for mean, *_ in settings.values()]
    parts = dict(zip(settings, np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]), strict=True))

    def side_by_side(i, *shape):
        given = [
            np.broadcast_to(s[i], (len(y), size, *shape)) for s, size in zip(settings.values(), sizes, strict=True)
        ]
        return np.concatenate(given, axis=1)

    moments = side_by_side(0, ROWS), side_by_side(1, ROWS), side_by_side(2, ROWS, ROWS), side_by_side(3)

    @jax.jit
    def everything(y, mean, variance, D, kl):
        def best(conditional, parameters):
            residual = residual_in_groups(D, GROUPS[conditional]) if conditional in GROUPS else diagonal(D)

            def bound(parameter):
                rows = row_elbo(conditional, likelihood, y[:, None], mean, variance, residual, parameter)
                return jnp.sum(rows, -1) - kl

            return jnp.max(jax.lax.map(bound, parameters), axis=0)

        return {conditional: best(conditional, parameters) for conditional, parameters in chosen.items()}

    with jax.enable_x64(True):
        found = jax.tree.map(np.asarray, everything(y, *moments))
    return {(c, setting): found[c][:, part].max(axis=1) for setting, part in parts.items() for c in chosen}


@pytest.mark.parametrize("name", ["probit", "poisson", "laplace", "student", "bimodal"])
def test_certified_bounds_are_below_the_evidence(name):
    evidence, bounds = evidence_of(name), best_bounds(name)
    error = 2e-3 if name == "laplace" else 1e-4  # of the evidence and of expectations, by quadrature
    for (conditional, setting), bound in bounds.items():
        assert as_conditional(conditional).is_bound(LIKELIHOODS[name])
        gap = evidence - bound
        assert np.all(gap > -error), (conditional, setting, np.min(gap))
        assert np.min(gap) < 0.1, (conditional, setting)  # sharp enough to be refuted
    mean_gap = {key: np.mean(evidence - bound) for key, bound in bounds.items()}
    # m = 1 is among the shares, so that this holds of every problem.
    assert np.all(bounds["shared", "no feature"] >= bounds["prior", "no feature"] - 1e-9)
    if name in ("probit", "poisson", "laplace"):
        for setting in ("no feature", "one feature"):
            gaps = [mean_gap[c, setting] for c in ("prior", "shared", "tight", "grouped", "full")]
            assert np.all(np.diff(gaps) < 0), gaps
            assert np.all(bounds["tight", setting] >= bounds["prior", setting] - 1e-9)
            # Each row its own precision, against the best common one.
            assert mean_gap["tight", setting] < mean_gap["published", setting] + 1e-3


@pytree
@dataclass(frozen=True, eq=False)
class Pair(likelihoods.Likelihood):
    """
    The counterexample's two factors: log(1 − exp(−f⁸)) where y is 0 and −f²/2 where it is 1; with an integral that
    resolves the logarithm's pole at zero.
    """

    def log_prob(self, f, y):
        first = jnp.log(-jnp.expm1(-(jnp.where(y == 0, f, 1.0) ** 8)))
        return jnp.where(y == 0, first, -0.5 * f**2)

    def expected_log_prob(self, y, mean, variance):
        t = np.linspace(-2.1, 2.1, 2001)
        t, step = (t[1:] + t[:-1]) / 2, t[1] - t[0]
        z = (t**3)[:, None]  # dense near zero
        weights = 3 * t[:, None] ** 2 * step * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
        return jnp.sum(weights * self.log_prob(mean + jnp.sqrt(variance) * z, y), 0)


def test_a_learned_precision_is_no_bound_for_other_likelihoods(float64):
    # No inducing features and two rows, D = a aᵀ + 1e-4 I with a = (1, 10) (docs/theory.md, section 2).
    covariance = np.outer([1.0, 10.0], [1.0, 10.0]) + 1e-4 * np.eye(2)
    y, zero, d, likelihood = np.array([0, 1]), np.zeros(2), np.diag(covariance), Pair()

    def log_density(f):
        with np.errstate(divide="ignore"):  # at f = 0, a node
            return np.stack([np.log(-np.expm1(-(f[..., 0] ** 8))), -0.5 * f[..., 1] ** 2], -1)

    evidence = oracles.log_evidence(np.linalg.cholesky(covariance), log_density, 401)
    assert evidence == pytest.approx(-16.0736, abs=1e-4)

    @functools.partial(jax.jit, static_argnums=0)
    def best(conditional, parameters):
        rows = functools.partial(row_elbo, conditional, likelihood, y, zero, zero, d)
        return jnp.max(jax.lax.map(lambda p: jnp.sum(rows(p)), parameters))

    found = best("published", np.exp(np.linspace(-4, 4, 401)))
    assert found == pytest.approx(-9.6775, abs=1e-3) and found > evidence + 5
    assert not as_conditional("published").is_bound(likelihood)
    found = best("shared", np.exp(np.linspace(-6, 0, 1201)))
    assert found == pytest.approx(-20.6973, abs=1e-3) and found < evidence
    assert jax.jit(lambda: jnp.sum(row_elbo("tight", likelihood, y, zero, zero, d)))() < evidence


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize("name", ["student", "gaussian"])
def test_groups_of_one_row_are_tight_and_one_group_is_full(name):
    likelihood = {**LIKELIHOODS, "gaussian": likelihoods.Gaussian(variance=0.3)}[name]
    rng = np.random.default_rng(0)
    N = 4
    root = rng.normal(size=(N, 2))
    y = rng.integers(0, 2, size=N) if name == "probit" else rng.normal(size=N)
    mean, variance = rng.normal(size=N), rng.uniform(0.1, 1.0, size=N)
    split = median_split(root.astype(np.float32), 3)

    @jax.jit
    def evaluate(y):
        D = jnp.asarray(root @ root.T)
        rows = functools.partial(row_elbo, likelihood=likelihood, y=y, mean=mean, variance=variance)
        return {
            "tight": rows("tight", residual=diagonal(D)),
            "ones": rows("grouped", residual=residual_in_groups(D, consecutive(N, 1))),
            "all": rows("grouped", residual=residual_in_groups(D, single(N))),
            "full": rows("full", residual=residual_in_groups(D, single(N))),
            "permuted": rows("grouped", residual=residual_in_groups(D, split)),
            "pair": rows("grouped", residual=residual_in_groups(D, consecutive(N, 2))),
        }

    with jax.enable_x64(True):
        found = jax.tree.map(np.asarray, evaluate(y))
    # To the fixed point's accuracy, which the groups' own iterations improve.
    np.testing.assert_allclose(found["ones"], found["tight"], atol=2e-3, rtol=1e-3)
    total = {key: np.sum(rows) for key, rows in found.items()}
    assert total["pair"] > total["tight"] + 1e-3
    if name in ("gaussian", "probit"):
        np.testing.assert_allclose(found["all"], found["full"], rtol=1e-10)
    else:  # without its least value, which one group of all rows needs not
        assert total["full"] >= total["all"] - 1e-6
    if name == "gaussian":
        # The formula with determinants; a group's terms are shared among its rows.
        np.testing.assert_allclose(found["ones"], found["tight"], rtol=1e-10)
        for key, groups in (("pair", [[0, 1], [2, 3]]), ("full", [[0, 1, 2, 3]])):
            expected = np.sum(-0.5 * (((y - mean) ** 2 + variance) / 0.3 + np.log(2 * np.pi * 0.3)))
            for rows in groups:
                expected -= 0.5 * np.linalg.slogdet(np.eye(len(rows)) + (root @ root.T)[np.ix_(rows, rows)] / 0.3)[1]
            np.testing.assert_allclose(total[key], expected, rtol=1e-10)


@pytest.mark.parametrize("name", ["gaussian", "student"])
def test_rows_without_observations_leave_the_others_as_if_alone(name, float64):
    likelihood = {**LIKELIHOODS, "gaussian": likelihoods.Gaussian(variance=0.3)}[name]
    rng = np.random.default_rng(1)
    present = np.array([True, True, False, True, False, True])
    root, mean, variance = rng.normal(size=(6, 3)), rng.normal(size=6), rng.uniform(0.1, 1.0, size=6)
    y = np.array([0, 2, 7, 1, 50, 0])

    @functools.partial(jax.jit, static_argnums=0)
    def total(size, D, y, mean, variance, present):
        residual = residual_in_groups(D, consecutive(len(mean), size))
        rows = row_elbo("grouped", likelihood, y, mean, variance, residual, present=present)
        return jnp.sum(jnp.where(present, rows, 0.0))

    D, keep = root @ root.T, np.flatnonzero(present)
    whole = total(3, D, y, mean, variance, present)
    alone = total(2, D[np.ix_(keep, keep)], y[keep], mean[keep], variance[keep], np.ones(4, bool))
    np.testing.assert_allclose(whole, alone, rtol=1e-9)


def test_what_residuals_are_given_is_dense_algebra(x64):
    rng = np.random.default_rng(2)
    root = rng.normal(size=(7, 9))
    D, precision = root @ root.T, np.array([0.0, 0.3, 1.0, 10.0, 0.0, 2.0, 1e3])
    groups = median_split(rng.normal(size=(7, 2)).astype(x64), 3)
    left, cost = jax.jit(lambda D, p: residual_in_groups(D, groups).given(p))(D.astype(x64), precision.astype(x64))
    tolerance = {jnp.float32: 2e-4, jnp.float64: 1e-10}[x64]
    for rows, mask in zip(groups.rows, groups.mask, strict=True):
        rows = rows[mask]
        inside, p = D[np.ix_(rows, rows)], precision[rows]
        C = np.linalg.inv(np.linalg.inv(inside) + np.diag(p))
        np.testing.assert_allclose(left[rows], np.diag(C), rtol=tolerance, atol=tolerance)
        expected = 0.5 * np.linalg.slogdet(np.eye(len(rows)) + inside @ np.diag(p))[1]
        np.testing.assert_allclose(np.sum(cost[rows]), expected, rtol=tolerance)
    alone = RowResidual(diagonal(D)).given(precision)
    np.testing.assert_allclose(alone[0], np.diag(D) / (1 + precision * np.diag(D)), rtol=1e-5)


@pytest.mark.parametrize("name, x64", [("tight", True), ("grouped", False)], indirect=["x64"])
def test_a_log_scale_that_is_not_known_at_all_gives_a_finite_bound(x64, name):
    d = np.array([1.0, 40.0, 50.0, 100.0, 500.0, 2000.0] * 2)  # its residual variance, from which e^2d is no number
    y = np.repeat([0.7, 0.0], 6).astype(x64)  # and for y at the mean
    mean = np.stack([np.zeros(12), np.linspace(-2, 2, 12)]).astype(x64)
    variance, residual = (np.stack([np.full(12, 0.1), v]).astype(x64) for v in (np.full(12, 0.2), d))
    of = as_conditional("tight") if name == "tight" else Grouped(2)

    @jax.jit
    def terms(mean, variance, residual):
        prior = RowResidual(residual)
        if name == "grouped":
            prior = residual_in_groups(residual[..., None] * jnp.eye(12, dtype=x64), consecutive(12, 2))
        return of.row_terms(ObservedRows(likelihoods.HeteroscedasticGaussian(), y, mean, variance, prior))

    found = terms(mean, variance, residual)
    h = mean[1] + np.sqrt(variance[1] + residual[1]) * np.linspace(-12, 12, 100_001)[:, None].astype(float)
    log_density = stats.norm.logpdf(y, mean[0], np.sqrt(variance[0] + residual[0] + np.exp(2 * np.minimum(h, 350))))
    log_weights = stats.norm.logpdf(np.linspace(-12, 12, 100_001))[:, None] + np.log(24 / 100_000)
    evidence = logsumexp(log_density + log_weights, axis=0)
    assert np.all(np.isfinite(found)) and np.all(found <= evidence)
    gradients = jax.jit(jax.grad(lambda *arguments: jnp.sum(terms(*arguments)), (0, 1, 2)))(mean, variance, residual)
    assert np.all(np.isfinite(gradients)) and np.all(gradients[2][1] < 0)  # a better known log-scale is better


def test_rounding_that_outweighs_the_identity_leaves_rows_one_by_one(x64):
    # No covariance matrix, as rounding makes them of residuals far below the prior variance.
    broken = jnp.asarray([[1.0, 2.0], [2.0, -1e-3]], x64)
    D = jnp.stack([broken, jnp.asarray([[1.0, 0.6], [0.6, 1.0]], x64)])
    groups, precision = consecutive(4, 2), jnp.full(4, 3.0, x64)

    @jax.jit
    def of(D):
        residual = GroupResidual(D, groups)
        return residual.cost(precision), *residual.given(precision)

    cost, left, same = of(D)
    np.testing.assert_allclose(cost[:2].sum(), 0.5 * np.log(4.0), rtol=1e-6)
    np.testing.assert_allclose(left[:2], [0.25, 0.0], atol=1e-6)
    np.testing.assert_allclose(cost[2:].sum(), 0.5 * np.log(16.0 - 9 * 0.36), rtol=1e-6)
    np.testing.assert_allclose(same, cost, rtol=1e-6)
    (slope,) = jax.jit(jax.grad(lambda D: jnp.sum(of(D)[0]) + jnp.sum(of(D)[1] ** 2)))(D)[:1]
    # Of ½ log(1 + 3d) and (d/(1 + 3d))² at d = 1.
    np.testing.assert_allclose(slope[0, 0], 3 / 8 + 2 * 0.25 / 16, rtol=1e-5)
    assert np.all(np.isfinite(slope))


def test_gradients_of_costs_of_groups_are_dense_algebra(float64):
    # ½ log |I + R D R| with R = diag(√λ): ∂/∂D = ½ R B⁻¹ R, and ∂/∂λ_n = ½ (D R B⁻¹ R⁻¹)_nn.
    rng = np.random.default_rng(3)
    groups, precision = consecutive(6, 3), rng.uniform(0.5, 4.0, 6)
    roots = rng.normal(size=(2, 3, 3))
    D = roots @ np.swapaxes(roots, -1, -2)

    def cost(D, precision):
        return jnp.sum(GroupResidual(D, groups).cost(precision))

    value, (of_D, of_precision) = jax.jit(jax.value_and_grad(cost, (0, 1)))(jnp.asarray(D), jnp.asarray(precision))
    R = np.sqrt(precision).reshape(2, 3)
    B = np.eye(3) + R[:, :, None] * D * R[:, None, :]
    inverse = np.linalg.inv(B)
    np.testing.assert_allclose(value, 0.5 * np.sum(np.linalg.slogdet(B)[1]), rtol=1e-12)
    np.testing.assert_allclose(of_D, 0.5 * R[:, :, None] * inverse * R[:, None, :], rtol=1e-10)
    expected = 0.5 * np.einsum("gij,gj,gji,gi->gi", D, R, inverse, 1.0 / R)
    np.testing.assert_allclose(of_precision, expected.ravel(), rtol=1e-10)


def test_full_is_finite_where_float32_knows_no_residual():
    rng = np.random.default_rng(2)
    X = np.tile(rng.uniform(0, 3, size=(20, 1)), (2, 1))
    y = np.sin(X[:, 0]) + 3e-4 * rng.normal(size=40)
    K = oracles.stationary("RBF", X, X, 1.5)
    evidence = oracles.log_normal(y, K + 1e-7 * np.eye(40))
    arrays = [jnp.float32(value) for value in (X, np.linspace(0, 3, 20)[:, None], y)]

    @jax.jit
    def bounds(lengthscale, X, Z, y):
        gps = [CollapsedGP(RBF(lengthscale), X, Z, noise_variance=1e-7, conditional=c) for c in ("tight", "full")]
        return jnp.stack([gp.log_prob(y) for gp in gps])

    tight, full = bounds(1.5, *arrays)
    assert tight - 1.0 < full < evidence  # 1.0: they compute d_n in two ways, with float32's rounding
    assert np.all(np.isfinite(jax.jit(jax.jacobian(bounds))(1.5, *arrays)))


def test_groups_are_checked():
    assert as_conditional("tight").partition(6) is None
    assert as_conditional("full").partition(6).count == 1
    assert Grouped(2).partition(6).count == 3
    for groups, error, words in [
        (None, ValueError, "needs groups"),
        (4, ValueError, "groups is 4; it must divide the 6 rows"),
        (0, ValueError, "groups is 0"),
        ("all", TypeError, "groups is 'all'"),
        (True, TypeError, "groups is True"),
        (single(5), ValueError, "5 rows, but there are 6"),
    ]:
        with pytest.raises(error, match=words):
            Grouped(groups).partition(6)
