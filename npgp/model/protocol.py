"""What a draw of f offers to what is said about its values at rows."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from npgp.sparse.groups import Groups
from npgp.sparse.ragged import MemberRows

__all__ = ["Draw", "Given", "Moments"]


class Moments(NamedTuple):
    """
    Row by row: mean, variance that comes from ε, and the residual's prior variance; (..., N), or (N,) for what is the
    same for all functions.
    """

    mean: jax.Array
    variance: jax.Array
    residual: jax.Array


class Given(NamedTuple):
    """
    f at rows, given its drawn inducing values.

    :param mean: the mean, (..., N).
    :param residual: what is left: variances (N,), or the covariance (N, N) if it is wanted jointly over rows; batch +
        that for functions with a kernel each.
    :param prior: f's own variance, (N,), likewise.
    :param weights: the rows' projections on values that were sampled before, (..., n, N), which mean and residual are
        given; ``None`` if there were none.
    """

    mean: jax.Array
    residual: jax.Array
    prior: jax.Array
    weights: jax.Array | None = None


class Draw(Protocol):
    """
    What a draw of f must offer for its values at rows to be used.

    Rows are whatever the component makes of inputs X (N, D), something whose ``shape`` is that of X.
    """

    @property
    def name(self) -> str:
        """What messages call f."""
        ...

    @property
    def source(self) -> Draw:
        """The draw itself; of chosen rows of functions in a plate, the draw of these functions."""
        ...

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the plates that f was drawn in, less the dimension of rows."""
        ...

    @property
    def variational(self) -> bool:
        """Whether a guide gave q."""
        ...

    @property
    def guided(self) -> bool:
        """Whether this is a guide."""
        ...

    @property
    def fixed(self) -> bool:
        """Whether ``do`` or ``condition`` gave inducing values."""
        ...

    @property
    def substituted(self) -> str | None:
        """The site of inducing values that ``substitute`` gave, if it did."""
        ...

    @property
    def marginal_inputs(self) -> bool:
        """Whether the inputs of rows are draws from their marginals, row by row."""
        ...

    def moments(self, rows: Any, /, shared: bool = True) -> Moments:
        """
        Mean, variance from the inducing values, and residual variance at each row.

        :param shared: whether the variance includes that of :meth:`shared`.
        """
        ...

    def shared(self, rows: Any, /) -> jax.Array | None:
        """
        A root of f's covariance with others whose q is the same one, (K, N): products of its columns with those of
        another draw's are covariances. ``None`` if q is f's own.
        """
        ...

    def chosen(self, rows: MemberRows, /) -> Draw:
        """Of functions in a plate, one function for each row: a draw with values (N,)."""
        ...

    def group_covariance(self, rows: Any, groups: Groups, /) -> jax.Array:
        """The residual's prior covariance within groups of rows, (G, g, g) or batch + that; where a guide gave q."""
        ...

    def given(self, rows: Any, /, *, joint: bool, mean_only_in_residual: bool = False) -> Given:
        """
        f given the drawn inducing values.

        :param joint: whether the residual is wanted jointly over rows.
        :param mean_only_in_residual: take inducing features whose variance q leaves at the prior's at q's mean, and
            leave their variance to the residual.
        """
        ...
