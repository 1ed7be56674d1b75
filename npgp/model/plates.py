"""Plates over rows and over functions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
from jax.typing import ArrayLike

from npgp import checks
from npgp.contract import plate_of_rows, plates_around


def plate(name: str, size: int, rows: ArrayLike | int | None = None, dim: int | None = None) -> numpyro.plate:
    """
    The plate over rows when minibatches are passed to the model as arguments:

    .. code-block:: python

        def model(X, y=None, *, size):
            with npgp.plate("data", size, rows=X.shape[0]):
                npgp.observe("y", f(X), likelihood, obs=y)

    Log densities inside are scaled by ``size / batch size``, as in ``numpyro.plate(subsample_size=…)``, but no indices
    are drawn.

    :param name: name of the plate.
    :param size: number of rows of the whole data set.
    :param rows: the row numbers of this batch, (B,), which ``with`` returns; or B alone, where the model needs no row
        numbers. All rows if omitted.
    :param dim: the plate's dimension; the rightmost free one if omitted.
    :raises TypeError: if ``size``, or a row's number, is no whole number.
    :raises ValueError: for an empty batch, or one larger than the data, and for rows that the data do not have.
    """
    size = checks.whole_number(size, f"plate {name!r}: size")
    if rows is None:
        return numpyro.plate(name, size, dim=dim)
    what = f"plate {name!r}: rows"
    if np.ndim(rows) == 0:
        must_be = f"the rows of a batch, between 1 and {size}, or their numbers"
        return plate_of_rows(name, size, jnp.arange(checks.whole_number(rows, what, most=size, must_be=must_be)), dim)
    if not 0 < np.shape(rows)[0] <= size:
        raise ValueError(f"plate {name!r}: the batch has {np.shape(rows)[0]} rows; it must have between 1 and {size}.")
    indices = jnp.asarray(checks.row_numbers(rows, what, size))
    return plate_of_rows(name, size, indices, dim)


def plate_shape() -> tuple[int, ...]:
    """Shape of the plates around."""
    sizes = {plate.dim: plate.subsample_size for plate in plates_around()}
    return tuple(sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0))


def check_plates(name: str, shape: tuple[int, ...], repeated: bool = False) -> None:
    """
    Raise ``ValueError`` if a plate around has another size than the values.

    :param repeated: whether values may be repeated for all members of a plate.
    """
    for around in plates_around():
        size = shape[around.dim] if -around.dim <= len(shape) else 1
        if size == 1 < around.subsample_size:
            if repeated:
                continue
            raise ValueError(
                f"{name} has GP values of shape {shape}, which plate {around.name!r} at dim={around.dim} would repeat "
                f"{around.subsample_size} times: state it outside that plate, or draw f in it (rows are at dim=-1, "
                "functions at dim=-2 and below)."
            )
        if size != around.subsample_size:
            batch = " (for batches passed as arguments there is npgp.plate)" if around.dim == -1 else ""
            raise ValueError(
                f"{name} has GP values of shape {shape}, but plate {around.name!r} at dim={around.dim} has "
                f"{around.subsample_size} members{batch}."
            )
