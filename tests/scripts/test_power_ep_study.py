"""The studies of power EP and of minibatches for groups run from their arguments to their tables."""

import json

import numpy as np
import pytest
from figures import assert_finite
from loading import script


@pytest.mark.slow
def test_power_ep(data_dir, tmp_path, capsys):
    study = script("power_ep")
    report = study.main(["--quick", "--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")])
    assert json.loads((tmp_path / "r.json").read_text()) == report
    assert_finite(report)
    assert len(report["fits"]) == 2 * (3 + 2 + 4)
    text = (tmp_path / "r.md").read_text()
    assert "| structured-pep, blocks, α = 0.5 |" in text and study.NOTE in text
    bounds = [fit["above_evidence"] for fit in report["fits"] if fit["method"] in ("prior", "tight", "grouped")]
    assert max(bounds) < 0.0


@pytest.mark.slow
def test_group_batches(data_dir, tmp_path, capsys):
    study = script("group_batches")
    schemes = ["tight", "switch", "spread, 1 + 1/4"]
    report = study.main(["--quick", "--no-noise", "--json", str(tmp_path / "r.json"), "--schemes", *schemes])
    assert json.loads((tmp_path / "r.json").read_text()) == report
    assert [fit["scheme"] for fit in report["fits"]] == schemes
    assert_finite(report)
    for fit in report["fits"]:
        assert fit["tight_elbo"] <= fit["grouped_elbo"] + 1e-5


def test_batches_of_an_epoch_have_every_row_once():
    study = script("group_batches")
    numbers = study.indices(np.random.default_rng(0), 12, 4, 6)
    assert numbers.shape == (6, 4)
    for epoch in (numbers[:3], numbers[3:]):
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.arange(12))
    assert study.indices(np.random.default_rng(0), 12, 0, 6).shape == (6, 0)
