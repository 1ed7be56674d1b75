"""q(ε): its blocks, its optimum, how it is trained and updated, and what it says about f."""

from npgp.predictions import FunctionPosterior, Mixture
from npgp.variational.averages import MixedPaths, MixedPosterior, PathMixture, PosteriorMixture
from npgp.variational.blocks import (
    BlockNormal,
    DenseNormal,
    DiagonalNormal,
    JointBlock,
    MeanOnlyNormal,
    WhitenedPrior,
    learned_blocks,
    square_tril,
    whitened_mean,
    whitened_variance,
)
from npgp.variational.deep import DeepPosterior
from npgp.variational.natural import natural_gradient
from npgp.variational.paths import Paths
from npgp.variational.posterior import CorrectedPosterior, Decomposition, Posterior, exact_variance, local_correction
from npgp.variational.updates import ScaledProjection, gaussian_optimum, update

__all__ = [
    "BlockNormal",
    "CorrectedPosterior",
    "Decomposition",
    "DeepPosterior",
    "DenseNormal",
    "DiagonalNormal",
    "FunctionPosterior",
    "JointBlock",
    "MeanOnlyNormal",
    "MixedPaths",
    "MixedPosterior",
    "Mixture",
    "PathMixture",
    "Paths",
    "Posterior",
    "PosteriorMixture",
    "ScaledProjection",
    "WhitenedPrior",
    "exact_variance",
    "gaussian_optimum",
    "learned_blocks",
    "local_correction",
    "natural_gradient",
    "square_tril",
    "update",
    "whitened_mean",
    "whitened_variance",
]
