"""
What npgp relies on in NumPyro beyond what its documentation promises; ``programs/tracing.py`` has JAX's.

Each definition says what it relies on, and ``tests/ground/test_contract.py`` has a test of each that fails with a
sentence where another version does otherwise. The rest of npgp uses these definitions and documented names. Nothing
here knows of GPs.
"""

from __future__ import annotations

import copy
import functools
import operator
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.infer import ELBO, SVI
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.svi import SVIState
from numpyro.optim import _NumPyroOptim as Optimizer
from numpyro.primitives import _PYRO_STACK
from numpyro.primitives import Messenger as Handler
from numpyro.util import is_prng_key

__all__ = [
    "FixedConstraint",
    "FixedTransform",
    "Frame",
    "Handler",
    "KeepsIntermediates",
    "Message",
    "Optimizer",
    "Stackable",
    "base_of",
    "bounds_of",
    "constrained",
    "copy_constraints",
    "copy_rows",
    "follows_gradient",
    "frames",
    "given_by",
    "is_auxiliary",
    "is_enumerated",
    "is_in_stein_vi",
    "is_initialized",
    "is_prng_key",
    "losses_around",
    "mask_of",
    "name_here",
    "per_stacked",
    "plate_of_rows",
    "plate_size",
    "plate_takes_all",
    "plates_around",
    "random_key",
    "replayed",
    "step_count",
    "take_all",
    "unconstrained",
    "under_predictive",
    "unpacked",
    "was_observed",
    "with_optimizer",
]

# ---------------------------------------------------------------------------------------------------------------
# Statements and their handlers

#: What a statement of a model sends to the handlers around it, and what a trace holds of it. Relied on, by type:
#:
#: - all: ``type``, ``name``, ``value`` (``None`` until it has one), and ``stop``, by which ``block`` hides a message;
#: - ``sample``: ``fn``, ``is_observed``, ``intermediates`` (a list), ``scale`` (``None`` for one), ``kwargs`` with
#:   ``rng_key``, and ``infer``, the very dictionary that the statement was given, which may hold any objects;
#: - ``param``: ``kwargs`` with ``constraint``, if one was given;
#: - ``plate``: see :func:`plate_size`;
#: - statements inside plates: see :func:`frames`.
#:
#: A handler may change any of these, and may add keys of its own.
Message: TypeAlias = dict[str, Any]

# ``Handler``, NumPyro's ``Messenger``: the base class of handlers. Relied on: ``process_message`` sees the message of
# each statement, the innermost handler first, and may give it a value; ``postprocess_message`` sees it once it has one.
# A statement's message is the same object throughout: a handler can keep it, and look at what others did to it.


def _shown(message: Message) -> Iterator[Handler]:
    """
    The handlers that a message is shown to, the innermost first, each before it has seen the message.

    Relied on: handlers are in a list, and a message goes outwards until one sets its ``stop``. NumPyro's leave types
    that they do not know alone, but ``scope`` changes the name; and ``trace`` keeps what it post-processes. That is why
    ``numpyro.primitives.apply_stack`` does not do: it post-processes, so traces would have sites for the questions, and
    shows a message to handlers without saying which of them it has come to. Nor do plates show in
    ``cond_indep_stack`` of a message that is neither a statement nor recorded.
    """
    for handler in reversed(_PYRO_STACK):
        yield handler
        handler.process_message(message)
        if message.get("stop"):
            return


def _question(type: str, name: str) -> Message:
    """A message that is no statement, with a site's name and what else a user's ``hide_fn`` may look at."""
    message: Message = {"type": type, "name": name, "value": None, "is_observed": False, "infer": {}, "mask": None}
    return message | {"fn": None, "args": (), "kwargs": {"rng_key": None}, "scale": None, "cond_indep_stack": []}


def _answered(type: str, name: str) -> Message:
    list(_shown(message := _question(type, name)))
    return message


def name_here(name: str) -> str:
    """The name of a site that is called ``name`` here, which handlers such as ``scope`` may change."""
    return _answered("npgp.name", name)["name"]


def random_key(name: str) -> jax.Array | None:
    """A random key for what a site needs, or ``None``. Relied on: ``seed`` answers ``prng_key``, others by value."""
    message = _answered("prng_key", name)
    return message["kwargs"]["rng_key"] if message["value"] is None else message["value"]


def replayed(name: str) -> Message | None:
    """
    What ``replay`` copies from for the site that is called ``name`` here; ``None`` without one, {} if it lacks it.

    ``SVI`` runs the model under ``replay`` of the guide's trace. Relied on: ``replay`` is a handler with the trace as
    its ``trace``, and gives an unobserved site the guide's value and a copy of the guide's ``infer`` dict.
    """
    found, message = None, _question("npgp.replayed", name)
    for handler in _shown(message):
        if isinstance(handler, handlers.replay):
            found = handler.trace.get(message["name"], found or {})
    return found


def given_by(kind: type[handlers.condition] | type[handlers.substitute], name: str) -> Any:
    """
    The value that ``condition``, or ``substitute``, has for the site that is called ``name`` here; ``None`` if none.

    Relied on: these have a dictionary ``data``, or ``None``; and the outermost is the last to give its value.
    """
    found, message = None, _question("npgp.given", name)
    for handler in _shown(message):
        if isinstance(handler, kind):
            found = (handler.data or {}).get(message["name"], found)
    return found


def under_predictive(name: str) -> bool:
    """
    Whether densities are not wanted here, as under ``Predictive``: values drawn here may be at other rows than before.

    Relied on: ``Predictive`` runs the model under ``handlers.mask(mask=False)``, which answers a message of type
    ``inspect`` by ``mask``, then ``False`` itself. (``numpyro.get_mask`` asks so, without a name.)
    """
    return _answered("inspect", name)["mask"] is False


def was_observed(message: Message) -> bool:
    """Whether a site has data. Relied on: ``uncondition`` puts ``was_observed`` in ``infer`` of what it draws anew."""
    return bool(message["is_observed"] or message["infer"].get("was_observed"))


def is_auxiliary(message: Message) -> bool:
    """
    Whether a guide's site is a means to draw others, and no site of the model.

    Relied on: autoguides mark such sites by ``is_auxiliary`` in ``infer``, and so does ``numpyro.factor``.
    """
    return bool(message["infer"].get("is_auxiliary", False))


def unpacked(guide: AutoContinuous, vector: jax.Array) -> dict[str, jax.Array]:
    """
    The unconstrained values by site that an autoguide's latent vector stands for.

    Relied on: once it has been called, ``_unpack_latent`` is that function, of any vector.
    """
    return guide._unpack_latent(vector)


def is_enumerated(message: Message) -> bool:
    """Whether a discrete site is summed out. Relied on: it is stated with ``infer={"enumerate": "parallel"}``."""
    return message["infer"].get("enumerate") == "parallel"


# ---------------------------------------------------------------------------------------------------------------
# Plates


class Frame(NamedTuple):
    """A plate around a statement: its name, its dimension (negative), and the number of members that take part."""

    name: str
    dim: int
    size: int


def frames(message: Message) -> list[Frame]:
    """
    The plates around a statement.

    Relied on: each plate puts a named tuple (name, dim, size) on the message's ``cond_indep_stack``, where size is that
    of the subsample; for ``param`` and ``deterministic`` statements too, and before a ``param`` gets its first value.
    """
    return [Frame(frame.name, frame.dim, frame.size) for frame in message["cond_indep_stack"]]


def plates_around() -> list[numpyro.plate]:
    """
    The plates that enclose this.

    Relied on: the handlers around are in a list, and plates are handlers with ``name``, ``dim``, ``size`` and
    ``subsample_size``.
    """
    return [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]


def plate_of_rows(name: str, size: int, rows: jax.Array, dim: int | None = None) -> numpyro.plate:
    """
    A plate that takes given rows as its subsample.

    Relied on: a plate sends its message when it is made, and takes a value that ``substitute`` gives for its name.
    """
    with handlers.substitute(data={name: rows}):
        return numpyro.plate(name, size, subsample_size=rows.shape[0], dim=dim)


def plate_size(message: Message) -> int:
    """Number of members of a plate. Relied on: it is the first of the message's ``args``."""
    return message["args"][0]


def plate_takes_all(message: Message) -> bool:
    """
    Whether a plate was stated without a subsample.

    Relied on: the size of the subsample, or ``None``, is the second of the message's ``args``.
    """
    return message["args"][1] in (None, message["args"][0])


def plate_draws(message: Message) -> bool:
    """Whether a plate drew its subsample. Relied on: ``seed`` gives a key to plates that do, and to no others."""
    return not plate_takes_all(message) and message["kwargs"]["rng_key"] is not None


def copy_rows(message: Message, other: Message) -> None:
    """
    Make a plate take the rows of another one.

    Relied on: the message's ``args`` are the sizes of plate and subsample, which a plate compares with what it gets,
    and its value is the numbers of the rows, which are drawn if it has none.
    """
    message["args"], message["value"] = other["args"], other["value"]


def take_all(message: Message) -> None:
    """Make a plate take all rows. Relied on: as for :func:`copy_rows`."""
    size = plate_size(message)
    message["args"], message["value"] = (size, size), jnp.arange(size)


# ---------------------------------------------------------------------------------------------------------------
# Distributions. Beside what follows, npgp relies on these: a distribution is a pytree whose leaves are its attributes
# named in ``pytree_data_fields``, ``pytree_aux_fields`` being part of the structure; and ``TraceMeanField_ELBO`` takes
# the divergence of two distributions from the rule that ``kl_divergence.register`` has for their classes.


def base_of(distribution: dist.Distribution) -> dist.Distribution:
    """
    What a distribution is before it is expanded, masked or reinterpreted by ``to_event``.

    Relied on: these make ``ExpandedDistribution``, ``MaskedDistribution`` and ``Independent``, with ``base_dist``.
    """
    while isinstance(distribution, (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)):
        distribution = distribution.base_dist
    return distribution


def mask_of(distribution: dist.Distribution) -> ArrayLike:
    """
    The mask of a distribution: ``True`` for one that has none.

    Relied on: ``MaskedDistribution`` keeps it as ``_mask``, a ``bool`` or an array of the batch's shape.
    """
    return distribution._mask if isinstance(distribution, dist.MaskedDistribution) else True


# ``is_prng_key``: relied on: true of one random key, of JAX's new or old style; and false of ``None``, which is the key
# where no ``seed`` is around.


class KeepsIntermediates:
    """
    Mixed into a distribution: expanded and masked too, it hands on what it computed to draw a sample.

    Relied on: a ``sample`` statement puts what ``sample_with_intermediates`` returns beside the value, a list, into its
    message's ``intermediates``, and losses pass it to ``log_prob``; plates call ``expand`` and ``handlers.mask`` calls
    ``mask``; an expanded distribution brings the axes of the sample into their order in the intermediates too, which
    may have more axes after those. NumPyro's own masked distribution drops the intermediates.
    """

    batch_shape: tuple[int, ...]

    def expand(self, batch_shape):
        """As ``Distribution.expand``."""
        batch_shape = tuple(batch_shape)
        return self if batch_shape == self.batch_shape else _Expanded(self, batch_shape)

    def mask(self, mask):
        """As ``Distribution.mask``."""
        return self if mask is True else _Masked(self, mask)


class _Expanded(KeepsIntermediates, dist.ExpandedDistribution):
    pass


class _Masked(KeepsIntermediates, dist.MaskedDistribution):
    def sample_with_intermediates(self, key, sample_shape=()):
        return self.base_dist.sample_with_intermediates(key, sample_shape)

    def log_prob(self, value, intermediates=None):
        return super().log_prob(value)


class Stackable(dist.Distribution):
    """
    A distribution that NumPyro's ``scan``, or ``jax.vmap``, may stack: all its arrays get further leading axes.

    A subclass names in ``counted`` one of its arrays, calls :meth:`count_axes` at the end of its ``__init__``, and has
    its ``log_prob`` under :func:`per_stacked`.

    Relied on: ``scan`` stacks the leaves of a site's distribution along a new first axis, leaves ``pytree_aux_fields``
    as they are, and takes ``log_prob`` of the stacked values; where a plate expanded it, it puts axes of size 1 in.
    """

    pytree_aux_fields: tuple[str, ...] = ("own_axes",)
    #: The attribute whose axes say how often the distribution has been stacked; dots lead to attributes of attributes.
    counted: str

    def count_axes(self) -> None:
        """Note how many axes the counted array and the batch shape have before anything is stacked."""
        self.own_axes = len(self._counted_shape()), len(self._batch_shape)

    def _counted_shape(self) -> tuple[int, ...]:
        return jnp.shape(operator.attrgetter(self.counted)(self))

    @property
    def stacked(self) -> tuple[int, ...]:
        """Sizes of the axes along which distributions are stacked."""
        shape = self._counted_shape()
        return shape[: len(shape) - self.own_axes[0]] if hasattr(self, "own_axes") else ()

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """As ``Distribution.batch_shape``, with the stacked axes in front."""
        own = self._batch_shape
        return self.stacked + own[len(own) - self.own_axes[1] :] if hasattr(self, "own_axes") else own


def per_stacked(log_prob: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Decorate the ``log_prob`` of a :class:`Stackable`: each of the stacked distributions takes its own value."""

    @functools.wraps(log_prob)
    def mapped(self, value, intermediates=None):
        if not self.stacked:
            return log_prob(self, value)
        if self.stacked[0] == 1 != jnp.shape(value)[0]:  # put in for a plate
            return mapped(jax.tree.map(lambda leaf: leaf[0], self), value)
        return jax.vmap(mapped)(self, value)

    return mapped


def bounds_of(constraint: constraints.Constraint) -> list[Any]:
    """Arrays in a constraint, such as its bounds. Relied on: constraints are pytrees, and these are their leaves."""
    return jax.tree.leaves(constraint)


class _Fixed:
    """Mixed into constraints and transforms without parameters: instances of a class are all equal."""

    def eq(self, other, static=False):
        return type(other) is type(self)

    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, aux_data, params):
        return cls()


class FixedConstraint(_Fixed, constraints.Constraint):
    """
    Base class of constraints without parameters, whose instances are all equal.

    Relied on: subclasses are registered as pytrees with ``tree_flatten`` and ``tree_unflatten``; ``==`` is ``eq``; and
    ``biject_to.register`` goes by the class.
    """

    def __repr__(self):
        return f"{type(self).__name__}()"


class FixedTransform(_Fixed, Transform):
    """
    Base class of bijections without parameters, whose instances are all equal.

    Relied on: as for :class:`FixedConstraint`; and ``transform.inv`` calls ``_inverse``.
    """


# ---------------------------------------------------------------------------------------------------------------
# Optimizers and SVI

# ``Optimizer``, NumPyro's ``_NumPyroOptim``: the base class of what ``SVI`` takes for ``optim``. Relied on: ``SVI``
# calls ``init(params)``, ``get_params(state)`` and ``eval_and_update(fn, state, forward_mode_differentiation=…)``;
# params are unconstrained values by name, and ``fn`` returns the loss and an auxiliary value.


def follows_gradient(optim: Optimizer) -> bool:
    """
    Whether an optimizer's step is its ``update`` along one gradient of the loss, and nothing else.

    Relied on: that is what the base class's ``eval_and_update`` does, and ``update(grads, state, value=loss)`` is all
    that differs between optimizers that do not override it.
    """
    return type(optim).eval_and_update is Optimizer.eval_and_update


def step_count(optim_state: Any) -> jax.Array:
    """Number of steps taken. Relied on: an optimizer's state is a tuple that begins with it."""
    return optim_state[0]


def unconstrained(svi: SVI, state: SVIState) -> dict[str, jax.Array]:
    """Unconstrained values of the parameters. Relied on: ``svi.optim`` is the optimizer, and ``SVI`` moves these."""
    return svi.optim.get_params(state.optim_state)


def is_initialized(svi: SVI) -> bool:
    """
    Whether an ``SVI`` knows the constraints of its parameters.

    Relied on: ``svi.init`` sets ``svi.constrain_fn``, which is ``None`` before.
    """
    return svi.constrain_fn is not None


def constrained(svi: SVI, values: dict[str, Any]) -> dict[str, Any]:
    """
    Constrained values of parameters. Relied on: ``svi.constrain_fn`` takes any of the parameters, in a new dictionary.
    """
    return svi.constrain_fn(values)


def transforms_of(svi: SVI) -> dict[str, Any]:
    """
    Each parameter's transform from unconstrained values.

    Relied on: ``svi.constrain_fn`` is a ``functools.partial`` whose first argument they are, pytrees by name.
    """
    return svi.constrain_fn.args[0]


def set_transforms(svi: SVI, transforms: dict[str, Any]) -> None:
    """Tell an ``SVI`` its parameters' transforms. Relied on: as for :func:`transforms_of`."""
    svi.constrain_fn = functools.partial(svi.constrain_fn.func, transforms)


def with_optimizer(svi: SVI, optim: Optimizer) -> SVI:
    """
    The same ``SVI`` with another optimizer.

    Relied on: a shallow copy is an ``SVI`` of its own, whose ``optim`` can be set.
    """
    other = copy.copy(svi)
    other.optim = optim
    return other


def copy_constraints(source: SVI, target: SVI) -> None:
    """Tell an ``SVI`` the constraints that another one knows. Relied on: ``svi.constrain_fn`` is all it knows."""
    target.constrain_fn = source.constrain_fn


def losses_around() -> list[ELBO]:
    """
    The losses that are being computed here, the innermost first.

    Relied on: an ``ELBO`` runs model and guide inside a call of one of these methods, also where JAX traces them.
    """
    return [loss for loss in _callers("loss", "loss_with_mutable_state") if isinstance(loss, ELBO)]


def is_in_stein_vi() -> bool:
    """
    Whether this is inside ``init`` of NumPyro's ``SteinVI``, or of a class made from it.

    Relied on: that method runs model and guide, before all others do.
    """
    return any(kind.__name__ == "SteinVI" for caller in _callers("init") for kind in type(caller).__mro__)


def _callers(*methods: str) -> list[Any]:
    """First arguments of the calls around of functions with these names, the innermost first."""
    calls = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name in methods)
    return [frame.f_locals.get(frame.f_code.co_varnames[0]) for frame in calls if frame.f_code.co_argcount]
