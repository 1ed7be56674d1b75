"""The sparse GP that memmap_cost.py and scaling.py train: a sine of the first column, Matérn-3/2, Gaussian noise."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp


def rows(rng: np.random.Generator, count: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    X = rng.uniform(-2, 2, size=(count, columns))
    return X, np.sin(X[:, 0]) + 0.1 * rng.normal(size=count)


def small_svgp(size: int, Z: np.ndarray) -> SVI:
    """Adam on minibatches of so many rows in all; lengthscales, inducing inputs and noise variance are learned."""

    def model(X, y=None):
        positive: dict[str, Any] = dict(constraint=constraints.positive)
        kernel = npgp.Matern32(numpyro.param("lengthscale", jnp.full(Z.shape[1], 2.0), **positive))
        f = npgp.SparseGP("f", kernel, npgp.features.Points(numpyro.param("Z", jnp.asarray(Z)))).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=numpyro.param("noise", 0.1, **positive)), obs=y)

    return SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())
