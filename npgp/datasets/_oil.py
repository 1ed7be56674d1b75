"""
Files of the folder named by ``NPGP_DATA``, the oil-flow measurements of Bishop & James (1993), and a simulation of
them.

The pipe's cross-section is the unit disc; lengths are in pipe radii. Phases are ordered
(water, oil, gas), the order in which they lie from the bottom up and from the wall inwards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpy.typing import NDArray

from npgp import checks
from npgp.checks import host_generator, optional

ENV_VAR = "NPGP_DATA"


def find(name: str) -> Path | None:
    """Path of ``<name>.npz`` in the folder named by ``NPGP_DATA``, None when it is not there.

    :param name: name of a data set: letters, digits and underscores.
    :return: path of an existing file, or None.
    :raises ValueError: if ``name`` is not a plain name.
    :raises FileNotFoundError: if ``NPGP_DATA`` is set to something that is not a folder.
    """
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"name must be of letters, digits and underscores, got {name!r}.")
    value = os.environ.get(ENV_VAR)
    if not value:
        return None
    folder = Path(value)
    if not folder.is_dir():
        raise FileNotFoundError(f"{ENV_VAR} is set to {value!r}, which is not a folder.")
    path = folder / f"{name}.npz"
    return path if path.is_file() else None


def read(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an npz file, floating-point ones as float64, others as stored.

    :param path: file to read; pickled objects are refused.
    :return: arrays by name.
    """
    with np.load(path, allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files}
    return {
        key: array.astype(np.float64) if np.issubdtype(array.dtype, np.floating) else array
        for key, array in arrays.items()
    }


def load(name: str) -> dict[str, NDArray[Any]]:
    """All arrays of one file of the folder named by ``NPGP_DATA``.

    Meant for the sets without a loader of their own, among them ``banana`` and ``banana_large``
    (``X`` (N, 2), ``y`` (N,) in {0, 1}), ``coal`` (``event_dates`` in years, ``binned_year``,
    ``binned_count``), ``mcycle`` (``t``, ``accel``), ``pines`` (``xy`` (126, 2) in the unit
    square), ``mnist`` (uint8 images), ``frey_faces`` (``faces`` (1965, 28, 20), uint8),
    ``olympic_marathon``, ``solar_irradiance``, ``aircraft_accidents``, ``hflights2011`` and
    ``airline2008_subset``. The shapes and sources are in the manifest that comes with the folder.

    :param name: file name without ``.npz``.
    :return: arrays by name; floating-point arrays are float64 (large sets are stored as float32,
        so their values carry float32 precision), integers and booleans keep their stored type.
    :raises ValueError: if ``name`` is not a plain name.
    :raises FileNotFoundError: if the file is not to be had.
    """
    path = find(name)
    if path is None:
        raise FileNotFoundError(
            f"The data set {name!r} needs the file {name}.npz in the folder named by the "
            f"environment variable {ENV_VAR}; it is not among those the extra npgp[data] downloads."
        )
    return read(path)


def snelson() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """One-dimensional toy regression of Snelson & Ghahramani (2006), float64.

    Source: Snelson, E. & Ghahramani, Z. (2006). Sparse Gaussian processes using pseudo-inputs.
    NIPS 18. Read from ``snelson1d.npz`` in the folder named by ``NPGP_DATA``.

    :return: ``(x_train, y_train, x_test)`` of shapes (200, 1), (200,) and (301, 1). ``x_test`` is
        a uniform grid on [-3, 10]; no test targets exist.
    :raises FileNotFoundError: if the file is not to be had.
    """
    data = load("snelson1d")
    return data["x_train"], data["y_train"].reshape(-1), data["x_test"]


OilSplit = Literal["train", "valid", "test"]

_COMMIT = "2eb6dce7501464457465facc7ef9334250efe4b4"
_URL = f"https://raw.githubusercontent.com/lawrennd/datasets_mirror/{_COMMIT}/three_phase_oil_flow/{{name}}"
_STEMS: dict[str, str] = {"train": "DataTrn", "valid": "DataVdn", "test": "DataTst"}
_SHA256 = {
    "DataTrn.txt": "ff1aeeceb204de936990bc22cc9d0e4ca7094e993a6d723509c60be0b0f2a136",
    "DataTrnLbls.txt": "15e5ce14ca8054ca34b984b8da7d8ffeff682f86af2772911e9deccdd4d438c0",
    "DataVdn.txt": "2faab71737820af032f8d418669dcda5342296cba53116c43fb9e76b45f51710",
    "DataVdnLbls.txt": "b6073b1f0719451cec67cddad533decf6448aa026482f872e211e848007ebbe8",
    "DataTst.txt": "f287fda27a2b6b9e93de22ebed7229d1c57bd7e3154d6291b66f99521816e466",
    "DataTstLbls.txt": "411dcc8d566cf1f9a40bdb16d9d0e2ddf934b534a840e508efd4be4ce5827d2f",
}


@dataclass(frozen=True, eq=False)
class OilFlow:
    """Oil-flow measurements, real (:func:`oil_flow`) or simulated (:func:`simulate_oil_flow`).

    .. code-block:: python

        data = npgp.datasets.simulate_oil_flow(key, 10)
        assert data.Y.shape == (10, 12) and data.labels.shape == (10,)

    :param Y: (N, 12) float64, two numbers for each of six beams: the measured path lengths, in
        pipe radii, through two of the three phases.
    :param labels: (N,) int64 classes: 0 homogeneous, 1 annular, 2 stratified.
    :param fractions: (N, 2) float64 shares of the cross-section filled by the same two phases (the
        third has the rest), or None where the source does not hold them.
    """

    Y: NDArray[Any]
    labels: NDArray[Any]
    fractions: NDArray[Any] | None


def oil_flow(split: OilSplit = "train") -> OilFlow:
    """Multi-phase oil-flow data of Bishop & James (1993), 1000 rows a split, in file order.

    Source: Bishop, C. M. & James, G. D. (1993). Analysis of multiphase flows using dual-energy
    gamma densitometry and neural networks. Nuclear Instruments and Methods in Physics Research
    A327:580-593. Read from ``oil_flow.npz`` in the folder named by ``NPGP_DATA``; where that is
    not to be had, the text files of the GitHub repository lawrennd/datasets_mirror are downloaded
    with pooch, checked by SHA-256 and kept in pooch's cache. The rows of both are the same.

    The files name neither the classes nor the phases. The class names are by convention. Compared
    with the geometry of :func:`simulate_oil_flow`, the rows agree, up to measurement noise, with a
    first phase that lies at the bottom when stratified and at the wall when annular and a second
    phase next to it (as water and oil would), gas being the third.

    :param split: ``"train"``, ``"valid"`` or ``"test"``.
    :return: the split; ``fractions`` is None when the text files were downloaded, which do not have them.
    :raises ValueError: if ``split`` is unknown or a downloaded file is not the expected one.
    :raises ImportError: if the download is needed and pooch (extra ``npgp[data]``) is missing.
    :raises FileNotFoundError: if the download fails.
    """
    if split not in get_args(OilSplit):
        raise ValueError(f"split must be one of {get_args(OilSplit)}, got {split!r}.")
    path = find("oil_flow")
    if path is None:
        return _parse(_download(split), split)
    data = read(path)
    return OilFlow(
        Y=data[f"Y_{split}"],
        labels=data[f"labels_{split}"].astype(np.int64),
        fractions=data[f"fractions_{split}"],
    )


def _download(split: OilSplit) -> dict[str, Path]:
    """Downloads (or finds in the cache) the two text files of one split.

    :param split: ``"train"``, ``"valid"`` or ``"test"``.
    :return: local paths by file name.
    :raises ImportError: if pooch is missing.
    :raises FileNotFoundError: if the download fails.
    """
    pooch = optional(
        "pooch",
        extra="data",
        what=f"oil_flow, without oil_flow.npz in the folder named by the environment variable {ENV_VAR},",
        otherwise="simulate_oil_flow needs neither.",
    )
    names = [f"{_STEMS[split]}.txt", f"{_STEMS[split]}Lbls.txt"]
    folder = Path(pooch.os_cache("npgp")) / "oil_flow"
    try:
        return {
            name: Path(
                pooch.retrieve(
                    url=_URL.format(name=name),
                    known_hash=f"sha256:{_SHA256[name]}",
                    fname=name,
                    path=folder,
                )
            )
            for name in names
        }
    except OSError as error:
        raise FileNotFoundError(
            "The oil-flow text files could not be downloaded; set the environment variable "
            f"{ENV_VAR} to a folder that holds oil_flow.npz, or run once with a network "
            "and the extra npgp[data]."
        ) from error


def _parse(paths: Mapping[str, Path], split: OilSplit) -> OilFlow:
    """Reads the text files: 12 numbers a row, and a one-hot row of 3 numbers for the class.

    :param paths: local paths by original file name.
    :param split: which of the splits they hold.
    :return: the data, without fractions.
    :raises ValueError: if the contents are not of that form.
    """
    Y = np.loadtxt(paths[f"{_STEMS[split]}.txt"], dtype=np.float64, ndmin=2)
    one_hot = np.loadtxt(paths[f"{_STEMS[split]}Lbls.txt"], dtype=np.float64, ndmin=2)
    if Y.shape[1:] != (12,) or one_hot.shape != (Y.shape[0], 3):
        raise ValueError(
            "The oil-flow text files must hold 12 measurements and 3 class columns a row, got "
            f"shapes {Y.shape} and {one_hot.shape}."
        )
    if not (np.isin(one_hot, (0.0, 1.0)).all() and (one_hot.sum(axis=1) == 1.0).all()):
        raise ValueError("The class columns of the oil-flow text files must be one-hot.")
    return OilFlow(Y=Y, labels=one_hot.argmax(axis=1).astype(np.int64), fractions=None)


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


# ---------------------------------------------------------------------------------------------------------------
# Simulated oil-flow measurements: geometry of the pipe, attenuation, counting noise


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
