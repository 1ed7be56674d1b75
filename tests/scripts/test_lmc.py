"""The study of mixtures of functions with a kernel each: does it run?"""

import json

import loading
import numpy as np
import pytest


@pytest.mark.slow
def test_lmc_runs(tmp_path, capsys):
    path = tmp_path / "report.json"
    report = loading.script("lmc").main(["--quick", "--functions", "2", "--json", str(path)])
    assert json.loads(path.read_text()) == report
    assert [(fit["own"], len(fit["lengthscales"])) for fit in report["fits"]] == [(True, 2), (False, 1)]
    assert all(np.isfinite(fit["elbo"]) and np.isfinite(fit["log_density"]) for fit in report["fits"])
    assert report["times_one_function"]["one function"] == 1.0
