"""The regression benchmark: its splits, its ELBO of all rows, what it keeps, and what it compares."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from loading import script

import npgp
from studies.regression import four_methods, minibatch


@pytest.fixture
def benchmark():
    """The script as a module; the precision that its program sets is taken back."""
    return script("regression_benchmark")


def test_splits(benchmark, float64):
    """Random, of equally many rows, standardized by the training rows, and together all rows."""
    splits = [benchmark.load("simulated", number, None) for number in (0, 1)]
    for data in splits:
        assert data.X.shape == (1800, 3) and data.X_test.shape == (200, 3)
        np.testing.assert_allclose(data.X.mean(0), 0.0, atol=1e-12)
        np.testing.assert_allclose([*data.X.std(0), data.y.std()], 1.0)
    # The same rows in another order: ranks of a column do not depend on its scale.
    order = [np.argsort(np.concatenate([data.X_test, data.X])[:, 0]) for data in splits]
    y = [np.concatenate([data.y_test, data.y])[rows] for data, rows in zip(splits, order, strict=True)]
    assert np.corrcoef(y)[0, 1] == pytest.approx(1.0)
    assert not np.array_equal(*order)
    assert len(benchmark.load("simulated", 0, 50).y) == 50


def test_elbo_of_all_rows(benchmark, float64):
    """
    In chunks of which the last is filled up it is the collapsed bound where q is the best; and there, as anywhere, the
    tight conditional's is above the prior's.
    """
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(53, 2)), rng.normal(size=53)
    params = {"lengthscale": np.array([0.8, 1.3]), "variance": jnp.asarray(1.2), "noise_variance": jnp.asarray(0.3)}
    params |= {"inducing0": X[:6], "inducing1": X[6:12]}
    method = minibatch.METHODS["SOLVE-GP"]

    @jax.jit
    def best():
        gp = benchmark.component(params, method.covariances)
        collapsed = npgp.CollapsedGP(
            gp.kernel, X, gp.inducing, noise_variance=0.3, conditional="prior", covariances="dense"
        )
        return gp.params(collapsed.condition(y).q)

    params |= best()
    args = benchmark.parse(["--quick"])
    prior, tight = (
        benchmark.Program(benchmark.make_model(minibatch.METHODS[name], 12, 2), len(y), args, 16).elbo(params, X, y)
        for name in ("SOLVE-GP", "T-SOLVE-GP")
    )
    assert prior == pytest.approx(float(benchmark.best_elbo(params, X, y, method.covariances, "prior")), abs=1e-6)
    assert tight > prior + 1.0


def test_scores(benchmark):
    rng = np.random.default_rng(1)
    y, mean, variance = rng.normal(size=7), rng.normal(size=7), rng.uniform(0.5, 2.0, 7)
    scores = benchmark.scores(mean, variance, y)
    assert scores["rmse"] == pytest.approx(np.linalg.norm(y - mean) / np.sqrt(7))
    expected = np.mean(dist.Normal(mean, np.sqrt(variance)).log_prob(y))
    assert scores["log_likelihood"] == pytest.approx(float(expected), rel=1e-5)


def test_small_run(benchmark, tmp_path, capsys):
    json_path, markdown_path = tmp_path / "fits.json", tmp_path / "report.md"
    markdown_path.write_text(f"Prose.\n\n{four_methods.MARK}\n\nOld figures.\n")
    command = ["--quick", "--methods", "T-SVGP", "--inducing", "8", "--splits", "1", "--out", str(tmp_path)]
    fits = benchmark.main([*command, "--json", str(json_path), "--markdown", str(markdown_path)])
    (record,) = json.loads(json_path.read_text())
    assert fits == {("simulated", 8): {"T-SVGP": {0: record}}}
    assert record["rmse"] < 1.0  # of the target's own spread
    assert record["elbo"] <= record["best_elbo"] + 1e-4
    report = markdown_path.read_text()
    assert report.startswith("Prose.") and "Old figures" not in report
    assert (
        f"| {record['log_likelihood']:.4f} " in report
        and f"| {record['log_likelihood']:.4f} " in capsys.readouterr().out
    )
    assert (tmp_path / "regression.png").stat().st_size > 1000


def test_what_is_done_is_not_done_again(benchmark, monkeypatch, tmp_path):
    """And splits share a program."""
    done, programs = [], []
    monkeypatch.setattr(benchmark, "Program", lambda *args: programs.append(args))
    monkeypatch.setattr(benchmark, "print_fit", lambda *args: None)

    def fit(program, method, data, Z, seed):
        done.append((method.blocks, method.tight, len(Z), seed))
        return {"elbo": -1.0}

    monkeypatch.setattr(benchmark, "fit", fit)
    path = tmp_path / "fits.json"
    command = ["--quick", "--methods", "T-SVGP", "SOLVE-GP", "--inducing", "8", "--json", str(path)]
    benchmark.run(benchmark.parse([*command, "--splits", "1"]))
    assert done == [(1, True, 8, 0), (2, False, 8, 0)] and len(programs) == 2
    del programs[:], done[:]
    benchmark.run(benchmark.parse([*command, "--splits", "3"]))
    assert done == [(1, True, 8, 1), (2, False, 8, 1), (1, True, 8, 2), (2, False, 8, 2)] and len(programs) == 2
    benchmark.run(benchmark.parse([*command, "--splits", "3"]))
    assert len(done) == 4
    benchmark.run(benchmark.parse([*command, "--splits", "1", "--steps", "61"]))  # another setting
    assert len(done) == 6 and len(json.loads(path.read_text())) == 8


def test_records_of_other_settings(benchmark, tmp_path):
    path = tmp_path / "fits.json"
    one, other = (benchmark.Records(path, {"steps": steps}) for steps in (10, 20))
    one.add(set="power", rmse=0.5)
    assert one.find(set="power") and not one.find(set="protein") and not other.find(set="power")
    assert not benchmark.Records(path, {"steps": 20}).find() and len(benchmark.Records(path, {"steps": 10}).find()) == 1
    with pytest.raises(FloatingPointError, match="not finite are elbo"):
        one.add(set="power", elbo=np.nan)


def test_gains(benchmark):
    """A lower error is a gain; splits are paired; and M/2 points in one block are a first block."""
    metrics = {"rmse": benchmark.Metric("RMSE", 2, -1), "elbo": benchmark.Metric("ELBO", 2, 1)}

    def fits(rmse, elbo, step_ms):
        return {i: {"rmse": r, "elbo": elbo, "step_ms": step_ms} for i, r in enumerate(rmse)}

    cells = {
        ("a", 8): {"SVGP": fits([0.9, 0.8], -2.0, 1.0)},
        ("a", 16): {"SVGP": fits([0.5, 0.6], -1.0, 4.0), "SOLVE-GP": fits([0.6, 0.7], -1.5, 3.0)},
    }
    table, counts = four_methods.gains(cells, metrics)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert rows == [
        ["a", "16", "SOLVE-GP over SVGP of M/2", "0.20 ± 0.10", "0.50 ± 0.00", "3.00 ± 0.00"],
        ["a", "16", "SOLVE-GP over SVGP", "-0.10 ± 0.00", "-0.50 ± 0.00", "0.75 ± 0.00"],
    ]
    assert "0 of 1 (clearly: 0, worse: 1)" in counts.splitlines()[-1]


def test_what_cannot_be_asked_for(benchmark, capsys):
    for wrong in (["--inducing", "7"], ["--steps", "1"], ["--full", "--quick"]):
        with pytest.raises(SystemExit):
            benchmark.parse(wrong)
    assert "positive even" in capsys.readouterr().err
    full = benchmark.parse(["--full"])
    assert full.inducing == [256, 512, 1024] and len(full.sets) == 3
