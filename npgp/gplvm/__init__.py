"""The Bayesian GPLVM: GPs whose inputs are latent."""

from npgp.gplvm.guides import Encoder, FreeNormal, LatentGuide, Point
from npgp.gplvm.model import BayesianGPLVM
from npgp.gplvm.priors import ClassNormal, Dynamical, LatentPrior, NormalMixture, standard_normal
from npgp.gplvm.restarts import Restarts, fit_restarts
from npgp.gplvm.start import Start, pca_start, random_start

__all__ = [
    "BayesianGPLVM",
    "ClassNormal",
    "Dynamical",
    "Encoder",
    "FreeNormal",
    "LatentGuide",
    "LatentPrior",
    "NormalMixture",
    "Point",
    "Restarts",
    "Start",
    "fit_restarts",
    "pca_start",
    "random_start",
    "standard_normal",
]
