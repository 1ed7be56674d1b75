"""Optimizers with schedules that suit the training of sparse GPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from npgp import checks
from npgp.training.row_tables import RowOptimizer


def adam(
    learning_rate: float = 0.01,
    num_steps: int | None = None,
    *,
    final: float = 0.02,
    warmup: int = 0,
) -> optax.GradientTransformation:
    """
    Adam for the ``optim`` of NumPyro's ``SVI``, whose learning rate decays along a cosine to 2% of where it began, or
    is lowered by ``npgp.fit(svi, rng_key, None, …)`` as the posterior arrives. Its state has averages of the parameters
    too, by which :func:`npgp.fit` knows whether it has.

    .. code-block:: python

        optimizer = npgp.adam(0.05, 1000)  # the rate falls to 2% of that over a thousand steps
        until_it_arrives = npgp.adam(0.05)

    :param learning_rate: the highest learning rate.
    :param num_steps: steps, warm-up included, after which the decay ends. If ``None``, the rate stays as it is, but for
        :class:`npgp.training.Arrival`, which lowers it.
    :param final: the last learning rate as a fraction of the highest.
    :param warmup: steps in which the learning rate first rises linearly.
    :raises TypeError: for what is no number; schedules of one's own are for ``optax.adam``.
    :raises ValueError: for a rate below 0 or NaN, and for no more steps than those of warm-up.
    """
    return _averaged_adam(_schedule(learning_rate, num_steps, final, warmup), num_steps is None)


class Averaging(NamedTuple):
    """
    The state of :func:`adam`.

    :param adam: that of ``optax.scale_by_adam``.
    :param factor: of the learning rate, which :class:`npgp.training.Arrival` lowers; ``None`` if it decays by itself.
    :param rate: the learning rate of the last step.
    :param averaged: number of steps that the averages are over: all, or those since :func:`npgp.fit` began anew.
    :param averages: of the parameters after these steps.
    """

    adam: Any
    factor: Any
    rate: jax.Array
    averaged: jax.Array
    averages: Any


def _averaged_adam(schedule: Callable, lowered: bool) -> optax.GradientTransformation:
    direction = optax.scale_by_adam()

    def init(params: Any) -> Averaging:
        one, zero = jnp.ones((), jnp.result_type(float)), jnp.zeros((), jnp.int32)
        averages = jax.tree.map(jnp.zeros_like, params)
        return Averaging(direction.init(params), one if lowered else None, schedule(zero) * one, zero, averages)

    def update(gradient: Any, state: Any, params: Any) -> tuple[Any, Averaging]:
        steps, inner = direction.update(gradient, state.adam, params)
        rate = jnp.asarray(schedule(state.adam.count), state.rate.dtype)
        rate = rate * state.factor if lowered else rate
        steps = jax.tree.map(lambda step: -rate.astype(step.dtype) * step, steps)
        count = state.averaged + 1
        averages = jax.tree.map(
            lambda average, x, step: average + (x + step - average) / count, state.averages, params, steps
        )
        return steps, Averaging(inner, state.factor, rate, count, averages)

    return optax.GradientTransformation(init, update)


def row_adam(
    learning_rate: float | Callable[[Any], Any] = 0.01,
    num_steps: int | None = None,
    *,
    final: float = 0.02,
    warmup: int = 0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> RowOptimizer:
    """Adam for row tables, lazily: the ``row_optim`` of :func:`fit`.

    A row moves at the steps that look it up, as if it were alone: in between, neither the row nor its moments change,
    and the correction of their bias counts the row's own visits. The learning rate follows the number of the step,
    which is the same for all rows. A row that is looked up twice in a step moves once, along the sum of its gradients.

    The loss weighs the rows of a batch by N / B. Adam does not see this factor, which is the same at every visit: a row
    moves by about the learning rate at a visit, which is once in N / B steps. Adam on the whole table goes on moving a
    row between its visits, by √(N / B) times that in all (for N / B well below 1 / (1 − b2)). So with many more rows
    than in a batch, a higher learning rate is in place for the rows than for the other parameters.

    .. code-block:: python

        optimizer = npgp.training.row_adam(0.05, 1000)  # for npgp.fit(..., row_optim=optimizer)

    :param learning_rate: the highest learning rate, or a schedule, in place of the next three.
    :param num_steps: steps, not visits, and otherwise as in :func:`adam`.
    :param final: as in :func:`adam`.
    :param warmup: as in :func:`adam`.
    :param b1: decay per visit of the mean of gradients.
    :param b2: decay per visit of the mean of squared gradients.
    :param eps: added to the root of the latter.
    """
    if callable(learning_rate):
        if num_steps is not None or warmup:
            raise ValueError("learning_rate is a schedule; num_steps and warmup make one of a number.")
        schedule = learning_rate
    else:
        schedule = _schedule(learning_rate, num_steps, final, warmup)
    return RowOptimizer(optax.scale_by_adam(b1, b2, eps), schedule)


def _schedule(learning_rate: float, num_steps: int | None, final: float, warmup: int) -> Callable:
    checks.require_not_negative(learning_rate, "learning_rate")
    checks.require_not_negative(final, "final")
    warmup = checks.whole_number(warmup, "warmup", least=0)
    num_steps = None if num_steps is None else checks.whole_number(num_steps, "num_steps")
    if num_steps is None:
        schedule = optax.constant_schedule(learning_rate)
    elif num_steps > warmup:
        schedule = optax.cosine_decay_schedule(learning_rate, num_steps - warmup, alpha=final)
    else:
        raise ValueError(f"num_steps is {num_steps}, not more than the {warmup} steps of warmup.")
    if warmup:
        rise = optax.linear_schedule(learning_rate / (warmup + 1), learning_rate, warmup)
        schedule = optax.join_schedules([rise, schedule], [warmup])
    return schedule
