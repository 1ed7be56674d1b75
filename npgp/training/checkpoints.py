"""
Checkpoints of everything that training needs to go on: the state, the losses so far and what callbacks keep.

Orbax writes them, in the background, each a folder that gets its name when it is complete: a run that is killed leaves
whole checkpoints behind, and at most one without a name. All arrays of a checkpoint are one array of bytes with a
checksum, as Orbax has none of its own, and no empty arrays.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from npgp import checks
from npgp.checks import optional
from npgp.programs.compiled import one_model_at_a_time
from npgp.training.callbacks import Callback
from npgp.training.interrupts import interrupts_held
from npgp.training.row_tables import RowState, RowSVI
from npgp.training.run import Training
from npgp.training.step import steps_taken

__all__ = ["Checkpoints", "Saved"]

#: Changes with the format of checkpoints; only those of this version are read.
VERSION = 1
#: What the names of checkpoints begin with, and those of unfinished ones: nothing else in the folder is touched.
_PREFIX = "npgp"
_UNFINISHED = re.compile(rf"{_PREFIX}_[0-9]+\.orbax-checkpoint-tmp.*")


class Saved(NamedTuple):
    """Contents of a checkpoint."""

    #: The ``SVIState``.
    state: Any
    #: The losses of all steps since the first of the run.
    losses: np.ndarray
    #: What :meth:`npgp.training.Callback.snapshot` returned, by names that begin with that of the callback.
    snapshots: dict[str, np.ndarray]


class Checkpoints(Callback):
    """
    A folder of checkpoints, for :func:`npgp.fit`, which goes on from the newest one:

    .. code-block:: python

        result = npgp.fit(svi, key, 100, X, y, checkpoints=npgp.training.Checkpoints("run1"))

    Run the same program again after it was interrupted, or killed, and it takes the same steps, with the same numbers,
    as if nothing had happened. A program with other data or another model is refused; one with another optimizer, or
    other particles of the ELBO, goes on with a warning. If a checkpoint cannot be written, as on a full disk, training
    goes on with a warning.

    :param directory: the folder; it is made if it is not there. Where several processes train together, all must see
        the same folder; the first of them writes. Other files in it are left alone.
    :param every: seconds between checkpoints.
    :param steps: steps between checkpoints, instead of seconds.
    :param keep: how many checkpoints to keep, the newest ones.
    :raises ImportError: without Orbax (``pip install npgp[checkpoints]``).
    """

    def __init__(self, directory: str | os.PathLike, *, every: float = 60.0, steps: int | None = None, keep: int = 2):
        if not every > 0:
            raise ValueError(f"every is {every}, not a positive number of seconds.")
        steps = None if steps is None else checks.whole_number(steps, "steps")
        keep = checks.whole_number(keep, "keep")
        self._orbax = optional("orbax.checkpoint", extra="checkpoints", what="npgp.training.Checkpoints")
        self.directory = Path(directory).absolute()
        self.every, self.steps, self.keep = every, steps, keep
        self._writer: ThreadPoolExecutor | None = None
        self._pending: tuple[int, Future] | None = None
        #: The number of steps of the newest checkpoint that is whole, if there is one.
        self.newest: int | None = None

    def begin(self, training: Training) -> None:
        """Implement :meth:`Callback.begin`: go on from the newest checkpoint, if there is one."""
        data, state = training.data, training.state
        about = {
            "seed": data.seed,
            "first_step": training.first,
            "batch_size": data.batch_size,
            "group_size": data.group_size,
            "num_rows": data.num_rows,
            **data.described(),
        }
        saved = self.open(state, about, _programs(training))
        if saved is None:
            return
        if training.left(len(saved.losses)) < 0:
            warnings.warn(
                f"num_steps is {training.num_steps}, and the checkpoints have {len(saved.losses)} steps: none is "
                "taken, and the result is that of all these; give more to train on.",
                stacklevel=3,
            )
        training.resume(saved.state, saved.losses)
        for name, callback in _named(training.callbacks):
            snapshots = {key.removeprefix(name): x for key, x in saved.snapshots.items() if key.startswith(name)}
            callback.restore(snapshots, training.params)

    def __call__(self, training: Training) -> None:
        """Implement :meth:`Callback.__call__`: save, if it is time."""
        if self.due(training.step):
            self._save(training)

    def end(self, training: Training, error: BaseException | None) -> None:
        """Implement :meth:`Callback.end`: save the last state, unless an error ended the training."""
        if self._writer is not None and training.done and isinstance(error, KeyboardInterrupt | SystemExit | None):
            self._save(training)
        self.close()

    def _save(self, training: Training) -> None:
        snapshots = {name + key: x for name, c in _named(training.callbacks) for key, x in c.snapshot().items()}
        self.save(training.step, Saved(training.state, training.losses, snapshots))

    def open(self, like: Any, about: dict[str, Any], programs: Sequence[str] = ("", "")) -> Saved | None:
        """
        Start to use the folder.

        :param like: a state whose structure, shapes and dtypes the saved one must have.
        :param about: what the run is known by, for JSON, which must be that of the saved run.
        :param programs: what the model and what a step compute, as text. With the model, the saved run is refused if
            that differs; if the step does, or versions do too, there is a warning.
        :return: the newest checkpoint that is whole; ``None`` if there are no checkpoints.
        :raises ValueError: if the folder's checkpoints are of another run, or all damaged.
        :raises OSError: if the folder cannot be read.
        """
        self.close()
        self._about = json.loads(json.dumps(about))
        self._programs = [zlib.crc32(program.encode()) for program in programs]
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"The directory of checkpoints, {str(self.directory)!r}, is a file.")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._manager = self._opened()
        found = self._newest()
        if found is not None:
            self._check(found[0], _kinds(_arrays(Saved(like, np.empty(0), {}))))
        self._writer = ThreadPoolExecutor(1, "npgp-checkpoints")
        self._last_time = time.monotonic()
        return None if found is None else _rebuilt(found[1], found[0]["arrays"], like)

    def _opened(self) -> Any:
        """Orbax's manager, each process's own: the first process writes, and all read."""
        me, options = jax.process_index(), self._orbax.options
        alone = options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"{_PREFIX}{me}"
        )
        return self._orbax.CheckpointManager(
            self.directory,
            options=self._orbax.CheckpointManagerOptions(
                max_to_keep=self.keep,
                step_prefix=_PREFIX,
                create=False,
                save_root_metadata=False,
                enable_async_checkpointing=False,  # the thread is ours: errors of writing are known by their checkpoint
                multiprocessing_options=alone,
            ),
        )

    def until(self, step: int) -> int | None:
        """Number of steps after ``step`` to the next checkpoint; ``None`` if that is not known."""
        return None if self.steps is None else self.steps - step % self.steps

    def due(self, step: int) -> bool:
        """True if a checkpoint is due after ``step`` steps; the same in all processes, which must all ask."""
        if step == self.newest:
            return False
        if self.steps is not None:
            return step % self.steps == 0
        return bool(_from_first(time.monotonic() - self._last_time >= self.every))

    def save(self, step: int, saved: Saved) -> None:
        """
        Save. The arrays are copied before it returns; they are written in the background.

        What goes wrong in writing becomes a warning, at the next save or at the end.

        :param step: the number of steps so far; nothing is done if it is that of the newest checkpoint.
        :param saved: what to save.
        """
        if self._writer is None:
            raise RuntimeError("Checkpoints.save needs an open folder: call open first.")
        if step != self.newest and jax.process_index() == 0:
            with interrupts_held():
                self.finish()
                try:
                    arrays = _arrays(saved)
                    leaves = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays.values()]
                    content = np.concatenate(leaves)  # a copy: steps may write over the arrays
                    header = {"npgp": VERSION, "about": self._about, "arrays": _kinds(arrays)}
                    header |= {"programs": self._programs, "versions": _versions()}
                    self._pending = step, self._writer.submit(self._write, step, header, content)
                except MemoryError as error:
                    self._warn(step, error)
        self.newest, self._last_time = step, time.monotonic()

    def finish(self) -> bool:
        """Wait until everything is written; whether it is. If it is not, there is a warning."""
        if self._pending is None:
            return True
        step, future = self._pending
        error = future.exception()
        self._pending = None
        return error is None or self._warn(step, error)

    def close(self) -> None:
        """Wait until everything is written, and leave the folder."""
        writer, self._writer = self._writer, None
        if writer is not None:
            if not self.finish():
                self.newest = None
            writer.shutdown()
            self._manager.close()

    def _warn(self, step: int, error: BaseException) -> bool:
        words = " ".join(str(error).split())
        warnings.warn(
            f"Writing the checkpoint of step {step} to {str(self.directory)!r} failed; training goes on, and what was "
            f"saved before is still there. ({type(error).__name__}: {words:.300})",
            stacklevel=2,
        )
        return False

    def _write(self, step: int, header: dict[str, Any], content: np.ndarray) -> None:
        args = self._orbax.args
        composite = args.Composite(
            arrays=args.PyTreeSave({"content": content}),
            header=args.JsonSave({**header, "checksum": _checksum(header, content)}),
        )
        try:
            self._manager.save(step, args=composite)
        except BaseException:
            self._manager.reload()  # it takes the checkpoint for written
            raise

    def _newest(self) -> tuple[dict[str, Any], np.ndarray] | None:
        """Header and content of the newest checkpoint that is whole."""
        self.newest, found, problem = None, None, None
        step = -1
        if jax.process_index() == 0:
            try:
                for path in self.directory.iterdir():
                    if _UNFINISHED.fullmatch(path.name) and path.is_dir():  # what a killed process was writing
                        shutil.rmtree(path)
                step, found = self._first_whole()
            except Exception as error:  # the other processes wait for a word
                step, problem = -2, error
        step = _from_first(step)
        if problem is not None:
            raise problem
        if step == -2:
            raise RuntimeError(f"The first process could not read the checkpoints in {str(self.directory)!r}.")
        if found is None and step >= 0:
            found = self._read(step)
        self.newest = step if step >= 0 else None
        return found

    def _first_whole(self) -> tuple[int, Any]:
        damaged: dict[int, Exception] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                found = self._read(step)
            except MemoryError:
                raise
            except Exception as error:
                damaged[step] = error
                continue
            for bad, problem in damaged.items():
                name = self._set_aside(bad)
                warnings.warn(
                    f"The checkpoint of step {bad} in {str(self.directory)!r} is damaged and is now called {name!r}; "
                    f"training goes on from step {step}. ({' '.join(str(problem).split()):.300})",
                    stacklevel=6,
                )
            self._manager.reload()
            if found[0]["npgp"] != VERSION:
                raise ValueError(
                    f"The checkpoints in {str(self.directory)!r} have version {found[0]['npgp']} of their format; this "
                    f"npgp reads {VERSION}."
                )
            return step, found
        if damaged:
            raise ValueError(
                f"None of the checkpoints in {str(self.directory)!r} can be read: they are damaged. Choose another "
                f"folder, or move them away. ({' '.join(str(next(iter(damaged.values()))).split()):.300})"
            )
        return -1, None

    def _set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint; its new name."""
        path = self.directory / f"{_PREFIX}_{step}"
        names = (path.with_name(f"{path.name}.damaged{i or ''}") for i in itertools.count())
        return path.rename(next(name for name in names if not name.exists())).name

    def _read(self, step: int) -> tuple[dict[str, Any], np.ndarray]:
        """Header and content of a checkpoint."""
        args = self._orbax.args
        found = self._manager.restore(step, args=args.Composite(arrays=args.PyTreeRestore(), header=args.JsonRestore()))
        header, content = dict(found.header), found.arrays["content"]
        if header.pop("checksum") != _checksum(header, content):
            raise ValueError("Its numbers are not those that were written.")
        return header, content

    def _check(self, header: dict[str, Any], kinds: dict[str, str]) -> None:
        """Refuse the checkpoint of another run; given the arrays of this one."""
        where = f"The checkpoints in {str(self.directory)!r}"
        advice = "Choose another folder to start afresh, or go on as before."
        old, new = header["about"] | _state(header["arrays"]), self._about | _state(kinds)
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                raise ValueError(
                    f"{where} are of a run with {name} = {old.get(name, 'missing')!r}, and this one has "
                    f"{new.get(name, 'missing')!r}. {advice}"
                )
        if header["programs"] == self._programs:
            return
        if header["programs"][0] != self._programs[0] and header["versions"] == _versions():
            raise ValueError(
                f"{where} are of a run whose model, guide or ELBO computed something else; they must be the same. "
                f"{advice}"
            )
        warnings.warn(
            f"{where} are of a run whose steps computed something else: its optimizer was another one, its ELBO had "
            "other particles, or versions were others. Training goes on from there; choose another folder to start "
            "afresh.",
            stacklevel=6,
        )


def _versions() -> list[str]:
    """Versions of the libraries that trace programs, and the backend."""
    return [*(sys.modules[name].__version__ for name in ("jax", "numpyro", "npgp")), jax.default_backend()]


def _named(callbacks: Sequence[Callback]) -> list[tuple[str, Callback]]:
    """Callbacks with names: of their classes, and counted."""
    counts: dict[str, int] = {}
    named = []
    for callback in callbacks:
        kind = type(callback).__qualname__
        counts[kind] = counts.get(kind, -1) + 1
        named.append((f"{kind}.{counts[kind]}.", callback))
    return named


def _programs(training: Training) -> list[str]:
    """Jaxprs of the ELBO with one particle and of a step, as text."""
    svi, state = copy.copy(training.svi), training.state
    svi.loss = copy.copy(svi.loss)
    svi.loss.num_particles = 1
    alone = RowSVI(svi) if isinstance(state.optim_state, RowState) else svi
    data = training.data
    operands = state, data.resident, data.item(training.first)

    def text(function: Callable) -> str:
        def one(state: Any, arrays: Any, item: Any) -> Any:
            args, kwargs = data.layout.call(arrays, item, steps_taken(state))
            return function(state, *args, **kwargs)

        with one_model_at_a_time:
            jaxpr = jax.make_jaxpr(one)(*operands).jaxpr  # which has no values of arrays
        return re.sub("0x[0-9a-f]+", "", str(jaxpr))  # and then no addresses

    return [text(alone.evaluate), text(training.steps.step)]


def _from_first(number: int) -> int:
    """The first process's number."""
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _plain(x: Any) -> np.ndarray:
    """An array on the host; of a random key, its data."""
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def _arrays(saved: Saved) -> dict[str, np.ndarray]:
    """By name; they may look into the device's memory."""
    leaves = jax.tree_util.tree_leaves_with_path(saved.state)
    arrays = {f"state{jax.tree_util.keystr(path)}": _plain(x) for path, x in leaves}
    return (
        arrays | {"losses": saved.losses} | {f"callback.{name}": np.asarray(x) for name, x in saved.snapshots.items()}
    )


def _kinds(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    """Dtypes and shapes as words."""
    return {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in arrays.items()}


def _state(kinds: dict[str, str]) -> dict[str, str]:
    """Dtypes and shapes of a state's arrays among all that a checkpoint has."""
    return {name: kind for name, kind in kinds.items() if name.startswith("state")}


def _rebuilt(content: np.ndarray, kinds: dict[str, str], like: Any) -> Saved:
    """Rebuild a checkpoint's contents from the bytes of all arrays and a state of the same structure."""
    arrays, end = {}, 0
    for name, kind in kinds.items():
        dtype, lengths = kind[:-1].split("[")
        shape = [int(length) for length in lengths.split(",") if length]
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        arrays[name] = content[start:end].copy().view(dtype).reshape(shape)

    def leaf(path: tuple[Any, ...], x: Any) -> Any:
        value = arrays[f"state{jax.tree_util.keystr(path)}"]
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(x))
        return jnp.asarray(value) if isinstance(x, jax.Array) else value

    snapshots = {name.removeprefix("callback."): x for name, x in arrays.items() if name.startswith("callback.")}
    return Saved(jax.tree_util.tree_map_with_path(leaf, like), arrays["losses"], snapshots)


def _checksum(header: dict[str, Any], content: np.ndarray) -> int:
    return zlib.crc32(json.dumps(header, sort_keys=True).encode(), zlib.crc32(content.data))
