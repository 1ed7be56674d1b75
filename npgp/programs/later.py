"""Checks of values that are not there yet: of traced arrays, once the program has run that computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npgp.context import context, under
from npgp.programs.tracing import current_trace, trace_of


def see_later(check: Callable[[Any], object], value: Any) -> None:
    """
    Ask for a check of a traced array. Where nobody can give it (:class:`SeesLater`), nothing happens.

    .. code-block:: python

        def require_positive(x):
            if not np.all(x > 0):
                raise ValueError(f"x must be positive, not {x}.")


        @jax.jit
        def root(x):
            npgp.programs.see_later(require_positive, x)
            return jnp.sqrt(x)


        root(2.0)  # nobody asked: no check. npgp.fit, npgp.posterior and one_program do

    :param check: raises for a value that is wrong.
    :param value: the array.
    """
    for each in context().later:
        each.note(check, value)


class SeesLater:
    """
    Keeps what :func:`see_later` asks for inside.

    Only of arrays that the innermost transformation around it traces: those of a loop inside have no value after it.

    .. code-block:: python

        def run(x):
            with (later := npgp.programs.SeesLater()):
                npgp.programs.see_later(lambda value: checked.append(float(value)), 2.0 * x)
            seen.append(later)
            return later.values


        checked, seen = [], []
        values = jax.jit(run)(3.0)
        seen[0].look(values)
        assert checked == [6.0]
    """

    def __init__(self) -> None:
        self._trace = current_trace()
        self._checks: list[Callable[[Any], object]] = []
        #: The arrays.
        self.values: list[Any] = []

    def __enter__(self) -> SeesLater:
        self._under = under(later=(*context().later, self))
        self._under.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._under.__exit__(*error)

    def note(self, check: Callable[[Any], object], value: Any) -> None:
        """Keep a check of a value, if this is where it is traced."""
        if trace_of(value) is self._trace:
            self._checks.append(check)
            self.values.append(value)

    def look(self, values: list[Any]) -> None:
        """
        Make the checks.

        :param values: those of the arrays.
        """
        for check, value in zip(self._checks, values, strict=True):
            check(value)
