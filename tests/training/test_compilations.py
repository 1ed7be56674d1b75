"""How many programs are compiled: few at first, and none for what has been done before."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import (
    AutoDelta,
)
from programs import compilations

import npgp
from npgp.training import Monitor

KEY = jax.random.key(0)
N = 48


def data(seed):
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 10, (N, 1)).astype(np.float32)
    return X, (np.sin(X[:, 0]) + 0.3 * rng.normal(size=N)).astype(np.float32)


X, Y = data(0)


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.param("noise", 0.1, constraint=dist.constraints.positive)
    f = npgp.SparseGP("f", npgp.Matern32(lengthscale), np.linspace(0, 10, 7, dtype=np.float32)[:, None]).draw()
    with npgp.plate("data", N, rows=X.shape[0]):
        npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)


def make(guide=None):
    guide = npgp.AutoSparseGP(model) if guide is None else npgp.AutoSparseGP(model, guide)
    return SVI(model, guide, npgp.adam(0.01), TraceMeanField_ELBO())


def fit(svi, steps, *arrays, **options):
    return npgp.fit(svi, KEY, steps, *(arrays or (X, Y)), progress=False, **options)


@pytest.fixture(scope="module")
def trained():
    svi = make()
    return svi, fit(svi, 3)


def none():
    """Asserts that nothing is compiled inside."""
    return no_more_than(0)


class no_more_than:
    def __init__(self, number):
        self.number = number

    def __enter__(self):
        self.inner = compilations()
        self.count = self.inner.__enter__()

    def __exit__(self, *error):
        self.inner.__exit__(*error)
        if error[0] is None:
            assert self.count() <= self.number


def test_the_start_is_few_programs():
    svi = make()
    with no_more_than(5):
        fit(svi, 3, batch_size=12)


@pytest.mark.parametrize("guide", [AutoDelta], ids=lambda g: g.__name__)
def test_autoguides_are_set_up_once(guide):
    svi = make(guide)  # NumPyro's own start, operation by operation
    result = fit(svi, 2)
    draws = svi.guide.sample_posterior(KEY, result.params, X, Y, sample_shape=(3,))
    assert draws["lengthscale"].shape == (3,) and np.isfinite(result.losses).all()
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(vars(svi.guide._auto)["_init_locs"]))
    with none():
        fit(svi, 2)


def test_a_second_call_is_none(trained):
    svi, result = trained
    with none():
        again = fit(svi, 3)
    np.testing.assert_array_equal(again.losses, result.losses)
    with none():
        fit(svi, 150)  # another number of steps
        fit(svi, 3, *data(1))  # other data
        fit(svi, 3, init_state=result.state)
        fit(make(), 3)  # another SVI of the same


def test_evaluations_are_compiled_once(trained):
    svi, result = trained
    first = npgp.evaluate(svi, KEY, result, X, Y, num_draws=5)
    with none():
        assert npgp.evaluate(svi, KEY, result, X, Y, num_draws=5) == first
        npgp.evaluate(svi, KEY, fit(svi, 4), *data(1), num_draws=5)


def test_monitors_compile_their_metric_alone(trained):
    svi, _ = trained
    with none():
        fit(svi, 6, monitor=Monitor(lambda params: float(np.asarray(params["noise"])), every=2))


def test_posteriors_and_grids(trained):
    svi, result = trained

    def posterior():
        return npgp.posterior("f", model, svi.guide, result.params, X, Y)

    def grid(length):
        return np.linspace(0, 10, length, dtype=np.float32)[:, None]

    with no_more_than(2):
        _, variance = posterior().mean_and_variance(grid(100))
    with none():
        again = posterior()
        others = [again.mean_and_variance(grid(length)) for length in (65, 99, 128)]
        np.testing.assert_array_equal(again.variance(grid(100)), variance)
    assert [m.shape for m, _ in others] == [(65,), (99,), (128,)]
    with no_more_than(1):
        again.mean(grid(100))
    with no_more_than(1):
        again.covariance(grid(100))
    with none():
        np.testing.assert_allclose(again.mean(grid(70)), again.mean_and_variance(grid(70))[0], rtol=1e-4, atol=1e-5)
        assert again.covariance(grid(70)).shape == (70, 70)
    with no_more_than(1):
        again.sample(KEY, grid(100), sample_shape=(2,))
    with none():
        again.sample(jax.random.key(1), grid(100), sample_shape=(2,))


def test_draws(trained):
    svi, result = trained
    with no_more_than(2):
        draws = svi.guide.sample_posterior(KEY, result.params, X, Y, sample_shape=(4,))
    with none():
        svi.guide.sample_posterior(jax.random.key(5), result.params, *data(1), sample_shape=(4,))
    npgp.to_arviz(KEY, model, draws, X, Y, params=result.params)
    with none():
        npgp.to_arviz(KEY, model, draws, X, Y, params=result.params)


def test_certificates(trained):
    given = npgp.RBF(1.0), X, Y, X[:5]
    with no_more_than(25):  # the advice looks at a few structures
        npgp.certificate(*given, noise_variance=0.1)
    with none():
        npgp.certificate(*given, noise_variance=0.1)


def test_what_the_model_reads_may_change():
    scale = [1.0]

    def changing(X, y):
        numpyro.factor("f", -jnp.sum((scale[0] * numpyro.param("a", jnp.ones(())) - 1.5) ** 2))

    svi = SVI(changing, lambda X, y: None, npgp.adam(0.01), TraceMeanField_ELBO())
    first = fit(svi, 2).losses
    scale[0] = 2.0
    second = fit(svi, 2).losses
    np.testing.assert_allclose([first[0], second[0]], [0.25, 0.25], rtol=1e-6)
    np.testing.assert_allclose(second[1], (2 * (1 - 0.01) - 1.5) ** 2, rtol=1e-4)


def test_seconds_are_told_apart(trained):
    svi = make()
    result = fit(svi, 3)
    assert result.seconds.start > 0 and result.seconds.compile > 0 and result.seconds.steps > 0
    params, state, losses = result  # as NumPyro's results
    assert losses is result.losses and params is result.params and state is result.state


def test_a_collapsed_posterior_and_what_is_made_of_it_are_a_program_each():
    kernel, Z, groups = npgp.RBF(1.3), np.linspace(0, 10, 5, dtype=np.float32)[:, None], npgp.sparse.median_split(X, 8)
    gp = npgp.CollapsedGP(kernel, X, Z, noise_variance=0.1)
    with no_more_than(1):
        posterior = gp.condition(Y)
    with no_more_than(1):
        parts = posterior.decompose(X)
    with no_more_than(1):
        evidence = npgp.collapsed.exact_log_evidence(kernel, X, Y, noise_variance=0.1)
    corrected = npgp.local_correction(posterior, X, Y, npgp.Gaussian(variance=0.1), groups)
    with no_more_than(1):
        mean = corrected.mean(X)
    with none():
        (
            gp.condition(Y),
            posterior.decompose(X[:-1]),
            npgp.collapsed.exact_log_evidence(kernel, X, Y, noise_variance=0.1),
            corrected.mean(X[1:]),
        )
    assert mean.shape == (N,) and parts.mean.shape == (2, N) and np.isfinite(evidence)
