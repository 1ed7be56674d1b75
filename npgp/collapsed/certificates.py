"""
Certificates of a sparse GP's error: bounds on the log evidence from both sides, for Gaussian noise.

Everything is at given hyperparameters: the certificate is on the approximation, not on the model. But it says if much
shorter lengthscales would explain the data better, which training with too few inducing points does not find.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.collapsed.advice import Advice, Problem, advise, count, nats
from npgp.collapsed.collapsed_gp import CollapsedGP
from npgp.collapsed.gaussian import collapsed_bound, exact_log_evidence, projected_upper_bound
from npgp.collapsed.lengthscales import ShorterLengthscales, has_lengthscale, of_observations
from npgp.conditionals import Conditional, Full, Grouped, Prior, Shared, Tight
from npgp.features import InducingBlock
from npgp.functionals.rows import Rows, RowsLike, as_rows
from npgp.kernels import Kernel
from npgp.programs.compiled import STEPS, one_program
from npgp.programs.double import in_double_if
from npgp.sparse.projection import Projection, Projector, factorize
from npgp.sparse.residuals import residual_of
from npgp.variational.optimum import ScaledProjection

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
