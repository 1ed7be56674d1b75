#!/usr/bin/env python
"""Bayesian GPLVM of oil-flow measurements by SVI: the classical bound against the tight one.

Trains a GPLVM with one or both conditionals in the same settings, prints a table, and draws the latent space, the
relevance of its dimensions, the ELBO traces, and measured against reconstructed values.

    python scripts/examples/oil_flow.py                                     simulated data, a minute or two
    python scripts/examples/oil_flow.py --data real --steps 20000           the data of Bishop & James 1993, float64
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets
from npgp.gplvm import metrics
from npgp.gplvm.relevance import RELEVANT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, plus_minus, table, whole, write_json, write_picture

CLASS_NAMES = ("homogeneous", "annular", "stratified")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--data", choices=["simulated", "real"], default="simulated")
    parser.add_argument("--conditional", choices=["prior", "tight", "both"], default="both")
    parser.add_argument("--latent-dim", type=whole, default=10)
    rows = dict(default=1000, help="rows to simulate (real data: the first so many)")
    batch = dict(help="rows of a step; all if omitted")
    parser.shared("seed", "float32", "out", "json", rows=rows, inducing=25, steps=4000, batch_size=batch)
    parser.shared(learning_rate=0.01)
    return parser.read(argv)


def train(data: datasets.OilFlow, conditional: str, args: argparse.Namespace) -> dict:
    """Fit one GPLVM; its figures, parameters and ELBO trace."""
    began = time.perf_counter()
    start = npgp.gplvm.pca_start(jax.random.key(args.seed), data.Y, args.latent_dim, args.inducing)
    gplvm = npgp.BayesianGPLVM(start, conditional=conditional)
    svi = SVI(gplvm.model, gplvm.guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    key, evaluation_key = jax.random.split(jax.random.key(args.seed))
    print(f"training with the {conditional!r} conditional", flush=True)
    begin = jax.jit(svi.init)(key, data.Y)  # operation by operation this takes seconds
    result = npgp.fit(svi, key, args.steps, data.Y, batch_size=args.batch_size, indices="rows", init_state=begin)
    seconds = time.perf_counter() - began
    rows = len(data.Y)
    elbo, error = npgp.evaluate(svi, evaluation_key, result, data.Y, indices="rows", num_draws=200)
    params = jax.tree.map(np.asarray, result.params)
    mean, variance = jax.jit(gplvm.reconstruct)(result.params, params["x.loc"], params["x.scale"])
    return {
        "figures": {
            "elbo_per_row": elbo / rows,
            "noise_variance": float(params["noise_variance"]),
            "nn_errors": metrics.nearest_neighbor_errors(params["x.loc"] / params["lengthscale"], data.labels),
            "relevant_dims": npgp.gplvm.effective_dimensions(npgp.gplvm.relevance(params)),
            "seconds": seconds,
        },
        "elbo_standard_error": error / rows,
        "params": params,
        "posterior": gplvm.posterior(result.params),
        "trace": -result.losses,
        "reconstruction": (np.asarray(mean), np.sqrt(np.asarray(variance) + params["noise_variance"])),
    }


def print_fits(fits: dict[str, dict], rows: int) -> None:
    """The table, one row per conditional."""
    lines = []
    for name, fit in fits.items():
        f = fit["figures"]
        bound = plus_minus(f["elbo_per_row"], fit["elbo_standard_error"])
        noise = f"{f['noise_variance']:.5f}"
        lines.append((name, bound, noise, f["nn_errors"], f["relevant_dims"], f"{f['seconds']:.0f}"))
    heads = ("conditional", "ELBO per row", "noise variance", f"NN errors of {rows}", "relevant dims", "seconds")
    print(table(heads, lines))


def draw(fits: dict[str, dict], data: datasets.OilFlow, out: Path) -> None:
    """Write the pictures."""
    from npgp import plots

    mean, scale = fits[list(fits)[-1]]["reconstruction"]
    worst_last = np.argsort(np.mean((mean - data.Y) ** 2, axis=0) / np.var(data.Y, axis=0))
    shown = [*worst_last[:2], *worst_last[-2:]]  # of twelve alike, the two best and the two worst
    figures = {
        "elbo.png": plots.plot_elbo({name: fit["trace"] for name, fit in fits.items()}, rows=len(data.Y)),
        "relevance.png": plots.plot_relevance(
            {name: npgp.gplvm.relevance(fit["params"]) for name, fit in fits.items()}, threshold=RELEVANT
        ),
        "reconstruction.png": plots.plot_reconstruction(
            data.Y[:, shown], mean[:, shown], scale[:, shown], column_names=[f"measurement {d + 1}" for d in shown]
        ),
    }
    for name, fit in fits.items():
        latents = npgp.gplvm.canonical_latents(fit["params"])
        figures[f"latent_{name}.png"] = plots.plot_latents(
            latents.loc,
            latents.scale,
            latents.relevance,
            data.labels,
            class_names=CLASS_NAMES,
            title=f"latent space, {name!r} conditional",
            background=npgp.gplvm.predictive_variance(fit["posterior"], latents),
            dimension_names=latents.names,
            units="lengthscales",
        )
    for name, figure in figures.items():
        write_picture(out / name, figure)


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", not args.float32)
    if args.data == "real":
        data = datasets.oil_flow("train")
        data = datasets.OilFlow(data.Y[: args.rows], data.labels[: args.rows], None)
    else:
        data = datasets.simulate_oil_flow(jax.random.key(args.seed), args.rows)
    rows, columns = data.Y.shape
    print(f"oil flow, {args.data}: {rows} rows of {columns} measurements; Q = {args.latent_dim}, M = {args.inducing}")
    conditionals = ["prior", "tight"] if args.conditional == "both" else [args.conditional]
    fits = {conditional: train(data, conditional, args) for conditional in conditionals}
    print_fits(fits, rows)
    if len(fits) == 2:
        gain = fits["tight"]["figures"]["elbo_per_row"] - fits["prior"]["figures"]["elbo_per_row"]
        print(f"the tight bound is {gain:+.2f} nats per row from the classical one")
    draw(fits, data, args.out)
    report = {"data": args.data, "n_rows": rows, "latent_dim": args.latent_dim, "inducing": args.inducing}
    report |= {name: fit["figures"] for name, fit in fits.items()}
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
