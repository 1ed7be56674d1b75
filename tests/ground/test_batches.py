"""Batches of matrices: loops of LAPACK's single calls give what those give, and no program has one of its batches."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from numpyro import plate, sample
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import npgp
from npgp import linalg
from npgp.gplvm import RowNormal

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 2)).astype(np.float32), RNG.normal(size=12).astype(np.float32)
OUTPUTS = RNG.normal(size=(3, 12)).astype(np.float32)


# ---------------------------------------------------------------- no program has batched calls


def lapack_calls(function, *arrays) -> list[int]:
    """The number of batch dimensions of each call of LAPACK in the program that XLA is given."""
    text = jax.jit(function).lower(*arrays).as_text()
    results = re.findall(r"custom_call @lapack_\w+\(.*-> \(?tensor<([\dx]+)xf", text)
    assert len(results) == text.count("custom_call @lapack_")
    return [shape.count("x") - 1 for shape in results]


def test_batched_calls_are_seen():
    K = np.eye(5, dtype=np.float32)
    for function in (jnp.linalg.cholesky, lambda K: jax.scipy.linalg.solve_triangular(K, K, lower=True)):
        assert lapack_calls(function, K) == [0]
        assert lapack_calls(jax.vmap(function), K[None]) == [1]


def summed(X, y=None, conditional="tight"):
    f = 0.0
    for name in "ab":
        f = f + npgp.SparseGP(name, npgp.RBF(sample(f"{name}.scale", dist.LogNormal())), X[:4]).draw()(X)
    with npgp.plate("data", len(X)):
        npgp.observe("y", f, npgp.Gaussian(variance=0.1), obs=y, conditional=conditional)


def several(X, Y=None):
    with plate("outputs", len(OUTPUTS), dim=-2):
        f = npgp.SparseGP("f", npgp.RBF(1.0), X[:4]).draw()
    with plate("outputs", len(OUTPUTS), dim=-2), npgp.plate("data", len(X)):
        npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=Y)


def through_neighbors(X, y=None):
    f = npgp.VNNGP("f", npgp.RBF(sample("scale", dist.LogNormal())), X_SITES, npgp.neighbors.nearest_before(X_SITES, 3))
    f = f.draw()
    with npgp.plate("data", len(X)):
        npgp.observe("y", f(X, np.tile(np.arange(3), (len(X), 1))), npgp.Gaussian(variance=0.1), obs=y)


X_SITES = X[:6].copy()


def step(model, optimizer=None, elbo=None):
    """A step of SVI from its start, one program."""
    guide = npgp.AutoSparseGP(model, AutoNormal)
    svi = SVI(model, guide, optimizer or optax.sgd(0.1), elbo or TraceMeanField_ELBO())
    return lambda *arrays: svi.update(svi.init(jax.random.key(0), *arrays), *arrays)


def posterior_draws(X, y):
    guide = npgp.AutoSparseGP(summed, AutoNormal)
    svi = SVI(summed, guide, optax.sgd(0.1), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y))
    drawn = guide.sample_posterior(jax.random.key(1), params, X, y, sample_shape=(5,))
    params = guide.with_rows(params, X, y)
    predict = Predictive(npgp.joint(summed), guide=guide, params=params, num_samples=5, parallel=True)
    return drawn, predict(jax.random.key(2), X)


def over_lengthscales(density):
    return lambda X, y: jax.vmap(jax.value_and_grad(lambda lengthscale: density(npgp.RBF(lengthscale), X, y)))(Y[:3])


def nearest(kernel, X, y):
    return npgp.neighbors.NNGP(kernel, X, npgp.neighbors.nearest_before(X_SITES, 3)).log_prob(y[:6])


def rows_normal(X, y):
    L = jnp.tile(jnp.eye(2), (12, 1, 1)) * y[:, None, None]
    return RowNormal(X, scale_tril=L).log_prob(jnp.stack([X, 2 * X]))


PROGRAMS = {
    "grouped": (
        step(functools.partial(summed, conditional=npgp.conditionals.Grouped(npgp.sparse.median_split(X, 4)))),
        Y,
    ),
    "several outputs": (step(several, elbo=Trace_ELBO()), OUTPUTS),
    "natural gradient": (step(several, npgp.natural_gradient(0.1, optax.sgd(0.1))), OUTPUTS),
    "VNNGP": (step(through_neighbors), Y),
    "NNGP": (over_lengthscales(lambda kernel, X, y: nearest(kernel, X[:6], y)), Y),
    "collapsed": (
        over_lengthscales(lambda kernel, X, y: npgp.CollapsedGP(kernel, X, X[:4], noise_variance=0.1).log_prob(y)),
        Y,
    ),
    "exact": (
        over_lengthscales(lambda kernel, X, y: npgp.collapsed.exact_log_evidence(kernel, X, y, noise_variance=0.1)),
        Y,
    ),
    "posterior draws": (posterior_draws, Y),
    "normal rows": (rows_normal, Y),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_no_batched_call_of_lapack(name):
    program, y = PROGRAMS[name]
    found = lapack_calls(program, X, y)
    assert found and not any(found)


# ---------------------------------------------------------------- values


def psd(seed, shape, dtype, smallest=0.3):
    """Random symmetric matrices (..., M, M) with eigenvalues from 1 down to the smallest."""
    rng, size = np.random.default_rng(seed), shape[-1]
    Q = np.linalg.qr(rng.normal(size=shape))[0]
    K = (Q * np.geomspace(1.0, smallest, size)) @ np.swapaxes(Q, -1, -2)
    return np.asarray(0.5 * (K + np.swapaxes(K, -1, -2)), dtype)


@settings(max_examples=4)
@given(
    size=st.integers(1, 70),
    batch=st.sampled_from([(), (1,), (5,), (2, 3)]),
    columns=st.integers(1, 80),
    ill=st.booleans(),
)
def test_factors_and_solves_are_as_exact_as_their_precision(x64, size, batch, columns, ill):
    eps = float(np.finfo(x64).eps)
    K = psd(size, (*batch, size, size), x64, 100 * eps if ill else 0.3)
    B = np.random.default_rng(columns).normal(size=(*batch, size, columns)).astype(x64)

    @jax.jit
    def algebra(K, B):
        L, used = linalg.cholesky(K, jitter=10 * eps)
        return L, used, linalg.solve_lower(L, B), linalg.solve_lower(L, B, transpose=True)

    L, used, forward, backward = (np.asarray(a, np.longdouble) for a in algebra(K, B))
    LT = np.swapaxes(L, -1, -2)
    shifted = K + used * np.trace(K, axis1=-2, axis2=-1)[..., None, None] / size * np.eye(size)
    np.testing.assert_allclose(L @ LT, shifted.astype(np.longdouble), atol=2 * (size + 2) * eps)
    # Substitution leaves |L X − B| ≤ n ε |L| |X|; where many columns are solved by blocks' inverses, 32 times as much.
    for A, solved in ((L, forward), (LT, backward)):
        allowed = 2 * (size + 2) * eps * (np.abs(A) @ np.abs(solved) + np.abs(B))
        assert np.all(np.abs(A @ solved - B) <= 32 * allowed)


def test_under_any_order_of_vmap_and_derivatives_it_is_what_single_matrices_give(float64):
    Ks, Bs = psd(0, (2, 3, 5, 5), float64), np.random.default_rng(1).normal(size=(2, 3, 5, 2))

    def loss(K, B):
        return jnp.sum(jnp.sin(linalg.solve_lower(linalg.cholesky(K)[0], B)))

    gradient = jax.grad(loss, (0, 1))

    def curvature(K, B):
        return jax.jvp(jax.checkpoint(gradient), (K, B), (K, B))[1]

    def twice(function, axes=(0, 0)):
        return jax.vmap(jax.vmap(function, axes), axes)

    @jax.jit
    def everything(K, B):
        return {
            "vmap(grad)": twice(gradient)(K, B),
            "grad(vmap)": jax.grad(lambda *arrays: jnp.sum(twice(loss)(*arrays)), (0, 1))(K, B),
            "map(vmap(grad))": lax.map(lambda each: jax.vmap(gradient)(*each), (K, B)),
            "jacfwd": twice(jax.jacfwd(loss))(K, B),
            "curvature": jax.vmap(curvature)(K[0], B[0]),
            "K alone": twice(gradient, (0, None))(K, B[0, 0]),
            "B alone": twice(gradient, (None, 0))(K[0, 0], B),
        }

    found = everything(Ks, Bs)
    single = jax.jit(lambda K, B: (gradient(K, B), curvature(K, B)))

    def one_after_another(Ks, Bs):
        each = [single(Ks[i, j], Bs[i, j]) for i in range(2) for j in range(3)]
        return jax.tree.map(lambda *a: np.reshape(np.stack(a), (2, 3, *a[0].shape)), *each)

    def agree(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11 * np.max(np.abs(b)))

    expected = one_after_another(Ks, Bs)
    jax.tree.map(agree, found["curvature"], jax.tree.map(lambda each: each[0], expected[1]))
    for name in ("vmap(grad)", "grad(vmap)", "map(vmap(grad))"):
        jax.tree.map(agree, found[name], expected[0])
    agree(found["jacfwd"], expected[0][0])
    # What is mapped in the right side alone becomes more columns, and in the matrix alone repeats the right side.
    jax.tree.map(agree, found["K alone"], one_after_another(Ks, np.broadcast_to(Bs[0, 0], Bs.shape))[0])
    jax.tree.map(agree, found["B alone"], one_after_another(np.broadcast_to(Ks[0, 0], Ks.shape), Bs)[0])


def test_a_matrix_without_a_factor_spoils_no_other(x64):
    K = psd(0, (3, 4, 4), x64)
    K[1, 2, 2] = -1.0
    L = np.asarray(jax.jit(linalg.plain_cholesky)(K))
    assert np.all(np.isnan(L[1][np.tril_indices(4)]))
    for i in (0, 2):
        np.testing.assert_array_equal(L[i], jax.jit(linalg.plain_cholesky)(K[i]))
    (each, jitter), ok = jax.jit(jax.vmap(linalg.cholesky))(K), linalg.default_jitter(x64)
    assert not np.any(np.isfinite(np.diagonal(each[1])[2:]))
    np.testing.assert_allclose(jitter, [ok, linalg.MAX_JITTER, ok], rtol=1e-5)


NORMALS = RowNormal, dist.MultivariateNormal


def test_normal_rows_have_the_density_of_a_multivariate_normal(x64):
    rng = np.random.default_rng(0)
    L, value = np.linalg.cholesky(psd(0, (5, 3, 3), x64)), rng.normal(size=(2, 5, 3)).astype(x64)
    found, expected = jax.jit(
        lambda *given: tuple(kind(given[0], scale_tril=given[1]).log_prob(given[2]) for kind in NORMALS)
    )(value[0], L, value)
    np.testing.assert_allclose(found, expected, rtol={jnp.float32: 1e-5, jnp.float64: 1e-12}[x64])


def test_columns_under_vmap_are_those_of_each(float64):
    """Of one triangular matrix, in one solve with the columns of all."""
    rng = np.random.default_rng(0)
    L, B = np.tril(rng.normal(size=(2, 3, 3))) + 2.0 * np.eye(3), rng.normal(size=(4, 2, 3, 5))
    solved = jax.jit(jax.vmap(linalg.solve_lower, (None, 0)))(L, B)
    np.testing.assert_allclose(solved, np.linalg.solve(L, B), rtol=1e-9)
