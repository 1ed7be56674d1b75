"""``posterior``: what a trained guide, or draws by MCMC, say about one function of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.infer import MCMC

from npgp import checks
from npgp.collapsed.approximations import ApproximateGP
from npgp.collapsed.collapsed_gp import CollapsedGP
from npgp.context import under
from npgp.contract import Message, base_of
from npgp.likelihoods import Likelihood
from npgp.model.given_rows import present_rows
from npgp.model.guides import set_up
from npgp.model.sites import (
    AllRows,
    Hidden,
    Trained,
    info_of,
    is_gp_site,
    is_inducing,
    is_observation,
    traced_inside,
    trained,
)
from npgp.programs.compiled import STEPS, one_program
from npgp.programs.later import see_later
from npgp.programs.operations import Operations
from npgp.variational.averages import PosteriorMixture
from npgp.variational.posterior import Posterior


@overload
def posterior(
    name: str, model: Callable, guide: Callable, params, *args, draws: None = None, rng_key=None, **kwargs
) -> Posterior: ...
@overload
def posterior(
    name: str, model: Callable, guide: Any, params, *args, draws: int | None = None, rng_key=None, **kwargs
) -> PosteriorMixture: ...
def posterior(name, model, guide, params, *args, draws=None, rng_key=None, **kwargs):
    """
    The posterior of a component's function: mean, variance, covariance and joint draws at any inputs::

        npgp.posterior("f", model, guide, params, X, y)                             nothing else is sampled
        npgp.posterior("f", model, guide, params, X, y, draws=50)                   averaged over what else is
        npgp.posterior("f", model, mcmc.get_samples(), {}, X, y, draws=50)          likewise, by MCMC

    Where hyperparameters, or other sites that q(ε) follows, are latent sites, the posterior of f is an average over
    them: a mixture of the posteriors given each of ``draws`` joint draws (:class:`npgp.variational.PosteriorMixture`,
    which has these draws as ``sites``). Without ``draws`` it is the posterior given one draw of them, whose intervals
    are too narrow.

    Where a GP is stated as :class:`npgp.CollapsedGP`, or :class:`npgp.ApproximateGP`, the name is that of the observed
    site, and the posterior is its ``condition(y)``, without the offset.

    .. code-block:: python

        mean, variance = npgp.posterior("f", model, guide, params, X).mean_and_variance(X + 0.1)

    :param name: the component's name, with its scope if it has one; or that of the site of a collapsed GP.
    :param model: the model.
    :param guide: its guide, automatic or written by hand; or draws of all latent sites by name, draws first, as
        ``mcmc.get_samples()`` and ``guide.sample_posterior`` give them, or the ``MCMC`` after its run. Given draws with
        inducing values among them, f is what each draw's inducing values say.
    :param params: trained parameters, from ``svi.get_params(state)``; of a model without parameters ``{}``.
    :param args: arguments of model and guide; observations may be left out where the guide has seen them before, but
        not where a GP is collapsed.
    :param draws: number of draws of the other latent sites to average over. Of draws by MCMC, so many, evenly spaced;
        all of them if omitted.
    :param rng_key: for the draws. With ``draws``, draw i is that of ``jax.random.split(rng_key, draws)[i]``.
    :raises KeyError: if the model has no such component, and for a parameter that ``params`` lacks.
    :raises ValueError: if draws by MCMC lack a site that f depends on, and for more ``draws`` than there are.
    """
    given = trained(params)
    if draws is not None:
        draws = checks.whole_number(draws, "draws")
    key = jax.random.key(0) if rng_key is None else rng_key

    if isinstance(guide, (MCMC, Mapping)):
        samples = _thinned(guide.get_samples() if isinstance(guide, MCMC) else guide, draws)

        def at_values(draw, key):
            sites = _sites(_substituted(model, draw), key, traced_inside(given), args, kwargs)
            return (
                function_in(name, sites, with_q=False),
                {n: draw[n] for n in sorted(_others(sites) & set(draw))},
                sites,
            )

        return one_program(lambda: _averaged(at_values, samples, key), options=STEPS)

    def under_guide(key):
        values = traced_inside(given)
        model_key, guide_key = jax.random.split(key)
        with Hidden(), under(unseen=True):
            # No density is wanted, observations that are left out need no guide, and f no sites that are local to rows.
            seeded = handlers.mask(handlers.seed(guide, guide_key), mask=False)
            trace = handlers.trace(Trained(seeded, values)).get_trace(*args, **kwargs)
        sites = _sites(handlers.replay(model, trace), model_key, values, args, kwargs)
        return function_in(name, sites, with_q=True), {
            n: sites[n]["value"] for n in sorted(_others(sites) & set(trace))
        }

    set_up(guide, args, kwargs)
    if draws is None:
        return one_program(lambda: under_guide(key)[0])
    return one_program(lambda: _mixture(under_guide, jax.random.split(key, draws)), options=STEPS)


def _sites(model: Callable, key: jax.Array, params: Mapping[str, Any], args, kwargs) -> dict[str, Message]:
    """The trace of a model at trained parameters."""
    with Hidden():
        return handlers.trace(Trained(handlers.seed(model, key), params)).get_trace(*args, **kwargs)


def _others(sites: dict[str, Message]) -> set[str]:
    """Latent sites that belong to no GP."""
    latent = (n for n, msg in sites.items() if msg["type"] == "sample" and not msg["is_observed"])
    return {n for n in latent if not (is_gp_site(sites[n]) or is_observation(sites[n]))}


def function_in(name: str, sites: dict[str, Message], with_q: bool) -> Any:
    """
    The posterior of a component, or of a collapsed GP, in a model that has run.

    :param name: the component's name, or that of the collapsed GP's observed site.
    :param sites: the model's trace.
    :param with_q: whether a guide gave q; if not, f is taken given the drawn inducing values.
    """
    components = {s: info_of(msg).function for s, msg in sites.items() if is_inducing(msg)}
    # The prefix of the site's name is the component's, with its scope.
    functions = {site.rsplit(".", 1)[0]: function for site, function in components.items()}
    # Likewise that of its last layer's name is a deep GP's.
    functions |= {n.rsplit(".", 1)[0]: f.whole for n, f in functions.items() if getattr(f, "whole", None) is not None}
    if name in functions:
        return functions[name].posterior() if with_q else functions[name].posterior_given_values()
    sampled = {s: msg for s, msg in sites.items() if msg["type"] == "sample"}
    collapsed = [s for s, msg in sampled.items() if isinstance(base_of(msg["fn"]), (CollapsedGP, ApproximateGP))]
    if name not in collapsed:
        raise KeyError(f"the model has no component named {name!r}; it has {sorted([*functions, *collapsed])}.")
    if not sites[name]["is_observed"]:
        raise ValueError(f"{name} is a collapsed GP, whose posterior needs its observations: pass them to the model.")
    return base_of(sites[name]["fn"]).condition(sites[name]["value"])


# ---------------------------------------------------------------------------------------------------------------
# Averages


def _mixture(function: Callable[[Any], tuple[Any, dict[str, jax.Array]]], draws: Any) -> PosteriorMixture:
    """
    The mixture of what a function makes of each draw, one after the other.

    :param function: to a posterior and values of other sites.
    :param draws: a pytree of arrays with draws first.
    """
    first, size = jax.tree.map(lambda x: x[0], draws), len(jax.tree.leaves(draws)[0])
    # Once by itself: guides note things at their first call, which must not be those of a loop's inside.
    one, sites = function(first)
    leaves, structure = jax.tree.flatten(one)
    operations = Operations(lambda draw: dict(enumerate(jax.tree.leaves(function(draw)[0]))), first)
    varies = tuple(bool(operations.part(i)[0]) for i in range(len(leaves)))

    def of_draw(draw):
        found, sites = function(draw)
        return [x for x, v in zip(jax.tree.leaves(found), varies, strict=True) if v], sites

    different, sites = lax.map(of_draw, draws)
    arrays = iter(different)
    leaves = [next(arrays) if v else x for x, v in zip(leaves, varies, strict=True)]
    return PosteriorMixture(jax.tree.unflatten(structure, leaves), sites, size, varies)


def _averaged(function: Callable, samples: dict[str, jax.Array], key: jax.Array) -> PosteriorMixture:
    """The mixture over draws that were made before; an error if the model makes more, on which f depends."""
    first = {name: value[0] for name, value in samples.items()}
    missing: list[str] = []

    def leaves(key):
        found, _, sites = function(first, key)
        missing.extend(n for n, m in sites.items() if m["type"] == "sample" and not m["is_observed"] and n not in first)
        return {"f": [x for x in jax.tree.leaves(found) if hasattr(x, "dtype")]}

    if Operations(leaves, key).part("f")[0]:
        raise ValueError(
            f"the draws have no {sorted(missing)}, latent sites on which f depends; they have {sorted(samples)}."
        )
    return _mixture(lambda draw: function(draw, key)[:2], samples)


def _substituted(model: Callable, draw: Mapping[str, jax.Array]) -> Callable:
    """The model at a draw's values of latent sites; deterministic ones may be of other rows."""

    def value(msg):
        latent = msg["type"] == "sample" and not msg.get("is_observed")
        return draw.get(msg["name"]) if latent else None

    return handlers.substitute(model, substitute_fn=value)


def _thinned(samples: Mapping[str, Any], draws: int | None) -> dict[str, jax.Array]:
    """Thin draws to a number of them, evenly spaced."""
    arrays = {name: np.asarray(value) if not checks.is_traced(value) else value for name, value in samples.items()}
    sizes = {np.shape(value)[:1] for value in arrays.values()}
    if len(sizes) != 1 or () in sizes or (0,) in sizes:
        shapes = {name: np.shape(value) for name, value in arrays.items()}
        raise ValueError(f"guide has draws of shapes {shapes}; their leading axes, over draws, must be the same.")
    ((size,),) = sizes
    if draws is not None:
        checks.whole_number(draws, "draws", most=size, must_be=f"at most the {size} draws that are given")
    chosen = np.arange(size if draws is None else draws) * size // (draws or size)
    return {name: jnp.asarray(value[chosen]) for name, value in arrays.items()}


class Stated(NamedTuple):
    """
    A function's posterior, given one draw of the other sites, and what its model states of it.

    :param posterior: that of f.
    :param X: its inputs, (N, D).
    :param y: observations, (N,).
    :param likelihood: p(y_n | f_n + offset).
    :param offset: all else that is added to f, at its mean, (N,).
    :param mask: True where an observation is present; ``None`` if all are.
    """

    posterior: Posterior
    X: jax.Array
    y: jax.Array
    likelihood: Likelihood
    offset: jax.Array
    mask: jax.Array | None


def statement_about(name: str, model: Callable, guide: Callable, params, rng_key: jax.Array, *args, **kwargs) -> Stated:
    """
    The observations of a component's function in a model, observations and all rows among its arguments.

    :param name: the component's name, with its scope if it has one.
    :raises KeyError: if the model has no such component.
    :raises ValueError: unless one statement observes it, as a term of the only latent value, without a factor.
    """
    given = trained(params)
    set_up(guide, args, kwargs)
    return one_program(lambda: _stated(name, model, guide, given, rng_key, args, kwargs))


def _stated(
    name: str, model: Callable, guide: Callable, given: Mapping[str, Any], rng_key: jax.Array, args: tuple, kwargs: Any
) -> Stated:
    guide_key, model_key = jax.random.split(rng_key)
    with Hidden(), under(unseen=True):  # no density is wanted
        drawn = handlers.trace(Trained(AllRows(handlers.seed(guide, guide_key)), given)).get_trace(*args, **kwargs)
        sites = _sites(handlers.replay(AllRows(model), drawn), model_key, given, args, kwargs)
    posterior = function_in(name, sites, with_q=True)
    found = []
    for msg in sites.values():
        for part in info_of(msg).latents.parts if is_observation(msg) else ():
            found += [(msg, part, term) for term in part.terms if term.function.name == name]
    if len(found) != 1 or info_of(found[0][0]).latents.num_latents != 1 or not found[0][0]["is_observed"]:
        raise ValueError(
            f"{name} is a term of {len(found)} observed latent values; it must be of one, the only one of its rows."
        )
    ((msg, part, term),) = found

    def require_alone(scale: ArrayLike) -> None:
        if term.mixing is not None or term.function.batch_shape or np.ndim(scale) or scale != 1.0:
            raise ValueError(
                f"{name} has a factor, or is several functions, in {msg['name']!r}; it must be one, f(X) alone."
            )

    if checks.is_traced(term.scale):
        require_alone(1.0)  # what is known before the factor
        see_later(require_alone, term.scale)
    else:
        require_alone(term.scale)
    offset = part.moments().mean - posterior.mean(term.X)
    return Stated(posterior, term.X, msg["value"], info_of(msg).likelihood, offset, present_rows(msg))
