"""What the scripts share: arguments, tables, JSON, figures that are kept, timings in turn.

A script has these two lines above its other imports of this folder, with ``parents[1]`` one folder down:

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from common import Arguments, table, write_json

Nothing here imports JAX before it is needed: some scripts set its environment first.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shlex
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Name = TypeVar("Name", bound=Hashable)

# ---------------------------------------------------------------------------------------------------------------
# Arguments


def whole(text: str) -> int:
    """A positive whole number, as a ``type`` of argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


whole.__name__ = "positive whole number"  # argparse's word for it in "invalid ... value"

#: Options of the same meaning in many scripts.
SHARED: dict[str, dict[str, Any]] = {
    "json": dict(type=Path, metavar="FILE", help="write the figures to this file"),
    "out": dict(type=Path, default=Path("out"), metavar="FOLDER", help="folder of the pictures (out)"),
    "seed": dict(type=int, default=0),
    "quick": dict(action="store_true", help="few rows, points and steps: a check that it runs"),
    "full": dict(action="store_true", help="the published sizes, for an accelerator"),
    "float64": dict(action="store_true", help="double precision"),
    "cpu-time": dict(action="store_true", help="seconds are of the processor: for a busy machine"),
    "repetitions": dict(type=whole, help="rounds in which what is timed takes turns"),
    "inducing": dict(type=whole, metavar="M", help="number of inducing points"),
    "rows": dict(type=whole, metavar="N", help="so many training rows at most"),
    "steps": dict(type=whole, help="of training"),
    "batch-size": dict(type=whole, metavar="B", help="rows of a step"),
}


class Arguments(argparse.ArgumentParser):
    """A parser whose help is ``__doc__`` of a script: the first line on top, the rest below the options."""

    def __init__(self, doc: str | None = None, **more: Any):
        summary, _, rest = (doc or "").strip().partition("\n")
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(description=summary, epilog=rest, formatter_class=raw, **more)

    def shared(self, *names: str, **defaults: Any) -> None:
        """Options of :data:`SHARED`: as they are, by ``x=default``, or by ``x={...}`` of all that differs."""
        for name in names:
            self.add_argument(f"--{name}", **SHARED[name])
        for key, value in defaults.items():
            name = key.replace("_", "-")
            more = value if isinstance(value, Mapping) else {"default": value}
            self.add_argument(f"--{name}", **(SHARED[name] | dict(more)))

    def read(self, argv: Sequence[str] | None = None, quick: Mapping[str, Any] | None = None) -> argparse.Namespace:
        """The arguments; with ``--quick`` those of ``quick`` in place of defaults. Programs are kept from here on."""
        args = self.parse_args(argv)
        if "jax" in sys.modules:  # else it computes nothing itself
            keep_programs()
        if quick and args.quick:
            for name, value in quick.items():
                if getattr(args, name) == self.get_default(name):
                    setattr(args, name, value)
        return args


def command(script: str, argv: Sequence[str] | None = None) -> str:
    """The command line, for results: with the script's path in the repository."""
    path = Path(script).resolve().relative_to(Path(__file__).resolve().parents[1])
    return shlex.join(["python", path.as_posix(), *(sys.argv[1:] if argv is None else argv)])


# ---------------------------------------------------------------------------------------------------------------
# What people look at


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[int] = (0,), markdown: bool = False
) -> str:
    """Aligned columns, to the right but for those of ``left``; ``None`` is an empty cell. In Markdown if asked for."""
    lines = [["" if cell is None else str(cell) for cell in line] for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if markdown:
        widths = [max(w, 1 if i in left else 2) for i, w in enumerate(widths)]
        lines.insert(1, ["-" * w if i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)])
    start, between, end = ("| ", " | ", " |") if markdown else ("", "  ", "")

    def aligned(line: Sequence[str]) -> str:
        cells = enumerate(zip(line, widths, strict=True))
        return start + between.join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in cells) + end

    return "\n".join(aligned(line).rstrip() for line in lines)


def moments(values: Iterable[float | None]) -> tuple[float, float | None]:
    """The mean of what there is, and its standard error, ``None`` for a single value."""
    known = [value for value in values if value is not None]
    error = float(np.std(known, ddof=1) / math.sqrt(len(known))) if len(known) > 1 else None
    return float(np.mean(known)) if known else math.nan, error


def plus_minus(mean: float, error: float | None, digits: int = 3, sign: str = "") -> str:
    """``mean ± error``; no error if it is ``None`` or NaN, and a dash if there is no mean. ``sign="+"`` for gains."""
    if math.isnan(mean):
        return "–"
    text = f"{round(mean, digits) + 0.0:{sign}.{digits}f}"  # and no −0
    return text if error is None or math.isnan(error) else f"{text} ± {error:.{digits}f}"


def quartiles(values: Iterable[float], scale: float = 1.0) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [scale * float(q) for q in np.quantile(np.asarray(list(values)), (0.25, 0.5, 0.75))]


def scores(mean: Any, variance: Any, y: np.ndarray) -> tuple[float, float]:
    """RMSE, and mean negative log density of normal predictions, both in double precision."""
    mean, variance = np.asarray(mean, np.float64), np.asarray(variance, np.float64)
    squared = np.square(y - mean)
    nlpd = 0.5 * np.mean(np.log(2.0 * np.pi * variance) + squared / variance)
    return float(np.sqrt(np.mean(squared))), float(nlpd)


# ---------------------------------------------------------------------------------------------------------------
# Files


def write_json(path: Path | None, report: Any, say: bool = True) -> None:
    """
    Write figures, and print that if ``say``; nothing without a path. What was there stays until all is written.

    Arrays and numbers may be NumPy's. A number that is not finite becomes ``null``.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(_plain(report), indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)
    if say:
        print(f"wrote {path}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_picture(path: Path, figure: Any, dpi: int = 150) -> None:
    """Save a figure of Matplotlib, make the folder, and print that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    print(f"wrote {path}")


# ---------------------------------------------------------------------------------------------------------------
# Measurements


def clock(cpu: bool) -> Callable[[], float]:
    """Seconds of the processor, for ``--cpu-time``, or of the wall."""
    return time.process_time if cpu else time.perf_counter


def interleaved(
    calls: Mapping[Name, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float] | None = time.perf_counter,
    seed: int | None = 0,
) -> dict[Name, np.ndarray]:
    """
    Seconds of each call in each round: the calls take turns, so that what else the machine does meets all alike.

    :param calls: what to time; each is called once before. An array of JAX that it returns is waited for.
    :param clock: if ``None``, a call returns its seconds itself.
    :param seed: of the order, drawn anew for each round; as they stand if ``None``.
    """
    import jax

    def timed(call: Callable[[], Any]) -> float:
        if clock is None:
            return call()
        began = clock()
        jax.block_until_ready(call())
        return clock() - began

    rng, names = np.random.default_rng(seed), list(calls)
    seconds = {name: np.empty(rounds) for name in names}
    for call in calls.values():
        timed(call)
    for i in range(rounds):
        for k in range(len(names)) if seed is None else rng.permutation(len(names)):
            seconds[names[k]][i] = timed(calls[names[k]])
    return seconds


def interleaved_steps(
    advance: Mapping[Name, Callable[[int], float]], rounds: int, seconds: float, least: int = 2, most: int = 1000
) -> dict[Name, np.ndarray]:
    """
    Seconds per step of each program, by turns of about so many seconds.

    :param advance: of each program, a function from a number of steps to the seconds of one.
    """
    counts = {}
    for name, program in advance.items():
        counts[name] = least
        for _ in range(2):  # the first calls may still compile, and a call has a cost of its own
            counts[name] = int(np.clip(seconds / program(counts[name]), least, most))
    return interleaved({name: lambda n=name: advance[n](counts[n]) for name in advance}, rounds, clock=None)


def one_blas_thread() -> AbstractContextManager:
    """A context in which NumPy, SciPy and JAX's triangular solves on a CPU keep to one thread: for steady times."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, user_api="blas")


def peak_memory() -> int:
    """The most bytes that this process has held so far."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def keep_programs(folder: Path | None = None) -> None:
    """Keep compiled programs on disk: all of them in a folder, or the slow ones in the repository, as ``demo`` does."""
    import jax

    if folder is not None:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    elif jax.config.jax_compilation_cache_dir is None:
        folder = Path(__file__).resolve().parents[1] / ".jax_cache"
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
