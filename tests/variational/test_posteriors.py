"""The posterior of f against dense Gaussian algebra: moments, draws, sample paths, derivatives and parts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from programs import equations
from test_variational import (
    SIZES,
    assert_moments,
    cast,
    compute,
    covariance_of,
    kernel_and_formula,
    make,
    parameters,
    problem,
)

import npgp
from npgp import chunks
from npgp.collapsed import CollapsedGP
from npgp.features import Points
from npgp.kernels import RBF, Constant, Linear, Matern12, Matern52
from npgp.sparse.projection import Projector, factorize
from npgp.variational import DenseNormal, DiagonalNormal, MeanOnlyNormal
from npgp.variational.posterior import Paths, Posterior


def projector_of(joint, inducing, dtype=np.float64, kernel=None, jitter=0.0):
    """What ``factorize`` makes (as its own tests say), from the dense factor: quick to compile."""
    L, rows = joint.factor.astype(dtype), joint.slices
    return Projector(
        kernel_and_formula()[0] if kernel is None else kernel,
        tuple(Points(Z.astype(dtype)) for Z in inducing),
        tuple(L[r, r] for r in rows),
        tuple(tuple(L[r, columns].T for columns in rows[:i]) for i, r in enumerate(rows)),
        (jitter,) * len(rows),
    )


@jax.jit
def predict_jitted(posterior, X):
    return posterior.mean_and_variance(X), posterior.covariance(X), posterior.kl()


def predict(posterior, X):
    return jax.tree.map(np.asarray, predict_jitted(posterior, X))


@pytest.mark.parametrize(
    "kinds", [("dense", "dense"), ("dense", "diagonal", "mean-only"), ("mean-only",)], ids="+".join
)
def test_posterior_is_dense_algebra(x64, kinds):
    inducing, X, joint = problem(len(kinds))
    values = [parameters(kind, size=size) for kind, size in zip(kinds, SIZES, strict=False)]
    q = tuple(make(kind, *cast(x64, value)) for kind, value in zip(kinds, values, strict=True))
    posterior = Posterior(projector_of(joint, inducing, x64), q)
    (mean, variance), covariance, kl = predict(posterior, X.astype(x64))
    assert mean.dtype == variance.dtype == covariance.dtype == x64
    S = [covariance_of(kind, *value) for kind, value in zip(kinds, values, strict=True)]
    expected_mean, expected_covariance = joint.predict([value[0] for value in values], S)
    close = functools.partial(np.testing.assert_allclose, atol=1e-9 if x64 == jnp.float64 else 2e-5)
    close(mean, expected_mean)
    close(covariance, expected_covariance)
    close(variance, np.diag(expected_covariance))
    expected_kl = sum(oracles.kl_normal(value[0], cov) for value, cov in zip(values, S, strict=True))
    np.testing.assert_allclose(kl, expected_kl, rtol=1e-5 if x64 == jnp.float32 else 1e-10)
    if kinds == ("mean-only",):
        alone = jax.jit(lambda p, X: (p.mean(X), p.variance(X)))(posterior, X.astype(x64))
        close(alone[0], mean)
        close(alone[1], variance)


def test_posterior_of_several_outputs_is_each_ones(float64):
    kinds = ("dense", "diagonal", "mean-only")
    inducing, X, joint = problem(3)
    values = [parameters(kind, batch=(2,), size=size) for kind, size in zip(kinds, SIZES, strict=True)]

    def posterior(values):
        q = tuple(make(kind, *value) for kind, value in zip(kinds, values, strict=True))
        return Posterior(projector_of(joint, inducing), q)

    together = predict(posterior(values), X)
    for i in range(2):
        alone = predict(posterior([[v[i] for v in value] for value in values]), X)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-9), together, alone)


def test_q_at_the_prior_is_the_gp_prior(float64):
    inducing, X, joint = problem(3)
    zeros = [np.zeros(size) for size in SIZES]
    q = (DenseNormal(zeros[0], np.eye(4)), DiagonalNormal(zeros[1], np.ones(3)), MeanOnlyNormal(zeros[2]))
    (mean, variance), covariance, kl = predict(Posterior(projector_of(joint, inducing), q), X)
    np.testing.assert_array_equal(mean, 0.0)
    np.testing.assert_allclose(covariance, joint.K_ff, atol=1e-12)
    np.testing.assert_allclose(variance, 1.7, rtol=1e-12)
    np.testing.assert_allclose(kl, 0.0, atol=1e-12)


def test_draws_are_joint(x64):
    # Two inputs nearly coincide: joint draws of f agree there, which draws from marginals would not.
    inducing, X, joint = problem(2, rows=5)
    X = np.concatenate([X, X[:1] + 1e-3])
    joint_at_X = oracles.Joint.of(kernel_and_formula()[1], inducing, X)
    values = [parameters(kind, size=size) for kind, size in zip(("dense", "mean-only"), SIZES, strict=False)]
    q = (DenseNormal(*cast(x64, values[0])), MeanOnlyNormal(*cast(x64, values[1])))
    posterior = Posterior(projector_of(joint, inducing, x64), q)
    draws = compute(lambda p, X: p.sample(jax.random.key(1), X, (20_000,)), posterior, X.astype(x64))
    assert draws.shape == (20_000, 6) and draws.dtype == x64
    S = [covariance_of("dense", *values[0]), np.eye(SIZES[1])]
    mean, covariance = joint_at_X.predict([value[0] for value in values], S)
    assert_moments(draws, mean, covariance)
    assert np.corrcoef(draws[:, 0], draws[:, -1])[0, 1] > 0.999


def test_bad_inputs_of_predictions_are_refused():
    inducing, X, joint = problem(1)
    q = (MeanOnlyNormal(np.zeros(SIZES[0], np.float32)),)
    posterior = Posterior(projector_of(joint, inducing, np.float32), q)
    for method in (posterior.mean, posterior.variance, posterior.covariance, posterior.mean_and_variance):
        with pytest.raises(ValueError, match=r"X has shape \(8,\)"):
            method(X[:, 0])
        with pytest.raises(TypeError, match="X has dtype int"):
            method(X.astype(int))
        with pytest.raises(ValueError, match="X has NaN"):
            method(X * np.nan)
    assert posterior.jitter is posterior.projector.jitter


def test_shared_covariances_have_the_shape_of_the_batch(float64):
    # Outputs of which only the means differ: the variance is computed once, and has their shape all the same.
    inducing, X, joint = problem(2)
    (loc, scale), (shift,) = (parameters(k, size=m) for k, m in zip(("dense", "mean-only"), SIZES, strict=False))
    posterior = Posterior(
        projector_of(joint, inducing), (DenseNormal(loc, scale), MeanOnlyNormal(np.stack([shift] * 3)))
    )
    assert posterior.batch_shape == (3,)
    (mean, variance), covariance, _ = predict(posterior, X)
    assert mean.shape == variance.shape == (3, 8) and covariance.shape == (3, 8, 8)
    expected_mean, expected = joint.predict([loc, shift], [scale @ scale.T, np.eye(SIZES[1])])
    np.testing.assert_allclose(mean, [expected_mean] * 3, atol=1e-9)
    np.testing.assert_allclose(covariance, [expected] * 3, atol=1e-9)
    np.testing.assert_allclose(variance, [np.diag(expected)] * 3, atol=1e-9)


def several_outputs():
    """Three blocks, the last moving the mean only, and two outputs; whitened means and covariances by output."""
    kinds = ("dense", "diagonal", "mean-only")
    inducing, X, joint = problem(3)
    values = [parameters(kind, batch=(2,), size=size) for kind, size in zip(kinds, SIZES, strict=True)]
    S = [covariance_of(kind, *value) for kind, value in zip(kinds, values, strict=True)]
    q = tuple(make(kind, *value) for kind, value in zip(kinds, values, strict=True))
    return inducing, X, joint, q, [value[0] for value in values], S


def test_rows_in_batches_are_all_rows(float64):
    inducing, X, joint, q, _, _ = several_outputs()

    def evaluate(posterior, X):
        return [posterior.mean_and_variance(X, batch_size=size) for size in (None, 1, 3, 8)]

    expected, *batched = compute(evaluate, Posterior(projector_of(joint, inducing), q), X)
    for moments in batched:
        for value, wanted in zip(moments, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-10)


def test_memory_does_not_grow_with_rows_in_batches():
    size, features = 100_000, 50
    Z = np.linspace(0, 1, features, dtype=np.float32)[:, None]
    eye = np.eye(features, dtype=np.float32)
    posterior = Posterior(
        Projector(RBF(), (Points(Z),), (eye,), ((),), (0.0,)), (DenseNormal(np.zeros(features, np.float32), eye),)
    )

    def temporaries(function):
        X = jax.ShapeDtypeStruct((size, 1), np.float32)
        return jax.jit(function).lower(X).compile().memory_analysis().temp_size_in_bytes

    rows = 4 * size  # bytes of one column
    assert temporaries(lambda X: posterior._projected_moments(posterior.projector(X))) > 0.5 * features * rows
    assert temporaries(lambda X: posterior.mean_and_variance(X, 1000)) < 8 * rows
    assert temporaries(lambda X: posterior.mean_and_variance(X)) < 12 * rows  # in chunks too, of 10,000 rows here


def test_no_prediction_makes_an_array_of_all_rows_and_features(monkeypatch):
    """Not by any method: rows are taken in chunks, and each result is that of the rows at once."""
    X, Z = (np.random.default_rng(0).uniform(0.0, 3.0, (n, 2)).astype(np.float32) for n in (3000, 40))
    q = DenseNormal(np.ones(40, np.float32), 0.1 * np.eye(40, dtype=np.float32))
    posterior = Posterior(factorize(Matern52(1.0), [Points(Z)]), (q,))
    y = X[:, 0]
    methods = {
        "mean": posterior.mean,
        "mean_and_variance": posterior.mean_and_variance,
        "decompose": lambda X: dataclasses.astuple(posterior.decompose(X))[1:],
        "derivative": posterior.derivative,
        "log_density": lambda X: posterior.log_density(X, y, npgp.Gaussian(scale=0.3)),
        "draw_functions": posterior.draw_functions(jax.random.key(0), 2, num_features=64),
    }

    def largest(method):
        return max(v.aval.size for e in equations(jax.make_jaxpr(lambda X: method(X))(X).jaxpr) for v in e.outvars)

    sizes = []
    for chunk in (256, 100_000):
        monkeypatch.setattr(chunks, "FEWEST_ROWS", chunk)
        monkeypatch.setattr(chunks, "entries_at_once", lambda: 1)
        sizes.append({name: largest(method) for name, method in methods.items()})
    few, many = sizes
    for name in methods:
        assert few[name] < 8 * X.size, name  # inputs and results, and chunks of 256 rows or fewer
        assert many[name] > 8 * X.size, name  # the test would see it
    # Of the rows by themselves, not in chunks: what the dense tests above have checked.
    for name in ("mean", "decompose", "derivative", "draw_functions"):
        monkeypatch.setattr(chunks, "FEWEST_ROWS", 100)
        chunked = jax.jit(lambda X, method=methods[name]: method(X))(X[:150])
        monkeypatch.setattr(chunks, "FEWEST_ROWS", 1000)
        whole = jax.jit(lambda X, method=methods[name]: method(X))(X[:150])
        for a, b in zip(jax.tree.leaves(chunked), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("batch_size", [0, -3, 2.0, True, "all"])
def test_batches_of_no_rows_are_refused(batch_size):
    inducing, X, joint = problem(1)
    posterior = Posterior(projector_of(joint, inducing), (MeanOnlyNormal(np.zeros(SIZES[0])),))
    with pytest.raises((ValueError, TypeError), match="batch_size is .*; it must be (at least 1|a whole number)"):
        posterior.mean_and_variance(X, batch_size)


def test_posteriors_may_be_mapped_and_differentiated(float64):
    inducing, X, joint = problem(1)
    projector = projector_of(joint, inducing)
    means = np.random.default_rng(0).normal(size=(3, SIZES[0]))

    @jax.jit
    @jax.vmap
    def gradients(mean):
        posterior = Posterior(projector, (MeanOnlyNormal(mean),))
        return posterior, jax.grad(lambda p: -jnp.sum(p.mean(X)))(posterior)

    # Rebuilt with a leading axis on every leaf; and a gradient is a posterior again, of slopes.
    batch, slopes = gradients(means)
    assert isinstance(batch, Posterior) and isinstance(slopes, Posterior)
    np.testing.assert_array_equal(batch.q[0].loc, means)
    np.testing.assert_allclose(slopes.q[0].loc, np.tile(-joint.A[0].sum(-1), (3, 1)), atol=1e-9)


# ---------------------------------------------------------------- parts


def test_parts_are_those_of_the_blocks_and_sum_to_f(float64):
    inducing, X, joint, q, means, S = several_outputs()
    posterior = Posterior(projector_of(joint, inducing), q)
    parts, (mean, variance) = compute(lambda p, X: (p.decompose(X), p.mean_and_variance(X)), posterior, X)
    assert parts.names == ("principal", "orthogonal 1", "orthogonal 2", "residual")
    assert parts.mean.shape == parts.variance.shape == (4, 2, len(X))
    np.testing.assert_allclose(parts.mean.sum(0), mean, rtol=1e-10)
    np.testing.assert_allclose(parts.variance.sum(0), variance, rtol=1e-10)
    A = joint.A
    for i in range(3):
        np.testing.assert_allclose(parts.mean[i], means[i] @ A[i], atol=1e-9)
        # The last block moves the mean only.
        expected = np.einsum("mn,bmk,kn->bn", A[i], S[i], A[i]) if i < 2 else 0.0
        np.testing.assert_allclose(parts.variance[i], np.broadcast_to(expected, (2, len(X))), atol=1e-9)
    np.testing.assert_array_equal(parts.mean[3], 0.0)
    residual = np.diag(joint.residual([True, True, False]))
    np.testing.assert_allclose(parts.variance[3], [residual] * 2, atol=1e-9)


@pytest.mark.parametrize("blocks, names", [(1, ["principal"]), (2, ["principal", "orthogonal"])])
def test_names_of_parts(blocks, names):
    inducing, X, joint = problem(blocks)
    q = tuple(MeanOnlyNormal(np.zeros(size, np.float32)) for size in SIZES[:blocks])
    posterior = Posterior(projector_of(joint, inducing, np.float32), q)
    assert jax.eval_shape(posterior.decompose, X.astype(np.float32)).names == (*names, "residual")


# ---------------------------------------------------------------- derivatives


def test_slopes_are_limits_of_differences(x64):
    inducing, X, _, q, means, S = several_outputs()
    joint = oracles.Joint.of(kernel_and_formula()[1], inducing, X)
    posterior = Posterior(projector_of(joint, inducing, x64), jax.tree.map(lambda leaf: leaf.astype(x64), q))
    slopes = compute(lambda p, X: [p.derivative(X), p.derivative(X, dim=-1)], posterior, X.astype(x64))
    h = 1e-5
    for column, (mean, variance) in enumerate(slopes):
        assert mean.dtype == variance.dtype == x64 and mean.shape == variance.shape == (2, len(X))
        step = h * np.eye(2)[column]
        around = oracles.Joint.of(kernel_and_formula()[1], inducing, np.concatenate([X + step, X - step]))
        difference = np.concatenate([np.eye(len(X)), -np.eye(len(X))], 1) / (2 * h)
        for output in range(2):
            values, covariance = around.predict([m[output] for m in means], [s[output] for s in S])
            np.testing.assert_allclose(mean[output], difference @ values, atol=2e-4)
            expected = np.diag(difference @ covariance @ difference.T)
            # Matérn-3/2 approaches its limit in proportion to the step.
            np.testing.assert_allclose(variance[output], expected, rtol=1e-3)


def test_slopes_of_the_exact_posterior(float64):
    # Inducing points at all inputs: derivatives of kriging's formulas.
    rng = np.random.default_rng(5)
    grid = np.stack(np.meshgrid(np.arange(4.0), np.arange(4.0)), -1).reshape(-1, 2)
    X = rng.permutation(grid)[:9] + rng.uniform(-0.3, 0.3, size=(9, 2))
    y, new = rng.normal(size=9), rng.uniform(0, 3, size=(6, 2))
    lengthscale, variance, noise = np.array([0.9, 1.4]), 1.6, 0.1

    def evaluate(y, new):
        gp = CollapsedGP(RBF(jnp.asarray(lengthscale), variance=variance), X, X, noise_variance=noise, jitter=0.0)
        return [gp.condition(y).derivative(new, dim) for dim in range(2)]

    K = functools.partial(oracles.stationary, "RBF", lengthscale=lengthscale, variance=variance)
    C = K(X, X) + noise * np.eye(9)
    for dim, (mean, spread) in enumerate(compute(evaluate, y, new)):
        slope = -(new[:, None, dim] - X[None, :, dim]) / lengthscale[dim] ** 2 * K(new, X)
        np.testing.assert_allclose(mean, slope @ np.linalg.solve(C, y), atol=1e-8)
        expected = variance / lengthscale[dim] ** 2 - np.sum(slope * np.linalg.solve(C, slope.T).T, -1)
        np.testing.assert_allclose(spread, expected, rtol=1e-7)


def test_slopes_that_do_not_exist_are_refused():
    Z = np.zeros((1, 2), np.float32)
    one, q = np.ones((1, 1), np.float32), (MeanOnlyNormal(np.zeros(1, np.float32)),)
    rough, smooth = (Posterior(Projector(k, (Points(Z),), (one,), ((),), (0.0,)), q) for k in (rbf + Matern12(), rbf))
    with pytest.raises(ValueError, match="functions drawn from Sum have no derivative"):
        rough.derivative(Z)
    for dim in (2, -3, 0.0, None, True):
        with pytest.raises(
            (ValueError, TypeError), match="dim is .*; it must be (the number of one of the 2 columns|a whole)"
        ):
            smooth.derivative(Z, dim)


# ---------------------------------------------------------------- sample paths


rbf, rbf_formula = RBF(1.3, variance=1.7), functools.partial(oracles.stationary, "RBF", lengthscale=1.3, variance=1.7)


def rbf_posterior(jitter, dtype, rows=5):
    """A posterior with three kinds of block, inputs, and its dense moments there."""
    kinds = ("dense", "diagonal", "mean-only")
    inducing, X, _ = problem(3, rows=rows)
    joint = oracles.Joint.of(rbf_formula, inducing, X, jitter)
    values = [parameters(kind, size=size) for kind, size in zip(kinds, SIZES, strict=True)]
    q = tuple(make(kind, *cast(dtype, value)) for kind, value in zip(kinds, values, strict=True))
    S = [covariance_of(kind, *value) for kind, value in zip(kinds, values, strict=True)]
    posterior = Posterior(projector_of(joint, inducing, dtype, rbf, jitter), q)
    return posterior, X.astype(dtype), *joint.predict([value[0] for value in values], S)


def test_paths_with_new_features_each_have_the_posteriors_moments(float64):
    # Averaged over features, 30 frequencies are as good as infinitely many. The large jitter shows that draws account
    # for it; and slopes of draws have the moments that derivative says.
    posterior, X, mean, covariance = rbf_posterior(0.1, float64)
    direction = np.zeros_like(X)
    direction[:, 1] = 1.0

    def evaluate(posterior, keys):
        def draw(key):
            paths = posterior.draw_functions(key, num_features=30)
            return jax.jvp(lambda X: paths(X)[0], (X,), (direction,))

        return jax.vmap(draw)(keys), posterior.derivative(X, dim=1)

    (values, slopes), (slope, slope_variance) = compute(evaluate, posterior, jax.random.split(jax.random.key(3), 8_000))
    assert_moments(values, mean, covariance)
    for i in range(len(X)):
        assert_moments(slopes[:, i : i + 1], slope[i : i + 1], slope_variance[i : i + 1, None])


@functools.partial(jax.jit, static_argnums=(2, 3))
def draw_functions(posterior, key, num_draws=3, num_features=10):
    return posterior.draw_functions(key, num_draws, num_features)


@jax.jit
def values_of(paths, X):
    return paths(X)


def test_paths_of_one_call_share_features():
    posterior, X, mean, covariance = rbf_posterior(1e-4, np.float32)
    n, features = 4000, 512
    paths = draw_functions(posterior, jax.random.key(0), n, features)
    draws = np.asarray(values_of(paths, X))
    assert draws.shape == (n, 5) and draws.dtype == np.float32
    variance = np.diag(covariance)
    assert np.all(np.abs(draws.mean(0) - mean) < 5 * np.sqrt(variance / n))
    monte_carlo = 5 * np.sqrt((np.outer(variance, variance) + covariance**2) / n)
    assert np.all(np.abs(np.cov(draws.T) - covariance) < monte_carlo + 5 * 1.7 / np.sqrt(2 * features))
    # Drawn again where 64-bit numbers are the default, the features would be others. They are kept.
    with jax.enable_x64(True):
        again = values_of(paths, X)
    assert again.dtype == np.float32
    np.testing.assert_allclose(again, draws, atol=1e-4)


def test_paths_of_a_kernel_with_exact_features(float64):
    # Two outputs, which share neither inducing values nor prior draws; and one block that is the same for both.
    inducing, X = [np.array([[0.0, 1.0], [1.0, -0.5]]), np.array([[-1.0, 0.3]])], problem(1, rows=4)[1] / 4
    loc, scale = parameters("dense", batch=(2,), size=2)
    shared = parameters("diagonal", size=1)
    joint = oracles.Joint.of(lambda X, Z: 0.8 + X @ Z.T, inducing, X)
    projector = projector_of(joint, inducing, kernel=Constant(variance=0.8) + Linear())
    posterior = Posterior(projector, (DenseNormal(loc, scale), DiagonalNormal(*shared)))
    draws = compute(lambda p: p.draw_functions(jax.random.key(5), 20_000)(X), posterior)
    assert draws.shape == (20_000, 2, 4)
    moments = [
        joint.predict([loc[i], shared[0]], [scale[i] @ scale[i].T, covariance_of("diagonal", *shared)])
        for i in range(2)
    ]
    covariance = np.block([[moments[0][1], np.zeros((4, 4))], [np.zeros((4, 4)), moments[1][1]]])
    assert_moments(draws.reshape(-1, 8), np.concatenate([mean for mean, _ in moments]), covariance)


def test_paths_pass_through_their_inducing_values(float64):
    # Few features, but where the inducing values are known, so are the draws. (Of the block that moves the mean only,
    # they are not.)
    posterior, X, *_ = rbf_posterior(0.0, float64)
    dense, diagonal, shift = posterior.q
    q = (DenseNormal(dense.loc, 1e-12 * dense.scale_tril), DiagonalNormal(diagonal.loc, 1e-12 * diagonal.scale), shift)
    paths = draw_functions(Posterior(posterior.projector, q), jax.random.key(2))
    inducing = np.concatenate([block.inputs for block in posterior.projector.blocks])
    mean = compute(lambda p, X: p.mean(X), posterior, inducing)
    at_points, elsewhere = values_of(paths, inducing), values_of(paths, X)
    learned = sum(SIZES[:2])
    np.testing.assert_allclose(at_points[:, :learned], [mean[:learned]] * 3, atol=1e-8)
    assert np.all(np.ptp(at_points[:, learned:], axis=0) > 1e-2) and np.all(np.ptp(elsewhere, axis=0) > 1e-2)


def test_paths_are_functions(float64):
    posterior, X, *_ = rbf_posterior(0.0, float64, rows=8)
    paths = draw_functions(posterior, jax.random.key(2))
    values = values_of(paths, X)
    assert values.shape == (3, 8) and np.all(np.ptp(values, axis=0) > 1e-2)
    np.testing.assert_array_equal(values_of(paths, X), values)
    np.testing.assert_allclose(values_of(paths, X[::-1])[:, ::-1], values, atol=1e-10)
    np.testing.assert_allclose(values_of(paths, X[:1]), values[:, :1], atol=1e-10)
    # The same key draws the same functions, and another key others.
    np.testing.assert_array_equal(values_of(draw_functions(posterior, jax.random.key(2)), X), values)
    assert np.all(values_of(draw_functions(posterior, jax.random.key(3)), X) != values)

    slopes = compute(lambda p, X: jax.vmap(jax.grad(lambda x: p(x[None])[1, 0]))(X), paths, X)
    h = 1e-5
    for dim, axis in enumerate(np.eye(2)):
        difference = values_of(paths, X + h * axis)[1] - values_of(paths, X - h * axis)[1]
        np.testing.assert_allclose(slopes[:, dim], difference / (2 * h), atol=1e-6)


class Averages:
    """Some features that are no points."""

    size = 1

    def gram(self, kernel):
        return np.ones((1, 1))

    def cross(self, kernel, X):
        return np.ones((1, len(X)))


def test_paths_that_cannot_be_drawn_are_refused():
    q, key = (MeanOnlyNormal(np.zeros(1, np.float32)),), jax.random.key(0)
    one = np.ones((1, 1), np.float32)
    posterior = Posterior(Projector(rbf, (Averages(),), (one,), ((),), (0.0,)), q)
    with pytest.raises(NotImplementedError, match="Averages features are no points: use Posterior.sample"):
        posterior.draw_functions(key)
    posterior = Posterior(Projector(rbf, (Points(one),), (one,), ((),), (0.0,)), q)
    for name in ("num_draws", "num_features"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
            posterior.draw_functions(key, **{name: 0})
    paths = Paths(posterior.projector, (), one, (one[0],), 1)
    with pytest.raises(ValueError, match=r"X has shape \(3,\)"):
        paths(np.zeros(3, np.float32))
