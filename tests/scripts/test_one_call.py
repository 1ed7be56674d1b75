"""The study of GPLVMs by one call: does it run?"""

import loading
import numpy as np
import pytest


@pytest.mark.slow
def test_one_call_runs(capsys):
    records = loading.script("one_call").main(["--quick", "--kinds", "labels"])
    assert [r["kind"] for r in records] == ["labels"] * 3
    assert all(np.isfinite(r["elbo"]) for r in records)
    assert "SVI alone, rate 0.03" in capsys.readouterr().out
