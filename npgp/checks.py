"""Checks of arguments: each says in one sentence what was given and what is accepted. Traced values pass."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp.contract import is_traced as is_traced


def inputs(x: ArrayLike, name: str = "X", allow_empty: bool = False) -> jax.Array:
    """
    Check an input array: floating, shape (N, D), at least one row and one column, finite where that can be seen.

    :param x: inputs of shape (N, D); a vector (N,) is refused rather than guessed at.
    :param name: what the error calls the array.
    :param allow_empty: accept arrays without rows.
    :raises TypeError: if the array is not floating.
    :raises ValueError: if its shape is wrong, it has no rows, or (when concrete) has NaN or infinities.
    """
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {dtype}; GP inputs must be floating point, as {name}.astype(float).")
    if np.ndim(x) != 2:
        hint = f"; a single input column is {name}[:, None]" if np.ndim(x) == 1 else ""
        raise ValueError(f"{name} has shape {np.shape(x)}; inputs are (rows, input dimensions){hint}.")
    if 0 in np.shape(x)[allow_empty:]:
        raise ValueError(f"{name} has shape {np.shape(x)}; it needs at least one row and one column.")
    require_finite(x, name)
    return jnp.asarray(x)


def require_finite(x: ArrayLike, name: str) -> None:
    """Raise ``ValueError`` if a concrete array has NaN or infinities; traced arrays pass."""
    if not is_traced(x) and not np.all(np.isfinite(np.asarray(x))):
        raise ValueError(f"{name} has NaN or infinite entries; remove these rows or, for observations, mask them.")


def concrete_inputs(x: ArrayLike, name: str = "X") -> jax.Array:
    """As :func:`inputs`; inside ``jit`` too an array's numbers can be seen, unless it is traced itself."""
    if is_traced(x):
        return inputs(x, name)
    with jax.ensure_compile_time_eval():
        return inputs(x, name)


def whole_number(value: Any, name: str, *, least: int | None = 1, most: int | None = None, must_be: str = "") -> int:
    """
    A count, or another whole number, as an ``int``.

    :param value: an ``int`` or whatever Python can take for one; no ``bool``.
    :param name: what the error calls it.
    :param least: the lower bound; ``None`` if there is no bound.
    :param most: the upper bound.
    :param must_be: what the error says of the bounds, where it can say more: ``"at most 24, the number of sites"``.
    :raises TypeError: unless it is a whole number.
    :raises ValueError: outside the bounds.
    """
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} is {value!r}; it must be a whole number.")
    if least is not None and number < least:
        raise ValueError(f"{name} is {value}; it must be {must_be or f'at least {least}'}.")
    if most is not None and number > most:
        raise ValueError(f"{name} is {value}; it must be {must_be or f'at most {most}'}.")
    return number


def one_of(value: Any, name: str, choices: Sequence[Any]) -> None:
    """Raise ``ValueError`` unless a value is one of some choices; ``True`` is not 1."""
    if isinstance(value, bool) or value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} is {value!r}; it must be {', '.join(others)} or {last}.")


def require_per_row(value: ArrayLike, name: str, rows: int) -> None:
    """Raise ``ValueError`` unless a value is a scalar or has one entry for each row."""
    if jnp.shape(value) not in ((), (rows,)):
        raise ValueError(f"{name} has shape {jnp.shape(value)}; it must be a scalar or ({rows},), one per row.")


def require_positive(value: object, name: str) -> None:
    """Raise ``ValueError`` if a concrete hyperparameter is not positive and finite; traced ones pass."""
    if isinstance(value, (int, float, np.ndarray, np.generic)) or (
        isinstance(value, jax.Array) and not is_traced(value)
    ):
        array = np.asarray(value)
        if not (np.all(array > 0) and np.all(np.isfinite(array))):
            raise ValueError(f"{name} is {value}; it must be positive and finite.")
