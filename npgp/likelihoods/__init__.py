"""Observation models p(y | f) of one latent value or several, and their expectations under a Gaussian.

A likelihood knows four things about f ~ N(mean, variance): the expected log-likelihood, its curvature in the variance
(the site precision of a certified conditional), the log of the averaged likelihood, and the moments of y. Some have
closed forms for some likelihoods; otherwise they are integrals over one dimension (:mod:`npgp.likelihoods.quadrature`).
:func:`quadrature_error` measures what a rule leaves.

Which bound holds rests on how log p(y | f) curves in f: each class says why it is concave, or that it is not, and its
``proof`` says so to the code.
"""

from npgp.likelihoods.base import Likelihood, quadrature_error
from npgp.likelihoods.classes import Bernoulli, Ordinal
from npgp.likelihoods.columns import Columns
from npgp.likelihoods.continuous import Exponential, Gamma, Gaussian, Laplace, StudentT
from npgp.likelihoods.counts import NegativeBinomial, Poisson
from npgp.likelihoods.factorized import Factorized, as_likelihood
from npgp.likelihoods.heteroscedastic import HeteroscedasticGaussian
from npgp.likelihoods.quadrature import NUM_NODES
from npgp.likelihoods.softmax import Softmax
from npgp.likelihoods.survival import Weibull

__all__ = [
    "NUM_NODES",
    "Bernoulli",
    "Columns",
    "Exponential",
    "Factorized",
    "Gamma",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Laplace",
    "Likelihood",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Softmax",
    "StudentT",
    "Weibull",
    "as_likelihood",
    "quadrature_error",
]
