#!/usr/bin/env python
"""Deep GPs of one to three layers on UCI sets, with the prior's and the tight conditional in the last layer.

After the regression experiments of Salimbeni & Deisenroth (2017), of which ``--full`` has the sizes as we know them:
layers as wide as the inputs (at most 30), RBF kernels with a lengthscale for each column, 100 inducing inputs in each
layer that start at the centers of k-means, identity mean functions between layers, marginal draws row by row, Adam at
.01 for 20,000 steps on batches of up to 10,000 rows. Splits are those of ``npgp.datasets.uci``, and not the paper's.
The paper's table is not repeated here: we had no copy of it to check the numbers against. For kin8nm there are the
numbers that its authors' demonstration prints.

Where training ends differs from start to start by more than the conditionals do. So all conditionals of a split go on
from the same parameters, those of the first half of the steps, which are with the prior's conditional.

    NPGP_DATA=... python scripts/studies/deep/uci.py --sets energy kin8nm --splits 2
    NPGP_DATA=... python scripts/studies/deep/uci.py --full --layers 1 2 3 --json out/deep_uci.json

The first is for two cores; the second for an accelerator. ``--markdown`` writes what stands in
scripts/benchmarks/results/deep_uci.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from common import Arguments, command, moments, plus_minus, table, whole, write_json
from studies.spherical.uci_data import SETS, load

ALL_SETS = (*SETS, "protein", "wine")
#: Widest inner layers, and draws of what is between layers for predictions.
WIDEST, DRAWS = 30, 100
#: Test log-likelihoods.
PUBLISHED = """
For kin8nm the authors' demonstration (`demos/demo_regression_UCI.ipynb` of UCL-SML/Doubly-Stochastic-DGP; one split,
not ours; M = 100, 5000 steps of 1000 rows, five draws a step) prints .943, 1.291 and 1.304 for one to three layers by
Adam, .955, 1.292 and 1.315 with natural gradients for the last layer, and .976 for one layer's collapsed bound.
"""
METRICS = ("elbo", "test log-likelihood", "test RMSE")
NAMES = ("ELBO per row", *METRICS[1:])


def model(X, y=None, *, size: int, start: list[np.ndarray], conditional: str):
    """
    :param size: number of training rows.
    :param start: the first inducing inputs of each layer.
    :param conditional: of the last layer.
    """
    positive = constraints.positive
    noise = numpyro.param("noise", 0.1, constraint=positive)
    layers = []
    for i, Z in enumerate(start):
        inner = i + 1 < len(start)
        scale = numpyro.param(f"lengthscale_{i}", jnp.full(Z.shape[1], float(np.sqrt(Z.shape[1]))), constraint=positive)
        variance = numpyro.param(f"variance_{i}", 0.1 if inner else 1.0, constraint=positive)
        points = numpyro.param(f"Z_{i}", Z)
        width = start[i + 1].shape[1] if inner else 1
        mean = npgp.model.linear_mean(np.eye(Z.shape[1]), width) if inner else None
        layers.append(npgp.Layer(npgp.RBF(scale, variance=variance), points, width=width, mean=mean))
    deep = npgp.DeepGP("deep", layers).draw()
    with npgp.plate("data", size, rows=X.shape[0]):
        npgp.observe("y", deep(X), npgp.Gaussian(variance=noise), obs=y, conditional=conditional)


def fits(data: Any, layers: int, args: Any, seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """
    Train with the prior's conditional for the first half of the steps, go on from there with each conditional, and look
    at the test rows; densities are of y in its own units.
    """
    X, y = np.asarray(data.X_train, np.float32), np.asarray(data.y_train, np.float32)
    X_test, y_test = np.asarray(data.X_test, np.float32), np.asarray(data.y_test, np.float32)
    M = min(args.inducing, len(X) // 2)
    Z = np.asarray(npgp.inducing.kmeans(jax.random.key(seed), X, M))
    W = np.asarray(npgp.model.linear_mean(X, min(WIDEST, X.shape[1])))
    start = [Z, *[Z @ W] * (layers - 1)]
    batch = None if args.batch_size >= len(X) else args.batch_size

    def train(conditional: str, optim: Any, steps: int, key: int, params: Any = None):
        this = partial(model, size=len(X), start=start, conditional=conditional)
        guide = npgp.AutoSparseGP(this)
        svi = SVI(this, guide, optim, TraceMeanField_ELBO(num_particles=args.particles))
        keys = jax.random.key(seed + key)
        result = npgp.fit(svi, keys, steps, X, y, init_params=params, batch_size=batch, progress=False)
        return this, guide, svi, result

    shared = args.steps // 2
    halfway = train("prior", npgp.adam(args.learning_rate), shared, 1)[-1].params
    for conditional in args.conditionals:
        decaying = npgp.adam(args.learning_rate, args.steps - shared)
        this, guide, svi, result = train(conditional, decaying, args.steps - shared, 2, halfway)
        elbo, _ = npgp.evaluate(svi, jax.random.key(seed + 3), result, X, y, num_draws=20, batch_size=batch)
        f = npgp.posterior("deep", this, guide, result.params, X[:2])
        density = f.log_density(X_test, y_test, npgp.Gaussian(variance=result.params["noise"]))
        error = np.sqrt(np.mean((np.asarray(f.mean(X_test)) - y_test) ** 2))
        yield (
            conditional,
            {
                "elbo": elbo / len(X),
                "test log-likelihood": float(np.mean(density) - np.log(data.y_scale)),
                "test RMSE": float(error * data.y_scale),
            },
        )


def scores(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows of the table of scores: means over splits, with standard errors."""
    rows = []
    for key in dict.fromkeys((r["set"], r["layers"], r["conditional"]) for r in records):
        same = [r for r in records if (r["set"], r["layers"], r["conditional"]) == key]
        rows.append((*key, *(plus_minus(*moments(r[m] for r in same), 3) for m in METRICS)))
    return rows


def gains(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows of the table of gains: of a layer more, and of the tight conditional, on the same split."""
    found = {(r["set"], r["split"], r["layers"], r["conditional"]): r for r in records}
    differences: dict[tuple[str, str], list[dict[str, float]]] = {}
    for (name, split, layers, conditional), record in found.items():
        before = {
            f"{layers} layers over {layers - 1}, {conditional}": (name, split, layers - 1, conditional),
            f"tight over prior, {layers} layer{'s' * (layers > 1)}": (name, split, layers, "prior"),
        }
        for what, other in before.items():
            if other in found and found[other] is not record:
                less = {m: record[m] - found[other][m] for m in METRICS}
                less["test RMSE"] *= -1.0
                differences.setdefault((name, what), []).append(less)
    return [(*key, *(plus_minus(*moments(d[m] for d in of), 3) for m in METRICS)) for key, of in differences.items()]


def main(argv: list[str] | None = None) -> None:
    parser = Arguments(__doc__)
    parser.shared("quick", "full", "json", "seed", "rows", inducing=50, steps=1500, batch_size=500, learning_rate=0.02)
    parser.add_argument("--sets", nargs="*", choices=[*ALL_SETS, "simulated"], default=["energy", "kin8nm"])
    parser.add_argument("--layers", nargs="+", type=whole, default=[1, 2])
    parser.add_argument("--conditionals", nargs="+", choices=["prior", "tight"], default=["prior", "tight"])
    parser.add_argument("--splits", type=whole, default=2, help="how many")
    parser.add_argument("--particles", type=whole, default=1, help="draws of what is between layers in a step")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    parser.add_argument(
        "--earlier", nargs="+", type=Path, metavar="FILE", default=[], help="records to add; without sets, all"
    )
    quick = {"sets": ["simulated"], "splits": 1, "steps": 30, "inducing": 8, "rows": 60, "batch_size": 30}
    args = parser.read(argv, quick)
    if args.full:
        args.inducing, args.steps, args.batch_size, args.learning_rate = 100, 20_000, 10_000, 0.01

    earlier = [json.loads(file.read_text()) for file in args.earlier]
    records = [record for run in earlier for record in run["records"]]
    for name in args.sets:
        for split in range(args.splits):
            data = load(name, split, args.rows)
            for layers in args.layers:
                for conditional, found in fits(data, layers, args, args.seed + 10 * split):
                    records.append({"set": name, "split": split, "layers": layers, "conditional": conditional, **found})
                    print({k: round(v, 4) if isinstance(v, float) else v for k, v in records[-1].items()}, flush=True)
    shown = [
        table(("set", "layers", "last layer", *NAMES), scores(records), left=(0, 2), markdown=markdown)
        + "\n\nGains, split by split (positive: the first is better; of RMSE, how much less):\n\n"
        + table(("set", "gain of", *NAMES), gains(records), left=(0, 1), markdown=markdown)
        for markdown in (False, True)
    ]
    print(shown[0])
    if args.json:
        write_json(args.json, {"command": command(__file__, argv), "records": records})
    if args.markdown:
        commands = "\n    ".join([*(run["command"] for run in earlier), command(__file__, argv)])
        text = (
            f"# Deep GPs on UCI sets\n\n    {commands}\n\n"
            f"Splits: {args.splits}{' (means ± standard errors)' * (args.splits > 1)}; M = {args.inducing}, "
            f"{args.steps} steps of {args.batch_size} rows, of which the conditionals share the first half (published: "
            "M = 100, 20,000 steps of up to 10,000 rows, `--full`). The ELBO is of standardized outputs, test scores "
            "are in the outputs' units.\n\n"
        )
        args.markdown.write_text(text + shown[1] + "\n" + PUBLISHED * ("kin8nm" in {r["set"] for r in records}))


if __name__ == "__main__":
    main()
