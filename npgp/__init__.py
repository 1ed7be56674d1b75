"""Sparse Gaussian processes as building blocks of NumPyro programs."""

from npgp import datasets, gplvm, inducing, kernels, likelihoods
from npgp.certificates import Certificate, certificate
from npgp.collapsed import CollapsedGP, exact_log_evidence, upper_bound
from npgp.component import Function, SparseGP, plate
from npgp.conditionals import is_certified
from npgp.corrections import exact_variance, local_correction
from npgp.features import Points
from npgp.gplvm import BayesianGPLVM, CollapsedGPLVM, pca_start
from npgp.groups import Groups, consecutive, kmeans_groups, median_split
from npgp.guide import AutoSparseGP, posterior
from npgp.inference_data import to_arviz
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
from npgp.latent import Latent
from npgp.likelihoods import Bernoulli, Columns, Gaussian, HeteroscedasticGaussian, Poisson, Softmax, StudentT, Weibull
from npgp.natural import natural_gradient
from npgp.outputs import MixedPaths, MixedPosterior
from npgp.posteriors import Decomposition, Paths, Posterior
from npgp.rows import RowOptimizer, row_param
from npgp.saving import load, save
from npgp.statements import joint, observe, sample
from npgp.training import NonFiniteLossError, adam, evaluate, fit, row_adam
from npgp.uncertain import UncertainInputGP

__all__ = [
    "RBF",
    "ArcCosine",
    "AutoSparseGP",
    "BayesianGPLVM",
    "Bernoulli",
    "Certificate",
    "CollapsedGP",
    "CollapsedGPLVM",
    "Columns",
    "Constant",
    "Coregion",
    "Cosine",
    "Decomposition",
    "Function",
    "Gaussian",
    "Groups",
    "HeteroscedasticGaussian",
    "Latent",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "MixedPaths",
    "MixedPosterior",
    "NonFiniteLossError",
    "Paths",
    "Periodic",
    "Points",
    "Poisson",
    "Polynomial",
    "Posterior",
    "RationalQuadratic",
    "RowOptimizer",
    "Softmax",
    "SparseGP",
    "StudentT",
    "UncertainInputGP",
    "Weibull",
    "White",
    "adam",
    "at_outputs",
    "certificate",
    "consecutive",
    "datasets",
    "evaluate",
    "exact_log_evidence",
    "exact_variance",
    "fit",
    "gplvm",
    "inducing",
    "is_certified",
    "joint",
    "kernels",
    "kmeans_groups",
    "likelihoods",
    "load",
    "local_correction",
    "median_split",
    "natural_gradient",
    "observe",
    "pca_start",
    "plate",
    "posterior",
    "row_adam",
    "row_param",
    "sample",
    "save",
    "to_arviz",
    "upper_bound",
]

__version__ = "0.1.0"
