"""GPs in NumPyro models: components, their draws, the statements that use them, and guides."""

from npgp.model.deep import DeepFunction, DeepGP, Layer, linear_mean
from npgp.model.function import Function
from npgp.model.guides import AutoSparseGP
from npgp.model.latent import Latent
from npgp.model.observation import LatentObservation, joint, observe, tighten
from npgp.model.posteriors import posterior
from npgp.model.row_params import row_param
from npgp.model.sampling import sample
from npgp.model.sites import plate
from npgp.model.sparse_gp import SparseGP
from npgp.model.vnngp import VNNGP

__all__ = [
    "VNNGP",
    "AutoSparseGP",
    "DeepFunction",
    "DeepGP",
    "Function",
    "Latent",
    "LatentObservation",
    "Layer",
    "SparseGP",
    "joint",
    "linear_mean",
    "observe",
    "plate",
    "posterior",
    "row_param",
    "sample",
    "tighten",
]
