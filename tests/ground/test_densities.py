"""One density of all rows: plates over outputs, and masks over these, are right; those over rows are refused."""

from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density

import npgp

N = 4
X = np.linspace(0.0, 1.0, N, dtype=np.float32)[:, None]
Y = np.sin(5.0 * X[:, 0])
SEVERAL = np.stack([Y, 2.0 * Y, Y + 1.0])
KERNEL = npgp.RBF(lengthscale=0.3)

DENSITIES = {
    "CollapsedGP": lambda: npgp.CollapsedGP(KERNEL, X, X[:2], noise_variance=0.1),
    "ApproximateGP": lambda: npgp.ApproximateGP(KERNEL, X, X[:2], noise_variance=0.1),
    "UncertainInputGP": lambda: npgp.collapsed.UncertainInputGP(
        KERNEL, X, 0.1, X[:2], noise_variance=0.1, penalty_draws=2
    ),
    "NNGP": lambda: npgp.neighbors.NNGP(KERNEL, X, 2),
    "ResponseNNGP": lambda: npgp.neighbors.ResponseNNGP(KERNEL, X, 2, noise_variance=0.1),
}


def stated(make, value, *around):
    """The log density of a model that states it inside handlers, the outermost first."""

    def model():
        with ExitStack() as stack:
            for handler in around:
                stack.enter_context(handler())
            numpyro.sample("y", make(), obs=value)

    return log_density(model, (), {}, {})[0]


def outputs(size=3):
    return lambda: numpyro.plate("outputs", size)


def rows():
    return numpyro.plate("rows", N)


def minibatch():
    return npgp.plate("rows", 10 * N, N)


def mask(values):
    return lambda: handlers.mask(mask=np.asarray(values))


@pytest.mark.parametrize("name", DENSITIES)
def test_plates_and_masks_over_outputs(name):
    make = DENSITIES[name]
    square = np.stack([Y] * N)  # as many outputs as rows
    some = [True, False, True]

    @jax.jit
    def values():
        each = jnp.stack([make().log_prob(y) for y in SEVERAL])
        return each, {
            "alone": (stated(make, Y), each[0]),
            "masked": (stated(make, Y, mask(False)), 0.0),
            "outputs": (stated(make, SEVERAL, outputs()), jnp.sum(each)),
            "as many outputs": (stated(make, square, outputs(N)), N * each[0]),
            "mask inside": (stated(make, SEVERAL, outputs(), mask(some)), each[0] + each[2]),
            "mask outside": (stated(make, SEVERAL, mask(some), outputs()), each[0] + each[2]),
            "expanded": (stated(lambda: make().expand([3]).to_event(1), SEVERAL), jnp.sum(each)),
            "subsample": (stated(make, SEVERAL, lambda: npgp.plate("outputs", 6, 3)), 2.0 * jnp.sum(each)),
        }

    for case, (value, expected) in values()[1].items():
        np.testing.assert_allclose(value, expected, rtol=1e-5, err_msg=case)


@pytest.mark.parametrize("name", DENSITIES)
def test_plates_and_masks_over_rows_are_refused(name):
    def refused(where, times, *around):
        words = rf"{name} is one joint density of its {N} rows, which inside {where} would count {times} times for val"
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(lambda: stated(DENSITIES[name], Y, *around))

    refused("plate 'rows'", N, rows)
    refused("plate 'rows'", N, minibatch)
    refused("plate 'outputs'", 3, outputs())
    refused("handlers.mask", N, mask(Y > 0))
    refused("handlers.mask", N, mask(Y > 0), rows)
    refused("handlers.mask", N, rows, mask(Y > 0))
    refused("plate '.*'", "[43]", lambda: numpyro.plate("outer", 3, dim=-2), rows)


@pytest.mark.parametrize("name", DENSITIES)
def test_draws_in_plates(name):
    make = DENSITIES[name]

    def drawn(plate, of=make):
        def model():
            with plate():
                return numpyro.sample("y", of())

        return jax.eval_shape(handlers.seed(model, 0)).shape

    assert drawn(outputs()) == (3, N)
    for plate in (rows, minibatch):
        with pytest.raises(ValueError, match=rf"{name} is one joint distribution of its {N} rows, and plate 'rows'"):
            drawn(plate)

    def expanded():
        fn = make().expand([N])
        with numpyro.plate("functions", N):
            return numpyro.sample("y", fn)

    assert jax.eval_shape(handlers.seed(expanded, 0)).shape == (N, N)


def test_whitened_draws_in_plates():
    def model(plate):
        config = {"f": npgp.neighbors.WhitenNNGP()}
        with plate(), handlers.reparam(config=config):
            return numpyro.sample("f", DENSITIES["NNGP"]())

    assert jax.eval_shape(handlers.seed(lambda: model(outputs()), 0)).shape == (3, N)
    with pytest.raises(ValueError, match="NNGP is one joint distribution"):
        jax.eval_shape(handlers.seed(lambda: model(rows), 0))


def test_what_are_no_observations():
    for name in ("CollapsedGP", "ApproximateGP", "UncertainInputGP"):
        fn = DENSITIES[name]()
        with pytest.raises(ValueError, match="y has NaN"):
            fn.log_prob(np.where(Y > 0, Y, np.nan))
        with pytest.raises(ValueError, match=r"y has shape \(4, 3\); it must be \(\.\.\., 4\)"):
            fn.log_prob(SEVERAL.T)
        with pytest.raises(ValueError, match=r"y has shape \(4, 1\)"):
            fn.log_prob(Y[:, None])
