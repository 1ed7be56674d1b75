"""q(ε): its blocks as distributions, what they say about f, and their optimum for Gaussian noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.distributions import biject_to
from numpyro.distributions.kl import kl_divergence
from scipy import stats

from npgp import likelihoods
from npgp.collapsed import collapsed_bound
from npgp.conditionals import as_conditional
from npgp.conditionals.base import row_elbo
from npgp.kernels import Matern32
from npgp.sparse.projection import Projection
from npgp.sparse.residuals import RowResidual
from npgp.variational import (
    DenseNormal,
    DiagonalNormal,
    MeanOnlyNormal,
    WhitenedPrior,
    gaussian_optimum,
    learned_blocks,
    square_tril,
    whitened_mean,
    whitened_variance,
)

M = 4
KINDS = ("dense", "diagonal", "mean-only")


def parameters(kind, seed=0, batch=(), size=M):
    """Mean and whatever holds the covariance, in float64."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    loc = rng.normal(size=(*batch, size))
    if kind == "dense":
        L = np.tril(rng.normal(size=(*batch, size, size)), -1) * 0.4
        return loc, L + rng.uniform(0.3, 1.5, size=(*batch, size))[..., None] * np.eye(size)
    return (loc, rng.uniform(0.3, 1.5, size=(*batch, size))) if kind == "diagonal" else (loc,)


def make(kind, *values):
    return {"dense": DenseNormal, "diagonal": DiagonalNormal, "mean-only": MeanOnlyNormal}[kind](*values)


def covariance_of(kind, *values):
    loc, *scale = values
    if kind == "dense":
        return scale[0] @ np.swapaxes(scale[0], -1, -2)
    return (scale[0][..., None] ** 2 if kind == "diagonal" else np.ones((*loc.shape, 1))) * np.eye(loc.shape[-1])


def cast(dtype, values):
    return tuple(value.astype(dtype) for value in values)


def compute(f, *arguments):
    """Compiled as one program, as every compilation costs more than all the arithmetic here."""
    return jax.tree.map(np.asarray, jax.jit(f)(*arguments))


# ---------------------------------------------------------------- one block


@pytest.mark.parametrize("kind", KINDS)
def test_block_is_the_multivariate_normal_with_its_moments(x64, kind):
    batch = (3, 1)
    values = parameters(kind, batch=batch)
    ours = make(kind, *cast(x64, values))
    assert ours.batch_shape == batch and ours.event_shape == (M,)
    assert ours.learned == (kind != "mean-only")
    covariance = covariance_of(kind, *values)
    x = np.random.default_rng(1).normal(size=(5, 3, 1, M))

    def evaluate(q, x):
        return q.log_prob(x), q.kl(), q.log_det(), q.trace(), kl_divergence(q, WhitenedPrior(M))

    log_prob, *rest = compute(evaluate, ours, x.astype(x64))
    assert log_prob.shape == (5, *batch) and log_prob.dtype == x64
    rtol = {jnp.float32: 1e-4, jnp.float64: 1e-10}[x64]
    for i in range(3):
        theirs = stats.multivariate_normal(values[0][i, 0], covariance[i, 0])
        np.testing.assert_allclose(log_prob[:, i, 0], theirs.logpdf(x[:, i, 0]), rtol=rtol)
        kl = oracles.kl_normal(values[0][i, 0], covariance[i, 0])
        expected = (kl, np.linalg.slogdet(covariance[i, 0])[1], np.trace(covariance[i, 0]), kl)
        for value, wanted in zip(rest, expected, strict=True):
            assert value.shape == batch
            np.testing.assert_allclose(value[i, 0], wanted, rtol=rtol, atol=1e-6 if kind == "mean-only" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_is_numpyros_and_dispatch_finds_it(float64, kind):
    # An unmatched pair falls back to Monte Carlo without a word, so that the dispatch itself is what is tested.
    values, batch = parameters(kind), parameters(kind, batch=(5,))
    p = WhitenedPrior(M)

    def divergences(values, batch):
        q, several = make(kind, *values), make(kind, *batch)
        # In a plate, NumPyro expands both; the sum over the plate is its business.
        in_plates = (q.expand((5,)), p.expand((5,))), (q, p.expand((5,))), (q.expand((5,)), p)
        numpyros = dist.MultivariateNormal(values[0], scale_tril=factor)
        standard = dist.MultivariateNormal(jnp.zeros(M), scale_tril=jnp.eye(M))
        return (
            (kl_divergence(q, p), kl_divergence(numpyros, standard)),
            [kl_divergence(ours, theirs) for ours, theirs in in_plates],
            (several.kl(), kl_divergence(several, p.expand((5,)))),
            kl_divergence(several.to_event(1), p.expand((5,)).to_event(1)),
        )

    factor = np.linalg.cholesky(covariance_of(kind, *values))
    (one, numpyros), in_plates, (several, dispatched), total = compute(divergences, values, batch)
    np.testing.assert_allclose(one, numpyros, rtol=1e-12, atol=1e-12)
    for kl in in_plates:
        np.testing.assert_allclose(kl, np.full(5, one), rtol=1e-12)
    assert np.ptp(several) > 0.1
    np.testing.assert_allclose(dispatched, several, rtol=1e-12)
    np.testing.assert_allclose(total, np.sum(several), rtol=1e-12)
    with pytest.raises(NotImplementedError):
        kl_divergence(p, make(kind, *values))


def test_prior_is_the_standard_normal(x64):
    p = WhitenedPrior(M)
    assert p.event_shape == (M,) and p.batch_shape == ()
    x = np.random.default_rng(0).normal(size=(3, M)).astype(x64)

    def evaluate(x, key):
        return p.log_prob(x), MeanOnlyNormal(jnp.zeros(M)).log_prob(x), p.sample(key, (20_000,))

    ours, special_case, draws = compute(evaluate, x, jax.random.key(0))
    np.testing.assert_allclose(ours, stats.norm.logpdf(x).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(special_case, ours, rtol=1e-6)
    assert draws.dtype == x64
    assert_moments(draws, np.zeros(M), np.eye(M))


def assert_moments(draws, mean, covariance, z=5.0):
    """Every sample mean and covariance within z standard errors; about 1e-5 of seeds would fail."""
    n = len(draws)
    variance = np.diag(covariance)
    draws = np.asarray(draws, float)
    assert np.all(np.abs(draws.mean(0) - mean) <= z * np.sqrt(variance / n) + 1e-9)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / n)
    assert np.all(np.abs(np.cov(draws.T, bias=True) - covariance) <= z * error + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_moments_and_follow_the_parameters(x64, kind):
    values = parameters(kind, batch=(2,))
    q = make(kind, *cast(x64, values))
    assert q.has_rsample
    sample = jax.jit(lambda q: q.sample(jax.random.key(0), (20_000,)))
    draws = np.asarray(sample(q))
    assert draws.shape == (20_000, 2, M) and draws.dtype == x64
    for i, covariance in enumerate(covariance_of(kind, *values)):
        assert_moments(draws[:, i], values[0][i], covariance)
    # Reparametrized: the mean moves every draw alike.
    moved = sample(make(kind, values[0].astype(x64) + 1, *cast(x64, values[1:])))
    np.testing.assert_allclose(moved, draws + 1, atol=1e-5)
    np.testing.assert_array_equal(q.mean, q.loc)


@pytest.mark.parametrize("kind", KINDS)
def test_factor_and_squeezing(float64, kind):
    values = parameters(kind, batch=(2, 1))
    A = np.random.default_rng(0).normal(size=(M, 5))
    q = make(kind, *values)
    half, kl, squeezed, squeezed_kl = compute(
        lambda q: (q.factor_times(A), q.kl(), q.without_last_batch_dim(), q.without_last_batch_dim().kl()), q
    )
    assert half.shape == (2, 1, M, 5)
    np.testing.assert_allclose(np.swapaxes(half, -1, -2) @ half, A.T @ covariance_of(kind, *values) @ A, rtol=1e-9)
    assert type(squeezed) is type(q) and squeezed.batch_shape == (2,)
    np.testing.assert_allclose(squeezed_kl, kl[:, 0], rtol=1e-12)


def test_means_and_scales_broadcast(float64):
    means = np.random.default_rng(0).normal(size=(3, M))
    evaluate = jax.jit(lambda q, x: (q.kl(), q.log_prob(x)))
    for kind in ("dense", "diagonal"):
        _, scale = parameters(kind)
        shared, repeated = make(kind, means, scale), make(kind, means, np.stack([scale] * 3))
        assert shared.batch_shape == (3,)
        for ours, theirs in zip(evaluate(shared, means[::-1]), evaluate(repeated, means[::-1]), strict=True):
            assert ours.shape == (3,)
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


# ---------------------------------------------------------------- the triangle as a square array


@jax.jit
def round_trip(x):
    transform = biject_to(square_tril)
    L = transform(x)
    return L, square_tril(L), transform.inv(L), transform(transform.inv(L))


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-2, 1.0, 30.0]))
def test_square_triangle_round_trip(x64, seed, scale):
    x = (scale * np.random.default_rng(seed).normal(size=(2, 3, 3))).astype(x64)
    L, valid, inverse, again = map(np.asarray, round_trip(x))
    assert L.dtype == x64 and np.all(valid)
    np.testing.assert_array_equal(np.triu(L, 1), 0)
    np.testing.assert_array_equal(np.tril(L, -1), np.tril(x, -1))
    np.testing.assert_allclose(again, L, rtol=1e-5 if x64 == jnp.float32 else 1e-12)
    if scale <= 1:  # beyond, softplus saturates: the scale comes back, its unconstrained value need not
        np.testing.assert_allclose(inverse, np.tril(x), atol=3e-5 if x64 == jnp.float32 else 1e-12)


def test_square_triangle_constraint_and_jacobian(float64):
    transform = biject_to(square_tril)
    good = np.tril(np.ones((3, 3)))
    bad = np.stack([good.T, good - np.eye(3), -good, np.where(np.eye(3), np.nan, good)])
    x = np.random.default_rng(0).normal(size=(2, 3, 3))
    rows = np.tril_indices(3)

    def lower_to_lower(lower):
        return transform(jnp.zeros((3, 3)).at[rows].set(lower))[rows]

    def evaluate(x):
        start = square_tril.feasible_like(x)
        valid = square_tril(good), square_tril(bad), square_tril(start)
        lower = x[:, *rows]
        return (
            valid,
            transform.log_abs_det_jacobian(x, transform(x)),
            jax.vmap(jax.jacobian(lower_to_lower))(lower),
            start,
        )

    valid, log_det, jacobian, start = compute(evaluate, x)
    assert valid[0] and not np.any(valid[1]) and np.all(valid[2])
    assert start.shape == x.shape and log_det.shape == (2,)
    np.testing.assert_allclose(log_det, np.linalg.slogdet(jacobian)[1], rtol=1e-10)
    assert transform.forward_shape((2, 3, 3)) == transform.inverse_shape((2, 3, 3)) == (2, 3, 3)


# ---------------------------------------------------------------- a kernel, inducing blocks and inputs

SIZES = (4, 3, 2)


def kernel_and_formula():
    return Matern32(1.3, variance=1.7), functools.partial(oracles.stationary, "Matern32", lengthscale=1.3, variance=1.7)


def problem(blocks, rows=8):
    """Inducing inputs and inputs, all well apart, and their joint covariance."""
    rng = np.random.default_rng(7)
    sizes = (*SIZES[:blocks], rows)
    grid = np.stack(np.meshgrid(np.arange(5.0), np.arange(5.0)), -1).reshape(-1, 2)
    points = rng.permutation(grid)[: sum(sizes)] + rng.uniform(-0.3, 0.3, size=(sum(sizes), 2))
    *inducing, X = np.split(points, np.cumsum(sizes)[:-1])
    return inducing, X, oracles.Joint.of(kernel_and_formula()[1], inducing, X)


def projection_of(joint):
    return Projection(tuple(joint.A), np.diag(joint.K_ff))


# ---------------------------------------------------------------- the optimum for Gaussian noise


def elbo(q, projection, y, noise, conditional, parameter=None):
    """The uncollapsed bound of docs/theory.md, section 3, all rows at once."""
    rows = row_elbo(
        as_conditional(conditional),
        likelihoods.Gaussian(variance=noise),
        y,
        whitened_mean(projection, [block.loc for block in q]),
        whitened_variance(projection, q),
        projection.residual_variance(learned_blocks(q)),
        parameter,
    )
    return jnp.sum(rows, -1) - sum(block.kl() for block in q)


CONDITIONALS = ("prior", "tight", "shared", "published")


@functools.partial(jax.jit, static_argnames="kinds")
def at_the_optimum(projection, y, noise, kinds):
    """q, and for each conditional the uncollapsed bound there and near, its gradient and the collapsed bound."""
    q = gaussian_optimum(projection, y, noise, kinds)
    ratio = projection.residual_variance(learned_blocks(q)) / noise
    # The best parameters: for one noise, tight's site precision is one number.
    best = {"shared": 1 / (1 + jnp.mean(ratio)), "published": 1 / jnp.mean(noise)}
    made = {}
    for conditional in CONDITIONALS:
        value = functools.partial(elbo, projection=projection, y=y, noise=noise, conditional=conditional)
        parameter = best.get(conditional, jnp.ones(()))

        def with_sum(q, parameter, value=value):
            values = value(q, parameter=parameter)
            return jnp.sum(values), values

        slopes, values = jax.grad(with_sum, argnums=(0, 1), has_aux=True)(q, parameter)
        near = value(jax.tree.map(lambda leaf: 1.05 * leaf, q), parameter=parameter)
        residual = RowResidual(projection.residual_variance([kind != "mean-only" for kind in kinds]))
        collapsed = collapsed_bound(projection, residual, y, noise, kinds, as_conditional(conditional))
        made[conditional] = values, near, slopes, collapsed
    return q, made


@pytest.mark.parametrize("kinds", [("dense",), ("dense", "mean-only"), ("dense", "dense")], ids="+".join)
def test_collapsed_bound_is_the_elbo_where_its_gradient_vanishes(float64, kinds):
    _, X, joint = problem(len(kinds))
    rng = np.random.default_rng(3)
    y = rng.normal(size=(2, len(X)))  # two outputs
    learned = [kind == "dense" for kind in kinds]
    for noise in (np.full(len(X), 0.3), rng.uniform(0.05, 0.6, size=len(X))):
        q, made = at_the_optimum(projection_of(joint), y, noise, kinds)
        assert [block.learned for block in q] == learned
        if np.ptp(noise) > 0:  # one learned precision cannot be best for every row
            made.pop("published")
        for conditional, (value, near, slopes, collapsed) in made.items():
            assert value.shape == (2,)
            np.testing.assert_allclose(value, collapsed, rtol=1e-8, err_msg=conditional)
            for output in range(2):
                expected = joint.bound(y[output], noise, learned, conditional.replace("published", "tight"))
                np.testing.assert_allclose(value[output], expected, rtol=1e-8, err_msg=conditional)
            for leaf in jax.tree.leaves(slopes):
                slope = np.tril(leaf) if leaf.ndim > 1 and leaf.shape[-1] == leaf.shape[-2] else leaf
                np.testing.assert_allclose(slope, 0.0, atol=1e-8, err_msg=conditional)
            assert np.all(np.asarray(near) < np.asarray(value))  # a maximum, not a saddle
