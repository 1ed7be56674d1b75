"""The script that measures what NumPyro's sites cost: both of its steps are the same step."""

import importlib.util
import json

import loading
import numpy as np

SCRIPT = loading.path("overhead")


def test_steps_with_sites_and_without_agree(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("overhead", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path / "figures" / "overhead.json"
    report = module.main(
        "--hyperparameters learned --inducing 12 --batch-size 32 --repetitions 2 --json".split() + [str(path)]
    )
    assert json.loads(path.read_text()) == report
    losses, ratio = (report["learned"][key] for key in ("losses", "ratio"))
    np.testing.assert_allclose(losses["sites"], losses["bare"], rtol=1e-5)
    assert ratio[1] <= ratio[0] <= ratio[2]
    assert "learned " in capsys.readouterr().out
