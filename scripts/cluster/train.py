#!/usr/bin/env python
"""Trains a sparse GP on all devices and machines it is started on, and goes on where it was when started again.

Every process runs this same program. Each sees the whole files, and reads the rows of its own devices.

    python scripts/cluster/train.py data/X.npy data/y.npy run1                          # all devices of one machine
    srun python scripts/cluster/train.py data/X.npy data/y.npy run1 --distributed       # under SLURM, see slurm.sh
    python scripts/cluster/train.py ... --distributed --coordinator host0:4321 --processes 4 --process 2   # by hand
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("inputs", type=Path, help=".npy file, (rows, columns)")
    parser.add_argument("targets", type=Path, help=".npy file, (rows,)")
    parser.add_argument("folder", type=Path, help="for checkpoints and the model; all processes must see it")
    parser.add_argument("--inducing", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8192, help="rows per step, of all devices together")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=5.0, help="between checkpoints")
    parser.add_argument("--distributed", action="store_true", help="several processes; the launcher is asked for them")
    parser.add_argument("--coordinator", help="host:port of process 0, where no launcher is known to JAX")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.distributed:  # before anything else asks for a device
        jax.distributed.initialize(args.coordinator, args.processes, args.process)

    X, y = (np.load(path, mmap_mode="r") for path in (args.inputs, args.targets))
    inputs, targets = npgp.Standardizer.of(X), npgp.Standardizer.of(y)
    rng = np.random.default_rng(0)  # the same in all processes
    start = inputs(X[np.sort(rng.choice(len(X), args.inducing, replace=False))])
    size = len(X)

    def model(X, y=None):
        positive = dict(constraint=dist.constraints.positive)
        lengthscale = numpyro.param("lengthscale", jnp.full(X.shape[1], X.shape[1] ** 0.5), **positive)
        kernel = numpyro.param("variance", 1.0, **positive) * npgp.Matern32(lengthscale)
        f = npgp.SparseGP(
            "f", kernel, npgp.features.Points(numpyro.param("Z", jnp.asarray(start))), init_scale=0.5
        ).draw()
        noise = numpyro.param("noise", 0.1, **positive)
        with npgp.plate("data", size, rows=X.shape[0]):
            npgp.observe("y", f(inputs(X)), npgp.Gaussian(variance=noise), obs=None if y is None else targets(y))

    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.02, args.steps), TraceMeanField_ELBO())
    result = npgp.fit(
        svi,
        jax.random.key(0),
        args.steps,
        X,
        y=y,
        batch_size=args.batch_size,
        sharding=npgp.training.Sharding(),
        checkpoints=npgp.training.Checkpoints(args.folder / "checkpoints", every=60 * args.minutes),
    )
    if jax.process_index() == 0:
        posterior = npgp.posterior("f", model, guide, result.params, jnp.asarray(X[:2]))
        noise = result.params["noise"]
        npgp.save(args.folder / "model.npz", dict(posterior=posterior, noise=noise, inputs=inputs, targets=targets))
        elbo = -result.losses[-100:].mean() / len(X)
        print(f"{len(result.losses)} steps, ELBO per row {elbo:.4f}; saved {args.folder / 'model.npz'}")


if __name__ == "__main__":
    main()
