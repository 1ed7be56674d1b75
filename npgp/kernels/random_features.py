"""Random feature maps: functions φ with E[φ(X) φ(X')ᵀ] = k(X, X').

A kernel makes them from its *draws*, ψ: X (N, D) → (N, count, P): ``count`` independent groups of P features, such
that ``Σ_p ψ_cp(x) ψ_cp(x')`` of each group alone has mean k(x, x'). Groups can be multiplied, which averages cannot.

A map is a function with its arrays beside it (:class:`jax.tree_util.Partial`): a pytree, so it may cross ``jit``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from npgp.linalg import matmul

#: From inputs (N, D) to features (N, F) or, of groups, (N, count, P).
FeatureMap: TypeAlias = Callable[[jax.Array], jax.Array]


def average(draws: FeatureMap, X: jax.Array) -> jax.Array:
    """Features (N, count · P) whose inner product is the mean over the groups."""
    groups = draws(X)
    return groups.reshape(groups.shape[0], -1) / math.sqrt(groups.shape[1])


def repeated(exact: FeatureMap, ones: jax.Array, X: jax.Array) -> jax.Array:
    """Groups of a kernel of finitely many features: all of them in each. ``ones`` is of shape (count, 1)."""
    features = exact(X)
    return features[:, None, :] * ones.astype(features.dtype)


def side_by_side(maps: tuple[FeatureMap, ...], X: jax.Array) -> jax.Array:
    """Features of a sum of kernels."""
    return jnp.concatenate([draw(X) for draw in maps], axis=-1)


def products(maps: tuple[FeatureMap, ...], X: jax.Array) -> jax.Array:
    """Groups of a product of kernels: in each group, all products of one feature of every part."""
    result, *others = (draw(X) for draw in maps)
    for other in others:
        result = (result[..., :, None] * other[..., None, :]).reshape(*result.shape[:2], -1)
    return result


def scaled(scale: jax.Array, draw: FeatureMap, X: jax.Array) -> jax.Array:
    """Features of a kernel times a number."""
    return jnp.sqrt(scale) * draw(X)


def project(X: jax.Array, directions: jax.Array) -> jax.Array:
    """
    Inner products with random directions, in the inputs' dtype.

    :param X: shape (N, D).
    :param directions: shape (count, D).
    :return: shape (N, count).
    :raises ValueError: if the inputs have other columns than the features were drawn for.
    """
    X = jnp.asarray(X)
    if X.shape[-1] != directions.shape[-1]:
        raise ValueError(
            f"the random features see {X.shape[-1]} columns but were drawn for {directions.shape[-1]}; columns must "
            "be the number of columns of X."
        )
    return matmul(X, directions.T.astype(X.dtype))


def waves(X: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Cosine and sine of each frequency's phase, (N, count, 2): E is the frequencies' characteristic function."""
    phase = project(X, frequencies)
    return jnp.stack([jnp.cos(phase), jnp.sin(phase)], axis=-1)
