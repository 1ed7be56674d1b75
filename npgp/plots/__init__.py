"""Pictures of fitted models, with matplotlib (``pip install npgp[plots]``). Each function draws one figure."""

from npgp.plots.figures import COLORS, subplots
from npgp.plots.fits import plot_convergence, plot_decomposition, plot_elbo, plot_fit, plot_variance
from npgp.plots.latents import plot_latents, plot_relevance
from npgp.plots.posteriors import compare_posteriors
from npgp.plots.spectra import plot_spectra
from npgp.plots.tables import plot_images, plot_imputation, plot_imputed_images, plot_reconstruction

__all__ = [
    "COLORS",
    "compare_posteriors",
    "plot_convergence",
    "plot_decomposition",
    "plot_elbo",
    "plot_fit",
    "plot_images",
    "plot_imputation",
    "plot_imputed_images",
    "plot_latents",
    "plot_reconstruction",
    "plot_relevance",
    "plot_spectra",
    "plot_variance",
    "subplots",
]
