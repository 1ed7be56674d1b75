"""
Checks of arguments: each says in one sentence what was given and what is accepted. Traced values pass, and are looked
at once they are there where that can be (``programs/later.py``).
"""

from __future__ import annotations

import importlib
import operator
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from npgp.contract import is_prng_key
from npgp.programs.later import see_later
from npgp.programs.tracing import is_traced as is_traced

#: So many rows, spread over all, tell the range of a column.
_GLANCE = 1000
#: Rounding errors are of no importance below this share of the range, …
_NEGLIGIBLE = 1e-6
#: … nor if no more than this share of the different values become equal to others, …
_FEW = 0.01
#: … among so many rows.
_LOOK = 2**20


def array(x: Any, name: str) -> np.ndarray | jax.Array:
    """
    What was given for an array, as one of real numbers: of JAX if it was, else of NumPy; of lists and tables too.

    :param x: anything.
    :param name: what the error calls it.
    :raises TypeError: for what is no array of real numbers, such as complex ones, text, or rows of several lengths.
    :raises ValueError: for a masked array of NumPy with masked entries: arrays of JAX have no mask.
    """
    require_unmasked(x, name)
    x = np.ma.getdata(x) if isinstance(x, np.ma.MaskedArray) else x
    if not isinstance(x, (np.ndarray, jax.Array)):
        try:
            x = (jnp if any(map(is_traced, jax.tree.leaves(x))) else np).asarray(x)
        except (TypeError, ValueError):
            raise TypeError(f"{name} is {x!r:.80}, of which no array can be made; it must be an array.") from None
    if not _is_real(x.dtype):
        hint = ": its real and imaginary parts are two" if jnp.issubdtype(x.dtype, jnp.complexfloating) else ""
        raise TypeError(f"{name} has dtype {x.dtype}; it must be an array of real numbers{hint}.")
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def require_unmasked(x: Any, name: str) -> None:
    """Raise ``ValueError`` for a masked array of NumPy with masked entries, whose mask JAX would drop."""
    if np.ma.is_masked(x):
        raise ValueError(
            f"{name} is a NumPy masked array with {np.ma.count_masked(x)} of {x.size} entries masked, which arrays of "
            "JAX cannot be: leave these rows out; or, of observations, pass np.ma.getdata(y), and "
            "mask=~np.ma.getmaskarray(y)."
        )


def _is_real(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_) or (
        jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)
    )


def to_device(x: Any, name: str, dtype: DTypeLike | None = None, axis: int = 0) -> jax.Array:
    """
    As an array of JAX, after the checks of :func:`array` and with the warning of :func:`warn_if_merged`.

    :param dtype: of the result; its own, as JAX has it, if omitted.
    :raises ValueError: for whole numbers that are too large for those of JAX, which would take them for others.
    """
    x = array(x, name)
    warn_if_merged(x, name, axis)
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.size and dtype is None:
        limit = jnp.iinfo(jax.dtypes.canonicalize_dtype(x.dtype)).max
        if x.max() > limit:
            raise ValueError(f"{name} has the value {x.max()}, above JAX's {limit}: pass {name}.astype(float).")
    if isinstance(x, np.ndarray):  # placed, not converted by a program of its own
        return jax.device_put(x if dtype is None else x.astype(jax.dtypes.canonicalize_dtype(dtype)))
    return jnp.asarray(x, dtype)


def warn_if_merged(x: Any, name: str, axis: int = 0) -> None:
    """
    Warn if different values of a column become equal when JAX makes 32-bit numbers of them, as it does by default: 200
    minutes in seconds since 1970 become 94 values.

    It costs a glance at the data, and a sort of those columns that are far from 0 for their range.

    :param x: anything; what is no floating array of NumPy passes.
    :param name: what the warning calls it.
    :param axis: the axis of rows.
    """
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f" or not x.size:
        return
    narrow = jnp.result_type(float)
    if narrow.itemsize >= x.dtype.itemsize:
        return
    rows = np.moveaxis(np.atleast_1d(x), axis, 0)
    rows = rows.reshape(len(rows), -1)
    glance = np.sort(rows[:: -(-len(rows) // _GLANCE)], axis=0)  # NaN last
    last = np.maximum(np.sum(~np.isnan(glance), axis=0) - 1, 0)
    low, high = (np.take_along_axis(glance, last[None] * i // 10, axis=0)[0] for i in (1, 9))  # outliers apart
    rounding = 0.5 * np.finfo(narrow).eps * np.maximum(np.abs(low), np.abs(high))
    for column in np.flatnonzero(rounding > _NEGLIGIBLE * (high - low)):
        values = np.unique(rows[:_LOOK, column])
        left = len(np.unique(values.astype(narrow)))
        if left < (1.0 - _FEW) * len(values):
            where = f", column {column}" if rows.shape[1] > 1 else ""
            warnings.warn(
                f"{name}{where}: {len(values)} different values become {left} in {narrow}, JAX's default. Standardize "
                "them first, as npgp.Standardizer does, or subtract an offset; or compute in 64 bits, by "
                "jax.config.update('jax_enable_x64', True).",
                stacklevel=3,
            )


def inputs(x: ArrayLike, name: str = "X", allow_empty: bool = False, members: bool = False) -> jax.Array:
    """
    Check an input array: floating, shape (N, D), at least one row and one column, finite where that can be seen.

    :param x: inputs of shape (N, D); a vector (N,) is refused rather than guessed at.
    :param name: what the error calls the array.
    :param allow_empty: accept arrays without rows.
    :param members: accept further axes in front, (..., N, D): inputs of each of several functions.
    :raises TypeError: if the array is not floating.
    :raises ValueError: if its shape is wrong, it has no rows, or (when concrete) has NaN or infinities.
    """
    x = array(x, name)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {x.dtype}; GP inputs must be floating point, as {name}.astype(float).")
    if x.ndim != 2 and not (members and x.ndim > 2):
        hint = f"; a single input column is {name}[:, None]" if x.ndim == 1 else ""
        raise ValueError(f"{name} has shape {x.shape}; inputs are (rows, input dimensions){hint}.")
    if 0 in x.shape[:-2] + x.shape[x.ndim - 2 + allow_empty :]:
        raise ValueError(f"{name} has shape {x.shape}; it needs at least one row and one column.")
    require_finite(x, name)
    return to_device(x, name, axis=-2)


def inputs_of(name: str, x: ArrayLike, batch_shape: tuple[int, ...]) -> jax.Array:
    """:func:`inputs` of functions in plates, which may have inputs each, batch + (N, D)."""
    x = inputs(x, members=True)
    if x.ndim > 2 and x.shape[:-2] != batch_shape:
        drawn = f"drawn in plates of shape {batch_shape}" if batch_shape else "one function"
        raise ValueError(
            f"X has shape {x.shape}, but {name} is {drawn}: inputs are (rows, input dimensions), or for functions in a "
            "plate with inputs each (functions, rows, input dimensions)."
        )
    return x


def require_finite(x: ArrayLike, name: str) -> None:
    """Raise for what is no :func:`array`, and ``ValueError`` for NaN or infinities; traced arrays pass."""
    x = array(x, name)
    if is_traced(x):
        see_later(partial(require_finite, name=name), x)
    elif not np.all(np.isfinite(np.asarray(x))):
        raise ValueError(
            f'{name} has NaN or infinite entries; remove these rows or, for observations, mask them, as by mask="nan".'
        )


def mask_of(value: Any, name: str = "mask", *, of: Any = None) -> np.ndarray | jax.Array:
    """
    A mask as an array.

    :param value: boolean, for numbers may mean present or missing; or ``"nan"``: NaN are missing.
    :param name: what the error calls it.
    :param of: what is masked.
    :raises TypeError: for another type.
    """
    if isinstance(value, str) and value == "nan" and of is not None:
        return ~(jnp if is_traced(of) else np).isnan(of)
    shown = repr(value) if isinstance(value, str) else None
    value = value if shown else array(value, name)
    if shown or not jnp.issubdtype(value.dtype, jnp.bool_):
        raise TypeError(
            f"{name} {f'is {shown}' if shown else f'has dtype {value.dtype}'}; it must be boolean, True where an "
            'observation is present (mask.astype(bool), if 1 means that), or "nan" if those that are NaN are missing.'
        )
    return value


def observed(
    y: Any,
    shape: tuple[Any, ...],
    mask: Any = None,
    *,
    name: str = "y",
    mask_name: str = "mask",
    broadcast: bool = False,
) -> tuple[np.ndarray | jax.Array, np.ndarray | jax.Array | None]:
    """
    Observations as an array, with whatever they have where they are missing; and which are there.

    :param y: observations.
    :param shape: what their shape must be; ``...`` in front stands for any further axes.
    :param mask: True where an observation is present, of y's shape; or ``"nan"``: those that are NaN are missing.
    :param name: what errors call y, and ``mask_name`` the mask.
    :param broadcast: accept a mask that broadcasts to y's shape.
    :return: the observations, and the mask of their shape; ``None`` if all must be there.
    :raises TypeError: for what is no array of real numbers, and for a mask of another type.
    :raises ValueError: for arrays of another shape, and, where that can be seen, for NaN and infinities that are not
        masked.
    """
    y = array(y, name)
    found = np.shape(y)
    wanted = found[: 1 + len(found) - len(shape)] + shape[1:] if shape[:1] == (...,) else shape  # ... for further axes
    if found != wanted:
        must_be, turned = str(shape).replace("Ellipsis", "..."), ": transpose it" if found == shape[::-1] else ""
        raise ValueError(f"{name} has shape {found}; it must be {must_be}{turned}.")
    if mask is None:
        require_finite(y, name)
        return y, None
    present = mask_of(mask, mask_name, of=y)
    if present.shape != y.shape:
        if not broadcast or not broadcasts(present.shape, y.shape):
            raise ValueError(f"{mask_name} has shape {present.shape}; it must be that of {name}, {y.shape}.")
        present = (jnp if is_traced(present) else np).broadcast_to(present, y.shape)
    if not is_traced(y) and not is_traced(present) and not np.all(np.isfinite(np.asarray(y)[np.asarray(present)])):
        where = "infinite entries" if isinstance(mask, str) else f"NaN or infinite entries where {mask_name} is True"
        raise ValueError(f"{name} has {where}; only missing entries may be so.")
    return y, present


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Return whether an array of a shape broadcasts to another shape."""
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def require_broadcast(x: ArrayLike, shape: tuple[int, ...], name: str, of: str = "y") -> None:
    """Raise ``ValueError`` unless an array broadcasts to the shape of another."""
    if not broadcasts(np.shape(x), shape):
        raise ValueError(f"{name} has shape {np.shape(x)}, which does not broadcast to that of {of}, {shape}.")


def concrete_inputs(x: ArrayLike, name: str = "X") -> jax.Array:
    """Check inputs as :func:`inputs` does, and keep arrays that are not traced concrete inside ``jit``."""
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
        raise TypeError(f"{name} is {shown(value)}; it must be a whole number.")
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


def observations(y: ArrayLike, rows: int, dtype: DTypeLike | None = None) -> jax.Array:
    """Observations (..., N) of so many rows, all of which are there, as an array of JAX."""
    return to_device(observed(y, (..., rows))[0], "y", dtype, axis=-1)


def require_per_row(value: Any, name: str, rows: int) -> Any:
    """A value as by :func:`real`; ``ValueError`` unless it is a scalar or has one entry for each row."""
    value = real(value, name)
    if np.shape(value) not in ((), (rows,)):
        raise ValueError(f"{name} has shape {np.shape(value)}; it must be a scalar or ({rows},), one per row.")
    return value


def real(value: Any, name: str, kind: str = "a real number") -> Any:
    """
    A number or an array as it is, or a list of numbers as an array.

    :param name: what the error calls it.
    :param kind: what the error says that it must be.
    :raises TypeError: for what is no real number, and no array or list of these.
    :raises ValueError: for an empty list, and for NumPy's masked arrays.
    """
    if isinstance(value, (list, tuple)):
        value = array(value, name)
        if not value.size:
            raise ValueError(f"{name} is an empty list; it must have numbers.")
        return jnp.asarray(value, jnp.result_type(float))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    dtype = getattr(value, "dtype", None)
    if dtype is None or not _is_real(dtype) or jnp.issubdtype(dtype, jnp.bool_):
        given = repr(value) if dtype is None else f"an array of {dtype}"
        raise TypeError(f"{name} is {given:.80}; it must be {kind}, or an array or a list of these.")
    require_unmasked(value, name)
    return value


def require_positive(value: Any, name: str) -> Any:
    """A hyperparameter as by :func:`real`; ``ValueError`` for concrete numbers that are not positive and finite."""
    value = real(value, name, "a positive number")
    if is_traced(value):
        see_later(partial(require_positive, name=name), value)
    else:
        numbers = np.asarray(value)
        if not (np.all(numbers > 0) and np.all(np.isfinite(numbers))):
            raise ValueError(f"{name} is {value}; it must be positive and finite.")
    return value


def require_not_negative(value: Any, name: str) -> Any:
    """Check numbers as :func:`require_positive` does; they may be 0."""
    value = real(value, name, "a number")
    if not is_traced(value):
        numbers = np.asarray(value)
        if not (np.all(numbers >= 0) and np.all(np.isfinite(numbers))):
            raise ValueError(f"{name} is {value}; it must be at least 0 and finite.")
    return value


def row_numbers(rows: Any, name: str, count: int, ndim: int = 1, what: str = "row") -> np.ndarray | jax.Array:
    """
    Numbers of rows, or of others that are counted, as an array of whole numbers.

    :param rows: shape (B,), or of more dimensions.
    :param name: what the error calls them.
    :param count: rows that there are.
    :param ndim: dimensions that they must have.
    :param what: what is counted, as the error calls one.
    :raises TypeError: unless they are whole numbers.
    :raises ValueError: for another number of dimensions, and (when concrete) for rows that there are not.
    """
    rows = array(rows, name)
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {rows.dtype}; it must have whole numbers, the numbers of {what}s.")
    if rows.ndim != ndim:
        raise ValueError(f"{name} has shape {rows.shape}; it must have {ndim} dimension{'s' * (ndim > 1)}.")
    if is_traced(rows):
        see_later(partial(row_numbers, name=name, count=count, ndim=ndim, what=what), rows)
    elif rows.size:
        numbers = np.asarray(rows)  # inside jit, what JAX makes of them has no values
        least, most = int(numbers.min()), int(numbers.max())
        if least < 0 or most >= count:
            given = least if least < 0 else most
            raise ValueError(
                f"{name} has {what} {given}; there are {count} {what}s: it must be between 0 and {count - 1}."
            )
    return rows


def random_key(key: Any, name: str = "rng_key", advice: str = "") -> jax.Array:
    """A random key of JAX; ``TypeError`` for all else, which ``None`` is where no ``seed`` is around a model."""
    if not is_prng_key(key):
        raise TypeError(f"{name} is {shown(key)}; it must be a random key, such as jax.random.key(0){advice}.")
    return key


def host_generator(rng_key: jax.Array) -> np.random.Generator:
    """
    A NumPy generator whose numbers a key decides.

    ``jax.random.key(0)`` has the numbers of ``np.random.default_rng(0)``.

    :param rng_key: a JAX random key.
    :raises TypeError: for anything else, such as a seed.
    """
    random_key(rng_key)
    with jax.ensure_compile_time_eval():
        return np.random.default_rng(np.asarray(jax.random.key_data(rng_key)).ravel().tolist())


def known_key() -> jax.Array:
    """The key 0 with numbers that can be seen, inside ``jit`` too: for choices that are not the user's."""
    with jax.ensure_compile_time_eval():
        return jax.random.key(0)


#: What to do where a distribution is drawn from without a key.
WITHOUT_SEED = ", as handlers.seed(model, rng_seed=0) gives one to a model that runs by itself"


def shown(value: Any) -> str:
    """Format a value for a message: on one line, and short."""
    return " ".join(repr(value).split())[:80]


def positive_fields(owner: Any, *names: str) -> None:
    """:func:`require_positive` of fields of a dataclass, which then holds arrays where lists were given."""
    for name in names:
        value = require_positive(getattr(owner, name), f"{type(owner).__name__} {name}")
        object.__setattr__(owner, name, value)


def optional(module: str, *, extra: str, what: str, otherwise: str = "") -> Any:
    """
    A module of a package that npgp can do without.

    :param module: its full name, such as ``"pyarrow.dataset"``.
    :param extra: the extra of npgp that installs it.
    :param what: what needs it, with which the error begins: a noun in the singular, such as ``"to_arviz"``.
    :param otherwise: a sentence at the error's end, of what can be done without the package.
    :raises ModuleNotFoundError: if the package is not installed.
    """
    parts = module.split(".")
    try:
        for i in range(len(parts)):  # a package that is blocked blocks what is in it
            found = importlib.import_module(".".join(parts[: i + 1]))
    except ModuleNotFoundError as error:
        message = f"{what} needs {parts[0]}: pip install npgp[{extra}]. {otherwise}"
        raise ModuleNotFoundError(message.strip(), name=error.name) from error
    return found
