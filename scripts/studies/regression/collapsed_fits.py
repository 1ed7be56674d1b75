"""Collapsed fits by L-BFGS, for ``regression_study.py``: data, bound, predictions, and time in turn."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import npgp
import npgp.inducing
from common import interleaved
from npgp import datasets
from studies.shared import lbfgs

CONDITIONALS = ("prior", "tight", "grouped")


def _isotropic(kernel: type[npgp.RBF | npgp.Matern32]) -> Callable[..., Any]:
    """With one lengthscale for all columns, the geometric mean of theirs."""
    return lambda lengthscale, variance: kernel(jnp.exp(jnp.mean(jnp.log(lengthscale))), variance=variance)


KERNELS: dict[str, Callable[..., Any]] = {"matern32": npgp.Matern32, "rbf": npgp.RBF}
KERNELS |= {f"{name}-isotropic": _isotropic(kernel) for name, kernel in KERNELS.items()}


def load(name: str, split: int, args: argparse.Namespace) -> datasets.RegressionSplit:
    """A split, with at most so many training rows and half as many test rows, at random."""
    data = datasets.uci(name, split)
    rng = np.random.default_rng(args.seed)
    fields = data.__dict__.copy()
    for kind, most in (("train", args.rows), ("test", max(args.rows // 2, 1))):
        if len(fields[f"y_{kind}"]) > most:
            rows = np.sort(rng.choice(len(fields[f"y_{kind}"]), most, replace=False))
            for key in (f"X_{kind}", f"y_{kind}"):
                fields[key] = fields[key][rows]
    return datasets.RegressionSplit(**fields)


class Fit(NamedTuple):
    """A collapsed fit: the bound, where it is taken, and how many iterations that took."""

    bound: float
    theta: np.ndarray
    iterations: int


def gp_at(theta, X, groups, conditional: str, kernel: str) -> npgp.CollapsedGP:
    """The GP at logs of D lengthscales, variance and noise variance, and inducing inputs, in one vector."""
    columns = X.shape[1]
    scales = jnp.exp(theta[: columns + 2])
    return npgp.CollapsedGP(
        KERNELS[kernel](scales[:columns], variance=scales[columns]),
        X,
        theta[columns + 2 :].reshape(-1, columns),
        noise_variance=scales[columns + 1],
        conditional=npgp.Grouped(groups) if conditional == "grouped" else conditional,
    )


@partial(jax.jit, static_argnames=("conditional", "kernel"))
def loss_and_slope(theta, X, y, groups, conditional: str, kernel: str):
    """The negative bound for each row, and its gradient."""
    return jax.value_and_grad(lambda t: -gp_at(t, X, groups, conditional, kernel).log_prob(y) / len(y))(theta)


def start_at(X: np.ndarray, inducing: int, seed: int) -> np.ndarray:
    """Lengthscales √D, variance 1, noise variance .1, inducing inputs from k-means."""
    columns = X.shape[1]
    Z = np.asarray(npgp.inducing.kmeans(jax.random.key(seed), X, inducing))
    return np.concatenate([np.full(columns, 0.5 * math.log(columns)), [0.0, math.log(0.1)], Z.ravel()])


def fit(data, groups, conditional: str, start: np.ndarray, args: argparse.Namespace) -> Fit:
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    loss = partial(loss_and_slope, X=X, y=y, groups=groups, conditional=conditional, kernel=args.kernel)
    optimum = lbfgs(loss, start, args.iterations, X.shape[1] + 2)
    return Fit(-float(optimum.fun), optimum.x, int(optimum.nit))


@partial(jax.jit, static_argnames=("conditional", "kernel"))
def condition(theta, X, y, groups, conditional: str, kernel: str) -> npgp.Posterior:
    return gp_at(theta, X, groups, conditional, kernel).condition(y)


@jax.jit
def predict(posterior, X):
    return posterior.mean_and_variance(X)


def in_turn(
    calls: Mapping[str, Callable[[], Any]], base: str, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, tuple[float, float]]:
    """Of each call the median of its milliseconds, and that of its ratio to the base in the same round."""
    seconds = interleaved(calls, rounds, clock, seed=None)
    return {name: (1e3 * float(np.median(s)), float(np.median(s / seconds[base]))) for name, s in seconds.items()}
