"""Functions computed in float64 inside float32 programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from npgp.programs.backend import on_cpu

_double = Primitive("in_double")
_double.multiple_results = True


def in_double(function: Callable[..., Any], *arguments: Any) -> Any:
    """
    ``function(*arguments)``, its numbers computed in float64 where JAX's are float32: what cancels to the digits that
    float32 does not have. It is compiled, differentiated (forward and backward, any number of times) and mapped as any
    other function; where float64 is on already, it is plainly called.

    On a CPU that takes up to twice as long; many GPUs compute in float64 at a small share of their speed.

    .. code-block:: python

        def small(x):
            return (1.0 + x) - 1.0


        x = jnp.float32(1e-9)
        assert small(x) == 0.0 and jnp.allclose(in_double(small, x), 1e-9, atol=0.0)

    :param function: a function of arrays; all arrays it uses are among its arguments.
    :param arguments: pytrees, whose floating entries are widened.
    :return: what it returns, its floating entries in float32.
    """
    if not _is_narrow():
        return function(*arguments)
    leaves, tree = jax.tree.flatten(arguments)
    returned: list[Any] = []

    def of_leaves(*leaves):
        out, *returned[:] = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        return [_widened(jnp.asarray(x)) for x in out]

    out = _double.bind(*map(jnp.asarray, leaves), function=of_leaves, pullback=None)
    return jax.tree.unflatten(returned[0], out)


def in_double_if(wanted: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """:func:`in_double` where it is wanted, on a CPU; elsewhere ``function(*arguments)``."""
    return in_double(function, *arguments) if wanted and is_worth_it() else function(*arguments)


def is_worth_it() -> bool:
    """Whether float64 is cheap here, and not what everything is computed in anyway."""
    return on_cpu() and _is_narrow()


def _is_narrow() -> bool:
    return jnp.result_type(float) == jnp.float32


def _widened(x: Any) -> Any:
    return lax.convert_element_type(x, jnp.float64) if x.dtype == jnp.float32 else x


def _narrowed(x: Any) -> Any:
    return lax.convert_element_type(x, jnp.float32) if x.dtype == jnp.float64 else x


def _call(function: Callable[..., Sequence[Any]], *arguments: Any) -> list[Any]:
    """The function in float64, of and to float32."""
    with jax.enable_x64(True):
        return [_narrowed(x) for x in function(*map(_widened, arguments))]


@_double.def_impl
def _(*arguments, function, pullback):
    return _call(function, *arguments)


@_double.def_abstract_eval
def _(*avals, function, pullback):
    shapes = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    found = jax.eval_shape(lambda *arguments: _call(function, *arguments), *shapes)
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in found]


def _derivative(primals, tangents, *, function, pullback):
    """The derivative is a call as well, of primals and tangents, that knows how to be transposed."""
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(primals):
        def of(*values):
            all_of_them = dict(enumerate(primals)) | dict(zip(moving, values, strict=True))
            return list(function(*all_of_them.values()))

        return of, [primals[i] for i in moving]

    def tangent(*arguments):
        of, values = of_moving(arguments[: len(primals)])
        return jax.jvp(of, values, list(arguments[len(primals) :]))[1]

    def backward(primals, cotangents):
        of, values = of_moving(primals)
        return jax.vjp(of, *values)[1](list(cotangents))

    out = _double.bind(*primals, function=function, pullback=pullback)
    directions = [tangents[i] for i in moving]
    return out, _double.bind(*primals, *directions, function=tangent, pullback=backward)


def _transposed(cotangents, *arguments, function, pullback):
    known = [x for x in arguments if not ad.is_undefined_primal(x)]  # the primals, which come first
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    found = _double.bind(
        *known, *cotangents, function=lambda *x: pullback(x[: len(known)], x[len(known) :]), pullback=None
    )
    return [None] * len(known) + found


def _mapped(arguments, axes, *, function, pullback):
    (size,) = {x.shape[axis] for x, axis in zip(arguments, axes, strict=True) if axis is not None}
    arguments = [batching.bdim_at_front(x, axis, size) for x, axis in zip(arguments, axes, strict=True)]
    pullback = None if pullback is None else jax.vmap(pullback)
    out = _double.bind(*arguments, function=jax.vmap(function), pullback=pullback)
    return out, [0] * len(out)


def _lowered(context, *arguments, function, pullback):
    with jax.enable_x64(True):
        return mlir.lower_fun(lambda *x: _call(function, *x), multiple_results=True)(context, *arguments)


ad.primitive_jvps[_double] = _derivative
ad.primitive_transposes[_double] = _transposed
batching.primitive_batchers[_double] = _mapped
mlir.register_lowering(_double, _lowered)
