"""The study of guides that follow other sites: does it run, is its map the notebook's, and does it count right?"""

import re
from pathlib import Path

import loading
import numpy as np
import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "03-gp-in-a-hierarchical-model.py"


@pytest.mark.slow
def test_coupling_runs(monkeypatch, tmp_path, capsys):
    report = loading.quick_report(monkeypatch, tmp_path, "coupling", "--nuts", "24")
    assert [(fit["guide"], fit["dependence"]) for fit in report["fits"]] == [
        ("AutoMultivariateNormal", "independent"),
        ("AutoMultivariateNormal", "pseudo-data"),
    ]
    for fit in report["fits"]:
        assert np.isfinite(fit["elbo"]) and fit["error"] > 0
        assert 0 <= fit["inside"] <= 13 and min(fit["seconds"]) > 0
        assert all(width > 0 for widths in fit["sd"].values() for width in widths) and len(fit["sd"]["effect"]) == 8
    assert "| AutoMultivariateNormal | pseudo-data" in capsys.readouterr().out


def test_the_map_is_that_of_notebook_03():
    """The notebook's cell of data, run as it is."""
    cell = re.search(r"^rng = np\.random.*?^y = rng\.poisson[^\n]*$", NOTEBOOK.read_text(), re.M | re.S)
    names = {"np": np, "SMALL": False}
    exec(cell.group(), names)
    inputs, y, truth = loading.script("coupling").simulate(300)
    for value, name in zip((*inputs, y), ("S", "region", "x", "exposure", "y"), strict=True):
        np.testing.assert_allclose(value, names[name], rtol=1e-10)
    np.testing.assert_allclose(truth["effect"], names["truth"]["effect"], rtol=1e-10)


@pytest.mark.parametrize("draws", [(), (4,)])
def test_quantities_are_in_one_order(draws):
    coupling = loading.script("coupling")
    values = {"beta": [0.0, 1.0], "level": 2.0, "spread": 3.0, "amplitude": 4.0, "effect": np.arange(5.0, 13.0)}
    values = {name: np.broadcast_to(value, (*draws, *np.shape(value))) for name, value in values.items()}
    np.testing.assert_array_equal(coupling.flat(values, *draws), np.broadcast_to(np.arange(13.0), (*draws, 13)))
