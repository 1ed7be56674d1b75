"""
What an attempt to break npgp is, and what became of one.

An attempt does what a user might do, wisely or not, and says what a right outcome is. What became of it is judged by
rules, not by hand:

==================  ===========================================================================================
clear error         an exception that npgp itself raises (the innermost frame is npgp's, and no assertion), of few
                    sentences on one line, that names what is wrong and says what is accepted; or one of JAX's that
                    has npgp's advice of what to write in it
clear warning       likewise, a warning
right answer        all numbers agree with an oracle that shares no code with npgp
unclear error       any other exception: of JAX, NumPy, NumPyro or Python, or without these words
refused wrongly     a clear error where a right answer is possible, and asked for
silent wrong        other numbers than the oracle's, or no error where there is no right answer, and not a word
NaN in silence      NaN or infinities where the oracle has numbers, or where there is no right answer, and not a word
hang                the process made no progress; seen from outside (``break.py``)
==================  ===========================================================================================
"""

from __future__ import annotations

import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import npgp

CLASSES = (
    "right answer",
    "clear error",
    "clear warning",
    "unclear error",
    "refused wrongly",
    "silent wrong",
    "NaN in silence",
    "hang",
)
#: What must not happen at all.
FORBIDDEN = ("silent wrong", "NaN in silence", "hang", "refused wrongly")

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

    def verdict(self) -> tuple[str, str]:
        """The class, and in words."""
        found, expected = (np.asarray(jax.device_get(x), float) for x in (self.found, self.expected))
        said = f"{self.what}: " * bool(self.what) + f"{_short(found)} for {_short(expected)}"
        try:
            expected = np.broadcast_to(expected, found.shape)
        except ValueError:
            return "silent wrong", said
        if np.any(~np.isfinite(found) & np.isfinite(expected)):
            return "NaN in silence", said
        right = np.allclose(found, expected, self.rtol, self.atol, equal_nan=True)
        return ("right answer" if right else "silent wrong"), said


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


@dataclass(frozen=True)
class Attempt:
    """
    One attempt.

    :param name: unique.
    :param theme: the file that it is in.
    :param item: what it belongs to: a number of the list of silent wrong answers, or a word.
    :param wants: the right outcomes: "error", "warning" (or an error), "answer", or "either" of error and answer.
    :param names: words of which a clear message has at least one.
    :param run: does it; returns answers, or what was accepted where there is no right answer.
    :param x64: with 64-bit numbers.
    :param alone: in a process of its own.
    """

    name: str
    theme: str
    item: str
    wants: str
    names: tuple[str, ...]
    run: Callable[[], Any]
    x64: bool = False
    alone: bool = False


REGISTRY: dict[str, Attempt] = {}


def attempt(
    item: int | str,
    wants: str,
    names: str = "",
    *,
    cases: Mapping[str, Any] | Iterable[str] | None = None,
    x64: bool | None = False,
    alone: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Register a function as an attempt, or as one for each case.

    :param item: see :class:`Attempt`.
    :param names: words, separated by commas.
    :param cases: arguments of the function by what to call them, or names that are the arguments too.
    :param x64: ``None`` for one attempt in each precision.
    """
    assert wants in ("error", "warning", "answer", "either")

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        theme = fn.__module__.rpartition(".")[2].removeprefix("on_").replace("_", " ")
        words = tuple(word.strip() for word in names.split(",") if word.strip())
        given: dict[str, tuple[Any, ...]] = {"": ()}
        if cases is not None:
            pairs = cases.items() if isinstance(cases, Mapping) else [(case, case) for case in cases]
            given = {f" [{label}]": (value,) for label, value in pairs}
        for label, args in given.items():
            for wide in (False, True) if x64 is None else (x64,):
                precision = "" if x64 is None and not wide else ", float64" if x64 is None else ""
                name = f"{theme}: {fn.__name__.replace('_', ' ')}{label}{precision}"
                assert name not in REGISTRY, name
                REGISTRY[name] = Attempt(name, theme, str(item), wants, words, partial(fn, *args), wide, alone)
        return fn

    return register


def mistakes(table: Mapping[str, tuple[str, Callable[[], Any]]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Register a function of each mistake of a table as an attempt that must end in an error.

    :param table: by what to call them, the words of which the message has one, separated by commas, and the mistake.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for what, (names, make) in table.items():
            attempt("beyond", "error", names, cases={what: make})(fn)
        return fn

    return register


# ---------------------------------------------------------------------------------------------------------------
# What became of it


@dataclass(frozen=True)
class Outcome:
    """The class of what became of an attempt, and what was answered."""

    kind: str
    said: str
    seconds: float = 0.0


def outcome(this: Attempt) -> Outcome:
    """Run an attempt."""
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught, jax.enable_x64(this.x64):
        warnings.simplefilter("always")
        try:
            kind, said = _judge_answer(this, this.run())
        except Exception as error:
            kind, said = judge_error(this, error)
    if kind in ("silent wrong", "NaN in silence") or this.wants == "warning":
        for message in (str(w.message) for w in caught):
            if _is_clear(this, message) is None:
                kind, said = "clear warning", message
                break
    return Outcome(kind, said, time.perf_counter() - began)


def _judge_answer(this: Attempt, returned: Any) -> tuple[str, str]:
    answers = list(returned) if type(returned) in (list, tuple) else [returned]
    if not all(isinstance(answer, Answer) for answer in answers):
        leaves = [x for x in jax.tree.leaves(answers) if isinstance(x, (float, np.ndarray, np.generic, jax.Array))]
        bad = any(jnp.issubdtype(jnp.result_type(x), jnp.inexact) and not np.all(np.isfinite(x)) for x in leaves)
        return ("NaN in silence" if bad else "silent wrong"), f"accepted: {_short(returned)}"
    verdicts = [answer.verdict() for answer in answers]
    if this.wants in ("error", "warning"):
        kinds = [kind for kind, _ in verdicts]
        worst = "NaN in silence" if "NaN in silence" in kinds else "silent wrong"
        return worst, "accepted: " + "; ".join(said for _, said in verdicts)
    return next((v for v in verdicts if v[0] != "right answer"), verdicts[0])


def judge_error(this: Attempt, error: BaseException) -> tuple[str, str]:
    """The class of an exception, and what it says."""
    said = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    innermost = frames[-1].filename if frames else ""
    if "npgp.sample the values" in said and any(name in said for name in this.names):
        return "clear error", said  # of JAX, which asked the object for its name: that says what to write
    if not innermost.startswith(_HOME):
        return "unclear error", f"{said} (raised in {Path(innermost).name})"
    if isinstance(error, (AssertionError, StopIteration, RecursionError, AttributeError, IndexError)):
        return "unclear error", said
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    wrong = _is_clear(this, message)
    if wrong is not None:
        return "unclear error", f"{said} ({wrong})"
    return ("refused wrongly" if this.wants == "answer" else "clear error"), said


def _is_clear(this: Attempt, message: str) -> str | None:
    """What a message lacks; ``None`` if it is clear."""
    if this.names and not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in this.names):
        return f"names none of {', '.join(this.names)}"
    if "\n" in message.strip() or len(message) > 600 or len(re.findall(r"[.!?](\s|$)", message)) > 4:
        return "is no short message"
    return None if _ADVICE.search(message) else "says nothing of what is accepted"


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.size == 1:
        return f"{value.item():.6g}"
    text = np.array2string(value, precision=4, threshold=6) if isinstance(value, np.ndarray) else repr(value)
    return text.replace("\n", " ")[:160]
