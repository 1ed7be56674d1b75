"""Training from several starts."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from test_gplvm import DATA, make_gplvm

import npgp
from npgp import training
from npgp.gplvm import fit_restarts
from npgp.training import FitResult

STEPS, FIRST = 30, 12
KEY = jax.random.key(0)


def run(gplvm, *starts, first_steps=FIRST):
    optim = npgp.adam(0.03, STEPS)
    Y = DATA.copy()
    return fit_restarts(gplvm, starts, KEY, STEPS, Y, optim=optim, first_steps=first_steps, progress=False)


def test_one_start_is_an_ordinary_fit(float64):
    gplvm = make_gplvm(conditional="prior")
    found = run(gplvm, gplvm.start, first_steps=STEPS)
    assert found.gplvm.start is gplvm.start and len(found.result.losses) == STEPS
    assert found.result.losses[-1] < found.result.losses[0]
    assert found.elbos[0] == pytest.approx(-found.result.losses[-1], rel=0.2)


def test_starts_that_fail_are_passed_over(monkeypatch):
    gplvm = make_gplvm()
    good, broken = gplvm.start, replace(gplvm.start, noise_variance=1e9)
    fits = []

    def fit(svi, key, num_steps, Y, init_state=None, **kwargs):
        nonlocal fits
        fits.append((num_steps, init_state))
        if svi.model.__self__.start.noise_variance == 1e9:
            raise npgp.training.NonFiniteLossError("The ELBO is nan at step 3.", 3, FitResult({}, None, np.zeros(3)))
        return FitResult({}, "state", np.arange(num_steps, dtype=float))

    monkeypatch.setattr(training, "fit", fit)
    monkeypatch.setattr(training, "evaluate", lambda *args, **kwargs: (-1.0, 0.1))
    with pytest.warns(UserWarning, match="start 0 is passed over: The ELBO is nan at step 3"):
        found = run(gplvm, broken, good)
    assert found.elbos == [-np.inf, -1.0] and found.gplvm.start is good
    assert fits == [(FIRST, None), (FIRST, None), (STEPS - FIRST, "state")]
    np.testing.assert_array_equal(found.result.losses, [*range(FIRST), *range(STEPS - FIRST)])

    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(npgp.training.NonFiniteLossError, match="step 3"),
    ):
        run(gplvm, broken)
    with pytest.raises(ValueError, match="starts has 0 entries"):
        run(gplvm)
