"""Estimates of the ELBO of a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from npgp import checks
from npgp.contract import is_initialized
from npgp.programs.compiled import STEPS, Program, one_model_at_a_time
from npgp.training.data import Data, Layout, refuse_traced
from npgp.training.loop import one_blas_thread
from npgp.training.row_tables import RowState, RowSVI
from npgp.training.step import Step, cached


def evaluate(
    svi: SVI,
    rng_key: jax.Array,
    result: Any,
    *args: Any,
    num_draws: int = 100,
    batch_size: int | None = None,
    group_size: int = 1,
    indices: str | None = None,
    **kwargs: Any,
) -> tuple[float, float]:
    """Estimate the ELBO of a trained model: mean and standard error of ``num_draws`` evaluations.

    With ``batch_size``, every evaluation takes a fresh batch, as in :func:`fit`, and the standard
    error includes the choice of rows.

    .. code-block:: python

        elbo = npgp.evaluate(svi, key, svi.init(key, X, y), X, y)

    :param svi: the ``SVI`` that was trained.
    :param rng_key: key for the noise and the batches.
    :param result: a :class:`FitResult`, NumPyro's ``SVIRunResult``, or an ``SVIState``.
    :param args: positional arguments of model and guide.
    :param num_draws: number of evaluations, at least two.
    :param batch_size: rows per evaluation; all of them if ``None``.
    :param group_size: as in :func:`fit`.
    :param indices: keyword under which model and guide receive the row numbers, as in :func:`fit`.
    :param kwargs: keyword arguments of model and guide.
    """
    refuse_traced("evaluate", (rng_key, result, args, kwargs))
    checks.random_key(rng_key)
    num_draws = checks.whole_number(num_draws, "num_draws", least=2)
    state = result if isinstance(result, SVIState) else getattr(result, "state", None)
    if not isinstance(state, SVIState):
        raise TypeError(f"result is {checks.shown(result)}; it must be what npgp.fit returned, or its state.")
    data = Data(args, kwargs, rng_key, batch_size, indices, group_size)
    if not is_initialized(svi):  # a restored state
        first_args, first_kwargs = data.first_call()
        with one_model_at_a_time:
            Step(svi).init(rng_key, *first_args, **first_kwargs)

    by_rows = isinstance(state.optim_state, RowState)

    def evaluations() -> Program:
        return Program(_evaluations(RowSVI(svi) if by_rows else svi, data.layout, num_draws), options=STEPS)

    run = cached(svi, ("evaluate", data.layout, by_rows, num_draws), evaluations)
    with one_blas_thread(), one_model_at_a_time:
        losses = run(state, data.arrays, rng_key, data.place(data.read(0, num_draws)))
        elbos = -np.asarray(losses, np.float64)
    return float(np.mean(elbos)), float(np.std(elbos, ddof=1) / np.sqrt(num_draws))


def _evaluations(svi: SVI | RowSVI, layout: Layout, num_draws: int) -> Callable:
    def evaluations(state: SVIState, arrays: Any, rng_key: jax.Array, chunk: Any) -> jax.Array:
        def one(draw: tuple[jax.Array, Any]) -> jax.Array:
            args, kwargs = layout.call(arrays, draw[1])
            return svi.evaluate(state._replace(rng_key=draw[0]), *args, **kwargs)

        return lax.map(one, (jax.random.split(rng_key, num_draws), chunk))

    return evaluations
