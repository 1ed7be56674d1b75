"""What a step with each likelihood costs: all of the table are timed, and it says how."""

import loading
import numpy as np

from npgp import likelihoods


def test_steps_are_timed_and_written(tmp_path, capsys):
    module = loading.script("likelihood_cost", "benchmarks")
    path = tmp_path / "table.md"
    report = module.main(["--quick", "--only", "function: Normal", "--out", str(path)])
    assert set(report) == {"Bernoulli", "function: Normal"} and np.all(np.array(list(report.values())) > 0.0)
    assert report["Bernoulli"][3] == 1.0
    written = path.read_text()
    assert "likelihood_cost.py --quick --only 'function: Normal'" in written
    assert "| function: Normal |" in written and written.splitlines()[-1] in capsys.readouterr().out


def test_every_likelihood_is_in_the_table():
    timed = {type(case) for case in loading.script("likelihood_cost", "benchmarks").cases(6).values()}
    exported = [getattr(likelihoods, name) for name in likelihoods.__all__]
    classes = {a for a in exported if isinstance(a, type) and issubclass(a, likelihoods.Likelihood)}
    assert classes - timed == {likelihoods.Likelihood, likelihoods.Factorized, likelihoods.Columns}
