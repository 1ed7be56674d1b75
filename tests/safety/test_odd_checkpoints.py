"""Checkpoints: of other runs, damaged, beside what is not theirs, and where the disk is full."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpyro
import problem as p
from judge import attempt, same, true

import npgp


def _train(
    folder: Any,
    steps: int = 4,
    program: Any = p.model,
    X: Any = None,
    y: Any = None,
    rate: float = 0.01,
    loss: Any = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    checkpoints = npgp.training.Checkpoints(folder, steps=2)
    svi = p.svi_of(program, loss, rate=rate)
    X, y = p.x() if X is None else X, p.x(p.Y) if y is None else y
    return npgp.fit(svi, p.key(seed), steps, X, y, progress=False, checkpoints=checkpoints, **options)


def _matern(X, y):
    f = npgp.SparseGP("f", npgp.Matern32(p.LENGTHSCALE, variance=p.VARIANCE), p.x(p.Z)).draw()
    with numpyro.plate("data", p.N):
        npgp.observe("y", f(X), p.gaussian(), obs=y)


CHANGED: dict[str, dict[str, Any]] = {
    "other observations": dict(y=p.Y[::-1].copy()),
    "one row changed": dict(y=np.where(np.arange(p.N) == 5, 9.0, p.Y)),
    "another likelihood": dict(program=p.observed(npgp.StudentT(df=4.0, scale=0.4))),
    "another kernel": dict(program=_matern),
    "another key": dict(seed=1),
    "another optimizer": dict(loss=None, rate=None),
}


@attempt("error", "checkpoints, checkpoint, num_steps", cases=CHANGED)
def test_checkpoints_of_another_run(change: dict[str, Any]) -> Any:
    folder = tempfile.mkdtemp()
    _train(folder)
    change = {k: (p.x(v) if isinstance(v, np.ndarray) else v) for k, v in change.items()}
    if "rate" in change:
        svi = numpyro.infer.SVI(
            p.model, npgp.AutoSparseGP(p.model), numpyro.optim.SGD(0.1), numpyro.infer.TraceMeanField_ELBO()
        )
        return npgp.fit(
            svi, p.key(), 8, p.x(), p.x(p.Y), progress=False, checkpoints=npgp.training.Checkpoints(folder, steps=2)
        ).losses
    return _train(folder, 8, **change).losses


LIKE: dict[str, dict[str, Any]] = {
    "another rate": dict(rate=0.05),
    "fewer steps than it has": dict(steps=2),
    "more particles": dict(loss=numpyro.infer.TraceMeanField_ELBO(num_particles=3)),
}


@attempt("warning", "rate, learning_rate, optimizer, checkpoint, checkpoints, num_steps, particles, loss", cases=LIKE)
def test_checkpoints_of_a_run_much_like_it(change: dict[str, Any]) -> Any:
    folder = tempfile.mkdtemp()
    _train(folder)
    return _train(folder, **{"steps": 8} | change).losses


@attempt("answer", cases=("interrupted", "finished", "another folder inside"))
def test_checkpoints_of_this_run(which: str) -> Any:
    folder = tempfile.mkdtemp()
    whole = _train(tempfile.mkdtemp(), 8).losses
    if which == "another folder inside":
        Path(folder, "notes").mkdir()
    _train(folder, 4 if which != "finished" else 8)
    return same(_train(folder, 8).losses, whole, 0, 0)


@attempt(
    "either",
    "checkpoints, folder, checkpoint, directory",
    cases=("2024", "4.orbax-checkpoint-tmp-1", "tmp"),
)
def test_folders_that_are_not_ours(name: str) -> Any:
    """A folder of digits with a thesis in it is never touched, whatever else becomes of the call."""
    folder = Path(tempfile.mkdtemp())
    thesis = folder / name / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    error, losses = None, []
    try:
        losses = _train(folder, 10).losses
        _train(folder, 12)
    except Exception as raised:
        error = raised
    if not (thesis.exists() and thesis.read_text() == "years of work"):
        return true(False, "the thesis is gone")
    if error is not None:
        raise error
    return same(len(losses), 10)


def _damage(folder: Path, how: str) -> None:
    newest = max(folder.glob("npgp_*"), key=lambda f: int(f.name.removeprefix("npgp_")))
    files = [path for path in newest.rglob("*") if path.is_file()]
    file = newest / "header" / "metadata" if how == "header" else max(files, key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    else:
        data[data.find(b"checksum") + 12 if how == "header" else len(data) // 2] ^= 0x01
    file.write_bytes(bytes(data))


@attempt("warning", "damaged, checkpoint", cases=("arrays", "truncated", "header"))
def test_newest_checkpoint_is_damaged(how: str) -> Any:
    folder = Path(tempfile.mkdtemp())
    _train(folder, 6)
    _damage(folder, how)
    return _train(folder, 8).losses


@attempt("answer", cases=("arrays", "header"))
def test_newest_checkpoint_is_damaged_and_training_goes_on(how: str) -> Any:
    folder = Path(tempfile.mkdtemp())
    _train(folder, 6)
    _damage(folder, how)
    return same(_train(folder, 8).losses, _train(tempfile.mkdtemp(), 8).losses, 0, 0)


@attempt("either", "disk, checkpoint, checkpoints, written, space")
def test_disk_that_is_full() -> Any:
    """The folder cannot be written any more: training goes on, and what was trained is returned."""
    import resource
    import signal

    folder = Path(tempfile.mkdtemp())
    _train(folder, 2)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, old[1]))
    try:
        result = _train(folder, 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    return same(len(result.losses), 6)


@attempt(
    "error",
    "directory, checkpoints, every, steps, keep",
    cases=("a file", "every 0 seconds", "every −1 steps", "keep none"),
)
def test_checkpoints_that_cannot_be(which: str) -> Any:
    if which == "a file":
        path = Path(tempfile.mkdtemp()) / "file"
        path.write_text("x")
        return _train(path).losses
    options: dict[str, Any] = {
        "every 0 seconds": dict(every=0.0),
        "every −1 steps": dict(steps=-1),
        "keep none": dict(keep=0),
    }[which]
    return npgp.training.Checkpoints("folder", **options)
