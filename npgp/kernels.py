"""Covariance functions: frozen dataclasses that are pytrees of arrays.

A hyperparameter is a number, an array, a ``numpyro.param`` or a ``numpyro.sample`` value; the kernel is built
inside the model from whatever is at hand. ``k(X, X2)`` works by matrix products, so no (N, M, D) array exists.

Sources: Rasmussen & Williams 2006, chapter 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp.linalg import matmul, require_positive
from npgp.pytrees import pytree

__all__ = [
    "RBF",
    "Constant",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Product",
    "Scaled",
    "Sum",
    "White",
]


class Kernel:
    """
    A covariance function. ``k1 + k2``, ``k1 * k2`` and ``2.0 * k`` build sums, products and scalings.

    A kernel of one's own subclasses this, as a frozen dataclass registered with
    :func:`npgp.pytrees.pytree`, and defines :meth:`__call__` and :meth:`diag`.
    """

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        """
        Covariance matrix of f(X) and f(X2).

        :param X: inputs, shape (N, D).
        :param X2: inputs, shape (M, D); ``X`` itself if omitted.
        :return: shape (N, M), or (N, N).
        """
        raise NotImplementedError

    def diag(self, X: jax.Array) -> jax.Array:
        """Prior variance k(x_n, x_n), shape (N,), without the square matrix."""
        raise NotImplementedError

    def __add__(self, other: Kernel) -> Kernel:
        return Sum((self, other)) if isinstance(other, Kernel) else NotImplemented

    def __mul__(self, other: Kernel | ArrayLike) -> Kernel:
        return Product((self, other)) if isinstance(other, Kernel) else Scaled(self, other)

    def __rmul__(self, other: ArrayLike) -> Kernel:
        return Scaled(self, other)


def _static() -> Any:
    return field(default=None, metadata={"static": True})


def _select(X: jax.Array, active_dims: tuple[int, ...] | None) -> jax.Array:
    if active_dims is None:
        return X
    columns = X.shape[-1]
    if not all(-columns <= i < columns for i in active_dims):
        raise ValueError(f"active_dims is {active_dims}, but the inputs have {columns} columns.")
    return X[:, np.asarray(active_dims)]


def _check_active_dims(active_dims: Any) -> None:
    whole = isinstance(active_dims, tuple) and all(isinstance(i, int) for i in active_dims)
    if active_dims is not None and not (whole and active_dims):
        raise TypeError(f"active_dims is {active_dims!r}; it must be a tuple of column numbers, such as (0, 2).")


def _check_columns(X: jax.Array, X2: jax.Array | None) -> None:
    if X2 is not None and X.shape[-1] != X2.shape[-1]:
        raise ValueError(
            f"the kernel was given inputs of {X.shape[-1]} and {X2.shape[-1]} columns; inducing inputs and data must "
            "have the same columns."
        )


def _check_ard(lengthscale: ArrayLike, columns: int, name: str) -> None:
    shape = jnp.shape(lengthscale)
    if shape not in ((), (1,), (columns,)):
        raise ValueError(
            f"{name} has shape {shape} but the kernel sees {columns} input columns; it must be () or ({columns},)."
        )


# ---------------------------------------------------------------------------------------------------------------
# Stationary kernels


def squared_distances(X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
    """
    ``‖x_n − x'_m‖²`` by matrix products, accurate for near points in float32 too.

    Inputs far from the origin must be centred by the caller. In float32, ``‖x‖² + ‖x'‖² − 2 x·x'`` loses
    ``ε‖x‖²``, which swamps small distances. Each input is therefore split in a coarse part on a grid, so coarse
    that its products and their sum are exact, and a small rest; what is left of the error is ``ε‖x‖²`` times the
    grid's spacing. Gradients pass through the rest and are those of the distance.

    :param X: shape (N, D).
    :param X2: shape (M, D), or ``None`` for ``X`` itself, with zeros on the diagonal.
    :return: shape (N, M), never negative.
    """
    Z = X if X2 is None else X2
    if X.dtype == jnp.float64:
        r2 = _square_norm(X)[:, None] + _square_norm(Z) - 2.0 * matmul(X, Z.T)
    else:
        bits = max(int((22 - math.log2(X.shape[-1])) / 2), 1)
        largest = lax.stop_gradient(jnp.maximum(jnp.max(jnp.abs(X)), jnp.max(jnp.abs(Z))))
        exponent = jnp.frexp(largest)[1] - bits
        Xh, Zh = (_round_to_grid(A, exponent) for A in (X, Z))
        Xl, Zl = X - Xh, Z - Zh
        coarse = _square_norm(Xh)[:, None] + _square_norm(Zh) - 2.0 * matmul(Xh, Zh.T)  # exact
        rest = matmul(jnp.concatenate([Xh, Xl], -1), jnp.concatenate([Zl, Zh + Zl], -1).T)
        ends = jnp.sum((2.0 * Xh + Xl) * Xl, -1)[:, None] + jnp.sum((2.0 * Zh + Zl) * Zl, -1)
        r2 = coarse + (ends - 2.0 * rest)
    # Clip without stopping the gradient, which is 2(x − x') and right at zero distance too.
    r2 = r2 + lax.stop_gradient(jnp.maximum(r2, 0.0) - r2)
    return r2 if X2 is not None else r2 * (1.0 - jnp.eye(X.shape[0], dtype=r2.dtype))


def _square_norm(A: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(A), axis=-1)


def _round_to_grid(A: jax.Array, exponent: jax.Array) -> jax.Array:
    return lax.stop_gradient(jnp.ldexp(jnp.round(jnp.ldexp(A, -exponent)), exponent))


@dataclass(frozen=True)
class Stationary(Kernel):
    """
    Kernels of the scaled distance ``r² = Σ_d (x_d − x'_d)² / ℓ_d²``; a subclass gives :meth:`correlation`.

    :param lengthscale: ℓ, in the inputs' units: a scalar, or one for each input column (ARD).
    :param variance: prior variance σ_f², in the squared units of f.
    :param active_dims: the input columns the kernel sees; all if omitted.
    :raises ValueError: for a hyperparameter that is known to be non-positive.
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = _static()

    def __post_init__(self):
        require_positive(self.lengthscale, f"{type(self).__name__} lengthscale")
        require_positive(self.variance, f"{type(self).__name__} variance")
        _check_active_dims(self.active_dims)

    @staticmethod
    def correlation(r2: jax.Array) -> jax.Array:
        """The kernel at unit variance, as a function of the scaled squared distance."""
        raise NotImplementedError

    def __call__(self, X, X2=None):
        _check_columns(X, X2)
        X = _select(X, self.active_dims)
        _check_ard(self.lengthscale, X.shape[-1], f"{type(self).__name__} lengthscale")
        centre = lax.stop_gradient(jnp.mean(X, axis=0))
        scaled = (X - centre) / self.lengthscale
        scaled2 = None if X2 is None else (_select(X2, self.active_dims) - centre) / self.lengthscale
        return self.variance * self.correlation(squared_distances(scaled, scaled2))

    def diag(self, X):
        return jnp.broadcast_to(jnp.asarray(self.variance, jnp.result_type(X)), X.shape[:1])


@pytree
@dataclass(frozen=True)
class RBF(Stationary):
    """Squared-exponential kernel, ``σ_f² exp(−r²/2)``; parameters as :class:`Stationary`."""

    @staticmethod
    def correlation(r2):
        return jnp.exp(-0.5 * r2)


# The Matérn family in a² = 2ν r². Each derivative in a² is a multiple of the member below it, which is finite at
# zero; automatic differentiation through √(a²) would give NaN there.


def _safe_sqrt(a2: jax.Array) -> jax.Array:
    positive = a2 > 0.0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, a2, 1.0)), 0.0)


@jax.custom_jvp
def _matern12(a2):
    return jnp.exp(-_safe_sqrt(a2))


@_matern12.defjvp
def _(primals, tangents):
    # Not differentiable at zero distance; zero there is the mean of the one-sided slopes in x.
    (a2,), (da2,) = primals, tangents
    a = _safe_sqrt(a2)
    slope = jnp.where(a > 0.0, -0.5 * jnp.exp(-a) / jnp.where(a > 0.0, a, 1.0), 0.0)
    return _matern12(a2), slope * da2


@jax.custom_jvp
def _matern32(a2):
    a = _safe_sqrt(a2)
    return (1.0 + a) * jnp.exp(-a)


@_matern32.defjvp
def _(primals, tangents):
    (a2,), (da2,) = primals, tangents
    return _matern32(a2), -0.5 * _matern12(a2) * da2


@jax.custom_jvp
def _matern52(a2):
    a = _safe_sqrt(a2)
    return (1.0 + a + a2 / 3.0) * jnp.exp(-a)


@_matern52.defjvp
def _(primals, tangents):
    (a2,), (da2,) = primals, tangents
    return _matern52(a2), -_matern32(a2) * da2 / 6.0


@pytree
@dataclass(frozen=True)
class Matern12(Stationary):
    """Matérn-1/2 (exponential) kernel, ``σ_f² exp(−r)``; parameters as :class:`Stationary`."""

    @staticmethod
    def correlation(r2):
        return _matern12(r2)


@pytree
@dataclass(frozen=True)
class Matern32(Stationary):
    """Matérn-3/2 kernel, ``σ_f² (1 + √3 r) exp(−√3 r)``; parameters as :class:`Stationary`."""

    @staticmethod
    def correlation(r2):
        return _matern32(3.0 * r2)


@pytree
@dataclass(frozen=True)
class Matern52(Stationary):
    """Matérn-5/2 kernel, ``σ_f² (1 + √5 r + 5r²/3) exp(−√5 r)``; parameters as :class:`Stationary`."""

    @staticmethod
    def correlation(r2):
        return _matern52(5.0 * r2)


# ---------------------------------------------------------------------------------------------------------------
# Others


@pytree
@dataclass(frozen=True)
class Linear(Kernel):
    """
    Linear kernel, ``Σ_d σ_d² x_d x'_d``: the prior of a regression line through the origin.

    :param variance: prior variance of the slopes, a scalar or one for each input column (ARD).
    :param active_dims: the input columns the kernel sees; all if omitted.
    """

    variance: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = _static()

    def __post_init__(self):
        require_positive(self.variance, "Linear variance")
        _check_active_dims(self.active_dims)

    def __call__(self, X, X2=None):
        _check_columns(X, X2)
        X = _select(X, self.active_dims)
        _check_ard(self.variance, X.shape[-1], "Linear variance")
        X2 = X if X2 is None else _select(X2, self.active_dims)
        return matmul(X * self.variance, X2.T)

    def diag(self, X):
        X = _select(X, self.active_dims)
        return jnp.sum(self.variance * jnp.square(X), axis=-1)


@pytree
@dataclass(frozen=True)
class Constant(Kernel):
    """
    Constant kernel: an unknown offset with this prior variance.

    :param variance: prior variance of the offset.
    """

    variance: ArrayLike = 1.0

    def __post_init__(self):
        require_positive(self.variance, "Constant variance")

    def __call__(self, X, X2=None):
        rows = X.shape[0] if X2 is None else X2.shape[0]
        return jnp.broadcast_to(jnp.asarray(self.variance, jnp.result_type(X)), (X.shape[0], rows))

    def diag(self, X):
        return jnp.broadcast_to(jnp.asarray(self.variance, jnp.result_type(X)), X.shape[:1])


@pytree
@dataclass(frozen=True)
class White(Kernel):
    """
    White noise: variance at every row, no covariance between rows, of two calls' inputs neither.

    ``k(X)`` is diagonal and ``k(X, X2)`` zero even where rows coincide, since each evaluation is fresh noise.

    :param variance: the noise variance.
    """

    variance: ArrayLike = 1.0

    def __post_init__(self):
        require_positive(self.variance, "White variance")

    def __call__(self, X, X2=None):
        if X2 is None:
            return self.variance * jnp.eye(X.shape[0], dtype=jnp.result_type(X))
        return jnp.zeros((X.shape[0], X2.shape[0]), jnp.result_type(X))

    def diag(self, X):
        return jnp.broadcast_to(jnp.asarray(self.variance, jnp.result_type(X)), X.shape[:1])


@pytree
@dataclass(frozen=True)
class Sum(Kernel):
    """Sum of kernels: the covariance of a sum of independent functions. Written ``k1 + k2``."""

    kernels: tuple[Kernel, ...]

    def __call__(self, X, X2=None):
        return sum(k(X, X2) for k in self.kernels)

    def diag(self, X):
        return sum(k.diag(X) for k in self.kernels)


@pytree
@dataclass(frozen=True)
class Product(Kernel):
    """Product of kernels. Written ``k1 * k2``."""

    kernels: tuple[Kernel, ...]

    def __call__(self, X, X2=None):
        return math.prod(k(X, X2) for k in self.kernels)

    def diag(self, X):
        return math.prod(k.diag(X) for k in self.kernels)


@pytree
@dataclass(frozen=True)
class Scaled(Kernel):
    """
    A kernel times a non-negative number. Written ``scale * k``.

    :param kernel: the kernel.
    :param scale: the factor, a scalar.
    """

    kernel: Kernel
    scale: ArrayLike

    def __post_init__(self):
        require_positive(self.scale, "kernel scale")

    def __call__(self, X, X2=None):
        return self.scale * self.kernel(X, X2)

    def diag(self, X):
        return self.scale * self.kernel.diag(X)
