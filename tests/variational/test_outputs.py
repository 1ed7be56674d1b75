"""Several outputs: the coregionalization kernel, and posteriors of mixtures of functions, against dense algebra."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import oracles
import pytest
from numpyro import handlers

import npgp
from npgp.features import Points
from npgp.sparse.projection import factorize
from npgp.variational import DenseNormal

KEY = functools.partial(jax.random.key, impl="rbg")  # compiles much faster than the default
_rng = np.random.default_rng(11)
X = _rng.uniform(0.0, 4.0, (6, 2))
X2 = _rng.uniform(0.0, 4.0, (4, 2))
W = _rng.normal(size=(3, 2))
KAPPA = np.array([0.3, 0.8, 0.1])
B = W @ W.T + np.diag(KAPPA)
OUTPUTS = np.array([2.0, 0.0, 1.0, 1.0, 2.0, 0.0])
NOISE = 0.1


def rbf(A, B, lengthscale=0.7, variance=1.3):
    return models.rbf(A, B, lengthscale, variance)


def kernel(W=W, kappa=KAPPA, column=-1):
    return npgp.kernels.Coregion(npgp.RBF(0.7, variance=1.3), W, kappa=kappa, column=column)


def arrays(dtype, *values):
    return [jnp.asarray(np.array(value), dtype) for value in values]


# ---------------------------------------------------------------- the kernel


def test_on_a_grid_of_outputs_and_inputs_it_is_kronecker(x64):
    x, x2 = arrays(x64, X, X2)

    @models.compiled
    def evaluate(x, x2, W, kappa):
        k, X, X2 = kernel(W, kappa), npgp.kernels.at_outputs(x, [0, 1, 2]), npgp.kernels.at_outputs(x2, [0, 1, 2])
        rank_two = npgp.kernels.Coregion(npgp.RBF(0.7, variance=1.3), W)
        return k(X), k(X, X2), k.diag(X), k.output_covariance(), rank_two(X, X2), rank_two.diag(X)

    square, cross, diagonal, outputs, low, low_diagonal = evaluate(x, x2, *arrays(x64, W, KAPPA))
    close = functools.partial(np.testing.assert_allclose, atol=1e-12 if x64 == jnp.float64 else 1e-5)
    assert square.dtype == cross.dtype == diagonal.dtype == x64
    close(square, np.kron(B, rbf(X, X)))
    close(cross, np.kron(B, rbf(X, X2)))
    close(diagonal, np.diag(np.kron(B, rbf(X, X))))
    close(outputs, B)
    close(low, np.kron(W @ W.T, rbf(X, X2)))
    close(low_diagonal, np.repeat(np.diag(W @ W.T), 6) * 1.3)
    assert np.linalg.eigvalsh(np.asarray(square, float)).min() > -1e-5


def test_rows_in_any_order_and_the_column_anywhere(float64):
    """The base kernel's columns are counted as everybody's."""
    rows = np.column_stack([X[:, 0], OUTPUTS, X[:, 1]])
    base = npgp.RBF(0.7, variance=1.3, active_dims=(2,))
    found = models.compiled(lambda rows: npgp.kernels.Coregion(base, W, kappa=KAPPA, column=1)(rows))(
        *arrays(float64, rows)
    )
    p = OUTPUTS.astype(int)
    np.testing.assert_allclose(found, rbf(X[:, 1:], X[:, 1:]) * B[np.ix_(p, p)], atol=1e-12)


V = np.array([[0.9], [-0.4], [0.7]])
LEVELS = np.array([[0, 1], [2, 0], [1, 2], [1, 1], [0, 0], [2, 1]], float)
#: Expressions of columns 0 and 3 with levels and 1 and 2 without, and what they are of kernels of inputs and of levels.
EXPRESSIONS = {
    "nested": (
        lambda C, k: C(C(k(1.0), V, column=3), W, column=0),
        lambda r, B, A: r(1.0) * B * A,
    ),
    "product": (
        lambda C, k: C(k(1.0), W, column=0) * C(k(0.6), V, column=-1),
        lambda r, B, A: r(1.0) * r(0.6) * B * A,
    ),
    "sum beside a kernel without levels": (
        lambda C, k: k(2.0) * k(0.9) + 0.5 * C(k(1.0), W, column=0) + C(k(0.6), V, column=3),
        lambda r, B, A: r(2.0) * r(0.9) + 0.5 * r(1.0) * B + r(0.6) * A,
    ),
    "sum in a Coregion in a product": (
        lambda C, k: C(k(1.0) + 2.0 * k(0.4, active_dims=(2,)), W, column=0) * C(npgp.kernels.Constant(), V, column=3),
        lambda r, B, A: (r(1.0) + 2.0 * r(0.4, (2,))) * B * A,
    ),
    "a kernel that is told to read a level": (
        lambda C, k: C(k(1.0, active_dims=(3, 1)), W, column=0) + C(k(1.0), V, column=3),
        lambda r, B, A: r(1.0, (3, 1)) * B + r(1.0) * A,
    ),
    "one column for two, factors": (
        lambda C, k: C(k(1.0), W, column=0) * C(k(0.6), W, column=0) + C(k(1.0), V, column=3),
        lambda r, B, A: r(1.0) * r(0.6) * B * B + r(1.0) * A,
    ),
}


@pytest.mark.parametrize("what", EXPRESSIONS)
def test_no_kernel_of_an_expression_reads_levels_as_numbers(what, float64):
    """Nested, summed or multiplied: absolute columns everywhere, and levels for those alone that name them."""
    expression, dense = EXPRESSIONS[what]
    rows = np.column_stack([LEVELS[:, 0], X, LEVELS[:, 1]])

    def r(lengthscale, columns=(1, 2)):
        return rbf(rows[:, columns], rows[:, columns], lengthscale)

    p, q = LEVELS.astype(int).T
    expected = dense(r, (W @ W.T)[np.ix_(p, p)], (V @ V.T)[np.ix_(q, q)])
    kernel = expression(npgp.kernels.Coregion, functools.partial(npgp.RBF, variance=1.3))

    @models.compiled
    def evaluate(X):
        # Levels have no gradient: whoever trains inducing inputs leaves them where they are.
        points = lambda Z: jnp.sum(jnp.sin(npgp.features.Points(Z).cross(kernel, X)))  # noqa: E731
        features = kernel.random_features(KEY(0), 4, 20000)(X)
        return kernel(X), kernel(X, X[:4]), kernel.diag(X), features @ features.T, jax.grad(points)(X[:3])

    square, cross, diagonal, estimate, gradient = map(np.asarray, evaluate(*arrays(float64, rows)))
    np.testing.assert_allclose(square, expected, atol=1e-12)
    np.testing.assert_allclose(cross, expected[:, :4], atol=1e-12)
    np.testing.assert_allclose(diagonal, np.diag(expected), atol=1e-12)
    np.testing.assert_allclose(estimate, expected, atol=0.05 * np.abs(expected).max())  # 1/√20000 is .007
    np.testing.assert_array_equal(gradient[:, [0, 3]], 0.0)
    assert np.all(gradient[:, 1] != 0.0)


def test_kernels_of_ones_own_see_the_other_columns(float64):
    """Of tinygp and of one's own: without active_dims they see what holds no levels."""
    import tinygp

    rows = np.column_stack([LEVELS[:, 0], X, LEVELS[:, 1]])
    coregion = npgp.kernels.Coregion(npgp.kernels.Constant(), W, column=0)
    B = (W @ W.T)[np.ix_(*2 * [LEVELS[:, 0].astype(int)])]
    other = npgp.kernels.Tinygp(tinygp.kernels.ExpSquared(0.7))
    found = models.compiled(lambda X: (coregion * other)(X))(*arrays(float64, rows[:, :3]))
    np.testing.assert_allclose(found, B * rbf(X, X, variance=1.0), atol=1e-12)


@npgp.pytree
@dataclass(frozen=True)
class Around(npgp.kernels.Kernel):
    """A kernel of one's own around another."""

    inner: npgp.kernels.Kernel


def test_ambiguous_columns_of_levels_are_refused():
    C, rows = npgp.kernels.Coregion, np.column_stack([LEVELS, X]).astype(np.float32)
    with pytest.raises(ValueError, match="a Coregion and one within it read the same column, 0"):
        C(C(npgp.RBF(), V, column=0), W, column=-4)(rows)
    with pytest.raises(ValueError, match="RBF sees no column: all 2 columns of the inputs hold levels"):
        C(C(npgp.RBF(), V, column=0), W, column=1)(rows[:, :2])
    with pytest.raises(ValueError, match="Around holds a kernel with levels, and others stand beside it"):
        (Around(C(npgp.RBF(), W, column=0)) * C(npgp.RBF(), W, column=1))(rows)


def test_gradients_are_those_of_the_kronecker_product(float64):
    weights, x = arrays(float64, np.random.default_rng(1).normal(size=(18, 18)), X)

    @models.compiled
    def gradients(x, W, kappa):
        def ours(W, kappa):
            return jnp.sum(weights * kernel(W, kappa)(npgp.kernels.at_outputs(x, [0, 1, 2])))

        def dense(W, kappa):
            return jnp.sum(weights * jnp.kron(W @ W.T + jnp.diag(kappa), npgp.RBF(0.7, variance=1.3)(x)))

        return jax.grad(ours, (0, 1))(W, kappa), jax.grad(dense, (0, 1))(W, kappa)

    ours, dense = gradients(x, *arrays(float64, W, KAPPA))
    for a, b in zip(ours, dense, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_features_of_finitely_many_are_exact(float64):
    linear, constant = (
        npgp.kernels.Coregion(base, W, kappa=KAPPA)
        for base in (npgp.kernels.Linear(variance=0.5), npgp.kernels.Constant(variance=0.5))
    )

    @models.compiled
    def evaluate(x):
        x = npgp.kernels.at_outputs(x, [0, 2])
        phi, psi = linear.random_features(KEY(0), 3, 10)(x), constant.feature_draws(KEY(0), 3, 4)(x)
        return phi, linear(x), psi, constant(x)

    phi, of_linear, psi, of_constant = map(np.asarray, evaluate(*arrays(float64, X)))
    np.testing.assert_allclose(phi @ phi.T, of_linear, atol=1e-12)
    for draw in np.moveaxis(psi, 1, 0):
        np.testing.assert_allclose(draw @ draw.T, of_constant, atol=1e-12)


@pytest.mark.parametrize("value", [3.0, -1.0, 0.5])
def test_outputs_that_do_not_exist_are_an_error_or_nan(value):
    rows = np.column_stack([X, OUTPUTS]).astype(np.float32)
    rows[2, 2] = value
    with pytest.raises(ValueError, match=rf"has 3 outputs.* value {value:g}.* 0 to 2"):
        kernel()(rows)
    with pytest.raises(ValueError, match="has 3 outputs"):
        kernel().diag(rows)
    found, diagonal = models.compiled(lambda rows: (kernel()(rows), kernel().diag(rows)))(rows)
    wrong = np.arange(6) == 2
    np.testing.assert_array_equal(np.isnan(found), wrong[:, None] | wrong)
    np.testing.assert_array_equal(np.isnan(diagonal), wrong)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: kernel(np.ones(3)), ValueError, r"W has shape \(3,\); it must be \(P, R\)"),
        (lambda: kernel(kappa=np.ones(2)), ValueError, r"kappa has shape \(2,\)"),
        (lambda: kernel(kappa=-KAPPA), ValueError, "kappa is .* positive"),
        (lambda: kernel(column=1.0), TypeError, "column is 1.0"),
        (lambda: kernel(column=5)(np.ones((2, 3))), ValueError, "column 5 of inputs that have 3 columns"),
        (lambda: kernel()(np.ones((2, 1))), ValueError, "inputs that have 1 columns"),
        (lambda: npgp.kernels.at_outputs(X.astype(np.float32), [0, -1]), ValueError, "list of output numbers"),
        (lambda: npgp.kernels.at_outputs(X.astype(np.float32), 2), ValueError, "list of output numbers"),
    ],
)
def test_what_makes_no_kernel_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_two_outputs_observed_are_the_exact_multi_output_gp(float64):
    """At Z = X the best ELBO is the log evidence, and the posterior that of dense algebra; y is ragged."""
    mixing, kappa = W[:2], KAPPA[:2]
    B = mixing @ mixing.T + np.diag(kappa)
    x, x2 = arrays(float64, X, X2)
    rows = npgp.kernels.at_outputs(x, [0, 1])[:-2]  # output 1 lacks two of the inputs
    y = np.random.default_rng(0).normal(size=10)
    gp = npgp.SparseGP("f", kernel(*arrays(float64, mixing, kappa)), rows, jitter=1e-12)

    def model(X, y=None):
        npgp.observe("y", gp.draw()(X), npgp.Gaussian(variance=NOISE), obs=y)

    @models.compiled
    def run(x2, rows, y):
        posterior = npgp.CollapsedGP(gp.kernel, rows, rows, noise_variance=NOISE, jitter=1e-12).condition(y)
        new = npgp.kernels.at_outputs(x2, [0, 1])
        elbo = models.make_elbo(model)(KEY(0), gp.params(posterior.q), rows, y)
        return elbo, posterior.mean(new), posterior.covariance(new)

    elbo, mean, covariance = run(x2, rows, *arrays(float64, y))
    K = np.kron(B, rbf(X, X))[:10, :10]
    np.testing.assert_allclose(elbo, oracles.log_normal(y, K + NOISE * np.eye(10)), rtol=1e-6)
    K_star, K_new = np.kron(B, rbf(X2, X))[:, :10], np.kron(B, rbf(X2, X2))
    expected = oracles.gp_posterior(K, K_star, K_new, y, NOISE)
    np.testing.assert_allclose(mean, expected[0], atol=1e-6)
    np.testing.assert_allclose(covariance, expected[1], atol=1e-6)
    assert np.abs(expected[1][:4, 4:]).max() > 0.1  # between outputs


# ---------------------------------------------------------------- mixtures of functions


@pytest.fixture(scope="module")
def functions():
    """A batch of two functions and one with another kernel, and the dense covariances of all three at Z and X."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(2)
        Z = X[:4]
        posteriors, means, covariances = [], [], []
        for lengthscale, count in ((0.7, 2), (1.5, 1)):
            loc = rng.normal(size=(count, 4))
            L = np.tril(0.3 * rng.normal(size=(count, 4, 4)), -1) + np.eye(4) * rng.uniform(0.3, 0.8, (count, 4, 1))
            k = npgp.RBF(lengthscale, variance=1.3)
            projector = models.compiled(lambda Z, k=k: factorize(k, [Points(Z)], 1e-12))(jnp.asarray(Z))
            batch = (lambda v: v) if count > 1 else (lambda v: v[0])
            posteriors.append(
                npgp.variational.Posterior(projector, (DenseNormal(jnp.asarray(batch(loc)), jnp.asarray(batch(L))),))
            )
            joint = oracles.Joint.of(functools.partial(rbf, lengthscale=lengthscale), [Z], X)
            for m, factor in zip(loc, L, strict=True):
                mean, covariance = joint.predict([m], [factor @ factor.T])
                means.append(mean)
                covariances.append(covariance)
        yield tuple(posteriors), np.stack(means), np.stack(covariances)


MIXING = np.column_stack([W, KAPPA])


def dense_mixture(mixing, means, covariances):
    """Mean (P · N,) and covariance, with blocks of one output."""
    rows = means.shape[-1]
    spread = np.kron(mixing, np.eye(rows))
    joint = np.zeros((means.size, means.size))
    for q, covariance in enumerate(covariances):
        joint[q * rows : (q + 1) * rows, q * rows : (q + 1) * rows] = covariance
    return spread @ means.ravel(), spread @ joint @ spread.T


def test_mixtures_are_dense_algebra(float64, functions):
    posteriors, means, covariances = functions
    x, mixing = arrays(float64, X, MIXING)

    @models.compiled
    def evaluate(posteriors, x, mixing):
        h = npgp.variational.MixedPosterior(posteriors, mixing)
        return h.mean(x), h.mean_and_variance(x, batch_size=4), h.covariance(x), h.output_covariance(x)

    mean, (same_mean, variance), covariance, outputs = evaluate(posteriors, x, mixing)
    assert covariance.shape == (3, 6, 3, 6) and outputs.shape == (6, 3, 3)
    expected_mean, expected = dense_mixture(MIXING, means, covariances)
    close = functools.partial(np.testing.assert_allclose, atol=1e-9)
    close(np.ravel(mean), expected_mean)
    close(np.ravel(same_mean), expected_mean)
    close(covariance.reshape(18, 18), expected)
    close(np.ravel(variance), np.diag(expected))
    for n in range(6):
        close(outputs[n], expected[n::6, n::6])


def test_identity_mixing_leaves_the_functions_alone(float64, functions):
    (batch, _), means, covariances = functions
    (x,) = arrays(float64, X)

    @models.compiled
    def evaluate(batch, x):
        h = batch.mixed(np.eye(2))
        return h.mean(x), h.variance(x), h.covariance(x), h.output_covariance(x)

    mean, variance, covariance, outputs = evaluate(batch, x)
    close = functools.partial(np.testing.assert_allclose, atol=1e-9)
    close(mean, means[:2])
    close(variance, [np.diag(c) for c in covariances[:2]])
    for p, q in np.ndindex(2, 2):
        close(covariance[p, :, q], covariances[p] if p == q else np.zeros((6, 6)))
        close(outputs[:, p, q], np.diag(covariances[p]) if p == q else np.zeros(6))


def test_draws_are_joint_over_outputs(float64, functions):
    """Values, and functions at inducing points, where random features leave no error."""
    posteriors, means, covariances = functions
    square = MIXING[:2]
    (x,) = arrays(float64, X[2:4])

    @models.compiled
    def draw(posteriors, x):
        h = npgp.variational.MixedPosterior(posteriors, square)
        paths = h.draw_functions(KEY(2), 4000, 64)
        return h.sample(KEY(1), x, (4000,)), paths(x), h.sample(KEY(1), x)

    draws, values, one = draw(posteriors, x)
    assert draws.shape == values.shape == (4000, 2, 2) and one.shape == (2, 2)
    mean, covariance = dense_mixture(square, means[:, 2:4], covariances[:, 2:4, 2:4])
    for found in (draws, values):
        assert models.worst_z_of_moments(found.reshape(4000, 4), mean, covariance) < 4.0


def test_matrices_that_do_not_fit_are_refused(functions):
    (batch, alone), *_ = functions
    with pytest.raises(ValueError, match=r"W has shape \(3, 3\); it must be \(P, 2\)"):
        batch.mixed(MIXING)
    with pytest.raises(ValueError, match=r"W has shape \(2,\); it must be \(P, 3\)"):
        npgp.variational.MixedPosterior((batch, alone), MIXING[0, :2])
    with pytest.raises(ValueError, match="W has NaN"):
        batch.mixed(np.full((2, 2), np.nan))
    q = batch.q[0]
    plane = npgp.variational.Posterior(batch.projector, (DenseNormal(q.loc[None], q.scale_tril[None]),))
    with pytest.raises(ValueError, match=r"batches of shape \[\(1, 2\)\]"):
        plane.mixed(np.eye(2))


@pytest.mark.filterwarnings("ignore:q.ε. takes for independent:UserWarning")  # it is the ELBO at a known q
def test_a_model_that_observes_a_mixture_has_its_moments(float64, functions):
    """``W @ g(X)`` in a model against the mixture of g's posterior: the ELBO with the classical conditional."""
    (batch, _), means, covariances = functions
    x, y, mixing = arrays(float64, X, np.random.default_rng(4).normal(size=(3, 6)), W)
    gp = npgp.SparseGP("g", npgp.RBF(0.7, variance=1.3), x[:4], jitter=1e-12)

    def model(x, y=None):
        with numpyro.plate("functions", 2, dim=-2):
            g = gp.draw()
        with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", 6, dim=-1):
            npgp.observe("y", mixing @ g(x), npgp.Gaussian(variance=NOISE), obs=y, conditional="prior")

    guide = npgp.AutoSparseGP(model, joint=False)
    elbo = models.elbo_value(model, gp.params(batch.q), x, y, guide=guide)
    mean, covariance = dense_mixture(W, means[:2], covariances[:2])
    rows = models.log_normal(np.ravel(y), mean, NOISE) - 0.5 * np.diag(covariance) / NOISE
    np.testing.assert_allclose(elbo, np.sum(rows) - np.sum(batch.kl()), rtol=1e-8)


# ---------------------------------------------------------------- averages over draws


def test_mixtures_averaged_over_draws_are_the_law_of_total_covariance(float64):
    """W a site, and drawn by whatever: MCMC's draws of it and of the inducing values, or W alone."""
    Z, x = (jnp.asarray(a.copy()) for a in (X[:4], X2))

    def model(X, y=None):
        loadings = numpyro.sample("W", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        with numpyro.plate("functions", 2, dim=-2):
            g = npgp.SparseGP("g", npgp.RBF(0.7), Z).draw()
        with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", len(X)):
            npgp.observe("y", loadings @ g(X), npgp.Gaussian(scale=0.1), obs=y)

    rng = np.random.default_rng(3)
    sites: list[str] = []
    jax.eval_shape(lambda: sites.extend(handlers.trace(handlers.seed(model, 0)).get_trace(x)))
    site = next(n for n in sites if n.startswith("g."))
    draws = {"W": rng.normal(size=(5, 3, 2)), site: rng.normal(size=(5, 2, 1, 4))}
    g = npgp.posterior("g", model, draws, {}, x)
    of_draws = models.compiled(lambda g: [(part.mean(x), part.covariance(x)) for part in g])(g)

    @models.compiled
    def of_mixed(h):
        drawn = h.sample(KEY(0), x, (7,)), h.draw_functions(KEY(0), 7, 16)(x)
        return h.mean(x), h.covariance(x), h.mean_and_variance(x)[1], h.output_covariance(x), drawn

    fixed = rng.normal(size=(3, 2))
    for mixing, of_draw in ((g.sites["W"], draws["W"]), (fixed, np.broadcast_to(fixed, (5, 3, 2)))):
        h = g.mixed(mixing)
        means, joint = [], []
        for i in range(5):  # dense algebra of each draw: h = W g, with functions independent given the draw
            mean, covariance = of_draws[i]
            means.append(of_draw[i] @ mean)
            joint.append(np.einsum("pq,qnm,rq->pnrm", of_draw[i], covariance, of_draw[i]))
        means = np.array(means)
        away = means - means.mean(0)
        expected = np.mean(joint, 0) + np.einsum("ipn,irm->pnrm", away, away) / 5
        close = functools.partial(np.testing.assert_allclose, atol=1e-10)
        mean, covariance, variance, at_rows, drawn = of_mixed(h)
        close(mean, means.mean(0))
        close(covariance, expected)
        close(variance, np.einsum("pnpn->pn", expected))
        close(at_rows, np.einsum("pnrn->npr", expected))
        assert h.batch_shape == (3,) and [values.shape for values in drawn] == [(7, 3, 4)] * 2
    for wrong in (np.ones((4, 3, 2)), np.ones((3, 3))):
        with pytest.raises(ValueError, match=r"W has shape .*; it must be \("):
            g.mixed(wrong)
    with pytest.raises(TypeError, match="output_covariance is of outputs that mix functions"):
        g.output_covariance(x)
