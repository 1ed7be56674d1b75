"""Conditioning on more rows at fixed hyperparameters: optima, stationary points, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import optax
import pytest
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import likelihoods
from npgp.features import Points
from npgp.sparse.projection import factorize
from npgp.variational import DenseNormal, DiagonalNormal, MeanOnlyNormal

NOISE = 0.15
_rng = np.random.default_rng(3)
X = _rng.uniform(0.0, 4.0, (14, 1))
Y = np.sin(2.0 * X[:, 0]) + 0.3 * _rng.normal(size=14)
COUNTS = _rng.poisson(np.exp(0.5 + np.sin(2.0 * X[:, 0]))).astype(float)
OFFSET = 0.3 * X[:, 0]
ROW_NOISE = _rng.uniform(0.1, 0.4, 14)
PRESENT = np.arange(14) % 5 != 2
BLOCKS = {"dense": [models.Z], "diagonal": [models.Z], "two": [models.Z, models.O]}
KINDS = {"dense": ("dense",), "diagonal": ("diagonal",), "two": ("dense", "dense")}


def kernel():
    return npgp.RBF(lengthscale=models.LENGTHSCALE, variance=models.VARIANCE)


@models.compiled
def factorized(blocks):
    return factorize(kernel(), [Points(Z) for Z in blocks], jitter=1e-10)


def arrays(dtype, *values):
    return [jnp.asarray(np.array(value), dtype) for value in values]


@functools.partial(models.compiled, static_argnames="conditional")
def condition(posterior, X, y, likelihood, **options):
    """With the posterior's moments at the new rows."""
    new = posterior.update(X, y, likelihood, **options)
    return new, new.mean_and_variance(X)


def prior(structure="dense", dtype=np.float64):
    """A posterior that has seen no data."""
    blocks, kinds = BLOCKS[structure], KINDS[structure]
    q = [
        DenseNormal(jnp.zeros(len(Z), dtype), jnp.eye(len(Z), dtype=dtype))
        if kind == "dense"
        else DiagonalNormal(jnp.zeros(len(Z), dtype), jnp.ones(len(Z), dtype))
        for Z, kind in zip(blocks, kinds, strict=True)
    ]
    return npgp.variational.Posterior(factorized(arrays(dtype, *blocks)), tuple(q))


def later(batch=(), dtype=np.float64):
    """A posterior of one dense block that has seen some, and its mean and factor."""
    rng = np.random.default_rng(5)
    loc = 0.5 * rng.normal(size=(*batch, 3))
    L = np.tril(0.3 * rng.normal(size=(*batch, 3, 3)), -1) + np.eye(3) * rng.uniform(0.3, 0.8, (*batch, 3, 1))
    q = DenseNormal(*arrays(dtype, loc, L))
    return npgp.variational.Posterior(factorized(arrays(dtype, models.Z)), (q,)), loc, L


def covariances(posterior):
    result = []
    for block in posterior.q:
        scale = np.asarray(block.scale_tril if block.kind == "dense" else block.scale[..., None] * jnp.eye(3))
        result.append(scale @ np.swapaxes(scale, -1, -2))
    return result


def assert_same_q(posterior, other, **tolerance):
    for a, b in zip(jax.tree.leaves(posterior.q), jax.tree.leaves(other.q), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


# ---------------------------------------------------------------- Gaussian noise


@pytest.mark.parametrize("structure", KINDS)
def test_from_the_prior_it_is_the_collapsed_posterior(float64, structure):
    x, y, offset = arrays(float64, X, Y, OFFSET)

    @models.compiled
    def both(prior, x, y, offset):
        Z = [block.inputs for block in prior.projector.blocks]
        collapsed = npgp.CollapsedGP(
            kernel(), x, Z, noise_variance=NOISE, offset=offset, covariances=KINDS[structure], jitter=1e-10
        )
        return prior.update(x, y, npgp.Gaussian(variance=NOISE), offset=offset), collapsed.condition(y)

    ours, theirs = both(prior(structure), x, y, offset)
    assert_same_q(ours, theirs, rtol=1e-7, atol=1e-9)


def test_rows_in_two_parts_are_all_rows(x64):
    """One dense block: against precisions and their means, added up in NumPy; noise of its own in each row."""
    posterior, loc, L = later(dtype=x64)
    x, y, noise, offset = arrays(x64, X, Y, ROW_NOISE, OFFSET)
    for rows in (slice(0, 7), slice(7, 14)):
        posterior, _ = condition(posterior, x[rows], y[rows], npgp.Gaussian(variance=noise[rows]), offset=offset[rows])
    A = models.Dense("svgp", X).A / np.sqrt(ROW_NOISE)
    before = np.linalg.inv(L @ L.T)
    S = np.linalg.inv(before + A @ A.T)
    mean = S @ (before @ loc + A @ ((Y - OFFSET) / np.sqrt(ROW_NOISE)))
    tolerance = dict(atol=1e-7 if x64 == jnp.float64 else 2e-4)
    np.testing.assert_allclose(covariances(posterior)[0], S, **tolerance)
    np.testing.assert_allclose(posterior.q[0].loc, mean, **tolerance)
    assert posterior.q[0].loc.dtype == x64


@pytest.mark.parametrize("structure", ["two", "diagonal"])
def test_in_parts_other_structures_keep_covariances_but_means_nearly(float64, structure):
    start, likelihood = prior(structure), npgp.Gaussian(variance=NOISE)
    x, y = arrays(float64, X, Y)

    @models.compiled
    def both(start, x, y):
        together = start.update(x, y, likelihood)
        in_parts = start.update(x[:7], y[:7], likelihood).update(x[7:], y[7:], likelihood)
        difference = (in_parts.mean(x) - together.mean(x)) / jnp.sqrt(together.variance(x))
        return together, in_parts, difference

    together, in_parts, difference = both(start, x, y)
    for a, b in zip(covariances(in_parts), covariances(together), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)
    assert 1e-3 < np.abs(difference).max() < 1.0  # the docstring says that it is not exact


def test_each_function_of_a_batch_is_conditioned_by_itself(float64):
    """Own covariances, noise and missing rows; against each function alone, with the rows left out."""
    posterior, loc, L = later((2,))
    y = np.stack([Y, np.cos(X[:, 0])])
    mask = np.stack([PRESENT, ~PRESENT])
    noise = np.array([[0.1], [0.3]])
    x, y_seen, variance = arrays(float64, X, np.where(mask, y, np.nan), noise)
    together, _ = condition(posterior, x, y_seen, npgp.Gaussian(variance=variance), mask=mask)
    for i in range(2):
        A = models.Dense("svgp", X).A[:, mask[i]]
        before = np.linalg.inv(L[i] @ L[i].T)
        S = np.linalg.inv(before + A @ A.T / noise[i])
        np.testing.assert_allclose(covariances(together)[0][i], S, atol=1e-7)
        np.testing.assert_allclose(
            together.q[0].loc[i], S @ (before @ loc[i] + A @ y[i, mask[i]] / noise[i]), atol=1e-6
        )


def test_one_posterior_becomes_a_batch(float64):
    posterior, *_ = later()
    x, y = arrays(float64, X, np.stack([Y, -Y]))

    @models.compiled
    def both(posterior, x, y):
        together = posterior.update(x, y, npgp.Gaussian(variance=NOISE))
        return together.batch_shape, together.mean(x), posterior.update(x, y[1], npgp.Gaussian(variance=NOISE)).mean(x)

    batch, together, alone = both(posterior, x, y)
    assert batch == (2,)
    np.testing.assert_allclose(together[1], alone, rtol=1e-9)


# ---------------------------------------------------------------- other likelihoods


def test_counts_give_a_stationary_point(x64):
    """Two functions, offset and missing rows, against the gradient of an ELBO written out here."""
    posterior, loc, L = later((2,), x64)
    y = np.stack([COUNTS, COUNTS[::-1]])
    mask = np.stack([PRESENT, ~PRESENT])
    x, y_seen, offset = arrays(x64, X, np.where(mask, y, np.nan), OFFSET)
    exact = x64 == jnp.float64
    options = dict(tolerance=1e-16) if exact else {}
    posterior, _ = condition(
        posterior, x, y_seen, npgp.Poisson(), offset=offset, mask=mask, conditional="prior", **options
    )
    new = posterior.q[0]

    dense = models.Dense("svgp", X)
    with jax.enable_x64(True):
        A, residual, old, y = map(jnp.asarray, (dense.A, dense.residual, np.linalg.inv(L @ np.swapaxes(L, 1, 2)), y))

        def elbo(m, factor):
            mean = m @ A + OFFSET
            variance = residual + jnp.sum((jnp.swapaxes(factor, -1, -2) @ A) ** 2, -2)
            fit = jnp.where(mask, y * mean - jnp.exp(mean + 0.5 * variance), 0.0)
            S, shift = factor @ jnp.swapaxes(factor, -1, -2), m - loc
            divergence = jnp.sum(old * S) + jnp.einsum("pi,pij,pj", shift, old, shift)
            return jnp.sum(fit) - 0.5 * divergence + jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)))

        arguments = [jnp.asarray(np.asarray(value, np.float64)) for value in (new.loc, new.scale_tril)]
        gradient = models.compiled(jax.grad(elbo, (0, 1)))
        slope_mean, slope_factor = gradient(*arguments)
        before, _ = gradient(jnp.asarray(loc), jnp.asarray(L))
    bound = 1e-6 if exact else 2e-2
    assert np.abs(before).max() > 0.5
    np.testing.assert_allclose(slope_mean, 0.0, atol=bound)
    np.testing.assert_allclose(np.tril(slope_factor), 0.0, atol=bound)


def test_classes_match_training_by_natural_gradients(float64):
    """Two blocks, the tight conditional: from the prior the ELBO is that of the whole model."""
    labels = (Y > 0).astype(float)
    likelihood = npgp.Bernoulli()
    model = models.regression("solve", likelihood=likelihood)
    x, y = arrays(float64, X, labels)
    start = prior("two")
    ours, _ = condition(start, x, y, likelihood, tolerance=1e-16)
    gp = models.sparse_gp("solve")
    svi = SVI(model, npgp.AutoSparseGP(model), npgp.natural_gradient(1.0), TraceMeanField_ELBO())

    @models.compiled
    def run(x, y, params):
        state = svi.init(jax.random.key(0), x, y, init_params=params)
        return svi.get_params(jax.lax.scan(lambda state, _: svi.update(state, x, y), state, length=25)[0])

    trained = run(x, y, gp.params(start.q))
    for name, value in gp.params(ours.q).items():
        np.testing.assert_allclose(value, trained[name], atol=1e-6)


def test_outliers_are_not_believed(float64):
    """Student-t is not log-concave: full steps need not be possible. An outlier moves the mean less than Gaussian."""
    posterior, *_ = later()
    y = Y.copy()
    y[3] += 20.0
    x, clean, wild = arrays(float64, X, Y, y)

    robust, trusting = (
        [condition(posterior, x, y, p)[1][0] for y in (clean, wild)]
        for p in (likelihoods.StudentT(df=4.0, scale=0.3, num_nodes=20), npgp.Gaussian(variance=NOISE))
    )
    moved = [np.abs(after - before).max() for before, after in (robust, trusting)]
    assert moved[0] < 0.1 * moved[1]


# ---------------------------------------------------------------- by SVI, as the docstring says


def test_a_natural_step_with_other_parameters_held_is_the_optimum(float64):
    def model(X, y=None):
        lengthscale = numpyro.param("lengthscale", models.LENGTHSCALE, constraint=constraints.positive)
        f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=models.VARIANCE), jnp.asarray(models.Z.copy())).draw()
        noise = numpyro.param("noise", NOISE, constraint=constraints.positive)
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)

    optimizer = npgp.natural_gradient(1.0, optax.set_to_zero())
    svi = SVI(model, npgp.AutoSparseGP(model), optimizer, TraceMeanField_ELBO())
    x, y = arrays(float64, X, Y)
    hyperparameters = {"lengthscale": jnp.asarray(0.9), "noise": jnp.asarray(0.2)}

    @models.compiled
    def run(x, y):
        start = svi.get_params(svi.init(jax.random.key(0), x, y))
        state = svi.init(jax.random.key(0), x, y, init_params={**start, **hyperparameters})
        state, _ = svi.update(state, x, y)
        Z = jnp.asarray(models.Z.copy())
        return svi.get_params(state), npgp.CollapsedGP(
            npgp.RBF(0.9, variance=models.VARIANCE), x, Z, noise_variance=0.2
        ).condition(y).q[0]

    params, optimum = run(x, y)
    np.testing.assert_allclose(params["f.u.loc"], optimum.loc, atol=1e-6)
    np.testing.assert_allclose(params["f.u.scale_tril"], optimum.scale_tril, atol=1e-6)
    for name, value in hyperparameters.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-12)


# ---------------------------------------------------------------- what is refused


def test_a_block_that_moves_the_mean_only_is_refused():
    posterior, *_ = later(dtype=np.float32)
    posterior = npgp.variational.Posterior(posterior.projector, (MeanOnlyNormal(posterior.q[0].loc),))
    with pytest.raises(ValueError, match="block 1 of q.* moves the mean only"):
        posterior.update(X.astype(np.float32), Y.astype(np.float32), npgp.Gaussian(variance=NOISE))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"y": Y[:3]}, r"y has shape \(3,\); it must be \(..., 14\)"),
        ({"y": np.where(PRESENT, Y, np.nan)}, "y has NaN"),
        ({"likelihood": npgp.Poisson()}, "for Poisson it must be a count"),
        ({"mask": PRESENT[:3]}, r"mask has shape \(3,\)"),
        ({"offset": OFFSET[:3]}, r"offset has shape \(3,\)"),
        ({"offset": np.nan}, "offset has NaN"),
        ({"likelihood": npgp.Gaussian(variance=np.ones((2, 1)))}, r"noise variance has shape \(2, 1\)"),
        ({"conditional": "published"}, r"conditional is Published\(\)"),
        ({"likelihood": likelihoods.Softmax(3)}, "likelihood is Softmax, of 3 latent values"),
        ({"max_iterations": 0}, "max_iterations is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_do_not_fit_are_refused(changes, words):
    posterior, *_ = later(dtype=np.float32)
    arguments = dict(X=X.astype(np.float32), y=Y, likelihood=npgp.Gaussian(variance=NOISE)) | changes
    with pytest.raises(ValueError, match=words):
        posterior.update(**arguments)


def test_batches_need_a_row_of_observations_for_each_function():
    posterior, *_ = later((2,), np.float32)
    with pytest.raises(ValueError, match=r"y has shape \(14,\); it must be \(2, 14\)"):
        posterior.update(X.astype(np.float32), Y, npgp.Gaussian(variance=NOISE))


def test_counts_far_from_what_is_expected_converge_and_what_does_not_says_so(float64):
    """From the present q(ε) no step helps there; a warning would be an error here."""
    posterior, *_ = later((2,))
    x, y, offset = arrays(float64, X, np.stack([COUNTS, 1e7 * (1.0 + COUNTS)]), OFFSET)
    options = dict(mask=np.ones((2, 14), bool), conditional="prior")
    new = posterior.update(x, y, npgp.Poisson(), offset=offset, **options)
    moved = np.sqrt(np.sum(np.square(new.q[0].loc - posterior.q[0].loc), -1))
    assert moved[1] > 10.0 > moved[0]
    with pytest.warns(RuntimeWarning, match=r"after 1 iterations a step still moves q.* nats"):
        posterior.update(x, y, npgp.Poisson(), offset=offset, **options, max_iterations=1)
    with pytest.raises(FloatingPointError, match="not finite"):
        posterior.update(x, y, npgp.Poisson(), offset=offset + 5000.0, **options)
