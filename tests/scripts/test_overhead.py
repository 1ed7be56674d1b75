"""The script that measures what NumPyro's sites cost: both of its steps are the same step."""

import json

import loading
import numpy as np


def test_steps_with_sites_and_without_agree(tmp_path, capsys):
    module = loading.script("overhead")
    path = tmp_path / "figures" / "overhead.json"
    report = module.main(
        "--hyperparameters learned --inducing 12 --batch-size 32 --repetitions 2 --json".split() + [str(path)]
    )
    assert json.loads(path.read_text()) == report
    losses, ratio = (report["learned"][key] for key in ("losses", "ratio"))
    np.testing.assert_allclose(losses["sites"], losses["bare"], rtol=1e-5)
    assert ratio[1] <= ratio[0] <= ratio[2]
    assert "learned " in capsys.readouterr().out
