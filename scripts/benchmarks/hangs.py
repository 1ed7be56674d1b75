#!/usr/bin/env python
"""Does a program with many factorizations side by side come to its end on a machine with two cores?

LAPACK's batched calls in jaxlib 0.10 give parts of their work to the threads that run the program and wait for them;
with as many such calls at a time as threads, all wait for ever. Each case below runs in fresh processes on two cores,
whose environment says nothing of threads. A process that takes more than ten times as long as the first of its case
that came to an end, and more than a minute, is killed and counted. The last case is JAX's own batched Cholesky without
npgp, to see whether this version of jaxlib has the fault. The exit status is 1 if one of npgp's stops.

    python scripts/benchmarks/hangs.py --markdown out/hangs.md      half an hour or so

Processes are forked from this one, which imports JAX but does not start it, and share a cache of compiled programs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import Adam

import npgp
from npgp import linalg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, command, keep_programs, table, whole, write_json

CORES = 2
#: Variables that could change the number of threads, or what is compiled for them.
THREADS = ("NPROC", "XLA_FLAGS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH")
#: A process is killed after so many times the first one's time, and not before so many seconds; the first one after
#: :data:`PATIENCE` seconds.
FACTOR, LEAST, PATIENCE = 10.0, 60.0, 900.0
ROWS, POINTS, DRAWS = 100, 200, 64
CONTROL = "JAX's: 8 batches of 400 × 30 × 30"


class Outcome(NamedTuple):
    """Of the processes of a case."""

    runs: int
    stopped: int
    #: The longest that one took that came to its end.
    seconds: float


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--runs", type=whole, default=20, help="processes of each case (20)")
    parser.add_argument("--calls", type=whole, default=5, help="calls of the program in each process (5)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file")
    parser.shared("json")
    return parser.read(argv)


# ---------------------------------------------------------------------------------------------------------------
# Cases: each gives a function without arguments, to be called again and again


def data(rows: int = ROWS, columns: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, D) and noisy values of a smooth function, (N,)."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0.0, 10.0, (rows, columns)).astype(np.float32)
    return X, (np.sin(X[:, 0]) + 0.3 * rng.normal(size=rows)).astype(np.float32)


def three(X, y=None):
    """Three sparse GPs summed, with sampled lengthscales."""
    Z = np.linspace(0.0, 10.0, POINTS, dtype=np.float32)[:, None]
    f = 0.0
    for name, start in (("a", 0.5), ("b", 1.0), ("c", 2.0)):
        lengthscale = numpyro.sample(f"{name}.lengthscale", dist.LogNormal(np.log(start), 0.3))
        f = f + npgp.SparseGP(name, npgp.RBF(lengthscale), Z).draw()(X)
    with npgp.plate("data", ROWS, rows=X.shape[0]):
        npgp.observe("y", f, npgp.Gaussian(variance=0.1), obs=y)


def trained(model: Callable, *arrays: np.ndarray):
    guide = npgp.AutoSparseGP(model, AutoNormal)
    svi = SVI(model, guide, Adam(0.01), TraceMeanField_ELBO())
    return guide, svi.get_params(svi.init(jax.random.key(0), *arrays))


def sample_posterior():
    X, y = data()
    guide, params = trained(three, X, y)
    return lambda: guide.sample_posterior(jax.random.key(1), params, X, y, sample_shape=(DRAWS,))


def predictive(model: Callable = three):
    X, y = data()
    guide, params = trained(three, X, y)
    draw = Predictive(model, guide=guide, params=params, num_samples=DRAWS, parallel=True)
    return lambda: draw(jax.random.key(1), X)


def joint():
    return predictive(npgp.joint(three))


def collapsed():
    X, y = data(400)

    def bound(lengthscale):
        Z = np.linspace(0.0, 10.0, 50, dtype=np.float32)[:, None]
        return npgp.CollapsedGP(npgp.RBF(lengthscale), X, Z, noise_variance=0.1).log_prob(y)

    program = jax.jit(jax.vmap(jax.value_and_grad(bound)))
    return lambda: program(jnp.linspace(0.5, 2.0, 30))


def steps(model: Callable, *arrays: np.ndarray):
    svi = SVI(model, npgp.AutoSparseGP(model, AutoNormal), Adam(0.01), TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), *arrays)
    update = jax.jit(svi.update)
    return lambda: update(state, *arrays)


def grouped():
    X, y = data(1000, 2)
    conditional = npgp.Grouped(npgp.median_split(X, 20))

    def model(X, y):
        f = 0.0
        for name in "abc":
            lengthscale = numpyro.sample(f"{name}.lengthscale", dist.LogNormal(0.0, 0.3))
            f = f + npgp.SparseGP(name, npgp.RBF(lengthscale), X[:30]).draw()(X)
        with npgp.plate("data", len(X)):
            npgp.observe("y", f, npgp.Gaussian(variance=0.1), obs=y, conditional=conditional)

    return steps(model, X, y)


def outputs():
    X, Y = data(200, 2)

    def model(X, Y):
        with npgp.plate("outputs", 8, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(1.0), X[:40]).draw()
        with npgp.plate("outputs", 8, dim=-2), npgp.plate("data", len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=Y)

    return steps(model, X, np.stack([Y] * 8))


def neighbors():
    X, y = data(2000, 2)
    found = npgp.neighbors.nearest_before(X, 15)

    def density(lengthscale):
        return npgp.neighbors.NNGP(npgp.RBF(lengthscale), X, found).log_prob(y)

    program = jax.jit(jax.vmap(jax.value_and_grad(density)))
    return lambda: program(jnp.linspace(0.5, 2.0, 4))


def dozen():
    x = np.eye(30, dtype=np.float32) + np.zeros((400, 1, 1), np.float32)

    def program(xs):
        total = 0.0
        for x in xs:
            L, _ = linalg.cholesky(x)
            total += jnp.sum(linalg.solve_lower(L, x)) + jnp.sum(linalg.inverse_factor(L))
        return total

    compiled = jax.jit(jax.value_and_grad(program))
    return lambda: compiled([x * (i + 1) for i in range(12)])


def singles():
    x = np.eye(300, dtype=np.float32)

    def program(xs):
        total = 0.0
        for x in xs:
            L = jnp.linalg.cholesky(x)
            total += jnp.sum(jax.scipy.linalg.solve_triangular(L, x, lower=True))
        return total

    compiled = jax.jit(jax.value_and_grad(program))
    return lambda: compiled([x * (i + 1) for i in range(12)])


def control():
    x = np.eye(30, dtype=np.float32) + np.zeros((400, 1, 1), np.float32)
    program = jax.jit(lambda xs: sum(jnp.sum(jnp.linalg.cholesky(x)) for x in xs))
    return lambda: program([x * (i + 1) for i in range(8)])


CASES: dict[str, Callable[[], Callable[[], object]]] = {
    "three GPs: sample_posterior": sample_posterior,
    "three GPs: Predictive, parallel": predictive,
    "three GPs: Predictive of joint, parallel": joint,
    "collapsed bounds and gradients, vmap": collapsed,
    "three GPs: grouped steps": grouped,
    "eight outputs: steps": outputs,
    "NNGP densities and gradients, vmap": neighbors,
    "12 batches of 400 × 30 × 30": dozen,
    "LAPACK's: 12 single matrices, 300 × 300": singles,
    CONTROL: control,
}


# ---------------------------------------------------------------------------------------------------------------
# Processes


def run(case: str, calls: int, limit: float) -> float | None:
    """Seconds that a fresh process takes for so many calls; ``None`` if it was killed at the limit."""
    began = time.monotonic()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            program = CASES[case]()
            for _ in range(calls):
                jax.block_until_ready(program())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() - began > limit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.02)
    if ended[1]:
        raise RuntimeError(f"{case}: the process failed; what is printed above says why.")
    return time.monotonic() - began


def outcome(case: str, runs: int, calls: int) -> Outcome:
    """Of so many processes."""
    limit, seconds = PATIENCE, []
    for _ in range(runs):
        took = run(case, calls, limit)
        if took is not None:
            seconds.append(took)
            limit = min(limit, max(LEAST, FACTOR * seconds[0]))
        elif not seconds:
            limit = LEAST  # the first has compiled the programs, if nothing else
    return Outcome(runs, runs - len(seconds), max(seconds, default=float("nan")))


def without_threads() -> None:
    """Start anew without the variables that are about threads."""
    if any(name in os.environ for name in THREADS):
        kept = {name: value for name, value in os.environ.items() if name not in THREADS}
        os.execve(sys.executable, [sys.executable, *sys.argv], kept)


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    report, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        keep_programs(Path(folder))
        for case in args.cases:
            found = outcome(case, args.runs, args.calls)
            print(f"{case}: {found.stopped} of {found.runs} stopped; at most {found.seconds:.1f} s", flush=True)
            report[case] = found._asdict()
            rows.append((case, f"{found.runs}", f"{found.stopped}", f"{found.seconds:.1f}"))
    where = f"jaxlib {jaxlib.__version__}, {CORES} cores, {args.calls} calls in each process"
    header = ("", "processes", "stopped for ever", "seconds at most")
    print(f"\n{where}\n\n{table(header, rows)}")
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(
            "# Programs with many factorizations side by side\n\n"
            f"`{command(__file__, argv)}`\n\n{where}; the last case is JAX's own.\n\n"
            f"{table(header, rows, markdown=True)}\n"
        )
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    without_threads()
    found = main()
    sys.exit(any(outcome["stopped"] for case, outcome in found.items() if case != CONTROL))
