"""The script that compares neighbors with inducing points: what it simulates, and that its figures are of its fits."""

import json

import numpy as np
import oracles
import pytest
from loading import script

from studies.approximations import data as simulated


@pytest.fixture(scope="module")
def study():
    return script("neighbors_study")


def test_simulated_sites_have_the_covariance_they_should(study, monkeypatch):
    """Of near pairs, over all sites: the semivariogram of Matérn-3/2 and noise."""
    monkeypatch.setattr(simulated, "COSINES", 512)
    X, y = study.simulate(20_000, study.SPATIAL_LENGTHSCALE, 0)
    order = np.argsort(X[:, 0])
    i, j = order[:-1], order[1:]
    for step in range(1, 8):  # neighbors in the first column that are near in the second
        i, j = np.concatenate([i, order[:-step]]), np.concatenate([j, order[step:]])
    distance = np.linalg.norm(X[i] - X[j], axis=1)
    for low, high in [(0.0, 0.01), (0.01, 0.02), (0.02, 0.04), (0.1, 0.2)]:
        near = (distance > low) & (distance < high)
        mean = 1 - oracles.CORRELATION["Matern32"](distance[near] / study.SPATIAL_LENGTHSCALE)
        found = 0.5 * np.mean((y[i] - y[j])[near] ** 2)
        assert found == pytest.approx(np.mean(mean) + 0.1, rel=0.15)
    assert abs(np.mean(y)) < 0.2


def test_small_study(study, tmp_path, capsys):
    path = tmp_path / "figures" / "study.json"
    report = study.main(["--quick", "--sets", "spatial", "--json", str(path)])
    assert json.loads(path.read_text())["sets"] == report["sets"]
    figures = report["sets"]["spatial"]
    assert figures["rows"] == 240 and set(figures["fits"]) == {"VNNGP", "SVGP 8"}
    for fit in figures["fits"].values():
        assert 0 < fit["rmse"] < 1.3 and np.isfinite(fit["nlpd"]) and fit["ms_per_step"] > 0
    assert "SVGP 8" in capsys.readouterr().out


def test_judgement_is_of_observations(study):
    data = study.Data(*(np.zeros((2, 1)),) * 3, np.array([0.0, 2.0]))
    judged = study.judge(np.zeros(2), np.ones(2), 1.0, data)
    assert judged["rmse"] == pytest.approx(np.sqrt(2))
    assert judged["nlpd"] == pytest.approx(0.5 * np.log(2 * np.pi * 2) + 0.5)
