"""
Priors of the latent inputs of a GPLVM.

A prior is a callable ``prior(rows, latent_dim)`` that is called once in the model, with the plate over rows, samples
the site ``x`` of shape (B, Q) inside it, and returns it. To write one's own:

.. code-block:: python

    def heavy_tailed(rows, latent_dim):
        with rows as index:
            return numpyro.sample(
                "x", dist.StudentT(4.0).expand([len(index), latent_dim]).to_event(1)
            )
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks
from npgp.kernels import RBF, Kernel
from npgp.model import sampling as statements
from npgp.model import sparse_gp as component

LatentPrior = Callable[[numpyro.plate, int], jax.Array]


def standard_normal(rows: numpyro.plate, latent_dim: int) -> jax.Array:
    """
    ``x_n ~ N(0, I)``.

    .. code-block:: python

        rows = numpyro.plate("rows", 10)
        with numpyro.handlers.seed(rng_seed=0):
            assert npgp.gplvm.standard_normal(rows, 2).shape == (10, 2)
    """
    with rows as index:
        return numpyro.sample("x", dist.Normal(jnp.zeros((len(index), latent_dim)), 1.0).to_event(1))


@dataclass(frozen=True)
class NormalMixture:
    """
    ``x_n ~ Σ_k π_k N(m_k, diag v_k)``: clusters, whose weights, means and scales are learned.

    Parameters ``x.weights`` (K,), ``x.means`` (K, Q) and ``x.scales`` (K, Q). Its divergence from q(x) is estimated
    with the draws of x.

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(10, 4))
        start = npgp.gplvm.pca_start(key, Y, 2, 4)
        clusters = npgp.gplvm.NormalMixture(np.array([[-1.0, 0.0], [1.0, 0.0]]))
        gplvm = npgp.gplvm.BayesianGPLVM(start, prior=clusters)

    :param means: initial m_k, (K, Q): drawn from N(0, I), or the centers of clusters of ``start.latents``.
    :param scale: initial standard deviation of every component.
    :raises ValueError: for means of another shape.
    """

    means: Any
    _: KW_ONLY
    scale: float = 0.5

    def __post_init__(self):
        object.__setattr__(self, "means", np.asarray(self.means))
        if self.means.ndim != 2:
            raise ValueError(f"means has shape {self.means.shape}; it must be (components, latent dimensions).")
        checks.require_positive(self.scale, "scale")

    def __call__(self, rows: numpyro.plate, latent_dim: int) -> jax.Array:
        count, width = self.means.shape
        if width != latent_dim:
            raise ValueError(f"the mixture's means have {width} latent dimensions, but the model has {latent_dim}.")
        weights = numpyro.param("x.weights", jnp.full(count, 1.0 / count), constraint=constraints.simplex)
        means = numpyro.param("x.means", jnp.asarray(self.means))
        scales = numpyro.param("x.scales", jnp.full(means.shape, self.scale), constraint=constraints.positive)
        parts = dist.Normal(means, scales).to_event(1)
        mixture = dist.MixtureSameFamily(dist.Categorical(weights), parts)
        with rows as index:
            return numpyro.sample("x", mixture.expand([len(index)]))


@dataclass(frozen=True)
class ClassNormal:
    """
    Supervision by class labels: ``x_n ~ N(m_c, diag v_c)`` for a row of class c, ``N(0, I)`` for one without a label.

    Parameters ``x.means`` and ``x.scales``, each (classes, Q), are learned.

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(10, 4))
        start = npgp.gplvm.pca_start(key, Y, 2, 4)
        gplvm = npgp.gplvm.BayesianGPLVM(
            start, prior=npgp.gplvm.ClassNormal(np.repeat([0, 1], 5))
        )

    :param labels: classes 0, 1, … of all rows, (N,); −1 where the class is not known.
    :param scale: initial standard deviation of every class.
    :raises TypeError: for labels that are not integers.
    """

    labels: Any
    _: KW_ONLY
    scale: float = 0.5

    def __post_init__(self):
        labels = np.asarray(self.labels)
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise TypeError(
                f"labels has dtype {labels.dtype} and shape {labels.shape}; it must be integers, one per row."
            )
        if labels.size == 0 or labels.min() < -1 or labels.max() < 0:
            raise ValueError("labels must be classes 0, 1, …, or −1 where unknown, with at least one known.")
        object.__setattr__(self, "labels", labels)
        checks.require_positive(self.scale, "scale")

    def __call__(self, rows: numpyro.plate, latent_dim: int) -> jax.Array:
        if rows.size != len(self.labels):
            raise ValueError(f"labels has {len(self.labels)} entries, but there are {rows.size} rows.")
        shape = (int(self.labels.max()) + 1, latent_dim)
        means = numpyro.param("x.means", jnp.zeros(shape))
        scales = numpyro.param("x.scales", jnp.full(shape, self.scale), constraint=constraints.positive)
        with rows as index:
            labels = jnp.asarray(self.labels)[index]
            known, label = (labels >= 0)[:, None], jnp.maximum(labels, 0)
            normal = dist.Normal(jnp.where(known, means[label], 0.0), jnp.where(known, scales[label], 1.0))
            return numpyro.sample("x", normal.to_event(1))


@dataclass(frozen=True)
class Dynamical:
    """
    Latents that move smoothly in time (Damianou, Titsias & Lawrence 2011), as sparse GPs of time: ``x_nq ~ N(h_q(t_n),
    τ²)`` with ``h_q ~ GP(0, k)``, a component ``h`` in a plate over the latent dimensions. It takes minibatches.

    Parameters ``h.lengthscale`` and ``x.scale_of_noise`` (τ) are learned; ``npgp.posterior("h", …)`` predicts the path
    at other times.

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(10, 4))
        start = npgp.gplvm.pca_start(key, Y, 2, 4)
        moving = npgp.gplvm.Dynamical(np.arange(10.0), np.linspace(0.0, 9.0, 4), 3.0)
        gplvm = npgp.gplvm.BayesianGPLVM(start, prior=moving)

    :param times: of all rows, (N,).
    :param inducing: inducing times, (M,).
    :param lengthscale: initial lengthscale, in the units of ``times``.
    :param noise: initial τ: how far a row may be from the path.
    :param kernel: from lengthscale to the kernel of h, of variance about ``1 − τ²``; RBF if omitted.
    :raises ValueError: for times that are not a finite vector.
    """

    times: Any
    inducing: Any
    lengthscale: float
    _: KW_ONLY
    noise: float = 0.1
    kernel: Callable[..., Kernel] = RBF

    def __post_init__(self):
        for name in ("times", "inducing"):
            value = np.asarray(getattr(self, name), float)
            if value.ndim != 1:
                raise ValueError(f"{name} has shape {value.shape}; it must be a vector.")
            checks.require_finite(value, name)
            object.__setattr__(self, name, value)
        checks.require_positive(self.lengthscale, "lengthscale")
        checks.require_positive(self.noise, "noise")

    def __call__(self, rows: numpyro.plate, latent_dim: int) -> jax.Array:
        if rows.size != len(self.times):
            raise ValueError(f"times has {len(self.times)} entries, but there are {rows.size} rows.")
        lengthscale = numpyro.param("h.lengthscale", jnp.asarray(self.lengthscale), constraint=constraints.positive)
        scale = numpyro.param("x.scale_of_noise", jnp.asarray(self.noise), constraint=constraints.positive)
        dims = numpyro.plate("latent dims", latent_dim, dim=-2)
        with dims:
            inducing = jnp.asarray(self.inducing)[:, None]
            h = component.SparseGP("h", self.kernel(lengthscale=lengthscale), inducing, init_scale=0.1).draw()
        with rows as index:
            with dims:
                path: ArrayLike = statements.sample("h", h(jnp.asarray(self.times)[index][:, None]), joint=False)
            return numpyro.sample("x", dist.Normal(jnp.asarray(path).T, scale).to_event(1))
