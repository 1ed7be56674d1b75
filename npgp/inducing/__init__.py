"""Initial inducing points, and the number of levels of spherical features."""

from npgp.inducing.levels import LevelChoice, choose_levels, left_out
from npgp.inducing.selection import greedy_fit, greedy_variance, kmeans, random_subset

__all__ = [
    "LevelChoice",
    "choose_levels",
    "greedy_fit",
    "greedy_variance",
    "kmeans",
    "left_out",
    "random_subset",
]
