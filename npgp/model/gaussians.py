"""
The automatic guide's distribution of the sites beside the GPs: one Gaussian for some of them, a normal distribution for
each entry of the others, in unconstrained space.

It is what NumPyro's ``AutoMultivariateNormal`` and ``AutoNormal`` are, without what these keep from their first call:
where training starts is computed when a parameter is stated that has no value yet. So it may run inside ``jit`` and
``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax
from jax.scipy.special import ndtri
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import IdentityTransform, IndependentTransform, Transform
from numpyro.distributions.util import sum_rightmost
from numpyro.infer.initialization import init_to_median
from numpyro.infer.util import potential_energy

from npgp.context import under
from npgp.contract import Frame, Message, frames, is_auxiliary, is_enumerated, losses_around, plate_size
from npgp.model.sites import Hidden, is_expectation, is_gp_site, is_observation
from npgp.programs.compiled import one_program
from npgp.programs.tracing import is_traced

#: Parameters of the one Gaussian.
LOC, SCALE_TRIL, SCALE_TRIL_CONSTRAINT = "joint_loc", "joint_scale_tril", constraints.scaled_unit_lower_cholesky
#: The most entries whose density has derivatives by the value alone.
MOST_BY_PATH = 50
#: The standard deviation that training starts from, in unconstrained space.
INIT_SCALE = 0.1
#: Iterations to where sites with measurements start. They need not arrive.
MODE_ITERATIONS = 30


@dataclass(frozen=True)
class Site:
    """
    What a guide has to know of a latent site before the model runs.

    :param name: its name.
    :param shape: of its unconstrained value, with all members of plates that are subsampled.
    :param event_dim: how many dimensions of that are no plates'.
    :param plates: the plates around it, as the model has them.
    :param sizes: number of members of each of them.
    :param support: where its values are; ``None`` if that is computed by the model.
    """

    name: str
    shape: tuple[int, ...]
    event_dim: int
    plates: tuple[Frame, ...]
    sizes: tuple[int, ...]
    support: constraints.Constraint | None

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(np.prod(self.shape))

    def whole(self, x: jax.Array) -> jax.Array:
        """A value for all members of the plates, from one for those of a subsample, repeated."""
        for plate, size in zip(self.plates, self.sizes, strict=True):
            axis = plate.dim - self.event_dim
            if size != plate.size:
                x = jnp.take(x, jnp.arange(size) % plate.size, axis=axis)
        return x


def sites_beside(sites: Mapping[str, Message], names: Sequence[str]) -> list[Site]:
    """
    The continuous ones among some latent sites.

    :param sites: the model's trace.
    :param names: the sites' names.
    :raises ValueError: for a site that is discrete and not enumerated, or of whose support no bijection is known.
    """
    found = []
    for name in names:
        msg = sites[name]
        if is_enumerated(msg):
            continue
        shape = jax.eval_shape(_transform(name, msg).inv, msg["value"]).shape
        around = tuple(frames(msg))
        whole = tuple(plate_size(sites[f.name]) if f.name in sites else f.size for f in around)
        site = Site(name, shape, msg["fn"].event_dim + len(shape) - jnp.ndim(msg["value"]), around, whole, None)
        support = msg["fn"].support
        traced = any(map(is_traced, jax.tree.leaves(support)))
        shape = jax.eval_shape(site.whole, jax.ShapeDtypeStruct(shape, jnp.result_type(float))).shape
        found.append(Site(name, shape, site.event_dim, around, whole, None if traced else support))
    return found


def _transform(name: str, msg: Message) -> Transform:
    support = msg["fn"].support
    if support.is_discrete:
        raise ValueError(
            f"{name} is a discrete latent site, for which the automatic guide has no distribution: sum it out, "
            'infer={"enumerate": "parallel"} under TraceEnum_ELBO, or give a guide for it.'
        )
    return bijection(name, msg["fn"])


def bijection(name: str, fn: dist.Distribution) -> Transform:
    """
    NumPyro's map from the real numbers to where a latent site has its values.

    :raises ValueError: if it knows none, of which its own error says nothing.
    """
    try:
        return biject_to(fn.support)
    except NotImplementedError:
        support = type(fn.support).__name__
        raise ValueError(
            f"{name} is drawn from a {type(fn).__name__} whose support is a {support}, to which "
            f"numpyro.distributions.biject_to knows no bijection: register one, @biject_to.register({support}), or "
            "give a guide for this site."
        ) from None


def at_medians(model: Callable, rng_key: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Message]:
    """
    The trace of a model whose sites beside the GPs have their medians under the prior (``init_to_median``).

    NumPyro's own start is uniform in unconstrained space: scales of 1/7 to 7, whatever their prior, from which
    exponential likelihoods do not find back.
    """

    def median(msg):
        return None if is_gp_site(msg) or is_observation(msg) else init_to_median(msg)

    with Hidden(), handlers.trace() as sites, under(unseen=True):
        handlers.substitute(handlers.seed(model, rng_key), substitute_fn=median)(*args, **kwargs)
    return sites


def _measured(sites: Mapping[str, Message], among: Sequence[Site]) -> set[str]:
    """Sites with whose plates something is observed that is not of a GP, such as inputs with errors."""
    around = [
        {frame.name for frame in frames(msg)}
        for msg in sites.values()
        if msg["type"] == "sample" and msg["is_observed"] and not (is_observation(msg) or is_auxiliary(msg))
    ]
    return {site.name for site in among if any({frame.name for frame in site.plates} & plates for plates in around)}


def _at_mode(
    model: Callable, start: dict[str, jax.Array], rng_key: Any, args: tuple, kwargs: dict[str, Any]
) -> dict[str, jax.Array]:
    """
    Unconstrained values at the mode of what a model says without its GPs, by L-BFGS.

    A q(ε) that follows latent inputs fits the functions to wherever these are. From the medians of their prior, which
    are in one place, inputs with errors would not find back to their measurements.

    :param model: the model, with all other sites beside the GPs at given values.
    :param start: values to start from.
    """
    without = handlers.seed(
        Hidden(under(unseen=True)(model), lambda m: m["type"] == "sample" and (is_gp_site(m) or is_observation(m))),
        rng_key,
    )
    energy = partial(potential_energy, without, args, kwargs)
    solver, value_and_grad = optax.lbfgs(), optax.value_and_grad_from_state(energy)

    def step(_, carry):
        x, state = carry
        value, grad = value_and_grad(x, state=state)
        updates, state = solver.update(grad, state, x, value=value, grad=grad, value_fn=energy)
        return optax.apply_updates(x, updates), state

    with Hidden():
        return lax.fori_loop(0, MODE_ITERATIONS, step, (start, solver.init(start)))[0]


class _Drawn(dist.Delta):
    """
    A site's value, made of a latent vector that is drawn before.

    :param transform: from unconstrained values.
    """

    pytree_data_fields = ("transform",)

    def __init__(self, value: jax.Array, transform: Transform, log_density: Any, event_dim: int):
        self.transform = transform
        super().__init__(value, log_density=log_density, event_dim=event_dim, validate_args=False)

    @classmethod
    def by(cls, transform: Transform, x: jax.Array, event_dim: int) -> _Drawn:
        """The value of which ``x`` is the unconstrained one, whose last dimensions are an event."""
        value = transform(x)
        event_dim += jnp.ndim(value) - jnp.ndim(x)
        log_density: Any = 0.0
        if numpyro.get_mask() is not False:
            each = -transform.log_abs_det_jacobian(x, value)
            log_density = sum_rightmost(each, jnp.ndim(each) - jnp.ndim(value) + event_dim)
        return cls(value, transform, log_density, event_dim)


class Joint:
    """
    One Gaussian of several sites, with parameters ``joint_loc`` and ``joint_scale_tril``.

    :param sites: in the order of its entries.
    """

    def __init__(self, sites: Sequence[Site]):
        self.sites = list(sites)
        self.size = sum(site.size for site in sites)

    def unpacked(self, vector: jax.Array) -> dict[str, jax.Array]:
        """Each site's part of vectors (..., size)."""
        ends = np.cumsum([site.size for site in self.sites])
        parts = jnp.split(vector, ends[:-1], axis=-1)
        return {s.name: jnp.reshape(x, (*vector.shape[:-1], *s.shape)) for s, x in zip(self.sites, parts, strict=True)}

    @staticmethod
    def posterior(params: Mapping[str, Any]) -> dist.MultivariateNormal:
        """The Gaussian."""
        # NumPyro would check the factor, each operation of that a program.
        return _PathNormal(params[LOC], scale_tril=params[SCALE_TRIL], validate_args=False)


class _PathNormal(dist.MultivariateNormal):
    """
    A Gaussian whose density, under a loss that is an expectation, has derivatives by the value alone. Those by the
    parameters average to zero, but with much noise: without them gradients of an ELBO have none where the posterior is
    this Gaussian (Roeder, Wu & Duvenaud 2017, arXiv 1703.09194). Of many entries they have more noise where training
    starts, far from that: 800 steps for the 121 states of a series ended elsewhere.
    """

    def log_prob(self, value):
        losses = losses_around()
        if not losses or not is_expectation(losses) or self.event_shape[0] > MOST_BY_PATH:
            return super().log_prob(value)
        loc, scale_tril = map(lax.stop_gradient, (self.loc, self.scale_tril))
        return dist.MultivariateNormal(loc, scale_tril=scale_tril, validate_args=False).log_prob(value)


class Beside:
    """
    A guide of the sites beside the GPs, which keeps nothing: training starts from medians of the prior, computed where
    a parameter has no value yet.

    :param model: the whole model.
    :param sites: what is known of the sites, in the model's order.
    :param together: names of those that share one Gaussian.
    """

    def __init__(self, model: Callable, sites: Sequence[Site], together: Collection[str] = ()):
        self.__name__ = "the automatic guide"  # in messages
        self.model, self.sites = model, list(sites)
        self.joint = Joint([site for site in sites if site.name in together])
        self.apart = [site for site in sites if site.name not in together]

    @property
    def needs_arguments(self) -> bool:
        """Whether sites have supports that the model computes."""
        return any(site.support is None for site in self.sites)

    def __call__(self, *args, **kwargs) -> dict[str, jax.Array]:
        """Sample the sites."""
        starts: dict[str, jax.Array] = {}

        def start(site: Site, key) -> jax.Array:
            if not starts:  # of all sites at once
                starts.update(self._starts(key, args, kwargs))
            return starts[site.name]

        transforms = self.transforms(args, kwargs)
        found = self._sample_joint(transforms, start)
        plates = {}
        for site in self.apart:
            for frame, size in zip(site.plates, site.sizes, strict=True):
                if frame.name not in plates:
                    plates[frame.name] = numpyro.plate(frame.name, size, dim=frame.dim, subsample_size=frame.size)
            with ExitStack() as stack:
                for frame in site.plates:
                    stack.enter_context(plates[frame.name])
                found[site.name] = self._sample(site, transforms[site.name], partial(start, site))
        return found

    def _sample_joint(self, transforms: Mapping[str, Transform], start: Callable) -> dict[str, jax.Array]:
        raise NotImplementedError

    def _sample(self, site: Site, transform: Transform, start: Callable) -> jax.Array:
        raise NotImplementedError

    def _starts(self, rng_key, args: tuple, kwargs: dict[str, Any]) -> dict[str, jax.Array]:
        """The sites' unconstrained values at medians of the prior."""

        def starts():
            found = at_medians(self.model, rng_key, args, kwargs)
            medians = {s.name: _transform(s.name, found[s.name]).inv(found[s.name]["value"]) for s in self.sites}
            whole = [site for site in self.sites if list(site.sizes) == [frame.size for frame in site.plates]]
            measured = _measured(found, whole)
            if measured:
                model = handlers.substitute(self.model, data={n: found[n]["value"] for n in medians.keys() - measured})
                medians |= _at_mode(model, {name: medians[name] for name in measured}, rng_key, args, kwargs)
            return {s.name: s.whole(medians[s.name]) for s in self.sites}

        return one_program(starts)

    def transforms(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Transform]:
        """
        Each site's transform from unconstrained values.

        :param args: the model's arguments, for supports that it computes.
        """
        supports = {site.name: site.support for site in self.sites}
        if unknown := [name for name, support in supports.items() if support is None]:

            def computed():
                found = at_medians(self.model, 0, args, kwargs)
                return {name: found[name]["fn"].support for name in unknown}

            supports |= one_program(computed)
        return {name: biject_to(support) for name, support in supports.items()}


class Gaussians(Beside):
    """One Gaussian for some sites, a normal distribution for each entry of the others, in unconstrained space."""

    def _sample_joint(self, transforms, start):
        if not self.joint.sites:
            return {}
        loc = numpyro.param(
            LOC, lambda key: jnp.concatenate([jnp.ravel(start(site, key)) for site in self.joint.sites])
        )
        scale = numpyro.param(
            SCALE_TRIL,
            lambda _: INIT_SCALE * jnp.eye(self.joint.size),
            constraint=SCALE_TRIL_CONSTRAINT,
        )
        gaussian = self.joint.posterior({LOC: loc, SCALE_TRIL: scale})
        unpacked = self.joint.unpacked(numpyro.sample("_auto_latent", gaussian, infer={"is_auxiliary": True}))
        return {
            site.name: numpyro.sample(site.name, _Drawn.by(transforms[site.name], unpacked[site.name], site.event_dim))
            for site in self.joint.sites
        }

    def _sample(self, site, transform, start):
        loc = numpyro.param(f"{site.name}_auto_loc", start, event_dim=site.event_dim)
        scale = numpyro.param(
            f"{site.name}_auto_scale",
            jnp.full(site.shape, INIT_SCALE),
            constraint=constraints.softplus_positive,
            event_dim=site.event_dim,
        )
        normal = dist.Normal(loc, scale).to_event(site.event_dim)
        fn = normal if _is_identity(transform) else dist.TransformedDistribution(normal, transform)
        return numpyro.sample(site.name, fn)

    def median(self, params: Mapping[str, Any], *args, **kwargs) -> dict[str, jax.Array]:
        """Medians of the sites; the model's arguments are for supports that it computes."""
        return self._constrained(params, lambda loc, _: loc, args, kwargs)

    def quantiles(self, params: Mapping[str, Any], levels: jax.Array, *args, **kwargs) -> dict[str, jax.Array]:
        """Quantiles of the sites, along a leading axis."""
        return self._constrained(params, lambda loc, scale: normal_quantiles(loc, scale, levels), args, kwargs)

    def _constrained(self, params: Mapping[str, Any], of: Callable, args, kwargs) -> dict[str, jax.Array]:
        """What is computed of each entry's mean and standard deviation in unconstrained space, as values."""
        found = {s.name: of(params[f"{s.name}_auto_loc"], params[f"{s.name}_auto_scale"]) for s in self.apart}
        if self.joint.sites:
            gaussian = self.joint.posterior(params)
            found |= self.joint.unpacked(of(gaussian.mean, jnp.sqrt(gaussian.variance)))
        transforms = self.transforms(args, kwargs)
        return {name: transforms[name](x) for name, x in found.items()}


class Points(Beside):
    """One value for each site, as ``AutoDelta`` has it."""

    def _sample_joint(self, transforms, start):
        return {}

    def _sample(self, site, transform, start):
        loc = numpyro.param(
            f"{site.name}_auto_loc",
            lambda key: transform(start(key)),
            constraint=transform.codomain,
            event_dim=site.event_dim,
        )
        return numpyro.sample(site.name, dist.Delta(loc, event_dim=site.event_dim))


def normal_quantiles(loc: jax.Array, scale: Any, levels: jax.Array) -> jax.Array:
    """Quantiles of normal distributions, along a leading axis."""
    return loc + scale * ndtri(levels).reshape(-1, *[1] * jnp.ndim(loc))


def _is_identity(transform: Transform) -> bool:
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return isinstance(transform, IdentityTransform)
