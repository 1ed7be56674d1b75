"""
Several outputs as mixtures of independent functions: ``h_p(x) = Σ_q W_pq g_q(x)``, the linear model of
coregionalization. What the posterior of g says about h, with the covariance between outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.pytrees import pytree
from npgp.variational.paths import Paths

__all__ = ["MixedPaths", "MixedPosterior"]


class FunctionPosterior(Protocol):
    """What is needed of the posterior of one function, or of a batch: see :class:`~npgp.variational.Posterior`."""

    @property
    def batch_shape(self) -> tuple[int, ...]: ...

    def mean(self, X: ArrayLike, /) -> jax.Array: ...

    def mean_and_variance(self, X: ArrayLike, batch_size: int | None, /) -> tuple[jax.Array, jax.Array]: ...

    def covariance(self, X: ArrayLike, /) -> jax.Array: ...

    def sample(self, rng_key: jax.Array, X: ArrayLike, sample_shape: tuple[int, ...], /) -> jax.Array: ...

    def draw_functions(self, rng_key: jax.Array, num_draws: int, num_features: int, /) -> Paths: ...


@pytree
@dataclass(frozen=True)
class MixedPosterior:
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

    posteriors: tuple[FunctionPosterior, ...]
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

    def mean(self, X: ArrayLike) -> jax.Array:
        """Posterior mean of each output at inputs X (N, D): (P, N)."""
        return linalg.matmul(self.W, _rows([posterior.mean(X) for posterior in self.posteriors]))

    def variance(self, X: ArrayLike, batch_size: int | None = None) -> jax.Array:
        """Posterior variance of each output at inputs X (N, D): (P, N). Arguments as :meth:`mean_and_variance`."""
        return self.mean_and_variance(X, batch_size)[1]

    def mean_and_variance(self, X: ArrayLike, batch_size: int | None = None) -> tuple[jax.Array, jax.Array]:
        """
        Posterior mean and variance of each output.

        :param X: inputs (N, D).
        :param batch_size: rows taken at a time; by default as many as are fast.
        :return: each (P, N).
        """
        mean, variance = self._moments(X, batch_size)
        return linalg.matmul(self.W, mean), linalg.matmul(jnp.square(self.W), variance)

    def output_covariance(self, X: ArrayLike, batch_size: int | None = None) -> jax.Array:
        """
        Posterior covariance between outputs at each row: (N, P, P). Arguments as :meth:`mean_and_variance`.
        """
        _, variance = self._moments(X, batch_size)
        return linalg.matmul(self.W * variance.T[:, None, :], self.W.T)

    def covariance(self, X: ArrayLike) -> jax.Array:
        """
        Joint posterior covariance of outputs and rows: (P, N, P, N), whose entry [p, n, r, m] is ``Cov[h_p(x_n),
        h_r(x_m)]``. ``.reshape(P * N, P * N)`` is the covariance matrix of ``mean(X).ravel()``.

        :param X: inputs (N, D).
        """
        rows = jnp.shape(X)[0]
        covariances = [posterior.covariance(X).reshape(-1, rows**2) for posterior in self.posteriors]  # (Q, N²)
        outputs, functions = self.W.shape
        products = (self.W[:, None, :] * self.W).reshape(outputs**2, functions)
        joint = linalg.matmul(products, jnp.concatenate(covariances))
        return joint.reshape(outputs, outputs, rows, rows).transpose(0, 2, 1, 3)

    def sample(self, rng_key: jax.Array, X: ArrayLike, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """
        Draws of all outputs, joint over outputs and rows, at O(Q N³).

        :return: sample_shape + (P, N).
        """
        keys = jax.random.split(rng_key, len(self.posteriors))
        draws = [p.sample(key, X, sample_shape) for p, key in zip(self.posteriors, keys, strict=True)]
        return linalg.matmul(self.W, _rows(draws, len(sample_shape)))

    def draw_functions(self, rng_key: jax.Array, num_draws: int = 1, num_features: int = 1024) -> MixedPaths:
        """
        Draw whole functions, joint over outputs; arguments and restrictions as for
        :meth:`npgp.variational.Posterior.draw_functions`.
        """
        keys = jax.random.split(rng_key, len(self.posteriors))
        drawn = [p.draw_functions(key, num_draws, num_features) for p, key in zip(self.posteriors, keys, strict=True)]
        return MixedPaths(tuple(drawn), self.W)

    def _moments(self, X: ArrayLike, batch_size: int | None) -> tuple[jax.Array, jax.Array]:
        """Of the functions, each (Q, N)."""
        moments = [posterior.mean_and_variance(X, batch_size) for posterior in self.posteriors]
        return _rows([mean for mean, _ in moments]), _rows([variance for _, variance in moments])


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
        return linalg.matmul(self.W, _rows([paths(X) for paths in self.paths], 1))


def _rows(values: list[jax.Array], draws: int = 0) -> jax.Array:
    """Values of functions, draws + (N,) or draws + (Q, N) each, one below the other."""
    return jnp.concatenate([v[..., None, :] if v.ndim == draws + 1 else v for v in values], axis=-2)
