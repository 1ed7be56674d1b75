"""Finding and reading the files of the folder named by ``NPGP_DATA``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
