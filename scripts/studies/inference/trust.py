#!/usr/bin/env python
"""Is ``npgp.check_posterior`` right about which posteriors to trust? On models of the cookbook (tests/support).

Each model simulates its own data, at parameters drawn from its prior. It is trained with two guides, the default and
one whose q(ε) is independent of all else, and sampled by NUTS over all of its sites. The table has, for each guide:

    k̂        of the weights of its draws, by ``npgp.check_posterior``; below .7 it is said to be usable
    share    of NUTS's draws that lie in the guide's 90% interval, the least of all sites but those of rows; .9 if right
    where    the site of that share
    SD       the guide's standard deviation there over NUTS's

NUTS samples the model as it is written, in which rows are independent given ε (FITC's density), the guides aim at the
bound's posterior; where inducing points are few the two differ, whatever the guide. A model that has no other sites
than those of rows and inducing values is left out, as is one whose posterior has equal modes (coregionalization, for
the sign of its weights; classes, deep GPs).

    python scripts/studies/inference/trust.py --json out/trust.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro import handlers
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import NUTS, SVI, Predictive, TraceMeanField_ELBO, init_to_median

import npgp

ROOT = Path(__file__).resolve().parents[3]
sys.path[1:1] = [str(ROOT / "scripts"), str(ROOT / "tests" / "support")]
import cookbook

from common import Arguments, clock, command, table, whole, write_json
from studies.shared import mcmc_draws

GUIDES = {"default": "pseudo-data", "independent": "independent"}
#: Sites of more entries are those of rows.
FEW = 20


def examples(rows: int, rng: np.random.Generator) -> dict[str, tuple[Callable, dict[str, Any], str]]:
    """Of each model: what it is called with, and the name of its observations."""
    x = np.sort(rng.uniform(0.0, 10.0, (rows, 1)), axis=0).astype(np.float32)
    plane = rng.uniform(0.0, 3.0, (rows, 2)).astype(np.float32)
    normal = rng.normal(size=(rows, 2)).astype(np.float32)
    positive = rng.uniform(0.2, 1.0, (2, rows)).astype(np.float32)
    counts = partial(cookbook.spatial_counts, groups=8, inducing=cookbook.square(0.0, 3.0, 4))
    interaction = partial(cookbook.main_effects_and_interaction, inducing=cookbook.square(0.0, 10.0, 5))
    seasonal = {"X": 0.8 * x, "sd": positive[0], "weight": np.ones(rows, np.float32)}
    return {
        "dose and trend": (cookbook.dose_effect, {"X": x, "dose": normal}, "y"),
        "counts in space": (
            counts,
            {"S": plane, "group": np.arange(rows) % 8, "exposure": 8 * positive[1]},
            "y",
        ),
        "main effects, interaction": (interaction, {"X": plane * (10 / 3)}, "y"),
        "trend and season": (cookbook.trend_and_season, seasonal, "y"),
        "changing noise": (cookbook.changing_noise, {"X": x}, "y"),
        "two classes": (cookbook.classification, {"X": x, "dose": normal[:, 0]}, "y"),
        "ratings": (partial(cookbook.ratings, categories=4), {"X": x}, "y"),
        "outliers": (cookbook.outliers, {"X": x}, "y"),
        "survival": (cookbook.survival, {"X": x, "censored": np.zeros(rows, np.float32)}, "time"),
        "excess zeros": (cookbook.excess_zeros, {"X": x}, "y"),
        "drifting sensor": (cookbook.drifting_sensor, {"X": x}, "y"),
        "curve or line": (cookbook.mixture_of_regressions, {"X": x}, "y"),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", metavar="NAME", help="some of the models by their names in the table; all if omitted")
    add("--draws", type=whole, default=500, help="by NUTS, after as many to warm up; four times as many of a guide")
    parser.shared("quick", "json", "cpu-time", rows=100, steps=3000, learning_rate=0.02, seed=0)
    quick = {"models": ["dose and trend"], "rows": 12, "draws": 25, "steps": 3}
    return parser.read(argv, quick=quick)


def by_nuts(model: Callable, data: dict[str, Any], args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Draws of the sites that are compared."""
    kernel = NUTS(model, init_strategy=init_to_median, target_accept_prob=0.9)
    drawn = jax.device_get(mcmc_draws(kernel, jax.random.key(args.seed), args.draws, args.draws, **data))
    with handlers.block(), handlers.trace() as sites, handlers.seed(rng_seed=0):
        model(**data)
    inducing = {name for name, site in sites.items() if site["type"] == "deterministic" or name.endswith((".u", ".v"))}
    return {n: v for n, v in drawn.items() if n not in inducing and v[0].size <= FEW and np.ptp(v) > 0}


def shares(draws: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> list[tuple[float, str, float]]:
    """Of each entry of the sites, the share of the reference's draws in the 90% interval, and the ratio of SDs."""
    found = []
    for name, ours in reference.items():
        theirs = np.asarray(draws[name]).reshape(len(draws[name]), -1)
        for i, (a, b) in enumerate(zip(ours.reshape(len(ours), -1).T, theirs.T, strict=True)):
            low, high = np.quantile(b, [0.05, 0.95])
            where = name if ours[0].size == 1 else f"{name}[{i}]"
            found.append((float(np.mean((low < a) & (a < high))), where, float(b.std() / a.std())))
    return sorted(found)


def study(name: str, model: Callable, inputs: dict[str, Any], observed: str, args: argparse.Namespace) -> dict:
    simulated = Predictive(model, num_samples=1)(jax.random.key(args.seed), **inputs)
    data = inputs | {observed: np.asarray(simulated[observed][0])}
    now, guides = clock(args.cpu_time), {}
    began = now()
    reference = by_nuts(model, data, args)
    seconds = now() - began
    for guide_name, dependence in GUIDES.items():
        began = now()
        guide = npgp.AutoSparseGP(model, dependence=dependence)
        svi = SVI(model, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
        params = npgp.fit(svi, jax.random.key(args.seed), args.steps, progress=False, **data).params
        key, count = jax.random.key(args.seed + 1), 4 * args.draws
        check = npgp.check_posterior(key, model, guide, params, draws=count, **data)
        draws = guide.sample_posterior(key, params, sample_shape=(count,), **data)
        found = shares(draws, reference)
        guides[guide_name] = {
            "khat": float(check.khat),
            "elbo": float(check.elbo),
            "spread": float(check.spread),
            "share": found[0][0],
            "where": found[0][1],
            "sd": found[0][2],
            "mean_share": float(np.mean([share for share, _, _ in found])),
            "seconds": now() - began,
        }
    rhat = max(float(np.max(split_gelman_rubin(v[None]))) for v in reference.values())
    return {"name": name, "nuts_seconds": seconds, "rhat": rhat, "entries": len(found), "guides": guides}


def summary(found: list[dict[str, Any]]) -> str:
    heads = ("model", "guide", "k̂", "ELBO", "least share", "where", "SD", "mean share", "R-hat of NUTS")
    lines = []
    for case in found:
        for name, f in case["guides"].items():
            figures = (f"{f['khat']:.2f}", f"{f['elbo']:.1f}", f"{f['share']:.2f}", f["where"], f"{f['sd']:.2f}")
            lines.append((case["name"], name, *figures, f"{f['mean_share']:.2f}", f"{case['rhat']:.3f}"))
    return table(heads, lines, left=(0, 1, 5))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    every = examples(args.rows, np.random.default_rng(args.seed))
    names = args.models or list(every)
    if unknown := set(names) - set(every):
        sys.exit(f"trust.py: no models {sorted(unknown)}; there are {list(every)}")
    found = []
    for name in names:
        found.append(study(name, *every[name], args))
        print(*summary(found[-1:]).splitlines()[1:], sep="\n", flush=True)
    report = {"command": command(__file__, argv), "found": found}
    print(summary(found))
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
