"""Signals during training: interrupts from the keyboard, and requests to terminate."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


@contextmanager
def interrupts_held() -> Iterator[None]:
    """An interrupt or a request to terminate waits for the end of the block."""
    # Python hands signals to the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    pending: list[tuple] = []
    for number in handlers:
        signal.signal(number, lambda *args: pending.append(args))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in pending[:1]:
        handlers[number](number, frame)


class Interrupts:
    """
    Context in which signals stop a training between steps.

    With checkpoints, the request to terminate that schedulers send ahead of a kill raises ``SystemExit``, so that a
    last one can be written. Where several processes train together, all must stop after the same step: signals then
    wait for :meth:`agree`.

    :param saving: whether there are checkpoints.
    """

    def __init__(self, saving: bool):
        self.several = jax.process_count() > 1
        main = threading.current_thread() is threading.main_thread()
        self._numbers = [signal.SIGTERM] * (main and saving) + [signal.SIGINT] * (main and self.several)
        self._wish = 0

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._handle) for number in self._numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if not self.several:
            raise SystemExit(128 + number)
        self._wish = number

    def agree(self, size: int) -> int:
        """
        Between device calls: stop if any process is told to.

        :param size: the length of the next calls, by this process's clock.
        :return: the shortest of all processes.
        """
        if not self.several:
            return size
        sizes, wishes = multihost_utils.process_allgather(np.array([size, self._wish])).T
        if signal.SIGINT in wishes:
            raise KeyboardInterrupt
        if wishes.any():
            raise SystemExit(128 + int(wishes.max()))
        return int(sizes.min())
