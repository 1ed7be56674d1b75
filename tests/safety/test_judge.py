"""The judge of attempts: what it lets pass, and what it does not."""

import warnings

import jax
import judge
import numpy as np
import pytest
from judge import finite, same, true

import npgp


def passes(run, wants="either", names=("X",)) -> bool:
    try:
        judge.judge(run, wants, names)
    except AssertionError:
        return False
    return True


def raised(error):
    def run():
        raise error

    return run


def test_answers_are_judged_by_numbers():
    assert passes(lambda: same(1.0, 1.0 + 1e-9)) and passes(lambda: same(1.0, 1.0), "answer")
    wrong = [same(1.0, 1.1), same(np.nan, 1.0), same([1.0, 2.0], [1.0, 2.0, 3.0]), finite([1.0, np.inf]), true(False)]
    for answer in wrong:
        assert not passes(lambda a=answer: a) and not passes(lambda a=answer: [same(1.0, 1.0), a])
    # What is accepted though it has no right answer.
    for accepted in (3.0, np.array([np.nan]), same(1.0, 1.0)):
        assert not passes(lambda a=accepted: a, "error")
    assert not passes(lambda: 3.0)


def test_errors_are_judged_by_where_they_are_raised_and_what_they_say():
    def whole_numbers():
        return npgp.checks.inputs(np.ones(3, int), "X")

    assert passes(whole_numbers, "error") and passes(whole_numbers, "warning") and passes(whole_numbers)
    assert not passes(whole_numbers, "answer") and not passes(whole_numbers, "error", ("Z",))
    # The same words from elsewhere, and what is no check.
    assert not passes(raised(ValueError("X has shape (3,); it must be (rows, columns).")), "error")
    assert not passes(lambda: jax.numpy.ones(3) @ jax.numpy.ones(4), "error", ())
    assert not passes(lambda: npgp.linalg.cholesky("X"), "error", ())


@pytest.mark.parametrize(
    "message, clear",
    [
        ("X is 3; it must be 4.", True),
        ("X is 3", False),
        ("Z is 3; it must be 4.", False),
        ("X is 3;\nit must be 4.", False),
        ("X is 3; it must be 4. " * 40, False),
    ],
)
def test_messages_name_what_is_wrong_and_what_is_accepted(message, clear, monkeypatch):
    monkeypatch.setattr(judge, "_HOME", __file__)
    assert passes(raised(ValueError(message)), "error") == clear

    def warned():
        warnings.warn(message, stacklevel=1)
        return same(1.0, 2.0)

    assert passes(warned, "warning") == clear and passes(warned) == clear
    assert not passes(warned, "answer") and not passes(warned, "error")


def test_what_stops_is_ended_with_its_frames(monkeypatch, tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    program = "import judge, time\njudge.LIMIT = .2\njudge.judge(lambda: time.sleep(60), 'error', ())"
    path = f"{Path(__file__).parent}:{Path(npgp.__file__).parents[1]}"
    ended = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.returncode == 1 and "Timeout" in ended.stderr and "judge.py" in ended.stderr
