"""
The Bayesian GPLVM: a GP whose inputs are latent (Titsias & Lawrence 2010), uncollapsed and minibatched (Lalchand,
Ravuri & Lawrence 2022).

``p(x_n) = N(0, I_Q)``, ``q(x_n) = N(μ_n, diag s_n)``, and D outputs that share kernel and inducing inputs, each with
its own q(ε). It is an ordinary NumPyro model around a :class:`~npgp.component.SparseGP`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import component, guide, statements
from npgp.conditionals import Conditional
from npgp.gplvm.start import Start
from npgp.groups import Groups
from npgp.kernels import RBF, Kernel
from npgp.likelihoods import Gaussian
from npgp.posteriors import Posterior

__all__ = ["BayesianGPLVM"]


@dataclass(frozen=True)
class BayesianGPLVM:
    """
    A Bayesian GPLVM as a model/guide pair::

        gplvm = npgp.BayesianGPLVM(npgp.pca_start(Y, latent_dim=10, num_inducing=50))
        svi = SVI(gplvm.model, gplvm.guide, npgp.adam(0.01, 20_000), TraceMeanField_ELBO())
        result = npgp.fit(svi, jax.random.key(0), 20_000, Y)

    For minibatches, give row numbers along with the rows: ``npgp.fit(..., Y, batch_size=100, indices="rows")``.

    :param start: where training starts; it fixes the numbers of rows, latent dimensions and inducing inputs.
    :param conditional: what q does to the residual (:mod:`npgp.conditionals`).
    :param kernel: from lengthscale (Q,) and variance to a kernel; RBF with one lengthscale each if omitted.
    :param latent_guide: a guide for the site ``x`` with the model's arguments; free Gaussians per row if omitted.
    :param groups: for the ``grouped`` conditional: rows that are close in data space, ``npgp.median_split(Y, 16)``;
        with minibatches, the number of rows in each group of consecutive rows (:meth:`npgp.Groups.arrange`).
    """

    start: Start
    conditional: Conditional = "tight"
    kernel: Callable[..., Kernel] = RBF
    latent_guide: Callable | None = None
    groups: Groups | int | None = None
    guide: guide.AutoSparseGP = field(init=False)

    def __post_init__(self):
        rest = self.free_latents if self.latent_guide is None else self.latent_guide
        object.__setattr__(self, "guide", guide.AutoSparseGP(self.model, guide=rest))

    def model(self, Y: ArrayLike, rows: ArrayLike | None = None, mask: ArrayLike | None = None) -> None:
        """
        The model: sites ``x`` (B, Q), ``f.u`` (D, 1, M) and ``y`` (D, B).

        :param Y: the rows at hand, (B, D).
        :param rows: their numbers in the whole data, (B,); all rows, in order, if omitted.
        :param mask: True where an entry of Y is present, (B, D); the others may be NaN.
        """
        start = self.start
        (size, latent_dim), columns = start.latents.shape, start.offset.shape[0]
        batch = size if rows is None else jnp.shape(rows)[0]
        if jnp.shape(Y) != (batch, columns):
            raise ValueError(f"Y has shape {jnp.shape(Y)}; with these row numbers it must be {(batch, columns)}.")
        positive = constraints.positive  # its logarithm is free: a dimension can be switched off in few steps
        kernel = self.kernel(
            lengthscale=numpyro.param("lengthscale", jnp.full(latent_dim, start.lengthscale), constraint=positive),
            variance=numpyro.param("variance", jnp.asarray(start.variance), constraint=positive),
        )
        inducing = numpyro.param("inducing", jnp.asarray(start.inducing))
        noise_variance = numpyro.param("noise_variance", jnp.asarray(start.noise_variance), constraint=positive)
        outputs = numpyro.plate("outputs", columns, dim=-2)
        with outputs:
            f = component.SparseGP("f", kernel, inducing, init_scale=0.5).draw()
        with component.plate("rows", size, rows, dim=-1):
            x = numpyro.sample("x", dist.Normal(jnp.zeros((batch, latent_dim)), 1.0).to_event(1))
            with outputs:
                statements.observe(
                    "y",
                    f(x),
                    Gaussian(noise_variance),
                    obs=(jnp.asarray(Y) - start.offset).T,
                    conditional=self.conditional,
                    mask=None if mask is None else jnp.asarray(mask).T,
                    groups=self.groups,
                )

    def free_latents(self, Y: ArrayLike, rows: ArrayLike | None = None, mask: ArrayLike | None = None) -> None:
        """The guide of the latents: ``q(x_n) = N(μ_n, diag s_n)`` with parameters ``x.loc`` and ``x.scale``, (N, Q)."""
        size = self.start.latents.shape[0]
        loc = numpyro.param("x.loc", jnp.asarray(self.start.latents))
        scale = numpyro.param(
            "x.scale",
            jnp.full(self.start.latents.shape, self.start.latent_scale),
            constraint=constraints.positive,
        )
        with component.plate("rows", size, rows, dim=-1) as index:
            numpyro.sample("x", dist.Normal(loc[index], scale[index]).to_event(1))

    def posterior(self, params: dict[str, jax.Array]) -> Posterior:
        """
        The posterior of the D functions at trained parameters, over latent space: means are (D, N).

        They are those of Y less ``start.offset``.
        """
        kernel = self.kernel(lengthscale=params["lengthscale"], variance=params["variance"])
        return component.SparseGP("f", kernel, params["inducing"]).posterior(params)

    def reconstruct(
        self, params: dict[str, jax.Array], latents: ArrayLike, latent_scale: ArrayLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """
        Mean and variance of the noise-free data at latent points, each (N, D).

        :param params: trained parameters.
        :param latents: latent points, (N, Q).
        :param latent_scale: their standard deviations, (N, Q), integrated out by the spherical cubature rule of
            degree 3, with 2Q points; the latent points are taken as known if omitted.
        """
        posterior, latents = self.posterior(params), jnp.asarray(latents)
        points = [latents]
        if latent_scale is not None:
            step = jnp.sqrt(latents.shape[-1]) * jnp.asarray(latent_scale)
            axes = jnp.eye(latents.shape[-1], dtype=latents.dtype)
            points = [latents + sign * step * axis for axis in axes for sign in (1.0, -1.0)]
        moments = [posterior.mean_and_variance(point) for point in points]
        means, variances = (jnp.stack(parts) for parts in zip(*moments, strict=True))
        mean = jnp.mean(means, axis=0)
        variance = jnp.mean(variances, axis=0) + jnp.var(means, axis=0)
        return mean.T + self.start.offset, variance.T
