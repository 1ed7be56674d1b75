"""Observations: what is checked of y, mask and offset, and what a row that is missing adds to all that is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import npgp
from npgp.conditionals.base import Observations

Y = np.array([0.3, np.nan, -0.4, np.inf])
PRESENT = np.array([True, False, True, False])
MEAN, VARIANCE, OFFSET, NOISE = np.array([0.1, np.nan, 0.5, -0.2]), np.full(4, 0.7), 0.25, 0.3


def test_rows_that_are_missing_add_nothing_to_values_and_gradients(float64):
    rows = Observations.of(Y, npgp.Gaussian(variance=NOISE), (4,), mask=PRESENT, offset=OFFSET)

    @jax.jit
    def values(mean):
        weighted = Observations(rows.y, rows.likelihood, rows.offset, rows.present, jnp.array([2.0, 3.0, 1.0, 1.0]))
        elbos = [o.elbo(npgp.conditionals.Prior(), mean, 0.5 * VARIANCE, 0.5 * VARIANCE) for o in (rows, weighted)]
        return rows.log_marginal(mean, VARIANCE), *elbos

    total = MEAN + OFFSET
    marginal = stats.norm.logpdf(Y, total, np.sqrt(VARIANCE + NOISE))
    elbo = stats.norm.logpdf(Y, total, np.sqrt(NOISE)) - 0.5 * VARIANCE / NOISE
    expected = [np.where(PRESENT, terms, 0.0) for terms in (marginal, elbo, [2.0, 3.0, 1.0, 1.0] * elbo)]
    np.testing.assert_allclose(values(MEAN), expected, rtol=1e-12)
    slope = jax.jit(jax.grad(lambda m: sum(jnp.sum(v) for v in values(m))))(MEAN)
    by_hand = (Y - total) / (VARIANCE + NOISE) + (1.0 + np.array([2.0, 3.0, 1.0, 1.0])) * (Y - total) / NOISE
    np.testing.assert_allclose(slope, np.where(PRESENT, by_hand, 0.0), rtol=1e-12)


@pytest.mark.parametrize(
    "y, shape, options, words",
    [
        (np.zeros((2, 3)), (3, 2), {}, r"^y has shape \(2, 3\); it must be \(3, 2\): transpose it"),
        (np.zeros(3), (..., 2), {}, r"^y has shape \(3,\); it must be \(\.\.\., 2\)"),
        (np.zeros(()), (..., 2), {}, r"^y has shape \(\); it must be \(\.\.\., 2\)"),
        (Y, (4,), {}, "^y has NaN or infinite"),
        (Y, (4,), {"mask": "nan"}, "^y has infinite entries"),
        (
            np.zeros((2, 3)),
            (..., 3),
            {"mask": np.ones(3, bool)},
            r"^mask has shape \(3,\); it must be that of y",
        ),
        (np.zeros(3), (3,), {"offset": np.zeros(2)}, r"^offset has shape \(2,\), which does not broadcast"),
        (np.full(3, 0.5), (3,), {"mask": np.arange(3) < 2}, "^y has the value 0.5; for Bernoulli it must be 0 or 1"),
    ],
)
def test_what_is_refused(y, shape, options, words):
    with pytest.raises(ValueError, match=words):
        Observations.of(y, npgp.Bernoulli(), shape, **options)


def test_masks_broadcast_on_request():
    rows = Observations.of(np.ones((2, 3)), npgp.Bernoulli(), (..., 3), mask=np.arange(3) < 2, broadcast=True)
    np.testing.assert_array_equal(rows.present, [[True, True, False]] * 2)
    assert rows.shape == (2, 3)
