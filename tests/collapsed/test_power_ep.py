"""Power EP: its definition by quadrature, dense algebra, and the bounds and models between which it lies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import compiled

import npgp
from npgp.collapsed.approximations import ApproximateGP
from npgp.kernels import Matern32
from npgp.sparse.groups import consecutive, single

ROW = np.arange(12.0)[:, None]
X = np.hstack([2 * np.sin(0.9 * ROW + 0.3), 1.5 * np.cos(1.7 * ROW)])
Y = np.stack([np.sin(1.5 * X[:, 0]) + 0.5 * X[:, 1], np.cos(3.0 * X[:, 0])])
Z = np.array([[-1.5, 0.4], [0.1, -1.0], [1.2, 0.9], [0.3, 0.5]])
NEW = np.array([[0.2, 0.1], [1.5, -1.2], [4.0, 3.0]])
NOISE, OFFSET = 0.1 + 0.05 * np.cos(ROW[:, 0]) ** 2, 0.3
KERNEL = functools.partial(oracles.stationary, "Matern32", lengthscale=np.array([0.9, 1.3]), variance=1.4)
BLOCKS, SMALL, POWER = consecutive(12, 5), 1e-6, 0.4  # the last block is shorter
GROUPS = {"rows": None, "blocks": BLOCKS, "one": single(12)}
METHODS = ("pep", "structured-pep")


def kernel(dtype=np.float64):
    return Matern32(jnp.asarray([0.9, 1.3], dtype), variance=dtype(1.4))


def approximation(method, groups, power=None, dtype=np.float64):
    settings = dict(offset=dtype(OFFSET), jitter=1e-12 if dtype is np.float64 else None)
    arrays = X.astype(dtype), jnp.asarray(Z, dtype)
    return ApproximateGP(
        kernel(dtype),
        *arrays,
        noise_variance=NOISE.astype(dtype),
        method=method,
        power=power,
        groups=groups,
        **settings,
    )


@pytest.fixture(scope="module")
def computed():
    """Density, and mean and covariance of predictions, by method, groups and power; and what they are to be near."""
    with jax.enable_x64(True):

        @compiled
        def run(powers, y, new):
            def everything(gp):
                posterior = gp.condition(y)
                return gp.log_prob(y), posterior.mean(new), posterior.covariance(new)

            def by_power(method, groups):
                return jax.lax.map(lambda power: everything(approximation(method, groups, power)), powers)

            def bound(conditional):
                gp = npgp.CollapsedGP(
                    kernel(),
                    X.copy(),
                    Z.copy(),
                    noise_variance=NOISE.copy(),
                    offset=OFFSET,
                    conditional=conditional,
                    jitter=1e-12,
                )
                return everything(gp)

            found = {(method, name): by_power(method, groups) for method in METHODS for name, groups in GROUPS.items()}
            models = {"rows": everything(approximation("fitc", None))}
            models["blocks"] = everything(approximation("pitc", BLOCKS))
            bounds = {("structured-pep", "rows"): bound("tight"), ("structured-pep", "one"): bound("full")}
            bounds |= {
                ("structured-pep", "blocks"): bound(npgp.conditionals.Grouped(BLOCKS)),
                ("pep", "rows"): bound("prior"),
            }
            exact = npgp.collapsed.exact_log_evidence(kernel(), X.copy(), y - OFFSET, noise_variance=NOISE.copy())
            return found, models, bounds, exact

        return jax.tree.map(np.asarray, run(np.array([SMALL, POWER, 1.0]), Y.copy(), NEW.copy()))


def parts():
    """A, D and the projections of NEW, by dense algebra."""
    everywhere = np.concatenate([X, NEW])
    A = np.linalg.solve(np.linalg.cholesky(KERNEL(Z, Z)), KERNEL(Z, everywhere))
    return A[:, :12], A[:, 12:], KERNEL(X, X) - A[:, :12].T @ A[:, :12]


def test_density_and_predictions_by_dense_algebra(computed):
    A, B, D = parts()
    block, S = np.arange(12), np.diag(NOISE)
    for (method, name), results in computed[0].items():
        g = {"rows": block, "blocks": block // 5, "one": 0 * block}[name]
        D_g = D * (g[:, None] == g)
        if method == "pep":
            noise = S + POWER * D_g
            cost = (1 - POWER) / (2 * POWER) * np.linalg.slogdet(np.eye(12) + POWER * D_g / NOISE)[1]
        else:  # precisions in between those of S and of S + D
            noise = np.linalg.inv((1 - POWER) * np.linalg.inv(S) + POWER * np.linalg.inv(S + D_g))
            cost = 0.5 * np.linalg.slogdet(np.eye(12) + (1 - POWER) * D_g / NOISE)[1]
        C = A.T @ A + noise
        gain = np.linalg.solve(C, A.T @ B).T
        density, mean, covariance = (value[1] for value in results)
        for i, y in enumerate(Y - OFFSET):
            np.testing.assert_allclose(density[i], oracles.log_normal(y, C) - cost, atol=1e-9)
            np.testing.assert_allclose(mean[i], gain @ y, atol=1e-9)
        np.testing.assert_allclose(covariance[0], KERNEL(NEW, NEW) - gain @ (A.T @ B), atol=1e-9)


def test_at_power_one_it_is_fitc_and_pitc_and_the_exact_gp(computed):
    found, models, _, exact = computed
    for (method, name), results in found.items():
        if name == "one":
            np.testing.assert_allclose(results[0][2], exact, atol=1e-9, err_msg=method)
        else:
            for value, expected in zip(results, models[name], strict=True):
                np.testing.assert_allclose(value[2], expected, atol=1e-11, err_msg=method)


def test_at_small_powers_it_is_a_bound_and_its_posterior(computed):
    found, _, bounds, _ = computed
    # Without structure the blocks no longer matter.
    bounds = bounds | {("pep", "blocks"): bounds["pep", "rows"], ("pep", "one"): bounds["pep", "rows"]}
    for key, expected in bounds.items():
        for value, number in zip(found[key], expected, strict=True):
            np.testing.assert_allclose(value[0], number, rtol=1e-4, atol=1e-4, err_msg=str(key))


def test_blocks_of_one_row_are_rows_and_float32_is_near(computed):
    @compiled
    def run(y):
        singletons = consecutive(12, 1)
        return {
            (method, name): approximation(method, groups, np.float32(POWER), np.float32).log_prob(y)
            for method in METHODS
            for name, groups in (("rows", singletons), ("blocks", BLOCKS))
        }

    for key, value in run(Y.astype(np.float32)).items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, computed[0][key][0][1], rtol=1e-4, err_msg=str(key))


@given(seed=st.integers(0, 2**32 - 1), low=st.floats(0.02, 1.0), high=st.floats(0.02, 1.0))
def test_the_density_grows_with_the_power(between, seed, low, high):
    values = between(seed, min(low, high), max(low, high))
    assert np.all(np.diff(values, axis=-1) >= -1e-8 * np.abs(values).max())


@pytest.fixture(scope="module")
def between():
    """Bound, two powers and model of power EP in random problems: (methods and groups, 4)."""
    with jax.enable_x64(True):

        @compiled
        def run(x, z, y, scales, powers):
            k, blocks = npgp.RBF(scales[:2], variance=scales[2]), consecutive(8, 3)

            def values(method, groups, conditional, model):
                gp = functools.partial(ApproximateGP, k, x, z, noise_variance=scales[3])
                inside = jax.lax.map(lambda power: gp(method=method, power=power, groups=groups).log_prob(y), powers)
                bound = npgp.CollapsedGP(k, x, z, noise_variance=scales[3], conditional=conditional).log_prob(y)
                return jnp.stack([bound, *inside, gp(method=model, groups=groups).log_prob(y)])

            return jnp.stack(
                [
                    values("pep", None, "prior", "fitc"),
                    values("pep", blocks, "prior", "pitc"),
                    values("structured-pep", None, "tight", "fitc"),
                    values("structured-pep", blocks, npgp.conditionals.Grouped(blocks), "pitc"),
                ]
            )

    def problem(seed, *powers):
        rng = np.random.default_rng(seed)
        with jax.enable_x64(True):
            scales = np.exp(rng.normal(size=4))
            return np.asarray(
                run(rng.normal(size=(8, 2)), rng.normal(size=(3, 2)), rng.normal(size=8), scales, np.array(powers))
            )

    return problem


@pytest.mark.parametrize("method", METHODS)
def test_it_is_what_sites_of_power_ep_amount_to(float64, method):
    """
    ``log E_ε Π_g h_g(ε)^(1/α)``, with ``h_g = E_q(r) [(p(y_g | ε, r) p(r) / q(r))^α]``, by quadrature over one inducing
    value and the residuals of two groups of two rows. q(r) is p(r), or has what is left of its covariance given data.
    """
    x, z, y, noise, power = np.array([0.0, 0.7, 1.5, 2.1]), np.array([[0.4]]), np.array([0.8, -0.2, 1.1, 0.5]), 0.6, 0.6
    x = x[:, None]
    k = functools.partial(oracles.stationary, "RBF", lengthscale=1.1, variance=1.2)
    A = k(z, x)[0] / np.sqrt(k(z, z)[0, 0])
    D = k(x, x) - np.outer(A, A)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    pairs, pair_weights = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2), np.outer(weights, weights).ravel()
    log_t = np.zeros(60)
    for rows in (slice(0, 2), slice(2, 4)):
        P = D[rows, rows]
        C = P if method == "pep" else np.linalg.inv(np.linalg.inv(P) + np.eye(2) / noise)
        r = pairs @ np.linalg.cholesky(C).T
        log_ratio = np.array([oracles.log_normal(v, P) - oracles.log_normal(v, C) for v in r])
        left = y[rows] - nodes[:, None, None] * A[rows] - r
        log_p = np.sum(-0.5 * left**2 / noise - 0.5 * np.log(2 * np.pi * noise), axis=-1)
        log_t += np.log(np.exp(power * (log_p + log_ratio)) @ pair_weights) / power
    expected = np.log(np.exp(log_t) @ weights)
    gp = ApproximateGP(
        npgp.RBF(1.1, variance=1.2),
        x,
        z,
        noise_variance=noise,
        method=method,
        power=power,
        groups=consecutive(4, 2),
        jitter=1e-12,
    )
    np.testing.assert_allclose(compiled(gp.log_prob)(y), expected, atol=1e-8)


def test_draws_are_of_the_model():
    @compiled
    def run(key):
        gps = (approximation("pep", BLOCKS, 0.3, np.float32), approximation("pitc", BLOCKS, None, np.float32))
        return [gp.sample(key, (3,)) for gp in gps]

    np.testing.assert_allclose(*run(jax.random.key(0)), rtol=1e-5)


def test_powers_that_are_none_are_refused():
    def refused(words, **settings):
        with pytest.raises(ValueError, match=words):
            ApproximateGP(Matern32(), X.astype(np.float32), Z.astype(np.float32), noise_variance=0.1, **settings)

    for power in (None, 0.0, -0.5, 1.5, np.nan):
        refused(f"power is {power}; for method 'pep' it must be above 0 and at most 1", method="pep", power=power)
    refused(r"power has shape \(2,\); it must be a scalar", method="structured-pep", power=np.ones(2))
    refused("power is given, but method is 'fitc'; only 'pep' and 'structured-pep' have one", power=1.0)
    refused("partition of 8 rows, but X has 12", method="pep", power=0.5, groups=single(8))
