"""Statements inside NumPyro's ``scan``, and distributions stacked by ``jax.vmap``, are those of a Python loop."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.util import log_density

import npgp

STEPS, ROWS = 3, 4
rng = np.random.default_rng(0)
X = rng.uniform(0.0, 3.0, (STEPS, ROWS, 1))
Z = np.linspace(0.0, 3.0, 5)[:, None]
real, counts = rng.normal(size=(STEPS, ROWS)), rng.poisson(2.0, (STEPS, ROWS)).astype(float)
present = np.arange(STEPS * ROWS).reshape(STEPS, ROWS) % 3 > 0
per_row = rng.uniform(0.2, 0.6, (STEPS, ROWS))
pytestmark = pytest.mark.usefixtures("float64")


def stated(likelihood, two=False, masked=False, **options):
    """What a step states of f at its rows."""

    def statement(name, f, g, x, y, mask, scale):
        values = (f(x), g(x)) if two else f(x)
        options_ = options | ({"mask": mask} if masked else {})
        npgp.observe(name, values, likelihood(scale), obs=y, **options_)

    return statement


def one_density(made):
    def statement(name, f, g, x, y, mask, scale):
        numpyro.sample(name, made(x, scale), obs=y)

    return statement


def hidden(statement):
    """The statement with half of the steps under a mask of NumPyro's."""

    def masked(name, f, g, x, y, mask, scale):
        with handlers.mask(mask=mask[0]):
            statement(name, f, g, x, y, mask, scale)

    return masked


collapsed = one_density(lambda x, scale: npgp.CollapsedGP(npgp.RBF(1.0), x, Z, npgp.Gaussian(scale=scale)))
CASES = {
    "one scale": (stated(lambda scale: npgp.Gaussian(scale=0.2)), real),
    "a scale per row": (stated(lambda scale: npgp.Gaussian(scale=scale)), real),
    "missing rows": (stated(lambda scale: npgp.Gaussian(scale=0.2), masked=True), real),
    "Student-t": (stated(lambda scale: npgp.StudentT(df=4.0, scale=0.3)), real),
    "Poisson": (stated(lambda scale: npgp.Poisson()), counts),
    "a function": (stated(lambda scale: lambda f: dist.Laplace(f, 0.5)), real),
    "two latent values": (stated(lambda scale: npgp.likelihoods.HeteroscedasticGaussian(), two=True), real),
    "under a mask": (hidden(stated(lambda scale: npgp.Gaussian(scale=0.2))), real),
    "CollapsedGP": (collapsed, real),
    "CollapsedGP under a mask": (hidden(collapsed), real),
    "CollapsedGP of counts": (one_density(lambda x, s: npgp.CollapsedGP(npgp.RBF(1.0), x, Z, npgp.Poisson())), counts),
    "ApproximateGP": (
        one_density(lambda x, s: npgp.collapsed.ApproximateGP(npgp.RBF(1.0), x, Z, noise_variance=0.1)),
        real,
    ),
    "NNGP": (
        one_density(
            lambda x, s: npgp.neighbors.ResponseNNGP(
                npgp.RBF(1.0), x, neighbors=npgp.neighbors.nearest_before(X[0], 2), noise_variance=0.1
            )
        ),
        real,
    ),
}


def model(statement, y, *, scanned, two):
    scale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = npgp.SparseGP("f", npgp.RBF(scale), Z).draw()
    g = npgp.SparseGP("g", npgp.RBF(scale), Z).draw() if two else None
    steps = tuple(map(jnp.asarray, (X, y, present, per_row)))
    if scanned:
        scan(lambda carry, step: (carry, statement("y", f, g, *step)), 0.0, steps)
    else:
        for i in range(STEPS):
            statement(f"y{i}", f, g, *(array[i] for array in steps))


@pytest.mark.parametrize("case", [case for case in CASES if case != "Poisson"])  # of counts a CollapsedGP is
def test_the_density_in_a_scan(case):
    statement, y = CASES[case]
    latent = {"f.u": rng.normal(size=5), "g.u": rng.normal(size=5), "lengthscale": 0.8}

    def density(scanned):
        options = {"scanned": scanned, "two": case == "two latent values"}
        return log_density(model, (statement, y), options, latent)[0]

    scanned, looped = jax.jit(lambda: (density(True), density(False)))()
    np.testing.assert_allclose(scanned, looped, rtol=1e-9)


def test_the_bound_in_a_scan():
    statement, y = CASES["two latent values"]

    def bound(scanned):
        options = {"scanned": scanned, "two": True}
        guide = npgp.AutoSparseGP(model, dependence="pseudo-data")  # a loop's rows give none
        svi = SVI(model, guide, npgp.adam(), TraceMeanField_ELBO(), **options)
        params = svi.get_params(svi.init(jax.random.key(0), statement, y))
        guide = handlers.substitute(svi.guide, data={"lengthscale": jnp.asarray(0.8)})
        return svi.loss.loss(jax.random.key(1), params, model, guide, statement, y, **options)

    scanned, looped = jax.jit(lambda: (bound(True), bound(False)))()
    np.testing.assert_allclose(scanned, looped, rtol=1e-6)


def test_an_observation_in_a_plate_of_a_scan():
    """Its functions share a kernel, so that the plate expands what a step states."""

    def of_outputs(y, scanned):
        def step(carry, rows):
            x, y = rows
            with numpyro.plate("outputs", 2):
                numpyro.sample("y", npgp.CollapsedGP(npgp.RBF(1.0), x, Z, noise_variance=0.1), obs=y)
            return carry, None

        if scanned:
            return scan(step, 0.0, (jnp.asarray(X), y))
        for i in range(STEPS):
            with handlers.scope(prefix=str(i)):
                step(0.0, (X[i], y[i]))

    Y = jnp.stack([real, 2.0 * real], axis=1)  # (steps, outputs, rows)
    scanned, looped = jax.jit(lambda y: [log_density(of_outputs, (y, way), {}, {})[0] for way in (True, False)])(Y)
    np.testing.assert_allclose(scanned, looped, rtol=1e-9)


def test_distributions_stacked_by_vmap():
    def made(x, noise):
        return npgp.CollapsedGP(npgp.RBF(1.0), x, Z, noise_variance=noise)

    noise = jnp.asarray([0.1, 0.2, 0.3])
    stacked = jax.vmap(made)(jnp.asarray(X), noise)
    one_by_one = [made(x, v).log_prob(y) for x, v, y in zip(X, noise, real, strict=True)]
    assert stacked.batch_shape == (STEPS,) and stacked.event_shape == (ROWS,)
    np.testing.assert_allclose(stacked.log_prob(real), one_by_one, rtol=1e-9)
