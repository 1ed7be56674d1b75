"""
Functions of a Gaussian input and a pair of inducing inputs, for all rows and pairs at once: what
:mod:`npgp.collapsed.psi` needs of two exponential terms of a kernel.

Quadratic functions of a point are written out as products of matrices, (B, K) of rows and (K, P) of points or pairs, so
that no array has rows, pairs and columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import linalg

#: Below this, exp(x) − 1 is taken by its series, whose coefficients after the first of them, x, these are, over x.
SERIES_LIMIT, SERIES = 0.25, [1.0 / math.factorial(k) for k in range(1, 12)]


class Pairs(NamedTuple):
    """Pairs of M inducing inputs: each once, in the order that two terms of a kernel see them or, of one, in any."""

    one: np.ndarray  # (P,)
    other: np.ndarray
    #: Which pair each entry of a matrix is of, (M, M).
    of_entry: np.ndarray
    #: Whether the two terms are one.
    same: bool

    @classmethod
    def of(cls, size: int, same: bool) -> Pairs:
        one, other = np.tril_indices(size) if same else np.indices((size, size)).reshape(2, -1)
        of_entry = np.zeros((size, size), int)
        if same:
            of_entry[other, one] = np.arange(len(one))
        of_entry[one, other] = np.arange(len(one))
        return cls(one, other, of_entry, same)

    def matrix(self, values: jax.Array) -> jax.Array:
        """The symmetric matrix that values of pairs, (P,), contribute, (M, M)."""
        half = values[self.of_entry]
        return half if self.same else half + half.T

    def weighted(self, form: jax.Array) -> jax.Array:
        """Coefficients of values of pairs in their trace with a symmetric matrix (M, M); (P,)."""
        once = self.same & (self.one == self.other)
        return form[self.one, self.other] * jnp.where(once, 1.0, 2.0)


def negative_square(constant: jax.Array, precision: jax.Array, at: jax.Array, tilt: ArrayLike = 0.0) -> jax.Array:
    """
    ``constant − ½ Σ_q precision (at − z)² − Σ_q tilt at (z − ½ at)`` of each row as coefficients of :func:`powers`,
    (B, 2Q + 1).

    Terms are added before they are columns of one array: of two arrays of 1, 6 and 6 columns jaxlib 0.10.1 computes the
    sum wrongly in float64 on CPUs.
    """
    shift = precision - tilt
    constant = constant - 0.5 * jnp.sum(shift * jnp.square(at), axis=-1)
    return jnp.concatenate([constant[:, None], shift * at, -0.5 * precision], axis=-1)


def powers(z: jax.Array) -> jax.Array:
    """1, z and z² of points (P, Q): (2Q + 1, P)."""
    z = z.T  # before they are one array, as in negative_square
    return jnp.concatenate([jnp.ones_like(z[:1]), z, jnp.square(z)])


def at_pairs(
    first: jax.Array, second: jax.Array, one: jax.Array, other: jax.Array, cross: jax.Array | None = None
) -> jax.Array:
    """
    The sum of two functions of :func:`negative_square`, the one at one point of each pair, and of ``Σ_q cross one
    other``: (B, P).

    It is one product, whose time, and that of its gradients, grows with the number of columns.
    """
    if first is second:
        rows, points = [first], [powers(one) + powers(other)]
    else:
        rows, points = [first, second], [powers(one), powers(other)]
    if cross is not None:
        rows, points = [*rows, cross], [*points, (one * other).T]
    return linalg.matmul(jnp.concatenate(rows, axis=-1), jnp.concatenate(points))


def log_excess(alpha: jax.Array, beta: jax.Array, variance: jax.Array, m, one, other) -> jax.Array:
    """``log E k_i(x, one) k_j(x, other) − log E k_i(x, one) − log E k_j(x, other)``, (B, P)."""
    t, u = variance * alpha, variance * beta
    both = 1.0 + t + u
    share = t * u / both
    half = 0.25 * jnp.sum(jnp.log1p(share), axis=-1)
    # w (m − one)(m − other), of which each point has a half but for the product of both.
    w = t * beta / both
    first = negative_square(half, share * alpha / (1.0 + t), m, w)
    second = first if alpha is beta else negative_square(half, share * beta / (1.0 + u), m, w)
    return at_pairs(first, second, one, other, w)


@jax.custom_jvp
def exp_difference(log: jax.Array, excess: jax.Array) -> jax.Array:
    """``exp(log + excess) − exp(log)`` without loss for a small excess and overflow for a large one."""
    series = jnp.full_like(excess, SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        series = coefficient + excess * series
    start = jnp.exp(log)
    small = jnp.abs(excess) < SERIES_LIMIT
    return jnp.where(small, start * excess * series, jnp.exp(log + excess) - start)


@exp_difference.defjvp
def _(primals, tangents):
    log, _ = primals
    value = exp_difference(*primals)
    return value, value * tangents[0] + (value + jnp.exp(log)) * tangents[1]
