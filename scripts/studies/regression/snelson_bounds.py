"""Bounds on Snelson's data, for ``regression_study.py``: five inducing points, and five mean-only points more."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import npgp
from common import note, table
from npgp import datasets
from studies.regression.collapsed_fits import CONDITIONALS
from studies.shared import lbfgs

#: Snelson's data: relative to the prior variance.
SNELSON_JITTER = 1e-6


@partial(jax.jit, static_argnames=("mean_only", "conditional"))
def snelson_loss(theta, X, y, groups, mean_only: int, conditional: str):
    def loss(theta):
        lengthscale, variance, noise = jnp.exp(theta[:3])
        points = theta[3:, None]
        blocks = [points[: len(points) - mean_only], points[len(points) - mean_only :]][: 1 + (mean_only > 0)]
        return -npgp.CollapsedGP(
            npgp.RBF(lengthscale, variance=variance),
            X,
            blocks,
            noise_variance=noise,
            conditional=npgp.Grouped(groups) if conditional == "grouped" else conditional,
            covariances=("dense", "mean-only")[: len(blocks)],
            jitter=SNELSON_JITTER,
        ).log_prob(y)

    return jax.value_and_grad(loss)(theta)


def snelson(args: argparse.Namespace) -> dict:
    """Bounds with five inducing points, by conditional."""
    inputs, targets, _ = datasets.snelson()
    X, y = jnp.asarray(inputs), jnp.asarray(targets)
    print("SNELSON'S DATA, 200 rows, squared-exponential kernel\n")
    note(
        "Bounds maximized over lengthscale, variance, noise and inducing inputs: from lengthscale = variance = noise "
        f"= 1 and random data points, and the best of that start and {args.restarts} random ones."
    )
    print()

    @jax.jit
    @jax.value_and_grad
    def evidence_loss(theta):
        lengthscale, variance, noise = jnp.exp(theta)
        return -npgp.exact_log_evidence(npgp.RBF(lengthscale, variance=variance), X, y, noise_variance=noise)

    exact = -float(lbfgs(evidence_loss, np.zeros(3), 200, 3).fun)
    report: dict[str, Any] = {"exact": exact}
    cases = {"5 points": (0, 10), "5 points and 5 mean-only": (5, 25)}
    for title, (mean_only, size) in cases.items():
        rng = np.random.default_rng(args.seed)
        starts = []
        for i in range(args.restarts + 1):
            points = inputs[rng.choice(len(inputs), 5, replace=False), 0]
            hyper = np.zeros(3) if i == 0 else rng.normal(size=3)
            more = rng.choice(inputs[:, 0], mean_only, replace=False)
            starts.append(np.concatenate([hyper, points, more]))
        groups = npgp.median_split(inputs, size)
        rows, figures = [], {}
        for conditional in (*CONDITIONALS, "full"):
            part = groups if conditional == "grouped" else None
            loss = partial(snelson_loss, X=X, y=y, groups=part, mean_only=mean_only, conditional=conditional)
            fits = [lbfgs(loss, start, 4 * args.iterations, 3) for start in starts]
            best = min(fits, key=lambda fit: fit.fun)
            lengthscale, variance, noise = map(float, np.exp(best.x[:3]))
            figures[conditional] = {
                "first_start": -float(fits[0].fun),
                "best": -float(best.fun),
                "lengthscale": lengthscale,
                "variance": variance,
                "noise_variance": noise,
            }
            label = f"{conditional}, groups of at most {size}" if part is not None else conditional
            numbers = figures[conditional].values()
            rows.append((label, *(f"{v:.{2 if i < 2 else 3}f}" for i, v in enumerate(numbers))))
        report[title] = figures
        rows.append(("exact GP", "", f"{exact:.2f}", "", "", ""))
        print(table((title, "first start", "best", "lengthscale", "variance", "noise"), rows), end="\n\n")
    return report
