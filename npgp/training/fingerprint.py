"""
What a training is known by: its data, its model, and how it is optimized, each as words by name.

Nothing in them depends on addresses or on the order of sets, so that the same program has the same in every process.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import Distribution
from numpyro.distributions.constraints import Constraint
from numpyro.infer import SVI

from npgp import checks
from npgp.contract import plate_size
from npgp.model.rerun import Hidden
from npgp.model.sites import FUNCTION
from npgp.training.files import map_of, native, read_rows
from npgp.training.inputs import is_array
from npgp.training.sources import Source

#: Arrays of at most so many bytes are looked at as wholes, of others so many rows, first and last among them.
MAX_BYTES, MAX_ROWS = 2**20, 64


def of_data(args: tuple, kwargs: dict[str, Any], seed: list[int], batch_size: int | None) -> dict[str, str]:
    """
    Shapes, dtypes and checksums of arguments.

    :param args: positional arguments of model and guide; the first may be a source.
    :param kwargs: keyword arguments.
    :param seed: of the source's batches.
    :param batch_size: of the source's batches.
    """
    found: dict[str, str] = {}
    for name, value in [(f"args[{i}]", x) for i, x in enumerate(args)] + [
        (f"argument {k!r}", kwargs[k]) for k in kwargs
    ]:
        if not isinstance(value, Source):
            found |= described(value, name, look=checksum)
        elif hasattr(value, "fingerprint"):
            found[name] = value.fingerprint()
        else:
            batch = next(iter(value.batches(seed, batch_size, 0)))
            found |= {f"{name}: rows": str(value.num_rows)} | described(batch, f"{name}: batch 0", look=checksum)
    return found


def of_model(svi: SVI, args: tuple, kwargs: dict[str, Any]) -> dict[str, str]:
    """
    The sites of model and guide: sizes of plates, classes of distributions, kernels, likelihoods and of what they are
    made of, shapes and dtypes, and numbers that are no arrays.

    :param svi: model and guide.
    :param args: positional arguments of a step.
    :param kwargs: keyword arguments of a step.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if is_array(x)}
    found: dict[str, str] = described(svi.static_kwargs, "SVI", look=checksum)

    def run(arrays):
        args, kwargs = jax.tree.unflatten(structure, [arrays.get(i, x) for i, x in enumerate(leaves)])
        kwargs |= svi.static_kwargs
        with Hidden():
            key = jax.random.key(0)
            guide = handlers.trace(handlers.seed(svi.guide, key)).get_trace(*args, **kwargs)
            # The values of several samples have another shape.
            given = {} if getattr(svi.loss, "multi_sample_guide", False) else guide
            model = handlers.trace(handlers.replay(handlers.seed(svi.model, key), given)).get_trace(*args, **kwargs)
        for part, sites in (("model", model), ("guide", guide)):
            for name, site in sites.items():
                found.update(_of_site(site, f"{part}: {name}"))

    jax.eval_shape(run, arrays)
    return found


def of_optimization(svi: SVI, row_optim: Any) -> dict[str, str]:
    """Classes, functions and numbers that the loss and the optimizers are made of."""
    parts = {"loss": svi.loss, "optim": svi.optim} | ({} if row_optim is None else {"row_optim": row_optim})
    return {k: v for name, x in parts.items() for k, v in described(x, name, look=checksum, inside=True).items()}


def checksum(x: Any) -> str:
    """A checksum of an array, or of some of its rows."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return ""
    size = x.size * x.dtype.itemsize
    if x.ndim == 0 or (size <= MAX_BYTES and map_of(x) is None):
        some = np.asarray(x)
    else:
        number = len(x) if size <= MAX_BYTES else min(len(x), MAX_ROWS)
        rows = np.unique(np.linspace(0, len(x) - 1, number).astype(np.int64)) if number else np.arange(0)
        some = read_rows(x, rows) if isinstance(x, np.ndarray) else np.asarray(x[rows])
    some = native(some)
    some = some.astype(jax.dtypes.canonicalize_dtype(some.dtype))
    return f" {zlib.crc32(np.ascontiguousarray(some).view(np.uint8).data if some.size else b''):08x}"


def _of_site(site: dict[str, Any], where: str) -> dict[str, str]:
    if site["type"] == "plate":
        return {where: f"plate of {plate_size(site)}"}
    if site["type"] != "sample":
        return {}  # the state has the parameters
    found = described(site["fn"], where)
    # The draw of a GP, whose kernel no message has otherwise.
    projector = getattr(site["infer"].get(FUNCTION), "projector", None)
    if projector is not None:
        found |= described(projector.kernel, f"{where}: kernel") | described(projector.blocks, f"{where}: inducing")
    return found


def described(x: Any, where: str, look: Callable[[Any], str] | None = None, inside: bool = False) -> dict[str, str]:
    """
    What an object is and what it is made of, as words by their places in it.

    :param x: the object.
    :param where: what it is called.
    :param look: what to say of an array beside its dtype and shape.
    :param inside: look into functions and objects of any class, and not only into pytrees and dataclasses.
    """
    found: dict[str, str] = {}
    seen: dict[int, Any] = {}

    def go(x: Any, where: str, depth: int) -> None:
        x = inspect.unwrap(x) if callable(x) and hasattr(x, "__wrapped__") else x
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        if x is None or isinstance(x, str | bytes | int | float | complex | np.dtype):
            # Optax's schedules turn numbers in them into floats once they are used.
            found[where] = repr(int(x) if isinstance(x, float) and x.is_integer() else x)
        elif isinstance(x, jax.Array | np.ndarray | np.generic):
            found[where] = _array(x, None if checks.is_traced(x) else look)
        else:
            named = x if isinstance(x, type) or inspect.isroutine(x) else type(x)
            found[where] = getattr(named, "__qualname__", type(x).__qualname__)
            if id(x) not in seen and depth < 50:
                seen[id(x)] = x
                for place, part in _parts(x, inside):
                    go(part, f"{where}{place}", depth + 1)

    go(x, where, 0)
    return found


def _array(x: Any, look: Callable[[Any], str] | None) -> str:
    if not jnp.issubdtype(x.dtype, np.number) and x.dtype != np.bool_:
        return f"array of {x.dtype}"
    dtype = jax.dtypes.canonicalize_dtype(np.dtype(x.dtype).newbyteorder("="))
    return f"{dtype}[{','.join(map(str, x.shape))}]{look(x) if look else ''}"


def _parts(x: Any, inside: bool) -> Iterator[tuple[str, Any]]:
    """What an object is made of, with its place in it."""
    if isinstance(x, dict):
        yield from sorted((f"[{key!r}]", value) for key, value in x.items())
    elif isinstance(x, tuple | list):
        names = [f".{name}" for name in x._fields] if hasattr(x, "_fields") else [f"[{i}]" for i in range(len(x))]
        yield from zip(names, x, strict=True)
    elif isinstance(x, Distribution):
        for name in sorted({*type(x).gather_pytree_data_fields(), *type(x).gather_pytree_aux_fields()}):
            if not name.startswith("_"):  # shapes, which arrays have, and whether arguments are checked
                yield f".{name}", getattr(x, name, None)
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        for field in dataclasses.fields(x):
            yield f".{field.name}", getattr(x, field.name, None)
    elif isinstance(x, Constraint) or (inside and not isinstance(x, type | types.ModuleType)):
        if isinstance(x, functools.partial):
            yield from ((".func", x.func), (".args", x.args), (".keywords", x.keywords))
        elif isinstance(x, types.MethodType):
            yield from ((".self", x.__self__), (".func", x.__func__))
        elif isinstance(x, types.FunctionType):
            for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
                if cell != types.CellType():  # one that has something in it
                    yield f".{name}", cell.cell_contents
            yield from ((place, x) for place, x in (("()", x.__defaults__), ("(*)", x.__kwdefaults__)) if x)
        else:
            yield from ((f".{name}", value) for name, value in sorted(getattr(x, "__dict__", {}).items()))
