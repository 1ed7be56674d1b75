"""
Functions of any number of rows as compiled programs for a few numbers: rows are filled up, and the results are cut.

Predictions are wanted on grids of all lengths, one after the other, and each length would be a program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import jax
import numpy as np

from npgp.programs.backend import on_cpu
from npgp.programs.compiled import STEPS, Program, one_program
from npgp.programs.tracing import is_traced

#: Fewest rows of a program; then twice as many, and so on, up to …
_LEAST = 16
#: … so many; then whole multiples of it, for what is computed in vain costs time.
_STEP = 1024
T = TypeVar("T")


def padded_size(rows: int) -> int:
    """How many rows the program for so many rows has."""
    if rows > _STEP:
        return -(-rows // _STEP) * _STEP
    return max(_LEAST, 1 << max(rows - 1, 0).bit_length())


def on_grid(function: Callable[[Any, Any], T], owner: Any, X: Any, *, axes: tuple[int, ...] = (-1,)) -> T:
    """
    ``function(owner, X)`` as a compiled program that serves other numbers of rows too.

    .. code-block:: python

        assert npgp.programs.on_grid(
            lambda kernel, X: kernel.diag(X), kernel, jnp.asarray(X)
        ).shape == (30,)

    :param function: of a pytree and rows, each row's results depending on that row alone. It must be one and the same
        object in all calls, so a function of a module or class.
    :param owner: a pytree.
    :param X: rows, (N, …), or a pytree of arrays with rows first. Where something is traced, the function just runs.
    :param axes: the axes of rows in every array that the function returns.
    """
    number = len(jax.tree.leaves(X)[0])
    if not number or any(map(is_traced, (jax.device_put(0.0), *jax.tree.leaves((X, owner))))):
        return function(owner, X)
    size = padded_size(number)

    def padded(array: jax.Array) -> np.ndarray:
        rows = np.asarray(array)
        return rows if size == number else np.pad(rows, [(0, size - number)] + [(0, 0)] * (rows.ndim - 1), "edge")

    rows = jax.tree.map(padded, X)
    try:
        results = _program(function)(owner, rows)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        results = one_program(lambda: function(owner, jax.device_put(rows)))
    return jax.tree.map(lambda x: _cut(x, number, axes), results) if size != number else results


@lru_cache(maxsize=256)
def _program(function: Callable[..., T]) -> Callable[..., T]:
    return Program(function, options=STEPS)


def _cut(x: jax.Array, rows: int, axes: tuple[int, ...]) -> jax.Array:
    index: list[Any] = [slice(None)] * x.ndim
    for axis in axes:
        index[axis] = slice(rows)
    # Elsewhere than on a CPU the host is far away, and a program for each length the lesser evil.
    return jax.device_put(np.asarray(x)[tuple(index)]) if on_cpu() else x[tuple(index)]
