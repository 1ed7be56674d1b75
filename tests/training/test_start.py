"""The start of a training: what the model computes is looked at too, though it runs as one program."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp.kernels import Coregion

KEY = jax.random.key(0)
X = np.linspace(0, 3, 12, dtype=np.float32)[:, None]
COUNTS = np.arange(12) % 3


def fit(likelihood, kernel=npgp.RBF, y=COUNTS, inputs=lambda X: X, Z=X[::3]):
    def model(X, y):
        f = npgp.SparseGP("f", kernel(), Z).draw()
        with npgp.plate("data", 12, rows=12):
            npgp.observe("y", f(inputs(X)), likelihood(), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())
    return npgp.fit(svi, KEY, 1, X, y, progress=False)


def sampled(value):
    """A number that the model computes."""
    return numpyro.deterministic("value", jnp.asarray(value, jnp.float32) * 1.0)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(likelihood=lambda: npgp.Gaussian(variance=sampled(-1.0))), "variance is -1.0; it must be positive"),
        (
            dict(likelihood=npgp.Poisson, kernel=lambda: npgp.RBF(sampled(0.0))),
            "lengthscale is 0.0; it must be",
        ),
        (dict(likelihood=lambda: npgp.Gaussian(variance=0.1), inputs=lambda X: jnp.log(X - 1.0)), "NaN or infinite"),
        (dict(likelihood=lambda: lambda f: dist.Poisson(f)), "fn .*rate.* outside .* use a link"),
        (dict(likelihood=npgp.Poisson, y=-1 - COUNTS), "y has the value|has the value"),
        (
            dict(likelihood=lambda: npgp.likelihoods.Ordinal(sampled([1.0, 0.0]))),
            r"cutpoints is \[1\. 0\.\]; it must increase",
        ),
        (
            dict(
                likelihood=lambda: npgp.Gaussian(variance=0.1),
                kernel=lambda: Coregion(npgp.RBF(), jnp.eye(2)),
                inputs=lambda X: jnp.concatenate([X, X * 0 + 5.0], axis=1),
                Z=np.concatenate([X[::3], 0 * X[::3]], axis=1),
            ),
            "Coregion has 2 outputs.* has the value 5",
        ),
    ],
    ids=["variance", "lengthscale", "inputs", "link", "support", "cutpoints", "outputs"],
)
def test_what_the_model_computes_is_looked_at(options, match):
    with pytest.raises(ValueError, match=match):
        fit(**options)


def test_right_ones_pass():
    assert np.isfinite(fit(lambda: npgp.Gaussian(variance=sampled(0.3))).losses).all()
    assert np.isfinite(fit(lambda: lambda f: dist.Poisson(jnp.exp(f))).losses).all()


def test_guides_that_need_values_at_their_first_call_have_them():
    """As where a network is made by NumPy."""

    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        f = npgp.SparseGP("f", npgp.RBF(), X[::3]).draw()
        with npgp.plate("data", 12, rows=12):
            npgp.observe("y", f(X) + a, npgp.Poisson(), obs=y)

    made = []

    def guide(X, y):
        if not made:
            made.append(float(jnp.mean(jnp.asarray(X))))  # which a traced array has not
        numpyro.sample("a", dist.Normal(numpyro.param("a.loc", made[0]), 0.1))

    svi = SVI(model, npgp.AutoSparseGP(model, guide), npgp.adam(1e-6), TraceMeanField_ELBO())
    result = npgp.fit(svi, KEY, 2, X, COUNTS, progress=False)
    np.testing.assert_allclose([made[0], result.params["a.loc"]], 1.5, rtol=1e-4)
