"""What the scripts share: arguments, tables, JSON, figures that are kept, timings in turn."""

import dataclasses
import json

import numpy as np
import pytest
from loading import script

common = script("common")
from studies import fits as studied  # noqa: E402
from studies import runner  # noqa: E402


def test_arguments_are_described_by_the_docstring(capsys):
    parser = common.Arguments("First line.\n\nMore.")
    parser.shared("quick", "json", steps=100, inducing={"nargs": "+", "default": [8]})
    args = parser.read(["--quick", "--steps", "7"], quick={"steps": 1, "inducing": [2]})
    assert (args.steps, args.inducing, args.json) == (7, [2], None)  # what is given is kept
    assert parser.read([], quick={"steps": 1}).steps == 100
    with pytest.raises(SystemExit):
        parser.read(["--steps", "0"])
    assert "invalid positive whole number value: '0'" in capsys.readouterr().err
    assert parser.format_help().rstrip().endswith("More.")


def test_tables_are_aligned():
    header, rows = ("name", "value"), [("a", 10), ("bbbbb", None)]
    assert common.table(header, rows) == "name   value\na         10\nbbbbb"
    assert common.table(header, rows, markdown=True).splitlines()[1:3] == ["| ----- | ----: |", "| a     |    10 |"]


def test_means_and_errors():
    def shown(values, *more):
        return common.plus_minus(*common.moments(values), *more)

    assert shown([1.0, None, 3.0], 1) == "2.0 ± 1.0"
    assert shown([None]) == "–" and shown([-1e-9]) == "0.000" and shown([1], 0, "+") == "+1"
    fits = [{"set": "a", "rmse": 1.0}, {"set": "b", "rmse": 5.0}, {"set": "a", "rmse": 3.0}]
    one, other = runner.summarize(fits, ("set",), ("rmse",))
    assert one == {"set": "a", "fits": 2, "rmse": 2.0, "rmse_error": pytest.approx(1.0)}
    assert other["rmse_error"] is None


def test_gains_are_of_the_same_split():
    study = runner.Study("A study", lambda args: {}, {"split": (0, 1), "method": ("a", "b")}, {"rmse": ("RMSE", 2)})
    study = dataclasses.replace(study, against=("method", "a"))
    values = {(0, "a"): 1.0, (0, "b"): 0.5, (1, "a"): 3.0, (1, "b"): 3.5, (2, "b"): 9.0}
    records = [{"split": split, "method": method, "rmse": value} for (split, method), value in values.items()]
    assert runner.means(study, records, False).splitlines()[1].split() == ["a", "2.00", "±", "1.00", "2"]
    assert runner.gains(study, records, False).splitlines()[1] == "b       +0.00 ± 0.50 (1/2)"  # less is better


def test_json_has_no_nan_and_is_whole(tmp_path, capsys):
    path = tmp_path / "new" / "report.json"
    common.write_json(path, {"a": np.arange(2), "b": [np.float32(0.5), float("nan")], "c": (np.inf, True, None)})
    assert json.loads(path.read_text()) == {"a": [0, 1], "b": [0.5, None], "c": [None, True, None]}
    assert capsys.readouterr().out == f"wrote {path}\n" and path.read_text().endswith("\n")
    with pytest.raises(TypeError):
        common.write_json(path, {"a": object()})
    assert "null" in path.read_text()  # what was there stays
    common.write_json(None, {})
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) or 0.25 for name in "ab"}
    seconds = common.interleaved(calls, 3, clock=None)
    assert sorted(order[:2]) == sorted(order[2:4]) == ["a", "b"] and len(order) == 8
    assert seconds["a"].tolist() == [0.25] * 3
    steps = []
    found = common.interleaved_steps({"c": lambda n: steps.append(n) or 0.01}, 2, seconds=0.5)
    assert steps == [2, 50, 50, 50, 50] and found["c"].tolist() == [0.01, 0.01]


def test_the_least_of_many():
    towards = np.array([9.0, -3.0])
    optimum = studied.lbfgs(lambda t: (np.sum((t - towards) ** 2), 2 * (t - towards)), np.zeros(2), 50, num_logs=1)
    assert optimum.x == pytest.approx([7.0, -3.0])  # the first stays within the limits of logs
