"""``sample``: GP values as an array, for any expression of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike

from npgp import checks
from npgp.conditionals import Conditional, as_conditional
from npgp.contract import Message, random_key, under_predictive
from npgp.model.draw import window
from npgp.model.latent import Latent, Latents, Term, as_latent, square_root, times_root
from npgp.model.sites import (
    INFO,
    Catch,
    SiteInfo,
    check_loss,
    check_plates,
    conditional_parameter,
    in_automatic_guide,
    info_of,
)
from npgp.programs.backend import maximum
from npgp.programs.tracing import current_trace


def sample(
    name: str,
    latent: Latent,
    *,
    joint: bool = True,
    conditional: Conditional | str = "prior",
    earlier: bool | tuple[ArrayLike, ArrayLike] = True,
) -> jax.Array:
    """
    GP values as an array, for any expression downstream. Use it inside the plate over rows.

    Several statements of one draw are values of one function: each is conditioned on those before it, at O(n²) for a
    row where n are sampled. So a state-space model calls f at each of its states, in a Python loop.

    The randomness of the residual is the site ``name.residual``; of a sum of functions drawn jointly, each has one,
    ``name.residual.f``. ``name`` itself is a deterministic site.

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


        def states(steps=3):
            f, x = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw(), jnp.zeros((1, 1))
            for t in range(steps):
                x = x + npgp.sample(f"f{t}", f(x))[:, None]  # of one f throughout

    Statements inside ``numpyro.contrib.control_flow.scan``, of a function drawn outside, cannot know of those of other
    steps, unless the carry has the last of its values, which are then ``earlier``::

        def step(carry, t):
            x, (inputs, values) = carry  # to begin with jnp.zeros((W, D)), jnp.full(W, jnp.nan)
            f_x = npgp.sample("f_x", f(x[None]), earlier=(inputs, values))
            inputs = jnp.concatenate([inputs[1:], x[None]])
            values = jnp.concatenate([values[1:], f_x])
            ...

    :param name: name of the site.
    :param latent: GP values at rows: ``f(X)``, or a sum of these and offsets.
    :param joint: draw the rows jointly, at O(N³), or from their marginals, which suffices for training where what
        follows factorizes over rows, and then has less Monte Carlo noise. Rows from marginals are independent of other
        statements' rows too.
    :param conditional: what q does to the residual: ``"prior"`` or ``"shared"``, the two that bound the evidence
        whatever follows; one of one's own if it has a :meth:`~npgp.conditionals.Conditional.residual_scale`.
    :param earlier: values of f to condition on: ``True``, those of all joint statements before; ``False``, none, so
        that statements have the inducing values in common and independent residuals; or ``(X, values)``, f's values
        (..., W) at inputs X (W, D), of which those that are NaN are not there yet. Only what is sampled with ``True``
        is known to later statements.
    :return: shape (N,) or (outputs, N).
    :raises TypeError: for ``earlier`` of another kind.
    :raises ValueError: for a draw that occurs twice in the sum, with factors that differ between outputs, or serves
        several outputs; for a conditional that bounds not whatever follows; inside a loop or other transformation of
        JAX, such as ``scan``, without ``earlier``; and for earlier values of another shape, of a sum, or with
        ``joint=False``.
    """
    latents = Latents((latent := as_latent(latent, "sample"),), 1)
    latents.check_independent()
    latents.check_unshared()
    conditional = as_conditional(conditional)
    if latents.variational and not latents.guided and not (joint and conditional.is_prior):
        check_loss(name, "values of f with less noise than draws of f have")
    check_plates(name, latent.shape)
    parameter = conditional_parameter(name, conditional) if latents.variational else 1.0
    scale = conditional.residual_scale(parameter)
    if scale is None:
        raise ValueError(
            f"conditional is {conditional!r}; npgp.sample takes 'prior' and 'shared': bounds whatever follows. One of "
            "your own has a residual_scale(parameter) for it."
        )
    scale = scale if latents.variational else 1.0
    # A mean-only block's variance is drawn with ε where q leaves the residual its prior; else it is part of that.
    mean_only = not conditional.is_prior
    latent = _conditioned(name, latent, joint, earlier, mean_only)
    if not joint:
        z, _ = _noise(f"{name}.residual", latents, latent.shape, scale)
        mean, variance, residual = latent.moments()
        total = variance + jnp.square(scale) * residual
        value = mean + jnp.sqrt(maximum(total, jnp.finfo(total.dtype).tiny)) * z / scale
        return numpyro.deterministic(name, value)
    value = latent.offset
    for term in latent.terms:
        site = f"{name}.residual" if len(latent.terms) == 1 else f"{name}.residual.{term.function.name}"
        value = value + term.values(_joint_values(site, term, latents, latent.shape, scale, mean_only))
    return numpyro.deterministic(name, jnp.broadcast_to(value, latent.shape))


def _conditioned(name: str, latent: Latent, joint: bool, earlier: Any, mean_only: bool) -> Latent:
    """The latent, of functions that are conditioned on the earlier values wanted."""
    if not isinstance(earlier, (bool, tuple, list)) or not (isinstance(earlier, bool) or len(earlier) == 2):
        raise TypeError(
            f"{name}: earlier is {checks.shown(earlier)}; it must be True, False, or a pair (X, values), inputs "
            "(W, D) and f's values there."
        )
    if earlier is True and joint:
        for draw in latent.functions:
            if cast(Any, draw.source).here is not current_trace():
                raise ValueError(
                    f"{name} samples {draw.name}, drawn outside, inside a loop or other transformation of JAX such "
                    "as scan, where its values at other steps are unknown: write a Python loop, carry the last values "
                    "and give earlier=(X, values), or take residuals to be independent by earlier=False."
                )
        return latent
    if isinstance(earlier, bool):
        return _of(latent, [cast(Any, draw).apart() for draw in latent.functions])
    if not joint or len(latent.terms) > 1:
        wrong = "joint=False" if not joint else f"a sum of {len(latent.terms)} functions"
        raise ValueError(
            f"{name}: earlier is a pair (X, values) for {wrong}; it must be for one function, sampled with joint=True."
        )
    function: Any = latent.functions[0]
    if function.source is not function:
        raise ValueError(
            f"{name}: earlier is a pair (X, values) for chosen rows f(X)[group, row]; it must be for f(X) itself."
        )
    rows = function(earlier[0]).terms[0].X
    values = jnp.asarray(checks.array(earlier[1], f"{name}: the earlier values"))
    shape = (*function.batch_shape, rows.shape[-2])
    if values.shape != shape:
        raise ValueError(
            f"{name}: earlier has values of shape {values.shape} at inputs of shape {rows.shape}; they must be {shape}."
        )
    return _of(latent, [function.apart(window(function, rows, values, mean_only))])


def _of(latent: Latent, functions: list[Any]) -> Latent:
    """The latent, of other functions."""
    terms = (replace(term, function=function) for term, function in zip(latent.terms, functions, strict=True))
    return Latent(tuple(terms), latent.offset)


def _noise(site: str, latents: Latents, shape: tuple[int, ...], scale: ArrayLike) -> tuple[jax.Array, Message | None]:
    """The residual's noise, which has standard deviation ``scale`` under q; and the site's message, if it is one."""
    if not latents.variational and under_predictive(site):
        # Under Predictive: a residual sampled at the training rows must not be taken for one at these.
        key = random_key(site)
        if key is None:
            raise ValueError(f"{site}: sampling GP values needs a random key; wrap the model in handlers.seed.")
        return jax.random.normal(key, shape), None
    fn = dist.Normal(jnp.zeros(shape), scale if latents.guided else 1.0)
    with (catch := Catch("sample")):
        z = numpyro.sample(site, fn, infer={INFO: SiteInfo(latents=latents)})
    return z, catch.message


def _joint_values(
    site: str, term: Term, latents: Latents, shape: tuple[int, ...], scale: ArrayLike, mean_only: bool
) -> jax.Array:
    """f at rows from the drawn ε, values sampled before, and the residual's noise; later values are to know of them."""
    f: Any = term.function
    z, msg = _noise(site, latents, shape, scale)
    known = None if msg is None or latents.fixed else info_of(msg).value
    if known is not None:
        value, f.source.sampled = known
        return value
    given = f.given(term.X, joint=True, mean_only_in_residual=mean_only)
    root = square_root(given, True)
    z = jnp.reshape(z, given.mean.shape)
    value = given.mean + times_root(root, z, True)
    f.remember(term.X, root, given.weights, z, f.residual_blocks(mean_only))
    if msg is not None and in_automatic_guide():
        # The model takes them from here, with no second projection.
        msg["infer"][INFO] = replace(info_of(msg), value=(value, f.source.sampled))
    return value
