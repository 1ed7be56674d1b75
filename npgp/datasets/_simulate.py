"""Simulated oil-flow measurements: geometry of the pipe, attenuation, counting noise.

The pipe's cross-section is the unit disc; lengths are in pipe radii. Phases are ordered
(water, oil, gas), the order in which they lie from the bottom up and from the wall inwards.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpy.typing import NDArray

from npgp import checks
from npgp.checks import host_generator
from npgp.datasets._oil import OilFlow

HOMOGENEOUS, ANNULAR, STRATIFIED = 0, 1, 2

# Distances of the beams from the pipe's axis: sideways for the three vertical beams (first), in
# height for the three horizontal ones. Vertical beams to both sides of the axis would repeat each
# other's numbers, as every configuration is symmetric left to right.
VERTICAL = (5 / 6, 1 / 2, 1 / 6)
HORIZONTAL = (-1 / 2, 0.0, 1 / 2)

# Narrow-beam mass attenuation coefficients (cm^2/g) of water, oil taken as CH2, and methane at
# 59.5 keV (Am-241) and 662 keV (Cs-137), interpolated in the tables of Hubbell & Seltzer (NIST
# Standard Reference Database 126) with the mixture rule, and densities (g/cm^3), the gas being
# under some 130 bar. Rows of the coefficients are energies, columns phases; MU is per pipe radius.
MASS_ATTENUATION = np.array([[0.2067, 0.1975, 0.2134], [0.0857, 0.0880, 0.0961]])
DENSITY = np.array([1.00, 0.88, 0.10])
PIPE_RADIUS_CM = 6.0
MU = MASS_ATTENUATION * DENSITY * PIPE_RADIUS_CM


def simulate_oil_flow(rng_key: Array, n: int = 1000, *, counts: float | None = 6.5e5) -> OilFlow:
    """Simulates measurements like those of the oil-flow data. This is not the original data.

    A simulation from the physics, after Bishop, C. M. & James, G. D. (1993), Analysis of
    multiphase flows using dual-energy gamma densitometry and neural networks, Nuclear Instruments
    and Methods in Physics Research A327:580-593. For the original data, which are synthetic
    themselves (Bishop 2006, Pattern Recognition and Machine Learning, appendix A), use
    :func:`oil_flow`; results on the rows made here must not be reported as results on those.

    Water, oil and gas fill the cross-section of a horizontal pipe of radius 6 cm. Their shares are
    three uniform numbers divided by their sum. The configuration is

    - 0, homogeneous: the phases are mixed evenly;
    - 1, annular: concentric rings, water at the wall, then oil, with a gas core;
    - 2, stratified: horizontal layers, water below oil below gas.

    The three classes are as equal in number as ``n`` allows, in random order. Six thin gamma beams
    cross the pipe: three vertical ones 5/6, 1/2 and 1/6 of the radius off the axis, then three
    horizontal ones at heights -1/2, 0 and 1/2. Each is seen at two energies (59.5 and 662 keV):
    the expected number of photons is ``counts * exp(-sum_p mu_p l_p)`` for the path lengths
    ``l_p`` through the phases, and the number counted is Poisson distributed. The two attenuations
    and the known length of the beam inside the pipe give the measured path lengths through water
    and oil, by two linear equations. They are unbiased up to terms of order ``1 / counts``, their
    errors are strongly negatively correlated and they can be below zero, as in the original.

    The positions of the beams, the order of the phases and the distribution of the shares were
    chosen by comparison with the original rows, which they explain up to the measurement errors;
    ``counts`` and the radius of the pipe make those errors about as large as they are there
    (standard deviation 0.05 to 0.06). The sources, materials and numbers are otherwise plausible
    choices, not those of the paper.

    .. code-block:: python

        oil = npgp.datasets.simulate_oil_flow(key, 30)
        assert oil.Y.shape == (30, 12)

    :param rng_key: JAX PRNG key, of which the seed of a NumPy generator is made: it determines the
        result, up to rounding whatever the default precision of JAX.
    :param n: number of rows.
    :param counts: number of photons counted through an empty pipe, the same for each beam and
        energy; None for measurements without counting noise.
    :return: ``Y`` (n, 12) float64, in pipe radii: for beams 1 to 6, the path lengths through water
        and oil; ``labels`` (n,) int64; ``fractions`` (n, 2) float64, the shares of water and oil.
    :raises ValueError: if ``n`` is below 1 or ``counts`` is not positive.
    """
    if checks.whole_number(n, "n", least=None) < 1:
        raise ValueError(f"n must be at least 1, got {n}.")
    if counts is not None and not counts > 0:
        raise ValueError(f"counts must be positive or None, got {counts}.")
    rng = host_generator(rng_key)
    labels = rng.permutation(np.arange(n) % 3)
    shares = rng.uniform(size=(n, 3))
    fractions = shares / shares.sum(axis=1, keepdims=True)
    lengths = np.asarray(_path_lengths(fractions, labels), dtype=np.float64)
    attenuation = lengths @ MU.T
    if counts is not None:
        counted = rng.poisson(counts * np.exp(-attenuation))
        # a beam through which nothing was counted is taken as one through which one photon was
        attenuation = -np.log(np.maximum(counted, 1) / counts)
    return OilFlow(
        Y=invert(attenuation).reshape(n, 12),
        labels=labels.astype(np.int64),
        fractions=fractions[:, :2],
    )


def chord_lengths() -> NDArray[Any]:
    """Lengths of the six beams inside the pipe.

    :return: (6,) lengths in pipe radii, vertical beams first.
    """
    offset = np.array(VERTICAL + HORIZONTAL)
    return np.asarray(2 * np.sqrt(1 - offset**2))


def segment_area(height: ArrayLike) -> Array:
    """Share of the disc below a height.

    :param height: heights in [-1, 1], any shape.
    :return: shares in [0, 1], of the same shape.
    """
    height = jnp.asarray(height)
    return (jnp.arccos(-height) + height * jnp.sqrt(1 - height**2)) / jnp.pi


def segment_height(area: ArrayLike) -> Array:
    """Height below which a given share of the disc lies: the inverse of :func:`segment_area`.

    Bisection on the angle of the segment, as many steps as the precision has digits.

    :param area: shares in [0, 1], any shape.
    :return: heights in [-1, 1], of the same shape.
    """
    area = jnp.asarray(area)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        above = middle - jnp.sin(middle) * jnp.cos(middle) > jnp.pi * area
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    bounds = (jnp.zeros_like(area), jnp.full_like(area, jnp.pi))
    low, high = jax.lax.fori_loop(0, np.finfo(area.dtype).nmant + 2, halve, bounds)
    return -jnp.cos((low + high) / 2)


def path_lengths(fractions: ArrayLike, labels: ArrayLike) -> Array:
    """Exact lengths of the six beams' paths through the three phases.

    Each is the difference of two lengths, those outside or below the interfaces, so that the
    three lengths of a beam sum to its chord.

    :param fractions: (N, 3) shares of water, oil and gas, rows summing to 1.
    :param labels: (N,) configurations, 0, 1 or 2.
    :return: (N, 6, 3) lengths in pipe radii.
    """
    fractions = jnp.asarray(fractions)
    chord = jnp.array(chord_lengths(), dtype=fractions.dtype)
    # (N, 2): shares outside or below the water-oil interface and the oil-gas interface
    outer = jnp.clip(jnp.stack([fractions[:, 0], 1 - fractions[:, 2]], axis=1), 0, 1)

    homogeneous = outer[:, None, :] * chord[:, None]

    distance = jnp.array(VERTICAL + HORIZONTAL)[:, None]
    inside = 2 * jnp.sqrt(jnp.clip(1 - outer[:, None, :] - distance**2, 0))
    annular = chord[:, None] - inside

    height = segment_height(outer)[:, None, :]
    half = chord[:3, None] / 2
    vertical = jnp.clip(height, -half, half) + half
    horizontal = chord[3:, None] * (height > jnp.array(HORIZONTAL)[:, None])
    stratified = jnp.concatenate([vertical, horizontal], axis=1)

    which = jnp.asarray(labels)[:, None, None]
    outside = jnp.select([which == HOMOGENEOUS, which == ANNULAR], [homogeneous, annular], stratified)
    water, water_oil = outside[..., 0], outside[..., 1]
    return jnp.stack([water, water_oil - water, chord - water_oil], axis=-1)


_path_lengths = jax.jit(path_lengths)


def invert(attenuation: NDArray[Any]) -> NDArray[Any]:
    """Path lengths through water and oil that explain the attenuations at two energies.

    :param attenuation: (..., 6, 2) negative logarithms of the transmitted shares of the photons,
        for each beam at the two energies.
    :return: (..., 6, 2) path lengths through water and oil in pipe radii.
    """
    over_gas = attenuation - np.multiply.outer(chord_lengths(), MU[:, 2])
    return np.asarray(over_gas @ np.linalg.inv(MU[:, :2] - MU[:, 2:]).T)
