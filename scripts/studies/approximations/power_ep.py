#!/usr/bin/env python
"""Power EP for sparse GP regression, between the variational bounds and FITC or PITC: does it predict better?

Bounds (``npgp.CollapsedGP`` with ``prior``, ``tight`` and ``grouped``) and approximations that are none
(``npgp.ApproximateGP``: FITC, PITC, and power EP with several powers, row by row or in blocks, with the residual as in
the prior or structured), each with the same inducing points at the start, groups, and iterations of L-BFGS over
hyperparameters and inducing inputs, in float64. Matérn-3/2 with a lengthscale for each column; standardized data.

    NPGP_DATA=... python scripts/studies/approximations/power_ep.py --markdown scripts/benchmarks/results/power_ep.md

About a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, command, moments, one_blas_thread, plus_minus, table, whole, write_json
from studies.regression.collapsed_fits import load, start_at
from studies.regression.minibatch import scores
from studies.shared import lbfgs, show_and_write, summarize, summary_table

SETS = ("concrete", "kin8nm", "power")


class Kind(NamedTuple):
    """What has a program of its own: a bound's conditional, or a method of ``ApproximateGP`` with a power."""

    name: str
    grouped: bool


class Method(NamedTuple):
    """A kind, and its power if it has one."""

    kind: Kind
    power: float | None = None

    @property
    def title(self) -> str:
        if self.power is None:
            return self.kind.name
        if self.power == 1.0:
            return "PITC" if self.kind.grouped else "FITC"
        return f"{self.kind.name}, {'blocks' if self.kind.grouped else 'rows'}, α = {self.power:g}"


BOUNDS = (Kind("prior", False), Kind("tight", False), Kind("grouped", True))
MODELS = (Kind("pep", False), Kind("pep", True))
STRUCTURED = (Kind("structured-pep", False), Kind("structured-pep", True))


def methods(powers: list[float]) -> list[Method]:
    found = [Method(kind) for kind in BOUNDS] + [Method(kind, 1.0) for kind in MODELS]
    return found + [Method(kind, power) for kind in (*MODELS, *STRUCTURED) for power in powers]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--sets", nargs="+", choices=SETS, default=list(SETS))
    add("--splits", type=whole, default=3, help="how many of the train/test splits")
    add("--powers", type=float, nargs="+", default=[0.1, 0.5, 0.8], help="below 1, which is FITC and PITC")
    add("--iterations", type=whole, default=150, help="of L-BFGS, at most")
    add("--group-size", type=whole, default=32, help="rows in a block, at most")
    add("--markdown", type=Path, help="write the tables to this file")
    rows = dict(default=2000, help="of larger training sets, as many rows at random")
    parser.shared("quick", "json", rows=rows, inducing=64, seed=1)
    args = parser.read(argv)
    if not all(0.0 < power < 1.0 for power in args.powers):
        parser.error("--powers must be between 0 and 1.")
    if args.quick:
        args.sets, args.splits, args.powers, args.rows = ["concrete"], 2, [0.5], 120
        args.inducing, args.iterations, args.group_size = 8, 8, 8
    return args


def gp_at(theta, X, groups, power, kind: Kind) -> npgp.CollapsedGP | npgp.ApproximateGP:
    """The GP at logs of D lengthscales, variance and noise variance, and inducing inputs, in one vector."""
    D = X.shape[1]
    scales = jnp.exp(theta[: D + 2])
    kernel, Z = npgp.Matern32(scales[:D], variance=scales[D]), theta[D + 2 :].reshape(-1, D)
    groups = groups if kind.grouped else None
    if kind in BOUNDS:
        conditional = npgp.Grouped(groups) if kind.grouped else kind.name
        return npgp.CollapsedGP(kernel, X, Z, noise_variance=scales[D + 1], conditional=conditional)
    return npgp.ApproximateGP(kernel, X, Z, noise_variance=scales[D + 1], method=kind.name, power=power, groups=groups)


@partial(jax.jit, static_argnames="kind")
def loss_and_slope(theta, X, y, groups, power, kind: Kind):
    return jax.value_and_grad(lambda t: -gp_at(t, X, groups, power, kind).log_prob(y) / len(y))(theta)


@partial(jax.jit, static_argnames="kind")
def predict(theta, X, y, groups, power, X_new, kind: Kind):
    """Mean and variance of f from the inducing values alone, and with the local correction."""
    posterior = gp_at(theta, X, groups, power, kind).condition(y)
    likelihood = npgp.Gaussian(variance=jnp.exp(theta[X.shape[1] + 1]))
    local = npgp.local_correction(posterior, X, y, likelihood, groups)
    return posterior.mean_and_variance(X_new), local.mean_and_variance(X_new)


@jax.jit
def evidence(theta, X, y):
    """Per row, of the exact GP with these hyperparameters."""
    D = X.shape[1]
    scales = jnp.exp(theta[: D + 2])
    kernel = npgp.Matern32(scales[:D], variance=scales[D])
    return npgp.exact_log_evidence(kernel, X, y, noise_variance=scales[D + 1]) / len(y)


def fit(name: str, split: int, method: Method, data, args: argparse.Namespace) -> dict[str, Any]:
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    groups = npgp.median_split(data.X_train, args.group_size)
    power = 1.0 if method.power is None else method.power
    given = X, y, groups, power
    start = start_at(data.X_train, args.inducing, args.seed)
    jax.block_until_ready(loss_and_slope(start, *given, kind=method.kind))  # compiles
    began = time.perf_counter()
    loss = lambda theta: loss_and_slope(theta, *given, kind=method.kind)  # noqa: E731
    found = lbfgs(loss, start, args.iterations, X.shape[1] + 2)
    seconds = time.perf_counter() - began
    noise = math.exp(found.x[X.shape[1] + 1])
    plain, local = (
        scores(np.asarray(mean), np.asarray(variance) + noise, data.y_test)
        for mean, variance in predict(found.x, *given, data.X_test, kind=method.kind)
    )
    return {
        "set": name,
        "split": split,
        "method": method.title,
        **plain,
        **{f"{key}_local": value for key, value in local.items()},
        "objective": -float(found.fun),
        "above_evidence": -float(found.fun) - float(evidence(found.x, X, y)),
        "noise_variance": noise,
        "ms": 1e3 * seconds / found.nfev,
    }


FIGURES = {
    "rmse": ("test RMSE", 4),
    "log_likelihood": ("test log-likelihood", 4),
    "gain": ("… less `tight`'s", 4),
    "rmse_local": ("RMSE +", 4),
    "log_likelihood_local": ("log-likelihood +", 4),
    "above_evidence": ("objective less exact evidence, per row", 3),
    "noise_variance": ("noise variance", 4),
    "ms": ("ms", 1),
}


def tables(fits: list[dict[str, Any]], markdown: bool = False) -> str:
    """A table for each set, and the mean rank of each method over sets and splits."""
    tight = {(fit["set"], fit["split"]): fit["log_likelihood"] for fit in fits if fit["method"] == "tight"}
    fits = [fit | {"gain": fit["log_likelihood"] - tight[fit["set"], fit["split"]]} for fit in fits]
    text = []
    for name in dict.fromkeys(fit["set"] for fit in fits):
        rows = summarize([fit for fit in fits if fit["set"] == name], ("method",), tuple(FIGURES))
        cells = summary_table(rows, {"method": "method"}, FIGURES, markdown=markdown)
        text.append(f"{'## ' if markdown else ''}{name}\n\n{cells}")
    cells = []
    for method in dict.fromkeys(fit["method"] for fit in fits):
        own = [fit for fit in fits if fit["method"] == method]
        ranks = {}
        for key, sign in (("rmse", 1), ("log_likelihood", -1)):
            ranks[key] = [
                1 + sum(sign * other[key] < sign * fit[key] for other in fits if same_data(other, fit)) for fit in own
            ]
        gain = moments([fit["gain"] for fit in own])
        cells.append([method, *(f"{np.mean(rank):.1f}" for rank in ranks.values()), plus_minus(*gain, 4)])
    heads = ("method", "mean rank by RMSE", "by log-likelihood", "log-likelihood less `tight`'s")
    text.append(f"{'## ' if markdown else ''}All sets and splits\n\n{table(heads, cells, markdown=markdown)}")
    return "\n\n".join(text)


def same_data(one: dict, other: dict) -> bool:
    return (one["set"], one["split"]) == (other["set"], other["split"])


NOTE = (
    "Means ± standard errors over splits, of the standardized target, at the same start, iterations and groups. "
    "+: with the local correction, from the training rows of the same group. Evidence: of the exact GP at the fitted "
    "hyperparameters; a bound is below it. ms: an evaluation with its gradient."
)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    report: dict[str, Any] = {"command": command(__file__, argv), "fits": []}
    with one_blas_thread():
        for name in args.sets:
            for split in range(args.splits):
                data = load(name, split, args)
                for method in methods(args.powers):
                    report["fits"].append(found := fit(name, split, method, data, args))
                    print(
                        f"{name}, split {split}, {method.title}: RMSE {found['rmse']:.4f}, log-likelihood "
                        f"{found['log_likelihood']:.4f}, {found['ms']:.0f} ms",
                        flush=True,
                    )
                write_json(args.json, report, say=False)
    show_and_write(report, tables, "Power EP", NOTE, args)
    return report


if __name__ == "__main__":
    main()
