"""
Natural steps for a q(ε) given pseudo-data (pseudo.py), whose q(u) depends on a draw of the hyperparameters θ.

Given θ, q(u) has the precision ``Λ + K(θ)⁻¹`` and the natural mean ``Λ z``. Its Fisher information depends on θ, the
parameters do not: a natural step at each draw would end where the average of steps vanishes, which is not where the
ELBO is stationary. So the gradient, whose average over draws is that of the ELBO, is preconditioned by the Fisher
information of one Gaussian that no draw decides on: ``N(m̄, S̄)``, ``S̄⁻¹ = Λ + K̄⁻¹``, ``m̄ = S̄ Λ z``, with K̄ the
average of K over draws of steps before. Stationary points are those of the ELBO, and if θ is a point the step is the
natural one.

All is done in ``v = Rᵀ u`` for the present root R of Λ, in which Λ is I and steps are near I. With ``T = Rᵀ K̄ R`` the
reference is ``N(m̄, Q⁻¹)``, ``Q = I + T⁻¹``, and ``m̄ = ζ − n``, ``ζ = Rᵀ z``, ``n = (I + T)⁻¹ ζ``. Let g be the gradient
in the natural mean, and G that in the precision where m̄ is held. A step of rate ρ is

    W = I + ρ X,    X = −2 Q G Q,        R' R'ᵀ = R W Rᵀ,        z' = z − ρ R⁻ᵀ W⁻¹ (Q g + X n).

T has :data:`DAMPING` added: where the prior says ten times as much as the pseudo-data, these do not matter, K̄ may say
little of K(θ), and Q would be large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to, constraints

from npgp import linalg
from npgp.variational.pseudo import LOWER, SCALE, UNIT, VALUES
from npgp.variational.reports import Slot

__all__ = ["Direction", "empty_slot", "held", "mean_covariance", "start_covariance"]

#: What is added to the prior's precision-weighted covariance T.
DAMPING = 0.1
#: The average of K takes at least so much of each step's.
LEAST_WEIGHT = 0.05

_positive = biject_to(constraints.positive)


def held(site: str, params: Mapping[str, Any]) -> list[str]:
    """The parameters of a site that steps are about, by name. The unit stays as it is."""
    return [name for name in (f"{site}.{suffix}" for suffix in (VALUES, SCALE, LOWER, UNIT)) if name in params]


# ---------------------------------------------------------------------------------------------------------------
# The average covariance


def start_covariance(site: str, q: Mapping[str, jax.Array]) -> jax.Array:
    """K̄ before any draw: of independent inducing values as wide as the prior was at the start."""
    unit = _positive(q[f"{site}.{UNIT}"])
    return jnp.square(unit)[..., None] * jnp.eye(q[f"{site}.{VALUES}"].shape[-1], dtype=unit.dtype)


def empty_slot(covariance: jax.Array) -> Slot:
    """For the report of K."""
    return Slot(jnp.zeros_like(covariance), jnp.zeros((), covariance.dtype))


def mean_covariance(covariance: jax.Array, drawn: jax.Array, step: jax.Array) -> jax.Array:
    """K̄ after a step: the mean of all steps', and later of the last twenty or so."""
    weight = jnp.maximum(1.0 / (step + 1.0), LEAST_WEIGHT).astype(covariance.dtype)
    return covariance + weight * (drawn - covariance)


# ---------------------------------------------------------------------------------------------------------------
# The step


class _Parameters(NamedTuple):
    """z and R; the diagonal of R if it is diagonal."""

    values: jax.Array
    root: jax.Array


def _read(site: str, q: Mapping[str, jax.Array]) -> _Parameters:
    """From unconstrained parameters."""
    values = _positive(q[f"{site}.{UNIT}"]) * q[f"{site}.{VALUES}"]
    root = 1.0 / _positive(q[f"{site}.{SCALE}"])
    if f"{site}.{LOWER}" in q:
        lower = q[f"{site}.{LOWER}"]
        root = root[..., None] * (jnp.tril(lower, -1) + jnp.eye(lower.shape[-1], dtype=lower.dtype))
    return _Parameters(values, root)


def _written(site: str, parameters: _Parameters, unit: jax.Array) -> dict[str, jax.Array]:
    """Unconstrained parameters."""
    values, root = parameters
    dense = root.ndim > values.ndim
    diagonal = linalg.diagonal(root) if dense else root
    new = {f"{site}.{VALUES}": values / unit, f"{site}.{SCALE}": _positive.inv(1.0 / diagonal)}
    return new | ({f"{site}.{LOWER}": jnp.tril(root / diagonal[..., None], -1)} if dense else {})


def _times(A: jax.Array, x: jax.Array) -> jax.Array:
    return linalg.matmul(A, x[..., None])[..., 0]


def _solve(L: jax.Array, x: jax.Array, transpose: bool = False) -> jax.Array:
    return linalg.solve_lower(L, x[..., None], transpose=transpose)[..., 0]


def _transposed(A: jax.Array) -> jax.Array:
    return jnp.swapaxes(A, -1, -2)


class Direction:
    """
    Where the steps from a point lead, whatever their rate.

    :param site: the whitened site.
    :param q: unconstrained parameters, with those of :func:`held`.
    :param grads: gradients of the loss in these.
    :param covariance: K̄, (..., M, M).
    """

    def __init__(self, site: str, q: Mapping[str, jax.Array], grads: Mapping[str, jax.Array], covariance: jax.Array):
        self.site, self.unit = site, _positive(q[f"{site}.{UNIT}"])
        self.present = values, root = _read(site, q)
        self.dense = root.ndim > values.ndim
        written, pull = jax.vjp(lambda parameters: _written(site, parameters, self.unit), self.present)
        ((in_values, in_root),) = pull({name: grads[name] for name in written})
        identity = jnp.eye(values.shape[-1], dtype=values.dtype)
        if self.dense:
            inner = linalg.lower_half(linalg.lower_matmul(root, in_root, transpose=True))
            gradient = 0.5 * (inner + _transposed(inner))
            T = linalg.lower_matmul(
                root, _transposed(linalg.lower_matmul(root, covariance, transpose=True)), transpose=True
            )
        else:
            gradient = 0.5 * root * in_root
            T = root[..., None] * covariance * root[..., None, :]
        # Rounding in T is relative to the largest of its eigenvalues, which the trace bounds.
        damping = DAMPING + jnp.finfo(T.dtype).eps * jnp.trace(T, axis1=-2, axis2=-1)
        T = 0.5 * (T + _transposed(T)) + damping[..., None, None] * identity
        inverse_root = linalg.solve_lower(linalg.plain_cholesky(T), jnp.broadcast_to(identity, T.shape))
        inverse = linalg.gram(_transposed(inverse_root))
        prior = linalg.plain_cholesky(identity + T)
        rest = _solve(prior, _solve(prior, self._across(values)), transpose=True)  # n
        in_mean = self._solve(in_values)  # g
        moved = in_mean + _times(inverse, in_mean)
        if self.dense:
            outer = in_mean[..., None] * rest[..., None, :]
            gradient = gradient - 0.5 * (outer + _transposed(outer))
            half = gradient + linalg.matmul(inverse, gradient)
            X = -2.0 * (half + linalg.matmul(half, inverse))
            self.X = 0.5 * (X + _transposed(X))
            self.shift = moved + _times(self.X, rest)
        else:
            # Of a diagonal W the Fisher information is ½ Q⁻¹ ∘ Q⁻¹, where Q⁻¹ = I − (I + T)⁻¹.
            left = linalg.gram(_transposed(linalg.solve_lower(prior, jnp.broadcast_to(identity, T.shape))))
            information = linalg.plain_cholesky(jnp.square(identity - left))
            gradient = gradient - in_mean * rest
            self.X = -2.0 * _solve(information, _solve(information, gradient), transpose=True)
            self.shift = moved + self.X * rest

    def _across(self, x: jax.Array) -> jax.Array:
        """``Rᵀ x``."""
        root = self.present.root
        return _times(_transposed(root), x) if self.dense else root * x

    def _solve(self, x: jax.Array, transpose: bool = False) -> jax.Array:
        """``R⁻¹ x``, or ``R⁻ᵀ x``."""
        root = self.present.root
        return _solve(root, x, transpose) if self.dense else x / root

    def step(self, rate: jax.Array) -> dict[str, jax.Array]:
        """Unconstrained parameters after a step; NaN if its precision is not positive definite."""
        values, root = self.present
        if self.dense:
            W = jnp.eye(values.shape[-1], dtype=values.dtype) + rate * self.X
            factor = linalg.plain_cholesky(W)
            root = linalg.lower_matmul(root, jnp.tril(factor))
            moved = _solve(factor, _solve(factor, self.shift), transpose=True)
        else:
            W = 1.0 + rate * self.X
            root, moved = root * jnp.sqrt(W), self.shift / W
        values = values - rate * self._solve(moved, transpose=True)
        return _written(self.site, _Parameters(values, root), self.unit)
