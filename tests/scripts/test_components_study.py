"""The study of components that share a signal: does it run, and is its exact GP one?"""

import loading
import numpy as np
import pytest


@pytest.mark.slow
def test_components_runs(monkeypatch, tmp_path, capsys):
    report = loading.quick_report(monkeypatch, tmp_path, "components", "--guides", "joint")
    assert [fit["q"] for fit in report["fits"]] == ["exact GP", "exact GP, NUTS", "joint"]
    for fit in report["fits"]:
        assert np.isfinite(fit["bound"]) and fit["rmse"] > 0 and fit["width"] > 0 and 0 <= fit["inside"] <= 1
    assert "| exact GP" in capsys.readouterr().out
