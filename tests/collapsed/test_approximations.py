"""SoR, DTC, FITC and PITC: dense formulas, GPflow's numbers, what must agree, and where they are known to fail."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import oracles
import pytest
from models import compiled, worst_z_of_moments
from scipy import stats

import npgp
from npgp.collapsed.approximations import ApproximateGP, DegeneratePosterior
from npgp.kernels import Matern32
from npgp.sparse.groups import consecutive, single

METHODS = ("sor", "dtc", "fitc", "pitc")
LENGTHSCALE = np.array([0.9, 1.3])
VARIANCE, NOISE = 1.4, 0.15
KERNEL = functools.partial(oracles.stationary, "Matern32", lengthscale=LENGTHSCALE, variance=VARIANCE)

# A problem that can be given to others.
ROW = np.arange(12.0)[:, None]
X = np.hstack([2 * np.sin(0.9 * ROW + 0.3), 1.5 * np.cos(1.7 * ROW)])
Y = np.sin(1.5 * X[:, 0]) + 0.5 * X[:, 1] + 0.3 * np.cos(5 * ROW[:, 0])
Z = np.array([[-1.5, 0.4], [0.1, -1.0], [1.2, 0.9], [0.3, 0.5]])
NEW = np.array([[0.2, 0.1], [1.5, -1.2], [4.0, 3.0]])
BLOCKS = consecutive(12, 5)  # the last is shorter
#: Inducing inputs, noise by row and observations at which everything is a general case.
ROW_NOISE = 0.1 + 0.05 * np.cos(ROW[:, 0]) ** 2
OUTPUTS = np.stack([Y, np.cos(Y)])


def approximation(method, dtype=np.float64, noise=NOISE, inducing=Z, inputs=X, **settings):
    if method == "pitc":
        settings.setdefault("groups", BLOCKS)
    kernel = Matern32(jnp.asarray(LENGTHSCALE.astype(dtype)), variance=dtype(VARIANCE))
    return ApproximateGP(
        kernel, inputs.astype(dtype), jnp.asarray(inducing, dtype), noise_variance=noise, method=method, **settings
    )


def everything(gp, y, new):
    posterior = gp.condition(y)
    return gp.log_prob(y), *posterior.mean_and_variance(new), posterior.covariance(new)


@pytest.fixture(scope="module")
def computed():
    """
    What :func:`everything` gives by method and for limits of PITC, in two cases: the noise of GPflow's numbers, and a
    general one with a mean function and noise by row.
    """
    with jax.enable_x64(True):

        @compiled
        def run(noise, mean):
            settings = dict(noise=noise, offset=mean, jitter=1e-12)
            y, new = jnp.asarray(OUTPUTS.copy()), jnp.asarray(NEW.copy())
            results = {method: everything(approximation(method, **settings), y, new) for method in METHODS}
            results["singletons"] = everything(approximation("pitc", groups=consecutive(12, 1), **settings), y, new)
            results["one block"] = approximation("pitc", groups=single(12), **settings).log_prob(y)
            results["exact"] = npgp.collapsed.exact_log_evidence(
                Matern32(LENGTHSCALE.copy(), variance=VARIANCE), X, y - mean, noise_variance=noise
            )
            return results

        simple, general = run(np.full(12, NOISE), np.zeros(12)), run(ROW_NOISE.copy(), np.full(12, 0.3))
        return jax.tree.map(np.asarray, (simple, general))


# ---------------------------------------------------------------- values


def dense(method, y, noise, mean=0.0):
    """Quiñonero-Candela & Rasmussen's equations with N × N matrices; y is one output."""
    everywhere = np.concatenate([X, NEW])
    K = KERNEL(everywhere, everywhere)
    Q = KERNEL(everywhere, Z) @ np.linalg.solve(KERNEL(Z, Z), KERNEL(Z, everywhere))
    train, test = slice(0, len(X)), slice(len(X), None)
    D = (K - Q)[train, train]
    block = np.arange(12) // 5
    kept = {"sor": 0.0, "dtc": 0.0, "fitc": np.diag(np.diag(D)), "pitc": D * (block[:, None] == block)}[method]
    C = Q[train, train] + kept + np.diag(np.broadcast_to(noise, 12))
    gain = np.linalg.solve(C, Q[train, test]).T
    prior = Q if method == "sor" else K
    covariance = prior[test, test] - gain @ Q[train, test]
    return oracles.log_normal(y - mean, C), gain @ (y - mean), np.diag(covariance), covariance, C


def test_density_and_predictions_are_their_dense_equations(computed):
    for results, noise, mean in zip(computed, (NOISE, ROW_NOISE), (0.0, 0.3), strict=True):
        for method in METHODS:
            for i, y in enumerate(OUTPUTS):
                for value, expected in zip(results[method], dense(method, y, noise, mean), strict=False):
                    np.testing.assert_allclose(value[i], expected, atol=1e-9, err_msg=method)


#: GPflow 2.11.2 at a jitter of 1e-10: ``GPRFITC``'s likelihood, means, variances, and the covariances above the
#: diagonal; for DTC, ``SGPR``'s bound less its trace term and its predictions.
GPFLOW = {
    "fitc": (
        -14.946673374552482,
        [0.4084877214480437, 0.17749366369791308, 0.015376706481102374],
        [0.33108277021797833, 1.3108575304515988, 1.3997725828118508],
        [0.03603953845468927, -0.0006082158482825903, 0.004468902756909719],
    ),
    "dtc": (
        -48.33584775053485 + 33.92392616492585,
        [0.5239630677031217, 0.07566646398318283, 0.017723060610515706],
        [0.28224014144242204, 1.2814298504213786, 1.3996482711210818],
    ),
}


@pytest.mark.parametrize("method", GPFLOW)
def test_gpflow_has_the_same_numbers(computed, method):
    log_density, mean, variance, covariance = (value[0] for value in computed[0][method])
    expected = GPFLOW[method]
    for value, number in zip((log_density, mean, variance, covariance[np.triu_indices(3, 1)]), expected, strict=False):
        np.testing.assert_allclose(value, number, atol=1e-7)


def test_limits_of_pitc(computed):
    # One block knows all of the residual; blocks of one row know what FITC does.
    _, limits = computed
    np.testing.assert_allclose(limits["one block"], limits["exact"], atol=1e-9)
    for value, expected in zip(limits["singletons"], limits["fitc"], strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-10)


def test_what_the_methods_share_and_how_they_differ(computed):
    sor, dtc, fitc, _ = ([value[0] for value in computed[0][method]] for method in METHODS)
    np.testing.assert_array_equal(sor[0], dtc[0])
    np.testing.assert_array_equal(sor[1], dtc[1])
    # SoR's known fault: at (4, 3), far from all inducing points, it is sure of 0; the others are as unsure as the
    # prior.
    assert sor[2][2] < 1e-2 * VARIANCE
    assert dtc[2][2] > 0.99 * VARIANCE and fitc[2][2] > 0.99 * VARIANCE
    assert np.all(dtc[2] > sor[2])


def test_approximations_are_no_bounds():
    # Rows that the inducing point cannot tell apart from noise: FITC's density beats the evidence.
    x = np.linspace(-3.0, 3.0, 12)[:, None]
    y = np.random.default_rng(0).normal(size=12)
    with jax.enable_x64(True):
        fitc = float(compiled(lambda y: ApproximateGP(npgp.RBF(2.0), x, x[:1], noise_variance=0.05).log_prob(y))(y))
    exact = oracles.log_normal(y, oracles.stationary("RBF", x, x, 2.0) + 0.05 * np.eye(12))
    assert fitc > exact + 10.0


def test_draws_have_the_covariance_of_the_density():
    for method in ("fitc", "pitc"):
        draw = compiled(lambda key, method=method: approximation(method, np.float32, offset=3.0).sample(key, (20_000,)))
        draws = np.asarray(draw(jax.random.key(0)))
        assert draws.dtype == np.float32
        *_, C = dense(method, Y, NOISE)
        assert worst_z_of_moments(draws, 3.0 * np.ones(12), C) < 5.0


def test_draws_under_sor_are_functions(float64):
    @compiled
    def run(y):
        posterior = approximation("sor").condition(y)
        assert isinstance(posterior, DegeneratePosterior)
        return posterior.sample(jax.random.key(0), NEW.copy(), (5,)), posterior.sample(jax.random.key(0), NEW[1:], (5,))

    whole, part = run(Y.copy())
    np.testing.assert_allclose(whole[:, 1:], part, rtol=1e-12)


def test_float32_is_near_float64(computed):
    @compiled
    def run(y):
        return {m: everything(approximation(m, np.float32), y, NEW.astype(np.float32)) for m in ("sor", "pitc")}

    for method, values in run(Y.astype(np.float32)).items():
        for value, expected in zip(values, computed[0][method], strict=True):
            assert value.dtype == np.float32
            np.testing.assert_allclose(value, expected[0], atol=5e-3, err_msg=method)


def test_gradients_by_finite_differences(float64):
    # Of hyperparameters and inducing inputs; the density of SoR is that of DTC.
    @compiled
    def both(points):
        def density(theta):
            kernel, inducing = Matern32(jnp.exp(theta[:2]), variance=jnp.exp(theta[2])), theta[4:].reshape(4, 2)
            gp = functools.partial(ApproximateGP, kernel, X.copy(), inducing, noise_variance=jnp.exp(theta[3]))
            methods = gp(method="dtc"), gp(method="fitc"), gp(method="pitc", groups=BLOCKS)
            return sum(weight * gp.log_prob(Y.copy()) for weight, gp in enumerate(methods, 1))

        return jax.grad(density)(points[0]), jax.lax.map(density, points[1:])

    theta = np.concatenate([np.log([0.9, 1.3, 1.4, 0.15]), Z.ravel()])
    steps = 1e-5 * np.eye(len(theta))
    slope, values = both(np.concatenate([theta[None], theta + steps, theta - steps]))
    differences = (values[: len(theta)] - values[len(theta) :]) / 2e-5
    np.testing.assert_allclose(slope, differences, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- in a NumPyro program


def test_points_in_a_list_are_taken_together(computed):
    with jax.enable_x64(True):
        gp = ApproximateGP(
            Matern32(jnp.asarray(LENGTHSCALE), variance=VARIANCE), X, [Z[:1], Z[1:]], noise_variance=NOISE, jitter=1e-12
        )
        np.testing.assert_allclose(compiled(gp.log_prob)(Y.copy()), computed[0]["fitc"][0][0], rtol=1e-10)
        fit = compiled(gp.log_likelihood)(Y.copy())
    assert fit.shape == (12,) and np.all(np.isfinite(fit))


def test_the_potential_that_nuts_follows_and_its_slope_over_hyperparameters(float64):
    """Against dense algebra and its differences; the inputs are far enough apart for float64."""

    def model(y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        gp = ApproximateGP(Matern32(lengthscale), X.copy(), Z.copy(), noise_variance=noise, jitter=1e-12)
        numpyro.sample("y", gp, obs=y)

    def potential(logs):
        return numpyro.infer.util.potential_energy(model, (jnp.asarray(Y.copy()),), {}, logs)

    def dense_potential(lengthscale, noise):
        def kernel(a, b):
            return oracles.stationary("Matern32", a, b, np.exp(lengthscale))

        Q = kernel(X, Z) @ np.linalg.solve(kernel(Z, Z), kernel(Z, X))
        C = Q + np.diag(np.diag(kernel(X, X) - Q)) + np.exp(noise) * np.eye(12)
        prior = stats.norm.logpdf(lengthscale) + stats.norm.logpdf(noise, -2.0)
        return -prior - oracles.log_normal(Y, C)

    h, run = 1e-5, compiled(jax.value_and_grad(potential))
    for at in ((-0.5, -2.0), (0.4, -1.0)):
        value, slope = run(dict(zip(("lengthscale", "noise"), map(jnp.asarray, at), strict=True)))
        np.testing.assert_allclose(value, dense_potential(*at), rtol=1e-8)
        moved = [[dense_potential(*(np.array(at) + s * h * e)) for s in (1, -1)] for e in np.eye(2)]
        expected = [(up - down) / (2 * h) for up, down in moved]
        np.testing.assert_allclose([slope["lengthscale"], slope["noise"]], expected, rtol=1e-5, atol=1e-6)


def test_blocks_by_kmeans():
    gp = approximation("pitc", np.float32, groups=None)
    assert gp.groups.count > 1 and gp.groups.size <= 4


def test_what_cannot_be_a_model_is_refused():
    def refused(words, *arguments, **settings):
        with pytest.raises(ValueError, match=words):
            ApproximateGP(Matern32(), *arguments, **settings)

    x, z = X.astype(np.float32), Z.astype(np.float32)
    refused(
        "method is 'vfe'; it must be one of 'sor', 'dtc', 'fitc', 'pitc', 'vif', 'pep', 'structured-pep'",
        x,
        z,
        noise_variance=0.1,
        method="vfe",
    )
    refused("noise_variance is .* must be positive", x, z, noise_variance=0.0)
    refused(r"offset has shape \(3,\); it must be a scalar or \(12,\)", x, z, noise_variance=0.1, offset=np.ones(3))
    refused("groups is given, but method is 'fitc'", x, z, noise_variance=0.1, groups=BLOCKS)
    refused("groups is 4; it must be npgp Groups", x, z, noise_variance=0.1, method="pitc", groups=4)
    refused("partition of 8 rows, but X has 12", x, z, noise_variance=0.1, method="pitc", groups=single(8))
    gp = ApproximateGP(Matern32(), x, z, noise_variance=0.1)
    with pytest.raises(ValueError, match="^y has NaN"):
        gp.condition(np.full(12, np.nan))
    with pytest.raises(ValueError, match=r"y has shape \(8,\); it must be \(\.\.\., 12\)"):
        gp.condition(np.ones(8))
    with pytest.raises(ValueError, match="X is traced"):
        jax.jit(lambda x: ApproximateGP(Matern32(), x, z, noise_variance=0.1, method="pitc").log_prob(x[:, 0]))(x)
