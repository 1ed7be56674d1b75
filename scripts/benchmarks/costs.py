#!/usr/bin/env python
"""What parts of training cost: variants of a step, or of a bound with its gradient, timed in turn.

    python scripts/benchmarks/costs.py                     what can be measured
    python scripts/benchmarks/costs.py orthogonal          one of them
    python scripts/benchmarks/costs.py nngp --rows 1000000

Programs to compare take turns in random order; ratios are to the first, of runs of the same turn: median and quartiles.
In float32, with one thread of LAPACK. For ``nngp`` peak memory is that of this process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import npgp
from npgp.sparse.conditionals import row_elbo
from npgp.sparse.projection import factorize
from npgp.variational import DenseNormal, square_tril, whitened_mean, whitened_variance

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, clock, interleaved, one_blas_thread, peak_memory, quartiles, table, whole, write_json

#: What is timed together: its title, and calls by the variants' names.
Groups = Iterator[tuple[str, dict[str, Callable[[], Any]]]]
COLUMNS = 8


def positive(name: str, value: Any) -> jax.Array:
    return numpyro.param(name, value, constraint=constraints.softplus_positive)


def data(rows: int, columns: int = COLUMNS, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Inputs, and noisy values of a smooth function of some columns."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1.7, 1.7, (rows, columns))
    y = np.sin(2.0 * X[:, 0]) + X[:, 1] * X[:, -1] + 0.3 * rng.normal(size=rows)
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


def points(size: int, columns: int = COLUMNS, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).uniform(-1.7, 1.7, (size, columns)), jnp.float32)


def svi_step(model: Callable, *arrays: Any) -> Callable[[], Any]:
    """A compiled step of Adam on a batch."""
    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())
    state = jax.jit(svi.init)(jax.random.key(0), *arrays)
    step = jax.jit(svi.update).lower(state, *arrays).compile()
    return lambda: step(state, *arrays)


def bound_and_gradient(bound: Callable, params: Any) -> Callable[[], Any]:
    step = jax.jit(jax.value_and_grad(bound)).lower(params).compile()
    return lambda: step(params)


# ---------------------------------------------------------------------------------------------------------------
# The registry


def conditionals(args: argparse.Namespace) -> Groups:
    """Steps of SVI with ``grouped`` and ``prior`` against ``tight``, by M and size of groups."""
    rows = 8 * args.batch_size
    X, y = map(np.asarray, data(rows))
    for M in args.sizes:

        def step(conditional: str, size: int = 1, M=M) -> Callable[[], Any]:
            # Numbers of rows are powers of two, so that groups are full and nothing is padded.
            groups = npgp.median_split(X, size)
            x, order_y = (jnp.asarray(groups.arrange(a)[: args.batch_size]) for a in (X, y))
            kind = npgp.Grouped(size) if conditional == "grouped" else conditional

            def model(x, y):
                kernel = npgp.Matern32(
                    positive("lengthscale", jnp.full(COLUMNS, 2.0)), variance=positive("variance", 1.0)
                )
                f = npgp.SparseGP("f", kernel, numpyro.param("Z", jnp.asarray(X[:M]))).draw()
                with npgp.plate("data", rows, rows=args.batch_size):
                    npgp.observe("y", f(x), npgp.Gaussian(variance=positive("noise", 0.1)), obs=y, conditional=kind)

            return svi_step(model, x, order_y)

        calls = {"tight": step("tight"), "prior": step("prior")}
        yield (
            f"M = {M}",
            calls | {f"groups of {g}": step("grouped", g) for g in (8, 16, 32, 64) if g <= args.batch_size},
        )


#: How the M points are shared out to blocks, and the covariance of each.
METHODS = {"SVGP": ("dense",), "SOLVE-GP": ("dense", "dense"), "ODVGP": ("dense", "mean-only")}


def orthogonal(args: argparse.Namespace) -> Groups:
    """A step of SVI and a collapsed bound: SVGP with M points against two sets of M/2."""
    for M in args.sizes:
        for kind, rows in (("step", args.batch_size), ("collapsed", args.rows)):
            X, y = data(rows)
            calls = {}
            for name, covariances in METHODS.items():
                start = jnp.split(points(M), len(covariances))

                def model(X, y, start=start, covariances=covariances):
                    kernel = npgp.Matern32(
                        positive("lengthscale", jnp.full(COLUMNS, 2.0)), variance=positive("variance", 1.0)
                    )
                    Z = [numpyro.param(f"Z{i}", part) for i, part in enumerate(start)]
                    f = npgp.SparseGP("f", kernel, Z, covariances=covariances).draw()
                    with npgp.plate("data", 100 * len(X), rows=len(X)):
                        noise = positive("noise", 0.1)
                        npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y, conditional="tight")

                def bound(params, X=X, y=y, covariances=covariances):
                    lengthscale, (variance, noise), Z = params
                    kernel = npgp.Matern32(lengthscale, variance=variance)
                    return npgp.CollapsedGP(kernel, X, Z, noise_variance=noise, covariances=covariances).log_prob(y)

                params = jnp.full(COLUMNS, 2.0), jnp.ones(2), start
                calls[name] = svi_step(model, X, y) if kind == "step" else bound_and_gradient(bound, params)
            yield f"{kind}, M = {M}", calls


#: One block: its kind, its number of features, and for activations their levels.
Block = tuple[str, int, tuple[int, ...]]


def spherical(args: argparse.Namespace) -> Groups:
    """Harmonics against as many points, and activations with orthogonal points against SOLVE-GP: steps and bounds."""
    structures: dict[str, tuple[int, dict[str, list[Block]]]] = {}
    for most in args.sizes:
        block = npgp.features.SphericalHarmonics.within(most, npgp.kernels.ZonalArcCosine(), 4)
        pair = {"points": [("points", block.size, ())], "harmonics": [("harmonics", block.size, block.levels)]}
        structures[f"{block.size} harmonics"] = 4, pair
    for M in args.sizes[1:]:
        half: Block = ("points", M // 2, ())
        units = {
            f"activations of {levels} levels + points": [("activations", M // 2, tuple(range(levels))), half]
            for levels in (6, 13)
        }
        structures[f"{M // 2} + {M // 2}"] = COLUMNS, {"SOLVE-GP": [half, half]} | units
    for title, (columns, pair) in structures.items():
        for kind, rows in (("step", args.batch_size), ("collapsed", args.rows)):
            X, y = data(rows, columns)
            yield f"{kind}, {title}", {name: _spherical(kind, blocks, X, y) for name, blocks in pair.items()}


def _spherical(kind: str, blocks: Sequence[Block], X, y) -> Callable[[], Any]:
    columns = X.shape[1]

    def kernel(params):
        return npgp.kernels.ZonalArcCosine(weight_variance=params["weights"], bias_variance=params["bias"])

    start: dict[str, Any] = {
        "weights": jnp.full(columns, 1.0 / columns),
        "bias": jnp.ones(()),
        "noise": jnp.asarray(0.1),
    }
    for i, (what, size, _) in enumerate(blocks):
        if what != "harmonics":
            Z = points(size, columns, i)
            start[f"Z{i}"] = kernel(start).polar(Z)[1] if what == "activations" else Z

    def features(params) -> list:
        make: dict[str, Callable] = {
            "points": lambda i, levels: npgp.features.Points(params[f"Z{i}"]),
            "activations": lambda i, levels: npgp.features.Activations(params[f"Z{i}"], levels=levels),
            "harmonics": lambda i, levels: npgp.features.SphericalHarmonics(levels, columns + 1),
        }
        return [make[what](i, levels) for i, (what, _, levels) in enumerate(blocks)]

    def model(X, y):
        params = {name: numpyro.param(name, v) if name[0] == "Z" else positive(name, v) for name, v in start.items()}
        f = npgp.SparseGP("f", kernel(params), features(params)).draw()
        with npgp.plate("data", 100 * len(X), rows=len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(variance=params["noise"]), obs=y)

    def bound(params):
        return npgp.CollapsedGP(kernel(params), X, features(params), noise_variance=params["noise"]).log_prob(y)

    return svi_step(model, X, y) if kind == "step" else bound_and_gradient(bound, start)


def sites(args: argparse.Namespace) -> Groups:
    """
    A step of NumPyro's SVI with the automatic guide against the same ELBO as one function of unconstrained parameters
    that calls the projection and the rows' terms itself, and is updated by the same optimizer. q(ε) is independent.
    """
    (X, y), Z, rows = data(args.batch_size), points(args.sizes[0]), 100_000
    softplus, prior = (
        dist.biject_to(constraints.softplus_positive),
        {"lengthscale": (0.0, (COLUMNS,)), "noise": (-2.0, ())},
    )

    def hyperparameters(learned: bool):
        if learned:
            return positive("lengthscale", jnp.full(COLUMNS, 2.0)), positive("noise", 0.1)
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.zeros(COLUMNS), 1.0).to_event(1))
        return lengthscale, numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))

    def bare(learned: bool, params, key):
        if learned:
            return softplus(params["lengthscale"]), softplus(params["noise"]), 0.0
        values, divergence = [], jnp.zeros(())
        for (name, (mean, shape)), k in zip(prior.items(), jax.random.split(key), strict=True):
            loc, scale = params[f"{name}_auto_loc"], softplus(params[f"{name}_auto_scale"])
            values.append(jnp.exp(loc + scale * jax.random.normal(k, shape)))
            divergence += jnp.sum(0.5 * (scale**2 + (loc - mean) ** 2 - 1.0) - jnp.log(scale))
        return *values, divergence

    for learned in (True, False):

        def model(X, y, learned=learned):
            lengthscale, noise = hyperparameters(learned)
            f = npgp.SparseGP("f", npgp.Matern32(lengthscale), numpyro.param("Z", Z)).draw()
            with npgp.plate("data", rows, rows=args.batch_size):
                npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)

        def negative_elbo(params, key, X, y, learned=learned):
            lengthscale, noise, divergence = bare(learned, params, key)
            q = DenseNormal(params["f.u.loc"], dist.biject_to(square_tril)(params["f.u.scale_tril"]))
            projection = factorize(npgp.Matern32(lengthscale), (npgp.features.Points(params["Z"]),))(X)
            mean, variance = whitened_mean(projection, [q.loc]), whitened_variance(projection, [q])
            noisy, left = npgp.Gaussian(variance=noise), projection.residual_variance()
            terms = row_elbo(npgp.Tight(), noisy, y, mean, variance, left)
            return q.kl() + divergence - rows / args.batch_size * jnp.sum(terms)

        adam = optax.adam(0.01)
        guide = npgp.AutoSparseGP(model, AutoNormal, dependence="independent")
        svi = SVI(model, guide, adam, TraceMeanField_ELBO())
        state = jax.jit(svi.init)(jax.random.key(0), X, y)
        params = svi.optim.get_params(state.optim_state)

        @jax.jit
        def by_hand(params, moments, key, adam=adam, negative_elbo=negative_elbo):
            key, step_key = jax.random.split(key)
            value, gradient = jax.value_and_grad(negative_elbo)(params, step_key, X, y)
            updates, moments = adam.update(gradient, moments, params)
            return optax.apply_updates(params, updates), moments, key, value

        step, moments, key = jax.jit(svi.update), adam.init(params), jax.random.key(1)
        calls = {
            "bare ELBO": lambda f=by_hand, p=params, m=moments, key=key: f(p, m, key)[-1],
            "with sites": lambda step=step, state=state: step(state, X, y)[-1],
        }
        yield f"hyperparameters {'learned' if learned else 'sampled'}, M = {args.sizes[0]}", calls


def nngp(args: argparse.Namespace) -> Groups:
    """A response NNGP of sites in the plane, 15 neighbors in max–min order: density, gradient and draw."""
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(args.rows, 2)).astype(np.float32), rng.normal(size=args.rows).astype(np.float32)
    began = time.process_time()
    neighbors = npgp.neighbors.nearest_before(X, min(15, args.rows - 1), ordering="maxmin")
    print(f"search: {time.process_time() - began:.2f} s of the processor")

    def gp(theta, X, neighbors):
        lengthscale, variance, noise = jnp.exp(theta)
        kernel = npgp.Matern32(lengthscale, variance=variance)
        return npgp.neighbors.ResponseNNGP(kernel, X, neighbors, noise_variance=noise)

    def density(theta, X, neighbors, y):
        return gp(theta, X, neighbors).log_prob(y)

    given = jax.device_put((jnp.log(jnp.array([0.05, 1.0, 0.1], jnp.float32)), X, neighbors))
    programs = [jax.jit(f) for f in (density, jax.value_and_grad(density), lambda key, *a: gp(*a).sample(key))]
    calls = {
        "density": lambda: programs[0](*given, y),
        "with gradient": lambda: programs[1](*given, y),
        "a draw": lambda: programs[2](jax.random.key(0), *given),
    }
    yield f"{args.rows} sites", calls


COSTS: dict[str, Callable[[argparse.Namespace], Groups]] = {
    "conditionals": conditionals,
    "orthogonal": orthogonal,
    "spherical": spherical,
    "sites": sites,
    "nngp": nngp,
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("cost", nargs="?", choices=list(COSTS))
    parser.add_argument("--sizes", type=whole, nargs="+", default=[128, 256, 512], help="M")
    parser.shared(
        "quick", "cpu-time", "json", repetitions=25, batch_size=1024, rows=dict(default=4096, help="of a bound")
    )
    return parser.read(argv, {"sizes": [8, 16], "repetitions": 2, "batch_size": 32, "rows": 40})


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    args, records = parse(argv), []
    if args.cost is None:
        print("\n".join(f"{name:13}{' '.join(cost.__doc__.split())}" for name, cost in COSTS.items()))
        return records
    with jax.enable_x64(False), one_blas_thread():
        for title, calls in COSTS[args.cost](args):
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
