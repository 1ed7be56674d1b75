"""npgp's programs: ordinary models under NumPyro's ``SVI``, trained by ``npgp.fit``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax_process import clear, configure, device_memory  # noqa: F401 (asked for by the worker)
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from problems import LEARNING_RATE, Problem

import npgp

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.costs import Fit, gplvm_rows, vnngp_rows
from common import one_blas_thread

#: Blocks and conditional of each structure; a group has so many rows.
GROUP_SIZE = 64
STRUCTURES = {
    "svgp": (1, "prior"),
    "tight": (1, "tight"),
    "grouped": (1, "grouped"),
    "SOLVE-GP": (2, "prior"),
}


def versions() -> dict[str, str]:
    return {
        "npgp": npgp.__version__,
        "numpyro": numpyro.__version__,
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }


def make(kind: str, problem: Problem | None, **options):
    if kind in STRUCTURES:
        assert problem is not None
        return SVGP(problem, kind)
    return Collapsed(problem) if kind == "collapsed" else {"GPLVM": gplvm_rows, "VNNGP": vnngp_rows}[kind](**options)


def model_of(start: dict[str, Any], kind: str, rows: int, jitter: float | None = None, group_size: int = GROUP_SIZE):
    """A GP with Gaussian noise; hyperparameters and inducing inputs are learned."""
    blocks, conditional = STRUCTURES[kind]
    positive = constraints.softplus_positive

    def model(X, y=None):
        params = {
            name: numpyro.param(name, value, constraint=constraints.real if "Z" in name else positive)
            for name, value in start.items()
        }
        kernel = npgp.Matern32(params["lengthscale"], variance=params["variance"])
        Z = [params[f"Z{i}"] for i in range(blocks)]
        f = npgp.SparseGP("f", kernel, Z, jitter=jitter).draw()
        with npgp.plate("data", rows, rows=X.shape[0]):
            npgp.observe(
                "y",
                f(X),
                npgp.Gaussian(variance=params["noise"]),
                obs=y,
                conditional=npgp.conditionals.Grouped(group_size) if conditional == "grouped" else conditional,
            )

    return model


def starts(problem: Problem, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the model's parameters, and of q; a second block begins at the prior."""
    dtype, blocks = problem.dtype, STRUCTURES[kind][0]
    model = {name: jnp.asarray(getattr(problem, name), dtype) for name in ("lengthscale", "variance", "noise")}
    model |= {f"Z{i}": jnp.asarray(Z) for i, Z in enumerate(np.split(problem.Z, blocks))}
    if blocks > 1:
        return model, {}
    return model, {"f.u.loc": jnp.asarray(problem.loc), "f.u.scale_tril": jnp.asarray(problem.scale_tril)}


class SVGP:
    """Adam on minibatches; also of SOLVE-GP, and with other conditionals."""

    def __init__(self, problem: Problem, kind: str = "svgp"):
        self.problem = problem
        start, self.q = starts(problem, kind)
        arrays: tuple[np.ndarray, ...] = (problem.X, problem.y)
        group_size = 1
        if kind == "grouped":
            group_size = min(GROUP_SIZE, problem.batch_size)
            rows = group_size * 2 ** int(np.log2(len(problem.y) // group_size))  # so that every group is full
            groups = npgp.sparse.median_split(problem.X[:rows], group_size)
            arrays = (groups.arrange(problem.X[:rows]), groups.arrange(problem.y[:rows]))
            assert groups.size == group_size and np.all(groups.mask)
        self.model = model_of(start, kind, len(arrays[0]), problem.jitter, group_size)
        self.guide = npgp.AutoSparseGP(self.model)
        self.svi = SVI(self.model, self.guide, npgp.adam(LEARNING_RATE), TraceMeanField_ELBO())
        batch_size = problem.batch_size // group_size * group_size
        device_arrays = [jnp.asarray(a) for a in arrays]
        self.fit = Fit(
            self.svi, *device_arrays, init_params=self.q or None, batch_size=batch_size, group_size=group_size
        )
        self.advance = self.fit.advance

    @property
    def seconds(self) -> float:
        return self.fit.seconds

    def elbo(self) -> float:
        state = self.svi.init(jax.random.key(0), *self.problem.batch, init_params=self.q)
        return -float(jax.jit(self.svi.evaluate)(state, *self.problem.batch))

    def predictor(self):
        X, X_new = jnp.asarray(self.problem.X[:1]), jnp.asarray(self.problem.X_new)
        posterior = npgp.posterior("f", self.model, self.guide, self.fit.result.params, X)
        predict = jax.jit(lambda posterior, X: posterior.mean_and_variance(X))
        return lambda: jax.block_until_ready(predict(posterior, X_new))


class Collapsed:
    """The collapsed bound of all rows, with its gradient."""

    def __init__(self, problem: Problem):
        start, _ = starts(problem, "svgp")
        X, y, jitter = jnp.asarray(problem.X), jnp.asarray(problem.y), problem.jitter

        @jax.jit
        def run(params, X, y):
            def bound(p):
                kernel = npgp.Matern32(p["lengthscale"], variance=p["variance"])
                return npgp.CollapsedGP(kernel, X, p["Z0"], noise_variance=p["noise"], jitter=jitter).log_prob(y)

            return jax.value_and_grad(bound)(params)

        self.run = lambda: run(start, X, y)

    def advance(self, steps: int) -> None:
        with one_blas_thread():
            for _ in range(steps):
                value = jax.block_until_ready(self.run())[0]
        if not jnp.isfinite(value):
            raise FloatingPointError(f"The bound is {value}.")


def train(
    file: str,
    epochs: int,
    batch_size: int,
    lengthscale: float,
    variance: float,
    noise: float,
    natural: float,
    learning_rate: float,
) -> dict[str, Any]:
    """
    npgp's recipe: the bound ``tight``, natural gradients, Adam whose learning rate decays along a cosine.

    :param natural: rate of natural gradients for q, with Adam for the rest.
    :return: ``curve``, a list of seconds of training so far, with compilation, and the mean negative log density of the
        test rows; ``compile_seconds``, those up to the end of the first step.
    """
    with np.load(file) as data:
        X, y, X_test, y_test, Z = (jnp.asarray(data[name], jnp.float32) for name in ("X", "y", "X_test", "y_test", "Z"))
    start = {
        "lengthscale": jnp.full(X.shape[1], lengthscale, X.dtype),
        "variance": jnp.asarray(variance, X.dtype),
        "noise": jnp.asarray(noise, X.dtype),
        "Z0": Z,
    }
    per_epoch = len(y) // batch_size
    began = time.perf_counter()
    model = model_of(start, "tight", len(y))
    guide = npgp.AutoSparseGP(model)
    optimizer = npgp.natural_gradient(natural, npgp.adam(learning_rate, epochs * per_epoch))
    fit = Fit(SVI(model, guide, optimizer, TraceMeanField_ELBO()), X, y, batch_size=batch_size)
    fit.advance(1)
    seconds = compile_seconds = time.perf_counter() - began

    @jax.jit
    def score(params):
        mean, variance = npgp.posterior("f", model, guide, params, X[:1]).mean_and_variance(X_test)
        total = variance + params["noise"]
        return 0.5 * jnp.mean(jnp.log(2 * jnp.pi * total) + (y_test - mean) ** 2 / total)

    curve, done = [], 1
    for epoch in range(1, epochs + 1):
        began = time.perf_counter()
        fit.advance(epoch * per_epoch - done)
        done = epoch * per_epoch
        seconds += time.perf_counter() - began
        curve.append([seconds, float(score(fit.result.params))])
    return {"curve": curve, "steps": done, "compile_seconds": compile_seconds}
