#!/usr/bin/env python
"""Which optimum a GPLVM of the oil-flow data reaches by default, seed by seed, and what the bound is worth there.

Each seed is one call, ``npgp.gplvm.fit(key, Y, 10, M)``, of the tight bound. From where it ends ``prior`` and ``tight``
are both climbed further, so that the optimum is the same one and the pairs differ in the bound alone.

    python scripts/studies/gplvm/oil_recipe.py                    simulated, 200 rows: a check that it runs
    NPGP_DATA=... python scripts/studies/gplvm/oil_recipe.py --data real --seeds 5 --inducing 25 50
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np

from npgp import gplvm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, spread, table, whole, write_json
from studies.gplvm.training import add_arguments, oil_flow


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--seeds", type=whole, default=2)
    parser.add_argument("--latent-dim", type=whole, default=10)
    parser.add_argument(
        "--pair-steps", type=int, default=0, help="steps of both bounds from the optimum found; 0 for none"
    )
    parser.add_argument("--restarts", type=int, default=0, help="further starts, with random inducing inputs")
    add_arguments(parser, minibatches=False, inducing={"nargs": "+", "default": [25]}, steps=3600)
    return parser.read(argv)


def run(Y: np.ndarray, labels: np.ndarray, seed: int, inducing: int, args: argparse.Namespace) -> dict:
    """One seed's figures, per row in nats."""
    began, rows = time.perf_counter(), len(Y)
    options = dict(restarts=args.restarts, max_steps=args.steps, progress=False)
    found = gplvm.fit(jax.random.key(seed), Y, args.latent_dim, inducing, **options)
    figures = {
        "inducing": inducing,
        "seed": seed,
        "seconds": time.perf_counter() - began,
        "race": found.race / rows,
        "bound": found.bound / rows,
        "noise_variance": float(found.params["noise_variance"]),
        "nn_errors": gplvm.nearest_neighbor_errors(found.params["x.loc"] / found.params["lengthscale"], labels),
        "relevant_dims": gplvm.effective_dimensions(found.relevance),
    }
    for conditional in ("prior", "tight") if args.pair_steps else ():
        model = gplvm.CollapsedGPLVM(found.gplvm.start, conditional=conditional)
        params = {name: value for name, value in found.params.items() if not name.startswith("f.u")}
        further = model.fit(Y, args.pair_steps, params=params, progress=False)
        figures[conditional] = further.bounds[-1] / rows
    return figures


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    warnings.filterwarnings("ignore", ".*has not converged", RuntimeWarning)
    data = oil_flow(args)
    runs = []
    for inducing in args.inducing:
        for seed in range(args.seeds):
            runs.append(run(data.Y, data.labels, seed, inducing, args))
            print({k: np.round(v, 5) for k, v in runs[-1].items()}, flush=True)
    names = [name for name in ("bound", "prior", "tight") if name in runs[0]]
    lines = []
    for inducing in args.inducing:
        own = [f for f in runs if f["inducing"] == inducing]
        values = np.array([f["bound"] for f in own])
        deviation = f"{np.std(values, ddof=1):.3f}" if len(own) > 1 else None
        errors = " ".join(str(f["nn_errors"]) for f in own)
        means = [spread(f[name] for f in own) for name in names]
        dims = " ".join(str(f["relevant_dims"]) for f in own)
        gain = spread([f["tight"] - f["prior"] for f in own], sign="+") if args.pair_steps else None
        seconds = f"{np.mean([f['seconds'] for f in own]):.0f}"
        lines.append((inducing, *means, gain, deviation, f"{values.min():.3f}", errors, dims, seconds))
    heads = ("M", *names, "gain of tight", "SD over seeds", "lowest", "NN errors", "relevant dims", "seconds")
    print(table(heads, lines, markdown=True))
    report = {"data": args.data, "n_rows": len(data.Y), "steps": args.steps, "runs": runs}
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
