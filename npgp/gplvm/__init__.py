"""The Bayesian GPLVM: GPs whose inputs are latent."""

from npgp.gplvm.model import BayesianGPLVM
from npgp.gplvm.start import Start, pca_start

__all__ = ["BayesianGPLVM", "Start", "pca_start"]
