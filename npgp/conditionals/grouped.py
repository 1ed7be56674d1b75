"""The residual shrinks jointly within groups of neighboring rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.typing import ArrayLike

from npgp import checks
from npgp.conditionals.base import Conditional, ObservedRows
from npgp.conditionals.precision import certified_precision
from npgp.conditionals.tight import Tight
from npgp.pytrees import pytree, static
from npgp.sparse.groups import Groups, consecutive, default_size, median_split
from npgp.sparse.residuals import Residual, RowResidual


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
@dataclass(frozen=True, eq=False)
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
@dataclass(frozen=True, eq=False)
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
