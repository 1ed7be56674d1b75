"""
Whether inducing points are enough: the bound with them beside the bound with more, before and after training anew.

A bound rises with every point, and hyperparameters at its maximum fit the points as well as the data: with too few,
lengthscales and noise come out too large. So both bounds are maximized here, over the kernel's lengthscales and
variances and the noise. Where even twice the points are far too few, neither moves; then the evidence of neighboring
rows, without any points, tells (:mod:`npgp.collapsed.lengthscales`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # whose folders are imported where they are used
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.collapsed.gaussian import collapsed_bound
from npgp.collapsed.lengthscales import (
    MOST_POINTS,
    ShorterLengthscales,
    count,
    has_lengthscale,
    nats,
    of_observations,
    shortened,
)
from npgp.conditionals import Tight
from npgp.conditionals.base import Observations
from npgp.features import InducingBlock, Points
from npgp.functionals.rows import Functionals, Rows, RowsLike, apart, as_rows, points_of, some
from npgp.inducing.selection import greedy_rows
from npgp.kernels import Kernel
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.programs.double import in_double_if
from npgp.sparse.projection import Projection, factorize
from npgp.sparse.residuals import RowResidual
from npgp.variational.posterior import Posterior

#: Of more rows a random part is taken, each of which then counts for several.
MOST_ROWS = 4000
#: Steps of training anew, which starts where training ended.
STEPS = 60
#: Kernel parameters that are trained anew; the name of the noise's; and the farthest that a logarithm may go.
TRAINED, NOISE, FAR = ("lengthscale", "variance"), "noise", 5.0


@dataclass(frozen=True)
class EnoughPoints:
    """
    Result of :func:`enough_points`. ``print`` it for a report.

    :param features: number of inducing features at hand, M.
    :param added: the points that were added to them, (·, D), at most as many.
    :param rows: number of rows with an observation.
    :param gain: by how much the points added raise the bound at the hyperparameters at hand, in nats.
    :param gain_trained: likewise, where hyperparameters are at each bound's maximum.
    :param lengthscale: lengthscales trained with the points added, divided by those at hand (the geometric mean of
        several); ``None`` of kernels without any.
    :param counted_at: the lengthscales that what follows is computed at, divided by those at hand: the trained ones, or
        those that neighboring rows ask for.
    :param unexplained: share of the prior variance at the rows that the features leave, there.
    :param of_noise: what they leave as a share of the noise variance, on average.
    :param points_needed: about how many inducing points would bring the bound within the tolerance; ``None`` if those
        at hand are enough, or if 1000 are too few.
    :param tolerance: what more points may gain, in nats for each row.
    :param approximate: whether the likelihood is not Gaussian, and pseudo-observations stand for it.
    :param shorter: whether neighboring rows ask for much shorter lengthscales; ``None`` of kernels without any.
    """

    features: int
    added: jax.Array = field(compare=False, repr=False)
    rows: int
    gain: float
    gain_trained: float
    lengthscale: float | None
    counted_at: float
    unexplained: float
    of_noise: float
    points_needed: int | None
    tolerance: float
    approximate: bool
    shorter: ShorterLengthscales | None

    @property
    def more(self) -> int:
        """Number of points that were added."""
        return len(self.added)

    @property
    def enough(self) -> bool:
        """Whether more points would gain no more than the tolerance."""
        follows = self.shorter is None or self.shorter.divisor == 1 or not self.shorter.too_few
        return follows and max(self.gain, self.gain_trained) <= self.tolerance * self.rows

    def __str__(self) -> str:
        about = ", by Gaussian pseudo-observations" if self.approximate else ""
        where = "" if self.lengthscale is None else f", at {self.lengthscale:.2g} of the lengthscales"
        lines = [
            f"{count(self.more, 'inducing point')} more than the {count(self.features, 'feature')} at hand raise the "
            f"bound on the log evidence of {count(self.rows, 'row')} by {nats(self.gain)}, and by "
            f"{nats(self.gain_trained)} where hyperparameters are trained anew{where}{about}.",
        ]
        if self.shorter is not None and self.shorter.divisor > 1:
            lines.append(self.shorter.found)
        lines.append(
            f"At {self.counted_at:.2g} of the lengthscales at hand the features leave {100 * self.unexplained:.2g}% of "
            f"the function's variance, which is {self.of_noise:.2g} of the noise's."
        )
        if self.enough:
            lines.append("They are enough.")
        else:
            needed = f"about {self.points_needed}" if self.points_needed else f"more than {MOST_POINTS}"
            lines.append(f"They are too few: to come within {self.tolerance:g} nats a row takes {needed}.")
        return "\n".join(lines)


class _Rows(NamedTuple):
    """Gaussian observations of f, each of which counts ``weight`` times; its precision is that of all."""

    X: Rows
    target: jax.Array
    precision: jax.Array
    weight: jax.Array


def enough_points(
    posterior: Posterior,
    X: RowsLike,
    y: ArrayLike,
    likelihood: Likelihood | Any,
    *,
    offset: ArrayLike = 0.0,
    mask: ArrayLike | str | None = None,
    tolerance: float = 0.01,
) -> EnoughPoints:
    """
    Compare the bound with the inducing features of a trained posterior and with twice as many. After every training::

        posterior = npgp.posterior("f", model, guide, result.params, X)
        print(npgp.collapsed.enough_points(posterior, X, y, npgp.Poisson(), offset=level))

    Where hyperparameters are sampled, take the posterior given one draw, ``npgp.posterior(..., draws=50)[0]``.

    The points added are rows, one by one that of which f is least known, by its noise. Both bounds are collapsed ones,
    ``tight``, with all features jointly Gaussian (docs/theory.md, section 5). They are compared at the hyperparameters
    at hand, and where the kernel's lengthscales and variances, and the variance of Gaussian noise, are trained anew for
    each. A likelihood that is not Gaussian is replaced by one Gaussian pseudo-observation for each row, from the
    expected slope and curvature of its logarithm under the posterior: then gains are approximate. Of more than 4000
    rows a random part stands for all. It takes as long as some 100 steps of training with twice the features. Not for
    use inside ``jit``.

    More points are always better (Burt, Rasmussen & van der Wilk 2020), so that what decides is whether the bound still
    rises (Pescador-Barrios, Filippi & van der Wilk 2024).

    .. code-block:: python

        found = npgp.collapsed.enough_points(
            posterior, X, y, npgp.Gaussian(scale=params["noise"])
        )
        assert found.enough or found.points_needed

    :param posterior: of one function.
    :param X: training inputs, (N, D), or functionals: points added are then some of those that these are made of.
    :param y: observations, (N,).
    :param likelihood: p(y_n | f_n), of one latent value, an ``npgp`` likelihood or a function from f to a NumPyro
        distribution.
    :param offset: what is added to f; a scalar or (N,).
    :param mask: True where an observation is present, (N,); the others may be NaN. Or ``"nan"``:
        those that are NaN are missing.
    :param tolerance: what more points may gain, in nats for each row, where those at hand count as enough.
    :raises TypeError: for traced arrays, for a posterior averaged over draws, and for a mask that is not boolean.
    :raises ValueError: for observations of another shape, outside the likelihood's support, or NaN without mask; for a
        posterior of several functions, a likelihood of several latent values, and a tolerance that is not positive.
    """
    if any(map(checks.is_traced, jax.tree.leaves((posterior, X, y, likelihood, offset, mask)))):
        raise TypeError("enough_points was called on traced values; it runs outside jit, on concrete ones.")
    if not isinstance(posterior, Posterior):
        raise TypeError(
            f"posterior is a {type(posterior).__name__}; it must be the posterior of one function by a SparseGP or "
            "CollapsedGP, given one draw of the hyperparameters, such as npgp.posterior(..., draws=50)[0]."
        )
    X, likelihood = as_rows(X), as_likelihood(likelihood)
    checks.require_positive(tolerance, "tolerance")
    if posterior.batch_shape or likelihood.num_latents != 1:
        raise ValueError(
            f"posterior has batch shape {posterior.batch_shape}, and {type(likelihood).__name__} "
            f"{likelihood.num_latents} latent values; they must be () and 1: one function, observed once a row."
        )
    observed = Observations.of(y, likelihood, X.shape[:1], mask=mask, offset=offset)
    target, precision = _gaussian_observations(observed, posterior, X)
    approximate, kernel = likelihood.proof != "gaussian", posterior.projector.kernel
    shorter = None
    if has_lengthscale(kernel, X):
        blocks = posterior.projector.blocks
        shorter = of_observations(kernel, blocks, X, target, precision, approximate=approximate)
    rows = _some_rows(X, target, precision)
    return _compare(posterior, rows, int(np.sum(precision > 0)), tolerance, approximate, shorter)


def _gaussian_observations(observed: Observations, posterior: Posterior, X: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Observations of f itself, and their precisions, 0 for rows without any; each (N,)."""
    mean, variance = posterior.mean_and_variance(X, batch_size=min(len(X), MOST_ROWS))
    slope, curvature = _expected(observed, mean, variance)
    precision = np.maximum(observed.where_present(curvature), 0.0)
    step = np.where(precision > 0, slope, 0.0) / np.where(precision > 0, precision, 1.0)
    return np.asarray(mean) + step, precision


@jax.jit
def _expected(observed: Observations, mean, variance) -> tuple[jax.Array, jax.Array]:
    """Expected slope and negative curvature of log p in f, each (N,)."""
    (y, mean, variance), likelihood = observed.filled(mean, variance), observed.likelihood
    slope = jax.grad(lambda m: jnp.sum(likelihood.expected_log_prob(y, m, variance)))(mean)
    return slope, jnp.broadcast_to(likelihood.expected_curvature(y, mean, variance), mean.shape)


def _some_rows(X: Rows, target: np.ndarray, precision: np.ndarray) -> _Rows:
    """Rows with an observation, or a random part of them."""
    rows = np.flatnonzero(precision > 0)
    weight = max(1.0, len(rows) / MOST_ROWS)
    if len(rows) > MOST_ROWS:
        rows = np.sort(np.random.default_rng(0).choice(rows, MOST_ROWS, replace=False))
    chosen = jax.tree.map(jnp.asarray, some(jax.device_get(apart(X)), rows))
    return _Rows(chosen, jnp.asarray(target[rows]), jnp.asarray(weight * precision[rows]), jnp.asarray(weight, X.dtype))


# ---------------------------------------------------------------------------------------------------------------
# The bound and its maximum

#: Logarithms of what hyperparameters are multiplied by: kernel parameters by path, and the noise variance.
_Logs: TypeAlias = dict[str, Any]


def _start(kernel: Kernel, approximate: bool) -> _Logs:
    leaves = jax.tree_util.tree_leaves_with_path(kernel)
    logs = {
        jax.tree_util.keystr(path): np.zeros(np.shape(leaf), jnp.result_type(leaf))
        for path, leaf in leaves
        if getattr(path[-1], "name", None) in TRAINED
    }
    return logs if approximate else logs | {NOISE: np.zeros((), jnp.result_type(float))}


def _changed(kernel: Kernel, logs: _Logs) -> Kernel:
    def one(path, leaf):
        log = logs.get(jax.tree_util.keystr(path))
        return leaf if log is None else leaf * jnp.exp(log)

    return jax.tree_util.tree_map_with_path(one, kernel)


def _precision(rows: _Rows, logs: _Logs) -> jax.Array:
    return rows.precision * jnp.exp(-logs.get(NOISE, 0.0))


def _bound(logs: _Logs, kernel: Kernel, blocks: tuple[InducingBlock, ...], rows: _Rows) -> jax.Array:
    """
    The ``tight`` collapsed bound with all features jointly Gaussian (docs/theory.md, section 5), of rows that count
    ``weight`` times.
    """
    projection = factorize(_changed(kernel, logs), blocks)(rows.X)
    stacked = Projection((jnp.concatenate(projection.A),), projection.prior_variance)
    noise = 1.0 / _precision(rows, logs)  # of a row with its weight
    none = RowResidual(jnp.zeros_like(noise))
    bound = collapsed_bound(stacked, none, rows.target, noise, ["dense"], Tight())
    # Of w equal rows: densities of noise w times as wide, in the place of one of all, and their residuals.
    normalizers = rows.weight * jnp.log(2.0 * math.pi * rows.weight * noise) - jnp.log(2.0 * math.pi * noise)
    return bound - 0.5 * jnp.sum(normalizers + rows.weight * jnp.log1p(_left(projection, rows, logs)))


def _left(projection: Projection, rows: _Rows, logs: _Logs) -> jax.Array:
    """What features leave of f's variance, in units of the noise's, (N,)."""
    return projection.residual_variance() * _precision(rows, logs) / rows.weight


@jax.jit
def _best(
    kernel: Kernel, blocks: tuple[InducingBlock, ...], rows: _Rows, logs: _Logs, divisor: float
) -> tuple[Kernel, jax.Array, jax.Array]:
    """The kernel at these hyperparameters, and the share of f's variance that features leave, and of the noise's."""
    best = shortened(_changed(kernel, logs), divisor)
    projection = factorize(best, blocks)(rows.X)
    unexplained = jnp.sum(projection.residual_variance()) / jnp.sum(projection.prior_variance)
    return best, unexplained, jnp.mean(_left(projection, rows, logs))


@jax.jit
def _left_by(kernel: Kernel, Z: jax.Array, rows: _Rows, logs: _Logs) -> jax.Array:
    """The same, averaged over rows, with the first i points alone, i = 0 to M; (M + 1,)."""
    projection = factorize(kernel, (Points(Z),))(rows.X)
    precision = _precision(rows, logs) / rows.weight
    explained = jnp.cumsum(linalg.matmul(jnp.square(projection.A[0]), precision[:, None])[:, 0])
    return (jnp.sum(precision * projection.prior_variance) - jnp.append(0.0, explained)) / len(rows.X)


@partial(jax.jit, static_argnums=0)
def _value_and_slopes(unravel: Callable, flat: jax.Array, *problem: Any) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(lambda flat: in_double_if(True, _bound, unravel(flat), *problem))(flat)


def _maximum(
    kernel: Kernel, blocks: tuple[InducingBlock, ...], rows: _Rows, start: _Logs
) -> tuple[float, float, _Logs]:
    """The bound at the hyperparameters at hand, its maximum, and where that is."""
    flat, unravel = ravel_pytree(start)
    dtype = flat.dtype

    def loss(x):
        value, slopes = _value_and_slopes(unravel, np.asarray(x, dtype), kernel, blocks, rows)
        return -float(value), -np.asarray(slopes, float)

    at_hand = -loss(np.zeros(flat.size))[0]
    if not flat.size:
        return at_hand, at_hand, start
    found = scipy.optimize.minimize(
        loss,
        np.zeros(flat.size),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-FAR, FAR)] * flat.size,
        options={"maxiter": STEPS},
    )
    return at_hand, -float(found.fun), unravel(jnp.asarray(found.x, dtype))


def _compare(
    posterior: Posterior,
    rows: _Rows,
    observations: int,
    tolerance: float,
    approximate: bool,
    shorter: ShorterLengthscales | None,
) -> EnoughPoints:
    kernel, blocks = posterior.projector.kernel, posterior.projector.blocks
    features = sum(block.size for block in blocks)
    candidates = points_of(rows.X, MOST_ROWS)
    most = len(np.unique(np.asarray(candidates), axis=0))
    informed = 1.0 if isinstance(rows.X, Functionals) else rows.precision
    added, _, _ = greedy_rows(kernel, candidates, min(features, most, MOST_POINTS), blocks, None, informed)
    added = jnp.asarray(np.asarray(added)[~np.any(np.isnan(added), axis=1)])
    start = _start(kernel, approximate)
    at_hand, trained, _ = _maximum(kernel, blocks, rows, start)
    at_hand_more, trained_more, logs = _maximum(kernel, (*blocks, Points(added)), rows, start)
    # What points are counted at: where neighbors see no much shorter lengthscales, one that comes of training with few
    # points is the points', not the data's.
    lengthscales = [np.ravel(log) for name, log in logs.items() if name.endswith("lengthscale")]
    log = float(np.mean(np.concatenate(lengthscales))) if lengthscales else 0.0
    divisor = 1.0 if shorter is None else shorter.divisor
    trusted = divisor == 1 and abs(log) <= math.log(2.0)
    logs = logs if trusted else start
    best, unexplained, of_noise = _best(kernel, blocks, rows, logs, divisor)
    found = EnoughPoints(
        features=features,
        added=added,
        rows=observations,
        gain=at_hand_more - at_hand,
        gain_trained=trained_more - trained,
        lengthscale=math.exp(log) if lengthscales else None,
        counted_at=(math.exp(log) if trusted else 1.0) / divisor,
        unexplained=float(unexplained),
        of_noise=float(of_noise),
        points_needed=None,
        tolerance=float(tolerance),
        approximate=approximate,
        shorter=shorter,
    )
    if found.enough:
        return found
    Z, _, _ = greedy_rows(best, candidates, min(most, MOST_POINTS), (), None, informed)
    within = np.flatnonzero(0.5 * np.log1p(np.asarray(_left_by(best, Z, rows, logs))) <= tolerance)
    return replace(found, points_needed=int(within[0]) if within.size else None)
