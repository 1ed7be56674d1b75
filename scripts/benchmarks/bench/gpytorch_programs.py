"""GPyTorch's SVGP as its documentation writes it, with the settings under which it is fastest and does the same work.

Whitened ``VariationalStrategy``, ``CholeskyVariationalDistribution``, ``VariationalELBO``, Adam over all parameters.
K_uu is factorized by Cholesky, in the dtype of the data: by default GPyTorch takes double precision there. Batches are
slices of a permutation of the rows, which is faster than a ``DataLoader`` that collects them row by row.
"""

from __future__ import annotations

import os
import time

import gpytorch
import numpy as np
import torch
from problems import LEARNING_RATE, Problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Rows at a time in prediction.
CHUNK = 2048


def versions() -> dict[str, str]:
    return {
        "gpytorch": gpytorch.__version__,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "device": str(DEVICE),
    }


def configure(dtype: str) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.set_default_dtype(getattr(torch, dtype))


def make(kind: str, problem: Problem | None, **options):
    assert problem is not None
    return SVGP(problem)


def device_memory() -> int | None:
    """Most bytes in use on an accelerator, since the process began."""
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else None


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def tensor(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.get_default_dtype(), device=DEVICE)


class Model(gpytorch.models.ApproximateGP):
    def __init__(self, Z: torch.Tensor, jitter: float | None):
        q = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
        super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q, jitter_val=jitter))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=Z.shape[1]))

    def forward(self, X):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


class Trainer:
    """The model with Gaussian noise, by Adam on minibatches."""

    def __init__(self, X, y, Z, lengthscale, variance, noise, batch_size: int, jitter: float | None = None):
        self.model = Model(tensor(Z), jitter).to(DEVICE)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood().to(DEVICE)
        self.model.covar_module.base_kernel.lengthscale = tensor(lengthscale)
        self.model.covar_module.outputscale = variance
        self.likelihood.noise = noise
        self.mll = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=len(y))
        self.X, self.y, self.batch_size = tensor(X), tensor(y), batch_size
        parameters = [*self.model.parameters(), *self.likelihood.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
        self.order = torch.empty(0, dtype=torch.long)
        self.generator = torch.Generator().manual_seed(0)

    def step(self) -> torch.Tensor:
        if len(self.order) < self.batch_size:
            self.order = torch.randperm(len(self.y), generator=self.generator)
        rows, self.order = self.order[: self.batch_size].to(DEVICE), self.order[self.batch_size :]
        self.optimizer.zero_grad()
        loss = -self.mll(self.model(self.X[rows]), self.y[rows])
        loss.backward()
        self.optimizer.step()
        return loss

    def advance(self, steps: int) -> None:
        self.model.train()
        self.likelihood.train()
        with gpytorch.settings.linalg_dtypes(torch.get_default_dtype()):
            for _ in range(steps):
                loss = self.step()
        wait()
        if not torch.isfinite(loss):
            raise FloatingPointError(f"The loss became {loss.item()}.")

    def predictor(self, X_new):
        """A function that gives f's mean and variance; K_uu is factorized at its first call alone."""
        self.model.eval()
        self.likelihood.eval()
        chunks = tensor(X_new).split(CHUNK)

        @torch.no_grad()
        def predict():
            with gpytorch.settings.linalg_dtypes(torch.get_default_dtype()):
                found = [self.model(chunk) for chunk in chunks]
                moments = torch.cat([f.mean for f in found]), torch.cat([f.variance for f in found])
            wait()
            return moments

        return predict


class SVGP(Trainer):
    """The benchmark's problem."""

    def __init__(self, problem: Problem):
        p = problem
        super().__init__(p.X, p.y, p.Z, p.lengthscale, p.variance, p.noise, p.batch_size, p.jitter)
        self.problem = problem
        strategy = self.model.variational_strategy
        strategy.variational_params_initialized.fill_(1)  # else the first call puts q at the prior
        q = strategy._variational_distribution
        with torch.no_grad():
            q.variational_mean.copy_(tensor(p.loc))
            q.chol_variational_covar.copy_(tensor(p.scale_tril))

    def elbo(self) -> float:
        """Of the first rows, at the start."""
        self.model.train()
        with torch.no_grad(), gpytorch.settings.linalg_dtypes(torch.get_default_dtype()):
            X, y = self.X[: self.batch_size], self.y[: self.batch_size]
            return len(self.y) * float(self.mll(self.model(X), y)) + self.problem.jitter_of_rows

    def predictor(self):
        return super().predictor(self.problem.X_new)


def train(file: str, epochs: int, batch_size: int, lengthscale: float, variance: float, noise: float) -> dict:
    """
    The usual recipe: Adam with learning rate 0.01 and GPyTorch's own jitter, from the same start as npgp.

    :return: ``curve``, a list of seconds of training so far and the mean negative log density of the test rows.
    """
    with np.load(file) as data:
        X, y, X_test, y_test, Z = (data[name] for name in ("X", "y", "X_test", "y_test", "Z"))
    y_test = tensor(y_test)
    began = time.perf_counter()
    trainer = Trainer(X, y, Z, np.full(X.shape[1], lengthscale), variance, noise, batch_size)
    seconds, curve = time.perf_counter() - began, []
    for _ in range(epochs):
        began = time.perf_counter()
        trainer.advance(len(y) // batch_size)
        seconds += time.perf_counter() - began
        mean, variance_f = trainer.predictor(X_test)()
        total = variance_f + trainer.likelihood.noise.detach()
        density = -0.5 * (torch.log(2 * torch.pi * total) + (y_test - mean) ** 2 / total)
        curve.append([seconds, -float(density.mean())])
    return {"curve": curve, "steps": epochs * (len(y) // batch_size)}
