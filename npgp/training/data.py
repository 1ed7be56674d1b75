"""The data of a training, which say their size: arrays in memory and in files, and sources; batches of their rows."""

from __future__ import annotations

import math
import mmap
import numbers
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import checks
from npgp.programs.backend import on_cpu
from npgp.training.devices import Sharding
from npgp.training.sources import Source

#: What the batches of one device call may take when they are read on the host, in bytes.
MAX_BYTES_PER_CALL = 2**25
#: Checkpoints know arrays of at most so many bytes by all their values.
MAX_BYTES_CHECKED = 2**26
_REMOVE = 'Remove them; or mask them, if they are of npgp.observe, as by mask="nan"; or pass allow_nan=True.'


def is_array(x: Any) -> bool:
    """True for arguments that training passes to the device: arrays of numbers, no NumPy arrays of objects or text."""
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind in "biufc")


@dataclass(frozen=True)
class Layout:
    """
    Structure of the arguments, by which arrays on the device and a step's batch from a chunk become a call: a compiled
    step depends on it and on shapes. It holds no data.

    :param treedef: structure of the arguments, those of a source among them.
    :param static: the leaves that are no arrays, and None in place of arrays.
    :param types: of the former; ``1``, ``1.0`` and ``True`` are equal, and make different programs.
    :param host: for each array, whether chunks hold it.
    :param num_args: how many of the arguments are positional.
    :param keywords: names of the others.
    :param num_rows: rows of the data.
    :param indices: keyword of the rows' numbers.
    :param steps: keyword of the step's number.
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

    def call(self, arrays: Any, item: Any, step: ArrayLike = 0) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments at a step, from one step's part of a chunk, or of all rows for ``None``."""
        rows, *read = [None] if item is None else item
        resident, chunk = iter(arrays), iter(read)

        def argument(host: bool) -> Any:
            if host:
                return next(chunk)
            x = next(resident)
            if rows is None or x.shape[:1] != (self.num_rows,):
                return x
            return x[rows] if isinstance(x, np.ndarray) else x.at[rows].get(mode="promise_in_bounds")

        remaining = map(argument, self.host)
        args, kwargs = self._assembled([next(remaining) if x is None else x for x in self.static])
        if self.indices is not None:
            all_rows = np.arange(self.num_rows, dtype=np.int32)
            kwargs[self.indices] = jnp.asarray(all_rows if rows is None else rows)
        if self.steps is not None:
            kwargs[self.steps] = jnp.asarray(step)
        return args, kwargs

    def numbers(self) -> list[int]:
        """For each array of a call, in the order of the call's leaves, which leaf it is here; −1 if it is none."""
        args, kwargs = self._assembled([i if x is None else None for i, x in enumerate(self.static)])
        kwargs |= {name: -1 for name in (self.indices, self.steps) if name is not None}
        return jax.tree.leaves((args, kwargs))

    def _assembled(self, leaves: list) -> tuple[tuple, dict[str, Any]]:
        values = jax.tree.unflatten(self.treedef, leaves)
        return tuple(values[: self.num_args]), dict(zip(self.keywords, values[self.num_args :], strict=True))


class Data:
    """
    The arguments of model and guide, arrays apart from the rest.

    A *chunk* holds what several steps need beside the arrays that stay on the device: a list of the numbers of the rows
    of each batch (None for a source), and of the rows themselves where the array is not on the device. Its leaves lead
    with the step.

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
    :param first: the first step.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        rng_key: jax.Array,
        batch_size: int | None = None,
        indices: str | None = None,
        group_size: int = 1,
        steps: str | None = None,
        on_host: bool = False,
        sharding: Sharding | None = None,
        allow_nan: bool | None = True,
        first: int = 0,
    ):
        group_size = checks.whole_number(group_size, "group_size")
        if batch_size is not None:
            batch_size = checks.whole_number(batch_size, "batch_size", least=None)
        self._call = args, kwargs
        self.source = args[0] if args and isinstance(args[0], Source) else None
        args = args[0 if self.source is None else 1 :]
        for option, name in (("indices", indices), ("steps", steps)):
            if not isinstance(name, str | None):
                raise TypeError(f"{option} is {checks.shown(name)}; it must be the name of an argument of the model.")
            if name in kwargs or (name is not None and option == "steps" and name == indices):
                raise ValueError(f"{option}={name!r} names an argument that is given as well.")
        for x in jax.tree.leaves((args, kwargs)):
            require_whole(x)
        check_arrays(args, kwargs)
        self.batch_size, self.group_size, self.sharding = batch_size, group_size, sharding
        self.seed = np.asarray(jax.random.key_data(rng_key)).ravel().tolist()
        self._x64 = bool(jax.config.read("jax_enable_x64"))
        self._stream: Iterator[Any] | None = None
        self._position = -1
        self._last: Any = None

        batch: Any = () if self.source is None else jax.tree.map(np.asarray, self._batches(first, 1)[0])
        if twice := [name for name in batch if isinstance(batch, dict) and name in kwargs]:
            raise ValueError(f"The source's batches hold {', '.join(twice)}, which is given as well.")
        positional = args if isinstance(batch, dict) else (*batch, *args)
        keywords = kwargs | ({name: batch[name] for name in sorted(batch)} if isinstance(batch, dict) else {})
        # Values in call order: a dictionary would be flattened in alphabetical order.
        leaves, treedef = jax.tree.flatten([*positional, *keywords.values()])
        static = tuple(None if is_array(x) else x for x in leaves)  # no leaf is None otherwise
        #: Of each leaf, what messages call it, and its length.
        self._names = [
            (name, next(iter(np.shape(x)), 0) if is_array(x) else 0)
            for name, value in _named(positional, keywords)
            for x in jax.tree.leaves(value)
        ]
        if self.source is None:
            self.num_rows = next((length for _, length in self._names if length), 0)
            if batch_size is not None or indices is not None:
                _require_arrays(args, kwargs, self.num_rows)
                if not self.num_rows:
                    raise ValueError("batch_size and indices need an array among the arguments.")
            if batch_size is not None and not 1 <= batch_size <= self.num_rows:
                raise ValueError(f"batch_size is {batch_size}, not in 1 to {self.num_rows} (the rows).")
            #: Rows of a step.
            self.step_rows = batch_size or self.num_rows
        else:
            self.num_rows = self.source.num_rows or 0
            self.step_rows = next((len(x) for x in jax.tree.leaves(batch) if np.ndim(x)), 0)
            if indices is not None or group_size != 1:
                raise ValueError("indices and group_size need arrays; a source has an order of its own.")
        for what, number in (("rows", self.num_rows), ("batch_size", batch_size)):
            if number is not None and number % group_size:
                raise ValueError(f"group_size is {group_size}, which does not divide {what}, {number}.")
        if sharding is not None and batch_size is not None:
            sharding.check(batch_size, "batch_size")

        of_source = {id(x) for x in jax.tree.leaves(batch)}
        on_host = on_host or sharding is not None

        def is_read(x: Any) -> bool:
            cut = self.source is None and batch_size is not None and x.shape[:1] == (self.num_rows,)
            return id(x) in of_source or (cut and (map_of(x) is not None or on_host))

        arrays = [(i, x, is_read(x)) for i, x in enumerate(leaves) if is_array(x)]
        self.layout = Layout(
            treedef,
            static,
            tuple(map(type, static)),
            tuple(read for *_, read in arrays),
            len(positional),
            tuple(keywords),
            self.num_rows,
            indices,
            steps,
        )
        #: Numbers of the leaves that are read, and of those that are files or in the host's memory, these.
        self._read = [i for i, _, read in arrays if read]
        self._files = [x for _, x, read in arrays if read]
        #: What stays on the device, whole; and there, perhaps shared among several.
        self.resident = [native(x) for _, x, read in arrays if not read]
        self._allow_nan = allow_nan
        #: Leaves that may have NaN; ``None`` for all. Of those that are not read, which have, and a sentence for each.
        self._may_be_nan: set[int] | None = set() if allow_nan is False else None
        self._suspects = {} if allow_nan else self._with_nan(leaves)
        if allow_nan is False:
            self.refuse_nan()
        self.arrays = (
            [jax.device_put(x) for x in self.resident]
            if sharding is None
            else sharding.place(self.resident, self.num_rows)
        )
        #: Whether chunks hold rows, which the host reads ahead while the device is busy.
        self.reads = bool(self._read)
        self._row_type = np.int32 if self.num_rows < 2**31 else np.int64
        self._shuffle = Shuffle(self.seed, self.num_rows // group_size)

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

    def all_rows(self) -> list[np.ndarray] | None:
        """A chunk of batches that hold all rows, of data on the device; None if every step takes all rows."""
        if self.batch_size is None:
            return None
        starts = np.arange(0, self.num_rows, self.batch_size).clip(max=self.num_rows - self.batch_size)
        return [(starts[:, None] + np.arange(self.batch_size)).astype(self._row_type)]

    def row(self, chunk: Any, step: int, i: int, position: int) -> str:
        """Name for messages of a row of the chunk that begins at a step: the one at a place in its i-th batch."""
        if chunk is None:
            return f"row {position}"
        if self.source is not None:
            return f"row {position} of batch {step + i}"
        return f"row {chunk[0][i][position]}" if self.sharding is None else f"row {position} of step {step + i}"

    def max_steps(self, first: int) -> int:
        """Largest number of steps in a chunk, at least one, by the size of the first step that will be read."""
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
                batches = zip(*(jax.tree.leaves(batch) for batch in self._batches(step, num_steps)), strict=True)
                read = [np.stack([np.asarray(x) for x in same]) for same in batches]
                where, rows = f"batches {step} to {step + num_steps - 1} of the source", None
                if self.sharding is not None:
                    read = [x[:, self.sharding.local_rows(x.shape[1])] if x.ndim > 1 else x for x in read]
            else:
                rows = self.rows(step, num_steps)
                if rows is None:
                    return None
                if self.sharding is not None:  # of the rows of this process
                    rows = rows[:, self.sharding.local_rows(rows.shape[1])]
                read = [read_rows(file, rows) for file in self._files]
                where = f"rows of steps {step} to {step + num_steps - 1}"
            chunk: list[Any] = [None if rows is None else _filled_up(rows, length)]
            for number, values in zip(self._read, read, strict=True):
                values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)
                allowed = self._may_be_nan is None or number in self._may_be_nan
                if not allowed and values.dtype.kind in "fc" and not np.isfinite(values).all():
                    bad = int(np.sum(~np.isfinite(values)))
                    raise ValueError(f"{bad} values in the {where} are NaN or infinite. {_REMOVE}")
                chunk.append(_filled_up(values, length))
            return chunk

    def _batches(self, step: int, num_steps: int) -> list[Any]:
        """Read ``num_steps`` of the source's batches; the last is kept, as the first is read before for its shapes."""
        assert self.source is not None
        batches: list[Any] = []
        if self._stream is not None and step == self._position - 1:
            batches = [self._last]
        elif self._stream is None or step != self._position:
            self._stream = iter(self.source.batches(self.seed, self.batch_size, step))
        batches += [next(self._stream) for _ in range(num_steps - len(batches))]
        self._position, self._last = step + num_steps, batches[-1]
        return batches

    def allow_nan_of(self, masked: set[int]) -> None:
        """
        Accept NaN in the observations that the model masks, and nowhere else.

        :param masked: which of the arrays of a call these are, in the order of its leaves.
        :raises ValueError: for others that have NaN or infinities; of those that are read, when they are.
        """
        if self._allow_nan is None:
            numbers = self.layout.numbers()
            self._may_be_nan = {numbers[i] for i in masked}
            self.refuse_nan()

    def refuse_nan(self) -> None:
        """Raise ``ValueError`` for the first argument in memory with NaN or infinities that may not have them."""
        for number, sentence in self._suspects.items():
            if number not in (self._may_be_nan or ()):
                raise ValueError(sentence)

    def _with_nan(self, leaves: list[Any]) -> dict[int, str]:
        """For each leaf with NaN or an infinity, by its number, a sentence that says so; rows of files when read."""
        found = {}
        of_source = self._read if self.source is not None else ()
        for number, x in enumerate(leaves):
            if number in of_source:
                continue
            in_memory = is_array(x) and (self.batch_size is None or map_of(x) is None)
            if isinstance(x, float) or (in_memory and jnp.issubdtype(x.dtype, jnp.inexact)):
                xp: Any = jnp if isinstance(x, jax.Array) else np
                if bad := int(xp.sum(~xp.isfinite(x))):
                    name = self._names[number][0]
                    found[number] = f"{bad} of {np.size(x)} values in {name} are NaN or infinite. {_REMOVE}"
        return found

    @property
    def has_nan(self) -> bool:
        """True if arguments in memory have NaN or infinities that are not accepted everywhere."""
        return bool(self._suspects)

    def uncut(self) -> dict[int, str]:
        """
        Arrays that batches are not cut from, as they are not as long as the data, by their place among a call's arrays:
        a sentence that says so. None where all rows are taken.
        """
        if self.source is not None or self.batch_size is None:
            return {}
        first = next(name for name, length in self._names if length)
        return {
            position: (
                f"{name} has {length} rows, and {first} has {self.num_rows}: batches are cut from arrays that are as "
                f"long as the first one, and {name} is passed as a whole."
            )
            for position, number in enumerate(self.layout.numbers())
            for name, length in [self._names[number] if number >= 0 else ("", 0)]
            if length not in (0, self.num_rows)
        }

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
        return self._concrete(self.item(step), step)

    def _concrete(self, item: Any, step: int) -> tuple[tuple, dict[str, Any]]:
        arrays: list[Any] = self.arrays if self.sharding is None else [jax.device_put(x) for x in self.resident]
        if on_cpu() and item is not None:  # rows are taken there without a program
            arrays = [np.asarray(x) for x in arrays]
        args, kwargs = self.layout.call(arrays, item, step)
        return jax.tree.map(lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, (args, kwargs))

    def first_rows(self, count: int) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a step with the rows of the first few, so many if there are; of a source those of one."""
        if self.batch_size is None or self.source is not None:
            return self.first_call()
        sharding, self.sharding = self.sharding, None
        chunk = self.read(0, min(-(-count // self.batch_size), self.num_rows // self.batch_size))
        self.sharding = sharding
        return self._concrete(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), chunk), 0)

    def described(self) -> dict[str, str]:
        """Describe arguments for checkpoints by shapes, dtypes and checksums; a source by its first batch."""
        found: dict[str, str] = {}
        for name, value in _named(*self._call):
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


def check_arrays(args: tuple, kwargs: dict[str, Any]) -> None:
    """
    Raise for arrays of text and objects, and for masked arrays of NumPy, whose mask would be lost; warn of numbers that
    merge in JAX's precision.
    """
    for name, value in _named(args, kwargs):
        for x in jax.tree.leaves(value):
            if isinstance(x, np.ndarray) and x.dtype.kind in "USOMm":
                raise TypeError(
                    f"{name} has dtype {x.dtype}; arrays must be of numbers (np.unique(x, return_inverse=True)[1] "
                    "numbers the categories of x)."
                )
            if not is_array(x):
                continue
            checks.require_unmasked(x, name)
            checks.warn_if_merged(x, name)


def _require_arrays(args: tuple, kwargs: dict[str, Any], rows: int) -> None:
    """
    Raise ``TypeError`` for tables and lists of numbers as long as the data, or of any length without arrays: batches
    cannot be cut from them.
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


def _named(args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
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


def _filled_up(x: np.ndarray, length: int) -> np.ndarray:
    return np.pad(x, ((0, length - len(x)),) + ((0, 0),) * (x.ndim - 1))


# ---------------------------------------------------------------------------------------------------------------
# Maps of files


def map_of(x: Any) -> mmap.mmap | None:
    """The map of a file that an array looks into, if it does."""
    while isinstance(x, np.ndarray):
        x = x.base
    return x if isinstance(x, mmap.mmap) else None


def native(x: Any) -> Any:
    """An array in this machine's byte order, which JAX wants; those of JAX are."""
    return x.astype(x.dtype.newbyteorder("=")) if isinstance(x, np.ndarray) and not x.dtype.isnative else x


def require_whole(x: Any) -> None:
    """
    Raise if an array is a map of a file that has been cut short since: to look at what is missing kills the process.

    :raises ValueError: if so; other values pass.
    """
    source = map_of(x)
    if source is None:
        return
    while not isinstance(x, np.memmap) and isinstance(x.base, np.ndarray):
        x = x.base
    skipped = x.offset - x.offset % mmap.ALLOCATIONGRANULARITY if isinstance(x, np.memmap) else 0
    if source.size() < skipped + len(source):
        raise ValueError(
            f"The file {str(getattr(x, 'filename', None) or 'of a map')!r} has been cut short since it was mapped: it "
            f"has {source.size()} bytes, and {skipped + len(source)} are needed. Leave files of data as they are "
            "during training, or write new ones beside them."
        )


def read_rows(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """
    Copy rows of an array on the host, in this machine's byte order.

    Of a map of a file (``numpy.memmap``) nothing stays in memory: pages that have been looked at would count as the
    process's memory, up to the whole file.

    :param x: the array, (N, …).
    :param rows: numbers of rows, of any shape.
    :return: (*rows.shape, …).
    :raises ValueError: if it is a map of a file that has been cut short.
    """
    require_whole(x)
    source = map_of(x)
    # A private map ("c") may hold what the file does not.
    if source is None or getattr(x, "mode", None) not in ("r", "r+", "w+"):
        return native(np.asarray(x)[rows])
    source.madvise(mmap.MADV_RANDOM)  # single pages, and not those after them
    try:
        return native(np.asarray(x)[rows])
    finally:
        source.madvise(mmap.MADV_NORMAL)
        source.madvise(mmap.MADV_DONTNEED)


# ---------------------------------------------------------------------------------------------------------------
# Orders of rows


#: Up to so many rows an epoch's order is drawn as a whole and kept. Beyond, it would take more memory than batches.
MAX_KEPT = 2**20
_ROUNDS = 8


class Shuffle:
    """
    Random orders of ``0, …, size − 1``.

    Small sizes are permuted uniformly at random. For large ones, a keyed Feistel network on pairs (l, r), where
    row = l + a r and a b ≥ size, computes single entries and no others: each round adds to one half a
    random function of the other, which is a bijection whatever the function. Pairs that stand for no row are sent
    through the network again until they do (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"), which
    keeps it a bijection; there are less than a of them, one in √size.

    :param seed: whole numbers.
    :param size: number of rows.
    """

    def __init__(self, seed: Sequence[int], size: int):
        self.seed, self.size = list(seed), size
        side = math.isqrt(max(size - 1, 0)) + 1
        self._sides = (side, -(-size // side))
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __call__(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Entries ``start`` to ``stop`` of the order in an epoch, (stop − start,)."""
        if epoch != self._epoch:
            rng = np.random.default_rng([*self.seed, epoch])
            if self.size <= MAX_KEPT:
                self._order = rng.permutation(np.arange(self.size, dtype=np.int32))
            else:
                self._order = rng.integers(2**64, size=_ROUNDS, dtype=np.uint64)
            self._epoch = epoch
        if self.size <= MAX_KEPT:
            return self._order[start:stop]
        rows = np.arange(start, stop, dtype=np.uint64)
        rows = self._network(rows)
        while (outside := rows >= self.size).any():
            rows[outside] = self._network(rows[outside])
        return rows.astype(np.int64)

    def _network(self, rows: np.ndarray) -> np.ndarray:
        a, b = (np.uint64(side) for side in self._sides)
        r, l = np.divmod(rows, a)
        for i, key in enumerate(self._order):
            if i % 2:
                r = (r + _mix(l + key)) % b
            else:
                l = (l + _mix(r + key)) % a
        return l + a * r


def _mix(x: np.ndarray) -> np.ndarray:
    """A random-looking function of 64-bit words to 32 bits: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(32)
