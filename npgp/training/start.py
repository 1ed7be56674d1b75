"""The start of an ``SVI``: its first state, computed by one compiled program."""

from __future__ import annotations

from typing import Any

import jax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

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
    return one_program(
        lambda: svi.init(rng_key, *args, init_params=init_params, **kwargs),
        keepers=(svi,),
        # The model is the user's, and has all of the user's data.
        apart=(whole.model, whole.loss, whole.optim),
    )
