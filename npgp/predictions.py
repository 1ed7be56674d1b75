"""Posteriors of functions at any inputs: what follows from their moments and covariance, and mixtures of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from npgp import checks
from npgp.chunks import map_chunks
from npgp.functionals.rows import Functionals, RowsLike
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.programs.compiled import QUICK, STEPS, on_grid, one_program


class FunctionPosterior:
    """
    The posterior of a function f, or of a batch of functions, at any inputs: Gaussian, or a mixture of Gaussians.

    A subclass is a pytree (:func:`npgp.pytree`) with a :attr:`batch_shape`, and says what the two abstract methods are:
    ``_moments``, of rows one by one, and ``_covariance``, of rows together. They take rows as ``_rows`` makes them of
    inputs: a pytree of arrays whose first axis is that of rows, which can be padded and cut into chunks.
    """

    #: Axes of rows in a covariance.
    _row_axes: tuple[int, ...] = (-2, -1)
    #: Compiler options of programs for given rows, most of whose time is in a few large factorizations.
    _options: dict[str, Any] = QUICK

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of functions."""
        raise NotImplementedError

    def _rows(self, X: RowsLike, neighbors: ArrayLike | None, batch_shape: tuple[int, ...]) -> Any:
        """
        Rows, from inputs that are checked here.

        :param batch_shape: of the functions, which may have inputs each.
        """
        if neighbors is not None:
            raise TypeError("neighbors is for the posterior of a VNNGP; this one has none.")
        if isinstance(X, Functionals):
            raise TypeError(f"X has functionals; {type(self).__name__} has predictions at inputs (N, D) alone.")
        X = checks.inputs_of("the posterior", X, batch_shape)
        return X if X.ndim == 2 else jnp.moveaxis(X, -2, 0)  # to move nothing would be a program, too

    def _moments(self, rows: Any) -> tuple[jax.Array, jax.Array]:
        """Mean and variance, each batch + (N,)."""
        raise NotImplementedError

    def _mean(self, rows: Any) -> jax.Array:
        """The mean alone, for those that have it for less."""
        return self._moments(rows)[0]

    def _covariance(self, rows: Any) -> jax.Array:
        """Joint covariance, batch + (N, N)."""
        raise NotImplementedError(f"{type(self).__name__} has no joint covariance of rows.")

    def _coupled(self, rows: Any) -> jax.Array | None:
        """Of functions that are dependent under q, a root of their covariance (Q, K, N); ``None`` if they are not."""
        return None

    def _sample(self, rng_key: jax.Array, rows: Any, sample_shape: tuple[int, ...]) -> jax.Array:
        """Joint draws, sample_shape + batch + (N,)."""
        raise NotImplementedError(f"{type(self).__name__} has no joint draws of rows.")

    def _log_density(self, rows: Any, y: jax.Array, likelihood: Any) -> jax.Array:
        """Log predictive density of each observation."""
        return as_likelihood(likelihood).log_marginal(y, *self._moments(rows))

    def _outer(self, values: jax.Array) -> jax.Array:
        """Products of values at pairs of rows, of the covariance's shape."""
        return values[..., :, None] * values[..., None, :]

    def _at(self, method: str, X: RowsLike, neighbors: ArrayLike | None = None, axes: tuple[int, ...] = (-1,)) -> Any:
        """A method of rows, at inputs X, as a compiled program for about so many rows."""
        return on_grid(_method(method), self, self._rows(X, neighbors, self.batch_shape), axes=axes)

    def mean(self, X: RowsLike, *, neighbors: ArrayLike | None = None) -> jax.Array:
        """Posterior mean of f, batch + (N,). Arguments as for :meth:`mean_and_variance`."""
        return self._at("_mean", X, neighbors)

    def variance(self, X: RowsLike, batch_size: int | None = None, *, neighbors: ArrayLike | None = None) -> jax.Array:
        """Posterior variance of f, batch + (N,). Arguments as for :meth:`mean_and_variance`."""
        return self.mean_and_variance(X, batch_size, neighbors=neighbors)[1]

    def mean_and_variance(
        self, X: RowsLike, batch_size: int | None = None, *, neighbors: ArrayLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """
        Posterior mean and variance of f; of a mixture the average mean, and the average variance plus the variance of
        the means (law of total variance).

        :param X: inputs (N, D); of functions drawn in a plate also inputs of each, batch + (N, D). Or, in most
            posteriors, functionals (:class:`npgp.functionals.Functionals`).
        :param batch_size: most rows that are computed at a time, so that memory does not grow with N·M; by default as
            many as are fast.
        :param neighbors: of a :class:`npgp.VNNGP` or :class:`npgp.neighbors.NNGP`: numbers of the rows' nearest points
            with values, (N, k), if they have been found before.
        :return: each batch + (N,).
        """
        if batch_size is None:
            return self._at("_moments", X, neighbors)
        size, rows = checks.whole_number(batch_size, "batch_size"), self._rows(X, neighbors, self.batch_shape)
        return one_program(lambda: map_chunks(self._moments, size, rows, axis=-1), options=self._options)

    def log_density(
        self,
        X: RowsLike,
        y: ArrayLike,
        likelihood: Likelihood | Callable[..., Any],
        *,
        neighbors: ArrayLike | None = None,
    ) -> jax.Array:
        """
        Log predictive density of observations, row by row: ``log ∫ p(y_n | f_n) N(f_n; mean, variance) df_n``; of a
        mixture the logarithm of its average. It is of observations of f alone: other components, levels and effects
        that a model adds to f are not in it.

        :param X: inputs, as for :meth:`mean_and_variance`.
        :param y: observations, (N,), or batch + (N,) for a likelihood of one latent value.
        :param likelihood: p(y_n | f_n), an ``npgp`` likelihood or a function from f to a NumPyro distribution. Of an
            average over draws of other sites (:class:`npgp.variational.PosteriorMixture`) an ``npgp`` likelihood, or a
            function that makes one of a draw's ``sites``.
        :param neighbors: as for :meth:`mean_and_variance`.
        :return: of y's shape.
        :raises TypeError: for a likelihood of another type.
        :raises ValueError: for observations of another number of rows, or with NaN.
        """
        rows = self._rows(X, neighbors, self.batch_shape)
        y = checks.observations(y, jnp.shape(X)[-2])
        return one_program(lambda: self._log_density(rows, y, likelihood), options=STEPS)

    def covariance(self, X: RowsLike, *, neighbors: ArrayLike | None = None) -> jax.Array:
        """
        Joint posterior covariance of f, batch + (N, N); of outputs that mix functions (P, N, P, N), whose entry
        [p, n, r, m] is ``Cov[h_p(x_n), h_r(x_m)]``. Arguments as for :meth:`mean_and_variance`.

        :raises NotImplementedError: for a posterior that has none.
        """
        return self._at("_covariance", X, neighbors, axes=self._row_axes)

    def sample(
        self,
        rng_key: jax.Array,
        X: RowsLike,
        sample_shape: tuple[int, ...] = (),
        *,
        neighbors: ArrayLike | None = None,
    ) -> jax.Array:
        """
        Joint draws of f at inputs, in most posteriors with O(N³) work.

        :param rng_key: a JAX random key.
        :param X: inputs, as for :meth:`mean_and_variance`.
        :param sample_shape: of the draws.
        :param neighbors: as for :meth:`mean_and_variance`.
        :return: sample_shape + batch + (N,).
        :raises NotImplementedError: for a posterior that has none.
        """
        rows = self._rows(X, neighbors, self.batch_shape)
        checks.random_key(rng_key)
        return one_program(lambda: self._sample(rng_key, rows, sample_shape), options=self._options)


class Mixture(FunctionPosterior):
    """A mixture of Gaussians in equal parts; a subclass says what its components are at rows, in ``_components``."""

    _options = STEPS  # a loop over components

    def _components(self, rows: Any) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of each component, (S,) + batch + (N,)."""
        raise NotImplementedError

    def components(self, X: RowsLike, *, neighbors: ArrayLike | None = None) -> tuple[jax.Array, jax.Array]:
        """
        Mean and variance of f under each of the S components. Arguments as for :meth:`mean_and_variance`.

        :return: each (S,) + batch + (N,).
        """
        return self._at("_components", X, neighbors)

    def _moments(self, rows: Any) -> tuple[jax.Array, jax.Array]:
        return mixture_moments(*self._components(rows))

    def _log_density(self, rows: Any, y: jax.Array, likelihood: Any) -> jax.Array:
        likelihood = as_likelihood(likelihood)
        terms = lax.map(lambda moments: likelihood.log_marginal(y, *moments), self._components(rows))
        return log_average(terms)


def mixture_moments(
    means: jax.Array, variances: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """
    Mean and variance of a mixture, by the law of total variance.

    :param means: of the components, (S, ...).
    :param variances: of the components, (S, ...).
    :param weights: of the components, which sum to 1 over the first axis and broadcast; equal if omitted.
    :return: each (...).
    """

    def average(values: jax.Array) -> jax.Array:
        return jnp.mean(values, axis=0) if weights is None else jnp.sum(weights * values, axis=0)

    mean = average(means)
    return mean, average(variances) + average(jnp.square(means - mean))


def log_average(terms: jax.Array) -> jax.Array:
    """The logarithm of the average density over the first axis, from logarithms of densities."""
    return logsumexp(terms, axis=0) - math.log(terms.shape[0])


@cache
def _method(name: str) -> Callable[[FunctionPosterior, Any], Any]:
    """A method of rows as a function, the same object in all calls, as ``on_grid`` wants it."""
    return lambda posterior, rows: getattr(posterior, name)(rows)
