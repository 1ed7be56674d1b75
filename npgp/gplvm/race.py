"""
Training a GPLVM by one call: several starts race on the collapsed bound, and the best are climbed to the end, through
latent spaces of fewer and fewer dimensions.

The bound has many optima, several nats per row apart, and which of them is found depends on how curved the functions
are at first. From latents within a small part of a lengthscale, where they are all but linear and the model is
probabilistic PCA, they curve as far as the data ask, with little noise; from latents of many lengthscales they are
wiggly, and a large noise variance explains what does not fit. In between is the best. It depends too on how clusters
lie: where principal components lay them over one another, they have to pass. Distances along the data tell them apart.
What is best of all depends on the data: several starts climb for some steps each, and the bound chooses round by round.

Then the climb itself. From few dimensions it ends low: clusters cannot pass one another. With many they can, but the
dimensions that this took stay, at a price: each row pays for where it is in each, and functions of several take more
inducing inputs. So the least of the relevant dimensions is narrowed, and the climb goes on from there, as long as that
leads higher. Where it ends no start tells before: two are climbed to the end.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.special import ndtri

from npgp import checks, training
from npgp.checks import host_generator
from npgp.conditionals import Conditional
from npgp.gplvm.collapsed import CollapsedFit, CollapsedGPLVM
from npgp.gplvm.model import BayesianGPLVM
from npgp.gplvm.new_rows import infer_latents
from npgp.gplvm.relevance import CanonicalLatents, canonical_latents, relevance
from npgp.gplvm.start import FEW, MANY, Sheets, Start, begin, checked, pca_start
from npgp.kernels import RBF, Kernel
from npgp.likelihoods import Gaussian, Likelihood
from npgp.likelihoods.base import impossible, without_missing
from npgp.training import lbfgs
from npgp.variational.natural import natural_gradient
from npgp.variational.posterior import Posterior

#: Of so few rows all starts are climbed to the end.
FEW_ROWS = 300
#: Steps after which the better three quarters of the starts go on, for more rows than these, and then so many of them.
FIRST_ROUND, SECOND_ROUND, FINALISTS = 150, 500, 2
#: Steps before a dimension is narrowed for the first time, by what dimensions are narrowed, steps until it is seen what
#: that has gained, and how many times in a row it may have gained nothing.
BEFORE_NARROWING, NARROWING, NARROW_STEPS, PATIENCE = 1500, 0.5, 600, 2
#: Dimensions of less relevance are switched off, all but.
OFF = 0.02
#: Functions whose means vary over rows by less than this share of the data's standard deviation are constant.
CONSTANT = 1e-3
#: Columns whose standard deviations differ by more than this factor are worth a word: they share one noise variance.
UNLIKE = 10.0
#: Rates of natural gradients and of Adam when SVI goes on from the collapsed optimum.
NATURAL_RATE, ADAM_RATE = 0.1, 0.01


@dataclasses.dataclass(frozen=True)
class GPLVMFit:
    """
    A trained GPLVM; made by :func:`fit`. ``npgp.plots.plot_latents(trained, labels)`` is its picture.

    :param gplvm: the model.
    :param params: its parameters by site name, q(ε) among them: for ``gplvm`` and, as ``init_params``, for
        :func:`npgp.fit` to go on.
    :param posterior: of the D functions less ``gplvm.start.offset``, over latent space.
    :param bounds: the bound at each step that led to the end, in nats: the collapsed bound of the start that won, which
        falls where a dimension is narrowed, then what SVI added.
    :param race: of each start, the bound where it was given up or ended.
    :param converged: whether the last steps of the climb gained less than the tolerance.
    :param message: why it ended.
    """

    gplvm: BayesianGPLVM
    params: dict[str, jax.Array]
    posterior: Posterior
    bounds: np.ndarray
    race: np.ndarray
    converged: bool
    message: str

    @property
    def bound(self) -> float:
        """The bound on the log evidence of all rows, in nats; an estimate after SVI."""
        return float(self.bounds[-1])

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of y, (D, N)."""
        return self.gplvm.likelihood_at(self.params)

    @property
    def relevance(self) -> np.ndarray:
        """Relevance of each latent dimension, (Q,)."""
        return relevance(self.params)

    @cached_property
    def latents(self) -> CanonicalLatents:
        """q(x) for pictures, in lengthscales, the most relevant dimension first."""
        return canonical_latents(self.params)


def fit(
    rng_key: jax.Array,
    Y: ArrayLike,
    latent_dim: int,
    num_inducing: int,
    *,
    mask: ArrayLike | str | None = None,
    likelihood: Likelihood | Callable[[], Likelihood] | None = None,
    conditional: Conditional | str = "tight",
    kernel: Callable[..., Kernel] = RBF,
    offset: ArrayLike | None = None,
    starts: Sequence[tuple[float, ...]] | None = None,
    restarts: int = 0,
    max_steps: int = 3600,
    max_rows: int = 1000,
    svi_steps: int = 2000,
    batch_size: int | None = None,
    tolerance: float = 1e-4,
    progress: bool = True,
) -> GPLVMFit:
    """
    Train a Bayesian GPLVM: no start to choose, no rates.

    Starts race on the collapsed bound, by L-BFGS in float64, and the two best go on until they have converged, through
    latent spaces of fewer and fewer relevant dimensions as long as that leads higher. That is all for data with
    Gaussian noise, entries of which may be missing. Otherwise SVI goes on from there, with natural gradients for q(ε):

    ==============  ===============================================================================================
    many rows       The collapsed bound is climbed for ``max_rows`` of them, the others' latents are inferred.
    a likelihood    Collapsed, the data are the normal scores of each column. Where no dimension is relevant to these,
                    SVI begins at principal components.
    ==============  ===============================================================================================

    Without a likelihood one noise variance and one kernel variance are for all columns: standardize columns of unlike
    units (:class:`npgp.Standardizer`).

    .. code-block:: python

        Y = np.sin(np.linspace(0.0, 3.0, 12)[:, None] + np.arange(3.0))
        trained = npgp.gplvm.fit(
            key, Y, 2, 4, starts=[(0.4, 1.0)], max_steps=60, tolerance=10.0
        )
        figure = npgp.plots.plot_latents(trained)

    :param rng_key: a JAX random key, for restarts, choices of rows, and SVI.
    :param Y: data, (N, D).
    :param latent_dim: Q, at most min(N, D); dimensions that are of no use are switched off.
    :param num_inducing: M.
    :param mask: True where an entry of Y is present, (N, D). Or ``"nan"``: those that are NaN are missing.
    :param likelihood: as for :class:`BayesianGPLVM`; Gaussian noise of one variance if omitted.
    :param conditional: ``"tight"`` or ``"prior"``.
    :param kernel: as for :class:`CollapsedGPLVM`.
    :param offset: constant mean of the functions, (D,) or a number; if omitted the columns' means, and with a
        likelihood the constants that explain them best, on f's scale.
    :param starts: of each start two or three numbers. Two are for principal components: the standard deviation of the
        first in lengthscales, and the power of the components' standard deviations that the others are proportional to.
        Three are for two dimensions by distances along a graph of nearest neighbors
        (:func:`~npgp.gplvm.start.geodesic_coordinates`) and principal components in the others: the standard
        deviation of the first in lengthscales, the share of it that principal components have, and how many neighbors
        there are. If omitted one of the first kind and three of the second; for at most 300 rows, where all starts are
        climbed to the end, three and one.
    :param restarts: how many more starts there are like the first, with random inducing inputs. Nothing else is random
        where the data are complete, Gaussian, and no more rows than ``max_rows``.
    :param max_steps: most steps of L-BFGS from one start; after 1500 of them dimensions are narrowed.
    :param max_rows: most rows for which the collapsed bound is climbed.
    :param svi_steps: steps of SVI, where it is needed; 0 to leave the model where the collapsed bound led.
    :param batch_size: rows of its steps; all if omitted.
    :param tolerance: it has converged when 50 steps together gain less than this, in nats per row.
    :param progress: show progress bars.
    :raises TypeError: for what is no likelihood.
    :raises ValueError: for data, sizes and starts out of range, data that the likelihood does not take, missing
        entries without a mask, and data that are constant in each column.

    If the climb has not converged, or no dimension is relevant in the end, a ``RuntimeWarning`` says so; a
    ``UserWarning`` if columns have standard deviations that differ more than tenfold, with Gaussian noise.

    Source: Titsias & Lawrence 2010 (the collapsed bound); Tenenbaum, de Silva & Langford 2000 (distances along the
    data); Lalchand, Ravuri & Lawrence 2022 (SVI).
    """
    for name, value in (("max_steps", max_steps), ("max_rows", max_rows)):
        checks.whole_number(value, name)
    for name, value in (("svi_steps", svi_steps), ("restarts", restarts)):
        checks.whole_number(value, name, least=0)
    if starts is None:
        starts = FEW if len(np.asarray(Y)) <= FEW_ROWS else MANY
    layouts = checked(starts)
    start_key, row_key, svi_key = jax.random.split(rng_key, 3)
    Y, mask = checks.observed(Y, np.shape(Y), mask, name="Y")
    data = np.asarray(Y, float)
    present = np.ones(data.shape, bool) if mask is None else np.asarray(mask)
    first = pca_start(start_key, Y, latent_dim, num_inducing, mask=mask, offset=offset)
    gplvm = BayesianGPLVM(first, conditional=conditional, kernel=kernel, likelihood=likelihood)
    if offset is None and likelihood is not None:
        first = dataclasses.replace(first, offset=_likeliest(gplvm.likelihood_at(), data, present))
    _check_spread(data, present, named=likelihood is None)
    collapsed = np.where(present, data, first.offset)
    if likelihood is not None:
        collapsed = _normal_scores(collapsed, present) + first.offset
    rows = _some(row_key, len(data), max_rows)
    some = collapsed[rows], present[rows]
    sheets = Sheets(first.latents[rows], *some)
    begun = [begin(first, *some, layout, sheets) for layout in layouts]
    begun += [begin(first, *some, layouts[0], sheets, key) for key in jax.random.split(start_key, restarts)]
    models = [CollapsedGPLVM(start, conditional=conditional, kernel=kernel) for start in begun]
    best, climbed, race = _race(models, *some, max_steps, tolerance, progress)
    params = best.svi_params(climbed.params, some[0], mask=some[1])
    posterior = best.posterior(climbed.params, some[0], mask=some[1])
    empty = _is_empty(posterior, params, some[0][some[1]])
    start, params, bounds, message = best.start, dict(params), climbed.bounds, climbed.message
    if len(rows) < len(data) or likelihood is not None:
        if empty and likelihood is not None and svi_steps:
            message = f"no dimension is relevant to normal scores ({message}): SVI began at principal components"
            start, params, bounds = first, {}, bounds[:0]
        elif len(rows) < len(data):
            start, params = _all_rows(start, params, posterior, collapsed, present, rows)
            bounds = bounds * (len(data) / len(rows))
        if likelihood is not None:
            params.pop("noise_variance", None)
        gplvm = dataclasses.replace(gplvm, start=start)
        params, posterior, losses = _by_svi(svi_key, gplvm, params, data, present, svi_steps, batch_size, progress)
        bounds = np.concatenate([bounds, -losses])
        empty = _is_empty(posterior, params, some[0][some[1]])
    gplvm = dataclasses.replace(gplvm, start=start)
    if empty:
        message = f"{message}; no latent dimension is relevant"
        warnings.warn(
            "npgp.gplvm.fit found no relevant latent dimension: the functions are constant, as if the data were noise "
            "alone. More rows or columns, or a likelihood that is theirs, may change that.",
            RuntimeWarning,
            stacklevel=2,
        )
    return GPLVMFit(gplvm, params, posterior, bounds, race, climbed.converged, message)


def _check_spread(Y: np.ndarray, present: np.ndarray, named: bool) -> None:
    """
    Raise ``ValueError`` for data without any variance, and say which columns are of unlike units.

    :param named: whether to say so.
    """
    deviation = np.array([np.std(column[there]) for column, there in zip(Y.T, present.T, strict=True)])
    size = np.array([np.max(np.abs(column[there])) for column, there in zip(Y.T, present.T, strict=True)])
    varies = deviation > 1e-10 * size
    if not varies.any():
        raise ValueError("Y is constant in each column; a GPLVM is of data that vary over rows.")
    least, most = np.min(deviation[varies]), np.max(deviation)
    if named and most > UNLIKE * least:
        large = np.flatnonzero(deviation * UNLIKE > most)
        small = np.flatnonzero(varies & (deviation * UNLIKE <= most))
        warnings.warn(
            f"Y has standard deviations up to {most:.3g} in columns {large.tolist()}, but {least:.3g} and more in "
            f"columns {small.tolist()}, of which a model with one noise variance takes little notice. If their units "
            "are not the same, standardize them: npgp.Standardizer.of(Y).",
            UserWarning,
            stacklevel=3,
        )


def _is_empty(posterior: Posterior, params: dict[str, jax.Array], Y: np.ndarray) -> bool:
    """Whether the functions are the same at all rows' latents, in comparison with the data's standard deviation."""
    means = np.asarray(posterior.mean(jnp.asarray(params["x.loc"], posterior.projector.cholesky[0].dtype)))
    return bool(np.max(np.std(means, axis=-1)) <= CONSTANT * np.std(Y))


class _Climb:
    """
    The way up from one start.

    :param climb: from a number of steps and parameters to a fit.
    :param params: of the start.
    :param max_steps: most steps.
    """

    def __init__(self, climb: Callable[[int, dict[str, jax.Array]], CollapsedFit], params, max_steps: int):
        self.climb, self.max_steps = climb, max_steps
        self.found = CollapsedFit(params, np.array([-np.inf]), False, "")

    @property
    def bound(self) -> float:
        return float(self.found.bounds[-1])

    @property
    def interrupted(self) -> bool:
        return self.found.message == lbfgs.INTERRUPTED

    def go_on(self, until: int) -> None:
        """Until it has so many steps in all, unless it has ended."""
        steps = min(until, self.max_steps) - self.found.steps
        if steps > 0 and not self.found.converged and not self.interrupted:
            self.found = _joined(self.found, self.climb(steps, self.found.params))

    def finish(self) -> None:
        """To the end, dimensions being narrowed on the way."""
        self.go_on(BEFORE_NARROWING)
        at, in_vain = self.found, 0
        while in_vain < PATIENCE and at.steps + NARROW_STEPS <= self.max_steps and not self.interrupted:
            narrower = _narrower(at.params)
            if narrower is None:
                break
            at = _joined(at, self.climb(NARROW_STEPS, narrower))
            in_vain = 0 if at.bounds[-1] > self.bound else in_vain + 1
            if not in_vain:
                self.found = at
            elif at.message == lbfgs.INTERRUPTED:
                self.found = self.found._replace(message=at.message)
        self.go_on(self.max_steps)


def _narrower(params: dict[str, jax.Array]) -> dict[str, jax.Array] | None:
    """With the least of the relevant dimensions, and all below, narrower in lengthscales; none if there is but one."""
    of = relevance(params)
    relevant = of[of > OFF]
    if len(relevant) < 2:
        return None
    ell = params["lengthscale"]
    return params | {"lengthscale": jnp.where(of <= np.min(relevant), ell / NARROWING, ell)}


def _joined(one: CollapsedFit, other: CollapsedFit) -> CollapsedFit:
    """A climb and what came after it."""
    return other._replace(bounds=np.concatenate([one.bounds[:-1], other.bounds]))


def _race(models, Y, present, max_steps, tolerance, progress) -> tuple[CollapsedGPLVM, CollapsedFit, np.ndarray]:
    """The model whose start led highest, its fit, and of each start the bound where it was given up or ended."""

    def climb(steps: int, params: dict[str, jax.Array]) -> CollapsedFit:
        # By one model, whose program is one for all starts.
        return models[0].fit(Y, steps, mask=present, params=params, tolerance=tolerance, progress=progress)

    climbs = [_Climb(climb, model.init_params(), max_steps) for model in models]
    running = list(climbs)

    def interrupted() -> bool:
        return any(one.interrupted for one in climbs)

    def all_of(act: Callable[..., None], *args: int) -> None:
        """Those that are running, unless there was an interrupt; the best of them is the first then."""
        for one in running:
            if not interrupted():
                act(one, *args)
        running.sort(key=lambda one: -one.bound)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CollapsedGPLVM.fit has not converged", RuntimeWarning)
        rounds = [(FIRST_ROUND, math.ceil(0.75 * len(models))), (SECOND_ROUND, FINALISTS)]
        for steps, left in rounds if len(Y) > FEW_ROWS else [(max_steps, FINALISTS)]:
            if len(running) > FINALISTS:
                all_of(_Climb.go_on, steps)
                del running[max(left, FINALISTS) :]
        all_of(_Climb.finish)
    best = running[0]
    found = best.found._replace(message=lbfgs.INTERRUPTED) if interrupted() else best.found
    if not found.converged:
        warnings.warn(
            f"npgp.gplvm.fit has not converged after {found.steps} steps ({found.message}): the last 50 "
            f"raised the bound by {(found.bounds[-1] - found.bounds[-51:][0]) / len(Y):.2g} nats per row. A larger "
            "max_steps goes further.",
            RuntimeWarning,
            stacklevel=3,
        )
    return models[climbs.index(best)], found, np.array([one.bound for one in climbs])


def _normal_scores(Y: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Columns with a normal distribution in the same order, where they are present; equal values stay equal."""
    scores = np.zeros(Y.shape)
    for d, (column, there) in enumerate(zip(Y.T, present.T, strict=True)):
        _, place, count = np.unique(column[there], return_inverse=True, return_counts=True)
        middle = (np.cumsum(count) - 0.5 * count) / max(np.sum(there), 1)
        scores[there, d] = ndtri(middle)[place]
    return scores


def _likeliest(likelihood: Likelihood, Y: np.ndarray, present: np.ndarray) -> np.ndarray:
    """
    For each column the f, the same in all rows, at which it is most probable, (D,). Under N(0, 100²), without which it
    would be infinite where a column is all zeros.
    """

    def loss(f, y, present):
        terms = likelihood.log_prob(jnp.broadcast_to(f[:, None], y.shape), y)
        return 0.5 * jnp.sum(jnp.square(f / 100.0)) - jnp.sum(jnp.where(present, terms, 0.0))

    with jax.enable_x64(True):
        (y,) = without_missing(likelihood, jnp.asarray(present.T), jnp.asarray(Y.T))
        wrong, words = impossible(likelihood, y)
        if np.any(wrong):
            n, d = np.argwhere(np.asarray(wrong).T)[0]
            raise ValueError(f"Y has the value {Y[n, d]:.6g} in row {n}, column {d}; {words}.")
        found = lbfgs.minimize(loss, jnp.zeros(len(y)), y, jnp.asarray(present.T), max_steps=200, progress=False)
        return np.asarray(found.params)


def _some(rng_key: jax.Array, count: int, most: int) -> np.ndarray:
    if count <= most:
        return np.arange(count)
    return np.sort(host_generator(rng_key).choice(count, most, replace=False))


def _all_rows(start: Start, params, posterior: Posterior, Y: np.ndarray, present: np.ndarray, rows: np.ndarray):
    """Start and parameters with q(x) of all rows, where those of some are known."""
    others = np.setdiff1d(np.arange(len(Y)), rows)
    noise = Gaussian(variance=params["noise_variance"])
    found = infer_latents(
        posterior,
        noise,
        Y[others],
        mask=present[others],
        offset=start.offset,
        candidates=params["x.loc"],
        num_starts=4,
        num_modes=1,
        full=False,
    )
    whole = dict(params)
    for name, values in (("x.loc", found.loc), ("x.scale", found.scale)):
        table = np.empty((len(Y), values.shape[1]))
        table[rows], table[others] = params[name], values
        whole[name] = jnp.asarray(table)
    return dataclasses.replace(start, latents=np.asarray(whole["x.loc"])), whole


def _by_svi(rng_key, gplvm, params, Y, present, steps, batch_size, progress):
    """SVI from parameters on, in float64: parameters, the functions' posterior, and losses."""
    losses = np.empty(0)
    with jax.enable_x64(True):
        params = {name: jnp.asarray(value, float) for name, value in params.items()}
        if steps:
            optimizer = natural_gradient(NATURAL_RATE, training.adam(ADAM_RATE, steps))
            svi = SVI(gplvm.model, gplvm.guide, optimizer, TraceMeanField_ELBO())
            how: dict[str, Any] = {} if present.all() else {"mask": present}
            if batch_size is not None and batch_size < len(Y):
                how["batch_size"] = batch_size
            result = training.fit(svi, rng_key, steps, Y, indices="rows", init_params=params, progress=progress, **how)
            params, losses = result.params, np.asarray(result.losses)
        posterior = gplvm.posterior(params)
    shorter = lambda x: jnp.asarray(np.asarray(x)) if isinstance(x, jax.Array) else x  # noqa: E731
    return jax.tree.map(shorter, params), jax.tree.map(shorter, posterior), losses
