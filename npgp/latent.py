"""GP values at rows, before they are integrated out or sampled: linear combinations of draws and offsets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from npgp import linalg
from npgp.groups import Groups
from npgp.residuals import GroupResidual

if TYPE_CHECKING:
    from npgp.component import Function

__all__ = ["Latent", "Moments", "as_latent"]


class Moments(NamedTuple):
    """Row by row: mean, variance that comes from ε, and the residual's prior variance; shapes (..., N)."""

    mean: jax.Array
    variance: jax.Array
    residual: jax.Array


class Latent:
    """
    GP values at N rows that are neither integrated out nor sampled yet: ``f(X)``, and sums and multiples of these.

    ``f(X) + g(X2) + offset``, ``a * f(X)`` and differences are Latents. For any other expression, turn it into an
    array with :func:`npgp.sample` first.
    """

    # NumPy and JAX arrays on the left leave the operation to this class.
    __array_ufunc__ = None
    __array_priority__ = 1000

    def __init__(self, terms: tuple[tuple[jax.Array, Function, jax.Array], ...], offset: jax.Array):
        self.terms, self.offset = terms, offset
        try:
            self.shape  # noqa: B018
        except ValueError:
            shapes = [f"{f.gp.name}: {(*f.batch_shape, X.shape[0])}" for _, f, X in terms]
            raise ValueError(
                f"cannot add values at different rows: {', '.join(shapes)}, offset {jnp.shape(offset)}."
            ) from None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values, (..., N)."""
        shapes = [np.broadcast_shapes(jnp.shape(a), (*f.batch_shape, X.shape[0])) for a, f, X in self.terms]
        return np.broadcast_shapes(*shapes, jnp.shape(self.offset))

    def __repr__(self):
        names = " + ".join(f.gp.name for _, f, _ in self.terms)
        return f"<{names} at rows, shape {self.shape}; an array only after npgp.sample(...)>"

    def __add__(self, other):
        if isinstance(other, Latent):
            return Latent(self.terms + other.terms, self.offset + other.offset)
        return Latent(self.terms, self.offset + jnp.asarray(other))

    def __mul__(self, other):
        if isinstance(other, Latent):
            raise TypeError("a product of GP values is not Gaussian: npgp.sample one of the factors first.")
        other = jnp.asarray(other)
        return Latent(tuple((a * other, f, X) for a, f, X in self.terms), self.offset * other)

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + (-other)

    def __rsub__(self, other):
        return -self + other

    def __truediv__(self, other):
        return self * (1.0 / jnp.asarray(other))

    __radd__ = __add__
    __rmul__ = __mul__

    @property
    def functions(self) -> list[Function]:
        """The draws that occur."""
        return [f for _, f, _ in self.terms]

    @property
    def variational(self) -> bool:
        """Whether a guide gave q for any of the draws."""
        return any(f.q is not None for f in self.functions)

    @property
    def guided(self) -> bool:
        return any(f.guided for f in self.functions)

    def check_independent(self) -> None:
        """Raise ``ValueError`` if one draw occurs twice: its values at two inputs are not independent."""
        if len(set(map(id, self.functions))) < len(self.terms):
            name = next(f.gp.name for f in self.functions if self.functions.count(f) > 1)
            raise ValueError(f"the draw of {name} occurs twice in one sum; npgp.sample its values first.")

    def check_unshared(self) -> None:
        """Raise ``ValueError`` if one draw serves several outputs: their residuals are one and the same."""
        for _, f, X in self.terms:
            if math.prod((*f.batch_shape, X.shape[0])) < math.prod(self.shape):
                raise ValueError(
                    f"{f.gp.name} is spread over several outputs, which share its residual: npgp.sample {f.gp.name} by "
                    "itself, and multiply the values."
                )

    def moments(self) -> Moments:
        """Moments of the combination, the draws being independent; each of shape :attr:`shape`."""
        self.check_independent()
        mean = self.offset
        variance = residual = jnp.zeros((), mean.dtype)
        for a, f, X in self.terms:
            m = f.moments(X)
            mean = mean + a * m.mean
            variance = variance + jnp.square(a) * m.variance
            residual = residual + jnp.square(a) * m.residual
        return Moments(*(jnp.broadcast_to(v, self.shape) for v in (mean, variance, residual)))

    def group_residual(self, groups: Groups) -> GroupResidual:
        """The residual's prior within groups of rows, where guides gave q for all draws."""
        parts = []
        for a, f, X in self.terms:
            D = f.group_covariance(X, groups)
            if a.ndim:
                scale = groups.gather(jnp.broadcast_to(a, (*a.shape[:-1], X.shape[0])))
                D = scale[..., :, None] * D * scale[..., None, :]
            else:
                D = jnp.square(a) * D
            parts.append(D)
        return GroupResidual(sum(parts[1:], parts[0]), groups)

    def residual_factor(self, joint: bool, keep: Sequence[Sequence[bool]]) -> jax.Array:
        """
        A square root of the residual's covariance at the rows: a factor (..., N, N) if joint, else standard
        deviations (..., N).

        :param keep: for each term, the blocks that are projected out.
        """
        parts = []
        for (a, f, X), blocks in zip(self.terms, keep, strict=True):
            projection = f.project(X)
            if joint:
                D = f.projector.residual_covariance(X, projection.A, blocks)
                scale = jnp.broadcast_to(a, (*jnp.shape(a)[:-1], X.shape[0]))
                parts.append(scale[..., :, None] * D * scale[..., None, :])
            else:
                parts.append(jnp.square(a) * projection.residual_variance(blocks))
        total = sum(parts[1:], parts[0])
        if not joint:
            return jnp.sqrt(jnp.maximum(total, jnp.finfo(total.dtype).tiny))
        # Relative to the prior variance: the residual vanishes at inducing points.
        prior = sum(jnp.mean(jnp.square(a) * f.project(X).prior_variance) for a, f, X in self.terms)
        return linalg.cholesky(total, scale=jnp.broadcast_to(prior, total.shape[:-2]))[0]


def as_latent(latent: object, where: str) -> Latent:
    """Pass a Latent through; anything else is an error that says what is accepted."""
    if isinstance(latent, Latent):
        return latent
    raise TypeError(
        f"{where} was given a {type(latent).__name__}; it takes GP values at rows, such as f(X) or "
        "f(X) + g(X2) + offset, where f = SparseGP(...).draw()."
    )
