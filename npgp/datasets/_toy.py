"""Small toy sets."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from npgp.datasets._files import load


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
