"""Fits of the methods, all from one start and in equal time."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.flatten_util import ravel_pytree
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.optimize import minimize

import npgp
from common import clock, peak_memory, scores
from npgp.neighbors import nearest
from studies.approximations.data import Data
from studies.approximations.methods import METHODS, MINIBATCHES
from studies.approximations.models import KERNELS, Params, component_of, model_of, prepare, start_of

#: Logs of lengthscales, variance and noise variance stay within these.
LOG_BOUNDS = (-9.0, 7.0)


class Fit(NamedTuple):
    """
    A fitted model.

    :param params: logs of lengthscales, variance and noise variance, and inducing inputs.
    :param value: the bound or log density, for each training row.
    :param predict: from test inputs to mean and variance of f.
    :param evaluations: of the gradient.
    :param aside: seconds that are no part of the fit.
    """

    params: Params
    value: float
    predict: Callable[[np.ndarray], tuple[jax.Array, jax.Array]]
    evaluations: int
    aside: float = 0.0


def neighbors_of(new: np.ndarray, name: str, data: Data, fixed: Params) -> tuple[np.ndarray, ...]:
    """What a method's predictions at new inputs need besides: the nearest of the training rows, or nothing."""
    if name not in ("nngp", "vnngp"):
        return ()
    known = fixed["neighbors"]
    return (nearest(new, data.X, min(known.size, len(data.y)), scale=known.scale),)


def fit_all_rows(name: str, data: Data, args: argparse.Namespace) -> Fit:
    """By L-BFGS on the bound or likelihood of all rows. Neighbors are found twice, at the start and half-way."""

    @jax.jit
    @jax.value_and_grad
    def loss(params, X, y, fixed):
        return -model_of(name, params, X, fixed, args.kernel).log_prob(y) / len(y)

    params, evaluations = start_of(name, data, args), 0
    rounds = 2 if name == "nngp" else 1
    for _ in range(rounds):
        fixed = prepare(name, data, params, args)
        budget = args.budget / rounds, (args.steps or 1000) / rounds
        here = lambda params, fixed=fixed: loss(params, data.X, data.y, fixed)  # noqa: E731
        params, taken = lbfgs(here, params, *budget, clock(args.cpu_time))
        evaluations += taken
    fixed = prepare(name, data, params, args)
    value = -float(loss(params, data.X, data.y, fixed)[0])

    @jax.jit
    def moments(params, X, y, fixed, new, near):
        model = model_of(name, params, X, fixed, args.kernel)
        if hasattr(model, "predict"):
            return model.predict(y, new)
        return model.condition(y).mean_and_variance(new, *near)

    def predict(new):
        return moments(params, data.X, data.y, fixed, new, neighbors_of(new, name, data, fixed))

    return Fit(params, value, predict, evaluations)


class OutOfTime(Exception):
    pass


def lbfgs(
    loss: Callable, start: Params, seconds: float, steps: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[Params, int]:
    """
    Minimize from a start, for so long; the best params seen, and how often the loss was evaluated.

    :param loss: from params to the value and its gradient; compiled before the clock starts.
    """
    flat, restore = ravel_pytree(start)
    is_log, _ = ravel_pytree(
        {key: jax.tree.map(jnp.zeros_like if key == "inducing" else jnp.ones_like, v) for key, v in start.items()}
    )
    best = [math.inf, np.asarray(flat)]
    count = 0

    def numpy_loss(theta):
        nonlocal count, best
        if count and clock() > end:
            raise OutOfTime
        value, slope = loss(restore(jnp.asarray(theta, flat.dtype)))
        count += 1
        if value < best[0]:
            best = [float(value), theta.copy()]
        return float(value), np.asarray(ravel_pytree(slope)[0], float)

    jax.block_until_ready(loss(start))
    end = clock() + seconds
    bounds = [LOG_BOUNDS if log else (None, None) for log in np.asarray(is_log)]
    options = {"maxiter": max(int(steps), 1), "maxfun": 2 * max(int(steps), 1), "ftol": 1e-9, "gtol": 1e-6}
    try:
        minimize(numpy_loss, np.asarray(flat, float), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    except OutOfTime:
        pass
    return restore(jnp.asarray(best[1], flat.dtype)), count


def fit_minibatches(name: str, data: Data, args: argparse.Namespace) -> Fit:
    """By Adam on random batches, as many steps as there is time for; SVGP's q(ε) by natural gradients."""
    start, rows, key, now = start_of(name, data, args), len(data.y), jax.random.key(args.seed), clock(args.cpu_time)
    fixed = prepare(name, data, start, args)
    batch = min(args.batch_size, rows)

    def model(X, near, y=None):
        positive = constraints.softplus_positive
        values = {
            key: numpyro.param(key, jnp.exp(start[key]), constraint=positive)
            for key in ("lengthscale", "variance", "noise")
        }
        kernel = KERNELS[args.kernel](values["lengthscale"], variance=values["variance"])
        f = component_of(name, kernel, start, fixed, batch).draw()
        with npgp.plate("data", rows, rows=X.shape[0]):
            npgp.observe("y", f(X) if near is None else f(X, near), npgp.Gaussian(variance=values["noise"]), obs=y)

    def trainer(steps):
        adam = npgp.adam(args.learning_rate, steps)
        optimizer = npgp.natural_gradient(0.1, adam) if name == "svgp" else adam
        return SVI(model, npgp.AutoSparseGP(model), optimizer, TraceMeanField_ELBO())

    # VNNGP's rows are its inducing points.
    arrays = (data.X, np.arange(rows, dtype=np.int32)[:, None] if name == "vnngp" else None, data.y)
    began = now()
    some = [a if a is None else a[:batch] for a in arrays]
    steps = args.steps or steps_in(trainer(None), some, args.budget, now)
    aside, svi = now() - began, trainer(steps)
    result = npgp.fit(svi, key, steps, *arrays, batch_size=batch, progress=False)
    # Batches of one epoch, which leave out fewer rows than there are in a batch.
    value, _ = npgp.evaluate(svi, key, result, *arrays, num_draws=max(rows // batch, 2), batch_size=batch)
    params = {key: jnp.log(result.params[key]) for key in ("lengthscale", "variance", "noise")}
    params |= {"inducing": result.params["inducing"]} if name == "svgp" else {}
    posterior = npgp.posterior("f", model, svi.guide, result.params, *some[:2])
    moments = jax.jit(lambda posterior, *new: posterior.mean_and_variance(*new))

    def predict(new):
        return moments(posterior, new, *neighbors_of(new, name, data, fixed))

    return Fit(params, value / rows, predict, steps, aside)


def steps_in(svi: SVI, arrays: Sequence[Any], seconds: float, now: Callable[[], float], some: int = 10) -> int:
    """How many steps there is time for, by the speed of a few."""
    state = svi.init(jax.random.key(0), *arrays)
    step = jax.jit(lambda state, arrays: svi.update(state, *arrays)[0])
    state = jax.block_until_ready(step(state, arrays))
    began = now()
    for _ in range(some):
        state = step(state, arrays)
    jax.block_until_ready(state)
    return max(int(seconds * some / (now() - began)), 1)


def fit_one(name: str, data: Data, args: argparse.Namespace) -> tuple[dict[str, Any], Fit]:
    """Fit and predict; the figures, and the fit."""
    before, now = peak_memory(), clock(args.cpu_time)
    began = now()
    fit = (fit_minibatches if name in MINIBATCHES else fit_all_rows)(name, data, args)
    fitted = now()
    jax.block_until_ready(fit.predict(data.X_test))  # compiles
    predicting = now()
    mean, variance = jax.block_until_ready(fit.predict(data.X_test))
    done = now()
    noise = float(np.exp(fit.params["noise"]))
    rmse, nlpd = scores(mean, np.asarray(variance, float) + noise, data.y_test)
    return {
        "rmse": rmse,
        "nlpd": nlpd,
        "value_per_row": fit.value,
        "value_is": METHODS[name].value,
        "fit_seconds": fitted - began - fit.aside,
        "predict_seconds": done - predicting,
        "memory_mib": None if args.here else (peak_memory() - before) / 2**20,
        "evaluations": fit.evaluations,
        "lengthscale": np.exp(fit.params["lengthscale"]).tolist(),
        "variance": float(np.exp(fit.params["variance"])),
        "noise_variance": noise,
    }, fit
