"""The scripts run from their arguments to their figures: small settings, and what they write."""

import json
import re

import loading
import numpy as np
import pytest
from figures import assert_pictures

BOTH = {"classical": float, "tight": float}
OIL_FLOW = {
    "data": str,
    "n_rows": int,
    "latent_dim": int,
    "inducing": int,
    "converged": bool,
    "there": BOTH,
    "on": BOTH,
}
OIL_FLOW |= {"gain": float, "gain_of_rows": float, "nn_errors": int, "relevant_dims": int}
OIL_FLOW |= {"imputed_rmse": float, "column_means_rmse": float, "imputed_inside": float}
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
def test_oil_flow_compares_the_bounds_at_one_place(run, tmp_path, capsys):
    report = run("oil_flow", *TINY)
    assert_schema(report, OIL_FLOW)
    assert [report[key] for key in ("data", "n_rows", "latent_dim", "inducing")] == ["simulated", 40, 3, 5]
    there, on = report["there"], report["on"]
    assert there["classical"] < there["tight"] and all(on[name] >= there[name] for name in on)
    # The rows' gains are in closed form, and the difference of the two bounds is their sum.
    assert report["gain"] == pytest.approx(40 * (there["tight"] - there["classical"]))
    assert report["gain_of_rows"] == pytest.approx(report["gain"], rel=1e-5)
    assert 0 <= report["nn_errors"] <= 40 and 1 <= report["relevant_dims"] <= 3
    pictures = [f"{name}.png" for name in ("bounds", "gain", "latent", "relevance", "reconstruction", "imputed")]
    assert_pictures(tmp_path, *pictures, least=200)
    printed = capsys.readouterr().out
    assert f"the tight bound is {report['gain']:.1f} nats above" in printed
    assert all(f"wrote {tmp_path / name}" in printed for name in pictures)


def test_layers_are_those_that_were_simulated():
    """Without noise, from the shares: the water's edge lies where the disc's part below has their area."""
    module = loading.script("oil_flow")
    data = module.datasets.simulate_oil_flow(module.jax.random.key(3), 60, counts=None)
    stratified = data.labels == 2
    water, both = data.fractions[stratified, 0], data.fractions[stratified].sum(1)
    heights = np.linspace(-1.0, 1.0, 20001)
    below = 0.5 + (heights * np.sqrt(1.0 - heights**2) + np.arcsin(heights)) / np.pi  # shares of the area
    edges = np.interp([water, both], below, heights)
    beams = np.array([-0.5, 0.0, 0.5])[:, None]
    expected = np.where(beams < edges[0], "W", np.where(beams < edges[1], "O", "G"))
    assert list(module.layers(data.Y)[stratified]) == ["".join(row) for row in expected.T]


@pytest.mark.slow
def test_step_function_is_drawn(tmp_path):
    found = loading.script("step_function").main(["--steps", "20", "--out", str(tmp_path)])
    assert set(found) == {"one layer", "two layers"} and np.all(np.isfinite(list(found.values())))
    assert_pictures(tmp_path, "step_function.png", least=200)
