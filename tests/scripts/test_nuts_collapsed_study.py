"""The study of NUTS with q(ε) collapsed: does it run?"""

import json

import loading
import models
import numpy as np
import pytest


@pytest.mark.slow
def test_samplers_are_compared(monkeypatch, tmp_path, capsys):
    models.compile_all_quickly(monkeypatch)
    path = tmp_path / "report.json"
    report = loading.script("nuts_collapsed").main(["--quick", "--json", str(path)])
    assert json.loads(path.read_text()) == report
    (case,) = report["cases"]
    assert case["rows"] == 20 and max(case["ratio"][how] for how in ("whole", "blocks")) == 1
    for how in ("whole", "blocks", "collapsed"):
        assert case[how]["ess_per_second"] > 0 and len(case[how]["mean"]) == 4 and np.all(np.isfinite(case[how]["sd"]))
    assert "collapsed" in capsys.readouterr().out
