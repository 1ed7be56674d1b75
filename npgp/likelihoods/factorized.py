"""Any NumPyro distribution as a likelihood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from numpyro.distributions import Distribution

from npgp.likelihoods.base import Likelihood, check_positive
from npgp.likelihoods.numerics import floats
from npgp.likelihoods.quadrature import NUM_NODES, hermite_moments
from npgp.pytrees import pytree, static


@pytree
@dataclass(frozen=True, eq=False)
class Factorized(Likelihood):
    """
    What a function makes of f: ``Factorized(lambda f: dist.Weibull(jnp.exp(f), 2.0))``.

    The function is called with an extra leading axis on f. It is compared by identity: make it once, or jitted
    functions that take this object compile again. Gauss-Hermite supposes the log-density to be smooth in f, and no
    narrower than f's distribution: :func:`quadrature_error` measures what it leaves.

    :param fn: from latent values to a NumPyro distribution of their shape, with scalar events.
    :param log_concave: whether log p(y | f) is concave in f for every y: the caller vouches.
    :param num_nodes: nodes of the quadrature.
    :raises ValueError: if ``fn`` is not a function, for no nodes, and, when used, for events that are not scalar.
    :raises TypeError: when used, if ``fn`` returns no NumPyro distribution.
    """

    fn: Callable[[jax.Array], Distribution] = field(metadata={"static": True})
    log_concave: bool = static(False)
    num_nodes: int = static(NUM_NODES)

    def __post_init__(self):
        check_positive(self, "num_nodes")
        if not callable(self.fn):
            raise ValueError(f"Factorized fn is {self.fn!r:.80}; it must be a function of f.")

    @property
    def certificate(self) -> str:  # type: ignore[override]
        """``"log-concave"`` if the caller vouches for it, else ``"none"``."""
        return "log-concave" if self.log_concave else "none"

    def _distribution(self, f) -> Distribution:
        made = self.fn(*floats(f))
        if not isinstance(made, Distribution):
            raise TypeError(f"Factorized fn returned {made!r:.80}; it must return a NumPyro distribution.")
        if made.event_shape:
            raise ValueError(f"Factorized fn returned events of shape {made.event_shape}; they must be scalar.")
        return made

    def _support(self, y):
        support = self._distribution(jnp.zeros(y.shape)).support
        return support(y), f"in the support, {support}"

    def log_prob(self, f, y):
        # NumPyro may promote Python numbers to float64 where that is enabled.
        return self._distribution(f).log_prob(y).astype(floats(f, y)[0].dtype)

    def sample(self, rng_key, f):
        return self._distribution(f).sample(rng_key)

    def moments(self, mean, variance):
        def conditional(f):
            made = self._distribution(f)
            return made.mean, made.variance

        return hermite_moments(conditional, mean, variance, self.num_nodes)


def as_likelihood(obj: Likelihood | Callable[[jax.Array], Distribution]) -> Likelihood:
    """
    A likelihood from what a user may pass as one.

    :param obj: a :class:`Likelihood`, returned as it is, or a function from latent values to a NumPyro distribution,
        which becomes :class:`Factorized`.
    :raises TypeError: for anything else.
    """
    if isinstance(obj, Likelihood):
        return obj
    is_class = isinstance(obj, type) and issubclass(obj, Likelihood)
    if callable(obj) and not is_class and not isinstance(obj, Distribution):
        return Factorized(obj)
    raise TypeError(
        f"likelihood is {obj!r:.80}; it must be a Likelihood, such as Bernoulli(), or a function from f to a NumPyro "
        "distribution."
    )
