"""
Coordinates in which the bound of a collapsed GPLVM is climbed in few steps.

A latent space in units of its lengthscales: ``μ/ℓ``, ``log(s/ℓ)`` and ``Z/ℓ`` are free, so that ``log ℓ`` changes only
the divergence from the prior, and pruning a dimension is one short way. Then each coordinate is scaled by about what
the bound changes with by 1: means and inducing inputs by the standard deviations of q(x), which differ by orders of
magnitude between dimensions and change as training goes, and so are taken anew now and then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to

Params = dict[str, jax.Array]

#: What is in units of the lengthscales.
IN_LENGTHSCALES = ("x.loc", "x.scale", "inducing")
#: An inducing input's scale in standard deviations of q(x): all rows around hold it.
INDUCING_SCALE = 0.5
#: Scales of logarithms of the noise variance, the lengthscales, and of all else. All rows hold them, and first steps
#: that go far in them end where all data are noise.
NOISE_SCALE, LENGTHSCALE_SCALE, SCALE = 0.05, 0.02, 0.15


class Coordinates:
    """
    From parameters of a collapsed GPLVM to free coordinates and back.

    :param constraints: of each parameter, by name.
    """

    def __init__(self, constraints: Mapping[str, Any]):
        self.transforms = {name: biject_to(constraint) for name, constraint in constraints.items()}

    def free(self, params: Mapping[str, jax.Array]) -> Params:
        """Coordinates of parameters, of the same names."""
        ell = params["lengthscale"]
        scaled = {name: value / ell if name in IN_LENGTHSCALES else value for name, value in params.items()}
        return {name: self.transforms[name].inv(value) for name, value in scaled.items()}

    def constrained(self, free: Mapping[str, jax.Array]) -> Params:
        """Parameters at coordinates."""
        scaled = {name: self.transforms[name](value) for name, value in free.items()}
        ell = scaled["lengthscale"]
        return {name: value * ell if name in IN_LENGTHSCALES else value for name, value in scaled.items()}

    def scales(self, free: Mapping[str, jax.Array]) -> Params:
        """About how far each coordinate is to go for the bound to change by 1."""
        logs = free["x.scale"]
        known = {
            "x.loc": jnp.exp(logs),
            "x.scale": jnp.ones(()),
            "inducing": INDUCING_SCALE * jnp.exp(jnp.mean(logs, axis=0)),
            "noise_variance": jnp.asarray(NOISE_SCALE),
            "lengthscale": jnp.asarray(LENGTHSCALE_SCALE),
        }
        return {name: known.get(name, jnp.asarray(SCALE)) for name in free}
