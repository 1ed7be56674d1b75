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
from npgp.likelihoods.continuous import AsymmetricLaplace, Exponential, Gamma, Gaussian, Laplace, StudentT, VonMises
from npgp.likelihoods.counts import Binomial, NegativeBinomial, Poisson
from npgp.likelihoods.factorized import Factorized, as_likelihood
from npgp.likelihoods.heteroscedastic import HeteroscedasticGaussian
from npgp.likelihoods.intervals import CensoredGaussian, TruncatedGaussian
from npgp.likelihoods.proportions import Beta, BetaBinomial
from npgp.likelihoods.quadrature import NUM_NODES
from npgp.likelihoods.softmax import Softmax
from npgp.likelihoods.survival import Weibull
from npgp.likelihoods.tweedie import Tweedie
from npgp.likelihoods.zeros import Hurdle, ZeroInflated

__all__ = [
    "NUM_NODES",
    "AsymmetricLaplace",
    "Bernoulli",
    "Beta",
    "BetaBinomial",
    "Binomial",
    "CensoredGaussian",
    "Columns",
    "Exponential",
    "Factorized",
    "Gamma",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Hurdle",
    "Laplace",
    "Likelihood",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Softmax",
    "StudentT",
    "TruncatedGaussian",
    "Tweedie",
    "VonMises",
    "Weibull",
    "ZeroInflated",
    "as_likelihood",
    "quadrature_error",
]
