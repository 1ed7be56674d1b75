"""Sparse Gaussian processes as building blocks of NumPyro programs."""

import os
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jaxlib

from npgp import conditionals, datasets, features, gplvm, inducing, kernels, likelihoods, neighbors, training
from npgp.collapsed import ApproximateGP, CollapsedGP, certificate
from npgp.gplvm import BayesianGPLVM
from npgp.inference import infer
from npgp.io import Standardizer, load, save, to_arviz
from npgp.kernels import RBF, Matern32, Matern52
from npgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from npgp.model import (
    VNNGP,
    AutoSparseGP,
    DeepGP,
    Layer,
    SparseGP,
    joint,
    observe,
    plate,
    posterior,
    sample,
    tighten,
)
from npgp.programs.backend import wrong_sums
from npgp.pytrees import pytree
from npgp.training import adam, check_posterior, evaluate, fit, fit_collapsed
from npgp.variational import local_correction, natural_gradient

if TYPE_CHECKING:
    from npgp import plots

__all__ = [
    "RBF",
    "VNNGP",
    "ApproximateGP",
    "AutoSparseGP",
    "BayesianGPLVM",
    "Bernoulli",
    "CollapsedGP",
    "DeepGP",
    "Gaussian",
    "Layer",
    "Matern32",
    "Matern52",
    "Poisson",
    "SparseGP",
    "Standardizer",
    "StudentT",
    "adam",
    "certificate",
    "check_posterior",
    "conditionals",
    "datasets",
    "evaluate",
    "features",
    "fit",
    "fit_collapsed",
    "gplvm",
    "inducing",
    "infer",
    "joint",
    "kernels",
    "likelihoods",
    "load",
    "local_correction",
    "natural_gradient",
    "neighbors",
    "observe",
    "plate",
    "plots",
    "posterior",
    "pytree",
    "sample",
    "save",
    "tighten",
    "to_arviz",
    "training",
]

__version__ = "0.2.0"

if (_wrong := wrong_sums(jaxlib.__version__, os.environ.get("XLA_FLAGS", ""))) is not None:
    warnings.warn(_wrong, RuntimeWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    if name == "plots":  # whose matplotlib is an extra, and slow to import
        return import_module("npgp.plots")
    raise AttributeError(f"module 'npgp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
