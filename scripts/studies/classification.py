"""Binary classification: sparse GPs against GPyTorch's, and SVI against NUTS."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.scipy.special import log_ndtr
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO, init_to_value
from scipy import special

import npgp
import npgp.inducing
from npgp import datasets
from npgp.training import FitResult
from studies.fits import learned
from studies.runner import Records, Study

LIKELIHOOD = npgp.Bernoulli(link="probit")  # GPyTorch's link


def banana() -> tuple[np.ndarray, np.ndarray, int]:
    data = datasets.load("banana_large")
    return data["X"], data["y"], 400


def cancer() -> tuple[np.ndarray, np.ndarray, int]:
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    return X, y, 400


def recurrence() -> tuple[np.ndarray, np.ndarray, int]:
    data = datasets.load("uci_breastcancer")
    # Columns: a number, whether it recurred (centered), and measurements; the set's own target is the time until then.
    return data["X"][:, 2:], (data["X"][:, 1] > 0).astype(int), 150


SETS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray, int]]] = {
    "banana": banana,
    "cancer": cancer,
    "recurrence": recurrence,
}


@dataclass(frozen=True)
class Split:
    """Rows of a split; inputs standardized by the training rows."""

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
        """Starts of the blocks: centers of k-means, and greedily given these."""
        blocks = [np.asarray(npgp.inducing.kmeans(jax.random.key(seed), self.X, int(shares[0] * M)))]
        for share in shares[1:]:
            kernel = npgp.RBF(lengthscale)
            blocks.append(np.asarray(npgp.inducing.greedy_variance(kernel, self.X, int(share * M), given=blocks)))
        return blocks


def scores(log_p: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Error and mean log-likelihood, from log P(y = 0), log P(y = 1) of shape (2, N)."""
    log_p = np.asarray(log_p)
    likelihood = log_p[y.astype(int), np.arange(len(y))]
    return {"error": float(np.mean((log_p[1] > log_p[0]) != y)), "log_likelihood": float(np.mean(likelihood))}


def log_probabilities(mean, variance) -> np.ndarray:
    """log P(y = 0) and log P(y = 1) where f ~ N(mean, variance)."""
    ratio = np.asarray(mean) / np.sqrt(1 + np.asarray(variance))
    return special.log_ndtr(np.stack([-ratio, ratio]))


def train(svi: SVI, key: jax.Array, steps: int, split: Split) -> FitResult:
    start = jax.jit(svi.init)(key, split.X, split.y)  # op by op this takes seconds
    return npgp.fit(svi, key, steps, split.X, split.y, init_state=start, progress=False)


def component(params: dict[str, Any], blocks: int) -> npgp.SparseGP:
    kernel = npgp.RBF(params["lengthscale"], variance=params["variance"])
    return npgp.SparseGP("f", kernel, [params[f"inducing{i}"] for i in range(blocks)])


def fit_gpytorch(split: Split, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """GPyTorch's whitened SVGP, with what the other fits have."""
    import gpytorch
    import torch

    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    columns = split.X.shape[1]
    lengthscale = float(np.sqrt(columns))
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
    return {"elbo": elbo, **scores(log_p, split.y_test)}


#: Shares of the blocks in M, and the conditional.
METHODS: dict[str, tuple[tuple[float, ...], Any]] = {
    "SVGP, prior": ((1.0,), "prior"),
    "SVGP, tight": ((1.0,), "tight"),
    "SOLVE-GP, tight": ((0.5, 0.5), "tight"),
}


def classification(args: argparse.Namespace, set: str, split: int, method: str) -> dict[str, Any]:
    data, seed, began = Split.load(set, split, args.rows), args.seed + split, time.perf_counter()
    if method == "GPyTorch SVGP":
        return fit_gpytorch(data, args, seed) | {"seconds": time.perf_counter() - began}
    (shares, conditional), columns = METHODS[method], data.X.shape[1]
    lengthscale = float(np.sqrt(columns))
    start: dict[str, Any] = {"lengthscale": jnp.full(columns, lengthscale), "variance": 1.0}
    inducing = data.inducing(shares, args.inducing, lengthscale, seed)
    start |= {f"inducing{i}": jnp.asarray(Z) for i, Z in enumerate(inducing)}

    def model(X, y=None):
        f = component(learned(start), len(shares)).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), LIKELIHOOD, obs=y, conditional=conditional)

    svi = SVI(model, npgp.AutoSparseGP(model), optax.adam(args.learning_rate), TraceMeanField_ELBO())
    result = train(svi, jax.random.key(seed), args.steps, data)
    predict = jax.jit(lambda params, X: component(params, len(shares)).posterior(params).mean_and_variance(X))
    elbo = -float(jax.jit(svi.evaluate)(result.state, data.X, data.y))
    found = scores(log_probabilities(*predict(result.params, data.X_test)), data.y_test)
    return {"elbo": elbo, **found, "seconds": time.perf_counter() - began}


# ---------------------------------------------------------------------------------------------------------------
# SVI against NUTS


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


def svi_against_nuts(args: argparse.Namespace, split: int) -> Records:
    """Priors on the hyperparameters; NUTS over ε and hyperparameters starts where SVI ended."""
    data = Split.load("banana", split, args.rows)
    Z = npgp.inducing.kmeans(jax.random.key(args.seed), data.X, args.inducing)
    model = partial(bayesian_model, Z=Z)
    keys = jax.random.split(jax.random.key(args.seed), 4)
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    params, count = train(svi, keys[0], args.steps, data).params, args.chains * args.draws
    draw = jax.jit(lambda key, params: guide.sample_posterior(key, params, data.X, sample_shape=(count,)))
    samples = {"SVI": draw(keys[1], params)}

    @jax.jit
    def run(key, start, X, y):
        kernel = NUTS(model, target_accept_prob=0.9, init_strategy=init_to_value(values=start))
        options = dict(num_warmup=args.warmup, num_samples=args.draws, num_chains=args.chains, progress_bar=False)
        mcmc = MCMC(kernel, chain_method="vectorized", **options)
        mcmc.run(key, X, y, extra_fields=("diverging",))
        return mcmc.get_samples(), mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields()["diverging"]

    samples["NUTS"], chains, diverging = run(keys[2], guide.median(params, data.X, data.y), data.X, data.y)
    sides = zip(data.X.min(0) - 0.3, data.X.max(0) + 0.3, strict=True)
    axes = [np.linspace(low, high, args.grid) for low, high in sides]
    grid = np.stack(np.meshgrid(*axes, indexing="xy"), -1).reshape(-1, 2)
    inputs = np.concatenate([grid, data.X_test])

    @jax.jit
    def predict(key, samples):
        # Row by row, without the likelihood's noise: probabilities given f are averaged.
        f = Predictive(model, samples)(key, inputs)["y.latent"]
        log_p = jax.scipy.special.logsumexp(log_ndtr(jnp.stack([-f, f])), axis=1) - jnp.log(f.shape[0])
        return log_p, jnp.std(f, 0)

    found, on_grid = [], {}
    for by, drawn in samples.items():
        log_p, sd = (np.asarray(v) for v in predict(keys[3], drawn))
        hyper, on_grid[by] = log_hyperparameters(drawn), np.exp(log_p[1, : len(grid)])
        figures = {"sd_of_f": float(np.mean(sd[: len(grid)])), **scores(log_p[:, len(grid) :], data.y_test)}
        figures |= dict(zip(HYPERPARAMETERS, hyper.mean(0).tolist(), strict=True))
        found.append(
            {"by": by} | figures | {f"sd of {h}": float(s) for h, s in zip(HYPERPARAMETERS, hyper.std(0), strict=True)}
        )
    stacked = np.concatenate([np.asarray(v).reshape(args.chains, args.draws, -1) for v in chains.values()], -1)
    found[1] |= {"from_svi": float(np.mean(np.abs(on_grid["SVI"] - on_grid["NUTS"])))}
    found[1] |= {
        "rhat": float(np.max(split_gelman_rubin(stacked))),
        "ess": float(np.min(effective_sample_size(stacked))),
    }
    return [*found[:1], found[1] | {"divergent": int(np.sum(diverging))}]


STUDIES = {
    "classification": Study(
        """Binary classification: sparse GPs against GPyTorch's.

SVGP with the conditionals ``prior`` (the classical bound) and ``tight``, SOLVE-GP with as many inducing points in two
halves, and GPyTorch's SVGP (extra ``bench``). All have the same kernel (RBF with a lengthscale for each column), probit
likelihood, start of hyperparameters and inducing inputs, optimizer (Adam on all rows, constant rate), steps, splits and
precision. On the test rows: error and mean log-likelihood.

    banana      two columns; 400 training rows and 4900 test rows, at random
    cancer      Wisconsin diagnostic breast cancer, 30 columns, from scikit-learn; 400 and 169
    recurrence  Wisconsin prognostic breast cancer, 31 columns: does it recur? 150 and 44, and little to be learnt""",
        classification,
        {"set": tuple(SETS), "split": (0, 1, 2), "method": (*METHODS, "GPyTorch SVGP")},
        {
            "elbo": ("ELBO", 2),
            "error": ("error", 4),
            "log_likelihood": ("log-likelihood", 4),
            "seconds": ("seconds", 1),
        },
        {"rows": int, "inducing": 32, "steps": 2000, "learning_rate": 0.02, "seed": 0},
        against=("method", "SVGP, prior"),
        lower=("error", "seconds"),
        quick={"set": ["banana"], "split": [0], "method": ["SOLVE-GP, tight"], "rows": 60, "inducing": 6, "steps": 5},
        note="ELBO: of all training rows, at the end. Error: share of test rows. Seconds: of a fit, with compilation.",
    ),
    "classification-nuts": Study(
        """SVI against NUTS on banana, with priors on the hyperparameters.

By SVI (``AutoSparseGP``: q(ε), and AutoNormal for the hyperparameters) and by NUTS over ε and hyperparameters, from
where SVI ended. Inducing inputs stay at the centers of k-means. Compared are the probabilities on a grid ("from SVI's":
their mean difference), and the posterior of the hyperparameters.""",
        svi_against_nuts,
        {"split": (0,)},
        {"error": ("error", 4), "log_likelihood": ("log-likelihood", 4), "sd_of_f": ("sd of f", 3)}
        | {f"{of}{h}": (f"{of}{h}", 3) for of in ("", "sd of ") for h in HYPERPARAMETERS}
        | {"from_svi": ("from SVI's", 4), "rhat": ("R-hat", 3), "ess": ("least ESS", 0)},
        {"rows": int, "inducing": 32, "steps": 4000, "learning_rate": 0.02, "warmup": 500, "draws": 1000, "chains": 2}
        | {"grid": 40, "seed": 0},
        rows=("by",),
        quick={"rows": 60, "inducing": 4, "steps": 5, "warmup": 5, "draws": 8, "chains": 1, "grid": 5},
    ),
}
