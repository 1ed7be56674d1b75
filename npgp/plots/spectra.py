"""Pictures of zonal kernels and activations, level by level of the spherical harmonics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from npgp.kernels import Kernel, gegenbauer
from npgp.kernels.zonal import as_zonal
from npgp.plots.figures import COLORS, MARKERS, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_spectra(
    kernels: Mapping[str, Kernel],
    shapes: Mapping[str, Callable],
    dimension: int,
    *,
    levels: Sequence[int] = range(11),
) -> Figure:
    """
    Which levels zonal kernels and activations have, and how much of each: the Funk–Hecke coefficients ``√λ_ℓ`` and
    ``|ς_ℓ|``.

    Levels that are absent have no mark. An activation serves a kernel as inducing features where the kernel has the
    levels that it has, and more of the low than of the high ones beside the kernel's: ``Σ_ℓ N_ℓ ς_ℓ²/λ_ℓ`` over the
    levels kept is the squared norm of such a feature, of which high levels should not be the most.

    .. code-block:: python

        shapes = {"ReLU": npgp.features.ReLU()}
        figure = npgp.plots.plot_spectra(
            {"Matérn-5/2": npgp.kernels.ZonalMatern52()}, shapes, 3, levels=range(4)
        )

    :param kernels: zonal kernels by name; of scaled ones, the scale is left out (κ(1) = 1).
    :param shapes: activations' shapes σ by name, such as :class:`npgp.features.ReLU`.
    :param dimension: d, the number of input columns and one for the bias.
    :param levels: increasing.
    :raises TypeError: for kernels that are not zonal.
    :raises ValueError: if there is nothing to draw.
    """
    d, levels = gegenbauer.check_dimension(dimension), gegenbauer.check_levels(levels)
    if not kernels and not shapes:
        raise ValueError("kernels and shapes are both empty; there must be one to draw.")
    figure, ax = subplots(figsize=(6.4, 4.0))
    at, N = np.array(levels), gegenbauer.multiplicities(d, levels)
    series = [(f"√λ, {name}", np.sqrt(_eigenvalues(k, d, levels)), "-") for name, k in kernels.items()]
    series += [(f"|ς|, {name}", np.abs(_coefficients(shape, d, levels)) / N, "--") for name, shape in shapes.items()]
    for i, (name, size, style) in enumerate(series):
        present = size > 0
        marker, fill = MARKERS[i % len(MARKERS)], None if style == "-" else "white"
        color = COLORS[i % len(COLORS)]
        ax.plot(at[present], size[present], style + marker, color=color, mfc=fill, ms=5, lw=0.9, label=name)
    ax.set_yscale("log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel(f"level ℓ (dimension {d})")
    ax.set_ylabel("√λ and |ς| of the level")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _eigenvalues(kernel: Kernel, dimension: int, levels: tuple[int, ...]) -> np.ndarray:
    zonal, _ = as_zonal(kernel, "a spectrum's")
    return np.asarray(jax.jit(lambda zonal: zonal.eigenvalues(levels, dimension))(zonal), float)


def _coefficients(shape: Callable, dimension: int, levels: tuple[int, ...]) -> np.ndarray:
    """s_ℓ of an activation, with what may be rounding as 0."""
    own = getattr(shape, "coefficients", None)
    if own is not None:
        return np.asarray(own(dimension, levels), float)
    s = np.asarray(gegenbauer.coefficients(shape, dimension, levels))
    largest = np.max(np.abs(np.asarray(shape(np.cos(gegenbauer.angles()[0])))))
    return np.where(np.abs(s) > largest * gegenbauer.rounding(dimension, levels, s.dtype), s, 0.0).astype(float)
