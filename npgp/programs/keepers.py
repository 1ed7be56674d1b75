"""What objects hold on to: traced arrays that they keep beyond the trace are replaced by values."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from numpyro.util import is_prng_key

from npgp.programs.tracing import current_trace, is_traced, trace_of

__all__ = ["Keepers"]


class Keepers:
    """
    Objects that note something while a function runs, such as guides at their first call.

    .. code-block:: python

        class Notes:
            def __init__(self):
                self.seen = []


        notes = Notes()
        kept = npgp.programs.Keepers([notes])
        notes.seen.append(1.0)
        kept.restore()
        assert notes.seen == []

    :param objects: as they are before. What they are made of is looked at too.
    :param apart: objects that are not looked into.
    """

    def __init__(self, objects: Sequence[Any], apart: Sequence[Any] = ()):
        self._objects, self._apart = objects, apart
        self._before: list[tuple[Any, Any]] = []
        self._traced: dict[int, jax.Array] = {}
        self._visit(lambda x: x, self._before)

    def _visit(self, change: Callable[[Any], Any], found: list[tuple[Any, Any]] | None = None) -> None:
        seen: dict[int, Any] = {id(x): x for x in self._apart}
        for x in self._objects:
            _changed(x, change, seen, found)

    def traced(self) -> list[jax.Array]:
        """The arrays among what they keep that the transformation around this traces."""
        here = current_trace()

        def note(x):
            if trace_of(x) is here:
                self._traced[id(x)] = x
            return x

        self._visit(note)
        return list(self._traced.values())

    def replace(self, values: Sequence[jax.Array]) -> None:
        """Put values in the place of what was :meth:`traced`."""
        # Of NumPy: what NumPyro does with them outside programs need not be compiled.
        numbers = (x if is_prng_key(x) else np.asarray(x) for x in values)
        known = dict(zip(self._traced, numbers, strict=True))
        self._visit(lambda x: known.get(id(x), x))

    def restore(self) -> None:
        """Make them what they were."""
        for container, content in self._before:
            if isinstance(container, dict):
                container.clear()
                container.update(content)
            else:
                container[:] = content


def _changed(x: Any, change: Callable[[Any], Any], seen: dict[int, Any], found: list | None) -> Any:
    """What is made of x when each traced array in it is changed; whatever can be is changed in its place."""
    if is_traced(x):
        return change(x)
    if id(x) in seen or isinstance(x, (jax.Array, np.ndarray, str, bytes, int, float, type, types.ModuleType)):
        return x
    seen[id(x)] = x  # so that no other object gets its address
    again = partial(_changed, change=change, seen=seen, found=found)
    if isinstance(x, (dict, list)):
        if found is not None:
            found.append((x, x.copy()))
        for key, value in list(x.items() if isinstance(x, dict) else enumerate(x)):
            if (new := again(value)) is not value:
                x[key] = new
    elif isinstance(x, tuple):
        new = [again(value) for value in x]
        if any(a is not b for a, b in zip(new, x, strict=True)):
            return type(x)(*new) if hasattr(x, "_fields") else type(x)(new)
    elif isinstance(x, partial):
        content = (x.func, x.args, x.keywords)
        new_content = tuple(map(again, content))
        if any(a is not b for a, b in zip(content, new_content, strict=True)):
            x.__setstate__((*new_content, vars(x)))  # type: ignore[attr-defined]
    elif isinstance(x, types.MethodType):
        again(x.__self__)
    elif isinstance(x, types.FunctionType):
        for cell in x.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it has none yet
                continue
            if (new_value := again(value)) is not value:
                cell.cell_contents = new_value
    elif hasattr(x, "__dict__"):
        again(vars(x))
    return x
