"""Training a GPLVM from several starts: its bound has many local optima."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.typing import ArrayLike
from numpyro.infer import SVI, TraceMeanField_ELBO

from npgp import checks, training
from npgp.gplvm.model import BayesianGPLVM
from npgp.gplvm.start import Start

__all__ = ["Restarts", "fit_restarts"]


class Restarts(NamedTuple):
    """What :func:`fit_restarts` returns."""

    #: The GPLVM of the best start.
    gplvm: BayesianGPLVM
    #: Its ``SVI``.
    svi: SVI
    #: Its fit.
    result: training.FitResult
    #: ELBO of every start when one was chosen.
    elbos: list[float]


def fit_restarts(
    gplvm: BayesianGPLVM,
    starts: Sequence[Start],
    rng_key: jax.Array,
    num_steps: int,
    Y: ArrayLike,
    *,
    optim: optax.GradientTransformation,
    first_steps: int | None = None,
    loss: Any = None,
    **kwargs: Any,
) -> Restarts:
    """
    Train a GPLVM from each of several starts for some steps, and from the best of them to the end.

    :param gplvm: the GPLVM, whose own start is not used.
    :param starts: the starts, ``[npgp.gplvm.pca_start(key, ...), npgp.gplvm.random_start(key, ...), ...]``.
    :param rng_key: a JAX random key.
    :param num_steps: steps of the best start.
    :param Y: data, (N, D).
    :param optim: optimizer, ``npgp.adam(0.01, num_steps)``.
    :param first_steps: steps after which the best is chosen by its ELBO, a tenth of ``num_steps`` if omitted.
    :param loss: of ``SVI``; ``TraceMeanField_ELBO()`` if omitted.
    :param kwargs: for :func:`npgp.fit`: ``batch_size``, ``indices``, ``mask``, …
    :raises ValueError: if there are no starts, or fewer than one first step.
    :raises NonFiniteLossError: if no start could be trained; those that could not are passed over with a warning.
    """
    first = max(1, num_steps // 10) if first_steps is None else checks.whole_number(first_steps, "first_steps", least=0)
    if not starts or not 1 <= first <= num_steps:
        raise ValueError(
            f"starts has {len(starts)} entries and first_steps is {first}; there must be at least one start, and 1 to "
            f"num_steps ({num_steps}) first steps."
        )
    fit_key, evaluation_key = jax.random.split(rng_key)
    own = ("progress", "steps_per_call", "allow_nan", "row_optim", "steps")  # of fit, and not of evaluate
    shared = {name: value for name, value in kwargs.items() if name not in own}
    best: tuple[BayesianGPLVM, SVI, training.FitResult] | None = None
    elbos: list[float] = []
    for start in starts:
        one = replace(gplvm, start=start)
        svi = SVI(one.model, one.guide, optim, loss or TraceMeanField_ELBO())
        try:
            fit = training.fit(svi, fit_key, first, Y, **kwargs)
        except training.NonFiniteLossError as error:
            warnings.warn(f"start {len(elbos)} is passed over: {error}", stacklevel=2)
            failure, elbo = error, -math.inf
        else:
            elbo = training.evaluate(svi, evaluation_key, fit, Y, **shared)[0]
            if best is None or elbo > max(elbos):
                best = one, svi, fit
        elbos.append(elbo)
    if best is None:
        raise failure
    one, svi, fit = best
    if num_steps > first:
        more = training.fit(svi, fit_key, num_steps - first, Y, init_state=fit.state, **kwargs)
        fit = more._replace(losses=np.concatenate([fit.losses, more.losses]))
    return Restarts(one, svi, fit, elbos)
