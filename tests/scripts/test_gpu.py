"""The command for accelerators: all its parts run, small; and it sees what is wrong, late, or missing."""

import json
import sys

import jax
import pytest
from loading import SCRIPTS, script

from npgp import linalg

sys.path.append(str(SCRIPTS / "benchmarks" / "bench"))
import accelerator_programs
import accelerator_report


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    return script("gpu")


def test_all_parts_run_small_and_write_what_they_find(gpu, tmp_path, capsys, monkeypatch):
    (tmp_path / "gpytorch.py").write_text("raise ImportError('none here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("NPGP_DATA", raising=False)
    found = gpu.main(["--quick", "--minutes", "600", "--out", str(tmp_path / "out")])  # time for all, under any load
    kept = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert kept["right"] == found["right"] and not accelerator_report.is_wrong(found)
    assert {case["case"] for case in kept["right"]} == {"SVGP", "collapsed"}
    assert {row["program"] for row in kept["steps"]} == {"npgp", "bare", "plain", "products"}
    assert {row["kind"] for row in kept["others"]} == {"svgp", "grouped", "SOLVE-GP", "GPLVM"}
    (factors,), (oil,) = kept["factors"], kept["oil"]
    assert set(factors["seconds"]) == set(gpu.ROUTES) and max(factors["errors"].values()) < 1e-5
    assert oil["steps"] == oil["wanted"] == 20 and -200 < oil["elbo_per_row"] < 0
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert text.startswith("# Without an accelerator") and "PASS" not in text and "FAIL" not in text
    assert kept["notes"] == [
        "gpytorch: not installed (none here): pip install npgp[bench]",
        "kin40k: left out, for uci_kin40k.npz is not in the folder of --data or NPGP_DATA",
    ]
    assert all(note in text and note in capsys.readouterr().out for note in kept["notes"][:1])


def test_products_of_less_precision_are_not_right(monkeypatch):
    exact = linalg.matmul

    def rounded(x):  # as tensor cores do by default
        return jax.lax.reduce_precision(x, 8, 10) if x.dtype == "float32" else x

    monkeypatch.setattr(linalg, "matmul", lambda a, b: exact(rounded(a), rounded(b)))
    found = accelerator_programs.compare("collapsed", 60, 18, 8, ["prior", "tight"])
    wrong = accelerator_report.wrong(found)
    assert len(wrong) >= 4 and all("float32" in line for line in wrong)
    assert accelerator_report.is_wrong({"cases": ["collapsed"], "right": [{"wrong": wrong}]})
    assert accelerator_report.is_wrong({"cases": ["collapsed"]})  # nothing was compared
    found["conditionals"]["tight"]["float64"] = [float("nan"), 0.0]
    assert any("tight, float64: the bound" in line for line in accelerator_report.wrong(found))


def test_a_part_that_takes_too_long_is_ended_and_the_next_begins(gpu, tmp_path):
    args = gpu.parse(["--quick", "--out", str(tmp_path)])
    run = gpu.Run(args, tmp_path)
    with run.stack:
        process = run.worker("bare")
        assert process is not None
        process.ask("setup", name="p", kind="matmul", dtype="float32", size=256, columns=256)
        with run.limit("steps", 0.5):
            process.ask("steps", name="p", count=2**30)
        assert run.found["notes"] == ["steps: stopped, for its part's time was up"]
        again = run.worker("bare")
        assert again is not process and again.ask("versions")["jax"] == jax.__version__
        with run.limit("steps", 60.0), run.attempt("this"):
            again.ask("steps", name="unknown", count=1)
        assert run.found["notes"][1:] == ["this FAILED: KeyError: 'unknown'"]


def test_limits_are_of_medians_of_rounds():
    row = dict(inducing=1024, dtype="float32", setting="")
    steps = [
        row | {"program": "npgp", "seconds": [1.0, 2.0, 3.0]},
        row | {"program": "gpytorch", "seconds": [4.0, 8.0, 12.0]},
        row | {"program": "products", "seconds": [0.1, 0.2, 0.3]},
    ]
    found = {"steps": steps, "batch_size": 1024}
    (_, speed, least), (_, share, half) = accelerator_report.limits(found)
    flops = accelerator_report.report.flops
    assert (speed, least, half) == (4.0, 3.0, 0.5)
    assert share == pytest.approx(0.1 * flops.svgp_step(1024, 1024) / flops.product(1024, 1024))
