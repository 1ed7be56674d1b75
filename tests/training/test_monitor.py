"""Evaluation during training and early stopping."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO

import npgp

KEY = jax.random.key(0)


def no_guide(*args, **kwargs):
    pass


def record(monitor, values):
    """Evaluate to these values, after 10, 20, … steps; after how many of them training should stop."""
    remaining = iter(values)
    monitor.metric = lambda params: next(remaining)
    for i in range(1, len(values) + 1):
        if monitor.record(10 * i, {"number": np.array(i)}):
            return i
    return None


@pytest.mark.parametrize(
    "values, options, stops, best",
    [
        ([3, 2, 1, 2, 1.5, 0], dict(patience=2), 5, 3),
        ([3, 2, 1, 2, 1.5, 0], dict(patience=3), None, 6),
        ([3, 2, 1, 2, 1.5, 4], dict(), None, 3),
        ([1, 2, 3, 2, 2.5, 4], dict(patience=2, mode="max"), 5, 3),
        ([1, 1, 1], dict(patience=2), 3, 1),  # as good is not better
        ([3, 2.9, 2.8, 2.7], dict(patience=2, min_delta=0.25), 3, 1),
        ([3, 2.9, 2.8, 2.7], dict(patience=3, min_delta=0.25), None, 4),
        ([np.inf, np.inf, 5, 6], dict(patience=2), None, 3),
    ],
)
def test_patience(values, options, stops, best):
    """Counted by hand: when training stops, and which evaluation is the best."""
    monitor = npgp.training.Monitor(abs, **options)
    assert record(monitor, values) == stops
    assert monitor.stopped == (stops is not None)
    assert monitor.best == (10 * best, values[best - 1], {"number": best})
    assert monitor.history == [(10 * (i + 1), x) for i, x in enumerate(values[:stops])]

    # What is restored has the same history, and stops at the same evaluation.
    again = npgp.training.Monitor(abs, **options)
    again.restore(monitor.snapshot(), {"number": 0})
    assert (again.history, again.best, again.stopped) == (monitor.history, monitor.best, monitor.stopped)
    again.restore({}, {})
    assert (again.history, again.best, again.stopped) == ([], None, False)


def test_a_metric_that_is_nan():
    """It is no improvement, which is said once, and no error: a long run is not lost by it."""
    monitor = npgp.training.Monitor(abs, patience=3)
    with pytest.warns(UserWarning, match="metric is NaN after 20 steps") as caught:
        assert record(monitor, [2.0, np.nan, np.nan, 1.0]) is None
    assert len(caught) == 1
    assert monitor.best.step == 40
    monitor.reset()
    with pytest.warns(UserWarning, match="after 10 steps"):
        assert record(monitor, [np.nan, np.nan, np.nan]) == 3
    assert monitor.best is None
    assert monitor.snapshot().keys() == {"steps", "values"}


@pytest.mark.parametrize("value", [np.ones(1), jnp.ones(3), None, "0.5", 1j])
def test_a_metric_is_one_number(value):
    with pytest.raises(TypeError, match=r"metric returned .*, not one number"):
        npgp.training.Monitor(lambda params: value).record(1, {})


def test_numbers_of_all_kinds():
    for value in (2, 2.0, np.float32(2), jnp.asarray(2.0), True + 1):
        monitor = npgp.training.Monitor(lambda params, value=value: value)
        monitor.record(1, {})
        assert monitor.history == [(1, 2.0)] and type(monitor.history[0][1]) is float


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(every=0), "every is 0"),
        (dict(patience=0), "patience is 0"),
        (dict(mode="least"), "mode is 'least'"),
        (dict(min_delta=-1.0), "min_delta is -1.0"),
        (dict(min_delta=np.nan), "min_delta is nan"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        npgp.training.Monitor(abs, **options)


def counting():
    """A model of one parameter that is the number of steps."""

    def model():
        numpyro.factor("f", numpyro.param("a", 0.0))

    return SVI(model, no_guide, optax.sgd(1.0), Trace_ELBO())


def distance(params):
    return abs(float(params["a"]) - 27.0)


@pytest.mark.parametrize("steps_per_call", [None, 1, 7])
def test_fit_stops_early(steps_per_call):
    """Evaluations are after multiples of ``every``, and training stops after one, however steps are cut into calls."""
    monitor = npgp.training.Monitor(distance, every=4, patience=3)
    options = dict(monitor=monitor, steps_per_call=steps_per_call, progress=False)
    svi = counting()
    result = npgp.fit(svi, KEY, 100, **options)
    steps = list(range(4, 41, 4))
    assert monitor.history == [(step, abs(step - 27.0)) for step in steps]
    assert monitor.stopped and monitor.best == (28, 1.0, {"a": 28.0})
    assert isinstance(monitor.best.params["a"], np.ndarray)
    assert float(result.params["a"]) == len(result.losses) == 40

    # A fit starts it afresh; its continuation does not.
    first = npgp.fit(svi, KEY, 30, **options)
    assert monitor.history == [(step, abs(step - 27.0)) for step in steps[:7]] and not monitor.stopped
    rest = npgp.fit(svi, KEY, 100, init_state=first.state, **options)
    assert monitor.history[-1] == (40, 13.0) and monitor.best.step == 28
    assert float(rest.params["a"]) == 40 and len(rest.losses) == 10


def test_best_params_are_no_part_of_the_device():
    """Row tables are written over in place; what was best stays as it was."""
    target = np.arange(6.0, dtype=np.float32)[:, None]

    def model(rows):
        table = npgp.model.row_param("table", np.zeros((6, 1), np.float32), rows)
        numpyro.factor("f", -jnp.sum((table - jnp.asarray(target)[rows]) ** 2))

    svi = SVI(model, no_guide, npgp.adam(0.1), Trace_ELBO())
    options = dict(row_optim=npgp.training.row_adam(0.1), progress=False)
    rows = np.arange(6)
    seen = {}

    def metric(params):
        seen[len(seen) + 1] = np.array(params["table"])
        return abs(len(seen) - 3)

    monitor = npgp.training.Monitor(metric, every=5)
    npgp.fit(svi, KEY, 30, rows, monitor=monitor, **options)
    assert monitor.best.step == 15
    np.testing.assert_array_equal(monitor.best.params["table"], seen[3])
    assert np.all(seen[3][1:] != seen[6][1:])
    alone = npgp.fit(svi, KEY, 15, rows, **options)
    np.testing.assert_array_equal(monitor.best.params["table"], alone.params["table"])
