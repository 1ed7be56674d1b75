#!/usr/bin/env python
"""
Kill a training again and again, at random moments, and compare what it comes to with one that was left alone.

    python scripts/benchmarks/kill_test.py --kills 20 --json out/kill_test.json

A small sparse GP is trained on minibatches with ``npgp.fit(..., checkpoints=..., monitor=...)`` in a process that gets
SIGKILL: at times while it starts, at times while it trains, and at times while it writes a checkpoint. The next
process goes on, until all kills are survived, and then to the end. A line says for each kill how far training had
come, what the newest complete checkpoint was and where the next process took it up: at another step, a checkpoint was
torn or lost. In the end all bits of parameters, optimizer, random key, losses and evaluations must be those of a run
without kills or checkpoints. The exit status is 1 if something differs.

Processes are forked from this one, which imports but does not start JAX, and share one cache of compiled programs.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, keep_programs, whole, write_json

ROWS, BATCH, INDUCING = 200, 20, 5
#: Steps between checkpoints, between evaluations and per device call: none a multiple of another.
CHECKPOINT, EVALUATION, CALL = 40, 25, 16
#: Steps, on average, of a process that gets to training; the share of kills before the first step.
STEPS_PER_LIFE, EARLY = 100, 0.3
PATIENCE = 120.0  # seconds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--kills", type=whole, default=20, help="20 if omitted")
    parser.shared("seed", "json")
    return parser.read(argv)


class Reported(npgp.training.Checkpoints):
    """Checkpoints that say where training is taken up."""

    def __init__(self, directory: Path, pipe: Connection):
        super().__init__(directory, steps=CHECKPOINT)
        self.pipe = pipe

    def open(self, like, about, programs=("", "")):
        saved = super().open(like, about, programs)
        self.pipe.send(("resumed", 0 if saved is None else len(saved.losses)))
        return saved


def sparse_gp(lengthscale) -> npgp.SparseGP:
    return npgp.SparseGP("f", npgp.RBF(lengthscale), inducing=np.linspace(0.0, 4.0, INDUCING)[:, None])


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = sparse_gp(lengthscale).draw()
    with npgp.plate("data", ROWS, rows=X.shape[0]):
        npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y)


def guide(X, y=None):
    sparse_gp(numpyro.sample("lengthscale", dist.LogNormal(numpyro.param("loc", 0.0), 0.1))).guide()


def train(out: Path, checkpoints: Path | None, num_steps: int, pipe: Connection) -> None:
    """Train to the end, if nobody minds, and write everything that came out to a file."""
    warnings.filterwarnings("error", ".*checkpoint.*")
    rng = np.random.default_rng(0)
    X = rng.uniform(0.0, 4.0, (ROWS, 1)).astype(np.float32)
    y = np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=ROWS).astype(np.float32)
    evaluations = 0

    def metric(params):  # something that goes up and down
        nonlocal evaluations
        evaluations += 1
        pipe.send(("evaluated", evaluations))
        return float(np.abs(params["f.u.loc"]).sum())

    monitor = npgp.training.Monitor(metric, every=EVALUATION)
    svi = SVI(model, guide, npgp.adam(0.01, num_steps), TraceMeanField_ELBO())
    kept = None if checkpoints is None else Reported(checkpoints, pipe)
    options: dict[str, Any] = dict(batch_size=BATCH, steps_per_call=CALL, monitor=monitor, checkpoints=kept)
    result = npgp.fit(svi, jax.random.key(1), num_steps, X, y=y, progress=False, **options)
    state = result.state._replace(rng_key=jax.random.key_data(result.state.rng_key))
    content = {"state": state, "losses": result.losses, "history": np.array(monitor.history), "best": monitor.best}
    leaves = jax.tree_util.tree_leaves_with_path(content)
    np.savez(out, **{jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves})


class Life:
    """A process that trains, and what it says."""

    def __init__(self, out: Path, checkpoints: Path | None, num_steps: int):
        self.began, forked = time.monotonic(), multiprocessing.get_context("fork")
        self.said, saying = forked.Pipe(duplex=False)
        self.process = forked.Process(target=train, args=(out, checkpoints, num_steps, saying))
        self.process.start()
        saying.close()

    def words(self, until: float) -> Iterator[tuple[str, int]]:
        """What it says until that time, or until it ends."""
        with contextlib.suppress(EOFError):
            while self.said.poll(max(until - time.monotonic(), 0.0)):
                yield self.said.recv()

    def end(self, kill: bool = False) -> bool:
        """Wait for its end, or bring it about; whether it came to the end by itself."""
        if kill:
            self.process.kill()
        self.process.join()
        if self.process.exitcode == 1:
            raise RuntimeError("Training failed; what is printed above says why.")
        return self.process.exitcode == 0


class Kill(NamedTuple):
    """What was seen of one of them."""

    #: Seconds from the start of the process.
    seconds: float
    #: At which step training was taken up; None if it was not yet.
    resumed: int | None
    #: The newest complete checkpoint before and after; 0 if there was none.
    before: int
    after: int
    #: Whether a checkpoint was being written.
    writing: bool

    @property
    def wrong(self) -> bool:
        return self.resumed not in (None, self.before) or self.after < self.before


def newest(folder: Path) -> tuple[int, bool]:
    """Step of the newest complete checkpoint, and whether an incomplete one is there."""
    names = [path.name.removeprefix("npgp_") for path in folder.glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0), not all(map(str.isdigit, names))


def kills(args: argparse.Namespace, folder: Path, num_steps: int) -> Iterator[Kill]:
    """Start and kill, start and kill."""
    rng = np.random.default_rng(args.seed)
    checkpoints, start = folder / "checkpoints", 0.0  # seconds from start to training, as last seen
    for _ in range(args.kills):
        before, _ = newest(checkpoints)
        moment = rng.uniform(0.0, start) if rng.random() < EARLY and start else None
        evaluations = rng.integers(1, 2 * STEPS_PER_LIFE // EVALUATION)
        life, resumed = Life(folder / "killed.npz", checkpoints, num_steps), None
        for word, number in life.words(life.began + (PATIENCE if moment is None else moment)):
            if word == "resumed":
                resumed = number
            elif number == 1:
                start = time.monotonic() - life.began
            if word == "evaluated" and number >= evaluations:
                # Every other time as soon as a checkpoint is being written, which takes a few milliseconds.
                waits = evaluations % 2 == 0
                end = time.monotonic() + (0.1 if waits else rng.uniform(0.0, 0.05))
                while time.monotonic() < end and not (waits and newest(checkpoints)[1]):
                    time.sleep(1e-4)
                break
        seconds = time.monotonic() - life.began
        if life.end(kill=True):
            raise RuntimeError("Training came to its end before the last kill.")
        yield Kill(seconds, resumed, before, *newest(checkpoints))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keep_programs(folder / "programs")
        num_steps = args.kills * STEPS_PER_LIFE * 5 // 4  # more than is taken between kills
        Life(folder / "whole.npz", None, num_steps).end()

        seen = []
        for kill in kills(args, folder, num_steps):
            seen.append(kill)
            print(f"{len(seen):4}  {kill}{'  WRONG' if kill.wrong else ''}", flush=True)
        last = Life(folder / "killed.npz", folder / "checkpoints", num_steps)
        resumed = dict(last.words(last.began + PATIENCE))["resumed"]
        last.end()
        with np.load(folder / "whole.npz") as whole, np.load(folder / "killed.npz") as killed:
            names = {*whole, *killed}
            different = sorted(x for x in names if x not in whole or x not in killed or not same(whole[x], killed[x]))
    report = {
        "steps": num_steps,
        "kills": len(seen),
        "before_training": sum(kill.resumed is None for kill in seen),
        "while_writing": sum(kill.writing for kill in seen),
        "last_taken_up": resumed,
        "lost_or_torn": sum(kill.wrong for kill in seen) + (resumed != seen[-1].after),
        "arrays": len(names),
        "different": different,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(
        f"{len(seen)} kills, {report['before_training']} of them before training was taken up and "
        f"{report['while_writing']} while a checkpoint was written: {report['lost_or_torn']} checkpoints lost or torn. "
        f"Of the {len(names)} arrays that came out, {len(different)} differ in some bit from those of a run without "
        f"kills or checkpoints: {', '.join(different) or 'none'}. {report['seconds']:.0f} s."
    )
    write_json(args.json, report)
    return report


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether all bits are the same."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


if __name__ == "__main__":
    report = main()
    sys.exit(bool(report["lost_or_torn"] or report["different"]))
