#!/usr/bin/env python
"""Minibatches for the conditional ``grouped``: what makes its gradients noisy, and what mends that.

Ways to make a step of about equally many rows, all but the first for one and the same bound, ``grouped``:

    tight      independent rows, for the bound ``tight``
    grouped    whole groups of neighbors
    switch     ``tight`` for three quarters of the steps, then whole groups ("then spread": then the following)
    spread     ``tight`` on independent rows, and on a few groups what ``grouped`` gains over it (``npgp.tighten``)

The last is unbiased because ``grouped`` is ``tight`` plus the sum over groups of that gain, which for Gaussian noise
depends neither on y nor on q(ε). First the variance of the gradient's estimate is measured at one place, then each is
trained in equally many steps; figures are of all training rows and, at the end, of the bound ``grouped`` itself.

    NPGP_DATA=... python scripts/studies/regression/group_batches.py --json out/group_batches.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, command, one_blas_thread, table, whole, write_json
from studies.regression.layouts import STRUCTURES, Layout, Split
from studies.regression.minibatch import (
    NOISE_VARIANCE,
    VARIANCE,
    component,
    elbo_of_chunks,
    regression_model,
    scores,
    start_of_lengthscales,
)
from studies.shared import learned, summarize, summary_table


class Scheme(NamedTuple):
    """
    How a step is made.

    :param rows: independent rows of a step, as a share of a batch.
    :param groups: the share of rows in whole groups.
    :param whole: whether the whole ELBO is of the groups; else what they gain.
    :param size: rows in a group, at most; the option's if omitted.
    :param late: the share of steps before groups come in, in place of rows.
    :param natural: q(ε) by natural gradients.
    """

    rows: float
    groups: float
    whole: bool = False
    size: int | None = None
    late: float = 0.0
    natural: bool = False


SCHEMES = {
    "tight": Scheme(1.0, 0.0),
    "grouped": Scheme(0.0, 1.0, whole=True),
    "grouped, by 4": Scheme(0.0, 1.0, whole=True, size=4),
    "switch": Scheme(1.0, 1.0, whole=True, late=0.75),
    "spread, 1/2 + 1/2": Scheme(0.5, 0.5),
    "spread, 3/4 + 1/4": Scheme(0.75, 0.25),
    "spread, 1 + 1/4": Scheme(1.0, 0.25),
    "spread, 1 + 1/8": Scheme(1.0, 0.125),
    "tight, then spread": Scheme(1.0, 0.125, late=0.75),
    "tight, natural": Scheme(1.0, 0.0, natural=True),
    "grouped, natural": Scheme(0.0, 1.0, whole=True, natural=True),
    "spread, 3/4 + 1/4, natural": Scheme(0.75, 0.25, natural=True),
    "spread, 1 + 1/4, natural": Scheme(1.0, 0.25, natural=True),
}
#: A share of the steps in which means of batches are taken, for the gradient's variance.
BATCHES = 100
#: Steps of one program.
CHUNK = 100


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--data", choices=["kin40k", "protein", "keggdirected"], default="kin40k")
    add("--schemes", choices=list(SCHEMES), nargs="+", default=list(SCHEMES))
    add("--structure", choices=["SVGP", "union"], default="SVGP", help="where inducing points start, as in kin40k.py")
    add("--no-noise", action="store_true", help="do not measure the gradient's variance")
    add("--splits", type=int, nargs="+", default=[0, 1, 2])
    add("--group-size", type=whole, default=16, help="rows in a group, at most")
    add("--markdown", type=Path, help="write the tables to this file")
    parser.shared(
        "json",
        "quick",
        inducing=256,
        rows=dict(default=12_000, help="the first so many training rows of a split"),
        steps=1000,
        batch_size=dict(default=512, help="rows of a step"),
        learning_rate=0.05,
        seed=0,
    )
    args = parser.read(argv)
    if args.quick:
        args.rows, args.inducing, args.steps, args.batch_size, args.group_size = 400, 12, 2 * CHUNK, 64, 8
        args.splits = args.splits[:1]
    return args


class Arrays(NamedTuple):
    """Rows, and rows laid out group after group, with their mask."""

    X: jax.Array
    y: jax.Array
    X_groups: jax.Array
    y_groups: jax.Array
    mask: jax.Array
    size: int

    @classmethod
    def of(cls, split: Split, size: int) -> Arrays:
        groups = npgp.median_split(split.X, size)
        arranged = groups.arrange(split.X), groups.arrange(split.y), np.asarray(groups.mask).ravel()
        return cls(*map(jnp.asarray, (split.X, split.y, *arranged)), groups.size)


def model_of(start: dict[str, Any], rows: int, places: int, whole_groups: bool, size: int) -> Callable:
    """The model of a batch: independent rows, if there are any, and whole groups, if there are any."""

    def model(X, y, X_groups, y_groups, mask):
        params = learned(start)
        f, likelihood = component(params, ("dense",)).draw(), npgp.Gaussian(variance=params["noise_variance"])
        if len(X):
            with npgp.plate("rows", rows, rows=len(X)):
                npgp.observe("y", f(X), likelihood, obs=y, conditional="tight")
        if len(X_groups):
            with npgp.plate("places", places, rows=len(X_groups)):
                if whole_groups:
                    kind = npgp.Grouped(size)
                    npgp.observe("groups", f(X_groups), likelihood, obs=y_groups, conditional=kind, mask=mask)
                else:
                    npgp.tighten("gain", f(X_groups), likelihood, y_groups, npgp.Grouped(size), mask=mask)

    return model


def indices(rng: np.random.Generator, count: int, size: int, steps: int) -> np.ndarray:
    """Numbers of a batch at each step, (steps, size), in random order epoch by epoch."""
    if not size:
        return np.zeros((steps, 0), int)
    each = count // size
    epochs = [rng.permutation(count)[: each * size].reshape(-1, size) for _ in range(-(-steps // each))]
    return np.concatenate(epochs)[:steps]


class Batches(NamedTuple):
    """Which rows and which groups make each step."""

    rows: np.ndarray
    groups: np.ndarray

    @classmethod
    def of(cls, scheme: Scheme, data: Arrays, args: argparse.Namespace, steps: int, seed: int) -> Batches:
        rng, N = np.random.default_rng(seed), len(data.y)
        count = len(data.mask) // data.size
        groups = round(scheme.groups * args.batch_size * count / N)
        return cls(indices(rng, N, round(scheme.rows * args.batch_size), steps), indices(rng, count, groups, steps))


def batch(data: Arrays, rows: jax.Array, groups: jax.Array) -> tuple[jax.Array, ...]:
    places = (groups[:, None] * data.size + jnp.arange(data.size)).ravel()
    return data.X[rows], data.y[rows], data.X_groups[places], data.y_groups[places], data.mask[places]


def svi_of(scheme: Scheme, start, data: Arrays, args) -> SVI:
    model = model_of(start, len(data.y), len(data.mask), scheme.whole, data.size)
    adam = npgp.adam(args.learning_rate, args.steps)
    return SVI(
        model,
        npgp.AutoSparseGP(model),
        npgp.natural_gradient(0.1, adam) if scheme.natural else adam,
        TraceMeanField_ELBO(),
    )


def start_of(split: Split, args: argparse.Namespace) -> dict[str, Any]:
    (Z,) = split.inducing(STRUCTURES[args.structure], args.inducing, args.seed + split.number)
    return {
        "lengthscale": jnp.asarray(start_of_lengthscales(split.X)),
        "variance": VARIANCE,
        "noise_variance": NOISE_VARIANCE,
        "inducing0": jnp.asarray(Z),
    }


def train(name: str, split: Split, args: argparse.Namespace) -> tuple[dict, dict, dict]:
    """Trained parameters, the same unconstrained, and seconds of the processor without those of compiling."""
    scheme, start = SCHEMES[name], start_of(split, args)
    data = Arrays.of(split, scheme.size or args.group_size)
    svi, numbers = svi_of(scheme, start, data, args), Batches.of(scheme, data, args, args.steps, args.seed)

    @partial(jax.jit, static_argnames="which")
    def run(state, rows, groups, which):
        def step(state, at):
            rows, groups = at
            rows, groups = rows if "r" in which else rows[:0], groups if "g" in which else groups[:0]
            return svi.update(state, *batch(data, rows, groups))

        return lax.scan(step, state, (rows, groups))

    late = round(scheme.late * args.steps / CHUNK) * CHUNK
    state = jax.jit(svi.init)(jax.random.key(args.seed), *batch(data, numbers.rows[0], numbers.groups[0]))
    seconds = 0.0
    compiled: dict[str, Any] = {}
    for first in range(0, args.steps, CHUNK):
        part = [n[first : first + CHUNK] for n in numbers]
        which = "r" if first < late else "g" if late and scheme.whole else "rg"
        if which not in compiled:
            compiled[which] = run.lower(state, *part, which=which).compile()
        began = time.process_time()
        state, _ = jax.block_until_ready(compiled[which](state, *part))
        seconds += time.process_time() - began
    return (
        svi.get_params(state),
        svi.optim.get_params(state.optim_state),
        {"seconds": seconds, "ms": 1e3 * seconds / args.steps},
    )


def judged(params, split: Split, args: argparse.Namespace) -> dict[str, float]:
    """The ELBO per row of all rows at the trained q(ε), by two conditionals, and scores of test rows."""
    found = {}
    start = {key: params[key] for key in ("lengthscale", "variance", "noise_variance", "inducing0")}
    groups = npgp.median_split(split.X, args.group_size)
    for conditional in ("tight", "grouped"):
        layout = Layout.of(split, conditional, groups, args.batch_size)
        model = regression_model(start, ("dense",), conditional, layout.group_size)
        elbo = elbo_of_chunks(model, npgp.AutoSparseGP(model))(params, layout.chunks())
        found[f"{conditional}_elbo"] = elbo / len(split.y)
    mean, variance = predict(params, split.X_test)
    return found | scores(mean, variance + params["noise_variance"], split.y_test)


@jax.jit
def predict(params, X):
    return component(params, ("dense",)).posterior(params).mean_and_variance(X)


#: Names of parameters, by their kind.
KINDS = {"f.u.loc": "mean of q", "f.u.scale_tril": "scale of q", "inducing0": "inducing inputs"}


def gradient_variance(loose, name: str, split: Split, args: argparse.Namespace) -> dict[str, float]:
    """
    The variance of the gradient over batches at one place, summed over each kind of parameters.

    :param loose: unconstrained parameters.
    """
    scheme = SCHEMES[name]
    data = Arrays.of(split, scheme.size or args.group_size)
    svi, numbers = svi_of(scheme, start_of(split, args), data, args), Batches.of(scheme, data, args, BATCHES, 1)
    jax.jit(svi.init)(jax.random.key(0), *batch(data, numbers.rows[0], numbers.groups[0]))

    @jax.jit
    def variances(loose, numbers):
        def slope(at):
            def loss(loose):
                params = svi.constrain_fn(loose)
                return svi.loss.loss(jax.random.key(0), params, svi.model, svi.guide, *batch(data, *at))

            return jax.grad(loss)(loose)

        return jax.tree.map(lambda g: jnp.sum(jnp.var(g, axis=0)), lax.map(slope, numbers))

    found: dict[str, float] = {}
    for key, value in variances(loose, tuple(numbers)).items():
        kind = KINDS.get(key, "hyperparameters")
        found[kind] = found.get(kind, 0.0) + float(value)
    return found


FIGURES = {
    "grouped_elbo": ("`grouped` ELBO per row", 4),
    "gain": ("… less `tight`-trained's", 4),
    "tight_elbo": ("`tight` ELBO", 4),
    "rmse": ("test RMSE", 4),
    "log_likelihood": ("test log-likelihood", 4),
    "ms": ("ms per step", 1),
}


def noise_table(noise: dict[str, dict[str, float]], markdown: bool = False) -> str:
    """Variances of gradients, as multiples of those of ``grouped``."""
    kinds = list(noise["grouped"])
    rows = [(name, *(f"{found[kind] / noise['grouped'][kind]:.2f}" for kind in kinds)) for name, found in noise.items()]
    return table(("variance of the gradient, over that of `grouped`", *kinds), rows, markdown=markdown)


def tables(report: dict[str, Any], markdown: bool = False) -> str:
    base = {fit["split"]: fit["grouped_elbo"] for fit in report["fits"] if fit["scheme"] == "tight"}
    fits = [fit | {"gain": fit["grouped_elbo"] - base.get(fit["split"], np.nan)} for fit in report["fits"]]
    rows = summarize(fits, ("scheme",), tuple(FIGURES))
    text = [summary_table(rows, {"scheme": "scheme"}, FIGURES, markdown=markdown)]
    if report["noise"]:
        text.insert(0, noise_table(report["noise"], markdown))
    return "\n\n".join(text)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    jax.config.update("jax_enable_x64", False)
    report: dict[str, Any] = {"command": command(__file__, argv), "noise": {}, "fits": []}
    with one_blas_thread():
        for number in args.splits:
            split = Split.load(args.data, number, args.rows)
            for name in args.schemes:
                params, loose, times = train(name, split, args)
                if name == "tight" and not report["noise"] and not args.no_noise:
                    for other, scheme in SCHEMES.items():
                        if not scheme.natural and not scheme.late:
                            report["noise"][other] = gradient_variance(loose, other, split, args)
                    print(noise_table(report["noise"]), flush=True)
                fit = {"split": number, "scheme": name, **judged(params, split, args), **times}
                report["fits"].append(fit)
                print({key: round(v, 4) if isinstance(v, float) else v for key, v in fit.items()}, flush=True)
                write_json(args.json, report, say=False)
    print(tables(report))
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(f"# Minibatches for groups\n\n    {report['command']}\n\n{tables(report, True)}\n")
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
