"""
Several outputs as mixtures of independent functions: ``h_p(x) = Σ_q W_pq g_q(x)``, the linear model of
coregionalization. What the posterior of g says about h, with the covariance between outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.predictions import FunctionPosterior
from npgp.pytrees import pytree
from npgp.variational.paths import Paths

__all__ = ["MixedPaths", "MixedPosterior"]


@pytree
@dataclass(frozen=True)
class MixedPosterior(FunctionPosterior):
    """
    The posterior of ``h = W g``: P outputs that mix Q functions, which are independent under q.

    :meth:`npgp.variational.Posterior.mixed` makes one of functions drawn in a plate, which may have
    a kernel each. For functions of several components, give their posteriors in the order of W's columns::

        h = npgp.variational.MixedPosterior((smooth, rough), W)     # W: (P, 2), or more columns for batches

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

    def _rows(self, X: ArrayLike, neighbors: ArrayLike | None, batch_shape: tuple[int, ...]) -> tuple[Any, ...]:
        X = checks.inputs(X)
        return tuple(posterior._rows(X, neighbors, ()) for posterior in self.posteriors)

    def _moments(self, rows: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        mean, variance = self._function_moments(rows)
        return linalg.matmul(self.W, mean), linalg.matmul(jnp.square(self.W), variance)

    def _mean(self, rows: tuple[Any, ...]) -> jax.Array:
        return linalg.matmul(self.W, _stacked([p._mean(r) for p, r in zip(self.posteriors, rows, strict=True)]))

    def _function_moments(self, rows: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of the functions, each (Q, N)."""
        means, variances = zip(*(p._moments(r) for p, r in zip(self.posteriors, rows, strict=True)), strict=True)
        return _stacked(means), _stacked(variances)

    def output_covariance(self, X: ArrayLike) -> jax.Array:
        """Posterior covariance between outputs at each row of inputs X (N, D): (N, P, P)."""
        return self._at("_output_covariance", X, axes=(0,))

    def _output_covariance(self, rows: tuple[Any, ...]) -> jax.Array:
        _, variance = self._function_moments(rows)
        return linalg.matmul(self.W * variance.T[:, None, :], self.W.T)

    def _covariance(self, rows: tuple[Any, ...]) -> jax.Array:
        """Joint over outputs and rows, (P, N, P, N)."""
        found = [p._covariance(r) for p, r in zip(self.posteriors, rows, strict=True)]
        number, (outputs, functions) = found[0].shape[-1], self.W.shape
        covariances = jnp.concatenate([covariance.reshape(-1, number**2) for covariance in found])  # (Q, N²)
        products = (self.W[:, None, :] * self.W).reshape(outputs**2, functions)
        joint = linalg.matmul(products, covariances)
        return joint.reshape(outputs, outputs, number, number).transpose(0, 2, 1, 3)

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
@dataclass(frozen=True)
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
