"""``observe`` and ``tighten``: what is observed of GP values, and what groups of neighbors add to its bound."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import constraints

from npgp import checks
from npgp.conditionals import Conditional, Gain, Grouped, as_conditional
from npgp.conditionals.base import Observations, require_possible
from npgp.context import context, under
from npgp.contract import KeepsIntermediates, Stackable, given_by, mask_of, per_stacked
from npgp.kernels import Kernel
from npgp.likelihoods import Gaussian, Likelihood, as_likelihood, quadrature
from npgp.model.draw import Moments
from npgp.model.function import Function
from npgp.model.latent import Latent, Latents, Term, as_latent, as_latents
from npgp.model.sites import INFO, Catch, SiteInfo, check_loss, check_plates, conditional_parameter
from npgp.neighbors.vecchia import conditional_weights, what_is_left
from npgp.sparse.projection import Projection
from npgp.sparse.residuals import Residual


class LatentObservation(KeepsIntermediates, Stackable):
    """
    Observations of Gaussian latent values, which are integrated out row by row.

    With q at hand ``log_prob(y)`` is each row's share of the ELBO, else ``log ∫ p(y_n | f_n) N(f_n; μ_n, v_n) df_n``.
    Made by :func:`observe`. The latent values that a draw is made from are what ``sample_with_intermediates`` returns
    beside it, of its shape; those of one observation are along a trailing axis, if they are several.

    .. code-block:: python

        trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(X, y)
        observation = trace["y"]["fn"]
        observation.log_prob(y)  # of each row given ε, f integrated out, (30,)

    :param likelihood: of the observations given the latent values.
    :param moments: of the latent values, row by row.
    :param conditional: what q does to the residual; ``None`` without q.
    :param parameter: of the conditional, if it has one.
    :param mask: which observations are present.
    :param residual: the residual, where it is more than its variance row by row.
    :param simulate: draws the latent values, from a random key and a sample shape; drawn row by row from the moments if
        omitted, and of a copy that JAX makes of the distribution.
    """

    support = constraints.real
    counted = "moments.mean"
    pytree_data_fields = ("likelihood", "moments", "conditional", "parameter", "mask_", "residual")
    #: Draws the latent values; ``None`` where they would be drawn row by row from the moments.
    simulate: Callable[[jax.Array, tuple[int, ...]], jax.Array] | None = None

    def __init__(
        self,
        likelihood: Likelihood,
        moments: Moments,
        conditional: Conditional | None,
        parameter: ArrayLike | None = None,
        mask: jax.Array | None = None,
        residual: Residual | None = None,
        simulate: Callable[[jax.Array, tuple[int, ...]], jax.Array] | None = None,
    ):
        self.likelihood, self.moments, self.conditional = likelihood, moments, conditional
        self.parameter, self.mask_, self.residual, self.simulate = parameter, mask, residual, simulate
        shape = moments.mean.shape
        super().__init__(shape if likelihood.num_latents == 1 else shape[1:], (), validate_args=False)
        self.count_axes()

    @property
    def certified(self) -> bool:
        """True if the ELBO is known to lie below the log evidence, as it is without a guide."""
        return self.conditional is None or self.conditional.is_bound(self.likelihood)

    def mask(self, mask):
        """Mask rows, as ``Distribution.mask`` does; masked rows do not inform others of their group."""
        if isinstance(mask, bool):
            return super().mask(mask)
        if not checks.broadcasts(jnp.shape(mask), self.batch_shape):
            raise ValueError(f"handlers.mask has shape {jnp.shape(mask)} for observations of shape {self.batch_shape}.")
        masked = copy.copy(self)
        present = jnp.broadcast_to(mask, self.batch_shape)
        masked.mask_ = present if self.mask_ is None else present & self.mask_
        return masked

    @per_stacked
    def log_prob(self, value, intermediates=None):
        mean, variance, prior_residual = self.moments
        rows = self.observations(value)
        if self.conditional is None:
            return rows.log_marginal(mean, variance + prior_residual)
        residual = prior_residual if self.residual is None else self.residual
        return rows.elbo(self.conditional, mean, variance, residual, self.parameter)

    def observations(self, value: ArrayLike) -> Observations:
        """A value of the site as observations of the latent values."""
        return Observations(jnp.asarray(value), self.likelihood, present=self.mask_)

    def why_not_finite(self, value) -> str | None:
        """A sentence about the f nearest to its mean where a log-density or its slope is no number, if there is any."""
        mean, variance, residual = (jnp.asarray(array) for array in self.moments)
        C, sd = self.likelihood.num_latents, jnp.sqrt(jnp.maximum(variance + residual, 0.0))
        y, *_ = self.observations(value).filled(mean, variance)
        present = True if self.mask_ is None else np.asarray(self.mask_)
        if not np.all(np.isfinite(np.where(present, mean + sd, 0.0))):
            return (
                "f itself is NaN or infinite there: a term beside it, such as the logarithm of an exposure of 0, or a "
                "hyperparameter is not finite."
            )
        reach = np.arcsinh(quadrature.MOST_REACH[mean.dtype.name])
        each = np.sinh(np.linspace(-reach, reach, {1: 97, 2: 17}.get(C, 7)))
        steps = sorted(itertools.product(each, repeat=C), key=np.linalg.norm) if C < 4 else []
        for step in steps:
            z = jnp.asarray(step, mean.dtype).reshape((C,) + (1,) * len(self.batch_shape))
            f = mean + sd * (z[0] if C == 1 else z)
            log_p, slope = jax.jvp(lambda f: self.likelihood.log_prob(f, y), (f,), (jnp.ones_like(f),))
            wrong = present & np.asarray(
                jnp.broadcast_to(~(jnp.isfinite(log_p) & jnp.isfinite(slope)), self.batch_shape)
            )
            if not np.any(wrong):
                continue
            row = np.unravel_index(np.argmax(wrong), wrong.shape)
            point = np.broadcast_to(f, (C, *wrong.shape)).reshape(C, -1)[:, np.argmax(wrong)]
            at, away = ", ".join(f"{x:.4g}" for x in point), float(jnp.max(jnp.abs(z)))
            log_p, y_there = (float(jnp.broadcast_to(array, wrong.shape)[row]) for array in (log_p, y))
            what = f"log p(y | f) is {log_p}" if not np.isfinite(log_p) else "the slope of log p(y | f) is no number"
            return (
                f"{what} for {self.likelihood.described} at f = {at}, {away:.2g} standard deviations from its mean, "
                f"with y = {y_there:.4g}. If y is impossible there, no Gaussian q has a finite E log p, and it must be "
                "a likelihood whose support does not depend on f; if log p overflows, so does its expectation: "
                "look at y, give f a smaller prior variance, or compute in float64; if p underflows, write it by "
                "logits and logarithms"
                f"{self.likelihood.instead}."
            )
        return None

    def _latents(self, key: jax.Array, sample_shape: tuple[int, ...]) -> jax.Array:
        """Latent values, those of one observation along a leading axis if they are several."""
        if self.simulate is not None:
            return self.simulate(key, sample_shape)
        mean, variance, residual = self.moments
        latents = mean.shape[: mean.ndim - len(self.batch_shape)]
        z = jax.random.normal(key, (*latents, *sample_shape, *self.batch_shape), mean.dtype)
        mean, total = (
            value.reshape(*latents, *(1,) * len(sample_shape), *self.batch_shape)
            for value in (mean, variance + residual)
        )
        return mean + jnp.sqrt(total) * z

    def sample_with_intermediates(self, key, sample_shape=()):
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        latent_key, key = jax.random.split(key)
        latents = self._latents(latent_key, sample_shape)
        y = self.likelihood.sample(key, latents)
        return y, [latents if self.likelihood.num_latents == 1 else jnp.moveaxis(latents, 0, -1)]

    def sample(self, key, sample_shape=()):
        return self.sample_with_intermediates(key, sample_shape)[0]


class _NoDensity(dist.Unit):
    """Stands for an observation where nobody looks at its density: nothing of it is checked, nor computed."""

    #: Of ``handlers.mask``, for who wants to know which rows tell something.
    masks: tuple[Any, ...] = ()

    def mask(self, mask):
        masked = copy.copy(self)
        masked.masks = (*self.masks, mask)
        return masked


class joint:
    """
    A model under which :func:`observe` simulates y jointly over rows: f is one draw from the process, where without
    it each row has a residual of its own::

        # Draws of whole functions.
        Predictive(npgp.joint(model), mcmc.get_samples())(rng_key, X_new)["y.latent"]

    .. code-block:: python

        # From the prior.
        draws = Predictive(npgp.joint(model), num_samples=3, params=params)(key, X)["y.latent"]

    It costs O(N³) for N rows, and matters where rows are closer to each other than to the inducing points.
    """

    def __init__(self, model: Callable):
        functools.update_wrapper(self, model)
        self._model = model

    def __call__(self, *args, **kwargs):
        with under(joint=True):
            return self._model(*args, **kwargs)


def observe(
    name: str,
    latent: Latent | Sequence[Latent],
    likelihood: Likelihood | Any,
    obs: ArrayLike | None = None,
    *,
    conditional: Conditional | str = "tight",
    mask: ArrayLike | str | None = None,
    joint: bool = False,
    neighbors: Sequence[Any] | None = None,
) -> jax.Array:
    """
    Observe GP values through a likelihood, with f integrated out row by row. Use it inside the plate over rows.

    =================================  ===========================================================================
    SVI                                each row's expected log likelihood under q, with the conditional's term; no
                                       Monte Carlo noise for Gaussian and other closed forms
    NUTS, or a model without guide     ``log ∫ p(y_n|f_n) N(f_n; A_nᵀε, d_n) df_n``, the FITC-type density
    ``Predictive`` with a posterior    y from q(f) at the rows given; jointly in f on request
    =================================  ===========================================================================

    Where y is simulated, the values of f that made it are the deterministic site ``name.latent``.

    .. code-block:: python

        def observed(X, y=None, mask=None):
            f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
            with numpyro.plate("data", len(X)):
                # y may be NaN where not mask.
                npgp.observe("y", f(X) + 2.0, npgp.Gaussian(scale=0.1), obs=y, mask=mask)

    :param name: name of the site.
    :param latent: GP values at rows: ``f(X)``, or a sum of these and offsets; for several functions also
        ``W @ f(X)``. For a likelihood of several latent values, a tuple such as ``(f(X), g(X))`` of independent draws,
        or the values (C, N) of C functions drawn in a plate at dim −2.
    :param likelihood: an ``npgp`` likelihood, or a function from f (or f and g, or f, g and h) to a NumPyro
        distribution.
    :param obs: observations of the latent's shape, (N,) or (outputs, N).
    :param conditional: what q does to the residual: an object of :mod:`npgp.conditionals`, such as
        ``npgp.conditionals.Grouped(groups)``, or a word for one that needs no arguments, such as ``"tight"``.
    :param mask: True where an observation is present, of the same shape; the others may be NaN. Or ``"nan"``:
        observations that are NaN are missing.
    :param joint: when y is simulated, draw f jointly over rows at O(N³), not row by row; see :class:`joint`.
    :param neighbors: for Gaussian noise, observations that rows depend on beside the inducing values, so that what
        these leave out is not lost (VIF, Gyger, Furrer & Sigrist 2025): the values at k neighbors of each row, row by
        row, and what was observed of them, (N, k), NaN for a row with fewer; where noise differs between rows, also
        the neighbors' likelihood. It is a model of its own, whose evidence the ELBO bounds, and the GP's may be less::

            near = npgp.neighbors.nearest_before(X, 15)  # once, before the model
            y_near = np.where(near.mask, y[near.rows], np.nan)
            # in the model; new rows have npgp.neighbors.nearest(X_new, X, 15)
            npgp.observe(
                "y", f(X) + b * t, noise, obs=y, neighbors=(f(X_near) + b * t_near, y_near)
            )

    :raises TypeError: if ``latent`` is not GP values, for observations that are no real numbers, and for another mask.
    :raises ValueError: for observations of another shape, or outside the likelihood's support, or NaN without mask, or
        a NumPy masked array; for a plate of another size; for parameters of the likelihood that are not of the values'
        shape; and under a loss that is no expectation of log densities, such as ``RenyiELBO``.
    """
    likelihood = as_likelihood(likelihood, len(latent) if isinstance(latent, (tuple, list)) else 1)
    latents = as_latents(latent, likelihood)
    conditional = as_conditional(conditional)
    given = given_by(handlers.condition, name)
    obs = obs if given is None else given
    if neighbors is not None:
        if conditional.partition(latents.shape[-1]) is not None:
            raise ValueError(
                f"{name}: {conditional!r} takes rows together, and neighbors do so: leave out one of the two."
            )
        latents, likelihood = beside_neighbors(name, latents, likelihood, neighbors, obs is not None)
    check_plates(name, latents.shape, repeated=obs is None)
    if obs is not None:
        obs, mask = _checked(name, obs, mask, latents, likelihood)
    # New rows, where y is simulated, are in no group: what they have in common with others is left to ``joint``.
    groups = None if obs is None else conditional.partition(latents.shape[-1])
    if groups is not None:
        latents.check_grouped(conditional)
    if conditional.supposes_own_residuals(likelihood):
        latents.check_unshared()
    parameter = conditional_parameter(name, conditional) if latents.variational else None
    if latents.guided and obs is not None:
        return obs  # a guide has no observed sites, and need not compute anything here
    latents.check_drawn()
    infer = {INFO: SiteInfo(latents=latents, likelihood=likelihood, mask=mask, conditional=conditional)}
    if obs is not None and context().unseen:
        return numpyro.sample(name, _NoDensity(jnp.zeros(latents.shape)), obs=obs, infer=infer)
    if latents.variational:
        check_loss(name, "its expected log likelihood under q")
    _check_shape(name, likelihood, latents, obs)
    jointly = joint or context().joint
    distribution = LatentObservation(
        likelihood,
        latents.moments(),
        conditional if latents.variational else None,
        parameter,
        None if mask is None or isinstance(mask, str) else jnp.asarray(mask),
        latents.group_residual(groups) if groups is not None and latents.variational else None,
        lambda key, shape: latents.simulate(key, jointly, shape),
    )
    with (catch := Catch("sample")):
        value = numpyro.sample(name, distribution, obs=obs, infer=infer)
    if obs is None and catch.message["is_observed"]:
        _checked(name, value, None if isinstance(mask, str) else mask, latents, likelihood)
        if conditional.partition(latents.shape[-1]) is not None:
            raise ValueError(f"{name}: {conditional!r} must know of observations: pass obs=y, or condition by data=…")
    if groups is not None and isinstance(catch.message["fn"], dist.MaskedDistribution):
        if mask_of(catch.message["fn"]) is not False:
            raise ValueError(f"{name}: {conditional!r} does not see this handlers.mask: pass mask= to npgp.observe.")
    scale = catch.message["scale"]
    scaled = scale is not None and not checks.is_traced(scale) and bool(np.any(np.asarray(scale) != 1.0))
    if conditional.needs_all_rows and scaled:
        raise ValueError(f"{name}: {conditional!r} needs all rows at once, but its plate has a subsample of them.")
    drawn = catch.message["intermediates"]
    if drawn and not latents.guided:
        numpyro.deterministic(f"{name}.latent", drawn[0] if latents.num_latents == 1 else jnp.moveaxis(drawn[0], -1, 0))
    return value


def tighten(
    name: str,
    latent: Latent | Sequence[Latent],
    likelihood: Likelihood | Any,
    obs: ArrayLike,
    conditional: Grouped,
    *,
    mask: ArrayLike | str | None = None,
) -> None:
    """
    What :class:`~npgp.conditionals.Grouped` gains over :class:`~npgp.conditionals.Tight`, estimated from a few groups
    of neighboring rows, beside an :func:`observe` with ``"tight"`` of other rows of the same data. Use it inside a
    plate of its own.

    In minibatches the sum is an unbiased estimate of the bound of ``Grouped``. A batch of whole groups is one too, but
    a noisier one: neighbors have errors in common, of which the gain knows little, and with Gaussian noise nothing. A
    quarter or an eighth as many rows in groups as rows by themselves suffice (docs/howto/large-data.md has the
    batches). Where there is no q, as under NUTS or ``Predictive``, it says nothing, and makes no site.

    .. code-block:: python

        # Of 30 rows in all; the second pair has groups of 5.
        def by_rows(X, y, X_groups, y_groups):
            f, likelihood = (
                npgp.SparseGP("f", npgp.RBF(1.0), Z).draw(),
                npgp.Gaussian(scale=0.1),
            )
            with npgp.plate("rows", 30, rows=len(X)):
                npgp.observe("y", f(X), likelihood, obs=y)
            with npgp.plate("groups", 30, rows=len(X_groups)):
                npgp.tighten(
                    "gain", f(X_groups), likelihood, y_groups, npgp.conditionals.Grouped(5)
                )

    :param name: name of the site.
    :param latent: GP values at the rows of the groups, as for :func:`observe`.
    :param likelihood: that of :func:`observe`.
    :param obs: observations of these rows, (N,) or (outputs, N).
    :param conditional: which rows are a group.
    :param mask: True where there is an observation, not an empty place of a group, as for :func:`observe`.
    :raises TypeError: for a conditional without groups, and as :func:`observe` does.
    :raises ValueError: as :func:`observe` does.
    """
    if not isinstance(conditional, Grouped):
        raise TypeError(
            f"conditional is {conditional!r:.80}; {name} takes groups alone, such as npgp.conditionals.Grouped(16)."
        )
    likelihood = as_likelihood(likelihood, len(latent) if isinstance(latent, (tuple, list)) else 1)
    if as_latents(latent, likelihood).variational:
        observe(name, latent, likelihood, obs, conditional=Gain(conditional.groups), mask=mask)


def _check_shape(name: str, likelihood: Likelihood, latents: Latents, obs: jax.Array | None) -> None:
    """Raise ``ValueError`` if a likelihood's parameters are not of the GP values' shape; nothing is computed."""
    shape, C = latents.shape, likelihood.num_latents
    f = jax.ShapeDtypeStruct(shape if C == 1 else (C, *shape), jnp.result_type(float))
    try:
        if obs is None:
            made = jax.eval_shape(likelihood.sample, jax.random.key(0), f).shape
        else:
            made = jax.eval_shape(likelihood.log_prob, f, obs).shape
    except (TypeError, ValueError) as error:
        made, cause = None, error
    if made == shape:
        return
    arrays = {n: np.shape(v) for n, v in vars(likelihood).items() if hasattr(v, "shape") and np.ndim(v)}
    wrong = {n: s for n, s in arrays.items() if not checks.broadcasts(s, shape)}
    if made is None and not wrong:
        raise cause
    found = ", ".join(f"{n} of shape {s}" for n, s in wrong.items()) or f"terms of shape {made}"
    raise ValueError(
        f"{name}: {type(likelihood).__name__} has {found}, but the GP values have shape {shape}: give what differs "
        f"between rows the shape {shape[-1:]}, and what differs between outputs (outputs, 1)."
    )


def _checked(name, obs, mask, latents: Latents, likelihood: Likelihood) -> tuple[jax.Array, Any]:
    """Observations, with whatever they have where they are missing, and the mask."""
    named = f"{name}: obs"
    obs, mask = checks.observed(obs, latents.shape, mask, name=named, mask_name=f"{name}: mask")
    require_possible(likelihood, obs, mask)
    return checks.to_device(obs, named, axis=-1), mask


# ---------------------------------------------------------------------------------------------------------------
# Observations beside their neighbors' observations, in ``npgp.observe(..., neighbors=(values, y))``: VIF (Gyger, Furrer
# & Sigrist 2025) for minibatches and inside any model.
# Given the whitened inducing values ε, a row's Gaussian observation is regressed on its neighbors'
# (npgp/collapsed/approximations.py has the formulas), so that its density is that of a row ``ã_n = a_n − Σ_j w_nj a_j``
# with offset ``Σ_j w_nj (y_j − offset_j)`` and noise variance F_n, and no residual. That is what ``beside_neighbors``
# makes of the statement's values and likelihood; guides, conditionals and plates see nothing else.

WHAT = "neighbors=(values of the neighbors, their observations of shape (N, k))"


class FunctionBesideNeighbors(Function):
    """
    A function at rows whose neighbors' observations are known: their projections are transformed.

    :param source: the function.
    :param projection: ã_n of each block, with what inducing values and neighbors leave of the variance.
    """

    def __init__(self, source: Function, projection: Projection):
        vars(self).update(vars(source))
        self._source, self._projection = source, projection

    def project(self, X: Any) -> Projection:
        """That of the rows."""
        return self._projection

    def _residual_covariance(self, X: Any, projection: Projection, blocks: Sequence[bool]) -> jax.Array:
        return jnp.diag(projection.residual_variance(blocks))


def beside_neighbors(
    name: str, latents: Latents, likelihood: Likelihood, neighbors: Any, observed: bool
) -> tuple[Latents, Likelihood]:
    """
    The values and the likelihood of observations given their neighbors'.

    :param name: the statement.
    :param latents: GP values at rows, (N,).
    :param likelihood: Gaussian noise.
    :param neighbors: values of the neighbors of each row, (N k,), row by row; their observations (N, k), NaN where
        there are fewer; and perhaps a likelihood of theirs, else the rows' own of one noise variance.
    :param observed: whether observations are known. If not, what is left of f's variance stays a residual, for draws.
    :raises TypeError: for neighbors that are no such pair.
    :raises ValueError: for another likelihood, values of other functions, in plates or sampled before, other shapes.
    """
    if latents.num_latents > 1:
        raise ValueError(f"{name}: neighbors are for Gaussian noise, and the likelihood is {likelihood.described}.")
    latent = latents.parts[0]
    values, y, noise, noise_near = _checked_neighbors(name, latent, likelihood, neighbors)
    (N,), k = latent.shape, y.shape[1]
    mask = ~jnp.isnan(y)
    here, there, kernels = [], [], []
    for own, near in zip(latent.terms, values.terms, strict=True):
        here.append(_points(own, N))
        there.append(jax.tree.map(lambda x: x.reshape(N, k, x.shape[-1]), _points(near, N * k)))
        kernels.append(cast(Function, own.function).projector.kernel)
    weights, variance, _ = conditional_weights(_left(kernels), (here, noise), (there, noise_near), mask, 0.0)
    residual = jnp.where(mask, y, 0.0) - jnp.broadcast_to(values.offset, (N * k,)).reshape(N, k)
    offset = latent.offset + jnp.sum(weights * residual, axis=1)
    left = jnp.zeros_like(variance) if observed else variance - noise
    terms = []
    for own, (_, A, scale), (_, A_near, scale_near) in zip(latent.terms, here, there, strict=True):
        function = cast(Function, own.function)
        rows = scale * A - jnp.einsum("nk,nkm->nm", weights * scale_near[..., 0], A_near)
        prior = jnp.sum(jnp.square(rows), axis=1) + left
        sizes = [block.size for block in function.projector.blocks]
        blocks = tuple(jnp.split(rows.T, [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]))
        beside = FunctionBesideNeighbors(function, Projection(blocks, prior))
        terms.append(Term(jnp.ones((), rows.dtype), beside, own.X))
        left = jnp.zeros_like(left)
    return as_latents(Latent(tuple(terms), offset), likelihood), (
        Gaussian(variance=variance) if observed else likelihood
    )


def _points(term: Term, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs, projections on all blocks and the term's factor, each with rows first."""
    A = jnp.concatenate(cast(Function, term.function).project(term.X).A).T
    return term.X, A, jnp.broadcast_to(term.scale, (rows,))[:, None]


def _left(kernels: Sequence[Kernel]):
    """The covariance that inducing values leave, of the sum of all terms."""

    def covariance(points: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
        each = (a * what_is_left(k)((X, A)) * a[:, 0] for k, (X, A, a) in zip(kernels, points, strict=True))
        return sum(each)  # type: ignore[return-value]

    return covariance


def _checked_neighbors(
    name: str, latent: Latent, likelihood: Likelihood, neighbors: Any
) -> tuple[Latent, jax.Array, jax.Array, jax.Array]:
    if not isinstance(neighbors, (tuple, list)) or not 2 <= len(neighbors) <= 3:
        raise TypeError(f"{name}: neighbors is a {type(neighbors).__name__}; it must be {WHAT}.")
    values, y = as_latent(neighbors[0], "neighbors of observe"), checks.real(neighbors[1], f"{name}: neighbors' y")
    of_neighbors = as_likelihood(neighbors[2]) if len(neighbors) == 3 else likelihood
    if not isinstance(likelihood, Gaussian) or not isinstance(of_neighbors, Gaussian):
        raise ValueError(
            f"{name}: neighbors are for Gaussian noise, and the likelihood is {likelihood.described}. For others take "
            'npgp.ApproximateGP(method="vif"), or a VNNGP of what inducing points leave, npgp.sparse.split_kernel.'
        )
    if len(latent.shape) != 1 or jnp.ndim(y) != 2 or values.shape != (jnp.size(y),) or len(y) != latent.shape[0]:
        raise ValueError(
            f"{name}: neighbors are values of shape {values.shape} and observations of shape {jnp.shape(y)} for rows "
            f"of shape {latent.shape}; k for each of N rows are values (N k,), row by row, and observations (N, k)."
        )
    for own, near in zip(latent.terms, values.terms, strict=False):
        f, plain = own.function, own.mixing is None and isinstance(own.X, jax.Array) and isinstance(near.X, jax.Array)
        if not plain or type(f) is not Function or f.batch_shape or f.sampled is not None:
            raise ValueError(
                f"{name}: {f.name} has no neighbors: they are for SparseGPs at inputs (N, D), drawn outside "
                "plates, which npgp.sample has not sampled."
            )
    if [f.source for f in latent.functions] != [f.source for f in values.functions]:
        raise ValueError(f"{name}: neighbors are values of other functions than the rows: write the same sum of both.")
    if len(neighbors) == 2 and jnp.ndim(likelihood.variance):
        raise ValueError(
            f"{name}: the noise variance differs between rows, so neighbors need theirs: neighbors=(values, y, "
            "npgp.Gaussian(variance=...)), (N, k)."
        )
    dtype = jnp.result_type(latent.terms[0].X)
    noise = jnp.broadcast_to(jnp.asarray(likelihood.variance, dtype), latent.shape)
    noise_near = jnp.broadcast_to(jnp.asarray(of_neighbors.variance, dtype), jnp.shape(y))
    return values, jnp.asarray(y, dtype), noise, noise_near
