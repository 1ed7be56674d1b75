"""A GPLVM by one call: which start wins, what is handed on, and each kind of data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import compiled
from test_collapsed_gplvm import simulated

import npgp
from npgp.gplvm import BayesianGPLVM, GPLVMFit, fit
from npgp.gplvm.collapsed import CollapsedFit, Coordinates
from npgp.gplvm.race import (
    BEFORE_NARROWING,
    FEW_ROWS,
    FIRST_ROUND,
    NARROW_STEPS,
    SECOND_ROUND,
    _check_spread,
    _Climb,
    _race,
)
from npgp.training import lbfgs

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def trained() -> GPLVMFit:
    return fit(KEY, simulated()[1], 3, 8, max_steps=900, tolerance=1e-3, progress=False)


def test_it_finds_the_dimension_and_the_noise_in_double_precision(trained):
    """In JAX's single precision, where the collapsed bound itself would have no digit left."""
    _, Y = simulated()
    assert trained.converged and trained.params["x.loc"].dtype == jnp.float32
    assert np.all(np.diff(trained.bounds) > 0)
    assert trained.bound > 32.0  # the best of a hundred runs is 35.5, that with a second dimension -60
    assert trained.relevance.max() == 1.0 and np.sum(trained.relevance > 0.1) == 1
    assert 0.04**2 < trained.params["noise_variance"] < 0.07**2
    assert max(trained.race) <= trained.bound
    mean = compiled(lambda: trained.posterior.mean(trained.params["x.loc"]))()
    assert np.sqrt(np.mean((mean.T + trained.gplvm.start.offset - Y) ** 2)) < 0.06
    assert trained.latents.loc.shape == (40, 3)
    assert trained.likelihood.variance == trained.params["noise_variance"]


@pytest.mark.filterwarnings("ignore:npgp.gplvm.fit has not converged:RuntimeWarning")
def test_keys_decide_on_restarts_alone_and_missing_entries_need_no_svi():
    Y = simulated()[1]
    Y[2:9, 1] = np.nan
    options = dict(mask="nan", starts=[(0.4, 1.0), (0.3, 0.1, 5)], restarts=1, max_steps=20, progress=False)
    one, other = (fit(key, Y, 2, 6, **options) for key in jax.random.split(KEY))
    assert one.race.shape == (3,) and np.all((one.race == other.race) == [True, True, False])
    assert one.bound >= one.race.max() and "noise_variance" in one.params
    assert np.all(np.diff(one.bounds) > 0)  # the collapsed bound's throughout, of which SVI has none


@pytest.mark.parametrize("message, tries", [("stopped", 6), (lbfgs.INTERRUPTED, 1)])
def test_dimensions_are_narrowed_from_the_least_as_long_as_that_leads_higher(message, tries):
    """Until the bound falls twice or it is stopped; this one wants no third dimension, and the second as it is."""
    tried = []

    def climb(steps, params):
        least, second, _ = np.sort(npgp.gplvm.relevance(params))
        tried.append((second, least))
        bound = -least - 10.0 * (second < 0.3)
        return CollapsedFit(params, np.array([bound - 1.0, *[bound] * steps]), False, message)

    def finished(most: int) -> _Climb:
        loc = np.random.default_rng(0).normal(size=(20, 3))
        loc = loc / np.std(loc, axis=0) * np.array([0.1, 1.0, 0.5])
        one = _Climb(climb, {"x.loc": loc, "lengthscale": jnp.ones(3)}, most)
        one.found = one.found._replace(bounds=np.full(BEFORE_NARROWING + 1, -0.1))
        one.finish()
        return one

    one = finished(BEFORE_NARROWING + 9 * NARROW_STEPS)
    every = np.array([(0.5, 0.05), (0.5, 0.025), (0.5, 0.0125), (0.25, 0.00625), (0.125, 0.003125)])
    every = np.array([*every, (0.5, 0.0125)])  # back to the best, and on from there
    np.testing.assert_allclose(tried, every[:tries], rtol=1e-5)
    assert one.found.message == message
    assert one.found.steps == BEFORE_NARROWING + (9 if message == "stopped" else 1) * NARROW_STEPS
    np.testing.assert_allclose(one.bound, -every[2 if message == "stopped" else 0, 1], rtol=1e-5)
    tried.clear()
    finished(BEFORE_NARROWING + NARROW_STEPS - 1)  # too few steps to see anything
    np.testing.assert_allclose(tried, [(0.5, 0.1)], rtol=1e-5)


class Hill:
    """
    In place of a model: each step of a climb is a hundredth of the way to the height that its start leads to, which is
    the lower, or the higher, the wider its second dimension is.
    """

    def __init__(self, height: float, lower: float, climbs: list[tuple[float, int]], interrupted_at: int | None):
        self.height, self.lower, self.climbs, self.interrupted_at = height, lower, climbs, interrupted_at

    def init_params(self):
        loc = np.array([[1.0, 0.2], [-1.0, 0.2], [1.0, -0.2], [-1.0, -0.2]])
        return {"height": self.height, "lower": self.lower, "left": 100.0, "x.loc": loc, "lengthscale": np.ones(2)}

    def fit(self, Y, steps, *, params, **options):
        self.climbs.append((params["height"], steps))
        left = params["left"] * 0.99 ** np.arange(steps + 1)
        height = params["height"] - params["lower"] * np.min(npgp.gplvm.relevance(params))
        message = lbfgs.INTERRUPTED if len(self.climbs) == self.interrupted_at else "stopped"
        return CollapsedFit(params | {"left": left[-1]}, height - left, False, message)


@pytest.mark.parametrize("interrupted_at", [None, 3, 7, 11, 15])
def test_the_better_starts_go_on_each_round_and_an_interrupt_ends_all(interrupted_at):
    """The second is ahead until dimensions are narrowed, which the fourth is waiting for."""
    climbs: list[tuple[float, int]] = []
    heights = (3.0, 5.0, 1.0, 8.0, 2.0)
    hills = [Hill(h, {5.0: -1.0, 8.0: 18.0}.get(h, 0.0), climbs, interrupted_at) for h in heights]
    Y, words = np.zeros((FEW_ROWS + 1, 2)), "stopped" if interrupted_at is None else lbfgs.INTERRUPTED
    most = BEFORE_NARROWING + 2 * NARROW_STEPS + 50
    with pytest.warns(RuntimeWarning, match=words):
        model, found, race = _race(hills, Y, np.ones(Y.shape, bool), most, 1e-4, False)
    first, second, third = np.diff([0, FIRST_ROUND, SECOND_ROUND, BEFORE_NARROWING])
    every = [(height, first) for height in heights] + [(height, second) for height in (5.0, 8.0, 3.0, 2.0)]
    every += [(5.0, third), (5.0, NARROW_STEPS), (5.0, NARROW_STEPS), (5.0, most - BEFORE_NARROWING)]
    every += [(8.0, third), (8.0, NARROW_STEPS), (8.0, NARROW_STEPS), (8.0, 50)]
    assert climbs == every[:interrupted_at]
    assert model.height == (8.0 if interrupted_at in (None, 15) else 5.0)
    narrow = BEFORE_NARROWING, BEFORE_NARROWING + NARROW_STEPS
    assert found.steps == {3: FIRST_ROUND, 7: SECOND_ROUND, 11: narrow[0], 15: narrow[1], None: most}[interrupted_at]
    steps = np.arange(found.steps + 1)
    height = np.select([steps < narrow[0], steps < narrow[1]], [4.4, 6.2], 7.1) if model.height == 8.0 else 5.2
    if interrupted_at == 15:  # where the second narrowing would have begun
        height[-1] = 6.2
    np.testing.assert_allclose(found.bounds, height - 100.0 * 0.99**steps)
    started = [any(height == climbed for climbed, _ in climbs) for height in heights]
    np.testing.assert_array_equal(np.isfinite(race), started)
    if interrupted_at is None:
        assert found.bounds[-1] == race.max()
        left = 100.0 * 0.99 ** np.array([SECOND_ROUND, most, FIRST_ROUND, most, SECOND_ROUND])
        ends = np.array([3.0, 5.2, 1.0, 7.1, 2.0]) - left
        np.testing.assert_allclose(race, ends, atol=1e-4)


def test_coordinates_go_back_and_forth_and_a_lengthscale_moves_the_prior_alone(float64):
    from numpyro.distributions import constraints

    positive = dict.fromkeys(("lengthscale", "variance", "noise_variance", "x.scale"), constraints.positive)
    coordinates = Coordinates(positive | dict.fromkeys(("x.loc", "inducing"), constraints.real))
    rng = np.random.default_rng(0)
    params = {"x.loc": rng.normal(size=(5, 2)), "inducing": rng.normal(size=(3, 2)), "x.scale": np.full((5, 2), 0.3)}
    params |= {"lengthscale": np.array([0.5, 2.0]), "variance": np.array(1.5), "noise_variance": np.array(0.1)}
    free = coordinates.free(params)
    for name, value in coordinates.constrained(free).items():
        np.testing.assert_allclose(value, params[name], rtol=1e-12)
    moved = coordinates.constrained(free | {"lengthscale": free["lengthscale"] + 1.0})
    for name in ("x.loc", "inducing", "x.scale"):
        np.testing.assert_allclose(moved[name] / moved["lengthscale"], params[name] / params["lengthscale"])
    assert coordinates.scales(free).keys() == free.keys()


def test_scaled_coordinates_find_the_same_minimum_in_fewer_steps(float64):
    """Of a quadratic function with a condition of 1e8, of which the scales know all."""
    widths = jnp.logspace(-4, 0, 30)

    def loss(x):
        return jnp.sum(jnp.square((x - 1.0) / widths)) + jnp.sum(x**4)

    plain, scaled = (
        lbfgs.minimize(loss, jnp.zeros(30), tolerance=1e-9, window=10, scales=scales, progress=False)
        for scales in (None, lambda x: widths)
    )
    least = min(plain.losses.min(), scaled.losses.min())

    def steps(found):  # how a search ends is a matter of rounding
        return np.argmax(found.losses <= least * (1 + 1e-6)) if found.losses.min() <= least * (1 + 1e-6) else np.inf

    assert steps(scaled) < 0.5 * steps(plain)


def test_what_the_collapsed_bound_cannot_take_goes_on_by_svi():
    """Many rows of which some entries are missing."""
    Y = simulated()[1]
    Y[3:9, 2] = np.nan
    options = {"max_rows": 30, "batch_size": 20, "mask": "nan", "tolerance": 10.0, "progress": False}
    found = fit(KEY, Y, 2, 6, starts=[(0.4, 1.0)], max_steps=60, svi_steps=20, **options)
    assert isinstance(found.gplvm, BayesianGPLVM) and found.params["x.loc"].shape == (40, 2)
    assert np.isfinite(found.bound) and found.posterior.batch_shape == (5,) and "noise_variance" in found.params
    # SVI goes on from where the collapsed bound led, and not from anew.
    assert np.mean(found.bounds[-20:]) > 0.5 * (found.bounds[0] + found.bounds[-21])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"starts": []}, "starts is"),
        ({"starts": [(-1.0, 1.0)]}, "starts is"),
        ({"starts": [(0.3, 0.1, 8, 1)]}, "starts is"),
        ({"starts": [(0.3, 0.1, 8.5)]}, "whole number of neighbors"),
        ({"starts": (0.3, 0.1)}, "starts is .0.3, 0.1."),
        ({"max_steps": 0}, "max_steps"),
        ({"svi_steps": -1}, "svi_steps"),
        ({"restarts": -1}, "restarts"),
        ({"Y": np.full((9, 3), np.nan)}, 'by mask="nan"'),
        ({"Y": -np.eye(9, 3), "likelihood": npgp.Poisson()}, "value -1 in row 0, column 0"),
        ({"Y": np.full((9, 3), 0.1)}, "Y is constant in each column"),
        ({"Y": np.zeros((9, 3)), "likelihood": npgp.Poisson()}, "Y is constant in each column"),
    ],
)
def test_refused(options, words):
    with pytest.raises(ValueError, match=words):
        fit(KEY, **({"Y": np.zeros((9, 3)), "latent_dim": 2, "num_inducing": 3} | options))


def test_columns_of_unlike_units_are_named():
    """Not those that are constant, nor where the likelihood has a scale for each."""
    Y = np.random.default_rng(0).normal(size=(9, 4)) * [1.0, 30.0, 40.0, 0.0]
    Y[0, 1] = np.nan
    with pytest.warns(UserWarning, match=r"in columns \[1, 2\], but .* in columns \[0\], .*npgp.Standardizer.of"):
        _check_spread(Y, ~np.isnan(Y), named=True)
    _check_spread(Y, ~np.isnan(Y), named=False)
    _check_spread(Y[:, 1:], ~np.isnan(Y[:, 1:]), named=True)


def test_a_model_of_noise_alone_is_said_and_svi_begins_elsewhere():
    """Sparse counts without structure, to whose normal scores no dimension is relevant."""
    counts = np.random.default_rng(0).poisson(0.4, size=(16, 3)).astype(float)
    options: dict = {"starts": [(0.4, 1.0)], "max_steps": 300, "tolerance": 0.01, "progress": False}
    options["likelihood"] = npgp.Poisson()
    with pytest.warns(RuntimeWarning, match="found no relevant latent dimension: the functions are constant"):
        found = fit(KEY, counts, 1, 3, svi_steps=0, **options)
    assert found.message.endswith("no latent dimension is relevant")
    found = fit(KEY, counts, 1, 3, svi_steps=20, **options)
    assert found.message.startswith("no dimension is relevant to normal scores")
    assert len(found.bounds) == 20  # of SVI alone
    np.testing.assert_allclose(np.exp(found.gplvm.start.offset), counts.mean(0), rtol=1e-3)
    assert "noise_variance" not in found.params
    assert np.std(found.params["x.loc"]) > 0.3  # near the principal component, of variance 1
    means = np.asarray(found.posterior.mean(found.params["x.loc"]))
    assert np.std(means, axis=1).max() > 0.01
