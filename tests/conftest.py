"""Fixtures and settings that all tests share."""

from __future__ import annotations

import gc
import operator
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import costs
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

# pytest puts this folder on the path, where its folders would pass for packages of others: ``tests/sparse`` for the
# ``sparse`` that xarray imports and SciPy then asks for its arrays.
sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]

os.environ["MPLBACKEND"] = "Agg"

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=50,
    # What fails is shown as it was found: to make it smaller runs it again, hundreds of times.
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate],
    # A first example compiles; and the dtype fixtures below hold for all examples of a test alike.
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=["quick", "first"], help="the quick tier alone, or all others after it")
    parser.addoption("--elsewhere", nargs="+", default=[], help="files of which others run what is not of that tier")
    parser.addoption("--costs", action="store_true", help="write what the items cost into tests/costs.tsv")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist: files in our order, not that of their numbers of tests
    if config.option.costs:
        table = None if hasattr(config, "workerinput") else costs.TABLE
        config.pluginmanager.register(costs.Recorder(table), "costs")
    if config.option.tier == "first" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(QuickFirst(config), "quick-first")


class QuickFirst:
    """Workers take the quick tier of all files before the rest of any, and nothing of that if the tier fails."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.failed = False

    @cached_property
    def quick(self) -> set[str]:
        return costs.quick(self.items, costs.read(), costs.killers())

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import LoadScopeScheduling

        tier = self

        class Scheduling(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                tier.items = self.collection
                return f"{nodeid in tier.quick} {nodeid.split('::')[0]}"

        return Scheduling(config, log)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed and report.nodeid in self.quick
        if self.failed and report.nodeid not in self.quick:
            self.config.pluginmanager.getplugin("dsession").shouldstop = "the quick tier fails"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "data_dir" in getattr(item, "fixturenames", ()):
            item.add_marker("data")
    known = costs.read()
    quick: set[str] = set()
    if config.option.tier:
        quick = costs.quick([item.nodeid for item in items], known, costs.killers())
        alone = {Path(file).resolve() for file in config.option.elsewhere}
        sides: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            sides[item.nodeid in quick or (config.option.tier == "first" and item.path not in alone)].append(item)
        config.hook.pytest_deselected(items=sides[False])
        items[:] = sides[True]
    if hasattr(config, "workerinput"):
        # Workers take file after file: the long ones first, so that at the end none waits long for another.
        seconds: Counter[tuple[bool, Path]] = Counter()
        for item in items:
            seconds[item.nodeid in quick, item.path] += known[item.nodeid].seconds if item.nodeid in known else 1.0
        items.sort(key=lambda item: (item.nodeid not in quick, -seconds[item.nodeid in quick, item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Without searches for garbage, which were a fifth of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Modules and tests are there for good. Not to search them for garbage, over and over, saves a twentieth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def fresh_arrays(request: pytest.FixtureRequest) -> None:
    """
    Gives every test copies of the array constants of its module and of those that tests share.

    While the traceback of a failed trace is alive, JAX remembers how that trace converted an array object: one traced
    with 64-bit numbers would come out as float64 where another test asks for 32 bits.
    """
    for name in (request.module.__name__, "models", "oracles", "cookbook", "problem"):
        constants = vars(sys.modules[name]) if name in sys.modules else {}
        constants.update({key: _fresh(value) for key, value in constants.items() if not key.startswith("_")})


def _fresh(value: Any) -> Any:
    """A copy of an array, and of the arrays in dictionaries, lists and tuples; all else as it is."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        fresh: Any = {key: _fresh(member) for key, member in value.items()}
        same = all(fresh[key] is member for key, member in value.items())
    elif type(value) in (list, tuple):
        fresh = type(value)(map(_fresh, value))
        same = all(map(operator.is_, fresh, value))
    else:
        return value
    return value if same else fresh


@pytest.fixture(scope="module", autouse=True)
def one_context() -> Iterator[None]:
    """
    Has JAX write the programs of a module's tests in one context of MLIR. It makes one for each, with all of MLIR's
    dialects, which takes a third of the time of small programs, and a tenth of the time of all tests.
    """
    shared, made = cache(mlir.make_ir_context), mlir.ModuleContext.__init__

    def in_shared(self: Any, *, context: Any = None, **given: Any) -> None:
        made(self, context=context or shared(), **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlir.ModuleContext, "__init__", in_shared)
        yield


#: Linux allows a process 65,530 of them by default.
MANY_MAPPINGS = 30_000


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """
    Has JAX forget its programs after a module where they are many. Each takes some twenty memory mappings; at the
    system's limit XLA compiles nothing any more, and a worker crashes where JAX writes the next program into its cache.
    """
    yield
    mappings = Path("/proc/self/maps")  # where there is none, no limit is known either
    if mappings.is_file() and mappings.read_bytes().count(b"\n") > MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of data sets named by NPGP_DATA; without one, tests skip or (in CI) fail."""
    folder = os.environ.get("NPGP_DATA")
    if folder and Path(folder).is_dir():
        return Path(folder)
    reason = f"NPGP_DATA={folder} is not a folder" if folder else "NPGP_DATA is not set"
    if os.environ.get("NPGP_REQUIRE_DATA") == "1":
        pytest.fail(f"{reason}, and NPGP_REQUIRE_DATA=1", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(params=[False, True], ids=["float32", "float64"])
def x64(request: pytest.FixtureRequest) -> Iterator[type]:
    """Runs the test twice, without and with 64-bit numbers; the value is the dtype."""
    with jax.enable_x64(request.param):
        yield jnp.float64 if request.param else jnp.float32


@pytest.fixture
def float64() -> Iterator[type]:
    """Runs the test with 64-bit numbers; the value is the dtype."""
    with jax.enable_x64(True):
        yield jnp.float64
