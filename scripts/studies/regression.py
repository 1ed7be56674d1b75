"""Collapsed fits by L-BFGS: conditionals, the local correction, the exact variance, power EP; Snelson's data."""

from __future__ import annotations

import argparse
import warnings
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from common import clock, interleaved
from studies.fits import KERNELS, Kind, condition, fit_collapsed, scores, uci
from studies.points import exact_evidence, learned
from studies.runner import Records, Study

#: Inducing points of each set.
SIZES = {"concrete": 64, "kin8nm": 128, "power": 64, "kin40k": 128, "protein": 128}
data_of = lru_cache(maxsize=1)(uci)


@jax.jit
def moments(posterior, X):
    return posterior.mean_and_variance(X)


def scored(posterior, noise: float, data, suffix: str = "") -> dict[str, float]:
    """Scores of predictions of standardized targets; the noise is added."""
    mean, variance = map(np.asarray, moments(posterior, data.X_test))
    return {f"{key}{suffix}": value for key, value in scores(mean, variance + noise, data.y_test).items()}


def with_correction(posterior, noise: float, data, groups) -> dict[str, float]:
    """Scores from the inducing values alone and with the local correction."""
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    local = npgp.local_correction(posterior, X, y, npgp.Gaussian(variance=noise), groups)
    return scored(posterior, noise, data) | scored(local, noise, data, "_local")


def conditionals(args: argparse.Namespace, set: str, split: int, conditional: str) -> dict[str, Any]:
    data = data_of(set, split, args.rows, args.seed)
    args.inducing = 10 if args.quick else SIZES[set]
    groups = npgp.sparse.median_split(data.X_train, args.group_size)
    kind = Kind(conditional, conditional == "grouped", args.kernel)
    fit = fit_collapsed(data, groups, kind, args)
    posterior = condition(fit.theta, data.X_train, data.y_train, groups, 1.0, kind)
    found = with_correction(posterior, fit.noise, data, groups)
    return found | {"bound": fit.value, "iterations": fit.iterations, "ms": 1e3 * fit.seconds / fit.evaluations}


def exact_variance(args: argparse.Namespace, set: str, kernel: str, split: int) -> dict[str, Any]:
    data = data_of(set, split, args.rows, args.seed)
    X, y, kind = jnp.asarray(data.X_train), jnp.asarray(data.y_train), Kind("tight", kernel=kernel)
    fit = fit_collapsed(data, None, kind, args)
    plain = condition(fit.theta, X, y, None, 1.0, kind)
    exact = npgp.variational.exact_variance(plain, X, y, npgp.Gaussian(variance=fit.noise))
    found: dict[str, Any] = scored(plain, fit.noise, data) | scored(exact, fit.noise, data, "_exact")
    if split == 0:
        calls = {name: lambda of=of: moments(of, data.X_test) for name, of in (("plain", plain), ("exact", exact))}
        seconds = interleaved(calls, 2 if args.quick else max(2, min(21, int(2e4 / len(y)))), clock(args.cpu_time))
        found["cost"] = float(np.median(seconds["exact"] / seconds["plain"]))
    return found


@jax.jit
def evidence(theta, X, y):
    """Per row, of the exact GP with these hyperparameters."""
    D = X.shape[1]
    scales = jnp.exp(theta[: D + 2])
    kernel = npgp.Matern32(scales[:D], variance=scales[D])
    return npgp.collapsed.exact_log_evidence(kernel, X, y, noise_variance=scales[D + 1]) / len(y)


#: Kinds and powers by their titles.
POWERS = (0.1, 0.5, 0.8)
EP: dict[str, tuple[Kind, float]] = {
    name: (Kind(name, name == "grouped"), 1.0) for name in ("prior", "tight", "grouped")
}
EP |= {"FITC": (Kind("pep"), 1.0), "PITC": (Kind("pep", True), 1.0)}
EP |= {
    f"{name}, {'blocks' if grouped else 'rows'}, α = {power:g}": (Kind(name, grouped), power)
    for name in ("pep", "structured-pep")
    for grouped in (False, True)
    for power in POWERS
}


def power_ep(args: argparse.Namespace, set: str, split: int, method: str) -> dict[str, Any]:
    data = data_of(set, split, args.rows, args.seed)
    groups, (kind, power) = npgp.sparse.median_split(data.X_train, args.group_size), EP[method]
    fit = fit_collapsed(data, groups, kind, args, power)
    posterior = condition(fit.theta, data.X_train, data.y_train, groups, power, kind)
    found = with_correction(posterior, fit.noise, data, groups)
    above = fit.value - float(evidence(fit.theta, data.X_train, data.y_train))
    return found | {"above_evidence": above, "noise_variance": fit.noise, "ms": 1e3 * fit.seconds / fit.evaluations}


def ranks(records: Records, markdown: bool) -> str:
    """The mean rank of each method over sets and splits, the best first being 1."""
    lines = []
    for method in dict.fromkeys(record["method"] for record in records):
        own = [record for record in records if record["method"] == method]
        text = []
        for key, sign in (("rmse", 1), ("log_likelihood", -1)):
            places = [
                1
                + sum(
                    sign * r[key] < sign * one[key]
                    for r in records
                    if (r["set"], r["split"]) == (one["set"], one["split"])
                )
                for one in own
            ]
            text.append(f"{np.mean(places):.1f}")
        lines.append(f"{method}: mean rank {text[0]} by RMSE, {text[1]} by log-likelihood")
    return "\n".join(f"- {line}" for line in lines)


#: The second block, which moves the mean alone, and the most rows of a group.
SNELSON = {"5": (0, 10), "5 and 5 mean-only": (5, 25)}


def snelson_bounds(args: argparse.Namespace, points: str, conditional: str, by: str) -> dict[str, float]:
    """From lengthscale = variance = noise = 1 and random data points, and the best of that and of random starts."""
    (X, y, _), (mean_only, size) = npgp.datasets.snelson(), SNELSON[points]
    rng, names = np.random.default_rng(args.seed), ("lengthscale", "variance", "noise_variance")
    kind = npgp.conditionals.Grouped(npgp.sparse.median_split(X, size)) if conditional == "grouped" else conditional
    starts = []
    for i in range(args.restarts + 1):
        start = {"Z0": X[rng.choice(len(X), 5, replace=False)]}
        start |= dict(zip(names, np.exp(np.zeros(3) if i == 0 else rng.normal(size=3)), strict=True))
        starts.append(start | ({"Z1": X[rng.choice(len(X), mean_only, replace=False)]} if mean_only else {}))

    def model(X, y):
        p = {n: numpyro.param(n, jnp.asarray(v)) for n, v in starts[0].items() if n not in names}
        positive = constraints.softplus_positive
        lengthscale, variance, noise = (numpyro.param(name, 1.0, constraint=positive) for name in names)
        kernel, covariances = npgp.RBF(lengthscale, variance=variance), ("dense", "mean-only")[: len(p)]
        options: dict[str, Any] = dict(covariances=covariances, jitter=1e-6)
        if by == "SVI":
            f = npgp.SparseGP("f", kernel, list(p.values()), **options).draw()
            with numpyro.plate("data", len(X)):
                npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y, conditional=kind)
        else:
            gp = npgp.CollapsedGP(kernel, X, list(p.values()), noise_variance=noise, conditional=kind, **options)
            numpyro.sample("y", gp, obs=y)

    with warnings.catch_warnings():  # of searches that stop at the last step
        warnings.simplefilter("ignore", npgp.training.TrainingWarning)
        if by == "SVI":  # from the first start
            svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
            given = dict(init_params=starts[0], progress=False)
            fit: Any = npgp.fit(svi, jax.random.key(args.seed), args.steps, X, y, **given)
            ends = [float(jax.jit(svi.evaluate)(fit.state, X, y))]  # exact, as with Gaussian noise nothing is drawn
        else:
            given = dict(init_params=starts, max_steps=4 * args.iterations, progress=False)
            fit = npgp.fit_collapsed(jax.random.key(0), model, X, y, **given)
            ends = fit.ends
    return {"first": -float(ends[0]), "best": -float(np.min(ends))} | {name: float(fit.params[name]) for name in names}


def exact_gp(records: Records, markdown: bool) -> str:
    """What the exact GP has for best."""
    X, y, _ = npgp.datasets.snelson()
    (lengthscale, variance, noise), evidence = learned(exact_evidence(X, y, npgp.RBF))
    hyperparameters = f"lengthscale {lengthscale:.4f}, variance {variance:.4f}, noise {noise:.4f}"
    return f"The exact GP: log evidence {evidence:.4f}, {hyperparameters}."


LOCAL = {
    "rmse": ("test RMSE", 4),
    "log_likelihood": ("test log-likelihood", 4),
    "rmse_local": ("RMSE +", 4),
    "log_likelihood_local": ("log-likelihood +", 4),
}
LESS = ("rmse", "rmse_local", "ms")
SMALL = {"rows": 60, "inducing": 6, "iterations": 3, "group_size": 8, "split": [0], "set": ["simulated"]}

STUDIES = {
    "conditionals": Study(
        """What the conditional buys on regression data, with and without the local correction.

Matérn-3/2 with a lengthscale for each column, one split, collapsed bounds by L-BFGS over hyperparameters and inducing
inputs, in float64; of kin40k and protein a random subset of rows.""",
        conditionals,
        {"set": tuple(SIZES), "split": (0,), "conditional": ("prior", "tight", "grouped")},
        {"bound": ("bound per row", 4)} | LOCAL | {"iterations": ("iterations", 0), "ms": ("ms an evaluation", 1)},
        {"rows": 8000, "iterations": 300, "group_size": 64, "kernel": "matern32", "seed": 1},
        against=("conditional", "tight"),
        lower=LESS,
        choices={"set": (*SIZES, "simulated")},
        quick={key: value for key, value in SMALL.items() if key != "inducing"} | {"conditional": ["grouped"]},
        note="Of the standardized target. +: with the local correction, from the training rows of the same group.",
    ),
    "exact-variance": Study(
        """The training-point term of the predictive variance: accuracy with and without it, and what it costs.

After table 1 of Bui, Ashman & Turner 2025: ``tight``, collapsed, by L-BFGS. The term makes the variance smaller and
leaves the mean, and so the RMSE, as it is.""",
        exact_variance,
        {"set": ("wine", "solar", "pumadyn32nm"), "kernel": ("rbf-isotropic", "matern32"), "split": tuple(range(10))},
        {
            "rmse": ("test RMSE", 3),
            "log_likelihood": ("test log-likelihood", 4),
            "log_likelihood_exact": ("with the term", 4),
            "cost": ("time with it over without", 0),
        },
        {"rows": 8000, "inducing": 100, "iterations": 300, "seed": 1},
        choices={"set": ("wine", "solar", "pumadyn32nm", "simulated"), "kernel": tuple(KERNELS)},
        quick={key: value for key, value in SMALL.items() if key != "group_size"} | {"kernel": ["matern32"]},
    ),
    "power-ep": Study(
        """Power EP

Between the variational bounds and FITC or PITC: does it predict better? Bounds (``CollapsedGP``) and approximations
that are none (``ApproximateGP``: FITC, PITC, and power EP with several powers, row by row or in blocks, with the
residual as in the prior or structured), each with the same inducing points at the start, groups, and iterations of
L-BFGS over hyperparameters and inducing inputs, in float64. Matérn-3/2; a quarter of an hour a split on one core.""",
        power_ep,
        {"set": ("concrete", "kin8nm", "power"), "split": tuple(range(5)), "method": tuple(EP)},
        LOCAL
        | {
            "above_evidence": ("objective less exact evidence, per row", 3),
            "noise_variance": ("noise variance", 4),
            "ms": ("ms", 1),
        },
        {"rows": 2000, "inducing": 64, "iterations": 150, "group_size": 32, "seed": 1},
        against=("method", "tight"),
        lower=(*LESS, "above_evidence"),
        choices={"set": (*SIZES, "simulated")},
        quick=SMALL | {"method": ["tight", "structured-pep, blocks, α = 0.5"]},
        show=ranks,
        note="Means ± standard errors over splits, of the standardized target. +: with the local correction. Evidence: "
        "of the exact GP at the fitted hyperparameters; a bound is below it. ms: an evaluation with its gradient.",
    ),
    "snelson-bounds": Study(
        """The bounds on Snelson's data with five inducing points, and with five mean-only points more.

Collapsed by L-BFGS and, with ``--bys SVI``, uncollapsed by SVI; the first start is that of Bui, Ashman & Turner 2025,
lengthscale, variance and noise 1 and inducing inputs at data points, which leads to local optima: ``--restarts 0``.""",
        snelson_bounds,
        {"points": tuple(SNELSON), "conditional": ("prior", "tight", "grouped", "full"), "by": ("L-BFGS",)},
        {"first": ("first start", 4), "best": ("best", 4), "lengthscale": ("lengthscale", 4)}
        | {"variance": ("variance", 4), "noise_variance": ("noise variance", 4)},
        {"restarts": 24, "iterations": 300, "steps": 5000, "learning_rate": 0.02, "seed": 1},
        choices={"by": ("L-BFGS", "SVI")},
        quick={"points": ["5"], "conditional": ["grouped"], "by": ["SVI"], "restarts": 0, "iterations": 1, "steps": 2},
        show=exact_gp,
    ),
}
