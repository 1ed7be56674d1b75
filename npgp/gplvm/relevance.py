"""
How many latent dimensions a GPLVM uses, and latent coordinates that two fits of the same data agree on.

A dimension is off if the functions do not change along it, or if the rows do not move along it. Automatic relevance
determination makes it so in either way: the lengthscale ℓ_q grows, or q(x_nq) of all rows returns to the prior N(0, 1).
Scaling a dimension and its lengthscale together leaves the functions as they are. What counts is the ratio,

    r_q = sd_n(μ_nq) / ℓ_q,        μ_nq the mean of q(x_nq),

which is 0 in both cases, and free of the scale. It is the square root of the ARD weight 1/ℓ_q² (Titsias & Lawrence
2010) in coordinates in which the latent means have unit variance; and, as for the *active units* of an autoencoder
(Burda, Grosse & Salakhutdinov 2016), a dimension needs latent means that vary, not small posterior variances. With an
RBF kernel and latent means that have a normal distribution, the functions' values at two rows have along this dimension
alone an expected prior correlation of 1/√(1 + 2 r_q²): 0.98 at r_q = 0.15, 0.58 at r_q = 1.

**Rule.** The number of effective dimensions is the number of r_q that are at least a tenth of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # whose folders are imported where they are used
from jax.typing import ArrayLike
from numpy.typing import NDArray

from npgp.variational.posterior import Posterior

#: A latent dimension counts if its relevance is at least this share of the largest.
RELEVANT = 0.1
#: Lengthscales are the same if they differ by less, relative to the larger.
SAME_LENGTHSCALE = 1e-6

Array = NDArray[Any]


def relevance(loc: ArrayLike | Mapping[str, ArrayLike], lengthscale: ArrayLike | None = None) -> Array:
    """
    Relevance of each latent dimension, ``sd_n(μ_nq) / ℓ_q``, the largest being 1; the module says why.

    .. code-block:: python

        loc = np.random.default_rng(0).normal(size=(10, 3))
        assert npgp.gplvm.relevance(loc, np.ones(3)).max() == 1.0

    :param loc: means of q(x_n), (N, Q); or trained parameters with ``x.loc`` and ``lengthscale``.
    :param lengthscale: ℓ, (Q,), or one for all.
    :return: (Q,); 0 throughout if no dimension moves.
    :raises ValueError: for arrays of another shape, or with values that are not finite or lengthscales not positive.
    """
    loc, _, lengthscale = _latents(loc, None, lengthscale)
    return _largest_one(_spread(loc / lengthscale))


def sensitivity(posterior: Posterior, loc: ArrayLike) -> Array:
    """
    By how much the reconstruction changes along each latent dimension: relevance for any kernel, in the units of Y.

    The root mean square, over rows and outputs, of the slope of f's posterior mean at the latent means, times the
    standard deviation over rows of these: the change of a column where a row moves by one standard deviation, to first
    order. Pass it to :func:`effective_dimensions`.

    .. code-block:: python

        assert npgp.gplvm.sensitivity(posterior, X).shape == (1,)

    :param posterior: of the functions (:meth:`npgp.BayesianGPLVM.posterior`).
    :param loc: means of q(x_n), (N, Q).
    :return: (Q,).
    :raises ValueError: for latents of another shape or not finite, and for slopes that are not finite.
    """
    points, _, _ = _latents(loc, None, 1.0)
    X = jnp.asarray(points, jnp.result_type(float))
    slopes = np.array([float(_mean_square_slope(posterior, X, axis)) for axis in jnp.eye(X.shape[1], dtype=X.dtype)])
    if not np.all(np.isfinite(slopes)):
        raise ValueError(
            f"the functions have slopes that are not finite at the latents: {type(posterior.projector.kernel).__name__}"
            " may have functions without a derivative."
        )
    return np.sqrt(slopes) * _spread(points)


@jax.jit
def _mean_square_slope(posterior: Posterior, X: jax.Array, axis: jax.Array) -> jax.Array:
    _, slope = jax.jvp(posterior.mean, (X,), (jnp.broadcast_to(axis, X.shape),))
    return jnp.mean(jnp.square(slope))


def effective_dimensions(relevance: ArrayLike, *, threshold: float = RELEVANT) -> int:
    """
    The number of dimensions whose relevance is at least a share of the largest.

    .. code-block:: python

        assert npgp.gplvm.effective_dimensions(np.array([1.0, 0.5, 0.001])) == 2

    :param relevance: from :func:`relevance` or :func:`sensitivity`, (Q,), non-negative, of any scale.
    :param threshold: the share, above 0 and at most 1.
    :raises ValueError: for another shape or threshold, or negative relevances.
    """
    values = np.asarray(relevance, float)
    if values.ndim != 1 or not values.size or not np.all(values >= 0):
        raise ValueError(f"relevance has shape {values.shape}; it must be (Q,), of numbers that are not negative.")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it must be above 0 and at most 1.")
    return int(np.sum((values >= threshold * np.max(values)) & (values > 0)))


@dataclass(frozen=True)
class CanonicalLatents:
    """
    Latents in coordinates that do not depend on how the dimensions were scaled, ordered, reflected or, where that
    changes nothing, rotated. Made by :func:`canonical_latents`.

    :param loc: means in units of the lengthscale, (N, Q), the most relevant dimension first.
    :param scale: their standard deviations in the same units, (N, Q); ``None`` where they were not given.
    :param relevance: of each, (Q,), the first being 1.
    :param order: which dimension of the input each one is, (Q,); −1 for a rotated one.
    :param signs: 1, or −1 where a dimension was reflected, (Q,); 1 for rotated ones.
    :param transform: ``loc = input @ transform``, (Q, Q): for other points of the same space.
    """

    loc: Array
    scale: Array | None
    relevance: Array
    order: Array
    signs: Array
    transform: Array

    @property
    def names(self) -> tuple[str, ...]:
        """What to call the dimensions: by their numbers in the input, from 1, or in this order where rotated."""
        return tuple(
            f"latent dimension {number + 1}" if number >= 0 else f"principal axis {k + 1}"
            for k, number in enumerate(self.order)
        )

    def apply(self, points: ArrayLike) -> Array:
        """
        Other points of the input's latent space, such as inducing inputs, in these coordinates.

        :param points: (N*, Q).
        """
        return np.asarray(points) @ self.transform

    def invert(self, points: ArrayLike) -> Array:
        """
        Points given in these coordinates, in those of the input.

        :param points: (N*, Q).
        """
        return np.linalg.solve(self.transform.T, np.asarray(points).T).T

    def lift(self, points: ArrayLike, dims: tuple[int, int] = (0, 1)) -> Array:
        """
        Points of a plane, in the coordinates of the input. The other dimensions are at the mean over rows.

        :param points: in these coordinates, (G, 2).
        :param dims: which two dimensions the plane has.
        :return: (G, Q).
        """
        points = np.asarray(points)
        if points.ndim != 2 or points.shape[1] != 2:
            raise ValueError(f"points has shape {points.shape}; it must be (G, 2), points of a plane.")
        lifted = np.tile(np.mean(self.loc, axis=0), (len(points), 1))
        lifted[:, list(dims)] = points
        return self.invert(lifted)


def canonical_latents(
    loc: ArrayLike | Mapping[str, ArrayLike],
    scale: ArrayLike | None = None,
    lengthscale: ArrayLike | None = None,
    *,
    rotate: bool | None = None,
) -> CanonicalLatents:
    """
    Latents for pictures and comparisons: permuting or reflecting dimensions of the input gives the same result, and so
    does scaling a dimension along with its lengthscale, or rotating what is rotated here.

    ============  ==================================================================================================
    scale         In units of the lengthscale, in which distances are what the kernel makes of them.
    rotation      Dimensions of equal lengthscale, among which neither the kernel nor the prior knows a direction:
                  principal axes of the scaled means.
    order         By relevance, the standard deviation over rows of the scaled means, from the largest.
    sign          Of the rows' deviations from the mean in a dimension, the largest in magnitude is positive.
    ============  ==================================================================================================

    No shift: the prior's mean stays at 0. Dimensions of exactly the same relevance stay in the input's order.

    .. code-block:: python

        latents = npgp.gplvm.canonical_latents(
            np.random.default_rng(0).normal(size=(10, 3)), lengthscale=np.ones(3)
        )
        assert latents.loc.shape == (10, 3)

    :param loc: means of q(x_n), (N, Q); or trained parameters with ``x.loc``, ``lengthscale``, and ``x.scale`` or
        ``x.scale_tril`` if there are any.
    :param scale: their standard deviations, (N, Q), or Cholesky factors of the covariances, (N, Q, Q).
    :param lengthscale: ℓ, (Q,), or one for all; 1 if omitted.
    :param rotate: True to take principal axes among all dimensions, whose distances a stationary kernel alone does not
        tell apart; False to rotate nothing. By default among those of equal lengthscale.
    :raises ValueError: for arrays of another shape, or with values that are not finite or lengthscales not positive.
    """
    loc, scale, lengthscale = _latents(loc, scale, 1.0 if lengthscale is None else lengthscale)
    columns = loc.shape[1]
    transform = np.diag(1.0 / lengthscale)
    alone = np.ones(columns, bool)
    for dims in _rotated(lengthscale, rotate):
        centered = (loc - np.mean(loc, axis=0)) @ transform[:, dims]
        transform[:, dims] = transform[:, dims] @ np.linalg.svd(centered.T @ centered)[0]
        alone[dims] = False
    spread = _spread(loc @ transform)
    order = np.argsort(-spread, kind="stable")
    transform, alone = transform[:, order], alone[order]
    deviations = (loc - np.mean(loc, axis=0)) @ transform
    largest = deviations[np.argmax(np.abs(deviations), axis=0), np.arange(columns)]
    signs = np.where(largest < 0, -1, 1)
    transform = transform * signs
    deviation: Array | None = None
    if scale is not None:
        factor = scale[..., None, :] * np.eye(columns) if scale.ndim == 2 else scale
        deviation = np.sqrt(np.sum(np.square(np.einsum("qk,nqr->nkr", transform, factor)), axis=-1))
    return CanonicalLatents(
        loc @ transform,
        deviation,
        _largest_one(spread[order]),
        np.where(alone, order, -1),
        np.where(alone, signs, 1),
        transform,
    )


def predictive_variance(
    posterior: Posterior, latents: CanonicalLatents, dims: tuple[int, int] = (0, 1), *, batch_size: int = 256
) -> Callable[[ArrayLike], Array]:
    """
    The variance of f on a plane of latent space, averaged over outputs: the background of a picture of latents.

    :param posterior: of the functions (:meth:`npgp.BayesianGPLVM.posterior`).
    :param latents: the coordinates of the picture. Dimensions that are not shown are at their mean over rows.
    :param dims: which two dimensions of it are shown.
    :param batch_size: points taken at a time.
    :return: a function from points (G, 2) to variances (G,), in the squared units of Y.
    """

    def variance(points: ArrayLike) -> Array:
        X = jnp.asarray(latents.lift(points, dims), jnp.result_type(float))
        values = np.asarray(posterior.variance(X, batch_size=batch_size))
        return np.mean(values, axis=tuple(range(values.ndim - 1)))

    return variance


def nearest_neighbor_errors(points: ArrayLike, labels: ArrayLike) -> int:
    """
    Leave-one-out nearest-neighbor errors: how many points have a nearest other point of another class.

    .. code-block:: python

        latents, labels = np.array([[0.0], [0.1], [5.0], [5.1]]), np.array([0, 0, 1, 1])
        assert npgp.gplvm.nearest_neighbor_errors(latents, labels) == 0

    :param points: (N, Q), scaled as distances should be taken: for a GPLVM, latent means over lengthscales.
    :param labels: classes, (N,).
    :return: a count out of N.
    :raises ValueError: for fewer than two points, or labels of another length.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    if len(points) < 2 or labels.shape != points.shape[:1]:
        raise ValueError(f"points of shape {points.shape} and labels of shape {labels.shape} do not match.")
    # The point itself is one of the two, unless there are more at its place.
    two = scipy.spatial.cKDTree(points).query(points, 2)[1]
    nearest = np.where(two[:, 0] == np.arange(len(points)), two[:, 1], two[:, 0])
    return int(np.sum(labels[nearest] != labels))


def _latents(loc: Any, scale: Any, lengthscale: Any) -> tuple[Array, Array | None, Array]:
    """Checked float64 arrays: (N, Q), (N, Q) or (N, Q, Q) or ``None``, and (Q,)."""
    if isinstance(loc, Mapping):
        params = loc
        missing = [name for name in ("x.loc", "lengthscale") if name not in params]
        if missing:
            raise ValueError(
                f"the parameters have no {missing[0]!r}: pass the means of q(x), as of gplvm.latents_at(params, Y), "
                "and the lengthscales."
            )
        loc, lengthscale = params["x.loc"], np.asarray(params["lengthscale"])
        if lengthscale.ndim == 3:  # of functions with a kernel each: that of the one which changes most
            lengthscale = np.min(lengthscale, axis=(0, 1))
        scale = params.get("x.scale", params.get("x.scale_tril"))
    elif lengthscale is None:
        raise ValueError("lengthscale is missing; it must be (Q,), or one for all dimensions.")
    loc, lengthscale = np.asarray(loc, float), np.asarray(lengthscale, float)
    if loc.ndim != 2 or not loc.size:
        raise ValueError(f"loc has shape {loc.shape}; it must be (N, Q), the means of q(x).")
    rows, columns = loc.shape
    if lengthscale.shape not in ((), (1,), (columns,)):
        raise ValueError(f"lengthscale has shape {lengthscale.shape}; it must be ({columns},), or one for all.")
    if not np.all(np.isfinite(lengthscale) & (lengthscale > 0)):
        raise ValueError("lengthscale must be positive and finite.")
    if scale is not None:
        scale = np.asarray(scale, float)
        if scale.shape not in ((rows, columns), (rows, columns, columns)):
            raise ValueError(
                f"scale has shape {scale.shape}; it must be that of loc, {loc.shape}, or Cholesky factors, "
                f"({rows}, {columns}, {columns})."
            )
    for name, value in (("loc", loc), ("scale", scale)):
        if value is not None and not np.all(np.isfinite(value)):
            raise ValueError(f"{name} has values that are not finite.")
    return loc, scale, np.broadcast_to(lengthscale, (columns,))


def _rotated(lengthscale: Array, rotate: bool | None) -> list[Array]:
    """Groups of dimensions among which principal axes are taken, of two or more."""
    if rotate is None:
        order = np.argsort(lengthscale, kind="stable")
        ratio = lengthscale[order][1:] / lengthscale[order][:-1]
        groups = np.split(order, np.flatnonzero(ratio > 1 + SAME_LENGTHSCALE) + 1)
    else:
        groups = [np.arange(lengthscale.size)] if rotate else []
    return [np.sort(group) for group in groups if len(group) > 1]


def _spread(latents: Array) -> Array:
    """Standard deviation of each dimension over rows; 0 where it is only rounding of one value for all."""
    spread = np.std(latents, axis=0)
    return np.where(spread > 1e-12 * np.max(np.abs(latents), axis=0), spread, 0.0)


def _largest_one(spread: Array) -> Array:
    return spread / np.max(spread) if np.max(spread) > 0 else np.zeros_like(spread)
