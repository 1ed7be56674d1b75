"""
The parameterizations of q(ε): what its parameters are called, and the q of one block that they give.

A parameter is called by its site and a part, ``f.u.loc``. Which parts a site has says how its q is parameterized, and
this file alone knows: by a mean and a scale, of whitened or unwhitened values; or by pseudo-data, so that q follows the
kernel (pseudo.py).
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
from npgp.variational.blocks import SCALE_CONSTRAINTS, SCALE_NAMES, BlockNormal, block_normal
from npgp.variational.pseudo import LOWER, SCALE, UNIT, VALUES, precision_root, pseudo_posterior
from npgp.variational.reports import reported

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
