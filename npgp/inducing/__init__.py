"""Initial inducing points, and the number of levels of spherical features."""

from npgp.inducing.selection import (
    LevelChoice,
    choose_levels,
    greedy_fit,
    greedy_variance,
    kmeans,
    left_out,
    random_subset,
)

__all__ = [
    "LevelChoice",
    "choose_levels",
    "greedy_fit",
    "greedy_variance",
    "kmeans",
    "left_out",
    "random_subset",
]
