"""``posterior``: what a trained guide says about one component of a model."""

from __future__ import annotations

from collections.abc import Callable

import jax
from numpyro import handlers

from npgp.model.rerun import Hidden
from npgp.model.sites import FUNCTION, Trained, is_gp_site, traced_inside, trained
from npgp.programs.compiled import one_program
from npgp.variational.posterior import Posterior

__all__ = ["posterior"]


def posterior(name: str, model: Callable, guide: Callable, params, *args, rng_key=None, **kwargs) -> Posterior:
    """
    The posterior of a component's function: mean, variance, covariance and joint draws at any inputs.

    .. code-block:: python

        mean, variance = npgp.posterior("f", model, guide, params, X).mean_and_variance(X + 0.1)

    :param name: the component's name, with its scope if it has one.
    :param model: the model.
    :param guide: its guide, automatic or written by hand.
    :param params: trained parameters, from ``svi.get_params(state)``.
    :param args: arguments of model and guide; observations may be left out where the guide has seen them before.
    :param rng_key: where hyperparameters are sampled: the posterior is the one given a draw of them.
    :raises KeyError: if the model has no such component, and for a parameter that ``params`` lacks.
    """

    given = trained(params)

    def run() -> Posterior:
        values = traced_inside(given)
        model_key, guide_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
        with Hidden():
            # No density is wanted, and observations that are left out need no guide.
            seeded = handlers.mask(handlers.seed(guide, guide_key), mask=False)
            guide_trace = handlers.trace(Trained(seeded, values)).get_trace(*args, **kwargs)
            replayed = handlers.replay(handlers.seed(model, model_key), guide_trace)
            sites = handlers.trace(Trained(replayed, values)).get_trace(*args, **kwargs)
        found = {s: msg["infer"][FUNCTION] for s, msg in sites.items() if is_gp_site(msg) and FUNCTION in msg["infer"]}
        # The prefix of the site's name is the component's, with its scope.
        functions = {site.rsplit(".", 1)[0]: function for site, function in found.items()}
        if name not in functions:
            raise KeyError(f"the model has no component named {name!r}; it has {sorted(functions)}.")
        return functions[name].posterior()

    return one_program(run, keepers=(guide,), apart=(model,))
