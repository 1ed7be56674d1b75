"""Calibration and classification: do they run, and does calibration's test see errors?"""

import json
import sys
from pathlib import Path

import loading
import models
import numpy as np
import pytest
from figures import assert_finite, assert_picture
from scipy import stats


@pytest.fixture
def script(monkeypatch):
    """Loads a script as a module; its programs are compiled in a hurry."""
    models.compile_all_quickly(monkeypatch)

    return loading.script


def run(module, folder: Path, *args: str) -> dict:
    """The script's report, as returned and as read from the file it wrote."""
    path = folder / "figures" / "report.json"
    report = module.main([*args, "--out", str(folder), "--json", str(path)])
    assert json.loads(path.read_text()) == report
    return report


# ---------------------------------------------------------------------------------------------------------------
# Calibration: the test of uniformity


def conjugate_ranks(rng, replications=320, draws=63, shift=0.0, scale=1.0) -> np.ndarray:
    """μ ~ N(0, 1), y ~ N(μ, 1): ranks of μ among draws from N(y/2, 1/2), with data and width that may be wrong."""
    mu = rng.normal(size=replications)
    y = mu + rng.normal(size=replications) + shift
    drawn = y / 2 + scale * np.sqrt(0.5) * rng.normal(size=(draws, replications))
    return np.sum(drawn < mu, axis=0)


def test_the_right_posterior_passes_and_wrong_ones_fail(script):
    judge = script("calibration").judge
    rng = np.random.default_rng(0)
    right = judge(conjugate_ranks(rng), 63)
    assert right["p_band"] > 0.05 and right["p_chi2"] > 0.05
    assert right["mean_rank"] == pytest.approx(0.5, abs=0.05)
    assert right["spread"] == pytest.approx(1.0, abs=0.2)
    shifted = judge(conjugate_ranks(rng, shift=0.5), 63)  # posterior of other data
    assert shifted["p_band"] < 0.002 and shifted["mean_rank"] < 0.45
    narrow = judge(conjugate_ranks(rng, scale=0.7), 63)  # as mean-field guides are
    assert narrow["p_band"] < 0.002 and narrow["spread"] > 1.2
    wide = judge(conjugate_ranks(rng, scale=1.5), 63)
    assert wide["p_band"] < 0.002 and wide["spread"] < 0.8


def test_the_band_has_its_level(script):
    """p-values of uniform ranks are uniform, as far as their discreteness allows."""
    calibration = script("calibration")
    rng = np.random.default_rng(1)
    p = [calibration.band_p_value(rng.integers(0, 16, size=100), 15, simulations=500) for _ in range(300)]
    assert stats.kstest(p, "uniform").pvalue > 0.01


def test_ranks_out_of_range_are_an_error(script):
    with pytest.raises(ValueError, match="0 to 7"):
        script("calibration").band_p_value(np.array([0, 8]), 7)


@pytest.mark.slow
def test_calibration_runs(script, tmp_path, capsys):
    calibration = script("calibration")
    report = run(calibration, tmp_path, "--quick", "--cases", "gaussian-nuts", "poisson-svi")
    assert_finite(report)
    assert set(report["cases"]) == {"gaussian-nuts", "poisson-svi"}
    for case in report["cases"].values():
        assert case["uniform"] == (case["p"] >= report["level"])
        for figures in case["quantities"].values():
            assert len(figures["ranks"]) == report["replications"] == sum(figures["histogram"])
            assert min(figures["ranks"]) >= 0 and max(figures["ranks"]) <= report["draws"]
    assert list(report["cases"]["gaussian-nuts"]["quantities"])[-1] == "f(1.15)"
    assert_picture(tmp_path / "calibration.png", least=150)
    assert "poisson-svi" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------
# Classification


@pytest.mark.slow
def test_classification_runs(script, data_dir, tmp_path, capsys):
    report = run(script("classification"), tmp_path, "--quick")
    assert_finite(report)
    (fit,) = report["fits"]
    assert fit["method"] == "SOLVE-GP, tight"
    assert 0.0 < fit["error"] < 0.4 and -0.68 < fit["log_likelihood"] < 0.0  # better than chance
    nuts = report["nuts"]
    for name in ("SVI", "NUTS"):
        assert nuts[name]["log_likelihood"] > -0.7
        assert min(nuts[name]["sd"].values()) > 0.0
    assert 0.0 < nuts["difference"]["mean"] < nuts["difference"]["max"] < 1.0
    assert_picture(tmp_path / "classification.png", least=150)
    assert f"{fit['log_likelihood']:.4f}" in capsys.readouterr().out


def test_classification_scores(script):
    classification = script("classification")
    p = np.array([0.9, 0.2, 0.6])
    scores = classification.scores(np.log([1 - p, p]), np.array([1.0, 0.0, 0.0]))
    assert scores["error"] == pytest.approx(1 / 3)
    assert scores["log_likelihood"] == pytest.approx(np.log([0.9, 0.8, 0.4]).mean())
    log_p = classification.log_probabilities(np.array([0.3]), np.array([2.0]))
    np.testing.assert_allclose(log_p[:, 0], stats.norm.logcdf([-0.3 / 3**0.5, 0.3 / 3**0.5]))


def test_a_missing_library_names_its_extra(script, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(ImportError, match=r"npgp\[bench\]"):
        script("classification").main(["--quick", "--against", "gpytorch", "--out", str(tmp_path)])
