"""What programs run on, and what compiles them."""

from __future__ import annotations

import jax
from jax import lax
from jax.interpreters import ad

__all__ = ["mend_slopes", "on_cpu", "wrong_sums"]


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


def mend_slopes(jax_version: tuple[int, ...]) -> None:
    """
    Give JAX before 0.12 the derivatives of ``maximum`` and ``minimum`` that later ones have: operands are compared.

    Before, an operand had a slope where it equaled the result; neither does where XLA computes an operand twice and
    rounds it differently, and the slope is silently lost (jax-ml/jax#40564). ``betaln`` is one of the functions that
    take a maximum of what was computed.

    :param jax_version: the version of JAX.
    """
    if jax_version >= (0, 12):
        return
    ad.defjvp(lax.max_p, lambda t, x, y: t * _share(x, y), lambda t, x, y: t * _share(y, x))
    ad.defjvp(lax.min_p, lambda t, x, y: t * _share(y, x), lambda t, x, y: t * _share(x, y))


def _share(x: jax.Array, y: jax.Array) -> jax.Array:
    """1 where x is the larger, ½ where they are equal."""
    larger = lax.gt(x, y)
    one = lax.full_like(larger, 1, x.dtype)
    return lax.select(larger, one, lax.select(lax.eq(x, y), 0.5 * one, 0 * one))
