"""``scripts/studies/regression/kin40k.py`` from its arguments to its figures, and the pieces it judges fits by."""

import json

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from figures import assert_finite, assert_picture
from loading import script

import npgp
from studies import shared


@pytest.fixture
def kin40k():
    """The script as a module, in the single precision that it sets for the process."""
    return script("kin40k")


@pytest.mark.slow
def test_quick_run(kin40k, data_dir, tmp_path, capsys):
    path = tmp_path / "figures" / "report.json"
    report = kin40k.main(["--quick", "--out", str(tmp_path), "--json", str(path)])
    assert json.loads(path.read_text()) == report
    assert_finite(report)

    (fit,) = report["fits"]
    curve = fit["curve"]
    assert curve["step"][-1] == report["steps"]
    assert (fit["structure"], fit["conditional"], fit["blocks"]) == ("union", "grouped", [16])
    # From −10 to −2 or so; and the exact ELBO at the end is about what the last batches said.
    assert fit["elbo_per_row"] > curve["elbo_per_row"][0] + 2.0
    assert fit["elbo_per_row"] == pytest.approx(np.mean(curve["elbo_per_row"][-5:]), abs=0.5)
    # The best q at the same hyperparameters is no worse; this fit is 'grouped' itself.
    assert fit["elbo_per_row"] <= fit["best_elbo_per_row"] + 1e-4
    assert fit["best_elbo_per_row"] == fit["best_grouped_elbo_per_row"]
    # Better than predicting zero for a target of variance one.
    assert 0.0 < fit["rmse_local"] < 1.0
    assert max(fit["jitter"]) < 1e-4
    (row,) = report["summary"]
    assert row["rmse"] == fit["rmse"] and row["rmse_error"] is None

    assert_picture(tmp_path / "kin40k_elbo.png")
    printed = capsys.readouterr().out
    assert f"{fit['log_likelihood_local']:.4f}" in printed
    assert f"wrote {tmp_path / 'kin40k_elbo.png'}" in printed


def test_elbo_in_chunks_is_the_elbo_of_all_rows(kin40k, monkeypatch):
    """Also when groups have empty places and the last chunk is filled up."""
    monkeypatch.setattr("studies.regression.layouts.CHUNK", 18)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(53, 2)).astype(np.float32), rng.normal(size=53).astype(np.float32)
    split = kin40k.Split(0, X, y, X, y)
    groups = npgp.median_split(X, 5)  # 16, of 3 and 4 rows
    layout = kin40k.Layout.of(split, "grouped", groups, batch_size=12)
    assert (layout.batch_size, layout.group_size, layout.places) == (16, 4, 64)
    assert layout.chunks()[2].shape == (4, 16) and layout.chunks()[2].sum() == 53

    kinds = ("dense", "dense")
    params = {"lengthscale": np.float32([0.8, 1.3]), "variance": 1.2, "noise_variance": 0.3}
    params |= {"inducing0": X[:6], "inducing1": X[6:10]}
    model = kin40k.regression_model(params, kinds, "grouped", layout.group_size)

    @jax.jit
    def best():
        gp = kin40k.component(params, kinds)
        collapsed = npgp.CollapsedGP(gp.kernel, X, gp.inducing, noise_variance=0.3, conditional=npgp.Grouped(groups))
        return gp.params(collapsed.condition(y).q), collapsed.log_prob(y)

    # At the best q, ELBO and collapsed bound are the same number by two ways of computing it.
    q, bound = best()
    elbo = kin40k.elbo_of_chunks(model, npgp.AutoSparseGP(model))({**params, **q}, layout.chunks())
    assert elbo == pytest.approx(float(bound), abs=2e-3)


def test_scores(kin40k):
    rng = np.random.default_rng(1)
    y, mean, variance = rng.normal(size=7), rng.normal(size=7), rng.uniform(0.5, 2.0, 7)
    scores = kin40k.scores(mean, variance, y)
    assert scores["rmse"] == pytest.approx(np.linalg.norm(y - mean) / np.sqrt(7))
    expected = np.mean(dist.Normal(mean, np.sqrt(variance)).log_prob(y))
    assert scores["log_likelihood"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("steps", [7, 250])
def test_curve_averages_every_step_once(kin40k, steps):
    trace = np.random.default_rng(2).normal(size=steps)
    curve = kin40k.curve(trace)
    lengths = np.diff([0, *curve["step"]])
    assert curve["step"][-1] == steps and len(lengths) <= kin40k.CURVE_POINTS
    assert lengths @ np.asarray(curve["elbo_per_row"]) == pytest.approx(np.sum(trace))


def test_numbers_that_are_not_finite_stop_the_run(kin40k):
    fit = dict.fromkeys((*kin40k.BOUNDS, *kin40k.METRICS), 0.0)
    fit |= {"structure": "SVGP", "conditional": "tight", "jitter": [1e-5], "curve": {"elbo_per_row": [-1.0]}}
    kin40k.require_finite(fit, {"variance": 1.0})
    with pytest.raises(FloatingPointError, match="SVGP, tight: not finite are inducing0, rmse"):
        kin40k.require_finite({**fit, "rmse": np.nan}, {"inducing0": np.array([0.0, np.inf])})


def test_mean_and_standard_error():
    mean, error = shared.moments([1.0, 2.0, 6.0])
    assert mean == 3.0
    assert error == pytest.approx(np.sqrt(7.0) / np.sqrt(3.0))
    assert shared.moments([1.0]) == (1.0, None)


def test_wrong_number_of_points(kin40k, capsys):
    with pytest.raises(SystemExit):
        kin40k.parse(["--inducing", "30"])
    assert "multiples of 4" in capsys.readouterr().err
