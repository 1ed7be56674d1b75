"""The study of NUTS with q(ε) collapsed: does it run?"""

import loading
import numpy as np
import pytest


@pytest.mark.slow
def test_samplers_are_compared(monkeypatch, tmp_path, capsys):
    report = loading.quick_report(monkeypatch, tmp_path, "nuts_collapsed")
    (case,) = report["cases"]
    assert case["rows"] == 20 and max(case["ratio"][how] for how in ("whole", "blocks")) == 1
    for how in ("whole", "blocks", "collapsed"):
        assert case[how]["ess_per_second"] > 0 and len(case[how]["mean"]) == 4 and np.all(np.isfinite(case[how]["sd"]))
    assert "collapsed" in capsys.readouterr().out
