"""
Guides of the latent inputs of a GPLVM: families of q(x).

A guide of latents is a callable ``latents(start, rows, Y, mask)`` that samples the site ``x`` of shape (B, Q) inside
the plate over rows: ``with rows as index: numpyro.sample("x", …)``. One's own may be any such function.
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
from npgp.gplvm.start import Start
from npgp.model.row_params import row_param
from npgp.optional import optional

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
