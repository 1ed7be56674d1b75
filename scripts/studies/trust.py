"""Is ``npgp.check_posterior`` right about which posteriors to trust? On models of the cookbook of the tests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro import handlers
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO

import npgp
from studies.fits import nuts_draws
from studies.runner import Records, Study

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import cookbook

GUIDES = {"default": None, "independent": "independent"}

#: Sites of more entries are those of rows.
FEW = 20


@lru_cache(maxsize=1)
def examples(rows: int, seed: int) -> dict[str, tuple[Callable, dict[str, Any], str]]:
    """Of each model: what it is called with, and the name of its observations."""
    rng = np.random.default_rng(seed)
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


def by_nuts(model: Callable, data: dict[str, Any], args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Draws of the sites that are compared."""
    drawn = jax.device_get(nuts_draws(model, jax.random.key(args.seed), args.draws, args.draws, **data))
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


def trust(args: argparse.Namespace, model: str) -> Records:
    """Of both guides."""
    of, inputs, observed = examples(args.rows, args.seed)[model]
    drawn = Predictive(of, num_samples=1)(jax.random.key(args.seed), **inputs)
    data = inputs | {observed: np.asarray(drawn[observed][0])}
    reference, found = by_nuts(of, data, args), []
    rhat = max(float(np.max(split_gelman_rubin(v[None]))) for v in reference.values())
    for name in args.guides:
        guide = npgp.AutoSparseGP(of, dependence=GUIDES[name])
        svi = SVI(of, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
        params = npgp.fit(svi, jax.random.key(args.seed), args.steps, progress=False, **data).params
        key, count = jax.random.key(args.seed + 1), 4 * args.draws
        check = npgp.check_posterior(key, of, guide, params, draws=count, **data)
        least, *_ = each = shares(guide.sample_posterior(key, params, sample_shape=(count,), **data), reference)
        figures = {
            "khat": float(check.khat),
            "effective": check.effective / check.draws,
            "moved": max(check.moved.values()),
            "widened": max(check.widened.values(), key=abs),
            "near": int(check.near),
            "elbo": float(check.elbo),
            "share": least[0],
            "sd": least[2],
            "rhat": rhat,
        }
        found.append(
            {"guide": name, "where": least[1], "mean_share": float(np.mean([s for s, _, _ in each]))} | figures
        )
    return found


STUDIES = {
    "trust": Study(
        """Is ``npgp.check_posterior`` right about which posteriors to trust? On models of the cookbook of the tests.

Each model simulates its own data, at parameters drawn from its prior. It is trained with two guides, the default and
one whose q(ε) is independent of all else, and sampled by NUTS over all of its sites. NUTS samples the model as it is
written, in which rows are independent given ε (FITC's density), the guides aim at the bound's posterior; where inducing
points are few the two differ, whatever the guide. A model that has no other sites than those of rows and inducing
values is left out, as is one whose posterior has equal modes (coregionalization, classes, deep GPs).""",
        trust,
        {"model": tuple(examples(12, 0))},
        {
            "khat": ("k̂", 2),
            "effective": ("effective", 2),
            "moved": ("moved", 2),
            "widened": ("widened", 2),
            "near": ("near", 0),
            "elbo": ("ELBO", 1),
            "share": ("least share", 2),
            "sd": ("SD", 2),
            "mean_share": ("mean share", 2),
            "rhat": ("R-hat of NUTS", 3),
        },
        {"draws": 500, "rows": 100, "steps": 3000, "learning_rate": 0.02, "seed": 0, "guides": tuple(GUIDES)},
        rows=("model", "guide", "where"),
        quick={"model": ["dose and trend"], "rows": 12, "draws": 25, "steps": 3, "guides": ["independent"]},
        note="k̂: of the weights of the guide's draws; effective, their number as a share; moved and widened, by which "
        "means and deviations are off by them, of all sites the most; near: 1 if the check says so. Share: of NUTS's "
        "draws in the guide's 90% interval, the least of all sites but those of rows, and where; .9 if right. SD: the "
        "guide's there over NUTS's.",
        x64=False,
    )
}
