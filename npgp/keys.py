"""Randomness of computations on the host, from JAX's random keys."""

from __future__ import annotations

import jax
import numpy as np

from npgp.contract import is_prng_key


def host_generator(rng_key: jax.Array) -> np.random.Generator:
    """
    A NumPy generator whose numbers a key decides.

    ``jax.random.key(0)`` has the numbers of ``np.random.default_rng(0)``.

    :param rng_key: a JAX random key.
    :raises TypeError: for anything else, such as a seed.
    """
    require_key(rng_key)
    with jax.ensure_compile_time_eval():
        return np.random.default_rng(np.asarray(jax.random.key_data(rng_key)).ravel().tolist())


def require_key(rng_key: object) -> None:
    """Raise ``TypeError`` for what is no JAX random key, such as a seed."""
    if not is_prng_key(rng_key):
        raise TypeError(f"rng_key is {rng_key!r:.80}; it must be a JAX random key, such as jax.random.key(0).")


def known_key() -> jax.Array:
    """The key 0 with numbers that can be seen, inside ``jit`` too: for choices that are not the user's."""
    with jax.ensure_compile_time_eval():
        return jax.random.key(0)
