"""The words for how q(ε) holds the covariance of each block."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

#: Learned in full, learned as mean field, or left at the prior: such a block moves the mean only.
STRUCTURES = ("dense", "diagonal", "mean-only")


def check_covariances(
    covariances: Sequence[str] | str | None, blocks: int, allowed: tuple[str, ...] = STRUCTURES
) -> tuple[str, ...]:
    """
    One word for each block, mean-only blocks last; dense throughout if omitted.

    :raises ValueError: for other words, or not one for each block.
    """
    if covariances is None:
        return ("dense",) * blocks
    kinds = (covariances,) * blocks if isinstance(covariances, str) else tuple(covariances)
    if len(kinds) != blocks or any(kind not in allowed for kind in kinds):
        raise ValueError(f"covariances is {covariances!r}; it must give one of {allowed} for each of {blocks} blocks.")
    if any(kind == "mean-only" and later != "mean-only" for kind, later in itertools.pairwise(kinds)):
        raise ValueError(
            f"covariances is {covariances!r}; blocks that move the mean only ('mean-only') must come last."
        )
    return kinds
