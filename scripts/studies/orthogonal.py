"""SGPR, ODVGP and SOLVE-GP on one-dimensional data: what orthogonal inducing points lose, after Fernlund 2022."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

import npgp
import npgp.inducing
from npgp import datasets
from npgp.variational import DenseNormal
from studies.fits import maximum
from studies.runner import Records, Study

#: S of each block of q: one block for the union, two for the orthogonal structures.
STRUCTURES: dict[str, tuple[str, ...]] = {
    "SGPR": ("dense",),
    "ODVGP": ("dense", "mean-only"),
    "SOLVE-GP": ("dense", "dense"),
}
#: Relative to the prior variance, in float64; logs of lengthscale, variance and noise stay within the limits.
JITTER, LIMITS = 1e-8, dict(limits=(-7.0, 6.0), ftol=1e-13, gtol=1e-7)


class Data(NamedTuple):
    """Rows, and the exact GP's hyperparameters (logs of lengthscale, variance, noise) and log evidence there."""

    X: np.ndarray
    y: np.ndarray
    hyper: np.ndarray
    evidence: float

    @property
    def lengthscale(self) -> float:
        return float(np.exp(self.hyper[0]))

    @property
    def kernel(self) -> npgp.RBF:
        return npgp.RBF(np.exp(self.hyper[0]), variance=np.exp(self.hyper[1]))


@jax.jit
def evidence_and_slope(hyper, X, y):
    def evidence(hyper):
        lengthscale, variance, noise = jnp.exp(hyper)
        return npgp.exact_log_evidence(npgp.RBF(lengthscale, variance=variance), X, y, noise_variance=noise)

    return jax.value_and_grad(evidence)(hyper)


@lru_cache(maxsize=1)
def snelson() -> Data:
    X, y, _ = datasets.snelson()
    value, hyper = maximum(lambda h: evidence_and_slope(h, X, y), [np.zeros(3)], 1000, 3, **LIMITS)
    return Data(X, y, hyper, value)


def collapsed(hyper, points, X, split: int, structure: str, conditional: str, groups=None, jitter=JITTER):
    """The first ``split`` of the points are the first set; SGPR has them all in one."""
    lengthscale, variance, noise = jnp.exp(hyper)
    points = points[:, None]
    return npgp.CollapsedGP(
        npgp.RBF(lengthscale, variance=variance),
        X,
        points if structure == "SGPR" else [points[:split], points[split:]],
        noise_variance=noise,
        conditional=npgp.Grouped(groups) if conditional == "grouped" else conditional,
        covariances=STRUCTURES[structure],
        jitter=jitter,
    )


@partial(jax.jit, static_argnames=("split", "structure", "conditional", "jitter"))
def _bound_and_slopes(hyper, points, X, y, groups, split: int, structure: str, conditional: str, jitter: float):
    def bound(hyper, points):
        return collapsed(hyper, points, X, split, structure, conditional, groups, jitter).log_prob(y)

    return jax.value_and_grad(bound, (0, 1))(hyper, points)


def bound_and_slopes(
    hyper, points, data: Data, split: int, structure: str, conditional="prior", groups=None, jitter=JITTER
):
    """The collapsed bound, and its slopes with hyperparameters and points. Compiled once for each structure."""
    split = 0 if structure == "SGPR" else split
    given = hyper, points, data.X, data.y, groups
    value, slopes = _bound_and_slopes(*given, split=split, structure=structure, conditional=conditional, jitter=jitter)
    return float(value), np.asarray(slopes[0]), np.asarray(slopes[1])


def bound(points, data: Data, split: int, structure: str) -> float:
    """With ``prior``, at the exact GP's hyperparameters: log evidence less this is the KL to the exact posterior."""
    return bound_and_slopes(data.hyper, points, data, split, structure)[0]


def fit_all(data: Data, starts, split: int, structure: str, conditional: str, iterations: int = 1000, **more):
    """The bound, hyperparameters and points; the best of starts (hyper, points)."""

    def objective(theta):
        value, hyper, points = bound_and_slopes(theta[:3], theta[3:], data, split, structure, conditional, **more)
        return value, np.concatenate([hyper, points])

    best, theta = maximum(objective, map(np.concatenate, starts), iterations, 3, **LIMITS)
    return best, theta[:3], theta[3:]


def fit_points(data: Data, starts: Sequence[np.ndarray], split: int, structure: str) -> tuple[float, np.ndarray]:
    """Maximize the ``prior`` bound over the points alone; the best of starts."""

    def objective(points):
        value, _, slope = bound_and_slopes(data.hyper, points, data, split, structure)
        return value, slope

    return maximum(objective, starts, 1000, 0, ftol=1e-13, gtol=1e-7)


@partial(jax.jit, static_argnames=("split", "structure"))
def whitened_posterior(hyper, points, X, y, split: int, structure: str):
    """
    Mean and Cholesky factor of q(ε) for all blocks stacked.

    The coordinates are the same for all structures: factorizing K_uu by blocks gives the Cholesky factor of the whole.
    """
    q = collapsed(hyper, points, X, split, structure, "prior").condition(y).q
    factors = [block.scale_tril if isinstance(block, DenseNormal) else jnp.eye(block.event_shape[0]) for block in q]
    return jnp.concatenate([block.loc for block in q]), jax.scipy.linalg.block_diag(*factors)


def gaussian_kl(mean, factor, mean1, factor1) -> float:
    """``KL[N(mean, L Lᵀ) ‖ N(mean1, L1 L1ᵀ)]`` of lower Cholesky factors."""
    ratio = scipy.linalg.solve_triangular(factor1, factor, lower=True)
    shift = scipy.linalg.solve_triangular(factor1, mean1 - mean, lower=True)
    log_det = np.sum(np.log(np.diag(ratio)))
    return float(0.5 * (np.sum(np.square(ratio)) + shift @ shift - len(shift)) - log_det)


def kl_to_sgpr(points, data: Data, split: int, structure: str) -> float:
    """From the posterior of a structure to SGPR's on both sets, at the exact GP's hyperparameters."""
    q = whitened_posterior(data.hyper, points, data.X, data.y, split, structure)
    sgpr = whitened_posterior(data.hyper, points, data.X, data.y, 0, "SGPR")
    return gaussian_kl(*map(np.asarray, (*q, *sgpr)))


# ---------------------------------------------------------------------------------------------------------------
# Studies


def snelson_bounds(args: argparse.Namespace, points: str, conditional: str) -> dict[str, float]:
    """From lengthscale = variance = noise = 1 and random data points, and the best of that and of random starts."""
    data, (mean_only, size) = snelson(), {"5": (0, 10), "5 and 5 mean-only": (5, 25)}[points]
    rng, starts = np.random.default_rng(args.seed), []
    for i in range(args.restarts + 1):
        Z = data.X[rng.choice(len(data.X), 5, replace=False), 0]
        hyper = np.zeros(3) if i == 0 else rng.normal(size=3)
        starts.append((hyper, np.concatenate([Z, rng.choice(data.X[:, 0], mean_only, replace=False)])))
    more = {"groups": npgp.median_split(data.X, size) if conditional == "grouped" else None, "jitter": 1e-6}
    given = (5, "ODVGP" if mean_only else "SGPR", conditional, 4 * args.iterations)
    fits = [fit_all(data, [start], *given, **more) for start in starts]
    value, hyper, _ = max(fits, key=lambda fit: fit[0])
    return {"first": fits[0][0], "best": value} | dict(zip(HYPER, np.exp(hyper).tolist(), strict=True))


HYPER = ("lengthscale", "variance", "noise_variance")


def side_by_side(args: argparse.Namespace, conditional: str) -> Records:
    """Every structure at as many points, over hyperparameters and points."""
    data, M, h = snelson(), args.inducing, args.inducing // 2
    rng, x = np.random.default_rng(args.seed), data.X[:, 0]

    def random_starts(size: int):
        for i in range(args.starts):
            yield np.zeros(3) if i % 2 else data.hyper, x[rng.choice(len(x), size, replace=False)]

    found = {f"SGPR({h})": fit_all(data, random_starts(h), 0, "SGPR", conditional)}
    union = fit_all(data, random_starts(M), 0, "SGPR", conditional)
    # SGPR's points, shared out apart and alternately, are good starts for two sets.
    places = np.sort(union[2])
    shared = [(union[1], places), (union[1], np.concatenate([places[::2], places[1::2]]))]
    for structure in ("ODVGP", "SOLVE-GP"):
        found[f"{structure}({h}+{h})"] = fit_all(data, [*random_starts(M), *shared], h, structure, conditional)
    again = [union[1:], *(fit[1:] for name, fit in found.items() if "+" in name)]
    found[f"SGPR({M})"] = fit_all(data, again, 0, "SGPR", conditional)
    return [
        {
            "structure": name,
            "bound": value,
            "union": bound_and_slopes(hyper, points, data, 0, "SGPR", conditional)[0],
            "evidence": float(evidence_and_slope(hyper, data.X, data.y)[0]),
            **dict(zip(HYPER, np.exp(hyper).tolist(), strict=True)),
        }
        for name, (value, hyper, points) in found.items()
    ]


def separation(args: argparse.Namespace, arrangement: str, shift: float) -> Records:
    """The second set is the first moved right by some lengthscales, at the exact GP's hyperparameters."""
    data, h = snelson(), args.inducing // 2
    low, high = data.X.min(), data.X.max()
    Z = low + data.lengthscale * (0.5 + 0.5 * np.arange(h))
    if arrangement == "all over":
        Z = low + (high - low) * (np.arange(h) + 0.25) / h
    points = np.concatenate([Z, Z + shift * data.lengthscale])
    union = bound(points, data, 0, "SGPR")
    return [
        {
            "structure": structure,
            "kl": kl_to_sgpr(points, data, h, structure),
            "difference": union - bound(points, data, h, structure),
            "sgpr": data.evidence - union,
        }
        for structure in ("SOLVE-GP", "ODVGP")
    ]


def allocation(args: argparse.Namespace, points: str, first: int) -> Records:
    """KL to the exact posterior for M1 + M2 = M, with points placed by rule and optimized."""
    data, M = snelson(), args.inducing

    def kmeans(size: int) -> np.ndarray:
        return np.sort(np.asarray(npgp.inducing.kmeans(jax.random.key(args.seed), data.X, size))[:, 0])

    greedy = np.asarray(npgp.inducing.greedy_variance(data.kernel, data.X, M))[:, 0]
    values = {}
    if points == "optimized":
        values["SGPR on both"], places = fit_points(data, [greedy, kmeans(M)], 0, "SGPR")
        # For two sets, k-means' and SGPR's points shared out apart and alternately.
        both = [kmeans(M), np.sort(places)]
        starts = [greedy, *both, *(np.concatenate([x[::2], x[1::2]]) for x in both)]
        for structure in ("SOLVE-GP", "ODVGP"):
            values[structure] = fit_points(data, starts, first, structure)[0]
        values["SGPR on the first"] = fit_points(data, [greedy[:first], kmeans(first)], 0, "SGPR")[0]
    else:
        placed = greedy if points == "greedy" else kmeans(M)
        values = {name: bound(placed, data, first, name) for name in ("SOLVE-GP", "ODVGP")}
        values |= {
            "SGPR on both": bound(placed, data, 0, "SGPR"),
            "SGPR on the first": bound(placed[:first], data, 0, "SGPR"),
        }
    return [{"structure": name, "kl": data.evidence - value} for name, value in values.items()]


def clusters(args: argparse.Namespace, arrangement: str, shift: float) -> Records:
    """The right half of the data moved away; a set in each half ("apart"), or both sets in both halves."""
    data, h = snelson(), args.inducing // 2
    halves = np.array_split(np.argsort(data.X[:, 0]), 2)
    X = data.X.copy()
    X[halves[1]] += shift * data.lengthscale
    moved = data._replace(X=X, evidence=float(evidence_and_slope(data.hyper, X, data.y)[0]))
    places = [np.quantile(X[half, 0], (np.arange(h) + 0.5) / h) for half in halves]
    even, odd = ([half[start::2] for half in places] for start in (0, 1))
    # As many points in each set, also where a half has an odd number.
    points = np.concatenate(places if arrangement == "apart" else [even[0], odd[1], odd[0], even[1]])
    sgpr = moved.evidence - bound(points, moved, 0, "SGPR")
    correlation = largest_correlation(*(side / data.lengthscale for side in (points[:h], points[h:])))
    return [
        {"structure": name, "kl": kl_to_sgpr(points, moved, h, name), "correlation": correlation, "sgpr": sgpr}
        for name in ("SOLVE-GP", "ODVGP")
    ]


def largest_correlation(Z: np.ndarray, O: np.ndarray) -> float:
    """The largest canonical correlation, a priori, of f at two sets of points in units of the lengthscale."""

    def K(a, b):
        return np.exp(-0.5 * np.square(a[:, None] - b))

    half = K(Z, O)
    for side in (Z, O):
        factor = np.linalg.cholesky(K(side, side) + JITTER * np.eye(len(side)))
        half = scipy.linalg.solve_triangular(factor, half, lower=True).T
    return float(np.linalg.norm(half, 2))


DIGITS = {name: (name.replace("_", " "), 3) for name in HYPER}
KL = {"kl": ("KL to SGPR on both sets, nats", 5), "sgpr": ("SGPR's to the exact posterior", 3)}
SETTINGS = {"inducing": 10, "starts": 16, "seed": 0}
DIFFERENCES = """
What differs from Fernlund 2022, chapter 6. Eq. 5.33 (and algorithm 3) is given as the collapsed bound of ODVGP and
SOLVE-GP, but is SGPR's on the union of both sets: reversing Jensen's inequality frees q(u, v) from its structure. Here
each structure has its own bound: the fit term is the union's for all, the log-determinant is taken block by block
(SOLVE-GP: both; ODVGP: the first alone, and the second set's variance stays in the residual). So union ≥ SOLVE-GP ≥
ODVGP ≥ SGPR on the first set alone with the conditional 'prior', and the differences are what is measured.
KL[SOLVE-GP ‖ SGPR] is exact, in whitened coordinates, and equals the difference of the two bounds. Eq. 5.33 also lacks
a log, eq. 3.15 a square, and line 20 of algorithm 3 must read C_v* = K_v* − δ_vᵀ δ_*."""

STUDIES = {
    "snelson-bounds": Study(
        """The bounds on Snelson's data with five inducing points, and with five mean-only points more.""",
        snelson_bounds,
        {"points": ("5", "5 and 5 mean-only"), "conditional": ("prior", "tight", "grouped", "full")},
        {"first": ("first start", 2), "best": ("best", 2)} | DIGITS,
        {"restarts": 24, "iterations": 300, "seed": 1},
        quick={"points": ["5"], "conditional": ["grouped"], "restarts": 0, "iterations": 1},
    ),
    "orthogonal-fits": Study(
        f"""Fits of SGPR, ODVGP and SOLVE-GP side by side, over hyperparameters and points.
{DIFFERENCES}""",
        side_by_side,
        {"conditional": ("prior", "tight")},
        {"bound": ("bound", 3), "union": ("union's there", 3), "evidence": ("evidence there", 3)} | DIGITS,
        SETTINGS,
        rows=("structure", "conditional"),
        quick={"inducing": 4, "starts": 1, "conditional": ["prior"]},
        note="Union: SGPR's bound at the same hyperparameters with both sets in one; less the bound, it is what the "
        "structure costs. Evidence: less the bound, the KL to the exact posterior (of ODVGP with 'tight', at least).",
    ),
    "orthogonal-separation": Study(
        f"""KL from SOLVE-GP and ODVGP to SGPR as the second set of points moves away from the first.
{DIFFERENCES}""",
        separation,
        {
            "arrangement": ("all over", "close together"),
            "shift": (0.0, 0.05, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
        },
        KL | {"difference": ("difference of the bounds", 5)},
        {"inducing": 10},
        rows=("structure", "arrangement", "shift"),
        quick={"inducing": 4, "shift": [0.05, 4.0]},
        picture=("shift", ("kl", "sgpr")),
        note="In lengthscales. At 0 the second set repeats the first and adds nothing; at the least shift it "
        "adds the slope of f there. ODVGP's KL is for the variance that the second set explains and q does not learn.",
    ),
    "orthogonal-allocation": Study(
        """How many of ten points for which set: KL to the exact posterior.""",
        allocation,
        {"points": ("greedy", "k-means", "optimized"), "first": tuple(range(1, 10))},
        {"kl": ("KL to the exact posterior, nats", 3)},
        {"inducing": 10, "seed": 0},
        rows=("structure", "points", "first"),
        quick={"inducing": 4, "first": [2], "points": ["greedy", "optimized"]},
        picture=("first", ("kl",)),
        note="At fixed points SGPR on both ≤ SOLVE-GP ≤ ODVGP ≤ SGPR on the first set alone; optimized points are the "
        "best of a few starts, and need not be the best there are.",
    ),
    "orthogonal-clusters": Study(
        """Two clusters of data that move apart: a set of points in each, or both sets in both.""",
        clusters,
        {"arrangement": ("apart", "mixed"), "shift": (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0)},
        KL | {"correlation": ("largest correlation of the sets", 4)},
        {"inducing": 10},
        rows=("structure", "arrangement", "shift"),
        quick={"inducing": 4, "shift": [0.0, 4.0]},
        picture=("shift", ("kl",)),
    ),
}
