"""Parts of the studies against formulas, dense algebra and other ways to compute the same."""

import math
from argparse import Namespace
from functools import partial

import jax
import jax.numpy as jnp
import loading
import numpy as np
import pytest
from scipy import stats
from scipy.stats import multivariate_normal
from sklearn.decomposition import PCA

import npgp

loading.path("study")  # puts the scripts on the path
from studies import (  # noqa: E402
    calibration,
    classification,
    fits,
    latents,
    minibatches,
    mnist,
    orthogonal,
    spherical,
    trust,
)


def conjugate_ranks(rng, replications=320, draws=63, shift=0.0, scale=1.0) -> np.ndarray:
    """μ ~ N(0, 1), y ~ N(μ, 1): ranks of μ among draws from N(y/2, 1/2), with data and width that may be wrong."""
    mu = rng.normal(size=replications)
    y = mu + rng.normal(size=replications) + shift
    drawn = y / 2 + scale * np.sqrt(0.5) * rng.normal(size=(draws, replications))
    return np.sum(drawn < mu, axis=0)


def test_the_right_posterior_passes_and_wrong_ones_fail():
    judge = calibration.judge
    rng = np.random.default_rng(0)
    right = judge(conjugate_ranks(rng), 63)
    assert right["p_band"] > 0.05 and right["p_chi2"] > 0.05
    assert right["mean_rank"] == pytest.approx(0.5, abs=0.05)
    assert right["spread"] == pytest.approx(1.0, abs=0.2)
    shifted = judge(conjugate_ranks(rng, shift=0.5), 63)  # posterior of other data
    assert shifted["p_band"] < 0.002 and shifted["mean_rank"] < 0.45
    narrow = judge(conjugate_ranks(rng, scale=0.7), 63)  # as mean-field guides are
    assert narrow["p_band"] < 0.002 and narrow["spread"] > 1.2
    wide = judge(conjugate_ranks(rng, scale=1.5), 63)
    assert wide["p_band"] < 0.002 and wide["spread"] < 0.8


def test_the_band_has_its_level():
    """p-values of uniform ranks are uniform, as far as their discreteness allows."""
    rng = np.random.default_rng(1)
    p = [calibration.band_p_value(rng.integers(0, 16, size=100), 15, simulations=500) for _ in range(300)]
    assert stats.kstest(p, "uniform").pvalue > 0.01


def test_ranks_out_of_range_are_an_error():
    with pytest.raises(ValueError, match="0 to 7"):
        calibration.band_p_value(np.array([0, 8]), 7)


def test_classification_scores():
    p = np.array([0.9, 0.2, 0.6])
    scores = classification.scores(np.log([1 - p, p]), np.array([1.0, 0.0, 0.0]))
    assert scores["error"] == pytest.approx(1 / 3)
    assert scores["log_likelihood"] == pytest.approx(np.log([0.9, 0.8, 0.4]).mean())
    log_p = classification.log_probabilities(np.array([0.3]), np.array([2.0]))
    np.testing.assert_allclose(log_p[:, 0], stats.norm.logcdf([-0.3 / 3**0.5, 0.3 / 3**0.5]))


def test_bounds_of_digits_at_the_same_parameters(float64):
    """The tight conditional's bound is above the prior's."""
    rng = np.random.default_rng(2)
    X, y = rng.normal(size=(12, 2)), rng.integers(10, size=12)
    params = {"lengthscale": jnp.asarray(0.7), "variance": jnp.asarray(2.0), "inducing0": X[:3]}
    params |= {
        "f.u.loc": rng.normal(size=(10, 1, 3)),
        "f.u.scale_tril": 0.5 * np.broadcast_to(np.eye(3), (10, 1, 3, 3)),
    }
    args = Namespace(steps=2, batch_size=12, learning_rate=0.1, natural=0.0)

    def elbo(name):
        model = mnist.make_model(fits.METHODS[name], 3, 2)
        return fits.Program(model, len(y), args, mnist.CHUNK).elbo(params, X, y)

    assert elbo("T-SVGP") > elbo("SVGP") + 0.1


def test_scores_of_digits():
    p = np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.1, 0.8, 0.1]])
    scores = mnist.scores(p, np.array([0, 0, 1]))
    assert scores == {"accuracy": pytest.approx(2 / 3), "nlpd": pytest.approx(-np.log(0.7 * 0.3 * 0.8) / 3)}


def test_divergence_of_whitened_values_is_that_of_f(float64):
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 5.0, 40))[:, None]
    data = orthogonal.Data(X, np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=40), np.log([0.7, 0.8, 0.1]), 0.0)
    points, split = np.array([0.4, 2.0, 3.4, 1.1, 4.6]), 3

    @partial(jax.jit, static_argnums=0)
    def at_points(structure):
        gp = orthogonal.collapsed(data.hyper, jnp.asarray(points), data.X, split, structure, "prior")
        posterior, at = gp.condition(data.y), jnp.asarray(points)[:, None]
        return posterior.mean(at), posterior.covariance(at)

    mean1, S1 = map(np.asarray, at_points("SGPR"))
    for structure in ("SOLVE-GP", "ODVGP"):
        mean, S = map(np.asarray, at_points(structure))
        shift = mean1 - mean
        log_dets = np.linalg.slogdet(S1)[1] - np.linalg.slogdet(S)[1]
        expected = 0.5 * (np.trace(np.linalg.solve(S1, S)) + shift @ np.linalg.solve(S1, shift) - 5 + log_dets)
        assert expected > 0.05
        assert orthogonal.kl_to_sgpr(points, data, split, structure) == pytest.approx(expected, rel=1e-4)


def test_correlation_of_single_points_is_the_kernel():
    assert orthogonal.largest_correlation(np.array([0.3]), np.array([1.5])) == pytest.approx(np.exp(-0.72), rel=1e-6)
    repeated = orthogonal.largest_correlation(np.array([0.3, 1.5]), np.array([1.5, 4.0]))
    assert repeated == pytest.approx(1.0, abs=1e-6)


def dense_kernel(name: str, weights, bias: float, lengthscale: float, X, X2):
    U, V = (np.column_stack([x * np.sqrt(weights), np.full(len(x), math.sqrt(bias))]) for x in (X, X2))
    norms = np.outer(np.linalg.norm(U, axis=1), np.linalg.norm(V, axis=1))
    angle = np.arccos(np.clip(U @ V.T / norms, -1.0, 1.0))
    if name == "arccos":
        return norms * (np.sin(angle) + (math.pi - angle) * np.cos(angle)) / math.pi
    r = math.sqrt(5.0) * 2.0 * np.sin(angle / 2.0) / lengthscale
    return norms * (1.0 + r + r**2 / 3.0) * np.exp(-r)


@pytest.mark.parametrize("kernel", ["arccos", "matern52"])
def test_points_at_every_row_give_the_exact_gps_scores(kernel, float64):
    data = fits.simulated(24, 3)
    weights, bias, noise, lengthscale = np.array([0.7, 0.2, 0.05]), 0.6, 0.04, 0.8
    logs = np.log([*weights, bias, noise, lengthscale])[: 5 + (kernel == "matern52")]
    model = spherical.Model(kernel, "points", (24,))
    theta = np.concatenate([logs, data.X_train.ravel()])
    mean, variance, share = spherical.predict(theta, data.X_train, data.y_train, data.X_test, model)

    def k(A, B):
        return dense_kernel(kernel, weights, bias, lengthscale, A, B)

    K, cross = k(data.X_train, data.X_train) + noise * np.eye(24), k(data.X_train, data.X_test)
    exact = cross.T @ np.linalg.solve(K, data.y_train)
    left = np.diag(k(data.X_test, data.X_test) - cross.T @ np.linalg.solve(K, cross)) + noise
    np.testing.assert_allclose(mean, exact, atol=1e-4)
    np.testing.assert_allclose(variance, left, atol=1e-4)
    assert 0.0 <= share < 1e-3
    value = float(spherical.loss_and_slope(theta, data.X_train, data.y_train, model)[0])
    evidence = -0.5 * (data.y_train @ np.linalg.solve(K, data.y_train) + np.linalg.slogdet(2.0 * math.pi * K)[1])
    assert value == pytest.approx(-evidence / 24, abs=1e-3)


def test_levels_by_each_rule(float64):
    data = fits.simulated(40, 0)
    for kernel, logs, six in (("arccos", 5, (0, 1, 2, 4)), ("matern52", 6, (0, 1, 2, 3, 4, 5))):
        theta = np.concatenate([np.zeros(logs), np.random.default_rng(0).normal(size=6 * 4)])
        model = spherical.Model(kernel, "relu", (6,), (0,))
        assert [m.levels for m in spherical.candidates(model, theta, data, "6")] == [six]
        # A rectified linear unit has no odd levels but the first.
        tried = [m.levels for m in spherical.candidates(model, theta, data, "bound")]
        assert tried == [(0, 1), (0, 1, 2), (0, 1, 2, 4), (0, 1, 2, 4, 6)]
        assert spherical.candidates(model._replace(feature="points"), theta, data, "bound")[0].levels == (0,)


def test_levels_in_common_and_starts(float64):
    model = spherical.Model("arccos", "relu", (3, 2), (0, 1, 2, 4, 6))
    logs = np.log([0.7, 0.4, 0.1])
    # Neither the kernel nor the unit has odd levels but the first.
    assert tuple(spherical.present(model._replace(blocks=(1,)), jnp.asarray([*logs, 1.0, 0.0]), 1, 7)) == model.levels
    X = np.random.default_rng(0).normal(size=(12, 1))
    begin, points = (
        spherical.snelson_start(model, logs, X, 0),
        spherical.snelson_start(spherical.Model("arccos", "points", (5,)), logs, X, 0),
    )
    np.testing.assert_array_equal(begin[:3], logs)
    assert np.all(spherical.snelson_start(model, logs, X, 1)[:3] != logs)
    np.testing.assert_array_equal(begin[-2:], points[-2:])
    # Units point to rows: the angle's tangent is that of weighted input and bias.
    directions = begin[3:9].reshape(3, 2)
    np.testing.assert_allclose(directions[:, 0] / directions[:, 1], np.sqrt(0.7 / 0.4) * points[3:6])


def test_pca_completes_a_matrix_of_low_rank():
    rng = np.random.default_rng(0)
    truth = 3.0 + rng.normal(size=(60, 2)) @ rng.normal(size=(2, 8))
    gap = rng.uniform(size=truth.shape) < 0.1
    seen = np.where(gap, np.nan, truth)
    filled = latents.by_pca(seen, 2)
    np.testing.assert_array_equal(filled[~gap], truth[~gap])
    assert latents.rmse(filled, truth, gap) < 0.02 * np.std(truth)
    # The rank is chosen by entries that it has not seen.
    np.testing.assert_array_equal(latents.chosen(latents.by_pca, seen, range(1, 5), seed=0), filled)


def test_halves_are_imputed_by_the_conditional_mean_of_probabilistic_pca():
    rng = np.random.default_rng(1)
    Y = rng.normal(size=(50, 3)) @ rng.normal(size=(3, 10)) + 0.3 * rng.normal(size=(50, 10))
    gap = np.arange(10) % 2 == 0
    pca = PCA(3, svd_solver="full").fit(Y)
    found = latents.given_half(pca, Y[:4], gap)
    P = pca.get_precision()
    pull = P[np.ix_(gap, ~gap)] @ (Y[:4] - pca.mean_)[:, ~gap].T
    np.testing.assert_allclose(found, pca.mean_[gap] - np.linalg.solve(P[np.ix_(gap, gap)], pull).T, atol=1e-10)


def test_coverage_of_normal_intervals():
    rng = np.random.default_rng(2)
    scale = rng.uniform(0.5, 2.0, size=(200, 50))
    truth = scale * rng.normal(size=scale.shape)
    where = rng.uniform(size=scale.shape) < 0.5
    assert latents.coverage(np.zeros_like(scale), scale, truth, where) == pytest.approx(0.9, abs=4 * 0.3 / 70)


def test_elbo_in_chunks_is_the_elbo_of_all_rows(monkeypatch):
    """Also when groups have empty places and the last chunk is filled up."""
    monkeypatch.setattr(fits, "CHUNK", 18)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(53, 2)).astype(np.float32), rng.normal(size=53).astype(np.float32)
    split = fits.Rows(X, y, X, y)
    groups = npgp.median_split(X, 5)  # 16, of 3 and 4 rows
    layout = fits.Layout.of(split, "grouped", groups, batch_size=12)
    assert (layout.batch_size, layout.group_size, len(layout.arrays[0])) == (16, 4, 64)
    assert layout.chunks()[2].shape == (4, 16) and layout.chunks()[2].sum() == 53

    kinds = ("dense", "dense")
    params = {"lengthscale": np.float32([0.8, 1.3]), "variance": 1.2, "noise_variance": 0.3}
    params |= {"inducing0": X[:6], "inducing1": X[6:10]}
    model = fits.regression_model(params, kinds, "grouped", layout.group_size)

    @jax.jit
    def best():
        gp = fits.component(params, kinds)
        collapsed = npgp.CollapsedGP(gp.kernel, X, gp.inducing, noise_variance=0.3, conditional=npgp.Grouped(groups))
        return gp.params(collapsed.condition(y).q), collapsed.log_prob(y)

    # At the best q, ELBO and collapsed bound are the same number by two ways of computing it.
    q, bound = best()
    elbo = fits.elbo_of_chunks(model, npgp.AutoSparseGP(model))({**params, **q}, layout.chunks())
    assert elbo == pytest.approx(float(bound), abs=2e-3)


def test_splits(float64):
    """Random, of equally many rows, standardized by the training rows, and together all rows."""
    splits = [minibatches.random_split("simulated", number, None) for number in (0, 1)]
    for data in splits:
        assert data.X.shape == (450, 3) and data.X_test.shape == (50, 3)
        np.testing.assert_allclose(data.X.mean(0), 0.0, atol=1e-12)
        np.testing.assert_allclose([*data.X.std(0), data.y.std()], 1.0)
    # The same rows in another order: ranks of a column do not depend on its scale.
    order = [np.argsort(np.concatenate([data.X_test, data.X])[:, 0]) for data in splits]
    y = [np.concatenate([data.y_test, data.y])[rows] for data, rows in zip(splits, order, strict=True)]
    assert np.corrcoef(y)[0, 1] == pytest.approx(1.0)
    assert not np.array_equal(*order)
    assert len(minibatches.random_split("simulated", 0, 50).y) == 50


def test_elbo_of_all_rows(float64):
    """
    In chunks of which the last is filled up it is the collapsed bound where q is the best; and there, as anywhere, the
    tight conditional's is above the prior's.
    """
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(53, 2)), rng.normal(size=53)
    params = {"lengthscale": np.array([0.8, 1.3]), "variance": jnp.asarray(1.2), "noise_variance": jnp.asarray(0.3)}
    params |= {"inducing0": X[:6], "inducing1": X[6:12]}
    method = fits.METHODS["SOLVE-GP"]

    @jax.jit
    def best():
        gp = fits.component(params, method.covariances)
        collapsed = npgp.CollapsedGP(
            gp.kernel, X, gp.inducing, noise_variance=0.3, conditional="prior", covariances="dense"
        )
        return gp.params(collapsed.condition(y).q)

    params |= best()
    args = Namespace(steps=2, batch_size=64, learning_rate=0.1, natural=0.0)
    prior, tight = (
        fits.Program(fits.regression_model(params, ("dense", "dense"), conditional), len(y), args, 16).elbo(
            params, X, y
        )
        for conditional in ("prior", "tight")
    )
    assert prior == pytest.approx(float(fits.best_elbo(params, X, y, method.covariances, "prior")), abs=1e-6)
    assert tight > prior + 1.0


def test_the_share_of_draws_in_an_interval():
    rng = np.random.default_rng(0)
    draws = {"a": rng.normal(size=(4000, 2)) * [1.0, 0.5], "b": rng.normal(size=4000) + 10.0}
    least, middle, most = trust.shares(draws, {"a": rng.normal(size=(4000, 2)), "b": rng.normal(size=4000)})
    assert least[:2] == (0.0, "b") and middle[1] == "a[1]" and most[1] == "a[0]"
    np.testing.assert_allclose([middle[0], middle[2], most[0], most[2]], [0.589, 0.5, 0.9, 1.0], atol=0.05)


def rows(num: int = 30):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 2))
    return X, np.sin(X[:, 0]) + 0.1 * rng.normal(size=num)


def test_the_bound_at_all_points_is_the_evidence(float64):
    X, y = rows()
    lengthscales, variance, noise = np.array([0.7, 1.9]), 1.4, 0.2
    r = np.sqrt(3.0 * np.sum(np.square((X[:, None] - X) / lengthscales), -1))
    K = variance * (1.0 + r) * np.exp(-r) + noise * np.eye(len(X))
    theta = np.concatenate([np.log([*lengthscales, variance, noise]), X.ravel()])
    value, slope = fits.loss_and_slope(theta, X, y, None, 1.0, fits.Kind("tight"))
    assert -len(X) * float(value) == pytest.approx(multivariate_normal(cov=K).logpdf(y), abs=1e-4)  # the jitter's
    step = 1e-5 * np.eye(len(theta))[2]
    ends = [float(fits.loss_and_slope(theta + s, X, y, None, 1.0, fits.Kind("tight"))[0]) for s in (step, -step)]
    assert float(slope[2]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)


def test_batches_of_an_epoch_have_every_row_once():
    X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
    data = minibatches.Arrays.of(fits.Rows(X, X[:, 0], X, X[:, 0]), 3)
    args = Namespace(batch_size=4)
    rows, groups = minibatches.batches(minibatches.Scheme(1.0, 0.5), data, args, 6, 0)
    assert rows.shape == (6, 4)
    for epoch in (rows[:3], rows[3:]):
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.arange(12))
    assert groups.shape == (6, round(0.5 * 4 * (len(data.mask) // data.size) / 12))


def test_what_a_scheme_leaves_out_it_makes_up_for(float64):
    """All rows and all groups in a batch: the ELBO of `grouped`, by rows and by what groups gain."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(16, 2))
    y = np.sin(X[:, 0])
    data = minibatches.Arrays.of(fits.Rows(X, y, X, y), 4)
    start = {"lengthscale": jnp.ones(2), "variance": 1.0, "noise_variance": 0.1, "inducing0": jnp.asarray(X[:3])}
    args, numbers = Namespace(learning_rate=0.1, steps=2), (np.arange(16), np.arange(len(data.mask) // data.size))
    losses = {}
    for name, scheme in {"whole": (0.0, 1.0, True), "gain": (1.0, 1.0, False)}.items():
        svi = minibatches.batched_svi(minibatches.Scheme(*scheme), start, data, args)
        batch = data.batch(numbers[0] if name == "gain" else numbers[0][:0], numbers[1])
        losses[name] = float(svi.evaluate(svi.init(jax.random.key(0), *batch), *batch))
    assert losses["gain"] == pytest.approx(losses["whole"], abs=1e-6)


def test_orthogonal_structures_stand_in_their_order(data_dir, float64):
    data, points = orthogonal.snelson(), np.array([0.5, 1.4, 2.2, 3.1, 4.0, 5.2])
    union, solve, odvgp = (orthogonal.bound(points, data, 3, name) for name in ("SGPR", "SOLVE-GP", "ODVGP"))
    first = orthogonal.bound(points[:3], data, 0, "SGPR")
    assert data.evidence > union > solve > odvgp > first
    for name, value in (("SOLVE-GP", solve), ("ODVGP", odvgp)):  # exact: the KL is the difference of the bounds
        assert orthogonal.kl_to_sgpr(points, data, 3, name) == pytest.approx(union - value, abs=1e-5)
