"""The benchmark of deep GPs and mixtures: npgp's programs train, and its tables say what was not compared."""

import json

import loading
import numpy as np
import pytest


@pytest.mark.slow
def test_composed_runs_without_gpytorch(tmp_path, capsys, monkeypatch):
    (tmp_path / "gpytorch.py").write_text("raise ImportError('none here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    paths = tmp_path / "composed.json", tmp_path / "composed.md"
    arguments = ["--quick", "--json", str(paths[0]), "--markdown", str(paths[1])]
    report = loading.script("composed").main(arguments)
    assert json.loads(paths[0].read_text()) == report
    text = paths[1].read_text()
    assert "GPyTorch is not compared here: not installed (none here)" in text and "/ GPyTorch" not in text
    assert "| 2     |  6 |   20 |     2 |" in text and "times one function" in text
    for part in ("deep", "mixtures"):
        (row,) = report[part]
        assert set(row["seconds"]) == set(row["elbo"]) == {"npgp", "npgp, tight"}
        assert row["elbo"]["npgp"] <= row["elbo"]["npgp, tight"] + 0.05  # the same draws, and a better bound
        assert np.min(list(row["seconds"].values())) > 0.0
    (fit,) = report["fits"]
    assert np.all(np.isfinite(list(fit["log_density"].values())))
    assert set(report["functions"][0]["seconds"]) == {"1", "2"}


def test_ratios_are_of_the_faster_peer():
    composed = loading.script("composed")
    seconds = {"npgp": [1.0, 2.0, 1.0], "GPyTorch": [4.0, 4.0, 4.0], "GPyTorch, a kernel for each function": [2.0] * 3}
    row = {"inducing": 5, "seconds": seconds, "elbo": {"npgp": -1.0, "npgp, tight": -0.5, "GPyTorch": -1.25}}
    lines = composed.steps_table([row], {"inducing": "M"}).splitlines()
    assert lines[0].split("|")[-2].strip() == "npgp / GPyTorch" and "0.50 (0.50–0.75)" in lines[2]
    assert "within 0.2500 of each other" in composed.apart([row])
