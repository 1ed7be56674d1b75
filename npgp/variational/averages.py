"""
What a posterior says of f when hyperparameters are uncertain too: the average over draws of them, a mixture of
posteriors that each are given one draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from npgp import checks
from npgp.chunks import map_chunks
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.neighbors.posterior import NeighborPosterior, with_neighbors
from npgp.programs.compiled import STEPS, one_program
from npgp.programs.grids import on_grid
from npgp.pytrees import pytree
from npgp.variational.mixtures import MixedPosterior
from npgp.variational.paths import Paths

__all__ = ["PathMixture", "PosteriorMixture"]


@pytree
@dataclass(frozen=True)
class PosteriorMixture:
    """
    The posterior of f averaged over draws of all other latent sites, hyperparameters among them: a mixture, in equal
    parts, of the posteriors given each draw. Made by :func:`npgp.posterior`::

        f = npgp.posterior("f", model, guide, params, X, y, draws=50)
        mean, variance = f.mean_and_variance(X_new)
        f.sites["lengthscale"]                                  the draws, (50,)

    ``f[i]`` is the posterior given draw i, and ``len(f)`` their number. Work is that of one posterior for each draw,
    done one after the other: what is kept are the Cholesky factors, M² numbers a draw and block.

    :param posterior: those of all draws in one: arrays that differ between them have a leading axis.
    :param sites: values of the other latent sites by name, draws first. A noise variance among them belongs to f's
        values in the same draw.
    :param size: number of draws.
    :param varies: which of the posterior's arrays differ.
    """

    posterior: Any
    sites: dict[str, jax.Array]
    size: int = field(metadata={"static": True})
    varies: tuple[bool, ...] = field(metadata={"static": True})

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, draw: int) -> Any:
        draw = range(self.size)[draw]  # an IndexError beyond the last, which ends a loop over all
        return self._given(draw)

    def _given(self, draw: Any) -> Any:
        """The posterior given one draw, whose number may be traced."""
        leaves, structure = jax.tree.flatten(self.posterior)
        return jax.tree.unflatten(structure, [x[draw] if v else x for x, v in zip(leaves, self.varies, strict=True)])

    def _each(self, function: Callable[..., Any], draws: jax.Array | None = None, *more: Any) -> Any:
        """
        A function of the posterior given each draw, one after the other: results with draws first.

        :param function: of a posterior, and of what more is given.
        :param draws: their numbers; those that differ if omitted.
        :param more: pytrees of arrays with draws first.
        """
        draws = self._different if draws is None else draws
        return lax.map(lambda x: function(self._given(x[0]), *x[1:]), (draws, *more))

    @property
    def _different(self) -> jax.Array:
        """Numbers of the draws; one stands for all if the posterior does not depend on the other sites."""
        return jnp.arange(self.size if any(self.varies) else 1)

    def mixed(self, W: ArrayLike) -> PosteriorMixture:
        """
        The posterior of outputs that mix a batch of functions, ``h = W g``, averaged over draws like this one::

            g = npgp.posterior("g", model, mcmc.get_samples(), {}, X, Y)
            mean, variance = g.mixed(g.sites["W"]).mean_and_variance(X_new)  # each (P, N)

        Its :meth:`covariance` is joint over outputs and rows, (P, N, P, N), and :meth:`output_covariance` that between
        outputs at each row.

        :param W: the mixing matrix, (P, Q); or one for each draw, (draws, P, Q), as ``sites`` has it where W is a site.
        :raises TypeError: for a posterior of a :class:`npgp.VNNGP`.
        :raises ValueError: for a matrix without a column for each function, or of another number of draws.
        """
        if self._of_neighbors:
            raise TypeError("mixed is for functions of a SparseGP drawn in a plate; this one is of a VNNGP.")
        checks.require_finite(W, "W")
        W = jnp.asarray(W)
        of_each = W.ndim == 3
        if of_each and len(W) != self.size:
            raise ValueError(f"W has shape {W.shape}; it must be (P, Q) or, one for each draw, ({self.size}, P, Q).")
        one = MixedPosterior((self._given(0),), W[0] if of_each else W)
        leaves = [*jax.tree.leaves(self.posterior), W]
        mixed = jax.tree.unflatten(jax.tree.structure(one), leaves)
        return PosteriorMixture(mixed, self.sites, self.size, (*self.varies, of_each))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of outputs."""
        if self._is_mixed:
            return self.posterior.W.shape[-2:-1]
        return jax.eval_shape(lambda: jnp.zeros(self._given(0).batch_shape)).shape

    def mean(self, X: ArrayLike, *, neighbors: ArrayLike | None = None) -> jax.Array:
        """Posterior mean of f at inputs X (N, D): batch + (N,). Arguments as :meth:`mean_and_variance`."""
        return self._at(PosteriorMixture._mean, X, neighbors)

    def variance(self, X: ArrayLike, batch_size: int | None = None, *, neighbors: ArrayLike | None = None) -> jax.Array:
        """Posterior variance of f at inputs X (N, D): batch + (N,). Arguments as :meth:`mean_and_variance`."""
        return self.mean_and_variance(X, batch_size, neighbors=neighbors)[1]

    def mean_and_variance(
        self, X: ArrayLike, batch_size: int | None = None, *, neighbors: ArrayLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """
        Posterior mean and variance of f: the draws' average mean; and their average variance plus the variance of their
        means (law of total variance).

        :param X: inputs (N, D).
        :param batch_size: rows taken at a time, so that memory does not grow with N·M; by default as many
            as are fast.
        :param neighbors: of a :class:`npgp.VNNGP`, whose rows are taken at once: numbers of the rows' nearest inducing
            points, (N, k), if they have been found before.
        :return: each batch + (N,).
        """
        if batch_size is not None and not self._of_neighbors:
            X, size = checks.inputs(X), checks.whole_number(batch_size, "batch_size")
            return one_program(lambda: map_chunks(self._moments, size, X, axis=-1), options=STEPS)
        return self._at(PosteriorMixture._moments, X, neighbors)

    def log_density(
        self, X: ArrayLike, y: ArrayLike, likelihood: Likelihood | Callable[..., Any], *, neighbors=None
    ) -> jax.Array:
        """
        Log predictive density of observations, row by row: the logarithm of the average over draws of
        ``∫ p(y_n | f_n) N(f_n; mean, variance) df_n``::

            f.log_density(X, y, lambda sites: npgp.Gaussian(scale=sites["noise"]))

        It is of observations of f alone: other components, levels and effects that a model adds to f are not in it.

        :param X: inputs (N, D).
        :param y: observations, (N,), or batch + (N,) for a likelihood of one latent value.
        :param likelihood: p(y_n | f_n), an ``npgp`` likelihood; or a function that makes it of a draw's ``sites``.
        :param neighbors: as in :meth:`mean_and_variance`.
        :return: of y's shape.
        :raises TypeError: for a function that makes something else.
        :raises ValueError: for observations of another number of rows, or with NaN.
        """
        rows = self._rows(X, neighbors)
        y = checks.observed(y, jnp.shape(X)[0])
        maker = likelihood if callable(likelihood) and not isinstance(likelihood, Likelihood) else None
        draws = jnp.arange(self.size) if maker else self._different

        def density():
            def of_draw(p, sites):
                given = maker(sites) if maker else as_likelihood(likelihood)
                if not isinstance(given, Likelihood):
                    raise TypeError(
                        f"likelihood gives {type(given).__name__} for a draw's sites; in an average over draws it must "
                        "be a Likelihood, or a function that makes one of a draw's sites, as in lambda sites: "
                        'npgp.Gaussian(scale=sites["noise"]).'
                    )
                return given.log_marginal(y, *p.mean_and_variance(*_arguments(rows)))

            sites = jax.tree.map(lambda values: values[: draws.size], self.sites)
            return logsumexp(self._each(of_draw, draws, sites), axis=0) - math.log(draws.size)

        return one_program(density, options=STEPS)

    def covariance(self, X: ArrayLike, *, neighbors: ArrayLike | None = None) -> jax.Array:
        """
        Joint posterior covariance of f at inputs X (N, D), by the law of total covariance: batch + (N, N); of
        :meth:`mixed` outputs (P, N, P, N).
        """
        axes = (-3, -1) if self._is_mixed else (-2, -1)
        return self._at(PosteriorMixture._covariance, X, neighbors, axes=axes)

    def output_covariance(self, X: ArrayLike) -> jax.Array:
        """Posterior covariance between :meth:`mixed` outputs at each row of inputs X (N, D): (N, P, P)."""
        if not self._is_mixed:
            raise TypeError("output_covariance is of outputs that mix functions: f.mixed(W).output_covariance(X).")
        return self._at(PosteriorMixture._output_covariance, X, None, axes=(0,))

    def derivative(self, X: ArrayLike, dim: int = 0) -> tuple[jax.Array, jax.Array]:
        """Posterior mean and variance of the slope ``∂f/∂x_dim``: :meth:`npgp.variational.Posterior.derivative`."""
        X = checks.inputs(X)
        return one_program(lambda: _total(*self._each(lambda p: p.derivative(X, dim))), options=STEPS)

    def sample(
        self,
        rng_key: jax.Array,
        X: ArrayLike,
        sample_shape: tuple[int, ...] = (),
        *,
        neighbors: ArrayLike | None = None,
    ) -> jax.Array:
        """
        Joint draws of f at inputs X (N, D), at O(N³) for each draw of the other sites. Each of these, in random order,
        serves as many draws of f as the others, or one more.

        :return: sample_shape + batch + (N,).
        """
        rows, more = self._rows(X, neighbors), {}
        if self._of_neighbors:
            rows, more["neighbors"] = rows

        def compute():
            count = math.prod(sample_shape)
            draws, keys, each = self._spread(rng_key, count)
            drawn = self._each(lambda p, key: p.sample(key, rows, (each,), **more), draws, keys)
            return _in_turn(drawn, count).reshape(*sample_shape, *drawn.shape[2:])

        return one_program(compute, options=STEPS)

    def draw_functions(self, rng_key: jax.Array, num_draws: int = 1, num_features: int = 1024) -> PathMixture:
        """
        Draw whole functions, each from the posterior given one of the draws of the other sites, as :meth:`sample` does;
        arguments and restrictions as for :meth:`npgp.variational.Posterior.draw_functions`.
        """
        checks.whole_number(num_draws, "num_draws")

        def compute():
            draws, keys, each = self._spread(rng_key, num_draws)
            return self._each(lambda p, key: p.draw_functions(key, each, num_features), draws, keys)

        return PathMixture(one_program(compute, options=STEPS), num_draws)

    def _spread(self, rng_key: jax.Array, count: int) -> tuple[jax.Array, jax.Array, int]:
        """Draws of the other sites for so many of f: their numbers, random keys, and how many of f each serves."""
        order_key, key = jax.random.split(rng_key)
        used = max(min(count, self.size), 1)
        return jax.random.permutation(order_key, self.size)[:used], jax.random.split(key, used), -(-count // used)

    @property
    def _of_neighbors(self) -> bool:
        return isinstance(self.posterior, NeighborPosterior)

    @property
    def _is_mixed(self) -> bool:
        return isinstance(self.posterior, MixedPosterior)

    def _rows(self, X: ArrayLike, neighbors: ArrayLike | None) -> Any:
        """Rows as the methods below take them: inputs, or a pair of inputs and neighbors."""
        if not self._of_neighbors:
            if neighbors is not None:
                raise TypeError("neighbors is for the posterior of a VNNGP; this one has none.")
            return checks.inputs(X)
        rows = with_neighbors(X, neighbors, self.posterior.inducing, self.posterior.neighbors)
        return rows.X, rows.neighbors

    def _at(self, function: Callable[..., Any], X: ArrayLike, neighbors: ArrayLike | None, axes=(-1,)) -> Any:
        rows = self._rows(X, neighbors)
        if self._of_neighbors:  # found outside programs
            return one_program(lambda: function(self, rows), options=STEPS)
        return on_grid(function, self, rows, axes=axes)

    # Of rows, as ``on_grid`` and ``map_chunks`` want them.

    def _mean(self, rows: Any) -> jax.Array:
        return jnp.mean(self._each(lambda p: p.mean(*_arguments(rows))), axis=0)

    def _moments(self, rows: Any) -> tuple[jax.Array, jax.Array]:
        return _total(*self._each(lambda p: p.mean_and_variance(*_arguments(rows))))

    def _covariance(self, rows: Any) -> jax.Array:
        mean = self._mean(rows)

        def add(total, draw):
            p = self._given(draw)
            away = p.mean(*_arguments(rows)) - mean
            if self._is_mixed:
                return total + p.covariance(*_arguments(rows)) + away[:, :, None, None] * away, None
            return total + p.covariance(*_arguments(rows)) + away[..., :, None] * away[..., None, :], None

        draws, shape = self._different, mean.shape if self._is_mixed else mean.shape[-1:]
        total, _ = lax.scan(add, jnp.zeros((*mean.shape, *shape), mean.dtype), draws)
        return total / draws.size

    def _output_covariance(self, rows: Any) -> jax.Array:
        means, covariances = self._each(lambda p: (p.mean(rows).T, p.output_covariance(rows)))  # of rows and outputs
        away = means - jnp.mean(means, axis=0)
        return jnp.mean(covariances + away[..., :, None] * away[..., None, :], axis=0)


@pytree
@dataclass(frozen=True)
class PathMixture:
    """
    Functions drawn from a mixture of posteriors; made by :meth:`PosteriorMixture.draw_functions`.

    :param paths: those of all draws of the other sites, each array with a leading axis.
    :param num_draws: the number of functions.
    """

    paths: Paths
    num_draws: int = field(metadata={"static": True})

    def __call__(self, X: ArrayLike) -> jax.Array:
        """The functions' values at inputs X (N, D): (draws,) + batch + (N,)."""
        X = checks.inputs(X)
        return one_program(lambda: _in_turn(lax.map(lambda paths: paths(X), self.paths), self.num_draws), options=STEPS)


def _arguments(rows: Any) -> tuple[Any, ...]:
    return rows if isinstance(rows, tuple) else (rows,)


def _total(means: jax.Array, variances: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of a mixture, from those of its parts along the first axis."""
    return jnp.mean(means, axis=0), jnp.mean(variances, axis=0) + jnp.var(means, axis=0)


def _in_turn(drawn: jax.Array, count: int) -> jax.Array:
    """(parts, draws of each, …) as (count, …), the parts by turns."""
    return jnp.swapaxes(drawn, 0, 1).reshape(-1, *drawn.shape[2:])[:count]
