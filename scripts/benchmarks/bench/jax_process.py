"""What the processes of all JAX libraries have in common."""

from __future__ import annotations

import jax


def configure(dtype: str) -> None:
    jax.config.update("jax_enable_x64", dtype == "float64")


def clear() -> None:
    jax.clear_caches()


def device_memory() -> int | None:
    """Most bytes in use on an accelerator, since the process began."""
    found = jax.local_devices()[0].memory_stats()
    return None if found is None else found["peak_bytes_in_use"]
