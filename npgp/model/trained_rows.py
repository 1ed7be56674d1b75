"""The rows trained on, kept among the parameters where q(ε) is the posterior given these."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from numpyro import handlers

from npgp.contract import given_by
from npgp.model.sites import ROWS_TRAINED_ON
from npgp.programs.tracing import is_traced


class TrainedRows:
    """
    Arguments of a model that have arrays, by name, as they were in training.

    :param model: the model.
    :param arguments: these; ``None`` where parameters have none.
    """

    def __init__(self, model: Callable, arguments: Mapping[str, Any] | None):
        self._signature, self.arguments = inspect.signature(model), arguments

    @classmethod
    def of_call(cls, model: Callable, args: tuple, kwargs: dict[str, Any]) -> TrainedRows:
        """Those of a call."""
        call = inspect.signature(model).bind(*args, **kwargs).arguments
        return cls(model, {n: v for n, v in call.items() if any(hasattr(x, "shape") for x in jax.tree.leaves(v))})

    @classmethod
    def given(cls, model: Callable) -> TrainedRows:
        """Those among the parameters that ``substitute`` gives here."""
        return cls(model, given_by(handlers.substitute, ROWS_TRAINED_ON))

    def in_call(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """A call's arguments with these in the place of its own."""
        call = self._signature.bind_partial(*args, **kwargs)
        call.arguments |= self.arguments or {}
        return call.args, call.kwargs

    def unlike(self, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """The name of an argument with observations, which may be ``None``, that are known to be others in a call."""
        stored, call = self.arguments or {}, self._signature.bind(*args, **kwargs).arguments
        for name in stored.keys() & call.keys():
            before, now = stored[name], call[name]
            arrays = all(hasattr(x, "shape") and not is_traced(x) for x in (before, now))
            if not arrays or self._signature.parameters[name].default is not None or before.shape != now.shape:
                continue
            before, now = np.asarray(before), np.asarray(now)
            if not np.array_equal(before, now.astype(before.dtype), equal_nan=before.dtype.kind == "f"):
                return name
        return None
