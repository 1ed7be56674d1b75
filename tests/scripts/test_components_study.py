"""The study of components that share a signal: does it run, and is its exact GP one?"""

import json

import loading
import models
import numpy as np
import pytest


@pytest.mark.slow
def test_components_runs(monkeypatch, tmp_path, capsys):
    models.compile_all_quickly(monkeypatch)
    path = tmp_path / "report.json"
    report = loading.script("components").main(["--quick", "--guides", "joint", "--json", str(path)])
    assert json.loads(path.read_text()) == report
    assert [fit["q"] for fit in report["fits"]] == ["exact GP", "exact GP, NUTS", "joint"]
    for fit in report["fits"]:
        assert np.isfinite(fit["bound"]) and fit["rmse"] > 0 and fit["width"] > 0 and 0 <= fit["inside"] <= 1
    assert "| exact GP" in capsys.readouterr().out
