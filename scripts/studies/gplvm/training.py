"""What studies of GPLVMs share: their arguments, the oil-flow data, training in minibatches, and errors of entries."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from common import Arguments, cached
from npgp import datasets
from npgp.gplvm import BayesianGPLVM, pca_start
from npgp.training import row_adam

#: How a positive parameter is made of a free one.
POSITIVE = {"softplus": constraints.softplus_positive, "log": constraints.positive}
#: The quantile of a standard normal that leaves 5% on each side.
QUANTILE = 1.6448536


def add_arguments(parser: Arguments, *, minibatches: bool = True, **defaults: Any) -> None:
    """
    Data, sizes and rates.

    :param minibatches: with the options of :class:`Trainer`.
    :param defaults: as of :meth:`common.Arguments.shared`.
    """
    add = parser.add_argument
    add("--data", choices=["simulated", "real"], default="simulated")
    rate = dict(default=0.03, help="at first; it falls to 2%% along a cosine")
    if minibatches:
        defaults["batch_size"] = dict(type=int, default=100, help="rows per step; 0 for all")
        add("--row-rate", type=float, default=0.1, help="that of the parameters of rows")
    rows = dict(help="the first so many rows; 200 to simulate, or all real ones, if omitted")
    parser.shared("out", "json", **{"rows": rows, "learning_rate": rate} | defaults)


def fill(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Put defaults that depend on other arguments where there is none."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def oil_flow(args: argparse.Namespace) -> datasets.OilFlow:
    """The first rows of the oil-flow data, or simulated ones."""
    if args.data == "simulated":
        return datasets.simulate_oil_flow(jax.random.key(0), args.rows or 200)
    data = datasets.oil_flow("train")
    return datasets.OilFlow(data.Y[: args.rows], data.labels[: args.rows], None)


def kept(args: argparse.Namespace, name: str, settings: Mapping[str, Any], run: Callable[[], dict]) -> dict:
    """The figures of a run, named when it runs: from its file in ``--runs`` if that has these settings."""

    def announced() -> dict:
        print(f"  {name}", flush=True)
        return run()

    return cached(args.runs / f"{name}.json", settings, announced)


def chosen(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The arguments of these names."""
    return {name: getattr(args, name) for name in names}


class Trainer:
    """
    Training of a GPLVM by Adam, in minibatches whose rows alone are touched.

    :param Y: (N, D), NaN where nothing is present.
    :param mask: what is present, (N, D), or ``None`` where everything is.
    :param row_tables: whether latents have parameters for each row.
    """

    def __init__(self, gplvm: BayesianGPLVM, args: argparse.Namespace, Y, mask, seed: int, row_tables: bool = True):
        optimizer = npgp.adam(args.learning_rate, args.steps)
        self.svi = SVI(gplvm.model, gplvm.guide, optimizer, TraceMeanField_ELBO())
        self.Y, self.steps = jnp.asarray(Y, jnp.result_type(float)), args.steps
        self.key, self.evaluation = jax.random.split(jax.random.key(seed))
        self.data: dict[str, Any] = {} if mask is None else {"mask": jnp.asarray(mask)}
        self.batches: dict[str, Any] = {}
        self.row_optim = None
        if args.batch_size and args.batch_size < len(Y):
            self.batches = {"batch_size": args.batch_size}
            self.row_optim = row_adam(args.row_rate, args.steps) if row_tables else None

    def fit(self):
        """The result of ``npgp.fit``."""
        how = self.batches | ({} if self.row_optim is None else {"row_optim": self.row_optim})
        how |= {"indices": "rows", "progress": False}
        return npgp.fit(self.svi, self.key, self.steps, self.Y, **how, **self.data)

    def elbo(self, result, **batches: int) -> float:
        """The ELBO per row, a mean over 100 draws: of all rows, or of batches of ``batch_size``."""
        how = {"indices": "rows", "num_draws": 100, **batches}
        return npgp.evaluate(self.svi, self.evaluation, result, self.Y, **how, **self.data)[0] / len(self.Y)


def train(args: argparse.Namespace, Y: np.ndarray, mask: np.ndarray | None, seed: int, **options) -> tuple:
    """
    Start and train a GPLVM; the model, its parameters, and the ELBO per row.

    :param Y, mask: as of :class:`Trainer`.
    :param options: further ones of the model.
    """
    start = pca_start(jax.random.key(seed), Y, args.latent_dim, args.inducing, mask=mask)
    scale = float(np.mean(np.square(start.data_scale)))
    lengthscale = math.sqrt(args.latent_dim)  # latents of unit variance are √(2Q) apart
    start = dataclasses.replace(start, noise_variance=scale, variance=scale, lengthscale=lengthscale)
    gplvm = BayesianGPLVM(start, **options)
    trainer = Trainer(gplvm, args, Y, mask, seed)
    result = trainer.fit()
    return gplvm, result.params, trainer.elbo(result, **trainer.batches)


def rmse(values, truth: np.ndarray, where: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(values) - truth)[where])))


def coverage(mean, scale, truth: np.ndarray, where: np.ndarray) -> float:
    """The share of the true values that lie in central 90% intervals."""
    return float(np.mean((np.abs(np.asarray(mean) - truth) <= QUANTILE * np.asarray(scale))[where]))


def errorbars(ax, at: Sequence[float], values: Sequence[Sequence[float]], **style: Any) -> None:
    """Means of several seeds' values against something, with their standard errors."""
    errors = [np.std(v, ddof=1) / math.sqrt(len(v)) if len(v) > 1 else 0.0 for v in values]
    ax.errorbar(at, [np.mean(v) for v in values], errors, marker="o", ms=4, lw=1.2, capsize=2, **style)
