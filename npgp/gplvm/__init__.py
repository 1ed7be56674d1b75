"""The Bayesian GPLVM: GPs whose inputs are latent."""

from npgp.gplvm.collapsed import CollapsedFit, CollapsedGPLVM
from npgp.gplvm.guides import (
    ClassNormal,
    Dynamical,
    Encoder,
    FreeNormal,
    LatentGuide,
    LatentPrior,
    NormalMixture,
    Point,
    RowNormal,
    standard_normal,
)
from npgp.gplvm.latent_search import Modes
from npgp.gplvm.model import BayesianGPLVM
from npgp.gplvm.new_rows import NewRows, infer_latents
from npgp.gplvm.race import GPLVMFit, fit
from npgp.gplvm.relevance import (
    CanonicalLatents,
    canonical_latents,
    effective_dimensions,
    nearest_neighbor_errors,
    predictive_variance,
    relevance,
    sensitivity,
)
from npgp.gplvm.start import Start, pca_start, random_start

__all__ = [
    "BayesianGPLVM",
    "CanonicalLatents",
    "ClassNormal",
    "CollapsedFit",
    "CollapsedGPLVM",
    "Dynamical",
    "Encoder",
    "FreeNormal",
    "GPLVMFit",
    "LatentGuide",
    "LatentPrior",
    "Modes",
    "NewRows",
    "NormalMixture",
    "Point",
    "RowNormal",
    "Start",
    "canonical_latents",
    "effective_dimensions",
    "fit",
    "infer_latents",
    "nearest_neighbor_errors",
    "pca_start",
    "predictive_variance",
    "random_start",
    "relevance",
    "sensitivity",
    "standard_normal",
]
