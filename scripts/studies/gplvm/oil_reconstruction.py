#!/usr/bin/env python
"""Reconstruction of oil-flow measurements by GPLVMs of four guides of the latents: Lalchand, Ravuri & Lawrence 2022.

    point       point estimates without a prior (Lawrence 2005)
    map         point estimates with the prior N(0, I)
    gaussian    q(x_n) = N(μ_n, S_n), parameters for each row
    amortised   q(x_n) from an encoder

of a random part of the rows, 950 of 1000; the other 50 are test rows, whose q(x) is inferred at the trained model
(npgp.infer_latents), and by the encoder where there is one. Some of the entries of training and test rows may be
missing at random. RMSE is in the units of the data, over all entries of all columns alike.

    python scripts/studies/gplvm/oil_reconstruction.py                             simulated data, a minute or two
    NPGP_DATA=... python scripts/studies/gplvm/oil_reconstruction.py --data real   the data of Bishop & James 1993

Training is in float64, on minibatches. Every run is kept in a file of its own, and not repeated if that file has the
same settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import npgp
from npgp.gplvm import BayesianGPLVM, Encoder, FreeNormal, LatentGuide, Point, pca_start
from npgp.gplvm.new_rows import NewRows, infer_latents
from npgp.gplvm.relevance import effective_dimensions, relevance

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, scores, spread, table, write_json, write_picture
from studies.gplvm.training import (
    POSITIVE,
    Trainer,
    add_arguments,
    chosen,
    coverage,
    errorbars,
    fill,
    kept,
    oil_flow,
    rmse,
)

GUIDES: dict[str, Callable[[], LatentGuide]] = {
    "point": lambda: Point(prior=False),
    "map": Point,
    "gaussian": FreeNormal,
    "amortised": lambda: Encoder(rng_key=jax.random.key(0)),
}
#: Test RMSE with complete rows, Lalchand, Ravuri & Lawrence 2022.
PUBLISHED = {"gaussian": 0.0925, "amortised": 0.067}
#: Standard deviation of the prior of test latents in spreads of the training latents, where training had no prior.
FLAT = 10.0
SETTINGS = ("data", "rows", "test_rows", "latent_dim", "inducing", "conditional", "batch_size", "steps")
SETTINGS += ("learning_rate", "row_rate", "positive", "noise_start", "lengthscale")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--test-rows", type=int, default=50, help="how many of the rows are test rows")
    add("--guides", nargs="+", choices=GUIDES, default=list(GUIDES))
    add("--missing", nargs="+", type=float, help="shares of missing entries; 0 0.3, or 0 0.1 0.3 0.5 for real data")
    add("--seeds", type=int, help="each with a split and inducing inputs of its own; 1, or 3 for real data")
    add("--latent-dim", type=int, default=12)
    add("--conditional", choices=["prior", "tight"], default="tight")
    add("--positive", choices=POSITIVE, default="log", help="what is free of lengthscales, variance, noise variance")
    add("--noise-start", type=float, default=0.2, help="initial noise variance, about that of the data")
    apart = "initial lengthscale; √Q if omitted, as latents of unit variance are √(2Q) apart"
    add("--lengthscale", type=float, help=apart)
    add("--runs", type=Path, default=Path("out/oil_reconstruction"), help="folder of the single runs")
    add_arguments(parser, inducing=25, steps=dict(help="1000, or 6000 for real data"))
    args = parser.read(argv)
    real = args.data == "real"
    fill(args, {"seeds": 3 if real else 1, "steps": 6000 if real else 1000, "rows": None if real else 200})
    fill(args, {"missing": [0.0, 0.1, 0.3, 0.5] if real else [0.0, 0.3]})
    if min(args.seeds, args.test_rows, args.latent_dim) < 1 or args.batch_size < 0:
        parser.error("counts must be positive.")
    if not all(0.0 <= share < 1.0 for share in args.missing):
        parser.error("--missing must be shares from 0 to below 1.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Data


@dataclasses.dataclass(frozen=True)
class Part:
    """
    Training or test rows.

    :param complete: all entries, (N, D).
    :param present: which of them are seen, (N, D).
    """

    complete: np.ndarray
    present: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """The data with NaN for what is not seen."""
        return np.where(self.present, self.complete, np.nan)

    @property
    def mask(self) -> np.ndarray | None:
        return None if self.present.all() else self.present


def split(Y: np.ndarray, test_rows: int, missing: float, seed: int) -> tuple[Part, Part]:
    """Random training and test rows, and missing entries: the same rows for all shares, and nested entries."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(Y))
    present = rng.uniform(size=Y.shape) >= missing
    test, train = order[:test_rows], order[test_rows:]
    return Part(Y[train], present[train]), Part(Y[test], present[test])


# ---------------------------------------------------------------------------------------------------------------
# Runs


def errors(part: Part, mean: np.ndarray, variance: np.ndarray, noise: float) -> dict[str, float | None]:
    """
    How well entries are reconstructed. Of those that are missing also the negative log density per entry, and the share
    that lies in central 90% intervals, both with the noise.

    :param mean: of the functions, (N, D).
    :param variance: of the functions, (N, D).
    """
    mean, total = np.asarray(mean), np.asarray(variance) + noise
    gap, truth = ~part.present, part.complete
    some = gap.any()
    return {
        "observed_rmse": rmse(mean, truth, part.present),
        "missing_rmse": rmse(mean, truth, gap) if some else None,
        "missing_nlpd": scores(mean[gap], total[gap], truth[gap])[1] if some else None,
        "missing_coverage": coverage(mean, np.sqrt(total), truth, gap) if some else None,
    }


def fit(args: argparse.Namespace, train: Part, test: Part, guide: str, seed: int) -> dict:
    """Train one model; its figures."""
    start = pca_start(jax.random.key(seed), train.seen, args.latent_dim, args.inducing, mask=train.mask)
    lengthscale = args.lengthscale or math.sqrt(args.latent_dim)
    start = dataclasses.replace(start, noise_variance=args.noise_start, lengthscale=lengthscale)
    latents = GUIDES[guide]()
    gplvm = BayesianGPLVM(start, conditional=args.conditional, latents=latents, positive=POSITIVE[args.positive])
    trainer = Trainer(gplvm, args, train.seen, train.mask, seed, row_tables=guide != "amortised")
    began = time.perf_counter()
    stopped = None
    try:
        result = trainer.fit()
    except npgp.training.NonFiniteLossError as error:
        # Point estimates may fit the data without noise; where that ends numerically is their result.
        result, stopped = error.result, error.step
        print(f"    stopped at step {stopped}")
    seconds = time.perf_counter() - began
    elbo = trainer.elbo(result)

    params = result.params
    posterior, likelihood, offset = gplvm.posterior(params), gplvm.likelihood_at(params), start.offset
    noise = float(params["noise_variance"])
    loc, scale = gplvm.latents_at(params, train.seen, mask=train.mask)
    prior = None
    if guide == "point":
        prior = dist.Normal(jnp.mean(loc, 0), FLAT * jnp.std(loc, 0) + 1e-6).to_event(1)
    began = time.perf_counter()
    inferred = infer_latents(
        posterior, likelihood, test.seen, mask=test.mask, offset=offset, prior=prior, candidates=loc
    )
    reconstructions = {"inferred": (test, inferred)}
    if guide == "amortised":
        encoded = gplvm.latents_at(params, test.seen, mask=test.mask)
        reconstructions["encoded"] = (test, NewRows(*encoded))
    reconstructions["train"] = (train, NewRows(loc, scale))
    figures: dict[str, Any] = {
        "elbo_per_row": elbo,
        "noise": math.sqrt(noise),
        "relevant_dims": effective_dimensions(relevance(loc, params["lengthscale"])),
        # A bound from above on the negative log density of a test row's entries; of none without a prior.
        "test_bound": None if guide == "point" else float(-np.mean(inferred.elbo)),
        "seconds": seconds,
        "stopped_at": stopped,
    }
    for name, (part, latent) in reconstructions.items():
        figures[name] = errors(part, *latent.predict(posterior, offset=offset), noise)
    figures["seconds_of_inference"] = time.perf_counter() - began
    seconds += figures["seconds_of_inference"]
    print(f"    test RMSE {figures['inferred']['observed_rmse']:.4f}, {seconds:.0f} s", flush=True)
    return figures


# ---------------------------------------------------------------------------------------------------------------
# What comes out


def lines(fits: Mapping[str, Sequence[dict]]) -> list[tuple[str, str, Sequence[dict]]]:
    """The lines of a table, or of a picture: what to call them, the test latents they are about, the runs."""
    found = []
    for guide, runs in fits.items():
        if guide == "amortised":
            found += [("amortised", "encoded", runs), ("amortised, latents inferred", "inferred", runs)]
        else:
            found.append((guide, "inferred", runs))
    return found


def compare(missing: float, fits: Mapping[str, Sequence[dict]]) -> None:
    """Print a table of the guides at one share of missing entries."""
    heads = ["guide", "train RMSE", "test RMSE"]
    if missing:
        heads += ["train, missing", "test, missing", "NLPD, missing", "in 90%"]
    heads += ["−log p(y*) at most", "ELBO per row", "noise", "relevant dims", "seconds"]
    rows = []
    for name, kind, runs in lines(fits):
        row = [name, *(spread([f[part]["observed_rmse"] for f in runs], 4) for part in ("train", kind))]
        if missing:
            row += [spread([f[part]["missing_rmse"] for f in runs], 4) for part in ("train", kind)]
            row += [spread([f[kind][key] for f in runs], 2) for key in ("missing_nlpd", "missing_coverage")]
        row.append(spread([None if kind == "encoded" else f["test_bound"] for f in runs], 2))
        row += [spread([f["elbo_per_row"] for f in runs], 2), spread([f["noise"] for f in runs], 4)]
        row.append(f"{np.mean([f['relevant_dims'] for f in runs]):.1f}")
        rows.append([*row, f"{np.mean([f['seconds'] for f in runs]):.0f}"])
    print(f"\n{missing:.0%} of the entries missing\n{table(heads, rows)}")


def draw(fits: Mapping[float, Mapping[str, Sequence[dict]]], args: argparse.Namespace):
    """RMSE on test rows against the share of missing entries: of entries seen, and of missing ones."""
    from matplotlib import pyplot as plt

    from npgp.plots import COLORS

    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.4), layout="constrained", sharex=True)
    names = [name for name, _, _ in lines(next(iter(fits.values())))]
    for ax, key in zip(axes, ("observed_rmse", "missing_rmse"), strict=True):
        for i, name in enumerate(names):
            at, values = [], []
            for missing, runs_of in fits.items():
                kind, runs = next((kind, runs) for n, kind, runs in lines(runs_of) if n == name)
                if runs[0][kind][key] is not None:
                    at.append(100 * missing + 0.35 * (i - 2))
                    values.append([f[kind][key] for f in runs])
            if at:
                errorbars(ax, at, values, color=COLORS[i], label=name, ls="--" if "," in name else "-")
        ax.set_xlabel("entries missing (%)")
    if args.data == "real" and 0.0 in fits:
        for name, value in PUBLISHED.items():
            if name in names:
                axes[0].plot(0, value, "x", ms=8, mew=2, color=COLORS[names.index(name)], zorder=3)
        axes[0].plot([], [], "x", ms=8, mew=2, color="0.4", label="published")
    axes[0].set_title("entries that are seen", fontsize=10)
    axes[1].set_title("missing entries", fontsize=10)
    axes[0].set_ylabel("RMSE on test rows (units of the data)")
    for ax in axes:
        ax.set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    Y = oil_flow(args).Y
    if args.test_rows >= len(Y) - args.inducing:
        raise SystemExit(f"--test-rows {args.test_rows} leaves too few of {len(Y)} rows to train on.")
    print(
        f"oil flow, {args.data}: {len(Y) - args.test_rows} training and {args.test_rows} test rows of {Y.shape[1]} "
        f"measurements; Q = {args.latent_dim}, M = {args.inducing}, {args.conditional} conditional, {args.steps} steps "
        f"of {args.batch_size or 'all'} rows; free: {args.positive}\n"
        f"standard deviation of the measurements about their columns' means: {np.sqrt(np.mean(np.var(Y, 0))):.4f}"
    )
    fits: dict[float, dict[str, list[dict]]] = {share: {guide: [] for guide in args.guides} for share in args.missing}
    for seed in range(args.seeds):
        for share, runs in fits.items():
            train, test = split(Y, args.test_rows, share, seed)
            for guide in args.guides:
                run = partial(fit, args, train, test, guide, seed)
                runs[guide].append(kept(args, f"{guide}-{share:g}-{seed}", chosen(args, SETTINGS), run))
    for share, runs in fits.items():
        compare(share, runs)
    if args.data == "real":
        print("\npublished test RMSE, complete rows: " + ", ".join(f"{k} {v:g}" for k, v in PUBLISHED.items()))
    print()
    write_picture(args.out / "oil_reconstruction.png", draw(fits, args))
    report = {
        "settings": chosen(args, SETTINGS),
        "n_train": len(Y) - args.test_rows,
        "runs": {f"{share:g}": runs for share, runs in fits.items()},
    }
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
