"""
What each item costs, and which are the quick tier. ``scripts/test --costs`` writes the table, ``tests/costs.tsv``.

The quick tier costs at most a twentieth of what all items cost (`SHARE`), and no item in it more than a 200th
(`LIMIT`):
1. new items, which the table does not have yet, of files that it has;
2. for each mutant of the library (``tests/mutants/``), an item that fails on it: again and again the one that kills the
   most of those still alive for its cost;
3. the contract with NumPyro and JAX;
4. all other items, the cheapest first.

What several items share, fixtures and what cached or compiled functions of their module made, is paid by the first of
them: here by the first that the tier has.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

TESTS = Path(__file__).parents[1]
TABLE = TESTS / "costs.tsv"
KILLED = TESTS / "mutants" / "killed.tsv"
CONTRACT = "tests/ground/test_contract.py::"
SHARE = 1 / 20
LIMIT = 1 / 200
HEADER = "item\tseconds\tfirst\tprograms"


class Cost(NamedTuple):
    """Of an item: processor seconds, those where it is the first that needs what it shares, compiled programs."""

    seconds: float
    first: float
    programs: int

    @property
    def alone(self) -> float:
        """Processor seconds at most, as far as is known."""
        return max(self.seconds, self.first)


def read(table: Path = TABLE) -> dict[str, Cost]:
    """The costs of each item that was measured."""
    if not table.exists():
        return {}
    lines = (line.split("\t") for line in table.read_text().splitlines()[1:])
    return {item: Cost(float(seconds), float(first), int(programs)) for item, seconds, first, programs in lines}


def write(costs: dict[str, Cost], table: Path = TABLE) -> None:
    lines = (f"{item}\t{cost.seconds:.2f}\t{cost.first:.2f}\t{cost.programs}" for item, cost in costs.items())
    table.write_text("\n".join([HEADER, *sorted(lines)]) + "\n")


def killers(table: Path = KILLED) -> dict[str, set[str]]:
    """The items that fail on each mutant, as far as is known."""
    found: dict[str, set[str]] = {}
    for line in table.read_text().splitlines()[1:] if table.exists() else ():
        mutant, item = line.split("\t")[:2]
        if "::" in item:
            found.setdefault(mutant, set()).add(item)
    return found


def quick(items: Collection[str], costs: dict[str, Cost], killed: dict[str, set[str]]) -> set[str]:
    """Those of some items that the quick tier has: see above."""
    total = sum(cost.seconds for cost in costs.values())
    measured = [item for item in items if item in costs]
    paid: set[tuple[str, float]] = set()  # of a file, what the same items share costs the same
    files = {item.split("::")[0] for item in costs}
    chosen = {item for item in items if item not in costs and item.split("::")[0] in files}
    spent = 0.0

    def shared(item: str) -> tuple[str, float]:
        return item.split("::")[0], costs[item].first

    def price(item: str) -> float:
        return costs[item].seconds if shared(item) in paid else costs[item].alone

    def take(item: str) -> bool:
        nonlocal spent
        if item not in chosen and price(item) <= min(LIMIT * total, SHARE * total - spent):
            chosen.add(item)
            spent += price(item)
            paid.add(shared(item))
        return item in chosen

    alive = {mutant: found.intersection(measured) for mutant, found in killed.items() if not found & chosen}
    worth: dict[str, set[str]] = {}
    for mutant, found in alive.items():
        for item in found:
            worth.setdefault(item, set()).add(mutant)
    while worth:
        best = max(sorted(worth), key=lambda item: len(worth[item]) / (price(item) + 0.01))
        mutants = worth.pop(best)
        if take(best):
            worth = {item: left for item, others in worth.items() if (left := others - mutants)}
    for item in sorted(measured, key=lambda item: (not item.startswith(CONTRACT), price(item), item)):
        take(item)
    return chosen


def _seconds() -> float:
    """Processor seconds of this process, all its threads, and of those that it started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


_JITTED = type(jax.jit(lambda: None))


class Shared:
    """A cached or compiled function of a module of tests: notes what a call costs that is the first of its kind."""

    def __init__(self, function: Any, recorder: Recorder) -> None:
        self.function, self.recorder = function, recorder
        self.paid: dict[str, float] = {}
        self.made: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key, before = self._kind(args, kwargs), _seconds()
        inside, self.recorder.inside = self.recorder.inside, True
        try:
            result = self.function(*args, **kwargs)
        finally:
            self.recorder.inside = inside
            paid = self.paid.setdefault(key, _seconds() - before)
            if not inside:
                self.recorder.used[id(self), key] = paid
        if isinstance(result, _JITTED):
            result = self.made.setdefault(key, Shared(result, self.recorder))
        return result

    def _kind(self, *arguments: Any) -> str:
        """Values for what is cached, shapes of arrays for what is compiled."""
        if hasattr(self.function, "cache_info"):
            return repr(arguments)
        leaves, tree = jax.tree.flatten(arguments)
        kinds = [(x.shape, x.dtype) if hasattr(x, "dtype") else x if isinstance(x, str) else type(x) for x in leaves]
        return repr((kinds, tree, jax.config.jax_enable_x64))


class Recorder:
    """
    The plugin of ``--costs``: measures the items of this process, and adds what workers measured to the table.

    :param table: the file to add to; `None` in a worker, whose reports tell the process that started it.
    """

    def __init__(self, table: Path | None) -> None:
        self.table = table
        self.costs: dict[str, Cost] = {}
        self.programs = 0
        self.began = (0.0, 0)
        self.fixtures: dict[Any, float] = {}  # seconds of each that several items use
        self.used: dict[Any, float] = {}  # seconds of first calls of what the item calls and others may have called
        self.inside = False  # of such a call
        jax.monitoring.register_event_duration_secs_listener(self._compiled)

    def _compiled(self, event: str, duration: float, **details: object) -> None:
        self.programs += event == "/jax/core/compile/backend_compile_duration"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for module in {item.module for item in session.items if hasattr(item, "module")}:
            for name, value in list(vars(module).items()):
                shared = isinstance(value, _JITTED) or hasattr(value, "cache_info")
                if shared and getattr(value, "__module__", None) == module.__name__:
                    setattr(module, name, Shared(value, self))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self.began, self.used = (_seconds(), self.programs), {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        before = _seconds()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.fixtures[fixturedef] = _seconds() - before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        if call.when == "teardown":
            used = getattr(item, "_fixtureinfo", None)
            names = used.name2fixturedefs if used else {}
            wide = sum(self.fixtures.get(defs[-1], 0.0) for defs in names.values()) + sum(self.used.values())
            cost = _seconds() - self.began[0], wide, self.programs - self.began[1]
            item.user_properties.append(("cost", cost))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and not report.skipped:
            measured = dict(report.user_properties).get("cost")
            if measured is not None:
                self.costs[report.nodeid] = Cost(*measured)

    def pytest_sessionfinish(self) -> None:
        if self.table is not None and self.costs:
            write(read(self.table) | self.costs, self.table)
