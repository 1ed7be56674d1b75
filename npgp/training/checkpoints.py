"""
Checkpoints of everything that training needs to go on: the state, the losses so far and the monitor's evaluations.

Orbax writes them, in the background, each into a folder of its own whose name is the number of steps. The folder gets
its name when it is complete, so a run that is killed leaves whole checkpoints behind, and at most one without a name.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from npgp import checks
from npgp.optional import optional
from npgp.training.interrupts import interrupts_held

#: Raised when checkpoints change in a way that older versions of this module would misread.
VERSION = 1


class Saved(NamedTuple):
    """What a checkpoint holds."""

    #: The ``SVIState``.
    state: Any
    #: The losses of all steps since the first of the run.
    losses: np.ndarray
    #: What :meth:`npgp.training.Monitor.snapshot` returned; empty if there is no monitor.
    monitor: dict[str, np.ndarray]


class Checkpoints:
    """
    A folder of checkpoints, for :func:`npgp.fit`, which goes on from the newest one::

        result = npgp.fit(svi, key, 100_000, X, y, batch_size=1024, checkpoints=npgp.training.Checkpoints("run1"))

    Run the same program again after it was interrupted, or killed, and it takes the same steps, with the same numbers,
    as if nothing had happened. Needs ``npgp[checkpoint]`` (orbax).

    :param directory: the folder; it is made if it is not there. Where several processes train together, all must see
        the same folder; the first of them writes.
    :param every: seconds between checkpoints.
    :param steps: steps between checkpoints, instead of seconds.
    :param keep: how many checkpoints to keep, the newest ones.
    """

    def __init__(self, directory: str | os.PathLike, *, every: float = 60.0, steps: int | None = None, keep: int = 2):
        if not every > 0:
            raise ValueError(f"every is {every}, not a positive number of seconds.")
        steps = None if steps is None else checks.whole_number(steps, "steps")
        keep = checks.whole_number(keep, "keep")
        self.directory = Path(directory).absolute()
        self.every, self.steps, self.keep = every, steps, keep
        self._manager: Any = None
        self._about: dict[str, Any] = {}
        self._last_step: int | None = None
        self._last_time = 0.0

    def open(self, like: Any, about: dict[str, Any]) -> Saved | None:
        """
        Start to use the folder.

        :param like: a state whose structure, shapes and dtypes the saved one must have.
        :param about: settings of the run, for JSON, which must be those of the saved run.
        :return: the newest checkpoint that is complete; ``None`` if there are no checkpoints.
        :raises ValueError: if the folder's checkpoints are of another run, or cannot be read.
        :raises ModuleNotFoundError: without orbax.
        """
        self.close()
        self._about = json.loads(json.dumps(about))
        try:
            with _quiet():
                self._manager = self._open_manager()
                found = self._newest()
            if found is not None:
                self._last_step, content, header = found
                self._check(header, like)
        except BaseException:
            self.close()
            raise
        self._last_time = time.monotonic()
        return None if found is None else _rebuilt(content, like)

    def until(self, step: int) -> int | None:
        """How many steps after ``step`` the next checkpoint is due, if that is known."""
        return None if self.steps is None else self.steps - step % self.steps

    def due(self, step: int) -> bool:
        """Whether to save after ``step`` steps; the same in all processes, which must all ask."""
        if step == self._last_step:
            return False
        if self.steps is not None:
            return step % self.steps == 0
        return bool(_from_first(time.monotonic() - self._last_time >= self.every))

    def save(self, step: int, saved: Saved, wait: bool = False) -> None:
        """
        Save. The arrays are copied before it returns; they are written in the background.

        :param step: the number of steps so far, more than that of the newest checkpoint.
        :param saved: what to save.
        :param wait: wait until it is written.
        """
        if self._manager is None:
            raise RuntimeError("Checkpoints.save needs an open folder: call open first.")
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"step is {step}, and there is a checkpoint of step {self._last_step} already.")
        if step != self._last_step and jax.process_index() == 0:
            ocp = _orbax()
            arrays = _arrays(saved)
            # All bytes in one: faster than an array each, and Orbax has neither empty ones nor names with a slash.
            content = np.concatenate([np.ravel(x).view(np.uint8) for x in arrays.values()])
            header = {
                "npgp": VERSION,
                "about": self._about,
                "state": _kinds(saved.state),
                "arrays": {name: [str(x.dtype), x.shape] for name, x in arrays.items()},
                "checksum": zlib.crc32(content.data),
            }
            args = ocp.args.Composite(
                header=ocp.args.JsonSave(header), arrays=ocp.args.StandardSave({"content": content})
            )
            with interrupts_held(), _quiet():
                self._manager.save(step, args=args, force=True)  # waits for the one before, and does not skip this one
                self._last_step = step
        self._last_step, self._last_time = step, time.monotonic()
        if wait:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait until everything is written, and leave the folder."""
        manager, self._manager, self._last_step = self._manager, None, None
        if manager is not None:
            manager.close()

    def _open_manager(self) -> Any:
        ocp = _orbax()
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"The directory of checkpoints, {str(self.directory)!r}, is a file.")
        self.directory.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = dict(max_to_keep=self.keep, create=False)
        process = jax.process_index()
        if process == 0:
            options.update(cleanup_tmp_directories=True)
        if jax.process_count() > 1:  # each on its own: the first writes, all read
            options.update(
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"npgp{process}"
                )
            )
        return ocp.CheckpointManager(self.directory, options=ocp.CheckpointManagerOptions(**options))

    def _newest(self) -> tuple[int, dict[str, np.ndarray], dict[str, Any]] | None:
        """Number of steps, arrays and header of the newest checkpoint that is whole."""
        if jax.process_index() == 0:
            step, found = self._first_whole()
        else:
            step = -1
        step = _from_first(step)
        if jax.process_index() != 0 and step >= 0:
            found = self._read(step)
        return None if step < 0 else (step, *found)

    def _first_whole(self) -> tuple[int, Any]:
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                found = self._read(step)
            except Exception as error:  # of whichever library met the damage
                damaged[step] = f"{type(error).__name__}: {str(error)[:100]}"
                continue
            for bad, problem in damaged.items():
                warnings.warn(
                    f"The checkpoint of step {bad} in {str(self.directory)!r} is damaged and is removed; training "
                    f"goes on from step {step}. ({problem})",
                    stacklevel=5,
                )
                self._manager.delete(bad)
            return step, found
        if damaged:
            raise ValueError(
                f"None of the checkpoints in {str(self.directory)!r} can be read: they are damaged, or another "
                f"program's. Choose another folder, or remove them. ({next(iter(damaged.values()))})"
            )
        return -1, None

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays and header of a checkpoint; of one of another version, the header."""
        ocp = _orbax()
        # One after the other: where two are read at once and one fails, asyncio complains of the other.
        header = self._manager.restore(step, args=ocp.args.Composite(header=ocp.args.JsonRestore())).header
        if header["npgp"] != VERSION:
            return {}, header
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore())
        content = np.asarray(self._manager.restore(step, args=args).arrays["content"])
        if zlib.crc32(content.data) != header["checksum"]:
            raise ValueError("the arrays are not those that were written")
        arrays, end = {}, 0
        for name, (dtype, shape) in header["arrays"].items():
            start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
            arrays[name] = content[start:end].view(dtype).reshape(shape).copy()
        return arrays, header

    def _check(self, header: dict[str, Any], like: Any) -> None:
        """Refuse the checkpoint of another run."""
        where = f"The checkpoints in {str(self.directory)!r}"
        if header["npgp"] != VERSION:
            raise ValueError(
                f"{where} have version {header['npgp']!r} of their format; this npgp reads version {VERSION}."
            )
        advice = "Choose another folder to start afresh, or go on as before."
        for name in {**header["about"], **self._about}:
            old, new = header["about"].get(name), self._about.get(name)
            if old != new:
                raise ValueError(f"{where} are of a run with {name} = {old!r}, and this one has {new!r}. {advice}")
        saved, wanted = header["state"], _kinds(like)
        for name in {**saved, **wanted}:
            old, new = saved.get(name, "missing"), wanted.get(name, "missing")
            if old != new:
                raise ValueError(
                    f"{where} are of another model or optimizer: state{name} is {old} there, and {new} here. {advice}"
                )


def _orbax() -> Any:
    return optional("orbax.checkpoint", extra="checkpoint", what="the writing of checkpoints")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Orbax's log, as of what a killed process left behind; what matters becomes a warning of ours."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("absl", "asyncio"))}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _from_first(number: int) -> int:
    """The first process's number."""
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _kinds(state: Any) -> dict[str, str]:
    """Dtype and shape of every array in a state, by its place; of a random key, those of its data."""

    def kind(x):
        x = jax.random.key_data(x) if _is_key(x) else x
        dtype = x.dtype if hasattr(x, "dtype") else np.result_type(x)
        return f"{dtype}[{','.join(map(str, np.shape(x)))}]"

    return {jax.tree_util.keystr(path): kind(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}


def _arrays(saved: Saved) -> dict[str, np.ndarray]:
    """By name; they may look into the device's memory, which the next step writes over."""
    leaves = (jax.random.key_data(x) if _is_key(x) else x for x in jax.tree.leaves(saved.state))
    arrays = {f"state.{i}": np.asarray(x) for i, x in enumerate(leaves)}
    arrays["losses"] = np.asarray(saved.losses)
    return arrays | {f"monitor.{name}": np.asarray(x) for name, x in saved.monitor.items()}


def _rebuilt(arrays: dict[str, np.ndarray], like: Any) -> Saved:
    wanted, structure = jax.tree.flatten(like)
    leaves: list[Any] = []
    for i, x in enumerate(wanted):
        leaf = arrays[f"state.{i}"]
        if _is_key(x):
            leaves.append(jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(x)))
        else:
            leaves.append(jnp.asarray(leaf) if isinstance(x, jax.Array) else leaf)
    monitor = {name.removeprefix("monitor."): x for name, x in arrays.items() if name.startswith("monitor.")}
    return Saved(jax.tree.unflatten(structure, leaves), arrays["losses"], monitor)
