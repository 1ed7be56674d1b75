"""``compare.py``: figures against dense algebra, and that it runs."""

import json

import jax
import numpy as np
import oracles
import pytest
from figures import assert_picture
from loading import script

import npgp

pytest.importorskip("sklearn")


@pytest.fixture
def compare():
    return script("compare")


ROWS = 100


@pytest.fixture
def table(tmp_path):
    """A CSV file with a heading and two columns of unlike scales; ninety rows are for training."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(ROWS, 2)) * [1.0, 20.0]
    y = 3.0 + 5.0 * (np.sin(4.0 * X[:, 0]) + np.cos(0.2 * X[:, 1])) + 0.5 * rng.normal(size=ROWS)
    path = tmp_path / "table.csv"
    np.savetxt(path, np.column_stack([X, y]), delimiter=",", header="a,b,target", comments="")
    return path


def dense(name, data, fit):
    """By dense algebra at a fit's parameters: value per row, predictive mean and variance, and the exact evidence."""
    lengthscale, variance, noise = (np.exp(fit.params[key]) for key in ("lengthscale", "variance", "noise"))

    def kernel(X, X2):
        return oracles.stationary("Matern32", X, X2, lengthscale, variance)

    rows = len(data.y)
    K, there = kernel(data.X, data.X), kernel(data.X_test, data.X)
    Q, Q_there, noises = K, there, np.full(rows, noise)
    if name in ("sgpr", "fitc"):
        Z = np.asarray(fit.params["inducing"])
        solved = np.linalg.solve(kernel(Z, Z) + 1e-8 * variance * np.eye(len(Z)), kernel(Z, data.X))
        Q, Q_there = kernel(data.X, Z) @ solved, kernel(data.X_test, Z) @ solved
    if name == "fitc":
        noises = noises + np.diag(K - Q)
    C = Q + np.diag(noises)
    value = oracles.log_normal(data.y, C) - (0.5 * np.trace(K - Q) / noise if name == "sgpr" else 0.0)
    mean = Q_there @ np.linalg.solve(C, data.y)
    spread = variance + noise - np.sum(Q_there * np.linalg.solve(C, Q_there.T).T, axis=1)
    return value / rows, mean, spread, oracles.log_normal(data.y, K + noise * np.eye(rows)) / rows


@pytest.mark.slow  # to compile
def test_all_methods_on_a_table(compare, table, tmp_path, monkeypatch, capsys):
    fits = {}

    def fit_one(name, data, args):
        fits[name] = (data, *real(name, data, args))
        return fits[name][1], fits[name][2]

    real = compare.fit_one
    monkeypatch.setattr(compare, "fit_one", fit_one)
    settings = f"--steps 12 --inducing 8 --neighbors {ROWS} --batch-size 30 --out".split()
    path = tmp_path / "figures" / "report.json"
    report = compare.main([str(table), *settings, str(tmp_path / "f.png"), "--json", str(path)])
    assert json.loads(path.read_text()) == report
    assert set(report["methods"]) == set(compare.METHODS) and not report["skipped"]

    for name, (data, figures, fit) in fits.items():
        assert data.X.shape == (90, 2) and data.X_test.shape == (10, 2)
        np.testing.assert_allclose([data.X.mean(0), data.X.std(0)], [np.zeros(2), np.ones(2)], atol=1e-12)
        value, mean, variance, evidence = dense(name, data, fit)
        assert figures["evaluations"] >= 10 and figures["fit_seconds"] > 0.0
        if compare.METHODS[name].value == "lower bound":
            assert figures["value_per_row"] < evidence
        if name in ("exact", "sgpr", "fitc", "nngp"):  # all sites are neighbors, so that the NNGP is exact
            error = data.y_test - mean
            nlpd = 0.5 * np.mean(np.log(2 * np.pi * variance) + error**2 / variance)
            assert figures["value_per_row"] == pytest.approx(value, abs=1e-5)
            assert figures["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), abs=1e-5)
            assert figures["nlpd"] == pytest.approx(nlpd, abs=1e-4)
    values = {name: figures["value_per_row"] for name, figures in report["methods"].items()}
    assert max(values["sgpr"], values["solve"]) < values["exact"]
    assert max(figures["rmse"] for figures in report["methods"].values()) < 0.9  # 1 is that of the mean

    assert_picture(tmp_path / "f.png")
    printed = capsys.readouterr().out
    assert "90 training rows, 2 columns, 10 test rows" in printed
    for name, method in compare.METHODS.items():
        assert f"{values[name]:.4f}" in printed and f"{method.title}: {method.advice[:20]}" in printed


@pytest.mark.parametrize("name, kernel", [("matern32", "Matern32"), ("rbf", "RBF")])
def test_hilbert_space_functions_make_the_kernel(compare, name, kernel, float64):
    """NumPyro's functions and spectra, as they are used here: with many functions it is the GP."""
    rng = np.random.default_rng(0)
    X, X_test = rng.uniform(-1.0, 1.0, (2, 12, 1))
    y = rng.normal(size=12)
    data = compare.Data(X, y, X_test, y)
    args = compare.parse(["spatial", "--inducing", "300", "--kernel", name])
    params = {"lengthscale": np.log([0.3]), "variance": np.log(1.7), "noise": np.log(0.2)}
    fixed = compare.prepare("hsgp", data, params, args)

    @jax.jit
    def run(params, fixed):
        model = compare.model_of("hsgp", params, X, fixed, name)
        return model.log_prob(y), model.predict(y, X_test)

    density, found = run(params, fixed)
    C = oracles.stationary(kernel, X, X, 0.3, 1.7)
    there, prior = oracles.stationary(kernel, X_test, X, 0.3, 1.7), oracles.stationary(kernel, X_test, X_test, 0.3, 1.7)
    mean, covariance = oracles.gp_posterior(C, there, prior, y, np.full(12, 0.2))
    assert density == pytest.approx(oracles.log_normal(y, C + 0.2 * np.eye(12)), abs=0.02)
    np.testing.assert_allclose(found[0], mean, atol=0.01)
    np.testing.assert_allclose(found[1], np.diag(covariance), atol=0.01)


def test_the_simulated_function_has_the_covariance_it_says(compare):
    """Of pairs of sites near one another: the mean of products, less the noise."""
    X, y = compare.simulate(4000, 0.1, seed=0)
    assert X.min() >= 0.0 and X.max() <= 1.0
    neighbors = npgp.neighbors.nearest_before(X, 1, ordering="random", rng_key=jax.random.key(0))
    i = np.flatnonzero(neighbors.mask[:, 0])
    j = neighbors.rows[i, 0]
    distance = np.linalg.norm(X[i] - X[j], axis=1)
    near = distance < 0.02
    expected = np.mean(oracles.CORRELATION["Matern32"](distance[near] / 0.1))
    f_variance = np.var(y) - 0.1
    assert np.var(y[i][near] - y[j][near]) / 2 == pytest.approx(0.1 + 1.0 - expected, rel=0.1)
    assert f_variance == pytest.approx(1.0, abs=0.3)  # a square of ten lengthscales is one draw


def test_methods_that_do_not_suit_the_data_are_left_out(compare):
    big, wide = (compare.Data(np.zeros(shape), np.zeros(shape[0]), None, None) for shape in ((5000, 2), (50, 8)))

    def left_out(data, *settings):
        args = compare.parse(["spatial", *settings])
        return {name for name in compare.METHODS if compare.reason_against(name, data, args)}

    assert left_out(big) == {"exact"}
    assert left_out(wide) == {"svgp", "vnngp", "hsgp"}
    # Asked for by name, all but what cannot be.
    assert left_out(big, "--methods", "exact") == set()
    assert left_out(wide, "--methods", *compare.METHODS) == {"hsgp"}


def test_the_frontier_is_of_methods_that_nothing_beats(compare):
    figures = {"a": (3.0, 0.1), "b": (1.0, 0.9), "c": (2.0, 0.95), "d": (2.5, 0.5), "e": (9.0, 0.2)}
    figures = {name: {"fit_seconds": seconds, "nlpd": nlpd} for name, (seconds, nlpd) in figures.items()}
    assert compare.frontier(figures, "nlpd") == ["b", "d", "a"]


def test_lbfgs_ends_in_time_with_the_best_it_saw(compare, float64):
    now = iter(np.arange(100.0))
    seen = []

    def value(params):
        return float(np.sum((params["a"] - 3.0) ** 2) + 50.0 * np.sum(params["inducing"] ** 4))

    def loss(params):
        seen.append(value(params))
        return seen[-1], {"a": 2.0 * (params["a"] - 3.0), "inducing": 200.0 * params["inducing"] ** 3}

    start = {"a": jax.numpy.zeros(2), "inducing": jax.numpy.ones(3)}
    params, count = compare.lbfgs(loss, start, 4.5, 1000, lambda: next(now))
    assert count == 5 and len(seen) == count + 1  # and the one before the clock started
    assert value(params) == pytest.approx(min(seen)) and min(seen) < seen[0]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["spatial", "--inducing", "7"], "--inducing must be even"),
        (["spatial", "--rows", "0"], "positive"),
        (["spatial", "--budget", "-1"], "must be positive"),
        (["nonsense"], "DATA is 'nonsense'; it must be snelson, spatial, a name"),
    ],
)
def test_bad_arguments_are_refused(compare, arguments, words, capsys):
    with pytest.raises(SystemExit) as refusal:
        compare.load(compare.parse(arguments))
    assert words in str(refusal.value) + capsys.readouterr().err


def test_npz_files_and_subsets(compare, tmp_path):
    X, y = np.arange(80.0).reshape(40, 2), np.arange(40)
    np.savez(tmp_path / "a.npz", X=X, y=y, names=np.array(["u", "v"]))
    data = compare.load(compare.parse([str(tmp_path / "a.npz"), "--rows", "20"]))
    assert data.X.shape == (20, 2) and data.y_test.shape == (4,)
    np.testing.assert_allclose(data.X[:, 0], data.y, atol=1e-12)  # rows stay together, all standardized alike
    np.testing.assert_allclose(data.X_test[:, 0], data.y_test, atol=1e-12)
    np.savez(tmp_path / "b.npz", X=X, y=y[1:])
    with pytest.raises(SystemExit, match=r"b.npz has no X of shape \(rows, columns\) and y of shape \(rows,\)"):
        compare.load(compare.parse([str(tmp_path / "b.npz")]))
