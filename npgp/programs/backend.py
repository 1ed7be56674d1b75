"""What programs run on, and what compiles them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

#: Versions of jaxlib that leave loops of programs for CPUs to a YNNPACK with faults: with the first it computes sums of
#: few over many rows wrongly (jax-ml/jax#39103), with both it crashes for some arrays of seven axes (jax-ml/jax#39257).
FAULTY_LOOPS = ("0.10.2", "0.11.0")


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


@jax.custom_jvp
def maximum(x: jax.Array, y: jax.Array | float) -> jax.Array:
    """
    The larger of each two, as ``jnp.maximum``, by whose slopes operands are compared, as from JAX 0.12 on.

    Before, an operand had a slope where it equaled the result; neither does where XLA computes an operand twice and
    rounds it differently, and the slope is silently lost (jax-ml/jax#40564).

    :param x: floating.
    :param y: floating, of a shape that broadcasts with x's; or a number.
    """
    return jnp.maximum(x, y)


@maximum.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    (x, y), (by_x, by_y) = primals, tangents
    share = jnp.where(x > y, 1.0, jnp.where(x == y, 0.5, 0.0)).astype(by_x.dtype)
    return maximum(x, y), share * by_x + (1.0 - share) * by_y
