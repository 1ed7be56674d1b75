"""imputation.py: the other ways to impute against what is known of them, and that it runs."""

import json

import loading
import numpy as np
import pytest
from figures import assert_picture
from sklearn.decomposition import PCA

from studies.gplvm import face_imputation, oil_imputation, training

TINY = ["--rows", "30", "--inducing", "4", "--latent-dim", "2", "--batch-size", "10", "--steps", "3"]


@pytest.fixture
def study():
    """The script as a module."""
    return loading.script("imputation")


def test_pca_completes_a_matrix_of_low_rank():
    rng = np.random.default_rng(0)
    truth = 3.0 + rng.normal(size=(60, 2)) @ rng.normal(size=(2, 8))
    gap = rng.uniform(size=truth.shape) < 0.1
    seen = np.where(gap, np.nan, truth)
    filled = oil_imputation.impute_by_pca(seen, 2)
    np.testing.assert_array_equal(filled[~gap], truth[~gap])
    assert training.rmse(filled, truth, gap) < 0.02 * np.std(truth)
    # The rank is chosen by entries that it has not seen.
    assert oil_imputation.best_choice(oil_imputation.impute_by_pca, seen, range(1, 5), seed=0) == 2


def test_halves_are_imputed_by_the_conditional_mean_of_probabilistic_pca():
    rng = np.random.default_rng(1)
    Y = rng.normal(size=(50, 3)) @ rng.normal(size=(3, 10)) + 0.3 * rng.normal(size=(50, 10))
    gap = np.arange(10) % 2 == 0
    pca = PCA(3, svd_solver="full").fit(Y)
    found = face_imputation.impute_by_covariance(pca, Y[:4], gap)
    P = pca.get_precision()
    pull = P[np.ix_(gap, ~gap)] @ (Y[:4] - pca.mean_)[:, ~gap].T
    np.testing.assert_allclose(found, pca.mean_[gap] - np.linalg.solve(P[np.ix_(gap, gap)], pull).T, atol=1e-10)


def test_coverage_of_normal_intervals():
    rng = np.random.default_rng(2)
    scale = rng.uniform(0.5, 2.0, size=(200, 50))
    truth = scale * rng.normal(size=scale.shape)
    where = rng.uniform(size=scale.shape) < 0.5
    assert training.coverage(np.zeros_like(scale), scale, truth, where) == pytest.approx(0.9, abs=4 * 0.3 / 70)


def test_small_run_on_oil(study, tmp_path, monkeypatch, capsys):
    path = tmp_path / "report.json"
    monkeypatch.setattr(oil_imputation, "RANKS", (1, 2))
    monkeypatch.setattr(oil_imputation, "NEIGHBORS", (2, 5))
    arguments = ["oil", *TINY, "--missing", "0.3", "--starts", "1"]
    arguments += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    report = study.main([*arguments, "--json", str(path)])
    assert json.loads(path.read_text()) == report
    (figures,) = report["runs"]["0.3"]
    assert all(0 < figures[how]["rmse"] < 2 for how in ("inferred", "trained", "pca", "nearest", "mean"))
    assert all(0 <= figures[how]["coverage"] <= 1 for how in ("inferred", "trained"))
    assert 0 <= figures["nn_errors"] <= 30 and 1 <= figures["relevant_dims"] <= 2
    assert "nan" not in capsys.readouterr().out
    assert_picture(tmp_path / "imputation_oil.png", least=300)
    monkeypatch.delattr(training.npgp, "fit")  # runs are kept
    assert study.main(arguments) == report


def test_small_run_on_faces(study, tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = ["faces", *TINY, "--new-rows", "3", "--halves", "lower", "--starts", "1", "--out", str(tmp_path)]
    report = study.main([*arguments, "--json", str(path)])
    assert json.loads(path.read_text()) == report
    assert report["n_train"] == 27 and 0 < report["peak_memory_gib"] < 24
    figures = report["halves"]["lower"]
    assert all(0 < figures[how] < 1 for how in ("gplvm", "mean_face", "nearest_face", "pca"))
    printed = capsys.readouterr().out
    assert "peak memory" in printed and "nan" not in printed
    assert_picture(tmp_path / "imputation_faces_lower.png", least=300)
