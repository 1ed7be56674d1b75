"""``airline.py`` and ``spherical_cost.py`` from their arguments to their figures."""

import json

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from figures import assert_picture
from loading import script

import npgp


@pytest.fixture
def airline(monkeypatch):
    """The script as a module, in the single precision that it sets for the process, and without data."""
    monkeypatch.delenv("NPGP_DATA", raising=False)
    return script("airline")


def test_small_run_of_airline(airline, tmp_path, capsys):
    path = tmp_path / "figures" / "report.json"
    small = ["--small", "--methods", "six+points", "--out", str(tmp_path), "--json", str(path)]
    report = airline.main(small)
    assert json.loads(path.read_text()) == report
    (fit,) = report["fits"]
    assert fit["method"] == "activated, six levels, + points, 12 + 12" and fit["levels"] == list(range(6))
    assert [point["step"] for point in fit["curve"]][-1] == report["steps"]
    assert fit["curve"][-1]["seconds"] == pytest.approx(report["steps"] * fit["step_seconds"][1])
    # Delays are simulated with a trend that linear regression finds in part.
    constant, linear = (report["baselines"][key] for key in ("constant", "linear"))
    assert linear[0] < constant[0] and fit["rmse"] < constant[0]
    assert fit["nlpd"] == fit["curve"][-1]["nlpd"] < fit["curve"][0]["nlpd"]
    assert all(0.0 < share < 0.5 for share in fit["left_out"])
    assert_picture(tmp_path / "simulated_time.png")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " → " in line]
    assert line.split()[-2:] == [f"{fit['rmse_minutes']:.2f}", f"{fit['nlpd_minutes']:.4f}"]


def test_flights_are_standardized_by_training_rows(airline):
    data = airline.load("hflights2011", 300, seed=0)
    assert data.X.shape == data.X_test.shape == (300, 8) and data.X.dtype == data.y.dtype == np.float32
    np.testing.assert_allclose([*data.X.mean(axis=0), data.y.mean()], 0.0, atol=1e-5)
    np.testing.assert_allclose([*data.X.std(axis=0), data.y.std()], 1.0, rtol=1e-5)
    assert abs(data.y_test.mean()) > 1e-4  # not by its own mean
    rows = {tuple(row) for row in data.X}
    assert not any(tuple(row) in rows for row in data.X_test)


def test_scores_of_airline(airline):
    rng = np.random.default_rng(1)
    y, mean, variance = rng.normal(size=7), rng.normal(size=7), rng.uniform(0.5, 2.0, 7)
    rmse, nlpd = airline.scores(mean, variance, y)
    assert rmse == pytest.approx(np.linalg.norm(y - mean) / np.sqrt(7))
    assert nlpd == pytest.approx(-float(np.mean(dist.Normal(mean, np.sqrt(variance)).log_prob(y))), rel=1e-5)


def test_second_block_of_points_is_chosen_given_the_first(airline):
    jax.config.update("jax_enable_x64", False)
    args = airline.parse(["--small"])
    data, starts = airline.load("airline2008_subset", 300, seed=0), {}
    runs = {name: airline.Run(airline.METHODS[name], data, starts, args) for name in ("svgp", "solve", "activated")}
    np.testing.assert_array_equal(runs["svgp"].start["inducing0"], runs["solve"].start["inducing0"])
    alone, both = (runs[name].left_out(runs[name].start) for name in ("svgp", "solve"))
    assert 0.0 < both < 0.8 * alone
    # Levels of activations are those that leave least out.
    tried = runs["activated"].tried
    assert runs["activated"].levels[-1] == min(tried, key=tried.get)
    assert runs["activated"].left_out(runs["activated"].start) == pytest.approx(min(tried.values()), rel=1e-3)


def test_harmonics_are_timed_beside_points(tmp_path, capsys):
    cost = script("spherical_cost")
    path = tmp_path / "cost.json"
    sizes = "--harmonics 8 --dimension 3 --orthogonal --batch-size 20 --rows 40 --repetitions 2".split()
    report = cost.main([*sizes, "--json", str(path)])
    assert json.loads(path.read_text()) == report
    (harmonics,) = report["harmonics"]
    assert harmonics["features"] == "4" and harmonics["levels"] == [0, 1]
    for kind in ("step", "collapsed"):
        low, median, high = harmonics[kind]["harmonics"]["ratio"]
        assert 0.0 < low <= median <= high
        assert harmonics[kind]["points"]["ratio"] == [1.0, 1.0, 1.0]
    assert "SVI, harmonics" in capsys.readouterr().out

    # What is timed are bounds on one evidence, and not far from it.
    with jax.enable_x64(False):
        X, y = cost.data(40, 2, 0)
        kernel = npgp.kernels.ZonalArcCosine(weight_variance=np.float32(0.5))
        evidence = float(npgp.collapsed.exact_log_evidence(kernel, X, y, noise_variance=cost.NOISE_VARIANCE)) / 40
        activated, _ = cost.collapsed_bound([("activations", 6, (0, 1, 2)), ("points", 6, ())], X, y)()
    bounds = [figures["bound_per_row"] for figures in harmonics["collapsed"].values()]
    for bound in (*bounds, float(activated) / 40):
        assert evidence - 3.0 < bound < evidence + 1e-3
