"""The list of mutants is of the library as it is; the tiers are what tests/support/costs.py says, and small enough."""

import ast

import costs
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
    table[prices["cheap"]] = Cost(0.1, 30.0, 1)  # dear where it is the first
    assert prices["cheap"] not in costs.quick(items, table, killed)


def test_what_items_cost_in_the_tier_counts(tmp_path):
    """There an item pays for what it shares with one that is left out."""
    costs.write({"a": Cost(5.0, 0.0, 3), "b": Cost(0.1, 0.0, 0), "c": Cost(1.0, 2.0, 1)}, tmp_path / "table")
    recorder = costs.Recorder(tmp_path / "table", some=True)
    recorder.costs = {"b": Cost(5.1, 0.0, 3), "c": Cost(1.0, 0.0, 1), "new": Cost(1.0, 0.0, 1)}
    recorder.pytest_sessionfinish()
    found = costs.read(tmp_path / "table")
    assert found == {"a": Cost(5.0, 0.0, 3), "b": Cost(0.1, 5.1, 0), "c": Cost(1.0, 2.0, 1)}


def test_the_tables_are_of_tests_that_there_are():
    known = costs.read()
    files = set(nearest.test_files())
    gone = [item for item in known if item.split("::")[0] not in files]
    assert len(gone) <= 0.02 * len(known), "write the table anew: scripts/test --costs"


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
