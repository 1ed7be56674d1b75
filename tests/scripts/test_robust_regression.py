"""The study of outliers and Student-t noise runs from its arguments to its tables, without a data file."""

import loading
import pytest
from figures import assert_finite


@pytest.mark.slow
def test_both_bounds_are_compared(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("NPGP_DATA", raising=False)
    report = loading.quick_report(monkeypatch, tmp_path, "robust_regression", "--markdown", str(tmp_path / "r.md"))
    assert_finite(report)
    assert [fit["conditional"] for fit in report["fits"]] == 2 * ["prior", "tight"]
    text = (tmp_path / "r.md").read_text()
    assert "| concrete | 4 | tight " in text and "(2/2)" in text
    assert "(2/2)" in capsys.readouterr().out
