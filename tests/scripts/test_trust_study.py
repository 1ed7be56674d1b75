"""The study of which posteriors to trust: does it run?"""

import loading
import numpy as np
import pytest


@pytest.mark.slow
def test_guides_are_compared_with_nuts(monkeypatch, tmp_path, capsys):
    report = loading.quick_report(monkeypatch, tmp_path, "trust")
    (case,) = report["found"]
    assert case["entries"] == 5 and set(case["guides"]) == set(loading.script("trust").GUIDES)
    for guide in case["guides"].values():
        assert np.isfinite(guide["khat"]) and 0 <= guide["share"] <= guide["mean_share"] <= 1 and guide["sd"] > 0
    assert "dose and trend  default" in capsys.readouterr().out


def test_the_share_of_draws_in_an_interval():
    study, rng = loading.script("trust"), np.random.default_rng(0)
    draws = {"a": rng.normal(size=(4000, 2)) * [1.0, 0.5], "b": rng.normal(size=4000) + 10.0}
    least, middle, most = study.shares(draws, {"a": rng.normal(size=(4000, 2)), "b": rng.normal(size=4000)})
    assert least[:2] == (0.0, "b") and middle[1] == "a[1]" and most[1] == "a[0]"
    np.testing.assert_allclose([middle[0], middle[2], most[0], most[2]], [0.589, 0.5, 0.9, 1.0], atol=0.05)
