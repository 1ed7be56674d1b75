"""Rows and starts of ``kin40k.py``: how inducing points are put in blocks, and rows in the order of a conditional."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

import npgp
from npgp import datasets
from studies.regression.minibatch import CHUNK, VARIANCE, in_chunks, start_of_lengthscales


@dataclass(frozen=True)
class Structure:
    """
    How M inducing points are put in blocks.

    :param shares: the share of each block in M.
    :param covariances: of q(ε), one for each block.
    :param fused: whether the blocks are put together in one.
    """

    shares: tuple[float, ...]
    covariances: tuple[str, ...]
    fused: bool = False


STRUCTURES = {
    "SVGP": Structure((1.0,), ("dense",)),
    "SOLVE-GP": Structure((0.5, 0.5), ("dense", "dense")),
    "union": Structure((0.5, 0.5), ("dense",), fused=True),  # SVGP that starts where SOLVE-GP does
    "ODVGP": Structure((0.5, 0.5), ("dense", "mean-only")),
    "three blocks": Structure((0.5, 0.25, 0.25), ("dense", "dense", "dense")),
    "SVGP, mean field": Structure((1.0,), ("diagonal",)),
    "SOLVE-GP, mean field": Structure((0.5, 0.5), ("diagonal", "diagonal")),
}


@dataclass
class Split:
    """Training and test rows of a split, standardized and in single precision."""

    number: int
    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray

    def __post_init__(self):
        self._starts: dict[tuple[int, ...], list[np.ndarray]] = {}

    @classmethod
    def load(cls, name: str, number: int, rows: int | None) -> Split:
        data = datasets.uci(name, number)
        arrays = (data.X_train, data.y_train, data.X_test, data.y_test)
        return cls(number, *(np.asarray(array[:rows], np.float32) for array in arrays))

    def blocks(self, sizes: tuple[int, ...], seed: int) -> list[np.ndarray]:
        """
        Where inducing inputs start, the same for all fits that ask for them.

        The first block is at the centers of k-means; each further one is chosen greedily for the variance that the
        blocks before it leave, by the kernel at its start.
        """
        if sizes not in self._starts:
            if len(sizes) == 1:
                self._starts[sizes] = [np.asarray(npgp.inducing.kmeans(jax.random.key(seed), self.X, *sizes))]
            else:
                before = self.blocks(sizes[:-1], seed)
                kernel = npgp.Matern32(start_of_lengthscales(self.X), variance=VARIANCE)
                Z = npgp.inducing.greedy_variance(kernel, self.X, sizes[-1], given=before)
                self._starts[sizes] = [*before, np.asarray(Z)]
        return self._starts[sizes]

    def inducing(self, structure: Structure, M: int, seed: int) -> list[np.ndarray]:
        blocks = self.blocks(tuple(int(share * M) for share in structure.shares), seed)
        return [np.concatenate(blocks)] if structure.fused else blocks


@dataclass(frozen=True)
class Layout:
    """
    Training rows in the order in which a conditional takes them.

    :param arrays: X, y, and for ``grouped`` the mask of places that hold a row.
    :param batch_size: rows, or places, per step.
    :param group_size: places of a group; 1 for conditionals that take rows one by one.
    """

    arrays: tuple[np.ndarray, ...]
    batch_size: int
    group_size: int = 1

    @classmethod
    def of(cls, split: Split, conditional: str, groups: npgp.sparse.Groups, batch_size: int) -> Layout:
        rows = len(split.y)
        if conditional != "grouped":
            return cls((split.X, split.y), min(batch_size, rows))
        arrays = (groups.arrange(split.X), groups.arrange(split.y), np.asarray(groups.mask).ravel())
        # Whole groups, of about as many rows as the others' batches have.
        count = min(max(round(batch_size * groups.count / rows), 1), groups.count)
        return cls(arrays, count * groups.size, groups.size)

    @property
    def places(self) -> int:
        return len(self.arrays[0])

    def chunks(self) -> tuple[np.ndarray, ...]:
        """X, y and mask in chunks of whole groups, (chunks, size, …), the last filled up with what is masked."""
        size = min(CHUNK // self.group_size * self.group_size, self.places)
        mask = self.arrays[2] if len(self.arrays) > 2 else np.ones(self.places, bool)
        X, y, mask, own = in_chunks(size, *self.arrays[:2], mask)
        return X, y, mask & own
