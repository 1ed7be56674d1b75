"""BFGS for many small problems side by side."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import linalg

__all__ = ["minimize"]

#: After so many evaluations without a decrease, a search ends: what is left is rounding.
PATIENCE = 12


def minimize(
    function: Callable[[jax.Array], jax.Array],
    start: jax.Array,
    inverse: np.ndarray,
    largest: np.ndarray,
    num_steps: int,
    tolerance: ArrayLike,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """
    Minimize many functions side by side, by BFGS with backtracking. Each has its own step size, and each step evaluates
    all of them once: while one goes back along its line, others go on.

    :param function: from (..., P) to (...), each value a function of its own P arguments alone.
    :param start: (..., P).
    :param inverse: a first guess of the inverse Hessians' diagonal, (P,).
    :param largest: the most that a step changes each argument by, (P,); infinity where there is no limit.
    :param num_steps: most evaluations.
    :param tolerance: the decrease that is not worth another step.
    :return: arguments, values (infinite where no value was finite), and whether these are minima.
    """
    dtype, batch = start.dtype, start.shape[:-1]
    eps = float(jnp.finfo(dtype).eps)
    inverse_largest = jnp.asarray(1.0 / largest, dtype)

    def evaluate(x):
        values = function(x)
        return jnp.sum(values), values

    def dot(a, b):
        return jnp.sum(a * b, axis=-1)

    def step(carry):
        count, x, f, g, H, direction, length, idle, done = carry
        trial = x + length[..., None] * direction
        (_, f_new), g_new = jax.value_and_grad(evaluate, has_aux=True)(trial)
        finite = jnp.isfinite(f_new) & jnp.all(jnp.isfinite(g_new), axis=-1)
        accept = ~done & finite & (f_new <= f + 1e-4 * length * dot(g, direction))
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
        done = done | (accept & (to_gain <= enough)) | (idle >= PATIENCE)
        return count + 1, x, f, g, H, direction, length, idle, done

    def unfinished(carry):
        return (carry[0] < num_steps) & ~jnp.all(carry[-1])

    H = jnp.broadcast_to(jnp.diag(jnp.asarray(inverse, dtype)), (*start.shape, start.shape[-1]))
    infinite, ones, zeros = jnp.full(batch, jnp.inf, dtype), jnp.ones(batch, dtype), jnp.zeros_like(start)
    first = (0, start, infinite, zeros, H, zeros, ones, jnp.zeros(batch, int), jnp.zeros(batch, bool))
    _, x, f, *_, done = lax.while_loop(unfinished, step, first)
    return x, f, done


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
