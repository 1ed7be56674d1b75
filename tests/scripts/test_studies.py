"""Every study runs, is kept and taken up again; and the runner's tables."""

import json
import re

import loading
import numpy as np
import pytest

loading.path("study")  # puts the scripts on the path
from studies import arrival, minibatches, runner  # noqa: E402

EVERY = runner.studies()
COSTS = loading.script("costs", "benchmarks").COSTS


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


def test_methods_are_compared_in_pairs():
    """Of the short configuration there is but one method."""
    of = {"set": "simulated", "split": 0, "rmse": 0.5, "log_likelihood": -1.0, "best_elbo": -1.0}
    records = [
        of | {"M": 8, "method": "SVGP", "elbo": -1.5, "step_ms": 2.0},
        of | {"M": 16, "method": "SOLVE-GP", "elbo": -1.25, "step_ms": 3.0},
    ]
    lines = minibatches.pairs(records, markdown=False).splitlines()
    assert len(lines) == 2 and "SOLVE-GP over SVGP of M/2" in lines[1]
    assert "0.2500" in lines[1] and lines[1].split()[-1] == "1.50"
    assert minibatches.pairs(records[:1], markdown=False) == ""


@pytest.mark.parametrize("name", arrival.LIKELIHOODS)
def test_likelihoods_of_random_models_can_be_made(name):
    """The short configuration has one of them."""
    assert arrival.LIKELIHOODS[name](0.5) is not None


ROOT = loading.SCRIPTS.parent
RESULTS = sorted(loading.SCRIPTS.glob("benchmarks/results/*.md"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/howto/*.md")), *RESULTS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_pages_name_are_there(page):
    """Or in the commit that the paragraph names, or the page if it is one of results."""
    text = page.read_text(encoding="utf-8")
    for paragraph in [text] if page in RESULTS else text.split("\n\n"):
        in_history = re.search(r"\b(at|commit)\s+[0-9a-f]{7}\b", paragraph)
        for path, first in re.findall(r"(scripts/[\w/]+\.py)(?:\s+([a-z][\w-]*))?", paragraph):
            known = {"study.py": EVERY, "costs.py": COSTS}.get(path.split("/")[-1]) if first else None
            there = (ROOT / path).exists() and (known is None or first in known)
            assert there or in_history, f"{page.name}: there is no {path} {first}"
