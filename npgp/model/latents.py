"""The latent values of observations: one for each, or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from npgp.functionals.rows import ADVICE_EACH
from npgp.likelihoods import Likelihood
from npgp.model.draw import Draw, Moments
from npgp.model.latent import Latent, as_latent
from npgp.model.sites import lost
from npgp.programs.tracing import current_trace
from npgp.sparse.groups import Groups
from npgp.sparse.residuals import GroupResidual


class Latents:
    """
    What an observation depends on: one latent value per observation, or C of them on a leading axis.

    :param parts: the latent values; one Latent, or one for each of the C.
    :param num_latents: C. One Latent of shape (C, ..., N) holds all C.
    """

    def __init__(self, parts: tuple[Latent, ...], num_latents: int):
        self.parts, self.num_latents = parts, num_latents
        #: Where the statement is made: inside a loop of JAX, its rows are unknown beyond that.
        self.here = current_trace()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the observations, (..., N)."""
        shape = np.broadcast_shapes(*(part.shape for part in self.parts))
        return shape if self.num_latents == 1 or len(self.parts) > 1 else shape[1:]

    @property
    def functions(self) -> list[Draw]:
        """The draws that occur."""
        return [function for part in self.parts for function in part.functions]

    @property
    def variational(self) -> bool:
        """Whether a guide gave q for any of the draws."""
        return any(f.variational for f in self.functions)

    @property
    def guided(self) -> bool:
        """Whether this is a guide."""
        return any(f.guided for f in self.functions)

    @property
    def fixed(self) -> bool:
        """Whether any draw has other inducing values than the guide's."""
        return any(f.fixed for f in self.functions)

    def check_drawn(self) -> None:
        """Raise ``ValueError`` if q would be taken in the place of values that ``substitute`` gave."""
        for f in self.functions:
            if f.variational and not f.guided and f.substituted is not None:
                raise ValueError(lost(f.substituted))

    def check_grouped(self, conditional: object) -> None:
        """Raise ``ValueError`` if rows are taken together whose inputs are drawn one by one."""
        for f in self.functions:
            if f.variational and f.marginal_inputs:
                raise ValueError(
                    f"conditional is {conditional!r}, which takes rows together, but what comes into {f.name} is drawn "
                    "row by row, and the bound would be none: DeepGP(..., joint=True), or npgp.conditionals.Tight()."
                )

    def check_independent(self) -> None:
        """Raise ``ValueError`` if one draw occurs twice: its values at two inputs are not independent."""
        functions = [function.source for function in self.functions]
        if len(set(map(id, functions))) < len(functions):
            name = next(f.name for f in functions if functions.count(f) > 1)
            where = "twice in one sum" if len(self.parts) == 1 else "twice in one observation"
            if any(term.places is not None for part in self.parts for term in part.terms):
                raise ValueError(
                    f"{name} occurs {where}, with [group, row] of different functions of its plate: draw one function "
                    "instead, of inputs with a last column for the function's number, and the kernel "
                    "npgp.kernels.Coregion(kernel, np.zeros((G, 1)), kappa=1.0), under which levels are independent."
                )
            each = any(len(term.X.shape) > 2 for part in self.parts for term in part.terms)
            advice = ADVICE_EACH if each else "; npgp.sample its values first"
            raise ValueError(f"the draw of {name} occurs {where}{advice}.")
        if self.num_latents > 1 and any(term.mixing is not None for part in self.parts for term in part.terms):
            raise ValueError(
                "the latent values of one observation are mixed of the same functions, and so not independent: "
                "npgp.sample the functions, mix the values, and observe with numpyro.sample."
            )
        if self.num_latents > 1 and len(self.parts) == 1:
            self.check_unshared()

    def check_unshared(self) -> None:
        """Raise ``ValueError`` if one draw serves several outputs: their residuals are one and the same."""
        for part in self.parts:
            part.check_unshared()

    def _stack(self, values: Sequence[jax.Array]) -> jax.Array:
        if len(self.parts) == 1:
            return values[0]
        # Over the axes of outputs and rows; samples have theirs before.
        shapes = [(*value.shape[: value.ndim - len(self.shape)], *self.shape) for value in values]
        return jnp.stack([jnp.broadcast_to(value, shape) for value, shape in zip(values, shapes, strict=True)])

    def moments(self) -> Moments:
        """Moments of the values, (..., N) or (C, ..., N)."""
        self.check_independent()
        return Moments(*map(self._stack, zip(*(part.moments() for part in self.parts), strict=True)))

    def group_residual(self, groups: Groups) -> GroupResidual:
        """The residual's prior within groups of rows, where guides gave q for all draws."""
        parts = [part.group_covariance(groups) for part in self.parts]
        if len(parts) > 1:
            # What is the same for all outputs is factorized once: no broadcasting to them.
            ndim = len(self.shape) + 2
            parts = [part.reshape((1,) * (ndim - part.ndim) + part.shape) for part in parts]
            parts = [jnp.stack(jnp.broadcast_arrays(*parts))]
        return GroupResidual(parts[0], groups)

    def simulate(self, rng_key: jax.Array, joint: bool, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """Values given the drawn ε: sample_shape + shape for one latent; C goes before all, as likelihoods want it."""
        keys = jax.random.split(rng_key, len(self.parts))
        drawn = [part.simulate(key, joint, sample_shape) for part, key in zip(self.parts, keys, strict=True)]
        if self.num_latents > 1 and len(self.parts) == 1:
            return jnp.moveaxis(drawn[0], len(sample_shape), 0)
        return self._stack(drawn)


def as_latents(latent: object, likelihood: Likelihood) -> Latents:
    """
    The latent values that a likelihood depends on.

    :raises TypeError: for what is neither GP values nor a tuple of them.
    :raises ValueError: for another number of latent values than the likelihood has.
    """
    several = isinstance(latent, (tuple, list))
    given: Any = latent if several else (latent,)
    parts = tuple(as_latent(part, "observe") for part in given)
    count = likelihood.num_latents
    found = len(parts) if several else parts[0].shape[0] if count > 1 and len(parts[0].shape) > 1 else 1
    if found != count:
        what = f"{found} {'are' if found > 1 else 'is'} given" + ("" if several else f", of shape {parts[0].shape}")
        raise ValueError(
            f"{type(likelihood).__name__} has {count} latent value{'s' * (count > 1)} per observation, but {what}: "
            "pass a tuple such as (f(X), g(X)), or a draw of as many functions."
        )
    latents = Latents(parts, count)
    try:
        latents.shape  # noqa: B018
    except ValueError:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise ValueError(f"the latent values of one observation have different shapes: {shapes}.") from None
    return latents
