#!/usr/bin/env python
"""Missing entries imputed by a Bayesian GPLVM, from what is present in the same rows.

``oil``: entries of the oil-flow data are missing at random, from the model's training too. RMSE of the imputed values
against iterative PCA, the mean of the nearest rows, linear regressions and column means; how many of the true values
lie in 90% intervals; and, on the complete data, nearest-neighbour errors in latent space and the number of relevant
dimensions.

``faces``: half of each of some video frames is missing. The model is trained on the other frames, in minibatches and
float32; the latents of the new ones are inferred from the half that is seen. RMSE on the other half against the mean
face, the training face that is nearest on the seen half, and probabilistic PCA.

    python scripts/studies/gplvm/imputation.py oil                              simulated data, a minute or two
    python scripts/studies/gplvm/imputation.py faces                            simulated pictures
    NPGP_DATA=... python scripts/studies/gplvm/imputation.py oil --data real    the data of Bishop & James 1993
    NPGP_DATA=... python scripts/studies/gplvm/imputation.py faces --data real  Frey faces, 1965 frames of 28 × 20 pixels

The ranks of PCA and the number of nearest rows are those that are best on further entries, or frames, held out of the
training data. Every run on the oil flow is kept in a file of its own, and not repeated if that has the same settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer

import npgp
from npgp import datasets
from npgp.gplvm import BayesianGPLVM, metrics, pca_start
from npgp.gplvm.new_rows import NewRows, infer_latents
from npgp.gplvm.relevance import effective_dimensions, relevance
from npgp.training import row_adam

#: The quantile of a standard normal that leaves 5% on each side.
QUANTILE = 1.6448536
#: Ranks of PCA and numbers of nearest rows to choose from.
OIL_RANKS, NEIGHBOURS, FACE_RANKS = range(1, 9), (1, 2, 3, 5, 10, 20), (5, 10, 20, 40, 80)
#: Rounds of iterative PCA at most, and the relative change at which it is done.
PCA_ROUNDS, PCA_TOLERANCE = 500, 1e-5
#: The GPLVM's ways to impute the rows that it was trained on.
WAYS = {"trained": "GPLVM", "inferred": "GPLVM, q(x) inferred anew"}
#: (height, width) of a face, and the pixels of each half.
SHAPE = (28, 20)
HALVES = {
    "lower": np.s_[SHAPE[0] // 2 :, :],
    "upper": np.s_[: SHAPE[0] // 2, :],
    "left": np.s_[:, : SHAPE[1] // 2],
    "right": np.s_[:, SHAPE[1] // 2 :],
}
#: Faces in a picture.
SHOWN = 8


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode in ("oil", "faces"):
        add = modes.add_parser(mode).add_argument
        faces = mode == "faces"
        add("--data", choices=["simulated", "real"], default="simulated")
        add("--rows", type=int, help="the first so many rows; 200 to simulate, or all real ones, if omitted")
        add("--latent-dim", type=int, default=20 if faces else 10)
        add("--inducing", type=int, default=50, help="number of inducing inputs")
        add("--batch-size", type=int, default=100, help="rows per step; 0 for all")
        add("--steps", type=int, help="1500; for real data 6000, or 3000 for faces")
        add("--learning-rate", type=float, default=0.03, help="at first; it falls to 2%% along a cosine")
        add("--row-rate", type=float, default=0.1, help="that of the parameters of rows")
        add("--out", type=Path, default=Path("out"), help="folder of the pictures")
        add("--json", type=Path, help="write the figures to this file")
        if faces:
            add("--held-out", choices=["last", "every"], default="last", help="the last frames, or evenly spaced ones")
            add("--new-rows", type=int, help="how many; 10, or 100 of the real ones")
            add("--halves", nargs="+", choices=HALVES, default=["lower", "right"], help="that are missing, in turn")
            add("--covariances", choices=["dense", "diagonal"], default="dense", help="of the inducing values")
            add("--starts", type=int, default=4, help="candidates from which the latents of a frame are inferred")
            add("--seed", type=int, default=0)
        else:
            add("--missing", nargs="+", type=float, help="shares; 0 0.3, or 0 0.1 ... 0.5 for real data")
            add("--seeds", type=int, help="1, or 2 for real data")
            add(
                "--starts",
                type=int,
                default=0,
                help="infer the latents anew, each from so many candidates, which takes minutes; 0: do not",
            )
            add("--runs", type=Path, default=Path("out/imputation"), help="folder of the single runs")
    args = parser.parse_args(argv)
    real = args.data == "real"
    defaults: dict[str, Any] = {
        "steps": (3000 if args.mode == "faces" else 6000) if real else 1500,
        "rows": None if real else 200,
    }
    if args.mode == "oil":
        defaults |= {"seeds": 2 if real else 1, "missing": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5] if real else [0.0, 0.3]}
        if args.missing and not all(0.0 <= share < 1.0 for share in args.missing):
            parser.error("--missing must be shares from 0 to below 1.")
    else:
        defaults["new_rows"] = 100 if real else 10
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(args.steps, args.inducing, args.latent_dim) < 1 or args.batch_size < 0:
        parser.error("counts must be positive.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# The model


def train(args: argparse.Namespace, Y: np.ndarray, present: np.ndarray | None, seed: int, **options) -> tuple:
    """
    Fit a GPLVM by minibatches whose rows alone are touched; the model, its parameters, and the ELBO per row.

    :param Y: (N, D), NaN where nothing is present.
    :param present: (N, D), or ``None`` where everything is.
    :param options: further ones of the model.
    """
    start = pca_start(Y, args.latent_dim, args.inducing, seed=seed, mask=present)
    scale = float(np.mean(np.square(start.data_scale)))
    lengthscale = math.sqrt(args.latent_dim)  # latents of unit variance are √(2Q) apart
    start = dataclasses.replace(start, noise_variance=scale, variance=scale, lengthscale=lengthscale)
    gplvm = BayesianGPLVM(start, **options)
    svi = SVI(gplvm.model, gplvm.guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    how: dict[str, Any] = {"indices": "rows"}
    if args.batch_size and args.batch_size < len(Y):
        how |= {"batch_size": args.batch_size, "row_optim": row_adam(args.row_rate, args.steps)}
    data = {} if present is None else {"mask": jnp.asarray(present)}
    key, evaluation = jax.random.split(jax.random.key(seed))
    Y = jnp.asarray(Y, jnp.result_type(float))
    result = npgp.fit(svi, key, args.steps, Y, progress=False, allow_nan=present is not None, **how, **data)
    batches = {key: how[key] for key in ("batch_size",) if key in how}
    elbo, _ = npgp.evaluate(svi, evaluation, result, Y, indices="rows", num_draws=100, **batches, **data)
    return gplvm, result.params, elbo / len(Y)


def rmse(values: np.ndarray, truth: np.ndarray, where: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(values) - truth)[where])))


def coverage(mean: np.ndarray, scale: np.ndarray, truth: np.ndarray, where: np.ndarray) -> float:
    """The share of the true values that lie in central 90% intervals."""
    return float(np.mean((np.abs(np.asarray(mean) - truth) <= QUANTILE * np.asarray(scale))[where]))


# ---------------------------------------------------------------------------------------------------------------
# Other imputations


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


def impute_by_neighbours(seen: np.ndarray, number: int) -> np.ndarray:
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


# ---------------------------------------------------------------------------------------------------------------
# Oil flow


def where_present(Y: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Entries that are not missing at random, nested for all shares."""
    return np.random.default_rng(seed).uniform(size=Y.shape) >= share


def impute_otherwise(Y: np.ndarray, share: float, seed: int) -> dict:
    """Impute the same entries in the other ways; the figures."""
    present = where_present(Y, share, seed)
    seen, gap = np.where(present, Y, np.nan), ~present
    figures: dict[str, Any] = {}
    for name, impute, choices in (("pca", impute_by_pca, OIL_RANKS), ("nearest", impute_by_neighbours, NEIGHBOURS)):
        choice = best_choice(impute, seen, choices, seed)
        figures[name] = {"rmse": rmse(impute(seen, choice), Y, gap), "choice": choice}
    figures["linear"] = {"rmse": rmse(impute_by_regressions(seen), Y, gap)}
    figures["mean"] = {"rmse": rmse(np.broadcast_to(np.nanmean(seen, 0), seen.shape), Y, gap)}
    return figures


def impute_oil(args: argparse.Namespace, data: datasets.OilFlow, share: float, seed: int) -> dict:
    """Train on the present entries, and impute the others; the figures."""
    present = where_present(data.Y, share, seed)
    seen, gap = np.where(present, data.Y, np.nan), ~present
    began = time.perf_counter()
    gplvm, params, elbo = train(args, seen, present if share else None, seed)
    loc = np.asarray(params["x.loc"])
    figures: dict[str, Any] = {
        "elbo_per_row": elbo,
        "noise": math.sqrt(float(params["noise_variance"])),
        "nn_errors": metrics.nearest_neighbour_errors(loc / np.asarray(params["lengthscale"]), data.labels),
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


def cached(args: argparse.Namespace, name: str, run: Callable[[], dict], keys: Sequence[str] = SETTINGS) -> dict:
    """The figures of a run: from its file if that has these settings, or else run and written."""
    path = args.runs / f"{name}.json"
    settings = {key: getattr(args, key) for key in keys}
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["settings"] == settings:
            return kept["figures"]
    print(f"  {name}", flush=True)
    figures = run()
    args.runs.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "figures": figures}) + "\n")
    return figures


def oil(args: argparse.Namespace) -> dict:
    jax.config.update("jax_enable_x64", True)
    if args.data == "real":
        data = datasets.oil_flow("train")
        data = datasets.OilFlow(data.Y[: args.rows], data.labels[: args.rows], None)
    else:
        data = datasets.simulate_oil_flow(jax.random.key(0), args.rows)
    rows, columns = data.Y.shape
    print(
        f"oil flow, {args.data}: {rows} rows of {columns} measurements; Q = {args.latent_dim}, M = {args.inducing}, "
        f"{args.steps} steps of {args.batch_size or 'all'} rows"
    )
    runs: dict[float, list[dict]] = {share: [] for share in args.missing}
    for seed in range(args.seeds):
        for share, figures in runs.items():
            name = f"{share:g}-{seed}"
            found = cached(args, name, lambda s=share, seed=seed: impute_oil(args, data, s, seed))
            if share:
                others = lambda s=share, seed=seed: impute_otherwise(data.Y, s, seed)  # noqa: E731
                found = found | cached(args, f"others-{name}", others, ("data", "rows"))
            figures.append(found)

    lines = []
    for share, figures in runs.items():
        line = [f"{share:.0%}", spread([f["elbo_per_row"] for f in figures], 2)]
        line += [spread([f["noise"] for f in figures]), " ".join(str(f["nn_errors"]) for f in figures)]
        lines.append([*line, " ".join(str(f["relevant_dims"]) for f in figures)])
    heads = ["missing", "ELBO per row", "noise", f"NN errors of {rows}, by seed", "relevant dims, by seed"]
    table("The models", heads, lines)
    gaps = {share: figures for share, figures in runs.items() if share}
    if gaps:
        lines, ways = [], dict(WAYS) if args.starts else {"trained": WAYS["trained"]}
        for share, figures in gaps.items():
            line = [f"{share:.0%}", *(spread([f[how]["rmse"] for f in figures]) for how in ways)]
            for how in ("pca", "nearest"):
                choices = " ".join(str(f[how]["choice"]) for f in figures)
                line.append(f"{spread([f[how]['rmse'] for f in figures])} ({choices})")
            line += [spread([f[how]["rmse"] for f in figures]) for how in ("linear", "mean")]
            lines.append([*line, *(spread([100 * f[how]["coverage"] for f in figures], 1) for how in ways)])
        heads = ["missing", *ways.values(), "PCA (rank)", "nearest rows (number)", "linear regressions"]
        heads += ["column means"]
        heads += [f"% in 90% intervals, {name}" for name in ways.values()]
        table("RMSE of the missing entries, in the units of the data", heads, lines)
        print(f"\nwrote {draw_oil(gaps, args)}")
    return {
        "settings": {key: getattr(args, key) for key in SETTINGS},
        "n_rows": rows,
        "runs": {f"{share:g}": figures for share, figures in runs.items()},
    }


def draw_oil(runs: Mapping[float, Sequence[dict]], args: argparse.Namespace) -> Path:
    """RMSE of each way to impute, and coverage of the GPLVM's intervals, against the share of missing entries."""
    from matplotlib import pyplot as plt

    from npgp.plots import COLOURS

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained", width_ratios=[1.5, 1])
    names = {
        **WAYS,
        "pca": "PCA",
        "linear": "linear regressions",
        "nearest": "mean of the nearest rows",
        "mean": "column means",
    }
    names = {how: name for how, name in names.items() if how in next(iter(runs.values()))[0]}
    at = [100 * share for share in runs]
    for i, (how, name) in enumerate(names.items()):
        for ax, key, unit in ((left, "rmse", 1.0), (right, "coverage", 100.0)):
            if key in next(iter(runs.values()))[0][how]:
                values = [unit * np.array([f[how][key] for f in figures]) for figures in runs.values()]
                errors = [np.std(v, ddof=1) / math.sqrt(len(v)) if len(v) > 1 else 0.0 for v in values]
                means = [np.mean(v) for v in values]
                ax.errorbar(at, means, errors, marker="o", ms=4, lw=1.2, capsize=2, color=COLOURS[i], label=name)
    right.axhline(90, color="0.4", lw=0.8, ls="--")
    left.set_ylim(bottom=0)
    left.set_ylabel("RMSE of the missing entries")
    right.set_ylabel("true values inside 90% intervals (%)")
    for ax in (left, right):
        ax.set_xlabel("entries missing (%)")
        ax.set_xticks(at)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return save(figure, args.out, "imputation_oil.png")


# ---------------------------------------------------------------------------------------------------------------
# Faces


def simulate_faces(rows: int, seed: int) -> np.ndarray:
    """Pictures (N, 28, 20) in [0, 1] of a bright oval with two eyes and a mouth; its place and the mouth change."""
    rng = np.random.default_rng(seed)
    turn, smile = np.cumsum(rng.normal(size=(2, rows)), axis=1)
    turn, smile = 2.0 * np.sin(0.3 * turn), np.sin(0.3 * smile)
    up, across = np.mgrid[: SHAPE[0], : SHAPE[1]].astype(float)
    up, across = up - 13.5, across - 9.5 - turn[:, None, None]

    def blob(x: float, y: float, width: float, height: Any) -> np.ndarray:
        return np.exp(-0.5 * (((across - x) / width) ** 2 + ((up - y) / height) ** 2))

    eyes = blob(-3.0, -4.0, 1.2, 1.0) + blob(3.0, -4.0, 1.2, 1.0)
    mouth = blob(0.0, 6.0, 2.5, 0.8 + 0.6 * (1.0 + smile[:, None, None]))
    faces = 0.1 + 0.8 * blob(0.0, 0.0, 6.0, 9.0) - 0.5 * eyes - 0.4 * mouth
    return np.clip(faces + 0.02 * rng.normal(size=faces.shape), 0.0, 1.0)


def impute_by_covariance(pca: PCA, seen: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """The pixels of a half given the other, under probabilistic PCA: (rows, pixels of the half)."""
    C = pca.get_covariance()
    centred = seen[:, ~gap] - pca.mean_[~gap]
    return pca.mean_[gap] + centred @ np.linalg.solve(C[np.ix_(~gap, ~gap)], C[np.ix_(~gap, gap)])


def best_rank(faces: np.ndarray, held: int, gap: np.ndarray) -> int:
    """The rank of probabilistic PCA that is best for the half in the last of the training faces."""
    rest, new = faces[:-held], faces[-held:]
    ranks = [rank for rank in FACE_RANKS if rank < min(rest.shape)]

    def error(rank):
        pca = PCA(rank, svd_solver="full").fit(rest)
        return np.mean(np.square(impute_by_covariance(pca, new, gap) - new[:, gap]))

    return min(ranks, key=error)


def peak_memory() -> float:
    """The most memory that this process has had, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def faces(args: argparse.Namespace) -> dict:
    jax.config.update("jax_enable_x64", False)
    if args.data == "real":
        frames = datasets.load("frey_faces")["faces"][: args.rows] / 255.0
    else:
        frames = simulate_faces(args.rows, args.seed)
    Y = frames.reshape(len(frames), -1).astype(np.float32)
    new = np.zeros(len(Y), bool)
    if args.held_out == "last":
        new[-args.new_rows :] = True
    else:
        new[np.linspace(0, len(Y) - 1, args.new_rows).astype(int)] = True
    known, test = Y[~new], Y[new]
    print(
        f"faces, {args.data}: {len(known)} frames of {Y.shape[1]} pixels in [0, 1] to train on, {len(test)} "
        f"{'last' if args.held_out == 'last' else 'evenly spaced'} ones held out; Q = {args.latent_dim}, "
        f"M = {args.inducing}, {args.covariances} covariances, {args.steps} steps of {args.batch_size or 'all'} rows, "
        "float32",
        flush=True,
    )
    began = time.perf_counter()
    gplvm, params, elbo = train(args, known, None, args.seed, covariances=args.covariances)
    seconds = time.perf_counter() - began
    posterior, likelihood, offset = gplvm.posterior(params), gplvm.likelihood_at(params), gplvm.start.offset
    report: dict[str, Any] = {
        "settings": {key: getattr(args, key) for key in (*SETTINGS, "held_out", "new_rows", "covariances")},
        "n_train": len(known),
        "elbo_per_row": elbo,
        "noise": math.sqrt(float(params["noise_variance"])),
        "relevant_dims": effective_dimensions(relevance(params["x.loc"], params["lengthscale"])),
        "seconds": seconds,
        "halves": {},
    }
    print(
        f"trained in {seconds:.0f} s: ELBO {elbo:.1f} nats per frame, noise {report['noise']:.4f}, "
        f"{report['relevant_dims']} relevant dimensions; peak memory {peak_memory():.2f} GiB",
        flush=True,
    )
    lines = []
    for half in args.halves:
        gap = np.zeros(SHAPE, bool)
        gap[HALVES[half]] = True
        gap = gap.ravel()
        present = np.broadcast_to(~gap, test.shape)
        seen = np.where(present, test, np.nan)
        began = time.perf_counter()
        rows = infer_latents(
            posterior,
            likelihood,
            seen,
            mask=present,
            offset=offset,
            candidates=params["x.loc"],
            num_starts=args.starts,
        )
        mean, scale = rows.impute(posterior, likelihood, jnp.asarray(seen), mask=jnp.asarray(present), offset=offset)
        seconds = time.perf_counter() - began
        distance = np.square(test[:, None, ~gap] - known[None, :, ~gap]).sum(-1)
        nearest = known[np.argmin(distance, axis=1)]
        rank = best_rank(known, min(args.new_rows, len(known) // 4), gap)
        linear = impute_by_covariance(PCA(rank, svd_solver="full").fit(known), test, gap)
        missing = ~present
        figures = {
            "gplvm": rmse(mean, test, missing),
            "coverage": coverage(mean, scale, test, missing),
            "mean_face": rmse(np.broadcast_to(known.mean(0), test.shape), test, missing),
            "nearest_face": rmse(nearest, test, missing),
            "pca": float(np.sqrt(np.mean(np.square(linear - test[:, gap])))),
            "pca_rank": rank,
            "seconds": seconds,
        }
        report["halves"][half] = figures
        values = [f"{figures[key]:.4f}" for key in ("gplvm", "mean_face", "nearest_face", "pca")]
        lines.append([half, *values, str(rank), f"{100 * figures['coverage']:.1f}", f"{seconds:.0f}"])
        path = draw_faces(half, test, np.asarray(mean), np.asarray(scale), present, nearest, args)
        print(f"wrote {path}", flush=True)
    heads = ["missing half", "GPLVM", "mean face", "nearest training face", "PCA", "of rank", "% in 90% intervals"]
    table("RMSE of the missing half, pixels in [0, 1]", [*heads, "seconds"], lines)
    report["peak_memory_gib"] = peak_memory()
    print(f"\npeak memory {report['peak_memory_gib']:.2f} GiB")
    return report


def draw_faces(half, test, mean, scale, present, nearest, args: argparse.Namespace) -> Path:
    """Some of the held-out faces: as they are, what was seen of them, and what was imputed."""
    from npgp import plots

    chosen = np.linspace(0, len(test) - 1, min(SHOWN, len(test))).astype(int)
    test, mean, scale, present, nearest = (array[chosen] for array in (test, mean, scale, present, nearest))
    images = {
        "original": test,
        "seen": np.where(present, test, np.nan),
        "imputed": mean,
        "nearest\nface": np.where(present, test, nearest),
    }
    figure = plots.plot_images(images, SHAPE, {"standard\ndeviation": np.where(present, np.nan, scale)})
    return save(figure, args.out, f"imputation_faces_{half}.png")


# ---------------------------------------------------------------------------------------------------------------
# What comes out


def save(figure, folder: Path, name: str) -> Path:
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / name, dpi=130)
    plt.close(figure)
    return folder / name


def spread(values: Sequence[float], digits: int = 4) -> str:
    """The mean, with its standard error if there are several values."""
    text = f"{np.mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.{digits}f}"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and columns, flush right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    print(f"\n{title}")
    for line in (heads, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    report = oil(args) if args.mode == "oil" else faces(args)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {args.json}")
    return report


if __name__ == "__main__":
    main()
