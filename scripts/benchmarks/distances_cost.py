#!/usr/bin/env python
"""What distances by differences cost a training step, beside distances by matrix products.

Steps of SVI with a sparse GP, compiled twice: as they are (``npgp/kernels/distances.py``), and with the products that
were there before (commit b18a815), which are wrong for close rows: their parts on a grid in float32, plain expansion
in float64. Lengthscales, one for each column, and inducing points are learned. The two take turns; what is printed is
the median over rounds of the ratio of their times, new over old, with quartiles.

    python scripts/benchmarks/distances_cost.py --cpu-time --markdown out/distances.md
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp.kernels import stationary
from npgp.linalg import matmul

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, clock, command, interleaved, one_blas_thread, quartiles, table, whole, write_json

#: Steps of a turn.
STEPS = 5


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--kernels", nargs="+", default=["Matern12", "Matern32"])
    parser.add_argument("--columns", nargs="+", type=whole, default=[1, 3, 8, 20, 32, 40])
    parser.add_argument("--points", nargs="+", type=whole, default=[64, 256])
    parser.add_argument("--precisions", nargs="+", choices=("float32", "float64"), default=["float32"])
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file")
    parser.shared("json", "cpu-time", "quick", repetitions=40, rows=1024)
    quick = {"columns": [1, 3], "points": [16], "repetitions": 2, "rows": 64}
    return parser.read(argv, quick=quick)


# ---------------------------------------------------------------------------------------------------------------
# As it was


def by_products(X: jax.Array, X2: jax.Array | None = None, lengthscale: Any = 1.0, *, smooth: bool = True) -> jax.Array:
    """``squared_distances`` of commit b18a815."""
    center = lax.stop_gradient(jnp.mean(X, axis=0))
    scaled = (X - center) / lengthscale
    return _squared_distances(scaled, None if X2 is None else (X2 - center) / lengthscale)


@jax.jit
def _squared_distances(X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
    Z = X if X2 is None else X2
    if X.dtype == jnp.float64:
        r2 = _square_norm(X)[:, None] + _square_norm(Z) - 2.0 * matmul(X, Z.T)
    else:
        bits = max(int((22 - math.log2(X.shape[-1])) / 2), 1)
        largest = lax.stop_gradient(jnp.maximum(jnp.max(jnp.abs(X)), jnp.max(jnp.abs(Z))))
        exponent = jnp.frexp(largest)[1] - bits
        Xh, Zh = (_round_to_grid(A, exponent) for A in (X, Z))
        Xl, Zl = X - Xh, Z - Zh
        coarse = _square_norm(Xh)[:, None] + _square_norm(Zh) - 2.0 * matmul(Xh, Zh.T)
        if X.shape[-1] == 1:
            rest = Xh * Zl.T + Xl * (Zh + Zl).T
        else:
            rest = matmul(jnp.concatenate([Xh, Xl], -1), jnp.concatenate([Zl, Zh + Zl], -1).T)
        ends = jnp.sum((2.0 * Xh + Xl) * Xl, -1)[:, None] + jnp.sum((2.0 * Zh + Zl) * Zl, -1)
        r2 = coarse + (ends - 2.0 * rest)
    r2 = _not_negative(r2)
    return r2 if X2 is not None else r2 * (1.0 - jnp.eye(X.shape[0], dtype=r2.dtype))


@jax.custom_jvp
def _not_negative(r2: jax.Array) -> jax.Array:
    return jnp.maximum(r2, 0.0)


@_not_negative.defjvp
def _(primals, tangents):
    return _not_negative(*primals), tangents[0]


def _square_norm(A: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(A), axis=-1)


def _round_to_grid(A: jax.Array, exponent: jax.Array) -> jax.Array:
    return lax.stop_gradient(jnp.ldexp(jnp.round(jnp.ldexp(A, -exponent)), exponent))


# ---------------------------------------------------------------------------------------------------------------
# Steps


def step(kernel: str, columns: int, points: int, rows: int, dtype: Any, distances: Callable) -> Callable[[], object]:
    """A compiled step of SVI, with these distances."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (rows, columns)).astype(dtype)
    y = (np.sin(X[:, 0]) + 0.1 * rng.normal(size=rows)).astype(dtype)
    Z = rng.uniform(-2.0, 2.0, (points, columns)).astype(dtype)
    positive: dict[str, Any] = dict(constraint=constraints.positive)

    def model(X, y):
        k = getattr(npgp.kernels, kernel)(
            numpyro.param("lengthscale", jnp.full(columns, 2.0 * columns**0.5, dtype), **positive),
            variance=numpyro.param("variance", jnp.asarray(1.0, dtype), **positive),
        )
        f = npgp.SparseGP("f", k, npgp.features.Points(numpyro.param("Z", jnp.asarray(Z)))).draw()
        with npgp.plate("data", 10 * rows, rows=rows):
            noise = numpyro.param("noise", jnp.asarray(0.1, dtype), **positive)
            npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())
    jax.clear_caches()
    with mock.patch.object(stationary, "squared_distances", distances):
        state = svi.init(jax.random.key(0), X, y)
        program = jax.jit(svi.update).lower(state, X, y).compile()
    jax.clear_caches()

    def run():
        after = state
        for _ in range(STEPS):
            after, loss = program(after, X, y)
        return loss

    return run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    report: dict[str, Any] = {"command": command(__file__, argv), "figures": []}
    rows = []
    for precision in args.precisions:
        with jax.enable_x64(precision == "float64"), one_blas_thread():
            for kernel in args.kernels:
                for points in args.points:
                    for columns in args.columns:
                        given = (kernel, columns, points, args.rows, np.dtype(precision).type)
                        runs = {
                            "new": step(*given, stationary.squared_distances),
                            "old": step(*given, by_products),
                        }
                        seconds = interleaved(runs, args.repetitions, clock(args.cpu_time))
                        ratio = quartiles(seconds["new"] / seconds["old"])
                        found = {"seconds": float(np.median(seconds["new"])) / STEPS, "ratio": ratio}
                        report["figures"].append(
                            dict(precision=precision, kernel=kernel, points=points, columns=columns, **found)
                        )
                        low, middle, high = found["ratio"]
                        rows.append(
                            (precision, kernel, points, columns, f"{1e3 * found['seconds']:.2f}")
                            + (f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
                        )
                        print(*rows[-1], sep="  ", flush=True)
    header = ("", "kernel", "points", "columns", "ms, new", "new / old", "quartiles")
    print(table(header, rows))
    write_json(args.json, report)
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(
            f"# Steps with distances by differences\n\n`{report['command']}`\n\n"
            + table(header, rows, left=(0, 1), markdown=True)
            + "\n"
        )
    return report


if __name__ == "__main__":
    main()
