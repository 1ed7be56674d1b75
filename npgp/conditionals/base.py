"""
What a conditional is: what the approximate posterior q does to the residual r that the inducing blocks leave.

Within a group of rows, q gives r the covariance it would have after one Gaussian pseudo-observation per row of
precision λ_n, the *site precision*: ``ĉ_n = [(D⁻¹ + Λ)⁻¹]_nn``, or ``d_n / (1 + λ_n d_n)`` for a row by itself. The
group's share of the ELBO is then (docs/theory.md, section 2)

    Σ_n { E_{N(μ_n, s_n + ĉ_n)}[log p(y_n | f_n)] + ½ λ_n ĉ_n } − ½ log|I + Λ^½ D Λ^½|.

Conditionals differ in Λ, in the groups of rows, and in how the expectation is bounded where q by itself is not enough.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from numpyro.distributions import constraints

from npgp import checks
from npgp.likelihoods import Likelihood
from npgp.likelihoods.base import without_missing
from npgp.programs.compiled import one_program
from npgp.pytrees import pytree
from npgp.sparse.groups import Groups
from npgp.sparse.residuals import Residual, RowResidual


class Parameter(NamedTuple):
    """
    A parameter that a conditional learns; one number for each observation statement.

    :param suffix: its name after that of the statement, ``name.suffix``.
    :param start: initial value.
    :param constraint: NumPyro's constraint that it is under.

    .. code-block:: python

        from numpyro.distributions import constraints

        scale = npgp.conditionals.Parameter("residual_scale", 0.5, constraints.unit_interval)
        assert npgp.conditionals.Shared.parameter == scale
    """

    suffix: str
    start: float
    constraint: constraints.Constraint


class ObservedRows(NamedTuple):
    """
    Observed rows, and what q(ε) and the residual's prior say of their f.

    .. code-block:: python

        rows = npgp.conditionals.ObservedRows(
            npgp.Poisson(),
            jnp.array([0.0, 2.0]),
            jnp.zeros(2),
            0.1 * jnp.ones(2),
            npgp.sparse.RowResidual(0.3 * jnp.ones(2)),
        )
        terms = npgp.conditionals.Tight().row_terms(rows)

    :param likelihood: p(y_n | f_n); for :meth:`Conditional.row_terms` never one of several parts, as the caller goes
        through these (:meth:`by_part`).
    :param y: observations, shape (..., N).
    :param mean: μ_n under q(ε), (..., N); for C latent values an observation, (C, ..., N), here and below.
    :param variance: s_n, the variance that comes from the learned blocks, (..., N).
    :param residual: the residual's prior.
    :param present: False for rows without an observation, whose values are then of no meaning; (..., N).
    """

    likelihood: Likelihood
    y: jax.Array
    mean: jax.Array
    variance: jax.Array
    residual: Residual
    present: jax.Array | None = None

    def expected_log_prob(self, left: ArrayLike | None = None) -> jax.Array:
        """
        ``E[log p(y_n | f_n)]``, (..., N).

        :param left: the variance that q leaves the residual, (..., N); none if omitted.
        """
        variance = self.variance if left is None else self.variance + left
        return self.likelihood.expected_log_prob(self.y, self.mean, variance)

    def by_part(self, rule: Callable[..., jax.Array], *others: Any) -> jax.Array:
        """A rule for likelihoods of one part, for each part of the likelihood: these have residuals of their own."""

        def of_part(part: Likelihood, take: Callable[[Any], Any]) -> jax.Array:
            y, mean, variance, present = map(take, (self.y, self.mean, self.variance, self.present))
            return rule(ObservedRows(part, y, mean, variance, self.residual.part(take), present), *map(take, others))

        return self.likelihood.by_part(of_part)


class Conditional:
    """
    What q does to the residual, as an object for ``conditional=``: :class:`~npgp.conditionals.Tight`,
    :class:`~npgp.conditionals.Grouped`, ….

    One of one's own is decorated with :func:`npgp.pytree` (a frozen dataclass), subclasses this and gives
    :meth:`row_terms`, and :meth:`penalty` if it is for collapsed bounds too; the other methods have defaults:

    .. code-block:: python

        import math


        @npgp.pytree
        class Halved(npgp.conditionals.Conditional):
            '''Half of the residual's variance, in every row.'''

            def row_terms(self, rows, parameter=None):
                cost = 0.5 * rows.likelihood.num_latents * (0.5 - 1.0 - math.log(0.5))
                return rows.expected_log_prob(0.5 * rows.residual.variance) - cost

    :cvar parameter: the parameter that it learns, if it has one.
    :cvar needs_all_rows: whether it is wrong for minibatches.
    """

    parameter: ClassVar[Parameter | None] = None
    needs_all_rows: ClassVar[bool] = False
    #: Whether the residual under q is its prior, so that blocks which move the mean only are no part of it.
    is_prior: ClassVar[bool] = False

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        """
        Each row's expected log likelihood with its share of what the conditional costs.

        :param rows: these, with the residual's prior within the groups of :meth:`partition`.
        :param parameter: the value of :attr:`parameter`.
        :return: shape (..., N). Rows of one group share its terms, so that only sums over whole groups are bounds.
        """
        raise NotImplementedError(f"{type(self).__name__} has no row_terms(rows, parameter), the terms of rows (N,).")

    def penalty(self, residual: Residual, noise_variance: ArrayLike) -> jax.Array:
        """
        What the residual costs the collapsed bound for Gaussian noise (docs/theory.md, section 5), a scalar; at the
        best value of :attr:`parameter`, if there is one.

        :param residual: the residual's prior at the training rows, within the groups of :meth:`partition`.
        :param noise_variance: σ², a scalar or (N,).
        """
        raise NotImplementedError(f"{type(self).__name__} has no penalty for collapsed bounds; observe takes it.")

    def is_bound(self, likelihood: Likelihood) -> bool:
        """
        Whether the ELBO is known to lie below the log evidence for this likelihood.

        Expectations by quadrature are taken to be exact (:func:`npgp.likelihoods.quadrature_error` measures them). One
        of one's own is no bound until it says so.
        """
        return False

    def supposes_own_residuals(self, likelihood: Likelihood) -> bool:
        """Whether it is a bound for this likelihood only if no two outputs share a residual."""
        return False

    def partition(self, num_rows: int) -> Groups | None:
        """
        The groups of rows within which the residual's covariance is wanted; ``None`` for rows one by one.

        :param num_rows: number of rows N.
        :raises ValueError: for groups of other rows.
        """
        return None

    def for_inputs(self, X: Any, num_features: int) -> Conditional:
        """
        This conditional with what can be found from training inputs filled in, such as groups of neighbors.

        :param X: all training inputs, (N, D).
        :param num_features: number of inducing features of all blocks.
        """
        return self

    def residual_scale(self, parameter: ArrayLike | None) -> ArrayLike | None:
        """
        Standard deviation of the residual under q as a share of its prior's, where that is all the conditional says:
        then :func:`npgp.sample` takes it too, whatever follows. ``None`` where it says more.
        """
        return None


def row_elbo(
    conditional: Conditional,
    likelihood: Likelihood,
    y: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    residual: jax.Array | Residual,
    parameter: ArrayLike | None = None,
    present: jax.Array | None = None,
) -> jax.Array:
    """
    Each row's share of the ELBO, 0 without an observation; arguments and result as for :class:`ObservedRows` and
    :meth:`Conditional.row_terms`, for any likelihood. y and moments of rows without an observation may be NaN, in
    gradients too.

    :param residual: the residual's prior, or d_n (..., N) for rows one by one.
    """
    if not isinstance(residual, Residual):
        residual = RowResidual(residual)
    if present is not None:
        y, mean, variance = without_missing(likelihood, present, y, mean, variance)
        residual = residual.only(present)
    terms = ObservedRows(likelihood, y, mean, variance, residual, present).by_part(conditional.row_terms, parameter)
    return terms if present is None else jnp.where(present, terms, 0.0)


@pytree
class Observations:
    """
    Observed values of rows, and how they come from f. :meth:`of` checks them, and fills in what is missing.

    .. code-block:: python

        rows = npgp.conditionals.Observations.of(y, npgp.Gaussian(scale=0.3), y.shape)

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
