"""
Several outputs as mixtures of independent functions: ``h_p(x) = Σ_q W_pq g_q(x)``, the linear model of
coregionalization. What the posterior of g says about h, with the covariance between outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.functionals.rows import RowsLike, as_rows
from npgp.predictions import FunctionPosterior
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
