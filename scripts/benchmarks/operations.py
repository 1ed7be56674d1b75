#!/usr/bin/env python
"""Counts the operations of compiled training steps, of a few small models: did a change of code change them?

Equations are those of the step's jaxpr, with those of all jaxprs inside it as often as they occur; instructions those
of the program that XLA makes of it, all its computations together; FLOPs the floating-point operations that XLA says it
takes, where bodies of loops count once. Nothing is timed and nothing is trained, so the numbers are the same from run
to run; the last two depend on the versions of JAX, on XLA's flags and on the device. In float32.

    python scripts/benchmarks/operations.py --json out/operations.json          half a minute or so on two cores
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.optim import Adam

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, table, write_json

#: Rows and columns of the regression data, inducing points in a block, rows of a minibatch and of a group.
ROWS, COLUMNS, POINTS, BATCH, GROUP = 500, 2, 32, 100, 8
#: Rows, columns, latent dimensions and inducing points of the GPLVM.
LATENT_ROWS, OUTPUTS, LATENT_DIM, LATENT_POINTS = 60, 6, 3, 10


class Case(NamedTuple):
    """A model with its guide and optimizer, and the data of a step."""

    svi: SVI
    arrays: tuple[np.ndarray, ...]


class Operations(NamedTuple):
    """Of one step: equations of its jaxpr, instructions and floating-point operations of its program."""

    equations: int
    instructions: int
    flops: float


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.shared("json")
    return parser.read(argv)


# ---------------------------------------------------------------------------------------------------------------
# Models


def data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, D) and noisy values of a smooth function, (N,)."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (ROWS, COLUMNS)).astype(np.float32)
    y = np.sin(3.0 * X[:, 0]) + 0.5 * X[:, 1] + 0.3 * rng.normal(size=ROWS)
    return X, y.astype(np.float32)


def regression(X: np.ndarray, blocks: int = 1, conditional: npgp.Conditional | str = "tight") -> SVI:
    """
    A GP with Gaussian noise, all hyperparameters and inducing inputs learned, and minibatches as arguments.

    :param X: inputs, whose first rows are the inducing inputs, block by block.
    :param blocks: how many there are, each with a dense covariance.
    """

    def positive(name: str, start: float) -> jax.Array:
        return numpyro.param(name, jnp.asarray(start), constraint=constraints.positive)

    def model(X: jax.Array, y: jax.Array | None = None) -> None:
        inducing = [numpyro.param(f"Z{i}", jnp.asarray(Z)) for i, Z in enumerate(start)]
        f = npgp.SparseGP(
            "f", npgp.RBF(positive("lengthscale", 1.0), variance=positive("variance", 1.0)), inducing
        ).draw()
        with npgp.plate("data", ROWS, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=positive("noise", 0.1)), obs=y, conditional=conditional)

    start = np.split(X[: blocks * POINTS], blocks)
    return SVI(model, npgp.AutoSparseGP(model), Adam(0.01), TraceMeanField_ELBO())


def svgp() -> Case:
    X, y = data()
    return Case(regression(X), (X[:BATCH], y[:BATCH]))


def solve_gp() -> Case:
    X, y = data()
    return Case(regression(X, blocks=2), (X, y))


def in_groups() -> Case:
    X, y = data()
    return Case(regression(X, conditional=npgp.Grouped(npgp.median_split(X, GROUP))), (X, y))


def gplvm() -> Case:
    rng = np.random.default_rng(1)
    latents, weights = rng.normal(size=(LATENT_ROWS, 2)), rng.normal(size=(2, OUTPUTS))
    Y = (np.sin(latents @ weights) + 0.1 * rng.normal(size=(LATENT_ROWS, OUTPUTS))).astype(np.float32)
    pair = npgp.BayesianGPLVM(npgp.gplvm.pca_start(jax.random.key(0), Y, LATENT_DIM, LATENT_POINTS))
    return Case(SVI(pair.model, pair.guide, Adam(0.01), TraceMeanField_ELBO()), (Y,))


CASES: dict[str, Callable[[], Case]] = {
    "SVGP, minibatch": svgp,
    "SOLVE-GP": solve_gp,
    "SVGP, grouped": in_groups,
    "Bayesian GPLVM": gplvm,
}


# ---------------------------------------------------------------------------------------------------------------
# Counts


def inner(value: Any) -> Iterator[Any]:
    """The jaxprs in a parameter of an equation."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from inner(item)
    elif hasattr(value, "eqns"):
        yield value


def equations(jaxpr: Any) -> int:
    """Number of equations, with those of the jaxprs inside."""
    inside = (part for eqn in jaxpr.eqns for value in eqn.params.values() for part in inner(value))
    return len(jaxpr.eqns) + sum(map(equations, inside))


def operations(case: Case) -> Operations:
    """Operations of one step."""
    state = case.svi.init(jax.random.key(0), *case.arrays)
    compiled = jax.jit(case.svi.update).lower(state, *case.arrays).compile()
    return Operations(
        equations(jax.make_jaxpr(case.svi.update)(state, *case.arrays)),
        sum(" = " in line.partition("(")[0] for line in (compiled.as_text() or "").splitlines()),
        (compiled.cost_analysis() or {})["flops"],
    )


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    with jax.enable_x64(False):
        found = {name: operations(CASES[name]()) for name in args.models}
    print(table(("", *Operations._fields), [(name, *(f"{n:,.0f}" for n in o)) for name, o in found.items()]))
    report = {name: o._asdict() for name, o in found.items()}
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
