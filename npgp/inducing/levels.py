"""
Number of levels of the sphere's harmonics for inducing features, and the share of f's variance that they leave out.

Spherical harmonics take whole levels, the largest eigenvalues first, as many as fit
(:meth:`npgp.features.SphericalHarmonics.within`); activations take those that leave least out (:func:`choose_levels`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import checks
from npgp.features import Activations, as_block
from npgp.kernels import Kernel
from npgp.kernels.zonal import as_zonal
from npgp.sparse.projection import factorize


@dataclasses.dataclass(frozen=True)
class LevelChoice:
    """
    Result of :func:`choose_levels`.

    :param block: the activations, with the levels chosen.
    :param left_out: for each highest level L that was tried, the share of variance that features of levels 0 to L leave
        out, the mean of d_n/k_nn.
    """

    block: Activations
    left_out: dict[int, float]


def left_out(kernel: Kernel, inducing: object, X: ArrayLike, *, jitter: float | None = None) -> jax.Array:
    """
    The share of f's prior variance that inducing features leave out, the mean over inputs of d_n/k_nn; a scalar.

    .. code-block:: python

        assert 0.0 < npgp.inducing.left_out(kernel, Z, X) < 1.0

    :param kernel: the kernel.
    :param inducing: Z of shape (M, D), a block of features, or a list of these.
    :param X: inputs, (N, D).
    :param jitter: relative jitter tried first (:func:`npgp.linalg.cholesky`).
    """
    blocks = inducing if isinstance(inducing, (list, tuple)) else (inducing,)
    blocks = [as_block(block, f"inducing[{i}]") for i, block in enumerate(blocks)]
    projection = factorize(kernel, blocks, jitter)(checks.inputs(X))
    return jnp.mean(projection.residual_variance() / projection.prior_variance)


_left_out = jax.jit(left_out)


def choose_levels(
    kernel: Kernel, activations: Activations, X: ArrayLike, *, most: int = 12, before: Sequence[object] = ()
) -> LevelChoice:
    """
    The number of levels at which activations explain most of f's variance at given inputs.

    Levels 0 to L are tried for every L up to ``most`` that the kernel has, and the one with the least mean of d_n/k_nn
    is taken. It depends on the kernel's hyperparameters, the number of units and their directions: more units can carry
    more levels. For choosing before a fit, outside ``jit``. A fit may adapt the kernel to few levels, at the expense of
    the data: compare bounds of fits with neighboring levels too.

    .. code-block:: python

        units = npgp.features.Activations(np.eye(2), shape=npgp.features.ReLU())

        choice = npgp.inducing.choose_levels(npgp.kernels.ZonalMatern52(), units, X, most=3)

    :param kernel: the zonal kernel.
    :param activations: the units; their own levels do not matter.
    :param X: inputs, (N, D); a few hundred rows will do.
    :param most: the highest level tried.
    :param before: inducing blocks that come before these.
    """
    zonal, _ = as_zonal(kernel, type(activations).__name__)
    tried = range(checks.whole_number(most, "most", least=0) + 1)
    present = np.asarray(zonal.level_variances(tried, activations.dimension)) > 0
    shares: dict[int, float] = {}
    for level in tried:
        if present[level]:
            candidate = dataclasses.replace(activations, levels=_up_to(level, present))
            shares[level] = float(_left_out(kernel, (*before, candidate), jnp.asarray(X)))
    best = min(shares, key=lambda level: (not np.isfinite(shares[level]), shares[level]))
    return LevelChoice(dataclasses.replace(activations, levels=_up_to(best, present)), shares)


def _up_to(level: int, present: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.flatnonzero(present[: level + 1]))
