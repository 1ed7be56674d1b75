#!/usr/bin/env python
"""Binary classification: sparse GPs against GPyTorch's, and SVI against NUTS.

First part: SVGP with the conditionals ``prior`` (the classical bound) and ``tight``, and SOLVE-GP with as many inducing
points in two halves; with ``--against gpytorch`` also GPyTorch's SVGP. All have the same kernel (RBF with a lengthscale
for each column), probit likelihood, start of hyperparameters and inducing inputs, optimizer (Adam on all rows, constant
rate), steps, splits and precision (float64). On the test rows: error and mean log-likelihood.

    banana      two columns; 400 training rows and 4900 test rows, at random
    cancer      Wisconsin diagnostic breast cancer, 30 columns, from scikit-learn; 400 and 169
    recurrence  Wisconsin prognostic breast cancer, 31 columns: does it recur? 150 and 44, and little to be learnt

Second part: one banana split with priors on the hyperparameters, by SVI (``AutoSparseGP``: q(ε), and AutoNormal for
the hyperparameters) and by NUTS over ε and hyperparameters, from where SVI ended. Inducing inputs stay at the centers
of k-means. Compared are the probabilities on a grid, and the posterior of the hyperparameters.

    NPGP_DATA=... python scripts/studies/classification/classification.py --json out/classification.json
    NPGP_DATA=... python scripts/studies/classification/classification.py --against gpytorch
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, whole, write_json, write_picture
from studies.classification.against_nuts import nuts_table, picture, svi_against_nuts
from studies.classification.binary import LIKELIHOOD, SETS, Split, log_probabilities, scores, train
from studies.shared import learned, summarize, summary_table

#: Shares of the blocks in M, and the conditional.
METHODS: dict[str, tuple[tuple[float, ...], Any]] = {
    "SVGP, prior": ((1.0,), "prior"),
    "SVGP, tight": ((1.0,), "tight"),
    "SOLVE-GP, tight": ((0.5, 0.5), "tight"),
}
#: Titles and digits.
FIGURES = {
    "elbo": ("ELBO", 2),
    "error": ("error", 4),
    "log_likelihood": ("log-likelihood", 4),
    "seconds": ("seconds", 1),
}
NOTE = (
    "ELBO: of all training rows, at the end. Error: share of test rows. Log-likelihood: mean of test rows. ±: standard "
    "error over splits. Seconds: of one fit, compilation included, on whatever else the machine did."
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--parts", choices=["comparison", "nuts"], nargs="+", default=["comparison", "nuts"])
    add("--data", choices=list(SETS), nargs="+", default=list(SETS))
    add("--methods", choices=list(METHODS), nargs="+", default=list(METHODS))
    add("--against", choices=["gpytorch"], help="another library, from the extra npgp[bench]")
    add("--splits", type=int, nargs="+", default=[0, 1, 2], help="seeds of the splits")
    add("--nuts-inducing", type=whole, default=32, help="M of the second part")
    add("--nuts-steps", type=whole, default=4000, help="of SVI in the second part")
    add("--warmup", type=whole, default=500, help="of NUTS")
    add("--draws", type=whole, default=1000, help="of NUTS, in each chain")
    add("--chains", type=whole, default=2, help="of NUTS")
    add("--grid", type=whole, default=40, help="points along a side")
    rows, inducing = dict(help="training rows, if fewer than the set's"), dict(default=32, help="M, even")
    parser.shared("seed", "quick", "out", "json", rows=rows, inducing=inducing, steps=2000, learning_rate=0.02)
    args = parser.read(argv)
    if args.quick:
        args.data, args.methods, args.splits = ["banana"], ["SOLVE-GP, tight"], [0]
        args.rows, args.inducing, args.steps = 80, 8, 100
        args.nuts_inducing, args.nuts_steps, args.warmup, args.draws, args.grid = 4, 100, 20, 20, 6
        args.chains = 1
    if args.inducing % 2:
        parser.error("--inducing must be positive and even.")
    return args


def start_of_lengthscale(columns: int) -> float:
    return float(np.sqrt(columns))


def component(params: dict[str, Any], blocks: int) -> npgp.SparseGP:
    kernel = npgp.RBF(params["lengthscale"], variance=params["variance"])
    return npgp.SparseGP("f", kernel, [params[f"inducing{i}"] for i in range(blocks)])


def fit_npgp(split: Split, method: str, args: argparse.Namespace, seed: int) -> tuple[float, dict[str, float], dict]:
    shares, conditional = METHODS[method]
    lengthscale = start_of_lengthscale(split.X.shape[1])
    start: dict[str, Any] = {"lengthscale": jnp.full(split.X.shape[1], lengthscale), "variance": 1.0}
    inducing = split.inducing(shares, args.inducing, lengthscale, seed)
    start |= {f"inducing{i}": jnp.asarray(Z) for i, Z in enumerate(inducing)}

    def model(X, y=None):
        params = learned(start)
        f = component(params, len(shares)).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), LIKELIHOOD, obs=y, conditional=conditional)

    svi = SVI(model, npgp.AutoSparseGP(model), optax.adam(args.learning_rate), TraceMeanField_ELBO())
    result = train(svi, jax.random.key(seed), args.steps, split)
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
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    model.train()
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = -objective(model(X), y)
        loss.backward()
        optimizer.step()
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


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    report: dict = {"inducing": args.inducing, "steps": args.steps, "learning_rate": args.learning_rate}
    if "comparison" in args.parts:
        report["fits"] = compare(args)
        report["summary"] = summarize(report["fits"], ("data", "method"), tuple(FIGURES))
        print(f"M = {args.inducing}, {args.steps} steps of Adam at {args.learning_rate:g}, splits {args.splits}")
        print(summary_table(report["summary"], {"data": "", "method": ""}, FIGURES))
        print(NOTE)
    if "nuts" in args.parts:
        report["nuts"], scene = svi_against_nuts(args)
        print(f"banana, M = {args.nuts_inducing}, SVI against NUTS")
        print(nuts_table(report["nuts"]))
        write_picture(args.out / "classification.png", picture(scene))
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
