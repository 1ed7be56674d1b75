"""The multi-phase oil-flow measurements of Bishop & James (1993)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from npgp.datasets import _files
from npgp.optional import optional

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
    path = _files.find("oil_flow")
    if path is None:
        return _parse(_download(split), split)
    data = _files.read(path)
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
        what=f"oil_flow, without oil_flow.npz in the folder named by the environment variable {_files.ENV_VAR},",
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
            f"{_files.ENV_VAR} to a folder that holds oil_flow.npz, or run once with a network "
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
