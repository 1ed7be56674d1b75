"""The parameters of a q(ε) that follows the kernel, as the posterior given pseudo-data (npgp/variational/pseudo.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from numpyro.distributions import constraints

from npgp.features import InducingBlock
from npgp.model.coupling import coupled_mean
from npgp.model.plates import plate_shape
from npgp.variational.blocks import PSEUDO_NAMES, SCALE_CONSTRAINTS, BlockNormal
from npgp.variational.pseudo import pseudo_posterior

#: Suffix of the parameter that says that a block has pseudo-data.
VALUES = "pseudo_loc"


def declare_pseudo_data(
    site: str, block: InducingBlock, kind: str, init_scale: float, L: jax.Array, t: jax.Array | None
) -> BlockNormal:
    """
    q(ε) of one block given pseudo-data, whose parameters are declared; their batch is that of the enclosing plates.

    :param site: the whitened site.
    :param kind: ``"dense"`` or ``"diagonal"``: the precision of the pseudo-data's noise.
    :param init_scale: the noise's standard deviation at the start, as a share of the prior's.
    :param L: the factor of the block's residual covariance, or its diagonal.
    :param t: what the values are affine in.
    """
    dtype, batch, size = jnp.result_type(float), plate_shape(), block.size
    # The data's scale, so that the other parameters are near 1 whatever the units are. It does not follow the kernel.
    deviation = jnp.sqrt(jnp.sum(jnp.square(L)) / size).astype(dtype)
    one = jnp.eye(size, dtype=dtype) if kind == "dense" else jnp.ones(size, dtype)
    starts = {
        "unit": jnp.broadcast_to(deviation, (*batch, 1)),
        VALUES: jnp.zeros((*batch, size), dtype),
        PSEUDO_NAMES[kind]: jnp.broadcast_to(one, (*batch, *one.shape)),
    }
    if t is not None:
        starts["coupling"] = jnp.zeros((*batch, size, t.shape[0]), dtype)
    real = constraints.real
    rules = SCALE_CONSTRAINTS | {"unit": constraints.positive, VALUES: real, "coupling": real}

    def parameter(name: str) -> jax.Array:
        suffix = name.rsplit(".", 1)[1]
        value = numpyro.param(name, starts[suffix], constraint=rules[suffix])
        if jnp.shape(value)[-1:] != starts[suffix].shape[-1:] and suffix != "coupling":
            raise ValueError(
                f"{name} has shape {jnp.shape(value)}; it must be {starts[suffix].shape}: parameters of other inducing "
                "features cannot be used."
            )
        return value

    return _block(site, kind, init_scale, L, t, parameter)


def has_pseudo_data(params: Mapping[str, Any], site: str) -> bool:
    """Whether trained parameters of a whitened site are pseudo-data."""
    return f"{site}.{VALUES}" in params


def given_pseudo_data(
    site: str, kind: str, init_scale: float, L: jax.Array, t: jax.Array | None, params: Mapping[str, Any]
) -> BlockNormal:
    """q(ε) of one block at trained parameters; arguments as of :func:`declare_pseudo_data`."""

    def parameter(name: str) -> jax.Array:
        if name not in params:
            raise KeyError(f"params has no {name!r}, which the approximate posterior of {site} needs.")
        return params[name]

    return _block(site, kind, init_scale, L, t, parameter)


def _block(
    site: str, kind: str, init_scale: float, L: jax.Array, t: jax.Array | None, parameter: Callable[[str], jax.Array]
) -> BlockNormal:
    unit = parameter(f"{site}.unit")
    values = unit * parameter(f"{site}.{VALUES}")
    if t is not None:
        # Not in the unit: a level that rises by 1 takes 1 from the values, in whatever units.
        values = coupled_mean(f"{site}.coupling", values, parameter(f"{site}.coupling"), t)
    root = parameter(f"{site}.{PSEUDO_NAMES[kind]}")
    return pseudo_posterior(L, values, root / (init_scale * (unit[..., None] if kind == "dense" else unit)))
