"""Halves of faces imputed by a GPLVM that was trained on other faces, and in other ways."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.decomposition import PCA

from common import peak_memory, table, write_picture
from npgp import datasets
from npgp.gplvm.new_rows import infer_latents
from npgp.gplvm.relevance import effective_dimensions, relevance
from studies.gplvm.oil_imputation import SETTINGS
from studies.gplvm.training import chosen, coverage, rmse, train

#: (height, width) of a face, and the pixels of each half.
SHAPE = (28, 20)
HALVES = {
    "lower": np.s_[SHAPE[0] // 2 :, :],
    "upper": np.s_[: SHAPE[0] // 2, :],
    "left": np.s_[:, : SHAPE[1] // 2],
    "right": np.s_[:, SHAPE[1] // 2 :],
}
#: Ranks of PCA to choose from.
RANKS = (5, 10, 20, 40, 80)
#: Faces in a picture.
SHOWN = 8


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
    centered = seen[:, ~gap] - pca.mean_[~gap]
    return pca.mean_[gap] + centered @ np.linalg.solve(C[np.ix_(~gap, ~gap)], C[np.ix_(~gap, gap)])


def best_rank(faces: np.ndarray, held: int, gap: np.ndarray) -> int:
    """The rank of probabilistic PCA that is best for the half in the last of the training faces."""
    rest, new = faces[:-held], faces[-held:]
    ranks = [rank for rank in RANKS if rank < min(rest.shape)]

    def error(rank):
        pca = PCA(rank, svd_solver="full").fit(rest)
        return np.mean(np.square(impute_by_covariance(pca, new, gap) - new[:, gap]))

    return min(ranks, key=error)


def split(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Frames to train on, and those that are held out, (rows, pixels)."""
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
    return Y[~new], Y[new]


def study(args: argparse.Namespace) -> dict:
    """Train on some frames, and impute each half of the others; the figures."""
    jax.config.update("jax_enable_x64", False)
    known, test = split(args)
    print(
        f"faces, {args.data}: {len(known)} frames of {known.shape[1]} pixels in [0, 1] to train on, {len(test)} "
        f"{'last' if args.held_out == 'last' else 'evenly spaced'} ones held out; Q = {args.latent_dim}, "
        f"M = {args.inducing}, {args.covariances} covariances, {args.steps} steps of {args.batch_size or 'all'} rows, "
        "float32",
        flush=True,
    )
    began = time.perf_counter()
    gplvm, params, elbo = train(args, known, None, args.seed, covariances=args.covariances)
    seconds = time.perf_counter() - began
    report: dict[str, Any] = {
        "settings": chosen(args, (*SETTINGS, "held_out", "new_rows", "covariances")),
        "n_train": len(known),
        "elbo_per_row": elbo,
        "noise": math.sqrt(float(params["noise_variance"])),
        "relevant_dims": effective_dimensions(relevance(params["x.loc"], params["lengthscale"])),
        "seconds": seconds,
        "halves": {},
    }
    print(
        f"trained in {seconds:.0f} s: ELBO {elbo:.1f} nats per frame, noise {report['noise']:.4f}, "
        f"{report['relevant_dims']} relevant dimensions; peak memory {peak_memory() / 2**30:.2f} GiB",
        flush=True,
    )
    lines = []
    for half in args.halves:
        figures = report["halves"][half] = impute_half(args, half, known, test, gplvm, params)
        values = [f"{figures[key]:.4f}" for key in ("gplvm", "mean_face", "nearest_face", "pca")]
        line = [half, *values, figures["pca_rank"], f"{100 * figures['coverage']:.1f}", f"{figures['seconds']:.0f}"]
        lines.append(line)
    heads = ["missing half", "GPLVM", "mean face", "nearest training face", "PCA", "of rank", "% in 90% intervals"]
    print(f"\nRMSE of the missing half, pixels in [0, 1]\n{table([*heads, 'seconds'], lines)}")
    report["peak_memory_gib"] = peak_memory() / 2**30
    print(f"\npeak memory {report['peak_memory_gib']:.2f} GiB")
    return report


def impute_half(args: argparse.Namespace, half: str, known: np.ndarray, test: np.ndarray, gplvm, params) -> dict:
    """Impute a half of the test frames from the other; the figures, and a picture in ``--out``."""
    gap = np.zeros(SHAPE, bool)
    gap[HALVES[half]] = True
    gap = gap.ravel()
    missing = np.broadcast_to(gap, test.shape)
    seen = np.where(missing, np.nan, test)
    began = time.perf_counter()
    model = gplvm.posterior(params), gplvm.likelihood_at(params)
    what: dict[str, Any] = {"mask": jnp.asarray(~missing), "offset": gplvm.start.offset}
    rows = infer_latents(*model, seen, candidates=params["x.loc"], num_starts=args.starts, **what)
    mean, scale = map(np.asarray, rows.impute(*model, jnp.asarray(seen), **what))
    seconds = time.perf_counter() - began
    distance = np.square(test[:, None, ~gap] - known[None, :, ~gap]).sum(-1)
    nearest = known[np.argmin(distance, axis=1)]
    rank = best_rank(known, min(args.new_rows, len(known) // 4), gap)
    linear = test.copy()
    linear[:, gap] = impute_by_covariance(PCA(rank, svd_solver="full").fit(known), test, gap)
    write_picture(args.out / f"imputation_faces_{half}.png", draw(test, mean, scale, missing, nearest))
    return {
        "gplvm": rmse(mean, test, missing),
        "coverage": coverage(mean, scale, test, missing),
        "mean_face": rmse(np.broadcast_to(known.mean(0), test.shape), test, missing),
        "nearest_face": rmse(nearest, test, missing),
        "pca": rmse(linear, test, missing),
        "pca_rank": rank,
        "seconds": seconds,
    }


def draw(*arrays: np.ndarray):
    """Some of the held-out faces: as they are, what was seen of them, and what was imputed."""
    from npgp import plots

    some = np.linspace(0, len(arrays[0]) - 1, min(SHOWN, len(arrays[0]))).astype(int)
    test, mean, scale, missing, nearest = (array[some] for array in arrays)
    images = {
        "original": test,
        "seen": np.where(missing, np.nan, test),
        "imputed": mean,
        "nearest\nface": np.where(missing, nearest, test),
    }
    return plots.plot_images(images, SHAPE, deviations={"standard\ndeviation": np.where(missing, scale, np.nan)})
