"""The report on files of rows."""

import json

import pytest
from loading import script

memmap_cost = script("memmap_cost")


def test_a_small_report(tmp_path, capsys):
    if not memmap_cost.Path("/proc/self/status").exists():
        pytest.skip("this system does not tell a process's memory")
    report = memmap_cost.main(["--quick", "--json", str(tmp_path / "out" / "report.json")])
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    first, second = report["files"]
    assert first["ratio"] == 1 and second["rows"] == 100_000 and second["seconds"] > 0
    assert report["batch_bytes"] == 128 * 9 * 4
    # A hundred thousand rows of 36 bytes are 780 batches: not in memory.
    assert abs(second["resident"] - first["resident"]) < 100e6
    assert "100,000" in capsys.readouterr().out
