"""The time of a step of minibatch SVI with ``grouped``, against ``tight``, for ``regression_study.py``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from common import clock, note, table
from studies.regression.collapsed_fits import in_turn
from studies.regression.minibatch import regression_model


def steps(args: argparse.Namespace) -> list[dict]:
    """Time of a step of minibatch SVI, by number of inducing points and size of groups."""
    batch, sizes, group_sizes = (128, (16,), (16,)) if args.quick else (1024, (128, 256, 512), (8, 16, 32, 64))
    print("A STEP OF MINIBATCH SVI\n")
    note(
        f"numpyro's SVI with AutoSparseGP and Adam, float32, batches of {batch} rows with 8 columns, Matérn-3/2 with "
        "ARD; hyperparameters, inducing inputs and q(u) are all learned. Median milliseconds, and the ratio to tight."
    )
    print()
    report = []
    with jax.enable_x64(False):
        for inducing in sizes:
            calls = {c: svi_step(inducing, batch, c, 1) for c in ("prior", "tight")}
            calls |= {f"groups of {g}": svi_step(inducing, batch, "grouped", g) for g in group_sizes}
            measured = in_turn(calls, "tight", args.repetitions, clock(args.cpu_time))
            default = npgp.sparse.groups.default_size(inducing)
            report.append({"inducing": inducing, "default_size": default, "measured": {}})
            for name, (ms, ratio) in measured.items():
                report[-1]["measured"][name] = {"ms": ms, "ratio": ratio}
            print(f"M = {inducing}; the library's default size of groups is {default}")
            print(
                table(
                    ("", "ms", "ratio"), [(name, f"{ms:.1f}", f"{ratio:.2f}") for name, (ms, ratio) in measured.items()]
                ),
                end="\n\n",
            )
    return report


def svi_step(inducing: int, batch: int, conditional: str, size: int) -> Callable[[], Any]:
    """A compiled step on one batch, laid out group after group."""
    rng = np.random.default_rng(0)
    rows = 8 * batch
    X = rng.uniform(-1.7, 1.7, (rows, 8)).astype(np.float32)
    Z = X[rng.choice(rows, inducing, replace=False)]
    groups = npgp.median_split(X, size)
    # Numbers of rows are powers of two, so that groups are full and nothing is padded.
    assert groups.size == size
    x, mask = groups.arrange(X), groups.mask.ravel()
    y = np.sin(2.0 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * rng.normal(size=rows).astype(np.float32)
    start = {"lengthscale": jnp.full(8, 2.0), "variance": 1.0, "noise_variance": 0.1, "inducing0": jnp.asarray(Z)}
    model = regression_model(start, ("dense",), conditional, size)
    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO(), size=rows)
    arrays = [jnp.asarray(a[:batch]) for a in (x, y.astype(np.float32))]
    if conditional == "grouped":
        arrays.append(jnp.asarray(mask[:batch]))
    state = jax.jit(svi.init)(jax.random.key(0), *arrays)
    step = jax.jit(lambda state: svi.update(state, *arrays))
    return lambda: step(state)
