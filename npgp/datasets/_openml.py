"""Regression sets from OpenML, brought to the form of the files of the data folder."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from npgp.datasets._files import ENV_VAR
from npgp.optional import optional


@dataclass(frozen=True)
class _Source:
    """Where OpenML keeps a set and how its columns become the inputs and the target.

    :param query: arguments of ``fetch_openml`` that identify the set and its target column.
    :param shape: expected (rows, input columns).
    :param transform: applied to the target.
    :param centered: whether inputs and target are mean-centered, as the stored files are.
    :param drop: columns that are not inputs.
    """

    query: dict[str, Any]
    shape: tuple[int, int]
    transform: Literal["none", "log", "log1p"] = "none"
    centered: bool = True
    drop: tuple[str, ...] = ()


_YACHT: dict[str, Any] = {"name": "yacht_hydrodynamics", "version": 1}
SOURCES = {
    "concrete": _Source({"data_id": 44959, "target_column": "strength"}, (1030, 8)),
    "energy": _Source({"data_id": 44960, "target_column": "heating_load"}, (768, 8), drop=("cooling_load",)),
    "kin8nm": _Source({"data_id": 44980, "target_column": "y"}, (8192, 8), centered=False),
    "protein": _Source({"data_id": 44963, "target_column": "RMSD"}, (45730, 9), "log1p"),
    "wine": _Source({"data_id": 44972, "target_column": "alcohol"}, (1599, 11)),
    "yacht": _Source(_YACHT, (308, 6), "log"),
    "yacht_raw": _Source(_YACHT, (308, 6), centered=False),
}
_TRANSFORMS = {"log": np.log, "log1p": np.log1p}


def fetch(name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Downloads a set from OpenML and gives it the inputs and target of the stored file.

    Row and column order are OpenML's.

    :param name: a key of ``SOURCES``.
    :return: inputs (N, D) and target (N,), float64.
    :raises ImportError: if scikit-learn is missing.
    :raises FileNotFoundError: if OpenML cannot be reached.
    :raises ValueError: if what arrives does not have the expected shape.
    """
    file = f"uci_{name}.npz in the folder named by the environment variable {ENV_VAR}"
    sklearn = optional("sklearn.datasets", extra="data", what=f"uci({name!r}), without {file},")
    source = SOURCES[name]
    try:
        bunch = sklearn.fetch_openml(**source.query, as_frame=False, parser="liac-arff")
    except OSError as error:
        raise FileNotFoundError(
            f"uci({name!r}) needs {file}, or the extra npgp[data] (scikit-learn) and a network to fetch it from "
            "OpenML; OpenML could not be reached."
        ) from error
    keep = [column not in source.drop for column in bunch.feature_names]
    X = np.asarray(bunch.data, dtype=np.float64)[:, keep]
    y = np.asarray(bunch.target, dtype=np.float64).reshape(-1)
    if X.shape != source.shape or y.shape != source.shape[:1]:
        raise ValueError(f"OpenML's set for {name!r} has inputs of shape {X.shape}, not {source.shape}.")
    if source.transform != "none":
        y = _TRANSFORMS[source.transform](y)
    if source.centered:
        X, y = X - X.mean(axis=0), y - y.mean()
    return X, y
