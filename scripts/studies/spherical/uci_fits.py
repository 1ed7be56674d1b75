"""Collapsed bounds with spherical features or points, and their fits in three sizes."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import common
import npgp
import npgp.inducing
from npgp import datasets
from npgp.features import Activations, Points, ReLU, Softplus
from npgp.inducing.levels import choose_levels, left_out
from npgp.kernels import Kernel, ZonalArcCosine, ZonalMatern52
from studies.shared import lbfgs

#: The kernels, and what the first block is made of.
KERNELS = ("arccos", "matern52")
FEATURES = ("relu", "softplus", "points")
#: Logs of weights, bias, noise variance and lengthscale stay within these.
LOG_BOUNDS = (-12.0, 8.0)
#: The highest level that is tried; and rows that variance is left out of.
HIGHEST, LEVEL_ROWS = 6, 500
#: Coefficients of activations below this, relative to the largest, are rounding error.
ABSENT = 1e-6


def sizes(size: int) -> dict[str, tuple[int, ...]]:
    """The blocks of each column of the tables, by its name."""
    return {str(size): (size,), f"{size}+{size}": (size, size), str(2 * size): (2 * size,)}


# The model, at a vector: logs of D weights, bias, noise variance (and lengthscale), then blocks row by row


class Model(NamedTuple):
    """What a compiled bound depends on, other than arrays."""

    kernel: str
    feature: str
    blocks: tuple[int, ...]
    levels: tuple[int, ...] = ()
    conditional: str = "prior"

    def logs(self, columns: int) -> int:
        """How many logs of hyperparameters there are."""
        return columns + 2 + (self.kernel == "matern52")

    def kernel_at(self, theta, columns: int) -> Kernel:
        hyper = jnp.exp(theta[: self.logs(columns)])
        weights, bias = hyper[:columns], hyper[columns]
        if self.kernel == "arccos":
            return ZonalArcCosine(weight_variance=weights, bias_variance=bias)
        return ZonalMatern52(hyper[-1], weight_variance=weights, bias_variance=bias)

    def blocks_at(self, theta, columns: int) -> list[Points | Activations]:
        width = columns + (self.feature != "points")
        end = self.logs(columns) + self.blocks[0] * width
        first = theta[self.logs(columns) : end].reshape(-1, width)
        if self.feature == "points":
            blocks: list[Points | Activations] = [Points(first)]
        else:
            blocks = [Activations(first, ReLU() if self.feature == "relu" else Softplus(), self.levels)]
        return blocks + [Points(theta[end:].reshape(-1, columns))][: len(self.blocks) - 1]

    def gp(self, theta, X) -> npgp.CollapsedGP:
        columns = X.shape[1]
        return npgp.CollapsedGP(
            self.kernel_at(theta, columns),
            X,
            self.blocks_at(theta, columns),
            noise_variance=jnp.exp(theta[columns + 1]),
            conditional=self.conditional,  # type: ignore[arg-type]
            covariances=("dense",) * len(self.blocks),
        )


@partial(jax.jit, static_argnames="model")
def loss_and_slope(theta, X, y, model: Model):
    """The negative bound for each row, and its gradient."""
    return jax.value_and_grad(lambda t: -model.gp(t, X).log_prob(y) / len(y))(theta)


@partial(jax.jit, static_argnames="model")
def bound(theta, X, y, model: Model):
    """The bound for each row."""
    return model.gp(theta, X).log_prob(y) / len(y)


@partial(jax.jit, static_argnames="model")
def predict(theta, X, y, X_test, model: Model):
    """Mean and variance of y at test inputs; and the share of f's variance that the features leave out of rows of X."""
    gp = model.gp(theta, X)
    mean, variance = gp.condition(y).mean_and_variance(X_test)
    return mean, variance + gp.noise_variance, left_out(gp.kernel, gp.blocks, X)


def scores(data: datasets.RegressionSplit, mean, variance) -> dict[str, float]:
    """RMSE and NLPD of test rows in the target's own units, from standardized predictions of y."""
    rmse, nlpd = common.scores(mean, variance, data.y_test)
    return {"rmse": data.y_scale * rmse, "nlpd": math.log(data.y_scale) + nlpd}


def fit(data: datasets.RegressionSplit, model: Model, start: np.ndarray, iterations: int) -> tuple[np.ndarray, dict]:
    """The vector at the optimum, and what is reported of it."""
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    began = time.perf_counter()

    loss = partial(loss_and_slope, X=X, y=y, model=model)
    optimum = lbfgs(loss, start, iterations, model.logs(X.shape[1]), LOG_BOUNDS, ftol=1e-11, maxcor=20)
    mean, variance, share = predict(optimum.x, X, y, jnp.asarray(data.X_test), model)
    return optimum.x, {
        **scores(data, mean, variance),
        "bound": -float(optimum.fun),
        "bound_start": -float(loss(start)[0]),
        "left_out": float(share),
        "levels": list(model.levels),
        "noise_variance": float(np.exp(optimum.x[X.shape[1] + 1])),
        "iterations": int(optimum.nit),
        "converged": bool(optimum.success),
        "rows": len(y),
        "test_rows": len(data.y_test),
        "seconds": time.perf_counter() - began,
    }


def first_rows(model: Model, theta, points: np.ndarray) -> np.ndarray:
    """Points as rows of the model's first block: themselves, or as directions."""
    if model.feature == "points":
        return points
    return np.asarray(model.kernel_at(theta, points.shape[1]).polar(points)[1])  # type: ignore[attr-defined]


def first_start(data: datasets.RegressionSplit, model: Model, Z: np.ndarray) -> np.ndarray:
    """The vector with a first block at Z, and of a few hyperparameters those with the best bound."""
    columns = Z.shape[1]
    lengthscales = [()] if model.kernel == "arccos" else [(math.log(0.5),), (math.log(1.5),)]
    tried = []
    for weight, noise, scale in itertools.product((0.1, 0.3, 1.0, 3.0), (0.01, 0.1, 0.5), lengthscales):
        logs = np.concatenate([np.full(columns, math.log(weight / columns)), [0.0, math.log(noise), *scale]])
        tried.append(np.concatenate([logs, first_rows(model, logs, Z).ravel()]))
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    return tried[int(np.nanargmax([float(bound(theta, X, y, model)) for theta in tried]))]


def candidates(model: Model, theta: np.ndarray, data: datasets.RegressionSplit, rule: str) -> list[Model]:
    """The model with the levels that the rule allows its activations; the kernel and directions are those of theta."""
    if model.feature == "points":
        return [model]
    columns = data.X_train.shape[1]
    kernel: Any = model.kernel_at(theta, columns)
    if rule.isdigit():
        tried = tuple(range(int(rule)))
        present = np.asarray(kernel.level_variances(tried, columns + 1)) > 0
        return [model._replace(levels=tuple(level for level in tried if present[level]))]
    units: Any = model._replace(levels=tuple(range(HIGHEST + 1))).blocks_at(theta, columns)[0]
    if rule == "left-out":
        rows = np.random.default_rng(0).permutation(len(data.y_train))[:LEVEL_ROWS]
        choice = choose_levels(kernel, units, jnp.asarray(data.X_train[rows]), most=HIGHEST)
        return [model._replace(levels=choice.block.levels)]
    profile = np.abs(np.asarray(units.profile(kernel)))
    has = [level for level in units.levels if profile[level] > ABSENT * np.max(profile)]
    return [model._replace(levels=tuple(has[: i + 1])) for i in range(1, len(has))]


def best(models: Sequence[Model], starts: Sequence[np.ndarray], data, iterations: int) -> int:
    """Which of several models has the best bound after a quarter of the iterations."""
    if len(models) == 1:
        return 0
    quarter = max(iterations // 4, 1)
    return int(np.argmax([fit(data, *pair, quarter)[1]["bound"] for pair in zip(models, starts, strict=True)]))


Levels = dict[str, tuple[int, ...]]


def three_sizes(data, kernel: str, feature: str, args: argparse.Namespace, levels: Levels) -> dict[str, dict]:
    """
    Fit M features, M with M orthogonal points, and 2M features.

    :param levels: of the activations in each column, where they are known; filled in where they are not.
    """
    (alone, both, double), columns = sizes(args.size), data.X_train.shape[1]
    Z = np.asarray(npgp.inducing.kmeans(jax.random.key(0), jnp.asarray(data.X_train), args.size))
    model = Model(kernel, feature, (args.size,), levels.get(alone, ()), args.conditional)
    if feature == "points" or alone in levels:
        start = first_start(data, model, Z)
    else:
        points = model._replace(feature="points")
        logs = first_start(data, points, Z)[: model.logs(columns)]
        models = candidates(model, np.concatenate([logs, first_rows(model, logs, Z).ravel()]), data, args.levels)
        starts = [first_start(data, model, Z) for model in models]
        chosen = best(models, starts, data, args.iterations)
        model, start = models[chosen], starts[chosen]
    theta, report = fit(data, model, start, args.iterations)
    levels.setdefault(alone, model.levels)
    reports = {alone: report}

    fitted, first = model.kernel_at(theta, columns), model.blocks_at(theta, columns)
    new = np.asarray(npgp.inducing.greedy_variance(fitted, jnp.asarray(data.X_train), args.size, given=first))
    logs, units = theta[: model.logs(columns)], theta[model.logs(columns) :].reshape(args.size, -1)
    if feature != "points":  # as long as the new ones
        units = units / np.linalg.norm(units, axis=1, keepdims=True)
    theta = np.concatenate([logs, units.ravel()])

    second = model._replace(blocks=(args.size, args.size))
    levels.setdefault(both, second.levels)
    _, reports[both] = fit(data, second, np.concatenate([theta, new.ravel()]), args.iterations)

    start = np.concatenate([theta, first_rows(model, theta, new).ravel()])
    model = model._replace(blocks=(2 * args.size,))
    if double in levels:
        model = model._replace(levels=levels[double])
    else:
        models = candidates(model, start, data, args.levels)
        model = models[best(models, [start] * len(models), data, args.iterations)]
    levels.setdefault(double, model.levels)
    _, reports[double] = fit(data, model, start, args.iterations)
    return reports
