"""What is said of a training by its losses, and of which nothing is said."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO

from npgp.training import TrainingWarning, fit
from npgp.training.convergence import verdict

ROWS = 100


def losses(start, end, steps=2000, time=0.05, noise=1.0, seed=0, tails=False):
    """From a start to an end, exponentially, in units of the number of steps, and with noise."""
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 1, steps)
    errors = rng.standard_t(2, steps) if tails else rng.normal(size=steps)
    return end + (start - end) * np.exp(-t / time) + noise * errors


@pytest.mark.parametrize(
    "curve",
    [
        {"start": 1e3, "end": 300.0},
        {"start": 1e6, "end": 300.0},
        {"start": 1e3, "end": 300.0, "noise": 60.0},  # of minibatches
        {"start": 1e3, "end": 300.0, "noise": 20.0, "tails": True},
        {"start": 301.0, "end": 300.0, "noise": 0.01},  # from the optimum
        {"start": 300.0, "end": 300.0, "noise": 0.0},
        {"start": 1e3, "end": 300.0, "time": 0.2, "noise": 5.0},
        {"start": 1e3, "end": 300.0, "time": 0.05, "steps": 500, "noise": 30.0},
    ],
    ids=str,
)
def test_nothing_is_said_of_a_training_that_went_well(curve):
    for seed in range(50):
        assert verdict(losses(**curve, seed=seed), ROWS) is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [0.0, 1.0, 20.0])
def test_a_training_that_has_not_arrived(noise, seed):
    for time in (0.5, 1.0, 10.0):  # 10: a straight line
        words = verdict(losses(1e4, 300.0, time=time, noise=noise, seed=seed), ROWS)
        assert "was still falling after 2000 steps" in words
    # Whatever it began with.
    slow = losses(1e4, 300.0, time=1.0, noise=noise, seed=seed)
    slow[:150] += 1e9
    assert "was still falling" in verdict(slow, ROWS)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [0.0, 1.0, 20.0])
def test_a_training_that_ends_above_where_it_was(noise, seed):
    up = losses(1e4, 300.0, noise=noise, seed=seed) + 500.0 * np.linspace(-1.5, 1, 2000).clip(0) ** 2
    words = verdict(up, ROWS)
    assert "after 2000 steps, and was " in words and "take a smaller learning rate" in words
    # Not for a few outliers at the end.
    spikes = losses(1e4, 300.0, noise=noise, seed=seed)
    spikes[-50:] += 1e6
    assert verdict(spikes, ROWS) is None


def test_words_are_of_these_steps_and_levels():
    # In tenths of 200 steps: the lowest is the fourth, around step 700; the sixth is half-way.
    levels = np.repeat([900.0, 700.0, 500.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 850.0], 200)
    words = verdict(levels, ROWS)
    assert "the loss is 850 after 2000 steps, and was 300 after 700:" in words and "npgp.adam(rate, 2000)" in words
    falling = verdict(np.repeat(np.arange(1000.0, 0.0, -100.0), 200), ROWS)
    assert "still falling after 2000 steps, from 500 half-way to 100:" in falling
    # Normal noise of deviation s moves the loss by about s·√2 from one step to the next: s is what is named.
    noisy = verdict(np.random.default_rng(0).normal(scale=5e4, size=20_000), ROWS)
    spread, by_row = (float(words.split()[0].rstrip(",")) for words in noisy.split("varies by ")[1].split("next, "))
    assert spread == pytest.approx(5e4, rel=0.05) and by_row == pytest.approx(spread / ROWS, rel=0.01)


def test_a_training_in_nothing_but_noise():
    lost = losses(1e6, 1e5, noise=5e4, tails=True)
    assert "so gradients are noise" in verdict(lost, ROWS)
    assert verdict(lost, 0) is None and verdict(lost, 1000 * ROWS) is None


def test_trials_and_small_changes():
    assert verdict(losses(1e4, 300.0, steps=499, time=1.0), ROWS) is None
    # Falls that are small for so many rows.
    drift = losses(300.0, 0.0, time=1.0, noise=0.0) / 10
    assert verdict(drift, ROWS) is not None and verdict(drift, 100 * ROWS) is None


def test_fit_warns():
    def model(start):
        numpyro.factor("f", -jnp.exp(numpyro.param("a", start)))

    svi = SVI(model, lambda start: None, optax.adam(0.01), Trace_ELBO())

    def run(start, **options):
        return fit(svi, jax.random.key(0), 600, start, progress=False, **options)

    run(-3.0)
    with pytest.warns(TrainingWarning, match="npgp.fit: the loss was still falling after 600 steps"):
        run(12.0)

    # A loss that follows a schedule is another one at each step.
    def scheduled(start, t):
        model(start)

    svi = SVI(scheduled, lambda *args, **kwargs: None, optax.adam(0.01), Trace_ELBO())
    run(12.0, steps="t")
