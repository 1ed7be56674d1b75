"""
Posteriors made of others: mixtures of independent functions, ``h_p(x) = Σ_q W_pq g_q(x)`` (the linear model of
coregionalization), with the covariance between outputs; and, where hyperparameters are uncertain too, the average over
draws of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.functionals.rows import RowsLike, as_rows, derivative
from npgp.likelihoods import Likelihood
from npgp.predictions import FunctionPosterior, Mixture, log_average
from npgp.programs.compiled import STEPS, one_program
from npgp.pytrees import pytree
from npgp.variational.paths import Paths


@pytree
class MixedPosterior(FunctionPosterior):
    """
    The posterior of ``h = W g``: P outputs that mix Q functions.

    :meth:`npgp.variational.Posterior.mixed` makes one of functions drawn in a plate, which may have
    a kernel each. For functions of several components, give their posteriors in the order of W's columns::

        # W: (P, 2), or more columns for batches.
        h = npgp.variational.MixedPosterior((smooth, rough), W)

    Where W, or hyperparameters, are sampled, the average over draws mixes them: ``f.mixed(f.sites["W"])``
    (:meth:`npgp.variational.PosteriorMixture.mixed`).

    :param posteriors: of the functions; each of one function or a batch of them.
    :param W: the mixing matrix, (P, Q), for Q functions in all.
    :raises TypeError: for an average over draws (:class:`PosteriorMixture`).
    :raises ValueError: if W does not fit the functions, or a batch of them has more than one dimension.

    Source: Álvarez, Rosasco & Lawrence 2012, section 4.2.
    """

    posteriors: tuple[Any, ...]  # FunctionPosterior
    W: Any  # stored as an array

    def __post_init__(self):
        posteriors = tuple(self.posteriors)
        object.__setattr__(self, "posteriors", posteriors)
        if any(hasattr(posterior, "sites") for posterior in posteriors):
            raise TypeError(
                "posteriors has an average over draws, whose functions depend on one another through these: use its "
                "own mixed(W)."
            )
        shapes = [posterior.batch_shape for posterior in posteriors]
        if not shapes or any(len(shape) > 1 for shape in shapes):
            raise ValueError(f"posteriors have batches of shape {shapes}; each must be one function, or (Q,) of them.")
        functions = sum(shape[0] if shape else 1 for shape in shapes)
        if jnp.ndim(self.W) != 2 or jnp.shape(self.W)[1] != functions:
            raise ValueError(
                f"W has shape {jnp.shape(self.W)}; it must be (P, {functions}), a column for each function."
            )
        checks.require_finite(self.W, "W")
        object.__setattr__(self, "W", jnp.asarray(self.W))

    _row_axes = (-3, -1)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of outputs, (P,)."""
        return jnp.shape(self.W)[-2:-1]

    def _rows(self, X: RowsLike, neighbors: ArrayLike | None, batch_shape: tuple[int, ...]) -> tuple[Any, ...]:
        X = as_rows(X)
        return tuple(posterior._rows(X, neighbors, ()) for posterior in self.posteriors)

    def _moments(self, rows: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        mean, variance, roots = self._function_moments(rows)
        apart = linalg.matmul(jnp.square(self.W), variance)
        return linalg.matmul(self.W, mean), sum((jnp.sum(jnp.square(root), axis=-2) for root in roots), apart)

    def _mean(self, rows: tuple[Any, ...]) -> jax.Array:
        return linalg.matmul(self.W, _stacked([p._mean(r) for p, r in zip(self.posteriors, rows, strict=True)]))

    def _function_moments(self, rows: tuple[Any, ...]) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """
        Mean of the functions, (Q, N); the variances that they have by themselves, (Q, N); and roots of the outputs'
        covariances by what functions that are drawn together have in common, (P, K, N).
        """
        means, variances = zip(*(p._moments(r) for p, r in zip(self.posteriors, rows, strict=True)), strict=True)
        functions = self._coupled_functions(rows)
        own = [v - jnp.sum(jnp.square(functions[i]), -2) if i in functions else v for i, v in enumerate(variances)]
        return _stacked(means), _stacked(own), self._mixed_roots(functions)

    def _coupled_functions(self, rows: tuple[Any, ...]) -> dict[int, jax.Array]:
        """Of posteriors whose functions are drawn together, the roots (Q, K, N) of their covariances."""
        roots = {i: p._coupled(r) for i, (p, r) in enumerate(zip(self.posteriors, rows, strict=True))}
        return {i: root for i, root in roots.items() if root is not None}

    def _mixed_roots(self, functions: dict[int, jax.Array]) -> list[jax.Array]:
        """Of the outputs, (P, K, N)."""
        sizes = [posterior.batch_shape[0] if posterior.batch_shape else 1 for posterior in self.posteriors]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        columns = {i: self.W[:, starts[i] : starts[i] + sizes[i]] for i in functions}
        return [jnp.einsum("pq,qkn->pkn", columns[i], root) for i, root in functions.items()]

    def output_covariance(self, X: ArrayLike) -> jax.Array:
        """Posterior covariance between outputs at each row of inputs X (N, D): (N, P, P)."""
        return self._at("_output_covariance", X, axes=(0,))

    def _output_covariance(self, rows: tuple[Any, ...]) -> jax.Array:
        _, variance, roots = self._function_moments(rows)
        apart = linalg.matmul(self.W * variance.T[:, None, :], self.W.T)
        return sum((jnp.einsum("pkn,rkn->npr", root, root) for root in roots), apart)

    def _covariance(self, rows: tuple[Any, ...]) -> jax.Array:
        """Joint over outputs and rows, (P, N, P, N)."""
        found = [p._covariance(r) for p, r in zip(self.posteriors, rows, strict=True)]
        functions = self._coupled_functions(rows)
        for i, root in functions.items():
            found[i] = found[i] - linalg.matmul(jnp.swapaxes(root, -1, -2), root)
        roots = self._mixed_roots(functions)
        number, (outputs, count) = found[0].shape[-1], self.W.shape
        covariances = jnp.concatenate([covariance.reshape(-1, number**2) for covariance in found])  # (Q, N²)
        products = (self.W[:, None, :] * self.W).reshape(outputs**2, count)
        joint = linalg.matmul(products, covariances)
        apart = joint.reshape(outputs, outputs, number, number).transpose(0, 2, 1, 3)
        return sum((jnp.einsum("pkn,rkm->pnrm", root, root) for root in roots), apart)

    def _outer(self, values: jax.Array) -> jax.Array:
        return values[:, :, None, None] * values

    def _sample(self, rng_key: jax.Array, rows: tuple[Any, ...], sample_shape: tuple[int, ...]) -> jax.Array:
        keys = jax.random.split(rng_key, len(self.posteriors))
        draws = [p._sample(k, r, sample_shape) for p, k, r in zip(self.posteriors, keys, rows, strict=True)]
        return linalg.matmul(self.W, _stacked(draws, len(sample_shape)))

    def draw_functions(self, rng_key: jax.Array, num_draws: int = 1, num_features: int = 1024) -> MixedPaths:
        """
        Draw whole functions, joint over outputs; arguments and restrictions as for
        :meth:`npgp.variational.Posterior.draw_functions`.
        """
        keys = jax.random.split(rng_key, len(self.posteriors))
        drawn = [p.draw_functions(key, num_draws, num_features) for p, key in zip(self.posteriors, keys, strict=True)]
        return MixedPaths(tuple(drawn), self.W)


@pytree
class MixedPaths:
    """
    Draws of several outputs as functions; made by :meth:`MixedPosterior.draw_functions`.

    :param paths: of the functions that are mixed.
    :param W: the mixing matrix, (P, Q).
    """

    paths: tuple[Paths, ...]
    W: jax.Array

    def __call__(self, X: ArrayLike) -> jax.Array:
        """The outputs' values at inputs X (N, D): (draws, P, N)."""
        return linalg.matmul(self.W, _stacked([paths(X) for paths in self.paths], 1))


def _stacked(values: Sequence[jax.Array], draws: int = 0) -> jax.Array:
    """Values of functions, draws + (N,) or draws + (Q, N) each, one below the other."""
    return jnp.concatenate([v[..., None, :] if v.ndim == draws + 1 else v for v in values], axis=-2)


@pytree
class PosteriorMixture(Mixture):
    """
    The posterior of f averaged over draws of all other latent sites, hyperparameters among them: a mixture, in equal
    parts, of the posteriors given each draw. Made by :func:`npgp.posterior`::

        f = npgp.posterior("f", model, guide, params, X, y, draws=50)
        mean, variance = f.mean_and_variance(X_new)
        f.sites["lengthscale"]                                  the draws, (50,)
        f.log_density(X, y, lambda sites: npgp.Gaussian(scale=sites["noise"]))

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
        return self._at_draw(draw)

    def _at_draw(self, draw: Any) -> Any:
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
        return lax.map(lambda x: function(self._at_draw(x[0]), *x[1:]), (draws, *more))

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
        :raises ValueError: for a matrix without a column for each function, or of another number of draws.
        """
        checks.require_finite(W, "W")
        W = jnp.asarray(W)
        of_each = W.ndim == 3
        if of_each and len(W) != self.size:
            raise ValueError(f"W has shape {W.shape}; it must be (P, Q) or, one for each draw, ({self.size}, P, Q).")
        one = MixedPosterior((self._at_draw(0),), W[0] if of_each else W)
        leaves = [*jax.tree.leaves(self.posterior), W]
        mixed = jax.tree.unflatten(jax.tree.structure(one), leaves)
        return PosteriorMixture(mixed, self.sites, self.size, (*self.varies, of_each))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of functions, or of :meth:`mixed` outputs."""
        return jax.eval_shape(lambda: jnp.zeros(self._at_draw(0).batch_shape)).shape

    @property
    def _row_axes(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.posterior._row_axes

    def _outer(self, values: jax.Array) -> jax.Array:
        return self.posterior._outer(values)

    def _rows(self, X: RowsLike, neighbors: ArrayLike | None, batch_shape: tuple[int, ...]) -> Any:
        return self.posterior._rows(X, neighbors, batch_shape)

    def _log_density(self, rows: Any, y: jax.Array, likelihood: Any) -> jax.Array:
        if isinstance(likelihood, Likelihood) or not callable(likelihood):
            return super()._log_density(rows, y, likelihood)

        def of_draw(p, sites):
            made = likelihood(sites)
            if not isinstance(made, Likelihood):
                raise TypeError(
                    f"likelihood gives {type(made).__name__} for a draw's sites; in an average over draws it must be a "
                    "Likelihood, or a function that makes one of a draw's sites, as in lambda sites: "
                    'npgp.Gaussian(scale=sites["noise"]).'
                )
            return made.log_marginal(y, *p._moments(rows))

        return log_average(self._each(of_draw, jnp.arange(self.size), self.sites))

    def output_covariance(self, X: ArrayLike) -> jax.Array:
        """Posterior covariance between :meth:`mixed` outputs at each row of inputs X (N, D): (N, P, P)."""
        if not isinstance(self.posterior, MixedPosterior):
            raise TypeError("output_covariance is of outputs that mix functions: f.mixed(W).output_covariance(X).")
        return self._at("_output_covariance", X, axes=(0,))

    def derivative(self, X: ArrayLike, dim: int = 0) -> tuple[jax.Array, jax.Array]:
        """Posterior mean and variance of the slope ``∂f/∂x_dim``: :meth:`npgp.variational.Posterior.derivative`."""
        return self.mean_and_variance(derivative(X, dim))

    def _sample(self, rng_key: jax.Array, rows: Any, sample_shape: tuple[int, ...]) -> jax.Array:
        """Each draw of the other sites, in random order, serves as many draws of f as the others, or one more."""
        count = math.prod(sample_shape)
        draws, keys, each = self._allocate(rng_key, count)
        drawn = self._each(lambda p, key: p._sample(key, rows, (each,)), draws, keys)
        return _in_turn(drawn, count).reshape(*sample_shape, *drawn.shape[2:])

    def draw_functions(self, rng_key: jax.Array, num_draws: int = 1, num_features: int = 1024) -> PathMixture:
        """
        Draw whole functions, each from the posterior given one of the draws of the other sites, as :meth:`sample` does;
        arguments and restrictions as for :meth:`npgp.variational.Posterior.draw_functions`.
        """
        checks.whole_number(num_draws, "num_draws")

        def compute():
            draws, keys, each = self._allocate(rng_key, num_draws)
            return self._each(lambda p, key: p.draw_functions(key, each, num_features), draws, keys)

        return PathMixture(one_program(compute, options=STEPS), num_draws)

    def _allocate(self, rng_key: jax.Array, count: int) -> tuple[jax.Array, jax.Array, int]:
        """Draws of the other sites for so many of f: their numbers, random keys, and how many of f each serves."""
        order_key, key = jax.random.split(rng_key)
        used = max(min(count, self.size), 1)
        return jax.random.permutation(order_key, self.size)[:used], jax.random.split(key, used), -(-count // used)

    def _components(self, rows: Any) -> tuple[jax.Array, jax.Array]:
        return self._each(lambda p: p._moments(rows))

    def _mean(self, rows: Any) -> jax.Array:
        return jnp.mean(self._each(lambda p: p._mean(rows)), axis=0)

    def _covariance(self, rows: Any) -> jax.Array:
        """Joint covariance, by the law of total covariance."""
        mean = self._mean(rows)

        def add(total, draw):
            p = self._at_draw(draw)
            return total + p._covariance(rows) + p._outer(p._mean(rows) - mean), None

        draws = self._different
        total = jax.eval_shape(lambda: self._at_draw(0)._covariance(rows))
        total, _ = lax.scan(add, jnp.zeros(total.shape, total.dtype), draws)
        return total / draws.size

    def _output_covariance(self, rows: Any) -> jax.Array:
        means, covariances = self._each(lambda p: (p._mean(rows).T, p._output_covariance(rows)))  # of rows and outputs
        away = means - jnp.mean(means, axis=0)
        return jnp.mean(covariances + away[..., :, None] * away[..., None, :], axis=0)


@pytree
class PathMixture:
    """
    Functions drawn from a mixture of posteriors; made by :meth:`PosteriorMixture.draw_functions`.

    :param paths: those of all draws of the other sites, each array with a leading axis.
    :param num_draws: the number of functions.
    """

    paths: Paths
    num_draws: int = field(metadata={"static": True})

    def __call__(self, X: RowsLike) -> jax.Array:
        """The functions' values at inputs X (N, D), or under functionals: (draws,) + batch + (N,)."""
        X = as_rows(X)
        return one_program(lambda: _in_turn(lax.map(lambda paths: paths(X), self.paths), self.num_draws), options=STEPS)


def _in_turn(drawn: jax.Array, count: int) -> jax.Array:
    """(parts, draws of each, …) as (count, …), the parts by turns."""
    return jnp.swapaxes(drawn, 0, 1).reshape(-1, *drawn.shape[2:])[:count]
