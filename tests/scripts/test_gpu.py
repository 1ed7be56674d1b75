"""The command for accelerators: all its parts run, small; and it sees what is wrong or missing."""

import json
import sys

import jax
import pytest
from loading import SCRIPTS, script

from npgp import linalg

sys.path.append(str(SCRIPTS / "benchmarks" / "bench"))
import accelerator_programs


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    (tmp_path / "gpytorch.py").write_text("raise ImportError('none here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return script("gpu")


def test_all_parts_run_small_and_write_what_they_find(gpu, tmp_path):
    found = gpu.main(["--quick", "--minutes", "600", "--out", str(tmp_path / "out")])  # time for all, under any load
    assert json.loads((tmp_path / "out" / "gpu.json").read_text()) == found and not gpu.is_wrong(found)
    assert [(row["case"], row["conditional"]) for row in found["right"]] == [
        ("SVGP", "grouped"),
        ("collapsed", "grouped"),
    ]
    assert {row["program"] for row in found["steps"]} == {"npgp", "JAX by hand", "JAX by hand, plain", "limit"}
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert text.startswith("# Without an accelerator") and "All that was compared is right." in text
    assert "gpytorch: not installed (none here): pip install --group bench" in text and not found["left_out"]


def test_nothing_is_begun_when_the_time_is_up(gpu, tmp_path):
    found = gpu.main(["--quick", "--minutes", "0.1", "--out", str(tmp_path / "out")])
    assert found["left_out"] == [f"{part}, for want of time" for part in gpu.PARTS]
    assert gpu.is_wrong(found)  # nothing was compared
    assert gpu.is_wrong({"right": [{"case": "SVGP", "conditional": "prior", "wrong": True}]})


def test_products_of_less_precision_are_not_right(gpu, monkeypatch):
    exact = linalg.matmul

    def rounded(x):  # as tensor cores do by default
        return jax.lax.reduce_precision(x, 8, 10) if x.dtype == "float32" else x

    monkeypatch.setattr(linalg, "matmul", lambda a, b: exact(rounded(a), rounded(b)))
    found = accelerator_programs.compare("collapsed", 60, 18, 8, ["prior", "tight"])
    found["conditionals"]["tight"]["float64"] = [float("nan"), 0.0]
    for by_dtype in found["conditionals"].values():
        assert all(not d <= most for d, most in zip(by_dtype["float32"], found["tolerance"]["float32"], strict=True))

    class Workers:
        args, time = gpu.parse(["--quick", "--cases", "collapsed"]), True

        class checks:
            ask = staticmethod(lambda *_, **__: found)

    rows = list(gpu.right(Workers))
    assert gpu.is_wrong({"right": rows}) and all(row["wrong"] for row in rows)
