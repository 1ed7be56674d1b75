"""The start of an ``SVI``: its first state, computed by one compiled program."""

from __future__ import annotations

from typing import Any

import jax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from npgp.contract import set_transforms, transforms_of
from npgp.model.guides import set_up
from npgp.programs.compiled import one_program
from npgp.training.row_tables import LazySVI

__all__ = ["start"]


def start(
    svi: SVI | LazySVI, rng_key: jax.Array, args: tuple, kwargs: dict[str, Any], init_params: Any = None
) -> SVIState:
    """
    What ``svi.init`` returns, where NumPyro would have each operation of model and guide compiled by itself.

    :param svi: model, guide and optimizer.
    :param rng_key: as for ``svi.init``.
    :param args: positional arguments of a step, whose values the model sees.
    :param kwargs: keyword arguments of a step.
    :param init_params: as for ``svi.init``.
    """
    whole = svi.svi if isinstance(svi, LazySVI) else svi
    set_up(whole.guide, args, kwargs | whole.static_kwargs)

    def first():
        return svi.init(rng_key, *args, init_params=init_params, **kwargs), transforms_of(whole)

    state, transforms = one_program(first)
    set_transforms(whole, transforms)  # whose bounds the model may have computed
    return state
