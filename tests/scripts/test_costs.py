"""Variants of training steps are timed, and are what they are said to be."""

import json
import os
import re
import subprocess
import sys

import jax
import loading
import numpy as np
import oracles
import pytest


@pytest.fixture
def costs():
    return loading.script("costs", "benchmarks")


@pytest.mark.parametrize("name", ["nngp", "files"])
def test_a_cost_is_measured(costs, name, tmp_path, capsys):
    path = tmp_path / "costs.json"
    records = costs.main([name, "--quick", "--json", str(path)])
    assert json.loads(path.read_text()) == records and len(records) >= 2
    printed = capsys.readouterr().out
    assert all(0.0 < r["ratio"][1] < np.inf and r["variant"] in printed for r in records)
    assert all(r["ratio"] == [1.0, 1.0, 1.0] for r in records if r["variant"] == records[0]["variant"])


def test_the_default_dependence_begins_with_the_best_q_of_functions(costs, monkeypatch):
    """With Gaussian noise the default's q(ε) is the posterior given the draw of all else, before any step."""
    made = []
    monkeypatch.setattr(costs, "stepper", lambda svi, arrays, now: made.append((svi, arrays)))
    title, calls = next(costs.dependence(costs.parse(["dependence", "--rows", "30"])))
    assert title == "1 function, 30 rows, M = 20" and list(calls) == ["independent", "default", "pseudo-data"]
    losses = []
    for svi, arrays in made:
        first = jax.jit(lambda svi=svi, arrays=arrays: svi.evaluate(svi.init(jax.random.key(0), *arrays), *arrays))
        losses.append(float(first()))
    independent, default, pseudo_data = losses
    assert default < min(independent, pseudo_data) - 10.0


def test_a_stepper_goes_on_where_it_was(costs):
    """And says the seconds of one step."""
    model, arrays = costs.of_groups(2, times=3, inducing=2)
    guide = costs.npgp.AutoSparseGP(model)
    svi = costs.SVI(model, guide, costs.npgp.adam(0.01), costs.TraceMeanField_ELBO())
    ticks = iter([0.0, 6.0, 7.0, 9.0])
    advance = costs.stepper(svi, arrays, lambda: next(ticks))
    assert (advance(3), advance(1)) == (2.0, 2.0)


def test_the_density_of_sites_with_all_neighbors_is_the_gps(costs):
    with jax.enable_x64(False):
        _, calls = next(costs.nngp(costs.parse(["nngp", "--rows", "16"])))
        density = float(calls["density"]())
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(16, 2)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    expected = oracles.log_normal(y, oracles.stationary("Matern32", X, X, 0.05, 1.0) + 0.1 * np.eye(16))
    assert density == pytest.approx(expected, rel=1e-4)


def test_whole_tables_and_rows_of_the_batch_have_the_same_loss(costs):
    fits = [costs.vnngp_rows(40, 10, lazy) for lazy in (False, True)]
    for fit in fits:
        fit.advance(1)
    assert fits[0].result.losses[-1] == pytest.approx(fits[1].result.losses[-1], rel=1e-5)


@pytest.mark.slow
def test_devices_share_the_work_of_a_step(tmp_path):
    """In a process of its own, as it sets the number of devices."""
    settings = "--devices 1 4 --inducing 16 --batch-size 256 --repetitions 1".split()
    command = [sys.executable, str(loading.path("costs", "benchmarks")), "devices", *settings]
    environment = os.environ | {"PYTHONPATH": str(loading.SCRIPTS.parent)}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    words = r"(\d) devices: work (\S+), efficiency (\S+), parameters apart (\S+)"
    one, four = (tuple(map(float, found)) for found in re.findall(words, said))
    assert one == (1.0, 1.0, 1.0, 0.0)
    # The rows' work is in four parts, and not all of it is the rows'.
    assert four[0] == 4 and 0.25 < four[1] < 0.5 and four[3] < 1e-10
