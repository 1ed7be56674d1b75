"""
The interface of kernels, kernels made of kernels or of another library, and random feature maps: functions φ with
E[φ(X) φ(X')ᵀ] = k(X, X').

A kernel makes them from its *draws*, ψ: X (N, D) → (N, count, P): ``count`` independent groups of P features, such
that ``Σ_p ψ_cp(x) ψ_cp(x')`` of each group alone has mean k(x, x'). Groups can be multiplied, which averages cannot.

A map is a function with its arrays beside it (:class:`jax.tree_util.Partial`): a pytree, so it may cross ``jit``.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import ArrayLike

from npgp.checks import require_positive, whole_number
from npgp.linalg import matmul
from npgp.pytrees import ByName, pytree, static

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


class Kernel(ByName):
    """
    A covariance function. ``k1 + k2``, ``k1 * k2`` and ``2.0 * k`` build sums, products and scalings.

    A kernel of one's own subclasses this, as a frozen dataclass registered with
    :func:`npgp.pytrees.pytree`, and defines :meth:`__call__` and :meth:`diag`; also :meth:`feature_draws` if random
    features are wanted, and ``differentiable = False`` if its sample paths have no derivative.

    ``active_dims`` count the columns of the program's inputs, in every expression. A kernel without them sees all
    columns but those that hold levels in its expression, such as the number of the output (:class:`Coregion`).

    It computes the covariances of one function. For functions drawn in a plate of Q members at dim −2, hyperparameters
    of shape (Q, 1), or (Q, 1, D), as sampled in that plate, are one for each: the kernel is mapped over them.

    .. code-block:: python

        total = npgp.RBF(1.0) + 0.5 * npgp.Matern32(2.0) * npgp.kernels.Periodic(1.0)
        assert total(X, Z).shape == (30, 6) and total.diag(X).shape == (30,)

    :cvar matrix_fields: names of fields that hold matrices, or trees of these such as a network's weights: an array
        of two axes in them is one function's.
    """

    matrix_fields: ClassVar[tuple[str, ...]] = ()
    #: An array of NumPy on the left leaves the product to the kernel, and does not multiply entry by entry.
    __array_ufunc__ = None

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        """
        Covariance matrix of f(X) and f(X2).

        :param X: inputs, shape (N, D).
        :param X2: inputs, shape (M, D); ``X`` itself if omitted.
        :return: shape (N, M), or (N, N).
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__(X, X2), the covariance matrix (N, M).")

    def diag(self, X: jax.Array) -> jax.Array:
        """Prior variance k(x_n, x_n), shape (N,), without the square matrix."""
        raise NotImplementedError(f"{type(self).__name__} has no diag(X), the prior variances (N,).")

    @property
    def differentiable(self) -> bool:
        """
        True if sample paths are mean-square differentiable: ``∂²k/∂x∂x'`` exists at ``x = x'``.

        Where it is true, JAX derivatives of ``k(x[None], x2[None])[0, 0]`` are right at equal inputs too.
        """
        return True

    @property
    def wants_double(self) -> bool:
        """
        True if Gram matrices in float32 lose digits that count, so that they are better computed in float64 where that
        is cheap: a sum's small terms drown in the rounding of large ones, and the Gram matrix of a function of few
        degrees of freedom is singular. It is true of a kernel around others if it is of one of these.
        """
        return any(kernel.wants_double for kernel in _inner(self))

    @property
    def has_white_noise(self) -> bool:
        """Whether it is a :class:`~npgp.kernels.White`, or has one."""
        return any(kernel.has_white_noise for kernel in _inner(self))

    def level_columns(self, columns: int) -> frozenset[int]:
        """Columns, among so many, that hold levels here: numbers of outputs, which are labels and no inputs."""
        return frozenset().union(*(kernel.level_columns(columns) for kernel in _inner(self)))

    def apart_from(self, levels: frozenset[int], columns: int) -> Kernel:
        """
        This kernel of inputs with so many columns, some of which hold levels: where no ``active_dims`` say what it
        sees, it sees the others.

        :raises ValueError: for a kernel of one's own around kernels with levels, which may count other columns.
        """
        if not levels:
            return self
        if not hasattr(self, "active_dims"):
            if self.level_columns(columns):
                raise ValueError(
                    f"{type(self).__name__} holds a kernel with levels, and others stand beside it: which columns each "
                    "sees is not known; give these to it, or it to Coregion."
                )
            return _OtherColumns(self, tuple(sorted(levels)))
        if self.active_dims is not None:
            return self
        columns_left = tuple(i for i in range(columns) if i not in levels)
        if not columns_left:
            raise ValueError(
                f"{type(self).__name__} sees no column: all {columns} columns of the inputs hold levels; it needs at "
                "least one more."
            )
        restricted = copy.copy(self)
        object.__setattr__(restricted, "active_dims", columns_left)
        return restricted

    def random_features(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        """
        A random finite-dimensional feature map φ with ``E[φ(X) φ(X')ᵀ] = k(X, X')``.

        A path from the prior, approximately, is ``φ(X) @ w`` with ``w ~ N(0, I_F)``. The error falls as
        ``1/√count``; kernels of finitely many features (linear, constant, cosine) give these, without error. φ is
        differentiable in X and in hyperparameters, which may be traced; it is a pytree too. Inputs should be
        centered, since in float32 far from the origin phases are lost to rounding.

        :param rng_key: decides the draws.
        :param columns: number of input columns D.
        :param count: number of independent draws (frequencies, half-spaces, …), for each part of a sum. A draw gives
            one feature or several: two for stationary kernels, a product's factors multiply theirs.
        :return: from (N, D) to (N, F).
        :raises ValueError: if ``count`` is not positive.
        :raises NotImplementedError: for kernels without continuous paths or without a known feature map.

        Source: Rahimi & Recht 2007.
        """
        return Partial(average, self.feature_draws(rng_key, columns, whole_number(count, "count")))

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        """
        ``count`` independent unbiased groups of features, which :meth:`random_features` averages.

        :return: ψ from (N, D) to (N, count, P), with ``E[Σ_p ψ_cp(x) ψ_cp(x')] = k(x, x')`` for every c.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no random features; a kernel of one's own defines feature_draws for them."
        )

    def __add__(self, other: Kernel) -> Kernel:
        if not isinstance(other, Kernel):
            raise TypeError(
                f"a kernel plus {other!r:.40}: only kernels can be added to it; the covariance of a constant function "
                "is npgp.kernels.Constant(variance=…), and the noise of observations belongs to their likelihood."
            )
        return Sum((self, other))

    __radd__ = __add__

    def __pow__(self, other: Any) -> Kernel:
        raise TypeError(f"a kernel to the power of {other!r:.40}: kernels have no powers, write products, k * k.")

    def __mul__(self, other: Kernel | ArrayLike) -> Kernel:
        return Product((self, other)) if isinstance(other, Kernel) else Scaled(self, other)

    def __rmul__(self, other: ArrayLike) -> Kernel:
        return Scaled(self, other)


@dataclass(frozen=True)
class _Several(Kernel):
    """Kernels of the same inputs, none of which reads another's levels."""

    kernels: tuple[Kernel, ...]

    def apart_from(self, levels: frozenset[int], columns: int) -> Kernel:
        return type(self)(tuple(k.apart_from(levels, columns) for k in self.kernels))

    def _apart(self, columns: int) -> tuple[Kernel, ...]:
        return self.apart_from(self.level_columns(columns), columns).kernels  # type: ignore[attr-defined]

    @property
    def differentiable(self) -> bool:
        return all(k.differentiable for k in self.kernels)


@pytree
class Sum(_Several):
    """
    Sum of kernels: the covariance of a sum of independent functions. Written ``k1 + k2``.

    .. code-block:: python

        assert isinstance(npgp.RBF(1.0) + npgp.Matern32(2.0), npgp.kernels.Sum)
    """

    @property
    def wants_double(self) -> bool:
        return True

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        return functools.reduce(operator.add, (k(X, X2) for k in self._apart(X.shape[-1])))

    def diag(self, X: jax.Array) -> jax.Array:
        return functools.reduce(operator.add, (k.diag(X) for k in self._apart(X.shape[-1])))

    def random_features(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        keys = jax.random.split(rng_key, len(self.kernels))
        pairs = zip(self._apart(columns), keys, strict=True)
        return Partial(side_by_side, tuple(k.random_features(key, columns, count) for k, key in pairs))

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(side_by_side, _draws_of_each(self._apart(columns), rng_key, columns, count))


@pytree
class Product(_Several):
    """
    Product of kernels. Written ``k1 * k2``.

    .. code-block:: python

        assert isinstance(npgp.RBF(1.0) * npgp.Matern32(2.0), npgp.kernels.Product)
    """

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        return functools.reduce(operator.mul, (k(X, X2) for k in self._apart(X.shape[-1])))

    def diag(self, X: jax.Array) -> jax.Array:
        return functools.reduce(operator.mul, (k.diag(X) for k in self._apart(X.shape[-1])))

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(products, _draws_of_each(self._apart(columns), rng_key, columns, count))


def _draws_of_each(kernels: Sequence[Kernel], rng_key: jax.Array, columns: int, count: int) -> tuple[FeatureMap, ...]:
    keys = jax.random.split(rng_key, len(kernels))
    return tuple(k.feature_draws(key, columns, count) for k, key in zip(kernels, keys, strict=True))


@pytree
class Scaled(Kernel):
    """
    A kernel times a non-negative number. Written ``scale * k``.

    .. code-block:: python

        assert np.allclose((2.0 * kernel).diag(X), 2.0)

    :param kernel: the kernel.
    :param scale: the factor, a scalar.
    """

    kernel: Kernel
    scale: ArrayLike

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", require_positive(self.scale, "kernel scale"))

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        return self.kernel(X, X2) * self.scale

    def diag(self, X: jax.Array) -> jax.Array:
        return self.kernel.diag(X) * self.scale

    def apart_from(self, levels: frozenset[int], columns: int) -> Kernel:
        return Scaled(self.kernel.apart_from(levels, columns), self.scale)

    @property
    def differentiable(self) -> bool:
        return self.kernel.differentiable

    def random_features(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(scaled, self.scale, self.kernel.random_features(rng_key, columns, count))

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(scaled, self.scale, self.kernel.feature_draws(rng_key, columns, count))


@pytree
class _OtherColumns(Kernel):
    """A kernel without ``active_dims``, of the columns that hold no levels."""

    kernel: Kernel
    levels: tuple[int, ...] = static(())

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        return self.kernel(self._others(X), None if X2 is None else self._others(X2))

    def diag(self, X: jax.Array) -> jax.Array:
        return self.kernel.diag(self._others(X))

    def apart_from(self, levels: frozenset[int], columns: int) -> Kernel:
        return _OtherColumns(self.kernel, tuple(sorted(levels.union(self.levels))))

    @property
    def differentiable(self) -> bool:
        return self.kernel.differentiable

    def random_features(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(_of_others, self, self.kernel.random_features(rng_key, columns - len(self.levels), count))

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(_of_others, self, self.kernel.feature_draws(rng_key, columns - len(self.levels), count))

    def _others(self, X: jax.Array) -> jax.Array:
        return X[:, np.delete(np.arange(X.shape[-1]), np.asarray(self.levels))]


def _of_others(kernel: _OtherColumns, base: FeatureMap, X: jax.Array) -> jax.Array:
    return base(kernel._others(X))


def _inner(kernel: Kernel) -> list[Kernel]:
    """Kernels in the fields of another."""
    leaves = jax.tree.leaves(kernel, is_leaf=lambda x: isinstance(x, Kernel) and x is not kernel)
    return [leaf for leaf in leaves if isinstance(leaf, Kernel) and leaf is not kernel]  # which may be no pytree


# ---------------------------------------------------------------------------------------------------------------
# For kernels of columns of the inputs


def select(X: jax.Array, active_dims: tuple[int, ...] | None) -> jax.Array:
    """The columns a kernel sees."""
    if active_dims is None:
        return X
    columns = X.shape[-1]
    if not all(-columns <= i < columns for i in active_dims):
        raise ValueError(f"active_dims is {active_dims}, but the inputs have {columns} columns.")
    return X[:, np.asarray(active_dims)]


def columns_seen(columns: int, active_dims: tuple[int, ...] | None) -> int:
    """Number of columns that a kernel reads of inputs with ``columns`` columns."""
    return columns if active_dims is None else len(active_dims)


def check_active_dims(active_dims: Any) -> None:
    whole = isinstance(active_dims, tuple) and all(type(i) is int for i in active_dims)
    if active_dims is not None and not (whole and active_dims):
        raise TypeError(f"active_dims is {active_dims!r}; it must be a tuple of column numbers, such as (0, 2).")


def check_columns(X: jax.Array, X2: jax.Array | None) -> None:
    if X2 is not None and X.shape[-1] != X2.shape[-1]:
        raise ValueError(
            f"the kernel was given inputs of {X.shape[-1]} and {X2.shape[-1]} columns; inducing inputs and data must "
            "have the same columns."
        )


def check_ard(value: ArrayLike, columns: int, name: str) -> None:
    shape = jnp.shape(value)
    if shape not in ((), (1,), (columns,)):
        raise ValueError(
            f"{name} has shape {shape} but the kernel sees {columns} input columns; it must be () or ({columns},), "
            f"or, for functions drawn in a plate of Q members at dim=-2, (Q, 1) or (Q, 1, {columns})."
        )


def filled(variance: ArrayLike, X: jax.Array, *shape: int) -> jax.Array:
    """A constant array in the inputs' dtype."""
    return jnp.broadcast_to(jnp.asarray(variance, jnp.result_type(X)), shape)


@pytree
class Tinygp(Kernel):
    """
    A kernel of tinygp (https://tinygp.readthedocs.io), whose ``k(X, X2)`` is a matrix and ``k(X)`` its diagonal.

    It counts as not differentiable whatever it is: JAX derivatives of tinygp's distances are not right at equal
    inputs.

    .. code-block:: python

        import tinygp

        assert npgp.kernels.Tinygp(tinygp.kernels.Matern32(2.0))(X, Z).shape == (30, 6)

    :param kernel: the tinygp kernel, a pytree.
    """

    kernel: Callable[..., jax.Array]

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        return self.kernel(X, X if X2 is None else X2)

    def diag(self, X: jax.Array) -> jax.Array:
        return self.kernel(X)

    @property
    def differentiable(self) -> bool:
        return False


def as_kernel(obj: Any, name: str = "kernel") -> Kernel:
    """
    A kernel of this library or of tinygp, as one of this library.

    .. code-block:: python

        assert npgp.kernels.as_kernel(kernel) is kernel

    :param obj: a :class:`Kernel`, returned as it is, or a tinygp kernel, which is wrapped.
    :param name: what the error calls it.
    :raises TypeError: for anything else.
    """
    if isinstance(obj, Kernel):
        return obj
    if callable(obj) and not isinstance(obj, type):
        # By the modules of its classes, so that nothing is imported.
        if any(cls.__module__.split(".")[0] == "tinygp" for cls in type(obj).__mro__):
            return Tinygp(obj)
    raise TypeError(f"{name} is {obj!r:.80}; it must be a kernel of npgp.kernels, such as RBF(), or one of tinygp.")


def warn_of_white_noise(kernel: Kernel, gp: str) -> None:
    """
    Warn of white noise in the kernel of a GP with inducing features, which cannot learn it.

    :param gp: what the message calls the GP.
    """
    if kernel.has_white_noise:
        warnings.warn(
            f"the kernel of {gp} has a White, which inducing features cannot learn: bounds and predictions are far "
            "off. Leave it out and add its variance to the likelihood's noise, as in npgp.Gaussian(variance=...).",
            UserWarning,
            stacklevel=4,
        )
