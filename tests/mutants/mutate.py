"""
Runs tests on mutants of npgp, and writes which test kills which: ``scripts/test --mutants [NAME...]``.

Each mutant of ``mutants.txt`` is applied to a copy of the project, never to the working tree. The nearest test files
(``tests/support/nearest.py``) run first, the cheapest items of each first, up to the first that fails; with ``--all``,
all other tests after them. Results go to ``killed.tsv``: mutant, item, its tier, seconds; ``-`` where a mutant lives.
Those that the table has killed are run again only if they are named or with ``--again``.

Every run is a fork of one process that has imported JAX, NumPyro and SciPy, but not npgp.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIST, TABLE = HERE / "mutants.txt", HERE / "killed.tsv"
COPIED = ("npgp", "tests", "scripts", "docs", "notebooks", "conftest.py", "pyproject.toml", "README.md", "CHANGELOG.md")
HEADER, LIVES = "mutant\titem\ttier\tseconds", "-"
CLASSES = (0.1, 0.5, 2.0, 10.0)  # of items by their seconds: all of one class before those of the next, file by file
FAULT = "the runner itself: "


class Mutant(NamedTuple):
    name: str
    breaks: str
    file: str
    old: str
    new: str
    reason: str | None

    def fault(self, root: Path) -> str | None:
        """Why the mutant cannot be made of the project in a folder, if it cannot: it is stale then."""
        file = root / self.file
        count = file.read_text().count(self.old) if file.exists() else 0
        return None if count == 1 else f"{self.name}: {self.file} has {self.old!r} {count} times, not once"


def read(text: str) -> list[Mutant]:
    """The mutants of a list: see its first lines."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.strip() and not block.startswith("# ")]
    found = []
    for block in blocks:
        title, file, old, new, *reason = block
        name, breaks = title.split(": ", 1)
        assert old.startswith("- ") and new.startswith("+ "), block
        found.append(Mutant(name, breaks, file, old[2:], new[2:], " ".join(line[2:] for line in reason) or None))
    return found


class FirstFailure:
    """A plugin that runs the cheapest items first, and notes the one that fails."""

    def __init__(self, order: dict[str, int], seconds: dict[str, float]) -> None:
        self.order, self.seconds = order, seconds
        self.failed: str | None = None

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: (self._class(item.nodeid), self.order[item.nodeid.split("::")[0]]))

    def _class(self, item: str) -> int:
        seconds = self.seconds.get(item, 1.0)
        return sum(seconds > limit for limit in CLASSES)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid or "collection"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def _run_here(root: Path, files: list[str], seconds: dict[str, float]) -> str:
    """The first item that fails, or an empty string: in a process of its own, which it ends."""
    os.chdir(root)
    sys.path[:0] = [str(root)]
    import pytest

    plugin = FirstFailure({file.split("::")[0]: i for i, file in enumerate(files)}, seconds)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files], plugins=[plugin])
    return plugin.failed or ("" if code in (0, 5) else f"pytest ended with {int(code)}")


def first_failure(root: Path, files: list[str], seconds: dict[str, float], limit: float) -> str:
    """The first item that fails, an empty string if none does, or that the run took too long."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "failed"
        process = os.fork()
        if not process:
            out = os.open(os.devnull, os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            try:
                note.write_text(_run_here(root, files, seconds))
            except BaseException as error:
                note.write_text(f"{FAULT}{error!r}")
            finally:
                os._exit(0)
        began = time.monotonic()
        while not os.waitpid(process, os.WNOHANG)[0]:
            if time.monotonic() - began > limit:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return f"took more than {limit:.0f} s"
            time.sleep(0.05)
        found = note.read_text() if note.exists() else "the process died"
        if found.startswith(FAULT):
            raise RuntimeError(found)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("names", nargs="*", help="the mutants to run; all that are not known to be killed without")
    parser.add_argument("--all", action="store_true", help="all tests after the nearest files")
    parser.add_argument("--again", action="store_true", help="also mutants that the table has killed")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for some files' items")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import costs
    import jax  # noqa: F401
    import nearest
    import numpyro.infer.autoguide  # noqa: F401
    import optax  # noqa: F401
    import scipy.stats  # noqa: F401

    mutants = read(LIST.read_text())
    if unknown := set(args.names) - {mutant.name for mutant in mutants}:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    lines = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]] if TABLE.exists() else []
    table = {name: (item, seconds) for name, item, _, seconds in lines}
    sound: dict[str, bool] = {}  # which of the items found pass without a mutant
    seconds = {item: cost.alone for item, cost in costs.read().items()}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "npgp"
        copy.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        # By content, as a file's second mutant may have the size and time of its first.
        by_content = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(copy / "npgp", quiet=1, invalidation_mode=by_content)
        for mutant in mutants:
            known = "::" in table.get(mutant.name, ("",))[0]
            if mutant.name not in args.names if args.names else known and not args.again:
                continue
            if fault := mutant.fault(copy):
                print(f"STALE {fault}", flush=True)
                continue
            file = copy / mutant.file
            text, files = file.read_text(), nearest.nearest(mutant.file)
            others = [test for test in nearest.test_files() if test not in files] if args.all else []
            named = sum(Path(mutant.file).stem.strip("_") in Path(test).stem for test in files)
            began, found = time.monotonic(), ""
            file.write_text(text.replace(mutant.old, mutant.new))
            for some in (files[:named], files[named:], others):
                found = found or (first_failure(copy, some, seconds, args.limit) if some else "")
            file.write_text(text)
            if "::" in found and found not in sound:
                sound[found] = not first_failure(copy, [found], seconds, args.limit)
            if "::" not in found or sound[found]:
                table[mutant.name] = found or LIVES, f"{time.monotonic() - began:.0f}"
            print(
                mutant.name,
                *table.get(mutant.name, (f"cannot be judged by {found}, which fails without it",)),
                flush=True,
            )
            _write(mutants, table)
    _write(mutants, table)
    print(_summary(mutants))


def _write(mutants: list[Mutant], table: dict[str, tuple[str, str]]) -> None:
    """The table, with the tier that each item is in now."""
    import costs

    killers = {name: {item} for name, (item, _) in table.items() if "::" in item}
    known = costs.read()
    quick = costs.quick({*known}.union(*killers.values()), known, killers)
    lines = [HEADER]
    for mutant in mutants:
        if mutant.name in table:
            item, seconds = table[mutant.name]
            tier = "quick" if item in quick else "all" if "::" in item else LIVES
            lines.append(f"{mutant.name}\t{item}\t{tier}\t{seconds}")
    TABLE.write_text("\n".join(lines) + "\n")


def _summary(mutants: list[Mutant]) -> str:
    """How many mutants are killed, and which are not."""
    tiers = {line.split("\t")[0]: line.split("\t")[2] for line in TABLE.read_text().splitlines()[1:]}
    quick, rest = (sum(tier == wanted for tier in tiers.values()) for wanted in ("quick", "all"))
    lines = [f"{quick} of {len(mutants)} mutants are killed by the quick tier, {quick + rest} by all tests that ran"]
    lines += [f"{m.name}: {m.reason or m.breaks}" for m in mutants if tiers.get(m.name) not in ("quick", "all")]
    return "\n  ".join(lines)


if __name__ == "__main__":
    main()
