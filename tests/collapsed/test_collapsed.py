"""Collapsed bounds: their dense formulas, the order that must hold among them, and published numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import oracles
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density
from programs import equations
from scipy import stats
from scipy.optimize import minimize

import npgp
from npgp.collapsed import CollapsedGP, collapsed_bound, exact_log_evidence, upper_bound
from npgp.conditionals import Grouped, as_conditional
from npgp.features import Points
from npgp.kernels import RBF, Matern12, Matern32, White
from npgp.sparse.groups import consecutive, single
from npgp.sparse.projection import factorize
from npgp.sparse.residuals import residual_of

CONDITIONALS = ("prior", "shared", "tight", "grouped", "full")
STRUCTURES = {
    "SGPR": ("dense",),
    "ODVGP": ("dense", "mean-only"),
    "SOLVE": ("dense", "dense"),
    "union": ("dense",),
    "mean field": ("diagonal",),
    "three": ("dense", "dense", "dense"),
    "three, last mean-only": ("dense", "dense", "mean-only"),
}


def compute(f, *arguments):
    """Compiled as one program, as every compilation costs more than all the arithmetic here."""
    return jax.tree.map(np.asarray, jax.jit(f)(*arguments))


# ---------------------------------------------------------------- many random problems, compiled once


def random_problems(count, seed, M, K, N):
    """Z, O, X, y, lengthscale, variance and noise per row of problems of all kinds, a third of them with one noise."""
    rng = np.random.default_rng(seed)
    Z, O, X = (rng.normal(size=(count, rows, 2)) for rows in (M, K, N))
    lengthscale, variance = np.exp(rng.normal(size=(2, count)))
    noise = np.exp(rng.normal(-1.5, 1.0, size=(count, N)))
    noise[::3] = noise[::3, :1]
    # Observations from the model, so that bounds are compared where they would be used.
    formulas = [functools.partial(oracles.stationary, "Matern32", lengthscale=l) for l in lengthscale]
    L = np.linalg.cholesky(np.stack([k(x, x) for k, x in zip(formulas, X, strict=True)]) + 1e-9 * np.eye(N))
    f = np.einsum("bij,bj->bi", L, rng.normal(size=(count, N))) * np.sqrt(variance)[:, None]
    return Z, O, X, f + np.sqrt(noise) * rng.normal(size=(count, N)), lengthscale, variance, noise


@jax.jit
@jax.vmap
def all_bounds(Z, O, X, y, lengthscale, variance, noise):
    """The exact evidence, Titsias' upper bounds, and the bound of every structure with every conditional."""
    kernel = Matern32(lengthscale, variance=variance)
    points = {name: inducing_blocks(name, Z, O) for name in STRUCTURES}
    inducing = {name: factorize(kernel, [Points(block) for block in points[name]]) for name in STRUCTURES}
    conditionals = {name: as_conditional(name) for name in CONDITIONALS}
    conditionals["grouped"] = Grouped(groups_of(X.shape[0]))
    bounds = {}
    for structure, kinds in STRUCTURES.items():
        projector = inducing[structure]
        projection = projector(X)
        for name, conditional in conditionals.items():
            learned = [kind != "mean-only" for kind in kinds]
            residual = residual_of(projector, X, projection, learned, conditional.partition(X.shape[0]))
            bounds[structure, name] = collapsed_bound(projection, residual, y, noise, kinds, conditional)
    union = inducing["union"]
    projection = union(X)
    largest = jnp.linalg.eigvalsh(union.residual_covariance(X, projection.A))[-1]
    upper = {
        "trace": upper_bound(kernel, X, y, points["union"], noise_variance=noise),
        "eigenvalue": upper_bound(kernel, X, y, points["union"], noise_variance=noise, residual_norm=largest),
        "blocks": upper_bound(kernel, X, y, points["SOLVE"], noise_variance=noise),
        "fewer": upper_bound(kernel, X, y, points["SGPR"], noise_variance=noise),
    }
    return exact_log_evidence(kernel, X, y, noise_variance=noise), upper, bounds


def groups_of(rows):
    return consecutive(rows, 3)


def inducing_blocks(structure, Z, O):
    """The inducing inputs of a structure's blocks, from Z and O."""
    if structure == "union":
        return [jnp.concatenate([Z, O])]
    if structure.startswith("three"):
        return [Z, O[:1], O[1:]]
    return [Z, O][: len(STRUCTURES[structure])]


PROBLEMS, M, K, N = 600, 3, 5, 8


def bounds_of(problems):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, all_bounds(*problems))


@functools.cache
def evaluated():
    problems = random_problems(PROBLEMS, 0, M, K, N)
    return problems, bounds_of(problems)


def test_bounds_are_their_dense_formulas():
    problems, (exact, upper, bounds) = evaluated()
    partition = groups_of(N)
    groups = [rows[mask] for rows, mask in zip(partition.rows, partition.mask, strict=True)]
    assert len({len(rows) for rows in groups}) == 2  # the last is shorter
    for i in range(25):
        Z, O, X, y, lengthscale, variance, noise = (value[i] for value in problems)
        kernel = functools.partial(oracles.stationary, "Matern32", lengthscale=lengthscale, variance=variance)
        np.testing.assert_allclose(exact[i], oracles.log_normal(y, kernel(X, X) + np.diag(noise)), rtol=1e-7)
        for (structure, conditional), bound in bounds.items():
            blocks = [np.asarray(block) for block in inducing_blocks(structure, Z, O)]
            joint = oracles.Joint.of(kernel, blocks, X, jitter=1e-8)
            kinds = STRUCTURES[structure]
            learned = [kind != "mean-only" for kind in kinds]
            expected = joint.bound(y, noise, learned, conditional, groups, diagonal="diagonal" in kinds)
            np.testing.assert_allclose(bound[i], expected, rtol=1e-6, err_msg=f"{structure}, {conditional}")
            if structure == "union" and conditional == "prior":
                D = joint.residual()
                for name, norm in (("trace", np.trace(D)), ("eigenvalue", np.linalg.eigvalsh(D)[-1])):
                    expected = oracles.titsias_upper(joint.K_ff - D, norm, y, noise)
                    np.testing.assert_allclose(upper[name][i], expected, rtol=1e-6, err_msg=name)
            if conditional == "prior" and structure in ("SGPR", "union"):
                titsias = oracles.titsias(joint.K_uu, joint.K_uf, joint.K_ff, y, noise)
                np.testing.assert_allclose(bound[i], titsias, rtol=1e-6)


def test_the_order_that_must_hold():
    # Asserted of every problem: what is a theorem. docs/theory.md, section 5 lists what looks like one and is not: with
    # a conditional other than `prior`, more inducing points may lower a bound and ODVGP may beat SOLVE-GP.
    _, (exact, upper, bounds) = evaluated()

    def above(greater, smaller):
        gap = greater - smaller
        rounding = 1e-8 * (1 + np.abs(smaller))
        assert np.all(np.isfinite(gap)) and np.all(gap >= -rounding), np.min(gap)
        assert np.mean(gap > 1e-3) > 0.5  # and it is about something

    for structure in STRUCTURES:
        above(exact, bounds[structure, "tight"])
        above(exact, bounds[structure, "full"])
        above(bounds[structure, "full"], bounds[structure, "grouped"])
        above(bounds[structure, "grouped"], bounds[structure, "tight"])
        above(bounds[structure, "tight"], bounds[structure, "shared"])
        above(bounds[structure, "shared"], bounds[structure, "prior"])
    for conditional in CONDITIONALS:
        above(bounds["union", conditional], bounds["SOLVE", conditional])
        above(bounds["SOLVE", conditional], bounds["three", conditional])
        above(bounds["ODVGP", conditional], bounds["SGPR", conditional])
        above(bounds["SGPR", conditional], bounds["mean field", conditional])
    above(bounds["SOLVE", "prior"], bounds["ODVGP", "prior"])
    above(bounds["three", "prior"], bounds["three, last mean-only", "prior"])
    above(bounds["ODVGP", "full"], bounds["SOLVE", "full"])
    for name, bound in upper.items():
        above(bound, exact)
        if name != "eigenvalue":
            above(bound, upper["eigenvalue"])


def test_the_order_in_extreme_cases():
    # Coinciding points, lengthscales from nothing to everything, signal to noise from 10⁻⁵ to 10⁸, outliers.
    rng = np.random.default_rng(1)
    few = np.arange(-3, 4) / 2  # on a line: hence duplicates and inducing points at data
    Z, O, X = (rng.choice(few, size=(PROBLEMS, rows, 2)) * [1.0, 0.0] for rows in (M, K, N))
    y = rng.choice([0.0, -1.0, 1.0, 0.3, 50.0], size=(PROBLEMS, N))
    lengthscale, variance, noise = 10.0 ** rng.uniform([[-2], [-3], [-5]], [[2], [3], [2]], size=(3, PROBLEMS))
    exact, upper, bounds = bounds_of((Z, O, X, y, lengthscale, variance, np.tile(noise[:, None], N)))
    rounding = 1e-9 * (1 + np.sum(np.square(y), -1) / noise + N * variance / noise)
    for structure in STRUCTURES:
        values = [bounds[structure, c] for c in CONDITIONALS] + [exact]
        assert np.all(np.isfinite(values)), structure
        assert np.all(np.diff(values, axis=0) > -rounding), structure
    for structure in ("SOLVE", "union"):
        assert np.all(bounds[structure, "prior"] > bounds["SGPR", "prior"] - rounding)
    assert all(np.all(bound > exact - rounding) for bound in upper.values())


def test_what_need_not_hold_does_not():
    # If these stopped failing, the shrinkage would not be what the conditionals say.
    _, (*_, bounds) = evaluated()
    for conditional in ("tight", "shared", "grouped", "full"):
        assert np.any(bounds["SOLVE", conditional] < bounds["ODVGP", conditional] - 1e-3)
    assert np.any(bounds["union", "shared"] < bounds["SGPR", "shared"] - 1e-3)


def test_mean_only_block_is_tightened_with_its_own_variance():
    # The whole residual that the learned block leaves is shrunk, not just what is left after the mean-only block.
    problems, (*_, bounds) = evaluated()
    Z, O, X, y, lengthscale, variance, noise = (value[:100] for value in problems)
    textbook = []
    for i in range(100):
        kernel = functools.partial(oracles.stationary, "Matern32", lengthscale=lengthscale[i], variance=variance[i])
        joint = oracles.Joint.of(kernel, [Z[i], O[i]], X[i], jitter=1e-8)
        first, left = np.diag(joint.residual([True, False])), np.diag(joint.residual())
        penalty = 0.5 * np.sum((first - left) / noise[i] + np.log1p(left / noise[i]))
        textbook.append(joint.bound(y[i], noise[i], [True, False]) + 0.5 * np.sum(first / noise[i]) - penalty)
    gain = bounds["ODVGP", "tight"][:100] - textbook
    assert np.all(gain > -1e-6) and np.median(gain) > 0.5


def test_inducing_points_at_all_inputs_give_the_exact_evidence(float64):
    (_, _, X, *rest), (exact, *_) = evaluated()
    *_, bounds = all_bounds(X[:, :M], X[:, M:], X, *rest)
    *_, variance, noise = rest
    for conditional in CONDITIONALS:
        missing = exact - np.asarray(bounds["union", conditional])
        # What is left of the residual is a few times the jitter.
        assert np.all(missing > -1e-9 * (1 + np.abs(exact)))
        assert np.all(missing < 20 * 1e-8 * variance * np.sum(1 / noise, -1) + 1e-9)


def test_repeated_inducing_points_add_nothing(float64):
    (Z, _, *rest), (*_, bounds) = evaluated()
    *_, repeated = all_bounds(Z, np.tile(Z, (1, 2, 1))[:, :K], *rest)
    for structure in ("ODVGP", "SOLVE", "union"):
        for conditional in CONDITIONALS:
            once, twice = bounds["SGPR", conditional], np.asarray(repeated[structure, conditional])
            # Seen twice with jitter, a feature is known a little better; felt where the Gram matrix is nearly singular.
            np.testing.assert_allclose(twice, once, atol=5e-3, err_msg=f"{structure}, {conditional}")
            assert np.median(np.abs(twice - once)) < 1e-5


def test_the_published_orthogonal_bound_is_that_of_the_union():
    # Fernlund (2022), eq. 5.33 frees q from its structure, so it is above what SOLVE-GP can reach.
    problems, (*_, bounds) = evaluated()
    published = []
    for i in range(0, 90, 3):
        Z, O, X, y, lengthscale, variance, noise = (value[i] for value in problems)
        assert np.ptp(noise) == 0
        kernel = functools.partial(oracles.stationary, "Matern32", lengthscale=lengthscale, variance=variance)
        published.append(oracles.fernlund(kernel, Z, O, X, y, noise[0]))
    np.testing.assert_allclose(bounds["union", "prior"][:90:3], published, rtol=1e-5)
    assert np.mean(published - bounds["SOLVE", "prior"][:90:3] > 0.1) > 0.5


# ---------------------------------------------------------------- one problem


def one_problem(N=9, dtype=np.float64):
    rng = np.random.default_rng(5)
    X = np.linspace(-3, 3, N)[:, None] + 0.1 * rng.normal(size=(N, 1))
    return X.astype(dtype), (np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=N)).astype(dtype)


FORMULA = functools.partial(oracles.stationary, "Matern32", lengthscale=0.9, variance=1.4)
KERNEL = Matern32(0.9, variance=1.4)


def test_outputs_in_a_batch_and_a_mean_function(float64):
    X, _ = one_problem()
    rng = np.random.default_rng(0)
    Y, mean, noise = rng.normal(size=(2, 3, len(X))), rng.normal(size=len(X)), rng.uniform(0.1, 1.0, size=len(X))
    Z = X[::3]
    together = compute(lambda Y: CollapsedGP(KERNEL, X, Z, noise_variance=noise, offset=mean).log_prob(Y), Y)
    assert together.shape == (2, 3)
    for i in np.ndindex(2, 3):
        alone = oracles.Joint.of(FORMULA, [Z], X, 1e-8).bound(Y[i] - mean, noise, [True], "tight")
        np.testing.assert_allclose(together[i], alone, rtol=1e-7)


def test_float32_bound_is_near_the_float64_one():
    # Of the same problem, at its default jitter each: a nat would matter, a hundredth of one does not.
    bounds = {}
    for dtype in (np.float32, np.float64):
        with jax.enable_x64(dtype == np.float64):
            X, y = one_problem(N=60, dtype=dtype)
            bounds[dtype] = compute(lambda X, y: CollapsedGP(KERNEL, X, X[::8], noise_variance=0.1).log_prob(y), X, y)
            assert bounds[dtype].dtype == dtype
    np.testing.assert_allclose(bounds[np.float32], bounds[np.float64], atol=0.01)


def test_gradients_by_finite_differences(float64):
    X, y = one_problem()

    @jax.jit
    @jax.value_and_grad
    def bound(theta):
        kernel = Matern32(jnp.exp(theta[0]), variance=jnp.exp(theta[1]))
        inducing = [theta[3:6][:, None], theta[6:][:, None]]
        return CollapsedGP(
            kernel, X, inducing, noise_variance=jnp.exp(theta[2]), covariances=("dense", "mean-only")
        ).log_prob(y)

    theta = np.array([-0.1, 0.3, -2.0, -2.1, 0.2, 2.3, -1.1, 1.4])
    _, slope = bound(theta)
    differences = [(bound(theta + h)[0] - bound(theta - h)[0]) / 2e-5 for h in 1e-5 * np.eye(len(theta))]
    np.testing.assert_allclose(slope, differences, rtol=1e-5, atol=1e-6)


def test_no_square_of_rows_and_full_precision_throughout():
    # What an accelerator is told, and what it would have to hold; gradients included.
    N, M = 60, 5
    X, Z, y = np.ones((N, 2), np.float32), np.ones((M, 2), np.float32), np.ones(N, np.float32)

    def bound(Z, noise):
        return CollapsedGP(RBF(), X, [Z, Z + 1], noise_variance=noise, covariances=("dense", "mean-only")).log_prob(y)

    def predict(Z, noise):
        return CollapsedGP(RBF(), X, [Z, Z + 1], noise_variance=noise).condition(y).mean_and_variance(X)

    for f in (bound, jax.grad(bound, argnums=(0, 1)), predict):
        seen = list(equations(jax.make_jaxpr(f)(Z, np.float32(0.1)).jaxpr))
        assert max(v.aval.size for e in seen for v in e.outvars) <= 2 * (2 * M) * N < N * N
        products = [e for e in seen if e.primitive.name == "dot_general"]
        assert len(products) > 5
        for product in products:
            assert str(product.params["precision"]).count("HIGHEST") == 2, str(product)


# ---------------------------------------------------------------- prediction


@pytest.mark.parametrize("covariances", [("dense", "dense"), ("dense", "mean-only")], ids="+".join)
def test_posterior_given_observations_is_dense_algebra(float64, covariances):
    X, y = one_problem()
    Z, O, new = X[::3] + 0.1, X[1::3] - 0.2, np.linspace(-4, 4, 7)[:, None]
    noise, offset = np.random.default_rng(1).uniform(0.05, 0.5, size=len(X)), 2.0

    def predict(y):
        gp = CollapsedGP(KERNEL, X, [Z, O], noise_variance=noise, offset=offset, covariances=covariances, jitter=1e-12)
        posterior = gp.condition(y)
        return posterior.mean_and_variance(new), posterior.covariance(new), gp.log_likelihood(y)

    (mean, variance), covariance, log_likelihood = compute(predict, y)
    # All blocks move the mean; learned ones shrink the covariance, each by itself.
    at = oracles.Joint.of(FORMULA, [Z, O], np.concatenate([X, new]))
    train, test = slice(0, len(X)), slice(len(X), None)
    Q = at.K_ff - at.residual()
    expected_mean = Q[test, train] @ np.linalg.solve(Q[train, train] + np.diag(noise), y - offset)
    expected = at.K_ff.copy()
    for A, kind in zip(at.A, covariances, strict=True):
        if kind == "dense":
            B = np.eye(len(A)) + A[:, train] / noise @ A[:, train].T
            expected -= A.T @ (np.eye(len(A)) - np.linalg.inv(B)) @ A
    np.testing.assert_allclose(mean, expected_mean, atol=1e-7)
    np.testing.assert_allclose(covariance, expected[test, test], atol=1e-7)
    np.testing.assert_allclose(variance, np.diag(expected)[test], atol=1e-7)
    fitted = offset + Q[train, train] @ np.linalg.solve(Q[train, train] + np.diag(noise), y - offset)
    spread = np.sqrt(np.diag(expected)[train] + noise)
    np.testing.assert_allclose(log_likelihood, stats.norm.logpdf(y, fitted, spread), atol=1e-7)


def test_posterior_with_inducing_points_at_all_inputs_is_exact(float64):
    X, _ = one_problem()
    Y, new = np.random.default_rng(0).normal(size=(2, len(X))), np.linspace(-4, 4, 7)[:, None]

    def predict(Y):
        posterior = CollapsedGP(KERNEL, X, X, noise_variance=0.1, jitter=1e-12).condition(Y)
        return posterior.mean(new), posterior.covariance(new)

    mean, covariance = compute(predict, Y)
    assert covariance.shape == (2, 7, 7)
    for i in range(2):
        exact = oracles.gp_posterior(FORMULA(X, X), FORMULA(new, X), FORMULA(new, new), Y[i], 0.1)
        np.testing.assert_allclose(mean[i], exact[0], atol=1e-7)
        np.testing.assert_allclose(covariance[i], exact[1], atol=1e-7)


@pytest.mark.parametrize("name, x64", [("Matern12", True), ("RBF", False)], indirect=["x64"])
def test_posteriors_of_any_lengthscale_are_finite_and_right_to_the_jitter(x64, name):
    # From a tenth of the inputs' spacing to a thousand times their range, where Gram matrices are of rank one.
    rng = np.random.default_rng(0)
    X, Z, noise = np.sort(rng.uniform(0, 6, (80, 1)), axis=0), np.linspace(0, 6, 20)[:, None], 1e-4
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=80)
    cases = np.array([(l, v) for l in (0.03, 1.0, 10.0, 100.0, 1000.0, 6000.0) for v in (1.0, 1e4)])

    @jax.jit
    @jax.vmap
    def run(case):
        kernel = {"Matern12": Matern12, "Matern32": Matern32, "RBF": RBF}[name](case[0], variance=case[1])
        posterior = CollapsedGP(kernel, X.astype(x64), Z.astype(x64), noise_variance=noise).condition(y.astype(x64))
        draw = posterior.sample(jax.random.key(0), X.astype(x64))
        return posterior.variance(X.astype(x64)), posterior.covariance(X.astype(x64)), draw

    found = run(cases.astype(x64))
    assert all(np.all(np.isfinite(values)) for values in found)
    jitter = {jnp.float32: 1e-5, jnp.float64: 1e-8}[x64]
    for variance, draw, (lengthscale, prior) in zip(found[0], found[2], cases, strict=True):
        kernel = functools.partial(oracles.stationary, name, lengthscale=lengthscale, variance=prior)
        K_uu, K_uf = kernel(Z, Z) + 1e-11 * prior * np.eye(20), kernel(Z, X)
        half = np.linalg.solve(np.linalg.cholesky(K_uu), K_uf)
        given = np.linalg.solve(np.eye(20) + half @ half.T / noise, half)
        right = prior - np.sum(half * half, axis=0) + np.sum(half * given, axis=0)
        assert np.all(variance >= 0)
        np.testing.assert_allclose(variance, right, rtol=3e-3, atol=10 * jitter * prior)
        # A draw has no more of the prior's variance in it than rounding of N rows.
        rounding = jitter + 80 * np.finfo(x64).eps
        assert np.all(np.abs(draw) < 5 + 6 * np.sqrt(right + 3 * rounding * prior))


def _months(number):
    """Mauna Loa's kernel, a trend of sd 66 beside irregularities of .66 and noise of .19, by NumPy and by npgp."""
    t = np.arange(number)[:, None] / 12 - 17
    gap = t - t.T
    trend, periodic = 66.0**2 * np.exp(-(gap**2) / 2 / 67**2), np.exp(-2 * np.sin(np.pi * gap) ** 2 / 1.3**2)
    K = trend + 2.4**2 * np.exp(-(gap**2) / 2 / 90**2) * periodic + 0.66**2 * np.exp(-(gap**2) / 2)
    seasons = npgp.RBF(90.0, variance=2.4**2) * npgp.kernels.Periodic(1.0, lengthscale=1.3)
    return t, K, npgp.RBF(67.0, variance=66.0**2) + seasons + npgp.RBF(1.0, variance=0.66**2)


def test_a_sum_of_a_large_and_a_small_kernel_in_either_precision(x64):
    t, K, kernel = _months(400)
    noise = 0.19**2
    C = K + noise * np.eye(400)
    y = np.linalg.cholesky(C) @ np.random.default_rng(0).normal(size=400)
    evidence = -0.5 * y @ np.linalg.solve(C, y) - 0.5 * np.linalg.slogdet(2 * np.pi * C)[1]
    variance = np.diag(K - K @ np.linalg.solve(C, K))
    mean = K @ np.linalg.solve(C, y)

    X, y = jnp.asarray(t, x64), jnp.asarray(y, x64)
    gp = CollapsedGP(kernel, X, X, noise_variance=noise)
    for bound in (gp.log_prob(y), jax.jit(lambda gp: gp.log_prob(y))(gp)):
        assert evidence - 0.5 < bound < evidence + 0.05  # to so much y in float32 says which evidence is meant
    found = jax.jit(lambda gp, X: gp.condition(y).mean_and_variance(X))(gp, X)
    np.testing.assert_allclose(np.sqrt(found[1]), np.sqrt(variance), rtol=0.05)
    np.testing.assert_allclose(found[0], mean, atol=0.05 * np.sqrt(variance).min())

    @jax.jit
    def others(gp, X, y):
        evidence = npgp.collapsed.exact_log_evidence(kernel, X, y, noise_variance=noise)
        upper = npgp.collapsed.upper_bound(kernel, X, y, X, noise_variance=noise)
        return gp.condition(y).covariance(X[:12]), evidence, upper

    covariance, exact, upper = others(gp, X, y)
    np.testing.assert_allclose(covariance, (K - K @ np.linalg.solve(C, K))[:12, :12], atol=0.05 * variance.max())
    assert abs(exact - evidence) < 0.05
    assert evidence - 0.05 < upper < evidence + 20.0  # 15.6 above in dense algebra of float64, by the same formula


def test_gradients_for_a_sum_of_a_large_and_a_small_kernel_in_float32():
    t, K, kernel = _months(60)
    C = K + 0.19**2 * np.eye(60)
    y = np.linalg.cholesky(C) @ np.random.default_rng(1).normal(size=60)
    alpha = np.linalg.solve(C, y)
    small = np.exp(-((t - t.T) ** 2) / 2)
    right = 0.5 * (alpha @ small @ alpha - np.trace(np.linalg.solve(C, small)))
    with jax.enable_x64(False):
        X, y = jnp.asarray(t, jnp.float32), jnp.asarray(y, jnp.float32)

        def bound(variance):
            small = npgp.RBF(1.0, variance=variance)
            return CollapsedGP(
                npgp.kernels.Sum((*kernel.kernels[0].kernels, small)), X, X, noise_variance=0.19**2
            ).log_prob(y)

        assert abs(jax.jit(jax.grad(bound))(jnp.float32(0.66**2)) / right - 1) < 0.02
        mapped = jax.jit(jax.vmap(jax.grad(bound)))(jnp.array([0.66**2, 0.5], jnp.float32))
        assert abs(mapped[0] / right - 1) < 0.02


def test_a_linear_function_of_many_rows_has_its_small_variance(x64):
    X = np.random.default_rng(0).normal(size=(20_000, 3)).astype(x64)
    S = np.linalg.inv(np.eye(3) + X.T.astype(float) @ X / 0.1)
    right = np.einsum("ni,ij,nj->n", X, S, X)
    gp = CollapsedGP(npgp.kernels.Linear(variance=np.ones(3)), X, X[:12], noise_variance=0.1)
    variance = gp.condition(np.sin(X[:, 0])).variance(X)
    np.testing.assert_allclose(variance, right, rtol=0.02, atol=0.02 * right.max())


def test_jitter_beside_the_noise_is_said():
    X, y = np.linspace(0, 1, 20, dtype=np.float32)[:, None], np.zeros(20, np.float32)
    with pytest.warns(RuntimeWarning, match=r"took a jitter of 1 times the noise .*; use float64"):
        CollapsedGP(RBF(1.0, variance=1e3), X, X[::4], noise_variance=1e-2).condition(y)
    CollapsedGP(RBF(1.0, variance=10.0), X, X[::4], noise_variance=1e-2).condition(y)  # a hundredth: no warning


@pytest.mark.parametrize("kernel", [RBF() + White(), RBF() + 0.1 * (RBF(0.1) * White(variance=2.0))], ids=["+", "*"])
def test_white_noise_in_the_kernel_of_inducing_points_is_said(kernel):
    X = np.zeros((2, 1), np.float32)
    for make in (lambda: CollapsedGP(kernel, X, X, noise_variance=0.1), lambda: npgp.SparseGP("f", kernel, X)):
        with pytest.warns(UserWarning, match="has a White, .* likelihood's noise"):
            make()


def test_draws_are_from_the_model(x64):
    X, _ = one_problem(N=5, dtype=x64)
    noise = np.array([0.1, 0.2, 0.3, 0.4, 1.5], x64)
    draws = compute(
        lambda key: CollapsedGP(KERNEL, X, X[:2], noise_variance=noise, offset=3.0).sample(key, (20_000,)),
        jax.random.key(0),
    )
    assert draws.shape == (20_000, 5) and draws.dtype == x64
    covariance = FORMULA(X, X) + np.diag(noise)
    # Five standard errors each.
    variance = np.diag(covariance)
    assert np.all(np.abs(draws.mean(0) - 3.0) < 5 * np.sqrt(variance / 20_000))
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / 20_000)
    assert np.all(np.abs(np.cov(draws.T) - covariance) < 5 * error)


# ---------------------------------------------------------------- in a NumPyro program


def test_it_is_the_density_of_an_observation(float64):
    X, y = one_problem(N=20)
    Z = X[::4]

    def model(y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        return numpyro.sample("y", CollapsedGP(RBF(lengthscale), X, Z, noise_variance=noise), obs=y)

    values = {"lengthscale": 0.8, "noise": 0.2}
    density = compute(lambda values: log_density(model, (y,), {}, values)[0], values)
    formula = functools.partial(oracles.stationary, "RBF", lengthscale=0.8)
    bound = oracles.Joint.of(formula, [Z], X, 1e-8).bound(y, 0.2, [True], "tight")
    prior = stats.lognorm.logpdf(0.8, 1.0) + stats.lognorm.logpdf(0.2, 1.0, scale=np.exp(-2))
    np.testing.assert_allclose(density, prior + bound, rtol=1e-6)

    # Without observations: the model itself.
    drawn = jax.jit(lambda values: handlers.seed(handlers.substitute(model, values), 0)())(values)
    assert drawn.shape == (20,)


# ---------------------------------------------------------------- bad input


def test_what_cannot_be_a_model_is_refused():
    X, y = one_problem(dtype=np.float32)
    Z = X[:3]

    def refused(words, *arguments, error=ValueError, **settings):
        with pytest.raises(error, match=words):
            CollapsedGP(RBF(), *arguments, **settings)

    refused(r"X has shape \(9,\)", X[:, 0], Z, noise_variance=0.1)
    refused("X has dtype int", X.astype(int), Z, noise_variance=0.1, error=TypeError)
    refused("X has NaN", X * np.nan, Z, noise_variance=0.1)
    refused(r"inducing has shape \(3,\)", X, Z[:, 0], noise_variance=0.1)
    refused("inducing has no features", X, [Z[:0], Z[:0]], noise_variance=0.1)
    refused(
        "must be an npgp.conditionals.Conditional", X, Z, noise_variance=0.1, conditional=single(9), error=TypeError
    )
    refused("partition of 8 rows, but there are 9", X, Z, noise_variance=0.1, conditional=Grouped(single(8)))
    refused("empty list", X, [], noise_variance=0.1)
    for noise in (0.0, -0.1, np.nan, np.array([0.1] * 8 + [-0.1], np.float32)):
        refused("noise_variance is .* must be positive", X, Z, noise_variance=noise)
    refused(
        r"noise_variance has shape \(3,\); it must be a scalar or \(9,\)", X, Z, noise_variance=np.ones(3, np.float32)
    )
    refused(r"offset has shape \(9, 1\)", X, Z, noise_variance=0.1, offset=np.ones((9, 1), np.float32))
    refused("conditional is 'titgh'; it must be one of 'prior', 'tight'", X, Z, noise_variance=0.1, conditional="titgh")
    refused("'mean-only'.* must come last", X, [Z, Z + 1], noise_variance=0.1, covariances=("mean-only", "dense"))
    refused("must give one of .* for each of 1 blocks", X, Z, noise_variance=0.1, covariances=("dense", "dense"))
    refused("must give one of", X, Z, noise_variance=0.1, covariances="diag")
    with pytest.raises(ValueError, match="columns"):
        jax.jit(CollapsedGP(RBF(), X, np.ones((3, 2), np.float32), noise_variance=0.1).log_prob)(y)


def test_what_cannot_be_observations_is_refused():
    X, y = one_problem(dtype=np.float32)
    gp = CollapsedGP(RBF(), X, X[:3], noise_variance=0.1)
    for use in (gp.condition, gp.log_likelihood):
        with pytest.raises(ValueError, match="^y has NaN"):
            use(np.where(y > 0, y, np.nan))
        with pytest.raises(ValueError, match=r"y has shape \(8,\); it must be \(\.\.\., 9\)"):
            use(y[:8])
        with pytest.raises(ValueError, match=r"y has shape \(9, 1\)"):
            use(y[:, None])


# ---------------------------------------------------------------- Snelson's data


def fit(bound, start):
    """L-BFGS on log hyperparameters and inducing inputs; the bound's maximum and where it is."""
    slope = jax.jit(jax.value_and_grad(lambda theta: -bound(theta)))

    def loss(theta):
        value, gradient = slope(theta)
        return float(value), np.asarray(gradient, float)

    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-8})
    return -found.fun, np.exp(found.x[:3])


@pytest.fixture
def snelson(data_dir, float64):
    with np.load(data_dir / "snelson1d.npz") as data:
        return data["x_train"].astype(float).reshape(200, 1), data["y_train"].astype(float).reshape(200)


@pytest.mark.parametrize(
    "conditional, bound, hyperparameters",
    [("prior", -111.7829, (0.435, 0.087, 0.126)), ("tight", -105.0634, (0.430, 0.107, 0.115))],
)
def test_published_fits_of_five_inducing_points(snelson, conditional, bound, hyperparameters):
    # A local optimum, to which most starts at five data points lead (Bui, Ashman & Turner 2025, figure 1).
    X, y = snelson
    points = np.random.default_rng(1).choice(200, 5, replace=False)

    def log_bound(theta):
        lengthscale, variance, noise = jnp.exp(theta[:3])
        kernel = RBF(lengthscale, variance=variance)
        # The paper's jitter is 1e-6, here relative to a prior variance of about a tenth.
        return CollapsedGP(
            kernel, X, theta[3:][:, None], noise_variance=noise, conditional=conditional, jitter=1e-5
        ).log_prob(y)

    value, found = fit(log_bound, np.concatenate([np.zeros(3), X[points, 0]]))
    assert value == pytest.approx(bound, abs=1e-3)
    np.testing.assert_allclose(found, hyperparameters, atol=6e-4)


def test_published_exact_fit(snelson):
    X, y = snelson

    def evidence(theta):
        lengthscale, variance, noise = jnp.exp(theta)
        return exact_log_evidence(RBF(lengthscale, variance=variance), X, y, noise_variance=noise)

    value, _ = fit(evidence, np.zeros(3))
    assert value == pytest.approx(-55.9003, abs=1e-3)
