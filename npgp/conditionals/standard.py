"""The conditionals that npgp has, for each of which a word stands, such as ``"tight"``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks
from npgp.conditionals.base import Conditional, ObservedRows, Parameter
from npgp.conditionals.precision import (
    best_precision,
    certified_precision,
    certified_terms,
    exact_terms,
    of_present,
    site_terms,
)
from npgp.likelihoods import Likelihood
from npgp.pytrees import pytree, static
from npgp.sparse.groups import Groups, consecutive, default_size, median_split, single
from npgp.sparse.residuals import Residual, RowResidual


@pytree
class Prior(Conditional):
    """
    λ = 0: the residual keeps its prior. Always a bound, for whatever likelihood, and the loosest::

        conditional = npgp.conditionals.Prior()  # or "prior"
        npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional)

    .. code-block:: python

        def bound(conditional):
            gp = npgp.CollapsedGP(
                kernel, X, X[::10], npgp.Gaussian(scale=0.3), conditional=conditional
            )
            return gp.log_prob(y)


        assert bound(npgp.conditionals.Prior()) < bound(npgp.conditionals.Tight())

    Source: Titsias 2009; Hensman, Fusi & Lawrence 2013.
    """

    is_prior: ClassVar[bool] = True

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        return rows.expected_log_prob(rows.residual.variance)

    def penalty(self, residual: Residual, noise_variance: ArrayLike) -> jax.Array:
        return 0.5 * jnp.sum(residual.variance / noise_variance)

    def is_bound(self, likelihood: Likelihood) -> bool:
        return True

    def residual_scale(self, parameter: ArrayLike | None) -> ArrayLike:
        return 1.0


@pytree
class Tight(Conditional):
    """
    A site precision for each row by itself. Always a bound, at no cost beyond that of
    :class:`~npgp.conditionals.Prior`, and the default::

        conditional = npgp.conditionals.Tight()  # or "tight"
        npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional)

    .. code-block:: python

        def bound(conditional):
            gp = npgp.CollapsedGP(
                kernel, X, X[::10], npgp.Gaussian(scale=0.3), conditional=conditional
            )
            return gp.log_prob(y)


        assert bound(npgp.conditionals.Prior()) < bound(npgp.conditionals.Tight())

    λ_n is 1/σ_n² for Gaussian noise, the expected negative curvature of the log likelihood where that is log-concave,
    and what certifies the bound for other likelihoods (:attr:`Likelihood.proof <npgp.likelihoods.Likelihood>`).

    Source: Gaussian noise: Bui, Ashman & Turner 2025; Titsias 2025. Other likelihoods: docs/theory.md, section 2.
    """

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        return certified_terms(rows)

    def penalty(self, residual: Residual, noise_variance: ArrayLike) -> jax.Array:
        variance = residual.variance
        return jnp.sum(residual.cost(jnp.broadcast_to(1.0 / jnp.asarray(noise_variance), variance.shape)))

    def is_bound(self, likelihood: Likelihood) -> bool:
        return True

    def supposes_own_residuals(self, likelihood: Likelihood) -> bool:
        # The least value over the residual's variance is found for one output by itself.
        parts = likelihood.parts
        if likelihood.proof == "single-peaked":
            return any(part.proof == "log-concave" for part in parts)
        return likelihood.proof == "none" and len(parts) > 1


@pytree
class Shared(Conditional):
    """
    ``ĉ_n = m d_n`` with one learned m at the cost ½ (m − 1 − log m) a row. Always a bound, whatever the likelihood, so
    that :func:`npgp.sample` takes it too::

        conditional = npgp.conditionals.Shared()  # or "shared"
        npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional)

    .. code-block:: python

        def bound(conditional):
            gp = npgp.CollapsedGP(
                kernel, X, X[::10], npgp.Gaussian(scale=0.3), conditional=conditional
            )
            return gp.log_prob(y)


        shared = bound(npgp.conditionals.Shared())
        assert (
            bound(npgp.conditionals.Prior()) < shared < bound(npgp.conditionals.Tight()) + 1e-3
        )

    Source: with Gaussian noise and the best m, Artemev, Burt & van der Wilk 2021.
    """

    parameter: ClassVar[Parameter] = Parameter("residual_scale", 0.5, constraints.unit_interval)

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        assert parameter is not None
        cost = 0.5 * rows.likelihood.num_latents * (parameter - 1.0 - jnp.log(parameter))
        return rows.expected_log_prob(parameter * rows.residual.variance) - cost

    def penalty(self, residual: Residual, noise_variance: ArrayLike) -> jax.Array:
        variance = residual.variance
        return 0.5 * variance.shape[-1] * jnp.log1p(jnp.mean(variance / noise_variance))

    def is_bound(self, likelihood: Likelihood) -> bool:
        return True

    def residual_scale(self, parameter: ArrayLike | None) -> ArrayLike:
        assert parameter is not None
        return jnp.sqrt(parameter)


@pytree
class Published(Tight):
    """
    λ_n = 1/β with one learned β, as Bui, Ashman & Turner (2025) ran, for comparison: a bound for log-concave
    likelihoods only (docs/theory.md, section 2, has the counterexample)::

        conditional = npgp.conditionals.Published()  # or "published"
        npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional)

    .. code-block:: python

        assert npgp.conditionals.Published().is_bound(npgp.Poisson())
        assert not npgp.conditionals.Published().is_bound(npgp.StudentT(df=4.0, scale=1.0))
    """

    parameter: ClassVar[Parameter] = Parameter("residual_precision", 1.0, constraints.softplus_positive)

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        assert parameter is not None
        shape = jnp.shape(parameter) if rows.likelihood.num_latents == 1 else rows.mean.shape
        return site_terms(rows, of_present(jnp.broadcast_to(parameter, shape), rows))

    def is_bound(self, likelihood: Likelihood) -> bool:
        return likelihood.proof in ("gaussian", "log-concave")


@pytree
class Full(Tight):
    """
    One group of all rows, at O(N³): the ELBO of a q, so a bound for whatever likelihood. All rows at once::

        conditional = npgp.conditionals.Full()  # or "full"
        npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional)

    .. code-block:: python

        def bound(conditional):
            gp = npgp.CollapsedGP(
                kernel, X, X[::10], npgp.Gaussian(scale=0.3), conditional=conditional
            )
            return gp.log_prob(y)


        assert bound(npgp.conditionals.Tight()) < bound(npgp.conditionals.Full())

    Source: Bui, Ashman & Turner 2025, appendix A.
    """

    needs_all_rows: ClassVar[bool] = True

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        return exact_terms(rows, best_precision(rows))

    def supposes_own_residuals(self, likelihood: Likelihood) -> bool:
        return likelihood.proof in ("none", "single-peaked")

    def partition(self, num_rows: int) -> Groups:
        return single(num_rows)


@pytree
class Consecutive:
    """
    Groups of consecutive rows, of however many rows.

    .. code-block:: python

        # Of rows laid out group after group.
        each_four = npgp.conditionals.Grouped(npgp.conditionals.Consecutive(4))

    :param size: rows in a group.
    """

    size: int = static(1)

    def __str__(self) -> str:
        return str(self.size)

    def of_rows(self, num_rows: int) -> Groups:
        """The groups of so many rows."""
        if num_rows % self.size:
            raise ValueError(f"groups is {self.size}; it must divide the {num_rows} rows.")
        return consecutive(num_rows, self.size)


@pytree
class Grouped(Tight):
    """
    Site precisions in groups of neighboring rows: tighter than :class:`~npgp.conditionals.Tight`, and nearly as cheap
    up to 64 rows a group. Always a bound::

        groups = npgp.sparse.median_split(X, 32)  # once, before training
        grouped = npgp.conditionals.Grouped(groups)
        npgp.observe("y", f(X), likelihood, obs=y, conditional=grouped)

    .. code-block:: python

        def bound(conditional):
            gp = npgp.CollapsedGP(
                kernel, X, X[::10], npgp.Gaussian(scale=0.3), conditional=conditional
            )
            return gp.log_prob(y)


        assert bound(npgp.conditionals.Tight()) < bound(
            npgp.conditionals.Grouped(npgp.sparse.median_split(X, 8))
        )

    A minibatch consists of whole groups: lay the data out once by :meth:`npgp.sparse.Groups.arrange`, say
    ``Grouped(g)`` where each g consecutive rows are a group, and give ``fit`` the same ``group_size``.

    :param groups: a partition of the rows, or the number g of rows in each group of consecutive rows. Where all
        training inputs are at hand (:class:`npgp.CollapsedGP`) it may be left out: neighbors are then found by
        :func:`npgp.sparse.median_split`, in groups of the size that :func:`npgp.sparse.default_size` says.
    :raises TypeError: for what is neither.
    :raises ValueError: when used, for groups of other rows, or where there are none.

    Source: Gaussian noise: Bui & Titsias 2025. Other likelihoods: docs/theory.md, section 2.
    """

    groups: Groups | Consecutive | int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.groups, (Groups, Consecutive)) or self.groups is None:
            return
        try:
            size = checks.whole_number(self.groups, "groups")
        except TypeError:
            raise TypeError(
                f"groups is {self.groups!r:.80}; it must be a partition such as npgp.sparse.median_split(X, size), or "
                "the number of rows in each group of consecutive rows."
            ) from None
        object.__setattr__(self, "groups", Consecutive(size))

    def __repr__(self) -> str:
        return f"Grouped({'' if self.groups is None else self.groups})"

    def partition(self, num_rows: int) -> Groups:
        groups: Any = self.groups
        if groups is None:
            raise ValueError(
                "conditional='grouped' needs groups: npgp.conditionals.Grouped(npgp.sparse.median_split(X, size)), or "
                "npgp.conditionals.Grouped(g) where each g consecutive rows are a group."
            )
        return groups.of_rows(num_rows)  # type: ignore[no-any-return]

    def for_inputs(self, X: Any, num_features: int) -> Grouped:
        if self.groups is not None:
            return self
        if any(map(checks.is_traced, jax.tree.leaves(X))):
            raise ValueError(
                "X is traced, so no groups can be made of it: pass "
                "npgp.conditionals.Grouped(npgp.sparse.median_split(X, size))."
            )
        return replace(self, groups=median_split(X, default_size(num_features)))


@pytree
class Gain(Grouped):
    """
    What :class:`~npgp.conditionals.Grouped` gains over :class:`~npgp.conditionals.Tight`, which :func:`npgp.tighten`
    states: no bound by itself, but with the ``tight`` terms of all rows the bound of groups.

    :param groups: as of :class:`npgp.conditionals.Grouped`.
    """

    def row_terms(self, rows: ObservedRows, parameter: ArrayLike | None = None) -> jax.Array:
        alone = RowResidual(rows.residual.variance)
        if rows.likelihood.proof == "gaussian":  # the rest of the terms is one and the same
            precision = certified_precision(rows)
            return alone.cost(precision) - rows.residual.cost(precision)
        return super().row_terms(rows, parameter) - super().row_terms(rows._replace(residual=alone), parameter)

    def penalty(self, residual: Residual, noise_variance: ArrayLike) -> jax.Array:
        return Conditional.penalty(self, residual, noise_variance)  # which says that there is none


_BY_WORD: dict[str, type[Conditional]] = {
    cls.__name__.lower(): cls for cls in (Prior, Tight, Grouped, Full, Shared, Published)
}


def as_conditional(conditional: Any) -> Conditional:
    """
    A conditional from what a user may pass as one: an object, or the word for one that needs no arguments.

    :raises TypeError: for what is neither.
    :raises ValueError: for a word that is unknown.
    """
    if isinstance(conditional, Conditional):
        if jax.tree_util.all_leaves([conditional]):
            raise TypeError(f"conditional is of class {type(conditional).__name__}, which must be under @npgp.pytree.")
        return conditional
    accepted = ", ".join(map(repr, _BY_WORD))
    if not isinstance(conditional, str):
        raise TypeError(
            f"conditional is {conditional!r:.80}; it must be an npgp.conditionals.Conditional such as "
            f"npgp.conditionals.Tight(), or one of {accepted}."
        )
    if conditional not in _BY_WORD:
        raise ValueError(
            f"conditional is {conditional!r}; it must be one of {accepted}, or an npgp.conditionals.Conditional."
        )
    return _BY_WORD[conditional]()
