"""
The approximate posterior of f: what q(ε) says about the function, at any inputs.

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

import math
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from npgp import checks, functionals, linalg
from npgp.chunks import map_chunks, rows_at_once
from npgp.conditionals import Conditional, ObservedRows
from npgp.conditionals.base import Observations
from npgp.conditionals.precision import best_precision, certified_precision
from npgp.functionals.rows import Functionals, Rows, RowsLike, apart, as_rows, some
from npgp.functionals.rows import covariance as covariance_of
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.predictions import FunctionPosterior
from npgp.programs.backend import maximum
from npgp.pytrees import pytree
from npgp.sparse.groups import Groups, single
from npgp.sparse.projection import Members, Projection, Projector
from npgp.sparse.residuals import GroupResidual
from npgp.variational.averages import MixedPosterior
from npgp.variational.blocks import (
    BlockNormal,
    along_rows,
    learned_blocks,
    sum_of_roots,
    whitened_mean,
    whitened_variance,
)
from npgp.variational.paths import Paths, draw_functions
from npgp.variational.updates import update

T = TypeVar("T")


@pytree
class Posterior(FunctionPosterior):
    """
    The approximate posterior of f: everything q(ε) says about the function, at any inputs.

    Predictions use ε alone (Bui, Ashman & Turner 2025): whatever the conditional did to the residual at the
    training rows, the residual at new inputs keeps its prior.

    .. code-block:: python

        mean, variance = posterior.mean_and_variance(X)
        draws = posterior.sample(key, X, (5,))  # jointly over rows, (5, 30)
        curve = posterior.draw_functions(key, 3)(X)  # whole functions, to evaluate anywhere
        slope, _ = posterior.derivative(X)

    :param projector: the factorized inducing blocks; of functions with a kernel each :class:`npgp.sparse.Members`.
    :param q: the approximate posterior of each block; a batch of several outputs is allowed.
    """

    projector: Projector | Members
    q: tuple[BlockNormal, ...]

    @property
    def jitter(self) -> tuple[jax.Array, ...]:
        """For each block, the relative jitter that its factorization took."""
        return self.projector.jitter

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of outputs."""
        return jnp.broadcast_shapes(*(block.batch_shape for block in self.q))

    def kl(self) -> jax.Array:
        """``KL[q(ε) ‖ p(ε)]``, summed over blocks; batch shape."""
        return sum(block.kl() for block in self.q)  # type: ignore[return-value]

    def _rows(self, X: RowsLike, neighbors: ArrayLike | None, batch_shape: tuple[int, ...]) -> Any:
        return X.apart() if isinstance(X, Functionals) else super()._rows(X, neighbors, batch_shape)

    def _project(self, rows: Any) -> Projection:
        return self.projector(_inputs(rows))

    def _in_chunks(self, function: Callable[[jax.Array], T], X: jax.Array) -> T:
        """A function of rows, for as many at a time as are fast: no array of all rows and inducing features is made."""
        features = math.prod(self.batch_shape) * sum(block.event_shape[0] for block in self.q)
        return map_chunks(function, rows_at_once(features), X, axis=-1)

    def _mean(self, rows: jax.Array) -> jax.Array:
        def of_rows(X):
            return whitened_mean(self._project(X), [block.loc for block in self.q])

        return self._in_chunks(of_rows, rows)

    def _moments(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._in_chunks(lambda X: self._projected_moments(self._project(X)), rows)

    def _projected_moments(self, projection: Projection) -> tuple[jax.Array, jax.Array]:
        mean = whitened_mean(projection, [block.loc for block in self.q])
        variance = whitened_variance(projection, self.q) + projection.residual_variance(learned_blocks(self.q))
        return mean, jnp.broadcast_to(variance, mean.shape)

    def _covariance(self, rows: jax.Array) -> jax.Array:
        covariance = self._one_covariance(rows)
        return jnp.broadcast_to(covariance, self.batch_shape + covariance.shape[-2:])

    def _one_covariance(self, rows: jax.Array) -> jax.Array:
        """Without the batch's dimensions where all functions have the same."""
        A = self._project(rows).A
        cov = self.projector.residual_covariance(_inputs(rows), A, learned_blocks(self.q))
        for block, A_i in zip(self.q, A, strict=True):
            if block.learned:
                half = block.factor_times(A_i)
                cov = cov + linalg.matmul(jnp.swapaxes(half, -1, -2), half)
        return cov

    def _sample(self, rng_key: jax.Array, rows: jax.Array, sample_shape: tuple[int, ...]) -> jax.Array:
        mean, cov = self._mean(rows), self._one_covariance(rows)
        root = self._coupled(rows)
        if root is not None:  # functions that are drawn together share z
            cov = cov - linalg.matmul(jnp.swapaxes(root, -1, -2), root)
            z_key, rng_key = jax.random.split(rng_key)
            z = jax.random.normal(z_key, (*sample_shape, 1, 1, root.shape[-2]), mean.dtype)
            mean = mean + linalg.matmul(z, root)[..., 0, :]
        # What is left of a large prior variance has its rounding: jitter may grow to N ε of it.
        rounding = 10 * rows.shape[0] * jnp.finfo(cov.dtype).eps * self._project(rows).prior_variance
        L, _ = linalg.cholesky(cov, scale=jnp.maximum(linalg.diagonal(cov), rounding))
        z = jax.random.normal(rng_key, sample_shape + self.batch_shape + cov.shape[-1:], mean.dtype)
        return mean + linalg.matmul(L, z[..., None])[..., 0]

    def _coupled(self, rows: jax.Array) -> jax.Array | None:
        """Of functions that q makes dependent, the root (Q, K, N) of their covariance by ε; else ``None``."""
        if not any(block.joint for block in self.q):
            return None
        return sum_of_roots([block.factor_times(A) for block, A in zip(self.q, self._project(rows).A, strict=True)])

    def draw_functions(self, rng_key: jax.Array, num_draws: int = 1, num_features: int = 1024) -> Paths:
        """
        Draw whole functions, by pathwise conditioning (Matheron's rule; Wilson et al. 2020, eq. 13)::

            f(x) = φ(x)ᵀw + Σ_i A_i(x)ᵀ (ε_i − ε⁰_i),    w ~ N(0, I),    ε_i ~ q_i

        φ are random features of the kernel, and ε⁰_i the whitened inducing values of the prior draw φ(·)ᵀw. The
        inducing values carry the Cholesky factors' jitter as noise, so that draws have the covariance that
        ``covariance`` says. A block that moves the mean only has ``ε_i − ε⁰_i = m_i``.

        The mean is exact. The covariance is exact at the inducing points; away from them it is as good as the
        features, whose error falls as ``num_features^−½`` (none for linear and constant kernels). All draws share φ.

        :param rng_key: a JAX random key; the same key draws the same functions.
        :param num_draws: number of functions, for each output of a batch.
        :param num_features: number of random features of the prior, ``count`` of
            :meth:`Kernel.random_features <npgp.kernels.Kernel.random_features>`.
        :raises NotImplementedError: if a block is not made of points, or the kernel has no random features.
        """
        checks.whole_number(num_draws, "num_draws")
        checks.whole_number(num_features, "num_features")
        return draw_functions(self.projector, self.q, self.batch_shape, rng_key, num_draws, num_features)

    def update(
        self,
        X: RowsLike,
        y: ArrayLike,
        likelihood: Likelihood,
        *,
        offset: ArrayLike = 0.0,
        mask: ArrayLike | str | None = None,
        conditional: Conditional | str = "tight",
        max_iterations: int = 100,
        tolerance: float = 1e-6,
    ) -> Posterior:
        """
        The posterior given further rows, with hyperparameters and inducing features as they are:

        .. code-block:: python

            posterior = posterior.update(X[:3] + 0.1, y[:3], npgp.Gaussian(variance=noise_variance))

        The present q(ε) is the prior of what follows, so give each row once. For Gaussian noise the result is the
        optimum, in closed form. For one dense block it is then no matter whether rows come at once or in parts. With
        several blocks, or diagonal ones, covariances are as if all rows had come at once, but means only nearly so:
        q(ε) keeps no correlation between blocks. For other likelihoods the result is the fixed point of
        natural-gradient steps. What the inducing features cannot tell apart, new rows do not teach them.

        For everything else, such as minibatches, several GPs, or blocks that move the mean only, train q(ε) alone, by
        SVI on all rows: parameters of the guide change and ``numpyro.param`` hyperparameters stay::

            svi = SVI(
                model, guide, npgp.natural_gradient(1.0, optax.set_to_zero()), TraceMeanField_ELBO()
            )
            npgp.fit(svi, rng_key, steps, X, y, init_params=params)

        :param X: inputs of the new rows, (N, D).
        :param y: their observations, batch + (N,). One posterior may be conditioned on several rows of observations,
            (..., N): it becomes a batch.
        :param likelihood: p(y_n | f_n), an ``npgp`` likelihood or a function from f to a NumPyro distribution.
        :param offset: what is added to f at these rows, a mean function or other effects; broadcasts to y's shape.
        :param mask: True where an observation is present, of y's shape; the others may be NaN. Or ``"nan"``:
            those that are NaN are missing.
        :param conditional: what q does to the residual at the new rows, as for :func:`npgp.observe`, but none that
            learns a parameter; for Gaussian noise the result is the same.
        :param max_iterations: most natural-gradient steps, for likelihoods that are not Gaussian.
        :param tolerance: they end when another would move q(ε) by less, as a Kullback-Leibler divergence in nats. If
            they do not, a ``RuntimeWarning`` says so; not inside ``jit``, where it cannot be seen.
        :raises ValueError: for observations of another shape, outside the likelihood's support, or NaN without mask;
            and for a block that moves the mean only, since it does not say how sure the earlier rows made it.
        :raises FloatingPointError: if the result is not finite.
        """
        q = update(
            self.projector,
            self.q,
            X,
            y,
            likelihood,
            offset=offset,
            mask=mask,
            conditional=conditional,
            max_iterations=max_iterations,
            tolerance=tolerance,
        )
        return Posterior(self.projector, q)

    def mixed(self, W: ArrayLike) -> MixedPosterior:
        """
        The posterior of outputs that mix a batch of functions, ``h = W g``: for models with ``W @ g(X)``, where g was
        drawn in a plate of Q members.

        :param W: the mixing matrix, (P, Q).
        :raises ValueError: for a matrix without a column for each function.
        """
        return MixedPosterior((self,), W)

    def derivative(self, X: ArrayLike, dim: int = 0) -> tuple[jax.Array, jax.Array]:
        """
        Posterior mean and variance of the slope ``∂f/∂x_dim``, at each row: of
        :func:`npgp.functionals.derivative` (Rasmussen & Williams 2006, section 9.4).

        :param X: inputs (N, D).
        :param dim: the input column.
        :return: each batch + (N,).
        :raises ValueError: for a kernel whose functions have no derivative, or a column that X does not have.
        """
        return self.mean_and_variance(functionals.derivative(X, dim))

    def decompose(self, X: ArrayLike) -> Decomposition:
        """
        Mean and variance of f in independent parts, one for each block and the residual (Salimbeni et al. 2018).

        A block that moves the mean only has no variance of its own: it belongs to the residual.

        :param X: inputs (N, D), or batch + (N, D).
        """
        return self._at("_decomposition", X)

    def _decomposition(self, X: jax.Array) -> Decomposition:
        return self._in_chunks(self._decomposition_of_rows, X)

    def _decomposition_of_rows(self, X: jax.Array) -> Decomposition:
        projection = self._project(X)
        means = [along_rows(block.loc, A) for block, A in zip(self.q, projection.A, strict=True)]
        shape = self.batch_shape + projection.prior_variance.shape[-1:]
        none = jnp.zeros_like(projection.prior_variance)
        variances = [
            jnp.sum(jnp.square(block.factor_times(A)), axis=-2) if block.learned else none
            for block, A in zip(self.q, projection.A, strict=True)
        ]
        means.append(none)
        variances.append(projection.residual_variance(learned_blocks(self.q)))
        later = len(self.q) - 1
        names = ("orthogonal",) if later == 1 else tuple(f"orthogonal {i + 1}" for i in range(later))
        return Decomposition(
            ("principal", *names, "residual"),
            jnp.stack([jnp.broadcast_to(mean, shape) for mean in means]),
            jnp.stack([jnp.broadcast_to(variance, shape) for variance in variances]),
        )


def _inputs(rows: Any) -> Rows:
    """Rows as a projector takes them."""
    return rows if isinstance(rows, Functionals) else jnp.moveaxis(rows, 0, -2)


@pytree
class Decomposition:
    """
    A posterior of f in independent parts, whose means and variances sum to those of f.

    :param names: of the parts: ``"principal"`` for the first block, ``"orthogonal"`` for a second (``"orthogonal 1"``,
        … if there are more), and ``"residual"``.
    :param mean: (parts,) + batch + (N,).
    :param variance: (parts,) + batch + (N,).
    """

    names: tuple[str, ...] = field(metadata={"static": True})
    mean: jax.Array
    variance: jax.Array


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
