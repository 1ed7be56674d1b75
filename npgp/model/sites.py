"""
The sites of this library in a NumPyro model: what marks them, how q reaches the model, and what handlers ask of them.

How q reaches the model. A guide samples the sites of a component's inducing values from q, and puts q in each site's
``infer`` dict; NumPyro's ``replay``, under which ``SVI`` runs the model, copies that dict from guide to model. So in
the model ``draw`` finds q there under SVI, and does not find it under NUTS or ``Predictive``. With q at hand a
statement stands for its share of the ELBO; without, for the generative model. Nothing variational is declared in the
model, which is complete by itself.

And how the automatic guide runs a model as a guide, with sites that other guides have sampled (:class:`Rerun`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import Distribution, biject_to
from numpyro.infer import Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO

from npgp import checks
from npgp.conditionals import Conditional
from npgp.context import context
from npgp.contract import (
    Handler,
    Message,
    base_of,
    copy_rows,
    frames,
    given_by,
    is_auxiliary,
    is_enumerated,
    is_in_stein_vi,
    losses_around,
    mask_of,
    name_here,
    plate_of_rows,
    plate_size,
    plate_takes_all,
    plates_around,
    random_key,
    replayed,
    take_all,
)

#: The key of a site's ``infer`` dict, the only one of this library's, whose value is a :class:`SiteInfo`.
INFO = "npgp"


@dataclass(frozen=True, eq=False)
class SiteInfo:
    """
    What a site is: inducing values, the noise that a residual is sampled with, or observations of GP values.

    :param kind: of inducing values, the covariance that q has; ``None`` for other sites.
    :param q: of inducing values, in a guide, and in the model under SVI.
    :param whitened: whether the parameters of q are those of whitened values.
    :param function: the draw that inducing values belong to, for the model to share with the automatic guide, and for
        :func:`npgp.posterior`; ``None`` in guides by hand.
    :param substituted: whether ``substitute`` gave the value in guide or model.
    :param latents: the GP values that a statement is about, for the automatic guide to see which components meet.
    :param value: of a residual's noise, the GP values that the automatic guide has computed from it.
    :param likelihood: of observations.
    :param mask: likewise.
    :param conditional: likewise; ``None`` for other sites.
    """

    kind: Any = None
    q: Any = None
    whitened: bool = True
    function: Any = None
    substituted: bool = False
    latents: Any = None
    value: Any = None
    likelihood: Any = None
    mask: Any = None
    conditional: Conditional | None = None


#: What every other site is.
NO_INFO = SiteInfo()

#: The entry of trained parameters that has the rows trained on, where q(ε) is the posterior given these.
ROWS_TRAINED_ON = "auto_rows"

#: Marks, in its keywords, a ``param`` statement of inducing points that were chosen from rows.
CHOSEN = "npgp.chosen"

# Keys of the message of a row table's ``param`` statement.

#: The numbers of the rows wanted.
ROWS = "npgp.rows"
#: Whether the value is these rows alone.
GATHERED = "npgp.gathered"


def conditional_parameter(name: str, conditional: Conditional) -> jax.Array | None:
    """Declare the parameter that the conditional of a statement learns, if it has one."""
    if conditional.parameter is None:
        return None
    suffix, start, constraint = conditional.parameter
    return numpyro.param(f"{name}.{suffix}", start, constraint=constraint)


def info_of(msg: Message) -> SiteInfo:
    """What a message says of its site."""
    return (msg.get("infer") or {}).get(INFO, NO_INFO)


def is_gp_site(msg: Message) -> bool:
    """Whether a message is one of this library's latent sites, which a guide for the rest of the model leaves out."""
    return msg["type"] == "sample" and (info := info_of(msg)) is not NO_INFO and info.conditional is None


def is_inducing(msg: Message) -> bool:
    """Whether a site has the inducing values of a draw, or a block of them."""
    return msg["type"] == "sample" and info_of(msg).kind is not None


def is_residual(msg: Message) -> bool:
    """Whether a site has the noise that a residual is sampled with."""
    return is_gp_site(msg) and not is_inducing(msg)


def is_observation(msg: Message) -> bool:
    """Whether a message is an observation of GP values, which is no latent site even where no data are given."""
    return msg["type"] == "sample" and info_of(msg).conditional is not None


class Catch(Handler):
    """Keeps the message of the statement it encloses, which every handler then completes."""

    def __init__(self, type: str):
        super().__init__()
        self.type = type
        self._seen: list[Message] = []

    def process_message(self, msg):
        if msg["type"] == self.type:
            self._seen.append(msg)

    @property
    def message(self) -> Message:
        """The first, as ``do`` states a copy; but the last where ``reparam`` made something else of that."""
        return self._seen[0] if self._seen[0]["type"] == self.type else self._seen[-1]


def in_automatic_guide() -> bool:
    """Whether the model runs as the guide of :class:`npgp.AutoSparseGP`."""
    return context().followed is not None


class Followed(NamedTuple):
    """
    What q(ε) follows.

    :param t: values of other sites, (T,), that its mean, or that given by pseudo-data, is affine in; ``None`` if none.
    :param pseudo_data: whether it is a posterior given pseudo-data, which follows the kernel's hyperparameters.
    """

    t: jax.Array | None = None
    pseudo_data: bool = False


#: q(ε) is independent of all else.
NOTHING = Followed()


def followed() -> Followed:
    """What q(ε) follows in the automatic guide, if this is one."""
    return context().followed or NOTHING


def shared_part(site: str) -> Any:
    """In the automatic guide, a block's part of a q that it shares with others; ``None`` if it has its own."""
    shared = context().shared
    return shared.get(name_here(site)) if shared else None


def approximation(site: str, msg: Message) -> Any:
    """
    What the guide's site had for q; ``None`` without a guide that has it, and for a value that ``do`` or ``condition``
    fixes.

    :param site: the site's name where it is stated, which handlers such as ``scope`` may change.
    :param msg: its message.
    :raises ValueError: if ``substitute`` gives the model a value that is lost to the guide's, and for a guide that does
        not draw the site.
    :raises RuntimeError: if the guide has q, and the model is given the guide's value without it.
    """
    if msg["is_observed"]:
        return None
    q, source, value = info_of(msg).q, replayed(site), given_by(handlers.substitute, site)
    if source == {} and value is None and losses_around():
        raise ValueError(
            f"{msg['name']} is not drawn by the guide; it must draw what the model draws: call the component's "
            "guide() in it, or take npgp.AutoSparseGP(model)."
        )
    if value is not None:
        msg["infer"][INFO] = replace(info_of(msg), substituted=True)
    if source is not None and info_of(source).q is not None:
        if value is not None and msg["value"] is not value:
            raise ValueError(lost(msg["name"]))
        if q is None:
            raise RuntimeError(
                f"{msg['name']} has the guide's value but not the guide's q, so training would maximize another "
                "density than the ELBO: NumPyro's replay should copy the infer dict of each site from guide to model "
                "(npgp.contract.replayed); check which NumPyro this is, and what handlers are between model and SVI."
            )
    return q


def lost(name: str) -> str:
    """The error of a value that would change nothing."""
    return (
        f"{name} is given a value by handlers.substitute, which SVI would not heed, for training takes all of q and "
        "not a draw of it: to fix the value in the model use handlers.do, or handlers.condition."
    )


def fixed_beside(site: str, msg: Message) -> bool:
    """Whether a site has a fixed value, by ``do`` or ``condition``, in a model for which the guide has q of it."""
    source = replayed(site) if msg["is_observed"] else None
    return source is not None and info_of(source).q is not None


#: Losses that are minus an expectation of log densities.
_EXPECTATIONS = (Trace_ELBO, TraceMeanField_ELBO, TraceGraph_ELBO, TraceEnum_ELBO)


def is_expectation(losses: Sequence[Any]) -> bool:
    """Whether losses are all minus an expectation of log densities."""
    return all(isinstance(loss, _EXPECTATIONS) for loss in losses)


def check_loss(name: str, states: str) -> None:
    """
    Raise ``ValueError`` under a loss of NumPyro that is no expectation of log densities, such as ``RenyiELBO``.

    :param name: the statement's name.
    :param states: what it stands for instead of a density.
    """
    for loss in losses_around():
        if not is_expectation([loss]):
            raise ValueError(
                f"{name} stands for {states}, whose exponential is no density, as {type(loss).__name__} supposes: use "
                "TraceMeanField_ELBO, Trace_ELBO or TraceGraph_ELBO, with several particles if wanted."
            )


def _is_bad(x: Any) -> bool:
    """Whether a number or an array of numbers has values, and one of them is NaN or infinite."""
    numbers = isinstance(x, float) or (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact))
    return numbers and not checks.is_traced(x) and not np.all(np.isfinite(np.asarray(x)))


def trained(params: Any) -> Mapping[str, Any]:
    """
    Trained parameters as they are.

    :raises TypeError: for what is no dictionary of arrays by name.
    :raises ValueError: for NaN and infinities in them.
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params is {checks.shown(params)}; it must be the dictionary of trained parameters, result.params of "
            "npgp.fit or svi.get_params(state)."
        )
    for name, value in params.items():  # of a network a tree, with whatever is in it
        if name != ROWS_TRAINED_ON and any(_is_bad(leaf) for leaf in jax.tree.leaves(value)):
            raise ValueError(
                f"params has NaN or infinities in {name!r}; it must have numbers: train again with a smaller learning "
                "rate, or take the parameters of an earlier state."
            )
    return params


def traced_inside(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same parameters, traced inside a program: NumPyro looks at others' values, each look a program of its own."""

    def put(x: Any) -> Any:
        return jax.device_put(x) if isinstance(x, (float, np.ndarray, jax.Array)) else x

    # The rows trained on stay as they are, as the arguments of the call do: they may be compared.
    return {name: x if name == ROWS_TRAINED_ON else jax.tree.map(put, x) for name, x in params.items()}


class Trained(handlers.substitute):
    """
    Gives parameters their trained values.

    :param params: trained parameters by name.
    :raises TypeError: for what is no dictionary.
    :raises ValueError: for NaN and infinities in them.
    :raises KeyError: from the statement of a parameter that has no value among them, nor by a handler inside.
    """

    def __init__(self, fn: Any, params: Mapping[str, Any]):
        super().__init__(fn, data=trained(params))

    def process_message(self, msg):
        super().process_message(msg)
        if msg["type"] == "param" and msg["value"] is None:
            raise KeyError(
                f"params has no {msg['name']!r}; it must have all trained parameters, svi.get_params(state). A new "
                "guide takes observations that are left out for latent: give it these, too."
            )


def is_scaled(msg: Message) -> bool:
    """Whether a statement's density counts more or less than once, as in a plate with a part of its rows, or may do."""
    scale = msg["scale"]
    return scale is not None and (checks.is_traced(scale) or bool(np.any(np.asarray(scale) != 1.0)))


def check_draw_context(site: str, msg: Message) -> None:
    """Raise ``ValueError`` if a site is drawn where handlers around, or ``SteinVI``, would change the prior of f."""
    if is_in_stein_vi():
        raise ValueError(
            f"{site} is drawn under SteinVI, which scales log densities by its loss_temperature, the prior of f among "
            "them: use SVI(model, guide, optimizer, TraceMeanField_ELBO()), or NUTS."
        )
    rows = [frame.name for frame in frames(msg) if frame.dim == -1]
    if rows:
        raise ValueError(
            f"{site} is drawn inside plate {rows[0]!r} at dim=-1, which is the dimension of rows: draw f outside it, "
            "and put plates over functions at dim=-2 or below."
        )
    mask = mask_of(msg["fn"])
    masked = mask is not True and mask is not False
    if masked or is_scaled(msg):
        cause = "handlers.mask" if masked else "a subsampled plate or handlers.scale"
        raise ValueError(f"{site} is drawn inside {cause}, which would change the prior of f: draw f outside it.")


# ---------------------------------------------------------------------------------------------------------------
# Plates over rows and over functions


def plate(name: str, size: int, rows: ArrayLike | int | None = None, dim: int | None = None) -> numpyro.plate:
    """
    The plate over rows when minibatches are passed to the model as arguments:

    .. code-block:: python

        def model(X, y=None, *, size):
            with npgp.plate("data", size, rows=X.shape[0]):
                npgp.observe("y", f(X), likelihood, obs=y)

    Log densities inside are scaled by ``size / batch size``, as in ``numpyro.plate(subsample_size=…)``, but no indices
    are drawn.

    :param name: name of the plate.
    :param size: number of rows of the whole data set.
    :param rows: the row numbers of this batch, (B,), which ``with`` returns; or B alone, where the model needs no row
        numbers. All rows if omitted.
    :param dim: the plate's dimension; the rightmost free one if omitted.
    :raises TypeError: if ``size``, or a row's number, is no whole number.
    :raises ValueError: for an empty batch, or one larger than the data, and for rows that the data do not have.
    """
    size = checks.whole_number(size, f"plate {name!r}: size")
    if rows is None:
        return numpyro.plate(name, size, dim=dim)
    what = f"plate {name!r}: rows"
    if np.ndim(rows) == 0:
        must_be = f"the rows of a batch, between 1 and {size}, or their numbers"
        return plate_of_rows(name, size, jnp.arange(checks.whole_number(rows, what, most=size, must_be=must_be)), dim)
    if not 0 < np.shape(rows)[0] <= size:
        raise ValueError(f"plate {name!r}: the batch has {np.shape(rows)[0]} rows; it must have between 1 and {size}.")
    indices = jnp.asarray(checks.row_numbers(rows, what, size))
    return plate_of_rows(name, size, indices, dim)


def plate_shape() -> tuple[int, ...]:
    """Shape of the plates around."""
    sizes = {plate.dim: plate.subsample_size for plate in plates_around()}
    return tuple(sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0))


def check_plates(name: str, shape: tuple[int, ...], repeated: bool = False) -> None:
    """
    Raise ``ValueError`` if a plate around has another size than the values.

    :param repeated: whether values may be repeated for all members of a plate.
    """
    for around in plates_around():
        size = shape[around.dim] if -around.dim <= len(shape) else 1
        if size == 1 < around.subsample_size:
            if repeated:
                continue
            raise ValueError(
                f"{name} has GP values of shape {shape}, which plate {around.name!r} at dim={around.dim} would repeat "
                f"{around.subsample_size} times: state it outside that plate, or draw f in it (rows are at dim=-1, "
                "functions at dim=-2 and below)."
            )
        if size != around.subsample_size:
            batch = " (for batches passed as arguments there is npgp.plate)" if around.dim == -1 else ""
            raise ValueError(
                f"{name} has GP values of shape {shape}, but plate {around.name!r} at dim={around.dim} has "
                f"{around.subsample_size} members{batch}."
            )


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
        if msg["type"] == "sample" and msg["value"] is None and type(base_of(msg["fn"])).sample is Distribution.sample:
            # An ImproperUniform, say, has no draws: it is at 0 in unconstrained space.
            fn = msg["fn"]
            to_support = biject_to(fn.support)
            msg["value"] = to_support(jnp.zeros(to_support.inverse_shape(fn.shape(msg["kwargs"]["sample_shape"]))))


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
