"""How the automatic guide runs a model as a guide, with sites that other guides have sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from npgp import checks
from npgp.contract import (
    Handler,
    Message,
    copy_rows,
    frames,
    is_auxiliary,
    is_enumerated,
    plate_size,
    plate_takes_all,
    random_key,
    take_all,
)
from npgp.model.sites import is_gp_site, is_observation, is_residual


class SameRows(Handler):
    """Plates take the rows that other guides drew for them."""

    def __init__(self, fn: Callable, sites: dict[str, Message]):
        super().__init__(fn)
        self.sites = sites

    def process_message(self, msg):
        site = self.sites.get(msg.get("name"))
        if msg["type"] != "plate" or site is None or site["type"] != "plate":
            return
        if plate_size(msg) != plate_size(site):
            self._refuse_other_rows(msg, site)
        if not plate_takes_all(msg):
            _check_same_rows(msg, site)
        copy_rows(msg, site)

    def _refuse_other_rows(self, msg: Message, site: Message) -> None:
        name = msg["name"]
        local = [n for n, s in self.sites.items() if s["type"] == "sample" and name in {f.name for f in frames(s)}]
        raise ValueError(
            f"plate {name!r} has {plate_size(msg)} members, but {plate_size(site)} in {name_of(site['part'])}, the "
            f"guide that samples {local}: these are of the rows trained on. Leave out observations of new rows, for "
            "which an autoguide's sites in their plate are drawn from the prior; a guide by hand must take rows from "
            "the arguments."
        )


def _check_same_shape(msg: Message, site: Message) -> None:
    """Raise ``ValueError`` for a value of other rows than the model has."""
    shape, wanted = jnp.shape(site["value"]), msg["fn"].shape(msg["kwargs"].get("sample_shape", ()))
    try:
        fits = np.broadcast_shapes(shape, wanted) == wanted
    except ValueError:
        fits = False
    if not (fits or is_enumerated(msg)):
        raise ValueError(
            f"{msg['name']} has shape {shape} in {name_of(site['part'])}, but {wanted} in the model with these "
            "arguments: if it is local to rows, sample it in the plate over rows, and leave out observations of new "
            "rows, which have theirs from the prior."
        )


def _check_same_rows(msg: Message, site: Message) -> None:
    given = msg["value"]
    same = given is None or given is site["value"]
    if not same and not (checks.is_traced(given) or checks.is_traced(site["value"])):
        same = np.array_equal(given, site["value"])
    if not same:
        raise ValueError(
            f"plate {msg['name']!r} takes its rows from the model's arguments, but the guide for other latent sites "
            "drew rows of its own: give that guide the same plate, with create_plates if it is an autoguide."
        )


class Hidden(Handler):
    """
    Hides sites, as ``handlers.block`` does; but it asks for their random keys by their names, where that asks without
    one, at which a ``hide_fn`` of a user's that looks at names stumbles.

    :param fn: the model.
    :param hides: of a message, whether it is hidden; all are if omitted.
    """

    def __init__(self, fn: Callable | None = None, hides: Callable[[Message], bool] = lambda message: True):
        super().__init__(fn)
        self.hides = hides

    def process_message(self, msg):
        if msg["type"] == "prng_key" or not self.hides(msg):
            return
        msg["stop"] = True
        keyed = msg["type"] in ("sample", "plate", "control_flow")
        if keyed and msg["value"] is None and msg["kwargs"]["rng_key"] is None:
            msg["kwargs"]["rng_key"] = random_key(msg.get("name", "scan"))  # NumPyro's scan has none


class AllRows(Handler):
    """Plates that would draw a subsample take all rows."""

    def process_message(self, msg):
        if msg["type"] == "plate" and msg["value"] is None:
            take_all(msg)


class Rerun(SameRows):
    """
    Runs the model as a guide: components sample from q(ε), and every other latent site has the distribution and value
    that another guide gave it. So sites come in the model's order.

    :param fn: the model.
    :param sites: what other guides have sampled.
    :param values: of components' blocks that were drawn before, by site.
    """

    def __init__(self, fn: Callable, sites: dict[str, Message], values: Mapping[str, Any] | None = None):
        super().__init__(fn, sites)
        self._values = values or {}
        self.latent: set[str] = set()  # the sites that others have to cover

    def process_message(self, msg):
        super().process_message(msg)
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        site = self.sites.get(msg["name"])
        if is_gp_site(msg):
            if site is not None:
                raise ValueError(
                    f"{msg['name']} is sampled by the guide for the other sites, but belongs to a SparseGP: let that "
                    "guide leave it out (an autoguide's class is made for the right sites), or write all by hand."
                )
            if msg["name"] in self._values:
                msg["value"], msg["intermediates"] = self._values[msg["name"]], []
        elif not (is_observation(msg) or is_enumerated(msg)):
            self.latent.add(msg["name"])
        if site is not None and site["type"] == "sample":
            _check_same_shape(msg, site)
            # No intermediates: a handler outside may put another value in the place of this one.
            msg["value"], msg["fn"], msg["intermediates"] = site["value"], site["fn"], []
            msg["infer"] = {**msg["infer"], **site["infer"]}


def data_plates(sites: Mapping[str, Message]) -> set[str]:
    """
    Names of the plates over rows of data: those at dim −1 around statements about GP values, and around other
    observations of as many rows as these have.

    :param sites: a model's trace.
    """
    names: set[str] = set()
    sizes: set[int] = set()
    for msg in sites.values():
        if is_observation(msg) or is_residual(msg):
            names |= {frame.name for frame in frames(msg) if frame.dim == -1}
            sizes |= set(jnp.shape(msg["value"])[-1:])
    for msg in sites.values():
        if msg["type"] == "sample" and msg["is_observed"]:
            names |= {frame.name for frame in frames(msg) if frame.dim == -1 and frame.size in sizes}
    return names


def observed_sites(sites: Mapping[str, Message]) -> dict[str, set[str]]:
    """Of each site that is observed, the names of its plates."""
    observed = ((n, m) for n, m in sites.items() if m["type"] == "sample" and m["is_observed"] and not is_auxiliary(m))
    return {name: {frame.name for frame in frames(msg)} for name, msg in observed}


def name_of(part: Any) -> str:
    """What messages call a guide."""
    return getattr(part, "__name__", None) or type(part).__name__


def is_latent(site: Message) -> bool:
    """Whether a guide's site stands for one of the model."""
    return site["type"] == "sample" and not (site["is_observed"] or is_auxiliary(site))


def check_cover(rest: dict[str, Message], latent: set[str]) -> None:
    """Raise ``ValueError`` unless the guides for other sites sample the model's latent sites, and these alone."""
    sampled = {name: site["part"] for name, site in rest.items() if site["type"] == "sample"}
    for name in sorted(set(sampled) - latent):
        raise ValueError(
            f"{name_of(sampled[name])}, a guide for other sites, samples {name!r}, which is not a latent site of the "
            "model: was it made for another one, or first called without observations?"
        )
    for name in sorted(latent - set(sampled)):
        raise ValueError(
            f"no guide covers the latent site {name!r}: sample it in the guide for the other sites, or let an "
            "autoguide have what is left, guide=[..., AutoNormal]."
        )


def is_no_parameter(msg: Message) -> bool:
    """All that a run inside another hides: parameters are as handlers around both say."""
    return msg["type"] not in ("param", "mutable")


def is_restated(msg: Message) -> bool:
    """What another guide states and the rerun states again: latent sites, but for auxiliary ones."""
    if msg["type"] == "sample":
        return not is_auxiliary(msg)
    # Plates stay visible, so that handlers outside choose the same rows for both.
    return msg["type"] == "deterministic"
