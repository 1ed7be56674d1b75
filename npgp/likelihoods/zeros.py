"""Counts with more zeros, or fewer, than their likelihood has: a second latent value is the logit of a zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import sigmoid
from jax.typing import ArrayLike

from npgp import linalg
from npgp.likelihoods.base import Likelihood, aligned
from npgp.likelihoods.classes import Bernoulli
from npgp.likelihoods.counts import Binomial, NegativeBinomial, Poisson
from npgp.likelihoods.logistic import expected_softplus
from npgp.likelihoods.numerics import floats
from npgp.likelihoods.quadrature import normal_moments, smooth_rule
from npgp.programs.backend import maximum
from npgp.pytrees import pytree

COUNTS = (Poisson, NegativeBinomial, Binomial)


class _WithZeros(Likelihood):
    """What the two have in common: f_0 is the counts' latent value, f_1 the logit of the probability of a zero."""

    counts: Any
    num_latents: ClassVar[int] = 2

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.counts, COUNTS):
            accepted = ", ".join(cls.__name__ for cls in COUNTS)
            raise TypeError(f"{name} counts is {self.counts!r:.80}; it must be one of {accepted}.")

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """That of the counts."""
        return self.counts.num_nodes

    def with_nodes(self, num_nodes: int) -> Likelihood:
        return type(self)(self.counts.with_nodes(num_nodes))

    def _support(self, y: Any) -> tuple[Any, str]:
        return self.counts._support(y)

    def _split(self, y: ArrayLike, *values: ArrayLike) -> tuple[list[jax.Array], list[jax.Array]]:
        """y, and each latent value's share of the others."""
        arrays = [jnp.broadcast_arrays(*array) for array in aligned(self, y, *values)]
        return floats(y, *(array[0] for array in arrays)), floats(y, *(array[1] for array in arrays))[1:]


@pytree
@dataclass(frozen=True, eq=False)
class ZeroInflated(_WithZeros):
    """
    Counts that are 0 for another reason in some rows: p(0) = π + (1 − π) p₀(0), with π = 1/(1 + exp(−f_1)), and counts
    with the likelihood p₀ and f_0 otherwise (Lambert 1992).

    Not log-concave: a zero may come from either.

    .. code-block:: python

        def sightings(X, y=None):
            f, g = (npgp.SparseGP(name, npgp.RBF(1.0), Z).draw() for name in "fg")
            with numpyro.plate("data", len(X)):
                npgp.observe(
                    "y", (f(X), g(X)), npgp.likelihoods.ZeroInflated(npgp.Poisson()), obs=y
                )

    :param counts: likelihood of the counts: Poisson, NegativeBinomial or Binomial.
    :raises TypeError: for another.
    """

    counts: Any

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        (y, f), (g,) = self._split(y, f)
        log_zero = self.counts.log_prob(f, jnp.zeros_like(y))
        return jnp.where(y > 0, self.counts.log_prob(f, y), jnp.logaddexp(g, log_zero)) - jax.nn.softplus(g)

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        key, zero_key = jax.random.split(rng_key)
        (_, f), (g,) = self._split(0.0, f)
        return jnp.where(jax.random.bernoulli(zero_key, sigmoid(g)), 0, self.counts.sample(key, f))

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        (y, f, v), (g, s) = self._split(y, mean, variance)
        nodes = self.num_nodes

        # log(π + (1 − π) p₀) = log π + softplus(log p₀ − f_1), averaged over f_1 as Bernoulli's and then over f_0
        def excess(f: Any) -> Any:
            return expected_softplus(self.counts.log_prob(f, jnp.zeros_like(y)) - g, s, nodes)

        at, weights = _rule(f, v, nodes)
        zero = linalg.weighted_sum(weights, excess(at)) - expected_softplus(-g, s, nodes)
        return jnp.where(y > 0, self.counts.expected_log_prob(y, f, v) - expected_softplus(g, s, nodes), zero)

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        (y, f, v), (g, s) = self._split(y, mean, variance)
        zero, other = (Bernoulli(num_nodes=self.num_nodes).log_marginal(at, g, s) for at in (1, 0))
        other = other + self.counts.log_marginal(y, f, v)
        return jnp.where(y > 0, other, jnp.logaddexp(zero, other))

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        (_, f, v), (g, s) = self._split(0.0, mean, variance)
        return _thinned(Bernoulli(num_nodes=self.num_nodes).moments(-g, s)[0], *self.counts.moments(f, v))


@pytree
@dataclass(frozen=True, eq=False)
class Hurdle(_WithZeros):
    """
    Counts that are 0 with probability 1/(1 + exp(−f_1)), and otherwise at least 1, with the likelihood ``counts`` of
    f_0 given that it is not 0 (Mullahy 1986).

    Log-concave for Poisson with the exp link, and for Binomial: log p is that of a Bernoulli variable in f_1, plus that
    of a truncated count in f_0, an exponential family whose natural parameter is f_0. For others in f_1 alone.

    .. code-block:: python

        def visits(X, y=None):
            f, g = (npgp.SparseGP(name, npgp.RBF(1.0), Z).draw() for name in "fg")
            with numpyro.plate("data", len(X)):
                npgp.observe("y", (f(X), g(X)), npgp.likelihoods.Hurdle(npgp.Poisson()), obs=y)

    :param counts: likelihood of the counts: Poisson, NegativeBinomial or Binomial.
    :raises TypeError: for another.
    """

    counts: Any

    @property
    def concave(self) -> tuple[int, ...]:
        """Both, or the logit."""
        return (0, 1) if self.proof == "log-concave" else (1,)

    @property
    def proof(self) -> str:  # type: ignore[override]
        """``"log-concave"`` for Poisson with the exp link and Binomial."""
        return _ZeroTruncated(self.counts).proof

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        (y, f), (g,) = self._split(y, f)
        some = _ZeroTruncated(self.counts).log_prob(f, y) - jax.nn.softplus(g)
        return jnp.where(y > 0, some, -jax.nn.softplus(-g))

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        key, zero_key = jax.random.split(rng_key)
        (_, f), (g,) = self._split(0.0, f)
        zero = jax.random.bernoulli(zero_key, sigmoid(g))
        return jnp.where(zero, 0, _ZeroTruncated(self.counts).sample(key, f))

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        (y, f, v), (g, s) = self._split(y, mean, variance)
        some = _ZeroTruncated(self.counts).expected_log_prob(y, f, v)
        softplus = expected_softplus(jnp.where(y > 0, g, -g), s, self.num_nodes)
        return jnp.where(y > 0, some, 0.0) - softplus

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        (y, f, v), (g, s) = self._split(y, mean, variance)
        some = _ZeroTruncated(self.counts).log_marginal(jnp.maximum(y, 1), f, v)
        return jnp.where(y > 0, some, 0.0) + Bernoulli(num_nodes=self.num_nodes).log_marginal(y == 0, g, s)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        (_, f, v), (g, s) = self._split(0.0, mean, variance)
        some = _ZeroTruncated(self.counts).moments(f, v)
        return _thinned(Bernoulli(num_nodes=self.num_nodes).moments(-g, s)[0], *some)


@pytree
@dataclass(frozen=True, eq=False)
class _ZeroTruncated(Likelihood):
    """Counts given that they are not 0."""

    counts: Any

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        return self.counts.num_nodes

    @property
    def proof(self) -> str:  # type: ignore[override]
        natural = isinstance(self.counts, Binomial) or (isinstance(self.counts, Poisson) and self.counts.link == "exp")
        return "log-concave" if natural else "none"

    def _log_some(self, f: ArrayLike) -> jax.Array:
        zero = self.counts.log_prob(f, 0.0)
        return jnp.log(maximum(-jnp.expm1(zero), jnp.finfo(zero.dtype).tiny))

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        return self.counts.log_prob(f, jnp.maximum(y, 1)) - self._log_some(f)

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        at, weights = _rule(mean, variance, self.num_nodes)
        log_some = linalg.weighted_sum(weights, self._log_some(at))
        return self.counts.expected_log_prob(jnp.maximum(y, 1), mean, variance) - log_some

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        """A count as it comes; where that is 0, which is rare for large rates, one by the distribution function."""
        (f,) = floats(f)
        first_key, key = jax.random.split(rng_key)
        y, uniform = self.counts.sample(first_key, f), jax.random.uniform(key, f.shape, f.dtype)

        def search(state: Any) -> Any:
            k, y, below = state
            below = below + jnp.exp(self.log_prob(f, jnp.asarray(k, f.dtype)))
            return k + 1, jnp.where((y == 0) & (below > uniform), k, y), below

        _, y, _ = lax.while_loop(lambda s: jnp.any(s[1] == 0) & (s[0] < 100_000), search, (1, y, jnp.zeros_like(f)))
        return jnp.maximum(y, 1)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        def conditional(f: Any) -> Any:
            some = jnp.exp(self._log_some(f))
            average, spread = self.counts.moments(f, 0.0)
            return average / some, (spread + average**2) / some - (average / some) ** 2

        return normal_moments(conditional, mean, variance, self.num_nodes)


def _rule(mean: ArrayLike, variance: ArrayLike, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """:func:`npgp.likelihoods.quadrature.smooth_rule`, no further than rates are finite: there is no zero there."""
    f, weights = smooth_rule(mean, variance, num_nodes)
    return -maximum(-f, -0.8 * math.log(float(jnp.finfo(f.dtype).max))), weights


def _thinned(share: jax.Array, mean: jax.Array, variance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of a count that is another with probability ``share`` and 0 otherwise."""
    return share * mean, share * variance + share * (1 - share) * mean**2
