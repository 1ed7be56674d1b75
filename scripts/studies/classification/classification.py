#!/usr/bin/env python
"""Binary classification: sparse GPs against GPyTorch's, and SVI against NUTS.

First part: SVGP with the conditionals ``prior`` (the classical bound) and ``tight``, and SOLVE-GP with as many inducing
points in two halves; with ``--against gpytorch`` also GPyTorch's SVGP. All have the same kernel (RBF with a lengthscale
for each column), probit likelihood, start of hyperparameters and inducing inputs, optimiser (Adam on all rows, constant
rate), steps, splits and precision (float64). On the test rows: error and mean log-likelihood.

    banana      two columns; 400 training rows and 4900 test rows, at random
    cancer      Wisconsin diagnostic breast cancer, 30 columns, from scikit-learn; 400 and 169
    recurrence  Wisconsin prognostic breast cancer, 31 columns: does it recur? 150 and 44, and little to be learnt

Second part: one banana split with priors on the hyperparameters, by SVI (``AutoSparseGP``: q(ε), and AutoNormal for
the hyperparameters) and by NUTS over ε and hyperparameters, from where SVI ended. Inducing inputs stay at the centres
of k-means. Compared are the probabilities on a grid, and the posterior of the hyperparameters.

    NPGP_DATA=... python scripts/studies/classification/classification.py --against gpytorch --json out/classification.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.scipy.special import log_ndtr
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO, init_to_value
from scipy import special

import npgp
from npgp import datasets
from npgp.training import FitResult

LIKELIHOOD = npgp.Bernoulli(link="probit")  # GPyTorch's link
#: Shares of the blocks in M, and the conditional.
METHODS: dict[str, tuple[tuple[float, ...], Any]] = {
    "SVGP, prior": ((1.0,), "prior"),
    "SVGP, tight": ((1.0,), "tight"),
    "SOLVE-GP, tight": ((0.5, 0.5), "tight"),
}
HYPERPARAMETERS = ("log lengthscale 1", "log lengthscale 2", "log variance")

NOTE = (
    "ELBO: of all training rows, at the end. Error: share of test rows. Log-likelihood: mean of test rows. ±: standard "
    "error over splits. Seconds: of one fit, compilation included, on whatever else the machine did."
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", choices=["comparison", "nuts"], nargs="+", default=["comparison", "nuts"])
    parser.add_argument("--data", choices=list(SETS), nargs="+", default=list(SETS))
    parser.add_argument("--methods", choices=list(METHODS), nargs="+", default=list(METHODS))
    parser.add_argument("--against", choices=["gpytorch"], help="another library, from the extra npgp[bench]")
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2], help="seeds of the splits")
    parser.add_argument("--rows", type=int, help="training rows, if fewer than the set's")
    parser.add_argument("--inducing", type=int, default=32, help="M, even")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--nuts-inducing", type=int, default=32, help="M of the second part")
    parser.add_argument("--nuts-steps", type=int, default=4000, help="of SVI in the second part")
    parser.add_argument("--warmup", type=int, default=500, help="of NUTS")
    parser.add_argument("--draws", type=int, default=1000, help="of NUTS, in each chain")
    parser.add_argument("--chains", type=int, default=2, help="of NUTS")
    parser.add_argument("--grid", type=int, default=40, help="points along a side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few rows, points, steps and draws: does it run?")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.quick:
        args.data, args.methods, args.splits = ["banana"], ["SOLVE-GP, tight"], [0]
        args.rows, args.inducing, args.steps = 80, 8, 100
        args.nuts_inducing, args.nuts_steps, args.warmup, args.draws, args.grid = 6, 200, 40, 40, 8
        args.chains = 1
    if args.inducing < 2 or args.inducing % 2:
        parser.error("--inducing must be positive and even.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Data


def banana() -> tuple[np.ndarray, np.ndarray, int]:
    data = datasets.load("banana_large")
    return data["X"], data["y"], 400


def cancer() -> tuple[np.ndarray, np.ndarray, int]:
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    return X, y, 400


def recurrence() -> tuple[np.ndarray, np.ndarray, int]:
    data = datasets.load("uci_breastcancer")
    # Columns: a number, whether it recurred (centred), and measurements; the set's own target is the time until then.
    return data["X"][:, 2:], (data["X"][:, 1] > 0).astype(int), 150


SETS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray, int]]] = {
    "banana": banana,
    "cancer": cancer,
    "recurrence": recurrence,
}


@dataclass(frozen=True)
class Split:
    """Rows of a split; inputs standardised by the training rows."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray

    @classmethod
    def load(cls, name: str, seed: int, rows: int | None = None) -> Split:
        X, y, train = SETS[name]()
        order = np.random.default_rng(seed).permutation(len(y))
        train_rows, test_rows = order[: min(train, rows or train)], order[train:]
        mean, scale = X[train_rows].mean(0), X[train_rows].std(0)
        X = (X - mean) / np.where(scale > 0, scale, 1.0)
        y = y.astype(float)
        return cls(X[train_rows], y[train_rows], X[test_rows], y[test_rows])

    def inducing(self, shares: tuple[float, ...], M: int, lengthscale: float, seed: int) -> list[np.ndarray]:
        """Starts of the blocks: centres of k-means, and greedily given these."""
        blocks = [np.asarray(npgp.inducing.kmeans(self.X, int(shares[0] * M), seed))]
        for share in shares[1:]:
            kernel = npgp.RBF(lengthscale)
            blocks.append(np.asarray(npgp.inducing.greedy_variance(kernel, self.X, int(share * M), given=blocks)))
        return blocks


def start_of_lengthscale(columns: int) -> float:
    return float(np.sqrt(columns))


def scores(log_p: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Error and mean log-likelihood, from log P(y = 0), log P(y = 1) of shape (2, N)."""
    log_p = np.asarray(log_p)
    likelihood = log_p[y.astype(int), np.arange(len(y))]
    return {"error": float(np.mean((log_p[1] > log_p[0]) != y)), "log_likelihood": float(np.mean(likelihood))}


def log_probabilities(mean, variance) -> np.ndarray:
    """log P(y = 0) and log P(y = 1) where f ~ N(mean, variance)."""
    ratio = np.asarray(mean) / np.sqrt(1 + np.asarray(variance))
    return special.log_ndtr(np.stack([-ratio, ratio]))


def fit(svi: SVI, key: jax.Array, steps: int, split: Split) -> FitResult:
    start = jax.jit(svi.init)(key, split.X, split.y)  # op by op this takes seconds
    return npgp.fit(svi, key, steps, split.X, split.y, init_state=start, progress=False)


# ---------------------------------------------------------------------------------------------------------------
# First part: everything learned, test rows


def component(params: dict[str, Any], blocks: int) -> npgp.SparseGP:
    kernel = npgp.RBF(params["lengthscale"], params["variance"])
    return npgp.SparseGP("f", kernel, [params[f"inducing{i}"] for i in range(blocks)])


def fit_npgp(split: Split, method: str, args: argparse.Namespace, seed: int) -> tuple[float, dict[str, float], dict]:
    shares, conditional = METHODS[method]
    lengthscale = start_of_lengthscale(split.X.shape[1])
    start: dict[str, Any] = {"lengthscale": jnp.full(split.X.shape[1], lengthscale), "variance": 1.0}
    inducing = split.inducing(shares, args.inducing, lengthscale, seed)
    start |= {f"inducing{i}": jnp.asarray(Z) for i, Z in enumerate(inducing)}

    def model(X, y=None):
        params = {
            name: numpyro.param(
                name, value, constraint=constraints.real if "inducing" in name else constraints.softplus_positive
            )
            for name, value in start.items()
        }
        f = component(params, len(shares)).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), LIKELIHOOD, obs=y, conditional=conditional)

    svi = SVI(model, npgp.AutoSparseGP(model), optax.adam(args.learning_rate), TraceMeanField_ELBO())
    result = fit(svi, jax.random.key(seed), args.steps, split)
    predict = jax.jit(lambda params, X: component(params, len(shares)).posterior(params).mean_and_variance(X))
    log_p = log_probabilities(*predict(result.params, split.X_test))
    hyperparameters = {name: np.asarray(result.params[name]).tolist() for name in ("lengthscale", "variance")}
    return -float(jax.jit(svi.evaluate)(result.state, split.X, split.y)), scores(log_p, split.y_test), hyperparameters


def import_gpytorch():
    try:
        import gpytorch
        import torch
    except ImportError as error:
        raise ImportError("--against gpytorch needs GPyTorch: pip install 'npgp[bench]'.") from error
    return gpytorch, torch


def fit_gpytorch(split: Split, args: argparse.Namespace, seed: int) -> tuple[float, dict[str, float], dict]:
    """GPyTorch's whitened SVGP, with what the other fits have."""
    gpytorch, torch = import_gpytorch()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    columns = split.X.shape[1]
    lengthscale = start_of_lengthscale(columns)
    (Z,) = split.inducing((1.0,), args.inducing, lengthscale, seed)

    class SVGP(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = gpytorch.variational.CholeskyVariationalDistribution(len(Z), mean_init_std=0.0)
            super().__init__(
                gpytorch.variational.VariationalStrategy(self, torch.tensor(Z), q, learn_inducing_locations=True)
            )
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=columns))
            self.covar_module.base_kernel.lengthscale = lengthscale
            self.covar_module.outputscale = 1.0

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model, likelihood = SVGP(), gpytorch.likelihoods.BernoulliLikelihood()
    X, y, X_test = (torch.tensor(array) for array in (split.X, split.y, split.X_test))
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    optimiser = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    model.train()
    for _ in range(args.steps):
        optimiser.zero_grad()
        loss = -objective(model(X), y)
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        elbo = float(objective(model(X), y)) * len(y)
        model.eval()
        f = model(X_test)
        log_p = log_probabilities(f.mean.numpy(), f.variance.numpy())
    kernel = model.covar_module
    hyperparameters = {
        "lengthscale": kernel.base_kernel.lengthscale.detach().numpy().ravel().tolist(),
        "variance": float(kernel.outputscale.detach()),
    }
    return elbo, scores(log_p, split.y_test), hyperparameters


def compare(args: argparse.Namespace) -> list[dict]:
    fits = []
    methods: dict[str, Callable] = {name: partial(_fit_named, name) for name in args.methods}
    if args.against:
        import_gpytorch()
        methods["GPyTorch SVGP"] = fit_gpytorch
    for data in args.data:
        for number in args.splits:
            split = Split.load(data, number, args.rows)
            for method, fit in methods.items():
                began = time.perf_counter()
                elbo, figures, hyperparameters = fit(split, args, args.seed + number)
                seconds = time.perf_counter() - began
                fits.append({"data": data, "split": number, "method": method, "elbo": elbo, **figures})
                fits[-1] |= {"seconds": seconds, **hyperparameters}
                print(f"{data} {number} {method}: ELBO {elbo:.2f}, {figures}, {seconds:.0f} s", flush=True)
    return fits


def _fit_named(method: str, split: Split, args: argparse.Namespace, seed: int):
    return fit_npgp(split, method, args, seed)


def summarise(fits: list[dict]) -> list[dict]:
    """Means and standard errors over splits, by set and method."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for fit in fits:
        groups.setdefault((fit["data"], fit["method"]), []).append(fit)
    rows = []
    for (data, method), members in groups.items():
        row: dict[str, Any] = {"data": data, "method": method}
        for key in ("elbo", "error", "log_likelihood", "seconds"):
            values = [fit[key] for fit in members]
            row[key] = float(np.mean(values))
            row[f"{key}_se"] = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    lines = [f"{'':12}{'':18}{'ELBO':>18}{'error':>18}{'log-likelihood':>20}{'seconds':>9}"]
    for row in rows:
        cells = []
        for key, width, digits in (("elbo", 18, 2), ("error", 18, 4), ("log_likelihood", 20, 4)):
            error = "" if row[f"{key}_se"] is None else f" ± {row[f'{key}_se']:.{digits}f}"
            cells.append(f"{row[key]:.{digits}f}{error}".rjust(width))
        lines.append(f"{row['data']:12}{row['method']:18}{''.join(cells)}{row['seconds']:9.1f}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------
# Second part: SVI against NUTS


def bayesian_model(X, y=None, *, Z):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.zeros(X.shape[1]), 1.0).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance), Z).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), LIKELIHOOD, obs=y)


def log_hyperparameters(samples) -> np.ndarray:
    """(draws, 3)."""
    return np.log(np.column_stack([samples["lengthscale"], samples["variance"]]))


def svi_against_nuts(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures, and what the picture needs."""
    split = Split.load("banana", args.splits[0], args.rows)
    Z = npgp.inducing.kmeans(split.X, args.nuts_inducing, args.seed)
    model = partial(bayesian_model, Z=Z)
    keys = jax.random.split(jax.random.key(args.seed), 4)

    guide = npgp.AutoSparseGP(model)
    began = time.perf_counter()
    svi = SVI(model, guide, npgp.adam(args.learning_rate, args.nuts_steps), TraceMeanField_ELBO())
    params = fit(svi, keys[0], args.nuts_steps, split).params
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
    by_nuts, chains, extra = jax.block_until_ready(run(keys[2], guide.median(params), split.X, split.y))
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
    lines = [f"{'':8}{'error':>9}{'log-lik.':>10}{'sd of f':>9}" + "".join(f"{h:>22}" for h in HYPERPARAMETERS)]
    for name in ("SVI", "NUTS"):
        row = report[name]
        cells = "".join(f"{row['mean'][h]:.3f}, sd {row['sd'][h]:.3f}".rjust(22) for h in HYPERPARAMETERS)
        lines.append(f"{name:8}{row['error']:9.4f}{row['log_likelihood']:10.4f}{row['sd_of_f']:9.3f}{cells}")
    difference, chains = report["difference"], report["chains"]
    ratios = ", ".join(f"{ratio:.2f}" for ratio in difference["sd_ratio"])
    lines += [
        f"Probabilities on the grid differ by {difference['mean']:.4f} in the mean, {difference['max']:.4f} at most; "
        f"sd of NUTS over sd of SVI: {ratios}.",
        f"NUTS: largest R-hat {chains['rhat']:.3f}, least ESS {chains['ess']:.0f}, {chains['divergent']} divergences, "
        f"{chains['leapfrogs']:.0f} leapfrog steps per draw; {report['NUTS']['seconds']:.0f} s, SVI "
        f"{report['SVI']['seconds']:.0f} s.",
    ]
    return "\n".join(lines)


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
        for axis, (values, levels, colours, what) in zip(row, surfaces, strict=True):
            surface = axis.contourf(*scene["axes"], values.reshape(shape), levels=levels, cmap=colours)
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


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    report: dict = {"inducing": args.inducing, "steps": args.steps, "learning_rate": args.learning_rate}
    if "comparison" in args.parts:
        report["fits"] = compare(args)
        report["summary"] = summarise(report["fits"])
        print(f"M = {args.inducing}, {args.steps} steps of Adam at {args.learning_rate:g}, splits {args.splits}")
        print(table(report["summary"]))
        print(NOTE)
    if "nuts" in args.parts:
        report["nuts"], scene = svi_against_nuts(args)
        print(f"banana, M = {args.nuts_inducing}, SVI against NUTS")
        print(nuts_table(report["nuts"]))
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / "classification.png"
        picture(scene).savefig(path, dpi=130)
        print(f"wrote {path}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {args.json}")
    return report


if __name__ == "__main__":
    main()
