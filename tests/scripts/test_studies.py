"""Every study runs, is kept and taken up again; and the runner's tables."""

import json

import loading
import numpy as np
import pytest

loading.path("study")  # puts the scripts on the path
from studies import runner  # noqa: E402

EVERY = runner.studies()


def run(name, *options):
    return runner.main([name, "--quick", *options])


@pytest.mark.parametrize("name", EVERY)
def test_a_study_runs_and_is_not_run_again(name, data_dir, tmp_path, monkeypatch):
    study, file = EVERY[name], tmp_path / "records.json"
    options = ["--json", str(file), "--markdown", str(tmp_path / "table.md"), "--out", str(tmp_path)]
    records = run(name, *options)
    report = json.loads(file.read_text())
    assert report["records"] == json.loads(json.dumps(records)) and name in report["command"]
    for record in records:
        figures = [record[figure] for figure in study.figures if record.get(figure) is not None]
        assert figures and np.all(np.isfinite(figures)) and {*study.keys, *study.factors} <= record.keys()
    assert all(title in (tmp_path / "table.md").read_text() for title, _ in study.figures.values())
    assert (tmp_path / f"{name}.png").exists() == (study.picture is not None)
    monkeypatch.setattr(runner, "write_json", None)  # a cell more would be written
    assert run(name, *options) == report["records"]
