"""Observations of rows: values, a mask, an offset and weights, checked and filled once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from npgp import checks
from npgp.conditionals import Conditional
from npgp.conditionals.base import row_elbo
from npgp.likelihoods import Likelihood
from npgp.likelihoods.base import without_missing
from npgp.programs.compiled import one_program
from npgp.pytrees import pytree
from npgp.sparse.residuals import Residual


@pytree
class Observations:
    """
    Observed values of rows, and how they come from f. :meth:`of` checks them, and fills in what is missing.

    :param y: observations, (..., N).
    :param likelihood: p(y_n | f_n); with C latent values, of C functions.
    :param offset: what is added to f; broadcasts to (..., N), or (C, ..., N).
    :param present: where there is an observation, (..., N); ``None`` for everywhere.
    :param weights: how often each row counts, (N,); ``None`` for once.
    """

    y: jax.Array
    likelihood: Likelihood
    offset: Any = 0.0
    present: jax.Array | None = None
    weights: jax.Array | None = None

    @classmethod
    def of(
        cls,
        y: ArrayLike,
        likelihood: Likelihood,
        shape: tuple[Any, ...],
        *,
        mask: ArrayLike | str | None = None,
        offset: ArrayLike = 0.0,
        weights: jax.Array | None = None,
        dtype: DTypeLike | None = None,
        broadcast: bool = False,
    ) -> Observations:
        """
        Check observations where their values can be seen, and put a possible value where there is none.

        :param y: observations.
        :param shape: of y; ``...`` in front stands for any further axes.
        :param mask: True where an observation is present, of y's shape; or ``"nan"``: those that are NaN are missing.
        :param broadcast: accept a mask that broadcasts to y's shape.
        :param dtype: of y and all else; its own if omitted.
        :raises ValueError: for arrays of another shape, NaN without a mask, and values that are not possible for the
            likelihood.
        """
        y, present = checks.observed(y, shape, mask, broadcast=broadcast)
        count = (likelihood.num_latents,) if likelihood.num_latents > 1 else ()
        checks.require_broadcast(offset, (*count, *y.shape), "offset")
        checks.require_finite(offset, "offset")
        require_possible(likelihood, y, present)
        y = checks.to_device(y, "y", dtype, axis=-1)
        if present is not None:
            present = jnp.asarray(present)
            (y,) = one_program(partial(without_missing, likelihood, present, y))
        if dtype is not None and not isinstance(offset, jax.Array):  # converted here, not by a program of its own
            offset = jax.device_put(np.asarray(offset, jax.dtypes.canonicalize_dtype(dtype)))
        return cls(y, likelihood, jnp.asarray(offset, dtype), present, weights)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the latent values."""
        count = self.likelihood.num_latents
        return self.y.shape if count == 1 else (count, *self.y.shape)

    def elbo(
        self,
        conditional: Conditional,
        mean: jax.Array,
        variance: jax.Array,
        residual: jax.Array | Residual,
        parameter: ArrayLike | None = None,
    ) -> jax.Array:
        """
        Each row's share of the ELBO but for the KL divergence, (..., N), 0 where there is no observation.

        :param conditional: what q does to the residual.
        :param mean: mean of f without the offset, of :attr:`shape`.
        :param variance: the variance that ε gives.
        :param residual: the residual's prior, or d_n row by row.
        :param parameter: of the conditional, if it has one.
        """
        terms = row_elbo(
            conditional, self.likelihood, self.y, mean + self.offset, variance, residual, parameter, self.present
        )
        return terms if self.weights is None else self.weights * terms

    def filled(self, mean: jax.Array, variance: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """y, and moments of f with the offset: harmless values where there is no observation, in gradients too."""
        y, mean, variance = without_missing(self.likelihood, self.present, self.y, mean + self.offset, variance)
        return y, mean, variance

    def where_present(self, values: jax.Array) -> jax.Array:
        """Values of rows, and 0 where there is no observation."""
        return values if self.present is None else jnp.where(self.present, values, 0.0)

    def log_marginal(self, mean: jax.Array, variance: jax.Array) -> jax.Array:
        """``log ∫ p(y_n | f_n) N(f_n; mean, variance) df_n``, (..., N), 0 where there is no observation."""
        return self.where_present(self.likelihood.log_marginal(*self.filled(mean, variance)))


def require_possible(likelihood: Likelihood, y: Any, present: Any) -> None:
    """Raise ``ValueError`` for an observation that the likelihood cannot have, where that can be seen."""
    if present is None:
        likelihood.check(y)
    elif not checks.is_traced(y) and not checks.is_traced(present):
        likelihood.check(np.where(present, y, np.nan))
