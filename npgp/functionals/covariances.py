"""Prior covariances of rows, inputs or functionals, with each other and with inducing features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from npgp.chunks import entries_at_once, map_chunks, rows_within
from npgp.features import InducingBlock
from npgp.functionals.rows import Functionals, Piece, Rows
from npgp.kernels import Kernel
from npgp.linalg import transposed
from npgp.programs.backend import maximum
from npgp.programs.double import in_double_if

__all__ = ["covariance", "cross", "variance", "within_groups"]


def _of(rows: Rows, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return rows.of(function) if isinstance(rows, Functionals) else function(rows)


def cross(block: InducingBlock, kernel: Kernel, rows: Rows) -> jax.Array:
    """Covariance of inducing features with rows, (M, N)."""
    return _of(rows, lambda points: block.cross(kernel, points))


def covariance(kernel: Kernel, a: Rows, b: Rows | None = None) -> jax.Array:
    """Prior covariance of rows, (N, N'), or of the same rows (N, N)."""
    if isinstance(a, Functionals) or isinstance(b, Functionals):
        _check(kernel, a)
        _check(kernel, b)
        # Differences at close points are small beside the values.
        return in_double_if(True, _covariance, kernel, a, a if b is None else b)
    return kernel(a) if b is None else kernel(a, b)


def _covariance(kernel: Kernel, a: Rows, b: Rows) -> jax.Array:
    return _of(b, lambda Q: transposed(_of(a, lambda P: transposed(kernel(P, Q)))))


def variance(kernel: Kernel, rows: Rows) -> jax.Array:
    """Prior variance of each row, (N,), without the square matrix."""
    if not isinstance(rows, Functionals):
        return kernel.diag(rows)
    _check(kernel, rows)
    return in_double_if(True, _variance, kernel, rows)


def _variance(kernel: Kernel, rows: Functionals) -> jax.Array:
    pieces = rows.pieces
    own = [(piece.weights,) if piece.shared else (piece.points, piece.weights) for piece in pieces]

    def of_row(own: list[tuple[jax.Array, ...]]) -> jax.Array:
        arrays = [(piece.points, *arrays)[-2:] for piece, arrays in zip(pieces, own, strict=True)]
        row = Functionals(tuple(Piece(x, w[None], p.dim) for (x, w), p in zip(arrays, pieces, strict=True)))
        return _covariance(kernel, row, row)[0, 0]

    each = sum(piece.weights.shape[1] for piece in pieces) ** 2
    return maximum(map_chunks(jax.vmap(of_row), rows_within(entries_at_once(), each), own), 0.0)


def within_groups(kernel: Kernel, rows: Rows, groups: Any) -> jax.Array:
    """Prior covariance within groups of rows, (G, g, g)."""
    if not isinstance(rows, Functionals):
        return jax.vmap(kernel)(groups.gather_rows(rows))
    _check(kernel, rows)
    own = rows.take(jnp.asarray(groups.rows))
    return in_double_if(True, lambda kernel, own: jax.vmap(lambda a: _covariance(kernel, a, a))(own), kernel, own)


def _check(kernel: Kernel, rows: Rows | None) -> None:
    """Raise ``ValueError`` for derivatives of functions that have none."""
    dims = {piece.dim for piece in rows.pieces if piece.dim is not None} if isinstance(rows, Functionals) else set()
    if dims and not kernel.differentiable:
        raise ValueError(
            f"functions drawn from {type(kernel).__name__} have no derivative; those from Matern32, Matern52 and RBF "
            "have."
        )
    levels = dims & kernel.level_columns(rows.shape[1]) if dims and rows is not None else set()
    if levels:
        raise ValueError(f"column {min(levels)} holds levels of {type(kernel).__name__}: there is no derivative by it.")
