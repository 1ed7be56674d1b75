"""A likelihood for each of several outputs: columns of real numbers beside counts and classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import checks
from npgp.likelihoods.base import PROOFS, Likelihood
from npgp.likelihoods.factorized import as_likelihood
from npgp.likelihoods.numerics import floats
from npgp.pytrees import pytree, static


@pytree
@dataclass(frozen=True, eq=False)
class Columns(Likelihood):
    """
    A likelihood for each column of the data, for the values (..., D, N) of D functions drawn in a plate at dim −2:

    .. code-block:: python

        parts = [npgp.Gaussian(variance=0.1), npgp.Bernoulli(), npgp.Poisson()]
        npgp.likelihoods.Columns(parts, [[0, 1, 2], [3, 4], [5]])
        npgp.likelihoods.Columns(parts)  # one column each

    Arrays are split along axis −2, each part is asked once for all of its columns, and the results are put back in the
    order of the columns, in one floating dtype. So a part's parameters broadcast with its own columns: (columns, N).

    The ELBO is the sum of the parts', each with its own rule for the residual (:mod:`npgp.conditionals`).

    :param likelihoods: the parts, of one latent value each; also functions from f to a NumPyro distribution.
    :param columns: for each part, the numbers of its columns; together 0, …, D − 1, each once. If omitted, the parts
        have one column each, in order.
    :param num_nodes: nodes of the quadrature, for all parts that have any; each part's own if omitted, and then the
        largest of these is kept here.
    :raises TypeError: for what is no likelihood.
    :raises ValueError: for no parts, a part of several latent values, or columns that are not a partition.
    """

    likelihoods: Any  # stored as a tuple of likelihoods
    columns: Any = field(default=None, metadata={"static": True})  # stored as a tuple of tuples
    num_nodes: int = static(None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.likelihoods, Likelihood) or not isinstance(self.likelihoods, Iterable):
            raise TypeError(f"Columns likelihoods is {self.likelihoods!r:.80}; it must be a list of likelihoods.")
        parts = [as_likelihood(part) for part in self.likelihoods]
        for part in parts:
            if part.num_latents != 1:
                raise ValueError(
                    f"Columns takes likelihoods of one latent value per observation; {type(part).__name__} has "
                    f"{part.num_latents}."
                )
        columns = [[i] for i in range(len(parts))] if self.columns is None else self.columns
        columns = tuple(
            tuple(checks.whole_number(i, "a column", least=None) for i in np.ravel(group)) for group in columns
        )
        if not parts or len(columns) != len(parts):
            raise ValueError(f"Columns has {len(parts)} likelihoods and {len(columns)} groups of columns for them.")
        numbers = sorted(i for group in columns for i in group)
        if numbers != list(range(len(numbers))) or not all(columns):
            raise ValueError(
                f"Columns columns is {list(map(list, columns))}; it must have each of 0, …, D − 1 once, and no group "
                "that is empty."
            )
        if self.num_nodes:
            parts = [part.with_nodes(self.num_nodes) for part in parts]
        object.__setattr__(self, "likelihoods", tuple(parts))
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "num_nodes", max(getattr(part, "num_nodes", 0) for part in parts))

    @property
    def parts(self) -> tuple[Likelihood, ...]:
        return self.likelihoods

    @property
    def num_columns(self) -> int:
        """D."""
        return sum(map(len, self.columns))

    @property
    def proof(self) -> str:  # type: ignore[override]
        """The weakest of the parts'."""
        return min((part.proof for part in self.likelihoods), key=PROOFS.index)

    @property
    def precision(self) -> jax.Array:
        """One over the noise variance, (D, N) or (D, 1), where all parts are Gaussian."""
        return self._joined([part.precision for part in self.likelihoods])

    def by_part(self, fn: Callable[[Likelihood, Callable[..., Any]], Any]) -> Any:
        """
        ``fn(part, take)`` for each part, and what it returns put together.

        :param fn: returns an array that broadcasts to (..., columns of the part, N), or a tuple of these.
        :param fn.take: ``take(array, axis=-2)`` is the part's share of an array (..., D, N). What is the same for all
            columns, (..., 1, N) or (N,), stays as it is, and so does ``None``.
        :raises ValueError: if an array has another number of columns, or none has D.
        """
        found = False

        def share(columns: Any, array: Any, axis: Any = -2) -> Any:
            nonlocal found
            if array is None:
                return None
            shape = jnp.shape(array)
            if len(shape) < -axis or (shape[axis] == 1 and self.num_columns > 1):
                return array
            if shape[axis] != self.num_columns:
                raise ValueError(self._wanted(shape))
            found = True
            start, stop = columns[0], columns[-1] + 1
            consecutive = columns == tuple(range(start, stop))
            index = slice(start, stop) if consecutive else np.array(columns)
            return jnp.asarray(array)[(..., index, *[slice(None)] * (-1 - axis))]

        results = []
        for part, columns in zip(self.likelihoods, self.columns, strict=True):
            results.append(fn(part, lambda array, axis=-2, own=columns: share(own, array, axis)))
        if not found:
            raise ValueError(self._wanted("(N,)"))
        return jax.tree.map(lambda *values: self._joined(values), *results)

    def _wanted(self, shape: Any) -> str:
        return (
            f"Columns has likelihoods for {self.num_columns} columns, on the second axis from the end; an array of "
            f"shape {shape} was given."
        )

    def _joined(self, values: Sequence[jax.Array]) -> jax.Array:
        """Results of the parts, in the order of the columns."""
        arrays = [jnp.atleast_2d(value) for value in floats(*values)]
        lead = jnp.broadcast_shapes(*(a.shape[:-2] for a in arrays))
        (rows,) = jnp.broadcast_shapes(*(a.shape[-1:] for a in arrays))
        shapes = [(*lead, len(columns), rows) for columns in self.columns]
        joined = jnp.concatenate([jnp.broadcast_to(a, s) for a, s in zip(arrays, shapes, strict=True)], axis=-2)
        order = np.concatenate(self.columns)
        return joined if np.all(np.diff(order) == 1) else joined[..., np.argsort(order), :]

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        return self.by_part(lambda part, take: part.log_prob(take(f), take(y)))

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        """As always, but counts and labels are floating, as the other columns may be."""
        (f,) = floats(f)
        keys = iter(jax.random.split(rng_key, len(self.likelihoods)))
        return self.by_part(lambda part, take: part.sample(next(keys), take(f)).astype(f.dtype))

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        return self.by_part(lambda part, take: part.moments(take(mean), take(variance)))

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        return self.by_part(lambda part, take: part.expected_log_prob(*map(take, (y, mean, variance))))

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        return self.by_part(lambda part, take: part.log_marginal(*map(take, (y, mean, variance))))

    def expected_curvature(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        return self.by_part(lambda part, take: part.expected_curvature(*map(take, (y, mean, variance))))

    def site_curvature(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array | None:
        def either(part: Any, take: Any) -> Any:
            quick = part.site_curvature(*map(take, (y, mean, variance)))
            return part.expected_curvature(*map(take, (y, mean, variance))) if quick is None else quick

        if all(type(part).site_curvature is Likelihood.site_curvature for part in self.likelihoods):
            return None
        return self.by_part(either)

    def check(self, y: ArrayLike) -> None:
        """
        Raise ``ValueError`` if a column of y (..., D, N) has an impossible value; NaN (a masked row) and tracers pass.

        Of values without columns, (N,), only those raise that are impossible in every column.
        """
        if checks.is_traced(y):
            return
        values = np.asarray(checks.array(y, "y"), float)
        if values.ndim < 2:
            return self._check_anywhere(values)
        if values.shape[-2] != self.num_columns:
            raise ValueError(self._wanted(values.shape))
        for part, columns in zip(self.likelihoods, self.columns, strict=True):
            try:
                part.check(values[..., columns, :])
            except ValueError as error:
                raise ValueError(f"columns {', '.join(map(str, columns))}: {error}") from None

    def _check_anywhere(self, values: np.ndarray) -> None:
        possible = np.isnan(values)
        meanings: list[str] = []
        for part in self.likelihoods:
            somewhere, meaning = part._support(values)
            if checks.is_traced(somewhere):
                return
            possible, meanings = possible | np.asarray(somewhere), [*meanings, meaning]
        if not np.all(possible):
            wrong = np.extract(~possible, values)[0]
            accepted = " or ".join(dict.fromkeys(meanings))
            raise ValueError(f"y has the value {wrong:g}; in some column it must be {accepted}.")
