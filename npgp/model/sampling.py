"""``sample``: GP values as an array, for any expression of a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike

from npgp.contract import random_key, under_predictive
from npgp.model.latent import Latent, as_latent, times_root
from npgp.model.latents import Latents
from npgp.model.plates import check_plates
from npgp.model.sites import LATENTS, VALUE, Catch, Q, check_loss, conditional_parameter, in_automatic_guide
from npgp.sparse.conditionals import Conditional, Prior, as_conditional

__all__ = ["sample"]


def sample(name: str, latent: Latent, *, joint: bool = True, conditional: Conditional | str = "prior") -> jax.Array:
    """
    GP values as an array, for any expression downstream. Use it inside the plate over rows.

    The randomness of the residual is the site ``name.residual``; ``name`` itself is a deterministic site.

    =================================  ===========================================================================
    SVI                                f from q, jointly over the rows unless ``joint=False``
    NUTS, or a model without guide     ``A_nᵀε`` plus the residual: the exact GP if joint, FITC's model if not
    ``Predictive`` with a posterior    a fresh draw at the rows given, whatever rows the posterior was trained on
    =================================  ===========================================================================

    .. code-block:: python

        def downstream(X, y=None):
            f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
            value = npgp.sample("value", f(X))  # an array
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", dist.Normal(jnp.tanh(value), 0.1), obs=y)

    :param name: name of the site.
    :param latent: GP values at rows: ``f(X)``, or a sum of these and offsets. Residuals of separate statements are
        independent.
    :param joint: draw the rows jointly, at O(N³), or from their marginals, which suffices for training where what
        follows factorizes over rows, and then has less Monte Carlo noise.
    :param conditional: what q does to the residual: ``"prior"`` or ``"shared"``, the two that bound the evidence
        whatever follows; one of one's own if it has a :meth:`~npgp.Conditional.residual_scale`.
    :return: shape (N,) or (outputs, N).
    """
    latents = Latents((latent := as_latent(latent, "sample"),), 1)
    latents.check_independent()
    latents.check_unshared()
    conditional = as_conditional(conditional)
    if latents.variational and not latents.guided and not (joint and isinstance(conditional, Prior)):
        check_loss(name, "values of f with less noise than draws of f have")
    shape = latent.shape
    check_plates(name, shape)
    parameter = conditional_parameter(name, conditional) if latents.variational else 1.0
    scale = conditional.residual_scale(parameter)
    if scale is None:
        raise ValueError(
            f"conditional is {conditional!r}; npgp.sample takes 'prior' and 'shared': bounds whatever follows."
        )
    scale = scale if latents.variational else 1.0
    keeps_prior = isinstance(conditional, Prior)
    if not latents.variational and under_predictive(name):
        # Under Predictive: a residual sampled at the training rows must not be taken for one at these.
        key = random_key(name)
        if key is None:
            raise ValueError(f"{name}: sampling GP values needs a random key; wrap the model in handlers.seed.")
        return numpyro.deterministic(name, _assemble(latents, jax.random.normal(key, shape), scale, joint, keeps_prior))
    prior = dist.Normal(jnp.zeros(shape), 1.0)
    q = dist.Normal(jnp.zeros(shape), scale)
    with (catch := Catch("sample")):
        z = numpyro.sample(f"{name}.residual", q if latents.guided else prior, infer={Q: None, LATENTS: latents})
    infer = catch.message["infer"]
    value = None if latents.fixed else infer.get(VALUE)
    if value is None:
        value = _assemble(latents, z, scale, joint, keeps_prior)
        if in_automatic_guide(f"{name}.residual"):
            infer[VALUE] = value  # the model takes it from here, with no second projection
    return numpyro.deterministic(name, value)


def _assemble(latents: Latents, z: jax.Array, scale: ArrayLike, joint: bool, keeps_prior: bool) -> jax.Array:
    """
    GP values from the drawn ε and the residual's noise z, which has standard deviation ``scale`` under q.

    :param keeps_prior: whether q leaves the residual its prior.
    """
    (latent,) = latents.parts
    if latents.variational and not joint:
        mean, variance, residual = latent.moments()
        total = variance + jnp.square(scale) * residual
        return mean + jnp.sqrt(jnp.maximum(total, jnp.finfo(total.dtype).tiny)) * z / scale
    # A mean-only block's variance is drawn with ε; otherwise it is part of the residual.
    mean, root = latent.given(joint, mean_only_in_residual=not keeps_prior)
    return jnp.broadcast_to(mean, z.shape) + times_root(root, z, joint)
