"""
Guides of the latent inputs of a GPLVM, families of q(x), and their priors.

A guide of latents is a callable ``latents(start, rows, Y, mask)`` that samples the site ``x`` of shape (B, Q) inside
the plate over rows: ``with rows as index: numpyro.sample("x", …)``. One's own may be any such function.

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
from numpyro.distributions.kl import kl_divergence

from npgp import checks, linalg
from npgp.checks import optional
from npgp.gplvm.start import Start
from npgp.kernels import RBF, Kernel
from npgp.model import sampling as statements
from npgp.model import sparse_gp as component
from npgp.model.row_params import row_param

LatentGuide = Callable[[Start, numpyro.plate, Any, Any], None]


class RowNormal(dist.MultivariateNormal):
    """
    A multivariate normal whose divergence from independent normals is known.
    """

    def log_prob(self, value):
        # NumPyro's solves all rows' triangular systems in one call of LAPACK's (npgp/linalg.py).
        L = jnp.broadcast_to(self.scale_tril, self.batch_shape + self.scale_tril.shape[-2:])
        z = linalg.solve_lower(L, (value - self.loc)[..., None])[..., 0]
        return jnp.sum(dist.Normal().log_prob(z), -1) - 0.5 * linalg.log_determinant(L)


@kl_divergence.register(RowNormal, dist.Independent)
def _(p, q):
    base = q.base_dist
    if not isinstance(base, dist.Normal) or q.reinterpreted_batch_ndims != 1:
        raise NotImplementedError
    scaled = p.scale_tril / base.scale[..., :, None]  # (B, Q, Q)
    log_det = jnp.sum(jnp.log(linalg.diagonal(scaled)), -1)
    square = jnp.sum(jnp.square(scaled), (-2, -1)) + jnp.sum(jnp.square((p.loc - base.loc) / base.scale), -1)
    return 0.5 * (square - p.loc.shape[-1]) - log_det


def _scales(start: Start, rows: ArrayLike) -> jax.Array:
    """Standard deviations of rows, from a table."""
    shape, value = start.latents.shape, start.latent_scale
    return row_param("x.scale", lambda key: jnp.full(shape, value), rows, constraint=constraints.positive)


@dataclass(frozen=True)
class FreeNormal:
    """
    ``q(x_n) = N(μ_n, S_n)`` with parameters of its own for each row: ``x.loc`` (N, Q), and ``x.scale`` (N, Q), or
    ``x.scale_tril`` (N, Q, Q) for a full covariance. They are row tables (:func:`npgp.model.row_param`).

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(10, 4))
        start = npgp.gplvm.pca_start(key, Y, 2, 4)
        gplvm = npgp.gplvm.BayesianGPLVM(start, latents=npgp.gplvm.FreeNormal(full=True))

    :param full: whether S_n is a full matrix; diagonal if not.
    """

    full: bool = False

    def __call__(self, start: Start, rows: numpyro.plate, Y: ArrayLike | None, mask: ArrayLike | None) -> None:
        size, dim = start.latents.shape
        with rows as index:
            loc = row_param("x.loc", start.latents, index)
            if self.full:
                eye = start.latent_scale * np.eye(dim)
                factor = row_param(
                    "x.scale_tril",
                    lambda key: jnp.broadcast_to(eye, (size, dim, dim)),
                    index,
                    constraint=constraints.lower_cholesky,
                )
                numpyro.sample("x", RowNormal(loc, scale_tril=factor))
            else:
                scale = _scales(start, index)
                numpyro.sample("x", dist.Normal(loc, scale).to_event(1))


@dataclass(frozen=True)
class Point:
    """
    Point estimates ``x.loc`` (N, Q), for comparison: the ELBO is then no bound on the GPLVM's evidence, as x is not
    integrated out.

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(10, 4))
        start = npgp.gplvm.pca_start(key, Y, 2, 4)
        gplvm = npgp.gplvm.BayesianGPLVM(start, latents=npgp.gplvm.Point())

    :param prior: whether the prior of x counts (the most probable latents), or not (Lawrence 2005 with neither).
    """

    prior: bool = True

    def __call__(self, start: Start, rows: numpyro.plate, Y: ArrayLike | None, mask: ArrayLike | None) -> None:
        with rows as index:
            loc = row_param("x.loc", start.latents, index)
            numpyro.sample("x", dist.Delta(loc, event_dim=1))


@dataclass(frozen=True)
class Encoder:
    """
    ``q(x_n)`` computed from the row y_n by a network: amortized (Lalchand, Ravuri & Lawrence 2022), or the
    back-constraints of Lawrence & Quiñonero-Candela (2006).

    The mean is a linear map of the data, which begins at ``start.projection``, plus the network's first Q outputs; its
    last Q outputs move the standard deviation. Inputs are ``(Y − start.offset) / start.data_scale`` with zeros for
    missing entries; where there is a mask, it is appended: (B, D) or (B, 2D).

    With many latent dimensions start at a lengthscale of √Q, ``dataclasses.replace(start, lengthscale=Q**0.5)``.
    Latents of unit variance are √(2Q) apart; at a lengthscale of 1 rows then hardly inform each other, and an encoder
    may be drawn to the prior at once.

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(10, 4))
        start = npgp.gplvm.pca_start(key, Y, 2, 4)
        gplvm = npgp.gplvm.BayesianGPLVM(start, latents=npgp.gplvm.Encoder(rng_key=key))

    :param network: an Equinox module that maps one row, a Flax module (linen or nnx) that maps (B, inputs), or any
        function of (B, inputs), each to 2Q outputs. A perceptron of Equinox's if omitted.
    :param rng_key: a JAX random key, for the initial weights of the perceptron, which needs one.
    :param scale: ``"network"`` for standard deviations from the network, ``"rows"`` for free ones per row (parameter
        ``x.scale``; means are back-constrained), ``"none"`` for point estimates (back-constraints proper).
    :param width: of the hidden layers of the perceptron.
    :param depth: number of its hidden layers.
    :raises ValueError: for another ``scale``, and if there is neither a network nor a key.
    """

    network: Any = None
    _: KW_ONLY
    rng_key: jax.Array | None = None
    scale: str = "network"
    width: int = 64
    depth: int = 2

    def __post_init__(self):
        checks.one_of(self.scale, "scale", ("network", "rows", "none"))
        for name in ("width", "depth"):
            checks.whole_number(getattr(self, name), name)
        if self.network is None and self.rng_key is None:
            raise ValueError(
                "rng_key is missing: without a network of yours one is made, and its initial weights are drawn; pass "
                "rng_key=jax.random.key(0), say."
            )

    def __call__(self, start: Start, rows: numpyro.plate, Y: ArrayLike | None, mask: ArrayLike | None) -> None:
        if Y is None:
            raise ValueError("Y is missing: an encoder computes q(x) from the data.")
        dim = start.latents.shape[1]
        centered = jnp.asarray(Y) - jnp.asarray(start.offset, jnp.result_type(float))
        present = jnp.ones(centered.shape, bool) if mask is None else jnp.asarray(checks.mask_of(mask, of=Y))
        centered = jnp.where(present, centered, 0.0)
        inputs = centered / jnp.asarray(start.data_scale, centered.dtype)
        if mask is not None:
            inputs = jnp.concatenate([inputs, present.astype(inputs.dtype)], axis=-1)
        outputs = self._apply(inputs, 2 * dim)
        if jnp.shape(outputs) != (len(inputs), 2 * dim):
            raise ValueError(
                f"the encoder's network gives shape {jnp.shape(outputs)} for inputs of shape {inputs.shape}; it must "
                f"give twice the latent dimensions, {(len(inputs), 2 * dim)}."
            )
        first = np.zeros((centered.shape[1], dim)) if start.projection is None else start.projection
        skip = numpyro.param("encoder.linear", jnp.asarray(first, centered.dtype))
        loc = linalg.matmul(centered, skip) + outputs[:, :dim]
        with rows as index:
            if self.scale == "none":
                numpyro.sample("x", dist.Delta(loc, event_dim=1))
                return
            if self.scale == "network":
                scale = start.latent_scale * jnp.exp(outputs[:, dim:])
            else:
                scale = _scales(start, index)
            numpyro.sample("x", dist.Normal(loc, scale).to_event(1))

    def _apply(self, inputs: jax.Array, outputs: int) -> jax.Array:
        network: Any = self.network
        if network is None:
            network = self._perceptron(inputs.shape[-1], outputs, inputs.dtype)
        kinds = {cls.__module__.split(".")[0] for cls in type(network).__mro__}
        if "equinox" in kinds:
            from numpyro.contrib.module import eqx_module

            return jax.vmap(eqx_module("encoder", network))(inputs)
        if "flax" in kinds:
            from flax import nnx
            from numpyro.contrib.module import flax_module, nnx_module

            if isinstance(network, nnx.Module):
                return nnx_module("encoder", network)(inputs)
            return flax_module("encoder", network, input_shape=inputs.shape)(inputs)
        if not callable(network):
            raise TypeError(f"network is {network!r}; it must be a module of Equinox or Flax, or a function.")
        return network(inputs)

    def _perceptron(self, inputs: int, outputs: int, dtype) -> Any:
        eqx = optional("equinox", extra="encoder", what="the default encoder")
        net = eqx.nn.MLP(inputs, outputs, self.width, self.depth, jax.nn.tanh, dtype=dtype, key=self.rng_key)
        # The last layer starts small: the encoder begins at its linear part.
        last = lambda net: (net.layers[-1].weight, net.layers[-1].bias)  # noqa: E731
        return eqx.tree_at(last, net, replace_fn=lambda w: 0.01 * w)


LatentPrior = Callable[[numpyro.plate, int], jax.Array]


# ---------------------------------------------------------------------------------------------------------------
# Priors


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
