"""
Attempts to break npgp, as tests, and the one judge of what became of them.

An attempt does what a user might do, wisely or not, and says what a right outcome is:

- an error that npgp itself raises (its innermost frame is npgp's, and it is no assertion), short and on one line, that
  names the argument, and says what was given or what is accepted; or one of JAX's that quotes npgp's advice;
- a warning of that kind;
- right answers: numbers that agree with an oracle that shares no code with npgp (`problem`).

All else fails: errors of JAX, NumPy, NumPyro or Python, other numbers, NaN without a word, an error where there is a
right answer. What stops for ever is ended by `faulthandler`, which says where.
"""

from __future__ import annotations

import faulthandler
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import npgp

#: Seconds after which an attempt is taken to have stopped: far more than any takes on a busy machine.
LIMIT = 600.0
#: Words of a message that says what is accepted, or what to do; many have the form "given; accepted".
_WORDS = (
    "must, cannot, need, needs, take, takes, accept, accepts, accepted, pass, use, give, given, write, call, wants, "
    "only, instead, remove, mask, draw, but, it has, has no, have no, is no, is a file, no file that, No such file, "
    "reads, choose, check, first, at least, at most, between, set, state, outside, wrap, load, run, not in, not one, "
    "not a, not match, divide, differs, sample it, found no, such as, standardize, standardized, Standardizer, larger, "
    "smaller, fewer, more, twice, say, put"
)
_ADVICE = re.compile(rf"\b({_WORDS.replace(', ', '|')})\b|; ")
_HOME = str(Path(npgp.__file__).parent)


@dataclass(frozen=True)
class Answer:
    """A number or array that was found, what an oracle says, and how far the two may be apart."""

    found: Any
    expected: Any
    rtol: float
    atol: float
    what: str

    def wrong(self) -> str | None:
        """What is wrong with it, in words; `None` if nothing is."""
        found, expected = (np.asarray(jax.device_get(x), float) for x in (self.found, self.expected))
        try:
            right = np.allclose(found, np.broadcast_to(expected, found.shape), self.rtol, self.atol, equal_nan=True)
        except ValueError:
            right = False
        return None if right else f"{self.what or 'the answer'} is {found}, not {expected}"


def same(found: Any, expected: Any, rtol: float = 2e-3, atol: float = 1e-3, what: str = "") -> Answer:
    """An answer to be compared; the tolerances are those of float32 if none are given."""
    return Answer(found, expected, rtol, atol, what)


def finite(values: Any, what: str = "") -> Answer:
    """Numbers, whatever they are."""
    values = np.asarray(jax.device_get(values), float)
    return Answer(values, np.where(np.isfinite(values), values, 0.0), 0.0, 0.0, what)


def true(condition: Any, what: str = "") -> Answer:
    """A statement that must hold."""
    return Answer(float(bool(condition)), 1.0, 0.0, 0.0, what)


def attempt(
    wants: str,
    names: str = "",
    *,
    cases: Mapping[str, Any] | Iterable[str] | None = None,
    x64: bool | None = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Make a test of a function that attempts something, or of the function and each case.

    :param wants: the right outcomes: "error", "warning" (or an error), "answer", or "either" of these.
    :param names: words of which a message has at least one, separated by commas.
    :param cases: arguments of the function by what to call them, or names that are the arguments too.
    :param x64: with 64-bit numbers; ``None`` for one test in each precision.
    """
    assert wants in ("error", "warning", "answer", "either")
    words = _split(names)
    pairs = {case: case for case in cases or ()} if not isinstance(cases, Mapping) else cases
    precisions = {"float32": False, "float64": True} if x64 is None else {"": x64}

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        if cases is None and x64 is not None:
            return lambda: judge(fn, wants, words, x64)
        runs = {case: partial(fn, value) for case, value in pairs.items()} if cases is not None else {"": fn}
        return _over(
            {
                ", ".join(filter(None, (case, precision))): partial(judge, run, wants, words, wide)
                for case, run in runs.items()
                for precision, wide in precisions.items()
            }
        )

    return decorate


def mistakes(table: Mapping[str, tuple[str, Callable[[], Any]]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Make a test of a function and each mistake of a table, which must end in an error.

    :param table: by what to call them, the words of which the message has one, separated by commas, and the mistake.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        return _over(
            {what: partial(judge, partial(fn, make), "error", _split(names)) for what, (names, make) in table.items()}
        )

    return decorate


def _split(names: str) -> tuple[str, ...]:
    return tuple(filter(None, re.split(r",\s+", names)))


def _over(tests: Mapping[str, Callable[[], None]]) -> Callable[..., None]:
    """One test for each of these, under their names."""

    @pytest.mark.parametrize("judged", [pytest.param(test, id=name) for name, test in tests.items()])
    def test(judged: Callable[[], None]) -> None:
        judged()

    return test


def judge(run: Callable[[], Any], wants: str, names: tuple[str, ...], x64: bool = False) -> None:
    """
    Attempt it, and fail unless the outcome is a right one.

    :param run: returns answers, or what was accepted where there is no right answer.
    """
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as caught, jax.enable_x64(x64), _watched():
        warnings.simplefilter("always")
        try:
            returned = run()
        except Exception as raised:
            error = raised
    if error is not None:
        lacks = _lacks_of_error(error, names)
        assert lacks is None, f"{lacks}: {type(error).__name__}: {error}"
        assert wants != "answer", f"there is a right answer, and it was refused: {error}"
        return
    warned = any(_lacks(str(warning.message), names) is None for warning in caught)
    assert wants != "error", f"accepted: {returned}"
    assert wants != "warning" or warned, f"not a word: {returned}"
    if wants != "warning":
        answers = returned if isinstance(returned, (list, tuple)) else [returned]
        assert all(isinstance(answer, Answer) for answer in answers), f"accepted: {returned}"
        wrong = [answer.wrong() for answer in answers]
        assert not any(wrong) or (wants == "either" and warned), "; ".join(filter(None, wrong))


@contextmanager
def _watched() -> Iterator[None]:
    """A process that stops is ended, with its frames; and exceptions have all frames, JAX's too."""
    filtering = jax.config.jax_traceback_filtering
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    try:
        jax.config.update("jax_traceback_filtering", "off")
        yield
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
        faulthandler.cancel_dump_traceback_later()


def _lacks_of_error(error: Exception, names: tuple[str, ...]) -> str | None:
    """What is wrong with an exception; `None` if it is clear."""
    if "npgp.sample the values" in str(error) and any(name in str(error) for name in names):
        return None  # of JAX, which asked the object for its name: that says what to write
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    if not innermost.startswith(_HOME):
        return f"raised in {innermost}"
    if isinstance(error, (AssertionError, StopIteration, RecursionError, AttributeError, IndexError)):
        return "no check"
    return _lacks(str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error), names)


def _lacks(message: str, names: tuple[str, ...]) -> str | None:
    """What a message lacks; `None` if it is clear."""
    if names and not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names):
        return f"names none of {', '.join(names)}"
    if "\n" in message.strip() or len(message) > 600 or len(re.findall(r"[.!?](\s|$)", message)) > 4:
        return "is no short message"
    return None if _ADVICE.search(message) else "says nothing of what is accepted"
