"""The convolutional kernel: that of functions of images which are weighted sums of one function's values at patches."""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import checks
from npgp.chunks import entries_at_once, map_chunks, rows_within
from npgp.kernels.base import Kernel, Scaled, Sum
from npgp.linalg import matmul
from npgp.pytrees import pytree, static


@pytree
@dataclass(frozen=True)
class Convolutional(Kernel):
    """
    The covariance of ``f(x) = Σ_p w_p g(x^[p])``: g is a function of a patch, its prior the kernel ``base``, and x^[p]
    are all patches of one shape that an image has, ``k(x, x') = Σ_p Σ_p' w_p w_p' k_g(x^[p], x'^[p'])``.

    Rows of X are images, flattened row by row, with the color channels of a pixel side by side, as
    ``images.reshape(len(images), -1)`` makes them of (N, height, width) or (N, height, width, channels). Take
    :class:`npgp.features.Patches` for inducing features: values of g, at O(N M P) for P patches, where inducing images
    are at O(N M P²). k(x, x) is exact, at O(P²) an image, some images at a time: no array of N × P × P is made.

    .. code-block:: python

        kernel = npgp.kernels.Convolutional(
            npgp.RBF(1.0), image_shape=(4, 4), patch_shape=(3, 3)
        )
        assert kernel.patches(np.zeros((2, 16))).shape == (2, 4, 9)
        assert kernel.diag(np.zeros((2, 16))).shape == (2,)

    :param base: the kernel of g, whose inputs are patches, flattened as images are.
    :param image_shape: (height, width) or (height, width, channels).
    :param patch_shape: (height, width) of a patch.
    :param weights: w_p, one for each patch, (P,), of any sign; numbers, a ``numpyro.param`` or sampled values. If
        omitted 1/P, so that f is the mean of g over the patches.
    :param channels: ``"together"``: a patch has all channels of its pixels, height · width · channels numbers;
        ``"apart"``: each channel has patches and weights of its own, P of them for each, the channels of one place side
        by side.
    :raises TypeError: for a base that is no kernel, and for shapes that are not whole numbers.
    :raises ValueError: for patches larger than images, for another word for the channels, and, where they are used, for
        weights or images of another shape.

    Source: van der Wilk, Rasmussen & Hensman 2017.
    """

    base: Kernel
    _: KW_ONLY
    image_shape: tuple[int, ...] = static(None)
    patch_shape: tuple[int, int] = static(None)
    weights: ArrayLike | None = None
    channels: str = static("together")

    def __post_init__(self) -> None:
        if not isinstance(self.base, Kernel):
            raise TypeError(f"base is {checks.shown(self.base)}; it must be the kernel of a function of patches.")
        object.__setattr__(self, "image_shape", _shape(self.image_shape, "image_shape", (2, 3)))
        object.__setattr__(self, "patch_shape", _shape(self.patch_shape, "patch_shape", (2,)))
        checks.one_of(self.channels, "channels", ("together", "apart"))
        if any(p > i for p, i in zip(self.patch_shape, self.image_shape, strict=False)):
            raise ValueError(f"patch_shape is {self.patch_shape}, but images are of shape {self.image_shape}.")
        if self.weights is not None:
            object.__setattr__(self, "weights", checks.real(self.weights, "weights", "real numbers"))

    @property
    def _patch_index(self) -> np.ndarray:
        return _patch_index(self.image_shape, self.patch_shape, self.channels)

    @property
    def num_patches(self) -> int:
        """P, the number of patches, and of weights."""
        return self._patch_index.shape[0]

    @property
    def patch_columns(self) -> int:
        """Number of entries of a patch."""
        return self._patch_index.shape[1]

    @property
    def differentiable(self) -> bool:
        return self.base.differentiable

    def patches(self, X: ArrayLike) -> jax.Array:
        """All patches of images X (N, D): (N, P, patch_columns), row by row."""
        X = jnp.asarray(X)
        self._check(X)
        return X[:, self._patch_index]

    def from_patches(self, Z: jax.Array, X: ArrayLike) -> jax.Array:
        """
        ``Cov[g(z_m), f(x_n)] = Σ_p w_p k_g(z_m, x_n^[p])``, (M, N), some images at a time.

        :param Z: patches, (M, patch_columns).
        :param X: images, (N, D).
        """
        X = jnp.asarray(X)
        self._check(X)
        w, (M, P) = self._weights(X), (Z.shape[0], self.num_patches)

        def of_images(X: jax.Array) -> jax.Array:
            covariance = self.base(Z, self.patches(X).reshape(-1, self.patch_columns))
            return matmul(covariance.reshape(M, -1, P), w[:, None])[..., 0]

        return map_chunks(of_images, rows_within(entries_at_once(), M, P), X, axis=-1)

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        X2 = X if X2 is None else X2
        patches, w = self.patches(X), self._weights(X)
        # Image by image: with the patches of one on the left, its row of the matrix is one more weighted sum.
        return map_chunks(jax.vmap(lambda image: matmul(w[None], self.from_patches(image, X2))[0]), 1, patches)

    def diag(self, X: jax.Array) -> jax.Array:
        w = self._weights(X)

        def of_images(X: jax.Array) -> jax.Array:
            quadratic, patches = (lambda image: _quadratic(w, self.base(image))), self.patches(X)
            # One by itself not as a batch of one: XLA's batched products take three times as long on a CPU.
            return quadratic(patches[0])[None] if len(X) == 1 else jax.vmap(quadratic)(patches)

        X = jnp.asarray(X)
        self._check(X)
        return map_chunks(of_images, rows_within(entries_at_once(), self.num_patches, self.num_patches), X)

    def _check(self, X: jax.Array) -> None:
        pixels = int(np.prod(self.image_shape))
        if X.ndim != 2 or X.shape[1] != pixels:
            raise ValueError(
                f"X has shape {X.shape}, but images of shape {self.image_shape} are rows of {pixels} numbers: "
                "images.reshape(len(images), -1)."
            )

    def _weights(self, X: ArrayLike) -> jax.Array:
        P, dtype = self.num_patches, jnp.result_type(X)
        if self.weights is None:
            return jnp.full(P, 1.0 / P, dtype)
        if jnp.shape(self.weights) not in ((), (1,), (P,)):
            raise ValueError(
                f"weights has shape {jnp.shape(self.weights)}; images have {P} patches, so it must be ({P},)."
            )
        return jnp.broadcast_to(jnp.asarray(self.weights, dtype), (P,))


@jax.custom_jvp
def _quadratic(w: jax.Array, K: jax.Array) -> jax.Array:
    """``wᵀ K w`` of a symmetric K; as sums, which XLA makes one loop of with K's exponential."""
    return jnp.sum(jnp.sum(K * w, axis=1) * w)


@_quadratic.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (w, K), (dw, dK) = primals, tangents
    # As products, which in reverse take .6 of the time that sums take.
    return _quadratic(w, K), jnp.dot(2.0 * matmul(K, w[:, None])[:, 0], dw) + jnp.dot(w, matmul(dK, w[:, None])[:, 0])


def convolutional_parts(kernel: Kernel) -> list[tuple[Convolutional, ArrayLike]]:
    """The convolutional kernels among the terms of a sum, in order, each with the factors around it."""
    if isinstance(kernel, Sum):
        return [inner for term in kernel.kernels for inner in convolutional_parts(term)]
    if isinstance(kernel, Scaled):
        return [(inner, scale * kernel.scale) for inner, scale in convolutional_parts(kernel.kernel)]  # type: ignore[operator]
    return [(kernel, 1.0)] if isinstance(kernel, Convolutional) else []


def _shape(shape: object, name: str, lengths: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)) or len(shape) not in lengths:
        raise TypeError(
            f"{name} is {checks.shown(shape)}; it must be a tuple of {' or '.join(map(str, lengths))} sizes."
        )
    return tuple(checks.whole_number(size, f"{name}[{i}]") for i, size in enumerate(shape))


@functools.cache
def _patch_index(image_shape: tuple[int, ...], patch_shape: tuple[int, int], channels: str) -> np.ndarray:
    """Indices of each patch's entries in a flattened image, (P, patch_columns)."""
    (height, width), count = image_shape[:2], image_shape[2] if len(image_shape) == 3 else 1
    numbers = np.arange(height * width * count).reshape(height, width, count)
    windows = np.lib.stride_tricks.sliding_window_view(numbers, patch_shape, (0, 1))  # (rows, columns, channels, h, w)
    if channels == "apart":
        return windows.reshape(-1, patch_shape[0] * patch_shape[1])
    return np.moveaxis(windows, 2, -1).reshape(-1, patch_shape[0] * patch_shape[1] * count)
