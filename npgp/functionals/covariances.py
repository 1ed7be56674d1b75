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
    by_rows,
    covariance,
    plain_covariance,
    precisely,
    require_differentiable,
)
from npgp.kernels import Kernel
from npgp.linalg import matmul
from npgp.programs.backend import maximum

__all__ = ["covariance", "cross", "variance", "within_groups"]


def cross(block: InducingBlock, kernel: Kernel, rows: Rows) -> jax.Array:
    """Covariance of inducing features with rows, (M, N)."""
    return applied(rows, lambda points: block.cross(kernel, points))


def variance(kernel: Kernel, rows: Rows) -> jax.Array:
    """Prior variance of each row, (N,), without the square matrix."""
    if not isinstance(rows, Functionals):
        found = kernel.diag(rows)
        if jnp.shape(found)[-1:] != jnp.shape(rows)[-2:-1]:
            raise ValueError(
                f"{type(kernel).__name__}.diag(X) has shape {jnp.shape(found)}; it must be ({jnp.shape(rows)[-2]},), "
                "the prior variance of each row."
            )
        return found
    require_differentiable(kernel, rows)
    return precisely(_variance, kernel, rows)


def _variance(kernel: Kernel, rows: Functionals) -> jax.Array:
    pieces, (own, merged) = rows.pieces, by_rows(rows.pieces)

    def of_row(own: list[jax.Array]) -> jax.Array:
        row = [Functionals((Piece(p.points, p.weights[None], p.dim),)) for p in merged(own)]
        total = jnp.zeros((), rows.dtype)
        for i, a in enumerate(row):
            if pieces[i].dim is None and not pieces[i].shared:
                total += _quadratic(a.pieces[0].weights[0], kernel(a.pieces[0].points))
            else:
                total += plain_covariance(kernel, a, a)[0, 0]
            total += 2.0 * sum(plain_covariance(kernel, a, b)[0, 0] for b in row[:i])
        return total

    # Of points that all rows share the covariance is there once.
    shared, apart = (sum(p.weights.shape[-1] for p in pieces if p.shared == is_shared) for is_shared in (True, False))
    size = rows_within(entries_at_once(), apart * (apart + shared) + shared)

    def of_rows(own: list[jax.Array]) -> jax.Array:
        # One by itself not as a batch of one: XLA's batched products take three times as long on a CPU.
        return of_row([x[0] for x in own])[None] if size == 1 else jax.vmap(of_row)(own)

    return maximum(map_chunks(of_rows, size, own), 0.0)


@jax.custom_jvp
def _quadratic(w: jax.Array, K: jax.Array) -> jax.Array:
    """``wᵀ K w`` of a symmetric K; as sums, which XLA makes one loop of with K's exponential."""
    return jnp.sum(jnp.sum(K * w, axis=1) * w)


@_quadratic.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (w, K), (dw, dK) = primals, tangents
    # As products, which in reverse take .6 of the time that sums take.
    return _quadratic(w, K), jnp.dot(2.0 * matmul(K, w[:, None])[:, 0], dw) + jnp.dot(w, matmul(dK, w[:, None])[:, 0])


def within_groups(kernel: Kernel, rows: Rows, groups: Any) -> jax.Array:
    """Prior covariance within groups of rows, (G, g, g)."""
    if not isinstance(rows, Functionals):
        return jax.vmap(kernel)(groups.gather_rows(rows))
    require_differentiable(kernel, rows)
    own = rows.take(groups.rows)
    return precisely(lambda kernel, own: jax.vmap(lambda a: plain_covariance(kernel, a, a))(own), kernel, own)
