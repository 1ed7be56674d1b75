"""
Certificates of a sparse GP's error: bounds on the log evidence from both sides, for Gaussian noise.

Everything is at given hyperparameters: the certificate is on the approximation, not on the model. But it says if much
shorter lengthscales would explain the data better, which training with too few inducing points does not find.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from numpy.typing import NDArray

from npgp import checks, linalg
from npgp.collapsed.collapsed_gp import CollapsedGP
from npgp.collapsed.gaussian import collapsed_bound, exact_log_evidence, projected_upper_bound
from npgp.collapsed.lengthscales import ShorterLengthscales, change, count, has_lengthscale, nats, of_observations
from npgp.conditionals import Conditional, Full, Grouped, Prior, Shared, Tight
from npgp.features import InducingBlock, Points
from npgp.functionals.rows import Rows, RowsLike, as_rows, points_of
from npgp.inducing.selection import greedy_variance
from npgp.kernels import Kernel
from npgp.programs.compiled import STEPS, one_program
from npgp.programs.double import in_double_if
from npgp.sparse.projection import Projection, Projector, factorize
from npgp.sparse.residuals import residual_of
from npgp.variational.updates import ScaledProjection

# ---------------------------------------------------------------------------------------------------------------
# Losses of the collapsed bound: would more inducing points help, or a more flexible q(ε)?

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


# ---------------------------------------------------------------------------------------------------------------
# Certificates

#: Up to this many rows what costs O(N³) is computed too.
EXACT_ROWS = 2000
#: Conditionals from the loosest to the tightest.
ORDER = ("prior", "shared", "tight", "grouped", "full")


@dataclass(frozen=True)
class Certificate:
    """
    The log evidence of a GP with Gaussian noise lies in [lower, upper]. ``print`` it for a report.

    .. code-block:: python

        certificate = npgp.certificate(kernel, X, y, Z, noise_variance=noise_variance)
        assert certificate.lower <= certificate.upper

    :param lower: the best of the lower bounds.
    :param upper: the best of Titsias' (2014) upper bounds.
    :param bounds: the collapsed lower bound with each conditional.
    :param exact: the log evidence itself, where there are few enough rows.
    :param rows: number of rows N.
    :param rounding: the order of magnitude of rounding errors in the bounds, in nats. They are not in the interval.
    :param advice: what would narrow it.
    :param lengthscales: whether the data ask for shorter lengthscales; ``None`` of kernels without any.
    """

    lower: float
    upper: float
    bounds: dict[str, float]
    exact: float | None
    rows: int
    rounding: float
    advice: Advice
    lengthscales: ShorterLengthscales | None = None

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
            f"The log evidence of these {count(self.rows, 'row')} lies between {lower:.{decimals}f} and "
            f"{upper:.{decimals}f} nats" + ("." if self.exact is None else f"; it is {self.exact:.{decimals}f}."),
            f"The two are {nats(max(self.gap, 0.0))} apart, {nats(max(self.advice.gap_per_row, 0.0))} for each row.",
            "Lower bounds: " + ", ".join(f"{name} {bound:.{decimals}f}" for name, bound in self.bounds.items()) + ".",
        ]
        if self.rounding > 0.01 * max(self.gap, 1.0) or self.gap < -0.01:
            lines.append(
                f"Beware: rounding may move these figures by {nats(self.rounding)}. Compute them in float64 "
                "(jax.config.update('jax_enable_x64', True)), or with a larger noise variance."
            )
        lines.append(str(self.advice))
        if self.lengthscales is not None and self.lengthscales.divisor > 1:
            lines.append(str(self.lengthscales))
        return "\n".join(lines)


def certificate(
    kernel: Kernel,
    X: RowsLike,
    y: ArrayLike,
    inducing: object,
    *,
    noise_variance: ArrayLike,
    covariances: Sequence[str] | None = None,
    offset: ArrayLike = 0.0,
    grouped: Grouped = Grouped(),  # noqa: B008  (frozen)
    jitter: float | None = None,
    exact_rows: int = EXACT_ROWS,
) -> Certificate:
    """
    Bounds on the log evidence of a GP with Gaussian noise, from below and above, and what would narrow them:

    .. code-block:: python

        print(npgp.certificate(kernel, X, y, Z, noise_variance=noise_variance))

    The lower bound is the best that blocks of this structure give with any conditional, the upper one Titsias' (2014;
    :func:`npgp.collapsed.upper_bound`). Up to ``exact_rows`` rows the ``full`` conditional, the upper bound with the
    residual's largest eigenvalue and the exact evidence are computed too. In float64, please: float32 loses the digits
    that a narrow interval needs, and the report then says so. Not for use inside ``jit``.

    :param kernel: the kernel, with its hyperparameters.
    :param X: training inputs, (N, D), or functionals.
    :param y: observations, (N,).
    :param inducing: Z of shape (M, D), a block of features, or a list of these.
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param covariances: for each block ``"dense"``, ``"diagonal"`` or ``"mean-only"``; dense throughout if omitted.
    :param offset: what is added to f, such as a mean function's values at X; a scalar or (N,).
    :param grouped: the ``grouped`` conditional with its groups; found in X if omitted.
    :param jitter: relative jitter tried first.
    :param exact_rows: with more rows than this, nothing of O(N³) is computed.
    :raises TypeError: for inputs that are not floating, or traced.
    :raises ValueError: for inputs of the wrong shape or with NaN, and for a noise variance that is not positive.
    :raises FloatingPointError: if a bound comes out as NaN or infinite.
    """
    if any(map(checks.is_traced, jax.tree.leaves((kernel, X, y, inducing, noise_variance, offset)))):
        raise TypeError("certificate was called on traced values; it runs outside jit, on concrete ones.")
    X = as_rows(X)
    gp = CollapsedGP(
        kernel,
        X,
        inducing,
        noise_variance=noise_variance,
        offset=offset,
        conditional=grouped,
        covariances=covariances,
        jitter=jitter,
    )
    N = X.shape[0]
    y = checks.to_device(checks.observed(y, (N,))[0], "y", X.dtype)
    whole = N <= checks.whole_number(exact_rows, "exact_rows", least=None)
    problem = Problem(gp.kernel, X, y - gp.offset, jnp.asarray(gp.noise_variance, X.dtype), jitter)
    conditionals: dict[str, Conditional] = {
        "prior": Prior(),
        "shared": Shared(),
        "tight": Tight(),
        "grouped": gp.conditional,
    }
    if whole:
        conditionals["full"] = Full()

    def bounds_of(kernel, X, y, noise_variance, blocks):
        return evidence_bounds(
            kernel, X, y, noise_variance, problem.jitter, blocks, gp.covariances, conditionals, whole
        )

    arrays = problem.kernel, problem.X, problem.y, problem.noise_variance, gp.blocks
    found = one_program(lambda: in_double_if(gp.kernel.wants_double, bounds_of, *arrays), options=STEPS)
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
    structure = (gp.blocks, gp.covariances)
    ratio = np.asarray(found["ratio"])
    advice = advise(problem, structure, conditionals[best], best, scalable[best], ratio, upper - lower)
    lengthscales = None
    if has_lengthscale(gp.kernel, X):
        precision = np.broadcast_to(1.0 / np.asarray(gp.noise_variance), (N,))
        lengthscales = of_observations(gp.kernel, gp.blocks, X, np.asarray(problem.y), precision, jitter=jitter)
    return Certificate(lower, upper, bounds, exact, N, float(found["rounding"]), advice, lengthscales)


def evidence_bounds(
    kernel: Kernel,
    X: Rows,
    y: jax.Array,
    noise_variance: ArrayLike,
    jitter: float | None,
    blocks: tuple[InducingBlock, ...],
    covariances: tuple[str, ...],
    conditionals: Mapping[str, Conditional],
    whole: bool,
) -> dict:
    """
    Bounds on the log evidence; arguments as for :func:`certificate`, already checked.

    .. code-block:: python

        bounds = npgp.collapsed.evidence_bounds(
            kernel,
            jnp.asarray(X),
            jnp.asarray(y),
            noise_variance,
            None,
            (npgp.features.Points(jnp.asarray(Z)),),
            ("dense",),
            {"tight": npgp.conditionals.Tight()},
            whole=True,
        )
        assert bounds["bounds"]["tight"] <= bounds["exact"] <= bounds["upper"]

    :param y: observations less the offset, (N,).
    :param conditionals: the conditionals by the names of their bounds.
    :param whole: whether to compute what costs O(N³): the largest eigenvalue and the exact evidence.
    :return: ``bounds`` by conditional; ``upper``; ``exact`` or ``None``; ``ratio``,
        d_n/σ_n² of the learned blocks, (N,); and ``rounding``, an estimate of what rounding does to the bounds.
    """
    projector = factorize(kernel, blocks, jitter)
    projection = projector(X)
    learned = [kind != "mean-only" for kind in covariances]
    penalties = {}
    for name, conditional in conditionals.items():
        residual = residual_of(projector, X, projection, learned, conditional.partition(X.shape[0]))
        penalties[name] = conditional.penalty(residual, noise_variance)
    rows = residual_of(projector, X, projection, learned, None)
    tight = collapsed_bound(projection, rows, y, noise_variance, covariances, Tight())
    bounds = {name: tight + (Tight().penalty(rows, noise_variance) - penalty) for name, penalty in penalties.items()}

    norm, exact = jnp.sum(projection.residual_variance()), None
    if whole:
        largest = jnp.linalg.eigvalsh(projector.residual_covariance(X, projection.A))[-1]
        norm = jnp.clip(largest, 0.0, norm)  # no more than the trace but for rounding
        exact = exact_log_evidence(kernel, X, y, noise_variance=noise_variance)
    upper = projected_upper_bound(projection, y, noise_variance, norm)  # which increases with the norm
    ratio = rows.variance / noise_variance
    rounding = _rounding(projector, projection, y, noise_variance)
    return {"bounds": bounds, "upper": upper, "exact": exact, "ratio": ratio, "rounding": rounding}


def _rounding(projector: Projector, projection: Projection, y: jax.Array, noise_variance: ArrayLike) -> jax.Array:
    """
    Error of bounds due to rounding of covariances to ``ε k``.

    In a direction of variance σ² that is ε k/σ², and the fit loses digits to y²/σ². Where noise is small, and y not
    what the blocks explain, the fit ``−½ yᵀ (Q + σ²I)⁻¹ y`` loses more: with ``α = (Q + σ²I)⁻¹ y`` and
    ``w = K_uu⁻¹ K_uf α``, a change E of K_uu and K_uf moves it by ``wᵀE α − ½ wᵀE w``, about
    ``½ ε k |w| (|w| + 2 |α|)``.
    """
    scale = (projection.prior_variance + jnp.square(y)) / noise_variance
    mean = ScaledProjection.of(projection, noise_variance).solve(y)
    left = y - sum(linalg.matmul(m, A) for m, A in zip(mean, projection.A, strict=True))
    points = projector.unwhiten([m[:, None] for m in mean])
    w = jnp.sqrt(sum(jnp.sum(jnp.square(gradient)) for gradient in points))
    fit = 0.5 * jnp.max(projection.prior_variance) * w * (w + 2.0 * jnp.linalg.norm(left / noise_variance))
    return jnp.finfo(y.dtype).eps * (jnp.sum(1.0 + scale) + fit)
