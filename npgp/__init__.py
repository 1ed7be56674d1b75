"""Sparse Gaussian processes as building blocks of NumPyro programs."""

from npgp import datasets, features, gplvm, inducing, kernels, likelihoods
from npgp.collapsed.approximations import ApproximateGP
from npgp.collapsed.certificates import Certificate, certificate
from npgp.collapsed.gaussian import CollapsedGP, exact_log_evidence, upper_bound
from npgp.collapsed.uncertain import UncertainInputGP
from npgp.features import Activations, Points, SphericalHarmonics
from npgp.gplvm import BayesianGPLVM, CollapsedGPLVM, pca_start
from npgp.inducing.levels import choose_levels
from npgp.io.inference_data import to_arviz
from npgp.io.saving import load, save
from npgp.io.standardize import Standardizer
from npgp.kernels import (
    RBF,
    ArcCosine,
    Constant,
    Coregion,
    Cosine,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    RationalQuadratic,
    White,
    at_outputs,
)
from npgp.likelihoods import Bernoulli, Columns, Gaussian, HeteroscedasticGaussian, Poisson, Softmax, StudentT, Weibull
from npgp.model.draw import Function
from npgp.model.guides import AutoSparseGP
from npgp.model.latent import Latent
from npgp.model.observation import joint, observe
from npgp.model.plates import plate
from npgp.model.posteriors import posterior
from npgp.model.row_params import row_param
from npgp.model.sampling import sample
from npgp.model.sparse_gp import SparseGP
from npgp.model.vnngp import VNNGP
from npgp.neighbors.nngp import NNGP, ResponseNNGP, WhitenNNGP
from npgp.neighbors.search import Neighbors, nearest, nearest_before, order_sites
from npgp.pytrees import pytree
from npgp.sparse.conditionals import Conditional, Full, Grouped, Prior, Published, Shared, Tight
from npgp.sparse.groups import Groups, consecutive, kmeans_groups, median_split
from npgp.training import (
    Checkpoints,
    Monitor,
    NonFiniteLossError,
    Parquet,
    Sharding,
    Stream,
    adam,
    evaluate,
    fit,
    row_adam,
)
from npgp.training.row_tables import RowOptimizer
from npgp.variational.corrections import exact_variance, local_correction
from npgp.variational.mixtures import MixedPaths, MixedPosterior
from npgp.variational.natural import natural_gradient
from npgp.variational.paths import Paths
from npgp.variational.posterior import Decomposition, Posterior

__all__ = [
    "NNGP",
    "RBF",
    "VNNGP",
    "Activations",
    "ApproximateGP",
    "ArcCosine",
    "AutoSparseGP",
    "BayesianGPLVM",
    "Bernoulli",
    "Certificate",
    "Checkpoints",
    "CollapsedGP",
    "CollapsedGPLVM",
    "Columns",
    "Conditional",
    "Constant",
    "Coregion",
    "Cosine",
    "Decomposition",
    "Full",
    "Function",
    "Gaussian",
    "Grouped",
    "Groups",
    "HeteroscedasticGaussian",
    "Latent",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "MixedPaths",
    "MixedPosterior",
    "Monitor",
    "Neighbors",
    "NonFiniteLossError",
    "Parquet",
    "Paths",
    "Periodic",
    "Points",
    "Poisson",
    "Polynomial",
    "Posterior",
    "Prior",
    "Published",
    "RationalQuadratic",
    "ResponseNNGP",
    "RowOptimizer",
    "Sharding",
    "Shared",
    "Softmax",
    "SparseGP",
    "SphericalHarmonics",
    "Standardizer",
    "Stream",
    "StudentT",
    "Tight",
    "UncertainInputGP",
    "Weibull",
    "White",
    "WhitenNNGP",
    "adam",
    "at_outputs",
    "certificate",
    "choose_levels",
    "consecutive",
    "datasets",
    "evaluate",
    "exact_log_evidence",
    "exact_variance",
    "features",
    "fit",
    "gplvm",
    "inducing",
    "joint",
    "kernels",
    "kmeans_groups",
    "likelihoods",
    "load",
    "local_correction",
    "median_split",
    "natural_gradient",
    "nearest",
    "nearest_before",
    "observe",
    "order_sites",
    "pca_start",
    "plate",
    "posterior",
    "pytree",
    "row_adam",
    "row_param",
    "sample",
    "save",
    "to_arviz",
    "upper_bound",
]

__version__ = "0.1.0"
