"""
Observations beside their neighbors' observations, in ``npgp.observe(..., neighbors=(values, y))``: VIF (Gyger, Furrer &
Sigrist 2025) for minibatches and inside any model.

Given the whitened inducing values ε, a row's Gaussian observation is regressed on its neighbors' (npgp/collapsed/vif.py
has the formulas), so that its density is that of a row ``ã_n = a_n − Σ_j w_nj a_j`` with offset
``Σ_j w_nj (y_j − offset_j)`` and noise variance F_n, and no residual. That is what :func:`beside_neighbors` makes of
the statement's values and likelihood; guides, conditionals and plates see nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from npgp import checks
from npgp.kernels import Kernel
from npgp.likelihoods import Gaussian, Likelihood, as_likelihood
from npgp.model.function import Function
from npgp.model.latent import Latent, Term, as_latent
from npgp.neighbors.vecchia import conditional_weights, what_is_left
from npgp.sparse.projection import Projection

WHAT = "neighbors=(values of the neighbors, their observations of shape (N, k))"


class FunctionBesideNeighbors(Function):
    """
    A function at rows whose neighbors' observations are known: their projections are transformed.

    :param source: the function.
    :param projection: ã_n of each block, with what inducing values and neighbors leave of the variance.
    """

    def __init__(self, source: Function, projection: Projection):
        vars(self).update(vars(source))
        self._source, self._projection = source, projection

    def project(self, X: Any) -> Projection:
        """That of the rows."""
        return self._projection

    def _residual_covariance(self, X: Any, projection: Projection, blocks: Sequence[bool]) -> jax.Array:
        return jnp.diag(projection.residual_variance(blocks))


def beside_neighbors(
    name: str, latent: Latent, likelihood: Likelihood, neighbors: Any, observed: bool
) -> tuple[Latent, Likelihood]:
    """
    The values and the likelihood of observations given their neighbors'.

    :param name: the statement.
    :param latent: GP values at rows, (N,).
    :param likelihood: Gaussian noise.
    :param neighbors: values of the neighbors of each row, (N k,), row by row; their observations (N, k), NaN where
        there are fewer; and perhaps a likelihood of theirs, else the rows' own of one noise variance.
    :param observed: whether observations are known. If not, what is left of f's variance stays a residual, for draws.
    :raises TypeError: for neighbors that are no such pair.
    :raises ValueError: for another likelihood, values of other functions, in plates or sampled before, other shapes.
    """
    values, y, noise, noise_near = _checked(name, latent, likelihood, neighbors)
    (N,), k = latent.shape, y.shape[1]
    mask = ~jnp.isnan(y)
    here, there, kernels = [], [], []
    for own, near in zip(latent.terms, values.terms, strict=True):
        here.append(_points(own, N))
        there.append(jax.tree.map(lambda x: x.reshape(N, k, x.shape[-1]), _points(near, N * k)))
        kernels.append(cast(Function, own.function).projector.kernel)
    weights, variance, _ = conditional_weights(_left(kernels), (here, noise), (there, noise_near), mask, 0.0)
    residual = jnp.where(mask, y, 0.0) - jnp.broadcast_to(values.offset, (N * k,)).reshape(N, k)
    offset = latent.offset + jnp.sum(weights * residual, axis=1)
    left = jnp.zeros_like(variance) if observed else variance - noise
    terms = []
    for own, (_, A, scale), (_, A_near, scale_near) in zip(latent.terms, here, there, strict=True):
        function = cast(Function, own.function)
        rows = scale * A - jnp.einsum("nk,nkm->nm", weights * scale_near[..., 0], A_near)
        prior = jnp.sum(jnp.square(rows), axis=1) + left
        sizes = [block.size for block in function.projector.blocks]
        blocks = tuple(jnp.split(rows.T, [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]))
        beside = FunctionBesideNeighbors(function, Projection(blocks, prior))
        terms.append(Term(jnp.ones((), rows.dtype), beside, own.X))
        left = jnp.zeros_like(left)
    return Latent(tuple(terms), offset), Gaussian(variance=variance) if observed else likelihood


def _points(term: Term, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs, projections on all blocks and the term's factor, each with rows first."""
    A = jnp.concatenate(cast(Function, term.function).project(term.X).A).T
    return term.X, A, jnp.broadcast_to(term.scale, (rows,))[:, None]


def _left(kernels: Sequence[Kernel]):
    """The covariance that inducing values leave, of the sum of all terms."""

    def covariance(points: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
        each = (a * what_is_left(k)((X, A)) * a[:, 0] for k, (X, A, a) in zip(kernels, points, strict=True))
        return sum(each)  # type: ignore[return-value]

    return covariance


def _checked(
    name: str, latent: Latent, likelihood: Likelihood, neighbors: Any
) -> tuple[Latent, jax.Array, jax.Array, jax.Array]:
    if not isinstance(neighbors, (tuple, list)) or not 2 <= len(neighbors) <= 3:
        raise TypeError(f"{name}: neighbors is a {type(neighbors).__name__}; it must be {WHAT}.")
    values, y = as_latent(neighbors[0], "neighbors of observe"), checks.real(neighbors[1], f"{name}: neighbors' y")
    of_neighbors = as_likelihood(neighbors[2]) if len(neighbors) == 3 else likelihood
    if not isinstance(likelihood, Gaussian) or not isinstance(of_neighbors, Gaussian):
        raise ValueError(
            f"{name}: neighbors are for Gaussian noise, and the likelihood is {likelihood.described}. For others take "
            'npgp.ApproximateGP(method="vif"), or a VNNGP of what inducing points leave, npgp.sparse.split_kernel.'
        )
    if len(latent.shape) != 1 or jnp.ndim(y) != 2 or values.shape != (jnp.size(y),) or len(y) != latent.shape[0]:
        raise ValueError(
            f"{name}: neighbors are values of shape {values.shape} and observations of shape {jnp.shape(y)} for rows "
            f"of shape {latent.shape}; k for each of N rows are values (N k,), row by row, and observations (N, k)."
        )
    for own, near in zip(latent.terms, values.terms, strict=False):
        f, plain = own.function, own.mixing is None and isinstance(own.X, jax.Array) and isinstance(near.X, jax.Array)
        if not plain or type(f) is not Function or f.batch_shape or f.sampled is not None:
            raise ValueError(
                f"{name}: {f.name} has no neighbors: they are for SparseGPs at inputs (N, D), drawn outside "
                "plates, which npgp.sample has not sampled."
            )
    if [f.source for f in latent.functions] != [f.source for f in values.functions]:
        raise ValueError(f"{name}: neighbors are values of other functions than the rows: write the same sum of both.")
    if len(neighbors) == 2 and jnp.ndim(likelihood.variance):
        raise ValueError(
            f"{name}: the noise variance differs between rows, so neighbors need theirs: neighbors=(values, y, "
            "npgp.Gaussian(variance=...)), (N, k)."
        )
    dtype = jnp.result_type(latent.terms[0].X)
    noise = jnp.broadcast_to(jnp.asarray(likelihood.variance, dtype), latent.shape)
    noise_near = jnp.broadcast_to(jnp.asarray(of_neighbors.variance, dtype), jnp.shape(y))
    return values, jnp.asarray(y, dtype), noise, noise_near
