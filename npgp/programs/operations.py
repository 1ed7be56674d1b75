"""
What a function of arrays does, as a list of operations: what its results depend on, each of them alone, and what does
not depend on some arguments apart from the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal


class Operations:
    """
    A function of arrays, run once on tracers. Nothing is computed.

    What has no part in a result, such as a print or a factorization that only others need, is left out of it. An
    operation with several results, such as a loop, counts as one: each of them depends on all that it is given.

    .. code-block:: python

        operations = npgp.programs.Operations(
            lambda a, b: {"sum": a + b, "double": 2.0 * a}, jnp.ones(3), jnp.ones(3)
        )
        needs, double = operations.part("double")
        assert needs == {0}  # of the arguments, the first one alone

    :param function: of arrays, to a dictionary of arrays, or of pytrees of these.
    :param args: arrays like those that it is to be given.
    """

    def __init__(self, function: Callable[..., dict[Any, Any]], *args: jax.Array):
        self._closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        #: Arrays that the function has beside its arguments.
        self.constants: list[Any] = list(self._closed.consts)
        positions = iter(range(len(self._closed.jaxpr.outvars)))
        self._results = jax.tree.map(lambda _: next(positions), shapes)

    def part(self, name: Any) -> tuple[set[int], Callable[..., Any]]:
        """
        A result by itself.

        :param name: its key in the dictionary.
        :return: positions of the arguments that a result depends on; and the function, of all arguments, that computes
            it alone. It takes other ``constants`` too.
        """
        jaxpr = self._closed.jaxpr
        positions, structure = jax.tree.flatten(self._results[name])
        results = [jaxpr.outvars[i] for i in positions]
        needed = set(_variables(results))
        operations = []
        for operation in reversed(jaxpr.eqns):
            if not needed.isdisjoint(operation.outvars):
                operations.append(operation)
                needed.update(_variables(operation.invars))

        def compute(*args: jax.Array, constants: Sequence[Any] = tuple(self.constants)) -> Any:
            values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))
            _run(reversed(operations), values)
            return jax.tree.unflatten(structure, [_read(values, var) for var in results])

        return {i for i, var in enumerate(jaxpr.invars) if var in needed}, compute

    def divided(self, moving: Collection[int]) -> tuple[Callable[..., list[Any]], Callable[..., dict[Any, Any]]]:
        """
        The function in two: what some arguments have no part in, and the rest.

        .. code-block:: python

            operations = npgp.programs.Operations(
                lambda a, b: {"y": a * jnp.linalg.inv(b)}, 2.0, jnp.eye(3)
            )
            before, after = operations.divided({0})
            kept = before(2.0, jnp.eye(3))  # the inverse
            np.testing.assert_array_equal(after(kept, 5.0, jnp.eye(3))["y"], 5.0 * np.eye(3))

        :param moving: positions of these arguments.
        :return: a function of all arguments, which does not look at these, to a list of arrays; and one of that list
            and all arguments, which looks at these alone, to the results.
        """
        jaxpr = self._closed.jaxpr
        later = {jaxpr.invars[i] for i in moving}
        first: list[Any] = []
        second: list[Any] = []
        for operation in jaxpr.eqns:
            depends = any(var in later for var in _variables(operation.invars))
            (second if depends else first).append(operation)
            if depends:
                later.update(operation.outvars)
        positions, structure = jax.tree.flatten(self._results)
        results = [jaxpr.outvars[i] for i in positions]
        used = _variables([var for operation in second for var in operation.invars] + results)
        kept = [var for var in dict.fromkeys(used) if var not in later]

        def before(*args: jax.Array) -> list[Any]:
            values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*self.constants, *args], strict=True))
            _run(first, values)
            return [values[var] for var in kept]

        def after(given: Sequence[Any], *args: jax.Array) -> dict[Any, Any]:
            values = dict(zip(jaxpr.invars, args, strict=True)) | dict(zip(kept, given, strict=True))
            _run(second, values)
            return jax.tree.unflatten(structure, [_read(values, var) for var in results])

        return before, after


def _variables(of: Iterable[Any]) -> list[Any]:
    return [var for var in of if not isinstance(var, Literal)]


def _read(values: dict[Any, Any], var: Any) -> Any:
    return var.val if isinstance(var, Literal) else values[var]


def _run(operations: Iterable[Any], values: dict[Any, Any]) -> None:
    """Add what operations make to the values of variables, as in JAX's tutorial of custom interpreters."""
    for operation in operations:
        options = operation.primitive.get_bind_params(operation.params)
        made = operation.primitive.bind(*(_read(values, var) for var in operation.invars), **options)
        made = made if operation.primitive.multiple_results else [made]
        values.update(zip(operation.outvars, made, strict=True))
