"""The parameters of a q(ε) that follows the kernel, as the posterior given pseudo-data (npgp/variational/pseudo.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from numpyro.distributions import constraints

from npgp.features import InducingBlock
from npgp.model.coupling import coupled_mean, linear
from npgp.model.plates import plate_shape
from npgp.variational.blocks import BlockNormal
from npgp.variational.pseudo import LOWER, SCALE, UNIT, VALUES, precision_root, pseudo_posterior
from npgp.variational.reports import reported

#: Suffixes of the parameters that all such blocks have, the first of which says so.
PSEUDO_DATA = (VALUES, SCALE, UNIT)
#: Likewise of what blocks have that follow other sites: in the values, and in the noise.
COUPLING, NOISE_COUPLING = "coupling", "noise_coupling"


def declare_pseudo_data(
    site: str,
    block: InducingBlock,
    kind: str,
    init_scale: float,
    L: jax.Array,
    t: jax.Array | None,
    diagonal: bool = False,
) -> BlockNormal:
    """
    q(ε) of one block given pseudo-data, whose parameters are declared; their batch is that of the enclosing plates.

    :param site: the whitened site.
    :param kind: ``"dense"`` or ``"diagonal"``: the precision of the pseudo-data's noise.
    :param init_scale: the noise's standard deviation at the start, as a share of the prior's.
    :param L: the factor of the block's residual covariance; or its diagonal, if ``diagonal``. For functions with a
        kernel each these have the axes of the parameters' batch in front.
    :param t: what the values, and the logarithm of their noise's scale, are affine in.
    """
    size, batch = block.size, plate_shape()
    dtype = jnp.result_type(float)
    # The data's scale, so that the other parameters are near 1 whatever the units are. It does not follow the kernel.
    deviation = jnp.sqrt(jnp.sum(jnp.square(L), axis=-1 if diagonal else (-2, -1)) / size).astype(dtype)[..., None]
    starts = {
        UNIT: jnp.broadcast_to(deviation, (*batch, 1)),
        VALUES: jnp.zeros((*batch, size), dtype),
        SCALE: jnp.broadcast_to(init_scale * deviation, (*batch, size)),
    }
    if kind == "dense":
        starts[LOWER] = jnp.zeros((*batch, size, size), dtype)
    if t is not None:
        starts[COUPLING] = jnp.zeros((*batch, size, t.shape[0]), dtype)
        starts[NOISE_COUPLING] = jnp.zeros((*batch, t.shape[0]), dtype)
    real = constraints.real
    positive = constraints.positive
    rules = {UNIT: positive, VALUES: real, COUPLING: real, NOISE_COUPLING: real, SCALE: positive, LOWER: real}

    def parameter(name: str) -> jax.Array:
        suffix = name.rsplit(".", 1)[1]
        value = numpyro.param(name, starts[suffix], constraint=rules[suffix])
        if jnp.shape(value)[-1:] != starts[suffix].shape[-1:] and suffix not in (COUPLING, NOISE_COUPLING):
            raise ValueError(
                f"{name} has shape {jnp.shape(value)}; it must be {starts[suffix].shape}: parameters of other inducing "
                "features cannot be used."
            )
        return value

    return _block(site, kind, L, t, diagonal, parameter)


def has_pseudo_data(params: Mapping[str, Any], site: str) -> bool:
    """Whether trained parameters of a whitened site are pseudo-data."""
    return f"{site}.{VALUES}" in params


def given_pseudo_data(
    site: str, kind: str, L: jax.Array, t: jax.Array | None, params: Mapping[str, Any], diagonal: bool = False
) -> BlockNormal:
    """q(ε) of one block at trained parameters; arguments as of :func:`declare_pseudo_data`."""

    def parameter(name: str) -> jax.Array:
        if name not in params:
            raise KeyError(f"params has no {name!r}, which the approximate posterior of {site} needs.")
        return params[name]

    return _block(site, kind, L, t, diagonal, parameter)


def _block(
    site: str, kind: str, L: jax.Array, t: jax.Array | None, diagonal: bool, parameter: Callable[[str], jax.Array]
) -> BlockNormal:
    values, root = values_and_root(site, kind, t, parameter)
    return reported(site, pseudo_posterior(L, values, root, diagonal), L, root, diagonal)


def values_and_root(
    site: str, kind: str, t: jax.Array | None, parameter: Callable[[str], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The values z of pseudo-data, and the root R of their precision; its diagonal if that is diagonal."""
    unit = parameter(f"{site}.{UNIT}")
    values = unit * parameter(f"{site}.{VALUES}")
    scale = parameter(f"{site}.{SCALE}")
    if t is not None:
        # Not in the unit: a level that rises by 1 takes 1 from the values, in whatever units.
        values = coupled_mean(f"{site}.{COUPLING}", values, parameter(f"{site}.{COUPLING}"), t)
        # Data are worth the more, the less their noise: where its scale is sampled, that of pseudo-data follows it.
        scale = scale * jnp.exp(linear(f"{site}.{NOISE_COUPLING}", parameter(f"{site}.{NOISE_COUPLING}"), t))[..., None]
    return values, precision_root(scale, parameter(f"{site}.{LOWER}") if kind == "dense" else None)
