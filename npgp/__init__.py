"""Sparse Gaussian processes as building blocks of NumPyro programs."""

from npgp import datasets, kernels, likelihoods
from npgp.collapsed import CollapsedGP, exact_log_evidence
from npgp.component import Function, SparseGP, plate
from npgp.features import Points
from npgp.gplvm import BayesianGPLVM, pca_start
from npgp.guide import AutoSparseGP, posterior
from npgp.kernels import (
    RBF,
    ArcCosine,
    Constant,
    Cosine,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    RationalQuadratic,
    White,
)
from npgp.latent import Latent
from npgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from npgp.posteriors import Posterior
from npgp.statements import observe, sample
from npgp.training import NonFiniteLossError, adam, evaluate, fit

__all__ = [
    "RBF",
    "ArcCosine",
    "AutoSparseGP",
    "BayesianGPLVM",
    "Bernoulli",
    "CollapsedGP",
    "Constant",
    "Cosine",
    "Function",
    "Gaussian",
    "Latent",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "NonFiniteLossError",
    "Periodic",
    "Points",
    "Poisson",
    "Polynomial",
    "Posterior",
    "RationalQuadratic",
    "SparseGP",
    "StudentT",
    "White",
    "adam",
    "datasets",
    "evaluate",
    "exact_log_evidence",
    "fit",
    "kernels",
    "likelihoods",
    "observe",
    "pca_start",
    "plate",
    "posterior",
    "sample",
]

__version__ = "0.1.0"
