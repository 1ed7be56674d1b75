"""What programs run on, and what compiles them."""

from __future__ import annotations

import jax

__all__ = ["on_cpu", "wrong_sums"]


def on_cpu() -> bool:
    """Whether programs are made for a CPU, unless another device is named."""
    return jax.default_backend() == "cpu"


def wrong_sums(jaxlib: str, xla_flags: str) -> str | None:
    """
    Warns of a compiler whose programs for CPUs compute some sums wrongly.

    npgp's own programs go without what is wrong there, but not those that others compile, as by
    ``jax.jit(svi.update)``.

    :param jaxlib: the version of jaxlib.
    :param xla_flags: the environment's ``XLA_FLAGS``.
    :return: what to do about it; None where nothing is wrong.
    """
    mended = "--xla_cpu_experimental_ynn_fusion_type="
    if jaxlib != "0.10.2" or mended in xla_flags:
        return None
    return (
        f"jaxlib {jaxlib} computes some sums wrongly on a CPU (jax-ml/jax#39103). Install another version "
        f"(pip install 'jaxlib!={jaxlib}'), or set XLA_FLAGS={mended} in the environment before Python starts."
    )
