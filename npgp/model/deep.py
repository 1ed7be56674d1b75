"""``DeepGP``: sparse GPs in layers, each a function of the values of the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.typing import ArrayLike

from npgp import checks
from npgp.conditionals import Conditional
from npgp.kernels import Kernel
from npgp.model.function import Function
from npgp.model.latent import Latent, NoArray
from npgp.model.sampling import sample
from npgp.model.sparse_gp import SparseGP
from npgp.pytrees import ByName
from npgp.variational.deep import DeepPosterior, layer_inputs, mean_values

#: Initial standard deviation of q(ε) of inner layers, as a share of the prior's: they start as their mean functions.
_INNER_SCALE = 0.01


@dataclass(frozen=True)
class Layer(ByName):
    """
    A layer of a :class:`npgp.DeepGP`: as many functions as it is wide, which share kernel and inducing features unless
    these have a batch: ``npgp.RBF(lengthscale)`` with a lengthscale of shape (width, 1, columns) is a kernel for each.

    .. code-block:: python

        layer = npgp.Layer(npgp.RBF(1.0), Z, width=2, mean=np.ones((1, 2)))

    :param kernel: of the layer's functions, npgp's or tinygp's.
    :param inducing: inducing inputs, a block of features or a list of these, as for :class:`npgp.SparseGP`. They are in
        the space of what comes into the layer: X, or the values of the layer before, with X beside if ``skip``.
    :param width: how many functions; of an inner layer, how many columns the next one gets.
    :param mean: the layer's mean function: a number, a matrix (columns that come in, width), a function from
        (N, columns) to (N, width), or ``None``: the identity for inner layers, and 0 for the last. Deep GPs without a
        mean function between layers forget their inputs (Duvenaud et al. 2014); :func:`npgp.model.linear_mean` has
        projections.
    :param skip: whether X comes into the layer too, in columns after those of the layer before.
    :param conditional: of an inner layer, what q does to its residual: ``"prior"`` or ``"shared"``, the two that are
        bounds whatever follows. That of the last layer is said where it is observed.
    :param covariances: as for :class:`npgp.SparseGP`.
    :param init_scale: likewise; by default .01 for inner layers, so that training starts from the mean functions, with
        as little noise between layers as the inducing features allow, and .1 for the last.
    :param jitter: likewise.
    :param whitened: likewise.
    :raises TypeError: for a width that is no whole number, a number in the place of inducing inputs, and a mean
        function that is none of these.
    """

    kernel: Kernel
    inducing: Any
    _: KW_ONLY
    width: int = 1
    mean: ArrayLike | Callable[[jax.Array], jax.Array] | None = None
    skip: bool = False
    conditional: Conditional | str = "prior"
    covariances: Sequence[str] | str | None = None
    init_scale: float | None = None
    jitter: float | None = None
    whitened: bool = True

    def __post_init__(self):
        object.__setattr__(self, "width", checks.whole_number(self.width, "width"))
        if isinstance(self.inducing, (int, np.integer)):
            raise TypeError(
                f"inducing is {self.inducing}, a number of points, but a layer's rows are values of the layer before, "
                "which move in training: give the points themselves."
            )
        if self.mean is not None and not callable(self.mean):
            object.__setattr__(self, "mean", checks.real(self.mean, "mean", "a number, a matrix, a function or None"))


@dataclass(frozen=True)
class DeepGP:
    """
    A deep GP: functions of functions, ``f_L(… f_2(f_1(X)))``, as a component of a NumPyro model. It is nothing but a
    :class:`npgp.SparseGP` for each layer, in a plate of the layer's width, with :func:`npgp.sample` between:

    .. code-block:: python

        def deep_model(X, y=None, *, size=30):
            noise = numpyro.param("noise", 0.1, constraint=dist.constraints.positive)
            layers = [npgp.Layer(npgp.RBF(1.0), Z), npgp.Layer(npgp.RBF(1.0), Z)]
            deep = npgp.DeepGP("deep", layers).draw()
            with npgp.plate("data", size, rows=len(X)):
                npgp.observe("y", deep(X), npgp.Gaussian(scale=noise), obs=y)


        guide = npgp.AutoSparseGP(deep_model)
        svi = SVI(deep_model, guide, npgp.adam(0.01), TraceMeanField_ELBO(num_particles=2))
        params = npgp.fit(svi, key, 20, X, y, batch_size=10, progress=False).params
        f = npgp.posterior("deep", deep_model, guide, params, X)
        mean, variance = f.mean_and_variance(X)

    Training is doubly stochastic (Salimbeni & Deisenroth 2017): a batch of rows, and for each row one draw of what is
    between layers, from its marginal under q; several with ``TraceMeanField_ELBO(num_particles=…)``. The last layer is
    integrated out row by row, with any conditional that takes rows one by one, ``"tight"`` by default: the ELBO is a
    bound where that of the last layer by itself is (docs/theory.md, section 12). Between layers q is independent given
    hyperparameters: q(ε) of each layer is its own.

    Sites are those of the layers, ``name.1.u``, ``name.2.u``, …, and the values between, ``name.1``, …, (width, N).
    ``npgp.posterior(name, …)`` is the whole, a :class:`npgp.variational.DeepPosterior`, and
    ``npgp.posterior("name.1", …)`` that of a layer by itself.

    :param name: prefix of the sites and parameters; unique in the model.
    :param layers: the layers, the first one first. One alone is a :class:`npgp.SparseGP` under the name ``name.1``.
    :param joint: whether values between layers are drawn jointly over the rows, at O(B³) for B of them: for
        :class:`~npgp.conditionals.Grouped` and :class:`~npgp.conditionals.Full`, which are no bounds with marginal
        draws and are refused then; and for draws of functions from ``Predictive`` (``DeepPosterior.sample`` has these
        too).
    :raises TypeError: for a name that is no string and layers that are no :class:`npgp.Layer`.
    :raises ValueError: for no layers, and for a width that is not that of the next layer's inducing inputs.

    Sources: Damianou & Lawrence 2013; Salimbeni & Deisenroth 2017.
    """

    name: str
    layers: Sequence[Layer]
    joint: bool = False

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is {self.name!r}; it must be a non-empty string.")
        if isinstance(self.layers, Layer) or not all(isinstance(layer, Layer) for layer in self.layers):
            raise TypeError(
                f"layers is {checks.shown(self.layers)}; it must be a list of npgp.Layer(kernel, inducing)."
            )
        if not self.layers:
            raise ValueError("layers is empty; a deep GP needs at least one.")
        object.__setattr__(self, "layers", tuple(self.layers))
        self._check_widths()

    def _check_widths(self) -> None:
        """Raise ``ValueError`` where a layer is not as wide as the next one's inducing inputs, or as its own mean."""
        columns = [_columns(gp.inducing) for gp in self.components]
        for number, (layer, into) in enumerate(zip(self.layers, columns, strict=True), 1):
            last = number == len(self.layers)
            wanted = None if last else columns[number]
            if wanted is not None and self.layers[number].skip:
                wanted = None if columns[0] is None else wanted - columns[0]
            if wanted is not None and 0 < wanted != layer.width:
                raise ValueError(
                    f"layer {number} of {self.name} has width={layer.width}, and the inducing inputs of layer "
                    f"{number + 1} are for width={wanted}: write npgp.Layer(..., width={wanted})."
                )
            if layer.mean is None and not last and into is not None and layer.width != into:
                raise ValueError(
                    f"layer {number} of {self.name} has width={layer.width}, and {into} columns come in, which its "
                    f"mean function, the identity, would keep: write npgp.Layer(..., width={into}), or "
                    "mean=npgp.model.linear_mean(X, width), a projection, or mean=0.0 for none."
                )

    @property
    def components(self) -> tuple[SparseGP, ...]:
        """The GPs of the layers."""
        found = []
        for number, layer in enumerate(self.layers, 1):
            scale = layer.init_scale
            if scale is None:
                scale = _INNER_SCALE if number < len(self.layers) else 0.1
            name, more = f"{self.name}.{number}", (layer.covariances, scale, layer.jitter, layer.whitened)
            found.append(SparseGP(name, layer.kernel, layer.inducing, *more))
        return tuple(found)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the whitened sites of all layers; ``DeepGP(...).components[-1].sites`` are the last one's."""
        return tuple(site for gp in self.components for site in gp.sites)

    def __call__(self, X: ArrayLike):
        raise TypeError(f"{self.name} is a component, and no function yet: f = gp.draw() first, then f(X).")

    def draw(self) -> DeepFunction:
        """
        Draw the functions of all layers once, outside the plate over rows.

        :raises ValueError: as :meth:`npgp.SparseGP.draw`.
        """
        return self._drawn(SparseGP.draw)

    def guide(self) -> DeepFunction:
        """
        In a hand-written guide: sample the whitened sites of all layers from q(ε). Evaluate what this returns where the
        model does, in the same plates, for the sites of the values between layers.
        """
        return self._drawn(SparseGP.guide)

    def _drawn(self, draw: Callable[[SparseGP], Function]) -> DeepFunction:
        functions: list[Function] = []
        plates: list[Any] = []
        for layer, gp in zip(self.layers, self.components, strict=True):
            # One function at the end is no batch of one: its values are those of the rows.
            one = len(functions) + 1 == len(self.layers) and layer.width == 1
            plates.append(nullcontext() if one else numpyro.plate(f"{gp.name}.width", layer.width, dim=-2))
            with plates[-1]:
                functions.append(draw(gp))
        return DeepFunction(self, tuple(functions), tuple(plates))


def _columns(blocks: Sequence[Any]) -> int | None:
    """Columns of the inducing inputs; ``None`` where all blocks are of other features."""
    return next((block.inputs.shape[-1] for block in blocks if hasattr(block, "inputs")), None)


class DeepFunction(NoArray):
    """
    A draw of a deep GP: a function of inputs, for :func:`npgp.observe`. Made by :meth:`npgp.DeepGP.draw`.

    .. code-block:: python

        with numpyro.handlers.seed(rng_seed=0):
            deep = npgp.DeepGP("deep", [npgp.Layer(kernel, Z), npgp.Layer(kernel, Z)]).draw()
        len(deep.functions)  # one for each layer; in a model, npgp.observe("y", deep(X), …)

    :param gp: what was drawn.
    :param functions: the draws of the layers.
    :param plates: the plates over their functions.
    """

    meant = "a function, whose values at rows are f(X)"

    def __init__(self, gp: DeepGP, functions: tuple[Function, ...], plates: tuple[Any, ...]):
        self.gp, self.functions, self.plates = gp, functions, plates
        self._evaluated = False
        functions[-1].whole = self
        functions[-1].marginal_inputs = len(functions) > 1 and not gp.joint

    def __repr__(self):
        return f"<draw of DeepGP {self.gp.name!r}>"

    def __call__(self, X: ArrayLike) -> Latent:
        """
        f at inputs X (N, D), (N,) or (width of the last layer, N), once in a model and inside the plate over rows: the
        values between layers are drawn here.

        :raises TypeError: for inputs that are not floating.
        :raises ValueError: for inputs of another shape, without rows or with NaN; for a mean function of another width;
            and where a draw is evaluated a second time.
        """
        X, name = checks.inputs(X), self.gp.name
        if self._evaluated and len(self.functions) > 1:
            raise ValueError(
                f"{name} is evaluated twice, and the values between its layers have one site each: evaluate it once, "
                "at all rows."
            )
        self._evaluated, below = True, None
        *inner, (f, layer, _) = zip(self.functions, self.gp.layers, self.plates, strict=True)
        for g, under, plate in inner:
            H = layer_inputs(below, X, under.skip)
            with plate:
                values = g(H) + mean_values(under.mean, H, (under.width,))
                below = sample(g.name, values, joint=self.gp.joint, conditional=under.conditional).T
        H = layer_inputs(below, X, layer.skip)
        return f(H) if layer.mean is None else f(H) + mean_values(layer.mean, H, f.batch_shape)

    def posterior(self) -> DeepPosterior:
        """The posterior of the whole; only where a guide gave q."""
        return self._posterior([f.posterior() for f in self.functions])

    def posterior_given_values(self) -> DeepPosterior:
        """That of f given the drawn inducing values."""
        return self._posterior([f.posterior_given_values() for f in self.functions])

    def _posterior(self, posteriors) -> DeepPosterior:
        *inner, last = [layer.mean for layer in self.gp.layers]
        means = (*inner, 0.0 if last is None else last)
        return DeepPosterior(tuple(posteriors), means, tuple(layer.skip for layer in self.gp.layers))


def linear_mean(X: ArrayLike, width: int) -> jax.Array:
    """
    The matrix of a linear mean function, for a :class:`npgp.Layer` that is not as wide as its inputs: of fewer columns
    the first principal components of the inputs; of as many the identity; of more the identity, with zeros beside.

    The next layer's inducing inputs are then, to begin with, ``Z @ linear_mean(X, width)``.

    .. code-block:: python

        W = npgp.model.linear_mean(np.random.default_rng(0).normal(size=(30, 4)), 2)
        assert W.shape == (4, 2)

    :param X: the training inputs (N, D); centered, or else the first component is mostly their mean.
    :param width: of the layer.
    :return: (D, width), with orthonormal columns, but for those of zeros.
    :raises TypeError: for inputs that are not floating, or traced where their components are needed.
    :raises ValueError: for inputs of another shape, without rows or with NaN.

    Source: Salimbeni & Deisenroth 2017, section 2.
    """
    X, width = checks.inputs(X), checks.whole_number(width, "width")
    D = X.shape[1]
    if width >= D:
        return jnp.eye(D, width, dtype=X.dtype)
    if checks.is_traced(X):
        raise TypeError("X is traced; linear_mean(X, width) is computed before the model, not in it.")
    # Signs are those that make the largest entry of each component positive: not what LAPACK happens to return.
    components = np.linalg.svd(np.asarray(X, np.float64), full_matrices=False)[2][:width]
    signs = np.sign(np.take_along_axis(components, np.abs(components).argmax(1)[:, None], axis=1))
    return jnp.asarray((signs * components).T, X.dtype)
