"""
Nearest-neighbor GPs as NumPyro distributions, and kriging from them (Vecchia 1988; Datta et al. 2016).

Each value depends on those before it in an order through k neighbors alone. There are no inducing points and no bound:
it is a model of its own, as near to the GP as k and the order make it, at O(N k³) time and O(N k) memory. With
k = N − 1 it is the GP.

And independent normal approximations of values with such a prior (Wu, Pleiss & Cunningham 2022).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence
from numpyro.infer.reparam import Reparam

from npgp import checks
from npgp.contract import Stackable, per_stacked
from npgp.densities import JointDensity
from npgp.kernels import Kernel, as_kernel
from npgp.likelihoods import Gaussian
from npgp.likelihoods.continuous import likelihood_or_noise
from npgp.neighbors.posterior import NeighborPosterior
from npgp.neighbors.search import Neighbors, needed, neighbors_of
from npgp.neighbors.vecchia import MergedFactor, VecchiaFactor, at_rows, factor_of_rows, of_sites, site_weights

# ---------------------------------------------------------------------------------------------------------------
# The distributions


class NNGP(JointDensity, Stackable):
    """
    The nearest-neighbor GP prior of f at given sites, a latent site of a model with any likelihood, by NUTS or SVI:

    .. code-block:: python

        neighbors = npgp.neighbors.nearest_before(X, 15)  # once, before the model


        def model(y):
            f = numpyro.sample("f", npgp.neighbors.NNGP(kernel, X, neighbors))
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    Where data say little about each value, draw its whitened values instead, by
    ``numpyro.handlers.reparam(config={"f": npgp.neighbors.WhitenNNGP()})``. For Gaussian noise :class:`ResponseNNGP`
    integrates f out.

    :param kernel: the kernel.
    :param X: sites, shape (N, D).
    :param neighbors: made of X by :func:`npgp.neighbors.nearest_before`; or their number k, to be found here in max–min
        order.
    :param offset: what is added to the GP, such as a mean function's values at X; a scalar or (N,). Add its values at
        new sites to predictions.
    :param jitter: relative jitter tried first.
    :raises ValueError: for sites of the wrong shape, and for neighbors of another number of sites.
    """

    support = constraints.real_vector
    counted = "X"
    pytree_data_fields = ("kernel", "X", "neighbors", "offset", "noise_variance")
    pytree_aux_fields = ("jitter",)

    noise_variance: ArrayLike
    #: Whether values at one site differ, so that rows may be merged.
    noisy = False

    def __init__(
        self,
        kernel: Kernel,
        X: ArrayLike,
        neighbors: Neighbors | int,
        *,
        offset: ArrayLike = 0.0,
        jitter: float | None = None,
        validate_args=None,
    ):
        self.kernel = as_kernel(kernel)
        self.X = checks.concrete_inputs(X)
        rows = self.X.shape[0]
        self.searched = self.noisy and not isinstance(neighbors, Neighbors)
        scales = self.kernel if self.noisy else None
        self.neighbors: Any = neighbors_of(X, neighbors, kernel=scales, merge=self.noisy)
        checks.require_per_row(offset, "offset", rows)
        checks.require_finite(offset, "offset")
        self.offset = offset
        self.noise_variance = 0.0  # what is added to the covariance's diagonal
        self.jitter = jitter
        super().__init__((), (rows,), validate_args=validate_args)
        self.count_axes()

    def factor(self) -> VecchiaFactor:
        """The sparse Cholesky factor of the precision."""
        return VecchiaFactor.of(self.kernel, self.X, needed(self.neighbors), self.noise_variance, self.jitter)

    @property
    def mean(self):
        return jnp.broadcast_to(jnp.asarray(self.offset, self.X.dtype), self.event_shape)

    @per_stacked
    def log_prob(self, value):
        """
        Log density of values (..., N): (...).

        :raises ValueError: for values of another shape, and for NaN where that can be seen.
        """
        checks.require_finite(value, "value")
        if jnp.shape(value)[-1:] != self.event_shape:
            raise ValueError(
                f"value has shape {jnp.shape(value)}; its last axis must be the {self.event_shape[0]} sites."
            )
        factor = self.factor()
        square = jnp.sum(jnp.square(factor.whiten(value - self.offset)), -1)
        return 0.5 * (factor.log_determinant() - square - value.shape[-1] * math.log(2.0 * math.pi))

    def sample(self, key, sample_shape=()):
        """Draws, O(N k) for each once the factor is there."""
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        shape = sample_shape + self.batch_shape + self.event_shape
        return self.offset + self.factor().color(jax.random.normal(key, shape, self.X.dtype))

    def condition(self, value: ArrayLike) -> NeighborPosterior:
        """
        The posterior of f less the offset given values at the sites, by kriging.

        :param value: (..., N); a batch, such as draws of f from its posterior, gives one of predictions.
        :raises ValueError: if values have NaN or another number of sites.
        """
        checks.require_finite(value, "value")
        value = jnp.asarray(value, self.X.dtype)
        if value.shape[-1:] != self.event_shape:
            raise ValueError(f"value has shape {value.shape}; its last axis must be the {self.event_shape[0]} sites.")
        X, values, noise, neighbors = of_sites(self.X, value - self.offset, self.noise_variance, needed(self.neighbors))
        noise = jnp.asarray(noise, self.X.dtype)
        return NeighborPosterior(self.kernel, X, neighbors, values, jitter=self.jitter, noise_variance=noise)


class ResponseNNGP(NNGP):
    """
    Gaussian-noise observations of a GP, with Vecchia's approximation made of their own covariance ``K + σ² I`` (Finley
    et al. 2019): ``log_prob(y)`` is a density for NUTS, L-BFGS or SVI over hyperparameters, f integrated out:

    .. code-block:: python

        neighbors = npgp.neighbors.nearest_before(X, 5)
        numpyro.sample(
            "y",
            npgp.neighbors.ResponseNNGP(kernel, X, neighbors, npgp.Gaussian(scale=0.3)),
            obs=y,
        )

    Not the model in which f is an :class:`NNGP`: noise in the neighbors' values costs accuracy, more neighbors regain
    it.

    Where ``neighbors`` is a number, they are the most correlated, found anew by :func:`npgp.fit_collapsed` at the
    hyperparameters that it comes to; and a site that was measured several times, in rows of its own, is one site with
    the mean of its measurements, by precision. The density is still that of all rows. By
    ``npgp.neighbors.nearest_before(X, k, kernel=kernel, merge=True)`` both are so for fixed neighbors.

    ``condition(y)`` predicts f, without the offset; add σ² to its variance for observations.

    :param kernel: the kernel.
    :param X: sites, shape (N, D).
    :param neighbors: made of X by :func:`npgp.neighbors.nearest_before`; or their number k, to be found here: by
        correlation where the kernel's hyperparameters are numbers, by distance where they are traced.
    :param likelihood: Gaussian noise, as ``npgp.Gaussian(scale=0.3)``.
    :param noise_variance: in its stead σ², a scalar or one for each site (N,).
    :param offset: what is added to f, such as a mean function's values at X; a scalar or (N,).
    :param jitter: relative jitter tried first; 0 if omitted, as the noise makes it needless.
    :raises ValueError: as for :class:`NNGP`, and for a noise variance known not to be positive.
    """

    noisy = True

    def __init__(
        self,
        kernel: Kernel,
        X: ArrayLike,
        neighbors: Neighbors | int,
        likelihood: Gaussian | None = None,
        *,
        noise_variance: ArrayLike | None = None,
        offset: ArrayLike = 0.0,
        jitter: float | None = 0.0,
        validate_args=None,
    ):
        noise_variance = likelihood_or_noise(likelihood, noise_variance).variance
        super().__init__(kernel, X, neighbors, offset=offset, jitter=jitter, validate_args=validate_args)
        checks.require_per_row(noise_variance, "noise_variance", self.event_shape[0])
        self.noise_variance = noise_variance

    def factor(self) -> VecchiaFactor | MergedFactor:  # type: ignore[override]
        """A factor of the precision, with more rows than columns where measurements were merged."""
        return factor_of_rows(self.kernel, self.X, needed(self.neighbors), self.noise_variance, self.jitter)


class WhitenNNGP(Reparam):
    """
    Draws an :class:`NNGP` site through its whitened values, ``f = mean + R⁻¹ z``, z standard normal at the site
    ``NAME_white``: easier for NUTS where data say little about each value.

    .. code-block:: python

        gp = npgp.neighbors.NNGP(kernel, X, npgp.neighbors.nearest_before(X, 3))


        def field():
            with numpyro.handlers.reparam(config={"f": npgp.neighbors.WhitenNNGP()}):
                return numpyro.sample("f", gp)


        with numpyro.handlers.seed(rng_seed=0):
            assert field().shape == (30,)
    """

    def __call__(self, name, fn, obs):
        if obs is not None:
            raise ValueError(f"site {name!r} is observed; only latent sites can be whitened.")
        if isinstance(fn, JointDensity):
            fn.check_draw()
        fn, expand_shape, event_dim = self._unwrap(fn)
        if not isinstance(fn, NNGP):
            raise ValueError(f"site {name!r} is a {type(fn).__name__}; WhitenNNGP is for NNGP sites.")
        standard = dist.Normal(jnp.zeros((), fn.X.dtype)).expand(fn.event_shape).to_event(1)
        z = numpyro.sample(f"{name}_white", self._wrap(standard, expand_shape, event_dim))
        return None, fn.offset + fn.factor().color(z)


class MeanFieldNormal(dist.Distribution):
    """
    ``q(u) = Π_j N(m_j, s_j²)`` at all inducing points, or at a batch of them that stands for all.

    :param loc: m, (B,).
    :param scale: s, (B,).
    :param neighbor_loc: means of each one's neighbors, (B, K).
    :param neighbor_scale: their standard deviations, (B, K).
    :param sites: which inducing points these are, (B,); all M in order if omitted.
    :param counts: how many inducing points each stands for, (B,); one if omitted.
    :param size: M.
    """

    support = constraints.real_vector
    pytree_data_fields = ("loc", "scale", "neighbor_loc", "neighbor_scale", "sites", "counts")
    pytree_aux_fields = ("size",)

    def __init__(self, loc, scale, neighbor_loc, neighbor_scale, size, *, sites=None, counts=None, validate_args=None):
        self.loc, self.scale, self.neighbor_loc, self.neighbor_scale = loc, scale, neighbor_loc, neighbor_scale
        self.size, self.sites, self.counts = size, sites, counts
        super().__init__((), (size,), validate_args=validate_args)

    def sample(self, key, sample_shape=()):
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        if self.sites is not None:
            return jnp.full((*sample_shape, 1), jnp.nan, self.loc.dtype)
        return self.loc + self.scale * jax.random.normal(key, sample_shape + self.event_shape, self.loc.dtype)

    def log_prob(self, value):
        if self.sites is not None:
            raise ValueError(
                "a batch of the inducing values has no joint density: use TraceMeanField_ELBO, which takes their KL "
                "divergence in closed form, or a VNNGP without batch_size."
            )
        return jnp.sum(dist.Normal(self.loc, self.scale).log_prob(value), -1)

    @property
    def mean(self):
        return self.loc

    @property
    def variance(self):
        return jnp.square(self.scale)


@kl_divergence.register(MeanFieldNormal, NNGP)  # type: ignore[attr-defined]
def _(q: MeanFieldNormal, p: NNGP):
    # Wu, Pleiss & Cunningham 2022, eq. 9. All that depends on hyperparameters is the model's.
    b, F, _ = site_weights(p.kernel, p.X, p.neighbors, p.noise_variance, p.jitter, q.sites)
    sites, rows = jnp.arange(q.size) if q.sites is None else q.sites, jnp.asarray(p.neighbors.rows)
    neighbors = rows if q.sites is None else rows[q.sites]
    mean, neighbor_mean = (at_rows(p.offset, at, q.loc.dtype) for at in (sites, neighbors))
    error = q.loc - mean - jnp.sum(b * (q.neighbor_loc - neighbor_mean), axis=-1)
    square = jnp.square(error) + jnp.sum(jnp.square(b * q.neighbor_scale), axis=-1)
    variance = jnp.square(q.scale)
    terms = 0.5 * ((variance + square) / F - 1.0 - jnp.log(variance / F))
    return jnp.sum(terms if q.counts is None else q.counts * terms)
