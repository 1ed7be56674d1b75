"""MNIST: the robust maximum's integrals, the bounds of its four methods, and a small run."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loading import script
from scipy import stats

from studies.regression import minibatch


@pytest.fixture
def mnist():
    """The script as a module; the precision that its program sets is taken back."""
    return script("mnist", "classification")


def test_robust_maximum_of_two(mnist, float64):
    """f_0 − f_1 is Gaussian."""
    rng = np.random.default_rng(0)
    mean, variance = jnp.asarray(rng.normal(size=(2, 6))), jnp.asarray(rng.uniform(0.3, 2.0, (2, 6)))
    wins = stats.norm.cdf((mean[0] - mean[1]) / np.sqrt(variance.sum(0)))
    likelihood = mnist.RobustMax(2, error=0.01)
    y = np.array([0, 1, 0, 1, 0, 1])
    wins = np.where(y == 0, wins, 1 - wins)
    expected = wins * np.log(0.99) + (1 - wins) * np.log(0.01)
    np.testing.assert_allclose(likelihood.expected_log_prob(y, mean, variance), expected, rtol=1e-5)
    marginal = np.log(0.99 * wins + 0.01 * (1 - wins))
    np.testing.assert_allclose(likelihood.log_marginal(y, mean, variance), marginal, atol=1e-5)


def test_robust_maximum_of_many(mnist, float64):
    """Against draws of f and of classes."""
    rng = np.random.default_rng(1)
    likelihood = mnist.RobustMax(5, error=0.2)
    mean, sd = rng.normal(size=(5, 1)), rng.uniform(0.3, 1.5, (5, 1))
    draws = 40_000
    classes = likelihood.sample(jax.random.key(0), jnp.asarray(mean + sd * rng.normal(size=(5, draws))))
    frequency = np.bincount(np.asarray(classes), minlength=5) / draws
    p = np.asarray(likelihood.probabilities(jnp.asarray(mean), jnp.asarray(sd**2)))[:, 0]
    exact = [np.exp(likelihood.log_marginal(c, jnp.asarray(mean), jnp.asarray(sd**2))) for c in range(5)]
    assert np.sum(exact) == pytest.approx(1.0, abs=3e-4)
    np.testing.assert_allclose(frequency, p, atol=4 * 0.5 / np.sqrt(draws))


def test_bounds_at_the_same_parameters(mnist, float64):
    """Softmax: the tight conditional's bound is above the prior's. Robust maximum: a scale of 1 is the prior's."""
    rng = np.random.default_rng(2)
    X, y = rng.normal(size=(12, 2)), rng.integers(10, size=12)
    params = {"lengthscale": jnp.asarray(0.7), "variance": jnp.asarray(2.0), "inducing0": X[:3]}
    params |= {
        "f.u.loc": rng.normal(size=(10, 1, 3)),
        "f.u.scale_tril": 0.5 * np.broadcast_to(np.eye(3), (10, 1, 3, 3)),
    }
    args = mnist.parse(["--quick"])

    def elbo(name, likelihood, **more):
        model = mnist.make_model(minibatch.METHODS[name], 3, 2, likelihood)
        return mnist.Program(model, len(y), args).elbo(params | more, X, y)

    assert elbo("T-SVGP", "softmax") > elbo("SVGP", "softmax") + 0.1
    prior, at_one, at_less = (
        elbo("SVGP", "robust-max"),
        elbo("T-SVGP", "robust-max", **{"y.residual_scale": jnp.asarray(1.0)}),
        elbo("T-SVGP", "robust-max", **{"y.residual_scale": jnp.asarray(0.5)}),
    )
    assert at_one == pytest.approx(prior, abs=1e-8)
    assert abs(at_less - prior) > 1e-3


def test_scores(mnist):
    p = np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.1, 0.8, 0.1]])
    scores = mnist.scores(p, np.array([0, 0, 1]))
    assert scores == {"accuracy": pytest.approx(2 / 3), "nlpd": pytest.approx(-np.log(0.7 * 0.3 * 0.8) / 3)}


def test_small_run(mnist, monkeypatch, tmp_path):
    """Better than guessing; and what the file has is not fitted again."""
    path = tmp_path / "fits.json"
    command = ["--quick", "--likelihood", "robust-max", "--methods", "T-SVGP", "--steps", "100"]
    command += ["--json", str(path), "--out", str(tmp_path)]
    fits = mnist.main(command)
    (record,) = json.loads(path.read_text())
    assert fits == {("mnist", 8): {"T-SVGP": {0: record}}}
    assert record["accuracy"] > 0.4 and (record["rows"], record["test_rows"]) == (100, 200)
    assert (tmp_path / "mnist.png").stat().st_size > 1000
    monkeypatch.setattr(mnist, "fit", None)
    assert mnist.run(mnist.parse(command)).find() == [record]


def test_digits(mnist, data_dir):
    """Different training digits in each repetition, the same test digits in all."""
    args = mnist.parse(["--rows", "50", "--test-rows", "20"])
    one, other = (mnist.load(args, repetition) for repetition in (0, 1))
    assert one.X.shape == (50, 784) and one.X.max() == 1.0 and set(np.unique(one.y)) <= set(range(10))
    assert not np.array_equal(one.X, other.X) and np.array_equal(one.X_test, other.X_test)
    assert list(one.y_test[:4]) == [7, 2, 1, 0]
