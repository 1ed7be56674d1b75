"""
What the automatic guide knows of a model from one abstract run: names, sizes and shapes, and no array; and the rows
trained on, kept among the parameters where q(ε) is the posterior given these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from npgp.context import context
from npgp.contract import Message, frames, given_by
from npgp.model.coupling import like_rows, plate_members
from npgp.model.gaussians import Site, bijection, sites_beside
from npgp.model.given_rows import Group
from npgp.model.rerun import data_plates, observed_sites
from npgp.model.sites import CHOSEN, ROWS_TRAINED_ON, info_of, is_gp_site, is_inducing, is_observation
from npgp.programs.tracing import is_traced
from npgp.variational.blocks import SCALE_NAMES


@dataclass(frozen=True)
class Structure:
    """
    A model's sites, as they were at a guide's first call.

    :param whitened: of each whitened site, whether the parameters of q are those of whitened values.
    :param scales: likewise, the suffix of the parameter that is q's scale.
    :param others: the latent sites beside the GPs, in the model's order.
    :param local: of those in plates over rows of data, the plate.
    :param observed: what is observed, each with its plates.
    :param like_rows: latent sites with as many members as there are observations, with their shapes.
    :param without_bijection: sites that no autoguide can have, each with an error.
    :param beside: what a guide has to know of the other sites, where it is npgp's own.
    :param chosen: the parameters that are inducing points chosen from rows.
    :param by_rows: the components whose q(ε) is given by rows, in groups that share one.
    """

    whitened: Mapping[str, bool]
    scales: Mapping[str, str | None]
    others: tuple[str, ...]
    local: Mapping[str, str]
    observed: Mapping[str, set[str]]
    like_rows: Mapping[str, tuple[int, ...]]
    without_bijection: Mapping[str, str]
    beside: Sequence[Site]
    chosen: tuple[str, ...]
    by_rows: Sequence[Group]

    @classmethod
    def of(cls, sites: dict[str, Message], by_rows: Sequence[Group], own: bool) -> Structure:
        """
        The structure of a model.

        :param sites: its trace.
        :param by_rows: the components whose q(ε) is given by rows.
        :param own: whether the guide of the other sites is npgp's own.
        """
        latent = {n: msg for n, msg in sites.items() if msg["type"] == "sample" and not msg["is_observed"]}
        whitened = {n: info_of(msg).whitened for n, msg in latent.items() if is_inducing(msg)}
        others = tuple(n for n, msg in latent.items() if not (is_gp_site(msg) or is_observation(msg)))
        without_bijection = {}
        for name in others:
            try:
                if not getattr(latent[name]["fn"].support, "is_discrete", False):
                    bijection(name, latent[name]["fn"])
            except ValueError as error:  # which a guide by hand may not mind
                without_bijection[name] = str(error)
        plates, observed = data_plates(sites), observed_sites(sites)
        return cls(
            whitened,
            {name: SCALE_NAMES.get(info_of(latent[name]).kind) for name in whitened},
            others,
            {name: frame.name for name in others for frame in frames(latent[name]) if frame.name in plates},
            observed,
            _like_rows(sites, set(observed), set(others)),
            without_bijection,
            sites_beside(sites, others) if own else (),
            tuple(n for n, msg in sites.items() if msg["type"] == "param" and CHOSEN in msg["kwargs"]),
            by_rows,
        )

    def unknown_rows(self, sites: dict[str, Message], new: bool) -> UnknownRows:
        """
        The sites of which an autoguide has no values for the rows at hand: where nothing in their plate is observed, as
        under ``Predictive``, rows are new, and the model draws these sites from the prior.

        :param sites: the model's trace with the arguments at hand.
        :param new: whether this is the guide's first call.
        :raises ValueError: if it is, as the autoguide would take these rows for those of its parameters.
        """
        observed = observed_sites(sites)
        left_out: set[str] = set()
        taken: set[str] = set()
        unclear: dict[str, str] = {}
        for name, plate in sorted(self.local.items()):
            now, before = ({n for n, plates in of.items() if plate in plates} for of in (observed, self.observed))
            if new and not now:
                raise ValueError(
                    f"{name!r} is local to the rows of plate {plate!r}, and this guide was not yet called with "
                    "the rows that it was trained on: call guide.sample_posterior(key, params, ...) with these and "
                    "their observations first."
                )
            # f alone needs none of them.
            if not now or (before - now and context().unseen):
                left_out |= {name, plate}
            elif before - now:
                unclear[name] = (
                    f"{name!r} is local to the rows of plate {plate!r}, of which {sorted(now)} is observed and "
                    f"{sorted(before - now)} is not, and an autoguide knows the rows trained on alone: for these write "
                    "Predictive(model, guide.sample_posterior(key, params, ...)), the latter with all observations; "
                    f"for new ones give none, or write a guide of {name!r} by hand, an encoder of what is observed."
                )
            elif not context().unseen:
                taken.add(name)
        alike = _like_rows(sites, self.observed.keys() & sites.keys() - observed.keys(), set(self.like_rows))
        perhaps = {name for name, _ in alike.items() & self.like_rows.items()}
        return UnknownRows(left_out, unclear, perhaps - left_out - unclear.keys(), taken)


class UnknownRows(NamedTuple):
    """The sites of which an autoguide may have values for other rows than those at hand."""

    #: Left to the model's prior; with their plates.
    left_out: set[str]
    #: Local to rows that may be old or new, each with an error.
    unclear: dict[str, str]
    #: Perhaps local to rows, which may be new.
    perhaps: set[str]
    #: Local to rows that are taken for those trained on, as all of their observations are there.
    taken: set[str]


def _like_rows(sites: dict[str, Message], observations: set[str], names: set[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of those of the latent sites that have as many members as some observations."""
    members = plate_members(sites)
    sizes: set[int] = set()
    for msg in (sites[name] for name in observations):
        of_plates = {members[frame.name] for frame in frames(msg) if frame.dim == -1}
        sizes |= of_plates or set(jnp.shape(msg["value"])[-1:])
    around = {name: [members[frame.name] for frame in frames(sites[name])] for name in names}
    shapes = {name: jnp.shape(sites[name]["value"]) for name in names}
    return {name: shape for name, shape in shapes.items() if like_rows(shape, around[name], sizes, beyond=1)}


class TrainedRows:
    """
    Arguments of a model that have arrays, by name, as they were in training.

    :param model: the model.
    :param arguments: these; ``None`` where parameters have none.
    """

    def __init__(self, model: Callable, arguments: Mapping[str, Any] | None):
        self._signature, self.arguments = inspect.signature(model), arguments

    @classmethod
    def of_call(cls, model: Callable, args: tuple, kwargs: dict[str, Any]) -> TrainedRows:
        """Those of a call."""
        call = inspect.signature(model).bind(*args, **kwargs).arguments
        return cls(model, {n: v for n, v in call.items() if any(hasattr(x, "shape") for x in jax.tree.leaves(v))})

    @classmethod
    def given(cls, model: Callable) -> TrainedRows:
        """Those among the parameters that ``substitute`` gives here."""
        return cls(model, given_by(handlers.substitute, ROWS_TRAINED_ON))

    def in_call(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """A call's arguments with these in the place of its own."""
        call = self._signature.bind_partial(*args, **kwargs)
        call.arguments |= self.arguments or {}
        return call.args, call.kwargs

    def unlike(self, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """The name of an argument with observations, which may be ``None``, that are known to be others in a call."""
        stored, call = self.arguments or {}, self._signature.bind(*args, **kwargs).arguments
        for name in stored.keys() & call.keys():
            before, now = stored[name], call[name]
            arrays = all(hasattr(x, "shape") and not is_traced(x) for x in (before, now))
            if not arrays or self._signature.parameters[name].default is not None or before.shape != now.shape:
                continue
            before, now = np.asarray(before), np.asarray(now)
            if not np.array_equal(before, now.astype(before.dtype), equal_nan=before.dtype.kind == "f"):
                return name
        return None
