"""Kernels of several outputs: inputs with a column that says which output a row belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import ArrayLike, DTypeLike

from npgp import checks, linalg
from npgp.kernels.base import FeatureMap, Kernel, as_kernel, check_columns
from npgp.programs.later import see_later
from npgp.pytrees import pytree, static


@pytree
class Coregion(Kernel):
    """
    Intrinsic coregionalization: ``k((x, p), (x', p')) = k(x, x') B[p, p']`` with ``B = W Wᵀ + diag(κ)``:

    .. code-block:: python

        def two_outputs(X, y=None):  # X has a last column, the number of the output, 0 or 1
            W = numpyro.sample("W", dist.Normal(0.0, 1.0).expand([2, 1]).to_event(2))
            kernel = npgp.kernels.Coregion(npgp.RBF(1.0), W, kappa=np.full(2, 0.1))
            f = npgp.SparseGP("f", kernel, inducing=npgp.kernels.at_outputs(Z, [0, 1])).draw()
            with numpyro.plate("data", len(X)):
                npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y)


        X_both = npgp.kernels.at_outputs(X, [0, 1])
        both = Predictive(two_outputs, num_samples=3)(key, X_both)["y"]  # (3, 60)

    f is then ``Σ_r W_pr g_r(x) + √κ_p h_p(x)`` with independent g_r and h_p that all have the base kernel. Every row
    has its own output, so that outputs may be observed at different inputs. A sum of such kernels is the linear model
    of coregionalization, ``Coregion(RBF(1.0), W1) + Coregion(RBF(5.0), W2)``. Inducing inputs have the column too: a
    point of one output informs the others through B.

    The column holds levels: no kernel of the same expression reads it as a number, the base kernel, other summands,
    factors and other Coregions' bases included, unless its ``active_dims`` name it; and inducing inputs that are
    trained keep their levels. With several columns of levels each Coregion names its own, by ``column``::

        first, second = (Coregion(npgp.RBF(1.0), B, column=k) for k, B in enumerate((W, V)))
        both = first * second  # inputs from column 2 on

    An output's number that does not exist is an error where it can be seen, and gives NaN inside ``jit``.

    :param kernel: the base kernel of the columns without levels, npgp's or tinygp's. Its ``active_dims`` count all
        columns, as everywhere; another library's kernel, and one of your own without them, counts those without levels.
    :param W: shape (P, R), for P outputs.
    :param kappa: κ, positive, (P,) or one number for all outputs; 0 if omitted, and B then has rank R.
    :param column: the input column that holds the output's number 0, …, P − 1, as floating-point numbers.
    :raises ValueError: for W or κ of another shape, or κ known not to be positive; and for a base kernel with levels
        in the same column, where it is used.

    Source: Álvarez, Rosasco & Lawrence 2012, section 4.2; B as in Bonilla, Chai & Williams 2008 and GPflow.
    """

    matrix_fields = ("W",)

    kernel: Kernel
    W: ArrayLike
    _: KW_ONLY
    kappa: ArrayLike | None = None
    column: int = static(-1, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", as_kernel(self.kernel))
        object.__setattr__(self, "W", checks.array(self.W, "Coregion W"))
        shape = jnp.shape(self.W)
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"Coregion W has shape {shape}; it must be (P, R), a row for each of P outputs.")
        if self.kappa is not None:
            checks.positive_fields(self, "kappa")
            if jnp.ndim(self.kappa) < 2 and jnp.shape(self.kappa) not in ((), shape[-2:-1]):
                raise ValueError(f"Coregion kappa has shape {jnp.shape(self.kappa)}; it must be () or {shape[-2:-1]}.")
        checks.whole_number(self.column, "Coregion column", least=None)

    def level_columns(self, columns: int) -> frozenset[int]:
        own, inner = self._column(columns), self.kernel.level_columns(columns)
        if own in inner:
            raise ValueError(
                f"a Coregion and one within it read the same column, {own}; each must have its own, by column=…, or be "
                "a factor beside the other."
            )
        return inner | {own}

    def apart_from(self, levels: frozenset[int], columns: int) -> Kernel:
        return dataclasses.replace(self, kernel=self.kernel.apart_from(levels, columns))

    def output_covariance(self) -> jax.Array:
        """B, the covariance of the outputs at one input, in units of the base kernel's variance; (P, P)."""
        loadings = self._loadings(jnp.result_type(float))
        return linalg.gram(loadings)

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        check_columns(X, X2)
        outputs = self._outputs(X)
        outputs2 = outputs if X2 is None else self._outputs(X2)
        loadings = self._loadings(jnp.result_type(X))
        # Of the rows' own loadings: a gradient with respect to B[p, p'] would scatter N × M values.
        return self._base(X.shape[-1])(X, X2) * linalg.matmul(_take(loadings, outputs), _take(loadings, outputs2).T)

    def diag(self, X: jax.Array) -> jax.Array:
        B = jnp.sum(jnp.square(self._loadings(jnp.result_type(X))), -1)
        return self._base(X.shape[-1]).diag(X) * _take(B, self._outputs(X))

    @property
    def differentiable(self) -> bool:
        return self.kernel.differentiable

    def random_features(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(_features, self, self._base(columns).random_features(rng_key, columns, count))

    def feature_draws(self, rng_key: jax.Array, columns: int, count: int) -> FeatureMap:
        return Partial(_features, self, self._base(columns).feature_draws(rng_key, columns, count))

    def _base(self, columns: int) -> Kernel:
        return self.kernel.apart_from(self.level_columns(columns), columns)

    def _loadings(self, dtype: DTypeLike) -> jax.Array:
        """A root of B: (P, R), or (P, R + P)."""
        W = jnp.asarray(self.W, dtype)
        if W.ndim != 2:
            raise ValueError(
                f"Coregion W has shape {W.shape}; it must be (P, R) or, for functions drawn in a plate of Q members at "
                "dim=-2, (Q, 1, P, R)."
            )
        if self.kappa is None:
            return W
        own = jnp.sqrt(jnp.asarray(self.kappa, dtype)) * jnp.eye(W.shape[0], dtype=dtype)
        return jnp.concatenate([W, own], axis=-1)

    def _column(self, columns: int) -> int:
        if columns < 2 or not -columns <= self.column < columns:
            raise ValueError(
                f"Coregion reads the output's number from column {self.column} of inputs that have {columns} columns; "
                "they need this one and at least one more."
            )
        return self.column % columns

    def _outputs(self, X: ArrayLike) -> jax.Array:
        """The rows' outputs: P for one that does not exist."""
        column, count = self._column(jnp.shape(X)[-1]), jnp.shape(self.W)[0]
        if checks.is_traced(X):
            see_later(partial(_check_outputs, count=count), jnp.asarray(X)[:, column])
        else:
            _check_outputs(np.asarray(X)[:, column], count)
        numbers = jnp.asarray(X)[:, column]
        outputs = jnp.round(numbers).astype(int)
        known = (outputs == numbers) & (outputs >= 0) & (outputs < count)
        return jnp.where(known, outputs, count)


def at_outputs(X: ArrayLike, outputs: Sequence[int]) -> jax.Array:
    """
    Inputs of several outputs: the rows X with an output's number as a last column, for each output in turn.

    For outputs that are observed at different inputs, join ``at_outputs(X0, [0])``, ``at_outputs(X1, [1])``, ….

    .. code-block:: python

        # Each row once for each output, whose number is the last column.
        rows = npgp.kernels.at_outputs(X, [0, 1])
        assert rows.shape == (60, 2)

    :param X: inputs (N, D).
    :param outputs: numbers of outputs, K of them.
    :return: (K · N, D + 1).
    :raises ValueError: if there are no outputs, or their numbers are no whole numbers of at least 0.
    """
    X = checks.inputs(X)
    numbers = np.asarray(outputs)
    if numbers.ndim != 1 or not numbers.size or numbers.dtype.kind not in "iu" or np.any(numbers < 0):
        raise ValueError(f"outputs is {outputs!r}; it must be a list of output numbers, such as [0, 1].")
    column = jnp.repeat(jnp.asarray(numbers, X.dtype), X.shape[0])
    return jnp.concatenate([jnp.tile(X, (numbers.size, 1)), column[:, None]], axis=-1)


def _check_outputs(numbers: ArrayLike, count: int) -> None:
    numbers = np.asarray(numbers)
    wrong = numbers[~((numbers >= 0) & (numbers < count) & (numbers == np.floor(numbers)))]
    if wrong.size:
        raise ValueError(
            f"Coregion has {count} outputs, but the inputs' output column has the value {wrong[0]:g}; it must hold "
            f"whole numbers from 0 to {count - 1}."
        )


def _take(values: jax.Array, outputs: jax.Array) -> jax.Array:
    # An index out of range would be clipped, and be another output's.
    return values.at[outputs].get(mode="fill", fill_value=jnp.nan)


def _features(kernel: Coregion, base: FeatureMap, X: jax.Array) -> jax.Array:
    """Products of the base kernel's features with the loadings; (N, F · R), or of groups (N, count, F · R)."""
    outputs = kernel._outputs(X)
    features = base(X)
    loadings = _take(kernel._loadings(features.dtype), outputs)
    loadings = loadings.reshape(len(outputs), *[1] * (features.ndim - 1), -1)
    product = features[..., :, None] * loadings
    return product.reshape(*features.shape[:-1], -1)
