"""Distributions whose event is all rows together: what plates and masks around them may mean."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import jax.numpy as jnp
import numpyro.distributions as dist

from npgp.contract import base_of, plates_around


class JointDensity:
    """
    Mixed into a distribution with one joint density over N rows, its event: in a plate over rows, or under a mask over
    them, NumPyro would take that density once for each row. Plates over several outputs, whose values have the plate's
    dimension, are right.
    """

    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    #: Whether its ``neighbors`` were found when it was made, as their number was given.
    searched = False

    def expand(self, batch_shape):
        """As ``Distribution.expand``."""
        batch_shape = tuple(batch_shape)
        return self if batch_shape == self.batch_shape else _Expanded(self, batch_shape)

    def mask(self, mask):
        """As ``Distribution.mask``."""
        return self if mask is True else _Masked(self, mask)

    def check_draw(self) -> None:
        """Raise ``ValueError`` if a plate of as many members as there are rows would draw it for each."""
        for name, _, size in getattr(self, "plates", _plates()):
            if (size,) == self.event_shape:
                raise ValueError(
                    f"{_name(self)} is one joint distribution of its {size} rows, and plate {name!r} of {size} members "
                    f"would draw it for each: state it outside the plate; or, if {size} such draws are wanted, give it "
                    f".expand([{size}]) before the plate."
                )


class _Expanded(JointDensity, dist.ExpandedDistribution):
    pytree_aux_fields = ("plates",)  # those in which it was expanded

    def __init__(self, base_dist: Any, batch_shape: tuple[int, ...] = ()):
        super().__init__(base_dist, batch_shape)
        shape = self.batch_shape
        self.plates = tuple(p for p in _plates() if -p[1] <= len(shape) and shape[p[1]] == p[2] > 1)

    def log_prob(self, value, intermediates=None):
        given = jnp.shape(value)[: -len(self.event_shape)]
        for name, dim, size in self.plates:
            if -dim > len(given) or given[dim] != size:
                _refuse(self, jnp.shape(value), f"plate {name!r}", size)
        return super().log_prob(value)

    def sample_with_intermediates(self, key, sample_shape=()):
        self.check_draw()
        return super().sample_with_intermediates(key, sample_shape)

    def rsample(self, key, sample_shape=()):
        self.check_draw()
        return super().rsample(key, sample_shape)


class _Masked(JointDensity, dist.MaskedDistribution):
    def log_prob(self, value, intermediates=None):
        given, whole = jnp.shape(value)[: -len(self.event_shape)], self.batch_shape
        if not isinstance(self._mask, bool) and given[len(given) - len(whole) :] != whole:
            _refuse(self, jnp.shape(value), "handlers.mask", math.prod(whole))
        return super().log_prob(value)


def _plates() -> tuple[tuple[str, int, int], ...]:
    """Name, dimension and number of members of the plates around."""
    return tuple((plate.name, plate.dim, plate.subsample_size) for plate in plates_around())


def _name(distribution: Any) -> str:
    return type(base_of(distribution)).__name__


def _refuse(distribution: Any, shape: tuple[int, ...], where: str, count: int) -> NoReturn:
    rows, whole = distribution.event_shape[0], distribution.batch_shape + distribution.event_shape
    raise ValueError(
        f"{_name(distribution)} is one joint density of its {rows} rows, which inside {where} would count {count} "
        f"times for values of shape {shape}: state it outside, and leave rows without an observation out; for several "
        f"outputs give values of shape {whole}."
    )
