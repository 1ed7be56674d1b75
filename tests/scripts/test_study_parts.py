"""Parts of the studies against formulas, dense algebra and other ways to compute the same."""

import jax
import jax.numpy as jnp
import loading
import numpy as np
import pytest
from scipy import stats
from scipy.stats import multivariate_normal

import npgp

loading.path("study")  # puts the scripts on the path
from studies import (  # noqa: E402
    calibration,
    fits,
    latents,
    minibatches,
    regression,
    runner,
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
    assert right["p_band"] > 0.05
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


def test_coverage_of_normal_intervals():
    rng = np.random.default_rng(2)
    scale = rng.uniform(0.5, 2.0, size=(200, 50))
    truth = scale * rng.normal(size=scale.shape)
    where = rng.uniform(size=scale.shape) < 0.5
    assert latents.coverage(np.zeros_like(scale), scale, truth, where) == pytest.approx(0.9, abs=4 * 0.3 / 70)


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
    It is the collapsed bound where q is the best; and there, as anywhere, the tight conditional's is above the prior's.
    """
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(53, 2)), rng.normal(size=53)
    params = {"lengthscale": np.array([0.8, 1.3]), "variance": jnp.asarray(1.2), "noise_variance": jnp.asarray(0.3)}
    params |= {"inducing0": X[:6], "inducing1": X[6:12]}
    prior, tight = minibatches.METHODS["SOLVE-GP"], minibatches.METHODS["T-SOLVE-GP"]

    @jax.jit
    def best():
        gp = minibatches.component(params, 2)
        collapsed = npgp.CollapsedGP(
            gp.kernel, X, gp.inducing, noise_variance=0.3, conditional="prior", covariances="dense"
        )
        return gp.params(collapsed.condition(y).q)

    params |= best()

    def elbo(method):
        model = minibatches.model_of(params, method)
        return minibatches.elbo(model, npgp.AutoSparseGP(model), params, X, y)

    assert elbo(prior) == pytest.approx(float(minibatches.best_elbo(params, X, y, prior)), abs=1e-6)
    assert elbo(tight) > elbo(prior) + 1.0


def test_the_share_of_draws_in_an_interval():
    rng = np.random.default_rng(0)
    draws = {"a": rng.normal(size=(4000, 2)) * [1.0, 0.5], "b": rng.normal(size=4000) + 10.0}
    least, middle, most = trust.shares(draws, {"a": rng.normal(size=(4000, 2)), "b": rng.normal(size=4000)})
    assert least[:2] == (0.0, "b") and middle[1] == "a[1]" and most[1] == "a[0]"
    np.testing.assert_allclose([middle[0], middle[2], most[0], most[2]], [0.589, 0.5, 0.9, 1.0], atol=0.05)


@pytest.mark.parametrize("conditional, bound", [("prior", -111.7829), ("tight", -105.0634)])
def test_snelsons_data_have_the_published_optima(conditional, bound, data_dir, float64):
    """Bui, Ashman & Turner 2025 publish these local optima."""
    args = runner.parse("snelson-bounds", regression.STUDIES["snelson-bounds"], ["--restarts", "0"])
    assert regression.snelson_bounds(args, "5", conditional, "L-BFGS")["best"] == pytest.approx(bound, abs=1e-3)


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
