"""
The parameterizations of q(ε): what its parameters are called, and the q of one block that they give.

A parameter is called by its site and a part, ``f.u.loc``. Which parts a site has says how its q is parameterized, and
this file alone knows: by a mean and a scale, of whitened or unwhitened values; or by pseudo-data, so that q follows the
kernel.

q(ε) that follows the kernel's hyperparameters is the posterior given pseudo-data, ``q(u | θ) ∝ p_θ(u) N(z; u, Σ)``.

What the data say about function values does not depend on the hyperparameters θ. So the parameters are a value z for
each inducing value u, and the precision ``Λ = Σ⁻¹ = R Rᵀ`` of their noise; and the prior given θ does the rest. With
``u = L ε``, L the factor of the block's residual covariance at θ, and ``H = Rᵀ L``,

    S = (I + Hᵀ H)⁻¹,        m = S Hᵀ Rᵀ z.

In natural parameters these are the sites ``exp(λᵀu − ½ uᵀ Λ u)``, ``λ = Λ z`` (the dual parameterization of Adam,
Chang, Khan & Solin 2021). Values are what training finds its way in: they have the scale of the data wherever these
are many, where λ ranges over orders of magnitude; and a factor of Λ, since the inverse of a triangular factor of Σ
grows like a power of M while training has it wrong.

An optimizer wants to know of such a q at a step's draws: kernels, and gradients in covariances. A loss returns a
number, and may have drawn its hyperparameters inside ``vmap`` over particles, or ``scan``, from which nothing else gets
out. So the optimizer holds out slots of zeros, in the context around the loss; a block takes its slot as an argument
that changes nothing, and says in the backward pass, where the slot's gradient would be, what it has to say. Autodiff
sums that over draws, whatever these are made in, and counts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks, linalg
from npgp.context import context
from npgp.contract import name_here
from npgp.variational.blocks import (
    SCALE_CONSTRAINTS,
    SCALE_NAMES,
    BlockNormal,
    DenseNormal,
    DiagonalNormal,
    block_normal,
)

# ---------------------------------------------------------------------------------------------------------------
# Pseudo-data

#: Suffixes of the parameters of a block given by pseudo-data: of the values, which every such block has,
VALUES = "pseudo_loc"
#: of their noise's standard deviations, what the values are in units of,
SCALE, UNIT = "pseudo_scale", "unit"
#: and, of dense blocks, of the unit lower-triangular factor of its precision.
LOWER = "pseudo_lower"


def pseudo_posterior(L: jax.Array, values: jax.Array, root: jax.Array, diagonal: bool = False) -> BlockNormal:
    """
    q(ε) of one block given pseudo-data.

    :param L: the factor of the block's residual covariance, (M, M) or, with leading axes as z has, (..., M, M).
    :param values: z, (..., M).
    :param root: R, the lower factor of their precision, (..., M, M), or the roots of precisions (..., M).
    :param diagonal: whether L is the diagonal of a diagonal factor, (M,) or (..., M).
    """
    if root.ndim == values.ndim:
        if diagonal:
            precision = 1.0 + jnp.square(L * root)
            return DiagonalNormal(L * jnp.square(root) * values / precision, 1.0 / jnp.sqrt(precision))
        H, scaled = root[..., None] * L, root * values
    else:
        L = linalg.diagonal_matrix(L) if diagonal else L
        H = linalg.lower_matmul(root, L, transpose=True)
        scaled = linalg.matmul(jnp.swapaxes(root, -1, -2), values[..., None])[..., 0]
    transposed = jnp.swapaxes(H, -1, -2)
    factor = covariance_factor(linalg.gram(transposed))
    half = linalg.matmul(jnp.swapaxes(factor, -1, -2), linalg.matmul(transposed, scaled[..., None]))
    return DenseNormal(linalg.matmul(factor, half)[..., 0], factor)


def precision_root(scale: jax.Array, lower: jax.Array | None = None) -> jax.Array:
    """
    R, with rows ``(I + N)_i / σ_i``; its diagonal, without N.

    :param scale: σ, (..., M).
    :param lower: N in its strictly lower triangle, (..., M, M).
    """
    if lower is None:
        return 1.0 / scale
    return (jnp.tril(lower, -1) + jnp.eye(lower.shape[-1], dtype=lower.dtype)) * (1.0 / scale)[..., None]


@jax.custom_jvp
def covariance_factor(Omega: jax.Array) -> jax.Array:
    """The lower factor T of ``(I + Ω)⁻¹``, for positive semi-definite Ω (..., M, M)."""
    identity = jnp.eye(Omega.shape[-1], dtype=Omega.dtype)
    # I + Ω has a factor unless rounding is above 1.
    return linalg.inverse_of_reversed(linalg.cholesky(jnp.flip(Omega + identity, (-2, -1)), jitter=0.0)[0])


@covariance_factor.defjvp
def _(primals, tangents):
    # From dS = −S dΩ S: products only, where the gradient by way of F would take four more solves.
    T, dOmega = covariance_factor(*primals), tangents[0]
    dOmega = 0.5 * (dOmega + jnp.swapaxes(dOmega, -1, -2))
    inner = linalg.lower_matmul(T, linalg.matmul(dOmega, T), transpose=True)
    return T, -linalg.lower_matmul(T, linalg.lower_half(inner))


# ---------------------------------------------------------------------------------------------------------------
# Reports to an optimizer


class Slot(NamedTuple):
    """
    Zeros, to be differentiated in; their gradient is the report, summed over draws.

    :param precision: the gradient in W, for pseudo-data of precision ``R W Rᵀ``, at ``W = I``, by way of the covariance
        of q(ε) alone: its mean is held. (..., M, M); or (..., M) where R and W are diagonal.
    :param covariance: of the inducing values under the prior, (..., M, M), with the axes of the parameters' batch.
    :param draws: their number, ().
    """

    precision: jax.Array
    covariance: jax.Array
    draws: jax.Array


def reported(site: str, q: BlockNormal, L: jax.Array, root: jax.Array, diagonal: bool) -> BlockNormal:
    """
    A block's q(ε) as it is; where an optimizer asks for it, a report is made.

    :param site: the whitened site.
    :param q: given pseudo-data.
    :param L: the factor of the block's residual covariance, (..., M, M); or its diagonal, (..., M).
    :param root: R, the factor of the pseudo-data's precision, (..., M, M); or its diagonal, (..., M).
    :param diagonal: whether L is a diagonal.
    """
    slot = context().slots.get(name_here(site))
    if slot is None:
        return q
    loc, scale = q.arrays(q.batch_shape)
    factor = linalg.diagonal_matrix(L) if diagonal else L
    H = linalg.lower_matmul(root, factor, transpose=True) if root.ndim > loc.ndim else root[..., None] * factor
    return block_normal(q.kind, *_with_report((loc, scale), (H, linalg.gram(factor)), slot))


@jax.custom_vjp
def _with_report(q: tuple, seen: tuple, slot: Slot) -> tuple:
    return q


def _forward(q: tuple, seen: tuple, slot: Slot) -> tuple[tuple, tuple]:
    return q, (q, seen, slot)


def _backward(kept: tuple, gradient: tuple) -> tuple[tuple, tuple, Slot]:
    (loc, scale), (H, covariance), slot = kept
    in_scale = gradient[1]
    if scale.ndim == loc.ndim:
        scale, in_scale = (linalg.diagonal_matrix(each) for each in (scale, in_scale))
    # With S = F Fᵀ, S ∂ℓ/∂S S is F Φ Fᵀ, Φ symmetric with half of Fᵀ ∂ℓ/∂F below its diagonal. And ∂S/∂W is what makes
    # ∂ℓ/∂W of it: −H F Φ Fᵀ Hᵀ.
    Phi = linalg.lower_half(linalg.lower_matmul(scale, in_scale, transpose=True))
    HF = linalg.matmul(H, scale)
    half = -0.5 * linalg.matmul(HF, Phi + jnp.swapaxes(Phi, -1, -2))
    dense = slot.precision.ndim > loc.ndim
    precision = linalg.matmul(half, jnp.swapaxes(HF, -1, -2)) if dense else jnp.sum(half * HF, axis=-1)
    # One in each member of a ``vmap`` that has a covariance of its own: what has no axis there is not summed over it.
    draws = jnp.where(jnp.any(jnp.isnan(covariance)), 1.0, 1.0)
    sums = Slot(precision, jnp.broadcast_to(covariance, slot.covariance.shape), draws)
    sums = jax.tree.map(lambda value, zeros: value.astype(zeros.dtype), sums, slot)
    return gradient, (jnp.zeros_like(H), jnp.zeros_like(covariance)), sums


_with_report.defvjp(_forward, _backward)


# ---------------------------------------------------------------------------------------------------------------
# Parameters

#: The part that every mean has which is a parameter; that which every q by pseudo-data has is :data:`VALUES`.
LOC = "loc"
#: What of q follows other sites: its mean or the pseudo-data's values, and the pseudo-data's noise.
COUPLING, NOISE_COUPLING = "coupling", "noise_coupling"
#: Inducing points that were chosen from rows, where only their number is stated.
POINTS = "inducing"
#: Parts that all q by pseudo-data have.
PSEUDO_DATA = (VALUES, SCALE, UNIT)

#: Gives a parameter's value: of its part, how it starts, and its constraint.
Read: TypeAlias = Callable[[str, Callable[[], jax.Array], Any], jax.Array]
T = TypeVar("T")

_SITE = re.compile(r"\.(u\d*|v)$")


def site_names(component: str, count: int) -> tuple[str, ...]:
    """The sites of a component's blocks: ``f.u``, ``f.v`` for a second one, ``f.u1`` … for more."""
    suffixes = ("u", "v")[:count] if count <= 2 else tuple(f"u{i + 1}" for i in range(count))
    return tuple(f"{component}.{suffix}" for suffix in suffixes)


def parts(params: Mapping[str, T], sites: Collection[str] | None = None) -> dict[str, dict[str, T]]:
    """
    The parameters of each site, by their parts.

    :param params: parameters by name.
    :param sites: those wanted; all that are named as blocks of a component if omitted.
    """
    found: dict[str, dict[str, T]] = {}
    for name, value in params.items():
        site, _, part = name.rpartition(".")
        if _SITE.search(site) if sites is None else site in sites:
            found.setdefault(site, {})[part] = value
    return found


def has_pseudo_data(params: Collection[str], site: str) -> bool:
    """Whether trained parameters of a whitened site are pseudo-data."""
    return f"{site}.{VALUES}" in params


def trained_values(params: Mapping[str, Any], site: str, component: str) -> Read:
    """What reads trained parameters of a site, and raises ``KeyError`` for one that is missing."""

    def read(part: str, start: Callable[[], jax.Array], constraint: Any) -> jax.Array:
        if (name := f"{site}.{part}") not in params:
            raise KeyError(f"params has no {name!r}, which the approximate posterior of {component} needs.")
        return params[name]

    return read


class Block(NamedTuple):
    """
    A block of inducing values whose q has parameters.

    :param site: the whitened site.
    :param size: M.
    :param kind: the covariance of q: ``"dense"``, ``"diagonal"`` or ``"mean-only"``.
    :param init_scale: the standard deviation of q, or of the pseudo-data's noise, at the start, as a share of the
        prior's.
    :param whitened: whether a mean and a scale are those of whitened values.
    :param plates: the batch of the parameters.
    :param factor: computes the factor of the block's residual covariance, or its diagonal. For functions with a kernel
        each it has the axes of the parameters' batch in front.
    """

    site: str
    size: int
    kind: str
    init_scale: float
    whitened: bool
    plates: tuple[int, ...]
    factor: Callable[[], tuple[jax.Array, bool]]

    def q(self, read: Read, t: jax.Array | None, pseudo_data: bool) -> BlockNormal:
        """
        q(ε) of the block.

        :param read: gives the parameters.
        :param t: values of other sites that q follows, (T,); ``None`` if none.
        :param pseudo_data: whether it is a posterior given pseudo-data, unless values are unwhitened or q has a mean
            alone.
        """

        def checked(part: str, start: Callable[[], jax.Array], constraint: Any = constraints.real) -> jax.Array:
            value, own = read(part, start, constraint), (self.size,) * (2 if part in ("scale_tril", LOWER) else 1)
            if part != UNIT and jnp.shape(value)[-len(own) :] != own:
                raise ValueError(
                    f"{self.site}.{part} has shape {jnp.shape(value)}; it must be {own}, or a batch of these: "
                    "parameters of other inducing features cannot be used."
                )
            return value

        def coupled(part: str, shape: tuple[int, ...]) -> jax.Array:
            assert t is not None
            C = read(part, lambda: jnp.zeros((*shape, t.shape[0]), jnp.result_type(float)), constraints.real)
            return linear(f"{self.site}.{part}", C, t)

        by_data = pseudo_data and self.whitened and self.kind != "mean-only"
        return (self._by_pseudo_data if by_data else self._by_moments)(checked, None if t is None else coupled)

    def matrix(self) -> jax.Array:
        """The factor of the block's residual covariance, a matrix even if it is diagonal."""
        factor, diagonal = self.factor()
        return linalg.diagonal_matrix(factor) if diagonal else factor

    def _by_moments(self, read: Callable[..., jax.Array], coupled: Callable[..., jax.Array] | None) -> BlockNormal:
        dtype, kind = jnp.result_type(float), self.kind
        loc = read(LOC, lambda: jnp.zeros((*self.plates, self.size), dtype))
        shape, scale, L = jnp.shape(loc), None, None
        if coupled is not None:
            loc = loc + coupled(COUPLING, shape)
        if not self.whitened:
            L = self.matrix()

        def start() -> jax.Array:
            prior = jnp.eye(self.size, dtype=dtype) if L is None else L.astype(dtype)
            prior, own = (prior, 2) if kind == "dense" else (linalg.diagonal(prior), 1)
            return self.init_scale * jnp.broadcast_to(prior, (*shape[:-1], *prior.shape[prior.ndim - own :]))

        if kind != "mean-only":
            scale = read(SCALE_NAMES[kind], start, SCALE_CONSTRAINTS[SCALE_NAMES[kind]])
        if L is not None:
            loc = linalg.solve_lower(L, loc[..., None])[..., 0]
            if kind == "diagonal":
                assert scale is not None
                kind, scale = "dense", linalg.diagonal_matrix(scale)
            scale = None if scale is None else linalg.solve_lower(L, scale)
        return block_normal(kind, loc, scale)

    def _by_pseudo_data(self, read: Callable[..., jax.Array], coupled: Callable[..., jax.Array] | None) -> BlockNormal:
        (L, diagonal), size, batch, dtype = self.factor(), self.size, self.plates, jnp.result_type(float)

        def deviation() -> jax.Array:
            square = jnp.sum(jnp.square(L), axis=-1 if diagonal else (-2, -1)) / size
            return jnp.sqrt(square).astype(dtype)[..., None]

        # The data's scale, so that other parameters are near 1 whatever the units are. It does not follow the kernel.
        unit = read(UNIT, lambda: jnp.broadcast_to(deviation(), (*batch, 1)), constraints.positive)
        values = unit * read(VALUES, lambda: jnp.zeros((*batch, size), dtype))
        scale = read(
            SCALE, lambda: jnp.broadcast_to(self.init_scale * deviation(), (*batch, size)), constraints.positive
        )
        if coupled is not None:
            # Not in the unit: a level that rises by 1 takes 1 from the values, in whatever units.
            values = values + coupled(COUPLING, (*batch, size))
            # Data are worth the more, the less their noise: where its scale is sampled, that of pseudo-data follows it.
            scale = scale * jnp.exp(coupled(NOISE_COUPLING, batch))[..., None]
        lower = read(LOWER, lambda: jnp.zeros((*batch, size, size), dtype)) if self.kind == "dense" else None
        root = precision_root(scale, lower)
        return reported(self.site, pseudo_posterior(L, values, root, diagonal), L, root, diagonal)


def checked_values(t: ArrayLike) -> jax.Array:
    """Values of other sites that q(ε) follows, as a user gives them."""
    values = checks.to_device(t, "t", jnp.result_type(float))
    if values.ndim != 1:
        raise ValueError(f"t has shape {values.shape}; it must be a vector (T,) of the values that q(ε) follows.")
    return values


def linear(name: str, C: jax.Array, t: jax.Array) -> jax.Array:
    """``C t`` of C (..., T), whose name is that of the parameter."""
    if jnp.shape(C)[-1] != t.shape[0]:
        raise ValueError(f"{name} has shape {jnp.shape(C)}, but t has {t.shape[0]} values.")
    return linalg.matmul(C, t)
