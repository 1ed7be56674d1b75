"""The list of mutants is of the library as it is; the tiers are what tests/support/costs.py says, and small enough."""

import ast
import functools

import costs
import jax
import jax.numpy as jnp
import mutate
import nearest
import pytest
from costs import Cost

MUTANTS = mutate.read(mutate.LIST.read_text())


def test_every_mutant_can_be_made():
    assert [fault for mutant in MUTANTS if (fault := mutant.fault(mutate.ROOT))] == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 120


def test_every_mutant_is_another_program():
    for mutant in MUTANTS:
        text = (mutate.ROOT / mutant.file).read_text()
        assert ast.dump(ast.parse(text.replace(mutant.old, mutant.new))) != ast.dump(ast.parse(text)), mutant.name


def test_mutants_are_of_every_folder():
    folders = {folder.name for folder in (mutate.ROOT / "npgp").iterdir() if (folder / "__init__.py").exists()}
    assert folders <= {mutant.file.split("/")[1] for mutant in MUTANTS}


def test_what_the_tiers_kill():
    """As far as they were run: nearly all mutants, most by the quick tier; each that lives has its reason."""
    killed, known = costs.killers(), costs.read()
    quick = costs.quick(set(known).union(*killed.values()), known, killed)
    assert killed.keys() <= {mutant.name for mutant in MUTANTS}
    assert sum(not found.isdisjoint(quick) for found in killed.values()) >= 0.85 * len(MUTANTS)
    assert len(killed) >= 0.97 * len(MUTANTS)
    assert [mutant.name for mutant in MUTANTS if mutant.name not in killed and not mutant.reason] == []


def test_a_stale_mutant_is_named(tmp_path):
    (tmp_path / "file.py").write_text("a = 1\nb = 1\n")
    listed = mutate.read(
        "# Notes.\n\ntwice: one of two\nfile.py\n- = 1\n+ = 2\n\nonce: a\nfile.py\n- a = 1\n+ a = 2\n= No.\n"
    )
    twice, once = listed
    assert "twice" in twice.fault(tmp_path) and "2 times" in twice.fault(tmp_path)
    assert once.fault(tmp_path) is None and once.reason == "No."


def test_what_the_quick_tier_has():
    prices = {"contract": costs.CONTRACT + "test_a", "cheap": "tests/b.py::test_a", "other": "tests/b.py::test_b"}
    prices |= {"dear": "tests/c.py::test_a", "killer": "tests/c.py::test_b", "rest": "tests/d.py::test_a"}
    seconds = {"contract": 2.0, "cheap": 0.1, "other": 2.5, "dear": 6.0, "killer": 2.9, "rest": 986.5}
    table = {prices[name]: Cost(value, 0.0, 1) for name, value in seconds.items()}
    new, unknown = "tests/b.py::test_new", "tests/e.py::test_new"
    items = [*table, new, unknown]
    killed = {"one": {prices["killer"], prices["dear"]}, "two": {prices["dear"]}}
    # Of 1000 s, so that an item may cost 5 s and all 50: what is too dear stays out, if it alone kills "two".
    small = {prices[name] for name in ("contract", "cheap", "other", "killer")} | {new}
    assert costs.quick(items, table, killed) == small
    # One more item than there is time for: mutants, the contract, and then the cheapest first.
    many = {f"tests/f.py::test_{i:02}": Cost(3.0, 0.0, 1) for i in range(40)}
    table[prices["rest"]] = Cost(866.5, 0.0, 1)
    chosen = costs.quick([*items, *many], table | many, killed)
    assert small <= chosen and len(chosen - small) == 14  # (50 − 7.5) / 3
    # Of what two share one pays.
    table |= {f"tests/b.py::test_{name}": Cost(0.1, 4.0, 1) for name in ("one", "two", "three")}
    few = {mutant: {f"tests/b.py::test_{mutant}"} for mutant in ("one", "two")}
    shared = costs.quick(
        [*items, *many, *few["one"], *few["two"], "tests/b.py::test_three"], table | many, killed | few
    )
    assert {f"tests/b.py::test_{name}" for name in ("one", "two", "three")} <= shared
    assert len(shared & many.keys()) == 12  # (50 − 7.5 − 4.2) / 3
    table[prices["cheap"]] = Cost(0.1, 30.0, 1)  # dear where it is the first
    assert prices["cheap"] not in costs.quick(items, table, killed)


def test_the_tables_are_of_tests_that_there_are():
    known = costs.read()
    files = set(nearest.test_files())
    gone = [item for item in known if item.split("::")[0] not in files]
    assert len(gone) <= 0.02 * len(known), "write the table anew: scripts/test --costs"


def test_first_calls_of_what_is_shared_are_known(tmp_path, monkeypatch):
    """Of a cached and of a compiled function, also by an item that is not the first that calls them."""
    seconds = iter(range(100))
    monkeypatch.setattr(costs, "_seconds", lambda: float(next(seconds)))
    recorder = costs.Recorder(None)
    cached = costs.Shared(functools.cache(lambda x: double(jnp.ones(x))), recorder)
    double = costs.Shared(jax.jit(lambda x: 2.0 * x), recorder)
    assert cached(3).shape == (3,) and list(recorder.used.values()) == [3.0]  # two calls, the clock's steps
    recorder.used = {}
    for _ in range(2):
        cached(3)
    assert list(recorder.used.values()) == [3.0]
    double(jnp.ones(3))  # paid inside
    double(jnp.zeros(4))
    assert list(recorder.used.values()) == [3.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "module, first",
    [
        ("npgp/sparse/groups.py", "tests/sparse/test_groups.py"),
        ("npgp/chunks.py", "tests/ground/test_chunks.py"),
        ("npgp/variational/natural.py", "tests/variational/test_natural.py"),
    ],
)
def test_nearest_files(module, first):
    assert nearest.nearest(module)[0] == first
