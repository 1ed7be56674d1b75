"""Dataclasses that are JAX pytrees."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree(cls: T) -> T:
    """
    Make a class a frozen dataclass, unless it is a dataclass, and register it as a pytree; fields with ``static`` in
    their metadata (:func:`static`) are not leaves.

    Fields with ``init=False`` are constants of the class, and no part of the pytree.

    Unlike :func:`jax.tree_util.register_dataclass`, rebuilding skips ``__init__`` and its checks: a gradient with
    respect to a kernel is a kernel too, whose lengthscale may be negative.

    .. code-block:: python

        @npgp.pytree
        class Pair:
            first: jax.Array
            second: jax.Array


        assert len(jax.tree.leaves(Pair(jnp.ones(2), jnp.zeros(3)))) == 2

    :raises TypeError: for a field with ``init=False`` and no default, which rebuilding would lose.
    """
    if "__dataclass_fields__" not in vars(cls):
        dataclasses.dataclass(frozen=True)(cls)
    for field in dataclasses.fields(cls):
        if not field.init and field.default is dataclasses.MISSING:
            raise TypeError(f"{cls.__name__}.{field.name} has init=False; in a pytree it must have a default.")
    fields = [field for field in dataclasses.fields(cls) if field.init]
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    children = tuple(field.name for field in fields if field.name not in static)

    def flatten(self):
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in children]
        return keyed, tuple(getattr(self, name) for name in static)

    def unflatten(metadata, values):
        self: Any = object.__new__(cls)
        for name, value in zip((*static, *children), (*metadata, *values), strict=True):
            object.__setattr__(self, name, value)
        return self

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


class ByName:
    """
    A class whose variances, scales and the like are named where it is called, for a bare number could be either. Its
    ``__init__`` has them after ``*`` (a dataclass: after ``KW_ONLY``), and this says so in words.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if not args:
            return object.__new__(cls)
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        first = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        if named and len(args) > first and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise TypeError(
                f"{cls.__name__} got {len(args)} arguments without a name, and takes {first}; {' and '.join(named)} "
                f"must be named, as in {cls.__name__}({named[0]}=…)."
            )
        return object.__new__(cls)


def static(default: Any, **options: Any) -> Any:
    """A dataclass field that is part of the structure, not an array."""
    return dataclasses.field(default=default, metadata={"static": True}, **options)
