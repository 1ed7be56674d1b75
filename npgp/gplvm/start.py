"""Where the training of a GPLVM starts from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax.typing import ArrayLike

from npgp import linalg

__all__ = ["Start", "pca_start"]


@dataclass(frozen=True)
class Start:
    """
    Where training of a GPLVM starts from.

    :param latents: μ_n, (N, Q).
    :param latent_scale: initial standard deviation of every latent coordinate.
    :param inducing: inducing inputs, (M, Q).
    :param offset: what is subtracted from each column of Y, (D,).
    :param noise_variance: initial σ², in the squared units of Y.
    :param variance: initial prior variance of the functions.
    :param lengthscale: initial lengthscale of every latent dimension.
    """

    latents: np.ndarray
    inducing: np.ndarray
    offset: np.ndarray
    latent_scale: float = 0.3
    noise_variance: float = 0.2
    variance: float = 1.0
    lengthscale: float = 1.0


def pca_start(Y: ArrayLike, latent_dim: int, num_inducing: int, seed: int = 0) -> Start:
    """
    Start from principal components: latent means of unit variance, inducing inputs at a random subset of them.

    :param Y: data, (N, D).
    :param latent_dim: Q, at most min(N, D).
    :param num_inducing: M, at most N.
    :param seed: of the subset.
    :raises ValueError: for data that is not a finite (N, D) array, and for Q or M out of range.
    """
    Y = np.asarray(linalg.inputs(np.asarray(Y), "Y"), dtype=float)
    rows, columns = Y.shape
    if not 1 <= latent_dim <= min(rows, columns):
        raise ValueError(
            f"latent_dim is {latent_dim}; principal components of {Y.shape} data allow 1 to {min(rows, columns)}."
        )
    if not 1 <= num_inducing <= rows:
        raise ValueError(f"num_inducing is {num_inducing}; it must be between 1 and the {rows} rows of Y.")
    offset = Y.mean(axis=0)
    left, singular, _ = np.linalg.svd(Y - offset, full_matrices=False)
    latents = left[:, :latent_dim] * np.sqrt(rows)
    # Directions without variance have arbitrary coordinates: start them at the prior mean.
    latents[:, singular[:latent_dim] <= 1e-10 * singular[0]] = 0.0
    chosen = np.random.default_rng(seed).choice(rows, num_inducing, replace=False)
    return Start(latents, latents[chosen], offset)
