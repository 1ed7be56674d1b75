"""``npgp.fit`` as a program of the benchmarks."""

from __future__ import annotations

from typing import Any

import jax
from numpyro.infer import SVI

import npgp

#: Of one device call.
MAX_STEPS = 1000


class Fit:
    """
    ``npgp.fit``, that goes on where it was; from the second call on, its program is compiled.

    :param svi: model, guide, optimizer and loss.
    :param arrays: the data.
    :param options: of ``npgp.fit``.
    """

    def __init__(self, svi: SVI, *arrays, init_params: dict[str, Any] | None = None, **options):
        self.svi, self.arrays, self.options = svi, arrays, options
        self.begin: dict[str, Any] = {"init_params": init_params}
        self.result: Any = None

    def advance(self, steps: int) -> None:
        self.result = npgp.fit(
            self.svi,
            jax.random.key(0),
            steps,
            *self.arrays,
            steps_per_call=MAX_STEPS,  # as one call of the device
            progress=False,
            **self.begin,
            **self.options,
        )
        self.begin = {"init_state": self.result.state}

    @property
    def seconds(self) -> float:
        """Of the last call's steps, without its tracing of them, which each call of ``fit`` does once."""
        return self.result.seconds.steps
