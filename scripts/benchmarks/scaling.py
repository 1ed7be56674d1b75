#!/usr/bin/env python
"""How a training step is shared among devices: times, work per device, and whether the parameters come out the same.

Without accelerators the devices are simulated, parts of one CPU: times then say little, since they share its cores, and
what counts is the work of each device, which the compiler knows. Efficiency is the work on one device divided by that
on all k together; what all do alike, the factorization of K_uu above all, keeps it below one.

    python scripts/benchmarks/scaling.py --json out/scaling.json
    python scripts/benchmarks/scaling.py --batch-size 65536 --inducing 1024      # on a machine with GPUs
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, interleaved, one_blas_thread, table, whole, write_json


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--devices", type=whole, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--columns", type=whole, default=8)
    more = dict(default=8192, help="rows of a step, of all devices together")
    parser.shared("json", inducing=256, batch_size=more, steps=dict(default=5, help="per round"), repetitions=7)
    return parser.read(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # of use on a CPU alone
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(args.devices)}"
        os.environ["XLA_FLAGS"] = flags
    import jax

    jax.config.update("jax_enable_x64", jax.default_backend() == "cpu")
    return report(args)


def report(args: argparse.Namespace) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    import npgp
    from benchmarks.small_svgp import rows, small_svgp
    from npgp.training.inputs import Inputs
    from npgp.training.steps import Steps

    rng = np.random.default_rng(0)
    X, y = rows(rng, 4 * args.batch_size, args.columns)
    Z = rng.uniform(-2, 2, size=(args.inducing, args.columns))
    loops, work, taken = {}, {}, dict.fromkeys(args.devices, 0)
    key = jax.random.key(0)
    for k in args.devices:
        svi = small_svgp(len(X), Z)
        sharding = npgp.training.Sharding(jax.make_mesh((k,), ("rows",), devices=jax.devices()[:k]))
        inputs = Inputs((X,), {"y": y}, key, args.batch_size, None, sharding=sharding)
        first_args, first_kwargs = inputs.first_call()
        loop = Steps(svi, inputs, svi.init(key, *first_args, **first_kwargs), args.steps)
        chunk = inputs.place(inputs.read(0, args.steps))
        analysis = loop.prepare(chunk, args.steps).cost_analysis()
        loops[k], work[k] = (loop, inputs), float(analysis["flops"])

    def advance(k: int) -> float:
        """Seconds per step, without reading the rows."""
        loop, inputs = loops[k]
        chunk = inputs.place(inputs.read(taken[k], args.steps))
        began = time.perf_counter()
        loop.advance(chunk, args.steps)
        loop.commit()
        taken[k] += args.steps
        return (time.perf_counter() - began) / args.steps

    with one_blas_thread():
        seconds = interleaved({k: partial(advance, k) for k in args.devices}, args.repetitions, clock=None)

    def params(k):
        loop, inputs = loops[k]
        return jax.tree.leaves(loop.svi.get_params(inputs.sharding.fetch(loop.state)))

    one = args.devices[0]
    kind = jax.devices()[0].device_kind
    print(f"M = {args.inducing}, B = {args.batch_size}, on {kind} ({os.cpu_count()} cores)\n")
    figures = []
    for k in args.devices:
        pairs = zip(params(k), params(one), strict=True)
        figures.append(
            {
                "devices": k,
                "seconds": float(np.median(seconds[k])),
                "speed_up": float(np.median(seconds[one] / seconds[k])),
                "work": work[k] / work[one],
                "efficiency": one * work[one] / (k * work[k]),
                "difference": max(float(jnp.max(jnp.abs(a - b), initial=0.0)) for a, b in pairs),
            }
        )
    heads = ("devices", "ms a step", "speed-up", "work per device", "efficiency by work")
    cells = [
        (f["devices"], f"{1e3 * f['seconds']:.1f}", f"{f['speed_up']:.2f}", f"{f['work']:.3f}",
         f"{f['efficiency']:.2f}", f"{f['difference']:.1e}") for f in figures
    ]  # fmt: skip
    print(table((*heads, "largest difference of parameters"), cells, left=()))
    result = {"kind": kind, "inducing": args.inducing, "batch_size": args.batch_size, "rows": figures}
    write_json(args.json, result)
    return result


if __name__ == "__main__":
    main()
