"""
Checkpoints of everything that training needs to go on: the state, the losses so far and the monitor's evaluations.

They are written in the background, each into a file of its own that is called by the number of steps. The file gets its
name when it is complete, so a run that is killed leaves whole checkpoints behind, and at most one without a name.

Nothing else in the folder is touched: only files that carry the mark of a checkpoint are ever removed, and damaged ones
get another name.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from npgp import checks
from npgp.training import checkpoint_file
from npgp.training.checkpoint_file import Damaged
from npgp.training.interrupts import interrupts_held

_NAME, _TEMPORARY = re.compile(r"(0|[1-9][0-9]*)\.checkpoint"), re.compile(r"\.[0-9]+\.checkpoint\.[0-9a-f]{32}\.tmp")


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
    A folder of checkpoints, for :func:`npgp.fit`, which goes on from the newest one:

    .. code-block:: python

        result = npgp.fit(svi, key, 100, X, y, checkpoints=npgp.training.Checkpoints("run1"))

    Run the same program again after it was interrupted, or killed, and it takes the same steps, with the same numbers,
    as if nothing had happened. A program with other data or another model is refused; one with another optimizer or
    ELBO goes on with a warning. If a checkpoint cannot be written, as on a full disk, training goes on with a warning.

    :param directory: the folder; it is made if it is not there. Where several processes train together, all must see
        the same folder; the first of them writes. Other files in it are left alone.
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
        self._writer: ThreadPoolExecutor | None = None
        self._pending: tuple[int, Future] | None = None
        self._about: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._last_step: int | None = None
        self._last_time = 0.0

    def open(self, like: Any, about: dict[str, Any], settings: dict[str, Any] | None = None) -> Saved | None:
        """
        Start to use the folder.

        :param like: a state whose structure, shapes and dtypes the saved one must have.
        :param about: what the run is known by, for JSON, which must be that of the saved run.
        :param settings: what the run can go on without; if the saved run had others, there is a warning.
        :return: the newest checkpoint that is whole; ``None`` if there are no checkpoints.
        :raises ValueError: if the folder's checkpoints are of another run, or all damaged.
        :raises OSError: if the folder or a checkpoint cannot be read.
        """
        self.close()
        self._about, self._settings = json.loads(json.dumps([about, settings or {}]))
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"The directory of checkpoints, {str(self.directory)!r}, is a file.")
        self.directory.mkdir(parents=True, exist_ok=True)
        found = self._newest()
        if found is not None:
            self._last_step, header, arrays = found
            self._check(header, like)
        self._writer = ThreadPoolExecutor(1, "npgp-checkpoints")
        self._last_time = time.monotonic()
        return None if found is None else _rebuilt(arrays, like)

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

    def save(self, step: int, saved: Saved, wait: bool = False) -> bool:
        """
        Save. The arrays are copied before it returns; they are written in the background.

        What goes wrong in writing becomes a warning, at the next save or at the end.

        :param step: the number of steps so far, more than that of the newest checkpoint.
        :param saved: what to save.
        :param wait: wait until it is written.
        :return: whether nothing is known to have gone wrong.
        """
        if self._writer is None:
            raise RuntimeError("Checkpoints.save needs an open folder: call open first.")
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"step is {step}, and there is a checkpoint of step {self._last_step} already.")
        well = True
        if step != self._last_step and jax.process_index() == 0:
            with interrupts_held():
                well = self.finish()
                try:
                    arrays = {name: np.array(x, order="C") for name, x in _arrays(saved).items()}
                    header = {"about": self._about, "settings": self._settings, "state": _kinds(saved.state)}
                    self._pending = step, self._writer.submit(self._write, step, header, arrays)
                except MemoryError as error:
                    well = self._warn(step, error)
                self._last_step = step
        self._last_step, self._last_time = step, time.monotonic()
        return self.finish() and well if wait else well

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
        writer, self._writer, self._last_step = self._writer, None, None
        if writer is not None:
            self.finish()
            writer.shutdown()

    def _warn(self, step: int, error: BaseException) -> bool:
        warnings.warn(
            f"Writing the checkpoint of step {step} to {str(self.directory)!r} failed; training goes on, and what was "
            f"saved before is still there. ({type(error).__name__}: {error})",
            stacklevel=4,
        )
        return False

    def _write(self, step: int, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        checkpoint_file.write(self.directory / f"{step}.checkpoint", header, arrays)
        ours = self._ours()
        for step in sorted(ours)[: -self.keep]:
            ours[step].unlink()

    def _ours(self) -> dict[int, Path]:
        """Checkpoints, whole and damaged, by their numbers of steps."""
        names = ((path, _NAME.fullmatch(path.name)) for path in self.directory.iterdir())
        return {int(name[1]): path for path, name in names if name and path.is_file() and checkpoint_file.is_ours(path)}

    def _remove_unfinished(self) -> None:
        """Remove what a killed process was writing."""
        for path in self.directory.iterdir():
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                if path.stat().st_size == 0 or checkpoint_file.is_ours(path):
                    path.unlink()

    def _newest(self) -> tuple[int, dict[str, Any], dict[str, np.ndarray]] | None:
        """Number of steps, header and arrays of the newest checkpoint that is whole."""
        step, found, problem = -1, None, None
        if jax.process_index() == 0:
            try:
                self._remove_unfinished()
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
        return None if found is None else (step, *found)

    def _first_whole(self) -> tuple[int, Any]:
        damaged: dict[int, Damaged] = {}
        for step in sorted(self._ours(), reverse=True):
            try:
                found = self._read(step)
            except Damaged as error:
                damaged[step] = error
                continue
            for bad, problem in damaged.items():
                what = self._set_aside(bad)
                warnings.warn(
                    f"The checkpoint of step {bad} in {str(self.directory)!r} is damaged{what}; training goes on from "
                    f"step {step}. ({problem})",
                    stacklevel=5,
                )
            return step, found
        if damaged:
            raise ValueError(
                f"None of the checkpoints in {str(self.directory)!r} can be read: they are damaged. Choose another "
                f"folder, or move them away. ({next(iter(damaged.values()))})"
            )
        return -1, None

    def _set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint; what was done, as words."""
        path = self._ours()[step]
        names = (path.with_name(f"{path.name}.damaged{i or ''}") for i in itertools.count())
        new = next(name for name in names if not name.exists())
        path.rename(new)
        return f" and is now called {new.name!r}"

    def _read(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Header and arrays of a checkpoint."""
        return checkpoint_file.read(self._ours()[step])

    def _check(self, header: dict[str, Any], like: Any) -> None:
        """Refuse the checkpoint of another run."""
        where = f"The checkpoints in {str(self.directory)!r}"
        about, settings = header["about"], header["settings"]
        advice = "Choose another folder to start afresh, or go on as before."
        if (differs := _difference(about, self._about)) is not None:
            raise ValueError(f"{where} are of a run with {differs}. {advice}")
        if (differs := _difference(header["state"], _kinds(like))) is not None:
            raise ValueError(f"{where} are of another model or optimizer, with state{differs}. {advice}")
        if (differs := _difference(settings, self._settings)) is not None:
            warnings.warn(
                f"{where} are of a run with {differs}. Training goes on with the latter; choose another folder to "
                "start afresh.",
                stacklevel=5,
            )


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The first entry in which two descriptions differ, in words."""
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            return f"{name} = {old.get(name, 'missing')!r}, and this one has {new.get(name, 'missing')!r}"
    return None


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
