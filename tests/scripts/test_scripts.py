"""The scripts run from their arguments to their figures: small settings, and what they write."""

import json
import re

import loading
import numpy as np
import pytest
from figures import assert_pictures

FIT = {
    "bound_per_row": float,
    "converged": bool,
    "noise_variance": float,
    "nn_errors": int,
    "relevant_dims": int,
    "seconds": float,
}
HYPERPARAMETERS = {"bound": float, "lengthscale": float, "variance": float, "noise_variance": float}
OIL_FLOW = {"data": str, "n_rows": int, "latent_dim": int, "inducing": int}
TINY = ["--rows", "40", "--steps", "20", "--inducing", "5", "--latent-dim", "3"]


@pytest.fixture
def run(tmp_path):
    """Runs a script's main with arguments; its report, as returned and as read from the file it wrote."""

    def run(name: str, *args: str) -> dict:
        module = loading.script(name)
        path = tmp_path / "figures" / "report.json"
        report = module.main([*args, "--out", str(tmp_path), "--json", str(path)])
        assert json.loads(path.read_text()) == report
        return report

    return run


def assert_schema(value, schema) -> None:
    """``value`` has exactly the keys and types of ``schema``, and no number is NaN or infinite."""
    if isinstance(schema, dict):
        assert set(value) == set(schema)
        for key in schema:
            assert_schema(value[key], schema[key])
    else:
        assert type(value) is schema
        assert schema is str or np.isfinite(value)


def test_first_model_finds_the_effect_and_draws_it(tmp_path, capsys):
    loading.script("first_model").main(["--out", str(tmp_path)])
    assert_pictures(tmp_path, "first_model.png", least=200)
    mean, sd = map(float, re.match(r"the effect of the dose is (\S+) ± (\S+)\n", capsys.readouterr().out).groups())
    assert 0.0 < sd < 0.1 and abs(mean - 0.7) < 3.0 * sd


@pytest.mark.slow
def test_oil_flow_compares_the_conditionals(run, tmp_path, capsys):
    report = run("oil_flow", *TINY)
    assert_schema(report, {**OIL_FLOW, "gain": float, "prior": FIT, "tight": FIT})
    assert [report[key] for key in OIL_FLOW] == ["simulated", 40, 3, 5]
    for name in ("prior", "tight"):
        assert 0 <= report[name]["nn_errors"] <= 40
        assert 1 <= report[name]["relevant_dims"] <= 3
        assert report[name]["noise_variance"] > 0
    pictures = ["elbo.png", "relevance.png", "reconstruction.png", "latent_prior.png", "latent_tight.png"]
    assert_pictures(tmp_path, *pictures, least=200)
    printed = capsys.readouterr().out
    assert report["gain"] > 0 and f"{report['gain']:+.3f} nats per row" in printed
    assert all(f"wrote {tmp_path / name}" in printed for name in pictures)


@pytest.mark.slow
def test_oil_flow_in_single_precision(run, tmp_path):
    report = run("oil_flow", *TINY, "--conditional", "tight", "--float32")
    assert_schema(report, {**OIL_FLOW, "tight": FIT})
    assert_pictures(tmp_path, "elbo.png", "relevance.png", "reconstruction.png", "latent_tight.png", least=200)


@pytest.mark.slow
def test_snelson_reaches_the_published_optima(run, data_dir, tmp_path):
    report = run("snelson", "--steps", "50")
    both = {"prior": HYPERPARAMETERS, "tight": HYPERPARAMETERS}
    assert_schema(report, {"exact": {"log_evidence": float}, "collapsed": both, "svi": both})
    # Bui, Ashman & Turner 2025 publish these local optima.
    assert report["collapsed"]["prior"]["bound"] == pytest.approx(-111.7829, abs=1e-3)
    assert report["collapsed"]["tight"]["bound"] == pytest.approx(-105.0634, abs=1e-3)
    assert all(report["svi"][name]["bound"] < report["exact"]["log_evidence"] for name in both)
    assert_pictures(tmp_path, "snelson.png", least=200)


@pytest.mark.slow
def test_step_function_is_drawn(tmp_path):
    found = loading.script("step_function").main(["--steps", "20", "--out", str(tmp_path)])
    assert set(found) == {"one layer", "two layers"} and np.all(np.isfinite(list(found.values())))
    assert_pictures(tmp_path, "step_function.png", least=200)
