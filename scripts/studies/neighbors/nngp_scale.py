#!/usr/bin/env python
"""What a nearest-neighbor GP costs as sites grow to a million: seconds and memory, in float32.

Sites are uniform in the unit square, each size in a process of its own. "search" is the max-min order and the
neighbors, found once; "density", "gradient" (of lengthscale, variance, noise and the density itself) and "draw" are
times of one call, compiled before. Memory is the most that the process ever held, all of Python and JAX included.

    python scripts/studies/neighbors/nngp_scale.py --json out/nngp_scale.json
    python scripts/studies/neighbors/nngp_scale.py --rows 10000 100000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, clock, in_its_own_process, one_blas_thread, peak_memory, whole, write_json

ROWS = (10_000, 100_000, 1_000_000)
COLUMNS = {"search_seconds": 1, "density_seconds": 3, "gradient_seconds": 3, "draw_seconds": 3, "memory_mib": 0}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--neighbors", "--neighbours", type=whole, default=15, metavar="K")
    parser.add_argument("--ordering", choices=["maxmin", "random", "coordinate"], default="maxmin")
    rows = dict(nargs="+", default=list(ROWS), help="numbers of sites")
    repetitions = dict(default=3, help="of each call; the median is told")
    parser.shared("cpu-time", "here", "json", rows=rows, repetitions=repetitions)
    return parser.read(argv)


def measure(rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Times and memory at one number of sites, and the density per site, which tells of mistakes."""
    now = clock(args.cpu_time)
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(rows, 2)).astype(np.float32)
    y = rng.normal(size=rows).astype(np.float32)
    began = now()
    neighbors = npgp.neighbors.nearest_before(X, args.neighbors, ordering=args.ordering, rng_key=jax.random.key(0))
    figures: dict[str, Any] = {"rows": rows, "search_seconds": now() - began}

    def gp(theta, X, neighbors):
        lengthscale, variance, noise = jnp.exp(theta)
        return npgp.neighbors.ResponseNNGP(
            npgp.Matern32(lengthscale, variance=variance), X, neighbors, noise_variance=noise
        )

    def density(theta, X, neighbors, y):
        return gp(theta, X, neighbors).log_prob(y)

    theta = jnp.log(jnp.array([0.05, 1.0, 0.1], jnp.float32))
    calls = {
        "density_seconds": (density, (theta, X, neighbors, y)),
        "gradient_seconds": (jax.value_and_grad(density), (theta, X, neighbors, y)),
        "draw_seconds": (lambda key, *a: gp(*a).sample(key), (jax.random.key(0), theta, X, neighbors)),
    }
    for name, (call, arguments) in calls.items():
        figures[name], result = timed(jax.jit(call), jax.device_put(arguments), args.repetitions, now)
        if name == "density_seconds":
            figures["density_per_site"] = float(result) / rows
    figures["memory_mib"] = peak_memory() / 2**20
    return figures


def timed(call: Callable, arguments: tuple, repetitions: int, now: Callable[[], float]) -> tuple[float, Any]:
    """Median seconds of a call once it is compiled, and what it returns."""
    result = jax.block_until_ready(call(*arguments))
    seconds = []
    for _ in range(repetitions):
        began = now()
        jax.block_until_ready(call(*arguments))
        seconds.append(now() - began)
    return float(np.median(seconds)), result


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    jax.config.update("jax_enable_x64", False)
    print(f"NNGP, k = {args.neighbors}, {args.ordering} order, Matérn-3/2, two columns, float32\n")
    print("     sites" + "".join(key.replace("_seconds", ", s").replace("_mib", ", MiB").rjust(14) for key in COLUMNS))
    sizes = []
    with one_blas_thread():
        for rows in sorted(args.rows):
            if args.here:
                sizes.append(measure(rows, args))
            else:
                sizes += in_its_own_process(__file__, [*argv, "--rows", str(rows), "--here"])["sizes"]
            cells = "".join(f"{sizes[-1][key]:14.{digits}f}" for key, digits in COLUMNS.items())
            print(f"{rows:>10}{cells}", flush=True)
    report = {"neighbors": args.neighbors, "ordering": args.ordering, "sizes": sizes}
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
