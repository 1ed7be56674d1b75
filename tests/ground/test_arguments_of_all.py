"""Arguments that many parts of the library share, each with the one check that all use."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import npgp
from npgp import checks, linalg, neighbors
from npgp.likelihoods import Factorized

X = np.linspace(0.0, 3.0, 6)[:, None].astype(np.float32)
Y = np.sin(X[:, 0])
KERNEL = npgp.RBF()


@pytest.mark.parametrize("jitter", [-1.0, np.nan, np.inf, "1e-6"], ids=str)
def test_jitter_is_a_number_from_0_on(jitter):
    for use in (
        lambda: linalg.cholesky(jnp.eye(2), jitter),
        lambda: npgp.CollapsedGP(KERNEL, X, X[:2], noise_variance=0.1, jitter=jitter).log_prob(Y),
        lambda: neighbors.NNGP(KERNEL, X, 2, jitter=jitter).log_prob(Y),
    ):
        with pytest.raises((TypeError, ValueError), match="jitter is .*; it must be"):
            use()


@pytest.mark.parametrize("density", ["CollapsedGP", "NNGP", "ResponseNNGP"])
def test_no_density_of_nan(density):
    def made(offset=0.0):
        if density == "CollapsedGP":
            return npgp.CollapsedGP(KERNEL, X, X[:2], noise_variance=0.1, offset=offset)
        if density == "NNGP":
            return neighbors.NNGP(KERNEL, X, 2, offset=offset)
        return neighbors.ResponseNNGP(KERNEL, X, 2, noise_variance=0.1, offset=offset)

    with pytest.raises(ValueError, match=r"(value|y) has NaN or infinite entries"):
        made().log_prob(np.where(Y > 0.5, np.nan, Y))
    with pytest.raises(ValueError, match="offset has NaN or infinite entries"):
        made(offset=np.nan)
    # Values that cannot be seen pass.
    assert np.isnan(jax.jit(lambda y: made().log_prob(y))(np.full(6, np.nan)))


@pytest.mark.parametrize(
    ("rows", "error", "match"),
    [
        (np.full((2, 2), 99), ValueError, "neighbors has row 99; there are 6 rows"),
        (np.full((2, 2), -1), ValueError, "neighbors has row -1"),
        (np.full((2, 2), 0.5), TypeError, "neighbors has dtype float64; it must have whole numbers"),
        (np.zeros(2, int), ValueError, "neighbors has shape .*; it must have 2 dimensions"),
    ],
    ids=["above", "below", "halves", "a vector"],
)
def test_neighbors_are_rows(rows, error, match):
    kriging = neighbors.NNGP(KERNEL, X, 2).condition(Y)
    with pytest.raises(error, match=match):
        kriging.mean(X[:2], neighbors=rows)


@pytest.mark.parametrize(
    ("key", "right"), [(None, False), (0, False), (jax.random.key(0), True), (jax.random.PRNGKey(0), True)], ids=str
)
def test_random_keys(key, right):
    if right:
        assert checks.random_key(key) is key
    else:
        with pytest.raises(TypeError, match=rf"rng_key is {key}; it must be a random key"):
            checks.random_key(key)


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (lambda: dist.Normal(0.0, 1.0), r"function with the arguments \(\); it must take one latent value, f"),
        (lambda f, g: dist.Normal(f, jnp.exp(g)), r"function with the arguments \(f, g\); it must take one latent"),
    ],
    ids=["none", "two"],
)
def test_functions_as_likelihoods_take_a_latent_value_each(fn, match):
    with pytest.raises(TypeError, match=match):
        Factorized(fn)
    Factorized(lambda f, scale=1.0: dist.Normal(f, scale))


def test_functions_as_likelihoods_keep_rows_apart():
    with pytest.raises(ValueError, match=r"Factorized fn makes distributions of shape \(2,\) of f with shape \(2, 6\)"):
        Factorized(lambda f: dist.Normal(jnp.sum(f, -1), 1.0)).check(Y)
    Factorized(lambda f: dist.Normal(f, jnp.linspace(0.1, 1.0, 6))).check(Y)
    Factorized(lambda f: dist.Normal(0.0 * f, 1.0)).check(Y)


def test_what_else_is_checked():
    with pytest.raises(ValueError, match=r"the values have shape \(2, 2\), and the Standardizer 3 columns"):
        npgp.Standardizer.of(np.eye(3))(np.ones((2, 2)))
    posterior = npgp.CollapsedGP(KERNEL, X, X[:2], noise_variance=0.1).condition(Y)
    with pytest.raises(ValueError, match="y has .*; for Poisson it must be a count"):
        npgp.local_correction(posterior, X, -np.ones(6), npgp.Poisson(), npgp.sparse.median_split(X, 3))
    start = npgp.gplvm.pca_start(jax.random.key(0), np.random.default_rng(0).normal(size=(8, 3)), 1, 3)
    with pytest.raises(TypeError, match=r"kernel is RBF.*; it must be a function that makes one"):
        npgp.BayesianGPLVM(start, kernel=KERNEL)
