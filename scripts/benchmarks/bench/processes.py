"""Worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "worker.py"
#: Seconds after each answer, in which the threads of a worker that has worked go to sleep.
PAUSE = 0.05


class Missing(Exception):
    """A library cannot be imported."""


class Failed(Exception):
    """A worker could not do what it was asked."""


class Process:
    """
    A library's worker.

    :param library: its name, a key of ``worker.MODULES``.
    :param python: interpreter to run it.
    :param environment: variables on top of this process's own.
    """

    def __init__(self, library: str, python: str, environment: Mapping[str, str]):
        # A cache of compiled programs would hide what compilation takes.
        own = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        self.library = library
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [python, str(WORKER), library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # warnings; errors come as answers
            env={**own, **environment},
            text=True,
        )
        try:
            self.versions = self._answer()
        except (Missing, Failed):
            self.close()
            raise
        self.import_seconds = time.perf_counter() - began

    def ask(self, do: str, **arguments) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"{self.library}'s process has ended.") from None
        answer = self._answer()
        time.sleep(PAUSE)
        return answer

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"{self.library}'s process has ended, with code {self.process.wait()}.")
        answer = json.loads(line)
        if "missing" in answer:
            raise Missing(answer["missing"])
        if "error" in answer:
            raise Failed(f"{self.library}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # of a request that a process did not live to read
                if pipe is not None:
                    pipe.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
