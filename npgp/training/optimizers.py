"""Optimizers with schedules that suit the training of sparse GPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from numpyro.distributions import biject_to

from npgp import checks, linalg
from npgp.model.gaussians import LOC, SCALE_TRIL, SCALE_TRIL_CONSTRAINT
from npgp.training.row_tables import RowOptimizer

#: The highest rate of natural steps, and the most that one may change a Gaussian, in its own units.
NATURAL_RATE, LONGEST = 0.1, 0.5


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

    Where :class:`npgp.AutoSparseGP` has one Gaussian of several sites (``joint_loc``, ``joint_scale_tril``), this moves
    along natural gradients instead (docs/theory.md, section 10), at a rate of .1 that falls as Adam's does: hundreds of
    steps where Adam takes thousands.

    :param learning_rate: the highest learning rate.
    :param num_steps: steps, warm-up included, after which the decay ends. If ``None``, the rate stays as it is, but for
        :class:`npgp.training.Arrival`, which lowers it.
    :param final: the last learning rate as a fraction of the highest.
    :param warmup: steps in which the learning rate first rises linearly.
    :raises TypeError: for what is no number; schedules of one's own are for ``optax.adam``.
    :raises ValueError: for a rate below 0 or NaN, and for no more steps than those of warm-up.
    """
    return _averaged_adam(learning_rate, _schedule(learning_rate, num_steps, final, warmup), num_steps is None)


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


def _averaged_adam(learning_rate: float, schedule: Callable, lowered: bool) -> optax.GradientTransformation:
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
        # optax.masked has no array where others step.
        if isinstance(params, Mapping) and all(hasattr(params.get(name), "shape") for name in (LOC, SCALE_TRIL)):
            share = rate / learning_rate if learning_rate else 0.0
            steps |= _natural_steps(params, gradient, share)
        count = state.averaged + 1
        averages = jax.tree.map(
            lambda average, x, step: average + (x + step - average) / count, state.averages, params, steps
        )
        return steps, Averaging(inner, state.factor, rate, count, averages)

    return optax.GradientTransformation(init, update)


def _natural_steps(params: Mapping[str, Any], gradient: Mapping[str, Any], share: Any) -> dict[str, jax.Array]:
    """
    Steps of the one Gaussian that the automatic guide has of several sites, along natural gradients. With
    ``x = μ + L η`` these are of Newton's kind: ``μ' = μ − ρ L Lᵀ ∂μ``, and ``L' = L (I − ρ Φ)``, Φ the lower triangle
    of ``Lᵀ ∂L`` with its diagonal halved, where the diagonal's ``1 − ρ Φ_ii`` is ``exp(−ρ Φ_ii)`` for L to remain a
    factor. No unit and no dependence among the sites makes them slow.

    :param share: the learning rate's share of its highest.
    """
    transform = biject_to(SCALE_TRIL_CONSTRAINT)
    L = transform(params[SCALE_TRIL])
    in_factor = jax.vjp(transform.inv, L)[1](gradient[SCALE_TRIL])[0]
    d = linalg.matmul(gradient[LOC], L)
    product = linalg.matmul(L.T, in_factor)
    halved, lower = 0.5 * jnp.diagonal(product), jnp.tril(product, -1)
    length = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in (d, halved, lower)))
    rate = (share * jnp.minimum(NATURAL_RATE, LONGEST / length)).astype(L.dtype)
    new = linalg.matmul(L, jnp.diag(jnp.exp(-rate * halved)) - rate * lower)
    return {LOC: -rate * linalg.matmul(L, d), SCALE_TRIL: transform.inv(new) - params[SCALE_TRIL]}


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
