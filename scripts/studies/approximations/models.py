"""The methods' models at given parameters, where these start, and what models need besides."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular
from numpyro.contrib.hsgp.laplacian import eigenfunctions
from numpyro.contrib.hsgp.spectral_densities import (
    diag_spectral_density_matern,
    diag_spectral_density_squared_exponential,
)

import npgp
import npgp.inducing
from studies.approximations.data import Data

KERNELS = {"matern32": npgp.Matern32, "rbf": npgp.RBF}
#: Start, for standardized data: lengthscales at this share of √D, variance and noise variance.
LENGTHSCALE, VARIANCE, NOISE = 0.7, 1.0, 0.1
#: HSGP's box, in units of the largest input.
BOX = 1.5

Params = dict[str, Any]


@dataclass(frozen=True)
class ExactGP:
    """The GP itself, by a dense factor of K + σ² I."""

    kernel: Any
    X: jax.Array
    noise: jax.Array

    def log_prob(self, y):
        return npgp.exact_log_evidence(self.kernel, self.X, y, noise_variance=self.noise)

    def predict(self, y, X):
        L = jnp.linalg.cholesky(self.kernel(self.X) + self.noise * jnp.eye(len(y)))
        A, z = (solve_triangular(L, v, lower=True) for v in (self.kernel(self.X, X), y))
        return A.T @ z, self.kernel.diag(X) - jnp.sum(jnp.square(A), axis=0)


@dataclass(frozen=True)
class HilbertSpaceGP:
    """
    NumPyro's Hilbert-space approximation: fixed functions of x, whose weights are independent and integrated out.

    :param features: the functions at the training rows, (N, M).
    :param spectrum: the weights' prior variances, (M,).
    :param functions: per column.
    """

    features: jax.Array
    spectrum: jax.Array
    box: jax.Array
    functions: int
    noise: jax.Array

    def log_prob(self, y):
        factor, noise = self.features * jnp.sqrt(self.spectrum), jnp.broadcast_to(self.noise, y.shape)
        return dist.LowRankMultivariateNormal(jnp.zeros_like(y), factor, noise).log_prob(y)

    def predict(self, y, X):
        A, new = (
            (phi * jnp.sqrt(self.spectrum)).T for phi in (self.features, eigenfunctions(X, self.box, self.functions))
        )
        L = jnp.linalg.cholesky(A @ A.T + self.noise * jnp.eye(len(A)))
        B, z = (solve_triangular(L, v, lower=True) for v in (new, A @ y))
        return B.T @ z, self.noise * jnp.sum(jnp.square(B), axis=0)


def kernel_and_noise(params: Params, kernel: str) -> tuple[Any, jax.Array]:
    lengthscale, variance, noise = (jnp.exp(params[key]) for key in ("lengthscale", "variance", "noise"))
    return KERNELS[kernel](lengthscale, variance=variance), noise


def model_of(name: str, params: Params, X: jax.Array, fixed: Params, kernel: str) -> Any:
    """
    A method's model of all rows.

    :param params: logs of lengthscales, variance and noise variance, and inducing inputs.
    :param fixed: what is not learned, as :func:`prepare` makes it.
    """
    k, noise = kernel_and_noise(params, kernel)
    if name == "exact":
        return ExactGP(k, X, noise)
    if name == "sgpr":
        return npgp.CollapsedGP(k, X, params["inducing"], noise_variance=noise, conditional="prior")
    if name == "solve":
        return npgp.CollapsedGP(k, X, params["inducing"], noise_variance=noise, conditional="tight")
    if name == "fitc":
        return npgp.ApproximateGP(k, X, params["inducing"], noise_variance=noise, method="fitc")
    if name == "nngp":
        return npgp.neighbors.ResponseNNGP(k, X, fixed["neighbors"], noise_variance=noise)
    columns, functions = X.shape[1], round(fixed["features"].shape[1] ** (1 / X.shape[1]))
    lengthscale, variance = jnp.exp(params["lengthscale"]), jnp.exp(params["variance"])
    if kernel == "rbf":
        spectrum = diag_spectral_density_squared_exponential(variance, lengthscale, fixed["box"], functions, columns)
    else:
        spectrum = diag_spectral_density_matern(1.5, variance, lengthscale, fixed["box"], functions, columns)
    return HilbertSpaceGP(fixed["features"], spectrum, fixed["box"], functions, noise)


def component_of(name: str, kernel: Any, start: Params, fixed: Params, batch_size: int) -> Any:
    """A method's component of a model that is trained in minibatches."""
    if name == "svgp":
        return npgp.SparseGP("f", kernel, numpyro.param("inducing", start["inducing"]))
    options = dict(batch_size=batch_size, init_loc=fixed["y"], init_scale=0.5)
    return npgp.VNNGP("f", kernel, fixed["X"], fixed["neighbors"], **options)


def start_of(name: str, data: Data, args: argparse.Namespace) -> Params:
    """The start: inducing inputs by k-means, and a second block greedily given the first."""
    dtype, columns = data.X.dtype, data.X.shape[1]
    params: Params = {
        "lengthscale": jnp.full(columns, math.log(LENGTHSCALE * math.sqrt(columns)), dtype),
        "variance": jnp.asarray(math.log(VARIANCE), dtype),
        "noise": jnp.asarray(math.log(NOISE), dtype),
    }
    size = min(args.inducing, len(data.y) // 2 * 2)
    if name in ("sgpr", "fitc", "svgp"):
        params["inducing"] = npgp.inducing.kmeans(jax.random.key(args.seed), data.X, size)
    elif name == "solve":
        first = npgp.inducing.kmeans(jax.random.key(args.seed), data.X, size // 2)
        kernel, _ = kernel_and_noise(params, args.kernel)
        params["inducing"] = [first, npgp.inducing.greedy_variance(kernel, data.X, size // 2, given=[first])]
    return params


def prepare(name: str, data: Data, params: Params, args: argparse.Namespace) -> Params:
    """What a method needs besides parameters: neighbors in units of the lengthscales, or features in a box."""
    if name in ("nngp", "vnngp"):
        scale = np.exp(params["lengthscale"])
        return {
            "X": data.X,
            "y": data.y,
            "neighbors": npgp.neighbors.nearest_before(data.X, args.neighbors, scale=scale),
        }
    if name == "hsgp":
        columns = data.X.shape[1]
        box = BOX * np.max(np.abs(np.concatenate([data.X, data.X_test])), axis=0)[:, None]
        functions = max(round(args.inducing ** (1.0 / columns)), 1)
        return {"box": jnp.asarray(box), "features": eigenfunctions(data.X, jnp.asarray(box), functions)}
    return {}
