#!/usr/bin/env python
"""How a training step is shared among devices: times, work per device, and whether the parameters come out the same.

Without accelerators the devices are simulated, parts of one CPU: times then say little, since they share its cores, and
what counts is the work of each device, which the compiler knows. Efficiency is the work on one device divided by that
on all k together; what all do alike, the factorisation of K_uu above all, keeps it below one.

    python scripts/benchmarks/scaling.py --json out/scaling.json
    python scripts/benchmarks/scaling.py --batch-size 65536 --inducing 1024      # on a machine with GPUs
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--inducing", type=int, default=256)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8192, help="rows per step, of all devices together")
    parser.add_argument("--steps", type=int, default=5, help="per round")
    parser.add_argument("--repetitions", type=int, default=7, help="rounds in which numbers of devices take turns")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(argv)


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
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, TraceMeanField_ELBO

    import npgp
    from npgp.training.inputs import Inputs
    from npgp.training.loop import one_blas_thread
    from npgp.training.steps import Steps

    size, D = 4 * args.batch_size, args.columns
    rng = np.random.default_rng(0)
    X, Z = rng.uniform(-2, 2, size=(size, D)), rng.uniform(-2, 2, size=(args.inducing, D))
    y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=size)

    def model(X, y=None):
        positive = dict(constraint=dist.constraints.positive)
        kernel = npgp.Matern32(numpyro.param("lengthscale", jnp.full(D, 2.0), **positive))
        f = npgp.SparseGP("f", kernel, npgp.Points(numpyro.param("Z", jnp.asarray(Z)))).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(numpyro.param("noise", 0.1, **positive)), obs=y)

    loops, work = {}, {}
    key = jax.random.key(0)
    for k in args.devices:
        svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())
        sharding = npgp.Sharding(jax.make_mesh((k,), ("rows",), devices=jax.devices()[:k]))
        inputs = Inputs((X,), {"y": y}, key, args.batch_size, None, sharding=sharding)
        first_args, first_kwargs = inputs.first_call()
        loop = Steps(svi, inputs, svi.init(key, *first_args, **first_kwargs), args.steps)
        chunk = inputs.place(inputs.read(0, args.steps))
        analysis = loop._run.lower(loop.state, inputs.arrays, chunk, args.steps).compile().cost_analysis()
        loops[k], work[k] = (loop, inputs), float(analysis["flops"])

    seconds: dict[int, list[float]] = {k: [] for k in args.devices}
    with one_blas_thread():
        for i in range(args.repetitions + 1):  # the first compiles
            for k, (loop, inputs) in loops.items():
                chunk = inputs.place(inputs.read(i * args.steps, args.steps))
                began = time.perf_counter()
                loop.advance(chunk, args.steps)
                loop.commit()
                if i:
                    seconds[k].append((time.perf_counter() - began) / args.steps)

    def params(k):
        loop, inputs = loops[k]
        return jax.tree.leaves(loop.svi.get_params(inputs.sharding.fetch(loop.state)))

    one = args.devices[0]
    kind = jax.devices()[0].device_kind
    print(f"M = {args.inducing}, B = {args.batch_size}, on {kind} ({os.cpu_count()} cores)\n")
    print("devices  ms a step  speed-up  work per device  efficiency by work  largest difference of parameters")
    rows = []
    for k in args.devices:
        pairs = zip(params(k), params(one), strict=True)
        row = {
            "devices": k,
            "seconds": float(np.median(seconds[k])),
            "speed_up": float(np.median(np.array(seconds[one]) / np.array(seconds[k]))),
            "work": work[k] / work[one],
            "efficiency": one * work[one] / (k * work[k]),
            "difference": max(float(jnp.max(jnp.abs(a - b), initial=0.0)) for a, b in pairs),
        }
        rows.append(row)
        print(
            f"{k:7d}  {1e3 * row['seconds']:9.1f}  {row['speed_up']:8.2f}  {row['work']:15.3f}"
            f"  {row['efficiency']:18.2f}  {row['difference']:.1e}"
        )
    result = {"kind": kind, "inducing": args.inducing, "batch_size": args.batch_size, "rows": rows}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
