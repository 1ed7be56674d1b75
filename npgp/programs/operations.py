"""What a function of arrays does, as a list of operations: what its results depend on, and each of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal


class Operations:
    """
    A function of arrays, run once on tracers. Nothing is computed.

    What has no part in a result, such as a print or a factorization that only others need, is left out of it. An
    operation with several results, such as a loop, counts as one: each of them depends on all that it is given.

    .. code-block:: python

        operations = npgp.programs.Operations(lambda a, b: {"sum": a + b, "double": 2.0 * a}, jnp.ones(3), jnp.ones(3))
        needs, double = operations.part("double")
        assert needs == {0}  # of the arguments, the first one alone

    :param function: of arrays, to a dictionary of arrays, or of lists of these.
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
        needed = {var for var in results if not isinstance(var, Literal)}
        operations = []
        for operation in reversed(jaxpr.eqns):
            if not needed.isdisjoint(operation.outvars):
                operations.append(operation)
                needed.update(var for var in operation.invars if not isinstance(var, Literal))

        def compute(*args: jax.Array, constants: Sequence[Any] = tuple(self.constants)) -> Any:
            values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))

            def read(var):
                return var.val if isinstance(var, Literal) else values[var]

            # As in JAX's tutorial of custom interpreters.
            for operation in reversed(operations):
                options = operation.primitive.get_bind_params(operation.params)
                made = operation.primitive.bind(*map(read, operation.invars), **options)
                made = made if operation.primitive.multiple_results else [made]
                values.update(zip(operation.outvars, made, strict=True))
            return jax.tree.unflatten(structure, map(read, results))

        return {i for i, var in enumerate(jaxpr.invars) if var in needed}, compute
