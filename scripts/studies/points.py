"""How near inducing points have to be: what a bound learns with points of some spacing, beside the exact evidence."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.optimize import minimize

import npgp
from npgp import kernels
from studies.runner import Study

KERNELS: dict[str, Callable[..., Any]] = {
    "Matern12": kernels.Matern12,
    "Matern32": npgp.Matern32,
    "Matern52": npgp.Matern52,
    "RBF": npgp.RBF,
    "Periodic": lambda lengthscale, variance=1.0: kernels.Periodic(1.0, lengthscale=lengthscale, variance=variance),
}
#: Lengths of the sides of the box in lengthscales, by columns. A period is a circle of 2π.
SIDES = {1: 30.0, 2: 6.0, 3: 3.0}


def learned(log_evidence: Callable[..., jax.Array]) -> tuple[np.ndarray, float]:
    """Lengthscale, variance and noise variance that are best, and the log evidence there, from (1, 1, .01)."""
    function = jax.jit(jax.value_and_grad(lambda x: -log_evidence(*jnp.exp(x))))
    found = minimize(function, np.log([1.0, 1.0, 0.01]), jac=True, method="L-BFGS-B", bounds=[(-5.0, 5.0)] * 3)
    return np.exp(found.x), -float(found.fun)


def exact_evidence(X: np.ndarray, y: np.ndarray, make: Callable[..., Any]) -> Callable[..., jax.Array]:
    def log_evidence(lengthscale, variance, noise):
        K = make(lengthscale, variance=variance)(X) + noise * jnp.eye(len(X))
        return jax.scipy.stats.multivariate_normal.logpdf(y, jnp.zeros(len(X)), K)

    return log_evidence


def near(args: argparse.Namespace, kernel: str, columns: int, spacing: float) -> dict[str, Any]:
    rng, make = np.random.default_rng(args.seed), KERNELS[kernel]
    side, unit = (1.0, 0.5 / np.pi) if kernel == "Periodic" else (SIDES[columns], 1.0)  # one period is all there is
    X = rng.uniform(0.0, side, (args.rows, columns))
    f = np.linalg.cholesky(make(1.0)(X) + 1e-8 * np.eye(args.rows)) @ rng.normal(size=args.rows)
    y = f + args.noise * rng.normal(size=args.rows)
    axis = np.linspace(0.0, side, round(side / (spacing * unit)) + 1)
    Z = np.stack(np.meshgrid(*columns * [axis], indexing="ij"), -1).reshape(-1, columns)

    def bound(lengthscale, variance, noise):
        gp = npgp.CollapsedGP(make(lengthscale, variance=variance), X, Z, noise_variance=noise)
        return gp.log_prob(y)

    (lengthscale, _, noise), value = learned(bound)
    (best_lengthscale, _, best_noise), best = learned(exact_evidence(X, y, make))
    return {
        "points": len(Z),
        "lengthscale": lengthscale / best_lengthscale,
        "noise_sd": np.sqrt(noise / best_noise),
        "gap": 100.0 * (best - value) / args.rows,
    }


def grown(args: argparse.Namespace, spacing: float, seed: int) -> dict[str, Any]:
    """A Matérn-3/2 function of 50 lengthscales of 2, learned with as many points as ``grow`` finds that it takes."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.0, 100.0, (args.rows, 1))
    K = npgp.Matern32(2.0)(X) + args.noise**2 * np.eye(args.rows)
    y = np.linalg.cholesky(K) @ rng.normal(size=args.rows)
    points = round(50.0 / spacing)

    def model(X, y=None):
        positive = dist.constraints.positive
        lengthscale, variance = (numpyro.param(name, 1.0, constraint=positive) for name in ("lengthscale", "variance"))
        noise = numpyro.param("noise", 1.0, constraint=positive)
        f = npgp.SparseGP("f", npgp.Matern32(lengthscale, variance=variance), inducing=points).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)

    (best, _, _), evidence = learned(exact_evidence(X, y, npgp.Matern32))

    def learns(grow):
        options = {"progress": False, "callbacks": [npgp.training.Arrival(max_steps=args.most)]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", npgp.training.TrainingWarning)  # the table has what they say
            fitted = npgp.infer(model, jax.random.key(seed), X, y=y, grow=grow, options=options)
        return fitted

    as_given, fitted = learns(None), learns(args.grow)
    return {
        "points": points,
        "grown_to": len(fitted.params["f.u.inducing"]),
        "as_given": float(as_given.params["lengthscale"]) / best,
        "lengthscale": float(fitted.params["lengthscale"]) / best,
        "exact": best,
        "gap": 100.0 * (evidence + float(fitted.result.losses[-100:].mean())) / args.rows,
    }


STUDIES = {
    "grown": Study(
        """Inducing points that are as many as it takes: what npgp.infer(..., grow=...) learns from too few at first.

Rows are uniform in 50 lengthscales of a Matérn-3/2 function, with noise; spacing is in lengthscales. The one learned,
as given and grown, is over that of the exact evidence of the same rows.""",
        grown,
        {"spacing": (1.0, 0.5, 0.25), "seed": (0, 1, 2)},
        {
            "points": ("points", 0),
            "as_given": ("lengthscale", 2),
            "grown_to": ("grown to", 0),
            "lengthscale": ("lengthscale", 2),
            "exact": ("exact lengthscale", 2),
            "gap": ("nats below, of 100 rows", 2),
        },
        {"rows": 1200, "noise": 1.0, "grow": 0.001, "most": 200_000},
        quick={"rows": 60, "spacing": [10.0], "seed": [0], "grow": 1.0, "most": 4},
    ),
    "points": Study(
        """How near inducing points have to be: what a bound learns, beside the exact evidence.

Rows are uniform in a box of 30, 6 × 6 or 3 × 3 × 3 lengthscales (of one period, for a periodic kernel), f is drawn from
the kernel, and inducing points are a grid. Lengthscale, variance and noise are those of the highest bound.""",
        near,
        {"kernel": tuple(KERNELS), "columns": (1, 2, 3), "spacing": (1.0, 0.5, 0.25, 0.125)},
        {
            "points": ("points", 0),
            "lengthscale": ("lengthscale / exact", 2),
            "noise_sd": ("noise / exact", 2),
            "gap": ("nats below, of 100 rows", 2),
        },
        {"rows": 600, "noise": 0.1, "seed": 0},
        quick={"rows": 20, "kernel": ["RBF"], "columns": [1], "spacing": [1.0]},
        lower=("gap",),
        note="Spacing is in lengthscales. Ratios are over what the exact evidence of the same rows has for best.",
    ),
}
