"""
Whether the guide's posterior has arrived: training until it has, which is what ``npgp.fit(svi, rng_key, None, ...)``
does, and what is said of a given number of steps.

The loss does not say so: its last ten nats, in which intervals widen threefold, are a small share of what it moved by.
So the posterior itself is watched. Parameters are averaged over windows of steps at one learning rate; draws from the
guide at two averages, by the same random numbers, say by how many of its standard deviations each latent value has
moved, and by how much these have changed. Where that is little, or no longer falls while the loss gains nothing, what
is left is the noise of that rate: the rate falls, windows grow, and when a lower rate no longer changes the posterior,
training has arrived (after Welandawe, Andersen, Vehtari & Huggins 2022, arXiv 2203.15945).

A given number of steps is looked at in fifths. As rates fall along a schedule everything comes to rest, so that drifts
of the last fifth do not tell what stands still from what can no longer move: one in which a level has a fifth of its
standard deviation may drift less than one that has it all but for 3%. What tells them apart is the ELBO at the averages
of the third and of the last fifth, by the same draws, in which most of the noise cancels.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro import handlers

from npgp import checks
from npgp.contract import constrained, unconstrained
from npgp.model.sites import is_latent
from npgp.programs.compiled import QUICK, STEPS, Program, one_model_at_a_time
from npgp.training.callbacks import Callback
from npgp.training.convergence import TrainingWarning
from npgp.training.optimizers import Averaging
from npgp.training.run import Training

__all__ = ["Arrival", "Convergence", "Fifths", "sentence"]

#: By what the learning rate falls.
FALL = 0.3
#: A lower rate may change the posterior by so many times the tolerance.
OF_RATE = 1.5
#: What is no longer less than so much of its median has stopped falling.
STALLED = 0.7
#: A window at the first rate is this share of all steps before, and at most so many times the first window.
SHARE, LONGER = 1 / 3, 5.0
#: Windows at one rate.
MOST_WINDOWS = 60
#: Of what has one value and no standard deviation, such as a ``numpyro.param``, the share that counts as one.
OF_VALUE = 0.05
#: Looks that a trend is estimated from, at least, and the slowest and fastest in steps that is believed: what falls
#: more slowly is the noise of a rate, which is lowered then.
LEAST_LOOKS, SLOWEST, FASTEST = 4, 1.0, 2.0
#: Arrival is far where, after so many steps, it is more than so many ahead.
FAR_AFTER, FAR = 5000, 20_000
#: Trainings of fewer steps than this are trials, of which nothing is said.
LEAST_STEPS = 400
#: Number of evaluations of the loss at each look at such a training.
DRAWS = 64
#: What the ELBO may rise by in the second half of the steps, in nats, in nats for each row, and in standard errors.
NATS, NATS_PER_ROW, ERRORS = 0.3, 0.005, 3.0


#: What is said where steps are many.
FEWER_STEPS = (
    "Larger batches and several draws a step (num_particles=4) take fewer; where the GP is all that is to be learned, "
    "npgp.CollapsedGP with npgp.fit_collapsed takes some dozens, with all rows at each, as does npgp.gplvm.fit for a "
    "GPLVM."
)


#: By site, by how many standard deviations means moved, and by how much their logarithms changed.
Drift: TypeAlias = tuple[dict[str, float], dict[str, float]]
#: After how many steps, and by how much each site had moved since the look before.
History: TypeAlias = list[tuple[int, dict[str, float]]]


class Summary(NamedTuple):
    """Means and standard deviations of the guide's draws, by site."""

    mean: dict[str, np.ndarray]
    deviation: dict[str, np.ndarray]


@dataclass(frozen=True)
class Convergence:
    """
    How a training arrived, ``result.convergence``: ``print`` it for a table of the latent sites.

    .. code-block:: python

        svi = SVI(curve, npgp.AutoSparseGP(curve), npgp.adam(0.05), TraceMeanField_ELBO())
        roughly = [npgp.training.Arrival(tolerance=0.3, window=100)]
        convergence = npgp.fit(
            svi, key, None, X, y, callbacks=roughly, progress=False
        ).convergence
        assert convergence.arrived and convergence.slowest in convergence.moved

    :param arrived: whether the posterior stood still at the end; for a given number of steps, whether the ELBO no
        longer rose.
    :param steps: number of steps taken.
    :param rates: learning rates, and the steps taken at each; empty for a given number of steps.
    :param moved: of each site, by how many of its standard deviations an entry's mean differs from that at the rate
        before, at most; where there was none, from that of the window before. For a given number of steps, from the
        third fifth of them to the last.
    :param widened: likewise, the change of the logarithm of a standard deviation.
    :param history: after how many steps it was looked at, and by how many standard deviations, of means or in their
        logarithm, each site had moved since the look before.
    :param gain: by how many nats the ELBO rose from the third fifth of a given number of steps to the last.
    """

    arrived: bool
    steps: int
    rates: tuple[tuple[float, int], ...]
    moved: dict[str, float]
    widened: dict[str, float]
    history: tuple[tuple[int, dict[str, float]], ...] = ()
    gain: float | None = None

    @property
    def slowest(self) -> str:
        """The site that moved most."""
        return _slowest(self.moved, self.widened)

    def __str__(self) -> str:
        width = max(map(len, self.moved), default=4)
        lines = [f"{'site':{width}}  moved by (sds)  log sd changed by"]
        lines += [f"{n:{width}}  {self.moved[n]:14.3f}  {self.widened[n]:17.3f}" for n in self.moved]
        rates = ", ".join(f"{steps} at {rate:.3g}" for rate, steps in self.rates)
        ended = "the posterior stands still" if self.arrived else "the posterior still moves"
        if self.gain is not None:
            rates = "from the third fifth to the last"
            ended = f"the ELBO rose by {self.gain:.2g} nats, {ended}"
        return "\n".join([*lines, f"{self.steps} steps ({rates}): {ended}"])


class Arrival(Callback):
    """
    Ends a training when the guide's posterior has arrived; ``npgp.fit(svi, rng_key, None, …)`` has one by itself:

    .. code-block:: python

        svi = SVI(curve, npgp.AutoSparseGP(curve), npgp.adam(0.05), TraceMeanField_ELBO())
        # If .1 is more than is needed.
        arrival = npgp.training.Arrival(tolerance=0.3, window=100)
        result = npgp.fit(svi, key, None, X, y, callbacks=[arrival], progress=False)
        print(result.convergence)

    The optimizer is :func:`npgp.adam` without a number of steps, whose rate it lowers; so it does not matter much where
    that begins. ``result.params`` are averages of iterates, with less noise than any. Several draws a step,
    ``TraceMeanField_ELBO(num_particles=8)``, often take fewer steps. The progress bar says about how many are to
    come, by the trend of the looks; where after 5000 steps it is 20,000 more, a :class:`TrainingWarning` says so, once.

    :param tolerance: by how many of its standard deviations, and by what in their logarithm, a latent value may move.
    :param window: number of steps between two looks, at first; later a third of all before, up to five times as many,
        and more at lower rates.
    :param max_steps: number of steps after which it ends with a warning.
    :param draws: number of draws from the guide at each look.
    :raises TypeError: for arguments that are no numbers, and in :func:`npgp.fit` for another optimizer.
    :raises ValueError: for numbers below 1, and a tolerance that is not positive.
    """

    def __init__(self, *, tolerance: float = 0.1, window: int = 100, max_steps: int = 200_000, draws: int = 128):
        checks.require_positive(tolerance, "tolerance")
        self.tolerance, self.window = float(tolerance), checks.whole_number(window, "window")
        self.max_steps = checks.whole_number(max_steps, "max_steps")
        self.draws = checks.whole_number(draws, "draws", least=2)
        self._history: History = []

    def begin(self, training: Training) -> None:
        """As :meth:`Callback.begin`."""
        if [averaging.factor is None for averaging in _averagings(training.state)] != [False]:
            raise TypeError(
                "num_steps is None, and the optimizer is not npgp.adam(learning_rate): that is what training until "
                "the posterior has arrived takes, alone or inside npgp.natural_gradient; it lowers the rate itself."
            )
        if not training.done:
            self._phase, self._looked = 0, training.step
            self._rates: list[tuple[float, int]] = []
            self._previous: tuple[Summary, float, float] | None = None
            self._before: Summary | None = None
            self._drifts: list[float] = []
            self._history = []
        self._ended, self._warned = False, False
        self._first, self._last = training.first, training.first + self.max_steps
        self._program = Program(self._summary_of(training), options=STEPS)

    @property
    def _window(self) -> int:
        """Longer as steps go on, since what slows down moves less in each window of one length; and at lower rates."""
        longer = min(max(1.0, SHARE * (self._looked - self._first) / self.window), LONGER)
        return math.ceil(longer * self.window * FALL ** (-self._phase / 2))

    def until(self, step: int) -> int | None:
        """As :meth:`Callback.until`."""
        return max(min(self._looked + self._window, self._last) - step, 1)

    def __call__(self, training: Training) -> bool | None:
        """As :meth:`Callback.__call__`."""
        if training.step < self._looked + self._window and training.done < self.max_steps:
            return False
        window, self._looked = training.step - self._looked, training.step
        (averaging,) = _averagings(training.state)
        values = unconstrained(training.svi, training.state) | averaging.averages
        training.averages = values
        now = self._look(values)
        losses = training.losses[-window:] if window else training.losses[-1:]
        loss, variance = float(np.mean(losses)), float(np.var(losses))
        finished = False
        drift: Drift | None = None
        if self._previous is not None:
            earlier, loss_before, variance_before = self._previous
            drift = _drift(earlier, now)
            largest = _largest(drift)
            self._drifts.append(largest)
            self._history.append(_note(training.step, drift))
            gain, error = loss_before - loss, math.sqrt(5.0 * (variance + variance_before) / max(window, 1))
            stalled = len(self._drifts) > 1 and largest > STALLED * float(np.median(self._drifts[:-1])) and gain < error
            finished = largest < self.tolerance or stalled or len(self._drifts) >= MOST_WINDOWS
            training.moving = f"{_slowest(*drift)} moves by {largest:.2g} sd"
            if ahead := steps_ahead(self._history, self.tolerance):
                training.moving += f", about {ahead} steps more"
                self._warn_if_far(training, drift, ahead)
        self._previous = now, loss, variance
        self._count(float(averaging.rate), window)
        factor = averaging.factor
        arrived = False
        if finished:
            if self._before is not None:
                drift = _drift(self._before, now)
                arrived = _largest(drift) < OF_RATE * self.tolerance
            self._before, self._phase, factor = now, self._phase + 1, factor * FALL
            self._previous, self._drifts = None, []
        if drift is not None or training.convergence is None:
            moved, widened = drift or ({}, {})
            looks = tuple(self._history)
            training.convergence = Convergence(arrived, training.step, tuple(self._rates), moved, widened, looks)
        self._ended = arrived or training.done >= self.max_steps
        if not self._ended:
            _average_anew(training, averaging._replace(factor=factor))
        return self._ended

    def end(self, training: Training, error: BaseException | None) -> None:
        """As :meth:`Callback.end`."""
        found = training.convergence
        if error is None and self._ended and found is not None and not found.arrived:
            what = f"npgp.fit: {training.step} steps are too few to see whether the posterior still moves"
            advice = "give Arrival more max_steps, or look whether the data say what it is."
            if found.moved:
                what = f"npgp.fit: {_still_moves(training.step, found.moved, found.widened)}"
                if ahead := steps_ahead(self._history, self.tolerance):
                    advice = f"about {ahead} more are to come. {advice.capitalize()} {FEWER_STEPS}"
            warnings.warn(f"{what}: {advice}", TrainingWarning, stacklevel=4)

    def _warn_if_far(self, training: Training, drift: Drift, ahead: int) -> None:
        """Once, and early."""
        if self._warned or training.done < FAR_AFTER or ahead < FAR:
            return
        self._warned = True
        what = f"{_still_moves(training.step, *drift)}, so that it takes about {ahead} steps more"
        warnings.warn(f"npgp.fit: {what}. {FEWER_STEPS}", TrainingWarning, stacklevel=6)

    def _count(self, rate: float, steps: int) -> None:
        if self._rates and self._rates[-1][0] == rate:
            steps += self._rates.pop()[1]
        self._rates.append((rate, steps))

    def _look(self, values: dict[str, Any]) -> Summary:
        with one_model_at_a_time:
            return Summary(*jax.tree.map(np.asarray, self._program(values)))

    def _summary_of(self, training: Training) -> Callable[[dict[str, Any]], Any]:
        """The function that draws from the guide, by the same random numbers at all values of its parameters."""
        svi = training.svi
        args, kwargs = training.data.first_call(training.first)
        kwargs = kwargs | svi.static_kwargs
        keys = jax.random.split(jax.random.key(0), self.draws)

        def summary(values: dict[str, Any]) -> Any:
            params = constrained(svi, values)
            stated: set[str] = set()

            def draw(key: jax.Array) -> Any:
                guide = handlers.seed(handlers.substitute(svi.guide, data=params), key)
                sites = handlers.trace(guide).get_trace(*args, **kwargs)
                return _latent(sites, stated)

            return _summarized(lax.map(draw, keys, batch_size=min(16, self.draws)), params, stated)

        return summary

    def snapshot(self) -> dict[str, np.ndarray]:
        """As :meth:`Callback.snapshot`."""
        found = {
            "numbers": np.asarray([self._phase, self._looked]),
            "rates": np.asarray(self._rates, float).reshape(-1, 2),
            "drifts": np.asarray(self._drifts, float),
        } | _packed(self._history)
        if self._previous is not None:
            found["loss"] = np.asarray(self._previous[1:])
        for when, summary in (("previous", self._previous and self._previous[0]), ("before", self._before)):
            if summary is not None:
                found |= _flat(when, summary)
        return found

    def restore(self, snapshot: dict[str, np.ndarray], params: dict[str, Any]) -> None:
        """As :meth:`Callback.restore`."""
        if not snapshot:
            return
        self._phase, self._looked = map(int, snapshot["numbers"])
        self._rates = [(float(rate), int(steps)) for rate, steps in snapshot["rates"]]
        self._drifts = list(map(float, snapshot["drifts"]))
        self._history = _unpacked(snapshot)
        earlier = _summary("previous", snapshot)
        self._previous = None if earlier is None else (earlier, float(snapshot["loss"][0]), float(snapshot["loss"][1]))
        self._before = _summary("before", snapshot)


class Fifths(Callback):
    """
    Looks at the guide's posterior after each fifth of a given number of steps of :func:`npgp.adam`, for
    ``result.convergence`` and for what :func:`npgp.fit` says at the end. That costs an average of the parameters in
    each step, and 64 evaluations of the loss at each look, whose draws are the guide's: as much as some hundred steps.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._history: History = []
        self._summaries: list[Summary] = []
        self._third: np.ndarray | None = None

    @staticmethod
    def can_look(training: Training) -> bool:
        """
        Whether steps are averaged, all parameters are, and their number is known and enough; not where batches come
        from a source, which may have no second time.
        """
        number = training.num_steps
        return (
            number is not None and number >= LEAST_STEPS and training.is_whole and len(_averagings(training.state)) == 1
        )

    def begin(self, training: Training) -> None:
        """As :meth:`Callback.begin`."""
        steps = training.num_steps or 0
        self._ends = [training.first + round(steps * fifth / 5) for fifth in range(6)]
        if not training.done:
            self._forget()
        self._look = self._program_of(training)

    def until(self, step: int) -> int | None:
        """As :meth:`Callback.until`."""
        return next((end - step for end in self._ends[1:] if end > step), None)

    def __call__(self, training: Training) -> None:
        """As :meth:`Callback.__call__`."""
        seen = len(self._summaries)
        if seen == 5 or training.step != self._ends[seen + 1]:
            return
        (averaging,) = _averagings(training.state)
        losses, summary = self._look(unconstrained(training.svi, training.state) | averaging.averages)
        self._summaries.append(summary)
        if seen:
            self._history.append(_note(training.step, _drift(*self._summaries[-2:])))
        if seen == 2:
            self._third = losses
        if seen < 4:
            _average_anew(training, averaging)
        elif self._third is not None:
            gains = self._third - losses
            gain, error = float(np.mean(gains)), float(np.std(gains, ddof=1) / np.sqrt(len(gains)))
            much = max(NATS, NATS_PER_ROW * training.num_rows) + ERRORS * error
            drift = _drift(self._summaries[2], summary)
            training.convergence = Convergence(gain <= much, training.step, (), *drift, tuple(self._history), gain)

    def _program_of(self, training: Training) -> Callable[[dict[str, Any]], tuple[np.ndarray, Summary]]:
        """The function that evaluates the loss at values of parameters, by the same random numbers and batches."""
        svi, data = training.svi, training.data
        elbo = copy.copy(svi.loss)
        elbo.num_particles = 1
        keys = jax.random.split(jax.random.key(1), DRAWS)
        batches = data.place(data.read(training.first, DRAWS))

        def look(values: dict[str, Any], arrays: Any, batches: Any) -> Any:
            params = constrained(svi, values)
            stated: set[str] = set()

            def draw(number: jax.Array) -> Any:
                drawn = {}

                def guide(*args: Any, **kwargs: Any) -> Any:
                    with handlers.trace() as sites:
                        value = svi.guide(*args, **kwargs)
                    drawn.update(_latent(sites, stated))
                    return value

                item = jax.tree.map(lambda x: x[number], batches)
                args, kwargs = data.layout.call(arrays, item, training.first)
                loss = elbo.loss(keys[number], params, svi.model, guide, *args, **kwargs, **svi.static_kwargs)
                return loss, drawn

            losses, drawn = lax.map(draw, jnp.arange(DRAWS))
            return losses, _summarized(drawn, params, stated)

        program = Program(look, options=QUICK)

        def run(values: dict[str, Any]) -> tuple[np.ndarray, Summary]:
            with one_model_at_a_time:
                losses, summary = jax.tree.map(np.asarray, program(values, data.arrays, batches))
            return np.asarray(losses, np.float64), Summary(*summary)

        return run

    def snapshot(self) -> dict[str, np.ndarray]:
        """As :meth:`Callback.snapshot`."""
        found = {"ends": np.asarray(self._ends)} | _packed(self._history)
        for number, summary in enumerate(self._summaries):
            found |= _flat(f"summary{number}", summary)
        return found if self._third is None else found | {"third": self._third}

    def restore(self, snapshot: dict[str, np.ndarray], params: dict[str, Any]) -> None:
        """As :meth:`Callback.restore`."""
        self._forget()
        if snapshot and list(snapshot["ends"]) == self._ends:
            self._history = _unpacked(snapshot)
            looks = (_summary(f"summary{number}", snapshot) for number in range(5))
            self._summaries = [summary for summary in looks if summary is not None]
            self._third = snapshot.get("third")


def steps_ahead(history: Sequence[tuple[int, dict[str, float]]], tolerance: float) -> int | None:
    """
    About how many steps it takes until what moves most moves by less than the tolerance, if that goes on to fall with
    a power of the steps as in the later half of the looks, and for two further looks; ``None`` where looks are too few,
    or none is to come.
    """
    largest = [max(moved.values(), default=0.0) for _, moved in history]
    if len(history) < LEAST_LOOKS or min(largest) <= 0.0 or largest[-1] <= tolerance:
        return None
    first, (before, step) = (len(history) - 1) // 2, (number for number, _ in history[-2:])
    fall = -np.polyfit(np.log([number for number, _ in history[first:]]), np.log(largest[first:]), 1)[0]
    times = (largest[-1] / tolerance) ** (1.0 / np.clip(fall, SLOWEST, FASTEST))
    return int(float(f"{step * (times - 1.0) + 2 * (step - before):.1g}"))


def sentence(convergence: Convergence | None) -> str | None:
    """What is said at the end of a given number of steps that did not suffice."""
    if convergence is None or convergence.gain is None or convergence.arrived:
        return None
    what = f"from the third fifth of the {convergence.steps} steps to the last the ELBO rose by {convergence.gain:.2g}"
    if convergence.moved:
        name = convergence.slowest
        by, log = convergence.moved[name], convergence.widened[name]
        what += f" nats, and {name!r} moved by {by:.2g} of its standard deviations, which changed by {100 * log:.0f}%"
    return (
        f"the posterior has not arrived: {what}. Intervals come last, so take more steps; or num_steps=None and "
        "npgp.adam(rate), which trains until it stands still."
    )


def _latent(sites: dict[str, Any], stated: set[str]) -> dict[str, Any]:
    """The latent values that a guide drew; the names of its parameters are added to ``stated``."""
    stated.update(name for name, site in sites.items() if site["type"] == "param")
    return {name: site["value"] for name, site in sites.items() if is_latent(site)}


def _summarized(drawn: dict[str, Any], params: dict[str, Any], stated: set[str]) -> tuple[dict, dict]:
    """Means and standard deviations of draws, and the values of parameters that are none of the guide's."""
    means = {name: jnp.mean(value, axis=0) for name, value in drawn.items()}
    deviations = {name: jnp.std(value, axis=0) for name, value in drawn.items()}
    points = {name: value for name, value in params.items() if name not in stated and hasattr(value, "dtype")}
    return means | points, deviations | {name: jnp.zeros_like(value) for name, value in points.items()}


def _still_moves(step: int, moved: dict[str, float], widened: dict[str, float]) -> str:
    name = _slowest(moved, widened)
    by = f"by {moved[name]:.2g} of its standard deviations, which change by {100 * widened[name]:.0f}%"
    return f"after {step} steps {name!r} still moves, {by}"


def _note(step: int, drift: Drift) -> tuple[int, dict[str, float]]:
    """A look for the history."""
    return step, {name: max(drift[0][name], drift[1][name]) for name in drift[0]}


def _flat(start: str, summary: Summary) -> dict[str, np.ndarray]:
    """A summary as arrays by name, for checkpoints."""
    means = {f"{start}.mean.{name}": value for name, value in summary.mean.items()}
    return means | {f"{start}.sd.{name}": value for name, value in summary.deviation.items()}


def _summary(start: str, arrays: dict[str, np.ndarray]) -> Summary | None:
    """The inverse of :func:`_flat`; ``None`` if there was none."""
    means = _named(f"{start}.mean.", arrays)
    return Summary(means, _named(f"{start}.sd.", arrays)) if means else None


def _named(start: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose names begin so, by what follows."""
    return {name[len(start) :]: value for name, value in arrays.items() if name.startswith(start)}


def _packed(history: History) -> dict[str, np.ndarray]:
    """Looks as arrays by name, for checkpoints."""
    if not history:
        return {}
    names = history[0][1]
    columns = {f"look.{name}": np.asarray([moved[name] for _, moved in history]) for name in names}
    return {"looks": np.asarray([step for step, _ in history])} | columns


def _unpacked(arrays: dict[str, np.ndarray]) -> History:
    """The inverse of :func:`_packed`."""
    moved = _named("look.", arrays)
    return [
        (int(step), {name: float(column[i]) for name, column in moved.items()})
        for i, step in enumerate(arrays.get("looks", []))
    ]


def _average_anew(training: Training, averaging: Averaging) -> None:
    """Begin a new average, with a state of the optimizer."""
    anew = averaging._replace(averaged=jnp.zeros_like(averaging.averaged))
    training.state = _changed(training.state, anew)


def _averagings(state: Any) -> list[Averaging]:
    """The states of :func:`npgp.adam` in a state."""
    leaves = jax.tree.leaves(state.optim_state, is_leaf=lambda x: isinstance(x, Averaging))
    return [leaf for leaf in leaves if isinstance(leaf, Averaging)]


def _changed(state: Any, averaging: Averaging) -> Any:
    """A state with another one of :func:`npgp.adam`."""
    is_leaf = lambda x: isinstance(x, Averaging)  # noqa: E731
    changed = jax.tree.map(lambda x: averaging if is_leaf(x) else x, state.optim_state, is_leaf=is_leaf)
    return state._replace(optim_state=changed)


def _drift(before: Summary, now: Summary) -> Drift:
    """By how many standard deviations the entries of each site have moved, at most; and their logarithms' change."""
    moved, widened = {}, {}
    for name, mean in now.mean.items():
        a, b = before.deviation[name], now.deviation[name]
        spread = (a > 0) & (b > 0)
        scale = np.where(spread, np.sqrt(a * b), OF_VALUE * np.abs(mean) + np.finfo(np.float32).eps)
        moved[name] = float(np.max(np.abs(mean - before.mean[name]) / scale, initial=0.0))
        logs = np.log(np.where(spread, b, 1.0)) - np.log(np.where(spread, a, 1.0))
        widened[name] = float(np.max(np.abs(logs), initial=0.0))
    return moved, widened


def _largest(drift: Drift) -> float:
    return max([*drift[0].values(), *drift[1].values()], default=0.0)


def _slowest(moved: dict[str, float], widened: dict[str, float]) -> str:
    return max(moved, key=lambda name: max(moved[name], widened[name]))
