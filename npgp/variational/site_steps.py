"""
Natural steps for a q(ε) given pseudo-data (pseudo.py), whose q(u) depends on a draw of the hyperparameters θ.

Given θ and t, q(u) has the precision ``Λ + K(θ)⁻¹`` and the natural mean ``Λ z(t)``. Its Fisher information depends on
θ, the parameters do not. Natural steps at each draw, averaged, would take all draws for equally telling, though one
with a K(θ) of nearly no rank says next to nothing of Λ. So gradients, as they come from the draws, are preconditioned
by the Fisher information of one Gaussian that no draw decides on: ``N(m̄, S̄)``, ``S̄⁻¹ = Λ + K̄⁻¹``, ``S̄⁻¹ m̄ = Λ z``,
with K̄ the average of K over draws of steps before. Where θ is a point the step is the natural one.

The gradient in z is the ELBO's. That in Λ is its part through the covariance of q(u | θ). The other part, through the
mean, is the average over draws of the gradient in the mean times how far the prior pulls the mean away from z. At the
optimum it vanishes if K does not depend on θ, and is small if it does; far from there it is large, of either sign, and
drives Λ to where the loss of one draw forgets z.

All is done in ``v = Rᵀ u`` for the present root R of Λ, in which Λ is I. With ``T = Rᵀ K̄ R`` the reference's covariance
is ``Q⁻¹`` there, ``Q = I + T⁻¹``, and its mean is less than ``Rᵀ z`` by ``n = (I + T)⁻¹ Rᵀ z``. Let g be the gradient
in the natural mean, and G that in the precision. A step of rate ρ is

    W = I + ρ X,    X = −2 Q G Q,        R' R'ᵀ = R W Rᵀ,        z' = z − ρ R⁻ᵀ W⁻¹ (Q g + X n).

T has :data:`DAMPING` added: where the prior says a thousand times as much as the pseudo-data, these matter little, K̄
may be far from K(θ), and Q would be large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to, constraints

from npgp import linalg
from npgp.variational.parameterizations import parts
from npgp.variational.pseudo import LOWER, SCALE, UNIT, VALUES, precision_root
from npgp.variational.reports import Slot

#: What is added to T, the prior covariance in units of the pseudo-data's noise.
DAMPING = 1e-3
#: The number of steps that K̄ is the average of.
WINDOW = 20.0

_positive = biject_to(constraints.positive)


def sites_of(params: Mapping[str, Any]) -> list[str]:
    """The sites given by pseudo-data."""
    return [site for site, own in parts(params).items() if VALUES in own]


def held(site: str, params: Mapping[str, Any]) -> list[str]:
    """
    The parameters of a site that steps are about, by name. The unit stays as it is: were it to move, so would all
    values. What goes with t is not among them: a single draw of t says too little of it.
    """
    return [name for part in (VALUES, SCALE, LOWER, UNIT) if (name := f"{site}.{part}") in params]


# ---------------------------------------------------------------------------------------------------------------
# The average covariance


def start_average(site: str, q: Mapping[str, jax.Array]) -> jax.Array:
    """K̄ before any draw: of independent inducing values as wide as the prior was at the start; (..., M, M)."""
    return linalg.diagonal_matrix(jnp.square(_unit(site, q)))


def _unit(site: str, q: Mapping[str, jax.Array]) -> jax.Array:
    """Of each value the unit, (..., M)."""
    return jnp.broadcast_to(_positive(q[f"{site}.{UNIT}"]), q[f"{site}.{VALUES}"].shape)


def slot_for(site: str, q: Mapping[str, jax.Array], covariance: jax.Array) -> Slot:
    """The slot for a site's report."""
    like = covariance if f"{site}.{LOWER}" in q else q[f"{site}.{SCALE}"]
    return Slot(jnp.zeros_like(like), jnp.zeros_like(covariance), jnp.zeros((), covariance.dtype))


def average(covariance: jax.Array, report: Slot, step: jax.Array) -> jax.Array:
    """K̄ after a step; as it is if nobody has reported, or a number is not finite."""
    weight = jnp.maximum(1.0 / (step + 1.0), 1.0 / WINDOW).astype(covariance.dtype)
    new = covariance + weight * (report.covariance / jnp.maximum(report.draws, 1.0) - covariance)
    return jnp.where((report.draws > 0.0) & jnp.all(jnp.isfinite(new)), new, covariance)


# ---------------------------------------------------------------------------------------------------------------
# The step


class Direction:
    """
    Where the steps from a point lead, whatever their rate.

    :param site: the whitened site.
    :param q: unconstrained parameters, with those of :func:`held`.
    :param grads: gradients of the loss in these.
    :param in_precision: G, the gradient in W of a report.
    :param covariance: K̄, (..., M, M).
    """

    def __init__(
        self,
        site: str,
        q: Mapping[str, jax.Array],
        grads: Mapping[str, jax.Array],
        in_precision: jax.Array,
        covariance: jax.Array,
    ):
        self.site, self.dense = site, f"{site}.{LOWER}" in q
        self.unit, self.values = _unit(site, q), q[f"{site}.{VALUES}"]
        self.root = root = precision_root(_positive(q[f"{site}.{SCALE}"]), q.get(f"{site}.{LOWER}"))
        if self.dense:
            half = linalg.lower_matmul(root, covariance, transpose=True)
            T = linalg.lower_matmul(root, linalg.transposed(half), transpose=True)
        else:
            T = root[..., None] * covariance * root[..., None, :]
        identity = jnp.broadcast_to(jnp.eye(T.shape[-1], dtype=T.dtype), T.shape)
        # Rounding in T is relative to |R|ᵀ |K̄| |R|, which is at most v vᵀ, and much more than T where values that the
        # prior has nearly equal are known by their differences.
        deviation = jnp.sqrt(linalg.diagonal(covariance))
        v = _times(linalg.transposed(jnp.abs(root)), deviation) if self.dense else root * deviation
        damping = DAMPING + jnp.finfo(T.dtype).eps * jnp.sum(jnp.square(v), axis=-1)
        T = 0.5 * (T + linalg.transposed(T)) + damping[..., None, None] * identity
        inverse = linalg.gram(linalg.transposed(linalg.solve_lower(linalg.cholesky(T, jitter=0.0)[0], identity)))
        prior = linalg.cholesky(identity + T, jitter=0.0)[0]
        pull = _solve_twice(prior, self._transposed_times(self.unit * self.values))  # n
        slope = self._solve(grads[f"{site}.{VALUES}"] / self.unit)  # g
        slope = slope + _times(inverse, slope)
        if self.dense:
            half = in_precision + linalg.matmul(inverse, in_precision)
            half = half + linalg.matmul(half, inverse)
            self.X = -(half + linalg.transposed(half))
            self.shift = slope + _times(self.X, pull)
        else:
            # Of a diagonal W the Fisher information is ½ Q⁻¹ ∘ Q⁻¹, where Q⁻¹ = I − (I + T)⁻¹.
            left = linalg.gram(linalg.transposed(linalg.solve_lower(prior, identity)))
            information = linalg.cholesky(jnp.square(identity - left), jitter=0.0)[0]
            self.X = -2.0 * _solve_twice(information, in_precision)
            self.shift = slope + self.X * pull
        #: Without it no step is, at any rate.
        self.finite = jnp.all(jnp.isfinite(self.X)) & jnp.all(jnp.isfinite(self.shift))

    def step(self, rate: jax.Array) -> dict[str, jax.Array]:
        """Unconstrained parameters after a step; NaN if its precision is not positive definite."""
        if self.dense:
            factor = linalg.plain_cholesky(jnp.eye(self.X.shape[-1], dtype=self.X.dtype) + rate * self.X)
            root = linalg.lower_matmul(self.root, jnp.tril(factor))
            shift, noise = _solve_twice(factor, self.shift), 1.0 / linalg.diagonal(root)
        else:
            W = 1.0 + rate * self.X
            root, shift = self.root * jnp.sqrt(W), self.shift / W
            noise = 1.0 / root
        values = self.values - rate * self._solve(shift, transpose=True) / self.unit
        new = {f"{self.site}.{VALUES}": values, f"{self.site}.{SCALE}": _positive.inv(noise)}
        if self.dense:
            new[f"{self.site}.{LOWER}"] = jnp.tril(noise[..., None] * root, -1)
        return new

    def _transposed_times(self, x: jax.Array) -> jax.Array:
        """``Rᵀ x``."""
        return _times(linalg.transposed(self.root), x) if self.dense else self.root * x

    def _solve(self, x: jax.Array, transpose: bool = False) -> jax.Array:
        """``R⁻¹ x``, or ``R⁻ᵀ x``."""
        return _solve(self.root, x, transpose) if self.dense else x / self.root


def _times(A: jax.Array, x: jax.Array) -> jax.Array:
    return linalg.matmul(A, x[..., None])[..., 0]


def _solve(F: jax.Array, x: jax.Array, transpose: bool = False) -> jax.Array:
    return linalg.solve_lower(F, x[..., None], transpose=transpose)[..., 0]


def _solve_twice(F: jax.Array, x: jax.Array) -> jax.Array:
    """``(F Fᵀ)⁻¹ x``."""
    return _solve(F, _solve(F, x), transpose=True)
