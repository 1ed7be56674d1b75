"""Kernels of inner products and constants: priors of regression coefficients; and white noise."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp
import numpy as np
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
    project,
    repeated,
    select,
)
from npgp.linalg import matmul
from npgp.pytrees import pytree, static


@pytree
class Linear(Kernel):
    """
    Linear kernel, ``Σ_d σ_d² x_d x'_d``: the prior of a regression line through the origin.

    .. code-block:: python

        trend = npgp.RBF(1.0) + npgp.kernels.Linear(variance=0.5)

    :param variance: prior variance of the slopes, a scalar or one for each input column (ARD).
    :param active_dims: the input columns the kernel sees; all if omitted.
    """

    _: KW_ONLY
    variance: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        positive_fields(self, "variance")
        check_active_dims(self.active_dims)

    @property
    def wants_double(self) -> bool:
        return True

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        X = select(X, self.active_dims)
        check_ard(self.variance, X.shape[-1], "Linear variance")
        X2 = X if X2 is None else select(X2, self.active_dims)
        return matmul(X * self.variance, X2.T)

    def diag(self, X: jax.Array) -> jax.Array:
        X = select(X, self.active_dims)
        return jnp.sum(self.variance * jnp.square(X), axis=-1)

    def random_features(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(_weighted, self)  # exact

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        signs = jax.random.rademacher(rng_key, (count, columns_seen(columns, self.active_dims)), dtype=float)
        return Partial(_signed_sums, self, signs)


def _weighted(kernel: Linear, X: jax.Array) -> jax.Array:
    return select(X, kernel.active_dims) * jnp.sqrt(kernel.variance)


def _signed_sums(kernel: Linear, signs: jax.Array, X: jax.Array) -> jax.Array:
    return project(_weighted(kernel, X), signs)[..., None]


@pytree
class Polynomial(Kernel):
    """
    Polynomial kernel, ``(Σ_d σ_d² x_d x'_d + c)^p``: the prior of a polynomial of degree p.

    Random features are the monomials themselves where there are no more than ``count`` of them, else products of p
    random projections (Kar & Karnick 2012), whose variance grows with p.

    .. code-block:: python

        np.testing.assert_allclose(
            npgp.kernels.Polynomial(2)(X), npgp.kernels.Polynomial(2)(X).T
        )

    :param degree: p, a whole number of at least 1.
    :param variance: σ², a scalar or one for each input column (ARD).
    :param offset: c > 0, against which the inputs' part is weighed.
    :param active_dims: the input columns the kernel sees; all if omitted.
    :raises ValueError: for another degree, or a hyperparameter that is known to be non-positive.
    """

    degree: int = static(2)
    _: KW_ONLY
    variance: ArrayLike = 1.0
    offset: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static(None, kw_only=True)

    def __post_init__(self) -> None:
        if type(self.degree) is not int or self.degree < 1:
            raise ValueError(f"Polynomial degree is {self.degree!r}; it must be a whole number of at least 1.")
        positive_fields(self, "variance", "offset")
        check_active_dims(self.active_dims)

    @property
    def wants_double(self) -> bool:
        return True

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        X = select(X, self.active_dims)
        check_ard(self.variance, X.shape[-1], "Polynomial variance")
        X2 = X if X2 is None else select(X2, self.active_dims)
        return (matmul(X * self.variance, X2.T) + self.offset) ** self.degree

    def diag(self, X: jax.Array) -> jax.Array:
        X = select(X, self.active_dims)
        return (jnp.sum(self.variance * jnp.square(X), axis=-1) + self.offset) ** self.degree

    def random_features(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        if math.comb(columns_seen(columns, self.active_dims) + self.degree, self.degree) <= count:
            return Partial(_monomials, self)
        return super().random_features(rng_key, columns, count)

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        shape = (self.degree, count, columns_seen(columns, self.active_dims) + 1)
        return Partial(_signed_products, self, jax.random.rademacher(rng_key, shape, dtype=float))


def _with_offset(kernel: Polynomial, X: jax.Array) -> jax.Array:
    """Inputs whose inner products are the base of the power, (N, D + 1)."""
    X = select(X, kernel.active_dims)
    return jnp.concatenate([X * jnp.sqrt(kernel.variance), filled(jnp.sqrt(kernel.offset), X, X.shape[0], 1)], -1)


def _monomials(kernel: Polynomial, X: jax.Array) -> jax.Array:
    inputs = _with_offset(kernel, X)
    choices = list(itertools.combinations_with_replacement(range(inputs.shape[-1]), kernel.degree))
    repeats = [math.prod(math.factorial(n) for n in Counter(choice).values()) for choice in choices]
    weights = jnp.sqrt(jnp.asarray(math.factorial(kernel.degree) / np.array(repeats), inputs.dtype))  # multinomial
    return weights * math.prod(inputs[:, column] for column in np.array(choices).T)


def _signed_products(kernel: Polynomial, signs: jax.Array, X: jax.Array) -> jax.Array:
    inputs = _with_offset(kernel, X)
    return jnp.expand_dims(math.prod(project(inputs, factor) for factor in signs), -1)


@pytree
class Constant(Kernel):
    """
    Constant kernel: an unknown offset with this prior variance.

    .. code-block:: python

        # A function with an unknown level.
        kernel = npgp.RBF(1.0) + npgp.kernels.Constant(variance=4.0)

    :param variance: prior variance of the offset.
    """

    _: KW_ONLY
    variance: ArrayLike = 1.0

    def __post_init__(self) -> None:
        positive_fields(self, "variance")

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        return filled(self.variance, X, X.shape[0], (X if X2 is None else X2).shape[0])

    def diag(self, X: jax.Array) -> jax.Array:
        return filled(self.variance, X, X.shape[0])

    def random_features(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(_constant, self)  # exact

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(repeated, Partial(_constant, self), jnp.ones((count, 1)))


def _constant(kernel: Constant, X: jax.Array) -> jax.Array:
    return filled(jnp.sqrt(kernel.variance), X, X.shape[0], 1)


@pytree
class White(Kernel):
    """
    White noise: variance at every row, no covariance between rows, of two calls' inputs neither.

    ``k(X)`` is diagonal and ``k(X, X2)`` zero even where rows coincide, since each evaluation is fresh noise.

    Inducing points cannot learn white noise at rows: it all stays in the residual, and lowers bounds. Noise of
    observations belongs in the likelihood, as in ``npgp.Gaussian(scale=0.3)``; :class:`npgp.SparseGP` and
    :class:`npgp.CollapsedGP` warn of this kernel.

    .. code-block:: python

        rough = npgp.RBF(1.0) + npgp.kernels.White(variance=0.1)

    :param variance: the noise variance.
    """

    _: KW_ONLY
    variance: ArrayLike = 1.0

    def __post_init__(self) -> None:
        positive_fields(self, "variance")

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        if X2 is None:
            return jnp.eye(X.shape[0], dtype=jnp.result_type(X)) * self.variance
        return jnp.zeros((X.shape[0], X2.shape[0]), jnp.result_type(X))

    def diag(self, X: jax.Array) -> jax.Array:
        return filled(self.variance, X, X.shape[0])

    @property
    def differentiable(self) -> bool:
        return False

    @property
    def has_white_noise(self) -> bool:
        return True

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        raise NotImplementedError("White has no random features: white noise has no continuous paths.")
