#!/usr/bin/env python
"""What parts of training cost: variants of a step, or of a bound with its gradient, timed in turn.

    python scripts/benchmarks/costs.py                     what can be measured
    python scripts/benchmarks/costs.py vif                 one of them
    python scripts/benchmarks/costs.py nngp --rows 1000000

Programs to compare take turns in random order; ratios are to the first, of runs of the same turn: median and quartiles.
In float32 if nothing else is said, with one thread of LAPACK. Peak memory is that of this process: for the memory of
one variant run it alone (``--rows``, ``--devices``).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.sharding import NamedSharding, PartitionSpec
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    Arguments,
    clock,
    interleaved,
    interleaved_steps,
    one_blas_thread,
    peak_memory,
    quartiles,
    table,
    whole,
    write_json,
)

#: What is timed together: its title, and calls by the variants' names.
Groups = Iterator[tuple[str, dict[str, Callable[..., Any]]]]
#: Columns of inputs; of a GPLVM's data, its latent inputs; neighbors of a site.
COLUMNS, OUTPUTS, LATENT_DIM, NEIGHBORS = 8, 12, 10, 15
#: The most steps of a device call.
MOST_STEPS = 1000


def positive(name: str, value: Any) -> jax.Array:
    return numpyro.param(name, value, constraint=constraints.softplus_positive)


def data(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and noisy values of a smooth function of some columns."""
    X = rng.uniform(-2.0, 2.0, (rows, COLUMNS))
    y = np.sin(2.0 * X[:, 0]) + X[:, 1] * X[:, -1] + 0.3 * rng.normal(size=rows)
    dtype = jnp.result_type(float)
    return X.astype(dtype), y.astype(dtype)


def svgp(size: int, Z: np.ndarray) -> SVI:
    """Adam on minibatches of so many rows in all; lengthscales, inducing inputs and noise variance are learned."""

    def model(X, y=None):
        kernel = npgp.Matern32(positive("lengthscale", jnp.full(COLUMNS, 2.0)))
        f = npgp.SparseGP("f", kernel, numpyro.param("Z", jnp.asarray(Z))).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=positive("noise", 0.1)), obs=y)

    return SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())


class Fit:
    """
    ``npgp.fit``, that goes on where it was; from the second call on, its program is compiled.

    :param svi: model, guide, optimizer and loss.
    :param arrays: the data.
    :param options: of ``npgp.fit``.
    """

    def __init__(self, svi: SVI, *arrays, init_params: dict[str, Any] | None = None, **options):
        self.svi, self.arrays = svi, arrays
        self.options = {"steps_per_call": MOST_STEPS, "progress": False} | options
        self.begin: dict[str, Any] = {"init_params": init_params}
        self.result: Any = None

    def advance(self, steps: int) -> float:
        """Take steps: seconds of each."""
        self.result = npgp.fit(self.svi, jax.random.key(0), steps, *self.arrays, **self.begin, **self.options)
        self.begin = {"init_state": self.result.state}
        return self.seconds / steps

    @property
    def seconds(self) -> float:
        """Of the last call's steps, without its tracing of them, which each call of ``fit`` does once."""
        return self.result.seconds.steps


# ---------------------------------------------------------------------------------------------------------------
# The registry


def stepper(svi: SVI, arrays: Sequence[jax.Array], now: Callable[[], float]) -> Callable[[int], float]:
    """A function from a number of steps, which it takes from where it was, to the seconds of one."""
    state = jax.jit(svi.init)(jax.random.key(0), *arrays)

    @jax.jit
    def run(state, steps):
        return jax.lax.fori_loop(0, steps, lambda _, state: svi.update(state, *arrays)[0], state)

    def advance(steps: int) -> float:
        nonlocal state
        began = now()
        state = jax.block_until_ready(run(state, steps))
        return (now() - began) / steps

    return advance


def summed(functions: int, rows: int, inducing: int) -> tuple[Callable, tuple[np.ndarray, np.ndarray]]:
    """A level and so many functions of one column, whose lengthscales, and the noise, are sampled; and data."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 6.0, (rows, 1)), axis=0).astype(np.float32)
    y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=rows).astype(np.float32)
    Z = np.linspace(0.0, 6.0, inducing)[:, None]

    def model(X, y):
        eta, noise = numpyro.sample("level", dist.Normal(0.0, 1.0)), numpyro.sample("noise", dist.HalfNormal(1.0))
        for i in range(functions):
            lengthscale = numpyro.sample(f"lengthscale{i}", dist.LogNormal(0.0, 1.0))
            eta = npgp.SparseGP(f"f{i}", npgp.Matern32(lengthscale), Z).draw()(X) + eta
        with numpyro.plate("data", len(X)):
            npgp.observe("y", eta, npgp.Gaussian(scale=noise), obs=y)

    return model, (X, y)


def of_groups(groups: int, times: int = 12, inducing: int = 8) -> tuple[Callable, tuple[np.ndarray, np.ndarray]]:
    """A level, a function that all groups share and one of each, whose lengthscales are sampled; and data."""
    X = np.linspace(0.0, 6.0, times, dtype=np.float32)[:, None]
    y = np.random.default_rng(0).normal(size=(groups, times)).astype(np.float32)
    Z = np.linspace(0.0, 6.0, inducing)[:, None]

    def model(X, y):
        level, noise = numpyro.sample("level", dist.Normal(0.0, 1.0)), numpyro.sample("noise", dist.HalfNormal(1.0))
        shared, own = (numpyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("shared", "own"))
        f = npgp.SparseGP("f", npgp.Matern32(shared), Z).draw()
        with numpyro.plate("groups", groups, dim=-2):
            g = npgp.SparseGP("g", npgp.Matern32(own), Z).draw()
            with numpyro.plate("times", len(X)):
                npgp.observe("y", f(X) + g(X) + level, npgp.Gaussian(scale=noise), obs=y)

    return model, (X, y)


def dependence(args: argparse.Namespace) -> Groups:
    """
    A step of the automatic guide, whose q(ε) follows the other sites by default as the posterior given all rows, beside
    an independent one, and one that follows by pseudo-data: of one function, of three in a sum, and of panels of groups
    with twelve rows. All rows at once.
    """
    cases = {}
    for rows in args.rows:
        inducing = min(max(rows // 20, 20), 100)
        cases[f"1 function, {rows:,} rows, M = {inducing}"] = summed(1, rows, inducing)
    rows = sorted(args.rows)[len(args.rows) // 2]
    inducing = min(max(rows // 20, 20), 100)
    cases[f"3 summed, {rows:,} rows, M = {inducing}"] = summed(3, rows, inducing)
    cases |= {f"{groups:,} groups, M = 8": of_groups(groups) for groups in args.groups}
    for title, (model, arrays) in cases.items():
        calls = {}
        for how in ("independent", "default", "pseudo-data"):
            guide = npgp.AutoSparseGP(model, dependence=None if how == "default" else how)
            svi = SVI(model, guide, npgp.adam(0.01), TraceMeanField_ELBO())
            calls[how] = stepper(svi, tuple(map(jnp.asarray, arrays)), clock(args.cpu_time))
        yield title, calls


def nngp(args: argparse.Namespace) -> Groups:
    """A response NNGP of sites in the plane, 15 neighbors in max–min order: density, gradient and draw."""

    def gp(theta, X, neighbors):
        lengthscale, variance, noise = jnp.exp(theta)
        kernel = npgp.Matern32(lengthscale, variance=variance)
        return npgp.neighbors.ResponseNNGP(kernel, X, neighbors, noise_variance=noise)

    def density(theta, X, neighbors, y):
        return gp(theta, X, neighbors).log_prob(y)

    for rows in args.rows:
        rng = np.random.default_rng(0)
        X, y = rng.uniform(size=(rows, 2)).astype(np.float32), rng.normal(size=rows).astype(np.float32)
        began = time.process_time()
        neighbors = npgp.neighbors.nearest_before(X, min(NEIGHBORS, rows - 1), ordering="maxmin")
        print(f"search: {time.process_time() - began:.2f} s of the processor")
        given = jax.device_put((jnp.log(jnp.array([0.05, 1.0, 0.1], jnp.float32)), X, neighbors))
        programs = [jax.jit(f) for f in (density, jax.value_and_grad(density), lambda key, *a: gp(*a).sample(key))]
        yield (
            f"{rows} sites",
            {
                "density": partial(programs[0], *given, y),
                "with gradient": partial(programs[1], *given, y),
                "a draw": partial(programs[2], jax.random.key(0), *given),
            },
        )


def gplvm_rows(rows: int, inducing: int, batch_size: int) -> Fit:
    """A Bayesian GPLVM of so many rows, of whose table a step touches those of its batch."""
    rng = np.random.default_rng(0)
    latents = rng.normal(size=(rows, LATENT_DIM))
    Y = np.tanh(latents @ rng.normal(size=(LATENT_DIM, OUTPUTS))) + 0.1 * rng.normal(size=(rows, OUTPUTS))
    gplvm = npgp.BayesianGPLVM(npgp.gplvm.Start(latents, latents[:inducing], Y.mean(0)))
    svi = SVI(gplvm.model, gplvm.guide, npgp.adam(1e-3), TraceMeanField_ELBO())
    return Fit(svi, Y, batch_size=batch_size, row_optim=npgp.training.row_adam(1e-3), indices="rows")


def vnngp_rows(rows: int, batch_size: int, lazy: bool = True) -> Fit:
    """A variational nearest-neighbor GP with an inducing point at each of so many sites in the plane."""
    rng = np.random.default_rng(0)
    sites = rng.uniform(size=(rows, 2)).astype(np.float32)
    y = np.sin(20 * sites[:, 0]) * np.cos(20 * sites[:, 1])
    neighbors = npgp.neighbors.nearest_before(sites, NEIGHBORS, ordering="random", rng_key=jax.random.key(0))

    def model(y, rows):
        gp = npgp.VNNGP("f", npgp.Matern32(0.1), sites, neighbors, batch_size=batch_size, init_scale=0.5)
        f = gp.draw()
        with npgp.plate("data", len(sites), rows=rows):
            npgp.observe("y", f(gp.inducing[rows], rows[:, None]), npgp.Gaussian(variance=0.1), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(1e-3), TraceMeanField_ELBO())
    return Fit(svi, y, batch_size=batch_size, row_optim=npgp.training.row_adam(1e-3) if lazy else None, indices="rows")


def neighbors(args: argparse.Namespace) -> Groups:
    """A step of rows beside their neighbors (VIF), and SVGP's with as many inducing points and rows, and its memory."""
    X, y = data(np.random.default_rng(0), 8 * args.batch_size)
    rows = npgp.neighbors.nearest_before(X, NEIGHBORS).rows

    def fit(inducing: int, beside: bool) -> tuple[Fit, float]:
        Z = X[:inducing] + 0.01

        def model(X, y, X_near, y_near):
            kernel = npgp.Matern32(positive("lengthscale", jnp.full(COLUMNS, 2.0)))
            f = npgp.SparseGP("f", kernel, numpyro.param("Z", jnp.asarray(Z))).draw()
            near = (f(X_near.reshape(-1, COLUMNS)), y_near) if beside else None
            with npgp.plate("data", len(rows), rows=len(X)):
                noise = npgp.Gaussian(variance=positive("noise", 0.1))
                npgp.observe("y", f(X), noise, obs=y, neighbors=near)

        svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())
        arrays = X, y, X[rows], y[rows]
        batch = [x[: args.batch_size] for x in arrays]
        step = jax.jit(svi.update).lower(svi.init(jax.random.key(0), *batch), *batch).compile()
        return Fit(svi, *arrays, batch_size=args.batch_size), step.memory_analysis().temp_size_in_bytes / 2**20

    for inducing in (args.inducing, 2 * args.inducing, 4 * args.inducing):
        (svgp, small), (vif, large) = fit(inducing, False), fit(inducing, True)
        memory = f"temporary arrays of {small:.0f} and {large:.0f} MiB"
        title = f"{inducing} inducing points, {NEIGHBORS} neighbors, batches of {args.batch_size}, {memory}"
        yield title, {"SVGP": svgp.advance, "VIF": vif.advance}


def tables(args: argparse.Namespace) -> Groups:
    """
    A step as the row table of a VNNGP's inducing values grows, at a fixed batch size: NumPyro's SVI moves the whole
    table and looks through it for NaN; with ``row_optim`` a step touches the rows of its batch alone.
    """
    kinds = {"whole tables": False, "rows of the batch": True}
    fits = {f"{kind}, {n:,}": vnngp_rows(n, args.batch_size, lazy) for kind, lazy in kinds.items() for n in args.rows}
    yield f"batches of {args.batch_size}", {name: fit.advance for name, fit in fits.items()}


def files(args: argparse.Namespace) -> Groups:
    """A step as a file of rows grows, which is read ahead in random order: whole calls of ``fit`` on maps of files."""

    def write(folder: Path, rows: int) -> list[np.ndarray]:
        paths = [folder / f"{name}-{rows}.npy" for name in ("X", "y")]
        shapes = ((rows, COLUMNS), (rows,))
        maps = [np.lib.format.open_memmap(p, "w+", np.float32, s) for p, s in zip(paths, shapes, strict=True)]
        rng = np.random.default_rng(0)
        for start in range(0, rows, 100_000):
            block = slice(start, min(start + 100_000, rows))
            for array, values in zip(maps, data(rng, block.stop - start), strict=True):
                array[block] = values
        return [np.load(path, mmap_mode="r") for path in paths]

    def training(X: np.ndarray, y: np.ndarray) -> Callable[[int], float]:
        svi = svgp(len(X), data(np.random.default_rng(1), args.inducing)[0])
        fit = Fit(svi, X, y, batch_size=args.batch_size, steps_per_call=10)

        def advance(steps: int) -> float:
            began = time.perf_counter()
            fit.advance(steps)
            return (time.perf_counter() - began) / steps

        return advance

    with tempfile.TemporaryDirectory() as folder:
        yield (
            f"M = {args.inducing}, batches of {args.batch_size}",
            {f"{rows:,} rows": training(*write(Path(folder), rows)) for rows in args.rows},
        )


def devices(args: argparse.Namespace) -> Groups:
    """
    A step whose rows devices share. Without accelerators these are simulated, parts of one CPU: what counts then is the
    work of each, which the compiler knows. Efficiency is the work on one divided by that on all k together; what all do
    alike, the factorization of K_uu above all, keeps it below one. In float64 on a CPU.
    """
    rng, fits, work = np.random.default_rng(0), {}, {}
    X, y = data(rng, 4 * args.batch_size)
    svi = svgp(len(X), data(rng, args.inducing)[0])
    state = jax.jit(svi.init)(jax.random.key(0), X[: args.batch_size], y[: args.batch_size])
    for k in args.devices:
        mesh = jax.make_mesh((k,), ("rows",), devices=jax.devices()[:k])
        fits[k] = Fit(svi, X, y, batch_size=args.batch_size, sharding=npgp.training.Sharding(mesh))
        alike, divided = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("rows",)))
        batch = jax.device_put((X[: args.batch_size], y[: args.batch_size]), divided)
        step = jax.jit(svi.update).lower(jax.device_put(state, alike), *batch).compile()
        work[k] = float(step.cost_analysis()["flops"])
    title = f"M = {args.inducing}, B = {args.batch_size}, {jax.devices()[0].device_kind}"
    # Equally many steps for all, so that parameters can be compared.
    yield title, {f"{k} devices": lambda _, fit=fit: fit.advance(5) for k, fit in fits.items()}

    one = args.devices[0]
    for k, fit in fits.items():
        each = jax.tree.map(lambda a, b: np.max(np.abs(a - b), initial=0.0), fit.result.params, fits[one].result.params)
        apart, share = max(jax.tree.leaves(each)), work[k] / work[one]
        print(f"{k} devices: work {share:.3f}, efficiency {one / (k * share):.2f}, parameters apart {apart:.1e}")


class Cost(NamedTuple):
    """
    :param groups: what is timed.
    :param defaults: of its options.
    :param steps: whether calls are given a number of steps, and return the seconds of one.
    """

    groups: Callable[[argparse.Namespace], Groups]
    defaults: Mapping[str, Any] = {}
    steps: bool = False


COSTS = {
    "dependence": Cost(dependence, {"rows": [200, 1000, 10_000]}, True),
    "nngp": Cost(nngp, {"rows": [4096]}),
    "vif": Cost(neighbors, {"batch_size": 256, "inducing": 128, "seconds": 1.0}, True),
    "vnngp-rows": Cost(tables, {"batch_size": 256, "seconds": 1.0}, True),
    "files": Cost(files, {"rows": [10_000, 100_000, 1_000_000, 10_000_000]}, True),
    "devices": Cost(devices, {"batch_size": 8192, "repetitions": 7}, True),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("cost", nargs="?", choices=list(COSTS))
    rows = [1000, 10_000, 100_000, 1_000_000]
    parser.add_argument("--rows", type=whole, nargs="+", default=rows, help="of data, files, sites")
    parser.add_argument("--devices", type=whole, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--groups", type=whole, nargs="+", default=[10, 100, 1000], help="of a panel")
    parser.add_argument("--seconds", type=float, default=0.4, help="about this long per turn, where steps are taken")
    parser.shared("quick", "cpu-time", "json", repetitions=15, batch_size=1024, inducing=256)
    cost = parser.parse_args(argv).cost
    parser.set_defaults(**(COSTS[cost].defaults if cost else {}))
    quick = {"repetitions": 2, "batch_size": 16, "inducing": 8, "rows": [40, 60], "seconds": 0.01, "devices": [1, 4]}
    quick["groups"] = [2]
    return parser.read(argv, quick)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    args, records = parse(argv), []
    if args.cost is None:
        print("\n".join(f"{name:13}{' '.join(str(c.groups.__doc__).split())}" for name, c in COSTS.items()))
        return records
    if args.cost == "devices" and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(args.devices)}"
        os.environ["XLA_FLAGS"] = flags  # which is read when JAX first computes something; of use on a CPU alone
    cost, x64 = COSTS[args.cost], args.cost == "devices" and jax.default_backend() == "cpu"
    with jax.enable_x64(x64), one_blas_thread():
        for title, calls in cost.groups(args):
            if cost.steps:
                seconds = interleaved_steps(calls, args.repetitions, args.seconds, 5, MOST_STEPS)
            else:
                seconds = interleaved(calls, args.repetitions, clock(args.cpu_time))
            base = seconds[next(iter(calls))]
            for name, own in seconds.items():
                ms, ratio, fastest = quartiles(own, 1e3), quartiles(own / base), float(own.min() / base.min())
                records.append({"title": title, "variant": name, "ms": ms, "ratio": ratio, "fastest": fastest})
                print(title, name, f"{ms[1]:.2f} ms, {ratio[1]:.2f}", flush=True)
    lines = [
        (
            r["title"],
            r["variant"],
            f"{r['ms'][1]:.2f}",
            "{1:.2f} ({0:.2f} to {2:.2f})".format(*r["ratio"]),
            f"{r['fastest']:.2f}",
        )
        for r in records
    ]
    print(f"\n{table(('', '', 'ms', 'ratio (quartiles)', 'of the fastest runs'), lines, left=(0, 1))}")
    print(f"\nthe most memory that this process has held: {peak_memory() / 2**30:.1f} GiB")
    write_json(args.json, records)
    return records


if __name__ == "__main__":
    main()
