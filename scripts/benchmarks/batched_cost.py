#!/usr/bin/env python
"""What it costs that matrices of a batch are factorized one after the other, and not by one call of LAPACK's.

Steps of models with batches of factorizations, each compiled twice: as they are, and with LAPACK's batched calls in
their place, which on two cores and jaxlib 0.10 may wait for one another for ever (``hangs.py``; this script gives JAX
more threads). The two take turns; what is printed is the median over rounds of the ratio of their times, with
quartiles, and the instructions of the two programs. In float32.

    python scripts/benchmarks/batched_cost.py --json out/batched_cost.json
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.optim import Adam

import npgp
from npgp import linalg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, clock, interleaved, one_blas_thread, quartiles, table, write_json


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.shared("json", "cpu-time", repetitions=60)
    return parser.read(argv)


@contextmanager
def lapack_batches() -> Iterator[None]:
    """LAPACK's batched calls in the place of loops."""

    names = ("_factor", "_inverse", "_substitute", "_substitute_transposed", "_solve", "_solve_transposed")
    replaced = {name: inspect.unwrap(getattr(linalg, name)) for name in names}
    jax.clear_caches()
    with mock.patch.multiple(linalg, **replaced):
        yield
    jax.clear_caches()


# ---------------------------------------------------------------------------------------------------------------
# Models: a function of arrays, and the arrays


def data(rows: int, columns: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, D) and noisy values of a smooth function, (N,)."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (rows, columns)).astype(np.float32)
    return X, (np.sin(3.0 * X[:, 0]) + 0.3 * rng.normal(size=rows)).astype(np.float32)


def positive(name: str, start: float) -> jax.Array:
    return numpyro.param(name, jnp.asarray(start), constraint=constraints.positive)


def kernel() -> npgp.RBF:
    return npgp.RBF(positive("lengthscale", 0.7), variance=positive("variance", 1.0))


def steps(model: Callable, *arrays: np.ndarray, elbo=None):
    svi = SVI(model, npgp.AutoSparseGP(model), Adam(0.01), elbo or TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), *arrays)
    return svi.update, (state, *arrays)


def grouped(points: int, rows: int, size: int | None):
    X, y = data(rows)
    conditional = npgp.Grouped(npgp.median_split(X, size)) if size else "tight"

    def model(X, y):
        f = npgp.SparseGP("f", kernel(), X[:points]).draw()
        with npgp.plate("data", rows):
            npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y, conditional=conditional)

    return steps(model, X, y)


def vnngp():
    X, y = data(2000)
    found = npgp.neighbors.nearest_before(X, 15)
    own = np.arange(len(X))[:, None]

    def model(X, near, y):
        f = npgp.VNNGP("f", kernel(), data(2000)[0], found, batch_size=512).draw()
        with npgp.plate("data", 2000, rows=X.shape[0]):
            npgp.observe("y", f(X, near), npgp.Gaussian(variance=0.1), obs=y)

    return steps(model, X[:512], own[:512], y[:512])


def nngp():
    X, y = data(2000)
    found = npgp.neighbors.nearest_before(X, 15)

    def density(lengthscale, y):
        return npgp.neighbors.NNGP(npgp.RBF(lengthscale), jnp.asarray(X), found).log_prob(y)

    return jax.value_and_grad(density), (jnp.asarray(0.7), y)


def outputs(elbo):
    X, y = data(500)
    Y = np.stack([np.roll(y, i) for i in range(8)])

    def model(X, Y):
        with npgp.plate("outputs", 8, dim=-2):
            f = npgp.SparseGP("f", kernel(), X[:100]).draw()
        with npgp.plate("outputs", 8, dim=-2), npgp.plate("data", len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=Y)

    return steps(model, X, Y, elbo=elbo)


def collapsed():
    X, y = data(1000)

    def bound(lengthscale):
        return npgp.CollapsedGP(npgp.RBF(lengthscale), X, X[:100], noise_variance=0.1).log_prob(y)

    return jax.vmap(jax.value_and_grad(bound)), (jnp.linspace(0.5, 1.0, 8),)


CASES: dict[str, Callable] = {
    "no batch: SVGP, M = 128, B = 1000": lambda: grouped(128, 1000, None),
    "grouped, M = 128, B = 1000, g = 4": lambda: grouped(128, 1000, 4),
    "grouped, M = 128, B = 1000, g = 16": lambda: grouped(128, 1000, 16),
    "grouped, M = 512, B = 1024, g = 64": lambda: grouped(512, 1024, 64),
    "VNNGP, k = 15, B = 512": vnngp,
    "NNGP and gradient, k = 15, N = 2000": nngp,
    "eight outputs, M = 100": lambda: outputs(TraceMeanField_ELBO()),
    "eight outputs, M = 100, Trace_ELBO": lambda: outputs(Trace_ELBO()),
    "eight collapsed bounds and gradients, M = 100": collapsed,
}


def compiled(case: str):
    """The program with its arguments, and its number of instructions."""
    function, arrays = CASES[case]()
    program = jax.jit(function).lower(*arrays).compile()
    text = program.as_text() or ""
    return lambda: program(*arrays), sum(" = " in line.partition("(")[0] for line in text.splitlines())


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    report = {}
    with jax.enable_x64(False), one_blas_thread():
        for case in args.cases:
            ours, instructions = compiled(case)
            with lapack_batches():
                theirs, before = compiled(case)
            seconds = interleaved({"ours": ours, "theirs": theirs}, args.repetitions, clock(args.cpu_time))
            ratios = quartiles(seconds["ours"] / seconds["theirs"])
            report[case] = dict(
                ratio=ratios,
                ms=1e3 * float(np.median(seconds["ours"])),
                instructions=instructions,
                instructions_with_batches=before,
            )
            print(case, *(f"{r:.2f}" for r in ratios), f"{report[case]['ms']:.1f} ms", flush=True)
    rows = [
        (
            case,
            "{1:.2f} ({0:.2f}–{2:.2f})".format(*found["ratio"]),
            f"{found['ms']:.1f}",
            f"{found['instructions']:,}",
            f"{found['instructions_with_batches']:,}",
        )
        for case, found in report.items()
    ]
    print()
    print(table(("", "time, of batched calls'", "ms", "instructions", "with batched calls"), rows))
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
