"""The heart: inducing blocks projected out of f, the residual they leave, and what q does to it (the conditionals)."""

from npgp.sparse.conditionals import Conditional, Consecutive, Full, Gain, Grouped, Prior, Published, Shared, Tight
from npgp.sparse.groups import Groups, Tree, consecutive, default_size, kmeans_groups, median_split, single
from npgp.sparse.members import Members, factorize_members
from npgp.sparse.projection import Projection, Projector, factorize
from npgp.sparse.residuals import GroupResidual, Residual, RowResidual, residual_of

__all__ = [
    "Conditional",
    "Consecutive",
    "Full",
    "Gain",
    "GroupResidual",
    "Grouped",
    "Groups",
    "Members",
    "Prior",
    "Projection",
    "Projector",
    "Published",
    "Residual",
    "RowResidual",
    "Shared",
    "Tight",
    "Tree",
    "consecutive",
    "default_size",
    "factorize",
    "factorize_members",
    "kmeans_groups",
    "median_split",
    "residual_of",
    "single",
]
