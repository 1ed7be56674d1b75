"""The study of a panel: does it run?"""

import json

import loading
import models
import numpy as np
import pytest


@pytest.mark.slow
def test_panel_runs(monkeypatch, tmp_path, capsys):
    models.compile_all_quickly(monkeypatch)
    path = tmp_path / "report.json"
    report = loading.script("panel").main(["--quick", "--json", str(path)])
    assert json.loads(path.read_text()) == report
    (fit,) = report["found"].values()
    assert np.isfinite(fit["elbo"]) and np.isfinite(fit["held_out"])
    assert fit["levels_sd"] > 0 and all(len(fit[name]) == 2 for name in ("tau", "own_scale", "noise"))
    assert "| joint" in capsys.readouterr().out
