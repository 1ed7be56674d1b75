"""
Predictions that use what the training rows say about the residual, beside ε.

A :class:`~npgp.variational.Posterior` predicts from ε alone, and leaves the residual its prior at new inputs. What the
training rows know of it is in their site precisions Λ: with D the residual's prior covariance among a set of rows, and
c its covariance between a new input and these,

    variance less c Λ^½ (I + Λ^½ D Λ^½)⁻¹ Λ^½ cᵀ,    mean plus c (I + ΛD)⁻¹ g,    g_n = E_q[∂_f log p(y_n | f_n)].

:func:`exact_variance` takes all rows, and the variance alone, since q leaves the residual's mean at zero: this is what
q says (Bui, Ashman & Turner 2025, eq. 12). :func:`local_correction` takes the group of rows that the new input falls
in, and both: an approximation, in the spirit of PIC (Snelson & Ghahramani 2007).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from npgp import linalg
from npgp.conditionals import ObservedRows
from npgp.conditionals.base import Observations
from npgp.conditionals.precision import best_precision, certified_precision
from npgp.functionals.rows import RowsLike, apart, as_rows, some
from npgp.functionals.rows import covariance as covariance_of
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.predictions import FunctionPosterior
from npgp.programs.backend import maximum
from npgp.pytrees import pytree
from npgp.sparse.groups import Groups, single
from npgp.sparse.residuals import GroupResidual
from npgp.variational.blocks import along_rows, learned_blocks, whitened_mean, whitened_variance
from npgp.variational.posterior import Posterior

#: New inputs corrected at a time: each needs its group's projections, (M, g).
BATCH = 128


@pytree
class CorrectedPosterior(FunctionPosterior):
    """
    A posterior of f with what the training rows say about the residual; made by :func:`exact_variance` and
    :func:`local_correction`.

    :param posterior: the posterior of f from ε alone.
    :param groups: which training rows are together.
    :param rows: the training rows: inputs (G, g, D), or functionals.
    :param A: their projections, for each block (M_i, G, g), or batch + that.
    :param root: ``λ_n^½``, (..., G, g).
    :param factor: Cholesky factors of ``I + Λ^½ D Λ^½``, (..., G, g, g).
    :param weights: ``(I + ΛD)⁻¹ g``, (..., G, g); ``None`` if the mean is left as it is.
    """

    posterior: Posterior
    groups: Groups
    rows: Any
    A: tuple[jax.Array, ...]
    root: jax.Array
    factor: jax.Array
    weights: jax.Array | None = None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of functions."""
        return self.posterior.batch_shape

    def _rows(self, X: Any, neighbors: ArrayLike | None, batch_shape: tuple[int, ...]) -> Any:
        return self.posterior._rows(X, neighbors, ())  # the groups are of inputs that all functions have

    def _moments(self, rows: Any) -> tuple[jax.Array, jax.Array]:
        X = rows
        mean, variance = self.posterior._moments(X)
        projector = self.posterior.projector
        learned = learned_blocks(self.posterior.q)
        A_new = projector(X).A

        def correct(x, A_x, group):
            """Corrections for rows x (n, D) of one group: each (..., n)."""
            near = some(self.rows, group)
            covariance = projector.each(lambda p: covariance_of(p.kernel, x, near))  # (..., n, g)
            explained = [
                linalg.matmul(linalg.transposed(a), A[..., group, :]) for a, A in zip(A_x, self.A, strict=True)
            ]
            c = covariance - sum(e for e, use in zip(explained, learned, strict=True) if use)
            factor, root = self.factor[..., group, :, :], self.root[..., group, :]
            half = linalg.solve_lower(factor, root[..., :, None] * linalg.transposed(c))
            less = jnp.sum(jnp.square(half), axis=-2)
            if self.weights is None:
                return jnp.zeros_like(less), less
            # Given ε, what is left of f has mean zero once mean-only blocks are taken out as well.
            c = c - sum((e for e, use in zip(explained, learned, strict=True) if not use), jnp.zeros_like(c))
            return along_rows(self.weights[..., group, :], linalg.transposed(c)), less

        if self.groups.count == 1:
            more, less = correct(X, A_new, 0)
        else:

            def one(row):
                x, A_x, group = row
                return jax.tree.map(lambda v: v[..., 0], correct(some(x, None), [a[..., None] for a in A_x], group))

            each = (X, [jnp.moveaxis(A, -1, 0) for A in A_new], self.groups.assign(X))
            more, less = (jnp.moveaxis(v, 0, -1) for v in lax.map(one, each, batch_size=BATCH))
        return mean + more, maximum(variance - less, 0.0)


def exact_variance(
    posterior: Posterior,
    X: RowsLike,
    y: ArrayLike,
    likelihood: Likelihood,
    *,
    offset: ArrayLike = 0.0,
    mask: ArrayLike | str | None = None,
) -> CorrectedPosterior:
    """
    The posterior with the variance that q says f has at new inputs, the training-point term included (Bui, Ashman &
    Turner 2025, eq. 12). Small data only: O(N³) once, then O(N²) for each new input; the mean is as it was.

    .. code-block:: python

        exact = npgp.variational.exact_variance(
            posterior, X, y, npgp.Gaussian(variance=params["noise"] ** 2)
        )
        mean, variance = exact.mean_and_variance(X)

    :param posterior: of f, trained with the ``tight``, ``grouped`` or ``full`` conditional.
    :param X: training inputs, (N, D), or functionals.
    :param y: training observations, (..., N).
    :param likelihood: p(y_n | f_n).
    :param offset: what was added to f at the training rows, a scalar or (N,).
    :param mask: True where an observation is present, of y's shape. Or ``"nan"``:
        those that are NaN are missing.
    """
    return _correct(posterior, X, y, likelihood, single(as_rows(X).shape[0]), offset, mask, shift=False)


def local_correction(
    posterior: Posterior,
    X: RowsLike,
    y: ArrayLike,
    likelihood: Likelihood,
    groups: Groups,
    *,
    offset: ArrayLike = 0.0,
    mask: ArrayLike | str | None = None,
) -> CorrectedPosterior:
    """
    The posterior with mean and variance corrected by the training rows of the group that a new input falls in. An
    approximation, of either sign in the mean; jumps where one group ends and the next begins.

    .. code-block:: python

        groups = npgp.sparse.median_split(X, 8)
        corrected = npgp.local_correction(
            posterior, X, y, npgp.Gaussian(variance=noise_variance), groups
        )
        assert np.mean((corrected.mean(X) - y) ** 2) < np.mean((posterior.mean(X) - y) ** 2)

    :param posterior: of f, trained with any conditional.
    :param X: training inputs, (N, D), or functionals.
    :param y: training observations, (..., N).
    :param likelihood: p(y_n | f_n).
    :param groups: a partition of the training rows that assigns new inputs (:func:`npgp.sparse.median_split`).
    :param offset: what was added to f at the training rows, a scalar or (N,).
    :param mask: True where an observation is present, of y's shape. Or ``"nan"``:
        those that are NaN are missing.
    """
    return _correct(posterior, X, y, likelihood, groups, offset, mask, shift=True)


def _correct(posterior, X, y, likelihood, groups, offset, mask, shift) -> CorrectedPosterior:
    X, likelihood = as_rows(X), as_likelihood(likelihood)
    if likelihood.num_latents != 1:
        raise ValueError(
            f"likelihood is {type(likelihood).__name__}, of {likelihood.num_latents} latent values; corrections are of "
            "likelihoods of one."
        )
    if groups.num_rows != X.shape[0]:
        raise ValueError(f"groups is a partition of {groups.num_rows} rows, but X has {X.shape[0]}.")
    if groups.tree is None and groups.count > 1:
        raise ValueError(
            "groups were made without inputs, so new inputs fall in none of them; use npgp.sparse.median_split."
        )
    rows = Observations.of(y, likelihood, (..., X.shape[0]), mask=mask, offset=offset, dtype=X.dtype)
    return _corrected(posterior, X, rows, groups, shift)


@partial(jax.jit, static_argnames="shift")
def _corrected(posterior, X, rows: Observations, groups, shift) -> CorrectedPosterior:
    likelihood, y = rows.likelihood, rows.y
    q, projector = posterior.q, posterior.projector
    learned = learned_blocks(q)
    projection = projector(X)
    mean = whitened_mean(projection, [block.loc for block in q]) + rows.offset
    variance = whitened_variance(projection, q)
    residual = GroupResidual(projector.group_covariance(X, projection.A, groups, learned), groups)
    # With all rows in one group any precision will do.
    rule = best_precision if groups.count == 1 else certified_precision
    precision = ObservedRows(likelihood, y, mean, variance, residual, rows.present).by_part(rule)
    root = residual.roots(precision)
    factor = residual.factor(root)
    weights = None
    if shift:
        left = residual.given(precision)[0]
        slope = jax.grad(lambda m: jnp.sum(likelihood.expected_log_prob(y, m, variance + left)))(mean)
        slope = rows.where_present(slope)
        D = residual.covariance
        if not all(learned):
            D = projector.group_covariance(X, projection.A, groups)
            factor_of_mean = GroupResidual(D, groups).factor(root)
        else:
            factor_of_mean = factor
        weights = _weights(D, root, factor_of_mean, jnp.where(groups.mask, groups.gather(slope), 0.0))
    A = tuple(groups.gather(A) for A in projection.A)
    return CorrectedPosterior(posterior, groups, some(apart(X), groups.rows), A, root, factor, weights)


def _weights(D, root, factor, slope):
    """``(I + ΛD)⁻¹ g = g − Λ^½ (I + Λ^½ D Λ^½)⁻¹ Λ^½ D g``, safe where λ = 0."""
    Dg = linalg.matmul(D, slope[..., None])
    half = linalg.solve_lower(factor, root[..., None] * Dg)
    return slope - root * linalg.solve_lower(factor, half, transpose=True)[..., 0]
