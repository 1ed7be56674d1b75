"""The statements that use GP values in a model: ``observe`` and ``sample``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.primitives import Messenger
from numpyro.util import is_prng_key

from npgp import checks, linalg
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.model.latent import Latent, Latents, Moments, as_latent, as_latents
from npgp.model.sparse_gp import OBSERVATION, Catch, Q, ask, in_automatic_guide, plates_around
from npgp.sparse.conditionals import Conditional, Prior, as_conditional, row_elbo
from npgp.sparse.residuals import Residual

__all__ = ["joint", "observe", "sample"]

#: Key of a residual site's ``infer`` dict: the GP values that the automatic guide has computed already.
VALUE = "npgp.value"

#: Type of the nameless message by which an observation asks whether it is simulated jointly over rows.
JOINT = "npgp.joint"


class LatentObservation(dist.Distribution):
    """
    Observations of Gaussian latent values, which are integrated out row by row.

    With q at hand ``log_prob(y)`` is each row's share of the ELBO, else ``log ∫ p(y_n | f_n) N(f_n; μ_n, v_n) df_n``.
    Made by :func:`observe`.
    """

    support = constraints.real
    reparametrized_params: list[str] = []
    pytree_data_fields = ("likelihood", "moments", "conditional", "parameter", "mask_", "residual")
    #: Draws the latent values; ``None`` where they would be drawn row by row from the moments.
    simulate: Callable[[jax.Array, tuple[int, ...]], jax.Array] | None = None
    #: The latent values of the last sample.
    simulated: jax.Array | None = None

    def __init__(
        self,
        likelihood: Likelihood,
        moments: Moments,
        conditional: Conditional | None,
        parameter: ArrayLike | None = None,
        mask: jax.Array | None = None,
        residual: Residual | None = None,
    ):
        self.likelihood, self.moments, self.conditional = likelihood, moments, conditional
        self.parameter, self.mask_ = parameter, mask
        self.residual = residual  # where it is more than its variance row by row
        shape = moments.mean.shape
        super().__init__(shape if likelihood.num_latents == 1 else shape[1:], (), validate_args=False)

    @property
    def certified(self) -> bool:
        """Whether the ELBO is known to lie below the log evidence; true of a model that runs without a guide."""
        return self.conditional is None or self.conditional.is_bound(self.likelihood)

    def log_prob(self, value):
        mean, variance, prior_residual = self.moments
        # 1 is a possible observation of every likelihood; a masked row may hold NaN, also in the gradient.
        y = value if self.mask_ is None else jnp.where(self.mask_, value, 1)
        if self.conditional is None:
            terms = self.likelihood.log_marginal(y, mean, variance + prior_residual)
        else:
            residual = prior_residual if self.residual is None else self.residual
            terms = row_elbo(self.conditional, self.likelihood, y, mean, variance, residual, self.parameter, self.mask_)
        return terms if self.mask_ is None else jnp.where(self.mask_, terms, 0.0)

    def sample(self, key, sample_shape=()):
        assert is_prng_key(key)
        latent_key, key = jax.random.split(key)
        if self.simulate is not None:
            self.simulated = self.simulate(latent_key, sample_shape)
        else:
            mean, variance, residual = self.moments
            latents = mean.shape[: mean.ndim - len(self.batch_shape)]
            z = jax.random.normal(latent_key, (*latents, *sample_shape, *self.batch_shape), mean.dtype)
            mean, total = (
                value.reshape(*latents, *(1,) * len(sample_shape), *self.batch_shape)
                for value in (mean, variance + residual)
            )
            self.simulated = mean + jnp.sqrt(total) * z
        return self.likelihood.sample(key, self.simulated)


class joint(Messenger):
    """
    A handler under which :func:`observe` simulates y jointly over rows: f is one draw from the process, where without
    it each row has a residual of its own::

        Predictive(npgp.joint(model), mcmc.get_samples())(rng_key, X_new)["y.latent"]  # draws of whole functions

    It costs O(N³) for N rows, and matters where rows are closer to each other than to the inducing points.
    """

    def process_message(self, msg):
        if msg["type"] == JOINT:
            msg["value"] = True


def observe(
    name: str,
    latent: Latent | Sequence[Latent],
    likelihood: Likelihood | Any,
    obs: ArrayLike | None = None,
    *,
    conditional: Conditional | str = "tight",
    mask: ArrayLike | None = None,
    joint: bool = False,
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

    :param name: name of the site.
    :param latent: GP values at rows: ``f(X)``, or a sum of these and offsets; for several functions also
        ``W @ f(X)``. For a likelihood of several latent values, a tuple such as ``(f(X), g(X))`` of independent draws,
        or the values (C, N) of C functions drawn in a plate at dim −2.
    :param likelihood: an ``npgp`` likelihood, or a function from f (or from f and g) to a NumPyro distribution.
    :param obs: observations of the latent's shape, (N,) or (outputs, N).
    :param conditional: what q does to the residual (:mod:`npgp.sparse.conditionals`): :class:`npgp.Tight`,
        :class:`npgp.Grouped`, :class:`npgp.Prior`, :class:`npgp.Full`, :class:`npgp.Shared` or :class:`npgp.Published`,
        or a word for one that needs no arguments, such as ``"tight"``.
    :param mask: True where an observation is present, of the same shape; the others may be NaN.
    :param joint: when y is simulated, draw f jointly over rows at O(N³), not row by row; see :class:`joint`.
    :raises TypeError: if ``latent`` is not GP values.
    :raises ValueError: for observations of another shape, or outside the likelihood's support, or NaN without mask;
        and for a plate of another size.
    """
    likelihood = as_likelihood(likelihood, len(latent) if isinstance(latent, (tuple, list)) else 1)
    latents = as_latents(latent, likelihood)
    conditional = as_conditional(conditional)
    check_plates(name, latents.shape)
    if obs is not None:
        obs = _check_observations(name, obs, mask, latents, likelihood)
    # New rows, where y is simulated, are in no group: what they have in common with others is left to ``joint``.
    groups = None if obs is None else conditional.partition(latents.shape[-1])
    if conditional.supposes_own_residuals(likelihood):
        latents.check_unshared()
    parameter = _declare(name, conditional) if latents.variational else None
    if latents.guided and obs is not None:
        return obs  # a guide has no observed sites, and need not compute anything here
    distribution = LatentObservation(
        likelihood,
        latents.moments(),
        conditional if latents.variational else None,
        parameter,
        None if mask is None else jnp.asarray(mask),
        latents.group_residual(groups) if groups is not None and latents.variational else None,
    )
    jointly = joint or ask(JOINT)
    distribution.simulate = lambda key, shape: latents.simulate(key, jointly, shape)
    with (catch := Catch("sample")):
        value = numpyro.sample(name, distribution, obs=obs, infer={OBSERVATION: True})
    if conditional.needs_all_rows and _is_scaled(catch.message):
        raise ValueError(f"{name}: {conditional!r} needs all rows at once, but its plate has a subsample of them.")
    if distribution.simulated is not None and not latents.guided:
        numpyro.deterministic(f"{name}.latent", distribution.simulated)
    return value


def _declare(name: str, conditional: Conditional) -> jax.Array | None:
    """The parameter that a conditional learns, if it has one."""
    if conditional.parameter is None:
        return None
    suffix, start, constraint = conditional.parameter
    return numpyro.param(f"{name}.{suffix}", start, constraint=constraint)


def check_plates(name: str, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` if a plate around has another size than the values."""
    for plate in plates_around():
        size = shape[plate.dim] if -plate.dim <= len(shape) else 1
        if size not in (1, plate.subsample_size):
            batch = " (for batches passed as arguments there is npgp.plate)" if plate.dim == -1 else ""
            raise ValueError(
                f"{name} has GP values of shape {shape}, but plate {plate.name!r} at dim={plate.dim} has "
                f"{plate.subsample_size} members{batch}."
            )


def _is_scaled(msg: dict[str, Any]) -> bool:
    scale = msg["scale"]
    return scale is not None and not checks.is_traced(scale) and bool(np.any(np.asarray(scale) != 1.0))


def _check_observations(name, obs, mask, latents: Latents, likelihood: Likelihood) -> jax.Array:
    for what, value in (("observations", obs), ("mask", mask)):
        if value is not None and jnp.shape(value) != latents.shape:
            raise ValueError(
                f"{name}: the {what} have shape {jnp.shape(value)} but the GP values have shape {latents.shape}."
            )
    if mask is None:
        checks.require_finite(obs, f"the observations of {name}")
        likelihood.check(obs)
    elif not checks.is_traced(obs) and not checks.is_traced(mask):
        present = np.asarray(mask).astype(bool)
        checks.require_finite(np.asarray(obs)[present], f"the observations of {name}")
        likelihood.check(np.where(present, obs, np.nan))
    return jnp.asarray(obs)


def sample(name: str, latent: Latent, *, joint: bool = True, conditional: Conditional | str = "prior") -> jax.Array:
    """
    GP values as an array, for any expression downstream. Use it inside the plate over rows.

    The randomness of the residual is the site ``name.residual``; ``name`` itself is a deterministic site.

    =================================  ===========================================================================
    SVI                                f from q, jointly over the rows unless ``joint=False``
    NUTS, or a model without guide     ``A_nᵀε`` plus the residual: the exact GP if joint, FITC's model if not
    ``Predictive`` with a posterior    a fresh draw at the rows given, whatever rows the posterior was trained on
    =================================  ===========================================================================

    :param name: name of the site.
    :param latent: GP values at rows: ``f(X)``, or a sum of these and offsets. Residuals of separate statements are
        independent.
    :param joint: draw the rows jointly, at O(N³), or from their marginals, which suffices for training where what
        follows factorises over rows, and then has less Monte Carlo noise.
    :param conditional: what q does to the residual: ``"prior"`` or ``"shared"``, the two that bound the evidence
        whatever follows; one of one's own if it has a :meth:`~npgp.Conditional.residual_scale`.
    :return: shape (N,) or (outputs, N).
    """
    latents = Latents((latent := as_latent(latent, "sample"),), 1)
    latents.check_independent()
    latents.check_unshared()
    conditional = as_conditional(conditional)
    shape = latent.shape
    check_plates(name, shape)
    # Without q there is nothing to learn, and the residual has its prior.
    parameter = _declare(name, conditional) if latents.variational else 1.0
    scale = conditional.residual_scale(parameter)
    if scale is None:
        raise ValueError(
            f"conditional is {conditional!r}; npgp.sample takes 'prior' and 'shared': bounds whatever follows."
        )
    exact = isinstance(conditional, Prior)
    if not latents.variational and numpyro.get_mask() is False:
        # Under Predictive: a residual sampled at the training rows must not be taken for one at these.
        key = numpyro.prng_key()
        if key is None:
            raise ValueError(f"{name}: sampling GP values needs a random key; wrap the model in handlers.seed.")
        return numpyro.deterministic(name, _assemble(latents, jax.random.normal(key, shape), scale, joint, exact))
    prior = dist.Normal(jnp.zeros(shape), 1.0)
    q = dist.Normal(jnp.zeros(shape), scale)
    with (catch := Catch("sample")):
        z = numpyro.sample(f"{name}.residual", q if latents.guided else prior, infer={Q: None})
    infer = catch.message["infer"]
    value = infer.get(VALUE)
    if value is None:
        value = _assemble(latents, z, scale, joint, exact)
        if in_automatic_guide():
            infer[VALUE] = value  # the model takes it from here, with no second projection
    return numpyro.deterministic(name, value)


def _assemble(latents: Latents, z: jax.Array, scale: ArrayLike, joint: bool, keep_prior: bool):
    """
    GP values from the drawn ε and the residual's noise z, which has standard deviation ``scale`` under q.

    :param keep_prior: whether q leaves the residual its prior.
    """
    (latent,) = latents.parts
    if latents.variational and not joint:
        mean, variance, residual = latent.moments()
        total = variance + jnp.square(scale) * residual
        return mean + jnp.sqrt(jnp.maximum(total, jnp.finfo(total.dtype).tiny)) * z / scale
    # With its prior variance kept, a mean-only block's noise is drawn with ε; if not, it is part of the residual.
    keep = [[True] * len(f.values) if keep_prior else f.learned for f in latents.functions]
    value = latent.offset
    for term, blocks in zip(latent.terms, keep, strict=True):
        value = value + term.values(term.function.given_values(term.X, blocks))
    factor = latent.residual_factor(joint, keep)
    noise = linalg.matmul(factor, z[..., None])[..., 0] if joint else factor * z
    return jnp.broadcast_to(value, z.shape) + noise
