"""GPyTorch's deep GP and linear model of coregionalization, as its documentation writes them.

Both have whitened strategies, dense q and kernels whose matrices are factorized by Cholesky in the dtype of the data.
The documentation's deep GP has a kernel and inducing inputs for each function of a layer; ``own=False`` has one of each
for the whole layer, as npgp's layer has and the paper of Salimbeni & Deisenroth (2017).
"""

from __future__ import annotations

import composed_problems
import gpytorch
import numpy as np
import torch
from composed_problems import JITTER
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.models import ApproximateGP
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from gpytorch.variational import CholeskyVariationalDistribution, LMCVariationalStrategy, VariationalStrategy
from gpytorch_training import DEVICE, Minibatches, tensor
from problems import LEARNING_RATE


def strategy(model, Z: torch.Tensor, loc: torch.Tensor, tril: torch.Tensor) -> VariationalStrategy:
    """Whitened, and dense q from a start, which otherwise is the prior at the first call."""
    q = CholeskyVariationalDistribution(loc.shape[-1], batch_shape=loc.shape[:-1])
    made = VariationalStrategy(model, Z, q, learn_inducing_locations=True, jitter_val=JITTER)
    with torch.no_grad():
        q.variational_mean.copy_(loc)
        q.chol_variational_covar.copy_(tril)
    made.variational_params_initialized.fill_(1)
    return made


def start_of(arrays: str) -> dict[str, torch.Tensor]:
    dtype = np.dtype(str(torch.get_default_dtype()).removeprefix("torch."))
    return {name: tensor(value) for name, value in composed_problems.load(arrays, dtype).items()}


class LinearMean(gpytorch.means.Mean):
    """Inputs times a matrix, a column of it for each function of the layer."""

    def __init__(self, matrix: torch.Tensor):
        super().__init__()
        self.register_buffer("rows", matrix.T.unsqueeze(-1).contiguous())  # (width, columns, 1)

    def forward(self, X):
        return (X @ self.rows).squeeze(-1)


class Layer(DeepGPLayer):
    def __init__(self, start: dict[str, torch.Tensor], number: int, own: bool):
        Z, loc, tril, lengthscale = (start[f"{name}{number}"] for name in ("Z", "loc", "tril", "lengthscale"))
        outputs = len(loc) if number == 1 else None
        batch = torch.Size([outputs] if own and outputs else [])
        loc, tril = (loc, tril) if outputs else (loc[0], tril[0])
        super().__init__(strategy(self, Z.expand(*batch, *Z.shape), loc, tril), Z.shape[-1], outputs)
        self.mean_module = LinearMean(start["mean"]) if outputs else gpytorch.means.ZeroMean()
        kernel = RBFKernel(ard_num_dims=Z.shape[-1], batch_shape=batch)
        kernel.lengthscale = lengthscale.expand(*batch, 1, -1)
        self.covar_module = ScaleKernel(kernel, batch_shape=batch)
        self.covar_module.outputscale = start[f"variance{number}"].expand(batch)

    def forward(self, X):
        return MultivariateNormal(self.mean_module(X), self.covar_module(X))


class TwoLayers(DeepGP):
    def __init__(self, start: dict[str, torch.Tensor], own: bool):
        super().__init__()
        self.inner, self.outer = Layer(start, 1, own), Layer(start, 2, own)

    def forward(self, X):
        return self.outer(self.inner(X))


class Deep(Minibatches):
    """A deep GP of two layers; ``conditional`` is for npgp alone."""

    def __init__(
        self, arrays: str, batch_size: int, own: bool = False, learning_rate: float = LEARNING_RATE, draws: int = 1
    ):
        start = start_of(arrays)
        model = TwoLayers(start, own).to(DEVICE)
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(DEVICE)
        likelihood.noise = start["noise"]
        elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(start["y"]))
        super().__init__(gpytorch.mlls.DeepApproximateMLL(elbo), start["X"], start["y"], batch_size, learning_rate)
        self.draws, self.start = draws, start

    def advance(self, steps: int) -> None:
        with gpytorch.settings.num_likelihood_samples(self.draws):
            super().advance(steps)

    def elbo(self) -> float:
        """Of the first rows, at the start, averaged over draws; jitter of rows not counted."""
        with gpytorch.settings.num_likelihood_samples(composed_problems.DRAWS):
            return super().elbo() + 0.5 * len(self.y) * JITTER / float(self.start["noise"])


class Mixed(ApproximateGP):
    def __init__(self, start: dict[str, torch.Tensor]):
        outputs, functions = start["W"].shape
        base = strategy(self, start["Z"], start["loc"], start["tril"])
        mixed = LMCVariationalStrategy(base, num_tasks=outputs, num_latents=functions, latent_dim=-1, jitter_val=JITTER)
        super().__init__(mixed)
        with torch.no_grad():
            mixed.lmc_coefficients.copy_(start["W"].T)
        self.mean_module = gpytorch.means.ZeroMean(batch_shape=torch.Size([functions]))
        self.covar_module = RBFKernel(ard_num_dims=start["Z"].shape[-1], batch_shape=torch.Size([functions]))
        self.covar_module.lengthscale = start["lengthscale"][:, None]

    def forward(self, X):
        return MultivariateNormal(self.mean_module(X), self.covar_module(X))


class Mixture(Minibatches):
    """Outputs that are mixtures of functions with lengthscales and inducing inputs of their own."""

    def __init__(self, arrays: str, batch_size: int, learning_rate: float = LEARNING_RATE):
        start = start_of(arrays)
        model = Mixed(start).to(DEVICE)
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(len(start["W"]), has_global_noise=False)
        likelihood = likelihood.to(DEVICE)
        likelihood.task_noises = start["noise"]
        mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(start["X"]))
        super().__init__(mll, start["X"], start["Y"].T.contiguous(), batch_size, learning_rate)
        self.start = start

    def elbo(self) -> float:
        """Of the first rows, at the start; what the jitter of rows takes, in functions and outputs, not counted."""
        variance = JITTER * (self.start["W"].square().sum(1) + 1.0)
        return super().elbo() + 0.5 * len(self.y) * float((variance / self.start["noise"]).sum())

    def figures(self) -> dict[str, float]:
        """The mean log density of an observation in new rows."""
        self.model.eval()
        self.likelihood.eval()
        with torch.no_grad(), gpytorch.settings.linalg_dtypes(torch.get_default_dtype()):
            found = self.likelihood(self.model(self.start["X_new"]))
            total, error = found.variance, self.start["Y_new"].T - found.mean
            return {"log_density": float(torch.mean(-0.5 * (torch.log(2 * torch.pi * total) + error**2 / total)))}
