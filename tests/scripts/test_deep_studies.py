"""The studies of deep and convolutional GPs run from their arguments to their figures, on data that are simulated."""

import json

import loading
import numpy as np
import pytest
from figures import assert_pictures


@pytest.mark.slow
def test_uci_writes_its_table(tmp_path, capsys):
    paths = tmp_path / "deep.json", tmp_path / "deep.md"
    arguments = ["--quick", "--conditionals", "tight", "--json", str(paths[0]), "--markdown", str(paths[1])]
    loading.script("uci").main(arguments)
    records = json.loads(paths[0].read_text())["records"]
    assert [record["layers"] for record in records] == [1, 2]
    for record in records:
        numbers = [record[name] for name in ("elbo", "test log-likelihood", "test RMSE")]
        assert np.all(np.isfinite(numbers)) and numbers[2] > 0
    assert "test log-likelihood" in paths[1].read_text() and "ELBO per row" in capsys.readouterr().out


@pytest.mark.slow
def test_step_function_is_drawn(tmp_path):
    found = loading.script("step_function").main(["--steps", "20", "--out", str(tmp_path)])
    assert set(found) == {"one layer", "two layers"} and np.all(np.isfinite(list(found.values())))
    assert_pictures(tmp_path, "step_function.png", least=200)


@pytest.mark.slow
def test_digits_of_spots(tmp_path):
    path = tmp_path / "digits.json"
    loading.script("mnist", "convolutional").main(["--quick", "--json", str(path), "--out", str(tmp_path)])
    (record,) = json.loads(path.read_text())["records"]
    assert record["M"] == 5 and np.isfinite(record["nlpd"]) and 0 <= record["errors"] <= 100
    assert_pictures(tmp_path, "convolutional_patches.png", least=100)
