"""Shifting and scaling of data to mean 0 and standard deviation 1, by statistics of one pass over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from npgp.checks import is_traced
from npgp.pytrees import pytree

#: How many values are looked at together.
_VALUES_PER_BLOCK = 2**16


@pytree
class Standardizer:
    """
    The map x ↦ (x − mean) / scale, for inputs or targets; made from data by :meth:`of`.

    It makes NumPy arrays of NumPy arrays, in their own precision, which may be double where JAX has single, and with
    their mask, if they have one; and JAX arrays of JAX arrays, inside and outside of ``jit``. It belongs into one file
    with what was trained on its values: ``npgp.save(path, {"posterior": posterior, "inputs": inputs, "targets":
    targets})``.

    .. code-block:: python

        inputs = npgp.Standardizer.of(X)
        np.testing.assert_allclose(inputs(X).std(), 1.0)
        np.testing.assert_allclose(inputs.inverse(inputs(X)), X, atol=1e-12)

    :param mean: what is subtracted: (D,) for rows of D numbers, () for rows of one.
    :param scale: what the differences are divided by, of the same shape.
    """

    mean: Any
    scale: Any

    @classmethod
    def of(cls, data: Any, *, allow_nan: bool = False) -> Standardizer:
        """
        Means and standard deviations of the columns, in float64; columns that are constant are only shifted.

        One pass, in memory for some blocks of rows whatever the data. The deviations of each block are squared about
        the block's own mean, and blocks are merged by their means (Chan, Golub & LeVeque 1983, "Algorithms for
        computing the sample variance"), so that a large offset costs no digits of the standard deviation.

        :param data: (N, D) or (N,); an array, a map of a file (``numpy.memmap``), or whatever has a shape and gives
            slices of rows; or an iterable of such, whose rows are taken together, such as
            :meth:`npgp.training.Parquet.blocks`.
        :param allow_nan: leave NaN, infinities and masked values out of the statistics.
        :raises ValueError: without ``allow_nan``, for such values; for data without rows or numbers, and for
            columns without one that counts.
        """
        moments = _Moments()
        start = 0
        for number, array in enumerate([data] if hasattr(data, "shape") else data):
            if not getattr(array, "shape", ()):
                raise ValueError(
                    f"Part {number} of data is {'a single value' if np.ndim(array) == 0 else 'no array'}, of type "
                    f"{type(array).__name__}; an array of rows, or an iterable of such arrays, can be standardized."
                )
            for block in _blocks(array):
                _check(block, start, moments.origin, allow_nan)
                moments.add(block)
                start += len(block)
        return cls(*moments.result())

    def __call__(self, x):
        """
        (x − mean) / scale, in the dtype of ``x`` (a float type, for one of whole numbers).

        :param x: (…, D), or (…) if the mean has no columns.
        """
        return self._apply(lambda x, mean, scale: (x - mean) / scale, x)

    def inverse(self, z):
        """
        z · scale + mean: values, means, quantiles and samples in the units of the data.

        :param z: (…, D), or (…).
        """
        return self._apply(lambda z, mean, scale: z * scale + mean, z)

    def inverse_std(self, std):
        """
        Standard deviations in the units of the data.

        :param std: of standardized values, (…, D), or (…).
        """
        return self._apply(lambda std, _, scale: std * scale, std)

    def inverse_variance(self, variance):
        """
        Variances in the units of the data, squared.

        :param variance: of standardized values, (…, D), or (…).
        """
        return self._apply(lambda variance, _, scale: variance * scale**2, variance)

    @property
    def log_scale(self):
        """
        Σ log scale, a scalar: what is to be subtracted from the log density of a row of standardized values for that in
        the units of the data, and added to a negative log predictive density (NLPD) per row.
        """
        return (jnp if isinstance(self.scale, jax.Array) else np).log(self.scale).sum()

    def _apply(self, function, x):
        mean, scale = self.mean, self.scale
        if isinstance(x, jax.Array) or is_traced(mean) or is_traced(scale):
            x = jnp.asarray(x)
        else:
            x, mean, scale = np.asanyarray(x), np.asarray(mean), np.asarray(scale)
        if np.ndim(mean) and np.shape(x)[-np.ndim(mean) :] != np.shape(mean):
            raise ValueError(
                f"the values have shape {np.shape(x)}, and the Standardizer {np.shape(mean)[-1]} columns; their last "
                "axis must be these columns."
            )
        y = function(x, mean, scale)
        return y.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else y


def _blocks(array) -> Iterator[np.ndarray]:
    """Rows of an array, some at a time; NaN where they are masked."""
    at_once = max(1, _VALUES_PER_BLOCK // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, array.shape[0], at_once):
        block = array[start : start + at_once]
        yield np.ma.filled(block.astype(float), np.nan) if np.ma.is_masked(block) else np.asarray(block)


def _check(block: np.ndarray, start: int, earlier: np.ndarray | None, allow_nan: bool) -> None:
    """
    Raise for what has no mean.

    :param start: number of its first row.
    :param earlier: something of the shape of earlier rows.
    """
    rows = f"rows {start} to {start + len(block) - 1} of data"
    if block.dtype.kind not in "biuf" and not jnp.issubdtype(block.dtype, jnp.floating):
        raise ValueError(f"The {rows} are of {block.dtype}; real numbers can be standardized.")
    if earlier is not None and block.shape[1:] != earlier.shape:
        raise ValueError(f"The {rows} have shape {block.shape[1:]} each, and those before have {earlier.shape}.")
    if not allow_nan and not (finite := np.isfinite(block)).all():
        columns = np.unique(np.nonzero(~finite)[1]).tolist() if block.ndim > 1 else []
        where = f"columns {columns}" if len(columns) > 1 else f"column {columns[0]}" if columns else ""
        raise ValueError(
            f"{np.sum(~finite)} values in the {rows}{', in ' if where else ''}{where} are NaN, infinite or masked. "
            "Remove them, or pass allow_nan=True to leave them out of the statistics."
        )


class _Moments:
    """
    Number, mean, sum of squared deviations, least and greatest of the finite values of each column.

    Means are kept as differences from an origin near them: those of blocks differ by less than the rounding of a large
    offset.
    """

    origin: np.ndarray | None = None

    def add(self, block: np.ndarray) -> None:
        """Take in a block of rows."""
        x = block.astype(np.float64)
        finite = np.isfinite(x)
        low = np.min(x, axis=0, where=finite, initial=np.inf)
        high = np.max(x, axis=0, where=finite, initial=-np.inf)
        count = finite.sum(axis=0)
        at_least_one = np.maximum(count, 1)
        if self.origin is None:
            self.origin = np.sum(x, axis=0, where=finite) / at_least_one
            self.low, self.high = low, high
            self.count, self.mean, self.squares = (np.zeros(x.shape[1:]) for _ in range(3))
        x -= self.origin
        x[~finite] = 0.0
        mean = x.sum(axis=0) / at_least_one
        x -= mean
        x[~finite] = 0.0
        squares = np.square(x, out=x).sum(axis=0)

        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        share = count / np.maximum(self.count + count, 1)
        difference = mean - self.mean
        self.squares += squares + difference**2 * self.count * share
        self.mean += difference * share
        self.count += count

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations; of a constant column, that constant and 1."""
        if self.origin is None:
            raise ValueError("data have no rows.")
        if not np.all(self.count):
            raise ValueError(f"Columns {np.flatnonzero(self.count == 0).tolist()} of data have no finite value.")
        scale = np.sqrt(self.squares / self.count)
        # Where values differ in their last digits, squared deviations may be too small to be numbers.
        constant = (self.low == self.high) | (scale == 0)
        return np.where(constant, self.low, self.origin + self.mean), np.where(constant, 1.0, scale)
