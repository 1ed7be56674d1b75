"""
Saving and loading of posteriors, kernels and everything else that is made of arrays and dataclasses.

A file is a NumPy ``.npz`` archive: the arrays, and under ``npgp`` a description in JSON of what they are part of. There
is no pickle in it, and nothing in a file can run code: only classes of this package, or those that the caller of
:func:`load` names, are rebuilt, without calling them. Classes of this package are named by the folder that exports them
(``npgp.kernels:RBF``), so that files do not depend on where in the folder their code is.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib
import inspect
import json
import math
import os
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution

from npgp import checks
from npgp.programs.tracing import is_weakly_typed

#: Changes with the format of files; only files of this version are read.
VERSION = 1
_PACKAGE = __name__.partition(".")[0]
_DESCRIPTION = _PACKAGE
#: Of the dtypes that arrays in files may have.
_KINDS = "biufc"


def save(path: str | os.PathLike, obj: Any) -> None:
    """
    Save an object to one ``.npz`` file, which :func:`load` reads. The file appears when it is complete, or not at all.

    What can be saved: dataclasses such as posteriors, sample paths, kernels, inducing blocks and likelihoods; NumPyro
    distributions; arrays and random keys; numbers, strings, ``None``; and tuples, lists and dictionaries of these.

    .. code-block:: python

        npgp.save("f.npz", {"f": posterior, "Z": Z})

    :param path: of the file; used as it is, without adding a suffix.
    :param obj: the object.
    :raises TypeError: for what cannot be saved, such as a function; the message says where in ``obj`` it is. In place
        of a function, such as the shape of :class:`npgp.features.Activations`, give an object of a dataclass with
        ``__call__``, registered with :func:`npgp.pytree`, and name the class to :func:`load`.
    """
    path = Path(_checked(path))
    arrays: dict[str, np.ndarray] = {}
    name = type(obj).__name__.lower()
    try:
        content = _describe(obj, name, arrays)
        text = json.dumps({"format": _PACKAGE, "version": VERSION, "content": content})
    except RecursionError as error:
        raise TypeError(f"{name} contains itself, or is nested too deeply, and cannot be saved.") from error
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            np.savez(file, allow_pickle=False, **{_DESCRIPTION: np.frombuffer(text.encode(), np.uint8)}, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike, classes: Sequence[type] = (), *, max_bytes: int | None = None) -> Any:
    """
    Load what :func:`save` wrote: the same object, with arrays of the same dtypes and bits.

    Objects are rebuilt without the checks of their constructors, as JAX does with pytrees. JAX arrays come back on the
    default device.

    .. code-block:: python

        npgp.save("posterior.npz", posterior)
        back = npgp.load("posterior.npz")
        np.testing.assert_array_equal(back.mean(X), posterior.mean(X))

    :param path: of the file.
    :param classes: classes of your own, from outside this package, that may be rebuilt; found by their names.
    :param max_bytes: how many bytes the description and all arrays may have. If omitted, as many as the file has, for
        :func:`save` compresses nothing: a small file cannot fill the memory. Raise it for a file that was compressed
        afterwards, if you trust it.
    :raises ValueError: for a file that is damaged, not written by :func:`save` or of another version; for one
        of more than ``max_bytes``; for a class that is unknown; and for 64-bit JAX arrays where JAX has 64-bit numbers
        switched off, since their digits would be lost in silence.
    :raises OSError: if the file cannot be read.
    """
    path = _checked(path)
    if max_bytes is not None:
        max_bytes = checks.whole_number(max_bytes, "max_bytes")
    own = {cls.__qualname__: cls for cls in classes}
    try:
        if os.path.isdir(path):
            raise _Refusal("is a folder; load takes the name of a file that npgp.save wrote.")
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            arrays = _Arrays(archive, os.fstat(file.fileno()).st_size if max_bytes is None else max_bytes)
            header = json.loads(arrays.take(_DESCRIPTION).tobytes())
            if header["format"] != _PACKAGE:
                raise TypeError("another program's file")
            version = header["version"]
            if version != VERSION:
                raise _Refusal(f"has version {version!r} of the file format; this npgp reads {VERSION}.")
            return _Builder(arrays, own).build(header["content"])
    except _Refusal as refusal:
        raise ValueError(f"{path!r} {refusal}") from None
    except Exception as error:  # of whatever met the damage
        # Where a zip archive says that it has something, there may be nothing.
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        raise ValueError(f"{path!r} is damaged, or no file that npgp.save wrote.") from error


def _checked(path: Any) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {path!r}; it must be the name of a file, a string or an os.PathLike.")
    return os.fsdecode(path)


class _Refusal(Exception):
    """What is wrong with a file, as the end of a sentence that begins with its name."""


# ---------------------------------------------------------------------------------------------------------------
# From objects to JSON


def _describe(obj: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    """
    JSON for an object: numbers, strings, ``None`` as they are; everything else as ``{kind: …}``.

    :param where: what error messages call the object.
    :param arrays: filled with the arrays in it.
    """
    if obj is None or type(obj) in (bool, int, float, str):
        return obj
    if type(obj) in (tuple, list):
        return {type(obj).__name__: [_describe(item, f"{where}[{i}]", arrays) for i, item in enumerate(obj)]}
    if type(obj) is dict:
        for key in obj:
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}; dictionaries can be saved if their keys are strings.")
        return {"dict": {key: _describe(item, f"{where}[{key!r}]", arrays) for key, item in obj.items()}}
    if checks.is_traced(obj):
        raise TypeError(f"{where} is traced by JAX and has no values yet: save outside jit, vmap and grad.")
    if isinstance(obj, jax.Array):
        if jnp.issubdtype(obj.dtype, jax.dtypes.prng_key):
            name = _store(np.asarray(jax.random.key_data(obj)), where, arrays)
            return {"key": name, "impl": str(jax.random.key_impl(obj))}
        # A weak type lets an array of another precision keep its own. JAX can make scalars of that kind again.
        weak = {"weak": True} if is_weakly_typed(obj) and obj.ndim == 0 else {}
        return {"jax": _store(np.asarray(obj), where, arrays), **weak}
    if isinstance(obj, np.generic):
        return {"scalar": _store(np.asarray(obj), where, arrays)}
    if type(obj) is np.ndarray:
        return {"numpy": _store(obj, where, arrays)}
    fields = _fields(obj)
    if fields is None:
        # JAX's Partial wraps functions that are to be pytrees.
        bare = isinstance(obj, functools.partial) and inspect.isroutine(obj.func) and not (obj.args or obj.keywords)
        named = obj.func if bare else obj
        kind = f"a {type(obj).__name__}"
        if isinstance(obj, type) or inspect.isroutine(named):
            kind = f"the {'class' if isinstance(obj, type) else 'function'} {named.__qualname__}"
        hint = "a dataclass with __call__ can take its place." if callable(obj) and not isinstance(obj, type) else ""
        raise TypeError(
            f"{where} is {kind}, which cannot be saved; arrays, numbers, strings, dataclasses, and tuples, lists and "
            f"dictionaries of these can{': ' if hint else '.'}{hint}"
        )
    described = {name: _describe(value, f"{where}.{name}", arrays) for name, value in fields.items()}
    return {"class": public_name(type(obj)), "fields": described}


def public_name(cls: type) -> str:
    """
    What files call a class: ``folder:Class`` with the folder of this package that exports it, ``module:Class`` for a
    class from elsewhere.

    :raises TypeError: for a class of this package that no folder exports.
    """
    if cls.__module__.partition(".")[0] != _PACKAGE:
        return f"{cls.__module__}:{cls.__qualname__}"
    folder = _folder(cls.__module__)
    if getattr(importlib.import_module(folder), cls.__qualname__, None) is not cls:
        raise TypeError(f"{cls.__qualname__} is not exported by {folder}, so it has no name that a file could keep.")
    return f"{folder}:{cls.__qualname__}"


def _folder(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _fields(obj: Any) -> dict[str, Any] | None:
    """What an object is made of, or ``None``."""
    if isinstance(obj, Distribution):
        values, metadata = obj.tree_flatten()
        names = (*type(obj).gather_pytree_data_fields(), *type(obj).gather_pytree_aux_fields())
        return dict(sorted(zip(names, (*values, *metadata), strict=True)))
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: getattr(obj, field.name) for field in _variable(type(obj))}
    return None


def _variable(cls: Any) -> list[dataclasses.Field]:
    """A dataclass's fields but for constants of the class."""
    return [field for field in dataclasses.fields(cls) if field.init or field.default is dataclasses.MISSING]


def _store(array: np.ndarray, where: str, arrays: dict[str, np.ndarray]) -> str:
    if array.dtype.kind not in _KINDS:  # objects, strings, and what NumPy does not know, such as bfloat16
        raise TypeError(f"{where} is an array of {array.dtype}, which cannot be saved; arrays of numbers can.")
    name = str(len(arrays))
    arrays[name] = array
    return name


# ---------------------------------------------------------------------------------------------------------------
# And back


class _Arrays:
    """
    The arrays in an archive, each of which can be taken once: what is not asked for is not read.

    :param archive: the archive.
    :param max_bytes: of all arrays that are taken.
    """

    def __init__(self, archive: zipfile.ZipFile, max_bytes: int):
        self.archive, self.max_bytes, self._left, self._taken = archive, max_bytes, max_bytes, set[str]()

    def take(self, name: str) -> np.ndarray:
        """An array by name; zipfile compares checksums."""
        if name in self._taken:  # no file of ours names one twice, which would be a way to fill the memory
            raise KeyError(name)
        self._taken.add(name)
        info = self.archive.getinfo(f"{name}.npy")
        if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
            raise zipfile.BadZipFile("two sizes of what is not compressed")
        self._left -= info.file_size
        if self._left < 0:
            raise _Refusal(
                f"holds arrays of more than max_bytes = {self.max_bytes} bytes, which is the file's size if not given; "
                "if you trust it, pass load a larger max_bytes."
            )
        with self.archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(member)
            if dtype.kind not in _KINDS or math.prod(shape) * dtype.itemsize != info.file_size - member.tell():
                raise TypeError("an array of other numbers than the file has")
        with self.archive.open(info) as member:
            return np.lib.format.read_array(member, allow_pickle=False)


class _Builder:
    """Rebuilds what :func:`_describe` described."""

    def __init__(self, arrays: _Arrays, classes: dict[str, type]):
        self.arrays, self.classes = arrays, classes

    def build(self, node: Any) -> Any:
        if not isinstance(node, dict):
            if isinstance(node, list):
                raise TypeError("a list without its kind")
            return node
        kind = next(iter(node))
        value = node[kind]
        if kind in ("tuple", "list"):
            items = [self.build(item) for item in value]
            return tuple(items) if kind == "tuple" else items
        if kind == "dict":
            return {key: self.build(item) for key, item in value.items()}
        if kind == "class":
            return self._rebuild(value, {name: self.build(item) for name, item in node["fields"].items()})
        array = self.arrays.take(value)
        if kind == "numpy":
            return array
        if kind == "scalar":
            return array[()]
        if kind == "key":
            return jax.random.wrap_key_data(jnp.asarray(array), impl=node["impl"])
        if kind != "jax":
            raise TypeError(f"an array of the kind {kind}")
        if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise _Refusal(
                f"has arrays of {array.dtype}, and JAX has 64-bit numbers switched off, which would cut their digits: "
                'call jax.config.update("jax_enable_x64", True) first.'
            )
        return jnp.asarray(array.item()) if node.get("weak") else jnp.asarray(array)

    def _rebuild(self, name: str, fields: dict[str, Any]) -> Any:
        cls: Any = self._class(name)
        is_distribution = issubclass(cls, Distribution)
        if is_distribution:
            data, metadata = cls.gather_pytree_data_fields(), cls.gather_pytree_aux_fields()
            known = {*data, *metadata}
        else:
            known = {field.name for field in _variable(cls)}
        if wrong := known ^ set(fields):
            raise _Refusal(
                f"has a {cls.__qualname__} that differs from this version's in {sorted(wrong)}: it was "
                "written by another version of its package."
            )
        if is_distribution:
            return cls.tree_unflatten(tuple(map(fields.get, metadata)), tuple(map(fields.get, data)))
        obj = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(obj, name, value)
        return obj

    def _class(self, name: str) -> type:
        module, _, qualname = name.partition(":")
        found: Any = None
        if module.partition(".")[0] == _PACKAGE:
            folder = _folder(module)
            try:
                found = getattr(importlib.import_module(folder), qualname, None)
            except ImportError:  # a folder that another version has
                pass
            if getattr(found, "__module__", "").partition(".")[0] != _PACKAGE:
                found = None  # something that the folder imports
        if found is None:
            found = self.classes.get(qualname)
        if not isinstance(found, type) or not (dataclasses.is_dataclass(found) or issubclass(found, Distribution)):
            raise _Refusal(
                f"has an object of class {module}.{qualname}, which npgp does not have; if it is yours, "
                f"pass it: load(path, classes=[{qualname.rpartition('.')[2]}])."
            )
        return found
