"""
L-BFGS for bounds without noise: quasi-Newton directions of Optax, and a line search that compiles the loss once.

Every round of one device loop evaluates loss and gradient at one trial point, and then either takes it or moves the
bracket of the step size (bisection for the weak Wolfe conditions: Lewis & Overton 2013). Optax's own line search
compiles the loss several times. Where losses may differ by their rounding alone, slopes decide (Hager & Zhang 2005).

Directions are as good as the coordinates: given ``scales``, the search begins anew now and then in coordinates in which
what is left of each parameter's way is about 1.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from threadpoolctl import threadpool_limits
from tqdm.auto import tqdm

from npgp import checks
from npgp.programs.compiled import STEPS, Program

__all__ = ["LBFGSResult", "minimize"]

#: The weak Wolfe conditions: sufficient decrease, and sufficient change of slope.
DECREASE, CURVATURE = 1e-4, 0.9
#: Of losses that differ by less than this share, rounding may say which is lower, for that of a collapsed bound is
#: multiplied by the condition of K_uu: after so many trial points, slopes decide.
ROUNDING, DOUBTFUL_TRIALS = 1e-5, 3
#: Trial points of one line search.
MAX_TRIALS = 25
#: Differences of gradients that directions are made of.
MEMORY = 10
#: The most steps that are to gain little together before a search has converged.
MOST_WINDOW = 50
#: Steps until the coordinates are first scaled anew, their growth from one time to the next, and the most; likewise of
#: what the loss depends on.
FIRST_SCALING, FIRST_RENEWAL = (50, 1.4, 300), (4, 2.0, 1024)
#: How often it is renewed at most: it may go back and forth.
RENEWALS = 20
#: Searches of at most so many steps share a compiled program.
SHARED_STEPS = 2000
#: Aimed-for seconds per device call: how often the progress bar moves.
SECONDS_PER_CALL = 1.0

RUNNING, CONVERGED, STALLED = range(3)
MESSAGES = {
    RUNNING: "stopped after max_steps steps",
    CONVERGED: "the last steps gained less than the tolerance",
    STALLED: "the line search found no better point: the loss is at its precision",
}
INTERRUPTED = "interrupted"


class LBFGSResult(NamedTuple):
    """
    What :func:`minimize` returns.
    """

    #: Where the loss is least of all points seen, but for rounding; of the structure of the start.
    params: Any
    #: The loss at the start and after each step.
    losses: np.ndarray
    #: Whether the last steps gained less than the tolerance.
    converged: bool
    #: Why it ended.
    message: str


class _Search(NamedTuple):
    x: jax.Array  # in units of the scale
    scale: jax.Array
    value: jax.Array
    gradient: jax.Array
    direction: jax.Array
    slope: jax.Array
    memory: Any
    step: jax.Array  # the trial point's, in units of the direction
    low: jax.Array
    high: jax.Array
    trials: jax.Array
    steps: jax.Array
    values: jax.Array
    status: jax.Array


def minimize(
    loss: Callable,
    start: Any,
    *args: Any,
    max_steps: int = 1000,
    tolerance: float = 1e-6,
    window: int | None = None,
    memory: int = MEMORY,
    scales: Callable[[Any], Any] | None = None,
    renew: Callable[[Any], tuple[Any, ...] | None] | None = None,
    options: dict[str, Any] = STEPS,
    progress: bool = True,
    describe: Callable[[float], str] = "loss {:.6g}".format,
) -> LBFGSResult:
    """
    Minimize ``loss(params, *args)`` from a start, by L-BFGS.

    A keyboard interrupt ends it with a warning and what was found so far.

    :param loss: a function that JAX can differentiate; trial points where it is not finite are stepped back from.
    :param start: params to start from, a pytree of floating arrays without constraints.
    :param args: pytrees of arrays that the loss depends on.
    :param max_steps: most steps; each takes one evaluation of the loss, and now and then a few.
    :param tolerance: it has converged when ``window`` steps together lower the loss by less than this.
    :param window: see ``tolerance``; two steps for each number that is searched for and five more, at most 50, if
        omitted.
    :param memory: how many differences of gradients directions are made of.
    :param scales: from params to the scale of each, of the same structure with shapes that broadcast: about what the
        loss still changes with by 1. The search begins anew with them after 50 steps, and later ever less often.
    :param renew: from params to other ``args``, or to ``None`` if they stay: asked after 4, 8, 16 and so many steps and
        at the end, from where the search begins anew.
    :param options: compiler options, on a CPU.
    :param progress: show a progress bar.
    :param describe: what the bar says of a loss.
    :raises ValueError: for fewer than one step, a tolerance below 0 or a window below 1.
    :raises FloatingPointError: if loss or gradient is not finite at the start.
    """
    flat, restore = ravel_pytree(start)
    window = min(MOST_WINDOW, 5 + 2 * flat.size) if window is None else window
    for name, value in (("max_steps", max_steps), ("window", window)):
        checks.whole_number(value, name, least=None)
    if max_steps < 1 or window < 1 or not tolerance >= 0.0:
        raise ValueError(
            f"max_steps is {max_steps}, window {window} and tolerance {tolerance}; they must be at least 1, 1 and 0."
        )
    checks.whole_number(memory, "memory")

    def scale_at(x: jax.Array) -> jax.Array:
        if scales is None:
            return jnp.ones_like(x)
        params = restore(x)
        return ravel_pytree(jax.tree.map(lambda p, s: jnp.broadcast_to(s, jnp.shape(p)), params, scales(params)))[0]

    evaluate = jax.value_and_grad(lambda x, scale, *args: loss(restore(x * scale), *args))
    run = Program(
        lambda search, rounds, until, *args: _rounds(evaluate, window, tolerance, search, rounds, until, *args),
        options=options,
    )
    search = _before(flat, scale_at(flat), memory, max_steps)
    size, interrupted, renewals, earlier = 1, False, RENEWALS, np.zeros(0)
    stretch, growth, last = FIRST_RENEWAL if renew is not None else FIRST_SCALING
    until = max_steps if scales is None and renew is None else min(stretch, max_steps)
    shown = dict(total=max_steps, disable=not progress, unit="step", desc="compiling")
    with threadpool_limits(limits=1, user_api="blas"), tqdm(**shown) as bar:
        try:
            while int(search.status) == RUNNING and int(search.steps) < max_steps:
                began, before = time.perf_counter(), int(search.steps)
                search = jax.block_until_ready(run(search, size, until, *args))
                if not np.isfinite(search.value):
                    raise FloatingPointError(
                        f"the loss is {float(search.value)} at the start, or its gradient is not finite: check the "
                        "data and the start, or try a larger jitter or float64."
                    )
                bar.set_description_str("", refresh=False)
                bar.set_postfix_str(describe(float(search.value)), refresh=False)
                bar.update(int(search.steps) - bar.n)
                if size > 1:  # the first call compiles and is no measure of speed
                    speed = max(int(search.steps) - before, 1) / (time.perf_counter() - began)
                    size = int(np.clip(speed * SECONDS_PER_CALL, 1, 10 * size))
                else:
                    size = 2
                if int(search.status) == RUNNING and not until <= int(search.steps) < max_steps:
                    continue
                stretch = min(int(growth * stretch), last)
                until = min(until + stretch, max_steps)
                others = renew(restore(search.x * search.scale)) if renew is not None and renewals else None
                if others is not None:
                    args, renewals = others, renewals - 1
                    earlier = np.concatenate([earlier, np.asarray(search.values)[len(earlier) : int(search.steps)]])
                    search = _before(search.x * search.scale, search.scale, memory, max_steps, search.steps)
                elif int(search.status) == RUNNING and scales is not None:
                    search = _rescaled(search, scale_at(search.x * search.scale))
        except KeyboardInterrupt:
            if int(search.steps) < 0:
                raise
            interrupted = True
            warnings.warn(f"Interrupted: {int(search.steps)} of {max_steps} steps were taken.", stacklevel=2)
    status = int(search.status)
    losses = np.concatenate([earlier, np.asarray(search.values)[len(earlier) : int(search.steps) + 1]])
    return LBFGSResult(
        restore(search.x * search.scale),
        losses,
        status == CONVERGED,
        INTERRUPTED if interrupted else MESSAGES[status],
    )


def _before(x: jax.Array, scale: jax.Array, memory: int, max_steps: int, steps: ArrayLike = 0) -> _Search:
    """Nothing evaluated yet: the first trial point is the start itself, which beats an infinite loss."""
    zero, number = jnp.zeros((), x.dtype), jnp.zeros((), jnp.int32)
    return _Search(
        x=x / scale,
        scale=scale,
        value=jnp.full((), jnp.inf, x.dtype),
        gradient=jnp.zeros_like(x),
        direction=jnp.zeros_like(x),
        slope=zero,
        memory=optax.scale_by_lbfgs(memory).init(x),
        step=zero,
        low=zero,
        high=jnp.full((), jnp.inf, x.dtype),
        trials=number,
        steps=number + steps - 1,
        values=jnp.full(max(max_steps, SHARED_STEPS) + 1, jnp.inf, x.dtype),  # nothing is compared with what was before
        status=number,
    )


@jax.jit
def _rescaled(search: _Search, scale: jax.Array) -> _Search:
    """In units of another scale, along the gradient: what was learned of the curvature is of the old units."""
    ratio = scale / search.scale
    x = search.x / ratio
    return _redirected(
        search._replace(x=x, scale=scale, gradient=search.gradient * ratio, memory=_directions(search).init(x))
    )


def _directions(search: _Search) -> optax.GradientTransformationExtraArgs:
    return optax.scale_by_lbfgs(search.memory.diff_params_memory.shape[0])


def _rounds(
    evaluate: Callable,
    window: int,
    tolerance: float,
    search: _Search,
    rounds: ArrayLike,
    until: ArrayLike,
    *args: Any,
) -> _Search:
    """So many evaluations, or fewer if it ends before."""

    def body(carry: tuple[Any, _Search]) -> tuple[Any, _Search]:
        i, search = carry
        trial = search.x + search.step * search.direction
        value, gradient = evaluate(trial, search.scale, *args)
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
        slope = jnp.vdot(gradient, search.direction)
        lower = finite & (value <= search.value + DECREASE * search.step * search.slope)
        level = finite & (value <= search.value + ROUNDING * jnp.abs(search.value))
        level &= (search.trials >= DOUBTFUL_TRIALS) & (slope <= (2.0 * DECREASE - 1.0) * search.slope)
        curved = slope >= CURVATURE * search.slope
        # The start is taken in any case; its loss is reported if it is not finite.
        first = jnp.isinf(search.value)
        take = first | ((lower | level) & curved) | (lower & (search.trials >= MAX_TRIALS))
        value = jnp.where(first & ~finite, jnp.nan, value)
        given_up = ~take & (search.trials >= MAX_TRIALS)
        # Either way a new line search begins; written once, as its program is the larger part of all but the loss.
        begun = lax.cond(
            take,
            lambda: _taken(search, trial, value, gradient, window, tolerance),
            lambda: lax.cond(given_up, lambda: _given_up(search), lambda: _narrowed(search, lower | level)),
        )
        redirect = take | (given_up & (begun.status == RUNNING))
        return i + 1, lax.cond(redirect, _redirected, lambda search: search, begun)

    def going(carry: tuple[Any, _Search]) -> jax.Array:
        i, search = carry
        return (i < rounds) & (search.status == RUNNING) & (search.steps < until) & ~jnp.isnan(search.value)

    return lax.while_loop(going, body, (0, search))[1]


def _taken(
    search: _Search, x: jax.Array, value: jax.Array, gradient: jax.Array, window: int, tolerance: float
) -> _Search:
    steps = search.steps + 1
    values = search.values.at[steps].set(value)
    gained = values[jnp.maximum(steps - window, 0)] - value
    ended = ((steps >= window) & (gained < tolerance)) | jnp.all(gradient == 0.0)
    status = jnp.where(ended, CONVERGED, RUNNING).astype(search.status.dtype)
    return search._replace(x=x, value=value, gradient=gradient, steps=steps, values=values, status=status)


def _redirected(search: _Search) -> _Search:
    """A new line search along the quasi-Newton direction."""
    scaled, memory = _directions(search).update(search.gradient, search.memory, search.x)
    slope = -jnp.vdot(search.gradient, scaled)
    return search._replace(
        direction=-scaled,
        slope=slope,
        memory=memory,
        step=jnp.ones_like(search.step),
        low=jnp.zeros_like(search.low),
        high=jnp.full_like(search.high, jnp.inf),
        # A direction that is not one of descent is given up at once.
        trials=jnp.where(slope < 0.0, 0, MAX_TRIALS).astype(search.trials.dtype),
    )


def _narrowed(search: _Search, lower: jax.Array) -> _Search:
    low, high = jnp.where(lower, search.step, search.low), jnp.where(lower, search.high, search.step)
    step = jnp.where(jnp.isfinite(high), 0.5 * (low + high), 2.0 * search.step)
    return search._replace(low=low, high=high, step=step, trials=search.trials + 1)


def _given_up(search: _Search) -> _Search:
    """Without memory, to begin again along the gradient; or at the end, if that was the direction."""
    fresh = search._replace(memory=_directions(search).init(search.x))
    stalled = search._replace(status=jnp.full_like(search.status, STALLED))
    return jax.tree.map(lambda a, b: jnp.where(search.memory.count > 1, a, b), fresh, stalled)
