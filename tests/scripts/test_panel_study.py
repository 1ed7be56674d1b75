"""The study of a panel: does it run?"""

import loading
import numpy as np
import pytest


@pytest.mark.slow
def test_panel_runs(monkeypatch, tmp_path, capsys):
    report = loading.quick_report(monkeypatch, tmp_path, "panel")
    (fit,) = report["found"].values()
    assert np.isfinite(fit["elbo"]) and np.isfinite(fit["held_out"])
    assert fit["levels_sd"] > 0 and all(len(fit[name]) == 2 for name in ("tau", "own_scale", "noise"))
    assert "| joint" in capsys.readouterr().out
