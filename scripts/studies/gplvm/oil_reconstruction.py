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
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets
from npgp.gplvm import BayesianGPLVM, Encoder, FreeNormal, LatentGuide, Point, pca_start
from npgp.gplvm.new_rows import NewRows, infer_latents
from npgp.gplvm.relevance import effective_dimensions, relevance
from npgp.training import row_adam

GUIDES: dict[str, Callable[[], LatentGuide]] = {
    "point": lambda: Point(prior=False),
    "map": Point,
    "gaussian": FreeNormal,
    "amortised": Encoder,
}
#: Test RMSE with complete rows, Lalchand, Ravuri & Lawrence 2022.
PUBLISHED = {"gaussian": 0.0925, "amortised": 0.067}
#: How a positive parameter is made of a free one.
POSITIVE = {"softplus": constraints.softplus_positive, "log": constraints.positive}
#: Standard deviation of the prior of test latents in spreads of the training latents, where training had no prior.
FLAT = 10.0
#: The quantile of a standard normal that leaves 5% on each side.
QUANTILE = 1.6448536


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", choices=["simulated", "real"], default="simulated")
    add("--rows", type=int, help="the first so many rows; 200 to simulate, or all real ones, if omitted")
    add("--test-rows", type=int, default=50, help="how many of them are test rows")
    add("--guides", nargs="+", choices=GUIDES, default=list(GUIDES))
    add("--missing", nargs="+", type=float, help="shares of missing entries; 0 0.3, or 0 0.1 0.3 0.5 for real data")
    add("--seeds", type=int, help="each with a split and inducing inputs of its own; 1, or 3 for real data")
    add("--latent-dim", type=int, default=12)
    add("--inducing", type=int, default=25, help="number of inducing inputs")
    add("--conditional", choices=["prior", "tight"], default="tight")
    add("--batch-size", type=int, default=100, help="rows per step; 0 for all")
    add("--steps", type=int, help="1000, or 6000 for real data")
    add("--learning-rate", type=float, default=0.03, help="at first; it falls to 2%% along a cosine")
    add("--row-rate", type=float, default=0.1, help="that of the parameters of rows")
    add("--positive", choices=POSITIVE, default="log", help="what is free of lengthscales, variance, noise variance")
    add("--noise-start", type=float, default=0.2, help="initial noise variance, about that of the data")
    add(
        "--lengthscale",
        type=float,
        help="initial lengthscale; √Q if omitted, as latents of unit variance are √(2Q) apart",
    )
    add("--runs", type=Path, default=Path("out/oil_reconstruction"), help="folder of the single runs")
    add("--out", type=Path, default=Path("out"), help="folder of the picture")
    add("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    real = args.data == "real"
    defaults = {"seeds": 3 if real else 1, "steps": 6000 if real else 1000, "rows": None if real else 200}
    defaults["missing"] = [0.0, 0.1, 0.3, 0.5] if real else [0.0, 0.3]
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(args.seeds, args.steps, args.inducing, args.test_rows, args.latent_dim) < 1 or args.batch_size < 0:
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
    wrong = part.complete - np.asarray(mean)
    scale = np.sqrt(np.asarray(variance) + noise)
    gap = ~part.present
    return {
        "observed_rmse": float(np.sqrt(np.mean(wrong[part.present] ** 2))),
        "missing_rmse": float(np.sqrt(np.mean(wrong[gap] ** 2))) if gap.any() else None,
        "missing_nlpd": (
            float(np.mean(0.5 * (wrong / scale)[gap] ** 2 + np.log(scale[gap]))) + 0.5 * math.log(2 * math.pi)
            if gap.any()
            else None
        ),
        "missing_coverage": float(np.mean(np.abs(wrong / scale)[gap] < QUANTILE)) if gap.any() else None,
    }


def fit(args: argparse.Namespace, train: Part, test: Part, guide: str, seed: int) -> dict:
    """Train one model; its figures."""
    start = pca_start(train.seen, args.latent_dim, args.inducing, seed=seed, mask=train.mask)
    lengthscale = args.lengthscale or math.sqrt(args.latent_dim)
    start = dataclasses.replace(start, noise_variance=args.noise_start, lengthscale=lengthscale)
    latents = GUIDES[guide]()
    gplvm = BayesianGPLVM(start, args.conditional, latents=latents, positive=POSITIVE[args.positive])
    svi = SVI(gplvm.model, gplvm.guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    options: dict[str, Any] = {"indices": "rows"}
    if args.batch_size and args.batch_size < len(train.complete):
        options["batch_size"] = args.batch_size
        if guide != "amortised":
            options["row_optim"] = row_adam(args.row_rate, args.steps)
    data = {"mask": jnp.asarray(train.present)} if train.mask is not None else {}
    key, evaluation = jax.random.split(jax.random.key(seed))
    began = time.perf_counter()
    Y = jnp.asarray(train.seen)
    stopped = None
    try:
        result = npgp.fit(svi, key, args.steps, Y, progress=False, allow_nan=train.mask is not None, **options, **data)
    except npgp.NonFiniteLossError as error:
        # Point estimates may fit the data without noise; where that ends numerically is their result.
        result, stopped = error.result, error.step
        print(f"stopped at step {stopped}:", end=" ")
    seconds = time.perf_counter() - began
    rows = len(train.complete)
    elbo, _ = npgp.evaluate(svi, evaluation, result, Y, indices="rows", num_draws=100, **data)

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
        "elbo_per_row": elbo / rows,
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
    return figures


SETTINGS = ("data", "rows", "test_rows", "latent_dim", "inducing", "conditional", "batch_size", "steps")
SETTINGS += ("learning_rate", "row_rate", "positive", "noise_start", "lengthscale")


def cached(args: argparse.Namespace, name: str, run: Callable[[], dict]) -> dict:
    """The figures of a run: from its file if that has these settings, or else run and written."""
    path = args.runs / f"{name}.json"
    settings = {key: getattr(args, key) for key in SETTINGS}
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["settings"] == settings:
            return kept["figures"]
    figures = run()
    args.runs.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "figures": figures}) + "\n")
    return figures


# ---------------------------------------------------------------------------------------------------------------
# What comes out


def spread(values: Sequence[float | None], digits: int = 4) -> str:
    """The mean, with its standard error if there are several values; a dash for what there is not."""
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    text = f"{np.mean(known):.{digits}f}"
    return text if len(known) == 1 else f"{text} ± {np.std(known, ddof=1) / math.sqrt(len(known)):.{digits}f}"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and columns, flush right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    print(f"\n{title}")
    for line in (heads, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


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
        values = [[f["train"]["observed_rmse"] for f in runs], [f[kind]["observed_rmse"] for f in runs]]
        if missing:
            values += [[f["train"]["missing_rmse"] for f in runs], [f[kind]["missing_rmse"] for f in runs]]
        row = [name, *map(spread, values)]
        if missing:
            row += [spread([f[kind][key] for f in runs], 2) for key in ("missing_nlpd", "missing_coverage")]
        bounds = [None if kind == "encoded" else f["test_bound"] for f in runs]
        row += [spread(bounds, 2), spread([f["elbo_per_row"] for f in runs], 2)]
        row += [spread([f["noise"] for f in runs]), f"{np.mean([f['relevant_dims'] for f in runs]):.1f}"]
        rows.append([*row, f"{np.mean([f['seconds'] for f in runs]):.0f}"])
    table(f"{missing:.0%} of the entries missing", heads, rows)


def draw(fits: Mapping[float, Mapping[str, Sequence[dict]]], args: argparse.Namespace) -> Path:
    """RMSE on test rows against the share of missing entries: of entries seen, and of missing ones."""
    from matplotlib import pyplot as plt

    from npgp.plots import COLOURS

    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.4), layout="constrained", sharex=True)
    names = [name for name, _, _ in lines(next(iter(fits.values())))]
    for ax, key in zip(axes, ("observed_rmse", "missing_rmse"), strict=True):
        for i, name in enumerate(names):
            points = []
            for missing, runs_of in fits.items():
                kind, runs = next((kind, runs) for n, kind, runs in lines(runs_of) if n == name)
                values = [f[kind][key] for f in runs if f[kind][key] is not None]
                if values:
                    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
                    points.append((100 * missing + 0.35 * (i - 2), np.mean(values), error))
            if points:
                x, y, bars = np.array(points).T
                style = {"marker": "o", "ms": 4, "lw": 1.2, "capsize": 2, "color": COLOURS[i]}
                ax.errorbar(x, y, bars, label=name, ls="--" if "," in name else "-", **style)
        ax.set_xlabel("entries missing (%)")
    if args.data == "real" and 0.0 in fits:
        for name, value in PUBLISHED.items():
            if name in names:
                axes[0].plot(0, value, "x", ms=8, mew=2, color=COLOURS[names.index(name)], zorder=3)
        axes[0].plot([], [], "x", ms=8, mew=2, color="0.4", label="published")
    axes[0].set_title("entries that are seen", fontsize=10)
    axes[1].set_title("missing entries", fontsize=10)
    axes[0].set_ylabel("RMSE on test rows (units of the data)")
    for ax in axes:
        ax.set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "oil_reconstruction.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    if args.data == "real":
        Y = datasets.oil_flow("train").Y[: args.rows]
    else:
        Y = datasets.simulate_oil_flow(jax.random.key(0), args.rows).Y
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
                name = f"{guide}-{share:g}-{seed}"

                def run(train=train, test=test, guide=guide, seed=seed, name=name):
                    print(f"  {name}", end=" ", flush=True)
                    figures = fit(args, train, test, guide, seed)
                    seconds = figures["seconds"] + figures["seconds_of_inference"]
                    print(f"test RMSE {figures['inferred']['observed_rmse']:.4f}, {seconds:.0f} s", flush=True)
                    return figures

                runs[guide].append(cached(args, name, run))
    for share, runs in fits.items():
        compare(share, runs)
    if args.data == "real":
        print("\npublished test RMSE, complete rows: " + ", ".join(f"{k} {v:g}" for k, v in PUBLISHED.items()))
    print(f"\nwrote {draw(fits, args)}")
    report = {
        "settings": {key: getattr(args, key) for key in SETTINGS},
        "n_train": len(Y) - args.test_rows,
        "runs": {f"{share:g}": runs for share, runs in fits.items()},
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {args.json}")
    return report


if __name__ == "__main__":
    main()
