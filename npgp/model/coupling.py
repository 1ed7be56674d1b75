"""
What q(ε) follows of the other latent sites; and coupled means, ``q(ε_i | t) = N(m_i + C_i t, S_i)``.

The guide draws the other sites first. t are their unconstrained values, stacked in one vector, each centered and scaled
by what its guide says of it: under Gaussian guides t has mean 0 and standard deviations 1. Given t, q(ε) is the same
distribution as ever with another mean, so all that is in closed form stays so (docs/theory.md, section 11).

Given pseudo-data (pseudo_data.py) t is not scaled.

Which sites t is made of (:class:`Coupling`), what guides say of them (:func:`spreads`), and the mean.

And what the automatic guide knows of a model from one abstract run (:class:`Structure`), names, sizes and shapes, and
no array, with the rows trained on, kept among the parameters where q(ε) is the posterior given these.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)

from npgp.context import context, under
from npgp.contract import Message, base_of, frames, given_by, plate_size, plate_takes_all, unpacked
from npgp.model.gaussians import Gaussians, Site, bijection, sites_beside
from npgp.model.given_rows import Group
from npgp.model.sites import (
    CHOSEN,
    ROWS_TRAINED_ON,
    Hidden,
    data_plates,
    info_of,
    is_gp_site,
    is_inducing,
    is_latent,
    is_observation,
    is_residual,
    name_of,
    observed_sites,
)
from npgp.programs.operations import Operations
from npgp.programs.tracing import is_traced
from npgp.variational.blocks import SCALE_NAMES

#: Where t would have more entries than this,
MANY = 200
#: sites of at most so many entries are taken, if nothing else is said.
FEW = 50

# ---------------------------------------------------------------------------------------------------------------
# What a guide says of a site


@dataclass(frozen=True)
class Spread:
    """
    Where a guide has a site, and how widely spread, in unconstrained space.

    :param unconstrained: the map there.
    :param center: broadcasts with what it returns.
    :param scale: likewise.
    :param standard: whether values so centered and scaled are independent standard normal, but for the correlations of
        :func:`correlations`.
    """

    unconstrained: Callable[[jax.Array], jax.Array]
    center: Any = 0.0
    scale: Any = 1.0
    standard: bool = False

    def standardized(self, value: jax.Array) -> jax.Array:
        """The site's part of t, scaled to standard deviations of 1."""
        return jnp.ravel(self._less_center(value) / self.scale)

    def centered(self, value: jax.Array) -> jax.Array:
        """The site's part of t where it keeps its scale."""
        return jnp.ravel(self._less_center(value))

    def _less_center(self, value: jax.Array) -> jax.Array:
        # Not without the gradients of center and scale, which move in training: m + C t would move with them, unseen by
        # the gradient, and training diverges.
        return self.unconstrained(value) - self.center


def spreads(part: Any, sites: dict[str, Message]) -> dict[str, Spread]:
    """
    What a guide says of its latent sites; those without a spread, such as ``AutoDelta``'s, are left out.

    A site that is Gaussian in unconstrained space is centered and scaled by its mean and standard deviation. Of others,
    such as those of flows, the unconstrained value is taken as it is.

    :param part: the guide.
    :param sites: its trace.
    """
    found: dict[str, Spread] = {}
    for name, site in sites.items():
        if is_latent(site) and not site["fn"].support.is_discrete:
            spread = _of_distribution(name, site["fn"])
            if spread is not None:
                found[name] = spread
    params = {name: site["value"] for name, site in sites.items() if site["type"] == "param"}
    for joint in _latent_vectors(part, params):
        # Its sites have no distributions of their own: they are made of one latent vector.
        center, scale = jnp.zeros(joint.size), jnp.ones(joint.size)
        if joint.posterior is not None:
            center, scale = joint.posterior.mean, jnp.sqrt(joint.posterior.variance)
        scales = joint.unpacked(scale)
        for name, mean in joint.unpacked(center).items():
            inverse = joint.transform(sites[name]).inv
            found[name] = Spread(inverse, mean, scales[name], joint.posterior is not None)
    return found


def _of_distribution(name: str, fn: dist.Distribution) -> Spread | None:
    """From a site's distribution: a normal one, perhaps transformed as autoguides and ``LogNormal`` have it."""
    base, transforms = base_of(fn), []
    while isinstance(base, dist.TransformedDistribution):
        transforms += reversed(base.transforms)
        base = base_of(base.base_dist)
    if isinstance(base, dist.Delta):
        return None
    if isinstance(base, (dist.Normal, dist.MultivariateNormal, dist.LowRankMultivariateNormal)):

        def inverse(value):
            for transform in transforms:
                value = transform.inv(value)
            return value

        return Spread(inverse, base.mean, jnp.sqrt(base.variance), isinstance(base, dist.Normal))
    return Spread(bijection(name, fn).inv)


class LatentVector(NamedTuple):
    """
    A vector that sites are made of.

    :param size: its number of entries.
    :param posterior: its distribution, if that is Gaussian.
    :param unpacked: unconstrained values by site of any vector.
    :param transform: from a site's unconstrained values, given its message.
    """

    size: int
    posterior: dist.Distribution | None
    unpacked: Callable[[jax.Array], dict[str, jax.Array]]
    transform: Callable[[Message], Any]


def _latent_vectors(part: Any, params: dict[str, Any]) -> list[LatentVector]:
    """The latent vectors of a guide."""
    if isinstance(part, Gaussians):
        joint = part.joint
        if not joint.sites:
            return []
        return [LatentVector(joint.size, joint.posterior(params), joint.unpacked, lambda site: site["fn"].transform)]
    if isinstance(part, AutoGuideList):
        return [vector for inner in part for vector in _latent_vectors(inner, params)]
    if not isinstance(part, AutoContinuous):
        return []

    def transform(site: Message) -> Any:
        return biject_to(part.prototype_trace[site["name"]]["fn"].support)

    return [LatentVector(part.latent_dim, _gaussian(part, params), partial(unpacked, part), transform)]


def _gaussian(guide: AutoContinuous, params: dict[str, Any]) -> dist.Distribution | None:
    """The distribution of an autoguide's latent vector, if that is Gaussian."""
    gaussian = (AutoDiagonalNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal)
    # NumPyro would check the factor it has made itself, each operation of it a program.
    with numpyro.validation_enabled(False):
        return guide.get_posterior(params) if isinstance(guide, gaussian) else None


def correlations(parts: Sequence[Any], params: dict[str, Any], sizes: dict[str, int]) -> jax.Array:
    """
    Correlations (T, T) of t, which is made of sites that are :attr:`Spread.standard`.

    :param parts: the guides.
    :param params: trained parameters.
    :param sizes: of each site in t, its number of entries.
    """
    starts, start = {}, 0
    for name, size in sizes.items():
        starts[name], start = start, start + size
    found = jnp.eye(start)
    for vector in (vector for part in parts for vector in _latent_vectors(part, params)):
        posterior = vector.posterior
        if posterior is None or isinstance(posterior, dist.Normal):
            continue
        places = vector.unpacked(jnp.arange(vector.size))
        names = [name for name in places if name in sizes]
        if names:
            of_z = jnp.concatenate([jnp.ravel(places[name]) for name in names])
            of_t = jnp.concatenate([starts[name] + jnp.arange(sizes[name]) for name in names])
            deviation = jnp.sqrt(posterior.variance)
            all_of_z = posterior.covariance_matrix / (deviation[:, None] * deviation)
            found = found.at[of_t[:, None], of_t].set(all_of_z[of_z[:, None], of_z])
    return found


# ---------------------------------------------------------------------------------------------------------------
# Which sites


class Coupling:
    """
    The sites that q(ε) follows, and their values.

    :param names: what the user wants; every site that can be followed if omitted.
    :raises TypeError: if ``names`` is no list of strings.
    :raises ValueError: for an empty list.
    """

    def __init__(self, names: Sequence[str] | None, pseudo_data: bool = False):
        if names is not None:
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise TypeError(f"couple is {names!r}; it must be a list of the names of latent sites.")
            if not names:
                raise ValueError('couple is empty; name a site, or write dependence="independent".')
        self.names = None if names is None else tuple(names)
        #: Whether q(ε) is a posterior given pseudo-data, which follows the kernel.
        self.pseudo_data = pseudo_data
        self._candidates: dict[str, int] = {}
        self._local: dict[str, int] = {}
        self._warned = False
        #: Of each site in t, in the model's order: its number of entries.
        self.sizes: dict[str, int] = {}
        #: Sites in t of whose guide no mean and standard deviation are known.
        self.unknown: list[str] = []

    def look(self, model: Callable, sites: dict[str, Message], args: tuple, kwargs: dict[str, Any]) -> None:
        """
        Find the sites that q(ε) can follow.

        :param model: the model.
        :param sites: its trace.
        :param args: its arguments.
        :param kwargs: its keyword arguments.
        :raises ValueError: for a site that was asked for and cannot be followed.
        """
        members = plate_members(sites)
        plates, sizes = _row_plates(sites, members)
        latent = {n: msg for n, msg in sites.items() if msg["type"] == "sample" and not msg["is_observed"]}
        others = [n for n, msg in latent.items() if not (is_gp_site(msg) or is_observation(msg))]
        after_gp = _with_gp_priors(model, sites, others, args, kwargs)
        wrong: dict[str, str] = {}
        for name in others:
            around = [frame.name for frame in frames(latent[name])]
            of_rows, shape = [plate for plate in around if plate in plates], jnp.shape(latent[name]["value"])
            if latent[name]["fn"].support is None:
                raise TypeError(
                    f"{name} is drawn from a {type(latent[name]['fn']).__name__} whose support is None; it must be a "
                    "constraint, such as numpyro.distributions.constraints.real."
                )
            if latent[name]["fn"].support.is_discrete:
                wrong[name] = "is discrete: q(ε) follows continuous sites"
            elif of_rows:
                wrong[name] = f"is local to the rows of plate {of_rows[0]!r}: q(ε) follows sites that all rows share"
            elif name in after_gp:
                wrong[name] = (
                    f"has a prior that depends on {after_gp[name]}: q(ε) follows sites that do not depend on the GP"
                )
            elif self.names is None and like_rows(shape, [members[p] for p in around], sizes):
                wrong[name] = ""  # likely of rows too; if not, it can be named
        of_rows = [n for n in wrong if not (n in after_gp or latent[n]["fn"].support.is_discrete)]
        self._local = {name: jnp.size(latent[name]["value"]) for name in of_rows}
        self._candidates = {name: jnp.size(latent[name]["value"]) for name in others if name not in wrong}
        for name in self.names or ():
            if name in wrong:
                raise ValueError(f"couple has {name!r}, which {wrong[name]}.")
            if name not in others:
                what = "belongs to a GP" if name in latent else "is no latent site of the model"
                raise ValueError(f"couple has {name!r}, which {what}; it may have {list(self._candidates)}.")

    @property
    def any(self) -> bool:
        """Whether there are sites that q(ε), given by all rows, can follow."""
        return bool(self._candidates or self._local)

    def together(self, by_rows: bool) -> set[str]:
        """
        Sites that one Gaussian is to be for: the smallest, as long as they have few entries together.

        :param by_rows: whether q(ε) is given by all rows, and follows sites that are local to these, too.
        """
        sizes = self._candidates | (self._local if by_rows else {})
        found, size = set(), 0
        for name in sorted(sizes, key=sizes.__getitem__):
            size += sizes[name]
            if size > (MANY if by_rows else FEW):
                break
            found.add(name)
        return found

    def values(self, rest: dict[str, Message], known: dict[str, Spread]) -> jax.Array | None:
        """
        t, from the sites that other guides have drawn; ``None`` if there are none to follow.

        :param rest: these sites.
        :param known: what their guides say of them.
        :raises ValueError: for a site that was asked for and has no spread.
        """
        found = {}
        for name in self._candidates if self.names is None else [n for n in self._candidates if n in self.names]:
            if name in known:
                # A handler outside may give the site another value than its guide has drawn.
                given = given_by(handlers.substitute, name)
                value = rest[name]["value"] if given is None else jnp.asarray(given)
                spread = known[name]
                found[name] = spread.centered(value) if self.pseudo_data else spread.standardized(value)
            elif self.names is not None and name in rest:
                raise ValueError(
                    f"couple has {name!r}, to which {name_of(rest[name]['part'])} gives one value: q(ε) follows sites "
                    "whose guide has a spread."
                )
        if self.names is None and sum(t.size for t in found.values()) > MANY:
            left_out = [name for name, t in found.items() if t.size > FEW]
            found = {name: t for name, t in found.items() if t.size <= FEW}
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"q(ε) does not follow {left_out}, of more than {FEW} entries in a model of more than {MANY} "
                    "beside the GPs: name what it is to follow, AutoSparseGP(model, couple=[...]), or write "
                    'dependence="independent".',
                    UserWarning,
                    stacklevel=2,
                )
        self.sizes = {name: t.size for name, t in found.items()}
        self.unknown = [name for name in found if not known[name].standard]
        return jnp.concatenate(list(found.values())) if found else None


def like_rows(shape: tuple[int, ...], members: Sequence[int], sizes: set[int], beyond: int = FEW) -> bool:
    """Whether a site has as many members as there are rows: in its plates, or, of more, in a scan or an event."""
    return any(size in sizes for size in members) or any(size in sizes and size > beyond for size in shape)


def plate_members(sites: dict[str, Message]) -> dict[str, int]:
    """Of each plate, its number of members; a plate that was made outside the model is known by its frames alone."""
    statements = [msg for msg in sites.values() if msg["type"] != "plate"]
    found = {frame.name: frame.size for msg in statements for frame in frames(msg)}
    return found | {name: plate_size(msg) for name, msg in sites.items() if msg["type"] == "plate"}


def _row_plates(sites: dict[str, Message], members: dict[str, int]) -> tuple[set[str], set[int]]:
    """Names of the plates over rows of data, and numbers of these rows; plates of which a part is drawn are such."""
    names = {name for name, msg in sites.items() if msg["type"] == "plate" and not plate_takes_all(msg)}
    sizes: set[int] = set()
    for msg in sites.values():
        # Residuals are npgp's latent sites, too, and no inducing values.
        if is_observation(msg) or is_residual(msg):
            around = [frame.name for frame in frames(msg) if frame.dim == -1]
            names |= set(around)
            sizes |= {members[name] for name in around} or set(jnp.shape(msg["value"])[-1:])
    return names, sizes


def _with_gp_priors(
    model: Callable, sites: dict[str, Message], names: Sequence[str], args: tuple, kwargs: dict[str, Any]
) -> dict[str, str]:
    """
    Sites whose prior depends on a GP, each with the site of inducing values that it depends on.

    If q(ε) followed such a site, the divergence of the site's guide from its prior would not be one given ε, as which
    ``TraceMeanField_ELBO`` takes it: the ELBO would be wrong without a word.
    """
    inducing = {name: msg["value"] for name, msg in sites.items() if is_inducing(msg)}
    order = list(sites)
    if not inducing or not any(order.index(name) > order.index(next(iter(inducing))) for name in names):
        return {}

    def priors(*values):
        given = handlers.substitute(model, data=dict(zip(inducing, values, strict=True)))
        with Hidden(), handlers.trace() as traced, handlers.seed(rng_seed=0), under(unseen=True):
            given(*args, **kwargs)
        return {name: jax.tree.leaves(traced[name]["fn"]) for name in names}

    operations = Operations(priors, *(jnp.zeros(value.shape, value.dtype) for value in inducing.values()))
    found = {}
    for name in names:
        depends = operations.part(name)[0]
        if depends:
            found[name] = list(inducing)[min(depends)]
    return found


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
    Arguments of a model that have arrays or are whole numbers (of all rows, say), by name, as they were in training.

    :param model: the model.
    :param arguments: these; ``None`` where parameters have none.
    """

    def __init__(self, model: Callable, arguments: Mapping[str, Any] | None):
        self._signature, self.arguments = inspect.signature(model), arguments

    @classmethod
    def of_call(cls, model: Callable, args: tuple, kwargs: dict[str, Any]) -> TrainedRows:
        """Those of a call."""
        call = inspect.signature(model).bind(*args, **kwargs).arguments
        numbers = {n: np.asarray(v) for n, v in call.items() if isinstance(v, int) and not isinstance(v, bool)}
        arrays = {n: v for n, v in call.items() if any(hasattr(x, "shape") for x in jax.tree.leaves(v))}
        return cls(model, arrays | numbers)

    @classmethod
    def given(cls, model: Callable) -> TrainedRows:
        """Those among the parameters that ``substitute`` gives here."""
        return cls(model, given_by(handlers.substitute, ROWS_TRAINED_ON))

    def in_call(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """A call's arguments with these in the place of its own; its own number where that of training is traced."""
        call = self._signature.bind_partial(*args, **kwargs)
        for name, value in (self.arguments or {}).items():
            if not isinstance(call.arguments.get(name), int):
                call.arguments[name] = value
            elif not is_traced(value):
                call.arguments[name] = int(value)
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
