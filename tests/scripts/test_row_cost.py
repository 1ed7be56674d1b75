"""The script that measures what a step costs as the data grow: it runs, and both loops train."""

import json

import loading
import numpy as np
import pytest


@pytest.mark.parametrize("model", ["gplvm", "vnngp"])
def test_both_loops_are_timed(model, tmp_path, capsys):
    module = loading.script("row_cost")
    path = tmp_path / "figures" / "row_cost.json"
    sizes = "--columns 2 --latent-dim 2 --inducing 4 --batch-size 10 --repetitions 1 --seconds 0.001".split()
    report = module.main(["--model", model, "--rows", "40", "--neighbors", "3", *sizes, "--json", str(path)])
    assert json.loads(path.read_text()) == report
    figures = report["rows"]["40"]
    assert set(figures) == {"dense", "lazy"} and report["growth"] == 1.0
    assert all(0 < low <= median <= high for median, low, high in figures.values())
    assert np.isclose(report["first_losses"]["40"]["dense"], report["first_losses"]["40"]["lazy"], rtol=1e-5)
    assert "      40 " in capsys.readouterr().out
