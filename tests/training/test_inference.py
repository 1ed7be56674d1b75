"""The posterior of a model in one call, against dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import rbf
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

NOISE = 0.1
RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0, 4, 15))[:, None]
Y = np.sin(2 * X[:, 0]) + 0.7 + 0.3 * RNG.normal(size=15)
X_NEW = np.array([[0.7], [2.2], [6.0]])
KEY = jax.random.key(0)


def model(X_rows, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    f = npgp.SparseGP("f", npgp.RBF(1.0), jnp.asarray(X), jitter=1e-10).draw()
    with numpyro.plate("data", len(X_rows)):
        npgp.observe("y", f(X_rows) + level, npgp.Gaussian(variance=NOISE), obs=y)


def exact(A, B, level):
    """Mean and covariance of f at A, plus the level's variance times ``level``, given the data; with prior at B."""
    C = rbf(X, X, 1.0, 1.0) + 4.0 + NOISE * np.eye(15)
    K = rbf(A, X, 1.0, 1.0) + 4.0 * level
    return K @ np.linalg.solve(C, Y), rbf(A, B, 1.0, 1.0) + 4.0 * level - K @ np.linalg.solve(C, K.T)


def test_the_posterior_in_one_call(tmp_path):
    fitted = npgp.infer(model, KEY, X, y=Y, options={"progress": False})
    assert fitted.convergence.arrived and fitted.result.params is fitted.params
    assert str(fitted) == f"{fitted.guide}\n{fitted.convergence}"

    # Observations at new rows, and the function alone.
    new = fitted.predict(KEY, X_NEW, num_draws=2020)
    mean, covariance = exact(X_NEW, X_NEW, 1.0)
    assert new["y"].shape == new["y.latent"].shape == (2020, 3)
    np.testing.assert_allclose(new["y.latent"].mean(0), mean, atol=0.1)
    np.testing.assert_allclose(new["y.latent"].std(0), np.sqrt(np.diag(covariance)), rtol=0.1)
    np.testing.assert_allclose(new["y"].std(0), np.sqrt(np.diag(covariance) + NOISE), rtol=0.1)
    assert not np.array_equal(new["y"][:50], new["y"][50:100])
    f = fitted.posterior("f", draws=200)
    mean, covariance = exact(X_NEW, X_NEW, 0.0)
    np.testing.assert_allclose(f.mean(X_NEW), mean, atol=0.15)
    np.testing.assert_allclose(f.variance(X_NEW), np.diag(covariance), rtol=0.25)

    level = fitted.samples(KEY, 2000)["level"]
    C = rbf(X, X, 1.0, 1.0) + NOISE * np.eye(15)
    precision = 1 / 4.0 + np.sum(np.linalg.inv(C))
    np.testing.assert_allclose(level.std(), precision**-0.5, rtol=0.1)
    assert fitted.check(draws=200).trusted
    data = fitted.to_arviz(num_draws=20, posterior_predictive=False, log_likelihood=False)
    assert data.posterior["level"].shape == (1, 20) and data.posterior.attrs["arrived"] == 1

    fitted.save(tmp_path / "fitted.npz")
    again = npgp.inference.Inference.load(tmp_path / "fitted.npz", model, X, y=Y)
    assert again.convergence == fitted.convergence and again.result is None
    np.testing.assert_array_equal(again.samples(KEY, 50)["level"], fitted.samples(KEY, 50)["level"])
    npgp.save(tmp_path / "other.npz", {"X": X})
    with pytest.raises(ValueError, match=r"other.npz' is not a file that save of an npgp.inference.Inference wrote"):
        npgp.inference.Inference.load(tmp_path / "other.npz", model, X, y=Y)


def test_whether_points_are_enough(float64):
    """In a model whose offset is sampled, with a row missing and rows drawn in parts: as of the arrays themselves."""
    rows, seen = jnp.asarray(X), jnp.arange(15) != 4

    def subsampled(rows, y=None):
        level = numpyro.sample("level", dist.Normal(0.7, 1e-6))  # so that all draws are alike
        f = npgp.SparseGP("f", npgp.RBF(1.0), rows[::3]).draw()
        with numpyro.plate("data", len(rows), subsample_size=5) as index, numpyro.handlers.mask(mask=seen[index]):
            npgp.observe("y", f(rows[index]) + level, npgp.Gaussian(variance=NOISE), obs=y[index])

    options = {"callbacks": [npgp.training.Arrival(tolerance=0.3, window=50, max_steps=100)], "progress": False}
    guide = npgp.AutoSparseGP(subsampled)
    with pytest.warns(npgp.training.TrainingWarning, match="100 steps"):
        fitted = npgp.infer(subsampled, KEY, rows, y=jnp.asarray(Y), guide=guide, options=options)
    assert fitted.guide is guide and len(fitted.result.losses) == 100 and fitted.args[0] is rows
    found = fitted.enough_points("f", KEY)
    draw = fitted.posterior("f", draws=1)
    level = draw.sites["level"][0]
    alone = npgp.collapsed.enough_points(draw[0], rows, Y, npgp.Gaussian(variance=NOISE), offset=level, mask=seen)
    assert found.rows == alone.rows == 14 and found.features == 5
    assert found.gain == pytest.approx(alone.gain, abs=1e-3) and found.more == alone.more
    # The search ends on a flat top, within some thousandths of a nat.
    assert found.gain_trained == pytest.approx(alone.gain_trained, abs=0.01)
    with pytest.raises(KeyError, match="no component named 'g'"):
        fitted.enough_points("g")


def test_functions_whose_points_are_not_looked_at():
    def scaled(rows, y=None):
        f = npgp.SparseGP("f", npgp.RBF(1.0), jnp.asarray(X[::3])).draw()
        npgp.observe("y", 2.0 * f(rows), npgp.Gaussian(variance=NOISE), obs=y)
        npgp.observe("z", f(rows), npgp.Gaussian(variance=NOISE), obs=y)

    guide = npgp.AutoSparseGP(scaled)
    svi = SVI(scaled, guide, npgp.adam(0.1), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(KEY, X, y=Y))
    with pytest.raises(ValueError, match="f is a term of 2 observed latent values"):
        npgp.inference.Inference(scaled, guide, params, (X, Y)).enough_points("f")
    one = handlers.block(scaled, hide=["z"])
    with pytest.raises(ValueError, match="f has a factor, or is several functions, in 'y'"):
        npgp.inference.Inference(one, guide, params, (X, Y)).enough_points("f")


# ---------------------------------------------------------------------------------------------------------------
# Enough inducing points

QUICK = {"callbacks": [npgp.training.Arrival(tolerance=0.3, window=50)], "progress": False}


def with_points(inducing):
    def model(rows, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        f = npgp.SparseGP("f", npgp.RBF(0.5), inducing).draw()
        with numpyro.plate("data", len(rows)):
            npgp.observe("y", f(rows) + level, npgp.Gaussian(variance=NOISE), obs=y)

    return model


def cost(Z):
    """½ log(1 + d/σ²) of a row, on average."""
    K = rbf(X, Z, 0.5, 1.0)
    left = 1.0 - np.sum(K @ np.linalg.inv(rbf(Z, Z, 0.5, 1.0)) * K, axis=1)
    return np.mean(0.5 * np.log1p(left / NOISE))


def test_a_training_with_too_few_points_says_so():
    Z = X[::5]
    assert cost(Z) > 0.1
    with pytest.warns(npgp.training.TrainingWarning, match=rf"leave of f costs {cost(Z):.2g} nats a row"):
        npgp.infer(with_points(Z), KEY, X, y=Y, options=QUICK)


def test_a_given_number_of_steps_with_too_few_points_says_so():
    few = with_points(X[::5])
    svi = SVI(few, npgp.AutoSparseGP(few), npgp.adam(0.05, 400), TraceMeanField_ELBO())
    with pytest.warns(npgp.training.TrainingWarning, match=rf"leave of f costs {cost(X[::5]):.2g} nats a row"):
        npgp.fit(svi, KEY, 400, X, y=Y, progress=False)


def test_points_grow_until_they_are_enough(tmp_path):
    fitted = npgp.infer(with_points(4), KEY, X, y=Y, options=QUICK, grow=0.02)
    points = np.asarray(fitted.params["f.u.inducing"])
    first = npgp.inducing.selection.choose(npgp.RBF(0.5), jnp.asarray(X), 4)
    np.testing.assert_array_equal(points[:4], first)
    assert len(points) == 8 and np.isin(points[4:], X.astype(points.dtype)).all()
    assert 0.0 < cost(points) < 0.03  # of which training says nothing: its warning would be an error here

    C = rbf(X, X, 0.5, 1.0) + NOISE * np.eye(15)
    ones = np.linalg.solve(C + 4.0, Y)
    f = fitted.posterior("f", draws=200)
    np.testing.assert_allclose(f.mean(X_NEW), rbf(X_NEW, X, 0.5, 1.0) @ ones, atol=0.1)

    fitted.save(tmp_path / "grown.npz")
    again = npgp.inference.Inference.load(tmp_path / "grown.npz", with_points(4), X, y=Y)
    np.testing.assert_array_equal(again.posterior("f", draws=200).mean(X_NEW), f.mean(X_NEW))


def test_options_of_fit_are_no_arguments_of_the_model():
    with pytest.raises(TypeError, match="^num_steps is an option of npgp.fit.* npgp.fit for a number of steps"):
        npgp.infer(model, KEY, X, y=Y, num_steps=100)
    with pytest.raises(TypeError, match="^progress is an option of npgp.fit.* options={'progress': "):
        npgp.infer(model, KEY, X, y=Y, progress=False)
    with pytest.raises(TypeError, match="^steps is 100; it must be the name of an argument"):
        npgp.infer(model, KEY, X, y=Y, options={"steps": 100})


def test_points_that_cannot_grow():
    with pytest.raises(ValueError, match="grow is 0"):
        npgp.infer(with_points(2), KEY, X, y=Y, options=QUICK, grow=0.0)
    with pytest.raises(ValueError, match="options has checkpoints"):
        npgp.infer(with_points(2), KEY, X, y=Y, options={"checkpoints": object()}, grow=0.1)
    with pytest.warns(npgp.training.TrainingWarning, match="no SparseGP of the model has a number"):
        npgp.infer(with_points(X[::2]), KEY, X, y=Y, options=QUICK, grow=0.1)

    def scaled(rows, y=None):
        f = npgp.SparseGP("f", npgp.RBF(0.5), 8).draw()
        npgp.observe(
            "y", numpyro.sample("scale", dist.LogNormal(0.0, 0.1)) * f(rows), npgp.Gaussian(variance=NOISE), obs=y
        )

    with pytest.warns(npgp.training.TrainingWarning, match="whether 'f' has enough points is unknown: f has a factor"):
        assert len(npgp.infer(scaled, KEY, X, y=Y, options=QUICK, grow=0.1).params["f.u.inducing"]) == 8
