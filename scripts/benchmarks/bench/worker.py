"""A process that does one library's share of the benchmark, at the word of the one that started it.

Requests come in on the standard input, a JSON object a line; answers leave by the standard output, one for each. What
libraries print goes to the standard error. A worker waits between requests, and does nothing meanwhile.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
from problems import Problem

from common import peak_memory

#: Module of each library's programs.
MODULES = {
    "npgp": "npgp_programs",
    "bare": "bare_programs",
    "gpytorch": "gpytorch_programs",
    "gpjax": "gpjax_programs",
    "checks": "accelerator_programs",
}


class Worker:
    """
    What can be asked of a worker.

    A program has ``advance(steps)``, which returns when the steps are done; it may have ``seconds``, of the last steps
    alone. Those that are compared between libraries also have ``elbo()``, at the parameters of the start, and
    ``predictor()``, a function that predicts at ``problem.X_new`` and waits.

    :param module: a library's programs: ``versions()``, ``configure(dtype)``, ``device_memory()``,
        ``make(kind, problem, **options)``, and ``train(file, **options)`` where it takes part in that.
    """

    def __init__(self, module: Any):
        self.module = module
        self.programs: dict[str, Any] = {}

    def versions(self) -> dict[str, str]:
        return self.module.versions()

    def setup(self, name: str, kind: str, dtype: str, file: str | None = None, **options) -> dict[str, Any]:
        """Make a program, and take its first step: seconds of both together."""
        _forget_peak()
        self.module.configure(dtype)
        problem = None if file is None else Problem.load(file, dtype)
        began = time.perf_counter()
        program = self.module.make(kind, problem, **options)
        program.advance(1)
        seconds = time.perf_counter() - began
        self.programs[name] = program
        return {"first_step_seconds": seconds}

    def elbo(self, kind: str, dtype: str, file: str | None = None, **options) -> float:
        """The ELBO of the first rows, at the parameters of the start."""
        self.module.configure(dtype)
        problem = None if file is None else Problem.load(file, dtype)
        return float(self.module.make(kind, problem, **options).elbo())

    def steps(self, name: str, count: int) -> float:
        """Seconds of each of so many steps; those that a program says, where a call of it takes more than its steps."""
        program = self.programs[name]
        began = time.perf_counter()
        program.advance(count)
        return getattr(program, "seconds", time.perf_counter() - began) / count

    def predict(self, name: str, repetitions: int) -> list[float]:
        """Seconds of each prediction, the first and slower one left out."""
        predict = self.programs[name].predictor()
        predict()
        seconds = []
        for _ in range(repetitions):
            began = time.perf_counter()
            predict()
            seconds.append(time.perf_counter() - began)
        return seconds

    def train(self, **options) -> dict[str, Any]:
        self.module.configure("float32")
        return self.module.train(**options)

    def call(self, function: str, **arguments) -> Any:
        """What a function of the module returns."""
        return getattr(self.module, function)(**arguments)

    def peak_memory(self) -> int:
        """Bytes: the most that this process has held since the last ``setup``."""
        return peak_memory()

    def device_memory(self) -> int | None:
        return self.module.device_memory()

    def drop(self) -> None:
        """Forget all programs."""
        self.programs.clear()
        if hasattr(self.module, "clear"):
            self.module.clear()

    def answer(self, do: str, **arguments) -> Any:
        return getattr(self, do)(**arguments)


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        worker = Worker(importlib.import_module(MODULES[sys.argv[1]]))
    except ImportError as error:
        say({"missing": str(error)})
        return
    say({"value": worker.versions()})
    for line in sys.stdin:
        try:
            say({"value": worker.answer(**json.loads(line))})
        except Exception:
            say({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
