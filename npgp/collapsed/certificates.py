"""
How far off a sparse GP can be: bounds on the log evidence from both sides, for Gaussian noise, and what would help.

Everything is at given hyperparameters: the certificate is on the approximation, not on the model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from numpy.typing import NDArray

from npgp import checks
from npgp.collapsed.gaussian import CollapsedGP, collapsed_bound, exact_log_evidence, upper_bound
from npgp.features import InducingBlock, Points
from npgp.inducing.selection import greedy_variance
from npgp.kernels import Kernel
from npgp.sparse.conditionals import Conditional, collapsed_penalty
from npgp.sparse.groups import Groups, single
from npgp.sparse.projection import factorize
from npgp.sparse.residuals import residual_of

__all__ = ["Advice", "Certificate", "certificate", "evidence_bounds"]

#: Up to this many rows what costs O(N³) is computed too.
EXACT_ROWS = 2000
#: More points are tried up to this many, or as many as there are inducing features if that is more.
MORE_POINTS = 64
#: Conditionals from the loosest to the tightest.
ORDER = ("prior", "shared", "tight", "grouped", "full")

Structure = tuple[tuple[InducingBlock, ...], tuple[str, ...]]  # blocks, and the covariance of each


@dataclass(frozen=True)
class Advice:
    """
    Where the bound loses, and what would help, at the same hyperparameters. A gain is the difference of two computed
    bounds with the conditional named; it may be negative. Training afterwards may gain more.

    :param conditional: the best one that costs less than O(N³); gains are with it.
    :param gap_per_row: upper less lower bound, for each row.
    :param penalty: ``½ Σ_n log(1 + d_n/σ_n²)``: what d_n, the variance that the learned blocks leave unexplained,
        costs the ``tight`` bound, in nats.
    :param row_penalty: its terms, (N,): where in the data more inducing points are wanted.
    :param half_share: the smallest share of the rows that carries half of it.
    :param learning_gain: of learning every block's covariance in full; ``None`` where all are ("dense").
    :param fusing_gain: of one dense block in place of all; ``None`` for one block, and for features other than points.
    :param penalty_goal: a tenth of the penalty, or 1 nat if that is more.
    :param points_needed: how many more points bring the penalty to its goal, chosen one by one from the rows, each
        where d_n is largest (:func:`npgp.inducing.greedy_variance`). An estimate, from above, of how many are needed:
        points that are chosen together or optimised do better. 0 if the penalty is there; ``None`` if all those tried
        are too few.
    :param points_tried: so many: as many as are needed, or as were tried. 0 if none are needed.
    :param points_penalty: the penalty with these.
    :param learned_points_gain: of these points in a block with a learned covariance: in the first block where that is
        dense and made of points, else as a new dense block after the learned ones. ``None`` if none are needed.
    :param mean_only_points_gain: of as many points in a block that moves the mean only, those with the largest
        variance given all blocks. (They count the same whether they join the last such block or make one.)
    """

    conditional: str
    gap_per_row: float
    penalty: float
    row_penalty: NDArray[np.floating] = field(repr=False, compare=False)
    half_share: float
    learning_gain: float | None
    fusing_gain: float | None
    penalty_goal: float
    points_needed: int | None
    points_tried: int
    points_penalty: float
    learned_points_gain: float | None
    mean_only_points_gain: float | None

    def __str__(self) -> str:
        lines = [
            f"What the inducing features leave unexplained costs the 'tight' bound {_nats(self.penalty)}; half of that "
            f"falls on {100 * self.half_share:.0f}% of the rows."
        ]
        if self.learning_gain is not None:
            lines.append(
                f"Learning the covariance of every block in full would {_change(self.learning_gain, self.conditional)}."
            )
        if self.fusing_gain is not None:
            lines.append(f"Fusing all blocks into one would {_change(self.fusing_gain, self.conditional)}.")
        if self.points_needed == 0:
            lines.append("That is small already: more inducing points have little left to explain.")
        elif self.learned_points_gain is not None and self.mean_only_points_gain is not None:
            result = "bring" if self.points_needed else "only bring"
            lines += [
                f"{_count(self.points_tried, 'more inducing point')} would {result} the cost of "
                f"{_nats(self.penalty)} down to {_nats(self.points_penalty)}.",
                f"With a learned covariance they would {_change(self.learned_points_gain, self.conditional)}; "
                f"moving the mean only, which is cheaper, as many would "
                f"{_change(self.mean_only_points_gain, self.conditional)}.",
            ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Certificate:
    """
    The log evidence of a GP with Gaussian noise lies in [lower, upper]. ``print`` it for a report.

    :param lower: the best of the lower bounds.
    :param upper: the best of Titsias' (2014) upper bounds.
    :param bounds: the collapsed lower bound with each conditional.
    :param exact: the log evidence itself, where there are few enough rows.
    :param rows: number of rows N.
    :param rounding: the order of magnitude of rounding errors in the bounds, in nats. They are not in the interval.
    :param advice: what would narrow it.
    """

    lower: float
    upper: float
    bounds: dict[str, float]
    exact: float | None
    rows: int
    rounding: float
    advice: Advice

    @property
    def gap(self) -> float:
        """Width of the interval, in nats."""
        return self.upper - self.lower

    def __str__(self) -> str:
        # As many decimals as the gap has meaning in; the interval is rounded outwards.
        decimals = 6 if self.gap <= 0 else min(max(1 - math.floor(math.log10(self.gap)), 1), 6)
        unit = 10.0**decimals
        lower, upper = math.floor(self.lower * unit) / unit, math.ceil(self.upper * unit) / unit
        lines = [
            f"The log evidence of these {_count(self.rows, 'row')} lies between {lower:.{decimals}f} and "
            f"{upper:.{decimals}f} nats" + ("." if self.exact is None else f"; it is {self.exact:.{decimals}f}."),
            f"The two are {_nats(max(self.gap, 0.0))} apart, {_nats(max(self.advice.gap_per_row, 0.0))} for each row.",
            "Lower bounds: " + ", ".join(f"{name} {bound:.{decimals}f}" for name, bound in self.bounds.items()) + ".",
        ]
        if self.rounding > 0.01 * max(self.gap, 1.0) or self.gap < -0.01:
            lines.append(
                f"Beware: rounding may move these figures by {_nats(self.rounding)}. Compute them in float64 "
                "(jax.config.update('jax_enable_x64', True)), or with a larger noise variance."
            )
        return "\n".join([*lines, str(self.advice)])


def certificate(
    kernel: Kernel,
    X: ArrayLike,
    y: ArrayLike,
    inducing: object,
    noise_variance: ArrayLike,
    *,
    covariances: Sequence[str] | None = None,
    mean: ArrayLike = 0.0,
    groups: Groups | int | None = None,
    jitter: float | None = None,
    exact_rows: int = EXACT_ROWS,
) -> Certificate:
    """
    Bounds on the log evidence of a GP with Gaussian noise, from below and above, and what would narrow them::

        print(npgp.certificate(kernel, X, y, Z, noise_variance))

    The lower bound is the best that blocks of this structure give with any conditional, the upper one Titsias' (2014;
    :func:`npgp.collapsed.upper_bound`). Up to ``exact_rows`` rows the ``full`` conditional, the upper bound with the
    residual's largest eigenvalue and the exact evidence are computed too. In float64, please: float32 loses the digits
    that a narrow interval needs, and the report then says so. Not for use inside ``jit``.

    :param kernel: the kernel, with its hyperparameters.
    :param X: training inputs, (N, D).
    :param y: observations, (N,).
    :param inducing: Z of shape (M, D), a block of features, or a list of these.
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param covariances: for each block ``"dense"``, ``"diagonal"`` or ``"prior"``; dense throughout if omitted.
    :param mean: the mean function's values at X, a scalar or (N,).
    :param groups: for ``grouped``: a partition of the rows, or the number of rows in each group of consecutive rows. If
        omitted, one is made of X, with groups of the size that :func:`npgp.sparse.default_size` says.
    :param jitter: relative jitter tried first.
    :param exact_rows: with more rows than this, nothing of O(N³) is computed.
    :raises TypeError: for inputs that are not floating, or traced.
    :raises ValueError: for inputs of the wrong shape or with NaN, and for a noise variance that is not positive.
    :raises FloatingPointError: if a bound comes out as NaN or infinite.
    """
    if any(map(checks.is_traced, jax.tree.leaves((kernel, X, y, inducing, noise_variance, mean)))):
        raise TypeError("certificate was called on traced values; it runs outside jit, on concrete ones.")
    gp = CollapsedGP(kernel, X, inducing, noise_variance, mean, "grouped", covariances, jitter, groups)
    X, N = gp.X, gp.X.shape[0]
    for name, value in (("y", y), ("mean", mean)):
        checks.require_finite(value, name)
    y = jnp.asarray(y, X.dtype)
    if y.shape != (N,):
        raise ValueError(f"y has shape {y.shape}; it must be ({N},), one observation for each row of X.")
    try:
        whole = N <= operator.index(exact_rows)
    except TypeError:
        raise TypeError(f"exact_rows is {exact_rows!r}; it must be a whole number of rows.") from None
    problem = (kernel, X, y - mean, jnp.asarray(noise_variance, X.dtype), gp.groups, jitter)

    found = evidence_bounds(*problem, gp.blocks, gp.covariances, whole)
    bounds = {name: float(found["bounds"][name]) for name in ORDER if name in found["bounds"]}
    upper = float(found["upper"])
    exact = float(found["exact"]) if whole else None
    for name, value in {**bounds, "upper": upper, "exact": exact or 0.0}.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name!r} figure is {value} in {X.dtype}: check the hyperparameters, and use float64, a larger "
                "jitter, or fewer inducing features that nearly coincide."
            )
    lower = max(bounds.values())
    scalable = {name: bound for name, bound in bounds.items() if name != "full"}
    best = max(scalable, key=lambda name: scalable[name])
    advice = _advise(
        problem, (gp.blocks, gp.covariances), best, scalable[best], np.asarray(found["ratio"]), upper - lower
    )
    return Certificate(lower, upper, bounds, exact, N, float(found["rounding"]), advice)


@partial(jax.jit, static_argnames=("covariances", "whole"))
def evidence_bounds(
    kernel: Kernel,
    X: jax.Array,
    y: jax.Array,
    noise_variance: ArrayLike,
    groups: Groups | None,
    jitter: float | None,
    blocks: tuple[InducingBlock, ...],
    covariances: tuple[str, ...],
    whole: bool,
) -> dict:
    """
    Bounds on the log evidence, as one compiled program; arguments as for :func:`certificate`, already checked.

    :param y: observations less the mean function, (N,).
    :param groups: for ``grouped``, which is left out without them.
    :param whole: whether to compute what costs O(N³): ``full``, the largest eigenvalue and the exact evidence.
    :return: ``bounds`` by conditional; ``upper``; ``exact`` or ``None``; ``ratio``,
        d_n/σ_n² of the learned blocks, (N,); and ``rounding``, an estimate of what rounding does to the bounds.
    """
    projector = factorize(kernel, blocks, jitter)
    projection = projector(X)
    learned = [kind != "prior" for kind in covariances]
    partitions: dict[Conditional, Groups | None] = {"prior": None, "shared": None, "tight": None}
    if groups is not None:
        partitions["grouped"] = groups
    if whole:
        partitions["full"] = single(X.shape[0])
    penalties = {}
    for conditional, partition in partitions.items():
        residual = residual_of(projector, X, projection, learned, partition)
        penalties[conditional] = collapsed_penalty(conditional, residual, noise_variance)
    rows = residual_of(projector, X, projection, learned, None)
    tight = collapsed_bound(projection, rows, y, noise_variance, covariances, "tight")
    bounds = {name: tight + (penalties["tight"] - penalty) for name, penalty in penalties.items()}

    norm, exact = jnp.sum(projection.residual_variance()), None
    if whole:
        largest = jnp.linalg.eigvalsh(projector.residual_covariance(X, projection.A))[-1]
        norm = jnp.clip(largest, 0.0, norm)  # no more than the trace but for rounding
        exact = exact_log_evidence(kernel, X, y, noise_variance)
    upper = upper_bound(projection, y, noise_variance, norm)  # which increases with the norm
    ratio = rows.variance / noise_variance
    # Covariances are right to ε k, which in a direction of variance σ² is ε k/σ²; and the fit loses digits to y²/σ².
    scale = (projection.prior_variance + jnp.square(y)) / noise_variance
    rounding = jnp.finfo(X.dtype).eps * jnp.sum(1.0 + scale)
    return {"bounds": bounds, "upper": upper, "exact": exact, "ratio": ratio, "rounding": rounding}


# ---------------------------------------------------------------------------------------------------------------
# Advice


def _advise(problem, given: Structure, best: str, bound: float, ratio: NDArray, gap: float) -> Advice:
    kernel, X, _, noise_variance, _, jitter = problem
    blocks, kinds = given
    row_penalty = 0.5 * np.log1p(ratio)
    penalty = float(np.sum(row_penalty))
    structures: dict[str, Structure] = {}
    if any(kind != "dense" for kind in kinds):
        structures["learning"] = (blocks, ("dense",) * len(blocks))
    if len(blocks) > 1 and all(isinstance(block, Points) for block in blocks):
        together = jnp.concatenate([block.inputs for block in blocks])  # type: ignore[attr-defined]
        structures["fusing"] = ((Points(together),), ("dense",))

    goal = max(1.0, 0.1 * penalty)
    needed: int | None = 0
    tried, left = 0, penalty
    if penalty > goal:
        learned = tuple(block for block, kind in zip(blocks, kinds, strict=True) if kind != "prior")
        different = len(np.unique(np.asarray(X), axis=0))
        most = min(max(MORE_POINTS, sum(block.size for block in blocks)), different)
        points = greedy_variance(kernel, X, most, given=learned, jitter=jitter)
        penalties = np.asarray(_penalties(kernel, X, learned, points, noise_variance, jitter))
        reached = np.flatnonzero(penalties <= goal)
        needed = int(reached[0]) if reached.size else None
        tried = most if needed is None else needed
        left = float(penalties[tried])
        elsewhere = (
            points if len(learned) == len(blocks) else greedy_variance(kernel, X, most, given=blocks, jitter=jitter)
        )
        structures["learned"] = _with_learned(given, points[:tried])
        structures["mean only"] = ((*blocks, Points(elsewhere[:tried])), (*kinds, "prior"))

    gains: dict[str, float] = {}
    if structures:
        inducing, covariances = zip(*structures.values(), strict=True)
        found = _bounds_of(*problem, inducing, covariances, best)
        gains = {name: float(value) - bound for name, value in zip(structures, found, strict=True)}
    return Advice(
        conditional=best,
        gap_per_row=gap / len(ratio),
        penalty=penalty,
        row_penalty=row_penalty,
        half_share=_half_share(row_penalty),
        learning_gain=gains.get("learning"),
        fusing_gain=gains.get("fusing"),
        penalty_goal=goal,
        points_needed=needed,
        points_tried=tried,
        points_penalty=left,
        learned_points_gain=gains.get("learned"),
        mean_only_points_gain=gains.get("mean only"),
    )


def _half_share(row_penalty: NDArray) -> float:
    carried = np.cumsum(np.sort(row_penalty)[::-1])
    return float(np.searchsorted(carried, 0.5 * carried[-1]) + 1) / len(row_penalty)


def _with_learned(structure: Structure, points: jax.Array) -> Structure:
    """More points with a learned covariance."""
    blocks, kinds = structure
    if kinds[0] == "dense" and isinstance(blocks[0], Points):
        return (Points(jnp.concatenate([blocks[0].inputs, points])), *blocks[1:]), kinds
    before = sum(kind != "prior" for kind in kinds)  # mean-only blocks come last
    return (*blocks[:before], Points(points), *blocks[before:]), (*kinds[:before], "dense", *kinds[before:])


@jax.jit
def _penalties(kernel, X, learned, points, noise_variance, jitter) -> jax.Array:
    """
    ``½ Σ log(1 + d_n/σ_n²)`` with the first i points, i = 0 to M; (M + 1,).

    Row i of the points' whitened projections depends on the points up to i alone: one factorisation serves all.
    """
    projection = factorize(kernel, (*learned, Points(points)), jitter)(X)

    def penalty(d):
        return 0.5 * jnp.sum(jnp.log1p(d / noise_variance))

    def add(d, a):
        d = jnp.maximum(d - jnp.square(a), 0.0)
        return d, penalty(d)

    start = projection.residual_variance([True] * len(learned) + [False])
    return jnp.append(penalty(start), lax.scan(add, start, projection.A[-1])[1])


@partial(jax.jit, static_argnames=("covariances", "conditional"))
def _bounds_of(kernel, X, y, noise_variance, groups, jitter, structures, covariances, conditional) -> list[jax.Array]:
    """The bound of each of several structures with one conditional."""
    partition = groups if conditional == "grouped" else None
    return [
        CollapsedGP(kernel, X, blocks, noise_variance, 0.0, conditional, kinds, jitter, partition).log_prob(y)
        for blocks, kinds in zip(structures, covariances, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------
# Words


def _nats(value: float) -> str:
    """Two or three digits."""
    size = abs(value)
    if size < 1e-4:
        return "less than 0.0001 nats"
    decimals = 0 if size >= 100 else 1 if size >= 10 else 1 - math.floor(math.log10(size))
    return f"{value:.{decimals}f} nats"


def _change(gain: float, conditional: str) -> str:
    if abs(gain) < 0.01:
        return f"leave the {conditional!r} bound as it is"
    return f"{'raise' if gain > 0 else 'lower'} the {conditional!r} bound by {_nats(abs(gain))}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
