"""Entries of the oil-flow data that are missing at random, imputed by a GPLVM and in other ways."""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer

from common import spread, table, write_picture
from npgp import datasets
from npgp.gplvm import metrics
from npgp.gplvm.new_rows import NewRows, infer_latents
from npgp.gplvm.relevance import effective_dimensions, relevance
from studies.gplvm.training import chosen, coverage, errorbars, kept, oil_flow, rmse, train

#: Ranks of PCA and numbers of nearest rows to choose from.
RANKS, NEIGHBORS = range(1, 9), (1, 2, 3, 5, 10, 20)
#: Rounds of iterative PCA at most, and the relative change at which it is done.
PCA_ROUNDS, PCA_TOLERANCE = 500, 1e-5
#: The GPLVM's ways to impute the rows that it was trained on.
WAYS = {"trained": "GPLVM", "inferred": "GPLVM, q(x) inferred anew"}
#: The other ways.
OTHERS = {
    "pca": "PCA",
    "nearest": "mean of the nearest rows",
    "linear": "linear regressions",
    "mean": "column means",
}


def impute_by_pca(seen: np.ndarray, rank: int) -> np.ndarray:
    """Missing entries (NaN) filled in by principal components, which are then found anew, until that changes little."""
    present = np.isfinite(seen)
    filled = np.where(present, seen, np.nanmean(seen, axis=0))
    for _ in range(PCA_ROUNDS):
        pca = PCA(rank, svd_solver="full")
        new = np.where(present, seen, pca.inverse_transform(pca.fit_transform(filled)))
        change = np.linalg.norm(new - filled) / np.linalg.norm(filled)
        filled = new
        if change < PCA_TOLERANCE:
            break
    return filled


def impute_by_neighbors(seen: np.ndarray, number: int) -> np.ndarray:
    """Missing entries filled in by the mean of the nearest rows that have them."""
    return KNNImputer(n_neighbors=number).fit_transform(seen)


def impute_by_regressions(seen: np.ndarray) -> np.ndarray:
    """Missing entries filled in by Bayesian linear regression of each column on all others, in rounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return IterativeImputer(max_iter=30, random_state=0).fit_transform(seen)


def best_choice(impute: Callable[[np.ndarray, int], np.ndarray], seen: np.ndarray, choices, seed: int) -> int:
    """Which choice imputes a tenth of the present entries best from the others."""
    present = np.isfinite(seen)
    held = present & (np.random.default_rng([seed, 1]).uniform(size=seen.shape) < 0.1)
    rest = np.where(held, np.nan, seen)
    return min(choices, key=lambda choice: rmse(impute(rest, choice), seen, held))


def where_present(Y: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Entries that are not missing at random, nested for all shares."""
    return np.random.default_rng(seed).uniform(size=Y.shape) >= share


def impute_otherwise(Y: np.ndarray, share: float, seed: int) -> dict:
    """Impute the same entries in the other ways; the figures."""
    present = where_present(Y, share, seed)
    seen, gap = np.where(present, Y, np.nan), ~present
    figures: dict[str, Any] = {}
    for name, impute, choices in (("pca", impute_by_pca, RANKS), ("nearest", impute_by_neighbors, NEIGHBORS)):
        choice = best_choice(impute, seen, choices, seed)
        figures[name] = {"rmse": rmse(impute(seen, choice), Y, gap), "choice": choice}
    figures["linear"] = {"rmse": rmse(impute_by_regressions(seen), Y, gap)}
    figures["mean"] = {"rmse": rmse(np.broadcast_to(np.nanmean(seen, 0), seen.shape), Y, gap)}
    return figures


def impute_by_gplvm(args: argparse.Namespace, data: datasets.OilFlow, share: float, seed: int) -> dict:
    """Train on the present entries, and impute the others; the figures."""
    present = where_present(data.Y, share, seed)
    seen, gap = np.where(present, data.Y, np.nan), ~present
    began = time.perf_counter()
    gplvm, params, elbo = train(args, seen, present if share else None, seed)
    loc = np.asarray(params["x.loc"])
    figures: dict[str, Any] = {
        "elbo_per_row": elbo,
        "noise": math.sqrt(float(params["noise_variance"])),
        "nn_errors": metrics.nearest_neighbor_errors(loc / np.asarray(params["lengthscale"]), data.labels),
        "relevant_dims": effective_dimensions(relevance(loc, params["lengthscale"])),
        "seconds": time.perf_counter() - began,
    }
    if not share:
        return figures
    posterior, likelihood = gplvm.posterior(params), gplvm.likelihood_at(params)
    offset = gplvm.start.offset
    ways = {"trained": NewRows(params["x.loc"], params["x.scale"])}
    if args.starts:
        ways["inferred"] = infer_latents(
            posterior, likelihood, seen, mask=present, offset=offset, candidates=loc, start=loc, num_starts=args.starts
        )
    for name, rows in ways.items():
        mean, scale = rows.impute(posterior, likelihood, jnp.asarray(seen), mask=jnp.asarray(present), offset=offset)
        figures[name] = {"rmse": rmse(mean, data.Y, gap), "coverage": coverage(mean, scale, data.Y, gap)}
    figures["seconds"] = time.perf_counter() - began
    return figures


SETTINGS = ("data", "rows", "latent_dim", "inducing", "batch_size", "steps", "learning_rate", "row_rate", "starts")


def study(args: argparse.Namespace) -> dict:
    """Train and impute for each share of missing entries and seed; the figures."""
    jax.config.update("jax_enable_x64", True)
    data = oil_flow(args)
    rows, columns = data.Y.shape
    print(
        f"oil flow, {args.data}: {rows} rows of {columns} measurements; Q = {args.latent_dim}, M = {args.inducing}, "
        f"{args.steps} steps of {args.batch_size or 'all'} rows"
    )
    runs: dict[float, list[dict]] = {share: [] for share in args.missing}
    for seed in range(args.seeds):
        for share, figures in runs.items():
            name = f"{share:g}-{seed}"
            found = kept(args, name, chosen(args, SETTINGS), partial(impute_by_gplvm, args, data, share, seed))
            if share:
                otherwise = partial(impute_otherwise, data.Y, share, seed)
                found = found | kept(args, f"others-{name}", chosen(args, ("data", "rows")), otherwise)
            figures.append(found)
    show(runs, rows, args)
    return {
        "settings": chosen(args, SETTINGS),
        "n_rows": rows,
        "runs": {f"{share:g}": figures for share, figures in runs.items()},
    }


def show(runs: Mapping[float, Sequence[dict]], rows: int, args: argparse.Namespace) -> None:
    """Print the tables, and draw the picture."""
    lines = []
    for share, figures in runs.items():
        line = [f"{share:.0%}", spread([f["elbo_per_row"] for f in figures], 2)]
        line.append(spread([f["noise"] for f in figures], 4))
        lines.append(line + [" ".join(str(f[key]) for f in figures) for key in ("nn_errors", "relevant_dims")])
    heads = ["missing", "ELBO per row", "noise", f"NN errors of {rows}, by seed", "relevant dims, by seed"]
    print(f"\nThe models\n{table(heads, lines)}")
    gaps = {share: figures for share, figures in runs.items() if share}
    if not gaps:
        return
    lines, ways = [], dict(WAYS) if args.starts else {"trained": WAYS["trained"]}
    for share, figures in gaps.items():
        errors = {how: spread([f[how]["rmse"] for f in figures], 4) for how in (*ways, *OTHERS)}
        for how in ("pca", "nearest"):
            errors[how] += f" ({' '.join(str(f[how]['choice']) for f in figures)})"
        intervals = [spread([100 * f[how]["coverage"] for f in figures], 1) for how in ways]
        lines.append([f"{share:.0%}", *errors.values(), *intervals])
    heads = ["missing", *ways.values(), "PCA (rank)", "nearest rows (number)", "linear regressions", "column means"]
    heads += [f"% in 90% intervals, {name}" for name in ways.values()]
    print(f"\nRMSE of the missing entries, in the units of the data\n{table(heads, lines)}\n")
    write_picture(args.out / "imputation_oil.png", draw(gaps))


def draw(runs: Mapping[float, Sequence[dict]]):
    """RMSE of each way to impute, and coverage of the GPLVM's intervals, against the share of missing entries."""
    from matplotlib import pyplot as plt

    from npgp.plots import COLORS

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained", width_ratios=[1.5, 1])
    one = next(iter(runs.values()))[0]
    names = {how: name for how, name in (WAYS | OTHERS).items() if how in one}
    at = [100 * share for share in runs]
    for i, (how, name) in enumerate(names.items()):
        for ax, key, unit in ((left, "rmse", 1.0), (right, "coverage", 100.0)):
            if key in one[how]:
                values = [[unit * f[how][key] for f in figures] for figures in runs.values()]
                errorbars(ax, at, values, color=COLORS[i], label=name)
    right.axhline(90, color="0.4", lw=0.8, ls="--")
    left.set_ylim(bottom=0)
    left.set_ylabel("RMSE of the missing entries")
    right.set_ylabel("true values inside 90% intervals (%)")
    for ax in (left, right):
        ax.set_xlabel("entries missing (%)")
        ax.set_xticks(at)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure
