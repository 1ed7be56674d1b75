"""oil_reconstruction.py: splits and errors against their definitions, and that it runs."""

import json

import loading
import numpy as np
import pytest
from figures import assert_picture
from scipy import stats

TINY = ["--rows", "24", "--test-rows", "4", "--inducing", "4", "--latent-dim", "2", "--batch-size", "10"]
TINY += ["--steps", "3", "--guides", "gaussian", "amortised", "--missing", "0.3"]


@pytest.fixture
def study():
    """The script as a module."""
    return loading.script("oil_reconstruction")


def test_rows_are_the_same_and_missing_entries_nested_for_all_shares(study):
    Y = np.random.default_rng(0).normal(size=(40, 12))
    complete, some, many = (study.split(Y, 10, share, seed=3) for share in (0.0, 0.2, 0.5))
    for a, b, c in zip(complete, some, many, strict=True):
        assert a.present.all() and a.mask is None
        np.testing.assert_array_equal(a.complete, c.complete)
        assert np.all(b.present >= c.present)
        np.testing.assert_array_equal(np.isnan(c.seen), ~c.present)
        assert abs(np.mean(c.present) - 0.5) < 4 * 0.5 / np.sqrt(c.present.size)
    train, test = complete
    assert train.complete.shape == (30, 12) and test.complete.shape == (10, 12)
    rows = np.concatenate([train.complete, test.complete])
    np.testing.assert_array_equal(rows[np.argsort(rows[:, 0])], Y[np.argsort(Y[:, 0])])
    assert not np.array_equal(study.split(Y, 10, 0.0, seed=4)[1].complete, test.complete)


def test_errors_are_of_seen_and_missing_entries_apart(study):
    rng = np.random.default_rng(1)
    truth, mean, variance = rng.normal(size=(50, 3)), rng.normal(size=(50, 3)), rng.uniform(0.1, 2.0, size=(50, 3))
    present = rng.uniform(size=truth.shape) < 0.6
    found = study.errors(study.Part(truth, present), mean, variance, noise=0.3)
    normal = stats.norm(mean, np.sqrt(variance + 0.3))
    assert found["observed_rmse"] ** 2 == pytest.approx(np.sum((truth - mean) ** 2 * present) / present.sum())
    assert found["missing_rmse"] ** 2 == pytest.approx(np.sum((truth - mean) ** 2 * ~present) / (~present).sum())
    assert found["missing_nlpd"] == pytest.approx(-np.mean(normal.logpdf(truth)[~present]))
    inside = (normal.ppf(0.05) < truth) & (truth < normal.ppf(0.95))
    assert found["missing_coverage"] == pytest.approx(np.mean(inside[~present]))
    assert study.errors(study.Part(truth, np.ones_like(present)), mean, variance, 0.3)["missing_rmse"] is None


@pytest.mark.slow
def test_small_run(study, tmp_path, monkeypatch, capsys):
    path = tmp_path / "figures" / "report.json"
    arguments = [*TINY, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    report = study.main([*arguments, "--json", str(path)])
    assert json.loads(path.read_text()) == report
    runs = report["runs"]["0.3"]
    assert list(runs) == ["gaussian", "amortised"] and "encoded" in runs["amortised"][0]
    for (figures,) in runs.values():
        for kind in {"train", "inferred", "encoded"} & set(figures):
            assert all(0 < figures[kind][key] < 2 for key in ("observed_rmse", "missing_rmse"))
        assert np.isfinite([figures["elbo_per_row"], figures["test_bound"]]).all()
    printed = capsys.readouterr().out
    assert "30% of the entries missing" in printed and "amortised, latents inferred" in printed and "nan" not in printed
    assert_picture(tmp_path / "oil_reconstruction.png", least=300)

    # Runs are kept, and not used for other settings.
    def refuse(*args, **kwargs):
        raise RuntimeError("trains")

    monkeypatch.setattr(study.npgp, "fit", refuse)
    assert study.main(arguments) == report
    with pytest.raises(RuntimeError, match="trains"):
        study.main([*arguments, "--noise-start", "0.1"])
