"""Prior covariances of rows, inputs or functionals, with each other and with inducing features."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from npgp.chunks import entries_at_once, map_chunks, rows_within
from npgp.features import InducingBlock
from npgp.functionals.rows import (
    Functionals,
    Piece,
    Rows,
    applied,
    covariance,
    plain_covariance,
    require_differentiable,
)
from npgp.kernels import Kernel
from npgp.programs.backend import maximum
from npgp.programs.double import in_double_if

__all__ = ["covariance", "cross", "variance", "within_groups"]


def cross(block: InducingBlock, kernel: Kernel, rows: Rows) -> jax.Array:
    """Covariance of inducing features with rows, (M, N)."""
    return applied(rows, lambda points: block.cross(kernel, points))


def variance(kernel: Kernel, rows: Rows) -> jax.Array:
    """Prior variance of each row, (N,), without the square matrix."""
    if not isinstance(rows, Functionals):
        return kernel.diag(rows)
    require_differentiable(kernel, rows)
    return in_double_if(True, _variance, kernel, rows)


def _variance(kernel: Kernel, rows: Functionals) -> jax.Array:
    pieces = rows.pieces
    own = [(piece.weights,) if piece.shared else (piece.points, piece.weights) for piece in pieces]

    def of_row(own: list[tuple[jax.Array, ...]]) -> jax.Array:
        arrays = [(piece.points, *arrays)[-2:] for piece, arrays in zip(pieces, own, strict=True)]
        row = Functionals(tuple(Piece(x, w[None], p.dim) for (x, w), p in zip(arrays, pieces, strict=True)))
        return plain_covariance(kernel, row, row)[0, 0]

    # Of points that all rows share the covariance is there once.
    shared, apart = (sum(p.weights.shape[1] for p in pieces if p.shared == is_shared) for is_shared in (True, False))
    each = apart * (apart + shared) + shared
    return maximum(map_chunks(jax.vmap(of_row), rows_within(entries_at_once(), each), own), 0.0)


def within_groups(kernel: Kernel, rows: Rows, groups: Any) -> jax.Array:
    """Prior covariance within groups of rows, (G, g, g)."""
    if not isinstance(rows, Functionals):
        return jax.vmap(kernel)(groups.gather_rows(rows))
    require_differentiable(kernel, rows)
    own = rows.take(jnp.asarray(groups.rows))
    return in_double_if(True, lambda kernel, own: jax.vmap(lambda a: plain_covariance(kernel, a, a))(own), kernel, own)
