"""The comparison of approximations on one set: figures against dense algebra, files, and what is left out."""

import jax
import loading
import numpy as np
import oracles
import pytest

import npgp

loading.path("study")  # puts the scripts on the path
from studies import approximations, fits, runner  # noqa: E402

STUDY = approximations.STUDIES["approximations"]
ROWS = 100


def arguments(*argv):
    return runner.parse("approximations", STUDY, argv)


@pytest.fixture
def table(tmp_path):
    """A CSV file with a heading and two columns of unlike scales; ninety rows are for training."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(ROWS, 2)) * [1.0, 20.0]
    y = 3.0 + 5.0 * (np.sin(4.0 * X[:, 0]) + np.cos(0.2 * X[:, 1])) + 0.5 * rng.normal(size=ROWS)
    path = tmp_path / "table.csv"
    np.savetxt(path, np.column_stack([X, y]), delimiter=",", header="a,b,target", comments="")
    return str(path)


def dense(method, data, theta):
    """By dense algebra at a fit's parameters: value per row, predictive mean and variance."""
    (X, y), D = (data.X_train, data.y_train), data.X_train.shape[1]
    lengthscale, (variance, noise) = np.exp(theta[:D]), np.exp(theta[D : D + 2])

    def kernel(X, X2):
        return oracles.stationary("Matern32", X, X2, lengthscale, variance)

    K, there, noises = kernel(X, X), kernel(data.X_test, X), np.full(len(y), noise)
    Q = K
    if method in ("sgpr", "fitc"):
        Z = theta[D + 2 :].reshape(-1, D)
        solved = np.linalg.solve(kernel(Z, Z) + 1e-8 * variance * np.eye(len(Z)), kernel(Z, X))
        Q, there = kernel(X, Z) @ solved, kernel(data.X_test, Z) @ solved
    if method == "fitc":
        noises = noises + np.diag(K - Q)
    C = Q + np.diag(noises)
    value = oracles.log_normal(y, C) - (0.5 * np.trace(K - Q) / noise if method == "sgpr" else 0.0)
    spread = variance + noise - np.sum(there * np.linalg.solve(C, there.T).T, axis=1)
    return value / len(y), there @ np.linalg.solve(C, y), spread


@pytest.mark.slow  # to compile
def test_methods_on_a_table(table, monkeypatch, float64):
    ends, real = [], fits.fit_collapsed

    def kept(*given):
        ends.append(real(*given))
        return ends[-1]

    monkeypatch.setattr(approximations, "fit_collapsed", kept)
    args = arguments("--sets", table, "--iterations", "12", "--inducing", "8", "--neighbors", str(ROWS))
    args.batch_size, args.quick, values = 30, True, {}  # quick: no more steps of minibatches than iterations
    for method in ("exact", "sgpr", "fitc", "nngp", "solve"):  # of the others the study itself is run
        found = approximations.approximation(args, table, 0, method)
        assert found["evaluations"] >= 10 and found["rmse"] < 0.9  # 1 is that of the mean
        values[method] = found["value"]
        if method in ("exact", "sgpr", "fitc", "nngp"):  # all sites are neighbors, so that the NNGP is exact
            data = approximations.load(table, 0, None, args.lengthscale)
            assert data.X_train.shape == (90, 2) and data.X_test.shape == (10, 2)
            value, mean, variance = dense(method, data, ends[-1].theta)
            error = data.y_test - mean
            assert found["value"] == pytest.approx(value, abs=1e-4)
            assert found["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), abs=1e-4)
            nlpd = 0.5 * np.mean(np.log(2 * np.pi * variance) + error**2 / variance)
            assert found["nlpd"] == pytest.approx(nlpd, abs=1e-3)
    assert max(values["sgpr"], values["solve"]) < values["exact"]


def test_the_simulated_function_has_the_covariance_it_says():
    """Of pairs of sites near one another: the mean of products, less the noise."""
    X, y = approximations.simulate(4000, 0.1, seed=0)
    assert X.min() >= 0.0 and X.max() <= 1.0
    neighbors = npgp.neighbors.nearest_before(X, 1, ordering="random", rng_key=jax.random.key(0))
    i = np.flatnonzero(neighbors.mask[:, 0])
    j = neighbors.rows[i, 0]
    distance = np.linalg.norm(X[i] - X[j], axis=1)
    near = distance < 0.02
    expected = np.mean(oracles.CORRELATION["Matern32"](distance[near] / 0.1))
    assert np.var(y[i][near] - y[j][near]) / 2 == pytest.approx(0.1 + 1.0 - expected, rel=0.1)
    assert np.var(y) - 0.1 == pytest.approx(1.0, abs=0.3)  # a square of ten lengthscales is one draw


def test_methods_that_do_not_suit_the_data_are_left_out(table, capsys):
    args = arguments("--exact-rows", "50")
    assert [approximations.approximation(args, table, 0, method) for method in ("exact", "svgp", "vnngp")] == [[]] * 3
    said = capsys.readouterr().out
    assert "90 rows, more than --exact-rows 50" in said and "90 rows need no minibatches of 1024" in said


def test_lbfgs_ends_in_time_with_what_it_has(float64):
    now = iter([False, False, True])
    towards = np.array([1.0, -3.0])

    def loss(theta):
        return np.sum((theta - towards) ** 4), 4.0 * (theta - towards) ** 3

    found = fits.lbfgs(loss, np.zeros(2), 100, until=lambda: next(now))
    assert found.nit == 3 and found.fun < loss(np.zeros(2))[0]


def test_files(tmp_path):
    X, y = np.arange(80.0).reshape(40, 2), np.arange(40)
    np.savez(tmp_path / "a.npz", X=X, y=y, names=np.array(["u", "v"]))
    data = approximations.load(str(tmp_path / "a.npz"), 0, 20, 0.03)
    assert data.X_train.shape == (20, 2) and data.y_test.shape == (4,)
    np.testing.assert_allclose(data.X_train[:, 0], data.y_train, atol=1e-12)  # rows stay together
    np.testing.assert_allclose(data.X_test[:, 0], data.y_test, atol=1e-12)  # and all are standardized alike
    np.savetxt(tmp_path / "c.csv", np.column_stack([X, y]), delimiter=",")
    np.testing.assert_array_equal(approximations.read(tmp_path / "c.csv")[0], X)
    np.savez(tmp_path / "b.npz", X=X, y=y[1:])
    (tmp_path / "d.csv").write_text("a,b\n1,2\n3,x\n")
    for name, words in (("b.npz", "b.npz has no X"), ("d.csv", "d.csv has no X"), ("e", "must be snelson, spatial")):
        with pytest.raises(SystemExit, match=words):
            approximations.read(tmp_path / name)
