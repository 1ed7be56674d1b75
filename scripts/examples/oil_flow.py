#!/usr/bin/env python
"""Bayesian GPLVM of oil-flow measurements by SVI: the classical bound against the tight one.

Trains a GPLVM with one or both conditionals in the same settings, prints a table, and draws the latent space, the
relevance of its dimensions, the ELBO traces, and measured against reconstructed values.

    python scripts/examples/oil_flow.py                                     simulated data, a minute or two
    python scripts/examples/oil_flow.py --data real --steps 20000           the data of Bishop & James 1993, float64
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets
from npgp.gplvm import metrics
from npgp.gplvm.relevance import RELEVANT

CLASS_NAMES = ("homogeneous", "annular", "stratified")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", choices=["simulated", "real"], default="simulated")
    parser.add_argument("--rows", type=int, default=1000, help="rows to simulate (real data: the first so many)")
    parser.add_argument("--conditional", choices=["prior", "tight", "both"], default="both")
    parser.add_argument("--latent-dim", type=int, default=10)
    parser.add_argument("--inducing", type=int, default=25, help="number of inducing inputs")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, help="rows per step; all if omitted")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float32", action="store_true", help="train in single precision")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the pictures")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(argv)


def train(data: datasets.OilFlow, conditional: str, args: argparse.Namespace) -> dict:
    """Fit one GPLVM; its figures, parameters and ELBO trace."""
    began = time.perf_counter()
    start = npgp.pca_start(data.Y, args.latent_dim, args.inducing, seed=args.seed)
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
            "nn_errors": metrics.nearest_neighbour_errors(params["x.loc"] / params["lengthscale"], data.labels),
            "relevant_dims": npgp.gplvm.effective_dimensions(npgp.gplvm.relevance(params)),
            "seconds": seconds,
        },
        "elbo_standard_error": error / rows,
        "params": params,
        "posterior": gplvm.posterior(result.params),
        "trace": -result.losses,
        "reconstruction": (np.asarray(mean), np.sqrt(np.asarray(variance) + params["noise_variance"])),
    }


def table(fits: dict[str, dict], rows: int) -> str:
    """The printed table, one row per conditional."""
    header = ("conditional", "ELBO per row", "noise variance", f"NN errors of {rows}", "relevant dims", "seconds")
    lines = [header]
    for name, fit in fits.items():
        f = fit["figures"]
        lines.append(
            (
                name,
                f"{f['elbo_per_row']:.3f} ± {fit['elbo_standard_error']:.3f}",
                f"{f['noise_variance']:.5f}",
                str(f["nn_errors"]),
                str(f["relevant_dims"]),
                f"{f['seconds']:.0f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def draw(fits: dict[str, dict], data: datasets.OilFlow, out: Path) -> list[Path]:
    """Write the pictures; their paths."""
    from npgp import plots

    out.mkdir(parents=True, exist_ok=True)
    best = list(fits)[-1]
    figures = {
        "elbo.png": plots.plot_elbo({name: fit["trace"] for name, fit in fits.items()}, rows=len(data.Y)),
        "relevance.png": plots.plot_relevance(
            {name: npgp.gplvm.relevance(fit["params"]) for name, fit in fits.items()}, threshold=RELEVANT
        ),
        "reconstruction.png": plots.plot_reconstruction(data.Y, *fits[best]["reconstruction"]),
    }
    for name, fit in fits.items():
        latents = npgp.gplvm.canonical_latents(fit["params"])
        figures[f"latent_{name}.png"] = plots.plot_latents(
            latents.loc,
            latents.scale,
            latents.relevance,
            data.labels,
            CLASS_NAMES,
            title=f"latent space, {name!r} conditional",
            background=npgp.gplvm.predictive_variance(fit["posterior"], latents),
            dimension_names=latents.names,
            units="lengthscales",
        )
    for name, figure in figures.items():
        figure.savefig(out / name, dpi=130)
    return [out / name for name in figures]


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
    print(table(fits, rows))
    if len(fits) == 2:
        gain = fits["tight"]["figures"]["elbo_per_row"] - fits["prior"]["figures"]["elbo_per_row"]
        print(f"the tight bound is {gain:+.2f} nats per row from the classical one")
    for path in draw(fits, data, args.out):
        print(f"wrote {path}")
    report = {"data": args.data, "n_rows": rows, "latent_dim": args.latent_dim, "inducing": args.inducing}
    report |= {name: fit["figures"] for name, fit in fits.items()}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {args.json}")
    return report


if __name__ == "__main__":
    main()
