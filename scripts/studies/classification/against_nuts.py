"""SVI against NUTS on one split of banana, with priors on the hyperparameters, for ``classification.py``."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO, init_to_value

import npgp
from common import table
from studies.classification.binary import LIKELIHOOD, Split, scores, train

HYPERPARAMETERS = ("log lengthscale 1", "log lengthscale 2", "log variance")


def bayesian_model(X, y=None, *, Z):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.zeros(X.shape[1]), 1.0).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=variance), Z).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), LIKELIHOOD, obs=y)


def log_hyperparameters(samples) -> np.ndarray:
    """(draws, 3)."""
    return np.log(np.column_stack([samples["lengthscale"], samples["variance"]]))


def svi_against_nuts(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures, and what the picture needs."""
    split = Split.load("banana", args.splits[0], args.rows)
    Z = npgp.inducing.kmeans(jax.random.key(args.seed), split.X, args.nuts_inducing)
    model = partial(bayesian_model, Z=Z)
    keys = jax.random.split(jax.random.key(args.seed), 4)

    guide = npgp.AutoSparseGP(model)
    began = time.perf_counter()
    svi = SVI(model, guide, npgp.adam(args.learning_rate, args.nuts_steps), TraceMeanField_ELBO())
    params = train(svi, keys[0], args.nuts_steps, split).params
    count = args.chains * args.draws
    by_svi = jax.jit(lambda key, params: guide.sample_posterior(key, params, split.X, sample_shape=(count,)))(
        keys[1], params
    )
    svi_seconds = time.perf_counter() - began

    @jax.jit
    def run(key, start, X, y):
        kernel = NUTS(model, target_accept_prob=0.9, init_strategy=init_to_value(values=start))
        options = dict(num_warmup=args.warmup, num_samples=args.draws, num_chains=args.chains, progress_bar=False)
        mcmc = MCMC(kernel, chain_method="vectorized", **options)
        mcmc.run(key, X, y, extra_fields=("diverging", "num_steps"))
        return mcmc.get_samples(), mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields()

    began = time.perf_counter()
    by_nuts, chains, extra = jax.block_until_ready(
        run(keys[2], guide.median(params, split.X, split.y), split.X, split.y)
    )
    nuts_seconds = time.perf_counter() - began

    low, high = split.X.min(0) - 0.3, split.X.max(0) + 0.3
    axes = [np.linspace(a, b, args.grid) for a, b in zip(low, high, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="xy"), -1).reshape(-1, 2)
    inputs = np.concatenate([grid, split.X_test])

    @jax.jit
    def predict(key, samples):
        # Row by row, without the likelihood's noise: probabilities given f are averaged.
        f = Predictive(model, samples)(key, inputs)["y.latent"]
        log_p = jax.scipy.special.logsumexp(log_ndtr(jnp.stack([-f, f])), axis=1) - jnp.log(f.shape[0])
        return log_p, jnp.std(f, 0)

    panels, report = {}, {}
    for name, samples, seconds in (("SVI", by_svi, svi_seconds), ("NUTS", by_nuts, nuts_seconds)):
        log_p, sd = (np.asarray(v) for v in predict(keys[3], samples))
        hyper = log_hyperparameters(samples)
        panels[name] = {"probability": np.exp(log_p[1, : len(grid)]), "sd": sd[: len(grid)], "hyper": hyper}
        report[name] = {
            **scores(log_p[:, len(grid) :], split.y_test),
            "mean": dict(zip(HYPERPARAMETERS, hyper.mean(0).tolist(), strict=True)),
            "sd": dict(zip(HYPERPARAMETERS, hyper.std(0).tolist(), strict=True)),
            "sd_of_f": float(np.mean(panels[name]["sd"])),
            "seconds": seconds,
        }
    difference = np.abs(panels["SVI"]["probability"] - panels["NUTS"]["probability"])
    stacked = np.concatenate([np.asarray(value).reshape(args.chains, args.draws, -1) for value in chains.values()], -1)
    report["difference"] = {
        "mean": float(difference.mean()),
        "max": float(difference.max()),
        "sd_ratio": (panels["NUTS"]["hyper"].std(0) / panels["SVI"]["hyper"].std(0)).tolist(),
    }
    report["chains"] = {
        "rhat": float(np.max(split_gelman_rubin(stacked))),
        "ess": float(np.min(effective_sample_size(stacked))),
        "divergent": int(np.sum(extra["diverging"])),
        "leapfrogs": float(np.mean(extra["num_steps"])),
    }
    report["inducing"] = args.nuts_inducing
    scene = {"axes": axes, "panels": panels, "X": split.X, "y": split.y, "Z": np.asarray(Z)}
    return report, scene


def nuts_table(report: dict[str, Any]) -> str:
    lines = []
    for name in ("SVI", "NUTS"):
        row = report[name]
        cells = (f"{row['error']:.4f}", f"{row['log_likelihood']:.4f}", f"{row['sd_of_f']:.3f}")
        lines.append((name, *cells, *(f"{row['mean'][h]:.3f}, sd {row['sd'][h]:.3f}" for h in HYPERPARAMETERS)))
    difference, chains = report["difference"], report["chains"]
    ratios = ", ".join(f"{ratio:.2f}" for ratio in difference["sd_ratio"])
    text = [
        table(("", "error", "log-lik.", "sd of f", *HYPERPARAMETERS), lines),
        f"Probabilities on the grid differ by {difference['mean']:.4f} in the mean, {difference['max']:.4f} at most; "
        f"sd of NUTS over sd of SVI: {ratios}.",
        f"NUTS: largest R-hat {chains['rhat']:.3f}, least ESS {chains['ess']:.0f}, {chains['divergent']} divergences, "
        f"{chains['leapfrogs']:.0f} leapfrog steps per draw; {report['NUTS']['seconds']:.0f} s, SVI "
        f"{report['SVI']['seconds']:.0f} s.",
    ]
    return "\n".join(text)


def picture(scene: dict[str, Any]):
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(2, 3, figsize=(12.5, 7.4), layout="constrained")
    shape = (len(scene["axes"][1]), len(scene["axes"][0]))
    top = np.ceil(10 * max(panel["sd"].max() for panel in scene["panels"].values())) / 10
    for row, (name, panel) in zip(rows.T, scene["panels"].items(), strict=False):
        surfaces = (
            (panel["probability"], np.linspace(0, 1, 11), "RdBu_r", "P(y = 1)"),
            (panel["sd"], np.linspace(0, top, 11), "viridis", "sd of f"),
        )
        for axis, (values, levels, colors, what) in zip(row, surfaces, strict=True):
            surface = axis.contourf(*scene["axes"], values.reshape(shape), levels=levels, cmap=colors)
            figure.colorbar(surface, ax=axis)
            boundary = panel["probability"].reshape(shape)
            axis.contour(*scene["axes"], boundary, levels=[0.5], colors="k", linewidths=1.2)
            axis.plot(*scene["Z"].T, "+", color="0.2" if what.startswith("P") else "w", markersize=7)
            axis.set_title(f"{name}: {what}", fontsize=10)
        for label, marker in ((0, "o"), (1, "s")):
            row[0].plot(*scene["X"][scene["y"] == label].T, marker, color="k", markersize=2, alpha=0.4)
    for axis, k in zip(rows[:, 2], (0, 2), strict=True):
        for name, panel in scene["panels"].items():
            axis.hist(panel["hyper"][:, k], bins=30, density=True, alpha=0.5, label=name)
        axis.set_title(HYPERPARAMETERS[k], fontsize=10)
        axis.legend(fontsize=8)
    return figure
