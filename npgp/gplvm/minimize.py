"""BFGS for many small problems side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import linalg

#: After so many evaluations without a decrease, a search ends: what is left is rounding.
PATIENCE = 12


class _Search(NamedTuple):
    """What is at work in each slot: the function's number, and where its search has come to."""

    number: jax.Array
    steps: jax.Array
    x: jax.Array
    f: jax.Array
    g: jax.Array
    H: jax.Array
    direction: jax.Array
    length: jax.Array
    idle: jax.Array


def minimize(
    function: Callable[[jax.Array, jax.Array], jax.Array],
    start: jax.Array,
    inverse: np.ndarray,
    largest: np.ndarray,
    num_steps: ArrayLike,
    tolerance: ArrayLike,
    *,
    slots: int,
    wanted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """
    Minimize many functions side by side, by BFGS with backtracking: ``slots`` of them at a time, and where one is done
    the next begins. Each has its own step size, and each step evaluates all once: while one goes back along its line,
    others go on.

    :param function: from arguments (S, P) and the numbers (S,) of the functions they are of, to (S,), each value of its
        own P arguments alone.
    :param start: of all functions, (N, P).
    :param inverse: a first guess of the inverse Hessians' diagonal, (P,).
    :param largest: the most that a step changes each argument by, (P,); infinity where there is no limit.
    :param num_steps: most evaluations of each function.
    :param tolerance: the decrease that is not worth another step.
    :param slots: S, or N if that is less. Many for the speed of large arrays; few, and fewer idle while the last are
        finished.
    :param wanted: which functions to minimize, (N,); all if omitted. The others are not evaluated.
    :return: arguments (N, P), values (infinite where none was finite, or not wanted), and whether these are minima.
    """
    dtype, (total, size) = start.dtype, start.shape
    slots = min(slots, total)
    eps = float(jnp.finfo(dtype).eps)
    inverse_largest = jnp.asarray(1.0 / largest, dtype)
    wanted = jnp.ones(total, bool) if wanted is None else wanted
    queue, waiting = jnp.argsort(~wanted, stable=True), jnp.sum(wanted)

    def dot(a, b):
        return jnp.sum(a * b, axis=-1)

    def begin(place: jax.Array) -> _Search:
        """Searches from these places of the queue on; beyond its end there is no function, and its number is N."""
        number = jnp.where(place < waiting, queue[jnp.minimum(place, total - 1)], total)
        x = start[jnp.minimum(number, total - 1)]
        H = jnp.broadcast_to(jnp.diag(jnp.asarray(inverse, dtype)), (*x.shape, size))
        infinite, ones, zeros = jnp.full(slots, jnp.inf, dtype), jnp.ones(slots, dtype), jnp.zeros_like(x)
        none = jnp.zeros(slots, int)
        return _Search(number, none, x, infinite, zeros, H, zeros, ones, none)

    def evaluate(x, number):
        values = function(x, jnp.minimum(number, total - 1))
        return jnp.sum(values), values

    def step(carry):
        begun, search, found = carry
        number, steps, x, f, g, H, direction, length, idle = search
        trial = x + length[..., None] * direction
        (_, f_new), g_new = jax.value_and_grad(evaluate, has_aux=True)(trial, number)
        finite = jnp.isfinite(f_new) & jnp.all(jnp.isfinite(g_new), axis=-1)
        accept = finite & (f_new <= f + 1e-4 * length * dot(g, direction))
        enough = jnp.maximum(tolerance, 10.0 * eps * jnp.abs(f_new))
        idle = jnp.where(accept & (f - f_new > enough), 0, idle + 1)

        H = jnp.where(accept[..., None, None], _updated(H, trial - x, g_new - g), H)
        x, g = (jnp.where(accept[..., None], new, old) for new, old in ((trial, x), (g_new, g)))
        f = jnp.where(accept, f_new, f)
        ahead = -linalg.matmul(H, g[..., None])[..., 0]
        to_gain = -0.5 * dot(g, ahead)
        ahead = ahead / jnp.maximum(1.0, jnp.max(jnp.abs(ahead) * inverse_largest, axis=-1))[..., None]
        direction = jnp.where(accept[..., None], ahead, direction)
        length = jnp.where(accept, 1.0, 0.5 * length)
        done = (accept & (to_gain <= enough)) | (idle >= PATIENCE)
        search = _Search(number, steps + 1, x, f, g, H, direction, length, idle)

        found = tuple(a.at[number].set(b, mode="drop") for a, b in zip(found, (x, f, done), strict=True))
        ended = done | (search.steps >= num_steps)
        after = begin(begun + jnp.cumsum(ended) - 1)
        search = jax.tree.map(lambda a, b: jnp.where(ended.reshape(slots, *(1,) * (a.ndim - 1)), b, a), search, after)
        return begun + jnp.sum(ended), search, found

    def unfinished(carry):
        return jnp.any(carry[1].number < total)

    found = start, jnp.full(total, jnp.inf, dtype), jnp.zeros(total, bool)
    return lax.while_loop(unfinished, step, (jnp.asarray(slots), begin(jnp.arange(slots)), found))[2]


def _updated(H: jax.Array, s: jax.Array, d: jax.Array) -> jax.Array:
    """
    BFGS's inverse Hessian after a step s that changed the gradient by d; H as it is if the function curves down there.

    ``(I − ρ s dᵀ) H (I − ρ d sᵀ) + ρ s sᵀ`` with ``ρ = 1/sᵀd`` (Nocedal & Wright 2006, eq. 6.17).
    """
    sd, lengths = jnp.sum(s * d, axis=-1), jnp.sum(s * s, axis=-1) * jnp.sum(d * d, axis=-1)
    curved = sd > jnp.sqrt(jnp.finfo(s.dtype).eps * lengths)
    rho = (1.0 / jnp.where(curved, sd, 1.0))[..., None, None]
    Hd = linalg.matmul(H, d[..., None])  # (..., P, 1)
    cross = s[..., :, None] * jnp.swapaxes(Hd, -1, -2)
    along = rho * (1.0 + rho * jnp.sum(d[..., None] * Hd, axis=-2, keepdims=True))
    new = H - rho * (cross + jnp.swapaxes(cross, -1, -2)) + along * s[..., :, None] * s[..., None, :]
    return jnp.where(curved[..., None, None], new, H)
