"""The order in which epochs visit rows: a function of seed and epoch, of which any part can be computed alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

#: Up to so many rows an epoch's order is drawn as a whole and kept. Beyond, it would take more memory than batches.
MAX_KEPT = 2**20
_ROUNDS = 8


class Shuffle:
    """
    Random orders of ``0, …, size − 1``.

    Small sizes are permuted uniformly at random. For large ones, a keyed Feistel network on pairs (l, r), where
    row = l + a r and a b ≥ size, computes single entries and no others: each round adds to one half a
    random function of the other, which is a bijection whatever the function. Pairs that stand for no row are sent
    through the network again until they do (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"), which
    keeps it a bijection; there are less than a of them, one in √size.

    :param seed: whole numbers.
    :param size: number of rows.
    """

    def __init__(self, seed: Sequence[int], size: int):
        self.seed, self.size = list(seed), size
        side = math.isqrt(max(size - 1, 0)) + 1
        self._sides = (side, -(-size // side))
        self._epoch, self._kept = -1, np.empty(0, np.int64)

    def __call__(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Entries ``start`` to ``stop`` of the order in an epoch, (stop − start,)."""
        if epoch != self._epoch:
            rng = np.random.default_rng([*self.seed, epoch])
            if self.size <= MAX_KEPT:
                self._kept = rng.permutation(np.arange(self.size, dtype=np.int32))
            else:
                self._kept = rng.integers(2**64, size=_ROUNDS, dtype=np.uint64)
            self._epoch = epoch
        if self.size <= MAX_KEPT:
            return self._kept[start:stop]
        rows = np.arange(start, stop, dtype=np.uint64)
        rows = self._network(rows)
        while (outside := rows >= self.size).any():
            rows[outside] = self._network(rows[outside])
        return rows.astype(np.int64)

    def _network(self, rows: np.ndarray) -> np.ndarray:
        a, b = (np.uint64(side) for side in self._sides)
        r, l = np.divmod(rows, a)
        for i, key in enumerate(self._kept):
            if i % 2:
                r = (r + _mix(l + key)) % b
            else:
                l = (l + _mix(r + key)) % a
        return l + a * r


def _mix(x: np.ndarray) -> np.ndarray:
    """A random-looking function of 64-bit words to 32 bits: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(32)
