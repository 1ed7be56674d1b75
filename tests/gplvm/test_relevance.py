"""Relevance of latent dimensions, and coordinates that do not depend on scale, sign, order and rotation."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npgp
from npgp.gplvm.relevance import (
    CanonicalLatents,
    canonical_latents,
    effective_dimensions,
    predictive_variance,
    relevance,
    sensitivity,
)

ROWS, Q = 40, 4
_rng = np.random.default_rng(4)
LOC = _rng.gamma(1.5, size=(ROWS, Q)) * [1.0, 0.2, 2.0, 0.05] + [0.3, 0.0, -1.0, 2.0]
SCALE = _rng.uniform(0.05, 1.0, (ROWS, Q))
LENGTHSCALE = np.array([0.5, 1.0, 4.0, 8.0])


# ---------------------------------------------------------------- relevance


def test_relevance_is_spread_in_lengthscales():
    expected = LOC.std(0) / LENGTHSCALE
    found = relevance(LOC, LENGTHSCALE)
    np.testing.assert_allclose(found, expected / expected.max(), rtol=1e-12)
    np.testing.assert_array_equal(relevance({"x.loc": LOC, "lengthscale": LENGTHSCALE, "variance": 1.0}), found)
    scaled = relevance(LOC * [1.0, 10.0, 0.1, 3.0], LENGTHSCALE * [1.0, 10.0, 0.1, 3.0])
    np.testing.assert_allclose(scaled, found, rtol=1e-12)
    np.testing.assert_allclose(relevance(LOC.astype(np.float32), np.float32(2.0)), relevance(LOC, 1.0), rtol=1e-6)


def test_dimensions_are_off_in_either_way():
    """By a long lengthscale, or by latents that are back at the prior, whatever the lengthscale is then."""
    loc, lengthscale = LOC.copy(), np.ones(Q)
    loc[:, 1] = 0.0
    loc[:, 3] = 0.1  # as a mean of rounded values it is not exactly its own mean
    lengthscale[2] = 1e3
    found = relevance(loc, lengthscale)
    assert found[0] == 1.0 and found[1] == found[3] == 0.0 and 0 < found[2] < 0.01
    assert effective_dimensions(found) == 1
    nothing = relevance(np.full((3, 2), 0.1), 1.0)
    np.testing.assert_array_equal(nothing, 0.0)
    assert effective_dimensions(nothing) == 0


def test_effective_dimensions_are_those_above_a_share_of_the_largest():
    assert effective_dimensions([1.0, 0.1, 0.09, 0.5]) == 3
    assert effective_dimensions([50.0, 5.0, 4.5, 25.0]) == 3
    assert effective_dimensions([1.0, 0.1, 0.09, 0.5], threshold=0.5) == 2
    assert effective_dimensions([1.0, 1.0], threshold=1.0) == 2
    for values, words in [([[1.0]], r"shape \(1, 1\)"), ([], r"shape \(0,\)"), ([1.0, -0.1], "not negative")]:
        with pytest.raises(ValueError, match=words):
            effective_dimensions(values)
    with pytest.raises(ValueError, match="threshold is 0"):
        effective_dimensions([1.0], threshold=0)


def functions(kernel, inducing, seed=0, outputs=3):
    """A posterior of several functions."""
    rng = np.random.default_rng(seed)
    size = len(inducing)
    loc = jnp.asarray(rng.normal(size=(outputs, size)))
    factor = np.tril(0.3 * rng.normal(size=(outputs, size, size)), -1) + 0.5 * np.eye(size)
    gp = npgp.SparseGP("f", kernel, jnp.asarray(inducing.copy()), jitter=1e-10)
    return gp.posterior({"f.u.loc": loc[:, None], "f.u.scale_tril": jnp.asarray(factor)[:, None]})


def test_sensitivity_is_the_change_of_the_mean(float64):
    posterior = functions(npgp.RBF(jnp.asarray(LENGTHSCALE)), _rng.normal(size=(7, Q)))
    step = 1e-4 * jnp.eye(Q)[:, None]

    @models.compiled
    def both(posterior, X):
        mean = jax.vmap(posterior.mean)
        return mean(X + step), mean(X - step)

    above, below = both(posterior, jnp.asarray(LOC))
    slopes = (np.asarray(above) - below).reshape(Q, -1) / 2e-4
    expected = np.sqrt(np.mean(slopes**2, axis=-1)) * LOC.std(0)
    np.testing.assert_allclose(sensitivity(posterior, LOC), expected, rtol=1e-5)


def test_sensitivity_of_linear_functions_is_that_of_their_weights(float64):
    """A linear kernel has no lengthscale; f = x w has slope w everywhere, and a dimension without weight is off."""
    inducing = np.eye(Q)[:3]  # the last dimension is out of reach
    posterior = functions(npgp.kernels.Linear(variance=jnp.asarray(1.0)), inducing, outputs=5)
    weights = np.asarray(posterior.mean(jnp.eye(Q)))  # (outputs, Q)
    found = sensitivity(posterior, LOC)
    np.testing.assert_allclose(found, np.sqrt(np.mean(weights**2, 0)) * LOC.std(0), rtol=1e-6, atol=1e-9)
    assert effective_dimensions(found) == np.sum(found >= 0.1 * found.max()) and found[3] < 1e-9


# ---------------------------------------------------------------- conventions


def same(a: CanonicalLatents, b: CanonicalLatents, rtol=1e-9):
    for name in ("loc", "scale", "relevance"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=rtol, atol=rtol, err_msg=name)


def test_conventions():
    found = canonical_latents(LOC, SCALE, LENGTHSCALE)
    np.testing.assert_array_equal(found.order, np.argsort(-relevance(LOC, LENGTHSCALE)))
    np.testing.assert_allclose(found.relevance, np.sort(relevance(LOC, LENGTHSCALE))[::-1], rtol=1e-12)
    own = LOC[:, found.order] * found.signs / LENGTHSCALE[found.order]
    np.testing.assert_allclose(found.loc, own, rtol=1e-12)
    np.testing.assert_allclose(found.scale, SCALE[:, found.order] / LENGTHSCALE[found.order], rtol=1e-12)
    deviations = found.loc - found.loc.mean(0)
    assert np.all(deviations.max(0) > -deviations.min(0))
    np.testing.assert_allclose(found.loc.std(0) / found.loc.std(0)[0], found.relevance, rtol=1e-12)
    np.testing.assert_allclose(found.apply(LOC), found.loc, rtol=1e-12)
    np.testing.assert_allclose(found.invert(found.loc), LOC, rtol=1e-12)
    assert found.names == tuple(f"latent dimension {i + 1}" for i in found.order)
    params = {"x.loc": LOC, "x.scale": SCALE, "lengthscale": LENGTHSCALE}
    same(canonical_latents(params), found, 0)
    assert canonical_latents(LOC, None, LENGTHSCALE).scale is None


@given(st.permutations(range(Q)), st.lists(st.booleans(), min_size=Q, max_size=Q), st.integers(-3, 3))
def test_order_signs_and_scale_of_the_input_do_not_matter(order, flips, power):
    order, signs = np.array(order), np.where(flips, -1.0, 1.0)
    factors = signs * 3.0 ** (power * np.arange(Q))
    given = LOC * factors, SCALE * abs(factors)
    found = canonical_latents(*(value[:, order] for value in given), (LENGTHSCALE * abs(factors))[order])
    base = canonical_latents(LOC, SCALE, LENGTHSCALE)
    same(found, base, 1e-12)
    np.testing.assert_array_equal(order[found.order], base.order)
    np.testing.assert_array_equal(found.signs, base.signs * signs[base.order])


@given(st.integers(0, 10**6))
def test_rotation_among_equal_lengthscales_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    lengthscale = np.array([2.0, 0.5, 2.0, 2.0])
    dims = [0, 2, 3]
    rotation = np.eye(Q)
    rotation[np.ix_(dims, dims)] = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    covariance = np.einsum("nq,qr->nqr", SCALE**2, np.eye(Q))
    base = canonical_latents(LOC, np.linalg.cholesky(covariance), lengthscale)
    rotated = np.linalg.cholesky(rotation.T @ covariance @ rotation)
    found = canonical_latents(LOC @ rotation, rotated, lengthscale)
    same(found, base, 1e-8)
    assert sorted(found.order) == [-1, -1, -1, 1]
    # Axes of the rotated dimensions are uncorrelated, and distances are those in lengthscales.
    axes = found.loc[:, found.order == -1]
    np.testing.assert_allclose(np.cov(axes.T), np.diag(np.var(axes, 0, ddof=1)), atol=1e-9)
    np.testing.assert_allclose(
        np.linalg.norm(found.loc[:, None] - found.loc, axis=-1),
        np.linalg.norm((LOC[:, None] - LOC) / lengthscale, axis=-1),
        atol=1e-9,
    )


def test_rotation_can_be_asked_for_or_not():
    assert np.all(canonical_latents(LOC, SCALE, 1.0).order == -1)
    assert canonical_latents(LOC, SCALE, 1.0).names[1] == "principal axis 2"
    unrotated = canonical_latents(LOC, SCALE, 1.0, rotate=False)
    assert sorted(unrotated.order) == [0, 1, 2, 3]
    asked = canonical_latents(LOC, SCALE, LENGTHSCALE, rotate=True)
    assert np.all(asked.order == -1)
    singular = np.linalg.svd((LOC - LOC.mean(0)) / LENGTHSCALE, compute_uv=False)
    np.testing.assert_allclose(asked.loc.std(0), singular / np.sqrt(ROWS), rtol=1e-9)
    # Diagonal covariances keep their traces.
    np.testing.assert_allclose(np.sum(asked.scale**2, -1), np.sum((SCALE / LENGTHSCALE) ** 2, -1), rtol=1e-9)


def test_a_plane_has_the_other_dimensions_at_their_mean():
    found = canonical_latents(LOC, SCALE, LENGTHSCALE)
    points = np.array([[0.0, 1.0], [2.0, -1.0]])
    lifted = found.apply(found.lift(points, (2, 0)))
    np.testing.assert_allclose(lifted[:, [2, 0]], points, atol=1e-12)
    np.testing.assert_allclose(lifted[:, [1, 3]], np.tile(found.loc.mean(0)[[1, 3]], (2, 1)), atol=1e-12)
    with pytest.raises(ValueError, match=r"points has shape \(2, 4\)"):
        found.lift(lifted)


def test_predictive_variance_on_the_plane(float64):
    posterior = functions(npgp.RBF(jnp.asarray(LENGTHSCALE), variance=1.7), _rng.normal(size=(7, Q)))
    found = canonical_latents(LOC, SCALE, LENGTHSCALE)
    points = _rng.normal(size=(11, 2))
    values = predictive_variance(posterior, found, (0, 2), batch_size=4)(points)
    expected = np.mean(posterior.variance(jnp.asarray(found.lift(points, (0, 2)))), 0)
    np.testing.assert_allclose(values, expected, rtol=1e-9)
    far = predictive_variance(posterior, found)(np.array([[50.0, 50.0]]))
    np.testing.assert_allclose(far, 1.7, rtol=1e-6)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((LOC[0], None, 1.0), r"loc has shape \(4,\)"),
        ((LOC, None, [1.0, 2.0]), r"lengthscale has shape \(2,\); it must be \(4,\)"),
        ((LOC, None, [1.0, 2.0, 0.0, 1.0]), "lengthscale must be positive"),
        ((LOC, SCALE[:, :2], 1.0), r"scale has shape \(40, 2\)"),
        ((np.where(LOC > 3, np.nan, LOC), None, 1.0), "loc has values that are not finite"),
        (({"x.loc": LOC},), "no 'lengthscale'"),
        (({"lengthscale": 1.0},), "no 'x.loc'"),
    ],
)
def test_what_cannot_be_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        canonical_latents(*arguments)


def test_relevance_wants_lengthscales():
    with pytest.raises(ValueError, match="lengthscale is missing"):
        relevance(LOC)
