"""Training on several devices: the rows of a batch are shared out, and the result is that of one device.

A step is one program over all devices (JAX's automatic partitioning). It means the same however many there are: noise
is that of the whole batch, sums over rows are sums over all, and only the order of additions differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS = "rows"


def _all_devices() -> Mesh:
    return jax.make_mesh((jax.device_count(),), (ROWS,), axis_types=(AxisType.Auto,))


@dataclass(frozen=True, eq=False)
class Sharding:
    """
    Division of the work of :func:`npgp.fit` among devices, those of other processes included (``jax.distributed``):

    .. code-block:: python

        npgp.fit(svi, key, 100, X, y=y, sharding=npgp.training.Sharding())

    The rows of each batch are divided evenly along the mesh's axis ``"rows"``; without ``batch_size``, all rows are, if
    they can be divided evenly. Parameters, and the optimizer's state with them, are held by all devices alike, except
    for those that ``params`` divides: of a GP ``"f"`` with many outputs, over a mesh ``("rows", "outputs")``,
    ``params={"f.u.scale_tril": PartitionSpec("outputs")}`` leaves to each device the factors of its own outputs.

    :param mesh: of devices, with an axis ``"rows"``; all devices of all processes along it if omitted.
    :param params: partitions of parameters, by the names of their sites.
    :raises ValueError: if the mesh has no axis ``"rows"``, or a partition names an axis that it does not have.
    """

    mesh: Mesh = field(default_factory=_all_devices)
    _: KW_ONLY
    params: Mapping[str, P] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if ROWS not in self.mesh.axis_names:
            raise ValueError(f"mesh has the axes {self.mesh.axis_names}; one of them must be {ROWS!r}.")
        for name, spec in self.params.items():
            for axis in jax.tree.leaves(tuple(spec)):
                if axis not in self.mesh.axis_names:
                    raise ValueError(f"params[{name!r}] is {spec}; the mesh has the axes {self.mesh.axis_names}.")
        # With explicit axes, every operation of a model would have to say how its result is divided.
        automatic = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=(AxisType.Auto,) * self.mesh.devices.ndim)
        object.__setattr__(self, "mesh", automatic)

    @property
    def num_parts(self) -> int:
        """Into how many parts rows are divided."""
        return self.mesh.shape[ROWS]

    def check(self, number: int, name: str) -> None:
        """Raise unless a number of rows can be divided evenly."""
        if number % self.num_parts:
            raise ValueError(f"{name} is {number}, which {self.num_parts} devices along 'rows' cannot share evenly.")

    @property
    def replicated(self) -> NamedSharding:
        """Whole, on all devices."""
        return NamedSharding(self.mesh, P())

    def local_rows(self, number: int) -> slice:
        """Rows that this process reads of ``number``: those of its devices, which follow one another."""
        index = NamedSharding(self.mesh, P(ROWS)).addressable_devices_indices_map((number,)).values()
        bounds = [rows[0].indices(number)[:2] for rows in index if rows is not None]
        return slice(min(start for start, _ in bounds), max(stop for _, stop in bounds))

    def place(self, arrays: list[Any], num_rows: int) -> list[jax.Array]:
        """Arguments that stay on the devices: those with as many rows as the data divided, if that is even."""

        def spec(x: np.ndarray) -> P:
            return P(ROWS) if x.shape[:1] == (num_rows,) and num_rows % self.num_parts == 0 else P()

        return [self._put(np.asarray(x), spec(x)) for x in arrays]

    def _put(self, x: np.ndarray, spec: P) -> jax.Array:
        x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
        return jax.make_array_from_callback(x.shape, NamedSharding(self.mesh, spec), lambda index: x[index])

    def place_chunk(self, chunk: Any) -> Any:
        """This process's rows of several steps, leaves (steps, rows, …), as parts of arrays of all processes' rows."""

        def put(x: np.ndarray) -> jax.Array:
            spec = P(None, ROWS) if x.ndim > 1 else P()
            return jax.make_array_from_process_local_data(NamedSharding(self.mesh, spec), x)

        return jax.tree.map(put, chunk)

    def check_names(self, params: Mapping[str, Any]) -> None:
        """Raise unless all parameters that are to be divided exist."""
        unknown = [name for name in self.params if name not in params]
        if unknown:
            raise ValueError(f"params divides {unknown[0]!r}; the parameters are {', '.join(params)}.")

    def of_state(self, state: Any) -> Any:
        """Shardings of the leaves of a training state: a parameter's moments as the parameter itself."""

        def sharding(path: tuple[Any, ...], x: Any) -> NamedSharding:
            named = [self.params[key.key] for key in path if getattr(key, "key", None) in self.params]
            fits = named and jnp.ndim(x) >= len(named[-1])
            return NamedSharding(self.mesh, named[-1] if fits else P())

        return jax.tree_util.tree_map_with_path(sharding, state)

    def place_state(self, state: Any) -> Any:
        """A state on the devices."""
        return jax.jit(_same, out_shardings=self.of_state(state))(_on_host(state))

    def fetch(self, state: Any) -> Any:
        """A state as arrays on this process's default device, whole."""
        whole = jax.jit(_same, out_shardings=self.replicated)(state)
        return jax.tree.map(jnp.asarray, _on_host(whole))


def _same(state: Any) -> Any:
    """Identity, which moves a state when compiled; one function, so that it is compiled once for each way."""
    return state


def _on_host(tree: Any) -> Any:
    """Values that are held by all devices alike, as NumPy arrays; random keys as keys of the default device."""

    def get(x: Any) -> Any:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jnp.asarray(np.asarray(jax.random.key_data(x)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return np.asarray(x)

    return jax.tree.map(get, tree)
