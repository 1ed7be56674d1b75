"""What programs run on."""

from __future__ import annotations

import jax

__all__ = ["on_cpu"]


def on_cpu() -> bool:
    """Whether programs are made for a CPU, unless another device is named."""
    return jax.default_backend() == "cpu"
