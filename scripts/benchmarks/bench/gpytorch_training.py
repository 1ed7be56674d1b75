"""Training by GPyTorch: Adam over all parameters, on batches that are slices of a permutation of the rows."""

from __future__ import annotations

import gpytorch
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def tensor(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.get_default_dtype(), device=DEVICE)


class Minibatches:
    """
    Adam on minibatches.

    :param mll: GPyTorch's objective, with the model and the likelihood.
    :param X: inputs.
    :param y: targets; rows are along the first axis.
    """

    def __init__(self, mll, X: torch.Tensor, y: torch.Tensor, batch_size: int, learning_rate: float):
        self.mll, self.model, self.likelihood = mll, mll.model, mll.likelihood
        self.X, self.y, self.batch_size = X, y, batch_size
        parameters = [*self.model.parameters(), *self.likelihood.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=learning_rate)
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

    def elbo(self) -> float:
        """Of the first rows, at the start."""
        self.model.train()
        with torch.no_grad(), gpytorch.settings.linalg_dtypes(torch.get_default_dtype()):
            X, y = self.X[: self.batch_size], self.y[: self.batch_size]
            return len(self.y) * float(self.mll(self.model(X), y))
