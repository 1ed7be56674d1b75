"""The arc-cosine kernel: infinitely wide networks of one hidden layer."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jax.typing import ArrayLike

from npgp.checks import one_of, positive_fields
from npgp.kernels.base import (
    FeatureMap,
    Kernel,
    check_active_dims,
    check_ard,
    check_columns,
    columns_seen,
    filled,
    project,
    select,
)
from npgp.kernels.distances import squared_distances
from npgp.linalg import safe_sqrt
from npgp.programs.backend import maximum
from npgp.pytrees import pytree, static


@pytree
class ArcCosine(Kernel):
    """
    Arc-cosine kernel, ``σ² ‖x̃‖ⁿ ‖x̃'‖ⁿ J_n(θ)/π``, with θ the angle of the weighted inputs ``x̃ = (√w_d x_d, √b)``.

    It is ``2σ² E[h(w·x̃) h(w·x̃')]`` with w standard normal and ``h(a) = aⁿ`` for positive a, else 0: the prior of a
    network of one wide hidden layer of steps (n = 0), rectified linear (1) or rectified quadratic units (2).

    .. code-block:: python

        kernel = npgp.kernels.ArcCosine(1, weight_variance=[1.0])
        assert kernel(X, Z).shape == (30, 6)

    :param order: n.
    :param variance: σ².
    :param weight_variance: w, a scalar or one for each input column (ARD).
    :param bias_variance: b > 0.
    :param active_dims: the input columns the kernel sees; all if omitted.
    :raises ValueError: for another order, or a hyperparameter that is known to be non-positive.

    Source: Cho & Saul 2009, eqs. 1–8.
    """

    order: int = static(1)
    _: KW_ONLY
    variance: ArrayLike = 1.0
    weight_variance: ArrayLike = 1.0
    bias_variance: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        one_of(self.order, "ArcCosine order", (0, 1, 2))
        positive_fields(self, "variance", "weight_variance", "bias_variance")
        check_active_dims(self.active_dims)

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        norm, unit = _polar(_weighted(self, X))
        norm2, unit2 = (norm, None) if X2 is None else _polar(_weighted(self, X2))
        chord2 = squared_distances(unit, unit2, smooth=self.differentiable)
        scale = self.variance / math.pi * norm[:, None] ** self.order * norm2**self.order
        return ANGULAR[self.order](chord2) * scale

    def diag(self, X: jax.Array) -> jax.Array:
        square = jnp.sum(jnp.square(_weighted(self, X)), axis=-1)
        return square**self.order * (self.variance * (1.0, 1.0, 3.0)[self.order])

    @property
    def differentiable(self) -> bool:
        return self.order > 0

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        normals = jax.random.normal(rng_key, (count, columns_seen(columns, self.active_dims) + 1))
        return Partial(_half_spaces, self, normals)


def _weighted(kernel: ArcCosine, X: jax.Array) -> jax.Array:
    X = select(X, kernel.active_dims)
    check_ard(kernel.weight_variance, X.shape[-1], "ArcCosine weight_variance")
    bias = filled(jnp.sqrt(kernel.bias_variance), X, X.shape[0], 1)
    return jnp.concatenate([X * jnp.sqrt(kernel.weight_variance), bias], axis=-1)


def _polar(X: jax.Array) -> tuple[jax.Array, jax.Array]:
    norm = jnp.sqrt(jnp.sum(jnp.square(X), axis=-1))
    return norm, X / norm[:, None]


def _half_spaces(kernel: ArcCosine, normals: jax.Array, X: jax.Array) -> jax.Array:
    """The unit of a random half-space and that of the opposite one."""
    return jnp.sqrt(kernel.variance) * half_spaces(kernel.order, normals, _weighted(kernel, X))


def half_spaces(order: int, normals: jax.Array, X: jax.Array) -> jax.Array:
    """The units ``h(w·x)`` and ``h(−w·x)`` of random normals w, (N, count, 2), whose mean inner product is J_n/π."""
    height = project(X, normals)
    heights = jnp.stack([height, -height], axis=-1)
    return (heights > 0).astype(heights.dtype) if order == 0 else maximum(heights, 0.0) ** order


# The angular part J_n as a function of the squared chord c² = ‖u − u'‖² = 2 − 2 cos θ of unit vectors, from which
# even float32 finds small angles to all digits; from cos θ it would lose half of them. Each derivative in cos θ is a
# multiple of the member below (J_2' = 4 J_1, J_1' = J_0), which is finite at θ = 0; that of arccos is not.


def _angle(chord2: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """π − θ, and cosine and sine of θ."""
    rest2 = maximum(4.0 - chord2, 0.0)
    chord, rest = safe_sqrt(chord2), safe_sqrt(rest2)
    return 2.0 * jnp.arctan2(rest, chord), 1.0 - 0.5 * chord2, 0.5 * chord * rest


@jax.custom_jvp
def _angular0(chord2: jax.Array) -> jax.Array:
    return _angle(chord2)[0]


@_angular0.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    # dJ_0/dcos θ = 1/sin θ. As for Matérn-1/2, zero at θ = 0 is the mean of the one-sided slopes in x. Points that are
    # closer than the resolution of 1 count as equal: second derivatives of J_1 divide rounding errors by their chord.
    (chord2,), (dchord2,) = primals, tangents
    sine = _angle(chord2)[2]
    between = (chord2 > float(jnp.finfo(chord2.dtype).eps) ** 2) & (chord2 < 4.0)
    slope = jnp.where(between, -0.5 / jnp.where(between, sine, 1.0), 0.0)
    return _angular0(chord2), slope * dchord2


@jax.custom_jvp
def _angular1(chord2: jax.Array) -> jax.Array:
    supplement, cosine, sine = _angle(chord2)
    return sine + supplement * cosine


@_angular1.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (chord2,), (dchord2,) = primals, tangents
    return _angular1(chord2), -0.5 * _angular0(chord2) * dchord2


@jax.custom_jvp
def _angular2(chord2: jax.Array) -> jax.Array:
    supplement, cosine, sine = _angle(chord2)
    return 3.0 * sine * cosine + supplement * (1.0 + 2.0 * jnp.square(cosine))


@_angular2.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (chord2,), (dchord2,) = primals, tangents
    return _angular2(chord2), -2.0 * _angular1(chord2) * dchord2


#: J_n(θ) by order.
ANGULAR = (_angular0, _angular1, _angular2)
