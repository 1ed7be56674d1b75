"""``snelson_levels.py``: its levels, its starts, a bound against dense formulas, and a quick run."""

import loading
import numpy as np
import pytest
from scipy.stats import multivariate_normal

from npgp import datasets
from studies.spherical.uci_fits import Model


@pytest.fixture(scope="module")
def script():
    return loading.script("snelson_levels")


def test_levels_in_common_and_starts(script, float64):
    model = Model("arccos", "relu", (3, 2), (0, 1, 2, 4, 6))
    logs = np.log([0.7, 0.4, 0.1])
    # Neither the kernel nor the unit has odd levels but the first.
    assert script.in_common(model, logs, 8) == model.levels
    X = np.random.default_rng(0).normal(size=(12, 1))
    begin, points = script.start(model, logs, X, 0), script.start(Model("arccos", "points", (5,)), logs, X, 0)
    np.testing.assert_array_equal(begin[:3], logs)
    assert np.all(script.start(model, logs, X, 1)[:3] != logs)
    np.testing.assert_array_equal(begin[-2:], points[-2:])
    # Units point to rows: the angle's tangent is that of weighted input and bias.
    directions = begin[3:9].reshape(3, 2)
    np.testing.assert_allclose(directions[:, 0] / directions[:, 1], np.sqrt(0.7 / 0.4) * points[3:6])


def test_quick_run(script, monkeypatch, tmp_path, data_dir):
    with loading.restored():
        report = loading.quick_report(monkeypatch, tmp_path, "snelson_levels", "--levels", "2", "4")
    X, y, _ = datasets.snelson()
    u = np.column_stack([(X - X.mean()) / X.std(), np.ones(len(X))])
    y = (y - y.mean()) / y.std()

    weights, bias, noise = report["hyperparameters"]
    u *= np.sqrt([weights, bias])
    norms = np.linalg.norm(u, axis=1)
    angle = np.arccos(np.clip(u @ u.T / np.outer(norms, norms), -1.0, 1.0))
    K = np.outer(norms, norms) * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / np.pi
    evidence = multivariate_normal.logpdf(y, np.zeros(len(y)), K + noise * np.eye(len(y)))
    assert report["exact"] == pytest.approx(evidence, abs=1e-3)

    found = report["harmonics"]
    assert [(f["levels"], f["harmonics"]) for f in found.values()] == [([0, 1], 3), ([0, 1, 2], 5)]
    fits = {(f["M"], f["first"], f["column"]): f for f in report["fits"]}
    assert len(fits) == len(report["fits"]) == 18  # two M, three first blocks, three columns
    for (M, _, column), fit in fits.items():
        timed_alone = M == 1 and column != "2"  # two features are fitted as M = 2
        assert (fit["bound"] is None) == (fit["few"] is None) == timed_alone
        assert fit["bound"] is None or fit["bound"] < report["exact"]
        assert len(fit["many"]) == 3 and all(ratio > 0 for ratio in fit["many"])
    assert fits[2, "points", "4"]["many"] == [1.0, 1.0, 1.0]
