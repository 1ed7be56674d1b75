"""Diagnosis of the collapsed bound's losses: would more inducing points help, or a more flexible q(ε)?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from npgp.collapsed.collapsed_gp import CollapsedGP
from npgp.conditionals import Conditional
from npgp.features import InducingBlock, Points
from npgp.functionals.rows import Rows, points_of
from npgp.inducing.selection import greedy_variance
from npgp.kernels import Kernel
from npgp.programs.compiled import STEPS, one_program
from npgp.sparse.projection import factorize

# ---------------------------------------------------------------------------------------------------------------
# Numbers in sentences


def nats(value: float) -> str:
    """Two or three digits."""
    size = abs(value)
    if size < 1e-4:
        return "less than 0.0001 nats"
    decimals = 0 if size >= 100 else 1 if size >= 10 else 1 - math.floor(math.log10(size))
    return f"{value:.{decimals}f} nats"


def change(gain: float, conditional: str) -> str:
    if abs(gain) < 0.01:
        return f"leave the {conditional!r} bound as it is"
    return f"{'raise' if gain > 0 else 'lower'} the {conditional!r} bound by {nats(abs(gain))}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# ---------------------------------------------------------------------------------------------------------------
# Diagnosis

#: More points are tried up to this many, or as many as there are inducing features if that is more.
MORE_POINTS = 64
#: Of more points that functionals are made of, a random part is tried.
MOST_CANDIDATES = 4000

Structure = tuple[tuple[InducingBlock, ...], tuple[str, ...]]  # blocks, and the covariance of each


class Problem(NamedTuple):
    """Data and hyperparameters, checked; y without the offset."""

    kernel: Kernel
    X: Rows
    y: jax.Array
    noise_variance: jax.Array
    jitter: float | None


@dataclass(frozen=True)
class Advice:
    """
    Diagnosis of the bound's losses, and what would help at the same hyperparameters. A gain is the difference of two
    computed bounds with the conditional named; it may be negative. Training afterwards may gain more.

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
        points that are chosen together or optimized do better. 0 if the penalty is there; ``None`` if all those tried
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
            f"What the inducing features leave unexplained costs the 'tight' bound {nats(self.penalty)}; half of that "
            f"falls on {100 * self.half_share:.0f}% of the rows."
        ]
        if self.learning_gain is not None:
            lines.append(
                f"Learning the covariance of every block in full would {change(self.learning_gain, self.conditional)}."
            )
        if self.fusing_gain is not None:
            lines.append(f"Fusing all blocks into one would {change(self.fusing_gain, self.conditional)}.")
        if self.points_needed == 0:
            lines.append("That is small already: more inducing points have little left to explain.")
        elif self.learned_points_gain is not None and self.mean_only_points_gain is not None:
            result = "bring" if self.points_needed else "only bring"
            lines += [
                f"{count(self.points_tried, 'more inducing point')} would {result} the cost of "
                f"{nats(self.penalty)} down to {nats(self.points_penalty)}.",
                f"With a learned covariance they would {change(self.learned_points_gain, self.conditional)}; "
                f"moving the mean only, which is cheaper, as many would "
                f"{change(self.mean_only_points_gain, self.conditional)}.",
            ]
        return "\n".join(lines)


def advise(
    problem: Problem, structure: Structure, best: Conditional, name: str, bound: float, ratio: NDArray, gap: float
) -> Advice:
    """
    :param problem: data and hyperparameters.
    :param given: the inducing blocks, and the covariance of each.
    :param best: the best conditional that costs less than O(N³).
    :param name: what to call it.
    :param bound: the collapsed bound with it.
    :param ratio: d_n/σ_n², (N,).
    :param gap: upper less lower bound.
    """
    kernel, X, _, noise_variance, jitter = problem
    blocks, kinds = structure
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
        learned = tuple(block for block, kind in zip(blocks, kinds, strict=True) if kind != "mean-only")
        candidates = points_of(X, MOST_CANDIDATES)
        different = len(np.unique(np.asarray(candidates), axis=0))
        most = min(max(MORE_POINTS, sum(block.size for block in blocks)), different)
        points = greedy_variance(kernel, candidates, most, given=learned, jitter=jitter)
        more = kernel, X, learned, points, noise_variance, jitter
        penalties = np.asarray(one_program(lambda: _penalties(*more), options=STEPS))
        reached = np.flatnonzero(penalties <= goal)
        needed = int(reached[0]) if reached.size else None
        tried = most if needed is None else needed
        left = float(penalties[tried])
        elsewhere = (
            points
            if len(learned) == len(blocks)
            else greedy_variance(kernel, candidates, most, given=blocks, jitter=jitter)
        )
        structures["learned"] = _with_learned(structure, points[:tried])
        structures["mean only"] = ((*blocks, Points(elsewhere[:tried])), (*kinds, "mean-only"))

    gains: dict[str, float] = {}
    if structures:
        inducing, covariances = zip(*structures.values(), strict=True)
        found = one_program(lambda: _bounds_of(*problem, inducing, covariances, best), options=STEPS)
        gains = {name: float(value) - bound for name, value in zip(structures, found, strict=True)}
    return Advice(
        conditional=name,
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
    before = sum(kind != "mean-only" for kind in kinds)  # mean-only blocks come last
    return (*blocks[:before], Points(points), *blocks[before:]), (*kinds[:before], "dense", *kinds[before:])


def _penalties(kernel, X, learned, points, noise_variance, jitter) -> jax.Array:
    """
    ``½ Σ log(1 + d_n/σ_n²)`` with the first i points, i = 0 to M; (M + 1,).

    Row i of the points' whitened projections depends on the points up to i alone: one factorization serves all.
    """
    projection = factorize(kernel, (*learned, Points(points)), jitter)(X)

    def penalty(d):
        return 0.5 * jnp.sum(jnp.log1p(d / noise_variance))

    def add(d, a):
        d = jnp.maximum(d - jnp.square(a), 0.0)
        return d, penalty(d)

    start = projection.residual_variance([True] * len(learned) + [False])
    return jnp.append(penalty(start), lax.scan(add, start, projection.A[-1])[1])


def _bounds_of(kernel, X, y, noise_variance, jitter, structures, covariances, conditional) -> list[jax.Array]:
    """The bound of each of several structures with one conditional."""
    return [
        CollapsedGP(
            kernel, X, blocks, noise_variance=noise_variance, conditional=conditional, covariances=kinds, jitter=jitter
        ).log_prob(y)
        for blocks, kinds in zip(structures, covariances, strict=True)
    ]
