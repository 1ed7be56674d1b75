"""Callbacks are called between device calls, in order, and may end a training or set its state."""

import jax
import numpy as np
import numpyro
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO

import npgp
from npgp.training import Callback, Checkpoints, Monitor

KEY = jax.random.key(0)


def counting():
    """A model of one parameter that is the number of steps."""

    def model():
        numpyro.factor("f", numpyro.param("a", 0.0))

    return SVI(model, lambda: None, optax.sgd(1.0), Trace_ELBO())


class Noted(Callback):
    """Keeps what it saw; called after multiples of ``every``; ends the training, or fails, where it is told to."""

    def __init__(self, every=None, stop=None, fail=None):
        self.every, self.stop, self.fail, self.seen, self.calls = every, stop, fail, [], []

    def begin(self, training):
        self.seen.append(("begin", training.step))

    def until(self, step):
        return None if self.every is None else self.every - step % self.every

    def __call__(self, training):
        self.calls.append(training.step)
        if self.every is None or training.step % self.every == 0:
            self.seen.append((training.step, len(training.losses), float(training.params["a"])))
        if training.step == self.fail:
            raise KeyError("fail")
        return training.step == self.stop

    def end(self, training, error):
        self.seen.append(("end", training.step, type(error)))

    def snapshot(self):
        return {"seen": np.array([entry[0] for entry in self.seen if isinstance(entry[0], int)], int)}

    def restore(self, snapshot, params):
        self.seen += [("restored", *snapshot.get("seen", ())), sorted(params)]


def fit(num_steps=10, **options):
    return npgp.fit(counting(), KEY, num_steps, progress=False, **options)


def test_they_are_called_when_they_want_to_be():
    noted, other = Noted(every=4), Noted(every=3)
    result = fit(callbacks=[noted, other])
    assert noted.calls == [4, 8] and other.calls == [3, 6, 9]
    assert noted.seen == [("begin", 0), (4, 4, 4.0), (8, 8, 8.0), ("end", 10, type(None))]
    noted = Noted(every=4)  # over continuations
    fit(3, callbacks=[noted], init_state=result.state)
    assert noted.seen == [("begin", 10), (12, 2, 12.0), ("end", 13, type(None))]
    noted = Noted()
    fit(6, callbacks=[noted], steps_per_call=3)
    assert noted.seen[1:3] == [(3, 3, 3.0), (6, 6, 6.0)]


def test_one_ends_the_training_and_all_hear_of_it():
    noted = Noted(every=2)
    assert len(fit(callbacks=[Noted(every=3, stop=6), noted]).losses) == 6
    assert noted.seen[-2:] == [(6, 6, 6.0), ("end", 6, type(None))]
    with pytest.raises(KeyError):
        fit(callbacks=[noted, Noted(every=4, fail=8)])
    assert noted.seen[-2:] == [(8, 8, 8.0), ("end", 8, KeyError)]
    with pytest.raises(TypeError, match="callbacks is .*; it must be a list"):
        fit(callbacks=noted)
    with pytest.raises(TypeError, match=r"callbacks has <built-in function print>; each must be an npgp.training.Ca"):
        fit(callbacks=[print])


def test_as_many_steps_as_it_takes(tmp_path):
    assert len(fit(None, callbacks=[Noted(every=3, stop=12)]).losses) == 12
    monitor = Monitor(lambda params: abs(float(params["a"]) - 6.0), every=3, patience=2)
    assert len(fit(None, monitor=monitor, checkpoints=Checkpoints(tmp_path)).losses) == 12

    class Interrupted(Callback):
        def __call__(self, training):
            if training.step == 8:
                raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="Interrupted: 8 steps were taken"):
        result = fit(None, callbacks=[Interrupted()], steps_per_call=4)
    assert len(result.losses) == 8
    with pytest.raises(TypeError, match="num_steps is None, and the optimizer is not npgp.adam"):
        fit(None, monitor=Monitor(lambda params: 0.0))


def test_training_goes_on_from_a_state_that_is_set():
    class Back(Callback):
        """To where it was after two steps, once."""

        def until(self, step):
            return 1

        def __call__(self, training):
            if training.step == 2:
                self.state = training.state
            if training.step == 5:
                optim = self.state.optim_state
                training.state = training.state._replace(optim_state=(training.state.optim_state[0], optim[1]))

    assert float(fit(callbacks=[Back()]).params["a"]) == 10 - 3


def test_checkpoints_have_what_they_keep(tmp_path):
    def both(fail=None):
        return [Noted(every=3), Noted(every=4, fail=fail)]

    first, second = both(fail=8)
    with pytest.raises(KeyError):
        fit(callbacks=[first, second], checkpoints=Checkpoints(tmp_path, steps=5))
    first, second = both()
    monitor = Monitor(lambda params: float(params["a"]), every=5)
    result = fit(callbacks=[first, second], checkpoints=Checkpoints(tmp_path, steps=5), monitor=monitor)
    assert len(result.losses) == 10
    # Those of the checkpoint at 5 steps; the monitor, which that run did without, begins there.
    assert first.seen == [("begin", 0), ("restored", 3), ["a"], (6, 6, 6.0), (9, 9, 9.0), ("end", 10, type(None))]
    assert second.seen[:3] == [("begin", 0), ("restored", 4), ["a"]]
    assert monitor.history == [(5, 5.0), (10, 10.0)]
