"""
Draws of a model with everything ArviZ wants of it: ``InferenceData``, or a ``DataTree`` since ArviZ 1.0.

The one thing here that needs thought is the pointwise log likelihood. LOO and WAIC need log p(y_n | draw) where the y_n
are independent given the draw. That is the density of ``observe`` without a guide, given ε. The terms of an ELBO are
no such thing; nor is the density of y_n under a posterior of f that has seen y_n, as ``CollapsedGP`` knows it, whose
LOO would be the fit to the training data. For ``CollapsedGP`` each draw is therefore completed by ε ~ q(ε | y), after
which its rows are those of ``observe``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax
from numpyro import handlers
from numpyro.infer import MCMC

from npgp import checks
from npgp.collapsed.collapsed_gp import CollapsedGP
from npgp.contract import Handler, Message, base_of, frames, mask_of, plate_size, was_observed
from npgp.model.draw import Moments
from npgp.model.observation import LatentObservation
from npgp.model.posteriors import function_in
from npgp.model.sites import Hidden, is_gp_site
from npgp.programs.compiled import STEPS, one_program
from npgp.variational.blocks import whitened_mean

#: In ``infer`` of an observed site: its rows were one event, and are a dimension of the batch that no plate counts.
ROWS_OF_EVENT = "rows_of_event"
#: ArviZ's names of NumPyro's extra fields.
STATISTICS = {
    "potential_energy": "lp",
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}


def to_arviz(
    rng_key: jax.Array,
    model: Callable,
    samples: MCMC | Mapping[str, Any],
    *args,
    params: Mapping[str, Any] | None = None,
    batch_ndims: int = 1,
    num_prior: int | None = None,
    posterior_predictive: bool = True,
    log_likelihood: bool = True,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    functions: Mapping[str, Any] | None = None,
    convergence: Any = None,
    **kwargs,
) -> Any:
    """
    Draws from a posterior, of MCMC or SVI, for ArviZ::

        npgp.to_arviz(key, model, mcmc, X, y)

        draws = guide.sample_posterior(key, params, X, y, sample_shape=(1000,))
        npgp.to_arviz(key, model, draws, X, y, params=params)
        npgp.to_arviz(key, model, draws, X, y, params=params, functions={"f": X_new})    with f at X_new

    ========================  ====================================================================================
    ``posterior``             the draws, and the model's deterministic sites
    ``sample_stats``          what MCMC collected (``extra_fields`` of its ``run``)
    ``log_likelihood``        of the data, one value for each entry of y: see below
    ``posterior_predictive``  new data at the model's arguments, the observations given up
    ``observed_data``         the data
    ``prior``                 if ``num_prior`` is given
    ``prior_predictive``      likewise
    ========================  ====================================================================================

    The log likelihood is that of the data given a draw, ``log ∫ p(y_n|f_n) N(f_n; A_nᵀε, d_n) df_n`` where
    ``observe`` integrates f out, with every conditional. It is not a term of the bound: the values do not sum to the
    ELBO. LOO and WAIC are right for draws from the posterior under this density, which is NUTS's. Draws of SVI, or of
    ε ~ q(ε) by which each draw is completed where a ``CollapsedGP`` is observed, come from an approximation: LOO is as
    good as that is, and too high where the inducing features leave much of f open (d_n not small next to the noise).
    Sites of ``numpyro.factor`` are no data.

    A masked entry is no observation, and is in none of the groups that concern data. The others are then along one
    dimension ``y_observed``, with coordinates such as ``y_data`` that say which they are.

    Dimensions have the names of plates; those of whitened values are called ``f.u_inducing``, others ``name_dim_0``.
    ``/`` in names, from ``handlers.scope``, becomes ``.``.

    :param rng_key: random key.
    :param model: the model.
    :param samples: an ``MCMC`` after its run, or draws of all latent sites by name, draws first.
    :param args: the model's arguments, observations included, for all rows.
    :param params: where the model has ``numpyro.param`` statements, their values: ``svi.get_params(state)``.
    :param batch_ndims: of a dict: 1 if the leading axis is (draw,), 2 if they are (chain, draw).
    :param num_prior: number of draws from the prior.
    :param posterior_predictive: whether to simulate data.
    :param log_likelihood: whether to compute the log likelihood.
    :param functions: inputs (N, D) by the name of a GP: each draw gets a joint draw of f there, ``name.values``, which
        belongs to the draw's hyperparameters and other sites. The name is as for :func:`npgp.posterior`: the
        component's, or the observed site's of a collapsed GP, whose f is without the offset. O(N³) for each draw.
    :param convergence: how training ended, ``result.convergence`` of :func:`npgp.fit`: attributes of ``posterior``,
        ``arrived`` (0 or 1), ``training_steps`` and the table as text, ``convergence``.
    :param coords: labels along dimensions; 0, 1, … if not given.
    :param dims: names of a site's dimensions, where others are wanted.
    :return: ``arviz.InferenceData`` before ArviZ 1.0, ``xarray.DataTree`` since.
    :raises ImportError: without ArviZ.
    :raises KeyError: for a function that the model does not have.
    :raises ValueError: if a plate is subsampled, a latent site has no draws, a parameter no value, or no site is
        observed.
    """
    import arviz  # takes a second, and few programs need it

    checks.random_key(rng_key)
    draws, statistics = _draws(samples, batch_ndims)
    chains, length = next(iter(draws.values())).shape[:2]
    flat = {name: value.reshape(chains * length, *value.shape[2:]) for name, value in draws.items()}
    first_key, key, prior_key = jax.random.split(rng_key, 3)
    inputs = {name: checks.inputs(X, f"functions[{name!r}]") for name, X in (functions or {}).items()}
    model = handlers.substitute(model, data=dict(params or {}))

    def run(model, key, draw) -> dict[str, Message]:
        model = handlers.substitute(handlers.seed(model, key), data=draw)
        with Hidden(), handlers.trace() as sites:
            model(*args, **kwargs)
        return sites

    sites: dict[str, _Site] = {}

    def look(key, draw):
        found = run(_Rows(model, key), key, draw)
        _check(found, draws, params, isinstance(samples, MCMC))
        sites.update((name, _Site.of(msg)) for name, msg in found.items() if msg["type"] in ("sample", "deterministic"))
        return {name: (msg["value"], _present(msg["fn"])) for name, msg in found.items() if _is_data(msg)}

    def mapped(function, *inputs):
        results = one_program(lambda: lax.map(lambda each: function(*each), inputs), options=STEPS)
        return jax.tree.map(np.asarray, results)

    first = {name: value[:1] for name, value in flat.items()}
    observed = jax.tree.map(lambda x: x[0], mapped(look, first_key[None], first))
    layout = _Layout(
        sites,
        {name: present for name, (_, present) in observed.items()},
        {_clean(axis): labels for axis, labels in (coords or {}).items()},
        {_clean(name): names for name, names in (dims or {}).items()},
    )
    data = layout.dataset({name: value for name, (value, _) in observed.items()}, ())
    layout.dataset(draws, ("chain", "draw"))  # names and labels that do not fit are an error now, not after the work
    latent = {name for name, site in sites.items() if site.kind == "latent"}
    # GP values that a guide drew are what they are; other deterministic sites may depend on the data.
    given_values = {name: flat[name] for name in flat if name in latent or f"{name}.residual" in latent}

    def complete(key, draw):
        rows_key, given_key, new_key, *value_keys = jax.random.split(key, 3 + len(inputs))
        given = run(_Rows(model, rows_key), given_key, draw)
        result = {
            "posterior": {n: m["value"] for n, m in given.items() if m["type"] == "deterministic" and n not in draws}
        }
        if inputs:  # of the model as it is, where _Rows has opened what is collapsed
            as_it_is = run(model, given_key, draw)
        for (name, X), value_key in zip(inputs.items(), value_keys, strict=True):
            values = function_in(name, as_it_is, with_q=False).sample(value_key, X)
            result["posterior"][f"{name}.values"] = values
        if log_likelihood:
            result["log_likelihood"] = {n: m["fn"].log_prob(m["value"]) for n, m in given.items() if _is_data(m)}
        if posterior_predictive:
            new = run(handlers.uncondition(_Rows(model, rows_key)), new_key, draw)
            result["posterior_predictive"] = _simulated(new)
        return result

    def from_prior(key):
        new = run(handlers.uncondition(_Rows(model, None)), key, {})
        simulated = _simulated(new)
        kinds = {n: m for n, m in new.items() if n in sites and sites[n].kind != "data"}
        return {"prior": {n: m["value"] for n, m in kinds.items()}, "prior_predictive": simulated}

    keys = jax.random.split(key, chains * length)
    groups: dict[str, Any] = jax.tree.map(
        lambda x: x.reshape(chains, length, *x.shape[1:]), mapped(complete, keys, given_values)
    )
    groups["posterior"] = draws | groups["posterior"]
    if statistics:
        groups["sample_stats"] = statistics
    if num_prior is not None:
        groups |= jax.tree.map(lambda x: x[None], mapped(from_prior, jax.random.split(prior_key, num_prior)))

    datasets = {group: layout.dataset(arrays, ("chain", "draw")) for group, arrays in groups.items() if arrays}
    datasets["observed_data"] = data
    if convergence is not None:
        datasets["posterior"].attrs |= {
            "arrived": int(convergence.arrived),
            "training_steps": convergence.steps,
            "convergence": str(convergence),
        }
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.InferenceData(**datasets)
    import xarray

    return xarray.DataTree.from_dict(datasets)


def _draws(samples: Any, batch_ndims: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Draws and statistics of the sampler by name, (chain, draw, …)."""
    if isinstance(samples, MCMC):
        draws = jax.device_get(samples.get_samples(group_by_chain=True))
        fields = jax.device_get(samples.get_extra_fields(group_by_chain=True))
        statistics = {STATISTICS.get(name, name): np.asarray(v) for name, v in fields.items() if hasattr(v, "shape")}
        if "lp" in statistics:
            statistics["lp"] = -statistics["lp"]
        return {name: np.asarray(value) for name, value in draws.items()}, statistics
    if not isinstance(samples, Mapping):
        raise TypeError(f"samples is a {type(samples).__name__}; it must be an MCMC object or a dict of draws by site.")
    if batch_ndims not in (1, 2):
        raise ValueError(f"batch_ndims is {batch_ndims!r}; it must be 1, for (draw,), or 2, for (chain, draw).")
    arrays = {name: np.asarray(jax.device_get(value)) for name, value in samples.items()}
    leading = {array.shape[:batch_ndims] for array in arrays.values()}
    if len(leading) != 1 or len(next(iter(leading))) != batch_ndims:
        shapes = {name: array.shape for name, array in arrays.items()}
        raise ValueError(f"samples has arrays of shapes {shapes}; their {batch_ndims} leading axes must be the same.")
    return {name: array if batch_ndims == 2 else array[None] for name, array in arrays.items()}, {}


# ---------------------------------------------------------------------------------------------------------------
# The model's sites


class _Rows(Handler):
    """
    Gives every observed site a distribution row by row, of its value's shape.

    :param rng_key: for ε where a ``CollapsedGP`` is observed; without one such sites are left alone.
    """

    def __init__(self, fn: Callable, rng_key: jax.Array | None):
        super().__init__(fn)
        self.rng_key = rng_key

    def process_message(self, msg):
        if not _is_data(msg):
            return
        fn, value = msg["fn"], jnp.asarray(msg["value"])
        if isinstance(base_of(fn), CollapsedGP) and self.rng_key is not None:
            self.rng_key, key = jax.random.split(self.rng_key)
            present = _present(fn)[..., None]
            y = jnp.broadcast_to(value, jnp.broadcast_shapes(value.shape, fn.shape()))
            fn = _given_inducing(base_of(fn), y, key)
            fn = fn.mask(jnp.broadcast_to(present, fn.batch_shape))
            msg["infer"] = {**msg["infer"], ROWS_OF_EVENT: True}
        shape = jnp.broadcast_shapes(value.shape, fn.shape())
        batch = shape[: len(shape) - fn.event_dim]
        msg["fn"] = fn if fn.batch_shape == batch else fn.expand(batch)
        msg["value"] = jnp.broadcast_to(value, shape)


def _given_inducing(fn: CollapsedGP, y: jax.Array, rng_key: jax.Array) -> LatentObservation:
    """The rows of a ``CollapsedGP`` given ε ~ q(ε | y): those of ``observe`` without a guide."""
    posterior = fn.condition(y)
    projection = posterior.projector(fn.X)
    keys = jax.random.split(rng_key, len(posterior.q))
    values = [q.expand(posterior.batch_shape).sample(key) for q, key in zip(posterior.q, keys, strict=True)]
    mean = jnp.asarray(fn.offset + whitened_mean(projection, values))
    residual = jnp.broadcast_to(projection.residual_variance(), mean.shape)
    return LatentObservation(fn.likelihood, Moments(mean, jnp.zeros_like(mean), residual), None)


def _is_data(msg: Message) -> bool:
    if msg["type"] != "sample" or is_gp_site(msg) or isinstance(base_of(msg["fn"]), dist.Unit):
        return False
    return was_observed(msg)


def _present(fn: dist.Distribution) -> jax.Array:
    """Which entries of a distribution's batch no mask hides."""
    present: Any = True
    if isinstance(fn, (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)):
        present = _present(fn.base_dist)
    if isinstance(fn, dist.MaskedDistribution):
        present = present & jnp.asarray(mask_of(fn))
    if isinstance(fn, dist.Independent):
        present = jnp.any(present, axis=tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    if isinstance(fn, LatentObservation) and fn.mask_ is not None:
        present = fn.mask_.astype(bool)
    return jnp.broadcast_to(present, fn.batch_shape)


def _simulated(sites: dict[str, Message]) -> dict[str, jax.Array]:
    data = {name: msg for name, msg in sites.items() if _is_data(msg)}
    for name, msg in data.items():
        if msg["is_observed"]:
            raise ValueError(
                f"{name} is observed inside scan, where it cannot be simulated: use posterior_predictive=False and no "
                "num_prior, and numpyro's Predictive with the observations left out."
            )
    return {name: msg["value"] for name, msg in data.items()}


def _check(sites: dict[str, Message], draws, params, sampled: bool) -> None:
    if not any(_is_data(msg) for msg in sites.values()):
        raise ValueError("the model has no observed site with these arguments: pass the observations too.")
    for name, msg in sites.items():
        if msg["type"] == "plate" and msg["value"].shape[0] != plate_size(msg):
            raise ValueError(
                f"plate {name!r} has {msg['value'].shape[0]} of its {plate_size(msg)} rows: to_arviz needs the model "
                "with all rows, not a minibatch."
            )
        # MCMC runs with the initial values of parameters, as the model does here.
        if msg["type"] == "param" and name not in (params or {}) and not sampled:
            raise ValueError(f"params has no {name!r}, a parameter of the model: pass params=svi.get_params(state).")
        if msg["type"] == "sample" and not msg["is_observed"] and name not in draws:
            raise ValueError(f"samples has no draws of {name!r}, a latent site of the model; it has {sorted(draws)}.")
        if _is_data(msg) and name in draws:
            raise ValueError(f"samples has draws of {name!r}, which the model observes: leave them out.")


@dataclass(frozen=True)
class _Site:
    """
    A site's kind ("latent", "data" or "deterministic"), the names of its axes, and how many belong to the batch.

    The name is ``None`` for an axis of size 1 that is there for broadcasting only.
    """

    kind: str
    axes: tuple[str | None, ...]
    batch: int

    @staticmethod
    def of(msg: Message) -> _Site:
        name, shape, infer = msg["name"], jnp.shape(msg["value"]), msg.get("infer") or {}
        rows = int(infer.get(ROWS_OF_EVENT, False))  # an axis of the batch that no plate counted
        plates = {frame.dim - rows: frame for frame in frames(msg)}
        events = msg["fn"].event_dim if msg["type"] == "sample" else _event_dim(shape, plates)
        batch = len(shape) - events
        axes: list[str | None] = []
        for i in range(batch):
            plate = plates.get(i - batch)
            inner = plate is None and shape[i] == 1 and i - batch > min(plates, default=0)
            axes.append(plate.name if plate is not None else None if inner else f"{name}_dim_{i}")
        default = [f"{name}_inducing"] if is_gp_site(msg) else [f"{name}_dim_{batch + i}" for i in range(events)]
        axes += default
        for i, given in enumerate(infer.get("event_dims", ())[: events + rows]):
            axes[batch - rows + i] = given
        kind = "data" if _is_data(msg) else "latent" if msg["type"] == "sample" else "deterministic"
        return _Site(kind, tuple(axes), batch)


def _event_dim(shape: tuple[int, ...], plates) -> int:
    """How many axes a deterministic value has beside the plates', which nothing says: the fewest that fit."""
    for events in range(len(shape) + min(plates, default=0) + 1):
        batch = shape[: len(shape) - events]
        if all(batch[dim] in (1, plate.size) for dim, plate in plates.items()):
            return events
    return len(shape)


# ---------------------------------------------------------------------------------------------------------------
# Arrays with names


def _clean(name: str) -> str:
    # A DataTree takes "/" for a path, and files do not take it at all.
    return name.replace("/", ".")


@dataclass(frozen=True)
class _Layout:
    """
    Makes datasets of groups of arrays.

    :param sites: the model's sites.
    :param present: of each observed site, which entries no mask hides.
    :param coords: the user's labels along dimensions.
    :param dims: the user's names of sites' dimensions.
    """

    sites: Mapping[str, _Site]
    present: Mapping[str, np.ndarray]
    coords: Mapping[str, Any]
    dims: Mapping[str, Sequence[str]]

    def dataset(self, arrays: Mapping[str, np.ndarray], lead: tuple[str, ...]):
        """The ``xarray.Dataset`` of arrays whose leading axes have the names ``lead``."""
        import xarray

        variables: dict[str, Any] = {}
        coords: dict[str, Any] = {}
        for name, array in arrays.items():
            outer, shape = array.shape[: len(lead)], array.shape[len(lead) :]
            axes = self._axes(name, shape)
            named = [axis for axis in axes if axis is not None]
            array = array.reshape((*outer, *(n for axis, n in zip(axes, shape, strict=True) if axis is not None)))
            present = self.present.get(name)
            if present is not None and not present.all():
                batch = [(axis, n) for axis, n in zip(axes, present.shape, strict=False) if axis is not None]
                where = np.nonzero(present.reshape([n for _, n in batch]))
                index: tuple[Any, ...] = (slice(None),) * len(lead) + where
                array = array[index]
                along = f"{_clean(name)}_observed"
                for (axis, n), entries in zip(batch, where, strict=True):
                    label = axis if axis.startswith(f"{_clean(name)}_") else f"{_clean(name)}_{axis}"
                    coords[label] = (along, self._labels(axis, n)[entries])
                named = [along, *named[len(batch) :]]
            if _clean(name) in variables:
                raise ValueError(f"the model has two sites that would both be called {_clean(name)!r}: rename one.")
            variables[_clean(name)] = ((*lead, *named), array)
            for axis, n in zip((*lead, *named), array.shape, strict=True):
                coords.setdefault(axis, (axis, self._labels(axis, n)))
        return xarray.Dataset(variables, coords, attrs={"inference_library": "numpyro"})

    def _axes(self, name: str, shape: tuple[int, ...]) -> list[str | None]:
        """The names of a site's axes, of those of the batch alone if there are no more; ``None`` for one to drop."""
        # Draws from a guide may have the values behind an observation, which the model with data does not state.
        site = self.sites.get(name) or self.sites.get(name.removesuffix(".latent"))
        known = site is not None and len(shape) in (site.batch, len(site.axes))
        axes = list(site.axes) if site is not None and known else [f"{name}_dim_{i}" for i in range(len(shape))]
        given = self.dims.get(_clean(name))
        if given is not None:
            count = sum(axis is not None for axis in axes)
            if len(given) != count:
                raise ValueError(f"dims names {list(given)} for {name!r}, which has {count} dimensions.")
            names = iter(given)
            axes = [axis and next(names) for axis in axes]
        return [axis and _clean(axis) for axis in axes[: len(shape)]]

    def _labels(self, axis: str, size: int) -> np.ndarray:
        labels = np.asarray(self.coords.get(axis, np.arange(size)))
        if labels.shape != (size,):
            raise ValueError(f"coords has labels of shape {labels.shape} for {axis!r}, which has {size} entries.")
        return labels
