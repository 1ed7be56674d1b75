"""The automatic guide: q(ε) for every GP of a model, and an autoguide of the user's choice for all else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer.autoguide import AutoGuide, AutoNormal
from numpyro.primitives import Messenger

from npgp import linalg
from npgp.component import CONTEXT, FUNCTION, WHITENED, is_gp_site, is_observation
from npgp.posteriors import Posterior

__all__ = ["AutoSparseGP", "posterior"]


class _Rerun(Messenger):
    """
    Runs the model as a guide: components sample from q(ε), and every other latent site is the rest guide's own, with
    its distribution and value, so that sites come in the model's order.
    """

    def __init__(self, fn: Callable, rest: dict[str, dict[str, Any]]):
        super().__init__(fn)
        self.rest = rest

    def process_message(self, msg):
        if msg["type"] == CONTEXT:
            msg["value"] = True
            return
        site = self.rest.get(msg.get("name"))
        if site is None or site["type"] != msg["type"] or msg.get("is_observed"):
            return
        if msg["type"] == "plate" and msg["args"][1] not in (None, msg["args"][0]):
            _check_same_rows(msg, site)
        msg["value"] = site["value"]
        if msg["type"] == "sample":
            # No intermediates: a handler outside may put another value in the place of this one.
            msg["fn"], msg["intermediates"] = site["fn"], []
            msg["infer"] = {**msg["infer"], **site["infer"]}


def _check_same_rows(msg: dict[str, Any], site: dict[str, Any]) -> None:
    given = msg["value"]
    same = given is None or given is site["value"]
    if not same and not (linalg.is_traced(given) or linalg.is_traced(site["value"])):
        same = np.array_equal(given, site["value"])
    if not same:
        raise ValueError(
            f"plate {msg['name']!r} takes its rows from the model's arguments, but the guide for other latent sites "
            "drew rows of its own: give that guide the same plate, with create_plates if it is an autoguide."
        )


class AutoSparseGP:
    """
    A guide derived from a model with :class:`~npgp.component.SparseGP` components::

        guide = npgp.AutoSparseGP(model)
        svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())

    Each component gets its structured q(ε), with parameters ``name.u.loc`` and ``name.u.scale_tril``; all other latent
    sites are left to another guide. Use ``TraceMeanField_ELBO``, which takes KL divergences in closed form;
    ``Trace_ELBO`` is right too, and noisier.

    :param model: the model.
    :param guide: for the other latent sites: an autoguide class (or a partial of one), which is made for the model with
        its GP sites hidden, or a guide written by hand for these sites.
    """

    def __init__(self, model: Callable, guide: Callable = AutoNormal):
        self.model = model
        self.hidden_model = handlers.block(model, hide_fn=lambda msg: is_gp_site(msg) or is_observation(msg))
        self._is_factory = isinstance(guide, (type, partial))
        self.rest: Callable | None = guide(self.hidden_model) if self._is_factory else guide
        self._gp_sites: list[str] | None = None
        self._unwhitened: list[str] = []
        self._other_sites: list[str] = []

    def _setup(self, *args, **kwargs) -> None:
        """Find the component sites, and whether the model has latent sites beside them."""
        with handlers.block(), handlers.trace() as sites, handlers.seed(rng_seed=0):
            self.model(*args, **kwargs)
        self._gp_sites = [name for name, site in sites.items() if is_gp_site(site)]
        self._unwhitened = [name for name in self._gp_sites if not sites[name]["infer"].get(WHITENED, True)]
        self._other_sites = [
            name
            for name, site in sites.items()
            if site["type"] == "sample" and not (site["is_observed"] or is_gp_site(site) or is_observation(site))
        ]
        if self._is_factory and not self._other_sites:
            self.rest = None

    def __call__(self, *args, **kwargs) -> dict[str, jax.Array]:
        """
        Run the guide with the model's arguments.

        :return: the values of the latent sites.
        """
        if self._gp_sites is None:
            self._setup(*args, **kwargs)
        rest: dict[str, dict[str, Any]] = {}
        if self.rest is not None:
            with handlers.block(hide_fn=_belongs_to_rerun), handlers.trace() as rest:
                self.rest(*args, **kwargs)

        def hidden(msg: dict[str, Any]) -> bool:
            if msg["type"] == "sample":
                return msg["is_observed"] or not (is_gp_site(msg) or msg["name"] in rest)
            return msg["type"] not in ("param", "plate", "mutable")

        with handlers.block(hide_fn=hidden), handlers.trace() as sites:
            # Substituted as well, for the sake of sites inside NumPyro's control flow.
            values = {name: site["value"] for name, site in rest.items() if site["type"] == "sample"}
            _Rerun(handlers.substitute(self.model, data=values), rest)(*args, **kwargs)
        return {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}

    def sample_posterior(self, rng_key, params, *args, sample_shape: tuple[int, ...] = (), **kwargs):
        """
        Draws from the guide: whitened values ε, and the other latent sites.

        :param rng_key: random key.
        :param params: parameters, from ``svi.get_params(state)``.
        :param args: the model's arguments.
        :param sample_shape: shape put before each site's own.
        """

        def draw(key):
            return handlers.substitute(handlers.seed(self, key), params)(*args, **kwargs)

        fn = draw
        for _ in sample_shape:
            fn = jax.vmap(fn)
        return fn(jax.random.split(rng_key, sample_shape) if sample_shape else rng_key)

    def median(self, params) -> dict[str, jax.Array]:
        """Posterior medians: those of the rest guide, and the means of the whitened values."""
        if self._unwhitened:
            raise NotImplementedError(
                f"median: the parameters of {self._unwhitened[0]} are unwhitened, so its median depends on the kernel; "
                "use npgp.posterior(...).q."
            )
        return {**self._of_rest("median", params), **{s: params[f"{s}.loc"] for s in self._blocks(params)}}

    def quantiles(self, params, quantiles) -> dict[str, jax.Array]:
        """Posterior quantiles of the sites that the rest guide covers."""
        return self._of_rest("quantiles", params, quantiles)

    def _of_rest(self, method: str, *args) -> dict[str, jax.Array]:
        if self.rest is None:
            return {}
        if not isinstance(self.rest, AutoGuide):
            raise NotImplementedError(f"{method}: the guide for the other sites is hand-written and offers none.")
        found = getattr(self.rest, method)(*args)
        return {name: value for name, value in found.items() if name in self._other_sites}

    def _blocks(self, params) -> list[str]:
        return [site for site in self._gp_sites or [] if f"{site}.loc" in params]


def _belongs_to_rerun(msg: dict[str, Any]) -> bool:
    """What the rest guide states and the rerun states again: latent sites, but for auxiliary ones."""
    if msg["type"] == "sample":
        return not msg["infer"].get("is_auxiliary", False)
    # Plates stay visible, so that handlers outside choose the same rows for both.
    return msg["type"] == "deterministic"


def posterior(name: str, model: Callable, guide: Callable, params, *args, rng_key=None, **kwargs) -> Posterior:
    """
    The posterior of a component's function: mean, variance, covariance and joint draws at any inputs.

    :param name: the component's name, with its scope if it has one.
    :param model: the model.
    :param guide: its guide, automatic or written by hand.
    :param params: trained parameters, from ``svi.get_params(state)``.
    :param args: arguments of model and guide; observations may be left out.
    :param rng_key: where hyperparameters are sampled: the posterior is the one given a draw of them.
    :raises KeyError: if the model has no such component.
    """
    model_key, guide_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    with handlers.block():
        guide_trace = handlers.trace(handlers.substitute(handlers.seed(guide, guide_key), params)).get_trace(
            *args, **kwargs
        )
        replayed = handlers.replay(handlers.seed(model, model_key), guide_trace)
        sites = handlers.trace(handlers.substitute(replayed, params)).get_trace(*args, **kwargs)
    # The prefix of the site's name is the component's, with its scope.
    found = {
        site: msg["infer"][FUNCTION] for site, msg in sites.items() if is_gp_site(msg) and FUNCTION in msg["infer"]
    }
    functions = {site.rsplit(".", 1)[0]: function for site, function in found.items()}
    if name not in functions:
        raise KeyError(f"the model has no component named {name!r}; it has {sorted(functions)}.")
    return functions[name].posterior()
