"""``spherical_uci.py``: its model and scores against dense formulas, its starts, and that it resumes."""

import json
import math

import loading
import numpy as np
import pytest
from scipy.stats import norm

from studies.spherical import uci_fits, uci_tables
from studies.spherical.uci_data import load

SETTINGS = ["--sets", "simulated", "--kernels", "arccos", "--features", "relu", "--size", "4", "--rows", "40"]
SETTINGS += ["--repetitions", "2", "--iterations", "3", "--levels", "4"]


@pytest.fixture(scope="module")
def script():
    return loading.script("spherical_uci")


@pytest.fixture(scope="module")
def fits(script, tmp_path_factory):
    """The records of a small run, and the file that they are in."""
    path = tmp_path_factory.mktemp("fits") / "out" / "fits.json"
    with loading.restored():
        return script.main([*SETTINGS, "--json", str(path)]), path


def dense_kernel(name: str, weights, bias: float, lengthscale: float, X, X2):
    U, V = (np.column_stack([x * np.sqrt(weights), np.full(len(x), math.sqrt(bias))]) for x in (X, X2))
    norms = np.outer(np.linalg.norm(U, axis=1), np.linalg.norm(V, axis=1))
    angle = np.arccos(np.clip(U @ V.T / norms, -1.0, 1.0))
    if name == "arccos":
        return norms * (np.sin(angle) + (math.pi - angle) * np.cos(angle)) / math.pi
    r = math.sqrt(5.0) * 2.0 * np.sin(angle / 2.0) / lengthscale
    return norms * (1.0 + r + r**2 / 3.0) * np.exp(-r)


@pytest.mark.parametrize("kernel", ["arccos", "matern52"])
def test_points_at_every_row_give_the_exact_gps_scores(kernel, float64):
    data = load("simulated", 3, 24)
    weights, bias, noise, lengthscale = np.array([0.7, 0.2, 0.05]), 0.6, 0.04, 0.8
    logs = np.log([*weights, bias, noise, lengthscale])[: 5 + (kernel == "matern52")]
    model = uci_fits.Model(kernel, "points", (24,))
    theta = np.concatenate([logs, data.X_train.ravel()])
    mean, variance, share = uci_fits.predict(theta, data.X_train, data.y_train, data.X_test, model)

    def k(A, B):
        return dense_kernel(kernel, weights, bias, lengthscale, A, B)

    K, cross = k(data.X_train, data.X_train) + noise * np.eye(24), k(data.X_train, data.X_test)
    exact = cross.T @ np.linalg.solve(K, data.y_train)
    left = np.diag(k(data.X_test, data.X_test) - cross.T @ np.linalg.solve(K, cross)) + noise
    np.testing.assert_allclose(mean, exact, atol=1e-4)
    np.testing.assert_allclose(variance, left, atol=1e-4)
    assert 0.0 <= share < 1e-3
    # In the target's own units.
    y = 20.0 + data.y_scale * data.y_test
    scores = uci_fits.scores(data, mean, variance)
    assert scores["rmse"] == pytest.approx(np.sqrt(np.mean((y - 20.0 - data.y_scale * exact) ** 2)), abs=1e-2)
    density = norm.logpdf(y, 20.0 + data.y_scale * exact, data.y_scale * np.sqrt(left))
    assert scores["nlpd"] == pytest.approx(-np.mean(density), abs=1e-2)
    value = float(uci_fits.loss_and_slope(theta, data.X_train, data.y_train, model)[0])
    evidence = -0.5 * (data.y_train @ np.linalg.solve(K, data.y_train) + np.linalg.slogdet(2.0 * math.pi * K)[1])
    assert value == pytest.approx(-evidence / 24, abs=1e-3)


def test_levels_by_each_rule(float64):
    data = load("simulated", 0, 40)
    for kernel, logs, six in (("arccos", 5, (0, 1, 2, 4)), ("matern52", 6, (0, 1, 2, 3, 4, 5))):
        theta = np.concatenate([np.zeros(logs), np.random.default_rng(0).normal(size=6 * 4)])
        model = uci_fits.Model(kernel, "relu", (6,), (0,))
        assert [m.levels for m in uci_fits.candidates(model, theta, data, "6")] == [six]
        # A rectified linear unit has no odd levels but the first.
        tried = [m.levels for m in uci_fits.candidates(model, theta, data, "bound")]
        assert tried == [(0, 1), (0, 1, 2), (0, 1, 2, 4), (0, 1, 2, 4, 6)]
        assert uci_fits.candidates(model._replace(feature="points"), theta, data, "bound")[0].levels == (0,)


def test_larger_sizes_start_no_worse_than_the_smaller_ended(fits):
    records, _ = fits
    by_column = {column: [r for r in records if r["column"] == column] for column in ("4", "4+4", "8")}
    for alone, both, double in zip(*by_column.values(), strict=True):
        assert both["repetition"] == alone["repetition"] and both["levels"] == double["levels"] == [0, 1, 2]
        for larger in (both, double):  # more features at the same levels and hyperparameters
            assert alone["bound"] + 1e-3 < larger["bound_start"] < larger["bound"]
            assert larger["left_out"] < alone["left_out"]
        assert alone["bound_start"] < alone["bound"]
        assert alone["rows"] == 40 and alone["test_rows"] == 10


def test_a_later_run_does_what_is_missing(script, fits, monkeypatch, capsys, float64):
    records, path = fits
    assert json.loads(path.read_text()) == records
    done = []

    def three_sizes(data, kernel, feature, args, levels):
        done.append((kernel, feature, len(data.y_train), dict(levels)))
        return {column: records[0] | {"column": column} for column in uci_fits.sizes(args.size)}

    monkeypatch.setattr(script, "three_sizes", three_sizes)
    assert script.main([*SETTINGS, "--json", str(path)]) == records and not done
    again = path.with_name("more.json")
    again.write_text(path.read_text())
    script.main([*SETTINGS, "--repetitions", "3", "--json", str(again)])
    chosen = (0, 1, 2)  # on the first repetition
    assert done == [("arccos", "relu", 40, {"4": chosen, "4+4": chosen, "8": chosen})]
    assert len(json.loads(again.read_text())) == len(records) + 3
    capsys.readouterr()
    assert script.main([*SETTINGS, "--levels", "left-out", "--report", "--json", str(path)]) == []
    assert "Nothing is there" in capsys.readouterr().out


def test_cells_that_are_worse_than_the_reference_are_marked(script, fits, capsys, float64):
    records, path = fits
    mean = {c: np.mean([r["rmse"] for r in records if r["column"] == c]) for c in ("4", "4+4", "8")}
    ours = {c: np.std([r["rmse"] for r in records if r["column"] == c], ddof=1) / math.sqrt(2) for c in mean}
    theirs = {
        "4": {"rmse": [mean["4"] - 2.1 * ours["4"], 0.0]},
        "4+4": {"rmse": [mean["4+4"] - 1.9 * ours["4+4"], 0.0]},
        "8": {"rmse": [mean["8"] + 5.0, 0.1]},
    }
    reference = path.with_name("reference.json")
    reference.write_text(json.dumps({"simulated": {"arccos": {"relu": theirs}}}))
    script.main([*SETTINGS, "--report", "--json", str(path), "--reference", str(reference)])
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("| simulated"))
    assert [text.endswith("worse") for text in map(str.strip, row.split("|")[4:7])] == [True, False, False]
    assert "1 of 3 cells are worse" in out
    assert uci_tables.worse((2.0, 0.3), (1.0, 0.3)) and not uci_tables.worse((2.0, 0.4), (1.0, 0.3))
    assert uci_tables.worse((2.0, math.nan), (1.0, 0.4))


def test_the_claim_is_of_repetitions_in_pairs(capsys):
    def record(nlpd, bound):
        return {"rmse": nlpd, "nlpd": nlpd, "bound": bound}

    columns = {
        "4+4": {0: record(1.0, -1.0), 1: record(11.0, -2.0)},
        "8": {0: record(1.5, -1.5), 1: record(11.7, -2.5)},
    }
    report = uci_tables.claim({("yacht", "arccos", "relu"): columns}, 4)["yacht/arccos/relu"]
    assert report["nlpd"] == pytest.approx((0.6, 0.1))
    assert report["bound"] == pytest.approx((0.5, 0.0))
    assert report["verdict"] == "holds, clearly"
    columns["4+4"][1] = record(12.5, -2.0)
    assert uci_tables.claim({("yacht", "arccos", "relu"): columns}, 4)["yacht/arccos/relu"]["verdict"] == "fails"
    assert "yacht: the claim holds in 0 of 1 cells" in capsys.readouterr().out
