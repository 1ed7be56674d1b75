"""The block projection against one dense Cholesky factor of everything."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import oracles
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp.features import Points, as_block, covariance
from npgp.kernels import RBF, Matern32
from npgp.sparse.projection import factorize, factorize_members

TOLERANCE = {jnp.float32: 2e-4, jnp.float64: 1e-6}
#: Eight features and eight inputs throughout, as every other shape is compiled anew.
SIZES = {1: (8,), 2: (4, 4), 3: (3, 3, 2)}
#: Small enough to be ignored in float64 at these inputs, which are well apart.
JITTER = {jnp.float32: 1e-6, jnp.float64: 1e-12}


def kernel_and_formula(lengthscale=1.0, variance=1.7):
    formula = functools.partial(oracles.stationary, "Matern32", lengthscale=lengthscale, variance=variance)
    return Matern32(lengthscale, variance=variance), formula


def spread_out(seed, *sizes, dtype=np.float64):
    """Inputs in the plane, one array for each size, no two of which nearly coincide."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(np.arange(6.0), np.arange(6.0)), -1).reshape(-1, 2)
    points = rng.permutation(grid)[: sum(sizes)] + rng.uniform(-0.2, 0.2, size=(sum(sizes), 2))
    return [part.astype(dtype) for part in np.split(points, np.cumsum(sizes)[:-1])]


@jax.jit
def project(kernel, inducing, X, jitter):
    """Everything a projector says about X."""
    projector = factorize(kernel, [Points(Z) for Z in inducing], jitter)
    projection = projector(X)
    kept = tuple(i == 0 for i in range(len(inducing)))
    return {
        "A": projection.A,
        "d": projection.residual_variance(),
        "d first": projection.residual_variance(kept),
        "D": projector.residual_covariance(X, projection.A),
        "D first": projector.residual_covariance(X, projection.A, kept),
        "cholesky": projector.cholesky,
        "cross": projector.cross,
        "jitter": projector.jitter,
        "prior": projection.prior_variance,
    }


def projected(dtype, blocks):
    *inducing, X = spread_out(0, *SIZES[blocks], 8, dtype=dtype)
    kernel, formula = kernel_and_formula()
    made = project(kernel, inducing, X, dtype(JITTER[dtype]))
    joint = oracles.Joint.of(formula, [Z.astype(float) for Z in inducing], X.astype(float))
    return jax.tree.map(np.asarray, made), joint


@pytest.mark.parametrize("blocks", SIZES)
def test_blocks_are_those_of_the_joint_cholesky_factor(x64, blocks):
    made, joint = projected(x64, blocks)
    close = functools.partial(np.testing.assert_allclose, atol=TOLERANCE[x64])
    for i, (A, expected, rows) in enumerate(zip(made["A"], joint.A, joint.slices, strict=True)):
        assert A.dtype == x64
        close(A, expected)
        close(made["cholesky"][i], joint.factor[rows, rows])
        assert len(made["cross"][i]) == i
        for A_u, columns in zip(made["cross"][i], joint.slices, strict=False):
            close(A_u, joint.factor[rows, columns].T)
    close(made["prior"], np.diag(joint.K_ff))
    close(made["D"], joint.residual())
    close(made["d"], np.diag(joint.residual()))
    only_first = [True] + [False] * (blocks - 1)
    close(made["D first"], joint.residual(only_first))
    close(made["d first"], np.diag(joint.residual(only_first)))
    assert len(made["jitter"]) == blocks
    np.testing.assert_array_equal(made["jitter"], np.full(blocks, JITTER[x64], x64))


def test_prior_is_reproduced_where_the_inducing_points_are(x64):
    *inducing, _ = spread_out(0, *SIZES[2], 8, dtype=x64)
    kernel, formula = kernel_and_formula()
    Z = np.concatenate(inducing)
    made = jax.tree.map(np.asarray, project(kernel, inducing, Z, x64(JITTER[x64])))
    explained = sum(A.T @ A for A in made["A"])
    np.testing.assert_allclose(explained, formula(Z, Z), atol=TOLERANCE[x64])
    np.testing.assert_allclose(made["d"], 0.0, atol=TOLERANCE[x64])
    # The second block's whitened values say nothing about the first block's inputs.
    np.testing.assert_allclose(made["A"][1][:, :4], 0.0, atol=np.sqrt(JITTER[x64]))
    # One block at all inputs leaves nothing either.
    alone = project(kernel, [Z], Z, x64(JITTER[x64]))
    np.testing.assert_allclose(alone["d"], 0.0, atol=TOLERANCE[x64])
    np.testing.assert_allclose(alone["D"], 0.0, atol=TOLERANCE[x64])


def test_splitting_a_block_explains_as_much(float64):
    Z, O, X = spread_out(1, 4, 4, 8)
    kernel, _ = kernel_and_formula()
    arrangements = ([Z, O], [np.concatenate([Z, O])], [O, Z])
    split, fused, swapped = (
        jax.tree.map(np.asarray, project(kernel, inducing, X, JITTER[float64])) for inducing in arrangements
    )
    for other in (fused, swapped):
        np.testing.assert_allclose(split["D"], other["D"], atol=1e-9)
    assert np.max(np.abs(split["d first"] - swapped["d first"])) > 0.01  # what is first does matter


def test_a_repeated_block_adds_nothing(x64):
    Z, X = spread_out(2, 4, 8, dtype=x64)
    kernel, _ = kernel_and_formula()
    jitter = {jnp.float32: 1e-5, jnp.float64: 1e-8}[x64]
    twice = jax.tree.map(np.asarray, project(kernel, [Z, Z], X, x64(jitter)))
    # Jitter j is as if the features were seen with noise: a repeated one is left about 2j of its variance.
    np.testing.assert_allclose(twice["d"], twice["d first"], atol=20 * 1.7 * jitter)
    np.testing.assert_allclose(twice["A"][1], 0.0, atol=20 * np.sqrt(jitter))
    np.testing.assert_array_equal(twice["jitter"], x64(jitter))


def test_residual_variance_is_nonnegative_and_falls_with_each_block(x64):
    @jax.jit
    @jax.vmap
    def run(Z, O, X, lengthscale):
        kernel = RBF(lengthscale, variance=2.0)
        projector = factorize(kernel, [Points(Z), Points(O)])
        projection = projector(X)
        kept = [projection.residual_variance([i < n for i in range(2)]) for n in range(3)]
        D = projector.residual_covariance(X, projection.A)
        return jnp.stack(kept), projection.residual_variance(), D, kernel(X)

    # Lengthscales from far below to far above the inputs' spread, so that Gram matrices are singular too.
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(200, rows, 2)).astype(x64) for rows in (6, 5, 8)]
    lengthscales = np.exp(2 * rng.normal(size=200)).astype(x64)
    kept, all_blocks, D, K = map(np.asarray, run(*inputs, lengthscales))
    np.testing.assert_array_equal(kept[:, 2], all_blocks)
    np.testing.assert_allclose(kept[:, 0], 2.0)
    assert np.all(np.isfinite(kept)) and np.all(kept >= 0)
    assert np.all(np.diff(kept, axis=1) <= 0)  # exactly: a sum of squares is taken away
    assert np.mean(kept[:, 2] < 1e-3) > 0.1 and np.mean(kept[:, 2] > 0.1) > 0.1  # both ends are met
    rounding = {jnp.float32: 1e-3, jnp.float64: 1e-7}[x64]
    for residual in (D, K - D):
        assert np.min(np.linalg.eigvalsh(residual.astype(float))) > -rounding


def test_jitter_is_reported_block_by_block(float64):
    # What a repeated block leaves is rounding error, of either sign: asked for next to none, it needs some.
    kernel, _ = kernel_and_formula()
    needed = []
    for seed in range(4):
        Z, X = spread_out(seed, 4, 8)
        first, second = np.asarray(project(kernel, [Z, Z], X, 1e-17)["jitter"])
        assert first == 1e-17
        needed.append(second)
    assert 1e-17 < max(needed) < 1e-6
    (default,) = jax.jit(lambda X: factorize(RBF(), [Points(X)]).jitter)(X)
    assert default == 1e-8


def test_gradients_flow_through_every_block(float64):
    # By finite differences of a scalar that depends on A and d, in Z, O and the lengthscale at once.
    Z, O, X = spread_out(4, 4, 3, 5)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def loss(Z, O, lengthscale):
        projection = factorize(Matern32(lengthscale), [Points(Z), Points(O)])(X)
        parts = jnp.sin(projection.A[0]), projection.A[1] ** 2, projection.residual_variance()
        return sum(jnp.sum(part) for part in parts)

    at = (Z, O, np.array(1.2))
    rng = np.random.default_rng(0)
    for i, slope in enumerate(loss(*at)[1]):
        direction = rng.normal(size=at[i].shape)
        ends = [float(loss(*at[:i], at[i] + h * direction, *at[i + 1 :])[0]) for h in (1e-6, -1e-6)]
        np.testing.assert_allclose(np.sum(np.asarray(slope) * direction), (ends[0] - ends[1]) / 2e-6, rtol=1e-5)


# ---------------------------------------------------------------- blocks


def test_arrays_become_blocks_and_blocks_stay():
    Z = np.ones((3, 2), np.float32)
    block = as_block(Z, "Z")
    assert isinstance(block, Points) and block.size == 3
    assert as_block(block) is block
    with pytest.raises(ValueError, match=r"^inducing\[1\] has shape \(3,\)"):
        as_block(Z[:, 0], "inducing[1]")
    with pytest.raises(TypeError, match="^Z has dtype int"):
        as_block(Z.astype(int), "Z")
    with pytest.raises(ValueError, match="^Z has shape"):
        jax.jit(lambda Z: as_block(Z, "Z").size)(Z[:, 0])


class Average:
    """Of f at some inputs: a feature that is not a point."""

    def __init__(self, inputs):
        self.inputs = inputs

    size = 1

    def gram(self, kernel):
        return jnp.mean(kernel(self.inputs))[None, None]

    def cross(self, kernel, X):
        return jnp.mean(kernel(self.inputs, X), axis=0, keepdims=True)


def test_features_of_other_kinds_mix_with_points_in_any_order(float64):
    Z, inputs, X = spread_out(5, 4, 3, 6)
    kernel, formula = kernel_and_formula()
    everything, weights = np.concatenate([Z, inputs]), np.zeros((5, 7))
    weights[:4, :4], weights[4, 4:] = np.eye(4), 1 / 3
    K_uu, K_uf = weights @ formula(everything, everything) @ weights.T, weights @ formula(everything, X)
    average, points = Average(jnp.asarray(inputs)), Points(Z)
    for blocks, order in (([points, average], [0, 1, 2, 3, 4]), ([average, points], [4, 0, 1, 2, 3])):
        joint = oracles.Joint(tuple(b.size for b in blocks), K_uu[np.ix_(order, order)], K_uf[order], formula(X, X))
        A_blocks = jax.jit(lambda X, blocks=blocks: factorize(kernel, blocks, 1e-12)(X).A)(X)
        for A, expected in zip(A_blocks, joint.A, strict=True):
            np.testing.assert_allclose(A, expected, atol=1e-9)
    with pytest.raises(NotImplementedError, match="Average and Average"):
        covariance(kernel, average, average)


def test_projectors_are_pytrees_that_may_be_mapped(float64):
    Z, X = spread_out(6, 3, 4)
    lengthscales = np.array([0.5, 1.0, 2.0])

    @jax.jit
    @jax.vmap
    def factorized(lengthscale):
        return factorize(Matern32(lengthscale), [Points(Z)])

    batch = factorized(lengthscales)  # rebuilt with a leading axis on every leaf
    assert batch.blocks[0].inputs.shape == (3, 3, 2)
    mapped = jax.jit(jax.vmap(lambda projector: projector(X).A[0]))(batch)
    for A, lengthscale in zip(mapped, lengthscales, strict=True):
        formula = functools.partial(oracles.stationary, "Matern32", lengthscale=lengthscale)
        np.testing.assert_allclose(A, oracles.Joint.of(formula, [Z], X).A[0], atol=1e-6)


# ---------------------------------------------------------------- a training step


def factorizations(blocks, guide=None, optim=None):
    """How many Cholesky factorizations there are in the program of a step of SVI, gradients included."""

    def model(X, y):
        kernel = Matern32(numpyro.param("lengthscale", 1.0))
        Z = numpyro.param("Z", jnp.arange(4.0)[:, None])
        f = npgp.SparseGP("f", kernel, list(jnp.split(Z, blocks))).draw()
        with numpyro.plate("data", 3):
            npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y)

    svi = SVI(model, guide or npgp.AutoSparseGP(model), optim or npgp.adam(0.1), TraceMeanField_ELBO())
    data = jnp.ones((3, 1)), jnp.ones(3)
    state = jax.eval_shape(svi.init, jax.random.key(0), *data)
    # The function is in the text once for all of its calls, or in each call.
    return len(re.findall(r"jit\[\s*name=_jittered_cholesky", str(jax.make_jaxpr(svi.update)(state, *data))))


def test_a_training_step_factorizes_each_block_once():
    def guide_with_a_factor_of_its_own(X, y):
        f = npgp.SparseGP("f", Matern32(numpyro.param("own", 1.0)), jnp.arange(4.0)[:, None]).guide()
        f.moments(X)

    assert [factorizations(1), factorizations(2)] == [1, 2]
    # The loss after a step of q(ε) takes the factors of the loss before it.
    assert factorizations(2, optim=npgp.natural_gradient(0.5, npgp.adam(0.1))) == 2
    assert factorizations(1, guide_with_a_factor_of_its_own) == 2


def test_no_residual_is_negative():
    # One row, and the inducing point at it: v − (v/√v)² is rounding, of either sign.
    X = jnp.zeros((1, 1), jnp.float32)

    @jax.jit
    @jax.vmap
    def figures(variance):
        projection = factorize(RBF(variance=variance), (Points(X),), 0.0)(X)
        return projection.residual_variance()[0], variance - jnp.square(projection.A[0][0, 0])

    clipped, rounded = figures(jnp.linspace(1.0, 2.0, 64))
    assert np.min(rounded) < 0 <= np.min(clipped)


def test_sums_of_unlike_kernels_in_float32_are_as_in_float64():
    X, Z, O = (spread_out(2, 8, 5, 3)[i] for i in range(3))
    groups = npgp.sparse.median_split(X, 4)

    def found(theta, dtype):
        shape = (2, 1)
        large, small = (
            jnp.broadcast_to(t, shape).astype(dtype) * (1 + jnp.arange(math.prod(shape)).reshape(shape)) for t in theta
        )
        kernel = RBF(jnp.asarray(3.0, dtype), variance=large) + Matern32(jnp.asarray(1.0, dtype), variance=small)
        blocks = [Points(jnp.asarray(x, dtype)) for x in (Z, O)]
        projector = factorize_members(kernel, blocks, shape)
        rows = jnp.asarray(X, dtype)
        projection = projector(rows)
        wholes = [projection.residual_variance(), projection.residual_variance([True, False])]
        wholes += [projector.residual_covariance(rows, projection.A)]
        wholes += [
            projector.residual_covariance(
                rows[:3], [A[..., :3] for A in projection.A], None, (rows[3:], [A[..., 3:] for A in projection.A])
            )
        ]
        wholes += [projector.group_covariance(rows, projection.A, groups), *projection.A, *projector.cholesky]
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in wholes), wholes

    results = {}
    for dtype in (jnp.float32, jnp.float64):
        with jax.enable_x64(dtype == jnp.float64):
            theta = jnp.asarray([1e4, 0.5], dtype)
            run = jax.jit(jax.grad(found, has_aux=True), static_argnums=1)
            results[dtype] = jax.tree.map(np.asarray, run(theta, dtype))
    narrow, wide = results[jnp.float32], results[jnp.float64]
    for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
