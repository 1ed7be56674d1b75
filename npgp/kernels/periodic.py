"""Kernels of phases: periodic functions, and single waves."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jax.typing import ArrayLike

from npgp.checks import positive_fields
from npgp.kernels.base import (
    FeatureMap,
    Kernel,
    check_active_dims,
    check_ard,
    check_columns,
    columns_seen,
    filled,
    repeated,
    select,
    waves,
)
from npgp.kernels.distances import squared_distances
from npgp.linalg import matmul
from npgp.pytrees import pytree, static


@pytree
class Periodic(Kernel):
    """
    Periodic kernel, ``σ_f² exp(−2 Σ_d sin²(π (x_d − x'_d)/p_d)/ℓ_d²)`` (MacKay 1998).

    It is an RBF kernel of the inputs' places on circles, ``(cos 2πx_d/p_d, sin 2πx_d/p_d)``.

    .. code-block:: python

        # Its shape changes slowly.
        season = npgp.kernels.Periodic(1.0, lengthscale=0.7) * npgp.RBF(10.0)

    :param period: p, in the inputs' units: a scalar, or one for each input column.
    :param lengthscale: ℓ, without units: a scalar, or one for each input column.
    :param variance: prior variance σ_f².
    :param active_dims: the input columns the kernel sees; all if omitted.
    :raises ValueError: for a hyperparameter that is known to be non-positive.
    """

    period: ArrayLike = 1.0
    _: KW_ONLY
    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        positive_fields(self, "period", "lengthscale", "variance")
        check_active_dims(self.active_dims)

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        X = select(X, self.active_dims)
        center = lax.stop_gradient(jnp.mean(X, axis=0))
        points = _on_circles(self, X - center)
        points2 = None if X2 is None else _on_circles(self, select(X2, self.active_dims) - center)
        return jnp.exp(-0.5 * squared_distances(points, points2)) * self.variance

    def diag(self, X: jax.Array) -> jax.Array:
        return filled(self.variance, X, X.shape[0])

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        z = jax.random.normal(rng_key, (count, 2 * columns_seen(columns, self.active_dims)))
        return Partial(_circle_waves, self, z)


def _on_circles(kernel: Periodic, X: jax.Array) -> jax.Array:
    """Places on circles of radius 1/ℓ, (N, 2 D)."""
    check_ard(kernel.period, X.shape[-1], "Periodic period")
    check_ard(kernel.lengthscale, X.shape[-1], "Periodic lengthscale")
    phase = 2.0 * math.pi * (X / kernel.period)
    return jnp.concatenate([jnp.cos(phase) / kernel.lengthscale, jnp.sin(phase) / kernel.lengthscale], axis=-1)


def _circle_waves(kernel: Periodic, frequencies: jax.Array, X: jax.Array) -> jax.Array:
    return jnp.sqrt(kernel.variance) * waves(_on_circles(kernel, select(X, kernel.active_dims)), frequencies)


@pytree
class Cosine(Kernel):
    """
    Cosine kernel, ``σ_f² cos(2π Σ_d (x_d − x'_d)/p_d)``: one plane wave of unknown amplitude and phase.

    .. code-block:: python

        wave = npgp.kernels.Cosine(2.0)
        np.testing.assert_allclose(wave(np.array([[0.0]]), np.array([[2.0]])), 1.0, rtol=1e-5)

    :param period: p, in the inputs' units: a scalar, or one for each input column.
    :param variance: prior variance σ_f².
    :param active_dims: the input columns the kernel sees; all if omitted.
    :raises ValueError: for a hyperparameter that is known to be non-positive.
    """

    period: ArrayLike = 1.0
    _: KW_ONLY
    variance: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        positive_fields(self, "period", "variance")
        check_active_dims(self.active_dims)

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        X = select(X, self.active_dims)
        center = lax.stop_gradient(jnp.mean(X, axis=0))
        wave = _wave(self, X - center)
        wave2 = wave if X2 is None else _wave(self, select(X2, self.active_dims) - center)
        return matmul(wave, wave2.T) * self.variance

    def diag(self, X: jax.Array) -> jax.Array:
        return filled(self.variance, X, X.shape[0])

    def random_features(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(_plane_wave, self)  # exact

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(repeated, Partial(_plane_wave, self), jnp.ones((count, 1)))


def _wave(kernel: Cosine, X: jax.Array) -> jax.Array:
    """Cosine and sine of the phase, (N, 2)."""
    check_ard(kernel.period, X.shape[-1], "Cosine period")
    phase = 2.0 * math.pi * jnp.sum(X / kernel.period, axis=-1)
    return jnp.stack([jnp.cos(phase), jnp.sin(phase)], axis=-1)


def _plane_wave(kernel: Cosine, X: jax.Array) -> jax.Array:
    return jnp.sqrt(kernel.variance) * _wave(kernel, select(X, kernel.active_dims))
