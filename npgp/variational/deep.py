"""What q says about a deep GP: mixtures over draws of what is between its layers; and how layers are joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.chunks import map_chunks, rows_within
from npgp.predictions import Mixture
from npgp.programs.backend import maximum
from npgp.pytrees import pytree, static
from npgp.variational.paths import Paths
from npgp.variational.posterior import Posterior

#: Draws times rows that are taken at a time.
_ROWS_AT_ONCE = 2**17


def layer_inputs(below: jax.Array | None, X: jax.Array, skip: bool) -> jax.Array:
    """
    What a layer takes: the values (N, width) of the layer below, beside X (N, D) if it has a skip connection.

    :param below: ``None`` for the first layer, which takes X.
    """
    if below is None:
        return X
    return jnp.concatenate([below, X], axis=1) if skip else below


def mean_values(mean: Any, H: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """
    A mean function at a layer's inputs H (N, D), for functions of a shape: shape + (N,), or what broadcasts to it.

    :param mean: ``None`` for the identity, a number, a matrix (D, width), or a function from (N, D) to (N, width).
    :param shape: ``(width,)``, or ``()`` for one function by itself.
    :raises ValueError: for a mean function of another width.
    """
    if mean is not None and not callable(mean) and jnp.ndim(mean) < 2:
        return jnp.asarray(mean, H.dtype)
    if mean is None or callable(mean):
        values = H if mean is None else mean(H)
    elif jnp.shape(mean)[0] != H.shape[1]:
        raise ValueError(f"mean has shape {jnp.shape(mean)}, but the layer's inputs have {H.shape[1]} columns.")
    else:
        values = linalg.matmul(H, mean)
    width = math.prod(shape)
    if jnp.shape(values) != (H.shape[0], width):
        what = "the identity" if mean is None else "the mean function"
        raise ValueError(
            f"{what} of a layer of width {width} has values of shape {jnp.shape(values)} for inputs of shape "
            f"{H.shape}: give the layer mean=npgp.model.linear_mean(X, width), a projection, or mean=0.0 for none."
        )
    return values.T.reshape(*shape, H.shape[0])


@pytree
class DeepPosterior(Mixture):
    """
    The approximate posterior of a deep GP's function: a mixture, in equal parts, over draws of what is between its
    layers. Made by :func:`npgp.posterior`, under the name of the :class:`npgp.DeepGP`.

    Given what comes into the last layer, f is Gaussian in each row, and integrated out; what comes in is drawn row by
    row from q, layer by layer. A row's draws depend on its number and the seed alone: the same call has the same
    result. Errors fall as ``draws^−½``.

    .. code-block:: python

        from dataclasses import replace


        def deep_model(X, y=None):
            deep = npgp.DeepGP(
                "deep", [npgp.Layer(npgp.RBF(1.0), Z), npgp.Layer(npgp.RBF(1.0), Z)]
            ).draw()
            with numpyro.plate("data", len(X)):
                npgp.observe("y", deep(X), npgp.Gaussian(variance=noise_variance), obs=y)


        deep_guide = npgp.AutoSparseGP(deep_model)
        deep_svi = SVI(deep_model, deep_guide, npgp.adam(0.05), TraceMeanField_ELBO())
        trained = npgp.fit(deep_svi, key, 20, X, y, progress=False).params
        f = npgp.posterior("deep", deep_model, deep_guide, trained, X)
        mean, variance = replace(f, draws=50).mean_and_variance(X)
        density = f.log_density(X, y, npgp.Gaussian(variance=noise_variance))  # (30,)
        together = f.sample(key, X[:5], (3,))  # joint over rows
        # Functions: paths(X_new) at any inputs, (3, N).
        paths = f.draw_functions(key, 3, num_features=16)

    :param layers: the posteriors of the layers' functions, the first layer first; those of the first layers, whose
        values are the next layer's columns, may be batches of several outputs. ``layers[0].sample`` and the like draw
        from one layer by itself.
    :param means: the layers' mean functions, as :class:`npgp.Layer` has them; ``None`` for the identity.
    :param skips: which layers take X beside what the layer below gives.
    :param draws: how many draws the mixture is of.
    :param seed: of these draws.
    """

    layers: tuple[Posterior, ...]
    means: tuple[Any, ...]
    skips: tuple[bool, ...] = static(())
    draws: int = static(100)
    seed: int = static(0)

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))
        means = (jax.tree_util.Partial(mean) if callable(mean) else mean for mean in self.means)
        object.__setattr__(self, "means", tuple(means))
        object.__setattr__(self, "draws", checks.whole_number(self.draws, "draws"))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of outputs, those of the last layer."""
        return self.layers[-1].batch_shape

    def _rows(self, X: Any, neighbors: ArrayLike | None, batch_shape: tuple[int, ...]) -> Any:
        """Inputs, and the rows' numbers, by which they are drawn."""
        X = checks.inputs(X)
        return super()._rows(X, neighbors, batch_shape), np.arange(X.shape[0])

    def _sample(self, rng_key: jax.Array, rows: Any, sample_shape: tuple[int, ...]) -> jax.Array:
        """Draws of f, joint over rows, in all layers: O(N³) for each draw and layer."""

        def one(key):
            keys = jax.random.split(key, len(self.layers))
            return self._through(
                rows[0], [partial(layer.sample, k) for layer, k in zip(self.layers, keys, strict=True)]
            )

        draws = lax.map(one, jax.random.split(rng_key, math.prod(sample_shape)))
        return draws.reshape(*sample_shape, *draws.shape[1:])

    def draw_functions(
        self, rng_key: jax.Array, num_draws: int = 1, num_features: int = 1024
    ) -> Callable[[ArrayLike], jax.Array]:
        """
        Draw whole functions: of each layer by pathwise conditioning, one after the other.

        Arguments and errors as for :meth:`npgp.variational.Posterior.draw_functions`.

        :return: a function of inputs X (N, D), with values (num_draws,) + batch + (N,), at work that grows with N.
        """
        keys = jax.random.split(checks.random_key(rng_key), len(self.layers))
        drawn = zip(self.layers, keys, strict=True)
        paths = [layer.draw_functions(layer_key, num_draws, num_features) for layer, layer_key in drawn]
        return jax.tree_util.Partial(DeepPosterior._along, self, paths)

    def _along(self, paths: Sequence[Paths], X: ArrayLike) -> jax.Array:
        """Values of drawn layers at X, draw by draw."""
        X = checks.inputs(X)

        def one(weights):
            def function(drawn: Paths, of_one: Any, H: jax.Array) -> jax.Array:
                features, blocks = jax.tree.map(lambda x: x[None], of_one)
                return replace(drawn, feature_weights=features, block_weights=blocks)(H)[0]

            return self._through(X, [partial(function, *of_layer) for of_layer in zip(paths, weights, strict=True)])

        return lax.map(one, [(drawn.feature_weights, drawn.block_weights) for drawn in paths])

    def _through(self, X: jax.Array, functions: Sequence[Callable[[jax.Array], jax.Array]]) -> jax.Array:
        """The last layer's values at X, where each layer has one of these functions beside its mean function."""
        below = None
        for layer, mean, skip, function in zip(self.layers, self.means, self._skips, functions, strict=True):
            H = layer_inputs(below, X, skip)
            values = function(H) + mean_values(mean, H, layer.batch_shape)
            below = values.T
        return values

    @property
    def _skips(self) -> tuple[bool, ...]:
        return self.skips or (False,) * len(self.layers)

    def _components(self, rows: Any) -> tuple[jax.Array, jax.Array]:
        return map_chunks(self._of_rows, rows_within(_ROWS_AT_ONCE, self.draws), *rows, axis=-1)

    def _of_rows(self, X: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Means and variances given each draw, of rows with these numbers."""
        N, S = X.shape[0], self.draws if len(self.layers) > 1 else 1
        below, repeated = None, X
        key = jax.random.key(self.seed)
        for i, layer in enumerate(self.layers[:-1]):
            H = layer_inputs(below, repeated, self._skips[i])
            mean, variance = layer.mean_and_variance(H)
            width = mean.shape[0]
            mean = jnp.broadcast_to(mean + mean_values(self.means[i], H, self.layers[i].batch_shape), mean.shape)
            keys = jax.vmap(lambda row, i=i: jax.random.fold_in(jax.random.fold_in(key, i), row))(rows)
            z = jax.vmap(lambda key, width=width: jax.random.normal(key, (width, S), X.dtype), out_axes=-1)(keys)
            shape = (width, S if i else 1, N)
            drawn = mean.reshape(shape) + jnp.sqrt(maximum(variance, 0.0)).reshape(shape) * z
            below, repeated = drawn.reshape(width, S * N).T, jnp.broadcast_to(X, (S, *X.shape)).reshape(S * N, -1)
        H = layer_inputs(below, repeated, self._skips[-1])
        mean, variance = self.layers[-1].mean_and_variance(H)
        mean = jnp.broadcast_to(mean + mean_values(self.means[-1], H, self.batch_shape), variance.shape)
        return tuple(jnp.moveaxis(x.reshape(*self.batch_shape, S, N), -2, 0) for x in (mean, variance))  # type: ignore[return-value]
