"""
Programs of training are as large as ``sizes.tsv`` says: operations that JAX hands to XLA, within a twentieth.

What is computed twice, or for nothing, shows here before anybody waits for it. A change that makes a program larger or
smaller on purpose renews the table of the installed JAX: ``.venv/bin/python tests/ground/test_sizes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

TABLE = Path(__file__).with_name("sizes.tsv")
VERSION = ".".join(jax.__version__.split(".")[:2])
ROWS = 32
Z = np.linspace(0.0, 1.0, 10, dtype=np.float32).reshape(5, 2)
X, Y = np.zeros((ROWS, 2), np.float32), np.zeros(ROWS, np.float32)


def regression(likelihood: Any, functions: int = 1, conditional: Any = "tight", **options: Any) -> Callable[..., None]:
    """GPs with a sampled lengthscale, observed in batches."""

    def model(X: Any, y: Any = None) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = [npgp.SparseGP(f"f{i}", npgp.Matern32(lengthscale), Z, **options).draw()(X) for i in range(functions)]
        with npgp.plate("data", 1000, rows=len(X)):
            npgp.observe("y", f[0] if functions == 1 else tuple(f), likelihood(), obs=y, conditional=conditional)

    return model


def through_neighbors(X: Any, y: Any = None) -> None:
    f = npgp.VNNGP("f", npgp.Matern32(1.0), Z, npgp.neighbors.nearest_before(Z, 2)).draw()
    with npgp.plate("data", 1000, rows=len(X)):
        npgp.observe("y", f(X, np.tile(np.arange(2), (len(X), 1))), npgp.Gaussian(variance=0.1), obs=y)


def layers(X: Any, y: Any = None) -> None:
    both = [npgp.Layer(npgp.RBF(1.0), Z, mean=np.ones((2, 1), np.float32)), npgp.Layer(npgp.RBF(1.0), Z[:, :1])]
    deep = npgp.DeepGP("deep", both).draw()
    with npgp.plate("data", 1000, rows=len(X)):
        npgp.observe("y", deep(X), npgp.Gaussian(variance=0.1), obs=y)


def step(model: Callable[..., None], optimizer: Any = None, **guide: Any) -> Callable[[], str]:
    """A step of SVI."""

    def lowered() -> str:
        svi = SVI(model, npgp.AutoSparseGP(model, **guide), optimizer or npgp.adam(0.01), TraceMeanField_ELBO())
        state = jax.eval_shape(lambda: svi.init(jax.random.key(0), X, Y))
        return jax.jit(svi.update).lower(state, X, Y).as_text()

    return lowered


def bound(**options: Any) -> Callable[[], str]:
    """A collapsed bound and its gradient."""

    def lowered() -> str:
        def value(lengthscale: jax.Array, X: jax.Array, y: jax.Array) -> jax.Array:
            given = {"noise_variance": 0.1} | options if "likelihood" not in options else options
            return npgp.CollapsedGP(npgp.Matern32(lengthscale), X, [Z, Z[:2]], **given).log_prob(y)

        return jax.jit(jax.value_and_grad(value)).lower(jnp.ones(()), X, Y).as_text()

    return lowered


grouped = npgp.conditionals.Grouped(8)
PROGRAMS: dict[str, Callable[[], str]] = {
    "Gaussian": step(regression(lambda: npgp.Gaussian(variance=0.1))),
    "Gaussian, independent": step(regression(lambda: npgp.Gaussian(variance=0.1)), dependence="independent"),
    "Gaussian, grouped": step(regression(lambda: npgp.Gaussian(variance=0.1), conditional=grouped)),
    "Gaussian, natural": step(
        regression(lambda: npgp.Gaussian(variance=0.1)), npgp.natural_gradient(0.5, npgp.adam(0.01))
    ),
    "Poisson": step(regression(npgp.Poisson)),
    "Poisson, grouped": step(regression(npgp.Poisson, conditional=grouped)),
    "Student-t": step(regression(lambda: npgp.StudentT(df=4.0, scale=0.1))),
    "heteroscedastic": step(regression(npgp.likelihoods.HeteroscedasticGaussian, 2)),
    "softmax": step(regression(lambda: npgp.likelihoods.Softmax(3), 3)),
    "VNNGP": step(through_neighbors),
    "deep GP": step(layers),
    "collapsed": bound(),
    "collapsed, grouped": bound(conditional=grouped),
    "collapsed, Poisson": bound(likelihood=npgp.Poisson()),
}


def size(program: str) -> int:
    """Operations of a program."""
    return PROGRAMS[program]().count(" = ")


def read() -> dict[tuple[str, str], int]:
    """Of each version of JAX and each program, as far as they were counted."""
    lines = (line.split("\t") for line in TABLE.read_text().splitlines()[1:]) if TABLE.exists() else ()
    return {(version, program): int(count) for version, program, count in lines}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_are_as_large_as_they_were(program):
    known = read()
    if VERSION not in {version for version, _ in known}:
        pytest.skip(f"sizes.tsv has no JAX {VERSION}")
    assert size(program) == pytest.approx(known[VERSION, program], rel=0.05)


if __name__ == "__main__":
    known = read() | {(VERSION, program): size(program) for program in PROGRAMS}
    table = [f"{version}\t{program}\t{known[version, program]}" for version, program in sorted(known)]
    TABLE.write_text("\n".join(["JAX\tprogram\toperations", *table]) + "\n")
