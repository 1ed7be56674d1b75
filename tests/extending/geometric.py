"""A likelihood of one's own, written with public names alone."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

import npgp


@npgp.pytree
@dataclass(frozen=True)
class Geometric(npgp.likelihoods.Likelihood):
    """Failures before the first success, which has probability sigmoid(f): log p is concave in f."""

    proof: ClassVar[str] = "log-concave"
    num_nodes: ClassVar[int] = 30

    def log_prob(self, f, y):
        return jax.nn.log_sigmoid(f) + y * jax.nn.log_sigmoid(-f)

    def sample(self, rng_key, f):
        return jax.random.geometric(rng_key, jax.nn.sigmoid(f)) - 1

    def moments(self, mean, variance):
        # y given f has mean e⁻ᶠ and variance e⁻ᶠ + e⁻²ᶠ.
        first, second = jnp.exp(-mean + 0.5 * variance), jnp.exp(-2.0 * mean + 2.0 * variance)
        return first, first + 2.0 * second - first**2
