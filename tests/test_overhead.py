"""The script that measures what NumPyro's sites cost: both of its steps are the same step."""

import importlib.util
import json
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).parent.parent / "scripts" / "overhead.py"


def test_steps_with_sites_and_without_agree(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("overhead", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path / "figures" / "overhead.json"
    report = module.main(["--inducing", "12", "--batch-size", "32", "--repetitions", "2", "--json", str(path)])
    assert json.loads(path.read_text()) == report
    losses = report["learned"]["losses"]
    np.testing.assert_allclose(losses["sites"], losses["bare"], rtol=1e-5)
    for name in ("learned", "sampled"):
        assert all(np.isfinite(list(report[name]["losses"].values())))
        assert report[name]["ratio"][1] <= report[name]["ratio"][0] <= report[name]["ratio"][2]
        assert f"{name} " in capsys.readouterr().out or name == "sampled"
