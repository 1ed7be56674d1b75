"""The arguments of model and guide, and batches of their rows, from memory, from files and from sources."""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from npgp import checks
from npgp.programs.backend import on_cpu
from npgp.training.devices import Sharding
from npgp.training.files import map_of, native, read_rows
from npgp.training.shuffle import Shuffle
from npgp.training.sources import Source

#: What the batches of one device call may take when they are read on the host, in bytes.
MAX_BYTES_PER_CALL = 2**25
#: Checkpoints know arrays of at most so many bytes by all their values.
MAX_BYTES_CHECKED = 2**26
_REMOVE = 'Remove them; or mask them, if they are of npgp.observe, as by mask="nan"; or pass allow_nan=True.'


def is_array(x) -> bool:
    """Whether training passes an argument to the device: arrays of numbers, and no NumPy array of objects or text."""
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind in "biufc")


@dataclass(frozen=True)
class Origin:
    """
    Where an array of a call is from.

    :param number: which of the arguments' arrays it is; −1 for what is none of them.
    :param of_source: whether it is of a source's batches.
    """

    number: int
    of_source: bool = False


@dataclass(frozen=True)
class Layout:
    """
    How arguments are put together from what is on the device and from a step's part of a chunk: what a compiled step
    depends on, beside shapes. It holds no data.

    :param treedef: structure of the arguments, without those that a source provides.
    :param static: the leaves that are no arrays, and None in place of arrays.
    :param types: of the former; ``1``, ``1.0`` and ``True`` are equal, and make different programs.
    :param host: for each array, whether chunks hold its rows.
    :param num_args: how many of the arguments are positional.
    :param keywords: names of the others.
    :param num_rows: rows of the data.
    :param indices: keyword of the rows' numbers.
    :param steps: keyword of the step's number.
    :param has_source: whether a source provides the first arguments.
    """

    treedef: Any
    static: tuple
    types: tuple[type, ...]
    host: tuple[bool, ...]
    num_args: int
    keywords: tuple[str, ...]
    num_rows: int
    indices: str | None
    steps: str | None
    has_source: bool

    def call(self, arrays, item, step=0) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments at a step, from one step's part of a chunk, or of all rows for ``None``."""
        batch: Any = ()
        rows, files = None, iter(())
        if self.has_source:
            batch = item
        elif item is not None:
            rows, files = item[0], iter(item[1:])
        resident = iter(arrays)

        def argument(host):
            if host:
                return next(files)
            x = next(resident)
            if rows is None or x.shape[:1] != (self.num_rows,):
                return x
            return x[rows] if isinstance(x, np.ndarray) else x.at[rows].get(mode="promise_in_bounds")

        remaining = map(argument, self.host)
        args, kwargs = self._assembled([next(remaining) if x is None else x for x in self.static], batch)
        if self.indices is not None:
            all_rows = np.arange(self.num_rows, dtype=np.int32)
            kwargs[self.indices] = jnp.asarray(all_rows if rows is None else rows)
        if self.steps is not None:
            kwargs[self.steps] = jnp.asarray(step)
        return args, kwargs

    def origins(self, batch: Any) -> list[Origin]:
        """Where each array of a call is from, in the order of the call's leaves; given a source's batch."""
        leaves, structure = jax.tree.flatten(batch if self.has_source else ())
        batch = jax.tree.unflatten(structure, [Origin(i, of_source=True) for i in range(len(leaves))])
        numbers = iter(range(len(self.host)))
        args, kwargs = self._assembled([Origin(next(numbers)) if x is None else x for x in self.static], batch)
        kwargs |= {name: Origin(-1) for name in (self.indices, self.steps) if name is not None}
        return [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, Origin)]

    def _assembled(self, leaves: list, batch: Any) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments of leaves and of a source's batch."""
        values = jax.tree.unflatten(self.treedef, leaves)
        kwargs = dict(zip(self.keywords, values[self.num_args :], strict=True))
        args = tuple(values[: self.num_args])
        if isinstance(batch, dict):
            twice = [name for name in batch if name in kwargs]
            if twice:
                raise ValueError(f"The source's batches hold {', '.join(twice)}, which is given as well.")
            kwargs |= batch
        else:
            args = (*batch, *args)
        return args, kwargs


class Inputs:
    """
    The arguments of model and guide, arrays apart from the rest.

    A *chunk* holds what several steps need beside the arrays that stay on the device: the numbers of the rows of each
    batch, and the rows themselves where the array is not on the device. Its leaves lead with the step.

    :param args: positional arguments; the first may be a :class:`Source`.
    :param kwargs: keyword arguments.
    :param rng_key: what the order of the rows follows.
    :param batch_size: rows per step.
    :param indices: keyword of the rows' numbers.
    :param group_size: consecutive rows that stay together.
    :param steps: keyword of the step's number.
    :param on_host: whether all arrays that are cut stay where they are; maps of files always do.
    :param sharding: the devices that share the rows.
    :param allow_nan: accept NaN and infinities: everywhere, nowhere, or ``None``: where :meth:`allow_nan_of` says so.
    """

    def __init__(
        self,
        args,
        kwargs,
        rng_key,
        batch_size: int | None,
        indices: str | None,
        group_size: int = 1,
        steps: str | None = None,
        on_host: bool = False,
        sharding: Sharding | None = None,
        allow_nan: bool | None = True,
    ):
        group_size = checks.whole_number(group_size, "group_size")
        if batch_size is not None:
            batch_size = checks.whole_number(batch_size, "batch_size", least=None)
        self._given = args, kwargs
        self.source = args[0] if args and isinstance(args[0], Source) else None
        args = args[0 if self.source is None else 1 :]
        for option, name in (("indices", indices), ("steps", steps)):
            if name in kwargs or (name is not None and option == "steps" and name == indices):
                raise ValueError(f"{option}={name!r} names an argument that is given as well.")
        # Values in call order: a dictionary would be flattened in alphabetical order.
        check_arrays(args, kwargs)
        leaves, treedef = jax.tree.flatten([*args, *kwargs.values()])
        static = tuple(None if is_array(x) else x for x in leaves)  # no leaf is None otherwise
        arrays = [x for x in leaves if is_array(x)]
        if self.source is None:
            self.num_rows = next((len(x) for x in arrays if x.ndim), 0)
            if batch_size is not None or indices is not None:
                _require_arrays(args, kwargs, self.num_rows)
                if not self.num_rows:
                    raise ValueError("batch_size and indices need an array among the arguments.")
            if batch_size is not None and not 1 <= batch_size <= self.num_rows:
                raise ValueError(f"batch_size is {batch_size}, not in 1 to {self.num_rows} (the rows).")
        else:
            self.num_rows = self.source.num_rows or 0
            if indices is not None or group_size != 1:
                raise ValueError("indices and group_size need arrays; a source has an order of its own.")
        for what, number in (("rows", self.num_rows), ("batch_size", batch_size)):
            if number is not None and number % group_size:
                raise ValueError(f"group_size is {group_size}, which does not divide {what}, {number}.")
        self.batch_size, self.group_size, self.sharding = batch_size, group_size, sharding
        #: Of each array in memory or in files, what messages call it, and its length.
        self._lengths = [
            (name, x.shape[0] if x.ndim else 0)
            for name, value in _named(args, kwargs)
            for x in jax.tree.leaves(value)
            if is_array(x)
        ]
        self._allow_nan = allow_nan
        self._suspects = {} if allow_nan else _with_nan(args, kwargs, maps=batch_size is None)
        #: Arrays that may hold NaN, of those that are read; ``None`` for all.
        self._may_be_nan: set[Origin] | None = set() if allow_nan is False else None
        if allow_nan is False:
            self.refuse_nan()
        if sharding is not None and batch_size is not None:
            sharding.check(batch_size, "batch_size")

        on_host = on_host or sharding is not None
        host = tuple(
            self.source is None
            and batch_size is not None
            and x.shape[:1] == (self.num_rows,)
            and (map_of(x) is not None or on_host)
            for x in arrays
        )
        self.layout = Layout(
            treedef,
            static,
            tuple(map(type, static)),
            host,
            len(args),
            tuple(kwargs),
            self.num_rows,
            indices,
            steps,
            self.source is not None,
        )
        self._files = [x for x, on_host in zip(arrays, host, strict=True) if on_host]
        #: What stays on the device, whole; and there, perhaps shared among several.
        self.resident = [native(x) for x, on_host in zip(arrays, host, strict=True) if not on_host]
        self.arrays = (
            [jax.device_put(x) for x in self.resident]
            if sharding is None
            else sharding.place(self.resident, self.num_rows)
        )
        #: Whether chunks hold rows, which the host reads ahead while the device is busy.
        self.reads = self.source is not None or bool(self._files)

        self._x64 = bool(jax.config.read("jax_enable_x64"))
        self.seed = np.asarray(jax.random.key_data(rng_key)).ravel().tolist()
        self._shuffle = Shuffle(self.seed, self.num_rows // group_size)
        self._stream: Iterator[Any] | None = None
        self._position = -1
        self._last: Any = None

    @property
    def _row_type(self) -> type:
        return np.int32 if self.num_rows < 2**31 else np.int64

    def rows(self, step: int, num_steps: int) -> np.ndarray | None:
        """Row numbers of ``num_steps`` batches, each a function of the key and its step alone."""
        if self.batch_size is None or self.source is not None:
            return None
        groups, chosen = self.num_rows // self.group_size, self.batch_size // self.group_size
        numbers: np.ndarray = np.empty((num_steps, chosen), self._row_type)
        for i in range(num_steps):
            epoch, batch = divmod(step + i, groups // chosen)
            numbers[i] = self._shuffle(epoch, batch * chosen, (batch + 1) * chosen)
        if self.group_size == 1:
            return numbers
        rows = numbers[:, :, None] * self.group_size + np.arange(self.group_size, dtype=numbers.dtype)
        return rows.reshape(num_steps, self.batch_size)

    @property
    def step_rows(self) -> int:
        """Rows of a step; a source tells with its first batch, once that was read."""
        if self.source is None:
            return self.batch_size or self.num_rows
        return next((len(x) for x in jax.tree.leaves(self._last) if np.ndim(x)), 0)

    def all_rows(self) -> list[np.ndarray] | None:
        """A chunk of batches that hold all rows, of data on the device; None if every step takes all rows."""
        if self.batch_size is None:
            return None
        starts = np.arange(0, self.num_rows, self.batch_size).clip(max=self.num_rows - self.batch_size)
        return [(starts[:, None] + np.arange(self.batch_size)).astype(self._row_type)]

    def row(self, chunk: Any, step: int, i: int, place: int) -> str:
        """What a message calls a row of the chunk that begins at a step: the one at a place in its i-th batch."""
        if chunk is None:
            return f"row {place}"
        if self.source is not None:
            return f"row {place} of batch {step + i}"
        return f"row {chunk[0][i][place]}" if self.sharding is None else f"row {place} of step {step + i}"

    def max_steps(self, first: int) -> int:
        """How many steps a chunk may have, at least one; the first step that will be read tells their sizes."""
        if not self.reads:
            return np.iinfo(np.int32).max
        one = sum(x.nbytes for x in jax.tree.leaves(self.read(first, 1)))
        return max(1, MAX_BYTES_PER_CALL // max(1, one))

    def read(self, step: int, num_steps: int, length: int | None = None) -> Any:
        """
        The chunk of steps, as NumPy arrays; None if every step takes all rows.

        :param step: the first step, counted from zero over all continuations.
        :param num_steps: the number of steps.
        :param length: of the chunk, filled up with anything; the number of steps if omitted.
        """
        length = num_steps if length is None else length
        with jax.enable_x64(self._x64):  # a setting of the thread, and others read ahead
            if self.source is not None:
                return self._read_source(step, num_steps, length)
            return self._read_files(step, num_steps, length)

    def _read_files(self, step: int, num_steps: int, length: int) -> Any:
        rows = self.rows(step, num_steps)
        if rows is None:
            return None
        if self.sharding is not None:  # of the rows of this process
            rows = rows[:, self.sharding.local_rows(rows.shape[1])]
        chunk = [_filled_up(rows, length)]
        numbers = [i for i, on_host in enumerate(self.layout.host) if on_host]
        for number, file in zip(numbers, self._files, strict=True):
            values = read_rows(file, rows)
            values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)
            self._refuse_nan(values, Origin(number), f"rows of steps {step} to {step + num_steps - 1}")
            chunk.append(_filled_up(values, length))
        return chunk

    def _read_source(self, step: int, num_steps: int, length: int) -> Any:
        assert self.source is not None
        batches = []
        if self._stream is not None and step == self._position - 1:
            batches = [self._last]  # once more: what was looked at first, for the shapes
        elif self._stream is None or step != self._position:
            self._stream = iter(self.source.batches(self.seed, self.batch_size, step))
        batches += [next(self._stream) for _ in range(num_steps - len(batches))]
        self._position, self._last = step + num_steps, batches[-1]

        numbers = iter(range(len(jax.tree.leaves(self._last))))

        def stack(*values):
            origin = Origin(next(numbers), of_source=True)
            stacked = np.stack([np.asarray(value) for value in values])
            stacked = stacked.astype(jax.dtypes.canonicalize_dtype(stacked.dtype), copy=False)
            self._refuse_nan(stacked, origin, f"batches {step} to {step + num_steps - 1} of the source")
            if self.sharding is not None and stacked.ndim > 1:
                stacked = stacked[:, self.sharding.local_rows(stacked.shape[1])]
            return _filled_up(stacked, length)

        return jax.tree.map(stack, *batches)

    def allow_nan_of(self, masked: set[int]) -> None:
        """
        Accept NaN in the observations that the model masks, and nowhere else.

        :param masked: which of the arrays of a call these are, in the order of its leaves.
        :raises ValueError: for others that have NaN or infinities; of those that are read, when they are.
        """
        if self._allow_nan is None:
            origins = [] if not masked else self.layout.origins(self._last)
            self._may_be_nan = {origins[i] for i in masked}
            self.refuse_nan()

    def refuse_nan(self) -> None:
        """Raise ``ValueError`` for the first argument in memory with NaN or infinities that may not have them."""
        for number, sentence in self._suspects.items():
            if self._may_be_nan is None or Origin(number) not in self._may_be_nan:
                raise ValueError(sentence)

    def uncut(self) -> dict[int, str]:
        """
        Arrays that batches are not cut from, as they are not as long as the data, by their place among a call's leaves:
        a sentence that says so. None where all rows are taken.
        """
        if self.source is not None or self.batch_size is None:
            return {}
        first = next(name for name, length in self._lengths if length)
        origins = self.layout.origins(None)
        return {
            place: (
                f"{name} has {length} rows, and {first} has {self.num_rows}: batches are cut from arrays that are as "
                f"long as the first one, and {name} is passed as a whole."
            )
            for place, origin in enumerate(origins)
            for name, length in [self._lengths[origin.number] if origin.number >= 0 else ("", 0)]
            if length not in (0, self.num_rows)
        }

    @property
    def has_nan(self) -> bool:
        """Whether arguments in memory have NaN or infinities that are not accepted everywhere."""
        return bool(self._suspects)

    def _refuse_nan(self, values: np.ndarray, origin: Origin, where: str) -> None:
        allowed = self._may_be_nan is None or origin in self._may_be_nan
        if not allowed and values.dtype.kind in "fc" and not np.isfinite(values).all():
            bad = int(np.sum(~np.isfinite(values)))
            raise ValueError(f"{bad} values in the {where} are NaN or infinite. {_REMOVE}")

    def place(self, chunk: Any) -> Any:
        """A chunk on the device, or on those that share the rows."""
        if self.sharding is not None and chunk is not None:
            return self.sharding.place_chunk(chunk)
        return jax.device_put(chunk)

    def item(self, step: int) -> Any:
        """A step's part of a chunk; of all processes' rows, where several share them."""
        sharding, self.sharding = self.sharding, None
        item = jax.tree.map(lambda x: x[0], self.read(step, 1))
        self.sharding = sharding
        return item

    def first_call(self, step: int = 0) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a step, concrete; of all processes' rows, where several share them."""
        item = self.item(step)
        arrays: list[Any] = self.arrays if self.sharding is None else [jax.device_put(x) for x in self.resident]
        if on_cpu() and item is not None:  # rows are taken there without a program
            arrays = [np.asarray(x) for x in arrays]
        args, kwargs = self.layout.call(arrays, item, step)
        return jax.tree.map(lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, (args, kwargs))

    def described(self) -> dict[str, str]:
        """What checkpoints know arguments by: shapes, dtypes and checksums; those of a source's first batch."""
        found: dict[str, str] = {}
        for name, value in _named(*self._given):
            if isinstance(value, Source):
                found[f"{name}: rows"] = str(value.num_rows)
                name, value = f"{name}: batch 0", next(iter(value.batches(self.seed, self.batch_size, 0)))
            for path, x in jax.tree_util.tree_leaves_with_path(value):
                plain = isinstance(x, (str, bytes, int, float, complex))
                words = _described(x) if is_array(x) else repr(x) if plain else type(x).__qualname__
                found[f"{name}{jax.tree_util.keystr(path)}"] = words
        return found


def _described(x: Any) -> str:
    """Dtype, shape and checksum of an array; of a large one, some rows are looked at, first and last among them."""
    if x.ndim == 0 or (x.nbytes <= MAX_BYTES_CHECKED and map_of(x) is None):
        some = np.asarray(x)
    else:
        rows = np.unique(np.linspace(0, len(x) - 1, min(len(x), 64)).astype(np.int64)) if len(x) else np.arange(0)
        some = read_rows(x, rows) if isinstance(x, np.ndarray) else np.asarray(x[rows])
    dtype = jax.dtypes.canonicalize_dtype(native(some).dtype)
    checksum = zlib.crc32(np.ascontiguousarray(some.astype(dtype)).tobytes())
    return f"{dtype}[{','.join(map(str, x.shape))}] {checksum:08x}"


def check_arrays(args, kwargs) -> None:
    """Raise for masked arrays of NumPy, whose mask would be lost; warn of numbers that merge in JAX's precision."""
    for name, value in _named(args, kwargs):
        for x in filter(is_array, jax.tree.leaves(value)):
            checks.require_unmasked(x, name)
            checks.warn_if_merged(x, name)


def _require_arrays(args, kwargs, rows: int) -> None:
    """
    Raise ``TypeError`` for tables, lists of numbers and arrays of objects as long as the data, or of any length without
    arrays: batches cannot be cut from them.
    """
    for name, value in _named(args, kwargs):
        for x in jax.tree.leaves(value, is_leaf=_is_list_of_numbers):
            length = len(x) if _is_list_of_numbers(x) else next(iter(getattr(x, "shape", ())), 0)
            if length and not is_array(x) and rows in (0, length):
                raise TypeError(
                    f"{name} has a {type(x).__name__} of {length} rows; it must be an array of numbers for batch_size "
                    "to cut batches from, such as numpy.asarray(x, float)."
                )


def _is_list_of_numbers(x: Any) -> bool:
    leaves = jax.tree.leaves(x) if isinstance(x, (list, tuple)) else ()
    return len(leaves) > 0 and all(isinstance(leaf, (numbers.Number, np.generic)) for leaf in leaves)


def _named(args, kwargs) -> list[tuple[str, Any]]:
    return [(f"args[{i}]", value) for i, value in enumerate(args)] + [
        (f"argument {key!r}", value) for key, value in kwargs.items()
    ]


def refuse_traced(name: str, values: Any) -> None:
    """Raise ``TypeError`` inside ``jit``, ``vmap`` and ``grad``, where arrays have no values yet."""
    # Inside jit, new arrays have none either.
    if any(checks.is_traced(x) for x in jax.tree.leaves((values, jax.device_put(0.0)))):
        raise TypeError(
            f"npgp.{name} looks at values, which arrays do not have inside jit, vmap and grad: call it outside, or "
            "take steps by svi.update."
        )


def _with_nan(args, kwargs, maps: bool) -> dict[int, str]:
    """
    For each array that holds NaN or an infinity, by its number, a sentence that says so; −2 for what is no array.

    :param maps: look at maps of files too; otherwise their rows are looked at as they are read.
    """
    found, number = {}, -1
    for name, value in _named(args, kwargs):
        for x in jax.tree.leaves(value):
            number += is_array(x)
            looked_at = is_array(x) and (maps or map_of(x) is None)
            if isinstance(x, float) or (looked_at and jnp.issubdtype(x.dtype, jnp.inexact)):
                xp: Any = jnp if isinstance(x, jax.Array) else np
                bad = int(xp.sum(~xp.isfinite(x)))
                if bad:
                    sentence = f"{bad} of {np.size(x)} values in {name} are NaN or infinite. {_REMOVE}"
                    found[number if is_array(x) else -2] = sentence
    return found


def _filled_up(x: np.ndarray, length: int) -> np.ndarray:
    return np.pad(x, ((0, length - len(x)),) + ((0, 0),) * (x.ndim - 1))
