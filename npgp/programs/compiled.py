"""
Compiled programs, each compiled once in a process.

JAX knows a program by the Python function that it was traced from, and compiles again for a new one, though it may do
the same: for each call of ``fit``, say, whose steps are a new function. Here a program is known by what it does, its
text. Tracing a function again to see whether it still does the same takes a tenth of the time that compiling takes, and
what a model reads beside its arguments may change in the meantime.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar

import jax
import jaxlib
import numpy as np

from npgp.programs.backend import FAULTY_LOOPS, on_cpu
from npgp.programs.later import SeesLater
from npgp.programs.operations import Operations
from npgp.programs.tracing import calls_python, current_trace, default_device, is_traced, out_avals, trace_of

T = TypeVar("T")

#: Held wherever a model is run or traced: NumPyro's handlers are in one list for all threads.
one_model_at_a_time = threading.RLock()

#: Compiler options of programs that run once or take no time. XLA's optimization takes three quarters of compiling on a
#: CPU, and trying out kernels most of it on a GPU.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_autotune_level": 0,
}

#: Compiler options of programs that run thousands of times: without XLA's emitters of fused loops for CPUs, a step is
#: compiled in half the time. (M = 20 to 512: .50 to .62; the step takes .87 to 1.08 of the time.) On a GPU XLA writes
#: many kernels for each shape of matrix products, to see whether one is faster than the vendor's. (M = 1024 on an H200:
#: without them the first step comes after 7 s, with them it did not within 45; steps of a program by hand took 1.51 ms
#: without them and 1.57 with.)
STEPS = {"xla_cpu_use_fusion_emitters": False, "xla_gpu_enable_triton_gemm": False}

#: Compiler options of all programs: on a CPU, where jaxlib's loops of YNNPACK are faulty, without these. With other
#: versions a step takes longer without them. (M = 64, 256, 512: 1.1, 1.1 and 1.04 with jaxlib 0.10.1; 1.5, 1.3 and 1.1
#: with 0.12.)
_ALWAYS = {"xla_cpu_experimental_ynn_fusion_type": ""} if jaxlib.__version__ in FAULTY_LOOPS else {}

#: So many programs are kept, those last used.
_MOST = 64
_programs: OrderedDict[Hashable, jax.stages.Compiled] = OrderedDict()
_lock = threading.Lock()
#: Names of compiler options that XLA turned out not to have.
_unknown: set[str] = set()


class Program:
    """
    A function of arrays that runs as a compiled program, as by ``jax.jit``.

    .. code-block:: python

        double = npgp.programs.Program(lambda x: 2.0 * x)
        assert double(jnp.ones(3)).sum() == 6.0

    :param function: of pytrees of arrays, to a pytree of arrays. It is traced once for arguments of each shape.
    :param options: compiler options: on a GPU those that are named ``xla_gpu_…``, on a CPU the others.
    :param donate: whether the first argument may be written over.
    :param out_shardings: how several devices share what it returns, as for ``jax.jit``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        options: dict[str, Any] | None = None,
        donate: bool = False,
        out_shardings: Any = None,
    ):
        self._function, self._options, self._donate, self._out_shardings = function, options, donate, out_shardings
        self._known: OrderedDict[Hashable, tuple[jax.stages.Compiled, Any]] = OrderedDict()

    def __call__(self, *args: Any) -> Any:
        run, returned = self._for(args)
        return jax.tree.unflatten(returned, jax.tree.leaves(run(*jax.tree.leaves(args))))

    def prepare(self, *args: Any) -> jax.stages.Compiled:
        """Compile it for arguments like these, if need be; JAX's object, of flat arguments."""
        return self._for(args)[0]

    def _for(self, args: tuple[Any, ...]) -> tuple[jax.stages.Compiled, Any]:
        leaves, structure = jax.tree.flatten(args)
        places = _places(leaves)
        key = structure, tuple(map(jax.typeof, leaves)), places
        if key not in self._known:
            donated = len(jax.tree.leaves(args[0])) if self._donate else 0
            self._known[key] = self._compiled(leaves, structure, donated, places)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        return self._known[key]

    def _compiled(
        self, leaves: list[Any], structure: Any, donated: int, places: Hashable
    ) -> tuple[jax.stages.Compiled, Any]:
        """The program of such leaves, some of which may be written over; and the structure of its result."""
        function, out_shardings = self._function, self._out_shardings
        returned: Any = None

        def run(*leaves):
            nonlocal returned
            results = function(*jax.tree.unflatten(structure, leaves))
            flat, returned = jax.tree.flatten(results)
            # The text has the names of results, which are no reason to compile again; but shardings are by structure.
            return flat if out_shardings is None else results

        # The text would say nothing of arguments without use.
        jitted = jax.jit(run, keep_unused=True, donate_argnums=range(donated), out_shardings=out_shardings)
        traced = jitted.trace(*leaves)
        lowered = traced.lower()
        options = _options_here(self._options or {})
        text = lowered.as_text()
        key = text, out_avals(traced), tuple(sorted(options.items())), places
        with _lock:
            compiled = _programs.get(key)
            if compiled is not None:
                _programs.move_to_end(key)
        if compiled is None:
            compiled = _compiled_with(options, lowered)
            if not calls_python(text):  # whose functions the text does not tell apart
                with _lock:
                    _programs[key] = compiled
                    while len(_programs) > _MOST:
                        _programs.popitem(last=False)
        return compiled, returned


def _places(leaves: list[Any]) -> Hashable:
    """The devices that a program of such arguments runs on, of which its text has the number alone."""
    shardings = [leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None for leaf in leaves]
    devices = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
    if len(devices) > 1:
        return tuple(shardings)
    # Arguments that may be moved follow the others, and are no reason to compile again.
    return devices.pop() if devices else default_device()


def _options_here(options: dict[str, Any]) -> dict[str, Any]:
    """Those for the devices that programs run on."""
    backend = jax.default_backend()
    if backend not in ("cpu", "gpu"):
        return {}
    every = _ALWAYS | options
    return {name: value for name, value in every.items() if name.startswith("xla_gpu_") == (backend == "gpu")}


def _compiled_with(options: dict[str, Any], lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiled with those of some options that this version of XLA has: they come and go."""
    try:
        return lowered.compile({name: value for name, value in options.items() if name not in _unknown})
    except jax.errors.JaxRuntimeError as error:
        name = re.search("No such compile option: '([^']+)'", str(error))
        if name is None or name[1] in _unknown:
            raise
        _unknown.add(name[1])
        return _compiled_with(options, lowered)


#: What a function raises that looks at the values of traced arrays.
_WANTS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def one_program(
    function: Callable[[], T],
    *,
    options: dict[str, Any] | None = QUICK,
) -> T:
    """
    What a function returns, computed by one compiled program, where Python would have one compiled for each operation.

    The arrays that the function has are what they are: their values can be seen. What is made of them has none until
    the end. Checks of such values are made then (:func:`npgp.programs.later.see_later`). A function that cannot do
    without runs as Python has it, and so does every function inside ``jit``, ``vmap`` and ``grad``.

    .. code-block:: python

        assert npgp.programs.one_program(lambda: jnp.sum(jnp.ones(3))) == 3.0

    :param function: without arguments; it may return any pytree.
    :param options: compiler options, as for :class:`Program`.
    """
    if is_traced(jax.device_put(0.0)):
        return function()
    try:
        with one_model_at_a_time:
            traced = _Traced(function)
            return function() if traced.transformed else traced.result(options)
    except _WANTS_VALUES:
        return function()


class _Traced:
    """A function without arguments, traced."""

    def __init__(self, function: Callable[[], Any]):
        def run():
            with (later := SeesLater()):
                self._result = function()
            here = current_trace()
            self._later = later
            self._computed = {id(leaf): leaf for leaf in jax.tree.leaves(self._result) if trace_of(leaf) is here}
            return {"result": (list(self._computed.values()), later.values)}

        self._operations = Operations(run)

    @property
    def transformed(self) -> bool:
        """Whether ``vmap`` or ``grad`` is around it."""
        return any(map(is_traced, self._operations.constants))

    def result(self, options: Any) -> Any:
        """What the function returns."""
        if not self._computed and not self._later.values:
            return self._result
        _, compute = self._operations.part("result")
        # The arrays that it has are arguments: as constants they would be in the program's text.
        constants = self._operations.constants
        found, values = Program(lambda constants: compute(constants=constants), options=options)(constants)
        self._later.look(values)
        known = dict(zip(self._computed, found, strict=True))
        return jax.tree.map(lambda x: known.get(id(x), x), self._result)


# ---------------------------------------------------------------------------------------------------------------
# Functions of any number of rows: rows are filled up to a few numbers, and the results are cut

#: Fewest rows of a program; then twice as many, and so on, up to …
_LEAST = 16
#: … so many; then whole multiples of it, for what is computed in vain costs time.
_STEP = 1024


def padded_size(rows: int) -> int:
    """How many rows the program for so many rows has."""
    if rows > _STEP:
        return -(-rows // _STEP) * _STEP
    return max(_LEAST, 1 << max(rows - 1, 0).bit_length())


def on_grid(function: Callable[[Any, Any], T], owner: Any, X: Any, *, axes: tuple[int, ...] = (-1,)) -> T:
    """
    ``function(owner, X)`` as a compiled program that serves other numbers of rows too.

    .. code-block:: python

        assert npgp.programs.on_grid(
            lambda kernel, X: kernel.diag(X), kernel, jnp.asarray(X)
        ).shape == (30,)

    :param function: of a pytree and rows, each row's results depending on that row alone. It must be one and the same
        object in all calls, so a function of a module or class.
    :param owner: a pytree.
    :param X: rows, (N, …), or a pytree of arrays with rows first. Where something is traced, the function just runs.
    :param axes: the axes of rows in every array that the function returns.
    """
    number = len(jax.tree.leaves(X)[0])
    if not number or any(map(is_traced, (jax.device_put(0.0), *jax.tree.leaves((X, owner))))):
        return function(owner, X)
    size = padded_size(number)

    def padded(array: jax.Array) -> np.ndarray:
        rows = np.asarray(array)
        return rows if size == number else np.pad(rows, [(0, size - number)] + [(0, 0)] * (rows.ndim - 1), "edge")

    rows = jax.tree.map(padded, X)
    try:
        results = _program(function)(owner, rows)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        results = one_program(lambda: function(owner, jax.device_put(rows)))
    return jax.tree.map(lambda x: _cut(x, number, axes), results) if size != number else results


@lru_cache(maxsize=256)
def _program(function: Callable[..., T]) -> Callable[..., T]:
    return Program(function, options=STEPS)


def _cut(x: jax.Array, rows: int, axes: tuple[int, ...]) -> jax.Array:
    index: list[Any] = [slice(None)] * x.ndim
    for axis in axes:
        index[axis] = slice(rows)
    # Elsewhere than on a CPU the host is far away, and a program for each length the lesser evil.
    return jax.device_put(np.asarray(x)[tuple(index)]) if on_cpu() else x[tuple(index)]
