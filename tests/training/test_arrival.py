"""Training until the posterior has arrived."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from models import rbf
from numpyro.distributions import biject_to, constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

import npgp
from npgp.training import Arrival, arrival

NOISE = 0.1
RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0, 4, 15))[:, None]
Y = np.sin(2 * X[:, 0]) + 0.7 + 0.3 * RNG.normal(size=15)


def model(X, y, size=None):
    """A level beside a function: in the posterior they trade off."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    f = npgp.SparseGP("f", npgp.RBF(1.0), jnp.asarray(X), jitter=1e-10).draw()
    with numpyro.plate("data", size or len(X), subsample_size=None if size is None else len(X)):
        npgp.observe("y", f(X) + level, npgp.Gaussian(variance=NOISE), obs=y)


def svi_of(rate, model=model, dependence="pseudo-data", draws=1):
    guide = npgp.AutoSparseGP(model, dependence=dependence)
    return SVI(model, guide, npgp.adam(rate), TraceMeanField_ELBO(num_particles=draws))


def exact():
    """Mean and standard deviation of the level by dense algebra."""
    C = rbf(X, X, 1.0, 1.0) + NOISE * np.eye(15)
    precision = 1 / 4.0 + np.sum(np.linalg.inv(C))
    return np.sum(np.linalg.solve(C, Y)) / precision, precision**-0.5


@pytest.mark.parametrize(("rate", "dependence"), [(0.1, "pseudo-data"), (0.01, "sites")])
def test_it_arrives_from_any_rate(rate, dependence):
    """float32, as users have it; the fixed steps that the other guide would need are many thousands."""
    svi = svi_of(rate, dependence=dependence, draws=4)
    result = npgp.fit(svi, jax.random.key(0), None, X, y=Y, progress=False)
    mean, deviation = exact()
    found = result.params["joint_scale_tril"][0, 0]
    assert abs(result.params["joint_loc"][0] - mean) < 0.15 * deviation
    assert abs(found / deviation - 1) < 0.1
    convergence = result.convergence
    assert convergence.arrived
    assert convergence.steps == len(result.losses) == sum(steps for _, steps in convergence.rates)
    assert convergence.rates[0][0] == pytest.approx(rate)
    assert max([*convergence.moved.values(), *convergence.widened.values()]) < 0.15
    assert {"level", "f.u"} <= convergence.moved.keys()
    assert "the posterior stands still" in str(convergence)


def test_what_has_not_arrived_is_said(monkeypatch):
    monkeypatch.setattr(arrival, "FAR_AFTER", 150)
    monkeypatch.setattr(arrival, "FAR", 1)
    svi, moves = svi_of(0.001), "steps '(level|f.u)' still moves, by .* of its"
    with (
        pytest.warns(npgp.training.TrainingWarning, match=rf"after 179 {moves} .* takes about \d+ steps more. Larger"),
        pytest.warns(npgp.training.TrainingWarning, match=rf"after 200 {moves} .* about \d+ more are to come. Give"),
    ):
        result = npgp.fit(
            svi, jax.random.key(0), None, X, Y, callbacks=[Arrival(window=25, max_steps=200)], progress=False
        )
    assert not result.convergence.arrived
    assert len(result.losses) == 200
    with pytest.warns(npgp.training.TrainingWarning, match="50 steps are too few to see whether the posterior still"):
        npgp.fit(svi, jax.random.key(0), None, X, Y, callbacks=[Arrival(max_steps=50)], progress=False)
    assert "the posterior still moves" in str(result.convergence)


@pytest.mark.parametrize(("power", "ahead"), [(1.0, 800), (0.0, 800), (3.0, 300)])
def test_steps_ahead_are_those_of_a_power_law(power, ahead):
    """
    By which .5 at 200 steps falls to .1: at 1000 by the power 1; and two looks of 20 steps. Slower than noise, and
    faster, is not believed.
    """
    history = [(step, {"f": 0.5 * (200 / step) ** power, "level": 0.01}) for step in range(20, 201, 20)]
    assert arrival.steps_ahead(history, 0.1) == float(f"{ahead:.1g}")
    assert arrival.steps_ahead(history[:3], 0.1) is None
    assert arrival.steps_ahead(history, 0.6) is None


def test_only_npgps_adam_has_a_rate_to_lower():
    svi = SVI(model, npgp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO())
    with pytest.raises(TypeError, match=r"the optimizer is not npgp.adam\(learning_rate\)"):
        npgp.fit(svi, jax.random.key(0), None, X, Y, progress=False)
    # With natural gradients of q(ε) it has.
    inner = npgp.natural_gradient(0.5, npgp.adam(0.05))
    svi = SVI(model, npgp.AutoSparseGP(model, dependence="pseudo-data"), inner, TraceMeanField_ELBO())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", npgp.training.TrainingWarning)
        result = npgp.fit(
            svi, jax.random.key(0), None, X, Y, callbacks=[Arrival(window=20, max_steps=60)], progress=False
        )
    assert result.convergence.steps == 60


def test_adam_without_steps_is_adam_and_averages():
    params = {"a": jnp.asarray([1.0, -2.0]), "b": jnp.asarray(3.0)}
    ours, theirs = npgp.adam(0.1), optax.adam(0.1)
    x, state, y, other = params, ours.init(params), params, theirs.init(params)
    seen = []
    for _ in range(5):
        updates, state = ours.update(jax.tree.map(lambda x: 2.0 * x, x), state, x)
        x = optax.apply_updates(x, updates)
        updates, other = theirs.update(jax.tree.map(lambda y: 2.0 * y, y), other, y)
        y = optax.apply_updates(y, updates)
        seen.append(x)
    for name in params:
        np.testing.assert_allclose(x[name], y[name], rtol=1e-6)
        np.testing.assert_allclose(state.averages[name], np.mean([one[name] for one in seen], axis=0), rtol=1e-6)


def gaussian_of(target, scale, loc, L):
    """The guide's parameters of N(loc, L Lᵀ), and −ELBO's gradient in them where the posterior is N(target, scale²)."""
    to = biject_to(constraints.scaled_unit_lower_cholesky)

    def loss(params):
        L = to(params["joint_scale_tril"])
        left = jnp.linalg.solve(scale, jnp.column_stack([params["joint_loc"] - target, L]))
        return 0.5 * jnp.sum(left**2) - jnp.sum(jnp.log(jnp.diag(L)))

    params = {"joint_loc": jnp.asarray(loc), "joint_scale_tril": to.inv(jnp.asarray(L)), "other": jnp.zeros(3)}
    return params, jax.grad(loss)(params)


@pytest.mark.parametrize("far", [1e-3, 1e3])
def test_the_guides_gaussian_steps_along_natural_gradients(far, float64):
    """
    Expected: as NumPy has it, μ − ρ L Lᵀ ∂μ and L (I − ρ Φ); at most half a unit of the Gaussian's own; and at a tenth
    of the rate a tenth of that. Whatever the rate is, if it is not 0.
    """
    scale = np.tril(RNG.normal(size=(3, 3)), -1) + np.diag([1e-3, 1.0, 50.0])  # the posterior's
    L = scale @ (np.eye(3) + 0.1 * far * np.tril(np.ones((3, 3)), -1))
    loc = scale @ (far * np.ones(3))
    params, gradient = jax.jit(lambda: gaussian_of(np.zeros(3), scale, loc, L))()
    to = biject_to(constraints.scaled_unit_lower_cholesky)

    @partial(jax.jit, static_argnames="learning_rate")
    def moved_by(learning_rate, factor):
        optimizer = npgp.adam(learning_rate)
        state = optimizer.init(params)
        steps, state = optimizer.update(gradient, state._replace(factor=jnp.asarray(factor)), params)
        moved = optax.apply_updates(params, steps)
        return moved, to(moved["joint_scale_tril"]), state.averages

    precision = np.linalg.inv(scale @ scale.T)
    d, Phi = L.T @ precision @ loc, np.tril(L.T @ precision @ L - np.eye(3))
    Phi[np.diag_indices(3)] /= 2
    for learning_rate, share in [(0.05, 1.0), (0.002, 1.0), (0.0, 0.0)]:
        moved, new_L, averages = moved_by(learning_rate, 1.0)
        new_loc = moved["joint_loc"]
        rate = share * min(0.1, 0.5 / np.sqrt(np.sum(d**2) + np.sum(Phi**2)))
        np.testing.assert_allclose(new_loc, loc - rate * L @ d, rtol=1e-8)
        change = np.diag(np.exp(-rate * np.diag(Phi))) - rate * np.tril(Phi, -1)
        np.testing.assert_allclose(new_L, L @ change, rtol=1e-8, atol=1e-8 * np.max(np.abs(L)))
        np.testing.assert_array_equal(moved["other"], 0.0)
        np.testing.assert_allclose(averages["joint_loc"], new_loc, rtol=1e-12)
    rate = 0.1 * min(0.1, 0.5 / np.sqrt(np.sum(d**2) + np.sum(Phi**2)))
    np.testing.assert_allclose(moved_by(0.05, 0.1)[0]["joint_loc"], loc - rate * L @ d, rtol=1e-8)


def test_natural_steps_take_no_notice_of_units(float64):
    """Twenty steps where the posterior is narrow, long and askew are those where it is N(0, I), in other units."""
    A = np.tril(RNG.normal(size=(3, 3)), -1) + np.diag([1e-3, 1.0, 50.0])
    ends = []
    to = biject_to(constraints.scaled_unit_lower_cholesky)
    for unit in (np.eye(3), A):
        optimizer = npgp.adam(0.05)

        @jax.jit
        def start(unit=unit, optimizer=optimizer):
            params, _ = gaussian_of(np.zeros(3), unit, unit @ np.full(3, 4.0), 0.3 * unit)
            return params, optimizer.init(params)

        @jax.jit
        def step(params, state, unit=unit, optimizer=optimizer):
            L = to(params["joint_scale_tril"])
            _, gradient = gaussian_of(np.zeros(3), unit, params["joint_loc"], L)
            steps, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, steps), state

        params, state = start()
        for _ in range(20):
            params, state = step(params, state)
        loc, L = params["joint_loc"], jax.jit(lambda x: to(x))(params["joint_scale_tril"])
        ends.append((np.linalg.solve(unit, loc), np.linalg.solve(unit, L)))
    np.testing.assert_allclose(ends[1][0], ends[0][0], rtol=1e-7)
    np.testing.assert_allclose(ends[1][1], ends[0][1], rtol=1e-7, atol=1e-9)
    assert np.max(np.abs(ends[0][0])) < 3.0


def test_it_goes_on_from_a_checkpoint(tmp_path):
    def trained(num_steps, folder):
        checkpoints = npgp.training.Checkpoints(tmp_path / folder, every=10)
        until = Arrival(window=20, max_steps=150, draws=16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", npgp.training.TrainingWarning)
            return npgp.fit(
                svi_of(0.05),
                jax.random.key(0),
                num_steps,
                X,
                Y,
                callbacks=[until],
                checkpoints=checkpoints,
                progress=False,
            )

    whole = trained(None, "whole")
    assert len(trained(90, "cut").losses) == 90
    again = trained(None, "cut")
    np.testing.assert_array_equal(again.losses, whole.losses)
    for name, value in whole.params.items():
        np.testing.assert_array_equal(again.params[name], value)
    assert again.convergence == whole.convergence


def test_minibatches_arrive_too():
    svi = svi_of(0.05, lambda X, y: model(X, y, size=15))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", npgp.training.TrainingWarning)
        result = npgp.fit(
            svi,
            jax.random.key(0),
            None,
            X,
            Y,
            batch_size=5,
            callbacks=[Arrival(window=20, max_steps=100)],
            progress=False,
        )
    assert {"level", "f.u"} <= result.convergence.moved.keys()


def trade_offs(rate, steps, key=0):
    """NumPyro's guide of the level, which takes long, and pseudo-data, for a number of steps."""
    guide = npgp.AutoSparseGP(model, AutoMultivariateNormal, dependence="pseudo-data")
    svi = SVI(model, guide, npgp.adam(rate, steps), TraceMeanField_ELBO())
    return svi, lambda **options: npgp.fit(svi, jax.random.key(key), steps, X, Y, progress=False, **options)


def test_too_few_steps_are_said():
    """The level's interval is a fifth of the exact one there; where it is right, nothing is said."""
    _, deviation = exact()
    _, fit = trade_offs(0.0005, 400)
    with pytest.warns(
        npgp.training.TrainingWarning, match=r"from the third fifth of the 400 steps .* the ELBO rose by"
    ):
        few = fit()
    assert few.params["auto_scale_tril"][0, 0] < 0.5 * deviation
    _, fit = trade_offs(0.1, 3000)
    enough = fit()  # warnings are errors
    assert abs(enough.params["auto_scale_tril"][0, 0] / deviation - 1) < 0.15
    assert enough.convergence.arrived and not few.convergence.arrived
    assert enough.convergence.gain < 0.1 < 0.3 < few.convergence.gain
    assert [step for step, _ in few.convergence.history] == [160, 240, 320, 400]
    assert "400 steps (from the third fifth to the last): the ELBO rose by" in str(few.convergence)


def test_the_gain_is_of_averages():
    """The averages, and the ELBO at them by many draws, from a loop of steps."""
    svi, fit = trade_offs(0.02, 400)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", npgp.training.TrainingWarning)
        found = fit().convergence
    step = npgp.training.Step(svi)

    def one(state, _):
        state, _ = step(state, X, y=Y)
        return state, svi.optim.get_params(state.optim_state)

    _, values = jax.jit(lambda s: jax.lax.scan(one, s, length=400))(step.init(jax.random.key(0), X, y=Y))
    keys = jax.random.split(jax.random.key(7), 2000)

    @jax.jit
    def losses(values):
        params = svi.constrain_fn(values)
        return jax.lax.map(lambda key: svi.loss.loss(key, params, model, svi.guide, X, Y), keys)

    third, last = ({name: jnp.mean(x[i:j], 0) for name, x in values.items()} for i, j in ((160, 240), (320, 400)))
    gains = np.asarray(losses(third) - losses(last))
    assert abs(found.gain - gains.mean()) < 4 * gains.std() / 8


def test_a_number_of_steps_goes_on_from_a_checkpoint(tmp_path):
    def trained(stop, folder):
        _, fit = trade_offs(0.05, 410)
        checkpoints = npgp.training.Checkpoints(tmp_path / folder, every=10)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", npgp.training.TrainingWarning)
            return fit(checkpoints=checkpoints, callbacks=[Stop(stop)])

    whole = trained(None, "whole")
    assert len(trained(300, "cut").losses) == 300
    assert trained(None, "cut").convergence == whole.convergence


class Stop(npgp.training.Callback):
    """Ends a training after a number of steps."""

    def __init__(self, steps):
        self.steps = steps

    def until(self, step):
        return None if self.steps is None else max(self.steps - step, 1)

    def __call__(self, training):
        return training.step == self.steps
