"""The regression study: its pieces against independent formulas, and that it runs."""

import itertools
import json

import jax
import numpy as np
import pytest
from figures import assert_picture
from loading import script
from scipy.stats import multivariate_normal

import npgp
from studies.regression import collapsed_fits, held_out
from studies.shared import LOG_BOUNDS, lbfgs


@pytest.fixture(scope="module")
def study():
    return script("regression_study")


@pytest.fixture
def run(study, tmp_path):
    """Runs main with arguments; its report, as returned and as read from the file it wrote."""

    def run(*args: str) -> dict:
        path = tmp_path / "figures" / "report.json"
        report = study.main([*args, "--out", str(tmp_path), "--json", str(path)])
        assert json.loads(path.read_text()) == report
        return report

    return run


def rows(num: int = 30):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 2))
    return X, np.sin(X[:, 0]) + 0.1 * rng.normal(size=num)


def test_the_bound_at_all_points_is_the_evidence(float64):
    X, y = rows()
    lengthscales, variance, noise = np.array([0.7, 1.9]), 1.4, 0.2
    r = np.sqrt(3.0 * np.sum(np.square((X[:, None] - X) / lengthscales), -1))
    K = variance * (1.0 + r) * np.exp(-r) + noise * np.eye(len(X))
    theta = np.concatenate([np.log([*lengthscales, variance, noise]), X.ravel()])
    value, slope = collapsed_fits.loss_and_slope(theta, X, y, None, "tight", "matern32")
    assert -len(X) * float(value) == pytest.approx(multivariate_normal(cov=K).logpdf(y), abs=1e-4)  # the jitter's
    step = 1e-5 * np.eye(len(theta))[2]
    ends = [float(collapsed_fits.loss_and_slope(theta + s, X, y, None, "tight", "matern32")[0]) for s in (step, -step)]
    assert float(slope[2]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)


def test_fits_climb_in_the_order_of_the_conditionals(study, float64):
    X, y = rows()
    data = npgp.datasets.RegressionSplit(X, y, X, y, np.zeros(2), np.ones(2), 0.0, 1.0)
    groups = npgp.median_split(X, 8)
    args = study.parse(["--iterations", "15"])
    start = collapsed_fits.start_at(X, 4, seed=0)
    assert np.exp(start[:4]) == pytest.approx([np.sqrt(2.0), np.sqrt(2.0), 1.0, 0.1]) and len(start) == 4 + 4 * 2
    fits = {c: collapsed_fits.fit(data, groups, c, start, args) for c in collapsed_fits.CONDITIONALS}
    for low, high in itertools.pairwise(collapsed_fits.CONDITIONALS):
        # At the place where the looser bound is largest, the tighter one is above it, and climbs from the start.
        value = -float(collapsed_fits.loss_and_slope(fits[low].theta, X, y, groups, high, "matern32")[0])
        assert value > fits[low].bound
    for conditional, fitted in fits.items():
        assert fitted.bound > -float(collapsed_fits.loss_and_slope(start, X, y, groups, conditional, "matern32")[0])
        assert 0 < fitted.iterations <= 15


def test_lbfgs_keeps_logs_within_their_limits():
    low, high = LOG_BOUNDS

    def loss(theta):
        towards = np.array([2.0 * high, 2.0 * low, 2.0 * high])
        return np.sum(np.square(theta - towards)), 2.0 * (theta - towards)

    optimum = lbfgs(loss, np.zeros(3), 50, num_logs=2)
    assert optimum.x == pytest.approx([high, low, 2.0 * high])
    assert optimum.fun == pytest.approx(high**2 + low**2)


def test_scores_are_of_observations():
    y, mean, variance, noise = np.array([0.5, -1.0]), np.array([0.2, -0.4]), np.array([0.3, 0.1]), 0.2
    result = held_out.held_out((mean, variance), noise, y)
    total = np.array([0.5, 0.3])
    assert result["rmse"] == pytest.approx(np.sqrt((0.09 + 0.36) / 2))
    logs = -0.5 * np.log(2 * np.pi * total) - 0.5 * np.array([0.09, 0.36]) / total
    assert result["log_likelihood"] == pytest.approx(np.mean(logs))


def test_times_are_medians_of_rounds_taken_in_turn():
    now, order = [0.0], []
    # Milliseconds of each round, the first of which is not timed; the machine is slow in the second.
    times = {"a": [99.0, 10.0, 40.0, 12.0], "b": [99.0, 15.0, 60.0, 24.0]}

    def call(name):
        now[0] += 1e-3 * times[name][order.count(name)]
        order.append(name)

    calls = {name: lambda name=name: call(name) for name in times}
    measured = collapsed_fits.in_turn(calls, "a", 3, lambda: now[0])
    assert order == ["a", "b"] * 4
    assert measured["a"] == pytest.approx((12.0, 1.0))
    assert measured["b"] == pytest.approx((24.0, 1.5))


def test_spread_is_the_standard_error():
    assert held_out.spread([0.12345]) == "0.123"
    assert held_out.spread([1.0, 2.0, 3.0], 2) == "2.00 ± 0.58"


@pytest.mark.parametrize("arguments", [["nonsense"], ["--rows", "0"], ["--restarts", "-1"]])
def test_arguments_are_checked(study, arguments, capsys):
    with pytest.raises(SystemExit):
        study.parse(arguments)
    assert "error" in capsys.readouterr().err


def test_subsets_keep_the_split(study, data_dir):
    args = study.parse(["--rows", "50"])
    whole, part = npgp.datasets.uci("concrete", 3), collapsed_fits.load("concrete", 3, args)
    assert part.X_train.shape == (50, 8) and part.X_test.shape == (25, 8)
    for kind in ("train", "test"):
        known = {(*x, y) for x, y in zip(getattr(whole, f"X_{kind}"), getattr(whole, f"y_{kind}"), strict=True)}
        taken = {(*x, y) for x, y in zip(getattr(part, f"X_{kind}"), getattr(part, f"y_{kind}"), strict=True)}
        assert taken <= known
    assert collapsed_fits.load("concrete", 3, study.parse(["--rows", "10000"])).X_train.shape == whole.X_train.shape


def assert_numbers(report) -> None:
    """All leaves are text or finite numbers, and there are some."""
    leaves = jax.tree.leaves(report)
    assert leaves and all(isinstance(x, str) or np.isfinite(x) for x in leaves)


@pytest.mark.slow
def test_grouped_and_table1(run, data_dir, tmp_path, capsys):
    report = run("grouped", "table1", "--quick")
    assert_numbers(report)
    assert set(report) == {"grouped", "table1"}
    assert set(report["grouped"]) == {"concrete"} and set(report["table1"]) == {"wine"}
    methods = report["grouped"]["concrete"]["methods"]
    assert set(methods) == {"prior", "tight", "grouped"}
    for figures in methods.values():
        assert figures["rmse"] != figures["rmse_local"] and figures["gradient_ms"][0] > 0
    assert methods["tight"]["gradient_ratio"] == [1.0]
    wine = report["table1"]["wine"]
    assert wine["rmse"] == pytest.approx(wine["rmse_exact"], rel=1e-10)
    assert wine["std_exact"][0] < wine["std"][0]
    printed = capsys.readouterr().out
    assert "concrete: 120 training and 60 test rows, random subsets" in printed
    assert_picture(tmp_path / "regression.png", least=200)


@pytest.mark.slow
def test_snelson_and_steps(run, data_dir):
    report = run("snelson", "steps", "--quick")
    assert_numbers(report)
    assert report["snelson"]["exact"] == pytest.approx(-55.9003, abs=1e-3)
    for title in ("5 points", "5 points and 5 mean-only"):
        assert set(report["snelson"][title]) == {"prior", "tight", "grouped", "full"}
        for figures in report["snelson"][title].values():
            assert figures["first_start"] <= figures["best"] < report["snelson"]["exact"]
    (measured,) = report["steps"]
    assert set(measured["measured"]) == {"prior", "tight", "groups of 16"}
    assert measured["measured"]["tight"]["ratio"] == 1.0
