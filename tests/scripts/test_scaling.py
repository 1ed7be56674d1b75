"""The report on how a step is shared among devices."""

import json
import os
import subprocess
import sys

import pytest
from loading import SCRIPTS, path


@pytest.mark.slow
def test_a_small_report(tmp_path):
    """In a process of its own, as it sets the number of devices."""
    settings = "--devices 1 4 --inducing 16 --batch-size 256 --columns 2 --repetitions 1".split()
    command = [sys.executable, str(path("scaling")), *settings, "--json", str(tmp_path / "out" / "report.json")]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    one, four = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert one["efficiency"] == one["speed_up"] == 1 and one["difference"] == 0
    # The rows' work is in four parts, and not all of it is the rows'.
    assert 0.25 < four["work"] < 0.5 and four["devices"] == 4 and "efficiency" in said
    assert four["difference"] < 1e-10
