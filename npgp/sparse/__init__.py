"""The heart: inducing blocks projected out of f, and the residual they leave."""

from npgp.sparse.groups import Groups, Tree, consecutive, default_size, kmeans_groups, median_split, single
from npgp.sparse.projection import Members, Projection, Projector, factorize, factorize_members
from npgp.sparse.residuals import (
    GroupResidual,
    LowRankKernel,
    Residual,
    ResidualKernel,
    RowResidual,
    residual_of,
    split_kernel,
)

__all__ = [
    "GroupResidual",
    "Groups",
    "LowRankKernel",
    "Members",
    "Projection",
    "Projector",
    "Residual",
    "ResidualKernel",
    "RowResidual",
    "Tree",
    "consecutive",
    "default_size",
    "factorize",
    "factorize_members",
    "kmeans_groups",
    "median_split",
    "residual_of",
    "single",
    "split_kernel",
]
