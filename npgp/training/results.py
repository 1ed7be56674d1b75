"""Results of a training, and its error."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpyro.infer.svi import SVIState

ADVICE = (
    "Try a smaller learning rate, standardized inputs and outputs, a larger jitter or float64 "
    "(jax.config.update('jax_enable_x64', True)), and check the data for NaN and extreme values; "
    "the last good state is in this exception's .result."
)


class Seconds(NamedTuple):
    """
    Seconds of a training, by what they were for.

    .. code-block:: python

        print(result.seconds)
    """

    #: Looking at arguments and model, and the first state.
    start: float = 0.0
    #: Tracing and compiling the steps.
    compile: float = 0.0
    #: All else: steps, evaluations, checkpoints.
    steps: float = 0.0


class _Fields(NamedTuple):
    #: Constrained values of all parameters, by site name.
    params: dict[str, Any]
    #: The ``SVIState`` to continue from.
    state: SVIState
    #: The negative ELBO of every step that led from the first state of this call to ``state``.
    losses: np.ndarray


class FitResult(_Fields):
    """
    Result of :func:`fit`; the fields are those of NumPyro's ``SVIRunResult``.

    .. code-block:: python

        assert result.losses.shape == (50,) and "noise" in result.params
    """

    #: Where the time went.
    seconds: Seconds = Seconds()
    #: How the posterior arrived, a :class:`Convergence`; ``None`` for fewer than 400 steps, another optimizer than
    #: :func:`npgp.adam`, with ``row_optim`` and for a source of batches.
    convergence: Any = None


class NonFiniteLossError(FloatingPointError):
    """
    Training met an ELBO or a gradient that is NaN or infinite, and stopped there.

    .. code-block:: python

        def broken(X):
            numpyro.param("a", 1.0)
            numpyro.factor("log of a negative number", jnp.log(-numpyro.param("b", 1.0)))


        svi = SVI(broken, lambda X: None, npgp.adam(0.1), TraceMeanField_ELBO())
        try:
            npgp.fit(svi, key, 3, X, progress=False)
        except npgp.training.NonFiniteLossError as error:
            print(error.step)
    """

    #: The step at which this happened, counted from zero over all continuations.
    step: int
    #: The last state whose ELBO was seen to be finite (the first state, if there is no such state), and the
    #: losses of the steps that led there.
    result: FitResult

    def __init__(self, message: str, step: int, result: FitResult):
        super().__init__(message)
        self.step = step
        self.result = result


class DataError(ValueError):
    """
    Training met rows that it could not read or that the model cannot have observed, and stopped before them.

    .. code-block:: python

        def batches(epoch):
            yield {"X": X, "y": y}
            raise OSError("the disk is gone")


        reading = SVI(model, guide, npgp.adam(0.05), TraceMeanField_ELBO())
        try:
            npgp.fit(
                reading, key, 3, npgp.training.Stream(batches, num_rows=30), progress=False
            )
        except npgp.training.DataError as error:
            params = error.result.params  # after error.step steps
    """

    #: The step that they belong to, counted from zero over all continuations.
    step: int
    #: What was trained before.
    result: FitResult

    def __init__(self, message: str, step: int, result: FitResult):
        super().__init__(f"{message} The {len(result.losses)} steps before it are in this exception's .result.")
        self.step = step
        self.result = result


def explain(bad: list[str], step: int, losses: np.ndarray, cause: str | None = None) -> str:
    """
    Message for the bad step ``step``, the last of ``losses``, at which the parameters ``bad`` became NaN.

    :param cause: a sentence about a likelihood that is to blame, if one is.
    """
    elbo = -losses[-1]
    if np.isfinite(elbo):
        names = ", ".join(bad)
        what = f"The gradient of the ELBO ({elbo:.6g}) is bad at step {step}: {names} became NaN."
    elif len(losses) > 1:
        what = f"The ELBO is {elbo} at step {step}; the last finite one was {-losses[-2]:.6g}."
    else:
        what = f"The ELBO is {elbo} at step {step}, the first of this call."
    return f"{what} {cause or ADVICE}"
